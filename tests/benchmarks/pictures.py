"""Update the pictures in docs/ from the plots of runs. A picture whose run is missing stays, and the command that
makes it is printed.

    python tests/benchmarks/pictures.py                     after the quickstart
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[2]
PICTURES = {  # name in docs/ -> (plot of a run, what makes it)
    "sft_tiny": ("sft/metrics.png", "python sft.py"),
    "tiny_scores": ("scorers/scores.png", "evaluate --scorers runs/reward runs/advantage_model"),
    "dpo_tiny": ("dpo_iterative/iterations.png", "python dpo_iterative.py"),
    "tiny_frontier": ("evaluate/frontier.png", "python -m common.programs.evaluate"),
    "tiny_reward_kl": ("frontier/frontier.png", "docs/results/frontier.md's sweep --output-dir runs/frontier"),
    "ppo_overoptimisation": ("ppo_weak/frontier.png", "docs/results/ppo.md's ppo.py --output-dir runs/ppo_weak"),
    "calibration": ("calibration.png", "tests/benchmarks/calibration.py --plot runs/calibration.png"),
    "real_reward": ("real_reward/upper+extract/rewards.png", "docs/results/real_reward.sh"),
    "reward_scaling": ("scaling/scaling.png", "tests/benchmarks/scaling.py"),
    "forgetting": ("experiments/forgetting/forgetting.png", "tests/benchmarks/experiments.py forgetting"),
    "ladder": ("experiments/ladder/ladder.png", "tests/benchmarks/experiments.py ladder"),
    "rankings_scores": ("rankings_scorers/scores.png", "docs/results/real_models.md's evaluate --scorers of rankings"),
    "hh_ppo": ("hh_ppo/metrics.png", "docs/results/real_models.md's ppo.py on HH-RLHF --output-dir runs/hh_ppo"),
}
LARGEST = 100_000  # bytes: a repository keeps every version for ever


@dataclass
class Args:
    runs: str = "runs"
    """Folder of the runs."""
    docs: str = str(ROOT / "docs" / "results")
    """Folder for the pictures."""


def main(args: Args):
    for name, (plot, command) in PICTURES.items():
        path = Path(args.runs, plot)
        if not path.exists():
            print(f"{name}.png stays: no {path} ({command})")
        elif path.stat().st_size > LARGEST:
            sys.exit(f"{path} has more than {LARGEST:,} bytes")
        else:
            shutil.copyfile(path, Path(args.docs, f"{name}.png"))
            print(f"{name}.png from {path}")


if __name__ == "__main__":
    main(tyro.cli(Args))
