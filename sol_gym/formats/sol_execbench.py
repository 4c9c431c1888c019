"""The public SOL-ExecBench data set: folders (definition.json, workload.jsonl) and parquet files.

A parquet row is a problem. Its columns `axes`, `inputs`, `outputs` and `workloads` hold JSON text;
`name`, `reference`, `description`, `custom_inputs_entrypoint` and `hf_id` are plain. Nothing of it
is executed here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import ProblemError, SolutionError
from ..problem import (
    Definition,
    Pack,
    Problem,
    Workload,
    explain,
    iter_problem_folders,
    load_problem,
    parse,
)
from ..solution import load_solution
from .imported import Imported, ImportFailure, Wanted, every

FORMAT = "sol-execbench"
_JSON_COLUMNS = ("axes", "inputs", "outputs", "workloads")
_PLAIN_COLUMNS = ("name", "reference")
_OPTIONAL_COLUMNS = (
    "op_type", "description", "constraints", "custom_inputs_entrypoint", "hf_id"
)  # fmt: skip


def read(path: Path, wanted: Wanted = every) -> Iterator[Imported | ImportFailure]:
    """The problems of a folder, a tree of folders, a parquet file or a tree of parquet files.

    Args:
        path: the folder or file.
        wanted: whether a problem is to be read, by its name.

    Raises:
        ProblemError: there is neither; or there are parquet files and pyarrow is not installed.
    """
    if path.is_file() and path.name == "definition.json":
        path = path.parent
    folders = [] if path.is_file() else list(iter_problem_folders(path))
    tables = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
    if not folders and not tables:
        raise ProblemError(
            f"{path}: no problems; expected folders with definition.json and workload.jsonl, "
            "or parquet files of the data set"
        )
    for folder in folders:
        if wanted(folder.name):
            yield _attempt(folder.name, lambda folder=folder: _from_folder(folder))  # type: ignore[misc]
    for table in tables:
        for index, row in enumerate(_rows(table)):
            name = str(row.get("name") or f"row {index}")
            if wanted(name):
                where = f"{table}, row {index}"
                yield _attempt(name, lambda row=row, where=where: from_row(row, where))  # type: ignore[misc]


def _attempt(name: str, make: Any) -> Imported | ImportFailure:
    try:
        return make()
    except ProblemError as error:
        return ImportFailure(name, str(error))


def _from_folder(folder: Path) -> Imported:
    problem = load_problem(folder)
    digest = hashlib.sha256((folder / "definition.json").read_bytes()).hexdigest()
    imported = Imported(_named(problem, folder.name, digest))
    for file in sorted(folder.glob("solution*.json")):
        try:
            imported.solutions.append(load_solution(file))
        except SolutionError as error:
            imported.remarks.append(f"solution not taken over: {error}")
    return imported


def from_row(row: dict[str, Any], where: str) -> Imported:
    """The problem of one row of the data set.

    Raises:
        ProblemError: a column is missing or not what it should be; begins with `where`.
    """
    missing = [c for c in (*_PLAIN_COLUMNS, *_JSON_COLUMNS) if not row.get(c)]
    if missing:
        raise ProblemError(
            f"{where}: column {', '.join(missing)} missing or empty; it has {sorted(row)}"
        )
    data: dict[str, Any] = {c: _parsed(row[c], f"{where}, column {c}") for c in _JSON_COLUMNS}
    data |= {c: row[c] for c in _PLAIN_COLUMNS}
    for column in _OPTIONAL_COLUMNS:
        if row.get(column) is not None:
            data[column] = row[column]
    if isinstance(data.get("constraints"), str):
        data["constraints"] = _parsed(data["constraints"], f"{where}, column constraints")
    records = data.pop("workloads")
    if not isinstance(records, list):
        raise ProblemError(f"{where}, column workloads: expected a list of workloads")
    definition = parse(Definition, data, where)
    workloads = [parse(Workload, r, f"{where}, workload {i}") for i, r in enumerate(records)]
    try:
        problem = Problem(
            id=definition.name, definition=definition, workloads=tuple(workloads)
        )  # fmt: skip
    except ValidationError as error:
        raise ProblemError(f"{where}: {explain(error)}") from None
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    return Imported(_named(problem, where.rpartition("/")[2], digest))


def _named(problem: Problem, source: str, digest: str) -> Problem:
    """The problem under an id of its own: one of the library's would claim the library's bounds."""
    definition = problem.definition
    problem_id = f"{FORMAT}/{definition.name}"
    title = definition.description or definition.name
    pack = problem.pack or Pack(id=problem_id, title=title.strip().splitlines()[0])
    origin = {"format": FORMAT, "source": source, "sha256": digest}
    pack = pack.model_copy(update={"id": problem_id, "imported_from": origin})
    return problem.model_copy(update={"id": problem_id, "pack": pack})


def _parsed(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value  # Written as nested columns rather than as JSON text.
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ProblemError(f"{where}: not valid JSON: {error}") from None


def _rows(file: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ProblemError(
            f"{file}: reading parquet needs pyarrow, which is not installed; "
            "run pip install pyarrow, or use the folder form of the data set"
        ) from None
    try:
        return pyarrow.parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ProblemError(f"{file}: cannot be read as parquet: {error}") from None
