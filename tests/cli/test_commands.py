"""The command line, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sol_gym.problem import export_problem
from tests.conftest import RMSNORM


def sol_gym(*arguments: str, timeout: float = 200) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", "from sol_gym.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def folder(toy, tmp_path):
    return export_problem(toy, tmp_path / "rmsnorm")


def test_eval_prints_json_and_exits_with_zero_for_a_pass(folder, tmp_path):
    kernel = tmp_path / "kernel.py"
    kernel.write_text(RMSNORM)
    store = tmp_path / "results.jsonl"
    done = sol_gym(
        "eval",
        str(folder),
        str(kernel),
        "--device",
        "cpu",
        "--json",
        "--no-timing",
        "--store",
        str(store),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "PASSED"
    assert json.loads(store.read_text())["problem"] == "rmsnorm"


def test_eval_takes_strict_inputs_when_asked_to(folder, tmp_path):
    kernel = tmp_path / "kernel.py"
    kernel.write_text(RMSNORM)
    done = sol_gym("eval", str(folder), str(kernel), "--device", "cpu", "--json", "--no-timing", "--inputs", "strict")  # fmt: skip
    evaluation = json.loads(done.stdout)
    assert (
        evaluation["status"] == "PASSED" and evaluation["provenance"]["inputs_profile"] == "strict"
    )
    assert all(r["correctness"]["strict_rounds"] for r in evaluation["results"])


def test_eval_exits_with_one_for_a_failure_and_shows_why(folder, tmp_path):
    kernel = tmp_path / "kernel.py"
    kernel.write_text("def run(x, weight):\n    return x\n")
    done = sol_gym("eval", str(folder), str(kernel), "--device", "cpu", "--workload", "1")
    assert done.returncode == 1
    assert "INCORRECT_NUMERICAL" in done.stdout
    assert "expected" in done.stdout


def test_bad_arguments_are_one_line_and_exit_with_two(tmp_path):
    kernel = tmp_path / "kernel.py"
    kernel.write_text(RMSNORM)
    done = sol_gym("eval", "L1/069_rms_nrom", str(kernel), "--device", "cpu")
    assert done.returncode == 2
    assert done.stderr.strip().startswith("error: ")
    assert "L1/069_rms_norm" in done.stderr
    assert "Traceback" not in done.stderr


def test_sol_prints_a_bound_for_hardware_that_is_not_here():
    done = sol_gym("sol", "L1/069", "--device", "h200", "--workload", "0", "--json")
    assert done.returncode == 0, done.stderr
    bound = json.loads(done.stdout)
    assert bound["t_sol_ms"] == pytest.approx((3 * 8192 * 8192 * 2 + 8192 * 2) / 4.8e12 * 1e3)


def test_problems_are_listed_shown_and_checked(folder):
    assert "L1/069_rms_norm" in json.loads(sol_gym("problems", "list", "--json").stdout)
    shown = sol_gym("problems", "show", "L1/069")
    assert "hidden_states" in shown.stdout and "workloads" in shown.stdout
    checked = sol_gym("problems", "check", "FIB/021", str(folder))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "2 problems checked, 0 with faults" in checked.stdout


def test_check_finds_a_reference_that_lies_about_its_output(folder):
    reference = folder / "reference.py"
    definition = json.loads((folder / "definition.json").read_text())
    definition["reference"] = reference.read_text().replace(".to(x.dtype)", "")
    (folder / "definition.json").write_text(json.dumps(definition))
    checked = sol_gym("problems", "check", str(folder))
    assert checked.returncode == 1
    assert "float32" in checked.stdout


def test_doctor_names_device_and_layers():
    facts = json.loads(sol_gym("doctor", "--device", "cpu", "--json").stdout)
    assert facts["device"]["key"] == "cpu"
    assert "pid_ns" in facts["isolation"]


def test_calibrate_prints_the_figures():
    done = sol_gym("calibrate", "--json")
    assert json.loads(done.stdout)["peak_flops"]["fp32"] > 1e9
