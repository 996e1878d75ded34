"""Masked autoencoder: a vision transformer that learns by filling in the patches it does not see.

He et al., "Masked Autoencoders Are Scalable Vision Learners", 2022. The encoder is a ViT of timm, under timm's names
of parameters; it sees the visible patches alone. A small decoder predicts the pixels of all patches.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from paceline.core.arguments import Count
from paceline.core.errors import ArgumentError
from paceline.core.registry import NameOf, register
from paceline.core.torchvision_ops import import_torchvision
from paceline.models.zoo import LibraryArgs, build_timm

ViTName = Annotated[str, NameOf("model", "timm/")]


@register.model("masked_autoencoder")
class MaskedAutoencoder(nn.Module):
    """A masked autoencoder on any ViT of timm; its defaults are those of the published ViT-B decoder."""

    def __init__(
        self,
        in_channels: int = 3,
        encoder: ViTName = "timm/vit_base_patch16_224",
        encoder_args: LibraryArgs | None = None,
        decoder_dim: Annotated[Count, Field(multiple_of=4)] = 512,
        decoder_depth: Count = 8,
        decoder_heads: Count = 16,
    ) -> None:
        super().__init__()
        vit: Any = build_timm(encoder.removeprefix("timm/"), 0, in_channels, encoder_args)
        if not all(hasattr(vit, name) for name in ("patch_embed", "cls_token", "pos_embed", "blocks", "norm")):
            raise ArgumentError("encoder", f"{encoder} is no plain ViT; use one such as timm/vit_base_patch16_224")
        self.encoder = vit
        self.patch_size: int = vit.patch_embed.patch_size[0]
        self.grid_size: tuple[int, int] = tuple(vit.patch_embed.grid_size)
        import_torchvision()
        from timm.models.vision_transformer import Block

        self.decoder_embed = nn.Linear(vit.embed_dim, decoder_dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_dim))
        norm = partial(nn.LayerNorm, eps=1e-6)  # as in the encoder
        blocks = [Block(decoder_dim, decoder_heads, qkv_bias=True, norm_layer=norm) for _ in range(decoder_depth)]
        self.decoder_blocks = nn.ModuleList(blocks)
        self.decoder_norm = norm(decoder_dim)
        self.decoder_pred = nn.Linear(decoder_dim, self.patch_size**2 * in_channels)
        positions = sincos_position_embedding(decoder_dim, self.grid_size)
        self.decoder_pos_embed: Tensor
        self.register_buffer("decoder_pos_embed", positions, persistent=False)
        self._initialize(vit)

    def forward(self, images: Tensor, visible: Tensor) -> Tensor:
        """The predicted pixels of all patches, [N, L, p·p·C], of images whose visible patches are numbered [N, V]."""
        encoded = self.decoder_embed(self._encode(images, visible))  # [N, 1 + V, D]
        hidden = self.mask_token.to(encoded.dtype).expand(len(images), self.grid_size[0] * self.grid_size[1], -1)
        patches = hidden.scatter(1, visible[..., None].expand(-1, -1, hidden.shape[2]), encoded[:, 1:])
        tokens = torch.cat([encoded[:, :1], patches], 1) + self.decoder_pos_embed
        for block in self.decoder_blocks:
            tokens = block(tokens)
        predicted: Tensor = self.decoder_pred(self.decoder_norm(tokens))[:, 1:]
        return predicted

    def features(self, images: Tensor) -> Tensor:
        """The mean of the encoded patches of whole images, [N, D]."""
        every = torch.arange(self.grid_size[0] * self.grid_size[1], device=images.device).expand(images.shape[0], -1)
        return self._encode(images, every)[:, 1:].mean(1)

    def _encode(self, images: Tensor, visible: Tensor) -> Tensor:
        """The class token and the visible patches [N, V], encoded: [N, 1 + V, D]."""
        encoder: Any = self.encoder
        patches = encoder.patch_embed(images)
        tokens = patches + encoder.pos_embed[:, 1:]
        visible_tokens = tokens.gather(1, visible[..., None].expand(-1, -1, tokens.shape[2]))
        first = (encoder.cls_token + encoder.pos_embed[:, :1]).expand(images.shape[0], -1, -1)
        encoded = torch.cat([first.to(visible_tokens.dtype), visible_tokens], 1)
        for block in encoder.blocks:
            encoded = block(encoded)
        normed: Tensor = encoder.norm(encoded)
        return normed

    def _initialize(self, encoder: Any) -> None:
        """Initialize as published: fixed sine-cosine positions, Xavier weights, tokens of standard deviation 0.02."""
        positions = sincos_position_embedding(encoder.embed_dim, self.grid_size)
        encoder.pos_embed = nn.Parameter(positions, requires_grad=False)
        projection = encoder.patch_embed.proj.weight
        nn.init.xavier_uniform_(projection.data.view(projection.shape[0], -1))
        nn.init.normal_(encoder.cls_token, std=0.02)
        nn.init.normal_(self.mask_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


def sincos_position_embedding(dim: int, grid_size: tuple[int, int]) -> Tensor:
    """Sine-cosine embeddings of the places of a grid, [1, 1 + rows · columns, dim]; that of the class token is 0.

    The first half of the channels embeds the column, the second the row, each as sines and then cosines of dim / 4
    frequencies from 1 to 1/10000.
    """
    frequencies = 10000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    rows, columns = (torch.arange(size, dtype=torch.float64) for size in grid_size)
    y, x = (place.flatten() for place in torch.meshgrid(rows, columns, indexing="ij"))
    halves = [torch.outer(place, frequencies) for place in (x, y)]
    embedded = torch.cat([part for angles in halves for part in (angles.sin(), angles.cos())], 1)
    return torch.cat([torch.zeros(1, dim, dtype=torch.float64), embedded]).float()[None]


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """The pixels of each patch, row by row with the channels last: [N, L, p·p·C] of images [N, C, H, W]."""
    number, channels, height, width = images.shape
    rows, columns = height // patch_size, width // patch_size
    cut = images.reshape(number, channels, rows, patch_size, columns, patch_size)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(number, rows * columns, -1)


def unpatchify(patches: Tensor, patch_size: int, grid_size: tuple[int, int]) -> Tensor:
    """Images [N, C, H, W] of the pixels of their patches, [N, L, p·p·C]."""
    rows, columns = grid_size
    cut = patches.reshape(len(patches), rows, columns, patch_size, patch_size, -1)
    return cut.permute(0, 5, 1, 3, 2, 4).reshape(len(patches), -1, rows * patch_size, columns * patch_size)
