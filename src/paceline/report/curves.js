// Charts of all metrics, with what they share: smoothing, the axis, and which runs are seen.

const SYSTEM = ["lr", "grad_norm", "samples_per_second", "data_wait", "memory_mb"];
const NOT_NOISY = ["lr", "memory_mb"];
const SPLIT_COLORS = { __proto__: null, train: "var(--c0)", val: "var(--c1)", test: "var(--c2)" };

function metricNames() {
  const names = [...new Set(report.runs.flatMap((run) => run.series.map((each) => each.metric)))];
  const main = report.runs[0].main.metric, rank = (name) => (name === main ? 0 : name === "loss" ? 1 : 2);
  return names.sort((a, b) => rank(a) - rank(b));
}

function linesOf(metric, task) {
  const isOne = report.runs.length === 1;
  return report.runs.flatMap((run, index) => {
    const own = run.series.filter((each) => each.metric === metric && (!task || run.task === task));
    return own.map((each, place) => ({
      run: index,
      label: isOne ? each.split : own.length > 1 ? `${run.label} · ${each.split}` : run.label,
      color: isOne ? SPLIT_COLORS[each.split] || runColor(2 + place) : runColor(index),
      dash: isOne ? null : runDash(index),
      isThin: !isOne && each.split === "train" && own.length > 1,
      isDense: each.split === "train" && !NOT_NOISY.includes(metric),
      hasDots: each.split !== "train",
      y: each.y,
      places: (axis) => placesOn(axis, run, each.x),
    }));
  });
}

function tasksOf(metric) {
  // A loss of one task says nothing of another's; speed and memory do.
  if (SYSTEM.includes(metric)) return [null];
  return [...new Set(report.runs.filter((run) => run.series.some((each) => each.metric === metric)).map((run) => run.task))];
}

function placesOn(axis, run, steps) {
  if (axis === "epoch" && run.steps_per_epoch) return steps.map((step) => step / run.steps_per_epoch);
  if (axis !== "time" || !run.times.x.length) return steps;
  const { x, y } = run.times, start = startTime(run);
  return steps.map((step) => {
    const at = nearest(x, step), other = x[at] < step ? Math.min(at + 1, x.length - 1) : Math.max(at - 1, 0);
    const share = x[at] === x[other] ? 0 : (step - x[at]) / (x[other] - x[at]);
    return y[at] + share * (y[other] - y[at]) - start;
  });
}

function chartSection(id, title, metrics) {
  if (!metrics.length) return null;
  const made = metrics.flatMap((metric) => tasksOf(metric).map((task, _, tasks) => {
    const expected = report.runs.filter((run) => !task || run.task === task).flatMap((run) => run.expect);
    const goal = expected.findLast((each) => each.metric === metric)?.expected ?? null;
    return new Chart(metric, linesOf(metric, task), goal, tasks.length > 1 ? `, ${task}` : "");
  }));
  const note = "Train values are those of single steps; the console prints the median of the last 20 steps.";
  return element("section", { id }, element("h2", {}, title), id === "curves" && toolbar(),
    id === "curves" && element("p", { class: "soft" }, note),
    element("div", { class: "charts" }, made.map((chart) => chart.root)));
}

function toolbar() {
  const unzoom = element("button", { type: "button", id: "unzoom", hidden: true, onclick: () => setZoom(null) }, "show all");
  return element("div", { class: "bar" }, smoothingSlider(), axisButtons(), unzoom, report.runs.length > 1 && runChips());
}

function smoothingSlider() {
  const value = element("output", {}, chosen.smoothing.toFixed(2));
  const change = (event) => {
    chosen.smoothing = +event.target.value;
    value.textContent = chosen.smoothing.toFixed(2);
    keep();
    drawCharts();
  };
  const range = { type: "range", min: 0, max: 0.99, step: 0.01, value: chosen.smoothing };
  return element("label", {}, "Smoothing", element("input", { id: "smoothing", ...range, oninput: change }), value);
}

function axisButtons() {
  const choose = (axis) => {
    chosen.axis = axis;
    buttons.forEach((each) => each.setAttribute("aria-pressed", each.dataset.axis === axis));
    keep();
    setZoom(null);
  };
  const buttons = ["step", "epoch", "time"].map((axis) => element("button",
    { type: "button", "data-axis": axis, "aria-pressed": chosen.axis === axis, onclick: () => choose(axis) }, axis));
  return element("div", { class: "group" }, buttons);
}

function runChips() {
  const toggle = (event, index) => {
    const isSeen = chosen.hidden.includes(index);
    chosen.hidden = toggled(chosen.hidden, index, !isSeen);
    event.currentTarget.setAttribute("aria-pressed", isSeen);
    keep();
    drawCharts();
  };
  return element("div", { class: "chips" }, report.runs.map((run, index) => element("button", {
    type: "button", class: "chip", "data-run": index, "aria-pressed": !chosen.hidden.includes(index),
    onclick: (event) => toggle(event, index),
  }, runDot(index), run.label)));
}
