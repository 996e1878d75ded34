"""Walk the release checklist: check what a program can check, and list what is left to do by hand.

    python scripts/release.py [--quick]

`--quick` skips what takes minutes: the tests, the documentation and the wheel in an environment of its own.
The exit code is 1 if a point fails.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BY_HAND = """\
By hand, in this order:
  1. git tag -a v{version} -m "Paceline {version}" && git push origin v{version}
  2. upload dist/paceline-{version}* to the package index, and the section of the changelog to the release page
  3. begin "## Unreleased" in CHANGELOG.md; set the next version where the first point looks
"""


class NotReadyError(Exception):
    """A point of the checklist that does not hold: what was found and what to do."""


def output(root: Path, *words: str | Path) -> str:
    """What a command prints. Raises NotReadyError with its last lines."""
    done = subprocess.run([str(word) for word in words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()[-5:]
        raise NotReadyError(
            f"{' '.join(map(str, words))} ended with {done.returncode}:\n      " + "\n      ".join(lines)
        )
    return done.stdout


def version_of(root: Path) -> str:
    """The version in pyproject.toml."""
    return str(tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def one_version(root: Path) -> None:
    """Every file states the same version, which is no development version."""
    version = version_of(root)
    if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version):
        raise NotReadyError(f"pyproject.toml has version {version}; a release is X.Y.Z or X.Y.ZrcN")
    for name, pattern in {"src/paceline/__init__.py": '__version__ = "(.+)"', "CITATION.cff": "version: (.+)"}.items():
        found = re.search(f"^{pattern}$", (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        if not found or found[1] != version:
            raise NotReadyError(f"{name} has {found[1] if found else 'no version'}; pyproject.toml has {version}")


def changelog(root: Path) -> None:
    """The changelog has a dated section for the version that begins with its highlights; nothing is left unreleased."""
    version = version_of(root)
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    if sections.get("Unreleased", "").strip():
        raise NotReadyError(f'CHANGELOG.md has lines under "Unreleased"; they belong to "## {version} (YYYY-MM-DD)"')
    titles = [title for title in sections if re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", title)]
    if not titles:
        raise NotReadyError(f'CHANGELOG.md has no section "## {version} (YYYY-MM-DD)"')
    if not sections[titles[0]].lstrip().startswith("### Highlights"):
        raise NotReadyError(f'"{titles[0]}" in CHANGELOG.md does not begin with "### Highlights"')


def clean_main(root: Path) -> None:
    """The work tree is `main`, committed, and the version has no tag yet."""
    if (branch := output(root, "git", "branch", "--show-current").strip()) != "main":
        raise NotReadyError(f"the branch is {branch or 'none'}; releases are cut from main")
    if changed := output(root, "git", "status", "--porcelain").strip():
        raise NotReadyError(f"not committed: {changed.splitlines()[0]}")
    if output(root, "git", "tag", "--list", f"v{version_of(root)}").strip():
        raise NotReadyError(f"v{version_of(root)} is tagged already; increase the version")


def benchmarks(root: Path) -> None:
    """docs/benchmarks.md was measured with the version."""
    measured = json.loads((root / "docs/benchmarks.json").read_text(encoding="utf-8"))
    if f"paceline {version_of(root)}," not in json.dumps(measured):
        raise NotReadyError(f"docs/benchmarks.json was not measured with {version_of(root)}; run `make bench`")


def tests(root: Path) -> None:
    """`make test` passes."""
    output(root, "make", "test")


def documentation(root: Path) -> None:
    """The documentation builds, without a broken link."""
    output(root, sys.executable, "scripts/docs_site.py")


def wheel(root: Path) -> None:
    """The wheel trains in an environment of its own; it and the sdist are in dist/."""
    output(root, sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", ".")
    build = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    output(root, sys.executable, "-c", build)
    with tempfile.TemporaryDirectory() as folder:
        output(root, sys.executable, "-m", "venv", folder)
        (built,) = (root / "dist").glob(f"paceline-{version_of(root)}-*.whl")
        commands = Path(folder) / "bin"
        output(root, commands / "pip", "install", "--quiet", "-c", "constraints.txt", "torch")
        output(root, commands / "pip", "install", "--quiet", "-c", "constraints.txt", built)
        output(Path(folder), commands / "paceline", "train", "quickstart", "train.epochs=1")


QUICK: list[Callable[[Path], None]] = [one_version, changelog, clean_main, benchmarks]
LONG: list[Callable[[Path], None]] = [tests, documentation, wheel]


def walk(root: Path, points: list[Callable[[Path], None]]) -> int:
    """Check all points, print each with what it found, and return how many fail."""
    failed = 0
    for point in points:
        try:
            point(root)
            print(f"  ok {point.__doc__}")
        except NotReadyError as error:
            failed += 1
            print(f"  NO {point.__doc__}\n      {error}")
    return failed


def main() -> int:
    """Walk the checklist for this checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="skip the tests, the documentation and the wheel")
    failed = walk(ROOT, QUICK if parser.parse_args().quick else QUICK + LONG)
    print(f"{failed} to mend first" if failed else BY_HAND.format(version=version_of(ROOT)), end="\n" if failed else "")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
