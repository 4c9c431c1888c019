"""Feedback: an evaluation as a text an agent can act on.

What stopped the kernel comes first, grouped so that one mistake seen on many workloads is told
once; then what ran, as a table of T_k against T_b and T_SOL that keeps the slowest rows when there
are many; last what the solution printed.
"""

from __future__ import annotations

from collections.abc import Sequence

from sol_gym.evaluation import Correctness, Evaluation, Status, WorkloadResult

__all__ = ["workload_label", "write_feedback"]

_MESSAGE_CHARACTERS = 4000
_LOG_CHARACTERS = 1500
_MAX_FAILURE_GROUPS = 6
_MAX_LABELS = 4
_MAX_ROWS = 12
_NOTABLE_SPREAD = 0.1

_HEADER = ("workload", "T_k ms", "T_b ms", "T_SOL ms", "T_k/T_SOL", "score", "bound by", "remarks")

_MEANING: dict[Status, str] = {
    Status.PASSED: "Every workload passed.",
    Status.COMPILE_ERROR: "The source could not be loaded or built, so nothing ran.",
    Status.RUNTIME_ERROR: "The kernel failed while it ran.",
    Status.INCORRECT_SHAPE: "An output has the wrong shape, or the number of outputs is wrong.",
    Status.INCORRECT_DTYPE: "An output has the wrong dtype.",
    Status.INCORRECT_NUMERICAL: "Output values are out of tolerance.",
    Status.TIMEOUT: "The time limit was exceeded, so the kernel was stopped.",
    Status.REWARD_HACK: (
        "The evaluation was refused, because the solution did something other than compute its "
        "outputs from its inputs at each call."
    ),
    Status.BELOW_SOL: (
        "A time below the Speed-of-Light bound was measured. That is kept as evidence of a fault "
        "in a bound or a measurement and is never scored."
    ),
    Status.INVALID_REFERENCE: "The reference itself failed; this says nothing about the kernel.",
    Status.INFRA_ERROR: "The machine or the judge failed; this says nothing about the kernel.",
}


def workload_label(index: int, axes: dict[str, int]) -> str:
    """How prompt and feedback name a workload, e.g. ``#3 batch_size=4 seq_len=128``."""
    return " ".join([f"#{index}", *(f"{name}={value}" for name, value in axes.items())])


def write_feedback(evaluation: Evaluation, *, uuids: Sequence[str] = ()) -> str:
    """What came of a kernel, for whoever wrote it.

    Args:
        evaluation: the outcome.
        uuids: of the problem's workloads, in order, to number the results as the prompt does; by
            default results are numbered as they come.
    """
    index = {uuid: i for i, uuid in enumerate(uuids)}
    numbered = [(index.get(r.uuid, i), r) for i, r in enumerate(evaluation.results)]
    failed = [(i, r) for i, r in numbered if r.status is not Status.PASSED]
    timed = [(i, r) for i, r in numbered if r.t_k_ms is not None]
    total = max(len(uuids), len(numbered))
    passed = len(numbered) - len(failed)

    parts = [_headline(evaluation, passed, total)]
    if evaluation.message:
        parts.append(_tail(evaluation.message, _MESSAGE_CHARACTERS))
    if failed:
        parts.append(_failures(failed, total, evaluation.message))
    if 0 < len(numbered) < total:
        parts.append(f"{total - len(numbered)} of {total} workloads were not run.")
    if timed:
        parts.append(_times(timed, on_gpu=evaluation.provenance.device != "cpu"))
    if evaluation.log.strip():
        parts.append(f"Printed by the solution:\n{_tail(evaluation.log, _LOG_CHARACTERS)}")
    return "\n\n".join(parts)


def _headline(evaluation: Evaluation, passed: int, total: int) -> str:
    line = f"{evaluation.status}: {_MEANING[evaluation.status]}"
    if evaluation.passed and evaluation.score is not None:
        line += f" Score {evaluation.score:.4f}"
        if evaluation.speedup is not None:
            line += f", {evaluation.speedup:.3g} times as fast as the baseline (geometric mean)"
        return line + "."
    return line + (f" {passed} of {total} workloads passed." if evaluation.results else "")


def _failures(failed: list[tuple[int, WorkloadResult]], total: int, overall: str) -> str:
    groups: dict[str, list[str]] = {}
    for i, result in failed:
        groups.setdefault(_reason(result, overall), []).append(workload_label(i, result.axes))
    lines = [f"Failed on {len(failed)} of {total} workloads:"]
    for reason, labels in list(groups.items())[:_MAX_FAILURE_GROUPS]:
        shown = "; ".join(labels[:_MAX_LABELS])
        more = f" and {len(labels) - _MAX_LABELS} more" if len(labels) > _MAX_LABELS else ""
        lines.append(f"- {shown}{more}: {reason}")
    if len(groups) > _MAX_FAILURE_GROUPS:
        lines.append(f"- {len(groups) - _MAX_FAILURE_GROUPS} further kinds of failure")
    return "\n".join(lines)


def _reason(result: WorkloadResult, overall: str) -> str:
    """Why a workload failed. A message told in full above is not told again."""
    details = [str(result.status)]
    if result.message and result.message != overall:
        details.append(_tail(result.message, _MESSAGE_CHARACTERS // _MAX_FAILURE_GROUPS))
    if result.correctness is not None:
        details += _numbers(result.correctness, result.message)
    return "; ".join(details)


def _numbers(correctness: Correctness, message: str) -> list[str]:
    numbers = []
    mismatch = correctness.mismatch
    if mismatch is not None and str(mismatch) not in message:
        numbers.append(f"first mismatch: {mismatch}")
    if correctness.has_nan or correctness.has_inf:
        found = [n for n, is_there in (("NaN", correctness.has_nan), ("Inf", correctness.has_inf))]
        numbers.append(f"the outputs contain {' and '.join(found)}")
    if correctness.max_absolute_error:
        numbers.append(
            f"largest error {correctness.max_absolute_error:.3g} absolute, "
            f"{correctness.max_relative_error:.3g} relative"
        )
    return numbers


def _times(timed: list[tuple[int, WorkloadResult]], *, on_gpu: bool) -> str:
    shown = sorted(sorted(timed, key=_by_score)[:_MAX_ROWS], key=lambda item: item[0])
    rows = [_HEADER, *(_row(i, result, on_gpu) for i, result in shown)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["Times per call (T_k yours, T_b the baseline's, T_SOL the Speed-of-Light bound):"]
    lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if len(shown) < len(timed):
        lines.append(
            f"({len(timed)} workloads were timed; shown are the {len(shown)} of lowest score.)"
        )
    return "\n".join(lines)


def _row(index: int, result: WorkloadResult, on_gpu: bool) -> tuple[str, ...]:
    t_k, t_sol = result.t_k_ms, result.t_sol_ms
    return (
        workload_label(index, result.axes),
        _number(t_k),
        _number(result.t_b_ms),
        _number(t_sol),
        _number(t_k / t_sol if t_k and t_sol else None),
        _number(result.score),
        result.bound_by or "?",
        ", ".join(_remarks(result, on_gpu)),
    )


def _remarks(result: WorkloadResult, on_gpu: bool) -> list[str]:
    remarks = [] if result.status is Status.PASSED else [str(result.status)]
    if result.status is Status.PASSED and result.message:
        remarks.append(result.message)
    if result.timing is not None:
        if on_gpu and result.timing.mode.startswith("eager"):
            remarks.append("not captured in a CUDA graph, launch gaps count")
        if result.timing.spread > _NOTABLE_SPREAD:
            remarks.append(f"spread {100 * result.timing.spread:.0f} %")
        remarks += result.timing.marks
    return remarks


def _by_score(item: tuple[int, WorkloadResult]) -> float:
    """Furthest from the bound first; a workload without a score is the first to be looked at."""
    score = item[1].score
    return -1.0 if score is None else score


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"


def _tail(text: str, characters: int) -> str:
    """The end of `text`, from a line's beginning where it was cut: causes stand last."""
    text = text.strip()
    if len(text) <= characters:
        return text
    end = text[-characters:]
    return "[...]\n" + (end.partition("\n")[2] or end)
