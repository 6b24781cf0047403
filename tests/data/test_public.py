"""The public set: which images, how many, under no label; and what cannot be one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from small_sources import encoded

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.feddf import FedDF
from fedkeep.data import DataOptions, Federation, load
from fedkeep.data.holdout import image_hashes
from fedkeep.data.server_data import Public
from fedkeep.errors import ConfigError, DataError
from fedkeep.experiment.build import _sources, build_federation, build_simulation, load_data, split_server_data
from fedkeep.experiment.recipe_loader import load_recipe


def test_images_of_some_classes_are_drawn_by_the_seed_and_lose_their_labels() -> None:
    source = tiny.dataset(30)
    public = Public(name="x", num_images=7, classes=("a", "c"))
    sampled = [public.draw(source, tiny.dataset(), seed) for seed in (0, 0, 1)]
    allowed = {tuple(image.flatten().tolist()) for image in source.train["input"][source.train["label"] != 1]}
    for data in sampled:
        assert data["input"].shape == (7, *tiny.SHAPE)
        assert not data["label"].any()
        assert {tuple(image.flatten().tolist()) for image in data["input"]} <= allowed
    assert torch.equal(sampled[0]["input"], sampled[1]["input"])
    assert not torch.equal(sampled[0]["input"], sampled[2]["input"])


def test_without_a_number_it_is_everything_in_order() -> None:
    source = tiny.dataset(30)
    assert torch.equal(Public(name="x").draw(source, tiny.dataset(), 0)["input"], source.train["input"])


def test_a_public_table_is_read_as_the_clients_is(tmp_path: Path) -> None:
    for name in ("main", "public"):
        rows = [f"{n / 7},{'no' if n % 2 else 'yes'}" for n in range(40)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,outcome", *rows]))
    settings = [
        f"data.name={tmp_path / 'main.csv'}", "data.label=outcome", f"public.name={tmp_path / 'public.csv'}",
        "partition.scheme=iid", "partition.num_clients=4", "run.cohort_size=4",
    ]  # fmt: skip
    federation = build_federation(load_recipe("demo", settings=settings, methods=["fedmd"]), 0)
    assert federation.server_data["input"].shape[1:] == federation.dataset.shape


def test_what_cannot_be_a_public_set() -> None:
    source = tiny.dataset(12)
    with pytest.raises(DataError, match=r"has no class 'z'. It has: a, b, c"):
        Public(name="x", classes=("z",)).draw(source, source, 0)
    with pytest.raises(DataError, match="asks for 13 images, and tiny has only 12"):
        Public(name="x", num_images=13).draw(source, source, 0)
    halves = {
        split: {**data, "input": data["input"][..., :2]}
        for split, data in (("train", source.train), ("test", source.test))
    }
    small = replace(source, **halves)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="Choose a public set with images of that size"):
        Public(name="x").draw(small, source, 0)
    with pytest.raises(ConfigError, match="Give it a name"):
        Public(num_images=3)


def test_a_recipe_names_it_and_methods_ask_for_it(tmp_path: Path) -> None:
    text = tiny.RECIPE.replace('algorithm = "fedavg"', 'algorithm = "feddf"')
    with pytest.raises(ConfigError, match="FedDF needs a public set"):
        load_recipe(tiny.write_recipe(tmp_path, text))
    path = tiny.write_recipe(tmp_path, text + '\n[public]\nname = "digits"\nnum_images = 20\n')
    recipe = load_recipe(path, methods=["feddf"])
    assert recipe.public == Public(name="digits", num_images=20)
    assert isinstance(recipe.methods[0].algorithm, FedDF)
    federation = build_federation(recipe, 0)
    assert len(federation.server_data["label"]) == 20
    assert tiny.run_rounds(build_simulation(recipe, recipe.methods[0], 0, federation), 1)[0]["lost"] == {}
    with pytest.raises(ConfigError, match=r"Leave out \[auxiliary\] or \[public\]"):
        load_recipe(path, methods=["feddf"], settings=["auxiliary.images_per_class=2"])


def test_with_tasks_the_server_has_it_in_each(tmp_path: Path) -> None:
    text = tiny.RECIPE.replace(
        'scheme = "exdir"\nnum_clients = 8\nclasses_per_client = 2\n', 'scheme = "dirichlet"\nnum_clients = 8\n'
    )
    path = tiny.write_recipe(tmp_path, text + '\n[public]\nname = "digits"\nnum_images = 9\n[tasks]\nnum_tasks = 2\n')
    federation = build_federation(load_recipe(path), 0)
    assert [len(federation.for_task(task).server_data["label"]) for task in (1, 2)] == [9, 9]


def test_methods_without_a_use_for_it_are_not_disturbed(tmp_path: Path) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path, tiny.RECIPE + '\n[public]\nname = "digits"\n'), methods=["fedavg"])
    with_public = build_simulation(recipe, recipe.methods[0], 0, build_federation(recipe, 0))
    without: Any = replace(recipe, public=Public())
    plain = build_simulation(without, without.methods[0], 0, build_federation(without, 0))
    assert isinstance(with_public.algorithm, FedAvg)
    assert tiny.run_rounds(with_public) == tiny.run_rounds(plain)


def test_a_table_is_read_with_the_columns_of_the_run(tmp_path: Path) -> None:
    """Also at sites, where the columns are those of all sites and the server has no rows of its own."""
    draw = np.random.default_rng(0)
    age, ward, label = draw.normal(50, 10, 200), draw.choice(["a", "b"], 200), draw.choice(["u", "v"], 200)
    for name, header, columns in (
        ("run", "age,ward,label", (age, ward, label)),
        ("pub", "ward,more,age,label", (["b"] * 200, label, age + 30, label)),
        ("short", "ward,label", (ward, label)),
    ):
        rows = [",".join(map(str, row)) for row in zip(*columns, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join([header, *rows]))
    recipe = load_recipe(
        "demo",
        methods=["feddf"],
        settings=[f"data.name={tmp_path}/run.csv", f"public.name={tmp_path}/pub.csv", "data.validation=0.2"],
    )
    dataset = load_data(recipe.data, None, recipe.validation)
    mean, scale = dataset.columns[0].mean, dataset.columns[0].scale
    site_columns = (replace(dataset.columns[0], mean=0.0, scale=10.0), dataset.columns[1])
    for run, shift, factor in ((dataset, mean, scale), (replace(dataset, columns=site_columns), 0.0, 10.0)):
        rows = split_server_data(recipe, 0, run)[1]["input"]
        assert rows[:, 1:].unique(dim=0).tolist() == [[0, 1]]
        found = (rows[:, 0].double() * factor + shift - 30).tolist()
        assert np.abs(np.subtract.outer(found, age)).min(1).max() < 1e-4
    with pytest.raises(DataError, match=r"\[public\] needs the columns of run.csv.* there is no column 'age'"):
        split_server_data(replace(recipe, public=Public(name=f"{tmp_path}/short.csv")), 0, dataset)
    alone = load(f"{tmp_path}/pub.csv", options=DataOptions(columns=("age", "ward")))
    with pytest.raises(DataError, match="is not read with the columns of run"):
        recipe.public.draw(alone, dataset, 0)


def test_photos_are_resized_as_those_of_the_run(tmp_path: Path) -> None:
    for folder, side in (("run", 6), ("pub", 9)):
        for number in range(20):
            path = tmp_path / folder / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(number, (side, side + number % 3)))
    settings = [f"data.name={tmp_path}/run", f"public.name={tmp_path}/pub", "data.size=[4, 4]"]
    recipe = load_recipe("demo", methods=["feddf"], settings=settings)
    dataset = load_data(recipe.data, options=recipe.data_options)
    assert split_server_data(recipe, 0, dataset)[1]["input"].shape == (20, 1, 4, 4)


@pytest.mark.parametrize(
    ("data", "public", "more"),
    [
        ("digits", "digits", ["data.validation=0.2"]),
        ("B.npz", "B.npz", []),
        ("B.npz", "./B.npz", ["data.validation=0.2"]),
        ("B.npz+C.npz", "B.npz", []),
        ("B.npz", "B.npz+C.npz", ["data.validation=0.2"]),
    ],
)
def test_what_is_evaluated_is_not_public(
    data: str, public: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("BC"):
        images = np.random.default_rng(seed).integers(0, 256, (100, 1, 8, 8), dtype=np.uint8)
        np.savez(f"{name}.npz", x=images, y=np.arange(100) % 2)
    settings = [f"data.name={data}", f"public.name={public}", "partition.scheme=iid", "partition.num_clients=2", *more]
    federation = build_federation(load_recipe("demo", settings=[*settings, "run.cohort_size=2"], methods=["fedmd"]), 0)
    evaluated, shared = (image_hashes(one["input"]) for one in (federation.dataset.test, federation.server_data))
    assert len(evaluated) >= 16
    assert len(shared) >= 64
    assert not torch.isin(evaluated, shared).any()


def test_the_runs_own_test_file_is_not_public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    numbers = np.random.default_rng(0).normal(size=(120, 2)).tolist()
    for name, rows in (("train", numbers[:80]), ("test", numbers[80:])):
        Path(f"d/{name}.csv").write_text("\n".join(["a,b,label", *(f"{a},{b},{a > 0:d}" for a, b in rows)]))
    with pytest.raises(ConfigError, match="has no example that the run does not evaluate or hold out"):
        public_run("d", "d/test.csv")
    Path("p").mkdir()
    Path("p/train.csv").write_text(Path("d/test.csv").read_text() + "\n9,9,1")
    Path("p/test.csv").write_text(Path("d/train.csv").read_text())
    assert len(public_run("d", "p").server_data["input"]) == 1
    assert len(public_run("d", "d").server_data["input"]) == 80
    assert len(public_run("d", "d/train.csv").server_data["input"]) > 60


def test_a_public_set_of_ones_own_is_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "B.npz", x=rng.integers(0, 256, (50, 1, 8, 8), dtype=np.uint8), y=np.arange(50) % 2)
    recipe = load_recipe("demo", settings=[f"public.name={tmp_path / 'B.npz'}"], methods=["fedmd"])
    assert len(build_federation(recipe, 0).server_data["label"]) == 50


@pytest.mark.parametrize(
    ("public", "more", "left"),
    [
        ("d/train.csv", ["data.group=patient", "data.exclude=['part']"], 200),
        ("d/train.csv", ["data.split=part", "data.exclude=['patient']"], 200),
        # With a validation nothing is evaluated on the test rows, and they are not public either.
        ("d/train.csv", ["data.group=patient", "data.exclude=['part']", "data.validation=0.2"], 160),
        ("d", ["data.exclude=['patient','part']"], 200),
        ("d", ["data.exclude=['patient','part']", "data.validation=0.2"], 160),
    ],
)
def test_rows_of_a_table_that_are_evaluated_are_not_public(
    public: str, more: list[str], left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    numbers = np.random.default_rng(0).normal(size=(200, 2))
    rows = [f"{a},{b},{n % 2},p{n // 4},{'train' if n % 5 else 'test'}" for n, (a, b) in enumerate(numbers.tolist())]
    Path("d/train.csv").write_text("\n".join(["a,b,label,patient,part", *rows]))
    settings = ["data.name=d/train.csv", f"public.name={public}", "partition.scheme=iid", "partition.num_clients=2"]
    settings += ["run.cohort_size=2", "model.name=mlp", *more]
    federation = build_federation(load_recipe("demo", settings=settings, methods=["fedmd"]), 0)
    distances = torch.cdist(federation.dataset.test["input"], federation.server_data["input"])
    assert len(federation.server_data["label"]) + len(federation.dataset.test["label"]) == left
    assert float(distances.min()) > 1e-4


def public_run(data: str, public: str) -> Federation:
    settings = [f"data.name={data}", f"public.name={public}", "partition.scheme=iid", "partition.num_clients=2"]
    settings += ["run.cohort_size=2", "model.name=mlp"]
    return build_federation(load_recipe("demo", settings=settings, methods=["fedmd"]), 0)


def test_all_copies_of_a_tested_image_are_no_public_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (100, 1, 8, 8), dtype=np.uint8)
    for name, write in (("A", np.savez), ("B", np.savez_compressed)):  # other files, the same images
        write(f"{name}.npz", x=images, y=np.arange(100) % 2)
    federation = public_run("A.npz", "A.npz+B.npz")
    tested, shared = (image_hashes(one["input"]) for one in (federation.dataset.test, federation.server_data))
    assert len(tested) > 0
    assert not torch.isin(tested, shared).any()


def test_numbers_that_are_close_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    skewed = np.unique(np.exp(3 * np.random.default_rng(0).normal(size=2000)))
    rows = [f"{x},{n % 2}" for n, x in enumerate(np.random.default_rng(1).permutation(skewed))]
    Path("t.csv").write_text("\n".join(["a,label", *rows]))
    federation = public_run("t.csv", "t.csv")
    splits = federation.dataset.test, federation.dataset.train, federation.server_data
    evaluated, trained, shared = (set(one["input"][:, 0].tolist()) for one in splits)
    assert not evaluated & shared - trained
    assert trained <= shared


@pytest.mark.parametrize(
    ("data", "public", "is_shared"),
    [
        ("femnist_mine.csv", "./femnist_mine.csv", True),  # as a known data set begins
        ("c++/data.csv", "./c++/data.csv", True),
        ("c++/data.csv", "d++/data.csv", False),
        ("femnist_mine.csv", "femnist_other.csv", False),
        ("hospitals", "hospitals/public", False),  # a folder in a folder, of which the run reads nothing
    ],
)
def test_files_are_known_by_what_is_in_them(
    data: str, public: str, is_shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = (
        "femnist_mine.csv femnist_other.csv c++/data.csv d++/data.csv hospitals/train.csv hospitals/public/train.csv"
    )
    for seed, name in enumerate(names.split()):
        drawn = np.random.default_rng(seed).integers(0, (2, 3), (100, 2)).tolist()
        rows = [f"{'ab'[a]},{'xyz'[b]},{n % 2}" for n, (a, b) in enumerate(drawn)]
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("\n".join(["u,v,label", *rows]))
    federation = public_run(data, public)
    held_out = len(federation.dataset.test["label"]) if is_shared else 0
    assert len(federation.server_data["label"]) == 100 - held_out


@pytest.mark.parametrize("public", ["cat.csv", "other.csv"])
def test_equal_rows_of_other_people_stay_public(public: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in ("cat.csv", "other.csv"):
        rows = [f"{'ab'[a]},{'xyz'[b]},{n % 2}" for n, (a, b) in enumerate(rng.integers(0, (2, 3), (300, 2)).tolist())]
        Path(name).write_text("\n".join(["u,v,label", *rows]))
    federation = public_run("cat.csv", public)
    held_out = len(federation.dataset.test["label"]) if public == "cat.csv" else 0
    assert len(federation.server_data["label"]) == 300 - held_out


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ("mnist", "ylecun/mnist", True),
        ("femnist-digits", "femnist", True),
        ("cifar100", "cifar10", False),
        ("A+B", "B+C", True),
        ("A", "B", False),
    ],
)
def test_data_sets_that_share_files_are_known(one: str, other: str, shared: bool) -> None:
    assert _sources(one, None).isdisjoint(_sources(other, None)) is not shared
