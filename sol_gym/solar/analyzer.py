"""The analyzer: from a problem, a workload and a device to a bound.

Capture records the reference, facts are learnt forwards, demand is found backwards, and the
roofline turns bytes and operations into a time. All but the last step is independent of the device
and is kept, so that asking for another device or again costs nothing.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ..device import Device
from ..draws import rule_for
from ..errors import BoundError
from ..paths import cache_dir
from ..problem import Problem, RandomInput, SafetensorsInput, Workload
from .bound import Bound
from .cache import AnalysisCache
from .capacity import least_bytes, on_chip_bytes
from .capture import ValuesUnknown, capture
from .contents import Contents
from .demand import Outcome, find_demand
from .fact_rules import triangle
from .facts import Fact, Facts
from .minimum import least_work
from .roofline import roofline
from .rulebook import rulebook
from .trace import Trace
from .traffic import read_bytes, unfused_bytes, write_bytes
from .work import as_written, external, special_functions, total

Precision = Literal["declared", "tolerance"]
_REMEMBERED = 4096
_TOLERANCE_UNITS = (("bf16_tc", 2.0**-10), ("fp16_tc", 2.0**-13))
"""A float32 contraction may run on a unit if the workload tolerates a quarter of the unit's own
rounding error (2^-8 for bfloat16, 2^-11 for float16 and TF32): most elements err by less than the
largest. TF32 is not listed because float16 is as precise and faster."""
_SMALL_OUTPUT = 1 / 64
"""An absolute tolerance says nothing of outputs' size. They may be this small (an attention over many
keys, a mean loss), and a rounding error is relative to them."""


@dataclass(frozen=True)
class Stages:
    """What each stage found, for who wants to look at them one by one; all can be printed."""

    trace: Trace
    contents: Contents
    known: dict[str, Fact]
    """Inputs whose values are the same in every draw."""
    facts: Facts
    outcome: Outcome


def run_stages(problem: Problem, workload: Workload, *, seed: int = 0) -> Stages:
    """Capture, facts, demand and algebraic minima of a workload.

    Raises:
        ValuesUnknown: the reference's course depends on values that cost too much to find.
        BoundError: the reference cannot be run, or does not return what the definition says.
    """
    trace, contents = capture(problem, workload, seed=seed)
    known = known_inputs(problem, workload)
    facts = Facts(trace, contents, known)
    outcome = least_work(trace, facts, find_demand(trace, facts, contents))
    return Stages(trace, contents, known, facts, outcome)


class Analysis(BaseModel):
    """What of a bound does not depend on the device. Fields as in `Bound`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    read_bytes: dict[str, int]
    write_bytes: dict[str, int]
    work: dict[str, int]
    lane: Literal["meta", "real"]
    notes: tuple[str, ...]
    complete: bool
    as_written_flops: int = 0
    unfused_bytes: int = 0
    external_macs: int = 0
    external_width: int = 2
    sfu_ops: int = 0
    rewrites: tuple[str, ...] = ()


_remembered: OrderedDict[tuple[str, int, str], Analysis] = OrderedDict()
_caches: dict[str, AnalysisCache] = {}


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
    return bound_of(analysis_of(problem, workload, seed=seed), problem, workload, device, precision)


def analysis_of(problem: Problem, workload: Workload, *, seed: int = 0) -> Analysis:
    """The part of a bound that holds for every device; from memory or disk where it is known.

    Raises:
        BoundError: the reference cannot be run, or does not return what the definition says.
    """
    key = (problem.workload_hash(workload), seed, rulebook().digest())
    analysis = _remembered.get(key)
    if analysis is None:
        cache = _disk_cache(workload)
        record = cache.get(problem, workload, seed) if cache else None
        with contextlib.suppress(ValidationError):
            analysis = Analysis.model_validate(record) if record else None
        if analysis is None:
            analysis = _analyze(problem, workload, seed)
            if cache:
                cache.put(problem, workload, seed, analysis.model_dump(mode="json"))
        _remembered[key] = analysis
        if len(_remembered) > _REMEMBERED:
            _remembered.popitem(last=False)
    return analysis


def _disk_cache(workload: Workload) -> AnalysisCache | None:
    """The cache of the folder in use; none where inputs lie in files, which may change."""
    if any(isinstance(spec, SafetensorsInput) for spec in workload.inputs.values()):
        return None
    rules = rulebook().digest()
    key = f"{cache_dir()}:{rules}"
    if key not in _caches:
        _caches[key] = AnalysisCache(extra=rules)
    return _caches[key]


def bound_of(
    analysis: Analysis,
    problem: Problem,
    workload: Workload,
    device: Device,
    precision: Precision = "tolerance",
) -> Bound:
    """An analysis as times on a device. Arguments and errors as in `analyze`."""
    work = analysis.work
    if precision == "tolerance":
        work = _tolerated(work, workload)
    total_bytes = sum(analysis.read_bytes.values()) + sum(analysis.write_bytes.values())
    capacity_bytes = 0.0
    if analysis.external_macs and not device.cache_levels:
        capacity_bytes = least_bytes(
            analysis.external_macs, analysis.external_width, on_chip_bytes(device)
        )
    times = roofline(device, total_bytes, work, capacity_bytes)
    t_sol_ms, bound_by = times.t_sol_ms, times.bound_by
    if t_sol_ms <= 0:
        raise BoundError(f"{problem.id}, workload {workload.uuid}: nothing is read or written")
    return Bound(
        problem=problem.id,
        workload=workload.uuid,
        device=device.key,
        t_sol_ms=t_sol_ms,
        bound_by=bound_by,
        memory_ms=times.memory_ms,
        compute_ms=times.compute_ms,
        capacity_ms=times.capacity_ms,
        launch_ms=device.launch_ms,
        sfu_ms=1e3 * analysis.sfu_ops / device.sfu_ops if device.sfu_ops else None,
        **{**analysis.model_dump(), "work": work},
    )


def _analyze(problem: Problem, workload: Workload, seed: int) -> Analysis:
    try:
        with _uncollected():
            return _run_and_summarize(problem, workload, seed)
    except ValuesUnknown as error:
        # Without a recorded run only the outputs are certain.
        return Analysis(
            read_bytes=dict.fromkeys(problem.tensors(workload), 0),
            write_bytes={name: arg.nbytes for name, arg in problem.outputs(workload).items()},
            work={},
            lane="meta",
            notes=(str(error),),
            complete=False,
        )


def _run_and_summarize(problem: Problem, workload: Workload, seed: int) -> Analysis:
    """All stages; on return nothing of them is left for the collector to look through."""
    stages = run_stages(problem, workload, seed=seed)
    analysis = summarize(problem, workload, stages)
    stages.trace.release()
    return analysis


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of cycles, which would look at a growing trace again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def summarize(problem: Problem, workload: Workload, stages: Stages) -> Analysis:
    """The counts of an analyzed run."""
    trace, outcome = stages.trace, stages.outcome
    notes = [
        f"input {name!r} is the causal mask in every draw; it is not counted as read"
        for name in stages.known
    ]
    external_macs, external_width = external(outcome.operations, trace)
    return Analysis(
        read_bytes=read_bytes(problem, workload, outcome, set(stages.known)),
        write_bytes=write_bytes(problem, workload, trace, outcome),
        work={str(unit): flops for unit, flops in total(iter(outcome.work)).items()},
        lane="real" if stages.contents.drew_floats else "meta",
        notes=(*notes, *outcome.notes),
        complete=not outcome.notes,
        as_written_flops=sum(map(as_written, trace.nodes())),
        unfused_bytes=unfused_bytes(trace),
        external_macs=external_macs,
        external_width=external_width,
        sfu_ops=sum(map(special_functions, outcome.operations)),
        rewrites=tuple(outcome.rewrites),
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
    tolerance = max(workload.tolerance.max_atol / _SMALL_OUTPUT, workload.tolerance.max_rtol)
    unit = next((u for u, error in _TOLERANCE_UNITS if tolerance >= error), None)
    if unit is None or "fp32" not in work:
        return work
    moved = {u: flops for u, flops in work.items() if u != "fp32"}
    moved[unit] = moved.get(unit, 0) + work["fp32"]
    return moved


__all__ = [
    "Analysis",
    "Bound",
    "Precision",
    "Stages",
    "analysis_of",
    "analyze",
    "bound_of",
    "run_stages",
]
