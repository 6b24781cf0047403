"""How a server merges the models of its clients."""

from fedkeep.fusion.mean import Fusion, fused, weighted_mean

__all__ = ["Fusion", "fused", "weighted_mean"]
