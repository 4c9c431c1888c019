"""A reference in float64: what a problem computes when nothing rounds.

`run_in_float64` runs a reference on inputs widened to float64, under a mode that widens whatever
the reference narrows on its way: `.float()`, `.to(torch.bfloat16)`, `dtype=torch.float16` in a
factory or a softmax. What is left is the formula itself.

Quantisation is part of a formula, not of its precision: FP8 and FP4 conversions stay. A code can
turn on the last bit of what is converted, and one code more or less is an error far above any
tolerance. There are two answers to that, and it is the caller who chooses:

- The codes of the declared-precision run are used again (`Codes`). The float64 run then says what
  follows from the same codes; quantisation itself is checked elsewhere, to the bit
  (`sol_gym.quantization`). So packs are checked (`sol_gym.checking`).
- Codes are made anew, from float64. The difference to the declared-precision run then contains
  what its roundings do to codes, which is what a candidate may differ by. So candidates are measured
  (`sol_gym.sandbox.oracle`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Codes", "recording_codes", "run_in_float64"]

_WIDER: dict[torch.dtype, torch.dtype] = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
_NARROWING = (Tensor.float, Tensor.half, Tensor.bfloat16)
_QUANTIZED = frozenset(
    dtype
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2")
    if (dtype := getattr(torch, name, None)) is not None
)


@dataclass
class Codes:
    """Results of a run's conversions to FP8 and FP4 dtypes, in program order."""

    results: list[Tensor] = field(default_factory=list)


class _Recording(TorchFunctionMode):
    """Notes the result of every conversion to a quantised dtype."""

    def __init__(self, codes: Codes):
        super().__init__()
        self._codes = codes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _quantizes(args, result):
            self._codes.results.append(result)
        return result


class _Widening(TorchFunctionMode):
    """Turns every request for a float of 16 or 32 bits into one for float64."""

    def __init__(self, codes: Codes):
        super().__init__()
        self._codes = iter(codes.results)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NARROWING:
            result = args[0].double()
        elif func is Tensor.view and any(
            isinstance(a, torch.dtype) for a in (*args[1:], *kwargs.values())
        ):
            if args[0].is_floating_point() and args[0].dtype.itemsize > 1:
                raise TypeError("it looks at the bits of a float, which are others in float64")
            result = func(*args, **kwargs)
        else:
            # Tables made when the reference was loaded are still float32, hence the tensors too.
            result = func(*_widen(args), **_widen(kwargs))
        return next(self._codes, result) if _quantizes(args, result) else result


@contextmanager
def recording_codes() -> Iterator[Codes]:
    """Within this context every conversion to an FP8 or FP4 dtype is noted in what it yields."""
    codes = Codes()
    with _Recording(codes):
        yield codes


def run_in_float64(
    run: Callable[..., Any], arguments: list[Any], codes: Codes | None = None
) -> list[Tensor]:
    """The outputs of `run`, computed in float64.

    Args:
        run: a reference's function, or any that is written in torch operations; it does not look
            at the bits of a float.
        arguments: tensors and Python numbers in call order; floating-point tensors of 16 and 32
            bits are widened, all others (FP8 and FP4 too) are passed as they are.
        codes: of a run in declared precision on the same arguments (`recording_codes`); without
            them every conversion to FP8 or FP4 is made anew, from float64.

    Returns:
        The outputs: float64 where the reference's are floating point of 16 or 32 bits.

    Raises:
        TypeError: it looks at the bits of a float. Whatever else `run` raises.
        torch.OutOfMemoryError: float64 needs up to four times the memory.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), _Widening(codes or Codes()):
            returned = run(*map(_widen, arguments))
    finally:
        torch.set_default_dtype(before)
    return [_widen(output) for output in _as_list(returned)]


def _quantizes(args: tuple[Any, ...], result: Any) -> bool:
    return (
        isinstance(result, Tensor)
        and result.dtype in _QUANTIZED
        and bool(args)
        and isinstance(args[0], Tensor)
        and args[0].dtype not in _QUANTIZED
    )


def _widen(value: Any) -> Any:
    """Tensors, dtypes, and containers of them, with floats of 64 bits."""
    if isinstance(value, Tensor):
        wide = _WIDER.get(value.dtype)
        return value if wide is None else value.to(wide)
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    if isinstance(value, list) or type(value) is tuple:
        return type(value)(map(_widen, value))
    if isinstance(value, dict):
        return {key: _widen(item) for key, item in value.items()}
    return value


def _as_list(returned: Any) -> list[Tensor]:
    if isinstance(returned, dict):
        returned = tuple(returned.values())
    return list(returned) if isinstance(returned, tuple | list) else [returned]
