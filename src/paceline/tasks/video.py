"""Video classification: one clip of a video in training, several views of it in evaluation."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from paceline.core.errors import DataError
from paceline.data.batch import Batch
from paceline.losses.term import Term
from paceline.tasks.classification import Classification
from paceline.tasks.task import Picture

_LINE = 2  # pixels between frames


class VideoClassification(Classification):
    """Tells what happens in a video.

    Clips are [N, C, T, H, W]; several views of each video, [N, V, C, T, H, W], make one prediction: probabilities are
    averaged over views. All views of a video are one sample, so a video counts once on any number of processes.
    """

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Term]:
        """Each loss of the prediction for each video."""
        logits = self.predict(model, batch)
        return {name: loss(logits, batch) for name, loss in self.loss_functions.items()}

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits [N, classes]; of several views, those that stand for the mean of the views' probabilities."""
        clips: Tensor = batch["image"]
        if clips.ndim not in (5, 6):
            raise DataError(
                f"video: got images of shape {list(clips.shape)}, expected clips [N, C, T, H, W]; use a data set of"
                " videos and a first transform clip or multi_clip"
            )
        if clips.ndim == 5:
            logits: Tensor = model(clips)
            return logits
        # One view of all videos at a time, so that memory is that of evaluation with a single clip.
        asked = torch.stack([model(view).float() for view in clips.unbind(1)], 1)  # [N, V, classes]
        return self._averaged(asked)

    def picture(self, batch: Batch, predictions: Tensor | None) -> Picture | None:
        """The first videos, four frames of each, framed by whether the prediction is right."""
        return super().picture(Batch(batch, image=stills(batch["image"])), predictions)

    def _averaged(self, logits: Tensor) -> Tensor:
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
