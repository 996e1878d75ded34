// A chart: lines over steps, epochs or time, with values on hover, smoothing, a log scale and zoom by dragging.

const MOST_NAMED = 10; // lines in a legend or a tip: of more, those that are nearest to the pointer
const AREA = { left: 46, right: 10, top: 12, bottom: 24, height: 210 };
const charts = [];
let zoom = null; // the range of x that all charts show; null for all of it

class Chart {
  // Each line has a label, a color, x, y, and places(axis): its x on that axis.
  constructor(metric, lines, goal, suffix = "") {
    this.metric = metric;
    this.lines = lines;
    this.goal = goal;
    this.svg = drawn("svg", { role: "img", tabindex: "0", "aria-label": `${metric} over steps` });
    this.tip = element("div", { class: "tip", hidden: true });
    this.log = element("button", { type: "button", title: "logarithmic scale", onclick: () => this.toggleLog() }, "log");
    this.legend = element("div", { class: "legend" });
    this.root = element("section", { class: "card chart", "data-metric": metric },
      element("header", {}, element("h3", {}, (TITLES[metric] || metric) + suffix), this.log), this.svg, this.legend, this.tip);
    this.listen();
    charts.push(this);
  }

  get isLog() {
    return chosen.log.includes(this.metric);
  }

  toggleLog() {
    chosen.log = toggled(chosen.log, this.metric, !this.isLog);
    keep();
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width) return;
    this.log.setAttribute("aria-pressed", this.isLog);
    this.shown = this.lines.filter((line) => !chosen.hidden.includes(line.run)).map((line) => this.prepare(line));
    this.measure(width);
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${AREA.height}`);
    this.drawAxes(width);
    for (const line of this.shown) this.drawLine(line);
    this.rule = drawn("line", { class: "rule", y1: AREA.top, y2: AREA.height - AREA.bottom, visibility: "hidden" });
    this.dots = drawn("g", {});
    this.selection = drawn("rect", { class: "select", y: AREA.top, height: AREA.height - AREA.top - AREA.bottom, width: 0 });
    this.svg.append(this.rule, this.dots, this.selection);
    const named = this.shown.length > MOST_NAMED ? [] : this.shown; // the runs are named above the charts
    this.legend.replaceChildren(...named.map((line) => {
      const last = line.y.findLast((value) => value !== null);
      return element("span", {}, dot(line.color, line.dash), `${line.label} ${last === undefined ? "nan" : formatted(this.metric, last)}`);
    }));
    if (this.goal !== null) this.legend.append(element("span", {}, element("i", { class: "dash" }), `expected ${number(this.goal)}`));
  }

  prepare(line) {
    const x = line.places(chosen.axis);
    const [from, to] = zoom || [-Infinity, Infinity];
    const first = Math.max(0, x.findIndex((place) => place >= from) - 1);
    const beyond = x.findIndex((place) => place > to);
    const last = beyond < 0 ? x.length : beyond + 1;
    const smooth = line.isDense && chosen.smoothing > 0 ? smoothed(line.y, chosen.smoothing) : null;
    return { ...line, x: x.slice(first, last), y: line.y.slice(first, last), smooth: smooth && smooth.slice(first, last) };
  }

  measure(width) {
    const xs = this.shown.flatMap((line) => [line.x[0], line.x.at(-1)]).filter((x) => x !== undefined);
    let [left, right] = zoom || [Math.min(...xs), Math.max(...xs)];
    if (!(left < right)) [left, right] = [left - 0.5, left + 0.5];
    const isUsable = (y) => y !== null && (!this.isLog || y > 0);
    let low = Infinity, high = -Infinity;
    for (const line of this.shown)
      for (const y of line.y) if (isUsable(y)) { low = Math.min(low, y); high = Math.max(high, y); }
    if (this.goal !== null && isUsable(this.goal)) { low = Math.min(low, this.goal); high = Math.max(high, this.goal); }
    if (low > high) [low, high] = this.isLog ? [0.1, 1] : [0, 1];
    const to = this.isLog ? Math.log10 : (y) => y;
    const pad = (to(high) - to(low)) * 0.05 || Math.abs(to(high)) * 0.05 || 0.5;
    const [bottom, top] = [to(low) - pad, to(high) + pad], room = AREA.height - AREA.top - AREA.bottom;
    this.range = { left, right, bottom, top };
    this.toX = (x) => AREA.left + ((x - left) / (right - left)) * (width - AREA.left - AREA.right);
    this.fromX = (place) => left + ((place - AREA.left) / (width - AREA.left - AREA.right)) * (right - left);
    this.toY = (y) => (isUsable(y) ? AREA.top + (1 - (to(y) - bottom) / (top - bottom)) * room : null);
  }

  drawAxes(width) {
    const { left, right, bottom, top } = this.range, base = AREA.height - AREA.bottom;
    const ys = this.isLog ? logTicks(bottom, top) : ticks(bottom, top, 5);
    for (const y of ys) {
      const place = this.toY(y);
      this.svg.append(drawn("line", { class: "grid", x1: AREA.left, x2: width - AREA.right, y1: place, y2: place }));
      const text = this.metric === "data_wait" ? `${short(100 * y)}%` : short(y);
      this.svg.append(drawn("text", { class: "tick", x: AREA.left - 6, y: place + 4, "text-anchor": "end" }, text));
    }
    for (const x of axisTicks(left, right)) {
      const text = chosen.axis === "time" ? duration(x).replace(" min 0 s", " min").replace(" h 0 min", " h") : short(x);
      const anchor = this.toX(x) > width - 30 ? "end" : "middle";
      this.svg.append(drawn("text", { class: "tick", x: this.toX(x), y: base + 17, "text-anchor": anchor }, text));
    }
    if (this.goal !== null && this.toY(this.goal) !== null) {
      const place = this.toY(this.goal);
      this.svg.append(drawn("line", { class: "goal", x1: AREA.left, x2: width - AREA.right, y1: place, y2: place },
        drawn("title", {}, `expected: ${number(this.goal)}`)));
    }
  }

  drawLine(line) {
    const color = { style: { stroke: line.color } }, kind = line.isThin ? "line thin" : "line";
    if (line.smooth) this.svg.append(drawn("path", { class: "raw", d: this.path(line.x, line.y), ...color }));
    this.svg.append(drawn("path", { class: kind, "stroke-dasharray": line.dash, d: this.path(line.x, line.smooth || line.y), ...color }));
    if (line.x.length <= 40 && line.hasDots)
      line.y.forEach((y, index) => {
        const place = this.toY(y);
        const at = { cx: this.toX(line.x[index]), cy: place, r: 2.6 };
        if (place !== null) this.svg.append(drawn("circle", { ...at, style: { fill: line.color } }));
      });
    const base = AREA.height - AREA.bottom;
    line.y.forEach((y, index) => {
      const x = this.toX(line.x[index]);
      if (y === null) this.svg.append(drawn("path", { class: "gap", d: `M${x} ${base}v-8` }, drawn("title", {}, "not finite")));
    });
  }

  path(xs, ys) {
    let text = "", isNew = true;
    for (let index = 0; index < xs.length; index++) {
      const y = this.toY(ys[index]);
      if (y === null) { isNew = true; continue; }
      text += `${isNew ? "M" : "L"}${this.toX(xs[index]).toFixed(1)} ${y.toFixed(1)}`;
      isNew = false;
    }
    return text;
  }

  listen() {
    let start = null;
    const place = (event) => event.clientX - this.svg.getBoundingClientRect().left;
    this.svg.addEventListener("pointermove", (event) => {
      this.hover(this.fromX(place(event)), event.clientY - this.svg.getBoundingClientRect().top);
      if (start === null) return;
      const [from, to] = [start, place(event)].sort((a, b) => a - b);
      this.selection.setAttribute("x", from);
      this.selection.setAttribute("width", to - from);
    });
    this.svg.addEventListener("pointerleave", () => { this.leave(); start = null; });
    this.svg.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") start = place(event); });
    this.svg.addEventListener("pointerup", (event) => {
      const from = start;
      start = null;
      if (from !== null && Math.abs(place(event) - from) > 12) setZoom([this.fromX(from), this.fromX(place(event))].sort((a, b) => a - b));
      else if (this.selection) this.selection.setAttribute("width", 0);
    });
    this.svg.addEventListener("dblclick", () => setZoom(null));
    this.svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !this.range) return;
      event.preventDefault();
      const { left, right } = this.range;
      this.hover(Math.min(right, Math.max(left, (this.at ?? left) + (step * (right - left)) / 40)));
    });
    this.svg.addEventListener("blur", () => this.leave());
  }

  hover(x, y = 0) {
    if (!this.range || !this.shown.some((line) => line.x.length)) return;
    this.at = x;
    const found = this.shown.filter((line) => line.x.length).map((line) => [line, nearest(line.x, x)]);
    const closest = found.reduce((best, each) => (Math.abs(each[0].x[each[1]] - x) < Math.abs(best[0].x[best[1]] - x) ? each : best));
    const at = this.toX(closest[0].x[closest[1]]);
    this.rule.setAttribute("x1", at);
    this.rule.setAttribute("x2", at);
    this.rule.setAttribute("visibility", "visible");
    this.dots.replaceChildren(...found.map(([line, index]) => {
      const y = this.toY((line.smooth || line.y)[index]);
      return y === null ? null : drawn("circle", { cx: this.toX(line.x[index]), cy: y, r: 3.5, style: { fill: line.color } });
    }).filter(Boolean));
    const away = ([line, index]) => Math.abs((this.toY((line.smooth || line.y)[index]) ?? Infinity) - y);
    const near = found.length > MOST_NAMED ? [...found].sort((a, b) => away(a) - away(b)).slice(0, MOST_NAMED) : found;
    const rows = near.map(([line, index]) => element("tr", {},
      element("td", {}, dot(line.color, line.dash), line.label),
      element("td", {}, formatted(this.metric, line.y[index])),
      line.smooth && element("td", { class: "soft" }, `≈ ${formatted(this.metric, line.smooth[index])}`)));
    this.tip.replaceChildren(element("div", { class: "soft" }, placeText(closest[0].x[closest[1]])), element("table", {}, rows));
    this.tip.hidden = false;
    const inner = this.svg.getBoundingClientRect(), outer = this.root.getBoundingClientRect();
    const width = this.root.clientWidth, tipWidth = this.tip.offsetWidth, center = at + inner.left - outer.left;
    this.tip.style.left = `${Math.max(4, center + 16 + tipWidth < width ? center + 16 : center - 16 - tipWidth)}px`;
    this.tip.style.top = `${inner.top - outer.top + 8}px`;
  }

  leave() {
    this.tip.hidden = true;
    if (!this.rule) return;
    this.rule.setAttribute("visibility", "hidden");
    this.dots.replaceChildren();
    this.selection.setAttribute("width", 0);
  }
}

function placeText(x) {
  if (chosen.axis === "time") return duration(x);
  return chosen.axis === "epoch" ? `epoch ${+x.toFixed(2)}` : `step ${Math.round(x).toLocaleString("en-US")}`;
}

function smoothed(values, weight) {
  // An exponential average without the pull of its start towards zero.
  let sum = 0, share = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    share = weight * share + 1 - weight;
    return sum / share;
  });
}

function nearest(sorted, x) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - sorted[low - 1] < sorted[low] - x ? low - 1 : low;
}

function ticks(low, high, number, units = [1, 2, 5, 10]) {
  const raw = (high - low) / number, power = 10 ** Math.floor(Math.log10(raw));
  const step = units.find((unit) => unit * power >= raw) * power;
  return spaced(low, high, step);
}

function spaced(low, high, step) {
  const found = [];
  for (let place = Math.ceil(low / step); place * step <= high && found.length < 50; place++) found.push(+(place * step).toPrecision(12));
  return found;
}

function logTicks(low, high) {
  const powers = spaced(Math.ceil(low), high, Math.max(1, Math.ceil((high - low) / 5))).map((power) => 10 ** power);
  if (powers.length > 1) return powers;
  return ticks(10 ** low, 10 ** high, 3).filter((tick) => tick > 0);
}

function axisTicks(left, right) {
  if (chosen.axis !== "time") return ticks(left, right, 4);
  const steps = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400];
  return spaced(left, right, steps.find((step) => step >= (right - left) / 4) || 86400 * Math.ceil((right - left) / 345600));
}

function setZoom(range) {
  zoom = range;
  document.getElementById("unzoom").hidden = !range;
  drawCharts();
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = charts.find((each) => each.root === entry.target);
    chart.isSeen = entry.isIntersecting;
    if (chart.isSeen && chart.isStale !== false) { chart.draw(); chart.isStale = false; }
  }
}, { rootMargin: "400px" });

function drawCharts() {
  for (const chart of charts) {
    chart.isStale = !chart.isSeen;
    if (chart.isSeen) chart.draw();
  }
}
