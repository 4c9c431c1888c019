"""Stable sort of (token, slot) pairs by their expert, with the experts' boundaries."""

import torch

NUM_EXPERTS = 256


def run(topk_idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in the flattened assignment, by expert and then by position.

    Args:
        topk_idx: [batch_size, seq_len, num_experts_per_tok] int32 in [0, 256).

    Returns:
        Positions [batch_size * seq_len * num_experts_per_tok] int32, and offsets [257] int32:
        expert e owns positions[offsets[e]:offsets[e + 1]].
    """
    sorted_experts, positions = torch.sort(topk_idx.flatten(), stable=True)
    experts = torch.arange(NUM_EXPERTS + 1, dtype=topk_idx.dtype, device=topk_idx.device)
    # The number of entries below expert e is where e begins.
    offsets = torch.searchsorted(sorted_experts, experts, out_int32=True)
    return positions.int(), offsets


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Experts drawn uniformly and independently; a token may name one twice."""
    shape = tuple(axes_and_scalars[n] for n in ("batch_size", "seq_len", "num_experts_per_tok"))
    num_experts = axes_and_scalars["num_experts"]
    return {"topk_idx": torch.randint(0, num_experts, shape, dtype=torch.int32, device=device)}
