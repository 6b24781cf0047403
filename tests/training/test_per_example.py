"""Gradients by example are bounded by bytes, and the estimate of memory counts them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from fedkeep.cli.dry_run import estimate
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.runtime import Machine
from fedkeep.models import get_architecture
from fedkeep.training import per_example
from fedkeep.training.per_example import examples_at_once, fisher, gradient_bytes


def parameters(count: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.empty(count, device="meta")}


def test_large_networks_take_fewer_examples_at_once() -> None:
    assert examples_at_once(parameters(2**20)) == 64, "as before: the same bits"
    assert examples_at_once(parameters(11_173_962)) == 6, "ResNet-18"
    assert examples_at_once(parameters(2**28)) == 1
    assert gradient_bytes(parameters(11_173_962)) == 3 * 6 * 4 * 11_173_962


def test_the_number_at_once_changes_rounding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    network = get_architecture("mlp")().build((1, 8, 8), 10).eval()
    model = {
        name: 0.1 * torch.randn(weight.shape, generator=generator) for name, weight in network.state_dict().items()
    }
    images, labels = torch.randn(20, 1, 8, 8, generator=generator), torch.arange(20) % 10
    together = fisher(network, model, images, labels, 1)
    monkeypatch.setattr(per_example, "MAX_BYTES", 3 * sum(weight.nbytes for weight in model.values()))
    assert examples_at_once(model) == 3
    apart = fisher(network, model, images, labels, 1)
    for name, mean in together.items():
        torch.testing.assert_close(apart[name], mean)


class Recurrent(torch.nn.Module):
    """A network that PyTorch cannot vectorise over examples."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = torch.nn.GRU(3, 4, batch_first=True), torch.nn.Linear(4, 2)

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(steps)[0][:, -1])


def test_examples_of_what_cannot_be_vectorised_come_one_by_one() -> None:
    network = Recurrent().eval()
    steps, labels = torch.randn(5, 6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0, 1])
    found = fisher(network, network.state_dict(), steps, labels, 1)
    expected = {name: torch.zeros_like(weight) for name, weight in network.named_parameters()}
    for n in range(len(labels)):
        network.zero_grad()
        torch.nn.functional.cross_entropy(network(steps[n : n + 1]), labels[n : n + 1]).backward()
        for name, weight in network.named_parameters():
            assert weight.grad is not None
            expected[name] += weight.grad.square() / len(labels)
    torch.testing.assert_close(dict(found), expected)


def test_the_estimate_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path), methods=["cwc"], settings=["run.cohort_size=2"])
    with_them = estimate(recipe, recipe.methods[0], Machine())
    monkeypatch.setattr(per_example, "MAX_EXAMPLES", 1)
    without = estimate(recipe, recipe.methods[0], Machine())
    assert with_them.memory > without.memory
    assert with_them.sent == without.sent > 0
