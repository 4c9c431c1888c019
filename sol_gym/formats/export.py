"""Exporting: problems in the public layout (`export_problem`), evaluations as public traces.

A trace is the public record of one solution on one workload. It has less to say than an
`Evaluation`: one latency beside one of the reference, and nine outcomes. What it cannot say stands
in a field of our own, `sol_gym`, which other readers pass over and `from_traces` reads back, so
that nothing is lost.

What has no counterpart is not exported: a workload whose machine failed (INFRA_ERROR), one faster
than its bound (BELOW_SOL, a fault of measurement or bound), and a right but untimed one, since a
passed trace states a latency.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import ProblemError
from ..evaluation import Evaluation, Provenance, Status, WorkloadResult
from ..problem import Problem, Workload, explain, export_problem, read_json_lines

__all__ = ["export_problem", "from_traces", "read_traces", "to_traces", "write_traces"]

_UNKNOWN_TO_THE_SCHEMA = (Status.INFRA_ERROR, Status.BELOW_SOL)
_WITH_CORRECTNESS = (Status.PASSED, Status.INCORRECT_NUMERICAL)


def to_traces(evaluation: Evaluation, problem: Problem) -> list[dict[str, Any]]:
    """An evaluation as records of the public Trace schema (SOL-ExecBench and FlashInfer-Trace).

    `latency_ms` is T_k and `reference_latency_ms` is T_b, so that `speedup_factor` is the gain over
    the scoring baseline; both latter are 0 where no baseline was measured. A solution that failed
    as a whole gives one trace for each workload of `problem`.

    Args:
        evaluation: what came of the solution.
        problem: the problem it was judged on, with the same workloads.

    Returns:
        One record for each workload that the schema can state; the module says which it cannot.

    Raises:
        ProblemError: the evaluation is of another problem or of other workloads.
    """
    if evaluation.provenance.problem_hash != problem.content_hash:
        raise ProblemError(
            f"the evaluation is of {evaluation.problem} ({evaluation.provenance.problem_hash}), not "
            f"of {problem.id} ({problem.content_hash}); give the problem with the same workloads"
        )
    workloads = {w.uuid: w for w in problem.workloads}
    results = evaluation.results
    if not results and evaluation.status not in _UNKNOWN_TO_THE_SCHEMA:
        results = [
            WorkloadResult(
                uuid=w.uuid, axes=w.axes, status=evaluation.status, message=evaluation.message
            )
            for w in problem.workloads
        ]
    whole = evaluation.model_dump(mode="json", exclude={"results", "provenance", "log"})
    return [
        _trace(result, workloads[result.uuid], evaluation, problem, whole)
        for result in results
        if result.status not in _UNKNOWN_TO_THE_SCHEMA
        and (result.status is not Status.PASSED or result.timing is not None)
    ]


def _trace(
    result: WorkloadResult,
    workload: Workload,
    evaluation: Evaluation,
    problem: Problem,
    whole: dict[str, Any],
) -> dict[str, Any]:
    provenance = evaluation.provenance
    correctness = performance = None
    if result.status in _WITH_CORRECTNESS:
        c = result.correctness
        correctness = {
            "max_relative_error": c.max_relative_error if c else 0.0,
            "max_absolute_error": c.max_absolute_error if c else 0.0,
            "has_nan": c.has_nan if c else False,
            "has_inf": (c.has_inf and not c.has_nan) if c else False,
        }
    if result.status is Status.PASSED and result.t_k_ms is not None:
        performance = {
            "latency_ms": result.t_k_ms,
            "reference_latency_ms": result.t_b_ms or 0.0,
            "speedup_factor": (result.t_b_ms or 0.0) / result.t_k_ms,
        }
    record = {
        "definition": problem.definition.name,
        "workload": workload.model_dump(mode="json", exclude_none=True),
        "solution": evaluation.solution,
        "evaluation": {
            "status": result.status.value,
            "environment": {
                "hardware": provenance.device_name or provenance.device,
                "libs": provenance.versions,
            },
            "timestamp": provenance.date,
            "log": "\n".join(text for text in (result.message, evaluation.log) if text),
            "correctness": correctness,
            "performance": performance,
        },
        "sol_gym": {
            "result": result.model_dump(mode="json"),
            "evaluation": whole,
            "log": evaluation.log,
            "provenance": provenance.model_dump(mode="json"),
        },
    }
    return _finite(record)


def from_traces(records: Iterable[dict[str, Any]]) -> Evaluation:
    """The evaluation that `to_traces` wrote, without the workloads that it left out.

    Raises:
        ProblemError: the records are not ours, or of more than one evaluation.
    """
    ours = [record.get("sol_gym") for record in records]
    if not ours or not all(isinstance(o, dict) for o in ours):
        raise ProblemError(
            "expected traces written by sol_gym (field 'sol_gym'); traces of other tools say less "
            "than an evaluation"
        )
    first = ours[0]
    assert isinstance(first, dict)
    heads = {json.dumps([o["evaluation"], o["provenance"]], sort_keys=True) for o in ours if o}
    if len(heads) > 1:
        raise ProblemError(f"these are traces of {len(heads)} evaluations; give one's")
    try:
        return Evaluation(
            **first["evaluation"],
            log=first["log"],
            results=[WorkloadResult.model_validate(o["result"]) for o in ours if o],
            provenance=Provenance.model_validate(first["provenance"]),
        )
    except ValidationError as error:
        raise ProblemError(f"traces: {explain(error)}") from None


def write_traces(evaluation: Evaluation, problem: Problem, file: str | Path) -> int:
    """Append an evaluation's traces to a JSONL file; returns how many.

    Raises:
        ProblemError: as `to_traces`, or the file cannot be written.
    """
    lines = [json.dumps(trace) + "\n" for trace in to_traces(evaluation, problem)]
    try:
        with open(file, "a") as out:
            out.writelines(lines)
    except OSError as error:
        raise ProblemError(f"{file}: cannot be written: {error.strerror}") from None
    return len(lines)


def read_traces(file: str | Path) -> list[dict[str, Any]]:
    """Records of a JSONL file of traces.

    Raises:
        ProblemError: it cannot be read, or a line is not JSON or has no workload.
    """
    records = []
    try:
        for where, record in read_json_lines(Path(file)):
            if not isinstance(record, dict) or not isinstance(record.get("workload"), dict):
                raise ProblemError(f"{where}: expected a trace (an object with field 'workload')")
            records.append(record)
    except OSError as error:
        raise ProblemError(f"{file}: cannot be read: {error.strerror}") from None
    return records


def _finite(value: Any) -> Any:
    """NaN and infinities as text, which JSON has no numbers for."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value
