"""Tables and progress for people."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..evaluation import Evaluation, Finding, Severity, Status, WorkloadResult

console = Console()
_COLOURS = {Status.PASSED: "green", Status.INFRA_ERROR: "magenta", Status.BELOW_SOL: "yellow"}


def coloured(status: Status) -> str:
    """A status as rich markup."""
    return f"[{_COLOURS.get(status, 'red')}]{status.value}[/]"


def milliseconds(value: float | None) -> str:
    """A time in ms with four significant digits; a dash where there is none."""
    return "-" if value is None else f"{value:.4g}"


def score(value: float | None) -> str:
    """A score with three decimals; a dash where it is unknown."""
    return "-" if value is None else f"{value:.3f}"


def short(text: str, limit: int = 90) -> str:
    """The last informative line of a message, cut to `limit`."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    line = lines[-1] if lines else ""
    return line if len(line) <= limit else line[: limit - 3] + "..."


def workload_table(evaluation: Evaluation) -> Table:
    """One row a workload."""
    table = Table(title=f"{evaluation.problem} ({evaluation.provenance.profile} workloads)")
    for name in (
        "axes",
        "status",
        "T_k ms",
        "T_b ms",
        "T_SOL ms",
        "score",
        "bound by",
        "mode",
        "why",
    ):
        table.add_column(
            name, justify="right" if "ms" in name or name == "score" else "left", overflow="fold"
        )
    for result in evaluation.results:
        table.add_row(*_workload_row(result))
    return table


def _workload_row(result: WorkloadResult) -> list[str]:
    timing = result.timing
    remarks = "; ".join(timing.marks) if timing else ""
    return [
        " ".join(f"{k}={v}" for k, v in result.axes.items()),
        coloured(result.status),
        milliseconds(result.t_k_ms),
        milliseconds(result.t_b_ms),
        milliseconds(result.t_sol_ms),
        score(result.score),
        result.bound_by or "-",
        timing.mode if timing else "-",
        short(result.message or remarks),
    ]


def summary(evaluation: Evaluation) -> str:
    """One line: status, score and what it was measured on."""
    p = evaluation.provenance
    return (
        f"{coloured(evaluation.status)}  score {score(evaluation.score)}  on {p.device} ({p.device_name}), "
        f"{p.profile} workloads, {p.inputs_profile} inputs, baseline {p.baseline_set or 'none'}"
    )


_WEIGHT = {Severity.VETO: "red", Severity.SUSPICIOUS: "yellow", Severity.NOTE: "dim"}


def findings(found: list[Finding]) -> None:
    """Print what the audit saw, one finding a paragraph, in the order given."""
    for finding in found:
        console.print(
            f"{finding.severity.value}: {finding}", markup=False, style=_WEIGHT[finding.severity],
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def isolation_line(layers: dict[str, bool | str]) -> str:
    """Which isolation layers held."""
    on = [name for name, state in layers.items() if state is True]
    off = [f"{name} ({state})" for name, state in layers.items() if state is not True]
    return f"isolation: {', '.join(on) or 'none'}" + (f"; missing: {', '.join(off)}" if off else "")


@contextlib.contextmanager
def progress(title: str, *, quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar fed by (stage, done, total); drawn on standard error only."""
    if quiet:
        yield lambda *_: None
        return
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task(title, total=None)

        def update(stage: str, done: int, total: int) -> None:
            bar.update(
                task,
                description=f"{title}: {stage}",
                completed=done,
                total=total if total > 1 else None,
            )

        yield update
