"""The problem library: one folder a problem, `<SUBSET>/<number>_<name>`.

Subsets: `L1` (single operations), `L2` (blocks and layers), `Quant` (FP8 and NVFP4), `FIB`
(serving kernels). See README.md beside this file for what a folder holds and how to add one.

Example:
    >>> from sol_gym.problems import list_ids, load
    >>> problem = load("L1/069_rms_norm")
    >>> len(problem.workloads)
    16
    >>> load("L1/069", profile="smoke").profile
    'smoke'
"""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path

from sol_gym.errors import ProblemError
from sol_gym.problem import Problem, ProfileName, load_problem, read_json

__all__ = [
    "SUBSETS",
    "folder",
    "list_ids",
    "load",
    "needed_bytes",
    "reference_peak_bytes",
    "resolve",
]

SUBSETS = ("L1", "L2", "Quant", "FIB")
"""Names of the subsets, in the order in which ids are listed."""

_ROOT = Path(__file__).resolve().parent


def list_ids(subset: str | None = None) -> list[str]:
    """Ids of all problems, or of one subset's, in library order.

    Raises:
        ProblemError: there is no such subset.
    """
    if subset is None:
        return list(_index())
    if subset not in SUBSETS:
        raise ProblemError(f"there is no subset {subset!r}; subsets: {', '.join(SUBSETS)}")
    return [problem_id for problem_id in _index() if problem_id.startswith(f"{subset}/")]


def resolve(problem_id: str) -> str:
    """The full id for an id or for a prefix that only one id has, such as `L1/069`.

    Raises:
        ProblemError: no problem or several match; the message names the nearest ids.
    """
    index = _index()
    if problem_id in index:
        return problem_id
    matches = [known for known in index if problem_id and known.startswith(problem_id)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ProblemError(
            f"{problem_id!r} is the beginning of {len(matches)} problem ids: {_some(matches)}; "
            "give one in full"
        )
    raise ProblemError(f"there is no problem {problem_id!r}; {_suggest(problem_id, index)}")


def folder(problem_id: str) -> Path:
    """Folder of a problem, given its id or a unique prefix of it.

    Raises:
        ProblemError: as `resolve`.
    """
    return _ROOT / resolve(problem_id)


def load(problem_id: str, profile: ProfileName = "full") -> Problem:
    """A problem of the library, with its full or its smoke workloads.

    Raises:
        ProblemError: unknown or ambiguous id, a malformed file (named with its field), an unknown
            profile, or a pack without a smoke profile.
    """
    if profile not in ("full", "smoke"):
        raise ProblemError(f"there is no workload profile {profile!r}; expected 'full' or 'smoke'")
    return _load(resolve(problem_id), profile)


def reference_peak_bytes(problem_id: str) -> list[int | None] | None:
    """What the reference's own tensors take at once, its outputs included, by workload.

    Estimated for the full workloads by ``tools/measure_memory.py`` and kept in ``memory.json``;
    None for a problem that was not measured, and in the list for a workload that cannot be.

    Raises:
        ProblemError: as `resolve`.
    """
    return _memory_file().get(resolve(problem_id))


def needed_bytes(problem_id: str) -> list[int]:
    """Device memory to check one candidate, by full workload.

    That is the inputs, the candidate's outputs, and the reference's tensors with its outputs
    (`reference_peak_bytes`; where that is not known, its outputs alone). Timing takes several sets
    of inputs, as many as fit, and so never asks for more.

    Raises:
        ProblemError: as `resolve`.
    """
    problem = load(problem_id)
    peaks = reference_peak_bytes(problem.id) or [None] * len(problem.workloads)
    needed = []
    for workload, peak in zip(problem.workloads, peaks, strict=True):
        if peak is None:
            peak = sum(t.nbytes for t in problem.outputs(workload).values())
        needed.append(problem.declared_bytes(workload) + peak)
    return needed


@cache
def _memory_file() -> dict[str, list[int | None]]:
    file = _ROOT / "memory.json"
    return read_json(file)["problems"] if file.is_file() else {}


@cache
def _index() -> dict[str, None]:
    """All ids in library order; a dict for its fast, ordered membership test."""
    return {
        f"{subset}/{file.parent.name}": None
        for subset in SUBSETS
        for file in sorted((_ROOT / subset).glob("*/definition.json"))
    }


@cache
def _load(problem_id: str, profile: ProfileName) -> Problem:
    if profile != "full":
        return _load(problem_id, "full").with_profile(profile)
    return load_problem(_ROOT / problem_id, problem_id=problem_id)


def _suggest(problem_id: str, index: dict[str, None]) -> str:
    lowered = {known.lower(): known for known in index}
    wanted = problem_id.lower()
    close = [lowered[m] for m in difflib.get_close_matches(wanted, lowered, n=3, cutoff=0.5)]
    # A name without its subset or number, e.g. "rms_norm", is a part of the id rather than near it.
    tail = wanted.split("/")[-1].lstrip("0123456789_")
    close += [
        known for low, known in lowered.items() if tail and tail in low and known not in close
    ]
    if close:
        return f"did you mean {' or '.join(close[:3])}?"
    return "sol_gym.problems.list_ids() lists all"


def _some(ids: list[str], most: int = 4) -> str:
    more = len(ids) - most
    return ", ".join(ids[:most]) + (f" and {more} more" if more > 0 else "")
