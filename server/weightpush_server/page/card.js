// What the page shows of one server. The nodes stay; only their text changes.
const ADVICE = {
  updating: "Requests get 503 with Retry-After until the new weights are complete and proven.",
  staging: "The old weights serve while the new ones arrive.",
  failed: "It serves nothing until a complete push, a load from disk or a rollback succeeds. No restart is needed.",
  awaiting_weights: "It serves nothing until the first complete push, or a load from disk.",
};
const CAPTIONS = {
  serving: "serves",
  staging: "serves",
  updating: "served until this update",
  failed: "committed last, not served",
  awaiting_weights: "started on, not served",
};
const STEPS = {
  direct: ["checking", "rendezvous", "draining", "opening", "receiving", "closing", "resetting_caches", "publishing"],
  staged: ["checking", "rendezvous", "receiving", "draining", "opening", "landing", "closing", "resetting_caches", "publishing"],
  local: ["checking", "draining", "opening", "landing", "closing", "resetting_caches", "publishing"],
};

function stepsOf(update) {
  const way = ["copy", "disk"].includes(update.transport) ? "local" : update.mode === "staged" ? "staged" : "direct";
  const steps = [...STEPS[way]];
  if (steps.includes(update.phase)) return steps;
  // Ready, and waiting for the trainer's other servers; staged bytes are that before they land.
  if (update.phase === "prepared") steps.splice(steps.indexOf(way === "staged" ? "draining" : "publishing"), 0, "prepared");
  else if (update.phase === "receiving") steps.splice(1, 0, "receiving");
  return steps;
}

function fact(list, label) {
  const value = make("dd");
  const box = make("div", "", make("dt", "", label), value);
  list.append(box);
  return (text) => {
    box.hidden = !text;
    put(value, text);
  };
}

class Card {
  constructor(server, remove) {
    this.server = server;
    this.node = make("article", "card");
    this.drawn = {};
    this.buildHead(remove);
    this.buildRunning();
    this.buildError();
    this.locked = this.buildLocked();
    this.updates = this.section("Last updates");
    this.workers = this.section("Workers");
  }

  buildHead(remove) {
    this.pill = make("span", "pill");
    this.link = make("span", "link");
    const name = make("h2", "name", this.server.name);
    const head = make("div", "head", this.pill, name, this.link);
    if (remove) {
      const button = make("button", "remove", "×");
      button.type = "button";
      button.title = button.ariaLabel = `Stop watching ${this.server.name}`;
      button.addEventListener("click", remove);
      head.append(button);
    }
    this.caption = make("p", "label");
    this.version = make("p", "version mono");
    const list = make("dl", "facts");
    this.facts = Object.fromEntries(
      ["version before", "last update", "not serving for", "moved", "kept copies", "fingerprint"].map((label) => [label, fact(list, label)]),
    );
    this.advice = make("p", "advice");
    this.problem = make("p", "complaint");
    const body = make("div", "stale", this.caption, this.version, list, this.advice);
    this.node.append(head, this.problem, body);
  }

  buildRunning() {
    this.doing = make("span");
    this.elapsed = make("span", "quiet");
    this.done = make("div", "done");
    this.track = make("div", "track", this.done);
    this.track.setAttribute("role", "progressbar");
    this.track.setAttribute("aria-label", "bytes of the update");
    this.amount = make("span");
    this.speed = make("span", "quiet");
    this.steps = make("ol", "steps");
    const top = make("div", "split", this.doing, this.elapsed);
    this.running = make("div", "running stale", top, this.track, make("div", "split", this.amount, this.speed), this.steps);
    this.node.append(this.running);
  }

  buildError() {
    this.errorTitle = make("h3");
    this.errorCode = make("span", "code mono");
    this.errorWhen = make("span", "quiet");
    this.errorText = make("p", "message");
    this.errorMore = make("pre", "mono");
    this.errorDetails = make("details", "", make("summary", "", make("span", "", "details")), this.errorMore);
    const facts = make("div", "split", this.errorCode, this.errorWhen);
    this.error = make("div", "error stale", this.errorTitle, facts, this.errorText, this.errorDetails);
    this.node.append(this.error);
  }

  buildLocked() {
    this.lockedText = make("p", "quiet");
    const input = make("input");
    Object.assign(input, { type: "password", placeholder: "token of this server", autocomplete: "off", required: true });
    input.ariaLabel = `Control token of ${this.server.name}`;
    this.own = make("form", "", input, make("button", "", "Unlock"));
    this.own.addEventListener("submit", (event) => {
      event.preventDefault();
      this.server.useToken(input.value.trim());
      input.value = "";
    });
    const box = make("div", "locked", this.lockedText, this.own);
    this.node.append(box);
    return box;
  }

  section(title) {
    const count = make("span");
    const body = make("div");
    const node = make("details", "stale", make("summary", "", `${title} `, count), body);
    node.open = true;
    this.node.append(node);
    return { node, count, body };
  }

  update() {
    const { server } = this;
    const status = server.status;
    this.node.dataset.state = status ? status.state : "";
    this.node.dataset.link = server.link;
    this.node.dataset.serving = String(status?.serving !== false);
    put(this.pill, status && server.link !== "lost" ? wordsOf(status.state) : server.link === "lost" ? "unreachable" : "connecting");
    if (server.link === "lost") this.node.dataset.state = "";
    put(this.link, { live: "live", polling: "every 2 s", lost: "trying again", connecting: "" }[server.link]);
    this.problem.hidden = server.link !== "lost";
    put(this.problem, server.link === "lost" ? whyLost(server) : "");
    this.showFacts(status);
    this.showRunning(status?.update);
    this.showError(status);
    this.showLocked();
    this.showUpdates();
    this.showWorkers(listOf(status?.workers));
  }

  showFacts(status) {
    put(this.caption, status ? (CAPTIONS[status.state] ?? "version") : "");
    put(this.version, status ? textOf(status.weight_version) : "…");
    const last = status?.last_update;
    const rate = last && last.seconds > 0 ? ` (${bytesText(last.bytes / last.seconds)}/s)` : "";
    this.facts["version before"](textOf(status?.previous_version));
    this.facts["last update"](last ? `${secondsText(last.seconds)}, ${agoText(last.finished_at, this.server.now())}` : "");
    this.facts["not serving for"](last ? secondsText(last.pause_seconds) : "");
    this.facts.moved(last ? `${bytesText(last.bytes)}${rate}` : "");
    const copies = listOf(status?.copies).map((copy) => `${textOf(copy.weight_version)} (${textOf(copy.role)}, ${bytesText(copy.bytes)})`);
    this.facts["kept copies"](copies.join(", "));
    this.facts.fingerprint(textOf(status?.fingerprint).slice(0, 16));
    const advice = status ? (ADVICE[status.state] ?? "") : "";
    this.advice.hidden = !advice;
    put(this.advice, advice);
  }

  showRunning(update) {
    this.running.hidden = !update;
    if (!update) return;
    const from = { copy: "Going back to", disk: "Loading" }[update.transport] ?? "Pushing";
    put(this.doing, `${from} ${textOf(update.weight_version)}: ${wordsOf(update.phase)}`);
    const age = (this.server.now() - Date.parse(textOf(update.started_at))) / 1000;
    put(this.elapsed, `${textOf(update.mode)} over ${textOf(update.transport)} · ${ageText(age)}`);
    const part = update.bytes_total > 0 ? Math.min(1, numberOf(update.bytes_done) / update.bytes_total) : 0;
    this.done.style.width = `${100 * part}%`;
    this.track.setAttribute("aria-valuenow", String(Math.round(100 * part)));
    const tensors = `${numberOf(update.tensors_done).toLocaleString("en")} of ${countText(update.tensors_total, "tensor")}`;
    put(this.amount, `${Math.floor(100 * part + 1e-6)} % · ${tensors} · ${bytesText(update.bytes_done)} of ${bytesText(update.bytes_total)}`);
    put(this.speed, this.server.rate && update.phase === "receiving" ? `${bytesText(this.server.rate)}/s` : "");
    const steps = stepsOf(update);
    this.redraw("steps", [steps, update.phase], this.steps, () => {
      const at = steps.indexOf(update.phase);
      return steps.map((step, index) => make("li", index < at ? "past" : index === at ? "now" : "", wordsOf(step)));
    });
  }

  showError(status) {
    const error = status?.last_error;
    this.error.hidden = !error;
    if (!error) return;
    const down = status.state === "failed";
    this.error.classList.toggle("past", !down);
    put(this.errorTitle, down ? "Why it does not serve" : "The last update that failed");
    put(this.errorCode, textOf(error.code));
    const where = error.phase ? `while ${wordsOf(error.phase)}, ` : "";
    put(this.errorWhen, `${where}${agoText(error.at, this.server.now())}`);
    put(this.errorText, textOf(error.message));
    const details = error.details && Object.keys(error.details).length ? JSON.stringify(error.details, null, 2) : "";
    this.errorDetails.hidden = !details;
    put(this.errorMore, details);
  }

  showLocked() {
    const { server } = this;
    this.locked.hidden = !server.locked;
    put(
      this.lockedText,
      server.token
        ? "This server refuses the token."
        : "Public status only. With the control token: live progress and the last updates.",
    );
    this.own.hidden = !server.token;
  }

  showUpdates() {
    const { updates } = this.server;
    this.updates.node.hidden = updates === null;
    if (updates === null) return;
    put(this.updates.count, updates.length ? String(updates.length) : "");
    this.redraw("updates", updates, this.updates.body, () => updatesList(updates, this.server.now()));
    showAges(this.updates.body, this.server.now());
  }

  showWorkers(workers) {
    this.workers.node.hidden = !workers.length;
    put(this.workers.count, String(workers.length));
    const running = Boolean(this.server.status?.update);
    this.redraw("workers", [workers, running], this.workers.body, () => [make("div", "scroll", workersTable(workers, running))]);
  }

  redraw(name, facts, node, draw) {
    const text = JSON.stringify(facts);
    if (this.drawn[name] === text) return;
    this.drawn[name] = text;
    node.replaceChildren(...draw());
  }
}

function workersTable(workers, running) {
  const columns = ["rank", "device", "process", "version", running ? "landed" : "", "self-check", "memory"].filter(Boolean);
  const table = make("table", "", make("thead", "", make("tr", "", ...columns.map((name) => make("th", "", name)))));
  const body = make("tbody");
  for (const worker of workers) {
    const cells = [textOf(worker.rank), textOf(worker.device), textOf(worker.pid), textOf(worker.weight_version)];
    if (running) cells.push(bytesText(worker.bytes_done));
    cells.push(textOf(worker.self_check), worker.tainted ? "half-written" : "whole");
    const row = make("tr", "", ...cells.map((text) => make("td", text.length > 24 ? "text" : "", text)));
    body.append(row);
    if (worker.reload_refused) {
      const refused = make("td", "text complaint", `takes no updates: ${textOf(worker.reload_refused.message)}`);
      refused.colSpan = cells.length;
      body.append(make("tr", "", refused));
    }
  }
  table.append(body);
  return table;
}

function whyLost(server) {
  if (server.problem) return `It ${server.problem}.`;
  const here = location.origin;
  const there = new URL(server.base).origin;
  if (server.barred) return `This page may not read it: start ${location.host} with --fleet-origin ${there}.`;
  if (there === here) return "No connection.";
  const mixed = location.protocol === "https:" && there.startsWith("http:") ? ", or is read over http from a page over https" : "";
  return `No connection: it is down, or was started without --fleet-origin ${here}${mixed}.`;
}
