"""`sol-gym problems ...`: look at and check problem packs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.table import Table

from ..problem import Problem, load_problem
from . import foreign, render


@click.group()
def problems() -> None:
    """List, show, check, import, export and audit problems."""


problems.add_command(foreign.import_)
problems.add_command(foreign.export)
problems.add_command(foreign.audit)


def _problem(name: str) -> Problem:
    if Path(name).exists():
        return load_problem(name)
    from ..problems import load

    return load(name)


@problems.command("list")
@click.option("--subset", type=click.Choice(["L1", "L2", "Quant", "FIB"]))
@click.option("--json", "as_json", is_flag=True)
def list_problems(subset: str | None, as_json: bool) -> None:
    """The problems of the library."""
    from ..problems import list_ids, load

    ids = list_ids(subset)
    if as_json:
        click.echo(json.dumps(ids))
        return
    table = Table(title=f"{len(ids)} problems")
    for name in ("id", "workloads", "family", "direction", "precision", "title"):
        table.add_column(name, justify="right" if name == "workloads" else "left")
    for name in ids:
        problem = load(name)
        pack = problem.pack
        table.add_row(
            name, str(len(problem.workloads)),
            pack.family if pack else "", pack.direction if pack else "", pack.precision if pack else "",
            pack.title if pack else problem.definition.description or "",
        )  # fmt: skip
    render.console.print(table)


@problems.command()
@click.argument("problem")
@click.option("--json", "as_json", is_flag=True)
@click.option("--reference", "with_reference", is_flag=True, help="Print the reference too.")
def show(problem: str, as_json: bool, with_reference: bool) -> None:
    """A problem's card: what it computes on which tensors and workloads."""
    chosen = _problem(problem)
    if as_json:
        click.echo(chosen.model_dump_json())
        return
    pack, definition = chosen.pack, chosen.definition
    render.console.print(
        f"[bold]{chosen.id}[/]  {pack.title if pack else definition.description or ''}"
    )
    if pack:
        facts = [
            pack.family,
            pack.direction,
            pack.precision,
            f"from {pack.source_model}" if pack.source_model else "",
        ]
        render.console.print(" · ".join(f for f in facts if f), style="dim")
    tensors = Table()
    for name in ("tensor", "role", "shape", "dtype"):
        tensors.add_column(name)
    for role, specs in (("input", definition.inputs), ("output", definition.outputs)):
        for name, spec in specs.items():
            tensors.add_row(
                name,
                role,
                "scalar"
                if spec.shape is None
                else f"[{', '.join(spec.shape)}]".replace("[", "\\["),
                spec.dtype,
            )
    render.console.print(tensors)
    for note in pack.notes if pack else ():
        render.console.print(f"- {note}", markup=False)
    _print_workloads(chosen)
    if with_reference:
        render.console.print(chosen.reference, markup=False)


def _print_workloads(chosen: Problem) -> None:
    from .. import baselines

    published = baselines.published(chosen.id)
    table = Table(title=f"{len(chosen.workloads)} workloads")
    for name in (
        "#",
        "axes",
        "MiB in",
        "MiB out",
        "b200 T_SOL ms",
        "b200 T_b ms",
        "atol",
        "rtol",
        "ratio",
    ):
        table.add_column(name, justify="left" if name == "axes" else "right")
    for i, workload in enumerate(chosen.workloads):
        row = published[i] if published and i < len(published) else None
        t = workload.tolerance
        table.add_row(
            str(i), " ".join(f"{k}={v}" for k, v in workload.axes.items()),
            f"{sum(x.nbytes for x in chosen.tensors(workload).values()) / 2**20:,.1f}",
            f"{sum(x.nbytes for x in chosen.outputs(workload).values()) / 2**20:,.1f}",
            render.milliseconds(row.t_sol_ms if row else None), render.milliseconds(row.t_b_ms if row else None),
            f"{t.max_atol:g}", f"{t.max_rtol:g}", f"{t.required_matched_ratio:g}",
        )  # fmt: skip
    render.console.print(table)


@problems.command()
@click.argument("names", nargs=-1, metavar="[PROBLEM]...")
def check(names: tuple[str, ...]) -> None:
    """Check packs (ids or folders; all of the library by default): schema, shapes, smoke run, determinism."""
    from ..checking import check_problem
    from ..problems import list_ids

    failed = 0
    chosen = list(names) or list_ids()
    with render.progress("checking") as update:
        for index, name in enumerate(chosen):
            update(name, index, len(chosen))
            faults = check_problem(_problem(name))
            failed += bool(faults)
            for fault in faults:
                render.console.print(f"[red]{name}[/]: {fault}")
    render.console.print(f"{len(chosen)} problems checked, {failed} with faults")
    sys.exit(1 if failed else 0)
