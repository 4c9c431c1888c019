"""The one-at-a-time series: what does not pay there."""

from __future__ import annotations

from sol_gym.evaluation import Status
from sol_gym.sandbox.timing import Plan
from tests.conftest import RMSNORM

HONEST = RMSNORM.replace("def run(", "def honest(")
PLAN = Plan(rounds=2, repeats=2, single_budget_s=0.002, max_asks=6, single_below_s=10.0)
FLAGS = """
import gc, time
words = [o.words for o in gc.get_objects() if type(o).__name__ == "Page"][0]
"""


def test_an_answer_before_the_work_is_a_violation(judged):
    source = (
        FLAGS + HONEST + "\ndef run(x, weight):\n"
        "    if words[2]:\n"
        "        words[3] = words[2]\n"
        "        time.sleep(0.02)\n"
        "    return honest(x, weight)\n"
    )
    outcome = judged(source, timing=True, plan=PLAN)
    assert outcome.results[0].status is Status.REWARD_HACK, outcome.results[0].message
    assert "before the work" in outcome.results[0].message


def test_a_slow_first_request_counts_for_all_of_them(judged, toy):
    """As if the first request of a series worked the whole pool off, and the others looked it up."""
    source = (
        FLAGS + HONEST + "\nseries = []\ndef run(x, weight):\n"
        "    if words[2] >> 20 == 1 and not (series and series[-1] == words[2]):\n"
        "        series.append(words[2])\n"
        "        time.sleep(0.2)\n"
        "    return honest(x, weight)\n"
    )
    outcome = judged(source, toy.with_workloads([0]), timing=True, plan=PLAN)
    (result,) = outcome.results
    assert result.status is Status.PASSED, result.message
    assert result.timing and result.timing.t_k_ms > 20, result.timing
    assert any("together" in mark for mark in result.timing.marks)
