"""The interface of a method: algorithm, client, server and cohort, and the values that are sent between them."""

from fedkeep.interface.algorithm import Algorithm, algorithms, get_algorithm, on_client
from fedkeep.interface.cohort import Cohort, RemoteClient, each
from fedkeep.interface.party import Client, Fit, NoState, Range, Server
from fedkeep.interface.training_settings import Training
from fedkeep.losses import Data

__all__ = [
    "Algorithm",
    "Client",
    "Cohort",
    "Data",
    "Fit",
    "NoState",
    "Range",
    "RemoteClient",
    "Server",
    "Training",
    "algorithms",
    "each",
    "get_algorithm",
    "on_client",
]
