"""Folders of images as people have them: what is read, what is left out and told, and what is refused."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_sources import encoded, own_folders, pillow, write

from fedkeep.data import DataOptions
from fedkeep.data.loading import load
from fedkeep.errors import DataError


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(tmp_path, monkeypatch)


def folder(root: Path, rows: int = 5) -> Path:
    """Write two classes of a few images each."""
    for number, name in enumerate("ab"):
        (root / name).mkdir(parents=True)
        for row in range(rows):
            (root / name / f"{row}.png").write_bytes(encoded(100 * number + row))
    return root


def count(root: Path) -> int:
    dataset = load(str(root))
    return len(dataset.train["label"]) + len(dataset.test["label"])


@pytest.mark.parametrize(("train", "test"), [("Train", "TEST"), ("training", "testing"), ("train", "Val")])
def test_folders_of_splits_in_other_spellings(tmp_path: Path, train: str, test: str) -> None:
    folder(tmp_path / train, 5)
    folder(tmp_path / test, 2)
    dataset = load(str(tmp_path))
    assert (len(dataset.train["label"]), len(dataset.test["label"]), dataset.label_names) == (10, 4, ("a", "b"))


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    folder(tmp_path)
    folder(tmp_path / "other")
    (tmp_path / "other" / "a").rename(tmp_path / "Training")
    (tmp_path / "other" / "b").rename(tmp_path / "Testing")
    (tmp_path / "other").rmdir()
    assert load(str(tmp_path)).label_names == ("Testing", "Training", "a", "b")


# --- transparency --------------------------------------------------------------------------------------------------


def clear_pixel(mode: str, colour: int) -> Any:
    """An image of one colour in which a single pixel is half or fully transparent."""
    alpha = np.full((4, 4), 255, np.uint8)
    alpha[1, 2] = 128
    if mode == "RGBA":
        return pillow.fromarray(np.dstack([np.full((4, 4, 3), colour, np.uint8), alpha]), "RGBA")
    if mode == "LA":
        return pillow.fromarray(np.dstack([np.full((4, 4), colour, np.uint8), alpha]), "LA")
    grey = pillow.fromarray(np.where(alpha < 255, 7, colour).astype(np.uint8), "L")
    return grey.convert({"tRNS of P": "P", "tRNS of L": "L", "tRNS of RGB": "RGB"}[mode])


@pytest.mark.parametrize("colour", [0, 128, 255])
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "GIF"])
@pytest.mark.parametrize("mode", ["RGBA", "LA", "tRNS of P", "tRNS of L", "tRNS of RGB"])
def test_transparent_pixels_are_refused_whatever_colour_they_have(
    tmp_path: Path, mode: str, kind: str, colour: int
) -> None:
    options: dict[str, Any] = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    image = clear_pixel(mode, colour)
    if mode.startswith("tRNS"):
        if kind == "WEBP" or kind == "TIFF" or (kind == "GIF" and mode == "tRNS of RGB"):
            pytest.skip("the format has no such transparency")
        options["transparency"] = (7, 7, 7) if mode == "tRNS of RGB" else 7
    elif (kind, mode) == ("GIF", "LA"):
        image = image.convert("RGBA")
    if kind == "GIF" and image.mode == "RGBA":
        image.putalpha(image.getchannel("A").point(lambda value: 255 * (value == 255)))  # it knows no halves
    root = folder(tmp_path / "d")
    image.save(root / "b" / f"4.{kind.lower()}", kind, **options)
    with pytest.raises(DataError, match=r"row \d+ \(.*\) has transparent pixels.*-alpha remove"):
        load(str(root))


@pytest.mark.parametrize(("mode", "channels"), [("RGBA", 3), ("LA", 1), ("P", 3)])
def test_an_alpha_of_255_everywhere_is_nothing(tmp_path: Path, mode: str, channels: int) -> None:
    root = tmp_path / "d"
    for name, colour in (("a", 10), ("b", 200)):
        (root / name).mkdir(parents=True)
        for row in range(5):
            image = pillow.new("L", (4, 4), colour).convert(mode)
            # A palette may name a transparent colour that no pixel has.
            image.save(root / name / f"{row}.png", **({"transparency": 3} if mode == "P" else {}))
    dataset = load(str(root))
    assert dataset.shape == (channels, 4, 4)
    assert dataset.train["input"].unique().tolist() == [10, 200]


def test_transparent_images_in_parquet_files_are_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    clear_pixel("RGBA", 9).save(path)
    images = [{"bytes": path.read_bytes(), "path": None}, {"bytes": encoded(1, mode="RGB"), "path": None}] * 2
    write(tmp_path / "d" / "train.parquet", {"image": images, "label": ["a", "b"] * 2}, {})
    with pytest.raises(DataError, match="row 0, row 2 have transparent pixels"):
        load(str(tmp_path / "d"))


# --- animations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_animations_are_counted(tmp_path: Path, kind: str) -> None:
    root = folder(tmp_path / "d")
    first, second = (pillow.new("RGB", (4, 4), colour) for colour in ("red", "blue"))
    for row in (7, 8):
        first.save(root / "a" / f"{row}.{kind.lower()}", kind, save_all=True, append_images=[second])
    assert "Animations, of which the first picture is read: 2." in load(str(root)).note


# --- what is left out ----------------------------------------------------------------------------------------------


def test_jpegs_have_several_suffixes(tmp_path: Path) -> None:
    root = folder(tmp_path / "d")
    for suffix in ("jfif", "JFIF", "jpe", "jpeg"):
        (root / "b" / f"{suffix}.{suffix}").write_bytes(encoded(9, kind="JPEG"))
    assert count(root) == 14


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(5))


LEFT_OUT: dict[str, tuple[Callable[[Path], None], str]] = {
    "phones' photos": (lambda root: touch(root / "a" / "1.HEIC"), r"1 \.heic images that are not read"),
    "AVIF": (lambda root: touch(root / "b" / "new.avif"), r"1 \.avif images"),
    "notes": (lambda root: touch(root / "b" / "notes.txt"), r"1 \.txt other files"),
    "a file without a suffix": (lambda root: touch(root / "b" / "README"), "1 other files"),
    "one folder deeper": (lambda root: touch(root / "a" / "more" / "1.png"), "1 images in subfolders of classes: move"),
    "two folders deeper": (lambda root: touch(root / "a" / "more" / "still" / "1.jfif"), "1 images in subfolders"),
    "macOS": (lambda root: touch(root / "__MACOSX" / "a" / "1.png"), r"1 folders of the system \(__MACOSX"),
    "macOS, in a class": (lambda root: touch(root / "a" / "._1.png"), "1 hidden images"),
    "a disk station": (lambda root: touch(root / "@eaDir" / "1.png"), "1 folders of the system"),
    "beside the classes": (lambda root: touch(root / "1.jpg"), "1 images outside the folders of classes"),
    "a table beside the classes": (lambda root: touch(root / "labels.csv"), "1 other files outside the folders"),
    "hidden folders": (lambda root: touch(root / ".c" / "1.png"), "1 hidden images"),
    "copies of notebooks": (lambda root: touch(root / "a" / ".ipynb_checkpoints" / "1.png"), "1 hidden images"),
    "a pipe": (lambda root: os.mkfifo(root / "a" / "pipe.png"), "1 that are no files"),
}  # fmt: skip


@pytest.mark.parametrize("what", LEFT_OUT)
def test_what_is_left_out_is_told_with_its_number_and_reason(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    prepare, says = LEFT_OUT[what]
    root = folder(tmp_path / "d")
    prepare(root)
    with caplog.at_level(logging.WARNING):
        dataset = load(str(root))
    assert dataset.label_names == ("a", "b")
    assert len(dataset.train["label"]) + len(dataset.test["label"]) == 10
    assert re.search(f"Left out: {says}", dataset.note)
    assert "Such as: " + str(root) in caplog.text  # to whoever has the files; what is recorded names none of them
    assert str(tmp_path) not in dataset.note
    caplog.clear()
    assert load(str(root)).note == dataset.note  # from the cache


def test_what_is_left_out_is_not_told_of_images_that_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run tries to read them more than once, and one error suffices."""
    root = folder(tmp_path / "d")
    touch(root / "a" / "1.HEIC")
    (root / "b" / "broken.png").write_bytes(encoded(5)[:40])
    with caplog.at_level(logging.WARNING), pytest.raises(DataError, match=r"broken\.png\) is not an image"):
        load(str(root))
    assert not caplog.text


def test_folders_that_are_no_split_are_told(tmp_path: Path) -> None:
    for name in ("train", "test", "val", "extra"):
        folder(tmp_path / "d" / name)
    touch(tmp_path / "d" / "test.zip")
    note = load(str(tmp_path / "d")).note
    assert "Left out: 2 folders beside train and test; 1 files beside train and test." in note


@pytest.mark.parametrize("beside", ["more.csv", "train-2.csv", "tests.csv", "test.csv.gz", "extra/1.png", "x.parquet"])
@pytest.mark.parametrize("inside", ["", "clients/ann"])
def test_what_lies_beside_tables_is_told(tmp_path: Path, beside: str, inside: str) -> None:
    root = tmp_path / "d" / inside
    touch(root / beside)
    for file in ("README.md", "LICENSE"):
        touch(root / file)
    (root / "train.csv").write_text("a,label\n" + "".join(f"{row / 7},{row % 2}\n" for row in range(20)))
    assert "Left out: 1 files or folders beside the tables." in load(str(tmp_path / "d")).note


def test_shards_that_are_missing_and_tables_without_rows_are_told(tmp_path: Path) -> None:
    images = {"image": [{"bytes": encoded(row), "path": None} for row in range(20)], "label": ["x", "y"] * 10}
    write(tmp_path / "d" / "train-00000-of-00002.parquet", images, {})
    with pytest.raises(DataError, match="1 of 2 files of the split 'train' are there"):
        load(str(tmp_path / "d"))
    clients = tmp_path / "c" / "clients"
    clients.mkdir(parents=True)
    for name in ("ann", "bob"):
        (clients / f"{name}.csv").write_text("a,label\n" + "".join(f"{row / 7},{row % 2}\n" for row in range(20)))
    (clients / "eve.csv").write_text("a,label\n")
    assert "1 of 3 files have no rows." in load(str(tmp_path / "c")).note


def test_what_lies_beside_clients_is_told(tmp_path: Path) -> None:
    root = tmp_path / "d"
    for name in ("clients/ann/train", "clients/ann/test", "test", "train"):
        folder(root / name)
    touch(root / "clients" / "bob.png")
    for name in ("__MACOSX", "clients/__MACOSX"):  # as archives of macOS hold it
        (root / name).mkdir()
    note = load(str(root)).note
    assert "2 folders of the system (__MACOSX and such)" in note
    assert "1 files or folders beside clients" in note
    assert "1 files that are no table and no folder of a client" in note
    assert "10 test images of clients, since there are some for all" in note


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("links", [1, 3])
def test_links_to_nothing_are_counted_and_refused(tmp_path: Path, links: int) -> None:
    root = folder(tmp_path / "d")
    for row in range(links):
        (root / "a" / f"{row}.png").unlink()
        (root / "a" / f"{row}.png").symlink_to("../.git/annex/objects/gone")
    with pytest.raises(DataError, match=rf"{links} of 10 images are links .* such as .*d/a/0\.png\. Fetch the files"):
        load(str(root))


@pytest.mark.parametrize("name", ["c", "train/c", "test", "test.csv", "clients/ann", "clients/ann.csv", "clients/a/c"])
def test_links_to_nothing_in_the_place_of_folders_and_tables_are_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "d"
    folder(root / name.split("/")[0] if "/" in name else root)
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).symlink_to("/nowhere")
    with pytest.raises(DataError, match=f"{Path(name).name} is a link to what is not there"):
        load(str(root))


@pytest.mark.skipif(os.name == "nt" or os.uname().sysname == "Darwin", reason="names are Unicode there")
@pytest.mark.parametrize("name", [b"caf\xe9/1.png", b"a/caf\xe9.png"])
def test_names_that_are_no_utf8_are_refused(tmp_path: Path, name: bytes) -> None:
    root = folder(tmp_path / "d")
    touch(root / os.fsdecode(name))
    with pytest.raises(DataError, match=r"is not UTF-8\. Rename it"):
        load(str(root))


def test_links_to_images_are_images(tmp_path: Path) -> None:
    root = folder(tmp_path / "d")
    (root / "a" / "9.png").symlink_to("0.png")
    (root / "c").symlink_to("b")
    assert count(root) == 16


def test_images_that_lie_one_folder_deeper_only_are_named(tmp_path: Path) -> None:
    for site in ("north", "south"):
        folder(tmp_path / "d" / site)
    with pytest.raises(DataError, match=r"has no images.*20 images in subfolders of classes: move them up"):
        load(str(tmp_path / "d"))


@pytest.mark.parametrize(
    "pointer", [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", b"/annex/objects/MD5-s9--0\n"]
)
def test_a_pointer_to_an_image_is_named(tmp_path: Path, pointer: bytes) -> None:
    root = folder(tmp_path / "d")
    (root / "b" / "2.png").write_bytes(pointer)
    with pytest.raises(DataError, match="fetch it with git lfs pull"):
        load(str(root), options=DataOptions(size=(4, 4)))


# --- names of folders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["site::north", "a::b::c", "zip::x", "[1]", "50%", "a*b?", "file:x", "a#b", "ä ö"])
@pytest.mark.parametrize("kind", ["images", "parquet", "shards", "csv"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str, kind: str) -> None:
    root = tmp_path / name
    if kind == "images":
        folder(root)
    elif kind == "csv":
        root.mkdir()
        (root / "train.csv").write_text("v,label\n" + "1,a\n2,b\n" * 5)
    else:
        images = [{"bytes": encoded(row), "path": None} for row in range(10)]
        for shard in ("train.parquet",) if kind == "parquet" else ("train-0.parquet", "train-1.parquet"):
            rows = images if kind == "parquet" else images[:5]
            write(root / shard, {"image": rows, "label": (["a", "b"] * 5)[: len(rows)]}, {})
    assert count(root) == 10
