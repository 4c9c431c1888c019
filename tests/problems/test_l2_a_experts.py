"""Mixtures of experts among L2/001 to L2/041 against independent formulas.

Formulas are in float64. References of bfloat16 problems run on float32 copies of their inputs, so
that roundings drop out, unless a rounding is the point.
"""

import pytest
import torch

from tests.problems.formulas import (
    assert_close,
    cast,
    dense_experts,
    in_float32,
    rounded,
    swiglu,
)

BF16 = torch.bfloat16


@pytest.mark.parametrize("normalise", [True, False])
def test_softmax_router_and_experts(reference, normalise):
    run = reference("L2/008")
    inputs, i = in_float32(run, run.workloads[0])
    x = i["hidden_states"].flatten(0, 1)
    weights, experts = torch.softmax(x @ i["gate_weight"].T, dim=-1).topk(8)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    matrices = (i[f"expert_{n}_proj"] for n in ("gate", "up", "down"))
    expected = dense_experts(x, *matrices, experts, weights)
    (actual,) = run.call(inputs | {"norm_topk_prob": normalise})
    assert_close(actual.flatten(0, 1), expected)


def test_softmax_router_and_experts_round_at_every_step(reference, assert_same_rounding):
    run = reference("L2/008")
    inputs = run.draw(run.workloads[0])
    i = cast(inputs, torch.float64)
    x = i["hidden_states"].flatten(0, 1)
    probabilities = rounded(torch.softmax(rounded(x @ i["gate_weight"].T), dim=-1))
    top, experts = probabilities.topk(9)
    clear = top[:, 7] > top[:, 8]  # no tie at the cut
    weights = rounded(top[:, :8] / rounded(top[:, :8].sum(-1, keepdim=True)))
    gate = rounded(x @ i["expert_gate_proj"].mT)
    activated = rounded(gate * rounded(torch.sigmoid(gate)))
    product = rounded(activated * rounded(x @ i["expert_up_proj"].mT))
    y = rounded(product @ i["expert_down_proj"].mT)
    y = y[experts[:, :8], torch.arange(len(x)).unsqueeze(1)]
    expected = folded(rounded(y * weights.unsqueeze(-1)), experts[:, :8])
    assert clear.sum() > 80
    (output,) = run.call(inputs)
    assert_same_rounding(output.flatten(0, 1)[clear], expected[clear].to(BF16))


@pytest.mark.parametrize("problem_id", ["L2/010", "L2/024", "L2/026"])
def test_experts_with_given_routing(reference, problem_id):
    run = reference(problem_id)
    for workload in run.workloads:
        inputs, i = in_float32(run, workload)
        x, weights, experts, *matrices = i.values()
        if experts.dtype != torch.int64:
            weights, experts = experts, weights
        expected = dense_experts(x.view(-1, x.shape[-1]), *matrices, experts, weights)
        assert_close(run.call(inputs)[0].view_as(expected), expected)


def folded(contributions, experts):
    """Sum [tokens, k, hidden] over k in ascending expert index, rounding every time."""
    order = experts.argsort(dim=-1)
    contributions = contributions.gather(1, order.unsqueeze(-1).expand_as(contributions))
    total = torch.zeros_like(contributions[:, 0])
    for contribution in contributions.unbind(dim=1):
        total = rounded(total + contribution)
    return total


@pytest.mark.parametrize("problem_id", ["L2/010", "L2/026"])
def test_float32_experts_are_summed_with_a_rounding_each(
    reference, problem_id, assert_same_rounding
):
    run = reference(problem_id)
    inputs = run.draw(run.workloads[1])
    x, weights, experts, *matrices = cast(inputs, torch.float64).values()
    x = x.view(-1, x.shape[-1])
    y = swiglu(x, *matrices)[experts, torch.arange(len(x)).unsqueeze(1)]
    expected = folded(rounded(y * weights.unsqueeze(-1)), experts)
    assert_same_rounding(run.call(inputs)[0].view_as(expected), expected.to(BF16))


def rounding_swiglu(x, gate_weight, up_weight, down_weight):
    """SwiGLU with SiLU as a quotient, everything rounded."""
    gate, up = rounded(x @ gate_weight.mT), rounded(x @ up_weight.mT)
    silu = rounded(gate / rounded(1 + torch.exp(-gate)))
    return rounded(rounded(silu * up) @ down_weight.mT)


def test_routed_and_shared_expert_round_at_every_step(reference, assert_same_rounding):
    run = reference("L2/013")
    inputs = run.draw(run.workloads[0])
    i = cast(inputs, torch.float64)
    x, experts = i["hidden_states"], i["selected_experts"]
    names = ("gate", "up", "down")
    y = rounding_swiglu(x, *(i[f"expert_{n}_proj_weights"] for n in names))
    y = y[experts, torch.arange(len(x)).unsqueeze(1)]
    routed = folded(rounded(y * i["routing_weights"].unsqueeze(-1)), experts)
    shared = rounding_swiglu(x, *(i[f"shared_expert_{n}_proj_weight"] for n in names))
    gate = rounded(torch.sigmoid(rounded(x @ i["shared_expert_gate_weight"].T)))
    expected = rounded(routed + rounded(gate * shared))
    assert_same_rounding(run.call(inputs)[0], expected.to(BF16))


def test_renormalised_router_and_experts_round_at_every_step(reference, assert_same_rounding):
    run = reference("L2/016")
    inputs = run.draw(run.workloads[2])
    i = cast(inputs, torch.float64)
    x = i["hidden_states"].flatten(0, 1)
    output, logits = run.call(inputs)
    assert_same_rounding(logits, (x @ i["gate_weight"].T).to(BF16))
    top, experts = logits.double().topk(9)
    clear = (top[:, 7] > top[:, 8]) & (logits.double().std(-1) > 0)  # no tie at the cut
    weights = rounded(torch.softmax(top[:, :8], dim=-1))
    y = rounding_swiglu(x, *(i[f"expert_{n}_proj_weights"] for n in ("gate", "up", "down")))
    y = y[experts[:, :8], torch.arange(len(x)).unsqueeze(1)]
    expected = folded(rounded(y * weights.unsqueeze(-1)), experts[:, :8])
    assert clear.sum() > 40
    assert_same_rounding(output.flatten(0, 1)[clear], expected[clear].to(BF16))


@pytest.mark.parametrize("problem_id", ["L2/013", "L2/016"])
def test_silu_as_a_quotient_survives_overflow(reference, problem_id):
    run = reference(problem_id)
    inputs = run.draw(run.workloads[0])
    for scale in (1e3, 1e5):
        output = run.call(inputs | {"hidden_states": inputs["hidden_states"] * scale})[0]
        assert output.isfinite().all()


def test_an_expert_admits_its_first_tokens_up_to_its_capacity(reference):
    run = reference("L2/012")
    inputs, i = in_float32(run, run.workloads[0])
    experts = i["selected_experts"]
    experts[:, 0] = torch.where((experts[:, 1:] == 3).any(-1), experts[:, 0], 3)
    experts = inputs["selected_experts"] = i["selected_experts"]
    capacity = int(len(experts) * 8 / len(i["expert_up_weights"]) * 1.25)
    weights, seen = i["routing_weights"].clone(), [0] * len(i["expert_up_weights"])
    for token, row in enumerate(experts.tolist()):
        for slot, expert in enumerate(row):
            weights[token, slot] *= seen[expert] < capacity
            seen[expert] += 1
    assert seen[3] == len(experts) > capacity
    matrices = (i[f"expert_{n}_weights"].mT for n in ("gate", "up", "down"))
    expected = dense_experts(i["hidden_states"], *matrices, experts, weights)
    assert_close(run.call(inputs)[0], expected)


@pytest.mark.parametrize("norm_min", [1e-10, 100.0])
def test_biased_router_and_shared_expert(reference, norm_min):
    run = reference("L2/029")
    inputs, i = in_float32(run, run.workloads[1])
    inputs["e_score_correction_bias"] *= 0.03
    i["e_score_correction_bias"] = inputs["e_score_correction_bias"].double()
    x = i["hidden_states"].flatten(0, 1)
    logits = x @ i["gate_weight"].T
    scores = torch.softmax(logits, dim=-1) + i["e_score_correction_bias"]
    weights, experts = scores.topk(8)
    assert len(experts.unique()) == 16
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=norm_min)
    matrices = (i[f"expert_{n}_proj"] for n in ("gate", "up", "down"))
    expected = dense_experts(x, *matrices, experts, weights)
    expected += swiglu(x, *(i[f"shared_{n}_proj"] for n in ("gate", "up", "down")))
    output, router_logits = run.call(inputs | {"norm_min": norm_min})
    assert_close(output.flatten(0, 1), expected)
    assert_close(router_logits, logits)
