"""Shared fixtures: a toy problem, and a judge of the CPU for the whole session."""

from __future__ import annotations

import os

# Before torch is imported: threads that spin at barriers slow each other down on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import pytest

from sol_gym.problem import (
    AxisConst,
    AxisVar,
    Definition,
    Problem,
    RandomInput,
    TensorSpec,
    Workload,
)

RMSNORM = """
import torch

def run(x, weight):
    wide = x.float()
    r = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * r * weight.float()).to(x.dtype)
"""


def pytest_collection_modifyitems(items):
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture(scope="session", autouse=True)
def private_folders(tmp_path_factory):
    """Cache and runtime folders of their own, so that tests touch nothing of the user's."""
    root = tmp_path_factory.mktemp("sol_gym")
    runtime = root / "run"
    runtime.mkdir(mode=0o700)
    before = dict(os.environ)
    # Sockets have short paths; pytest's folders may be too long for them.
    if len(str(runtime)) > 60:
        import tempfile

        runtime = tempfile.mkdtemp(prefix="sg-")
    os.environ.update(SOL_GYM_CACHE=str(root / "cache"), SOL_GYM_RUNTIME=str(runtime))
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def toy() -> Problem:
    """RMSNorm over bf16 rows; two small workloads."""
    return Problem(
        id="toy/rmsnorm",
        definition=Definition(
            name="rmsnorm",
            axes={"rows": AxisVar(), "hidden": AxisConst(value=256)},
            inputs={
                "x": TensorSpec(shape=["rows", "hidden"], dtype="bfloat16"),
                "weight": TensorSpec(shape=["hidden"], dtype="bfloat16"),
            },
            outputs={"y": TensorSpec(shape=["rows", "hidden"], dtype="bfloat16")},
            reference=RMSNORM,
        ),
        workloads=tuple(
            Workload(
                uuid=f"toy-{rows}",
                axes={"rows": rows},
                inputs={"x": RandomInput(), "weight": RandomInput()},
            )
            for rows in (32, 37)
        ),
    )
