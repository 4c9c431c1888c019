"""The SOL Score: its anchors, its edges, and what aggregation does with failures."""

import math

import pytest
from pydantic import ValidationError

from sol_gym.evaluation import (
    Correctness,
    Evaluation,
    Mismatch,
    Provenance,
    Status,
    Timing,
    WorkloadResult,
)
from sol_gym.score import (
    overall_status,
    problem_score,
    score_workload,
    sol_score,
    suite_score,
)


def result(status=Status.PASSED, t_k=None, t_b=None, t_sol=None, **changes):
    timing = None
    if t_k is not None:
        timing = Timing(
            t_k_ms=t_k, batch_ms=t_k, reported_ms=t_k, mode="graph", n_sets=8, repeats=5,
            spread=0.0, overhead_ms=0.2,
        )  # fmt: skip
    return WorkloadResult(
        uuid="w", axes={}, status=status, correctness=Correctness(), timing=timing,
        t_b_ms=t_b, t_sol_ms=t_sol, **changes,
    )  # fmt: skip


def evaluation(problem, score, status=Status.PASSED, results=()):
    provenance = Provenance(
        device="cpu", device_name="cpu", profile="full", inputs_profile="compatible",
        problem_hash="p", solution_hash="s", date="2026-01-01T00:00:00Z",
    )  # fmt: skip
    return Evaluation(
        problem=problem, solution="s", status=status, score=score, results=list(results),
        provenance=provenance,
    )  # fmt: skip


def test_the_anchors_one_half_at_the_baseline_and_one_at_the_bound():
    assert sol_score(t_k_ms=3.0, t_b_ms=3.0, t_sol_ms=1.0) == 0.5
    assert sol_score(t_k_ms=1.0, t_b_ms=3.0, t_sol_ms=1.0) == 1.0


def test_the_score_falls_as_time_grows_and_stays_above_zero():
    times = [1.0, 1.5, 2.0, 3.0, 5.0, 50.0, 1e9]
    scores = [sol_score(t, t_b_ms=3.0, t_sol_ms=1.0) for t in times]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == len(scores)
    assert 0 < scores[-1] < 1e-8


def test_the_score_does_not_depend_on_the_unit_of_time():
    assert sol_score(2.0, 3.0, 1.0) == pytest.approx(sol_score(2e-3, 3e-3, 1e-3))


def test_closing_half_the_gap_scores_two_thirds():
    assert sol_score(t_k_ms=2.0, t_b_ms=3.0, t_sol_ms=1.0) == pytest.approx(2 / 3)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["t_k_ms", "t_b_ms", "t_sol_ms"])
def test_a_time_that_is_none_is_refused(name, bad):
    with pytest.raises(ValueError, match="expected a positive, finite time"):
        sol_score(**({"t_k_ms": 2.0, "t_b_ms": 3.0, "t_sol_ms": 1.0} | {name: bad}))


@pytest.mark.parametrize("t_b", [1.0, 0.5])
def test_a_baseline_at_or_below_the_bound_cannot_be_scored(t_b):
    with pytest.raises(ValueError, match="cannot be scored"):
        sol_score(t_k_ms=2.0, t_b_ms=t_b, t_sol_ms=1.0)
    scored = score_workload(result(t_k=2.0, t_b=t_b, t_sol=1.0))
    assert (scored.status, scored.score) == (Status.PASSED, None)
    assert "unscorable" in scored.message


def test_a_time_below_the_bound_is_a_status_and_never_a_high_score():
    with pytest.raises(ValueError, match="a bound or a measurement is at fault"):
        sol_score(t_k_ms=0.9, t_b_ms=3.0, t_sol_ms=1.0)
    scored = score_workload(result(t_k=0.9, t_b=3.0, t_sol=1.0))
    assert (scored.status, scored.score) == (Status.BELOW_SOL, 0.0)
    assert scored.t_k_ms == 0.9
    assert problem_score([scored]) == 0.0


def test_a_workload_without_a_baseline_has_no_score_and_says_what_is_missing():
    scored = score_workload(result(t_k=2.0, t_sol=1.0, message="first"))
    assert (scored.status, scored.score) == (Status.PASSED, None)
    assert scored.message == "first; no score: T_b unknown"


def test_a_failed_workload_scores_zero_and_a_broken_machine_nothing():
    assert score_workload(result(Status.TIMEOUT)).score == 0.0
    assert score_workload(result(Status.INFRA_ERROR)).score is None


def test_a_problem_is_the_mean_over_its_workloads():
    scored = [score_workload(result(t_k=t, t_b=3.0, t_sol=1.0)) for t in (1.0, 3.0)]
    assert problem_score(scored) == 0.75
    assert overall_status(scored) is Status.PASSED


def test_one_failing_workload_makes_a_problem_zero():
    good = score_workload(result(t_k=1.0, t_b=3.0, t_sol=1.0))
    bad = score_workload(result(Status.INCORRECT_NUMERICAL))
    assert problem_score([good, bad]) == 0.0


def test_unscorable_workloads_are_left_out_of_the_mean():
    good = score_workload(result(t_k=3.0, t_b=3.0, t_sol=1.0))
    unscorable = score_workload(result(t_k=3.0, t_b=1.0, t_sol=1.0))
    assert problem_score([good, unscorable]) == 0.5
    assert problem_score([unscorable]) is None


def test_an_infrastructure_fault_makes_a_score_unknown_not_zero():
    good = score_workload(result(t_k=1.0, t_b=3.0, t_sol=1.0))
    for others in ([], [good], [result(Status.TIMEOUT)]):
        results = [*others, score_workload(result(Status.INFRA_ERROR))]
        assert problem_score(results) is None
        assert overall_status(results) is Status.INFRA_ERROR
    assert problem_score([]) is None


def test_the_gravest_status_speaks_for_the_problem():
    statuses = [Status.PASSED, Status.INCORRECT_NUMERICAL, Status.REWARD_HACK, Status.TIMEOUT]
    results = [result(s, t_k=1.0) for s in statuses]
    assert overall_status(results) is Status.REWARD_HACK


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.PASSED])
def test_every_failure_is_graver_than_passing(status):
    assert overall_status([result(t_k=1.0), result(status)]) is status


def test_illegal_results_cannot_be_built():
    with pytest.raises(ValidationError, match="carries correctness"):
        WorkloadResult(uuid="w", axes={}, status=Status.PASSED)
    with pytest.raises(ValidationError, match="cannot have a score above 0"):
        WorkloadResult(uuid="w", axes={}, status=Status.TIMEOUT, score=0.5)


def test_a_suite_is_the_mean_with_failures_as_zero():
    suite = suite_score(
        [evaluation("L1/a", 0.9), evaluation("L1/b", 0.0, Status.TIMEOUT), evaluation("L2/c", 0.6)],
        expected=["L1/a", "L1/b", "L2/c", "L2/d"],
        worst=1,
    )
    assert suite.mean == pytest.approx(0.5)
    assert suite.coverage == 0.75
    assert suite.category_medians == {"L1": 0.45, "L2": 0.6}
    assert suite.worst == [("L1/b", 0.0)]
    assert suite.unknown == ["L2/d"]


def test_unknown_scores_are_counted_and_not_taken_as_zero():
    suite = suite_score([evaluation("L1/a", 0.8), evaluation("L1/b", None, Status.INFRA_ERROR)])
    assert (suite.mean, suite.coverage, suite.unknown) == (0.8, 0.5, ["L1/b"])


def test_the_last_evaluation_of_a_problem_counts():
    assert suite_score([evaluation("L1/a", 0.2), evaluation("L1/a", 0.7)]).mean == 0.7


def test_an_empty_suite_has_no_mean():
    suite = suite_score([])
    assert (suite.mean, suite.coverage, suite.worst) == (None, 0.0, [])


def test_categories_can_be_given():
    suite = suite_score(
        [evaluation("L1/a", 0.2), evaluation("L2/b", 0.4)],
        categories={"L1/a": "norm", "L2/b": "norm"},
    )
    assert suite.category_medians == {"norm": pytest.approx(0.3)}


def test_the_speedup_is_the_geometric_mean_over_all_workloads():
    fast, slow = result(t_k=1.0, t_b=4.0), result(t_k=1.0, t_b=1.0)
    assert evaluation("a", None, results=[fast, slow]).speedup == pytest.approx(2.0)
    assert evaluation("a", None, results=[fast, result(t_k=1.0)]).speedup is None
    assert evaluation("a", None).speedup is None


def test_an_evaluation_is_json():
    original = evaluation("a", 0.5, results=[score_workload(result(t_k=3.0, t_b=3.0, t_sol=1.0))])
    assert Evaluation.model_validate(original.to_json()) == original


def test_a_mismatch_reads_as_a_sentence():
    mismatch = Mismatch(output="y", index=(1, 2), got=3.0, expected=4.0, mismatched=5, total=50)
    assert (
        str(mismatch) == "y[1, 2] is 3.0, expected 4.0 (5 of 50 elements, 10 %, out of tolerance)"
    )
