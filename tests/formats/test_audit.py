"""The audit: degenerate problems are named, sound ones are not."""

from __future__ import annotations

import pytest

from sol_gym.formats.audit import audit, audit_record
from sol_gym.formats.importing import audit_problem

RUN = "import torch\n\n\ndef run(x, w, eps):\n    {}\n"


def messages(problem):
    return [message for _, message in audit(problem)]


def test_a_sound_problem_has_no_findings(make_problem):
    assert messages(make_problem()) == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return torch.zeros_like(x)", "output 'y' is zero throughout"),
        ("return torch.full_like(x, 3.0)", "output 'y' is one value throughout: 3"),
        ("return torch.arange(40.).view(5, 8)", "output 'y' is the same for other inputs"),
        ("return x.log()", "output 'y' has NaN"),
        ("return x + float('inf')", "output 'y' is infinite in 100 % of its elements"),
        ("return x * 2", "no output depends on input 'w'"),
        ("return x * w + torch.rand(())", "output 'y' differs between two runs"),
        ("return x.add_(w)", "the reference changes its input 'x'"),
        ("return x + 0 * w", "input 'x' handed through passes as output 'y'"),
        ("return x * w * 1e-9", "a null kernel passes: zeros in every output"),
        ("return 7 + 1e-6 * x * w", "a null kernel passes: the mean of the right values"),
        ("return (x * w).double()", "dtype torch.float64, declared float32"),
        ("return x[1:] * w", r"shape \(4, 8\), declared \(5, 8\)"),
        ("raise ValueError('no')", "the reference failed: ValueError: no"),
    ],
)
def test_a_degenerate_reference_is_named(make_problem, body, message):
    import re

    found = messages(make_problem(RUN.format(body)))
    assert any(re.search(message, text) for text in found), found


def test_a_tolerance_that_lets_zeros_pass_is_named(make_problem):
    found = messages(make_problem(tolerance={"max_atol": 100.0, "max_rtol": 0.0}))
    assert any("null kernel passes: zeros" in text for text in found)
    found = messages(make_problem(tolerance={"required_matched_ratio": 0.0}))
    assert any("accepts any output" in text for text in found)


def test_zeros_in_one_of_two_outputs_are_named_apart(make_problem):
    outputs = {n: {"shape": ["rows", "width"], "dtype": "float32"} for n in ("y", "z")}
    found = messages(make_problem(RUN.format("return x * w, x * w * 1e-9"), outputs=outputs))
    assert "zeros in output 'z' is within tolerance" in found
    assert not any("null kernel" in text for text in found)


def test_an_input_that_is_drawn_the_same_every_time_is_named(make_problem):
    inputs = {
        "x": {"shape": ["rows", "width"], "dtype": "float32"},
        "norm_weight": {"shape": ["width"], "dtype": "float32"},
        "eps": {"shape": None, "dtype": "float32"},
    }
    problem = make_problem(inputs={"x": {"type": "random"}})
    record = problem.model_dump(mode="json")
    record["definition"]["inputs"] = inputs
    kinds = record["workloads"][0]["inputs"]
    kinds["norm_weight"] = kinds.pop("w")
    (finding,) = audit_record(record)
    assert "input 'norm_weight' is the same in every draw" in finding["message"]


def test_a_declared_unread_input_is_no_finding(make_problem):
    pack = {"id": "scale", "title": "Scaling", "unread_inputs": ["w"]}
    assert messages(make_problem(RUN.format("return x * 2"), pack=pack)) == []


def test_an_input_whose_change_breaks_the_reference_counts_as_read(make_problem):
    body = "assert bool((w == 1).all()); return x * 2"
    generate = "\n\ndef generate(axes, device):\n    return {'w': torch.ones(8)}\n"
    problem = make_problem(
        RUN.format(body) + generate,
        inputs={"w": {"type": "custom"}},
        custom_inputs_entrypoint="generate",
    )
    assert messages(problem) == []


def test_what_is_too_large_is_said_and_not_run(make_problem):
    problem = make_problem(RUN.format("raise SystemExit"))
    workload = problem.workloads[0].model_copy(update={"axes": {"rows": 1 << 30}})
    problem = problem.model_copy(update={"workloads": (workload,)})
    assert messages(problem) == ["not audited: every workload has more than 512 MiB of data"]


def test_through_the_sandbox_the_findings_are_the_same(make_problem, sandbox):
    (finding,) = audit_problem(make_problem(RUN.format("return x * 2")), sandbox)
    assert str(finding) == "no output depends on input 'w'"


def test_a_reference_that_dies_is_a_finding(make_problem, sandbox):
    problem = make_problem("import os\nos._exit(1)\n")
    (finding,) = audit_problem(problem, sandbox)
    assert "the audit did not end: the worker exited with code 1" in str(finding)
