from __future__ import annotations

import pytest

from sol_gym.envs import REWARDS, Reward, ShapedReward, get_reward
from sol_gym.evaluation import Status

FAILURES = [
    Status.COMPILE_ERROR,
    Status.RUNTIME_ERROR,
    Status.TIMEOUT,
    Status.INCORRECT_SHAPE,
    Status.INCORRECT_DTYPE,
    Status.INCORRECT_NUMERICAL,
    Status.REWARD_HACK,
    Status.BELOW_SOL,
]


def value(name, evaluation, *, best_score=0.0, num_workloads=None):
    count = len(evaluation.results) if num_workloads is None else num_workloads
    return get_reward(name)(evaluation, best_score=best_score, num_workloads=count)


def test_score_is_the_score(evaluation_of, passed_result):
    at_baseline = evaluation_of([passed_result(0, t_k_ms=0.5), passed_result(1, t_k_ms=0.5)])
    at_bound = evaluation_of([passed_result(0, t_k_ms=0.1)])
    assert value("score", at_baseline) == pytest.approx(0.5)
    assert value("score", at_bound) == 1.0


@pytest.mark.parametrize("status", FAILURES)
@pytest.mark.parametrize("name", ["score", "improvement"])
def test_one_failed_workload_makes_score_and_improvement_zero(
    name, status, evaluation_of, passed_result, failed
):
    evaluation = evaluation_of([passed_result(0, t_k_ms=0.1), failed(1, status)])
    assert value(name, evaluation) == 0.0


def test_improvement_is_what_is_gained_over_the_best(evaluation_of, passed_result):
    evaluation = evaluation_of([passed_result(0, t_k_ms=0.5)])
    assert value("improvement", evaluation) == pytest.approx(0.5)
    assert value("improvement", evaluation, best_score=0.3) == pytest.approx(0.2)
    assert value("improvement", evaluation, best_score=0.5) == 0.0
    assert value("improvement", evaluation, best_score=0.9) == 0.0


def test_improvements_of_an_episode_sum_to_its_best_score(evaluation_of, passed_result, failed):
    turns = [
        evaluation_of([passed_result(0, t_k_ms=0.9)]),
        evaluation_of([failed(0, Status.RUNTIME_ERROR)]),
        evaluation_of([passed_result(0, t_k_ms=0.2)]),
        evaluation_of([passed_result(0, t_k_ms=0.4)]),
    ]
    total, best = 0.0, 0.0
    for evaluation in turns:
        total += value("improvement", evaluation, best_score=best)
        best = max(best, evaluation.score)
    assert total == pytest.approx(best)
    assert best == turns[2].score


def test_shaped_rises_with_how_far_a_kernel_gets(evaluation_of, passed_result, failed):
    stages = [
        evaluation_of([], status=Status.COMPILE_ERROR, score=0.0),
        evaluation_of([failed(i, Status.RUNTIME_ERROR) for i in range(2)]),
        evaluation_of([failed(i, Status.INCORRECT_SHAPE) for i in range(2)]),
        evaluation_of(
            [failed(0, Status.INCORRECT_NUMERICAL), failed(1, Status.INCORRECT_NUMERICAL)]
        ),
        evaluation_of([passed_result(0, t_k_ms=0.1), failed(1, Status.INCORRECT_NUMERICAL)]),
        evaluation_of([passed_result(0, t_k_ms=90.0), passed_result(1, t_k_ms=90.0)]),
        evaluation_of([passed_result(0), passed_result(1)]),
        evaluation_of([passed_result(0, t_k_ms=0.1), passed_result(1, t_k_ms=0.1)]),
    ]
    rewards = [value("shaped", evaluation, num_workloads=2) for evaluation in stages]
    assert rewards == sorted(rewards)
    assert len(set(rewards)) == len(rewards)
    assert rewards[0] == 0.0
    assert rewards[-1] == 1.0


@pytest.mark.parametrize("status", [Status.REWARD_HACK, Status.BELOW_SOL])
def test_shaped_gives_nothing_for_a_hack_or_a_time_below_the_bound(
    status, evaluation_of, passed_result, failed
):
    evaluation = evaluation_of([passed_result(0), failed(1, status)])
    assert value("shaped", evaluation) == 0.0
    assert value("shaped", evaluation_of([], status=status, score=0.0), num_workloads=3) == 0.0


def test_shaped_counts_workloads_not_reached_as_the_whole(evaluation_of, passed_result, failed):
    stopped_early = evaluation_of([passed_result(0), failed(1, Status.RUNTIME_ERROR)])
    credit = ShapedReward.CREDIT
    expected = (credit[Status.PASSED] + 9 * credit[Status.RUNTIME_ERROR]) / 10
    assert value("shaped", stopped_early, num_workloads=10) == pytest.approx(expected)


@pytest.mark.parametrize("name", REWARDS)
def test_rewards_stay_in_their_declared_range(name, evaluation_of, passed_result, failed):
    reward = REWARDS[name]
    evaluations = [evaluation_of([failed(0, status)]) for status in FAILURES]
    evaluations += [evaluation_of([passed_result(0, t_k_ms=t)]) for t in (0.1, 0.2, 0.5, 1e6)]
    for evaluation in evaluations:
        for best in (0.0, 0.5, 1.0):
            assert reward.low <= value(name, evaluation, best_score=best) <= reward.high


def test_unknown_reward_names_those_there_are():
    with pytest.raises(ValueError, match="expected one of score, improvement, shaped"):
        get_reward("points")


def test_a_reward_of_ones_own_is_taken_as_it_is():
    class Passed(Reward):
        name, low, high = "passed", 0.0, 1.0

        def __call__(self, evaluation, *, best_score, num_workloads):
            return float(evaluation.passed)

    own = Passed()
    assert get_reward(own) is own
