"""The recipe's own loss of labels and its class weights, in the place of the cross-entropy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedkeep
from fedkeep.errors import ConfigError
from fedkeep.experiment.build import check_label_loss
from fedkeep.experiment.plugins import find_loss, import_user_code, keep_loss
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.interface import Training
from fedkeep.losses import Batch, ClassSubset, CrossEntropy, ModelView, QuadraticPenalty, Scaled
from fedkeep.losses.classification import OWN_LOSSES, LabelLoss
from fedkeep.losses.wrappers import replace_cross_entropy
from fedkeep.training.party import LocalClient

FACTOR = 0.5


def halved(logits: Tensor, labels: Tensor) -> Tensor:
    """Half the cross-entropy."""
    return FACTOR * cross_entropy(logits, labels)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    OWN_LOSSES.clear()


def trained(loss: Callable[..., Tensor] | None = None, **changes: object) -> dict[str, Tensor]:
    """Return the model of one round of FedAvg."""
    OWN_LOSSES["given.halved"] = loss or halved
    simulation = tiny.simulation(fedkeep.FedAvg(), **changes)
    simulation.run_round()
    return dict(simulation.server.model)


def test_the_loss_takes_the_place_of_the_cross_entropy_at_clients() -> None:
    plain = replace(tiny.TRAINING, weight_decay=0.0, max_grad_norm=None)
    half_rate, own = replace(plain, lr=plain.lr * FACTOR), replace(plain, loss="given.halved")
    expected, found = trained(training=half_rate), trained(training=own, loss=halved)
    assert tiny.equal(expected, found)  # a power of two, so to the bit
    module = trained(training=own, loss=nn.CrossEntropyLoss())
    assert tiny.equal(module, trained(training=plain))


def test_balanced_weights_are_inverse_to_each_clients_own_counts() -> None:
    state = tiny.simulation(fedkeep.FedAvg(), training=replace(tiny.TRAINING, class_weights="balanced"))
    data = {"input": tiny.dataset(6).train["input"][:4], "label": torch.tensor([0, 0, 0, 2])}
    for name, weight in (("0", [4 / 6, 4 / 2, 4 / 2]), ("", None)):
        party = LocalClient(state.context, name, data, None, task=1, round=1, uses={})
        loss = party.train_job(state.server.model, CrossEntropy()).loss
        assert isinstance(loss, LabelLoss if weight else CrossEntropy)  # the server's own training is as it was
        if weight:
            torch.testing.assert_close(loss.weight, torch.tensor(weight))


def test_weights_follow_the_classes_that_a_term_sees() -> None:
    loss = CrossEntropy() + ClassSubset(Scaled(2.0, CrossEntropy(dataset_index=1)), 1, 3)
    seen: list[tuple[int, slice]] = []

    def make(term: CrossEntropy, classes: slice) -> LabelLoss:
        seen.append((term.dataset_index, classes))
        return LabelLoss(None, torch.arange(4.0)[classes], term.dataset_index)

    replaced = replace_cross_entropy(loss, make)
    assert seen == [(0, slice(None)), (1, slice(1, 3))]
    assert replaced.terms[1].term.term.weight.tolist() == [1.0, 2.0]


@dataclass(frozen=True, eq=False)
class Smoothed(CrossEntropy):
    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        return cross_entropy(model.logits(batches[0]), batches[0].data["label"], label_smoothing=0.9)


def test_a_loss_of_ones_own_is_not_thrown_away_nor_left_unchanged_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    state = tiny.simulation(fedkeep.FedAvg(), training=replace(tiny.TRAINING, class_weights="balanced"))
    client = LocalClient(state.context, "0", tiny.dataset(6).train, None, task=1, round=1, uses={})
    both = client.train_job(state.server.model, Smoothed() + CrossEntropy()).loss
    assert [type(term) for term in both.terms] == [Smoothed, LabelLoss]
    for _ in range(2):
        assert isinstance(client.train_job(state.server.model, Smoothed()).loss, Smoothed)
    (told,) = caplog.messages
    assert "change nothing in a training whose loss is Smoothed." in told, "a phase of its own is told once"
    without = {"input": client.data["input"]}
    assert isinstance(client.train_job(state.server.model, Smoothed(), without).loss, Smoothed)
    assert client.train_job(state.server.model, QuadraticPenalty(state.server.model, 1.0)).loss  # one of FedKeep's


def test_a_name_is_found_in_what_the_user_named_and_nowhere_else(tmp_path) -> None:
    path = tmp_path / "focal.py"
    path.write_text("import torch\nclass Focal(torch.nn.CrossEntropyLoss):\n    pass\n")
    import_user_code([str(path)])
    cpu = torch.device("cpu")
    find_loss("focal.Focal", cpu)
    assert type(OWN_LOSSES["focal.Focal"]).__name__ == "Focal"
    for unknown in ("focal.Other", "os.getcwd", "torch.nn.CrossEntropyLoss"):
        with pytest.raises(ConfigError, match=r"is not known here\. Write module\.function, with --use"):
            find_loss(unknown, cpu)
    name = keep_loss(nn.CrossEntropyLoss())
    assert (name, type(OWN_LOSSES[name])) == ("given.CrossEntropyLoss", nn.CrossEntropyLoss)
    assert OWN_LOSSES[keep_loss(halved)] is halved
    with pytest.raises(ConfigError, match="loss must be a function"):
        keep_loss(3)


def test_a_loss_that_cannot_be_copied_trains(tmp_path: Path) -> None:
    scripted = torch.jit.script(scripted_loss)
    run = fedkeep.run("demo", methods=["fedavg"], rounds=1, seeds=1, loss=scripted, out=tmp_path / "run")
    assert run["fedavg"].rounds


def scripted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, labels)


class Hardest(nn.Module):
    """The mean loss of the three hardest examples, and of its gradient."""

    calls = 0

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        losses = cross_entropy(logits, labels, reduction="none").topk(3)[0]
        (slope,) = torch.autograd.grad(losses.sum(), logits, create_graph=True)
        return losses.mean() + slope.square().mean()


def test_what_cannot_be_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"FedLSD takes no training.loss or training.class_weights: its loss weighs"):
        load_recipe("demo", methods=["fedlsd"], settings=["training.class_weights=balanced"])
    with pytest.raises(ConfigError, match="DP-SGD"):
        load_recipe("demo", settings=["training.class_weights=balanced", "privacy.noise_multiplier=1"])
    slow = ["training.lr_schedule=cosine", "training.lr_min=0.06"]
    with pytest.raises(ConfigError, match=r"FedSeq: training.lr_min = 0.06 is above training.lr = 0.05, from which"):
        load_recipe("demo", settings=[*slow, "training.lr=0.1", "fedseq.training.lr=0.05"])
    load_recipe("demo", settings=[*slow, "fedseq.training.lr=0.1"], methods=["fedseq"])
    with pytest.raises(ConfigError, match="of the cross-entropy"):
        Training(loss="x.y", class_weights="balanced")
    with pytest.raises(ConfigError, match=r"clips that of each example. Set privacy.max_grad_norm instead"):
        load_recipe("demo", settings=["fedseq.training.max_grad_norm=1", "privacy.noise_multiplier=1"])
    with pytest.raises(ConfigError, match=r"cannot be 'blanced'. Did you mean 'balanced'"):
        load_recipe("demo", settings=["training.class_weights=blanced"])
    with pytest.raises(ConfigError, match=r"must be at least 1e-12"):  # a batch of such a class has no mean
        load_recipe("demo", settings=["training.class_weights=[0,1,1]"])
    federation = tiny.federation((5, 5))
    keep_loss(nn.CrossEntropyLoss(weight=torch.ones(2)))
    with pytest.raises(ConfigError, match=f"raised RuntimeError for 10 rows of {tiny.CLASSES} logits: weight tensor"):
        check_label_loss(Training(loss="given.CrossEntropyLoss"), federation.dataset, torch.device("cpu"))
    name = keep_loss(Hardest())
    check_label_loss(Training(loss=name), federation.dataset, torch.device("cpu"))
    assert OWN_LOSSES[name].calls == 0, "what it counts is not touched"  # type: ignore[attr-defined]
    locked = Hardest()
    locked.lock = threading.Lock()
    check_label_loss(Training(loss=keep_loss(locked)), federation.dataset, torch.device("cpu"))
    with pytest.raises(ConfigError, match="must return a scalar tensor"):
        trained(training=replace(tiny.TRAINING, loss="given.halved"), loss=lambda logits, labels: logits)
