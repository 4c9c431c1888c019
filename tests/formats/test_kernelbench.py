"""KernelBench files: what becomes an input, what a constant, and what is refused."""

from __future__ import annotations

import pytest

from sol_gym.device import get_device
from sol_gym.errors import ProblemError
from sol_gym.formats.kernelbench import apply_settings, import_file, is_kernelbench
from sol_gym.inputs import InputMaker
from sol_gym.sandbox.reference import Reference
from sol_gym.solar import analyze

MINIMAL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
{init}
    def forward(self, x):
{forward}

def get_inputs():
    return [torch.rand(4, 4)]

def get_init_inputs():
    return []
"""


def minimal(tmp_path, forward, init="        pass", **changes):
    text = MINIMAL.format(forward=f"        {forward}", init=init)
    for old, new in changes.items():
        assert {"inputs": "torch.rand(4, 4)"}[old] in text
        text = text.replace("torch.rand(4, 4)", new)
    file = tmp_path / "model.py"
    file.write_text(text)
    return file


def test_a_file_becomes_a_problem_whose_weights_are_inputs(kernelbench_file, sandbox):
    imported = import_file(kernelbench_file, sandbox)
    problem, workload = imported.problem, imported.problem.workloads[0]
    assert problem.id == "kernelbench/7_Scaled_linear"
    assert problem.definition.description == "A linear layer, normalised."
    shapes = {name: t.shape for name, t in problem.tensors(workload).items()}
    assert shapes == {
        "x": (6, 8),
        "shift": (5,),
        "linear_weight": (5, 8),
        "linear_bias": (5,),
        "norm_weight": (5,),
        "norm_bias": (5,),
        "random": (5,),
    }
    assert list(problem.definition.inputs)[:2] == ["x", "factor"]
    assert problem.definition.inputs["factor"].is_scalar
    assert [o.shape for o in problem.outputs(workload).values()] == [(6, 5), (6,)]
    assert list(problem.definition.outputs) == ["output_0", "output_1"]
    assert workload.tolerance.max_atol == 1e-4
    assert workload.tolerance.required_matched_ratio == 1.0
    assert problem.pack.imported_from["source"] == kernelbench_file.name


def test_the_reference_computes_what_the_module_does_with_the_given_weights(
    kernelbench_file, sandbox
):
    import torch

    problem = import_file(kernelbench_file, sandbox).problem
    workload = problem.workloads[0]
    inputs = InputMaker(problem, workload, "cpu", seed=0).draw()
    got = Reference(problem)(list(inputs.values()), problem.outputs(workload))
    i = inputs
    linear = i["x"] @ i["linear_weight"].T + i["linear_bias"]
    normal = (linear - linear.mean(0)) / (linear.var(0, unbiased=False) + 1e-5).sqrt()
    y = normal * i["norm_weight"] + i["norm_bias"] + i["shift"] + i["random"]
    torch.testing.assert_close(got[0], y * 1.5 + torch.arange(5.0))
    torch.testing.assert_close(got[1], y.mean(1))


def test_every_weight_differs_between_draws_so_that_none_can_be_left_out(kernelbench_file, sandbox):
    problem = import_file(kernelbench_file, sandbox).problem
    maker = InputMaker(problem, problem.workloads[0], "cpu", seed=0)
    first, second = maker.draw(), maker.draw()
    for name in problem.tensors(problem.workloads[0]):
        assert not (first[name] == second[name]).all(), name


def test_constants_can_be_replaced_and_others_follow(kernelbench_file, sandbox):
    settings = {"batch_size": "3", "out_features": "7", "in_features": "2"}
    problem = import_file(kernelbench_file, sandbox, settings).problem
    tensors = problem.tensors(problem.workloads[0])
    assert (tensors["x"].shape, tensors["shift"].shape) == ((3, 2), (7,))
    assert "batch_size = rows = 3\n" in problem.reference
    assert any("out_features = 7" in note for note in problem.pack.notes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": "3"}, r"no top-level assignment to 'batch'; it has \['batch_size'"),
        ({"batch_size": "n * 2"}, "expected a Python literal"),
        ({"batch_size": "3", "rows": "4"}, "assigned together"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(kernelbench_file, settings, message):
    with pytest.raises(ProblemError, match=message):
        apply_settings(kernelbench_file.read_text(), settings, "file")


def test_a_file_of_tensors_too_large_for_any_machine_is_imported(tmp_path, sandbox):
    file = minimal(tmp_path, "return x.relu()", inputs="torch.rand(4096, 2**28)")
    problem = import_file(file, sandbox).problem
    assert problem.tensors(problem.workloads[0])["x"].nbytes == 2**42


def test_its_bound_counts_inputs_weights_and_outputs_once(kernelbench_file, sandbox):
    problem = import_file(kernelbench_file, sandbox).problem
    bound = analyze(problem, problem.workloads[0], get_device("h200"))
    assert bound.complete
    elements = 6 * 8 + 5 + 5 * 8 + 4 * 5
    assert sum(bound.read_bytes.values()) == 4 * elements
    assert sum(bound.write_bytes.values()) == 4 * (6 * 5 + 6)


@pytest.mark.parametrize(
    ("forward", "changes", "message"),
    [
        ("return {'y': x}", {}, "forward returned dict, expected a tensor"),
        ("return x @ torch.rand(3, 3)", {}, "RuntimeError"),
        ("return x", {"inputs": "'text'"}, "has a str, expected tensors"),
        ("return torch.complex(x, x)", {}, "dtype complex64, which no problem can have"),
    ],
)
def test_what_cannot_be_a_problem_is_named(tmp_path, sandbox, forward, changes, message):
    with pytest.raises(ProblemError, match=message):
        import_file(minimal(tmp_path, forward, **changes), sandbox)


def test_random_state_nobody_can_know_is_remarked(tmp_path, sandbox):
    file = minimal(tmp_path, "return x + self.h", init="        self.h = torch.randn(4)")
    remarks = import_file(file, sandbox).remarks
    assert any("neither parameters nor buffers (h)" in r for r in remarks)


def test_files_are_told_from_others(tmp_path, kernelbench_file):
    assert is_kernelbench(kernelbench_file)
    (tmp_path / "a.py").write_text("class Model: pass\n")
    assert not is_kernelbench(tmp_path / "a.py")
    (tmp_path / "b.py").write_text("def (:\n")
    assert not is_kernelbench(tmp_path / "b.py")


def test_a_file_without_model_says_what_is_missing(tmp_path, sandbox):
    (tmp_path / "a.py").write_text("class Model: pass\n")
    with pytest.raises(ProblemError, match="defines no get_inputs, get_init_inputs"):
        import_file(tmp_path / "a.py", sandbox)
