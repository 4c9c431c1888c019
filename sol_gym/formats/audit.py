"""Is a problem worth solving? An audit for degenerate ones.

A benchmark is fooled by problems whose answer does not depend on the question: a constant output,
an input nobody reads, a tolerance so wide that zeros pass. Each rule below is a function that
yields what it found. Rules judge by what really happens: inputs are drawn as the judge draws them,
the reference runs, and its outputs are compared by the judge's own comparison.

The reference is untrusted here: callers go through `sol_gym.formats.audit_problem`, which runs
`audit_record` in a sandboxed process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import degenerate
from ..errors import ProblemError
from ..inputs import InputMaker
from ..problem import Problem, Workload
from ..sandbox.correctness import Comparison
from ..sandbox.reference import InvalidReference, Reference

MAX_BYTES = 512 << 20
"""Inputs and outputs of a workload that is still audited."""
MAX_WORKLOADS = 2
BUDGET_S = 45.0
"""Seconds from which on inputs are no longer tried one by one."""


class Case(NamedTuple):
    """One workload with two input sets and the reference's answers to them."""

    problem: Problem
    workload: Workload
    reference: Reference
    inputs: dict[str, Any]
    other: dict[str, Any]
    """A second draw of the same inputs."""
    outputs: dict[str, Tensor]
    outputs_again: dict[str, Tensor]
    """From a second run on the same inputs."""
    outputs_of_other: dict[str, Tensor]
    deadline: float
    """Monotonic time from which on rules may leave out what takes long."""

    def passes(self, name: str, candidate: Tensor) -> bool:
        """Whether `candidate` would be accepted in place of an output."""
        return Comparison(self.workload.tolerance).add(name, candidate, self.outputs[name])


def audit_record(
    record: dict[str, Any], root: str | None = None, blob_root: str | None = None
) -> list[dict[str, str]]:
    """`audit` of a problem given as JSON data; findings as JSON data."""
    problem = Problem.model_validate(record)
    problem = problem.model_copy(update={"root": root, "blob_root": blob_root})
    return [{"where": where, "message": message} for where, message in audit(problem)]


def audit(problem: Problem) -> Iterator[tuple[str, str]]:
    """What makes a problem degenerate or unusable: pairs of a workload's uuid (or "") and a message.

    Looks at the `MAX_WORKLOADS` smallest workloads of at most `MAX_BYTES` (smoke ones if there are
    some), on the CPU, and at fewer where one takes more than `BUDGET_S`.
    """
    for fault in degenerate.open_tolerances(problem):
        yield "", fault
    small = _small(problem)
    if small is None:
        yield "", f"not audited: every workload has more than {MAX_BYTES >> 20} MiB of data"
        return
    try:
        reference = Reference(small)
    except InvalidReference as error:
        yield "", str(error)
        return
    found: dict[str, list[str]] = {}
    deadline = time.monotonic() + BUDGET_S
    looked_at = 0
    for workload in small.workloads:
        if looked_at and time.monotonic() > deadline:
            break
        looked_at += 1
        try:
            for message in audit_workload(small, workload, reference, deadline):
                found.setdefault(message, []).append(workload.uuid)
        except (InvalidReference, ProblemError) as error:
            found.setdefault(str(error), []).append(workload.uuid)
    for message, where in found.items():
        yield "" if len(where) == looked_at else ", ".join(where), message


def audit_workload(
    problem: Problem, workload: Workload, reference: Reference, deadline: float
) -> Iterator[str]:
    """Findings of all rules on one workload; from `deadline` (monotonic) on without the slow ones.

    Raises:
        InvalidReference: the reference fails or does not return what is declared.
        ProblemError: the inputs cannot be made.
    """
    inputs, other = (InputMaker(problem, workload, "cpu", seed=seed).draw() for seed in (1, 2))
    declared = problem.outputs(workload)
    used = degenerate.copies(inputs)
    results = reference(list(used.values()), declared)
    yield from degenerate.changed_inputs(inputs, used)
    case = Case(
        problem,
        workload,
        reference,
        inputs,
        other,
        {name: result.clone() for name, result in zip(declared, results, strict=True)},
        degenerate.run_on_copies(reference, inputs, declared),
        degenerate.run_on_copies(reference, other, declared),
        deadline,
    )
    for rule in RULES:
        yield from rule(case)


# ---- Rules ----------------------------------------------------------------------------------


def constant_output(case: Case) -> Iterator[str]:
    """An output that is zero, one value throughout, or the same for other inputs."""
    varied = any(not degenerate.same(case.inputs[name], case.other[name]) for name in case.inputs)
    for name, output in case.outputs.items():
        if not output.numel():
            yield f"output {name!r} has no elements"
            continue
        found = degenerate.constancy(output, case.outputs_of_other[name])
        if found and (varied or found[0] != degenerate.SAME):
            value = float(degenerate.wide(output).reshape(-1)[0])
            which = f": {value:g}" if found[0] == degenerate.ONE_VALUE else ""
            yield f"output {name!r} is {found[0]}{which}"


def unrepeatable_output(case: Case) -> Iterator[str]:
    """An output that differs, beyond the tolerance, between two runs on the same inputs."""
    return degenerate.unrepeatable_outputs(
        case.outputs, case.outputs_again, case.workload.tolerance
    )


def infinite_output(case: Case) -> Iterator[str]:
    """Outputs that are NaN, or infinite where the tolerance does not allow it, can never match."""
    return degenerate.not_finite_outputs(case.outputs, case.workload.tolerance)


def unread_input(case: Case) -> Iterator[str]:
    """An input that no output depends on, or that is the same in every draw."""
    known = set(case.problem.pack.unread_inputs) if case.problem.pack else set()
    declared = case.problem.outputs(case.workload)
    untried = []
    for name, arg in case.problem.tensors(case.workload).items():
        if not arg.numel or name in known:
            continue
        if time.monotonic() > case.deadline:
            untried.append(name)
            continue
        before = case.inputs[name]
        drawn_alike = degenerate.same(before, case.other[name])
        changed = degenerate.other_value(before) if drawn_alike else case.other[name]
        if changed is None:
            continue
        reads = degenerate.depends_on(
            name, changed, case.inputs, case.outputs, case.reference, declared
        )
        if reads is None:
            continue
        if not reads:
            yield f"no output depends on input {name!r}"
        elif drawn_alike and name not in _recorded(case.workload):
            yield f"input {name!r} is the same in every draw: a kernel that leaves it out passes"
    if untried:
        some = ", ".join(untried[:3]) + (f" and {len(untried) - 3} more" if untried[3:] else "")
        yield f"not tried for lack of time, whether an output depends on {some}"


def null_kernel(case: Case) -> Iterator[str]:
    """Outputs that cost nothing and yet pass: zeros, a constant, an input handed through."""
    trivial: dict[str, Callable[[Tensor], Tensor | None]] = {
        "zeros": torch.zeros_like,
        "the mean of the right values everywhere": _mean,
    }
    for what, make in trivial.items():
        passing = [
            name
            for name, output in case.outputs.items()
            if output.numel()
            and (candidate := make(output)) is not None
            and case.passes(name, candidate)
        ]
        if passing and len(passing) == len(case.outputs):
            yield f"a null kernel passes: {what} in every output is within tolerance"
        elif passing:
            yield f"{what} in output {', '.join(map(repr, passing))} is within tolerance"
    for name, output in case.outputs.items():
        for given, value in case.inputs.items():
            if not isinstance(value, Tensor) or not output.numel():
                continue
            alike = value.shape == output.shape and value.dtype == output.dtype
            if alike and case.passes(name, value):
                yield f"input {given!r} handed through passes as output {name!r}"


RULES: tuple[Callable[[Case], Iterator[str]], ...] = (
    constant_output,
    unrepeatable_output,
    infinite_output,
    unread_input,
    null_kernel,
)
"""All rules; adding one is adding a function."""


# ---- Tensors --------------------------------------------------------------------------------


def _small(problem: Problem) -> Problem | None:
    if problem.pack and problem.pack.smoke and problem.profile == "full":
        problem = problem.with_profile("smoke")

    def size(index: int) -> int:
        return problem.declared_bytes(problem.workloads[index])

    order = sorted(range(len(problem.workloads)), key=size)[:MAX_WORKLOADS]
    chosen = sorted(i for i in order if size(i) <= MAX_BYTES)
    return problem.with_workloads(chosen) if chosen else None


def _recorded(workload: Workload) -> set[str]:
    return {name for name, spec in workload.inputs.items() if spec.type == "safetensors"}


def _mean(output: Tensor) -> Tensor | None:
    if output.numel() < 2 or not degenerate.has_arithmetic(output):
        return None
    finite = output.double()
    finite = finite[torch.isfinite(finite)]
    return torch.full_like(output, float(finite.mean())) if finite.numel() else None
