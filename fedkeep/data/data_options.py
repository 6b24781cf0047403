"""How files of a user's own are read: the options of ``[data]`` in a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedkeep.errors import ConfigError
from fedkeep.options import Options, option


@dataclass(frozen=True)
class DataOptions(Options):
    """Columns, sizes and scaling of data that are not known by name.

    Images are resized and text is turned into token ids while they are read; the files stay as they are.
    """

    label: str = option("", "column of the classes; empty: the one that is declared, or called label, class or target")
    client: str = option("", "column that says whose an example is; empty: 'client', if there is such a column")
    group: str = option("", "column of what belongs together, such as a patient: only whole groups are held out")
    split: str = option("", "column that marks rows as train or test; empty: there is none")
    size: tuple[int, ...] = option((), "height and width in pixels to which all images are resized", low=1, high=4096)
    columns: tuple[str, ...] = option((), "columns of a table that are the input; empty: all that are left")
    exclude: tuple[str, ...] = option((), "columns of a table that are not used, such as ids of patients")
    scaling: Literal["standard", "none"] = option(
        "standard", "columns of numbers get mean 0 and standard deviation 1 over all training rows, or stay as they are"
    )
    text: str = option("", "column of text, of which each word becomes a token id")
    length: int = option(64, "token ids of a text: longer ones are cut, shorter ones filled with 0", low=1, high=65536)
    vocabulary: int = option(10_000, "number of token ids into which words are hashed", low=2, high=2**31 - 1)

    def check(self) -> None:
        """Raise `ConfigError` if options contradict each other."""
        if self.size and len(self.size) != 2:
            raise ConfigError(f"data.size is a height and a width, such as [64, 64], not {list(self.size)}.")
        if self.text and self.columns:
            raise ConfigError("data.text names the only input: leave data.columns out.")
        single = (self.label, self.client, self.group, self.split, self.text)
        named = [name for name in (*single, *self.columns, *self.exclude) if name]
        twice = next((name for name in named if named.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"[data] names the column {twice!r} for two purposes. Name it once.")
