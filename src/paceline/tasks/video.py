"""Video classification: one clip of a video in training, several views of it in evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.batch import Batch
from paceline.losses.loss_term import LossTerm
from paceline.metrics.metric import Metric
from paceline.metrics.prediction_table import PredictionTable
from paceline.metrics.video import PerVideo
from paceline.models.forward import ask
from paceline.tasks.classification import Classification
from paceline.visualize.grid import Panel, tile_frames
from paceline.visualize.image import Image, to_image

_CLIP_SIDE = 160  # pixels of four frames


@register.task("video")
class VideoClassification(Classification):
    """Tells what happens in a video.

    Clips are [N, C, T, H, W]; several views of each sample, [N, V, C, T, H, W], make one prediction: probabilities are
    averaged over views. Samples with the same "video" are measured as one too, whichever processes they came to.
    """

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, LossTerm]:
        """Each loss of the prediction for each sample."""
        logits = self._averaged(self.predict(model, batch))
        return {name: loss(logits, batch) for name, loss in self.loss_functions.items()}

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits [N, classes]; of several views those of each, [N, V, classes]."""
        clips: Tensor = batch["image"]
        if clips.ndim not in (5, 6):
            raise DataError(
                f"video: got images of shape {list(clips.shape)}, expected clips [N, C, T, H, W]; use a data set of"
                " videos and a first transform clip or multi_clip"
            )
        if clips.ndim == 5:
            logits: Tensor = ask(model, clips)
            return logits
        # One view of all videos at a time, so that memory is that of evaluation with a single clip.
        return torch.stack([ask(model, view).float() for view in clips.unbind(1)], 1)

    def metrics(self) -> Sequence[Metric]:
        """The metrics of a classification, for whole videos, and beside them the share of views that are right."""
        return [PerVideo(super().metrics(), self._multi_label)]

    def answers(self) -> Metric:
        """What collects the probabilities of each video."""
        return PerVideo([PredictionTable(len(self.classes), self._multi_label)], self._multi_label)

    def draw(self, batch: Batch, predictions: Tensor | None, index: int) -> list[Panel]:
        """Draw four frames, framed by whether the prediction for the sample is correct."""
        return super().draw(batch, None if predictions is None else self._averaged(predictions), index)

    def thumbnail(self, image: Tensor) -> Image:
        """Return four frames of a clip [C, T, H, W], of the first view if there are several."""
        return tile_frames(to_image(image[0] if image.ndim == 5 else image), _CLIP_SIDE)

    def _averaged(self, logits: Tensor) -> Tensor:
        """Logits [N, classes] that stand for the mean of the views' probabilities."""
        if logits.ndim == 2:
            return logits
        if self._multi_label:
            return logits.double().sigmoid().mean(1).logit(eps=1e-12).to(logits.dtype)
        return logits.log_softmax(2).logsumexp(1) - math.log(logits.shape[1])
