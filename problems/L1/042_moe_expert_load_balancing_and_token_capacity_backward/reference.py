"""Backward of expert counts and load-balancing loss with respect to the assignment mask."""

import torch


def run(
    grad_tokens_per_expert: torch.Tensor,
    grad_expert_mask: torch.Tensor,
    grad_load_balance_loss: torch.Tensor,
    topk_idx: torch.Tensor,
    expert_mask: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    training: torch.Tensor,
) -> torch.Tensor:
    """The mask's own gradient plus one row for all tokens, in float32.

    Args:
        grad_tokens_per_expert: [n_routed_experts] f32.
        grad_expert_mask: [batch_seq_len, n_routed_experts] f32.
        grad_load_balance_loss: [1] f32, counts only in training.
        topk_idx: [batch_seq_len, num_experts_per_tok] int64; its shape alone is needed.
        expert_mask: [batch_seq_len, n_routed_experts] int64; not needed.
        tokens_per_expert: [n_routed_experts] int32; not needed.
        training: [1] bool.

    Returns:
        [batch_seq_len, n_routed_experts] f32.
    """
    num_experts = grad_tokens_per_expert.shape[0]
    # Uniform routing is the aim: each expert's share of the assignments weighs 1 / num_experts.
    per_assignment = num_experts * (1 / num_experts) / topk_idx.numel()
    from_loss = (grad_load_balance_loss.double() * per_assignment).float()
    row = grad_tokens_per_expert + torch.where(training, from_loss, 0.0)
    return grad_expert_mask + row


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal gradients, experts drawn independently (a token may name one twice), training on."""
    batch_seq_len = axes_and_scalars["batch_seq_len"]
    num_experts = axes_and_scalars["n_routed_experts"]
    per_token = axes_and_scalars["num_experts_per_tok"]
    topk_idx = torch.randint(0, num_experts, (batch_seq_len, per_token), device=device)
    expert_mask = torch.zeros(batch_seq_len, num_experts, dtype=torch.int64, device=device)
    expert_mask.scatter_(1, topk_idx, 1)
    return {
        "grad_tokens_per_expert": torch.randn(num_experts, device=device),
        "grad_expert_mask": torch.randn(batch_seq_len, num_experts, device=device),
        "grad_load_balance_loss": torch.randn(1, device=device),
        "topk_idx": topk_idx,
        "expert_mask": expert_mask,
        "tokens_per_expert": expert_mask.sum(dim=0).int(),
        "training": torch.ones(1, dtype=torch.bool, device=device),
    }
