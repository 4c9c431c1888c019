"""T_b: where a workload's scoring baseline comes from.

On a B200 the published figures count (full workloads only). Everywhere else a baseline is one that
was measured on this very device: shipped with the library, measured here before and cached, or
measured on the spot as the fastest of the reference and torch.compile of it, through the same judge
that times candidates. A number of one device is never used on another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from .. import baselines
from ..baselines import Baseline
from ..device import Device
from ..evaluation import Status
from ..problem import Problem
from ..sandbox.judge import Judge
from ..sandbox.request import Request
from ..solution import Solution

_TIMEOUT_S = 300.0
_COMPILE = """

import torch._inductor.config as _inductor_config

_inductor_config.compile_threads = 1
run = torch.compile(run)
"""


@dataclass(frozen=True)
class BaselineTimes:
    """T_b of a problem's workloads, in order; None where there is none."""

    t_b_ms: list[float | None]
    source: str
    """`published`, `shipped`, or `measured`."""


def contenders(problem: Problem) -> dict[str, Solution]:
    """The cheapest optimizer: solutions whose fastest is the baseline, by agent name."""
    reference = Solution.from_text(problem.reference, name="reference", language="pytorch")
    compiled = Solution.from_text(
        problem.reference + _COMPILE, name="torch.compile", language="pytorch"
    )
    return {"reference": reference, "torch.compile": compiled}


class Baselines:
    """Looks baselines up and measures what is missing.

    Args:
        device: the judge's device.
        cache: folder for this machine's own measurements (one file a device).
    """

    def __init__(self, device: Device, cache: Path):
        self._device, self._root = device, cache / "baselines" / device.fingerprint

    def times(
        self, problem: Problem, judge: Judge, on_progress: Callable[[str, int, int], None]
    ) -> BaselineTimes:
        """T_b of every workload of `problem`, measuring if need be."""
        if self._device.key.startswith("b200") and problem.profile == "full":
            rows = self._published(problem)
            if rows:
                return BaselineTimes(rows, "published")
        keys = [problem.workload_hash(w) for w in problem.workloads]
        known = baselines.lookup(self._device.key)
        source = "shipped"
        if not all(key in known for key in keys):
            known = known | baselines.lookup(self._device.key, root=self._root)
            source = "measured"
        missing = [i for i, key in enumerate(keys) if key not in known]
        if missing:
            rows_measured = self._measure(problem.with_workloads(missing), judge, on_progress)
            self._append(rows_measured)
            known = known | {row.workload_hash: row for row in rows_measured}
        return BaselineTimes([known[key].t_b_ms if key in known else None for key in keys], source)

    def _published(self, problem: Problem) -> list[float | None]:
        """By position in the library's own list, so that a subset of workloads finds its rows."""
        rows = baselines.published(problem.id)
        if rows is None:
            return []
        from ..problems import load

        position = {w.uuid: i for i, w in enumerate(load(problem.id).workloads)}
        return [
            rows[position[w.uuid]].t_b_ms if w.uuid in position else None for w in problem.workloads
        ]

    def _measure(
        self, problem: Problem, judge: Judge, on_progress: Callable[[str, int, int], None]
    ) -> list[Baseline]:
        best: dict[str, Baseline] = {}
        candidates = contenders(problem)
        for done, (agent, solution) in enumerate(candidates.items()):
            on_progress(f"measuring the baseline ({agent})", done, len(candidates))
            outcome = judge.evaluate(Request(problem, solution, timeout_s=_TIMEOUT_S))
            for workload, result in zip(problem.workloads, outcome.results, strict=False):
                if result.status is not Status.PASSED or result.timing is None:
                    continue
                row = Baseline(
                    problem=problem.id,
                    workload=workload.uuid,
                    workload_hash=problem.workload_hash(workload),
                    device=self._device.key,
                    sm_clock_mhz=result.timing.sm_clock_mhz,
                    clock_locked=result.timing.clock_locked,
                    versions=judge.backend.versions(),
                    solution_hash=solution.content_hash,
                    agent=agent,
                    round=0,
                    t_b_ms=result.timing.t_k_ms,
                    spread=result.timing.spread,
                    date=datetime.now(UTC),
                )
                if row.workload_hash not in best or row.t_b_ms < best[row.workload_hash].t_b_ms:
                    best[row.workload_hash] = row
        return list(best.values())

    def _append(self, rows: list[Baseline]) -> None:
        folder = self._root / self._device.key
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(row.model_dump_json() + "\n" for row in rows)
        with open(folder / "measured.jsonl", "a") as file:
            file.write(text)
