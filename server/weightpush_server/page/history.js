// The last updates, each with a bar of its phases.
const PHASES = [
  "checking", "rendezvous", "draining", "opening", "receiving", "landing", "closing", "resetting_caches", "prepared",
  "publishing",
];

function swatch(phase) {
  const mark = make("i");
  mark.style.background = PHASES.includes(phase) ? `var(--${phase})` : "var(--unknown)";
  return mark;
}

function phasesOf(update) {
  return Object.entries(update.phase_seconds ?? {}).map(([phase, seconds]) => [phase, numberOf(seconds)]);
}

// The seconds that a whole bar stands for: one update that waited for its lease must not flatten all others.
function scaleOf(updates) {
  const spans = updates.map((update) => numberOf(update.seconds)).sort((a, b) => a - b);
  const median = spans[Math.floor(spans.length / 2)] ?? 0;
  return Math.max(Math.min(spans[spans.length - 1] ?? 0, 3 * median), 1e-6);
}

function barOf(update, scale) {
  const bar = make("div", "phases");
  const total = phasesOf(update).reduce((sum, [, seconds]) => sum + seconds, 0);
  bar.classList.toggle("cut", total > 1.001 * scale);
  const told = [];
  for (const [phase, seconds] of phasesOf(update)) {
    const piece = swatch(phase);
    piece.style.width = `${(100 * seconds) / Math.max(scale, Math.min(total, scale))}%`;
    piece.title = `${wordsOf(phase)} ${secondsText(seconds)}`;
    told.push(piece.title);
    bar.append(piece);
  }
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", told.join(", "));
  return bar;
}

const KINDS = { push: "push", disk: "load from disk", rollback: "rollback", undo: "went back by itself" };

function updateItem(update, scale, now) {
  const error = update.error;
  const item = make("li", error ? "failed" : "");
  const what = make("span", "what mono", textOf(update.weight_version));
  const how = error
    ? `failed: ${wordsOf(error.code)}, while ${wordsOf(error.phase)}`
    : `${secondsText(update.seconds)}, not serving for ${secondsText(update.pause_seconds)}`;
  const age = make("span", "numbers", agoText(update.finished_at, now));
  age.dataset.when = textOf(update.finished_at);
  item.append(make("div", "split", what, age));
  item.append(barOf(update, scale));
  const facts = [KINDS[update.kind] ?? textOf(update.kind), textOf(update.mode), textOf(update.transport)];
  const size = `${countText(update.tensors, "tensor")}, ${bytesText(update.bytes)}`;
  item.append(make("div", "split numbers", make("span", "", how), make("span", "", `${facts.join(" · ")} · ${size}`)));
  if (error) item.append(make("div", "numbers", textOf(error.message)));
  return item;
}

function showAges(list, now) {
  for (const age of list.querySelectorAll("[data-when]")) put(age, agoText(age.dataset.when, now));
}

function updatesList(updates, now) {
  if (!updates.length) return [make("p", "quiet", "None since this server started.")];
  const list = make("ol", "updates");
  const scale = scaleOf(updates);
  for (const update of updates) list.append(updateItem(update, scale, now));
  const present = new Set(updates.flatMap((update) => phasesOf(update).map(([phase]) => phase)));
  const key = make("div", "key");
  for (const phase of PHASES) if (present.has(phase)) key.append(make("span", "", swatch(phase), wordsOf(phase)));
  return [list, key];
}
