"""How a server merges the models of its clients."""

from fedkeep.aggregation.mean import Aggregation, aggregate, ema, weighted_mean
from fedkeep.aggregation.transport import Projection, Transport

__all__ = ["Aggregation", "Projection", "Transport", "aggregate", "ema", "weighted_mean"]
