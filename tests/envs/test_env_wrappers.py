"""Wrappers around the real environment, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sol_gym.envs import EpisodeBest, KernelEnv, TextOnly
from sol_gym.evaluation import Evaluation

pytestmark = pytest.mark.usefixtures("cpu_judge")

PROBLEM = "FIB/021_rmsnorm_h128"
NO_PYTHON = "def run(:\n"


@pytest.fixture
def env() -> Iterator[KernelEnv]:
    made = KernelEnv(PROBLEM, device="cpu", workloads=[0], target_score=None)
    yield made
    made.close()


def test_text_only_tells_everything_in_one_text(env):
    wrapped = TextOnly(env)
    text, _ = wrapped.reset()
    assert text in wrapped.observation_space
    assert text.startswith("# Task:")
    assert env.problem.reference in text
    assert "## Feedback" not in text
    text, *_ = wrapped.step(NO_PYTHON)
    assert text in wrapped.observation_space
    assert "## Feedback on your last kernel\nCOMPILE_ERROR" in text
    assert "Turn 1 of 8. Best score so far: 0.0000." in text


def test_text_only_has_room_for_the_longest_observation(env):
    wrapped = TextOnly(env)
    longest = {
        key: "x" * env.observation_space[key].max_length
        for key in ("prompt", "reference", "feedback")
    }
    assert wrapped.observation(longest) in wrapped.observation_space


def test_episode_best_keeps_the_best_kernel_of_the_episode(env):
    wrapped = EpisodeBest(env)
    _, info = wrapped.reset()
    assert info["best_source"] == ""
    assert wrapped.step(NO_PYTHON)[4]["best_source"] == ""
    right = env.problem.reference
    info = wrapped.step(right)[4]
    assert info["best_source"] == right
    assert Evaluation.model_validate_json(info["best_evaluation_json"]).score == info["best_score"]
    assert wrapped.step(NO_PYTHON)[4]["best_source"] == right
    _, info = wrapped.reset()
    assert info["best_source"] == ""
    assert "best_evaluation_json" not in info
