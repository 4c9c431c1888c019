"""Bounds of library problems against figures derived by hand from what they compute.

Bytes and FLOPs are written out from the problem's definition alone, workload by workload.
"""

from __future__ import annotations

import pytest

from sol_gym.device import get_device
from sol_gym.problem import Problem, Workload
from sol_gym.problems import load
from sol_gym.solar import Bound, analyze

BF16, FP32, INT64, INT32 = 2, 4, 8, 4
DEVICE = get_device("b200-1500")


def bounds(problem_id: str, profile: str) -> list[tuple[Problem, Workload, Bound]]:
    problem = load(problem_id, profile=profile)
    return [(problem, w, analyze(problem, w, DEVICE)) for w in problem.workloads]


def axes(problem: Problem, workload: Workload) -> dict[str, int]:
    return problem.definition.bind(workload.axes)


profiles = pytest.mark.parametrize("profile", ["full", "smoke"])


@profiles
def test_fft_reads_the_unpadded_rows_and_has_no_contraction(profile):
    for problem, workload, bound in bounds("L1/007", profile):
        a = axes(problem, workload)
        rows = a["batch_size"] * a["d_model"]
        assert bound.read_bytes == {"x": rows * a["seqlen"] * FP32}
        assert set(bound.write_bytes.values()) == {rows * (a["seqlen"] + 1) * FP32}
        assert bound.work == {}


@profiles
def test_scatter_add_reads_each_row_once_and_leaves_its_argument_alone(profile):
    for problem, workload, bound in bounds("L1/008", profile):
        a = axes(problem, workload)
        tokens, rows = a["batch_seq_len"], a["num_selected_tokens"]
        width = a["hidden_size"] * BF16
        assert bound.read_bytes == {
            "final_hidden_states": tokens * width,
            "expert_outputs": rows * width,
            "token_indices": rows * INT64,
        }
        assert bound.write_bytes == {"output": tokens * width}
        assert bound.lane == "meta" and bound.complete


@profiles
def test_norm_backward_never_reads_x_and_writes_both_gradients(profile):
    for problem, workload, bound in bounds("L1/013", profile):
        a = axes(problem, workload)
        rows, width = a["batch_size"] * a["seq_len"], a["hidden_size"]
        assert bound.read_bytes == {
            "grad_output": rows * width * BF16,
            "x": 0,
            "normalized": rows * width * FP32,
            "rstd": rows * FP32,
            "weight": width * FP32,
        }
        assert bound.write_bytes == {
            "grad_hidden_states": rows * width * BF16,
            "grad_residual": rows * width * BF16,
            "grad_weight": width * FP32,
        }
        assert bound.work == {}


@profiles
def test_attention_counts_the_causal_half_and_not_the_mask(profile):
    for problem, workload, bound in bounds("L1/015", profile):
        a = axes(problem, workload)
        b, s, e = a["batch_size"], a["seq_len"], a["hidden_size"]
        h, k, d = a["num_attention_heads"], a["num_key_value_heads"], a["head_dim"]
        projections = 2 * b * s * e * (h * d + 2 * k * d) + 2 * b * s * h * d * e
        attention = 2 * b * h * d * s * (s + 1)
        assert bound.work == {"bf16_tc": projections + attention}
        assert bound.read_bytes == {
            "hidden_states": b * s * e * BF16,
            "cos": b * s * d * BF16,
            "sin": b * s * d * BF16,
            "attention_mask": 0,
            "q_proj_weight": h * d * e * BF16,
            "k_proj_weight": k * d * e * BF16,
            "v_proj_weight": k * d * e * BF16,
            "o_proj_weight": e * h * d * BF16,
            "q_norm_weight": d * BF16,
            "k_norm_weight": d * BF16,
        }
        assert bound.write_bytes == {"attn_output": b * s * e * BF16}
        assert bound.complete


@profiles
def test_rms_norm_reads_two_tensors_and_writes_one(profile):
    for problem, workload, bound in bounds("L1/069", profile):
        a = axes(problem, workload)
        size = a["batch_size"] * a["seq_len"] * a["hidden_size"] * BF16
        weight = a["hidden_size"] * BF16
        assert bound.read_bytes == {"hidden_states": size, "residual": size, "weight": weight}
        assert bound.write_bytes == {"output": size}
        assert bound.bound_by == "memory"


@profiles
def test_mlp_is_three_products_with_the_hidden_layer_on_chip(profile):
    for problem, workload, bound in bounds("L2/004", profile):
        a = axes(problem, workload)
        tokens, h, i = a["batch_size"] * a["seq_len"], a["hidden_size"], a["intermediate_size"]
        assert bound.work == {"bf16_tc": 6 * tokens * h * i}
        assert bound.total_bytes == (3 * tokens * h + 3 * h * i + h) * BF16


@profiles
def test_convnext_block_counts_live_taps_and_pointwise_products(profile):
    problem = load("L2/035", profile=profile)
    for workload in problem.workloads:
        bound = analyze(problem, workload, DEVICE, precision="declared")
        a = axes(problem, workload)
        b, c, height, width = a["batch_size"], a["dim"], a["height"], a["width"]
        # Of seven taps in a row, those that fall on padding beyond either end do not count.
        live = [
            sum(0 <= x + tap < size for x in range(size) for tap in range(-3, 4))
            for size in (height, width)
        ]
        assert bound.work == {
            "fp32": 16 * b * height * width * c * c,
            "fp32_fma": 2 * b * c * live[0] * live[1],
        }
        parameters = 49 * c + c + 2 * c + 4 * c * c + 4 * c + 8 * c + 4 * c * c + c
        assert bound.total_bytes == (2 * b * c * height * width + parameters) * FP32


@profiles
def test_state_space_scan_costs_no_more_than_its_recurrence(profile):
    for problem, workload, bound in bounds("L2/043", profile):
        a = axes(problem, workload)
        b, s, h, p, n = (
            a[x] for x in ("batch_size", "seq_len", "num_heads", "head_dim", "state_size")
        )
        assert bound.work == {"bf16_tc": 4 * b * s * h * p * n}
        states = b * h * p * n
        groups = a["n_groups"]
        elements = 2 * b * s * h * p + b * h * s + 2 * b * s * groups * n + h + 2 * states
        assert bound.total_bytes == elements * BF16
        assert bound.complete


@profiles
def test_fp8_projection_runs_on_fp8_units_and_reads_the_weight_as_it_comes(profile):
    for problem, workload, bound in bounds("Quant/001", profile):
        a = axes(problem, workload)
        tokens, n, k = a["num_tokens"], a["hidden_size"], a["input_dim"]
        assert bound.work == {"fp8_tc": 2 * tokens * n * k}
        assert bound.total_bytes == (tokens * k + n * k + n + tokens * n) * BF16


@profiles
def test_nvfp4_projection_runs_on_fp4_units(profile):
    for problem, workload, bound in bounds("Quant/024", profile):
        a = axes(problem, workload)
        m, n, k = a["M"], a["hidden_size_padded"], a["input_dim"]
        assert bound.work == {"nvfp4_tc": 2 * m * n * k}
        assert bound.read_bytes == {
            "hidden_states": m * k * FP32,
            "weight_fp4": n * k // 2,
            "weight_scale_fp8": n * k // 16,
        }
        assert bound.write_bytes == {"output": m * n * FP32}


@profiles
def test_paged_decode_reads_the_pages_listed_and_no_others(profile):
    problem = load("FIB/012", profile=profile)
    for workload in problem.workloads[:: 6 if profile == "full" else 1]:
        bound = analyze(problem, workload, DEVICE)
        a = axes(problem, workload)
        b, h, kv, d = (a[x] for x in ("batch_size", "num_qo_heads", "num_kv_heads", "head_dim"))
        listed = a["num_kv_indices"]
        if listed < b:
            continue  # some sequences are empty; see below
        pages = min(listed, a["num_pages"])  # the generator repeats none while there are enough
        assert bound.work == {"bf16_tc": 4 * h * d * listed}
        assert bound.read_bytes == {
            "q": b * h * d * BF16,
            "k_cache": pages * kv * d * BF16,
            "v_cache": pages * kv * d * BF16,
            "kv_indptr": a["len_indptr"] * INT32,
            "kv_indices": listed * INT32,
        }
        assert bound.write_bytes == {"output": b * h * d * BF16, "lse": b * h * FP32}
        assert bound.lane == "meta"


def test_empty_sequences_need_no_query():
    problem = load("FIB/012", profile="smoke")
    workload = problem.workloads[2]
    bound = analyze(problem, workload, DEVICE)
    a = axes(problem, workload)
    query_bytes = a["num_qo_heads"] * a["head_dim"] * BF16
    assert a["num_kv_indices"] < a["batch_size"]
    queries, rest = divmod(bound.read_bytes["q"], query_bytes)
    assert 0 < queries <= a["num_kv_indices"] and rest == 0


@profiles
def test_short_row_norm_is_read_and_written_once(profile):
    for problem, workload, bound in bounds("FIB/021", profile):
        a = axes(problem, workload)
        rows, width = a["batch_size"], a["hidden_size"]
        assert bound.total_bytes == (2 * rows * width + width) * BF16
