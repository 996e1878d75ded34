// The sections of the page: the verdict first, then curves, evaluations, images, and what was run where.

const SYSTEM = ["lr", "grad_norm", "samples_per_second", "data_wait", "memory_mb"];
const SPLIT_COLORS = { train: "var(--c0)", val: "var(--c1)", test: "var(--c2)" };

function runColor(index) {
  return `var(--c${index % 8})`;
}

function stateBadge(run) {
  const kind = { finished: "good", running: "live", failed: "bad", killed: "bad" }[run.state] || "";
  return element("span", { class: `badge ${kind}` }, run.state);
}

function seriesOf(run, split, metric) {
  return run.series.find((each) => each.split === split && each.metric === metric);
}

function startTime(run) {
  return run.starts.length ? run.starts[0].time : run.times.y[0];
}

function elapsed(run) {
  const ends = run.starts.filter((each) => each.state).map((each) => each.time);
  const last = Math.max(...ends, ...run.times.y.slice(-1));
  return isFinite(last) ? last - startTime(run) : null;
}

function median(run, metric) {
  const values = (seriesOf(run, "train", metric)?.y || []).filter((value) => value !== null).sort((a, b) => a - b);
  return values.length ? values[values.length >> 1] : null;
}

function peak(run, metric) {
  const values = (seriesOf(run, "train", metric)?.y || []).filter((value) => value !== null);
  return values.length ? Math.max(...values) : null;
}

function facts(run) {
  const start = run.starts.findLast((each) => each.device);
  const share = run.total_steps ? `of ${number(run.total_steps)}` : "";
  const all = [
    ["Steps", number(run.step ?? 0), share],
    ["Epochs", run.epoch === null ? "–" : +run.epoch.toFixed(2), ""],
    ["Wall time", duration(elapsed(run)), ""],
    ["Throughput", median(run, "samples_per_second"), "samples/s", "samples_per_second"],
    ["Data wait", median(run, "data_wait"), "of a step", "data_wait"],
    ["Peak memory", peak(run, "memory_mb"), "", "memory_mb"],
    start && ["Device", start.device, start.processes > 1 ? `× ${start.processes} processes` : ""],
    ["Task", run.task, ""],
  ];
  return element("dl", { class: "facts" }, all.filter((each) => each && each[1] !== null).map(([name, value, unit, metric]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, metric ? formatted(metric, value) : String(value), unit && element("small", {}, ` ${unit}`)))));
}

function judgements(run) {
  return run.expect.map(({ metric, expected, reached, is_met }) => {
    const value = reached === null || reached === undefined ? "not measured yet" : number(reached);
    const isMissed = is_met === false && run.state !== "running";
    const [kind, mark] = is_met ? ["good", "reached:"] : isMissed ? ["bad", "not reached:"] : ["", "so far:"];
    return element("span", { class: `badge ${kind}` }, `${is_met ? "✓ " : isMissed ? "✗ " : ""}Expected ${metric} ${number(expected)} ${mark} ${value}`);
  });
}

function verdict(run, label) {
  const { metric, is_higher_better: isHigher } = run.main;
  const words = run.best
    ? [element("p", { class: "label" }, label || `Best ${metric} on ${run.best.split}`), element("p", { class: "number" }, number(run.best.value)),
       element("p", { class: "soft" }, `at step ${number(run.best.step)}, epoch ${+run.best.epoch.toFixed(2)}; ${isHigher ? "higher" : "lower"} is better`)]
    : [element("p", { class: "label" }, "Verdict"), element("p", { class: "number" }, "–"),
       element("p", { class: "soft" }, run.evaluations.length ? "no metric decides: name one in checkpoint.best" : "nothing was evaluated yet")];
  const share = run.total_steps ? Math.min(1, (run.step || 0) / run.total_steps) : 0;
  return element("section", { class: "card verdict", id: "verdict" },
    element("div", {}, words, run.expect.length > 0 && element("div", { class: "judgement" }, judgements(run))), facts(run),
    run.state === "running" && element("div", { class: "progress", role: "progressbar", "aria-valuenow": Math.round(100 * share) }, element("i", { style: { width: `${100 * share}%` } })));
}

function dataTable(header, rows, numWords = 1) {
  const name = (index) => (index < numWords ? "word" : null);
  return element("div", { class: "card scroll" }, element("table", { class: "data" },
    element("thead", {}, element("tr", {}, header.map((cell, index) => element("th", { class: name(index) }, cell)))),
    element("tbody", {}, rows.map((row) => element("tr", { class: row.class }, row.cells.map((cell, index) =>
      cell instanceof Node && cell.tagName === "TD" ? cell : element("td", { class: name(index) }, cell)))))));
}

function comparison() {
  const { metric, is_higher_better: isHigher } = report.runs[0].main, sign = isHigher ? -1 : 1;
  const ordered = report.runs.map((run, index) => ({ run, index })).sort((a, b) => {
    const [first, second] = [a, b].map(({ run }) => (run.best && run.main.metric === metric ? sign * run.best.value : Infinity));
    return first === second ? 0 : first - second;
  });
  const rows = ordered.map(({ run, index }, place) => ({ cells: [
    element("span", {}, dot(runColor(index)), run.label), element("td", { class: place === 0 && run.best ? "first" : null }, run.best ? number(run.best.value) : "–"),
    run.best ? number(run.best.step) : "–", run.best ? String(+run.best.epoch.toFixed(2)) : "–",
    run.expect.length ? element("span", {}, judgementWord(run)) : "–",
    duration(elapsed(run)), median(run, "samples_per_second") === null ? "–" : number(median(run, "samples_per_second")), stateBadge(run)] }));
  const header = ["run", `best ${metric}`, "step", "epoch", "expectation", "wall time", "samples/s", "state"];
  const { run: first, index } = ordered[0];
  const label = element("span", {}, dot(runColor(index)), ` ${first.label} has the best ${metric} on ${first.main.split}`);
  return [first.best && verdict(first, label), element("section", { id: "comparison", style: { marginTop: "16px" } }, dataTable(header, rows))];
}

function judgementWord(run) {
  const met = run.expect.filter((each) => each.is_met).length;
  return met === run.expect.length ? "reached" : run.state === "running" ? "not yet" : `${met} of ${run.expect.length} reached`;
}

function differences() {
  if (report.runs.length < 2) return null;
  const rows = report.differences.map(({ key, values }) => ({ cells: [element("code", {}, key), ...values.map((value) => (value === null ? "–" : value))] }));
  const header = ["key", ...report.runs.map((run, index) => element("span", {}, dot(runColor(index)), run.label))];
  return element("section", { id: "differences" }, element("h2", {}, "Keys that differ"),
    rows.length ? dataTable(header, rows) : element("p", { class: "soft" }, "The runs have the same recipe."));
}

function linesOf(metric) {
  const isOne = report.runs.length === 1;
  return report.runs.flatMap((run, index) => {
    const own = run.series.filter((each) => each.metric === metric);
    return own.map((each, place) => ({
      run: index,
      label: isOne ? each.split : own.length > 1 ? `${run.label} · ${each.split}` : run.label,
      color: isOne ? SPLIT_COLORS[each.split] || runColor(2 + place) : runColor(index),
      dash: !isOne && each.split === "train" && own.length > 1 ? "2 4" : null,
      isDense: each.split === "train" && metric !== "lr" && metric !== "memory_mb",
      hasDots: each.split !== "train",
      y: each.y,
      places: (axis) => placesOn(axis, run, each.x),
    }));
  });
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

function metricNames() {
  const names = [...new Set(report.runs.flatMap((run) => run.series.map((each) => each.metric)))];
  const main = report.runs[0].main.metric, rank = (name) => (name === main ? 0 : name === "loss" ? 1 : 2);
  return names.sort((a, b) => rank(a) - rank(b));
}

function chartSection(id, title, metrics) {
  if (!metrics.length) return null;
  const expected = Object.assign({}, ...report.runs.map((run) => Object.fromEntries(run.expect.map((each) => [each.metric, each.expected]))));
  const made = metrics.map((metric) => new Chart(metric, linesOf(metric), expected[metric] ?? null));
  return element("section", { id }, element("h2", {}, title), id === "curves" && toolbar(), element("div", { class: "charts" }, made.map((chart) => chart.root)));
}

function toolbar() {
  const value = element("output", {}, chosen.smoothing.toFixed(2));
  const slider = element("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: chosen.smoothing, id: "smoothing",
    oninput: (event) => { chosen.smoothing = +event.target.value; value.textContent = chosen.smoothing.toFixed(2); keep(); drawCharts(); } });
  const axes = ["step", "epoch", "time"].map((axis) => element("button", { type: "button", "data-axis": axis, "aria-pressed": chosen.axis === axis,
    onclick: () => { chosen.axis = axis; keep(); axes.forEach((each) => each.setAttribute("aria-pressed", each.dataset.axis === axis)); setZoom(null); } }, axis));
  const chips = report.runs.length > 1 && element("div", { class: "chips" }, report.runs.map((run, index) => element("button", {
    type: "button", class: "chip", "data-run": index, "aria-pressed": !chosen.hidden.includes(index),
    onclick: (event) => {
      const isShown = chosen.hidden.includes(index);
      chosen.hidden = toggled(chosen.hidden, index, !isShown);
      event.currentTarget.setAttribute("aria-pressed", isShown);
      keep();
      drawCharts();
    } }, dot(runColor(index)), run.label)));
  return element("div", { class: "bar" }, element("label", {}, "Smoothing", slider, value), element("div", { class: "group" }, axes),
    element("button", { type: "button", id: "unzoom", hidden: true, onclick: () => setZoom(null) }, "show all"), chips);
}

function evaluations(run) {
  const splits = [...new Set(run.evaluations.map((each) => each.split))];
  return splits.map((split) => {
    const own = run.evaluations.filter((each) => each.split === split).reverse();
    const names = [...new Set(own.flatMap((each) => Object.keys(each.metrics)))].sort((a, b) => (b === run.main.metric) - (a === run.main.metric));
    const rows = own.map((each) => {
      const isBest = run.best && each.split === run.best.split && each.step === run.best.step;
      const skipped = each.num_skipped ? ` (${number(each.num_skipped)} skipped)` : "";
      return { class: isBest ? "best" : null, cells: [`${number(each.step)}${isBest ? " · best" : ""}`, String(+each.epoch.toFixed(2)),
        ...names.map((name) => (Object.hasOwn(each.metrics, name) ? number(each.metrics[name]) : "")), number(each.num_samples) + skipped, duration(each.seconds)] };
    });
    return element("div", { style: { marginBottom: "20px" } }, element("h3", { style: { margin: "0 0 10px" } }, split),
      dataTable(["step", "epoch", ...names, "samples", "time"], rows));
  });
}

function classBars(run) {
  return Object.entries(run.classes).map(([split, values]) => {
    const entries = Object.entries(values).sort((a, b) => (b[1] ?? -Infinity) - (a[1] ?? -Infinity));
    const most = Math.max(1e-12, ...entries.map((each) => Math.abs(each[1] ?? 0)));
    return element("section", { class: "card block" }, element("header", {}, element("h3", {}, `By class, last on ${split}`)),
      element("div", { class: "bars" }, entries.flatMap(([name, value]) => [element("span", {}, name),
        element("i", { style: { width: `${(100 * Math.abs(value ?? 0)) / most}%` } }), element("span", {}, number(value))])));
  });
}

function matrix(run) {
  return Object.entries(run.confusion).map(([split, { step, classes, counts }]) => {
    const sums = counts.map((row) => Math.max(1, row.reduce((sum, count) => sum + count, 0)));
    const note = element("p", { class: "soft small", style: { minHeight: "1.6em", marginTop: "8px" } }, "Rows are true classes, columns predicted ones.");
    const cell = (row, column) => {
      const share = counts[row][column] / sums[row];
      const text = `${classes[row]} predicted as ${classes[column]}: ${number(counts[row][column])}, ${(100 * share).toFixed(1)} % of ${classes[row]}`;
      return element("td", { title: text, onpointerenter: () => { note.textContent = text; },
        style: { background: `rgba(var(--heat), ${(0.04 + 0.86 * share ** 0.6).toFixed(3)})`, color: share > 0.55 ? "var(--card)" : null } },
        classes.length <= 30 && counts[row][column] ? short(counts[row][column]) : "");
    };
    return element("section", { class: "card block", "data-confusion": split },
      element("header", {}, element("h3", {}, `Confusion matrix on ${split}`), element("span", { class: "soft small" }, `step ${number(step)}`)),
      element("div", { class: "scroll", style: { maxHeight: "none" } }, element("table", { class: "matrix" },
        element("tr", {}, element("th", {}), classes.map((name) => element("th", { class: "across" }, element("div", {}, name)))),
        classes.map((name, row) => element("tr", {}, element("th", {}, name), classes.map((_, column) => cell(row, column)))))), note);
  });
}

function imageSection() {
  const all = report.runs.flatMap((run, index) => run.images.map((image) => ({ ...image, run, index })));
  const shown = all.filter((each) => !(each.name === "confusion" && each.run.confusion[each.split]));
  const rank = { predictions: 0, samples: 2 };
  const kinds = [...new Set(shown.map((each) => `${each.split}\n${each.name}`))].sort((a, b) => (rank[a.split("\n")[1]] ?? 1) - (rank[b.split("\n")[1]] ?? 1));
  if (!kinds.length) return null;
  return element("section", { id: "images" }, element("h2", {}, "Images"), kinds.map((kind) => {
    const [split, name] = kind.split("\n");
    const groups = report.runs.map((run) => shown.filter((each) => each.run === run && each.split === split && each.name === name)).filter((group) => group.length);
    return element("div", { class: "columns", style: { marginBottom: "16px" } }, groups.map(imageCard));
  }));
}

function imageCard(group) {
  const words = { predictions: "Predictions beside the truth", samples: "Training samples as the model gets them", precision_recall: "Precision and recall", confusion: "Confusion matrix" };
  const photo = element("img", { alt: `${group[0].name} on ${group[0].split}`, decoding: "async" }), caption = element("figcaption", {});
  const show = (place) => {
    const image = group[place];
    for (const [name, value] of [["src", image.uri], ["width", image.width], ["height", image.height]]) photo.setAttribute(name, value);
    caption.textContent = `step ${number(image.step)}`;
  };
  const slider = group.length > 1 && element("label", {}, "step", element("input", { type: "range", min: 0, max: group.length - 1, value: group.length - 1,
    "aria-label": "step of the image", oninput: (event) => show(+event.target.value) }));
  show(group.length - 1);
  const title = [report.runs.length > 1 && dot(runColor(group[0].index)), report.runs.length > 1 ? ` ${group[0].run.label}: ` : "", words[group[0].name] || group[0].name, group[0].name !== "samples" && `, ${group[0].split}`];
  return element("section", { class: "card block" }, element("header", {}, element("h3", {}, title), slider), element("figure", {}, element("div", { class: "frame" }, photo), caption));
}
