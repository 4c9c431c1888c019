"""How a `random` input is drawn: an ordered table of rules over its name, dtype and shape.

The published workloads say `random` and mean one particular distribution per input, told from the
input's name: a norm's weight is ones, `cos` is the cosine of something, a projection is scaled by
its width. The published tolerances fit those draws and no others, so this *compatible* profile
follows them exactly. The first rule that applies wins; adding one is adding an entry to `RULES`.

Everything is drawn for n sets at once, into a view the caller owns: the judge fills its input
arenas without a second copy. Draws that one in-place call can make are made in place; the others
go through float32 temporaries that are cut into chunks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from .errors import ProblemError

__all__ = ["RULES", "Rule", "fill_random", "pack_e2m1", "rule_for", "torch_dtype"]

_CHUNK_ELEMENTS = 2**25
"""Elements a chunk may have: at 32 bytes of temporaries an element, 1 GiB."""
_FLOATS = {"float64", "float32", "float16", "bfloat16"}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a problem's dtype name, e.g. `bfloat16`.

    Raises:
        ProblemError: this torch build has no such dtype (unpacked `float4_e2m1` is in none).
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        hint = "; packed fp4 is float4_e2m1fn_x2" if name == "float4_e2m1" else ""
        raise ProblemError(f"torch {torch.__version__} has no dtype {name!r}{hint}")
    return dtype


class Rule(NamedTuple):
    """One way to draw an input, and the inputs it is for."""

    name: str
    """What the draw is, in a word or two."""
    applies: Callable[[str, str, tuple[int, ...]], bool]
    """(input name, dtype name, shape of one set) -> whether the rule is meant for it."""
    fill: Callable[[Tensor, Generator], None]
    """Fills a tensor [n, *shape] with n independent sets."""


def fill_random(out: Tensor, name: str, dtype: str, generator: Generator) -> None:
    """Fill `out` with n independent draws of the input `name`, by the compatible profile's rules.

    Args:
        out: shape [n, *shape], of the input's dtype; `float4_e2m1fn_x2` may also come as uint8
            (one byte is one element of two packed values). May be a strided view.
        name: the input's name; most rules go by it.
        dtype: the input's dtype by name.
        generator: on the device of `out`.

    Raises:
        ProblemError: `out` is not of the dtype named, or torch lacks that dtype.
    """
    expected = torch_dtype(dtype)
    if dtype == "float4_e2m1fn_x2":
        # Most builds have no operations on fp4 beyond copies: all work is done on the bytes.
        out, expected = out.view(torch.uint8), torch.uint8
    if out.dtype != expected:
        raise ProblemError(f"input {name!r} is {dtype}, but the tensor to fill is {out.dtype}")
    if out.numel():
        rule_for(name, dtype, tuple(out.shape[1:])).fill(out, generator)


def rule_for(name: str, dtype: str, shape: tuple[int, ...]) -> Rule:
    """The first rule that applies to an input; the last one applies to all."""
    return next(rule for rule in RULES if rule.applies(name, dtype, shape))


# ---- Fills: each writes n sets into a tensor [n, *shape] ------------------------------------


def _fill_float8(out: Tensor, generator: Generator) -> None:
    for part in _chunks(out):
        part.copy_(_normal_like(part, generator).clamp_(-2, 2))


def _fill_float4(out: Tensor, generator: Generator) -> None:
    for part in _chunks(out):
        values = torch.empty((*part.shape[:-1], 2 * part.shape[-1]), device=part.device)
        part.copy_(pack_e2m1(values.normal_(generator=generator)))


def _fill_integers(low: int, high: int) -> Callable[[Tensor, Generator], None]:
    def fill(out: Tensor, generator: Generator) -> None:
        for part in _sets(out):
            part.random_(low, high, generator=generator)

    return fill


def _fill_constant(value: float) -> Callable[[Tensor, Generator], None]:
    def fill(out: Tensor, generator: Generator) -> None:
        out.fill_(value)

    return fill


def _fill_uniform(low: float, high: float) -> Callable[[Tensor, Generator], None]:
    def fill(out: Tensor, generator: Generator) -> None:
        for part in _sets(out):
            part.uniform_(low, high, generator=generator)

    return fill


def _fill_normal(out: Tensor, generator: Generator) -> None:
    for part in _sets(out):
        part.normal_(generator=generator)


def _fill_scaled_normal(out: Tensor, generator: Generator) -> None:
    for part in _sets(out):
        part.normal_(0.0, 1 / math.sqrt(out.shape[-1]), generator=generator)


def _fill_causal_mask(out: Tensor, generator: Generator) -> None:
    """0 on and below the diagonal of the last two axes, the most negative finite value above."""
    size = out.shape[-1]
    column = torch.arange(size, device=out.device)
    zero = torch.zeros((), dtype=out.dtype, device=out.device)
    lowest = torch.full_like(zero, torch.finfo(out.dtype).min)
    rows = max(1, _CHUNK_ELEMENTS // size)
    for start in range(0, size, rows):
        block = column[None, :] > column[start : start + rows, None]
        out[..., start : start + rows, :].copy_(torch.where(block, lowest, zero))


def _fill_angle(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Generator], None]:
    """cos_ or sin_ of normal angles clipped to [-pi, pi]."""

    def fill(out: Tensor, generator: Generator) -> None:
        for part in _chunks(out):
            part.copy_(function(_normal_like(part, generator).clamp_(-math.pi, math.pi)))

    return fill


def _fill_positive(out: Tensor, generator: Generator) -> None:
    for part in _chunks(out):
        part.copy_(_normal_like(part, generator).abs_().add_(0.1))


def _fill_cumulative_decay(out: Tensor, generator: Generator) -> None:
    for part in _chunks(out, whole_last=True):
        steps = torch.empty(part.shape, dtype=_work_dtype(part), device=part.device)
        part.copy_(steps.uniform_(-0.1, 0.0, generator=generator).cumsum_(-1))


def _fill_softmax(out: Tensor, generator: Generator) -> None:
    for part in _chunks(out, whole_last=True):
        part.copy_(torch.softmax(_normal_like(part, generator), dim=-1))


# ---- Rules, in order ------------------------------------------------------------------------


def _dtype_is(*dtypes: str) -> Callable[[str, str, tuple[int, ...]], bool]:
    return lambda name, dtype, shape: dtype in dtypes


def _float_named(pattern: str, min_axes: int = 0) -> Callable[[str, str, tuple[int, ...]], bool]:
    regex = re.compile(pattern)
    return lambda name, dtype, shape: (
        dtype in _FLOATS and len(shape) >= min_axes and regex.search(name) is not None
    )


def _is_causal_mask(name: str, dtype: str, shape: tuple[int, ...]) -> bool:
    square = len(shape) >= 2 and shape[-1] == shape[-2]
    return dtype in _FLOATS and square and name in ("attention_mask", "causal_mask")


_NORM = r"(?:(?:^|_)norm|layernorm)\d*"

RULES: tuple[Rule, ...] = (
    Rule("float8", _dtype_is("float8_e4m3fn", "float8_e5m2"), _fill_float8),
    Rule("float4", _dtype_is("float4_e2m1fn_x2"), _fill_float4),
    Rule("coin", _dtype_is("bool"), _fill_integers(0, 2)),
    Rule("int8", _dtype_is("int8"), _fill_integers(-128, 128)),
    Rule("uint8", _dtype_is("uint8"), _fill_integers(0, 256)),
    Rule("integer", _dtype_is("int16", "int32", "int64"), _fill_integers(-1024, 1024)),
    Rule("norm weight", _float_named(rf"{_NORM}_weight$"), _fill_constant(1.0)),
    Rule("norm bias", _float_named(rf"{_NORM}_bias$"), _fill_constant(0.0)),
    Rule("causal mask", _is_causal_mask, _fill_causal_mask),
    Rule(
        "binary mask",
        _float_named("^(attention_mask|x_mask|text_mask|aspect_ratio_mask|drop_mask)$"),
        _fill_integers(0, 2),
    ),
    Rule("cosine", _float_named("^(cos|cos_cached|rope_cos)$"), _fill_angle(torch.cos_)),
    Rule("sine", _float_named("^(sin|sin_cached|rope_sin)$"), _fill_angle(torch.sin_)),
    Rule("positive", _float_named("(^|_)(rstd|std|var|variance)$"), _fill_positive),
    Rule("cumulative decay", _float_named("^A_cumsum$", min_axes=1), _fill_cumulative_decay),
    Rule("log decay rate", _float_named("^A_log$"), _fill_uniform(-5.0, -1.0)),
    Rule("decay rate", _float_named("^A$"), _fill_uniform(-1.0, -0.001)),
    Rule("log gate", _float_named("^g$"), _fill_uniform(-5.0, 0.0)),
    Rule(
        "softmax",
        _float_named("^(attn_weights|attention_weights|routing_weights|p_attn)$", min_axes=1),
        _fill_softmax,
    ),
    Rule(
        "projection",
        _float_named(r"^weight\d*$|_weights?$|_projs?$", min_axes=2),
        _fill_scaled_normal,
    ),
    Rule("normal", lambda name, dtype, shape: True, _fill_normal),
)
"""All rules, first match first. Source: the draws of the published workloads."""


# ---- Packed fp4 -----------------------------------------------------------------------------

_E2M1_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6, whose codes are 0 to 7."""


def pack_e2m1(values: Tensor) -> Tensor:
    """Round to E2M1 (fp4) and pack two codes a byte, the even index in the low nibble.

    Rounding is to nearest, ties to the even code; magnitudes above 6 saturate; the sign is bit 3.

    Args:
        values: float32 [..., 2 * k].

    Returns:
        uint8 [..., k]; view it as `torch.float4_e2m1fn_x2` where that dtype is wanted.
    """
    boundaries = torch.tensor(_E2M1_BOUNDARIES, dtype=torch.float32)
    # bucketize leaves a value equal to a boundary below it. Right where the code below is even;
    # between an odd code and the next the tie must go up, so that boundary is a hair lower.
    boundaries[1::2] = torch.nextafter(boundaries[1::2], torch.zeros(()))
    codes = torch.bucketize(values.abs(), boundaries.to(values.device), out_int32=True)
    codes = codes.to(torch.uint8) | ((values < 0).to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


# ---- Views ----------------------------------------------------------------------------------


def _work_dtype(part: Tensor) -> torch.dtype:
    return torch.float64 if part.dtype == torch.float64 else torch.float32


def _normal_like(part: Tensor, generator: Generator) -> Tensor:
    draw = torch.empty(part.shape, dtype=_work_dtype(part), device=part.device)
    return draw.normal_(generator=generator)


def _sets(out: Tensor) -> Iterator[Tensor]:
    """Views of `out` for in-place draws: all of it, or set by set on a CPU if it is strided.

    On a CPU torch draws into a strided tensor element by element, an order of magnitude slower
    than into a dense one; the sets of an arena are dense each. On a GPU one launch does it all.
    """
    if out.device.type == "cpu" and not out.is_contiguous():
        yield from out
    else:
        yield out


def _chunks(out: Tensor, *, whole_last: bool = False) -> Iterator[Tensor]:
    """Views that cover `out`, of at most `_CHUNK_ELEMENTS` elements each.

    With `whole_last` the last axis is never cut, whatever its length (a set's own axis: the
    leading axis counts the sets).
    """
    if out.numel() <= _CHUNK_ELEMENTS or (whole_last and out.dim() == 1):
        yield out
        return
    rows = max(1, _CHUNK_ELEMENTS // (out.numel() // out.shape[0]))
    for start in range(0, out.shape[0], rows):
        part = out[start : start + rows]
        if part.numel() > _CHUNK_ELEMENTS:
            yield from _chunks(part[0], whole_last=whole_last)
        else:
            yield part
