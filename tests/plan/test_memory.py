"""The bytes of a step, counted from the shapes of a small network, and by torch's profiler."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from paceline.core.world import World
from paceline.engine.strategies.fsdp import FSDPStrategy
from paceline.plan.fake_tensors import fake_process_group, fake_tensors
from paceline.plan.memory import MemoryTracker

FLOAT = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 8))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_each_part_has_the_bytes_of_its_shapes() -> None:
    model, rows = network(), 4
    optimizer = torch.optim.Adam(model.parameters(), foreach=False, fused=False)
    number = sum(parameter.numel() for parameter in model.parameters())
    inputs = torch.zeros(rows, 32)
    tracker = MemoryTracker()
    with tracker, tracker.watch(model, optimizer):
        step(model, optimizer, inputs)
        tracker.reset_peak()
        step(model, optimizer, inputs)
    peak = tracker.peak.parts
    assert peak["parameters"] == number * FLOAT
    steps = len(list(model.parameters()))
    assert peak["optimizer"] == (2 * number + steps) * FLOAT  # two moments, and a count for each parameter
    assert peak["gradients"] <= number * FLOAT
    assert tracker.peak.total <= (4 * number + steps + 4 * number) * FLOAT


def test_activations_are_what_the_backward_pass_needs() -> None:
    rows, width = 1_000, 64
    model = network(width)
    optimizer = torch.optim.SGD(model.parameters())
    tracker = MemoryTracker()
    with tracker, tracker.watch(model, optimizer):
        output = model(torch.zeros(rows, 32))
        held = tracker.peak.parts["activations"]
        assert held >= rows * (32 + width + 8) * FLOAT  # inputs, what ReLU gives (its input is freed) and the output
        assert held <= rows * (32 + 2 * width + 8) * FLOAT
        del output
    assert tracker.live == sum(parameter.numel() for parameter in model.parameters()) * FLOAT


def profiled_peak(work: Callable[[], object]) -> int:
    """The most bytes that torch's allocator held beyond those before, by its profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    live = most = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def track_second_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> tuple[MemoryTracker, int]:
    """A tracker with the peak of a second step, and the bytes that were live before it."""
    tracker = MemoryTracker()
    with tracker, tracker.watch(model, optimizer):
        step(model, optimizer, inputs)
        tracker.reset_peak()
        before = tracker.live
        step(model, optimizer, inputs)
    return tracker, before


@pytest.mark.parametrize("rows", [16, 512])
def test_the_peak_is_that_of_torchs_profiler(rows: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    inputs = torch.rand(rows, 3, 16, 16)
    step(model, optimizer, inputs)
    expected = profiled_peak(lambda: step(model, optimizer, inputs))
    tracker, before = track_second_step(model, optimizer, inputs)
    assert tracker.peak.total - before == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_fake_tensors_take_no_memory(optimizer_class: type[torch.optim.SGD]) -> None:
    """Also in the step of a fused optimizer, for which torch has no kernel on fake tensors."""
    with fake_tensors():
        model = network(4_096)
        optimizer = optimizer_class(model.parameters(), 0.1, fused=True)
        size = sum(parameter.nbytes for parameter in model.parameters())
        assert profiled_peak(lambda: step(model, optimizer, torch.zeros(2, 32))) < size / 10


@pytest.mark.parametrize("keeps_parameters", [False, True], ids=["fsdp", "zero"])
def test_what_is_gathered_is_counted_while_it_is_there(keeps_parameters: bool) -> None:
    """FSDP empties the storages of gathered parameters, and fills them again."""
    width, processes = 256, 4
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)]
    model, inputs = nn.Sequential(*blocks), torch.rand(16, width)
    with fake_process_group(processes):
        world = World(0, processes, 0, torch.device("cpu"), processes)
        FSDPStrategy(model, world, [[block] for block in blocks], keeps_parameters=keeps_parameters)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step(model, optimizer, inputs)
        expected = profiled_peak(lambda: step(model, optimizer, inputs))
        tracker, before = track_second_step(model, optimizer, inputs)
        assert tracker.peak.total - before == expected
        assert tracker.peak.parts["parameters"] == sum(each.nbytes for each in model.parameters()) // processes
