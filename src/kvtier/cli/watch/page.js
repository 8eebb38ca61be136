"use strict";
// Draws status.json and hour.json, which the page's own server gives. All text is set as
// textContent: names of models and requests are never markup.

const STATUS_EVERY_MS = 2000, HOUR_EVERY_MS = 10000;
const PLACES = 6;
const byId = (id) => document.getElementById(id);

// --- texts, as `kvtier top` has them ------------------------------------------------------------

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  const places = unit === 0 ? 0 : Math.max(0, 3 - String(Math.floor(bytes)).length);
  let text = (Math.floor(bytes * 10 ** places) / 10 ** places).toFixed(places);
  if (places) text = text.replace(/0+$/, "").replace(/\.$/, "");
  return `${text} ${units[unit]}`;
}
const rate = (bytes) => (bytes < 1 ? "0 B/s" : `${size(bytes)}/s`);
const percent = (share) => `${Math.round(100 * share)} %`;
const whole = (n) => Math.round(n).toLocaleString("en-US");
function count(n) {
  for (const [unit, scale] of [["G", 1e9], ["M", 1e6]]) {
    if (n >= scale) return `${Number((n / scale).toPrecision(3))} ${unit}`;
  }
  return whole(n);
}
function span(seconds) {
  const s = Math.max(0, Math.floor(seconds)), f = Math.floor;
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${f(s / 60)} min`;
  if (s < 86400) return `${f(s / 3600)} h ${f((s % 3600) / 60)} min`;
  return `${f(s / 86400)} d ${f((s % 86400) / 3600)} h`;
}
function duration(seconds) {
  if (seconds >= 100) return span(seconds);
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  const ms = Math.max(0, seconds * 1000);
  return ms < 10 ? `${ms.toFixed(1)} ms` : `${ms.toFixed(0)} ms`;
}
const words = (name) => name.replaceAll("_", " ");

// --- elements -----------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
function makeSvg(tag, attributes = {}, text = null) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  return element;
}
const OTHERS = { device: "place5", computed: "soft", without: "soft" };
let places = [];
function colour(place) {
  const known = places.indexOf(place);
  if (known < 0) return `var(--${OTHERS[place] || "place0"})`;
  return `var(--place${known % PLACES})`;
}
function swatch(place) {
  const element = make("span", { class: "swatch", "aria-hidden": "true" });
  element.style.color = colour(place);
  return element;
}
function show(id, children) {
  byId(id).replaceChildren(...children);
}

// --- now ----------------------------------------------------------------------------------------

const STATES = {
  working: "Working", idle: "Idle", empty: "No data yet", silent: "No answer", gone: "Ended",
  none: "No engine", lost: "Page ended",
};
function sayState(state, text) {
  byId("state").dataset.state = state;
  const said = text ? `${STATES[state]}: ${text}` : STATES[state];
  if (byId("state-text").textContent !== said) byId("state-text").textContent = said;
  byId("main").classList.toggle("stale", ["silent", "gone", "none", "lost"].includes(state));
}
function sayBanner(text) {
  const banner = byId("banner");
  if (banner.textContent !== text) banner.textContent = text;
  banner.hidden = !text;
}
function showStatus(its) {
  const first = its.engines[0];
  const models = [...new Set(its.engines.map((each) => `${each.model} ${each.dtype}`))];
  byId("model").textContent = models.join(", ");
  document.title = first ? `kvtier: ${STATES[its.state]}, ${models[0]}` : "kvtier";
  if (first) {
    const idle = Math.min(...its.engines.map((each) => each.idle_s));
    const up = its.engines.length === 1
      ? `process ${first.pid}, up ${span(its.now_s - first.started_s)}`
      : `${its.engines.length} engines`;
    const last = its.state === "idle" ? `, last step ${span(idle)} ago` : "";
    sayState(its.state, up + last);
  } else {
    sayState(its.state, "");
  }
  const banners = {
    empty: "No data yet: nothing has been stored or loaded since the engine started.",
    silent: "The engine does not answer: it is stopped, or very busy. The figures are from before.",
    gone: "The engine has ended. The figures are its last ones.",
    none: "No engine runs here. The page waits for one.",
  };
  const problem = its.problem && its.state !== "empty" ? its.problem : "";
  sayBanner([banners[its.state] || "", problem].filter(Boolean).join(" "));
  places = its.tiers.map((tier) => tier.tier);
  showServed(its);
  byId("tiers-section").hidden = !its.tiers.length;
  show("tiers", its.tiers.map(tierCard));
  showRequests(its.requests);
  byId("engines-section").hidden = its.engines.length < 2;
  show("engines", its.engines.map((each) => make("li", {},
    `process ${each.pid}, ${each.model}: ${each.state}, up ${span(its.now_s - each.started_s)}`)));
  byId("rates").textContent = its.rates_over_s === null ? ""
    : `Rates are those of the last ${Math.round(its.rates_over_s)} s.`;
}
function tile(id, value, text) {
  return make("div", { class: "tile", id }, make("b", {}, value), make("span", {}, text));
}
function showServed(its) {
  byId("served").hidden = !its.tiers.length;
  if (!its.tiers.length) return;
  const host = its.tiers[0];
  const known = (value, text) => (value === null ? "–" : text(value));
  const found = (shares) =>
    (Object.keys(shares).length ? percent(1 - (shares.computed || 0)) : "–");
  const tiles = Object.keys(its.tokens_of_all).length ? [
    tile("share-now", found(its.tokens), "of prompt tokens found, now"),
    tile("share-all", found(its.tokens_of_all), "of prompt tokens found since the start"),
  ] : [
    tile("share-now", known(its.loaded_share, percent), "of blocks loaded, not computed, now"),
    tile("share-all", known(its.loaded_share_of_all, percent), "of blocks loaded since the start"),
  ];
  if (its.saved_s) tiles.push(tile("saved", duration(its.saved_s), "of computing saved since the start"));
  for (const [half, seconds] of Object.entries(its.first_token_s)) {
    tiles.push(tile(`first-${half}`, duration(seconds), `to the first token, ${half} kvtier`));
  }
  if (its.served_percent < 100) {
    tiles.push(tile("share", `${its.served_percent} %`, "of the requests served by kvtier"));
  }
  if (its.mean_wait_s !== null) tiles.push(tile("wait", duration(its.mean_wait_s), "a wait for tiers"));
  tiles.push(tile("to-device", rate(host.load_bytes_per_s), "loaded to the device"));
  tiles.push(tile("from-device", rate(host.store_bytes_per_s), "stored from the device"));
  show("served", tiles);
}
function tierCard(tier) {
  const name = make("h3", {}, swatch(tier.tier), tier.tier);
  const title = make("div", { class: "title" }, name);
  if (tier.loads !== null) {
    const same = tier.loads === tier.stores;
    const worst = ["cut off", "being tried", "switched off"].find((s) => s === tier.loads || s === tier.stores);
    const text = same ? tier.loads : `loads ${tier.loads}, stores ${tier.stores}`;
    title.append(make("span", { class: "breaker", "data-is": worst || "in use" }, text));
  }
  const card = make("article", { class: "card", "data-tier": tier.tier }, title);
  const share = tier.capacity_bytes ? Math.min(1, (tier.used_bytes || 0) / tier.capacity_bytes) : null;
  if (tier.used_bytes !== null && share !== null) {
    const fill = make("div");
    fill.style.width = `${100 * share}%`;
    fill.style.background = colour(tier.tier);
    const room = `${percent(share)} of ${size(tier.capacity_bytes)}`;
    card.append(make("div", {
      class: "bar", role: "meter", "aria-label": `${tier.tier}, room in use`, "aria-valuemin": "0",
      "aria-valuemax": "100", "aria-valuenow": String(Math.round(100 * share)),
      "aria-valuetext": room,
    }, fill), make("p", { "data-is": "room" }, `${room} in use`));
  } else {
    const used = tier.used_bytes !== null ? `${size(tier.used_bytes)} in use`
      : tier.capacity_bytes ? `Room for ${size(tier.capacity_bytes)}` : "Does not tell how full it is";
    card.append(make("p", { "data-is": "room", class: "hint" }, used));
  }
  const figures = [
    ["load rate", rate(tier.load_bytes_per_s)], ["store rate", rate(tier.store_bytes_per_s)],
    ["loaded", count(tier.loaded_blocks)], ["stored", count(tier.stored_blocks)],
  ];
  if (tier.hit_blocks !== null) figures.push(["hits", count(tier.hit_blocks)]);
  if (tier.evicted_blocks !== null) figures.push(["evicted", count(tier.evicted_blocks)]);
  if (tier.read_back_bytes !== null && tier.stored_bytes) {
    figures.push(["read back", percent(tier.read_back_bytes / tier.stored_bytes)]);
  }
  if (tier.queued_blocks !== null) figures.push(["queued", count(tier.queued_blocks)]);
  if (tier.loading_blocks !== null) figures.push(["loading", count(tier.loading_blocks)]);
  if (tier.hit_blocks !== null) {
    figures.push(["load takes", tier.mean_load_s === null ? "–" : duration(tier.mean_load_s)]);
    figures.push(["store takes", tier.mean_store_s === null ? "–" : duration(tier.mean_store_s)]);
  }
  card.append(make("dl", {}, ...figures.map(([term, value]) =>
    make("div", {}, make("dt", {}, term), make("dd", { "data-is": term }, value)))));
  const notes = [
    ...Object.entries(tier.declined).map(([why, n]) => ["declined", why, n]),
    ...Object.entries(tier.not_stored).map(([why, n]) => ["not stored", why, n]),
  ].map(([what, why, n]) => make("li", {}, make("b", {}, `${what}: `), `${count(n)} ${words(why)}`));
  for (const [what, n] of Object.entries(tier.troubles)) {
    const now = tier.is_in_trouble ? " now" : "";
    notes.push(make("li", { class: `trouble${now}` }, `${what}: ${count(n)}`));
  }
  if (notes.length) card.append(make("ul", { class: "notes" }, ...notes));
  return card;
}
function showRequests(requests) {
  byId("requests-section").hidden = requests === null;
  if (requests === null) return;
  const rows = requests.map((its) => {
    const from = Object.entries(its.loaded).map(([place, n]) => `${place} ${whole(n)}`).join(", ");
    const known = (value, text) => (value === null ? "–" : text(value));
    const cell = (name, text, kind = "") => make("td", { "data-name": name, class: kind }, text);
    return make("tr", {}, make("td", { title: its.id }, its.id), cell("state", its.state),
      cell("tokens", known(its.tokens, whole), "n"),
      cell("found", known(its.found_share, percent), "n"), cell("loaded from", from || "–"),
      cell("waited", known(its.waited_s, duration), "n"));
  });
  if (!rows.length) rows.push(make("tr", {}, make("td", { colspan: "6" }, "none yet")));
  show("requests", rows);
}

// --- charts -------------------------------------------------------------------------------------

const CHARTS = [
  { name: "tokens", title: "Sources of prompt tokens", text: percent, most: 1,
    stacked: true },
  { name: "loaded_share", title: "Blocks loaded, not computed", text: percent, most: 1 },
  { name: "saved", title: "Computing saved, per second", text: duration },
  { name: "waits", title: "A wait for tiers", text: duration },
  { name: "first_tokens", title: "Time to the first token", text: duration },
  { name: "loads", title: "Loads", text: rate, steps: 1024 },
  { name: "stores", title: "Stores", text: rate, steps: 1024 },
  { name: "used", title: "Room in use", text: percent, most: 1 },
  { name: "load_seconds", title: "Time of a load", text: duration },
  { name: "queued", title: "Blocks that wait to be stored", text: count, least: 2 },
];
const SPANS = [10, 20, 30, 60], SMOOTH_FROM = 180;
const HEIGHT = 168, LEFT = 74, RIGHT = 10, TOP = 10, BOTTOM = 24;

function niceMost(value, steps) {
  if (!(value > 0)) return 1;
  let unit = 1;
  if (steps) while (value / unit >= steps) unit *= steps;
  const scale = 10 ** Math.floor(Math.log10(value / unit));
  const nice = [1, 2, 4, 6, 10].find((step) => step * scale >= value / unit);
  return nice * scale * unit;
}

function means(line, together) {
  return Array.from({ length: line.length / together }, (_, n) => {
    const known = line.slice(n * together, (n + 1) * together).filter((value) => value !== null);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  });
}

class Chart {
  constructor(kind) {
    this.kind = kind;
    this.at = null;
    this.num = 0;
    this.lines = [];
    this.svg = makeSvg("svg", { role: "img", tabindex: "0" });
    this.when = make("span", { "aria-live": "polite" });
    this.legend = make("ul", { class: "legend" });
    this.figure = make("figure", { "data-chart": kind.name },
      make("figcaption", {}, kind.title, this.when), this.svg, this.legend);
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      const inner = box.width - LEFT - RIGHT;
      this.moveTo(Math.floor(((event.clientX - box.left - LEFT) / inner) * this.num));
    });
    this.svg.addEventListener("pointerleave", () => this.moveTo(null));
    this.svg.addEventListener("blur", () => this.moveTo(null));
    this.svg.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -6, ArrowRight: 6, Home: -1e6, End: 1e6 }[event.key];
      if (event.key === "Escape") this.moveTo(null);
      if (!by) return;
      event.preventDefault();
      this.moveTo((this.at === null ? this.num - 1 : this.at) + by);
    });
    new ResizeObserver(() => this.draw()).observe(this.figure);
  }

  set(hour) {
    const lines = Object.entries(hour.charts[this.kind.name]);
    this.figure.hidden = !lines.length;
    // A short history is drawn wide, and a long one without its noise.
    const first = Math.min(...lines.map(([, line]) => line.findIndex((value) => value !== null)));
    const all = lines.length ? lines[0][1].length : 0;
    const shown = Math.min(all, SPANS.map((minutes) => (60 * minutes) / hour.every_s)
      .find((num) => num >= all - first) || all);
    const together = shown > SMOOTH_FROM ? 3 : 1;
    this.num = shown / together;
    this.everyS = hour.every_s * together;
    this.endS = hour.end_s;
    this.lines = lines.map(([place, line]) => [place, means(line.slice(all - shown), together)]);
    this.draw();
  }

  moveTo(at) {
    this.at = at === null ? null : Math.min(this.num - 1, Math.max(0, at));
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width || !this.lines.length) return;
    const { kind, num, lines } = this;
    const values = lines.flatMap(([, line]) => line).filter((value) => value !== null);
    const most = kind.most || niceMost(Math.max(...values, kind.least || 0), kind.steps);
    const x = (n) => LEFT + ((n + 0.5) / num) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - value / most) * (HEIGHT - TOP - BOTTOM);
    const drawn = [];
    for (const part of [0, 0.5, 1]) {
      const at = y(part * most);
      drawn.push(makeSvg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
      drawn.push(makeSvg("text", { x: LEFT - 8, y: at + 4, "text-anchor": "end" },
        part ? kind.text(part * most) : "0"));
    }
    for (const part of [0, 0.5, 1]) {
      const minutes = ((1 - part) * num * this.everyS) / 60;
      drawn.push(makeSvg("text", {
        x: LEFT + part * (width - LEFT - RIGHT), y: HEIGHT - 6,
        "text-anchor": ["start", "middle", "end"][2 * part],
      }, minutes ? `${minutes} min ago` : "now"));
    }
    if (kind.stacked) drawn.push(...this.stack(x, y));
    else lines.forEach(([place, line]) => {
      const path = makeSvg("path", { d: this.path(line, x, y) });
      path.style.stroke = colour(place);
      drawn.push(path);
      line.forEach((value, n) => {
        if (value === null || (line[n - 1] ?? line[n + 1] ?? null) !== null) return;
        const dot = makeSvg("circle", { cx: x(n), cy: y(value), r: 1.75 });
        dot.style.fill = colour(place);
        drawn.push(dot);
      });
    });
    if (this.at !== null) {
      const at = x(this.at);
      drawn.push(makeSvg("line", { class: "at", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...drawn);
    this.say();
  }

  stack(x, y) {
    const below = Array(this.num).fill(0), areas = [];
    for (const [place, line] of this.lines) {
      const above = below.map((sum, n) => sum + (line[n] || 0));
      for (let from = 0; from < this.num; from += 1) {
        if (line[from] === null) continue;
        let end = from;
        while (end + 1 < this.num && line[end + 1] !== null) end += 1;
        const over = (sums) => sums.slice(from, end + 1)
          .flatMap((sum, n) => [-0.5, 0.5].map((half) => `${x(from + n + half)},${y(sum)}`));
        const area = makeSvg("polygon", { points: [...over(above), ...over(below).reverse()].join(" ") });
        area.style.fill = colour(place);
        areas.push(area);
        from = end;
      }
      below.splice(0, this.num, ...above);
    }
    return areas;
  }

  path(line, x, y) {
    let path = "", open = false;
    line.forEach((value, n) => {
      if (value !== null) {
        path += `${open ? "L" : "M"}${x(n).toFixed(1)} ${y(value).toFixed(1)}`;
      }
      open = value !== null;
    });
    return path;
  }

  say() {
    const { kind, lines } = this;
    const newest = (line) => line.findLast((value) => value !== null);
    const read = (line) => (this.at === null ? newest(line) : line[this.at]);
    this.when.textContent = this.at === null ? "newest"
      : new Date(1000 * (this.endS - this.everyS * (this.num - this.at - 0.5)))
        .toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
    const texts = lines.map(([place, line]) => {
      const value = read(line);
      return [place, value === null || value === undefined ? "–" : kind.text(value)];
    });
    this.legend.replaceChildren(...texts.map(([place, text]) =>
      make("li", {}, swatch(place), `${place} `, make("b", {}, text))));
    const all = texts.map(([place, text]) => `${place} ${text}`).join(", ");
    this.svg.setAttribute("aria-label", `${kind.title}, the last hour. ${this.when.textContent}: ${all}`);
  }
}

const charts = CHARTS.map((kind) => new Chart(kind));
show("charts", charts.map((chart) => chart.figure));
function showHour(hour) {
  const has = Object.values(hour.charts).some((lines) => Object.keys(lines).length);
  byId("hour-section").hidden = !has;
  if (has) charts.forEach((chart) => chart.set(hour));
}

// --- asking -------------------------------------------------------------------------------------

async function read(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}
let hourAt = -HOUR_EVERY_MS;
async function look() {
  let status, hour = null;
  try {
    status = await read("status.json");
    if (performance.now() - hourAt >= HOUR_EVERY_MS) hour = await read("hour.json");
  } catch {
    sayState("lost", "");
    sayBanner("This page's server does not answer. Is “kvtier page” still running?");
    return;
  }
  showStatus(status);
  if (hour !== null) {
    hourAt = performance.now();
    showHour(hour);
  }
  document.body.dataset.shown = String(Number(document.body.dataset.shown || 0) + 1);
}
async function lookAgainAndAgain() {
  try {
    if (!document.hidden) await look();
  } finally {
    setTimeout(lookAgainAndAgain, STATUS_EVERY_MS);
  }
}
lookAgainAndAgain();
