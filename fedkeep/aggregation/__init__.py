"""How a server merges the models of its clients."""

from fedkeep.aggregation.mean import Fusion, fused, weighted_mean
from fedkeep.aggregation.transport import Projection, Transport

__all__ = ["Fusion", "Projection", "Transport", "fused", "weighted_mean"]
