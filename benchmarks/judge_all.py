"""Judge references and hand-written kernels on all workloads; writes a Markdown table and JSONL.

python benchmarks/judge_all.py --what references|kernels|unrounded [--only TEXT] [--timeout S]
    [--profile compatible|strict] [--workloads N] [--no-timing] [--time-limit S] --out FOLDER

With `--profile strict` the table also has the largest error on strict sets (in units of the
reference's own against float64), how many were compared, how long that took, and why others were
left out.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

from sol_gym.device import Device, detect
from sol_gym.evaluate import Evaluator
from sol_gym.evaluate.bounds import least_bound
from sol_gym.evaluation import Evaluation
from sol_gym.problems import list_ids, load, resolve
from sol_gym.solution import Solution, load_solution
from sol_gym.store import Store

_KERNELS = Path(__file__).parent / "kernels"
_SUBSETS = {"l1": "L1", "l2": "L2", "quant": "Quant", "fib": "FIB"}


def jobs(what: str) -> list[tuple[str, str, Solution]]:
    """(problem id, label, solution)."""
    if what == "references":
        return [
            (
                name,
                "reference",
                Solution.from_text(load(name).reference, name="reference", language="pytorch"),
            )
            for name in list_ids()
        ]
    found = []
    folder = _KERNELS if what == "kernels" else _KERNELS / what
    for file in sorted(folder.iterdir()):
        if file.suffix in (".py", ".cu"):
            subset, number, *_ = file.stem.split("_")
            found.append((resolve(f"{_SUBSETS[subset]}/{number}"), file.name, load_solution(file)))
    return found


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _strict_cells(evaluation: Evaluation) -> list[str]:
    """Largest error on strict sets, how many were compared, seconds, and what was left out."""
    records = [r.correctness for r in evaluation.results if r.correctness]
    errors = [c.strict_error for c in records if c.strict_error is not None]
    skipped = Counter(text.split(": ", 1)[1] for c in records for text in c.strict_skipped)
    seconds = evaluation.provenance.stages_s.get("strict", 0.0)
    return [
        f"{max(errors):.3g}" if errors else "-",
        str(sum(c.strict_rounds for c in records)),
        f"{seconds:.2f}",
        "; ".join(f"{count}x {reason[:80]}" for reason, count in skipped.most_common()) or "-",
    ]


def _closest(problem_id: str, evaluation: Evaluation, device: Device) -> str:
    """The least T_k / T_SOL over the workloads; below 1 a bound would be beaten."""
    workloads = {w.uuid: w for w in load(problem_id).workloads}
    ratios = [
        r.timing.t_k_ms / least_bound(load(problem_id), workloads[r.uuid], device).t_sol_ms
        for r in evaluation.results
        if r.timing and r.uuid in workloads
    ]
    return f"{min(ratios):.2f}" if ratios else "-"


def main() -> None:
    """Judge, print a line each, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--what", choices=["references", "kernels", "unrounded"], required=True)
    parser.add_argument("--only", default="", help="Comma-separated parts of names.")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--profile", choices=["compatible", "strict"], default="compatible")
    parser.add_argument("--no-scoring", action="store_true", help="No bounds, no baseline.")
    parser.add_argument("--no-timing", action="store_true", help="Correctness only.")
    parser.add_argument("--workloads", type=int, help="So many of a problem's, evenly spaced.")
    parser.add_argument("--time-limit", type=float, help="Seconds after which no more are begun.")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    store = Store(arguments.out / f"{arguments.what}.jsonl")
    head = [
        "problem",
        "solution",
        "workloads",
        "status",
        "score",
        "geomean T_b/T_k",
        "least T_k/T_SOL",
        "seconds",
    ]
    if arguments.profile == "strict":
        head += ["strict error", "strict sets", "strict seconds", "left out"]
    lines = [_row(head), _row(["---"] * len(head))]
    device, begin = detect(), time.perf_counter()
    with Evaluator() as evaluator:
        for problem_id, label, solution in jobs(arguments.what):
            wanted = arguments.only.split(",")
            if not any(part in f"{problem_id} {label}" for part in wanted):
                continue
            start = time.perf_counter()
            limit = arguments.time_limit
            if limit is not None and start - begin > limit:
                print(f"the time limit ends it before {problem_id}")
                break
            problem = load(problem_id)
            total = len(problem.workloads)
            if arguments.workloads and arguments.workloads < total:
                step = total / arguments.workloads
                chosen = [int((i + 0.5) * step) for i in range(arguments.workloads)]
                problem, total = problem.with_workloads(chosen), len(chosen)
            evaluation = evaluator.evaluate(
                problem, solution, timeout_s=arguments.timeout, scoring=not arguments.no_scoring,
                timing=not arguments.no_timing, inputs_profile=arguments.profile,
            )  # fmt: skip
            seconds = time.perf_counter() - start
            store.append(evaluation)
            good = sum(r.status == "PASSED" for r in evaluation.results)
            score = "-" if evaluation.score is None else f"{evaluation.score:.3f}"
            speedup = "-" if evaluation.speedup is None else f"{evaluation.speedup:.2f}"
            cells = [
                problem_id, label, f"{good}/{total}", evaluation.status, score, speedup,
                _closest(problem_id, evaluation, device), f"{seconds:.1f}",
            ]  # fmt: skip
            if arguments.profile == "strict":
                cells += _strict_cells(evaluation)
            lines.append(_row(cells))
            print(
                lines[-1],
                evaluation.message[:300].replace("\n", " ")
                if evaluation.status != "PASSED"
                else "",
                flush=True,
            )
    (arguments.out / f"{arguments.what}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
