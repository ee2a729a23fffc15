// Numbers and names as text, and DOM elements without markup.
//
// Names out of a model are hostile: they pass through `plain`, and reach the page as text nodes or
// on a canvas only. Nothing in these files writes HTML.

const HIDDEN = /[\p{C}\p{Zl}\p{Zp}]/gu; // controls, bidi marks, zero width, lone surrogates

/** A name with every character that cannot be seen, or that moves others, as \uXXXX. */
function plain(name) {
  return String(name).replace(HIDDEN, (mark) =>
    mark
      .split("")
      .map((unit) => "\\u" + unit.charCodeAt(0).toString(16).padStart(4, "0"))
      .join(""),
  );
}

/** A plain name of at most `limit` characters, cut in the middle; names differ at their end. */
function short(name, limit) {
  const text = Array.from(
    plain(name.length > 4000 ? name.slice(0, 2000) + name.slice(-2000) : name),
  );
  if (text.length <= limit) return text.join("");
  const head = Math.floor((limit - 1) / 3);
  return text.slice(0, head).join("") + "…" + text.slice(text.length - (limit - 1 - head)).join("");
}

function digits(value, count = 3) {
  if (value === 0) return "0";
  const rounded = Number(value.toPrecision(count));
  if (Math.abs(rounded) >= 10 ** count) return value.toFixed(0);
  return Math.abs(rounded) < 1e-6 ? rounded.toFixed(12).replace(/0+$/, "") : String(rounded);
}

function scaled(value, units, step, unknown = "–") {
  if (value === null || value === undefined || Number.isNaN(value)) return unknown;
  let index = 0;
  while (Number(digits(Math.abs(value))) >= step && index < units.length - 1) {
    value /= step;
    index += 1;
  }
  return `${digits(value)} ${units[index]}`;
}

/** 0.00123 -> "1.23 ms" */
function seconds(value) {
  if (value === 0) return "0 s";
  return scaled(
    value === null || value === undefined ? null : value * 1e9,
    ["ns", "µs", "ms", "s"],
    1000,
  );
}

/** 1536 -> "1.5 KiB" */
function size(value) {
  return scaled(value, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
}

/** 2.1e9 -> "2.1 GFLOP" */
function flops(value) {
  return scaled(value, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"], 1000);
}

/** 0.123 -> "12.3 %" */
function share(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) <= 1e-9) return "0 %"; // rounding errors
  return value > 0 && value < 1e-4 ? "< 0.01 %" : `${digits(100 * value)} %`;
}

/** 3.617 -> "3.62×" */
function times(value) {
  return value === null || value === undefined ? "–" : `${digits(value)}×`;
}

function perSecond(value) {
  if (value === null || value === undefined) return "–";
  return `${value >= 1000 ? count(Math.round(value)) : digits(value, 4)}/s`;
}

/** Of a plan: null is without a limit. */
function throughput(value) {
  return value === null ? "unlimited" : perSecond(value);
}

function bandwidth(value) {
  return value === null ? "free" : `${scaled(value, ["B", "kB", "MB", "GB", "TB"], 1000)}/s`;
}

function count(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en-US");
}

/** +1.2 ms, -3 µs, 0 s */
function change(value, format) {
  if (value === null || value === undefined) return "–";
  return value > 0 ? `+${format(value)}` : format(value).replace("-", "\u2212");
}

/** [0, 1, 2, 5] -> "0-2,5" */
function ranges(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const runs = [];
  for (const number of sorted) {
    const last = runs[runs.length - 1];
    if (last && number === last[1] + 1) last[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(",");
}

function shape(dims) {
  return dims.length ? dims.join("×") : "scalar";
}

/** An element; attributes that are functions become listeners, children that are strings text. */
function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(key, value);
    else if (key === "style") element.style.cssText = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** A name as an isolated element, shortened; the title tells more of it. */
function nameOf(name, limit = 40) {
  return el("bdi", { class: "name", title: short(name, 600) }, short(name, limit));
}

function byId(id) {
  return document.getElementById(id);
}

/** Says a change to people who cannot see the canvas. */
function announce(text) {
  byId("live").textContent = text;
}

/** Calls `action` once a frame, however often it is asked for. */
function framed(action) {
  let asked = 0;
  return () => {
    cancelAnimationFrame(asked);
    asked = requestAnimationFrame(action);
  };
}
