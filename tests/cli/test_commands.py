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


def test_problems_are_filtered_by_what_they_are_and_by_what_fits():
    def listed(*options):
        return json.loads(sol_gym("problems", "list", "--json", *options).stdout)

    norms = listed("--subset", "L1", "--family", "norm", "--direction", "forward")
    assert "L1/069_rms_norm" in norms and len(norms) < 20
    small = listed("--subset", "L1", "--fits", "2GB")
    assert "L1/069_rms_norm" in small
    assert "L1/018_fused_rope_with_qk_norm_and_kv_cache_update" not in small
    assert set(small) < set(listed("--subset", "L1", "--fits", "h200"))
    failed = sol_gym("problems", "list", "--fits", "24 parsecs")
    assert failed.returncode == 2 and "24 parsecs" in failed.stderr


def test_a_card_shows_what_to_compute_and_the_times_to_beat():
    shown = sol_gym("problems", "show", "L1/018", "--profile", "smoke", "--no-bounds")
    assert shown.returncode == 0, shown.stderr
    for text in ("key_cache_out", "overwrites key_cache", "smoke workloads"):
        assert text in shown.stdout
    card = json.loads(sol_gym("problems", "show", "L1/069", "--json").stdout)
    first = card["workloads"][0]
    assert (first["axes"], first["input_bytes"]) == ({"batch_size": 1, "seq_len": 8192}, 268451840)
    assert first["read_bytes"] == 268451840 and first["written_bytes"] == 134217728
    assert first["published_t_sol_ms"] == pytest.approx(first["t_sol_ms"], rel=0.1)
    assert first["t_b_ms"] == pytest.approx(0.0710, rel=0.01)
    assert first["needed_bytes"] > first["input_bytes"] + 2 * first["output_bytes"]
    assert card["title"] and "hidden_states" in {tensor["name"] for tensor in card["inputs"]}


def test_showing_a_folder_does_not_run_its_code(folder, tmp_path):
    trace = tmp_path / "ran"
    reference = folder / "reference.py"
    reference.write_text(f"open({str(trace)!r}, 'w')\n" + reference.read_text())
    definition = json.loads((folder / "definition.json").read_text())
    definition.pop("reference", None)
    (folder / "definition.json").write_text(json.dumps(definition))
    shown = sol_gym("problems", "show", str(folder), "--reference")
    assert shown.returncode == 0, shown.stderr
    assert "open(" in shown.stdout and not trace.exists()
    assert sol_gym("problems", "show", str(folder), "--bounds").returncode == 0
    assert trace.exists()


def test_check_finds_a_reference_that_lies_about_its_output(folder):
    reference = folder / "reference.py"
    definition = json.loads((folder / "definition.json").read_text())
    definition["reference"] = reference.read_text().replace(".to(x.dtype)", "")
    (folder / "definition.json").write_text(json.dumps(definition))
    checked = sol_gym("problems", "check", str(folder))
    assert checked.returncode == 1
    assert "float32" in checked.stdout


def test_doctor_attacks_the_sandbox_and_its_exit_code_says_whether_it_held():
    done = sol_gym("doctor", "--device", "cpu", "--json")
    facts = json.loads(done.stdout)
    assert facts["device"]["key"] == "cpu"
    assert facts["isolation"]["no_new_privs"] is True
    broken = [finding for finding in facts["attempts"] if not finding["held"]]
    assert done.returncode == (1 if broken or facts["missing"] else 0)
    if not facts["missing"]:
        assert broken == []


def test_strict_isolation_is_a_flag_and_refuses_where_a_layer_is_left_out(
    folder, tmp_path, monkeypatch
):
    kernel = tmp_path / "kernel.py"
    kernel.write_text(RMSNORM)
    runtime = tmp_path / "run"  # A judge of its own, with a layer less.
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("SOL_GYM_RUNTIME", str(runtime))
    monkeypatch.setenv("SOL_GYM_LEAVE_OUT", "seccomp")
    arguments = ("eval", str(folder), str(kernel), "--device", "cpu", "--no-timing")
    refused = sol_gym(*arguments, "--strict-isolation")
    assert refused.returncode == 2
    assert "seccomp (left out)" in refused.stderr
    assert sol_gym(*arguments).returncode == 0


def test_calibrate_prints_the_figures():
    done = sol_gym("calibrate", "--json")
    assert json.loads(done.stdout)["peak_flops"]["fp32"] > 1e9
