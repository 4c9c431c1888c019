"""Write problems/memory.json: what the references need, estimated for every workload.

    python tools/measure_memory.py                      # all problems
    python tools/measure_memory.py --ids L1/069 L2/015  # these; rows of others stay

Nothing of a reference's size is allocated (`sol_gym.footprint`). A row belongs to a content; after
a change to a definition, a reference or a workload its problem has to be measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from sol_gym.footprint import reference_peak_bytes
from sol_gym.paths import write_atomically
from sol_gym.problems import list_ids, load, resolve

REPOSITORY = Path(__file__).resolve().parent.parent
METHOD = (
    "largest sum of the bytes of the tensors that the reference makes and that are alive at once, "
    "its outputs included and its inputs not, from a run without floating-point storage"
)


def measure(problem_id: str) -> list[int | None]:
    """Bytes for each workload, in order; None where the reference's course is unknown."""
    problem = load(problem_id)
    rows: list[int | None] = []
    for index, workload in enumerate(problem.workloads):
        try:
            rows.append(reference_peak_bytes(problem, workload))
        except Exception as error:
            print(f"{problem_id}, workload {index}: {type(error).__name__}: {error}")
            rows.append(None)
    return rows


def write(file: Path, rows: dict[str, list[int | None]]) -> None:
    """One problem a line, in library order."""
    lines = [f"{json.dumps(i)}:{json.dumps(rows[i], separators=(',', ':'))}" for i in list_ids() if i in rows]  # fmt: skip
    body = ",\n".join(lines)
    write_atomically(
        file, f'{{"reference_peak_bytes":{json.dumps(METHOD)},\n"problems":{{\n{body}\n}}}}\n'
    )


def main(argv: list[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Estimate the memory that references need.")
    parser.add_argument("--ids", nargs="+", help="problems to measure (default: all)")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "problems" / "memory.json")
    arguments = parser.parse_args(argv)

    torch.set_num_threads(1)
    rows = json.loads(arguments.out.read_text())["problems"] if arguments.out.is_file() else {}
    for problem_id in map(resolve, arguments.ids or list_ids()):
        start = time.perf_counter()
        rows[problem_id] = measure(problem_id)
        took = time.perf_counter() - start
        if took > 5:
            print(f"{problem_id}: {took:.1f} s")
        write(arguments.out, rows)
    print(f"{arguments.out}: {sum(map(len, rows.values()))} rows of {len(rows)} problems")
    return 0


if __name__ == "__main__":
    sys.exit(main())
