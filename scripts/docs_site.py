"""Build the documentation site from README.md and docs/ into build/site, without a network; a broken link is an error.

    python scripts/docs_site.py [FOLDER]

The generator is our own, because markdown-it-py and Pygments come with `rich`, which Paceline needs anyway, and because
pages keep the links and anchors that they have in the repository.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote, unquote

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

ROOT = Path(__file__).resolve().parent.parent
NAMES = {
    "README.md": "index.html",
    "README.zh-CN.md": "zh/index.html",
    "docs/README.md": "contents.html",
    "CHANGELOG.md": "changelog.html",
    "CONTRIBUTING.md": "contributing.html",
}
"""Pages whose address is not their path below docs/."""
PAGE = """<!doctype html>
<html lang="{language}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} · Paceline</title>
<link rel="stylesheet" href="{root}style.css">
</head>
<body>
<header><a class="home" href="{root}{home}">Paceline</a>
<input id="search" type="search" placeholder="{search}" aria-label="{search}">{twin}</header>
<ol id="found" data-none="{none}" hidden></ol>
<div class="columns">
<nav><details open><summary>{menu}</summary>{navigation}</details></nav>
<main>{content}</main>
</div>
<script>const ROOT = "{root}";</script>
<script src="{root}sections.js"></script>
<script src="{root}search.js"></script>
</body>
</html>
"""
WORDS = {
    "en": {"search": "Search", "none": "Nothing found", "menu": "All pages", "twin": "中文", "home": "index.html"},
    "zh": {"search": "搜索", "none": "没有找到", "menu": "所有页面", "twin": "English", "home": "zh/index.html"},
}


@dataclass
class Page:
    """One Markdown file, its tokens, its address in the site, and the anchors of its headings."""

    path: Path
    address: str
    tokens: list[Token]
    headings: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def language(self) -> str:
        """`zh` for translated pages."""
        return "zh" if self.address.startswith("zh/") else "en"

    @property
    def title(self) -> str:
        """The text of the first heading."""
        return self.headings[0][1] if self.headings else self.path.stem

    @property
    def root(self) -> str:
        """The way from this page to the root of the site."""
        return "../" * self.address.count("/")


class SiteError(Exception):
    """Links or anchors that lead nowhere, each with its page."""


def sources() -> list[Path]:
    """Every page: those of docs/ and the Markdown files beside it."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def navigation() -> dict[str, dict[str, list[str]]]:
    """The pages of each section, as paths from the root of the repository, by language."""
    tree: dict[str, dict[str, list[str]]] = yaml.safe_load((ROOT / "docs/site/navigation.yaml").read_text("utf-8"))
    return {
        language: {section: [path for each in paths for path in _matches(each)] for section, paths in sections.items()}
        for language, sections in tree.items()
    }


def _matches(pattern: str) -> list[str]:
    return sorted(map(_name, ROOT.glob(pattern))) if "*" in pattern else [pattern]


def build(out: Path) -> list[Path]:
    """Write the site and return its pages; raise SiteError with all broken links."""
    markdown = MarkdownIt("commonmark", {"html": True, "highlight": _highlight}).enable(["table", "strikethrough"])
    pages = {path: _parse(markdown, path) for path in sources()}
    files: dict[Path, str] = {}
    problems = [problem for page in pages.values() for problem in _resolve_links(page, pages, files)]
    problems += _check_navigation({_name(path) for path in pages})
    if problems:
        raise SiteError("\n".join(problems))
    shutil.rmtree(out, ignore_errors=True)
    for page in pages.values():
        _write(out / page.address, _render(markdown, page, pages))
    for path, address in files.items():
        _write(out / address, path.read_bytes())
    for name in ("style.css", "search.js"):
        _write(out / name, (ROOT / "docs/site" / name).read_text("utf-8") + (_colors() if name == "style.css" else ""))
    sections = json.dumps(list(_index(pages)), ensure_ascii=False, separators=(",", ":"))
    _write(out / "sections.js", f"const SECTIONS = {sections};\n")
    return [out / page.address for page in pages.values()]


def _check_navigation(pages: set[str]) -> Iterator[str]:
    """Yield every page that no language lists, that one lists twice, or that does not exist."""
    names = {
        language: [name for paths in sections.values() for name in paths] for language, sections in navigation().items()
    }
    listed = {name for each in names.values() for name in each}
    twice = {name for each in names.values() for name in each if each.count(name) > 1}
    for problem, found in (
        ("is missing", pages - listed),
        ("does not exist", listed - pages),
        ("is there twice", twice),
    ):
        yield from (f"docs/site/navigation.yaml: {name} {problem}" for name in sorted(found))


def slug(text: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _parse(markdown: MarkdownIt, path: Path) -> Page:
    address = NAMES.get(_name(path), _name(path).removeprefix("docs/").removesuffix(".md") + ".html")
    address = re.sub(r"README\.html$", "index.html", address)
    page = Page(path, address, markdown.parse(path.read_text("utf-8")))
    seen: dict[str, int] = {}
    for opening, inline in zip(page.tokens, page.tokens[1:], strict=False):
        if opening.type == "heading_open":
            text = "".join(each.content for each in inline.children or ())
            anchor = slug(text)
            number = seen[anchor] = seen.get(anchor, -1) + 1
            anchor = f"{anchor}-{number}" if number else anchor
            opening.attrSet("id", anchor)
            page.headings.append((int(opening.tag[1]), text, anchor))
    return page


def _resolve_links(page: Page, pages: dict[Path, Page], files: dict[Path, str]) -> Iterator[str]:
    """Point links at pages and copied files; yield what leads nowhere."""
    for token in (child for inline in page.tokens for child in inline.children or ()):
        attribute = {"link_open": "href", "image": "src"}.get(token.type)
        target = str(token.attrGet(attribute)) if attribute else ""
        if not attribute or re.match(r"https?:|mailto:", target):
            continue
        where, _, anchor = unquote(target).partition("#")
        path = (page.path.parent / where).resolve() if where else page.path
        path = path / "README.md" if path.is_dir() else path
        if path in pages:
            if anchor and anchor not in {each for _, _, each in pages[path].headings}:
                yield f"{_name(page.path)}: {target}: no such heading"
            address = pages[path].address
        elif path.is_file() and path.is_relative_to(ROOT):
            name = _name(path)
            address = files[path] = name.removeprefix("docs/") if name.startswith("docs/") else f"files/{name}"
        else:
            yield f"{_name(page.path)}: {target}: no such file"
            continue
        relative = os.path.relpath(address, os.path.dirname(page.address) or ".")  # noqa: PTH120 - an address, no file
        token.attrSet(attribute, quote(relative) + (f"#{anchor}" if anchor else ""))


def _render(markdown: MarkdownIt, page: Page, pages: dict[Path, Page]) -> str:
    words = WORDS[page.language]
    content = markdown.renderer.render(page.tokens, markdown.options, {})
    content = content.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    return PAGE.format(
        language="zh-CN" if page.language == "zh" else "en",
        title=escape(page.title),
        root=page.root,
        twin=_twin(page, pages, words["twin"]),
        navigation="".join(_sections(page, pages)),
        content=content,
        **{key: words[key] for key in ("search", "none", "menu", "home")},
    )


def _twin(page: Page, pages: dict[Path, Page], text: str) -> str:
    """A link to the same page in the other language, if there is one."""
    other = page.address.removeprefix("zh/") if page.language == "zh" else f"zh/{page.address}"
    return f'<a href="{page.root}{other}">{text}</a>' if other in {each.address for each in pages.values()} else ""


def _sections(page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    for section, paths in navigation()[page.language].items():
        yield f"<h2>{escape(section)}</h2><ul>"
        for each in (pages[ROOT / path] for path in paths):
            here = ' aria-current="page"' if each is page else ""
            yield f'<li><a href="{page.root}{quote(each.address)}"{here}>{escape(each.title)}</a></li>'
        yield "</ul>"


def _index(pages: dict[Path, Page]) -> Iterator[dict[str, str]]:
    """Address, page, heading and text of every section; a page in one language alone is found from any."""
    listed = (name for sections in navigation().values() for names in sections.values() for name in names)
    for page in (pages[ROOT / name] for name in dict.fromkeys(listed)):
        texts = [""]
        for before, token in pairwise(page.tokens):
            if before.type == "heading_open":
                texts.append("")
            elif token.type in ("inline", "fence", "code_block"):
                texts[-1] += f" {_plain_text(token)}"
        for (_, heading, anchor), text in zip(page.headings, texts[1:], strict=True):
            yield {
                "language": page.language if _twin(page, pages, "") else "any",
                "address": f"{page.address}#{anchor}",
                "page": page.title,
                "heading": heading,
                "text": " ".join(text.split()),
            }


def _plain_text(token: Token) -> str:
    """What a reader sees: without the addresses of links and the marks of Markdown."""
    parts = {"softbreak": " ", "hardbreak": " ", "html_inline": " "}
    return "".join(parts.get(each.type, each.content) for each in token.children or ()) or token.content


def _highlight(code: str, language: str, _attributes: str) -> str:
    if not language or language == "text":
        return escape(code)
    formatter: HtmlFormatter[str] = HtmlFormatter(nowrap=True)
    return str(highlight(code, get_lexer_by_name(language), formatter))


def _colors() -> str:
    """Pygments' colors in light and dark."""
    light, dark = (HtmlFormatter(style=style).get_style_defs("code") for style in ("default", "github-dark"))
    return f"\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/site"
    try:
        written = build(folder)
    except SiteError as error:
        sys.exit(str(error))
    print(f"{folder}/index.html: {len(written)} pages")
