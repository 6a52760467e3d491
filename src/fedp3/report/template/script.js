"use strict";
const all = (query, of = document) => [...of.querySelectorAll(query)];
const make = (name, textContent, className = "") => Object.assign(document.createElement(name), { textContent, className });
const data = JSON.parse(all("#data")[0].textContent), [tip] = all("#tip"), hidden = new Set();

// tell(x, y) answers where the mark goes, a heading and lines; or nothing.
function hover(svg, mark, tell) {
  const leave = () => { tip.hidden = true; mark.classList.remove("on"); };
  svg.onpointerleave = leave;
  svg.onpointermove = e => {
    const { x, y } = new DOMPoint(e.clientX, e.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const said = tell(x, y);
    if (!said) return leave();
    mark.setAttribute("transform", `translate(${said[0]})`);
    mark.classList.add("on");
    tip.replaceChildren(make("b", said[1]), ...said[2]);
    tip.hidden = false;
    const w = tip.offsetWidth, left = e.clientX + 16;
    tip.style.left = (left + w > innerWidth ? e.clientX - w - 12 : left) + "px";
    tip.style.top = Math.max(4, Math.min(e.clientY + 16, innerHeight - tip.offsetHeight - 8)) + "px";
  };
}
for (const svg of all("svg[data-chart]")) {
  const { x: xs, heads, lines } = data[svg.dataset.chart];
  hover(svg, svg.querySelector(".guide"), x => {
    const far = xs.map(at => Math.abs(at - x)), k = far.indexOf(Math.min(...far));
    return xs.length && [xs[k], heads[k], lines.filter(l => l.values[k] && !hidden.has(l.run)).map(l => {
      const p = make("p", "", l.mark);
      p.append(make("i", "", "key"), l.name, make("em", l.values[k]));
      return p;
    })];
  });
}
for (const svg of all("svg[data-grid]")) {
  const d = data[svg.dataset.grid], [left, top, w, h] = d.box;
  hover(svg, svg.querySelector(".mark"), (x, y) => {
    const i = Math.floor((x - left) / w), j = Math.floor((y - top) / h);
    return i in d.names && j in d.rows && [[left + i * w, top + j * h], `client ${d.names[i]}, ${d.row} ${d.rows[j]}`,
      [make("p", d.columns[d.of[i]][j].map(k => d.says[k]).join(", ")), make("p", d.about[i], "faint")]];
  });
}
for (const button of all(".toggle")) button.onclick = () => {
  const run = +button.dataset.run, off = !hidden.delete(run);
  if (off) hidden.add(run);
  button.ariaPressed = !off;
  all(`figure .r${run}`).forEach(e => e.toggleAttribute("hidden", off));
};
const words = new Intl.Collator(undefined, { numeric: true }).compare;
for (const button of all(".sort")) button.onclick = () => {
  const th = button.parentNode, body = th.closest("table").tBodies[0], up = th.ariaSort !== "ascending";
  const key = row => row.cells[th.cellIndex].textContent, number = row => parseFloat(key(row).replace(/,/g, ""));
  const unknown = row => th.className && isNaN(number(row));
  const order = th.className ? (a, b) => number(a) - number(b) : (a, b) => words(key(a), key(b));
  all("th", th.parentNode).forEach(e => e.removeAttribute("aria-sort"));
  th.ariaSort = up ? "ascending" : "descending";
  body.append(...[...body.rows].sort((a, b) => unknown(a) - unknown(b) || (up ? order(a, b) : order(b, a))));
};
for (const input of all(".find")) input.oninput = () => {
  const rows = all(`#${input.dataset.table} tbody tr`), wanted = input.value.trim().toLowerCase();
  for (const row of rows) row.hidden = ![0, 2].some(k => row.cells[k].textContent.toLowerCase().includes(wanted));
  input.nextElementSibling.value = `${rows.filter(row => !row.hidden).length} of ${rows.length} clients`;
};
