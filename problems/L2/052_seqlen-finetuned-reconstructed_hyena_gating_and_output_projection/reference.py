"""Core of a Hyena operator: gate, long causal convolution, gate, output projection."""

import torch
import torch.nn.functional as F


def run(
    v: torch.Tensor,
    x0: torch.Tensor,
    x1: torch.Tensor,
    k: torch.Tensor,
    bias: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor,
) -> torch.Tensor:
    """Float32 throughout; the convolution is a product of spectra of twice the length.

    Args:
        v, x0, x1: [batch_size, d_model, seq_len] f32, channel-major.
        k: [1, d_model, seq_len] f32, one causal filter a channel.
        bias: [1, d_model] f32, weight of the path around the convolution.
        out_proj_weight: [d_model, d_model] f32; out_proj_bias: [d_model] f32.

    Returns:
        [batch_size, seq_len, d_model] f32, time-major.
    """
    seq_len = v.shape[-1]
    n = 2 * seq_len
    u = v * x1
    spectrum = torch.fft.rfft(u, n=n) * (torch.fft.rfft(k, n=n) / n)
    y = torch.fft.irfft(spectrum, n=n, norm="forward")[..., :seq_len]
    gated = (y + u * bias.unsqueeze(-1)) * x0
    return F.linear(gated.transpose(1, 2), out_proj_weight, out_proj_bias)
