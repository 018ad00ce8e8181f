// A report's views, from the data that stands in it.

for (const place of document.querySelectorAll("[data-view]")) {
  const data = JSON.parse(document.getElementById(place.dataset.view).textContent);
  if (data.kind === "depth") {
    const view = new DepthView(place, data.label);
    view.show(data.depth);
    view.showTotals(data.depth);
  } else new CurvesView(place, Object.keys(data.runs).length > 1 ? "flops" : "step").show(data.runs);
}
