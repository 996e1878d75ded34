import pytest
from pydantic import ValidationError
from support.registered import arguments_of, entry_of


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("multi_scale", {"sizes": []}),
        ("multi_scale", {"sizes": [224, [256]]}),
        ("multi_scale", {"sizes": [0]}),
        ("mixup", {"alpha": 0.0}),
        ("mixup", {"num_classes": 10}),  # is known from the data
        ("mixup_or_cutmix", {"cutmix_p": 1.1}),
        ("color_jitter", {"hue": 0.6}),
        ("color_jitter", {"brightness": -0.1}),
        ("random_photometric_distort", {"contrast": [1.5, 0.5]}),
        ("random_photometric_distort", {"hue": [-0.6, 0.0]}),
        ("rand_augment", {"magnitude": 31.0}),
        ("rand_augment", {"num_ops": 0}),
        ("random_zoom_out", {"fill": 256}),
    ],
)
def test_wrong_arguments_are_refused(name: str, values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        arguments_of("transform", name)(**values)


@pytest.mark.parametrize(
    ("name", "is_batch"),
    [("random_zoom_out", False), ("rand_augment", False), ("random_horizontal_flip", True), ("mixup", True)],
)
def test_kinds_are_distinguished_by_the_class(name: str, is_batch: bool) -> None:
    assert getattr(entry_of("transform", name).resolve(), "is_batch", False) is is_batch
