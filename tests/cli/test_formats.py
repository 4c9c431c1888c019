"""`sol-gym problems import|export|audit` and `eval --trace`, run as a user runs them."""

from __future__ import annotations

import json

import pytest

from sol_gym.problem import export_problem
from tests.cli.test_commands import sol_gym
from tests.conftest import RMSNORM

FILE = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x.clamp(min=-9.0)

n = 2**20

def get_inputs():
    return [torch.rand(n, n)]

def get_init_inputs():
    return []
"""


def test_a_file_is_imported_shrunk_audited_and_judged(tmp_path):
    file = tmp_path / "clamp.py"
    file.write_text(FILE)
    out = tmp_path / "out"
    done = sol_gym("problems", "import", str(file), "--set", "n=64", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "kernelbench/clamp" in done.stdout
    assert "warning: input 'x' handed through passes" in " ".join(done.stdout.split())
    kernel = tmp_path / "kernel.py"
    kernel.write_text("def run(x):\n    return x.clamp(min=-9.0)\n")
    traces = tmp_path / "traces.jsonl"
    done = sol_gym(
        "eval", str(out / "clamp"), str(kernel), "--device", "cpu", "--trace", str(traces)
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (trace,) = map(json.loads, traces.read_text().splitlines())
    assert trace["evaluation"]["performance"]["latency_ms"] > 0
    bound = sol_gym("sol", str(out / "clamp"), "--device", "h200", "--json")
    assert json.loads(bound.stdout)["read_bytes"] == {"x": 64 * 64 * 4}


def test_what_cannot_be_imported_is_said_and_counts(tmp_path):
    (tmp_path / "a.py").write_text(FILE.replace("x.clamp(min=-9.0)", "x.no_such()"))
    (tmp_path / "b.py").write_text(FILE)
    done = sol_gym(
        "problems", "import", str(tmp_path), "--out", str(tmp_path / "out"), "--json", "--no-audit"
    )  # fmt: skip
    assert done.returncode == 1
    a, b = map(json.loads, done.stdout.splitlines())
    assert "no_such" in a["error"]
    assert b["id"] == "kernelbench/b"
    done = sol_gym("problems", "import", str(tmp_path / "none"))
    assert (done.returncode, "does not exist" in done.stderr) == (2, True)


def test_export_writes_a_folder_and_says_what_others_refuse(tmp_path):
    done = sol_gym("problems", "export", "FIB/012", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "48 workloads mix custom inputs" in done.stdout
    assert (tmp_path / "012_gqa_paged_decode_h32_kv4_d128_ps1" / "workload.jsonl").is_file()


def test_audit_warns_and_says_so_in_its_exit_code(toy, tmp_path):
    folder = export_problem(toy, tmp_path / "rmsnorm")
    done = sol_gym("problems", "audit", str(folder))
    assert (done.returncode, "0 with warnings" in done.stdout) == (0, True), done.stdout
    definition = toy.definition.model_copy(
        update={"reference": RMSNORM + "    return 0 * x\n".replace("    return", "\ndef run(x, weight):\n    return")}
    )  # fmt: skip
    export_problem(toy.model_copy(update={"definition": definition}), folder)
    done = sol_gym("problems", "audit", str(folder))
    assert (done.returncode, "zero throughout" in done.stdout) == (1, True), done.stdout


def test_a_trace_needs_a_time(toy, tmp_path):
    folder = export_problem(toy, tmp_path / "rmsnorm")
    kernel = tmp_path / "k.py"
    kernel.write_text(RMSNORM)
    done = sol_gym("eval", str(folder), str(kernel), "--trace", "t.jsonl", "--no-timing")
    assert done.returncode == 2
    assert "--trace needs timing" in done.stderr


@pytest.mark.parametrize("pair", ["n", "=3", "n="])
def test_a_malformed_setting_is_explained(tmp_path, pair):
    done = sol_gym("problems", "import", str(tmp_path), "--set", pair)
    assert (done.returncode, "expected NAME=VALUE" in done.stderr) == (2, True)
