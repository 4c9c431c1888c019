"""`sol-gym problems ...`: look at and check problem packs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import click
from rich.table import Table

from ..errors import ProblemError
from ..problem import Pack, Problem, ProfileName, load_problem
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
@click.option("--family", help="Only this family, e.g. attention.")
@click.option("--direction", type=click.Choice(["forward", "backward"]))
@click.option("--precision", help="Only this class of contraction work, e.g. bf16, or none.")
@click.option(
    "--fits",
    metavar="DEVICE|SIZE",
    help="Only problems all of whose workloads fit: a device key (h200) or a size (24GiB, 80GB).",
)
@click.option("--json", "as_json", is_flag=True, help="Print the ids as a JSON list.")
def list_problems(
    subset: str | None,
    family: str | None,
    direction: str | None,
    precision: str | None,
    fits: str | None,
    as_json: bool,
) -> None:
    """The problems of the library."""
    from ..problems import list_ids, load, needed_bytes

    limit = None if fits is None else _memory_limit(fits)
    rows, partly = [], 0
    for name in list_ids(subset):
        pack = load(name).pack or Pack(id=name, title="")
        if (
            (family and pack.family != family)
            or (direction and pack.direction != direction)
            or (precision and pack.precision != precision)
        ):
            continue
        needed = needed_bytes(name)
        if limit is not None and max(needed) > limit:
            partly += min(needed) <= limit
            continue
        rows.append((name, pack, needed))
    if as_json:
        click.echo(json.dumps([name for name, _, _ in rows]))
        return
    table = Table(title=f"{len(rows)} problems")
    table.add_column("id", overflow="fold", ratio=2)
    for column in ("workloads", "GiB"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("family", "direction", "precision"):
        table.add_column(column, no_wrap=True)
    table.add_column("title", overflow="ellipsis", no_wrap=True, ratio=1)
    for name, pack, needed in rows:
        table.add_row(
            name, str(len(needed)), f"{max(needed) / 2**30:.2f}",
            pack.family, pack.direction, pack.precision, pack.title,
        )  # fmt: skip
    render.console.print(table)
    if limit is not None:
        render.console.print(f"{partly} more have some workloads that fit")


def _memory_limit(text: str) -> int:
    """Bytes of a size such as 24GiB, or of a device's memory."""
    from ..device import get_device

    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", text, re.IGNORECASE):
        number, unit = match.groups()
        if unit is None:
            return int(float(number))
        power = "KMGT".index(unit[0].upper()) + 1
        return int(float(number) * (1024 if unit.lower().endswith("i") else 1000) ** power)
    limit = get_device(text).memory_bytes
    if not limit:
        raise ProblemError(f"the memory of device {text!r} is not known; give a size, e.g. 24GiB")
    return limit


@problems.command()
@click.argument("problem")
@click.option(
    "--device", default="b200", show_default=True, help="For the times; need not be present."
)
@click.option("--profile", type=click.Choice(["full", "smoke"]), default="full", show_default=True)
@click.option("--recipe", help="Draw the inputs by one of the problem's named recipes.")
@click.option(
    "--bounds/--no-bounds",
    default=None,
    help="Compute our bounds (some seconds), which runs the reference. Default: for problems of the "
    "library, not for folders, whose code one may want to read first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the card as JSON.")
@click.option("--reference", "with_reference", is_flag=True, help="Print the reference too.")
def show(
    problem: str,
    device: str,
    profile: ProfileName,
    recipe: str | None,
    bounds: bool | None,
    as_json: bool,
    with_reference: bool,
) -> None:
    """A problem's card: what it computes, on which tensors and workloads, and the times to beat."""
    from ..device import get_device
    from ..evaluate.card import make_card

    chosen = _problem(problem).with_profile(profile)
    if recipe is not None:
        chosen = chosen.with_recipe(recipe)
    if bounds is None:
        bounds = not Path(problem).exists()
    with render.progress("analyzing", quiet=as_json) as update:
        card = make_card(chosen, get_device(device), bounds=bounds, on_progress=update)
    if as_json:
        record = card.model_dump(mode="json")
        for workload, data in zip(card.workloads, record["workloads"], strict=True):
            data["needed_bytes"] = workload.needed_bytes
        if with_reference:
            record["reference"] = chosen.reference
        click.echo(json.dumps(record))
        return
    render.print_card(card)
    if with_reference:
        render.console.print(chosen.reference, markup=False)


@problems.command()
@click.argument("names", nargs=-1, metavar="[PROBLEM]...")
def check(names: tuple[str, ...]) -> None:
    """Check packs (ids or folders; by default all of the library, in a minute or two).

    Schema and export; then, on the smoke workloads: shapes and dtypes, untouched inputs, outputs of
    their own, repeatability, agreement with float64, inputs that have no influence, outputs that
    never change.
    """
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
