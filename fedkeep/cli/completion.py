"""``fedkeep completion``: a script for a shell that completes commands, their options, methods and recipes."""

from __future__ import annotations

from argparse import Namespace

from rich.console import Console

from fedkeep.cli.commands import COMMANDS
from fedkeep.experiment.recipe_loader import recipe_names
from fedkeep.interface import algorithms

SCRIPT = """_fedkeep() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words
    case "$COMP_CWORD:${{COMP_WORDS[1]}}" in
        1:*) words="{commands}" ;;
{cases}
    esac
    if [ "$before" = --methods ]; then words="{methods}"; fi
    COMPREPLY=($(compgen -W "$words" -- "$word") $(compgen -f -- "$word"))
}}
complete -o filenames -F _fedkeep fedkeep
"""


def completion(options: Namespace, console: Console) -> int:
    """Print the script."""
    console.file.write(script(options.shell))
    return 0


def script(shell: str) -> str:
    """Return the script of a shell, made from the commands of this version."""
    extra = {"run": recipe_names(), "recipes": recipe_names(), "methods": list(algorithms())}
    cases = []
    for name, command in COMMANDS.items():
        words = ["--help", *command.verbs, *extra.get(name, [])]
        for flag, options in command.arguments:
            words += [flag] if flag.startswith("-") else options.get("choices", ())
        cases.append(f'        *:{name}) words="{" ".join(words)}" ;;')
    text = SCRIPT.format(commands=" ".join(COMMANDS), cases="\n".join(cases), methods=" ".join(algorithms()))
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if shell == "zsh" else text
