"""A user's network is tried before training, in the words of the network and the data."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep.errors import ConfigError
from fedkeep.export.trained_model import build_predictor, exported
from fedkeep.models.custom import custom, describe_network
from fedkeep.models.trial_step import logits_of, try_training
from fedkeep.models.weights import mean, state_dict_copy
from fedkeep.training.model_runner import has_batch_norm

NUMBERS = torch.linspace(-1, 1, 10).reshape(2, 5)
IDS = torch.tensor([[3, 0, 7, 1, 1], [2, 2, 0, 6, 5]])


def tried(model: Any, inputs: Tensor = NUMBERS, classes: int = 3) -> nn.Module:
    network = custom(model, "mine").build(tuple(inputs.shape[1:]), classes)
    try_training(network, inputs, classes, "mine", batch_norm=has_batch_norm(network))
    return network


class Net(nn.Module):
    """Two layers; subclasses do something to what goes in or comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(5, 4), nn.Linear(4, 3)

    def logits(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.hidden(x)))

    def forward(self, x: Tensor) -> Any:
        return self.logits(x)


class Subtracts(Net):
    def forward(self, x: Tensor) -> Any:
        x -= x.mean()
        return self.logits(x)


class Standardises(Net):
    def forward(self, x: Tensor) -> Any:
        return self.logits((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True))  # of a blank example 0 / 0


class LeavesAClassOut(Net):
    def forward(self, x: Tensor) -> Any:
        return self.logits(x) + torch.tensor([0.0, 0.0, -torch.inf])


class SubtractsInTraining(Net):
    def forward(self, x: Tensor) -> Any:
        return self.logits(x.sub_(1.0) if self.training else x - 1.0)


class SubtractsUnseen(Net):
    def forward(self, x: Tensor) -> Any:
        x.data.sub_(1.0)  # which no version counts
        return self.logits(x)


class Flat(Net):
    def forward(self, x: Tensor) -> Any:
        return self.logits(x).squeeze()


class Pair(Net):
    def forward(self, x: Tensor) -> Any:
        return [self.logits(x), x]


class Auxiliary(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.hidden(x))
        return (self.out(hidden), self.second(hidden)) if self.training else self.out(hidden)


class Counter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.logits(x)


class Detached(Net):
    def forward(self, x: Tensor) -> Any:
        return self.logits(x).detach()


class DrawsNumPy(Net):
    def forward(self, x: Tensor) -> Any:
        return self.logits(x) * float(np.random.random())  # noqa: NPY002


class DrawsPython(Net):
    def forward(self, x: Tensor) -> Any:
        return self.logits(x) * random.random()


class RunningMaximum(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.tensor(-torch.inf))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.largest.copy_(torch.maximum(self.largest, x.max()))
        return self.logits(x)


class Centred(Net):
    """Follows the mean of its inputs in a buffer that no state dict holds."""

    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5), persistent=persistent)

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.5)
        return self.logits(x - self.mean)


class Remembers(Net):
    last: Any = 0.0

    def forward(self, x: Tensor) -> Any:
        logits = self.logits(x + self.last)
        self.last = x.mean(0).detach()
        return logits


class Expanded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1).expand(5))

    def forward(self, x: Tensor) -> Any:
        return self.logits(x * self.scale)


class Words(nn.Module):
    def __init__(self, rows: int = 8, **options: Any) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(rows, 4, **options), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x).sum(1))


def half_frozen() -> nn.Module:
    network = Net()
    network.hidden.requires_grad_(False)
    return network


@pytest.mark.parametrize(
    ("model", "inputs", "classes", "message"),
    [
        (lambda: nn.Linear(7, 3), NUMBERS, 3, "the Linear expects 7 features, and the data have 5"),
        (
            lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(6, 3)),
            NUMBERS,
            3,
            r"layer '1' \(Linear\) expects 6 features, and it gets 4",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(32, 3)),
            torch.zeros(2, 1, 4, 4),
            3,
            r"layer '0' \(Conv2d\): .*to have 3 channels, but got 1",
        ),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 1)), torch.zeros(2, 9), 3, r"\(Conv2d\): Expected 3D .* or 4D"),
        (lambda: Net().double(), NUMBERS, 3, r"'hidden.weight' is float64.*call .float\(\)"),
        (lambda: Net().half(), NUMBERS, 3, r"is float16.*call .float\(\)"),
        (Net, IDS, 3, "reads numbers with fractions, and the data have whole numbers"),
        (Words, NUMBERS, 3, "reads whole numbers such as token ids, and the data have float32"),
        (lambda: Words(rows=6), IDS, 3, "has rows for the ids 0 to 5, and the data have 7 too"),
        (lambda: Words(sparse=True), IDS, 3, "sparse gradient of 'words.weight'"),
        (lambda: Words(max_norm=0.01), IDS, 3, "changes its own 'words.weight'"),
        (LeavesAClassOut, NUMBERS, 3, "infinite logits, and losses on soft labels"),
        (Subtracts, NUMBERS, 3, "changes its inputs in place"),
        (SubtractsInTraining, NUMBERS, 3, "changes its inputs in place"),
        (SubtractsUnseen, NUMBERS, 3, "changes its inputs in place"),
        (lambda: nn.Sequential(nn.ReLU(inplace=True), Net()), NUMBERS, 3, "changes its inputs in place"),
        (Flat, NUMBERS, 3, r"shape \[3\].*Expected \[1, 3\].*squeeze\(1\)"),
        (Pair, NUMBERS, 3, "gives a list of 2 instead of a tensor of logits.*output.logits"),
        (Auxiliary, NUMBERS, 3, "gives a tuple of 2 .* in training mode. Return the logits alone"),
        (lambda: nn.Linear(5, 1), NUMBERS, 2, r"two classes give two: torch.nn.Linear\(width, 2\)"),
        (lambda: nn.Linear(5, 4), NUMBERS, 3, r"\[2, 3\].*torch.nn.Linear\(width, 3\): with tasks"),
        (Counter, NUMBERS, 3, "changes its own 'calls'"),
        (RunningMaximum, NUMBERS, 3, "changes its own 'largest'.*finite"),
        (Detached, NUMBERS, 3, "no gradient"),
        (Centred, NUMBERS, 3, "keeps something that no state dict holds.*persistent=False"),
        (Remembers, NUMBERS, 3, "keeps something that no state dict holds, in an attribute"),
        (DrawsNumPy, NUMBERS, 3, "global generator"),
        (DrawsPython, NUMBERS, 3, "global generator"),
        (lambda: Net().requires_grad_(False), NUMBERS, 3, r"all frozen .*nothing to train"),
        (lambda: torch.jit.script(nn.Linear(5, 3)), NUMBERS, 3, "TorchScript"),
        (lambda: nn.Sequential(torch.jit.script(nn.Tanh()), nn.Linear(5, 3)), NUMBERS, 3, "TorchScript"),
        (lambda: nan(Net()), NUMBERS, 3, "not finite"),
    ],
)
def test_what_cannot_be_trained_is_told_before_training(
    model: Callable[[], nn.Module], inputs: Tensor, classes: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}") as raised:
        tried(model, inputs, classes)
    assert "network" in str(raised.value)


def nan(network: nn.Module) -> nn.Module:
    with torch.no_grad():
        network.out.bias[1] = torch.nan
    return network


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Net, NUMBERS),
        (Words, IDS),
        (half_frozen, NUMBERS),
        (Standardises, NUMBERS),
        (lambda: Centred(persistent=True), NUMBERS),
        (Expanded, NUMBERS),
        (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), NUMBERS),
        (lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 4)), nn.Linear(4, 3)), NUMBERS),
        (lambda: nn.Sequential(nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))), NUMBERS),
        (lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)), NUMBERS),
        (lambda: nn.Sequential(nn.LazyLinear(4), nn.Dropout(0.5), nn.LazyLinear(3)), NUMBERS),
    ],
)
def test_what_can_be_trained_passes_and_leaves_the_generators_and_examples_alone(model: Any, inputs: Tensor) -> None:
    given = inputs.clone()
    tried(model, inputs)
    assert torch.equal(inputs, given)


Named = namedtuple("Named", ["hidden", "logits"])


@dataclass
class Output:
    logits: Tensor
    loss: None = None


@pytest.mark.parametrize(
    "wrap",
    [lambda z: {"logits": z, "loss": None}, lambda z: Output(z), lambda z: Named(z * 2, z)],
    ids=["dict", "dataclass", "namedtuple"],
)
def test_named_logits_are_taken(wrap: Callable[[Tensor], Any]) -> None:
    class Wrapped(Net):
        def forward(self, x: Tensor) -> Any:
            return wrap(self.logits(x))

    network = tried(Wrapped)
    assert network(NUMBERS).shape == (2, 3)
    assert [name for name, _ in network.named_children()] == ["body", "classifier"], "split at its last layer"


def test_a_tuple_has_no_named_logits() -> None:
    assert logits_of((pair := NUMBERS, pair)) == (pair, pair)


def test_a_hugging_face_classifier_is_taken() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3
    )
    network = tried(lambda: transformers.BertForSequenceClassification(config), IDS)
    assert network(IDS).shape == (2, 3)
    assert network.classifier.in_features == 8


def test_a_network_that_cannot_be_copied_is_refused_with_what_to_give() -> None:
    given = nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 4)), nn.Linear(4, 3))
    with pytest.raises(ConfigError, match=r"(?s)network .*cannot be copied.*lambda"):
        tried(given)


class Masked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf, 0.0, -torch.inf]))
        self.register_buffer("shift", torch.ones(5))

    def forward(self, x: Tensor) -> Any:
        return self.logits(x + self.shift + self.mask.exp())


def test_a_mask_of_infinities_stays_out_of_the_model_and_comes_back_on_export() -> None:
    network = tried(Masked)
    weights = state_dict_copy(network)
    assert [name for name in weights if "mask" in name] == []
    files = exported(network, weights)
    own = Masked()
    own.load_state_dict(files)  # strict
    assert torch.equal(own(NUMBERS), network.eval()(NUMBERS))
    again = build_predictor(custom(Masked), files, {"shape": [5], "mean": [], "std": []}, classes=3)
    assert torch.equal(again(NUMBERS), network(NUMBERS))


def test_another_mask_is_another_network() -> None:
    one, other = Masked(), Masked()
    other.load_state_dict(one.state_dict())
    digest = describe_network(custom(one), (5,), 3)["digest"]
    assert describe_network(custom(other), (5,), 3)["digest"] == digest
    other.mask[0] = -torch.inf
    assert describe_network(custom(other), (5,), 3)["digest"] != digest


@pytest.mark.parametrize("seed", [3, 4])
def test_the_digest_of_lazy_layers_does_not_depend_on_the_programs_generator(seed: int) -> None:
    class Shown(nn.LazyLinear):
        def extra_repr(self) -> str:
            return f"{object()}"

    network = nn.Sequential(Shown(4), nn.Tanh(), nn.LazyLinear(3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = describe_network(custom(network), (5,), 3)
        torch.manual_seed(seed)
        assert describe_network(custom(network), (5,), 3) == first


def test_the_mean_of_equal_infinities_is_that_infinity() -> None:
    models = [{"a": torch.tensor([torch.inf, -torch.inf, float(n)])} for n in range(3)]
    assert mean(models, [1.0, 2.0, 1.0])["a"].tolist() == [torch.inf, -torch.inf, 1.0]
