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

from ..checking import check_tolerances, same_bytes
from ..errors import ProblemError
from ..inputs import InputMaker
from ..problem import Problem, TensorArg, Workload
from ..sandbox.correctness import Comparison
from ..sandbox.reference import InvalidReference, Reference

MAX_BYTES = 512 << 20
"""Inputs and outputs of a workload that is still audited."""
MAX_WORKLOADS = 2
BUDGET_S = 45.0
"""Seconds from which on inputs are no longer tried one by one."""
_FLOATS = ("float64", "float32", "float16", "bfloat16")


class Case(NamedTuple):
    """One workload with two input sets and the reference's answers to them."""

    problem: Problem
    workload: Workload
    reference: Reference
    inputs: dict[str, Any]
    other: dict[str, Any]
    """A second draw of the same inputs."""
    outputs: list[Tensor]
    outputs_again: list[Tensor]
    """From a second run on the same inputs."""
    outputs_of_other: list[Tensor]
    deadline: float
    """Monotonic time from which on rules may leave out what takes long."""

    @property
    def specs(self) -> dict[str, TensorArg]:
        """The outputs' names, shapes and dtypes."""
        return self.problem.outputs(self.workload)

    def answer(self, inputs: dict[str, Any]) -> list[Tensor] | None:
        """The reference's outputs for other inputs; None if it refuses them."""
        copies = [v.clone() if isinstance(v, Tensor) else v for v in inputs.values()]
        try:
            return [o.clone() for o in self.reference(copies, self.specs)]
        except InvalidReference:
            return None

    def passes(self, index: int, candidate: Tensor) -> bool:
        """Whether `candidate` would be accepted in place of an output."""
        name = list(self.specs)[index]
        return Comparison(self.workload.tolerance).add(name, candidate, self.outputs[index])


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
    for fault in check_tolerances(problem):
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
    sets = [InputMaker(problem, workload, "cpu", seed=seed).draw() for seed in (1, 2)]
    specs = problem.outputs(workload)
    answers = []
    for inputs in (sets[0], sets[0], sets[1]):
        copies = {n: v.clone() if isinstance(v, Tensor) else v for n, v in inputs.items()}
        answers.append([o.clone() for o in reference(list(copies.values()), specs)])
        if len(answers) == 1:
            for name, value in inputs.items():
                if not _same(value, copies[name]):
                    yield f"the reference changes its input {name!r}"
    first, again, other = answers
    case = Case(
        problem, workload, reference, sets[0], sets[1], first, again, other, deadline
    )  # fmt: skip
    for rule in RULES:
        yield from rule(case)


# ---- Rules ----------------------------------------------------------------------------------


def constant_output(case: Case) -> Iterator[str]:
    """An output that is zero, one value throughout, or the same for other inputs."""
    for name, output, other in zip(case.specs, case.outputs, case.outputs_of_other, strict=True):
        values = _wide(output)
        if not values.numel():
            yield f"output {name!r} has no elements"
        elif bool((values == 0).all()):
            yield f"output {name!r} is zero throughout"
        elif values.numel() > 1 and bool((values == values.reshape(-1)[0]).all()):
            yield f"output {name!r} is one value throughout: {float(values.reshape(-1)[0]):g}"
        elif not _all_same(case.inputs, case.other) and torch.equal(values, _wide(other)):
            yield f"output {name!r} is the same for other inputs"


def unrepeatable_output(case: Case) -> Iterator[str]:
    """An output that differs, beyond the tolerance, between two runs on the same inputs."""
    for i, name in enumerate(case.specs):
        finite = torch.isfinite(_wide(case.outputs[i])).all()  # Others never match themselves.
        if finite and not case.passes(i, case.outputs_again[i]):
            yield (
                f"output {name!r} differs between two runs on the same inputs (dropout? state?): "
                "no kernel can be right"
            )


def infinite_output(case: Case) -> Iterator[str]:
    """Outputs that are NaN, or infinite where the tolerance does not allow it, can never match."""
    for name, output in zip(case.specs, case.outputs, strict=True):
        if bool(torch.isnan(_wide(output)).any()):
            yield f"output {name!r} has NaN"
        infinite = torch.isinf(_wide(output))
        negative = infinite & (_wide(output) < 0)
        if case.workload.tolerance.allow_negative_inf:
            infinite = infinite & ~negative
        if bool(infinite.any()):
            share = 100 * float(infinite.double().mean())
            yield f"output {name!r} is infinite in {share:.3g} % of its elements"


def unread_input(case: Case) -> Iterator[str]:
    """An input that no output depends on, or that is the same in every draw."""
    known = set(case.problem.pack.unread_inputs) if case.problem.pack else set()
    untried = []
    for name, arg in case.problem.tensors(case.workload).items():
        if not arg.numel or name in known:
            continue
        if time.monotonic() > case.deadline:
            untried.append(name)
            continue
        before = case.inputs[name]
        drawn_alike = _same(before, case.other[name])
        changed = _changed(before) if drawn_alike else case.other[name]
        if changed is None:
            continue
        answer = case.answer({**case.inputs, name: changed})
        if answer is None:  # It reads the input, for the change breaks it.
            continue
        if all(map(_same, answer, case.outputs)):
            yield f"no output depends on input {name!r}"
        elif drawn_alike and arg.dtype in _FLOATS and arg.name not in _recorded(case.workload):
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
            for i, (name, output) in enumerate(zip(case.specs, case.outputs, strict=True))
            if output.numel()
            and (candidate := make(output)) is not None
            and case.passes(i, candidate)
        ]
        if passing and len(passing) == len(case.specs):
            yield f"a null kernel passes: {what} in every output is within tolerance"
        elif passing:
            yield f"{what} in output {', '.join(map(repr, passing))} is within tolerance"
    for i, (name, output) in enumerate(zip(case.specs, case.outputs, strict=True)):
        for given, value in case.inputs.items():
            if not isinstance(value, Tensor) or not output.numel():
                continue
            alike = value.shape == output.shape and value.dtype == output.dtype
            if alike and case.passes(i, value):
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


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same_bytes(a, b)
    return bool(a == b)


def _all_same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(_same(a[name], b[name]) for name in a)


def _wide(tensor: Tensor) -> Tensor:
    """Values for comparison and arithmetic; packed fp4 as its bytes."""
    if str(tensor.dtype) == "torch.float4_e2m1fn_x2":
        tensor = tensor.view(torch.uint8)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def _changed(tensor: Tensor) -> Tensor | None:
    """Another value for an input that is always drawn the same; None for what is no float."""
    if str(tensor.dtype).removeprefix("torch.") not in _FLOATS:
        return None
    generator = torch.Generator().manual_seed(3)
    factor = 1 + 0.5 * torch.rand(tensor.shape, generator=generator)
    return (torch.where(tensor == 0, 0.5, tensor.float()) * factor).to(tensor.dtype)


def _mean(output: Tensor) -> Tensor | None:
    if output.numel() < 2 or str(output.dtype).removeprefix("torch.") not in _FLOATS:
        return None
    finite = output.double()
    finite = finite[torch.isfinite(finite)]
    return torch.full_like(output, float(finite.mean())) if finite.numel() else None
