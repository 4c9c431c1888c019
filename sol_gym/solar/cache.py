"""Analyses kept on disk, by content.

The key is made of everything that an analysis depends on: the problem and workload
(`Problem.workload_hash`), the seed, the analyzer's own source files, torch's version and the rules
a user has accepted. One file holds one problem's workloads, a JSON object a line; lines are only
appended, so that several processes may share the folder. Whatever cannot be read or written is
done without.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..paths import cache_dir
from ..problem import Problem, Workload


@cache
def analyzer_version() -> str:
    """Digest of the analyzer's source and torch's version: another one may find another bound."""
    here = Path(__file__).resolve().parent
    digest = hashlib.sha256(torch.__version__.encode())
    for file in [*sorted(here.glob("*.py")), here.parent / "draws.py", here.parent / "inputs.py"]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


class AnalysisCache:
    """Reads and appends the records of one version of the analyzer.

    Args:
        folder: where the files are; `<cache>/bounds/<version>` by default.
        extra: what else the records depend on, such as the accepted rules.
    """

    def __init__(self, folder: Path | None = None, extra: str = "") -> None:
        version = hashlib.sha256(f"{analyzer_version()}{extra}".encode()).hexdigest()[:16]
        self._folder = folder or cache_dir() / "bounds" / version
        self._read: dict[str, dict[str, dict[str, Any]]] = {}

    def get(self, problem: Problem, workload: Workload, seed: int) -> dict[str, Any] | None:
        """The record of a workload; None if there is none."""
        return self._records(problem).get(_key(problem, workload, seed))

    def put(self, problem: Problem, workload: Workload, seed: int, record: dict[str, Any]) -> None:
        """Keep a record."""
        key = _key(problem, workload, seed)
        self._records(problem)[key] = record
        line = json.dumps({"key": key, **record}, separators=(",", ":")) + "\n"
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            # One write in append mode: whole lines, whoever else writes.
            file = os.open(self._file(problem), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(file, line.encode())
            finally:
                os.close(file)

    def _file(self, problem: Problem) -> Path:
        plain = "".join(c if c.isalnum() else "_" for c in problem.id)[:80]
        return self._folder / f"{plain}-{_definition_hash(problem)[:8]}.jsonl"

    def _records(self, problem: Problem) -> dict[str, dict[str, Any]]:
        file = self._file(problem)
        if file.name not in self._read:
            records = {}
            with contextlib.suppress(OSError):
                for line in file.read_text().splitlines():
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        record = json.loads(line)
                        records[record.pop("key")] = record
            self._read[file.name] = records
        return self._read[file.name]


def _key(problem: Problem, workload: Workload, seed: int) -> str:
    return f"{problem.workload_hash(workload)}:{seed}"


def _definition_hash(problem: Problem) -> str:
    text = problem.reference + repr(sorted(problem.definition.inputs))
    return hashlib.sha256(text.encode()).hexdigest()
