"""The networks of a recipe: the server's network, and other networks of some clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkeep.data.catalog import data_folder
from fedkeep.data.combine import shared_classes
from fedkeep.errors import ConfigError
from fedkeep.models import Architecture, Pretrained, get_architecture
from fedkeep.models.custom import from_path
from fedkeep.options import as_table, build

MAX_RANGE = 1_000_000
"""The most clients in a range such as ``"3-7"``; a larger range is taken as one client's name."""


@dataclass(frozen=True)
class ClientModel:
    """A network that some clients have instead of the server's.

    ``clients``: The clients' names; ``"3-7"`` stands for ``"3"`` to ``"7"``.
    """

    clients: tuple[str, ...]
    model: Architecture


def model_to_table(model: Architecture) -> dict[str, Any]:
    """Return the table of a network in a recipe, as TOML can represent it."""
    return {"name": model.name, **as_table(model)}


def read_model(table: Mapping[str, Any], where: str, allow_code: bool, also: Iterable[str] = ()) -> Architecture:
    """Return the network that a table of a recipe describes.

    ``allow_code``: Let the name be ``package.module:function``, which is then imported.
    ``also``: What else the table may name, for error messages.
    """
    options = dict(table)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{where} needs a name.")
    if ":" in name and options:
        raise ConfigError(f"{where}: {name!r} is a model of your own, and takes no {', '.join(options)}. Leave it out.")
    if ":" in name:
        return from_path(name, allow_code=allow_code)
    return build(get_architecture(name), options, where, ("name", *also))


def read_client_models(entries: Any, allow_code: bool) -> tuple[ClientModel, ...]:
    """Return the networks in ``[[client_models]]`` of a recipe."""
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError("client_models must be tables, each under [[client_models]].")
    found = []
    for number, entry in enumerate(entries, start=1):
        place, rest = f"[[client_models]] {number}", dict(entry)
        clients = rest.pop("clients", None)
        if not isinstance(clients, list) or not clients or not all(isinstance(name, str) for name in clients):
            raise ConfigError(f'{place} needs clients, a list of names such as ["0", "1-4"], not {clients!r}.')
        found.append(ClientModel(tuple(clients), read_model(rest, place, allow_code, ["clients"])))
    return tuple(found)


def named_twice(models: Sequence[ClientModel]) -> str | None:
    """Return a client that has two networks, or None."""
    named = Counter(name for model in models for name in _names(model, ()))
    return next((name for name, count in named.items() if count > 1), None)


def client_architectures(models: Sequence[ClientModel], clients: Container[str]) -> dict[str, Architecture]:
    """Return by client the networks of those that do not have the server's."""
    own = {name: model.model for model in models for name in _names(model, clients)}
    if (unknown := next((name for name in own if name not in clients), None)) is not None:
        raise ConfigError(f"[[client_models]] names {unknown!r}, which is no client of this federation.")
    return own


def resolve_pretrained(model: Architecture, data_dir: str | Path | None) -> Architecture:
    """Return a network with the path of its pre-trained extractor, which may be a folder in the data folder.

    ``model``: The network; one without a pre-trained extractor is returned as it is.
    """
    return model.located(data_folder(data_dir)) if isinstance(model, Pretrained) else model


def pretrained_models(
    model: Architecture, clients: Sequence[ClientModel], data_dir: str | Path | None
) -> dict[str, Pretrained]:
    """Return the networks with a frozen pre-trained extractor.

    Returns: Networks by owner: ``""`` for the server, otherwise such as ``"clients 1-2"``.
    """
    models = {"": model} | {f"clients {', '.join(own.clients)}": own.model for own in clients}
    resolved = {owner: resolve_pretrained(network, data_dir) for owner, network in models.items()}
    return {owner: network for owner, network in resolved.items() if isinstance(network, Pretrained)}


def describe_extractor(model: Pretrained, label_names: Sequence[str]) -> str:
    """Describe a frozen extractor, and how many of a run's classes it has learned, judged by their names."""
    if not model.learned:
        return f"{model.about}; whether it learned classes of this run is not known"
    common = len(shared_classes(label_names, model.learned))
    return f"{model.about}; by their names it learned {common or 'none'} of this run's {len(label_names)} classes"


def select_client(models: Sequence[ClientModel], client: str) -> tuple[ClientModel, ...]:
    """Return the network of one client.

    Returns: Its network, or nothing for a client with the server's.
    """
    return tuple(ClientModel((client,), model.model) for model in models if client in _names(model, (client,)))


def _names(model: ClientModel, clients: Container[str]) -> list[str]:
    """Return the names of all clients, with ranges expanded; a client may itself be called "3-7"."""
    names: list[str] = []
    for name in model.clients:
        first, dash, last = name.partition("-")
        is_range = name not in clients and dash and first.isdecimal() and last.isdecimal()
        if is_range and 0 <= int(last) - int(first) < MAX_RANGE:
            names += map(str, range(int(first), int(last) + 1))
        else:
            names.append(name)
    return names
