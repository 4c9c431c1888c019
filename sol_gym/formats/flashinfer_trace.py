"""FlashInfer-Trace: definitions, workloads, solutions and traces of serving kernels.

A data set is a folder::

    definitions/<op_type>/<name>.json          axes, inputs, outputs, reference
    workloads/<op_type>/<name>.jsonl           one trace a line, with definition and workload alone
    solutions/.../<solution>.json              kernels
    traces/.../<name>.jsonl                    results: workload, solution and evaluation
    blob/workloads/<op_type>/<name>/*.safetensors   recorded inputs

Lines are told apart by what they hold, not by where they stand, so that older layouts are read
too. Nothing of it is executed here. Tolerances are not part of the format: the defaults apply.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import ProblemError
from ..problem import (
    Definition,
    Pack,
    Problem,
    Workload,
    explain,
    parse,
    read_json,
    read_json_lines,
)
from ..solution import Solution
from .imported import Imported, ImportFailure, Wanted, every

FORMAT = "flashinfer-trace"
_LANGUAGES = {"python": "pytorch", "triton": "triton", "cuda": "cuda_cpp", "cpp": "cpp"}


@dataclass
class _Index:
    """Everything of a data set besides its definitions, by the definition's name."""

    workloads: dict[str, list[tuple[str, dict[str, Any]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    traces: dict[str, list[tuple[str, dict[str, Any]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    solutions: dict[str, list[tuple[str, dict[str, Any]]]] = field(
        default_factory=lambda: defaultdict(list)
    )


def find_root(path: Path) -> Path | None:
    """The data set's folder: `path`, or the nearest above it that has `definitions/`."""
    for folder in (path, *path.absolute().parents):
        if (folder / "definitions").is_dir():
            return folder
    return None


def read(path: Path, wanted: Wanted = every) -> Iterator[Imported | ImportFailure]:
    """The problems of a data set, or of one definition in it.

    Args:
        path: the data set's folder, a folder in its `definitions`, or one definition's file.
        wanted: whether a definition is to be read, by its name.

    Raises:
        ProblemError: there is no data set, or it has no definitions.
    """
    root = find_root(path)
    if root is None:
        raise ProblemError(
            f"{path}: neither it nor a folder above it has 'definitions/'; expected a "
            "flashinfer-trace data set (definitions/, workloads/, solutions/, traces/)"
        )
    start = path if path.absolute() != root.absolute() else root / "definitions"
    files = [start] if start.is_file() else sorted(start.rglob("*.json"))
    if not files:
        raise ProblemError(f"{start}: no definitions (*.json)")
    chosen = [file for file in files if wanted(file.stem)]
    index = _index(root) if chosen else _Index()
    for file in chosen:
        try:
            yield _imported(file, root, index)
        except ProblemError as error:
            yield ImportFailure(file.stem, str(error))


def _index(root: Path) -> _Index:
    index = _Index()
    for folder in ("workloads", "traces"):
        for file in sorted((root / folder).rglob("*.jsonl")):
            for where, record in read_json_lines(file):
                if not isinstance(record, dict) or not isinstance(record.get("workload"), dict):
                    raise ProblemError(f"{where}: expected an object with a field 'workload'")
                name = str(record.get("definition", file.name.split(".")[0]))
                judged = record.get("solution") and record.get("evaluation")
                (index.traces if judged else index.workloads)[name].append((where, record))
    for file in sorted((root / "solutions").rglob("*.json")):
        record = read_json(file)
        if isinstance(record, dict):
            index.solutions[str(record.get("definition"))].append((str(file), record))
    return index


def _imported(file: Path, root: Path, index: _Index) -> Imported:
    data = read_json(file)
    if not isinstance(data, dict):
        raise ProblemError(f"{file}: expected an object, found {type(data).__name__}")
    if "type" in data and "op_type" not in data:
        data["op_type"] = data.pop("type")  # The field's name in early data sets.
    definition = parse(Definition, data, file)
    name = definition.name
    records = index.workloads[name] or _once(index.traces[name])
    if not records:
        raise ProblemError(
            f"{file}: no workloads for {name!r} in {root / 'workloads'} or {root / 'traces'}; "
            "a problem needs at least one"
        )
    workloads = tuple(_workload(definition, r["workload"], where) for where, r in records)
    problem_id = f"{FORMAT}/{name}"
    pack = Pack(
        id=problem_id,
        title=(definition.description or name).strip().splitlines()[0],
        family=definition.op_type or "",
        imported_from={
            "format": FORMAT,
            "source": file.name,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        },
    )
    try:
        problem = Problem(
            id=problem_id,
            definition=definition,
            workloads=workloads,
            pack=pack,
            root=str(root.absolute()),
        )
    except ValidationError as error:
        raise ProblemError(f"{file}: {explain(error)}") from None
    imported = Imported(problem)
    for where, record in index.solutions[name]:
        try:
            imported.solutions.append(solution_from(record, where))
        except ProblemError as error:
            imported.remarks.append(f"solution not taken over: {error}")
    imported.traces = [json.dumps(record) for _, record in index.traces[name]]
    return imported


def _once(traces: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """One record for each workload that traces were measured on."""
    seen: dict[str, tuple[str, dict[str, Any]]] = {}
    for where, record in traces:
        key = {k: v for k, v in record["workload"].items() if k != "uuid"}
        seen.setdefault(json.dumps(key, sort_keys=True), (where, record))
    return list(seen.values())


def _workload(definition: Definition, record: dict[str, Any], where: str) -> Workload:
    """A workload; one without a uuid gets one from its content, and unnamed inputs are random."""
    data = dict(record)
    if not data.get("uuid"):
        text = json.dumps([definition.name, data], sort_keys=True)
        data["uuid"] = str(uuid.uuid5(uuid.NAMESPACE_OID, text))
    given = data.get("inputs")
    if isinstance(given, dict):
        data["inputs"] = {
            name: given[name] if name in given or spec.is_scalar else {"type": "random"}
            for name, spec in definition.inputs.items()
            if name in given or not spec.is_scalar
        } | {name: spec for name, spec in given.items() if name not in definition.inputs}
    return parse(Workload, data, where)


def solution_from(record: dict[str, Any], where: str) -> Solution:
    """A solution of this format in ours, which is SOL-ExecBench's.

    The language becomes one of a list, and a calling convention that is not stated is told from
    the signature.

    Raises:
        ProblemError: it is malformed, or needs a binding or language that is not built here
            (`tvm-ffi`, `tilelang`); begins with `where`.
    """
    data = dict(record)
    spec = dict(data.get("spec") or {})
    language = str(spec.pop("language", "")).lower()
    if language not in _LANGUAGES:
        raise ProblemError(
            f"{where}: language {language!r} is not built here; expected {sorted(_LANGUAGES)}"
        )
    sources = [s for s in data.get("sources") or () if isinstance(s, dict)]
    text = "\n".join(str(s.get("content", "")) for s in sources)
    binding = spec.get("binding")
    if language in ("cuda", "cpp"):
        if binding is None:  # The format's default is tvm-ffi, unless the source says otherwise.
            binding = "torch" if "torch/" in text and "tvm/ffi" not in text else "tvm-ffi"
        if binding != "torch":
            raise ProblemError(f"{where}: binding {binding!r} is not built here; expected 'torch'")
        spec["binding"] = binding
    else:
        spec.pop("binding", None)
    spec["languages"] = [_LANGUAGES[language]]
    spec.setdefault("destination_passing_style", None)
    if "::" not in str(spec.get("entry_point", "")) and len(sources) == 1:
        spec["entry_point"] = f"{sources[0].get('path')}::{spec.get('entry_point', 'run')}"
    try:
        return Solution.model_validate(data | {"spec": spec})
    except ValidationError as error:
        raise ProblemError(f"{where}: {explain(error)}") from None
