"""The report of `paceline data`, as text and as JSON."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from paceline.core.errors import in_one_line
from paceline.core.text import join_first, pluralize
from paceline.data.batch import KeypointNames
from paceline.data.inspect import Findings
from paceline.data.loader_profile import InputStats, input_warnings
from paceline.data.skip_list import Skipped
from paceline.data.split_loader import SplitLoader

_MAX_CLASSES = 12  # of more classes, only the largest and smallest are printed
_MAX_SIZES = 4
_MAX_DUPLICATES, _MAX_FILES = 2, 8  # duplicates, and files of equal problems, that are named
_DETAILS = re.compile(r"/[^\s:,;)]+|'[^']*'|\d+")


@dataclass
class SplitReport:
    """The findings of one split, or the `error` that prevented opening it."""

    split: str
    dataset: str
    samples: int = 0
    classes: list[str] = field(default_factory=list)
    joints: KeypointNames | None = None
    findings: Findings = field(default_factory=Findings)
    speed: float | None = None
    """Samples per second that all cores load."""
    inputs: InputStats | None = None
    notes: list[str] = field(default_factory=list)
    find_path: Callable[[int], Any] | None = None
    error: str | None = None

    def opened(self, source: SplitLoader) -> None:
        """Record what is known before any sample is read."""
        self.samples = len(source.dataset)
        self.classes = list(getattr(source.dataset, "classes", []))
        self.joints = getattr(source.dataset, "joints", None)
        self.notes = list(getattr(source.dataset, "notes", []))
        self.find_path = getattr(source.dataset, "path", None)

    def name_of(self, index: int) -> str:
        """The file of a sample, or its number."""
        return f"sample {index}" if self.find_path is None else str(self.find_path(index))

    def add_note(self, note: str | None) -> None:
        """Add a note, once."""
        if note and note not in self.notes:
            self.notes.append(note)

    @property
    def has_bad(self) -> bool:
        """Whether anything was unreadable."""
        return self.error is not None or bool(self.findings.bad)

    def by_class(self, what: str) -> dict[str, int] | None:
        """The number of labels or objects per class."""
        counts = self.findings.counts.get(what)
        return None if counts is None else dict(zip(self.classes, counts.tolist(), strict=True))

    def mask_shares(self) -> dict[str, float] | None:
        """The share of pixels per class; of gray masks, the share of foreground."""
        counts = self.findings.counts.get("mask")
        if counts is None:
            return None
        total = int(counts.sum())
        if len(self.classes) <= 1:
            filled = sum(value * count for value, count in enumerate(counts.tolist()))
            return {self.classes[0] if self.classes else "foreground": filled / (255 * total)}
        shares = {name: int(count) / total for name, count in zip(self.classes, counts, strict=False)}
        return shares | {"no class": int(counts[len(self.classes) :].sum()) / total}


def as_json(name: str, reports: Sequence[SplitReport], sheet: Path | None, interrupted: bool) -> dict[str, Any]:
    """The report as JSON values."""
    return {
        "name": name,
        "interrupted": interrupted,
        "sheet": None if sheet is None else str(sheet),
        "splits": {report.split: _split_as_json(report) for report in reports},
        "duplicates": duplicate_lines(reports),
        "warnings": input_warnings({each.split: each.inputs for each in reports if each.inputs is not None}),
    }


def _split_as_json(report: SplitReport) -> dict[str, Any]:
    if report.error is not None:
        return {"dataset": report.dataset, "error": report.error}
    findings = report.findings
    mean, std = findings.moments() if findings.sizes else ([], [])
    keypoints = findings.counts.get("keypoints")
    return {
        "dataset": report.dataset,
        "samples": report.samples,
        "examined": findings.examined,
        "bad": [each._asdict() for each in findings.bad],
        "notes": report.notes,
        "classes": report.classes,
        "labels": report.by_class("label"),
        "objects": report.by_class("classes"),
        "objects_per_sample": _as_pairs(findings.objects, "objects"),
        "mask_shares": report.mask_shares(),
        "joints": None if keypoints is None else dict(zip(_joint_names(report), map(_seen, keypoints), strict=True)),
        "sizes": [{"height": h, "width": w, "samples": number} for (h, w), number in findings.sizes.most_common()],
        "frames": _as_pairs(findings.frames, "frames"),
        "mean": mean,
        "std": std,
        "input": None if report.inputs is None else report.inputs._asdict(),
        "samples_per_second": report.speed,
    }


def _as_pairs(counter: Counter[int], name: str) -> list[dict[str, int]]:
    return [{name: value, "samples": number} for value, number in sorted(counter.items())]


def _joint_names(report: SplitReport) -> list[str]:
    number = len(report.findings.counts["keypoints"])
    return report.joints.names if report.joints else [str(index) for index in range(number)]


def _seen(row: Any) -> dict[str, int]:
    return dict(zip(("unlabeled", "hidden", "visible"), row.tolist(), strict=True))


def lines(name: str, reports: Sequence[SplitReport], sheet: Path | None, interrupted: bool) -> Iterator[str]:
    """The report as lines; unreadable files come last, where people see them."""
    yield f"data of {name}"
    for report in reports:
        yield ""
        yield from _split_lines(report)
    duplicates = duplicate_lines(reports)
    if duplicates:
        yield ""
        yield from (f"duplicates  {in_one_line(line)}" for line in duplicates)
    for warning in input_warnings({each.split: each.inputs for each in reports if each.inputs is not None}):
        yield f"warning: {in_one_line(warning)}"
    if sheet is not None:
        yield f"\ncontact sheet  {sheet}"
    if interrupted:
        yield "\ninterrupted: results so far"
    if any(report.has_bad for report in reports):
        yield from _problem_lines(reports)
    else:
        yield f"\nno unreadable files{' so far' if interrupted else ''}"


def _problem_lines(reports: Sequence[SplitReport]) -> Iterator[str]:
    """The splits that cannot be opened, and the files that cannot be read, each with its reason."""
    unopened = [report for report in reports if report.error is not None]
    bad = [(report.split, each) for report in reports for each in report.findings.bad]
    if unopened:
        yield f"\ncannot be opened: {pluralize(len(unopened), 'split')}"
        yield from (f"  {report.split}: {in_one_line(report.error or '')}" for report in unopened)
    if bad:
        yield f"\nunreadable: {pluralize(len(bad), 'file')}"
    for split, group in group_problems(bad):
        names = [in_one_line(each.path) if each.path else f"sample {each.sample}" for each in group]
        number = f"{len(group):,} files, " if len(group) > 1 else ""
        yield f"  {split}: {number}{join_first(names, _MAX_FILES)}: {in_one_line(group[0].reason)}"
    if len(bad) > _MAX_FILES:
        yield "  --json lists every file with its own reason"


def group_problems(bad: Sequence[tuple[str, Skipped]]) -> list[tuple[str, list[Skipped]]]:
    """Unreadable samples of a split together if their reasons differ in paths, names and numbers alone."""
    groups: dict[tuple[str, str], list[Skipped]] = {}
    for split, each in bad:
        groups.setdefault((split, _DETAILS.sub("…", each.reason)), []).append(each)
    return [(split, group) for (split, _), group in groups.items()]


def duplicate_lines(reports: Sequence[SplitReport]) -> list[str]:
    """A line on images that are in one split several times, and on those that two splits share."""
    found = []
    for report in reports:
        again = [ids for ids in report.findings.digests.values() if len(ids) > 1]
        if again:
            pairs = ", ".join(" = ".join(map(report.name_of, ids[:_MAX_DUPLICATES])) for ids in again[:_MAX_DUPLICATES])
            number = pluralize(sum(map(len, again)) - len(again), "exact duplicate")
            found.append(f"{report.split}: {number} within the split, such as {pairs}")
    for first, second in combinations(reports, 2):
        shared = [digest for digest in first.findings.digests if digest in second.findings.digests]
        if shared:
            count = sum(len(second.findings.digests[digest]) for digest in shared)
            both = ", ".join(
                f"{first.name_of(first.findings.digests[each][0])} = {second.name_of(second.findings.digests[each][0])}"
                for each in shared[:_MAX_DUPLICATES]
            )
            found.append(f"{second.split}: {pluralize(count, 'image')} also in {first.split}, such as {both}")
    return found


def _split_lines(report: SplitReport) -> Iterator[str]:
    findings = report.findings
    if report.error is not None:
        yield f"{report.split}: {report.dataset}, cannot be opened"
        return
    inspected = "" if findings.examined == report.samples else f", {findings.examined:,} of them inspected"
    yield f"{report.split}: {report.dataset}, {pluralize(report.samples, 'sample')}{inspected}"
    for label, text in _facts(report):
        yield f"  {label:<9}{text}"
    for note in report.notes:
        yield f"  note     {in_one_line(note)}"


def _facts(report: SplitReport) -> Iterator[tuple[str, str]]:
    findings = report.findings
    for label, what in (("labels", "label"), ("objects", "classes")):
        counts = report.by_class(what)
        if counts is not None:
            yield label, _join_counts(counts, "{:,}", "classes")
    if findings.objects:
        number = sum(findings.objects.values())
        total = sum(objects * samples for objects, samples in findings.objects.items())
        yield (
            "",
            f"{total / number:.1f} per sample, at most {max(findings.objects)}; {findings.objects[0]:,} have none",
        )
    shares = report.mask_shares()
    if shares is not None:
        yield "pixels", _join_counts(shares, "{:.1%}", "classes")
    if "keypoints" in findings.counts:
        seen = findings.counts["keypoints"]
        labeled = seen[:, 1:].sum(1) / seen.sum(1).clip(1)
        shares = dict(zip(_joint_names(report), labeled.tolist(), strict=True))
        yield "joints", "labeled: " + _join_counts(shares, "{:.0%}", "joints")
    yield from _image_facts(report)


def _image_facts(report: SplitReport) -> Iterator[tuple[str, str]]:
    findings = report.findings
    if findings.frames:
        yield "frames", f"{_range(findings.frames)}"
    if findings.sizes:
        yield from _sizes(findings.sizes)
        for name, values in zip(("mean", "std"), findings.moments(), strict=True):
            yield (
                name,
                f"[{', '.join(f'{value:.4f}' for value in values)}]" if values else "float images: not computed",
            )
    if report.inputs is not None:
        yield "input", f"{report.inputs}, as the model gets it"
    if report.speed is not None:
        yield "speed", f"{report.speed:,.0f} samples/s with all cores"


def _join_counts(values: Mapping[str, float], form: str, noun: str) -> str:
    """Names with their values; of many, only the largest and smallest."""
    ordered = list(values.items())
    if len(ordered) <= _MAX_CLASSES:
        return ", ".join(f"{in_one_line(name)} {form.format(value)}" for name, value in ordered)
    ordered.sort(key=lambda item: -item[1])
    most, fewest = ordered[:4], ordered[-4:]
    return f"{len(ordered)} {noun}: {_join_counts(dict(most), form, noun)}, …, {_join_counts(dict(fewest), form, noun)}"


def _sizes(sizes: Counter[tuple[int, int]]) -> Iterator[tuple[str, str]]:
    if len(sizes) <= _MAX_SIZES:
        yield "sizes", ", ".join(f"{w}×{h}: {number:,}" for (h, w), number in sizes.most_common())
        return
    heights, widths, shorter = Counter[int](), Counter[int](), Counter[int]()
    for (height, width), number in sizes.items():
        heights[height] += number
        widths[width] += number
        shorter[min(height, width)] += number
    yield "sizes", f"{len(sizes):,} different: width {_range(widths)}, height {_range(heights)}"
    yield "", f"the shorter side {_range(shorter)}"


def _range(counter: Counter[int]) -> str:
    return f"{min(counter)} to {max(counter)}, median {statistics.median_low(counter.elements())}"
