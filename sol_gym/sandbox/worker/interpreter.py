"""Triton's interpreter, corrected: bfloat16 and FP8 with the arithmetic of a GPU.

Under TRITON_INTERPRET=1 Triton runs kernels with numpy, which knows neither type; the interpreter
keeps them as uint16 and uint8. Often (seen in Triton 3.4, 3.6 and 3.9) it computes on those bit
patterns as if they were numbers (sums, comparisons, `tl.dot`) and truncates where a GPU rounds, so
that an honest kernel comes out wrong. `correct_interpreter` replaces exactly those functions that
a probe shows to be wrong, so a Triton that has been mended is left alone.

What "as on a GPU" means here, from the PTX that Triton emits for sm_90:

- to bfloat16: nearest, ties to even; overflow is infinity; NaN is 0x7fff (`cvt.rn.bf16.f32`).
- to FP8 (e4m3fn, e5m2): nearest, ties to even; overflow and infinity become the largest finite
  value; NaN is 0x7f (`cvt.rn.satfinite.e4m3x2.f32`).
- bfloat16 operators: computed in float32 and rounded once, which for +, -, *, / is exact rounding.
- `tl.dot`: exact products, sums in float32.

Still kinder than a GPU: `tl.sum` and the scans of bfloat16 round once at the end, not at every
addition; `tl.dot` of float32 does not round its operands to TF32. Still missing, and an error in
the kernel: libdevice and inline assembly, and in Triton 3.4 and 3.6 `tl.dot_scaled`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["correct_interpreter", "interpreter_faults"]


def correct_interpreter() -> list[str]:
    """Mend `triton.runtime.interpreter` of this process where it is wrong.

    Safe to call again, and never raises: a replacement that does not fit this Triton, or does not
    help, is taken back. Triton decides at its first import whether kernels are interpreted, so
    TRITON_INTERPRET=1 must be set before that; calling this does not change it.

    Returns:
        Names of what was replaced, e.g. "InterpreterBuilder.create_dot"; empty where nothing was
        wrong, Triton is not installed, or its interpreter is built in an unknown way.
    """
    interpreter = _load()
    if interpreter is None or not _knows_storage(interpreter):
        return []
    return [c.name for c in _CORRECTIONS if not c.holds(interpreter) and c.install(interpreter)]


def interpreter_faults() -> list[str]:
    """Names of what is wrong in this process's interpreter now (slow only at Triton's import).

    Before `correct_interpreter` this is what it will try to mend, afterwards what stays wrong.
    """
    interpreter = _load()
    if interpreter is None:
        return []
    if not _knows_storage(interpreter):
        return ["storage of bfloat16 and FP8 (built in an unknown way, nothing was checked)"]
    return [c.name for c in _CORRECTIONS if not c.holds(interpreter)]


def _load() -> Any:
    try:
        import triton.runtime.interpreter as interpreter
    except Exception:  # Triton's import runs much code; whatever fails there is no fault of ours.
        return None
    return interpreter


def _knows_storage(interpreter: Any) -> bool:
    """Whether narrow floats are kept as bit patterns, which all replacements rest on."""
    try:
        return all(
            interpreter._get_np_dtype(_dtype(interpreter.tl, name)) == fmt.storage
            for name, fmt in _FORMATS.items()
        )
    except Exception:
        return False


# -- number formats ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Format:
    """A binary floating-point format of at most 16 bits: sign, exponent, `mantissa` bits."""

    storage: type[np.unsignedinteger]
    mantissa: int
    bias: int
    largest: int
    """Bit pattern of the largest finite value."""
    overflow: int
    """Bit pattern that larger values and infinity are rounded to."""
    infinity: int | None
    nan: int

    @property
    def sign(self) -> int:
        return 1 << (8 * np.dtype(self.storage).itemsize - 1)


_FORMATS = {  # By the name of Triton's dtype.
    "bf16": _Format(np.uint16, 7, 127, 0x7F7F, 0x7F80, 0x7F80, 0x7FFF),
    "fp8e4nv": _Format(np.uint8, 3, 7, 0x7E, 0x7E, None, 0x7F),
    "fp8e5": _Format(np.uint8, 2, 15, 0x7B, 0x7B, 0x7C, 0x7F),
}
_STANDARD = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}


def _dtype(tl: Any, name: str) -> Any:
    """Triton's dtype of that name: `tl.bfloat16` is named "bf16", `tl.float8e5` "fp8e5"."""
    return getattr(tl, name.replace("bf16", "bfloat16").replace("fp", "float"))


def _encode(values: np.ndarray, fmt: _Format, toward_zero: bool = False) -> np.ndarray:
    """Bit patterns of float16, float32 or float64 values, each rounded once."""
    if values.dtype != np.float64:
        values = values.astype(np.float32, copy=False)
    wide = values.dtype == np.float64
    uint: Any = np.uint64 if wide else np.uint32
    mantissa, bias, width = (52, 1023, 64) if wide else (23, 127, 32)
    infinity = uint((1 << (width - 1)) - (1 << mantissa))
    bits = values.view(uint)
    magnitude = bits & uint((1 << (width - 1)) - 1)

    exponent = np.maximum(magnitude >> uint(mantissa), uint(1))
    significand = magnitude - ((exponent - uint(1)) << uint(mantissa))
    # Below the format's smallest normal number its unit stays that number's, so more bits go.
    lowest = uint(bias - fmt.bias + 1)
    unit = np.maximum(exponent, lowest)
    shift = np.minimum(unit - exponent, uint(fmt.mantissa + 2)) + uint(mantissa - fmt.mantissa)
    kept = significand >> shift
    if not toward_zero:
        # Just under half a unit, and the rest of it where the kept part is odd: ties to even.
        half = (uint(1) << (shift - uint(1))) - uint(1) + (kept & uint(1))
        kept = (significand + half) >> shift
    # A significand that rounded up to the next power of two carries into the exponent by itself.
    code = ((unit - lowest) << uint(fmt.mantissa)) + kept

    beyond: Any = uint(fmt.overflow)
    if toward_zero:
        beyond = np.where(magnitude < infinity, uint(fmt.largest), beyond)
    code = np.where(code > uint(fmt.largest), beyond, code)
    code |= (bits >> uint(width - 1)) * uint(fmt.sign)
    return np.where(magnitude > infinity, uint(fmt.nan), code).astype(fmt.storage)


def _decode(data: np.ndarray, fmt: _Format) -> np.ndarray:
    """Float32 values of bit patterns, exactly."""
    if fmt.storage is np.uint16:
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _table(fmt)[data]


@functools.cache
def _table(fmt: _Format) -> np.ndarray:
    """The values of all 256 codes of an 8-bit format."""
    code = np.arange(128)
    exponent, fraction = code >> fmt.mantissa, code & ((1 << fmt.mantissa) - 1)
    significand = np.where(exponent > 0, fraction + (1 << fmt.mantissa), fraction)
    power = np.maximum(exponent, 1) - fmt.bias - fmt.mantissa
    values = np.ldexp(significand.astype(np.float32), power)
    values[code > fmt.largest] = np.nan
    if fmt.infinity is not None:
        values[fmt.infinity] = np.inf
    return np.concatenate([values, -values])


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
_E2M1_VALUES = np.concatenate([_E2M1, -_E2M1])


# -- tensors of the interpreter -----------------------------------------------------------------


def _name(handle: Any) -> str:
    return handle.dtype.scalar.name


def _is_narrow(handle: Any) -> bool:
    """Whether a handle holds bit patterns; a comparison's result may carry its operands' dtype."""
    fmt = _FORMATS.get(_name(handle))
    return fmt is not None and handle.data.dtype == fmt.storage


def _values(handle: Any) -> np.ndarray:
    """What a handle stands for: float32 where it holds bit patterns, else its data."""
    return _decode(handle.data, _FORMATS[_name(handle)]) if _is_narrow(handle) else handle.data


def _handle(interpreter: Any, values: np.ndarray, dtype: Any) -> Any:
    """A handle of `dtype` for values, rounded where the type is narrow."""
    scalar = dtype.scalar
    if scalar.name in _FORMATS:
        if values.dtype.kind != "f":  # 53 bits hold every integer up to 32 bits.
            values = values.astype(np.float64)
        data = _encode(values, _FORMATS[scalar.name])
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            data = values.astype(interpreter._get_np_dtype(scalar), copy=False)
    return interpreter.TensorHandle(data, scalar)


# -- corrections ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Correction:
    """One attribute of the interpreter's module, or of a class in it."""

    name: str
    """Dotted path from the module."""
    probe: Callable[[_Lab], bool]
    """Whether the interpreter computes what it should; may raise."""
    build: Callable[[Any, Any], Callable]
    """The replacement, from the module and the original."""
    adds: bool
    """Whether it may be put where there is none; else a missing attribute is not understood."""

    def holds(self, interpreter: Any) -> bool:
        try:
            with np.errstate(all="ignore"):
                return bool(self.probe(_Lab(interpreter)))
        except Exception:  # Computing on bit patterns also ends in shapes and types that clash.
            return False

    def install(self, interpreter: Any) -> bool:
        """Replace the attribute; False, with the original back in place, where that is no cure."""
        path, _, attribute = self.name.rpartition(".")
        owner = getattr(interpreter, path, None) if path else interpreter
        original = getattr(owner, attribute, None)
        if owner is None or (original is None and not self.adds):
            return False
        setattr(owner, attribute, self.build(interpreter, original))
        if self.holds(interpreter):
            return True
        if original is None:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, original)
        return False


_CORRECTIONS: list[_Correction] = []
_Build = Callable[[Any, Any], Callable]


def _corrects(
    name: str, probe: Callable[[_Lab], bool], adds: bool = False
) -> Callable[[_Build], _Build]:
    def register(build: _Build) -> _Build:
        _CORRECTIONS.append(_Correction(name, probe, build, adds))
        return build

    return register


class _Lab:
    """What probes work with: handles of known values, and a builder to call."""

    def __init__(self, interpreter: Any) -> None:
        self.interpreter = interpreter
        self.tl = interpreter.tl
        self.ir = interpreter._ir
        self.builder = interpreter.InterpreterBuilder()

    def bits(self, dtype: str, *codes: int) -> Any:
        fmt = _FORMATS[dtype]
        return self.interpreter.TensorHandle(np.array(codes, fmt.storage), _dtype(self.tl, dtype))

    def f32(self, *values: float) -> Any:
        return self.interpreter.TensorHandle(np.array(values, np.float32), self.tl.float32)

    def bf16(self, *values: float) -> Any:
        """Of values that bfloat16 holds exactly."""
        return self.bits("bf16", *(np.array(values, np.float32).view(np.uint32) >> 16).tolist())

    def tensor(self, handle: Any) -> Any:
        return self.tl.core.tensor(handle, self.tl.block_type(handle.dtype, [handle.data.size]))

    @staticmethod
    def same(got: Any, expected: Any) -> bool:
        return got.data.dtype == expected.data.dtype and np.array_equal(got.data, expected.data)


def _probe_conversions(lab: _Lab) -> bool:
    def to(source: Any, dtype: str, mode: Any) -> Any:
        return lab.builder.create_fp_to_fp(source, _dtype(lab.tl, dtype), mode)

    nearest, zero = lab.ir.ROUNDING_MODE.RTNE, lab.ir.ROUNDING_MODE.RTZ
    e4m3 = lab.f32(1.0625, 1.1875, -1.9375, 500, np.inf, 2**-10, 1.5 * 2**-9, np.nan)
    e5m2 = lab.f32(1.125, 1.375, 1e9, 1.5 * 2**-16)
    codes = lab.bits("fp8e4nv", 0x01, 0x38, 0xFE)
    return (
        lab.same(to(lab.f32(1.00390625, -1.01171875), "bf16", nearest), lab.bf16(1, -1.015625))
        and lab.same(to(lab.f32(1.00585938), "bf16", zero), lab.bf16(1))
        and lab.same(
            to(e4m3, "fp8e4nv", nearest),
            lab.bits("fp8e4nv", 0x38, 0x3A, 0xC0, 0x7E, 0x7E, 0x00, 0x02, 0x7F),
        )
        and lab.same(to(e5m2, "fp8e5", nearest), lab.bits("fp8e5", 0x3C, 0x3E, 0x7B, 0x02))
        and lab.same(to(codes, "fp32", None), lab.f32(2**-9, 1, -448))
        and lab.same(to(lab.bits("fp8e5", 0x01, 0x7C), "fp32", None), lab.f32(2**-16, np.inf))
    )


@_corrects("_convert_float", _probe_conversions)
def _convert_float(interpreter: Any, original: Any) -> Callable:
    """Conversions between floating-point types; returns bit patterns."""

    def convert_float(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        source, target = input_dtype.scalar.name, output_dtype.scalar.name
        known = {*_FORMATS, *_STANDARD}
        if not {source, target} <= known or not {source, target} & set(_FORMATS):
            return original(input, input_dtype, output_dtype, rounding_mode)
        if source in _FORMATS:
            values = _decode(input, _FORMATS[source])
        else:
            values = input.view(_STANDARD[source])
        if target in _FORMATS:
            toward_zero = rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ
            return _encode(values, _FORMATS[target], toward_zero)
        with np.errstate(over="ignore"):
            converted = values.astype(_STANDARD[target])
        return converted.view(f"u{converted.itemsize}")

    return convert_float


def _probe_casts(lab: _Lab) -> bool:
    tl, cast = lab.tl, lab.builder.cast_impl
    ints = lab.interpreter.TensorHandle(np.array([-3, 257], np.int32), tl.int32)
    double = lab.interpreter.TensorHandle(np.array([1 + 2**-8 + 2**-40]), tl.float64)
    return (
        lab.same(cast(lab.f32(1.00585938, 3.4e38), tl.bfloat16), lab.bf16(1.0078125, np.inf))
        and cast(lab.f32(np.nan), tl.bfloat16).data[0] & 0x7FFF > 0x7F80
        and lab.same(cast(double, tl.bfloat16), lab.bf16(1.0078125))
        and lab.same(cast(ints, tl.bfloat16), lab.bf16(-3, 256))
        and lab.same(cast(lab.bf16(1.5, -2), tl.float32), lab.f32(1.5, -2))
        and cast(lab.bf16(1.5, -2), tl.int32).data.tolist() == [1, -2]
    )


@_corrects("InterpreterBuilder.cast_impl", _probe_casts)
def _cast_impl(interpreter: Any, original: Any) -> Callable:
    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if _is_narrow(src) or dst_type.scalar.name in _FORMATS:
            return _handle(interpreter, _values(src), dst_type)
        return original(self, src, dst_type)

    return cast_impl


@_corrects(
    "InterpreterBuilder.get_bf16",
    lambda lab: lab.same(lab.builder.get_bf16(1.00585938), lab.bf16(1.0078125)),
    adds=True,
)
def _get_bf16(interpreter: Any, original: Any) -> Callable:
    def get_bf16(self: Any, value: float) -> Any:
        return _handle(interpreter, np.array([value], np.float32), interpreter.tl.bfloat16)

    return get_bf16


_BITWISE = {np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift}


@_corrects(
    "InterpreterBuilder.binary_op",
    lambda lab: (
        lab.same(lab.builder.create_fadd(lab.bf16(1, -2), lab.bf16(1, 0.5)), lab.bf16(2, -1.5))
        and lab.builder.create_fcmpOLT(lab.bf16(-1, 2), lab.bf16(1, -3)).data.tolist()
        == [True, False]
    ),
)
def _binary_op(interpreter: Any, original: Any) -> Callable:
    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if op in _BITWISE or not (_is_narrow(lhs) or _is_narrow(rhs)):
            return original(self, lhs, rhs, op)
        result = op(_values(lhs), _values(rhs))
        dtype = interpreter.tl.int1 if result.dtype == np.bool_ else lhs.dtype
        return _handle(interpreter, result, dtype)

    return binary_op


@_corrects(
    "InterpreterBuilder.unary_op",
    lambda lab: lab.same(lab.builder.create_exp2(lab.bf16(1, -1)), lab.bf16(2, 0.5)),
)
def _unary_op(interpreter: Any, original: Any) -> Callable:
    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        if _is_narrow(arg):
            return _handle(interpreter, op(_values(arg)), arg.dtype)
        return original(self, arg, op)

    return unary_op


@_corrects(
    "InterpreterBuilder.ternary_op",
    lambda lab: lab.same(
        lab.builder.ternary_op(lab.bf16(-2, 3), lab.bf16(-1, -1), lab.bf16(1, 1), np.clip),
        lab.bf16(-1, 1),
    ),
)
def _ternary_op(interpreter: Any, original: Any) -> Callable:
    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        if op is np.where or not _is_narrow(other):  # Selecting bit patterns is right.
            return original(self, lhs, rhs, other, op)
        result = op(_values(lhs), _values(rhs), _values(other))
        return _handle(interpreter, result, other.dtype)

    return ternary_op


@_corrects(
    "InterpreterBuilder.create_fma",
    lambda lab: lab.same(
        lab.builder.create_fma(lab.bf16(1.5), lab.bf16(1.5), lab.bf16(-0.25)), lab.bf16(2)
    ),
)
def _create_fma(interpreter: Any, original: Any) -> Callable:
    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not _is_narrow(z):
            return original(self, x, y, z)
        # In float64, so that only the end rounds.
        product = np.multiply(_values(x), _values(y), dtype=np.float64)
        return _handle(interpreter, product + _values(z), z.dtype)

    return create_fma


def _probe_dot(lab: _Lab) -> bool:
    zero = lab.interpreter.TensorHandle(np.zeros((1, 1), np.float32), lab.tl.float32)

    def dot(a: Any, b: Any) -> float:
        a.data, b.data = a.data.reshape(1, -1), b.data.reshape(-1, 1)
        return lab.builder.create_dot(a, b, zero, None, 0).data.item()

    half = lab.interpreter.TensorHandle(np.array([512, 2**-10], np.float16), lab.tl.float16)
    return (
        dot(lab.bf16(1.5, -2), lab.bf16(2, 0.5)) == 2
        and dot(lab.bits("fp8e4nv", 0x01, 0x38), lab.bits("fp8e4nv", 0x38, 0x40)) == 2 + 2**-9
        and dot(lab.bits("fp8e5", 0x01, 0x3C), lab.bits("fp8e4nv", 0x38, 0x40)) == 2 + 2**-16
        and dot(half, half.clone()) == 2**18
    )


@_corrects("InterpreterBuilder.create_dot", _probe_dot)
def _create_dot(interpreter: Any, original: Any) -> Callable:
    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any, **named: Any) -> Any:
        names = {_name(a), _name(b)}
        if not names <= {"fp16", *_FORMATS}:
            return original(self, a, b, d, *options, **named)
        lhs, rhs = (_values(x).astype(np.float32, copy=False) for x in (a, b))
        return _handle(interpreter, np.matmul(lhs, rhs) + _values(d), d.dtype)

    return create_dot


def _probe_dot_scaled(lab: _Lab) -> bool:
    def matrix(data: Any, dtype: Any) -> Any:
        return lab.interpreter.TensorHandle(np.array([data], np.uint8), dtype)

    tl, formats = lab.tl, lab.ir.ScaleDotElemTypeTY
    lhs = lab.bf16(2.0**100, 0)
    lhs.data = lhs.data.reshape(1, 2)
    rhs, zero = matrix([0x21], tl.uint8), lab.f32(0)
    zero.data = zero.data.reshape(1, 1)
    # The codes 0.5 and 1, times 2 in both types of scale.
    return all(
        lab.builder.create_dot_scaled(
            lhs, None, formats.BF16, rhs, scale, formats.E2M1, True, True, True, zero
        ).data.item()
        == 2.0**100
        for scale in (matrix([128], tl.uint8), matrix([0x40], tl.float8e4nv))
    )


@_corrects("InterpreterBuilder.create_dot_scaled", _probe_dot_scaled)
def _create_dot_scaled(interpreter: Any, original: Any) -> Callable:
    def operand(handle: Any, scale: Any, is_e2m1: bool, k_pack: bool, is_rhs: bool) -> np.ndarray:
        """Float32 values [..., rows, K], each multiplied by the scale of its group along K."""
        if is_e2m1:
            data = np.swapaxes(handle.data, -1, -2) if is_rhs else handle.data
            data = data if k_pack else np.swapaxes(data, -1, -2)
            codes = np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)
            values = _E2M1_VALUES[codes]
            values = values if k_pack else np.swapaxes(values, -1, -2)
        else:
            values = _values(handle).astype(np.float32, copy=False)
            values = np.swapaxes(values, -1, -2) if is_rhs else values
        if scale is None:
            return values
        if _is_narrow(scale):
            factors = _values(scale)
        else:  # E8M0: a power of two, or NaN.
            exponent = scale.data.view(np.uint8).astype(np.int32)
            factors = np.ldexp(np.float32(1), exponent - 127)
            factors = np.where(exponent == 255, np.float32(np.nan), factors)
        return values * np.repeat(factors, values.shape[-1] // factors.shape[-1], axis=-1)

    def create_dot_scaled(
        self: Any,
        lhs: Any,
        lhs_scale: Any,
        lhs_format: Any,
        rhs: Any,
        rhs_scale: Any,
        rhs_format: Any,
        fast_math: bool,
        lhs_k_pack: bool,
        rhs_k_pack: bool,
        acc: Any,
    ) -> Any:
        e2m1 = interpreter._ir.ScaleDotElemTypeTY.E2M1
        a = operand(lhs, lhs_scale, lhs_format == e2m1, lhs_k_pack, is_rhs=False)
        b = operand(rhs, rhs_scale, rhs_format == e2m1, rhs_k_pack, is_rhs=True)
        result = np.matmul(a, np.swapaxes(b, -1, -2)) + _values(acc)
        return _handle(interpreter, result, acc.dtype)

    return create_dot_scaled


def _probe_atomic_add(lab: _Lab) -> bool:
    memory = np.zeros(1, np.uint16)
    pointers = lab.interpreter.TensorHandle(
        np.full(2, memory.ctypes.data, np.uint64), lab.tl.pointer_type(lab.tl.bfloat16)
    )
    mask = lab.interpreter.TensorHandle(np.ones(2, bool), lab.tl.int1)
    old = lab.builder.create_atomic_rmw(
        lab.ir.ATOMIC_OP.FADD, pointers, lab.bf16(1, 1), mask, lab.ir.MEM_SEMANTIC.RELAXED, None
    )
    return lab.same(old, lab.bf16(0, 1)) and memory[0] == 0x4000


@_corrects("InterpreterBuilder.create_atomic_rmw", _probe_atomic_add)
def _create_atomic_rmw(interpreter: Any, original: Any) -> Callable:
    def create_atomic_rmw(
        self: Any, rmw_op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        if not _is_narrow(val) or rmw_op != interpreter._ir.ATOMIC_OP.FADD:
            return original(self, rmw_op, ptr, val, mask, sem, scope)
        memory, old = interpreter._interpreter, np.zeros_like(val.data)
        todo = np.array(mask.data, bool)
        # Elements with one address take turns: each round serves the first one left of each.
        while todo.any():
            left = np.flatnonzero(todo)
            first = left[np.unique(ptr.data.ravel()[left], return_index=True)[1]]
            turn = np.zeros_like(todo)
            turn.flat[first] = True
            old[turn] = memory.load(ptr.data, turn, np.zeros_like(old), old.dtype)[turn]
            total = self.create_fadd(interpreter.TensorHandle(old, val.dtype), val)
            memory.store(ptr.data, total.data, turn)
            todo &= ~turn
        return interpreter.TensorHandle(old, val.dtype.scalar)

    return create_atomic_rmw


def _probe_reduction(combine: str, expected: float) -> Callable[[_Lab], bool]:
    def probe(lab: _Lab) -> bool:
        reduce = lab.interpreter.ReduceOps(0, getattr(lab.tl.standard, combine), False)
        return lab.same(reduce.apply(lab.tensor(lab.bf16(-1, 0.5))).handle, lab.bf16(expected))

    return probe


def _probe_scan(combine: str, *expected: float) -> Callable[[_Lab], bool]:
    def probe(lab: _Lab) -> bool:
        scan = lab.interpreter.ScanOps(0, getattr(lab.tl.standard, combine), False)
        return lab.same(scan.apply(lab.tensor(lab.bf16(-1, 0.5))).handle, lab.bf16(*expected))

    return probe


@_corrects("ReduceOps.min_max", _probe_reduction("_elementwise_max", 0.5))
@_corrects("ReduceOps.sum", _probe_reduction("_sum_combine", -0.5))
@_corrects("ScanOps.cumsum", _probe_scan("_sum_combine", -1, -0.5))
@_corrects("ScanOps.cumprod", _probe_scan("_prod_combine", -1, -0.5))
def _in_float32(interpreter: Any, original: Any) -> Callable:
    """A reduction or scan of float32 values, rounded at the end; indices are left alone."""
    tl = interpreter.tl

    def with_dtype(tensor: Any, dtype: Any) -> Any:
        handle = _handle(interpreter, _values(tensor.handle), dtype)
        kind = tl.block_type(dtype, list(tensor.shape)) if tensor.type.is_block() else dtype
        return tl.core.tensor(handle, kind)

    def reduce(self: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = input[0] if isinstance(input, tuple) else input
        if not _is_narrow(tensor.handle):
            return original(self, input, *args, **kwargs)
        result = original(self, with_dtype(tensor, tl.float32), *args, **kwargs)
        several = isinstance(result, list | tuple)
        narrowed = [
            with_dtype(part, tensor.dtype) if part.dtype == tl.float32 else part
            for part in (result if several else [result])
        ]
        return tuple(narrowed) if several else narrowed[0]

    return reduce


def _probe_index(lab: _Lab) -> bool:
    class Tensor:
        handle = lab.f32(3)

    # Up to Triton 3.4 changes to the language are not recorded in a scope.
    scope = getattr(lab.interpreter, "_LangPatchScope", None)
    lab.interpreter._patch_lang_tensor(Tensor, *([scope()] if scope else []))
    return operator.index(Tensor()) == 3  # type: ignore[arg-type]


@_corrects("_patch_lang_tensor", _probe_index)
def _patch_lang_tensor(interpreter: Any, original: Any) -> Callable:
    """Scalars as loop bounds: numpy 2.4 refuses int() of an array of one element."""

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)  # The scope remembers what to put back after the launch.
        tensor.__index__ = lambda self: int(self.handle.data.item())

    return patch_lang_tensor
