// Small things that need script; every page works without it.
"use strict";
(function () {
  // "all" box of a table ticks the others
  document.addEventListener("change", function (event) {
    const all = event.target.closest("[data-all]");
    if (all) {
      document.querySelectorAll('input[name="' + all.dataset.all + '"]').forEach(function (box) { box.checked = all.checked; });
    }
  });
  // rows that somebody is ticking are not replaced under the hand
  document.addEventListener("htmx:beforeRequest", function (event) {
    const rows = event.target.closest && event.target.closest("[data-keep-ticks]");
    if (rows && rows.querySelector("input:checked")) { event.preventDefault(); }
  });
  // a live log: reads on from where it stands, keeps the end in view while it is there
  document.querySelectorAll("[data-log]").forEach(function (pre) {
    let offset = Number(pre.dataset.offset);
    async function more() {
      if (document.hidden) { setTimeout(more, 3000); return; }
      try {
        const answer = await fetch(pre.dataset.log + "?offset=" + offset, { headers: { Accept: "application/json" } });
        if (answer.ok) {
          const chunk = await answer.json();
          if (chunk.text) {
            const atEnd = pre.scrollHeight - pre.scrollTop - pre.clientHeight < 40;
            pre.append(document.createTextNode(chunk.text));
            if (pre.textContent.length > 2000000) { pre.textContent = pre.textContent.slice(-1000000); }
            if (atEnd) { pre.scrollTop = pre.scrollHeight; }
          }
          offset = chunk.end;
          if (chunk.finished) { return; }
        }
      } catch (error) { /* the next try comes anyway */ }
      setTimeout(more, 2000);
    }
    pre.scrollTop = pre.scrollHeight;
    if (pre.dataset.finished !== "true") { setTimeout(more, 1500); }
  });
  // charts: figures come as JSON from the server
  window.addEventListener("load", function () {
    document.querySelectorAll("[data-figure]").forEach(function (box) {
      const source = document.getElementById(box.dataset.figure);
      if (source && window.Plotly) {
        const figure = JSON.parse(source.textContent);
        window.Plotly.newPlot(box, figure.data, figure.layout, { responsive: true, displaylogo: false });
      }
    });
  });
})();
