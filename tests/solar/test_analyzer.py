"""Properties of whole bounds: what may and what may not change one."""

from __future__ import annotations

import itertools
import time

import pytest

from sol_gym.device import get_device
from sol_gym.problem import Tolerance
from sol_gym.problems import load
from sol_gym.solar import Bound, analyze

BF16, F32, I64, BOOL = "bfloat16", "float32", "int64", "bool"
H200, B200 = get_device("h200"), get_device("b200-1500")


def bound_of(problem, device=H200, **options) -> Bound:
    (workload,) = problem.workloads
    return analyze(problem, workload, device, **options)


def attention(make_problem, body: str, *, seq: int = 64, extra=None) -> Bound:
    inputs = {n: ([2, 4, seq, 32], BF16) for n in "qkv"} | (extra or {})
    source = f"def run({', '.join(inputs)}):\n" + "\n".join(f"    {x}" for x in body.splitlines())
    return bound_of(make_problem(source, inputs, {"o": ([2, 4, seq, 32], BF16)}))


PLAIN = "return F.scaled_dot_product_attention(q, k, v)"


@pytest.mark.parametrize(
    "body",
    [
        "dead = (q @ k.transpose(-1, -2)).exp() @ v\n" + PLAIN,
        "unused = extra.float() @ extra.float().transpose(-1, -2)\n" + PLAIN,
        "q, k, v = q.clone(), k.contiguous(), v.transpose(0, 1).contiguous().transpose(0, 1)\n"
        + PLAIN,
        "s = torch.einsum('bhqd,bhkd->bhqk', q, k) * 32**-0.5\nreturn (s.softmax(-1) @ v)",
        "return torch.stack([F.scaled_dot_product_attention(*x) for x in zip(q, k, v)])",
    ],
)
def test_writing_it_another_way_does_not_change_the_bound(make_problem, body):
    extra = {"extra": ([2, 4, 64, 32], BF16)} if "extra" in body else None
    plain = attention(make_problem, PLAIN)
    other = attention(make_problem, body, extra=extra)
    assert (other.work, other.total_bytes) == (plain.work, plain.total_bytes)
    assert other.t_sol_ms == plain.t_sol_ms


MASKS = {
    "flag": "return F.scaled_dot_product_attention(q, k, v, is_causal=True)",
    "boolean": "m = torch.ones(64, 64, dtype=torch.bool).tril()\n"
    "return F.scaled_dot_product_attention(q, k, v, m)",
    "positions": "i = torch.arange(64)\ns = q @ k.transpose(-1, -2)\n"
    "return s.masked_fill(i[:, None] < i, -1e9).softmax(-1) @ v",
    "added": "m = torch.full((64, 64), -torch.inf).triu(1)\n"
    "return (q @ k.transpose(-1, -2) + m).softmax(-1) @ v",
    "scaled boolean": "m = torch.ones(64, 64).tril()\n"
    "return (q @ k.transpose(-1, -2) + (1.0 - m) * -1e9).softmax(-1).to(v.dtype) @ v",
    "where": "m = torch.ones(64, 64, dtype=torch.bool).triu(1)\ns = q @ k.transpose(-1, -2)\n"
    "return torch.where(m, torch.finfo(s.dtype).min, s).softmax(-1) @ v",
    "in place": "s = q @ k.transpose(-1, -2)\n"
    "s.masked_fill_(torch.ones(64, 64, dtype=torch.bool).triu(1), -torch.inf)\n"
    "return s.softmax(-1) @ v",
    "input named mask": "return (q @ k.transpose(-1, -2) + attention_mask).softmax(-1) @ v",
}


@pytest.mark.parametrize("way", MASKS)
def test_causal_masks_count_live_pairs_however_they_are_made(make_problem, way):
    extra = {"attention_mask": ([2, 1, 64, 64], BF16)} if "named" in way else None
    bound = attention(make_problem, MASKS[way], extra=extra)
    assert bound.work == {"bf16_tc": 2 * 2 * (2 * 4) * 32 * (64 * 65 // 2)}
    assert bound.complete
    assert bound.read_bytes.get("attention_mask", 0) == 0


def test_ragged_windows_and_padding_count_their_pairs(make_problem):
    body = """lengths = torch.tensor([40, 64])
i = torch.arange(64)
seen = (i[:, None] >= i) & (i[:, None] - i < 8)
seen = seen & (i < lengths[:, None])[:, None, None, :]
return F.scaled_dot_product_attention(q, k, v, seen)"""
    bound = attention(make_problem, body)
    live = [sum(0 <= i - j < 8 and j < n for i in range(64) for j in range(64)) for n in (40, 64)]
    assert bound.work == {"bf16_tc": 2 * 2 * 4 * 32 * sum(live)}


def test_mask_of_unknown_structure_makes_the_bound_smaller_and_says_so(make_problem):
    # Which keys a query sees depends on the keys themselves.
    body = """group = k.float().argmax(-1)
seen = group[..., :, None] == group[..., None, :]
return (q @ k.transpose(-1, -2)).masked_fill(~seen, -torch.inf).softmax(-1) @ v"""
    bound = attention(make_problem, body)
    assert not bound.complete and bound.notes
    assert bound.flops < attention(make_problem, PLAIN).flops


def test_scattered_masks_count_their_share(make_problem):
    body = "p = (q @ k.transpose(-1, -2)).softmax(-1)\nreturn (p * drop.to(p.dtype)) @ v"
    bound = attention(make_problem, body, extra={"drop": ([2, 4, 64, 64], BOOL)})
    dense = attention(make_problem, PLAIN).flops
    assert 0.7 * dense < bound.flops < 0.8 * dense  # all scores, and half of the weighted sum


@pytest.mark.parametrize("axis", ["rows", "inner", "columns"])
def test_bound_grows_with_every_axis(make_problem, axis):
    def at(size: int) -> Bound:
        m, k, n = (size if axis == x else 96 for x in ("rows", "inner", "columns"))
        problem = make_problem(
            "def run(x, w, b): return F.gelu(F.linear(x, w, b))",
            {"x": ([m, k], BF16), "w": ([n, k], BF16), "b": ([n], BF16)},
            {"y": ([m, n], BF16)},
        )
        return bound_of(problem)

    bounds = [at(size) for size in (16, 17, 64, 1024, 8192)]
    for smaller, larger in itertools.pairwise(bounds):
        assert smaller.t_sol_ms < larger.t_sol_ms
        assert smaller.flops < larger.flops and smaller.total_bytes < larger.total_bytes


def test_cast_before_a_gather_does_not_read_the_table(make_problem):
    def at(source: str) -> Bound:
        problem = make_problem(
            f"def run(table): return {source}",
            {"table": ([10_000, 64], BF16)},
            {"y": ([2, 64], F32)},
        )
        return bound_of(problem)

    rows = "[torch.tensor([3, 9000])]"
    assert at(f"table.float(){rows}").read_bytes == at(f"table{rows}.float()").read_bytes
    assert at(f"table.float(){rows}").read_bytes == {"table": 2 * 64 * 2}


def test_outputs_that_are_expanded_views_or_aliases_are_written_once(make_problem):
    problem = make_problem(
        "def run(x):\n    y = x * 2\n    return y[:, None].expand(4, 8, 16), y, y.clone()",
        {"x": ([4, 16], F32)},
        {"wide": ([4, 8, 16], F32), "same": ([4, 16], F32), "copy": ([4, 16], F32)},
    )
    assert bound_of(problem).write_bytes == {"wide": 256, "same": 0, "copy": 256}


@pytest.mark.parametrize(
    ("absolute", "relative", "unit"),
    [
        (0.0, 1e-2, "bf16_tc"),
        (0.0, 2**-10, "bf16_tc"),
        (0.0, 5e-4, "fp16_tc"),
        (0.0, 1e-5, "fp32"),
        # Outputs may be as small as 1/64, and a rounding error is relative to them.
        (2**-16, 1e-5, "bf16_tc"),
        (5e-6, 1e-5, "fp16_tc"),
        (1e-6, 1e-5, "fp32"),
    ],
)
def test_tolerance_admits_the_units_whose_rounding_it_lets_pass(
    make_problem, absolute, relative, unit
):
    problem = make_problem(
        "def run(x, w): return x @ w",
        {"x": ([64, 64], F32), "w": ([64, 64], F32)},
        {"y": ([64, 64], F32)},
        tolerance=Tolerance(max_atol=absolute, max_rtol=relative),
    )
    assert bound_of(problem).work == {unit: 2 * 64**3}
    assert bound_of(problem, precision="declared").work == {"fp32": 2 * 64**3}


def test_largest_time_binds_and_an_empty_kernel_is_the_least(make_problem):
    problem = make_problem("def run(x): return x + 1", {"x": ([64], F32)}, {"y": ([64], F32)})
    bound = bound_of(problem)
    assert bound.bound_by == "memory"
    assert bound.t_sol_ms == bound.memory_ms == pytest.approx(512 / 4.8e12 * 1e3)
    floor = H200.model_copy(update={"launch_ms": 0.002})
    assert (bound_of(problem, floor).bound_by, bound_of(problem, floor).t_sol_ms) == (
        "launch",
        0.002,
    )


def test_vector_work_is_shown_and_never_binds(make_problem):
    problem = make_problem(
        "def run(x, w): return F.conv2d(x, w, padding=15, groups=64)",
        {"x": ([1, 64, 64, 64], F32), "w": ([64, 1, 31, 31], F32)},
        {"y": ([1, 64, 64, 64], F32)},
    )
    bound = bound_of(problem)
    assert bound.compute_ms["fp32_fma"] > bound.memory_ms
    assert bound.bound_by == "memory"


def test_other_devices_and_repeats_are_not_analyzed_again():
    problem = load("L2/043", profile="full")
    workload = problem.workloads[-1]
    analyze(problem, workload, H200)
    start = time.perf_counter()
    on_b200 = [analyze(problem, workload, B200) for _ in range(20)]
    assert time.perf_counter() - start < 1.0
    assert on_b200[0].read_bytes == analyze(problem, workload, H200).read_bytes
    assert on_b200[0].device == "b200-1500"


def test_bound_survives_json():
    problem = load("L1/069", profile="smoke")
    bound = analyze(problem, problem.workloads[0], H200)
    assert Bound.model_validate_json(bound.model_dump_json()) == bound


CAUSAL = (
    "m = torch.full((64, 64), -torch.inf).triu(1)\np = (q @ k.transpose(-1, -2) + m).softmax(-1)\n"
)


def test_masked_probabilities_stay_masked_through_codes_and_tables(make_problem):
    body = (
        CAUSAL + "codes = (p > 0.1).to(torch.uint8)\ncodes += p > 0.5\n"
        "table = torch.tensor([0.0, 1.0, 2.0], dtype=v.dtype)\n"
        "return table[(codes << 0).int()] @ v"
    )
    bound = attention(make_problem, body)
    assert bound.work == {"bf16_tc": 2 * 2 * (2 * 4) * 32 * (64 * 65 // 2)}


def test_masked_elements_that_cannot_be_followed_make_the_bound_smaller(make_problem):
    half = 2 * (2 * 4) * 32 * (64 * 65 // 2)
    bound = attention(make_problem, CAUSAL + "return torch.searchsorted(p, p).to(v.dtype) @ v")
    assert bound.work == {"bf16_tc": half}  # the scores; the weighted sum may be of anything
    assert not bound.complete
