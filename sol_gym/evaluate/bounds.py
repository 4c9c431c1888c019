"""Bound sets: T_SOL by our own analyzer (`solar`), or as published for one B200 (`published`).

The published figures are shipped as they are, faults included, and hold for the full workloads of
the library's problems on a B200 at 1,500 MHz only. `solar` holds for any problem and device.

Where the values of inputs steer (lengths, page tables, routing), a bound is one of the inputs it was
worked out on, and the judge times others, drawn in secret: T_k is the median of five batches, each of
as many draws as ten milliseconds of calls need, or fewer. So the least bound of a few draws is taken. Batches of long
calls hold few draws, and may lie below it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from .. import baselines, solar
from ..baselines import PublishedRow
from ..device import Device
from ..errors import BoundError, ProblemError
from ..problem import CustomInput, Problem, Workload

BoundSet = Literal["solar", "published"]
DRAWS = 4


class BoundTime(NamedTuple):
    """T_SOL of one workload."""

    t_sol_ms: float
    bound_by: str
    """What binds; `published` where only the figure is known."""


def bound_times(problem: Problem, device: Device, bound_set: BoundSet) -> list[BoundTime | None]:
    """T_SOL of every workload of a problem, in order; None where the analyzer has none.

    Args:
        problem: with the workloads that are asked for.
        device: the hardware model.
        bound_set: which set.

    Raises:
        ProblemError: unknown set, or `published` where there are no published figures.
    """
    if bound_set == "published":
        return [BoundTime(row.t_sol_ms, "published") for row in _rows_of(problem, device)]
    if bound_set not in get_args(BoundSet):
        raise ProblemError(
            f"there is no bound set {bound_set!r}; sets: {', '.join(get_args(BoundSet))}"
        )
    found: list[BoundTime | None] = []
    for workload in problem.workloads:
        try:
            bound = least_bound(problem, workload, device)
            found.append(BoundTime(bound.t_sol_ms, bound.bound_by))
        except BoundError:
            found.append(None)
    return found


def least_bound(problem: Problem, workload: Workload, device: Device) -> solar.Bound:
    """The analyzer's bound; of `DRAWS` draws the least, where the values of inputs may steer.

    Raises:
        BoundError: the analyzer has none.
    """
    draws = DRAWS if _may_steer(problem, workload) else 1
    bounds = [solar.analyze(problem, workload, device, seed=seed) for seed in range(draws)]
    return min(bounds, key=lambda bound: bound.t_sol_ms)


def _may_steer(problem: Problem, workload: Workload) -> bool:
    """Whether there are generated inputs, or tensors of integers or truth values."""
    return any(isinstance(spec, CustomInput) for spec in workload.inputs.values()) or any(
        not spec.is_scalar and not spec.dtype.startswith(("float", "bfloat"))
        for spec in problem.definition.inputs.values()
    )


def _rows_of(problem: Problem, device: Device) -> list[PublishedRow]:
    rows = [published_row(problem, w) for w in problem.workloads]
    known = [row for row in rows if row is not None]
    if not device.key.startswith("b200") or len(known) < len(rows):
        raise ProblemError(
            f"there are no published bounds for {problem.id} ({problem.profile} workloads) on "
            f"{device.key}; the set 'published' needs a B200 and the full workloads of a problem "
            "of the library; use 'solar'"
        )
    return known


def published_row(problem: Problem, workload: Workload) -> PublishedRow | None:
    """The published figures of a workload, found by its uuid, so that subsets find theirs."""
    if problem.profile != "full":
        return None
    return _published(problem.id).get(workload.uuid)


@lru_cache(maxsize=512)
def _published(problem_id: str) -> dict[str, PublishedRow]:
    from ..problems import load

    rows = baselines.published(problem_id)
    if rows is None:
        return {}
    workloads = load(problem_id).workloads
    return {w.uuid: row for w, row in zip(workloads, rows, strict=True)}
