"""`sol-gym demo`: real kernels judged on a real problem, on whatever device is here."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from ..solution import Solution, load_solution
from . import render

PROBLEM = "FIB/021_rmsnorm_h128"
_KERNELS = Path(__file__).parent / "kernels"


def entries(device_key: str, reference: str) -> list[tuple[str, Solution]]:
    """The four solutions of the demo: label and solution."""
    good = "rmsnorm.cpp" if device_key == "cpu" else "rmsnorm_triton.py"
    return [
        ("the reference", Solution.from_text(reference, name="reference")),
        (f"a good kernel ({good})", load_solution(_KERNELS / good)),
        ("a wrong one: forgets the weight", load_solution(_KERNELS / "wrong_no_weight.py")),
        ("a cheat: replays its first answer", load_solution(_KERNELS / "cheat_replay.py")),
    ]


@click.command()
@click.option(
    "--device", default="auto", show_default=True, help="Device key: auto, cpu, h200, h100, b200."
)
@click.option("--problem", default=PROBLEM, hidden=True)
def demo(device: str, problem: str) -> None:
    """Judge a reference, a good kernel, a wrong one and a cheat on one problem."""
    from ..evaluate.client import Evaluator, as_problem

    table = Table(title=f"{problem}: RMSNorm over rows of 128")
    for name in ("solution", "status", "T_k ms", "T_b ms", "T_SOL ms", "score", "why"):
        table.add_column(
            name, justify="right" if "ms" in name or name == "score" else "left", overflow="fold"
        )
    with Evaluator(device) as evaluator, render.progress("demo") as update:
        chosen = as_problem(problem, None, evaluator.device)
        evaluations = []
        for label, solution in entries(evaluator.device.key, chosen.reference):
            update(label, 0, 1)
            evaluation = evaluator.evaluate(chosen, solution, on_progress=update)
            evaluations.append(evaluation)
            # The largest workload stands for the problem; the score is over all of them.
            result = max(evaluation.results, key=lambda r: r.t_b_ms or 0.0, default=None)
            table.add_row(
                label,
                render.coloured(evaluation.status),
                render.milliseconds(result.t_k_ms if result else None),
                render.milliseconds(result.t_b_ms if result else None),
                render.milliseconds(result.t_sol_ms if result else None),
                render.score(evaluation.score),
                render.short(evaluation.message.split(";")[0], 60),
            )
    provenance = evaluations[0].provenance  # The reference passed: it has a baseline.
    render.console.print(table)
    render.console.print(
        f"device: {provenance.device} ({provenance.device_name}), {len(chosen.workloads)} {provenance.profile} "
        f"workloads; times of the slowest one, score over all; "
        f"baseline: fastest of reference and torch.compile ({provenance.baseline_set})"
    )
    render.console.print(render.isolation_line(provenance.isolation))
