"use strict";
// The numbers of a run as they come; the report below is loaded again when rounds have ended.
const at = id => document.getElementById(id);
const say = (id, text) => { if (at(id).textContent !== text) at(id).textContent = text; };
const percent = x => x === null ? "–" : (100 * x).toFixed(1) + " %";
const fixed = (x, digits) => x === null ? "–" : x.toFixed(digits);
const WORDS = {
  running: "training", stopping: "stops after this round", finished: "finished", stopped: "stopped by a callback",
  idle: "not training: stopped, killed or crashed",
};
const REFRESH = 5000; // milliseconds between two reports, at least
let run = null, shown = "", loading = false, asked = 0, last = 0, stopped = false;

function time(seconds) {
  if (seconds === null) return "–";
  const s = Math.max(0, Math.round(seconds));
  if (s < 100) return s + " s";
  if (s < 6000) return Math.floor(s / 60) + " min " + s % 60 + " s";
  return Math.floor(s / 3600) + " h " + Math.floor(s % 3600 / 60) + " min";
}

function count() {
  if (!run) return;
  const since = run.ended === null ? 0 : Date.now() / 1000 - run.ended;
  say("left", run.left === null ? "–" : time(run.left - since));
  if (asked && Date.now() - asked > 6000) calm();
}

function cells(place, rows, make) {
  const parts = rows.map(row => {
    const cell = document.createElement("i");
    make(cell, row);
    return cell;
  });
  at(place).replaceChildren(...parts);
}

function show(numbers) {
  run = numbers;
  document.title = run.round + "/" + run.rounds + " · " + run.name + " · fedp3 watch";
  say("method", run.method);
  say("state", stopped && run.state === "idle" ? "stopped by this page" : WORDS[run.state]);
  at("state").classList.toggle("open", !["running", "finished"].includes(run.state));
  at("bar").value = run.round / run.rounds;
  say("round", run.round + " / " + run.rounds);
  say("seconds", time(run.seconds));
  at("C").parentElement.hidden = run.C === null;
  for (const kind of ["G", "D", "P", "C"]) say(kind, run.percent ? percent(run[kind]) : fixed(run[kind], 3));
  say("loss", fixed(run.loss, 3));
  say("mb", run.mb_up.toPrecision(3) * 1 + " / " + run.mb_down.toPrecision(3) * 1);
  for (const kind of ["epsilon", "client_epsilon"]) {
    at(kind).parentElement.hidden = run[kind] === null;
    say(kind, fixed(run[kind], 2));
  }
  timeline();
  clients();
  at("stop").hidden = !["running", "stopping"].includes(run.state);
  at("stop").disabled = run.state === "stopping";
  if (run.state === "stopping") at("stop").textContent = "Stopping";
  else if (!asked) at("stop").textContent = "Stop the run";
  count();
  refresh();
}

function timeline() {
  const rounds = run.timeline;
  if (!rounds.length) return;
  const seconds = rounds.map(r => r.seconds).sort((a, b) => a - b);
  const most = seconds[seconds.length - 1];
  const top = Math.max(1e-9, Math.min(most, 3 * seconds[seconds.length >> 1])); // one slow round must not hide the others
  const end = rounds[rounds.length - 1];
  say("rounds-text", "Seconds of the last " + rounds.length + " rounds, the longest " + most.toPrecision(3) + " s. Round "
    + end.round + " used " + end.accepted + " updates, " + end.late + " late, " + end.rejected + " rejected.");
  cells("timeline", rounds, (cell, r) => {
    cell.className = r.void ? "rejected" : r.late + r.rejected ? "late" : "used";
    cell.style.height = Math.min(100, Math.max(4, 100 * r.seconds / top)) + "%";
    cell.title = "round " + r.round + ": " + r.seconds.toPrecision(3) + " s, " + r.accepted + " used, " + r.late
      + " late, " + r.rejected + " rejected" + (r.void ? ", void" : "");
  });
}

function clients() {
  const took = run.clients.filter(c => c.round !== null);
  if (!took.length) return;
  const number = did => run.clients.filter(c => c.did === did).length;
  say("clients-text", took.length + " of " + run.clients.length + " clients have taken part. When last asked, "
    + number("used") + " were used, " + number("late") + " late and " + number("rejected") + " rejected.");
  cells("clients", run.clients, (cell, c) => {
    cell.className = c.did + (c.round === run.round ? " recent" : "");
    cell.textContent = c.client;
    cell.title = "client " + c.client + ": " + (c.round === null ? "not asked yet"
      : c.did + " in round " + c.round + ", used in " + c.used + " rounds");
  });
}

function refresh() {
  // A second frame loads behind the first, so that the page does not jump.
  const version = run.round + " " + run.state;
  if (loading || run.round === 0 || version === shown) return;
  const wait = last + REFRESH - Date.now();
  if (wait > 0) { setTimeout(refresh, wait); return; }
  loading = true;
  last = Date.now();
  const frame = document.createElement("iframe");
  frame.title = "Report of the run so far";
  frame.src = "report";
  frame.style.cssText = "position:absolute;visibility:hidden";
  frame.addEventListener("load", () => {
    const before = at("report").firstElementChild;
    const fit = () => {
      const page = frame.contentDocument && frame.contentDocument.documentElement;
      if (page) frame.style.height = page.scrollHeight + 2 + "px";
    };
    frame.style.cssText = "";
    fit();
    if (before && before !== frame) before.remove();
    new ResizeObserver(fit).observe(at("report"));
    loading = false;
    shown = version;
    refresh();
  });
  at("report").append(frame);
}

function calm() {
  asked = 0;
  if (run && run.state === "running") at("stop").textContent = "Stop the run";
}

at("stop").addEventListener("click", async () => {
  if (!asked) {
    asked = Date.now();
    at("stop").textContent = "Really stop? Click again";
    return;
  }
  asked = 0;
  at("stop").disabled = true;
  at("stop").textContent = "Stopping";
  const answer = await fetch("stop", {method: "POST"}).catch(() => null);
  stopped = answer !== null && answer.ok;
  if (stopped) return;
  const reason = answer ? (await answer.json().catch(() => ({}))).error : "the server has gone";
  say("note", "The run was not stopped: " + (reason || "refused"));
  at("note").hidden = false;
  at("stop").disabled = false;
});

const news = new EventSource("events");
news.onopen = () => say("link", "live");
news.onerror = () => say("link", "the watching server has gone; numbers are the last ones");
news.onmessage = message => {
  say("link", "live");
  show(JSON.parse(message.data));
  if (run.state === "finished") { news.close(); say("link", "the run is finished"); }
};
news.addEventListener("full", () => { news.close(); say("link", "too many pages are open"); });
setInterval(count, 1000);
