"""Drawing `random` inputs: each rule's distribution, fp4, sets that differ, strided views."""

import math

import pytest
import torch

from sol_gym import draws
from sol_gym.draws import fill_random, pack_e2m1, rule_for, torch_dtype
from sol_gym.errors import ProblemError


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(name, dtype, shape, n=1, seed=0):
    out = torch.empty((n, *shape), dtype=torch_dtype(dtype))
    fill_random(out, name, dtype, generator(seed))
    return out


def assert_normal(values, scale=1.0):
    """Mean, deviation and tails of a normal sample of at least 10,000 values."""
    values = values.double() / scale
    assert values.numel() >= 10_000
    assert abs(values.mean()) < 5 / math.sqrt(values.numel())
    assert abs(values.std() - 1) < 0.05
    assert abs((values.abs() < 1).double().mean() - 0.6827) < 0.03
    assert values.abs().max() > 3


# ---- Rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "rule"),
    [
        ("x", "float8_e4m3fn", (4, 4), "float8"),
        ("norm_weight", "float8_e5m2", (4,), "float8"),
        ("weight", "float4_e2m1fn_x2", (4, 4), "float4"),
        ("attention_mask", "bool", (4, 4), "coin"),
        ("x", "int8", (4,), "int8"),
        ("x", "uint8", (4,), "uint8"),
        ("attention_mask", "int64", (4, 4), "integer"),
        ("position_ids", "int32", (4,), "integer"),
        ("norm_weight", "bfloat16", (4,), "norm weight"),
        ("norm1_weight", "float32", (8, 4), "norm weight"),
        ("layer_norm2_weight", "float32", (4,), "norm weight"),
        ("input_layernorm_weight", "float16", (4,), "norm weight"),
        ("layernorm_weight", "float32", (4,), "norm weight"),
        ("norm1_context_weight", "float32", (8, 4), "projection"),
        ("enorm_weight", "bfloat16", (4,), "normal"),
        ("ln_weight", "float32", (4,), "normal"),
        ("resnet1_norm1_bias", "float32", (4,), "norm bias"),
        ("post_attention_layernorm_bias", "bfloat16", (4,), "norm bias"),
        ("q_proj_bias", "bfloat16", (4,), "normal"),
        ("attention_mask", "float32", (2, 4, 4), "causal mask"),
        ("causal_mask", "bfloat16", (4, 4), "causal mask"),
        ("attention_mask", "float32", (2, 5), "binary mask"),
        ("x_mask", "float32", (4, 4), "binary mask"),
        ("causal_mask", "float32", (4, 5), "normal"),
        ("mask", "float32", (4, 4), "normal"),
        ("cos", "float32", (4,), "cosine"),
        ("rope_cos", "float32", (4,), "cosine"),
        ("grad_cos", "float32", (4,), "normal"),
        ("sin_cached", "float32", (4,), "sine"),
        ("q_rstd", "float32", (4, 4), "positive"),
        ("x_var", "float32", (4,), "positive"),
        ("A_cumsum", "bfloat16", (4, 4), "cumulative decay"),
        ("A_log", "bfloat16", (4,), "log decay rate"),
        ("A", "float16", (4, 4), "decay rate"),
        ("g", "bfloat16", (4, 4), "log gate"),
        ("routing_weights", "float32", (4, 4), "softmax"),
        ("routing_weight", "float32", (4, 4), "projection"),
        ("weight", "float32", (4, 4), "projection"),
        ("weight", "float32", (4,), "normal"),
        ("weight1", "float32", (4, 4), "projection"),
        ("weight_q", "float32", (4, 4), "normal"),
        ("gate_up_proj", "bfloat16", (2, 4, 4), "projection"),
        ("expert_up_projs", "bfloat16", (2, 4, 4), "projection"),
        ("unembed_proj_1", "bfloat16", (4, 4), "normal"),
        ("pooled_projections", "float32", (4, 4), "normal"),
        ("hidden_states", "bfloat16", (4, 4), "normal"),
        ("gate", "bfloat16", (), "normal"),
    ],
)
def test_the_first_rule_that_applies_wins(name, dtype, shape, rule):
    assert rule_for(name, dtype, shape).name == rule


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_an_ordinary_input_is_standard_normal(dtype):
    assert_normal(draw("hidden_states", dtype, (100, 100), n=2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_projection_is_scaled_by_its_last_axis(dtype):
    assert_normal(draw("o_proj_weight", dtype, (160, 64), n=2), scale=1 / 8)


def test_norm_weights_are_ones_and_norm_biases_zeros():
    assert (draw("k_norm_weight", "bfloat16", (64,), n=3) == 1).all()
    assert (draw("group_norm_bias", "float32", (64,), n=3) == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_causal_mask_hides_what_is_above_the_diagonal(dtype):
    mask = draw("attention_mask", dtype, (3, 1, 7, 7), n=2)
    above = torch.ones(7, 7).triu(1).bool().expand(mask.shape)
    assert (mask[above] == torch.finfo(mask.dtype).min).all()
    assert (mask[~above] == 0).all()


@pytest.mark.parametrize("name", ["attention_mask", "x_mask", "drop_mask"])
def test_a_binary_mask_is_zero_or_one_at_random(name):
    mask = draw(name, "bfloat16", (100, 101)).float()
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert abs(mask.mean() - 0.5) < 0.03


def test_cos_and_sin_are_of_clipped_independent_angles():
    cos, sin = draw("cos", "float32", (200, 200)), draw("sin", "float32", (200, 200))
    # E[cos z] = exp(-1/2), E[sin^2 z] = (1 - exp(-2)) / 2 for a standard normal z.
    assert abs(cos.mean() - math.exp(-0.5)) < 0.02
    assert abs(sin.mean()) < 0.02
    assert abs(sin.square().mean() - (1 - math.exp(-2)) / 2) < 0.02
    angle = torch.acos(cos)
    assert abs((angle > 3.14).double().mean() - 0.0017) < 0.001
    independent_sin = draw("sin", "float32", (200, 200), seed=1)
    assert (cos.square() + independent_sin.square() - 1).abs().max() > 0.5


def test_a_deviation_is_positive_and_away_from_zero():
    rstd = draw("k_rstd", "float32", (100, 101))
    assert rstd.min() >= 0.1
    assert abs(rstd.mean() - (math.sqrt(2 / math.pi) + 0.1)) < 0.03


def test_cumulative_decay_falls_along_the_last_axis():
    a = draw("A_cumsum", "float32", (20, 500), n=2)
    steps = a.diff(dim=-1)
    assert (steps <= 0).all() and (steps >= -0.1 - 1e-5).all()
    assert (a[..., 0] <= 0).all() and (a[..., 0] >= -0.1).all()
    assert abs(a[..., -1].mean() / -25 - 1) < 0.05


@pytest.mark.parametrize(
    ("name", "low", "high"), [("A_log", -5, -1), ("A", -1, -0.001), ("g", -5, 0)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_decays_are_uniform(name, low, high, dtype):
    values = draw(name, dtype, (100, 101)).double()
    width = high - low
    assert low <= values.min() < low + 0.01 * width
    assert high - 0.01 * width < values.max() <= high + 1e-3
    assert abs(values.mean() - (low + high) / 2) < 0.02 * width
    assert abs(values.std() - width / math.sqrt(12)) < 0.02 * width


@pytest.mark.parametrize("name", ["attn_weights", "attention_weights", "p_attn"])
def test_attention_weights_sum_to_one(name):
    weights = draw(name, "float32", (10, 64), n=2)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 10))
    assert weights.min() > 0
    assert weights.max() > 3 * weights.mean()


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64"])
def test_integers_are_uniform_below_1024(dtype):
    values = draw("position_ids", dtype, (200, 200))
    assert (values.min(), values.max()) == (-1024, 1023)
    assert abs(values.double().mean()) < 20


def test_bytes_cover_their_range_and_coins_are_fair():
    assert len(draw("x", "int8", (100, 100)).unique()) == 256
    assert len(draw("x", "uint8", (100, 100)).unique()) == 256
    assert abs(draw("mask", "bool", (100, 100)).double().mean() - 0.5) < 0.03


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_a_clipped_normal(dtype):
    values = draw("weight", dtype, (100, 200)).double()
    assert values.abs().max() == 2
    assert abs((values.abs() == 2).double().mean() - 0.05) < 0.03
    assert abs(values.mean()) < 0.05
    assert abs((values.abs() < 1).double().mean() - 0.66) < 0.06


# ---- fp4 ------------------------------------------------------------------------------------

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest_code(value):
    """Independent oracle: nearest magnitude, ties to the even code; the sign is bit 3."""
    distance = [abs(abs(value) - m) for m in E2M1]
    best = min(distance)
    code = min((c for c in range(8) if distance[c] == best), key=lambda c: c % 2)
    return code | (8 if value < 0 else 0)


def test_fp4_rounds_to_nearest_with_ties_to_the_even_code():
    values = [i / 16 for i in range(-112, 112)] + [100.0, -100.0]
    packed = pack_e2m1(torch.tensor(values)).tolist()
    codes = [code for byte in packed for code in (byte & 15, byte >> 4)]
    assert codes == [nearest_code(v) for v in values]


def test_the_even_index_is_in_the_low_nibble():
    assert pack_e2m1(torch.tensor([[0.5, 6.0], [-6.0, 0.0]])).tolist() == [[0x71], [0x0F]]


def test_random_fp4_is_a_rounded_normal():
    packed = draw("weight", "float4_e2m1fn_x2", (100, 100), n=2).view(torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4])
    magnitude = torch.tensor(E2M1)[(codes & 7).int()]
    # P(|z| < 0.25) and P(2.5 <= |z| < 3.5) of a standard normal.
    assert abs((magnitude == 0).double().mean() - 0.1974) < 0.02
    assert abs((magnitude == 3).double().mean() - 0.0120) < 0.005
    assert abs((codes >= 8).double().mean() - 0.5) < 0.02
    assert not torch.equal(codes[0], codes[1])


def test_fp4_can_be_filled_as_bytes():
    out = torch.empty(2, 3, 4, dtype=torch.uint8)
    fill_random(out, "weight", "float4_e2m1fn_x2", generator())
    same = draw("weight", "float4_e2m1fn_x2", (3, 4), n=2)
    assert torch.equal(out, same.view(torch.uint8))


# ---- Sets and views -------------------------------------------------------------------------

VARIED = [
    ("x", "bfloat16"), ("o_proj_weight", "float32"), ("cos", "bfloat16"), ("rstd", "float32"),
    ("A_cumsum", "float32"), ("A", "float16"), ("attn_weights", "bfloat16"), ("x_mask", "float32"),
    ("ids", "int64"), ("x", "bool"), ("x", "float8_e4m3fn"), ("x", "float4_e2m1fn_x2"),
]  # fmt: skip


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize(("name", "dtype"), VARIED)
def test_a_seed_repeats_and_sets_differ(name, dtype):
    first = as_bytes(draw(name, dtype, (8, 16), n=3))
    assert torch.equal(first, as_bytes(draw(name, dtype, (8, 16), n=3)))
    assert not torch.equal(first, as_bytes(draw(name, dtype, (8, 16), n=3, seed=1)))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])


@pytest.mark.parametrize(
    ("name", "dtype"), [*VARIED, ("norm_weight", "float32"), ("norm_bias", "float32")]
)
def test_a_strided_view_is_filled_and_nothing_beside_it(name, dtype):
    torch_type = torch_dtype(dtype)
    arena = torch.full((3, 4096), 0xAB, dtype=torch.uint8)
    nbytes = 8 * 16 * torch.empty(0, dtype=torch_type).element_size()
    view = arena[:, 256 : 256 + nbytes].view(torch_type).unflatten(1, (8, 16))
    fill_random(view, name, dtype, generator())
    assert (arena[:, :256] == 0xAB).all()
    assert (arena[:, 256 + nbytes :] == 0xAB).all()
    sets = as_bytes(view)
    assert all((s != 0xAB).any() for s in sets)
    if "norm" not in name:
        assert not torch.equal(sets[0], sets[2])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("cos", "float32"),
        ("attn_weights", "float32"),
        ("x", "float8_e4m3fn"),
        ("x", "float4_e2m1fn_x2"),
        ("attention_mask", "float32"),
        ("A_cumsum", "float32"),
    ],
)
def test_chunks_cover_everything(monkeypatch, name, dtype):
    """With chunks far smaller than a set, the same facts hold for every element."""
    monkeypatch.setattr(draws, "_CHUNK_ELEMENTS", 50)
    out = torch.full((2, 3, 40, 40), 0xAB, dtype=torch.uint8)
    if dtype != "float4_e2m1fn_x2":
        out = torch.full((2, 3, 40, 40), 77.0).to(torch_dtype(dtype))
    fill_random(out, name, dtype, generator())
    if name == "attn_weights":
        assert torch.allclose(out.sum(-1), torch.ones(2, 3, 40))
    elif name == "A_cumsum":
        assert (out.diff(dim=-1) <= 0).all()
        assert (out[..., -1] < -1).all()
    elif name == "attention_mask":
        assert torch.equal(out == 0, torch.ones(40, 40).tril().bool().expand(out.shape))
    elif dtype == "float4_e2m1fn_x2":
        assert (out == 0xAB).double().mean() < 0.02
        assert len(out.unique()) > 100
    else:
        assert out.float().abs().max() <= 2


def test_empty_tensors_are_left_alone():
    for name in ("x", "cos", "attn_weights", "attention_mask"):
        assert draw(name, "float32", (0, 0)).numel() == 0


def test_a_tensor_of_the_wrong_dtype_is_refused():
    with pytest.raises(ProblemError, match=r"'x' is bfloat16, but .* torch\.float32"):
        fill_random(torch.empty(1, 4), "x", "bfloat16", generator())


def test_a_dtype_torch_lacks_is_named():
    with pytest.raises(
        ProblemError, match="no dtype 'float4_e2m1'; packed fp4 is float4_e2m1fn_x2"
    ):
        torch_dtype("float4_e2m1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("name", "dtype"), VARIED)
def test_every_rule_draws_on_the_gpu(name, dtype):
    out = torch.empty(3, 100, 64, dtype=torch_dtype(dtype), device="cuda")
    fill_random(out, name, dtype, torch.Generator("cuda").manual_seed(0))
    again = torch.empty(3, 100, 64, dtype=torch_dtype(dtype), device="cuda")
    fill_random(again, name, dtype, torch.Generator("cuda").manual_seed(0))
    sets = as_bytes(out)
    assert torch.equal(sets, as_bytes(again))
    assert not torch.equal(sets[0], sets[1]) and not torch.equal(sets[1], sets[2])
    if name == "x" and dtype == "bfloat16":
        assert_normal(out.cpu())
