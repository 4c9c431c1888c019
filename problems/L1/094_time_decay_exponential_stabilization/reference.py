"""RWKV's weighted key-value recurrence, stabilised by a running maximum of exponents."""

import torch


def run(
    time_decay: torch.Tensor,
    key: torch.Tensor,
    time_first: torch.Tensor,
    value: torch.Tensor,
    max_state: torch.Tensor,
    num_state: torch.Tensor,
    den_state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decaying averages of the values, weighted by exp(key), for each channel on its own; float32.

    The averages are kept as numerator * exp(maximum) and denominator * exp(maximum), so that no
    exponential exceeds one. Only the three recurrences run step by step; all else is done for the
    whole sequence at once.

    Args:
        time_decay: [attention_hidden_size] f32; a step decays the state by exp(-exp(time_decay)).
        key, value: [batch_size, seq_len, attention_hidden_size] f32.
        time_first: [attention_hidden_size] f32, added to the key of the current step.
        max_state, num_state, den_state: [batch_size, attention_hidden_size] f32.

    Returns:
        Output, shaped like key, and the three states after the last step; f32.
    """
    decay = -torch.exp(time_decay)

    # States before each step, and after the last one.
    maxima = [max_state]
    for key_t in key.unbind(dim=1):
        maxima.append(torch.maximum(maxima[-1] + decay, key_t))
    maximum = torch.stack(maxima, dim=1)
    before, after = maximum[:, :-1], maximum[:, 1:]

    kept = torch.exp(before + decay - after)
    added = torch.exp(key - after)
    numerators, denominators = [num_state], [den_state]
    for kept_t, added_t, value_t in zip(
        kept.unbind(dim=1), added.unbind(dim=1), value.unbind(dim=1), strict=True
    ):
        numerators.append(kept_t * numerators[-1] + added_t * value_t)
        denominators.append(kept_t * denominators[-1] + added_t)
    numerator = torch.stack(numerators[:-1], dim=1)
    denominator = torch.stack(denominators[:-1], dim=1)

    # The current step counts with a bonus of its own and is not decayed.
    current = key + time_first
    largest = torch.maximum(before, current)
    past_share, current_share = torch.exp(before - largest), torch.exp(current - largest)
    output = past_share * numerator + current_share * value
    output = output / (past_share * denominator + current_share)
    return output, maxima[-1], numerators[-1], denominators[-1]


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict[str, torch.Tensor]:
    """Normal keys and values, half of that for the channels' constants, and an empty state."""
    batch_size, seq_len, channels = (
        axes_and_scalars[n] for n in ("batch_size", "seq_len", "attention_hidden_size")
    )
    return {
        "time_decay": 0.5 * torch.randn(channels, device=device),
        "key": torch.randn(batch_size, seq_len, channels, device=device),
        "time_first": 0.5 * torch.randn(channels, device=device),
        "value": torch.randn(batch_size, seq_len, channels, device=device),
        "max_state": torch.full((batch_size, channels), -1e38, device=device),
        "num_state": torch.zeros(batch_size, channels, device=device),
        "den_state": torch.zeros(batch_size, channels, device=device),
    }
