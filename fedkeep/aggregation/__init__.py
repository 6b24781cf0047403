"""How a server merges the models of its clients."""

from fedkeep.aggregation.mean import Aggregation, aggregate, ema, weighted_mean
from fedkeep.aggregation.transport import OptimalTransport, Projection

__all__ = ["Aggregation", "OptimalTransport", "Projection", "aggregate", "ema", "weighted_mean"]
