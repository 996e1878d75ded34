// The verdict: the best metric against what was expected, and runs beside each other.

function runColor(index) {
  return `var(--c${index % 8})`;
}

function runName(run, index) {
  return element("span", {}, dot(runColor(index)), run.label);
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

function comparison() {
  const { metric, is_higher_better: isHigher } = report.runs[0].main, sign = isHigher ? -1 : 1;
  const rank = ({ run }) => (run.best && run.main.metric === metric ? sign * run.best.value : Number.MAX_VALUE);
  const ordered = report.runs.map((run, index) => ({ run, index })).sort((a, b) => rank(a) - rank(b));
  const rows = ordered.map(({ run, index }, place) => ({ cells: [
    runName(run, index),
    element("td", { class: place === 0 && run.best ? "first" : null }, run.best ? number(run.best.value) : "–"),
    run.best ? number(run.best.step) : "–",
    run.best ? epochText(run.best.epoch) : "–",
    expectationWord(run),
    duration(elapsed(run)),
    median(run, "samples_per_second") || "–",
    stateBadge(run),
  ] }));
  const header = ["run", `best ${metric}`, "step", "epoch", "expectation", "wall time", "samples/s", "state"];
  const [{ run: first, index }] = ordered;
  const label = element("span", {}, runName(first, index), ` has the best ${metric} on ${first.main.split}`);
  return [first.best && verdict(first, label),
    element("section", { id: "comparison", style: { marginTop: "16px" } }, dataTable(header, rows))];
}

function expectationWord(run) {
  if (!run.expect.length) return "–";
  const met = run.expect.filter((each) => each.is_met).length;
  if (met === run.expect.length) return "reached";
  return run.state === "running" ? "not yet" : `${met} of ${run.expect.length} reached`;
}

function differences() {
  if (report.runs.length < 2) return null;
  const rows = report.differences.map(({ key, values }) => ({
    cells: [element("code", {}, key), ...values.map((value) => value ?? "–")],
  }));
  const same = element("p", { class: "soft" }, "The runs have the same recipe.");
  return element("section", { id: "differences" }, element("h2", {}, "Keys that differ"),
    rows.length ? dataTable(["key", ...report.runs.map(runName)], rows) : same);
}
