"""Checks of a problem pack: does its reference do what its definition says?

Run by `sol-gym problems check` on the smoke workloads where there are some (else on the smallest
full workload that fits), on the CPU. Each rule is a function that yields the faults it finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .inputs import InputMaker
from .problem import Problem, Tolerance, Workload
from .sandbox.correctness import Comparison
from .sandbox.reference import InvalidReference, Reference

_MAX_BYTES = 256 << 20
_CONSTANT = "no output depends on the inputs"


def check_problem(problem: Problem) -> list[str]:
    """Faults of a problem, as messages for its author; empty if there are none."""
    faults = list(check_tolerances(problem))
    small = (
        problem.with_profile("smoke") if problem.pack and problem.pack.smoke else _smallest(problem)
    )
    if small is None:
        return [*faults, "no smoke profile, and every workload is too large to try here"]
    try:
        reference = Reference(small)
    except InvalidReference as error:
        return [*faults, str(error)]
    constant = 0
    for workload in small.workloads:
        where = f"workload {workload.uuid}"
        try:
            found = list(check_workload(small, workload, reference))
            constant += _CONSTANT in found
            faults += [f"{where}: {fault}" for fault in found if fault != _CONSTANT]
        except InvalidReference as error:
            faults.append(f"{where}: {error}")
    if constant == len(
        small.workloads
    ):  # In a single workload it may be the branch that is tested.
        faults.append(_CONSTANT)
    return faults


def check_tolerances(problem: Problem) -> Iterator[str]:
    """A tolerance that accepts everything is no check."""
    for workload in problem.workloads:
        if workload.tolerance.required_matched_ratio <= 0:
            yield f"workload {workload.uuid}: required_matched_ratio is 0, which accepts any output"


def check_workload(problem: Problem, workload: Workload, reference: Reference) -> Iterator[str]:
    """Shapes and dtypes, untouched inputs, determinism, and that outputs depend on the inputs."""
    device = torch.device("cpu")
    outputs = problem.outputs(workload)
    first = InputMaker(problem, workload, device, seed=1).draw()
    tensors = {k: v.clone() for k, v in first.items() if isinstance(v, torch.Tensor)}
    kept = {**first, **tensors}
    results = [r.clone() for r in reference(list(first.values()), outputs)]
    for name, before in tensors.items():
        after = first[name]
        if isinstance(after, torch.Tensor) and not same_bytes(after, before):
            yield f"the reference changes its input {name!r}"
    again = reference(list(kept.values()), outputs)
    for spec, a, b in zip(outputs.values(), again, results, strict=True):
        if not Comparison(Tolerance(allow_negative_inf=True)).add(spec.name, a, b):
            yield f"output {spec.name!r} differs between two runs on the same inputs"
    for spec, result in zip(outputs.values(), results, strict=True):
        if (
            result.is_floating_point()
            and result.dtype.itemsize > 1
            and bool(torch.isnan(result).any())
        ):
            yield f"output {spec.name!r} has NaN"
    other = InputMaker(problem, workload, device, seed=2).draw()
    varies = any(not same_bytes(before, _tensor(other[name])) for name, before in tensors.items())
    if varies and all(map(same_bytes, reference(list(other.values()), outputs), results)):
        yield _CONSTANT


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


def _smallest(problem: Problem) -> Problem | None:
    def size(index: int) -> int:
        return problem.declared_bytes(problem.workloads[index])

    best = min(range(len(problem.workloads)), key=size)
    return problem.with_workloads([best]) if size(best) <= _MAX_BYTES else None


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, whatever their dtype can compare."""

    def raw(t: torch.Tensor) -> torch.Tensor:
        return (
            t.contiguous().reshape(-1).view(torch.uint8)
            if t.numel()
            else torch.empty(0, dtype=torch.uint8)
        )

    return torch.equal(raw(a), raw(b))
