"""What is drawn of an evaluation: samples from all over a split, kept one by one and put together again."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from small_runs import ALONE
from torch import Tensor

from paceline.data.batch import Batch
from paceline.engine.exhibits import assemble, drawn, pick
from paceline.losses.classification import CrossEntropy
from paceline.tasks.video import VideoClassification

CLASSES = ["a", "b", "c"]


class Prediction(NamedTuple):
    """Some of all kinds."""

    logits: Tensor
    maps: list[Tensor]
    more: dict[str, Any]


def test_samples_are_spread_evenly() -> None:
    assert sorted(drawn(1000, object())) == [0, 125, 250, 375, 500, 625, 750, 875]
    assert sorted(drawn(3, object())) == [0, 1, 2]
    assert sorted(drawn(0, object())) == []


def batches(sizes: list[int]) -> list[tuple[Batch, Prediction]]:
    """One batch for each number; images of a batch have one size, maps have their own."""
    made, start = [], 0
    for size in sizes:
        ids = torch.arange(start, start + size)
        image = ids.view(-1, 1, 1, 1).expand(size, 3, 2 + size, 4).float()
        maps = [torch.full((2, 3 + number), number) for number in ids.tolist()]
        more = {"score": ids * 10, "scale": 0.5, "nothing": None}
        made.append((Batch(id=ids, image=image, truth=maps), Prediction(ids.view(-1, 1).float(), maps, more)))
        start += size
    return made


def test_batches_are_put_together_from_samples() -> None:
    kept = [each for one in batches([4, 4]) for each in pick({1, 2, 6}, object(), *one)]
    assert [each.sample for each in kept] == [1, 2, 6]
    found = assemble(ALONE, kept)
    assert found is not None
    batch, predictions = found
    assert isinstance(batch, Batch)
    assert batch.ids.tolist() == [1, 2, 6]
    assert batch["image"].shape == (3, 3, 6, 4)
    assert [int(image[0, 0, 0]) for image in batch["image"]] == [1, 2, 6]
    assert isinstance(predictions, Prediction)
    assert predictions.logits.tolist() == [[1.0], [2.0], [6.0]]
    assert [(tuple(each.shape), int(each[0, 0])) for each in predictions.maps] == [
        ((2, 4), 1),
        ((2, 5), 2),
        ((2, 9), 6),
    ]
    assert predictions.more["score"].tolist() == [10, 20, 60]
    assert (predictions.more["scale"], predictions.more["nothing"]) == (0.5, None)
    assert assemble(ALONE, []) is None


def test_images_of_many_sizes_are_a_list() -> None:
    found = assemble(ALONE, [each for one in batches([4, 3]) for each in pick({0, 5}, object(), *one)])
    assert found is not None
    assert [tuple(image.shape) for image in found[0]["image"]] == [(3, 6, 4), (3, 5, 4)]


def test_what_cannot_be_taken_apart_is_not_drawn() -> None:
    batch, predictions = batches([4])[0]
    assert pick({1}, object(), batch, {"scores": np.arange(4)}) == []
    assert len(pick({1}, object(), batch, predictions)) == 1


def test_no_more_is_kept_than_is_drawn() -> None:
    whole = batches([64])[0]
    (kept,) = pick({7}, object(), *whole)
    assert kept.seen[0]["image"].untyped_storage().nbytes() == 3 * 66 * 4 * 4
    task = VideoClassification({"cross_entropy": CrossEntropy()}, {"cross_entropy": 1.0}, CLASSES)
    clips = torch.rand(2, 6, 3, 8, 10, 12)  # six views
    samples = Batch(id=torch.arange(2), image=clips, label=torch.tensor([0, 1]))
    logits = torch.randn(2, 6, 3)
    kept_clips = pick({0, 1}, task, samples, logits)
    assert kept_clips[0].seen[0]["image"].shape == (1, 3, 22, 26)
    found = assemble(ALONE, kept_clips)
    assert found is not None
    drawn, at_once = task.picture(*found), task.picture(samples, logits)
    assert drawn is not None
    assert at_once is not None
    assert (drawn == at_once).all()
    of_many_sizes = {**found[0], "image": [found[0]["image"][0], found[0]["image"][1][:, :, :20]]}
    assert task.picture(Batch(of_many_sizes), found[1]) is not None
