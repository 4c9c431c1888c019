"""Modulated image self-attention that, when asked to, also attends to text (FIBO)."""

import torch
import torch.nn.functional as F

HEAD_DIM = 128
LAYER_NORM_EPS = 1e-5
ROPE_THETA = 10000.0


def plain_layer_norm(x: torch.Tensor) -> torch.Tensor:
    """LayerNorm over the last axis without weight and bias."""
    return F.layer_norm(x, (x.shape[-1],), eps=LAYER_NORM_EPS)


def apply_axial_rope(
    x: torch.Tensor, tables: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Rotate a block of columns for each axis; what is left at the end passes unchanged.

    Args:
        x: [batch, seq, heads, head_dim].
        tables: for each axis cos and sin [positions, width] and the tokens' positions [seq]. A
            block has `width` columns and uses the first half of a table's columns.
    """
    width = tables[0][0].shape[-1]
    *blocks, rest = x.split([*[width] * len(tables), x.shape[-1] - width * len(tables)], dim=-1)
    turned = []
    for block, (cos, sin, position) in zip(blocks, tables, strict=True):
        cos = cos[position, None, : width // 2]
        sin = sin[position, None, : width // 2]
        low, high = block.chunk(2, dim=-1)
        turned += [low * cos - high * sin, low * sin + high * cos]
    return torch.cat((*turned, rest), dim=-1)


def run(
    hidden_states: torch.Tensor,
    timestep_embedding: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    adaln_linear_weight: torch.Tensor,
    adaln_linear_bias: torch.Tensor,
    to_q_weight: torch.Tensor,
    to_q_bias: torch.Tensor,
    to_k_weight: torch.Tensor,
    to_k_bias: torch.Tensor,
    to_v_weight: torch.Tensor,
    to_v_bias: torch.Tensor,
    to_k_context_weight: torch.Tensor,
    to_k_context_bias: torch.Tensor,
    to_v_context_weight: torch.Tensor,
    to_v_context_bias: torch.Tensor,
    to_out_weight: torch.Tensor,
    to_out_bias: torch.Tensor,
    pos_idx_axis0: torch.Tensor,
    pos_idx_axis1: torch.Tensor,
    pos_idx_axis2: torch.Tensor,
    rope_cos_axis0: torch.Tensor,
    rope_sin_axis0: torch.Tensor,
    rope_cos_axis1: torch.Tensor,
    rope_sin_axis1: torch.Tensor,
    rope_cos_axis2: torch.Tensor,
    rope_sin_axis2: torch.Tensor,
    is_joint_block: int,
) -> torch.Tensor:
    """Scale and shift, attention, gate, residual; all in float32.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] f32.
        timestep_embedding: [batch_size, hidden_size] f32.
        encoder_hidden_states: [batch_size, text_seq_len, joint_attention_dim] f32.
        adaln_linear_weight: [6 * hidden_size, hidden_size] f32, and its bias; its first half gives
            scale, shift and gate, the second half belongs to the feed-forward and is not needed.
        to_{q,k,v,out}_weight: [hidden_size, hidden_size] f32, and their biases.
        to_{k,v}_context_weight: [hidden_size, joint_attention_dim] f32, and their biases.
        pos_idx_axis{i}: [seq_len] int64, row of the axis's tables.
        rope_{cos,sin}_axis{i}: [positions, head_dim // 3] f32.
        is_joint_block: whether text keys and values are appended (1) or not.

    Returns:
        [batch_size, seq_len, hidden_size] f32.
    """
    hidden_size = hidden_states.shape[-1]

    def heads(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias).unflatten(-1, (-1, HEAD_DIM))

    attention_rows = slice(0, 3 * hidden_size)
    modulation = F.linear(
        F.silu(timestep_embedding),
        adaln_linear_weight[attention_rows],
        adaln_linear_bias[attention_rows],
    )
    scale, shift, gate = modulation.unsqueeze(1).chunk(3, dim=-1)
    n = plain_layer_norm(hidden_states) * (1 + scale) + shift

    tables = [
        (rope_cos_axis0, rope_sin_axis0, pos_idx_axis0),
        (rope_cos_axis1, rope_sin_axis1, pos_idx_axis1),
        (rope_cos_axis2, rope_sin_axis2, pos_idx_axis2),
    ]
    q = apply_axial_rope(heads(n, to_q_weight, to_q_bias), tables)
    k = apply_axial_rope(heads(n, to_k_weight, to_k_bias), tables)
    v = heads(n, to_v_weight, to_v_bias)
    if is_joint_block == 1:
        text = plain_layer_norm(encoder_hidden_states)
        k = torch.cat((k, heads(text, to_k_context_weight, to_k_context_bias)), dim=1)
        v = torch.cat((v, heads(text, to_v_context_weight, to_v_context_bias)), dim=1)

    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    scores = torch.matmul(q, k.transpose(-1, -2)) * HEAD_DIM**-0.5
    context = torch.matmul(torch.softmax(scores, dim=-1), v).transpose(1, 2).flatten(2)
    return hidden_states + gate * F.linear(context, to_out_weight, to_out_bias)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Normal activations, small weights, zero biases, random places, sinusoidal tables."""
    axes = axes_and_scalars
    batch_size, seq_len = axes["batch_size"], axes["seq_len"]
    hidden_size, text_size = axes["hidden_size"], axes["joint_attention_dim"]
    width = axes["rope_dim_per_axis"]

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=device).mul_(std)

    inputs: dict = {
        "hidden_states": normal(batch_size, seq_len, hidden_size),
        "timestep_embedding": normal(batch_size, hidden_size),
        "encoder_hidden_states": normal(batch_size, axes["text_seq_len"], text_size),
        "is_joint_block": axes["is_joint_block"],
    }
    layers = {
        "adaln_linear": (axes["modulation_dim"], hidden_size),
        "to_q": (hidden_size, hidden_size),
        "to_k": (hidden_size, hidden_size),
        "to_v": (hidden_size, hidden_size),
        "to_k_context": (hidden_size, text_size),
        "to_v_context": (hidden_size, text_size),
        "to_out": (hidden_size, hidden_size),
    }
    for name, shape in layers.items():
        inputs[f"{name}_weight"] = normal(*shape, std=0.02)
        inputs[f"{name}_bias"] = torch.zeros(shape[0], device=device)

    frequency = ROPE_THETA ** -(torch.arange(width, dtype=torch.float32, device=device) / width)
    for axis in range(3):
        positions = axes[f"rope_axis{axis}_dim"]
        place = torch.arange(positions, dtype=torch.float32, device=device)
        angle = torch.outer(place, frequency)
        inputs[f"rope_cos_axis{axis}"], inputs[f"rope_sin_axis{axis}"] = angle.cos(), angle.sin()
        inputs[f"pos_idx_axis{axis}"] = torch.randint(0, positions, (seq_len,), device=device)
    return inputs
