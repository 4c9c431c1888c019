"""Run every reference on every workload that fits the device: time, peak memory, any failure.

    python benchmarks/run_references.py [--subset L1,L2,...] [--only TEXT] [--start ID] [--budget S] --out FOLDER

No judge, no scoring: one call to warm up, one timed with events, on inputs of the compatible
profile. Each workload is a row of references.jsonl; references.md is a line per problem. A workload
whose inputs, outputs or intermediates do not fit is named with the bytes it wanted.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from sol_gym.inputs import InputMaker
from sol_gym.problem import Problem, Workload
from sol_gym.problems import list_ids, load
from sol_gym.sandbox.reference import InvalidReference, Reference

_GIB = 1 << 30


def run_one(problem: Problem, reference: Reference, workload: Workload) -> dict[str, Any]:
    """Milliseconds, peak bytes and what the outputs look like; or the failure."""
    row: dict[str, Any] = {"problem": problem.id, "uuid": workload.uuid, "axes": workload.axes}
    outputs = problem.outputs(workload)
    row["declared_bytes"] = problem.declared_bytes(workload)
    torch.cuda.reset_peak_memory_stats()
    try:
        arguments = list(InputMaker(problem, workload, "cuda", seed=0).draw().values())
        first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        results = reference(arguments, outputs)
        del results
        first.record()
        results = reference(arguments, outputs)
        second.record()
        torch.cuda.synchronize()
        row["ms"] = first.elapsed_time(second)
        row["finite"] = all(
            bool(torch.isfinite(r.float()).all())
            for r in results
            if r.is_floating_point() and "float4" not in str(r.dtype)
        )
        row["status"] = "ok"
    except torch.OutOfMemoryError as error:
        row["status"], row["error"] = "does not fit", str(error).split(" GPU ")[0][:160]
    except (InvalidReference, RuntimeError, ValueError) as error:
        row["status"], row["error"] = "failed", str(error)[:300]
    row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def line_of(problem: Problem, rows: list[dict[str, Any]]) -> str:
    """A problem's line of the table."""
    good = [row for row in rows if row["status"] == "ok"]
    times = [row["ms"] for row in good]
    middle = math.exp(sum(map(math.log, times)) / len(times)) if times else float("nan")
    peak = max(row["peak_bytes"] for row in rows) / _GIB
    notes = [f"{row['uuid'][:8]}: {row['status']}" for row in rows if row["status"] != "ok"]
    if not all(row["finite"] for row in good):
        notes.append(f"{sum(not row['finite'] for row in good)} with non-finite outputs")
    return (
        f"| {problem.id} | {len(good)}/{len(problem.workloads)} | {middle:.3f} | "
        f"{max(times, default=float('nan')):.3f} | {peak:.2f} | {'; '.join(notes)} |"
    )


def main() -> None:
    """Run, print a line per problem, write both files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--subset", default="L1,L2,Quant,FIB")
    parser.add_argument("--only", default="")
    parser.add_argument("--start", default="", help="Skip problems of this subset before this id.")
    parser.add_argument("--budget", type=float, default=1e9, help="Stop after so many seconds.")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    lines = [
        "| problem | workloads run | geomean ms | slowest ms | peak GiB | remarks |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    start = time.perf_counter()
    with (arguments.out / "references.jsonl").open("w") as file:
        for subset in arguments.subset.split(","):
            for name in list_ids(subset):
                if arguments.only not in name:
                    continue
                if arguments.start.startswith(f"{subset}/") and name < arguments.start:
                    continue
                if time.perf_counter() - start > arguments.budget:
                    print(f"budget used up before {name}")
                    break
                problem = load(name)
                reference = Reference(problem)
                rows = []
                for workload in problem.workloads:
                    rows.append(run_one(problem, reference, workload))
                    file.write(json.dumps(rows[-1]) + "\n")
                    file.flush()
                    gc.collect()
                    if rows[-1]["peak_bytes"] > 40 * _GIB:
                        torch.cuda.empty_cache()
                lines.append(line_of(problem, rows))
                print(lines[-1], flush=True)
    print(f"{len(lines) - 2} problems in {time.perf_counter() - start:.0f} s")
    (arguments.out / "references.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
