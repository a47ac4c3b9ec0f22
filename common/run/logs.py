"""metrics.jsonl, and the results that a run prints at its end. docs/use/runs.md defines every key."""

import math
import time
from pathlib import Path

from common import dist
from common.data import files


class Metrics:
    """Appends one JSON object a logged step to `folder`/metrics.jsonl, on rank 0.

    keep_rows: when a run resumes, how many rows were there at its checkpoint (`n_rows` then). Later ones will
      be written again, so they are cut; the clock goes on from the last one kept."""

    def __init__(self, folder, keep_rows: int | None = None):
        self.path = Path(folder) / "metrics.jsonl"
        kept = []
        if keep_rows is not None and dist.is_main():
            kept = files.read_jsonl(self.path)[:keep_rows]
            files.write_jsonl(self.path, kept)
            if len(kept) < keep_rows:
                print(f"{self.path} holds {len(kept)} of the {keep_rows} rows that were logged")
        last = kept[-1] if kept else {"step": 0, "iteration": 0, "time_s": 0.0}
        with files.reading(self.path):
            self.start = time.time() - last["time_s"]
            self.n_rows = len(kept)
            self.last = int(last["step"]), int(last["iteration"])

    def log(self, step: int, iteration: int, **values):
        self.n_rows += 1
        self.last = (step, iteration)
        if dist.is_main():
            seconds = round(time.time() - self.start, 3)
            row = {"step": step, "iteration": iteration, "time_s": seconds, **finite(values)}
            files.append_jsonl(self.path, [row], sync=False)


def finite(metrics: dict) -> dict:
    """The metrics that are finite numbers: a mean of nothing, for example, is left out."""
    return {key: x for key, x in metrics.items() if not isinstance(x, float) or math.isfinite(x)}


WORSE = [  # a figure, and the end of its paired difference's interval that says it ended worse
    ("eval/nll", "eval/nll_change_low"), ("pairs/loss", "pairs/loss_change_low"),
    ("eval/score", "sft/score_gain_high"), ("eval/score", "eval/score_over_first_high"),
]  # fmt: skip


def print_results(before: dict, after: dict, shown, samples: list[dict]):
    """Three samples, the metrics `shown` before -> after, and the held-out ones that ended worse: what a
    person wants to read, the rest is in the run's summary.json."""
    for sample in [sample for sample in samples if "response" in sample][-3:]:
        gold = f"  gold {sample['gold']:.1f} of {sample['perfect']:.1f}" if "gold" in sample else ""
        print(f"  {sample['prompt'][-1]['content'][:60]!r} -> {sample['response'][:80]!r}{gold}")
    for key in [key for key in shown if key in after]:
        first = f"{before[key]:z.4g} -> " if key in before else ""
        print(f"{key}: {first}{after[key]:z.4g}")
    for key, end in WORSE:
        if key in before and after.get(end, 0) * (1 if end.endswith("_high") else -1) < 0:
            change = f"{before[key]:.8g} -> {after[key]:.8g}"
            print(f"held-out {key} ended worse than it began: {change}; try a lower --lr or fewer steps")
