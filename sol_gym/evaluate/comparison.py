"""Our bounds beside the published ones, and why they differ.

A deviation of more than 5 % needs a cause. Causes live in ``baselines/b200/causes.json``, one entry
a problem. Most are a `Recipe`: how the published figure is arithmetic over the same tensors and
the same contractions as ours (fp32 at two bytes, a tensor left out, a mask priced dense, 600 cycles
added). A recipe counts for a workload only if it reproduces the published figure there, so such a
cause is checked at every run. Where none does, a `Bracket` says between which two recipes the figure
lies, which is checked as well. The rest are stated in words, with the range of ratios they cover.
"""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .. import baselines, solar
from ..axes import evaluate_axis
from ..device import Device, get_device
from ..errors import BoundError, ProblemError
from ..problem import Problem, Workload
from ..solar import Bound
from .bounds import published_row

NARROW = 0.05
"""Deviations up to this share need no cause."""
_ROUNDING_MS = 0.5001e-4
"""Published figures are rounded to 0.0001 ms."""
_PUBLISHED = get_device("b200-1500")
"""The model that the published figures were made with."""
_CONSTANT_MS = 600 / 1.5e6
_RATES = {name: _PUBLISHED.peak_flops[name] / 1e3 for name in ("bf16", "fp8", "nvfp4")}
"""FLOP a millisecond."""
_BYTES_PER_MS = _PUBLISHED.bandwidth_bytes_per_s / 1e3
_CHUNK = 8
_ENVIRONMENT = {
    # Threads of several processes on the same cores only get into each other's way.
    "OMP_NUM_THREADS": "1",
    # glibc: keep freed memory for the next workload, rather than have the kernel clear it again.
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(2**26),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
}
"""Of the processes that analyze."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Recipe(_Record):
    """How a published figure is made, in terms of ours: max(bytes / rate, FLOPs / rate) + constant."""

    traffic: Literal["needed", "declared", "unfused", "none"] = "needed"
    """Bytes that have to move, all bytes of all inputs and outputs, those of one kernel an
    operation, or none."""
    omit: tuple[str, ...] = ()
    """Inputs and outputs that are left out of the bytes."""
    whole: tuple[str, ...] = ()
    """Inputs and outputs priced at their full size, although less has to move."""
    two_byte: bool = False
    """Whether elements of four bytes are priced at two, and of eight at two."""
    extra: str | None = None
    """Bytes that are counted as well: an expression over axes and scalars."""
    extra_is: str = "intermediates"
    """What those bytes are."""
    work: Literal["needed", "written", "none"] = "needed"
    """FLOPs that are needed, as the reference writes them, or none."""
    flops: str | None = None
    """FLOPs as an expression over axes instead, where neither fits."""
    less: str | None = None
    """FLOPs that are left out of those needed: an expression over axes."""
    rate: Literal["ours", "bf16", "fp8", "nvfp4"] = "ours"
    """Units: per contraction as ours (float32 at the bf16 rate), or one class for all."""
    factor: float = 1.0
    """By which the time of the work is multiplied."""
    constant: bool = False
    """Whether 600 cycles (0.4 us) are added."""

    def milliseconds(self, problem: Problem, workload: Workload, bound: Bound) -> float:
        """The figure that this recipe gives for a workload.

        Args:
            problem, workload: whose declared sizes count.
            bound: ours.
        """
        axes = problem.definition.bind(workload.axes)
        traffic = float(bound.unfused_bytes) if self.traffic == "unfused" else 0.0
        if self.traffic in ("needed", "declared"):
            traffic = sum(self._bytes(problem, workload, bound))
        if self.extra:
            traffic += evaluate_axis(self.extra, axes)
        times = traffic / _BYTES_PER_MS, self.factor * self._compute(bound, axes)
        return max(times) + _CONSTANT_MS * self.constant

    def _bytes(self, problem: Problem, workload: Workload, bound: Bound) -> Iterator[float]:
        sides = (
            (problem.tensors(workload), bound.read_bytes),
            (problem.outputs(workload), bound.write_bytes),
        )
        for arguments, needed in sides:
            for name, arg in arguments.items():
                if name in self.omit:
                    continue
                all_of_it = self.traffic == "declared" or name in self.whole
                count = float(arg.nbytes if all_of_it else needed.get(name, 0))
                width = {"float32": 4, "int32": 4, "float64": 8, "int64": 8}.get(arg.dtype, 2)
                yield count * min(1.0, 2 / width) if self.two_byte else count
        for name, count in bound.write_bytes.items():
            if name not in problem.outputs(workload) and name not in self.omit:
                yield count

    def _compute(self, bound: Bound, axes: dict[str, int]) -> float:
        if self.flops:
            rate = "bf16" if self.rate == "ours" else self.rate
            return evaluate_axis(self.flops, axes) / _RATES[rate]
        if self.work == "none":
            return 0.0
        needed = {u: f for u, f in bound.work.items() if u != "fp32_fma"}
        total = sum(needed.values())
        if self.less:
            return (total - evaluate_axis(self.less, axes)) / _RATES["bf16"]
        if self.rate != "ours" or not total:
            flops = bound.as_written_flops if self.work == "written" else total
            return flops / _RATES["bf16" if self.rate == "ours" else self.rate]
        classes = {"fp8_tc": "fp8", "nvfp4_tc": "nvfp4"}
        times = [f / _RATES[classes.get(u, "bf16")] for u, f in needed.items()]
        scale = bound.as_written_flops / total if self.work == "written" else 1.0
        return max(times) * scale

    def __str__(self) -> str:
        """In words, as the cause of a deviation."""
        return "; ".join(self._parts()) or "rounded to 0.1 us"

    def cause(self, bound: Bound) -> str:
        """In words, for one workload."""
        own_rate = self.rate == "ours" and self.work != "none" and not self.flops
        parts = self._parts()
        if own_rate and bound.bound_by == "compute:fp32":
            parts.append("prices float32 products at the bf16 rate")
        return "; ".join(parts) or "rounded to 0.1 us"

    def _parts(self) -> list[str]:
        parts = []
        if self.traffic == "declared":
            parts.append("counts all declared tensors in full")
        if self.traffic == "unfused":
            parts.append("counts the traffic of one kernel an operation")
        if self.traffic == "none" and not self.extra:
            parts.append("counts no traffic")
        if self.omit:
            parts.append(f"leaves {', '.join(self.omit)} out of the bytes")
        if self.whole:
            parts.append(f"counts {', '.join(self.whole)} in full")
        if self.two_byte:
            parts.append("prices 4-byte elements at 2 bytes")
        if self.extra:
            only = "only " * (self.traffic == "none")
            parts.append(f"counts {only}{self.extra_is} as traffic")
        if self.work == "written":
            parts.append("prices products as written (masked, dead or associated for more)")
        if self.work == "none":
            parts.append("counts no contraction")
        if self.flops:
            parts.append(f"counts {self.flops} FLOP")
        if self.less:
            parts.append(f"leaves out {self.less} FLOP")
        if self.factor != 1.0:
            parts.append(f"prices the work at {self.factor:g} times its time")
        if self.rate != "ours":
            parts.append(f"prices all contractions at the {self.rate} rate")
        if self.constant:
            parts.append("adds 600 cycles")
        return parts


class Bracket(_Record):
    """What is known of a figure that no recipe reproduces: two recipes that it lies between."""

    known: str
    """What can be said about the difference, in words."""
    low: Recipe
    high: Recipe

    def __str__(self) -> str:
        return f"not reproduced: {self.known}; lies between one that {self.low} and one that {self.high}"

    def holds(
        self, problem: Problem, workload: Workload, bound: Bound, published_ms: float
    ) -> bool:
        """Whether a workload's published figure lies between the two."""
        low, high = (r.milliseconds(problem, workload, bound) for r in (self.low, self.high))
        return low - _ROUNDING_MS <= published_ms <= high + _ROUNDING_MS


class Cause(_Record):
    """Why the published bounds of one problem, or of some of its workloads, deviate from ours."""

    problem: str
    recipes: tuple[Recipe, ...] = ()
    """Tried in order; the first that reproduces a workload's figure is its cause."""
    brackets: tuple[Bracket, ...] = ()
    """For what no recipe reproduces: tried after the recipes, in order."""
    stated: str | None = None
    """A reason in words, for the rest."""
    ratios: tuple[float, float] | None = None
    """Range of ours / published that the stated reason covers."""
    verified: str = ""
    """What was computed by hand for one workload, and how."""


class Comparison(_Record):
    """One workload's bounds, ours and published."""

    problem: str
    index: int
    """Place in the problem's list of workloads."""
    workload: str
    axes: dict[str, int]
    t_sol_ms: float | None
    published_ms: float | None
    baseline_ms: float | None
    """Published T_b."""
    ratio: float | None
    """Ours / published."""
    bound_by: str | None
    complete: bool
    lane: str | None
    total_bytes: int
    flops: int
    cause: str | None = None
    """Empty where the two agree within 5 %; None where they do not and nobody knows why."""
    reproduced: bool = False
    """Whether the cause is a recipe that gives the published figure."""
    error: str | None = None


def causes() -> dict[str, Cause]:
    """The attributed causes by problem id.

    Raises:
        ProblemError: the file is malformed.
    """
    return _causes(Path(baselines.__file__).parent / "b200" / "causes.json")


@cache
def _causes(file: Path) -> dict[str, Cause]:
    try:
        entries = [Cause.model_validate(entry) for entry in json.loads(file.read_text())["causes"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProblemError(f"{file}: {error}") from error
    return {entry.problem: entry for entry in entries}


def compare(
    ids: Sequence[str],
    device: Device,
    *,
    jobs: int = 1,
    on_progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Iterator[Comparison]:
    """Compare all full workloads of problems, in whatever order they are done.

    Args:
        ids: full ids of problems of the library.
        device: `b200-1500` for a comparison that means something.
        jobs: processes; analyses are cached on disk, so that a second run is quick.
        on_progress: called with a stage, workloads done and workloads in all.
    """
    from ..problems import load

    tasks = []
    for problem_id in ids:
        count = len(load(problem_id).workloads)
        tasks += [(problem_id, i, min(i + _CHUNK, count)) for i in range(0, count, _CHUNK)]
    total, done = sum(stop - start for _, start, stop in tasks), 0
    if jobs == 1:
        for task in tasks:
            on_progress(task[0], done, total)
            rows = compare_some(*task, device)
            done += len(rows)
            yield from rows
        return
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            futures = {pool.submit(compare_some, *task, device): task for task in tasks}
            for future in as_completed(futures):
                rows = future.result()
                done += len(rows)
                on_progress(futures[future][0], done, total)
                yield from rows
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def compare_some(problem_id: str, start: int, stop: int, device: Device) -> list[Comparison]:
    """Compare workloads [start, stop) of a problem."""
    from ..problems import load

    problem = load(problem_id)
    return [
        compare_one(problem, index, problem.workloads[index], device)
        for index in range(start, stop)
    ]


def compare_one(problem: Problem, index: int, workload: Workload, device: Device) -> Comparison:
    """Compare one workload."""
    row = published_row(problem, workload)
    common: dict[str, Any] = {
        "problem": problem.id,
        "index": index,
        "workload": workload.uuid,
        "axes": workload.axes,
        "published_ms": row.t_sol_ms if row else None,
        "baseline_ms": row.t_b_ms if row else None,
    }
    try:
        bound = solar.analyze(problem, workload, device)
    except BoundError as error:
        return Comparison(
            **common, t_sol_ms=None, ratio=None, bound_by=None, complete=False, lane=None,
            total_bytes=0, flops=0, error=str(error),
        )  # fmt: skip
    cause, reproduced = None, False
    if row is not None:
        cause, reproduced = attribute(problem, workload, bound, row.t_sol_ms)
    return Comparison(
        **common,
        t_sol_ms=bound.t_sol_ms,
        ratio=bound.t_sol_ms / row.t_sol_ms if row and row.t_sol_ms else None,
        bound_by=bound.bound_by,
        complete=bound.complete,
        lane=bound.lane,
        total_bytes=bound.total_bytes,
        flops=bound.flops,
        cause=cause,
        reproduced=reproduced,
    )


def agrees(ours_ms: float, published_ms: float) -> bool:
    """Whether two figures agree within 5 % or the published one's rounding."""
    return (
        abs(ours_ms - published_ms) <= NARROW * published_ms
        or abs(ours_ms - published_ms) <= _ROUNDING_MS
    )


def attribute(
    problem: Problem, workload: Workload, bound: Bound, published_ms: float
) -> tuple[str | None, bool]:
    """Cause of a deviation, and whether a recipe reproduces the published figure.

    Returns:
        ("", False) where there is no deviation, (None, False) where it has no cause.
    """
    if abs(bound.t_sol_ms - published_ms) <= NARROW * published_ms:
        return "", False
    entry = causes().get(problem.id)
    recipes = (*(entry.recipes if entry else ()), *_COMMON)
    for recipe in recipes:
        if agrees(recipe.milliseconds(problem, workload, bound), published_ms):
            return recipe.cause(bound), True
    for bracket in entry.brackets if entry else ():
        if bracket.holds(problem, workload, bound, published_ms):
            return str(bracket), False
    if entry is not None and entry.stated is not None:
        low, high = entry.ratios or (0.0, float("inf"))
        if low <= bound.t_sol_ms / max(published_ms, 1e-12) <= high:
            return entry.stated, False
    return None, False


_COMMON = (Recipe(), Recipe(constant=True))
"""What the published model does to all problems: rounding, and 600 cycles."""


class Summary(_Record):
    """A comparison as a whole."""

    workloads: int
    complete: int
    lanes: dict[str, int]
    compared: int
    narrow: int
    """Within 5 %."""
    above: int
    below: int
    causes: dict[str, int]
    """Cause -> deviating workloads."""
    problems: dict[str, int]
    """Cause -> problems it occurs in."""
    below_baseline: int = Field(default=0)
    """Workloads whose published baseline is faster than our bound."""
    unexplained: tuple[Comparison, ...]
    failed: tuple[Comparison, ...]

    def table(self) -> list[dict[str, str]]:
        """Rows for people: cause, workloads, share, problems."""
        order = sorted(self.causes, key=lambda c: self.causes[c], reverse=True)
        return [
            {
                "cause (the published figure ...)": cause,
                "workloads": str(self.causes[cause]),
                "share": f"{100 * self.causes[cause] / max(self.compared, 1):.1f} %",
                "problems": str(self.problems[cause]),
            }
            for cause in order
        ]

    def lines(self, with_published: bool) -> list[str]:
        """The totals."""
        lanes = ", ".join(f"{n} by lane {lane}" for lane, n in sorted(self.lanes.items()))
        lines = [
            f"{self.workloads} workloads analyzed: {self.complete} complete ({lanes}), "
            f"{len(self.failed)} failed"
        ]
        if with_published and self.compared:
            lines.append(
                f"within 5 % of the published figure: {self.narrow} of {self.compared} "
                f"({100 * self.narrow / self.compared:.1f} %); above {self.above}, below {self.below}; "
                f"without a cause: {len(self.unexplained)}"
            )
            lines.append(f"published baseline faster than our bound: {self.below_baseline}")
        lines += [f"failed: {r.problem} workload {r.index}: {r.error}" for r in self.failed[:10]]
        return lines


def summarize(rows: Sequence[Comparison]) -> Summary:
    """Count a comparison's rows."""
    compared = [r for r in rows if r.ratio is not None]
    deviating = [r for r in compared if r.cause != ""]
    named = [r for r in deviating if r.cause is not None]
    return Summary(
        workloads=len(rows),
        complete=sum(r.complete for r in rows),
        lanes=dict(Counter(r.lane for r in rows if r.lane)),
        compared=len(compared),
        narrow=len(compared) - len(deviating),
        above=sum(r.ratio > 1 for r in deviating if r.ratio),
        below=sum(r.ratio < 1 for r in deviating if r.ratio),
        causes=dict(Counter(r.cause for r in named if r.cause)),
        problems=dict(Counter(c for c, _ in {(r.cause, r.problem) for r in named} if c)),
        below_baseline=sum(
            r.baseline_ms < r.t_sol_ms for r in rows if r.baseline_ms and r.t_sol_ms
        ),
        unexplained=tuple(r for r in deviating if r.cause is None),
        failed=tuple(r for r in rows if r.error),
    )


def write_csv(rows: Sequence[Comparison], file: Path) -> None:
    """One line a workload: ours, published, ratio, cause and what they are made of."""
    with open(file, "w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(
            (
                *(
                    "problem",
                    "index",
                    "workload",
                    "axes",
                    "ours_ms",
                    "published_ms",
                    "ratio",
                    "cause",
                ),
                *("reproduced", "bound_by", "complete", "lane", "bytes", "flops", "baseline_ms"),
            )
        )
        for r in rows:
            axes = " ".join(f"{k}={v}" for k, v in r.axes.items())
            cause = "UNKNOWN" if r.cause is None and r.ratio is not None else r.cause
            writer.writerow(
                (
                    *(
                        r.problem,
                        r.index,
                        r.workload,
                        axes,
                        r.t_sol_ms,
                        r.published_ms,
                        r.ratio,
                        cause,
                    ),
                    *(r.reproduced, r.bound_by, r.complete, r.lane, r.total_bytes, r.flops),
                    r.baseline_ms,
                )
            )
