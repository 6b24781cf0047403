"""Models of a round that lie in a file: the same results, for every method and rule, and memory that does not grow."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from fedkeep.aggregation import robust
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.scaffold import SCAFFOLD
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.errors import RunError
from fedkeep.interface import Algorithm, Fit, algorithms
from fedkeep.interface.codec import encode
from fedkeep.interface.privacy import Privacy
from fedkeep.models.weights import find_mismatch, mean
from fedkeep.models.weights_file import StoredWeights, WeightsFile, part_of
from fedkeep.simulation import reply_store
from fedkeep.simulation.defense import Defense
from fedkeep.simulation.reply_store import ReplyStore
from fedkeep.simulation.simulation import Simulation

METHODS = [
    pytest.param(tiny.configured(cls), id=name, marks=() if name in tiny.FAMILIES else pytest.mark.slow)
    for name, cls in algorithms().items()
    if cls.__module__.startswith("fedkeep.")
]


def model(seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(5, 3, generator=rng),
        "half": torch.randn(2, generator=rng).bfloat16(),
        "none": torch.zeros(0, 4),
        "count": torch.tensor(seed),
        "yes": torch.tensor([True, False]),
    }


def both(method: Algorithm[Any, Any], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[Simulation]:
    """Run a method with replies in memory, and with all of them in the file."""
    ran = []
    for room in (reply_store.IN_MEMORY, 0):
        monkeypatch.setattr(reply_store, "IN_MEMORY", room)
        simulation = tiny.simulation(method, **{"training": tiny.SHORT, "rounds": 2} | settings)
        simulation.records = tiny.run_rounds(simulation)  # type: ignore[attr-defined]
        ran.append(simulation)
    return ran


def assert_equal(one: Any, other: Any) -> None:
    assert one.records == other.records
    assert tiny.equal(one.server.model, other.server.model)
    assert encode(one.server.state) == encode(other.server.state)
    assert {c: encode(s) for c, s in one.client_states.items()} == {
        c: encode(s) for c, s in other.client_states.items()
    }


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_same_bits(method: Algorithm[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_equal(*both(method, monkeypatch))


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "norm_clipping", "krum", "multi_krum"])
@pytest.mark.parametrize("few", [False, True], ids=["at once", "in parts"])
def test_every_rule_gives_the_same_bits(rule: Any, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if few:  # elements of all models at a time
        monkeypatch.setattr(robust, "MOST_ELEMENTS", 35)
    for method in (FedAvg(), SCAFFOLD()):
        assert_equal(*both(method, monkeypatch, cohort_size=5, rounds=1, defense=Defense(robust_aggregation=rule)))


def test_the_mean_with_noise_and_checks_of_losses_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = Privacy(client_noise_multiplier=0.1, max_update_norm=0.5)
    pytest.importorskip("dp_accounting")
    assert_equal(*both(FedAvg(), monkeypatch, privacy=noise))
    assert_equal(*both(FedAvg(), monkeypatch, defense=Defense(loss_check="clients")))


def test_the_mean_of_a_round_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = both(FedSeq(), monkeypatch, evaluation_models=("last", "round", "moving"))
    assert_equal(one, other)
    assert tiny.equal(one.round_average, other.round_average)


def test_a_rule_in_parts_is_the_rule() -> None:
    models = [{"w": torch.randn(7, 5, generator=torch.Generator().manual_seed(i))} for i in range(6)]
    whole = robust.merge(models, lambda tensors: robust.trimmed_mean(tensors, 1))["w"]
    assert torch.equal(whole, robust.trimmed_mean([one["w"] for one in models], 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(robust, "MOST_ELEMENTS", 6 * 4)
        assert torch.equal(robust.merge(models, lambda tensors: robust.trimmed_mean(tensors, 1))["w"], whole)


def test_a_stored_model_is_the_model() -> None:
    file, first, second = WeightsFile(), model(1), model(2)
    stored = file.put(first), file.put(second)
    for given, kept in zip((first, second), stored, strict=True):
        assert isinstance(kept, Mapping)
        assert list(kept) == list(given)
        assert all(torch.equal(kept[name], given[name]) and kept[name].dtype == given[name].dtype for name in given)
        assert find_mismatch(kept, given) is None
        assert torch.equal(part_of(kept, "w", 4, 9), given["w"].flatten()[4:9])
        assert torch.equal(part_of(kept, "w", 12, 99), given["w"].flatten()[12:])
    assert tiny.equal(mean(stored, [1.0, 3.0]), mean([first, second], [1.0, 3.0]))


def test_the_space_of_a_model_is_used_again() -> None:
    file = WeightsFile()
    first, second = file.put(model(1)), file.put(model(2))
    length = file._end
    del first
    gc.collect()
    third = file.put(model(3))
    assert file._end == length
    assert tiny.equal(dict(second), model(2))
    assert tiny.equal(dict(third), model(3))
    del second, third
    gc.collect()
    assert file._end == 0
    assert file._file.seek(0, 2) == 0, "an empty file takes no space"


def test_only_what_finds_no_room_is_stored() -> None:
    store = ReplyStore(WeightsFile(), in_memory=2 * 40)
    kept = [store.keep(Fit({"w": torch.zeros(4)}, 1, 1, 0.5)) for _ in range(3)]  # each of 16 + 3 * 8 bytes
    assert [isinstance(fit.model, StoredWeights) for fit in kept] == [False, False, True]
    assert store.keep("text" * 100) == "text" * 100, "there is nothing to be stored in it"


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    file = WeightsFile()
    file.put(model(1))

    def full(content: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file, "_file", type("Full", (), {"seek": lambda *_: 0, "write": lambda self, c: full(c)})())
    with pytest.raises(RunError, match=r"No space left on device\. Set TMPDIR"):
        file.put(model(2))
