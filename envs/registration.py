"""Ids: one environment per problem of the library, and a generic one.

An id is ``SolGym/<SUBSET>-<name>-v<SCORING_VERSION>``, e.g. ``SolGym/L1-069_rms_norm-v0``.
Gymnasium allows one slash, before which stands the namespace, so the problem's own slash becomes a
hyphen. ``SolGym-v0`` takes any problem as ``problem=``.
"""

from __future__ import annotations

import gymnasium

from sol_gym.problems import list_ids

__all__ = ["SCORING_VERSION", "env_id", "register_all"]

SCORING_VERSION = 0
"""Version of bounds, baselines and score formula: where one changes, rewards are no longer
comparable, and every id becomes a new one."""

_ENTRY_POINT = "sol_gym.envs.kernel_env:KernelEnv"


def env_id(problem_id: str) -> str:
    """The gymnasium id of a problem's environment.

    Example:
        >>> env_id("L1/069_rms_norm")
        'SolGym/L1-069_rms_norm-v0'
    """
    return f"SolGym/{problem_id.replace('/', '-')}-v{SCORING_VERSION}"


def register_all() -> None:
    """Register an id per problem and the generic one; ids that are registered stay as they are.

    Environments truncate themselves at `max_turns`, so that no time limit is registered, and are
    nondeterministic, because times are measured.
    """
    kwargs_by_id: dict[str, dict[str, str]] = {f"SolGym-v{SCORING_VERSION}": {}}
    kwargs_by_id |= {env_id(problem): {"problem": problem} for problem in list_ids()}
    for name, kwargs in kwargs_by_id.items():
        if name not in gymnasium.registry:
            gymnasium.register(
                id=name, entry_point=_ENTRY_POINT, nondeterministic=True, kwargs=kwargs
            )
