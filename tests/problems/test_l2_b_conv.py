"""Scans, convolutions and the rest of L2/044 to L2/078, from their plain definitions in float64."""

import math

import pytest
import torch

from tests.problems.formulas import doubles, equal_share, exact, rounded, silu

BF16 = torch.bfloat16


def vivid(inputs, only=""):
    """Inputs with uneven values in place of tensors of equal elements, of names holding `only`."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, value in inputs.items():
        made[name] = value
        if only in name and isinstance(value, torch.Tensor) and value.is_floating_point():
            first = value.flatten()[0]
            if value.numel() > 1 and bool((value == first).all()):
                noise = torch.randn(value.shape, generator=generator)
                made[name] = (first.float() + 0.5 * noise).to(value.dtype)
    return made


def conv3x3(x, weight, bias):
    """Cross-correlation with padding 1 as nine shifted products; x is [batch, channels, h, w]."""
    height, width = x.shape[2:]
    padded = torch.zeros(*x.shape[:2], height + 2, width + 2, dtype=x.dtype)
    padded[:, :, 1:-1, 1:-1] = x
    y = bias[:, None, None]
    for i in range(3):
        for j in range(3):
            shifted = padded[:, :, i : i + height, j : j + width]
            y = y + torch.einsum("oc,bchw->bohw", weight[:, :, i, j], shifted)
    return y


def group_norm(x, weight, bias, eps, groups=32):
    grouped = x.reshape(x.shape[0], groups, -1)
    centred = grouped - grouped.mean(dim=2, keepdim=True)
    normal = centred / torch.sqrt((centred * centred).mean(dim=2, keepdim=True) + eps)
    return normal.view(x.shape) * weight[:, None, None] + bias[:, None, None]


def causal_convolution(u, k):
    """y[b, c, t] = sum over s of k[c, s] u[b, c, t - s], by the Toeplitz matrix of k."""
    length = u.shape[-1]
    lag = torch.arange(length)[:, None] - torch.arange(length)
    toeplitz = torch.where(lag >= 0, k[:, lag.clamp(min=0)], 0.0)
    return torch.einsum("cts,bcs->bct", toeplitz, u)


def test_mamba_discretisation_is_the_product_of_single_decays(reference, assert_same_rounding):
    run = reference("L2/044")
    for workload in run.workloads:
        inputs = run.draw(workload)
        inputs["dt"][0, 0, 0] = 25  # in the linear part of softplus
        _, dt, a_log, b, c = doubles(inputs).values()
        dt = torch.log1p(torch.exp(dt))
        step = torch.exp(-torch.exp(a_log) * dt).permute(0, 3, 1, 2)  # decay of one step
        length = step.shape[-1]
        decay = torch.zeros(*step.shape, length, dtype=torch.float64)
        for i in range(length):
            decay[..., i, i] = 1
            if i:
                decay[..., i, :i] = decay[..., i - 1, :i] * step[..., i, None]
        gram = torch.einsum("bcin,bcjn->bcij", c[..., 0, :], b[..., 0, :])
        gram = gram[..., None].expand(*gram.shape, step.shape[1])
        product = gram * decay.permute(0, 2, 3, 4, 1)
        outputs = run.call(inputs)
        for actual, expected in zip(outputs, (decay, gram, product), strict=False):
            assert_same_rounding(actual, expected.to(BF16))
        assert not outputs[0].triu(1).any() and outputs[1][0, 0, 0, -1].all()
        torch.testing.assert_close(
            outputs[3].double(), step.log().cumsum(dim=-1), rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(outputs[4].double(), decay[..., -1, :], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decay_shift", [0.0, -6.0])
def test_mamba_mixer_is_the_plain_recurrence(reference, assert_matches, decay_shift):
    """As drawn, little outlives a chunk; with slower decays the state carries over."""
    run = reference("L2/058")
    for workload in run.workloads:
        inputs = vivid(run.draw(workload), only="norm_weight")
        inputs["A_log"] = inputs["A_log"] + decay_shift
        x = doubles(inputs)
        heads, intermediate = len(x["D"]), len(x["norm_weight"])
        for r, share in ((rounded, 0.97), (exact, 0.0)):
            p = r(x["hidden_states"] @ x["in_proj_weight"].T)
            conv_dim = len(x["conv1d_bias"])
            gate, xbc = p[..., :intermediate], p[..., intermediate : intermediate + conv_dim]
            dt = p[..., intermediate + conv_dim :]
            taps = torch.nn.functional.pad(xbc, (0, 0, 3, 0)).unfold(1, 4, 1)
            c = r((taps * x["conv1d_weight"][:, 0]).sum(dim=-1) + x["conv1d_bias"])
            c = r(c * r(c.sigmoid()))
            state_size = (conv_dim - intermediate) // 16
            v = c[..., :intermediate].unflatten(-1, (heads, -1))
            b = c[..., intermediate : intermediate + 8 * state_size].unflatten(-1, (8, -1))
            c = c[..., intermediate + 8 * state_size :].unflatten(-1, (8, -1))
            dt = r(torch.log1p(torch.exp(r(dt + x["dt_bias"]))))
            dt = dt.clamp(inputs["time_step_limit_min"], inputs["time_step_limit_max"])
            decay = torch.exp(-torch.exp(x["A_log"]) * r(dt))
            group = torch.arange(heads) % 8
            state = torch.zeros(len(v), heads, v.shape[-1], state_size, dtype=torch.float64)
            y = []
            for t in range(v.shape[1]):
                state = decay[:, t, :, None, None] * state
                written = (v[:, t] * r(dt)[:, t, :, None])[..., None] * b[:, t, group, None]
                state = state + written
                read = (state * c[:, t, group, None]).sum(dim=-1)
                y.append(read + x["D"][:, None] * v[:, t])
            y = r(torch.stack(y, dim=1).flatten(2)).unflatten(-1, (8, -1))
            eps = inputs["layer_norm_epsilon"]
            y = r(y / torch.sqrt((y * y).mean(dim=-1, keepdim=True) + eps)).flatten(2)
            y = r(r(y * x["norm_weight"]) * r(gate * r(gate.sigmoid())))
            expected = y @ x["out_proj_weight"].T
            (output,) = run.call(inputs)
            assert_matches(output, expected, workload.tolerance)
            assert equal_share(output, expected) >= share


def gated_delta(x, r):
    """L2/060 from its description, one value head at a time, the solve by forward substitution."""
    query, key = x["query"], x["key"]
    batch, key_heads, seq_len, _ = query.shape

    def unit(y):
        return r(y * r(1 / torch.sqrt(r(r(r(y * y).sum(dim=-1, keepdim=True)) + 1e-6))))

    query, key = unit(query) * x["scale"], unit(key)
    output = torch.zeros(x["value"].shape, dtype=torch.float64)
    for n in range(batch):
        for h in range(x["value"].shape[1]):
            state = torch.zeros(query.shape[-1], x["value"].shape[-1], dtype=torch.float64)
            for start in range(0, seq_len, 64):
                rows = slice(start, min(start + 64, seq_len))
                q, k = query[n, h % key_heads, rows], key[n, h % key_heads, rows]
                v, g, beta = x["value"][n, h, rows], x["g"][n, h, rows], x["beta"][n, h, rows]
                total = g.cumsum(dim=0)
                decay = torch.exp((total[:, None] - total).tril()).tril()
                u, w = v * beta[:, None], k * (beta * g.exp())[:, None]
                for i in range(1, len(q)):
                    earlier = beta[i] * (k[i] @ k[:i].T) * decay[i, :i]
                    u[i] = u[i] - earlier @ u[:i]
                    w[i] = w[i] - earlier @ w[:i]
                new = u - w @ state
                output[n, h, rows] = g.exp()[:, None] * (q @ state) + (q @ k.T * decay) @ new
                state = g[-1].exp() * state + (k * (g[-1] - g).exp()[:, None]).T @ new
    return output.transpose(1, 2)


def test_gated_delta_rule_by_forward_substitution(reference, assert_matches):
    run = reference("L2/060")
    for workload in run.workloads:
        inputs = run.draw(workload)
        (output,) = run.call(inputs)
        expected = gated_delta(doubles(inputs), rounded)
        assert_matches(output, expected, workload.tolerance)
        assert equal_share(output, expected) >= 0.98


def test_gated_delta_rule_without_gates_is_the_delta_rule(reference, assert_matches):
    """With g = 0 raw and cumulative gates agree: S_t = S_{t-1} + beta k (v - S_{t-1}^T k)^T."""
    run = reference("L2/060")
    for workload in run.workloads:
        inputs = run.draw(workload)
        inputs["g"] = torch.zeros_like(inputs["g"])
        inputs["beta"] = inputs["beta"].sigmoid()
        x = doubles(inputs)
        unit = {n: x[n] / x[n].square().sum(dim=-1, keepdim=True).sqrt() for n in ("query", "key")}
        repeats = x["value"].shape[1] // x["key"].shape[1]
        q, k = (unit[n].repeat(1, repeats, 1, 1) for n in ("query", "key"))
        state = torch.zeros(*k.shape[:2], k.shape[-1], x["value"].shape[-1], dtype=torch.float64)
        steps = []
        for t in range(q.shape[2]):
            kt, vt = k[:, :, t, :, None], x["value"][:, :, t, None]
            error = vt - kt.transpose(2, 3) @ state
            state = state + x["beta"][:, :, t, None, None] * kt * error
            steps.append((q[:, :, t, None] @ state)[:, :, 0] * x["scale"])
        (output,) = run.call(inputs)
        assert_matches(output, torch.stack(steps, dim=1), workload.tolerance)


def test_hyena_gating_is_a_direct_convolution(reference, assert_matches):
    run = reference("L2/052")
    for workload in run.workloads[:2]:  # the third would need large Toeplitz matrices
        inputs = run.draw(workload)
        x = doubles(inputs)
        u = x["v"] * x["x1"]
        y = causal_convolution(u, x["k"][0]) + u * x["bias"][0][:, None]
        expected = (y * x["x0"]).transpose(1, 2) @ x["out_proj_weight"].T + x["out_proj_bias"]
        (output,) = run.call(inputs)
        assert_matches(output, expected, workload.tolerance)
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=2e-4)


def test_hyena_block_reads_its_filter_as_memory(reference, assert_matches):
    run = reference("L2/051")
    for workload in run.workloads:
        inputs = vivid(run.draw(workload))
        for name, value in inputs.items():  # drawn so small that the convolution is not seen
            if isinstance(value, torch.Tensor) and name.endswith(("weight", "filter_bias")):
                inputs[name] = value * 8 if "norm" not in name else value
        inputs["exp_mod_deltas"] = (
            inputs["exp_mod_deltas"]
            * inputs["exp_mod_deltas"].sign().flip(-1)
            * torch.tensor([1.0, -1.0]).repeat(inputs["exp_mod_deltas"].shape[-1] // 2)
        )
        x = doubles(inputs)
        seq_len, d_model = x["hidden_states"].shape[1:]

        def norm(y, name, x=x):
            y = y - y.mean(dim=-1, keepdim=True)
            y = y / torch.sqrt((y * y).mean(dim=-1, keepdim=True) + x["layer_norm_eps"])
            return y * x[f"{name}_weight"] + x[f"{name}_bias"]

        u = norm(x["hidden_states"], "norm1") @ x["in_proj_weight"].T + x["in_proj_bias"]
        short = x["short_conv_bias"].expand(u.shape)
        for j in range(3):
            lag = 2 - j
            delayed = torch.cat((torch.zeros_like(u[:, :lag]), u[:, : seq_len - lag]), dim=1)
            short = short + x["short_conv_weight"][:, 0, j] * delayed
        x0, x1, v = (part.transpose(1, 2) for part in short.chunk(3, dim=2))

        rows = []
        for t in range(seq_len):
            tau, w = t / (seq_len - 1), 2 * math.pi * t / seq_len
            features = [tau, math.cos(1e-4 * w), math.cos(w), -math.sin(1e-4 * w), -math.sin(w)]
            h = torch.tensor(features, dtype=torch.float64)
            for i in (1, 2, 3):
                h = x[f"filter_linear{i}_weight"] @ h + x[f"filter_linear{i}_bias"]
                h = torch.sin(x["sin_freq"][0] * h)
            h = x["filter_linear_final_weight"] @ h
            window = torch.exp(-tau * x["exp_mod_deltas"][0, 0].abs()) + x["exp_mod_shift"]
            rows.append(h * window + x["filter_bias"])
        memory = torch.cat(rows)  # one row of d_model values after the other
        k = torch.stack([memory[c * seq_len : (c + 1) * seq_len] for c in range(d_model)])

        v = v * x1
        v = causal_convolution(v, k) + v * x["filter_bias"][:, None]
        branch = (v * x0).transpose(1, 2) @ x["out_proj_weight"].T + x["out_proj_bias"]
        residual = branch + x["hidden_states"]
        m = norm(residual, "norm2") @ x["mlp_fc1_weight"].T + x["mlp_fc1_bias"]
        m = 0.5 * m * (1 + torch.tanh(math.sqrt(2 / math.pi) * (m + 0.044715 * m**3)))
        expected = residual + m @ x["mlp_fc2_weight"].T + x["mlp_fc2_bias"]
        (output,) = run.call(inputs)
        assert branch.std() > 0.01
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=2e-5)


def residual_block(x, temb, block, eps):
    """SiLU-gated residual convolution block; `block` has its parameters without a prefix."""
    y = silu(group_norm(x, block["norm1_weight"], block["norm1_bias"], eps))
    y = conv3x3(y, block["conv1_weight"], block["conv1_bias"])
    time = silu(temb) @ block["time_emb_proj_weight"].T + block["time_emb_proj_bias"]
    y = y + time[:, :, None, None]
    y = silu(group_norm(y, block["norm2_weight"], block["norm2_bias"], eps))
    return x + conv3x3(y, block["conv2_weight"], block["conv2_bias"])


def test_unet_residual_block(reference):
    run = reference("L2/066")
    for workload in run.workloads:
        inputs = vivid(run.draw(workload))
        x = doubles(inputs)
        (output,) = run.call(inputs)
        expected = residual_block(x["x"], x["time_emb"], x, x["norm_eps"])
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-4)


def test_vae_middle_block_attends_with_one_head(reference):
    run = reference("L2/050")
    for workload in run.workloads:
        inputs = vivid(run.draw(workload))
        x = doubles(inputs)

        def block(prefix, x=x):
            return {n.removeprefix(prefix): v for n, v in x.items() if n.startswith(prefix)}

        h = residual_block(x["hidden_states"], x["temb"], block("resnet1_"), x["eps"])
        z = group_norm(h, x["attn_group_norm_weight"], x["attn_group_norm_bias"], x["eps"])
        images = []
        for tokens in z.flatten(2).transpose(1, 2):
            q, k, v = (tokens @ x[f"attn_to_{c}_weight"].T + x[f"attn_to_{c}_bias"] for c in "qkv")
            o = (q @ k.T / math.sqrt(q.shape[1])).softmax(dim=1) @ v
            images.append((o @ x["attn_to_out_weight"].T + x["attn_to_out_bias"]).T)
        h = h + torch.stack(images).view(h.shape)
        expected = residual_block(h, x["temb"], block("resnet2_"), x["eps"])
        (output,) = run.call(inputs)
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=5e-4)


def coupling_shift(x0, x, layer):
    """Network of one coupling layer, each convolution as five shifted products."""
    for index in range(3):
        weight = x[f"transform_{layer}_conv{index}_weight"]
        padded = torch.nn.functional.pad(x0, (2, 2))
        taps = [padded[..., j : j + x0.shape[-1]] for j in range(5)]
        x0 = sum(torch.einsum("oc,bct->bot", weight[..., j], taps[j]) for j in range(5))
        x0 = x0 + x[f"transform_{layer}_conv{index}_bias"][:, None]
        x0 = x0.clamp(min=0) if index < 2 else x0
    return x0


def test_coupling_flow_is_a_sum_of_independent_networks(reference, assert_matches):
    run = reference("L2/057")
    assert {run.draw(w)["reverse"] for w in run.workloads} == {True, False}
    for workload in run.workloads:
        inputs = run.draw(workload)
        x = doubles(inputs)
        mask = x["x_mask"]
        assert set(mask.unique().tolist()) == {0.0, 1.0}
        x0, x1 = x["x"].chunk(2, dim=1)
        first, sign = (3, -1) if x["reverse"] else (0, 1)
        for layer in range(4):
            x1 = x1 + sign * coupling_shift(x0 if layer == first else x0 * mask, x, layer)
        expected = torch.cat((x0, x1), dim=1) * mask
        (output,) = run.call(inputs)
        assert_matches(output, expected, workload.tolerance)
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=2e-5)


def test_coupling_flow_inverts_itself_where_nothing_is_masked(reference):
    run = reference("L2/057")
    inputs = run.draw(run.workloads[0])
    inputs["x_mask"] = torch.ones_like(inputs["x_mask"])
    (there,) = run.call(inputs | {"reverse": False})
    (back,) = run.call(inputs | {"x": there, "reverse": True})
    assert not torch.allclose(there, inputs["x"], atol=0.1)
    torch.testing.assert_close(back, inputs["x"], rtol=1e-5, atol=1e-5)


def test_patch_embedding_and_conditioning(reference):
    run = reference("L2/067")
    for workload in run.workloads:
        inputs = run.draw(workload)
        x = doubles(inputs)

        def linear(y, name, x=x):
            return y @ x[f"{name}_weight"].T + x[f"{name}_bias"]

        size = x["hidden_states"].shape[-1] // 2
        patches = []
        for i in range(size):
            for j in range(size):
                patch = x["hidden_states"][:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].flatten(1)
                patches.append(patch @ x["proj_weight"].flatten(1).T + x["proj_bias"])
        expected_patches = torch.stack(patches, dim=1) + x["pos_embed"]
        angle = torch.outer(x["timestep"], x["freqs"])
        features = torch.cat((angle.cos(), angle.sin()), dim=1)
        time = linear(silu(linear(features, "timestep_linear1")), "timestep_linear2")
        pooled = linear(silu(linear(x["pooled_projections"], "pooled_linear1")), "pooled_linear2")
        context = linear(x["encoder_hidden_states"], "context_embedder")
        expected = (expected_patches, time + pooled, context)
        for actual, wanted in zip(run.call(inputs), expected, strict=True):
            torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-5)


def resized(weight, factor):
    """Bilinear with half-pixel centres, for an even factor: the two middle pixels of each axis."""
    middle = factor // 2
    rows = weight[..., middle - 1 :: factor, :] + weight[..., middle::factor, :]
    return (rows[..., middle - 1 :: factor] + rows[..., middle::factor]) / 4


def test_edit_loss_is_the_sum_of_its_means(reference, assert_matches):
    run = reference("L2/071")
    for workload in run.workloads:
        inputs = vivid(run.draw(workload))
        inputs["scale_weights"] = torch.tensor([0.2, -0.5, 0.7])
        x = doubles(inputs)
        mask = x["edit_mask"]
        p = torch.nn.functional.pad(mask, (1, 1, 1, 1))
        top, middle, bottom = p[:, :, :-2], p[:, :, 1:-1], p[:, :, 2:]
        ex = sum(
            f * (row[..., 2:] - row[..., :-2])
            for f, row in zip((1, 2, 1), (top, middle, bottom), strict=True)
        )
        down = bottom - top
        ey = down[..., :-2] + 2 * down[..., 1:-1] + down[..., 2:]
        weight = 1 + (x["edit_region_weight_multiplier"] - 1) * mask
        weight = weight + 0.5 * torch.sqrt(ex**2 + ey**2 + 1e-8)

        total = x["pixel_loss_weight"] * ((x["predicted"] - x["target"]).abs() * weight).mean()
        total = total + 0.3 * ((x["predicted"] - x["source"]).abs() * (1 - mask)).mean()
        features = [x["predicted"], x["target"]]
        for scale in range(3):
            for conv in (f"extractor{scale}_conv1", f"extractor{scale}_conv2"):
                parameters = x[f"{conv}_weight"], x[f"{conv}_bias"]
                features = [conv3x3(f, *parameters).clamp(min=0) for f in features]
            features = [f.unfold(2, 2, 2).unfold(3, 2, 2).amax(dim=(4, 5)) for f in features]
            difference = (features[0] - features[1]).abs() * resized(weight, 2 ** (scale + 1))
            share = x["perceptual_loss_weight"] * x["scale_weights"][scale].abs()
            total = total + share * difference.mean()
        (output,) = run.call(inputs)
        assert_matches(output, total, workload.tolerance)


def test_output_head_rounds_after_every_operation(reference, assert_matches):
    run = reference("L2/078")
    grids = {(w.axes["token_h"], w.axes["token_w"]) for w in run.workloads}
    assert any(h < w for h, w in grids) and any(h == w for h, w in grids)
    for workload in run.workloads:
        inputs = vivid(run.draw(workload))
        x = doubles(inputs)
        height, width = workload.axes["token_h"], workload.axes["token_w"]
        for r, share in ((rounded, 0.9), (exact, 0.0)):

            def norm(y, name, r=r, x=x):
                return r(group_norm(y, x[f"{name}_weight"], x[f"{name}_bias"], x["eps"]))

            def conv(y, name, r=r, x=x):
                return r(conv3x3(y, x[f"{name}_weight"], x[f"{name}_bias"]))

            f = x["x"].transpose(1, 2).reshape(len(x["x"]), -1, height, width)
            a = conv(r(silu(norm(f, "resblock_in_norm"))), "resblock_in_conv")
            e = r(silu(x["timestep_emb"])) @ x["resblock_emb_linear_weight"].T
            e = r(e + x["resblock_emb_linear_bias"])[:, :, None, None]
            scale, shift = e[:, : a.shape[1]], e[:, a.shape[1] :]
            a = r(r(norm(a, "resblock_out_norm") * r(1 + scale)) + shift)
            a = conv(r(silu(a)), "resblock_out_conv")
            skip = torch.einsum("oc,bchw->bohw", x["resblock_skip_conv_weight"][..., 0, 0], f)
            a = r(r(skip + x["resblock_skip_conv_bias"][:, None, None]) + a)
            expected = conv(r(silu(norm(a, "final_norm"))), "final_conv")
            (output,) = run.call(inputs)
            assert_matches(output, expected, workload.tolerance)
            assert equal_share(output, expected) >= share
