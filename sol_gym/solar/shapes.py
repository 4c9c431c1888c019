"""Shapes and dtypes of the results of common operations.

Torch can find them itself on meta tensors, but for many operations it does so in Python, at ten
times the cost of all else that recording does, and after importing its compiler, which takes
seconds. The rules here cover what nearly all references consist of; any other operation goes to
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_META = torch.device("meta")
Arguments = dict[str, Any]
"""All arguments of an operation by name, defaults included; tensors are meta tensors."""
Result = Tensor | tuple[Tensor, ...]


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous meta tensor."""
    return torch.empty(tuple(shape), dtype=dtype, device=_META)


class Elementwise:
    """Results of elementwise operations: shapes broadcast, dtypes by torch's promotion rules."""

    def __init__(self) -> None:
        self._dtypes: dict[tuple, torch.dtype] = {}

    def __call__(self, func: Any, arguments: Arguments) -> Tensor:
        """The result of an operation that is not in place."""
        tensors = [t for t in arguments.values() if isinstance(t, Tensor)]
        shape = broadcast([t.shape for t in tensors])
        dtype = self._dtype(func, arguments)
        layout = arguments.get("memory_format") or torch.preserve_format
        if layout is not torch.preserve_format:
            return torch.empty(shape, dtype=dtype, device=_META, memory_format=layout)
        like = next((t for t in tensors if t.shape == shape), None)
        if like is not None and not like.is_contiguous() and _is_dense(like):
            return torch.empty_strided(shape, like.stride(), dtype=dtype, device=_META)
        return empty(shape, dtype)

    def _dtype(self, func: Any, arguments: Arguments) -> torch.dtype:
        """Promotion is subtle, so torch is asked, once for each kind of arguments."""
        kinds = (
            (a.dtype, a.dim() == 0)
            if isinstance(a, Tensor)
            else a
            if isinstance(a, torch.dtype)
            else type(a)
            for a in arguments.values()
        )
        key = (func, *kinds)
        if key not in self._dtypes:
            sample = {
                k: torch.ones([1] * min(a.dim(), 1), dtype=a.dtype) if isinstance(a, Tensor) else a
                for k, a in arguments.items()
            }
            self._dtypes[key] = func(**sample).dtype
        return self._dtypes[key]


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The common shape of tensors that broadcast."""
    if all(s == shapes[0] for s in shapes):
        return shapes[0]
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    result = tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))
    if any(n not in (1, want) for s in padded for n, want in zip(s, result, strict=True)):
        raise ValueError(f"shapes {[list(s) for s in shapes]} do not broadcast")
    return result


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


# ---- Rules ----------------------------------------------------------------------------------


def _product(left: str, right: str) -> Callable[[Arguments], Tensor]:
    def rule(a: Arguments) -> Tensor:
        x, y = a[left], a[right]
        if x.shape[-1] != y.shape[-2] or x.shape[:-2] != y.shape[:-2]:
            raise ValueError(f"cannot multiply {list(x.shape)} by {list(y.shape)}")
        return empty((*x.shape[:-1], y.shape[-1]), x.dtype)

    return rule


def _reduced(a: Arguments) -> tuple[int, ...]:
    shape, dims = a["self"].shape, a.get("dim")
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        dims = range(len(shape))
    elif isinstance(dims, int):
        dims = [dims]
    gone = {d % max(len(shape), 1) for d in dims}
    if a.get("keepdim"):
        return tuple(1 if d in gone else n for d, n in enumerate(shape))
    return tuple(n for d, n in enumerate(shape) if d not in gone)


def _sum(a: Arguments) -> Tensor:
    own = a["self"].dtype
    counted = own if own.is_floating_point or own.is_complex else torch.int64
    return empty(_reduced(a), a.get("dtype") or counted)


def _reduction(dtype: torch.dtype | None = None) -> Callable[[Arguments], Tensor]:
    return lambda a: empty(_reduced(a), dtype or a.get("dtype") or a["self"].dtype)


def _norm(a: Arguments) -> Tensor:
    return empty(_reduced(a), a.get("dtype") or a["self"].dtype)


def _running(a: Arguments) -> Tensor:
    own = a["self"].dtype
    counted = own if own.is_floating_point else torch.int64
    return empty(a["self"].shape, a.get("dtype") or counted)


def _same(a: Arguments) -> Tensor:
    return empty(a["self"].shape, a["self"].dtype)


def _like(a: Arguments) -> Tensor:
    return empty(a["self"].shape, a["dtype"] or a["self"].dtype)


def _factory(a: Arguments) -> Tensor:
    return empty(a["size"], a["dtype"] or torch.get_default_dtype())


def _integers(a: Arguments) -> Tensor:
    # The schema's default dtype is a number, not a dtype.
    dtype = a["dtype"] if isinstance(a["dtype"], torch.dtype) else torch.int64
    return empty(a["size"] if "size" in a else (a["n"],), dtype)


def _softmax(a: Arguments) -> Tensor:
    wide = a.get("half_to_float") or a.get("dtype")
    dtype = wide if isinstance(wide, torch.dtype) else torch.float32 if wide else a["self"].dtype
    return empty(a["self"].shape, dtype)


def _cat(a: Arguments) -> Tensor:
    parts = [t for t in a["tensors"] if tuple(t.shape) != (0,)] or a["tensors"]
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    shape = list(parts[0].shape)
    shape[a["dim"]] = sum(t.shape[a["dim"]] for t in parts)
    return empty(shape, dtype)


def _stack(a: Arguments) -> Tensor:
    parts = a["tensors"]
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    shape = list(parts[0].shape)
    shape.insert(a["dim"] % (len(shape) + 1), len(parts))
    return empty(shape, dtype)


def _layer_norm(a: Arguments) -> Result:
    x = a["input"]
    kept = len(x.shape) - len(a["normalized_shape"])
    statistics = (*x.shape[:kept], *(1,) * len(a["normalized_shape"]))
    wide = torch.float32 if x.dtype.itemsize < 4 else x.dtype
    return empty(x.shape, x.dtype), empty(statistics, wide), empty(statistics, wide)


def _group_norm(a: Arguments) -> Result:
    x, statistics = a["input"], (a["N"], a["group"])
    return empty(x.shape, x.dtype), empty(statistics, x.dtype), empty(statistics, x.dtype)


def _index(a: Arguments) -> Tensor:
    x, indices = a["self"], list(a["indices"])
    indices += [None] * (len(x.shape) - len(indices))
    places = [d for d, i in enumerate(indices) if i is not None]
    picked = broadcast([tuple(i.shape) for i in indices if i is not None])
    rest = [n for n, i in zip(x.shape, indices, strict=True) if i is None]
    together = places == list(range(places[0], places[0] + len(places)))
    at = places[0] if together else 0
    return empty((*rest[:at], *picked, *rest[at:]), x.dtype)


def _pad(a: Arguments) -> Tensor:
    shape = list(a["self"].shape)
    for i in range(0, len(a["pad"]), 2):
        shape[-1 - i // 2] += a["pad"][i] + a["pad"][i + 1]
    return empty(shape, a["self"].dtype)


def _sort(a: Arguments) -> Result:
    return _same(a), empty(a["self"].shape, torch.int64)


def _topk(a: Arguments) -> Result:
    shape = list(a["self"].shape)
    if shape:
        shape[a["dim"]] = a["k"]
    return empty(shape, a["self"].dtype), empty(shape, torch.int64)


def _cast(a: Arguments) -> Tensor:
    """_to_copy: another dtype; the layout stays unless the source has gaps or overlaps."""
    x, dtype = a["self"], a["dtype"] or a["self"].dtype
    layout = a.get("memory_format") or torch.preserve_format
    if layout is torch.preserve_format and not x.is_contiguous() and _is_dense(x):
        return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=_META)
    return empty(x.shape, dtype)


def _convolution(a: Arguments) -> Tensor:
    x, weight = a["input"], a["weight"]
    shape = [x.shape[0], weight.shape[1] * a["groups"] if a["transposed"] else weight.shape[0]]
    for i, (size, kernel) in enumerate(zip(x.shape[2:], weight.shape[2:], strict=True)):
        stride, padding, dilation, extra = (
            a[k][i if len(a[k]) > 1 else 0]
            for k in ("stride", "padding", "dilation", "output_padding")
        )
        reach = dilation * (kernel - 1)
        if a["transposed"]:
            shape.append((size - 1) * stride - 2 * padding + reach + extra + 1)
        else:
            shape.append((size + 2 * padding - reach - 1) // stride + 1)
    return empty(shape, x.dtype)


_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
_REAL = {v: k for k, v in _COMPLEX.items()}


def _real_to_complex(a: Arguments) -> Tensor:
    shape = list(a["self"].shape)
    if a["onesided"]:
        shape[a["dim"][-1]] = shape[a["dim"][-1]] // 2 + 1
    return empty(shape, _COMPLEX.get(a["self"].dtype, torch.complex32))


def _complex_to_real(a: Arguments) -> Tensor:
    shape = list(a["self"].shape)
    shape[a["dim"][-1]] = a["last_dim_size"]
    return empty(shape, _REAL.get(a["self"].dtype, torch.float16))


SHAPES: dict[str, Callable[[Arguments], Result]] = {
    "mm": _product("self", "mat2"),
    "bmm": _product("self", "mat2"),
    "addmm": _product("mat1", "mat2"),
    "baddbmm": _product("batch1", "batch2"),
    "sum": _sum,
    **dict.fromkeys(("mean", "amax", "amin", "logsumexp"), _reduction()),
    **dict.fromkeys(("any", "all"), _reduction(torch.bool)),
    **dict.fromkeys(("argmax", "argmin"), _reduction(torch.int64)),
    "linalg_vector_norm": _norm,
    **dict.fromkeys(("cumsum", "cumprod"), _running),
    **dict.fromkeys(("tril", "triu", "flip", "roll"), _same),
    **dict.fromkeys(("rand", "randn", "zeros", "ones", "empty"), _factory),
    **dict.fromkeys(("randint", "randperm"), _integers),
    **dict.fromkeys(
        ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"), _like
    ),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), _softmax),
    "cat": _cat,
    "stack": _stack,
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    "index": _index,
    "convolution": _convolution,
    "sort": _sort,
    "topk": _topk,
    "_to_copy": _cast,
    "_fft_r2c": _real_to_complex,
    "_fft_c2r": _complex_to_real,
    "_fft_c2c": _same,
    "constant_pad_nd": _pad,
}
"""Rules by operation; not for in-place variants."""

ELEMENTWISE = frozenset(("floor_divide", "masked_fill", "rsub", "where", "copysign", "lerp"))
"""Elementwise operations that torch does not mark as such in all their overloads."""

IN_PLACE = frozenset(
    ("copy_", "fill_", "zero_", "index_add_", "index_put_", "scatter_", "scatter_add_")
)
"""Operations that return the argument they change, shape and all."""
