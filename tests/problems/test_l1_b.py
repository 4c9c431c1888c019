"""Forward references L1/048 to L1/094 against independent formulas, in float64."""

import statistics

import pytest
import torch
import torch.nn.functional as F

from tests.problems.formulas import assert_near, cast, rms_norm, rotated, rounded, split_heads

BF16 = torch.bfloat16


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


# ---- Forward problems that one expression describes -----------------------------------------

FORMULAS = {
    "L1/048": lambda x, gate, up: gelu_tanh(x @ gate.T) * (x @ up.T),
    "L1/049": lambda q, k, scale: torch.einsum("bhid,bjd->bhij", q, k[:, 0]) * scale,
    "L1/054": lambda x, q, k, v, q_norm, k_norm, eps: (
        rms_norm(split_heads(x @ q.T, 128), q_norm, eps).transpose(1, 2),
        rms_norm(split_heads(x @ k.T, 128), k_norm, eps).transpose(1, 2),
        split_heads(x @ v.T, 128).transpose(1, 2),
    ),
    "L1/055": lambda x, *weights: tuple(
        torch.einsum("bsc,hdc->bhsd", x, w.unflatten(0, (-1, 128))) for w in weights
    ),
    "L1/063": lambda x, w: torch.einsum("bhsd,ohd->bso", x, w.unflatten(1, x.shape[1::2])),
    "L1/064": lambda x, norm, w, eps: torch.einsum(
        "bsc,hjdc->jbhsd", rms_norm(x, norm, eps), w.unflatten(0, (-1, 2, 128))
    ),
    "L1/065": lambda x, w, bias: F.conv1d(x, w, bias).chunk(2, dim=1),
    "L1/073": lambda x, norm, k, v, eps: tuple(
        split_heads(rms_norm(x, norm, eps) @ w.T, 64) for w in (k, v)
    ),
    "L1/074": lambda x, gate_up, down: (
        (
            (x @ gate_up[: len(gate_up) // 2].T).sigmoid()
            * (x @ gate_up[: len(gate_up) // 2].T)
            * (x @ gate_up[len(gate_up) // 2 :].T)
        )
        @ down.T
    ),
    "L1/077": lambda x, w: torch.einsum("bsc,vc->bsv", x, w),
    "L1/080": lambda x, temb, w, bias, eps: (
        (x - x.mean(-1, keepdim=True))
        / (x.var(-1, correction=0, keepdim=True) + eps).sqrt()
        * (1 + (temb @ w.T + bias)[:, None, : x.shape[-1]])
        + (temb @ w.T + bias)[:, None, x.shape[-1] :]
    ),
    "L1/081": lambda image, context, w, bias: tuple(
        x @ (w[:, : x.shape[-1]] + w[:, x.shape[-1] :]).T + bias for x in (image, context)
    ),
    "L1/083": lambda p, v: torch.einsum("bhij,bhjd->bihd", p, v).flatten(2),
    "L1/085": lambda x: gelu_tanh(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :],
    "L1/088": lambda q, k, cos, sin: (rotated(q, cos, sin), rotated(k, cos, sin)),
}


@pytest.mark.parametrize("problem_id", FORMULAS)
def test_forward_is_its_formula_in_float64(reference, assert_matches, problem_id):
    run = reference(problem_id)
    for workload in run.workloads:
        inputs = run.draw(workload)
        expected = FORMULAS[problem_id](*cast(inputs, torch.float64).values())
        outputs = run.call(inputs)
        expected = (expected,) if len(outputs) == 1 else expected
        for actual, wanted in zip(outputs, expected, strict=True):
            assert_matches(actual, wanted, workload.tolerance)


# ---- Where the roundings are ----------------------------------------------------------------


def test_geglu_projections_round_gate_up_activation_and_product(reference, assert_same_rounding):
    run = reference("L1/048")
    inputs = run.draw(run.workloads[0])
    x, gate, up = cast(inputs, torch.float64).values()
    activated = rounded(gelu_tanh(rounded(x @ gate.T)))
    assert_same_rounding(run.call(inputs)[0], (activated * rounded(x @ up.T)).to(BF16))


def test_biased_projections_round_before_the_bias(reference, assert_same_rounding):
    run = reference("L1/050")
    inputs = run.draw(run.workloads[0])
    x, *parameters = cast(inputs, torch.float64).values()
    for output, weight, bias in zip(
        run.call(inputs), parameters[::2], parameters[1::2], strict=True
    ):
        expected = (rounded(x @ weight.T) + bias).to(BF16)
        assert_same_rounding(output, expected.unflatten(-1, (-1, 256)))


def test_rope_cache_append_keeps_old_rows_and_rounds_products_and_sum(
    reference, assert_same_rounding
):
    run = reference("L1/071")
    for workload in run.workloads:
        inputs = run.draw(workload)
        old = workload.axes["current_seq_len"]
        keys, values = run.call(inputs)
        assert torch.equal(keys[:, :, :old], inputs["key_cache"])
        assert torch.equal(values[:, :, :old], inputs["value_cache"])
        assert torch.equal(values[:, :, old:], inputs["value_states"])
        key, _, cos, sin = list(cast(inputs, torch.float64).values())[:4]
        swapped = torch.cat((-key[..., 32:], key[..., :32]), dim=-1)
        expected = (rounded(key * cos) + rounded(swapped * sin)).to(BF16)
        assert_same_rounding(keys[:, :, old:], expected)


# ---- Routing, sorting, embedding, activations -----------------------------------------------


def test_altup_streams_take_the_first_streams_magnitude(reference, assert_same_rounding):
    run = reference("L1/052")
    for workload in run.workloads:
        inputs = run.draw(workload)
        (first, second, third), w1, w2, eps = cast(inputs, torch.float64).values()
        total, floored = first, []
        for stream, weight in ((second, w1), (third, w2)):
            projected = stream @ weight.T
            mean_square = (projected**2).mean(dim=-1, keepdim=True)
            floored.append(mean_square < eps)
            current = torch.where(floored[-1], eps, mean_square).sqrt()
            total = total + projected * (first**2).mean(dim=-1, keepdim=True).sqrt() / current
        assert_same_rounding(run.call(inputs)[0], (total / 3).to(BF16))
    floored = torch.stack(floored)  # the last workload has rows on both sides of epsilon
    assert floored.any() and not floored.all()


def test_gaussian_topk_subtracts_the_normal_quantile(reference, assert_matches):
    run = reference("L1/053")
    for workload in run.workloads:
        inputs = run.draw(workload)
        x, sparsity = cast(inputs, torch.float64).values()
        z = statistics.NormalDist().inv_cdf(sparsity)
        threshold = x.mean(-1, keepdim=True) + z * x.std(-1, correction=0, keepdim=True)
        (output,) = run.call(inputs)
        assert_matches(output, (x - threshold).clamp(min=0), workload.tolerance)
        assert (output == 0).double().mean().item() == pytest.approx(sparsity, abs=0.01)
    assert torch.equal(run.call(inputs | {"target_sparsity": 0.0})[0], inputs["inputs"])


def test_mtp_input_block_looks_one_token_ahead(reference, assert_matches):
    run = reference("L1/057")
    workload = run.workloads[1]
    inputs = run.draw(workload)
    ids, hidden, table, enorm, hnorm, weight, eps = cast(inputs, torch.float64).values()
    expected = torch.empty_like(hidden)
    for b, row in enumerate(ids.tolist()):
        for t, token in enumerate([*row[1:], 0]):
            parts = (rms_norm(table[token], enorm, eps), rms_norm(hidden[b, t], hnorm, eps))
            expected[b, t] = weight @ torch.cat(parts)
    (output,) = run.call(inputs)
    assert_matches(output, expected, workload.tolerance)
    changed = inputs | {"input_ids": ids.clone()}
    changed["input_ids"][:, 0] = 5
    assert torch.equal(run.call(changed)[0], output)  # nobody looks at the first token


def test_expert_sort_is_stable_and_its_offsets_bound_each_expert(reference):
    run = reference("L1/058")
    for workload in run.workloads:
        inputs = run.draw(workload)
        experts = inputs["topk_idx"].flatten().tolist()
        positions, offsets = (output.tolist() for output in run.call(inputs))
        assert positions == sorted(range(len(experts)), key=experts.__getitem__)
        assert offsets[0] == 0 and offsets[-1] == len(experts)
        for expert in range(256):
            owned = positions[offsets[expert] : offsets[expert + 1]]
            assert all(experts[p] == expert for p in owned)


def test_group_routing_keeps_the_four_groups_with_the_best_pairs(reference):
    run = reference("L1/059")
    inputs = run.draw(run.workloads[2])
    masked, group_mask = run.call(inputs)
    for scores, row, mask in zip(inputs["scores"], masked, group_mask, strict=True):
        groups = scores.view(8, 32)
        best = [sum(sorted(group.tolist())[-2:]) for group in groups]
        kept = sorted(range(8), key=best.__getitem__)[-4:]
        assert sorted(mask.nonzero().flatten().tolist()) == sorted(kept)
        expected = torch.full_like(groups, -torch.inf)
        expected[kept] = groups[kept]
        assert torch.equal(row, expected.flatten())
        assert set(mask.tolist()) == {0.0, 1.0}


def test_dense_experts_are_summed_token_by_token(reference, assert_matches):
    run = reference("L1/076")
    for workload in run.workloads[1:]:
        inputs = run.draw(workload)
        x, routing, gate_up, gate_up_bias, down, down_bias, alpha, limit = cast(
            inputs, torch.float64
        ).values()
        expected = torch.zeros_like(x)
        for e in range(len(gate_up)):
            joint = x @ gate_up[e] + gate_up_bias[e]
            gate, up = joint.unflatten(-1, (-1, 2)).unbind(-1)
            acts = ((gate > limit) | (up.abs() > limit)).any()
            gate = torch.minimum(gate, torch.tensor(limit).double())
            unit = (up.clip(-limit, limit) + 1) * gate / (1 + torch.exp(-alpha * gate))
            output = unit @ down[e] + down_bias[e]
            expected += routing[:, e].view(*x.shape[:2], 1) * output
        assert_matches(run.call(inputs)[0], expected, workload.tolerance)
    assert acts  # the last workload's limit is low enough to matter


def test_group_norm_takes_each_block_of_channels_on_its_own(reference, assert_matches):
    run = reference("L1/078")
    for workload in run.workloads:
        inputs = run.draw(workload)
        x, weight, bias, eps = cast(inputs, torch.float64).values()
        blocks = x.view(len(x), 32, -1)
        std = (blocks.var(dim=-1, correction=0, keepdim=True) + eps).sqrt()
        normalized = ((blocks - blocks.mean(dim=-1, keepdim=True)) / std).view_as(x)
        expected = normalized * weight[:, None, None] + bias[:, None, None]
        assert_matches(run.call(inputs)[0], expected, workload.tolerance)


def test_mask_decoder_heads_are_five_networks_of_their_own(reference, assert_matches):
    run = reference("L1/086")
    workload = run.workloads[1]
    inputs = run.draw(workload)
    x = cast(inputs, torch.float64)

    def network(rows, prefix):
        for layer in ("proj_in", "hidden", "proj_out"):
            rows = rows @ x[f"{prefix}_{layer}_weight"].T + x[f"{prefix}_{layer}_bias"]
            rows = rows if layer == "proj_out" else rows.clamp(min=0)
        return rows

    iou_scores, hyper_weights = run.call(inputs)
    assert_matches(iou_scores, network(x["iou_token_out"], "iou"), workload.tolerance)
    for i in range(4):
        expected = network(x["mask_tokens_out"][:, :, i], f"hyper{i}")
        assert_matches(hyper_weights[:, :, i], expected, workload.tolerance)


# ---- Attention and scans --------------------------------------------------------------------


@pytest.mark.parametrize("scores_at_once", [None, 5000])
def test_long_attention_is_the_same_in_blocks_of_queries(reference, assert_matches, scores_at_once):
    run = reference("L1/067")
    if scores_at_once:
        run.module.run.__globals__["SCORES_AT_ONCE"] = scores_at_once
    workload = run.workloads[0]
    inputs = run.draw(workload)
    x, cos, sin, q, k, v, o = cast(inputs, torch.float64).values()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    attended = F.scaled_dot_product_attention(
        rotated(split_heads(x @ q.T, 32), cos, sin),
        rotated(split_heads(x @ k.T, 32), cos, sin),
        split_heads(x @ v.T, 32),
        is_causal=True,
        enable_gqa=True,
    )
    expected = attended.transpose(1, 2).flatten(2) @ o.T
    assert_matches(run.call(inputs)[0], expected, workload.tolerance)


@pytest.mark.parametrize("is_causal", [False, True])
def test_unscaled_attention_returns_output_and_probabilities(reference, assert_matches, is_causal):
    run = reference("L1/075")
    workload = run.workloads[2]
    inputs = run.draw(workload) | {"is_causal": is_causal}
    inputs["position_ids"] = inputs["position_ids"].flip(-1) * 3 + 1
    inputs["q_proj_weight"] = 20 * inputs["q_proj_weight"]  # a softmax that is not flat
    x, positions, q, k, v, o, frequencies, _ = cast(inputs, torch.float64).values()
    turn = torch.polar(torch.ones(()).double(), positions[:, None, :, None] * frequencies)

    def turned(states):
        first, second = states.chunk(2, dim=-1)
        product = torch.complex(first, second) * turn
        return torch.cat((product.real, product.imag), dim=-1)

    q, k, v = (
        turned(split_heads(x @ q.T, 64)),
        turned(split_heads(x @ k.T, 64)),
        split_heads(x @ v.T, 64),
    )
    attended = F.scaled_dot_product_attention(
        q, k, v, scale=1.0, is_causal=is_causal, enable_gqa=True
    )
    output, probabilities = run.call(inputs)
    assert_matches(output, attended.transpose(1, 2).flatten(2) @ o.T, workload.tolerance)
    assert_near(probabilities.sum(dim=-1), torch.ones(probabilities.shape[:-1]))
    assert_near(probabilities.double() @ v.repeat_interleave(2, dim=1), attended, rtol=1e-4)
    assert (probabilities.triu(1) == 0).all() == is_causal


def test_normed_heads_attention_is_sdpa_between_two_projections(reference, assert_matches):
    run = reference("L1/082")
    workload = run.workloads[2]
    inputs = run.draw(workload)
    for name in ("q_norm_weight", "q_norm_bias", "k_norm_weight", "k_norm_bias"):
        inputs[name] = torch.randn(64, generator=torch.Generator().manual_seed(len(name)))
    x, w, b, q_weight, q_bias, k_weight, k_bias, out, out_bias, eps = cast(
        inputs, torch.float64
    ).values()
    q, k, v = (
        split_heads(x @ wi.T + bi, 64) for wi, bi in zip(w.chunk(3), b.chunk(3), strict=True)
    )

    def norm(t, weight, bias):
        t = t - t.mean(dim=-1, keepdim=True)
        return rms_norm(t, weight, eps) + bias

    q, k = norm(q, q_weight, q_bias), norm(k, k_weight, k_bias)
    attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    assert_matches(run.call(inputs)[0], attended @ out.T + out_bias, workload.tolerance)


def test_image_attention_has_one_head_and_a_residual(reference, assert_matches):
    run = reference("L1/089")
    workload = run.workloads[1]
    inputs = run.draw(workload)
    x, weight, bias, *parameters, eps = cast(inputs, torch.float64).values()
    normed = F.group_norm(x, 32, weight, bias, eps).flatten(2).mT
    (q, k, v), (out, out_bias) = (
        [normed @ w.T + b for w, b in zip(parameters[:6:2], parameters[1:6:2], strict=True)],
        parameters[6:],
    )
    attended = F.scaled_dot_product_attention(q, k, v) @ out.T + out_bias
    assert_matches(run.call(inputs)[0], x + attended.mT.reshape(x.shape), workload.tolerance)


def test_biased_causal_attention_is_sdpa_up_to_bfloat16(reference, assert_matches):
    run = reference("L1/092")
    workload = run.workloads[2]
    inputs = run.draw(workload)
    for name in ("q_norm_weight", "k_norm_weight"):
        inputs[name] = 1 + 0.5 * inputs["cos"][0, 0]
    x, wq, bq, wk, bk, wv, bv, o, q_norm, k_norm, cos, sin, eps = cast(
        inputs, torch.float64
    ).values()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    attended = F.scaled_dot_product_attention(
        rotated(rms_norm(split_heads(x @ wq.T + bq, 32), q_norm, eps), cos, sin),
        rotated(rms_norm(split_heads(x @ wk.T + bk, 32), k_norm, eps), cos, sin),
        split_heads(x @ wv.T + bv, 32),
        is_causal=True,
        enable_gqa=True,
    )
    expected = attended.transpose(1, 2).flatten(2) @ o.T
    assert_matches(run.call(inputs)[0], expected, workload.tolerance)


def test_intra_chunk_output_sums_the_given_decays_again(reference, assert_same_rounding):
    run = reference("L1/070")
    inputs = run.draw(run.workloads[0])
    x, a, b, c = cast(inputs, torch.float64).values()
    b, c = (t.repeat_interleave(2, dim=3) for t in (b, c))  # two heads a group
    expected = torch.zeros_like(x)
    for i in range(x.shape[2]):
        for j in range(i + 1):
            decay = a[..., j + 1 : i + 1].sum(dim=-1).exp().transpose(1, 2)
            score = (c[:, :, i] * b[:, :, j]).sum(dim=-1) * decay
            expected[:, :, i] += score.unsqueeze(-1) * x[:, :, j]
    assert_same_rounding(run.call(inputs)[0], expected.to(BF16))


def test_wkv_is_a_decaying_average_with_a_bonus_for_the_current_step(reference, assert_matches):
    run = reference("L1/094")
    for workload in run.workloads[1:]:
        inputs = run.draw(workload)
        w, key, bonus, value, maximum, num, den = cast(inputs, torch.float64).values()
        decay, steps = torch.exp(w), key.shape[1]
        output, max_out, num_out, den_out = run.call(inputs)
        # No stabilisation is needed in float64.
        kept, added, current = (-decay).exp(), key.exp(), (bonus + key).exp()
        num, den = num * maximum.exp(), den * maximum.exp()
        largest, expected = [maximum - steps * decay], []
        for t in range(steps):
            expected.append((num + current[:, t] * value[:, t]) / (den + current[:, t]))
            num, den = num * kept + added[:, t] * value[:, t], den * kept + added[:, t]
            largest.append(key[:, t] - (steps - 1 - t) * decay)
        assert_matches(output, torch.stack(expected, dim=1), workload.tolerance)
        scale = max_out.double().exp()
        assert_matches(max_out, torch.stack(largest).amax(dim=0), workload.tolerance)
        assert_matches(num_out * scale, num, workload.tolerance)
        assert_matches(den_out * scale, den, workload.tolerance)
