// Images that the run drew: of each kind those of all runs side by side, with a slider over steps; and its worst samples.

const IMAGE_TITLES = {
  __proto__: null, predictions: "Predictions beside the truth", samples: "Training samples as the model gets them",
  precision_recall: "Precision and recall: the mean, and the most frequent classes", confusion: "Confusion matrix",
};

function imageSection() {
  const kinds = new Map();
  report.runs.forEach((run, index) => {
    for (const image of run.images) {
      if (image.name === "confusion" && Object.hasOwn(run.confusion, image.split)) continue; // it is a table
      const kind = `${image.split} ${image.name}`;
      if (!kinds.has(kind)) kinds.set(kind, new Map());
      const runs = kinds.get(kind);
      runs.set(index, [...(runs.get(index) || []), image]);
    }
  });
  if (!kinds.size) return null;
  const rank = (runs) => ({ predictions: 0, samples: 2 })[runs.values().next().value[0].name] ?? 1;
  const ordered = [...kinds.values()].sort((a, b) => rank(a) - rank(b));
  return element("section", { id: "images" }, element("h2", {}, "Images"), ordered.map((runs) =>
    element("div", { class: "columns" }, [...runs].map(([index, images]) => imageCard(images, index)))));
}

function imageCard(images, index) {
  const [{ split, name }] = images, last = images.length - 1;
  const img = element("img", { alt: `${name} on ${split}`, decoding: "async" }), caption = element("figcaption", {});
  const show = ({ uri, width, height, step }) => {
    for (const [key, value] of Object.entries({ src: uri, width, height })) img.setAttribute(key, value);
    caption.textContent = `step ${number(step)}`;
  };
  show(images[last]);
  const range = { type: "range", min: 0, max: last, value: last, "aria-label": "step of the image" };
  const slider = element("label", {}, "step", element("input", { ...range, oninput: (event) => show(images[+event.target.value]) }));
  const title = (IMAGE_TITLES[name] || name) + (name === "samples" ? "" : `, ${split}`);
  const isOne = report.runs.length === 1;
  return element("section", { class: "card block" },
    element("header", {}, element("h3", {}, isOne ? title : [runName(report.runs[index], index), `: ${title}`]), last > 0 && slider),
    element("figure", {}, element("div", { class: "frame" }, img), caption));
}

function worstSamples(run) {
  return Object.entries(run.worst).filter(([, { samples }]) => samples.length).map(([split, { step, error, samples }]) =>
    element("section", { class: "worst", "data-worst": split }, element("h2", {}, `Worst samples, ${split}`),
      element("p", { class: "soft gap-below" }, `The samples with the greatest error at step ${number(step)}: ${error}.`),
      element("div", { class: `cards ${samples.some(({ image }) => image?.width > 400) ? "wide" : ""}` }, samples.map(worstSample))));
}

function worstSample({ sample, path, error, captions, image }, place) {
  const text = captions.filter(Boolean).join(" · ");
  return element("figure", { class: "card block" },
    image && element("div", { class: "frame" },
      element("img", { src: image.uri, width: image.width, height: image.height, alt: text, decoding: "async" })),
    element("figcaption", {}, element("strong", {}, `${place + 1}. error ${number(error)}`), ` · sample ${sample}`,
      text && element("div", {}, text), path && element("code", {}, path)));
}
