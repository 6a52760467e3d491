"use strict";
const all = (query, root = document) => [...root.querySelectorAll(query)];
const make = (name, textContent, className = "") => Object.assign(document.createElement(name), { textContent, className });
const data = JSON.parse(all("#data")[0].textContent), [tip] = all("#tip"), hiddenRuns = new Set();

// describe(x, y) returns { position, title, lines } for a point of the drawing, or nothing.
function hover(svg, mark, describe) {
  const leave = () => { tip.hidden = true; mark.classList.remove("on"); };
  svg.onpointerleave = leave;
  svg.onpointermove = event => {
    const pointer = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const shown = describe(pointer.x, pointer.y);
    if (!shown) return leave();
    mark.setAttribute("transform", `translate(${shown.position})`);
    mark.classList.add("on");
    tip.replaceChildren(make("b", shown.title), ...shown.lines);
    tip.hidden = false;
    const width = tip.offsetWidth, right = event.clientX + 16;
    const lowest = innerHeight - tip.offsetHeight - 8;
    tip.style.left = (right + width > innerWidth ? event.clientX - width - 12 : right) + "px";
    tip.style.top = Math.max(4, Math.min(event.clientY + 16, lowest)) + "px";
  };
}

// Line charts: the values of all visible runs at the nearest x.
function chartLine(line, k) {
  const p = make("p", "", line.mark);
  p.append(make("i", "", "key"), line.name, make("em", line.values[k]));
  return p;
}
for (const svg of all("svg[data-chart]")) {
  const { x: xs, heads, lines } = data[svg.dataset.chart];
  hover(svg, svg.querySelector(".guide"), x => {
    if (!xs.length) return null;
    const distances = xs.map(position => Math.abs(position - x));
    const k = distances.indexOf(Math.min(...distances));
    const visible = lines.filter(line => line.values[k] && !hiddenRuns.has(line.run));
    return { position: xs[k], title: heads[k], lines: visible.map(line => chartLine(line, k)) };
  });
}

// Pictures of clients: the cell under the pointer.
for (const svg of all("svg[data-grid]")) {
  const grid = data[svg.dataset.grid], [left, top, width, height] = grid.box;
  hover(svg, svg.querySelector(".mark"), (x, y) => {
    const i = Math.floor((x - left) / width), j = Math.floor((y - top) / height);
    if (!(i in grid.names && j in grid.rows)) return null;
    const texts = grid.columns[grid.column_of[i]][j].map(k => grid.texts[k]);
    return {
      position: [left + i * width, top + j * height],
      title: `client ${grid.names[i]}, ${grid.row} ${grid.rows[j]}`,
      lines: [make("p", texts.join(", ")), make("p", grid.about[i], "faint")],
    };
  });
}

// Pictures of devices: the nearest spot; without an x, a spot is as wide as the picture.
for (const svg of all("svg[data-spots]")) {
  const spots = data[svg.dataset.spots], { x: xs, y: ys, reach } = spots;
  const { titles, lines } = spots.texts_of ? data[spots.texts_of] : spots;
  hover(svg, svg.querySelector(".mark"), (x, y) => {
    const distances = ys.map((position, k) => Math.hypot(xs.length ? xs[k] - x : 0, position - y));
    const nearest = Math.min(...distances), k = distances.indexOf(nearest);
    if (!(nearest <= reach)) return null;
    return { position: [xs.length ? xs[k] : 0, ys[k]], title: titles[k], lines: lines[k].map(line => make("p", line)) };
  });
}

// Buttons that hide a run from the charts.
for (const button of all(".toggle")) button.onclick = () => {
  const run = +button.dataset.run, hide = !hiddenRuns.delete(run);
  if (hide) hiddenRuns.add(run);
  button.ariaPressed = !hide;
  all(`figure .r${run}`).forEach(element => element.toggleAttribute("hidden", hide));
};

// Headings that sort a table; unknown numbers come last.
const compareTexts = new Intl.Collator(undefined, { numeric: true }).compare;
for (const button of all(".sort")) button.onclick = () => {
  const th = button.parentNode, body = th.closest("table").tBodies[0];
  const numeric = th.className !== "", ascending = th.ariaSort !== "ascending";
  const key = row => row.cells[th.cellIndex].textContent;
  const number = row => parseFloat(key(row).replace(/,/g, ""));
  const unknown = row => numeric && isNaN(number(row)) ? 1 : 0;
  const order = numeric ? (a, b) => number(a) - number(b) : (a, b) => compareTexts(key(a), key(b));
  all("th", th.parentNode).forEach(head => head.removeAttribute("aria-sort"));
  th.ariaSort = ascending ? "ascending" : "descending";
  const sorted = [...body.rows].sort((a, b) => unknown(a) - unknown(b) || (ascending ? order(a, b) : order(b, a)));
  body.append(...sorted);
};

// Search fields: rows whose client (column 0) or layers (column 2) contain the text.
for (const input of all(".find")) input.oninput = () => {
  const rows = all(`#${input.dataset.table} tbody tr`), wanted = input.value.trim().toLowerCase();
  for (const row of rows) {
    row.hidden = ![0, 2].some(k => row.cells[k].textContent.toLowerCase().includes(wanted));
  }
  input.nextElementSibling.value = `${rows.filter(row => !row.hidden).length} of ${rows.length} clients`;
};
