"""Fusion by optimal transport: permuted copies come back exactly, functions are kept, and maps are the formulas."""

from __future__ import annotations

import itertools
from typing import ClassVar

import pytest
import tiny
import torch
from permuting import lively, permuted
from torch import Tensor, nn
from torch.func import functional_call

from fedkeep.aggregation.transport import _cheapest, _move, channel_groups, distances, project
from fedkeep.models import Network, Shape, Weights
from fedkeep.models.networks import MLP, STAGES, VGG16, Convolution, LeNet5, ResNet18
from fedkeep.models.weights import add, mean, state_dict_copy


def small_vgg(norm: bool = True) -> Network:
    """Return VGG-16's layers with an eighth of the maps, and hidden layers of 40 units, on flattened 2x3 maps."""
    layers = [
        Convolution(maps // 8, 3, padding=1, pool=(2, 2) if location == count else None, norm=norm)
        for maps, count in STAGES
        for location in range(1, count + 1)
    ]
    options = {"convolutions": layers, "hidden": (40, 40), "dropout": 0.5, "dropped": "outputs"}
    return type("Small", (LeNet5,), options)().build((1, 64, 96), 5)


class Thin(ResNet18):
    """ResNet-18 with an eighth of the maps."""

    maps: ClassVar[tuple[int, ...]] = (8, 16, 32, 64)


NETWORKS: dict[str, tuple[nn.Module, Shape]] = {
    "lenet5": (LeNet5().build((1, 28, 28), 10), (1, 28, 28)),
    "vgg": (small_vgg(norm=False), (1, 64, 96)),
    "vgg with batch norm": (small_vgg(), (1, 64, 96)),
    "resnet18": (Thin().build((3, 8, 8), 10), (3, 8, 8)),
}
each_network = pytest.mark.parametrize("name", NETWORKS)


def model(name: str, seed: int) -> dict[str, Tensor]:
    """Return weights of their own for each seed: PyTorch's initial spread, drawn anew."""
    network, _ = NETWORKS[name]
    noise = torch.Generator().manual_seed(seed)
    sampled = {
        k: torch.randn(v.shape, generator=noise) * v.std() for k, v in state_dict_copy(network).items() if v.ndim > 1
    }
    return lively(network, noise) | sampled


def logits(name: str, weights: Weights) -> Tensor:
    network, shape = NETWORKS[name]
    images = torch.randn(4, *shape, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        answer: Tensor = functional_call(network.eval(), dict(weights), (images,))
    return answer


def same_function(name: str, ours: Weights, theirs: Weights) -> bool:
    a, b = logits(name, ours), logits(name, theirs)
    return bool(torch.allclose(a, b, rtol=0, atol=1e-5 * float(b.abs().max())))


# Permuted copies


@each_network
def test_a_permuted_copy_is_laid_back_exactly(name: str) -> None:
    base, layers = model(name, 1), channel_groups(NETWORKS[name][0])
    copy = permuted(base, layers, torch.Generator().manual_seed(2))
    assert not torch.equal(copy["classifier.weight"], base["classifier.weight"])
    assert tiny.equal(project(copy, base, layers, eta=0).model, base)


@pytest.mark.slow
def test_a_permuted_copy_of_resnet18_at_full_width_is_laid_back_exactly() -> None:
    network = ResNet18().build((3, 32, 32), 100)
    base, layers = lively(network, torch.Generator().manual_seed(1)), channel_groups(network)
    copy = permuted(base, layers, torch.Generator().manual_seed(2))
    assert tiny.equal(project(copy, base, layers, eta=0).model, base)


@pytest.mark.slow
@pytest.mark.parametrize("vgg_bn", [False, True])
def test_a_permuted_copy_of_vgg16_is_laid_back_exactly(vgg_bn: bool) -> None:
    network = VGG16(batch_norm=vgg_bn).build((3, 64, 64), 200)
    base, layers = lively(network, torch.Generator().manual_seed(1)), channel_groups(network)
    copy = permuted(base, layers, torch.Generator().manual_seed(2))
    assert tiny.equal(project(copy, base, layers, eta=0).model, base)


@each_network
def test_equal_models_give_the_identity(name: str) -> None:
    base = model(name, 1)
    found = project(base, base, channel_groups(NETWORKS[name][0]))
    assert tiny.equal(found.model, base)
    assert set(found.diagonal.values()) == {1.0}


# The function


@each_network
def test_an_aligned_model_of_unrelated_weights_computes_what_it_did(name: str) -> None:
    source, base = model(name, 1), model(name, 2)
    found = project(source, base, channel_groups(NETWORKS[name][0]), eta=0)
    assert same_function(name, found.model, source)
    assert not torch.equal(found.model["classifier.weight"], source["classifier.weight"])
    assert max(found.diagonal.values()) < 0.6, "neurons have changed places"
    assert torch.equal(found.model["classifier.bias"], source["classifier.bias"]), "classes have not"
    assert not same_function(name, project(source, base, channel_groups(NETWORKS[name][0])).model, source)


@each_network
def test_models_that_began_alike_stay_in_place_and_aligned_is_the_mean(name: str) -> None:
    start, layers = model(name, 1), channel_groups(NETWORKS[name][0])
    floats = {k: v for k, v in start.items() if v.is_floating_point()}
    clients = [
        start | add(floats, {k: v - v.mean() for k, v in model(name, s).items() if k in floats}, 0.05)
        for s in (2, 3, 4)
    ]
    found = project(mean(clients), clients[1], layers, eta=0)
    assert set(found.diagonal.values()) == {1.0}
    assert tiny.equal(found.model, mean(clients))
    fused = project(mean(clients), clients[1], layers).model
    # Half the mean and half the base: the base counts (K + 1) / 2K, two thirds of three clients.
    expected = mean(clients, [1 / 6, 4 / 6, 1 / 6])
    for key, tensor in expected.items():
        torch.testing.assert_close(fused[key], tensor, rtol=1e-5, atol=1e-6)


@each_network
def test_eta_goes_from_the_laid_source_to_the_base(name: str) -> None:
    source, base, layers = model(name, 1), model(name, 2), channel_groups(NETWORKS[name][0])
    aligned = project(source, base, layers, eta=0).model
    assert tiny.equal(project(source, base, layers, eta=0.0).model, aligned)
    assert tiny.equal(project(source, base, layers, eta=1.0).model, dict(base))
    quarter = project(source, base, layers, eta=0.25).model
    for key, tensor in aligned.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(quarter[key], 0.75 * tensor + 0.25 * base[key], rtol=1e-5, atol=1e-7)


def test_counters_are_the_sources() -> None:
    source, base = model("resnet18", 1), model("resnet18", 2)
    counters = [key for key in source if key.endswith("num_batches_tracked")]
    for key in counters:
        source[key], base[key] = torch.tensor(7), torch.tensor(100)
    found = project(source, base, channel_groups(NETWORKS["resnet18"][0])).model
    assert {int(found[key]) for key in counters} == {7}


# The formulas


def test_a_chain_is_the_papers_steps() -> None:
    """W~ = T' (W T_before), T_before the identity on pixels, in full matrices."""
    network = MLP(hidden=(6, 5)).build((1, 2, 2), 3)
    layers = channel_groups(network)
    source, base = ({k: torch.randn(v.shape) for k, v in state_dict_copy(network).items()} for _ in range(2))
    found = project(source, base, layers, eta=0)
    before = torch.eye(4, dtype=torch.float64)
    for name in ("body.full1", "body.full2"):
        incoming = source[f"{name}.weight"].double() @ before
        n = len(incoming)
        plan = _cheapest(distances(incoming.float(), base[f"{name}.weight"]))
        plan = torch.eye(n, dtype=torch.float64)[:, plan]
        torch.testing.assert_close(found.model[f"{name}.weight"], (plan.T @ incoming).float(), rtol=1e-4, atol=1e-5)
        bias = (plan.T @ source[f"{name}.bias"].double()).float()
        torch.testing.assert_close(found.model[f"{name}.bias"], bias, rtol=1e-4, atol=1e-5)
        assert found.diagonal[name] == pytest.approx(float(plan.trace()) / n)
        before = plan
    expected = (source["classifier.weight"].double() @ before).float()
    torch.testing.assert_close(found.model["classifier.weight"], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.model["classifier.bias"], source["classifier.bias"])


def residual() -> nn.Module:
    """Return the smallest network with both kinds of shortcut: one with weights, then one without."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(4, 5)
            self.a, self.b, self.short = nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(5, 7)
            self.c, self.d = nn.Linear(7, 6), nn.Linear(6, 7)
            self.classifier = nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).relu()
            x = (self.b(self.a(x).relu()) + self.short(x)).relu()
            x = (self.d(self.c(x).relu()) + x).relu()
            logits: Tensor = self.classifier(x)
            return logits

    return Small()


def planned(*pairs: tuple[Tensor, Tensor]) -> Tensor:
    """Return the exact map, as a matrix, between rows laid side by side."""
    ours, theirs = (torch.cat(rows, 1) for rows in zip(*pairs, strict=True))
    plan = _cheapest(distances(ours, theirs))
    return torch.eye(len(plan), dtype=torch.float64)[:, plan]


def test_layers_whose_outputs_are_added_share_a_plan() -> None:
    network = residual()
    a, b = ({k: torch.randn(v.shape) for k, v in state_dict_copy(network).items()} for _ in range(2))
    found = project(a, b, channel_groups(network), eta=0).model
    w = {
        name: (a[f"{name}.weight"].double(), b[f"{name}.weight"].double())
        for name in ("stem", "a", "b", "short", "c", "d")
    }

    def into(name: str, before: Tensor) -> tuple[Tensor, Tensor]:
        return w[name][0] @ before, w[name][1]

    stem = planned(w["stem"])
    inner = planned(into("a", stem))
    joint = planned(into("b", inner), into("short", stem))
    second = planned(into("c", joint))
    maps = {"b": joint, "short": joint, "d": joint}
    maps |= {"stem": stem, "a": inner, "c": second}
    reads = {"stem": torch.eye(4, dtype=torch.float64), "a": stem, "b": inner, "short": stem, "c": joint, "d": second}
    for name, plan in maps.items():
        expected = (plan.T @ w[name][0] @ reads[name]).float()
        torch.testing.assert_close(found[f"{name}.weight"], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        found["classifier.weight"], (a["classifier.weight"].double() @ joint).float(), rtol=1e-5, atol=1e-6
    )


def test_flattened_maps_keep_their_pixels() -> None:
    network = type("One", (LeNet5,), {"convolutions": [Convolution(4, 3)], "hidden": (3,)})().build((1, 6, 6), 3)
    layers = channel_groups(network)
    base = state_dict_copy(network)
    source = permuted(base, layers, torch.Generator().manual_seed(0))
    found = project(source, base, layers, eta=0).model["body.full2.weight"]
    assert found.shape == (3, 4 * 2 * 2)
    assert torch.equal(found, base["body.full2.weight"])


def test_projecting_changes_no_argument() -> None:
    source, base = model("lenet5", 1), model("lenet5", 2)
    before = [{k: v.clone() for k, v in weights.items()} for weights in (source, base)]
    project(source, base, channel_groups(NETWORKS["lenet5"][0]))
    assert all(tiny.equal(ours, theirs) for ours, theirs in zip((source, base), before, strict=True))


def test_a_batch_norm_of_flattened_maps_moves_with_its_channels() -> None:
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(16))
    network = Network(body, 16, 3).eval()
    layers, noise = channel_groups(network), torch.Generator().manual_seed(1)
    base = lively(network, noise)
    base["body.0.weight"] = torch.randn(4, 1, 3, 3, generator=noise)
    source = base | {"body.0.weight": base["body.0.weight"].roll(1, 0)}
    found = project(source, base, layers, eta=0)
    assert found.diagonal["body.0"] < 1, "something moves"
    images = torch.randn(5, 1, 4, 4, generator=noise)
    outputs = [functional_call(network, dict(weights), (images,)) for weights in (source, found.model)]
    torch.testing.assert_close(outputs[0], outputs[1])


# Plans


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_distances_are_those_of_rows_and_finite_for_equal_ones() -> None:
    a, b = noise(4, 6).float(), noise(5, 6, seed=1).float()
    found = distances(a, b)
    assert found.dtype == torch.float64
    for i, j in itertools.product(range(4), range(5)):
        assert float(found[i, j]) == pytest.approx(float((a[i].double() - b[j].double()).norm()), rel=1e-9)
    assert torch.isfinite(distances(a, a)).all()


def test_the_plan_is_the_cheapest_permutation() -> None:
    # Source 0 is like base 2, source 1 like base 0, source 2 like base 1.
    plan = _cheapest(torch.tensor([[9.0, 9.0, 1.0], [1.0, 9.0, 9.0], [9.0, 1.0, 9.0]], dtype=torch.float64))
    assert plan.tolist() == [1, 2, 0]
    for seed in range(20):
        costs = noise(5, 5, seed=seed).abs()
        best = min(itertools.permutations(range(5)), key=lambda p: sum(float(costs[i, j]) for j, i in enumerate(p)))
        assert _cheapest(costs).tolist() == list(best)


def test_the_plan_is_that_of_pot() -> None:
    ot = pytest.importorskip("ot")
    costs = distances(noise(30, 7), noise(30, 7, seed=1))
    uniform = torch.full((30,), 1 / 30, dtype=torch.float64).numpy()
    assert torch.from_numpy(ot.emd(uniform, uniform, costs.numpy())).argmax(0).tolist() == _cheapest(costs).tolist()


@pytest.mark.parametrize("positions", [1, 3])
def test_channels_are_moved_on_either_axis_with_all_of_their_entries(positions: int) -> None:
    plan, weight = torch.tensor([2, 0, 3, 1]), noise(4, 4 * positions)
    assert torch.equal(_move(weight, plan, 0), weight[plan])
    by_channel = weight.reshape(4, 4, positions)
    assert torch.equal(_move(weight, plan, 1).reshape(4, 4, positions), by_channel[:, plan])
    assert torch.equal(_move(weight.flatten(), plan, 0).reshape(4, 4, positions), by_channel[plan])
    kernels = noise(4, 4, 3, 2)
    assert torch.equal(_move(kernels, plan, 1), kernels[:, plan])
    assert _move(weight, None, 1) is weight


def test_frozen_layers_which_do_not_travel_stay_and_the_function_is_kept() -> None:
    frozen_norm = nn.BatchNorm2d(6).requires_grad_(False)
    network = nn.Sequential(
        *(nn.Conv2d(1, 4, 3).requires_grad_(False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 1), frozen_norm),
        *(nn.ReLU(), nn.Conv2d(6, 5, 1), nn.Conv2d(5, 3, 1).requires_grad_(False), nn.Flatten(), nn.Linear(12, 8)),
        *(nn.ReLU(), nn.Linear(8, 2)),
    ).eval()
    with torch.no_grad():
        frozen_norm.weight.copy_(torch.arange(6.0))
    layers = channel_groups(network)
    assert [layer.name for layer in layers] == ["3", "6", "9", "11"]
    noise = torch.Generator().manual_seed(0)
    source, base = (
        {name: torch.randn(p.shape, generator=noise) for name, p in network.named_parameters() if p.requires_grad}
        for _ in range(2)
    )
    projected = project(source, base, layers, eta=0)
    assert projected.diagonal["9"] < 1, "the linear layer's units do move"
    images = torch.randn(4, 1, 4, 4, generator=noise)
    before, after = (functional_call(network, dict(weights), (images,)) for weights in (source, projected.model))
    torch.testing.assert_close(after, before)
