"""How long a refusal takes: the audit alone, and a whole `Evaluator.evaluate` that ends in a veto.

    python benchmarks/audit_latency.py [--repeats 20] [--json]

Sources: every file of tests/exploits and benchmarks/kernels, and synthetic ones of growing size.
DESIGN asks for at most 50 ms to reject a source by audit or syntax.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from sol_gym.evaluate import Evaluator
from sol_gym.evaluation import Status
from sol_gym.problem import load_problem
from sol_gym.sandbox.audit import audit, audit_text
from sol_gym.solution import load_solution

ROOT = Path(__file__).resolve().parent.parent
_VETOED = "import torch\n\ntorch.allclose = print\n\n\ndef run(hidden_states, weight):\n    return hidden_states\n"
_SYNTAX = "def run(hidden_states, weight:\n    return hidden_states\n"


def milliseconds(action, repeats: int) -> tuple[float, float]:
    """Median (wall, CPU) time in ms; the first call is not counted."""
    action()
    wall, cpu = [], []
    for _ in range(repeats):
        start, own = time.perf_counter(), time.process_time()
        action()
        wall.append((time.perf_counter() - start) * 1e3)
        cpu.append((time.process_time() - own) * 1e3)
    return statistics.median(wall), statistics.median(cpu)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: dict[str, tuple[float, float]] = {}

    folders = (ROOT / "tests" / "exploits", ROOT / "benchmarks" / "kernels")
    files = [f for d in folders for f in sorted(d.iterdir()) if f.suffix in (".py", ".cu", ".cpp", ".json")]  # fmt: skip
    each = []
    for file in files:
        solution = load_solution(file)
        each.append(milliseconds(lambda s=solution: audit(s), 3))
    rows[f"audit, {len(files)} real sources: median"] = tuple(map(statistics.median, zip(*each, strict=True)))  # type: ignore[assignment]  # fmt: skip
    rows["audit, the slowest of them"] = max(each, key=lambda pair: pair[1])

    block = (ROOT / "benchmarks" / "kernels" / "fib_012_gqa_paged_decode_h32_kv4_d128_ps1.py").read_text()  # fmt: skip
    native = (ROOT / "benchmarks" / "kernels" / "fib_021_rmsnorm_h128_plain.cu").read_text()
    for kib in (8, 32, 128):
        for name, text, path in (("Python", block, "kernel.py"), ("CUDA", native, "kernel.cu")):
            long = (text * (kib * 1024 // len(text) + 1))[: kib * 1024].rsplit("\n\n\n", 1)[0]
            rows[f"audit, {name} of {len(long) / 1024:.0f} KiB"] = milliseconds(
                lambda t=long, p=path: audit_text(t, p), options.repeats
            )

    problem = load_problem(ROOT / "tests" / "exploits" / "problem")
    evaluator = Evaluator("cpu")
    for name, text, status in (
        ("refused by a veto", _VETOED, Status.REWARD_HACK),
        ("refused by its syntax", _SYNTAX, Status.COMPILE_ERROR),
    ):

        def whole(text=text, status=status):
            assert evaluator.evaluate(problem, text).status is status

        rows[f"evaluate, {name}"] = milliseconds(whole, options.repeats)

    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'':40s}   wall ms    CPU ms   (they differ on a busy machine)")
    for name, (wall, cpu) in rows.items():
        print(f"{name:40s} {wall:9.2f} {cpu:9.2f}")


if __name__ == "__main__":
    main()
