"""sol_gym: agents learn to write fast GPU kernels, scored against the Speed-of-Light bound.

Importing this package loads neither torch nor a GPU runtime; the names below are fetched on first
use. Environments are in `sol_gym.envs`, the problem library in `sol_gym.problems`, and the one
function that judges a solution is `sol_gym.evaluate.evaluate`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    # data
    "Problem": "problem",
    "Workload": "problem",
    "Definition": "problem",
    "Tolerance": "problem",
    "load_problem": "problem",
    "export_problem": "problem",
    "Solution": "solution",
    "load_solution": "solution",
    "Evaluation": "evaluation",
    "Status": "evaluation",
    "WorkloadResult": "evaluation",
    # score
    "sol_score": "score",
    "suite_score": "score",
    # devices
    "Device": "device",
    "get_device": "device",
    # errors
    "SolGymError": "errors",
    "ProblemError": "errors",
    "SolutionError": "errors",
    "DeviceError": "errors",
    "InfrastructureError": "errors",
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from .device import Device, get_device
    from .errors import DeviceError, InfrastructureError, ProblemError, SolGymError, SolutionError
    from .evaluation import Evaluation, Status, WorkloadResult
    from .problem import Definition, Problem, Tolerance, Workload, export_problem, load_problem
    from .score import sol_score, suite_score
    from .solution import Solution, load_solution


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
