// The servers on the page, the token, and what can be said about all of them.
const byId = (id) => document.getElementById(id);
const own = addressOf(location.origin + location.pathname);
const cards = new Map();
let token = "";

function watch(base) {
  const server = new Server(base, changed);
  server.token = token;
  const card = new Card(server, base === own ? null : () => unwatch(base));
  cards.set(base, card);
  byId("servers").append(card.node);
  arrange();
  card.update();
  server.run();
}

function unwatch(base) {
  const card = cards.get(base);
  card.server.close();
  card.node.remove();
  cards.delete(base);
  arrange();
  changed();
}

function arrange() {
  const several = cards.size > 1;
  if (document.body.classList.toggle("several", several) !== arrange.before) {
    for (const { updates, workers } of cards.values()) updates.node.open = workers.node.open = !several;
    arrange.before = several;
  } else if (several) {
    const { updates, workers } = [...cards.values()].at(-1);
    updates.node.open = workers.node.open = false;
  }
  const known = document.querySelector("meta[name=fleet-origins]").content.split(" ").filter(Boolean);
  byId("known").replaceChildren(
    ...known.filter((origin) => !cards.has(origin)).map((origin) => Object.assign(make("option"), { value: origin })),
  );
}
arrange.before = false;

// At most once for each frame, whatever comes.
const stale = new Set();
function changed(server) {
  if (!stale.size) requestAnimationFrame(draw);
  stale.add(server ?? null);
}

function draw() {
  const some = [...stale];
  stale.clear();
  for (const server of some) if (server) cards.get(server.base)?.update();
  const servers = [...cards.values()].map((card) => card.server);
  put(byId("summary"), summaryOf(servers));
  const locked = servers.some((server) => server.locked);
  byId("access").hidden = Boolean(token) || !locked;
  byId("unlocked").hidden = !token;
  document.title = `${summaryOf(servers)} – weightpush`;
  paintIcon(worstOf(servers));
}

function stateOf(server) {
  return server.link === "lost" ? "unreachable" : server.status ? wordsOf(server.status.state) : "connecting";
}

function headlineOf(server) {
  const { status } = server;
  if (!status || server.link === "lost") return stateOf(server);
  if (status.update) return `${stateOf(server)} to ${textOf(status.update.weight_version)}`;
  if (status.state === "failed") return `failed: ${wordsOf(status.last_error?.code)}`;
  return status.serving ? `${stateOf(server)} ${textOf(status.weight_version)}` : stateOf(server);
}

function summaryOf(servers) {
  if (servers.length === 1) {
    const [server] = servers;
    return headlineOf(server);
  }
  const counts = new Map();
  for (const server of servers) counts.set(stateOf(server), (counts.get(stateOf(server)) ?? 0) + 1);
  const states = [...counts].map(([state, count]) => `${count} ${state}`).join(", ");
  const serving = servers.filter((server) => server.link !== "lost" && server.status?.serving);
  const versions = [...new Set(serving.map((server) => textOf(server.status.weight_version)))];
  if (versions.length === 1) {
    return serving.length === servers.length ? `all ${servers.length} serve ${versions[0]}` : `${states}; served: ${versions[0]}`;
  }
  return versions.length ? `${states}; ${versions.length} versions are served: ${versions.join(", ")}` : states;
}

const BY_CONCERN = ["failed", "unreachable", "awaiting weights", "updating", "staging", "connecting", "serving"];
const DOTS = { failed: "e5484d", unreachable: "8b95a3", updating: "e0a100", staging: "2f7de1", serving: "30a46c" };

function worstOf(servers) {
  const states = servers.map(stateOf);
  return BY_CONCERN.find((state) => states.includes(state)) ?? "connecting";
}

function paintIcon(state) {
  const dot = DOTS[state] ?? "8e6fe0";
  const href = `data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'><circle cx='8' cy='8' r='7' fill='%23${dot}'/></svg>`;
  if (byId("icon").getAttribute("href") !== href) byId("icon").setAttribute("href", href);
}

byId("access").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value.trim();
  byId("token").value = "";
  for (const { server } of cards.values()) server.useToken(token);
  changed();
});

byId("forget").addEventListener("click", () => {
  token = "";
  for (const { server } of cards.values()) server.useToken("");
  changed();
});

byId("add").addEventListener("submit", (event) => {
  event.preventDefault();
  const typed = byId("address").value;
  const base = addressOf(typed);
  const complaint = base === null ? `${typed} is no address of a server.` : cards.has(base) ? `${base} is there already.` : "";
  byId("refused").hidden = !complaint;
  put(byId("refused"), complaint);
  if (complaint) return;
  byId("address").value = "";
  watch(base);
});

// The browser says so here only, when the page's own policy keeps it from reading a server.
document.addEventListener("securitypolicyviolation", (event) => {
  if (event.effectiveDirective !== "connect-src") return;
  for (const { server } of cards.values()) {
    if (event.blockedURI.startsWith(new URL(server.base).origin)) {
      server.barred = true;
      changed(server);
    }
  }
});

// Ages and spans go on while nothing happens.
setInterval(() => {
  for (const { server } of cards.values()) changed(server);
}, 1000);

watch(own);
