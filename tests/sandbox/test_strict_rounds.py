"""Strict sets in the judge's correctness rounds, through real workers on the CPU."""

from __future__ import annotations

import pytest

from sol_gym.evaluation import Status
from sol_gym.problem import Pack
from sol_gym.sandbox import schedule
from tests.conftest import RMSNORM

UNIT_RMS = "def run(x, weight):\n    return x * weight\n"
HALF = """
import torch

def run(x, weight):
    half = x.half()
    square = (half * half).mean(-1, keepdim=True).float()
    return (x.float() * torch.rsqrt(square + 1e-6) * weight.float()).to(x.dtype)
"""
ROUNDED_SCALE = """
import torch

def run(x, weight):
    x = x.float()
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6).bfloat16().float()
    return (x * scale * weight.float()).to(torch.bfloat16)
"""
ONE_ROW_STALE = (
    RMSNORM.replace("def run(", "def right(")
    + """
def run(x, weight):
    y = right(x, weight)
    y[5] = y[6]
    return y
"""
)


@pytest.fixture(scope="module")
def wide(toy):
    """The toy problem with rows so wide that their mean square is one to within a few per cent."""
    axes = {**toy.definition.axes, "hidden": toy.definition.axes["hidden"].model_copy(update={"value": 4096})}  # fmt: skip
    definition = toy.definition.model_copy(update={"axes": axes})
    tolerance = toy.workloads[0].tolerance.model_copy(update={"max_rtol": 0.05})
    workload = toy.workloads[0].model_copy(update={"tolerance": tolerance})
    return toy.model_copy(update={"definition": definition, "workloads": (workload,)})


def test_the_reference_passes_and_the_record_counts_strict_rounds(judged):
    outcome = judged(RMSNORM, inputs_profile="strict")
    for result in outcome.results:
        assert result.status is Status.PASSED, result.message
        assert result.correctness.strict_rounds == 4
        assert result.correctness.strict_error < 1
        assert result.correctness.strict_skipped == []


def test_a_seed_repeats_strict_draws(judged):
    def errors(seed):
        outcome = judged(ROUNDED_SCALE, inputs_profile="strict", seed=seed)
        return [r.correctness.strict_error for r in outcome.results]

    assert errors(3) == errors(3) != errors(4)


@pytest.mark.parametrize("source", [UNIT_RMS, HALF, ONE_ROW_STALE], ids=["unit", "half", "stale"])
def test_what_compatible_inputs_hide_is_seen_on_strict_ones(judged, wide, source):
    if source is not ONE_ROW_STALE:  # One row in 32 is more than the tolerance lets pass.
        assert judged(source, wide).results[0].status is Status.PASSED
    result = judged(source, wide, inputs_profile="strict").results[0]
    assert result.status is Status.INCORRECT_NUMERICAL
    assert result.correctness.strict_rounds or "within tolerance" in result.message


def test_without_time_every_workload_has_one_strict_set_and_the_record_says_what_was_left_out(
    judged, toy, monkeypatch
):
    for name in ("_WORKLOAD_S", "_EVALUATION_S", "_SHARE"):
        monkeypatch.setattr(schedule, name, 0.0)
    four = toy.model_copy(
        update={
            "workloads": tuple(
                toy.workloads[0].model_copy(update={"uuid": f"w{rows}", "axes": {"rows": rows}})
                for rows in (5, 7, 9, 11)
            )
        }
    )
    outcome = judged(RMSNORM, four, inputs_profile="strict")
    left_out = []
    for result in outcome.results:
        assert result.status is Status.PASSED, result.message
        assert result.correctness.strict_rounds == 1
        assert all("left out to save time" in text for text in result.correctness.strict_skipped)
        left_out.append({text.split(":")[0] for text in result.correctness.strict_skipped})
    assert not set.intersection(*left_out)
    assert 0 < outcome.stages_s["strict"] < outcome.stages_s["correctness"]


def test_numbers_that_strict_sets_changed_are_given_again_in_timed_calls(judged, toy):
    source = "import torch\n\ndef run(x, scale):\n    return (x.float() * scale).to(x.dtype)\n"
    definition = toy.definition
    inputs = {
        "x": definition.inputs["x"],
        "scale": definition.inputs["weight"].model_copy(update={"shape": None, "dtype": "float32"}),
    }
    problem = toy.model_validate(
        {
            "id": "toy/scaled",
            "definition": {
                **definition.model_dump(), "reference": source,
                "inputs": {k: v.model_dump() for k, v in inputs.items()},
            },
            "workloads": [
                {
                    "uuid": "w", "axes": {"rows": 8},
                    "inputs": {"x": {"type": "random"}, "scale": {"type": "scalar", "value": 3.0}},
                }
            ],
        }
    )  # fmt: skip
    outcome = judged(source, problem, inputs_profile="strict", timing=True)
    assert outcome.results[0].status is Status.PASSED, outcome.results[0].message
    built_in = source.replace("* scale", "* 3.0")
    assert judged(built_in, problem).results[0].status is Status.PASSED
    wrong = judged(built_in, problem, inputs_profile="strict").results[0]
    assert wrong.status is Status.INCORRECT_NUMERICAL


def test_a_kernel_that_knows_the_listed_sizes_alone_fails_where_an_axis_is_free(judged, toy):
    sizes = sorted(w.axes["rows"] for w in toy.workloads)
    listed_only = RMSNORM.replace("def run(", "def right(") + (
        f"def run(x, weight):\n    y = right(x, weight)\n    return y if len(x) in {sizes} else 0 * y\n"
    )
    free = toy.model_copy(update={"pack": Pack(id=toy.id, title="", free_axes=["rows"])})
    assert all(
        r.status is Status.PASSED for r in judged(RMSNORM, free, inputs_profile="strict").results
    )
    assert all(
        r.status is Status.PASSED for r in judged(listed_only, toy, inputs_profile="strict").results
    )
    outcome = judged(listed_only, free, inputs_profile="strict")
    assert [r.status for r in outcome.results].count(Status.INCORRECT_NUMERICAL) == 1
    assert "a size that is not listed" in outcome.results[0].message


def test_what_is_timed_is_held_to_the_yardstick_too(judged, wide):
    """A kernel that is exact in the correctness rounds, and coarse where nobody looks closely."""
    source = RMSNORM.replace("def run(", "def right(") + (
        "\ncalls = []\ndef run(x, weight):\n"
        "    y = right(x, weight)\n"
        "    calls.append(None)\n"
        "    if len(calls) > 8:\n"
        "        y = (y.float() * (1 + 0.045 * torch.rand_like(y, dtype=torch.float32))).to(y.dtype)\n"
        "    return y\n"
    )
    assert judged(source, wide, timing=True).results[0].status is Status.PASSED
    result = judged(source, wide, inputs_profile="strict", timing=True).results[0]
    assert result.status is Status.INCORRECT_NUMERICAL, result.correctness
    assert "timed calls" in result.message
