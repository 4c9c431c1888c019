"""`sol-gym doctor` and `sol-gym calibrate`: what this machine offers."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from . import render


@click.command()
@click.option("--device", default="auto", show_default=True)
@click.option("--quick", is_flag=True, help="Ask which layers are active, without attacking them.")
@click.option("--json", "as_json", is_flag=True)
def doctor(device: str, quick: bool, as_json: bool) -> None:
    """Device, software and isolation of this machine; a worker tries to break every layer.

    The exit code is 1 if an attempt got through or a required layer is missing.
    """
    from ..evaluate.client import Evaluator
    from ..paths import cache_dir, runtime_dir

    with (
        Evaluator(device) as evaluator,
        render.progress("asking the judge", quiet=as_json) as update,
    ):
        facts = evaluator.describe(examine=not quick, on_progress=update)
    broken = [f for f in facts["attempts"] or () if not f["held"]]
    if as_json:
        click.echo(json.dumps(facts))
        sys.exit(1 if broken or facts["missing"] else 0)
    model = facts["device"]
    render.console.print(f"device: {model['key']} ({model['name']})")
    table = Table(title="isolation of workers")
    table.add_column("layer")
    table.add_column("state")
    for name, state in sorted(facts["isolation"].items()):
        colour = "green" if state is True else "red" if name in facts["missing"] else "yellow"
        table.add_row(name, f"[{colour}]{'active' if state is True else state}[/]")
    render.console.print(table)
    if facts["attempts"] is not None:
        render.console.print(_attempts(facts["attempts"]))
    render.console.print("versions: " + ", ".join(f"{k} {v}" for k, v in facts["versions"].items()))
    render.console.print(f"state: {facts['state']}")
    if facts["idle_check"] is not True:
        render.console.print(f"[yellow]no check that the GPU is idle ({facts['idle_check']})[/]")
    render.console.print(f"cache: {cache_dir()}   runtime: {runtime_dir()}")
    if facts["missing"]:
        names = ", ".join(facts["missing"])
        render.console.print(f"[red]missing: {names}; evaluations say so, strict ones refuse[/]")
    if broken:
        render.console.print(f"[red]{len(broken)} attempts got through[/]")
    elif facts["attempts"]:
        render.console.print(f"[green]all {len(facts['attempts'])} attempts were held[/]")
    sys.exit(1 if broken or facts["missing"] else 0)


def _attempts(findings: list[dict[str, Any]]) -> Table:
    """One line an attempt; what happened only where something got through (--json has it all)."""
    table = Table(title="attempts to break out, made by a worker")
    for heading in ("attempt", "held by any of", "all layers", "without namespaces"):
        table.add_column(heading)
    words = {True: "[green]held[/]", False: "[red]BROKEN[/]", None: "-"}
    for f in findings:
        layers = Text(", ".join(f["layers"]) + ("" if f["held"] else f"\n{f['detail']}"))
        table.add_row(f["attempt"], layers, words[f["held"]], words[f["held_without_namespaces"]])
    return table


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
