"""``fedkeep export``, ``predict``, ``archive`` and ``verify``: models and records that leave their run."""

import json
from argparse import Namespace
from pathlib import Path

from rich.console import Console

from fedkeep._utils.escaping import csv_text
from fedkeep.cli.text import say
from fedkeep.errors import RunError
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.provenance import ARCHIVE_SUFFIX
from fedkeep.experiment.reproduce import NOTE
from fedkeep.export.prediction import predict
from fedkeep.export.trained_model import export_model, onnx_available
from fedkeep.reporting.run_folder import open_run, read_run, verify_run, write_archive
from fedkeep.reporting.table import TextTable


def export(options: Namespace, console: Console) -> int:
    """Write a run's model into a folder."""
    import_user_code(options.use)
    chosen = {name: getattr(options, name) for name in ("method", "seed", "evaluation_model", "allow_code")}
    folder = export_model(options.run, options.out, **chosen)
    for path in sorted(folder.iterdir()):
        say(console, f"wrote {path}")
    about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    say(console, f"the model is of {about['method']} with seed {about['seed']}; --seed takes another")
    if not onnx_available():
        console.print("no model.onnx: it needs the extra export (onnx, onnxscript)")
    say(console, f"how to use it: {folder / 'README.md'}")
    return 0


def predict_files(options: Namespace, console: Console) -> int:
    """Show the predictions of an exported model."""
    import_user_code(options.use)
    found = list(predict(options.model, options.files, allow_code=options.allow_code))
    rows = any(each.row is not None for each in found)
    heads = ("file", *["row"] * rows, "class", "probability")
    places = [(str(each.path), *["" if each.row is None else str(each.row)] * rows, each.label) for each in found]
    if options.format == "csv":
        cells = ((*place, f"{each.probability:.4f}") for place, each in zip(places, found, strict=True))
        console.out(csv_text([heads, *cells]), end="", highlight=False)
        return 0
    lines = [[*place, f"{each.probability:.1%}"] for place, each in zip(places, found, strict=True)]
    console.print(TextTable([*heads], lines).terminal())
    return 0


def archive(options: Namespace, console: Console) -> int:
    """Write the records of a run, or of all columns of a reproduction, into a compressed file."""
    source, out = Path(options.run), Path(options.out)
    name, of_several = source.resolve().name, out.suffix.lower() == ARCHIVE_SUFFIX
    if out.suffix in (".gz", ".tgz", ".tar", ".7z") and not out.is_dir():
        raise RunError(f"archives are {ARCHIVE_SUFFIX} files: --out {out.with_suffix(ARCHIVE_SUFFIX)}, or a folder.")
    target = out if of_several else out / f"{name}{ARCHIVE_SUFFIX}"
    further: dict[str, bytes] = {}
    if (source / "run.json").is_file():
        if of_several and (open_run(target) / NOTE).is_file():
            raise RunError(
                f"{target} is the archive of a reproduction, and a run would become one of its columns. Choose another "
                "--out."
            )
        runs = {name if of_several else "": source}
    elif (source / NOTE).is_file():
        if of_several:
            raise RunError(f"a reproduction is an archive of its own. Name its folder: --out {out.parent}")
        runs = {path.parent.name: path.parent for path in source.glob("*/run.json")}
        further = {NOTE: (source / NOTE).read_bytes()}
    else:
        raise RunError(f"{source} is neither a run folder nor a reproduction: it holds no run.json and no {NOTE}.")
    for run in runs.values():
        read_run(run)  # raises an error for a damaged file: an archive holds nothing that was not checked
    say(console, f"wrote {write_archive(runs, target, further)}")
    return 0


def verify(options: Namespace, console: Console) -> int:
    """Check every file of some runs, and print a line for each trial.

    Returns: The exit code: 1 if a file is damaged or foreign.
    """
    wrong = False
    for run in options.runs:
        say(console, run, "bold")
        for found in verify_run(run):
            is_wrong = found.status in ("damaged", "foreign")
            say(console, f"  {found.name}: {found.status}: {'; '.join(found.details)}", "red" if is_wrong else "")
            wrong |= is_wrong
    return int(wrong)
