"""Worked cases: bounds derived by hand, each with a trap that a naive analyzer falls into."""

from __future__ import annotations

import pytest

from sol_gym.device import get_device
from sol_gym.problem import Tolerance
from sol_gym.solar import analyze

B200 = get_device("b200-1500")
_DATASHEET = {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp8": 1979e12, "nvfp4": 1979e12}
H200 = get_device("h200").model_copy(
    update={"peak_flops": get_device("h200").peak_flops | _DATASHEET}
)
"""With the rates that the times below were worked out for; they hold at 1,830 MHz."""
BF16, FP32, I64 = "bfloat16", "float32", "int64"


def times(problem, *, precision="declared"):
    """T_SOL on a B200 at 1500 MHz and on an H200, and the bound."""
    (workload,) = problem.workloads
    bounds = [analyze(problem, workload, d, precision=precision) for d in (B200, H200)]
    assert bounds[0].complete and bounds[0].lane == "meta"
    return (*(round(b.t_sol_ms, 7) for b in bounds), bounds[0])


def test_square_product_is_two_flops_a_multiply_add_and_reads_each_operand_once(make_problem):
    n = 4096
    problem = make_problem(
        "def run(A, B): return A @ B.T",
        {"A": ([n, n], BF16), "B": ([n, n], BF16)},
        {"C": ([n, n], BF16)},
    )
    b200, h200, bound = times(problem)
    assert bound.work == {"bf16_tc": 2 * n**3}
    assert bound.total_bytes == 3 * n * n * 2
    assert (b200, h200) == (0.0758806, 0.1389676)
    assert bound.bound_by == "compute:bf16_tc"


def test_tolerance_widens_the_rate_of_a_float32_product_but_never_its_traffic(make_problem):
    n = 2048
    problem = make_problem(
        "def run(A, B): return A @ B",
        {"A": ([n, n], FP32), "B": ([n, n], FP32)},
        {"C": ([n, n], FP32)},
        tolerance=Tolerance(max_rtol=1e-2),
    )
    b200, h200, bound = times(problem, precision="tolerance")
    assert bound.work == {"bf16_tc": 2 * n**3}
    assert bound.total_bytes == 3 * n * n * 4
    assert (b200, h200) == (0.0094851, 0.0173709)
    strict = analyze(problem, problem.workloads[0], H200, precision="declared")
    assert strict.work == {"fp32": 2 * n**3}


def test_norm_uses_its_input_twice_and_reads_it_once(make_problem):
    problem = make_problem(
        """
        def run(x, w):
            x32 = x.float()
            n = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)
            return n.to(x.dtype) * w
        """,
        {"x": ([8192, 4096], BF16), "w": ([4096], BF16)},
        {"y": ([8192, 4096], BF16)},
    )
    b200, h200, bound = times(problem)
    assert bound.read_bytes == {"x": 67108864, "w": 8192}
    assert (b200, h200) == (0.0175061, 0.0279637)


def test_gather_reads_the_distinct_rows_named_and_not_the_table(make_problem):
    problem = make_problem(
        """
        def run(ids, table): return table[ids]
        def generate(axes, device):
            return {"ids": torch.randperm(128256, device=device)[:4096].reshape(8, 512)}
        """,
        {"ids": ([8, 512], I64), "table": ([128256, 4096], BF16)},
        {"y": ([8, 512, 4096], BF16)},
        custom=("ids",),
    )
    b200, h200, bound = times(problem)
    assert bound.read_bytes == {"ids": 32768, "table": 33554432}
    assert (b200, h200) == (0.0087568, 0.0139878)


def test_repeated_indices_count_once(make_problem):
    problem = make_problem(
        """
        def run(ids, table): return F.embedding(ids, table)
        def generate(axes, device): return {"ids": torch.arange(512, device=device) % 7}
        """,
        {"ids": ([512], I64), "table": ([1000, 64], BF16)},
        {"y": ([512, 64], BF16)},
        custom=("ids",),
    )
    assert times(problem)[2].read_bytes == {"ids": 4096, "table": 7 * 64 * 2}


def test_inputs_of_which_only_the_shape_is_used_are_not_read(make_problem):
    problem = make_problem(
        """
        def run(g, mask, topk):
            n = topk.shape[0]
            return g * (1.0 / n)
        """,
        {"g": ([65536, 256], FP32), "mask": ([65536, 256], I64), "topk": ([65536, 8], I64)},
        {"y": ([65536, 256], FP32)},
    )
    b200, h200, bound = times(problem)
    assert bound.read_bytes == {"g": 67108864, "mask": 0, "topk": 0}
    assert (b200, h200) == (0.017505, 0.027962)


def test_functional_cache_update_writes_all_and_does_not_read_what_it_overwrites(make_problem):
    problem = make_problem(
        """
        def run(cache, k, pos):
            pos = int(pos)
            out = cache.clone()
            out[:, pos : pos + 16] = k
            return out
        """,
        {"cache": ([4, 131072, 8, 128], BF16), "k": ([4, 16, 8, 128], BF16), "pos": 1000.0},
        {"out": ([4, 131072, 8, 128], BF16)},
    )
    b200, h200, bound = times(problem)
    assert bound.read_bytes == {"cache": 1073610752, "k": 131072}
    assert bound.write_bytes == {"out": 1073741824}
    assert (b200, h200) == (0.2800798, 0.4473924)


def test_in_place_cache_update_touches_its_slots_only(make_problem):
    problem = make_problem(
        """
        def run(cache, k):
            cache[:, 1000:1016] = k
            return cache
        """,
        {"cache": ([4, 131072, 8, 128], BF16), "k": ([4, 16, 8, 128], BF16)},
        {"out": ([4, 131072, 8, 128], BF16)},
    )
    bound = times(problem)[2]
    assert bound.read_bytes == {"cache": 0, "k": 131072}
    assert bound.write_bytes == {"out": 131072}


def test_product_that_reaches_no_output_costs_nothing_nor_does_its_weight(make_problem):
    n = 4096
    problem = make_problem(
        """
        def run(x, w1, w2):
            aux = (x @ w2).relu()
            return x @ w1
        """,
        {"x": ([n, n], BF16), "w1": ([n, n], BF16), "w2": ([n, 4 * n], BF16)},
        {"y": ([n, n], BF16)},
    )
    b200, h200, bound = times(problem)
    assert bound.work == {"bf16_tc": 2 * n**3}
    assert bound.read_bytes["w2"] == 0
    assert (b200, h200) == (0.0758806, 0.1389676)


def test_repeated_keys_are_read_once_and_multiplied_for_every_query_head(make_problem):
    problem = make_problem(
        "def run(q, k): return q @ k.repeat_interleave(4, 1).transpose(-1, -2)",
        {"q": ([2, 32, 2048, 128], BF16), "k": ([2, 8, 2048, 128], BF16)},
        {"s": ([2, 32, 2048, 2048], BF16)},
    )
    b200, h200, bound = times(problem)
    assert bound.work == {"bf16_tc": 68719476736}
    assert bound.total_bytes == 578813952
    assert (b200, h200) == (0.0754903, 0.1205862)


def test_causal_attention_counts_live_pairs_and_keeps_scores_on_chip(make_problem):
    problem = make_problem(
        """
        def run(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        """,
        {
            "q": ([4, 32, 4096, 128], BF16),
            "k": ([4, 8, 4096, 128], BF16),
            "v": ([4, 8, 4096, 128], BF16),
        },
        {"o": ([4, 32, 4096, 128], BF16)},
    )
    b200, h200, bound = times(problem)
    assert bound.work == {"bf16_tc": 4 * 4 * 32 * 128 * 4096 * 4097 // 2}
    assert bound.total_bytes == 335544320
    assert (b200, h200) == (0.3035965, 0.5560061)


def test_depthwise_convolution_does_not_multiply_over_channels_nor_count_padding(make_problem):
    problem = make_problem(
        "def run(x, w): return F.conv1d(x, w, groups=16384, padding=3)[..., :512]",
        {"x": ([16, 16384, 512], BF16), "w": ([16384, 1, 4], BF16)},
        {"y": ([16, 16384, 512], BF16)},
    )
    b200, h200, bound = times(problem)
    assert bound.work == {"fp32_fma": 2 * 16 * 16384 * 2042}
    assert bound.total_bytes == 537001984
    assert (b200, h200) == (0.070037, 0.1118754)
    assert round(bound.compute_ms["fp32_fma"], 7) == 0.0188379


MIXTURE = {
    "loop": """
        def run(x, topk, tw, Wg, Wu, Wd):
            y = torch.zeros_like(x)
            for t in range(x.shape[0]):
                for slot in range(topk.shape[1]):
                    e = int(topk[t, slot])
                    h = F.silu(x[t] @ Wg[e].T) * (x[t] @ Wu[e].T)
                    y[t] += (tw[t, slot] * (h @ Wd[e].T)).to(x.dtype)
            return y
        """,
    "gather": """
        def run(x, topk, tw, Wg, Wu, Wd):
            gate = torch.einsum("th,tkih->tki", x, Wg[topk])
            up = torch.einsum("th,tkih->tki", x, Wu[topk])
            down = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, Wd[topk])
            return (down * tw.unsqueeze(-1)).sum(1).to(x.dtype)
        """,
    "by expert": """
        def run(x, topk, tw, Wg, Wu, Wd):
            y = torch.zeros_like(x)
            for e in range(Wg.shape[0]):
                token, slot = torch.where(topk == e)
                h = F.silu(x[token] @ Wg[e].T) * (x[token] @ Wu[e].T)
                y.index_add_(0, token, (h @ Wd[e].T * tw[token, slot, None]).to(x.dtype))
            return y
        """,
}


@pytest.mark.parametrize("way", MIXTURE)
def test_mixture_of_experts_reads_and_computes_the_chosen_experts(make_problem, way):
    # 8 of 64 experts, all different.
    generate = """
        def generate(axes, device):
            return {"topk": torch.randperm(64, device=device)[:8].reshape(4, 2)}
        """
    problem = make_problem(
        MIXTURE[way] + generate,
        {
            "x": ([4, 4096], BF16),
            "topk": ([4, 2], I64),
            "tw": ([4, 2], FP32),
            "Wg": ([64, 14336, 4096], BF16),
            "Wu": ([64, 14336, 4096], BF16),
            "Wd": ([64, 4096, 14336], BF16),
        },
        {"y": ([4, 4096], BF16)},
        custom=("topk",),
    )
    b200, h200, bound = times(problem)
    assert bound.work == {"bf16_tc": 2818572288}
    assert bound.read_bytes == {"x": 32768, "topk": 64, "tw": 32} | dict.fromkeys(
        ("Wg", "Wu", "Wd"), 939524096
    )
    assert (b200, h200) == (0.3676133, 0.5872162)


def test_gated_mlp_reads_three_weights_and_keeps_the_hidden_layer_on_chip(make_problem):
    problem = make_problem(
        "def run(x, wg, wu, wd): return (F.silu(x @ wg.T) * (x @ wu.T)) @ wd.T",
        {
            "x": ([8192, 4096], BF16),
            "wg": ([14336, 4096], BF16),
            "wu": ([14336, 4096], BF16),
            "wd": ([4096, 14336], BF16),
        },
        {"y": ([8192, 4096], BF16)},
    )
    b200, h200, bound = times(problem)
    assert bound.work == {"bf16_tc": 6 * 8192 * 4096 * 14336}
    assert bound.total_bytes == 486539264
    assert (b200, h200) == (1.5934925, 2.9183195)
