"""Vector environments with their default arguments, against the real judge, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, VectorEnv

from sol_gym.envs import KernelEnv, env_id
from sol_gym.problems import load

pytestmark = pytest.mark.usefixtures("cpu_judge")

PROBLEM = "FIB/021_rmsnorm_h128"
NO_PYTHON = "def run(:\n"


@pytest.fixture(params=["sync", "async"])
def envs(request) -> Iterator[VectorEnv]:
    made = gymnasium.make_vec(
        env_id(PROBLEM),
        num_envs=2,
        vectorization_mode=request.param,
        device="cpu",
        workloads=[0],
        target_score=None,
        max_turns=2,
    )
    yield made
    made.close()


def test_each_environment_gets_its_own_kernel_and_feedback(envs):
    observations, infos = envs.reset(seed=1)
    assert observations in envs.observation_space
    assert observations["feedback"] == ("", "")
    assert infos["problem"].tolist() == [PROBLEM, PROBLEM]

    right = load(PROBLEM).reference
    observations, rewards, terminated, truncated, infos = envs.step((right, NO_PYTHON))
    assert observations in envs.observation_space
    assert infos["status"].tolist() == ["PASSED", "COMPILE_ERROR"]
    assert rewards[0] > 0 and rewards[1] == 0
    assert observations["feedback"][0].startswith("PASSED")
    assert observations["feedback"][1].startswith("COMPILE_ERROR")
    assert observations["turn"].tolist() == [[1], [1]]
    assert observations["best_score"][:, 0] == pytest.approx(rewards)
    assert not terminated.any() and not truncated.any()
    assert infos["best_score"].dtype == np.float64


def test_a_finished_episode_is_reset_at_the_next_step(envs):
    envs.reset()
    texts = (NO_PYTHON, NO_PYTHON)
    envs.step(texts)
    *_, truncated, _ = envs.step(texts)
    assert truncated.all()
    observations, rewards, _, truncated, infos = envs.step(texts)
    assert not truncated.any()
    assert observations["feedback"] == ("", "")
    assert infos["turn"].tolist() == [0, 0]
    assert rewards.tolist() == [0, 0]


def test_sampled_actions_are_judged(envs):
    envs.reset()
    envs.action_space.seed(0)
    *_, infos = envs.step(envs.action_space.sample())
    assert all(infos["status"])


def test_different_problems_share_a_vector_env():
    problems = [PROBLEM, "L1/069_rms_norm"]
    make = [lambda p=p: KernelEnv(p, device="cpu", workloads=[0]) for p in problems]
    envs = AsyncVectorEnv(make)
    try:
        observations, infos = envs.reset()
        assert infos["problem"].tolist() == problems
        assert observations["reference"] == tuple(load(p).reference for p in problems)
    finally:
        envs.close()
