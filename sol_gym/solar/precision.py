"""Number formats that values fit exactly, and the units a contraction may therefore run on.

A float32 matrix product of operands that are exact upcasts of bfloat16 values can be done by
bfloat16 tensor cores without any loss, and a product of dequantised 4-bit values by 4-bit ones. So
what counts is not the dtype a reference computes in but the narrowest format that holds the values
(a separate scale per block left aside, for it can be applied to partial sums).

Where that cannot be told, the narrower format is assumed: a faster unit makes a smaller bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Format = Literal["fp4", "fp8", "bf16", "fp16", "fp32", "fp64"]
"""Narrowest number format that holds a tensor's values, up to scales."""
WorkClass = Literal[
    "nvfp4_tc", "fp8_tc", "bf16_tc", "fp16_tc", "tf32_tc", "fp32", "fp64", "fp32_fma"
]
"""Unit and precision of contraction work; `fp32` is any way that is as accurate as float32."""

_ORDER: dict[str, int] = {"fp4": 0, "fp8": 1, "bf16": 2, "fp16": 2, "fp32": 3, "fp64": 4}

_OF_DTYPE: dict[torch.dtype, Format] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.complex64: "fp32",
    torch.complex128: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.int8: "fp8",  # integer tensor cores run at the fp8 rate
    # Bytes are most often packed or unpacked 4-bit codes, booleans are 0 and 1.
    torch.uint8: "fp4",
    torch.bool: "fp4",
    torch.int16: "fp32",
    torch.int32: "fp32",
    torch.int64: "fp64",
}
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def format_of(dtype: torch.dtype) -> Format:
    """The format of a dtype; unknown ones count as the narrowest."""
    return _OF_DTYPE.get(dtype, "fp4")


def narrower(a: Format, b: Format) -> Format:
    """The narrower of two formats."""
    return a if _ORDER[a] <= _ORDER[b] else b


def wider(a: Format, b: Format) -> Format:
    """The wider of two formats."""
    return a if _ORDER[a] >= _ORDER[b] else b


def widest(formats: Sequence[Format]) -> Format:
    """The widest of one or more formats."""
    return max(formats, key=lambda format: _ORDER[format])


def is_quantised(format: Format) -> bool:
    """Whether a format has 8 bits or fewer."""
    return _ORDER[format] <= _ORDER["fp8"]


def format_of_content(content: Tensor) -> Format:
    """The narrowest format that holds all of a small tensor's values exactly."""
    own = format_of(content.dtype)
    if content.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not content.numel():
        return own
    values = content.detach().float()
    if torch.isin(values.abs(), _E2M1).all():
        return "fp4"
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float16):
        if torch.equal(values.to(dtype).float(), values):
            return narrower(format_of(dtype), own)
    return own


def work_class(left: Format, right: Format, *, full_precision: bool) -> WorkClass:
    """The units a contraction of two operands may run on.

    Args:
        left: format of one operand.
        right: format of the other.
        full_precision: whether the result reaches an output with float32 precision. Where every
            path rounds to 16 bits, 16-bit operands with float32 accumulation lose no more than
            the rounding does.
    """
    widest = wider(left, right)
    if widest == "fp64":
        return "fp64" if full_precision else "bf16_tc"
    if widest == "fp32":
        return "fp32" if full_precision else "bf16_tc"
    if widest == "fp16":
        return "fp16_tc"
    if widest == "bf16":
        return "bf16_tc"
    return "fp8_tc" if widest == "fp8" else "nvfp4_tc"
