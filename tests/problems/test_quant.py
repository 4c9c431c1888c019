"""Quant references against independent formulas: own rounding by tables, sums in float64."""

import math

import pytest
import torch

from sol_gym.problems import list_ids
from tests.problems.formulas import rms_normalized, rounded

BF16 = torch.bfloat16
F32 = torch.float32
LARGEST = torch.finfo(F32).max
NVFP4 = [f"Quant/{n:03}" for n in (8, 9, 18, 19, 20, 25, 26, 27, 28, 29, 30, 31, 32, 33)]


def silu(x):
    return x * torch.sigmoid(x)


# ---- The formats, as tables of their values -------------------------------------------------

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
E4M3 = torch.tensor(
    [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][
        :-1
    ],
    dtype=torch.float64,
)


def nearest(x, table):
    """Codes of the nearest table values of |x|, ties to the even code."""
    midpoints = (table[1:] + table[:-1]) / 2
    magnitude = x.double().abs()
    code = torch.searchsorted(midpoints, magnitude)
    tie = midpoints[code.clamp(max=len(midpoints) - 1)] == magnitude
    return code + (tie & (code % 2 == 1))


def e4m3(x):
    """float64 values of x, within +-448, rounded to E4M3."""
    return E4M3[nearest(x, E4M3)] * x.double().sign()


# ---- FP8 in blocks --------------------------------------------------------------------------


def fp8_scale(block):
    """Decode scale from the largest magnitude, a float32 number."""
    return (block.abs().amax() * torch.tensor(1 / 448, dtype=F32)).clamp(min=1e-12)


def fp8_product(x, weight, x_scale=None, weight_scale=None):
    """x [M, K] times weight [N, K]^T, both quantised in blocks, block by block, in float64.

    Scales that are not given are derived. `weight_scale` is [N / 128, K / 128].
    """
    x, weight = x.float(), weight.float()
    output = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for kb, k in enumerate(range(0, x.shape[1], 128)):
        rows = x[:, k : k + 128]
        s = torch.stack([fp8_scale(r) for r in rows]) if x_scale is None else x_scale[:, kb]
        q = e4m3((rows / s.unsqueeze(1)).clamp(-448, 448))
        for nb, n in enumerate(range(0, len(weight), 128)):
            tile = weight[n : n + 128, k : k + 128]
            t = fp8_scale(tile) if weight_scale is None else weight_scale[nb, kb]
            part = q @ e4m3((tile / t).clamp(-448, 448)).T
            output[:, n : n + 128] += part * s.double().unsqueeze(1) * t.double()
    return output


def scaled_product(x, x_scale, weight, weight_scale):
    """The product of operands that are FP8 already; `weight_scale` is [N / 128, K / 128]."""
    columns = torch.arange(x.shape[1]) // 128
    rows = torch.arange(len(weight)) // 128
    a = x.double() * x_scale.double()[:, columns]
    return a @ (weight.double() * weight_scale.double()[rows][:, columns]).T


def uneven(scale):
    """Scales that are not the blocks' own: some let values saturate, and all differ."""
    factor = 0.25 + torch.rand(scale.shape, generator=torch.Generator().manual_seed(3)) * 4
    return scale * factor


def share_equal(actual, expected):
    return (actual == expected).double().mean().item()


def share_near(actual, expected):
    """Share of the elements that agree to float32 precision, give or take a few ulps."""
    return ((actual - expected).abs() <= 1e-5 * expected.abs() + 1e-12).double().mean().item()


def not_ones(weight):
    return (torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)) + 1).to(
        weight.dtype
    )


def test_e4m3_table_is_the_format_of_torch():
    codes = torch.arange(127, dtype=torch.uint8)
    assert torch.equal(codes.view(torch.float8_e4m3fn).double(), E4M3)


def test_fp8_blocks_that_are_zero_or_uneven_keep_their_own_scales(reference, assert_same_rounding):
    run = reference("Quant/010")
    x, weight = run.draw(run.workloads[1]).values()
    x[::7] = 0
    x[:, 128:256] *= 1e-4
    weight[:128, :128] *= 1e5
    weight[128:, 256:] = 0
    (output,) = run.call({"x": x, "weight": weight})
    assert_same_rounding(output, fp8_product(x, weight).to(BF16))
    assert output[::7].count_nonzero() == 0


@pytest.mark.parametrize("problem_id", ["Quant/010", "Quant/021"])
def test_fp8_projection_quantises_both_operands(reference, assert_same_rounding, problem_id):
    run = reference(problem_id)
    for workload in run.workloads[1:]:
        x, weight = run.draw(workload).values()
        (output,) = run.call({"x": x, "weight": weight})
        assert_same_rounding(output, fp8_product(x, weight).to(BF16))
        plain = x.double() @ weight.double().T
        near = (output.double() - plain).abs() <= 0.005 + 0.02 * plain.abs()
        assert near.double().mean() < 0.9, "the tolerance does not notice that FP8 is left out"


def test_fp8_qkv_projection_normalises_query_and_key_heads(reference, assert_same_rounding):
    run = reference("Quant/002")
    inputs = run.draw(run.workloads[1])
    inputs |= {n: not_ones(inputs[n]) for n in ("q_norm_weight", "k_norm_weight")}
    inputs["rms_norm_eps"] = 0.3
    x = inputs["hidden_states"].flatten(0, 1)
    for name, actual in zip("qkv", run.call(inputs), strict=True):
        y = rounded(fp8_product(x, inputs[f"{name}_weight"]) + inputs[f"{name}_bias"].double())
        y = y.unflatten(-1, (-1, 128))
        if name != "v":
            weight = inputs[f"{name}_norm_weight"].double()
            y = rounded(rounded(rms_normalized(y, 0.3)) * weight)
        expected = y.unflatten(0, inputs["hidden_states"].shape[:2]).transpose(1, 2)
        assert_same_rounding(actual, expected.to(BF16))


def test_fp8_gate_and_up_are_rounded_before_they_meet(reference, assert_same_rounding):
    run = reference("Quant/003")
    for workload in run.workloads[1:]:
        i = run.draw(workload)
        i |= {n: uneven(i[n]) for n in ("scale_x", "scale_gate", "scale_up")}
        gate = scaled_product(i["x"], i["scale_x"], i["gate_proj_weight"], i["scale_gate"])
        up = scaled_product(i["x"], i["scale_x"], i["up_proj_weight"], i["scale_up"])
        expected = rounded(silu(rounded(gate))) * rounded(up)
        assert_same_rounding(run.call(i)[0], expected.to(BF16))


def test_fp8_expert_quantises_its_hidden_activation_again(reference, assert_same_rounding):
    run = reference("Quant/004")
    x, routing, gate_up, down = run.draw(run.workloads[1]).values()
    both = rounded(fp8_product(x, gate_up))
    half = both.shape[1] // 2
    hidden = (rounded(silu(both[:, :half])) * both[:, half:]).to(BF16)
    expected = rounded(fp8_product(hidden, down)) * routing.double()
    (output,) = run.call({"x": x, "routing": routing, "gate_up": gate_up, "down": down})
    assert_same_rounding(output, expected.to(BF16))


def test_fp8_router_ignores_its_padding(reference, assert_same_rounding):
    run = reference("Quant/005")
    i = run.draw(run.workloads[1])
    i |= {n: uneven(i[n]) for n in ("scale_hidden", "scale_weight")}
    (output,) = run.call(i)
    expected = scaled_product(
        i["hidden_states"], i["scale_hidden"], i["gate_weight"], i["scale_weight"]
    )
    assert_same_rounding(output, expected[:, :64].to(BF16))
    assert i["gate_weight"][64:].float().count_nonzero() == 0
    i["gate_weight"][64:] = i["gate_weight"][:64]
    assert torch.equal(run.call(i)[0], output)


def test_fp8_given_scales_are_in_by_out(reference, assert_same_rounding):
    run = reference("Quant/006")
    i = run.draw(run.workloads[1])
    i |= {n: uneven(i[n]) for n in ("scale_attn", "scale_weight")}
    expected = fp8_product(i["attn_output"], i["weight"], i["scale_attn"], i["scale_weight"].T)
    assert_same_rounding(run.call(i)[0], expected.to(BF16))


def test_fp8_generated_scales_are_those_a_dynamic_quantisation_finds(
    reference, assert_same_rounding
):
    run = reference("Quant/006")
    i = run.draw(run.workloads[1])
    dynamic = fp8_product(i["attn_output"], i["weight"])
    assert_same_rounding(run.call(i)[0], dynamic.to(BF16))


def test_fp8_vision_qkv_is_part_by_part(reference, assert_same_rounding):
    run = reference("Quant/007")
    x, weight, bias = run.draw(run.workloads[1]).values()
    y = fp8_product(x, weight) + bias.double()
    part = y.shape[1] // 3
    for index, actual in enumerate(run.call({"x": x, "weight": weight, "bias": bias})):
        expected = y[:, index * part : (index + 1) * part].reshape(actual.shape)
        assert_same_rounding(actual, expected.to(BF16))


def test_fp8_gate_limits_groups_and_orders_by_index(reference):
    run = reference("Quant/011")
    for size in (1.0, 0.05):  # with saturated scores, and with distinct ones
        i = run.draw(run.workloads[1])
        i["scale_x"] = i["scale_x"] * size
        i["hidden_states"] = (i["hidden_states"] * size).to(BF16)
        i["e_score_correction_bias"][::2] = 0.125  # real ties
        logits = fp8_product(i["hidden_states"], i["weight"], i["scale_x"], i["scale_w"].T)
        scores = torch.sigmoid(logits.to(BF16).float())
        choice = scores + i["e_score_correction_bias"].float()
        indices, weights = run.call(i)
        wrong = 0
        for token, row in enumerate(choice.tolist()):
            groups = [range(g, g + 32) for g in range(0, 256, 32)]
            best = sorted(groups, key=lambda g: -sum(sorted(row[e] for e in g)[-2:]))[:4]
            inside = sorted(e for g in best for e in g)
            chosen = sorted(inside, key=lambda e: -row[e])[:8]
            last = row[chosen[-1]]
            expected = sorted(chosen, key=lambda e: (row[e] == last, e))
            wrong += indices[token].tolist() != expected
        # A logit that rounds the other way in another order of summation may change a row.
        assert wrong <= 2
        normalized = scores.gather(1, indices)
        normalized = normalized / normalized.sum(dim=1, keepdim=True) * 2.5
        torch.testing.assert_close(weights, normalized, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("problem_id", ["Quant/011", "Quant/027"])
def test_top_k_takes_the_lowest_of_equals_and_puts_them_last(reference, problem_id):
    top_k = reference(problem_id).module.top_k_indices
    values = torch.tensor([[0.5, 1.0, 0.5, 0.25, 2.0, 0.5], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert top_k(values, 3).tolist() == [[1, 4, 0], [0, 1, 2]]
    assert top_k(values, 4).tolist() == [[1, 4, 0, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("problem_id", ["Quant/012", "Quant/017"])
def test_fp8_mlp_quantises_its_hidden_activation_again(reference, assert_same_rounding, problem_id):
    run = reference(problem_id)
    i = run.draw(run.workloads[1])
    scales = {"gate": None, "up": None, "down": None}
    if problem_id == "Quant/017":
        for name in scales:
            i[f"{name}_proj_weight_scales"] = uneven(i[f"{name}_proj_weight_scales"])
            scales[name] = i[f"{name}_proj_weight_scales"].T

    def linear(t, name):
        return rounded(fp8_product(t, i[f"{name}_proj_weight"], weight_scale=scales[name]))

    x = next(iter(i.values()))
    hidden = (rounded(silu(linear(x, "gate"))) * linear(x, "up")).to(BF16)
    assert_same_rounding(run.call(i)[0], linear(hidden, "down").to(BF16))


def test_fp8_kv_compression_lets_padding_decide_a_scale(reference, assert_same_rounding):
    run = reference("Quant/013")
    i = run.draw(run.workloads[1])
    i["kv_a_layernorm_weight"] = not_ones(i["kv_a_layernorm_weight"])
    i["kv_a_proj_weight"][600] *= 50
    i["rms_norm_eps"] = 100.0
    x = i["hidden_states"].flatten(0, 1)
    compressed = rounded(fp8_product(x, i["kv_a_proj_weight"]))
    latent = rounded(rms_normalized(compressed[:, :512], 100.0))
    latent = (latent * i["kv_a_layernorm_weight"].double()).to(BF16)
    expanded, k_pe = run.call(i)
    expected = fp8_product(latent, i["kv_b_proj_weight"])
    assert_same_rounding(expanded, expected.to(BF16).reshape(expanded.shape))
    assert_same_rounding(k_pe, compressed[:, 512:576].to(BF16).reshape(k_pe.shape))


def test_fp8_latent_projections_round_the_norm_once(reference):
    run = reference("Quant/016")
    i = run.draw(run.workloads[1])
    i |= {n: not_ones(i[n]) for n in ("q_a_layernorm_weight", "kv_a_layernorm_weight")}
    i["kv_a_proj_weight"][-1] *= 50
    i["rms_norm_eps"] = 0.3
    x = i["hidden_states"].flatten(0, 1)

    def normalized(t, name):
        return (rms_normalized(t, 0.3) * i[f"{name}_a_layernorm_weight"].double()).to(BF16)

    rank = len(i["kv_a_layernorm_weight"])
    query = fp8_product(
        normalized(rounded(fp8_product(x, i["q_a_proj_weight"])), "q"), i["q_b_proj_weight"]
    )
    query = query.unflatten(-1, (-1, 192))
    compressed = rounded(fp8_product(x, i["kv_a_proj_weight"]))
    key_value = fp8_product(normalized(compressed[:, :rank], "kv"), i["kv_b_proj_weight"])
    key_value = key_value.unflatten(-1, (-1, 256))
    expected = (
        query[..., :128],
        query[..., 128:],
        key_value[..., :128],
        compressed[:, rank : rank + 64],
        key_value[..., 128:],
    )
    for actual, e in zip(run.call(i), expected, strict=True):
        # A sum on the edge between two bfloat16 values changes its whole row a little.
        assert share_equal(actual, e.to(BF16).reshape(actual.shape)) > 0.95


def test_yarn_tables_are_those_of_angles_rounded_through_fp8(reference):
    run = reference("Quant/014")
    i = run.draw(run.workloads[1])
    i |= {"mscale": 1.5, "mscale_all_dim": 0.5}
    i["position_ids"] = i["position_ids"].flip(0)
    cos, sin = run.call(i)
    ratio = (0.15 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
    for row, position in enumerate(i["position_ids"].tolist()):
        angles = []
        for pair in range(32):
            frequency = 10000.0 ** (-pair / 32)
            ramp = min(max((pair - 10) / 13, 0.0), 1.0)
            angles.append(position * frequency * (1 - ramp + ramp / 40))
        scale = max(max(angles) / 448, 1e-12)
        angles = e4m3(torch.tensor(angles) / scale) * scale
        # An angle on the edge between two codes may fall on either side.
        for actual, expected in ((cos, angles.cos()), (sin, angles.sin())):
            off = (actual[row].double() - expected.repeat(2) * ratio).abs() > 0.01
            assert off.sum() <= 2


def test_yarn_inverse_frequencies_ramp_between_pairs_10_and_23(reference):
    actual = reference("Quant/014").module.inverse_frequencies(torch.device("cpu")).double()
    pair = torch.arange(32, dtype=torch.float64)
    frequency = 10000.0 ** (-pair / 32)
    torch.testing.assert_close(actual[:11], frequency[:11], rtol=1e-6, atol=0)
    torch.testing.assert_close(actual[23:], frequency[23:] / 40, rtol=1e-6, atol=0)
    assert (actual[11:23] < frequency[11:23]).all()
    assert (actual[11:23] > frequency[11:23] / 40).all()


@pytest.mark.parametrize(
    ("problem_id", "x", "w", "in_by_out"),
    [("Quant/015", "hidden_states", "weight", True), ("Quant/022", "x", "w", False)],
)
def test_fp8_operands_are_multiplied_with_their_scales(
    reference, assert_same_rounding, problem_id, x, w, in_by_out
):
    run = reference(problem_id)
    i = run.draw(run.workloads[1])
    i |= {n: uneven(i[n]) for n in ("scale_x", "scale_w")}
    scale_w = i["scale_w"].T if in_by_out else i["scale_w"]
    scale_x = i["scale_x"].reshape(-1, i["scale_x"].shape[-1])
    expected = scaled_product(i[x].reshape(len(scale_x), -1), scale_x, i[w], scale_w)
    (output,) = run.call(i)
    assert_same_rounding(output, expected.to(BF16).reshape(output.shape))


@pytest.mark.parametrize("problem_id", ["Quant/003", "Quant/005", "Quant/015", "Quant/022"])
def test_fp8_generators_quantise_by_block(reference, problem_id):
    module = reference(problem_id).module
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    x[1, 128:] = 0
    q, scale = module.quantize_rows(x)
    for row in range(3):
        for kb in range(2):
            block = x[row, 128 * kb : 128 * kb + 128]
            assert scale[row, kb] == fp8_scale(block)
            assert torch.equal(
                q[row, 128 * kb : 128 * kb + 128].double(), e4m3(block / scale[row, kb])
            )
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(2))
    q, scale = module.quantize_tiles(weight)
    assert scale.shape == (2, 3)
    assert scale[1, 2] == fp8_scale(weight[128:, 256:])
    assert torch.equal(q[128:, 256:].double(), e4m3(weight[128:, 256:] / scale[1, 2]))


def test_ssm_discretisation_repeats_its_compact_results(reference, assert_same_rounding):
    run = reference("Quant/023")
    for workload in run.workloads[:2]:
        i = run.draw(workload)
        i["dt_bias"] = not_ones(i["dt_bias"])
        x = i["hidden_states"].flatten(0, 1)
        z = rounded(fp8_product(x, i["dt_proj_weight"]) + i["dt_bias"].double())
        dt = torch.log1p(torch.exp(z)).clamp(i["time_step_limit_min"], i["time_step_limit_max"])
        dt = dt.reshape(i["hidden_states"].shape)
        dt_out, decay, step = run.call(i)
        assert_same_rounding(dt_out[..., 0], dt.to(BF16))
        expected = torch.exp(-dt * torch.exp(i["A_log"].double()))
        assert share_near(decay[..., 0, 0], expected) > 0.995
        expected = dt.unsqueeze(-1) * i["B"].double()[:, :, torch.arange(128) // 16]
        assert share_near(step[:, :, :, 0], expected) > 0.995
        for expanded in (dt_out, decay, step):
            assert expanded.stride(3) == 0
        assert decay.stride(4) == 0


# ---- NVFP4 ----------------------------------------------------------------------------------


def nvfp4(t):
    """Codes, block scales, global decode scale and decoded values without the latter."""
    blocks = t.unflatten(-1, (-1, 16))
    largest = t.abs().max().float()
    encode = torch.minimum(torch.tensor(2688.0) / largest, torch.tensor(LARGEST))
    if encode == 0:
        encode = torch.tensor(1.0)
    decode = torch.tensor(1.0) / encode
    sixth = torch.tensor(1.0) / torch.tensor(6.0)
    quotient = (blocks.abs().amax(dim=-1).float() * sixth).to(t.dtype).float()
    scale = E4M3[nearest((quotient * encode).clamp(max=448), E4M3)]
    factor = torch.minimum(torch.tensor(1.0) / (scale.float() * decode), torch.tensor(LARGEST))
    y = (blocks.float() * factor.unsqueeze(-1)).clamp(-6, 6)
    magnitude = nearest(y, E2M1)
    values = E2M1[magnitude] * y.double().sign() * scale.unsqueeze(-1)
    codes = magnitude + 8 * (y < 0)
    return codes.flatten(-2).to(torch.uint8), scale, decode, values.flatten(-2)


def decoded(packed, scale):
    """Values of a packed operand, nibble by nibble, without its global scale."""
    data = packed.view(torch.uint8)
    codes = torch.empty(*data.shape[:-1], 2 * data.shape[-1], dtype=torch.long)
    codes[..., 0::2], codes[..., 1::2] = (data % 16).long(), (data // 16).long()
    sign = 1 - 2 * (codes // 8)
    return E2M1[codes % 8] * sign * scale.double().repeat_interleave(16, dim=-1)


class Linears:
    """The weights of an NVFP4 problem, and products with them by the three endings."""

    def __init__(self, inputs, weight="{}_weight_fp4", scale="{}_scale", glob="{}_global_scale"):
        self.inputs, self.names = inputs, (weight, scale, glob)

    def raw(self, x, name):
        """Sums without global scales, float64, and both global scales as float32."""
        packed, scale, glob = (self.inputs[pattern.format(name)] for pattern in self.names)
        weight = decoded(packed, scale)
        _, _, g, values = nvfp4(x)
        return values @ weight.squeeze(0).T, g, torch.as_tensor(glob, dtype=F32)

    def f32(self, x, name):
        raw, g, h = self.raw(x, name)
        return raw.float() * (g * h)

    def bf16(self, x, name):
        raw, g, h = self.raw(x, name)
        return (rounded(raw) * rounded(g * h)).to(BF16)


AWKWARD = {
    "normal": lambda x: x,
    "a few magnitudes": lambda x: (x * 2).round() / 2,
    "blocks of zeros": lambda x: x * (torch.arange(x.shape[-1]) // 16 % 2),
    "all zeros": torch.zeros_like,
    "a lone peak": lambda x: torch.where(torch.arange(x.shape[-1]) == 3, 1e6, x),
    "huge": lambda x: x * 1e30,
    "tiny": lambda x: x * 1e-30,
}


@pytest.mark.parametrize("problem_id", NVFP4)
def test_nvfp4_quantisation_is_bit_exact(reference, problem_id):
    quantize = reference(problem_id).module.nvfp4_quantize
    x = torch.randn(2, 37, 256, generator=torch.Generator().manual_seed(0))
    dtypes = {"Quant/009": (F32, BF16), "Quant/031": (BF16,)}.get(problem_id, (F32,))
    for name, change in AWKWARD.items():
        for dtype in dtypes:
            t = change(x.to(BF16).float()).to(dtype)
            codes, scale, decode = quantize(t)
            expected_codes, expected_scale, expected_decode, _ = nvfp4(t)
            assert torch.equal(decode, expected_decode), name
            assert torch.equal(scale.double(), expected_scale), name
            assert torch.equal(codes, expected_codes), name


@pytest.mark.parametrize("problem_id", [p for p in NVFP4 if p != "Quant/031"])
def test_nvfp4_packing_puts_the_even_index_in_the_low_nibble(reference, problem_id):
    module = reference(problem_id).module
    codes = torch.tensor([[1, 2, 15, 0, 8, 7]], dtype=torch.uint8)
    packed = module.pack(codes)
    assert packed.view(torch.uint8).tolist() == [[0x21, 0x0F, 0x78]]
    assert torch.equal(module.unpack(packed), codes)


def test_nvfp4_vision_rows_replace_the_masked_tokens_in_order(reference, assert_same_rounding):
    run = reference("Quant/008")
    i = run.draw(run.workloads[1])
    i["vision_token_mask"][0] = False
    i["vision_token_mask"][0, 5:9] = True  # fewer positions than vision rows
    i["vision_token_mask"][1] = True  # more
    linear = Linears(i, "{}_weight_fp4", "{}_weight_scale", "{}_weight_global_scale")
    vision = linear.bf16(i["vision_features"].flatten(0, 1), "vision_proj").double()
    vision = (vision + i["vision_proj_bias"].double()).to(BF16).unflatten(0, (2, -1))
    expected = i["text_embedding_weight"][i["text_input_ids"]]
    for b in range(2):
        rows = iter(vision[b])
        for position in i["vision_token_mask"][b].nonzero().flatten().tolist():
            row = next(rows, None)
            if row is not None:
                expected[b, position] = row
    assert_same_rounding(run.call(i)[0], expected)


def test_nvfp4_patch_merge_quantises_bfloat16(reference, assert_same_rounding):
    run = reference("Quant/009")
    i = run.draw(run.workloads[1])
    i["bias"] = not_ones(i["bias"])
    merged = torch.cat((i["x"][:, 0::2], i["x"][:, 1::2]), dim=-1).flatten(0, 1)
    linear = Linears(i, "weight_fp4", "weight_scale", "weight_global_scale")
    expected = (linear.bf16(merged, "").double() + i["bias"].double()).to(BF16)
    (output,) = run.call(i)
    assert_same_rounding(output, expected.reshape(output.shape))


def test_nvfp4_output_projection_adds_the_residual_last(reference, assert_same_rounding):
    run = reference("Quant/018")
    i = run.draw(run.workloads[1])
    linear = Linears(i, "weight_fp4", "weight_scale", "weight_global_decode")
    y = linear.bf16(i["attn_output"].float().flatten(0, 1), "")
    expected = (y.double() + i["residual"].flatten(0, 1).double()).to(BF16)
    (output,) = run.call(i)
    assert_same_rounding(output, expected.reshape(output.shape))


def test_nvfp4_linear_layer_keeps_the_global_scale_in_float32(reference, assert_same_rounding):
    run = reference("Quant/020")
    i = run.draw(run.workloads[1])
    linear = Linears(i, "weight_fp4", "weight_scales", "weight_global_decode_scale")
    raw, g, _ = linear.raw(i["x"].float().flatten(0, 1), "")
    factor = torch.tensor(g.item() * i["weight_global_decode_scale"], dtype=F32)
    (output,) = run.call(i)
    expected = (rounded(raw) * factor.double()).to(BF16)
    assert_same_rounding(output, expected.reshape(output.shape))


def test_nvfp4_qkv_is_scaled_before_it_is_rounded_to_float16(reference, assert_same_rounding):
    run = reference("Quant/025")
    i = run.draw(run.workloads[1])
    i["hidden_states"] *= 300
    linear = Linears(i, glob="{}_global_decode_scale")
    for name, actual in zip("qkv", run.call(i), strict=True):
        expected = linear.f32(i["hidden_states"].flatten(0, 1), name).half()
        assert expected.isfinite().all()
        assert_same_rounding(actual, expected.reshape(actual.shape))


def test_nvfp4_product_of_quantised_operands(reference):
    run = reference("Quant/026")
    for workload in run.workloads:
        i = run.draw(workload)
        a = decoded(i["hidden_states"], i["hidden_states_scale"])[0]
        b = decoded(i["weight"], i["weight_scale"])[0]
        scale = i["global_decode_scale_input"] * i["global_decode_scale_weight"]
        (output,) = run.call(i)
        torch.testing.assert_close(output[0].double(), a @ b.T * scale, rtol=1e-6, atol=1e-6)


def test_nvfp4_router_saturates_and_takes_the_lowest_indices(reference):
    run = reference("Quant/027")
    for workload, bias in ((0, 0.0), (0, 0.2), (1, 0.0)):
        i = run.draw(run.workloads[workload])
        i["e_score_correction_bias"] = bias * torch.randn(128)
        linear = Linears(i, "weight_fp4", "weight_scale", "weight_global_scale")
        logits = linear.f32(i["hidden_states"], "")
        scores = torch.sigmoid(logits)
        choice = scores + i["e_score_correction_bias"]
        indices, weights = run.call(i)
        for token, row in enumerate(choice.tolist()):
            chosen = sorted(range(128), key=lambda e: (-row[e], e))[:6]
            last = row[chosen[-1]]
            expected = sorted(chosen, key=lambda e: (row[e] == last, e))
            assert indices[token].tolist() == expected
        values = choice.gather(1, indices)
        torch.testing.assert_close(weights, values / values.sum(dim=1, keepdim=True) * 2.5)
        if workload == 1:
            saturated = (scores == 1).sum(dim=1) >= 6
            assert saturated.double().mean() > 0.9
            assert weights[saturated].sub(2.5 / 6).abs().max() < 1e-6


def rope(x, cos, sin):
    """Half-split rotary embedding of [batch, seq, heads, d] with its three roundings."""
    half = x.shape[-1] // 2
    cos, sin = cos.double().unsqueeze(2), sin.double().unsqueeze(2)
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return rounded(rounded(x * cos) + rounded(turned * sin))


def test_nvfp4_qkv_with_rope(reference, assert_same_rounding):
    run = reference("Quant/028")
    i = run.draw(run.workloads[1])
    i |= {n: not_ones(i[n]) for n in ("q_norm_weight", "k_norm_weight")}
    i["rms_norm_eps"] = 0.01
    linear = Linears(i, "{}_proj_weight_fp4", "{}_proj_scale", "{}_proj_global_decode_scale")
    shape = (*i["cos"].shape[:2], -1, i["cos"].shape[2])
    for name, actual in zip("qkv", run.call(i), strict=True):
        y = linear.bf16(i["hidden_states"].float().flatten(0, 1), name).double().reshape(shape)
        if name != "v":
            y = rounded(rms_normalized(y, 0.01) * i[f"{name}_norm_weight"].double())
            y = rope(y, i["cos"], i["sin"])
        assert_same_rounding(actual, y.transpose(1, 2).to(BF16))


def test_nvfp4_mlp_rounds_every_intermediate_result(reference, assert_same_rounding):
    run = reference("Quant/029")
    for workload in run.workloads:
        i = run.draw(workload)
        linear = Linears(i, glob="{}_global_decode_scale")
        x = i["x"].float().flatten(0, 1)
        gate, up = (linear.bf16(x, name).double() for name in ("gate", "up"))
        hidden = rounded(rounded(silu(gate)) * up)
        (output,) = run.call(i)
        assert_same_rounding(output, linear.bf16(hidden.float(), "down").reshape(output.shape))


def test_nvfp4_expert_keeps_float32_between_its_products(reference, assert_same_rounding):
    run = reference("Quant/032")
    i = run.draw(run.workloads[0])
    linear = Linears(i, glob="{}_global_decode")
    x = i["hidden_states"].float()
    gate, up = linear.f32(x, "gate"), linear.f32(x, "up")
    hidden = gate * torch.sigmoid(gate) * up
    assert_same_rounding(run.call(i)[0], linear.f32(hidden, "down").to(BF16))


def bf16_attention(q, k, v, mask, round_masked):
    """Head by head on [batch, seq, heads, d] with every bfloat16 rounding.

    Returns [batch * seq, heads * d].
    """
    batch, seq, heads, head_dim = q.shape
    group = heads // k.shape[2]
    output = torch.empty(batch, seq, heads, head_dim, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            scores = rounded(q[b, :, h] @ k[b, :, h // group].T)
            scores = rounded(scores * torch.tensor(head_dim**-0.5, dtype=F32).double())
            scores = rounded(scores + mask[b]) if round_masked else scores + mask[b]
            weights = rounded(torch.softmax(scores, dim=-1))
            output[b, :, h] = rounded(weights @ v[b, :, h // group])
    return output.flatten(0, 1).flatten(1)


def test_nvfp4_causal_attention_block(reference, assert_same_rounding):
    run = reference("Quant/019")
    i = run.draw(run.workloads[1])
    linear = Linears(i, glob="{}_global_decode_scale")
    batch, seq, head_dim = i["cos"].shape
    x = i["hidden_states"].float().flatten(0, 1)
    q, k, v = (linear.bf16(x, n).double().reshape(batch, seq, -1, head_dim) for n in "qkv")
    q, k = rope(q, i["cos"], i["sin"]), rope(k, i["cos"], i["sin"])
    mask = torch.full((batch, seq, seq), -torch.inf, dtype=torch.float64).triu(1)
    attended = bf16_attention(q, k, v, mask, round_masked=False)
    (output,) = run.call(i)
    expected = linear.bf16(attended.float(), "o").reshape(output.shape)
    assert_same_rounding(output, expected)


def test_nvfp4_masked_attention_block(reference, assert_same_rounding):
    run = reference("Quant/030")
    i = run.draw(run.workloads[1])
    i |= {n: not_ones(w) for n, w in i.items() if n.endswith("norm_weight")}
    i["rms_norm_eps"] = 0.1
    i["attention_mask"] = torch.randn(
        i["attention_mask"].shape, generator=torch.Generator().manual_seed(9)
    ).to(BF16)
    linear = Linears(i)

    def norm(t, name):
        return rounded(rounded(rms_normalized(t, 0.1)) * i[f"{name}_weight"].double())

    batch, seq, head_dim = i["cos"].shape
    x = norm(i["hidden_states"].double(), "input_layernorm").flatten(0, 1).float()
    q, k, v = (linear.bf16(x, n).double().reshape(batch, seq, -1, head_dim) for n in "qkv")
    q, k = (rope(norm(t, f"{n}_norm"), i["cos"], i["sin"]) for t, n in ((q, "q"), (k, "k")))
    mask = i["attention_mask"].double()[:, 0]
    attended = bf16_attention(q, k, v, mask, round_masked=True)
    (output,) = run.call(i)
    assert_same_rounding(output, linear.bf16(attended.float(), "o").reshape(output.shape))


@pytest.mark.parametrize("causal", [True, False])
def test_nvfp4_attention_with_both_products_quantised(reference, assert_same_rounding, causal):
    run = reference("Quant/031")
    i = run.draw(run.workloads[0])
    if not causal:
        i["attention_mask"] = not_ones(i["attention_mask"])
    q, k, v, mask = i.values()
    group, head_dim = q.shape[1] // k.shape[1], q.shape[3]
    _, _, g_q, q_values = nvfp4(q)
    _, _, g_k, k_values = nvfp4(k.repeat_interleave(group, dim=1))
    scores = rounded(rounded(q_values @ k_values.transpose(-1, -2)) * rounded(g_q * g_k))
    scores = rounded(scores * torch.tensor(head_dim**-0.5, dtype=F32).double())
    scores = rounded(scores + mask.double())
    weights = torch.softmax(scores, dim=-1).to(BF16)
    _, _, g_p, p_values = nvfp4(weights)
    _, _, g_v, v_values = nvfp4(v.transpose(-1, -2).repeat_interleave(group, dim=1).contiguous())
    expected = rounded(p_values @ v_values.transpose(-1, -2)) * rounded(g_p * g_v)
    output, actual_weights = run.call(i)
    assert_same_rounding(actual_weights, weights)
    assert_same_rounding(output, expected.to(BF16))


def test_nvfp4_softmax_router_returns_the_largest_in_order(reference):
    run = reference("Quant/033")
    for workload in run.workloads:
        i = run.draw(workload)
        linear = Linears(i)
        expected = linear.f32(i["hidden_states"].float(), "gate")
        weights, experts, logits = run.call(i)
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
        probabilities = torch.softmax(logits.double(), dim=-1)
        top = probabilities.gather(1, experts)
        assert (top.diff(dim=1) <= 1e-7).all()
        assert (top[:, -1] >= probabilities.sort(dim=1).values[:, -10] - 1e-7).all()
        total = top.sum(dim=1, keepdim=True)
        torch.testing.assert_close(weights.double(), top / total, rtol=2**-8, atol=0)


# ---- On a GPU -------------------------------------------------------------------------------


def on_gpu(value):
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.float4_e2m1fn_x2:
        return value.view(torch.uint8).cuda().view(value.dtype)
    return value.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("problem_id", list_ids("Quant"))
def test_a_gpu_gives_what_a_cpu_gives(reference, assert_matches, problem_id):
    run = reference(problem_id)
    for workload in run.workloads:
        inputs = run.draw(workload)
        expected = run.call(inputs)
        actual = run.call({name: on_gpu(value) for name, value in inputs.items()})
        for a, e in zip(actual, expected, strict=True):
            assert_matches(a.cpu(), e, workload.tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("problem_id", ["Quant/011", "Quant/027"])
def test_top_k_has_the_order_of_an_unsorted_selection_on_a_gpu(reference, problem_id):
    top_k = reference(problem_id).module.top_k_indices
    values = torch.randint(40, (512, 256), device="cuda").float()
    for k in (4, 6, 8):
        unsorted = values.topk(k, dim=-1, sorted=False).indices
        assert torch.equal(top_k(values, k), unsorted)
