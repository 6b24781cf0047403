"""Networks, each split into features and a classifier, and models as values: tensors by name."""

from fedkeep.models.base import Architecture, Network, Shape, architectures, get_architecture
from fedkeep.models.weights import Weights

__all__ = ["Architecture", "Network", "Shape", "Weights", "architectures", "get_architecture"]
