"""What came of one solution on one problem, as data that can be stored, sent and replayed.

Illegal states cannot be built: a PASSED workload carries correctness, a score exists
only where T_k, T_b and T_SOL do.
"""

from __future__ import annotations

import math
import statistics
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Status(StrEnum):
    """Outcome of an evaluation or of one workload."""

    PASSED = "PASSED"
    COMPILE_ERROR = "COMPILE_ERROR"
    RUNTIME_ERROR = "RUNTIME_ERROR"
    INCORRECT_SHAPE = "INCORRECT_SHAPE"
    INCORRECT_DTYPE = "INCORRECT_DTYPE"
    INCORRECT_NUMERICAL = "INCORRECT_NUMERICAL"
    TIMEOUT = "TIMEOUT"
    REWARD_HACK = "REWARD_HACK"
    BELOW_SOL = "BELOW_SOL"
    """T_k below T_SOL: a fault of the bound or the measurement, kept as evidence, never scored."""
    INVALID_REFERENCE = "INVALID_REFERENCE"
    INFRA_ERROR = "INFRA_ERROR"
    """The machine or the judge failed; says nothing about the solution."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Severity(StrEnum):
    """What a finding of the audit means for the evaluation."""

    VETO = "veto"
    """It has no honest use: the evaluation is refused as REWARD_HACK before anything runs."""
    SUSPICIOUS = "suspicious"
    """Cheats do this and few honest kernels do; somebody should look. Nothing follows by itself."""
    NOTE = "note"
    """Worth knowing when the result is read; honest kernels do it too."""


class Finding(_Record):
    """Something the audit saw in a source text."""

    rule: str
    """Id of the rule; see docs/audit.md."""
    severity: Severity
    file: str
    line: int = Field(ge=0)
    """1-based; 0 where the finding is about the whole file."""
    text: str
    """What was found and why it matters."""
    source: str = ""
    """The line itself, shortened."""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.rule}: {self.text}" + (
            f"\n    {self.source}" if self.source else ""
        )


class Mismatch(_Record):
    """The first element that is out of tolerance."""

    output: str
    index: tuple[int, ...]
    got: float | str
    expected: float | str
    mismatched: int
    """How many elements of this output are out of tolerance."""
    total: int

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        share = 100 * self.mismatched / max(self.total, 1)
        return (
            f"{self.output}[{at}] is {self.got}, expected {self.expected} "
            f"({self.mismatched} of {self.total} elements, {share:.3g} %, out of tolerance)"
        )


class Correctness(_Record):
    """Worst figures over all rounds and outputs."""

    rounds: int = 0
    """Input sets compared, the ones out of timed batches included."""
    max_absolute_error: float = 0.0
    max_relative_error: float = 0.0
    matched_ratio: float = 1.0
    has_nan: bool = False
    has_inf: bool = False
    mismatch: Mismatch | None = None
    strict_rounds: int = 0
    """How many of the rounds were strict sets; their errors are not in the figures above."""
    strict_error: float | None = None
    """Largest error on strict sets, root mean square over an output, in units of the error that
    the reference itself makes against float64."""
    strict_skipped: list[str] = []
    """Strict sets that nobody could be judged by, with the reason."""


class Timing(_Record):
    """How T_k was found; see docs/design.md, Timing. Times are per call."""

    t_k_ms: float = Field(gt=0)
    """The candidate's time: median over repeats of the larger figure of the two clocks."""
    batch_ms: float
    """By the judge's clock: (batch - honest overhead) / n_sets, median over repeats."""
    reported_ms: float
    """By the worker's own clock (CUDA events on a GPU), median over repeats. Not trusted alone."""
    single_ms: float | None = None
    """Sets asked for one by one: round trip less the calibrated hand-shake."""
    mode: str
    """`graph` or `eager`, `+copy` where outputs were copied to the arena inside the batch, `+dps`."""
    n_sets: int
    """Distinct input sets in a batch, each used once."""
    repeats: int
    spread: float
    """(max - min) / median of the per-repeat figures."""
    overhead_ms: float
    """Overhead that was taken off a batch's clock at most (see `sandbox/timing.py`)."""
    sm_clock_mhz: int | None = None
    """SM clock seen right after the batches."""
    clock_locked: bool = False
    marks: list[str] = []
    """Remarks, e.g. `short batch`, `clocks disagree`, `inputs smaller than L2`."""


class WorkloadResult(_Record):
    """One workload's outcome."""

    uuid: str
    axes: dict[str, int]
    status: Status
    message: str = ""
    correctness: Correctness | None = None
    timing: Timing | None = None
    t_sol_ms: float | None = None
    t_b_ms: float | None = None
    bound_by: str | None = None
    """What limits a kernel at the bound: `memory`, `compute` (with its class) or `launch`."""
    score: float | None = None

    @model_validator(mode="after")
    def _complete(self) -> WorkloadResult:
        if self.status is Status.PASSED and self.correctness is None:
            raise ValueError("a PASSED workload carries correctness")
        if self.status is not Status.PASSED and self.score:
            raise ValueError(f"a {self.status} workload cannot have a score above 0")
        if self.score is not None and self.score > 0 and self.timing is None:
            raise ValueError("a score above 0 needs a timing")
        return self

    @property
    def t_k_ms(self) -> float | None:
        """The candidate's time in milliseconds, where it was measured."""
        return self.timing.t_k_ms if self.timing else None


class Provenance(_Record):
    """What produced an evaluation, so that it can be repeated and compared."""

    device: str
    """Key of the device model, e.g. `h200` or `cpu`."""
    device_name: str
    """The hardware's own name."""
    profile: str
    """Workload profile: `full` or `smoke`."""
    inputs_profile: str
    """Input profile: `compatible` or `strict`."""
    bound_set: str = "solar"
    baseline_set: str | None = None
    """Where T_b came from, e.g. `published` or `measured`."""
    problem_hash: str
    solution_hash: str
    isolation: dict[str, bool | str] = {}
    """Isolation layer -> whether it was active (or why not)."""
    versions: dict[str, str] = {}
    seeded: bool = False
    """True if the caller fixed the seed, so that the run can be repeated."""
    date: str
    """UTC, ISO 8601."""
    stages_s: dict[str, float] = {}
    """Wall seconds by stage."""


class Evaluation(_Record):
    """Outcome of one solution on one problem.

    `score` is the mean of the workload scores, 0 unless every workload passed, and `None` where
    nothing can be said (infrastructure fault, unscorable problem).
    """

    problem: str
    solution: str
    status: Status
    score: float | None = None
    message: str = ""
    log: str = ""
    """Tail of what the solution printed."""
    results: list[WorkloadResult] = []
    findings: list[Finding] | None = None
    """What the static audit saw in the source; None where it was switched off."""
    provenance: Provenance

    @property
    def passed(self) -> bool:
        """Whether every workload passed."""
        return self.status is Status.PASSED

    @property
    def speedup(self) -> float | None:
        """Geometric mean of T_b / T_k over the workloads; None unless all were measured."""
        ratios = [r.t_b_ms / r.t_k_ms for r in self.results if r.t_b_ms and r.t_k_ms]
        if not ratios or len(ratios) != len(self.results):
            return None
        return statistics.geometric_mean(ratios)

    def to_json(self) -> dict[str, Any]:
        """JSON-safe dictionary: NaN and infinities, for which JSON has no numbers, become text that
        `model_validate` reads back."""
        return _finite(self.model_dump(mode="json"))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data
