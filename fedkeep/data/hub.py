"""Data sets from the Hugging Face Hub."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedkeep.data.splits import Split, needed
from fedkeep.errors import DataError

log = logging.getLogger(__name__)

_TIMEOUT = 8.0
_OFF = ("", "0", "false", "no", "off")


class Unreachable(Exception):
    """The Hub did not answer; the message says how."""


def offline() -> bool:
    """Return whether the user has forbidden the network to the Hub's library (``HF_HUB_OFFLINE``)."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    return any(os.environ.get(name, "").lower() not in _OFF for name in names)


def answers_offline() -> bool:
    """Return whether the Hub's library itself is switched off, so that it looks in its own cache and nowhere else.

    It reads the environment when it is imported; later changes do not reach it.
    """
    return offline() and bool(needed("datasets.config", "Loading from the Hugging Face Hub").HF_HUB_OFFLINE)


def revision(hub_id: str) -> str:
    """Ask the Hub for the current commit of a data set: one short request, so that a missing network shows at once.

    Raises
    ------
    Unreachable
        When the Hub does not answer.
    DataError
        When it answers that there is no such data set, or that it may not be read.
    MissingExtra
        Without Hugging Face `datasets`.
    """
    if offline():
        raise Unreachable("the network is switched off for it")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    needed("datasets", "Loading from the Hugging Face Hub")
    hub = needed("huggingface_hub", "Loading from the Hugging Face Hub")
    errors = needed("huggingface_hub.errors", "Loading from the Hugging Face Hub")
    try:
        return str(hub.HfApi().dataset_info(hub_id, timeout=_TIMEOUT).sha)
    except (errors.RepositoryNotFoundError, errors.GatedRepoError, errors.HFValidationError) as error:
        raise DataError(
            f"The Hugging Face Hub gives no access to a data set {hub_id!r}. Check the spelling; for a private or "
            "gated one, run `hf auth login` and accept its terms on its page."
        ) from error
    except Exception as error:  # what the HTTP library raises differs between its versions
        raise Unreachable(_first_line(error)) from error


def hub_splits(hub_id: str, commit: str | None) -> dict[str, Split]:
    """Download a data set, or take it from the Hub library's own cache.

    Parameters
    ----------
    hub_id : ``"owner/name"``.
    commit : the version; None for the one that the cache has.

    Raises
    ------
    Unreachable
        When the Hub stops answering and the cache does not have it.
    DataError
        For a data set that `datasets` cannot load.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    library = needed("datasets", "Loading from the Hugging Face Hub")
    try:
        loaded = library.load_dataset(hub_id, revision=commit)
    except (ConnectionError, TimeoutError) as error:
        raise Unreachable(_first_line(error)) from error
    except (OSError, ValueError, RuntimeError, library.exceptions.DatasetsError) as error:
        raise DataError(f"The data set {hub_id!r} cannot be loaded from the Hugging Face Hub: {error}") from error
    return {str(name): _split(library, hub_id, str(name), table) for name, table in loaded.items()}


def _split(library: Any, hub_id: str, name: str, table: Any) -> Split:
    features: Mapping[str, Mapping[str, Any]] = {
        column: feature if isinstance(feature, Mapping) else {} for column, feature in table.features.to_dict().items()
    }

    def read(column: str) -> Iterator[Sequence[Any]]:
        chosen = table.select_columns([column])
        if features[column].get("_type") == "Image":
            chosen = chosen.cast_column(column, library.Image(decode=False))
        for batch in chosen.iter(batch_size=1000):
            yield batch[column]

    return Split(f"{hub_id} (split {name!r})", len(table), features, read)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
