// Draws the figures that the page carries, in the colours of the theme, and again when the theme changes.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");
  const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

  const themed = (figure) => {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const layout = structuredClone(figure.layout);
    Object.assign(layout, {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("--text"), family: "system-ui, sans-serif", size: narrow.matches ? 11 : 13 },
      margin: { l: 8, r: 8, t: 8, b: 8 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal" },
      hoverlabel: { bgcolor: color("--bg-soft"), bordercolor: color("--line"), font: { color: color("--text") } },
      modebar: { color: color("--text-soft"), activecolor: color("--accent"), bgcolor: "rgba(0,0,0,0)", orientation: "v" },
      dragmode: narrow.matches ? false : "zoom", // a finger scrolls the page
    });
    for (const key of Object.keys(layout).filter((name) => /^[xy]axis\d*$/.test(name))) {
      layout[key] = { gridcolor: color("--line"), linecolor: color("--line"), zerolinecolor: color("--line"), ...layout[key] };
    }
    for (const shape of layout.shapes ?? []) shape.line.color = color("--text-soft");
    const data = structuredClone(figure.data);
    for (const trace of data.filter((one) => one.type === "heatmap")) {
      trace.colorscale = [[0, color("--heat-low")], [0.5, color("--heat-middle")], [1, color("--heat-high")]];
    }
    return { data, layout, config };
  };

  const draw = () => {
    for (const place of document.querySelectorAll("[data-figure]")) {
      Plotly.react(place, themed(figures[place.dataset.figure]));
      // The label says what is to be seen, the table has the numbers: hundreds of ticks read aloud would say neither.
      for (const drawing of place.querySelectorAll(".main-svg")) drawing.setAttribute("aria-hidden", "true");
    }
  };
  draw();
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
})();
