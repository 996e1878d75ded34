"""The optimizers that recipes may name beside the libraries they come from, and their arguments."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from paceline.core.registry import UnlistedArguments, register
from paceline.optim.optimizers import EXCLUDED

optimizers = register.kind("optimizer")
OWN_DEFAULTS = {("sgd", "momentum"): 0.9, ("muon", "momentum"): 0.95}


def of_torch() -> dict[str, type[torch.optim.Optimizer]]:
    kinds = [getattr(torch.optim, name) for name in torch.optim.__all__]
    return {kind.__name__: kind for kind in kinds if isinstance(kind, type) and kind is not torch.optim.Optimizer}


def checked(name: str, **arguments: Any) -> dict[str, Any]:
    entry = optimizers.find(name)
    assert entry is not None
    return dict(entry.arguments.model_validate_json(json.dumps(arguments)))


def test_everything_of_torch_has_a_name_or_a_reason_not_to() -> None:
    assert [name for name in of_torch() if name.lower() not in optimizers.names() and name not in EXCLUDED] == []


def test_naming_optimizers_imports_neither_torch_nor_timm() -> None:
    code = (
        "import sys; from paceline import register; register.kind('optimizer').find('timm/adopt').arguments;"
        "sys.exit(bool({'torch', 'timm', 'torchvision'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", [name for name in of_torch() if name not in EXCLUDED])
def test_arguments_and_defaults_are_those_of_torch(name: str) -> None:
    own = checked(name.lower())
    taken = inspect.signature(of_torch()[name]).parameters
    for argument, value in own.items():
        default = taken[argument].default
        default = list(default) if isinstance(default, tuple) else default
        assert value == OWN_DEFAULTS.get((name.lower(), argument), default), argument
    hidden = {"params", "lr", "weight_decay", "foreach", "fused", "capturable", "differentiable", "maximize"}
    hidden |= {"decoupled_weight_decay"} if name == "Adam" else set()  # which is adamw
    assert set(own) == set(taken) - hidden


def test_defaults_of_muon_are_those_of_timm() -> None:
    defaults = checked("timm/muon")
    for argument, value in checked("muon").items():
        if argument != "adamw":
            assert value == OWN_DEFAULTS.get(("muon", argument), defaults[argument]), argument


def test_momentum_of_rmsprop_is_a_recipe_value() -> None:
    assert checked("rmsprop")["momentum"] == 0
    assert checked("rmsprop", momentum=0.9)["momentum"] == 0.9


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("sgd", {"beta": 0.9}),
        ("sgd", {"momentum": 1.0}),
        ("adamw", {"betas": [0.9]}),
        ("adamw", {"betas": [0.9, 1.5]}),
        ("adamw", {"fused": True}),
        ("muon", {"adjust_lr_fn": "other"}),
        ("muon", {"ns_steps": 0}),
        ("nadam", {"lr_decay": 0.1}),
        ("nadam", {"decoupled_weight_decay": 1}),
        ("adafactor", {"eps": [None]}),
        ("rprop", {"etas": "0.5, 1.2"}),
        ("timm/adopt", {"decoupled": "yes"}),
        ("timm/adopt", {"clip_exponent": 0.3}),
        ("timm/adan", {"betas": [0.9, 0.99]}),
        ("timm/nmuon", {"ns_steps": 5.5}),
    ],
)
def test_wrong_arguments_are_refused(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        checked(name, **arguments)


def test_right_arguments_are_taken() -> None:
    assert checked("timm/adan", betas=[0.9, 0.8, 0.7])["betas"] == [0.9, 0.8, 0.7]
    assert checked("timm/adopt", clip_exp=None)["clip_exp"] is None
    assert checked("timm/lars", momentum=0.8)["momentum"] == 0.8
    assert checked("adafactor", eps=[None, 0.1])["eps"] == [None, 0.1]
    assert checked("timm/nmuon", ns_coefficients="original")["ns_coefficients"] == "original"


def test_timm_defaults_are_those_of_its_factory() -> None:
    assert checked("timm/sgd") == {"momentum": 0.9, "dampening": 0, "nesterov": True}
    assert checked("timm/larc")["trust_clip"] is True


@pytest.mark.parametrize("name", ["timm/kron", "timm/bnbadam", "timm/none", "timm/", "lbfgs", "adopt"])
def test_unknown_and_unusable_names_are_not_found(name: str) -> None:
    assert optimizers.find(name) is None
    assert name not in optimizers.names()


def test_another_version_of_timm_may_know_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda library: "9.9")
    found = optimizers.find("timm/novel")
    assert found is not None
    assert found.arguments is UnlistedArguments
    assert dict(found.arguments.model_validate_json('{"anything": [1]}')) == {"anything": [1]}
    assert optimizers.find("timm/lamb").arguments is not UnlistedArguments  # type: ignore[union-attr]


def test_averages_have_names() -> None:
    averages = register.kind("averaging")
    assert averages.names() == ["ema", "none", "swa"]
    swa = averages.find("swa")
    assert swa is not None
    assert dict(swa.arguments.model_validate_json('{"start": 500}'))["start"] == 500
    for wrong in ('{"start": 1.5}', '{"start": -1}', '{"every_steps": 0}'):
        with pytest.raises(ValidationError):
            swa.arguments.model_validate_json(wrong)
