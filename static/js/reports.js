// Charts of the reports: drawn by Plotly in the colours of the page; without script the page keeps its plain charts.
"use strict";
(function () {
  function colours(figure) {
    const style = getComputedStyle(document.documentElement);
    const text = style.getPropertyValue("--pico-color").trim() || "#222";
    const line = style.getPropertyValue("--pico-muted-border-color").trim() || "#ccc";
    const layout = JSON.parse(JSON.stringify(figure.layout));
    layout.font = { color: text, family: "inherit", size: 13 };
    layout.hoverlabel = { font: { family: "inherit" } };
    ["xaxis", "yaxis"].forEach(function (axis) {
      layout[axis] = Object.assign({ gridcolor: line, linecolor: line, zerolinecolor: line }, layout[axis]);
    });
    return layout;
  }
  function draw(box) {
    const figure = JSON.parse(document.getElementById(box.dataset.reportChart).textContent);
    const small = box.classList.contains("small");
    const layout = colours(figure);
    if (small) { layout.showlegend = false; layout.margin = { l: 48, r: 8, t: 8, b: 36 }; }
    box.textContent = "";
    window.Plotly.newPlot(box, figure.data, layout, {
      responsive: true, displaylogo: false, displayModeBar: small ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
      toImageButtonOptions: { format: "png", scale: 2, filename: document.title.replace(/\W+/g, "-") }
    });
  }
  function all() { document.querySelectorAll("[data-report-chart]").forEach(draw); }
  window.addEventListener("load", function () {
    if (!window.Plotly) { return; }
    all();
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
    document.querySelectorAll("[data-report-png]").forEach(function (button) {
      button.hidden = false;
      button.addEventListener("click", function () {
        document.querySelectorAll("[data-report-chart]").forEach(function (box, place) {
          window.Plotly.downloadImage(box, { format: "png", scale: 2, width: 1100, height: 560,
            filename: document.title.replace(/\W+/g, "-") + "-" + (place + 1) });
        });
      });
    });
  });
})();
