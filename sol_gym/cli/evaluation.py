"""`sol-gym eval`: judge one solution."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from ..evaluation import Status
from . import render

_SOLUTION = click.Path(exists=True, path_type=Path)


@click.command("eval")
@click.argument("problem")
@click.argument("solution", type=_SOLUTION)
@click.option(
    "--device", default="auto", show_default=True, help="Device key: auto, cpu, h200, h100, b200."
)
@click.option(
    "--profile",
    type=click.Choice(["full", "smoke"]),
    help="Workloads; default: smoke on a CPU, else full.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=int,
    help="Only this workload (by index; repeatable).",
)
@click.option(
    "--inputs",
    "inputs_profile",
    type=click.Choice(["compatible", "strict"]),
    default="compatible",
    show_default=True,
    help="The published draws, or also those on which every input matters.",
)
@click.option(
    "--bounds",
    "bound_set",
    type=click.Choice(["solar", "published"]),
    default="solar",
    show_default=True,
)
@click.option("--seed", type=int, help="Fix all draws, to repeat a run.")
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=300.0,
    show_default=True,
    help="Seconds for the solution.",
)
@click.option(
    "--no-audit", is_flag=True, help="Do not read the source with the static audit first."
)
@click.option(
    "--strict-isolation",
    is_flag=True,
    default=None,
    help="Refuse to run where a layer of isolation is missing (also SOL_GYM_STRICT_ISOLATION=1).",
)
@click.option("--no-timing", is_flag=True, help="Correctness only.")
@click.option(
    "--store", type=click.Path(path_type=Path), help="Append the evaluation to this JSONL file."
)
@click.option(
    "--blobs",
    type=click.Path(path_type=Path),
    help="Folder of recorded safetensors (default: SOL_GYM_BLOBS).",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="Append public traces, one a workload, to this JSONL file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the evaluation as JSON.")
def evaluate(
    problem: str, solution: Path, device: str, profile: str | None, workloads: tuple[int, ...],
    inputs_profile: str, bound_set: str, seed: int | None, timeout_s: float, no_audit: bool,
    strict_isolation: bool | None, no_timing: bool, store: Path | None, blobs: Path | None,
    trace: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Judge SOLUTION (a source file or solution.json) on PROBLEM (an id, or a folder in the public layout).

    The exit code is 0 if it passed, 1 if it did not, 2 on bad arguments, 3 on an infrastructure fault.
    """
    from ..evaluate.client import Evaluator, as_problem

    if trace and no_timing:
        raise click.UsageError("--trace needs timing: a passed trace states a latency")
    with (
        Evaluator(device, audit=not no_audit, strict_isolation=strict_isolation) as evaluator,
        render.progress("evaluating", quiet=as_json) as update,
    ):
        chosen = as_problem(problem, profile, evaluator.device, blobs)  # type: ignore[arg-type]
        if workloads:
            chosen = chosen.with_workloads(list(workloads))
        evaluation = evaluator.evaluate(
            chosen, solution, profile=chosen.profile, inputs_profile=inputs_profile, seed=seed,
            timing=not no_timing, timeout_s=timeout_s,
            bound_set=bound_set, on_progress=update,  # type: ignore[arg-type]
        )  # fmt: skip
    if store:
        from ..store import Store

        Store(store).append(evaluation)
    if trace:
        from ..formats import write_traces

        count = write_traces(evaluation, chosen, trace)
        click.echo(f"{count} traces appended to {trace}", err=True)
    if as_json:
        click.echo(json.dumps(evaluation.to_json()))
    else:
        render.console.print(render.workload_table(evaluation))
        render.console.print(render.summary(evaluation))
        if evaluation.message and evaluation.status is not Status.PASSED:
            render.console.print(evaluation.message, markup=False)
        render.findings(evaluation.findings or [])
        if evaluation.log.strip():
            render.console.print(
                "output of the solution:\n" + evaluation.log.strip(), markup=False, style="dim"
            )
        render.console.print(render.isolation_line(evaluation.provenance.isolation), style="dim")
    sys.exit({Status.PASSED: 0, Status.INFRA_ERROR: 3}.get(evaluation.status, 1))
