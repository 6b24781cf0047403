"""``fedkeep completion``: a script for a shell that completes commands, their options, methods and recipes."""

from __future__ import annotations

import argparse
from argparse import Namespace

from rich.console import Console

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
    """Return the script of a shell.

    Returns: The script, made from the commands of this version.
    """
    from fedkeep.cli.main import parser

    (commands,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    extra = {"run": recipe_names(), "recipes": recipe_names(), "methods": list(algorithms())}
    cases = []
    for name, command in commands.choices.items():
        words = [flag for action in command._actions for flag in action.option_strings]
        verbs = [action for action in command._actions if action.choices and not action.option_strings]
        words += [str(choice) for action in verbs for choice in action.choices or ()]
        cases.append(f'        *:{name}) words="{" ".join([*words, *extra.get(name, [])])}" ;;')
    text = SCRIPT.format(commands=" ".join(commands.choices), cases="\n".join(cases), methods=" ".join(algorithms()))
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if shell == "zsh" else text
