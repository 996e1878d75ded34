"""Video metrics: one prediction per video, averaged over its views, whichever samples and batches they came in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.data.batch import Batch
from paceline.metrics.classification import TopK
from paceline.metrics.metric import Metric, MetricValues, State, merge_states

_UNIT = 2.0**40
_ELEMENTS = 1 << 15  # logits measured at a time: torch adds as many on one thread, so in one order


class PerVideo:
    """The values of `metrics` for whole videos, and "clip_top1", the accuracy of single views.

    Predictions are logits [N, C], or [N, V, C] for V views per sample. Samples with the same "video" belong to one
    video; without that field each sample is a video. Probabilities (softmax, or sigmoid with `multi_label`, where there
    is no "clip_top1") are averaged over all views of a video. Videos with one view are measured without averaging.
    """

    def __init__(self, metrics: Sequence[Metric], multi_label: bool = False) -> None:
        self.wrapped = list(metrics)
        self.multi_label = multi_label
        self.higher_is_better = {} if multi_label else {"clip_top1": True}

    def update(self, predictions: Tensor, batch: Batch) -> State:
        """A row for each video of the batch, with its views summed, and the number of correct views."""
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
            "sums": _to_fixed_point(probabilities).view(-1, num_views, 2, flat.shape[1]).sum(1),
        }
        return _group_by_video(rows) | ({} if self.multi_label else _correct_views(flat, batch["label"], num_views))

    def compute(self, state: State) -> MetricValues:
        """The values of the wrapped metrics, and "clip_top1" if there are more views than videos."""
        if "sums" not in state:
            return self._compute_each(state)
        videos = _group_by_video({name: state[name] for name in ("video", "first", "label", "views", "sums")})
        logits, labels = self._mean_logits(videos), videos["label"]
        fields = {
            "id": videos["video"].long(),
            "first": videos["first"].long(),
            "label": labels.long() if labels.ndim == 1 else labels.float(),
        }
        size = max(1, _ELEMENTS // logits.shape[1])
        pieces = (slice(start, start + size) for start in range(0, len(logits), size))
        states = (
            self._update_each(logits[piece], Batch({name: field[piece] for name, field in fields.items()}))
            for piece in pieces
        )
        values = self._compute_each(merge_states(states))
        if "views_correct" in state and int(state["num_views"]) > len(logits):
            values["clip_top1"] = int(state["views_correct"]) / int(state["num_views"])
        return values

    def _mean_logits(self, videos: State) -> Tensor:
        """Logits [videos, C] of the mean of the views' probabilities, float64."""
        high, low = videos["sums"].unbind(1)
        # A probability below the resolution in every view counts as half of the resolution.
        sums = (high + low / _UNIT).clamp(min=0.5 / _UNIT)
        means = sums / (videos["views"].unsqueeze(1) * _UNIT)
        return means.log() - (-means.clamp(max=1 - 2.0**-53)).log1p() if self.multi_label else means.log()

    def _update_each(self, logits: Tensor, batch: Batch) -> State:
        """The states of all wrapped metrics in one, with their positions as prefix."""
        states = [metric.update(logits, batch) for metric in self.wrapped]
        return {f"{index}.{name}": value for index, state in enumerate(states) for name, value in state.items()}

    def _compute_each(self, state: State) -> MetricValues:
        values: MetricValues = {}
        for index, metric in enumerate(self.wrapped):
            prefix = f"{index}."
            own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            values |= metric.compute(own)
        return values


def _to_fixed_point(probabilities: Tensor) -> Tensor:
    """Multiples of 2**-40, and the remainder in multiples of 2**-80: [N, C] becomes [N, 2, C], integers in float64.

    Integers below 2**53 add exactly, so for up to 8,192 views per video no order of additions changes a sum.
    """
    scaled = probabilities * _UNIT
    high = scaled.round()
    return torch.stack([high, ((scaled - high) * _UNIT).round()], 1)


def _group_by_video(rows: State) -> State:
    """One row for each video, sorted by id: the first sample's id, the label, and the sums of views."""
    videos, index = torch.unique(rows["video"], return_inverse=True)
    label = rows["label"].new_empty(len(videos), *rows["label"].shape[1:])
    label[index] = rows["label"]
    first = rows["first"].new_full((len(videos),), torch.inf)
    first.scatter_reduce_(0, index, rows["first"], "amin")
    sums = {
        name: rows[name].new_zeros(len(videos), *rows[name].shape[1:]).index_add_(0, index, rows[name])
        for name in ("views", "sums")
    }
    return {"video": videos, "first": first, "label": label, **sums}


def _correct_views(logits: Tensor, labels: Tensor, num_views: int) -> State:
    found = TopK([1]).update(logits, Batch(label=labels.cpu().repeat_interleave(num_views)))
    return {"views_correct": found["top1"], "num_views": found["samples"]}
