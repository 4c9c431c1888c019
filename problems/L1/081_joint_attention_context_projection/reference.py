"""Output projection of joint attention: image and context tokens through one linear map."""

import torch
import torch.nn.functional as F


def run(
    image_attention_output: torch.Tensor,
    context_attention_output: torch.Tensor,
    to_out_weight: torch.Tensor,
    to_out_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the tokens, repeat their features once, project, split the tokens again; float32.

    Args:
        image_attention_output: [batch_size, image_seq_len, inner_dim] f32.
        context_attention_output: [batch_size, context_seq_len, inner_dim] f32.
        to_out_weight: [inner_dim, 2 * inner_dim] f32.
        to_out_bias: [inner_dim] f32.

    Returns:
        Projected image and context tokens, shaped like the inputs, f32.
    """
    tokens = torch.cat((image_attention_output, context_attention_output), dim=1)
    doubled = torch.cat((tokens, tokens), dim=-1)
    projected = F.linear(doubled, to_out_weight, to_out_bias)
    lengths = [image_attention_output.shape[1], context_attention_output.shape[1]]
    projected_image, projected_context = projected.split(lengths, dim=1)
    return projected_image.clone(), projected_context.clone()
