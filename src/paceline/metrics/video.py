"""Metrics of videos that are seen in several views: one prediction a video, whichever samples its views came in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.data.batch import Batch
from paceline.metrics.classification import TopK
from paceline.metrics.metric import Figures, Metric, State, fold

_UNIT = 2.0**40
_ELEMENTS = 1 << 15  # logits measured at a time: torch adds no more than that in one thread, so in one order


class PerVideo:
    """The metrics of `metrics` for whole videos, and "clip_top1", the share of views that are right on their own.

    Predictions are logits [N, C], or [N, V, C] of V views a sample. Samples of a batch that have the same "video" are
    parts of one; without that field each is a video of its own. Probabilities are averaged over all views of a video,
    those of softmax, or of sigmoid with `multi_label`, where there is no "clip_top1". Samples that are videos seen once
    are measured as they are.
    """

    def __init__(self, metrics: Sequence[Metric], multi_label: bool = False) -> None:
        self.wrapped = list(metrics)
        self.multi_label = multi_label
        self.higher_is_better = {} if multi_label else {"clip_top1": True}

    def update(self, predictions: Tensor, batch: Batch) -> State:
        """A row for each video of the batch with the sums over its views here, and how many views are right."""
        if predictions.ndim == 2 and "video" not in batch:
            return self._update_each(predictions, batch)
        views = predictions.detach() if predictions.ndim == 3 else predictions.detach().unsqueeze(1)
        num_views = views.shape[1]
        flat = views.float().cpu().flatten(0, 1)  # [N * V, C]
        probabilities = flat.double().sigmoid() if self.multi_label else flat.double().softmax(1)
        rows = {
            "video": batch.get("video", batch.ids).cpu().double(),
            "first": batch.ids.cpu().double(),
            "label": batch["label"].cpu().double(),
            "views": torch.full((len(views),), float(num_views), dtype=torch.float64),
            "sums": _as_whole_numbers(probabilities).view(-1, num_views, 2, flat.shape[1]).sum(1),
        }
        return _joined(rows) | ({} if self.multi_label else _right_views(flat, batch["label"].cpu(), num_views))

    def compute(self, state: State) -> Figures:
        """The metrics of the metrics, and "clip_top1" if there are more views than videos."""
        if "sums" not in state:
            return self._compute_each(state)
        videos = _joined({name: state[name] for name in ("video", "first", "label", "views", "sums")})
        logits, labels = self._logits(videos), videos["label"]
        fields = {
            "id": videos["video"].long(),
            "first": videos["first"].long(),
            "label": labels.long() if labels.ndim == 1 else labels.float(),
        }
        size = max(1, _ELEMENTS // logits.shape[1])
        pieces = (slice(start, start + size) for start in range(0, len(logits), size))
        measured = (
            self._update_each(logits[piece], Batch({name: field[piece] for name, field in fields.items()}))
            for piece in pieces
        )
        metrics = self._compute_each(fold(measured))
        if "views_right" in state and int(state["views_seen"]) > len(logits):
            metrics["clip_top1"] = int(state["views_right"]) / int(state["views_seen"])
        return metrics

    def _logits(self, videos: State) -> Tensor:
        """Logits [videos, C] that stand for the mean of the views' probabilities, float64."""
        large, small = videos["sums"].unbind(1)
        # Half of the smallest step stands for a probability that is smaller than that in every view.
        sums = (large + small / _UNIT).clamp(min=0.5 / _UNIT)
        means = sums / (videos["views"].unsqueeze(1) * _UNIT)
        return means.log() - (-means.clamp(max=1 - 2.0**-53)).log1p() if self.multi_label else means.log()

    def _update_each(self, logits: Tensor, batch: Batch) -> State:
        """The states of all metrics in one, told apart by their numbers."""
        states = [metric.update(logits, batch) for metric in self.wrapped]
        return {f"{number}.{name}": value for number, state in enumerate(states) for name, value in state.items()}

    def _compute_each(self, state: State) -> Figures:
        metrics: Figures = {}
        for number, metric in enumerate(self.wrapped):
            start = f"{number}."
            own = {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
            metrics |= metric.compute(own)
        return metrics


def _as_whole_numbers(probabilities: Tensor) -> Tensor:
    """Multiples of 2**-40, and of 2**-80 what is left of them: [N, C] becomes [N, 2, C], whole numbers in float64.

    Whole numbers below 2**53 add exactly, up to 8,192 views of a video, so no order and no grouping can change a sum.
    """
    scaled = probabilities * _UNIT
    large = scaled.round()
    return torch.stack([large, ((scaled - large) * _UNIT).round()], 1)


def _joined(rows: State) -> State:
    """One row for each video, in the order of their numbers, with its first sample.

    Sums and views are added, labels are the same.
    """
    numbers, place = torch.unique(rows["video"], return_inverse=True)
    label = rows["label"].new_empty(len(numbers), *rows["label"].shape[1:])
    label[place] = rows["label"]
    first = rows["first"].new_full((len(numbers),), torch.inf)
    first.scatter_reduce_(0, place, rows["first"], "amin")
    added = {name: _added(rows[name], place, len(numbers)) for name in ("views", "sums")}
    return {"video": numbers, "first": first, "label": label, **added}


def _added(values: Tensor, place: Tensor, size: int) -> Tensor:
    return values.new_zeros(size, *values.shape[1:]).index_add_(0, place, values)


def _right_views(logits: Tensor, labels: Tensor, num_views: int) -> State:
    found = TopK([1]).update(logits, Batch(label=labels.repeat_interleave(num_views)))
    return {"views_right": found["top1"], "views_seen": found["samples"]}
