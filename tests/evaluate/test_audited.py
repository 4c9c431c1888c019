"""The audit as a part of an evaluation."""

from __future__ import annotations

import json

from sol_gym.evaluate import Evaluator
from sol_gym.evaluation import Evaluation, Severity, Status
from tests.conftest import RMSNORM

PATCHED = RMSNORM + "\ntorch.equal = print\n"
COUNTING = "import time\n" + RMSNORM.replace("    wide =", "    time.perf_counter()\n    wide =")


def test_a_veto_is_a_reward_hack_before_any_process_is_started(toy):
    evaluator = Evaluator("cpu")
    evaluation = evaluator.evaluate(toy, PATCHED)
    assert evaluator._socket is None
    assert (evaluation.status, evaluation.score, evaluation.results) == (
        Status.REWARD_HACK,
        0.0,
        [],
    )
    assert "solution.py" in evaluation.message and "torch.equal" in evaluation.message
    (finding,) = evaluation.findings
    assert finding.severity is Severity.VETO and finding.source == "torch.equal = print"
    assert Evaluation.model_validate(json.loads(json.dumps(evaluation.to_json()))) == evaluation


def test_what_is_not_vetoed_is_evaluated_and_reported(toy):
    with Evaluator("cpu") as evaluator:
        evaluation = evaluator.evaluate(toy, COUNTING, timing=False)
        assert evaluation.status is Status.PASSED, evaluation.message
        assert [f.rule for f in evaluation.findings] == ["clock-reading"]
        assert evaluator.evaluate(toy, RMSNORM, timing=False).findings == []


def test_without_the_audit_there_are_no_findings_and_the_judge_decides(toy):
    with Evaluator("cpu", audit=False) as evaluator:
        evaluation = evaluator.evaluate(toy, PATCHED, timing=False)
    assert evaluation.status is Status.PASSED
    assert evaluation.findings is None
