"""Video classification: one clip of a video in training, several views of it in evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.core.errors import DataError
from paceline.data.batch import Batch
from paceline.losses.term import Term
from paceline.metrics.answers import Answers
from paceline.metrics.state import Metric
from paceline.metrics.videos import OfVideos
from paceline.models.asking import ask
from paceline.tasks.classification import Classification
from paceline.tasks.task import Picture

_LINE = 2  # pixels between frames


class VideoClassification(Classification):
    """Tells what happens in a video.

    Clips are [N, C, T, H, W]; several views of each sample, [N, V, C, T, H, W], make one prediction: probabilities are
    averaged over views. Samples with the same "video" are measured as one too, whichever processes they came to.
    """

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Term]:
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
        """The figures of a classification, for whole videos, and beside them the share of views that are right."""
        return [OfVideos(super().metrics(), self._multi_label)]

    def answers(self) -> Metric:
        """What collects the probabilities of each video."""
        return OfVideos([Answers(len(self.classes), self._multi_label)], self._multi_label)

    def picture(self, batch: Batch, predictions: Tensor | None) -> Picture | None:
        """Four frames of each sample, framed by whether the prediction is right."""
        if predictions is None:
            return super().picture(Batch(batch, image=stills(batch["image"])), None)
        return super().picture(*self.glimpse(batch, predictions))

    def glimpse(self, batch: Batch, predictions: Tensor) -> tuple[Batch, Tensor]:
        """Four frames of one view in place of all of all views, and the prediction for the sample."""
        images = batch["image"]
        is_clips = isinstance(images, Tensor) and images.ndim > 4
        return Batch(batch, image=stills(images) if is_clips else images), self._averaged(predictions)

    def _averaged(self, logits: Tensor) -> Tensor:
        """Logits [N, classes] that stand for the mean of the views' probabilities."""
        if logits.ndim == 2:
            return logits
        if self._multi_label:
            return logits.double().sigmoid().mean(1).logit(eps=1e-12).to(logits.dtype)
        return logits.log_softmax(2).logsumexp(1) - math.log(logits.shape[1])


def stills(clips: Tensor) -> Tensor:
    """Four frames of each clip, of the first view if there are several, in one image with a line between them."""
    frames = clips[:, 0] if clips.ndim == 6 else clips
    channels, length, height, width = frames.shape[1:]
    lightest = frames.amax((1, 2, 3, 4)).view(-1, 1, 1, 1)
    page = lightest.repeat(1, channels, 2 * height + _LINE, 2 * width + _LINE)
    for number in range(4):
        top, left = number // 2 * (height + _LINE), number % 2 * (width + _LINE)
        page[:, :, top : top + height, left : left + width] = frames[:, :, length * number // 4]
    return page
