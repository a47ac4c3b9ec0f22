"""Rejection sampling on the tiny world: what the pool of all iterations, the sampling temperatures and the
scorer do to the true reward. Every arm and seed is a run of its own; finished ones are not run again.

    python tests/benchmarks/rejection_sampling.py --model runs/sft --scorer runs/reward --seeds 3
"""

from dataclasses import dataclass
from pathlib import Path

import peers
import tyro

from common import metrics

ARMS = {
    "pool of all iterations": [],
    "last iteration's responses alone": ["--candidates", "last"],
    "temperatures up to 1.3": ["--temperatures", "0.7", "1.0", "1.3"],
    "the true reward as scorer": ["--scorer", "common.tiny:gold_scorer"],
    "Advantage Model as scorer": [],
    "ReST": ["rest"],
}


@dataclass
class Args:
    model: str = "runs/sft"
    """A finished run of sft.py on the tiny world."""
    scorer: str = "runs/reward"
    """And of reward.py."""
    advantage_model: str = "runs/advantage_model"
    """And of advantage_model.py."""
    folder: str = "runs/rejection_sampling_arms"
    """Where the runs go."""
    seeds: int = 3
    """Seeds 0, 1, ... of prompts, samples and order."""
    arms: int = len(ARMS)
    """The first so many."""


def main(args: Args):
    for name, extra in list(ARMS.items())[: args.arms]:
        for seed in range(args.seeds):
            folder = Path(args.folder, f"{list(ARMS).index(name)}_{seed}")
            flags = [*extra, "--model", args.model, "--seed", seed]
            if "--scorer" not in extra:
                flags += ["--scorer", args.advantage_model if "Advantage" in name else args.scorer]
            summary, seconds = peers.arm("rejection_sampling.py", folder, flags)
            versions = summary["versions"]
            print(f"\n{name}, seed {seed}, {seconds:.0f} s")
            table = []
            for version, row in versions.items():
                line = {"version": version}
                for key in ("gold/score", "gold/perfect", "eval/score"):
                    line[key] = f"{row[key]:.3f}"
                for other in ("first", "before"):
                    key = f"gold/score_over_{other}"
                    line[f"gold over the {other}"] = metrics.interval(row, key, "+.3f") if key in row else ""
                room = versions[min(versions)]["gold/perfect"] - versions[min(versions)]["gold/score"]
                line["gap closed"] = f"{row.get('gold/score_over_first', 0) / room:.0%}"
                line["temperature"] = row["sweep/temperature"]
                table.append(line)
            metrics.print_table(table)


if __name__ == "__main__":
    main(tyro.cli(Args))
