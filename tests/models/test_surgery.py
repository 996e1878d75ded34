"""Weights go into a model whole, or not at all; only a head made for other classes may differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import CheckpointError
from paceline.models.surgery import find_heads, fit


class MobileLike(nn.Module):
    """Named as the torchvision network is: features.*, then a dropout and a linear classifier."""

    def __init__(self, num_classes: int, width: int = 8) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU6()),
            nn.Sequential(nn.Conv2d(4, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU6()),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(width, num_classes))


class TimmLike(MobileLike):
    """Says itself which module classifies, and has a linear layer after it."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.projection = nn.Linear(4, 4)

    def get_classifier(self) -> nn.Module:
        return self.classifier[1]


class Distilled(TimmLike):
    """Has two classifiers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.distilled = nn.Linear(8, num_classes)

    def get_classifier(self) -> Any:
        return self.classifier[1], self.distilled


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, 7) for name, tensor in model.state_dict().items()}


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_matching_weights_are_loaded_all() -> None:
    model = MobileLike(10)
    weights = weights_of(MobileLike(10))
    fitted = fit(model, weights)
    assert all(tensor.equal(weights[name]) for name, tensor in model.state_dict().items())
    assert sorted(fitted.loaded) == sorted(weights)
    assert (fitted.missing, fitted.unexpected, fitted.reshaped) == ([], [], {})
    assert fitted.summary() == ["loaded        14 tensors"]


@pytest.mark.parametrize("kind", [MobileLike, TimmLike])
def test_a_head_for_other_classes_stays_fresh(kind: type[MobileLike]) -> None:
    model = kind(10)
    before = copied(model)
    fitted = fit(model, weights_of(kind(1000)))
    assert fitted.reshaped == {
        "classifier.1.weight": ((1000, 8), (10, 8)),
        "classifier.1.bias": ((1000,), (10,)),
    }
    for name, tensor in model.state_dict().items():
        expected = before[name] if name in fitted.reshaped else torch.full_like(tensor, 7)
        assert tensor.equal(expected), name
    assert fitted.summary()[1] == (
        "replaced       2 tensors  classifier.1.weight [1000, 8] → [10, 8], classifier.1.bias [1000] → [10]"
    )


def test_a_head_is_taken_over_whole_or_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    weights = weights_of(model)
    weights["1.weight"] = torch.zeros(3, 9)
    before = copied(model)
    fitted = fit(model, weights)
    # The bias would fit, but it belongs to the weight that does not.
    assert list(fitted.reshaped) == ["1.weight", "1.bias"]
    assert model.state_dict()["1.bias"].equal(before["1.bias"])
    assert fitted.loaded == ["0.weight", "0.bias"]


def test_two_heads_are_replaced_together() -> None:
    fitted = fit(Distilled(10), weights_of(Distilled(1000)))
    assert {name.rpartition(".")[0] for name in fitted.reshaped} == {"classifier.1", "distilled"}


def test_a_file_without_a_head_and_a_model_without_one() -> None:
    weights = {n: t for n, t in weights_of(MobileLike(10)).items() if not n.startswith("classifier")}
    fitted = fit(MobileLike(10), weights)
    assert fitted.missing == ["classifier.1.weight", "classifier.1.bias"]
    assert fitted.summary()[1] == "missing        2 tensors  classifier.1.weight, classifier.1.bias"

    headless = TimmLike(10)
    headless.classifier[1] = nn.Identity()
    assert fit(headless, weights_of(TimmLike(10))).unexpected == ["classifier.1.weight", "classifier.1.bias"]


def test_half_a_head_is_an_error() -> None:
    weights = weights_of(MobileLike(10))
    del weights["classifier.1.bias"]
    with pytest.raises(CheckpointError, match=r"1 missing from the weights:\n    classifier\.1\.bias \[10\]"):
        fit(MobileLike(10), weights)


def test_any_other_difference_is_an_error_and_changes_nothing() -> None:
    model = MobileLike(10)
    before = copied(model)
    weights = weights_of(MobileLike(10))
    weights["features.0.0.weight"] = torch.zeros(4, 1, 3, 3)
    del weights["features.1.1.running_mean"]
    weights["stem.weight"] = torch.zeros(2, 2)
    with pytest.raises(CheckpointError) as caught:
        fit(model, weights)
    assert str(caught.value).splitlines() == [
        "the weights do not fit the model:",
        "  1 of another shape (weights → model):",
        "    features.0.0.weight [4, 1, 3, 3] → [4, 3, 3, 3]",
        "  1 missing from the weights:",
        "    features.1.1.running_mean [8]",
        "  1 unknown to the model:",
        "    stem.weight [2, 2]",
    ]
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_long_lists_are_cut_at_ten() -> None:
    weights = {**weights_of(MobileLike(10)), **{f"extra.{number}": torch.zeros(1) for number in range(13)}}
    with pytest.raises(CheckpointError, match=r"13 unknown to the model") as caught:
        fit(MobileLike(10), weights)
    lines = str(caught.value).splitlines()
    assert len([line for line in lines if "extra." in line]) == 10
    assert lines[-1] == "    and 3 more"


def test_counters_that_old_files_lack_are_no_error() -> None:
    weights = {n: t for n, t in weights_of(MobileLike(10)).items() if not n.endswith("num_batches_tracked")}
    fitted = fit(MobileLike(10), weights)
    assert fitted.missing == ["features.0.1.num_batches_tracked", "features.1.1.num_batches_tracked"]


def test_heads_can_be_named() -> None:
    model = MobileLike(10)
    weights = weights_of(MobileLike(10, width=6))
    with pytest.raises(CheckpointError, match=r"features\.1\.0\.weight \[6, 4, 1, 1\] → \[8, 4, 1, 1\]"):
        fit(model, weights)
    fitted = fit(model, weights, head=["features.1", "classifier"])
    assert sorted({name.split(".")[0] for name in fitted.reshaped}) == ["classifier", "features"]
    assert all(name.startswith("features.0") for name in fitted.loaded)
    with pytest.raises(CheckpointError, match="head 'clasifier': found in neither"):
        fit(model, weights, head=["clasifier"])
    # A prefix ends at a dot: "feat" is not "features".
    with pytest.raises(CheckpointError, match="head 'feat'"):
        fit(model, weights, head=["feat"])


def test_no_head_at_all_makes_it_strict() -> None:
    with pytest.raises(CheckpointError, match=r"classifier\.1\.weight \[1000, 8\] → \[10, 8\]"):
        fit(MobileLike(10), weights_of(MobileLike(1000)), head=[])


def test_heads_are_found_as_the_model_says_else_by_form() -> None:
    assert find_heads(TimmLike(5)) == ["classifier.1"]
    assert find_heads(Distilled(5)) == ["classifier.1", "distilled"]
    assert find_heads(MobileLike(5)) == ["classifier.1"]

    described: Any = MobileLike(5)
    described.default_cfg = {"classifier": "features.1.0"}
    assert find_heads(described) == ["features.1.0"]
    described.default_cfg = {"classifier": ("classifier.1", "features.1.0")}
    assert find_heads(described) == ["classifier.1", "features.1.0"]

    segmenter: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1), nn.Linear(2, 2))
    assert find_heads(segmenter) == ["2"]
    segmenter.num_classes = 5
    assert find_heads(segmenter) == ["1"]
    assert find_heads(nn.Sequential(nn.Conv2d(3, 8, 3))) == []


def test_half_precision_weights_go_into_a_full_precision_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    fit(model, {name: torch.full_like(t, 0.5, dtype=torch.float16) for name, t in model.state_dict().items()})
    weight = model.state_dict()["0.weight"]
    assert (weight.dtype, weight.tolist()) == (torch.float32, [[0.5, 0.5], [0.5, 0.5]])
