// The connection to the gateway: one stream of events, opened again for as long as the page is open.

const SILENT_MS = 4000;
const RETRY_MS = [500, 1000, 2000, 4000];
const LEAVING = "This gateway is shutting down: it finishes what it has and takes nothing new.";

/**
 * Follows the feed for ever. `told(snapshot)` hears each message; `changed(state)` hears how the connection stands:
 * {kind: "live"}, or {kind: "dead", reason, since, mild} with a sentence for a person; mild where all is as it should be.
 */
export async function follow(told, changed) {
  let failures = 0;
  let since = null;
  for (;;) {
    let reason = "The gateway closed the connection.";
    let leaving = false;
    try {
      // By the origin alone: an address that carries a key must not be handed on.
      await read(`${location.origin}/live/feed`, (snapshot) => {
        failures = 0;
        since = null;
        leaving = snapshot.draining;
        changed({ kind: "live" });
        told(snapshot);
      });
      if (leaving) reason = LEAVING;
    } catch (error) {
      reason = error instanceof Refused ? error.message : "The gateway does not answer.";
    }
    since ??= new Date();
    changed({ kind: "dead", reason, since, mild: reason === LEAVING });
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)]));
  }
}

class Refused extends Error {}

async function read(path, told) {
  const stop = new AbortController();
  let timer = setTimeout(() => stop.abort(), SILENT_MS);
  try {
    const answer = await fetch(path, { headers: { accept: "text/event-stream" }, signal: stop.signal, cache: "no-store" });
    if (!answer.ok) throw new Refused(await refusal(answer));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => stop.abort(), SILENT_MS);
      text += value;
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        const event = text.slice(0, end);
        text = text.slice(end + 2);
        if (event.startsWith("data: ")) told(JSON.parse(event.slice(6)));
      }
    }
  } finally {
    clearTimeout(timer);
    stop.abort();
  }
}

async function refusal(answer) {
  try {
    const body = await answer.json();
    return body.code === "draining" ? LEAVING : `${body.code}: ${body.message}; ${body.next_step}.`;
  } catch {
    return `The gateway answered with status ${answer.status}.`;
  }
}
