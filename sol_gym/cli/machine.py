"""`sol-gym doctor` and `sol-gym calibrate`: what this machine offers."""

from __future__ import annotations

import json

import click
from rich.table import Table

from . import render


@click.command()
@click.option("--device", default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def doctor(device: str, as_json: bool) -> None:
    """Which device, software and isolation layers are here, seen from a real worker."""
    from ..evaluate.client import Evaluator
    from ..paths import cache_dir, runtime_dir

    with (
        Evaluator(device) as evaluator,
        render.progress("asking the judge", quiet=as_json) as update,
    ):
        facts = evaluator.describe(on_progress=update)
    if as_json:
        click.echo(json.dumps(facts))
        return
    model = facts["device"]
    render.console.print(f"device: {model['key']} ({model['name']})")
    table = Table(title="isolation of workers")
    table.add_column("layer")
    table.add_column("state")
    for name, state in facts["isolation"].items():
        table.add_row(name, "[green]active[/]" if state is True else f"[yellow]{state}[/]")
    render.console.print(table)
    render.console.print("versions: " + ", ".join(f"{k} {v}" for k, v in facts["versions"].items()))
    render.console.print(f"state: {facts['state']}")
    render.console.print(f"cache: {cache_dir()}   runtime: {runtime_dir()}")
    missing = [k for k, v in facts["isolation"].items() if v is not True]
    if missing:
        render.console.print(f"[yellow]missing layers: {', '.join(missing)}; evaluations say so[/]")


@click.command()
@click.option("--force", is_flag=True, help="Measure again even if this machine is known.")
@click.option("--json", "as_json", is_flag=True)
def calibrate(force: bool, as_json: bool) -> None:
    """Measure this machine's CPU (GEMM rates, copy bandwidth) and cache the figures."""
    from ..device import calibrate_cpu

    with render.progress("calibrating", quiet=as_json):
        device = calibrate_cpu(force=force)
    if as_json:
        click.echo(device.model_dump_json())
        return
    table = Table(title=f"{device.key}: {device.name}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in device.model_dump(mode="json").items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            table.add_row(name, f"{value:.4g}")
    render.console.print(table)
