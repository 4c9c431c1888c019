"""Tables and progress for people."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..evaluate.card import Card
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


def print_card(card: Card) -> None:
    """A problem's card."""
    console.print(f"[bold]{card.id}[/]  {card.title}")
    facts = (
        card.family, card.direction, f"{card.precision} work" if card.precision else "",
        f"from {card.source_model}" if card.source_model else "",
    )  # fmt: skip
    console.print(" · ".join(f for f in facts if f), style="dim", markup=False)
    if card.description:
        console.print(card.description, markup=False)
    table = Table()
    for name in ("", "tensor", "shape", "dtype", "remark"):
        table.add_column(name)
    for role, tensors in (("in", card.inputs), ("out", card.outputs)):
        for tensor in tensors:
            shape = "number" if tensor.shape is None else f"\\[{', '.join(tensor.shape)}]"
            table.add_row(role, tensor.name, shape, tensor.dtype, "never read" * tensor.unread)
    console.print(table)
    if card.constants:
        console.print("where " + ", ".join(f"{k} = {v}" for k, v in card.constants.items()))
    for note in card.notes:
        console.print(f"- {note}", markup=False)
    for name, description in card.recipes.items():
        console.print(f"- Input recipe {name!r}: {description}", markup=False)
    if card.strict:
        console.print("Strict inputs vary " + "; ".join(card.strict), markup=False, style="dim")
    console.print(_sizes_of(card))
    if any(w.t_sol_ms is not None or w.t_b_ms is not None for w in card.workloads):
        console.print(_times_of(card))
    for remark in card.remarks:
        console.print(f"note: {remark}", markup=False)


def _sizes_of(card: Card) -> Table:
    table = Table(title=f"{len(card.workloads)} {card.profile} workloads")
    table.add_column("#", justify="right")
    table.add_column("axes", overflow="fold")
    for name in ("MiB in", "MiB out", "GiB needed", "atol", "rtol", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for w in card.workloads:
        t = w.tolerance
        table.add_row(
            str(w.index), " ".join(f"{k}={v}" for k, v in w.axes.items()),
            _scaled(w.input_bytes, 2**20), _scaled(w.output_bytes, 2**20),
            _scaled(w.needed_bytes, 2**30),
            f"{t.max_atol:g}", f"{t.max_rtol:g}", f"{t.required_matched_ratio:g}",
        )  # fmt: skip
    return table


def _times_of(card: Card) -> Table:
    published = any(w.published_t_sol_ms is not None for w in card.workloads)
    table = Table(title=f"work, bounds and baseline on {card.device}")
    table.add_column("#", justify="right")
    for name in ("MiB read", "written", "GFLOP", "T_SOL ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for name in (*["published"] * published, "T_b ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for w in card.workloads:
        table.add_row(
            str(w.index), _scaled(w.read_bytes, 2**20), _scaled(w.written_bytes, 2**20),
            _scaled(w.flops, 1e9), milliseconds(w.t_sol_ms),
            (w.bound_by or "-") + " (loose)" * (w.bound_complete is False),
            *[milliseconds(w.published_t_sol_ms)] * published, milliseconds(w.t_b_ms),
        )  # fmt: skip
    return table


def _scaled(value: int | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:,.4g}"


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
