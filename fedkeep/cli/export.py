"""``fedkeep export`` and ``fedkeep predict``: take a trained model away, and use it."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

from rich.console import Console
from rich.markup import escape

from fedkeep._utils.escaping import csv_text
from fedkeep.cli.text import plain_table, say
from fedkeep.experiment.plugins import import_user_code
from fedkeep.export.files import export_model, onnx_available
from fedkeep.export.prediction import predict


def export(options: Namespace, console: Console) -> int:
    """Write a run's model into a folder."""
    import_user_code(options.use)
    folder = export_model(
        options.run,
        options.out,
        method=options.method,
        seed=options.seed,
        evaluation_model=options.evaluation_model,
        allow_code=options.allow_code,
    )
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
        sys.stdout.write(csv_text([heads, *cells]))
        return 0
    table = plain_table(*heads)
    for place, each in zip(places, found, strict=True):
        table.add_row(*map(escape, place), f"{each.probability:.1%}")
    console.print(table)
    return 0
