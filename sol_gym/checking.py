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

from .errors import ProblemError
from .float64 import Codes, recording_codes, run_in_float64
from .influence import InputTracker
from .inputs import InputMaker
from .problem import Pack, Problem, TensorArg, Tolerance, Workload, export_problem, load_problem
from .sandbox.correctness import Comparison
from .sandbox.reference import InvalidReference, Reference

_MAX_BYTES = 256 << 20


def check_problem(problem: Problem) -> list[str]:
    """Faults of a problem, as messages for its author; empty if there are none."""
    faults = [*check_tolerances(problem), *check_pack(problem), *check_export(problem)]
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


def check_tolerances(problem: Problem) -> Iterator[str]:
    """A tolerance that accepts everything is no check."""
    for workload in problem.workloads:
        if workload.tolerance.required_matched_ratio <= 0:
            yield f"workload {workload.uuid}: required_matched_ratio is 0, which accepts any output"


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
    varied: set[str] = field(default_factory=set)
    """Outputs that differ between draws."""
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
    used = InputMaker(problem, workload, "cpu", seed=1).draw()
    inputs = _copies(used)
    tensors = {name: value for name, value in used.items() if isinstance(value, Tensor)}
    tracker = InputTracker(tensors)
    with recording_codes() as codes, tracker:
        results = dict(zip(declared, reference(list(used.values()), declared), strict=True))
    for name, result in results.items():
        seen.influence.setdefault(name, set()).update(tracker.names(result))

    for name, before in inputs.items():
        if not _same(before, used[name]):
            yield f"the reference changes its input {name!r}; it must leave its arguments alone"
    yield from _shared_memory(tensors, results)
    for name, result in results.items():
        if _has_values(result) and bool(torch.isnan(result).any()):
            yield f"output {name!r} has NaN"

    again = reference(list(_copies(inputs).values()), declared)
    for (name, first), second in zip(results.items(), again, strict=True):
        if not Comparison(Tolerance(allow_negative_inf=True)).add(name, second, first):
            yield f"output {name!r} differs between two runs on the same inputs"

    yield from _check_unread(problem, inputs, results, reference)
    yield from _check_float64(problem, workload, inputs, results, codes, reference)

    other_inputs = InputMaker(problem, workload, "cpu", seed=2).draw()
    other = reference(list(other_inputs.values()), declared)
    seen.varying |= {k for k, value in inputs.items() if not _same(value, other_inputs[k])}
    seen.varied |= {k for (k, a), b in zip(results.items(), other, strict=True) if not _same(a, b)}
    seen.not_zero |= {name for name, result in results.items() if bool(_raw(result).any())}
    for name in set(inputs) - set(tensors) - seen.influential_scalars:
        if _scalar_matters(name, inputs, results, reference):
            seen.influential_scalars.add(name)


def _check_unread(
    problem: Problem, inputs: dict[str, Any], results: dict[str, Tensor], reference: Reference
) -> Iterator[str]:
    """Inputs declared as unread can hold anything."""
    unread = [name for name in _pack(problem).unread_inputs if name in inputs]
    if not unread:
        return
    poisoned = _copies(inputs) | {name: _poison(inputs[name]) for name in unread}
    with torch.no_grad():
        outcome = reference.run(*poisoned.values())
    for (name, expected), result in zip(results.items(), _as_list(outcome), strict=True):
        if not _same(expected, result):
            yield f"output {name!r} changes with the inputs that pack.json calls unread: {unread}"


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
        exact = run_in_float64(reference.run, list(_copies(inputs).values()), codes)
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
        if name in zeros:
            if name in seen.not_zero:
                yield f"output {name!r} is not zero, although pack.json lists it in zero_outputs"
        elif name not in seen.not_zero:
            yield f"output {name!r} is all zeros; if it is so by definition, list it in zero_outputs"
        elif name not in seen.varied and seen.influence[name] & seen.varying:
            yield f"output {name!r} is the same for different inputs"
    if seen.varying and not seen.varied:
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


def _scalar_matters(
    name: str, inputs: dict[str, Any], results: dict[str, Tensor], reference: Reference
) -> bool:
    value = inputs[name]
    if isinstance(value, bool):
        changed: Any = not value
    elif isinstance(value, int):
        changed = 2 * value or 1
    else:
        changed = 2 * value + 0.1 if math.isfinite(value) else 1.0
    try:
        with torch.no_grad():
            outcome = reference.run(*(_copies(inputs) | {name: changed}).values())
    except Exception:
        return True
    return not all(map(_same, _as_list(outcome), results.values()))


def _poison(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.full_like(value, math.nan if value.is_floating_point() else -1)
    return math.nan if isinstance(value, float) else -1


def _copies(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}


def _as_list(returned: Any) -> list[Tensor]:
    if isinstance(returned, dict):
        returned = tuple(returned.values())
    return list(returned) if isinstance(returned, tuple | list) else [returned]


def _has_values(tensor: Tensor) -> bool:
    """Whether torch can compare it: not packed FP4, nor FP8."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def _smallest(problem: Problem) -> Problem | None:
    def size(index: int) -> int:
        workload = problem.workloads[index]
        tensors: list[TensorArg] = [
            *problem.tensors(workload).values(),
            *problem.outputs(workload).values(),
        ]
        return sum(t.nbytes for t in tensors)

    best = min(range(len(problem.workloads)), key=size)
    return problem.with_workloads([best]) if size(best) <= _MAX_BYTES else None


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_raw(a), _raw(b))


def _raw(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small tensors on a shared machine: threads wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
