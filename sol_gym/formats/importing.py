"""Importing: from a foreign file or folder to problem folders, audited.

An imported problem is an ordinary one: a folder in the public layout that is loaded, judged,
bounded and made an environment like those of the library. Importing executes a file's Python in
the sandbox only. Judging executes the reference in the judge's process and bounding it in the
caller's: from there on an imported reference is trusted, so read it first.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args

from ..errors import ProblemError
from ..problem import Problem, SafetensorsInput, export_problem
from ..recorded import find_blob, with_recorded
from . import flashinfer_trace, kernelbench, sol_execbench
from .imported import Imported, ImportFailure, ProblemFinding, Wanted
from .sandboxed import Sandbox, SandboxFault

Format = Literal["sol-execbench", "flashinfer-trace", "kernelbench"]
FORMATS: tuple[str, ...] = get_args(Format)
_AUDIT_TIMEOUT_S = 180.0


def detect(path: Path) -> Format:
    """The format of a file or folder, told from what is there.

    Raises:
        ProblemError: it does not exist or is none of them; says what was looked for.
    """
    if not path.exists():
        raise ProblemError(f"{path} does not exist")
    if path.is_file():
        if path.suffix == ".parquet" or path.name == "definition.json":
            return "sol-execbench"
        if path.suffix == ".json" and flashinfer_trace.find_root(path):
            return "flashinfer-trace"
        if kernelbench.is_kernelbench(path):
            return "kernelbench"
    else:
        if (path / "definitions").is_dir():
            return "flashinfer-trace"
        if next(path.rglob("definition.json"), None) or next(path.rglob("*.parquet"), None):
            return "sol-execbench"
        if flashinfer_trace.find_root(path):
            return "flashinfer-trace"
        if any(map(kernelbench.is_kernelbench, path.rglob("*.py"))):
            return "kernelbench"
    raise ProblemError(
        f"{path}: format not recognised; expected folders with definition.json or *.parquet "
        "(sol-execbench), a folder with definitions/ (flashinfer-trace), or Python files that "
        "define Model, get_inputs and get_init_inputs (kernelbench); --format names one"
    )


def import_problems(
    path: str | Path,
    *,
    format: Format | None = None,
    out: str | Path | None = None,
    only: str | None = None,
    settings: Mapping[str, str] | None = None,
    blobs: str | Path | None = None,
    copy_blobs: bool = False,
    audit: bool = True,
    overwrite: bool = False,
    on_progress: Callable[[str], None] = lambda name: None,
) -> Iterator[Imported | ImportFailure]:
    """Read problems of a foreign format, audit them, and write them as folders.

    Args:
        path: a file or folder of the format.
        format: which one; None tells it from what is there.
        out: folder in which each problem gets one of its name; None writes nothing.
        only: glob pattern of the names to import, e.g. ``gemm_*``.
        settings: KernelBench only: top-level constants to replace, name -> Python literal.
        blobs: folder of recorded tensors for the audit and for `copy_blobs`.
        copy_blobs: copy the recorded files that workloads name into the problem's folder.
        audit: look for degenerate problems (see `sol_gym.formats.audit`).
        overwrite: replace folders that exist.
        on_progress: called with each problem's name before it is audited.

    Yields:
        Each problem in turn, or why it could not be imported.

    Raises:
        ProblemError: `path` or an argument is unusable as a whole.
        InfrastructureError: the sandbox cannot be started.
    """
    path = Path(path)
    chosen = format or detect(path)
    if chosen not in FORMATS:
        raise ProblemError(f"there is no format {chosen!r}; expected {', '.join(FORMATS)}")
    if settings and chosen != "kernelbench":
        raise ProblemError(
            f"--set replaces constants of KernelBench files; {chosen} has workloads: "
            "choose among them with --workload when judging"
        )
    if not path.exists():
        raise ProblemError(f"{path} does not exist")

    def wanted(name: str) -> bool:
        return only is None or fnmatch.fnmatchcase(name, only)

    found = 0
    with Sandbox() as sandbox:
        for item in _read(path, chosen, wanted, settings, sandbox):
            found += 1
            if isinstance(item, ImportFailure):
                yield item
                continue
            on_progress(item.problem.definition.name)
            try:
                if blobs is not None and _blobs_of(item.problem):
                    item.problem = with_recorded(item.problem, blobs)
                if audit:
                    item.findings = audit_problem(item.problem, sandbox)
                if missing := sandbox.missing_layers:
                    item.remarks.append(
                        f"its code ran without these isolation layers: {', '.join(missing)}"
                    )
                if out is not None:
                    item.folder = _write(item, Path(out), copy_blobs, overwrite)
            except ProblemError as error:
                yield ImportFailure(item.problem.definition.name, str(error))
                continue
            yield item
    if not found:
        raise ProblemError(f"{path}: no problem's name matches {only!r}")


def audit_problem(problem: Problem, sandbox: Sandbox | None = None) -> list[ProblemFinding]:
    """What makes a problem degenerate, found by running its reference in the sandbox.

    Args:
        problem: any; see `sol_gym.formats.audit.audit` for what is looked at.
        sandbox: one that is running; None starts and ends one.
    """
    if sandbox is None:
        with Sandbox() as own:
            return audit_problem(problem, own)
    arguments = {
        "record": problem.model_dump(mode="json"),
        "root": problem.root,
        "blob_root": problem.blob_root,
    }
    try:
        recorded = [file for file in _recorded_files(problem).values() if file]
    except ProblemError:  # A path that leads out of its folder; the audit says so.
        recorded = []
    try:
        answer = sandbox.call(
            "sol_gym.formats.audit", "audit_record", arguments, timeout_s=_AUDIT_TIMEOUT_S,
            files=recorded,
        )  # fmt: skip
        return [ProblemFinding(str(f["message"]), str(f["where"])) for f in answer]
    except SandboxFault as error:
        return [ProblemFinding(f"the audit did not end: {error}")]
    except (TypeError, KeyError):
        return [ProblemFinding("the audit's process answered nonsense")]


def _read(
    path: Path, chosen: str, wanted: Wanted, settings: Mapping[str, str] | None, sandbox: Sandbox
) -> Iterator[Imported | ImportFailure]:
    if chosen == "sol-execbench":
        yield from sol_execbench.read(path, wanted)
    elif chosen == "flashinfer-trace":
        yield from flashinfer_trace.read(path, wanted)
    else:
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        for file in files:
            if not wanted(file.stem) or (path.is_dir() and not kernelbench.is_kernelbench(file)):
                continue
            try:
                yield kernelbench.import_file(file, sandbox, settings)
            except ProblemError as error:
                yield ImportFailure(file.stem, str(error))


def _blobs_of(problem: Problem) -> dict[str, None]:
    """Paths of the recorded files a problem's workloads name, each once."""
    return {
        spec.path: None
        for workload in problem.workloads
        for spec in workload.inputs.values()
        if isinstance(spec, SafetensorsInput)
    }


def _write(item: Imported, out: Path, copy_blobs: bool, overwrite: bool) -> Path:
    """Write a problem's folder, complete or not at all; returns it."""
    problem = item.problem
    name = _file_name(problem.definition.name)
    folder, partial = out / name, out / f".{name}.partial"
    if folder.exists() and not overwrite:
        raise ProblemError(f"{folder} exists; --overwrite replaces it, --out names another place")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        export_problem(problem, partial)
        if copy_blobs:
            _copy_blobs(problem, partial)
        for solution in item.solutions:
            (partial / "solutions").mkdir(exist_ok=True)
            file = partial / "solutions" / f"{_file_name(solution.name)}.json"
            file.write_text(solution.model_dump_json(indent=2) + "\n")
        if item.traces:
            (partial / "traces.jsonl").write_text("\n".join(item.traces) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        raise ProblemError(f"{folder}: cannot be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _recorded_files(problem: Problem) -> dict[str, Path | None]:
    """Where the recorded files lie that a problem names, None for those that are missing."""
    roots = [Path(root) for root in (problem.blob_root, problem.root) if root]
    return {
        path: next((f for root in roots if (f := find_blob(root, path, problem.id))), None)
        for path in _blobs_of(problem)
    }


def _copy_blobs(problem: Problem, folder: Path) -> None:
    for path, file in _recorded_files(problem).items():
        if file is None:
            raise ProblemError(
                f"{problem.id}: recorded file {path!r} not found below "
                + ", ".join(filter(None, (problem.blob_root, problem.root)))
            )
        target = folder / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.+-]", "_", name).lstrip(".") or "problem"
