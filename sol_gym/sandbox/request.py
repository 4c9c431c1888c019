"""What the judge is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..evaluation import Status, WorkloadResult
from ..problem import Problem
from ..solution import Solution
from .stages import Stages
from .timing import Plan

Progress = Callable[[str, int, int], None]


@dataclass
class Outcome:
    """What the judge found; bounds, baselines and scores are added elsewhere."""

    results: list[WorkloadResult] = field(default_factory=list)
    status: Status | None = None
    """Set where the whole solution failed before any workload."""
    message: str = ""
    log: str = ""
    isolation: dict[str, Any] = field(default_factory=dict)
    stages_s: Stages = field(default_factory=Stages)


@dataclass(frozen=True)
class Request:
    """What to judge, and how."""

    problem: Problem
    solution: Solution
    seed: int | None = None
    """Fixes all draws, for whoever wants to repeat a run; None takes entropy."""
    inputs_profile: str = "compatible"
    timing: bool = True
    timeout_s: float = 300.0
    strict_isolation: bool = False
    """Refuse to run anything (`InfrastructureError`) where a layer is missing."""
    plan: Plan | None = None
    on_progress: Progress = lambda *_: None
    cancelled: Callable[[], bool] = lambda: False


class Cancelled(Exception):
    """The client is gone."""
