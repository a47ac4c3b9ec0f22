"""metrics.jsonl, progress bars and plots. Every key is defined by a formula in the README."""

import json
import os
import time
from pathlib import Path

from common import dist


class Metrics:
    """Appends one JSON object a logged step to `folder`/metrics.jsonl, on rank 0; the other ranks' calls do
    nothing.

    keep_rows: when a run resumes, how many rows were there at its checkpoint (`n_rows` then). Later ones,
      written between the checkpoint and the crash, are cut, since they will be written again; the clock goes
      on from the last one kept."""

    def __init__(self, folder, keep_rows: int | None = None):
        self.path, self.n_rows, before = Path(folder) / "metrics.jsonl", keep_rows or 0, 0.0
        if keep_rows is not None and dist.is_main():
            kept = read_jsonl(self.path)[:keep_rows]
            write_jsonl(self.path, kept)
            before = kept[-1]["time_s"] if kept else 0.0
        self.start = time.time() - before

    def log(self, step: int, iteration: int, **values):
        self.n_rows += 1
        if dist.is_main():
            seconds = round(time.time() - self.start, 3)
            row = {"step": step, "iteration": iteration, "time_s": seconds, **values}
            with open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")


def read_jsonl(path) -> list[dict]:
    """The rows of a .jsonl file that were written whole: a last line that a crash cut short is left out. No
    file: no rows."""
    rows = []
    for line in Path(path).read_text("utf-8").split("\n") if Path(path).exists() else []:
        if not line:
            continue
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def write_jsonl(path, rows: list[dict]):
    """Write rows to `path`, whole or not at all."""
    temporary = Path(f"{path}.tmp")
    temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    os.replace(temporary, path)


def progress(total: int, start: int, name: str):
    """A tqdm bar over steps on rank 0 and a silent one elsewhere; show at most three figures with
    `set_postfix`."""
    from tqdm import tqdm

    silent = not dist.is_main()
    return tqdm(total=total, initial=start, desc=name, unit="step", disable=silent, dynamic_ncols=True)


def plot_metrics(folder, panels: dict[str, list[str]], name: str = "metrics.png"):
    """Draw `folder`/`name` from metrics.jsonl: one panel for each {title: [metric keys]}, against the
    step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_jsonl(Path(folder) / "metrics.jsonl")
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.2), squeeze=False)
    for axis, (title, keys) in zip(axes[0], panels.items()):
        for key in keys:
            points = [(row["step"], row[key]) for row in rows if key in row]
            if points:
                axis.plot(*zip(*points), marker="o" if len(points) < 10 else None, markersize=3, label=key)
        axis.set(title=title, xlabel="step")
        if axis.lines:
            axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(Path(folder) / name, dpi=90)
    plt.close(figure)
