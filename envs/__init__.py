"""Gymnasium environments: a problem is an environment, kernel source is the action.

Importing this package registers the ids (it loads neither torch nor a GPU runtime)::

    import gymnasium
    import sol_gym.envs

    env = gymnasium.make("SolGym/L1-069_rms_norm-v0", device="auto", max_turns=8)
    env = gymnasium.make("SolGym-v0", problem="path/to/my_problem")
    env = gymnasium.make(sol_gym.envs.register_problem("imported/19_ReLU"))
    envs = gymnasium.make_vec("SolGym/L1-069_rms_norm-v0", num_envs=4, vectorization_mode="async")

Without the import, gymnasium finds an id when told the module:
``gymnasium.make("sol_gym.envs:SolGym/L1-069_rms_norm-v0")``.
"""

from __future__ import annotations

from .kernel_env import KernelEnv
from .registration import SCORING_VERSION, env_id, register_all, register_problem
from .rewards import REWARDS, ImprovementReward, Reward, ScoreReward, ShapedReward, get_reward
from .spaces import Utf8
from .wrappers import EpisodeBest, TextOnly

__all__ = [  # noqa: RUF022 (grouped)
    # environment and its ids
    "KernelEnv",
    "SCORING_VERSION",
    "env_id",
    "register_all",
    "register_problem",
    # space
    "Utf8",
    # rewards
    "REWARDS",
    "ImprovementReward",
    "Reward",
    "ScoreReward",
    "ShapedReward",
    "get_reward",
    # wrappers
    "EpisodeBest",
    "TextOnly",
]

register_all()
