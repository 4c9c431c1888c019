"""What importers hand back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..problem import Problem
from ..solution import Solution

Wanted = Callable[[str], bool]
"""Whether a problem is to be imported, by its name."""


def every(name: str) -> bool:
    """Wants every problem."""
    return True


@dataclass
class ProblemFinding:
    """What the audit found."""

    message: str
    where: str = ""
    """Uuids of the workloads it is about; empty: all that were looked at, or the problem."""

    def __str__(self) -> str:
        return f"{self.message} (workload {self.where})" if self.where else self.message


@dataclass
class Imported:
    """A problem read from a foreign format, and what came with it."""

    problem: Problem
    solutions: list[Solution] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    """Recorded results as they stood in the file, one JSON text each."""
    remarks: list[str] = field(default_factory=list)
    """What could not be taken over, or should be known."""
    findings: list[ProblemFinding] = field(default_factory=list)
    """What the audit warns of."""
    folder: Path | None = None
    """Where it was written."""


@dataclass
class ImportFailure:
    """A problem that could not be imported; others of the same source may have been."""

    name: str
    message: str
    """What was expected, what was found, and where."""
