"""Every reference in the library, on its smoke profile: the check, and what it reads beyond that."""

import pytest
import torch

from sol_gym.checking import check_problem
from sol_gym.problems import list_ids, load

UNORDERED_ADDITIONS = {"L1/008_expert_output_weighted_index_add_accumulation"}
"""Problems whose definition leaves the order of roundings open."""

TESTED_ON_THEIR_OWN = {
    "L1/020_vision_patch_merger_spatial_shuffle_mlp": {"grid_thw"},
    "L1/023_multimodal_rope_position_computation_with_grid_based_indexing": {"grid_thw"},
}
"""Inputs that every draw repeats and that stay valid under no general change, by problem."""

every_problem = pytest.mark.parametrize("problem_id", list_ids())


def as_bytes(tensor):
    """Comparable content; fp4 and fp8 tensors have hardly any operations of their own."""
    return tensor.contiguous().view(-1).view(torch.uint8).clone()


def equal(actual, expected):
    """Whether two tuples of tensors are equal to the last bit."""
    return all(torch.equal(as_bytes(a), as_bytes(e)) for a, e in zip(actual, expected, strict=True))


def altered(value, other_draw):
    """The input with other content that is as valid."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value or 1
    if isinstance(value, float):
        return 2 * value + 0.1
    if value.dtype == torch.bool:
        return ~value
    if value.dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(7)
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float32)
        return value + (0.5 * noise).to(value.dtype)
    if torch.equal(as_bytes(value), as_bytes(other_draw)):
        # Positions, offsets and masks that no draw varies: shift what lies between the ends.
        other_draw = other_draw.clone()
        other_draw.view(-1)[1:-1] -= 1
    return other_draw


@every_problem
def test_the_check_finds_no_fault(problem_id):
    assert check_problem(load(problem_id)) == []


@every_problem
def test_the_same_inputs_give_the_same_outputs(reference, problem_id, assert_matches):
    run = reference(problem_id)
    for workload in run.workloads:
        inputs = run.draw(workload)
        first, second = run.call(inputs), run.call(inputs)
        if problem_id in UNORDERED_ADDITIONS:
            for a, b in zip(first, second, strict=True):
                assert_matches(a, b, workload.tolerance)
        else:
            assert equal(first, second)


@every_problem
def test_every_other_input_matters(reference, problem_id):
    run = reference(problem_id)
    silent = set(run.problem.definition.inputs) - set(run.problem.pack.unread_inputs)
    silent -= TESTED_ON_THEIR_OWN.get(problem_id, set())
    for workload in run.workloads:
        inputs, other = run.draw(workload, seed=1), run.draw(workload, seed=2)
        expected = run.call(inputs)
        for name in sorted(silent):
            changed = run.call(inputs | {name: altered(inputs[name], other[name])})
            if not equal(changed, expected):
                silent.discard(name)
    assert not silent, "no workload of the smoke profile shows that these inputs are read"


@every_problem
def test_every_output_depends_on_the_inputs(reference, problem_id):
    run = reference(problem_id)
    inputs, other = (run.draw(run.workloads[0], seed=seed) for seed in (1, 2))
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            other[name] = altered(value, other[name])  # numbers are the same in all draws
        elif value.is_floating_point() and torch.equal(as_bytes(value), as_bytes(other[name])):
            other[name] = altered(value, other[name])
    first, second = run.call(inputs), run.call(other)
    for name, a, b in zip(run.problem.definition.outputs, first, second, strict=True):
        assert not torch.equal(a, b), name
