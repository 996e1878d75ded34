"""The masked autoencoder: positions, masks and loss against the published formulas, written out in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.data.batch import Batch
from paceline.data.transforms.batch import RandomMasking
from paceline.losses.reconstruction import MaskedMSE
from paceline.metrics.features import FeatureAccuracy
from paceline.metrics.metric import merge_states
from paceline.models.masked_autoencoder import MaskedAutoencoder, patchify, sincos_position_embedding, unpatchify
from paceline.models.zoo import build_timm
from paceline.tasks.masked_autoencoder import MaskedAutoencoder as Task
from paceline.tasks.masked_autoencoder import Reconstruction

Array = NDArray[np.float64]
Weights = dict[str, Array]

TINY = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}


def tiny(channels: int = 3) -> MaskedAutoencoder:
    torch.manual_seed(0)
    return MaskedAutoencoder(
        channels, "timm/vit_tiny_patch16_224", TINY, decoder_dim=16, decoder_depth=1, decoder_heads=2
    )


def masked_batch(number: int = 3, channels: int = 3, seed: int = 0) -> Batch:
    random = torch.Generator().manual_seed(seed)
    images = torch.randn(number, channels, 16, 16, generator=random)
    fields = RandomMasking(16)({"image": images}, torch.rand(number, 16, generator=random))
    return Batch(fields, id=torch.arange(number))


@pytest.mark.parametrize(("column", "row"), [(0, 0), (2, 1), (3, 2)])
def test_positions_are_sines_and_cosines_of_column_and_row(column: int, row: int) -> None:
    dim, (rows, columns) = 16, (3, 4)
    found = sincos_position_embedding(dim, (rows, columns))
    assert found.shape == (1, 1 + rows * columns, dim)
    assert not found[0, 0].any()
    expected = []
    for place in (column, row):
        angles = [place / 10000 ** (k / (dim / 4)) for k in range(dim // 4)]
        expected += [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
    assert found[0, 1 + row * columns + column].tolist() == pytest.approx(expected, abs=1e-6)


def test_three_quarters_of_the_patches_are_masked_wherever_the_sample_is() -> None:
    draws = torch.rand(5, 49, generator=torch.Generator().manual_seed(1))
    images = torch.zeros(5, 1, 28, 28)
    together = RandomMasking(49)({"image": images}, draws)
    assert together["patch_mask"].sum(1).tolist() == [49 - 12] * 5  # int(49 · 0.25) are visible, as published
    alone = RandomMasking(49)({"image": images[3:4]}, draws[3:4])
    assert torch.equal(alone["patch_mask"][0], together["patch_mask"][3])
    for masks, visible in zip(together["patch_mask"], together["visible_patches"], strict=True):
        assert visible.tolist() == (~masks).nonzero().flatten().tolist()


def test_patches_are_cut_row_by_row_and_put_together_again() -> None:
    images = torch.arange(2 * 3 * 8 * 12).view(2, 3, 8, 12).float()
    patches = patchify(images, 4)
    assert patches.shape == (2, 6, 48)
    # Patch 4 is the second of the second row of patches; its pixel (1, 2) in channel 2.
    assert patches[1, 4, (1 * 4 + 2) * 3 + 2] == images[1, 2, 4 + 1, 4 + 2]
    assert torch.equal(unpatchify(patches, 4, (2, 3)), images)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_loss_is_the_mean_over_masked_patches(normalize: bool) -> None:
    batch = masked_batch()
    outputs = torch.randn(3, 16, 48, generator=torch.Generator().manual_seed(2))
    images, masks = batch["image"].double().numpy(), batch["patch_mask"].numpy()
    total, number = 0.0, 0
    for sample, patch in zip(*np.nonzero(masks), strict=True):
        row, column = divmod(patch, 4)
        pixels = images[sample, :, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4].transpose(1, 2, 0).ravel()
        if normalize:
            pixels = (pixels - pixels.mean()) / math.sqrt(pixels.var(ddof=1) + 1e-6)
        total += float(((outputs[sample, patch].double().numpy() - pixels) ** 2).mean())
        number += 1
    loss = MaskedMSE(normalize)
    term = loss(outputs, batch)
    assert loss.count(batch) == number == 36
    assert float(term.numerator) / float(term.denominator) == pytest.approx(total / number, rel=1e-5)


def layer_norm(values: Array, weights: Weights, name: str) -> Array:
    centered = values - values.mean(-1, keepdims=True)
    scaled: Array = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(values: Array, weights: Weights, name: str) -> Array:
    return values @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def transformer_block(tokens: Array, weights: Weights, name: str, heads: int) -> Array:
    """Attention and a perceptron, each on normalized tokens [T, D] and added to them."""
    normed = linear(layer_norm(tokens, weights, f"{name}.norm1"), weights, f"{name}.attn.qkv")
    queries, keys, values = normed.reshape(len(tokens), 3, heads, -1).transpose(1, 2, 0, 3)  # [heads, T, D / heads]
    exponents = queries @ keys.transpose(0, 2, 1) / math.sqrt(queries.shape[2])
    shares = np.exp(exponents) / np.exp(exponents).sum(2, keepdims=True)
    attended = (shares @ values).transpose(1, 0, 2).reshape(tokens.shape)
    tokens = tokens + linear(attended, weights, f"{name}.attn.proj")
    hidden = linear(layer_norm(tokens, weights, f"{name}.norm2"), weights, f"{name}.mlp.fc1")
    gelu = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    return tokens + linear(gelu, weights, f"{name}.mlp.fc2")


def test_the_model_computes_what_the_paper_writes() -> None:
    """Encode the visible patches, fill in mask tokens, decode all: in NumPy, sample by sample."""
    model, batch = tiny().double().eval(), masked_batch()
    batch["image"] = batch["image"].double()
    weights: Weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    with torch.no_grad():
        found = model(batch["image"], batch["visible_patches"]).numpy()
    positions = {dim: sincos_position_embedding(dim, (4, 4))[0].numpy() for dim in (16, 32)}
    kernel = weights["encoder.patch_embed.proj.weight"].transpose(0, 2, 3, 1).reshape(32, -1)
    for image, visible, predicted in zip(batch["image"], batch["visible_patches"].numpy(), found, strict=True):
        patches = patchify(image[None], 4)[0].numpy() @ kernel.T + weights["encoder.patch_embed.proj.bias"]
        tokens = np.concatenate([weights["encoder.cls_token"][0], patches[visible]])
        tokens = tokens + positions[32][[0, *(visible + 1)]]
        for number in range(2):
            tokens = transformer_block(tokens, weights, f"encoder.blocks.{number}", heads=2)
        encoded = linear(layer_norm(tokens, weights, "encoder.norm"), weights, "decoder_embed")
        every = np.repeat(weights["mask_token"][0], 17, 0)
        every[[0, *(visible + 1)]] = encoded
        decoded = transformer_block(every + positions[16], weights, "decoder_blocks.0", heads=2)
        expected = linear(layer_norm(decoded, weights, "decoder_norm"), weights, "decoder_pred")[1:]
        np.testing.assert_allclose(predicted, expected, rtol=1e-9, atol=1e-9)


def test_masked_patches_have_no_effect_on_the_prediction() -> None:
    model, batch = tiny().eval(), masked_batch()
    other = patchify(batch["image"], 4)
    other = torch.where(batch["patch_mask"][..., None], torch.randn_like(other), other)
    with torch.no_grad():
        first = model(batch["image"], batch["visible_patches"])
        second = model(unpatchify(other, 4, (4, 4)), batch["visible_patches"])
    assert first.shape == (3, 16, 48)
    torch.testing.assert_close(first, second)
    assert not torch.allclose(first[0], first[1])


def test_every_parameter_but_the_positions_learns() -> None:
    model, batch = tiny(), masked_batch()
    MaskedMSE()(model(batch["image"], batch["visible_patches"]), batch).numerator.backward()  # type: ignore[no-untyped-call]
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == ["encoder.pos_embed"]


def test_the_encoder_of_vit_b_has_the_published_size() -> None:
    encoder = build_timm("vit_base_patch16_224", 0, 3)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == 85_798_656


def test_features_are_measured_by_their_neighbors_and_by_a_line() -> None:
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    features = torch.randn(3, 8, generator=random)[labels] + 0.1 * torch.randn(60, 8, generator=random)
    metric = FeatureAccuracy(3)

    def measure(size: int, wrong: int) -> dict[str, float]:
        given = labels.clone()
        given[:wrong] = (given[:wrong] + 1) % 3
        states = [
            metric.update(
                Reconstruction(torch.zeros(0), features[start : start + size]),
                Batch(id=torch.arange(start, start + size), label=given[start : start + size]),
            )
            for start in range(0, 60, size)
        ]
        return metric.compute(merge_states(states))

    assert measure(60, 0) == {"knn_top1": 1.0, "linear_top1": 1.0}
    assert measure(10, 6) == measure(60, 6) == {"knn_top1": 0.9, "linear_top1": 27 / 30}


def test_the_task_draws_the_masked_image_the_reconstruction_and_the_original() -> None:
    model, batch = tiny(), masked_batch()
    task = Task({"masked_mse": MaskedMSE()}, {"masked_mse": 1.0}, model)
    with torch.no_grad():
        found = task.predict(model, batch)
    assert [panel.caption for panel in task.draw(batch, found, 0)] == ["masked", "reconstruction", "original"]
    assert [panel.caption for panel in task.draw(batch, None, 1)] == ["masked", "original"]
