"""Classifiers that grow: adding rows for new classes, and truncating to those of old classes.

Classes are numbered in their order of arrival, so the rows of old classes come first. All functions work on any model
whose classifier is a linear layer with the name ``classifier``, such as `Network`. There may be several adjacent rows
for each class (PASS makes four of each class by rotation); the functions count rows, not classes.
"""

import math

import torch
from torch import Tensor, nn

from fedkeep.errors import ConfigError
from fedkeep.models.weights import Weights

WEIGHT, BIAS = "classifier.weight", "classifier.bias"


@torch.no_grad()
def expand_rows(model: Weights, rows: int, rng: torch.Generator) -> dict[str, Tensor]:
    """Add rows to a model's classifier.

    The weights of a new row are uniform within +-sqrt(3 / width), which is Kaiming's rule for a linear layer, and its
    bias is 0, as in the code of TARGET (Zhang et al., 2023). All other tensors stay the same.

    ``model``: A model with ``classifier.weight`` [old rows, width] and, optionally, ``classifier.bias`` [old rows].
    ``rows``: Number of rows afterwards; at least the old number.
    ``rng``: A generator on the CPU that is derived from a name (see `fedkeep._utils.seeds`), so that everyone gets the
        same rows.
    """
    old = _head(model)
    num_new, width = rows - len(old), old.shape[1]
    if num_new < 0:
        raise ConfigError(f"the classifier has {len(old)} rows already and cannot grow to {rows}.")
    limit = math.sqrt(3 / width)
    new = (2 * torch.rand(num_new, width, generator=rng) - 1) * limit
    head = {WEIGHT: torch.cat((old, new.to(old)))}
    if BIAS in model:
        head[BIAS] = torch.cat((model[BIAS], model[BIAS].new_zeros(num_new)))
    return {name: head.get(name, tensor) for name, tensor in model.items()}


@torch.no_grad()
def add_views(model: Weights, rows: int, rng: torch.Generator) -> dict[str, Tensor]:
    """Replace each row of a model's classifier by several rows: the row itself, then new rows as from `expand_rows`.

    So row number c * rows is the old row c.
    """
    classes = len(_head(model))
    expanded = expand_rows(model, classes * rows, rng)
    numbers = torch.arange(classes * rows)
    order = torch.cat((numbers[:classes, None], numbers[classes:].view(classes, rows - 1)), dim=1).flatten()
    return {name: tensor[order] if name in (WEIGHT, BIAS) else tensor for name, tensor in expanded.items()}


@torch.no_grad()
def expand_like(model: Weights, longer: Weights) -> Weights:
    """Add the rows to a model's classifier that another model has beyond them.

    ``model``: The model; it may be of any form if there is nothing to add.
    ``longer``: A model of the same architecture, whose first rows belong to the same classes.
    Returns: The model with more rows; ``model`` itself if there are none to add.
    """
    if WEIGHT not in model or len(model[WEIGHT]) >= len(longer[WEIGHT]):
        return model
    old_rows = len(model[WEIGHT])
    return {
        name: torch.cat((tensor, longer[name][old_rows:].to(tensor))) if name in (WEIGHT, BIAS) else tensor
        for name, tensor in model.items()
    }


def truncate(model: Weights, rows: int) -> dict[str, Tensor]:
    """Keep only the first rows of a model's classifier.

    Returns: A view of the model, which shares its memory.
    """
    available = len(_head(model))
    if not 0 < rows <= available:
        raise ConfigError(f"the classifier has {available} rows, so it cannot be cut to {rows}.")
    return {name: tensor[:rows] if name in (WEIGHT, BIAS) else tensor for name, tensor in model.items()}


def resize_classifier(network: nn.Module, model: Weights) -> None:
    """Give a network's classifier as many rows as a model has; their values are arbitrary.

    ``network``: The network, which is changed; one without a linear layer named ``classifier`` is left as it is.
    """
    head = getattr(network, "classifier", None)
    if not isinstance(head, nn.Linear) or WEIGHT not in model or head.out_features == len(model[WEIGHT]):
        return
    head.out_features = len(model[WEIGHT])
    head.weight = nn.Parameter(head.weight.new_zeros(head.out_features, head.in_features))
    if head.bias is not None:
        head.bias = nn.Parameter(head.bias.new_zeros(head.out_features))


def check_growing(network: nn.Module, classes: int, who: str) -> None:
    """Raise `ConfigError` for a network whose classifier cannot get rows for new classes.

    ``classes``: Number of classes of the first task.
    """
    head = getattr(network, "classifier", None)
    rows = [getattr(head, name) for name in ("weight", "bias") if getattr(head, name, None) is not None]
    plain = isinstance(head, nn.Linear) and {*map(id, rows)} <= {*map(id, head.parameters())}
    others = [*head.parameters(), *head.buffers()] if isinstance(head, nn.Module) else []
    by_class = [one for one in others if classes in one.shape and not any(one is row for row in rows)]
    if isinstance(head, nn.Linear) and plain and head.out_features == classes and not by_class:
        if all(row.requires_grad for row in rows):
            return
        why = "is frozen (requires_grad=False). Train it, weight and bias"
    else:
        why = (
            "must be a torch.nn.Linear with a plain weight (no weight_norm), whose output is the logits: it gets a row "
            "for each new class. End forward with it"
        )
    raise ConfigError(f"with tasks, the last layer of the network {who} {why}, or leave [tasks] out.")


def classifier_tensors(model: Weights) -> dict[str, Tensor]:
    """Return the tensors of a model's classifier.

    Returns: The same tensors by name.
    """
    _head(model)
    return {name: model[name] for name in (WEIGHT, BIAS) if name in model}


def _head(model: Weights) -> Tensor:
    if WEIGHT not in model or model[WEIGHT].ndim != 2:
        raise ConfigError(
            f"a model that learns new classes needs a torch.nn.Linear named classifier, and this one has no {WEIGHT!r} "
            "of shape [classes, width]. Name its last layer like that."
        )
    return model[WEIGHT]
