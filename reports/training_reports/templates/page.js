// What the parts of a page need in a browser.
function within(root, selector) {
  return [...(root.matches?.(selector) ? [root] : []), ...root.querySelectorAll(selector)];
}

function enliven(root) {
  for (const section of within(root, ".elements")) arrange(section);
  // A table that is wider than the window says that it scrolls.
  for (const table of within(root, ".table")) {
    const hint = document.createElement("p");
    hint.className = "scrolls";
    hint.hidden = true;
    hint.textContent = "More columns to the right: scroll the table sideways. \u2192";
    table.before(hint);
    new ResizeObserver(() => { hint.hidden = table.scrollWidth <= table.clientWidth + 1; }).observe(table);
  }
}

function draw(plot) {
  const figure = JSON.parse(plot.parentElement.querySelector('script[type="application/json"]').textContent);
  // On a touch screen, a drag should scroll the page, not zoom.
  if (matchMedia("(pointer: coarse)").matches) figure.layout.dragmode = false;
  figure.layout.uirevision = "kept"; // a zoom outlives new data
  Plotly.react(plot, figure.data, figure.layout, { responsive: true, displayModeBar: false });
}

function explain(error) {
  for (const plot of document.querySelectorAll(".plot")) {
    plot.textContent = `This browser cannot draw the figure; a newer one can (${error}).`;
  }
}
