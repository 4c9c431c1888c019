"""`sol-gym sol`: Speed-of-Light bounds."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.table import Table

from . import render


@click.command()
@click.argument("problem")
@click.option(
    "--device", default="auto", show_default=True, help="Device key; need not be present."
)
@click.option(
    "--profile",
    type=click.Choice(["full", "smoke"]),
    help="Workloads; default: smoke for the cpu device.",
)
@click.option("--workload", type=int, help="Only this workload (by index).")
@click.option(
    "--blobs",
    type=click.Path(path_type=Path),
    help="Folder of recorded safetensors (default: SOL_GYM_BLOBS).",
)
@click.option("--json", "as_json", is_flag=True, help="Print the bounds as JSON lines.")
def sol(
    problem: str,
    device: str,
    profile: str | None,
    workload: int | None,
    blobs: Path | None,
    as_json: bool,
) -> None:
    """T_SOL of PROBLEM (an id or a folder) on a device: the time no correct kernel can beat."""
    from ..device import get_device
    from ..evaluate.client import as_problem
    from ..solar import analyze

    model = get_device(device)
    chosen = as_problem(problem, profile, model, blobs)  # type: ignore[arg-type]
    if workload is not None:
        chosen = chosen.with_workloads([workload])
    table = Table(title=f"{chosen.id} on {model.key} ({chosen.profile} workloads)")
    for name in (
        "axes",
        "T_SOL ms",
        "bound by",
        "memory ms",
        "compute ms",
        "bytes",
        "FLOP",
        "lane",
        "complete",
    ):
        table.add_column(name, justify="left" if name in ("axes", "bound by", "lane") else "right")
    notes: list[str] = []
    with render.progress("analyzing", quiet=as_json) as update:
        for index, item in enumerate(chosen.workloads):
            update("workload", index, len(chosen.workloads))
            bound = analyze(chosen, item, model)
            if as_json:
                click.echo(
                    json.dumps(
                        {
                            "problem": chosen.id,
                            "workload": item.uuid,
                            **bound.model_dump(mode="json"),
                        }
                    )
                )
                continue
            notes += [note for note in bound.notes if note not in notes]
            table.add_row(
                " ".join(f"{k}={v}" for k, v in item.axes.items()),
                render.milliseconds(bound.t_sol_ms),
                bound.bound_by,
                render.milliseconds(bound.memory_ms),
                render.milliseconds(max(bound.compute_ms.values(), default=0.0)),
                f"{bound.total_bytes:,}",
                f"{bound.flops:,}",
                bound.lane,
                "yes" if bound.complete else "no",
            )
    if not as_json:
        render.console.print(table)
        for note in notes:
            render.console.print(f"note: {note}", markup=False)
