"""Formulas and comparisons that the tests of the references share, written apart from them."""

import torch
import torch.nn.functional as F

BF16 = torch.bfloat16


def cast(inputs, dtype):
    """The inputs with all floating tensors in another dtype; all else as it is."""
    return {
        name: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for name, v in inputs.items()
    }


def dense_experts(x, gate_weights, up_weights, down_weights, experts, weights):
    """Every expert on every token, and the routing as a matrix [tokens, experts]."""
    matrix = torch.zeros(len(x), len(gate_weights), dtype=x.dtype)
    matrix = matrix.scatter_add(1, experts, weights.to(x.dtype))
    y = swiglu(x, gate_weights, up_weights, down_weights)
    return torch.einsum("ne,enh->nh", matrix, y)


def doubles(inputs):
    return cast(inputs, torch.float64)


def exact(x):
    return x


def in_float32(run, workload):
    """Inputs on which a reference rounds to float32 at most, and their float64 copies."""
    inputs = cast(run.draw(workload), torch.float32)
    return inputs, cast(inputs, torch.float64)


def merge_heads(x):
    return x.transpose(1, 2).flatten(2)


def rms_norm(x, weight, eps):
    return x * rms_rstd(x, eps) * weight


def rms_normalized(x, eps):
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def rms_rstd(x, eps):
    return torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotated(x, cos, sin):
    """Rotary embedding of the half-split form, from its two halves."""
    half = x.shape[-1] // 2
    x1, x2, c1, c2, s1, s2 = (h for t in (x, cos, sin) for h in (t[..., :half], t[..., half:]))
    return torch.cat((x1 * c1 - x2 * s1, x2 * c2 + x1 * s2), dim=-1)


def rounded(x):
    """Round to bfloat16, and on in float64."""
    return x.to(BF16).double()


def silu(x):
    return x * x.sigmoid()


def split_heads(x, head_dim):
    """[batch, seq, heads * head_dim] to [batch, heads, seq, head_dim]."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def swiglu(x, gate_weight, up_weight, down_weight):
    return (F.silu(x @ gate_weight.mT) * (x @ up_weight.mT)) @ down_weight.mT


def assert_close(actual, expected, tolerance=1e-5):
    """float32 accuracy, relative to the largest element."""
    scale = expected.abs().max().item()
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance * scale
    )


def assert_near(actual, expected, rtol=2e-5):
    """Equal up to float32 arithmetic, measured against the largest element."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).abs().max()
    assert error <= rtol * expected.abs().max(), f"off by {error / expected.abs().max():.1e}"


def equal_share(actual, expected):
    """Share of elements that are equal to the last bit."""
    return (actual == expected.to(actual.dtype)).double().mean().item()
