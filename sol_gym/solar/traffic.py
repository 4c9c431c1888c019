"""Compulsory traffic: bytes that any kernel must read and write, starting from cold caches.

Every demanded element of an input is read once at its declared width, every element of an output is
written once; what lies between stays on the chip. An input changed in place is written where it
changes, and an output that the reference returns as an expanded view or as another output's alias
costs its memory once.
"""

from __future__ import annotations

from ..problem import DTYPE_BYTES, Problem, Workload
from .demand import Outcome
from .region import Region
from .trace import Control, Trace, Value


def read_bytes(
    problem: Problem, workload: Workload, outcome: Outcome, known: set[str]
) -> dict[str, int]:
    """Input name -> bytes to read.

    Args:
        problem: the problem.
        workload: the workload.
        outcome: of the demand pass.
        known: inputs whose values are the same in every draw; a kernel may do without them.
    """
    return {
        name: 0 if name in known else outcome.read[name].count() * DTYPE_BYTES[arg.dtype]
        for name, arg in problem.tensors(workload).items()
    }


def write_bytes(
    problem: Problem, workload: Workload, trace: Trace, outcome: Outcome
) -> dict[str, int]:
    """Output name, or name of an input changed in place -> bytes to write."""
    names = {id(v.base): n for n, v in trace.inputs.items()}
    returned = dict(zip(problem.outputs(workload), trace.outputs, strict=True))
    written: dict[str, int] = {}
    there: dict[int, Region] = {}
    for name, value in returned.items():
        base = value.base
        before = there.get(id(base), Region.empty(base.shape))
        if id(base) in names:
            # Of an input's own memory only what was changed in place is written, once.
            fresh = outcome.written.get(names[id(base)], before).subtract(before)
        else:
            # An expanded view is written once for all its repeats, an alias not again.
            fresh = value.to_base(Region.full(value.shape)).subtract(before)
        there[id(base)] = before.union(fresh)
        written[name] = fresh.count() * base.dtype.itemsize
    for name, region in outcome.written.items():
        if id(trace.inputs[name].base) not in there:
            written[name] = region.count() * trace.inputs[name].dtype.itemsize
    return written


def unfused_bytes(trace: Trace) -> int:
    """Traffic of one kernel an operation: all arguments read, all results written."""
    moved = 0
    for step in trace.steps:
        if isinstance(step, Control):
            moved += _size(step.value)
            continue
        arguments = {id(v): v for v in step.inputs}.values()
        moved += sum(map(_size, arguments))
        moved += sum(_size(v) for v in (*step.fresh, *step.written))
    return moved


def _size(value: Value) -> int:
    return value.numel * value.dtype.itemsize
