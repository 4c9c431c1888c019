"""Ids: one environment per problem of the library, and a generic one.

An id is ``SolGym/<SUBSET>-<name>-v<SCORING_VERSION>``, e.g. ``SolGym/L1-069_rms_norm-v0``.
Gymnasium allows one slash, before which stands the namespace, so the problem's own slash becomes a
hyphen. ``SolGym-v0`` takes any problem as ``problem=``.
"""

from __future__ import annotations

import re
from pathlib import Path

import gymnasium

from sol_gym.errors import ProblemError
from sol_gym.problem import load_problem
from sol_gym.problems import list_ids

__all__ = ["SCORING_VERSION", "env_id", "register_all", "register_problem"]

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
    return f"SolGym/{re.sub(r'[^A-Za-z0-9_.-]', '-', problem_id)}-v{SCORING_VERSION}"


def register_problem(folder: str | Path) -> str:
    """Register an environment for a problem outside the library, e.g. an imported one.

    Args:
        folder: the problem's folder, in the public layout.

    Returns:
        Its gymnasium id. Registering the same folder again changes nothing.

    Raises:
        ProblemError: there is no problem, or another one has the id.

    Example:
        >>> env_id = register_problem("imported/19_ReLU")  # doctest: +SKIP
        >>> env = gymnasium.make(env_id, device="auto")  # doctest: +SKIP
    """
    path = str(Path(folder).absolute())
    name = env_id(load_problem(path).id)
    known = gymnasium.registry.get(name)
    if known is not None and known.kwargs.get("problem") != path:
        raise ProblemError(
            f"{name} is registered for {known.kwargs.get('problem')}; give the problem in {path} "
            "another id (pack.json: 'id')"
        )
    if known is None:
        gymnasium.register(
            id=name, entry_point=_ENTRY_POINT, nondeterministic=True, kwargs={"problem": path}
        )
    return name


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
