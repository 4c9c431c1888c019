"""A reference run in float64: what it would return if no step of it rounded.

The reference's source is left as it is. While it runs, a function mode turns every step's float32,
float16 and bfloat16 into float64 (explicit casts, `dtype=` arguments, `.float()`, constants and
the default dtype), so that the rounding points vanish. Quantising steps are part of a contract and
stay: casts to float8 and packed float4 are done as written, and so are integers.

The difference between the reference and its oracle is the error that the declared precision
itself makes. `precision` measures candidates by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..problem import TensorArg
from .reference import InvalidReference, Reference

__all__ = ["OracleUnsupported", "oracle_outputs"]

_NARROW = {torch.float32, torch.float16, torch.bfloat16}
_WIDER: dict[torch.dtype, torch.dtype] = {
    **dict.fromkeys(_NARROW, torch.float64),
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
_CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


class OracleUnsupported(Exception):
    """The reference does something that has no float64 counterpart, e.g. reads a float's bits."""


def oracle_outputs(
    reference: Reference, arguments: list[Any], outputs: dict[str, TensorArg]
) -> list[torch.Tensor]:
    """The reference's outputs, computed in float64.

    Args:
        reference: the problem's reference.
        arguments: inputs in call order, in their declared dtypes; they are not changed.
        outputs: the declared outputs.

    Returns:
        One tensor an output, of its declared shape: float64 where a float32, float16 or bfloat16
        is declared, else of the declared dtype.

    Raises:
        OracleUnsupported: the reference cannot be promoted.
        torch.OutOfMemoryError: float64 needs up to four times the memory.
    """
    wide = [_widen(value) for value in arguments]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Promote():
            results = reference.returned(wide, outputs)
    except torch.OutOfMemoryError:
        raise
    except (InvalidReference, OracleUnsupported) as error:
        raise OracleUnsupported(f"no float64 run of the reference: {error}") from None
    finally:
        torch.set_default_dtype(before)
    for spec, result in zip(outputs.values(), results, strict=True):
        if not isinstance(result, torch.Tensor) or tuple(result.shape) != spec.shape:
            raise OracleUnsupported(f"{spec.name!r} has another shape in float64")
    return [result.double() if result.dtype in _NARROW else result for result in results]


class _Promote(TorchFunctionMode):
    """Every torch function called below runs in float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _CASTS:
            return args[0].double()
        if func is torch.Tensor.view and any(isinstance(a, torch.dtype) for a in args[1:]):
            if args[0].is_floating_point() and args[0].dtype.itemsize > 1:
                raise OracleUnsupported("it looks at the bits of a float")
            return func(*args, **(kwargs or {}))
        # Tables made when the reference was loaded are still float32, hence the tensors too.
        args, kwargs = _widen(args), _widen(kwargs or {})
        return func(*args, **kwargs)


def _widen(value: Any) -> Any:
    """Tensors, dtypes, and containers of them, promoted to float64."""
    if isinstance(value, torch.Tensor):
        wide = _WIDER.get(value.dtype)
        return value if wide is None else value.to(wide)
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(map(_widen, value))
    if isinstance(value, list):
        return [_widen(item) for item in value]
    if isinstance(value, dict):
        return {key: _widen(item) for key, item in value.items()}
    return value
