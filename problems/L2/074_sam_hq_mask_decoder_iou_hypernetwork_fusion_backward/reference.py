"""Backward of the IoU head and the four hypernetworks of a SAM-HQ mask decoder."""

import torch


def mlp_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    hidden1: torch.Tensor,
    relu1: torch.Tensor,
    hidden2: torch.Tensor,
    relu2: torch.Tensor,
    weight_in: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_out: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Backward of Linear - ReLU - Linear - ReLU - Linear over rows, with any leading axes.

    Args:
        grad: [..., rows, out]; x: [..., rows, in].
        hidden1, hidden2: [..., rows, hidden], before the ReLUs: their signs are the masks.
        relu1, relu2: [..., rows, hidden], after the ReLUs: for the weight gradients.
        weight_in, weight_hidden, weight_out: [..., out features, in features].

    Returns:
        Gradients of x, then of weight and bias of the first, second and third layer.
    """
    grad_hidden2 = grad @ weight_out * (hidden2 > 0)
    grad_hidden1 = grad_hidden2 @ weight_hidden * (hidden1 > 0)
    return (
        grad_hidden1 @ weight_in,
        grad_hidden1.mT @ x,
        grad_hidden1.sum(dim=-2),
        grad_hidden2.mT @ relu1,
        grad_hidden2.sum(dim=-2),
        grad.mT @ relu2,
        grad.sum(dim=-2),
    )


def run(
    grad_iou_scores: torch.Tensor,
    grad_hyper_weights: torch.Tensor,
    iou_token_out: torch.Tensor,
    mask_tokens_out: torch.Tensor,
    iou_proj_in_weight: torch.Tensor,
    iou_proj_in_bias: torch.Tensor,
    iou_hidden_weight: torch.Tensor,
    iou_hidden_bias: torch.Tensor,
    iou_proj_out_weight: torch.Tensor,
    iou_proj_out_bias: torch.Tensor,
    iou_hidden1: torch.Tensor,
    iou_hidden1_relu: torch.Tensor,
    iou_hidden2: torch.Tensor,
    iou_hidden2_relu: torch.Tensor,
    hyper_proj_in_weights: torch.Tensor,
    hyper_proj_in_biases: torch.Tensor,
    hyper_hidden_weights: torch.Tensor,
    hyper_hidden_biases: torch.Tensor,
    hyper_proj_out_weights: torch.Tensor,
    hyper_proj_out_biases: torch.Tensor,
    hyper_hidden1_0: torch.Tensor,
    hyper_hidden1_1: torch.Tensor,
    hyper_hidden1_2: torch.Tensor,
    hyper_hidden1_3: torch.Tensor,
    hyper_hidden1_relu_0: torch.Tensor,
    hyper_hidden1_relu_1: torch.Tensor,
    hyper_hidden1_relu_2: torch.Tensor,
    hyper_hidden1_relu_3: torch.Tensor,
    hyper_hidden2_0: torch.Tensor,
    hyper_hidden2_1: torch.Tensor,
    hyper_hidden2_2: torch.Tensor,
    hyper_hidden2_3: torch.Tensor,
    hyper_hidden2_relu_0: torch.Tensor,
    hyper_hidden2_relu_1: torch.Tensor,
    hyper_hidden2_relu_2: torch.Tensor,
    hyper_hidden2_relu_3: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Gradients of the tokens and of all parameters of five networks, in float32.

    B batch, P prompts, C hidden_size, I width of the IoU head, M = 4 mask tokens, O channels.

    Args:
        grad_iou_scores: [B, P, M]; grad_hyper_weights: [B, P, M, O].
        iou_token_out: [B, P, C]; mask_tokens_out: [B, P, M, C].
        iou_proj_in_weight: [I, C]; iou_hidden_weight: [I, I]; iou_proj_out_weight: [M, I].
        iou_hidden1, iou_hidden1_relu, iou_hidden2, iou_hidden2_relu: [B, P, I].
        hyper_proj_in_weights, hyper_hidden_weights: [M, C, C]; hyper_proj_out_weights: [M, O, C].
        hyper_hidden*_m, hyper_hidden*_relu_m: [B, P, C], of the network of mask token m.
        *_bias, *_biases: not needed.

    Returns:
        Gradients of iou_token_out and mask_tokens_out, then of weight and bias of the three layers
        of the IoU head and of the hypernetworks, each shaped like its tensor.
    """

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1)

    def stacked(*x: torch.Tensor) -> torch.Tensor:
        """One tensor a network to [M, rows, features]."""
        return torch.stack([rows(t) for t in x])

    grad_iou_token_out, *grad_iou_parameters = mlp_backward(
        rows(grad_iou_scores),
        rows(iou_token_out),
        rows(iou_hidden1),
        rows(iou_hidden1_relu),
        rows(iou_hidden2),
        rows(iou_hidden2_relu),
        iou_proj_in_weight,
        iou_hidden_weight,
        iou_proj_out_weight,
    )
    grad_mask_tokens_out, *grad_hyper_parameters = mlp_backward(
        rows(grad_hyper_weights).transpose(0, 1),
        rows(mask_tokens_out).transpose(0, 1),
        stacked(hyper_hidden1_0, hyper_hidden1_1, hyper_hidden1_2, hyper_hidden1_3),
        stacked(
            hyper_hidden1_relu_0, hyper_hidden1_relu_1, hyper_hidden1_relu_2, hyper_hidden1_relu_3
        ),
        stacked(hyper_hidden2_0, hyper_hidden2_1, hyper_hidden2_2, hyper_hidden2_3),
        stacked(
            hyper_hidden2_relu_0, hyper_hidden2_relu_1, hyper_hidden2_relu_2, hyper_hidden2_relu_3
        ),
        hyper_proj_in_weights,
        hyper_hidden_weights,
        hyper_proj_out_weights,
    )
    return (
        grad_iou_token_out.view_as(iou_token_out),
        grad_mask_tokens_out.transpose(0, 1).reshape_as(mask_tokens_out),
        *grad_iou_parameters,
        *grad_hyper_parameters,
    )
