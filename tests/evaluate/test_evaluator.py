"""The whole path through the judge's own process, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sol_gym.errors import InfrastructureError, ProblemError, SolutionError
from sol_gym.evaluate import Evaluator, evaluate
from sol_gym.evaluate.client import socket_path
from sol_gym.evaluation import Evaluation, Status
from sol_gym.problem import export_problem
from tests.conftest import RMSNORM

BAD = "def run(x, weight):\n    return x\n"


@pytest.fixture(scope="module")
def evaluator():
    with Evaluator("cpu") as evaluator:
        yield evaluator


def test_an_honest_kernel_gets_a_score_with_its_provenance(evaluator, toy):
    stages = []
    evaluation = evaluator.evaluate(toy, RMSNORM, on_progress=lambda *event: stages.append(event))
    assert evaluation.status is Status.PASSED, evaluation.message
    assert 0 < evaluation.score <= 1
    for result in evaluation.results:
        assert result.t_sol_ms < result.t_b_ms
        assert result.bound_by
    p = evaluation.provenance
    assert (p.device, p.profile, p.inputs_profile, p.baseline_set) == (
        "cpu",
        "full",
        "compatible",
        "measured",
    )
    assert p.problem_hash == toy.content_hash
    assert {"torch", "triton", "python", "sol_gym"} <= set(p.versions)
    assert stages
    assert Evaluation.model_validate(json.loads(json.dumps(evaluation.to_json()))) == evaluation


def test_the_baseline_is_measured_once(evaluator, toy):
    evaluator.evaluate(toy, RMSNORM)
    again = evaluator.evaluate(toy, RMSNORM)
    assert again.provenance.stages_s["baseline"] < 0.5


def test_a_wrong_kernel_scores_zero(evaluator, toy):
    evaluation = evaluator.evaluate(toy, BAD)
    assert (evaluation.status, evaluation.score) == (Status.INCORRECT_NUMERICAL, 0.0)


def test_a_syntax_error_needs_no_judge(toy):
    evaluator = Evaluator("cpu")
    evaluation = evaluator.evaluate(toy, "def run(x, weight:\n    pass\n")
    assert evaluation.status is Status.COMPILE_ERROR
    assert "line 1" in evaluation.message
    assert evaluator._socket is None


def test_correctness_alone_has_no_score(evaluator, toy):
    evaluation = evaluator.evaluate(toy, RMSNORM, timing=False)
    assert evaluation.status is Status.PASSED
    assert evaluation.score is None
    assert evaluation.results[0].timing is None


def test_an_exported_problem_folder_is_judged_like_the_original(evaluator, toy, tmp_path):
    folder = export_problem(toy, tmp_path / "rmsnorm")
    (tmp_path / "kernel.py").write_text(RMSNORM)
    evaluation = evaluator.evaluate(folder, tmp_path / "kernel.py", timing=False)
    assert evaluation.status is Status.PASSED
    assert evaluation.problem == "rmsnorm"


def test_a_broken_reference_is_nobodys_reward(evaluator, toy):
    definition = toy.definition.model_copy(
        update={"reference": "def run(x, weight):\n    return x.float()\n"}
    )
    evaluation = evaluator.evaluate(toy.model_copy(update={"definition": definition}), RMSNORM)
    assert (evaluation.status, evaluation.score) == (Status.INVALID_REFERENCE, None)
    assert "float32" in evaluation.message


def test_published_bounds_are_refused_off_a_b200(evaluator, toy):
    with pytest.raises(ProblemError, match="published"):
        evaluator.evaluate(toy, RMSNORM, bound_set="published")


def test_the_strict_profile_is_recorded_with_its_rounds(evaluator, toy):
    evaluation = evaluator.evaluate(toy, RMSNORM, inputs_profile="strict", timing=False)
    assert evaluation.passed, evaluation.message
    assert evaluation.provenance.inputs_profile == "strict"
    assert all(r.correctness.strict_rounds > 0 for r in evaluation.results)


def test_an_unknown_inputs_profile_names_the_known_ones(evaluator, toy):
    with pytest.raises(ProblemError, match="compatible, strict"):
        evaluator.evaluate(toy, RMSNORM, inputs_profile="loose")


@pytest.mark.parametrize(
    ("problem", "error"), [("L1/999", ProblemError), ("nowhere/", ProblemError)]
)
def test_unknown_problems_are_named(evaluator, problem, error):
    with pytest.raises(error):
        evaluator.evaluate(problem, RMSNORM)


@pytest.mark.parametrize(
    ("text", "strict"), [("1", True), ("true", True), ("0", False), ("", False)]
)
def test_the_environment_can_ask_for_strict_isolation(monkeypatch, text, strict):
    monkeypatch.setenv("SOL_GYM_STRICT_ISOLATION", text)
    assert Evaluator("cpu").strict_isolation is strict
    assert Evaluator("cpu", strict_isolation=not strict).strict_isolation is not strict


def test_a_strict_isolation_that_is_neither_on_nor_off_is_an_error(monkeypatch):
    monkeypatch.setenv("SOL_GYM_STRICT_ISOLATION", "perhaps")
    with pytest.raises(InfrastructureError, match="expected 1 or 0"):
        Evaluator("cpu")


def test_empty_solutions_are_refused(evaluator, toy):
    with pytest.raises(SolutionError):
        evaluator.evaluate(toy, "  \n ")


def test_clients_share_one_judge(toy):
    with Evaluator("cpu") as a, Evaluator("cpu") as b:
        a.describe()
        b.describe()
        assert count_judges() == 1


def test_a_judge_that_is_killed_is_an_infrastructure_error_and_the_next_call_starts_another(toy):
    with Evaluator("cpu") as evaluator:
        evaluator.describe()
        for pid in judges():
            os.kill(pid, 9)
        with pytest.raises(InfrastructureError, match="judge is gone"):
            evaluator.describe()
        assert evaluator.evaluate(toy, BAD).status is Status.INCORRECT_NUMERICAL


def test_the_judge_ends_when_its_last_client_is_gone():
    script = "from sol_gym.evaluate import Evaluator; e = Evaluator('cpu'); e.describe(); import os; os._exit(0)"
    environment = os.environ | {"SOL_GYM_RUNTIME": make_private(), "SOL_GYM_LINGER_S": "0.2"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=120)
    deadline = time.monotonic() + 10
    while judges(environment["SOL_GYM_RUNTIME"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert judges(environment["SOL_GYM_RUNTIME"]) == []


def test_the_function_is_the_class_in_one_call(toy):
    assert evaluate(toy, BAD, device="cpu").status is Status.INCORRECT_NUMERICAL


_IMPORTS = f"import extra_kernels\n{RMSNORM}"


def test_packages_on_pythonpath_are_the_workers_too(tmp_path):
    """Torch itself may lie there: that of a cluster's module, or the user's own packages."""
    (tmp_path / "extra_kernels.py").write_text("EPS = 1e-6\n")
    script = f"""
from sol_gym.evaluate import Evaluator
with Evaluator("cpu") as evaluator:
    done = evaluator.evaluate("FIB/021_rmsnorm_h128", {_IMPORTS!r}, timing=False, scoring=False)
print(done.status, done.message)
"""
    path = os.pathsep.join([str(tmp_path), "nowhere"])
    ran = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}, text=True,
        capture_output=True, timeout=120,
    )  # fmt: skip
    assert ran.stdout.startswith("PASSED"), ran.stdout + ran.stderr


def make_private() -> str:
    import tempfile

    return tempfile.mkdtemp(prefix="sg-")


def judges(runtime: str | None = None) -> list[int]:
    """Pids of the judges of this session's runtime folder."""
    from sol_gym.device import get_device

    wanted = runtime or str(socket_path(get_device("cpu")).parent)
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path("/proc", pid, "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "sol_gym.evaluate.server" in command and wanted in command:
            found.append(int(pid))
    return found


def count_judges() -> int:
    return len(judges())
