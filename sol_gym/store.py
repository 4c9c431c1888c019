"""Results: an append-only JSONL file is the truth, a SQLite index beside it is rebuilt from it.

Appending takes a lock and writes whole lines, so that several processes may share a store. The
index only answers questions; it can be deleted at any time.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from .errors import SolGymError
from .evaluation import Evaluation, Status
from .problem import explain

_COLUMNS = "problem TEXT, solution TEXT, solution_hash TEXT, device TEXT, profile TEXT, status TEXT, score REAL, date TEXT, line INTEGER"


class StoreError(SolGymError):
    """A results file holds something that is not an evaluation."""


class Store:
    """Evaluations in a JSONL file.

    Args:
        path: the file; made on first append.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._index = self.path.with_suffix(self.path.suffix + ".sqlite")

    def append(self, evaluation: Evaluation) -> None:
        """Add an evaluation at the end."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(evaluation.to_json(), separators=(",", ":")) + "\n"
        with open(self.path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0, os.SEEK_END)
            if file.tell():  # A writer that was killed may have left half a line.
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def __iter__(self) -> Iterator[Evaluation]:
        """All evaluations in order; half-written lines are passed over.

        Raises:
            StoreError: a complete line is not an evaluation (naming file, line and field).
        """
        for _, evaluation in self._numbered():
            yield evaluation

    def _numbered(self) -> Iterator[tuple[int, Evaluation]]:
        if not self.path.exists():
            return
        with open(self.path) as file:
            for number, line in enumerate(file, 1):
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue
                try:
                    yield number, Evaluation.model_validate(record)
                except ValidationError as error:
                    raise StoreError(f"{self.path}:{number}: {explain(error)}") from None

    def index(self) -> sqlite3.Connection:
        """A connection to the index, rebuilt if the file has changed. Table `evaluations`."""
        stamp = (
            (self.path.stat().st_mtime_ns, self.path.stat().st_size)
            if self.path.exists()
            else (0, 0)
        )
        connection = sqlite3.connect(self._index)
        connection.execute("CREATE TABLE IF NOT EXISTS built (mtime INTEGER, size INTEGER)")
        if connection.execute("SELECT mtime, size FROM built").fetchone() != stamp:
            with connection:
                connection.execute("DELETE FROM built")
                connection.execute("DROP TABLE IF EXISTS evaluations")
                connection.execute(f"CREATE TABLE evaluations ({_COLUMNS})")
                connection.executemany(
                    "INSERT INTO evaluations VALUES (?,?,?,?,?,?,?,?,?)",
                    (
                        (e.problem, e.solution, e.provenance.solution_hash, e.provenance.device, e.provenance.profile,
                         e.status.value, e.score, e.provenance.date, number)
                        for number, e in self._numbered()
                    ),
                )  # fmt: skip
                connection.execute("INSERT INTO built VALUES (?, ?)", stamp)
        return connection

    def best(self, problem: str, *, device: str, profile: str = "full") -> Evaluation | None:
        """The passed evaluation with the highest score of a problem on a device."""
        connection = self.index()
        try:
            row = connection.execute(
                "SELECT line FROM evaluations WHERE problem=? AND device=? AND profile=? AND status=? AND score IS NOT NULL "
                "ORDER BY score DESC LIMIT 1",
                (problem, device, profile, Status.PASSED.value),
            ).fetchone()
        finally:
            connection.close()
        return next((e for n, e in self._numbered() if n == row[0]), None) if row else None
