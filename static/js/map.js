// The map of all GPUs on one canvas. Shape says the state, colour the team: an empty cell is free, a filled one in use,
// a crossed one down, a struck one drained; by activity, a cell is filled as high as the device is busy.
"use strict";
(function () {
  const canvas = document.getElementById("map");
  if (!canvas) { return; }
  const hint = document.getElementById("map-hint");
  const legend = document.getElementById("map-legend");
  const mode = document.getElementById("map-mode");
  const COLOURS = ["#0b7a75", "#c2571a", "#5b5bd6", "#a8327d", "#4d7c0f", "#b58900", "#1d6fb8", "#a3423c", "#6b7280", "#7c4a21"];
  let data = null;
  let places = [];

  function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

  function layout(width) {
    const groups = new Map();
    let most = 1;
    data.nodes.forEach(function (node) {
      if (!groups.has(node[2])) { groups.set(node[2], []); }
      groups.get(node[2]).push(node);
      most = Math.max(most, node[5].length);
    });
    const cell = data.nodes.length > 400 ? 5 : data.nodes.length > 60 ? 8 : 14;
    const wide = most * cell + 6, high = cell + 5;
    places = [];
    const labels = [];
    let y = 2;
    groups.forEach(function (nodes, name) {
      labels.push([name, y + 11]);
      y += 16;
      const columns = Math.max(1, Math.floor(width / wide));
      nodes.forEach(function (node, at) {
        places.push({ node: node, x: (at % columns) * wide, y: y + Math.floor(at / columns) * high, cell: cell });
      });
      y += Math.ceil(nodes.length / columns) * high + 6;
    });
    return { height: y, labels: labels };
  }

  function cellOf(pen, x, y, size, node, gpu, byActivity, quiet, bad) {
    pen.strokeStyle = quiet;
    pen.strokeRect(x + 0.5, y + 0.5, size - 1.5, size - 1.5);
    const state = data.states[node[4]];
    if (gpu !== 0 && gpu[0] >= 0) {
      pen.fillStyle = byActivity ? COLOURS[0] : COLOURS[gpu[0] % COLOURS.length];
      const part = byActivity ? (gpu[2] === null ? 0 : gpu[2]) : gpu[1];
      const high = Math.max(part > 0 ? 1 : 0, (size - 1) * part);
      pen.fillRect(x, y + size - 1 - high, size - 1, high);
    }
    if (gpu === 0 || state !== "up") {
      pen.strokeStyle = gpu === 0 || state === "down" ? bad : quiet;
      pen.beginPath();
      pen.moveTo(x, y + size - 1); pen.lineTo(x + size - 1, y);
      if (gpu === 0 || state === "down") { pen.moveTo(x, y); pen.lineTo(x + size - 1, y + size - 1); }
      pen.stroke();
    }
  }

  function draw() {
    const width = canvas.parentElement.clientWidth, ratio = window.devicePixelRatio || 1;
    const plan = layout(width);
    canvas.width = width * ratio; canvas.height = plan.height * ratio;
    canvas.style.height = plan.height + "px";
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = style("--quiet");
    plan.labels.forEach(function (label) { pen.fillText(label[0], 0, label[1]); });
    const byActivity = mode.value === "activity", quiet = style("--quiet"), bad = style("--bad");
    places.forEach(function (place) {
      place.node[5].forEach(function (gpu, at) {
        cellOf(pen, place.x + at * place.cell, place.y, place.cell, place.node, gpu, byActivity, quiet, bad);
      });
    });
    key(byActivity);
    canvas.dataset.drawn = String(places.length);
  }

  function key(byActivity) {
    legend.replaceChildren();
    const texts = ["□ free", "■ in use", "╳ down or broken", "╱ drained"];
    if (byActivity) { texts[1] = "▄ filled as high as it is busy; empty also where not measured"; }
    texts.forEach(function (text) { const item = document.createElement("li"); item.textContent = text; legend.append(item); });
    if (byActivity) { return; }
    data.teams.slice(0, 40).forEach(function (name, at) {
      const item = document.createElement("li"), sign = document.createElement("span");
      sign.textContent = "■ "; sign.style.color = COLOURS[at % COLOURS.length]; sign.setAttribute("aria-hidden", "true");
      item.append(sign, name);
      legend.append(item);
    });
  }

  function under(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    return places.find(function (place) {
      return y >= place.y && y < place.y + place.cell + 3 && x >= place.x && x < place.x + place.node[5].length * place.cell;
    });
  }

  function words(place, event) {
    const at = Math.floor((event.clientX - canvas.getBoundingClientRect().left - place.x) / place.cell);
    const gpu = place.node[5][at];
    let text = place.node[2] + " · " + place.node[1] + " (" + place.node[3] + "), " + data.states[place.node[4]];
    if (gpu === 0) { return text + " · GPU " + at + ": broken"; }
    text += " · GPU " + at + ": " + (gpu[0] < 0 ? "free" : data.teams[gpu[0]]);
    if (gpu[0] >= 0) { text += gpu[2] === null ? ", activity not measured" : ", " + Math.round(gpu[2] * 100) + " % busy"; }
    return text;
  }

  canvas.addEventListener("mousemove", function (event) {
    const place = under(event);
    canvas.style.cursor = place ? "pointer" : "default";
    hint.textContent = place ? words(place, event) : "Point at a GPU to see who has it; click to open its node.";
  });
  canvas.addEventListener("click", function (event) {
    const place = under(event);
    if (place) { window.location.assign(canvas.dataset.node.replace("/0/", "/" + place.node[0] + "/")); }
  });
  mode.addEventListener("change", draw);
  window.addEventListener("resize", function () { if (data) { draw(); } });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", function () { if (data) { draw(); } });

  async function load() {
    if (!document.hidden) {
      try {
        const answer = await fetch(canvas.dataset.source, { headers: { Accept: "application/json" } });
        if (answer.ok) { data = await answer.json(); draw(); }
      } catch (error) { hint.textContent = "The map could not be loaded; it is tried again in a moment."; }
    }
    setTimeout(load, 15000);
  }
  load();
})();
