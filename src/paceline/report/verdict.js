// The verdict: the best metric against what was expected, and runs beside each other.

const NUM_COLORS = 8, DASHES = [null, "7 3", "2 3", "9 3 2 3"];

function runColor(index) {
  // Multiples of the golden angle spread evenly over the circle of hues.
  return index < NUM_COLORS ? `var(--c${index})` : `hsl(${((index * 137.508) % 360).toFixed(1)} 60% var(--lightness))`;
}

function runDash(index) {
  return DASHES[Math.floor(index / NUM_COLORS) % DASHES.length];
}

function runDot(index) {
  return dot(runColor(index), runDash(index));
}

function runName(run, index) {
  return element("span", {}, runDot(index), run.label);
}

function stateBadge(run) {
  const kind = { finished: "good", running: "live", failed: "bad", killed: "bad" }[run.state] || "";
  return element("span", { class: `badge ${kind}` }, run.state);
}

function startTime(run) {
  return run.starts.length ? run.starts[0].time : run.times.y[0];
}

function elapsed(run) {
  const ends = run.starts.filter((each) => each.state).map((each) => each.time);
  const last = Math.max(...ends, ...run.times.y.slice(-1));
  return isFinite(last) ? last - startTime(run) : null;
}

function sortedValues(run, metric) {
  const found = run.series.find((each) => each.split === "train" && each.metric === metric);
  return (found?.y || []).filter((value) => value !== null).sort((a, b) => a - b);
}

function median(run, metric) {
  const values = sortedValues(run, metric);
  return values.length ? formatted(metric, values[values.length >> 1]) : null;
}

function peak(run, metric) {
  const values = sortedValues(run, metric);
  return values.length ? formatted(metric, values.at(-1)) : null;
}

function epochText(epoch) {
  return epoch === null ? "–" : String(+epoch.toFixed(2));
}

function facts(run) {
  const start = run.starts.findLast((each) => each.device);
  const found = [
    ["Steps", number(run.step ?? 0), run.total_steps && `of ${number(run.total_steps)}`],
    ["Epochs", epochText(run.epoch)],
    ["Wall time", duration(elapsed(run))],
    ["Throughput", median(run, "samples_per_second"), "samples/s"],
    ["Data wait", median(run, "data_wait"), "of a step"],
    ["Peak memory", peak(run, "memory_mb")],
    ["Device", start && String(start.device), start?.processes > 1 && `× ${start.processes} processes`],
    ["Task", run.task],
  ];
  return element("dl", { class: "facts" }, found.filter(([, value]) => value).map(([name, value, unit]) => element("div", {},
    element("dt", {}, name), element("dd", {}, value, unit && element("small", {}, ` ${unit}`)))));
}

function judgements(run) {
  return run.expect.map(({ metric, expected, reached, is_met }) => {
    const isMissed = is_met === false && run.state !== "running";
    const [kind, mark, word] = is_met ? ["good", "✓ ", "reached"] : isMissed ? ["bad", "✗ ", "not reached"] : ["", "", "so far"];
    const value = reached === null || reached === undefined ? "not measured" : number(reached);
    return element("span", { class: `badge ${kind}` }, `${mark}Expected ${metric} ${number(expected)} ${word}: ${value}`);
  });
}

function verdict(run, label) {
  const { metric, is_higher_better: isHigher } = run.main;
  const why = run.evaluations.length ? "no metric decides: name one in checkpoint.best" : "nothing was evaluated yet";
  const where = run.best && `at step ${number(run.best.step)}, epoch ${epochText(run.best.epoch)}`;
  const share = run.total_steps ? Math.min(1, (run.step || 0) / run.total_steps) : 0;
  const progress = element("div", { class: "progress", role: "progressbar", "aria-valuenow": Math.round(100 * share) },
    element("i", { style: { width: `${100 * share}%` } }));
  return element("section", { class: "card verdict", id: "verdict" },
    element("div", {},
      element("p", { class: "label" }, label || (run.best ? `Best ${metric} on ${run.best.split}` : "Verdict")),
      element("p", { class: "number" }, run.best ? number(run.best.value) : "–"),
      element("p", { class: "soft" }, run.best ? `${where}; ${isHigher ? "higher" : "lower"} is better` : why),
      run.expect.length > 0 && element("div", { class: "judgement" }, judgements(run))),
    facts(run), run.state === "running" && progress);
}

function comparable() {
  // Only runs of one task, judged by one metric on the same data, are ranked together.
  const groups = new Map();
  report.runs.forEach((run, index) => {
    const key = JSON.stringify([run.task, run.main.metric, run.main.split, run.data]);
    groups.set(key, [...(groups.get(key) || []), { run, index }]);
  });
  return [...groups.values()].map((group) => {
    const sign = group[0].run.main.is_higher_better ? -1 : 1;
    const rank = ({ run }) => (run.best ? sign * run.best.value : Number.MAX_VALUE);
    return group.sort((a, b) => rank(a) - rank(b));
  });
}

function comparison() {
  const groups = comparable(), [[{ run: first, index }]] = groups;
  const label = element("span", {}, runName(first, index), ` has the best ${first.main.metric} on ${first.main.split}`);
  const apart = "These runs differ in task, metric or data, so they are compared in separate tables.";
  return [groups.length === 1 ? first.best && verdict(first, label) : element("div", { class: "notice calm" }, apart),
    element("section", { id: "comparison", style: { marginTop: "16px" } }, groups.map((group) => [
      groups.length > 1 && groupTitle(group[0].run), ranking(group), unequal(group),
    ]).flat())];
}

function groupTitle({ task, main, data }) {
  return element("h3", { class: "group-title" }, `${task}, ${main.metric} on ${main.split}${data && `: ${data}`}`);
}

function ranking(group) {
  const rows = group.map(({ run, index }, place) => ({ cells: [
    runName(run, index),
    element("td", { class: place === 0 && run.best ? "first" : null }, run.best ? number(run.best.value) : "–"),
    run.best ? number(run.best.step) : "–",
    run.best ? epochText(run.best.epoch) : "–",
    run.total_steps ? `${number(run.step ?? 0)} of ${number(run.total_steps)}` : "–",
    expectationWord(run),
    duration(elapsed(run)),
    median(run, "samples_per_second") || "–",
    stateBadge(run),
  ] }));
  const best = `best ${group[0].run.main.metric}`;
  return dataTable(["run", best, "at step", "epoch", "steps", "expectation", "wall time", "samples/s", "state"], rows);
}

function unequal(group) {
  const most = Math.max(...group.map(({ run }) => run.total_steps || 0));
  const why = ({ state, total_steps: steps }) =>
    state !== "finished" ? `is ${state}` : steps && steps < most ? `trained ${number(steps)} steps, not ${number(most)}` : null;
  const found = group.filter(({ run }) => why(run)).map(({ run }) => `${run.label} ${why(run)}`);
  return group.length > 1 && found.length > 0 &&
    element("p", { class: "soft small unequal" }, `Ranked as they are, after unequal training: ${found.join("; ")}.`);
}

function expectationWord(run) {
  if (!run.expect.length) return "–";
  const met = run.expect.filter((each) => each.is_met).length;
  if (met === run.expect.length) return "reached";
  return run.state === "running" ? "not yet" : `${met} of ${run.expect.length} reached`;
}

function differences() {
  if (report.runs.length < 2) return null;
  const keys = report.differences.map(({ key }) => element("code", {}, key));
  const names = report.runs.map(runName), values = report.differences.map((each) => each.values.map((value) => value ?? "–"));
  // Whatever there are more of goes down the page.
  const table = names.length > keys.length
    ? dataTable(["run", ...keys], names.map((name, run) => ({ cells: [name, ...values.map((each) => each[run])] })))
    : dataTable(["key", ...names], keys.map((key, index) => ({ cells: [key, ...values[index]] })));
  const same = element("p", { class: "soft" }, "The runs have the same recipe.");
  return element("section", { id: "differences" }, element("h2", {}, "Keys that differ"), keys.length ? table : same);
}
