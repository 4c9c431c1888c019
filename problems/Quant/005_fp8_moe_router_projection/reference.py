"""Router logits: pre-quantised FP8 activations times a router weight padded to 128 experts."""

import torch

BLOCK = 128
E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-12
NUM_EXPERTS = 64


def quantize(blocks: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 blocks, whose axes are `dims`, as float8_e4m3fn and their float32 decode scales."""
    # Times the rounded reciprocal: how CUDA divides by a number, here on every device.
    scale = blocks.abs().amax(dim=dims, keepdim=True) * (1.0 / E4M3_MAX)
    scale = scale.clamp(min=SMALLEST_SCALE)
    rounded = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return rounded, scale


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [.., K] float32 as FP8, and the scales [.., K / 128]."""
    rounded, scale = quantize(x.unflatten(-1, (-1, BLOCK)), dims=(-1,))
    return rounded.flatten(-2), scale.squeeze(-1)


def quantize_tiles(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] float32 as FP8, and the scales [N / 128, K / 128]."""
    tiles = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    rounded, scale = quantize(tiles, dims=(1, 3))
    return rounded.flatten(2).flatten(0, 1), scale[:, 0, :, 0]


def run(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    scale_hidden: torch.Tensor,
    scale_weight: torch.Tensor,
) -> torch.Tensor:
    """Contraction of the dequantised operands in float32, rounded to bf16.

    Args:
        hidden_states: [M, hidden_size] e4m3.
        gate_weight: [128, hidden_size] e4m3, of which the first 64 rows are experts.
        scale_hidden: [M, hidden_size / 128] f32.
        scale_weight: [1, hidden_size / 128] f32.

    Returns:
        [M, 64] bf16.
    """
    blocks = hidden_states.float().unflatten(-1, (-1, BLOCK))
    activation = (blocks * scale_hidden.unsqueeze(-1)).flatten(-2)
    experts = gate_weight[:NUM_EXPERTS].float().unflatten(-1, (-1, BLOCK))
    weight = (experts * scale_weight.unsqueeze(-1)).flatten(-2)
    return (activation @ weight.T).to(torch.bfloat16)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal bf16 activations and weight; the weight padded with rows of zeros; both quantised."""
    m, hidden = axes_and_scalars["M"], axes_and_scalars["hidden_size"]
    activation = torch.randn(m, hidden, dtype=torch.bfloat16, device=device)
    experts = torch.randn(NUM_EXPERTS, hidden, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(axes_and_scalars["padded_experts"], hidden, device=device)
    weight[:NUM_EXPERTS] = experts.float()
    hidden_states, scale_hidden = quantize_rows(activation.float())
    gate_weight, scale_weight = quantize_tiles(weight)
    return {
        "hidden_states": hidden_states,
        "gate_weight": gate_weight,
        "scale_hidden": scale_hidden,
        "scale_weight": scale_weight,
    }
