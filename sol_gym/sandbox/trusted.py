"""A kernel of the judge's own: what honest workers cost here, and whether layers are in its way."""

from __future__ import annotations

from ..problem import AxisConst, Definition, Problem, RandomInput, ScalarInput, TensorSpec, Workload
from ..solution import Solution

_CALIBRATION_REFERENCE = "import torch\n\ndef run(x, rounds):\n    return torch.add(x, 1.0)\n"
_CALIBRATION_TRITON = """
import torch, triton
import triton.language as tl

@triton.jit
def add_one(x, y, n, rounds, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    for _ in range(rounds):  # Takes time and changes nothing: no value is that large.
        value = tl.where(value > 1e30, value * 0.5, value)
    tl.store(y + at, value + 1.0, mask=at < n)

def run(x, rounds):
    y = torch.empty_like(x)
    add_one[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), rounds, BLOCK=1024)
    return y
"""


def calibration_problem(kind: str) -> tuple[Problem, Solution]:
    """A trusted kernel whose launch, flags and outputs cost what an honest worker's cost.

    On a GPU once a short one (launches only) and once one that fills a whole batch: an honest
    overhead grows a little with the length of the batch.
    """
    rounds = [2, 8000] if kind == "cuda" else [2]
    definition = Definition(
        name="calibration",
        axes={"numel": AxisConst(value=1 << 16 if kind == "cuda" else 1 << 18)},
        inputs={
            "x": TensorSpec(shape=["numel"], dtype="float32"),
            "rounds": TensorSpec(shape=None, dtype="int32"),
        },
        outputs={"y": TensorSpec(shape=["numel"], dtype="float32")},
        reference=_CALIBRATION_REFERENCE,
    )
    workloads = tuple(
        Workload(
            uuid=f"calibration-{n}",
            axes={},
            inputs={"x": RandomInput(), "rounds": ScalarInput(value=n)},
        )
        for n in rounds
    )
    problem = Problem(id="calibration", definition=definition, workloads=workloads)
    source = _CALIBRATION_TRITON if kind == "cuda" else _CALIBRATION_REFERENCE
    return problem, Solution.from_text(source, name="calibration")
