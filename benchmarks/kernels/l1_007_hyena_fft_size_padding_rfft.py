"""L1/007_hyena_fft_size_padding_rfft: cuFFT, then one Triton pass that scales and splits."""

import torch
import triton
import triton.language as tl


@triton.jit
def scale_and_split_kernel(spectrum_ptr, real_ptr, imag_ptr, scale, numel, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    real = tl.load(spectrum_ptr + 2 * index, mask=inside, other=0.0)
    imag = tl.load(spectrum_ptr + 2 * index + 1, mask=inside, other=0.0)
    tl.store(real_ptr + index, real * scale, mask=inside)
    tl.store(imag_ptr + index, imag * scale, mask=inside)


def run(x):
    n = 2 * x.shape[-1]
    spectrum = torch.fft.rfft(x, n=n)
    real = torch.empty(spectrum.shape, dtype=x.dtype, device=x.device)
    imag = torch.empty_like(real)
    block = 1024
    scale_and_split_kernel[(triton.cdiv(real.numel(), block),)](
        torch.view_as_real(spectrum), real, imag, 1.0 / n, real.numel(), BLOCK=block, num_warps=4
    )
    return real, imag
