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

import peers
import tyro

from common import metrics

RM, AM = ["--scorer", "{reward}"], ["--scorer", "{advantage_model}"]
GATE = ["--safety-scorer", "{safety}"]
HALF = ["--dataset", "tiny:commands=copy+ends+first+loop"]
FORGET = "tiny:commands=rest+reverse+next+double"
ARMS = {
    "the recipe": RM,
    "from rejection sampling": [*RM, "--model", "{rejection_sampling}"],
    "no KL penalty, length bias": ["--scorer", "{biased}", "--kl-coef", "0"],
    "top-p 0.9": [*RM, "--top-p", "0.9"],
    "RM-PPO": [*RM, *HALF, "--reward-norm", "none"],
    "RM-PPO, running mean": [*RM, *HALF, "--reward-norm", "mean"],
    "AM-PPO": [*AM, *HALF, "--reward-norm", "none"],
    "AM-PPO-SR, c = 8": [*AM, *HALF, "--reward-norm", "none", "--rehearsal-data", "8"],
    "AM-PPO-SR, c = 2": [*AM, *HALF, "--reward-norm", "none", "--rehearsal-data", "2"],
    "AM-PPO-SR, c = 32": [*AM, *HALF, "--reward-norm", "none", "--rehearsal-data", "32"],
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


def rehearsal_data(flags, clusters, seed, path) -> str:
    """The file of `python -m common.rehearsal` with so many clusters, for the arm of these flags."""
    if not path.exists():
        chosen = [f"--{key}" for key in ("model", "scorer", "dataset")]
        given = [x for key in chosen for x in (key, flags[flags.index(key) + 1])]
        given += ["--clusters", clusters, "--seed", str(seed), "--output", str(path.resolve())]
        subprocess.run([sys.executable, "-m", "common.rehearsal", *given], check=True, cwd=peers.ROOT)
    return str(path)


def main(args: Args):
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for number in args.only:
        name, table = list(ARMS)[number], []
        for seed in range(args.seeds):
            out = folder / f"{number}_{seed}"
            flags = [x.format(**vars(args)) for x in ARMS[name]]
            flags += [] if "--model" in flags else ["--model", args.sft]
            if "--rehearsal-data" in flags:
                place = flags.index("--rehearsal-data") + 1
                flags[place] = rehearsal_data(flags, flags[place], seed, folder / f"{number}_{seed}.jsonl")
            summary, seconds = peers.arm("ppo.py", out, ["tiny", *flags, "--seed", seed])
            after = summary["after"]
            line = {"seed": seed, "score": f"{after['eval/score']:.2f}", "kl": after["eval/kl"]}
            line["entropy"] = f"{after['eval/entropy']:.2f}"
            line["seconds"] = seconds
            half = "--dataset" in flags
            sets = {"held-out": HALF[1], "forget": FORGET} if half else {"held-out": "tiny"}
            for group, dataset in sets.items():
                first, scorer = (flags[flags.index(key) + 1] for key in ("--model", "--scorer"))
                given = ["--policies", f"first={first}", f"ppo={out}", "--reference", "first"]
                given += ["--scorer", scorer, "--dataset", dataset, "--seed", seed]
                given += ["--max-length", "128", "--max-new-tokens", "32"]  # ppo.py's
                results = peers.tool("common.evaluate", folder / f"{number}_{seed}_{group}", given)
                result = results["temperatures"]["1"]["ppo"]
                shares = [result[f"gold_{x}"] for x in ("win", "tie", "lose")]
                line[f"{group} gain"] = metrics.interval(result, "gold_gain")
                line[f"{group} win / tie / lose"] = " / ".join(f"{x:.0%}" for x in shares)
            if "eval/ptx_nll" in after:
                line["ptx nll"] = f"{after['eval/ptx_nll']:.2f}"
            table.append(line)
        print(f"\n{name}")
        metrics.print_table(table)


if __name__ == "__main__":
    main(tyro.cli(Args))
