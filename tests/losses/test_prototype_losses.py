"""The parts of PASS against their formulas: prototypes and their noise, and both losses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from table_model import EXACT, TableView, data, draw, features, model, noise, settled, value_and_gradients

from fedkeep.losses import FeatureDistance, PrototypeCrossEntropy, Prototypes
from fedkeep.losses.prototypes import extend_prototypes, prototypes

EXAMPLES, WIDTH, CLASSES = 8, 4, 5
STUDENT, TEACHER = (model(EXAMPLES, WIDTH, CLASSES, seed=s) for s in (1, 2))
DATA = data([0, 1, 2, 3, 4, 3, 4, 0])
ROWS = (6, 3, 0, 1, 5)


def test_prototypes_are_means_and_the_radius_is_the_mean_spread() -> None:
    """Class 1: (0, 0), (2, 4): variances 2 and 8, mean 5. Class 4: (1, 1), (1, 1), (1, 4): 0 and 3, mean 1.5."""
    rows = torch.tensor([[0.0, 0], [1, 1], [2, 4], [1, 1], [7, 7], [1, 4]])
    found = prototypes(rows, torch.tensor([1, 4, 1, 4, 2, 4]))
    assert found.classes.tolist() == [1, 2, 4]
    assert found.means.tolist() == [[1, 2], [7, 7], [1, 2]]
    assert found.num_examples.tolist() == [2, 1, 3]
    assert found.radius == pytest.approx(math.sqrt((5 + 1.5) / 2)), "class 2 has one example only"
    assert prototypes(rows[4:5], torch.tensor([2])).radius == 0.0


def test_sampled_features_spread_around_their_class() -> None:
    known = Prototypes(torch.tensor([4, 7, 9]), 100 * noise(3, 50).float(), torch.ones(3, dtype=torch.int64), 0.5)
    found, labels = known.sample(600, torch.Generator().manual_seed(0))
    assert found.shape == (600, 50)
    assert set(labels.tolist()) == {4, 7, 9}
    for location, c in enumerate((4, 7, 9)):
        own = found[labels == c] - known.means[location]
        assert 150 < len(own) < 250
        assert float(own.std()) == pytest.approx(0.5, rel=0.05)
        assert float(own.mean().abs()) < 0.05
    again, same = known.sample(600, torch.Generator().manual_seed(0))
    assert torch.equal(again, found)
    assert torch.equal(same, labels)


def known(classes: list[int], means: list[list[float]], examples: list[int], radius: float) -> Prototypes:
    return Prototypes(torch.tensor(classes), torch.tensor(means), torch.tensor(examples), radius)


def test_newer_classes_are_added_and_the_first_radius_stays() -> None:
    old, new = known([0, 1], [[1.0], [2.0]], [3, 1], 0.5), known([2], [[5.0]], [4], 0.7)
    both = extend_prototypes(old, new)
    assert both is not None
    assert both.classes.tolist() == [0, 1, 2]
    assert both.means.tolist() == [[1], [2], [5]]
    assert both.num_examples.tolist() == [3, 1, 4]
    assert both.radius == 0.5
    assert extend_prototypes(None, new) is new
    assert extend_prototypes(old, None) is old
    assert extend_prototypes(None, None) is None
    nothing_spread = extend_prototypes(replace(old, radius=0.0), new)
    assert nothing_spread is not None
    assert nothing_spread.radius == 0.7, "the first that there is"


def test_the_classifier_sees_prototypes_and_the_features_do_not() -> None:
    given, labels = noise(EXAMPLES, WIDTH, seed=9), torch.arange(EXAMPLES) % CLASSES
    loss, gradients = value_and_gradients(PrototypeCrossEntropy(given, labels), STUDENT, draw(DATA, ROWS))
    expected = 0.0
    for row in ROWS:
        z = (STUDENT["classifier.weight"] @ given[row] + STUDENT["classifier.bias"]).tolist()
        largest = max(z) / 0.1
        expected -= z[int(labels[row])] / 0.1 - largest - math.log(sum(math.exp(v / 0.1 - largest) for v in z))
    assert float(loss) == pytest.approx(expected / len(ROWS), rel=1e-10)
    assert not gradients["table"].any()
    assert gradients["classifier.weight"].any()


def test_a_classifier_without_bias_will_do() -> None:
    plain = {name: tensor for name, tensor in STUDENT.items() if name != "classifier.bias"}
    view = TableView(plain)
    zero = TableView({**STUDENT, "classifier.bias": torch.zeros(CLASSES).double()})
    term = PrototypeCrossEntropy(noise(EXAMPLES, WIDTH), torch.arange(EXAMPLES) % CLASSES)
    batch = draw(DATA, ROWS)
    assert torch.equal(term(view, [batch]), term(zero, [batch]))


@pytest.mark.parametrize("is_settled", [False, True])
def test_the_distance_of_features_is_that_of_the_whole_batch(is_settled: bool) -> None:
    objective = settled(FeatureDistance(TEACHER), DATA) if is_settled else FeatureDistance(TEACHER)
    batch = draw(DATA, ROWS)
    difference = features(STUDENT, batch) - features(TEACHER, batch)
    expected = math.sqrt(sum(v * v for v in difference.flatten().tolist()))
    loss, gradients = value_and_gradients(objective, STUDENT, batch)
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradients["table"][list(ROWS)], difference / expected, **EXACT)
    assert not gradients["classifier.weight"].any()


def test_at_the_teacher_itself_the_distance_has_no_gradient() -> None:
    loss, gradients = value_and_gradients(FeatureDistance(STUDENT), STUDENT, draw(DATA, ROWS))
    assert float(loss) == 0.0
    assert not gradients["table"].any()


def test_settled_it_asks_nobody() -> None:
    objective = settled(FeatureDistance(TEACHER), DATA)
    assert isinstance(objective, FeatureDistance)
    view = TableView(STUDENT)
    objective(view, [draw(DATA, ROWS)])
    assert view.teacher_calls == 0
    assert settled(objective, DATA) is objective
    assert replace(objective).teacher == {}
