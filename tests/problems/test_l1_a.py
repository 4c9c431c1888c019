"""Forward references among L1/001 to L1/047 against independent formulas, mostly in float64.

Where the published draws hide an input (norm weights of ones, biases of zeros, square grids), the
tests draw it anew.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.problems.formulas import assert_close, doubles, rms_normalized, rotated, rounded

BF16 = torch.bfloat16


def redrawn(inputs, *names, center=0.0):
    """The inputs with the named ones replaced by normal draws around `center`."""
    drawn = {n: (center + 0.5 * torch.randn(inputs[n].shape)).to(inputs[n].dtype) for n in names}
    return inputs | drawn


def convolved(x, weight, bias, stride=1):
    """3x3 convolution with one ring of zeros, as a sum over its nine taps."""
    height, width = ((n - 1) // stride + 1 for n in x.shape[2:])
    padded = torch.zeros(*x.shape[:2], x.shape[2] + 2, x.shape[3] + 2, dtype=x.dtype)
    padded[:, :, 1:-1, 1:-1] = x
    total = 0 if bias is None else bias[:, None, None]
    for u in range(3):
        for v in range(3):
            rows = slice(u, u + stride * (height - 1) + 1, stride)
            columns = slice(v, v + stride * (width - 1) + 1, stride)
            taps = padded[:, :, rows, columns]
            total = total + torch.einsum("bchw,oc->bohw", taps, weight[:, :, u, v])
    return total


def causally_filtered(x, weight, bias):
    """Depthwise causal filter of [batch, channels, time], tap by tap."""
    total = bias[:, None]
    order = weight.shape[-1]
    for tap in range(order):
        delayed = torch.zeros_like(x)
        delay = order - 1 - tap
        delayed[:, :, delay:] = x[:, :, : x.shape[2] - delay]
        total = total + weight[:, 0, tap, None] * delayed
    return total


# ---- Convolutions and projections ---------------------------------------------------------------


def test_vae_block_is_two_convolutions_normalised_by_groups(reference):
    run = reference("L1/002")
    norms = ("norm1_weight", "norm1_bias", "norm2_weight", "norm2_bias")
    for workload in run.workloads:
        inputs = redrawn(run.draw(workload), *norms, center=1.0)
        x = doubles(inputs)
        y = x["x"]
        for stage in "12":
            y = convolved(y, x[f"conv{stage}_weight"], None)
            groups = y.reshape(len(y), 32, -1)
            centered = groups - groups.mean(dim=2, keepdim=True)
            groups = centered / (centered.square().mean(dim=2, keepdim=True) + x["eps"]).sqrt()
            y = groups.view_as(y) * x[f"norm{stage}_weight"][:, None, None]
            y = y + x[f"norm{stage}_bias"][:, None, None]
            y = y * y.sigmoid()
        assert_close(run.call(inputs)[0], y + x["x"])


def test_two_convolutions_pad_the_hidden_image_with_zeros(reference):
    run = reference("L1/040")
    for workload in run.workloads:
        inputs = run.draw(workload)
        x, weight_in, bias_in, weight_out, bias_out = doubles(inputs).values()
        expected = convolved(convolved(x, weight_in, bias_in), weight_out, bias_out) + x
        assert_close(run.call(inputs)[0], expected)


def test_strided_convolution_is_centred_on_every_other_pixel(reference):
    run = reference("L1/041")
    for workload in run.workloads:
        inputs = run.draw(workload)
        assert_close(run.call(inputs)[0], convolved(*doubles(inputs).values(), stride=2))


@pytest.mark.parametrize("number", ["003", "010", "030", "031", "032"])
def test_plain_products_round_where_they_should(reference, assert_same_rounding, number):
    run = reference(f"L1/{number}")
    for workload in run.workloads:
        inputs = run.draw(workload)
        x = list(doubles(inputs).values())
        if number == "003":
            expected = torch.einsum("bse,ve->bsv", *x)
        elif number == "010":
            expected = torch.einsum("bse,kde->bksd", x[0], x[1].unflatten(0, (-1, 128)))
        elif number == "030":
            expected = rounded(torch.einsum("bsi,oi->bso", x[0], x[2])) + x[1]
        elif number == "031":
            expected = torch.einsum("bhid,bhjd->bhij", *x) / math.sqrt(x[0].shape[-1])
        else:
            expected = torch.einsum("bhij,bhjd->bihd", *x).flatten(2)
        assert_same_rounding(run.call(inputs)[0], expected.to(BF16))


def test_gated_short_convolution_rounds_between_its_steps(reference, assert_same_rounding):
    run = reference("L1/005")
    for workload in run.workloads[:2]:
        inputs = run.draw(workload)
        x = doubles(inputs)
        streams = rounded(x["x"] @ x["in_proj_weight"].T + x["in_proj_bias"])
        gate_in, gate_out, value = streams.split(x["x"].shape[-1], dim=-1)
        gated = rounded(gate_in * value).transpose(1, 2)
        filtered = rounded(causally_filtered(gated, x["conv_weight"], x["conv_bias"]))
        y = rounded(gate_out * filtered.transpose(1, 2))
        expected = y @ x["out_proj_weight"].T + x["out_proj_bias"]
        assert_same_rounding(run.call(inputs)[0], expected.to(BF16))


def test_hyena_short_filter_is_causal(reference):
    run = reference("L1/006")
    for workload in run.workloads:
        inputs = run.draw(workload)
        x0, x1, v = causally_filtered(*doubles(inputs).values()).chunk(3, dim=1)
        for actual, expected in zip(run.call(inputs), (v * x0, x0, x1), strict=True):
            assert_close(actual, expected, 1e-6)


def test_mamba_input_stage_masks_before_and_after_the_filter(reference, assert_same_rounding):
    run = reference("L1/029")
    for workload in run.workloads[:2]:
        inputs = run.draw(workload)
        x = doubles(inputs)
        mask = x["attention_mask"][:, None]
        assert 0.2 < mask.mean() < 0.8
        streams = rounded(x["hidden_states"] @ x["in_proj_weight"].T + x["in_proj_bias"])
        stream, gate = streams.transpose(1, 2).chunk(2, dim=1)
        filtered = causally_filtered(stream * mask, x["conv1d_weight"], x["conv1d_bias"])
        filtered = rounded(filtered)
        activated = rounded(filtered * rounded(filtered.sigmoid()))
        output, actual_gate = run.call(inputs)
        assert_same_rounding(output, (activated * mask).to(BF16))
        assert_same_rounding(actual_gate, gate.to(BF16))
        assert not output.transpose(1, 2)[inputs["attention_mask"] == 0].any()


def test_video_patches_are_a_strided_convolution_and_a_layer_norm(reference, assert_matches):
    run = reference("L1/026")
    for workload in run.workloads:
        inputs = redrawn(run.draw(workload), "norm_weight", "norm_bias", center=1.0)
        x = doubles(inputs)
        y = F.conv3d(
            x["video"].transpose(1, 2),
            x["patch_projection_weight"],
            x["patch_projection_bias"],
            stride=(1, 2, 2),
        )
        y = y.flatten(3).permute(0, 2, 3, 1)  # [batch, frame, patch, hidden]
        y = y + x["spatial_pos_embedding"][:, None] + x["temporal_pos_embedding"]
        y = F.layer_norm(y.flatten(1, 2), y.shape[-1:], x["norm_weight"], x["norm_bias"], x["eps"])
        assert_matches(run.call(inputs)[0], y, workload.tolerance)


def test_modulation_vectors_are_consecutive_blocks_of_the_product(reference):
    run = reference("L1/035")
    inputs = run.draw(run.workloads[1])
    emb, weight, bias = doubles(inputs).values()
    outputs = run.call(inputs)
    assert_close(torch.cat(outputs, dim=1), emb @ weight.T + bias)
    assert len(outputs) == 6


def test_output_norm_shifts_by_the_first_half_and_scales_by_the_second(reference):
    run = reference("L1/036")
    for workload in run.workloads:
        inputs = run.draw(workload)
        x = doubles(inputs)
        silu = x["temb"] * x["temb"].sigmoid()
        shift, scale = (silu @ x["linear_weight"].T + x["linear_bias"]).chunk(2, dim=1)
        mean = x["hidden_states"].mean(dim=-1, keepdim=True)
        variance = x["hidden_states"].var(dim=-1, correction=0, keepdim=True)
        # The norm folded into the projection, as a kernel would.
        folded = x["proj_out_weight"] * (1 + scale)[:, None]
        product = torch.einsum("bse,boe->bso", x["hidden_states"], folded)
        product = (product - mean * folded.sum(dim=2)[:, None]) / (variance + x["eps"]).sqrt()
        constant = shift @ x["proj_out_weight"].T + x["proj_out_bias"]
        assert_close(run.call(inputs)[0], product + constant[:, None])


def test_feed_forward_uses_the_tanh_gelu(reference):
    run = reference("L1/037")
    inputs = run.draw(run.workloads[0])
    x, weight_1, bias_1, weight_2, bias_2 = doubles(inputs).values()
    h = x @ weight_1.T + bias_1
    h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    assert_close(run.call(inputs)[0], h @ weight_2.T + bias_2)


def test_gelu_is_a_sigmoid_of_twice_the_inner_term(reference):
    run = reference("L1/025")
    for workload in run.workloads:
        inputs = run.draw(workload)
        x = inputs["x"].double()
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        assert_close(run.call(inputs)[0], x * torch.sigmoid(2 * inner), 1e-6)


def test_latent_projections_split_heads_without_rotation(reference, assert_same_rounding):
    run = reference("L1/043")
    for workload in run.workloads[:2]:
        inputs = redrawn(run.draw(workload), "q_a_layernorm_weight", center=1.0)
        x = doubles(inputs)
        low_rank = rounded(x["hidden_states"] @ x["q_a_proj_weight"].T)
        low_rank = rounded(rms_normalized(low_rank, x["rms_norm_eps"]))
        low_rank = rounded(low_rank * x["q_a_layernorm_weight"])
        q_nope, q_pe, compressed_kv, k_pe = run.call(inputs)
        for head, weight in enumerate(x["q_b_proj_weight"].split(192)):
            q = (low_rank @ weight.T).to(BF16)
            assert_same_rounding(torch.cat((q_nope[:, :, head], q_pe[:, :, head]), dim=-1), q)
        kv = (x["hidden_states"] @ x["kv_a_proj_weight"].T).to(BF16)
        assert_same_rounding(torch.cat((compressed_kv, k_pe[:, :, 0]), dim=-1), kv)


def test_moe_adds_experts_in_ascending_order(reference, assert_same_rounding):
    run = reference("L1/044")
    inputs = run.draw(run.workloads[1])
    x = doubles(inputs)
    expected = []
    for token, ids, weights in zip(
        x["hidden_states"], x["expert_ids"], x["expert_weights"], strict=True
    ):
        total = torch.zeros_like(token)
        for slot in ids.argsort():
            expert = ids[slot]
            gate = rounded(x["gate_proj_weights"][expert] @ token)
            gate = rounded(gate * gate.sigmoid())
            product = rounded(gate * rounded(x["up_proj_weights"][expert] @ token))
            y = rounded(x["down_proj_weights"][expert] @ product)
            total = rounded(total + rounded(y * weights[slot]))
        expected.append(total)
    assert_same_rounding(run.call(inputs)[0], torch.stack(expected).to(BF16))


def test_moe_routing_names_distinct_experts_with_weights_that_add_up_to_one(reference):
    run = reference("L1/044")
    inputs = run.draw(run.workloads[2])
    ordered = inputs["expert_ids"].sort(dim=1).values
    assert (ordered.diff(dim=1) > 0).all()
    assert ordered.unique().numel() == len(inputs["gate_proj_weights"])
    assert not torch.equal(ordered, inputs["expert_ids"])
    sums = inputs["expert_weights"].double().sum(dim=1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=0.02)


# ---- Norms ---------------------------------------------------------------------------------------


def test_post_norm_rounds_the_norm_and_the_sum(reference, assert_same_rounding):
    run = reference("L1/033")
    for workload in run.workloads:
        inputs = run.draw(workload)
        x, residual, weight, eps = doubles(inputs).values()
        expected = residual + rounded(weight * rms_normalized(x, eps))
        assert_same_rounding(run.call(inputs)[0], expected.to(BF16))


def test_head_norms_have_a_weight_for_every_head(reference):
    run = reference("L1/038")
    for workload in run.workloads:
        inputs = run.draw(workload)
        query, key, weight_q, weight_k, eps = doubles(inputs).values()
        for actual, x, weight in zip(
            run.call(inputs), (query, key), (weight_q, weight_k), strict=True
        ):
            heads = [rms_normalized(x[:, :, h], eps) * weight[h] for h in range(len(weight))]
            assert_close(actual, torch.stack(heads, dim=2))


def test_convnext_mlp_folds_its_response_norm_into_the_second_weight(reference):
    run = reference("L1/045")
    for workload in run.workloads:
        inputs = redrawn(run.draw(workload), "grn_weight", center=1.0)
        x = doubles(inputs)
        a = x["hidden_states"].flatten(1, 2) @ x["pwconv1_weight"].T + x["pwconv1_bias"]
        a = 0.5 * a * (1 + torch.erf(a / math.sqrt(2)))
        norm = torch.linalg.vector_norm(a, dim=1)
        factor = norm / (norm.mean(dim=1, keepdim=True) + x["eps"])
        folded = x["pwconv2_weight"] * (1 + x["grn_weight"].flatten() * factor)[:, None]
        constant = x["pwconv2_weight"] @ x["grn_bias"].flatten() + x["pwconv2_bias"]
        expected = torch.einsum("bpf,bof->bpo", a, folded) + constant
        assert_close(run.call(inputs)[0].flatten(1, 2), expected)


def test_soft_cap_bounds_large_logits(reference, assert_same_rounding):
    run = reference("L1/046")
    for scale in (1.0, 40.0):
        logits = (scale * torch.randn(2, 3, 5, 67)).to(BF16)
        t = rounded(rounded(rounded(logits.double() / 30).tanh()) * 30)
        (output,) = run.call({"attn_weights": logits})
        assert_same_rounding(output, t.softmax(dim=-1).to(BF16))
    assert t.abs().max() == 30


# ---- Rotary tables, caches and masks -------------------------------------------------------------


def test_interleaved_rotary_table_is_cosine_and_sine_of_position_times_frequency(reference):
    run = reference("L1/011")
    inputs = run.draw(run.workloads[1])
    inputs["position_ids"] = torch.randint(0, 2048, inputs["position_ids"].shape)
    inputs["attention_scaling"] = 0.75
    (table,) = run.call(inputs)
    angles = (inputs["position_ids"][..., None].float() * inputs["inv_freq"]).double()
    for half in table.double().chunk(2, dim=2):
        torch.testing.assert_close(half[..., 0], 0.75 * angles.cos(), rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(half[..., 1], 0.75 * angles.sin(), rtol=2**-8, atol=1e-6)


def test_stretched_frequencies_divide_the_high_ones_by_eight(reference):
    run = reference("L1/011")
    inv_freq = run.draw(run.workloads[0])["inv_freq"].double()
    ladder = 500000.0 ** (-torch.arange(64).double() / 64)
    stretch = ladder / inv_freq
    torch.testing.assert_close(stretch[:20], torch.full((20,), 8.0).double())
    torch.testing.assert_close(stretch[-20:], torch.ones(20).double())
    assert (stretch.diff() < 1e-4).all()


def test_rotary_table_repeats_its_half(reference):
    run = reference("L1/012")
    inputs = run.draw(run.workloads[1]) | {"attention_scaling": 1.5}
    angles = inputs["freqs"].double()
    for actual, expected in zip(run.call(inputs), (angles.cos(), angles.sin()), strict=True):
        first, second = actual.chunk(2, dim=-1)
        assert torch.equal(first, second)
        torch.testing.assert_close(first.double(), 1.5 * expected, rtol=2**-8, atol=1e-6)


def test_inverse_frequencies_are_a_geometric_ladder(reference):
    run = reference("L1/016")
    for workload in run.workloads:
        theta = run.draw(workload)["rope_theta"]
        expected = torch.tensor([theta ** (-i / 64) for i in range(64)], dtype=torch.float64)
        (inv_freq,) = run.call({"rope_theta": theta})
        torch.testing.assert_close(inv_freq.double(), expected, rtol=1e-6, atol=0)


def test_three_axis_table_gives_each_axis_its_own_ladder(reference):
    run = reference("L1/034")
    inputs = run.draw(run.workloads[1]) | {"theta": 500.0}
    angles = []
    for axis, dim in enumerate((16, 56, 56)):
        for i in range(dim // 2):
            angles += 2 * [inputs["ids"][:, axis].double() * 500.0 ** (-2 * i / dim)]
    angles = torch.stack(angles, dim=1)
    cos, sin = run.call(inputs)
    assert_close(cos, angles.cos(), 1e-6)
    assert_close(sin, angles.sin(), 1e-6)


def test_cache_update_writes_the_named_slots_alone(reference, assert_same_rounding):
    run = reference("L1/018")
    for workload in run.workloads:
        inputs = redrawn(run.draw(workload), "q_norm_weight", "k_norm_weight", center=1.0)
        inputs["position_ids"] = torch.randint(0, 6000, inputs["position_ids"].shape)
        slots = torch.randperm(inputs["key_cache"].shape[2])[: len(inputs["cache_position"])]
        query, key, key_cache, value_cache = run.call(inputs | {"cache_position": slots})

        x = doubles(inputs)
        angles = (inputs["position_ids"][:, None, :, None].float() * inputs["inv_freq"]).double()
        for actual, name in ((query, "query"), (key, "key")):
            normalized = rms_normalized(x[name], x["rms_norm_eps"])
            normalized = rounded(x[f"{name[0]}_norm_weight"] * normalized)
            first, second = normalized.chunk(2, dim=-1)
            cos, sin = rounded(angles.cos()), rounded(angles.sin())
            first, second = (
                rounded(first * cos) - rounded(second * sin),
                rounded(second * cos) + rounded(first * sin),
            )
            assert_same_rounding(actual, torch.cat((first, second), dim=-1).to(BF16))

        others = torch.ones(key_cache.shape[2], dtype=torch.bool)
        others[slots] = False
        assert torch.equal(key_cache[:, :, slots], key)
        assert torch.equal(value_cache[:, :, slots], inputs["value"])
        assert torch.equal(key_cache[:, :, others], inputs["key_cache"][:, :, others])
        assert torch.equal(value_cache[:, :, others], inputs["value_cache"][:, :, others])


def test_causal_mask_hides_later_keys_and_the_window_mask_nothing(reference):
    run = reference("L1/028")
    for workload in run.workloads:
        inputs = run.draw(workload)
        _, seq_length, past = inputs.values()
        full, window = run.call(inputs)
        for i in range(seq_length):
            assert not full[:, :, i, : past + i + 1].any()
            assert full[:, :, i, past + i + 1 :].all()
        assert not window.any()


# ---- Vision: patch order -------------------------------------------------------------------------


def patches_by_block(grids):
    """(grid, frame, row, column) of the patches, 2x2 block by 2x2 block."""
    for index, (frames, height, width) in enumerate(grids):
        for frame in range(frames):
            for block_row in range(0, height, 2):
                for block_column in range(0, width, 2):
                    for place in range(4):
                        yield index, frame, block_row + place // 2, block_column + place % 2


def test_patch_merger_joins_two_by_two_blocks_of_any_grids(reference, assert_same_rounding):
    run = reference("L1/020")
    grids = [(1, 4, 10), (3, 6, 2), (2, 2, 12), (1, 8, 8), (1, 2, 6)]  # 200 patches in all
    inputs = redrawn(run.draw(run.workloads[0]), "ln_weight", "ln_bias", center=1.0)
    inputs["hidden"] = (2 + torch.randn(200, inputs["hidden"].shape[1])).to(BF16)
    inputs["grid_thw"] = torch.tensor(grids)
    starts = [sum(t * h * w for t, h, w in grids[:i]) for i in range(len(grids))]
    order = [
        starts[index] + (frame * grids[index][1] + row) * grids[index][2] + column
        for index, frame, row, column in patches_by_block(grids)
    ]
    x = doubles(inputs)
    y = F.layer_norm(x["hidden"], x["hidden"].shape[1:], x["ln_weight"], x["ln_bias"], x["eps"])
    y = rounded(y)[order].view(50, -1)
    y = rounded(y @ x["fc1_weight"].T + x["fc1_bias"])
    y = rounded(0.5 * y * (1 + torch.erf(y / math.sqrt(2))))
    y = y @ x["fc2_weight"].T + x["fc2_bias"]
    assert_same_rounding(run.call(inputs)[0], y.to(BF16))


def test_position_embeddings_are_resampled_corner_on_corner(reference):
    run = reference("L1/023")
    for workload in run.workloads:
        inputs = run.draw(workload)
        grids = inputs["grid_thw"].tolist()
        side = math.isqrt(len(inputs["pos_embed_weight"]))
        table = inputs["pos_embed_weight"].double().T.view(1, -1, side, side)
        images = [
            F.interpolate(table, size=(h, w), mode="bilinear", align_corners=True)[0]
            for _, h, w in grids
        ]
        places = list(patches_by_block(grids))
        positions = torch.tensor([place[2:] for place in places])
        angles = (positions[:, :, None].float() * inputs["inv_freq"]).flatten(1).double()
        embeddings, cos, sin = run.call(inputs)
        expected = torch.stack([images[i][:, r, c] for i, _, r, c in places])
        torch.testing.assert_close(embeddings.double(), expected, rtol=1e-5, atol=2e-5)
        for half in (slice(0, angles.shape[1]), slice(angles.shape[1], None)):
            torch.testing.assert_close(cos[:, half].double(), angles.cos(), rtol=0, atol=1e-6)
            torch.testing.assert_close(sin[:, half].double(), angles.sin(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("num_images", "total_tokens", "grids"),
    [
        (4, 1024, [[4, 16, 4]] * 3 + [[1, 2, 128]]),
        (2, 2048, [[4, 34, 6], [1, 2, 616]]),
        (1, 1024, [[1, 2, 512]]),
        (10, 640, [[4, 4, 4]] * 9 + [[1, 2, 32]]),
    ],
)
def test_image_sizes_use_up_the_tokens(reference, num_images, total_tokens, grids):
    axes = {
        "num_images": num_images,
        "total_tokens": total_tokens,
        "head_dim": 128,
        "num_position_embeddings": 1,
        "hidden_size": 1,
    }
    inputs = reference("L1/023").module.generate_inputs(axes, torch.device("cpu"))
    assert inputs["grid_thw"].tolist() == grids
    assert math.isclose(inputs["inv_freq"][16].item(), 10000 ** (-1 / 4), rel_tol=1e-6)


# ---- Attention layers ----------------------------------------------------------------------------


def test_packed_attention_is_attention_under_a_block_diagonal_mask(reference):
    run = reference("L1/021")
    for workload in run.workloads:
        inputs = redrawn(run.draw(workload), "qkv_bias", "proj_bias")
        inputs["hidden_states"] = 5 * inputs["hidden_states"]
        x = doubles(inputs)
        total, head_dim = x["cos"].shape
        sequence = torch.searchsorted(inputs["cu_seqlens"], torch.arange(total), right=True)
        apart = sequence[:, None] != sequence
        hidden = x["hidden_states"] @ x["qkv_weight"].T + x["qkv_bias"]
        heads = []
        for q, k, v in zip(
            *(part.split(head_dim, dim=1) for part in hidden.chunk(3, 1)), strict=True
        ):
            q, k = rotated(q, x["cos"], x["sin"]), rotated(k, x["cos"], x["sin"])
            scores = (q @ k.T / math.sqrt(head_dim)).masked_fill(apart, -math.inf)
            heads.append(scores.softmax(dim=1) @ v)
        expected = torch.cat(heads, dim=1) @ x["proj_weight"].T + x["proj_bias"]
        assert_close(run.call(inputs)[0], expected)


def test_packed_attention_skips_empty_sequences(reference):
    run = reference("L1/021")
    inputs = run.draw(run.workloads[0])
    boundaries = inputs["cu_seqlens"].tolist()
    doubled = torch.tensor([0, *boundaries, boundaries[-1]])
    assert torch.equal(run.call(inputs)[0], run.call(inputs | {"cu_seqlens": doubled})[0])


def test_packed_sequences_cover_all_tokens(reference):
    generate = reference("L1/021").module.generate_inputs
    axes = {"total_seq_len": 9, "num_seqs": 9, "hidden_size": 4, "head_dim": 2}
    cuts = generate(axes, torch.device("cpu"))["cu_seqlens"]
    assert cuts[0] == 0 and cuts[-1] == 9 and len(cuts) == 9
    assert (cuts.diff() >= 0).all()


def test_clip_attention_rotates_adjacent_columns_by_frame_row_and_column(reference):
    run = reference("L1/027")
    for workload in run.workloads[1:]:
        inputs = redrawn(run.draw(workload), "qkv_bias", "out_bias", "spatial_freqs")
        inputs["hidden_states"] = 4 * inputs["hidden_states"]
        x = doubles(inputs)
        batch, frames, patches, hidden = x["hidden_states"].shape
        head_dim = 2 * len(x["spatial_freqs"])
        third, side = head_dim // 3, math.ceil(math.sqrt(patches))
        token = torch.arange(frames * patches)
        coordinates = (token // patches, token % patches // side, token % patches % side)
        freqs = (x["temporal_freqs"], x["spatial_freqs"], x["spatial_freqs"])
        turn = torch.ones(len(token), head_dim, dtype=torch.complex128)
        for part, (position, freq) in enumerate(zip(coordinates, freqs, strict=True)):
            for pair in range(third // 2):
                angle = position.double() * freq[pair]
                turn[:, part * third + 2 * pair] = torch.polar(torch.ones_like(angle), angle)

        def rotate(y, turn=turn, third=third):
            y = y.clone()
            for start in range(0, 3 * third, third):
                for even in range(start, start + third - 1, 2):
                    pair = torch.complex(y[..., even], y[..., even + 1]) * turn[:, even]
                    y[..., even], y[..., even + 1] = pair.real, pair.imag
            return y

        tokens = x["hidden_states"].view(batch, -1, hidden)
        qkv = tokens @ x["qkv_weight"].T + x["qkv_bias"]
        heads = []
        for q, k, v in zip(*(part.split(head_dim, dim=2) for part in qkv.chunk(3, 2)), strict=True):
            scores = rotate(q) @ rotate(k).transpose(1, 2) * x["scale"]
            heads.append(scores.softmax(dim=2) @ v)
        expected = torch.cat(heads, dim=2) @ x["out_weight"].T + x["out_bias"]
        assert_close(run.call(inputs)[0], expected.view_as(x["hidden_states"]), 2e-5)


def test_capped_attention_is_naive_attention_head_by_head(reference, assert_matches):
    run = reference("L1/047")
    for workload in run.workloads[:2]:
        inputs = redrawn(run.draw(workload), "q_norm_weight", "k_norm_weight")
        inputs["attn_logit_softcapping"] = 5.0
        x = doubles(inputs)
        head_dim = len(x["q_norm_weight"])
        group = len(x["q_proj_weight"]) // len(x["k_proj_weight"])
        cos, sin = x["cos"], x["sin"]
        heads = []
        for h, weight in enumerate(x["q_proj_weight"].split(head_dim)):
            kv = slice(h // group * head_dim, (h // group + 1) * head_dim)
            q, k = x["hidden_states"] @ weight.T, x["hidden_states"] @ x["k_proj_weight"][kv].T
            q = rotated(rms_normalized(q, 1e-6) * (1 + x["q_norm_weight"]), cos, sin)
            k = rotated(rms_normalized(k, 1e-6) * (1 + x["k_norm_weight"]), cos, sin)
            scores = 5 * torch.tanh(q @ k.transpose(1, 2) / math.sqrt(head_dim) / 5)
            probabilities = (scores + x["attention_mask"][:, 0]).softmax(dim=2)
            heads.append(probabilities @ (x["hidden_states"] @ x["v_proj_weight"][kv].T))
        expected = torch.cat(heads, dim=2) @ x["o_proj_weight"].T
        assert_matches(run.call(inputs)[0], expected, workload.tolerance)
