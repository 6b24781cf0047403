"""Small convolutional generators: images from latent vectors, or from embeddings of class names."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

IMAGES_PER_LAYER = 10  # images that share one noisy layer, as in LANDER's code


class LatentDecoder(nn.Sequential):
    """Images with pixels in 0..1 from latent vectors, as in the code of TARGET (Zhang et al., 2023).

    A linear layer gives feature maps of a quarter of the images' side. Two upsamplings, each before a convolution with
    batch norm, lead to the full size.

    ``maps``: Channels before the image; twice as many before that.
    ``shape``: Channels, height and width of an image, of any size.
    """

    def __init__(self, latent: int, maps: int, shape: tuple[int, int, int]) -> None:
        channels, height, width = shape
        quarter, half = ((ceil(height / n), ceil(width / n)) for n in (4, 2))
        super().__init__(
            nn.Linear(latent, 2 * maps * quarter[0] * quarter[1]),
            nn.Unflatten(1, (2 * maps, *quarter)),
            nn.BatchNorm2d(2 * maps),
            nn.Upsample(half),
            nn.Conv2d(2 * maps, 2 * maps, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * maps),
            nn.LeakyReLU(0.2),
            nn.Upsample((height, width)),
            nn.Conv2d(2 * maps, maps, 3, padding=1, bias=False),
            nn.BatchNorm2d(maps),
            nn.LeakyReLU(0.2),
            nn.Conv2d(maps, channels, 3, padding=1),
            nn.Sigmoid(),
        )


class TextDecoder(nn.Module):
    """Images of given classes from the anchors of their names, as in the code of LANDER (Tran et al., 2024).

    An anchor, normalised over the batch, passes through one of several linear layers and then through a
    `LatentDecoder`. These *noisy layers* are reinitialised for every batch of images: without them all images of a
    class would be equal.

    ``anchors``: [classes, width].
    ``batch_size``: The largest number of images at once.
    ``latent``: Length of a latent vector, see `LatentDecoder`.
    ``maps``: Channels before the image, see `LatentDecoder`.
    ``shape``: Channels, height and width of an image.
    """

    anchors: Tensor

    def __init__(self, anchors: Tensor, batch_size: int, latent: int, maps: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        layers, width = ceil(batch_size / IMAGES_PER_LAYER), anchors.shape[1]
        self.register_buffer("anchors", anchors)
        self.norm = nn.BatchNorm1d(width)
        self.weight = nn.Parameter(torch.zeros(layers, width, latent))
        self.bias = nn.Parameter(torch.zeros(layers, 1, latent))
        self.decoder = LatentDecoder(latent, maps, shape)

    @torch.no_grad()
    def reset_noisy_layers(self, rng: torch.Generator) -> None:
        """Draw the noisy layers' weights from N(0, 1), and set their biases to 0."""
        self.weight.copy_(torch.randn(self.weight.shape, generator=rng))
        self.bias.zero_()

    def forward(self, labels: Tensor) -> Tensor:
        """Return images of these classes, int64 [b]; neighbours in the batch share a noisy layer."""
        rows = self.norm(self.anchors[labels])
        layers, width, _ = self.weight.shape
        padding = (0, 0, 0, layers * IMAGES_PER_LAYER - len(rows))
        groups = pad(rows, padding).view(layers, IMAGES_PER_LAYER, width)
        latent = (groups @ self.weight + self.bias).flatten(0, 1)[: len(rows)]
        images: Tensor = self.decoder(latent)
        return images
