"""Same in, same out: what a run may depend on, and what it may not."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fedkeep._utils.seeds import temporary_seed
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.interface.codec import encode
from fedkeep.models.heads import BIAS, WEIGHT
from fedkeep.testing import federation as tiny
from fedkeep.testing.interception import BackwardExecutor, record_batches
from fedkeep.testing.runs import (
    GLOBAL_SEED,
    AnyAlgorithm,
    expect,
    expect_close_run,
    expect_equal,
    expect_json,
    expect_same_run,
    undisturbed,
)


def check_two_runs_are_equal(algorithm: AnyAlgorithm) -> None:
    """Check that two runs with one seed leave the same bytes, and that something is learned."""
    one, two = undisturbed(algorithm), tiny.simulation(algorithm)
    expect_same_run(one, tiny.run_rounds(two), two, "in a second run with the same seed")
    expect(encode(one.server) == encode(two.server.state), algorithm, "the server's state should be the same bytes")
    learned = not tiny.equal(one.model, one.initial)
    expect(
        learned,
        algorithm,
        "`round` should leave in `server.model` what was learned, not the initial model. (A `round` that changes the "
        "tensors of `server.model` in place changes the initial model too: assign new ones.)",
    )


def check_another_seed_differs(algorithm: AnyAlgorithm) -> None:
    """Check that the seed matters."""
    one, two = undisturbed(algorithm), tiny.simulation(algorithm, seed=1)
    differs = one.records != tiny.run_rounds(two) and not tiny.equal(one.model, two.server.model)
    expect(differs, algorithm, "records and model should differ with another seed")


def check_common_randomness(algorithm: AnyAlgorithm) -> None:
    """Check that a method changes no cohort, initial weight, example or batch order: all methods see the same."""
    own, reference = _seen(algorithm), _seen_in_plain_training()
    expect_equal(own["cohorts"], reference["cohorts"], algorithm, "cohorts should be those of every method")
    first = slice(None, None, algorithm.rows_per_class)  # where a class has several rows, its first is everybody's
    begins = {name: t[first] if name in (WEIGHT, BIAS) else t for name, t in own["initial"].items()}
    same = tiny.equal(begins, reference["initial"])
    expect(same, algorithm, "initial weights should be those of every method with this network")
    labels = {client: own["labels"].get(client) for client in reference["labels"]}
    expect_equal(labels, reference["labels"], algorithm, "every client of a cohort should be asked, with its own data")
    expect(bool(own["orders"]), algorithm, "clients should train with `client.fit`")
    if "generator" in algorithm.needs:
        return  # generated images stand between the client's own
    unknown = own["orders"].keys() - reference["orders"].keys()
    expect_equal(unknown, set(), algorithm, "nobody but the cohort should train in a round")
    for (number, client), orders in own["orders"].items():
        # A method may train more than once in a round; its first training sees what every other method sees.
        wanted = reference["orders"][number, client]
        expect_equal(
            orders[: len(wanted)], wanted, algorithm, f"client {client}'s batches of round {number} are every method's"
        )


def check_evaluation_interval_changes_nothing(algorithm: AnyAlgorithm) -> None:
    """Check that results do not depend on how often the model is evaluated."""
    often, seldom = undisturbed(algorithm), tiny.simulation(algorithm, evaluate_every=3)
    records = tiny.run_rounds(seldom)
    expect(all("correct" in record for record in often.records), algorithm, "every round should be evaluated")
    expect_equal(
        [_unevaluated(record) for record in records],
        [_unevaluated(record) for record in often.records],
        algorithm,
        "records should not depend on how often is evaluated",
    )
    same = tiny.equal(often.model, seldom.server.model)
    expect(same, algorithm, "the model should not depend on how often is evaluated")


def check_evaluating_local_models_changes_nothing(algorithm: AnyAlgorithm) -> None:
    """Check that results do not depend on whether clients' models are evaluated."""
    watched = tiny.simulation(algorithm, evaluate_local_models=True)
    records = tiny.run_rounds(watched)
    evaluated = [record.pop("local_models") for record in records]
    expect_same_run(undisturbed(algorithm), records, watched, "with `evaluate_local_models`")
    for record, each in zip(records, evaluated, strict=True):
        strangers = {one["client"] for one in each} - set(record["cohort"])
        expect_equal(strangers, set(), algorithm, "only models of the cohort should be evaluated")
    expect(any(evaluated), algorithm, "some client's model should come back as a Fit, or be its `own_model`")


def check_codec_changes_nothing(algorithm: AnyAlgorithm) -> None:
    """Check that messages and states come through the codec as they were."""
    coded = tiny.simulation(algorithm, through_codec=True)
    one = undisturbed(algorithm)
    expect_same_run(one, tiny.run_rounds(coded), coded, "when every message goes through the codec")
    expect(encode(one.server) == encode(coded.server.state), algorithm, "the server's state should be the same bytes")


def check_order_of_work_changes_nothing(algorithm: AnyAlgorithm) -> None:
    """Check that results do not depend on which client is quicker."""
    forward = undisturbed(algorithm, cohort_size=6, training=tiny.SHORT)
    backward = tiny.simulation(algorithm, cohort_size=6, training=tiny.SHORT)
    backward.executor = BackwardExecutor(backward.serial)
    records = tiny.run_rounds(backward)
    expect_same_run(forward, records, backward, "when clients are asked in another order")
    same = encode(forward.server) == encode(backward.server.state)
    expect(same, algorithm, "the server's state should be the same bytes")


def check_stacked_training(algorithm: AnyAlgorithm) -> None:
    """Check that clients trained as one stacked model learn the same, up to rounding."""
    looped = undisturbed(algorithm, cohort_size=6, training=tiny.SHORT)
    stacked = tiny.simulation(algorithm, cohort_size=6, training=tiny.SHORT, stack=4)
    expect_close_run(looped.records, looped.model, tiny.run_rounds(stacked), stacked)


def check_global_randomness(algorithm: AnyAlgorithm) -> None:
    """Check that PyTorch's global generator is neither read nor moved."""
    first = undisturbed(algorithm)
    with temporary_seed(GLOBAL_SEED + 1):
        before = torch.get_rng_state()
        records = tiny.run_rounds(tiny.simulation(algorithm))
        after = torch.get_rng_state()
    advice = "draw from `client.rng(purpose)` or `server.rng(purpose)`, not from a global generator"
    expect_equal(records, first.records, algorithm, advice)
    expect(torch.equal(after, before), algorithm, advice)


def check_records_are_json(algorithm: AnyAlgorithm) -> None:
    """Check that records are strict JSON."""
    for record in undisturbed(algorithm).records:
        expect_json(algorithm, record)


@functools.cache
def _seen_in_plain_training() -> dict[str, Any]:
    """Return what clients see of a method that trains everybody, in cohort order: what all methods have in common."""
    return _seen(FedSeq())


def _seen(algorithm: AnyAlgorithm) -> dict[str, Any]:
    """Run a method and return what its clients saw."""
    simulation = tiny.simulation(algorithm)
    seen = record_batches(simulation)
    initial = simulation.server.model
    cohorts = [record["cohort"] for record in tiny.run_rounds(simulation)]
    return {"cohorts": cohorts, "initial": initial, "labels": seen.labels, "orders": dict(seen.orders)}


def _unevaluated(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("correct", "test_loss")}
