"""Signs that a problem is no problem, in what its reference was seen to do.

Each rule is told about runs of a reference and says what is wrong with them. The check of our own
packs (`checking`) and the audit of imported problems (`formats.audit`) ask the same questions; they
differ in what they run, and in whether one workload is enough to complain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .problem import Problem, TensorArg, Tolerance
from .sandbox.correctness import Comparison
from .sandbox.reference import InvalidReference, Reference

ZERO = "zero throughout"
ONE_VALUE = "one value throughout"
SAME = "the same for other inputs"

_WIDE_ENOUGH = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes in which arithmetic can be done."""


def open_tolerances(problem: Problem) -> Iterator[str]:
    """A tolerance that accepts everything is no check."""
    for workload in problem.workloads:
        if workload.tolerance.required_matched_ratio <= 0:
            yield f"workload {workload.uuid}: required_matched_ratio is 0, which accepts any output"


def changed_inputs(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Inputs that the reference has written to.

    Args:
        before: inputs by name.
        after: what the reference was called with, which were copies of them.
    """
    for name, value in before.items():
        if not same(value, after[name]):
            yield f"the reference changes its input {name!r}; it must leave its arguments alone"


def unrepeatable_outputs(
    first: dict[str, Tensor], again: dict[str, Tensor], tolerance: Tolerance
) -> Iterator[str]:
    """Outputs that differ, beyond the tolerance, between two runs on the same inputs."""
    tolerance = tolerance.model_copy(update={"allow_negative_inf": True})
    for name, output in first.items():
        values = wide(output)
        if bool((torch.isnan(values) | torch.isposinf(values)).any()):
            continue  # `not_finite_outputs` says so.
        if not Comparison(tolerance).add(name, again[name], output):
            yield (
                f"output {name!r} differs between two runs on the same inputs (dropout? state?): "
                "no kernel can be right"
            )


def not_finite_outputs(outputs: dict[str, Tensor], tolerance: Tolerance) -> Iterator[str]:
    """Outputs that are NaN, or infinite where the tolerance does not allow it, can never match."""
    for name, output in outputs.items():
        values = wide(output)
        if bool(torch.isnan(values).any()):
            yield f"output {name!r} has NaN"
        infinite = torch.isinf(values)
        if tolerance.allow_negative_inf:
            infinite &= values > 0
        if bool(infinite.any()):
            share = 100 * float(infinite.double().mean())
            yield f"output {name!r} is infinite in {share:.3g} % of its elements"


def constancy(output: Tensor, of_other: Tensor) -> list[str]:
    """Which of `ZERO`, `ONE_VALUE` and `SAME` an output is, the strongest first.

    Args:
        output: with at least one element.
        of_other: the same output for another draw of the inputs.
    """
    values = wide(output)
    found = []
    if bool((values == 0).all()):
        found.append(ZERO)
    if values.numel() > 1 and bool((values == values.reshape(-1)[0]).all()):
        found.append(ONE_VALUE)
    if same(output, of_other):
        found.append(SAME)
    return found


def depends_on(
    name: str,
    value: Any,
    inputs: dict[str, Any],
    outputs: dict[str, Tensor],
    reference: Reference,
    declared: dict[str, TensorArg],
) -> bool | None:
    """Whether any of `outputs` is another if input `name` is `value` instead.

    None if the reference refuses the value, which shows that it reads it.
    """
    try:
        answer = run_on_copies(reference, inputs | {name: value}, declared)
    except InvalidReference:
        return None
    return any(not same(answer[output], before) for output, before in outputs.items())


def other_value(value: Any) -> Any:
    """Another value for an input; None for a tensor of integers, not all of which may be legal."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value or 1
    if isinstance(value, float):
        return 2 * value + 0.1 if math.isfinite(value) else 1.0
    if not has_arithmetic(value):
        return None
    generator = torch.Generator().manual_seed(3)
    factor = 1 + 0.5 * torch.rand(value.shape, generator=generator)
    return (torch.where(value == 0, 0.5, value.float()) * factor).to(value.dtype)


# ---- Runs and values ------------------------------------------------------------------------


def run_on_copies(
    reference: Reference, inputs: dict[str, Any], declared: dict[str, TensorArg]
) -> dict[str, Tensor]:
    """The outputs by name, as tensors that neither the inputs nor a later run share.

    Raises:
        InvalidReference: the reference fails or does not return what is declared.
    """
    results = reference(list(copies(inputs).values()), declared)
    return {name: result.clone() for name, result in zip(declared, results, strict=True)}


def copies(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs in memory of their own."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal; tensors if they hold the same bits, of any dtype."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def wide(tensor: Tensor) -> Tensor:
    """Values for comparison and arithmetic: floats as float64, packed FP4 as its bytes."""
    if str(tensor.dtype) == "torch.float4_e2m1fn_x2":
        tensor = tensor.view(torch.uint8)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def has_arithmetic(tensor: Tensor) -> bool:
    """Whether it holds floats that are not quantised."""
    return tensor.dtype in _WIDE_ENOUGH


def _bits(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return tensor.contiguous().reshape(-1).view(torch.uint8)
