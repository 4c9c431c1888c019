"""`sol-gym redteam`: cheats and honest look-alikes through the judge."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from . import render

if TYPE_CHECKING:
    from ..redteam import Trial

_COLOURS = {
    "caught": "green", "harmless": "green", "passed": "green", "escaped": "bold red", "flagged": "bold red",
    "error": "magenta", "needs strict inputs": "yellow", "skipped": "dim",
}  # fmt: skip


@click.command("redteam")
@click.argument("path", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--device", default="auto", show_default=True, help="Device key: auto, cpu (or cuda for the GPU that is here), h200 ...")  # fmt: skip
@click.option("--only", multiple=True, help="Only families or files whose name contains this (repeatable).")  # fmt: skip
@click.option("--profile", type=click.Choice(["full", "smoke"]), help="Workloads; default: smoke on a CPU, else full.")  # fmt: skip
@click.option("--inputs", "inputs_profile", default="strict", show_default=True, help="Inputs profile: strict, or compatible.")  # fmt: skip
@click.option("--time-limit", "time_limit_s", type=float, help="Begin no file after this many seconds.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), help="Append each result to this JSONL file as it comes.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True)
def redteam(
    path: Path | None,
    device: str,
    only: tuple[str, ...],
    profile: str | None,
    inputs_profile: str,
    time_limit_s: float | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run a corpus of cheats (PATH: a folder or a file; default: the project's tests/exploits).

    Each cheat runs with the audit off; what the audit says is shown beside. The exit code is 0 if
    nothing escaped, no honest file was flagged and all were tried, 1 otherwise, 2 on bad arguments.
    """
    from ..evaluate import Evaluator
    from ..redteam import (
        BAD,
        OUT_OF_TIME,
        CorpusError,
        RedTeam,
        corpus_problem,
        own_corpus,
        read_corpus,
    )

    folder = path or own_corpus()
    exploits = read_corpus(folder)
    if only:
        exploits = [e for e in exploits if any(o in e.family or o in e.path.name for o in only)]
        if not exploits:
            raise CorpusError(f"no family or file of {folder} contains {' or '.join(only)}")
    start = time.monotonic()
    with (
        Evaluator("auto" if device == "cuda" else device, audit=False) as evaluator,
        render.progress("red team", quiet=as_json) as update,
    ):
        if device == "cuda" and evaluator.device.key == "cpu":
            raise CorpusError("there is no CUDA device here; use --device cpu")
        problem = corpus_problem(folder, evaluator.device, profile)  # type: ignore[arg-type]
        team = RedTeam(evaluator, problem, inputs_profile=inputs_profile)

        def keep(trial: Trial) -> None:
            if out:
                with open(out, "a") as file:
                    file.write(json.dumps(trial.to_json()) + "\n")

        trials = team.run(exploits, on_progress=update, on_trial=keep, time_limit_s=time_limit_s)
    bad = [t for t in trials if t.outcome in BAD or t.message == OUT_OF_TIME]
    facts = {
        "device": evaluator.device.key, "profile": problem.profile, "inputs_profile": team.inputs_profile, "margin": team.margin,
        "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip
    if as_json:
        click.echo(json.dumps({**facts, "trials": [t.to_json() for t in trials]}))
    else:
        _print(trials, facts)
    sys.exit(1 if bad else 0)


def _print(trials: list[Trial], facts: dict[str, object]) -> None:
    # A pipe has no width: give it one that a table fits into.
    console = render.console if render.console.is_terminal else Console(width=190)
    strict = [t for t in trials if t.outcome.value == "needs strict inputs"]
    for title, rows in (
        ("cheats", [t for t in trials if not t.exploit.honest and t not in strict]),
        ("cheats that only the strict inputs can tell (not used in this run)", strict),
        ("honest look-alikes", [t for t in trials if t.exploit.honest]),
    ):
        rows = [t for t in rows if t.outcome.value != "skipped"]
        if rows:
            console.print(_table(title, rows))
    counts = Counter(t.outcome.value for t in trials)
    console.print(", ".join(f"{n} {name}" for name, n in counts.items()))
    skipped = [t for t in trials if t.outcome.value == "skipped"]
    for why in dict.fromkeys(t.message for t in skipped):
        those = ", ".join(t.exploit.path.name for t in skipped if t.message == why)
        console.print(f"skipped ({why}): {those}", style="dim", markup=False)
    odd = [t for t in trials if not t.as_expected]
    for t in odd:
        console.print(
            f"{t.exploit.path.name}: stopped by {t.by}, its header says {', '.join(t.exploit.stopped_by)}",
            style="dim", markup=False,
        )  # fmt: skip
    console.print(
        f"device {facts['device']}, {facts['profile']} workloads, {facts['inputs_profile']} inputs, {facts['seconds']} s; a gain below "
        f"{facts['margin']} times counts as none; rules marked ! veto",
        style="dim", markup=False,
    )  # fmt: skip


def _table(title: str, rows: list[Trial]) -> Table:
    table = Table(title=title)
    for name in ("family", "file", "outcome", "by", "gain", "audit", "why"):
        table.add_column(name, justify="right" if name == "gain" else "left", overflow="fold")
    for t in sorted(rows, key=lambda t: (t.exploit.family, t.exploit.path.name)):
        colour = _COLOURS[t.outcome.value]
        table.add_row(
            t.exploit.family, t.exploit.path.name, f"[{colour}]{t.outcome.value}[/]", t.by,
            "-" if t.gain is None else f"{t.gain:.2f}", t.audited.replace("[", "\\["),
            render.short(t.message, 70).replace("[", "\\["),
        )  # fmt: skip
    return table
