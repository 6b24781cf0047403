"""Files from elsewhere, in place of arrays or of an exported model: one clear error, whatever is in them."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from safetensors.torch import load_file, save_file

import fedkeep
from fedkeep.cli import main
from fedkeep.data.arrays import read_inputs_of_npz, read_npz
from fedkeep.errors import DataError, FedKeepError, RunError
from fedkeep.experiment.recipe_loader import load_recipe


def npz() -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x=np.arange(4000, dtype=np.float32).reshape(40, 100), y=np.arange(40) % 2)
    return buffer.getvalue()


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_npz_file_is_an_error_that_names_it(tmp_path: Path, seed: int) -> None:
    """Of flipped bits, those in the packed numbers, the names, the sizes and the directory."""
    random, content, path = np.random.default_rng(seed), bytearray(npz()), tmp_path / "own.npz"
    for place in random.integers(len(content), size=1 + seed % 3):
        content[place] ^= 1 << int(random.integers(8))
    path.write_bytes(content[: len(content) // 2] if seed % 10 == 9 else content)
    for read in (read_npz, read_inputs_of_npz):
        refused = ""
        try:
            read(path)  # what a zip file does not need may be damaged
        except DataError as error:
            refused = str(error)
        assert not refused or str(path) in refused


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, 99])
def test_packed_numbers_that_cannot_be_unpacked(tmp_path: Path, method: int) -> None:
    with zipfile.ZipFile(io.BytesIO(npz())) as archive:
        entry = archive.getinfo("x.npy")
    content = bytearray(npz())
    start = entry.header_offset + 30 + len("x.npy") + 20
    content[start : start + 200] = b"\xff" * 200
    if method == 99:
        for header, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
            at = content.index(header) + place
            content[at : at + 2] = method.to_bytes(2, "little")
    (tmp_path / "own.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"own\.npz cannot be read as a \.npz file .* Write it with"):
        fedkeep.load(str(tmp_path / "own.npz"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    recipe = load_recipe(tiny.write_recipe(folder), methods=["fedavg"], rounds=1)
    return fedkeep.export_model(fedkeep.run(recipe, out=folder / "run"), folder / "model", onnx=False)


CHANGES: dict[str, Any] = {
    "input": [None, [], 5, "x", {"shape": [1, 8, 8]}],
    "input.shape": [None, "188", [], [-1, 8, 8], [0], [1.5, 8, 8], [True, 8, 8], [2**40, 8, 8], [[1], 8, 8], {"a": 1}],
    "input.type": [None, [], "object", "uint16", {}],
    "input.std": [None, [0.0], [-1.0], [float("inf")]],
    "input.mean": [None, "0", [None], [float("nan")], ["0"], [0.1, 0.2], {}],
    "input.features": [5, [5], "a"],
    "network": [
        None,
        [],
        "mlp",
        {},
        {"name": 5},
        {"name": "no such"},
        {"name": "mlp", "hidden": "x"},
        {"name": "os:system"},
    ],
    "first_classes": [None, 0, -3, "ten", 1.5, 10**12, True, [10]],
    "rows_per_class": [None, 0, "1", 10**9, []],
    "label_names": [None, [], "0123456789", [1, 2], ["a"], {"a": 1}],
    "data": [[], "x", {"size": "x"}, {"nothing": 1}],
    "resizing": [[], "half", 5],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in CHANGES.items() for value in values], ids=str
)
def test_a_config_from_elsewhere_is_an_error_that_names_it(
    model: Path, tmp_path: Path, name: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    config = json.loads((model / "config.json").read_text())
    table = config
    for part in name.split(".")[:-1]:
        table = table[part]
    table[name.rpartition(".")[2]] = value
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    Image.new("L", (8, 8), 200).save(tmp_path / "one.png")
    with pytest.raises(FedKeepError) as caught:
        list(fedkeep.predict(folder, [tmp_path / "one.png"]))
    if name not in ("network", "data") and value != ["a"]:
        assert name in str(caught.value)
    assert main(["predict", str(folder), str(tmp_path / "one.png")]) == 1
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "5", "null", '"x"', "[" * 100_000, '{"input": 1e999}', "\x00", "{"])
def test_a_config_that_is_no_table(model: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    with pytest.raises(RunError, match=r"cannot read the model in .*Export it again"):
        fedkeep.load_model(tmp_path)


def test_weights_of_another_model_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    weights = {name: tensor + 1 for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(RunError, match=r"model\.safetensors is not the one that config\.json was written for"):
        fedkeep.load_model(tmp_path)


def test_all_that_is_wrong_with_a_config_is_told_at_once(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"first_classes": 0, "label_names": [], "resizing": "?"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match=r"first_classes should .*; label_names should .*; resizing should"):
        fedkeep.load_model(tmp_path)


def test_hidden_images_of_a_folder_are_not_predicted(model: Path, tmp_path: Path) -> None:
    from PIL import Image

    for name in ("1.png", "__MACOSX/2.png", ".hidden/3.png", "._1.png", "deep/4.jfif"):
        (tmp_path / "new" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / "new" / name, "JPEG" if name.endswith("jfif") else "PNG")
    found = [each.path.name for each in fedkeep.predict(model, [tmp_path / "new"])]
    assert found == ["1.png", "4.jfif"]
