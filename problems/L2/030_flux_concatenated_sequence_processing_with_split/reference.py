"""One linear layer over text and image tokens, which Flux joins along the sequence for it."""

import torch
import torch.nn.functional as F


def run(
    hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, process_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer acts on every token alone, so the streams need not be joined and split again.

    Args:
        hidden_states: [batch_size, img_seq_len, hidden_dim] f32, the image.
        encoder_hidden_states: [batch_size, text_seq_len, hidden_dim] f32, the text.
        process_weight: [hidden_dim, hidden_dim] f32.

    Returns:
        The text, [batch_size, text_seq_len, hidden_dim], then the image, [batch_size, img_seq_len,
        hidden_dim], f32.
    """
    return F.linear(encoder_hidden_states, process_weight), F.linear(hidden_states, process_weight)
