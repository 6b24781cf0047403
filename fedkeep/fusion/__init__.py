"""How a server merges the models of its clients."""

from fedkeep.fusion.mean import Fusion, fused, weighted_mean
from fedkeep.fusion.transport import Projection, Transport

__all__ = ["Fusion", "Projection", "Transport", "fused", "weighted_mean"]
