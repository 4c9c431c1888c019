"""DRAM traffic of real kernels by Nsight Compute, beside the bytes the bounds say are compulsory.

    python benchmarks/dram_bytes.py [--only TEXT] [--json FILE]

For every case the best kernel there is (written by hand, or torch.compile of the reference) runs once,
after a warm-up and with inputs pushed out of the L2, under `ncu`. Outputs that would stay in the L2 are
evicted by a kernel that only reads, whose writes are counted too. A bound that holds asks for no more
than was moved; the ratio says how much more the kernel moves. Needs an NVIDIA GPU and ncu's
permission to read its counters. Clocks are left alone.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_MOST_BYTES = 6 << 30
_EVICTOR = "evict_by_reading"
_READ, _WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
CASES = [
    ("FIB/012", "fib_012_gqa_paged_decode_h32_kv4_d128_ps1.py"),
    ("FIB/021", "fib_021_rmsnorm_h128.py"),
    ("FIB/022", None),
    ("FIB/023", None),
    ("FIB/024", None),
    ("FIB/025", None),
    ("FIB/026", None),
    ("L1/003", None),
    ("L1/007", "l1_007_hyena_fft_size_padding_rfft.py"),
    ("L1/008", "l1_008_expert_output_weighted_index_add_accumulation.py"),
    ("L1/010", None),
    ("L1/011", None),
    ("L1/013", "l1_013_fused_residual_rms_norm_backward.py"),
    ("L1/014", None),
    ("L1/015", "l1_015_grouped_query_attention_with_rope_and_qk_norm.py"),
    ("L1/025", None),
    ("L1/029", None),
    ("L1/030", None),
    ("L1/032", None),
    ("L1/069", "l1_069_rms_norm.py"),
    ("L2/004", "l2_004_fused_residual_rms_mlp.py"),
    ("L2/035", "l2_035_convnextv2_block_with_grn.py"),
    ("Quant/001", "quant_001_fp8_attention_output_projection.py"),
    ("Quant/024", "quant_024_nvfp4_attention_output_projection.py"),
]


def largest(problem: Any) -> int:
    """The workload with the most bytes among those that are not too large."""
    sizes = [problem.declared_bytes(w) for w in problem.workloads]
    fitting = [s for s in sizes if s <= _MOST_BYTES]
    return sizes.index(max(fitting) if fitting else min(sizes))


def run_cases(wanted: list[tuple[str, str | None]], report: Path) -> None:
    """In the profiled process: every case once, each followed by the evicting kernel."""
    import torch
    import triton
    import triton.language as tl
    from plain_calls import destinations, load_run

    from sol_gym.inputs import InputMaker
    from sol_gym.problems import load, resolve
    from sol_gym.sandbox.reference import Reference

    def evict_by_reading(source, result, count, block: tl.constexpr):
        at = tl.program_id(0) * block + tl.arange(0, block)
        total = tl.sum(tl.load(source + at, mask=at < count, other=0), axis=0)
        if total == 12345:  # Never: the memory is zero. Nothing is written.
            tl.store(result, total)

    kernel = triton.jit(evict_by_reading)
    memory = torch.zeros(64 << 20, dtype=torch.int32, device="cuda")

    def evict() -> None:
        kernel[(triton.cdiv(memory.numel(), 4096),)](memory, memory, memory.numel(), block=4096)

    evict()
    device = torch.device("cuda")
    profiler = torch.cuda.cudart()
    for short, file in wanted:
        row: dict[str, Any] = {"problem": short, "kernel": file or "torch.compile"}
        try:
            problem = load(resolve(short))
            index = largest(problem)
            workload = problem.workloads[index]
            arguments = list(InputMaker(problem, workload, device, seed=0).draw().values())
            row |= {"problem": problem.id, "workload": index, "axes": workload.axes}
            if file:
                run = load_run(file)
                arguments += destinations(run, problem, workload, device)
            else:
                run = torch.compile(Reference(problem).run)
            with torch.no_grad():
                for _ in range(3):
                    kept = run(*arguments)
                del kept
                memory.zero_()
                evict()
                torch.cuda.synchronize()
                profiler.cudaProfilerStart()
                kept = run(*arguments)
                torch.cuda.synchronize()
                profiler.cudaProfilerStop()
                del kept, arguments
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        profiler.cudaProfilerStart()
        evict()
        torch.cuda.synchronize()
        profiler.cudaProfilerStop()
        with report.open("a") as out:
            out.write(json.dumps(row) + "\n")
        torch.cuda.empty_cache()


def traffic(text: str) -> list[tuple[int, int, int]]:
    """(bytes read, bytes written, kernels) of each case, from ncu's raw CSV page in base units."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    found, read, written, kernels = [], 0, 0, 0
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if not row["ID"].isdigit():  # The line of units.
            continue
        own_read, own_written = (
            int(float(row[name].replace(",", ""))) for name in (_READ, _WRITTEN)
        )
        written += own_written
        if _EVICTOR in row["Kernel Name"]:
            found.append((read, written, kernels))
            read = written = kernels = 0
        else:
            read, kernels = read + own_read, kernels + 1
    return found


def main() -> None:
    """Profile, analyze, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    wanted = [case for case in CASES if arguments.only in case[0]]
    if arguments.cases:
        run_cases(wanted, arguments.cases)
        return
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "cases.jsonl"
        command = [
            "ncu", "--metrics", f"{_READ},{_WRITTEN}", "--csv", "--page", "raw", "--print-units", "base",
            "--cache-control", "none", "--clock-control", "none", "--profile-from-start", "off",
            sys.executable, __file__, "--cases", str(report), "--only", arguments.only,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not report.exists():
            sys.exit(f"ncu failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        cases = [json.loads(line) for line in report.read_text().splitlines()]
        counted = traffic(done.stdout)
    from sol_gym.device import detect
    from sol_gym.problems import load
    from sol_gym.solar import analyze

    print(
        "| problem | workload | kernel | kernels | compulsory MB | DRAM MB | ratio | reads | writes |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for case, (read, written, kernels) in zip(cases, counted, strict=True):
        if "error" in case:
            print(f"| {case['problem']} | | {case['kernel']} | {case['error']} |")
            continue
        problem = load(case["problem"])
        bound = analyze(problem, problem.workloads[case["workload"]], detect())
        must_read, must_write = sum(bound.read_bytes.values()), sum(bound.write_bytes.values())
        case |= {"dram_read": read, "dram_written": written, "kernels": kernels,
                 "compulsory_read": must_read, "compulsory_written": must_write}  # fmt: skip
        print(
            f"| {case['problem'].split('_')[0]} | {case['workload']} | {case['kernel']} | {kernels} | "
            f"{bound.total_bytes / 1e6:.1f} | {(read + written) / 1e6:.1f} | "
            f"{(read + written) / max(1, bound.total_bytes):.3f} | {read / max(1, must_read):.3f} | "
            f"{written / max(1, must_write):.3f} |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(cases, indent=1))


if __name__ == "__main__":
    main()
