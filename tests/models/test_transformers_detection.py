"""Detectors of transformers: predictions, configurations, weights, and what happens without the library."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from small_transformers import NUM_CLASSES, SMALL, library_model, samples, small

from paceline.checkpoint.weights import find_weights
from paceline.cli import main
from paceline.core.errors import ArgumentError, CheckpointError, RecipeError, UsageError, missing_extra
from paceline.models.detr_matching import start_copy
from paceline.models.model_errors import call_model
from paceline.models.surgery import Surgery, load_weights
from paceline.models.transformers_detection import build_transformers_detector, import_transformers
from paceline.recipe.load import load
from paceline.recipe.validate import validate
from paceline.tasks.detection import Detection

needs_library = pytest.mark.skipif(bool(missing_extra("transformers")), reason=missing_extra("transformers"))


@needs_library
@pytest.mark.parametrize("name", SMALL)
def test_detections_are_those_of_the_library(name: str) -> None:
    detector = small(name).eval()
    batch, _ = samples(name, (1, 1))
    library = import_transformers()
    with torch.no_grad():
        output = library_model(detector)(batch)
        found = detector(batch)
    module = "rf_detr" if name == "rf_detr" else "rt_detr"
    processors = importlib.import_module(f"transformers.models.{module}.image_processing_{module}")
    processor = getattr(processors, "RfDetrImageProcessor" if module == "rf_detr" else "RTDetrImageProcessor")
    sizes = torch.tensor([batch.shape[-2:]] * 2)
    expected = processor.post_process_object_detection(None, output, threshold=0.0, target_sizes=sizes)
    assert library is not None
    assert isinstance(found, list)
    for each, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(each.scores, theirs["scores"].float())
        torch.testing.assert_close(each.boxes, theirs["boxes"].float(), rtol=1e-5, atol=1e-4)
        assert torch.equal(each.labels, theirs["labels"])


@needs_library
def test_only_scores_above_a_threshold_are_kept_and_no_more_than_asked() -> None:
    detector = small("rt_detr_v2").eval()
    batch, _ = samples("rt_detr_v2", (1,))
    _, scores = detector.candidates(batch)
    middle = scores.median().item()
    detector._score_thresh, detector._detections_per_img = middle, 5
    (found,) = detector(batch)
    assert len(found.boxes) == min(5, int((scores > middle).sum()))
    assert (found.scores > middle).all()


@needs_library
@pytest.mark.parametrize(("name", "side"), [("rf_detr", 50), ("lw_detr", 40)])
def test_padding_of_a_batch_changes_nothing_where_the_model_takes_a_mask(name: str, side: int) -> None:
    detector = small(name).eval()
    detector._detections_per_img = 3
    image = samples(name, (1,))[0]
    with torch.no_grad():
        boxes, _ = detector.candidates(image[..., :side, :side])  # padded here to the multiple that the model needs
        padded = torch.zeros_like(image)
        padded[..., :side, :side] = image[..., :side, :side]
        told, _ = detector.candidates(padded, [(side, side)])
        whole, _ = detector.candidates(padded)
    torch.testing.assert_close(told, boxes)
    assert not torch.allclose(whole, boxes)


@needs_library
@pytest.mark.parametrize("name", SMALL)
def test_a_step_reads_the_costs_of_matching_from_the_device_and_nothing_else(name: str) -> None:
    """What the rehearsal on fake CUDA devices proves, as a count."""
    detector = small(name)
    batch, given = samples(name, (3, 1))
    with patch("paceline.models.detr_losses.start_copy", wraps=start_copy) as copied:
        detector(batch, given)
    assert copied.call_count == 1


@needs_library
def test_published_weights_come_from_a_folder_and_fit_other_classes(tmp_path: Path) -> None:
    published = library_model(small("rt_detr_v2"))
    published.save_pretrained(tmp_path)
    detector = build_transformers_detector("rt_detr_v2", 5, 3, config=str(tmp_path))
    report = load_weights(detector, find_weights(tmp_path).tensors, Surgery())
    heads = {"class_embed.", "score_head.", "denoising_class_embed."}
    assert {name for name in report.replaced if not any(head in name for head in heads)} == set()
    assert report.missing == []
    own, theirs = detector.detector.state_dict(), published.state_dict()
    replaced = {name.removeprefix("detector.") for name in report.replaced}
    assert all(torch.equal(own[name], theirs[name].float()) for name in own if name not in replaced)
    again = build_transformers_detector("rt_detr_v2", NUM_CLASSES, 3, config=str(tmp_path))
    assert not load_weights(again, find_weights(tmp_path).tensors, Surgery()).replaced


@needs_library
def test_weights_that_are_not_there_or_pickled_are_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    with patch.dict("os.environ", {"HF_HUB_OFFLINE": "1"}), pytest.raises(CheckpointError) as raised:
        find_weights("transformers/nobody/nothing")
    assert "hf download nobody/nothing config.json model.safetensors" in str(raised.value)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rt_detr_v2"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors"):
        find_weights(tmp_path)
    with pytest.raises(ArgumentError) as refused:
        build_transformers_detector("rt_detr_v2", 3, 3, config=str(tmp_path / "empty"))
    assert "hf download" in refused.value.reason
    assert "\n" not in refused.value.reason


@needs_library
@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"args": {"num_querys": 3}}, "args.num_querys"),
        ({"backbone_args": {"depth": 3}}, "backbone_args.depth"),
        ({"args": {"auxiliary_loss": False}}, "args.auxiliary_loss"),
        ({"args": {"d_model": "wide"}}, "args"),
        ({"args": {"num_queries": -1}}, "args.num_queries"),
        ({"args": {"decoder_layers": 0}}, "args"),
    ],
)
def test_wrong_fields_are_named(arguments: dict[str, Any], key: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        build_transformers_detector("d_fine", 3, 3, **arguments)
    assert raised.value.argument == key


@needs_library
def test_more_queries_than_positions_name_the_field_to_lower() -> None:
    with pytest.raises(RecipeError, match=r"^model: cannot take 1 image of 64×64 .*lower model\.args\.num_queries"):
        call_model(small("rf_detr", num_queries=300).eval(), torch.zeros(1, 3, 64, 64))


@needs_library
def test_lw_detr_is_shown_by_its_name_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("extends: rtdetr_sample\nmodel: {name: transformers/lw_detr}\n", encoding="utf-8")
    assert main(["show", str(recipe), "--json"]) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["model"]["flops_per_sample"] > 10**8


@needs_library
def test_a_damaged_configuration_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{\n"model_type": ', encoding="utf-8")
    with pytest.raises(ArgumentError, match=r"config\.json:2 is damaged: "):
        build_transformers_detector("rt_detr_v2", 3, 3, config=str(tmp_path))


@needs_library
def test_detections_that_are_not_merged_are_not_merged_with_a_mirror_image() -> None:
    with pytest.raises(ArgumentError, match=r"non-maximum suppression, .*leave out task\.flip") as raised:
        Detection(small("rf_detr"), ["a", "b", "c"], flip=True)
    assert raised.value.argument == "flip"


def test_names_are_checked_without_the_library() -> None:
    program = (
        "import sys; sys.modules['transformers'] = None\n"
        "from paceline.recipe.load import load; from paceline.recipe.validate import validate\n"
        "validate(load('rtdetr_sample', []))\n"
        "try: validate(load('rtdetr_sample', ['model.name=transformers/rt_detr_v3']))\n"
        "except Exception as error: print(error)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "transformers/rt_detr_v2" in done.stdout
    assert done.stdout.endswith("False\n")


def test_without_the_extra_the_command_that_installs_it_is_named() -> None:
    with patch("paceline.core.errors._is_installed", return_value=False), pytest.raises(UsageError) as raised:
        build_transformers_detector("rt_detr_v2", 3, 3)
    assert "pip install 'paceline[transformers]'" in str(raised.value)


def test_an_unknown_argument_is_refused_when_the_recipe_is_checked() -> None:
    with pytest.raises(RecipeError, match="nms_thresh"):
        validate(load("rtdetr_sample", ["model.nms_thresh=0.5"]))
