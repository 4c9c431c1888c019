"""Backward references among L1/001 to L1/047 against autograd of the forward they belong to."""

import math

import torch
import torch.nn.functional as F

from tests.problems.formulas import assert_close, rotate_half

BF16 = torch.bfloat16


def leaf(tensor):
    """A float64 copy that collects a gradient."""
    return tensor.detach().double().requires_grad_()


def test_attention_tail_backward_is_the_gradient_through_dropout_and_softmax(reference):
    run = reference("L1/001")
    for workload in run.workloads:
        inputs = run.draw(workload)
        p, mask = inputs["attention_dropout"], inputs["dropout_mask"]
        scores, values = leaf(torch.randn(mask.shape)), leaf(inputs["value_states"])
        probabilities = scores.softmax(dim=-1)
        dropped = probabilities * mask / (1 - p)
        group = mask.shape[1] // values.shape[1]
        output = (dropped @ values.repeat_interleave(group, dim=1)).transpose(1, 2)
        output.backward(inputs["grad_attn_output"].double())
        grad_scores, grad_values = run.call(
            inputs
            | {
                "grad_attn_output": inputs["grad_attn_output"].float(),
                "attn_weights": probabilities.detach().float(),
                "attn_weights_dropped": dropped.detach().float(),
            }
        )
        assert_close(grad_scores, scores.grad)
        assert_close(grad_values, values.grad)


def test_attention_tail_backward_ignores_the_mask_without_dropout(reference):
    run = reference("L1/001")
    inputs = run.draw(run.workloads[0]) | {"attention_dropout": 0.0}
    outputs = run.call(inputs)
    kept = run.call(inputs | {"dropout_mask": torch.ones_like(inputs["dropout_mask"])})
    assert torch.equal(outputs[0], kept[0])


def test_attention_tail_draws_drop_one_in_ten(reference):
    run = reference("L1/001")
    inputs = run.draw(run.workloads[0])
    weights, dropped, mask = (
        inputs[n] for n in ("attn_weights", "attn_weights_dropped", "dropout_mask")
    )
    assert 0.88 < mask.double().mean() < 0.92
    assert torch.equal(dropped, (weights.float() * mask / 0.9).to(BF16))
    torch.testing.assert_close(weights.double().sum(-1), torch.ones(()).double().expand(
        weights.shape[:-1]), rtol=0, atol=0.01)  # fmt: skip


def test_output_projection_backward_is_the_gradient_of_the_projection(
    reference, assert_same_rounding
):
    run = reference("L1/004")
    for workload in run.workloads:
        inputs = run.draw(workload)
        batch, seq_len, hidden = inputs["reshaped"].shape
        heads = inputs["reshaped"].view(batch, seq_len, hidden // 64, 64).transpose(1, 2)
        heads, weight = leaf(heads), leaf(inputs["weight"])
        output = heads.transpose(1, 2).reshape(batch, seq_len, hidden) @ weight.T
        output.backward(inputs["grad_output"].double())
        grad_heads, grad_weight = run.call(inputs)
        assert_same_rounding(grad_heads, heads.grad.to(BF16))
        assert_same_rounding(grad_weight, weight.grad.to(BF16))


def test_routed_expert_backward_is_the_gradient_of_the_weighted_scatter(reference):
    run = reference("L1/009")
    for workload in run.workloads:
        inputs = run.draw(workload)
        tokens, count = inputs["token_indices"], len(inputs["grad_output"])
        hidden, routing = torch.randn(count, inputs["w1_weight"].shape[1]), torch.rand(count)
        hidden, routing = leaf(hidden), leaf(routing)
        w1, w2, w3 = (leaf(inputs[f"w{i}_weight"]) for i in (1, 2, 3))
        x = hidden[tokens]
        w1_output, up = x @ w1.T, x @ w3.T
        gate = F.silu(w1_output)
        expert = (gate * up) @ w2.T
        output = torch.zeros(count, len(w2)).double()
        output = output.index_put((tokens,), routing[tokens, None] * expert)
        output.backward(inputs["grad_output"].double())
        saved = {
            "selected_tokens": x,
            "w1_output": w1_output,
            "gate_output": gate,
            "up_output": up,
            "gated_output": gate * up,
            "expert_output": expert,
            "selected_weights": routing[tokens],
        }
        saved = {name: value.detach().float() for name, value in saved.items()}
        gradients = run.call(inputs | saved | {"grad_output": inputs["grad_output"].float()})
        for actual, tensor in zip(gradients, (hidden, routing, w1, w2, w3), strict=True):
            assert_close(actual, tensor.grad)


def test_routed_expert_backward_does_not_mind_the_order_of_its_tokens(reference):
    run = reference("L1/009")
    inputs = run.draw(run.workloads[1])
    permutation = torch.randperm(len(inputs["token_indices"]))
    by_token = [name for name, value in inputs.items() if len(value) == len(permutation)]
    gradients = run.call(inputs)
    permuted = run.call(inputs | {name: inputs[name][permutation] for name in by_token})
    for a, b in zip(gradients, permuted, strict=True):
        torch.testing.assert_close(a, b)


def test_rotary_table_backward_is_the_gradient_of_the_positions(reference):
    run = reference("L1/014")
    for workload in run.workloads:
        inputs = run.draw(workload)
        inv_freq = inputs["inv_freq_expanded"].double()
        positions = leaf(torch.randn(workload.axes["batch_size"], workload.axes["seq_len"]))
        angles = positions[:, :, None] * inv_freq.transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        scale = inputs["attention_scaling"]
        loss = (angles.cos() * scale * inputs["grad_cos"].double()).sum()
        loss = loss + (angles.sin() * scale * inputs["grad_sin"].double()).sum()
        loss.backward()
        (gradient,) = run.call(inputs | {"emb": angles.detach().float()})
        assert_close(gradient, positions.grad)


def test_rotary_table_backward_never_reads_the_second_half_of_the_angles(reference):
    run = reference("L1/014")
    inputs = run.draw(run.workloads[0])
    emb = inputs["emb"].clone()
    emb[..., emb.shape[-1] // 2 :] = math.nan
    assert torch.equal(run.call(inputs)[0], run.call(inputs | {"emb": emb})[0])


def test_dense_expert_backward_is_the_gradient_of_swiglu(reference):
    run = reference("L1/017")
    for workload in run.workloads:
        inputs = run.draw(workload)
        names = ("x", "gate_weight", "up_weight", "down_weight")
        x, gate_weight, up_weight, down_weight = leaves = [leaf(inputs[name]) for name in names]
        gate, up = x @ gate_weight.T, x @ up_weight.T
        silu = gate * gate.sigmoid()
        ((silu * up) @ down_weight.T).backward(inputs["grad_output"].double())
        saved = {
            "gate": gate,
            "gate_sigmoid": gate.sigmoid(),
            "gate_silu": silu,
            "up": up,
            "intermediate": silu * up,
        }
        saved = {name: value.detach().float() for name, value in saved.items()}
        gradients = run.call(inputs | saved | {"grad_output": inputs["grad_output"].float()})
        for actual, tensor in zip(gradients, leaves, strict=True):
            assert_close(actual, tensor.grad)


def test_dense_expert_draws_are_a_forward_pass(reference, assert_same_rounding):
    run = reference("L1/017")
    inputs = {name: value.double() for name, value in run.draw(run.workloads[0]).items()}
    assert_same_rounding(inputs["gate"].to(BF16), (inputs["x"] @ inputs["gate_weight"].T).to(BF16))
    assert_same_rounding(inputs["gate_sigmoid"].to(BF16), inputs["gate"].sigmoid().to(BF16))
    assert_same_rounding(
        inputs["gate_silu"].to(BF16), (inputs["gate"] * inputs["gate_sigmoid"]).to(BF16)
    )
    assert_same_rounding(
        inputs["intermediate"].to(BF16), (inputs["gate_silu"] * inputs["up"]).to(BF16)
    )


def test_rotary_backward_is_the_gradient_of_queries_keys_and_angles(reference):
    run = reference("L1/019")
    for workload in run.workloads:
        inputs = run.draw(workload)
        q, k, angles = (leaf(inputs[name]) for name in ("q", "k", "embeddings"))
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        loss = 0
        for x, grad in ((q, "grad_q_embed"), (k, "grad_k_embed")):
            loss = loss + ((x * cos + rotate_half(x) * sin) * inputs[grad].double()).sum()
        loss.backward()
        for actual, tensor in zip(run.call(inputs), (q, k, angles), strict=True):
            assert_close(actual, tensor.grad)


def test_mlp_backward_is_the_gradient_of_both_layers(reference):
    run = reference("L1/022")
    for workload in run.workloads:
        inputs = run.draw(workload)
        names = ("hidden_state", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
        x, w1, b1, w2, b2 = leaves = [leaf(inputs[name]) for name in names]
        hidden = x @ w1.T + b1
        activated = F.gelu(hidden, approximate="tanh")
        (activated @ w2.T + b2).backward(inputs["grad_output"].double())
        saved = {"fc1_output": hidden, "gelu_output": activated}
        saved = {name: value.detach().float() for name, value in saved.items()}
        for actual, tensor in zip(run.call(inputs | saved), leaves, strict=True):
            assert_close(actual, tensor.grad)


def test_rotary_frequency_backward_sums_a_table_by_position(reference, assert_matches):
    run = reference("L1/024")
    for workload in run.workloads:
        inputs = run.draw(workload)
        inv_freq = leaf(inputs["inv_freq"])
        table = torch.outer(torch.arange(workload.axes["max_grid_size"]).double(), inv_freq)
        angles = table[inputs["pos_ids"]].flatten(1)
        angles = torch.cat((angles, angles), dim=-1)
        loss = (angles.cos() * inputs["grad_cos"].double()).sum()
        loss = loss + (angles.sin() * inputs["grad_sin"].double()).sum()
        loss.backward()
        (gradient,) = run.call(inputs | {"emb": angles.detach().float()})
        assert_close(gradient, inv_freq.grad, 1e-4)


def test_instance_norm_backward_is_the_gradient_where_the_statistics_are_true(reference):
    run = reference("L1/039")
    for workload in run.workloads:
        inputs = run.draw(workload)
        x, weight = leaf(inputs["x"]), leaf(inputs["weight"])
        bias = leaf(torch.zeros(weight.shape))
        mean = x.mean(dim=(2, 3), keepdim=True)
        std = x.var(dim=(2, 3), correction=0, keepdim=True).sqrt()
        output = weight[:, None, None] * (x - mean) / std + bias[:, None, None]
        output.backward(inputs["grad_output"].double())
        saved = {"mean": mean.detach().float(), "std": std.detach().float()}
        for actual, tensor in zip(run.call(inputs | saved), (x, weight, bias), strict=True):
            assert_close(actual, tensor.grad)


def test_instance_norm_backward_takes_any_mean_and_deviation(reference, assert_matches):
    run = reference("L1/039")
    for workload in run.workloads:
        inputs = run.draw(workload)
        grad, x, weight, mean, std = (value.double() for value in inputs.values())
        planes, n = (2, 3), x[0, 0].numel()
        g = grad * weight[:, None, None]
        by_variance = -0.5 / std**3 * (g * (x - mean)).sum(planes, keepdim=True)
        by_mean = -g.sum(planes, keepdim=True) / std
        by_mean = by_mean - 2 * by_variance * (x.mean(planes, keepdim=True) - mean)
        expected = g / std + (by_variance * 2 * (x - mean) + by_mean) / n
        grad_input, grad_weight, grad_bias = run.call(inputs)
        assert_matches(grad_input, expected, workload.tolerance)
        assert_close(grad_weight, (grad * (x - mean) / std).sum((0, 2, 3)))
        assert_close(grad_bias, grad.sum((0, 2, 3)))


def test_assignment_backward_is_the_gradient_of_counts_and_balancing_loss(reference):
    """The loss is sum(share of the assignments * share of the router) with a uniform router."""
    run = reference("L1/042")
    inputs = run.draw(run.workloads[1])
    num_experts = inputs["expert_mask"].shape[1]
    mask = leaf(inputs["expert_mask"])
    counts = mask.sum(dim=0)
    loss = num_experts * (counts / inputs["topk_idx"].numel() / num_experts).sum()
    total = (mask * inputs["grad_expert_mask"].double()).sum()
    total = total + (counts * inputs["grad_tokens_per_expert"].double()).sum()
    (total + loss * inputs["grad_load_balance_loss"].double()).sum().backward()
    assert_close(run.call(inputs)[0], mask.grad, 1e-6)


def test_assignment_backward_counts_the_loss_in_training_alone(reference):
    run = reference("L1/042")
    inputs = run.draw(run.workloads[0]) | {"training": torch.tensor([False])}
    inputs["grad_load_balance_loss"] = torch.tensor([1e6])
    expected = inputs["grad_expert_mask"] + inputs["grad_tokens_per_expert"]
    assert torch.equal(run.call(inputs)[0], expected)
    constant = torch.tensor(1e6 / inputs["topk_idx"].numel())
    expected = inputs["grad_expert_mask"] + (inputs["grad_tokens_per_expert"] + constant)
    torch.testing.assert_close(run.call(inputs | {"training": torch.tensor([True])})[0], expected)
