"""What every method must keep, whatever it does. A new method is tested here without a line of its own.

Subclass `Conformance` with a fixture or parameter ``method`` that gives the method, configured.
"""

from __future__ import annotations

import functools
import gc
import json
import shutil
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_origin

import pytest
import tiny
import torch
from torch import Tensor, nn

from fedkeep._utils.type_hints import annotations_of
from fedkeep.errors import ConfigError, DataError
from fedkeep.interface import Algorithm, Cohort, Fit, Server
from fedkeep.interface.algorithm import client_steps
from fedkeep.interface.codec import encode
from fedkeep.models import Network, Weights
from fedkeep.models.heads import BIAS, WEIGHT
from fedkeep.simulation.callbacks import Callback, OnRoundEnd
from fedkeep.simulation.checkpoint import Checkpoint
from fedkeep.simulation.rounds import LocalCohort, RoundState
from fedkeep.simulation.simulation import Simulation
from fedkeep.simulation.trial import run_trial
from fedkeep.training.local_training import BatchStream
from fedkeep.training.party import LocalClient, LocalParty

Method = Algorithm[Any, Any]
ROUNDS = 4
FAULTS = {"nan": "finite", "inf": "finite", "loss": "finite", "shape": "shape", "name": "lacks", "type": "float64"}
"""What may be wrong with a reply, and a word of its refusal."""
GLOBAL_SEED = 11
"""Of the generators that nobody may read, in undisturbed runs."""


class Killed(BaseException):
    """Stands for whatever stops a process."""


class Conformance:
    """The suite; each test takes ``method``, a configured `Algorithm`."""

    # Same in, same out

    def test_two_runs_are_equal_bit_for_bit(self, method: Method) -> None:
        one, two = undisturbed(method), tiny.engine(method)
        assert one.records == tiny.played(two)
        assert tiny.equal(one.model, two.server.model)
        assert encode(one.server) == encode(two.server.state)
        assert not tiny.equal(one.model, two.context.runner.initial), "nothing was learned"

    def test_another_seed_differs(self, method: Method) -> None:
        one, two = undisturbed(method), tiny.engine(method, seed=1)
        assert one.records != tiny.played(two)
        assert not tiny.equal(one.model, two.server.model)

    def test_the_method_changes_no_cohort_initial_weight_example_or_batch_order(self, method: Method) -> None:
        own, reference = seen(method), seen_in_plain_training()
        assert own["cohorts"] == reference["cohorts"]
        first = slice(None, None, method.rows_per_class)  # where a class has several rows, its first is everybody's
        begins = {name: t[first] if name in (WEIGHT, BIAS) else t for name, t in own["initial"].items()}
        assert tiny.equal(begins, reference["initial"])
        assert {client: own["labels"][client] for client in reference["labels"]} == reference["labels"]
        assert own["orders"]
        if "generator" in method.needs:
            return  # made images stand between the client's own
        assert own["orders"].keys() <= reference["orders"].keys()
        for place, orders in own["orders"].items():
            # A method may train more than once in a round; its first training sees what every other method sees.
            assert orders[: len(reference["orders"][place])] == reference["orders"][place], place

    def test_results_do_not_depend_on_how_often_is_evaluated(self, method: Method) -> None:
        often, seldom = undisturbed(method), tiny.engine(method, evaluate_every=3)
        assert all("correct" in record for record in often.records)
        assert unevaluated(often.records) == unevaluated(tiny.played(seldom))
        assert tiny.equal(often.model, seldom.server.model)

    def test_results_do_not_depend_on_whether_visits_are_evaluated(self, method: Method) -> None:
        without, watched = undisturbed(method), tiny.engine(method, evaluate_local_models=True)
        records = tiny.played(watched)
        visits = [record.pop("visits") for record in records]
        assert without.records == records
        assert tiny.equal(without.model, watched.server.model)
        assert all(
            visit["client"] in record["cohort"] for record, each in zip(records, visits, strict=True) for visit in each
        )
        assert any(visits)

    def test_results_do_not_depend_on_the_codec(self, method: Method) -> None:
        reference, coded = undisturbed(method), tiny.engine(method, through_codec=True)
        assert reference.records == tiny.played(coded)
        assert tiny.equal(reference.model, coded.server.model)
        assert encode(reference.server) == encode(coded.server.state)

    def test_results_do_not_depend_on_the_order_of_work(self, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = undisturbed(method, cohort=6, training=tiny.SHORT)
        work_backwards(monkeypatch)
        backward = tiny.engine(method, cohort=6, training=tiny.SHORT)
        assert tiny.played(backward) == forward.records
        assert tiny.equal(forward.model, backward.server.model)
        assert encode(forward.server) == encode(backward.server.state)

    def test_clients_trained_as_one_stacked_model_learn_the_same(self, method: Method) -> None:
        looped = undisturbed(method, cohort=6, training=tiny.SHORT)
        stacked = tiny.engine(method, cohort=6, training=tiny.SHORT, stack=4)
        for one, other in zip(looped.records, tiny.played(stacked), strict=True):
            assert [one[name] for name in ("cohort", "lost", "examples")] == [
                other[name] for name in ("cohort", "lost", "examples")
            ]
            assert one["loss"] == about(other["loss"])
        for name, tensor in looped.model.items():
            torch.testing.assert_close(stacked.server.model[name], tensor, rtol=1e-3, atol=1e-5)

    def test_global_randomness_is_neither_read_nor_moved(self, method: Method) -> None:
        first = undisturbed(method)
        torch.manual_seed(GLOBAL_SEED + 1)
        before = torch.get_rng_state()
        assert tiny.played(tiny.engine(method)) == first.records
        assert torch.equal(torch.get_rng_state(), before)

    def test_the_record_is_strict_json(self, method: Method) -> None:
        for record in undisturbed(method).records:
            assert json.loads(json.dumps(record, allow_nan=False)) == record

    # Kill and resume

    def test_stopped_after_every_round_it_resumes_to_the_same_bytes(
        self, method: Method, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        whole, cut = played_whole(method, tmp_path_factory) / "whole", tmp_path / "cut"
        lines = (whole / "rounds.jsonl").read_bytes().splitlines()
        for at in range(1, ROUNDS + 1):
            with pytest.raises(Killed):
                run_trial(tiny.engine(method, training=tiny.SHORT), cut, [raise_at(at)])
            assert (cut / "rounds.jsonl").read_bytes().splitlines() == lines[:at]
            assert not (cut / "result.json").exists()
        run_trial(tiny.engine(method, training=tiny.SHORT), cut)
        for name in ("rounds.jsonl", "model.safetensors", "result.json"):
            assert (cut / name).read_bytes() == (whole / name).read_bytes(), name

    def test_killed_behind_its_last_checkpoint_it_replays_the_rounds(
        self, method: Method, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        # From the same checkpoint, whenever it was killed: only the lines that are cut off are others.
        resumes_behind_its_checkpoint(method, ROUNDS - 1, tmp_path, tmp_path_factory)

    def test_a_checkpoint_restores_every_state(self, method: Method, tmp_path: Path) -> None:
        first = tiny.engine(method, training=tiny.SHORT)
        tiny.played(first, 2)
        Checkpoint(tmp_path).save(first, {"rounds": 5})
        second = tiny.engine(method, training=tiny.SHORT)
        assert Checkpoint(tmp_path).restore(second) == {"rounds": 5}
        assert condition(second) == condition(first)
        assert tiny.played(second) == tiny.played(first)

    # What may go wrong

    def test_a_client_may_be_lost_in_each_step(self, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = undisturbed(method).calls
        for step in {step for _, _, step in calls}:
            made = [(number, client) for number, client, name in calls if name == step]
            victims = dict(reversed(made))  # the first of each round
            for odd in {number % 2 for number in victims}:  # whole rounds between
                losses = {number: victim for number, victim in victims.items() if number % 2 == odd}
                engine = tiny.engine(method, fault_injector=failing(losses, step), training=tiny.SHORT)
                records = tiny.played(engine)
                assert [r["lost"] for r in records] == [
                    {losses[r["round"]]: "lost it"} if r["round"] in losses else {} for r in records
                ]
                assert not any(record["undone"] for record in records)
                assert tiny.finite(engine.server.model)

    @pytest.mark.parametrize("faults", [("nan", "shape", "name"), ("inf", "type", "loss")], ids=",".join)
    def test_bad_models_are_refused_by_name_and_the_round_goes_on(
        self, method: Method, faults: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not replies_with(method, Fit):
            faults = tuple(fault for fault in faults if fault not in ("loss", "name"))  # no client replies with a model
        engine = tiny.engine(method, cohort=6, rounds=3, training=tiny.SHORT)
        bad = dict(zip("435", faults, strict=False))
        break_replies(method, monkeypatch, 2, bad)
        records = tiny.played(engine)
        assert [set(record["lost"]) for record in records] == [set(), set(bad), set()]
        for client, fault in bad.items():
            assert FAULTS[fault] in records[1]["lost"][client]
        assert not records[1]["undone"]
        assert tiny.finite(engine.server.model)

    def test_a_lost_client_leaves_no_trace_but_its_absence(
        self, method: Method, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A client whose training diverged changes nothing anywhere, exactly as one that never came back."""
        lost = tiny.engine(method, fault_injector=failing({2: "4"}, last_fit(method)), cohort=6, training=tiny.SHORT)
        tiny.played(lost)
        diverge(monkeypatch, (2, "4"))
        refused = tiny.engine(method, cohort=6, training=tiny.SHORT)
        records = tiny.played(refused)
        assert [list(record["lost"]) for record in records] == [[], ["4"], [], []]
        assert condition(lost) == condition(refused)

    def test_a_round_with_too_few_clients_is_undone(self, method: Method) -> None:
        engine = tiny.engine(
            method,
            min_clients=3,
            fault_injector=lambda number, client, step: "gone" if number == 2 else None,
            training=tiny.SHORT,
        )
        tiny.played(engine, 1)
        before = condition(engine)
        (record,) = tiny.played(engine, 1)
        assert record["undone"] is True
        assert record["lost"]
        assert condition(engine) == before | {"finished": 2}
        assert [r["undone"] for r in tiny.played(engine)] == [False, False]

    def test_an_undone_round_late_in_its_work_is_undone_too(self, method: Method) -> None:
        last = tiny.engine(method).sample_cohort(2)[-1]
        engine = tiny.engine(
            method, min_clients=3, fault_injector=failing({2: last}, last_step(method)), training=tiny.SHORT
        )
        tiny.played(engine, 1)
        before = condition(engine)
        (record,) = tiny.played(engine, 1)
        assert record["undone"]
        assert condition(engine) == before | {"finished": 2}

    def test_an_exception_in_a_step_stops_the_run_and_leaves_the_last_round(
        self, method: Method, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = undisturbed(method, training=tiny.SHORT)
        calls = whole.calls
        asked = {step for _, _, step in calls}
        for step, function in client_steps(type(method)).items():
            if step not in asked:
                continue  # with other options only
            number, victim = next((number, client) for number, client, name in reversed(calls) if name == step)
            engine = tiny.engine(method, training=tiny.SHORT)
            records = tiny.played(engine, number - 1)
            before = condition(engine)
            with monkeypatch.context() as patch:
                patch.setattr(type(method), step, raising(function, number, victim))
                with pytest.raises(ZeroDivisionError) as caught:
                    engine.run_round()
            (note,) = caught.value.__notes__
            assert step in note
            assert f"client {victim}," in note
            assert f"round {number}" in note
            assert condition(engine) == before
            assert records + tiny.played(engine) == whole.records

    def test_only_steps_can_be_asked(self, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
        def round(self: Method, server: Server[Any], cohort: Cohort) -> None:
            cohort.ask(self.name)  # type: ignore[arg-type]

        monkeypatch.setattr(type(method), "round", round)
        with pytest.raises(ConfigError, match=r"name is not a client step.*@on_client"):
            tiny.engine(method).run_round()

    # Odd federations

    def test_a_cohort_of_one(self, method: Method) -> None:
        settled(tiny.engine(method, cohort=1, rounds=8, training=tiny.SHORT))

    def test_more_rounds_than_clients(self, method: Method) -> None:
        settled(tiny.engine(method, federation=tiny.federation((8, 9)), cohort=1, rounds=7, training=tiny.SHORT))

    def test_a_cohort_of_everybody(self, method: Method) -> None:
        everybody = undisturbed(method, cohort=6, training=tiny.SHORT)
        check_settled(everybody.records, everybody.model)

    def test_a_client_with_one_example(self, method: Method) -> None:
        settled(tiny.engine(method, federation=tiny.federation((1, 6, 1)), cohort=3))

    def test_clients_with_one_class_each(self, method: Method) -> None:
        data = tiny.dataset(30)
        clients = [torch.nonzero(data.train["label"] == c).flatten().tolist() for c in range(tiny.CLASSES)]
        settled(tiny.engine(method, federation=tiny.by_hand(data, clients), cohort=3))

    @pytest.mark.parametrize("through_codec", [False, True])
    def test_a_client_without_examples(self, method: Method, through_codec: bool) -> None:
        federation = tiny.federation((6, 0, 9, 0))
        settled(
            tiny.engine(
                method,
                federation=federation,
                cohort=3,
                evaluate_local_models=True,
                through_codec=through_codec,
                rounds=6,
                training=tiny.SHORT,
            )
        )

    def test_batch_norms_statistics_stay_between_those_that_clients_left(
        self, method: Method, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are averaged, however a method moves the parameters: carried further, a variance may become negative."""
        fits: list[Fit] = []
        fit = LocalParty.fit
        monkeypatch.setattr(LocalParty, "fit", lambda *args, **kwargs: fits.append(fit(*args, **kwargs)) or fits[-1])
        clients = tiny.federation((9, 1, 6, 0, 7, 23))
        # One round more than is played: at its end a task may leave the model of an earlier round.
        engine = tiny.engine(
            method, factory=normed, federation=clients, cohort=4, rounds=ROUNDS + 1, training=tiny.SHORT
        )
        for _ in range(ROUNDS):
            fits.clear()
            settled(engine, 1)
            after = engine.server.model
            assert any(fit.num_steps for fit in fits)
            for name in (name for name in after if "running" in name):
                left = torch.stack([fit.model[name] for fit in fits])
                assert bool((after[name] >= left.amin(0) - 1e-6).all()), name
                assert bool((after[name] <= left.amax(0) + 1e-6).all()), name
            counters = [fit.model["body.norm.num_batches_tracked"] for fit in fits]
            assert after["body.norm.num_batches_tracked"] in counters
            assert after["body.norm.num_batches_tracked"].dtype == torch.int64

    def test_nobody_with_examples(self, method: Method) -> None:
        federation = tiny.by_hand(tiny.dataset(9), [[], []])
        engine = tiny.engine(method, federation=federation, cohort=2)
        if "generator" in method.needs:  # what nobody has cannot be described
            with pytest.raises(DataError, match="no client holds an example of"):
                tiny.played(engine)
            return
        records = tiny.played(engine)
        assert [record["loss"] for record in records] == [None] * ROUNDS
        assert tiny.finite(engine.server.model)

    def test_a_dropout_rate(self, method: Method) -> None:
        engine = tiny.engine(method, cohort=4, rounds=8, dropout=0.4, training=tiny.SHORT)
        records = tiny.played(engine)
        lost = sum(len(record["lost"]) for record in records)
        assert 4 <= lost <= 24  # 12.8 expected of 32
        assert tiny.finite(engine.server.model)
        again = tiny.engine(method, cohort=4, rounds=8, dropout=0.4, training=tiny.SHORT)
        assert tiny.played(again, 4) == records[:4]

    def test_memory_is_flat_over_30_rounds(self, method: Method) -> None:
        """Living tensors and objects after 30 rounds are those after 10, within a quarter of a model and 10 objects.

        After the 31st the task ends, of which a method may keep something once.
        """
        if method != tiny.configured(type(method)):
            pytest.skip("as with the method's own options")
        clients = tiny.federation((4, 4, 5))  # one step each: what leaks, leaks once a visit
        gc.freeze()  # what was there before is left out: to count it takes longer than the rounds
        try:
            engine = tiny.engine(
                method, cohort=2, rounds=31, evaluate_every=10, federation=clients, training=tiny.SHORT
            )
            tiny.played(engine, 10)
            before = living()
            tiny.played(engine, 20)
            after = living()
        finally:
            gc.unfreeze()
        model = sum(tensor.nbytes for tensor in engine.server.model.values())
        assert after[0] - before[0] <= model / 4
        assert after[1] - before[1] <= 10


@dataclass(frozen=True)
class Undisturbed:
    """What a run left that nothing disturbed: records, calls as (round, client, step), the model, and all states."""

    records: list[dict[str, Any]]
    calls: list[tuple[int, str, str]]
    model: Weights
    server: Any
    clients: dict[str, Any]


@functools.cache
def undisturbed(method: Method, build: Callable[..., Simulation] = tiny.engine, **changes: Any) -> Undisturbed:
    """Play a method, once for all tests of it; to be called before anything is patched."""
    calls: list[tuple[int, str, str]] = []

    def note(number: int, client: str, step: str) -> None:
        calls.append((number, client, step))

    engine = build(method, fault_injector=note, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(GLOBAL_SEED)
        records = tiny.played(engine)
    assert {step for _, _, step in calls} <= set(client_steps(type(method)))
    return Undisturbed(records, calls, engine.server.model, engine.server.state, engine.client_states)


@functools.cache
def seen_in_plain_training() -> dict[str, Any]:
    """Return what clients see of a method that trains everybody, in cohort order: what all methods have in common."""
    from fedkeep.algorithms.sequential.fedseq import FedSeq

    return seen(FedSeq())


def seen(method: Method) -> dict[str, Any]:
    """Play a method and return what its clients saw."""
    orders: dict[tuple[int, str], list[list[int]]] = defaultdict(list)
    labels: dict[str, list[int]] = {}
    fitting: list[tuple[int, str]] = []
    fit, batches, init = LocalParty.fit, BatchStream.batches, LocalClient.__init__

    def spy_fit(self: LocalParty, *args: Any, **kwargs: Any) -> Fit:
        fitting.append((self.round, self.name))
        try:
            return fit(self, *args, **kwargs)
        finally:
            fitting.pop()

    def spy_batches(self: BatchStream, *args: Any) -> Any:
        drawn = list(batches(self, *args))
        if fitting and fitting[-1][1]:
            orders[fitting[-1]].append([row for batch in drawn for row in batch.index.tolist()])
        return drawn

    def spy_init(self: LocalClient, context: Any, name: str, data: Any, *args: Any, **kwargs: Any) -> None:
        labels[name] = data["label"].tolist()
        init(self, context, name, data, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalParty, "fit", spy_fit)
        patch.setattr(BatchStream, "batches", spy_batches)
        patch.setattr(LocalClient, "__init__", spy_init)
        engine = tiny.engine(method)
        initial = engine.server.model
        cohorts = [record["cohort"] for record in tiny.played(engine)]
    return {"cohorts": cohorts, "initial": initial, "labels": labels, "orders": dict(orders)}


def work_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine serve a cohort last first, and do at once what it would put off."""

    def ask(self: LocalCohort, step: Any, *args: Any, **kwargs: Any) -> Any:
        backwards = LocalCohort(self.round, list(reversed(list(self.clients))))
        replies = original_ask(backwards, step, *args, **kwargs)
        return {client: replies[client] for client in self.clients if client in replies}

    def start(self: RoundState, tasks: Any) -> None:
        original_start(self, tasks)
        self.finish()

    original_ask, original_start = LocalCohort.ask, RoundState.start
    monkeypatch.setattr(LocalCohort, "ask", ask)
    monkeypatch.setattr(RoundState, "start", start)


def last_step(method: Method) -> str:
    """Return the step that a round asks last; not of a task's first or last round, which ask everybody too."""
    return [step for number, _, step in undisturbed(method).calls if number == 2][-1]


def replies_with(method: Method, kind: type[Any]) -> set[str]:
    """Return the names of a method's steps that reply with something of a kind."""
    replies = {name: annotations_of(step)["return"] for name, step in client_steps(type(method)).items()}
    return {name for name, reply in replies.items() if issubclass(get_origin(reply) or reply, kind)}


def last_fit(method: Method) -> str:
    """Return the step that a round asks last of those that reply with a fit; if none does, with anything at all."""
    fits = replies_with(method, Fit) or replies_with(method, object) - replies_with(method, type(None))
    return [step for number, _, step in undisturbed(method).calls if number == 2 and step in fits][-1]


def failing(victims: Mapping[int, str], step: str) -> Callable[[int, str, str], str | None]:
    """Let a step fail for the victim of each round that has one."""
    return lambda number, client, name: "lost it" if (victims.get(number), step) == (client, name) else None


def raising(function: Callable[..., Any], number: int, victim: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def step(self: Method, client: Any, *args: Any, **kwargs: Any) -> Any:
        if (client.round, client.id) == (number, victim):
            raise ZeroDivisionError("on purpose")
        return function(self, client, *args, **kwargs)

    return step


def played_whole(method: Method, factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run played to its end, ``whole``, and copies as a kill in each round would have left it.

    Played once for all tests of a method, with one checkpoint, after round 1.
    """
    if repr(method) not in _whole:
        folder = factory.mktemp("whole")

        def copy(state: Any, result: Any) -> None:
            shutil.copytree(folder / "whole", folder / f"killed-in-{result.record['round']}")

        run_trial(
            tiny.engine(method, training=tiny.SHORT), folder / "whole", [OnRoundEnd(copy)], checkpoint_share=1e-12
        )
        _whole[repr(method)] = folder
    return _whole[repr(method)]


_whole: dict[str, Path] = {}


def resumes_behind_its_checkpoint(method: Method, at: int, folder: Path, factory: pytest.TempPathFactory) -> None:
    """Check that a run killed in a round, with a checkpoint of the first, ends as one that was not."""
    played = played_whole(method, factory)
    whole, cut = played / "whole", shutil.copytree(played / f"killed-in-{at}", folder / "cut")
    manifest = json.loads((cut / "checkpoint" / "manifest.json").read_text())
    assert manifest["round"] == 1
    assert len((cut / "rounds.jsonl").read_bytes().splitlines()) == at
    run_trial(tiny.engine(method, training=tiny.SHORT), cut)
    for name in ("rounds.jsonl", "model.safetensors"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name


def raise_at(number: int) -> Callback:
    def kill(state: Any, result: Any) -> None:
        if result.record["round"] == number:
            raise Killed

    return OnRoundEnd(kill)


def break_replies(method: Method, monkeypatch: pytest.MonkeyPatch, number: int, faults: Mapping[str, str]) -> None:
    """Let whatever some clients reply in a round carry a fault each; the clients themselves know nothing of it."""
    for name, function in client_steps(type(method)).items():
        monkeypatch.setattr(type(method), name, broken(function, number, faults))


def broken(function: Callable[..., Any], number: int, faults: Mapping[str, str]) -> Callable[..., Any]:
    """Return a step whose fit carries a fault; if the method knows no fits, the model or tensor of another reply."""

    @functools.wraps(function)
    def step(self: Method, client: Any, *args: Any, **kwargs: Any) -> Any:
        reply = function(self, client, *args, **kwargs)
        if client.round != number or client.id not in faults or not is_dataclass(reply):
            return reply
        fault = faults[client.id]
        if not isinstance(reply, Fit) and replies_with(self, Fit):
            return reply
        if not hasattr(reply, "model"):
            (name,) = (field.name for field in fields(reply) if isinstance(getattr(reply, field.name), Tensor))
            return replace(reply, **{name: faulty(getattr(reply, name), fault)})  # type: ignore[type-var]
        if fault == "loss":
            return replace(reply, loss=float("nan"))
        model = dict(reply.model)
        name, tensor = list(model.items())[-1]
        if fault == "name":
            del model[name]
        else:
            model[name] = faulty(tensor, fault)
        return replace(reply, model=model)

    return step


def faulty(tensor: Tensor, fault: str) -> Tensor:
    faults: dict[str, Callable[[], Tensor]] = {
        "nan": lambda: torch.full_like(tensor, float("nan")),
        "inf": lambda: torch.cat([torch.full_like(tensor[:1], float("inf")), tensor[1:]]),
        "shape": lambda: torch.cat([tensor, tensor]),
        "type": lambda: tensor.double(),
    }
    return faults[fault]()


def diverge(monkeypatch: pytest.MonkeyPatch, place: tuple[int, str]) -> None:
    """Let the training of (round, client) end in weights that are no numbers, before its step computes with them."""
    fit = LocalParty.fit

    def diverged(self: LocalParty, *args: Any, **kwargs: Any) -> Fit:
        result = fit(self, *args, **kwargs)
        if (self.round, self.name) != place:
            return result
        return replace(result, model={name: torch.full_like(t, float("nan")) for name, t in result.model.items()})

    monkeypatch.setattr(LocalParty, "fit", diverged)


def condition(engine: Simulation) -> dict[str, Any]:
    """Return all that a later round can depend on, comparable."""
    empty = encode(engine.client_state())
    states = {client: encode(state) for client, state in engine.client_states.items()}
    return {
        "finished": engine.finished,
        "model": encode(engine.server.model),
        "server": encode(engine.server.state),
        "clients": {client: state for client, state in sorted(states.items()) if state != empty},
    }


def normed() -> Network:
    """Return a network with batch norm."""
    layers = OrderedDict(flatten=nn.Flatten(), full=nn.Linear(16, 8), norm=nn.BatchNorm1d(8), relu=nn.ReLU())
    return Network(nn.Sequential(layers), 8, tiny.CLASSES)


def settled(engine: Simulation, rounds: int | None = None) -> None:
    """Play to the end, or some rounds, and check what is left."""
    check_settled(tiny.played(engine, rounds), engine.server.model)


def check_settled(records: list[dict[str, Any]], model: Weights) -> None:
    """Check that nothing is lost or undone, and that the model is finite."""
    for record in records:
        assert record["lost"] == {}
        assert not record["undone"]
    assert tiny.finite(model)


def unevaluated(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if name not in ("correct", "test_loss")} for record in records
    ]


def about(loss: float | None) -> Any:
    """Return what is equal to a loss up to rounding; there is none where no model comes back."""
    return None if loss is None else pytest.approx(loss, rel=1e-4)


def living() -> tuple[int, int]:
    """Return the bytes of all living tensors, and the number of all living objects, of those that are not frozen."""
    gc.collect()
    objects = gc.get_objects()
    return sum(o.nbytes for o in objects if type(o) is Tensor), len(objects)
