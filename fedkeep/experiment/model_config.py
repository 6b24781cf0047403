"""The networks of a recipe: the server's, and those of clients that have another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
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
"""Clients that one range of names may stand for; what would be more is a name."""


@dataclass(frozen=True)
class ClientModel:
    """A network that some clients have instead of the server's.

    Attributes
    ----------
    clients : their names; ``"3-7"`` stands for ``"3"`` to ``"7"``.
    model : what builds it.
    """

    clients: tuple[str, ...]
    model: Architecture

    def to_table(self) -> dict[str, Any]:
        """Return it as a recipe writes it."""
        return {"clients": list(self.clients), **model_to_table(self.model)}


def model_to_table(model: Architecture) -> dict[str, Any]:
    """Return a network as a recipe writes it."""
    return {"name": model.name, **as_table(model)}


def read_model(table: Mapping[str, Any], where: str, allow_code: bool) -> Architecture:
    """Return the network that a table of a recipe names, with its options; raise `ConfigError` with what is wrong."""
    options = dict(table)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{where} needs a name.")
    return from_path(name, allow_code=allow_code) if ":" in name else build(get_architecture(name), options, where)


def read_client_models(entries: Any, where: str, allow_code: bool) -> tuple[ClientModel, ...]:
    """Return the networks that a recipe gives to some clients; raise `ConfigError` with what is wrong."""
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(f"{where}: client_models must be tables, each under [[client_models]].")
    found = []
    for number, entry in enumerate(entries, start=1):
        place = f"{where}, [[client_models]] {number}"
        clients = entry.get("clients")
        if not isinstance(clients, list) or not clients or not all(isinstance(name, str) for name in clients):
            raise ConfigError(f'{place} needs clients, a list of names such as ["0", "1-4"], not {clients!r}.')
        rest = {key: value for key, value in entry.items() if key != "clients"}
        found.append(ClientModel(tuple(clients), read_model(rest, place, allow_code)))
    return tuple(found)


def check_clients(models: Sequence[ClientModel]) -> None:
    """Raise `ConfigError` if a client would get two networks."""
    named = Counter(name for model in models for name in _names(model, ()))
    twice = next((name for name, count in named.items() if count > 1), None)
    if twice is not None:
        raise ConfigError(f"[[client_models]] gives client {twice!r} two networks. Name it once.")


def client_architectures(models: Sequence[ClientModel], clients: Container[str]) -> dict[str, Architecture]:
    """Return the networks of clients that have another than the server's, by client.

    Raises
    ------
    ConfigError
        For a name that is no client's.
    """
    own = {name: model.model for model in models for name in _names(model, clients)}
    stranger = next((name for name in own if name not in clients), None)
    if stranger is not None:
        raise ConfigError(f"[[client_models]] names {stranger!r}, which is no client of this federation.")
    return own


def resolve_pretrained(model: Architecture, data_dir: str | Path | None) -> Architecture:
    """Return a network with its pre-trained extractor found, which may be a folder in the data folder."""
    return model.located(data_folder(data_dir)) if isinstance(model, Pretrained) else model


def pretrained_models(
    model: Architecture, clients: Sequence[ClientModel], data_dir: str | Path | None
) -> dict[str, Pretrained]:
    """Return the networks whose extractor is frozen, found, by whose they are: "" (the server's), "clients 1-2"."""
    models = {"": model} | {f"clients {', '.join(own.clients)}": own.model for own in clients}
    found = {whose: resolve_pretrained(one, data_dir) for whose, one in models.items()}
    return {whose: one for whose, one in found.items() if isinstance(one, Pretrained)}


def describe_extractor(model: Pretrained, label_names: Sequence[str]) -> str:
    """Return what a frozen extractor is, and how many of a run's classes it has learned, as far as names tell."""
    if not model.learned:
        return f"{model.about}; whether it learned classes of this run is not known"
    both = len(shared_classes(label_names, model.learned))
    return f"{model.about}; by their names it learned {both or 'none'} of this run's {len(label_names)} classes"


def select_client(models: Sequence[ClientModel], client: str) -> tuple[ClientModel, ...]:
    """Return what these say of one client alone."""
    return tuple(ClientModel((client,), model.model) for model in models if client in _names(model, (client,)))


def _names(model: ClientModel, clients: Container[str]) -> list[str]:
    """Return the names that are meant; a client that is itself called "3-7" is taken at its word."""
    found: list[str] = []
    for name in model.clients:
        first, dash, last = name.partition("-")
        is_range = name not in clients and dash and first.isdecimal() and last.isdecimal()
        if is_range and 0 <= int(last) - int(first) < MAX_RANGE:
            found += map(str, range(int(first), int(last) + 1))
        else:
            found.append(name)
    return found
