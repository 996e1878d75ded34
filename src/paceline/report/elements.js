"use strict";
// Elements, numbers and what a reader has chosen. Text from runs goes into text nodes only.

function element(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function drawn(tag, attributes, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || (value === false && !name.startsWith("aria-"))) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function dot(color, dash) {
  if (!dash) return element("i", { class: "dot", style: { background: color } });
  return drawn("svg", { class: "stroke", viewBox: "0 0 24 8" },
    drawn("path", { d: "M0 4h24", "stroke-dasharray": dash, style: { stroke: color } }));
}

function number(value) {
  if (typeof value !== "number") return "nan";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-4)) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  if (size >= 100) return value.toFixed(1);
  return size >= 1 ? value.toFixed(3) : value.toFixed(size < 0.01 ? 6 : 4);
}

function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9 || size < 1e-3) return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return String(+value.toPrecision(3));
}

function duration(seconds) {
  if (seconds === null || !isFinite(seconds)) return "–";
  const total = Math.round(seconds), hours = Math.floor(total / 3600), minutes = Math.floor((total % 3600) / 60);
  if (seconds < 10) return `${+seconds.toFixed(1)} s`;
  if (total < 60) return `${total} s`;
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${total % 60} s`;
}

function moment(seconds) {
  const date = new Date(seconds * 1000);
  return isNaN(date) ? "–" : date.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}

const FORMATS = {
  __proto__: null,
  data_wait: (value) => (value === null ? "nan" : `${(100 * value).toFixed(1)} %`),
  memory_mb: (value) => (value === null ? "nan" : value >= 10240 ? `${(value / 1024).toFixed(1)} GB` : `${Math.round(value)} MB`),
};
const TITLES = {
  __proto__: null,
  lr: "Learning rate", grad_norm: "Gradient norm", samples_per_second: "Throughput, samples per second",
  data_wait: "Time spent waiting for data", memory_mb: "Peak memory",
};

function formatted(metric, value) {
  return (FORMATS[metric] || number)(value);
}

// What the reader has chosen outlives a reload; a browser that keeps nothing for files is fine too.
const chosen = { smoothing: 0.6, axis: "step", log: [], hidden: [], tab: 0, open: [], scroll: 0 };
const KEPT = `paceline ${location.pathname}`;
try {
  Object.assign(chosen, JSON.parse(sessionStorage.getItem(KEPT) || "{}"));
} catch { /* nothing was kept */ }

function keep() {
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(chosen));
  } catch { /* nothing can be kept */ }
}

function toggled(list, item, isIn) {
  const others = list.filter((each) => each !== item);
  return isIn ? [...others, item] : others;
}
