"""Mixture-of-experts and routing references L2/047 to L2/082, token by token in float64."""

import pytest
import torch

from tests.problems.formulas import doubles, exact, silu

BF16 = torch.bfloat16


def rounded(dtype):
    """Function: round to dtype, and on in float64."""
    return lambda x: x.to(dtype).double()


def swiglu(x, gate, up, down, r):
    """SwiGLU of rows; every product and the activation pass through r."""
    return r(r(r(silu(r(x @ gate.T))) * r(x @ up.T)) @ down.T)


def equal_share(actual, expected):
    return (actual == expected).double().mean().item()


def every_expert(x, gates, ups, downs, r):
    """Outputs of all experts for all tokens, [tokens, experts, width]."""
    experts = zip(gates, ups, downs, strict=True)
    return torch.stack([swiglu(x, *weights, r) for weights in experts], dim=1)


def test_float16_experts_round_each_step_and_sum_in_float32(reference, assert_matches):
    run = reference("L2/047")
    for workload in run.workloads:
        inputs = run.draw(workload)
        x, index, weight, gates, ups, downs = doubles(inputs).values()
        (output,) = run.call(inputs)
        for r, share in ((rounded(torch.float16), 0.98), (exact, 0.0)):
            y = every_expert(x, gates, ups, downs, r)
            chosen = torch.stack([y[t, experts] for t, experts in enumerate(index)])
            expected = r(chosen * weight[..., None]).sum(dim=1)
            assert_matches(output, expected, workload.tolerance)
            assert equal_share(output, expected.half()) >= share


def test_float16_experts_of_one_token_are_distinct(reference):
    run = reference("L2/047")
    inputs = run.draw(run.workloads[1])
    index = inputs["topk_idx"].sort(dim=1).values
    assert (index.diff(dim=1) > 0).all() and not torch.equal(index, inputs["topk_idx"])
    torch.testing.assert_close(
        inputs["topk_weight"].float().sum(dim=1), torch.ones(len(index)), rtol=0, atol=5e-3
    )


def test_float32_experts_round_once(reference, assert_matches, assert_same_rounding):
    run = reference("L2/048")
    for workload in run.workloads:
        inputs = run.draw(workload)
        x, index, weight, gates, ups, downs = doubles(inputs).values()
        y = every_expert(x, gates, ups, downs, exact)
        dense = torch.zeros(len(x), len(gates), dtype=torch.float64)
        dense.scatter_add_(1, index, weight)
        expected = torch.einsum("te,teh->th", dense, y)
        (output,) = run.call(inputs)
        assert_matches(output, expected, workload.tolerance)
        assert_same_rounding(output, expected.to(BF16))


@pytest.mark.parametrize("problem_id", ["L2/047", "L2/048", "L2/065"])
def test_experts_without_tokens_and_with_all_tokens(reference, problem_id, assert_matches):
    run = reference(problem_id)
    inputs = run.draw(run.workloads[0])
    index = next(n for n, v in inputs.items() if getattr(v, "dtype", None) == torch.int64)
    slots = inputs[index].shape[1]
    inputs[index] = torch.arange(slots).expand_as(inputs[index]).contiguous()
    (crowded,) = run.call(inputs)
    assert crowded.any(dim=1).all()
    inputs[index] = inputs[index].flip(1)
    for name in ("topk_weight",):
        if name in inputs:
            inputs[name] = inputs[name].flip(1)
    (permuted,) = run.call(inputs)
    assert_matches(permuted, crowded, run.workloads[0].tolerance)


def route_in_groups(scores, bias, groups, kept, k):
    """Choice of one token: indices, as a list in the order the definition gives."""
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(choice) // groups
    totals = [
        sum(sorted(choice[g * size : (g + 1) * size], reverse=True)[:2]) for g in range(groups)
    ]
    best = sorted(range(groups), key=lambda g: (-totals[g], g))[:kept]
    allowed = [e for e in range(len(choice)) if e // size in best]
    chosen = sorted(allowed, key=lambda e: (-choice[e], e))[:k]
    threshold = choice[chosen[-1]]
    return sorted(chosen, key=lambda e: (choice[e] == threshold, e))


def test_group_limited_router_chooses_token_by_token(reference):
    run = reference("L2/049")
    for workload in run.workloads:
        inputs = run.draw(workload)
        x, weight, bias, factor = doubles(inputs).values()
        scores = (x @ weight.T).sigmoid()
        index, topk_weight = run.call(inputs)
        expected = [route_in_groups(s, bias.tolist(), 8, 4, 8) for s in scores.tolist()]
        assert torch.equal(index, torch.tensor(expected))
        chosen = scores.gather(1, index)
        chosen = chosen / chosen.sum(dim=1, keepdim=True) * factor
        torch.testing.assert_close(topk_weight.double(), chosen, rtol=1e-5, atol=0)


def test_group_limited_router_breaks_ties_towards_low_indices(reference):
    run = reference("L2/049")
    pick = run.module.top_k_in_index_order
    row = torch.tensor([[3.0, 5.0, 3.0, 7.0, 3.0, 6.0]])
    assert pick(row, 3).tolist() == [[3, 5, 1]]
    assert pick(row, 4).tolist() == [[1, 3, 5, 0]]
    assert pick(row, 5).tolist() == [[1, 3, 5, 0, 2]]
    inputs = run.draw(run.workloads[2])
    inputs["hidden_states"] = torch.zeros_like(inputs["hidden_states"])
    inputs["expert_bias"] = torch.zeros_like(inputs["expert_bias"])
    index, weight = run.call(inputs)  # all scores are one half
    assert torch.equal(index, torch.arange(8).expand_as(index))
    torch.testing.assert_close(weight, torch.full_like(weight, 2.5 / 8))


def test_softmax_router_experts_add_up_in_bfloat16_in_expert_order(reference, assert_matches):
    run = reference("L2/061")
    r = rounded(BF16)
    for workload in run.workloads:
        inputs = run.draw(workload)
        names = list(inputs)
        x, router, gates, ups, downs, *shared, shared_gate = doubles(inputs).values()
        assert names[-1] == "shared_expert_gate_weight"
        x = x.flatten(0, 1)
        output, logits = run.call(inputs)
        expected_logits = r(x @ router.T)
        assert_matches(logits, expected_logits, workload.tolerance)

        def swiglu_with_rounded_sigmoid(x, gate, up, down):
            a = r(x @ gate.T)
            return r(r(r(a * r(a.sigmoid())) * r(x @ up.T)) @ down.T)

        experts = zip(gates, ups, downs, strict=True)
        y = torch.stack([swiglu_with_rounded_sigmoid(x, *weights) for weights in experts], dim=1)
        rows = []
        for t, p in enumerate(logits.double().softmax(dim=1).tolist()):
            chosen = sorted(range(len(p)), key=lambda e: (-p[e], e))[:10]
            total = sum(p[e] for e in chosen)
            row = torch.zeros(x.shape[1], dtype=torch.float64)
            for e in sorted(chosen):
                row = r(row + r(y[t, e] * r(torch.tensor(p[e] / total, dtype=torch.float64))))
            rows.append(row)
        z = swiglu_with_rounded_sigmoid(x, *shared)
        z = r(r(r(x @ shared_gate.T).sigmoid()) * z)
        expected = (torch.stack(rows) + z).view(output.shape)
        assert_matches(output, expected, workload.tolerance)
        assert equal_share(output, expected.to(BF16)) >= 0.95


def test_softmax_router_prefers_the_lower_expert_among_equal_logits(reference):
    run = reference("L2/061")
    inputs = run.draw(run.workloads[0])
    inputs["router_weight"] = torch.zeros_like(inputs["router_weight"])
    (output, _) = run.call(inputs)
    for name in ("expert_gate_proj", "expert_up_proj", "expert_down_proj"):
        inputs[name] = inputs[name].clone()
        inputs[name][10:] = float("nan")  # never chosen
    assert torch.equal(run.call(inputs)[0], output)


def test_clamped_experts_follow_the_slots_with_repeats(reference):
    run = reference("L2/065")
    repeats = 0
    for workload in run.workloads:
        inputs = run.draw(workload)
        generator = torch.Generator().manual_seed(0)
        for name in ("gate_up_proj_bias", "down_proj_bias"):  # zeros; here the clamps bind
            inputs[name] = 6 * torch.randn(inputs[name].shape, generator=generator)
        x, index, table, gate_up, gate_up_bias, down, down_bias = doubles(inputs).values()
        expected = torch.zeros_like(x)
        for t, experts in enumerate(index.tolist()):
            repeats += len(experts) - len(set(experts))
            for e in experts:
                z = (x[t] @ gate_up[e] + gate_up_bias[e]).view(-1, 2)
                gate, up = z[:, 0].minimum(torch.tensor(7.0)), z[:, 1].clip(-7, 7)
                inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
                expected[t] += table[t, e] * (inner @ down[e] + down_bias[e])
        (output,) = run.call(inputs)
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    assert repeats > 0


def test_clamped_experts_skip_the_index_of_no_expert(reference):
    run = reference("L2/065")
    inputs = run.draw(run.workloads[0])
    experts = inputs["routing_weights"].shape[1]
    (full,) = run.call(inputs)
    half = dict(inputs)
    half["router_indices"] = inputs["router_indices"].clone()
    half["router_indices"][:, 2:] = experts
    other = dict(inputs)
    other["router_indices"] = inputs["router_indices"].clone()
    other["router_indices"][:, :2] = experts
    torch.testing.assert_close(run.call(half)[0] + run.call(other)[0], full)


@pytest.mark.parametrize("problem_id", ["L2/081", "L2/082"])
def test_biased_router_weighs_by_score_plus_bias(reference, assert_matches, problem_id):
    run = reference(problem_id)
    r = rounded(BF16)
    float32_sum = problem_id == "L2/082"
    for workload in run.workloads:
        inputs = run.draw(workload)
        x = doubles(inputs)
        values = list(x.values())
        experts = [v for v in values if isinstance(v, torch.Tensor) and v.dim() == 3]
        shared = [v for name, v in x.items() if name.startswith("shared")]
        choice = (x["hidden_states"] @ x["router_weight"].T).sigmoid()
        choice = choice + x["e_score_correction_bias"]
        y = every_expert(x["hidden_states"], *experts, r)
        rows = []
        for t, scores in enumerate(choice.tolist()):
            chosen = sorted(range(len(scores)), key=lambda e: -scores[e])[:8]
            total = sum(scores[e] for e in chosen) if inputs.get("norm_topk_prob", True) else 1.0
            row = torch.zeros_like(y[t, 0])
            for e in sorted(chosen):
                weight = torch.tensor(
                    scores[e] / total * inputs["routed_scaling_factor"], dtype=torch.float64
                )
                row = row + y[t, e] * weight if float32_sum else r(row + r(y[t, e] * r(weight)))
            rows.append(r(row))
        expected = torch.stack(rows) + swiglu(x["hidden_states"], *shared, r)
        (output,) = run.call(inputs)
        assert_matches(output, expected, workload.tolerance)
        assert equal_share(output, expected.to(BF16)) >= 0.95


def test_biased_router_profile_covers_both_kinds_of_weights(reference):
    run = reference("L2/082")
    flags = {run.draw(workload)["norm_topk_prob"] for workload in run.workloads}
    assert flags == {True, False}
