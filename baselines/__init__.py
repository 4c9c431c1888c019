"""Scoring baselines T_b, per device and workload: numbers with what produced them.

Two sources, never mixed:

* `published`: the T_SOL and T_b published for one B200 at 1,500 MHz
  (``b200/published.json``, provenance inside);
* measured rows, one JSON object a line in ``<device>/*.jsonl``, produced by sol_gym's own
  optimizer on that device. Each is a `Baseline`; files are append-only and a later row replaces
  an earlier one for the same content.

A time measured on one device is never scored against another device's figures, and a row counts
only for the content it was measured on (`Problem.workload_hash`).
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from sol_gym.errors import ProblemError
from sol_gym.problem import parse, read_json, read_json_lines

__all__ = [
    "Baseline",
    "PublishedRow",
    "load_table",
    "lookup",
    "published",
    "published_provenance",
]

_ROOT = Path(__file__).resolve().parent


class PublishedRow(NamedTuple):
    """Published figures of one workload, in milliseconds, for one B200 locked at 1,500 MHz."""

    t_sol_ms: float
    """Bound of the published analyzer, rounded to 0.0001 ms."""
    t_b_ms: float
    """Published scoring baseline."""


class Baseline(BaseModel):
    """A measured T_b for one workload on one device, with what produced it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    problem: str
    """Problem id, `SUBSET/name`."""
    workload: str
    """The workload's uuid."""
    workload_hash: str
    """`Problem.workload_hash` of what it was measured on."""
    device: str
    """Key of the device model, e.g. `h200`."""
    sm_clock_mhz: int | None = Field(default=None, gt=0)
    """SM clock seen while measuring; None where the device does not tell (a CPU)."""
    clock_locked: bool = False
    versions: dict[str, str] = {}
    """Software stack, e.g. {"torch": "2.11.0", "triton": "3.6.0", "driver": "580.95"}."""
    solution_hash: str
    """`Solution.content_hash` of the kernel behind the number."""
    agent: str
    """Which agent produced the kernel, e.g. `compile`."""
    round: int = Field(ge=0)
    """Optimizer round in which it won; 0 for a kernel that needed no search."""
    t_b_ms: float = Field(gt=0, allow_inf_nan=False)
    """Median time per call in milliseconds."""
    spread: float = Field(ge=0, allow_inf_nan=False)
    """(max - min) / median over the repeats."""
    date: AwareDatetime
    """When it was measured, ISO 8601 with a time zone."""


def published(problem_id: str) -> list[PublishedRow] | None:
    """Published T_SOL and T_b of a problem's workloads, in workload order; None if it has none.

    `problem_id` is a full id of the library, e.g. `L1/069_rms_norm`. The figures belong to the
    full workloads, never to a smoke profile.
    """
    rows = _published_file()["problems"].get(problem_id)
    return None if rows is None else [PublishedRow(*row) for row in rows]


def published_provenance() -> dict[str, Any]:
    """What the published figures are: data set, revision, hardware, clock and rounding."""
    return dict(_published_file()["provenance"])


def load_table(device: str, *, root: str | Path | None = None) -> list[Baseline]:
    """All measured rows of a device, in file and line order; empty if there are none.

    Args:
        device: key of the device model, e.g. `h200`.
        root: folder that holds one folder a device; the library's own by default.

    Raises:
        ProblemError: a malformed row (naming file, line and field), a row of another device, or a
            device key that is not a plain name.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", device):
        raise ProblemError(f"device key {device!r} is not a plain name; expected e.g. 'h200'")
    files = sorted((Path(root or _ROOT) / device).glob("*.jsonl"))
    stamps = tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    return list(_rows(device, stamps))


def lookup(device: str, *, root: str | Path | None = None) -> dict[str, Baseline]:
    """Measured baselines of a device: `Problem.workload_hash` -> the latest row.

    Arguments and errors as `load_table`.
    """
    return {row.workload_hash: row for row in load_table(device, root=root)}


@cache
def _published_file() -> dict[str, Any]:
    return read_json(_ROOT / "b200" / "published.json")


@lru_cache(maxsize=32)
def _rows(device: str, stamps: tuple[tuple[Path, int, int], ...]) -> tuple[Baseline, ...]:
    """Rows of the files in `stamps`; modification times and sizes make a changed file a new key."""
    rows = []
    for file, _, _ in stamps:
        for where, record in read_json_lines(file):
            row = parse(Baseline, record, where)
            if row.device != device:
                raise ProblemError(
                    f"{where}: field device is {row.device!r}, but the folder holds {device!r}; "
                    "move the row to its own device's folder"
                )
            rows.append(row)
    return tuple(rows)
