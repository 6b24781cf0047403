"""Read recipes from TOML files and change them: ``extends``, ``--set``, and grids of options.

All keys and values are checked before anything runs.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from fedkeep.data.catalog import is_known
from fedkeep.data.partition import schemes
from fedkeep.errors import ConfigError, collect, did_you_mean, refuse
from fedkeep.experiment.recipe import INITIAL_MODEL, SECTIONS, Method, Recipe, default_label, rows_named, with_own_model
from fedkeep.experiment.recipe_files import parse_toml, read_recipe_file, titled
from fedkeep.interface import Training, algorithms, get_algorithm
from fedkeep.models import Architecture, architectures
from fedkeep.options import Options, as_table, build, check_values, options_of, plain

TRAINING = "training."
"""What an option of local training begins with in the grid of a method."""
KINDS = {"partition": "scheme", "paper": "table"}
"""The option of a section that decides which other options there are; of all others it is the name."""

GONE: dict[tuple[str, str], Any] = {
    ("defense", "logit_deviations"): None,
    ("defense", "rerun_distance"): None,
    ("defense", "collapsed_rounds"): 0,
    ("generator", "by_task"): [],
    ("training", "eps"): 1e-8,
    ("training", "lr_step_size"): 1,
    ("cwc", "importance"): "fisher",
}
"""Options of sections and methods that are no more, with the value that kept recipes give them; None for any value."""


def load_recipe(
    name: str,
    *,
    settings: Sequence[str] = (),
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    rounds: int | None = None,
    log: Sequence[str] | None = None,
    allow_code: bool = False,
    grid: bool | Sequence[str] | Mapping[str, Any] | None = None,
    model: Architecture | None = None,
) -> Recipe:
    """Read a recipe by name or path, apply changes, and check all of it.

    Parameters
    ----------
    name : str
        The name of a recipe that comes with the package, or a path to a .toml file.
    settings : Sequence[str]
        Changes such as ``"training.lr=0.05"``, ``"algorithm.teachers=3"`` (all methods that have the option) or
        ``"sfedkd.tau=1"`` (that method, by name or label).
    methods : Sequence[str], optional
        Methods to run instead of the recipe's; those that the recipe lists keep its options.
    seeds : Sequence[int], optional
        Seeds to run instead of the recipe's.
    rounds : int, optional
        Rounds to run instead of the recipe's.
    log : Sequence[str], optional
        Where metrics are logged, instead of the recipe's ``log``.
    allow_code : bool
        Let the recipe name a model as ``package.module:function``, which is then imported.
    grid : bool or Sequence[str] or Mapping[str, list], optional
        Run a method once for every combination of the options in its ``grid``. A sequence or a table adds to the grids,
        such as ``["sfedkd.tau=1,2,4"]`` or ``{"training.lr": [0.01, 0.1]}``. By default the grids of a recipe are run,
        except in a recipe with a paper's numbers, whose grids say what the paper tuned; False leaves all out.
    model : Architecture, optional
        The model of a recipe whose own cannot be imported, since it was given in Python.

    Returns
    -------
    Recipe
        The recipe.

    Raises
    ------
    ConfigError
        For anything that cannot be run as written, with the nearest valid name.
    """
    table, where = read_recipe_file(name, _extend)
    _checked(table, where)
    if rounds is not None:
        table.setdefault("run", {})["rounds"] = rounds
    table |= {name: list(given) for name, given in {"seeds": seeds, "log": log}.items() if given is not None}
    if methods is not None:
        table["methods"] = _select_methods(table.get("methods", []), methods)
    problems, expanded = apply_overrides(table, settings), bool(grid)
    with collect(problems):
        expanded = grid if isinstance(grid, bool) else add_grids(table, grid or ()) or "paper" not in table
    if settings:
        # The title of a recipe that comes with FedKeep describes what it is, not what a user made of it.
        title = table.get("title", name) if name.endswith(".toml") else name
        table["title"] = f"{title} (changed: {', '.join(settings)})"
    return _build(name, table, where, allow_code, model, expanded, problems)


def parse_recipe(
    text: str,
    where: str,
    *,
    settings: Sequence[str] = (),
    allow_code: bool = False,
    model: Architecture | None = None,
    without: Sequence[str] = (),
) -> Recipe:
    """Read a recipe from a text, such as `Recipe.to_toml` writes, and check all of it.

    ``where``: What error messages call it.
    ``allow_code``: Let the recipe name a model as ``package.module:function``, which is then imported.
    ``model``: The model of a recipe whose own cannot be imported, since it was given in Python.
    ``without``: Sections that are left out.
    """
    table = _checked(parse_toml(text, where), where)
    table = {name: part for name, part in table.items() if name not in without}
    return _build(where, table, where, allow_code, model, problems=apply_overrides(table, settings))


def with_grid(recipe: Recipe, grid: Mapping[str, Any] | Sequence[str], *, allow_code: bool = False) -> Recipe:
    """Return a recipe with those of its methods that a grid varies, once for each combination of values."""
    table = tomllib.loads(recipe.to_toml())
    add_grids(table, grid)
    table["methods"] = [entry for entry in table["methods"] if "grid" in entry]
    return _build(recipe.name, table, f"recipe {recipe.name!r}", allow_code, recipe.model)


def read_paper_section(name: str) -> Mapping[str, Any]:
    """Read the ``[paper]`` table of a recipe, without building the rest."""
    paper: Mapping[str, Any] = read_recipe_file(name, _extend)[0].get("paper", {})
    return paper


def _checked(table: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the table of a recipe if its sections are tables."""
    for name, part in table.items():
        several = name in ("methods", "client_models")
        if several and not (isinstance(part, list) and all(isinstance(each, dict) for each in part)):
            raise ConfigError(f"{where}: {name} must be tables, each under [[{name}]], not {part!r:.80}.")
        for key, own in [(key, own) for each in part for key, own in each.items()] if name == "methods" else ():
            if key in ("training", "grid") and not isinstance(own, dict):
                raise ConfigError(f"{where}: {key} of a method must be a table, not {own!r:.80}.")
        if name in (*SECTIONS, "paper") and not isinstance(part, dict):
            raise ConfigError(f"{where}: {name} must be a table, [{name}], not {part!r:.80}.")
    return table


def _select_methods(listed: list[dict[str, Any]], wanted: Sequence[str]) -> list[dict[str, Any]]:
    """Return the tables of these methods; a method that the recipe does not list gets its default options."""
    return [row for name in wanted for row in rows_named(name, listed, _names) or [{"algorithm": name}]]


def _names(method: Mapping[str, Any]) -> tuple[str, str]:
    algorithm = str(method.get("algorithm", ""))
    if not (label := method.get("label")) and algorithm in algorithms():
        label = default_label(get_algorithm(algorithm))
    return str(label or ""), algorithm


def _build(
    name: str,
    table: dict[str, Any],
    where: str,
    allow_code: bool,
    model: Architecture | None = None,
    expanded: bool = True,
    problems: Iterable[str] = (),
) -> Recipe:
    """Build a recipe from its table; a method with a grid stands in it once for each point, or once in all.

    ``problems``: What is known to be wrong already; it is told with the rest.
    """
    for section in table.keys() & SECTIONS:
        _leave_out_gone(section, table[section])
    problems, methods = list(problems), list[Method]()
    for number, entry in enumerate(table.get("methods", ()), start=1):
        with collect(problems):
            methods += _methods(entry, number, expanded)
    try:
        given = {
            **table,
            "title": titled(str(table.get("title", name)), table.get("data", {}).get("validation")),
            "model": with_own_model(table.get("model", {}), allow_code, model),
            "methods": methods,
            "client_models": [with_own_model(own, allow_code) for own in table.get("client_models", ())],
        }
        return build(Recipe, given, also=["extends"], problems=problems, name=name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _leave_out_gone(name: str, table: dict[str, Any]) -> None:
    for (section, option), as_kept in GONE.items():
        if section == name and as_kept in (None, table.get(option)):
            table.pop(option, None)


def untitled(title: str) -> str:
    """Return a recipe's title without what `titled` and ``--set data.validation`` have added."""
    title = re.sub(r" \(evaluated on \d+% of the training images\)", "", title)
    title = re.sub(r"(?<=\(changed: )data\.validation=[^,)]*(, )?|, data\.validation=[^,)]*", "", title)
    return title.replace(" (changed: )", "")


def _methods(entry: Mapping[str, Any], number: int, expanded: bool) -> list[Method]:
    """Return the method that an entry of ``[[methods]]`` describes, or the points of its grid."""
    options = {"label": "", **entry}
    _leave_out_gone(str(entry.get("algorithm")).lower(), options)
    grid = options.pop("grid", {})
    if not isinstance(grid, Mapping) or not all(isinstance(v, list) and v for v in grid.values()):
        raise ConfigError("the grid of a method is a table of lists, such as { mu = [0.1, 1.0] }.")
    problems = list[str]()
    if isinstance(training := options.get("training"), Mapping):
        with collect(problems):  # told together with the method's own options
            check_values(Training, training, f"training of {_names(options)[0] or options.get('algorithm')}")
    method = build(Method, options, f"[[methods]] {number}", ["grid"], problems)
    return expand(method, grid) if grid and expanded else [method]


# Changes to a recipe's tables before it is built


def _extend(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of a recipe with what it extends; no section of either may hide behind the other's."""
    for key in base.keys() & own.keys():
        if isinstance(base[key], dict) != isinstance(own[key], dict):
            other = own[key] if isinstance(base[key], dict) else base[key]
            raise ConfigError(f"{key} must be a table, [{key}], in all that a recipe extends, not {other!r:.80}.")
    return merge_tables(base, own)


def merge_tables(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with the entries of another, which take precedence. Tables in them are merged too."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = _merge_section(key, old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _merge_section(section: str, old: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section with changes.

    If the partition scheme or the model changes, options that the new one has too stay, such as the number of clients
    or Dirichlet's alpha. Columns and sizes stay for other data of one's own, the sampler for another trained generator,
    the number of images for another public set. If a data set that is known by name comes, or the paper's table
    changes, nothing stays.
    """
    kind = KINDS.get(section, "name")
    own_data = section == "data" and not any(is_known(str(table.get("name", ""))) for table in (old, over))
    if not own_data and kind in over and over[kind] != old.get(kind):
        known = {"partition": schemes, "model": architectures}.get(section, dict)().get(str(over[kind]).lower())
        common = {*(options_of(known) if known else ()), *(INITIAL_MODEL if section == "model" else ())}
        if section == "public":
            common = {"num_images"} if over[kind] else set()
        elif section == "generator" and "ldm" not in (over[kind], old.get(kind)):
            common = {*old}
        if over[kind] == "column":
            common -= {"num_clients"}  # each value of the column is a client
        old = {name: value for name, value in old.items() if name in common}
    return merge_tables(old, over)


def read_setting(setting: str, labels: Iterable[str] = ()) -> tuple[str, str, Any]:
    """Split ``section.option=value`` into its parts; a method's label may hold dots and equals signs itself."""
    setting = setting.strip()
    start = _length_of_label(setting, labels)
    rest, equals, text = setting[start:].partition("=")
    section, _, name = (setting[:start] + rest).strip().rpartition(".")
    if not (equals and section.strip(".") and name):
        raise ConfigError(f"cannot read --set {setting!r}: write section.option=value, such as training.lr=0.05.")
    text = text.strip()
    value = parse_value(text)
    if text[:1] in ("[", "{") and isinstance(value, str):
        raise ConfigError(
            f"cannot read --set {setting!r}: {text} is no list or table of TOML. A text needs quotes, which a shell "
            f"""takes off unless the whole is quoted too, such as '{setting[:start]}{rest}=["one", "other"]'."""
        )
    return section, name, value


def _length_of_label(text: str, labels: Iterable[str]) -> int:
    """Return the length of the longest label with which a text begins, before a dot; 0 if there is none."""
    return max((len(label) for label in labels if text.lower().startswith(f"{label.lower()}.")), default=0)


def read_settings(settings: Iterable[str], sections: Mapping[str, type[Options]]) -> dict[str, Any]:
    """Return the options of each section of a command that runs no recipe, with the changes of ``--set``."""
    tables: dict[str, dict[str, Any]] = {name: {} for name in sections}
    problems, built = list[str](), {}
    for setting in settings:
        with collect(problems):
            section, name, value = read_setting(setting)
            if section in sections:
                tables[section][name] = value
            else:
                hint = did_you_mean(section, sections)
                problems.append(f"--set {section}.{name}: this command has no section {section!r}.{hint}")
    for name, cls in sections.items():
        with collect(problems):
            built[name] = build(cls, tables[name], name)
    refuse(problems)
    return built


def apply_overrides(table: dict[str, Any], settings: Iterable[str]) -> list[str]:
    """Apply settings, each written ``section.option=value``, to a recipe's table, in place; return what is wrong."""
    settings = settings if isinstance(settings, Mapping | str) else list(settings)
    if isinstance(settings, Mapping | str) or not all(isinstance(one, str) for one in settings):
        raise ConfigError(f"settings are a list of texts, such as ['training.lr=0.05'], not {settings!r:.80}.")
    problems: list[str] = []
    # The kinds of data, partition, model and such are set first, since other options go with what they replace; what is
    # of one method is set last.
    kinds = ("data.name", "partition.scheme", "model.name", "public.name", "generator.name")

    def order(setting: str) -> int:
        name = setting.partition("=")[0].strip()
        return 0 if name in kinds else 1 if name.partition(".")[0] in (*SECTIONS, "algorithm") else 2

    for setting in sorted(settings, key=order):
        with collect(problems):
            _apply(table, setting)
    return problems


def _apply(table: dict[str, Any], setting: str) -> None:
    section, name, value = read_setting(setting, (str(e.get("label", "")) for e in table.get("methods", [])))
    if section == "model.pretraining":
        section, name, value = "model", "pretraining", {name: value}
    if section in SECTIONS:
        table[section] = _merge_section(section, table.get(section, {}), {name: value})
        for entry in table.get("methods", []) if section == "training" else ():
            _refuse_point(entry, True, name, f"--set {section}.{name}")
            _drop(entry, "training", name)
            _drop(entry, "grid", f"{TRAINING}{name}")
        return
    of_training = section.endswith(".training")
    for entry in _entries_with(table, section, name, "--set"):
        _refuse_point(entry, of_training, name, f"--set {section}.{name}")
        _drop(entry, "grid", f"{TRAINING}{name}" if of_training else name)
        if of_training:
            entry["training"] = {**entry.get("training", {}), name: value}
        else:
            entry[name] = value


def _refuse_point(entry: Mapping[str, Any], of_training: bool, name: str, what: str) -> None:
    """Raise `ConfigError` for a change of the option by which a point of a grid is called.

    ``what``: Gives the option, for errors.
    """
    held = (entry.get("training", {}) if of_training else entry).get(name)
    if entry.get("grid_of") and re.search(rf"[(,] ?{re.escape(f'{name} {_short(held)}')}[,)]", str(entry["label"])):
        raise ConfigError(
            f"{what}: {entry['label']} is a point of a grid over {name}. Set it in the recipe that has the grid, or "
            "choose other methods with --methods."
        )


def _drop(entry: dict[str, Any], part: str, name: str) -> None:
    """Take an option out of a part of a method's table, which a setting changes; an empty part goes too."""
    own = entry.get(part)
    if isinstance(own, dict) and name in own:
        del own[name]
        if not own:
            del entry[part]


def _entries_with(table: Mapping[str, Any], section: str, name: str, what: str) -> list[dict[str, Any]]:
    """Return the tables of the methods that an option is of: those of a name or a label, or all with the option.

    ``what``: Gives the option, for errors.
    """
    entries, who = table.get("methods", []), section.removesuffix(".training").lower()
    if name == "algorithm":
        raise ConfigError(f"{what} {section}.algorithm: choose methods with --methods.")
    if section == "algorithm":
        known = [options_of(get_algorithm(str(entry.get("algorithm")))) for entry in entries]
        chosen = [entry for entry, options in zip(entries, known, strict=True) if name in options]
        if entries and not chosen:
            hint = did_you_mean(name, {option for options in known for option in options})
            raise ConfigError(f"{what} algorithm.{name}: no method of this recipe has the option.{hint}")
        return chosen
    names = [[str(entry.get(key, "")).lower() for key in ("algorithm", "label")] for entry in entries]
    chosen = [entry for entry, own in zip(entries, names, strict=True) if who in own]
    if not chosen:
        hint = did_you_mean(who, {*SECTIONS, "algorithm", *(each for own in names for each in own if each)})
        hint = f" This recipe does not have {who}: add --methods {who}." if who in algorithms() else hint
        raise ConfigError(f"{what} {section}.{name}: unknown section.{hint}")
    return chosen


def _short(value: Any) -> Any:
    """Return a number as short as it can be written."""
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else value


def expand(method: Method, grid: Mapping[str, list[Any]]) -> list[Method]:
    """Return a method once for each valid combination of values; raise `ConfigError` for a value that is in none.

    ``grid``: By option, its values. Options of local training are named such as ``training.lr``.
    """
    points: list[Method] = []
    unused = {(name, repr(value)) for name, values in grid.items() for value in values}
    error: ConfigError | None = None
    for point in product(*grid.values()):
        options = dict(zip(grid, point, strict=True))
        training = {name.removeprefix(TRAINING): v for name, v in options.items() if name.startswith(TRAINING)}
        own = {name: value for name, value in options.items() if not name.startswith(TRAINING)}
        try:
            table = as_table(method.algorithm) | own
            algorithm = build(type(method.algorithm), table, f"the grid of {method.label}")
        except ConfigError as reason:
            error = reason
            continue
        unused -= {(name, repr(value)) for name, value in options.items()}
        values = map(_short, options.values())
        named = (f"{n.removeprefix(TRAINING)} {value}" for n, value in zip(options, values, strict=True))
        label = f"{method.label} ({', '.join(named)})"  # such as "SFedKD (tau 2, teachers 3)"
        points.append(Method(label, algorithm, method.label, {**method.training, **training}))
    if unused and error:
        raise error
    return points


def _split_grid(line: str, labels: Iterable[str]) -> tuple[str, list[Any]]:
    """Split a grid of one option, such as ``sfedkd.tau=1,2,4``, into the option and its values."""
    line = line.strip()
    start = _length_of_label(line, labels)
    rest, _, text = line[start:].partition("=")
    path, text = (line[:start] + rest).strip(), text.strip()
    try:
        values: list[Any] = tomllib.loads(f"values = [{text}]")["values"]  # commas may stand in brackets and quotes
    except ValueError:
        values = [parse_value(part.strip()) for part in text.split(",")]
    if not all(path.rpartition(".")[::2]) or not values or "" in values:
        raise ConfigError(f"cannot read the grid {line!r}: write method.option=values, such as sfedkd.tau=1,2,4.")
    return path, values


def read_grid(grid: Mapping[str, Any] | Iterable[str], labels: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Return by option what to try, of lines such as ``sfedkd.tau=1,2,4`` or of a table of lists."""
    found: dict[str, list[Any]] = {}
    for path, given in grid.items() if isinstance(grid, Mapping) else (_split_grid(line, labels) for line in grid):
        values = plain(given)
        if not isinstance(values, list | tuple | range) or not len(values):
            raise ConfigError(f"the grid of {path} must be a list of values, such as [1, 2], not {given!r:.80}.")
        if path in found:
            raise ConfigError(f"the grid names {path} twice. Put its values into one list.")
        found[path] = [plain(value) for value in values]
        if any(value in found[path][:place] for place, value in enumerate(found[path])):
            raise ConfigError(f"the grid of {path} names a value twice: {found[path]}. Each is run only once.")
    return found


def add_grids(table: dict[str, Any], grid: Mapping[str, Any] | Iterable[str]) -> bool:
    """Add grids (see `read_grid`) to the methods of a recipe's table; return whether there was one."""
    found = read_grid(grid, [str(entry.get("label", "")) for entry in table.get("methods", [])])
    given: dict[tuple[frozenset[int], str], str] = {}
    own: set[tuple[int, str]] = set()
    for path, values in found.items():
        section, _, name = path.rpartition(".")
        of_training = section == "training" or section.endswith(".training")
        if not of_training and section.removesuffix(".pretraining") in SECTIONS:
            raise ConfigError(
                f"a grid is of options of methods and of local training, and the methods of one run share [{section}]. "
                f"Vary it in several runs, with --set {path}."
            )
        entries = (
            table.get("methods", []) if section == "training" else _entries_with(table, section, name, "the grid of")
        )
        key, of_all = f"{TRAINING * of_training}{name}", section in ("training", "algorithm")
        if not of_all and given.setdefault((frozenset(map(id, entries)), key), path) != path:
            raise ConfigError(f"the grid names {path} twice, with other letters. Put its values into one list.")
        for entry in entries:
            _refuse_point(entry, of_training, name, f"the grid of {path}")
            if not (of_all and (id(entry), key) in own):  # what is of one method takes the place of what is of all
                entry["grid"] = {**entry.get("grid", {}), key: values}
            own |= set() if of_all else {(id(entry), key)}
    return bool(found)


def parse_value(text: str) -> Any:
    """Parse a value as TOML does; text that is not a TOML value is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, an integer of thousands of digits, or nested too deeply
        return text
