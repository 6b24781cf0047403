"""DP-SGD beside Opacus' own, and what is told of a client's labels."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

import fedkeep
from fedkeep._utils.noise_stream import NoiseStream
from fedkeep.algorithms.incremental.class_incremental import update_memory
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.errors import ConfigError
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.interface import Cohort, Fit, Server, algorithms, get_algorithm
from fedkeep.interface.privacy import Privacy, spent
from fedkeep.losses import (
    BoundingLoss,
    CompensatedCrossEntropy,
    CrossEntropy,
    Distillation,
    EntropyAndLabelWeighting,
    FeatureDistance,
    FullKL,
    Loss,
    Scaled,
    SupCon,
)
from fedkeep.metrics import dp_sgd_epsilon
from fedkeep.privacy.central_noise import noised_mean
from fedkeep.reporting.metric import METRICS, columns_for
from fedkeep.rounds.messages import StepRequest
from fedkeep.rounds.run_settings import Defense
from fedkeep.testing.runs import wrap_steps
from fedkeep.training.local_training import TrainJob
from fedkeep.training.party import LocalClient
from fedkeep.training.per_example import clipped_sum, private_fit

pytest.importorskip("opacus")

PRIVATE = Privacy(noise_multiplier=1.0, max_grad_norm=0.5, counts_epsilon=1.0)


@dataclass(frozen=True)
class Keeping(FedAvg):
    """FedAvg that says that clients keep examples."""

    title = "Keeping"
    keeps_examples = True  # type: ignore[assignment]


@dataclass(frozen=True)
class OneByOne(FedAvg):
    """FedAvg that asks one client after the other, and so sees the model of each."""

    title = "One by one"
    only_averages = True

    def round(self, server: Server, cohort: Cohort) -> None:
        for remote in cohort:
            server.model = remote.ask(self.train, server.model).model


def client(privacy: Privacy, name: str = "0") -> LocalClient:
    simulation = tiny.simulation(get_algorithm("fedavg")(), privacy=privacy)
    return LocalClient(simulation.context, name, simulation.federation.data(name), None, task=1, round=1, uses={})


def test_the_sum_of_clipped_gradients_is_that_of_opacus() -> None:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    party = client(PRIVATE)
    model, runner = party.initial_model, party.context.runner
    job = party.train_job(model, CrossEntropy())
    batch = job.streams[0].first(min(job.num_examples, 100))
    network = runner.train_network
    ours = clipped_sum(runner, job, batch, dict(network.named_parameters()), party.training, PRIVATE)
    theirs = GradSampleModule(party.network(model).train().requires_grad_(True))
    optimizer = DPOptimizer(
        torch.optim.SGD(theirs.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=1
    )
    nn.functional.cross_entropy(theirs(batch.data["input"]), batch.data["label"]).backward()
    optimizer.clip_and_accumulate()
    for mine, parameter in zip(ours, theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.summed_grad)


def test_noise_has_the_spread_that_epsilon_is_computed_for() -> None:
    """Without examples in a batch a step is nothing but noise."""
    privacy = Privacy(noise_multiplier=2.0, max_grad_norm=0.5)
    party = client(privacy)
    job: TrainJob = replace(party.train_job(party.initial_model, CrossEntropy()), epochs=1)
    empty = replace(job.streams[0], data={name: column[:1] * 0 for name, column in job.streams[0].data.items()})
    training = replace(party.training, batch_size=1, momentum=0.0, weight_decay=0.0, lr=1.0)
    fit = private_fit(party.context.runner, replace(job, streams=[empty]), training, privacy, NoiseStream(bytes(32)))
    moved = torch.cat([(fit.model[name] - party.initial_model[name]).flatten() for name in party.parameter_names])
    assert moved.std() == pytest.approx(1.0, rel=0.1), "2 x 0.5; one example's gradient of norm 0.5 is hardly seen"
    assert fit.loss == 0


def test_a_step_is_divided_by_the_expected_size_of_a_batch() -> None:
    """Its own size would tell about the examples, and the noise would be too small where it is large."""
    party, privacy = client(PRIVATE, "4"), Privacy(noise_multiplier=0.0, max_grad_norm=0.5)
    job: TrainJob = replace(party.train_job(party.initial_model, CrossEntropy()), epochs=1)
    training = replace(party.training, batch_size=6, momentum=0.0, weight_decay=0.0, lr=1.0)
    fit = private_fit(party.context.runner, job, training, privacy, NoiseStream(bytes(32)))
    noise, sizes = NoiseStream(bytes(32)), []
    weights = {name: party.initial_model[name].clone() for name in party.parameter_names}
    for _ in range(fit.num_steps):
        batch = job.streams[0].sample(6 / 17, noise)
        sizes.append(len(batch.index))
        total = clipped_sum(party.context.runner, job, batch, weights, training, privacy)
        for weight, gradient in zip(weights.values(), total, strict=True):
            noise.normal(weight.shape)  # the noise, of which there is none here
            weight -= gradient / 6
    assert set(sizes) - {6}
    for name, weight in weights.items():
        torch.testing.assert_close(fit.model[name], weight)


def test_epsilon_is_the_accountants() -> None:
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    for _ in range(300):
        accountant.step(noise_multiplier=1.1, sample_rate=0.05)
    assert dp_sgd_epsilon({0.05: 300}, 1.1, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=0.02)
    assert dp_sgd_epsilon({0.05: 300}, 0.0, 1e-5) == float("inf")
    assert dp_sgd_epsilon({}, 1.0, 1e-5) == 0
    assert dp_sgd_epsilon({1.0: 1}, 300.0, 0.01) == 0, "the accountant's bound is below 0"


def test_counts_that_differ_by_one_have_the_same_outputs() -> None:
    """Each client is a draw: with 3 and with 2 examples of a class every whole number is told."""
    told: dict[int, set[float]] = {2: set(), 3: set()}
    party = client(Privacy(counts_epsilon=1.5))
    for count, found in told.items():
        party.data = {"label": torch.zeros(count, dtype=torch.int64)}
        for number in range(600):
            party.name = str(number)
            found.add(float(party.label_counts()[0]))
    assert told[2] | told[3] <= set(map(float, range(12)))
    assert set(map(float, range(6))) <= told[2] & told[3]


def test_a_client_tells_the_same_noised_counts_again() -> None:
    exact, noised = client(Privacy()).label_counts(), client(Privacy(counts_epsilon=0.1))
    output = noised.label_counts()
    assert not torch.equal(output, exact)
    assert torch.equal(output, noised.label_counts())
    noised.context.noise_secret = b"its own"
    assert not torch.equal(output, noised.label_counts()), "a real site's noise is its own"
    assert torch.equal(noised.label_counts(), noised.label_counts())


def test_other_counts_and_other_epsilons_have_other_noise() -> None:
    """The same noise on two counts would tell their difference, and two epsilons with the same noise the counts."""
    noise = {}
    for epsilon, examples in ((0.1, 17), (0.1, 16), (0.2, 17)):
        party = client(Privacy(counts_epsilon=epsilon), "4")
        party.data = {name: column[:examples] for name, column in party.data.items()}
        exact = torch.bincount(party.data["label"], minlength=party.num_classes)
        for number, count in enumerate(exact):
            noise.setdefault((epsilon, number, int(count)), set()).add(float(party._counts_noise(number, int(count))))
    assert all(len(found) == 1 for found in noise.values()), "the same for the same count of a class"
    distinct = {value for found in noise.values() for value in found}
    assert len(distinct) > len(noise) / 2, "whole numbers may agree by chance"


def test_a_class_has_its_noise_whatever_its_number_is_in_a_run() -> None:
    party = client(Privacy(counts_epsilon=0.01))
    party.context.label_names = ("a", "b")
    first = [float(party._counts_noise(number, 7)) for number in (0, 1)]
    party.context.label_names = ("b", "a")
    assert [float(party._counts_noise(number, 7)) for number in (1, 0)] == first


def test_each_task_has_its_own_noise() -> None:
    """With the same noise, a class that is told with the same number in the next task had no example in this one."""
    same = []
    for secret in range(200):
        told = []
        for task in (1, 2):
            party = client(Privacy(counts_epsilon=0.1))
            party.context.noise_secret, party.task = secret.to_bytes(32, "big"), task
            party.data = {"label": torch.zeros(0, dtype=torch.int64)}
            told.append(party.label_counts()[0])
        same.append(bool(told[0] == told[1]))
    assert 0.2 < sum(same) / len(same) < 0.45, "both below 0, and so 0, with a probability of a quarter, or alike"


@pytest.mark.parametrize("method", ["dddr", "feddcl"])
def test_counts_that_no_noise_covers_are_refused(method: str) -> None:
    with pytest.raises(ConfigError, match=r"counts_epsilon: .*'s client step search sends label counts without noise"):
        tiny.simulation(get_algorithm(method)(), privacy=Privacy(counts_epsilon=1.0))


def test_a_change_is_clipped_and_noised_for_its_epsilon() -> None:
    sent, found = torch.zeros(40, 50), torch.full((40, 50), 7.0)
    assert client(Privacy()).noised_change(sent, found).equal(found)
    party = client(Privacy(prototypes_noise_multiplier=3.0, max_prototype_change=2.0))
    first, second = (party.noised_change(sent, found) for _ in range(2))
    assert not first.equal(second)
    assert first.std() == pytest.approx(6.0, rel=0.1)
    assert (first - second).std() == pytest.approx(6.0 * 2**0.5, rel=0.1), "the same change, of norm 2, under new noise"
    nearly_exact = client(Privacy(prototypes_noise_multiplier=1e-6, max_prototype_change=2.0))
    assert nearly_exact.noised_change(sent, found).norm() == pytest.approx(2.0, rel=1e-3)


def test_means_of_few_examples_have_more_noise() -> None:
    server = tiny.simulation(get_algorithm("fedavg")(), privacy=Privacy(confidences_epsilon=2.0)).server
    means, counts = torch.full((2, 3_000), 0.5), torch.tensor([[10.0], [40.0]]).expand(2, 3_000)
    few, many = server.noised_means(means.flatten(), counts.flatten()).view(2, -1) - 0.5
    assert few.abs().mean() == pytest.approx(1 / 20, rel=0.1), "Laplace noise of scale 1 / (10 x epsilon)"
    assert many.abs().mean() == pytest.approx(1 / 80, rel=0.1)
    assert 0.4 < (few > 0).float().mean() < 0.6
    diverged = server.noised_means(torch.tensor([float("nan"), 0.5]), torch.tensor([0, 4]))
    assert ((diverged >= 0) & (diverged <= 1)).all()


def test_what_prototypes_and_confidences_tell_is_in_the_table(tmp_path: Path) -> None:
    settings = ["privacy.confidences_epsilon=0.5", "auxiliary.images_per_class=2", "run.cohort_size=3"]
    recipe = load_recipe(tiny.write_recipe(tmp_path), settings=settings, methods=["fedcad"], rounds=2)
    run = fedkeep.run(recipe, out=tmp_path / "run")
    assert run.trials[0].confidences_epsilon == 1.0, "two rounds"
    assert run.trials[0].prototypes_epsilon != run.trials[0].prototypes_epsilon, "FedCAD sends none"
    assert "confidences_epsilon" in {metric.name for metric in columns_for(run.trials)}
    privacy = {"prototypes_noise_multiplier": 8.0, "delta": 1e-5, "clients": {"0": {"private change": 5}, "1": {}}}
    trial = replace(run.trials[0], rounds=[{**run.trials[0].rounds[0], "privacy": privacy}], ledger=())
    assert trial.prototypes_epsilon == pytest.approx(dp_sgd_epsilon({1.0: 5}, 8.0, 1e-5)), "a client more or less"


@pytest.mark.parametrize(
    "uses",
    [
        {"private steps at x": 1},
        {"private steps at 0.5": 1, "private steps at nan": 1},
        {"private steps at 2.0": 1},
        {"private steps at 0.5": 10**400},
        {"private steps at 0.5": -1},
        {"private riches": 1},
    ],
)
def test_what_an_earlier_site_lied_about_can_be_read_and_promises_nothing(uses: dict[str, int], tmp_path: Path) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path), settings=["run.cohort_size=2"], methods=["fedavg"], rounds=1)
    run = fedkeep.run(recipe, out=tmp_path / "run")

    def spending(**options: float) -> Any:
        privacy = {"noise_multiplier": 0.0, "counts_epsilon": 0.0, "delta": 1e-5} | options
        told = {"clients": {"0": uses, "1": {"private steps at 0.5": 3}}}
        return replace(run.trials[0], rounds=[{**run.trials[0].rounds[0], "privacy": privacy | told}])

    assert spending(noise_multiplier=1.0).epsilon == float("inf")
    exact = spending()
    assert exact.epsilon != exact.epsilon, "it had no noise"
    assert columns_for([exact])
    nobody = spending(noise_multiplier=1.0).rounds[0]
    nobody = {**nobody, "privacy": {**nobody["privacy"], "clients": {}}}
    assert replace(exact, rounds=[nobody]).epsilon == 0, "no client's reply came"


def test_a_private_run_tells_its_epsilon_and_is_the_same_again(tmp_path: Path) -> None:
    file = tiny.write_recipe(tmp_path)
    settings = ["privacy.noise_multiplier=1.0", "privacy.counts_epsilon=0.5", "training.epochs=1", "run.cohort_size=3"]
    recipe = load_recipe(file, settings=settings, methods=["fedavg", "sfedkd", "fedadkd"], rounds=2)
    run = fedkeep.run(recipe, out=tmp_path / "one")
    again = fedkeep.run(replace(recipe, methods=recipe.methods[1:2]), out=tmp_path / "two")
    fedavg, sfedkd, fedadkd = run.trials
    assert {"epsilon", "counts_epsilon"} <= {metric.name for metric in columns_for(run.trials)}
    assert fedavg.epsilon > 0
    assert sfedkd.epsilon == pytest.approx(fedavg.epsilon + 0.5), "the counts are told once"
    assert fedadkd.epsilon == pytest.approx(sfedkd.epsilon), "and noised once, however often"
    assert sfedkd.counts_epsilon == 0.5
    assert METRICS["counts_epsilon"].of(fedavg) != METRICS["counts_epsilon"].of(fedavg), "FedAvg tells none"
    assert all(row["loss"] is None for row in fedavg.rounds), "the exact loss would tell about examples"
    assert [row["correct"] for row in run.trials[1].rounds if "correct" in row] == [
        row["correct"] for row in again.trials[0].rounds if "correct" in row
    ]


@pytest.mark.parametrize(
    ("method", "counts", "reason"),
    [("scaffold", 1.0, "of scaffold's client step"), ("sfedkd", 0.0, "Set privacy.counts_epsilon too")],
)
def test_what_noise_would_not_cover_is_refused(method: str, counts: float, reason: str) -> None:
    privacy = Privacy(noise_multiplier=1.0, counts_epsilon=counts)
    with pytest.raises(ConfigError, match=reason):
        tiny.simulation(get_algorithm(method)(), privacy=privacy)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("fedskf", {"level": "pass"}, "FedSKF.level=pass clients keep mean features .* Set FedSKF.level=lwf"),
        ("fedskf", {"level": "icarl"}, "FedSKF.level=icarl clients keep examples .* Set FedSKF.level=lwf"),
        (
            "flwf-2t",
            {"ce_classes": "all", "exemplars_per_class": 3},
            "FLwF2T.exemplars_per_class=3 clients keep examples .* Set",
        ),
        ("fedicarl", {}, "FediCaRL's clients keep examples that they choose"),
        ("fedewc", {}, "Fisher information"),
        ("asd", {}, "DP-SGD takes each alone. Take FedLSD"),
        ("fedntd-asd", {}, "DP-SGD takes each alone. Take FedLSD"),
        ("target", {}, "two data sets at once"),
        ("lander", {"anchors": "none.csv"}, "two data sets at once"),
    ],
)
def test_what_a_method_learns_beside_noised_steps_is_refused(name: str, options: dict[str, Any], reason: str) -> None:
    method = get_algorithm(name)(**options)
    with pytest.raises(ConfigError, match=f"privacy.noise_multiplier: .*{reason}"):
        tiny.simulation_with_tasks(method, privacy=PRIVATE)
    tiny.simulation_with_tasks(method)


def test_a_method_that_says_that_it_keeps_examples_is_refused() -> None:
    with pytest.raises(ConfigError, match="clients keep examples and tell their number"):
        tiny.simulation(Keeping(), privacy=PRIVATE)


@pytest.mark.parametrize("name", [name for name, cls in algorithms().items() if cls.__module__.startswith("fedkeep.")])
def test_a_method_is_refused_before_the_first_round_or_never(name: str) -> None:
    method = tiny.configured(get_algorithm(name))
    make = tiny.simulation if "auxiliary" in method.needs else tiny.simulation_with_tasks
    try:
        simulation = make(method, rounds=1, training=tiny.SHORT, privacy=PRIVATE)
    except ConfigError:
        return
    records = tiny.run_rounds(simulation)
    assert not any(record["lost"] for record in records)
    assert all(record["privacy"]["clients"] for record in records)


def test_means_have_the_noise_that_epsilon_is_computed_for() -> None:
    """Four clients move far in one direction; their mean moves as far as the norm allows, with noise of 2 x 3 / 4."""
    sent = {"w": torch.zeros(40_000)}
    fits = {str(k): Fit({"w": torch.full((40_000,), float(k + 1))}, 10 * k, 5, 1.0) for k in range(4)}
    privacy = Privacy(client_noise_multiplier=2.0, max_update_norm=3.0)
    asked: list[Any] = []

    def noise(*told: Any) -> NoiseStream:
        asked.extend(told)
        return NoiseStream(bytes(32))

    noised = noised_mean(fits, dict.fromkeys(fits, sent), privacy, noise)
    assert asked[0] == 2 * 3 / 4
    assert asked[1].mean() * 200 == pytest.approx(3.0), "the exact mean: another one has other noise"
    model = noised["0"].model["w"]
    assert all(torch.equal(fit.model["w"], model) and fit.num_examples == 1 for fit in noised.values())
    assert model.mean() * 200 == pytest.approx(3.0, abs=5 * 1.5), "the square root of 40,000"
    assert model.std() == pytest.approx(1.5, rel=0.02)


def test_nothing_of_a_client_is_told_beside_the_noised_mean() -> None:
    """Numbers of examples and steps, losses and counters of batches depend on one client, and have no noise."""
    sent = {"w": torch.zeros(2), "batches": torch.tensor(7)}
    fits = {str(k): Fit({"w": torch.ones(2), "batches": torch.tensor(8 + k)}, 10 + k, 5 + k, 1.0 + k) for k in range(3)}
    privacy = Privacy(client_noise_multiplier=1.0)
    for fit in noised_mean(fits, dict.fromkeys(fits, sent), privacy, lambda *told: NoiseStream(bytes(32))).values():
        assert (fit.num_examples, fit.num_steps, fit.loss) == (1, 1, 0.0)
        assert torch.equal(fit.model["batches"], torch.tensor(7))


def test_a_variance_that_noise_made_negative_is_that_which_was_sent() -> None:
    name = "body.1.running_var"
    fits = {str(k): Fit({name: torch.full((1000,), 0.1), "w": torch.zeros(1000)}, 10, 5, 1.0) for k in range(3)}
    sent = {one: tensor.clone() for one, tensor in fits["0"].model.items()}
    privacy = Privacy(client_noise_multiplier=3.0)
    found = noised_mean(fits, dict.fromkeys(fits, sent), privacy, lambda *told: NoiseStream(bytes(32)))["0"].model
    assert found[name].min() > 0
    assert (found[name] == sent[name]).any()
    assert found["w"].min() < -1


def test_a_run_with_noised_means_tells_the_epsilon_of_a_client(tmp_path: Path) -> None:
    settings = ["privacy.client_noise_multiplier=1.0", "training.epochs=1", "run.cohort_size=4"]
    recipe = load_recipe(tiny.write_recipe(tmp_path), settings=settings, methods=["fedavg"], rounds=2)
    trial = fedkeep.run(recipe, out=tmp_path / "run").trials[0]
    times = Counter(client for row in trial.rounds for client in row["cohort"])
    assert trial.client_epsilon == pytest.approx(gaussian_epsilon(max(times.values()), 1.0)), "no luck of the draw"
    assert all(row["loss"] is None for row in trial.rounds), "the exact loss would tell about clients"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.second.weight = self.first.weight

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.out(self.second(self.first(images.flatten(1)).relu()))
        return logits


@pytest.mark.parametrize(
    ("network", "option", "says"),
    [
        (Tied(), "client_noise_multiplier", "body.second.weight of the network stands at several places"),
        (nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10)), "noise_multiplier", "batch norm mixes"),
    ],
)
def test_networks_that_noise_does_not_fit_are_refused_before_there_is_a_folder(
    network: nn.Module, option: str, says: str, tmp_path: Path
) -> None:
    settings = [f"privacy.{option}=1.0", "run.cohort_size=4"]
    with pytest.raises(ConfigError, match=f"privacy.{option}: {says}"):
        fedkeep.run("demo", model=network, settings=settings, methods=["fedavg"], rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def gaussian_epsilon(times: int, multiplier: float, delta: float = 1e-5) -> float:
    """Return the accountant's epsilon of Gaussian noise, by hand: Rényi's, and its best order."""
    return min(
        a * times / (2 * multiplier**2) + log((a - 1) / a) - (log(delta) + log(a)) / (a - 1)
        for a in (1.25, 1.5, 1.75, *range(2, 65))
    )


def test_epsilon_of_a_client_is_that_of_known_cohorts() -> None:
    """Of 100 clients, ten a round, the busiest takes part 16 to 21 times in 100 rounds: 20 times is 30.13."""
    assert gaussian_epsilon(20, 1.0) == pytest.approx(30.1266, abs=1e-3)
    assert gaussian_epsilon(20, 0.5) == pytest.approx(81.1163, abs=1e-3), "exchanged for another client"
    assert dp_sgd_epsilon({1.0: 20}, 1.0, 1e-5) == pytest.approx(gaussian_epsilon(20, 1.0))
    assert dp_sgd_epsilon({0.1: 100}, 1.0, 1e-5) < 10, "if the cohorts were secret"


def test_a_client_that_moves_far_is_in_the_mean() -> None:
    """It is clipped there. If it were refused, its examples would decide who is in the mean, which no noise covers."""
    privacy = Privacy(client_noise_multiplier=1.0)
    for kept, changes in ((True, {"privacy": privacy}), (False, {})):
        simulation = tiny.simulation(FedAvg(), cohort_size=6, rounds=1, defense=Defense(model_norm=1e-9), **changes)
        (record,) = tiny.run_rounds(simulation)
        assert (not record["lost"]) is kept


@pytest.mark.parametrize("changed", [{"robust_aggregation": "median"}, {"loss_check": "server"}])
def test_central_noise_is_for_plain_means(changed: dict[str, Any]) -> None:
    """One client may move a median by twice the clipping norm itself, and not by that over the number of clients."""
    with pytest.raises(ConfigError, match=f"with defense.{next(iter(changed))}="):
        tiny.simulation(FedAvg(), privacy=Privacy(client_noise_multiplier=1.0), defense=Defense(**changed))


def test_central_noise_reaches_a_method_that_asks_clients_one_by_one() -> None:
    simulation = tiny.simulation(OneByOne(), privacy=Privacy(client_noise_multiplier=1.0))
    with pytest.raises(ConfigError, match="asks one client alone for a model"):
        simulation.run_round()


@pytest.mark.parametrize(
    ("method", "reason"),
    [("fedseq", "passes on the model"), ("fedadkd", "more than a model"), ("fednova", "reads single ones")],
)
def test_noised_means_are_for_methods_that_only_average(method: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        tiny.simulation(get_algorithm(method)(), privacy=Privacy(client_noise_multiplier=1.0))


def test_what_epsilon_would_not_cover_is_not_trained() -> None:
    party = client(PRIVATE)
    with pytest.raises(ConfigError, match="2 data sets at once"):
        party.fit(party.initial_model, CrossEntropy(), party.data, party.data)
    with pytest.raises(ConfigError, match="from other tensors"):
        party.fit(party.initial_model, CrossEntropy(), parametrization=dict)
    with pytest.raises(ConfigError, match="Fisher information"):
        party.fisher(party.initial_model)
    with pytest.raises(ConfigError, match="the features of examples"):
        party.features(party.initial_model)
    with pytest.raises(ConfigError, match="the examples that are kept"):
        update_memory(party, party.initial_model, {}, 2)
    party.context.runner.has_batch_norm = True
    with pytest.raises(ConfigError, match="batch norm mixes"):
        party.fit(party.initial_model, CrossEntropy())


WEIGHTING = EntropyAndLabelWeighting(torch.ones(tiny.CLASSES) / tiny.CLASSES)


@pytest.mark.parametrize(
    "loss",
    [
        SupCon(),
        CompensatedCrossEntropy(1),
        BoundingLoss(torch.zeros(tiny.CLASSES, 8), 0.1),
        FeatureDistance({}),
        Distillation((), FullKL(1.0), example_weights=WEIGHTING),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_a_loss_that_compares_examples_is_not_trained_one_by_one(loss: Loss) -> None:
    """Of one example alone weights are 1, and contrasts nothing: training would silently be another one."""
    party = client(PRIVATE)
    if isinstance(loss, Distillation):
        loss = replace(loss, teachers=(party.initial_model,))
    if isinstance(loss, FeatureDistance):
        loss = replace(loss, teacher=party.initial_model)
    for whole in (loss, CrossEntropy() + Scaled(0.5, loss)):
        with pytest.raises(ConfigError, match=f"the loss (Cached)?{type(loss).__name__} compares the examples"):
            party.fit(party.initial_model, whole)
    assert not spent(party._uses)
    party.fit(party.initial_model, CrossEntropy() + CompensatedCrossEntropy(0) + Distillation.kl(party.initial_model))


@pytest.mark.parametrize("stack", [1, 3])
def test_trainings_of_a_round_that_is_given_up_are_counted(stack: int) -> None:
    """Their replies have left the clients, or will, though nobody uses them."""

    simulation = tiny.simulation(
        FedAvg(), privacy=Privacy(noise_multiplier=1.0), stack=stack, min_clients=3, cohort_size=3
    )
    cohort = simulation.sample_cohort(1)
    simulation.settings.fault_injector = lambda number, client, step: "is down" if client == cohort[1] else None
    record = simulation.run_round().record
    assert record["rolled_back"]
    asked = {cohort[0], cohort[2]} if stack == 3 else {cohort[0]}  # the round is given up before the third is asked
    assert set(record["privacy"]["clients"]) == asked


def test_what_cannot_be_is_not_counted_of_a_round_that_is_given_up() -> None:
    def lie(request: StepRequest) -> Any:
        @functools.wraps(request.step)
        def wrapped(party: LocalClient, *args: Any) -> Any:
            party._uses["private steps at x"] = 1
            return request.step(party, *args)

        return wrapped if request.client == cohort[2] else request.step

    simulation = tiny.simulation(FedAvg(), privacy=Privacy(noise_multiplier=1.0), stack=3, min_clients=3, cohort_size=3)
    cohort = simulation.sample_cohort(1)
    simulation.settings.fault_injector = lambda number, client, step: "is down" if client == cohort[1] else None
    wrap_steps(simulation, lie)
    record = simulation.run_round().record
    assert record["rolled_back"]
    assert set(record["privacy"]["clients"]) == {cohort[0]}
