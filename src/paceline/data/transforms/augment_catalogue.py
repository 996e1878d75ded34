"""The transforms that recipes can name beside those of geometry: colours, mixtures, and those of whole batches."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from paceline.core.arguments import Arguments, Count, NonNegative, Positive, Share
from paceline.core.registry import register
from paceline.data.argument_types import Fill, PixelValue, PositiveRange, ShareRange, Size

transforms = register.kind("transform")

Side = Annotated[int, Field(ge=2)]
Alpha = Annotated[float, Field(gt=0, le=100)]


class FlipArguments(Arguments):
    """Arguments of `flip`."""

    chance: Share = 0.5


class RandomCropArguments(Arguments):
    """Arguments of `random_crop`."""

    padding: Count
    mask_fill: PixelValue = 0


class RandomErasingArguments(Arguments):
    """Arguments of `random_erasing`."""

    chance: Share
    area: ShareRange = [0.02, 0.33]
    aspect: PositiveRange = [0.3, 3.3]
    value: float = 0.0


class NormalizeArguments(Arguments):
    """Arguments of `normalize`."""

    mean: Annotated[list[float], Field(min_length=1)]
    std: Annotated[list[Positive], Field(min_length=1)]

    @model_validator(mode="after")
    def _one_std_for_each_mean(self) -> Self:
        if len(self.mean) != len(self.std):
            raise ValueError(f"one std for each mean, got {len(self.mean)} means and {len(self.std)} stds")
        return self


class MultiScaleArguments(Arguments):
    """Arguments of `multi_scale`."""

    sizes: Annotated[list[Size], Field(min_length=1)]


class MixupArguments(Arguments):
    """Arguments of `mixup`."""

    alpha: Alpha = 0.2
    chance: Share = 1.0


class CutmixArguments(Arguments):
    """Arguments of `cutmix`."""

    alpha: Alpha = 1.0
    chance: Share = 1.0


class MixupOrCutmixArguments(Arguments):
    """Arguments of `mixup_or_cutmix`."""

    mixup_alpha: Alpha = 0.8
    cutmix_alpha: Alpha = 1.0
    cutmix_chance: Share = 0.5
    chance: Share = 1.0


class ColorJitterArguments(Arguments):
    """Arguments of `color_jitter`."""

    brightness: NonNegative = 0.0
    contrast: NonNegative = 0.0
    saturation: NonNegative = 0.0
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    chance: Share = 1.0


class PhotometricDistortionArguments(Arguments):
    """Arguments of `photometric_distortion`."""

    brightness: Annotated[float, Field(ge=0, le=255)] = 32.0
    contrast: PositiveRange = [0.5, 1.5]
    saturation: PositiveRange = [0.5, 1.5]
    hue: Annotated[float, Field(ge=0, le=180)] = 18.0
    chance: Share = 0.5


class GrayscaleArguments(Arguments):
    """Arguments of `grayscale`."""

    chance: Share = 0.1


class GaussianBlurArguments(Arguments):
    """Arguments of `gaussian_blur`."""

    sigma: PositiveRange = [0.1, 2.0]
    chance: Share = 0.5


class SolarizeArguments(Arguments):
    """Arguments of `solarize`."""

    threshold: Annotated[float, Field(ge=0, le=255)] = 128.0
    chance: Share = 0.2


class RandAugmentArguments(Arguments):
    """Arguments of `rand_augment`."""

    number: Count = 2
    magnitude: Annotated[float, Field(ge=0, le=30)] = 9.0
    fill: Fill = 0
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1


class MosaicArguments(Arguments):
    """Arguments of `mosaic`."""

    size: Side | Annotated[list[Side], Field(min_length=2, max_length=2)]
    chance: Share = 1.0
    fill: Fill = 114
    mask_fill: PixelValue = 0
    min_visible: Share = 0.1


_HERE = "paceline.data.transforms."
SAMPLE_TRANSFORMS: list[tuple[str, str, type[Arguments], str]] = [
    ("mosaic", "mosaic:Mosaic", MosaicArguments, "four samples as one, around a random point"),
    ("color_jitter", "colour:ColorJitter", ColorJitterArguments, "brightness, contrast, saturation and hue"),
    (
        "photometric_distortion",
        "colour:PhotometricDistortion",
        PhotometricDistortionArguments,
        "the changes of colour that SSD is trained with",
    ),
    ("grayscale", "colour:Grayscale", GrayscaleArguments, "take the colours away, by chance"),
    ("gaussian_blur", "colour:GaussianBlur", GaussianBlurArguments, "smooth, by chance"),
    ("solarize", "colour:Solarize", SolarizeArguments, "invert bright pixels, by chance"),
    ("rand_augment", "rand_augment:RandAugment", RandAugmentArguments, "a few of fourteen changes, of one strength"),
]
BATCH_TRANSFORMS: list[tuple[str, str, type[Arguments], str]] = [
    ("flip", "batch_transforms:Flip", FlipArguments, "mirror left and right, by chance"),
    ("random_crop", "batch_transforms:RandomCrop", RandomCropArguments, "pad with zeros and cut out again at random"),
    (
        "random_erasing",
        "batch_transforms:RandomErasing",
        RandomErasingArguments,
        "paint over a random rectangle, by chance",
    ),
    ("normalize", "batch_transforms:Normalize", NormalizeArguments, "(pixel / 255 − mean) / std, by channel"),
    ("multi_scale", "multi_scale:MultiScale", MultiScaleArguments, "another size at every step"),
    ("mixup", "mixing:Mixup", MixupArguments, "blend each image and label with another's"),
    ("cutmix", "mixing:Cutmix", CutmixArguments, "paint a part of another image over each"),
    ("mixup_or_cutmix", "mixing:MixupOrCutmix", MixupOrCutmixArguments, "the one or the other for each sample"),
]
for _name, _target, _arguments, _summary in [*SAMPLE_TRANSFORMS, *BATCH_TRANSFORMS]:
    transforms.add(_name, _HERE + _target, _arguments, _summary)
