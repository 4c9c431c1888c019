"""Wall seconds of `env.step`, warm and cold, with a stage breakdown (docs/measurements.md).

    python benchmarks/step_latency.py [--device auto|cpu|h200] [--profile compatible|strict] [--only TEXT,...] [--json FILE]

Cases are those of the design's table of figures: a correct Triton RMSNorm on 14 workloads, one on 3
workloads, a CUDA C++ RMSNorm (first build and cached), and sources that are rejected at once. On a
CPU the smoke workloads and a C++ kernel stand in. "Cold" is the first step of a process that has to
start the judge; "warm" is the median of further steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from sol_gym import paths
from sol_gym.device import get_device
from sol_gym.envs import KernelEnv
from sol_gym.problems import load

_KERNELS = Path(__file__).parent / "kernels"
_DEMO = Path(__file__).parent.parent / "sol_gym" / "cli" / "kernels"


def cases(on_gpu: bool) -> list[tuple[str, str, list[int] | None, str]]:
    """(label, problem, workload indices or None for all, source text)."""
    rmsnorm = "FIB/021_rmsnorm_h128"
    bad = "def run(hidden_states, weight:\n    return hidden_states\n"
    if not on_gpu:
        return [
            ("C++ RMSNorm, smoke workloads", rmsnorm, None, (_DEMO / "rmsnorm.cpp").read_text()),
            ("reference RMSNorm, smoke workloads", rmsnorm, None, load(rmsnorm).reference),
            (
                "wrong kernel, smoke workloads",
                rmsnorm,
                None,
                (_DEMO / "wrong_no_weight.py").read_text(),
            ),
            ("syntax error", rmsnorm, None, bad),
        ]
    return [
        (
            "Triton RMSNorm, 14 workloads",
            rmsnorm,
            None,
            (_KERNELS / "fib_021_rmsnorm_h128.py").read_text(),
        ),
        (
            "Triton RMSNorm, 3 workloads",
            rmsnorm,
            [0, 7, 13],
            (_KERNELS / "fib_021_rmsnorm_h128.py").read_text(),
        ),
        (
            "Triton add + RMSNorm (L1/069), 16 workloads",
            "L1/069_rms_norm",
            None,
            (_KERNELS / "l1_069_rms_norm.py").read_text(),
        ),
        (
            "CUDA C++ RMSNorm (plain), 14 workloads",
            rmsnorm,
            None,
            (_KERNELS / "fib_021_rmsnorm_h128_plain.cu").read_text(),
        ),
        (
            "CUDA C++ RMSNorm (torch), 14 workloads",
            rmsnorm,
            None,
            (_KERNELS / "fib_021_rmsnorm_h128_torch.cu").read_text(),
        ),
        ("wrong kernel, 14 workloads", rmsnorm, None, (_DEMO / "wrong_no_weight.py").read_text()),
        ("syntax error", rmsnorm, None, bad),
    ]


def measure(
    label: str,
    problem: str,
    indices: list[int] | None,
    source: str,
    device: str,
    warm: int,
    inputs_profile: str,
) -> dict[str, Any]:
    """First and further steps of one case; the baseline is measured beforehand and not counted."""
    env = KernelEnv(
        problem, device=device, max_turns=100, workloads=indices, inputs_profile=inputs_profile
    )
    try:
        env.reset()
        seconds, stages = [], {}
        for _ in range(1 + warm):
            start = time.perf_counter()
            _, _, _, _, info = env.step(source)
            seconds.append(time.perf_counter() - start)
            stages = json.loads(info["evaluation_json"])["provenance"]["stages_s"]
        return {
            "case": label,
            "status": info["status"],
            "first_s": seconds[0],
            "warm_s": statistics.median(seconds[1:]),
            "stages_s": stages,
        }
    finally:
        env.close()


def main() -> None:
    """Print the table; write the raw figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--profile", choices=["compatible", "strict"], default="strict", help="input draws"
    )
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--only", default="", help="Comma-separated parts of the cases' names.")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = get_device(arguments.device)
    on_gpu = device.key != "cpu"

    from sol_gym.evaluate import Evaluator

    rows = []
    builds = paths.cache_dir() / "build"
    with tempfile.TemporaryDirectory() as aside, Evaluator(device) as keeper:
        start = time.perf_counter()
        keeper.evaluate("FIB/021_rmsnorm_h128", load("FIB/021_rmsnorm_h128").reference)
        print(
            f"cold start of the judge, calibration and one evaluation with its baseline: {time.perf_counter() - start:.2f} s",
            flush=True,
        )
        if builds.exists():  # First builds are to be seen as such.
            shutil.move(str(builds), aside)
        for label, problem, indices, source in cases(on_gpu):
            if not any(part in label for part in arguments.only.split(",")):
                continue
            keeper.evaluate(problem, load(problem).reference)  # So that the baseline is there.
            row = measure(label, problem, indices, source, arguments.device, arguments.warm, arguments.profile)  # fmt: skip
            rows.append(row)
            stages = " ".join(
                f"{k} {v:.2f}" for k, v in row["stages_s"].items() if v >= 0.005 and k != "total"
            )
            print(
                f"{label:48s} {row['status']:20s} first {row['first_s']:6.2f} s  warm {row['warm_s']:6.2f} s  | {stages}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(
            json.dumps(
                {"device": device.name, "profile": arguments.profile, "rows": rows}, indent=1
            )
        )


if __name__ == "__main__":
    main()
