"""Write metrics.jsonl, and print the results at the end of a run. docs/use/runs.md defines every key."""

import math
import time
from pathlib import Path

from common import dist
from common.data import files


class Metrics:
    """Append one JSON object per logged step to `folder`/metrics.jsonl, on rank 0.

    keep_rows: for a resumed run, the number of rows (`n_rows`) at the time of its checkpoint. Later rows are
      removed, because they will be logged again; `time_s` continues from the last row that is kept."""

    def __init__(self, folder, keep_rows: int | None = None):
        self.path = Path(folder) / "metrics.jsonl"
        kept = []
        if keep_rows is not None and dist.is_main():
            kept = files.read_jsonl(self.path)[:keep_rows]
            files.write_jsonl(self.path, kept)
            if len(kept) < keep_rows:
                print(f"{self.path} has only {len(kept)} of the {keep_rows} rows that were logged")
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
    """Leave out metrics that are NaN or infinite, such as the mean of an empty list."""
    return {key: x for key, x in metrics.items() if not isinstance(x, float) or math.isfinite(x)}


WORSE = [  # (metric, end of the interval of its paired difference that shows that it became worse)
    ("eval/nll", "eval/nll_change_low"), ("pairs/loss", "pairs/loss_change_low"),
    ("eval/score", "sft/score_gain_high"), ("eval/score", "eval/score_over_first_high"),
]  # fmt: skip


def print_results(before: dict, after: dict, shown, samples: list[dict]):
    """Print the last three samples that are not marked as from before training, the metrics `shown` before
    and after it, and a warning for each held-out metric that became worse. The rest is in summary.json."""
    for sample in [x for x in samples if "response" in x and x.get("when") != "before"][-3:]:
        gold = f"  gold {sample['gold']:.1f} of {sample['perfect']:.1f}" if "gold" in sample else ""
        print(f"  {sample['prompt'][-1]['content'][:60]!r} -> {sample['response'][:80]!r}{gold}")
    for key in [key for key in shown if key in after]:
        first = f"{before[key]:z.4g} -> " if key in before else ""
        print(f"{key}: {first}{after[key]:z.4g}")
    for key, end in WORSE:
        if key in before and after.get(end, 0) * (1 if end.endswith("_high") else -1) < 0:
            change = f"{before[key]:.8g} -> {after[key]:.8g}"
            print(f"held-out {key} became worse: {change}; try a lower --lr or fewer steps")
