"""What local models know inside and outside their clients' classes, and rounds to a target (specification, 12)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fedkeep
from fedkeep.experiment.build import build_federation
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.metrics import kold
from fedkeep.models import get_architecture
from fedkeep.reporting.metric import METRICS, shown_in
from fedkeep.reporting.trial import TrialResult

NAN = float("nan")
few = settings(max_examples=80, deadline=None)
pairs = st.lists(st.tuples(st.integers(0, 9), st.floats(0.0, 1.0)), min_size=2, max_size=7)


@pytest.fixture(autouse=True)
def _no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a mean of nothing would warn
        yield


def by_hand(counts: Sequence[float], accuracies: Sequence[float], support: bool = False) -> tuple[float, float]:
    """Return (in, out); classes that nobody tested are left out of both."""
    total, classes = sum(counts), len(counts)
    inside: list[tuple[float, float]] = []
    outside: list[tuple[float, float]] = []
    for count, a in zip(counts, accuracies, strict=True):
        share = count / total
        if math.isnan(a):
            continue
        if support:
            (inside if count else outside).append((1.0, a))
        else:
            inside.append((share, a))
            outside.append(((1 - share) / (classes - 1), a))

    def mean(weighed: list[tuple[float, float]]) -> float:
        weight = sum(w for w, _ in weighed)
        return sum(w * a for w, a in weighed) / weight if weight else NAN

    return mean(inside), mean(outside)


def test_golden() -> None:
    d, a = (0.7, 0.3, 0.0, 0.0), (0.9, 0.6, 0.2, 0.1)
    assert kold(d, a) == pytest.approx((0.81, 0.33))
    assert kold(d, a, support=True) == pytest.approx((0.75, 0.15))
    assert kold((7, 3, 0, 0), a) == pytest.approx((0.81, 0.33)), "counts do as well"
    assert by_hand(d, a) == pytest.approx((0.81, 0.33))
    assert by_hand(d, a, support=True) == pytest.approx((0.75, 0.15))


@pytest.mark.parametrize("support", [False, True])
@few
@given(pairs)
def test_it_is_the_formula(support: bool, sampled: list[tuple[int, float]]) -> None:
    counts, accuracies = zip(*sampled, strict=True)
    assume(sum(counts))
    got = kold(counts, accuracies, support=support)
    assert got == pytest.approx(by_hand(counts, accuracies, support), nan_ok=True)
    assert all(math.isnan(value) or 0 <= value <= 1 + 1e-12 for value in got)


def test_a_client_that_owns_all_classes_has_nothing_outside_its_support() -> None:
    inside, outside = kold((1, 2, 1), (0.3, 0.6, 0.9), support=True)
    assert inside == pytest.approx(0.6)
    assert math.isnan(outside)
    assert kold((1, 2, 1), (0.3, 0.6, 0.9)) == pytest.approx((0.6, 0.6))


@pytest.mark.parametrize("support", [False, True])
def test_classes_without_test_examples_are_left_out(support: bool) -> None:
    counts, accuracies = (5, 3, 2, 0, 0), (0.5, NAN, 0.9, NAN, 0.1)
    assert kold(counts, accuracies, support=support) == pytest.approx(by_hand(counts, accuracies, support))
    assert kold((1, 0), (NAN, 0.4)) == pytest.approx((NAN, 0.4), nan_ok=True)


@pytest.mark.parametrize(
    ("counts", "accuracies"), [((1, 2), (0.1, 0.2, 0.3)), ((0, 0), (0.1, 0.2)), ((-1, 2), (0.1, 0.2)), (1.0, 0.5)]
)
def test_what_is_no_distribution_is_refused(counts: Any, accuracies: Any) -> None:
    with pytest.raises(ValueError):
        kold(counts, accuracies)


# From a run, everything counted again outside it


@pytest.fixture(params=["exdir", "dirichlet"], scope="module")
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrialResult, list[Any]]:
    """Return a trial with every local model evaluated, and (round, label counts, class-wise accuracies) of each."""
    folder = tmp_path_factory.mktemp("watched")
    recording = tiny.RecordFits()
    skewed = {
        "exdir": [],
        "dirichlet": ["partition.scheme=dirichlet", "partition.num_clients=8", "partition.alpha=0.7"],
    }[request.param]
    recipe = load_recipe(
        tiny.write_recipe(folder),
        settings=[
            *skewed,
            "run.evaluate_local_models=true",
            "run.evaluation_window=3",
            "run.cohort_size=4",
            "training.lr=0.3",
            "training.epochs=3",
        ],
        methods=["fedavg"],
        rounds=3,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = fedkeep.run(recipe, out=folder / "run", callbacks=[recording])
    left = {(one.round, one.client): one.fit.model for one in recording.fits}
    federation, digits = build_federation(recipe, 0), fedkeep.load("digits")
    network = get_architecture("mlp")(hidden=(8,)).build(digits.shape, 10)  # type: ignore[call-arg]
    seen = []
    for (number, client), model in left.items():
        network.load_state_dict(dict(model))
        with torch.no_grad():
            hits = network(digits.normalise(digits.test["input"])).argmax(1) == digits.test["label"]
        accuracies = [hits[digits.test["label"] == c].double().mean().item() for c in range(10)]
        counts = federation.data(client)["label"].bincount(minlength=10).tolist()
        seen.append((number, counts, accuracies, hits.double().mean().item()))
    assert len(seen) == 12
    (trial,) = run.trials
    return trial, seen


def weighed(seen: list[Any], value: Callable[[Any], float]) -> float:
    """Return the mean over local trainings by examples, of those that have a value."""
    known: list[tuple[int, float]] = [(sum(v[1]), value(v)) for v in seen if not math.isnan(value(v))]
    return sum(n * v for n, v in known) / sum(n for n, _ in known)


@pytest.mark.parametrize("support", [False, True])
def test_kold_of_a_run(watched: tuple[TrialResult, list[Any]], support: bool) -> None:
    """By examples over the cohort; rounds together, whose cohorts are of nearly one size."""
    trial, seen = watched
    got = trial.kold(support=support)
    for location in (0, 1):
        expected = weighed(seen, lambda local_model, i=location: by_hand(local_model[1], local_model[2], support)[i])  # type: ignore[misc]
        assert got[location] == pytest.approx(expected, abs=1e-6)
    if not support:
        assert (METRICS["kold_in"].of(trial), METRICS["kold_out"].of(trial)) == pytest.approx(got)
    assert got[0] > got[1], "clients know more of their own classes"
    everything = sum(min(local_model[1]) > 0 for local_model in seen)
    assert everything == 0 if trial.partition["scheme"] == "exdir" else 0 < everything < len(seen)
    unweighted = np.nanmean([by_hand(local_model[1], local_model[2], support)[0] for local_model in seen])
    assert got[0] != pytest.approx(unweighted, abs=1e-5)


def test_both_definitions_are_columns_of_the_report(watched: tuple[TrialResult, list[Any]]) -> None:
    trial, _ = watched
    values = {metric.title: metric.of(trial) for metric in shown_in("local models")}
    assert values["inside own classes"] == trial.kold()[0]
    assert values["outside own classes"] == trial.kold()[1]
    assert (values["seen classes"], values["unseen classes"]) == trial.kold(support=True)
    assert len(set(values.values())) == len(values) == 6


def test_accuracy_of_local_models(watched: tuple[TrialResult, list[Any]]) -> None:
    trial, seen = watched
    history: Mapping[int, float] = trial.local_history
    assert list(history) == [1, 2, 3]
    for number, value in history.items():
        assert value == pytest.approx(np.mean([local_model[3] for local_model in seen if local_model[0] == number]))
    assert METRICS["local_accuracy"].of(trial) == pytest.approx(np.mean(list(history.values())))


def test_rounds_to_of_a_cell(watched: tuple[TrialResult, list[Any]]) -> None:
    trial, _ = watched
    for target in (0.0, *trial.accuracies, 1.1):
        expected = next((r for r, a in zip(trial.evaluated, trial.accuracies, strict=True) if a >= target), NAN)
        assert trial.rounds_to(float(target)) == pytest.approx(expected, nan_ok=True)


def test_models_of_a_round_that_was_rolled_back_count_nowhere() -> None:
    model = {"client": "0", "correct": [1, 1]}
    rows = [{"round": number, "local_models": [model], "rolled_back": number == 2} for number in (1, 2, 3)]
    trial = TrialResult("FedSeq", rows, [], {}, {}, finished=True)
    assert [one["round"] for one in trial.local_models] == [1, 3]
