"""Models that hold and compute float16, with float32 weights behind them for the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.torch_private import tree_map
from paceline.models.norm import BATCH_NORMS, is_norm

Copies = dict[nn.Parameter, nn.Parameter]
"""The float16 copy of each float32 weight that has one."""


def halve(model: nn.Module, keep_norms: bool, has_masters: bool) -> Copies:
    """Make the model's weights float16, or give it float16 copies of them; norm layers may be kept.

    Shared weights stay shared.
    """
    copies: Copies = {}
    for module, name, parameter in list(_halved(model, keep_norms)):
        if not has_masters:
            parameter.data = parameter.data.half()
            continue
        if parameter not in copies:
            copies[parameter] = nn.Parameter(parameter.detach().half(), requires_grad=parameter.requires_grad)
        # By attribute, since recurrent layers keep a list of their weights up to date that way.
        setattr(module, name, copies[parameter])
    kept = {id(buffer) for norm in _kept(model, keep_norms) for buffer in norm.buffers(recurse=False)}
    for buffer in model.buffers():
        if buffer.is_floating_point() and id(buffer) not in kept:
            buffer.data = buffer.data.half()
    return copies


def cast_at_borders(model: nn.Module, keep_norms: bool) -> None:
    """Cast what goes into float16 weights to float16, around float32 norm layers both ways, and outputs to float32.

    Done at each module that holds weights, so that float32 made inside of a model is no mistake. What comes in
    dicts, such as the targets that a detector is given, is left unchanged.
    """
    for module in model.modules():
        if keep_norms and is_norm(module):
            # BatchNorm takes float16 beside its float32 weights, and keeps half the memory for the backward pass.
            if not isinstance(module, BATCH_NORMS):
                module.register_forward_pre_hook(_widen_inputs, with_kwargs=True)
                module.register_forward_hook(_halve_output)
        elif module is model or any(parameter.dtype == torch.float16 for parameter in module.parameters(recurse=False)):
            module.register_forward_pre_hook(_halve_inputs, with_kwargs=True)
    model.register_forward_hook(_widen_output)


def with_masters(model: nn.Module, copies: Copies) -> nn.Module:
    """A view of the model with the same names and buffers, but float32 master weights.

    It is for parameters, buffers and state dicts, not to be called.
    """
    master_of = {copy: master for master, copy in copies.items()}
    faces: dict[nn.Module, nn.Module] = {}

    def face(module: nn.Module) -> nn.Module:
        if module not in faces:
            made = faces[module] = object.__new__(type(module))
            parameters = {name: _master(one, master_of) for name, one in module._parameters.items()}
            children = {name: child and face(child) for name, child in module._modules.items()}
            made.__dict__.update(module.__dict__, _parameters=parameters, _modules=children)
        return faces[module]

    return face(model)


def _master(parameter: nn.Parameter | None, master_of: Mapping[nn.Parameter, nn.Parameter]) -> nn.Parameter | None:
    return None if parameter is None else master_of.get(parameter, parameter)


def _halved(model: nn.Module, keep_norms: bool) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """The weights to be cast, with their places; one that a norm layer shares with others is kept with it."""
    kept = {parameter for norm in _kept(model, keep_norms) for parameter in norm.parameters(recurse=False)}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter not in kept:
                yield module, name, parameter


def _kept(model: nn.Module, keep_norms: bool) -> list[nn.Module]:
    return [module for module in model.modules() if keep_norms and is_norm(module)]


def _casting(dtype: torch.dtype) -> Callable[[Any], Any]:
    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
        if type(value) in (list, tuple):
            return type(value)(map(cast, value))
        return value

    return cast


_to_half, _to_float = _casting(torch.float16), _casting(torch.float32)


def _halve_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return _to_half(args), {name: _to_half(value) for name, value in kwargs.items()}


def _widen_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return _to_float(args), {name: _to_float(value) for name, value in kwargs.items()}


def _halve_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return _to_half(output)


def _widen_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return tree_map(_to_float, output)
