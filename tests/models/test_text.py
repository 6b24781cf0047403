"""Networks that read token ids."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedkeep.errors import ConfigError
from fedkeep.models.custom import custom
from fedkeep.models.networks import MLP, EmbeddingBag, LeNet5

TOKENS = torch.tensor([[3, 4, 4, 0, 0, 0], [5, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])


def test_what_fills_a_text_up_does_not_count() -> None:
    network = EmbeddingBag(vocabulary=6, width=4, hidden=(3,)).build((6,), 2)
    vectors = network.body.mean.embedding.weight
    expected = torch.stack([(vectors[3] + 2 * vectors[4]) / 3, vectors[5], torch.zeros(4)])
    assert torch.allclose(network.body.mean(TOKENS), expected)
    longer = torch.cat((TOKENS, torch.zeros(3, 2, dtype=torch.int64)), 1)
    assert torch.allclose(network(longer), network(TOKENS))


def test_inputs_of_another_form_are_refused() -> None:
    with pytest.raises(ConfigError, match="reads token ids"):
        EmbeddingBag().build((3, 8, 8), 2)
    with pytest.raises(ConfigError, match=r"lenet5 needs images.*\[30\]"):
        LeNet5().build((30,), 2)
    assert MLP().build((30,), 2)(torch.zeros(2, 30)).shape == (2, 2)


def test_an_own_network_may_read_token_ids() -> None:
    def build(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.EmbeddingBag(10, 4), torch.nn.Linear(4, classes))

    assert custom(build, "bag").build((6,), 3)(TOKENS).shape == (3, 3)


def test_whatever_the_vector_of_what_fills_up_is_it_counts_for_nothing() -> None:
    network = EmbeddingBag(vocabulary=6, width=4, hidden=(3,)).build((6,), 2).eval()
    vectors = next(module for module in network.modules() if isinstance(module, nn.Embedding)).weight
    before = network(TOKENS)
    assert not vectors[0].any()
    with torch.no_grad():
        vectors[0] = 7.0  # as noise does
    assert torch.equal(network(TOKENS), before)
    network(TOKENS).sum().backward()
    assert not vectors.grad[0].any()
