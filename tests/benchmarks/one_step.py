"""Run the Python blocks of docs/learn/one_step.md in order, write the output of each below it, and write the
page as a notebook, docs/learn/one_step.ipynb. Needs the quickstart's runs:

    python tests/benchmarks/one_step.py
"""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import transformers

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "learn" / "one_step.md"
sys.path.insert(0, str(ROOT))


def cells(page: str) -> list[tuple[str, str]]:
    """Split a page into [("markdown" or "code", text)], without the outputs that follow code."""
    parts = re.split(r"```python\n(.*?)```\n(?:\n```text\n.*?```\n)?", page, flags=re.S)
    return [("code" if i % 2 else "markdown", part) for i, part in enumerate(parts) if part.strip()]


def run(cells, namespace) -> list[str]:
    """Run the code in one namespace and return the output of each cell, "" for text."""
    transformers.utils.logging.disable_progress_bar()
    printed = []
    for kind, text in cells:
        out = io.StringIO()
        if kind == "code":
            with contextlib.redirect_stdout(out):
                exec(compile(text, str(PAGE), "exec"), namespace)
        printed.append(out.getvalue())
    return printed


def as_page(cells, printed) -> str:
    parts = []
    for (kind, text), output in zip(cells, printed):
        text = f"```python\n{text}```\n" if kind == "code" else text
        parts.append(text + (f"\n```text\n{output}```\n" if output else ""))
    return "".join(parts)


def as_notebook(cells, printed) -> dict:
    made = []
    for number, ((kind, text), output) in enumerate(zip(cells, printed)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.strip()}
        if kind == "code":
            stream = {"output_type": "stream", "name": "stdout", "text": output}
            cell |= {"execution_count": None, "outputs": [stream] if output else []}
        made.append(cell)
    return {"cells": made, "metadata": {"language_info": {"name": "python"}}, "nbformat": 4, "nbformat_minor":
    5}


def main():
    parts = cells(PAGE.read_text())
    printed = run(parts, {})
    PAGE.write_text(as_page(parts, printed))
    PAGE.with_suffix(".ipynb").write_text(json.dumps(as_notebook(parts, printed), indent=1) + "\n")


if __name__ == "__main__":
    main()
