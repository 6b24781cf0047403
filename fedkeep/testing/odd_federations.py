"""Odd federations: few clients, clients with little or nothing, unreliable ones, and many rounds."""

from __future__ import annotations

import gc
from collections import OrderedDict

import torch
from torch import Tensor, nn

from fedkeep.models import Network
from fedkeep.testing import federation as tiny
from fedkeep.testing.interception import record_fits
from fedkeep.testing.runs import (
    ROUNDS,
    AnyAlgorithm,
    expect,
    expect_data_error,
    expect_equal,
    expect_finite,
    expect_settled,
    run_settled,
    undisturbed,
)


def check_cohort_of_one(algorithm: AnyAlgorithm) -> None:
    """Check rounds with one client each."""
    run_settled(tiny.simulation(algorithm, cohort_size=1, rounds=8, training=tiny.SHORT))


def check_more_rounds_than_clients(algorithm: AnyAlgorithm) -> None:
    """Check a federation of two clients that return."""
    two = tiny.federation((8, 9))
    run_settled(tiny.simulation(algorithm, federation=two, cohort_size=1, rounds=7, training=tiny.SHORT))


def check_cohort_of_everybody(algorithm: AnyAlgorithm) -> None:
    """Check rounds with all clients."""
    everybody = undisturbed(algorithm, cohort_size=6, training=tiny.SHORT)
    expect_settled(algorithm, everybody.records, everybody.model)


def check_client_with_one_example(algorithm: AnyAlgorithm) -> None:
    """Check clients that hold a single example."""
    run_settled(tiny.simulation(algorithm, federation=tiny.federation((1, 6, 1)), cohort_size=3))


def check_clients_with_one_class(algorithm: AnyAlgorithm) -> None:
    """Check clients that hold one class each."""
    data = tiny.dataset(30)
    clients = [torch.nonzero(data.train["label"] == c).flatten().tolist() for c in range(tiny.CLASSES)]
    run_settled(tiny.simulation(algorithm, federation=tiny.by_hand(data, clients), cohort_size=3))


def check_clients_without_examples(algorithm: AnyAlgorithm) -> None:
    """Check that clients may hold nothing, and that empty messages come through the codec."""
    clients = tiny.federation((6, 0, 9, 0))
    for through_codec in (False, True):
        run_settled(
            tiny.simulation(
                algorithm,
                federation=clients,
                cohort_size=3,
                evaluate_local_models=True,
                through_codec=through_codec,
                rounds=6,
                training=tiny.SHORT,
            )
        )


def check_nobody_with_examples(algorithm: AnyAlgorithm) -> None:
    """Check a federation in which nobody holds anything."""
    simulation = tiny.simulation(algorithm, federation=tiny.by_hand(tiny.dataset(9), [[], []]), cohort_size=2)
    if "generator" in algorithm.needs:  # what nobody has cannot be described
        expect_data_error(simulation)
        return
    losses = [record["loss"] for record in tiny.run_rounds(simulation)]
    expect_equal(losses, [None] * ROUNDS, algorithm, "there should be no loss where nobody has examples")
    expect_finite(algorithm, simulation.server.model)


def check_batch_norm(algorithm: AnyAlgorithm) -> None:
    """Check that batch norms' statistics stay between those that clients left.

    They are averaged, however a method moves the parameters: carried further, a variance may become negative.
    """
    clients = tiny.federation((9, 1, 6, 0, 7, 23))
    # One round more than is run: at its end a task may leave the model of an earlier round.
    simulation = tiny.simulation(
        algorithm, factory=_normed, federation=clients, cohort_size=4, rounds=ROUNDS + 1, training=tiny.SHORT
    )
    recorded = record_fits(simulation)
    for _ in range(ROUNDS):
        recorded.clear()
        run_settled(simulation, 1)
        fits = [training.fit for training in recorded]
        after = simulation.server.model
        expect(any(fit.num_steps for fit in fits), algorithm, "somebody should train with `fit`")
        for name in (name for name in after if "running" in name):
            left = torch.stack([fit.model[name] for fit in fits])
            within = bool((after[name] >= left.amin(0) - 1e-6).all() and (after[name] <= left.amax(0) + 1e-6).all())
            expect(within, algorithm, f"{name}, which is not trained, should stay between those that clients left")
        counter = after["body.norm.num_batches_tracked"]
        counted = counter.dtype == torch.int64 and any(
            bool(counter == fit.model["body.norm.num_batches_tracked"]) for fit in fits
        )
        expect(counted, algorithm, "whole numbers of the model should stay int64, and one that a client left")


def check_dropout(algorithm: AnyAlgorithm) -> None:
    """Check that clients may drop out at random, the same ones in every run."""
    first, again = (
        tiny.simulation(algorithm, cohort_size=4, rounds=8, client_dropout=0.4, training=tiny.SHORT) for _ in range(2)
    )
    records = tiny.run_rounds(first)
    lost = sum(len(record["lost"]) for record in records)
    expect(4 <= lost <= 24, algorithm, f"about 13 of 32 clients should drop out, not {lost}")
    expect_finite(algorithm, first.server.model)
    expect_equal(tiny.run_rounds(again, 4), records[:4], algorithm, "the same clients should drop out in every run")


def check_memory(algorithm: AnyAlgorithm) -> None:
    """Check that memory is flat: what lives after 30 rounds lived after 10, within a quarter of a model and 10 objects.

    After the 31st the task ends, of which a method may keep something once.
    """
    clients = tiny.federation((4, 4, 5))  # one step each: what leaks, leaks once a training
    gc.collect()
    gc.freeze()  # what was there before is left out: to count it takes longer than the rounds
    try:
        simulation = tiny.simulation(
            algorithm, cohort_size=2, rounds=31, evaluate_every=10, federation=clients, training=tiny.SHORT
        )
        tiny.run_rounds(simulation, 10)
        before = _living()
        tiny.run_rounds(simulation, 20)
        after = _living()
    finally:
        gc.unfreeze()
    model = sum(tensor.nbytes for tensor in simulation.server.model.values())
    tensors, objects = after[0] - before[0], after[1] - before[1]
    expect(tensors <= model / 4, algorithm, f"memory should be flat, but 20 rounds left {tensors} bytes of tensors")
    expect(objects <= 10, algorithm, f"memory should be flat, but 20 rounds left {objects} objects")


def _normed() -> Network:
    """Return a network with batch norm."""
    layers = OrderedDict(flatten=nn.Flatten(), full=nn.Linear(16, 8), norm=nn.BatchNorm1d(8), relu=nn.ReLU())
    return Network(nn.Sequential(layers), 8, tiny.CLASSES)


def _living() -> tuple[int, int]:
    """Return the bytes of all living tensors, and the number of all living objects, of those that are not frozen."""
    gc.collect()
    objects = gc.get_objects()
    return sum(o.nbytes for o in objects if type(o) is Tensor), len(objects)
