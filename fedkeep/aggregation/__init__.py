"""How a server merges the models of its clients."""

from fedkeep.aggregation.mean import Aggregation, aggregate, ema, weighted_mean
from fedkeep.aggregation.robust import clip_norm, coordinate_median, select_krum, trimmed_mean
from fedkeep.aggregation.transport import OptimalTransport, Projection

__all__ = [
    "Aggregation",
    "OptimalTransport",
    "Projection",
    "aggregate",
    "clip_norm",
    "coordinate_median",
    "ema",
    "select_krum",
    "trimmed_mean",
    "weighted_mean",
]
