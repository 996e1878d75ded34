"""What pydantic says, in our words and at the right place of the tree."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.core.arguments import Arguments, Count, NonNegative, PartialShare, Positive, Share
from paceline.core.registry import TABLE
from paceline.recipe.problems import PATTERNS, Problem, expected_names, near, problems_of, unknown_key, unknown_name
from paceline.recipe.schema import Recipe


def _odd(number: int) -> int:
    if number % 2 == 0:
        raise ValueError(f"expected an odd number, got {number}")
    return number


class Inner(Arguments):
    size: Count
    mode: Literal["fast", "slow"] = "fast"


class Named(Arguments):
    model_config = ConfigDict(extra="allow")
    name: str


class Model(Arguments):
    count: Count = 1
    lr: Positive = 1.0
    decay: NonNegative = 0.0
    share: Share = 0.0
    partial: PartialShare = 0.0
    auto: Count | Literal["auto"] = "auto"
    maybe: Positive | None = None
    flag: bool = False
    text: str = ""
    word: Annotated[str, Field(pattern="^a+$")] = "a"
    filled: Annotated[str, Field(min_length=1)] = "a"
    pair: tuple[int, int] = (0, 0)
    names: Annotated[list[str], Field(min_length=1, max_length=3)] = ["a"]
    inner: Inner | None = None
    inners: list[Inner] = []
    either: Inner | str = ""
    named: Named | None = None
    size: Count | Annotated[list[Count], Field(min_length=2, max_length=2)] = 1
    free: dict[str, bool | int | float | str | list[int] | None] = {}
    odd: Annotated[int, AfterValidator(_odd)] = 1

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.count > 100 and self.flag:
            raise ValueError("count and flag do not go together")
        return self


def problems(tree: Any, model: type[BaseModel] = Model, **options: Any) -> list[Problem]:
    with pytest.raises(ValidationError) as refusal:
        model.model_validate_json(json.dumps(tree))
    return problems_of(refusal.value, model, tree, **options)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("count", 0, "expected a whole number ≥ 1, got 0"),
        ("count", 2.5, "expected a whole number ≥ 1, got 2.5"),
        ("count", 2.0, "expected a whole number ≥ 1, got 2.0; write 2"),
        ("count", True, "expected a whole number ≥ 1, got true"),
        ("count", "3", 'expected a whole number ≥ 1, got "3"; remove the quotes'),
        ("count", None, "expected a whole number ≥ 1, got null"),
        ("count", [1], "expected a whole number ≥ 1, got [1]"),
        ("lr", "fast", 'expected a number > 0, got "fast"'),
        ("lr", 0, "expected a number > 0, got 0"),
        ("lr", float("nan"), "expected a finite number, got nan"),
        ("lr", float("inf"), "expected a finite number, got inf"),
        ("decay", -1, "expected a number ≥ 0, got -1"),
        ("share", 1.5, "expected a number from 0 to 1, got 1.5"),
        ("partial", 1, "expected a number ≥ 0 and < 1, got 1"),
        ("auto", "fast", 'expected a whole number ≥ 1 or auto, got "fast"'),
        ("auto", 0, "expected a whole number ≥ 1 or auto, got 0"),
        ("auto", "atuo", 'expected a whole number ≥ 1 or auto, got "atuo"; did you mean "auto"?'),
        ("maybe", -1, "expected a number > 0 or null, got -1"),
        ("flag", "yes", 'expected true or false, got "yes"'),
        ("flag", 1, "expected true or false, got 1"),
        ("text", 5, "expected a string, got 5; quote it"),
        ("text", True, "expected a string, got true; quote it"),
        ("text", ["x"], 'expected a string, got ["x"]'),
        ("word", "b", 'expected a string of another form, got "b"'),
        ("filled", "", 'expected a non-empty string, got ""'),
        ("pair", [1], "expected a list of 2 items, got [1]"),
        ("pair", [1, 2, 3], "expected a list of 2 items, got [1, 2, 3]"),
        ("pair", 1, "expected a list of 2 items, got 1"),
        ("names", [], "expected a list of at least 1 item and at most 3 items, got []"),
        ("names", "x", 'expected a list of at least 1 item and at most 3 items, got "x"; write ["x"]'),
        ("inner", 5, "expected a mapping or null, got 5"),
        ("inners", {"size": 1}, 'expected a list, got {"size": 1}'),
        ("either", 5, "expected a mapping or a string, got 5; quote it"),
        ("named", 5, "expected a name, a mapping or null, got 5"),
        ("size", "x", 'expected a whole number ≥ 1 or a list of 2 items, got "x"'),
        ("size", [1, 2, 3], "expected a whole number ≥ 1 or a list of 2 items, got [1, 2, 3]"),
        ("odd", 4, "expected an odd number, got 4"),
    ],
)
def test_values(key: str, value: Any, message: str) -> None:
    assert problems({key: value}) == [Problem((key,), message)]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"inner": {}}, Problem(("inner", "size"), "required, but missing", "absence")),
        (
            {"inner": {"size": 1, "mode": "fats"}},
            Problem(("inner", "mode"), 'expected one of fast, slow, got "fats"; did you mean "fast"?'),
        ),
        ({"inners": [{"size": 1}, {"size": 0}]}, Problem(("inners", 1, "size"), "expected a whole number ≥ 1, got 0")),
        ({"either": {"size": 0}}, Problem(("either", "size"), "expected a whole number ≥ 1, got 0")),
        ({"either": {}}, Problem(("either", "size"), "required, but missing", "absence")),
        ({"size": [1, 0]}, Problem(("size", 1), "expected a whole number ≥ 1, got 0")),
        ({"pair": [1, "x"]}, Problem(("pair", 1), 'expected a whole number, got "x"')),
        ({"free": {"a": [1, "x"]}}, Problem(("free", "a", 1), 'expected a whole number, got "x"')),
        (
            {"free": {"a": {}}},
            Problem(("free", "a"), "expected true, false, a number, a string, a list or null, got {}"),
        ),
        ({"names": ["a", 3]}, Problem(("names", 1), "expected a string, got 3; quote it")),
        ({"coutn": 1}, Problem(("coutn",), 'unknown key; did you mean "count"?', "key")),
        (
            {"inner": {"size": 1, "x": 2}},
            Problem(("inner", "x"), "unknown key; known here: size, mode", "key"),
        ),
        (
            {"either": {"size": 1, "sise": 2}},
            Problem(("either", "sise"), 'unknown key; did you mean "size"?', "key"),
        ),
        ({"mode": "fast"}, Problem(("mode",), 'unknown key; did you mean "inner.mode"?', "key")),
        ({"count": 101, "flag": True}, Problem((), "count and flag do not go together")),
    ],
)
def test_places(tree: Any, expected: Problem) -> None:
    assert problems(tree) == [expected]


def test_all_problems_at_once_in_the_order_of_the_schema() -> None:
    found = problems({"lr": "x", "zzz": 1, "count": 0, "inner": {}})
    assert [problem.path for problem in found] == [("count",), ("lr",), ("inner", "size"), ("zzz",)]


def test_keys_of_the_section_around_are_known_too() -> None:
    (problem,) = problems({"size": 1, "wieght": 1}, Inner, also_known=["name", "weight"])
    assert problem.message == 'unknown key; did you mean "weight"?'
    (problem,) = problems({"size": 1, "zzz": 1}, Inner, also_known=["name"])
    assert problem.message == "unknown key; known here: name, size, mode"


class Device:
    """A type that JSON does not know."""


class Own(Arguments):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    device: Device = Device()
    size: Count = 1


def test_types_of_the_users_own_do_not_stand_in_the_way() -> None:
    assert problems({"size": 0, "device": "x"}, Own) == [
        Problem(("device",), "cannot be given in a recipe: it takes a Python object"),
        Problem(("size",), "expected a whole number ≥ 1, got 0"),
    ]


def test_unknown_names() -> None:
    assert unknown_name("loss", "bec", ["cross_entropy", "bce"]) == 'unknown loss "bec"; did you mean "bce"?'
    assert unknown_name("loss", "x", ["cross_entropy", "bce"]) == 'unknown loss "x"; expected one of cross_entropy, bce'
    assert unknown_name("task", "x", ["classification"]) == 'unknown task "x"; expected classification'
    assert unknown_name("loss", "x", []) == 'unknown loss "x"'
    assert unknown_name("loss", "x", [f"long{n}" for n in range(21)]).endswith("long18, long19 and 1 more")


def test_metrics_are_known_by_what_others_call_them() -> None:
    assert unknown_name("metric", "accuracy", ["top1", "auroc"]).endswith('did you mean "top1"?')
    assert unknown_name("metric", "mAP", ["ap", "ap50"]).endswith('did you mean "ap"?')
    assert '"top1"' not in unknown_name("metric", "accuracy", ["miou", "auroc"])


@pytest.mark.parametrize("name", ["binary_cross_entropy", "binary_cross_entropy_with_logits"])
def test_losses_are_known_by_what_torch_calls_them(name: str) -> None:
    assert unknown_name("loss", name, ["bce", "cel", "cross_entropy"]).endswith('did you mean "bce"?')


def test_unknown_keys() -> None:
    assert unknown_key("epoch", ["epochs", "steps"]) == 'unknown key; did you mean "epochs"?'
    assert unknown_key("x", ["epochs", "steps"]) == "unknown key; known here: epochs, steps"
    assert unknown_key("x", [f"long{n}" for n in range(21)]).endswith("long18, long19 and 1 more")
    assert unknown_key("lr", ["epochs"], ["optimizer.lr"]) == 'unknown key; did you mean "optimizer.lr"?'


def test_names_to_choose_from() -> None:
    assert expected_names(["a"]) == "a"
    assert expected_names(["a", "b"]) == "one of a, b"
    assert expected_names([]) == "a name"
    assert expected_names([str(n) for n in range(21)]).endswith("18, 19 and 1 more")


def test_what_people_shorten_a_name_to_is_found_before_what_is_spelled_alike() -> None:
    losses = ["bce", "cel", "cross_entropy", "dice_loss"]
    assert near("ce", losses) == near("CE", losses) == ["cross_entropy"]
    assert near("bec", losses) == ["bce"]
    assert near("rrc", ["random_crop", "random_resized_crop"]) == ["random_resized_crop"]
    assert near("c", losses) == []


def test_words_of_other_libraries_lead_to_ours() -> None:
    assert '"weights"' in unknown_key("pretrained", ["name", "num_classes", "weights", "freeze"])
    assert '"lr"' in unknown_key("learning_rate", ["name", "lr", "weight_decay"])


def test_every_pattern_has_words() -> None:
    found: set[str] = set()

    def collect(node: Any) -> None:
        if isinstance(node, dict):
            found.update([node["pattern"]] if isinstance(node.get("pattern"), str) else [])
        for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            collect(each)

    collect(Recipe.model_json_schema())
    collect(json.loads(TABLE.read_text(encoding="utf-8")))
    assert len(found) >= 4
    assert found <= set(PATTERNS)
