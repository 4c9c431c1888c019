"""`sol-gym sol` and `sol-gym learn-rules`, run as a user runs them."""

from __future__ import annotations

import pytest

from tests.chat_server import ChatServer, completion
from tests.cli.test_audit import sol_gym


def test_explanation_ends_with_the_proof_and_check_feels_it():
    done = sol_gym(
        "sol", "L1/033", "--profile", "smoke", "--workload", "0", "--device", "h200", "--explain",
        "--check",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    proof = done.stdout[done.stdout.index("The proof") :]
    assert "reads residual: 262,144 x 2 = 524,288 bytes; all" in proof
    assert "<- binds" in proof and "it adds up" in proof
    assert "residual: 24 of 24 elements tried change an output" in proof


def test_check_needs_an_explanation_and_a_small_workload():
    alone = sol_gym("sol", "L1/033", "--check")
    assert alone.returncode == 2 and "--check needs --explain" in alone.stderr
    large = sol_gym("sol", "L1/033", "--workload", "0", "--device", "h200", "--explain", "--check")
    assert large.returncode == 2 and "too many to run again" in large.stderr


def test_comparison_of_a_problem_exits_with_zero_and_names_the_cause():
    done = sol_gym("sol", "L1/033", "--compare", "published", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert "without a cause: 0" in done.stdout
    assert "leaves sublayer_output out of" in done.stdout


def test_rules_are_learnt_only_where_there_are_none(tmp_path):
    done = sol_gym("learn-rules", "L1/069", "--model", "m")
    assert done.returncode == 0 and "every operation has a rule" in done.stdout
    wrong = sol_gym("learn-rules", "L1/069", "--workload", "99", "--model", "m")
    assert wrong.returncode == 2 and "has workloads 0 to" in wrong.stderr


def test_refused_rule_exits_with_one(tmp_path, unknown_operation):
    pytest.importorskip("openai")
    with ChatServer(lambda _: (200, {}, completion("no json"))) as server:
        done = sol_gym(
            "learn-rules", unknown_operation, "--model", "m", "--base-url", server.url,
            "--rounds", "1", OPENAI_API_KEY="k", SOL_GYM_CACHE=str(tmp_path / "cache"),
        )  # fmt: skip
    assert done.returncode == 1
    assert "_cdist_forward" in done.stderr and "refused" in done.stderr


@pytest.fixture
def unknown_operation(tmp_path) -> str:
    """A problem with an operation that has no rule, as a folder."""
    from sol_gym import export_problem
    from tests.solar.conftest import make_problem

    problem = make_problem(
        "def run(x, y): return torch.ops.aten._cdist_forward(x, y, 2.0, None)",
        {"x": ([8, 4], "float32"), "y": ([6, 4], "float32")},
        {"d": ([8, 6], "float32")},
    )
    return str(export_problem(problem, tmp_path / "cdist"))
