// The words and numbers of the page. Names come from elsewhere, so they are only ever set as text.

import { CAUSES } from "./history.js";

export const find = (id) => document.getElementById(id);

export function element(tag, words = "", name = "") {
  const made = document.createElement(tag);
  if (words !== "") made.textContent = words;
  if (name) made.className = name;
  return made;
}

export const count = (value) => Math.round(value).toLocaleString("en");
export const rate = (value) => (value >= 100 ? count(value) : value.toFixed(1));
export const ms = (value) => (value === null ? "–" : `${Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(1)} ms`);

export function share(value) {
  if (value === null) return "–";
  const percent = 100 * value;
  // 99.97% must not be shown as 100%: that is what the page is for.
  const shown = percent === 100 || percent < 90 ? percent.toFixed(0) : (Math.floor(percent * 100) / 100).toFixed(2);
  return `${shown}%`;
}

export const shareClass = (value) => (value === null ? "" : value >= 0.999 ? "good" : value >= 0.99 ? "warn" : "bad");

function workersOf(policy) {
  return Object.values(policy.pools).reduce((sum, number) => sum + number, 0);
}

/** The table of all policies; `choose(name)` is called when one is picked. */
export function showRows(histories, chosen, filter, choose) {
  const body = find("rows");
  const names = [...histories.keys()].filter((name) => name.includes(filter));
  const rows = names.map((name) => {
    const history = histories.get(name);
    const policy = history.now;
    const lately = history.lately;
    const row = element("tr");
    row.dataset.policy = name;
    row.setAttribute("aria-selected", String(name === chosen));
    const cell = element("td");
    cell.append(element("button", name));
    const workers = workersOf(policy);
    row.append(
      cell,
      element("td", share(lately.onTime), `num ${shareClass(lately.onTime)}`),
      element("td", rate(lately.ok / lately.seconds), "num"),
      element("td", count(policy.depth), "num"),
      element("td", count(workers), workers ? "num" : "num bad"),
      element("td", count((lately.missed * 60) / Math.max(lately.seconds, 60)), lately.missed ? "num bad" : "num"),
    );
    row.addEventListener("click", () => choose(name));
    return row;
  });
  const focused = document.activeElement?.closest?.("tr")?.dataset.policy;
  body.replaceChildren(...rows);
  if (focused) [...body.children].find((row) => row.dataset.policy === focused)?.querySelector("button").focus();
  find("overview-title").textContent = histories.size === 1 ? "One policy" : `${histories.size} policies`;
}

/** Everything of one policy but its drawings. */
export function showPolicy(history) {
  const policy = history.now;
  const lately = history.lately;
  find("name").textContent = policy.name;
  find("ready").textContent = policy.ready ? "ready" : "no worker";
  find("ready").className = policy.ready ? "chip good" : "chip bad";
  const about = [policy.family, policy.revision && `revision ${policy.revision}`, policy.budget_ms && `control budget ${ms(policy.budget_ms)}`];
  find("about").textContent = about.filter(Boolean).join(" · ");
  find("timeline").href = `/v1/policies/${encodeURIComponent(policy.name)}/timeline`;
  const tiles = [
    ["on time, last minute", share(lately.onTime), shareClass(lately.onTime)],
    ["chunks/s on time", rate(lately.goodput), ""],
    ["median margin", ms(history.marginQuantile(0.5)), history.marginQuantile(0.5) < 0 ? "bad" : ""],
    ["99% exceed", ms(history.marginQuantile(0.01)), history.marginQuantile(0.01) < 0 ? "bad" : ""],
    ["waiting", count(policy.depth), ""],
    ["on a worker", count(policy.in_flight), ""],
  ];
  find("tiles").replaceChildren(
    ...tiles.map(([label, value, name]) => {
      const tile = element("div", "", "tile");
      tile.append(element("b", value, name), element("span", label));
      return tile;
    }),
  );
  showCauses(policy, lately);
  showWorkers(policy);
}

function showCauses(policy, lately) {
  const most = Math.max(1, ...CAUSES.map((cause) => lately.misses[cause]));
  find("causes").replaceChildren(
    ...CAUSES.flatMap((cause) => {
      const track = element("div", "", "track");
      const bar = element("i", "", lately.misses[cause] ? `cause-${cause}` : "");
      bar.style.width = `${(100 * lately.misses[cause]) / most}%`;
      track.append(bar);
      return [element("span", cause), track, element("b", `${count(lately.misses[cause])} · ${count(policy.misses[cause])}`)];
    }),
  );
  const others = Object.entries(policy.codes).filter(([code]) => code !== "ok");
  const told = others.map(([code, number]) => `${code} ${count(number)}`).join(" · ");
  const without = policy.codes.ok ? "Every request since start got its chunk." : "No request since start.";
  find("refusals").textContent = told ? `Requests without a chunk since start: ${told}` : without;
}

const STATE_CLASS = { idle: "good", busy: "good", suspended: "warn", draining: "warn", down: "bad" };

function showWorkers(policy) {
  const rows = policy.workers.map((worker) => {
    const row = element("tr");
    const state = element("td");
    state.append(element("span", worker.state, `chip ${STATE_CLASS[worker.state] ?? ""}`));
    row.append(element("td", worker.address), element("td", worker.pool || "–"), element("td", worker.revision || "–"), state);
    return row;
  });
  if (!rows.length) {
    const row = element("tr");
    const cell = element("td", "No worker is routed to this policy.", "bad");
    cell.colSpan = 4;
    row.append(cell);
    rows.push(row);
  }
  find("workers").replaceChildren(...rows);
  find("hidden-workers").hidden = !policy.hidden_workers;
  find("hidden-workers").textContent = `and ${count(policy.hidden_workers)} more`;
  const times = policy.t_sync.map(([pool, batch, median, tail]) => `${pool ? `${pool} ` : ""}T(${batch}) ${ms(median)}, tail ${ms(tail)}`);
  find("times").textContent = times.length ? `Batch times as the queue predicts them: ${times.join(" · ")}` : "";
}
