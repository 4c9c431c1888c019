"""Small problems made of a reference and shapes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest

from sol_gym.problem import Definition, Problem, TensorSpec, Tolerance, Workload

Spec = tuple[list[int], str]


def make_problem(
    reference: str,
    inputs: dict[str, Spec | float],
    outputs: dict[str, Spec],
    *,
    custom: tuple[str, ...] = (),
    tolerance: Tolerance | None = None,
) -> Problem:
    """A problem with one workload.

    Args:
        reference: source that defines `run` (and `generate`, if any input is custom).
        inputs: name -> (shape, dtype), or the value of a scalar.
        outputs: name -> (shape, dtype).
        custom: names of the inputs that `generate` makes.
        tolerance: of the workload.
    """
    definition = Definition(
        name="test",
        axes={},
        inputs={
            n: TensorSpec(shape=[str(d) for d in s[0]], dtype=s[1])
            if isinstance(s, tuple)
            else TensorSpec(shape=None, dtype="float32")
            for n, s in inputs.items()
        },
        outputs={
            n: TensorSpec(shape=[str(d) for d in s[0]], dtype=s[1]) for n, s in outputs.items()
        },
        custom_inputs_entrypoint="generate" if custom else None,
        reference="import torch\nimport torch.nn.functional as F\n" + textwrap.dedent(reference),
    )
    kinds = {
        n: {"type": "custom" if n in custom else "random"}
        if isinstance(s, tuple)
        else {"type": "scalar", "value": s}
        for n, s in inputs.items()
    }
    workload = Workload.model_validate(
        {"uuid": "w", "axes": {}, "inputs": kinds, "tolerance": tolerance}
    )
    return Problem(id="test", definition=definition, workloads=(workload,))


@pytest.fixture(name="make_problem")
def _make_problem() -> Callable[..., Problem]:
    return make_problem
