"""Backward of one SwiGLU expert of a mixture, on the tokens routed to it."""

import torch
import torch.nn.functional as F


def run(
    grad_output: torch.Tensor,
    token_indices: torch.Tensor,
    selected_tokens: torch.Tensor,
    w1_output: torch.Tensor,
    gate_output: torch.Tensor,
    up_output: torch.Tensor,
    gated_output: torch.Tensor,
    expert_output: torch.Tensor,
    selected_weights: torch.Tensor,
    w1_weight: torch.Tensor,
    w2_weight: torch.Tensor,
    w3_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of out[idx] = r * (silu(x w1^T) * (x w3^T)) w2^T, in float32, rounded once each.

    Args:
        grad_output: [batch_seq_len, hidden_dim] bf16, for all tokens.
        token_indices: [num_tokens] int64, the expert's tokens, no two the same.
        selected_tokens: [num_tokens, hidden_dim] bf16, x.
        w1_output, gate_output, up_output, gated_output: [num_tokens, ffn_dim] bf16, as saved by the
            forward: x w1^T, its SiLU, x w3^T and the product of the last two.
        expert_output: [num_tokens, hidden_dim] bf16, before the routing weight.
        selected_weights: [num_tokens] bf16, the routing weights r.
        w1_weight, w3_weight: [ffn_dim, hidden_dim] bf16.
        w2_weight: [hidden_dim, ffn_dim] bf16.

    Returns:
        Gradients of the hidden states [batch_seq_len, hidden_dim] and of the routing weights
        [batch_seq_len], zero for tokens of other experts, and of w1, w2 and w3; all bf16.
    """
    dtype = grad_output.dtype
    x, w1_out = selected_tokens.float(), w1_output.float()

    grad_selected = grad_output[token_indices].float()
    grad_routing = (grad_selected * expert_output.float()).sum(dim=-1)
    grad_expert = grad_selected * selected_weights.float().unsqueeze(-1)

    grad_w2 = grad_expert.T @ gated_output.float()
    grad_gated = grad_expert @ w2_weight.float()
    grad_gate = grad_gated * up_output.float()
    grad_up = grad_gated * gate_output.float()

    grad_w3 = grad_up.T @ x
    sigmoid = torch.sigmoid(w1_out)
    grad_w1_out = grad_gate * sigmoid * (1 + w1_out * (1 - sigmoid))
    grad_w1 = grad_w1_out.T @ x
    grad_x = grad_w1_out @ w1_weight.float() + grad_up @ w3_weight.float()

    grad_hidden_states = torch.zeros_like(grad_output)
    grad_hidden_states[token_indices] = grad_x.to(dtype)
    grad_routing_weights = grad_output.new_zeros(grad_output.shape[0])
    grad_routing_weights[token_indices] = grad_routing.to(dtype)
    return (
        grad_hidden_states,
        grad_routing_weights,
        grad_w1.to(dtype),
        grad_w2.to(dtype),
        grad_w3.to(dtype),
    )


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """A random sorted subset of the tokens; w1_output, up_output and expert_output independent."""
    batch_seq_len = axes_and_scalars["batch_seq_len"]
    num_tokens = axes_and_scalars["num_tokens"]
    hidden_dim, ffn_dim = axes_and_scalars["hidden_dim"], axes_and_scalars["ffn_dim"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    w1_output, up_output = normal(num_tokens, ffn_dim), normal(num_tokens, ffn_dim)
    gate_output = F.silu(w1_output.float()).bfloat16()
    return {
        "grad_output": normal(batch_seq_len, hidden_dim),
        "token_indices": torch.randperm(batch_seq_len, device=device)[:num_tokens].sort().values,
        "selected_tokens": normal(num_tokens, hidden_dim),
        "w1_output": w1_output,
        "gate_output": gate_output,
        "up_output": up_output,
        "gated_output": gate_output * up_output,
        "expert_output": normal(num_tokens, hidden_dim),
        "selected_weights": torch.rand(num_tokens, dtype=torch.bfloat16, device=device),
        "w1_weight": normal(ffn_dim, hidden_dim) * 0.02,
        "w2_weight": normal(hidden_dim, ffn_dim) * 0.02,
        "w3_weight": normal(ffn_dim, hidden_dim) * 0.02,
    }
