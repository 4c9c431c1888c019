"""Backward references L1/051 to L1/093 against autograd of their forward.

Backward problems take saved tensors that are drawn on their own. Here they are made consistent, so
that the result must be the true gradient of the forward; where a problem departs from the true
gradient, its test says how.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.problems.formulas import (
    assert_near,
    cast,
    rms_norm,
    rms_rstd,
    rotated,
    rounded,
    split_heads,
)

BF16 = torch.bfloat16


def gradients(forward, inputs, names, *grads):
    """Gradients of forward(**inputs) towards the inputs named, in float64."""
    inputs = cast(inputs, torch.float64)
    leaves = [inputs[name].requires_grad_() for name in names]
    outputs = forward(inputs)
    return torch.autograd.grad(outputs, leaves, [g.double() for g in grads])


def equal_halves(table):
    """The table with its first half in place of its second."""
    return torch.cat((table.chunk(2, dim=-1)[0],) * 2, dim=-1)


def test_qkv_norm_backward_is_the_gradient(reference):
    run = reference("L1/051")
    inputs = cast(run.draw(run.workloads[2]), torch.float32)

    def forward(i):
        q = split_heads(i["hidden_states"] @ i["q_weight"].T, 64)
        k = split_heads(i["hidden_states"] @ i["k_weight"].T, 64)
        v = split_heads(i["hidden_states"] @ i["v_weight"].T, 64)
        return (
            rms_norm(q, 1 + i["q_norm_weight"], 1e-6),
            rms_norm(k, 1 + i["k_norm_weight"], 1e-6),
            v,
        )

    for name, weight in (("q", "q_weight"), ("k", "k_weight")):
        x = split_heads(inputs["hidden_states"].double() @ inputs[weight].double().T, 64)
        rstd = rms_rstd(x, 1e-6)
        inputs |= {f"{name}_rstd": rstd.float(), f"{name}_normed": (x * rstd).float()}
        inputs[f"{name}_norm_weight"] = inputs["hidden_states"][0, 0, :64]
    names = ("hidden_states", "q_weight", "k_weight", "v_weight", "q_norm_weight", "k_norm_weight")
    grads = (inputs["grad_query"], inputs["grad_key"], inputs["grad_value"])
    expected = gradients(forward, inputs, names, *grads)
    for actual, wanted in zip(run.call(inputs), expected, strict=True):
        assert_near(actual, wanted)


def test_time_step_backward_is_the_gradient_of_a_clamped_softplus(reference):
    run = reference("L1/056")
    inputs = cast(run.draw(run.workloads[0]), torch.float32)
    inputs |= {"time_step_min": 0.3, "time_step_max": 1.5, "bias": torch.zeros(40)}

    def forward(i):
        activated = F.softplus(i["dt_with_bias"] + i["bias"])
        return activated.clamp(i["time_step_min"], i["time_step_max"])

    expected = gradients(forward, inputs, ("dt_with_bias", "bias"), inputs["grad_output"])
    inputs.pop("bias")
    inputs["dt_activated"] = F.softplus(inputs["dt_with_bias"]).clamp(0.3, 1.5)
    assert 0.2 < (expected[0] == 0).double().mean() < 0.8
    for actual, wanted in zip(run.call(inputs), expected, strict=True):
        assert_near(actual, wanted)


def test_score_backward_is_the_gradient_of_softmax(reference):
    run = reference("L1/060")
    inputs = cast(run.draw(run.workloads[1]), torch.float32)

    def forward(i):
        return torch.softmax(i["query"] @ i["key"].mT * i["scaling"], dim=-1)

    inputs["attn_weights"] = forward(cast(inputs, torch.float64)).float()
    expected = gradients(forward, inputs, ("query", "key"), inputs["grad_output"])
    for actual, wanted in zip(run.call(inputs), expected, strict=True):
        assert_near(actual, wanted)


def test_gated_residual_backward_is_the_gradient(reference):
    run = reference("L1/061")
    inputs = cast(run.draw(run.workloads[0]), torch.float32)

    def forward(i):
        return i["grad_output"] + torch.tanh(i["gate"]) * i["hidden_states"] * i["mask"]

    names = ("grad_output", "hidden_states", "gate")  # grad_output stands in for the residual
    expected = gradients(forward, inputs, names, inputs["grad_output"])
    for actual, wanted in zip(run.call(inputs), expected, strict=True):
        assert_near(actual, wanted)


def test_cache_update_backward_is_the_gradient_at_any_positions(reference):
    run = reference("L1/062")
    inputs = cast(run.draw(run.workloads[0]), torch.float32)
    generator = torch.Generator().manual_seed(0)
    inputs["cache_position"] = torch.randperm(512, generator=generator)[:131]
    extra = {"value_states": torch.zeros_like(inputs["key_states"])}
    extra |= {"keys": torch.zeros_like(inputs["grad_key_cache"])}
    extra |= {"values": torch.zeros_like(inputs["grad_key_cache"])}

    def forward(i):
        keys = rotated(i["key_states"], i["cos"].unsqueeze(1), i["sin"].unsqueeze(1))
        return (
            i["keys"].index_copy(2, i["cache_position"], keys),
            i["values"].index_copy(2, i["cache_position"], i["value_states"]),
        )

    names = ("key_states", "value_states", "cos", "sin", "keys", "values")
    grads = (inputs["grad_key_cache"], inputs["grad_value_cache"])
    expected = gradients(forward, inputs | extra, names, *grads)
    for actual, wanted in zip(run.call(inputs), expected, strict=True):
        assert_near(actual, wanted)


def test_dropout_softmax_backward_is_the_gradient(reference):
    run = reference("L1/066")
    for workload in run.workloads:
        inputs = run.draw(workload)
        inputs["mask"] = inputs["mask"] | torch.eye(workload.axes["seq_len"], dtype=torch.bool)
        inputs["scores"] = torch.log(inputs["p_attn"])

        def probabilities(i):
            return torch.softmax(i["scores"].masked_fill(~i["mask"], -1e9), dim=-1)

        def forward(i):
            if i["p_dropout"] == 0:
                return probabilities(i)
            return probabilities(i) * i["dropout_mask"] / (1 - i["p_dropout"])

        (expected,) = gradients(forward, inputs, ("scores",), inputs["grad_output"])
        inputs["p_attn"] = probabilities(cast(inputs, torch.float64)).float()
        inputs.pop("scores")
        (actual,) = run.call(inputs)
        assert_near(actual, expected)


def test_rope_backward_is_the_gradient_only_if_the_halves_of_sin_agree(reference):
    run = reference("L1/068")
    inputs = run.draw(run.workloads[2])

    def forward(i):
        tables = (i["cos"].unsqueeze(1), i["sin"].unsqueeze(1))
        return rotated(i["q"], *tables), rotated(i["k"], *tables)

    names, grads = ("q", "k", "cos", "sin"), (inputs["grad_q_embed"], inputs["grad_k_embed"])
    agreeing = inputs | {"sin": equal_halves(inputs["sin"])}
    for actual, wanted in zip(
        run.call(agreeing), gradients(forward, agreeing, names, *grads), strict=True
    ):
        assert_near(actual, wanted)

    # Otherwise sine stays where the output is; only the tables' gradients are true.
    *actual, grad_cos, grad_sin = run.call(inputs)
    *wrong, true_cos, true_sin = gradients(forward, inputs, names, *grads)
    assert_near(grad_cos, true_cos)
    assert_near(grad_sin, true_sin)
    cos, minus_sin = inputs["cos"].unsqueeze(1), -inputs["sin"].unsqueeze(1)
    for grad, got, true in zip(grads, actual, wrong, strict=True):
        assert_near(got, rotated(grad.double(), cos, minus_sin))
        assert not torch.allclose(got.double(), true, atol=0.1)


def test_cross_attention_projection_backward_is_the_gradient(reference):
    run = reference("L1/072")
    inputs = run.draw(run.workloads[2])

    def forward(i):
        k = split_heads(i["encoder_hidden_states"] @ i["k_weight"].T, 32)
        v = split_heads(i["encoder_hidden_states"] @ i["v_weight"].T, 32)
        return (
            split_heads(i["decoder_hidden_states"] @ i["q_weight"].T, 32),
            k.repeat_interleave(4, dim=1),
            v.repeat_interleave(4, dim=1),
        )

    names = ("decoder_hidden_states", "encoder_hidden_states", "q_weight", "k_weight", "v_weight")
    grads = [inputs[f"grad_{n}_states"] for n in ("query", "key", "value")]
    expected = gradients(forward, inputs, names, *grads)
    for actual, wanted in zip(run.call(inputs), expected, strict=True):
        assert_near(actual, wanted)


@pytest.mark.parametrize("use_silu_gate", [False, True])
def test_gated_projection_backward_is_the_gradient(reference, use_silu_gate):
    run = reference("L1/079")
    inputs = cast(run.draw(run.workloads[2]), torch.float32) | {"use_silu_gate": use_silu_gate}

    def activated(i):
        return F.silu(i["gate"]) if use_silu_gate else i["gate"]

    def forward(i):
        return F.linear(i["ssm_output"] * activated(i), i["weight"], i["bias"])

    names = ("ssm_output", "gate", "weight", "bias")
    expected = gradients(forward, inputs, names, inputs["grad_output"])
    inputs["gate_activated"] = activated(inputs)
    inputs["gated_output"] = inputs["ssm_output"] * activated(inputs)
    for actual, wanted in zip(run.call(inputs), expected, strict=True):
        assert_near(actual, wanted)


def test_silu_backward_is_the_gradient_with_the_sigmoid_given(reference):
    run = reference("L1/084")
    inputs = run.draw(run.workloads[0])
    (expected,) = gradients(lambda i: F.silu(i["x"]), inputs, ("x",), inputs["grad_output"])
    (actual,) = run.call(inputs | {"sigmoid_x": torch.sigmoid(inputs["x"].double()).float()})
    assert_near(actual, expected)


def test_embedding_norm_backward_is_the_gradient_with_repeats_summed(reference):
    run = reference("L1/087")
    inputs = cast(run.draw(run.workloads[0]), torch.float32)
    inputs["input_ids"] = inputs["input_ids"] % 97 * 600
    inputs["table"] = torch.randn(65536, 48, generator=torch.Generator().manual_seed(0))

    def forward(i):
        return rms_norm(i["table"][i["input_ids"]], i["norm_weight"], 1e-6)

    names = ("table", "norm_weight")
    expected = gradients(forward, inputs, names, inputs["grad_output"])
    states = inputs.pop("table").double()[inputs["input_ids"]]
    inputs |= {"hidden_states_fp32": states.float(), "rstd": rms_rstd(states, 1e-6).float()}
    for actual, wanted in zip(run.call(inputs), expected, strict=True):
        assert_near(actual, wanted)


def test_angle_backward_is_the_gradient_of_cosine_and_sine(reference, assert_matches):
    run = reference("L1/090")
    workload = run.workloads[2]
    inputs = run.draw(workload)
    inputs["idx_theta"] *= 1000
    (expected,) = gradients(
        lambda i: (i["idx_theta"].cos(), i["idx_theta"].sin()),
        inputs, ("idx_theta",), inputs["grad_cos"], inputs["grad_sin"],
    )  # fmt: skip
    assert_matches(run.call(inputs)[0], expected, workload.tolerance)


def test_rope_norm_backward_is_the_gradient_but_for_the_tables(reference):
    run = reference("L1/091")
    inputs = cast(run.draw(run.workloads[2]), torch.float32)
    inputs |= {name: equal_halves(inputs[name]) for name in ("cos", "sin")}
    inputs["q_norm_weight"], inputs["k_norm_weight"] = inputs["hidden_states"][0, :2, :32]

    def turned_heads(i):
        joint = split_heads(i["hidden_states"] @ i["qkv_weight"].T, 32)
        q, k, v = joint.split((4, 2, 2), dim=1)
        cos, sin = i["cos"].unsqueeze(1), i["sin"].unsqueeze(1)
        return rotated(q, cos, sin), rotated(k, cos, sin), v

    def forward(i):
        q, k, v = turned_heads(i)
        q, k = rms_norm(q, i["q_norm_weight"], 1e-5), rms_norm(k, i["k_norm_weight"], 1e-5)
        return q, k, v

    names = ("hidden_states", "cos", "sin", "qkv_weight", "q_norm_weight", "k_norm_weight")
    grads = (inputs["grad_query"], inputs["grad_key"], inputs["grad_value"])

    def saved():
        q, k, _ = turned_heads(cast(inputs, torch.float64))
        return {
            "query_pre_norm": q.float(), "key_pre_norm": k.float(),
            "q_rstd": rms_rstd(q, 1e-5).float(), "k_rstd": rms_rstd(k, 1e-5).float(),
        }  # fmt: skip

    outputs = run.call(inputs | saved())
    expected = gradients(forward, inputs, names, *grads)
    for index, name in enumerate(names):
        if name in ("cos", "sin"):
            assert not torch.allclose(outputs[index].double(), expected[index], atol=0.1)
        else:
            assert_near(outputs[index], expected[index])

    # The heads are rotated once more instead of back, which does no harm if nothing turns.
    inputs |= {"cos": torch.ones_like(inputs["cos"]), "sin": torch.zeros_like(inputs["sin"])}
    outputs = run.call(inputs | saved())
    for actual, wanted in zip(outputs, gradients(forward, inputs, names, *grads), strict=True):
        assert_near(actual, wanted)


def test_router_backward_is_the_gradient(reference):
    run = reference("L1/093")
    inputs = cast(run.draw(run.workloads[0]), torch.float32)

    def gathered(i):
        scores = torch.sigmoid(i["hidden_states"] @ i["weight"].T)
        return scores, scores.gather(1, i["topk_indices"])

    def forward(i):
        chosen = gathered(i)[1]
        return chosen / chosen.sum(dim=-1, keepdim=True) * i["routed_scaling_factor"]

    names = ("hidden_states", "weight")
    expected = gradients(forward, inputs, names, inputs["grad_topk_weights"])
    scores, chosen = gathered(cast(inputs, torch.float64))
    denominator = chosen.sum(dim=-1, keepdim=True)
    inputs |= {
        "scores": scores.float(), "denominator": denominator.float(),
        "topk_weights_normalized": (chosen / denominator).float(),
    }  # fmt: skip
    for actual, wanted in zip(run.call(inputs), expected, strict=True):
        assert_near(actual, wanted)


# ---- Where the roundings are ----------------------------------------------------------------


def test_router_backward_rounds_after_every_step(reference, assert_same_rounding):
    run = reference("L1/093")
    inputs = run.draw(run.workloads[0])
    grad, x, weight, scores, indices, _, normalized, denominator, factor = cast(
        inputs, torch.float64
    ).values()
    a = rounded(grad * factor)
    r = rounded(rounded(a * normalized).sum(dim=-1, keepdim=True))
    u = rounded(rounded(a - r) / denominator)
    grad_scores = torch.zeros_like(scores).scatter(1, indices, u)
    grad_logits = rounded(rounded(grad_scores * scores) * rounded(1 - scores))
    grad_x, grad_weight = run.call(inputs)
    assert_same_rounding(grad_x, (grad_logits @ weight).to(BF16))
    assert_same_rounding(grad_weight, (grad_logits.T @ x).to(BF16))


def test_gate_backward_rounds_every_step_of_the_derivative(reference, assert_same_rounding):
    run = reference("L1/079")
    inputs = run.draw(run.workloads[0])
    grad, ssm, gate, weight, _, activated, gated, _ = cast(inputs, torch.float64).values()
    s = rounded(gate.sigmoid())
    derivative = rounded(s * rounded(1 + rounded(gate * rounded(1 - s))))
    grad_gated = rounded(grad @ weight)
    rows = grad.flatten(0, 1)
    expected = (
        grad_gated * activated,
        rounded(grad_gated * ssm) * derivative,
        rows.T @ gated.flatten(0, 1),
        rows.sum(dim=0),
    )
    for actual, wanted in zip(run.call(inputs), expected, strict=True):
        assert_same_rounding(actual, wanted.to(BF16))


def test_score_gradient_rounds_before_and_after_the_scale(reference, assert_same_rounding):
    run = reference("L1/060")
    inputs = run.draw(run.workloads[1])
    grad, query, key, weights, scale = cast(inputs, torch.float64).values()
    unscaled = weights * (grad - (grad * weights).sum(dim=-1, keepdim=True))
    scores = rounded(rounded(unscaled) * scale)
    grad_query, grad_key = run.call(inputs)
    assert_same_rounding(grad_query, (scores @ key).to(BF16))
    assert_same_rounding(grad_key, (scores.mT @ query).to(BF16))


def test_rope_norm_backward_rounds_every_step_of_the_rotation(reference, assert_same_rounding):
    run = reference("L1/091")
    inputs = run.draw(run.workloads[2])
    x = cast(inputs, torch.float64)
    half = x["cos"].shape[-1] // 2
    c, s = x["cos"].unsqueeze(1), x["sin"].unsqueeze(1)

    def swapped(t):
        return torch.cat((-t[..., half:], t[..., :half]), dim=-1)

    def turned(t, sign):
        """Forward rotation (sign 1) or what the problem takes for its backward (sign -1)."""
        return rounded(rounded(t * c) + sign * rounded(swapped(t) * s))

    joint, tables = [], []
    for name, head in (("query", "q"), ("key", "k")):
        grad, pre, rstd = x[f"grad_{name}"], x[f"{name}_pre_norm"], x[f"{head}_rstd"]
        t = grad * x[f"{head}_norm_weight"]
        projection = (t * pre).sum(dim=-1, keepdim=True)
        g = rounded(t * rstd - projection * rstd**3 * pre / (2 * half))
        joint.append(turned(g, -1))
        again = turned(pre, 1)
        tables.append([rounded(rounded(g * o).sum(dim=1)) for o in (again, swapped(again))])
    joint = torch.cat((*joint, x["grad_value"]), dim=1).transpose(1, 2).flatten(2)
    grad_hidden, grad_cos, grad_sin, grad_weight, *_ = run.call(inputs)
    assert_same_rounding(grad_hidden, (joint @ x["qkv_weight"]).to(BF16))
    assert_same_rounding(grad_cos, (tables[0][0] + tables[1][0]).to(BF16))
    assert_same_rounding(grad_sin, (tables[0][1] + tables[1][1]).to(BF16))
    rows = x["hidden_states"].flatten(0, 1)
    assert_same_rounding(grad_weight, (joint.flatten(0, 1).T @ rows).to(BF16))
