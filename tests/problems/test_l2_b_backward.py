"""Backward references L2/042 to L2/082 against autograd of their forward, in float64.

Saved tensors are made consistent with one forward pass, so that the result must be its gradient.
Where a problem takes saved tensors as they come, another test shows which of them it reads.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.problems.formulas import assert_near, cast, doubles


def gradients(forward, inputs, names, grads):
    """Gradients of forward(leaves), a dict of float64 leaves in, towards the inputs named."""
    leaves = doubles(inputs)
    for name in names:
        leaves[name].requires_grad_()
    outputs = forward(leaves)
    return torch.autograd.grad(outputs, [leaves[name] for name in names], grads.double())


def assert_near_on_average(actual, expected, share=0.02):
    """For bfloat16: the error's length is a small share of the expectation's."""
    assert (actual.double() - expected).norm() <= share * expected.norm()


def vivid(x, seed=0):
    """Uneven values around one, in place of a norm's ones."""
    return 1 + 0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def test_post_norm_ffn_backward_is_the_gradient(reference, assert_matches):
    run = reference("L2/042")
    for workload in run.workloads:
        inputs = run.draw(workload)
        inputs["ln_weight"] = vivid(inputs["ln_weight"])
        hidden, inner = inputs["hidden_states"].shape[-1], inputs["fc1_output"].shape[-1]
        biases = {"b1": torch.zeros(inner), "b2": torch.zeros(hidden), "b3": torch.zeros(hidden)}

        def forward(x):
            y = F.gelu(x["hidden_states"] @ x["fc1_weight"].T + x["b1"], approximate="tanh")
            y = y @ x["fc2_weight"].T + x["b2"] + x["hidden_states"]
            return F.layer_norm(y, y.shape[-1:], x["ln_weight"], x["b3"], x["eps"])

        names = ["hidden_states", "fc1_weight", "b1", "fc2_weight", "b2", "ln_weight", "b3"]
        expected = gradients(forward, inputs | biases, names, inputs["grad_output"])
        for actual, gradient in zip(run.call(inputs), expected, strict=True):
            assert_near(actual, gradient)
            assert_matches(actual, gradient, workload.tolerance)


def test_post_norm_ffn_backward_takes_the_saved_tensors_as_they_are(reference):
    run = reference("L2/042")
    inputs = run.draw(run.workloads[0])
    before = run.call(inputs)
    after = run.call(inputs | {"gelu_output": 2 * inputs["gelu_output"]})
    assert [not torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [
        False, False, False, True, False, False, False,
    ]  # fmt: skip
    torch.testing.assert_close(after[3], 2 * before[3])


def decoder_forward(x):
    """Pre-norm decoder layer with causal grouped-query attention; also what it saves."""
    saved = {}
    eps, head_dim = x["eps"], x["cos"].shape[-1]
    batch, seq_len, _ = x["residual"].shape

    def norm(y, weight, index):
        saved[f"variance{index}"] = (y * y).mean(dim=-1, keepdim=True)
        saved[f"hidden_states_normalized{index}"] = y / torch.sqrt(saved[f"variance{index}"] + eps)
        return saved[f"hidden_states_normalized{index}"] * weight

    def heads(y):
        return y.view(batch, seq_len, -1, head_dim).transpose(1, 2)

    def rotated(y):
        half = head_dim // 2
        angle = torch.complex(x["cos"][..., :half], x["sin"][..., :half])[:, None]
        z = torch.complex(y[..., :half], y[..., half:]) * angle
        return torch.cat((z.real, z.imag), dim=-1)

    saved["attn_input"] = norm(x["residual"], x["input_ln_weight"], 1)
    q = rotated(heads(saved["attn_input"] @ x["q_weight"].T))
    k = rotated(heads(saved["attn_input"] @ x["k_weight"].T))
    v = heads(saved["attn_input"] @ x["v_weight"].T)
    repeats = q.shape[1] // k.shape[1]
    saved["query_states_rotated"] = q
    saved["key_states_repeated"] = k = torch.stack([k] * repeats, dim=2).flatten(1, 2)
    saved["value_states_repeated"] = v = torch.stack([v] * repeats, dim=2).flatten(1, 2)
    scores = q @ k.transpose(2, 3) / math.sqrt(head_dim)
    scores = scores + torch.full((seq_len, seq_len), -math.inf, dtype=scores.dtype).triu(1)
    saved["attn_weights"] = scores.softmax(dim=-1)
    saved["attn_output"] = (saved["attn_weights"] @ v).transpose(1, 2).reshape(batch, seq_len, -1)
    saved["residual2"] = x["residual"] + saved["attn_output"] @ x["o_weight"].T
    saved["ffn_input"] = norm(saved["residual2"], x["post_attn_ln_weight"], 2)
    saved["gate"] = saved["ffn_input"] @ x["gate_weight"].T
    saved["up"] = saved["ffn_input"] @ x["up_weight"].T
    saved["silu_up"] = saved["up"] * saved["up"].sigmoid()
    saved["swiglu_output"] = saved["gate"] * saved["silu_up"]
    return saved["residual2"] + saved["swiglu_output"] @ x["down_weight"].T, saved


def exact_angles(inputs):
    """Rotary tables of one angle, from the rounded ones, which are no exact rotation."""
    angle = torch.atan2(inputs["sin"].double(), inputs["cos"].double())
    return inputs | {"cos": angle.cos(), "sin": angle.sin()}


def test_decoder_backward_is_the_gradient(reference):
    run = reference("L2/056")
    names = ["residual", "input_ln_weight", "q_weight", "k_weight", "v_weight", "o_weight",
             "post_attn_ln_weight", "gate_weight", "up_weight", "down_weight"]  # fmt: skip
    for workload in run.workloads:
        inputs = run.draw(workload)
        precise = exact_angles(inputs)
        saved = {}

        def forward(x, saved=saved):
            output, all_saved = decoder_forward(x)
            saved |= {name: value.detach() for name, value in all_saved.items()}
            return output

        expected = gradients(forward, precise, names, inputs["grad_output"])
        exact = run.call(cast(precise | saved, torch.float32))
        for actual, gradient in zip(exact, expected, strict=True):
            assert_near(actual, gradient, rtol=1e-4)
        for actual, gradient in zip(run.call(inputs), expected, strict=True):
            assert_near_on_average(actual, gradient)


def test_decoder_backward_inputs_are_one_forward_pass(reference):
    run = reference("L2/056")
    inputs = run.draw(run.workloads[0])
    doubles = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    _, saved = decoder_forward(doubles)
    for name, value in saved.items():
        scale = value.abs().max()
        assert (inputs[name].double() - value).abs().max() <= 0.02 * scale, name
    assert not inputs["attn_weights"].triu(1).any()


def test_projection_backward_transposes_tables_that_are_no_rotation(reference):
    run = reference("L2/064")
    for workload in run.workloads:
        inputs = run.draw(workload)
        half = inputs["cos"].shape[-1] // 2
        names = ["hidden_states", "q_weight", "k_weight", "v_weight"]
        grads = torch.cat(
            [inputs[f"grad_{n}"].transpose(1, 2).flatten(2) for n in ("query", "key", "value")], -1
        )

        def forward(x, half=half):
            def rope(y):
                y = y.unflatten(-1, (-1, 2 * half))
                cos, sin = x["cos"].unsqueeze(2), x["sin"].unsqueeze(2)
                first = y[..., :half] * cos[..., :half] - y[..., half:] * sin[..., :half]
                second = y[..., half:] * cos[..., half:] + y[..., :half] * sin[..., half:]
                return torch.cat((first, second), dim=-1).flatten(2)

            q, k, v = (x["hidden_states"] @ x[f"{n}_weight"].T for n in "qkv")
            return torch.cat((rope(q), rope(k), v), dim=-1)

        expected = gradients(forward, inputs, names, grads)
        for actual, gradient in zip(run.call(inputs), expected, strict=True):
            assert_near(actual, gradient)


def test_bias_free_ffn_backward_is_the_gradient(reference):
    run = reference("L2/068")
    for workload in run.workloads:
        inputs = run.draw(workload)
        names = ["hidden_states", "weight1", "weight2"]

        def forward(x):
            return F.gelu(x["hidden_states"] @ x["weight1"].T, approximate="tanh") @ x["weight2"].T

        expected = gradients(forward, inputs, names, inputs["grad_output"])
        for actual, gradient in zip(run.call(inputs), expected, strict=True):
            assert_near(actual, gradient)


def test_ffn_backward_is_the_gradient_when_the_saved_tensors_agree(reference):
    run = reference("L2/073")
    for workload in run.workloads:
        inputs = run.draw(workload)
        intermediate = inputs["hidden_states"] @ inputs["weight1"].T + inputs["bias1"]
        activated = F.gelu(intermediate, approximate="tanh")
        saved = {"intermediate": intermediate, "intermediate_activated": activated}
        names = ["hidden_states", "weight1", "bias1", "weight2", "bias2"]

        def forward(x):
            y = F.gelu(x["hidden_states"] @ x["weight1"].T + x["bias1"], approximate="tanh")
            return y @ x["weight2"].T + x["bias2"]

        expected = gradients(forward, inputs, names, inputs["grad_output"])
        for actual, gradient in zip(run.call(inputs | saved), expected, strict=True):
            assert_near(actual, gradient)


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_edit_attention_backward_is_the_gradient(reference, dropout_p):
    run = reference("L2/072")
    for workload in run.workloads:
        inputs = run.draw(workload)
        _, heads, seq_len, head_dim = inputs["query"].shape
        inputs["attention_mask"][:, 3::5] = 0
        inputs["dropout_p"] = dropout_p
        saved = {}

        def forward(x, saved=saved, heads=heads, head_dim=head_dim, seq_len=seq_len):
            qkv = x["hidden_states"] @ x["qkv_weight"].T + x["qkv_bias"]
            q, k, v = (t.unflatten(-1, (heads, head_dim)).transpose(1, 2) for t in qkv.chunk(3, -1))
            scores = q @ k.transpose(2, 3) * x["scale"]
            scores = scores + x["edit_region_bias"][:, :seq_len, :seq_len]
            inside = x["edit_region_mask"] > 0
            within = inside[:, :, None] & inside[:, None, :]
            across = inside[:, :, None] ^ inside[:, None, :]
            scores = scores + torch.where(within[:, None], x["within_edit_bias"], 0.0)
            scores = scores + torch.where(across[:, None], x["cross_edit_bias"], 0.0)
            scores = scores.masked_fill(x["attention_mask"][:, None, None] == 0, -math.inf)
            probs = scores.softmax(dim=-1)
            dropped = probs
            if x["dropout_p"] > 0:
                dropped = probs * x["dropout_mask"] / (1 - x["dropout_p"])
            output = (dropped @ v).transpose(1, 2).flatten(2)
            saved |= {"query": q, "key": k, "value": v, "attention_probs": probs,
                      "attention_probs_dropped": dropped, "attention_output": output}  # fmt: skip
            return output @ x["out_weight"].T + x["out_bias"]

        names = ["hidden_states", "qkv_weight", "qkv_bias", "out_weight", "out_bias",
                 "edit_region_bias", "within_edit_bias", "cross_edit_bias"]  # fmt: skip
        expected = gradients(forward, inputs, names, inputs["grad_output"])
        consistent = inputs | {name: value.detach().float() for name, value in saved.items()}
        outputs = dict(zip(run.problem.definition.outputs, run.call(consistent), strict=True))
        for (name, actual), gradient in zip(outputs.items(), expected, strict=True):
            if name == "grad_qkv_bias":
                # A bias on the keys cancels in the softmax: its gradient is noise around zero.
                hidden = heads * head_dim
                assert actual[hidden : 2 * hidden].abs().max() < 1e-5 * actual.abs().max()
            assert_near(actual, gradient)


def test_edit_attention_backward_ignores_the_saved_scores_and_the_biases(reference):
    run = reference("L2/072")
    assert set(run.problem.pack.unread_inputs) == {
        "qkv_bias", "out_bias", "edit_region_bias", "within_edit_bias", "cross_edit_bias",
        "attention_scores",
    }  # fmt: skip
    workload = run.workloads[0]
    outputs = dict(zip(run.problem.definition.outputs, run.call(run.draw(workload)), strict=True))
    seq_len = workload.axes["seq_len"]
    bias = outputs["grad_edit_region_bias"]
    assert bias.shape[-1] > seq_len and bias[:, :seq_len, :seq_len].all()
    assert not bias[:, seq_len:].any() and not bias[:, :, seq_len:].any()


def test_mask_decoder_backward_is_the_gradient_when_the_saved_tensors_agree(reference):
    run = reference("L2/074")
    hyper = ["hyper_proj_in", "hyper_hidden", "hyper_proj_out"]
    iou = ["iou_proj_in", "iou_hidden", "iou_proj_out"]
    for workload in run.workloads:
        inputs = run.draw(workload)
        saved = {}

        def mlp(x, layers, saved, names):
            for (weight, bias), name in zip(layers, names, strict=False):
                x = x @ weight.T + bias
                saved |= {name.format(""): x.detach(), name.format("_relu"): x.detach().relu()}
                x = x.relu()
            return x @ layers[-1][0].T + layers[-1][1]

        def forward(x, saved=saved):
            layers = [(x[f"{n}_weight"], x[f"{n}_bias"]) for n in iou]
            scores = mlp(x["iou_token_out"], layers, saved, ["iou_hidden1{}", "iou_hidden2{}"])
            outputs = [scores]
            for m in range(x["mask_tokens_out"].shape[2]):
                layers = [(x[f"{n}_weights"][m], x[f"{n}_biases"][m]) for n in hyper]
                names = [f"hyper_hidden1{{}}_{m}", f"hyper_hidden2{{}}_{m}"]
                outputs.append(mlp(x["mask_tokens_out"][:, :, m], layers, saved, names))
            return torch.cat(outputs, dim=-1)

        names = ["iou_token_out", "mask_tokens_out"]
        names += [f"{n}_{kind}" for n in iou for kind in ("weight", "bias")]
        names += [f"{n}_{kind}" for n in hyper for kind in ("weights", "biases")]
        grads = torch.cat(
            (inputs["grad_iou_scores"], inputs["grad_hyper_weights"].flatten(2)), dim=-1
        )
        expected = gradients(forward, inputs, names, grads)
        consistent = {k: v.float() if v.dtype == torch.float64 else v for k, v in saved.items()}
        for actual, gradient in zip(run.call(inputs | consistent), expected, strict=True):
            assert_near(actual, gradient)


def test_mask_decoder_backward_stops_at_exactly_zero(reference):
    run = reference("L2/074")
    inputs = run.draw(run.workloads[0])
    inputs["iou_hidden1"] = torch.zeros_like(inputs["iou_hidden1"])
    outputs = dict(zip(run.problem.definition.outputs, run.call(inputs), strict=True))
    assert not outputs["grad_iou_token_out"].any()
    assert not outputs["grad_iou_proj_in_weight"].any()
    assert outputs["grad_iou_hidden_weight"].any()


def test_image_attention_backward_is_the_gradient(reference, assert_matches):
    run = reference("L2/076")
    for workload in run.workloads:
        inputs = run.draw(workload)
        generator = torch.Generator().manual_seed(0)
        for name in ("rel_pos_h", "rel_pos_w", "qkv_bias"):  # drawn too small to matter, or zero
            inputs[name] = 0.5 * torch.randn(inputs[name].shape, generator=generator)
        height, width = workload.axes["height"], workload.axes["width"]
        head_dim = inputs["rel_pos_h"].shape[1]

        def forward(x, height=height, width=width, head_dim=head_dim):
            tokens = [(i, j) for i in range(height) for j in range(width)]
            rows = torch.tensor([[a[0] - b[0] + height - 1 for b in tokens] for a in tokens])
            columns = torch.tensor([[a[1] - b[1] + width - 1 for b in tokens] for a in tokens])
            flat = x["hidden_states"].flatten(1, 2)
            qkv = flat @ x["qkv_weight"].T + x["qkv_bias"]
            q, k, v = (t.unflatten(-1, (-1, head_dim)).transpose(1, 2) for t in qkv.chunk(3, -1))
            scores = q @ k.transpose(2, 3) * x["scale"]
            scores = scores + torch.einsum("bnqd,qkd->bnqk", q, x["rel_pos_h"][rows])
            scores = scores + torch.einsum("bnqd,qkd->bnqk", q, x["rel_pos_w"][columns])
            heads = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
            return (heads @ x["proj_weight"].T + x["proj_bias"]).view_as(x["hidden_states"])

        names = ["hidden_states", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias",
                 "rel_pos_h", "rel_pos_w"]  # fmt: skip
        expected = gradients(forward, inputs, names, inputs["grad_output"])
        for actual, gradient in zip(run.call(inputs), expected, strict=True):
            assert_near(actual, gradient)
            assert_matches(actual, gradient, workload.tolerance)


def test_moe_backward_is_the_gradient_of_the_shared_expert_alone(reference):
    run = reference("L2/080")
    names = ["hidden_states"]
    names += [f"shared_expert_{n}_weight" for n in ("gate", "up", "down")]
    for workload in run.workloads:
        inputs = run.draw(workload)
        saved = {}

        def forward(x, saved=saved):
            gate = x["hidden_states"] @ x["shared_expert_gate_weight"].T
            up = x["hidden_states"] @ x["shared_expert_up_weight"].T
            activated = gate * gate.sigmoid() * up
            saved |= {"shared_gate_output": gate, "shared_up_output": up,
                      "shared_activated": activated}  # fmt: skip
            return activated @ x["shared_expert_down_weight"].T

        expected = gradients(forward, inputs, names, inputs["grad_output"])
        consistent = inputs | {name: value.detach() for name, value in saved.items()}
        grad_hidden, _, *grad_weights = run.call(cast(consistent, torch.float32))
        for actual, gradient in zip((grad_hidden, *grad_weights), expected, strict=True):
            assert_near(actual, gradient)
        grad_hidden, grad_router, *grad_weights = run.call(inputs)
        for actual, gradient in zip((grad_hidden, *grad_weights), expected, strict=True):
            assert_near_on_average(actual, gradient)
        # The router's share is nothing but the rounding of a sum that cancels.
        share = inputs["grad_output"].double().square().sum(dim=1).max()
        assert 0 < grad_router.abs().max() < 1e-6 * share


def test_moe_backward_router_follows_the_surrogate_where_it_does_not_cancel(reference):
    """The guard of 1e-20 in the normalisation breaks the cancellation for tiny weights."""
    run = reference("L2/080")
    inputs = run.draw(run.workloads[0])
    # With e = 1e-20 a slot alone of weight w is credited (g - g w / (w + e)) / (w + e).
    tokens = len(inputs["topk_indices"])
    inputs["topk_indices"] = inputs["topk_indices"][:, :1].contiguous()
    inputs["topk_weights"] = torch.full((tokens, 1), 1e-20)
    inputs["score_mask"][0] = 0
    _, grad_router, *_ = run.call(inputs)
    share = inputs["grad_output"].double().square().sum(dim=1, keepdim=True)
    credit = torch.zeros_like(inputs["scores"], dtype=torch.float64)
    credit.scatter_(1, inputs["topk_indices"], share * (1 - 0.5) / 2e-20)
    credit[0] = 0
    scores = inputs["scores"].double()
    expected = (credit * scores * (1 - scores)).T @ inputs["hidden_states"].double()
    assert_near(grad_router, expected)
