"""Progress in a notebook: one line that is replaced after every round."""

from __future__ import annotations

import sys
from html import escape
from typing import Any

from fedkeep.experiment.runtime import Progress


def in_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook.

    Returns: True under Jupyter and what is built on it.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class NotebookProgress:
    """Shows the progress of each trial under the cell that runs, as HTML and as plain text.

    An instance is an `OnProgress` function.
    """

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}
        self._handle: Any = None

    def __call__(self, progress: Progress) -> None:
        """Show one report."""
        self._lines[progress.trial] = describe_progress(progress)
        text = "\n".join(self._lines.values())
        shown = {"text/plain": text, "text/html": f"<pre>{escape(text)}</pre>"}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


def describe_progress(progress: Progress) -> str:
    """Describe a report in one line.

    Returns: Such as ``sfedkd-seed0 round 12/60 accuracy 83.1 %``.
    """
    line = f"{progress.trial}  round {progress.done}/{progress.rounds}"
    if progress.record is not None and progress.test_total:
        line += f"  accuracy {100 * sum(progress.record['correct']) / progress.test_total:.1f} %"
    return line
