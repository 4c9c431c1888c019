"""Combine step of a mixture of experts: rows of expert outputs added onto their tokens."""

import torch


def run(
    final_hidden_states: torch.Tensor, expert_outputs: torch.Tensor, token_indices: torch.Tensor
) -> torch.Tensor:
    """Scatter-add in bfloat16; each addition rounds, in no particular order.

    Args:
        final_hidden_states: [tokens, hidden_size] bf16, what is added to; left as it is.
        expert_outputs: [rows, hidden_size] bf16.
        token_indices: [rows] int64, the token each row goes to.

    Returns:
        [tokens, hidden_size] bf16.
    """
    return torch.index_add(final_hidden_states, 0, token_indices, expert_outputs)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal rows, and destinations drawn independently: a token gets 0, 1, 2, ... rows."""
    tokens = axes_and_scalars["batch_size"] * axes_and_scalars["seq_len"]
    rows = tokens * axes_and_scalars["num_experts_per_tok"]
    hidden_size = axes_and_scalars["hidden_size"]
    return {
        "final_hidden_states": torch.randn(
            tokens, hidden_size, dtype=torch.bfloat16, device=device
        ),
        "expert_outputs": torch.randn(rows, hidden_size, dtype=torch.bfloat16, device=device),
        "token_indices": torch.randint(0, tokens, (rows,), device=device),
    }
