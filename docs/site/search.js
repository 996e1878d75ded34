// Finds headings that hold all words; on a small screen, the list of pages starts closed.
const field = document.getElementById("search");
const found = document.getElementById("found");
const here = document.documentElement.lang.startsWith("zh") ? "zh" : "en";

function search() {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  const hits = words.length
    ? HEADINGS.filter(([language, , page, text]) => language === here && words.every((word) => `${page} ${text}`.toLowerCase().includes(word)))
    : [];
  found.replaceChildren(
    ...hits.slice(0, 30).map(([, address, page, text]) => {
      const link = document.createElement("a");
      const small = document.createElement("small");
      link.href = ROOT + address;
      link.textContent = text;
      small.textContent = page === text ? "" : ` ${page}`;
      link.append(small);
      const item = document.createElement("li");
      item.append(link);
      return item;
    }),
  );
  found.hidden = hits.length === 0;
}

field.addEventListener("input", search);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") found.hidden = true;
  if (event.key === "/" && document.activeElement !== field) {
    event.preventDefault();
    field.focus();
  }
});
found.addEventListener("click", () => { found.hidden = true; });
if (window.innerWidth <= 860) document.querySelector("nav details").open = false;
