from __future__ import annotations

import pytest

from sol_gym.envs.feedback import write_feedback
from sol_gym.evaluation import Status


def uuids(count):
    return [f"uuid-{i}" for i in range(count)]


@pytest.mark.parametrize("status", list(Status))
def test_every_status_is_explained(status, evaluation_of):
    evaluation = evaluation_of([], status=status, score=None, message="the reason")
    text = write_feedback(evaluation, uuids=uuids(3))
    assert text.startswith(f"{status}: ")
    assert "the reason" in text


def test_a_pass_tells_score_speedup_and_each_time(evaluation_of, passed_result):
    evaluation = evaluation_of([passed_result(0, t_k_ms=0.25), passed_result(1, t_k_ms=0.5)])
    text = write_feedback(evaluation, uuids=uuids(2))
    assert f"Score {evaluation.score:.4f}" in text
    assert f"{evaluation.speedup:.3g} times as fast" in text
    header, first, second = text.splitlines()[-3:]
    assert header.split("  ")[0] == "workload"
    assert first.split()[:6] == ["#0", "batch_size=1", "seq_len=128", "0.25", "0.5", "0.1"]
    assert first.split()[6:9] == ["2.5", "0.7273", "memory"]
    assert second.split()[3:8] == ["0.5", "0.5", "0.1", "5", "0.5"]


def test_a_mismatch_tells_where_what_and_how_far(evaluation_of, passed_result, failed):
    evaluation = evaluation_of([passed_result(0), failed(1, Status.INCORRECT_NUMERICAL)])
    text = write_feedback(evaluation, uuids=uuids(2))
    assert "1 of 2 workloads passed" in text
    assert "#1 batch_size=2 seq_len=128: INCORRECT_NUMERICAL" in text
    assert "output[0, 3, 17] is 1.25, expected 1.5" in text
    assert "512 of 1024 elements" in text
    assert "largest error 2.5 absolute, 0.75 relative" in text
    assert "contain NaN" in text
    assert "#0 batch_size=1" in text.split("Times per call")[1]


def test_the_end_of_a_long_traceback_is_kept(evaluation_of):
    message = "".join(f'  File "layer_{i}.py", line {i}\n' for i in range(500)) + "KeyError: 'x'"
    text = write_feedback(evaluation_of([], status=Status.RUNTIME_ERROR, message=message))
    assert "KeyError: 'x'" in text
    assert "layer_499.py" in text
    assert "layer_0.py" not in text
    assert len(text) < 5000


def test_the_same_failure_on_many_workloads_is_told_once(evaluation_of, failed):
    results = [failed(i, Status.RUNTIME_ERROR, "IndexError: too many indices") for i in range(14)]
    text = write_feedback(evaluation_of(results), uuids=uuids(14))
    assert text.count("IndexError") == 1
    assert "and 10 more" in text
    assert "Failed on 14 of 14 workloads" in text


def test_a_message_told_for_the_whole_is_not_repeated_per_workload(evaluation_of, failed):
    message = "error: expected ';' before '}' token"
    results = [failed(i, Status.COMPILE_ERROR, message) for i in range(3)]
    text = write_feedback(evaluation_of(results, message=message), uuids=uuids(3))
    assert text.count(message) == 1


def test_many_kinds_of_failure_stay_short(evaluation_of, failed):
    results = [failed(i, Status.RUNTIME_ERROR, "x" * 3000 + f" error {i}") for i in range(15)]
    text = write_feedback(evaluation_of(results), uuids=uuids(15))
    assert "further kinds of failure" in text
    assert len(text) < 8000


def test_many_workloads_show_the_lowest_scores_in_order(evaluation_of, passed_result):
    results = [passed_result(i, t_k_ms=0.2 + 0.01 * i) for i in range(48)]
    text = write_feedback(evaluation_of(results), uuids=uuids(48))
    rows = [line.split()[0] for line in text.splitlines() if line.startswith("#")]
    assert rows == [f"#{i}" for i in range(36, 48)]
    assert "48 workloads were timed" in text


def test_workloads_not_reached_are_counted(evaluation_of, failed):
    evaluation = evaluation_of([failed(0, Status.TIMEOUT)])
    assert "9 of 10 workloads were not run" in write_feedback(evaluation, uuids=uuids(10))


def test_results_are_numbered_as_the_problem_numbers_them(evaluation_of, failed):
    evaluation = evaluation_of([failed(2, Status.TIMEOUT)])
    assert "- #2 batch_size=4" in write_feedback(evaluation, uuids=uuids(3))


def test_marks_and_eager_runs_are_remarked_on_a_gpu_only(evaluation_of, passed_result):
    results = [passed_result(0, mode="eager", marks=("short batch",))]
    on_gpu = write_feedback(evaluation_of(results, device="h200"))
    on_cpu = write_feedback(evaluation_of(results, device="cpu"))
    assert "short batch" in on_gpu and "short batch" in on_cpu
    assert "launch gaps count" in on_gpu
    assert "launch gaps count" not in on_cpu


def test_a_time_below_the_bound_is_shown_but_not_scored(evaluation_of, passed_result):
    evaluation = evaluation_of([passed_result(0, t_k_ms=0.05)])
    assert evaluation.status is Status.BELOW_SOL
    text = write_feedback(evaluation, uuids=uuids(1))
    assert "below the Speed-of-Light bound" in text
    assert "0.05" in text.split("Times per call")[1]


def test_what_the_solution_printed_comes_last(evaluation_of, passed_result):
    evaluation = evaluation_of([passed_result(0)], log="block size 128\n")
    assert write_feedback(evaluation).endswith("Printed by the solution:\nblock size 128")
