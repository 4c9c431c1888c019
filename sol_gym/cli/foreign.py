"""`sol-gym problems import|export|audit`: other benchmarks' formats, and degenerate problems."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from ..errors import ProblemError
from . import render

_BLOBS = click.option(
    "--blobs", type=click.Path(path_type=Path), help="Folder of recorded safetensors."
)


def _settings(pairs: tuple[str, ...]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise ProblemError(f"--set {pair!r}: expected NAME=VALUE, e.g. batch_size=64")
        settings[name.strip()] = value.strip()
    return settings


@click.command("import")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format_",
    type=click.Choice(["sol-execbench", "flashinfer-trace", "kernelbench"]),
    help="Default: told from what is there.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("imported"), show_default=True,
    help="Folder for the problems' folders.",
)  # fmt: skip
@click.option("--only", metavar="GLOB", help="Only problems of such names, e.g. 'gemm_*'.")
@click.option(
    "--set", "pairs", multiple=True, metavar="NAME=VALUE",
    help="KernelBench: replace a top-level constant (repeatable), e.g. to shrink a shape.",
)  # fmt: skip
@_BLOBS
@click.option("--copy-blobs", is_flag=True, help="Copy recorded files into the problems' folders.")
@click.option("--no-audit", is_flag=True, help="Do not look for degenerate problems.")
@click.option("--overwrite", is_flag=True, help="Replace folders that exist.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a problem.")
def import_(
    path: Path, format_: str | None, out: Path, only: str | None, pairs: tuple[str, ...],
    blobs: Path | None, copy_blobs: bool, no_audit: bool, overwrite: bool, as_json: bool,
) -> None:  # fmt: skip
    """Import problems from PATH: SOL-ExecBench, FlashInfer-Trace or KernelBench.

    Code in the files runs in the sandbox only. Judging runs an imported reference in the judge's
    own process: read it first.

    The exit code is 1 if a problem could not be imported.
    """
    from ..formats import ImportFailure, import_problems

    failed = done = 0
    with render.progress("importing", quiet=as_json) as update:
        for item in import_problems(
            path, format=format_, out=out, only=only, settings=_settings(pairs), blobs=blobs,  # type: ignore[arg-type]
            copy_blobs=copy_blobs, audit=not no_audit, overwrite=overwrite,
            on_progress=lambda name: update(name, 0, 1),
        ):  # fmt: skip
            if isinstance(item, ImportFailure):
                failed += 1
                if as_json:
                    click.echo(json.dumps({"name": item.name, "error": item.message}))
                else:
                    render.console.print(f"[red]{item.name}[/]: ", end="")
                    render.console.print(item.message, markup=False)
                continue
            done += 1
            if as_json:
                record = {
                    "id": item.problem.id,
                    "folder": str(item.folder),
                    "workloads": len(item.problem.workloads),
                    "solutions": [s.name for s in item.solutions],
                    "traces": len(item.traces),
                    "remarks": item.remarks,
                    "findings": [str(f) for f in item.findings],
                }
                click.echo(json.dumps(record))
                continue
            came = f"{len(item.problem.workloads)} workloads"
            came += f", {len(item.solutions)} solutions" if item.solutions else ""
            came += f", {len(item.traces)} traces" if item.traces else ""
            render.console.print(f"[bold]{item.problem.id}[/] -> {item.folder}  ({came})")
            for remark in item.remarks:
                render.console.print(f"  note: {remark}", markup=False)
            for finding in item.findings:
                render.console.print(f"  warning: {finding}", markup=False, style="yellow")
    if not as_json:
        render.console.print(f"{done} imported, {failed} failed")
    sys.exit(1 if failed else 0)


@click.command()
@click.argument("problem")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write into.")
@click.option(
    "--profile", type=click.Choice(["full", "smoke"]), default="full", show_default=True,
    help="Which workloads.",
)  # fmt: skip
def export(problem: str, out: Path, profile: str) -> None:
    """Write PROBLEM (an id or a folder) in the public SOL-ExecBench layout."""
    from ..formats import export_problem
    from .problems import _problem

    chosen = _problem(problem).with_profile(profile)  # type: ignore[arg-type]
    folder = export_problem(chosen, out / chosen.definition.name)
    render.console.print(f"{chosen.id} -> {folder}", markup=False)
    mixed = sum(
        1 for w in chosen.workloads if len({i.type == "custom" for i in w.inputs.values()}) > 1
    )
    if mixed:
        render.console.print(
            f"note: {mixed} workloads mix custom inputs with others, which sol_gym judges and the "
            "public SOL-ExecBench tool refuses",
            markup=False,
        )


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="PROBLEM...")
@_BLOBS
def audit(names: tuple[str, ...], blobs: Path | None) -> None:
    """Look for degenerate problems: constant or zero outputs, unread inputs, null kernels that pass.

    PROBLEM is an id or a folder; its code runs in the sandbox. The exit code is 1 if there are
    warnings.
    """
    from ..formats import audit_problem
    from ..formats.sandboxed import Sandbox
    from ..recorded import with_recorded
    from .problems import _problem

    warned = 0
    with Sandbox() as sandbox, render.progress("auditing") as update:
        for index, name in enumerate(names):
            update(name, index, len(names))
            findings = audit_problem(with_recorded(_problem(name), blobs), sandbox)
            warned += bool(findings)
            for finding in findings:
                render.console.print(f"{name}: {finding}", markup=False)
    render.console.print(f"{len(names)} problems audited, {warned} with warnings")
    sys.exit(1 if warned else 0)
