"""The page and its figures: what they show, that they open offline, and that a label stays a label."""

from __future__ import annotations

import io
import re
from base64 import b64decode, b64encode
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import tiny
from synthetic_run import read_run, write_demo, write_run, write_trial

import fedkeep
from fedkeep.errors import RunError
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.reporting.figures import (
    class_heatmaps,
    client_accuracies,
    curves,
    history,
    save_figure,
    smoothing,
    styles,
    teacher_heatmaps,
)
from fedkeep.reporting.html import render, write_all, write_report
from fedkeep.reporting.run_folder import Run
from fedkeep.reporting.summary import summary

VOID = {"meta", "link", "br", "img", "input", "hr", "path", "use", "rect", "image", "circle"}


class Page(HTMLParser):
    """Every tag with its attributes, the text, and the tags that were closed out of order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def page(demo: Run) -> Page:
    return Page(render(demo))


def test_page_is_well_formed_with_unique_ids_and_alt_texts(page: Page) -> None:
    assert page.wrong == []
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [str(a["href"])[1:] for _, a in page.tags if str(a.get("href", "")).startswith("#")]
    targets += [str(a["aria-labelledby"]) for _, a in page.tags if "aria-labelledby" in a]
    assert targets
    assert set(targets) <= set(ids)
    charts = [a for tag, a in page.tags if tag == "svg" and a.get("aria-hidden") != "true"]
    assert [a["role"] for a in charts] == ["img"] * 3
    alts = [str(a["aria-label"]) for a in charts]
    assert "accuracy" in alts[0]
    assert "FedSeq" in alts[0]
    assert "forgetting" in alts[1]
    assert "loss" in alts[2]
    maps = [str(a["alt"]) for tag, a in page.tags if tag == "img"]
    assert [alt.split(":")[0] for alt in maps[:2]] == [
        "Map of FedAvg",
        "Map of FedSeq (1 of 40 rounds rolled back in 1 of 3 seeds)",
    ]
    assert "20 clients, 10 classes" in maps[-1]


def test_page_opens_offline_and_runs_its_own_script_only(demo: Run) -> None:
    text = render(demo)
    page = Page(text)
    assert not {"link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.tags}
    (code,) = re.findall(r"<script>(.*?)</script>", text, flags=re.S)
    assert len(code) < 100_000
    digest = b64encode(sha256(code.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in {"href", "src", "xlink:href", "srcset", "data"}:
                assert str(value).startswith(("#", "data:image/png")), (tag, name, value)
    assert not re.search(r"https?:|@import|url\((?!#)|javascript:|//[a-z]+\.", text)
    assert not re.search(r"fetch|XMLHttp|import\(|eval|innerHTML|localStorage|cookie|WebSocket", code)


def test_page_shows_what_was_run_and_what_came_out(page: Page) -> None:
    for part in (
        "Digits: what is kept", "Accuracy, rounds 21–40: SFedKD (",
        "20, 10 a round", "exdir (C 2, alpha 0.5)", "4 March 2026, 05:06 UTC", "seed 2, 20 of 40 rounds",
        "10 clients were lost and 2 rounds were rolled back", "3 (too late), 7 (not finite: classifier.weight)",
        "2 more draws", "minus FedAvg", "teachers = 5, temperature = 4.0", "Xu et al., SFedKD",
        "fedkeep run demo/recipe.toml", "fedkeep run demo --seeds 0,1", "torch 2.13.0", "[[methods]]",
    ):  # fmt: skip
        assert part in page.text, part
    assert "/home/me" not in page.text


def test_settings_of_local_training_are_shown_and_a_methods_own(tmp_path: Path) -> None:
    recipe = load_recipe(
        tiny.write_recipe(tmp_path),
        settings=["fedseq.training.optimizer=adam", "fedseq.training.max_grad_norm=1.0", "training.lr_decay=0.9"],
        methods=["fedavg", "fedseq"],
        rounds=1,
    )
    text = Page(render(read_run(fedkeep.run(recipe, out=tmp_path / "run").path))).text
    assert "local training optimizer sgd, epochs 1, batch_size 64, lr 0.05, lr_decay 0.9" in text
    assert text.count("its own local training: ") == 1
    assert "its own local training: optimizer adam, max_grad_norm 1.0" in text


def test_class_wise_table_holds_the_mean_over_seeds(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for seed, last in enumerate([[9, 2, 0], [4, 3, 0]]):
        write_trial(run, "FedAvg", seed, [[1, 1, 0], last], total=[10, 10, 0], counts=[[1, 0, 0], [0, 2, 1]])
    text = render(read_run(run))
    assert re.findall(r'<td style="--v:([\d.]+)">([\d.]+)</td>', text) == [("0.650", "65.0"), ("0.250", "25.0")]
    assert '<td class="mean">45.0</td>' in text


def test_many_classes_turn_the_class_wise_table(tmp_path: Path) -> None:
    text = render(read_run(write_demo(tmp_path / "run", classes=25, rounds=4)))
    assert "last row is the mean over classes" in text
    assert Page(text).wrong == []


def test_a_label_cannot_become_markup(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", title="<script>alert(1)</script>", recipe="# </code><img src=x>\n")
    label = '<b>x</b> $a$ & "quoted" \''
    write_trial(run, label, 0, [[1, 1], [2, 2]], paper="<i>p</i>", rows={1: {"lost": {"<u>3</u>": "<s>r</s>"}}},
               dataset="<em>d</em>", label_names=["<q>0</q>", "<q>1</q>"])  # fmt: skip
    text = render(read_run(run))
    page = Page(text)
    assert not {"b", "i", "u", "s", "em", "q"} & {tag for tag, _ in page.tags}
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert all(str(attributes["src"]).startswith("data:") for tag, attributes in page.tags if tag == "img")
    assert page.wrong == []
    assert page.text.count(label) >= 4  # tables and the figure
    assert "&lt;b&gt;x&lt;/b&gt;" in text


def test_a_page_of_several_runs_names_the_version_of_each(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, fedkeep=version) for name, version in (("old", "0.1.0"), ("new", "0.2.0"))]
    for seed, run in enumerate(runs):
        write_trial(run, "FedAvg", seed, [[9, 9]])
    assert "0.1.0 (old), 0.2.0 (new)" in render([read_run(run) for run in runs])
    assert "0.1.0 (" not in render([read_run(runs[0]), read_run(runs[0])])


def test_unstarted_and_unevaluated_runs_have_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert "no method has started yet" in render(read_run(run))
    write_trial(run, "FedAvg", 0, [None], finished=False, planned=9)
    page = Page(render(read_run(run)))
    assert "nothing was evaluated yet" in page.text
    assert "seed 0, 1 of 9 rounds" in page.text


def test_finish_writes_everything_whole_and_the_same_each_time(tmp_path: Path) -> None:
    path = write_demo(tmp_path / "run", rounds=6)
    write_all(path)
    names = ("results.csv", "table.md", "report.html")
    first = [(path / name).read_bytes() for name in names]
    write_all(path)
    assert [(path / name).read_bytes() for name in names] == first
    assert first[0].count(b"\n") == 10
    assert sorted(p.name for p in path.iterdir()) == sorted([*names, "trials", "run.json", "recipe.toml"])


def test_a_failed_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = read_run(write_demo(tmp_path / "run", rounds=2))
    report = tmp_path / "report.html"
    report.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(run, report)
    assert report.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "run"]


def test_history_averages_only_what_all_seeds_have(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_trial(run, "FedAvg", 0, [[2, 2], None, [4, 4], [6, 6]])
    write_trial(run, "FedAvg", 1, [[4, 4], [9, 9], [6, 6], [8, 8]])
    trials = read_run(run).trials
    rounds, values = history(trials, "accuracy")
    np.testing.assert_array_equal(rounds, [1, 3, 4])
    np.testing.assert_allclose(values, [[20, 40, 60], [40, 60, 80]])
    np.testing.assert_allclose(history(trials, "accuracy", window=2)[1], [[20, 30, 50], [40, 50, 70]])
    rounds, values = history(trials[:1], "forgetting")  # none at the first evaluation
    np.testing.assert_array_equal(rounds, [3, 4])
    np.testing.assert_allclose(values, [[-20, -20]])


def test_curves_draw_the_mean_of_finished_seeds_and_each_unfinished_one(demo: Run) -> None:
    figure = curves(demo.trials, "accuracy")
    lines = [line for line in figure.axes[0].lines if len(line.get_xdata()) > 2]
    assert len(lines) == 4
    fedavg = [trial for trial in demo.trials if trial.label == "FedAvg"]
    np.testing.assert_allclose(lines[0].get_ydata(), 100 * np.mean([c.accuracies for c in fedavg], axis=0))
    assert max(lines[2].get_xdata()) == 20  # the unfinished seed of SFedKD, ahead of the mean of the other two
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["FedAvg", "FedSeq", "SFedKD"]
    assert len({line.get_color() for line in lines}) == 3
    with pytest.raises(RunError, match="no curves of 'los'"):
        curves(demo.trials, "los")


def test_smoothing_grows_with_the_number_of_evaluations(demo: Run, tmp_path: Path) -> None:
    assert smoothing(demo.trials) == 1
    longer = read_run(write_demo(tmp_path / "run", rounds=160)).trials
    assert smoothing(longer) == 4
    figure = curves(longer, "accuracy")
    assert "running mean of 4 evaluations" in figure.axes[0].get_title(loc="left")


def test_a_method_looks_the_same_in_every_figure(demo: Run) -> None:
    looks = styles(demo.trials)
    assert looks["SFedKD"] == styles(demo.trials)["SFedKD"]
    only = [trial for trial in demo.trials if trial.label == "SFedKD"]
    many = (replace(only[0], label=str(number)) for number in range(20))
    assert len({(style.colour, style.dashes) for style in styles(many).values()}) == 20
    served = styles(
        replace(only[0], label=label, evaluation_model=which)
        for label, which in (
            ("A", "last"),
            ("A, moving average", "moving"),
            ("B", "last"),
            ("B, mean of the round", "round"),
            ("A, moving average (lr=1)", "moving"),
            ("A (lr=1)", "last"),
        )
    )
    assert served["A"].colour == served["A, moving average"].colour != served["B"].colour
    assert served["A, moving average"].dashes not in (served["A"].dashes, served["B, mean of the round"].dashes)
    assert served["A (lr=1)"].colour == served["A, moving average (lr=1)"].colour != served["A"].colour


def test_figures_are_deterministic(demo: Run, tmp_path: Path) -> None:
    paths = [save_figure(curves(demo.trials, "accuracy"), tmp_path / f"{i}.png") for i in range(2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].read_bytes().startswith(b"\x89PNG")


def test_a_map_is_its_values(tmp_path: Path) -> None:
    from PIL import Image

    run = write_run(tmp_path / "run")
    write_trial(run, "FedAvg", 0, [[0, 10, 0], [5, 10, 0]], total=[10, 10, 0], counts=[[1, 1, 0]] * 2)
    (picture,) = class_heatmaps(summary(read_run(run)))
    pixels = np.asarray(Image.open(io.BytesIO(b64decode(picture["png"]))))
    assert pixels.shape == (3, 2, 4)
    assert pixels[..., 3][:2].tolist() == [[0, 128], [255, 255]]
    assert len(set(pixels[2, 0, :3].tolist())) == 1, "what has no test example is grey"
    assert "0 50, 1 100" in picture["alt"]


def test_teachers_are_shown_with_their_weights(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    log = {"teachers": ["3", "11"], "target_weights": [0.5, 2.0], "nontarget_weights": [1.0, 0.0]}
    write_trial(
        run, "SFedKD", 0, [[1, 1], [2, 2], [3, 3]], rows={2: {"log": log}, 3: {"log": log | {"teachers": ["3", "4"]}}}
    )
    target, nontarget = teacher_heatmaps(summary(read_run(run)))
    assert target["rows"] == ["3", "4", "11"]
    assert (target["columns"], target["what"]["top"]) == (["2", "3"], 2.0)
    assert nontarget["title"] == "SFedKD, weight of the non-target part"
    assert "Who teaches" in render(read_run(run))


def test_a_run_records_who_taught_and_what_was_taken_for_what(tmp_path: Path) -> None:
    run = fedkeep.run(tiny.write_recipe(tmp_path), methods=[fedkeep.SFedKD(teachers=2)], rounds=2, out=tmp_path / "run")
    (trial,) = run.trials
    assert trial.rounds[0]["log"] == {}, "the first round has no teachers"
    log = trial.rounds[1]["log"]
    assert set(log["teachers"]) <= set(trial.rounds[0]["cohort"])
    assert len(log["teachers"]) == len(log["target_weights"]) == len(log["nontarget_weights"]) == 2
    assert sum(log["nontarget_weights"]) == pytest.approx(1, abs=1e-3)
    confusions = np.asarray(trial.confusions)
    np.testing.assert_array_equal(confusions.sum(axis=1), trial.test_total)
    np.testing.assert_array_equal(np.diag(confusions), trial.rounds[1]["correct"])
    assert "What is taken for what" in render(run)


def test_accuracy_by_client_is_that_of_its_classes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_trial(run, "FedAvg", 0, [[5, 10]], counts=[[8, 0], [0, 4], [2, 2]])
    (line,) = client_accuracies(summary(read_run(run)))["lines"]
    assert line["box"] == pytest.approx([50, 55, 75, 95, 100])
    assert line["texts"][:3] == ["75.0", "50.0", "50.0"]


def test_many_long_labels_get_a_legend_inside_the_figure(tmp_path: Path) -> None:
    labels = {f"Method number {i} (teachers={i})": 0.8 for i in range(9)}
    figure = curves(read_run(write_demo(tmp_path / "run", rounds=2, labels=labels)).trials, "accuracy")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(labels)
    figure.draw_without_rendering()
    box = legend.get_window_extent()
    assert box.x1 <= figure.bbox.x1
    assert box.y1 <= figure.axes[0].get_tightbbox().y0 + 1


def test_the_command_that_repeats_a_run_says_where_its_data_are_and_how_it_was_run(tmp_path: Path) -> None:
    recipe = '[data]\nname = "patients.csv"\n[model]\nname = "nets:build"\n'
    run = read_run(write_run(tmp_path / "run", recipe=recipe, threads=2, stack=3, data_path="/here/patients.csv"))
    page = render(run)
    assert "fedkeep run run/recipe.toml --threads=2 --stack=3 --allow-code" in page
    assert "The data, <code>patients.csv</code>, must lie there too" in page
    assert "/here" not in page
