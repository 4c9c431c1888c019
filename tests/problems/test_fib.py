"""FIB references against independent formulas in float64, and what their generators promise."""

import math

import pytest
import torch

from sol_gym.problems import load
from tests.problems.formulas import rms_normalized

BF16 = torch.bfloat16
ADD_NORMS = {"FIB/001": 1e-6, "FIB/002": 1e-5, "FIB/003": 1e-6}
NORMS = {
    "FIB/021": 1e-6,
    "FIB/022": 1e-6,
    "FIB/023": 1e-6,
    "FIB/024": 1e-6,
    "FIB/025": 1e-5,
    "FIB/026": 1e-6,
}
GEMMS = [f"FIB/{number:03}" for number in range(4, 12)]
MOE = "FIB/020"


# ---- Norms and products ---------------------------------------------------------------------


@pytest.mark.parametrize("problem_id", NORMS | ADD_NORMS)
def test_norms_round_once_and_know_their_eps(reference, assert_same_rounding, problem_id):
    run = reference(problem_id)
    eps = (NORMS | ADD_NORMS)[problem_id]
    for size in (1.0, 2e-3):  # at the second, eps is of the order of the mean square
        inputs = run.draw(run.workloads[1])
        *summands, weight = inputs.values()
        x = sum((s * size).to(BF16).double() for s in summands)
        scaled = {n: (v * size).to(BF16) for n, v in inputs.items() if n != "weight"}
        (output,) = run.call(scaled | {"weight": weight})
        expected = rms_normalized(x, eps) * weight.double()
        assert_same_rounding(output, expected.to(BF16))


@pytest.mark.parametrize("problem_id", GEMMS)
def test_products_are_rounded_once(reference, assert_same_rounding, problem_id):
    run = reference(problem_id)
    for workload in run.workloads:
        a, b = run.draw(workload).values()
        (output,) = run.call({"A": a, "B": b})
        assert_same_rounding(output, (a.double() @ b.double().T).half())


# ---- Attention ------------------------------------------------------------------------------


def attention_rows(q_bounds, kv_bounds):
    """(query row, slice of the token list) for every query that sees a token."""
    for b in range(len(q_bounds) - 1):
        num_q, num_kv = q_bounds[b + 1] - q_bounds[b], kv_bounds[b + 1] - kv_bounds[b]
        for i in range(num_q):
            visible = min(i + 1 + num_kv - num_q, num_kv)
            if visible > 0:
                yield q_bounds[b] + i, slice(kv_bounds[b], kv_bounds[b] + visible)


def attention(q, keys, values, q_bounds, kv_bounds, sm_scale):
    """Row by row, in float64; rows that see nothing are zero and -infinity.

    Shapes: q [rows, heads, d], keys and values [listed tokens, heads, d].
    """
    output = torch.zeros(*q.shape[:2], values.shape[-1], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for row, tokens in attention_rows(q_bounds, kv_bounds):
        logits = (keys[tokens] * q[row]).sum(dim=-1) * sm_scale
        weights = torch.exp(logits - logits.amax(dim=0))
        total = weights.sum(dim=0)
        output[row] = (weights.unsqueeze(-1) * values[tokens]).sum(dim=0) / total.unsqueeze(-1)
        lse[row] = (logits.amax(dim=0) + torch.log(total)) / math.log(2)
    return output, lse


def grouped_query(inputs, k, v, q_bounds, kv_bounds):
    q = inputs["q"].double()
    group = q.shape[1] // k.shape[1]
    kv_head = [head // group for head in range(q.shape[1])]
    return attention(q, k[:, kv_head], v[:, kv_head], q_bounds, kv_bounds, inputs["sm_scale"])


def latent(inputs, q_bounds, kv_bounds):
    pages = inputs["kv_indices"].long()
    c = inputs["ckv_cache"][pages].double()
    keys = torch.cat((c, inputs["kpe_cache"][pages].double()), dim=-1)
    q = torch.cat((inputs["q_nope"], inputs["q_pe"]), dim=-1).double()
    return attention(q, keys, c, q_bounds, kv_bounds, inputs["sm_scale"])


def check_attention(actual, expected, assert_same_rounding):
    output, lse = actual
    assert_same_rounding(output, expected[0].to(BF16))
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-5)


def cache_of(inputs, name):
    return inputs[f"{name}_cache"][inputs["kv_indices"].long(), 0].double()


@pytest.mark.parametrize("problem_id", ["FIB/012", "FIB/013"])
def test_paged_decode_attends_to_every_listed_token(reference, assert_same_rounding, problem_id):
    run = reference(problem_id)
    for workload in run.workloads[::2]:
        inputs = run.draw(workload)
        one_query_each = list(range(len(inputs["q"]) + 1))
        expected = grouped_query(
            inputs,
            cache_of(inputs, "k"),
            cache_of(inputs, "v"),
            one_query_each,
            inputs["kv_indptr"].tolist(),
        )
        check_attention(run.call(inputs), expected, assert_same_rounding)


@pytest.mark.parametrize("problem_id", ["FIB/014", "FIB/015"])
@pytest.mark.parametrize("index", range(4))
def test_paged_prefill_is_causal_from_the_end(reference, assert_same_rounding, problem_id, index):
    run = reference(problem_id)
    inputs = run.draw(run.workloads[index])
    expected = grouped_query(
        inputs,
        cache_of(inputs, "k"),
        cache_of(inputs, "v"),
        inputs["qo_indptr"].tolist(),
        inputs["kv_indptr"].tolist(),
    )
    output, lse = run.call(inputs)
    assert (lse.isneginf() == (output == 0).all(dim=-1)).all()
    check_attention((output, lse), expected, assert_same_rounding)


@pytest.mark.parametrize("problem_id", ["FIB/014", "FIB/015"])
def test_paged_prefill_takes_empty_sequences_and_long_prefixes(
    reference, assert_same_rounding, problem_id
):
    run = reference(problem_id)
    inputs = run.draw(run.workloads[0])
    q_bounds, kv_bounds = [0, 0, 40, 41, 97], [0, 20, 20, 103, 203]
    inputs["qo_indptr"] = torch.tensor(q_bounds, dtype=torch.int32)
    inputs["kv_indptr"] = torch.tensor(kv_bounds, dtype=torch.int32)
    expected = grouped_query(
        inputs, cache_of(inputs, "k"), cache_of(inputs, "v"), q_bounds, kv_bounds
    )
    check_attention(run.call(inputs), expected, assert_same_rounding)


@pytest.mark.parametrize("problem_id", ["FIB/016", "FIB/017"])
def test_ragged_prefill_is_causal_from_the_end(reference, assert_same_rounding, problem_id):
    run = reference(problem_id)
    inputs = run.draw(run.workloads[1])
    k, v = inputs["k"].double(), inputs["v"].double()
    for q_bounds, kv_bounds in (([0, 35], [0, 35]), ([0, 10, 11, 13], [0, 17, 18, 35])):
        inputs["q"] = inputs["q"][: q_bounds[-1]]
        inputs["qo_indptr"] = torch.tensor(q_bounds, dtype=torch.int32)
        inputs["kv_indptr"] = torch.tensor(kv_bounds, dtype=torch.int32)
        expected = grouped_query(inputs, k, v, q_bounds, kv_bounds)
        check_attention(run.call(inputs), expected, assert_same_rounding)


@pytest.mark.parametrize("problem_id", ["FIB/014", "FIB/016", "FIB/019"])
def test_prefill_does_not_depend_on_how_many_rows_are_computed_at_a_time(reference, problem_id):
    run = reference(problem_id)
    inputs = run.draw(run.workloads[0])
    expected = run.call(inputs)
    run.module.run.__globals__["ROWS"] = 7
    for actual, whole in zip(run.call(inputs), expected, strict=True):
        torch.testing.assert_close(actual, whole, rtol=1e-2, atol=1e-5)


def test_latent_decode_attends_to_every_listed_token(reference, assert_same_rounding):
    run = reference("FIB/018")
    for workload in run.workloads[1:]:
        inputs = run.draw(workload)
        one_query_each = list(range(len(inputs["q_pe"]) + 1))
        expected = latent(inputs, one_query_each, inputs["kv_indptr"].tolist())
        check_attention(run.call(inputs), expected, assert_same_rounding)


def test_latent_prefill_is_causal_from_the_end(reference, assert_same_rounding):
    run = reference("FIB/019")
    for workload in run.workloads:
        inputs = run.draw(workload)
        expected = latent(inputs, inputs["qo_indptr"].tolist(), inputs["kv_indptr"].tolist())
        check_attention(run.call(inputs), expected, assert_same_rounding)


# ---- Generators at the published sizes ------------------------------------------------------


def published_tables(reference, problem_id, every):
    """(axes, generated page tables) for some of the published workloads."""
    problem = load(problem_id)
    generate = reference(problem_id).module.generate_inputs
    for workload in problem.workloads[::every]:
        axes = problem.definition.bind(workload.axes)
        yield axes, generate(axes, torch.device("cpu"))


def lengths_of(indptr, total):
    assert indptr.dtype == torch.int32
    assert indptr[0] == 0
    assert indptr[-1] == total
    lengths = indptr.diff()
    assert (lengths >= 0).all()
    return lengths


@pytest.mark.parametrize("problem_id", ["FIB/012", "FIB/013"])
def test_decode_tables_hold_sequences_of_like_length_and_pages_once(reference, problem_id):
    for axes, made in published_tables(reference, problem_id, every=7):
        lengths = lengths_of(made["kv_indptr"], axes["num_kv_indices"])
        assert len(lengths) == axes["batch_size"]
        assert lengths.min() > 0
        assert lengths.max() <= 4 * lengths.min() + 4
        pages = made["kv_indices"]
        assert 0 <= pages.min() <= pages.max() < axes["num_pages"]
        assert len(pages.unique()) == len(pages)


@pytest.mark.parametrize("problem_id", ["FIB/014", "FIB/015"])
def test_incremental_prefill_tables_have_few_tokens_a_sequence(reference, problem_id):
    shared = 0
    for axes, made in published_tables(reference, problem_id, every=2):
        assert lengths_of(made["qo_indptr"], axes["total_q"]).min() > 0
        lengths = lengths_of(made["kv_indptr"], axes["num_kv_indices"])
        # All sequences but one have a few tokens, or none where there are not enough.
        assert lengths.sort().values[:-1].le(4).all()
        assert lengths.min() > 0 or axes["num_kv_indices"] < len(lengths)
        pages = made["kv_indices"]
        assert 0 <= pages.min() <= pages.max() < axes["num_pages"]
        for own in pages.split(lengths.tolist()):
            assert len(own.unique()) == len(own)
        shared += len(pages) - len(pages.unique())
    assert shared > 0


@pytest.mark.parametrize("problem_id", ["FIB/016", "FIB/017"])
def test_fresh_prefills_have_as_many_keys_as_queries(reference, problem_id):
    spread = []
    for axes, made in published_tables(reference, problem_id, every=1):
        lengths = lengths_of(made["qo_indptr"], axes["total_q"])
        assert lengths.min() > 0
        assert torch.equal(made["qo_indptr"], made["kv_indptr"])
        spread.append((lengths.max() / lengths.min()).item())
    assert max(spread) > 10


def test_latent_tables_list_pages_once_and_no_fewer_tokens_than_queries(reference):
    for axes, made in published_tables(reference, "FIB/018", every=47):
        assert lengths_of(made["kv_indptr"], axes["num_kv_indices"]).min() > 0
        assert len(made["kv_indices"].unique()) == axes["num_kv_indices"]
    for axes, made in published_tables(reference, "FIB/019", every=25):
        queries = lengths_of(made["qo_indptr"], axes["total_q"])
        tokens = lengths_of(made["kv_indptr"], axes["num_kv_indices"])
        assert queries.min() > 0
        assert (tokens >= queries).all()
        assert len(made["kv_indices"].unique()) == axes["num_kv_indices"]


# ---- MoE ------------------------------------------------------------------------------------


def chosen_experts(scores, bias):
    """A token's experts by plain sorting, ties to the lowest index."""
    choice = [s + b for s, b in zip(scores.tolist(), bias.tolist(), strict=True)]
    groups = [range(start, start + 32) for start in range(0, 256, 32)]
    ranked = sorted(groups, key=lambda g: -sum(sorted(choice[e] for e in g)[-2:]))
    inside = sorted(e for group in ranked[:4] for e in group)
    return sorted(inside, key=lambda e: -choice[e])[:8]


def repeated(scale, *dims):
    for dim in dims:
        scale = scale.repeat_interleave(128, dim=dim)
    return scale.double()


def expected_moe(inputs, scores, choose):
    x = inputs["hidden_states"].double() * repeated(inputs["hidden_states_scale"], 0).T
    output = torch.zeros_like(x)
    for token in range(len(x)):
        experts = choose(token)
        total = scores[token, experts].sum() + 1e-20
        for expert in experts:
            local = expert - inputs["local_expert_offset"]
            if not 0 <= local < len(inputs["gemm1_weights"]):
                continue
            w13, w2 = (
                inputs[name][local].double() * repeated(inputs[f"{name}_scale"][local], 0, 1)
                for name in ("gemm1_weights", "gemm2_weights")
            )
            up, gate = (w13 @ x[token]).chunk(2)
            hidden = gate * torch.sigmoid(gate) * up
            weight = scores[token, expert] / total * inputs["routed_scaling_factor"]
            output[token] += weight * (w2 @ hidden)
    return output.to(BF16)


def test_moe_is_the_sum_over_the_local_experts_of_each_token(reference, assert_same_rounding):
    run = reference(MOE)
    for workload in run.workloads[:2]:
        inputs = run.draw(workload)
        scores = torch.sigmoid(inputs["routing_logits"].double())
        bias = inputs["routing_bias"].double()
        expected = expected_moe(inputs, scores, lambda t, s=scores, b=bias: chosen_experts(s[t], b))
        assert expected.count_nonzero() > 0
        assert_same_rounding(run.call(inputs)[0], expected)


def test_moe_ties_go_to_the_lowest_index_and_the_bias_only_chooses(reference, assert_same_rounding):
    run = reference(MOE)
    inputs = run.draw(run.workloads[1])
    inputs["routing_logits"] = torch.zeros_like(inputs["routing_logits"])
    inputs["routing_bias"] = torch.zeros_like(inputs["routing_bias"])
    inputs["routing_bias"][[110, 111, 112]] = 1.0
    inputs["local_expert_offset"] = 96
    scores = torch.full_like(inputs["routing_logits"], 0.5, dtype=torch.float64)
    # Groups 0, 1, 2 and 3 are kept; within them the biased experts, then the lowest indices.
    expected = expected_moe(inputs, scores, lambda token: [110, 111, 112, 0, 1, 2, 3, 4])
    assert_same_rounding(run.call(inputs)[0], expected)


def test_moe_experts_beyond_the_last_one_add_nothing(reference):
    run = reference(MOE)
    inputs = run.draw(run.workloads[0])
    whole = run.call(inputs | {"local_expert_offset": 224})[0]
    part = run.call(inputs | {"local_expert_offset": 250})[0]
    assert whole.count_nonzero() > 0
    assert part.isfinite().all()
    assert run.call(inputs | {"local_expert_offset": 256})[0].count_nonzero() == 0
