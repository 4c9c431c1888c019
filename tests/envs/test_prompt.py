from __future__ import annotations

import pytest

from sol_gym.envs.prompt import task_card
from sol_gym.problem import Problem, Workload
from sol_gym.problems import load


def card(problem, **changes):
    options = {
        "device": "NVIDIA H200 (h200)",
        "inputs_profile": "compatible",
        "max_turns": 8,
        "target_score": 0.95,
    }
    return task_card(problem, **options | changes)


@pytest.fixture(scope="module")
def rms_norm() -> Problem:
    return load("L1/069_rms_norm")


def with_workloads(problem, workloads):
    return problem.model_copy(update={"workloads": tuple(workloads)})


def test_it_names_every_input_output_and_workload(rms_norm):
    text = card(rms_norm)
    assert "NVIDIA H200 (h200)" in text
    assert "- hidden_states: bfloat16[batch_size, seq_len, hidden_size]" in text
    assert "- eps: float32, a Python number" in text
    assert "- output: bfloat16[batch_size, seq_len, hidden_size]" in text
    assert "hidden_size = 8192" in text
    lines = text.splitlines()
    for i, workload in enumerate(rms_norm.workloads):
        axes = workload.axes
        label = f"#{i} batch_size={axes['batch_size']} seq_len={axes['seq_len']} "
        assert any(line.startswith(label) for line in lines)
    assert "eps=1e-05" in text


def test_it_tells_both_calling_conventions_with_the_names_in_call_order(rms_norm):
    text = card(rms_norm)
    assert "run(hidden_states, residual, weight, eps)\n" in text
    assert "run(hidden_states, residual, weight, eps, output)\n" in text


def test_it_tells_tolerance_turns_and_target(rms_norm):
    text = card(rms_norm, max_turns=5, target_score=0.9)
    tolerance = rms_norm.workloads[0].tolerance
    assert f"max_atol {tolerance.max_atol:g}, max_rtol {tolerance.max_rtol:g}" in text
    assert "at least 99 % of the elements" in text
    assert "You have 5 turns" in text
    assert "score of 0.9." in text
    assert "ends early" not in card(rms_norm, target_score=None)


def test_different_tolerances_are_told_by_workload(rms_norm):
    first = rms_norm.workloads[0]
    loose = first.tolerance.model_copy(update={"max_atol": 0.5, "max_error_cap": 2.0})
    workloads = [
        first.model_copy(update={"uuid": str(i), "tolerance": loose if i == 3 else first.tolerance})
        for i in range(6)
    ]
    text = card(with_workloads(rms_norm, workloads))
    assert "- workloads #0-#2, #4-#5: " in text
    assert "- workloads #3: max_atol 0.5" in text
    assert "no element off by more than 2" in text


def test_the_strict_profile_is_announced(rms_norm):
    assert "every one matters" in card(rms_norm, inputs_profile="strict")
    assert "every one matters" not in card(rms_norm)


def test_very_many_workloads_are_summed_up(rms_norm):
    first = rms_norm.workloads[0]
    workloads = [
        Workload(uuid=str(i), axes={"batch_size": 1, "seq_len": i + 1}, inputs=first.inputs)
        for i in range(500)
    ]
    text = card(with_workloads(rms_norm, workloads))
    assert "Workloads (500; all must pass)" in text
    assert "#63 " in text and "#64 " not in text
    assert "436 more; batch_size from 1 to 1, seq_len from 1 to 500" in text
    assert len(text) < 8000


def test_a_restricted_problem_shows_only_what_is_judged(rms_norm):
    text = card(rms_norm.with_workloads([2]))
    assert "Workloads (1; all must pass)" in text
    assert "#1 " not in text
