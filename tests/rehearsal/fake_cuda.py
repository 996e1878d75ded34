"""A machine with CUDA devices that are not there: host tensors are real, `cuda` tensors are fake.

Whatever leaves the device is made up: zeros. Within a strict region nothing may leave it, and the host may not wait.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from paceline.core.world import World
from paceline.plan.fake_tensors import convert_module, keep_unsampled

_aten = torch.ops.aten
NUM_DEVICES = 8
DEVICE = torch.device("cuda", 0)

_SCALARS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten._linalg_check_errors.default}
_SELECTIONS = {
    _aten.nonzero.default, _aten.masked_select.default, _aten._unique2.default, _aten.unique_dim.default,
    _aten.unique_consecutive.default, _aten.bincount.default, _aten.repeat_interleave.Tensor,
}  # fmt: skip
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}


_NONDETERMINISTIC = {
    "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
    "max_unpool2d", "max_unpool3d", "upsample_linear1d_backward", "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward", "upsample_trilinear3d_backward", "_upsample_bilinear2d_aa_backward",
    "_upsample_bicubic2d_aa_backward", "reflection_pad1d_backward", "reflection_pad2d_backward",
    "reflection_pad3d_backward", "_ctc_loss_backward", "put_", "histc", "grid_sampler_2d_backward",
    "grid_sampler_3d_backward",
}  # fmt: skip
"""Operators for which torch says that it has no deterministic CUDA kernel (`use_deterministic_algorithms`)."""


class HostWaitError(AssertionError):
    """The host reads a value of the device, or waits for a copy."""


class FakeCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators on host tensors for real, and on `cuda` tensors as fakes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_strict = False
        self.is_all_fake = False
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def strict(self) -> Iterator[None]:
        """Inside, a value that leaves the device, or a copy that the host waits for, is an error."""
        self.is_strict = True
        try:
            yield
        finally:
            self.is_strict = False

    @contextmanager
    def all_fake(self) -> Iterator[None]:
        """Inside, host tensors are fake too: a large model takes no memory."""
        self.is_all_fake = True
        try:
            with patch("torch.nn.init._no_grad_trunc_normal_", keep_unsampled):
                yield
        finally:
            self.is_all_fake = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        leaves = list(_leaves((*args, *kwargs.values())))
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        if any(type(each) not in (Tensor, nn.Parameter, FakeTensor) for each in tensors):
            return NotImplemented  # a sharded tensor: its own parts come back here
        num_fake = sum(isinstance(each, FakeTensor) for each in tensors)
        is_host = num_fake == 0
        if (
            is_host
            and not self.is_all_fake
            and not any(isinstance(each, torch.device) and each.type == "cuda" for each in leaves)
        ):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if (
            torch.is_inference_mode_enabled() and func.namespace != "prim" and func._can_decompose()
        ):  # elsewhere, autograd has done so
            with self:
                return func.decompose(*args, **kwargs)
        if torch.are_deterministic_algorithms_enabled() and _is_nondeterministic(func, args):
            raise RuntimeError(f"{func} has no deterministic CUDA kernel")
        answer = self._leave_device(func, args, kwargs, is_host)
        if answer is not None:
            return answer[0]
        if func.overloadpacket is _aten._fused_sgd_:  # torch has no fake form of it
            assert {each.device for each in tensors} == {DEVICE}
            return None
        if num_fake < len(tensors):
            args, kwargs = tree_map_only(Tensor, self._as_fake, (args, kwargs))
        return func(*args, **kwargs)

    def _as_fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor)

    def _leave_device(self, func: Any, args: Any, kwargs: Any, is_host: bool) -> tuple[Any] | None:
        """What the host gets where it reads or copies; None for everything that stays on the device."""
        if func in _COPIES:
            return self._copy(func, args, kwargs, is_host)
        if func in _SCALARS:
            self._wait(func)
            return (_scalar(func, args),)
        if func in _SELECTIONS or func.name() == "torchvision::nms":
            self._wait(func)
            return (_selection(func, args),)
        if func in _INDEXED and any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]):
            if func is not _aten.index.Tensor and args[2].numel() == 1:
                return None  # torch fills under the mask
            self._wait(func)
            return (func(args[0], _as_places(args[1]), *args[2:], **kwargs),)
        return None

    def _copy(self, func: Any, args: Any, kwargs: Any, is_host: bool) -> tuple[Any] | None:
        """A copy between host and device; the host waits for it unless it is told not to."""
        source, target = (args[1], args[0]) if func is _aten.copy_.default else (args[0], kwargs.get("device"))
        target_type = getattr(target, "device", target)
        target_type = target_type.type if target_type is not None else source.device.type
        if (source.device.type, target_type) not in (("cuda", "cpu"), ("cpu", "cuda")):
            return None
        is_async = kwargs.get("non_blocking") or (func is _aten.copy_.default and len(args) > 2 and args[2])
        if not is_async:
            self._wait(func)
        if target_type == "cuda":
            made = func(*tree_map_only(Tensor, self._as_fake, args), **kwargs)
            made.host_values = source  # a transform may send to the device what a metric reads again, such as a matrix
            return (made,)
        with unset_fake_temporarily():
            values = getattr(source, "host_values", torch.zeros(source.shape))
            if func is _aten.copy_.default:
                return (target.copy_(values),)
            return (values.to(kwargs.get("dtype") or source.dtype, copy=True),)

    def _wait(self, func: Any) -> None:
        if not self.is_strict:
            return
        frames = [frame for frame in traceback.extract_stack() if "paceline" in Path(frame.filename).parts]
        where = [f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}" for frame in frames[-1:]]
        raise HostWaitError(f"{func}: the host waits for the device, {where[0] if where else 'in other code'}")


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        else:
            yield value


def _is_nondeterministic(func: Any, args: Any) -> bool:
    if func.overloadpacket is _aten.cumsum:
        return bool(args[0].is_floating_point())
    if func.overloadpacket is _aten.nll_loss2d_forward:
        return bool(args[3])  # a reduction
    return func.namespace == "aten" and func.overloadpacket.__name__ in _NONDETERMINISTIC


def _scalar(func: Any, args: Any) -> Any:
    if func is _aten._local_scalar_dense.default:
        return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
    return True if func is _aten.equal.default else None


def _selection(func: Any, args: Any) -> Any:
    """As if every element was selected, or as if all were different."""
    given = args[0]
    if func is _aten.nonzero.default:
        return given.new_empty((given.numel(), given.ndim), dtype=torch.int64)
    if func is _aten.masked_select.default:
        return given.new_empty(given.numel())
    if func.name() == "torchvision::nms":
        return torch.arange(len(given), device=given.device)
    if func is _aten.bincount.default:
        return given.new_empty(max(1, args[2] if len(args) > 2 else 1), dtype=torch.int64)
    raise NotImplementedError(str(func))


def _as_places(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices with the places of all elements for each mask."""
    found: list[Tensor | None] = []
    for each in indices:
        if each is None or each.dtype not in (torch.bool, torch.uint8):
            found.append(each)
        else:
            found += [each.new_empty(each.numel(), dtype=torch.int64) for _ in range(each.ndim)]
    return found


class _Stream:
    """Order and overlap of streams are not rehearsed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _stream(*args: Any, **kwargs: Any) -> _Stream:
    return _Stream()


def _address(tensor: Tensor) -> int:
    return id(tensor)


class _DDP(DistributedDataParallel):
    """Its reducer gets its buckets back as they are: a fake process group has no result of an all-reduce."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

        def hook(state: Any, bucket: Any) -> Any:
            result: Any = torch.futures.Future()
            result.set_result(bucket.buffer())
            return result

        hook.__annotations__ = {}  # torch compares them with classes
        self.register_comm_hook(None, hook)
        self.logger = Mock()  # it times passes by a clock of the device


_PATCHES: dict[str, Any] = {
    "paceline.engine.strategies.ddp.DistributedDataParallel": _DDP,
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.is_initialized": lambda: True,
    "torch.cuda._lazy_init": lambda: None,
    "torch.cuda.device_count": lambda: NUM_DEVICES,
    "torch.cuda.current_device": lambda: 0,
    "torch.cuda.set_device": lambda device: None,
    "torch.cuda.is_bf16_supported": lambda *args, **kwargs: True,
    "torch.cuda.get_device_capability": lambda device=None: (9, 0),
    "torch.cuda.is_current_stream_capturing": lambda: False,
    "torch.cuda.manual_seed_all": lambda seed: None,
    "torch.cuda.get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
    "torch.cuda.set_rng_state": lambda state, device="cuda": None,
    "torch.cuda.max_memory_allocated": lambda device=None: 0,
    "torch.cuda.synchronize": lambda device=None: None,
    "torch.cuda.Stream": _Stream,
    "torch.cuda.Event": _Event,
    "torch.cuda.current_stream": _stream,
    "torch.cuda.stream": lambda stream: stream if stream is not None else nullcontext(),
    "torch.nn.parallel.distributed._verify_param_shape_across_processes": lambda *args: None,
    "torch.Tensor.record_stream": lambda tensor, stream: None,
}


@contextmanager
def fake_cuda(processes: int = 1) -> Iterator[FakeCuda]:
    """Inside, `cuda` is a device; with several processes, this is the first of them."""
    mode = FakeCuda()
    with ExitStack() as stack:
        for name, value in _PATCHES.items():
            stack.enter_context(patch(name, value))
        stack.enter_context(patch.object(FakeTensor, "data_ptr", _address))
        stack.enter_context(patch.object(nn.Module, "_apply", convert_module))
        stack.enter_context(patch.object(FakeTensorMode, "avoid_device_init", True))  # it is not there
        if processes > 1:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
        stack.callback(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
        stack.enter_context(mode.fake)
        stack.enter_context(mode)
        yield mode


class FirstOfSeveral(World):
    """The first of several processes: what it would get from others is what it has itself."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """As if all had the same."""
        return [tensor] * self.size

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor of this process."""
        return tensor


def fake_world(processes: int = 1) -> World:
    """The first of so many processes, with a device each."""
    kind = World if processes == 1 else FirstOfSeveral
    return kind(0, processes, 0, DEVICE, processes)
