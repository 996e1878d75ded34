"""DALI behind the loader's contract: same samples in the same order and nearly the same pixels, whatever the files."""

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from paceline.cli import main
from paceline.core.errors import DataError, missing_extra
from paceline.data import dali
from paceline.data.batch import Batch, Sample
from paceline.data.dali import load_by_dali
from paceline.data.io.image import Encoded
from paceline.data.loader import load
from paceline.data.skip_list import SkipList
from paceline.data.split_loader import Request, SplitLoader
from paceline.data.transforms.base import BatchTransform, OnSamples, SampleTransform
from paceline.data.transforms.batch import Normalize
from paceline.data.transforms.geometric import (
    CenterCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    Resize,
)

needs_dali = pytest.mark.skipif(
    bool(missing_extra("dali")), reason="NVIDIA DALI is not installed: pip install 'paceline[dali]'"
)

ORIENTATION = 0x0112


@dataclass
class Photos:
    """Image files with labels."""

    paths: list[Path]
    with_mask: bool = False
    classes: list[str] = field(default_factory=lambda: ["a", "b", "c"])
    channels: int = 3

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, index: int) -> Path:
        return self.paths[index]

    def open(self, index: int) -> Sample:
        sample: Sample = {"image": Encoded.read(self.paths[index]), "label": index % 3}
        return sample | ({"mask": np.zeros((10, 10), np.uint8)} if self.with_mask else {})

    def read(self, index: int) -> Sample:
        sample = self.open(index)
        return {**sample, "image": sample["image"].decode()}


def source_image(number: int) -> npt.NDArray[np.uint8]:
    """A smooth image of its own size, whose parts all look different."""
    height, width = 90 + 7 * number % 40, 120 + 5 * number % 50
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    waves = [128 + 100 * np.sin(columns / (19 + number % 5) + k) * np.cos(rows / (18 + k) + number) for k in range(3)]
    return np.stack(waves, 2).clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("photos")
    for number in range(23):
        cv2.imwrite(str(folder / f"{number:02}.jpg"), source_image(number), [cv2.IMWRITE_JPEG_QUALITY, 95])
    return sorted(folder.iterdir())


def requests(sizes: Sequence[int], epoch: int = 3, start: int = 0) -> Iterator[Request]:
    for size in sizes:
        yield Request(epoch, (np.arange(start, start + size) * 5 + 2) % 23)
        start += size


def compare(source: SplitLoader, asked: list[Request], tolerance: float = 2.0) -> list[Batch]:
    """What DALI gives, after it was held against the ordinary way."""
    found = list(load_by_dali(source, asked, threads=2))
    assert len(found) == len(asked)
    for request, batch in zip(asked, found, strict=True):
        expected = source.fetch(request.epoch, request.ids)
        assert batch.keys() == expected.keys()
        assert batch.ids.tolist() == request.ids.tolist()
        assert batch["label"].tolist() == expected["label"].tolist()
        assert batch["image"].dtype == torch.uint8
        assert batch["image"].shape == expected["image"].shape
        assert batch["image"].is_contiguous()
        difference = (batch["image"].float() - expected["image"].float()).abs().mean((1, 2, 3))
        assert difference.max() < tolerance, difference
    return found


@needs_dali
@pytest.mark.parametrize(
    "transforms",
    [
        [RandomResizedCrop(64), OnSamples(RandomHorizontalFlip())],
        [Resize(72), CenterCrop(64)],
        [Resize([50, 60])],
        [CenterCrop([130, 110], fill=[255, 0, 9])],
        [Resize([64, 80]), RandomRotation(30, fill=9), OnSamples(RandomHorizontalFlip())],
        [RandomResizedCrop(64), RandomRotation(10)],
        [RandomHorizontalFlip(1.0), Resize(None, max_size=80), CenterCrop(80), RandomResizedCrop([32, 48])],
    ],
    ids=lambda transforms: "-".join(type(each).__name__ for each in transforms),
)
def test_samples_order_crops_and_flips_are_those_of_the_loader(
    paths: list[Path], transforms: list[SampleTransform]
) -> None:
    """The batches grow, shrink and end with a partial one, as those of an epoch or an evaluation may."""
    found = compare(SplitLoader(Photos(paths), transforms, seed=7), list(requests([4, 5, 1, 8, 5])))
    assert [len(batch.ids) for batch in found] == [4, 5, 1, 8, 5]


@needs_dali
@pytest.mark.parametrize("draw", [0.05, 0.25, 0.95])
def test_rotations_are_ours_to_two_levels(draw: float) -> None:
    """What our operators of a transform make of an image is what the transform does."""
    from nvidia.dali import Pipeline, fn, types

    operators: Any = fn
    transform, image = RandomRotation(30, fill=9), source_image(3)
    draws = np.full(transform.draws, draw)
    pipeline: Any = Pipeline(1, 1, None, prefetch_queue_depth=1)
    (stage,) = dali._stages([transform])
    with pipeline:
        given = operators.external_source(name="image", dtype=types.UINT8, ndim=3)
        ours = stage.apply(
            operators, given, lambda name, _, dims: operators.external_source(name=name, dtype=types.FLOAT, ndim=dims)
        )
        pipeline.set_outputs(ours)
    pipeline.build()
    pipeline.feed_input("image", [image])
    for name, value in stage.plan(*image.shape[:2], draws)[0].items():
        pipeline.feed_input(stage.input(name), [value])
    (found,) = (np.array(each.as_array()[0]).astype(np.int64) for each in pipeline.run())
    expected = transform({"image": image}, draws)["image"].astype(np.int64)
    assert np.quantile(np.abs(found - expected), 0.995) <= 2  # but for some at the border of what is rotated
    assert np.abs(found - image).mean() > 3


@needs_dali
def test_a_recipe_for_training(paths: list[Path]) -> None:
    """Transforms of whole batches are the same as ever; a crop of another sample would be far off."""
    transforms: list[SampleTransform | BatchTransform] = [
        RandomResizedCrop(64),
        RandomHorizontalFlip(),
        Normalize([0.5], [0.25]),
    ]
    source = SplitLoader(Photos(paths), transforms, seed=7)
    asked, cpu = list(requests([8, 8])), torch.device("cpu")
    ours = [source.transform_batch(batch, 3, cpu)["image"] for batch in load(source, asked, 0)]
    theirs = [source.transform_batch(batch, 3, cpu)["image"] for batch in load(source, asked, 2, "dali")]
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().mean() < 0.04
        assert (one - other.roll(1, 0)).abs().mean() > 0.5


@needs_dali
def test_going_on_in_the_middle_gives_the_same(paths: list[Path]) -> None:
    source = SplitLoader(Photos(paths), [RandomResizedCrop(64), OnSamples(RandomHorizontalFlip())], seed=7)
    whole = list(load_by_dali(source, requests([6, 6, 6, 5]), threads=2))
    rest = list(load_by_dali(source, requests([6, 5], start=12), threads=1))
    for one, other in zip(whole[2:], rest, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert torch.equal(one["image"], other["image"])


@needs_dali
def test_batches_stay_as_they_are(paths: list[Path]) -> None:
    """DALI's memory is not written again while somebody holds a batch."""
    source = SplitLoader(Photos(paths), [RandomResizedCrop(64)], seed=7)
    held, copies = [], []
    for batch in load_by_dali(source, requests([4] * 10), threads=2):
        held.append(batch["image"])
        copies.append(batch["image"].clone())
    assert all(torch.equal(one, other) for one, other in zip(held, copies, strict=True))


@needs_dali
def test_files_of_every_kind(paths: list[Path], tmp_path: Path) -> None:
    """Turned ones and gray ones, and those that DALI is not asked to read, mixed with others."""
    image = Image.fromarray(source_image(3))
    mixed = paths[:4]
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        image.save(tmp_path / f"turned {orientation}.jpg", exif=exif, quality=95)
        mixed = [*mixed, tmp_path / f"turned {orientation}.jpg"]
    short, long = (b"\x01\x12\0" + number for number in (b"\x03\0\0\0\x01\0\x06\0\0", b"\x04\0\0\0\x01\0\0\0\x06"))
    data = (tmp_path / "turned 6.jpg").read_bytes()
    assert short in data
    (tmp_path / "turned 6.jpg").write_bytes(data.replace(short, long))  # which DALI leaves as it lies
    for name, mode in (("gray.jpg", "L"), ("inks.jpg", "CMYK"), ("plain.png", "RGB"), ("palette.gif", "P")):
        image.convert(mode).save(tmp_path / name)
        mixed = [*mixed, tmp_path / name]
    chains: list[list[SampleTransform]] = [
        [RandomResizedCrop(64), OnSamples(RandomHorizontalFlip())],
        [Resize(72), CenterCrop(64)],
    ]
    for transforms in chains:
        source = SplitLoader(Photos(mixed), transforms, seed=7)
        asked = [Request(0, np.arange(16)), Request(1, np.array([14, 15])), Request(1, np.array([0, 14, 8]))]
        assert [len(batch.ids) for batch in compare(source, asked)] == [16, 2, 3]


@needs_dali
def test_sizes_that_differ_are_named(paths: list[Path]) -> None:
    batches = load_by_dali(SplitLoader(Photos(paths), [Resize(40)], seed=0), requests([4]))
    with pytest.raises(DataError, match=r"samples 2 and 7 differ in size \(.*so they cannot be stacked"):
        next(batches)


def damaged(folder: Path, paths: list[Path]) -> list[Path]:
    """The files again, some of them spoilt."""
    content = paths[5].read_bytes()
    (folder / "short.jpg").write_bytes(content[: len(content) // 2])
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.jpg").write_text("not an image")
    return [*paths[:9], folder / "short.jpg", folder / "empty.jpg", folder / "text.jpg", folder / "missing.jpg"]


@needs_dali
@pytest.mark.parametrize(
    ("index", "message"),
    [
        (9, r"short\.jpg: damaged or truncated image"),
        (10, r"empty\.jpg: the file is empty"),
        (11, r"text\.jpg: not an image"),
        (12, r"missing\.jpg: no such file"),
    ],
)
def test_a_bad_file_is_named_in_its_turn(paths: list[Path], tmp_path: Path, index: int, message: str) -> None:
    source = SplitLoader(Photos(damaged(tmp_path, paths)), [RandomResizedCrop(32)], seed=0)
    batches = load_by_dali(source, [Request(0, np.array([3, 4])), Request(0, np.array([1, index]))])
    assert next(batches).ids.tolist() == [3, 4]
    with pytest.raises(DataError, match=message):
        next(batches)


@needs_dali
def test_bad_files_are_left_out_where_that_is_the_policy(paths: list[Path], tmp_path: Path) -> None:
    skips = SkipList("train", 10)
    source = SplitLoader(Photos(damaged(tmp_path, paths)), [RandomResizedCrop(32)], seed=0, skips=skips)
    first, alone, last = load_by_dali(
        source, [Request(0, np.array([1, 9, 2, 12])), Request(0, np.array([10, 11])), Request(0, np.array([5]))]
    )
    assert first.ids.tolist() == [1, 2]
    assert [each.sample for each in first.skipped] == [9, 12]
    assert alone.is_placeholder
    assert last.ids.tolist() == [5]


@needs_dali
def test_what_dali_stumbles_over_is_read_the_ordinary_way(paths: list[Path], tmp_path: Path) -> None:
    """Its header and its end are sound, but not the tables that its pixels are coded by."""
    content = bytearray(paths[2].read_bytes())
    tables = content.index(b"\xff\xc4") + 5  # behind the marker, the length and the number of a table
    content[tables : tables + 16] = b"\xff" * 16
    (tmp_path / "hollow.jpg").write_bytes(content)
    source = SplitLoader(Photos([*paths[:4], tmp_path / "hollow.jpg"]), [RandomResizedCrop(32)], seed=0)
    asked = [Request(0, np.array(ids)) for ids in ([0, 1], [2, 4], [3])]
    batches = load_by_dali(source, asked)
    assert next(batches).ids.tolist() == [0, 1]
    with pytest.raises(DataError, match=r"hollow\.jpg: damaged or truncated image"):
        next(batches)
    skipping = SplitLoader(source.dataset, [RandomResizedCrop(32)], seed=0, skips=SkipList("train", 5))
    assert [batch.ids.tolist() for batch in load_by_dali(skipping, asked)] == [[0, 1], [2], [3]]


REFUSED = [
    ("image_folder", "      - {name: rand_augment}", 11, "data.train.transforms.1", "rand_augment"),
    (
        "image_folder",
        "      - {name: random_rotation, degrees: 5, fill: [1, 2, 3]}",
        11,
        "transforms.1.fill",
        "one value",
    ),
    ("fashion_small", "", 7, "data.train.dataset", "image files"),
    ("image_mask", "", 7, "data.train.dataset", "mask"),
]


@needs_dali
@pytest.mark.parametrize(("dataset", "transform", "line", "key", "found"), REFUSED, ids=[each[3] for each in REFUSED])
def test_what_is_not_done_is_refused_with_its_line_before_anything_is_made(
    dataset: str, transform: str, line: int, key: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    for folder in ("a", "b", "images", "masks"):
        (data / folder).mkdir(parents=True)
        Image.fromarray(source_image(1)[..., 0] if folder == "masks" else source_image(1)).save(data / folder / "0.png")
    where = {
        "image_folder": f"root: {data}",
        "fashion_small": "split: train",
        "image_mask": f"root: {data}\n    binary: true",
    }[dataset]
    task, loss, model = "classification", "cross_entropy", "name: convnet"
    if dataset == "image_mask":
        task, loss, model = "saliency", "pixel_bce", "name: unet, backbone: timm/test_resnet"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""name: dali
task: {task}
model: {{{model}}}
data:
  loader: dali
  train:
    dataset: {dataset}
    {where}
    transforms:
      - {{name: resize, size: [32, 32]}}
{transform}
  batch_size: 2
losses: [{loss}]
optimizer: {{name: sgd, lr: 0.1}}
train: {{steps: 1}}
"""
    )
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 2
    reported = capsys.readouterr().err
    assert f"recipe.yaml:{line}:" in reported
    assert key in reported
    assert found in reported
    assert not (tmp_path / "run").exists()


@needs_dali
def test_evaluation_decodes_the_usual_way_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        path = tmp_path / "data" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(source_image(number)).save(path, quality=95)
    split = "dataset: image_folder, root: data, split_shares: {train: 0.5, val: 0.5}"
    (tmp_path / "recipe.yaml").write_text(
        f"""name: dali
task: classification
model: {{name: convnet, widths: [4]}}
data:
  loader: dali
  train: {{{split}, split: train, transforms: [{{name: resize, size: [32, 32]}}]}}
  val: {{{split}, split: val, transforms: [{{name: resize, size: [32, 32]}}]}}
  batch_size: 4
losses: [cross_entropy]
optimizer: {{name: sgd, lr: 0.1}}
train: {{steps: 1, device: cpu}}
logging: {{images: false}}
"""
    )
    monkeypatch.chdir(tmp_path)
    run = str(tmp_path / "run")
    assert main(["train", "recipe.yaml", "--out", run]) == 0
    assert "data.loader: dali is for training" in capsys.readouterr().err
    (trained,) = [each for each in records(run) if each["split"] == "val"]
    monkeypatch.setattr(dali, "missing_extra", lambda name: "DALI is not installed")
    assert main(["eval", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["cross_entropy"] == trained["cross_entropy"]


def records(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


@needs_dali
def test_giving_up_early_ends_its_threads(paths: list[Path]) -> None:
    before = set(threading.enumerate())
    batches = load_by_dali(SplitLoader(Photos(paths), [RandomResizedCrop(32)], seed=0), requests([4] * 100))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert set(threading.enumerate()) <= before


def test_without_dali_it_says_how_to_get_it(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(DataError, match=r"pip install 'paceline\[dali\]', or use data.loader: auto"):
        load_by_dali(SplitLoader(Photos(paths), [Resize(32)], seed=0), requests([2]))


@dataclass
class Mixed(Photos):
    """Files and, for some, images that are not encoded, of any type; labels are tensors."""

    arrays: dict[int, npt.NDArray[np.generic]] = field(default_factory=dict)

    def open(self, index: int) -> Sample:
        image = self.arrays[index] if index in self.arrays else Encoded.read(self.paths[index])
        return {"image": image, "label": torch.tensor(index)}


@needs_dali
def test_images_of_other_types_are_stacked_or_refused(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.jpg" for number in range(4)]
    for number, path in enumerate(paths):
        assert cv2.imwrite(str(path), source_image(number))
    resize, ids = Resize([32, 32]), np.arange(4)
    floats = {number: source_image(number).astype(np.float64) / 256 for number in range(4)}

    def batch(arrays: dict[int, npt.NDArray[np.generic]]) -> Batch:
        return next(load_by_dali(SplitLoader(Mixed(paths, arrays=arrays), [resize], 0), [Request(0, ids)], 1))

    plain, merged = batch({}), batch({2: source_image(2)})
    assert merged["label"].tolist() == [0, 1, 2, 3]
    assert torch.equal(plain["image"][[0, 1, 3]], merged["image"][[0, 1, 3]])
    found = batch(dict(floats))
    assert found["image"].dtype == torch.float32
    expected = resize({"image": floats[3].astype(np.float32)}, np.empty(0))["image"]
    assert torch.equal(found["image"][3], torch.from_numpy(np.ascontiguousarray(expected)).permute(2, 0, 1))
    with pytest.raises(DataError, match=r"samples 0 and 2 differ in type \(uint8 and float32\)"):
        batch({2: floats[2]})
    with pytest.raises(DataError, match=rf"{paths[2].name}.*int16"):
        batch({2: source_image(2).astype(np.int16)})
