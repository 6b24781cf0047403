"""What is honest runs, and what does nothing, or would change what others read, is told."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import tiny
import torch
from filelock import FileLock
from torch import Tensor, nn

import fedkeep
from fedkeep.algorithms.incremental.fedpass import FedPASS, loss_scale
from fedkeep.data.partition import DirichletPerClient
from fedkeep.data.partition.base import Assignment, Scheme, random_stream, to_offsets
from fedkeep.data.partition.dirichlet import _client_of_step, draw_clients
from fedkeep.errors import ConfigError, PartitionError, RunError
from fedkeep.experiment import initial_model
from fedkeep.experiment.recipe_loader import read_grid
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, Training, on_client
from fedkeep.interface.privacy import Privacy
from fedkeep.losses import Batch, CrossEntropy, Loss, ModelView
from fedkeep.models import Weights
from fedkeep.options import option

NUMPY = [
    (lambda: fedkeep.SGD(lr=np.float16(0.25)).lr, 0.25),
    (lambda: fedkeep.SGD(lr=np.float32(0.3)).lr, 0.3),
    (lambda: fedkeep.SGD(lr=np.array(0.5)).lr, 0.5),
    (lambda: fedkeep.SGD(lr=0.1, batch_size=np.uint8(9)).batch_size, 9),
    (lambda: fedkeep.Dirichlet(0.5, num_clients=4, self_balancing=np.bool_(False)).self_balancing, False),
    (lambda: fedkeep.Dirichlet(np.int32(2), num_clients=np.int16(4)).alpha, 2.0),
    (lambda: fedkeep.FedAvg(aggregation=np.str_("uniform")).aggregation, "uniform"),
]


@pytest.mark.parametrize(("make", "expected"), NUMPY)
def test_numpys_numbers_are_options(make: Any, expected: Any) -> None:
    found = make()
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("wrong", [np.float32("nan"), np.float32("inf"), np.array([0.1, 0.2]), np.str_("0.1")])
def test_numpys_wrong_values_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="lr must be"):
        fedkeep.SGD(lr=wrong)


def test_a_grid_takes_numpys_values() -> None:
    plain = read_grid({"training.lr": [0.5, 0.25]})
    assert read_grid({"training.lr": np.array([0.5, 0.25], np.float32)}) == plain
    assert read_grid({"training.lr": [np.float32(0.5), np.float64(0.25)]}) == plain


@pytest.mark.parametrize("cls", [fedkeep.FedDKD, fedkeep.FedNTD, fedkeep.FedGKD, fedkeep.ASD, fedkeep.SeqKeep])
@pytest.mark.parametrize("value", [1e300, 1e39])
def test_numbers_that_float32_cannot_hold_are_refused(cls: Any, value: float) -> None:
    for name in {"tau", "w_full"} & {field.name for field in fields(cls)}:
        with pytest.raises(ConfigError, match=f"{name} must be"):
            cls(**{name: value})
    with pytest.raises(ConfigError, match="w_penalty must be 0 or 1e-37 to 1e"):
        fedkeep.CWC(w_penalty=1e-46)


def test_a_degree_of_adaptivity_that_float32_cannot_square_is_refused() -> None:
    with pytest.raises(ConfigError, match="tau must be"):
        fedkeep.FedAdam(tau=1e30)


def data(classes: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(classes)
    x, y = rng.normal(size=(50, 4)).astype(np.float32), np.arange(50) % classes
    return x[:40], y[:40], x[40:], y[40:]


def run(out: Path, classes: int, **changes: Any) -> Any:
    wanted = {"model": "mlp", "methods": "fedavg"} | changes
    return fedkeep.run(
        data=data(classes),
        partition=wanted.pop("partition", fedkeep.IID(num_clients=4)),
        rounds=2,
        cohort_size=2,
        seeds=1,
        training=fedkeep.SGD(lr=0.1, batch_size=8),
        out=out / "run",
        **wanted,
    )


@pytest.mark.parametrize(
    ("method", "classes", "idle"),
    [
        (fedkeep.FedDKD(), 2, "two classes"),
        (fedkeep.FedADKD(), 2, "two classes"),
        (fedkeep.FedDKD(w_nontarget=0.0), 2, ""),
        (fedkeep.FedDKD(), 3, ""),
        (fedkeep.FedLwF(), 3, "one task"),
        (fedkeep.FedAvg(), 2, ""),
        (fedkeep.FedADKD(w_target_iid=1.0), 3, "no Gini impurity is above 0.667"),
        (fedkeep.FedADKD(nckd_mask="zero_logit"), 2, ""),
        (fedkeep.FedNTDASD(), 2, "nothing is distilled"),
        (fedkeep.FedADKD(phi="off", delta=2.0), 3, "delta counts only with phi = on"),
        (fedkeep.FedADKD(phi="off"), 3, ""),
        (
            fedkeep.FedADKD(w_target_iid=0.1, iid_from=0.5, phi="off"),
            3,
            "delta and phi count only without w_target_iid",
        ),
        (fedkeep.FedLSD(first_round=11), 3, "its teacher, which begins in round 11 of"),
        (fedkeep.FedSKF(pit="off", pit_turn="random"), 3, "pit_turn counts only with pit = fused or aligned; with one"),
    ],
)
def test_a_part_that_does_nothing_is_told(
    method: Algorithm, classes: int, idle: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        report = (Path(run(tmp_path, classes, methods=[method]).path) / "report.html").read_text()
    assert ("does nothing here" in caplog.text) == bool(idle)
    assert idle in caplog.text
    assert ("does nothing here" in report) == bool(idle)
    assert idle in report


class Flags(nn.Module):
    """A linear layer with buffers of many types, a large one, and a scale without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.0))
        self.register_buffer("ready", torch.tensor([True, False]))
        self.register_buffer("steps", torch.tensor(3, dtype=torch.int16))
        self.register_buffer("far", torch.tensor(1e6))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) * self.scale


@pytest.mark.parametrize("method", ["fedcurv", "fedavg", "sfedkd"])
def test_buffers_of_any_type_travel(method: str, tmp_path: Path) -> None:
    folder = Path(run(tmp_path, 3, model=Flags, methods=method).path)
    records = [json.loads(line) for file in folder.glob("trials/*/rounds.jsonl") for line in file.open()]
    assert len(records) == 2
    assert not any(record["lost"] or record["rolled_back"] for record in records)


def test_a_scale_without_dimensions_is_trained_privately() -> None:
    simulation = tiny.simulation(
        fedkeep.FedAvg(),
        factory=Scaled,
        privacy=Privacy(noise_multiplier=0.1),
    )
    before = simulation.server.model["scale"].clone()
    simulation.run_round()
    assert simulation.server.model["scale"] != before


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network, self.scale = tiny.network(), nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images) * self.scale


@dataclass(frozen=True, eq=False)
class Writing(Loss):
    column: str

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        value = CrossEntropy()(model, batches)
        batches[0].data[self.column].mul_(1)
        return value


@dataclass(frozen=True)
class Writes(Algorithm):
    column: str = option("input", "what its loss changes in place")

    def round(self, server: Server, cohort: Cohort) -> None:
        cohort.ask(self.train, server.model)

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        return client.fit(model, Writing(self.column))


@pytest.mark.parametrize("column", ["input", "label"])
def test_a_loss_that_changes_its_batch_is_refused(column: str) -> None:
    with pytest.raises(ConfigError, match="Writing changed examples in place"):
        tiny.simulation(Writes(column)).run_round()


class WritesInRareCases(nn.Module):
    """Changes its input only where no trial has seen it: more than two examples, in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.add_(1.0) if len(x) > 2 and not self.training else x + 1.0)


def test_a_change_in_place_that_no_trial_step_saw_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the network changed examples in place"):
        run(tmp_path, 3, model=WritesInRareCases)


@dataclass(frozen=True)
class Sorting(Scheme):
    name: ClassVar[str] = "sorting-in-place"
    what: str = option("labels", "what is changed")

    def assign(self, labels: Any, num_classes: int, train: Any, seed: int) -> Assignment:
        if self.what == "labels":
            labels.sort()
        else:
            train["label"].zero_()
        return Assignment(np.arange(len(labels)), to_offsets(np.array([len(labels) // 4] * 4)))


def test_a_partition_may_sort_its_labels_and_not_the_examples() -> None:
    train = {"label": torch.tensor([2, 1, 0, 1] * 4)}
    before = train["label"].clone()
    Sorting(num_clients=4).split(train, 3, 0)
    assert torch.equal(train["label"], before)
    with pytest.raises(PartitionError, match="changed the training examples in place"):
        Sorting(num_clients=4, what="train").split(train, 3, 0)


@pytest.mark.parametrize(
    ("settings", "scale"),
    [({}, 0.02), ({"optimizer": "adam"}, 1.0), ({"optimizer": "adamw"}, 1.0), ({"max_grad_norm": 1.0}, 1.0)],
)
def test_passs_loss_is_smaller_for_sgd_that_does_not_clip(settings: dict[str, Any], scale: float) -> None:
    assert loss_scale(None, Training(**settings)) == scale
    assert loss_scale(0.3, Training(**settings)) == 0.3


def test_no_reply_of_fedpass_is_refused_at_a_usual_learning_rate() -> None:
    simulation = tiny.simulation_with_tasks(FedPASS(), training=Training(epochs=2, batch_size=4, lr=0.05))
    while simulation.finished < simulation.rounds:
        assert not simulation.run_round().record["lost"]


def step_by_step(sizes: Any, quotas: Any, alpha: float, seed: int) -> Any:
    """Draw classes as the scheme does, with a table of all shares for each class that runs out."""
    rng = random_stream(seed, "shares")
    shape = (len(quotas), len(sizes))
    prior = np.log(rng.standard_gamma(alpha + 1.0, shape)) + np.log1p(-rng.random(shape)) / alpha
    clients, left = _client_of_step(quotas, random_stream(seed, "order")), sizes.copy()

    def draw(steps: Any) -> Any:
        log_share = np.where(left > 0, prior, -np.inf)
        ends = np.exp(log_share - log_share.max(axis=1, keepdims=True)).cumsum(axis=1)
        ends /= ends[:, -1:]
        return (ends[clients[steps]] <= rng.random(len(steps))[:, None]).sum(axis=1)

    drawn = draw(np.arange(len(clients)))
    for step in range(len(clients)):
        left[drawn[step]] -= 1
        later = step + 1 + np.flatnonzero(drawn[step + 1 :] == drawn[step])
        if not left[drawn[step]] and len(later):
            drawn[later] = draw(later)
    return clients[np.argsort(drawn, kind="stable")]


@pytest.mark.parametrize("seed", range(8))
def test_an_equal_part_for_each_client_is_what_drawing_step_by_step_gives(seed: int) -> None:
    rng = np.random.default_rng(seed)
    classes, clients = int(rng.integers(2, 30)), int(rng.integers(1, 12))
    sizes = np.bincount(rng.integers(0, classes, 200), minlength=classes)
    quotas = np.full(clients, 200 // clients) + (np.arange(clients) < 200 % clients)
    alpha = float(10 ** rng.uniform(-2, 1))
    assert np.array_equal(draw_clients(sizes, quotas, alpha, seed), step_by_step(sizes, quotas, alpha, seed))
    assert DirichletPerClient.name == "dirichlet-per-client"


def test_a_method_whose_loss_weighs_examples_refuses_class_weights() -> None:
    settings = ["training.class_weights=balanced", "tasks.num_tasks=2"]
    fedkeep.load_recipe("demo", settings=settings, methods=["fedicarl"])
    with pytest.raises(ConfigError, match=r"FediCaRL takes no training.loss or training.class_weights: with loss=glfc"):
        fedkeep.load_recipe("demo", settings=[*settings, "fedicarl.loss=glfc"], methods=["fedicarl"])


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        (fedkeep.SCAFFOLD(), "privacy.secure_aggregation=true"),
        (fedkeep.FediCaRL(), "privacy.noise_multiplier=1.0"),
        (fedkeep.FedWeIT(), "run.client_test=0.3"),
    ],
)
def test_what_a_method_cannot_do_is_told_before_another_trains(method: Algorithm, setting: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0]):
        run(tmp_path, 3, methods=[fedkeep.FedAvg(), method], settings=[setting])
    assert not (tmp_path / "run").exists()


def test_a_part_of_the_classes_in_tasks_has_a_confusion_matrix(tmp_path: Path) -> None:
    path = Path(run(tmp_path, 5, methods="fedavg", settings=["tasks.num_tasks=2", "tasks.num_classes=4"]).path)
    counts = json.loads((path / "trials" / "fedavg-seed0" / "confusion.json").read_text())["counts"]
    assert len(counts) == 4


def test_a_folder_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(lock: FileLock, *args: Any, **given: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with pytest.raises(RunError, match=r"is on a file system without locks \(No locks available\)"):
        run(tmp_path, 3, methods="fedavg")


def test_a_pooled_model_of_somebody_else_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "cache"))
    first = run(tmp_path / "one", 3, methods="fedavg", pretraining={"passes": 1})

    def refuse(path: Path) -> None:  # since the folder is not one's own
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(initial_model, "FileLock", refuse)
    monkeypatch.setattr(initial_model, "_write", None)
    second = run(tmp_path / "two", 3, methods="fedavg", pretraining={"passes": 1})
    assert second.trials[0].rounds == first.trials[0].rounds
