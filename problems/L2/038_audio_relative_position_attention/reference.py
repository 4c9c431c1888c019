"""Local causal self-attention with relative positions and capped logits (Gemma-3n audio)."""

import math

import torch
import torch.nn.functional as F

CHUNK_SIZE = 32
"""Queries of a block, which share their key slots."""
MAX_BACKWARD = 127
"""Frames before its own that a query may attend to."""
MAX_TIMESCALE = 10000.0


def run(
    hidden_states: torch.Tensor,
    mask: torch.Tensor,
    q_proj_weight: torch.Tensor,
    k_proj_weight: torch.Tensor,
    v_proj_weight: torch.Tensor,
    pos_proj_weight: torch.Tensor,
    per_dim_scale: torch.Tensor,
    inv_timescales: torch.Tensor,
    attention_logits_soft_cap: float,
) -> torch.Tensor:
    """Blocks of 32 queries against 160 key slots, of which each query may use 128.

    Slots that may not be used get the most negative finite logit. A query without any usable slot
    therefore averages the values of all slots of its block, zeros outside the sequence included.

    Args:
        hidden_states: [batch_size, seq_len, hidden_size] f32.
        mask: [batch_size, seq_len] bool, True for frames that no query may attend to.
        q_proj_weight, k_proj_weight, v_proj_weight, pos_proj_weight: [hidden_size, hidden_size].
        per_dim_scale: [head_dim] f32, through softplus a factor on the queries.
        inv_timescales: [hidden_size / 2] f32, radians a frame.
        attention_logits_soft_cap: bound of the logits, by cap * tanh(logit / cap).

    Returns:
        [batch_size, seq_len, num_heads, head_dim] f32.
    """
    seq_len, head_dim = hidden_states.shape[1], per_dim_scale.shape[0]
    device = hidden_states.device
    num_blocks = -(-seq_len // CHUNK_SIZE)
    num_slots = MAX_BACKWARD + CHUNK_SIZE + 1

    def heads(weight: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_states, weight).unflatten(-1, (-1, head_dim))

    def slots(x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, ..] to [batch, block, .., slot], zero or False outside the sequence."""
        # Slot c of block u is frame CHUNK_SIZE * u + c - MAX_BACKWARD.
        after = num_blocks * CHUNK_SIZE + 1 - seq_len
        padding = [0, 0] * (x.dim() - 2) + [MAX_BACKWARD, after]
        return F.pad(x, padding).unfold(1, num_slots, CHUNK_SIZE)

    # b batch, u block, w query of the block, c slot, r distance, h head, d head_dim.
    scale = head_dim**-0.5 / math.log(2.0)  # by softplus(0), so that a zero scale is neutral
    q = heads(q_proj_weight) * scale * F.softplus(per_dim_scale)
    q = F.pad(q, (0, 0, 0, 0, 0, num_blocks * CHUNK_SIZE - seq_len))
    q = q.unflatten(1, (num_blocks, CHUNK_SIZE))
    k, v = slots(heads(k_proj_weight)), slots(heads(v_proj_weight))  # [b, u, h, d, c]

    distance = torch.arange(MAX_BACKWARD + 1, dtype=inv_timescales.dtype, device=device)
    angle = torch.outer(distance, inv_timescales)
    signal = torch.cat((angle.sin(), angle.cos()), dim=-1)
    positions = F.linear(signal, pos_proj_weight).unflatten(-1, (-1, head_dim))

    query, slot = torch.arange(CHUNK_SIZE, device=device), torch.arange(num_slots, device=device)
    back = query.unsqueeze(1) + MAX_BACKWARD - slot  # [w, c], frames from slot to query
    in_reach = (back >= 0) & (back <= MAX_BACKWARD)
    content = torch.einsum("buwhd,buhdc->buhwc", q, k)
    position = torch.einsum("buwhd,rhd->buhwr", q, positions)
    index = back.clamp(0, MAX_BACKWARD).expand_as(content)
    logits = content + position.gather(-1, index)
    logits = attention_logits_soft_cap * torch.tanh(logits / attention_logits_soft_cap)

    usable = in_reach & slots(~mask)[:, :, None, None, :]
    logits = logits.masked_fill(~usable, torch.finfo(logits.dtype).min)
    context = torch.einsum("buhwc,buhdc->buwhd", torch.softmax(logits, dim=-1), v)
    return context.flatten(1, 2)[:, :seq_len]


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Normal activations, small weights, a tenth of the frames masked, geometric timescales."""
    axes = axes_and_scalars
    batch_size, seq_len = axes["batch_size"], axes["seq_len"]
    hidden_size, num_timescales = axes["hidden_size"], axes["num_timescales"]

    def weight() -> torch.Tensor:
        return torch.randn(hidden_size, hidden_size, device=device).mul_(0.02)

    step = torch.arange(num_timescales, dtype=torch.float32, device=device)
    return {
        "hidden_states": torch.randn(batch_size, seq_len, hidden_size, device=device),
        "mask": torch.rand(batch_size, seq_len, device=device) < 0.1,
        "q_proj_weight": weight(),
        "k_proj_weight": weight(),
        "v_proj_weight": weight(),
        "pos_proj_weight": weight(),
        "per_dim_scale": torch.zeros(axes["head_dim"], device=device),
        "inv_timescales": torch.exp(-math.log(MAX_TIMESCALE) / (num_timescales - 1) * step),
        "attention_logits_soft_cap": 50.0,
    }
