"""PPO on the tiny world, arm by arm: what the scorer, the penalty and selective rehearsal do to the true reward,
on the prompts that are trained on and on kinds of prompts that only the first policy knew ("forget set").
Every arm and seed is a run of its own; finished ones are not run again.

    python tests/benchmarks/ppo_arms.py --seeds 3

For the forget arms PPO sees the commands copy, ends, first and loop alone; the forget set is the other four.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import peers  # noqa: E402

from common import metrics

RM, AM = ["--scorer", "{reward}"], ["--scorer", "{advantage_model}"]
GATE = ["--safety-scorer", "{safety}"]
SETS = {"practised": "tiny:commands=copy+ends+first+loop", "forget": "tiny:commands=rest+reverse+next+double"}
HALF = ["--dataset", SETS["practised"]]
ARMS = {
    "the recipe": RM,
    "from rejection sampling": [*RM, "--model", "{rejection_sampling}"],
    "no KL penalty, length bias": ["--scorer", "{biased}", "--kl-coef", "0"],
    "top-p 0.9": [*RM, "--top-p", "0.9"],
    "RM-PPO": [*RM, *HALF, "--reward-norm", "none"],
    "RM-PPO, running mean": [*RM, *HALF, "--reward-norm", "mean"],
    "AM-PPO": [*AM, *HALF, "--reward-norm", "none"],
    "AM-PPO-SR, c = 8": [*AM, *HALF, "--reward-norm", "none", "--rehearsal-data", "{rehearsal_8}"],
    "AM-PPO-SR, c = 2": [*AM, *HALF, "--reward-norm", "none", "--rehearsal-data", "{rehearsal_2}"],
    "AM-PPO-SR, c = 32": [*AM, *HALF, "--reward-norm", "none", "--rehearsal-data", "{rehearsal_32}"],
    "pretrained gradient 0.1": [*RM, "--ptx-dataset", "tiny:kind=text", "--ptx-coef", "0.1"],
    "its measure, coefficient 0": [*RM, "--ptx-dataset", "tiny:kind=text"],
    "safety gate": [*RM, *GATE],
    "from rejection sampling, safety gate": [*RM, *GATE, "--model", "{rejection_sampling}"],
}


@dataclass
class Args:
    sft: str = "runs/sft"
    """Finished runs on the tiny world."""
    reward: str = "runs/reward"
    advantage_model: str = "runs/advantage_model"
    rejection_sampling: str = "runs/rejection_sampling"
    biased: str = "runs/reward_biased"
    """Of reward.py --dataset tiny:length_bias=0.6."""
    safety: str = "runs/reward_safety"
    """Of reward.py --dataset tiny:label=safety."""
    folder: str = "runs/ppo_arms"
    """Where the runs go."""
    seeds: int = 3
    """Seeds 0, 1, ... of prompts, samples and minibatches."""
    only: tuple[int, ...] = tuple(range(len(ARMS)))
    """Numbers of the arms to run."""


def rehearsal_rows(clusters, seed, args) -> Path:
    """The file of the first policy's best responses in so many clusters; one that is there is not made again."""
    path = Path(args.folder).resolve() / f"rehearsal_{clusters}_{seed}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        flags = ["--model", args.sft, "--scorer", args.advantage_model, *HALF, "--output", str(path)]
        flags += ["--clusters", str(clusters), "--seed", str(seed)]
        subprocess.run([sys.executable, "-m", "common.rehearsal", *flags], check=True, cwd=ROOT)
    return path


def main(args: Args):
    folder = Path(args.folder)
    for number in args.only:
        name, table = list(ARMS)[number], []
        for seed in range(args.seeds):
            out = folder / f"{number}_{seed}"
            clusters = [n for n in (2, 8, 32) if f"{{rehearsal_{n}}}" in ARMS[name]]
            rehearsal = {f"rehearsal_{n}": rehearsal_rows(n, seed, args) for n in clusters}
            flags = [x.format(**vars(args), **rehearsal) for x in ARMS[name]]
            flags += ["--seed", seed] + (["--model", args.sft] if "--model" not in flags else [])
            summary, seconds = peers.arm("ppo.py", out, flags)
            after = summary["after"]
            line = {"seed": seed, "score": f"{after['eval/score']:.2f}", "kl": after["eval/kl"]}
            line.update({"entropy": f"{after['eval/entropy']:.2f}", "seconds": seconds})
            line["gold gain"] = metrics.interval(after, "gold/score_gain")
            for prompts, spec in SETS.items() if "--dataset" in flags else ():
                told = ["--policies", f"sft={args.sft}", f"ppo={out}", "--dataset", spec, "--seed", seed]
                told += flags[flags.index("--scorer") :][:2]
                r = peers.tool("common.evaluate", f"{out}_{prompts}", told)["temperatures"]["1"]["ppo"]
                shares = f"{r['gold_win']:.0%} / {r['gold_tie']:.0%} / {r['gold_lose']:.0%}"
                line[f"{prompts}: gain, win / tie / lose"] = f"{metrics.interval(r, 'gold_gain')} {shares}"
            if "eval/ptx_nll" in after:
                line["ptx nll"] = f"{after['eval/ptx_nll']:.2f}"
            table.append(line)
        print(f"\n{name}")
        metrics.print_table(table)


if __name__ == "__main__":
    main(tyro.cli(Args))
