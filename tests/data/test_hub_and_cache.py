"""Loading from the Hub, decoding once, and what is said without a network."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_sources import encoded, image, own_folders, pillow, write_femnist, write_mnist

from fedkeep.data import from_arrays
from fedkeep.data.array_store import find, keep
from fedkeep.data.cache import cache_folder, digest, entry_path
from fedkeep.data.loading import load
from fedkeep.errors import DataError
from fedkeep.experiment.build import load_data


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(tmp_path, monkeypatch)


def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", fail)


def hub_with(monkeypatch: pytest.MonkeyPatch, commit: str, splits: Any = None) -> list[str | None]:
    """Let the Hub answer with a commit, and `datasets` with these splits; return the commits that were downloaded."""
    library = pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *a, **options: SimpleNamespace(sha=commit))
    downloaded: list[str | None] = []

    def download(hub_id: str, revision: str | None = None) -> Any:
        downloaded.append(revision)
        return splits

    monkeypatch.setattr(library, "load_dataset", download)
    return downloaded


# --- the cache -----------------------------------------------------------------------------------------------------


def test_second_load_does_not_decode_and_is_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_femnist(tmp_path, {"train": 62, "test": 4})
    first = load("femnist", data_dir=tmp_path)
    for needed in ("PIL.Image", "datasets"):
        monkeypatch.setitem(sys.modules, needed, None)  # which decoding would import
    second = load("femnist", data_dir=tmp_path)
    for split in ("train", "test"):
        mine, theirs = getattr(first, split), getattr(second, split)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    about = ("name", "label_names", "mean", "std", "note")
    assert [getattr(first, name) for name in about] == [getattr(second, name) for name in about]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says what lies where")
def test_processes_share_the_memory_of_a_data_set(tmp_path: Path) -> None:
    """The one that decodes it too: what it holds is the file of the cache, which the system keeps once for all."""
    write_femnist(tmp_path, {"train": 62, "test": 4})
    for dataset in (load("femnist", data_dir=tmp_path), load("femnist", data_dir=tmp_path)):
        (entry,) = (tmp_path / "cache").iterdir()
        assert str(entry) in mapped_from(dataset.train["input"])


def mapped_from(tensor: torch.Tensor) -> str:
    """Return the line of the system's map of this process in which a tensor lies."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line
    return ""


def test_changed_files_are_decoded_again(tmp_path: Path) -> None:
    write_mnist(tmp_path, train=(0, 1, 2, 3))
    assert load("mnist", data_dir=tmp_path).train["label"].tolist() == [0, 1, 2, 3]
    write_mnist(tmp_path, train=(3, 2, 1, 0))
    assert load("mnist", data_dir=tmp_path).train["label"].tolist() == [3, 2, 1, 0]


def test_folders_of_the_same_name_size_and_time_are_two_data_sets(tmp_path: Path) -> None:
    for site, label in (("a", "x,y"), ("b", "y,x")):
        folder = tmp_path / site / "data"
        folder.mkdir(parents=True)
        first, second = label.split(",")
        for split in ("train", "test"):
            (folder / f"{split}.csv").write_text(f"age,label\n1,{first}\n2,{second}\n")
            os.utime(folder / f"{split}.csv", (10**9, 10**9))  # as an archive restores it
    loaded = [load(str(tmp_path / site / "data")) for site in "ab"]
    assert [dataset.train["label"].tolist() for dataset in loaded] == [[0, 1], [1, 0]]


def test_examples_may_share_memory() -> None:
    x, y = torch.arange(18.0).reshape(6, 3), torch.arange(6) % 2
    stored = find(keep(from_arrays(x, y, x, y)))
    assert torch.equal(stored.train["input"], x)
    assert torch.equal(stored.test["input"], x)


def test_examples_given_in_python_are_found_by_later_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    name = keep(load("digits"))
    monkeypatch.setattr("fedkeep.data.cache._VERSION", 99)
    assert find(name).name == "digits"
    assert (
        entry_path("arrays-0", "given", "", decoding=2).name == "arrays-0-a085f328c3f6d7f1-12ae32cb1ec02d01.safetensors"
    )


@pytest.mark.parametrize("damage", ["truncated", "garbage", "other metadata"])
def test_damaged_entry_is_made_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    write_mnist(tmp_path)
    first = load("mnist", data_dir=tmp_path)
    (entry,) = (tmp_path / "cache").iterdir()
    whole = entry.read_bytes()
    entry.unlink()  # and not changed under the feet of the data set that was read from it
    if damage == "truncated":
        entry.write_bytes(whole[:-7])
    elif damage == "garbage":
        entry.write_bytes(b"x" * 100)
    else:
        save_file({"train.image": torch.zeros(1)}, entry)
    again = load("mnist", data_dir=tmp_path)
    assert torch.equal(first.train["input"], again.train["input"])
    assert "is made again" in caplog.text
    caplog.clear()
    load("mnist", data_dir=tmp_path)
    assert not caplog.text
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".safetensors"]


@pytest.mark.parametrize("place", ["name of a class", "pixel", "label of the test split"])
def test_one_flipped_bit_of_an_entry_is_noticed(tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture) -> None:
    write_mnist(tmp_path)
    first = load("mnist", data_dir=tmp_path)
    (entry,) = (tmp_path / "cache").iterdir()
    content = bytearray(entry.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    offsets = json.loads(content[8:header])
    wanted = {"pixel": "train.input", "label of the test split": "test.label"}.get(place, "")
    at = content.index(b"number 1") + 7 if not wanted else header + offsets[wanted]["data_offsets"][0]
    content[at] ^= 1
    entry.unlink()
    entry.write_bytes(content)
    again = load("mnist", data_dir=tmp_path)
    assert digest(again) == digest(first)
    assert "is damaged" in caplog.text
    assert "is made again" in caplog.text


@pytest.mark.parametrize("damage", ["flipped bit", "another data set's file"])
def test_examples_given_in_python_are_those_or_none(tmp_path: Path, damage: str) -> None:
    first, second = (from_arrays(np.full((10, 3), fill, np.float32), [0, 1] * 5) for fill in (1, 2))
    name = keep(first)
    (entry,) = (tmp_path / "cache").iterdir()
    content = bytearray(entry.read_bytes())
    content[-1] ^= 1
    if damage != "flipped bit":
        keep(second)
        content = bytearray(next(path for path in (tmp_path / "cache").iterdir() if path != entry).read_bytes())
    entry.unlink()
    entry.write_bytes(content)
    with pytest.raises(DataError, match="Give them again"):
        find(name)
    assert digest(find(keep(first))) == digest(first)


def same_size_and_time(path: Path, content: bytes) -> None:
    """Write a file as an archive with one time for all of its files does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (10**9, 10**9))


@pytest.mark.parametrize("kind", ["images", "clients", "parquet"])
def test_a_corrected_file_of_the_same_size_and_time_is_read(tmp_path: Path, kind: str) -> None:
    def write_all(turned: bool) -> Path:
        if kind == "images":
            for label in "ab":
                for row in range(10):
                    bright = (label == "a") != turned
                    same_size_and_time(tmp_path / "own" / label / f"{row}.bmp", encoded(200 * bright + row, kind="BMP"))
        elif kind == "clients":
            for site in "xy":
                text = "".join(f"{row},{'ab'[(row + turned) % 2]}\n" for row in range(10))
                same_size_and_time(tmp_path / "own" / "clients" / f"{site}.csv", f"v,label\n{text}".encode())
        else:
            write_mnist(tmp_path / "own", train=(1, 0, 2, 3) if turned else (0, 1, 2, 3))
            for file in (tmp_path / "own").rglob("*.parquet"):
                os.utime(file, (10**9, 10**9))
        return tmp_path / "own" / ("ylecun/mnist" if kind == "parquet" else "")

    loaded = [digest(load_data(str(write_all(turned)))) for turned in (False, True, False)]
    assert loaded[0] == loaded[2] != loaded[1]


def test_the_same_files_elsewhere_are_the_same_data(tmp_path: Path) -> None:
    for place in ("here", "there"):
        same_size_and_time(tmp_path / place / "own.csv", b"v,label\n" + b"1,a\n2,b\n" * 9)
        load(str(tmp_path / place / "own.csv"))
    assert len([*(tmp_path / "cache").iterdir()]) == 1


def test_cache_that_cannot_be_written_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    monkeypatch.setenv("FEDKEEP_CACHE", str(tmp_path / "file" / "cache"))
    write_mnist(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load("mnist", data_dir=tmp_path).num_classes == 4
    assert "Set FEDKEEP_CACHE" in caplog.text


def test_cache_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDKEEP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder() == tmp_path / "fedkeep"


# --- the Hub -------------------------------------------------------------------------------------------------------


def test_unreachable_hub_names_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    no_hub(monkeypatch)
    with pytest.raises(DataError) as caught:
        load("tiny-imagenet")
    message = str(caught.value)
    assert "zh-plus/tiny-imagenet/train.parquet and zh-plus/tiny-imagenet/valid.parquet" in message
    for part in ("--data-dir", "FEDKEEP_DATA", "connect", "no route to host"):
        assert part in message


def test_forbidden_hub_fails_at_once_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets.config")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    started = time.perf_counter()
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set, which forbids it: unset it"):
        load("cinic10")
    assert time.perf_counter() - started < 5


def test_set_that_the_hub_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"emnist_letters_a_to_j/train\.parquet"):
        load("emnist-letters-a-to-j")


def test_hub_data_are_cached_by_commit_and_used_when_it_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = pytest.importorskip("datasets")
    monkeypatch.delenv("HF_HUB_DISABLE_TELEMETRY", raising=False)
    features = library.Features(
        img=library.Image(),
        fine_label=library.ClassLabel(names=["apple", "bee", "cup"]),
        other=library.Value("string"),
    )
    splits = {}
    for split, labels in (("train", [0, 1, 2]), ("test", [2, 1, 0])):
        pictures = [pillow.fromarray(np.full((4, 4, 3), 9 * label, np.uint8)) for label in labels]
        rows = {"img": pictures, "fine_label": labels, "other": ["x"] * 3}
        splits[split] = library.Dataset.from_dict(rows, features=features)
    downloaded = hub_with(monkeypatch, "abc", splits)
    dataset = load("cifar100")
    assert dataset.label_names == ("apple", "bee", "cup")
    assert dataset.train["input"][:, 1, 0, 0].tolist() == [0, 9, 18]
    load("uoft-cs/cifar100")
    assert downloaded == ["abc"]  # the second came from the cache
    downloaded = hub_with(monkeypatch, "def", splits)
    load("cifar100")
    assert downloaded == ["def"]
    no_hub(monkeypatch)
    assert load("cifar100").num_classes == 3
    assert "is the copy that was loaded last" in caplog.text
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"


def test_a_hub_that_falls_silent_after_its_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("datasets")
    hub_with(monkeypatch, "abc")

    def fail(*arguments: Any, **options: Any) -> Any:
        raise ConnectionError("connection reset")

    monkeypatch.setattr(library, "load_dataset", fail)
    with pytest.raises(DataError, match=r"cannot be reached \(connection reset\)"):
        load("someone/shapes")


def test_switched_off_hub_gives_what_datasets_has_in_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("datasets")
    features = library.Features(image=library.Image(), label=library.ClassLabel(names=["a", "b"]))
    table = library.Dataset.from_dict({"image": [image(i) for i in range(20)], "label": [0, 1] * 10}, features=features)
    downloaded = hub_with(monkeypatch, "abc", {"train": table})
    no_hub(monkeypatch)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert len(load("someone/shapes").train["label"]) == 16
    assert downloaded == [None]


def skin_images(name: str, numbers: Sequence[int]) -> Any:
    """Return a split as the Hub has HAM10000: two images of each lesion, three diagnoses."""
    library = pytest.importorskip("datasets")
    columns: dict[str, list[Any]] = {
        "image": [image(number, (60, 45), "RGB") for number in numbers],
        "image_id": [f"ISIC_{number}" for number in numbers],
        "lesion_id": [f"HAM_{number // 2}" for number in numbers],
        "dx": [("melanoma", "melanocytic_Nevi", "bcc")[number % 3] for number in numbers],
    }
    text = {column: library.Value("string") for column in ("image_id", "lesion_id", "dx")}
    return library.Dataset.from_dict(columns, features=library.Features(image=library.Image(), **text))


@pytest.fixture
def skin(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    splits = {"train": skin_images("train", range(60)), "test": skin_images("test", range(40, 80))}
    hub_with(monkeypatch, "abc", splits)
    return splits


@pytest.mark.usefixtures("skin")
def test_a_hub_id_means_the_first_known_set_of_it() -> None:
    small, large = load("marmal88/skin_cancer"), load("ham10000-64")
    assert (small.name, small.shape) == ("ham10000", (3, 32, 32))
    assert (large.name, large.shape) == ("ham10000-64", (3, 64, 64))
    assert torch.equal(small.train["label"], large.train["label"])


@pytest.mark.usefixtures("skin")
def test_ham10000_from_the_hub_repeats_no_image_and_shares_no_lesion() -> None:
    dataset = load("ham10000")
    expected = {n for n in range(80) if hashlib.sha256(f"HAM_{n // 2}".encode()).digest()[0] < 51}
    assert 0 < len(expected) < 40
    assert set(dataset.test["input"][:, 0, 0, 0].tolist()) == expected
    assert sorted(dataset.train["input"][:, 0, 0, 0].tolist()) == sorted(set(range(80)) - expected)
    assert dataset.shape == (3, 32, 32)
    assert dataset.label_names == ("bcc", "mel", "nv")
    wanted = [(1, 2, 0)[number % 3] for number in dataset.train["input"][:, 0, 0, 0].tolist()]
    assert dataset.train["label"].tolist() == wanted
