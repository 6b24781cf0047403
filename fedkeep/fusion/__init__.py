"""How a server merges the models of its clients."""

from fedkeep.fusion.mean import weighted_mean

__all__ = ["weighted_mean"]
