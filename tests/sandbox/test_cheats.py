"""A few families of cheat, and honest look-alikes, through the real judge on the CPU."""

from __future__ import annotations

import pytest

from sol_gym.evaluation import Status
from tests.conftest import RMSNORM

HONEST = RMSNORM.replace("def run(", "def honest(")


def first(outcome):
    return outcome.results[0]


def test_the_reference_itself_passes_and_is_timed(judged):
    outcome = judged(RMSNORM, timing=True)
    for result in outcome.results:
        assert result.status is Status.PASSED, result.message
        assert result.timing.t_k_ms > 0
        assert result.timing.n_sets >= 1
        assert result.correctness.rounds > 2


def test_destination_passing_is_told_from_the_signature(judged):
    outcome = judged(
        HONEST + "\ndef run(x, weight, y):\n    y.copy_(honest(x, weight))\n", timing=True
    )
    assert first(outcome).timing.mode == "eager+dps"


@pytest.mark.parametrize(
    "body",
    [
        "    return torch.full_like(x, float('nan'))",
        "    return torch.zeros_like(x)",
        "    return x",
        "    return torch.empty_like(x)",
    ],
)
def test_constant_and_copied_outputs_are_incorrect(judged, body):
    outcome = judged("import torch\ndef run(x, weight):\n" + body + "\n")
    assert first(outcome).status is Status.INCORRECT_NUMERICAL
    assert first(outcome).correctness.mismatch is not None


def test_replaying_an_answer_is_incorrect(judged):
    source = (
        HONEST
        + "\nkept = {}\ndef run(x, weight):\n    return kept.setdefault(tuple(x.shape), honest(x, weight))\n"
    )
    assert first(judged(source)).status is Status.INCORRECT_NUMERICAL


def test_going_stale_once_timing_starts_is_caught_in_the_timed_batch(judged):
    source = (
        HONEST + "\ncalls, kept = {}, {}\ndef run(x, weight):\n"
        "    k = tuple(x.shape)\n    calls[k] = calls.get(k, 0) + 1\n"
        "    if calls[k] < 4:\n        kept[k] = honest(x, weight)\n"
        "    return kept[k]\n"
    )
    assert first(judged(source, timing=True)).status is Status.INCORRECT_NUMERICAL


def test_changing_an_input_is_rejected(judged):
    outcome = judged("def run(x, weight):\n    x.zero_()\n    return x.clone()\n")
    assert first(outcome).status is Status.INCORRECT_NUMERICAL
    assert "changed its input" in first(outcome).message


def test_a_thread_that_fills_the_output_later_is_rejected(judged):
    source = (
        "import threading, time\n" + HONEST + "\ndef run(x, weight, y):\n"
        "    def later():\n        time.sleep(0.05)\n        y.copy_(honest(x, weight))\n"
        "    threading.Thread(target=later).start()\n"
    )
    assert first(judged(source, timing=True)).status in (
        Status.INCORRECT_NUMERICAL,
        Status.REWARD_HACK,
    )


def test_a_lazy_tensor_pays_inside_the_window_and_is_right(judged):
    source = (
        HONEST + "\nclass Lazy(torch.Tensor):\n    @classmethod\n"
        "    def __torch_function__(cls, func, types, args=(), kwargs=None):\n"
        "        def force(a):\n            return honest(*a.job) if isinstance(a, Lazy) and hasattr(a, 'job') else a\n"
        "        with torch._C.DisableTorchFunctionSubclass():\n"
        "            if getattr(func, '__name__', '') == '__get__':\n                return func(*args, **(kwargs or {}))\n"
        "            return func(*[force(a) for a in args], **(kwargs or {}))\n"
        "def run(x, weight):\n    out = torch.empty_like(x).as_subclass(Lazy)\n    out.job = (x, weight)\n    return out\n"
    )
    assert first(judged(source)).status is Status.PASSED


def test_patched_clocks_change_nothing_for_the_judge(judged):
    slow = (
        "import time\n"
        + HONEST
        + "\ndef run(x, weight):\n    time.sleep(0.3)\n    return honest(x, weight)\n"
    )
    lie = "\nreal = time.perf_counter\ntime.perf_counter = lambda: real() * 1e-6\n"
    timing = first(judged(slow + lie, timing=True)).timing
    assert timing.reported_ms < 1
    assert timing.t_k_ms > 200
    assert any("disagree" in mark for mark in timing.marks)


def test_a_reused_output_buffer_is_honest(judged):
    source = (
        HONEST
        + "\nkept = {}\ndef run(x, weight):\n    b = kept.setdefault(x.shape, torch.empty_like(x))\n    return b.copy_(honest(x, weight))\n"
    )
    assert first(judged(source, timing=True)).status is Status.PASSED


def test_threads_that_are_joined_are_honest(judged):
    source = (
        "import threading\n" + HONEST + "\ndef run(x, weight):\n    out = torch.empty_like(x)\n"
        "    t = threading.Thread(target=lambda: out.copy_(honest(x, weight)))\n    t.start()\n    t.join()\n    return out\n"
    )
    assert first(judged(source, timing=True)).status is Status.PASSED


def test_a_seed_repeats_the_inputs(judged):
    source = "import torch\ndef run(x, weight):\n    print(float(x.double().sum()))\n    return x\n"
    assert judged(source, seed=7).log == judged(source, seed=7).log
    assert judged(source, seed=7).log != judged(source).log
