from __future__ import annotations

import pytest

from sol_gym.device import get_device
from sol_gym.sandbox.judge import Judge
from sol_gym.sandbox.limits import Limits
from sol_gym.sandbox.request import Request
from sol_gym.sandbox.timing import Plan
from sol_gym.solution import Solution


@pytest.fixture(scope="session")
def judge(tmp_path_factory):
    """A judge of the CPU with short series and tight limits."""
    judge = Judge(
        get_device("cpu"),
        cache=tmp_path_factory.mktemp("cache"),
        plan=Plan(rounds=2, repeats=2, single_budget_s=0.002, max_asks=6),
        limits=Limits(memory_bytes=768 << 20),
    )
    yield judge
    judge.close()


@pytest.fixture
def judged(judge, toy):
    """judged(source) -> outcome on the toy problem, without timing unless asked for."""

    def run(source, problem=toy, *, timing=False, timeout_s=60.0, **arguments):
        solution = source if isinstance(source, Solution) else Solution.from_text(source)
        return judge.evaluate(
            Request(problem, solution, timing=timing, timeout_s=timeout_s, **arguments)
        )

    return run
