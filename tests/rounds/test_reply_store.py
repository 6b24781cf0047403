"""Models of a round that lie in a file: the same results, for every method and rule, and memory that does not grow."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedkeep.aggregation import robust
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.scaffold import SCAFFOLD
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.errors import RunError
from fedkeep.interface import Algorithm, Fit, algorithms
from fedkeep.interface.codec import encode
from fedkeep.interface.privacy import Privacy
from fedkeep.models import get_architecture
from fedkeep.models.weights import StoredWeights, WeightsFile, find_mismatch, mean, part_of
from fedkeep.rounds import reply_store
from fedkeep.rounds.reply_store import ReplyStore
from fedkeep.rounds.run_settings import Defense
from fedkeep.trials.simulation import Simulation

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
        monkeypatch.setattr(robust, "MAX_ELEMENTS", 35)
    for method in (FedAvg(), SCAFFOLD()):
        assert_equal(*both(method, monkeypatch, cohort_size=5, rounds=1, defense=Defense(robust_aggregation=rule)))


def test_the_mean_with_noise_and_checks_of_losses_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = Privacy(client_noise_multiplier=0.1, max_update_norm=0.5)
    assert_equal(*both(FedAvg(), monkeypatch, privacy=noise))
    assert_equal(*both(FedAvg(), monkeypatch, defense=Defense(loss_check="server")))


def test_the_mean_of_a_round_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = both(FedSeq(), monkeypatch, evaluation_models=("last", "round", "moving"))
    assert_equal(one, other)
    assert tiny.equal(one.averages["round"], other.averages["round"])


def test_a_rule_in_parts_is_the_rule() -> None:
    models = [{"w": torch.randn(7, 5, generator=torch.Generator().manual_seed(i))} for i in range(6)]
    whole = robust.merge(models, lambda tensors: robust.trimmed_mean(tensors, 1))["w"]
    assert torch.equal(whole, robust.trimmed_mean([one["w"] for one in models], 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(robust, "MAX_ELEMENTS", 6 * 4)
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


class LargestSum(TorchDispatchMode):
    """Finds the largest number of bytes that the tensors have at a time which are made in its block."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and not tensor._is_view():
                storage = tensor.untyped_storage()
                if not any(storage._cdata == one.untyped_storage()._cdata for one in _tensors((args, kwargs))):
                    self.bytes += storage.nbytes()
                    weakref.finalize(tensor, self._forget, storage.nbytes())
        self.largest = max(self.largest, self.bytes)
        return made

    def _forget(self, size: int) -> None:
        self.bytes -= size


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in _tensors(value)]
    return [values] if isinstance(values, Tensor) else []


@pytest.mark.parametrize("averages", [False, True], ids=["last", "averages"])
@pytest.mark.parametrize("method", [FedAvg(), FedSeq()], ids=["FedAvg", "FedSeq"])
def test_a_round_takes_three_models_of_memory_whatever_its_cohort(
    method: Algorithm[Any, Any], averages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And two more where the mean of the round and the moving average are evaluated too."""
    monkeypatch.setattr(reply_store, "IN_MEMORY", 0)
    wide = partial(get_architecture("mlp")(hidden=(100,) * 6).build, tiny.SHAPE, tiny.CLASSES)  # type: ignore[call-arg]
    largest = []
    for cohort in (3, 9):
        settings: dict[str, Any] = {"federation": tiny.federation((4,) * 9), "factory": wide, "training": tiny.SHORT}
        if averages:
            settings["evaluation_models"] = ("last", "round", "moving")
        simulation = tiny.simulation(method, cohort_size=cohort, **settings)
        simulation.callbacks = []
        size = sum(tensor.nbytes for tensor in simulation.server.model.values())
        simulation.run_round()  # the first model is the initial one, which is kept
        with LargestSum() as sum_of_round:
            simulation.run_round()
        largest.append(sum_of_round.largest / size)
    assert largest[1] < 3.1 + 2 * averages  # the images take some too
    assert largest[1] == pytest.approx(largest[0], rel=0.1)


def test_a_disk_without_room_for_the_cohort_is_named_with_the_first_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_store, "IN_MEMORY", 100)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=3000))
    reply = Fit({"w": torch.zeros(250)}, 1, 1, 0.5)  # 1,024 bytes
    assert isinstance(ReplyStore(WeightsFile(), expected=3).keep(reply).model, StoredWeights)
    store = ReplyStore(WeightsFile(), expected=4)
    with pytest.raises(RunError, match=r"take 0\.0 GB in .*, which has 0\.0 GB free\. Set TMPDIR"):
        store.keep(reply)


def test_the_file_is_closed_with_its_owner_though_the_owner_is_in_a_circle() -> None:
    file = WeightsFile()
    file.put(model(1))
    content = file._file
    file.owner = file  # type: ignore[attr-defined]
    del file
    gc.collect()
    assert content.closed


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    file = WeightsFile()
    file.put(model(1))

    def full(content: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file, "_file", type("Full", (), {"seek": lambda *_: 0, "write": lambda self, c: full(c)})())
    with pytest.raises(RunError, match=r"No space left on device\. Set TMPDIR"):
        file.put(model(2))
