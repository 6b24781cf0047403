"""The checks: what a run may depend on, what may go wrong, odd federations, and tasks."""

import functools
import gc
import tempfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedkeep._utils.seeds import temporary_seed
from fedkeep._utils.type_hints import annotations_of
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.interface import Fit
from fedkeep.interface.algorithm import client_steps
from fedkeep.interface.privacy import Privacy
from fedkeep.interface.pytree import replace_tensors, tree_tensors
from fedkeep.models import Network
from fedkeep.models.heads import BIAS, WEIGHT
from fedkeep.privacy.privacy_checks import reason_against_sums
from fedkeep.rounds.messages import StepRequest
from fedkeep.testing import runs
from fedkeep.testing.runs import AnyAlgorithm
from fedkeep.training.party import LocalParty
from fedkeep.trials.simulation import Simulation
from fedkeep.trials.trial import run_trial


def _builds(algorithm: AnyAlgorithm) -> list[Callable[..., Simulation]]:
    """Return what builds simulations, with one task and with several; recipes with auxiliary examples have one."""
    return [runs.simulation] if "auxiliary" in algorithm.needs else [runs.simulation, runs.simulation_with_tasks]


def check_two_runs_are_equal(algorithm: AnyAlgorithm) -> None:
    """Check that two runs with one seed leave the same, that something is learned, and that records are JSON."""
    one, two = runs.undisturbed(algorithm), runs.simulation(algorithm)
    for record in one.records:
        runs.expect_json(record)
    runs.expect_same_run(one, runs.run_rounds(two), two, "in a second run with the same seed")
    runs.expect(
        not runs.equal(one.model, one.initial),
        "`round` should leave in `server.model` what was learned, not the initial model. (A `round` that changes the "
        "tensors of `server.model` in place changes the initial model too: assign new ones.)",
    )


def check_another_seed_differs(algorithm: AnyAlgorithm) -> None:
    """Check that the seed matters."""
    one, two = runs.undisturbed(algorithm), runs.simulation(algorithm, seed=1)
    differs = one.records != runs.run_rounds(two) and not runs.equal(one.model, two.server.model)
    runs.expect(differs, "records and model should differ with another seed")


def check_common_randomness(algorithm: AnyAlgorithm) -> None:
    """Check that a method changes no cohort, initial weight, example or batch order: all methods see the same."""
    own, reference = _seen(algorithm), _seen_in_plain_training()
    runs.expect_equal(own["cohorts"], reference["cohorts"], "cohorts should be those of every method")
    first = slice(None, None, algorithm.rows_per_class)  # where a class has several rows, its first is everybody's
    begins = {name: t[first] if name in (WEIGHT, BIAS) else t for name, t in own["initial"].items()}
    runs.expect(
        runs.equal(begins, reference["initial"]), "initial weights should be those of every method with this network"
    )
    labels = {client: own["labels"].get(client) for client in reference["labels"]}
    runs.expect_equal(labels, reference["labels"], "every client of a cohort should be asked, with its own data")
    runs.expect(bool(own["orders"]), "clients should train with `client.fit`")
    if "generator" in algorithm.needs:
        return  # generated images stand between the client's own
    unknown = own["orders"].keys() - reference["orders"].keys()
    runs.expect_equal(unknown, set(), "nobody but the cohort should train in a round")
    for (number, client), orders in own["orders"].items():
        # A method may train more than once in a round; its first training sees what every other method sees.
        wanted = reference["orders"][number, client]
        runs.expect_equal(
            orders[: len(wanted)], wanted, f"client {client}'s batches of round {number} are every method's"
        )


def check_evaluation_interval_changes_nothing(algorithm: AnyAlgorithm) -> None:
    """Check that results do not depend on how often the model is evaluated."""
    often, seldom = runs.undisturbed(algorithm), runs.simulation(algorithm, evaluate_every=3)
    records = runs.run_rounds(seldom)
    runs.expect(all("correct" in record for record in often.records), "every round should be evaluated")
    runs.expect_equal(
        [_unevaluated(record) for record in records],
        [_unevaluated(record) for record in often.records],
        "records should not depend on how often is evaluated",
    )
    runs.expect(runs.equal(often.model, seldom.server.model), "the model should not depend on how often is evaluated")


def check_evaluating_local_models_changes_nothing(algorithm: AnyAlgorithm) -> None:
    """Check that results do not depend on whether clients' models are evaluated."""
    watched = runs.simulation(algorithm, evaluate_local_models=True)
    records = runs.run_rounds(watched)
    evaluated = [record.pop("local_models") for record in records]
    runs.expect_same_run(runs.undisturbed(algorithm), records, watched, "with `evaluate_local_models`")
    for record, each in zip(records, evaluated, strict=True):
        strangers = {one["client"] for one in each} - set(record["cohort"])
        runs.expect_equal(strangers, set(), "only models of the cohort should be evaluated")
    runs.expect(any(evaluated), "some client's model should come back as a Fit, or be its `own_model`")


def check_only_averages(algorithm: AnyAlgorithm) -> None:
    """Check that a method learns the same where it sees the mean of clients' models alone, as secure sums show it."""
    settings = runs.simulation(algorithm, training=runs.SHORT).settings
    if reason_against_sums(algorithm, settings.defense, settings.privacy, settings.run):
        return
    summed = runs.simulation(algorithm, training=runs.SHORT, privacy=Privacy(secure_aggregation=True))
    runs.run_rounds(summed)
    for name, tensor in runs.undisturbed(algorithm, training=runs.SHORT).model.items():
        runs.expect(
            torch.allclose(summed.server.model[name], tensor, rtol=1e-3, atol=1e-5),
            f"{name} should be the same if each reply's model is the mean of all, and losses and steps are 0. Write "
            "only_averages = False in the class if `round` reads single models, losses or numbers of steps; means are "
            "weighted by examples, unless the method has an option aggregation, and it is 'uniform'",
        )


def check_codec_changes_nothing(algorithm: AnyAlgorithm) -> None:
    """Check that messages and states come through the codec as they were."""
    for build in _builds(algorithm):
        one, coded = runs.undisturbed(algorithm, build), build(algorithm, through_codec=True)
        runs.expect_same_run(one, runs.run_rounds(coded), coded, "when every message goes through the codec")


def check_order_of_work_changes_nothing(algorithm: AnyAlgorithm) -> None:
    """Check that results do not depend on which client is quicker."""
    for build in _builds(algorithm):
        forward = runs.undisturbed(algorithm, build, cohort_size=5, training=runs.SHORT)
        backward = build(algorithm, cohort_size=5, training=runs.SHORT)
        backward.executor = runs.BackwardExecutor(backward.serial)
        records = runs.run_rounds(backward)
        runs.expect_same_run(forward, records, backward, "when clients are asked in another order")


def check_stacked_training(algorithm: AnyAlgorithm) -> None:
    """Check that clients trained as one stacked model learn the same, up to rounding."""
    for build in _builds(algorithm):
        looped = runs.undisturbed(algorithm, build, cohort_size=5, training=runs.SHORT)
        stacked = build(algorithm, cohort_size=5, training=runs.SHORT, stack=4)
        runs.expect_close_run(looped, runs.run_rounds(stacked), stacked)


def check_global_randomness(algorithm: AnyAlgorithm) -> None:
    """Check that PyTorch's global generator is neither read nor moved."""
    first = runs.undisturbed(algorithm)
    with temporary_seed(runs.GLOBAL_SEED + 1):
        before = torch.get_rng_state()
        records = runs.run_rounds(runs.simulation(algorithm))
        after = torch.get_rng_state()
    advice = "draw from `client.rng(purpose)` or `server.rng(purpose)`, not from a global generator"
    runs.expect_equal(records, first.records, advice)
    runs.expect(torch.equal(after, before), advice)


@functools.cache
def _seen_in_plain_training() -> dict[str, Any]:
    """Return what clients see of a method that trains everybody, in cohort order: what all methods have in common."""
    return _seen(FedSeq())


def _seen(algorithm: AnyAlgorithm) -> dict[str, Any]:
    """Run a method and return what its clients saw."""
    simulation = runs.simulation(algorithm)
    seen = runs.record_batches(simulation)
    initial = simulation.server.model
    cohorts = [record["cohort"] for record in runs.run_rounds(simulation)]
    return {"cohorts": cohorts, "initial": initial, "labels": seen.labels, "orders": dict(seen.orders)}


def _unevaluated(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("correct", "test_loss")}


def check_resume(algorithm: AnyAlgorithm) -> None:
    """Check that a trial that was stopped after every round ends with the same bytes."""
    for build in _builds(algorithm):
        with tempfile.TemporaryDirectory() as folder:
            whole, stopped = Path(folder) / "whole", Path(folder) / "stopped"
            run_trial(build(algorithm, training=runs.SHORT), whole)
            lines = (whole / "rounds.jsonl").read_bytes().splitlines()
            for at in range(1, len(lines)):
                with suppress(runs.Stopped):
                    run_trial(build(algorithm, training=runs.SHORT), stopped, [runs.stop_after(at)])
                found = (stopped / "rounds.jsonl").read_bytes().splitlines()
                why = f"records should be the same when stopped after round {at}"
                runs.expect_equal(found, lines[:at], why)
                runs.expect(not (stopped / "result.json").exists(), "a stopped trial should have no result")
                runs.run_rounds(build(algorithm, training=runs.SHORT), 1)  # overwrites what is kept outside a state
            run_trial(build(algorithm, training=runs.SHORT), stopped)
            runs.expect_same_files(stopped, whole, "when stopped after every round and resumed")


def check_lost_clients(algorithm: AnyAlgorithm) -> None:
    """Check that a client may be lost in each step, and the round goes on with the others."""
    calls = runs.undisturbed(algorithm).calls
    for step in runs.asked_steps(algorithm):
        made = [(number, client) for number, client, name in calls if name == step]
        victims = dict(reversed(made))  # the first of each round
        odd = max(number % 2 for number in victims)  # every second round, so that whole ones follow
        lost = {number: victim for number, victim in victims.items() if number % 2 == odd}
        simulation = runs.simulation(algorithm, fault_injector=_failing(lost, step), training=runs.SHORT)
        records = runs.run_rounds(simulation)
        for record in records:
            number = record["round"]
            wanted = {lost[number]: "lost it"} if number in lost else {}
            why = f"in round {number} only client {lost.get(number)} should be lost, in {step!r}"
            runs.expect_equal(record["lost"], wanted, why)
            runs.expect(not record["rolled_back"], f"round {number} should go on without the lost client")
        runs.expect_finite(simulation.server.model)


def check_bad_replies(algorithm: AnyAlgorithm) -> None:
    """Check that replies of broken tensors are refused, and the round goes on.

    In round 2 models are broken, and in each round from 4 on another part of one reply.
    """
    steps = {name: annotations_of(step)["return"] for name, step in client_steps(type(algorithm)).items()}
    carriers = runs.replies_with(algorithm, Fit) or {name for name in steps if is_dataclass(steps[name])} or set(steps)
    faults = {"4": lambda tensor: torch.full_like(tensor, float("nan")), "3": lambda tensor: tensor[None]}
    parts = [(step, part) for step, reply in steps.items() for part in _parts_beside_models(reply)]
    broken = defaultdict[int, set[str]](set)
    simulation = runs.simulation(algorithm, cohort_size=6, rounds=3 + len(parts), training=runs.SHORT)

    def wrap(request: StepRequest) -> Callable[..., Any]:
        @functools.wraps(request.step)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            reply = request.step(*args, **kwargs)
            changed = _broken(reply, faults[client]) if number == 2 else _broken_part(reply, parts[number - 4][1])
            broken[number] |= set() if changed is reply else {client}
            return changed

        number, client, name = simulation.finished + 1, request.client, request.step.__name__
        if number == 2:
            return wrapped if client in faults and name in carriers else request.step
        return wrapped if number > 3 and client == str(number % 6) and name == parts[number - 4][0] else request.step

    runs.wrap_steps(simulation, wrap)
    for number, record in enumerate(runs.run_rounds(simulation), start=1):
        what = f"{parts[number - 4][1]!r} of a reply of {parts[number - 4][0]!r}" if number > 3 else "models"
        why = f"in round {number} exactly the replies with broken {what} should be refused; see `validate_reply`"
        runs.expect_equal(set(record["lost"]), set(faults) if number == 2 else broken[number], why)
        runs.expect(not record["rolled_back"], "a round should go on without those whose reply was refused")
    runs.expect_finite(simulation.server.model)


def _parts_beside_models(reply: Any) -> list[str]:
    """Return the fields of a type of replies that may hold tensors, but the model; none of one that is no dataclass."""
    names = [field.name for field in fields(reply)] if is_dataclass(reply) else []
    return [name for name in names if name != "model" and annotations_of(reply)[name] not in (int, float, bool, str)]


def _broken(reply: Any, fault: Callable[[Tensor], Tensor]) -> Any:
    """Return a reply whose model has a broken tensor, or its first tensor if it has no model."""
    if hasattr(reply, "model"):
        name, tensor = list(reply.model.items())[-1]
        return replace(reply, model={**reply.model, name: fault(tensor)})
    tensors = [tensor for tensor, _ in tree_tensors(reply)]
    return replace_tensors(reply, [fault(tensors[0]), *tensors[1:]]) if tensors else reply


def _broken_part(reply: Any, part: str) -> Any:
    """Return a reply with another shape of a part's first tensor; the reply itself if the part has no tensor."""
    value = getattr(reply, part)
    tensors = [tensor for tensor, _ in tree_tensors(value)]
    return replace(reply, **{part: replace_tensors(value, [tensors[0][None], *tensors[1:]])}) if tensors else reply


def check_too_few_clients(algorithm: AnyAlgorithm) -> None:
    """Check that a round with too few clients changes nothing, whenever they are lost."""
    second = runs.simulation(algorithm).sample_cohort(2)
    at_once: Injector = lambda number, client, step: "gone" if number == 2 else None  # noqa: E731
    late = _failing({2: second[-1]}, runs.last_step(algorithm))
    for injector in (at_once, late):
        simulation = runs.simulation(algorithm, min_clients=3, fault_injector=injector, training=runs.SHORT)
        runs.run_rounds(simulation, 1)
        before = runs.condition(simulation)
        (record,) = runs.run_rounds(simulation, 1)
        runs.expect(record["rolled_back"] is True, "a round with fewer than `min_clients` should be rolled back")
        runs.expect(bool(record["lost"]), "who was lost should be in the record")
        advice = "a round that is rolled back should change nothing; never change a state in place"
        runs.expect(runs.condition(simulation) == before | {"finished": 2}, advice)
        if injector is at_once:
            later = [record["rolled_back"] for record in runs.run_rounds(simulation)]
            runs.expect_equal(later, [False, False], "later rounds should go on")


Injector = Callable[[int, str, str], str | None]


def _failing(victims: Mapping[int, str], step: str) -> Injector:
    """Let a step fail for the victim of each round that has one."""
    return lambda number, client, name: "lost it" if (victims.get(number), step) == (client, name) else None


def check_odd_federations(algorithm: AnyAlgorithm) -> None:
    """Check rounds with one client or all, clients that return, and clients with few examples, one class or nothing."""
    for name, changes in _odd_federations().items():
        try:
            runs.run_settled(runs.simulation(algorithm, training=runs.SHORT, **changes))
        except Exception as error:
            error.add_note(f"This happened with {name}.")
            raise


def _odd_federations() -> dict[str, dict[str, Any]]:
    data = runs.dataset(30)
    one_class = [torch.nonzero(data.train["label"] == c).flatten().tolist() for c in range(runs.CLASSES)]
    empty = {"federation": runs.federation((6, 0, 9, 0)), "rounds": 6, "evaluate_local_models": True}
    return {
        "one client in a round": {"cohort_size": 1, "rounds": 8},
        "two clients that return": {"federation": runs.federation((8, 9)), "cohort_size": 1, "rounds": 7},
        "all clients in a round": {"cohort_size": 6},
        "clients with one example": {"federation": runs.federation((1, 6, 1))},
        "clients with one class": {"federation": runs.by_hand(data, one_class)},
        "clients without examples": empty,
        "clients without examples, through the codec": empty | {"through_codec": True},
    }


def check_nobody_with_examples(algorithm: AnyAlgorithm) -> None:
    """Check a federation in which nobody holds anything."""
    simulation = runs.simulation(algorithm, federation=runs.by_hand(runs.dataset(9), [[], []]), cohort_size=2)
    if "generator" in algorithm.needs:  # what nobody has cannot be described
        runs.expect_data_error(simulation)
        return
    losses = [record["loss"] for record in runs.run_rounds(simulation)]
    runs.expect_equal(losses, [None] * runs.ROUNDS, "there should be no loss where nobody has examples")
    runs.expect_finite(simulation.server.model)


def check_batch_norm(algorithm: AnyAlgorithm) -> None:
    """Check that batch norms' statistics stay between those that clients left.

    They are averaged, however a method moves the parameters: carried further, a variance may become negative.
    """
    clients = runs.federation((9, 1, 6, 0, 7, 23))
    # One round more than is run: at its end a task may leave the model of an earlier round.
    simulation = runs.simulation(
        algorithm, factory=_normed, federation=clients, cohort_size=4, rounds=runs.ROUNDS + 1, training=runs.SHORT
    )
    fits = _record_fits(simulation)
    for _ in range(runs.ROUNDS):
        fits.clear()
        runs.run_settled(simulation, 1)
        after = simulation.server.model
        runs.expect(any(fit.num_steps for fit in fits), "somebody should train with `fit`")
        for name in (name for name in after if "running" in name):
            left = torch.stack([fit.model[name] for fit in fits])
            within = bool((after[name] >= left.amin(0) - 1e-6).all() and (after[name] <= left.amax(0) + 1e-6).all())
            runs.expect(within, f"{name}, which is not trained, should stay between those that clients left")
        counter = after["body.norm.num_batches_tracked"]
        counted = counter.dtype == torch.int64 and any(
            bool(counter == fit.model["body.norm.num_batches_tracked"]) for fit in fits
        )
        runs.expect(counted, "whole numbers of the model should stay int64, and one that a client left")


def _record_fits(simulation: Simulation) -> list[Fit]:
    """Return a list to which the result of every local training is added from now on, the server's too."""
    fits: list[Fit] = []

    def watch(party: LocalParty) -> None:
        train = party.fit

        def fit(*args: Any, **kwargs: Any) -> Fit:
            fits.append(train(*args, **kwargs))
            return fits[-1]

        party.fit = fit  # type: ignore[method-assign]

    watch(simulation.server)
    runs.watch_clients(simulation, watch)
    return fits


def check_memory(algorithm: AnyAlgorithm) -> None:
    """Check that memory is flat: what lives after 30 rounds lived after 10, within a quarter of a model and 10 objects.

    After the 31st the task ends, of which a method may keep something once.
    """
    clients = runs.federation((4, 4, 5))  # one step each: what leaks, leaks once a training
    gc.collect()
    gc.freeze()  # what was there before is left out: to count it takes longer than the rounds
    try:
        simulation = runs.simulation(
            algorithm, cohort_size=2, rounds=31, evaluate_every=10, federation=clients, training=runs.SHORT
        )
        runs.run_rounds(simulation, 10)
        before = _living()
        runs.run_rounds(simulation, 20)
        after = _living()
    finally:
        gc.unfreeze()
    model = sum(tensor.nbytes for tensor in simulation.server.model.values())
    tensors, objects = after[0] - before[0], after[1] - before[1]
    runs.expect(tensors <= model / 4, f"memory should be flat, but 20 rounds left {tensors} bytes of tensors")
    runs.expect(objects <= 10, f"memory should be flat, but 20 rounds left {objects} objects")


def _normed() -> Network:
    """Return a network with batch norm."""
    layers = OrderedDict(flatten=nn.Flatten(), full=nn.Linear(16, 8), norm=nn.BatchNorm1d(8), relu=nn.ReLU())
    return Network(nn.Sequential(layers), 8, runs.CLASSES)


def _living() -> tuple[int, int]:
    """Return the bytes of all living tensors, and the number of all living objects, of those that are not frozen."""
    gc.collect()
    objects = gc.get_objects()
    return sum(o.nbytes for o in objects if type(o) is Tensor), len(objects)


def check_tasks(algorithm: AnyAlgorithm) -> None:
    """Check that all tasks are run, and that the model knows each task's classes."""
    whole = runs.undisturbed(algorithm, runs.simulation_with_tasks)
    places = [(record["task"], record["round"]) for record in whole.records]
    runs.expect_equal(places, [(1, 1), (1, 2), (2, 3), (2, 4), (3, 5), (3, 6)], "all tasks should be run")
    classes = [len(record["correct"]) for record in whole.records]
    runs.expect_equal(classes, [1, 1, 2, 2, 3, 3], "the classes seen so far should be evaluated")
    runs.expect_settled(whole.records, whole.model)
    for record in whole.records:
        runs.expect_json(record)


def check_tasks_without_examples(algorithm: AnyAlgorithm) -> None:
    """Check a task of whose class nobody holds an example."""
    stream = runs.stream((2, 1), absent=0)
    partition = stream.tasks[1].partition
    nobody = replace(partition, rows=partition.rows[:0], offsets=torch.zeros_like(partition.offsets))
    stream = replace(stream, tasks=(stream.tasks[0], replace(stream.tasks[1], partition=nobody)))
    simulation = runs.simulation_with_tasks(algorithm, stream)
    if "generator" in algorithm.needs:  # what nobody has cannot be described
        runs.expect_data_error(simulation)
        return
    records = runs.run_rounds(simulation)
    classes = [len(record["correct"]) for record in records]
    runs.expect_equal(classes, [2, 2, 3, 3], "the classes seen so far should be evaluated")
    runs.expect_settled(records, simulation.server.model)
