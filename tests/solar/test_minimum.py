"""Algebraic minima: no way of associating or sharing products beats a bound."""

from __future__ import annotations

import pytest

from sol_gym.device import get_device
from sol_gym.solar import Bound, analyze

BF16, F32 = "bfloat16", "float32"


def bound_of(make_problem, source: str, inputs: dict, outputs: dict, **options) -> Bound:
    problem = make_problem(source, inputs, outputs, **options)
    return analyze(problem, problem.workloads[0], get_device("h200"))


def chain_bound(make_problem, body: str, sizes: tuple[int, int, int, int]) -> Bound:
    m, k, q, n = sizes
    inputs = {"x": ([m, k], BF16), "a": ([k, q], BF16), "b": ([q, n], BF16)}
    return bound_of(make_problem, f"def run(x, a, b): {body}", inputs, {"y": ([m, n], BF16)})


@pytest.mark.parametrize(
    "body",
    [
        "return (x @ a) @ b",
        "return x @ (a @ b)",
        "return ((x @ a).float() * 0.5).to(x.dtype).contiguous() @ b",
        "return ((x @ a).view(8, 8, -1).transpose(0, 1).reshape(8, 8, -1) @ b)"
        ".transpose(0, 1).reshape(64, -1)",
    ],
)
def test_either_association_has_the_bound_of_the_better(make_problem, body):
    for sizes in ((64, 512, 512, 4), (64, 8, 512, 512), (64, 64, 64, 64)):
        m, k, q, n = sizes
        bound = chain_bound(make_problem, body, sizes)
        assert bound.flops == min(2 * m * q * (k + n), 2 * k * n * (q + m))


def test_small_middle_is_kept_as_it_is_written(make_problem):
    bound = chain_bound(make_problem, "return (x @ a) @ b", (512, 512, 8, 512))
    assert bound.flops == bound.as_written_flops and not bound.rewrites


@pytest.mark.parametrize(
    "body",
    [
        "return F.relu(x @ a) @ b",
        "return (x @ a).softmax(-1) @ b",
        "h = x @ a\n    return (h @ b) * h.amax(-1, keepdim=True)",
    ],
)
def test_nonlinearities_and_other_uses_end_a_chain(make_problem, body):
    bound = chain_bound(make_problem, f"\n    {body}", (64, 512, 512, 4))
    assert bound.flops == bound.as_written_flops and not bound.rewrites


def test_scales_and_biases_do_not_end_a_chain(make_problem):
    source = "def run(x, a, g, c, b): return F.linear(x, a, c) * g @ b"
    inputs = {
        "x": ([64, 512], BF16), "a": ([512, 512], BF16), "g": ([512], BF16), "c": ([512], BF16),
        "b": ([512, 4], BF16),
    }  # fmt: skip
    bound = bound_of(make_problem, source, inputs, {"y": ([64, 4], BF16)})
    assert bound.flops == 2 * 512 * 4 * (512 + 64)


def test_absorbed_value_projection_is_the_bound_of_attention_with_few_queries(make_problem):
    # MLA: (p (c Wv)) Wo with 4 queries and 1024 keys is cheaper as ((p c) Wv) Wo.
    batch, heads, queries, keys, rank, dim, hidden = 2, 8, 4, 1024, 512, 64, 256
    source = f"""
        def run(s, c, wv, wo):
            v = F.linear(c, wv).view({batch}, {keys}, {heads}, {dim}).transpose(1, 2)
            o = (s.softmax(-1) @ v).transpose(1, 2).reshape({batch}, {queries}, -1)
            return F.linear(o, wo)
    """
    inputs = {
        "s": ([batch, heads, queries, keys], BF16), "c": ([batch, keys, rank], BF16),
        "wv": ([heads * dim, rank], BF16), "wo": ([hidden, heads * dim], BF16),
    }  # fmt: skip
    bound = bound_of(make_problem, source, inputs, {"y": ([batch, queries, hidden], BF16)})
    rows = batch * queries * heads
    assert bound.flops == 2 * rows * (keys * rank + rank * dim + dim * hidden)
    assert bound.as_written_flops > 10 * bound.flops
    assert "3 products of 4 operands" in bound.rewrites[0]


def test_absorbed_key_projection_is_the_bound_of_one_query(make_problem):
    heads, keys, rank, dim = 8, 1024, 512, 64
    source = f"""
        def run(q, c, wk):
            k = F.linear(c, wk).view(1, {keys}, {heads}, {dim}).transpose(1, 2)
            return (q @ k.transpose(-1, -2) * {dim}**-0.5).softmax(-1)
    """
    inputs = {
        "q": ([1, heads, 1, dim], BF16), "c": ([1, keys, rank], BF16),
        "wk": ([heads * dim, rank], BF16),
    }  # fmt: skip
    bound = bound_of(make_problem, source, inputs, {"p": ([1, heads, 1, keys], BF16)})
    assert bound.flops == 2 * heads * (dim * rank + rank * keys)


def test_equal_products_count_once_and_unequal_ones_do_not(make_problem):
    inputs = {"x": ([64, 128], BF16), "a": ([128, 32], BF16)}
    outputs = {"y": ([64, 32], BF16)}
    one = 2 * 64 * 128 * 32

    def flops(body: str) -> int:
        return bound_of(make_problem, f"def run(x, a):\n    {body}", inputs, outputs).flops

    assert flops("return torch.relu(x @ a) + torch.tanh(x @ a)") == one
    assert (
        flops("return torch.relu(x.float().to(x.dtype) @ a) + (x.float().to(x.dtype) @ a)") == one
    )
    assert flops("return torch.relu(x @ a) + torch.tanh(x.flip(0) @ a)") == 2 * one
    assert (
        flops("y = torch.relu(x @ a)\n    x = x.clone()\n    x += 1\n    return y + x @ a")
        == 2 * one
    )
    assert flops("return torch.relu(torch.rand_like(x) @ a) + torch.rand_like(x) @ a") == 2 * one


def test_sum_of_a_product_is_a_product_of_a_sum(make_problem):
    source = "def run(x, a): return (x @ a).float().mean(0)"
    inputs = {"x": ([64, 512], BF16), "a": ([512, 256], BF16)}
    bound = bound_of(make_problem, source, inputs, {"y": ([256], F32)})
    assert bound.flops == 2 * 512 * 256


def test_repeats_are_multiplied_once(make_problem):
    source = "def run(x, a): return x[:, None].expand(64, 7, 512) @ a"
    inputs = {"x": ([64, 512], BF16), "a": ([512, 512], BF16)}
    bound = bound_of(make_problem, source, inputs, {"y": ([64, 7, 512], BF16)})
    assert bound.flops == 2 * 64 * 512 * 512


def test_masks_thin_out_every_order(make_problem):
    # A triangular constant leaves half of x @ a; no order needs less than that.
    body = "return (x.tril() @ a) @ b"
    bound = chain_bound(make_problem, body, (64, 64, 64, 64))
    assert bound.flops <= 2 * 64 * (64 * 65 // 2) + 2 * 64**3
    thin = chain_bound(make_problem, body, (64, 64, 64, 1))
    assert thin.flops <= 2 * 64 * 64 + 2 * (64 * 65 // 2)


def test_less_of_what_is_chained_is_never_more_work(make_problem):
    # Half of the rows are returned.
    whole = chain_bound(make_problem, "return (x @ a) @ b", (64, 512, 512, 4))
    part = bound_of(
        make_problem,
        "def run(x, a, b): return ((x @ a) @ b)[:32]",
        {"x": ([64, 512], BF16), "a": ([512, 512], BF16), "b": ([512, 4], BF16)},
        {"y": ([32, 4], BF16)},
    )
    assert 0 < part.flops < whole.flops
