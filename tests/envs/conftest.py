"""Evaluation records, as the judge would write them, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sol_gym.evaluation import (
    Correctness,
    Evaluation,
    Mismatch,
    Provenance,
    Status,
    Timing,
    WorkloadResult,
)
from sol_gym.score import overall_status, problem_score, score_workload


def workload_result(
    index: int, *, t_k_ms: float = 0.3, mode: str = "graph", marks: tuple[str, ...] = ()
) -> WorkloadResult:
    """A scored workload that passed, with T_SOL 0.1 ms and T_b 0.5 ms."""
    timing = Timing(
        t_k_ms=t_k_ms,
        batch_ms=t_k_ms,
        reported_ms=t_k_ms,
        mode=mode,
        n_sets=32,
        repeats=5,
        spread=0.01,
        overhead_ms=0.2,
        marks=list(marks),
    )
    return score_workload(
        WorkloadResult(
            uuid=f"uuid-{index}",
            axes={"batch_size": 2**index if index < 20 else index, "seq_len": 128},
            status=Status.PASSED,
            correctness=Correctness(rounds=3, max_absolute_error=1e-4, max_relative_error=1e-3),
            timing=timing,
            t_sol_ms=0.1,
            t_b_ms=0.5,
            bound_by="memory",
        )
    )


def failed_result(index: int, status: Status, message: str = "") -> WorkloadResult:
    """A workload that did not pass."""
    correctness = None
    if status is Status.INCORRECT_NUMERICAL:
        correctness = Correctness(
            rounds=1,
            max_absolute_error=2.5,
            max_relative_error=0.75,
            matched_ratio=0.5,
            has_nan=True,
            mismatch=Mismatch(
                output="output",
                index=(0, 3, 17),
                got=1.25,
                expected=1.5,
                mismatched=512,
                total=1024,
            ),
        )
    return WorkloadResult(
        uuid=f"uuid-{index}",
        axes={"batch_size": 2**index, "seq_len": 128},
        status=status,
        message=message,
        correctness=correctness,
        score=0.0,
    )


@pytest.fixture(scope="session")
def cpu_judge() -> Iterator[None]:
    """Keeps the CPU's judge running between tests; environments join it rather than start one."""
    from sol_gym.evaluate import Evaluator

    with Evaluator("cpu") as evaluator:
        evaluator.describe()
        yield


@pytest.fixture
def evaluation_of() -> Callable[..., Evaluation]:
    """Builds an Evaluation from workload results, its status and score by sol_gym's own rules."""

    def build(results: list[WorkloadResult], **changes: Any) -> Evaluation:
        fields: dict[str, Any] = {
            "problem": "L1/069_rms_norm",
            "solution": "solution",
            "status": overall_status(results),
            "score": problem_score(results),
            "results": results,
            "provenance": Provenance(
                device=changes.pop("device", "h200"),
                device_name="NVIDIA H200",
                profile="full",
                inputs_profile="compatible",
                problem_hash="0" * 16,
                solution_hash="1" * 16,
                date="2026-01-01T00:00:00+00:00",
            ),
        }
        return Evaluation(**fields | changes)

    return build


@pytest.fixture
def passed_result() -> Callable[..., WorkloadResult]:
    """`workload_result`, for tests that build their own lists."""
    return workload_result


@pytest.fixture
def failed() -> Callable[..., WorkloadResult]:
    """`failed_result`, for tests that build their own lists."""
    return failed_result
