"""FedKeep with a large population: ``population_fedkeep.py CLIENTS``. Ten examples of 4 x 4 pixels each, 50 a round."""

from __future__ import annotations

import sys

import torch
from turns import Turns

import fedkeep
from fedkeep.data import DataSet, Federation
from fedkeep.data.partition import IID
from fedkeep.interface import Training
from fedkeep.models.networks import MLP
from fedkeep.rounds.run_settings import RunSettings
from fedkeep.rounds.state import Settings
from fedkeep.trials.autotune import choose_stack_size
from fedkeep.trials.simulation import Simulation


def main() -> None:
    """Play rounds when asked."""
    turns, clients = Turns(), int(sys.argv[1])
    torch.set_num_threads(1)
    dataset = synthetic(10 * clients)
    engine = Simulation(
        fedkeep.FedAvg(),
        Federation(dataset, IID(num_clients=clients).split(dataset.train, dataset.num_classes, seed=0)),
        lambda: MLP().build(dataset.shape, dataset.num_classes),
        Settings(
            Training(epochs=1, batch_size=10, lr=0.1),
            RunSettings(rounds=10**6, cohort_size=50, evaluate_every=10**6, evaluation_models=("last",)),
        ),
    )
    engine.settings.stack = choose_stack_size(engine)  # as a run does
    going = turns.begin("fedkeep", "torch")
    while going:
        engine.run_round()
        going = turns.done()


def synthetic(examples: int) -> DataSet:
    """Return a data set of noise."""
    noise = torch.Generator().manual_seed(0)
    images = torch.randint(256, (examples, 1, 4, 4), generator=noise, dtype=torch.uint8)
    train = {"input": images, "label": torch.randint(10, (examples,), generator=noise)}
    test = {name: column[:100] for name, column in train.items()}
    return DataSet("synthetic", train, test, tuple("0123456789"), (0.5,), (0.29,))


if __name__ == "__main__":
    main()
