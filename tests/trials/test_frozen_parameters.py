"""Frozen parameters (``requires_grad`` is False) are no part of a model: they stay as they are, and do not travel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedkeep
from fedkeep.interface import get_algorithm
from fedkeep.models.networks import ResNet18

METHODS = ("fedavg", "fedseq", "sfedkd", "fedcad", "fedadkd", "scaffold", "fedcurv", "cwc", "moon", "feddkd")


class Adapted(nn.Module):
    """A frozen layer, a part that is trained, a frozen one that nothing knows, and a classifier."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.flat = nn.Flatten()
        self.fixed = nn.Linear(torch.Size(shape).numel(), 6).requires_grad_(False)
        self.learned = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.classifier = nn.Linear(6, classes)

    def features(self, images: Tensor) -> Tensor:
        fixed = self.fixed(self.flat(images)).relu()
        return fixed + self.norm(self.learned(fixed)).tanh()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


def factory() -> nn.Module:
    return Adapted(tiny.SHAPE, tiny.CLASSES)


def frozen_resnet(shape: tuple[int, ...], classes: int) -> nn.Module:
    network = ResNet18().build(shape, classes)
    network.body.requires_grad_(False)  # type: ignore[operator]
    return network


def resnet(shape: tuple[int, ...], classes: int) -> nn.Module:
    return ResNet18().build(shape, classes)


@pytest.mark.parametrize("method", METHODS)
def test_methods_train_the_rest(method: str) -> None:
    simulation = tiny.simulation(tiny.configured(get_algorithm(method)), factory=factory)
    runner = simulation.context.runner
    before = {name: tensor.clone() for name, tensor in runner.frozen.items()}
    assert before.keys() == {"fixed.weight", "fixed.bias"}
    records = tiny.run_rounds(simulation, 3)
    assert all(record["lost"] == {} for record in records)
    assert simulation.server.model.keys().isdisjoint(before)
    assert not torch.equal(simulation.server.model["learned.weight"], runner.initial["learned.weight"])
    for network in (runner.train_network, runner.eval_network, runner.build()):
        for name, tensor in before.items():
            assert torch.equal(network.get_parameter(name), tensor)


@pytest.mark.slow
def test_bytes_of_a_frozen_resnet(tmp_path: Path) -> None:
    data = torch.randint(0, 256, (24, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = {
        "data": (data, torch.arange(24) % 4, data.clone(), torch.arange(24) % 4),
        "partition": fedkeep.IID(num_clients=2),
        "methods": ["fedavg"],
        "rounds": 1,
        "seeds": [0],
        "training": fedkeep.SGD(lr=0.1, batch_size=12, epochs=1),
    }
    whole = fedkeep.run(model=resnet, out=tmp_path / "whole", **given).trials[0]
    part = fedkeep.run(model=frozen_resnet, out=tmp_path / "part", **given).trials[0]
    network = frozen_resnet((3, 8, 8), 4)
    frozen = sum(weight.nbytes for weight in network.parameters() if not weight.requires_grad)
    assert frozen > 44e6
    for name in ("up", "down"):
        saved = getattr(whole, name) - getattr(part, name)
        assert frozen <= saved < frozen + 1e5, "and the tensors' names"
        assert getattr(part, name) < 1e5, "the classifier, and batch norm's statistics, which training mode changes"
    saved_model = load_file(part.path / "model.safetensors")  # type: ignore[operator]
    assert saved_model.keys() == network.state_dict().keys(), "what is exported is whole"


@pytest.mark.slow
def test_an_exported_model_predicts_as_the_run(tmp_path: Path) -> None:
    run = fedkeep.run("demo", model=Adapted, methods=["fedseq"], rounds=2, seeds=[3], out=tmp_path / "run")
    fedkeep.export_model(run, tmp_path / "model", method="FedSeq")
    images = fedkeep.load("digits").test["input"]
    exported = torch.export.load(tmp_path / "model" / "model.pt2").module()
    loaded, _ = fedkeep.load_model(tmp_path / "model", network=Adapted)
    torch.testing.assert_close(exported(images), loaded(images))
    with torch.random.fork_rng():
        torch.manual_seed(9)
        network = Adapted((1, 8, 8), 10).eval()
    network.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    torch.testing.assert_close(network(fedkeep.load("digits").normalise(images)), exported(images))


def test_given_weights_reach_frozen_parameters(tmp_path: Path) -> None:
    state = Adapted((1, 8, 8), 10).state_dict()
    given: dict[str, Any] = {"model": Adapted, "methods": ["fedavg"], "rounds": 1, "seeds": [0]}
    run = fedkeep.run("demo", **given, weights=state, out=tmp_path / "given")
    saved = load_file(run.trials[0].path / "model.safetensors")  # type: ignore[operator]
    assert torch.equal(saved["fixed.weight"], state["fixed.weight"])
    pooled = fedkeep.run("demo", **given, pretraining={"passes": 1}, out=tmp_path / "pooled")
    own = fedkeep.run("demo", **given, out=tmp_path / "own")
    fixed = [load_file(one.trials[0].path / "model.safetensors")["fixed.weight"] for one in (pooled, own)]  # type: ignore[operator]
    assert torch.equal(*fixed)


class Block(nn.Module):
    """Attention and two linear layers, as of a small transformer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mix = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        attended = nn.functional.scaled_dot_product_attention(self.query(tokens), self.key(tokens), self.value(tokens))
        mixed: Tensor = tokens + attended + self.mix(tokens + attended)
        return mixed


class Transformer(nn.Module):
    """Reads each row of an image as a token."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(shape[0] * shape[2], width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.classifier = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images.permute(0, 2, 1, 3).flatten(2))
        logits: Tensor = self.classifier(self.blocks(tokens).mean(1))
        return logits


def adapted_transformer() -> nn.Module:
    """A transformer with adapters of rank 2 at queries and values; only these and the classifier are trained."""
    import peft  # takes seconds, in each process that collects tests

    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["query", "value"], modules_to_save=["classifier"])
    built: nn.Module = fedkeep.custom(lambda: peft.get_peft_model(Transformer(tiny.SHAPE, tiny.CLASSES), config)).build(
        tiny.SHAPE, tiny.CLASSES
    )
    return built


@pytest.mark.parametrize("method", ["fedavg", "fedseq", "sfedkd", "fedcad", "fedadkd"])
def test_of_adapters_only_they_and_the_classifier_travel(method: str) -> None:
    simulation = tiny.simulation(tiny.configured(get_algorithm(method)), factory=adapted_transformer)
    records = tiny.run_rounds(simulation, 3)
    assert all(record["lost"] == {} for record in records)
    model, initial = simulation.server.model, simulation.context.runner.initial
    assert len(model) == 2 * 2 * 2 + 2, "two adapters of two matrices in each of two blocks; weight and bias"
    assert all("lora_" in name or "classifier" in name for name in model)
    assert all(not torch.equal(model[name], initial[name]) for name in model)
    size = sum(tensor.nbytes for tensor in model.values())
    frozen = sum(weight.nbytes for weight in adapted_transformer().parameters() if not weight.requires_grad)
    assert size <= records[0]["up"] / len(records[0]["cohort"]) < size + 1500 < frozen
