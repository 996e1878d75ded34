import inspect

import pytest
from pydantic import ValidationError

from paceline.core.registry import register
from paceline.data.datasets import catalogue_objects

ROOT = {"root": "data"}


@pytest.mark.parametrize("name", ["voc", "coco", "joints"])
def test_arguments_are_those_of_the_data_set(name: str) -> None:
    entry = register.kind("dataset").find(name)
    assert entry is not None
    taken = inspect.signature(entry.resolve()).parameters
    assert set(taken) == set(entry.arguments.model_fields)
    for key, field in entry.arguments.model_fields.items():
        assert field.is_required() == (taken[key].default is inspect.Parameter.empty)
        assert field.is_required() or field.default == taken[key].default


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValidationError, match="Input should be 'stop', 'drop' or 'clip'"):
        catalogue_objects.VocArguments.model_validate(ROOT | {"bad_boxes": "ignore"})
    with pytest.raises(ValidationError, match="classes"):
        catalogue_objects.VocArguments.model_validate(ROOT | {"classes": ["a", "b", "a"]})
    with pytest.raises(ValidationError, match=r"one of split_shares \(train, val\), got None"):
        catalogue_objects.JointsArguments.model_validate(ROOT | {"split_shares": {"train": 0.5, "val": 0.5}})
    with pytest.raises(ValidationError, match="split needs split_shares"):
        catalogue_objects.CocoArguments.model_validate(ROOT | {"annotations": "a.json", "split": "train"})
    with pytest.raises(ValidationError, match="at most 2 items"):
        catalogue_objects.JointsArguments.model_validate(ROOT | {"pairs": [[1, 2, 3]]})
