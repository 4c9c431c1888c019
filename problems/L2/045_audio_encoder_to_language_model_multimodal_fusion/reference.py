"""Bridge from speech to a language model: encoder, windowed query attention, token scatter."""

import torch
import torch.nn.functional as F

WINDOW_SIZE = 15
HEAD_DIM = 64


def run(
    input_features: torch.Tensor,
    lm_embeddings: torch.Tensor,
    audio_token_positions: torch.Tensor,
    encoder_input_weight: torch.Tensor,
    encoder_input_bias: torch.Tensor,
    encoder_out_weight: torch.Tensor,
    encoder_out_bias: torch.Tensor,
    encoder_out_mid_weight: torch.Tensor,
    encoder_out_mid_bias: torch.Tensor,
    learnable_queries: torch.Tensor,
    qformer_q_proj_weight: torch.Tensor,
    qformer_q_proj_bias: torch.Tensor,
    qformer_k_proj_weight: torch.Tensor,
    qformer_k_proj_bias: torch.Tensor,
    qformer_v_proj_weight: torch.Tensor,
    qformer_v_proj_bias: torch.Tensor,
    qformer_out_proj_weight: torch.Tensor,
    qformer_out_proj_bias: torch.Tensor,
    projector_weight: torch.Tensor,
    projector_bias: torch.Tensor,
) -> torch.Tensor:
    """Audio tokens written over text embeddings; float32 from the inputs to the result.

    Only the windows whose queries land in one of the audio token positions are computed.

    Args:
        input_features: [batch, audio_seq_len, input_dim] bf16.
        lm_embeddings: [batch, text_seq_len, text_hidden] bf16.
        audio_token_positions: [batch, num_audio_tokens] int64, no position twice.
        encoder_input_weight: [hidden, input_dim]; encoder_out_weight: [output, hidden];
            encoder_out_mid_weight: [hidden, output]; each with its bias, bf16.
        learnable_queries: [1, num_queries, width] bf16, the same for every window.
        qformer_q_proj_weight, qformer_out_proj_weight: [width, width]; qformer_k_proj_weight,
            qformer_v_proj_weight: [width, hidden]; each with its bias, bf16.
        projector_weight: [text_hidden, width]; projector_bias: [text_hidden]; bf16.

    Returns:
        [batch, text_seq_len, text_hidden] bf16.
    """

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight.float(), bias.float())

    def split_heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, HEAD_DIM)).transpose(-3, -2)

    num_tokens, num_queries = audio_token_positions.shape[1], learnable_queries.shape[1]
    num_windows = -(-num_tokens // num_queries)
    num_frames = num_windows * WINDOW_SIZE

    # Encoder, with the softmax of its own output fed back.
    h = linear(input_features[:, :num_frames].float(), encoder_input_weight, encoder_input_bias)
    feedback = torch.softmax(linear(h, encoder_out_weight, encoder_out_bias), dim=-1)
    h = h + linear(feedback, encoder_out_mid_weight, encoder_out_mid_bias)

    # A last window beyond the audio is filled up with zeros, which attention does not mask.
    h = F.pad(h, (0, 0, 0, num_frames - h.shape[1]))
    windows = h.unflatten(1, (num_windows, WINDOW_SIZE))

    q = split_heads(linear(learnable_queries.float(), qformer_q_proj_weight, qformer_q_proj_bias))
    k = split_heads(linear(windows, qformer_k_proj_weight, qformer_k_proj_bias))
    v = split_heads(linear(windows, qformer_v_proj_weight, qformer_v_proj_bias))
    probabilities = torch.softmax(q @ k.transpose(-1, -2) * HEAD_DIM**-0.5, dim=-1)
    attended = (probabilities @ v).transpose(-3, -2).flatten(-2)

    rows = attended.flatten(1, 2)[:, :num_tokens]
    rows = linear(rows, qformer_out_proj_weight, qformer_out_proj_bias)
    audio = linear(rows, projector_weight, projector_bias).to(lm_embeddings.dtype)
    positions = audio_token_positions.unsqueeze(-1).expand_as(audio)
    return torch.scatter(lm_embeddings, 1, positions, audio)


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal features and embeddings, sorted distinct positions, small weights, zero biases."""
    axes = axes_and_scalars
    batch_size = axes["batch_size"]
    hidden, output = axes["encoder_hidden_dim"], axes["encoder_output_dim"]
    width, text_hidden = axes["projector_hidden_size"], axes["text_hidden_size"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    def linear(name: str, out_features: int, in_features: int) -> dict[str, torch.Tensor]:
        weight = (0.02 * torch.randn(out_features, in_features, device=device)).bfloat16()
        bias = torch.zeros(out_features, dtype=torch.bfloat16, device=device)
        return {f"{name}_weight": weight, f"{name}_bias": bias}

    order = torch.rand(batch_size, axes["text_seq_len"], device=device).argsort(dim=-1)
    positions = order[:, : axes["num_audio_tokens"]].sort(dim=-1).values
    queries = 0.02 * torch.randn(1, axes["num_queries"], width, device=device)
    return {
        "input_features": normal(batch_size, axes["audio_seq_len"], axes["encoder_input_dim"]),
        "lm_embeddings": normal(batch_size, axes["text_seq_len"], text_hidden),
        "audio_token_positions": positions,
        **linear("encoder_input", hidden, axes["encoder_input_dim"]),
        **linear("encoder_out", output, hidden),
        **linear("encoder_out_mid", hidden, output),
        "learnable_queries": queries.bfloat16(),
        **linear("qformer_q_proj", width, width),
        **linear("qformer_k_proj", width, hidden),
        **linear("qformer_v_proj", width, hidden),
        **linear("qformer_out_proj", width, width),
        **linear("projector", text_hidden, width),
    }
