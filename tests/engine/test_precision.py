"""Precisions by name: what they compute in, what they do to gradients, and when they leave a step out."""

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from halved_nets import CPU, NAMES, Trial, gradients_of, samples, small_net
from small_runs import one_thread  # noqa: F401
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.engine.loss_accumulator import WeightedLoss
from paceline.engine.precision.mixed import CudaFloat32, Precision, add_gradients, make_precision

pytestmark = pytest.mark.usefixtures("one_thread")
SCALED = ["fp16", "O1", "O2", "O3"]


@pytest.mark.parametrize("name", NAMES)
def test_every_precision_trains_to_about_the_loss_of_fp32(name: str) -> None:
    trial, reference = Trial(name, small_net()), Trial("fp32", small_net())
    before = trial.loss(*samples()).item()
    for _ in range(12):
        reference.update(*samples(), micro_batches=2)
        while not trial.update(*samples(), micro_batches=2):
            pass
    after = trial.loss(*samples()).item()
    assert after < 0.7 * before
    assert after == pytest.approx(reference.loss(*samples()).item(), rel=0.03)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *[(name, torch.float32) for name in ("fp32", "tf32", "O0")],
        ("bf16", torch.bfloat16),
        *[(name, torch.float16) for name in SCALED],
    ],
)
def test_layers_compute_in_the_format_of_the_name_in_any_thread(name: str, expected: torch.dtype) -> None:
    net = small_net().eval()
    precision = make_precision(name, CPU)
    precision.attach(net)
    seen: list[torch.dtype] = []
    net.get_submodule("3").register_forward_hook(lambda layer, args, output: seen.append(output.dtype))

    def predict(images: Tensor) -> Tensor:
        with torch.inference_mode(), precision.compute():
            outputs: Tensor = net(images)
            return outputs

    alone = predict(samples()[0])
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(predict, [samples()[0]] * 6))
    assert set(seen) == {expected}
    assert all(torch.equal(outputs, alone) for outputs in together)


@pytest.mark.parametrize("name", ["fp16", "O2"])
def test_the_gradient_is_that_of_fp32_whatever_the_scale(name: str) -> None:
    reference = Trial("fp32", small_net())
    norm = reference.gradients(*samples(), micro_batches=3).item()
    for scale in (8.0, 1000.0, 4096.0):
        trial = Trial(make_precision(name, CPU, loss_scale=scale), small_net())
        assert trial.gradients(*samples(), micro_batches=3).item() == pytest.approx(norm, rel=5e-3)
        for found, expected in zip(gradients_of(trial.trainable), gradients_of(reference.trainable), strict=True):
            assert found.dtype == torch.float32
            assert (found - expected).norm() < 0.01 * norm


@pytest.mark.parametrize("name", ["fp16", "O2"])
def test_gradients_too_small_for_float16_survive_by_the_scale(name: str) -> None:
    def slope(scale: float) -> float:
        precision, layer = make_precision(name, CPU, loss_scale=scale), nn.Linear(1, 1, bias=False)
        parameters = list(layer.parameters())
        precision.attach(layer)
        with precision.compute():
            output = layer(torch.ones(1, 1))
        precision.backward([WeightedLoss(output.float().sum(), 1e-9)])
        precision.unscale(parameters)
        return gradients_of(parameters)[0].item()

    assert slope(1.0) == 0
    assert slope(65536.0) == pytest.approx(1e-9, rel=1e-2)


@pytest.mark.parametrize("name", SCALED)
def test_an_overflow_leaves_the_weights_alone_and_halves_a_dynamic_scale(name: str) -> None:
    trial = Trial(make_precision(name, CPU, loss_scale="dynamic"), small_net())
    images, labels = samples()
    spoiled = images.clone()
    spoiled[0, 0, 0, 0] = math.inf
    trial.model.eval()  # running statistics are not the concern here
    before = {key: value.clone() for key, value in trial.weights.state_dict().items()}
    assert not trial.update(spoiled, labels)
    assert trial.precision.metrics() == {"loss_scale": 2.0**15, "skipped_updates": 1}
    assert all(torch.equal(value, before[key]) for key, value in trial.weights.state_dict().items())
    while not trial.update(images, labels):
        pass
    assert any(not torch.equal(value, before[key]) for key, value in trial.weights.state_dict().items())


def test_a_float16_loss_that_its_own_scale_drives_out_of_range_is_an_overflow() -> None:
    precision, weight = make_precision("fp16", CPU), nn.Parameter(torch.ones(2))
    taken = []
    for _ in range(2):
        precision.backward([WeightedLoss(weight.half().sum(), 1.5)])
        precision.unscale([weight])
        taken.append(not precision.update_loss_scale(gradients_of([weight])[0].norm()))
        last, weight.grad = gradients_of([weight])[0], None
    assert taken == [False, True]
    assert last.tolist() == [1.5, 1.5]


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "O0"])
def test_without_a_scale_the_norm_is_not_even_read(name: str) -> None:
    unreadable = torch.empty((), device="meta")
    precision = make_precision(name, CPU)
    assert precision.update_loss_scale(unreadable) is None
    assert precision.state_dict() == precision.metrics() == {}


@pytest.mark.parametrize("name", SCALED)
def test_the_state_survives_being_saved(name: str) -> None:
    first, second = make_precision(name, CPU, "dynamic"), make_precision(name, CPU, "dynamic")
    for norm in (math.inf, math.nan, 1.0, 2.0):
        first.update_loss_scale(torch.tensor(norm))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert second.metrics() == {"loss_scale": 2.0**14, "skipped_updates": 2}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["bf16", "fp16", "O2", "O3"])
def test_checkpointed_activations_have_the_same_gradients(name: str, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, net: nn.Module, call: Callable[..., Tensor]) -> None:
            super().__init__()
            self.net = net
            self.call = call

        def forward(self, images: Tensor) -> Tensor:
            return self.call(self.net, images)

    def checkpointed(net: nn.Module, images: Tensor) -> Tensor:
        output: Tensor = checkpoint(net, images.requires_grad_(), use_reentrant=reentrant)
        return output

    found = []
    for call in (checkpointed, lambda net, images: net(images)):
        trial = Trial(make_precision(name, CPU, None if name == "bf16" else 256.0), Checkpointed(small_net(), call))
        trial.gradients(*samples())
        found.append(gradients_of(trial.trainable))
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


def test_tf32_holds_only_where_it_was_asked_for() -> None:
    def switches() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    seen: list[tuple[str, bool]] = []
    before = switches()
    weight = nn.Parameter(torch.ones(()))
    weight.register_hook(lambda gradient: seen.append(switches()))  # type: ignore[no-untyped-call]
    for tf32, expected in ((True, ("high", True)), (False, ("highest", False))):
        precision = make_precision("tf32" if tf32 else "fp32", torch.device("cuda"))
        assert isinstance(precision, CudaFloat32)
        with precision.compute():
            assert switches() == expected
        assert switches() == before
        precision.backward([WeightedLoss(weight * 2, 1.0)])
        assert seen.pop() == expected
        assert switches() == before


def test_warnings_say_what_a_cpu_does_not_have() -> None:
    warnings = {name: make_precision(name, CPU).warning for name in NAMES}
    assert [name for name, warning in warnings.items() if warning is None] == ["fp32", "bf16", "O0"]
    assert "changes nothing" in (warnings["tf32"] or "")
    assert all("slow on a CPU" in (warnings[name] or "") for name in SCALED)
    assert make_precision("fp16", torch.device("cuda")).warning is None


def test_descriptions_tell_one_from_the_other() -> None:
    assert Precision().describe() == make_precision("O0", CPU).describe() == "fp32"
    assert make_precision("O1", CPU).describe() == "fp16 autocast, dynamic loss scale, now 65,536"
    assert make_precision("O2", CPU, loss_scale=128).describe() == (
        "fp16 weights, fp32 master weights, norm layers in fp32, loss scale 128"
    )
    assert make_precision("O3", CPU).describe() == (
        "fp16 weights, no master weights, eps at least 0.0001, norm layers in fp16, loss scale 1"
    )


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "O0"])
def test_a_scale_without_use_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has no loss scale"):
        make_precision(name, CPU, loss_scale="dynamic")


def test_names_and_choices_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one of fp32, tf32, bf16, fp16, O0, O1, O2, O3, got 'o2'"):
        make_precision("o2", CPU)
    with pytest.raises(ValueError, match="only O2 and O3"):
        make_precision("O1", CPU, keep_norms=True)
    with pytest.raises(ValueError, match="a number > 0"):
        make_precision("fp16", CPU, loss_scale=0)


def test_gradients_are_those_of_torchs_backward() -> None:
    """Of several losses, one of which has no gradient, and added to what is there."""
    found = []
    for is_own in (True, False):
        model, (images, labels) = small_net(), samples(8)
        logits = model(images)
        losses = [nn.functional.cross_entropy(logits, labels), torch.ones(()), logits.double().square().sum()]
        weights = [0.3, 1.0, 7e-3]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if is_own:
            add_gradients([WeightedLoss(loss, weight) for loss, weight in zip(losses, weights, strict=True)], 2.0)
        else:
            factors = [loss.new_tensor(2 * weight) for loss, weight in zip(losses, weights, strict=True)]
            torch.autograd.backward(losses[::2], factors[::2])
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(one is not None and torch.equal(one, other) for one, other in zip(*found, strict=True))
    add_gradients([])
