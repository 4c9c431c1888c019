"""Hyena block of order 2: gated long convolution with an implicit filter, then a GELU MLP."""

import math

import torch
import torch.nn.functional as F


def implicit_filter(
    seq_len: int,
    linear1: tuple[torch.Tensor, torch.Tensor],
    linear2: tuple[torch.Tensor, torch.Tensor],
    linear3: tuple[torch.Tensor, torch.Tensor],
    final_weight: torch.Tensor,
    sin_freq: torch.Tensor,
    deltas: torch.Tensor,
    shift: float,
    bias: torch.Tensor,
) -> torch.Tensor:
    """The filter [d_model, seq_len]: a sine network of the position, modulated by a decay.

    The network's output is [seq_len, d_model] in memory, and the filter reads that memory as
    [d_model, seq_len]: a reinterpretation, not a transpose.
    """
    device = sin_freq.device
    bands = (linear1[0].shape[1] - 1) // 2
    tau = torch.linspace(0, 1, seq_len, device=device).unsqueeze(-1)
    angle = 2 * math.pi * torch.arange(seq_len, device=device).unsqueeze(-1) / seq_len
    angle = -torch.linspace(1e-4, bands - 1, bands, device=device) * angle
    h = torch.cat((tau, angle.cos(), angle.sin()), dim=-1)
    for weight, offset in (linear1, linear2, linear3):
        h = torch.sin(sin_freq * F.linear(h, weight, offset))
    h = F.linear(h, final_weight)
    h = h * (torch.exp(-tau * deltas.flatten().abs()) + shift) + bias
    return h.view(h.shape[1], seq_len)


def causal_convolution(u: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """y[b, c, t] = sum over s <= t of k[c, s] u[b, c, t - s], by FFT of twice the length."""
    length = u.shape[-1]
    spectrum = torch.fft.rfft(k, n=2 * length) / (2 * length)
    spectrum = torch.fft.rfft(u, n=2 * length) * spectrum
    return torch.fft.irfft(spectrum, n=2 * length, norm="forward")[..., :length]


def run(
    hidden_states: torch.Tensor,
    norm1_weight: torch.Tensor,
    norm1_bias: torch.Tensor,
    norm2_weight: torch.Tensor,
    norm2_bias: torch.Tensor,
    in_proj_weight: torch.Tensor,
    in_proj_bias: torch.Tensor,
    short_conv_weight: torch.Tensor,
    short_conv_bias: torch.Tensor,
    filter_linear1_weight: torch.Tensor,
    filter_linear1_bias: torch.Tensor,
    sin_freq: torch.Tensor,
    filter_linear2_weight: torch.Tensor,
    filter_linear2_bias: torch.Tensor,
    filter_linear3_weight: torch.Tensor,
    filter_linear3_bias: torch.Tensor,
    filter_linear_final_weight: torch.Tensor,
    filter_bias: torch.Tensor,
    exp_mod_deltas: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor,
    mlp_fc1_weight: torch.Tensor,
    mlp_fc1_bias: torch.Tensor,
    mlp_fc2_weight: torch.Tensor,
    mlp_fc2_bias: torch.Tensor,
    layer_norm_eps: float,
    exp_mod_shift: float,
) -> torch.Tensor:
    """Both residual branches, in float32. D d_model, W filter_order.

    Args:
        hidden_states: [batch_size, seq_len, D].
        norm1_weight, norm1_bias, norm2_weight, norm2_bias, filter_bias, out_proj_bias: [D].
        in_proj_weight: [3 D, D]; short_conv_weight: [3 D, 1, 3]; their biases: [3 D].
        filter_linear1_weight: [W, 5]; filter_linear2_weight, filter_linear3_weight: [W, W]; their
            biases: [W]; sin_freq: [1, W]; filter_linear_final_weight: [D, W].
        exp_mod_deltas: [1, 1, D], decay rates of the filter, of either sign.
        out_proj_weight: [D, D].
        mlp_fc1_weight: [d_inner, D]; mlp_fc2_weight: [D, d_inner]; with their biases.
        layer_norm_eps: added to the variance.
        exp_mod_shift: added to the filter's decay.

    Returns:
        [batch_size, seq_len, D] f32.
    """
    seq_len, d_model = hidden_states.shape[1:]

    u = F.layer_norm(hidden_states, (d_model,), norm1_weight, norm1_bias, layer_norm_eps)
    u = F.linear(u, in_proj_weight, in_proj_bias).transpose(1, 2)
    taps = short_conv_weight.shape[-1]
    u = F.pad(u, (taps - 1, 0))
    u = F.conv1d(u, short_conv_weight, short_conv_bias, groups=u.shape[1])
    x0, x1, v = u.chunk(3, dim=1)

    k = implicit_filter(
        seq_len,
        (filter_linear1_weight, filter_linear1_bias),
        (filter_linear2_weight, filter_linear2_bias),
        (filter_linear3_weight, filter_linear3_bias),
        filter_linear_final_weight,
        sin_freq,
        exp_mod_deltas,
        exp_mod_shift,
        filter_bias,
    )
    v = v * x1
    v = causal_convolution(v, k) + v * filter_bias.unsqueeze(-1)
    gated = (v * x0).transpose(1, 2)
    residual = F.linear(gated, out_proj_weight, out_proj_bias) + hidden_states

    y = F.layer_norm(residual, (d_model,), norm2_weight, norm2_bias, layer_norm_eps)
    y = F.gelu(F.linear(y, mlp_fc1_weight, mlp_fc1_bias), approximate="tanh")
    return F.linear(y, mlp_fc2_weight, mlp_fc2_bias) + residual


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Normal activations, unit norms, decay rates evenly spaced, all else normal times 0.02."""
    axes = axes_and_scalars
    d_model, d_inner = axes["d_model"], axes["d_inner"]
    inner_width, width = axes["inner_width"], axes["filter_order"]

    def small(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(*shape, device=device)

    slowest, fastest = math.log(0.01) / 1.5, math.log(0.01) / 0.3
    deltas = torch.linspace(slowest, fastest, d_model, device=device)
    hidden_states = torch.randn(axes["batch_size"], axes["seq_len"], d_model, device=device)
    return {
        "hidden_states": hidden_states,
        "norm1_weight": torch.ones(d_model, device=device),
        "norm1_bias": torch.zeros(d_model, device=device),
        "norm2_weight": torch.ones(d_model, device=device),
        "norm2_bias": torch.zeros(d_model, device=device),
        "in_proj_weight": small(inner_width, d_model),
        "in_proj_bias": small(inner_width),
        "short_conv_weight": small(inner_width, 1, axes["short_filter_order"]),
        "short_conv_bias": small(inner_width),
        "filter_linear1_weight": small(width, axes["emb_dim"]),
        "filter_linear1_bias": small(width),
        "sin_freq": torch.ones(1, width, device=device),
        "filter_linear2_weight": small(width, width),
        "filter_linear2_bias": small(width),
        "filter_linear3_weight": small(width, width),
        "filter_linear3_bias": small(width),
        "filter_linear_final_weight": small(d_model, width),
        "filter_bias": small(d_model),
        "exp_mod_deltas": deltas.view(1, 1, -1),
        "out_proj_weight": small(d_model, d_model),
        "out_proj_bias": small(d_model),
        "mlp_fc1_weight": small(d_inner, d_model),
        "mlp_fc1_bias": small(d_inner),
        "mlp_fc2_weight": small(d_model, d_inner),
        "mlp_fc2_bias": small(d_model),
        "layer_norm_eps": 1e-5,
        "exp_mod_shift": 0.05,
    }
