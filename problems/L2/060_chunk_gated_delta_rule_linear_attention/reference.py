"""Gated delta-rule linear attention in chunks, with the gates of each chunk used raw."""

import torch
import torch.nn.functional as F

CHUNK_SIZE = 64


def l2_normalize(x: torch.Tensor) -> torch.Tensor:
    """x over its length along the last axis; every step rounds to x's dtype."""
    squared_length = (x * x).sum(dim=-1, keepdim=True) + 1e-6
    # In float32, as a reciprocal root of bfloat16 may round twice on a CPU.
    return x * torch.rsqrt(squared_length.float()).to(x.dtype)


def run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Float32 from the normalised queries and keys to the result.

    Only the decay within a chunk accumulates the gates. The state's decay, and the terms that
    read the state, use the gate of a single step, which the textbook rule does not.

    Args:
        query, key: [batch_size, num_k_heads, seq_len, head_k_dim] bf16.
        value: [batch_size, num_v_heads, seq_len, head_v_dim] bf16; value head h uses key head
            h % num_k_heads.
        g: [batch_size, num_v_heads, seq_len] bf16, logarithm of the decay.
        beta: [batch_size, num_v_heads, seq_len] bf16, writing strength.
        scale: factor on the normalised queries.

    Returns:
        [batch_size, seq_len, num_v_heads, head_v_dim] bf16.
    """
    num_k_heads, seq_len = key.shape[1:3]
    dtype = query.dtype
    padding = -seq_len % CHUNK_SIZE

    def split_rows(x: torch.Tensor) -> torch.Tensor:
        """[b, h, seq_len, d] to float32 [b, h, chunks, CHUNK_SIZE, d]."""
        return F.pad(x.float(), (0, 0, 0, padding)).unflatten(2, (-1, CHUNK_SIZE))

    def split_steps(x: torch.Tensor) -> torch.Tensor:
        """[b, h, seq_len] to float32 [b, h / key heads, key heads, chunks, CHUNK_SIZE]."""
        x = F.pad(x.float(), (0, padding)).unflatten(2, (-1, CHUNK_SIZE))
        return x.unflatten(1, (-1, num_k_heads))

    # Axes: b batch, r repeats of a key head, k key head, c chunk, i and j steps, d and v widths.
    q = split_rows(l2_normalize(query)) * scale
    k = split_rows(l2_normalize(key))
    v = split_rows(value).unflatten(1, (-1, num_k_heads))
    gate, strength = split_steps(g), split_steps(beta)

    cumulative = gate.cumsum(dim=-1)
    causal = torch.ones(CHUNK_SIZE, CHUNK_SIZE, dtype=torch.bool, device=q.device).tril()
    decay = cumulative.unsqueeze(-1) - cumulative.unsqueeze(-2)
    decay = decay.masked_fill(~causal, -torch.inf).exp()

    # Within a chunk: corrections of the writes for each other, by a unit triangular solve.
    key_products = torch.einsum("bkcid,bkcjd->bkcij", k, k).unsqueeze(1)
    system = strength.unsqueeze(-1) * key_products * decay
    writes = v * strength.unsqueeze(-1)
    reads = k.unsqueeze(1) * (strength * gate.exp()).unsqueeze(-1)
    solved = torch.linalg.solve_triangular(
        system, torch.cat((writes, reads), dim=-1), upper=False, unitriangular=True
    )
    u, w = solved.split((v.shape[-1], k.shape[-1]), dim=-1)

    attention = torch.einsum("bkcid,bkcjd->bkcij", q, k).unsqueeze(1) * decay
    queries = q.unsqueeze(1) * gate.exp().unsqueeze(-1)
    last = gate[..., -1:]
    keys = k.unsqueeze(1) * (last - gate).exp().unsqueeze(-1)

    # Across chunks: the state, [b, r, k, d, v], read and then updated.
    state = v.new_zeros(*v.shape[:3], k.shape[-1], v.shape[-1])
    outputs = []
    for chunk in range(v.shape[3]):
        new = u[:, :, :, chunk] - w[:, :, :, chunk] @ state
        outputs.append(queries[:, :, :, chunk] @ state + attention[:, :, :, chunk] @ new)
        state = last[:, :, :, chunk].exp().unsqueeze(-1) * state
        state = state + keys[:, :, :, chunk].transpose(-1, -2) @ new
    output = torch.stack(outputs, dim=3).flatten(3, 4)[:, :, :, :seq_len]
    return output.flatten(1, 2).transpose(1, 2).to(dtype)
