"""What README and CONTRIBUTING show works as written."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tomli_w
from each import for_each
from pages import DOCS, PAGES, ROOT, blocks, headings, text

import fedkeep
from fedkeep.cli import main
from fedkeep.data import Tasks
from fedkeep.errors import ConfigError
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.recipe import OPTIONS, client_architectures
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.interface import algorithms
from fedkeep.models.pretrained import Pretrained
from fedkeep.options import build, options_of
from fedkeep.reporting.metric import METRICS
from fedkeep.reporting.run_folder import read_run, runs_in
from fedkeep.reporting.summary import summary
from fedkeep.testing import checks_for


def test_the_lines_of_python_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (demo,) = blocks("docs/get-started.md", "python")
    assert "rounds=20" in demo
    exec(compile(demo.replace("rounds=20", "rounds=4"), "get-started.md", "exec"), {})  # noqa: S102 - the repository's own text
    printed = capsys.readouterr().out.splitlines()
    averages = ("", ", mean of the round", ", moving average")
    assert [line.split(":")[0] for line in printed[:6]] == [f"{m}{a}" for m in ("FedSeq", "SFedKD") for a in averages]
    assert Path(printed[-1]).is_file()


@pytest.mark.slow
def test_a_module_of_hugging_face_trains_in_twelve_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("docs/how-to/initial-model.md", "python")
    assert len([line for line in code.splitlines() if line]) <= 12
    exec(compile(code, "initial-model.md", "exec"), {})  # noqa: S102 - the repository's own text
    assert "{'0': 1.0, '1': 1.0}" in capsys.readouterr().out, "it has learned"


def test_the_examples_of_the_page_on_extending_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "extensions.py"
    file.write_text("\n".join(blocks("docs/how-to/extend.md", "python")))
    try:
        import_user_code([str(file)])
    finally:
        METRICS.pop("worst_class", None)
    for table in ("table.md", "report.html", "results.csv"):
        assert re.search("worst.class", next(tmp_path.glob(f"runs/*/{table}")).read_text()), table
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed if line.startswith("unsure")] == [["unsure", "1"], ["unsure", "2"]]
    told = [line.split(" worst")[0] for line in printed if " worst class" in line]
    assert [label for label in told if "," not in label] == ["FedAvg", "Unsure"]


def test_the_path_of_the_page_on_architecture_is_the_code() -> None:
    """Every call of the table is defined in the file that the table names."""
    rows = re.findall(r"^\| \d+ \| `([\w.]+)` \| `([\w./]+)` \|", (ROOT / "docs" / "architecture.md").read_text(), re.M)
    assert len(rows) == 13
    for name, file in rows:
        text = (ROOT / "fedkeep" / file).read_text()
        assert all(re.search(rf"(class|def) {part}\b", text) for part in name.split(".")), name


def test_any_parallel_method_can_fuse_by_transport(tmp_path: Path) -> None:
    (code,) = blocks("docs/class-incremental.md", "python")
    file, out = tmp_path / "fused.py", tmp_path / "run"
    file.write_text(code)
    arguments = ["run", "--use", str(file), "--methods", "fedprox,fedprox-pit", "--rounds", "2", "--seeds", "0"]
    assert main([*arguments, "--workers", "1", "--quiet", "--out", str(out)]) == 0
    plain, fused = (read_run(out).trials[location].rounds for location in (0, 1))
    assert plain[0]["loss"] == fused[0]["loss"], "as long as nothing was fused"
    assert plain[-1]["correct"] != fused[-1]["correct"]


def test_the_method_of_the_guide_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = blocks("CONTRIBUTING.md", "python")
    file = tmp_path / "fedprox_sketch.py"
    file.write_text(code)
    out = tmp_path / "run"
    arguments = ["run", "--use", str(file), "--methods", "fedavg,prox", "--set", "prox.strength=0.1"]
    assert main([*arguments, "--rounds", "2", "--seeds", "0", "--workers", "1", "--out", str(out)]) == 0
    assert "Prox" in capsys.readouterr().out
    fedavg, prox = (
        (out / "trials" / f"{name}-seed0" / "model.safetensors").read_bytes() for name in ("fedavg", "prox")
    )
    assert fedavg != prox


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The names that the guide's test defines."""
    code, test = blocks("CONTRIBUTING.md", "python")
    file = tmp_path_factory.mktemp("guide") / "fedprox_sketch.py"
    file.write_text(code)
    import_user_code([str(file)])
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        # Under the name that the guide imports it by; imported twice, two methods would have one name.
        patch.setitem(sys.modules, "fedprox_sketch", sys.modules["fedkeep_used_fedprox_sketch"])
        exec(compile(test, "CONTRIBUTING.md", "exec"), found)  # noqa: S102 - the repository's own text
        yield found


def test_the_method_of_the_guide_has_the_test_that_the_guide_shows(guide: dict[str, Any]) -> None:
    (mark,) = guide["test_strong_prox"].pytestmark
    assert [case.id for case in mark.args[1]] == [name for name, _ in checks_for(guide["Prox"])]
    for case in mark.args[1][:2]:
        guide["test_strong_prox"](*case.values)


@pytest.mark.slow
def test_the_method_of_the_guide_keeps_what_every_method_must(guide: dict[str, Any]) -> None:
    guide["test_prox"]()


LONG = {"pre-trained": pytest.mark.slow}  # a quarter of a minute
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))


@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem, marks=LONG.get(p.stem, ())) for p in TUTORIALS])
def test_a_tutorial_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, path.stem, module := ModuleType(path.stem))  # where its classes are found
    module.__file__ = str(path)
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)  # noqa: S102 - the repository's own text
    assert list(tmp_path.glob("runs/*/report.html"))


def test_the_pages_of_methods_have_formulas_and_name_options_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("latex2mathml", reason="the extra docs is not installed")
    monkeypatch.syspath_prepend(ROOT / "tools")
    site = importlib.import_module("site_source")
    ours = {name: cls for name, cls in algorithms().items() if cls.__module__.startswith("fedkeep.algorithms.")}
    assert set(site.METHODS) <= set(ours)
    for name, cls in ours.items():  # other tests register methods of their own
        page = site.method_page(cls, [])
        drawn = re.findall(r"<math .*?</math>", page)
        assert len(drawn) == len(site.METHODS.get(name, {}).get("formulas", ())), name
        without_sources = [re.sub(r'alttext="[^"]*"', "", formula) for formula in drawn]
        assert not [formula for formula in without_sources if "\\" in formula], "LaTeX that was not understood"
        assert drawn, name
        for section, option in re.findall(r"`(\w+)\.(\w+)=", page):
            assert option in options_of(OPTIONS[section]), f"{name}: {section}.{option}"
        linked = re.findall(r"\]\(\.\./([\w-]+\.md)\)", page)
        assert not [target for target in linked if not (ROOT / "docs" / target).is_file()], name
        if "fedkeep run demo" in page:
            load_recipe("demo", methods=[name], seeds=[0], rounds=2)


@pytest.mark.slow
def test_the_demo_table_is_the_demo(tmp_path: Path) -> None:
    """The quickest row of the page's table comes out again; processors round differently, so within a point."""
    table = text("docs/get-started.md").split("<!-- demo table", 1)[1].split("<!-- end", 1)[0]
    rows = {cells[1].strip(): cells for line in table.splitlines() if len(cells := line.split("|")) > 4}
    assert [method.label for method in load_recipe("demo").methods] == [row for row in list(rows)[2:] if "," not in row]
    printed = float(rows["FedSeq"][3].split("±")[0].strip(" *"))
    row, *_ = summary(fedkeep.run("demo", methods=[fedkeep.FedSeq()], out=tmp_path / "run"))  # then its averages
    assert 100 * row.value("window_mean").mean == pytest.approx(printed, abs=1.0)


LINKED = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "results/notes.md", "tests/references/README.md"),
    *DOCS,
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks").rglob("*.md")),
]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and its like make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M), flags=re.M)
    shown = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in shown}


@for_each(LINKED)
def test_links_lead_somewhere_in_the_repository_itself(name: str) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text()):
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            dead.append(link)
    assert not dead


@pytest.mark.parametrize(
    "term",
    [
        *("class-incremental", "model heterogeneity", "EMA", "generative replay", "synthetic images", "non-IID"),
        *("catastrophic forgetting", "knowledge distillation", "client drift", "rehearsal", "strategy"),
    ],
)
def test_terms_that_people_search_for_are_in_the_glossary(term: str) -> None:
    assert term.lower() in (ROOT / "docs" / "glossary.md").read_text().lower()


def test_lines_that_install_work_without_an_index_that_has_fedkeep() -> None:
    """It is not on PyPI: pages and messages install a checkout or a wheel, and say how much PyTorch takes."""
    texts = {page: (ROOT / page).read_text() for page in PAGES}
    texts |= {str(path): path.read_text() for path in (ROOT / "fedkeep").rglob("*.py")}
    wrong = [
        name for name, text in texts.items() if re.search(r"pip3? install [^\n]*['\" ]fedkeep(\[|['\"\s]|$)", text)
    ]
    assert not wrong
    assert re.search(r"with CUDA \([\d.]+ GB.* CPU only \([\d.]+ GB", texts["docs/get-started.md"], flags=re.S)


def test_the_table_of_metrics_names_and_explains_all(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("latex2mathml", reason="the extra docs is not installed")
    monkeypatch.syspath_prepend(ROOT / "tools")
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", importlib.import_module("site_source").metrics_page(), flags=re.M)
    assert [name for name, _ in rows] == list(METRICS)
    assert all(len(meaning) > 20 for _, meaning in rows)


@for_each(LINKED)
def test_every_column_of_a_table_has_a_head(name: str) -> None:
    """Screen readers name a cell by it."""
    heads = re.findall(r"^(\|.*\|)\n\|:?-+", (ROOT / name).read_text(), flags=re.M)
    assert not [head for head in heads if any(not cell.strip() for cell in head.strip("|").split("|"))]


@for_each(PAGES)
def test_headings_leave_no_level_out(page: str) -> None:
    """Screen readers take them for a table of contents."""
    levels = headings(page)
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_the_navigation_calls_tutorials_by_their_headings(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("latex2mathml", reason="the extra docs is not installed")
    monkeypatch.syspath_prepend(ROOT / "tools")
    site = importlib.import_module("site_source")
    sections = {title: pages for entry in site.navigation({}) for title, pages in entry.items()}
    assert [title for entry in sections["Tutorials"] for title in entry] == [
        "Your own data", "Your own model", "A pre-trained network", "Your own method", "New classes over time"
    ]  # fmt: skip
    assert sections["Findings"][0] == "docs/findings.md"


def test_links_to_what_pages_are_made_from_lead_to_the_pages_on_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("latex2mathml", reason="the extra docs is not installed")
    monkeypatch.syspath_prepend(ROOT / "tools")
    site = importlib.import_module("site_source")
    sources = [
        "fedkeep/algorithms/sequential/sfedkd.py",
        "fedkeep/algorithms",
        "docs/tutorials/own-data.py#x",
        "README.md",
        "fedkeep/cli",
        "fedkeep/reporting/metric.py",
    ]
    text = " ".join(f"[a](../../{source})" for source in [*sources, "LICENSE"])
    pages = ["../methods/sfedkd.md", "../methods/index.md", "../tutorials/own-data.md", "../../index.md"]
    pages += ["../reference/commands.md", "../reference/metrics.md"]
    assert not [path for path in site.made_pages() if not path.exists()]
    assert site.on_site(text, ROOT / "docs" / "how-to").split() == [*(f"[a]({page})" for page in pages), "a"]


def test_the_commands_of_the_deployment_guide_are_those_that_the_script_runs() -> None:
    lines = [line for block in blocks("docs/deploy.md", "sh") for line in block.splitlines()]
    script = "".join(path.read_text() for path in (ROOT / "tests" / "hosts").glob("*.py"))
    flags = {word.strip("'") for line in lines for word in shlex.split(line, comments=True) if word.startswith("--")}
    ours = {flag for flag in flags if flag not in script}
    assert {"--enable-supernode-auth", "--auth-supernode-private-key", "--run-config"} <= flags
    assert not ours, f"{ours} are not tried by the script"


def test_the_bytes_in_the_deployment_guide_are_the_engines() -> None:
    table = (ROOT / "docs" / "deploy.md").read_text().split("<!-- bytes", 1)[1].split("<!-- end", 1)[0]
    rows = {cells[1].strip(): cells for line in table.splitlines() if len(cells := line.split("|")) > 4}
    spec = importlib.util.spec_from_file_location("bytes_per_method", ROOT / "benchmarks" / "bytes_per_method.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for method in ("SFedKD", "SCAFFOLD", "FedPASS"):
        assert script.row(method.lower()) == "|".join(rows[method]).strip()


def test_a_methods_page_says_which_records_have_other_options(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("latex2mathml", reason="the extra docs is not installed")
    monkeypatch.syspath_prepend(ROOT / "tools")
    runs = runs_in(ROOT / "results" / "sequences.zip")
    lines = importlib.import_module("site_source").results_by_method(runs)["seqkeep"]
    (taught,) = [line for line in lines if line.startswith("| sequences/seqkeep-variants | non-target 3 |")]
    assert "| w_nontarget=3.0, evaluate=last |" in taught
    (former,) = [line for line in lines if "| non-target 1, chains from the average |" in line]
    assert "| w_nontarget=1.0, evaluate=last, start=average |" in former


def test_every_public_name_is_there() -> None:
    assert all(getattr(fedkeep, name) for name in fedkeep.__all__)


def test_the_tasks_of_the_guide_can_be_read() -> None:
    (written,) = blocks("docs/class-incremental.md", "toml")
    everything = re.sub(r"^# (\w+ = )", r"\1", written, flags=re.M)
    assert tomllib.loads(written) == {"tasks": {"num_tasks": 5}}
    options = tomllib.loads(everything)["tasks"]
    assert set(options) == set(options_of(Tasks)) - {"same_seed_each_task"}
    for name, value in options.items():
        build(Tasks, {name: value} | ({"num_tasks": 4} if name == "classes_per_task" else {}), "the guide")


def test_the_tables_of_the_page_on_networks_are_a_recipe(tmp_path: Path) -> None:
    models, public, frozen = (tomllib.loads(text) for text in blocks("docs/model-heterogeneity.md", "toml"))
    table = tomllib.loads((ROOT / "fedkeep" / "recipes" / "fedkeep" / "different-networks.toml").read_text())
    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps(table | models | public | {"partition": table["partition"] | {"num_clients": 8}}))
    recipe = load_recipe(str(path))
    assert recipe.public.num_images == 2000
    assert set(client_architectures(recipe.client_models, list("01234567"))) == {"0", "1", "2", "7"}
    with pytest.raises(ConfigError, match="exchanges weights"):
        load_recipe(str(path), methods=["fedavg"])
    path.write_text(tomli_w.dumps(table | models | public | frozen))
    assert load_recipe(str(path)).model == Pretrained(source="google/vit-base-patch16-224")


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("missing values", "data.md"), ("csv", "data.md"), ("regression", "data.md"),
        ("class imbalance", "which-method.md"), ("early stopping", "how-to/resume.md"),
        ("hugging face model", "how-to/initial-model.md"),
    ],
)  # fmt: skip
def test_what_people_search_for_stands_in_a_heading(words: str, page: str) -> None:
    """The search of the site weighs headings most."""
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(), flags=re.M)
    assert [heading for heading in headings if words in heading.lower()]
