"""How a server merges the models of its clients."""

from fedkeep.aggregation.mean import Aggregation, aggregate, ema, weighted_mean
from fedkeep.aggregation.robust import clip_norm, coordinate_median, select_krum, trimmed_mean
from fedkeep.aggregation.transport import Projection, project

__all__ = [
    "Aggregation",
    "Projection",
    "aggregate",
    "clip_norm",
    "coordinate_median",
    "ema",
    "project",
    "select_krum",
    "trimmed_mean",
    "weighted_mean",
]
