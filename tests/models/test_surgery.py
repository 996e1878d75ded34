"""Weights go into a model whole, or not at all; what may differ is declared, and shown."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.core.errors import CheckpointError
from paceline.core.torchvision_ops import import_torchvision
from paceline.models.freezing import Freezing
from paceline.models.surgery import Surgery, SurgeryReport, add_head_batch_norm, find_heads, load_weights
from paceline.models.zoo import build_timm, build_torchvision


def fit(model: nn.Module, weights: dict[str, Tensor]) -> SurgeryReport:
    """Load weights with the default surgery: a new head, other channels, another image size."""
    return load_weights(model, weights, Surgery())


class MobileLike(nn.Module):
    """Named as the torchvision network is: features.*, then a dropout and a linear classifier."""

    def __init__(self, num_classes: int, width: int = 8) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU6()),
            nn.Sequential(nn.Conv2d(4, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU6()),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(width, num_classes))


class TimmLike(MobileLike):
    """Says itself which module classifies, and has a linear layer after it."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.projection = nn.Linear(4, 4)

    def get_classifier(self) -> nn.Module:
        return self.classifier[1]


class Distilled(TimmLike):
    """Has two classifiers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.distilled = nn.Linear(8, num_classes)

    def get_classifier(self) -> Any:
        return self.classifier[1], self.distilled


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, 7) for name, tensor in model.state_dict().items()}


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_matching_weights_are_loaded_all() -> None:
    model = MobileLike(10)
    weights = weights_of(MobileLike(10))
    fitted = fit(model, weights)
    assert all(tensor.equal(weights[name]) for name, tensor in model.state_dict().items())
    assert sorted(fitted.loaded) == sorted(weights)
    assert (fitted.missing, fitted.unexpected, fitted.excluded) == ([], [], [])
    assert (fitted.reshaped, fitted.replaced) == ({}, {})
    assert fitted.summary() == ["loaded        14 tensors"]


@pytest.mark.parametrize("kind", [MobileLike, TimmLike])
def test_a_head_for_other_classes_stays_fresh(kind: type[MobileLike]) -> None:
    model = kind(10)
    before = copied(model)
    fitted = fit(model, weights_of(kind(1000)))
    assert fitted.replaced == {
        "classifier.1.weight": ((1000, 8), (10, 8)),
        "classifier.1.bias": ((1000,), (10,)),
    }
    for name, tensor in model.state_dict().items():
        expected = before[name] if name in fitted.replaced else torch.full_like(tensor, 7)
        assert tensor.equal(expected), name
    assert fitted.summary()[1] == (
        "replaced       2 tensors  classifier.1.weight [1000, 8] → [10, 8], classifier.1.bias [1000] → [10]"
    )


def test_a_head_is_taken_over_whole_or_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    weights = weights_of(model)
    weights["1.weight"] = torch.zeros(3, 9)
    before = copied(model)
    fitted = fit(model, weights)
    # The bias would fit, but it belongs to the weight that does not.
    assert list(fitted.replaced) == ["1.weight", "1.bias"]
    assert model.state_dict()["1.bias"].equal(before["1.bias"])
    assert fitted.loaded == ["0.weight", "0.bias"]


def test_two_heads_are_replaced_together() -> None:
    fitted = fit(Distilled(10), weights_of(Distilled(1000)))
    assert {name.rpartition(".")[0] for name in fitted.replaced} == {"classifier.1", "distilled"}


def test_a_file_without_a_head_and_a_model_without_one() -> None:
    weights = {n: t for n, t in weights_of(MobileLike(10)).items() if not n.startswith("classifier")}
    fitted = fit(MobileLike(10), weights)
    assert fitted.missing == ["classifier.1.weight", "classifier.1.bias"]
    assert fitted.summary()[1] == "missing        2 tensors  classifier.1.weight, classifier.1.bias"

    headless = TimmLike(10)
    headless.classifier[1] = nn.Identity()
    assert fit(headless, weights_of(TimmLike(10))).unexpected == ["classifier.1.weight", "classifier.1.bias"]


def test_half_a_head_is_an_error() -> None:
    weights = weights_of(MobileLike(10))
    del weights["classifier.1.bias"]
    with pytest.raises(CheckpointError, match=r"\n    classifier\.1\.bias \[10\]"):
        fit(MobileLike(10), weights)


def test_any_other_difference_is_an_error_and_changes_nothing() -> None:
    model = MobileLike(10)
    before = copied(model)
    weights = weights_of(MobileLike(10))
    weights["features.0.0.weight"] = torch.zeros(4, 3, 5, 5)
    del weights["features.1.1.running_mean"]
    weights["stem.weight"] = torch.zeros(2, 2)
    with pytest.raises(CheckpointError) as caught:
        fit(model, weights)
    lines = [line.strip() for line in str(caught.value).splitlines() if line.startswith("    ")]
    assert lines == [
        "features.0.0.weight [4, 3, 5, 5] → [4, 3, 3, 3]",
        "features.1.1.running_mean [8]",
        "stem.weight [2, 2]",
    ]
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_long_lists_are_cut_at_ten() -> None:
    weights = {**weights_of(MobileLike(10)), **{f"extra.{number}": torch.zeros(1) for number in range(13)}}
    with pytest.raises(CheckpointError, match="  13 ") as caught:
        fit(MobileLike(10), weights)
    lines = str(caught.value).splitlines()
    assert len([line for line in lines if "extra." in line]) == 10
    assert lines[-1] == "    and 3 more"


def test_counters_that_old_files_lack_are_no_error() -> None:
    weights = {n: t for n, t in weights_of(MobileLike(10)).items() if not n.endswith("num_batches_tracked")}
    fitted = fit(MobileLike(10), weights)
    assert fitted.missing == ["features.0.1.num_batches_tracked", "features.1.1.num_batches_tracked"]


def test_heads_can_be_named() -> None:
    model = MobileLike(10)
    weights = weights_of(MobileLike(10, width=6))
    with pytest.raises(CheckpointError, match=r"features\.1\.0\.weight \[6, 4, 1, 1\] → \[8, 4, 1, 1\]"):
        fit(model, weights)
    fitted = load_weights(model, weights, Surgery(head=["features.1", "classifier"]))
    assert sorted({name.split(".")[0] for name in fitted.replaced}) == ["classifier", "features"]
    assert all(name.startswith("features.0") for name in fitted.loaded)
    with pytest.raises(ValueError, match=r"head 'clasifier' .* classifier"):
        load_weights(model, weights, Surgery(head=["clasifier"]))
    # A prefix ends at a dot: "feat" is not "features".
    with pytest.raises(ValueError, match="head 'feat'"):
        load_weights(model, weights, Surgery(head=["feat"]))
    with pytest.raises(ValueError, match="auto, keep, drop"):
        load_weights(model, weights, Surgery(head="features"))


def test_a_kept_head_must_fit() -> None:
    with pytest.raises(CheckpointError, match=r"classifier\.1\.weight \[1000, 8\] → \[10, 8\]"):
        load_weights(MobileLike(10), weights_of(MobileLike(1000)), Surgery(head="keep"))
    assert not load_weights(MobileLike(10), weights_of(MobileLike(10)), Surgery(head="keep")).replaced


def test_a_dropped_head_stays_fresh_even_where_it_fits() -> None:
    model = MobileLike(10)
    before = copied(model)
    fitted = load_weights(model, weights_of(model), Surgery(head="drop"))
    assert list(fitted.replaced) == ["classifier.1.weight", "classifier.1.bias"]
    assert model.state_dict()["classifier.1.weight"].equal(before["classifier.1.weight"])
    with pytest.raises(ValueError, match="head: drop"):
        load_weights(nn.Sequential(nn.Conv2d(3, 8, 3)), {}, Surgery(head="drop"))


@pytest.mark.parametrize(("init", "width"), [("zeros", 0.0), ("trunc_normal", 2e-5), ("normal", 0.01)])
def test_a_new_head_starts_as_declared(init: Any, width: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 300))
    fitted = load_weights(model, {**weights_of(model), "1.weight": torch.zeros(7, 100)}, Surgery(head_init=init))
    weight = model.state_dict()["1.weight"]
    assert "1.weight" in fitted.replaced
    # 30,000 draws know their spread to 0.4 %.
    assert float(weight.std()) == pytest.approx(width, rel=0.02)
    assert float(model.state_dict()["1.bias"].abs().max()) == 0
    assert model.state_dict()["0.weight"].eq(7).all()


def test_a_head_that_was_loaded_is_not_initialized() -> None:
    model = MobileLike(10)
    load_weights(model, weights_of(model), Surgery(head_init="zeros"))
    assert model.state_dict()["classifier.1.weight"].eq(7).all()


def test_heads_are_found_as_the_model_says_else_by_form() -> None:
    assert find_heads(TimmLike(5)) == ["classifier.1"]
    assert find_heads(Distilled(5)) == ["classifier.1", "distilled"]
    assert find_heads(MobileLike(5)) == ["classifier.1"]

    described: Any = MobileLike(5)
    described.default_cfg = {"classifier": "features.1.0"}
    assert find_heads(described) == ["features.1.0"]
    described.default_cfg = {"classifier": ("classifier.1", "features.1.0")}
    assert find_heads(described) == ["classifier.1", "features.1.0"]

    segmenter: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1), nn.Linear(2, 2))
    assert find_heads(segmenter) == ["2"]
    segmenter.num_classes = 5
    assert find_heads(segmenter) == ["1"]
    assert find_heads(nn.Sequential(nn.Conv2d(3, 8, 3))) == []


def test_half_precision_weights_go_into_a_full_precision_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    fit(model, {name: torch.full_like(t, 0.5, dtype=torch.float16) for name, t in model.state_dict().items()})
    weight = model.state_dict()["0.weight"]
    assert (weight.dtype, weight.tolist()) == (torch.float32, [[0.5, 0.5], [0.5, 0.5]])


def test_names_are_stripped_then_renamed_in_order() -> None:
    model = MobileLike(10)
    weights = {f"net.body.{n}".replace("classifier.1", "fc"): t for n, t in weights_of(model).items()}
    rename = [
        ("fc", "classifier.1"),
        ("re:features[.](\\d)[.]0[.]weight", r"features.\1.0.kernel"),
        ("*.kernel", "*.weight"),
    ]
    fitted = load_weights(model, weights, Surgery(strip=["net.", "body"], rename=rename))
    assert sorted(fitted.loaded) == sorted(model.state_dict())
    assert all(tensor.eq(7).all() for tensor in model.state_dict().values())


@pytest.mark.parametrize(
    ("surgery", "words"),
    [
        (Surgery(strip=["modul"]), r"strip 'modul' .* module"),
        (Surgery(strip=["module", "module"]), r"strip 'module' "),
        (
            Surgery(rename=[("module.featurs.*", "x.*")]),
            r"rename 'module\.featurs\.\*' .* module\.features",
        ),
        (Surgery(rename=[("re:decoder", "x")]), r"rename 're:decoder' "),
        (
            Surgery(strip=["module"], exclude=["classifer"]),
            r"exclude 'classifer' .* classifier",
        ),
        (Surgery(exclude=["zzz"]), r"exclude 'zzz' .* module, features, classifier$"),
        (Surgery(rename=[("module.features.0.*", "module.features.1.*")]), "gives .* the name .* is taken"),
        (Surgery(rename=[("module", "a*")]), r"has more \* than the pattern"),
        (Surgery(rename=[("re:(", "")]), "not a regular expression"),
        (Surgery(rename=[("re:.*features.*", r"\2")]), "invalid group reference"),
    ],
)
def test_a_declaration_that_does_nothing_or_harm_is_an_error(surgery: Surgery, words: str) -> None:
    model = MobileLike(10)
    before = copied(model)
    weights = {f"module.{name}": tensor for name, tensor in weights_of(model).items()}
    with pytest.raises(ValueError, match=words) as caught:
        load_weights(model, weights, surgery)
    assert "\n" not in str(caught.value)
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_excluded_parts_stay_fresh_whichever_side_has_them() -> None:
    model = MobileLike(10)
    before = copied(model)
    weights = {n: t for n, t in weights_of(model).items() if not n.startswith("features.1.1")}
    weights["decoder.0.weight"] = torch.zeros(3)
    exclude = ["decoder", "features.1.1", "*.running_*"]
    fitted = load_weights(model, weights, Surgery(exclude=exclude))
    assert "decoder.0.weight" in fitted.excluded
    own = {"features.0.1.running_mean", "features.0.1.running_var"}
    own |= {name for name in before if name.startswith("features.1.1")}
    assert set(fitted.excluded) == own | {"decoder.0.weight"}
    for name, tensor in model.state_dict().items():
        assert tensor.equal(before[name] if name in own else torch.full_like(tensor, 7)), name


def test_a_prefix_that_would_help_is_named() -> None:
    weights = {f"encoder.net.{name}": tensor for name, tensor in weights_of(MobileLike(10)).items()}
    with pytest.raises(CheckpointError, match=r"weights\.strip: \[encoder\.net\]; 14 "):
        fit(MobileLike(10), weights)


@pytest.mark.parametrize(
    ("build", "name", "args"),
    [(build_timm, "test_resnet", {}), (build_torchvision, "mobilenet_v2", {"width_mult": 0.25})],
)
def test_an_rgb_network_sees_grey_images_as_it_saw_repeated_ones(build: Any, name: str, args: dict[str, Any]) -> None:
    torch.manual_seed(0)
    color, gray = (build(name, 5, channels, args).eval() for channels in (3, 1))
    fitted = fit(gray, color.state_dict())
    ((kernel, change),) = fitted.reshaped.items()
    assert kernel in ("conv1.0.weight", "features.0.0.weight")
    assert change.how == "summed over its 3 channels"
    image = torch.rand(2, 1, 64, 64)
    with torch.no_grad():
        assert torch.allclose(gray(image), color(image.expand(-1, 3, -1, -1)), atol=1e-5, rtol=1e-5)


def test_a_grey_network_sees_a_repeated_image_as_it_saw_the_grey_one() -> None:
    torch.manual_seed(0)
    gray, image = nn.Sequential(nn.Conv2d(1, 4, 3)), torch.rand(2, 1, 8, 8)
    for num_channels in (3, 5):
        color = nn.Sequential(nn.Conv2d(num_channels, 4, 3))
        fit(color, gray.state_dict())
        repeated = image.expand(-1, num_channels, -1, -1)
        assert torch.allclose(color(repeated), gray(image), atol=1e-6)
    six = nn.Sequential(nn.Conv2d(6, 4, 3))
    three = nn.Sequential(nn.Conv2d(3, 4, 3))
    fit(six, three.state_dict())
    pair = torch.rand(2, 3, 8, 8)
    assert torch.allclose(six(pair.repeat(1, 2, 1, 1)), three(pair), atol=1e-6)


def test_weights_for_bgr_images_are_turned_round() -> None:
    torch.manual_seed(0)
    bgr, rgb, image = (nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Sequential(nn.Conv2d(3, 4, 3)), torch.rand(2, 3, 8, 8))
    fitted = load_weights(rgb, bgr.state_dict(), Surgery(channels="bgr"))
    assert torch.allclose(rgb(image), bgr(image.flip(1)), atol=1e-6)
    assert fitted.summary() == ["loaded         2 tensors", "reshaped       1 tensor   0.weight (from BGR to RGB)"]
    gray = nn.Sequential(nn.Conv2d(1, 4, 3))
    both = load_weights(gray, bgr.state_dict(), Surgery(channels="bgr"))
    assert both.reshaped["0.weight"].how == "from BGR to RGB, summed over its 3 channels"
    with pytest.raises(ValueError, match=r"bgr .*0\.weight .*\[4, 1, 3, 3\]"):
        load_weights(rgb, gray.state_dict(), Surgery(channels="bgr"))
    with pytest.raises(ValueError, match="bgr"):
        load_weights(nn.Linear(2, 2), nn.Linear(2, 2).state_dict(), Surgery(channels="bgr"))


@pytest.mark.parametrize(
    ("num_channels", "surgery"), [(4, Surgery()), (2, Surgery()), (1, Surgery(first_conv="strict"))]
)
def test_channels_without_a_rule_are_refused(num_channels: int, surgery: Surgery) -> None:
    model = nn.Sequential(nn.Conv2d(num_channels, 4, 3))
    with pytest.raises(CheckpointError, match=rf"0\.weight \[4, 3, 3, 3\] → \[4, {num_channels}, 3, 3\]"):
        load_weights(model, nn.Sequential(nn.Conv2d(3, 4, 3)).state_dict(), surgery)


def test_only_the_first_convolution_is_fitted_to_channels() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(1, 4, 3))
    weights = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)).state_dict()
    with pytest.raises(CheckpointError, match=r"1\.weight \[4, 3, 3, 3\] → \[4, 1, 3, 3\]"):
        fit(model, weights)


def tiny_vit(size: Any, **args: Any) -> nn.Module:
    args = {"img_size": size, "depth": 1, "embed_dim": 48, "num_heads": 3, **args}
    return build_timm("vit_tiny_patch16_224", args.pop("num_classes", 10), 3, args)


def test_a_vit_is_finetuned_at_another_size_with_a_new_head() -> None:
    torch.manual_seed(0)
    small = tiny_vit((48, 80))
    fitted = load_weights(small, tiny_vit(96, num_classes=1000).state_dict(), Surgery(head_init="trunc_normal"))
    assert list(fitted.replaced) == ["head.weight", "head.bias"]
    assert fitted.summary()[1] == (
        "reshaped       1 tensor   pos_embed [1, 37, 48] → [1, 16, 48] (position embedding 6×6 → 3×5)"
    )
    assert 0 < float(small.state_dict()["head.weight"].abs().max()) < 2e-4
    assert small(torch.rand(2, 3, 48, 80)).shape == (2, 10)
    with pytest.raises(CheckpointError, match=r"pos_embed \[1, 37, 48\] → \[1, 16, 48\]"):
        load_weights(tiny_vit((48, 80)), tiny_vit(96).state_dict(), Surgery(position_embedding="strict"))


def test_a_torchvision_vit_changes_size_too() -> None:
    args = {"patch_size": 16, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 16}
    maker = import_torchvision().models.vision_transformer.VisionTransformer
    large, small = (maker(image_size=size, num_classes=5, **args) for size in (64, 32))
    fitted = fit(small, large.state_dict())
    assert list(fitted.reshaped) == ["encoder.pos_embedding"]
    positions = "encoder.pos_embedding"
    assert small.state_dict()[positions][:, 0].equal(large.state_dict()[positions][:, 0])


def test_a_swin_takes_another_window() -> None:
    args: dict[str, Any] = {"depths": (1, 1), "embed_dim": 12, "num_heads": (1, 2), "patch_size": 4}
    four = build_timm("swin_tiny_patch4_window7_224", 5, 3, {**args, "img_size": 32, "window_size": 4})
    two = build_timm("swin_tiny_patch4_window7_224", 5, 3, {**args, "img_size": 32, "window_size": 2})
    older = {**four.state_dict(), "layers.0.blocks.0.attn.relative_position_index": torch.zeros(16, 16)}
    fitted = fit(two, older)
    assert [change.how for change in fitted.reshaped.values()] == ["relative positions 7×7 → 3×3"] * 2
    assert fitted.unexpected == ["layers.0.blocks.0.attn.relative_position_index"]
    assert two(torch.rand(1, 3, 32, 32)).shape == (1, 5)


def test_a_table_that_the_geometry_gives_stays_the_models_own() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("relative_position_index", torch.arange(4))
    weights = {**weights_of(nn.Linear(2, 2)), "relative_position_index": torch.zeros(9)}
    assert load_weights(model, weights, Surgery(head="keep")).replaced == {"relative_position_index": ((9,), (4,))}
    assert model.state_dict()["relative_position_index"].tolist() == [0, 1, 2, 3]


def test_the_report_is_json_and_complete() -> None:
    small = tiny_vit(48)
    fitted = load_weights(small, tiny_vit(96, num_classes=3).state_dict(), Surgery(exclude=["norm"]))
    found = json.loads(json.dumps(fitted.as_dict()))
    assert found["reshaped"] == {
        "pos_embed": {"weights": [1, 37, 48], "model": [1, 10, 48], "how": "position embedding 6×6 → 3×3"}
    }
    assert found["replaced"]["head.bias"] == {"weights": [3], "model": [10]}
    assert found["excluded"] == ["norm.weight", "norm.bias"]
    assert (found["missing"], found["unexpected"]) == ([], [])
    assert "pos_embed" in found["loaded"]


LAYERS = ("stem", "block", "neck")


class Parts(nn.Module):
    """Linear layers by name, the head last."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(size, size))


@settings(max_examples=60, deadline=None)
@given(
    own=st.dictionaries(st.sampled_from(LAYERS), st.integers(1, 2)),
    given_sizes=st.dictionaries(st.sampled_from(LAYERS), st.integers(1, 2)),
    heads=st.tuples(st.integers(1, 3), st.integers(0, 3)),
    exclude=st.lists(st.sampled_from(LAYERS), unique=True),
)
def test_every_tensor_ends_in_one_place_or_all_is_refused(
    own: dict[str, int], given_sizes: dict[str, int], heads: tuple[int, int], exclude: list[str]
) -> None:
    model = Parts({**own, "head": heads[0]})
    weights = weights_of(Parts({**given_sizes, **({"head": heads[1]} if heads[1] else {})}))
    exclude = [name for name in exclude if name in {*own, *given_sizes}]
    before = copied(model)
    compared = {**own, **given_sizes}.keys() - set(exclude)
    surgery = Surgery(exclude=exclude, head=["head"])
    if any(own.get(name) != given_sizes.get(name) for name in compared):
        with pytest.raises(CheckpointError, match="do not match"):
            load_weights(model, weights, surgery)
        assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
        return
    fitted = load_weights(model, weights, surgery)
    of_model = [*fitted.loaded, *fitted.replaced, *fitted.missing, *(n for n in fitted.excluded if n in before)]
    of_weights = [*fitted.loaded, *fitted.replaced, *fitted.unexpected, *(n for n in fitted.excluded if n in weights)]
    assert sorted(of_model) == sorted(before)
    assert sorted(of_weights) == sorted(weights)
    for name, tensor in model.state_dict().items():
        assert tensor.equal(weights[name] if name in fitted.loaded else before[name])


def test_weights_of_a_classifier_go_into_the_part_that_is_named() -> None:
    source, model = MobileLike(5), nn.Module()
    model.backbone, model.head = MobileLike(5).features, nn.Conv2d(8, 1, 1)
    head = model.head.weight.detach().clone()
    weights = {name.removeprefix("features."): tensor for name, tensor in source.state_dict().items()}
    report = load_weights(model, weights, Surgery(into="backbone"))
    own = model.backbone.state_dict()
    assert all(torch.equal(own[name], source.features.state_dict()[name]) for name in own)
    assert report.loaded == [f"backbone.{name}" for name in own]
    assert report.missing == ["head.weight", "head.bias"]
    assert report.unexpected == [name for name in weights if name.startswith("classifier")]
    assert torch.equal(model.head.weight, head)


def test_a_part_is_loaded_whole_or_not_at_all() -> None:
    model = nn.Module()
    model.backbone = MobileLike(5).features
    before = copied(model)
    weights = {name.removeprefix("features."): tensor for name, tensor in MobileLike(5).state_dict().items()}
    weights.pop(next(iter(weights)))
    with pytest.raises(CheckpointError, match="  1 missing"):
        load_weights(model, weights, Surgery(into="backbone"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match=r"into 'backbon' .* backbone"):
        load_weights(model, weights, Surgery(into="backbon"))


def test_the_head_of_a_linear_probe_sees_normalized_features() -> None:
    model = build_timm("test_vit", 5, 3)
    weight = model.get_submodule("head").get_parameter("weight").detach().clone()
    add_head_batch_norm(model)
    assert find_heads(model) == ["head"]
    head = model.get_submodule("head")
    assert [name for name, _ in head.named_parameters()] == ["1.weight", "1.bias"], "the norm has no affine parameters"
    assert head.get_parameter("1.weight").equal(weight)
    features = torch.randn(16, weight.shape[1]) * 3 + 2
    expected = (features - features.mean(0)) / (features.var(0, unbiased=False) + 1e-6).sqrt()
    bias = head.get_parameter("1.bias")
    torch.testing.assert_close(head.train()(features), expected @ weight.T + bias, rtol=1e-4, atol=1e-5)
    freezing = Freezing(model, ["all_but_head"])
    freezing.train_mode(model)
    assert [name for name, each in model.named_parameters() if each.requires_grad] == ["head.1.weight", "head.1.bias"]
    assert model.get_submodule("head.0").training, "its statistics belong to the head"
    with pytest.raises(ValueError, match="Conv2d"):
        add_head_batch_norm(nn.Sequential(nn.Conv2d(3, 4, 1)))
