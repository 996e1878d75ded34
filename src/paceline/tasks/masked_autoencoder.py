"""Masked pretraining: patches of images are hidden, and the model fills them in."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.errors import RecipeError
from paceline.core.registry import register
from paceline.data.batch import Batch
from paceline.losses.loss_term import Loss
from paceline.losses.reconstruction import masks_of, patch_size_of, patch_targets
from paceline.metrics.features import FeatureAccuracy
from paceline.metrics.metric import LossMetrics, Metric, MetricOf
from paceline.models.masked_autoencoder import patchify, unpatchify
from paceline.models.model_errors import call_model
from paceline.tasks.task import Task, compare_by
from paceline.visualize.grid import Panel
from paceline.visualize.image import fit, to_image

_IMAGE_SIDE = 128
_EPS = 1e-6


class Reconstruction(NamedTuple):
    """What a masked autoencoder makes of a batch."""

    patches: Tensor
    """The predicted pixels of all patches, [N, L, p·p·C]."""
    features: Tensor
    """The mean of the encoded patches of the whole images, [N, D]."""


@register.task("masked_autoencoder")
class MaskedAutoencoder(Task):
    """Pretrains a masked autoencoder. Where samples have labels, the accuracy of its features is measured too."""

    error_name = "mean squared error of hidden patches"

    def __init__(
        self,
        losses: Mapping[str, Loss],
        weights: Mapping[str, float],
        model: nn.Module,
        classes: Sequence[str] = (),
        extra_metrics: Sequence[Metric] = (),
    ) -> None:
        if not inspect.ismethod(getattr(model, "features", None)):
            raise RecipeError(
                f"model: {type(model).__name__} is no masked autoencoder; use masked_autoencoder, or give your model"
                " forward(images, visible) and features(images), as docs/masked_autoencoder.md describes"
            )
        super().__init__(losses, weights, classes)
        compare_by(hidden_patches, losses.values())
        compare_by(lambda found, batch: hidden_patches(found.patches, batch), extra_metrics)
        self._normalizes = any(getattr(loss, "normalize", False) for loss in losses.values())
        own = LossMetrics(self.loss_functions, self.weights)
        self._metrics = [MetricOf(own, lambda found, batch: (found.patches, batch))]
        self._metrics += [*([FeatureAccuracy(len(classes))] if classes else []), *extra_metrics]

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        masks_of(batch)
        patches: Tensor = call_model(model, batch["image"], batch["visible_patches"])
        return patches

    def predict(self, model: nn.Module, batch: Batch) -> Reconstruction:
        """The reconstruction, and the features of the whole images."""
        features: Tensor = model.features(batch["image"])  # type: ignore[operator]
        return Reconstruction(self.forward(model, batch), features.float())

    def export_outputs(self, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        """The features of the whole images, [N, D]; the decoder is not needed."""
        return {"features": model.features(images)}  # type: ignore[operator]

    def sample_errors(self, predictions: Reconstruction, batch: Batch) -> Tensor:
        """The mean squared error of each sample's hidden patches, [N]."""
        masks = masks_of(batch)
        targets = patch_targets(batch["image"], masks, self._normalizes)
        errors = (predictions.patches.float() - targets.float()).square().mean(2)  # [N, L]
        return (errors * masks).sum(1) / masks.sum(1)

    def draw(self, batch: Batch, predictions: Reconstruction | None, index: int) -> list[Panel]:
        """Draw the masked image, the reconstruction and the original."""
        image, masks = batch["image"][index : index + 1], masks_of(batch)[index : index + 1]
        size = patch_size_of(image, masks)
        grid = (image.shape[-2] // size, image.shape[-1] // size)
        pixels = patchify(image, size)
        gray = pixels.mean().expand_as(pixels)
        masked = torch.where(masks[..., None], gray, pixels)
        drawn = {"masked": masked}
        if predictions is not None:
            filled = predictions.patches[index : index + 1].to(pixels)
            if self._normalizes:
                filled = filled * (pixels.var(2, keepdim=True) + _EPS).sqrt() + pixels.mean(2, keepdim=True)
            drawn["reconstruction"] = torch.where(masks[..., None], filled, pixels)
        images = {name: unpatchify(patches, size, grid)[0] for name, patches in drawn.items()} | {"original": image[0]}
        low, high = image.min(), image.max()
        return [Panel(fit(to_image(each.clamp(low, high)), _IMAGE_SIDE), name) for name, each in images.items()]


def hidden_patches(patches: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """What is predicted for the masked patches, [N, M, p·p·C], and their pixels."""
    masks = masks_of(batch)
    number = masks.shape[1] - batch["visible_patches"].shape[1]
    hidden = masks.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :number, None]
    truth = patch_targets(batch["image"], masks, normalize=False)
    if patches.shape != truth.shape:
        cause = f"random_masking with num_patches: {masks.shape[1]} needs {list(truth.shape)}"
        raise RecipeError(f"model: predicts patches of shape {list(patches.shape)}, but {cause}; change either")
    found = [each.gather(1, hidden.expand(-1, -1, each.shape[2])) for each in (patches, truth)]
    return found[0], found[1]
