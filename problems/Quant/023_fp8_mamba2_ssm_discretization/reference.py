"""Mamba-2 discretisation: dt by an FP8 linear, then dA = exp(dt * A) and dB = dt * B."""

import torch

BLOCK = 128
E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-12
HEAD_DIM = 128


def block_scale(blocks: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Decode scale of each float32 block, whose axes are `dims`: largest magnitude / 448."""
    # Times the rounded reciprocal: how CUDA divides by a number, here on every device.
    scale = blocks.abs().amax(dim=dims, keepdim=True) * (1.0 / E4M3_MAX)
    return scale.clamp(min=SMALLEST_SCALE)


def fake_quantize(blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float32 blocks rounded to float8_e4m3fn in units of their scale, and dequantised."""
    rounded = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return rounded.float() * scale


def fp8_rows(x: torch.Tensor) -> torch.Tensor:
    """x [.., K] in FP8 with a scale for every 128 values of a row; dequantised, float32."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    return fake_quantize(blocks, block_scale(blocks, dims=(-1,))).flatten(-2)


def fp8_tiles(weight: torch.Tensor) -> torch.Tensor:
    """weight [N, K] in FP8 with a scale for every tile of 128 x 128; dequantised, float32."""
    tiles = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return fake_quantize(tiles, block_scale(tiles, dims=(1, 3))).flatten(2).flatten(0, 1)


def run(
    hidden_states: torch.Tensor,
    B: torch.Tensor,
    dt_proj_weight: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    time_step_limit_min: float,
    time_step_limit_max: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The linear's result is rounded to bf16; everything after is float32.

    Args:
        hidden_states: [batch_size, seq_len, num_heads] bf16.
        B: [batch_size, seq_len, num_groups, state_size] bf16; a group serves consecutive heads.
        dt_proj_weight: [num_heads, num_heads] bf16; dt_bias: [num_heads] bf16.
        A_log: [num_heads] f32.
        time_step_limit_min, time_step_limit_max: bounds of dt.

    Returns:
        Expanded views: dt [batch_size, seq_len, num_heads, head_dim] bf16, and dA and dB
        [batch_size, seq_len, num_heads, head_dim, state_size] f32.
    """
    batch_size, seq_len, num_heads = hidden_states.shape
    num_groups, state_size = B.shape[2:]
    projected = fp8_rows(hidden_states) @ fp8_tiles(dt_proj_weight).T + dt_bias.float()
    projected = projected.to(hidden_states.dtype).float()
    dt = torch.nn.functional.softplus(projected).clamp(time_step_limit_min, time_step_limit_max)
    decay = torch.exp(dt * -torch.exp(A_log))
    heads_b = B.float().repeat_interleave(num_heads // num_groups, dim=2)
    step = dt.unsqueeze(-1) * heads_b
    shape = (batch_size, seq_len, num_heads, HEAD_DIM, state_size)
    return (
        dt.to(hidden_states.dtype).unsqueeze(-1).expand(shape[:-1]),
        decay[..., None, None].expand(shape),
        step.unsqueeze(3).expand(shape),
    )


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Standard normals, a bias of ones, A_log = log(1, 2, ...), limits that limit nothing."""
    batch_size, seq_len = axes_and_scalars["batch_size"], axes_and_scalars["seq_len"]
    num_heads, num_groups = axes_and_scalars["num_heads"], axes_and_scalars["n_groups"]
    state_size = axes_and_scalars["ssm_state_size"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    heads = torch.arange(1, num_heads + 1, dtype=torch.float32, device=device)
    return {
        "hidden_states": normal(batch_size, seq_len, num_heads),
        "B": normal(batch_size, seq_len, num_groups, state_size),
        "dt_proj_weight": normal(num_heads, num_heads),
        "dt_bias": torch.ones(num_heads, dtype=torch.bfloat16, device=device),
        "A_log": torch.log(heads),
        "time_step_limit_min": 0.0,
        "time_step_limit_max": float("inf"),
    }
