"""FedPASS, and FedSKF with PASS, by their formulas: what is turned, what stands for old classes, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from recorded_jobs import TWO_ONE, RecordedJobs, distilled, logits, loss_of, second_task
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, linear

from fedkeep.algorithms.incremental.fedpass import FedPASS
from fedkeep.algorithms.incremental.fedskf import FedSKF
from fedkeep.losses import PrototypeCrossEntropy, Prototypes
from fedkeep.models import Weights
from fedkeep.models.heads import BIAS, WEIGHT, classifier_tensors


def turned(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return images in four rotations, and the labels of these, one by one."""
    rows = [image.rot90(k, (1, 2)) for image in images for k in range(4)]
    return torch.stack(rows), torch.tensor([4 * int(y) + k for y in labels for k in range(4)])


def distance(simulation: Any, model: Weights, old: Weights, images: Tensor) -> Tensor:
    return (simulation.context.runner.features(model, images) - simulation.context.runner.features(old, images)).norm()


def terms(objective: Any) -> list[Any]:
    """Return an objective and all that it is made of."""
    inside = [*getattr(objective, "terms", ()), *([objective.term] if hasattr(objective, "term") else [])]
    return [objective, *(found for each in inside for found in terms(each))]


def sampled(seen: RecordedJobs, *location: Any) -> PrototypeCrossEntropy:
    """Return the noisy prototypes that a client was given in a round."""
    (found,) = (term for term in terms(seen.fits[location].loss) if isinstance(term, PrototypeCrossEntropy))
    return found


def on_prototypes(model: Weights, term: PrototypeCrossEntropy) -> Tensor:
    """Return the cross-entropy of the first four."""
    return cross_entropy(linear(term.features[:4], model[WEIGHT], model[BIAS]) / 0.1, term.labels[:4])


def test_fedpass_by_formula() -> None:
    simulation, seen, old = second_task(FedPASS(scale=0.5))
    assert old[WEIGHT].shape == (8, 8), "four rows for each of two classes"
    given, model = seen.fits[1, 2, "1"], seen.results[1, 2, "1"].model
    simulation.set_task(1)
    value, images, labels = loss_of(simulation, given, model)
    images, labels = turned(images, labels)
    torch.testing.assert_close(value, 0.5 * cross_entropy(logits(simulation, model, images) / 0.1, labels))
    simulation.set_task(2)
    given, model = seen.fits[2, 2, "1"], seen.results[2, 2, "1"].model
    value, images, labels = loss_of(simulation, given, model)
    images, labels = turned(images, labels)
    expected = cross_entropy(logits(simulation, model, images) / 0.1, labels)
    expected = expected + 10 * distance(simulation, model, old, images)
    expected = expected + 10 * on_prototypes(model, sampled(seen, 2, 2, "1"))
    torch.testing.assert_close(value, 0.5 * expected)


def test_prototypes_are_means_under_the_last_global_model() -> None:
    simulation, seen, old = second_task(FedPASS())
    first = simulation.federation.for_task(1)
    for client in "0123":
        data = first.data(client)
        known: Prototypes = simulation.client_states[client].prototypes
        features = simulation.context.runner.features(old, simulation.context.normalise(data["input"]))
        held = sorted(set(data["label"].tolist()))
        assert known.classes.tolist() == [*held, 2] if simulation.federation.num_examples(client) else held
        for location, c in enumerate(held):
            torch.testing.assert_close(known.means[location], features[data["label"] == c].mean(0))
        variances = [features[data["label"] == c].var(0).mean() for c in held if (data["label"] == c).sum() > 1]
        if variances:
            assert known.radius == pytest.approx(float(torch.stack(variances).mean().sqrt())), "that of the first task"
            assert not torch.equal(sampled(seen, 2, 1, client).features, sampled(seen, 2, 2, client).features), "anew"
        term = sampled(seen, 2, 1, client)
        assert set(term.labels.tolist()) <= {4 * c for c in held}, "the rows of unturned classes that it had"
        assert len(term.labels) == simulation.federation.num_examples(client)


def test_a_client_that_saw_no_old_class_learns_without_prototypes() -> None:
    stream = tiny.stream((2, 1), clients=4, absent=1)
    simulation = tiny.simulation_with_tasks(FedPASS(), stream, cohort_size=4)
    seen = RecordedJobs(simulation)
    (absent,) = (client for client in "0123" if not simulation.federation.num_examples(client))
    tiny.run_rounds(simulation)
    assert simulation.federation.num_examples(absent), "it has something to learn in the second task"
    assert not any(isinstance(term, PrototypeCrossEntropy) for term in terms(seen.fits[2, 1, absent].loss))
    assert simulation.client_states[absent].prototypes.classes.tolist() == [2]


def test_what_is_evaluated_is_the_first_row_of_each_class() -> None:
    simulation = tiny.simulation_with_tasks(FedPASS(), TWO_ONE, cohort_size=4, evaluate_local_models=True)
    records = tiny.run_rounds(simulation)
    test = simulation.federation.dataset.test
    output = logits(simulation, simulation.server.model, simulation.context.normalise(test["input"]))
    assert output.shape == (len(test["label"]), 12)
    hits = output[:, [0, 4, 8]].argmax(1) == test["label"]
    assert sum(records[-1]["correct"]) == int(hits.sum())
    assert len(records[-1]["local_models"][0]["correct"]) == 3
    assert simulation.evaluate(simulation.server.model).correct == records[-1]["correct"]


def test_fedskf_with_pass_by_formula() -> None:
    simulation, seen, old = second_task(FedSKF(level="pass", scale=0.5))
    own = seen.results[1, 2, "1"].model
    given, model = seen.fits[2, 2, "1"], seen.results[2, 2, "1"].model
    value, images, labels = loss_of(simulation, given, model)
    images, labels = turned(images, labels)
    student, local = logits(simulation, model, images), logits(simulation, own, images)
    truth = torch.nn.functional.one_hot(labels, 12).float()
    tsd = binary_cross_entropy_with_logits(student, torch.cat((local.sigmoid(), truth[:, 8:]), 1))
    expected = cross_entropy(student / 0.1, labels) + 10 * distance(simulation, model, own, images)
    expected = 0.5 * (expected + 10 * on_prototypes(model, sampled(seen, 2, 2, "1")))
    expected = (
        expected + 3 * (distilled(student, local, 8) + tsd) + distilled(student, logits(simulation, old, images), 8)
    )
    pull = sum(
        (model[n] - given.model[n]).square().sum() for n in classifier_tensors(model)
    )  # synchronised in this round
    torch.testing.assert_close(value, expected + 2 * pull)
    data = simulation.federation.for_task(1).data("1")
    features = simulation.context.runner.features(own, simulation.context.normalise(data["input"]))
    known = simulation.client_states["1"].prototypes
    torch.testing.assert_close(known.means[0], features[data["label"] == known.classes[0]].mean(0))


def test_the_first_task_of_fedskf_with_pass_is_fedpasss() -> None:
    models = []
    for method in (FedPASS(), FedSKF(level="pass", pit="off", sync=False)):
        simulation = tiny.simulation_with_tasks(method, TWO_ONE, cohort_size=4)
        tiny.run_rounds(simulation, 2)
        models.append(simulation.server.model)
    assert tiny.equal(*models)
