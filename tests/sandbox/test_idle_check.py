"""What a device that works while the worker is stopped leads to. The device's answers are scripted
(the only one here, a CPU, cannot do it); workers, judge and verdicts are real."""

from __future__ import annotations

import itertools

import pytest

from sol_gym.errors import InfrastructureError
from sol_gym.evaluation import Status
from sol_gym.sandbox.backend import CpuBackend
from sol_gym.sandbox.request import Request
from sol_gym.solution import Solution
from tests.conftest import RMSNORM


class ScriptedDevice(CpuBackend):
    """Answers `busy` from a script, and `idle_again` with a fixed word."""

    def __init__(self, device, answers, rests=True):
        super().__init__(device)
        self.answers, self.rests, self.asked = iter(answers), rests, 0

    def busy(self):
        self.asked += 1
        return self.idle_check is True and next(self.answers)

    def idle_again(self, timeout_s):
        return self.rests


@pytest.fixture
def watched(judge, toy, monkeypatch):
    """watched(answers) -> (evaluate, device): a judge that has been calibrated on an idle device."""

    def evaluate():
        return judge.evaluate(Request(toy, Solution.from_text(RMSNORM)))

    def script(answers, *, rests=True, calibrated=True):
        if calibrated:
            evaluate()
        else:
            monkeypatch.setattr(judge, "_calibration", None)
        device = ScriptedDevice(judge.backend.device, answers, rests)
        monkeypatch.setattr(judge, "backend", device)
        return evaluate, device

    return script


def test_one_sign_of_work_is_measured_again_and_marked(watched):
    evaluate, device = watched([True, *[False] * 1000])
    results = evaluate().results
    while device.asked == 0:  # It is asked at random, before 15 % of the batches.
        results = evaluate().results
    assert [r.status for r in results] == [Status.PASSED] * len(results)
    assert any("measured again" in mark for r in results for mark in r.timing.marks)


def test_work_that_ends_with_each_of_two_workers_is_a_hack(watched):
    evaluate, device = watched(itertools.repeat(True))
    results = evaluate().results
    while device.asked == 0:
        results = evaluate().results
    assert results[-1].status is Status.REWARD_HACK
    assert "while its inputs were written" in results[-1].message
    assert device.asked == 2


def test_work_that_outlives_the_worker_is_somebody_elses(watched):
    evaluate, _ = watched(itertools.repeat(True), rests=False)
    with pytest.raises(InfrastructureError, match="SOL_GYM_IDLE_CHECK=0"):
        while True:
            evaluate()


def test_a_check_that_finds_fault_with_a_trusted_kernel_is_switched_off(watched):
    evaluate, device = watched(itertools.repeat(True), calibrated=False)
    results = evaluate().results
    assert [r.status for r in results] == [Status.PASSED] * len(results)
    assert "trusted kernel" in device.idle_check
    assert all(any("no check" in mark for mark in r.timing.marks) for r in results)


def test_the_trusted_kernel_is_watched_at_every_batch(watched):
    evaluate, device = watched(itertools.repeat(False), calibrated=False)
    evaluate()
    assert device.asked >= 2 * (10 + 1)
    assert device.idle_check is True
