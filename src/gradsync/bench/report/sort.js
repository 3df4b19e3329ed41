"use strict";
// Headings of tables become buttons that sort. Without this script the tables are as they are.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    button.addEventListener("click", () => sortBy(table, heads, column));
    head.replaceChildren(button);
  });
}

function sortBy(table, heads, column) {
  const falls = heads[column].getAttribute("aria-sort") === "ascending";
  heads.forEach((head) => head.removeAttribute("aria-sort"));
  heads[column].setAttribute("aria-sort", falls ? "descending" : "ascending");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  rows.sort((one, other) => {
    const [a, b] = [one.cells[column], other.cells[column]];
    if (!a.textContent || !b.textContent) {
      return !a.textContent - !b.textContent; // empty cells are last either way
    }
    return (falls ? -1 : 1) * compare(a, b);
  });
  body.append(...rows);
}

function compare(a, b) {
  if (a.dataset.value !== undefined && b.dataset.value !== undefined) {
    return Number(a.dataset.value) - Number(b.dataset.value);
  }
  return a.textContent.localeCompare(b.textContent, undefined, { numeric: true });
}
