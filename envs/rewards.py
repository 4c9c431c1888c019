"""Rewards: what an evaluation is worth to a trainer, as small objects with declared properties.

A reward sees a finished `Evaluation` and nothing else of the machine. Whatever says nothing about
the kernel (a broken judge, an invalid reference, a workload nobody can score) never reaches a
reward: the environment raises, or ends the episode with NaN, before one is asked.

A new mode is one subclass, given to the environment as an object or added to `REWARDS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from sol_gym.evaluation import Evaluation, Status

__all__ = ["REWARDS", "ImprovementReward", "Reward", "ScoreReward", "ShapedReward", "get_reward"]


class Reward(ABC):
    """What one turn is worth."""

    name: str
    """The name by which an environment is asked for it."""
    low: float
    """Least value of one turn."""
    high: float
    """Greatest value of one turn."""

    @abstractmethod
    def __call__(self, evaluation: Evaluation, *, best_score: float, num_workloads: int) -> float:
        """Reward of a turn.

        Args:
            evaluation: this turn's; its score is known, or its status says why the kernel failed.
            best_score: best score of the episode's earlier turns, 0 at the first.
            num_workloads: how many workloads the problem has here; `evaluation.results` has fewer
                where judging stopped early.
        """


class ScoreReward(Reward):
    """The SOL Score: 0 unless every workload passed, 0.5 at the baseline, 1 at the bound."""

    name = "score"
    low = 0.0
    high = 1.0

    def __call__(self, evaluation: Evaluation, *, best_score: float, num_workloads: int) -> float:
        return evaluation.score or 0.0


class ImprovementReward(Reward):
    """By how much this turn's score exceeds the best of the episode so far, else 0.

    The sum over an episode is the episode's best score, so undiscounted return and final quality
    are the same thing, and a kernel handed in twice earns nothing the second time.
    """

    name = "improvement"
    low = 0.0
    high = 1.0

    def __call__(self, evaluation: Evaluation, *, best_score: float, num_workloads: int) -> float:
        return max(0.0, (evaluation.score or 0.0) - best_score)


class ShapedReward(Reward):
    """Partial credit for getting further, then the score.

    Until every workload passes, the mean over workloads of what each one's status is worth in
    `CREDIT`; workloads that were not reached count with the status of the whole evaluation. Once
    all pass: ``CREDIT[PASSED] + (1 - CREDIT[PASSED]) * score``, so any correct kernel is worth more
    than any wrong one. A hack and a time below the bound are worth 0 whatever else was right.
    """

    name = "shaped"
    low = 0.0
    high = 1.0

    CREDIT: ClassVar[dict[Status, float]] = {
        Status.COMPILE_ERROR: 0.0,
        Status.RUNTIME_ERROR: 0.1,
        Status.TIMEOUT: 0.1,
        Status.INCORRECT_SHAPE: 0.2,
        Status.INCORRECT_DTYPE: 0.2,
        Status.INCORRECT_NUMERICAL: 0.3,
        Status.PASSED: 0.4,
    }
    """Worth of a workload by its status: it compiles, runs, has the right shapes, right values."""

    def __call__(self, evaluation: Evaluation, *, best_score: float, num_workloads: int) -> float:
        statuses = [result.status for result in evaluation.results]
        statuses += [evaluation.status] * (num_workloads - len(statuses))
        if any(status not in self.CREDIT for status in (evaluation.status, *statuses)):
            return 0.0
        if evaluation.passed:
            passed = self.CREDIT[Status.PASSED]
            return passed + (1 - passed) * (evaluation.score or 0.0)
        return sum(self.CREDIT[status] for status in statuses) / len(statuses)


REWARDS: dict[str, Reward] = {
    reward.name: reward for reward in (ScoreReward(), ImprovementReward(), ShapedReward())
}
"""The rewards by name."""


def get_reward(reward: str | Reward) -> Reward:
    """A reward by name; a `Reward` is returned as it is.

    Raises:
        ValueError: no reward has that name.
    """
    if isinstance(reward, Reward):
        return reward
    if reward not in REWARDS:
        raise ValueError(
            f"reward is {reward!r}, expected one of {', '.join(REWARDS)} or a Reward object"
        )
    return REWARDS[reward]
