"""The SOL Score and its aggregation: pure functions, no torch.

The score says how much of the gap between the baseline T_b and the Speed-of-Light bound T_SOL a
kernel closes: 0.5 at the baseline, 1 at the bound (SOL-ExecBench, arXiv 2603.19173).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .evaluation import Evaluation, Status, WorkloadResult


def sol_score(t_k_ms: float, t_b_ms: float, t_sol_ms: float) -> float:
    """S = (T_b - T_SOL) / ((T_k - T_SOL) + (T_b - T_SOL)), for T_b > T_SOL and T_k >= T_SOL.

    Raises:
        ValueError: a time is not positive and finite, T_b <= T_SOL (unscorable workload), or
            T_k < T_SOL (the bound or the measurement is at fault).
    """
    for name, value in (("T_k", t_k_ms), ("T_b", t_b_ms), ("T_SOL", t_sol_ms)):
        if not (0 < value < float("inf")):
            raise ValueError(f"{name} is {value} ms, expected a positive, finite time")
    if t_b_ms <= t_sol_ms:
        raise ValueError(
            f"T_b {t_b_ms} ms is not above T_SOL {t_sol_ms} ms: the workload cannot be scored"
        )
    if t_k_ms < t_sol_ms:
        raise ValueError(
            f"T_k {t_k_ms} ms is below T_SOL {t_sol_ms} ms: a bound or a measurement is at fault"
        )
    gap = t_b_ms - t_sol_ms
    return gap / ((t_k_ms - t_sol_ms) + gap)


def score_workload(result: WorkloadResult) -> WorkloadResult:
    """`result` with its score, or with BELOW_SOL or a remark where there can be none."""
    if result.status is not Status.PASSED:
        return result.model_copy(
            update={"score": 0.0 if result.status is not Status.INFRA_ERROR else None}
        )
    t_k, t_b, t_sol = result.t_k_ms, result.t_b_ms, result.t_sol_ms
    if t_k is None or t_b is None or t_sol is None:
        missing = [n for n, v in (("T_k", t_k), ("T_b", t_b), ("T_SOL", t_sol)) if v is None]
        return result.model_copy(
            update={
                "score": None,
                "message": _add(result.message, f"no score: {', '.join(missing)} unknown"),
            }
        )
    if t_k < t_sol:
        return result.model_copy(
            update={
                "status": Status.BELOW_SOL,
                "score": 0.0,
                "message": _add(
                    result.message,
                    f"T_k {t_k:.6g} ms is below T_SOL {t_sol:.6g} ms: a bound or a measurement is at fault",
                ),
            }
        )
    if t_b <= t_sol:
        return result.model_copy(
            update={
                "score": None,
                "message": _add(
                    result.message,
                    f"unscorable: T_b {t_b:.6g} ms is not above T_SOL {t_sol:.6g} ms",
                ),
            }
        )
    return result.model_copy(update={"score": sol_score(t_k, t_b, t_sol)})


def problem_score(results: Sequence[WorkloadResult]) -> float | None:
    """Mean score over workloads: 0 unless every workload passed, None if nothing is scorable.

    Unscorable workloads (T_b <= T_SOL) are left out of the mean; an infrastructure fault anywhere
    makes the whole score unknown.
    """
    if not results or any(r.status is Status.INFRA_ERROR for r in results):
        return None
    if any(r.status is not Status.PASSED for r in results):
        return 0.0
    scores = [r.score for r in results if r.score is not None]
    return statistics.fmean(scores) if scores else None


def overall_status(results: Iterable[WorkloadResult]) -> Status:
    """The status of a problem: PASSED if all workloads passed, else the gravest of theirs."""
    found = {r.status for r in results}
    for status in _GRAVEST_FIRST:
        if status in found:
            return status
    return Status.PASSED


_GRAVEST_FIRST = [
    Status.INFRA_ERROR,
    Status.INVALID_REFERENCE,
    Status.REWARD_HACK,
    Status.COMPILE_ERROR,
    Status.TIMEOUT,
    Status.RUNTIME_ERROR,
    Status.INCORRECT_SHAPE,
    Status.INCORRECT_DTYPE,
    Status.INCORRECT_NUMERICAL,
    Status.BELOW_SOL,
]


@dataclass(frozen=True)
class SuiteScore:
    """Aggregate over problems. Failures count as 0; unknown scores are left out and counted."""

    mean: float | None
    coverage: float
    """Share of the expected problems that have a known score."""
    category_medians: dict[str, float] = field(default_factory=dict)
    worst: list[tuple[str, float]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def suite_score(
    evaluations: Iterable[Evaluation],
    *,
    expected: Sequence[str] | None = None,
    categories: Mapping[str, str] | None = None,
    worst: int = 5,
) -> SuiteScore:
    """Mean over problems, beside category medians, the worst problems and coverage.

    Args:
        evaluations: one per problem; the last one given for a problem counts.
        expected: all problem ids of the suite; those without an evaluation count as unknown.
        categories: problem id -> category; by default the part before the slash.
        worst: how many of the lowest scores to list.
    """
    scores: dict[str, float | None] = {name: None for name in expected or ()}
    for evaluation in evaluations:
        scores[evaluation.problem] = evaluation.score
    known = {k: v for k, v in scores.items() if v is not None}
    groups: dict[str, list[float]] = {}
    for name, value in known.items():
        category = (categories or {}).get(name, name.split("/")[0])
        groups.setdefault(category, []).append(value)
    return SuiteScore(
        mean=statistics.fmean(known.values()) if known else None,
        coverage=len(known) / len(scores) if scores else 0.0,
        category_medians={k: statistics.median(v) for k, v in sorted(groups.items())},
        worst=sorted(known.items(), key=lambda item: item[1])[:worst],
        unknown=sorted(k for k, v in scores.items() if v is None),
    )


def _add(message: str, more: str) -> str:
    return f"{message}; {more}" if message else more
