"""Strict sets of the library's own problems: the reference is a measure, honest versions pass."""

from __future__ import annotations

import pytest
import torch

from sol_gym.inputs import InputMaker
from sol_gym.problems import list_ids, load
from sol_gym.sandbox.precision import Yardstick
from sol_gym.sandbox.reference import Reference
from sol_gym.strict import VARIANTS, variants_for

IDS = list_ids()


@pytest.mark.parametrize("problem_id", IDS)
def test_what_a_pack_says_about_strictness_fits_its_problem(problem_id):
    problem = load(problem_id)
    pack, inputs = problem.pack, problem.definition.inputs
    assert set(pack.strict_rules) <= set(inputs), "rules for inputs that there are not"
    assert set(pack.strict) <= set(inputs)
    assert set(variants_for(problem)) <= set(VARIANTS)
    assert set(pack.free_axes) <= set(problem.definition.var_axes)
    assert pack.precision_policy.why, "a policy says why"


@pytest.mark.parametrize("problem_id", IDS[3::14])
def test_on_strict_sets_the_reference_is_a_measure_and_its_float64_self_passes(problem_id):
    problem = load(problem_id, profile="smoke")
    workload = problem.workloads[0]
    outputs = problem.outputs(workload)
    reference = Reference(problem)
    maker = InputMaker(problem, workload, "cpu", seed=7, profile="strict")
    for variant in maker.variants:
        arguments = list(maker.draw(variant).values())
        yardstick = Yardstick(problem, reference, arguments, outputs)
        assert not yardstick.void, (variant, yardstick.void)
        for position, exact in enumerate(yardstick.oracle):
            right = yardstick.expected[position]
            assert yardstick.faults(position, right) == []
            assert yardstick.faults(position, exact.to(right.dtype)) == []


def test_every_input_of_a_norm_matters_on_strict_sets():
    problem = load("L1/069", profile="smoke")
    workload = problem.workloads[0]
    maker = InputMaker(problem, workload, "cpu", seed=1, profile="strict")
    reference, outputs = Reference(problem), problem.outputs(workload)
    for variant in maker.variants:
        values = maker.draw(variant)
        yardstick = Yardstick(problem, reference, list(values.values()), outputs)
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                without = {**values, name: torch.zeros_like(value)}
                got = reference(list(without.values()), outputs)[0]
                assert yardstick.faults(0, got), (variant, name)
