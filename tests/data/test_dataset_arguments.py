import pytest
from pydantic import ValidationError
from support.registered import arguments_of

ROOT = {"root": "data"}


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValidationError, match="Input should be 'stop', 'drop' or 'clip'"):
        arguments_of("dataset", "voc").model_validate(ROOT | {"bad_boxes": "ignore"})
    with pytest.raises(ValidationError, match="classes"):
        arguments_of("dataset", "voc").model_validate(ROOT | {"classes": ["a", "b", "a"]})
    with pytest.raises(ValidationError, match=r"one of split_shares \(train, val\), got None"):
        arguments_of("dataset", "keypoints").model_validate(ROOT | {"split_shares": {"train": 0.5, "val": 0.5}})
    with pytest.raises(ValidationError, match="split needs split_shares"):
        arguments_of("dataset", "coco").model_validate(ROOT | {"annotations": "a.json", "split": "train"})
    with pytest.raises(ValidationError, match="at most 2 items"):
        arguments_of("dataset", "keypoints").model_validate(ROOT | {"flip_pairs": [[1, 2, 3]]})
