"""How long the bounds of all full workloads take, from an empty cache and again from a full one.

python benchmarks/solar_speed.py [--jobs N] [--only TEXT]

CPU seconds are those of this process and its children: on a machine that others use too, they say
more than the wall clock.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections import Counter

from sol_gym.device import get_device
from sol_gym.evaluate.comparison import Comparison, compare, summarize
from sol_gym.problems import list_ids


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    usages = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usages)


def main() -> None:
    """Analyze twice and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="Part of the ids of the problems to analyze.")
    arguments = parser.parse_args()
    device = get_device("b200-1500")
    ids = [i for i in list_ids() if arguments.only in i]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SOL_GYM_CACHE"] = cache
        print(
            "| run | workloads | wall s | CPU s | load average |\n| --- | --- | --- | --- | --- |"
        )
        rows: list[Comparison] = []
        for run in ("empty cache", "full cache"):
            wall, cpu = time.perf_counter(), cpu_seconds()
            rows = list(compare(ids, device, jobs=arguments.jobs))
            took = time.perf_counter() - wall
            print(
                f"| {run} | {len(rows)} | {took:.1f} | {cpu_seconds() - cpu:.1f} | "
                f"{os.getloadavg()[0]:.1f} |",
                flush=True,
            )
    for line in summarize(rows).lines(True):
        print(line)
    print("not complete:", dict(Counter(r.problem for r in rows if not r.complete)))


if __name__ == "__main__":
    main()
