"""`sol-gym sol`: Speed-of-Light bounds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from ..errors import BoundError
from . import render

if TYPE_CHECKING:
    from ..device import Device
    from ..evaluate.bounds import BoundSet
    from ..problem import Problem


@click.command()
@click.argument("problem", required=False)
@click.option(
    "--device",
    default=None,
    help="Device key; need not be present. Default: auto; b200-1500 with --compare published.",
)
@click.option(
    "--profile",
    type=click.Choice(["full", "smoke"]),
    help="Workloads; default: smoke for the cpu device.",
)
@click.option("--workload", type=int, help="Only this workload (by index).")
@click.option("--seed", type=int, default=0, show_default=True, help="Of inputs that steer.")
@click.option(
    "--bounds",
    "bound_set",
    type=click.Choice(["solar", "published"]),
    default="solar",
    show_default=True,
    help="Whose T_SOL: ours, or the one published for a B200.",
)
@click.option(
    "--precision",
    type=click.Choice(["tolerance", "declared"]),
    default="tolerance",
    show_default=True,
    help="Units for float32 contractions: what the tolerance lets pass, or float32 accuracy.",
)
@click.option("--explain", is_flag=True, help="Say what the bound is made of, and how to reach it.")
@click.option(
    "--check",
    is_flag=True,
    help="With --explain: also change elements that are said to be read, one by one, and see "
    "whether an output changes (small workloads, on the CPU).",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the explanation as a page.",
)
@click.option(
    "--blobs",
    type=click.Path(path_type=Path),
    help="Folder of recorded safetensors (default: SOL_GYM_BLOBS).",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines.")
@click.option("--all", "every", is_flag=True, help="All workloads of all problems.")
@click.option(
    "--compare",
    type=click.Choice(["published"]),
    help="Put the published figures beside ours, with the cause of each deviation over 5 %.",
)
@click.option(
    "--csv",
    "csv_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the comparison.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True)
def sol(
    problem: str | None, device: str | None, profile: str | None, workload: int | None, seed: int,
    bound_set: str, precision: str, explain: bool, check: bool, html: Path | None, as_json: bool, every: bool,
    compare: str | None, csv_file: Path | None, jobs: int, blobs: Path | None,
) -> None:  # fmt: skip
    """T_SOL of PROBLEM (an id or a folder) on a device: the time no correct kernel can beat.

    With --compare published the exit code is 1 if a deviation has no cause.
    """
    from ..device import get_device
    from ..evaluate.client import as_problem

    if bool(problem) == every:
        raise click.UsageError("give a PROBLEM or --all, not both")
    if csv_file and not compare:
        raise click.UsageError("--csv needs --compare published")
    if check and not explain:
        raise click.UsageError("--check needs --explain")
    if every and (workload is not None or explain or html):
        raise click.UsageError("--workload, --explain and --html need a PROBLEM")
    model = get_device(device or ("b200-1500" if compare else "auto"))
    if every or compare:
        if bound_set != "solar" or precision != "tolerance":
            raise click.UsageError("--all and --compare show our bounds at --precision tolerance")
        _compare(problem, model, compare is not None, csv_file, jobs, as_json)
        return
    assert problem is not None
    chosen = as_problem(problem, profile, model, blobs)  # type: ignore[arg-type]
    if workload is not None:
        if not 0 <= workload < len(chosen.workloads):
            raise click.BadParameter(
                f"{chosen.id} has workloads 0 to {len(chosen.workloads) - 1}",
                param_hint="--workload",
            )
        chosen = chosen.with_workloads([workload])
    if explain or html:
        _explain(chosen, model, seed, precision, html, explain, as_json)
        if check:
            _check(chosen, seed)
    elif bound_set == "published":
        _published(chosen, model, as_json)
    else:
        _table(chosen, model, seed, precision, as_json)


def _table(problem: Problem, device: Device, seed: int, precision: str, as_json: bool) -> None:
    from ..evaluate.bounds import published_row
    from ..solar import analyze
    from ..solar.explanation import human_size

    table = Table(title=f"{problem.id} on {device.key} ({problem.profile} workloads)")
    left = ("axes", "bound by")
    for name in ("axes", "T_SOL ms", "bound by", "moved", "FLOP", "published", "complete"):
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    notes: list[str] = []
    with render.progress("analyzing", quiet=as_json) as update:
        for index, item in enumerate(problem.workloads):
            update("workload", index, len(problem.workloads))
            bound = analyze(problem, item, device, seed=seed, precision=precision)  # type: ignore[arg-type]
            row = published_row(problem, item) if device.key.startswith("b200") else None
            published_ms = row.t_sol_ms if row else None
            if as_json:
                record = {**bound.model_dump(mode="json"), "published_ms": published_ms}
                click.echo(json.dumps(record))
                continue
            notes += [note for note in bound.notes if note not in notes]
            table.add_row(
                " ".join(f"{k}={v}" for k, v in item.axes.items()),
                render.milliseconds(bound.t_sol_ms),
                bound.bound_by,
                human_size(bound.total_bytes),
                f"{bound.flops:.4g}",
                render.milliseconds(published_ms),
                "yes" if bound.complete else "no",
            )
    if not as_json:
        render.console.print(table)
        for note in notes:
            render.console.print(f"note: {note}", markup=False)


def _published(problem: Problem, device: Device, as_json: bool) -> None:
    from ..evaluate.bounds import bound_times

    bound_set: BoundSet = "published"
    for item, time in zip(problem.workloads, bound_times(problem, device, bound_set), strict=True):
        assert time is not None
        if as_json:
            record = {"problem": problem.id, "workload": item.uuid, "t_sol_ms": time.t_sol_ms}
            click.echo(json.dumps(record | {"bound_set": bound_set}))
        else:
            axes = " ".join(f"{k}={v}" for k, v in item.axes.items())
            click.echo(f"{time.t_sol_ms:.4f} ms  {axes}")


def _explain(
    problem: Problem, device: Device, seed: int, precision: str, html: Path | None, text: bool, as_json: bool,
) -> None:  # fmt: skip
    from ..evaluate.bounds import published_row
    from ..solar.explain import explain
    from ..solar.page import html as page

    if html is not None and len(problem.workloads) > 1:
        raise click.UsageError("--html shows one workload; choose it with --workload")
    for item in problem.workloads:
        row = published_row(problem, item) if device.key.startswith("b200") else None
        explanation = explain(
            problem, item, device, seed=seed, precision=precision,  # type: ignore[arg-type]
            published_ms=row.t_sol_ms if row else None, baseline_ms=row.t_b_ms if row else None,
        )  # fmt: skip
        if html is not None:
            html.write_text(page(explanation), encoding="utf-8")
            click.echo(f"wrote {html}", err=True)
        if as_json:
            click.echo(explanation.model_dump_json())
        elif text:
            click.echo(f"{explanation}\n")


def _check(problem: Problem, seed: int) -> None:
    """Feel every workload's inputs; exit code 1 if something that counts as read is not."""
    from ..solar.proof import feel

    unfelt = False
    for item in problem.workloads:
        for found in feel(problem, item, seed=seed):
            unfelt |= found.changed < found.tried
            click.echo(
                f"{found.tensor}: {found.changed} of {found.tried} elements tried change an output"
            )
    if unfelt:
        click.echo("error: not every element that counts as read changes an output", err=True)
        sys.exit(1)


@click.command("learn-rules")
@click.argument("problem")
@click.option("--workload", type=int, default=0, show_default=True, help="Index of the workload.")
@click.option("--model", required=True, help="Model of the OpenAI-compatible endpoint.")
@click.option("--base-url", help="Its address; default: OPENAI_BASE_URL. The key: OPENAI_API_KEY.")
@click.option("--rounds", type=click.IntRange(min=1), default=4, show_default=True)
def learn_rules(problem: str, workload: int, model: str, base_url: str | None, rounds: int) -> None:
    """Ask a language model for rules of the operations of PROBLEM that bounds have none for.

    A rule is kept only if executing it gives what torch does; see docs/bounds.md. The exit code is 1
    if an operation is left without one.
    """
    from ..device import get_device
    from ..evaluate.client import as_problem
    from ..solar.synthesis import Endpoint, learn

    chosen = as_problem(problem, None, get_device("h200"), None)
    if not 0 <= workload < len(chosen.workloads):
        raise click.BadParameter(
            f"{chosen.id} has workloads 0 to {len(chosen.workloads) - 1}", param_hint="--workload"
        )
    outcomes = learn(chosen, chosen.workloads[workload], Endpoint(model, base_url), rounds=rounds)
    if not outcomes:
        click.echo(f"{chosen.id}: every operation has a rule")
    for outcome in outcomes:
        if outcome.accepted:
            click.echo(
                f"{outcome.signature}: accepted after {outcome.rounds} rounds, {outcome.file}"
            )
        else:
            click.echo(f"{outcome.signature}: refused, {outcome.reason}", err=True)
    if not all(outcome.accepted for outcome in outcomes):
        sys.exit(1)


def _compare(
    problem: str | None, device: Device, with_published: bool, csv_file: Path | None, jobs: int, as_json: bool,
) -> None:  # fmt: skip
    from ..evaluate.comparison import Comparison, compare, summarize, write_csv
    from ..problems import list_ids, resolve

    if with_published and device.key != "b200-1500":
        raise click.UsageError("the published figures are for --device b200-1500")
    ids = [resolve(problem)] if problem else list_ids()
    rows: list[Comparison] = []
    with render.progress("analyzing", quiet=as_json) as update:
        for row in compare(ids, device, jobs=jobs, on_progress=update):
            rows.append(row)
            if as_json:
                click.echo(row.model_dump_json())
    rows.sort(key=lambda r: (ids.index(r.problem), r.index))
    if csv_file is not None:
        write_csv(rows, csv_file)
    summary = summarize(rows)
    if not as_json:
        if problem and with_published:
            render.console.print(_lines(f"{ids[0]} on {device.key}", _comparison_rows(rows)))
        elif with_published:
            render.console.print(_lines("causes", summary.table()))
        for line in summary.lines(with_published):
            render.console.print(line, markup=False, soft_wrap=True)
    if with_published and summary.unexplained:
        for row in summary.unexplained[:20]:
            click.echo(
                f"no cause: {row.problem} workload {row.index}: ours {row.t_sol_ms}, published "
                f"{row.published_ms}, ratio {row.ratio}",
                err=True,
            )
        click.echo(
            f"error: {len(summary.unexplained)} deviations have no cause; look at "
            "`sol-gym sol ID --workload K --explain` and add one to baselines/b200/causes.json",
            err=True,
        )
        sys.exit(1)
    if summary.failed:
        raise BoundError(f"{len(summary.failed)} workloads could not be analyzed")


def _comparison_rows(rows: list[Any]) -> Iterator[dict[str, str]]:
    for row in rows:
        yield {
            "workload": str(row.index),
            "ours ms": render.milliseconds(row.t_sol_ms),
            "published ms": render.milliseconds(row.published_ms),
            "ratio": "-" if row.ratio is None else f"{row.ratio:.3f}",
            "bound by": row.bound_by or "-",
            "cause": row.cause or "",
        }


def _lines(title: str, rows: Any) -> Table:
    table = Table(title=title)
    for number, row in enumerate(rows):
        if not number:
            for name in row:
                table.add_column(name, overflow="fold")
        table.add_row(*row.values())
    return table
