"""pfl with a large population: ``population_pfl.py CLIENTS``. A user's ten examples are made when it is sampled."""

from __future__ import annotations

import sys

import numpy as np
import torch
from networks import mlp
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.model.pytorch import PyTorchModel
from with_pfl import Learner, WaitForTurn

ROUNDS = 10**6


def main() -> None:
    """Play rounds when asked."""
    torch.set_num_threads(1)
    set_framework_module(pytorch_ops)
    sampler = get_user_sampler("minimize_reuse", list(range(int(sys.argv[1]))))
    learner = Learner(mlp(1, 4, 4, 10))
    model = PyTorchModel(learner, torch.optim.SGD, torch.optim.SGD(learner.parameters(), lr=1.0))
    turn = WaitForTurn()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=ROUNDS, evaluation_frequency=ROUNDS + 1, train_cohort_size=50, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=FederatedDataset(examples_of, sampler), val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.1, local_batch_size=10),
        callbacks=[turn],
    )


def examples_of(user: int) -> Dataset:
    """Return a user's noise."""
    noise = np.random.default_rng(user)
    images = noise.standard_normal((10, 1, 4, 4), dtype=np.float32)
    return Dataset(raw_data=[torch.from_numpy(images), torch.from_numpy(noise.integers(10, size=10))])


if __name__ == "__main__":
    main()
