"""Problem + Solution + Device -> Evaluation: the one place where they meet.

`evaluate` is the function; `Evaluator` keeps the connection to the judge's process between calls.
The judge runs in a process of its own (`sol_gym.evaluate.server`), started on first use and shared
by all clients of a user on one device; the caller needs neither torch nor the GPU.
"""

from .client import Evaluator, as_problem, as_solution, evaluate

__all__ = ["Evaluator", "as_problem", "as_solution", "evaluate"]
