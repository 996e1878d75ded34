// The page: head, sections in their order, the details of one run at a time, and its own reload while a run goes on.

const report = JSON.parse(document.getElementById("data").textContent);
const names = report.runs.map((run) => run.name);
for (const run of report.runs) run.label = names.filter((name) => name === run.name).length > 1 ? run.folder : run.name;

function applyTheme(theme) {
  const isDark = theme === "dark" || (theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
}

function head() {
  const isOne = report.runs.length === 1, [run] = report.runs, started = startTime(run);
  const about = isOne ? [run.model, run.folder, started && `started ${moment(started)}`] : [[...new Set(report.runs.map((each) => each.task))].join(", "), report.runs.map((each) => each.label).join(", ")];
  const toggle = element("button", { type: "button", id: "theme", title: "light or dark", onclick: () => {
    chosen.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    applyTheme(chosen.theme);
    keep();
  } }, "◐ Theme");
  return element("header", { class: "top" }, element("div", {},
    element("p", { class: "overline" }, "Paceline report", isOne && stateBadge(run)),
    element("h1", {}, isOne ? run.name : `${report.runs.length} runs compared`),
    element("p", { class: "soft" }, about.filter(Boolean).join(" · "))), toggle);
}

function notices() {
  const found = [];
  for (const run of report.runs) {
    const prefix = report.runs.length > 1 ? `${run.label}: ` : "";
    const isOver = ["stopped", "failed", "killed"].includes(run.state);
    const reason = run.reason || (run.state === "killed" ? "no process works on it any more" : "no reason is known");
    if (isOver) found.push(element("div", { class: "notice" }, `${prefix}${run.state} at step ${number(run.step ?? 0)}: ${reason}. Resume it with: paceline train ${run.folder}`));
    if (!run.series.length) found.push(element("div", { class: "notice calm" }, `${prefix}no metrics yet: they appear at the first line of the log (logging.every_steps).`));
  }
  return found;
}

function fold(title, note, content) {
  const details = element("details", { class: "card", open: chosen.open.includes(title), ontoggle: () => {
    chosen.open = toggled(chosen.open, title, details.open);
    keep();
  } }, element("summary", {}, title, note && element("span", { class: "soft small" }, note)), element("div", { class: "inner" }, content));
  return details;
}

function recipe(run) {
  const lines = element("div", { class: "recipe code" });
  const fill = (isShort) => lines.replaceChildren(...run.recipe.filter(([, origin]) => !isShort || origin !== "default").flatMap(([text, origin]) =>
    [element("pre", {}, text), element("span", { class: `origin ${origin === "command line" ? "changed" : ""}` }, origin)]));
  fill(false);
  const box = element("input", { type: "checkbox", onchange: (event) => fill(event.target.checked) });
  return [element("p", { class: "small soft", style: { marginBottom: "12px" } }, element("label", {}, box, " hide defaults")), lines];
}

function environment(run) {
  const start = run.starts.findLast((each) => each.device);
  if (!start) return element("p", { class: "soft" }, "This run has no logs/starts.jsonl.");
  const hidden = ["time", "step", "setup", "higher_is_better"];
  const pairs = Object.entries(start).filter(([name]) => !hidden.includes(name));
  const setup = Array.isArray(start.setup) ? start.setup.join("\n") : "";
  return [element("dl", { class: "pairs" }, pairs.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, name === "command" ? element("code", {}, value) : String(value))])),
    setup && element("pre", { class: "log" }, setup)];
}

function starts(run) {
  const rows = run.starts.map((each) => ({ cells: [moment(each.time), each.state ? each.state : each.step ? "resumed" : "started", number(each.step ?? 0),
    each.host || "", each.device ? `${each.device} × ${each.processes}` : "", element("td", { class: "wide" }, each.reason || "")] }));
  return dataTable(["time", "what", "step", "host", "device", "reason"], rows, 2);
}

function skipped(run) {
  const rows = run.skipped.samples.map((each) => ({ cells: [each.split, String(each.sample), element("td", { class: "wide" }, each.path || ""), element("td", { class: "wide" }, each.reason)] }));
  return dataTable(["split", "sample", "file", "why"], rows, 1);
}

function details(run) {
  const numStarts = run.starts.filter((each) => each.device).length;
  const numSkipped = Object.values(run.skipped.counts).reduce((sum, count) => sum + count, 0);
  const panels = [...matrix(run), ...classBars(run)];
  return [
    run.evaluations.length > 0 && element("section", { id: "evaluations" }, element("h2", {}, "Evaluations"), evaluations(run)),
    panels.length > 0 && element("div", { class: "columns" }, panels),
    element("section", { id: "setup" }, element("h2", {}, "Run"),
      fold("Recipe", `${run.recipe.filter(([, origin]) => origin && origin !== "default").length} values set`, recipe(run)),
      fold("Environment", run.starts.findLast((each) => each.host)?.host, environment(run)),
      run.starts.length > 0 && fold("Starts and restarts", numStarts > 1 ? `${numStarts - 1} after the first` : "started once", starts(run)),
      fold("Skipped samples", numSkipped ? number(numSkipped) : "none", numSkipped ? skipped(run) : element("p", { class: "soft" }, "Every sample could be read."))),
  ];
}

function tabbed() {
  const place = element("div", { id: "details" });
  const tabs = report.runs.map((run, index) => element("button", { type: "button", class: "chip", "data-tab": index, onclick: () => show(index) }, dot(runColor(index)), run.label));
  const show = (index) => {
    chosen.tab = index;
    tabs.forEach((tab, own) => tab.setAttribute("aria-pressed", own === index));
    place.replaceChildren(...details(report.runs[index]).flat().filter(Boolean));
    keep();
  };
  show(Math.min(chosen.tab, report.runs.length - 1));
  if (report.runs.length === 1) return [place];
  return [element("h2", {}, "One run in detail"), element("div", { class: "tabs" }, tabs), place];
}

function reloadWhileRunning() {
  // A file cannot be asked whether it changed, so it is loaded again; a server is asked first.
  if (!report.runs.some((run) => run.state === "running")) return;
  let lastMove = 0;
  addEventListener("pointermove", () => { lastMove = Date.now(); });
  const isQuiet = () => !document.hidden && Date.now() - lastMove > 3000;
  const reload = () => { chosen.scroll = scrollY; keep(); location.reload(); };
  if (report.is_served) {
    setInterval(async () => {
      const answer = await fetch("version").catch(() => null);
      if (answer?.ok && (await answer.text()) !== report.state && isQuiet()) reload();
    }, 3000);
    return;
  }
  const timer = setInterval(() => {
    const minutes = (Date.now() / 1000 - report.written) / 60;
    if (minutes > 15) {
      clearInterval(timer);
      document.getElementById("news").textContent = `No news for ${Math.round(minutes)} minutes: the run may have been killed. Reload the page to look again.`;
    } else if (isQuiet()) reload();
  }, 15000);
}

applyTheme(chosen.theme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => applyTheme(chosen.theme));
const metrics = metricNames();
const page = document.getElementById("page");
page.replaceChildren(...[
  head(), ...notices(), ...(report.runs.length === 1 ? [verdict(report.runs[0])] : comparison()), differences(),
  chartSection("curves", "Curves", metrics.filter((metric) => !SYSTEM.includes(metric))),
  chartSection("system", "Optimization and speed", SYSTEM.filter((metric) => metrics.includes(metric))),
  imageSection(), ...tabbed(),
  element("footer", {}, element("p", { id: "news" }), `Written ${moment(report.written)} by Paceline ${report.version}. Drag over a chart to zoom, double-click to see all.`),
].filter(Boolean));
for (const chart of charts) seen.observe(chart.root);
addEventListener("resize", drawCharts);
scrollTo(0, chosen.scroll);
chosen.scroll = 0;
keep();
reloadWhileRunning();
