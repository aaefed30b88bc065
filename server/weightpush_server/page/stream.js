// One server, followed for as long as the page is open: its events where it lets us, else its public status.
const POLL_MS = 2000;
const LOOK_MS = 10000;
const SILENCE_MS = 45000; // The server says something at least every 15 s.
const LONGEST_EVENT = 4 * 1024 * 1024;

// The base of a server's routes, without "/reload": what the reader typed may lack the scheme. Null: no address.
function addressOf(typed) {
  const text = typed.trim();
  try {
    const url = new URL(/^[a-z]+:\/\//i.test(text) ? text : `${location.protocol}//${text}`);
    if (!["http:", "https:"].includes(url.protocol) || url.username || url.password || url.search || url.hash) return null;
    return url.origin + url.pathname.replace(/\/+$/, "").replace(/\/reload(\/(ui|status))?$/, "");
  } catch {
    return null;
  }
}

class Server {
  constructor(base, changed) {
    this.base = base;
    this.name = base.replace(/^https?:\/\//, "");
    this.changed = changed;
    this.token = "";
    this.status = null;
    this.updates = null;
    this.link = "connecting"; // live, polling, lost
    this.locked = false;
    this.problem = "";
    this.barred = false;
    this.skew = 0; // Its clock less ours, in milliseconds.
    this.rate = 0; // Of arriving bytes, a second.
    this.closed = false;
    this.refusedToken = null;
    this.seen = "";
    this.request = new AbortController();
    this.wake = () => {};
  }

  useToken(token) {
    this.token = token;
    this.refusedToken = null;
    this.request.abort();
    this.wake();
  }

  close() {
    this.closed = true;
    this.request.abort();
    this.wake();
  }

  now() {
    return Date.now() + this.skew;
  }

  async ask(route, signal) {
    const answer = await fetch(`${this.base}/reload/${route}`, {
      headers: this.token ? { Authorization: `Bearer ${this.token}` } : {},
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      referrerPolicy: "no-referrer",
      signal,
    });
    const date = Date.parse(answer.headers.get("Date") ?? "");
    if (!Number.isNaN(date)) {
      const skew = date + 500 - Date.now(); // It names the second that has begun.
      if (Math.abs(skew - this.skew) > 1000) this.skew = Math.abs(skew) > 1000 ? skew : 0;
    }
    return answer;
  }

  async run() {
    let patience = 1000;
    while (!this.closed) {
      this.request = new AbortController();
      try {
        if (this.refusedToken === this.token) await this.poll();
        else await this.follow();
        patience = POLL_MS;
      } catch (error) {
        if (this.closed) return;
        if (!this.request.signal.aborted || this.request.signal.reason === "silent") {
          this.link = "lost";
          this.problem = error instanceof Surprise ? error.message : "";
          patience = Math.min(1.6 * patience, LOOK_MS);
        } else {
          patience = 0;
        }
      }
      this.changed(this);
      await new Promise((resolve) => {
        this.wake = resolve;
        setTimeout(resolve, patience);
      });
      patience = Math.max(patience, 1000);
    }
  }

  async poll() {
    const timer = setTimeout(() => this.request.abort("silent"), LOOK_MS);
    try {
      const answer = await this.ask("status", this.request.signal);
      this.take(await jsonOf(answer), "polling");
    } finally {
      clearTimeout(timer);
    }
  }

  async follow() {
    const token = this.token;
    let timer = 0;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.request.abort("silent"), SILENCE_MS);
    };
    heard();
    try {
      const answer = await this.ask("events", this.request.signal);
      if (answer.status === 401) {
        this.locked = true;
        this.refusedToken = token;
        this.updates = null;
        return await this.poll();
      }
      this.locked = false;
      if (answer.status === 429) return await this.poll(); // All places of watchers are taken.
      if (!answer.ok) throw new Surprise(`answers ${answer.status} on /reload/events`);
      await this.read(answer.body.getReader(), heard);
    } finally {
      clearTimeout(timer);
    }
  }

  async read(reader, heard) {
    const decoder = new TextDecoder();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      text += decoder.decode(value, { stream: true });
      const events = text.split("\n\n");
      text = events.pop();
      if (text.length > LONGEST_EVENT) throw new Surprise("sends something else than events");
      for (const event of events) {
        const line = event.split("\n").find((part) => part.startsWith("data: "));
        if (line) this.take(parsed(line.slice(6)), "live");
      }
    }
  }

  take(status, link) {
    if (status === null || typeof status !== "object" || typeof status.state !== "string") {
      throw new Surprise("answers something else than a weightpush status");
    }
    this.measure(this.status?.update, status.update);
    this.status = status;
    this.link = link;
    this.problem = "";
    this.barred = false;
    const ended = [status.instance_id, status.update?.update_id, status.last_update?.update_id, status.last_error?.at];
    if (link === "live" && this.seen !== JSON.stringify(ended)) {
      this.seen = JSON.stringify(ended);
      this.look();
    }
    this.changed(this);
  }

  // Smoothed over about a second, so that it can be read.
  measure(before, after) {
    const now = performance.now();
    if (!before || !after || before.update_id !== after.update_id) {
      this.rate = 0;
      this.counted = now;
    } else if (after.bytes_done !== before.bytes_done) {
      const span = (now - this.counted) / 1000;
      const fresh = (numberOf(after.bytes_done) - numberOf(before.bytes_done)) / Math.max(span, 0.01);
      const weight = this.rate ? 1 - Math.exp(-span) : 1;
      this.rate += weight * (fresh - this.rate);
      this.counted = now;
    }
  }

  async look() {
    try {
      const answer = await this.ask("history", AbortSignal.timeout(LOOK_MS));
      if (answer.ok) this.updates = listOf((await answer.json()).updates);
    } catch {
      this.seen = ""; // With the next event.
    }
    this.changed(this);
  }
}

// What is no fault of the network.
class Surprise extends Error {}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Surprise("answers something else than a weightpush status");
  }
}

async function jsonOf(answer) {
  return parsed(await answer.text());
}
