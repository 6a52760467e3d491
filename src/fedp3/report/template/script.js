"use strict";
const all = (query, root = document) => [...root.querySelectorAll(query)];
const make = (name, textContent, className = "") => Object.assign(document.createElement(name), { textContent, className });
const data = JSON.parse(all("#data")[0].textContent), [tip] = all("#tip"), hiddenRuns = new Set();

// describe(x, y) returns { position, title, lines } for a point of the drawing, or nothing.
function hover(svg, mark, describe) {
  const leave = () => { tip.hidden = true; mark.classList.remove("on"); };
  // A finger that is lifted leaves as well; what it tapped stays until the next tap.
  svg.onpointerleave = event => { if (event.pointerType !== "touch") leave(); };
  document.addEventListener("pointerdown", event => { if (!svg.contains(event.target)) leave(); });
  svg.onpointerdown = svg.onpointermove = event => {
    const pointer = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const shown = describe(pointer.x, pointer.y);
    if (!shown) return leave();
    mark.setAttribute("transform", `translate(${shown.position})`);
    mark.classList.add("on");
    tip.replaceChildren(make("b", shown.title), ...shown.lines);
    tip.hidden = false;
    const width = tip.offsetWidth, right = event.clientX + 16;
    const lowest = innerHeight - tip.offsetHeight - 8;
    tip.style.left = (right + width > innerWidth ? Math.max(4, event.clientX - width - 12) : right) + "px";
    tip.style.top = Math.max(4, Math.min(event.clientY + 16, lowest)) + "px";
  };
}

// The drawing for narrow screens has positions of its own, and the texts of the other one.
const described = key => ({ ...data[data[key].texts_of ?? key], ...data[key] });

// Line charts: the values of all visible runs at the nearest x.
function chartLine(line, k) {
  const p = make("p", "", line.mark);
  p.append(make("i", "", "key"), line.name, make("em", line.values[k]));
  return p;
}
for (const svg of all("svg[data-chart]")) {
  const { x: xs, heads, lines } = described(svg.dataset.chart);
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
  const grid = described(svg.dataset.grid), [left, top, width, height] = grid.box;
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
  const { x: xs, y: ys, reach, titles, lines } = described(svg.dataset.spots);
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

// Tables as files: notes become columns of their own, and numbers lose their units.
const words = text => text.replace(/\u00a0/g, " ").trim();
const noteOf = cell => words(cell.querySelector("small")?.textContent ?? "");
const valueOf = cell => words([...cell.childNodes].filter(n => n.nodeName !== "SMALL").map(n => n.textContent).join(""));
const bare = text => /^[+-]?[\d,]*\.?\d+( %)?$/.test(text) ? text.replace(/[+,% ]/g, "") : text.replace(/^[=+@-]+/, "");
const quoted = text => /[",\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
function asCsv(table) {
  const rows = [...table.tBodies[0].rows].filter(row => !row.hidden), lines = [[], ...rows.map(() => [])];
  [...table.tHead.rows[0].cells].forEach((head, k) => {
    const cells = rows.map(row => row.cells[k]), values = cells.map(valueOf), notes = cells.map(noteOf);
    const percent = values.length && values.every(value => / %$/.test(value) || value === "–");
    const name = head.textContent.trim();
    [[name + (percent ? " (%)" : ""), ...values.map(bare)], ...(notes.some(Boolean) ? [[`${name}, note`, ...notes.map(bare)]] : [])]
      .forEach(column => column.forEach((text, j) => lines[j].push(quoted(text === "–" ? "" : text))));
  });
  return lines.map(line => line.join(",") + "\r\n").join("");
}
for (const button of all(".csv")) button.onclick = () => {
  const table = button.parentNode.previousElementSibling.querySelector("table");
  const link = make("a", ""), address = URL.createObjectURL(new Blob([asCsv(table)], { type: "text/csv" }));
  Object.assign(link, { href: address, download: `${button.dataset.name}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
};

// Tables that are larger than their frame say so.
function hint() {
  for (const frame of all(".scroll")) {
    const hints = [];
    if (frame.scrollWidth > frame.clientWidth + 1) hints.push("more columns →");
    if (frame.scrollHeight > frame.clientHeight + 1) hints.push("more rows ↓");
    frame.nextElementSibling.dataset.hint = hints.length ? `Scroll the table: ${hints.join(", ")}` : "";
  }
}
addEventListener("resize", hint);
all("details").forEach(element => element.addEventListener("toggle", hint));
hint();
