"""How a server merges the models of its clients."""

from fedkeep.aggregation.mean import Aggregation, aggregate, ema, weighted_mean
from fedkeep.aggregation.transport import Projection, OptimalTransport

__all__ = ["Aggregation", "Projection", "OptimalTransport", "aggregate", "ema", "weighted_mean"]
