"""Video classification: one clip per video in training, several views in evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.core.errors import DataError
from paceline.core.registry import register
from paceline.data.batch import Batch
from paceline.losses.loss_term import LossTerm
from paceline.metrics.classification import SamplePredictions
from paceline.metrics.metric import Metric
from paceline.metrics.video import PerVideo
from paceline.models.model_errors import call_model
from paceline.tasks.classification import Classification, average_logits
from paceline.visualize.grid import tile_frames
from paceline.visualize.image import Image, to_image

_CLIP_SIDE = 160  # pixels of four frames


@register.task("video")
class VideoClassification(Classification):
    """Video classification: probabilities are averaged over the views of a video.

    Clips are [N, C, T, H, W], several views of each sample [N, V, C, T, H, W]. Samples with the same "video" count as
    views of one video too, whichever ranks they are on.
    """

    def losses(self, model: nn.Module, batch: Batch) -> Mapping[str, LossTerm]:
        logits = self.sample_logits(self.predict(model, batch))
        terms = {name: loss(logits, batch) for name, loss in self.loss_functions.items()}
        return {**self.training_terms(logits, batch), **terms}

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits [N, classes], or with several views [N, V, classes]."""
        clips: Tensor = batch["image"]
        if clips.ndim not in (5, 6):
            raise DataError(
                f"video: got images of shape {list(clips.shape)}, expected clips [N, C, T, H, W]; use a video data set"
                " and clip or multi_clip as the first transform"
            )
        views = [clips] if clips.ndim == 5 else list(clips.unbind(1))
        if self._flip and not model.training:
            views += [view.flip(-1) for view in views]
        if len(views) == 1 and clips.ndim == 5:
            logits: Tensor = call_model(model, clips)
            return logits
        # One view of all videos at a time needs no more memory than a single clip.
        return torch.stack([call_model(model, view).float() for view in views], 1)

    def metrics(self) -> Sequence[Metric]:
        return [PerVideo(super().metrics(), self._multi_label)]

    def prediction_metric(self) -> Metric:
        return PerVideo([SamplePredictions(len(self.classes), self._multi_label)], self._multi_label)

    def thumbnail(self, image: Tensor) -> Image:
        """Four frames of a clip [C, T, H, W], of the first view if there are several."""
        return tile_frames(to_image(image[0] if image.ndim == 5 else image), _CLIP_SIDE)

    def sample_logits(self, predictions: Tensor) -> Tensor:
        """Logits [N, classes] of the mean of the views' probabilities."""
        return predictions if predictions.ndim == 2 else average_logits(predictions, self._multi_label)
