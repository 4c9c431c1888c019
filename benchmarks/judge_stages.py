"""Where the judge's time goes: stages and requests to the worker, per evaluation, without a client.

    python benchmarks/judge_stages.py [--only TEXT] [--evaluations N] [--inputs strict] [--profile]

For each kernel N evaluations in one process, without scoring; with --profile the last one also
under cProfile, by own and by cumulated time. Needs an NVIDIA GPU. With CUDA_LAUNCH_BLOCKING=1 the
device's time is charged to whoever launched the work.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from sol_gym.device import detect
from sol_gym.problems import load
from sol_gym.sandbox.judge import Judge
from sol_gym.sandbox.process import Worker
from sol_gym.sandbox.request import Request
from sol_gym.solution import load_solution

_KERNELS = Path(__file__).parent / "kernels"
CASES = [
    ("FIB/021_rmsnorm_h128", "fib_021_rmsnorm_h128.py", None),
    ("FIB/021_rmsnorm_h128", "fib_021_rmsnorm_h128.py", [0, 7, 13]),
    ("FIB/021_rmsnorm_h128", "fib_021_rmsnorm_h128_plain.cu", None),
    ("L1/069_rms_norm", "l1_069_rms_norm.py", None),
]


def main() -> None:
    """Print a block a kernel."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--evaluations", type=int, default=3)
    parser.add_argument("--inputs", choices=["compatible", "strict"], default="strict")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    asked: Counter[str] = Counter()
    plain_ask = Worker.ask

    def timed_ask(worker: Worker, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        start = time.perf_counter()
        try:
            return plain_ask(worker, message, timeout_s)
        finally:
            asked[message["cmd"]] += time.perf_counter() - start  # type: ignore[assignment]

    Worker.ask = timed_ask  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as cache:
        judge = Judge(detect(), cache=Path(cache))
        try:
            for problem_id, file, indices in CASES:
                if arguments.only not in file:
                    continue
                problem = load(problem_id)
                problem = problem if indices is None else problem.with_workloads(indices)
                for number in range(1, 1 + arguments.evaluations):
                    asked.clear()
                    profile = cProfile.Profile()
                    profiled = arguments.profile and number == arguments.evaluations
                    start = time.perf_counter()
                    if profiled:
                        profile.enable()
                    solution = load_solution(_KERNELS / file)
                    outcome = judge.evaluate(
                        Request(problem, solution, inputs_profile=arguments.inputs)
                    )
                    profile.disable()
                    seconds = time.perf_counter() - start
                    failed = [r.status for r in outcome.results if r.status != "PASSED"]
                    print(f"{file} ({len(outcome.results)} workloads) {seconds:.2f} s {failed}")
                    for title, table in (("stages", outcome.stages_s), ("requests", asked)):
                        parts = (f"{k} {v:.3f}" for k, v in table.items() if v >= 5e-4)
                        print(f"  {title}: {', '.join(parts)}", flush=True)
                    if profiled:
                        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
                        pstats.Stats(profile).sort_stats("cumtime").print_stats("sol_gym", 60)
        finally:
            judge.close()


if __name__ == "__main__":
    main()
