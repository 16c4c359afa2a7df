// The live page: follows the gateway's feed and shows one policy, and a table where there are more.

import { drawMargins, drawQueue, drawRoofline } from "./charts.js";
import { follow } from "./feed.js";
import { History } from "./history.js";
import { element, find, showPolicy, showRows } from "./view.js";

const histories = new Map();
let chosen = decodeURIComponent(location.hash.slice(1));
let message = null;
let link = { kind: "waiting" };

function told(snapshot) {
  const now = performance.now();
  message = snapshot;
  const served = new Set(snapshot.policies.map((policy) => policy.name));
  for (const name of histories.keys()) if (!served.has(name)) histories.delete(name);
  for (const policy of snapshot.policies) {
    if (!histories.has(policy.name)) histories.set(policy.name, new History());
    histories.get(policy.name).add(policy, now, snapshot.tick_ms, snapshot.past?.[policy.name]);
  }
  show();
}

function changed(state) {
  link = state;
  const badge = find("link");
  badge.className = `link ${state.kind}`;
  badge.textContent = state.kind === "live" ? "live" : state.kind === "dead" ? "no connection" : "connecting";
  document.body.classList.toggle("stale", state.kind === "dead");
  const banner = find("banner");
  banner.hidden = state.kind !== "dead";
  banner.classList.toggle("mild", Boolean(state.mild));
  const seen = message ? ` What is shown is from ${state.since?.toLocaleTimeString()}.` : "";
  if (state.kind === "dead") banner.textContent = `${state.reason}${seen} This page goes on by itself when it comes back.`;
}

function choose(name) {
  chosen = name;
  history.replaceState(null, "", `#${encodeURIComponent(name)}`);
  show();
}

function show() {
  find("version").textContent = message.version;
  const none = histories.size === 0;
  find("empty").hidden = !none;
  find("detail").hidden = none;
  find("overview").hidden = histories.size < 2;
  find("filter").hidden = histories.size < 8;
  find("hidden-policies").hidden = !message.hidden_policies;
  find("hidden-policies").textContent = `${message.hidden_policies} more policies are served than this page shows.`;
  if (none) {
    showNone();
    return;
  }
  if (!histories.has(chosen)) chosen = histories.keys().next().value;
  if (histories.size > 1) showRows(histories, chosen, find("filter").value.trim(), choose);
  showPolicy(histories.get(chosen));
}

function showNone() {
  if (find("empty").childElementCount) return;
  const next = element("p");
  next.append("Apply a PolicyDeployment (", element("code", "kubectl apply -f FILE"), ", or ", element("code", "taktline up FILE"), " on one machine); it appears here by itself.");
  find("empty").append(element("b", "No policy is served here"), next);
}

let drawnAt = 0;
function draw(now) {
  requestAnimationFrame(draw);
  const shown = histories.get(chosen);
  // Ten drawings a second move smoothly enough and leave a phone its battery; a dead feed stands still.
  if (!shown || now - drawnAt < 100 || link.kind !== "live") return;
  drawnAt = now;
  drawMargins(find("margins"), shown, now);
  drawRoofline(find("roofline"), shown, now);
  drawQueue(find("queue"), shown, now);
}

function setUpTheme() {
  const root = document.documentElement;
  const stored = localStorage.getItem("taktline-theme");
  if (stored === "light" || stored === "dark") root.dataset.theme = stored;
  find("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem("taktline-theme", root.dataset.theme);
  });
}

setUpTheme();
find("filter").addEventListener("input", () => message && show());
addEventListener("hashchange", () => choose(decodeURIComponent(location.hash.slice(1))));
requestAnimationFrame(draw);
follow(told, changed);
