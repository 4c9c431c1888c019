"""Backward references among L2/001 to L2/041 against autograd of the forward they belong to."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.problems.formulas import cast, merge_heads, rotate_half, split_heads


def leaves(inputs, *names):
    """float64 copies that collect gradients."""
    return [inputs[name].detach().double().requires_grad_() for name in names]


def assert_all_close(actual, expected, tolerance):
    """Each accurate relative to its largest element."""
    for a, e in zip(actual, expected, strict=True):
        atol = tolerance * e.abs().max().item()
        torch.testing.assert_close(a.double(), e.double(), rtol=tolerance, atol=atol)


def attention(q, k, v, scale, **options):
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True, **options)


def same_sequence(cu_seqlens, size):
    """[size, size], whether two rows belong to the same sequence."""
    sequence = torch.searchsorted(cu_seqlens.long(), torch.arange(size), right=True)
    return sequence.unsqueeze(1) == sequence


# ---- L2/001: a vision block with one term that is not the derivative -------------------------


def vision_block(run, std):
    """Outputs for saved tensors that fit an input of that deviation, and the true gradients."""
    inputs = cast(run.draw(run.workloads[0]), torch.float64)
    eps, width = inputs["norm_eps"], inputs["x"].shape[-1:]
    inputs["x"] = F.layer_norm(inputs["x"], width, eps=0.0) * math.sqrt(std**2 - eps) + 0.5
    x, ln_weight, qkv_weight, out_weight = leaves(
        inputs, "x", "ln_weight", "qkv_weight", "out_weight"
    )
    ln_bias, qkv_bias, out_bias = (
        torch.randn(len(w), dtype=torch.float64, requires_grad=True)
        for w in (ln_weight, qkv_weight, out_weight)
    )
    x_norm = F.layer_norm(x, width, ln_weight, ln_bias, eps)
    qkv = F.linear(x_norm, qkv_weight, qkv_bias).chunk(3, dim=-1)
    q, k, v = (split_heads(t, inputs["q"].shape[-1]) for t in qkv)
    probabilities = torch.softmax(q @ k.mT * inputs["scale"], dim=-1)
    attn_output = merge_heads(probabilities @ v)
    output = x + F.linear(attn_output, out_weight, out_bias)
    output.backward(inputs["grad_output"])
    saved = {
        "x_mean": x.mean(-1, keepdim=True),
        "x_var": x.var(-1, keepdim=True, correction=0),
        "x_norm": x_norm,
        "q": q,
        "k": k,
        "v": v,
        "attn_weights": probabilities,
        "attn_output": attn_output,
    }
    actual = run.call(inputs | {name: value.detach() for name, value in saved.items()})
    wanted = (x, qkv_weight, qkv_bias, out_weight, out_bias, ln_weight, ln_bias)
    return actual, [tensor.grad for tensor in wanted]


def test_vision_block_backward_is_the_gradient_where_rows_have_unit_variance(reference):
    actual, expected = vision_block(reference("L2/001"), std=1.0)
    assert_all_close(actual, expected, 1e-7)


def test_vision_block_backward_has_a_variance_where_the_gradient_has_its_3_2_power(reference):
    actual, expected = vision_block(reference("L2/001"), std=2.0)
    assert_all_close(actual[1:], expected[1:], 1e-7)
    assert (actual[0] - expected[0]).abs().max() > 0.01


# ---- Attention -------------------------------------------------------------------------------


def test_gqa_rope_backward_is_the_gradient(reference):
    run = reference("L2/003")
    inputs = cast(run.draw(run.workloads[1]), torch.float32)
    names = ("hidden_states", "q_weight", "k_weight", "v_weight", "o_weight")
    x, q_weight, k_weight, v_weight, o_weight = wanted = leaves(inputs, *names)
    cos, sin = (inputs[name].double().unsqueeze(1) for name in ("cos", "sin"))
    head_dim, heads = cos.shape[-1], inputs["query_states"].shape[1]
    q, k, v = (split_heads(x @ w.T, head_dim) for w in (q_weight, k_weight, v_weight))
    q, k = (t * cos + rotate_half(t) * sin for t in (q, k))
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    probabilities = torch.softmax(q @ k.mT * inputs["scaling"], dim=-1)
    attn_output = merge_heads(probabilities @ v)
    (attn_output @ o_weight.T).backward(inputs["grad_output"].double())
    saved = {
        "query_states": q,
        "key_states": k,
        "value_states": v,
        "attn_weights": probabilities,
        "attn_output": attn_output,
    }
    actual = run.call(inputs | {name: value.detach().float() for name, value in saved.items()})
    assert_all_close(actual, [tensor.grad for tensor in wanted], 1e-5)


def test_gqa_rope_backward_rounds_the_gradient_of_the_scores_twice(reference):
    """With an identity for keys and cosines of one, a query's gradient is that of its scores."""
    run = reference("L2/003")
    inputs = run.draw(run.workloads[0])
    cos = inputs["cos"]
    seq_len, head_dim = cos.shape[1:]
    inputs |= {"cos": torch.ones_like(cos), "sin": torch.zeros_like(cos)}
    inputs["key_states"] = torch.zeros_like(inputs["key_states"])
    width = min(seq_len, head_dim)
    inputs["key_states"][:, :, :width, :width] = torch.eye(width, dtype=cos.dtype)
    # Likewise one token of the input shows one row of the queries' gradient.
    inputs["hidden_states"] = torch.zeros_like(inputs["hidden_states"])
    inputs["hidden_states"][0, 3, 0] = 1
    _, grad_q_weight, *_ = run.call(inputs)
    heads = inputs["query_states"].shape[1]
    grad = (inputs["grad_output"] @ inputs["o_weight"]).unflatten(-1, (heads, head_dim))
    grad_p = grad[0, 3].unsqueeze(1) @ inputs["value_states"][0].mT
    p = inputs["attn_weights"][0, :, 3].float()
    grad_p = grad_p.squeeze(1).float()
    grad_s = (p * (grad_p - (grad_p * p).sum(-1, keepdim=True))).bfloat16()
    grad_s = grad_s * inputs["scaling"]
    actual = grad_q_weight[:, 0].unflatten(0, (heads, head_dim))[:, :width]
    assert torch.equal(actual, grad_s[:, :width])


def test_chunked_audio_attention_backward_is_the_gradient(reference):
    run = reference("L2/014")
    for workload in run.workloads:
        inputs = cast(run.draw(workload), torch.float32)
        x = inputs["hidden_states"].double()
        names = ("query_states", "key_states", "value_states", "out_weight")
        q, k, v, out_weight = leaves(inputs, *names)
        mask = same_sequence(inputs["cu_seqlens"], len(x))
        context = attention(q, k, v, q.shape[-1] ** -0.5, attn_mask=mask)
        grad_output = inputs["grad_output"].double()
        (merge_heads(context)[0] @ out_weight.T).backward(grad_output)
        grads = [merge_heads(t.grad)[0] for t in (q, k, v)]
        expected = [
            sum(g @ inputs[f"{n}_weight"].double() for g, n in zip(grads, "qkv", strict=True))
        ]
        for grad in grads:
            expected += [grad.T @ x, grad.sum(0)]
        expected += [out_weight.grad, grad_output.sum(0)]
        actual = list(run.call(inputs))
        # A shift of all keys changes nothing.
        assert expected.pop(4).abs().max() < 1e-9
        assert actual.pop(4).abs().max() < 1e-3
        assert_all_close(actual, expected, 1e-4)


def test_packed_vision_attention_backward_is_the_gradient(reference):
    run = reference("L2/017")
    for workload in run.workloads:
        inputs = cast(run.draw(workload), torch.float64)
        names = ("hidden_states", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias")
        x, qkv_weight, qkv_bias, proj_weight, proj_bias = wanted = leaves(inputs, *names)
        cos, sin = inputs["cos"], inputs["sin"]
        qkv = F.linear(x, qkv_weight, qkv_bias).chunk(3, dim=-1)
        q, k, v = (split_heads(t.unsqueeze(0), cos.shape[-1]) for t in qkv)
        q, k = (t * cos + rotate_half(t) * sin for t in (q, k))
        mask = same_sequence(inputs["cu_seqlens"], len(x))
        context = merge_heads(attention(q, k, v, inputs["scaling"], attn_mask=mask))[0]
        F.linear(context, proj_weight, proj_bias).backward(inputs["grad_output"])
        assert_all_close(run.call(inputs), [tensor.grad for tensor in wanted], 1e-9)


def test_text_video_cross_attention_backward_is_the_gradient(reference):
    run = reference("L2/021")
    layers = ("query", "key", "value", "output")
    names = ["video_latents", "text_embeddings"]
    names += [f"{layer}_{kind}" for layer in layers for kind in ("weight", "bias")]
    for workload in run.workloads:
        inputs = cast(run.draw(workload), torch.float64)
        video, text, *layer_tensors = wanted = leaves(inputs, *names)
        q, k, v = (
            split_heads(F.linear(x, *layer_tensors[2 * i : 2 * i + 2]), 64)
            for i, x in enumerate((video, text, text))
        )
        context = merge_heads(attention(q, k, v, inputs["scale"]))
        F.linear(context, *layer_tensors[6:]).backward(inputs["grad_output"])
        expected, actual = [tensor.grad for tensor in wanted], list(run.call(inputs))
        assert max(t.pop(5).abs().max() for t in (expected, actual)) < 1e-12  # the key bias's
        assert_all_close(actual, expected, 1e-9)


def test_causal_interleaved_rope_attention_backward_is_the_gradient(reference):
    run = reference("L2/028")
    names = ("hidden_states", "q_weight", "k_weight", "v_weight", "o_weight")
    for workload in run.workloads[:2]:
        inputs = cast(run.draw(workload), torch.float32)
        x, q_weight, k_weight, v_weight, o_weight = wanted = leaves(inputs, *names)
        position = torch.arange(x.shape[1], dtype=torch.float32)
        angle = torch.outer(position, inputs["inv_freq"]).double()
        turn = torch.polar(torch.ones_like(angle), angle)
        q, k, v = (split_heads(x @ w.T, 2 * angle.shape[1]) for w in (q_weight, k_weight, v_weight))
        # A pair of neighbouring columns is a complex number.
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * turn).flatten(-2)
            for t in (q, k)
        )
        context = merge_heads(attention(q, k, v, inputs["scaling"], is_causal=True))
        (context @ o_weight.T).backward(inputs["grad_output"].double())
        assert_all_close(run.call(inputs), [tensor.grad for tensor in wanted], 1e-4)


@pytest.mark.parametrize("cap", [50.0, 1.5])
def test_capped_qk_norm_attention_backward_is_the_gradient(reference, cap):
    run = reference("L2/037")
    names = ("hidden_states", "q_weight", "k_weight", "v_weight", "o_weight")
    names += ("q_norm_weight", "k_norm_weight")
    for workload in run.workloads[:2]:
        inputs = cast(run.draw(workload), torch.float64) | {"attn_logit_softcapping": cap}
        x, q_weight, k_weight, v_weight, o_weight, q_norm, k_norm = wanted = leaves(inputs, *names)
        cos, sin = (inputs[name].unsqueeze(1) for name in ("cos", "sin"))
        q, k, v = (split_heads(x @ w.T, cos.shape[-1]) for w in (q_weight, k_weight, v_weight))
        eps = inputs["rms_norm_eps"]
        q, k = (F.rms_norm(t, t.shape[-1:], 1 + w, eps) for t, w in ((q, q_norm), (k, k_norm)))
        q, k = (t * cos + rotate_half(t) * sin for t in (q, k))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        scores = cap * torch.tanh(q @ k.mT * inputs["scaling"] / cap)
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        context = torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v
        (merge_heads(context) @ o_weight.T).backward(inputs["grad_output"])
        assert_all_close(run.call(inputs), [tensor.grad for tensor in wanted], 1e-9)


# ---- Feed-forward and experts ----------------------------------------------------------------


def test_swiglu_backward_is_the_gradient(reference):
    run = reference("L2/005")
    inputs = cast(run.draw(run.workloads[1]), torch.float32)
    x, gate_weight, up_weight, down_weight = wanted = leaves(
        inputs, "x", "gate_weight", "up_weight", "down_weight"
    )
    gate, up = x @ gate_weight.T, x @ up_weight.T
    activated = F.silu(gate)
    ((activated * up) @ down_weight.T).backward(inputs["grad_output"].double())
    saved = {"gate_output": gate, "up_output": up, "activated_gate": activated}
    actual = run.call(inputs | {name: value.detach().float() for name, value in saved.items()})
    assert_all_close(actual, [tensor.grad for tensor in wanted], 1e-5)


def test_router_backward_is_the_gradient_of_what_hangs_on_the_probabilities(reference):
    """grad_router_logits counts as a gradient of the probabilities, not of the logits."""
    run = reference("L2/011")
    for workload in run.workloads:
        inputs = cast(run.draw(workload), torch.float32)
        inputs["grad_expert_mask"][:, :, 20:] = 0
        x, gate_weight = wanted = leaves(inputs, "hidden_states", "gate_weight")
        # Logits as drawn, but depending on tokens and router as a router's do.
        logits = x @ gate_weight.T
        logits = logits + (inputs["router_logits"].double() - logits).detach()
        probabilities = torch.softmax(logits, dim=-1)
        experts = inputs["selected_experts"]
        selected = probabilities.gather(1, experts)
        weights = selected / selected.sum(-1, keepdim=True)
        loss = (weights * inputs["grad_routing_weights"].double()).sum()
        for token, row in enumerate(experts[:20].tolist()):
            for slot, expert in enumerate(row):
                loss = (
                    loss + selected[token, slot] * inputs["grad_expert_mask"][expert, slot, token]
                )
        (loss + (probabilities * inputs["grad_router_logits"]).sum()).backward()
        assert_all_close(run.call(inputs), [tensor.grad for tensor in wanted], 1e-4)


def test_routed_experts_backward_is_the_gradient(reference):
    run = reference("L2/025")
    names = ("hidden_states", "topk_weights", "gate_weights", "up_weights", "down_weights")
    inputs = cast(run.draw(run.workloads[1]), torch.float64)
    inputs["topk_indices"] = inputs["topk_indices"] % 23  # expert 23 gets no token
    distinct = [len(set(row)) == 8 for row in inputs["topk_indices"].tolist()]
    inputs["topk_indices"][~torch.tensor(distinct)] = torch.arange(8)
    x, weights, gate_weights, up_weights, down_weights = wanted = leaves(inputs, *names)
    # Every expert on every token, and the weights as a matrix.
    gate = torch.einsum("nh,eih->eni", x, gate_weights)
    up = torch.einsum("nh,eih->eni", x, up_weights)
    y = torch.einsum("eni,ehi->enh", F.silu(gate) * up, down_weights)
    matrix = torch.zeros(len(x), len(gate_weights), dtype=torch.float64)
    matrix = matrix.scatter_add(1, inputs["topk_indices"], weights)
    torch.einsum("ne,enh->nh", matrix, y).backward(inputs["grad_output"])
    actual = run.call(inputs)
    assert_all_close(actual, [tensor.grad for tensor in wanted], 1e-9)
    assert not any(grad[23].any() for grad in actual[2:])


# ---- L2/036: ConvNeXt-V2, with one term that is not the derivative ---------------------------


def convnext_block(run, inputs, mean_of):
    """Outputs for saved tensors in float64, and gradients of the forward with that mean."""
    names = ("residual", "dwconv_weight", "layernorm_weight", "pwconv1_weight", "grn_weight")
    x, dw, ln, pw1, grn, pw2 = leaves(inputs, *names, "pwconv2_weight")
    channels, expanded = pw2.shape
    dw_bias, ln_bias, pw1_bias, grn_bias, pw2_bias = (
        torch.zeros(size, dtype=torch.float64, requires_grad=True)
        for size in (channels, channels, expanded, (1, 1, 1, expanded), channels)
    )
    eps = inputs["eps"]
    y = F.conv2d(x, dw, dw_bias, padding=3, groups=channels).permute(0, 2, 3, 1)
    y = F.layer_norm(y, (channels,), ln, ln_bias, eps)
    z = F.gelu(F.linear(y, pw1, pw1_bias), approximate="tanh")
    norm = torch.linalg.vector_norm(z, dim=(1, 2), keepdim=True)
    z = grn * z * (norm / (mean_of(norm) + eps)) + grn_bias + z
    branch = F.linear(z, pw2, pw2_bias).permute(0, 3, 1, 2)
    kept = inputs["drop_mask"] / (1 - inputs["drop_path_prob"])
    (x + branch * kept).backward(inputs["grad_output"])
    wanted = (x, dw, dw_bias, ln, ln_bias, pw1, pw1_bias, grn, grn_bias, pw2, pw2_bias)
    return run.call(inputs), [tensor.grad for tensor in wanted]


def convnext_inputs(run, workload):
    """The saved tensors of a forward in float64, with a dropped and a kept sample."""
    axes = run.problem.definition.bind(workload.axes)
    torch.set_default_dtype(torch.float64)
    try:
        inputs = run.module.generate_inputs(axes, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    # GRN as strong as the branch it is added to.
    inputs["grn_weight"] = 100 * inputs["grn_weight"]
    inputs["x_grn"] = inputs["grn_weight"] * inputs["x_grn_scaled"] + inputs["x_gelu"]
    inputs["drop_mask"] = torch.ones_like(inputs["drop_mask"], dtype=torch.float64)
    inputs["drop_mask"][0] = 0 if len(inputs["drop_mask"]) > 1 else 1
    return {name: inputs[name] for name in run.problem.definition.inputs}


def mean_without_cross_terms(norm):
    """The mean, but with the gradient of a channel's own share alone."""
    return norm.mean(-1, keepdim=True).detach() + (norm - norm.detach()) / norm.shape[-1]


def test_convnext_backward_is_the_gradient_without_grns_cross_terms(reference):
    run = reference("L2/036")
    for workload in run.workloads:
        inputs = convnext_inputs(run, workload)
        actual, expected = convnext_block(run, inputs, mean_without_cross_terms)
        assert_all_close(actual, expected, 1e-5)


def test_convnext_backward_omits_the_channel_sum_of_grns_mean(reference):
    run = reference("L2/036")
    inputs = convnext_inputs(run, run.workloads[1])
    actual, expected = convnext_block(run, inputs, lambda norm: norm.mean(-1, keepdim=True))
    assert_all_close(actual[7:], expected[7:], 1e-5)  # what comes after GRN
    assert (actual[5] - expected[5]).abs().max() > 1e-3 * expected[5].abs().max()


def test_a_dropped_sample_of_convnext_passes_its_gradient_through(reference):
    run = reference("L2/036")
    inputs = convnext_inputs(run, run.workloads[0])
    grad_x = run.call(inputs)[0]
    assert torch.equal(grad_x[0], inputs["grad_output"][0])
    kept = run.call(inputs | {"drop_path_prob": 0.0})[0]
    assert not torch.equal(kept[0], inputs["grad_output"][0])


# ---- L2/040: AltUp ---------------------------------------------------------------------------


@pytest.mark.parametrize("active", [0, 1, 2])
def test_altup_backward_is_the_gradient(reference, active):
    run = reference("L2/040")
    inputs = cast(run.draw(run.workloads[2]), torch.float32) | {"altup_active_idx": active}
    # A router that leaves tanh's linear range.
    inputs["router_weight"] = inputs["router_weight"] * inputs["norm_weight"].numel()
    inputs["norm_weight"] = torch.randn_like(inputs["norm_weight"])
    names = ("hidden_states", "activated", "prediction_coef_weight", "correction_coef_weight")
    names += ("router_weight", "norm_weight")
    h, z, prediction, correction, router, norm = wanted = leaves(inputs, *names)

    def modalities(x):
        normalized = F.rms_norm(x, x.shape[-1:], norm, inputs["rms_norm_eps"])
        return torch.tanh(normalized / x.shape[-1] @ router.T)

    mix = F.linear(modalities(h[active]), prediction).unflatten(-1, (3, 3))
    predictions = [
        h[j] + sum(h[i] * mix[..., j, i].unsqueeze(-1) for i in range(3)) for j in range(3)
    ]
    gain = F.linear(modalities(z), correction) + 1
    corrected = torch.stack(
        [p + (z - predictions[active]) * gain[..., j : j + 1] for j, p in enumerate(predictions)]
    )
    corrected.backward(inputs["grad_corrected"].double())
    assert_all_close(run.call(inputs), [tensor.grad for tensor in wanted], 1e-5)
