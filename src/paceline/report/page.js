// The page: head, sections in their order, the details of one run at a time, and its own reload while a run goes on.

const report = JSON.parse(document.getElementById("data").textContent);
const names = report.runs.map((run) => run.name);
for (const run of report.runs) run.label = names.filter((name) => name === run.name).length > 1 ? run.folder : run.name;

function applyTheme(theme) {
  const isDark = theme === "dark" || (theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
}

function toggleTheme() {
  chosen.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  applyTheme(chosen.theme);
  keep();
}

function head() {
  const isOne = report.runs.length === 1, [run] = report.runs, started = startTime(run);
  const tasks = [...new Set(report.runs.map((each) => each.task))].join(", ");
  const about = isOne
    ? [run.model, run.folder, started && `started ${moment(started)}`]
    : [tasks, report.runs.map((each) => each.label).join(", ")];
  return element("header", { class: "top" },
    element("div", {},
      element("p", { class: "overline" }, "Paceline report", isOne && stateBadge(run)),
      element("h1", {}, isOne ? run.name : `${report.runs.length} runs compared`),
      element("p", { class: "soft" }, about.filter(Boolean).join(" · "))),
    element("button", { type: "button", id: "theme", title: "light or dark", onclick: toggleTheme }, "◐ Theme"));
}

function notices() {
  return report.runs.flatMap((run) => {
    const prefix = report.runs.length > 1 ? `${run.label}: ` : "";
    const reason = run.reason || (run.state === "killed" ? "no process works on it any more" : "no reason is known");
    const ended = `${prefix}${run.state} at step ${number(run.step ?? 0)}: ${reason}. Resume it with: paceline train ${run.folder}`;
    const empty = `${prefix}no metrics yet: they appear with the first line of the log (logging.every_steps).`;
    return [
      ["stopped", "failed", "killed"].includes(run.state) && element("div", { class: "notice" }, ended),
      !run.series.length && element("div", { class: "notice calm" }, empty),
    ];
  });
}

function fold(title, note, content) {
  const remember = () => {
    chosen.open = toggled(chosen.open, title, details.open);
    keep();
  };
  const details = element("details", { class: "card", open: chosen.open.includes(title), ontoggle: remember },
    element("summary", {}, title, note && element("span", { class: "soft small" }, note)),
    element("div", { class: "inner" }, content));
  return details;
}

function recipe(run) {
  const lines = element("div", { class: "recipe code" });
  const fill = (isShort) => {
    const kept = run.recipe.filter(([, origin]) => !isShort || origin !== "default");
    lines.replaceChildren(...kept.flatMap(([text, origin]) => [
      element("pre", {}, text),
      element("span", { class: `origin ${origin === "command line" ? "changed" : ""}` }, origin),
    ]));
  };
  fill(false);
  const box = element("input", { type: "checkbox", onchange: (event) => fill(event.target.checked) });
  return [element("p", { class: "small soft gap-below" }, element("label", {}, box, " hide defaults")), lines];
}

function environment(run) {
  const start = run.starts.findLast((each) => each.device);
  if (!start) return element("p", { class: "soft" }, "This run has no logs/starts.jsonl.");
  const pairs = Object.entries(start).filter(([name]) => !["time", "step", "setup", "higher_is_better"].includes(name));
  return [
    element("dl", { class: "pairs" }, pairs.flatMap(([name, value]) => [
      element("dt", {}, name),
      element("dd", {}, name === "command" ? element("code", {}, String(value)) : String(value)),
    ])),
    Array.isArray(start.setup) && element("pre", { class: "log" }, start.setup.join("\n")),
  ];
}

function starts(run) {
  const rows = run.starts.map((each) => ({ cells: [
    moment(each.time),
    each.state || (each.step ? "resumed" : "started"),
    number(each.step),
    each.host || "",
    each.device ? `${each.device} × ${each.processes}` : "",
    element("td", { class: "wide" }, each.reason || ""),
  ] }));
  return dataTable(["time", "what", "step", "host", "device", "reason"], rows, 2);
}

function skipped(run) {
  const wide = (text) => element("td", { class: "wide" }, text || "");
  const rows = run.skipped.samples.map((each) => ({
    cells: [each.split, String(each.sample), wide(each.path), wide(each.reason)],
  }));
  return rows.length ? dataTable(["split", "sample", "file", "why"], rows) : element("p", { class: "soft" }, "None was skipped.");
}

function details(run) {
  const numStarts = run.starts.filter((each) => each.device).length;
  const numSkipped = Object.values(run.skipped.counts).reduce((sum, count) => sum + count, 0);
  const numSet = run.recipe.filter(([, origin]) => origin && origin !== "default").length;
  const panels = [...matrices(run), ...classBars(run)];
  const host = run.starts.findLast((each) => each.host)?.host;
  return [
    run.evaluations.length > 0 && element("section", { id: "evaluations" }, element("h2", {}, "Evaluations"), evaluations(run)),
    panels.length > 0 && element("div", { class: "columns" }, panels),
    ...worstSamples(run),
    element("section", { id: "setup" }, element("h2", {}, "Run"),
      fold("Recipe", `${numSet} values set`, recipe(run)),
      fold("Environment", host, environment(run)),
      fold("Starts and restarts", numStarts > 1 ? `${numStarts - 1} after the first` : "started once", starts(run)),
      fold("Skipped samples", numSkipped ? number(numSkipped) : "none", skipped(run))),
  ].filter(Boolean);
}

function tabbed() {
  const place = element("div", { id: "details" });
  const show = (index) => {
    chosen.tab = index;
    tabs.forEach((tab, own) => tab.setAttribute("aria-pressed", own === index));
    place.replaceChildren(...details(report.runs[index]));
    keep();
  };
  const tabs = report.runs.map((run, index) => element("button",
    { type: "button", class: "chip", "data-tab": index, onclick: () => show(index) }, runDot(index), run.label));
  show(Math.min(chosen.tab, report.runs.length - 1));
  if (report.runs.length === 1) return [place];
  return [element("h2", {}, "One run in detail"), element("div", { class: "tabs" }, tabs), place];
}

function reloadWhileRunning() {
  if (!report.runs.some((run) => run.state === "running")) return;
  let lastMove = 0;
  addEventListener("pointermove", () => { lastMove = Date.now(); });
  const reload = () => {
    if (document.hidden || Date.now() - lastMove < 3000) return; // not under a reader's hands
    chosen.scroll = scrollY;
    keep();
    location.reload();
  };
  const look = () => {
    const minutes = Math.round((Date.now() / 1000 - report.written) / 60);
    if (minutes < 15) return reload();
    clearInterval(timer);
    const news = `No news for ${minutes} minutes: the run may have been killed. Reload the page to look again.`;
    document.getElementById("news").textContent = news;
  };
  const timer = setInterval(look, 15000);
}

function build() {
  const metrics = metricNames();
  const written = `Written ${moment(report.written)} by Paceline ${report.version}.`;
  return [
    head(), ...notices(),
    ...(report.runs.length === 1 ? [verdict(report.runs[0])] : comparison()), differences(),
    chartSection("curves", "Curves", metrics.filter((metric) => !SYSTEM.includes(metric))),
    chartSection("system", "Optimization and speed", SYSTEM.filter((metric) => metrics.includes(metric))),
    imageSection(), ...tabbed(),
    element("footer", {}, element("p", { id: "news" }), `${written} Drag over a chart to zoom, double-click to see all.`),
  ].filter(Boolean);
}

applyTheme(chosen.theme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => applyTheme(chosen.theme));
document.getElementById("page").replaceChildren(...build());
for (const chart of charts) seen.observe(chart.root);
addEventListener("resize", drawCharts);
scrollTo(0, chosen.scroll);
chosen.scroll = 0;
keep();
reloadWhileRunning();
