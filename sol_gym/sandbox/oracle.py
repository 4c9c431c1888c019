"""A reference run in float64: what it would return if no step of it rounded.

The difference between the reference and its oracle is the error that the declared precision itself
makes, codes that fall otherwise for it included; `precision` measures candidates by it.
`sol_gym.float64` says how a reference is run so.
"""

from __future__ import annotations

from typing import Any

import torch

from ..float64 import run_in_float64
from ..problem import TensorArg
from .reference import InvalidReference, Reference

__all__ = ["OracleUnsupported", "oracle_outputs"]


class OracleUnsupported(Exception):
    """The reference does something that has no float64 counterpart, e.g. reads a float's bits."""


def oracle_outputs(
    reference: Reference, arguments: list[Any], outputs: dict[str, TensorArg]
) -> list[torch.Tensor]:
    """The reference's outputs, computed in float64; float8 and float4 codes are made from it.

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
    try:
        results = run_in_float64(lambda *given: reference.returned([*given], outputs), arguments)
    except InvalidReference as error:
        raise OracleUnsupported(f"no float64 run of the reference: {error}") from None
    for spec, result in zip(outputs.values(), results, strict=True):
        if not isinstance(result, torch.Tensor) or tuple(result.shape) != spec.shape:
            raise OracleUnsupported(f"{spec.name!r} has another shape in float64")
    return results
