"""Input block of multi-token prediction: next token's embedding beside the hidden state."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis: statistics in float32, rounded before and after the weight."""
    x32 = x.float()
    normalized = x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normalized.to(x.dtype)


def run(
    input_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    word_embeddings: torch.Tensor,
    enorm_weight: torch.Tensor,
    hnorm_weight: torch.Tensor,
    eh_proj_weight: torch.Tensor,
    rms_norm_eps: float,
) -> torch.Tensor:
    """Embed the ids one step ahead, normalise both halves, project their concatenation.

    Args:
        input_ids: [batch_size, seq_len] int64.
        hidden_states: [batch_size, seq_len, hidden_size] bf16.
        word_embeddings: [vocab_size, hidden_size] bf16.
        enorm_weight, hnorm_weight: [hidden_size] bf16, of the embedding's and the state's norm.
        eh_proj_weight: [hidden_size, 2 * hidden_size] bf16.
        rms_norm_eps: added to the mean square.

    Returns:
        [batch_size, seq_len, hidden_size] bf16.
    """
    next_ids = F.pad(input_ids[:, 1:], (0, 1))  # beyond the end stands token 0
    embedded = rms_norm(F.embedding(next_ids, word_embeddings), enorm_weight, rms_norm_eps)
    hidden = rms_norm(hidden_states, hnorm_weight, rms_norm_eps)
    return F.linear(torch.cat((embedded, hidden), dim=-1), eh_proj_weight)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Uniform ids, normal states and embeddings, norm weights near one, a small projection."""
    batch_size, seq_len = axes_and_scalars["batch_size"], axes_and_scalars["seq_len"]
    hidden_size, vocab_size = axes_and_scalars["hidden_size"], axes_and_scalars["vocab_size"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    return {
        "input_ids": torch.randint(0, vocab_size, (batch_size, seq_len), device=device),
        "hidden_states": normal(batch_size, seq_len, hidden_size),
        "word_embeddings": normal(vocab_size, hidden_size),
        "enorm_weight": 1.0 + 0.01 * normal(hidden_size),
        "hnorm_weight": 1.0 + 0.01 * normal(hidden_size),
        "eh_proj_weight": 0.02 * normal(hidden_size, 2 * hidden_size),
        "rms_norm_eps": 1e-6,
    }
