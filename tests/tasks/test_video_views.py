"""Several views of a video, in one sample or apart: one prediction, whichever process measured which clip."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file
from support.forkserver import paceline, paceline_ranks
from torch import Tensor

from paceline.data.batch import Batch
from paceline.data.datasets.video import VideoList
from paceline.data.synthetic import write_video
from paceline.losses.classification import BinaryCrossEntropy, CrossEntropy
from paceline.metrics.metric import MetricValues, State, merge_states, pack, unpack
from paceline.metrics.video import PerVideo
from paceline.tasks.video import VideoClassification

CLASSES = ["circling", "growing", "sideways", "vertical"]
VIDEOS, CLIPS, CROPS = 7, 5, 3

Numbers = NDArray[np.float64]


def metric(multi_label: bool = False) -> PerVideo:
    losses: dict[str, Any] = {"bce": BinaryCrossEntropy()} if multi_label else {"cross_entropy": CrossEntropy()}
    task = VideoClassification(losses, dict.fromkeys(losses, 1.0), CLASSES, top_k=(1, 2), multi_label=multi_label)
    (found,) = task.metrics()
    assert isinstance(found, PerVideo)
    return found


def drawn(seed: int, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """What a model says of each view, [videos, clips, crops, classes], and the class of each video."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(VIDEOS, CLIPS, CROPS, len(CLASSES), generator=generator) * scale
    return logits, torch.randint(len(CLASSES), (VIDEOS,), generator=generator)


def apart(logits: Tensor, labels: Tensor, samples: Sequence[int]) -> tuple[Tensor, Batch]:
    """A batch of clips, each with its crops: some of all clips of all videos."""
    ids = torch.tensor(samples)
    videos = ids // CLIPS
    return logits[videos, ids % CLIPS], Batch(id=ids, video=videos, label=labels[videos])


def together(logits: Tensor, labels: Tensor, videos: Sequence[int]) -> tuple[Tensor, Batch]:
    """A batch of videos, each with all its views."""
    ids = torch.tensor(videos)
    return logits[ids].flatten(1, 2), Batch(id=ids, label=labels[ids])


def plain(metrics: MetricValues) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in metrics.items()}


def softmax(logits: Numbers) -> Numbers:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def expected(logits: Numbers, labels: NDArray[np.int64]) -> dict[str, float]:
    """Metrics of views [videos, views, classes], counted one by one."""
    loss, right, among_two, right_views = 0.0, 0, 0, 0
    for views, label in zip(logits, labels, strict=True):
        average = np.mean([softmax(view) for view in views], 0)
        loss -= np.log(average[label])
        best = np.argsort(-average)
        right += best[0] == label
        among_two += label in best[:2]
        right_views += sum(int(view.argmax() == label) for view in views)
    size = len(labels)
    shares = {"top1": right / size, "top2": among_two / size, "clip_top1": right_views / logits[..., 0].size}
    return {"cross_entropy": loss / size, **shares}


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.permutations(range(VIDEOS * CLIPS)), st.lists(st.integers(1, 34), max_size=8))
def test_clips_are_joined_in_any_order_and_from_any_batch(seed: int, order: list[int], slices: list[int]) -> None:
    logits, labels = drawn(seed)
    chosen = metric()
    whole = chosen.compute(chosen.update(*together(logits, labels, range(VIDEOS))))
    edges = [0, *sorted(set(slices)), VIDEOS * CLIPS]
    states = [chosen.update(*apart(logits, labels, order[start:stop])) for start, stop in pairwise(edges)]
    of_ranks = [unpack(pack(merge_states(states[rank::3]))) for rank in range(3)]
    assert plain(chosen.compute(merge_states(of_ranks))) == plain(whole)
    by_hand = expected(logits.flatten(1, 2).double().numpy(), labels.numpy())
    assert {name: whole[name] for name in by_hand} == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("scale", [3.0, 60.0])
def test_several_labels_are_joined(scale: float) -> None:
    logits, _ = drawn(3, scale)
    labels = (torch.rand(VIDEOS, len(CLASSES), generator=torch.Generator().manual_seed(4)) > 0.5).float()
    chosen = metric(multi_label=True)
    parts = [range(35)[start::4] for start in range(4)]
    found = plain(chosen.compute(merge_states(chosen.update(*apart(logits, labels, part)) for part in parts)))
    assert found == plain(chosen.compute(chosen.update(*together(logits, labels, range(VIDEOS)))))
    assert "clip_top1" not in found
    average = (1 / (1 + np.exp(-logits.double().numpy()))).mean((1, 2))
    truth = labels.numpy() > 0.5
    assert found["accuracy"] == ((average > 0.5) == truth).mean()
    assert found["exact_match"] == ((average > 0.5) == truth).all(1).mean()
    areas = [_area(average[:, k], truth[:, k]) for k in range(len(CLASSES))]
    assert found["auroc"] == pytest.approx(np.mean(areas), abs=1e-12)
    if scale < 10:
        loss = -np.where(truth, np.log(average), np.log1p(-average)).mean()
        assert found["bce"] == pytest.approx(loss, rel=1e-9)


def _area(scores: Numbers, positive: NDArray[np.bool_]) -> float:
    pairs = [(yes > no) + (yes == no) / 2 for yes in scores[positive] for no in scores[~positive]]
    return float(np.mean(pairs))


def test_classes_that_no_view_believes_in_are_still_ranked() -> None:
    logits = torch.tensor([[[50.0, 0.0, 10.0, 5.0]] * 2])
    chosen = metric()
    batch = Batch(id=torch.tensor([0]), label=torch.tensor([2]))
    metrics = chosen.compute(chosen.update(logits, batch))
    assert (metrics["top1"], metrics["top2"]) == (0, 1)
    assert metrics["loss"] == pytest.approx(40, rel=1e-6)
    never = chosen.compute(chosen.update(torch.tensor([[[500.0, 0.0, 0.0, 0.0]] * 2]), batch))
    assert 50 < never["loss"] < 60


def test_a_video_with_a_view_that_is_no_number_is_never_right() -> None:
    logits, labels = drawn(0)
    logits = torch.nn.functional.one_hot(labels, len(CLASSES)).float()[:, None, None].expand_as(logits).clone()
    logits[2, 1, 0, 3] = torch.nan
    chosen = metric()
    metrics = chosen.compute(
        merge_states(chosen.update(*apart(logits, labels, part)) for part in ([11, 12], range(11)))
    )
    assert metrics["top1"] == 2 / 3
    assert metrics["clip_top1"] == 38 / 39


def test_a_video_is_predicted_by_the_clips_that_could_be_read() -> None:
    logits, labels = drawn(5)
    readable = [index for index in range(VIDEOS * CLIPS) if index not in (0, 8, 20, 21, 22, 23, 24)]
    chosen = metric()
    found = chosen.compute(chosen.update(*apart(logits, labels, readable)))
    views = [logits[video].double().numpy()[clips].reshape(-1, 4) for video, clips in _by_video(readable).items()]
    right = [
        softmax(each).mean(0).argmax() == labels[video] for each, video in zip(views, [0, 1, 2, 3, 5, 6], strict=True)
    ]
    assert found["top1"] == np.mean(right)
    assert int(found["confusion"].sum()) == 6


def _by_video(samples: list[int]) -> dict[int, list[int]]:
    return {
        video: [s % CLIPS for s in samples if s // CLIPS == video] for video in sorted({s // CLIPS for s in samples})
    }


def test_videos_seen_once_are_measured_as_they_are() -> None:
    logits, labels = drawn(1)
    chosen = metric()
    once, batch = logits[:, 0, 0], Batch(id=torch.arange(VIDEOS), label=labels)
    state: State = chosen.update(once, batch)
    for number, each in enumerate(chosen.wrapped):
        own = each.update(once, batch)
        assert all(torch.equal(state[f"{number}.{name}"], value) for name, value in own.items())
    assert "clip_top1" not in chosen.compute(state)
    assert "clip_top1" not in chosen.compute(chosen.update(once, Batch(batch, video=torch.arange(VIDEOS))))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten short videos, and a recipe that measures seven of them."""
    folder = tmp_path_factory.mktemp("views")
    (folder / "data").mkdir()
    write_video(folder / "data", 10, 0)
    lines = [line for name in ("train", "val") for line in (folder / f"data/{name}.csv").read_text().splitlines()]
    (folder / "data/seven.csv").write_text("\n".join(lines[:VIDEOS]) + "\n")
    (folder / "recipe.json").write_text(json.dumps(RECIPE))
    (folder / "exact_net.py").write_text(NET)
    return folder


NET = """
import torch
from torch import nn
from paceline.core.registry import register

class Exact(nn.Module):
    # Sums of whole numbers: what it says of a clip does not depend on what else is in the batch.
    def __init__(self, num_classes):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-13, 13, 3 * num_classes).view(3, -1).sin() / 8)

    def forward(self, clips):
        red, green, blue = ((clips.double() * 255).round().mean((2, 3, 4)) - 128).unsqueeze(2).unbind(1)
        weight = self.weight.double()
        return (red * weight[0] + green * weight[1] + blue * weight[2]).float()

@register.model("exact")
def exact(num_classes, in_channels):
    return Exact(num_classes)
"""
RECIPE: dict[str, Any] = {
    "name": "views",
    "task": {"name": "video", "top_k": [1, 2]},
    "model": {"name": "exact"},
    "data": {
        "batch_size": 6,
        "train": {
            "dataset": "video_list",
            "file": "data/seven.csv",
            "classes": CLASSES,
            "transforms": [{"name": "clip", "num_frames": 2, "stride": 3, "position": "center"}],
        },
        "val": {
            "dataset": "video_list",
            "file": "data/seven.csv",
            "classes": CLASSES,
            "transforms": [
                {"name": "multi_clip", "num_clips": CLIPS, "num_frames": 2, "stride": 3},
                {"name": "multi_crop", "size": 72, "num_crops": CROPS},
            ],
        },
    },
    "losses": ["cross_entropy"],
    "optimizer": {"name": "sgd", "lr": 1e-6},
    "train": {"steps": 1, "threads": 1},
    "evaluate": {"batch_size": 4},
    "logging": {"images": False, "tensorboard": False},
}


def measured(project: Path, procs: int) -> dict[str, Any]:
    """What `paceline eval` finds."""
    words = ["eval", "run", "--use", "exact_net", "--json"]
    done = paceline_ranks(procs, project, *words, OMP_NUM_THREADS="1")
    assert [each.returncode for each in done] == [0] * procs, done[0].stderr
    answer: dict[str, Any] = json.loads(done[0].stdout)
    assert answer["num_samples"] == VIDEOS
    metrics: dict[str, Any] = answer["metrics"]
    return metrics


def test_metrics_are_bit_identical_on_any_number_of_processes(project: Path) -> None:
    trained = paceline(project, "train", "recipe.json", "--out", "run", "--use", "exact_net", OMP_NUM_THREADS="1")
    assert trained.returncode == 0, trained.stderr
    found = [measured(project, procs) for procs in (1, 2, 3)]
    lines = [json.loads(line) for line in (project / "run/metrics.jsonl").read_text().splitlines()]
    whole = next(line for line in lines if line["split"] == "val")
    assert whole["num_samples"] == VIDEOS
    by_hand = expected(*answers(project))
    assert {name: whole[name] for name in by_hand} == pytest.approx(by_hand, rel=1e-6)
    assert by_hand["clip_top1"] not in (0, by_hand["top1"])
    assert "clip_top1" in found[0]
    assert found == [{name: whole[name] for name in found[0]}] * 3


def answers(project: Path) -> tuple[Numbers, NDArray[np.int64]]:
    """What the trained net says of each view, [videos, views, classes], and the labels; from the frames."""
    (file,) = (project / "run/checkpoints").glob("*/model.safetensors")
    weight = load_file(file)["weight"].astype(np.float64)
    videos = VideoList(project / "data/seven.csv", classes=CLASSES)
    logits = []
    for index in range(VIDEOS):
        frames = videos.open(index)["image"].frames(range(videos.open(index)["image"].num_frames))
        last = len(frames) - 4  # where the last pair of frames, 3 apart, begins
        starts = [min(int(clip / (CLIPS - 1) * (last + 1)), last) for clip in range(CLIPS)]
        height, width = frames.shape[1:3]
        top, lefts = (height - 72) // 2, [0, (width - 72) // 2, width - 72]
        views = [frames[[start, start + 3], top : top + 72, left : left + 72] for start in starts for left in lefts]
        logits.append([(view.mean((0, 1, 2)) - 128) @ weight for view in views])
    return np.array(logits), np.array([videos.open(index)["label"] for index in range(VIDEOS)])
