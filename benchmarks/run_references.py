"""Run every reference on every workload that fits the device: time, memory, any failure.

    python benchmarks/run_references.py --out FOLDER
    python benchmarks/run_references.py L1/069 FIB --out FOLDER     # ids or their beginnings
    python benchmarks/run_references.py --device cpu --profile smoke --out FOLDER

No judge, no scoring: one call to warm up, one timed, on inputs of the compatible profile. Each
workload is a row of references.jsonl; references.md is a line per problem. On a GPU a row has what
the reference's own tensors took in the timed call, beside the estimate (problems/memory.json, or
made here for smoke workloads); a CPU's allocator does not tell. Workloads whose inputs and estimate
exceed the device's memory are named and not run. No failure ends the run.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch

from sol_gym.footprint import reference_peak_bytes
from sol_gym.inputs import InputMaker
from sol_gym.problem import Problem, Workload
from sol_gym.problems import list_ids, load
from sol_gym.problems import reference_peak_bytes as stored_peak_bytes
from sol_gym.sandbox.reference import InvalidReference, Reference

_GIB = 1 << 30


def run_problem(problem: Problem, device: str, memory_bytes: int) -> list[dict[str, Any]]:
    """A row for each workload."""
    rows: list[dict[str, Any]] = []
    estimates = estimated_bytes(problem)
    for workload, estimate in zip(problem.workloads, estimates, strict=True):
        row: dict[str, Any] = {
            "problem": problem.id,
            "uuid": workload.uuid,
            "axes": workload.axes,
            "declared_bytes": problem.declared_bytes(workload),
            "estimated_bytes": estimate,
        }
        inputs = sum(t.nbytes for t in problem.tensors(workload).values())
        if inputs + (estimate or 0) > memory_bytes:
            needed = (inputs + (estimate or 0)) / _GIB
            row |= {"status": "does not fit", "error": f"needs about {needed:.1f} GiB"}
        else:
            row |= run_one(problem, workload, device)
        rows.append(row)
        gc.collect()
        if device == "cuda" and torch.cuda.memory_reserved() > 0.3 * memory_bytes:
            torch.cuda.empty_cache()
    return rows


def estimated_bytes(problem: Problem) -> list[int | None]:
    """What the reference's own tensors should take; None where that is not known."""
    if problem.profile == "full":
        return stored_peak_bytes(problem.id) or [None] * len(problem.workloads)
    return [_estimate(problem, workload) for workload in problem.workloads]


def _estimate(problem: Problem, workload: Workload) -> int | None:
    try:
        return reference_peak_bytes(problem, workload)
    except Exception:  # Whatever a reference raises whose course depends on values.
        return None


def run_one(problem: Problem, workload: Workload, device: str) -> dict[str, Any]:
    """Milliseconds, bytes and what the outputs look like; or the failure."""
    cuda = device == "cuda"
    found: dict[str, Any] = {"status": "ok"}
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        reference = Reference(problem)
        outputs = problem.outputs(workload)
        arguments = list(InputMaker(problem, workload, device, seed=0).draw().values())
        reference(arguments, outputs)
        if cuda:
            torch.cuda.synchronize()
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        results, found["ms"] = _timed(reference, arguments, outputs, cuda)
        if cuda:
            # Libraries' lasting workspaces were there before; temporary ones are counted.
            peak = torch.cuda.max_memory_allocated()
            found["reference_bytes"] = peak - before
            found["peak_bytes"] = max(found["peak_bytes"], peak)
        found["finite"] = all(
            bool(torch.isfinite(r if r.dtype.itemsize > 1 else r.float()).all())
            for r in results
            if r.is_floating_point() and "float4" not in str(r.dtype)
        )
    except torch.OutOfMemoryError as error:
        found |= {"status": "does not fit", "error": str(error).split(" GPU ")[0][:160]}
    except InvalidReference as error:
        fits = "OutOfMemoryError" not in str(error)
        found |= {"status": "failed" if fits else "does not fit", "error": str(error)[:300]}
    except Exception as error:
        found |= {"status": "failed", "error": f"{type(error).__name__}: {error}"[:300]}
    return found


def _timed(
    reference: Reference, arguments: list[Any], outputs: dict[str, Any], cuda: bool
) -> tuple[list[torch.Tensor], float]:
    if not cuda:
        start = time.perf_counter()
        results = reference(arguments, outputs)
        return results, 1e3 * (time.perf_counter() - start)
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    results = reference(arguments, outputs)
    second.record()
    torch.cuda.synchronize()
    return results, first.elapsed_time(second)


def line_of(problem: Problem, rows: list[dict[str, Any]]) -> str:
    """A problem's line of the table."""
    good = [row for row in rows if row["status"] == "ok"]
    times = [row["ms"] for row in good]
    middle = math.exp(sum(map(math.log, times)) / len(times)) if times else math.nan
    peaks = [row["peak_bytes"] / _GIB for row in rows if "peak_bytes" in row]
    own = [row["reference_bytes"] / _GIB for row in good if "reference_bytes" in row]
    ratios = [
        row["reference_bytes"] / row["estimated_bytes"]
        for row in good
        if row["estimated_bytes"] and "reference_bytes" in row
    ]
    notes = [f"{row['uuid'][:8]}: {row['status']}" for row in rows if row["status"] != "ok"]
    if not all(row["finite"] for row in good):
        notes.append(f"{sum(not row['finite'] for row in good)} with non-finite outputs")
    cells = [
        problem.id,
        f"{len(good)}/{len(problem.workloads)}",
        f"{middle:.3f}",
        f"{max(times, default=math.nan):.3f}",
        f"{max(peaks):.2f}" if peaks else "-",
        f"{max(own):.2f}" if own else "-",
        f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-",
        "; ".join(notes),
    ]
    return f"| {' | '.join(cells)} |"


def chosen_ids(beginnings: list[str], start: str) -> list[str]:
    """Ids in library order that begin with any of `beginnings` (all if empty), from `start` on."""
    ids = list_ids()
    if start:
        ids = ids[next((i for i, name in enumerate(ids) if name.startswith(start)), len(ids)) :]
    return [name for name in ids if not beginnings or name.startswith(tuple(beginnings))]


def main() -> None:
    """Run, print a line per problem, write both files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "ids", nargs="*", help="Ids or their beginnings, e.g. L1/069 FIB; else all."
    )
    parser.add_argument("--start", default="", help="Begin with this id, in library order.")
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="Stop after so many seconds."
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--profile", choices=["full", "smoke"], default="full")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu --profile smoke runs small workloads")
    names = chosen_ids(arguments.ids, arguments.start)
    if not names:
        parser.error(f"no problem's id begins with {' or '.join(arguments.ids)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if arguments.device == "cuda":
        memory_bytes = torch.cuda.get_device_properties(0).total_memory
    else:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = [
        "| problem | workloads run | geomean ms | slowest ms | peak GiB | reference GiB | measured / estimate | remarks |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    start = time.perf_counter()
    with (arguments.out / "references.jsonl").open("w") as file:
        for name in names:
            if time.perf_counter() - start > arguments.budget:
                print(f"budget used up before {name}")
                break
            problem = load(name, profile=arguments.profile)
            rows = run_problem(problem, arguments.device, memory_bytes)
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            lines.append(line_of(problem, rows))
            print(lines[-1], flush=True)
    print(f"{len(lines) - 2} problems in {time.perf_counter() - start:.0f} s")
    (arguments.out / "references.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
