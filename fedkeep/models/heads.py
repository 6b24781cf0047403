"""Heads that grow: a classifier of more rows for more classes, and the view of an older model with fewer.

Classes are numbered in order of arrival, so the rows of the old classes come first. All functions work on any model
whose classifier is a linear layer of that name, as `Network`'s is. A head may have several rows for each class, next
to each other (PASS turns each class into four by rotation): rows are what is counted here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedkeep.errors import ConfigError
from fedkeep.models.weights import Weights

WEIGHT, BIAS = "classifier.weight", "classifier.bias"


@torch.no_grad()
def expand_rows(model: Weights, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the model with a classifier of ``rows`` rows: the old ones, then new ones.

    A new row of weights is uniform within +-sqrt(3 / width), which is Kaiming's rule for a linear layer, and its bias
    0, as in the code of TARGET (Zhang et al., 2023). All other tensors are those of the model.

    Parameters
    ----------
    model : with ``classifier.weight`` [old rows, width] and, if it has one, ``classifier.bias`` [old rows].
    rows : at least as many as there are.
    generator : a CPU generator with a name (see `fedkeep._utils.seeds`), so that every party draws the same rows.

    Raises
    ------
    ConfigError
        If the model has no such classifier, or more rows already.
    """
    old = _head(model)
    more, width = rows - len(old), old.shape[1]
    if more < 0:
        raise ConfigError(f"the classifier has {len(old)} rows already and cannot grow to {rows}.")
    limit = math.sqrt(3 / width)
    new = (2 * torch.rand(more, width, generator=generator) - 1) * limit
    head = {WEIGHT: torch.cat((old, new.to(old)))}
    if BIAS in model:
        head[BIAS] = torch.cat((model[BIAS], model[BIAS].new_zeros(more)))
    return {name: head.get(name, tensor) for name, tensor in model.items()}


@torch.no_grad()
def add_views(model: Weights, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the model with ``rows`` rows in the place of each: the row itself, then new ones as `expand_rows` draws
    them.

    So the first row of class c, number c * rows, says what the row of the class said before.
    """
    classes = len(_head(model))
    wide = expand_rows(model, classes * rows, generator)
    places = torch.arange(classes * rows)
    order = torch.cat((places[:classes, None], places[classes:].view(classes, rows - 1)), dim=1).flatten()
    return {name: tensor[order] if name in (WEIGHT, BIAS) else tensor for name, tensor in wide.items()}


@torch.no_grad()
def expand_like(model: Weights, longer: Weights) -> Weights:
    """Return the model with the rows that a longer classifier has beyond its own; the model itself if there are none.

    Parameters
    ----------
    model : of any architecture; nothing is asked of it where there is nothing to add.
    longer : a model of the same architecture, with the rows of the model's classes first.
    """
    if WEIGHT not in model or len(model[WEIGHT]) >= len(longer[WEIGHT]):
        return model
    have = len(model[WEIGHT])
    return {
        name: torch.cat((tensor, longer[name][have:].to(tensor))) if name in (WEIGHT, BIAS) else tensor
        for name, tensor in model.items()
    }


def truncate(model: Weights, rows: int) -> dict[str, Tensor]:
    """Return the model with the first ``rows`` rows of its classifier only: a view, which shares memory.

    Raises
    ------
    ConfigError
        If the model has no linear classifier, or fewer rows.
    """
    have = len(_head(model))
    if not 0 < rows <= have:
        raise ConfigError(f"the classifier has {have} rows, so it cannot be cut to {rows}.")
    return {name: tensor[:rows] if name in (WEIGHT, BIAS) else tensor for name, tensor in model.items()}


def classifier_tensors(model: Weights) -> dict[str, Tensor]:
    """Return the classifier's tensors by name, the same ones: what a client may keep for itself.

    Raises
    ------
    ConfigError
        If the model has no linear classifier.
    """
    _head(model)
    return {name: model[name] for name in (WEIGHT, BIAS) if name in model}


def _head(model: Weights) -> Tensor:
    if WEIGHT not in model or model[WEIGHT].ndim != 2:
        raise ConfigError(
            f"a model that learns new classes needs a torch.nn.Linear named classifier, and this one has no {WEIGHT!r} "
            "of shape [classes, width]. Name its last layer so."
        )
    return model[WEIGHT]
