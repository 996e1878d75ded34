"""Every recipe that ships is valid, and the default one reaches what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.forkserver import paceline

from paceline.core.torchvision_ops import import_torchvision
from paceline.models.surgery import Surgery, load_weights
from paceline.recipe.build_context import resolve
from paceline.recipe.load import load, shipped_recipes
from paceline.recipe.schema import Weights
from paceline.recipe.validate import validate


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_recipe_validates(name: str) -> None:
    checked = validate(load(name))
    assert checked.recipe.name == name
    assert shipped_recipes()[name].read_text(encoding="utf-8").startswith("# "), "the first line says what it is"


def test_every_file_under_recipes_ships() -> None:
    folder = Path(next(iter(shipped_recipes().values()))).parent.parent
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sorted(files) == sorted(shipped_recipes().values())


def test_quickstart_is_on_its_way_to_what_it_expects(tmp_path: Path) -> None:
    """A third of it, with a narrower net; `make train` does all of it."""
    done = paceline(tmp_path, "train", "quickstart", "train.epochs=3", "model.widths=[16, 32, 64]")
    assert done.returncode == 0, done.stderr
    status = json.loads((tmp_path / "runs/quickstart/status.json").read_text())
    assert status["state"] == "finished"
    records = [json.loads(line) for line in (tmp_path / "runs/quickstart/metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["split"] == "val"][-1]
    assert last["top1"] >= validate(load("quickstart")).recipe.expect["top1"] - 0.07
    assert last["num_samples"] == 2000


_PUBLISHED = ["minet_light", "minet_vgg16", "fcn_resnet50", "lraspp_mobilenet_v3"]


@pytest.mark.parametrize("name", _PUBLISHED)
def test_published_weights_have_the_names_that_a_recipe_says(name: str) -> None:
    """A library's model with fresh weights stands for the file, which is not available here."""
    part = validate(load(name)).recipe.model
    assert isinstance(part.weights, Weights)
    library, _, member = part.weights.file.partition(".")[0].partition("/")
    assert library == "torchvision"
    source = import_torchvision().models.get_model(member, weights=None)
    model = resolve("model", part.name)(num_classes=3, in_channels=3, **(part.model_extra or {}))
    options = part.weights.model_dump(exclude={"file", "key"}) | {
        "rename": [tuple(each) for each in part.weights.rename]
    }
    fitted = load_weights(model, source.state_dict(), Surgery(**options))
    backbone = {each: tensor for each, tensor in model.state_dict().items() if each.startswith("backbone.")}
    assert set(fitted.loaded) == set(backbone)
    # In the order of layers, whatever they are called.
    body = [tensor for each, tensor in source.state_dict().items() if not each.startswith(("fc.", "classifier."))]
    assert all(torch.equal(*pair) for pair in zip(body, backbone.values(), strict=True))


@pytest.mark.real_data
@pytest.mark.parametrize("name", ["fashion", "hymenoptera", "ecssd", "camvid", "fights"])
def test_recipes_for_real_data_pass_their_check(name: str, real_data: Path, tmp_path: Path) -> None:
    done = paceline(tmp_path, "check", name, PACELINE_DATA=str(real_data))
    assert done.returncode == 0, done.stderr
    assert "all good" in done.stdout
