"""Networks that read token ids: a mean of word vectors, and a convolution over them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedkeep.errors import ConfigError
from fedkeep.models.base import Architecture, Network, Shape
from fedkeep.options import option


class MeanOfEmbeddings(nn.Module):
    """The mean of the vectors of a text's tokens, without those that fill it up."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = _embedding(vocabulary, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the means.

        ``tokens``: Token ids, int64 [b, length].
        Returns: float32 [b, width]; zeros for a text without tokens.
        """
        vectors = _vectors(self.embedding, tokens)
        count = (tokens != 0).sum(-1, keepdim=True).clamp(min=1)
        return vectors.sum(-2) / count


class ConvolutionOfEmbeddings(nn.Module):
    """Convolutions over the vectors of a text's tokens, and the maximum of each map over the text.

    ``vocabulary``: Number of token ids; 0 fills a text up.
    ``dropout``: Probability of dropping a feature in training.
    """

    def __init__(self, vocabulary: int, width: int, channels: int, windows: tuple[int, ...], dropout: float) -> None:
        super().__init__()
        self.embedding = _embedding(vocabulary, width)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, channels, window) for window in windows)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the features.

        ``tokens``: Token ids, int64 [b, length].
        Returns: float32 [b, channels * number of windows].
        """
        vectors = _vectors(self.embedding, tokens).transpose(-1, -2)
        maxima = [layer(vectors).relu().amax(-1) for layer in self.convolutions]
        features: Tensor = self.dropout(torch.cat(maxima, -1))
        return features


def _embedding(vocabulary: int, width: int) -> nn.Embedding:
    """Return vectors of which the first is zero, without nn.Embedding's padding_idx, which vmap does not respect."""
    embedding = nn.Embedding(vocabulary, width)
    with torch.no_grad():
        embedding.weight[0] = 0
    return embedding


def _vectors(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    """Return the tokens' vectors; zeros for what fills a text up, whatever its vector is (noise is added to it)."""
    vectors: Tensor = embedding(tokens) * (tokens != 0).unsqueeze(-1)
    return vectors


@dataclass(frozen=True)
class EmbeddingBag(Architecture):
    """The mean of word vectors, fully connected layers with ReLU, and the classifier.

    Without hidden layers it is the model of fastText (Joulin et al., 2017).
    """

    name: ClassVar[str] = "embedding-bag"
    reads_token_ids: ClassVar[bool] = True

    vocabulary: int = option(10_000, "number of token ids; as data.vocabulary", low=2)
    width: int = option(32, "length of a word's vector", low=1)
    hidden: tuple[int, ...] = option((32,), "units of each hidden layer", low=1)

    def build(self, shape: Shape, classes: int) -> Network:
        """Build the network.

        ``shape``: The number of token ids of a text.
        """
        _text_length(self.name, shape)
        body = nn.Sequential()
        body.add_module("mean", MeanOfEmbeddings(self.vocabulary, self.width))
        widths = [self.width, *self.hidden]
        for number, (before, after) in enumerate(pairwise(widths), start=1):
            body.add_module(f"full{number}", nn.Linear(before, after))
            body.add_module(f"relu{number}", nn.ReLU())
        return Network(body, widths[-1], classes)


@dataclass(frozen=True)
class TextCNN(Architecture):
    """The network of Kim (2014), "Convolutional neural networks for sentence classification", its CNN-rand.

    Convolutions over 3, 4 and 5 words, each with ReLU and the maximum over the text, dropout, and the classifier.
    """

    name: ClassVar[str] = "text-cnn"
    reads_token_ids: ClassVar[bool] = True

    vocabulary: int = option(10_000, "number of token ids; as data.vocabulary", low=2)
    width: int = option(64, "length of a word's vector; 300 in the paper", low=1)
    channels: int = option(32, "output channels of each convolution; 100 in the paper", low=1)
    windows: tuple[int, ...] = option((3, 4, 5), "number of words that each convolution sees", low=1)
    dropout: float = option(0.5, "probability of dropping a feature, in training", low=0, high=1)

    def check(self) -> None:
        """Refuse a network without convolutions."""
        if not self.windows:
            raise ConfigError(f"{self.name} needs at least one convolution: give windows, such as [3, 4, 5].")

    def build(self, shape: Shape, classes: int) -> Network:
        """Build the network.

        ``shape``: The number of token ids of a text.
        """
        length = _text_length(self.name, shape)
        if length < max(self.windows):
            raise ConfigError(
                f"{self.name} sees {max(self.windows)} words at once, and texts have {length} token ids. Raise "
                "data.length or lower model.windows."
            )
        body = ConvolutionOfEmbeddings(self.vocabulary, self.width, self.channels, self.windows, self.dropout)
        return Network(body, self.channels * len(self.windows), classes)


def _text_length(name: str, shape: Shape) -> int:
    if len(shape) != 1:
        raise ConfigError(
            f"{name} reads token ids, one row a text, and these inputs have the shape {list(shape)}. Use a model for "
            "images, or read a column of text with data.text."
        )
    return shape[0]
