"""Float16 weights: which stay float32, what stands behind them, and that models of all kinds compute with them."""

from typing import Any

import pytest
import torch
from halved_nets import CPU, Trial, gradients_of, samples, small_net
from small_runs import one_thread  # noqa: F401
from torch import Tensor, nn

from paceline.checkpoint.state import load_optimizer, optimizer_tree
from paceline.engine.precision.mixed import Precision, fit_half_weights, make_precision
from paceline.models.freezing import Freezing
from paceline.models.zoo import build_timm, build_torchvision
from paceline.optim.averaging import ema

pytestmark = pytest.mark.usefixtures("one_thread")
HALF, FULL = torch.float16, torch.float32


class Odd(nn.Module):
    """Float32 made inside, weights that are computed or listed elsewhere, and outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.recurrent = nn.LSTM(4, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3, bias=False))
        self.register_buffer("table", torch.rand(4, 4))

    def forward(self, images: Tensor) -> dict[str, Any]:
        tokens = self.convolution(images).flatten(2).mT @ self.table  # [N, H·W, 4]
        states, _ = self.recurrent(tokens.float())
        attended, _ = self.attention(states, states, states)
        return {"logits": [self.head(attended.mean(1))], "shape": images.shape}


class Truthful(nn.Module):
    """Is given the truth beside the images, as detectors are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
        assert images[0].dtype == HALF
        assert targets[0]["boxes"].dtype == FULL
        return self.scale * images[0].sum()


def dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in module.state_dict().items() if tensor.is_floating_point()}


def pure(keep_norms: bool | None = None) -> Precision:
    return make_precision("O3", CPU, keep_norms=keep_norms)


def test_o2_keeps_masters_and_norm_layers_in_float32() -> None:
    trial = Trial("O2", small_net())
    norms = ("1.", "4.")
    held = dtypes(trial.model)
    assert {name: HALF if not name.startswith(norms) else FULL for name in held} == held
    assert set(dtypes(trial.weights).values()) == {FULL}
    assert list(trial.weights.state_dict()) == list(small_net().state_dict())
    assert [id(one) for one in trial.weights.parameters()] == [id(one) for one in trial.trainable]


def test_o3_is_float16_throughout_unless_norm_layers_are_kept() -> None:
    trial = Trial("O3", small_net())
    assert trial.weights is trial.model
    assert set(dtypes(trial.model).values()) == {HALF}
    assert {parameter.dtype for parameter in trial.trainable} == {HALF}
    kept = dtypes(Trial(pure(keep_norms=True), small_net()).model)
    assert {name.split(".")[0] for name, dtype in kept.items() if dtype == FULL} == {"1", "4"}
    cast = Trial(make_precision("O2", CPU, keep_norms=False), small_net())
    assert set(dtypes(cast.model).values()) == {HALF}
    assert {dtype for name, dtype in dtypes(cast.weights).items() if "running" not in name} == {FULL}


def test_changes_below_the_resolution_of_float16_add_up_in_the_masters_only() -> None:
    ends = {}
    for name in ("O2", "O3"):
        layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(layer.weight)
        trial = Trial(make_precision(name, CPU, loss_scale=1.0), layer)
        for _ in range(20):
            for weight in trial.model.parameters():
                weight.grad = torch.full_like(weight, -1e-3)
            trial.precision.unscale(trial.trainable)
            trial.optimizer.step()  # by 1e-4, where neighbors of 1 are 1e-3 apart
            trial.precision.sync_weights()
        ends[name] = layer.weight.item()
    assert ends["O3"] == 1
    assert ends["O2"] == pytest.approx(1.002, abs=2**-10)


def model_of_others(kind: str) -> nn.Module:
    """A small model of timm or torchvision, always with the same weights."""
    torch.manual_seed(0)
    if kind == "mobilenet":
        return build_torchvision("mobilenet_v2", 3, 3, {"width_mult": 0.25, "dropout": 0.0})
    names = {"resnet": "resnet18", "vit": "vit_tiny_patch16_224", "convnext": "convnext_atto"}
    smaller: dict[str, dict[str, Any]] = {
        "resnet": {"channels": (8, 8, 8, 8)},
        "vit": {"img_size": 64, "depth": 2, "embed_dim": 48, "init_values": 0.1},
        "convnext": {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8)},
    }
    return build_timm(names[kind], 3, 3, smaller[kind])


@pytest.mark.parametrize("name", ["O2", "O3"])
@pytest.mark.parametrize("kind", ["resnet", "vit", "convnext", "mobilenet"])
def test_models_of_others_train_about_as_in_fp32(kind: str, name: str) -> None:
    images, labels = samples(12, side=64, channels=3)
    trial = Trial(make_precision(name, CPU, loss_scale=16.0), model_of_others(kind), lr=0.01)
    reference = Trial("fp32", model_of_others(kind), lr=0.01)
    for layer in trial.model.modules():
        own = {parameter.dtype for parameter in layer.parameters(recurse=False)}
        assert own <= {FULL if "Norm" in type(layer).__name__ and name == "O2" else HALF}
    losses = []
    for one in (trial, reference):
        losses.append([one.loss(images, labels).item()])
        for _ in range(2):
            assert one.update(images, labels)
            losses[-1].append(one.loss(images, labels).item())
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("name", ["O2", "O3"])
def test_float32_made_inside_of_a_model_is_cast_where_it_meets_weights(name: str) -> None:
    torch.manual_seed(0)
    model, images = Odd(), torch.randn(2, 3, 4, 4)
    expected = model(images)["logits"][0]
    trial = Trial(make_precision(name, CPU, loss_scale=64.0), model)
    outputs = model(images)
    assert outputs["shape"] == images.shape
    assert outputs["logits"][0].dtype == FULL
    assert torch.allclose(outputs["logits"][0], expected, atol=2e-3)
    outputs["logits"][0].sum().backward()
    trial.precision.unscale(trial.trainable)
    gradients_of(trial.trainable)


def test_what_comes_in_dicts_is_left_alone() -> None:
    trial = Trial("O2", Truthful())
    output = trial.model([torch.ones(2)], targets=[{"boxes": torch.tensor([319.9])}])
    assert output.dtype == FULL
    assert output.item() == 2


def test_norm_layers_other_than_torchs_are_kept_and_compute_in_float32() -> None:
    seen: list[torch.dtype] = []

    class OwnRmsNorm2d(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4, 1, 1))

        def forward(self, values: Tensor) -> Tensor:
            seen.append(values.dtype)
            return values * values.square().mean(1, keepdim=True).rsqrt() * self.gain

    model = nn.Sequential(nn.Conv2d(2, 4, 1), OwnRmsNorm2d())
    Trial("O2", model)
    model(torch.full((1, 2, 2, 2), 300.0))
    assert seen == [FULL]  # squares would overflow in float16
    assert dtypes(model)["1.gain"] == FULL


def test_shared_weights_stay_shared_and_gradients_meet_in_one_master() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    nn.init.eye_(first.weight)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    trial = Trial(make_precision("O2", CPU, loss_scale=8.0), model)
    assert first.weight is second.weight
    assert len(trial.trainable) == 1
    assert trial.weights.get_parameter("0.weight") is trial.weights.get_parameter("1.weight")
    (model(torch.ones(1, 3)).sum() * 8).backward()
    trial.precision.unscale(trial.trainable)
    assert gradients_of(trial.trainable)[0].tolist() == [[2, 2, 2]] * 3


def test_parts_that_begin_to_learn_later_do_so_through_their_masters() -> None:
    model = small_net()
    freezing = Freezing(model, ["0", "1"], unfreeze=[(2, ["0", "1"])])
    for parameter in model.parameters():
        parameter.requires_grad_(True)  # as when the optimizer is made over all that ever learns
    trial = Trial(make_precision("O2", CPU, loss_scale=256.0), model)
    freezing.apply(0)
    trial.gradients(*samples())
    named = dict(trial.weights.named_parameters())
    assert [name for name, one in named.items() if one.grad is None] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    freezing.apply(2)
    trial.gradients(*samples())
    gradients_of(trial.trainable)


def test_frozen_weights_stay_frozen() -> None:
    model = small_net()
    model.get_parameter("0.weight").requires_grad_(False)
    Trial("O2", model)
    assert not model.get_parameter("0.weight").requires_grad
    assert model.get_parameter("0.bias").requires_grad


@pytest.mark.parametrize("name", ["O2", "O3"])
def test_a_restored_run_goes_on_to_the_same_bits(name: str) -> None:
    def trial() -> Trial:
        made = Trial(make_precision(name, CPU, loss_scale=1024.0), small_net())
        made.optimizer.param_groups[0]["momentum"] = 0.9
        return made

    first, second = trial(), trial()
    for _ in range(3):
        assert first.update(*samples())
    saved = {key: value.clone() for key, value in first.weights.state_dict().items()}
    second.weights.load_state_dict(saved)
    second.precision.sync_weights()
    load_optimizer(second.optimizer, second.weights, optimizer_tree(first.optimizer, first.weights))
    second.precision.load_state_dict(first.precision.state_dict())
    for one in (first, second):
        assert one.update(*samples())
    for face in ("model", "weights"):
        states = getattr(first, face).state_dict(), getattr(second, face).state_dict()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert name == "O3" or not torch.equal(saved["0.weight"], saved["0.weight"].half().float())


def test_an_average_is_of_the_masters_and_can_be_computed_with() -> None:
    trial, average = Trial("O2", small_net()), ema(decay=0.5, warmup=False)
    courses = []
    for _ in range(2):
        while not trial.update(*samples()):
            pass
        average.update(trial.weights)
        courses.append(trial.weights.get_parameter("0.weight").detach().clone())
    with average.swap_in(trial.weights):
        trial.precision.sync_weights()
        held = trial.model.get_parameter("0.weight").detach().clone()
    trial.precision.sync_weights()
    assert torch.equal(held, (courses[0] + courses[1]).div(2).half())
    assert torch.equal(trial.model.get_parameter("0.weight"), courses[1].half())


def test_running_statistics_are_seen_by_both_faces() -> None:
    trial = Trial("O2", small_net())
    trial.loss(*samples())
    own, behind = dict(trial.model.named_buffers()), dict(trial.weights.named_buffers())
    assert own["1.running_mean"].abs().sum() > 0
    assert {name: id(buffer) for name, buffer in own.items()} == {name: id(buffer) for name, buffer in behind.items()}


def test_eps_is_raised_to_what_float16_knows_where_moments_are_float16_only() -> None:
    half, whole = nn.Parameter(torch.ones(1, dtype=torch.float16)), nn.Parameter(torch.ones(1))
    groups: list[dict[str, Any]] = [{"params": [half]}, {"params": [whole]}, {"params": [half.detach()], "eps": 1e-3}]
    optimizer = torch.optim.AdamW(groups)
    fit_half_weights(optimizer)
    assert [group["eps"] for group in optimizer.param_groups] == [1e-4, 1e-8, 1e-3]
