"""A trained model, taken away: the same predictions in plain PyTorch, in ONNX Runtime and from the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

import fedkeep
from fedkeep.cli import main
from fedkeep.data import DataOptions, DataSet
from fedkeep.data.readers import Problems
from fedkeep.data.tables import tokenise
from fedkeep.errors import ConfigError, DataError, RunError
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.export.trained_model import trained_model
from fedkeep.reporting.run_folder import read_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    settings = ['run.evaluation_models=["last", "moving"]']
    recipe = load_recipe(tiny.write_recipe(folder), settings=settings, methods=["fedavg", "fedseq"], seeds=[3, 4])
    fedkeep.run(recipe, out=folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    return fedkeep.export_model(run, method="fedseq", seed=4, evaluation_model="last", onnx=False)


def blocks(card: Path) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", card.read_text(), flags=re.S)
    assert all(block.count("\n") == 4 for block in found)
    return [re.sub(r"^inputs = .*$", "inputs = images", block, flags=re.M) for block in found]


def check_scores(scores: torch.Tensor, folder: Path, run: Path) -> None:
    """Compare scores of all test images with FedKeep's, and with the last evaluation of the run."""
    images, labels = evaluated_on(run)
    with torch.no_grad():
        ours = fedkeep.load_model(folder)[0](images)
    torch.testing.assert_close(scores, ours, rtol=0, atol=1e-5)
    assert torch.equal(scores.argmax(-1), ours.argmax(-1))
    trial = next(trial for trial in read_run(run).trials if (trial.label, trial.seed) == ("FedSeq", 4))
    hits = labels[scores.argmax(-1) == labels]
    assert torch.bincount(hits, minlength=10).tolist() == trial.evaluations[-1]["correct"]


def evaluated_on(run: Path) -> tuple[torch.Tensor, torch.Tensor]:
    test = Experiment(load_recipe(str(run / "recipe.toml"))).federation(4).dataset.test
    return test["input"], test["label"]


def test_it_predicts_in_plain_pytorch_what_was_evaluated(
    run: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of the model card, on all test images."""
    monkeypatch.chdir(exported)
    (code,) = blocks(exported / "README.md")
    found = {"images": evaluated_on(run)[0]}
    exec(compile(code.replace("print(model(inputs).argmax(-1))", "scores = model(inputs)"), "card", "exec"), found)  # noqa: S102
    check_scores(found["scores"].detach(), exported, run)


def test_an_export_does_not_depend_on_the_programs_precision(run: Path, exported: Path, tmp_path: Path) -> None:
    from PIL import Image

    Image.fromarray(evaluated_on(run)[0][0, 0].numpy()).save(tmp_path / "one.png")
    usual = [one.probability for one in fedkeep.predict(exported, tmp_path / "one.png")]
    with torch.autocast("cpu"):
        folder = fedkeep.export_model(run, tmp_path / "model", method="fedseq", seed=4, onnx=False)
        assert [one.probability for one in fedkeep.predict(exported, tmp_path / "one.png")] == usual
    program = torch.export.load(folder / "model.pt2").module()
    assert program(torch.zeros(1, 1, 8, 8, dtype=torch.uint8)).dtype == torch.float32


@pytest.mark.slow
def test_it_predicts_in_onnx_and_where_there_is_no_fedkeep(run: Path, tmp_path: Path) -> None:
    folder = fedkeep.export_model(run, tmp_path, method="fedseq", seed=4, evaluation_model="last", onnx=True)
    save_file({"images": evaluated_on(run)[0].contiguous()}, folder / "images.safetensors")
    plain, onnx = blocks(folder / "README.md")
    code = "import sys\nsys.modules['fedkeep'] = None\nfrom safetensors.torch import load_file\n"
    code += f"images = load_file('images.safetensors')['images']\n{plain}"
    code = f"{code}\nimages = images.numpy()\n{onnx}".replace(".argmax(-1)", ".tolist()")
    shown = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    for line in shown.stdout.splitlines():
        check_scores(torch.tensor(json.loads(line)), folder, run)
    assert str(Path(fedkeep.__file__).parent).encode() not in (folder / "model.onnx").read_bytes()


def test_the_files_say_what_belongs_to_the_model_and_name_no_path(run: Path, exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    assert config["label_names"] == [str(number) for number in range(10)]
    assert config["input"]["shape"] == [1, 8, 8]
    assert len(config["input"]["mean"]) == 1
    weights = load_file(exported / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in weights.items()} == {
        name: tuple(t.shape) for name, t in load_file(run / "trials" / "fedseq-seed4" / "model.safetensors").items()
    }
    card = (exported / "README.md").read_text()
    for output in (
        "FedSeq",
        "exdir",
        "8 clients",
        "## Accuracy by class",
        "| 9 |",
        "train: model",
        "nothing was noised",
    ):
        assert output in card, output
    for path in exported.iterdir():
        assert str(Path(fedkeep.__file__).parent).encode() not in path.read_bytes(), path.name


def test_the_card_says_all_that_left_the_clients(tmp_path: Path) -> None:
    def card(*more: str) -> str:
        settings = ["run.client_test=0.25", *more]
        recipe = load_recipe(tiny.write_recipe(tmp_path), settings=settings, methods=["fedavg"], rounds=1)
        return (fedkeep.export_model(fedkeep.run(recipe, out=tmp_path / more[0]), onnx=False) / "README.md").read_text()

    checked = card("defense.loss_check=server", "auxiliary.images_per_class=4")
    assert "- train: model, num\\_examples, num\\_steps, loss" in checked
    assert "- send\\_label\\_counts: Send the client" in checked
    assert "- client\\_test: With run.client" in checked
    assert "- train: num\\_examples, and the model in a secure sum only" in card("privacy.secure_aggregation=true")


def test_the_card_says_what_was_done_for_privacy(tmp_path: Path) -> None:
    settings = {
        "noise_multiplier": 1.0,
        "counts_epsilon": 0.5,
        "prototypes_noise_multiplier": 2.0,
    }
    recipe = load_recipe(
        tiny.write_recipe(tmp_path),
        settings=[f"privacy.{name}={value}" for name, value in settings.items()],
        methods=["sfedkd"],
        rounds=1,
    )
    run = fedkeep.run(recipe, out=tmp_path / "run")
    card = (fedkeep.export_model(run, onnx=False) / "README.md").read_text()
    assert "nothing was noised" not in card
    trial = run.trials[0]
    for line in (
        "DP-SGD in local training: noise multiplier 1, the gradient of each example clipped to norm 1 "
        f"(epsilon {trial.epsilon:.4g} for an example more or less for delta 1e-05",
        "noise on label counts and what follows from them: epsilon 0.5 for each telling (epsilon 0.5 for an ex",
        "noise on prototypes: noise multiplier 2, a client's change of all of them clipped to norm 1 "
        "(this method sends nothing of the kind)",
    ):
        assert line in card, line


@pytest.mark.parametrize(
    ("method", "settings", "says", "noised"),
    [
        ("fedavg", ["client_noise_multiplier=0.5"], r"central differential .*\(epsilon [\d.]+ for a client more", True),
        (
            "fedcad",
            ["confidences_epsilon=0.5"],
            r"0\.5 in each round \(epsilon 0\.5 for an example of the s",
            True,
        ),
        ("fedavg", ["secure_aggregation=true"], "secure aggregation: the server saw sums of models", False),
    ],
)
def test_the_card_says_who_was_protected(
    tmp_path: Path, method: str, settings: list[str], says: str, noised: bool
) -> None:
    options = [f"privacy.{setting}" for setting in settings] + ["auxiliary.images_per_class=2", "run.cohort_size=3"]
    recipe = load_recipe(tiny.write_recipe(tmp_path), settings=options, methods=[method], rounds=1)
    card = (fedkeep.export_model(fedkeep.run(recipe, out=tmp_path / "run"), onnx=False) / "README.md").read_text()
    assert re.search(says, card)
    assert ("nothing was noised" in card) is not noised


def test_an_average_is_another_model_and_is_what_its_row_says(run: Path) -> None:
    last = trained_model(read_run(run), method="FedAvg", evaluation_model="last")
    moving = trained_model(read_run(run), method="FedAvg")
    same = trained_model(read_run(run), method="FedAvg", evaluation_model="moving")
    assert tiny.equal(same.weights, moving.weights), "an average is what is exported, unless another model is named"
    assert (last.trial.label, moving.trial.label) == ("FedAvg", "FedAvg, moving average")
    assert last.trial.seed == moving.trial.seed == 3
    assert any(not torch.equal(last.weights[name], moving.weights[name]) for name in last.weights)
    test = Experiment(last.recipe).federation(3).dataset.test
    images = test["input"]
    with torch.no_grad():
        hits = test["label"][moving.predictor(images).argmax(-1) == test["label"]]
    assert torch.bincount(hits, minlength=10).tolist() == moving.trial.evaluations[-1]["correct"]


def test_the_export_says_which_model_it_took_how_each_scores_and_why(
    run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    scores = {trial.label: f"{100 * trial.last:.1f} %" for trial in read_run(run).trials if trial.seed == 4}
    of_each = f"the last model {scores['FedSeq']}, the moving average of the rounds' models "
    of_each += scores["FedSeq, moving average"]
    assert main(["export", str(run), "--method", "fedseq", "--seed", "4", "--out", str(tmp_path / "average")]) == 0
    assert (
        f"exported is the moving average of the rounds' models (accuracy after the last round: {of_each})"
        in " ".join(caplog.messages)
    )
    assert "it changes least from round to round" in caplog.text
    assert "of FedSeq, moving average with seed 4" in " ".join(capsys.readouterr().out.split())
    about = json.loads((tmp_path / "average" / "config.json").read_text())
    assert (about["evaluation_model"], list(about["accuracies"])) == ("moving", ["last", "moving"])
    assert f"| the last model (accuracy after the last round: {of_each}) |" in (exported / "README.md").read_text()


def test_images_are_predicted_from_the_command_line(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    test = fedkeep.load("digits").test
    images = test["input"]
    for number in range(3):
        Image.fromarray(images[number, 0].numpy()).save(tmp_path / f"{number}.png")
    Image.fromarray(images[0, 0].numpy()).resize((16, 20)).save(tmp_path / "large.png")
    assert main(["predict", str(exported), str(tmp_path), "--format", "csv"]) == 0
    rows = [line.split(",") for line in capsys.readouterr().out.splitlines()]
    assert [Path(row[0]).name for row in rows] == ["file", "0.png", "1.png", "2.png", "large.png"]
    ours, config = fedkeep.load_model(exported)
    with torch.no_grad():
        best = ours(images[:3]).argmax(-1).tolist()
    assert [row[1] for row in rows[1:4]] == [config["label_names"][number] for number in best]
    (tmp_path / "no.png").write_text("no image")
    assert main(["predict", str(exported), str(tmp_path / "no.png")]) == 1
    assert main(["predict", str(exported), str(tmp_path / "missing.png")]) == 1
    assert "there is no file" in capsys.readouterr().err


def take_turned_photos(folder: Path) -> Path:
    """Write photos that lie on their side, as a turned camera stores them, no two of a class of one size."""
    from PIL import Image

    turned = Image.Exif()
    turned[0x0112] = 6  # to be shown a quarter turn clockwise
    noise = np.random.default_rng(0)
    for split, number in (("train", 20), ("test", 8)):
        for name, light in (("day", (200, 150)), ("night", (150, 200))):
            (folder / split / name).mkdir(parents=True)
            for photo in range(number):
                pixels = np.full((30 + photo, 50, 3), 20, dtype=np.uint8)
                pixels[:8], pixels[-8:] = light  # of the photo upright, the right and the left edge
                pixels += noise.integers(10, size=pixels.shape, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{photo}.png", exif=turned)
    return folder


def test_photos_are_predicted_as_they_were_prepared_for_training(tmp_path: Path) -> None:
    photos = take_turned_photos(tmp_path / "photos")
    model, _ = exported_from(photos, tmp_path, size=[12, 24])
    test = fedkeep.load(str(photos), options=DataOptions(size=(12, 24))).test
    with torch.no_grad():
        ours = fedkeep.load_model(model)[0](test["input"]).softmax(-1).amax(-1)
    found = list(fedkeep.predict(model, [photos / "test"]))
    assert [each.probability for each in found] == pytest.approx(ours.tolist(), abs=1e-6)
    assert len(set(ours.tolist())) == len(found) == 16
    card = (model / "README.md").read_text()
    assert "upright as its EXIF data say, converts it to RGB, and resizes all of it to 24 x 12 pixels" in card
    config = json.loads((model / "config.json").read_text())
    del config["resizing"]
    (model / "config.json").write_text(json.dumps(config))
    assert list(fedkeep.predict(model, [photos / "test"])) == found, "as an older version exported it"


def test_photos_of_which_none_was_resized_for_training_are_not_cut(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for photo in range(10):
            Image.new("L", (8, 8), 20 * photo).save(tmp_path / "photos" / name / f"{photo}.png")
    model, _ = exported_from(tmp_path / "photos", tmp_path)
    assert len(list(fedkeep.predict(model, [tmp_path / "photos"]))) == 20
    Image.new("L", (16, 20)).save(tmp_path / "large.png")
    with pytest.raises(DataError, match=r"has 16 x 20 pixels, and the model takes 8 x 8: all images of its training"):
        list(fedkeep.predict(model, [tmp_path / "large.png"]))
    assert "takes 8 x 8 pixels (width x height) alone" in (model / "README.md").read_text()


def test_the_servers_model_needs_no_code_of_the_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clientnets.py").write_text(
        "from torch import nn\n\n\ndef build(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = tiny.RECIPE + '[[client_models]]\nclients = ["1"]\nname = "clientnets:build"\n[public]\nname = "digits"\n'
    recipe = load_recipe(tiny.write_recipe(tmp_path, text), methods=["ft-kd"], rounds=1, seeds=[0], allow_code=True)
    run = fedkeep.run(recipe, out=tmp_path / "run", machine=fedkeep.Machine(allow_code=True))
    assert run["ft-kd", 0].model()(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).shape == (2, 10)


def test_models_with_tasks_have_all_classes(tmp_path: Path) -> None:
    settings = ["tasks.num_tasks=2", "run.rounds=1"]
    recipe = load_recipe(tiny.write_recipe(tmp_path), settings=settings, methods=["fedpass"])
    model = trained_model(fedkeep.run(recipe, out=tmp_path / "run"))
    assert model.predictor(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).shape == (2, 10)
    assert model.predictor.rows_per_class == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"Choose one, method \(--method\): FedAvg, FedSeq"),
        ({"method": "fedagv"}, "Did you mean 'FedAvg'"),
        ({"method": "fedavg", "seed": 9}, "Its seeds: 3, 4"),
    ],
)
def test_what_is_asked_for_must_be_there(run: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(RunError, match=message):
        fedkeep.export_model(run, **options)  # type: ignore[arg-type]


def test_models_that_do_not_predict_alone_are_refused(tmp_path: Path) -> None:
    recipe = load_recipe(
        tiny.write_recipe(tmp_path), settings=["tasks.num_tasks=2", "run.rounds=1"], methods=["fedweit"]
    )
    run = fedkeep.run(recipe, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="beside the model"):
        fedkeep.export_model(run)
    plain = fedkeep.run(load_recipe(tiny.write_recipe(tmp_path), methods=["fedavg"]), out=tmp_path / "plain")
    with pytest.raises(RunError, match=r"did not keep the model 'moving' of this method, but last\. Run its recipe"):
        trained_model(plain, evaluation_model="moving")
    assert trained_model(plain).which == "last"
    with pytest.raises(RunError, match="Export it first"):
        fedkeep.load_model(tmp_path / "run")


def exported_from(path: Path, out: Path, **changes: Any) -> tuple[Path, DataSet]:
    """Train on a table in a moment, and return the exported model and the run's data set."""
    settings = [f"data.{name}={json.dumps(value)}" for name, value in changes.items()]
    text = tiny.RECIPE.replace('name = "digits"', f"name = {json.dumps(str(path))}").replace(
        'scheme = "exdir"\nnum_clients = 8\nclasses_per_client = 2\nalpha = 0.5', 'scheme = "iid"\nnum_clients = 2'
    )
    if "text" in changes:
        text = text.replace('name = "mlp"\nhidden = [8]', 'name = "embedding-bag"\nvocabulary = 50')
        settings.append("data.vocabulary=50")
    recipe = load_recipe(tiny.write_recipe(out, text), settings=settings, methods=["fedavg"], rounds=1)
    run = fedkeep.run(recipe, out=out / "run")
    return fedkeep.export_model(run, onnx=False), Experiment(recipe).federation(0).dataset


def test_rows_of_a_table_are_predicted_by_the_names_of_its_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    rows = [(20 + number % 40, "fmx"[number % 3], ("ill", "well")[number % 2]) for number in range(60)]
    table = tmp_path / "people.csv"
    table.write_text("age,sex,label\n" + "".join(f"{age},{sex},{label}\n" for age, sex, label in rows))
    folder, dataset = exported_from(table, tmp_path)
    with torch.no_grad():
        ours = fedkeep.load_model(folder)[0](dataset.test["input"])
    # In another order, with a column more and without labels.
    mean, std = dataset.columns[0].mean, dataset.columns[0].scale
    ages = (dataset.test["input"][:, dataset.features.index("age")] * std + mean).round().int().tolist()
    sexes = dataset.test["input"][:, [dataset.features.index(f"sex={sex}") for sex in "fmx"]].argmax(-1).tolist()
    new = tmp_path / "new.csv"
    new.write_text("name,sex,age\n" + "".join(f"A,{'fmx'[sex]},{age}\n" for age, sex in zip(ages, sexes, strict=True)))
    assert main(["predict", str(folder), str(new), "--format", "csv"]) == 0
    lines = [line.split(",") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["file", "row", "class", "probability"]
    assert [(row[1], row[2]) for row in lines[1:]] == [
        (str(number), dataset.label_names[label]) for number, label in enumerate(ours.argmax(-1).tolist())
    ]
    assert [float(row[3]) for row in lines[1:]] == pytest.approx(ours.softmax(-1).amax(-1).tolist(), abs=1e-4)
    for text, says in (
        ("sex\nf\n", "no column 'age'"),
        ("sex,age\nf,30\nf,old\nf,?\n", "line 3, line 4: 'age' = 'old', where a number is expected"),
    ):
        new.write_text(text)
        assert main(["predict", str(folder), str(new)]) == 1
        assert says in " ".join(capsys.readouterr().err.split())
    new.write_text("age;sex\n30;f\n;q\n1,5;\n", encoding="utf-16")
    assert [each.row for each in fedkeep.predict(folder, [new])] == [0, 1, 2], (
        "unknown values and empty cells are taken"
    )
    capsys.readouterr()
    assert "2 cells of 'sex' have a value that no row of training has" in caplog.text
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(DataError, match="the model takes no images"):
        list(fedkeep.predict(folder, [tmp_path / "a.png"]))


def test_flags_and_whole_numbers_are_predicted_however_they_are_written(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = {"smoker": [True, False, False] * 20, "stage": list("12x") * 20, "label": ["ill", "well"] * 30}
    table = tmp_path / "people.parquet"
    pandas.DataFrame(rows).to_parquet(table)
    folder, _ = exported_from(table, tmp_path)
    found = []
    for number, text in enumerate(("smoker,stage\nTrue,1\nFalse,2\n", "smoker,stage\n1,1.0\n0,2.0\n")):
        new = tmp_path / f"{number}.csv"
        new.write_text(text)
        found.append([each.probability for each in fedkeep.predict(folder, [new])])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_nothing_of_a_single_row_is_in_the_exported_files(tmp_path: Path) -> None:
    rows = [f"{20 + n % 40},{'fm'[n % 2] if n else 'Zaphod'},{('ill', 'well')[n % 2]},MRN{n:03}" for n in range(60)]
    table = tmp_path / "people.csv"
    table.write_text("age,sex,label,mrn\n" + "\n".join(rows) + "\n")
    with pytest.raises(DataError, match="'mrn' has 60 different values in 60 rows"):
        exported_from(table, tmp_path)
    (tmp_path / "again").mkdir()
    folder, _ = exported_from(table, tmp_path / "again", exclude=["mrn"])
    texts = [path.read_text() for path in folder.iterdir() if path.suffix in (".json", ".md")]
    assert not [word for text in texts for word in ("MRN0", "Zaphod") if word in text]
    assert any('"values": [' in text for text in texts)


def test_texts_are_predicted(tmp_path: Path) -> None:
    table = tmp_path / "reviews.csv"
    table.write_text("review,label\n" + "".join(f"{('good', 'bad')[n % 2]} {n},{n % 2}\n" for n in range(60)))
    folder, _ = exported_from(table, tmp_path, text="review", length=4)
    (tmp_path / "new.txt").write_text("good soup\nbad soup\n")
    (tmp_path / "new.csv").write_text("id,review\n1,good soup\n2,bad soup\n")
    lines, rows = (list(fedkeep.predict(folder, [tmp_path / f"new.{kind}"])) for kind in ("txt", "csv"))
    assert [each.row for each in lines] == [0, 1]
    assert [(each.label, each.probability) for each in lines] == [(each.label, each.probability) for each in rows]
    with torch.no_grad():
        scores = fedkeep.load_model(folder)[0](tokenise(["good soup", "bad soup"], "here", 4, 50, Problems())).softmax(
            -1
        )
    assert [each.probability for each in rows] == pytest.approx(scores.amax(-1).tolist())
    (tmp_path / "new.txt").write_text("\ufeffgood soup\nbad\x0csoup\r\n\nbad soup", newline="")
    assert [each.row for each in fedkeep.predict(folder, [tmp_path / "new.txt"])] == [0, 1, 2, 3], "a text a line"
    np.savez(tmp_path / "new.npz", x=np.array([[1, 2, 3, 4], [1, 50, 0, 0]]))
    with pytest.raises(DataError, match=r"new\.npz: row 1 has a token id outside 0 to 49"):
        list(fedkeep.predict(folder, [tmp_path / "new.npz"]))


def test_a_model_of_a_data_frame_predicts_files_of_the_same_columns(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"review": [f"{('good', 'bad')[n % 2]} {n}" for n in range(60)], "outcome": [0, 1] * 30})
    run = fedkeep.run(
        data=frame, label="outcome", text="review", settings=["data.length=4"], partition=fedkeep.IID(num_clients=2),
        model="embedding-bag", methods=["fedavg"], rounds=1, seeds=1, out=tmp_path / "run",
    )  # fmt: skip
    folder = fedkeep.export_model(run, onnx=False)
    (tmp_path / "new.txt").write_text("good soup\nbad soup\n")
    (tmp_path / "new.csv").write_text("id,review\n1,good soup\n2,bad soup\n")
    lines, rows = (list(fedkeep.predict(folder, tmp_path / f"new.{kind}")) for kind in ("txt", "csv"))
    assert [each.probability for each in lines] == [each.probability for each in rows]


def test_arrays_are_predicted_if_they_are_what_the_network_takes(exported: Path, tmp_path: Path) -> None:
    images = fedkeep.load("digits").test["input"][:3]
    np.savez(tmp_path / "new.npz", x=images.numpy())
    with torch.no_grad():
        best = fedkeep.load_model(exported)[0](images).argmax(-1).tolist()
    assert [(each.row, each.label) for each in fedkeep.predict(exported, [tmp_path / "new.npz"])] == [
        (row, str(label)) for row, label in enumerate(best)
    ]
    np.savez(tmp_path / "new.npz", x=np.zeros((2, 5)))
    with pytest.raises(DataError, match=r"float32 inputs of shape \[5\], and the model takes uint8"):
        list(fedkeep.predict(exported, [tmp_path / "new.npz"]))


class Tokens(torch.nn.Module):
    """Reads token ids and their places, of which there are fewer; asks for the number of examples by len()."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(50, 8), torch.nn.Embedding(4, 8)
        self.out = torch.nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        read = self.words(input=ids) + self.places(torch.arange(4))
        return self.out(read.view(len(ids), 4, 8).mean(1))


def of_arrays(x: Any, y: Any, network: Any, out: Path) -> fedkeep.RunResult:
    return fedkeep.run(
        data=(x[:40], y[:40], x[40:], y[40:]),
        partition=fedkeep.IID(num_clients=2),
        model=network,
        methods=["fedavg"],
        rounds=1,
        seeds=[0],
        out=out,
    )


def test_token_ids_are_those_of_the_layer_that_reads_them(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 50, (60, 4))
    folder = fedkeep.export_model(of_arrays(x, (x[:, 0] > 25).astype(int), Tokens(), tmp_path / "run"), onnx=False)
    program = torch.export.load(folder / "model.pt2").module()
    np.savez(tmp_path / "new.npz", x=x[40:])
    found = [each.label for each in fedkeep.predict(folder, [tmp_path / "new.npz"], network=Tokens())]
    assert found == [str(label) for label in program(torch.from_numpy(x[40:])).argmax(-1).tolist()]
    np.savez(tmp_path / "new.npz", x=x[40:] + 1)
    if (x[40:] == 49).any():
        with pytest.raises(DataError, match="a token id outside 0 to 49, which the model knows"):
            list(fedkeep.predict(folder, [tmp_path / "new.npz"], network=Tokens()))


def test_what_onnx_lacks_is_left_out_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("onnxscript")
    x = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
    turning = torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(6, 6))
    run = of_arrays(x, (x[:, 0] > 0).astype(int), torch.nn.Sequential(turning, torch.nn.Linear(6, 2)), tmp_path / "run")
    with pytest.raises(ConfigError, match="cannot be written as ONNX"):
        fedkeep.export_model(run, onnx=True, out=tmp_path / "strict")
    folder = fedkeep.export_model(run)
    assert {"model.pt2", "config.json", "README.md"} <= {path.name for path in folder.iterdir()}
    assert not (folder / "model.onnx").exists()
    assert "no model.onnx: PyTorch cannot write this network as ONNX" in caplog.text
