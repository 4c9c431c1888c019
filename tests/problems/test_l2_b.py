"""Attention and transformer layers L2/045 to L2/079, one sequence and one head at a time.

The formulas run in float64 with a rounding function at every place where the problem rounds: with
bfloat16 there, nearly all elements must be equal to the last bit; with no rounding at all, the
result must be within the problem's tolerance. Norm weights and biases, which are drawn as ones and
zeros, are replaced by uneven ones, so that leaving one out shows.
"""

import math

import pytest
import torch

from tests.problems.formulas import doubles, equal_share, exact, rounded, silu

BF16 = torch.bfloat16


def vivid(inputs):
    """Inputs with uneven values in place of tensors of equal elements."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, value in inputs.items():
        made[name] = value
        if isinstance(value, torch.Tensor) and value.numel() > 1 and value.is_floating_point():
            first = value.flatten()[0]
            if bool((value == first).all()):
                noise = torch.randn(value.shape, generator=generator)
                made[name] = (first.float() + 0.5 * noise).to(value.dtype)
    return made


def check_rounded(run, workload, formula, assert_matches, share=0.98):
    """A bfloat16 layer against formula(inputs in float64, rounding function)."""
    inputs = vivid(run.draw(workload))
    (output,) = run.call(inputs)
    assert equal_share(output, formula(doubles(inputs), rounded)) >= share
    assert_matches(output, formula(doubles(inputs), exact), workload.tolerance)


def check_float32(run, workload, formula, atol=2e-5):
    """A float32 layer against formula(inputs in float64), far inside the problem's tolerance."""
    inputs = vivid(run.draw(workload))
    expected = formula(doubles(inputs))
    expected = expected if isinstance(expected, tuple) else (expected,)
    for actual, wanted in zip(run.call(inputs), expected, strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=atol)


def rms(x, eps):
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def standardized(x, eps):
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(dim=-1, keepdim=True) + eps)


def gelu_erf(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def columns(x, head, head_dim):
    return x[:, head * head_dim : (head + 1) * head_dim]


def attention(q, k, v, head_dim, score_of, r=exact, repeats=1):
    """Heads merged, of q [tokens, heads * head_dim]; score_of(q k^T, head) gives the scores."""
    heads = []
    for h in range(q.shape[1] // head_dim):
        qh = columns(q, h, head_dim)
        kh, vh = columns(k, h // repeats, head_dim), columns(v, h // repeats, head_dim)
        scores = score_of(qh @ kh.T, qh)
        heads.append(r(r(scores.softmax(dim=1)) @ vh))
    return torch.cat(heads, dim=1)


def rope(x, angle_cos, angle_sin, head_dim, r):
    """Half-split rotation, each head alone; r rounds both products and the sum."""
    half = head_dim // 2
    heads = []
    for h in range(x.shape[1] // head_dim):
        y = columns(x, h, head_dim)
        turned = torch.cat((-y[:, half:], y[:, :half]), dim=1)
        heads.append(r(r(y * angle_cos) + r(turned * angle_sin)))
    return torch.cat(heads, dim=1)


def rope_tables(seq_len, head_dim, theta):
    # The angles are formed in float32.
    i = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angle = torch.arange(seq_len, dtype=torch.float32)[:, None] * (1.0 / theta**i)
    angle = torch.cat((angle, angle), dim=1)
    return angle.cos().double(), angle.sin().double()


def test_llama_layer(reference, assert_matches):
    run = reference("L2/053")

    def formula(x, r):
        cos, sin = rope_tables(x["hidden_states"].shape[1], 128, x["rope_theta"])
        eps = x["rms_norm_eps"]

        def norm(y, weight):
            return r(r(rms(y, eps)) * weight)

        sequences = []
        for b, h in enumerate(x["hidden_states"]):
            n = norm(h, x["input_layernorm_weight"])
            q, k, v = (r(n @ x[f"{c}_proj_weight"].T) for c in "qkv")
            # cos and sin are float32, so the rotation rounds once.
            q, k = (r(rope(t, cos, sin, 128, exact)) for t in (q, k))
            mask = x["attention_mask"][b, 0]
            heads = attention(
                q, k, v, 128,
                lambda dots, _, mask=mask: r(r(r(dots) * 128**-0.5) + mask),
                r, repeats=q.shape[1] // k.shape[1],
            )  # fmt: skip
            h = r(h + r(heads @ x["o_proj_weight"].T))
            n = norm(h, x["post_attention_layernorm_weight"])
            gate = r(silu(r(n @ x["gate_proj_weight"].T)))
            inner = r(gate * r(n @ x["up_proj_weight"].T))
            sequences.append(r(h + r(inner @ x["down_proj_weight"].T)))
        return torch.stack(sequences)

    for workload in run.workloads:
        check_rounded(run, workload, formula, assert_matches)


def test_gated_vision_layer(reference, assert_matches):
    run = reference("L2/054")

    def formula(x, r):
        eps = x["norm_eps"]

        def norm(y, name):
            y = r(standardized(y, eps))
            return r(r(y * x[f"{name}_weight"]) + x[f"{name}_bias"])

        sequences = []
        for h in x["hidden_state"]:
            n = norm(h, "input_layernorm")
            q, k, v = (r(n @ x[f"{c}_proj_weight"].T) for c in "qkv")
            heads = attention(q, k, v, 80, lambda dots, _: r(r(dots) * 80**-0.5), r)
            gate = r(torch.tanh(x["gate_attn"]))
            h = r(h + r(gate * r(heads @ x["o_proj_weight"].T)))
            n = norm(h, "post_attention_layernorm")
            m = r(gelu_erf(r(r(n @ x["fc1_weight"].T) + x["fc1_bias"])))
            m = r(r(m @ x["fc2_weight"].T) + x["fc2_bias"])
            sequences.append(r(h + r(r(torch.tanh(x["gate_ffn"])) * m)))
        return torch.stack(sequences)

    for workload in run.workloads:
        check_rounded(run, workload, formula, assert_matches)


def test_qwen_layer(reference, assert_matches):
    run = reference("L2/059")

    def formula(x, r):
        eps, head_dim = x["rms_norm_eps"], x["q_norm_weight"].shape[0]

        def norm_heads(y, weight):
            return torch.cat(
                [r(rms(part, eps) * weight) for part in y.split(head_dim, dim=1)], dim=1
            )

        sequences = []
        for b, h in enumerate(x["hidden_states"]):
            n = r(rms(h, eps) * x["input_layernorm_weight"])
            q, k, v = (r(n @ x[f"{c}_proj_weight"].T) for c in "qkv")
            q, k = norm_heads(q, x["q_norm_weight"]), norm_heads(k, x["k_norm_weight"])
            # The product of position and frequency is a float32 one.
            angle = x["position_ids"][b].float()[:, None] * x["inv_freq"].float()
            angle = torch.cat((angle, angle), dim=1).double()
            cos, sin = r(angle.cos()), r(angle.sin())
            q, k = rope(q, cos, sin, head_dim, r), rope(k, cos, sin, head_dim, r)
            heads = attention(
                q, k, v, head_dim,
                lambda dots, _, b=b: r(
                    r(r(dots) * x["attention_scale"]) + x["attention_mask"][b, 0]
                ),
                r, repeats=q.shape[1] // k.shape[1],
            )  # fmt: skip
            h = r(h + r(heads @ x["o_proj_weight"].T))
            n = r(rms(h, eps) * x["post_attention_layernorm_weight"])
            inner = r(r(silu(r(n @ x["gate_proj_weight"].T))) * r(n @ x["up_proj_weight"].T))
            sequences.append(r(h + r(inner @ x["down_proj_weight"].T)))
        return torch.stack(sequences)

    for workload in run.workloads:
        check_rounded(run, workload, formula, assert_matches)


def test_encoder_decoder_layer(reference, assert_matches):
    run = reference("L2/062")

    def formula(x, r):
        eps = x["norm_eps"]
        seq_len = x["hidden_states"].shape[1]
        cos, sin = (r(t) for t in rope_tables(seq_len, 128, x["rope_theta"]))
        future = torch.full((seq_len, seq_len), -math.inf, dtype=torch.float64).triu(1)
        sequences = []
        for h, encoder in zip(x["hidden_states"], x["encoder_hidden_states"], strict=True):
            n = r(rms(h, eps) * x["self_attn_norm_weight"])
            q, k, v = (r(n @ x[f"self_attn_{c}_weight"].T) for c in "qkv")
            q, k = rope(q, cos, sin, 128, r), rope(k, cos, sin, 128, r)
            heads = attention(
                q, k, v, 128,
                lambda dots, _: r(r(dots) / math.sqrt(128)) + future,
                r, repeats=q.shape[1] // k.shape[1],
            )  # fmt: skip
            h = r(h + r(heads @ x["self_attn_o_weight"].T))
            q = r(r(rms(h, eps) * x["cross_attn_norm_weight"]) @ x["cross_attn_q_weight"].T)
            k, v = (r(encoder @ x[f"cross_attn_{c}_weight"].T) for c in "kv")
            heads = attention(q, k, v, 128, lambda dots, _: r(r(dots) / math.sqrt(128)), r)
            h = r(h + r(heads @ x["cross_attn_o_weight"].T))
            n = r(rms(h, eps) * x["mlp_norm_weight"])
            inner = r(r(silu(r(n @ x["mlp_gate_weight"].T))) * r(n @ x["mlp_up_weight"].T))
            sequences.append(r(h + r(inner @ x["mlp_down_weight"].T)))
        return torch.stack(sequences)

    for workload in run.workloads:
        check_rounded(run, workload, formula, assert_matches)


def test_conformer_attention_stays_within_blocks(reference, assert_matches):
    run = reference("L2/046")
    assert any(w.axes["seq_len"] % 64 for w in run.workloads)

    def formula(x, r):
        block, head_dim = x["rel_pos_emb_weight"].shape[0] // 2, x["rel_pos_emb_weight"].shape[1]
        sequences = []
        for h in x["hidden_states"]:
            n = standardized(h, 1e-5) * x["pre_norm_weight"] + x["pre_norm_bias"]
            blocks = []
            for part in r(n).split(block):
                q = r(part @ x["to_q_weight"].T)
                k, v = r(part @ x["to_kv_weight"].T).chunk(2, dim=1)
                distance = torch.arange(len(part))[:, None] - torch.arange(len(part))
                table = x["rel_pos_emb_weight"][distance + block]

                def scores(dots, qh, table=table):
                    relative = torch.stack([t @ row for t, row in zip(table, qh, strict=True)])
                    return x["scale"] * dots + r(x["scale"] * relative)

                # The attention proper is float32 with one rounding at its end.
                blocks.append(r(attention(q, k, v, head_dim, scores)))
            sequences.append(torch.cat(blocks) @ x["to_out_weight"].T + x["to_out_bias"])
        return r(torch.stack(sequences))

    for workload in run.workloads:
        check_rounded(run, workload, formula, assert_matches, share=0.97)


def test_audio_encoder_layer(reference, assert_matches):
    run = reference("L2/055")

    def formula(x, r):
        def conv(y, name, stride):
            y = torch.nn.functional.pad(y, (1, 1))
            taps = [y[:, j : y.shape[1] - 2 + j : stride] for j in range(3)]
            weight, bias = x[f"{name}_weight"], x[f"{name}_bias"]
            return sum(weight[:, :, j] @ taps[j] for j in range(3)) + bias[:, None]

        def norm(y, name):
            return r(standardized(y, 1e-5) * x[f"{name}_weight"] + x[f"{name}_bias"])

        def linear(y, name):
            return r(y @ x[f"{name}_weight"].T + x.get(f"{name}_bias", 0.0))

        sequences = []
        for features in x["input_features"]:
            y = r(gelu_erf(r(conv(features, "conv1", 1))))
            y = r(gelu_erf(r(conv(y, "conv2", 2))))
            h = r(y.T + x["embed_positions_weight"])
            n = norm(h, "self_attn_layer_norm")
            q, k, v = (linear(n, f"{c}_proj") for c in "qkv")
            heads = attention(q / 16, k, v, 256, lambda dots, _: r(dots), r)
            h = r(h + linear(heads, "out_proj"))
            n = norm(h, "final_layer_norm")
            sequences.append(r(h + linear(r(gelu_erf(linear(n, "fc1"))), "fc2")))
        return torch.stack(sequences)

    for workload in run.workloads:
        check_rounded(run, workload, formula, assert_matches)


def test_grouped_encoder_layer(reference):
    run = reference("L2/063")

    def formula(x):
        head_dim, eps = x["cos"].shape[-1], x["norm_eps"]
        sequences = []
        for b, h in enumerate(x["hidden_states"]):
            n = rms(h, eps) * x["pre_sa_norm_weight"]
            q, k, v = (n @ x[f"{c}_proj_weight"].T for c in "qkv")
            q, k = (rope(t, x["cos"][b], x["sin"][b], head_dim, exact) for t in (q, k))
            heads = attention(
                q, k, v, head_dim, lambda dots, _: dots / 8, repeats=q.shape[1] // k.shape[1]
            )
            h = h + heads @ x["o_proj_weight"].T
            t = rms(h, eps) * x["post_sa_norm_weight"] @ x["gate_up_proj_weight"].T
            inner = t.shape[1] // 2
            sequences.append(h + t[:, inner:] * silu(t[:, :inner]) @ x["down_proj_weight"].T)
        return torch.stack(sequences)

    for workload in run.workloads:
        check_float32(run, workload, formula)


def test_joint_transformer_block(reference):
    run = reference("L2/069")

    def formula(x):
        def linear(y, name):
            return y @ x[f"{name}_weight"].T + x[f"{name}_bias"]

        texts, images = [], []
        streams = (x["hidden_states"], x["encoder_hidden_states"], x["temb"])
        for image, text, temb in zip(*streams, strict=True):
            i_mod = linear(silu(temb), "norm1").view(6, -1)
            t_mod = linear(silu(temb), "norm1_context").view(6, -1)
            i = standardized(image, 1e-6) * (1 + i_mod[1]) + i_mod[0]
            t = standardized(text, 1e-6) * (1 + t_mod[1]) + t_mod[0]
            q, k, v = (torch.cat((linear(i, f"to_{c}"), linear(t, f"add_{c}_proj"))) for c in "qkv")
            heads = attention(q, k, v, 64, lambda dots, _: dots / 8)
            image = image + i_mod[2] * linear(heads[: len(image)], "to_out")
            text = text + t_mod[2] * linear(heads[len(image) :], "to_add_out")
            i = standardized(image, 1e-6) * (1 + i_mod[4]) + i_mod[3]
            t = standardized(text, 1e-6) * (1 + t_mod[4]) + t_mod[3]
            i = linear(gelu_tanh(linear(i, "ff_linear1")), "ff_linear2")
            t = linear(gelu_tanh(linear(t, "ff_context_linear1")), "ff_context_linear2")
            images.append(image + i_mod[5] * i)
            texts.append(text + t_mod[5] * t)
        return torch.stack(texts), torch.stack(images)

    for workload in run.workloads:
        check_float32(run, workload, formula, atol=5e-5)


def test_diffusion_transformer_block(reference):
    run = reference("L2/070")

    def formula(x):
        def norm(y, index):
            y = standardized(y, x["norm_eps"])
            return y * x[f"norm{index}_weight"] + x[f"norm{index}_bias"]

        def attend(name, y, context):
            q = y @ x[f"{name}_to_q_weight"].T
            k, v = (context @ x[f"{name}_to_{c}_weight"].T for c in "kv")
            heads = attention(q, k, v, 24, lambda dots, _: dots / math.sqrt(24))
            return heads @ x[f"{name}_to_out_weight"].T + x[f"{name}_to_out_bias"]

        sequences = []
        for h, encoder in zip(x["hidden_states"], x["encoder_hidden_states"], strict=True):
            n = norm(h, 1)
            h = h + attend("attn1", n, n)
            h = h + attend("attn2", norm(h, 2), encoder)
            t = norm(h, 3) @ x["ff_linear1_weight"].T + x["ff_linear1_bias"]
            inner = t.shape[1] // 2
            m = t[:, :inner] * gelu_tanh(t[:, inner:])
            sequences.append(h + m @ x["ff_linear2_weight"].T + x["ff_linear2_bias"])
        return torch.stack(sequences)

    for workload in run.workloads:
        check_float32(run, workload, formula)


def test_two_way_block_leaves_the_point_embedding_out_where_told(reference):
    run = reference("L2/075")
    flags = {run.draw(workload)["skip_first_layer_pe"] for workload in run.workloads}
    assert flags == {True, False}

    def formula(x):
        def linear(y, name):
            return y @ x[f"{name}_weight"].T + x[f"{name}_bias"]

        def norm(y, index):
            y = standardized(y, 1e-6)
            return y * x[f"layer_norm{index}_weight"] + x[f"layer_norm{index}_bias"]

        def attend(name, q, k, v):
            q, k, v = linear(q, f"{name}_q"), linear(k, f"{name}_k"), linear(v, f"{name}_v")
            width = q.shape[1] // 8
            heads = attention(q, k, v, width, lambda dots, _: dots / math.sqrt(width))
            return linear(heads, f"{name}_out")

        names = ("queries", "keys", "query_point_embedding", "key_point_embedding")
        all_queries, all_keys = [], []
        for q, k, qe, ke in zip(*(x[n].flatten(0, 1) for n in names), strict=True):
            a = q if x["skip_first_layer_pe"] else q + qe
            q = norm(q + attend("self_attn", a, a, q), 1)
            q = norm(q + attend("cross_t2i", q + qe, k + ke, k), 2)
            q = norm(q + linear(linear(q, "mlp_lin1").clamp(min=0), "mlp_lin2"), 3)
            all_queries.append(q)
            all_keys.append(norm(k + attend("cross_i2t", k + ke, q + qe, q), 4))
        queries = torch.stack(all_queries).view(x["queries"].shape)
        return queries, torch.stack(all_keys).view(x["keys"].shape)

    for workload in run.workloads:
        check_float32(run, workload, formula)


def test_window_attention_takes_padding_as_keys(reference):
    run = reference("L2/077")
    sides = [(w.axes["height"] % 7, w.axes["width"] % 7) for w in run.workloads]
    assert (0, 0) in sides and any(h and w for h, w in sides)

    def formula(x):
        window, head_dim = (x["rel_pos_h"].shape[0] + 1) // 2, x["rel_pos_h"].shape[1]
        eps = x["layer_norm_eps"]
        grid = [(i, j) for i in range(window) for j in range(window)]
        dy = torch.tensor([[a[0] - b[0] + window - 1 for b in grid] for a in grid])
        dx = torch.tensor([[a[1] - b[1] + window - 1 for b in grid] for a in grid])

        def scores(dots, q):
            relative = torch.einsum("qd,qkd->qk", q, x["rel_pos_h"][dy] + x["rel_pos_w"][dx])
            return dots / math.sqrt(head_dim) + relative

        images = []
        for image in x["hidden_states"]:
            height, width, channels = image.shape
            n = standardized(image, eps) * x["layer_norm1_weight"] + x["layer_norm1_bias"]
            attended = torch.zeros_like(n)
            for top in range(0, height, window):
                for left in range(0, width, window):
                    part = n[top : top + window, left : left + window]
                    padded = part.new_zeros(window, window, channels)
                    padded[: part.shape[0], : part.shape[1]] = part
                    qkv = padded.flatten(0, 1) @ x["qkv_weight"].T + x["qkv_bias"]
                    o = attention(*qkv.chunk(3, dim=1), head_dim, scores)
                    o = (o @ x["proj_weight"].T + x["proj_bias"]).view(window, window, channels)
                    place = attended[top : top + window, left : left + window]
                    place.copy_(o[: part.shape[0], : part.shape[1]])
            h = image + attended
            m = standardized(h, eps) * x["layer_norm2_weight"] + x["layer_norm2_bias"]
            m = gelu_erf(m @ x["mlp_lin1_weight"].T + x["mlp_lin1_bias"])
            images.append(h + m @ x["mlp_lin2_weight"].T + x["mlp_lin2_bias"])
        return torch.stack(images)

    for workload in run.workloads:
        check_float32(run, workload, formula)


def test_quick_gelu_layer(reference):
    run = reference("L2/079")

    def formula(x):
        def linear(y, name):
            return y @ x[f"{name}_weight"].T + x[f"{name}_bias"]

        def norm(y, index):
            y = standardized(y, x["layer_norm_eps"])
            return y * x[f"layer_norm{index}_weight"] + x[f"layer_norm{index}_bias"]

        sequences = []
        for h in x["hidden_states"]:
            n = norm(h, 1)
            q, k, v = (linear(n, f"{c}_proj") for c in "qkv")
            h = h + linear(attention(q, k, v, 64, lambda dots, _: dots / 8), "out_proj")
            m = linear(norm(h, 2), "fc1")
            sequences.append(h + linear(m / (1 + torch.exp(-1.702 * m)), "fc2"))
        return torch.stack(sequences)

    for workload in run.workloads:
        check_float32(run, workload, formula)


def fused_embeddings(x):
    """The whole of L2/045, the windows that are thrown away included."""

    def linear(y, name):
        return y @ x[f"{name}_weight"].T + x[f"{name}_bias"]

    result = x["lm_embeddings"].clone()
    for b, features in enumerate(x["input_features"]):
        h = linear(features, "encoder_input")
        h = h + linear(linear(h, "encoder_out").softmax(dim=1), "encoder_out_mid")
        h = torch.cat((h, h.new_zeros(-len(h) % 15, h.shape[1])))
        rows = []
        for window in h.split(15):
            q = linear(x["learnable_queries"][0], "qformer_q_proj")
            k, v = linear(window, "qformer_k_proj"), linear(window, "qformer_v_proj")
            heads = attention(q, k, v, 64, lambda dots, _: dots / 8)
            rows.append(linear(linear(heads, "qformer_out_proj"), "projector"))
        rows = torch.cat(rows)
        for i, position in enumerate(x["audio_token_positions"][b].tolist()):
            result[b, position] = rows[i]
    return result


def test_speech_bridge_is_the_whole_computation_cut_short(reference, assert_matches):
    run = reference("L2/045")
    for workload in run.workloads:
        inputs = vivid(run.draw(workload))
        (output,) = run.call(inputs)
        expected = fused_embeddings(doubles(inputs))
        assert_matches(output, expected, workload.tolerance)
        assert equal_share(output, expected) >= 0.995


def test_speech_bridge_reads_the_leading_frames_alone(reference):
    run = reference("L2/045")
    workload = run.workloads[0]
    inputs = run.draw(workload)
    windows = -(-workload.axes["num_audio_tokens"] // 10)
    (before,) = run.call(inputs)
    inputs["input_features"] = inputs["input_features"].clone()
    inputs["input_features"][:, 15 * windows :] = float("nan")
    assert torch.equal(run.call(inputs)[0], before)
    inputs["input_features"][:, 15 * windows - 1] += 50
    assert not torch.equal(run.call(inputs)[0], before)


@pytest.mark.parametrize("problem_id", ["L2/053", "L2/059"])
def test_masked_keys_have_no_influence(reference, problem_id):
    run = reference(problem_id)
    inputs = run.draw(run.workloads[0])
    inputs["attention_mask"][..., 5] = torch.finfo(BF16).min
    inputs["attention_mask"][..., 5, 5] = 0  # row 5 keeps one key
    (before,) = run.call(inputs)
    changed = inputs["hidden_states"].clone()
    changed[:, 5] += 1
    (after,) = run.call(inputs | {"hidden_states": changed})
    others = torch.arange(before.shape[1]) != 5
    assert torch.equal(after[:, others], before[:, others])
    assert not torch.equal(after[:, 5], before[:, 5])
