"""Small files of each foreign format, and one running sandbox for the session."""

from __future__ import annotations

import json

import pytest

from sol_gym.formats.sandboxed import Sandbox
from sol_gym.problem import Problem

SCALE = "import torch\n\n\ndef run(x, w, eps):\n    return x * w + eps\n"


@pytest.fixture(scope="session")
def sandbox(private_folders):
    with Sandbox() as running:
        yield running


@pytest.fixture
def make_problem():
    """Makes a problem with one float32 workload: y = f(x, w, eps)."""

    def make(reference=SCALE, tolerance=None, pack=None, inputs=None, **changes):
        definition = {
            "name": "scale",
            "axes": {"rows": {"type": "var"}, "width": {"type": "const", "value": 8}},
            "inputs": {
                "x": {"shape": ["rows", "width"], "dtype": "float32"},
                "w": {"shape": ["width"], "dtype": "float32"},
                "eps": {"shape": None, "dtype": "float32"},
            },
            "outputs": {"y": {"shape": ["rows", "width"], "dtype": "float32"}},
            "reference": reference,
        }
        workload = {
            "uuid": "w0",
            "axes": {"rows": 5},
            "inputs": {
                "x": {"type": "random"},
                "w": {"type": "random"},
                "eps": {"type": "scalar", "value": 0.5},
            }
            | (inputs or {}),
            "tolerance": tolerance or {"max_atol": 1e-4, "max_rtol": 1e-4},
        }
        return Problem.model_validate(
            {"id": "scale", "definition": definition | changes, "workloads": [workload]}
            | ({"pack": pack} if pack else {})
        )

    return make


@pytest.fixture
def data_set(tmp_path):
    """A FlashInfer-Trace data set with one definition, a recorded input, solutions and a trace."""
    import torch
    from safetensors.torch import save_file

    root = tmp_path / "flashinfer-trace"

    def write(path, text):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)

    name = "gather_d8"
    definition = {
        "name": name,
        "op_type": "gather",
        "description": "Rows of a table.\nMore words.",
        "tags": ["status:verified"],
        "axes": {"n": {"type": "var"}, "rows": {"type": "var"}, "d": {"type": "const", "value": 8}},
        "constraints": ["n <= 64", "rows > indices.max().item()"],
        "inputs": {
            "table": {"shape": ["rows", "d"], "dtype": "float32"},
            "indices": {"shape": ["n"], "dtype": "int32"},
            "scale": {"shape": None, "dtype": "float32"},
        },
        "outputs": {"out": {"shape": ["n", "d"], "dtype": "float32"}},
        "reference": "def run(table, indices, scale):\n    return table[indices.long()] * scale\n",
    }
    blob = f"blob/workloads/gather/{name}/{name}_0.safetensors"
    workload = {
        "uuid": "u0",
        "axes": {"n": 4, "rows": 16},
        "inputs": {
            "table": {"type": "random"},
            "indices": {"type": "safetensors", "path": f"./{blob}", "tensor_key": "indices"},
            "scale": {"type": "scalar", "value": 2.0},
        },
    }
    line = {"definition": name, "workload": workload, "solution": None, "evaluation": None}
    trace = line | {"solution": "torch_gather", "evaluation": {"status": "PASSED"}}
    spec = {"language": "python", "target_hardware": ["cpu"], "entry_point": "main.py::run"}
    code = "def run(table, indices, scale):\n    return scale * table[indices.long()]\n"
    good = {
        "name": "torch_gather", "definition": name, "author": "me", "spec": spec,
        "sources": [{"path": "main.py", "content": code}],
    }  # fmt: skip
    other = {
        "name": "cuda_gather", "definition": name, "author": "me",
        "spec": {"language": "cuda", "target_hardware": ["cuda"], "entry_point": "k.cu::run"},
        "sources": [{"path": "k.cu", "content": "#include <tvm/ffi/function.h>\n"}],
    }  # fmt: skip
    write(f"definitions/gather/{name}.json", json.dumps(definition))
    write(f"workloads/gather/{name}.jsonl", json.dumps(line) + "\n")
    write(f"traces/me/gather/{name}.jsonl", json.dumps(trace) + "\n")
    write("solutions/me/gather/torch.json", json.dumps(good))
    write("solutions/me/gather/cuda.json", json.dumps(other))
    (root / blob).parent.mkdir(parents=True)
    save_file({"indices": torch.tensor([3, 0, 15, 3], dtype=torch.int32)}, root / blob)
    return root


@pytest.fixture
def kernelbench_file(tmp_path):
    """A KernelBench file: parameters, a random and a computed buffer, batch norm, a number."""
    file = tmp_path / "7_Scaled-linear.py"
    file.write_text(
        '''import torch
import torch.nn as nn


class Model(nn.Module):
    """A linear layer, normalised.

    More words.
    """

    def __init__(self, in_features, out_features, shift_shape):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.norm = nn.BatchNorm1d(out_features)
        self.shift = nn.Parameter(torch.randn(shift_shape))
        self.register_buffer("random", torch.randn(out_features))
        self.register_buffer("ramp", torch.arange(out_features, dtype=torch.float32))

    def forward(self, x, factor):
        y = self.norm(self.linear(x)) + self.shift + self.random
        return y * factor + self.ramp, y.mean(dim=1)


batch_size = rows = 6
in_features = 4 * 2
out_features: int = 5
shift_shape = (out_features,)


def get_inputs():
    return [torch.rand(batch_size, in_features), 1.5]


def get_init_inputs():
    return [in_features, out_features, shift_shape]
'''
    )
    return file
