"""Backward of AltUp's predict and correct steps over parallel streams (Gemma-3n)."""

import torch


def route(
    x: torch.Tensor, norm_weight: torch.Tensor, router_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tanh of a projection of the RMS-normalised, weighted x over its width.

    Returns:
        The modalities [batch, seq, streams], what was projected, and the inverse rms of x.
    """
    rstd = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    scaled = x * rstd * norm_weight / x.shape[-1]
    return torch.tanh(scaled @ router_weight.T), scaled, rstd


def route_backward(
    x: torch.Tensor,
    routed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad: torch.Tensor,
    norm_weight: torch.Tensor,
    router_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, router_weight and norm_weight, given that of the modalities."""
    modalities, scaled, rstd = routed
    grad_projected = grad * (1 - modalities.square())
    grad_router_weight = torch.einsum("bsj,bsh->jh", grad_projected, scaled)
    grad_weighted = grad_projected @ router_weight / x.shape[-1]
    grad_norm_weight = (grad_weighted * (x * rstd)).sum(dim=(0, 1))
    grad_normalized = grad_weighted * norm_weight
    mean = (grad_normalized * x).mean(dim=-1, keepdim=True)
    return grad_normalized * rstd - x * rstd**3 * mean, grad_router_weight, grad_norm_weight


def run(
    grad_corrected: torch.Tensor,
    hidden_states: torch.Tensor,
    activated: torch.Tensor,
    prediction_coef_weight: torch.Tensor,
    correction_coef_weight: torch.Tensor,
    router_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    altup_active_idx: int,
    rms_norm_eps: float,
) -> tuple[torch.Tensor, ...]:
    """All in float32; the two activation gradients round to bfloat16 at the end.

    Forward: predictions are the streams plus a mix of them, with coefficients from the active
    stream's router; the active stream's miss of `activated` then corrects all of them, each with a
    coefficient from `activated`'s router.

    Args:
        grad_corrected, hidden_states: [streams, batch_size, seq_len, hidden_size] bf16.
        activated: [batch_size, seq_len, hidden_size] bf16.
        prediction_coef_weight: [streams * streams, streams] bf16, row streams * j + i weighs
            stream i in prediction j.
        correction_coef_weight: [streams, streams] bf16.
        router_weight: [streams, hidden_size] bf16; norm_weight: [hidden_size] bf16.
        altup_active_idx: the active stream.
        rms_norm_eps: added to the mean squares.

    Returns:
        Gradients of hidden_states and activated (bf16), prediction_coef_weight,
        correction_coef_weight, router_weight and norm_weight (f32).
    """
    active, dtype = altup_active_idx, hidden_states.dtype
    grad, h, target = grad_corrected.float(), hidden_states.float(), activated.float()
    prediction_weight = prediction_coef_weight.float()
    correction_weight = correction_coef_weight.float()
    router_weight, norm_weight = router_weight.float(), norm_weight.float()
    streams = h.shape[0]

    # Forward; of the predictions only the active stream's is needed. i and j are streams.
    predicting = route(h[active], norm_weight, router_weight, rms_norm_eps)
    predict_modalities = predicting[0]
    mix = (predict_modalities @ prediction_weight.T).unflatten(-1, (streams, streams))
    prediction = h[active] + torch.einsum("ibsh,bsi->bsh", h, mix[..., active, :])
    correcting = route(target, norm_weight, router_weight, rms_norm_eps)
    innovation = target - prediction
    correct_modalities = correcting[0]
    gain = correct_modalities @ correction_weight.T + 1

    # Correct step.
    grad_innovation = torch.einsum("jbsh,bsj->bsh", grad, gain)
    grad_gain = torch.einsum("jbsh,bsh->bsj", grad, innovation)
    grad_predictions = grad.clone()
    grad_predictions[active] -= grad_innovation
    grad_correction_weight = torch.einsum("bsj,bsm->jm", grad_gain, correct_modalities)
    grad_target, correct_router_grad, correct_norm_grad = route_backward(
        target, correcting, grad_gain @ correction_weight, norm_weight, router_weight
    )
    grad_target = grad_target + grad_innovation

    # Predict step.
    grad_h = grad_predictions + torch.einsum("jbsh,bsji->ibsh", grad_predictions, mix)
    grad_mix = torch.einsum("ibsh,jbsh->bsji", h, grad_predictions).flatten(-2)
    grad_prediction_weight = torch.einsum("bsl,bsm->lm", grad_mix, predict_modalities)
    grad_active, predict_router_grad, predict_norm_grad = route_backward(
        h[active], predicting, grad_mix @ prediction_weight, norm_weight, router_weight
    )
    grad_h[active] += grad_active

    return (
        grad_h.to(dtype),
        grad_target.to(dtype),
        grad_prediction_weight,
        grad_correction_weight,
        correct_router_grad + predict_router_grad,
        correct_norm_grad + predict_norm_grad,
    )
