"""Heads of SAM-HQ's mask decoder: an IoU predictor and a hypernetwork for each mask token."""

import torch
import torch.nn.functional as F


def mlp(
    x: torch.Tensor,
    in_weight: torch.Tensor,
    in_bias: torch.Tensor,
    hidden_weight: torch.Tensor,
    hidden_bias: torch.Tensor,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor,
) -> torch.Tensor:
    """Three linear layers with ReLU between them."""
    x = F.relu(F.linear(x, in_weight, in_bias))
    x = F.relu(F.linear(x, hidden_weight, hidden_bias))
    return F.linear(x, out_weight, out_bias)


def run(
    iou_token_out: torch.Tensor,
    mask_tokens_out: torch.Tensor,
    iou_proj_in_weight: torch.Tensor,
    iou_proj_in_bias: torch.Tensor,
    iou_hidden_weight: torch.Tensor,
    iou_hidden_bias: torch.Tensor,
    iou_proj_out_weight: torch.Tensor,
    iou_proj_out_bias: torch.Tensor,
    hyper0_proj_in_weight: torch.Tensor,
    hyper0_proj_in_bias: torch.Tensor,
    hyper0_hidden_weight: torch.Tensor,
    hyper0_hidden_bias: torch.Tensor,
    hyper0_proj_out_weight: torch.Tensor,
    hyper0_proj_out_bias: torch.Tensor,
    hyper1_proj_in_weight: torch.Tensor,
    hyper1_proj_in_bias: torch.Tensor,
    hyper1_hidden_weight: torch.Tensor,
    hyper1_hidden_bias: torch.Tensor,
    hyper1_proj_out_weight: torch.Tensor,
    hyper1_proj_out_bias: torch.Tensor,
    hyper2_proj_in_weight: torch.Tensor,
    hyper2_proj_in_bias: torch.Tensor,
    hyper2_hidden_weight: torch.Tensor,
    hyper2_hidden_bias: torch.Tensor,
    hyper2_proj_out_weight: torch.Tensor,
    hyper2_proj_out_bias: torch.Tensor,
    hyper3_proj_in_weight: torch.Tensor,
    hyper3_proj_in_bias: torch.Tensor,
    hyper3_hidden_weight: torch.Tensor,
    hyper3_hidden_bias: torch.Tensor,
    hyper3_proj_out_weight: torch.Tensor,
    hyper3_proj_out_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Five independent MLPs in float32.

    Args:
        iou_token_out: [batch_size, point_batch_size, hidden_size] f32.
        mask_tokens_out: [batch_size, point_batch_size, 4, hidden_size] f32, one token a mask.
        iou_*: weights [out, in] and biases [out] of the IoU head, f32: hidden_size to
            iou_head_hidden_dim, to the same, to 4.
        hyper{i}_*: likewise of mask token i: hidden_size to itself, to itself, to output_channels.

    Returns:
        IoU scores [batch_size, point_batch_size, 4] f32, and the masks' weights
        [batch_size, point_batch_size, 4, output_channels] f32.
    """
    iou_scores = mlp(
        iou_token_out,
        iou_proj_in_weight, iou_proj_in_bias,
        iou_hidden_weight, iou_hidden_bias,
        iou_proj_out_weight, iou_proj_out_bias,
    )  # fmt: skip
    hypernetworks = (
        (
            hyper0_proj_in_weight, hyper0_proj_in_bias,
            hyper0_hidden_weight, hyper0_hidden_bias,
            hyper0_proj_out_weight, hyper0_proj_out_bias,
        ),
        (
            hyper1_proj_in_weight, hyper1_proj_in_bias,
            hyper1_hidden_weight, hyper1_hidden_bias,
            hyper1_proj_out_weight, hyper1_proj_out_bias,
        ),
        (
            hyper2_proj_in_weight, hyper2_proj_in_bias,
            hyper2_hidden_weight, hyper2_hidden_bias,
            hyper2_proj_out_weight, hyper2_proj_out_bias,
        ),
        (
            hyper3_proj_in_weight, hyper3_proj_in_bias,
            hyper3_hidden_weight, hyper3_hidden_bias,
            hyper3_proj_out_weight, hyper3_proj_out_bias,
        ),
    )  # fmt: skip
    mask_tokens = mask_tokens_out.unbind(dim=2)
    hyper_weights = torch.stack(
        [mlp(token, *weights) for token, weights in zip(mask_tokens, hypernetworks, strict=True)],
        dim=2,
    )
    return iou_scores, hyper_weights
