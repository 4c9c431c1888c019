"""What Landlock, seccomp, private folders and devices, another user and control groups cost.

    python benchmarks/isolation_cost.py [--device cpu] [--evaluations N]

One judge evaluates an RMSNorm in plain PyTorch, correctness only, in turns with all layers and with
namespaces and limits alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from sol_gym.device import get_device
from sol_gym.evaluation import Status
from sol_gym.problems import load
from sol_gym.sandbox.fallback import SUSPECTS
from sol_gym.sandbox.judge import Judge
from sol_gym.sandbox.request import Request
from sol_gym.solution import Solution


def main() -> None:
    """Print a table: median and least seconds, without and with the layers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--evaluations", type=int, default=16)
    arguments = parser.parse_args()
    device = get_device(arguments.device)
    problem = load("FIB/021_rmsnorm_h128")
    problem = problem.with_profile("smoke") if device.key == "cpu" else problem
    solution = Solution.from_text(problem.definition.reference)
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(device, cache=Path(folder))
        try:
            whole = judge.limits
            few = replace(whole, leave_out=frozenset({*SUSPECTS, "other_user", "cgroup"}))
            seconds: dict[str, tuple[list[float], list[float]]] = {}
            judge.probe()  # The first worker waits for the zygote's imports.
            for number in range(2 * arguments.evaluations):
                judge.limits = (few, whole)[number % 2]
                start = time.perf_counter()
                outcome = judge.evaluate(Request(problem, solution, timing=False))
                took = time.perf_counter() - start
                if any(r.status is not Status.PASSED for r in outcome.results):
                    raise SystemExit(f"a good kernel failed: {outcome.results}")
                starting = outcome.stages_s["fork"] + outcome.stages_s["start"]
                for row, value in (("evaluation", took), ("of which the worker's start", starting)):
                    seconds.setdefault(row, ([], []))[number % 2].append(value)
        finally:
            judge.close()
    print("| seconds | namespaces and limits: median (least) | all layers: median (least) |")
    print("| --- | --- | --- |")
    for name, columns in seconds.items():
        cells = [f"{statistics.median(v):.2f} ({min(v):.2f})" for v in columns]
        print(f"| {name} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
