// The drawings: margins over time, the control-time roofline, and the queue, each on a canvas of its own.

import { WINDOW_MS } from "./history.js";

/** Colours of the style sheet, read at each drawing so that light and dark need nothing else. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  return new Proxy({}, { get: (_, name) => style.getPropertyValue(`--${name}`).trim() });
}

function begin(canvas) {
  const scale = window.devicePixelRatio || 1;
  const { width, height } = canvas.getBoundingClientRect();
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const g = canvas.getContext("2d");
  g.setTransform(scale, 0, 0, scale, 0, 0);
  g.clearRect(0, 0, width, height);
  g.font = '12px system-ui, "DejaVu Sans", sans-serif';
  g.lineWidth = 1;
  g.lineJoin = "round";
  return { g, width, height, colour: palette() };
}

/** The next round number from `rough` on. */
function round(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
}

/** About `count` round values between low and high. */
function ticks(low, high, count) {
  const step = round((high - low) / count);
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) values.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return values;
}

function line(g, colour, x1, y1, x2, y2, dash = []) {
  g.strokeStyle = colour;
  g.setLineDash(dash);
  g.beginPath();
  g.moveTo(x1, y1);
  g.lineTo(x2, y2);
  g.stroke();
  g.setLineDash([]);
}

function text(g, colour, words, x, y, align = "left") {
  g.fillStyle = colour;
  g.textAlign = align;
  g.fillText(words, x, y);
}

function timeAxis(g, colour, left, right, bottom) {
  for (const seconds of [60, 45, 30, 15, 0]) {
    const x = right - ((right - left) * seconds) / 60;
    text(g, colour.soft, seconds ? `−${seconds} s` : "now", x, bottom + 16, seconds === 60 ? "left" : seconds ? "center" : "right");
  }
}

/** Says in the middle why nothing is drawn, on a plate that keeps lines and curves off the words. */
function nothing(g, colour, words, left, right, top, bottom) {
  const [x, y, width] = [(left + right) / 2, (top + bottom) / 2, g.measureText(words).width + 16];
  g.fillStyle = colour.card;
  g.fillRect(x - width / 2, y - 15, width, 22);
  text(g, colour.soft, words, x, y, "center");
}

export function drawMargins(canvas, history, now) {
  const { g, width, height, colour } = begin(canvas);
  const [left, right, top, bottom] = [54, width - 8, 10, height - 22];
  const sorted = history.margins.map((point) => point.margin).sort((a, b) => a - b);
  const at = (share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? 0;
  let low = Math.min(0, at(0.01));
  let high = Math.max(0, at(0.99));
  if (high - low < 1) high = low + 1;
  const pad = (high - low) * 0.08;
  low -= pad;
  high += pad;
  const x = (t) => right - ((right - left) * (now - t)) / WINDOW_MS;
  const y = (value) => bottom - ((bottom - top) * (Math.max(low, Math.min(high, value)) - low)) / (high - low);
  for (const value of ticks(low, high, 5)) {
    if (value) line(g, colour.line, left, y(value), right, y(value));
    text(g, value ? colour.soft : colour.ink, value ? `${+value.toPrecision(6)}` : "0 ms", left - 7, y(value) + 4, "right");
  }
  line(g, colour.bad, left, y(0), right, y(0));
  if (!sorted.length) nothing(g, colour, "no answer in the last minute", left, right, top, bottom);
  for (const point of history.margins) {
    const px = x(point.t);
    if (px < left) continue;
    g.fillStyle = point.cause ? colour[point.cause] : colour.good;
    g.globalAlpha = point.cause ? 0.95 : 0.6;
    g.beginPath();
    g.arc(px, y(point.margin), point.cause ? 3.2 : 2.3, 0, 2 * Math.PI);
    g.fill();
  }
  g.globalAlpha = 1;
  timeAxis(g, colour, left, right, bottom);
}

export function drawRoofline(canvas, history, now) {
  const { g, width, height, colour } = begin(canvas);
  const [left, right, top, bottom] = [42, width - 10, 24, height - 36];
  const ratios = history.cycles.map((cycle) => cycle.x).filter((ratio) => ratio > 0);
  // A plain loop: a page that was open for an hour may hold more points than a call takes arguments.
  let [least, most] = [1, 1];
  for (const ratio of ratios) [least, most] = [Math.min(least, ratio), Math.max(most, ratio)];
  const low = Math.min(-1, Math.floor(Math.log10(least)));
  const high = Math.max(1, Math.ceil(Math.log10(most)));
  const x = (ratio) => left + ((right - left) * (Math.log10(Math.max(ratio, 10 ** low)) - low)) / (high - low);
  const y = (share) => bottom - ((bottom - top) * Math.min(share, 1.1)) / 1.1;
  g.fillStyle = colour["inference-ground"];
  g.fillRect(left, top, x(1) - left, bottom - top);
  g.fillStyle = colour["environment-ground"];
  g.fillRect(x(1), top, right - x(1), bottom - top);
  const narrow = width < 420;
  text(g, colour.ink, narrow ? "inference" : "inference bound", (left + x(1)) / 2, top - 9, "center");
  text(g, colour.ink, narrow ? "environment" : "environment bound", (x(1) + right) / 2, top - 9, "center");
  for (let decade = low; decade <= high; decade++) {
    line(g, colour.line, x(10 ** decade), top, x(10 ** decade), bottom);
    const align = decade === high ? "right" : decade === low ? "left" : "center";
    text(g, colour.soft, `${+(10 ** decade).toPrecision(3)}`, x(10 ** decade), bottom + 15, align);
  }
  for (const share of [0, 0.5, 1]) {
    line(g, colour.line, left, y(share), right, y(share));
    text(g, colour.soft, `${share}`, left - 7, y(share) + 4, "right");
  }
  text(g, colour.soft, "X = L_env / L_inference", (left + right) / 2, bottom + 31, "center");
  g.save();
  g.translate(11, (top + bottom) / 2);
  g.rotate(-Math.PI / 2);
  text(g, colour.soft, "Y = L_env / L_control", 0, 0, "center");
  g.restore();
  const curve = (efficiency, stroke, dash) => {
    g.strokeStyle = stroke;
    g.lineWidth = 2;
    g.setLineDash(dash);
    g.beginPath();
    for (let step = 0; step <= 160; step++) {
      const ratio = 10 ** (low + ((high - low) * step) / 160);
      g.lineTo(x(ratio), y(efficiency(ratio)));
    }
    g.stroke();
    g.setLineDash([]);
    g.lineWidth = 1;
  };
  curve((ratio) => ratio / (1 + ratio), colour.serial, [6, 4]);
  curve((ratio) => Math.min(1, ratio), colour.ink, []);
  if (!ratios.length) nothing(g, colour, "no control cycle in the last minute", left, right, top, bottom);
  g.fillStyle = colour.accent;
  for (const cycle of history.cycles) {
    g.globalAlpha = Math.max(0.08, 0.75 * (1 - (now - cycle.t) / WINDOW_MS));
    g.beginPath();
    g.arc(x(cycle.x), y(cycle.y), 3, 0, 2 * Math.PI);
    g.fill();
  }
  g.globalAlpha = 1;
}

export function drawQueue(canvas, history, now) {
  const { g, width, height, colour } = begin(canvas);
  const [left, right, top, bottom] = [54, width - 8, 18, height - 22];
  const most = history.counts.reduce((most, count) => Math.max(most, count.depth, count.inFlight), 4);
  const high = 2 * round(most / 2); // so that its two lines are numbers, whatever waits
  const x = (t) => right - ((right - left) * (now - t)) / WINDOW_MS;
  const y = (value) => bottom - ((bottom - top) * value) / high;
  for (const value of ticks(0, high, 2)) {
    line(g, colour.line, left, y(value), right, y(value));
    text(g, colour.soft, `${+value.toPrecision(6)}`, left - 7, y(value) + 4, "right");
  }
  for (const [name, stroke, label, align] of [["inFlight", colour.accent, "on a worker", "right"], ["depth", colour.queue, "waiting", "left"]]) {
    g.strokeStyle = stroke;
    g.lineWidth = 2;
    g.beginPath();
    for (const count of history.counts) if (count[name] !== null && x(count.t) >= left) g.lineTo(x(count.t), y(count[name]));
    g.stroke();
    g.lineWidth = 1;
    text(g, stroke, label, align === "left" ? left : left + 120, top - 6, "left");
  }
  timeAxis(g, colour, left, right, bottom);
}
