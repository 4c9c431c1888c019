"""Layers that trusted code does not get through are found, left out, and named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sol_gym.errors import InfrastructureError
from sol_gym.evaluation import Status
from sol_gym.sandbox.fallback import SUSPECTS, layers_in_the_way
from sol_gym.sandbox.process import TrustedCodeFailed
from sol_gym.sandbox.request import Request
from sol_gym.sandbox.worker.isolation import REQUIRED, missing
from sol_gym.solution import Solution
from tests.conftest import RMSNORM

NEEDS_A_SOCKET = "import socket\nsocket.socket(socket.AF_INET).close()\n" + RMSNORM


def stumbling_over(*layers):
    """Trusted work that only gets through without these, and the sets it was tried with."""
    tried = []

    def trial(left_out):
        tried.append(left_out)
        in_the_way = set(layers) - left_out
        return f"stumbled over {', '.join(sorted(in_the_way))}" if in_the_way else None

    return trial, tried


def test_suspects_are_layers_that_strict_isolation_insists_on():
    assert set(SUSPECTS) < set(REQUIRED)


@pytest.mark.parametrize("layer", SUSPECTS)
def test_one_layer_in_the_way_is_the_only_one_left_out(layer):
    trial, tried = stumbling_over(layer)
    assert layers_in_the_way(trial) == {layer: f"left out: stumbled over {layer}"}
    assert len(tried) == 3 + SUSPECTS.index(layer)


def test_of_several_in_the_way_no_other_is_left_out():
    trial, _ = stumbling_over("seccomp", "few_devices")
    assert set(layers_in_the_way(trial)) == {"seccomp", "few_devices"}
    trial, _ = stumbling_over(*SUSPECTS)
    assert set(layers_in_the_way(trial)) == set(SUSPECTS)


def test_work_that_gets_through_after_all_costs_no_layer_and_one_trial():
    trial, tried = stumbling_over()
    assert layers_in_the_way(trial) == {}
    assert tried == [frozenset()]


def test_a_fault_that_passes_by_itself_costs_no_layer():
    faults = iter(["out of memory", "out of memory", None, None])
    assert layers_in_the_way(lambda left_out: next(faults)) == {}


def test_a_fault_that_no_layer_explains_is_raised_with_its_reason():
    trial, tried = stumbling_over("the driver")
    with pytest.raises(InfrastructureError, match="stumbled over the driver"):
        layers_in_the_way(trial)
    assert len(tried) == 2 + len(SUSPECTS)


@pytest.fixture
def fresh(judge, monkeypatch):
    """The judge, as if it knew nothing of this machine; what it finds out is forgotten again."""
    for name, value in {"_calibration": None, "left_out": {}, "limits": judge.limits}.items():
        monkeypatch.setattr(judge, name, value)
    monkeypatch.setattr(judge, "trusted", judge.trusted)
    return judge


def test_a_judge_does_without_a_layer_that_trusted_code_stumbles_over(fresh, toy):
    if "seccomp" in missing(fresh.probe()):
        pytest.skip("this machine has no seccomp")
    # A real worker with a real layer: what the driver might need one day, this kernel needs today.
    fresh.trusted = (toy, Solution.from_text(NEEDS_A_SOCKET))
    outcome = fresh.evaluate(Request(toy, Solution.from_text(RMSNORM)))
    assert outcome.results[0].status is Status.PASSED
    assert "a trusted kernel failed" in outcome.isolation["seccomp"]
    assert set(fresh.left_out) == {"seccomp"}
    assert set(missing(outcome.isolation)) == set(missing(fresh.probe()))
    strict = Request(toy, Solution.from_text(RMSNORM), timing=False, strict_isolation=True)
    with pytest.raises(InfrastructureError, match=r"seccomp \(left out: a trusted kernel failed"):
        fresh.evaluate(strict)


def test_a_device_that_does_not_start_is_no_fault_of_the_solution(fresh, toy):
    fresh.limits = replace(fresh.limits, open_files=8)  # Too few to map the arena.
    with pytest.raises(InfrastructureError):
        fresh.evaluate(Request(toy, Solution.from_text(RMSNORM), timing=False))
    assert fresh.left_out == {}


def test_a_worker_that_cannot_start_its_device_says_why(fresh):
    worker = fresh.spawn(fresh.limits, None, lambda scratch: None)
    try:
        with pytest.raises(TrustedCodeFailed, match="did not start"):
            worker.start("cpu", 1, {"cmd": "arena", "bytes": 4096})  # It was given none.
    finally:
        worker.kill()
