"""T_k beside the profiler, and how well it repeats (docs/measurements.md). Needs an NVIDIA GPU.

    python benchmarks/timing_accuracy.py [--kernels N] [--repeats N] [--json FILE]

For each kernel the judge's T_k of one workload stands beside the sum of its kernels' spans as CUPTI
reports them through torch.profiler in a process of its own: for calls one after another on distinct
inputs (as in the judge's batch), and for single calls after a flush of the L2, whose writes may stay
behind in the L2. The second table is the standard deviation and the range of T_k over repeated
evaluations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from sol_gym.evaluate import Evaluator
from sol_gym.problems import load
from sol_gym.solution import load_solution

_KERNELS = Path(__file__).parent / "kernels"
CASES = [
    ("FIB/021_rmsnorm_h128", "fib_021_rmsnorm_h128.py", 8),
    ("FIB/021_rmsnorm_h128", "fib_021_rmsnorm_h128.py", 9),
    ("FIB/021_rmsnorm_h128", "fib_021_rmsnorm_h128_plain.cu", 8),
    ("L1/069_rms_norm", "l1_069_rms_norm.py", 0),
    ("L1/069_rms_norm", "l1_069_rms_norm.py", 2),
    ("L1/013_fused_residual_rms_norm_backward", "l1_013_fused_residual_rms_norm_backward.py", 0),
    (
        "L1/008_expert_output_weighted_index_add_accumulation",
        "l1_008_expert_output_weighted_index_add_accumulation.py",
        0,
    ),
    ("L1/007_hyena_fft_size_padding_rfft", "l1_007_hyena_fft_size_padding_rfft.py", 1),
    (
        "L1/015_grouped_query_attention_with_rope_and_qk_norm",
        "l1_015_grouped_query_attention_with_rope_and_qk_norm.py",
        0,
    ),
    ("L2/035_convnextv2_block_with_grn", "l2_035_convnextv2_block_with_grn.py", 1),
    (
        "Quant/001_fp8_attention_output_projection",
        "quant_001_fp8_attention_output_projection.py",
        2,
    ),
    (
        "FIB/012_gqa_paged_decode_h32_kv4_d128_ps1",
        "fib_012_gqa_paged_decode_h32_kv4_d128_ps1.py",
        24,
    ),
]


_ROW_BYTES, _ROW_CALLS = 12 << 30, 24


def profiled_ms(problem_id: str, file: str, index: int) -> tuple[float, float]:
    """Summed kernel spans (CUPTI) of a call in a row of calls, and of a call alone on a cold L2."""
    import torch
    from plain_calls import destinations, load_run
    from torch.profiler import ProfilerActivity, profile

    from sol_gym.inputs import InputMaker

    problem = load(problem_id)
    workload = problem.workloads[index]
    run = load_run(file)
    device = torch.device("cuda")
    maker = InputMaker(problem, workload, device)
    flush = torch.empty(128 << 20, dtype=torch.uint8, device=device)

    def arguments() -> list[Any]:
        return [*maker.draw().values(), *destinations(run, problem, workload, device)]

    def spans_ms(sets: list[list[Any]]) -> float:
        flush.add_(1)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            kept = [run(*values) for values in sets]
            torch.cuda.synchronize()
        del kept
        events = [e for e in trace.events() if e.device_type.name == "CUDA"]
        return sum(e.device_time for e in events) / 1e3 / len(sets)

    with torch.no_grad():
        for _ in range(3):
            run(*arguments())
        count = min(_ROW_CALLS, max(3, _ROW_BYTES // max(1, problem.declared_bytes(workload))))
        sets = [arguments() for _ in range(count)]
        spans_ms(sets)
        row = statistics.median(spans_ms(sets) for _ in range(5))
        alone = statistics.median(spans_ms([sets[i % count]]) for i in range(11))
    return row, alone


def main() -> None:
    """Print both tables; write the raw figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernels", type=int, default=len(CASES))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.profile:
        for case in CASES[: arguments.kernels]:
            print(json.dumps(profiled_ms(*case) if case[1].endswith(".py") else None), flush=True)
        return
    accuracy, repeatability = [], []
    done = subprocess.run(
        [sys.executable, __file__, "--profile", "--kernels", str(arguments.kernels)],
        capture_output=True, text=True,
    )  # fmt: skip
    spans: list[list[float] | None] = [json.loads(line) for line in done.stdout.splitlines()]
    if len(spans) < arguments.kernels:
        print(done.stderr[-1000:], flush=True)
        spans += [None] * (arguments.kernels - len(spans))
    with Evaluator() as evaluator:
        for number, (problem_id, file, index) in enumerate(CASES[: arguments.kernels]):
            problem = load(problem_id).with_workloads([index])
            solution = load_solution(_KERNELS / file)
            evaluation = evaluator.evaluate(problem, solution, scoring=False)
            result = evaluation.results[0] if evaluation.results else None
            if result is None or result.timing is None:
                print(
                    f"{file} [{index}]: {evaluation.status} {evaluation.message[:200]}", flush=True
                )
                continue
            row_ms, alone_ms = spans[number] or (None, None)
            t = result.timing
            row = {"problem": problem_id, "kernel": file, "axes": result.axes, "t_k_ms": t.t_k_ms, "reported_ms": t.reported_ms,
                   "judge_ms": t.batch_ms, "single_ms": t.single_ms, "mode": t.mode, "n_sets": t.n_sets,
                   "profiler_row_ms": row_ms, "profiler_alone_ms": alone_ms,
                   "marks": t.marks}  # fmt: skip
            accuracy.append(row)
            ratio = f"{t.t_k_ms / row_ms:6.3f}" if row_ms else "     -"
            print(
                f"{file:52s} [{index:2d}] T_k {t.t_k_ms:9.5f}  profiler, in a row {row_ms or float('nan'):9.5f} alone {alone_ms or float('nan'):9.5f}"
                f"  ratio {ratio}  {t.mode} n={t.n_sets} {t.marks}",
                flush=True,
            )
        for problem_id, file, index in (CASES[0], CASES[3], CASES[4], CASES[8]):
            problem = load(problem_id).with_workloads([index])
            solution = load_solution(_KERNELS / file)
            times = []
            for _ in range(arguments.repeats):
                evaluation = evaluator.evaluate(problem, solution, scoring=False)
                if evaluation.results and evaluation.results[0].t_k_ms:
                    times.append(evaluation.results[0].t_k_ms)
            if not times:
                continue
            middle = statistics.median(times)
            row = {
                "kernel": file,
                "workload": index,
                "t_k_ms": times,
                "median_ms": middle,
                "range": (max(times) - min(times)) / middle,
                "deviation": statistics.stdev(times) / middle,
            }
            repeatability.append(row)
            print(
                f"{file:52s} [{index:2d}] {len(times)} evaluations: median {middle:.5f} ms, standard deviation {100 * row['deviation']:.2f} %, range {100 * row['range']:.2f} %",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"accuracy": accuracy, "repeatability": repeatability}, indent=1)
        )


if __name__ == "__main__":
    main()
