"""Boolean attention masks of a model that mixes full with sliding-window attention."""

import torch

NUM_HEADS = 64


def run(
    batch_size_scalar: int, seq_length_scalar: int, past_key_values_length_scalar: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both masks written out for every batch element and head, on the GPU if there is one.

    Args:
        batch_size_scalar: number of batch elements.
        seq_length_scalar: number of queries, the newest tokens.
        past_key_values_length_scalar: number of keys before the first query's.

    Returns:
        The causal mask, True where a key lies after its query, and the mask for sliding-window
        layers, which the source model leaves False everywhere. Both
        [batch_size, 64, seq_length, past_length + seq_length] bool.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    total_length = seq_length_scalar + past_key_values_length_scalar
    shape = (batch_size_scalar, NUM_HEADS, seq_length_scalar, total_length)

    query = torch.arange(seq_length_scalar, device=device).unsqueeze(1)
    key = torch.arange(total_length, device=device) - past_key_values_length_scalar
    full = (key > query).expand(shape).contiguous()
    sliding_window = torch.zeros(shape, dtype=torch.bool, device=device)
    return full, sliding_window
