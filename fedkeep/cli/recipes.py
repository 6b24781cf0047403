"""``fedkeep recipes``. The list does without PyTorch, whose import takes seconds."""

from argparse import Namespace
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedkeep.experiment.recipe_files import PaperTable, paper_tables, read_title, recipe_names


def recipes(options: Namespace, console: Console) -> int:
    """List the recipes and the papers' tables, show the columns of one table, or print one recipe."""
    tables = paper_tables()
    if (options.name or "").rstrip("/") in tables:
        _paper_table(tables[options.name.rstrip("/")], console)
    elif options.name:
        from fedkeep.experiment.recipe_loader import load_recipe

        console.print(Text(load_recipe(options.name).to_toml()), soft_wrap=True)
    else:
        _recipe_list(tables, console)
    return 0


def _recipe_list(tables: Mapping[str, PaperTable], console: Console) -> None:
    """Show one entry for each recipe outside a table, and one for each table, with the names of its columns."""
    entries = {name: Text(read_title(name)) for name in recipe_names() if name.rpartition("/")[0] not in tables}
    for name, table in tables.items():
        columns = ", ".join(column.rpartition("/")[2] for column in table.columns)
        entries[name] = Text(table.title).append(f": {columns}", "dim")
    folders: dict[str, list[str]] = {}
    for name in entries:
        folders.setdefault(name.rpartition("/")[0], []).append(name)
    for folder in sorted(folders):
        if folder:
            console.print(f"\n[bold]{escape(folder)}/[/]")
        grid = Table.grid(padding=(0, 2, 0, 0))
        for name in folders[folder]:
            grid.add_row("  " * bool(folder) + name.rpartition("/")[2], entries[name])
        console.print(grid)
    console.print(
        "\na table and its columns: fedkeep recipes sfedkd/table1\n"
        "one recipe, in full:     fedkeep recipes sfedkd/table1/cifar10-2-0.5"
    )


def _paper_table(table: PaperTable, console: Console) -> None:
    from fedkeep.reporting.table import TextTable

    console.print(f"[bold]{escape(table.table)}[/]  {escape(table.title)}")
    if table.notes:
        console.print(Text(f"\n{table.notes}"))
    lines = [[name, read_title(name).removeprefix(f"{table.table}: ")] for name in table.columns]
    console.print(TextTable(["recipe", "what it runs"], lines).terminal())
