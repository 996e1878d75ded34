"""Your model, data set, loss and metric of masked pretraining. Edit what is marked with ←."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from paceline import register
from paceline.models.masked_autoencoder import patchify


@register.model("my_model")
class MyModel(nn.Module):  # ← your model
    """Fills in masked patches: an encoder sees the visible ones, a decoder predicts the pixels of all."""

    def __init__(self, in_channels: int, patch_size: int = 8, num_patches: int = 64, width: int = 32) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.embed = nn.Linear(in_channels * patch_size**2, width)
        self.position = nn.Parameter(torch.randn(1, num_patches, width) * 0.02)
        self.mask_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.encoder = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0, batch_first=True, norm_first=True)
        self.predict = nn.Linear(width, in_channels * patch_size**2)

    def forward(self, images: Tensor, visible: Tensor) -> Tensor:
        """The pixels of all patches, [N, L, p·p·C]; `visible` [N, V] are the numbers of the patches to look at."""
        tokens = self.embed(patchify(images, self.patch_size)) + self.position  # [N, L, D]
        places = visible[..., None].expand(-1, -1, tokens.shape[2])
        encoded = self.encoder(tokens.gather(1, places))
        whole = (self.mask_token + self.position).expand_as(tokens).scatter(1, places, encoded)
        pixels: Tensor = self.predict(self.decoder(whole))
        return pixels

    def features(self, images: Tensor) -> Tensor:
        """What the encoder makes of whole images, [N, D]."""
        tokens = self.embed(patchify(images, self.patch_size)) + self.position
        encoded: Tensor = self.encoder(tokens)
        return encoded.mean(1)


@register.model("my_classifier")
class MyClassifier(nn.Module):  # ← what is finetuned: the encoder with a new head
    """Logits [N, num_classes] of images."""

    def __init__(self, num_classes: int, in_channels: int, width: int = 32) -> None:
        super().__init__()
        self.body = MyModel(in_channels, width=width)
        del self.body.decoder, self.body.predict, self.body.mask_token
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.head(self.body.features(images))
        return logits


@register.layer_map("my_layers")
def my_layers(model: nn.Module) -> Callable[[str], int | None]:  # ← your layer ids
    """From a parameter's name to its layer, 0 at the input, None for the head, for the rates of finetune.yaml."""
    layers = {"embed": 0, "position": 0, "encoder": 1}
    return lambda name: layers.get(name.split(".")[1])


@register.dataset("my_dataset")
class MyDataset(Dataset[Image.Image]):  # ← your data set
    """The images root/**/*, without labels; every fourth is for val."""

    def __init__(self, root: Path, split: str) -> None:
        files = [file for file in sorted(root.rglob("*")) if file.suffix.lower() in (".jpg", ".jpeg", ".png")]
        self.files = [file for index, file in enumerate(files) if (index % 4 == 3) == (split == "val")]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Image.Image:
        return Image.open(self.files[index])


@register.loss("my_loss")
def my_loss(output: Tensor, target: Tensor) -> Tensor:  # ← your loss
    """One number, from what is predicted for the masked patches, [N, M, p·p·C], and their pixels."""
    return F.mse_loss(output, target)


@register.metric("my_metric")
class MyMetric:  # ← your metric
    """The mean absolute error of the pixels of masked patches, as they are after `normalize`."""

    higher_is_better = False
    sums = ("error", "count")  # what `update` adds up; these start at 0

    def __init__(self) -> None:
        self.error, self.count = 0.0, 0

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: preds and target [N, M, p·p·C]."""
        self.error += float((preds - target).abs().double().sum())
        self.count += target.numel()

    def compute(self) -> float:
        """The value over all that was added."""
        return self.error / self.count
