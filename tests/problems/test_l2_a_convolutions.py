"""Convolutions, embeddings and positions among L2/001 to L2/041 against independent formulas.

Formulas are in float64. References of bfloat16 problems run on float32 copies of their inputs, so
that roundings drop out, unless a rounding is the point.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.problems.formulas import assert_close, cast, in_float32

# ---- Convolutions ----------------------------------------------------------------------------


def test_audio_front_end_is_a_chain_of_subsampled_convolutions(reference):
    run = reference("L2/015")
    for workload in run.workloads:
        inputs, i = in_float32(run, workload)
        x = i["input_features"]
        for n in (1, 2, 3):
            x = F.conv2d(x, i[f"conv2d{n}_weight"], i[f"conv2d{n}_bias"], padding=1)
            x = x[..., ::2, ::2]
            x = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
        weight = i["conv_out_weight"].unflatten(1, x.shape[1:3])
        y = torch.einsum("bcft,dcf->btd", x, weight) * i["embed_scale"]
        assert_close(run.call(inputs)[0], y + i["positional_embedding"][: y.shape[1]])


def test_audio_position_table_is_sinusoidal(reference):
    run = reference("L2/015")
    table = run.draw(run.workloads[0])["positional_embedding"]
    position, column = 7, 10
    frequency = math.exp(-column * math.log(10000) / table.shape[1])
    assert table[position, column].item() == pytest.approx(math.sin(7 * frequency), abs=4e-3)
    assert table[position, column + 1].item() == pytest.approx(math.cos(7 * frequency), abs=4e-3)


def group_norm(h, weight, bias, eps):
    """Groups of 32 neighbouring channels, statistics over all of time and space."""
    groups = h.unflatten(1, (-1, 32))
    dims = tuple(range(2, groups.dim()))
    var, mean = torch.var_mean(groups, dim=dims, keepdim=True, correction=0)
    h = ((groups - mean) / torch.sqrt(var + eps)).view_as(h)
    return h * weight[:, None, None, None] + bias[:, None, None, None]


def test_video_encoder_is_a_chain_of_subsampled_convolutions(reference):
    run = reference("L2/023")
    i = cast(run.draw(run.workloads[1]), torch.float64)

    def conv(h, name):
        return F.conv3d(h, i[f"{name}_weight"], i[f"{name}_bias"], padding="valid")

    h = conv(F.pad(i["x"], (1,) * 6), "input_conv")
    for stage, step in ((1, 2), (2, 2), (3, 1)):
        shortcut = conv(h, f"down{stage}_res")[:, :, ::step, ::2, ::2]
        h = group_norm(h, i[f"down{stage}_gn_weight"], i[f"down{stage}_gn_bias"], i["eps"])
        h = conv(F.pad(h * torch.sigmoid(h), (1,) * 6), f"down{stage}_conv")
        h = h[:, :, ::step, ::2, ::2] + shortcut
    h = group_norm(h, i["latent_gn_weight"], i["latent_gn_bias"], i["eps"])
    expected = conv(F.pad(h * torch.sigmoid(h), (1,) * 6), "latent_conv")
    assert_close(run.call(i)[0], expected, 1e-9)


def test_unet_is_a_chain_of_subsampled_convolutions_and_upsampled_pixels(reference):
    run = reference("L2/033")
    i = cast(run.draw(run.workloads[0]), torch.float64)

    def conv(h, name):
        return F.conv2d(F.pad(h, (1,) * 4), i[f"{name}_weight"], i[f"{name}_bias"])

    def upsample(h, name):
        pixels = torch.einsum("bchw,cdij->bdhiwj", h, i[f"{name}_weight"])
        return pixels.flatten(4).flatten(2, 3) + i[f"{name}_bias"][:, None, None]

    skip0 = conv(i["x"], "encoder_conv0")
    skip1 = conv(conv(skip0, "downsample_conv0")[..., ::2, ::2], "encoder_conv1")
    h = conv(skip1, "downsample_conv1")[..., ::2, ::2]
    h = conv(conv(h, "encoder_conv2"), "bottleneck")
    h = conv(torch.cat((upsample(h, "upsample_conv0"), skip1), dim=1), "decoder_conv0")
    h = conv(torch.cat((upsample(h, "upsample_conv1"), skip0), dim=1), "decoder_conv1")
    assert_close(run.call(i)[0], conv(h, "output_conv"), 1e-9)


# ---- Embeddings and positions ----------------------------------------------------------------


def test_one_linear_layer_over_the_joined_streams(reference):
    run = reference("L2/030")
    for workload in run.workloads:
        i = cast(run.draw(workload), torch.float64)
        joined = torch.cat((i["encoder_hidden_states"], i["hidden_states"]), dim=1)
        y = torch.einsum("bsi,oi->bso", joined, i["process_weight"])
        text, image = run.call(i)
        assert_close(torch.cat((text, image), dim=1), y, 1e-9)


def test_timestep_and_text_conditioning(reference):
    run = reference("L2/031")
    for workload in run.workloads:
        i = cast(run.draw(workload), torch.float64)
        for name, value in i.items():
            if name.endswith("_bias"):
                value.normal_()
        turn = torch.polar(
            torch.ones(1, dtype=torch.float64), 1000 * torch.outer(i["timestep"], i["freqs"])
        )
        h = torch.cat((turn.real, turn.imag), dim=-1) @ i["timestep_linear1_weight"].T
        h = h + i["timestep_linear1_bias"]
        h = h * torch.sigmoid(h) @ i["timestep_linear2_weight"].T
        text = i["pooled_projections"] @ i["text_embedder_weight"].T
        bias = i["timestep_linear2_bias"] + i["text_embedder_bias"]
        assert_close(run.call(i)[0], h + text + bias, 1e-9)


START, IMAGE, VIDEO = 151652, 151655, 151656


def positions_of(reference, rows, images=(), videos=(), seconds=(), mask=None):
    ids = torch.tensor(rows)
    return reference("L2/006").call(
        {
            "input_ids": ids,
            "image_grid_thw": torch.tensor(images, dtype=torch.int64).view(-1, 3),
            "video_grid_thw": torch.tensor(videos, dtype=torch.int64).view(-1, 3),
            "second_per_grid_ts": torch.tensor(seconds, dtype=torch.float32),
            "attention_mask": torch.ones_like(ids) if mask is None else torch.tensor(mask),
        }
    )


def test_an_image_takes_a_grid_of_positions_and_text_goes_on_after_their_maximum(reference):
    positions, deltas = positions_of(reference, [[7, 8, START, IMAGE, 0, 0, 0, 9]], [(1, 4, 4)])
    assert positions[:, 0].tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 5],
        [0, 1, 2, 3, 3, 4, 4, 5],
        [0, 1, 2, 3, 4, 3, 4, 5],
    ]
    assert deltas.tolist() == [[-2]]


def test_a_videos_time_runs_at_two_positions_a_second(reference):
    row = [START, VIDEO, 0, 0, 5]
    positions, deltas = positions_of(reference, [row], videos=[(3, 2, 2)], seconds=[0.75])
    assert positions[:, 0].tolist() == [[0, 1, 2, 4, 5], [0, 1, 1, 1, 5], [0, 1, 1, 1, 5]]
    assert deltas.tolist() == [[1]]


def test_rows_take_items_off_the_tables_in_order(reference):
    rows = [
        [START, IMAGE, 1, START, VIDEO, 2],
        [1, 2, 3, 4, 5, 6],
        [START, VIDEO, START, IMAGE, 0, 0],
    ]
    grids = {"images": [(1, 2, 2), (1, 2, 6)], "videos": [(1, 2, 2), (1, 2, 2)]}
    positions, deltas = positions_of(reference, rows, **grids, seconds=[1.0, 1.0])
    assert positions[2].tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert positions[1].tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 3, 3]]
    assert deltas.tolist() == [[0], [0], [0]]


def test_masked_tokens_are_left_out_of_a_row_with_items(reference):
    row, mask = [9, START, IMAGE, 9, 7], [0, 1, 1, 0, 1]
    positions, deltas = positions_of(reference, [row], [(1, 2, 2)], mask=[mask])
    # The results stand in the first columns, as many as there are tokens.
    assert positions[0].tolist() == [[0, 1, 2, 1, 1]]
    assert deltas.tolist() == [[0]]


def test_without_items_positions_count_the_tokens(reference):
    positions, deltas = positions_of(
        reference, [[4, 5, 6, 7], [4, 5, 6, 7]], mask=[[0, 0, 1, 1], [1, 1, 1, 1]]
    )
    assert positions[1].tolist() == [[1, 1, 0, 1], [0, 1, 2, 3]]
    assert deltas.tolist() == [[-2], [0]]


def test_generated_rows_use_up_all_items(reference):
    run = reference("L2/006")
    for workload in run.workloads:
        inputs = run.draw(workload)
        ids = inputs["input_ids"]
        assert (ids == IMAGE).sum() == len(inputs["image_grid_thw"])
        assert (ids == VIDEO).sum() == len(inputs["video_grid_thw"])
        assert (ids == START).sum() == ((ids == IMAGE) | (ids == VIDEO)).sum()
        # Item i is in row i mod batch_size.
        batch = len(ids)
        expected = [len(range(b, len(inputs["video_grid_thw"]), batch)) for b in range(batch)]
        assert (ids == VIDEO).sum(-1).tolist() == expected
