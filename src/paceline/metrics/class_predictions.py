"""What is predicted for each sample, as rows of a table."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.data.batch import Batch
from paceline.metrics.metric import Figures, State

_MANY_CLASSES = 100  # beyond this only the probability of the likeliest is kept
_ELEMENTS = 1 << 15  # made into probabilities at a time: torch has one thread do no more than that, in one way


class ClassPredictions:
    """What is predicted for each sample: of one label the likeliest class, of several those likelier than not.

    Metrics are tensors: "sample" [N], its number; "file" [N], the number of the sample that has its file, which the
    field "first" of a batch tells; "truth" and "predicted", bool [N, C]; "probabilities" [N, C], or of one label among
    many classes [N, 1], that of the predicted one alone.
    """

    def __init__(self, num_classes: int, multi_label: bool = False) -> None:
        self.num_classes = num_classes
        self.multi_label = multi_label
        self.higher_is_better: dict[str, bool] = {}

    def update(self, predictions: Tensor, batch: Batch) -> State:
        """All of the batch, to be joined."""
        rows = {
            "sample": batch.ids.cpu().double(),
            "file": batch.get("first", batch.ids).cpu().double(),
            "label": batch["label"].cpu().double(),
        }
        logits = predictions.detach().cpu()
        if self.multi_label or logits.shape[1] <= _MANY_CLASSES:
            return rows | {"logits": logits}
        share, best = logits.double().softmax(1).max(1, keepdim=True)
        return rows | {"share": share.float(), "best": best.masked_fill(share.isnan(), -1).double()}

    def compute(self, state: State) -> Figures:
        """A row for each sample."""
        labels, numbers = state["label"], torch.arange(self.num_classes)
        predicted, shares = self._predicted(state, numbers)
        return {
            "sample": state["sample"].long(),
            "file": state["file"].long(),
            "truth": labels > 0.5 if labels.ndim == 2 else labels.unsqueeze(1) == numbers,
            "predicted": predicted,
            "probabilities": shares,
        }

    def _predicted(self, state: State, numbers: Tensor) -> tuple[Tensor, Tensor]:
        if "share" in state:
            return state["best"] == numbers, state["share"]
        logits = state["logits"]
        chosen = logits > 0 if self.multi_label else logits.argmax(1, keepdim=True) == numbers
        size = max(1, _ELEMENTS // logits.shape[1])
        pieces = (logits[start : start + size].double() for start in range(0, len(logits), size))
        shares = [piece.sigmoid() if self.multi_label else piece.softmax(1) for piece in pieces]
        return chosen & ~logits.isnan().any(1, keepdim=True), torch.cat([piece.float() for piece in shares])
