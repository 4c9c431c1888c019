"""The analyzer: from a problem, a workload and a device to a bound.

Capture records the reference, facts are learnt forwards, demand is found backwards, and the
roofline turns bytes and operations into a time. All but the last step is independent of the device
and is kept, so that asking for another device or again costs nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from ..device import Device
from ..draws import rule_for
from ..errors import BoundError
from ..problem import Problem, RandomInput, Workload
from .bound import Bound
from .capture import ValuesUnknown, capture
from .demand import find_demand
from .fact_rules import triangle
from .facts import Fact, Facts
from .region import Region
from .roofline import roofline
from .traffic import read_bytes, write_bytes
from .work import total

Precision = Literal["declared", "tolerance"]
_REMEMBERED = 4096
_TOLERANCE_UNITS = (("bf16_tc", 2.0**-10), ("fp16_tc", 2.0**-13))
"""A float32 contraction may run on a unit if the workload tolerates a quarter of the unit's own
rounding error (2^-8 for bfloat16, 2^-11 for float16 and TF32): most elements err by less than the
largest. TF32 is not listed because float16 is as precise and faster."""


@dataclass(frozen=True)
class _Analysis:
    """What does not depend on the device."""

    read: dict[str, int]
    write: dict[str, int]
    work: dict[str, int]
    lane: Literal["meta", "real"]
    notes: tuple[str, ...]
    complete: bool


_remembered: OrderedDict[tuple[str, int], _Analysis] = OrderedDict()


def analyze(
    problem: Problem,
    workload: Workload,
    device: Device,
    *,
    seed: int = 0,
    precision: Precision = "tolerance",
) -> Bound:
    """T_SOL of a workload on a device.

    Args:
        problem: its reference is executed (on tensors without data) and must be trusted.
        workload: one of the problem's workloads.
        device: the hardware model.
        seed: of the inputs whose values decide what is read, such as page tables.
        precision: `declared` holds float32 contractions to float32 accuracy; `tolerance` admits
            every unit whose rounding the workload's tolerance lets pass, as is right where nothing
            but the tolerance checks a result.

    Raises:
        BoundError: the reference cannot be run, or does not return what the definition says.

    Example:
        >>> problem = load("L1/069_rms_norm")
        >>> analyze(problem, problem.workloads[0], get_device("h200")).bound_by
        'memory'
    """
    key = (problem.workload_hash(workload), seed)
    analysis = _remembered.get(key)
    if analysis is None:
        analysis = _remembered[key] = _analyze(problem, workload, seed)
        if len(_remembered) > _REMEMBERED:
            _remembered.popitem(last=False)
    work = analysis.work
    if precision == "tolerance":
        work = _tolerated(work, workload)
    total_bytes = sum(analysis.read.values()) + sum(analysis.write.values())
    t_sol_ms, bound_by, memory_ms, compute_ms = roofline(device, total_bytes, work)
    if t_sol_ms <= 0:
        raise BoundError(f"{problem.id}, workload {workload.uuid}: nothing is read or written")
    return Bound(
        problem=problem.id,
        workload=workload.uuid,
        device=device.key,
        t_sol_ms=t_sol_ms,
        bound_by=bound_by,
        memory_ms=memory_ms,
        compute_ms=compute_ms,
        launch_ms=device.launch_ms,
        read_bytes=analysis.read,
        write_bytes=analysis.write,
        work=work,
        lane=analysis.lane,
        complete=analysis.complete,
        notes=analysis.notes,
    )


def _analyze(problem: Problem, workload: Workload, seed: int) -> _Analysis:
    try:
        trace, contents = capture(problem, workload, seed=seed)
    except ValuesUnknown as error:
        # Without a recorded run only the outputs are certain.
        return _Analysis(
            read=dict.fromkeys(problem.tensors(workload), 0),
            write={name: arg.nbytes for name, arg in problem.outputs(workload).items()},
            work={},
            lane="meta",
            notes=(str(error),),
            complete=False,
        )
    known = known_inputs(problem, workload)
    outcome = find_demand(trace, Facts(trace, contents, known), contents)
    notes = [
        f"input {name!r} is the causal mask in every draw; it is not counted as read"
        for name in known
    ]
    return _Analysis(
        read=read_bytes(problem, workload, outcome, set(known)),
        write=write_bytes(problem, workload, trace, outcome),
        work={str(unit): flops for unit, flops in total(iter(outcome.work)).items()},
        lane="real" if contents.drew_floats else "meta",
        notes=(*notes, *outcome.notes),
        complete=not outcome.notes,
    )


def known_inputs(problem: Problem, workload: Workload) -> dict[str, Fact]:
    """Inputs whose values are the same in every draw: causal masks by the rule of their name."""
    known = {}
    for name, arg in problem.tensors(workload).items():
        drawn = isinstance(workload.inputs[name], RandomInput)
        if drawn and rule_for(name, arg.dtype, arg.shape).name == "causal mask":
            known[name] = Fact(
                live=triangle(arg.shape, 0, lower=True),
                rest=-math.inf,
                inside=0.0,
                format="fp4",
                distinct=2,
                steering=True,
            )
    return known


def _tolerated(work: dict[str, int], workload: Workload) -> dict[str, int]:
    """float32 work moved to the fastest unit that the tolerance admits."""
    tolerance = max(workload.tolerance.max_atol, workload.tolerance.max_rtol)
    unit = next((u for u, error in _TOLERANCE_UNITS if tolerance >= error), None)
    if unit is None or "fp32" not in work:
        return work
    moved = {u: flops for u, flops in work.items() if u != "fp32"}
    moved[unit] = moved.get(unit, 0) + work["fp32"]
    return moved


__all__ = ["Bound", "Precision", "Region", "analyze", "known_inputs"]
