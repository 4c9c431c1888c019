"""Each reference against an independent formula, in float64 unless a rounding is the point."""

import math

import pytest
import torch

from tests.problems.formulas import rms_normalized, rounded

BF16 = torch.bfloat16


def test_hyena_rfft_is_the_dft_of_the_padded_rows(reference, assert_matches):
    run = reference("L1/007")
    for workload in run.workloads[:2]:  # the third would need a matrix of 256 MiB
        inputs = run.draw(workload)
        seqlen = workload.axes["seqlen"]
        n = 2 * seqlen
        power = torch.outer(torch.arange(seqlen), torch.arange(seqlen + 1)) % n
        angle = power.double() * (-2 * math.pi / n)
        real, imag = run.call(inputs)
        assert_matches(real, inputs["x"].double() @ angle.cos() / n, workload.tolerance)
        assert_matches(imag, inputs["x"].double() @ angle.sin() / n, workload.tolerance)


def test_index_add_is_a_product_with_the_indicator_matrix(reference, assert_matches):
    run = reference("L1/008")
    for workload in run.workloads:
        inputs = run.draw(workload)
        initial, rows, tokens = inputs.values()
        indicator = torch.nn.functional.one_hot(tokens, len(initial)).T.double()
        (output,) = run.call(inputs)
        assert_matches(output, initial.double() + indicator @ rows.double(), workload.tolerance)


def test_index_add_counts_rows_of_ones_exactly(reference):
    run = reference("L1/008")
    inputs = run.draw(run.workloads[0])
    inputs["final_hidden_states"] = torch.full_like(inputs["final_hidden_states"], 3.0)
    inputs["expert_outputs"] = torch.ones_like(inputs["expert_outputs"])
    (output,) = run.call(inputs)
    counts = inputs["token_indices"].bincount(minlength=len(output))
    assert counts.min() < 8 < counts.max()
    assert torch.equal(output[:, 0].long(), counts + 3)
    assert torch.equal(output, output[:, :1].expand_as(output))


def test_rms_norm_backward_is_the_gradient_of_rms_norm(reference, assert_matches):
    run = reference("L1/013")
    for workload in run.workloads:
        inputs = run.draw(workload)
        x = inputs["x"].double().requires_grad_()
        weight = inputs["weight"].double().requires_grad_()
        (rms_normalized(x, 1e-6) * weight).backward(inputs["grad_output"].double())
        rstd = torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6).detach()
        saved = {"normalized": (x.detach() * rstd).float(), "rstd": rstd.float()}
        grad_hidden, grad_residual, grad_weight = run.call(inputs | saved)
        assert_matches(grad_hidden, x.grad, workload.tolerance)
        assert_matches(grad_weight, weight.grad, workload.tolerance)
        assert torch.equal(grad_hidden, grad_residual)


def test_rms_norm_backward_takes_any_normalized_and_rounds_once(reference, assert_same_rounding):
    run = reference("L1/013")
    inputs = run.draw(run.workloads[0])
    grad, _, normalized, rstd, weight = (v.double() for v in inputs.values())
    g = grad * weight
    expected = rstd * (g - (g * normalized).mean(dim=-1, keepdim=True) * normalized)
    grad_hidden, _, grad_weight = run.call(inputs)
    assert_same_rounding(grad_hidden, expected.to(BF16))
    torch.testing.assert_close(
        grad_weight.double(), (grad * normalized).sum(dim=(0, 1)), rtol=1e-5, atol=1e-5
    )


def attention_by_heads(inputs):
    """The attention layer one sequence and head at a time, without any rounding."""
    x = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    head_dim = len(x["q_norm_weight"])
    num_heads = len(x["q_proj_weight"]) // head_dim
    group = len(x["q_proj_weight"]) // len(x["k_proj_weight"])

    def rotate(y, cos, sin):
        half = head_dim // 2
        return y * cos + torch.cat((-y[:, half:], y[:, :half]), dim=1) * sin

    sequences = []
    for b, hidden in enumerate(x["hidden_states"]):
        heads = []
        for h in range(num_heads):
            q_rows = slice(h * head_dim, (h + 1) * head_dim)
            kv_rows = slice((h // group) * head_dim, (h // group + 1) * head_dim)
            q, k = hidden @ x["q_proj_weight"][q_rows].T, hidden @ x["k_proj_weight"][kv_rows].T
            q = rms_normalized(q, x["rms_norm_eps"]) * x["q_norm_weight"]
            k = rms_normalized(k, x["rms_norm_eps"]) * x["k_norm_weight"]
            q, k = rotate(q, x["cos"][b], x["sin"][b]), rotate(k, x["cos"][b], x["sin"][b])
            scores = q @ k.T * x["scaling"] + x["attention_mask"][b, 0]
            heads.append(scores.softmax(dim=1) @ (hidden @ x["v_proj_weight"][kv_rows].T))
        sequences.append(torch.cat(heads, dim=1) @ x["o_proj_weight"].T)
    return torch.stack(sequences)


def test_attention_layer_is_naive_attention_head_by_head(reference, assert_matches):
    run = reference("L1/015")
    for workload in run.workloads:
        inputs = run.draw(workload)
        for name in ("q_norm_weight", "k_norm_weight"):  # drawn as ones, which hide the weight
            inputs[name] = torch.linspace(0.5, 1.5, len(inputs[name])).to(BF16)
        (output,) = run.call(inputs)
        assert_matches(output, attention_by_heads(inputs), workload.tolerance)


def test_residual_rms_norm_rounds_sum_normalised_value_and_product(reference, assert_same_rounding):
    run = reference("L1/069")
    for workload in run.workloads:
        inputs = run.draw(workload)
        hidden, residual, weight = (inputs[n].double() for n in list(inputs)[:3])
        normalized = rounded(rms_normalized(rounded(residual + hidden), inputs["eps"]))
        (output,) = run.call(inputs)
        assert_same_rounding(output, (weight * normalized).to(BF16))


def test_residual_rms_mlp_rounds_between_its_steps(reference, assert_matches, assert_same_rounding):
    run = reference("L2/004")
    for workload in run.workloads:
        inputs = run.draw(workload)
        width = len(inputs["norm_weight"])
        inputs["norm_weight"] = torch.linspace(0.5, 1.5, width).to(BF16)  # not the drawn ones
        x = {k: v.double() for k, v in inputs.items() if k != "eps"}
        (output,) = run.call(inputs)

        def mlp(round_, x=x, eps=inputs["eps"]):
            normalized = rms_normalized(round_(x["residual"] + x["hidden_states"]), eps)
            y = round_(x["norm_weight"] * normalized)
            gate, up = round_(y @ x["gate_proj_weight"].T), round_(y @ x["up_proj_weight"].T)
            return round_(round_(gate * gate.sigmoid()) * up) @ x["down_proj_weight"].T

        assert_same_rounding(output, mlp(rounded).to(BF16))
        assert_matches(output, mlp(lambda y: y), workload.tolerance)


def test_convnext_block_is_the_composition_of_its_layers(reference, assert_matches):
    run = reference("L2/035")
    for workload in run.workloads:
        inputs = run.draw(workload)
        inputs["layernorm_weight"] = torch.linspace(0.5, 1.5, len(inputs["layernorm_weight"]))
        inputs["layernorm_bias"] = torch.linspace(-1, 1, len(inputs["layernorm_bias"]))
        x = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        batch, dim, height, width = x["x"].shape
        kernel = x["dwconv_weight"].shape[-1]

        patches = torch.nn.functional.unfold(x["x"], kernel, padding=kernel // 2)
        patches = patches.view(batch, dim, kernel * kernel, height * width)
        y = torch.einsum("bctp,ct->bpc", patches, x["dwconv_weight"].flatten(1)) + x["dwconv_bias"]
        variance = y.var(dim=-1, correction=0, keepdim=True)
        y = (y - y.mean(dim=-1, keepdim=True)) / torch.sqrt(variance + x["layer_norm_eps"])
        y = y * x["layernorm_weight"] + x["layernorm_bias"]
        z = y @ x["pwconv1_weight"].T + x["pwconv1_bias"]
        z = z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))
        norm = z.square().sum(dim=1).sqrt()
        response = norm / (norm.mean(dim=1, keepdim=True) + x["eps"])
        z = x["grn_weight"].flatten() * z * response[:, None] + x["grn_bias"].flatten() + z
        o = (z @ x["pwconv2_weight"].T + x["pwconv2_bias"]).transpose(1, 2)
        (output,) = run.call(inputs)
        assert_matches(output, x["x"] + o.view_as(x["x"]), workload.tolerance)
        torch.testing.assert_close(
            output.double(), x["x"] + o.view_as(x["x"]), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("decay_scale", [1.0, 1 / 128])
def test_mamba_chunks_are_the_plain_recurrence(
    reference, assert_matches, assert_same_rounding, decay_scale
):
    """As drawn, nothing outlives a chunk (its decay is near exp(-128)); slowed down, all does."""
    run = reference("L2/043")
    assert any(w.axes["seq_len"] > 2 * run.module.CHUNK_SIZE for w in run.workloads)
    for workload in run.workloads:
        inputs = run.draw(workload)
        inputs["A"] = inputs["A"] * decay_scale
        x, a, b, c, d, state = (v.double() for v in inputs.values())
        steps = []
        for t in range(x.shape[1]):
            state = a[:, :, t, None, None].exp() * state
            state = state + x[:, t, :, :, None] * b[:, t, 0, None, None, :]
            steps.append(torch.einsum("bhpn,bn->bhp", state, c[:, t, 0]) + d[:, None] * x[:, t])
        output, final_state = run.call(inputs)
        expected = torch.stack(steps, dim=1).flatten(2)
        assert_matches(output, expected, workload.tolerance)
        assert_matches(final_state, state, workload.tolerance)
        assert_same_rounding(output, expected.to(BF16))
        assert_same_rounding(final_state, state.to(BF16))


def test_mamba_heads_of_a_group_share_b_and_c(reference):
    run = reference("L2/043")
    inputs = run.draw(run.workloads[1])
    two_groups = dict(inputs)
    for name in ("B", "C"):
        two_groups[name] = torch.cat((inputs[name], inputs[name].flip(-1)), dim=2)
    outputs, final_state = run.call(two_groups)
    flipped = {name: inputs[name].flip(-1) for name in ("B", "C")}
    flipped_outputs, flipped_state = run.call(inputs | flipped)
    plain_outputs, plain_state = run.call(inputs)
    half = inputs["D"].numel() // 2
    width = outputs.shape[-1] // 2
    assert torch.equal(outputs[..., :width], plain_outputs[..., :width])
    assert torch.equal(outputs[..., width:], flipped_outputs[..., width:])
    assert torch.equal(final_state[:, :half], plain_state[:, :half])
    assert torch.equal(final_state[:, half:], flipped_state[:, half:])


def e4m3_grid():
    """All non-negative float8_e4m3fn values in code order, from the format's definition."""
    values = []
    for code in range(0x7F):  # 0x7F is NaN
        exponent, mantissa = code >> 3, code & 7
        values.append(
            mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        )
    return torch.tensor(values, dtype=torch.float64)


def nearest_e4m3(x):
    """To the nearest value of the grid, ties to the even code."""
    grid = e4m3_grid()
    above = torch.searchsorted(grid, x.abs().contiguous()).clamp(1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    middle = (low + high) / 2
    up = (x.abs() > middle) | ((x.abs() == middle) & (above % 2 == 0))
    return torch.where(up, high, low) * x.sign()


def test_fp8_projection_rounds_blocks_to_e4m3(reference, assert_matches, assert_same_rounding):
    run = reference("Quant/001")
    for workload in run.workloads:
        inputs = run.draw(workload)
        x, weight, bias = inputs.values()

        def dequantized(blocks, dims):
            scale = blocks.abs().amax(dim=dims, keepdim=True) * torch.tensor(1 / 448)
            # The quotient in float32: the rounding to FP8 starts from it.
            return nearest_e4m3((blocks / scale).double()) * scale

        activation = dequantized(x.float().unflatten(1, (-1, 128)), (2,)).flatten(1)
        tiles = weight.float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        weight = dequantized(tiles, (1, 3)).flatten(2).flatten(0, 1)
        expected = activation @ weight.T + bias.double()
        (output,) = run.call(inputs)
        assert_matches(output, expected, workload.tolerance)
        assert_same_rounding(output, expected.to(BF16))


def test_fp8_projection_of_zero_blocks_is_the_bias(reference):
    run = reference("Quant/001")
    inputs = run.draw(run.workloads[0])
    (output,) = run.call(inputs | {"attn_output": torch.zeros_like(inputs["attn_output"])})
    assert torch.equal(output, inputs["o_proj_bias"].expand_as(output))


@pytest.mark.parametrize(
    ("magnitude", "code"),
    [(0.0, 0), (0.25, 0), (0.26, 1), (0.75, 2), (1.0, 2), (1.25, 2), (1.26, 3), (1.75, 4),
     (2.5, 4), (2.51, 5), (3.5, 6), (4.9, 6), (5.0, 6), (5.01, 7), (6.0, 7)],
)  # fmt: skip
def test_e2m1_rounds_to_nearest_ties_to_the_even_code(reference, magnitude, code):
    module = reference("Quant/024").module
    codes = module.e2m1_codes(torch.tensor([magnitude, -magnitude, math.nan]))
    assert codes.tolist() == [code, code + 8 if magnitude else 0, 0]
    assert module.e2m1_values(codes)[0] == [0, 0.5, 1, 1.5, 2, 3, 4, 6][code]


def test_nvfp4_scales_of_a_hand_worked_tensor(reference):
    module = reference("Quant/024").module
    # The largest magnitude is 6, so the encode scale is 2688 / 6 = 448 and the decode scale 1/448.
    # First block: 6 / 6 * 448 = 448 exactly, so values are coded as they are.
    # Second block: 0.75 / 6 * 448 = 56, again exact; values are multiplied by 448 / 56 = 8.
    # Third block: all zero, with a zero scale.
    t = torch.zeros(1, 48)
    t[0, :4] = torch.tensor([6.0, -3.0, 0.3, 2.5])
    t[0, 16:19] = torch.tensor([0.75, -0.25, 0.125])
    codes, block_scale, decode = module.nvfp4_quantize(t)
    assert decode.item() == torch.tensor(448.0).reciprocal().item()
    assert block_scale.float().tolist() == [[448.0, 56.0, 0.0]]
    assert codes[0, :5].tolist() == [7, 13, 1, 4, 0]  # 6, -3, 0.5, 2 (a tie), 0
    assert codes[0, 16:20].tolist() == [7, 12, 2, 0]  # 6, -2, 1, 0
    assert not codes[0, 32:].any()


def test_nvfp4_packs_the_even_index_into_the_low_nibble(reference):
    module = reference("Quant/024").module
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    packed = module.pack(codes)
    assert packed.view(torch.uint8).tolist() == [[0x21, 0x0F]]
    assert torch.equal(module.unpack(packed), codes)


def test_nvfp4_projection_is_the_product_of_decoded_operands(reference, assert_matches):
    run = reference("Quant/024")
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = torch.cat((values, -values))
    for workload in run.workloads:
        inputs = run.draw(workload)
        t, packed, weight_scale, weight_global = inputs.values()
        weight = values[run.module.unpack(packed).long()].unflatten(1, (-1, 16))
        weight = (weight * weight_scale.double()[..., None]).flatten(1) * weight_global

        encode = torch.tensor(2688.0) / t.abs().max()
        blocks = t.unflatten(1, (-1, 16))
        scale = (blocks.abs().amax(dim=2) * torch.tensor(1 / 6) * encode).double()
        scale = nearest_e4m3(scale) / encode.double()
        # Nearest value among all sixteen, by distance; ties are next to impossible here.
        scaled = blocks.double() / scale[..., None]
        distance = (scaled[..., None] - values).abs()
        activation = values[distance.argmin(dim=-1)] * scale[..., None]
        (output,) = run.call(inputs)
        assert_matches(output, activation.flatten(1) @ weight.T, workload.tolerance)


def test_paged_decode_is_naive_attention_per_sequence_and_head(reference, assert_matches):
    run = reference("FIB/012")
    empty = 0
    for workload in run.workloads:
        inputs = run.draw(workload)
        q, k_cache, v_cache, indptr, indices, sm_scale = inputs.values()
        output, lse = run.call(inputs)
        group = q.shape[1] // k_cache.shape[2]
        expected = torch.zeros(q.shape, dtype=torch.float64)
        expected_lse = torch.full(lse.shape, -math.inf, dtype=torch.float64)
        for b in range(len(q)):
            pages = indices[indptr[b] : indptr[b + 1]].tolist()
            if not pages:
                empty += 1
                continue
            for h in range(q.shape[1]):
                k = k_cache[pages, 0, h // group].double()
                logits = k @ q[b, h].double() * sm_scale
                expected[b, h] = logits.softmax(dim=0) @ v_cache[pages, 0, h // group].double()
                expected_lse[b, h] = torch.log2(logits.exp().sum())
        assert_matches(output, expected, workload.tolerance)
        assert_matches(lse, expected_lse, workload.tolerance)
        assert torch.equal(lse.isneginf(), expected_lse.isneginf())
        assert torch.equal(output[lse.isneginf()], torch.zeros_like(output[lse.isneginf()]))
    assert empty > 0, "no workload has an empty sequence"


def test_paged_decode_of_nothing_but_empty_sequences(reference):
    run = reference("FIB/012")
    inputs = run.draw(run.workloads[1])
    inputs["kv_indptr"] = torch.zeros_like(inputs["kv_indptr"])
    inputs["kv_indices"] = inputs["kv_indices"][:0]
    output, lse = run.call(inputs)
    assert not output.any() and lse.isneginf().all()


def test_paged_decode_page_tables_are_ragged_and_name_each_page_once(reference):
    run = reference("FIB/012")
    workload = run.workloads[1]
    inputs = run.draw(workload)
    indptr, indices = inputs["kv_indptr"], inputs["kv_indices"]
    lengths = indptr.diff()
    assert indptr[0] == 0 and indptr[-1] == workload.axes["num_kv_indices"]
    assert lengths.min() >= 1 and lengths.unique().numel() > 1
    assert indices.unique().numel() == indices.numel()
    assert indices.min() >= 0 and indices.max() < workload.axes["num_pages"]
    consecutive = (indices.diff() == 1).double().mean()
    assert 0.3 < consecutive < 0.95


def test_short_row_rms_norm_rounds_once(reference, assert_same_rounding):
    run = reference("FIB/021")
    for workload in run.workloads:
        inputs = run.draw(workload)
        x, weight = (v.double() for v in inputs.values())
        (output,) = run.call(inputs)
        assert_same_rounding(output, (rms_normalized(x, 1e-6) * weight).to(BF16))
