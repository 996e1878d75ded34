"""The predicted class of each sample, as rows of a table."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.data.batch import Batch
from paceline.metrics.metric import MetricValues, State

_MANY_CLASSES = 100  # above this only the probability of the predicted class is kept
_ELEMENTS = 1 << 15  # per softmax call: torch computes as many on one thread, so bit-identically everywhere


class SamplePredictions:
    """The most probable class of each sample, or with `multi_label` those above 0.5.

    Values are tensors: "sample" [N], its id; "file" [N], the id of the sample that names its file (the batch's field
    "first"); "truth" and "predicted", bool [N, C]; "probabilities" [N, C], or with one label among many classes [N, 1],
    that of the predicted class alone. "multi_label" is a bool.
    """

    def __init__(self, num_classes: int, multi_label: bool = False) -> None:
        self.num_classes = num_classes
        self.multi_label = multi_label
        self.higher_is_better: dict[str, bool] = {}

    def update(self, predictions: Tensor, batch: Batch) -> State:
        rows = {
            "sample": batch.ids.cpu().double(),
            "file": batch.get("first", batch.ids).cpu().double(),
            "label": batch["label"].cpu().double(),
        }
        logits = predictions.detach().cpu()
        if self.multi_label or logits.shape[1] <= _MANY_CLASSES:
            return rows | {"logits": logits}
        probability, best = logits.double().softmax(1).max(1, keepdim=True)
        best = best.masked_fill(probability.isnan(), -1)
        return rows | {"probability": probability.float(), "best": best.double()}

    def compute(self, state: State) -> MetricValues:
        labels, class_ids = state["label"], torch.arange(self.num_classes)
        predicted, probabilities = self._predicted(state, class_ids)
        return {
            "sample": state["sample"].long(),
            "file": state["file"].long(),
            "truth": labels > 0.5 if labels.ndim == 2 else labels.unsqueeze(1) == class_ids,
            "predicted": predicted,
            "probabilities": probabilities,
            "multi_label": self.multi_label,
        }

    def _predicted(self, state: State, class_ids: Tensor) -> tuple[Tensor, Tensor]:
        if "probability" in state:
            return state["best"] == class_ids, state["probability"]
        logits = state["logits"]
        predicted = logits > 0 if self.multi_label else logits.argmax(1, keepdim=True) == class_ids
        pieces = (piece.double() for piece in torch.split(logits, max(1, _ELEMENTS // logits.shape[1])))
        probabilities = [(piece.sigmoid() if self.multi_label else piece.softmax(1)).float() for piece in pieces]
        return predicted & ~logits.isnan().any(1, keepdim=True), torch.cat(probabilities)
