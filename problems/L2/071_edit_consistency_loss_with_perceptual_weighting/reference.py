"""Loss of image editing: weighted pixel difference, feature differences, preservation."""

import torch
import torch.nn.functional as F

EDGE_WEIGHT = 0.5
PRESERVATION_WEIGHT = 0.3


def edge_strength(mask: torch.Tensor) -> torch.Tensor:
    """Magnitude of the Sobel gradient of [batch, 1, height, width], zero-padded."""
    kernel = torch.tensor(
        [[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]], dtype=mask.dtype, device=mask.device
    )
    gradient = F.conv2d(mask, torch.stack((kernel, kernel.T)).unsqueeze(1), padding=1)
    return torch.sqrt(gradient.square().sum(dim=1, keepdim=True) + 1e-8)


def run(
    predicted: torch.Tensor,
    target: torch.Tensor,
    source: torch.Tensor,
    edit_mask: torch.Tensor,
    extractor0_conv1_weight: torch.Tensor,
    extractor0_conv1_bias: torch.Tensor,
    extractor0_conv2_weight: torch.Tensor,
    extractor0_conv2_bias: torch.Tensor,
    extractor1_conv1_weight: torch.Tensor,
    extractor1_conv1_bias: torch.Tensor,
    extractor1_conv2_weight: torch.Tensor,
    extractor1_conv2_bias: torch.Tensor,
    extractor2_conv1_weight: torch.Tensor,
    extractor2_conv1_bias: torch.Tensor,
    extractor2_conv2_weight: torch.Tensor,
    extractor2_conv2_bias: torch.Tensor,
    scale_weights: torch.Tensor,
    pixel_loss_weight: float,
    perceptual_loss_weight: float,
    edit_region_weight_multiplier: float,
) -> torch.Tensor:
    """Sum of three means, in float32.

    Args:
        predicted, target, source: [batch_size, 3, height, width].
        edit_mask: [batch_size, 1, height, width], 1 where the image was to be edited.
        extractor*_conv*_weight: [out, in, 3, 3], with biases [out]; the three extractors are
            chained and each halves the resolution.
        scale_weights: [3], taken by magnitude.
        pixel_loss_weight, perceptual_loss_weight: factors on the first two parts.
        edit_region_weight_multiplier: weight of edited pixels.

    Returns:
        0-d f32 tensor.
    """
    extractors = (
        (
            (extractor0_conv1_weight, extractor0_conv1_bias),
            (extractor0_conv2_weight, extractor0_conv2_bias),
        ),
        (
            (extractor1_conv1_weight, extractor1_conv1_bias),
            (extractor1_conv2_weight, extractor1_conv2_bias),
        ),
        (
            (extractor2_conv1_weight, extractor2_conv1_bias),
            (extractor2_conv2_weight, extractor2_conv2_bias),
        ),
    )
    weight = 1 + (edit_region_weight_multiplier - 1) * edit_mask
    weight = weight + EDGE_WEIGHT * edge_strength(edit_mask)
    pixel_loss = ((predicted - target).abs() * weight).mean()

    perceptual_loss = predicted.new_zeros(())
    predicted_features, target_features = predicted, target
    for convolutions, scale_weight in zip(extractors, scale_weights, strict=True):
        for conv_weight, conv_bias in convolutions:
            predicted_features = F.conv2d(predicted_features, conv_weight, conv_bias, padding=1)
            predicted_features = F.relu(predicted_features)
            target_features = F.relu(F.conv2d(target_features, conv_weight, conv_bias, padding=1))
        predicted_features = F.max_pool2d(predicted_features, 2)
        target_features = F.max_pool2d(target_features, 2)
        # Always from the full-size weight.
        feature_weight = F.interpolate(
            weight, size=predicted_features.shape[-2:], mode="bilinear", align_corners=False
        )
        difference = (predicted_features - target_features).abs() * feature_weight
        perceptual_loss = perceptual_loss + difference.mean() * scale_weight.abs()

    preservation_loss = ((predicted - source).abs() * (1 - edit_mask)).mean()
    return (
        pixel_loss_weight * pixel_loss
        + perceptual_loss_weight * perceptual_loss
        + PRESERVATION_WEIGHT * preservation_loss
    )


def generate_inputs(axes_and_scalars: dict, device: torch.device) -> dict:
    """Normal images, a mask of independent pixels, small convolution weights, zero biases."""
    axes = axes_and_scalars
    batch_size, height, width = axes["batch_size"], axes["height"], axes["width"]
    image = batch_size, axes["channels"], height, width
    inputs: dict = {
        "predicted": torch.randn(*image, device=device),
        "target": torch.randn(*image, device=device),
        "source": torch.randn(*image, device=device),
        "edit_mask": (torch.rand(batch_size, 1, height, width, device=device) > 0.5).float(),
    }
    in_channels = axes["channels"]
    for scale in range(axes["num_scales"]):
        out_channels = axes[f"feat_dim_{scale}"]
        for layer in ("conv1", "conv2"):
            name = f"extractor{scale}_{layer}"
            weight = 0.1 * torch.randn(out_channels, in_channels, 3, 3, device=device)
            inputs[f"{name}_weight"] = weight
            inputs[f"{name}_bias"] = torch.zeros(out_channels, device=device)
            in_channels = out_channels
    inputs["scale_weights"] = torch.full((axes["num_scales"],), 1 / 3, device=device)
    inputs["pixel_loss_weight"] = 1.0
    inputs["perceptual_loss_weight"] = 0.5
    inputs["edit_region_weight_multiplier"] = 2.0
    return inputs
