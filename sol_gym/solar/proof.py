"""The proof of a bound: what it adds up, line by line, with the rule behind each line.

A line says how many bytes of a tensor any kernel has to move, or how many FLOPs an operation of the
reference leaves, and where the rule that says so is proved: `table` holds an executable definition
of it, to which the tests hold the rule. `Proof.check` adds everything up again, and for a small
workload feels whether what is said to be read is: elements are changed one by one, and some output
has to change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from ..device import Device
from ..errors import BoundError
from ..problem import DTYPE_BYTES, Problem, Workload
from .analyzer import Stages, bound_of, run_stages, summarize
from .bound import Bound
from .capture import ValuesUnknown, load_run
from .region import describe
from .roofline import ADVISORY_UNITS
from .table import TABLE, WITHOUT_EXAMPLE
from .work import as_written

SMALL_ELEMENTS, SMALL_FLOPS = 2**22, 2**31
"""Workloads up to this size can be felt on a CPU."""
_CHANGES = (1.0, -3.0, 30.0, -300.0, 1e3, -1e4)
"""What is added to an element, one after the other, until an output changes."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Moved(_Record):
    """Bytes of one tensor that any kernel has to move."""

    direction: Literal["read", "write"]
    tensor: str
    elements: int
    width: int
    """Bytes an element."""
    moved_bytes: int
    why: str
    """Which part, and which operations of the reference need it."""
    rule: str
    """Where the rule is proved."""


class Worked(_Record):
    """FLOPs that operations of the reference leave."""

    operation: str
    lines: tuple[int, ...]
    """Of the reference."""
    count: int
    """How many operations these are."""
    as_written: int
    flops: int
    unit: str
    why: str
    rule: str


class Roof(_Record):
    """A time that no kernel beats."""

    name: str
    """As in `Bound.bound_by`."""
    amount: float
    """Bytes or FLOPs; 0 for a launch."""
    rate: float
    """Bytes or FLOPs a second."""
    ms: float
    binds: bool


class Felt(_Record):
    """What changing elements of an input, one by one, did."""

    tensor: str
    tried: int
    changed: int
    """How many of them changed some output."""


class Proof(_Record):
    """A bound and all that it is the sum of."""

    bound: Bound
    moved: tuple[Moved, ...]
    worked: tuple[Worked, ...]
    roofs: tuple[Roof, ...]

    def check(self) -> list[str]:
        """Add everything up again.

        Returns:
            What does not hold; empty if all does.
        """
        bound, faults = self.bound, []

        def same(what: str, found: float, expected: float) -> None:
            if not math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-15):
                faults.append(f"{what}: {found:.12g}, expected {expected:.12g}")

        for line in self.moved:
            size = line.elements * line.width
            same(f"bytes of {line.tensor} ({line.direction})", line.moved_bytes, size)
        same("all bytes", sum(m.moved_bytes for m in self.moved), bound.total_bytes)
        for unit in {*bound.work, *(w.unit for w in self.worked if w.flops)}:
            found = sum(w.flops for w in self.worked if w.unit == unit)
            same(f"FLOPs on {unit}", found, bound.work.get(unit, 0))
        for work in self.worked:
            if work.flops > work.as_written:
                faults.append(f"{work.operation}: more work than was written")
        for roof in self.roofs:
            if roof.rate:
                same(f"time of {roof.name}", roof.ms, 1e3 * roof.amount / roof.rate)
        counted = [r for r in self.roofs if r.name.removeprefix("compute:") not in ADVISORY_UNITS]
        same("T_SOL, the largest time", bound.t_sol_ms, max(r.ms for r in counted))
        binding = [r.name for r in self.roofs if r.binds]
        if binding != [bound.bound_by]:
            faults.append(f"bound by {bound.bound_by}, the proof says {', '.join(binding)}")
        return faults

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, most: int = 24) -> Iterator[str]:
        """The proof as text.

        Args:
            most: lines of work; the largest are shown.
        """
        for m in self.moved:
            verb = "reads" if m.direction == "read" else "writes"
            yield (
                f"{verb} {m.tensor}: {m.elements:,} x {m.width} = {m.moved_bytes:,} bytes; {m.why}"
                + (f" [{m.rule}]" if m.rule else "")
            )
        yield f"together {self.bound.total_bytes:,} bytes"
        shown = sorted(self.worked, key=lambda w: w.flops, reverse=True)
        for w in shown[:most]:
            where = f"line {', '.join(map(str, w.lines))}: " if w.lines else ""
            times = f" x{w.count}" if w.count > 1 else ""
            unit = f" on {w.unit}" if w.flops else ""
            yield (
                f"{where}{w.operation}{times}: {w.flops:,} of {w.as_written:,} FLOP{unit}"
                + (f"; {w.why}" if w.why else "")
                + f" [{w.rule}]"
            )
        if len(shown) > most:
            rest = sum(w.flops for w in shown[most:])
            yield f"and {len(shown) - most} smaller ones, {rest:,} FLOP"
        for roof in self.roofs:
            mark = " <- binds" if roof.binds else ""
            if roof.rate:
                yield f"{roof.name}: {roof.amount:,.0f} / {roof.rate:.6g} a second = {roof.ms:.6g} ms{mark}"
            else:
                yield f"{roof.name}: {roof.ms:.6g} ms{mark}"


def prove(
    problem: Problem,
    workload: Workload,
    device: Device,
    *,
    seed: int = 0,
    precision: Literal["declared", "tolerance"] = "tolerance",
) -> Proof:
    """The proof of a workload's bound. Arguments as in `analyze`.

    Raises:
        BoundError: the reference cannot be run, or its course depends on values that cost too much
            to find, so that only the outputs are certain.

    Example:
        >>> problem = load("L1/033_post_norm_residual")
        >>> proof = prove(problem, problem.workloads[0], get_device("b200-1500"))
        >>> proof.check()
        []
    """
    try:
        stages = run_stages(problem, workload, seed=seed)
    except ValuesUnknown as error:
        raise BoundError(f"{problem.id}, workload {workload.uuid}: no proof: {error}") from error
    bound = bound_of(summarize(problem, workload, stages), problem, workload, device, precision)
    return proof_of(problem, workload, device, stages, bound)


def proof_of(
    problem: Problem, workload: Workload, device: Device, stages: Stages, bound: Bound
) -> Proof:
    """The proof of a bound whose stages are at hand."""
    return Proof(
        bound=bound,
        moved=tuple(_moved(problem, workload, stages, bound)),
        worked=tuple(_worked(stages, bound)),
        roofs=tuple(_roofs(device, bound)),
    )


def _moved(problem: Problem, workload: Workload, stages: Stages, bound: Bound) -> Iterator[Moved]:
    readers: dict[int, dict[str, None]] = {}
    rules: dict[int, dict[str, None]] = {}
    for operation in stages.outcome.operations:
        node = operation.node
        if operation.demand is not None:
            for value in node.inputs:
                where = f"{node.plain_name} (line {node.line})" if node.line else node.plain_name
                readers.setdefault(id(value.base), {})[where] = None
                rules.setdefault(id(value.base), {})[_rule(node.plain_name, node.pointwise)] = None
    for name, arg in problem.tensors(workload).items():
        base = stages.trace.inputs[name].base
        moved = bound.read_bytes[name]
        users = [*readers.get(id(base), {})]
        if name in stages.known:
            why = "the same in every draw, so nobody has to read it"
        elif not moved:
            why = "no output depends on its elements"
        else:
            more = f" and {len(users) - 4} more" if len(users) > 4 else ""
            why = f"{describe(stages.outcome.read[name])}; used by {', '.join(users[:4])}{more}"
        width = DTYPE_BYTES[arg.dtype]
        yield Moved(
            direction="read", tensor=name, elements=round(moved / width), width=width,
            moved_bytes=moved, why=why,
            rule="; ".join([*rules.get(id(base), {})][:3]) if moved else "",
        )  # fmt: skip
    declared = problem.tensors(workload) | problem.outputs(workload)
    for name, moved in bound.write_bytes.items():
        width = DTYPE_BYTES[declared[name].dtype]
        yield Moved(
            direction="write", tensor=name, elements=round(moved / width), width=width,
            moved_bytes=moved, why="outputs have memory of their own, which the call has to fill",
            rule="traffic.write_bytes",
        )  # fmt: skip


def _rule(name: str, pointwise: bool) -> str:
    """Where the rule of an operation is proved."""
    if name in TABLE:
        return f"table.TABLE[{name!r}]"
    if name in WITHOUT_EXAMPLE:
        return f"{name}: {WITHOUT_EXAMPLE[name]}"
    return "elementwise" if pointwise else f"{name}: no rule, nothing is demanded through it"


def _worked(stages: Stages, bound: Bound) -> Iterator[Worked]:
    found: dict[tuple, Worked] = {}
    for operation in stages.outcome.operations:
        node, work = operation.node, operation.work
        written = as_written(node)
        if not written and work is None:
            continue
        flops = work.flops if work is not None else 0
        why = operation.rewrite
        if not why and operation.demand is None:
            why = "no output depends on it"
        elif not why and flops < written:
            why = "masked, padded, unwanted or a scan"
        unit = _unit_in(bound, work.unit) if work is not None and flops else ""
        shapes = " x ".join(str(list(v.shape)) for v in node.inputs[-2:])
        line = Worked(
            operation=f"{node.name} {shapes}", lines=(node.line,) if node.line else (), count=1,
            as_written=written or flops, flops=flops, unit=unit, why=why,
            rule=_rule(node.plain_name, node.pointwise),
        )  # fmt: skip
        # Loops repeat themselves.
        key = (node.name, line.lines, unit, why)
        old = found.get(key)
        if old is not None:
            line = old.model_copy(
                update={
                    "count": old.count + 1,
                    "flops": old.flops + line.flops,
                    "as_written": old.as_written + line.as_written,
                }
            )
        found[key] = line
    yield from found.values()


def _unit_in(bound: Bound, unit: str) -> str:
    """The unit that work counts on, which the tolerance may have moved."""
    if unit in bound.work:
        return unit
    moved = [u for u in ("bf16_tc", "fp16_tc") if u in bound.work]
    return moved[0] if moved else unit


def _roofs(device: Device, bound: Bound) -> Iterator[Roof]:
    def roof(name: str, amount: float, ms: float) -> Roof:
        rate = 1e3 * amount / ms if amount and ms else 0.0
        return Roof(name=name, amount=amount, rate=rate, ms=ms, binds=name == bound.bound_by)

    total = bound.total_bytes
    yield Roof(
        name="memory", amount=total, rate=device.bandwidth_for(total), ms=bound.memory_ms,
        binds=bound.bound_by == "memory",
    )  # fmt: skip
    for unit, ms in bound.compute_ms.items():
        name = f"compute:{unit}"
        yield Roof(
            name=name, amount=bound.work[unit], rate=device.rate(unit), ms=ms,
            binds=name == bound.bound_by,
        )  # fmt: skip
    if bound.capacity_ms is not None:
        yield roof(
            "capacity", bound.capacity_ms * device.bandwidth_bytes_per_s / 1e3, bound.capacity_ms
        )
    if bound.launch_ms is not None:
        yield roof("launch", 0.0, bound.launch_ms)


# ---- Feeling --------------------------------------------------------------------------------


def feel(problem: Problem, workload: Workload, *, seed: int = 0, elements: int = 24) -> list[Felt]:
    """Change elements that are said to be read, one by one, and see whether an output changes.

    Args:
        problem, workload, seed: as of the bound; the reference is run on the CPU.
        elements: how many of each floating-point input, drawn at random from what is read.

    Raises:
        BoundError: the workload is too large for that.
    """
    stages = run_stages(problem, workload, seed=seed)
    flops = sum(map(as_written, stages.trace.nodes()))
    size = sum(v.numel for v in stages.trace.inputs.values())
    if size > SMALL_ELEMENTS or flops > SMALL_FLOPS:
        raise BoundError(
            f"{problem.id}, workload {workload.uuid}: {size:,} elements and {flops:,} FLOP are too "
            f"many to run again and again; at most {SMALL_ELEMENTS:,} and {SMALL_FLOPS:,}"
        )
    inputs: dict[str, Any] = {}
    for name, spec in workload.inputs.items():
        inputs[name] = getattr(spec, "value", None)
    for name, value in stages.trace.inputs.items():
        inputs[name] = stages.contents.of(value, 0, budget=math.inf).clone()
    run = load_run(problem)

    def called() -> list[Tensor]:
        given = [x.clone() if isinstance(x, Tensor) else x for x in inputs.values()]
        arguments = dict(zip(inputs, given, strict=True))
        torch.default_generator.manual_seed(seed)
        with torch.no_grad():
            returned = run(*(arguments[n] for n in problem.definition.inputs))
        items = returned.values() if isinstance(returned, dict) else returned
        outputs = [items] if isinstance(items, Tensor) else list(items)
        written = [arguments[n] for n in stages.outcome.written]
        return [o.clone() for o in (*outputs, *written)]

    random = np.random.default_rng(seed)
    return [
        _feel_one(name, inputs, region.mask(), called, random, elements)
        for name, region in stages.outcome.read.items()
        if inputs[name].is_floating_point() and region and name not in stages.known
    ]


def _feel_one(
    name: str, inputs: dict[str, Any], mask: np.ndarray | None, called: Callable[[], list[Tensor]],
    random: np.random.Generator, elements: int,
) -> Felt:  # fmt: skip
    assert mask is not None  # small
    original = inputs[name]
    places = np.flatnonzero(mask)
    chosen = random.choice(places, size=min(elements, len(places)), replace=False)
    before, changed = called(), 0
    for place in chosen:
        for change in _CHANGES:
            other = original.clone()
            flat = other.view(-1)
            flat[int(place)] = float(flat[int(place)]) + change
            inputs[name] = other
            after = called()
            if any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)):
                changed += 1
                break
    inputs[name] = original
    return Felt(tensor=name, tried=len(chosen), changed=changed)
