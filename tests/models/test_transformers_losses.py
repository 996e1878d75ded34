"""The losses of transformers' detectors: against the library's own, and over the micro-batches of a step."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from small_transformers import DTYPES, NUM_CLASSES, SMALL, labels_of, library_model, samples, small
from torch import Tensor, nn

from paceline.core.errors import missing_extra
from paceline.models.detector import Target
from paceline.models.detr_denoising import denoising_queries
from paceline.models.transformers_detection import TransformersDetector, import_transformers

pytestmark = pytest.mark.skipif(bool(missing_extra("transformers")), reason=missing_extra("transformers"))

HYBRIDS = ["rt_detr_v2", "d_fine"]
_LOSSES = {
    "rt_detr_v2": "loss_rt_detr.RTDetrForObjectDetectionLoss",
    "d_fine": "loss_d_fine.DFineForObjectDetectionLoss",
    "lw_detr": "loss_lw_detr.LwDetrForObjectDetectionLoss",
}


def divided(detector: TransformersDetector, parts: Mapping[str, Any], counts: Mapping[str, float]) -> dict[str, Tensor]:
    """Each loss, divided as the engine does."""
    divisors = detector.divisors(counts)
    return {name: total / (divisors[name] or 1.0) for name, (total, _) in parts.items()}


def kinds(losses: Mapping[str, Tensor]) -> dict[str, float]:
    """The sum of each kind of loss over layers, as the library names them; those of denoising apart."""
    found: dict[str, float] = {}
    for name, value in losses.items():
        kind = "_".join(name.split("_")[:2]) + ("_dn" if "_dn" in name else "")
        found[kind] = found.get(kind, 0.0) + value.item()
    return found


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("numbers", [(3, 1), (0, 0), (4, 14)])
def test_losses_and_counts_are_those_of_the_library(name: str, numbers: Sequence[int]) -> None:
    detector = small(name)
    batch, given = samples(name, numbers)
    own = library_model(detector)
    torch.manual_seed(3)  # denoising queries are drawn
    expected = own(batch, labels=labels_of(given))
    torch.manual_seed(3)
    parts = detector(batch, given)
    assert isinstance(parts, dict)
    assert {key: count for key, (_, count) in parts.items()} == detector.count(batch, given)
    losses = divided(detector, parts, detector.count(batch, given))
    assert sum(losses.values()).item() == pytest.approx(expected.loss.item(), rel=1e-6)  # type: ignore[union-attr]
    if name in HYBRIDS:
        by_kind = kinds(expected.loss_dict)
        assert {key: value for key, value in kinds(losses).items() if key in by_kind or value} == pytest.approx(
            by_kind, rel=1e-5, abs=1e-6
        )


def outputs(name: str, given: Sequence[Target], queries: int, dtype: torch.dtype) -> list[Tensor]:
    """What a model would hand to its loss function: boxes near the objects, so that every loss has a value."""
    generator = torch.Generator().manual_seed(5)
    config = SMALL[name]["args"]
    layers, number = config["decoder_layers"], len(given)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    near = torch.stack([each["boxes"][torch.arange(queries) % len(each["boxes"])] for each in labels_of(given)])

    def boxes(*before: int) -> Tensor:
        return (near + 0.03 * drawn(*before, *near.shape)).clamp(0.01, 0.99)

    if name == "lw_detr":
        logits, coords = drawn(layers, number, queries, NUM_CLASSES), boxes(layers)
        return [logits, coords, drawn(number, queries, NUM_CLASSES), boxes()]
    early = 1 if name == "d_fine" else 0
    own = queries - _num_denoising(given) if config["num_denoising"] else queries
    made = [
        drawn(layers + early, number, queries, NUM_CLASSES).transpose(0, 1), boxes(layers + early).transpose(0, 1),
        drawn(number, own, NUM_CLASSES), boxes()[:, :own],
    ]  # fmt: skip
    if not early:
        return made
    return [*made, drawn(number, layers, queries, 4 * (config["max_num_bins"] + 1)), boxes(layers).transpose(0, 1)]


def _num_denoising(given: Sequence[Target]) -> int:
    most = max(len(each["labels"]) for each in given)
    return 2 * most * max(1, 10 // most)


@pytest.mark.parametrize("name", _LOSSES)
def test_losses_and_gradients_of_good_predictions_are_those_of_the_library(name: str) -> None:
    detector, config = small(name), SMALL[name]["args"]
    _, given = samples(name, (3, 2))
    labels, dtype = labels_of(given), DTYPES[name]
    queries = config["num_queries"] * config.get("group_detr", 1)
    more: dict[str, Any] = {}
    if name in HYBRIDS:
        package = type(detector.detector).__module__
        group = importlib.import_module(package).get_contrastive_denoising_training_group
        meta = group(labels, NUM_CLASSES, config["num_queries"], nn.Embedding(NUM_CLASSES + 1, 4), 10)[3]
        more, queries = {"denoising_meta_values": meta}, queries + _num_denoising(given)
    module, _, function = _LOSSES[name].partition(".")
    library_loss = getattr(importlib.import_module(f"transformers.loss.{module}"), function)
    found = []
    for loss in (library_loss, detector.detector.loss_function):
        leaves = [each.detach().clone().requires_grad_() for each in outputs(name, given, queries, dtype)]
        last = [each[-1] if name == "lw_detr" else each[:, -1] for each in leaves[:2]]
        if name == "d_fine":
            more |= dict(zip(("predicted_corners", "initial_reference_points"), leaves[4:], strict=True))
        total, parts, _ = loss(last[0], labels, "cpu", last[1], detector.detector.config, *leaves[:4], **more)
        if total is None:
            total = sum(divided(detector, parts, detector.count(None, given)).values())
            assert all(value.item() > 0 for key, (value, _) in parts.items()), parts
        total.backward()
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in leaves]
        found.append((total.detach(), *gradients))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def gradients(detector: TransformersDetector, sizes: Sequence[int], batch: Tensor, given: Sequence[Target]) -> Tensor:
    """The gradient of a step of micro-batches of these sizes, each loss divided by what the whole step counts."""
    detector.zero_grad()
    micro = list(zip(split(batch, sizes), split(given, sizes), strict=True))
    counts = [detector.count(*each) for each in micro]
    total = {name: sum(each[name] for each in counts) for name in counts[0]}
    for each in micro:
        parts = detector(*each)
        assert isinstance(parts, dict)
        sum(divided(detector, parts, total).values()).backward()  # type: ignore[union-attr]
    return torch.cat([each.grad.flatten() for each in detector.parameters() if each.grad is not None])


def split(given: Any, sizes: Sequence[int]) -> list[Any]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [given[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def without_batch_norm(model: nn.Module) -> None:
    """Statistics of a micro-batch differ from those of the step."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


@pytest.mark.parametrize("name", SMALL)
def test_a_step_of_micro_batches_is_the_whole_step_and_not_with_the_divisions_of_the_library(name: str) -> None:
    detector = small(name, **({"num_denoising": 0} if name in HYBRIDS else {}))  # its noise is drawn by micro-batch
    without_batch_norm(detector)
    batch, given = samples(name, (1, 5, 2, 0, 3, 1, 0, 4))
    whole = gradients(detector, [8], batch, given)
    cut = gradients(detector, [2, 2, 2, 2], batch, given)
    assert (cut - whole).norm() <= 1e-5 * whole.norm()

    own = library_model(detector)
    without_batch_norm(own)
    theirs = []
    for size in (8, 2):
        own.zero_grad()
        for images, objects in zip(*(split(each, [size] * (8 // size)) for each in (batch, given)), strict=True):
            (own(images, labels=labels_of(objects)).loss * size / 8).backward()
        theirs.append(torch.cat([each.grad.flatten() for each in own.parameters() if each.grad is not None]))
    assert (theirs[0] - whole).norm() <= 1e-4 * whole.norm()
    assert (theirs[1] - theirs[0]).norm() > 0.05 * whole.norm()


@pytest.mark.parametrize("name", HYBRIDS)
def test_denoising_losses_of_micro_batches_add_up(name: str) -> None:
    # Without noise, and with as many objects in each micro-batch, denoising queries are the same however it is divided.
    detector = small(name, label_noise_ratio=0.0, box_noise_scale=0.0)
    without_batch_norm(detector)
    batch, given = samples(name, (2, 1, 2, 0, 0, 2, 1, 2))
    whole = gradients(detector, [8], batch, given)
    assert (gradients(detector, [2, 2, 2, 2], batch, given) - whole).norm() <= 1e-5 * whole.norm()


@pytest.mark.parametrize("numbers", [(3, 1, 0), (12, 2), (0, 0)])
def test_denoising_queries_are_those_of_the_library(numbers: Sequence[int]) -> None:
    import_transformers()
    module = importlib.import_module("transformers.models.rt_detr_v2.modeling_rt_detr_v2")
    _, given = samples("d_fine", numbers)
    arguments = labels_of(given), NUM_CLASSES, 12, nn.Embedding(NUM_CLASSES + 1, 4), 10, 0.5, 1.0
    torch.manual_seed(7)
    expected = module.get_contrastive_denoising_training_group(*arguments)
    torch.manual_seed(7)
    found = denoising_queries(*arguments)
    if expected[0] is None:
        assert found == expected
        return
    for tensor, own in zip(expected[:3], found[:3], strict=True):
        torch.testing.assert_close(own, tensor)
    assert {name: expected[3][name] for name in found[3]} == found[3]
