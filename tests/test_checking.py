"""Faulty problems, one fault each, and what the check says about it."""

import pytest
import torch

from sol_gym.checking import check_problem
from sol_gym.problem import AxisConst, Pack, ScalarInput, SmokeProfile, TensorSpec
from sol_gym.problems import list_ids, load

KEEPS = "import torch\n\ndef run(x, weight):\n    return "


def changed(problem, reference=None, pack=None, **definition):
    """A problem with another reference, pack or other fields of its definition."""
    if reference is not None:
        definition["reference"] = reference
    pack = None if pack is None else Pack(id=problem.id, title="", **pack)
    return problem.model_copy(
        update={"definition": problem.definition.model_copy(update=definition), "pack": pack}
    )


def test_a_right_problem_has_no_faults(toy):
    assert check_problem(toy) == []


@pytest.mark.parametrize("problem_id", list_ids()[::13])
def test_the_library_has_no_faults(problem_id):
    assert check_problem(load(problem_id)) == []


def faults_of(toy, expression, **pack):
    return "; ".join(check_problem(changed(toy, KEEPS + expression + "\n", pack=pack)))


def test_an_input_without_influence_must_be_declared(toy):
    assert "input 'weight' has no influence" in faults_of(toy, "x + 1")
    assert faults_of(toy, "x + 1", unread_inputs=["weight"]) == ""


def test_reading_only_a_shape_is_no_influence(toy):
    reading = "x + torch.ones_like(weight) + len(weight)"
    assert "input 'weight' has no influence" in faults_of(toy, reading)


def test_a_value_that_python_reads_has_influence(toy):
    assert faults_of(toy, "x * (2 if weight.tolist()[0] > 0 else 3)") == ""
    assert faults_of(toy, "x * (2 if weight[0] > 0 else 3)") == ""


def test_an_input_declared_as_unread_must_not_matter(toy):
    assert "an output changes with input 'weight', which pack.json calls unread" in faults_of(
        toy, "x * weight", unread_inputs=["weight"]
    )


def test_names_in_the_pack_must_exist(toy):
    found = faults_of(toy, "x * weight", unread_inputs=["wieght"], zero_outputs=["z"])
    assert "unread_inputs names ['wieght']" in found
    assert "zero_outputs names ['z']" in found


def test_an_output_must_be_a_tensor_of_its_own(toy):
    assert "output 'y' is in the memory of input 'x'" in faults_of(toy, "x.view(x.shape)", unread_inputs=["weight"])  # fmt: skip


def test_inputs_must_be_left_alone(toy):
    assert "changes its input 'x'" in faults_of(toy, "x.mul_(2) * weight")


def test_two_outputs_must_not_share_memory(toy):
    spec = TensorSpec(shape=["rows", "hidden"], dtype="bfloat16")
    twice = changed(toy, KEEPS + "(y := x * weight, y)\n", outputs={"y": spec, "z": spec})
    assert "output 'z' is in the memory of output 'y'" in "; ".join(check_problem(twice))


def test_an_alias_must_fit_and_stem_from_its_input(toy):
    assert faults_of(toy, "x * weight", published_aliases={"y": "x"}) == ""
    assert "shapes or dtypes differ" in faults_of(
        toy, "x * weight", published_aliases={"y": "weight"}
    )
    unrelated = "weight.expand(len(x), -1) * 2"
    found = faults_of(toy, unrelated, published_aliases={"y": "x"}, unread_inputs=["x"])
    assert "does not stem from it" in found


def test_an_output_of_zeros_must_be_declared(toy):
    zeros = "torch.zeros_like(x)"
    assert "output 'y' is zero throughout" in faults_of(toy, zeros)
    assert faults_of(toy, zeros, zero_outputs=["y"], unread_inputs=["x", "weight"]) == (
        "no output depends on the inputs"
    )
    assert "is not zero" in faults_of(toy, "x * weight", zero_outputs=["y"])


def test_an_output_that_saturates_is_the_same_for_all_inputs(toy):
    assert "output 'y' is one value throughout" in faults_of(toy, "(x * weight).clamp(7, 7)")
    steps = "(x * weight).clamp(0, 0) + torch.arange(256, dtype=x.dtype)"
    assert "output 'y' is the same for other inputs" in faults_of(toy, steps)


def test_an_output_without_elements_is_named(toy):
    nothing = TensorSpec(shape=["rows", "none"], dtype="bfloat16")
    axes = toy.definition.axes | {"none": AxisConst(value=0)}
    empty = changed(
        toy,
        KEEPS + "x * weight, x.new_empty(len(x), 0)\n",
        outputs=toy.definition.outputs | {"z": nothing},
        axes=axes,
    )
    assert "output 'z' has no elements" in "; ".join(check_problem(empty))


def test_two_runs_must_agree(toy):
    assert "differs between two runs" in faults_of(toy, "x * weight + torch.rand(())")


def test_nan_is_a_fault(toy):
    assert "output 'y' has NaN" in faults_of(toy, "(x * weight).log()")


def test_cancellation_in_low_precision_is_seen_against_float64(toy):
    assert "out of tolerance of the same computation in float64" in faults_of(
        toy, "(x * weight + 1000) - 1000"
    )
    reason = {"rounding_sensitive": "the sum keeps two bits of the product"}
    assert faults_of(toy, "(x * weight + 1000) - 1000", **reason) == ""


def test_a_reference_that_insists_on_its_dtypes_cannot_be_run_in_float64(toy):
    narrow = "torch.ops.aten._to_copy(x, dtype=torch.bfloat16) @ weight.new_ones(256, 256) * weight"
    assert "cannot be run in float64: " in faults_of(toy, narrow.replace("x,", "(x + 0.5 if x.dtype == torch.bfloat16 else None),"))  # fmt: skip


def test_a_scalar_without_influence_is_found(toy):
    spec = {**toy.definition.inputs, "eps": TensorSpec(shape=None, dtype="float32")}
    workloads = tuple(
        w.model_copy(update={"inputs": {**w.inputs, "eps": ScalarInput(value=1e-6)}})
        for w in toy.workloads
    )
    source = "def run(x, weight, eps):\n    return x * weight"
    deaf = changed(toy, source, inputs=spec).model_copy(update={"workloads": workloads})
    assert "input 'eps' has no influence" in "; ".join(check_problem(deaf))
    hears = changed(deaf, source + " + eps")
    assert check_problem(hears) == []


def test_faults_of_one_workload_name_it(toy):
    failing = KEEPS + "x[:4] * weight\n"
    assert all(f.startswith("workload toy-") for f in check_problem(changed(toy, failing)))


def test_the_smoke_profile_is_what_runs(toy):
    smoke = SmokeProfile(axes={"hidden": 8}, workloads=[toy.workloads[0]])
    shapes = KEEPS + "x * weight if x.shape[1] == 8 else None\n"
    assert check_problem(changed(toy, shapes, pack={"smoke": smoke})) == []


def test_the_number_of_threads_is_as_before(toy):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check_problem(toy)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
