"""AI feedback from end to end on the tiny world, by labelers that know the true reward, with and without noise
and position bias (tests/gold_labeler.py), against RLHF on the same prompts: "RLAIF" (arXiv:2309.00267) and
Constitutional AI's first half (arXiv:2212.08073). Every step and seed is a run of its own; finished ones are not
run again.

    RLHF        reward.py on people's labels (runs/reward), ppo.py
    distilled   label, reward.py on the labels, ppo.py
    direct      ppo.py with the labeler's rating as its score
    revised     revise, sft.py on the revisions

    python tests/benchmarks/rlaif.py --seeds 3
"""

import os
from dataclasses import dataclass
from pathlib import Path

import peers
import tyro

from common import metrics

os.environ["PYTHONPATH"] = str(peers.ROOT / "tests")  # where the scripts find gold_labeler


@dataclass
class Args:
    sft: str = "runs/sft"
    """Finished runs on the tiny world."""
    reward: str = "runs/reward"
    labelers: tuple[str, ...] = ("exact", "noisy", "biased")
    """Functions of tests/gold_labeler.py, for the distilled arm; the first one's ratings for the direct arm."""
    folder: str = "runs/rlaif"
    """Where the runs go."""
    seeds: int = 3
    """Seeds 0, 1, ... of reward models, samples and minibatches. The labels are the same."""


def main(args: Args):
    folder, labels, tables = Path(args.folder), [], {}
    for labeler in args.labelers:
        flags = ["label", "--model", f"gold_labeler:{labeler}", "--dataset", "tiny"]
        figures = peers.tool("common.ai_feedback", folder / f"labels_{labeler}", flags)
        line = {"labeler": labeler, "agrees with people": f"{figures['alignment']:.1%}"}
        line |= {"n": figures["alignment/n"], "one order": f"{figures['alignment/one_order']:.1%}"}
        labels.append({**line, "order decides": f"{figures['position/decides']:.0%}"})
    metrics.print_table(labels)
    flags = ["revise", "--model", f"gold_labeler:{args.labelers[0]}", "--dataset", "tiny"]
    peers.tool("common.ai_feedback", folder / "revisions", flags)
    for seed in range(args.seeds):
        start = ["--model", args.sft, "--seed", seed]
        policies = {"sft": args.sft, "rlhf": folder / f"rlhf_{seed}"}
        peers.arm("ppo.py", policies["rlhf"], [*start, "--scorer", args.reward])
        for labeler in args.labelers:
            reward, policy = folder / f"reward_{labeler}_{seed}", folder / f"distilled_{labeler}_{seed}"
            rows = folder / f"labels_{labeler}" / "rows.jsonl"
            flags = ["tiny", "--dataset", rows, "--eval-dataset", "tiny", "--sft-model", args.sft]
            flags += ["--seed", seed]
            after = peers.arm("reward.py", reward, flags)[0]["after"]
            accuracy = f"{after['eval/accuracy']:.1%} of people's labels"
            print(f"seed {seed}, reward model of {labeler}: {accuracy}", flush=True)
            peers.arm("ppo.py", policy, [*start, "--scorer", reward])
            policies[f"distilled, {labeler}"] = policy
        policies["direct"] = folder / f"direct_{seed}"
        rater = f"common.ai_feedback:rater=gold_labeler:{args.labelers[0]}"
        peers.arm("ppo.py", policies["direct"], [*start, "--scorer", rater])
        policies["revised"] = folder / f"revised_{seed}"
        flags = ["tiny", *start, "--dataset", folder / "revisions" / "rows.jsonl"]
        peers.arm("sft.py", policies["revised"], flags)
        for reference in ("sft", "rlhf"):
            specs = [f"{name}={path}" for name, path in policies.items()]
            flags = ["--policies", *specs, "--scorer", args.reward, "--reference", reference, "--seed", seed]
            summary = peers.tool("common.evaluate", folder / f"against_{reference}_{seed}", flags)
            for name, r in summary["temperatures"]["1"].items():
                line = tables.setdefault(reference, {}).setdefault(name, {"policy": name})
                gain = metrics.interval(r, "gold_gain")
                line[f"gain {seed}"] = f"{gain} {r['gold_win']:.0%}/{r['gold_tie']:.0%}/{r['gold_lose']:.0%}"
                line[f"harmless {seed}"] = f"{r['harmless']:.0%}"
    for reference, lines in tables.items():
        print(f"\ntrue reward over {reference} [95 % interval], win/tie/lose, by seed:")
        metrics.print_table(list(lines.values()))


if __name__ == "__main__":
    main(tyro.cli(Args))
