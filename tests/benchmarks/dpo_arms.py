"""Iterative DPO on the tiny world, arm by arm: online against offline pairs, the reference, where training
starts, the oracle, and the length penalty, by the true reward. Every arm and seed is a run of its own; finished
ones are not run again.

    python tests/benchmarks/dpo_arms.py --seeds 3
"""

from dataclasses import dataclass
from pathlib import Path

import peers
import tyro

from common import metrics

BIASED = ["--scorer", "{biased}"]
ARMS = {
    "the recipe": [],
    "offline, as many pairs": ["--iterations", "0", "--offline-data", "tiny", "--offline-pairs", "{pairs}"],
    "start from SFT, all pairs": ["--start-from", "sft"],
    "reference: last": ["--reference", "last"],
    "the true reward as oracle": ["--scorer", "common.tiny:gold_scorer"],
    "Advantage Model as oracle": ["--scorer", "{advantage_model}"],
    "pairwise oracle": ["--scorer", "common.pairwise:oracle={pairwise}"],
    "length bias": BIASED,
    "length bias, penalty 0.1": [*BIASED, "--length-penalty", "0.1"],
    "offline pairs first": ["--offline-data", "tiny", "--offline-pairs", "{pairs}"],
    "an earlier version samples too": ["--enhancer", "previous"],
}


@dataclass
class Args:
    sft: str = "runs/sft"
    """Finished runs on the tiny world."""
    reward: str = "runs/reward"
    advantage_model: str = "runs/advantage_model"
    biased: str = "runs/reward_biased"
    """Of reward.py --dataset tiny:length_bias=0.6."""
    pairwise: str = "runs/preference"
    """Of sft.py on the rows of python -m common.pairwise (docs/reward.md)."""
    pairs: int = 1480
    """About as many as the recipe trains on in its three iterations."""
    folder: str = "runs/dpo_arms"
    """Where the runs go."""
    seeds: int = 3
    """Seeds 0, 1, ... of prompts, samples and order."""
    only: tuple[int, ...] = tuple(range(len(ARMS)))
    """Numbers of the arms to run."""


def main(args: Args):
    for number in args.only:
        name, table = list(ARMS)[number], []
        for seed in range(args.seeds):
            out = Path(args.folder, f"{number}_{seed}")
            flags = [x.format(**vars(args)) for x in ARMS[name]]
            flags += ["--model", args.sft, "--seed", seed]
            flags += [] if "--scorer" in flags else ["--scorer", args.reward]
            summary, seconds = peers.arm("dpo_iterative.py", out, flags)
            for version, row in summary["versions"].items():
                gain, shares = "", []
                if "sft/gold_gain" in row:
                    gain = metrics.interval(row, "sft/gold_gain")
                    shares = [f"{row[f'sft/gold_{x}']:.0%}" for x in ("win", "tie", "lose")]
                line = {"seed": seed, "version": version, "score": f"{row['eval/score']:.2f}"}
                line |= {"gold": f"{row['gold/score']:.2f}", "kl": row["eval/kl"], "gold over SFT": gain}
                line |= {"win / tie / lose": " / ".join(shares), "tokens": row["sample/length"]}
                table.append({**line, "seconds": seconds})
        print(f"\n{name}", flush=True)
        metrics.print_table(table)


if __name__ == "__main__":
    main(tyro.cli(Args))
