"""The words of the house as types: algorithm, cohort, client, server, and the values that travel between them."""

from fedkeep.interface.algorithm import Algorithm, algorithm, algorithms, on_client
from fedkeep.interface.cohort import Cohort, Remote, each
from fedkeep.interface.party import Client, Copy, Fit, NoState, Server
from fedkeep.interface.training import Training
from fedkeep.losses import Data

__all__ = [
    "Algorithm",
    "Client",
    "Cohort",
    "Copy",
    "Data",
    "Fit",
    "NoState",
    "Remote",
    "Server",
    "Training",
    "algorithm",
    "algorithms",
    "each",
    "on_client",
]
