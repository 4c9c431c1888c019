"""Recorded tensors: inputs that were captured from running models, kept as safetensors files.

A workload may take an input from such a file (`SafetensorsInput`). Its path is relative to the
root of the data set it was published with; here it is looked up in the folder the user named
(``--blobs DIR``, or `SOL_GYM_BLOBS`), then in the problem's own folder. Published paths begin at
different places (``blob/workloads/...``, ``data/flashinfer-trace/blob/workloads/...``), so leading
parts are left out one by one until a file is found.

The library's own problems draw such inputs with generators, so that they run everywhere. With a
copy of the data set at hand, `with_recorded` puts the recorded tensors in their place: it finds
the published workloads of the same name in the folder and matches them by axes and scalars.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from .errors import ProblemError
from .problem import (
    CustomInput,
    Problem,
    SafetensorsInput,
    ScalarInput,
    TensorArg,
    Workload,
    parse,
    read_json_lines,
)

if TYPE_CHECKING:
    import torch

BLOBS_VARIABLE = "SOL_GYM_BLOBS"
"""Environment variable with the folder of recorded tensors."""
_MAX_DEPTH = 6
_NOT_SEARCHED = {"blob", ".git", "solutions", "node_modules", "__pycache__"}
_LFS_POINTER = b"version https://git-lfs"


def with_recorded(problem: Problem, blobs: str | Path | None) -> Problem:
    """`problem` with its recorded inputs taken from a folder.

    Args:
        problem: one whose workloads name safetensors files, or one of the library's whose
            generators stand in for such files.
        blobs: the folder, which must then have what the problem needs; None takes `SOL_GYM_BLOBS`
            where it is set and has something for this problem, and else changes nothing.

    Raises:
        ProblemError: there is no such folder; a folder given as `blobs` has nothing for the
            problem; or the recorded workloads found do not fit it.
    """
    root = blobs or os.environ.get(BLOBS_VARIABLE)
    if not root:
        return problem
    folder = Path(root)
    if not folder.is_dir():
        source = "--blobs" if blobs else BLOBS_VARIABLE
        raise ProblemError(f"{source} names {folder}, which is not a folder")
    named = problem.model_copy(update={"blob_root": str(folder.absolute())})
    if any(_recorded_names(w) for w in problem.workloads):
        return named
    if not any(isinstance(s, CustomInput) for w in problem.workloads for s in w.inputs.values()):
        if blobs:
            raise ProblemError(f"{problem.id} has no recorded inputs; leave --blobs out")
        return problem
    if problem.profile == "smoke":
        if blobs:
            raise ProblemError(
                f"{problem.id}: the smoke workloads are synthetic; for recorded inputs use "
                "the full ones (--profile full)"
            )
        return problem
    names = (problem.definition.name, re.sub(r"^\d+_", "", problem.definition.name))
    files = list(_workload_files(folder, names))
    if not files:
        if blobs:
            raise ProblemError(
                f"{problem.id}: found no recorded workloads below {folder}; looked for a file "
                f"{names[1]}.jsonl (flashinfer-trace) or {names[0]}/workload.jsonl (SOL-ExecBench)"
            )
        return problem
    records = [record for file in files for record in _records(file)]
    workloads = _matched(problem, records, files[0])
    return Problem(
        **{name: getattr(named, name) for name in type(named).model_fields}
        | {"workloads": tuple(workloads)}
    )


def read_recorded(
    arg: TensorArg,
    kind: SafetensorsInput,
    roots: Iterable[str | Path | None],
    device: torch.device,
    where: str,
) -> torch.Tensor:
    """A recorded tensor, from the first of `roots` that has its file.

    Raises:
        ProblemError: no such file or tensor, or one of another shape or dtype; begins with `where`.
    """
    from safetensors import SafetensorError, safe_open

    from .draws import torch_dtype

    folders = [Path(root) for root in roots if root is not None]
    where = f"{where}: input {arg.name!r}"
    file = next((f for root in folders if (f := find_blob(root, kind.path, where))), None)
    if file is None:
        looked = ", ".join(map(str, folders)) or "nowhere (the problem has no folder)"
        raise ProblemError(
            f"{where}: recorded file {kind.path!r} not found; looked in {looked}; name the folder "
            f"that such paths are relative to with --blobs DIR or {BLOBS_VARIABLE}"
        )
    with open(file, "rb") as start:
        if start.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ProblemError(
                f"{where}: {file} is a Git LFS pointer, not the data; run 'git lfs pull' there"
            )
    try:
        with safe_open(str(file), framework="pt", device=str(device)) as tensors:
            keys = list(tensors.keys())
            if kind.tensor_key not in keys:
                raise ProblemError(
                    f"{where}: {file} has no tensor {kind.tensor_key!r}; it has {keys}"
                )
            value = tensors.get_tensor(kind.tensor_key)
    except SafetensorError as error:
        raise ProblemError(f"{where}: {file} is not a safetensors file: {error}") from None
    expected = torch_dtype(arg.dtype)
    if tuple(value.shape) != arg.shape:
        raise ProblemError(
            f"{where}: {file}: tensor {kind.tensor_key!r} has shape {list(value.shape)}, "
            f"expected {list(arg.shape)}"
        )
    packed = arg.dtype == "float4_e2m1fn_x2" and str(value.dtype) == "torch.uint8"
    if value.dtype != expected and not packed:
        raise ProblemError(
            f"{where}: {file}: tensor {kind.tensor_key!r} has dtype {value.dtype}, "
            f"expected {expected}"
        )
    return value if value.dtype == expected else value.view(expected)


def find_blob(root: Path, path: str, where: str = "") -> Path | None:
    """The file `path` below `root`, its leading parts left out where need be; None if there is none.

    Raises:
        ProblemError: the path leads out of the folder.
    """
    parts = PurePosixPath(path).parts
    if ".." in parts:
        raise ProblemError(f"{where}: recorded path {path!r} leads out of its folder ('..')")
    parts = parts[1:] if PurePosixPath(path).is_absolute() else parts
    for first in range(len(parts)):
        candidate = root.joinpath(*parts[first:])
        if candidate.is_file():
            return candidate
    return None


def _recorded_names(workload: Workload) -> list[str]:
    return [n for n, spec in workload.inputs.items() if isinstance(spec, SafetensorsInput)]


def _workload_files(root: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """Files below `root` that hold the workloads of a definition of one of these names."""
    wanted = {f"{name}{suffix}" for name in names for suffix in (".jsonl", ".workload.jsonl")}
    for folder, folders, files in os.walk(root):
        path = Path(folder)
        depth = len(path.relative_to(root).parts)
        folders[:] = sorted(set(folders) - _NOT_SEARCHED) if depth < _MAX_DEPTH else []
        for file in sorted(files):
            if file in wanted or (file == "workload.jsonl" and path.name in names):
                yield path / file


def _records(file: Path) -> Iterator[Workload]:
    for where, record in read_json_lines(file):
        if isinstance(record, dict) and isinstance(record.get("workload"), dict):
            record = record["workload"]
        yield parse(Workload, record, where)


def _matched(problem: Problem, records: list[Workload], file: Path) -> list[Workload]:
    """The problem's workloads with the recorded inputs of the published ones that they are."""
    left = list(records)
    workloads = []
    for index, workload in enumerate(problem.workloads):
        found = next((r for r in left if _same(r, workload)), None)
        if found is None:
            raise ProblemError(
                f"{problem.id}: {file} has no recorded workload for workload {index}: axes "
                f"{workload.axes}, scalars {workload.scalars}; it has {len(records)} others"
            )
        left.remove(found)
        taken: dict[str, Any] = {name: found.inputs[name] for name in _recorded_names(found)}
        still = [
            name
            for name, spec in workload.inputs.items()
            if isinstance(spec, CustomInput) and name not in taken
        ]
        if still:
            raise ProblemError(
                f"{file}: the recorded workload {found.uuid} has no safetensors for {still}, "
                f"which {problem.id} needs"
            )
        workloads.append(workload.model_copy(update={"inputs": {**workload.inputs, **taken}}))
    return workloads


def _same(record: Workload, workload: Workload) -> bool:
    """Whether a published workload is this one: same inputs, axes and scalars."""
    if set(record.inputs) != set(workload.inputs) or record.axes != workload.axes:
        return False
    return all(
        isinstance(spec, ScalarInput) and math.isclose(spec.value, value, rel_tol=1e-6)
        for name, value in workload.scalars.items()
        for spec in [record.inputs[name]]
    )
