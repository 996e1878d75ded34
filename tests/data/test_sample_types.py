"""Images of every type of number, through every loader: kept as they are, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.forkserver import script_ranks

from paceline.core.errors import DataError
from paceline.core.world import World
from paceline.data.batch import Batch, Sample
from paceline.data.datasets.idx import MemoryImages
from paceline.data.inspect import Findings, examine
from paceline.data.loader import load
from paceline.data.pack import PackedSamples, write_pack
from paceline.data.split_loader import Request, SplitLoader
from paceline.data.transforms.base import OnSamples
from paceline.data.transforms.batch import Normalize
from paceline.data.transforms.color import ColorJitter, RandAugment, RandomPhotometricDistort
from paceline.data.transforms.geometric import CenterCrop, Pad, RandomHorizontalFlip, RandomRotation, Resize

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, CPU)
FLOATS = ["float16", "float32", "float64"]
REFUSED = ["int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool", "complex64"]
SIZE = 6


def values(index: int, dtype: str) -> np.ndarray[Any, Any]:
    """[2, 3, 3]; floats lie between 0 and 1 and are exact in any of their types."""
    numbers = np.arange(18).reshape(2, 3, 3) + index
    return (numbers / 32).astype(dtype) if "float" in dtype else numbers.astype(dtype)


@dataclass
class Typed:
    """Samples whose images have one type, in NumPy's arrays or torch's tensors; `odd` ones have another."""

    dtype: str
    is_tensor: bool = False
    odd: dict[int, str] = field(default_factory=dict)
    classes: list[str] = field(default_factory=lambda: ["one", "two"])
    channels: int = 3

    def __len__(self) -> int:
        return SIZE

    def read(self, index: int) -> Sample:
        image = values(index, self.odd.get(index, self.dtype))
        label = np.int32(index % 2)
        if self.is_tensor:
            return {"image": torch.from_numpy(image), "label": torch.tensor(int(label), dtype=torch.int16)}
        return {"image": image, "label": label}


def by(kind: Any, workers: int | None, dataset: Typed, _: Path) -> Iterator[Batch]:
    requests = [Request(0, np.arange(start, start + 3)) for start in (0, 3)]
    return load(SplitLoader(dataset, [], 0), requests, workers, kind, ALONE)


def from_pack(dataset: Typed, folder: Path) -> Iterator[Batch]:
    write_pack(dataset, folder / "a.pack", None)
    return by("auto", 0, PackedSamples(folder / "a.pack"), folder)  # type: ignore[arg-type]


def gathered(dataset: Typed, folder: Path) -> Iterator[Batch]:
    images = torch.stack([torch.as_tensor(dataset.read(index)["image"]) for index in range(SIZE)])
    whole = MemoryImages(images.permute(0, 3, 1, 2), {"label": torch.arange(SIZE) % 2}, dataset.classes)
    return by("memory", 0, whole, folder)  # type: ignore[arg-type]


LOADERS: dict[str, Callable[[Typed, Path], Iterator[Batch]]] = {
    "here": partial(by, "auto", 0),
    "auto": partial(by, "auto", None),
    "thread": partial(by, "thread", 2),
    "process": partial(by, "process", 1),
    "pack": from_pack,
    "gather": gathered,
}


@pytest.mark.parametrize("is_tensor", [False, True], ids=["array", "tensor"])
@pytest.mark.parametrize("name", LOADERS)
def test_whole_pixels_and_floats_pass_every_loader(name: str, is_tensor: bool, tmp_path: Path) -> None:
    for dtype in ["uint8", *FLOATS]:
        if name == "process" and dtype in ("float16", "float64"):
            continue  # processes take time, and convert as threads do
        batches = list(LOADERS[name](Typed(dtype, is_tensor), tmp_path))
        expected = np.stack([np.moveaxis(values(index, dtype), -1, 0) for index in range(SIZE)])
        found = torch.cat([batch["image"] for batch in batches])
        assert found.dtype == (torch.uint8 if dtype == "uint8" else torch.float32)
        assert np.array_equal(found.numpy(), expected)
        labels = torch.cat([batch["label"] for batch in batches])
        assert (labels.dtype, labels.tolist()) == (torch.int64, [0, 1] * 3)


@pytest.mark.parametrize("name", LOADERS)
def test_all_other_types_are_refused_by_name(name: str, tmp_path: Path) -> None:
    for dtype in ["int16"] if name == "process" else REFUSED:
        for is_tensor in (False, True):
            with pytest.raises(DataError) as caught:
                list(LOADERS[name](Typed(dtype, is_tensor), tmp_path))
            text = str(caught.value)
            assert ("MemoryImages" if name == "gather" else "Typed") in text
            assert name == "gather" or "sample 0" in text
            assert all(word in text for word in (dtype, "uint8", "float32"))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("name", ["here", "thread", "pack"])
def test_one_sample_of_another_type_is_refused(name: str, dtype: str, tmp_path: Path) -> None:
    other = "float32" if dtype == "uint8" else "uint8"
    with pytest.raises(DataError, match=r"sample.* 4\b") as caught:
        list(LOADERS[name](Typed(dtype, odd={4: other}), tmp_path))
    assert {"uint8", "float32"} <= set(str(caught.value).replace("(", " ").replace(")", " ").replace(",", " ").split())


@pytest.mark.parametrize(
    ("image", "word"), [(np.zeros((4, 5), np.uint8), "[4, 5]"), ([[1, 2]], "list"), (None, "NoneType")]
)
def test_what_is_no_image_is_refused(image: Any, word: str) -> None:
    dataset = Typed("uint8")
    dataset.read = lambda index: {"image": image}  # type: ignore[method-assign]
    with pytest.raises(DataError, match=r"Typed.*sample 0") as caught:
        SplitLoader(dataset, [], 0).fetch(0, np.arange(1))
    assert word in str(caught.value)


def test_floats_reach_the_model_as_they_are() -> None:
    floats, pixels = (SplitLoader(Typed(dtype), [], 0) for dtype in ("float64", "uint8"))
    batch = floats.transform_batch(floats.fetch(0, np.arange(2)), 0, CPU)
    assert batch["image"][0, 0, 0].tolist() == [0, 3 / 32, 6 / 32]
    batch = pixels.transform_batch(pixels.fetch(0, np.arange(2)), 0, CPU)
    assert batch["image"][0, 0, 0, 1].item() == pytest.approx(3 / 255)


def test_floats_are_normalized_without_dividing_by_255() -> None:
    floats = SplitLoader(Typed("float32"), [Normalize([0.5], [0.25])], 0)
    batch = floats.transform_batch(floats.fetch(0, np.arange(1)), 0, CPU)
    assert batch["image"][0, 0, 0].tolist() == [-2, (3 / 32 - 0.5) / 0.25, (6 / 32 - 0.5) / 0.25]


@dataclass
class Halved:
    """A user's transform that makes something else of pixels."""

    dtype: str
    draws: ClassVar[int] = 0
    is_batch: ClassVar[bool] = False

    def __call__(self, sample: Sample, draws: Any) -> Sample:
        return {**sample, "image": (sample["image"] / 2).astype(self.dtype)}


def test_what_transforms_make_is_looked_at_too() -> None:
    batch = SplitLoader(Typed("uint8"), [Halved("float64")], 0).fetch(0, np.arange(2))
    assert batch["image"].dtype == torch.float32
    assert batch["image"][1, 0, 0].tolist() == [0.5, 2, 3.5]
    with pytest.raises(DataError, match=r"Typed.*sample 0.*int32"):
        SplitLoader(Typed("uint8"), [Halved("int32")], 0).fetch(0, np.arange(2))


GEOMETRY = [
    Resize([4, 6]),
    Resize([1, 1]),
    CenterCrop(5, fill=7),
    Pad(size=8, fill=9),
    OnSamples(RandomHorizontalFlip(1.0)),
    RandomRotation(30),
]


@pytest.mark.parametrize("transform", GEOMETRY, ids=lambda each: f"{type(each).__name__}")
def test_transforms_of_places_take_floats(transform: Any) -> None:
    """The same as of whole pixels but for rounding."""
    draws = np.full(transform.draws, 0.7)
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    whole = transform({"image": pixels}, draws)["image"]
    for image in (pixels, np.stack([pixels, pixels])):
        floats = transform({"image": image.astype(np.float32)}, draws)["image"]
        assert floats.dtype == np.float32
        assert np.abs(floats - whole).max() <= 1.01
    fractions = transform({"image": pixels.astype(np.float32) / 1024}, draws)["image"]
    assert 0 < fractions[fractions < 1].max() < 0.25


@pytest.mark.parametrize("transform", [ColorJitter(0.5), RandomPhotometricDistort(p=1.0), RandAugment(8)])
def test_transforms_of_colors_refuse_floats(transform: Any) -> None:
    source = SplitLoader(Typed("float32"), [transform], 0)
    with pytest.raises(DataError) as caught:
        source.fetch(0, np.arange(1))
    assert all(word in str(caught.value) for word in ("Typed", "sample 0", "float32", "uint8"))


def test_floats_are_inspected_without_a_histogram() -> None:
    findings = Findings()
    examine(Typed("float64", is_tensor=True), range(SIZE), findings, 1, lambda _: None)
    assert (findings.examined, findings.bad) == (SIZE, [])
    assert findings.moments() == ([], [])
    assert findings.counts["label"].tolist() == [3, 3]
    findings = Findings()
    examine(Typed("int16"), range(SIZE), findings, 1, lambda _: None)
    assert [each.sample for each in findings.bad] == list(range(SIZE))
    assert "int16" in findings.bad[0].reason


PLUGIN = """
import numpy as np
from paceline import register


@register.dataset("typed")
class Typed:
    channels = 3

    def __init__(self, dtype: str):
        self.dtype, self.classes = dtype, ["one", "two"]

    def __len__(self):
        return 12

    def read(self, index):
        image = np.random.default_rng(index).random((8, 8, 3))
        return {"image": (image if "float" in self.dtype else 255 * image).astype(self.dtype), "label": index % 2}
"""
RECIPE = """
name: typed
task: classification
model: {name: convnet, widths: [4]}
data: {batch_size: 4, num_workers: 0, train: {dataset: typed, dtype: float64}}
losses: [cross_entropy]
optimizer: {name: sgd, lr: 0.1}
train: {epochs: 1, threads: 1}
logging: {images: false, tensorboard: false}
"""
COMMANDS = """
import hashlib, pathlib
from paceline.cli import main
weights = []
for run in ("one", "two"):
    assert main(["train", "recipe.yaml", "--use", "mine", "--out", run]) == 0
    (found,) = pathlib.Path(run, "checkpoints").glob("*/model.safetensors")
    weights.append(found.read_bytes())
print(weights[0] == weights[1])
for dtype in ("float64", "uint8", "int16"):
    print(main(["check", "recipe.yaml", "--use", "mine", f"data.train.dtype={dtype}"]))
"""


def test_commands_train_alike_on_floats_and_refuse_what_they_must(tmp_path: Path) -> None:
    """In one process, which saves starts."""
    for name, text in {"mine.py": PLUGIN, "recipe.yaml": RECIPE, "commands.py": COMMANDS}.items():
        (tmp_path / name).write_text(text)
    (done,) = script_ranks(1, tmp_path / "commands.py")
    lines = [line for line in done.stdout.splitlines() if line in ("True", "False") or line.isdecimal()]
    assert lines == ["True", "0", "0", "3"], done.stdout + done.stderr
    (refusal,) = [line for line in done.stderr.splitlines() if "int16" in line]
    assert all(word in refusal for word in ("Typed", "sample 0", "uint8", "float32"))
