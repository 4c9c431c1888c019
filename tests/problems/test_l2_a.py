"""Decoder layers and attention blocks among L2/001 to L2/041 against independent formulas.

Formulas are in float64. References of bfloat16 problems run on float32 copies of their inputs, so
that roundings drop out, unless a rounding is the point.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.problems.formulas import (
    assert_close,
    cast,
    dense_experts,
    in_float32,
    merge_heads,
    rounded,
    split_heads,
    swiglu,
)

BF16 = torch.bfloat16


def rms_norm(x, weight, eps):
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rope(x, cos, sin):
    """Half-split rotary embedding by a signed permutation matrix; cos, sin [batch, seq, dim]."""
    dim = x.shape[-1]
    turn = torch.zeros(dim, dim, dtype=x.dtype)
    for j in range(dim // 2):
        turn[j + dim // 2, j], turn[j, j + dim // 2] = -1, 1
    return x * cos.unsqueeze(1) + x @ turn * sin.unsqueeze(1)


def angles(position, dim, theta=10000.0):
    """cos and sin of [batch, seq] positions, the list of frequencies repeated: float64."""
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = position.unsqueeze(-1) * frequency.repeat(2)
    return angle.cos(), angle.sin()


def attention(q, k, v, scale=None, mask=None, **options):
    return merge_heads(
        F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=True, **options
        )
    )


def capped_attention(q, k, v, scale, cap, mask):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = cap * torch.tanh(q @ k.mT * scale / cap) + mask
    return merge_heads(torch.softmax(scores, dim=-1) @ v)


# ---- Decoder layers --------------------------------------------------------------------------


def sections(table):
    """Columns from the planes of time, height and width."""
    column = torch.arange(table.shape[-1])
    plane = (column >= 32).int() + (column >= 80).int()
    return table.movedim(0, -1).gather(-1, plane.long().expand(table.shape[1:])[..., None])[..., 0]


def test_llama_layer_float32(reference):
    run = reference("L2/002")
    for workload in run.workloads:
        i = cast(run.draw(workload), torch.float64)
        i["input_layernorm_weight"] += torch.randn_like(i["input_layernorm_weight"])
        i["attention_mask"][:, :, 20:, 3] = -torch.inf  # a key that no later query may see
        eps, head_dim = i["rms_norm_eps"], i["cos"].shape[-1]
        x = i["hidden_states"]
        y = rms_norm(x, i["input_layernorm_weight"], eps)
        q, k, v = (split_heads(y @ i[f"{n}_proj_weight"].T, head_dim) for n in "qkv")
        q, k = rope(q, i["cos"], i["sin"]), rope(k, i["cos"], i["sin"])
        x = x + attention(q, k, v, mask=i["attention_mask"]) @ i["o_proj_weight"].T
        z = rms_norm(x, i["post_attention_layernorm_weight"], eps)
        mlp = swiglu(z, *(i[f"{n}_proj_weight"] for n in ("gate", "up", "down")))
        assert_close(run.call(i)[0], x + mlp, 1e-9)


def test_reka_layer(reference):
    run = reference("L2/020")
    for workload in run.workloads:
        inputs, i = in_float32(run, workload)
        head_dim, eps = 2 * i["cos"].shape[-1], i["rms_norm_eps"]
        x = i["hidden_states"]
        y = rms_norm(x, i["input_layernorm_weight"], eps)
        q, k, v = (split_heads(y @ i[f"{n}_proj_weight"].T, head_dim) for n in "qkv")
        cos, sin = (i[name].repeat(1, 1, 2) for name in ("cos", "sin"))
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        x = x + attention(q, k, v, mask=i["attention_mask"]) @ i["o_proj_weight"].T
        z = rms_norm(x, i["post_attention_layernorm_weight"], eps)
        mlp = swiglu(z, *(i[f"{n}_proj_weight"] for n in ("gate", "up", "down")))
        assert_close(run.call(inputs)[0], x + mlp)


def test_qwen_vl_layer_takes_sections_and_first_rows_of_its_tables(reference):
    run = reference("L2/019")
    for workload in run.workloads:
        i = cast(run.draw(workload), torch.float64)
        eps, seq_len = i["rms_norm_eps"], i["hidden_states"].shape[1]
        cos, sin = (sections(i[f"rope_{name}"])[:, :seq_len] for name in ("cos", "sin"))
        x = i["hidden_states"]
        y = rms_norm(x, i["input_layernorm_weight"], eps)
        q, k, v = (
            split_heads(F.linear(y, i[f"{n}_proj_weight"], i[f"{n}_proj_bias"]), 128) for n in "qkv"
        )
        context = attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True)
        x = x + context @ i["o_proj_weight"].T
        z = rms_norm(x, i["post_attention_layernorm_weight"], eps)
        mlp = swiglu(z, *(i[f"{n}_proj_weight"] for n in ("gate", "up", "down")))
        assert_close(run.call(i)[0], x + mlp, 1e-9)


def test_qwen3_moe_layer(reference):
    run = reference("L2/009")
    for workload in run.workloads:
        i = cast(run.draw(workload), torch.float64)
        head_dim, eps = i["cos"].shape[-1], i["rms_norm_eps"]
        x = i["hidden_states"]
        y = rms_norm(x, i["input_layernorm_weight"], eps)
        q, k, v = (
            split_heads(F.linear(y, i[f"{n}_proj_weight"], i[f"{n}_proj_bias"]), head_dim)
            for n in "qkv"
        )
        q = rope(rms_norm(q, i["q_norm_weight"], eps), i["cos"], i["sin"])
        k = rope(rms_norm(k, i["k_norm_weight"], eps), i["cos"], i["sin"])
        context = attention(q, k, v, mask=i["attention_mask"])
        x = x + F.linear(context, i["o_proj_weight"], i["o_proj_bias"])
        z = rms_norm(x, i["post_attention_layernorm_weight"], eps).flatten(0, 1)
        logits, experts = (z @ i["router_weight"].T).topk(8)
        matrices = (i[f"expert_{n}_weights"] for n in ("gate", "up", "down"))
        moe = dense_experts(z, *matrices, experts, torch.softmax(logits, dim=-1))
        assert_close(run.call(i)[0], x + moe.view_as(x), 1e-9)


# ---- Attention blocks ------------------------------------------------------------------------


def test_qwen_vl_attention_takes_sections_of_its_tables(reference):
    run = reference("L2/007")
    for workload in run.workloads:
        inputs, i = in_float32(run, workload)
        cos, sin = sections(i["cos"]), sections(i["sin"])
        q, k, v = (
            split_heads(F.linear(i["hidden_states"], i[f"{n}_weight"], i[f"{n}_bias"]), 128)
            for n in "qkv"
        )
        context = attention(rope(q, cos, sin), rope(k, cos, sin), v, mask=i["attention_mask"])
        assert_close(run.call(inputs)[0], context @ i["o_weight"].T)


def test_packed_vision_attention_with_tables_for_every_head(reference):
    run = reference("L2/018")
    for workload in run.workloads:
        inputs, i = in_float32(run, workload)
        i["qkv_bias"] += torch.randn_like(i["qkv_bias"])
        inputs["qkv_bias"] = i["qkv_bias"].float()
        i["qkv_bias"] = inputs["qkv_bias"].double()
        ends = i["cu_seqlens"]
        total, heads, head_dim = i["cos"].shape
        q, k, v = (
            F.linear(i["hidden_states"], i["qkv_weight"], i["qkv_bias"])
            .view(total, 3, heads, head_dim)
            .permute(1, 2, 0, 3)
        )
        # The batch of `rope` is the heads here.
        cos, sin = i["cos"].transpose(0, 1), i["sin"].transpose(0, 1)
        q, k = (rope(t.unsqueeze(1), cos, sin).transpose(0, 1) for t in (q, k))
        sequence = torch.searchsorted(ends, torch.arange(total), right=True)
        mask = sequence.unsqueeze(1) == sequence
        context = attention(q, k, v.unsqueeze(0), mask=mask)[0]
        expected = F.linear(context, i["proj_weight"], i["proj_bias"])
        assert_close(run.call(inputs)[0], expected)


def test_packed_vision_attention_skips_empty_sequences(reference):
    run = reference("L2/018")
    inputs = run.draw(run.workloads[0])
    total = len(inputs["hidden_states"])
    plain = run.call(inputs | {"cu_seqlens": torch.tensor([40, total])})
    gaps = run.call(inputs | {"cu_seqlens": torch.tensor([0, 40, 40, total, total])})
    assert torch.equal(plain[0], gaps[0])
    nothing = run.call(inputs | {"cu_seqlens": torch.tensor([0, 0])})
    assert not nothing[0].any()


def test_yarn_attention_normalises_all_heads_together(reference):
    run = reference("L2/027")
    for workload in run.workloads:
        inputs, i = in_float32(run, workload)
        gap = torch.randint(1, 50, i["position_ids"].shape).cumsum(-1)
        inputs["position_ids"] = i["position_ids"] = gap
        angle = gap.unsqueeze(-1) * i["inv_freq"].repeat(2)
        cos, sin = angle.cos() * i["attention_factor"], angle.sin() * i["attention_factor"]
        x, eps, head_dim = i["hidden_states"], i["rms_norm_eps"], angle.shape[-1]
        q = rms_norm(x @ i["q_proj_weight"].T, i["q_norm_weight"], eps)
        k = rms_norm(x @ i["k_proj_weight"].T, i["k_norm_weight"], eps)
        q, k, v = (split_heads(t, head_dim) for t in (q, k, x @ i["v_proj_weight"].T))
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        context = attention(q, k, v, i["scaling"], mask=i["attention_mask"])
        assert_close(run.call(inputs)[0], context @ i["o_proj_weight"].T, 1e-4)


def test_yarn_generator_makes_a_window_and_blended_frequencies(reference):
    run = reference("L2/027")
    axes = run.problem.definition.bind({"batch_size": 1, "seq_len": 4100})
    inputs = run.module.generate_inputs(axes | {"head_dim": 128}, torch.device("cpu"))
    mask = inputs["attention_mask"][0, 0]
    assert mask[4099, 3] == -torch.inf and mask[4099, 4] == 0 == mask[4099, 4099]
    assert mask[10, 11] == -torch.inf and mask[10, 0] == 0
    base = 500000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
    ratio = (inputs["inv_freq"] / base).double()
    assert_close(ratio[[0, -1]], torch.tensor([1 / 8, 1.0]), 1e-5)
    assert (ratio.diff() >= -1e-6).all()
    assert inputs["attention_factor"] == pytest.approx(1.2079441541679836)


def test_axial_rope_attention_with_and_without_text(reference):
    run = reference("L2/032")
    for workload in run.workloads:
        i = cast(run.draw(workload), torch.float64)
        for name, value in i.items():
            if name.endswith("_bias"):
                value.normal_()
        width = i["hidden_states"].shape[-1]
        modulation = F.linear(
            F.silu(i["timestep_embedding"]), i["adaln_linear_weight"], i["adaln_linear_bias"]
        )
        scale, shift, gate = modulation.unsqueeze(1).split(width, dim=-1)[:3]
        n = F.layer_norm(i["hidden_states"], (width,)) * (1 + scale) + shift

        def layer(x, name, i=i):
            return split_heads(F.linear(x, i[f"{name}_weight"], i[f"{name}_bias"]), 128)

        # Pairs (j, j + 21) of each block of 42 columns turn as complex numbers.
        turns = []
        for axis in range(3):
            at = i[f"pos_idx_axis{axis}"]
            cos, sin = i[f"rope_cos_axis{axis}"][at], i[f"rope_sin_axis{axis}"][at]
            turns.append(torch.complex(cos, sin)[:, :21])

        def turned(x, turns=turns):
            blocks = []
            for axis, turn in enumerate(turns):
                low, high = x[..., 42 * axis : 42 * (axis + 1)].chunk(2, dim=-1)
                z = torch.complex(low, high) * turn
                blocks += [z.real, z.imag]
            return torch.cat((*blocks, x[..., 126:]), dim=-1)

        q, k, v = turned(layer(n, "to_q")), turned(layer(n, "to_k")), layer(n, "to_v")
        if workload.axes["is_joint_block"]:
            text = F.layer_norm(i["encoder_hidden_states"], i["encoder_hidden_states"].shape[-1:])
            k = torch.cat((k, layer(text, "to_k_context")), dim=2)
            v = torch.cat((v, layer(text, "to_v_context")), dim=2)
        out = F.linear(attention(q, k, v), i["to_out_weight"], i["to_out_bias"])
        assert_close(run.call(i)[0], i["hidden_states"] + gate * out, 1e-9)


def test_vision_keys_turn_in_three_parts(reference):
    run = reference("L2/034")
    workload = run.workloads[0]
    inputs, i = in_float32(run, workload)
    inputs["vision_grid_thw"] = torch.randint(0, 60, inputs["vision_grid_thw"].shape)
    q, k, v = (
        split_heads(
            F.linear(i[f"{source}_hidden_states"], i[f"{n}_proj_weight"], i[f"{n}_proj_bias"]), 128
        )
        for n, source in (("q", "language"), ("k", "vision"), ("v", "vision"))
    )
    q = rope(q, *angles(i["language_position_ids"], 128))
    parts = [
        rope(k[..., begin:end], *angles(inputs["vision_grid_thw"][..., axis], end - begin))
        for axis, (begin, end) in enumerate([(0, 42), (42, 84), (84, 128)])
    ]
    context = attention(q, torch.cat(parts, dim=-1), v)
    assert_close(run.call(inputs)[0], context @ i["o_proj_weight"].T)


def test_multi_query_attention_returns_its_keys_and_values(reference):
    run = reference("L2/039")
    for workload in run.workloads[:2]:
        inputs, i = in_float32(run, workload)
        inputs["softcap"] = i["softcap"] = 2.0
        head_dim, eps = len(i["q_norm_weight"]), i["rms_norm_eps"]
        cos, sin = angles(i["position_ids"], head_dim, i["rope_theta"])
        q, k, v = (
            split_heads(i["hidden_states"] @ i[f"{n}_proj_weight"].T, head_dim) for n in "qkv"
        )
        q = rope(rms_norm(q, i["q_norm_weight"], eps), cos, sin)
        k = rope(rms_norm(k, i["k_norm_weight"], eps), cos, sin)
        v = rms_norm(v, None, eps)
        context = capped_attention(q, k, v, head_dim**-0.5, 2.0, i["attention_mask"])
        output, keys, values = run.call(inputs)
        assert_close(output, context @ i["o_proj_weight"].T)
        assert_close(keys, k)
        assert_close(values, v)


def test_multi_query_attention_rounds_keys_and_values_as_declared(reference, assert_same_rounding):
    run = reference("L2/039")
    inputs = run.draw(run.workloads[0])
    i = cast(inputs, torch.float64)
    head_dim, eps = len(i["q_norm_weight"]), i["rms_norm_eps"]
    k, v = (
        split_heads(rounded(i["hidden_states"] @ i[f"{n}_proj_weight"].T), head_dim) for n in "kv"
    )
    cos, sin = (rounded(t) for t in angles(i["position_ids"], head_dim, i["rope_theta"]))
    k = rounded(rms_norm(k, i["k_norm_weight"], eps))
    zero = torch.zeros_like(cos)
    k = rounded(rounded(rope(k, cos, zero)) + rounded(rope(k, zero, sin)))
    _, keys, values = run.call(inputs)
    assert_same_rounding(keys, k.to(BF16))
    assert_same_rounding(values, rms_norm(v, None, eps).to(BF16))


@pytest.mark.parametrize("shared", [False, True])
def test_unscaled_capped_attention(reference, shared):
    run = reference("L2/041")
    for workload in run.workloads[:2]:
        inputs, i = in_float32(run, workload)
        inputs["use_shared_kv"] = shared
        head_dim, eps = len(i["q_norm_weight"]), i["rms_norm_eps"]
        cos, sin = angles(i["position_ids"], head_dim, i["rope_theta"])
        q, k, v = (
            split_heads(i["hidden_states"] @ i[f"{n}_proj_weight"].T, head_dim) for n in "qkv"
        )
        q = rope(rms_norm(q, i["q_norm_weight"], eps), cos, sin)
        k = rope(rms_norm(k, i["k_norm_weight"], eps), cos, sin)
        v = rms_norm(v, None, eps)
        if shared:
            k, v = i["shared_key_states"], i["shared_value_states"]
        context = capped_attention(q, k, v, 1.0, i["softcap"], i["attention_mask"])
        assert_close(run.call(inputs)[0], context @ i["o_proj_weight"].T, 1e-4)


def local_attention(i):
    """Query by query, with every rule written out."""
    x, cap, dim = i["hidden_states"], i["attention_logits_soft_cap"], len(i["per_dim_scale"])
    q, k, v = ((x @ i[f"{n}_proj_weight"].T).unflatten(-1, (-1, dim)) for n in ("q", "k", "v"))
    q = q * dim**-0.5 / math.log(2) * torch.log1p(torch.exp(i["per_dim_scale"]))
    angle = torch.arange(128).unsqueeze(1) * i["inv_timescales"]
    signal = torch.cat((angle.sin(), angle.cos()), dim=-1)
    table = (signal @ i["pos_proj_weight"].T).unflatten(-1, (-1, dim))
    output = torch.zeros_like(v)
    batch, seq_len, heads = v.shape[:3]
    for b in range(batch):
        for t in range(seq_len):
            times = torch.arange(max(0, t - 127), t + 1)
            times = times[~i["mask"][b, times]]
            if len(times) == 0:
                first = t // 32 * 32 - 127
                block = torch.arange(max(0, first), min(seq_len, first + 160))
                output[b, t] = v[b, block].sum(0) / 160
                continue
            for h in range(heads):
                logits = (k[b, times, h] + table[t - times, h]) @ q[b, t, h]
                weights = torch.softmax(cap * torch.tanh(logits / cap), dim=0)
                output[b, t, h] = weights @ v[b, times, h]
    return output


@pytest.mark.parametrize("seq_len", [70, 200])
def test_local_attention_query_by_query(reference, seq_len):
    run = reference("L2/038")
    axes = run.problem.definition.bind({"batch_size": 1, "seq_len": seq_len})
    inputs = run.module.generate_inputs(axes, torch.device("cpu"))
    i = cast({name: inputs[name] for name in run.problem.definition.inputs}, torch.float64)
    i |= {"attention_logits_soft_cap": 0.5, "per_dim_scale": torch.randn(32).double()}
    i["mask"][0, :3] = True  # the first queries have no usable key
    i["mask"][0, 50:] = seq_len == 200  # nor have those from 177 on in the longer row
    assert_close(run.call(i)[0], local_attention(i), 1e-9)


def test_video_block_attends_over_frames_then_places_then_text(reference):
    run = reference("L2/022")
    for workload in run.workloads:
        i = cast(run.draw(workload), torch.float64)
        for name, value in i.items():
            if name.endswith("_norm_bias"):
                value.normal_()
        frames, places = workload.axes["num_frames"], workload.axes["num_spatial_tokens"]
        x = i["video_latents"]

        def norm(x, name, i=i):
            weight, bias = i[f"{name}_norm_weight"], i[f"{name}_norm_bias"]
            return F.layer_norm(x, x.shape[-1:], weight, bias)

        def linear(x, name, i=i):
            return F.linear(x, i[f"{name}_weight"], i[f"{name}_bias"])

        row = torch.arange(frames * places)
        for name, group in (("temporal", row % places), ("spatial", row // places)):
            qkv = linear(norm(x, name), f"{name}_qkv").chunk(3, dim=-1)
            q, k, v = (split_heads(t, 64) for t in qkv)
            together = group.unsqueeze(1) == group
            x = x + linear(attention(q, k, v, mask=together), f"{name}_out_proj")
        q = split_heads(linear(norm(x, "cross_attn"), "cross_attn_q"), 64)
        kv = linear(i["text_embeddings"], "cross_attn_kv").chunk(2, dim=-1)
        context = attention(q, *(split_heads(t, 64) for t in kv))
        x = x + linear(context, "cross_attn_out_proj")
        hidden = linear(norm(x, "ffn"), "ffn_fc1")
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
        assert_close(run.call(i)[0], x + linear(hidden, "ffn_fc2"), 1e-9)
