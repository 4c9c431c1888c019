"""How much memory a reference needs, found without that memory.

The reference runs at full size on meta tensors, which have shapes but no storage, under a mode that
adds up what is alive after every operation. Integers and booleans stay real, since they decide
shapes: page tables, sequence bounds, routing. Where integers are made from floats (a top-k over
logits), uniformly random ones take their place, as the published draws give them, and counts of
such integers are even.

The figure is the tensors' own bytes. It leaves out what an allocator adds by rounding and what
libraries take as workspace, so it is an estimate, and mostly a slight underestimate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .draws import torch_dtype
from .inputs import load_generator
from .problem import CustomInput, Problem, ScalarInput, Workload
from .sandbox.reference import Reference

__all__ = ["LiveBytes", "reference_peak_bytes"]

_SMALL = 1 << 12
"""Elements up to which floats are real, for what Python reads of them (a scale, a limit)."""
_LARGE = 1 << 24
"""Elements from which integers and booleans are no longer real either; such are masks."""
_MANY = 1000
"""Tensors alive at once from which on the peak is not followed to the byte."""
_META = torch.device("meta")


class LiveBytes(TorchDispatchMode):
    """Adds up the bytes of all tensors that are made under it and still alive.

    Example:
        >>> with LiveBytes() as live:
        ...     result = run(*inputs)
        >>> live.peak
        33554432
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        """The largest sum so far; tensors that were there before are not counted."""
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._now = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = self.execute(func, args, kwargs or {})
        operands = {_memory(t) for t in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            memory = _memory(tensor)
            if memory not in operands and memory not in self._alive:
                storage = tensor.untyped_storage()
                self._alive[memory] = (StorageWeakRef(storage), storage.nbytes())
                self._now += storage.nbytes()
        # Looking through thousands at every new peak would take minutes: there, within 1 %.
        slack = self.peak >> 7 if len(self._alive) > _MANY else 0
        if self._now > self.peak + slack:
            self._forget_freed()
            self.peak = max(self.peak, self._now)
        return result

    def execute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do the operation."""
        return func(*args, **kwargs)

    def _forget_freed(self) -> None:
        for memory, (reference, size) in list(self._alive.items()):
            if reference.expired():
                del self._alive[memory]
                self._now -= size


class _WithoutFloats(LiveBytes):
    """The same on meta tensors: large floats are never made, integers are real."""

    def execute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        operands = list(_tensors((args, kwargs)))
        name = func._schema.name.removeprefix("aten::")
        if not operands:
            device = {"device": _META} if _makes_large(func, args, kwargs) else {}
            return func(*args, **{**kwargs, **device})
        if not any(t.is_meta or t.numel() > _LARGE for t in operands):
            return _map(_without_content, func(*args, **kwargs))
        first = operands[0]
        if name == "_local_scalar_dense":
            return 0.5 if first.is_floating_point() else 1
        if name == "nonzero":
            return torch.nonzero(torch.rand(first.shape) < 0.5)
        if name == "bincount":
            return _even_counts(first.numel(), *args[1:], **kwargs)
        if func._schema.is_mutable and not first.is_meta:
            return first  # Written from floats that have no values; only its size matters.
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _META}
        result = func(*_map(_to_meta, args), **_map(_to_meta, kwargs))
        if name in _CHOICES and first.dim():
            return _map(lambda t: _random_indices(t, first.shape[-1]), result)
        return result


_CHOICES = frozenset(("topk", "sort", "argsort", "argmax", "argmin", "max", "min"))
"""Operations that give positions along an axis."""


def reference_peak_bytes(problem: Problem, workload: Workload) -> int:
    """Bytes that the reference's own tensors take at once, its outputs included.

    The inputs are not counted. The reference is executed and must be trusted.

    Args:
        problem: with the workload.
        workload: one of any size.

    Raises:
        Exception: whatever the reference raises where its course depends on values of floats.
    """
    mode = _WithoutFloats()
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        run = Reference(problem).run
        arguments = _arguments(problem, workload)
        with torch.no_grad(), mode:
            returned = run(*arguments)
        del returned
    finally:
        torch.random.set_rng_state(generator_state)
    return mode.peak


def _arguments(problem: Problem, workload: Workload) -> list[Any]:
    tensors = problem.tensors(workload)
    given = {n: k.value for n, k in workload.inputs.items() if isinstance(k, ScalarInput)}
    values: dict[str, Any] = dict(given)
    custom = [n for n, kind in workload.inputs.items() if isinstance(kind, CustomInput)]
    wanted = [
        n
        for n in custom
        if n not in tensors or "float" not in tensors[n].dtype or tensors[n].numel <= _SMALL
    ]
    if wanted:
        # The generator runs without large floats too.
        with torch.no_grad(), _WithoutFloats():
            made = load_generator(problem)(
                {**problem.definition.bind(workload.axes), **given}, torch.device("cpu")
            )
        values |= {name: made[name] for name in wanted}
    for name, arg in tensors.items():
        dtype = torch_dtype(arg.dtype)
        if name not in values:
            if "float" in arg.dtype:
                values[name] = torch.empty(arg.shape, dtype=dtype, device=_META)
            elif arg.dtype == "bool":
                values[name] = torch.rand(arg.shape) < 0.5
            else:
                values[name] = torch.zeros(arg.shape, dtype=dtype)
    return [values[name] for name in problem.definition.inputs]


def _makes_large(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if not any(a.name == "device" for a in func._schema.arguments):
        return False
    like = func(*args, **{**kwargs, "device": _META})
    return isinstance(like, Tensor) and _is_large(like)


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() > (_SMALL if tensor.is_floating_point() else _LARGE)


def _without_content(tensor: Tensor) -> Tensor:
    return _to_meta(tensor) if _is_large(tensor) else tensor


def _to_meta(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)


def _random_indices(tensor: Tensor, length: int) -> Tensor:
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        return tensor
    return torch.randint(0, max(length, 1), tensor.shape, dtype=tensor.dtype)


def _even_counts(total: int, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """`total` elements spread over bins, as uniform draws do on average."""
    if weights is not None or minlength == 0:
        raise NotImplementedError("bincount of unknown values with weights, or without minlength")
    counts = torch.full((minlength,), total // minlength)
    counts[: total % minlength] += 1
    return counts


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for item in value:
            yield from _tensors(item)


def _map(function: Any, value: Any) -> Any:
    """`value` with `function` applied to all tensors in its lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {k: _map(function, v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return (
            type(value)(_map(function, v) for v in value) if type(value) in (tuple, list) else value
        )
    return value
