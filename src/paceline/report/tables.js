// Tables: evaluations, metrics of single classes, and confusion matrices.

function dataTable(header, rows, numWords = 1) {
  const name = (index) => (index < numWords ? "word" : null);
  const cell = (content, index) =>
    content instanceof HTMLTableCellElement ? content : element("td", { class: name(index) }, content);
  return element("div", { class: "card scroll" }, element("table", { class: "data" },
    element("thead", {}, element("tr", {}, header.map((content, index) => element("th", { class: name(index) }, content)))),
    element("tbody", {}, rows.map((row) => element("tr", { class: row.class }, row.cells.map(cell))))));
}

function evaluations(run) {
  const splits = [...new Set(run.evaluations.map((each) => each.split))];
  return splits.map((split) => element("div", { style: { marginBottom: "20px" } },
    element("h3", { style: { margin: "0 0 10px" } }, split),
    evaluationTable(run, run.evaluations.filter((each) => each.split === split).reverse())));
}

function evaluationTable(run, own) {
  const isMain = (name) => name === run.main.metric;
  const names = [...new Set(own.flatMap((each) => Object.keys(each.metrics)))].sort((a, b) => isMain(b) - isMain(a));
  const rows = own.map((each) => {
    const isBest = run.best && each.split === run.best.split && each.step === run.best.step;
    const skipped = each.num_skipped ? ` (${number(each.num_skipped)} skipped)` : "";
    return { class: isBest ? "best" : null, cells: [
      `${number(each.step)}${isBest ? " · best" : ""}`,
      epochText(each.epoch),
      ...names.map((name) => (Object.hasOwn(each.metrics, name) ? number(each.metrics[name]) : "")),
      number(each.num_samples) + skipped,
      duration(each.seconds),
    ] };
  });
  return dataTable(["step", "epoch", ...names, "samples", "time"], rows);
}

function classBars(run) {
  return Object.entries(run.classes).map(([split, values]) => {
    const entries = Object.entries(values).sort((a, b) => (b[1] ?? -Infinity) - (a[1] ?? -Infinity));
    const most = Math.max(1e-12, ...entries.map((each) => Math.abs(each[1] ?? 0)));
    const bar = (value) => element("i", { style: { width: `${(100 * Math.abs(value ?? 0)) / most}%` } });
    return element("section", { class: "card block" },
      element("header", {}, element("h3", {}, `By class, last on ${split}`)),
      element("div", { class: "bars" },
        entries.flatMap(([name, value]) => [element("span", {}, name), bar(value), element("span", {}, number(value))])));
  });
}

function matrices(run) {
  return Object.entries(run.confusion).map(([split, table]) => matrix(split, table));
}

function matrix(split, { step, classes, counts }) {
  const sums = counts.map((row) => Math.max(1, row.reduce((sum, count) => sum + count, 0)));
  const note = element("p", { class: "soft small note" }, "Rows are true classes, columns predicted ones.");
  const cell = (row, column) => {
    const count = counts[row][column], share = count / sums[row], percent = `${(100 * share).toFixed(1)} %`;
    const text = `${classes[row]} predicted as ${classes[column]}: ${number(count)}, ${percent} of ${classes[row]}`;
    const background = `rgba(var(--heat), ${(0.04 + 0.86 * share ** 0.6).toFixed(3)})`;
    const style = { background, color: share > 0.55 ? "var(--card)" : "" };
    const shown = classes.length <= 30 && count ? short(count) : "";
    return element("td", { title: text, style, onpointerenter: () => { note.textContent = text; } }, shown);
  };
  const across = classes.map((name) => element("th", { class: "across" }, element("div", {}, name)));
  const down = classes.map((name, row) => element("tr", {}, element("th", {}, name), classes.map((_, column) => cell(row, column))));
  return element("section", { class: "card block", "data-confusion": split },
    element("header", {}, element("h3", {}, `Confusion matrix on ${split}`),
      element("span", { class: "soft small" }, `step ${number(step)}`)),
    element("div", { class: "scroll", style: { maxHeight: "none" } },
      element("table", { class: "matrix" }, element("tr", {}, element("th", {}), across), down)), note);
}
