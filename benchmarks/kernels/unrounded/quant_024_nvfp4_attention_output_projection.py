"""Quant/024 with activations that are not rounded to NVFP4. Must be rejected."""

import torch


def run(hidden_states, weight_fp4, weight_scale_fp8, weight_global_decode_scale):
    values = torch.tensor(
        (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.float32, device=hidden_states.device
    )
    packed = weight_fp4.view(torch.uint8)
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).int()
    weight = values[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    weight = weight.unflatten(-1, (-1, 16)) * weight_scale_fp8.float().unsqueeze(-1)
    return hidden_states @ weight.flatten(-2).T * weight_global_decode_scale
