// Everything that a server says goes into the document as text: this is the only way in.
function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  for (const child of children) node.append(typeof child === "string" ? document.createTextNode(child) : child);
  return node;
}

// Left alone where it says so already: a reader may have selected it.
function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function textOf(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function numberOf(value) {
  return typeof value === "number" && Number.isFinite(value) ? value : 0;
}

function listOf(value) {
  return Array.isArray(value) ? value.filter((item) => item !== null && typeof item === "object") : [];
}

function wordsOf(name) {
  return textOf(name).replaceAll("_", " ");
}

function bytesText(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = numberOf(count);
  let unit = 0;
  while (size >= 999.5 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${size >= 100 || unit === 0 ? size.toFixed(0) : size.toPrecision(3)} ${units[unit]}`;
}

function secondsText(seconds) {
  const span = Math.max(0, numberOf(seconds));
  if (span < 0.9995) return `${Math.round(span * 1000)} ms`;
  if (span < 99.5) return `${span.toPrecision(span < 9.995 ? 3 : 2)} s`;
  const minutes = Math.floor(span / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(span - 60 * minutes)} s`;
  return minutes < 2880 ? `${Math.round(minutes / 60)} h` : `${Math.round(minutes / 1440)} days`;
}

// In whole seconds, for what goes on while it is read.
function ageText(seconds) {
  return seconds < 100 ? `${Math.max(0, Math.round(numberOf(seconds)))} s` : secondsText(Math.round(seconds));
}

// `now` in milliseconds, by the clock of the server that wrote `when`.
function agoText(when, now) {
  const then = Date.parse(textOf(when));
  if (Number.isNaN(then)) return "";
  return now - then < 1500 ? "just now" : `${ageText((now - then) / 1000)} ago`;
}

function countText(count, word) {
  return `${numberOf(count).toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}
