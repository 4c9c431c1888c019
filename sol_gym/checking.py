"""Checks of a problem pack: does its reference do what its files say?

Run by `sol-gym problems check` on the smoke workloads where there are some (else on the smallest
full workload that fits), on one core of the CPU. Each rule is a function that yields the faults it
finds. A single workload may show just the branch that it is there to test, so whether an input or
an output matters at all is judged over all workloads of a problem.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import degenerate
from .errors import ProblemError
from .float64 import Codes, recording_codes, run_in_float64
from .influence import InputTracker
from .inputs import InputMaker
from .problem import Pack, Problem, TensorArg, Workload, export_problem, load_problem
from .sandbox.correctness import Comparison
from .sandbox.reference import InvalidReference, Reference

_MAX_BYTES = 256 << 20


def check_problem(problem: Problem) -> list[str]:
    """Faults of a problem, as messages for its author; empty if there are none."""
    faults = [*degenerate.open_tolerances(problem), *check_pack(problem), *check_export(problem)]
    small = (
        problem.with_profile("smoke") if problem.pack and problem.pack.smoke else _smallest(problem)
    )
    if small is None:
        return [*faults, "no smoke profile, and every workload is too large to try here"]
    seen = _Seen()
    with _one_thread():
        try:
            reference = Reference(small)
        except InvalidReference as error:
            return [*faults, str(error)]
        for workload in small.workloads:
            where = f"workload {workload.uuid}"
            try:
                found = list(check_workload(small, workload, reference, seen))
                faults += [f"{where}: {fault}" for fault in found]
            except (InvalidReference, ProblemError) as error:
                seen.complete = False
                faults.append(f"{where}: {error}")
    if seen.complete:
        faults += [*check_reads(small, seen), *check_outputs(small, seen)]
    return faults


# ---- Rules about the files ------------------------------------------------------------------


def check_pack(problem: Problem) -> Iterator[str]:
    """What pack.json says about inputs and outputs is about such that exist."""
    pack, inputs, outputs = _pack(problem), problem.definition.inputs, problem.definition.outputs
    named = {"unread_inputs": pack.unread_inputs, "custom_inputs": pack.custom_inputs}
    if unknown := sorted(set(pack.zero_outputs) - set(outputs)):
        yield f"pack.json: zero_outputs names {unknown}; outputs are {list(outputs)}"
    for recipe, kinds in pack.recipes.items():
        named[f"recipes.{recipe}"] = kinds.random
    for where, names in named.items():
        if unknown := sorted(set(names) - set(inputs)):
            yield f"pack.json: {where} names {unknown}; inputs are {list(inputs)}"
    for output, source in pack.published_aliases.items():
        if output not in outputs or source not in inputs:
            yield (
                f"pack.json: published_aliases has {output!r}: {source!r}, expected the name of an "
                f"output ({list(outputs)}) and that of an input ({list(inputs)})"
            )
        elif _form(outputs[output]) != _form(inputs[source]):
            yield f"pack.json: {output!r} cannot be {source!r}: shapes or dtypes differ"


def check_export(problem: Problem) -> Iterator[str]:
    """Definition, reference and workloads are the same after export to the public layout and back."""
    with tempfile.TemporaryDirectory(prefix="sol_gym-") as folder:
        try:
            again = load_problem(export_problem(problem, folder))
        except ProblemError as error:
            yield f"the exported problem does not load: {error}"
            return
    if again.definition != problem.definition:
        yield "the definition is another after export and import"
    if [w.model_dump() for w in again.workloads] != [w.model_dump() for w in problem.workloads]:
        yield "the workloads are others after export and import"


# ---- Rules about runs -----------------------------------------------------------------------


@dataclass
class _Seen:
    """What the runs of all workloads have shown together."""

    complete: bool = True
    """Whether every workload could be run."""
    influence: dict[str, set[str]] = field(default_factory=dict)
    """Output -> inputs that may have influenced it."""
    influential_scalars: set[str] = field(default_factory=set)
    varying: set[str] = field(default_factory=set)
    """Inputs that differ between draws."""
    constancy: dict[str, list[str]] = field(default_factory=dict)
    """Output -> how it was constant in every workload so far in which it has elements."""
    not_zero: set[str] = field(default_factory=set)


def check_workload(
    problem: Problem, workload: Workload, reference: Reference, seen: _Seen | None = None
) -> Iterator[str]:
    """Shapes, dtypes, memory, repeatability and precision of the reference on one workload.

    Args:
        problem: with the workload.
        workload: small enough to be run some five times.
        reference: the problem's.
        seen: is added to.

    Raises:
        InvalidReference: the reference fails, or returns something else than it declares.
        ProblemError: the inputs cannot be made.
    """
    seen = seen or _Seen()
    declared = problem.outputs(workload)
    inputs = InputMaker(problem, workload, "cpu", seed=1).draw()
    used = degenerate.copies(inputs)
    tensors = {name: value for name, value in used.items() if isinstance(value, Tensor)}
    tracker = InputTracker(tensors)
    with recording_codes() as codes, tracker:
        results = dict(zip(declared, reference(list(used.values()), declared), strict=True))
    for name, result in results.items():
        seen.influence.setdefault(name, set()).update(tracker.names(result))

    yield from degenerate.changed_inputs(inputs, used)
    yield from _shared_memory(tensors, results)
    yield from degenerate.not_finite_outputs(results, workload.tolerance)
    again = degenerate.run_on_copies(reference, inputs, declared)
    yield from degenerate.unrepeatable_outputs(results, again, workload.tolerance)
    yield from _check_unread(problem, inputs, results, reference, declared)
    yield from _check_float64(problem, workload, inputs, results, codes, reference)

    other_inputs = InputMaker(problem, workload, "cpu", seed=2).draw()
    other = degenerate.run_on_copies(reference, other_inputs, declared)
    seen.varying |= {k for k, v in inputs.items() if not degenerate.same(v, other_inputs[k])}
    for name, result in results.items():
        if not result.numel():
            continue
        found = degenerate.constancy(result, other[name])
        seen.constancy[name] = [c for c in seen.constancy.get(name, found) if c in found]
        if degenerate.ZERO not in found:
            seen.not_zero.add(name)
    for name in set(inputs) - set(tensors) - seen.influential_scalars:
        value = degenerate.other_value(inputs[name])
        reads = degenerate.depends_on(name, value, inputs, results, reference, declared)
        if reads is not False:
            seen.influential_scalars.add(name)


def _check_unread(
    problem: Problem,
    inputs: dict[str, Any],
    results: dict[str, Tensor],
    reference: Reference,
    declared: dict[str, TensorArg],
) -> Iterator[str]:
    """Inputs declared as unread can hold anything."""
    for name in _pack(problem).unread_inputs:
        if name not in inputs:
            continue  # `check_pack` says so.
        value = _poison(inputs[name])
        reads = degenerate.depends_on(name, value, inputs, results, reference, declared)
        if reads is not False:
            yield f"an output changes with input {name!r}, which pack.json calls unread"


def _check_float64(
    problem: Problem,
    workload: Workload,
    inputs: dict[str, Any],
    results: dict[str, Tensor],
    codes: Codes,
    reference: Reference,
) -> Iterator[str]:
    """The declared precision is within the tolerance of the formula itself."""
    if _pack(problem).rounding_sensitive:
        return
    try:
        exact = run_in_float64(reference.run, list(degenerate.copies(inputs).values()), codes)
    except Exception as error:
        yield f"the reference cannot be run in float64: {type(error).__name__}: {error}"
        return
    for (name, result), wide in zip(results.items(), exact, strict=True):
        comparison = Comparison(workload.tolerance)
        if not comparison.add(name, wide.to(result.dtype), result):
            yield (
                f"output {name!r} is out of tolerance of the same computation in float64: "
                f"{comparison.reasons[0]}. If a result turns on the last bit of an intermediate, "
                "say why in pack.json: rounding_sensitive"
            )


def check_reads(problem: Problem, seen: _Seen) -> Iterator[str]:
    """The inputs without influence on any output are those that pack.json declares."""
    pack = _pack(problem)
    influential = set().union(seen.influential_scalars, *seen.influence.values())
    for name in problem.definition.inputs:
        if name not in influential and name not in pack.unread_inputs:
            yield (
                f"input {name!r} has no influence on any output; if that is how the problem is "
                "defined, add it to unread_inputs in pack.json"
            )
    for output, source in pack.published_aliases.items():
        if source not in seen.influence.get(output, ()):
            yield f"pack.json: {output!r} is said to be {source!r} changed, but does not stem from it"


def check_outputs(problem: Problem, seen: _Seen) -> Iterator[str]:
    """An output that is always the same is matched by a kernel that computes nothing."""
    zeros = _pack(problem).zero_outputs
    for name in problem.definition.outputs:
        if name not in seen.constancy:
            yield f"output {name!r} has no elements in any workload"
            continue
        constancy = seen.constancy[name]
        if name in zeros:
            if name in seen.not_zero:
                yield f"output {name!r} is not zero, although pack.json lists it in zero_outputs"
            continue
        if not seen.influence[name] & seen.varying:
            constancy = [c for c in constancy if c != degenerate.SAME]
        if constancy:
            hint = (
                "; if it is so by definition, list it in zero_outputs in pack.json"
                if constancy[0] == degenerate.ZERO
                else ""
            )
            yield f"output {name!r} is {constancy[0]}{hint}"
    if seen.varying and all(degenerate.SAME in c for c in seen.constancy.values()):
        yield "no output depends on the inputs"


# ---- Pieces ---------------------------------------------------------------------------------


def _pack(problem: Problem) -> Pack:
    return problem.pack or Pack(id=problem.id, title="")


def _form(spec: Any) -> tuple[Any, str]:
    return spec.shape, spec.dtype


def _shared_memory(tensors: dict[str, Tensor], results: dict[str, Tensor]) -> Iterator[str]:
    owners = {t.untyped_storage().data_ptr(): f"input {k!r}" for k, t in tensors.items()}
    for name, result in results.items():
        memory = result.untyped_storage().data_ptr()
        if result.numel() and memory in owners:
            yield f"output {name!r} is in the memory of {owners[memory]}; it must be a tensor of its own"
        owners[memory] = f"output {name!r}"


def _poison(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.full_like(value, math.nan if value.is_floating_point() else -1)
    return math.nan if isinstance(value, float) else -1


def _smallest(problem: Problem) -> Problem | None:
    def size(index: int) -> int:
        return problem.declared_bytes(problem.workloads[index])

    best = min(range(len(problem.workloads)), key=size)
    return problem.with_workloads([best]) if size(best) <= _MAX_BYTES else None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small tensors on a shared machine: threads wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
