"""Explanations, their page, and capacity: what a kernel author is told, and whether it is true."""

from __future__ import annotations

import itertools
import math
import re
from html.parser import HTMLParser

import pytest

from sol_gym.device import get_device
from sol_gym.solar import analyze
from sol_gym.solar.analyzer import run_stages
from sol_gym.solar.capacity import attention, least_words, matmul, on_chip_bytes, search
from sol_gym.solar.explain import explain
from sol_gym.solar.page import html
from sol_gym.solar.region import Region, describe

BF16, I64 = "bfloat16", "int64"
B200 = get_device("b200-1500")

REFERENCE = """
def run(x, w, table, ids, unused, q, k, v):
    dead = x @ unused
    h = F.silu(x @ w)
    picked = table[torch.tensor([1, 5])]
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return h, picked * 2, a
"""


@pytest.fixture
def problem(make_problem):
    inputs = {
        "x": ([64, 32], BF16), "w": ([32, 48], BF16), "table": ([100, 8], BF16),
        "ids": ([4], I64), "unused": ([32, 8], BF16),
        **{n: ([1, 2, 128, 16], BF16) for n in "qkv"},
    }  # fmt: skip
    outputs = {"h": ([64, 48], BF16), "p": ([2, 8], BF16), "a": ([1, 2, 128, 16], BF16)}
    return make_problem(REFERENCE, inputs, outputs)


def test_explanation_names_what_is_dead_unread_partly_read_and_masked(problem):
    found = explain(problem, problem.workloads[0], B200, published_ms=0.001, baseline_ms=0.002)
    verdict = {t.name: t for t in found.tensors}
    assert verdict["unused"].verdict == verdict["ids"].verdict == "unread"
    assert verdict["table"].verdict == "partly read" and verdict["table"].moved_bytes == 2 * 8 * 2
    assert "2 of 100 along axis 0" in verdict["table"].detail
    dead = [o for o in found.operations if o.status == "dead" and o.as_written_flops]
    assert dead[0].why == "no output depends on it"
    assert [(o.operation, o.as_written_flops, o.flops) for o in dead] == [
        ("mm", 2 * 64 * 32 * 8, 0)
    ]
    masked = [
        o for o in found.operations if o.as_written_flops and 0 < o.flops < o.as_written_flops
    ]
    live = 128 * 129 // 2
    assert [o.flops for o in masked] == [2 * 2 * 16 * live] * 2
    text = str(found)
    for part in ("Softmax between contractions", "published bound 0.001 ms"):
        assert part in text
    assert re.search(r"Leave out: .*\bmm \(line 5\)", text)
    # Lines are those of the reference.
    silu = next(o for o in found.operations if o.operation == "silu")
    assert "F.silu" in problem.reference.splitlines()[silu.line - 1]


def test_page_is_one_well_formed_document_without_anything_from_outside(problem):
    page = html(explain(problem, problem.workloads[0], B200))
    assert not re.search(r"(src|href)\s*=|<script|<link|url\(|@import", page)
    assert page.count("<svg") == 3

    class Balanced(HTMLParser):
        stack: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "rect", "circle", "path", "polyline"):
                self.stack.append(tag)

        def handle_endtag(self, tag):
            if tag not in ("rect", "circle", "path", "polyline"):
                assert self.stack.pop() == tag

    Balanced.stack = []
    Balanced().feed(page)
    assert Balanced.stack == []


def test_names_in_a_page_are_escaped(make_problem):
    problem = make_problem("def run(x): return x + 1", {"x": ([4], BF16)}, {"y": ([4], BF16)})
    problem = problem.model_copy(update={"id": "<b>&"})
    assert "<b>&" not in html(explain(problem, problem.workloads[0], B200))


def test_needed_is_at_most_as_written_and_at_most_unfused(problem):
    found = analyze(problem, problem.workloads[0], B200)
    assert found.flops < found.as_written_flops
    assert found.total_bytes < found.unfused_bytes


def test_every_stage_can_be_printed(problem):
    stages = run_stages(problem, problem.workloads[0])
    lines = str(stages.trace).splitlines()
    assert any(line.startswith("%0 = mm(x [64, 32], unused [32, 8])") for line in lines)
    assert lines[-1].startswith("return ")


def test_special_functions_of_the_worked_cases(make_problem):
    swiglu = make_problem(
        "def run(x, g, u, d): return (F.silu(x @ g.T) * (x @ u.T)) @ d.T",
        {
            "x": ([64, 32], BF16),
            "g": ([48, 32], BF16),
            "u": ([48, 32], BF16),
            "d": ([32, 48], BF16),
        },
        {"y": ([64, 32], BF16)},
    )
    assert analyze(swiglu, swiglu.workloads[0], B200).sfu_ops == 64 * 48


@pytest.mark.parametrize(
    ("best", "mark"), [(1.2, "narrow"), (1.9, "ok"), (9.0, "loose"), (11.0, "vacuous")]
)
def test_quality_is_the_headroom_to_the_best_time(problem, best, mark):
    found = analyze(problem, problem.workloads[0], B200)
    assert found.quality(best * found.t_sol_ms) == mark


def test_regions_are_described_in_words():
    assert describe(Region.full((3, 4))) == "all"
    assert describe(Region.empty((3, 4))) == "nothing"
    rows = Region.full((3, 4)).slice(0, 1, 3).unslice(0, 3, 1)
    assert describe(rows) == "8 of 12 elements: 2 of 3 along axis 0 (1..2)"


# ---- Capacity --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [256, 1024])
@pytest.mark.parametrize("share", [1 / 64, 1 / 16, 1 / 4])
def test_best_tiling_of_a_product_is_near_the_closed_form_and_never_below(size, share):
    words = size * size * share
    found = search(matmul(size, size, size)).at(2 * words) / 2
    least = least_words(size**3, words)
    assert least <= found
    # Tiles are powers of two, and three of them have to fit.
    assert found <= 3.0 * least + 3 * size * size


def test_traffic_falls_with_capacity_to_what_is_compulsory():
    schedules = search(matmul(512, 256, 128))
    curve = [schedules.at(2**i) for i in range(8, 24)]
    assert all(a >= b for a, b in itertools.pairwise(curve))
    assert curve[-1] == 2 * (512 * 128 + 128 * 256 + 512 * 256)
    assert search(matmul(8, 8, 8)).at(1) == math.inf


def test_traffic_of_fused_attention_falls_as_one_over_capacity():
    n, d = 4096, 64
    schedules = search(attention(n, n, d))
    small, large = schedules.at(64 * 1024), schedules.at(512 * 1024)
    assert 5 < small / large < 11  # eight times the room
    assert schedules.at(2**30) == 4 * n * d * 2


def test_a_chip_that_is_too_small_binds(make_problem):
    n = 4096
    problem = make_problem(
        "def run(a, b): return a @ b",
        {"a": ([n, n], BF16), "b": ([n, n], BF16)},
        {"c": ([n, n], BF16)},
    )
    workload = problem.workloads[0]
    assert analyze(problem, workload, B200).capacity_ms is None
    tiny = B200.model_copy(
        update={"l2_bytes": 4096, "shared_bytes_per_sm": 0, "register_bytes_per_sm": 0}
    )
    assert on_chip_bytes(tiny) == 4096
    found = analyze(problem, workload, tiny)
    least = 2 * (2 * n**3 / math.sqrt(2048) - 2 * 2048)
    assert found.bound_by == "capacity"
    assert found.t_sol_ms == pytest.approx(1e3 * least / tiny.bandwidth_bytes_per_s)
