// Sorts and filters the table of a sweep's elements. Without it the table is as it was written: the best element first.
function arrange(section) {
  const [search, state, told] = ["input", "select", "output"].map((tag) => section.querySelector(tag));
  const body = section.querySelector("tbody");
  const headers = [...section.querySelectorAll("thead th")];
  const rows = [...body.rows].map((row) => ({
    row,
    state: row.dataset.state,
    text: row.textContent.toLowerCase().replace(/\s+/g, " "),
    // a number where the column has one; unknown values are null
    keys: [...row.cells].map((cell) => ("value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.trim())),
  }));
  headers.forEach((_, column) => {
    const isNumeric = rows.some(({ keys }) => typeof keys[column] === "number");
    for (const { keys } of rows) {
      if (isNumeric ? typeof keys[column] !== "number" : keys[column] === "\u2014") keys[column] = null;
    }
  });

  function compare(one, other, sign) {
    if (one === null || other === null) return (one === null) - (other === null); // unknown values stay last
    return sign * (typeof one === "number" ? one - other : one.localeCompare(other, "en", { numeric: true }));
  }

  function sortBy(column) {
    const order = headers[column].getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    for (const header of headers) header.removeAttribute("aria-sort");
    headers[column].setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const sorted = [...rows].sort((one, other) => compare(one.keys[column], other.keys[column], sign));
    body.append(...sorted.map(({ row }) => row));
  }

  function filter() {
    const phrases = search.value.toLowerCase().split(",").map((one) => one.trim()).filter(Boolean);
    let shown = 0;
    for (const { row, state: own, text } of rows) {
      row.hidden = !((!state.value || own === state.value) && phrases.every((one) => text.includes(one)));
      shown += !row.hidden;
    }
    told.textContent = `${shown} of ${rows.length} elements`;
  }

  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    button.addEventListener("click", () => sortBy(column));
    header.append(button);
  });
  search.addEventListener("input", filter);
  state.addEventListener("change", filter);
  section.querySelector(".choose").hidden = false;
  filter();
}
