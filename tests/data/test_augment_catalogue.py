import pytest
from pydantic import ValidationError

import paceline.data.transforms.augment_catalogue as catalogue
from paceline.core.arguments import Arguments
from paceline.core.registry import register


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (catalogue.MultiScaleArguments, {"sizes": []}),
        (catalogue.MultiScaleArguments, {"sizes": [224, [256]]}),
        (catalogue.MultiScaleArguments, {"sizes": [0]}),
        (catalogue.MixupArguments, {"alpha": 0.0}),
        (catalogue.MixupArguments, {"num_classes": 10}),  # is known from the data
        (catalogue.MixupOrCutmixArguments, {"cutmix_chance": 1.1}),
        (catalogue.ColorJitterArguments, {"hue": 0.6}),
        (catalogue.ColorJitterArguments, {"brightness": -0.1}),
        (catalogue.PhotometricDistortionArguments, {"contrast": [1.5, 0.5]}),
        (catalogue.GaussianBlurArguments, {"sigma": [0.0, 1.0]}),
        (catalogue.SolarizeArguments, {"threshold": 300.0}),
        (catalogue.RandAugmentArguments, {"magnitude": 31.0}),
        (catalogue.RandAugmentArguments, {"number": 0}),
        (catalogue.MosaicArguments, {"size": 1}),
        (catalogue.MosaicArguments, {"size": 8, "fill": 256}),
    ],
)
def test_wrong_arguments_are_refused(arguments: type[Arguments], values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        arguments(**values)


def test_kinds_are_told_apart_by_the_class() -> None:
    for names, is_batch in ((catalogue.SAMPLE_TRANSFORMS, False), (catalogue.BATCH_TRANSFORMS, True)):
        for name, *_ in names:
            entry = register.kind("transform").find(name)
            assert entry is not None
            assert entry.resolve().is_batch is is_batch  # type: ignore[attr-defined]
