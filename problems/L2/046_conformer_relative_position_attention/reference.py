"""Conformer self-attention in blocks of frames, with relative position scores."""

import torch
import torch.nn.functional as F

EPS = 1e-5


def run(
    hidden_states: torch.Tensor,
    pre_norm_weight: torch.Tensor,
    pre_norm_bias: torch.Tensor,
    to_q_weight: torch.Tensor,
    to_kv_weight: torch.Tensor,
    to_out_weight: torch.Tensor,
    to_out_bias: torch.Tensor,
    rel_pos_emb_weight: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """LayerNorm, attention within each block, output projection; no residual.

    Args:
        hidden_states: [batch_size, seq_len, hidden_dim] bf16.
        pre_norm_weight, pre_norm_bias, to_out_bias: [hidden_dim] bf16.
        to_q_weight: [inner_dim, hidden_dim] bf16; to_kv_weight: [2 * inner_dim, hidden_dim] bf16,
            keys first; to_out_weight: [hidden_dim, inner_dim] bf16.
        rel_pos_emb_weight: [2 * block + 1, dim_head] bf16, a row for each distance from -block to
            block; blocks are that many frames long.
        scale: factor on both kinds of scores.

    Returns:
        [batch_size, seq_len, hidden_dim] bf16.
    """
    seq_len, hidden_dim = hidden_states.shape[1:]
    dtype = hidden_states.dtype
    block = rel_pos_emb_weight.shape[0] // 2
    dim_head = rel_pos_emb_weight.shape[1]

    x = hidden_states.float()
    x = F.layer_norm(x, (hidden_dim,), pre_norm_weight.float(), pre_norm_bias.float(), EPS)
    x = F.pad(x.to(dtype), (0, 0, 0, -seq_len % block))

    def split_blocks_and_heads(y: torch.Tensor) -> torch.Tensor:
        """[batch, blocks * block, heads * dim_head] to [batch, blocks, heads, block, dim_head]."""
        return y.unflatten(1, (-1, block)).unflatten(-1, (-1, dim_head)).transpose(2, 3)

    k, v = F.linear(x, to_kv_weight).chunk(2, dim=-1)
    q = split_blocks_and_heads(F.linear(x, to_q_weight)).float()
    k, v = split_blocks_and_heads(k).float(), split_blocks_and_heads(v).float()

    frame = torch.arange(block, device=x.device)
    distance = frame.unsqueeze(1) - frame
    relative = rel_pos_emb_weight[distance + block].float()
    bias = (torch.einsum("bmhid,ijd->bmhij", q, relative) * scale).to(dtype)
    # Frames that fill up the last block are no keys; their own rows are dropped below.
    if seq_len % block:
        bias[:, -1, :, :, seq_len % block :] = -torch.inf

    # Softmax attention in float32, rounded once at its end.
    scores = q @ k.transpose(-1, -2) * scale + bias.float()
    heads = (torch.softmax(scores, dim=-1) @ v).to(dtype)
    merged = heads.transpose(2, 3).flatten(3).flatten(1, 2)[:, :seq_len]
    # Contiguous, as linear rounds a second time, before the bias, for operands that are not.
    return F.linear(merged.contiguous(), to_out_weight, to_out_bias)
