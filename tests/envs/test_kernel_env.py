"""The environment against the real judge, on the CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from sol_gym import InfrastructureError, ProblemError, export_problem
from sol_gym.envs import KernelEnv, env_id
from sol_gym.evaluation import Evaluation, Status
from sol_gym.problems import load

pytestmark = pytest.mark.usefixtures("cpu_judge")

PROBLEM = "FIB/021_rmsnorm_h128"

RIGHT = """
import torch

def run(hidden_states, weight):
    x = hidden_states.float()
    normalized = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)
    return (normalized * weight.float()).to(hidden_states.dtype)
"""
WRONG_VALUES = RIGHT.replace("normalized * weight.float()", "normalized * (weight.float() + 1)")
WRONG_SHAPE = RIGHT.replace("hidden_states.dtype)", "hidden_states.dtype)[:1]")
WRONG_DTYPE = RIGHT.replace(".to(hidden_states.dtype)", "")
RAISES = "def run(hidden_states, weight):\n    raise KeyError('no such block size')\n"
NO_PYTHON = "def run(hidden_states, weight:\n    return hidden_states\n"

MakeEnv = Callable[..., KernelEnv]


@pytest.fixture
def make_env() -> Iterator[MakeEnv]:
    """Makes environments on the CPU with one workload, and closes them."""
    made: list[KernelEnv] = []

    def make(problem: Any = PROBLEM, **kwargs: Any) -> KernelEnv:
        made.append(KernelEnv(problem, **{"device": "cpu", "workloads": [0]} | kwargs))
        return made[-1]

    yield make
    for env in made:
        env.close()


def test_reset_gives_task_reference_and_an_empty_episode(make_env):
    env = make_env()
    observation, info = env.reset(seed=3)
    assert observation in env.observation_space
    assert "run(hidden_states, weight)" in observation["prompt"]
    assert observation["reference"] == load(PROBLEM).reference
    assert observation["feedback"] == ""
    assert observation["turn"].tolist() == [0]
    assert observation["best_score"].tolist() == [0.0]
    expected = {"problem": PROBLEM, "profile": "smoke", "device": "cpu"}
    assert info == expected | {"turn": 0, "best_score": 0.0}


def test_scores_can_be_measured_against_the_published_bounds(make_env):
    env = make_env(device="b200", profile="full", bound_set="published")
    env.reset()
    # Refused by its source, so that no B200 has to be here; the judge is told all the same.
    info = env.step(NO_PYTHON)[4]
    assert json.loads(info["evaluation_json"])["provenance"]["bound_set"] == "published"
    ours = make_env()
    ours.reset()
    info = ours.step(NO_PYTHON)[4]
    assert json.loads(info["evaluation_json"])["provenance"]["bound_set"] == "solar"


def test_published_bounds_are_refused_where_there_are_none(make_env):
    with pytest.raises(ProblemError, match=r"no published bounds for FIB/021.* on cpu"):
        make_env(bound_set="published")
    with pytest.raises(ValueError, match="bound_set is 'other', expected one of 'solar'"):
        make_env(bound_set="other")


def test_a_right_kernel_is_rewarded_with_its_score(make_env):
    env = make_env()
    env.reset()
    observation, reward, terminated, truncated, info = env.step(RIGHT)
    assert info["status"] == "PASSED", info["message"]
    assert isinstance(reward, float)
    assert 0 < reward <= 1
    assert reward == info["score"] == info["best_score"]
    assert observation in env.observation_space
    assert observation["best_score"][0] == pytest.approx(reward)
    assert observation["turn"].tolist() == [1]
    assert f"Score {reward:.4f}" in observation["feedback"]
    assert "Turn 1 of 8" in observation["feedback"]
    assert not truncated
    assert terminated == (reward >= 0.95)
    assert info["t_k_ms"] > 0 and info["t_b_ms"] > info["t_sol_ms"] > 0
    assert info["speedup"] == pytest.approx(info["t_b_ms"] / info["t_k_ms"])
    assert (info["num_passed"], info["num_workloads"]) == (1, 1)


@pytest.mark.parametrize(
    ("source", "status", "hint"),
    [
        (WRONG_VALUES, Status.INCORRECT_NUMERICAL, "output["),
        (WRONG_SHAPE, Status.INCORRECT_SHAPE, "shape"),
        (WRONG_DTYPE, Status.INCORRECT_DTYPE, "float32"),
        (RAISES, Status.RUNTIME_ERROR, "no such block size"),
        (NO_PYTHON, Status.COMPILE_ERROR, "line 1"),
    ],
    ids=lambda value: value if isinstance(value, Status) else "",
)
def test_a_wrong_kernel_gets_nothing_but_feedback_that_says_why(make_env, source, status, hint):
    env = make_env()
    env.reset()
    observation, reward, terminated, truncated, info = env.step(source)
    assert info["status"] == status
    assert reward == 0.0
    assert not terminated and not truncated
    assert hint in observation["feedback"]
    assert info["best_score"] == 0.0


@pytest.mark.parametrize(
    "source",
    ["", "  \n", "x" * 200_001, "x = '\ud800'"],
    ids=["empty", "blank", "long", "surrogate"],
)
def test_a_text_that_cannot_be_a_kernel_is_a_compile_error_and_starts_no_judge(make_env, source):
    env = make_env()
    env.reset()
    observation, reward, _, _, info = env.step(source)
    assert info["status"] == "COMPILE_ERROR"
    assert reward == 0.0
    assert "expected" in observation["feedback"]
    assert observation in env.observation_space
    assert info["turn"] == 1
    assert 'device_name": ""' in info["evaluation_json"]


def test_an_action_that_is_no_text_is_the_callers_mistake(make_env):
    env = make_env()
    env.reset()
    with pytest.raises(TypeError, match="expected source text"):
        env.step(b"def run(): ...")


def test_info_is_flat_json_with_constant_types_and_the_whole_evaluation(make_env):
    env = make_env()
    _, first = env.reset()
    infos = [first, *(env.step(source)[4] for source in (RAISES, WRONG_VALUES, RIGHT))]
    types: dict[str, type] = {}
    for info in infos:
        assert json.loads(json.dumps(info, allow_nan=False)) == info
        for key, value in info.items():
            assert type(value) in (str, int, float, bool)
            assert types.setdefault(key, type(value)) is type(value)
            assert not key.startswith(("_", "final_", "episode"))
    evaluation = Evaluation.model_validate_json(infos[-1]["evaluation_json"])
    assert evaluation.passed
    assert evaluation.score == infos[-1]["score"]
    assert evaluation.provenance.solution_hash == infos[-1]["solution_hash"]


def test_an_episode_is_truncated_at_max_turns_and_must_then_be_reset(make_env):
    env = make_env(max_turns=2)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(NO_PYTHON)
    env.reset()
    assert env.step(NO_PYTHON)[2:4] == (False, False)
    assert env.step(NO_PYTHON)[2:4] == (False, True)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(NO_PYTHON)
    observation, info = env.reset()
    assert info["turn"] == 0
    assert observation["feedback"] == ""
    assert env.step(NO_PYTHON)[4]["turn"] == 1


def test_an_episode_terminates_at_the_target_score(make_env):
    env = make_env(target_score=1e-6, max_turns=1)
    env.reset()
    assert env.step(RIGHT)[2:4] == (True, False)
    without = make_env(target_score=None, max_turns=2)
    without.reset()
    assert without.step(RIGHT)[2:4] == (False, False)


def test_improvement_rewards_only_what_is_new(make_env):
    env = make_env(reward="improvement", target_score=None)
    env.reset()
    scores, rewards = [], []
    for _ in range(2):
        _, reward, *_, info = env.step(RIGHT)
        scores.append(info["score"])
        rewards.append(reward)
    assert sum(rewards) == pytest.approx(max(scores))
    assert rewards[0] == scores[0]


def test_shaped_rewards_getting_further(make_env):
    env = make_env(reward="shaped", target_score=None)
    env.reset()
    sources = (NO_PYTHON, RAISES, WRONG_DTYPE, WRONG_VALUES, RIGHT)
    rewards = [env.step(source)[1] for source in sources]
    assert rewards == sorted(set(rewards))


def test_a_seed_makes_inputs_repeatable_and_without_one_they_are_fresh(make_env):
    def first_mismatch(env, **reset):
        env.reset(**reset)
        evaluation = Evaluation.model_validate_json(env.step(WRONG_VALUES)[4]["evaluation_json"])
        correctness = evaluation.results[0].correctness
        assert correctness is not None and correctness.mismatch is not None
        mismatch = correctness.mismatch
        return evaluation.provenance.seeded, mismatch.index, mismatch.expected

    env = make_env()
    unseeded = first_mismatch(env), first_mismatch(env)
    assert unseeded[0] != unseeded[1]
    assert not unseeded[0][0]
    seeded = first_mismatch(env, seed=5), first_mismatch(env, seed=5), first_mismatch(env, seed=6)
    assert seeded[0] == seeded[1] != seeded[2]
    assert seeded[0][0]


def test_the_inputs_of_a_seeded_turn_do_not_depend_on_what_was_tried_before(make_env):
    env = make_env()
    details = []
    for earlier in ("", RAISES):
        env.reset(seed=5)
        env.step(earlier)
        info = env.step(WRONG_VALUES)[4]
        evaluation = Evaluation.model_validate_json(info["evaluation_json"])
        correctness = evaluation.results[0].correctness
        assert correctness is not None
        details.append(correctness.mismatch)
    assert details[0] == details[1] is not None


@pytest.fixture
def unjudgeable(tmp_path):
    """A problem whose reference fails, so that nothing can be said about any kernel."""
    problem = load(PROBLEM, profile="smoke").with_workloads([0])
    reference = "def run(hidden_states, weight):\n    raise RuntimeError('reference is broken')\n"
    definition = problem.definition.model_copy(update={"reference": reference})
    broken = problem.model_copy(update={"definition": definition})
    return export_problem(broken, tmp_path / "broken")


def test_what_says_nothing_about_the_kernel_raises_and_the_turn_can_be_repeated(
    make_env, unjudgeable
):
    env = make_env(unjudgeable, profile="full")
    env.reset()
    for _ in range(2):
        with pytest.raises(InfrastructureError, match="INVALID_REFERENCE"):
            env.step(RIGHT)
    assert env.step("")[4]["turn"] == 1


def test_what_says_nothing_about_the_kernel_can_end_the_episode_without_a_reward(
    make_env, unjudgeable
):
    env = make_env(unjudgeable, profile="full", on_infra_error="truncate")
    env.reset()
    observation, reward, terminated, truncated, info = env.step(RIGHT)
    assert math.isnan(reward)
    assert (terminated, truncated) == (False, True)
    assert "INVALID_REFERENCE" in info["infra_error"]
    assert "status" not in info
    assert observation in env.observation_space
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(RIGHT)
    env.reset()


def test_a_problem_of_ones_own_is_given_as_a_folder_or_an_object(make_env, tmp_path):
    problem = load(PROBLEM, profile="smoke").with_workloads([1])
    for own in (problem, export_problem(problem, tmp_path), str(tmp_path)):
        env = make_env(own)
        env.reset()
        assert env.problem.workloads == problem.workloads
        assert env.step(WRONG_VALUES)[4]["status"] == "INCORRECT_NUMERICAL"


def test_chosen_workloads_are_the_ones_judged(make_env):
    problem = load(PROBLEM, profile="smoke")
    env = make_env(workloads=[2, 0])
    env.reset()
    info = env.step(WRONG_VALUES)[4]
    evaluation = Evaluation.model_validate_json(info["evaluation_json"])
    assert info["num_workloads"] == 2
    assert evaluation.results[0].uuid == problem.workloads[2].uuid


def test_closing_twice_is_allowed_and_a_closed_environment_says_so(make_env):
    env = make_env()
    env.reset()
    env.step(NO_PYTHON)
    env.close()
    env.close()
    for use in (env.reset, lambda: env.step(RIGHT)):
        with pytest.raises(gymnasium.error.ClosedEnvironmentError, match="closed"):
            use()


def test_rendering_shows_the_last_feedback(make_env, capsys):
    env = make_env(render_mode="ansi")
    env.reset()
    assert PROBLEM in env.render()
    env.step(NO_PYTHON)
    assert "COMPILE_ERROR" in env.render()
    assert capsys.readouterr().out == ""

    human = make_env(render_mode="human")
    human.reset()
    human.step(NO_PYTHON)
    assert human.render() is None
    printed = capsys.readouterr().out
    assert PROBLEM in printed and "COMPILE_ERROR" in printed


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_turns": 0}, "max_turns is 0, expected 1 or more"),
        ({"target_score": 1.5}, "target_score is 1.5"),
        ({"target_score": 0.0}, "target_score is 0.0"),
        ({"reward": "points"}, "expected one of score"),
        ({"inputs_profile": "loose"}, "expected one of 'compatible', 'strict'"),
        ({"on_infra_error": "zero"}, "expected one of 'raise', 'truncate'"),
        ({"render_mode": "rgb_array"}, "expected one of None, 'ansi', 'human'"),
    ],
)
def test_an_argument_out_of_range_is_answered_with_what_was_expected(make_env, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_env(**kwargs)


def test_unknown_problems_and_workloads_are_refused(make_env):
    with pytest.raises(ProblemError, match="no problem"):
        make_env("FIB/999_nothing")
    with pytest.raises(ProblemError, match="no workload 99"):
        make_env(workloads=[99])


@pytest.mark.parametrize("problem", [PROBLEM, "L1/069_rms_norm"])
def test_gymnasiums_checker_has_nothing_to_say(problem):
    env = gymnasium.make(env_id(problem), device="cpu", workloads=[0], max_turns=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
    env.close()


def test_the_documented_way_works_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make("SolGym/L1-069_rms_norm-v0", device="auto", max_turns=8)
        env.reset(seed=0)
        observation, *_ = env.step(NO_PYTHON)
        assert isinstance(observation["turn"], np.ndarray)
        env.close()


def test_a_whole_episode_loads_no_torch_in_the_callers_process():
    code = f"""
import json, sys
from sol_gym.envs import KernelEnv
env = KernelEnv({PROBLEM!r}, device="cpu", workloads=[0])
observation, _ = env.reset()
info = env.step(observation["reference"])[4]
env.close()
print(json.dumps([info["status"], "torch" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["PASSED", False]


def test_the_generic_id_takes_any_problem():
    env = gymnasium.make("SolGym-v0", problem="FIB/021", device="cpu")
    _, info = env.reset()
    assert info["problem"] == PROBLEM
    env.close()
    with pytest.raises(TypeError, match="problem"):
        gymnasium.make("SolGym-v0")
