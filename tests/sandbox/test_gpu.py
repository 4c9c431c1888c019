"""The judge on a real GPU: modes, faults, and that nothing stays behind on the device."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from sol_gym.evaluation import Status
from sol_gym.sandbox import calls
from sol_gym.sandbox.backend import _processes_on_gpu
from sol_gym.sandbox.request import Request
from sol_gym.solution import Solution
from tests.conftest import RMSNORM
from tests.sandbox.test_fallback import NEEDS_A_SOCKET

pytestmark = pytest.mark.gpu

HONEST = RMSNORM.replace("def run(", "def honest(")
OUT_OF_BOUNDS = """
import torch, triton
import triton.language as tl

@triton.jit
def stray(y):
    tl.store(y + 100000000000, 1.0)

def run(x, weight):
    y = torch.empty_like(x)
    stray[(1,)](y)
    return y
"""


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    from sol_gym.device import detect
    from sol_gym.sandbox.judge import Judge

    judge = Judge(detect(), cache=tmp_path_factory.mktemp("cache"))
    yield judge
    judge.close()


@pytest.fixture
def judged(judge, toy):
    def run(source, **arguments):
        return judge.evaluate(Request(toy, Solution.from_text(source), **arguments))

    return run


def test_the_reference_is_captured_and_read_in_place(judged):
    for result in judged(RMSNORM).results:
        assert result.status is Status.PASSED, result.message
        assert result.timing.mode == "graph"


def test_strict_sets_are_compared_and_float64_memory_goes_back(judge, judged, monkeypatch):
    from sol_gym.sandbox.backend import CudaBackend

    released = []
    release = CudaBackend.release_cached
    monkeypatch.setattr(
        CudaBackend,
        "release_cached",
        lambda self, keep=0: released.append(keep) or release(self, keep),
    )
    monkeypatch.setattr(judge.backend, "memory_cap", lambda: 4 << 20)
    outcome = judged(RMSNORM, inputs_profile="strict")
    for result in outcome.results:
        assert result.status is Status.PASSED, result.message
        assert result.timing.mode == "graph"
        assert result.correctness.strict_rounds >= 1 and result.correctness.strict_error < 1
    assert 2 << 20 in released


def test_host_synchronisation_makes_a_solution_run_eagerly(judged):
    source = (
        HONEST
        + "\ndef run(x, weight):\n    y = honest(x, weight)\n    float(y.sum())\n    return y\n"
    )
    outcome = judged(source)
    assert outcome.results[0].timing.mode == "eager+copy"
    assert any("not captured" in mark for mark in outcome.results[0].timing.marks)


def test_a_static_output_buffer_is_copied_inside_the_batch(judged):
    source = (
        HONEST + "\nkept = {}\ndef run(x, weight):\n"
        "    b = kept.setdefault(x.shape, torch.empty_like(x))\n    return b.copy_(honest(x, weight))\n"
    )
    assert judged(source).results[0].timing.mode == "graph+copy"


def test_writing_out_of_bounds_ends_only_its_author(judged):
    outcome = judged(OUT_OF_BOUNDS)
    assert outcome.results[0].status is Status.RUNTIME_ERROR
    assert "illegal" in outcome.results[0].message
    assert judged(RMSNORM).results[0].status is Status.PASSED


def test_a_graph_bound_to_its_first_inputs_is_incorrect(judged):
    source = (
        HONEST
        + "\nkept = {}\ndef run(x, weight):\n    return kept.setdefault(x.shape, honest(x, weight))\n"
    )
    assert judged(source).results[0].status is Status.INCORRECT_NUMERICAL


def test_no_device_memory_is_left_by_workers(judge, judged):
    import torch

    judged(RMSNORM)
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        judged(RMSNORM)
    assert torch.cuda.mem_get_info()[0] >= before - (64 << 20)


@pytest.fixture
def alone(judge):
    """Other processes on the GPU could be to blame, so nobody is accused; they may just be leaving."""
    deadline = time.monotonic() + 40
    while _processes_on_gpu() > 1:
        if time.monotonic() > deadline:
            pytest.skip("other processes hold contexts on this GPU")
        time.sleep(1)


RESTLESS = """
import threading

def watch():
    # Stands for a kernel that stays on the GPU; one that never ended would stop its own author.
    side = torch.cuda.Stream()
    while True:
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)  # A tenth of a second.
        side.synchronize()

threading.Thread(target=watch, daemon=True).start()
"""


def test_a_kernel_that_runs_while_inputs_are_written_is_caught(judged, alone, monkeypatch):
    monkeypatch.setattr(calls, "_IDLE_CHECK_SHARE", 1.0)
    outcome = judged(RMSNORM + RESTLESS, timeout_s=40.0)
    (result,) = outcome.results[:1]
    assert result.status is Status.REWARD_HACK, result.message
    assert "while its inputs were written" in result.message


def test_an_idle_device_is_not_called_busy(judge, alone):
    assert judge.backend.idle_check is True
    assert not any(judge.backend.busy() for _ in range(50))
    assert judge.backend.idle_again(5.0)


def test_a_device_that_another_process_works_on_is_called_busy_until_that_ends(judge, alone):
    code = "import torch; torch.cuda._sleep(20_000_000_000); print(flush=True); torch.cuda.synchronize()"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        other.stdout.readline()
        assert judge.backend.busy()
        assert not judge.backend.idle_again(0.5)
    finally:
        other.kill()
        other.communicate()
    assert judge.backend.idle_again(5.0)
    assert not judge.backend.busy()


def test_cuda_starts_inside_all_layers_and_none_had_to_be_left_out(judge, judged):
    assert judged(RMSNORM).results[0].status is Status.PASSED
    assert judge.left_out == {}


def test_a_layer_that_a_trusted_kernel_does_not_get_through_is_left_out(judge, toy, monkeypatch):
    for name, value in {"_calibration": None, "left_out": {}, "limits": judge.limits}.items():
        monkeypatch.setattr(judge, name, value)
    monkeypatch.setattr(judge, "trusted", (toy, Solution.from_text(NEEDS_A_SOCKET)))
    outcome = judge.evaluate(Request(toy, Solution.from_text(RMSNORM)))
    assert outcome.results[0].status is Status.PASSED
    assert set(judge.left_out) == {"seccomp"}
    assert "a trusted kernel failed" in outcome.isolation["seccomp"]


def test_all_layers_hold_with_cuda_inside_them(judge):
    from sol_gym.sandbox import doctor
    from sol_gym.sandbox.worker.isolation import missing

    assert missing(judge.probe()) == {}
    broken = [f for f in doctor.examine(judge) if not f.held]
    assert broken == []
