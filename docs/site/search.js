// Finds sections that hold all words, headings first; on a small screen, the list of pages starts closed.
const field = document.getElementById("search");
const found = document.getElementById("found");
const here = document.documentElement.lang.startsWith("zh") ? "zh" : "en";
const LIMIT = 30;

function rank({ language, page, heading, text }, words) {
  const [title, body] = [`${page} ${heading}`.toLowerCase(), text.toLowerCase()];
  if (!words.every((word) => title.includes(word) || body.includes(word))) return 0;
  const points = words.map((word) => (heading.toLowerCase().includes(word) ? 4 : 0) + (body.includes(word) ? 2 : 0));
  return points.reduce((sum, each) => sum + each, language === here ? 2 : 1);
}

function excerpt(text, words) {
  // Around the longest word, which says most.
  const places = [...words].sort((one, other) => other.length - one.length).map((word) => text.toLowerCase().indexOf(word));
  const start = Math.max(0, (places.find((place) => place >= 0) ?? 0) - 40);
  return (start ? "…" : "") + text.slice(start, start + 120);
}

function element(tag, text, ...children) {
  const made = document.createElement(tag);
  made.textContent = text;
  made.append(...children);
  return made;
}

function search() {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  const hits = words.length
    ? SECTIONS.filter((section) => section.language === here || section.language === "any")
        .map((section) => ({ section, rank: rank(section, words) }))
        .filter((hit) => hit.rank)
        .sort((one, other) => other.rank - one.rank)
    : [];
  found.replaceChildren(
    ...hits.slice(0, LIMIT).map(({ section: { address, page, heading, text } }) => {
      const link = element("a", heading, element("small", page === heading ? "" : ` ${page}`), element("p", excerpt(text, words)));
      link.href = ROOT + address;
      return element("li", "", link);
    }),
  );
  if (words.length && !hits.length) found.append(element("li", found.dataset.none));
  found.hidden = words.length === 0;
}

field.addEventListener("input", search);
field.addEventListener("keydown", (event) => {
  if (event.key === "Enter") found.querySelector("a")?.click();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") found.hidden = true;
  if (event.key === "/" && document.activeElement !== field) {
    event.preventDefault();
    field.focus();
  }
});
found.addEventListener("click", (event) => { found.hidden = event.target.closest("a") !== null; });
if (window.innerWidth <= 860) document.querySelector("nav details").open = false;
