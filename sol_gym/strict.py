"""Strict inputs: published draws changed so that every input, row and step matters.

The published (*compatible*) draws hide errors. Norm weights are ones and biases zeros; every row
has the same scale and mean zero; tensors that a backward pass gets are consistent with each other,
so that one can be rebuilt from another. A strict set starts from a compatible one and is changed
in place, in one of a few ways (`VARIANTS`), by what an input *is*: its name, its dtype, and what
the draw looks like (ones, zeros, a mask, probabilities, positive numbers). Nothing here knows a
problem by name; where a contract needs more, or must not be touched, its `pack.json` says so in
the vocabulary of `sol_gym.problem.StrictRule`.

A variant keeps what inputs promise: signs of positive numbers, the range of probabilities and
cosines, causality of a causal mask, valid indices. How a candidate is compared on such inputs is
`sol_gym.sandbox.precision`: published tolerances fit published draws alone.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Generator, Tensor

from .errors import ProblemError
from .problem import LengthsRule, Problem, SafetensorsInput, StrictRule, Workload

__all__ = ["VARIANTS", "Variant", "harden", "other_shape", "variants_for"]


@dataclass(frozen=True)
class Variant:
    """One way to change a compatible set. Exponents are powers of two, drawn uniformly."""

    name: str
    shift: int = 0
    """Exponent that all activations share."""
    rows: tuple[int, int] = (-1, 1)
    """Exponents of an activation's rows (all axes but the last)."""
    offset: float = 0.0
    """Means of an activation's columns, in units of its spread."""
    mean: float = 0.0
    """The mean that all columns share, in units of its spread."""
    outliers: float = 1.0
    """Factor on one column in 32 (at least one)."""
    unit_weights: bool = False
    """Small weights grow until a product with unit inputs has unit size, so that their branch is
    seen beside a residual."""


VARIANTS = {
    v.name: v
    for v in (
        Variant("plain", unit_weights=True),
        Variant("rows", rows=(-7, 3), offset=0.5, outliers=8.0),
        Variant("tiny", shift=-10, rows=(-2, 2), offset=0.25),
        Variant("huge", shift=15, rows=(-1, 2), offset=0.25, mean=1.0),
    )
}
"""Kinds of strict sets: everything matters; rows of very different scale with outliers and a mean;
all small, where an epsilon counts; all large, beyond float16's range where the dtype has it, and
far from zero in the mean."""

_DEFAULT_BY_FAMILY = {
    # Softmax and selection of huge logits are decided by rounding, not by the kernel.
    "attention": ("plain", "rows", "tiny"),
    "transformer": ("plain", "rows", "tiny"),
    "block": ("plain", "rows", "tiny"),
    "moe": ("plain", "rows", "tiny"),
    "ssm": ("plain", "rows", "tiny"),
}


def variants_for(problem: Problem) -> tuple[str, ...]:
    """Names of the variants a problem's strict rounds use, in order.

    Raises:
        ProblemError: the pack names an unknown variant.
    """
    if problem.pack is not None and problem.pack.strict_variants is not None:
        names = tuple(problem.pack.strict_variants)
        unknown = [name for name in names if name not in VARIANTS]
        if unknown:
            raise ProblemError(
                f"{problem.id}: pack.json: strict_variants has unknown {unknown}; "
                f"there are {list(VARIANTS)}"
            )
        return names
    family = problem.pack.family if problem.pack else ""
    return _DEFAULT_BY_FAMILY.get(family, tuple(VARIANTS))


def harden(
    values: dict[str, Any], problem: Problem, workload: Workload, variant: str, generator: Generator
) -> dict[str, Any]:
    """Change one compatible input set into a strict one.

    Args:
        values: input name -> tensor (changed in place) or Python number, all inputs.
        problem, workload: whose inputs they are.
        variant: a name in `VARIANTS`.
        generator: on the tensors' device.

    Returns:
        The set, with the same tensors and possibly other numbers.

    Raises:
        ProblemError: there is no such variant, or a rule of the pack does not fit its input.
    """
    if variant not in VARIANTS:
        raise ProblemError(f"there is no strict variant {variant!r}; there are {list(VARIANTS)}")
    rules = problem.pack.strict_rules if problem.pack else {}
    axes = problem.definition.bind(workload.axes)
    result = dict(values)
    for name, value in values.items():
        draw = _Draw(name, VARIANTS[variant], generator, axes, values)
        given = rules.get(name, ())
        fitting = [r for r in (given if isinstance(given, list) else [given]) if r.applies(variant)] if given else []  # fmt: skip
        for rule in fitting or (None,):
            if isinstance(value, Tensor):
                declared = problem.definition.inputs[name].dtype
                draw.tensor(_numbers(value, declared), declared, rule)
            else:
                result[name] = draw.number(result[name], rule)
    return result


_ENOUGH_SIZES = 8
"""So many odd sizes are hard enough to guess; fewer only where no workload leaves as many."""


def other_shape(problem: Problem, choose: Random) -> tuple[Workload, int] | None:
    """A workload at a size that none of the problem's has, and the index of the one it is made of.

    It is the smallest workload that leaves enough sizes to choose from, with one free axis
    (`Pack.free_axes`) shortened to an odd size of at least half.

    Args:
        problem: whose workloads to start from.
        choose: the judge's secret randomness.

    Returns:
        None where no axis is free, or none can be shortened.
    """
    free = list(problem.pack.free_axes) if problem.pack else []
    if not free:
        return None
    bytes_of = [sum(t.nbytes for t in problem.tensors(w).values()) for w in problem.workloads]
    best: tuple[Workload, int] | None = None
    most = 0
    for start in sorted(range(len(bytes_of)), key=bytes_of.__getitem__):
        source = problem.workloads[start]
        if any(isinstance(spec, SafetensorsInput) for spec in source.inputs.values()):
            continue
        choose.shuffle(free)
        for axis in free:
            value = source.axes[axis]
            used = {workload.axes[axis] for workload in problem.workloads}
            sizes = [n for n in range(max(1, value // 2) | 1, value, 2) if n not in used]
            if len(sizes) <= most:
                continue
            axes = {**source.axes, axis: choose.choice(sizes)}
            try:
                problem.definition.bind(axes)
            except ProblemError:
                continue
            uuid = f"{source.uuid}-other-shape"
            best = source.model_copy(update={"uuid": uuid, "axes": axes}), start
            most = len(sizes)
        if most >= _ENOUGH_SIZES:
            break
    return best


# ---- What an input is ------------------------------------------------------------------------

_ANGLE = re.compile(r"(^|_)(cos|sin)(_|$)")
_FREQUENCY = re.compile(r"freq|theta|(^|_)emb(eddings)?$|^frequencies$|angles")
_BIAS = re.compile(r"bias|shift")
_MASK = re.compile(r"mask")
_WEIGHT = re.compile(r"weight|proj|_w$|^w\d*$|kernel|filter|table|embed")
_FACTORS = (0.5, 0.75, 1.25, 1.5)
_SCALAR_FACTOR = re.compile(r"scal(e|ing)|factor|attention_temperature")
_DECAY = re.compile(r"^(A|A_log|A_cumsum|g|dt|dt_bias|time_decay|D|beta|decay.*|exp_mod_deltas)$")


def _numbers(tensor: Tensor, declared: str) -> Tensor:
    """A tensor that arithmetic works on: packed fp4 as bytes."""
    return tensor.view(torch.uint8) if declared == "float4_e2m1fn_x2" else tensor


class _Draw:
    """Changes one input. Rules of the pack come first, then what the drawn values look like."""

    def __init__(
        self, name: str, variant: Variant, generator: Generator, axes: dict[str, int],
        values: dict[str, Any],
    ):  # fmt: skip
        self.name, self.variant, self.generator = name, variant, generator
        self.axes, self.values = axes, values

    # -- random numbers, in float32 ------------------------------------------------------------

    def normal(self, shape: tuple[int, ...] | torch.Size, device: torch.device) -> Tensor:
        return torch.empty(shape, device=device).normal_(generator=self.generator)

    def uniform(self, shape: Any, device: torch.device, low: float, high: float) -> Tensor:
        return torch.empty(shape, device=device).uniform_(low, high, generator=self.generator)

    def powers(self, shape: Any, device: torch.device, low: int, high: int) -> Tensor:
        """Whole powers of two: multiplying by them rounds nothing."""
        draw = torch.empty(shape, device=device)
        return torch.exp2(draw.random_(low, high + 1, generator=self.generator))

    # -- by kind -------------------------------------------------------------------------------

    def number(self, value: bool | int | float, rule: Any) -> bool | int | float:
        device = self.generator.device
        if rule is not None and rule.kind == "keep":
            return value
        if rule is not None and rule.kind == "choice":
            at = int(torch.randint(len(rule.values), (), device=device, generator=self.generator))
            return type(value)(rule.values[at])
        if rule is not None and rule.kind == "scale":
            return type(value)(value * float(self.powers((), device, rule.low, rule.high)))
        if rule is not None:
            raise ProblemError(
                f"strict rule {rule.kind!r} does not fit input {self.name!r}, a Python number"
            )
        if isinstance(value, float) and value and _SCALAR_FACTOR.search(self.name):
            # A factor of one hides that it is left out, a common one that it is built in. There are
            # few others, because a kernel may honestly be compiled anew for each.
            at = int(torch.randint(len(_FACTORS), (), device=device, generator=self.generator))
            return value * _FACTORS[at]
        return value

    def tensor(self, t: Tensor, declared: str, rule: StrictRule | None) -> None:
        if not t.numel():
            return
        t = t.view(1) if t.dim() == 0 else t
        if rule is not None:
            self._by_rule(t, rule)
        elif declared == "float4_e2m1fn_x2":
            t.random_(0, 256, generator=self.generator)
        elif declared.startswith("float8"):
            self._float8(t)
        elif t.dtype is torch.bool:
            if _MASK.search(self.name):
                self._coin(t)
        elif t.is_floating_point():
            self._floats(t)

    def _floats(self, t: Tensor) -> None:
        # One read for both: on a GPU the host waits for it.
        low, high = torch.stack(torch.aminmax(t.float())).tolist()
        v = self.variant
        if not (math.isfinite(low) and math.isfinite(high)):
            return
        if low < -1e4 * max(1.0, high) and (high == 0.0 or _MASK.search(self.name)):
            self._additive_mask(t, low)
        elif _MASK.search(self.name) and low >= 0.0 and high <= 1.0:
            if t.dim() > 1 or high == low:
                self._coin(t)
        elif (
            _ANGLE.search(self.name)
            and not self.name.startswith("grad")
            and low >= -1
            and high <= 1
        ):
            angles = self.uniform(t.shape, t.device, -math.pi, math.pi)
            t.copy_(angles.cos() if "cos" in self.name else angles.sin())
        elif (
            _FREQUENCY.search(self.name)
            and not self.name.startswith("grad")
            and "weight" not in self.name
        ) or _DECAY.search(self.name):
            t.mul_(self.uniform(t.shape[-1:], t.device, 0.5, 1.0))
        elif t.numel() > 1 and low == high == 1.0:
            t.copy_(self._signed_weight(t))
        elif t.numel() > 1 and low == high == 0.0:
            if _MASK.search(self.name):
                return
            t.copy_(self.normal(t.shape, t.device) * 0.5)
        elif low >= 0.0 and high <= 1.0:
            exponents = torch.tensor([0.5, 1.0, 2.0], device=t.device)
            rows = torch.randint(3, (*t.shape[:-1], 1), device=t.device, generator=self.generator)
            t.copy_(t.float().pow_(exponents[rows]))
        elif low > 0.0:
            t.mul_(self.powers((*t.shape[:-1], 1), t.device, -3, 3))
        elif t.dim() == 1 or _BIAS.search(self.name):
            t.mul_(self.powers(t.shape[-1:], t.device, -1, 1))
        elif _WEIGHT.search(self.name) and not self.name.startswith(("attn_w", "grad")):
            if v.unit_weights and t.dim() > 1:
                size = float(t.float().square().mean().sqrt())
                fan_in = math.prod(t.shape[1:]) if t.dim() > 3 else t.shape[-1]
                if 0 < size < fan_in**-0.5:
                    t.mul_(2.0 ** round(math.log2(fan_in**-0.5 / size)))
            # Rows of weights are output features.
            t.mul_(self.powers((*t.shape[:1], *(1,) * (t.dim() - 1)), t.device, -2, 2))
        else:
            self._activation(t, v)

    def _activation(self, t: Tensor, v: Variant) -> None:
        columns = t.shape[-1:]
        if v.offset:
            spread = t.float().square().mean().sqrt()
            means = self.normal(columns, t.device) * v.offset + v.mean
            t.add_((means * spread).to(t.dtype))
        if v.outliers != 1.0 and columns[0] > 1:
            factor = torch.ones(columns, device=t.device)
            factor[torch.randperm(columns[0], device=t.device, generator=self.generator)[: max(1, columns[0] // 32)]] = v.outliers  # fmt: skip
            t.mul_(factor)
        # float16 has five bits of exponent: results would underflow or overflow.
        shift = max(-4, min(v.shift, 3)) if t.dtype is torch.float16 else v.shift
        rows = self.powers((*t.shape[:-1], 1), t.device, *v.rows)
        t.mul_((rows * 2.0**shift).to(t.dtype))

    def _signed_weight(self, t: Tensor) -> Tensor:
        """Around one with a spread of a half, one in eight negative."""
        weight = self.uniform(t.shape, t.device, 0.25, 1.75)
        flip = self.uniform(t.shape, t.device, 0, 1) < 0.125
        return torch.where(flip, -weight, weight)

    def _float8(self, t: Tensor) -> None:
        wide = t.float()
        wide.mul_(self.powers((*t.shape[:-1], 1), t.device, -4, 4))
        limit = torch.finfo(t.dtype).max
        t.copy_(wide.clamp_(-limit, limit))

    def _coin(self, t: Tensor, ones: float | None = None) -> None:
        """0/1 with another share of ones in every row; the first of a row stays one."""
        share = self.uniform((*t.shape[:-1], 1), t.device, 0.2, 0.9)
        draw = self.uniform(t.shape, t.device, 0, 1) < (share if ones is None else ones)
        draw[..., 0] = True
        t.copy_(draw)

    def _additive_mask(self, t: Tensor, lowest: float, *, graded: bool = True) -> None:
        """Block one visible key in five, never the last one a row sees; shade the others."""
        seen = t == 0
        blocked = self.uniform(t.shape, t.device, 0, 1) < 0.2
        last = seen.flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
        keys = torch.arange(t.shape[-1], device=t.device)
        blocked &= seen & (keys != t.shape[-1] - 1 - last)
        if graded:
            shade = -self.uniform(t.shape, t.device, 0, 1).to(t.dtype)
            t.copy_(torch.where(seen, shade, t))
        t.masked_fill_(blocked, lowest)

    # -- by rule -------------------------------------------------------------------------------

    def _by_rule(self, t: Tensor, rule: Any) -> None:
        # Told apart by `kind`, which the schema has checked.
        device, g = t.device, self.generator
        if rule.kind == "keep":
            return
        if rule.kind == "activation":
            self._activation(t, self.variant)
        elif rule.kind == "scale":
            axes = range(t.dim()) if rule.axis is None else [rule.axis % t.dim()]
            shape = tuple(n if i in axes else 1 for i, n in enumerate(t.shape))
            if rule.axis is None:
                shape = (*t.shape[:-1], 1)
            factor = self.powers(shape, device, rule.low, rule.high)
            t.copy_(t.float() * factor)
        elif rule.kind == "normal":
            std = rule.std / math.sqrt(t.shape[-1]) if rule.fan_in else rule.std
            t.copy_(self.normal(t.shape, device) * std + rule.mean)
        elif rule.kind == "uniform":
            t.copy_(self.uniform(t.shape, device, rule.low, rule.high))
        elif rule.kind == "choice":
            table = torch.tensor(rule.values, device=device)
            t.copy_(table[torch.randint(len(rule.values), t.shape, device=device, generator=g)])
        elif rule.kind == "integers":
            low, high = self._bound(rule.low), self._bound(rule.high)
            t.copy_(torch.randint(low, max(high, low + 1), t.shape, device=device, generator=g))
        elif rule.kind == "distinct":
            size = self._bound(rule.size)
            scores = self.uniform((*t.shape[:-1], size), device, 0, 1)
            if rule.skew:
                # Low numbers are far more likely; the last eighth is never chosen where it can be.
                scores += rule.skew * torch.arange(size, device=device) / size
            t.copy_(scores.argsort(-1)[..., : t.shape[-1]])
        elif rule.kind == "skewed":
            size = self._bound(rule.size)
            draw = self.uniform(t.shape, device, 0, 1).pow_(rule.power)
            t.copy_((draw * size).long().clamp_(max=size - 1))
        elif rule.kind == "shuffle":
            order = torch.randperm(t.shape[rule.axis], device=device, generator=g)
            t.copy_(t.index_select(rule.axis, order))
        elif rule.kind == "lengths":
            self._lengths(t, rule)
        elif rule.kind == "mask":
            if rule.graded_only:
                t.copy_(-2 * self.uniform(t.shape, device, 0, 1))
            else:
                self._additive_mask(t, float(t.min()), graded=rule.graded)

    def _lengths(self, t: Tensor, rule: LengthsRule) -> None:
        """Boundaries of very unequal pieces that add up to what they did."""
        total = int(t.max()) if rule.total is None else self._bound(rule.total)
        pieces = t.numel() - (1 if rule.leading_zero else 0)
        least = rule.least if pieces * rule.least <= total else 0
        share = torch.exp(2.0 * self.normal((pieces,), t.device)).cumsum(0)
        ends = (share / share[-1] * (total - pieces * least)).round().long()
        ends += least * torch.arange(1, pieces + 1, device=t.device)
        ends[-1] = total
        if rule.leading_zero:
            ends = torch.cat((ends.new_zeros(1), ends))
        t.copy_(ends.view(t.shape))

    def _bound(self, value: int | str) -> int:
        """A number, or the value of an axis (with `input:axis` the length of an input's axis)."""
        if isinstance(value, int):
            return value
        if ":" in value:
            name, axis = value.split(":")
            return int(self.values[name].shape[int(axis)])
        if value not in self.axes:
            raise ProblemError(
                f"strict rule of {self.name!r}: there is no axis {value!r}; there are "
                f"{sorted(self.axes)}"
            )
        return self.axes[value]
