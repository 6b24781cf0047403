"""Small data sets on disk, as tests of loading need them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pillow = pytest.importorskip("PIL.Image")


def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a test its own cache, and no data folder of the person who runs it."""
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "cache"))
    for name in ("FEDKEEP_DATA", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def encoded(value: int, size: tuple[int, int] = (4, 4), mode: str = "L", kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    colour = value if mode in ("L", "I;16") else (value, 0, 255)
    pillow.new(mode, size, colour).save(buffer, kind)
    return buffer.getvalue()


def image(*arguments: Any, **options: Any) -> dict[str, Any]:
    return {"bytes": encoded(*arguments, **options), "path": None}


def write(path: Path, columns: Mapping[str, Any], classes: Mapping[str, Sequence[str]]) -> None:
    """Write a Parquet file as Hugging Face `datasets` does, with its features in the metadata."""
    features: dict[str, Any] = {}
    for name, values in columns.items():
        features[name] = {"_type": "Value", "dtype": "string"}
        if name in classes:
            features[name] = {"_type": "ClassLabel", "names": list(classes[name])}
        elif isinstance(values[0], dict):
            features[name] = {"_type": "Image"}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(dict(columns)).replace_schema_metadata(metadata), path)


def write_mnist(root: Path, train: Sequence[int] = (0, 1, 2, 3, 0), test: Sequence[int] = (3, 1, 2, 0)) -> Path:
    location = root / "ylecun" / "mnist"
    names = [f"number {i}" for i in range(10)]
    for split, labels in (("train", train), ("test", test)):
        rows = {"image": [image(10 * label + i) for i, label in enumerate(labels)], "label": list(labels)}
        write(location / f"{split}.parquet", rows, {"label": names})
    return location


def write_femnist(root: Path, splits: Mapping[str, int], characters: Sequence[str] = ()) -> None:
    characters = characters or [f"c{i}" for i in range(62)]
    for split, rows in splits.items():
        columns = {
            "image": [image(i % 200) for i in range(rows)],
            "writer_id": [("f07", "a11", "zz")[i % 3] for i in range(rows)],
            "character": [i % 62 for i in range(rows)],
        }
        write(root / "flwrlabs" / "femnist" / f"{split}.parquet", columns, {"character": characters})
