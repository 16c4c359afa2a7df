// What the page remembers of each policy: the last minute, in bounded memory.

export const WINDOW_MS = 60_000;
const POINTS_KEPT = 6000;
export const CAUSES = ["inference", "queue", "transfer", "refused"];

const lateOf = (misses) => misses.inference + misses.queue + misses.transfer;

/**
 * Points {t, margin, cause, weight} of [t, margin, cause]: of many answers only some are told, more of the late ones, so
 * each stands for as many of its kind as there were among the `ok` answers, of which `late` were late.
 */
function weighed(told, ok, late) {
  const shown = told.filter(([, , cause]) => cause).length;
  const weights = [(ok - late) / Math.max(1, told.length - shown), late / Math.max(1, shown)];
  return told.map(([t, margin, cause]) => ({ t, margin, cause, weight: Math.max(1, weights[cause ? 1 : 0]) }));
}

export class History {
  constructor() {
    this.margins = []; // {t, margin, cause, weight}
    this.cycles = []; // {t, x, y}
    this.counts = []; // {t, ok, misses: {cause: count}, depth, inFlight}, one a message, counts since the gateway started
    this.now = null;
  }

  /**
   * Takes in one policy of one message; the points of a message are spread over the time since the last one.
   * `past` is what the gateway still knows of the minute before, where the message is a page's first.
   */
  add(policy, t, tickMs, past) {
    this.now = policy;
    const last = this.counts.at(-1);
    if (last && policy.codes.ok < last.ok) this.counts = []; // the gateway was started anew
    if (past && !this.counts.length) {
      // How long the queue was then nobody knows.
      this.counts.push({ t: t - past.age_ms, ok: past.ok, misses: past.misses, depth: null, inFlight: null });
      const told = past.margins.map(([age, margin, cause]) => [t - age, margin, cause]);
      this.margins.push(...weighed(told, policy.codes.ok - past.ok, lateOf(policy.misses) - lateOf(past.misses)));
      for (const [age, x, y] of past.cycles) this.cycles.push({ t: t - age, x, y });
    }
    const spread = (list, index) => t - tickMs + (tickMs * (index + 1)) / list.length;
    const before = last ?? { ok: policy.codes.ok, misses: policy.misses };
    const told = policy.margins.map(([margin, cause], i) => [spread(policy.margins, i), margin, cause]);
    this.margins.push(...weighed(told, policy.codes.ok - before.ok, lateOf(policy.misses) - lateOf(before.misses)));
    policy.cycles.forEach(([x, y], i) => this.cycles.push({ t: spread(policy.cycles, i), x, y }));
    this.counts.push({ t, ok: policy.codes.ok, misses: policy.misses, depth: policy.depth, inFlight: policy.in_flight });
    const begin = t - WINDOW_MS;
    for (const list of [this.margins, this.cycles]) {
      let old = Math.max(0, list.length - POINTS_KEPT);
      while (old < list.length && list[old].t < begin) old++;
      list.splice(0, old);
    }
    while (this.counts.length > 2 && this.counts[1].t <= begin) this.counts.shift();
  }

  /** Counts of the last minute, or of as much of it as the page has seen. */
  get lately() {
    const first = this.counts[0];
    const last = this.counts.at(-1);
    const seconds = Math.max((last.t - first.t) / 1000, 0.001);
    const misses = Object.fromEntries(CAUSES.map((cause) => [cause, last.misses[cause] - first.misses[cause]]));
    const ok = last.ok - first.ok;
    const late = lateOf(misses);
    const missed = late + misses.refused;
    const total = ok + misses.refused;
    return { seconds, ok, misses, missed, total, goodput: (ok - late) / seconds, onTime: total ? (ok - late) / total : null };
  }

  /** The margin that `share` of the last minute's answers fall short of; null where there are none. */
  marginQuantile(share) {
    if (!this.margins.length) return null;
    const sorted = [...this.margins].sort((a, b) => a.margin - b.margin);
    let left = share * sorted.reduce((sum, point) => sum + point.weight, 0);
    return (sorted.find((point) => (left -= point.weight) < 0) ?? sorted.at(-1)).margin;
  }
}
