"""One-sided FFT of rows zero-padded to twice their length, as Hyena's long convolution needs it."""

import torch


def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward transform of each row, divided by the transform length.

    Args:
        x: [batch_size, d_model, seqlen] float32.

    Returns:
        Real and imaginary part, each [batch_size, d_model, seqlen + 1] float32 and contiguous.
    """
    n = 2 * x.shape[-1]
    spectrum = torch.fft.rfft(x, n=n, dim=-1) / n
    return spectrum.real.contiguous(), spectrum.imag.contiguous()
