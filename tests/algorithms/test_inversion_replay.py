"""TARGET and LANDER by their formulas: what is taught on which images, what travels when, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from recorded_jobs import RecordedJobs
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

import fedkeep
from fedkeep.algorithms.incremental.lander import LANDER
from fedkeep.algorithms.incremental.target import TARGET
from fedkeep.data import Augmentation
from fedkeep.errors import ConfigError
from fedkeep.generation.inversion import read_anchors
from fedkeep.interface.pytree import num_bytes
from fedkeep.losses import ClassSubset
from fedkeep.models import Weights
from fedkeep.models.weights import load_weights
from fedkeep.training.local_training import NetworkView, TrainJob
from fedkeep.training.model_runner import ModelRunner
from fedkeep.trials.simulation import Simulation

TWO_ONE = tiny.stream((2, 1), clients=4, absent=0)
TOY = {**tiny.INVERSION, "num_images": 11}
ANCHORS = tiny.TOYS["lander"]["anchors"]


def target(**changes: Any) -> TARGET:
    return TARGET(**(TOY | changes))


def lander(**changes: Any) -> LANDER:
    return LANDER(**(TOY | {"anchors": ANCHORS, "replay_batch_size": 3} | changes))


def second_task(method: Any, **changes: Any) -> tuple[Simulation, RecordedJobs, Weights]:
    """Run two tasks of two rounds; return the simulation, what was trained, and the last model of the first task."""
    simulation = tiny.simulation_with_tasks(method, TWO_ONE, **{"cohort_size": 4, **changes})
    seen = RecordedJobs(simulation)
    tiny.run_rounds(simulation, 2)
    old = simulation.server.model
    tiny.run_rounds(simulation)
    return simulation, seen, old


def loss_of(simulation: Simulation, given: TrainJob, model: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss of a model on the first rows of its two data sets, real images and labels, synthetic images."""
    real, result = (source.first(4) for source in given.streams)
    value = given.loss(view(simulation, model), [real, result])
    return value, real.data["input"], real.data["label"], result.data["input"]


def view(simulation: Simulation, model: Weights) -> NetworkView:
    networks = simulation.context.runner
    load_weights(networks.train_network, model)
    return NetworkView(networks, dict(networks.train_network.named_parameters()), networks.train_network)


def distilled(student: Tensor, teacher: Tensor) -> Tensor:
    return -((teacher / 2).softmax(-1) * (student[:, : teacher.shape[1]] / 2).log_softmax(-1)).sum(-1).mean()


@pytest.mark.parametrize("round", [1, 2])
def test_target_by_formula(round: int) -> None:
    simulation, seen, old = second_task(target())
    model = seen.results[2, round, "1"].model
    value, images, labels, result = loss_of(simulation, seen.fits[2, round, "1"], model)
    ask = simulation.context.runner.logits
    expected = cross_entropy(ask(model, images)[:, 2:], labels - 2)
    torch.testing.assert_close(value, expected + 25 * distilled(ask(model, result), ask(old, result)))


def test_a_pass_ends_with_the_shorter_and_batches_fit_an_average_client() -> None:
    simulation, seen, _ = second_task(target())
    average = sum(seen.results[1, 2, client].num_examples for client in "0123") / 4
    batch = 11 // ceil(average / tiny.TRAINING.batch_size)
    assert simulation.server.state.replay.batch_size == batch
    for client in "0123":
        own = simulation.federation.num_examples(client)
        steps = tiny.TRAINING.epochs * min(ceil(own / tiny.TRAINING.batch_size), ceil(11 / batch))
        assert seen.results[2, 1, client].num_steps == steps
    _, seen, _ = second_task(lander())
    for client in "0123":
        own = simulation.federation.num_examples(client)
        assert seen.results[2, 1, client].num_steps == tiny.TRAINING.epochs * ceil(own / tiny.TRAINING.batch_size)


def test_the_released_code_makes_ten_batches_within_its_warm_up() -> None:
    simulation = tiny.simulation_with_tasks(target(compat="repo", num_images=1000, warmup=20), TWO_ONE, cohort_size=4)
    tiny.run_rounds(simulation, 2)
    steps = ceil(simulation.server.state.examples_per_client / tiny.TRAINING.batch_size)
    tiny.run_rounds(simulation, 1)
    replay = simulation.server.state.replay
    assert len(replay.images["label"]) == 10 * TOY["synthesis_batch_size"]
    assert replay.batch_size == 1000 // steps > 40, "as if there were all"


@pytest.mark.parametrize("method", [target(), lander()], ids=["target", "lander"])
def test_images_are_made_once_a_task_and_travel_once_to_each_client(method: Any) -> None:
    simulation = tiny.simulation_with_tasks(method, TWO_ONE, rounds=6, cohort_size=2)
    tiny.run_rounds(simulation, 6)
    assert not simulation.server.state.replay.images, "there is nothing old"
    holders: list[str] = []
    down = []
    images = None
    for _ in range(6):
        record = simulation.run_round().record
        result = simulation.server.state
        images = result.replay.images if images is None else images
        assert result.replay.images is images
        down.append(record["down"] - 2 * num_bytes(simulation.server.model))
        new = [client for client in record["cohort"] if client not in holders]
        assert down[-1] == len(new) * num_bytes(result.replay)
        holders += new
        assert result.receivers == holders
        for client in new:
            assert torch.equal(simulation.client_states[client].images["input"], images["input"])
    assert 0 in down


def test_a_client_that_missed_its_images_gets_them_with_its_next_local_training() -> None:
    def lose(number: int, client: str, step: str) -> str | None:
        return "no answer" if (number, client, step) == (3, "1", "receive") else None

    simulation = tiny.simulation_with_tasks(target(), TWO_ONE, cohort_size=4, fault_injector=lose)
    records = tiny.run_rounds(simulation, 3)
    assert records[-1]["lost"] == {"1": "no answer"}
    assert sorted(simulation.server.state.receivers) == ["0", "2", "3"]
    assert not tiny.run_rounds(simulation, 1)[0]["lost"]
    assert torch.equal(simulation.client_states["1"].images["input"], simulation.client_states["0"].images["input"])


def test_the_old_model_is_asked_once_and_stays_at_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    logits = ModelRunner.logits

    def spy(self: ModelRunner, model: Weights, images: Tensor) -> Tensor:
        asked.append(len(images))
        return logits(self, model, images)

    simulation = tiny.simulation_with_tasks(target(), TWO_ONE, rounds=4, cohort_size=4, evaluate_every=4)
    tiny.run_rounds(simulation, 4)
    monkeypatch.setattr(ModelRunner, "logits", spy)
    tiny.run_rounds(simulation, 3)
    assert asked == [11]
    sent = num_bytes(simulation.server.state.replay)
    assert sent < 11 * 16 + 11 * 8 + 11 * 2 * 4 * 3 + 100, "images, labels, three columns of answers, and no model"


def test_with_augmentation_the_old_model_travels_and_answers_in_every_batch() -> None:
    simulation, seen, old = second_task(target(), augmentation=Augmentation(horizontal_flip=True))
    loss = simulation.server.state.replay.loss
    assert isinstance(loss, ClassSubset)
    assert tiny.equal(loss.term.teachers[0], old)  # type: ignore[attr-defined]
    assert tiny.finite(seen.results[2, 2, "1"].model)


def test_lander_by_formula() -> None:
    simulation, seen, _ = second_task(lander())
    old = simulation_after_first_task(lander())
    anchors = read_anchors(ANCHORS, simulation.server.label_names)
    model = seen.results[2, 2, "1"].model
    value, images, labels, result = loss_of(simulation, seen.fits[2, 2, "1"], model)
    ask, read = simulation.context.runner.logits, simulation.context.runner.features
    bound = (mse_loss(read(model, images), anchors[labels]) - 0.015).clamp(min=0)
    own = cross_entropy(ask(model, images)[:, 2:], labels - 2) + 5 * bound
    taught = distilled(ask(model, result), ask(old, result)) + mse_loss(read(model, result), read(old, result))
    a, b = 1.3219281, 0.8164966  # log2(3 / 2 + 1), sqrt(2 / 3)
    torch.testing.assert_close(value, 0.2 * (1 + 1 / a) / b * own + 0.4 * a * b * taught)


def simulation_after_first_task(method: Any) -> Weights:
    simulation = tiny.simulation_with_tasks(method, TWO_ONE, cohort_size=4)
    tiny.run_rounds(simulation, 2)
    return simulation.server.model


def test_landers_first_task_is_bound_too() -> None:
    simulation, seen, _ = second_task(lander())
    given, model = seen.fits[1, 1, "1"], seen.results[1, 1, "1"].model
    assert len(given.streams) == 1
    batch = given.streams[0].first(4)
    simulation.set_task(1)
    value = given.loss(view(simulation, model), [batch])
    anchors = read_anchors(ANCHORS, simulation.context.label_names[:2])
    images, labels = batch.data["input"], batch.data["label"]
    distance = mse_loss(simulation.context.runner.features(model, images), anchors[labels])
    expected = cross_entropy(simulation.context.runner.logits(model, images), labels) + 5 * (distance - 0.015).clamp(
        min=0
    )
    torch.testing.assert_close(value, expected)


def test_lander_goes_back_to_its_best_model() -> None:
    training = replace(tiny.TRAINING, lr=1.5)  # so that it gets worse again
    simulation = tiny.simulation_with_tasks(lander(), TWO_ONE, rounds=6, cohort_size=4, training=training)
    seen = RecordedJobs(simulation)
    sent = []
    for _ in range(6):
        sent.append(simulation.server.model)
        simulation.run_round()
    losses = []
    for number in range(1, 7):
        fits = [seen.results[1, number, client] for client in "0123"]
        losses.append(sum(fit.loss * fit.num_steps for fit in fits) / sum(fit.num_steps for fit in fits))
    best = min(range(1, 6), key=lambda number: losses[number])
    assert best < 5, "not the last"
    assert tiny.equal(simulation.server.model, sent[best])
    simulation.run_round()
    assert simulation.server.state.lowest_loss == float("inf"), "of each task its own"


def test_what_the_papers_say_about_shares() -> None:
    assert lander().loss_factors(0, 20) == (1.0, 0.0)
    own, old = lander().loss_factors(10, 20)  # a = log2(11) = 3.4594, b = 0.7071
    assert own == pytest.approx(0.36460, rel=1e-4)
    assert old == pytest.approx(0.97846, rel=1e-4)


def test_lander_says_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"Set anchors to a \.csv file"):
        LANDER()
    simulation = tiny.simulation_with_tasks(lander(anchors="nowhere.csv"), TWO_ONE)
    with pytest.raises(ConfigError, match=r"nowhere\.csv"):
        simulation.run_round()


def test_anchors_of_classes_that_come_later_are_missed_before_the_run(tmp_path: Path) -> None:
    path = tmp_path / "names.csv"
    path.write_text("".join(f"{digit}," + ",".join(["0.5"] * 100) + "\n" for digit in range(9)))
    with pytest.raises(ConfigError, match="no anchor for class '9'"):
        fedkeep.run("demo", methods=[LANDER(anchors=str(path))], settings=["tasks.num_tasks=2"], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_anchors_of_another_width_are_refused(tmp_path: Any) -> None:
    path = tmp_path / "narrow.csv"
    path.write_text("a,1\nb,2\nc,3\n")
    with pytest.raises(ConfigError, match=r"features are 8 wide.*have 1 numbers"):
        tiny.simulation_with_tasks(lander(anchors=str(path)), TWO_ONE).run_round()
