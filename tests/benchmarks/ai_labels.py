"""Measure how well a labeler agrees with human labels for each of its prompts: preamble, examples and chain of
thought, as in the table of "RLAIF" (arXiv:2309.00267). Every setting is a separate run; finished runs are kept.

    python tests/benchmarks/ai_labels.py --model HuggingFaceTB/SmolLM2-135M-Instruct --dataset hh_test.jsonl.gz --rows 200

With --publish the claims about SETTINGS, all of which must have run in the folder, go to docs/results/claims.md."""

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import experiments
import peers
import torch
import tyro
import verdicts

from common.data import files, mixtures, progress
from common.scoring import measures


SETTINGS = {  # of experiments.ELSEWHERE: (folder, whether only single orders count)
    "base, both orders": ("base_0", False),
    "base, one order": ("base_0", True),
    "base": ("base_0", False),
    "detailed": ("detailed_0", False),
    "base + thoughts": ("base_0_thoughts_1", False),
    "base + 4 thoughts": ("base_0_thoughts_4", False),
}


@dataclass
class Args:
    model: str
    """Model that labels."""
    dataset: str
    """Pairs with human labels, or rankings; two pairs are drawn from each ranking."""
    rows: int = 200
    """Number of pairs."""
    thoughts: tuple[bool, ...] = (False, True)
    """Settings of chain of thought; its rationales take most of the time."""
    preambles: tuple[str, ...] = ("base", "detailed")
    """Settings of the preamble."""
    examples: tuple[int, ...] = (0, 2)
    """Settings of the number of examples in the prompt."""
    chains: tuple[int, ...] = (1,)
    """Settings of the rationales per pair, whose answers are averaged (self-consistency)."""
    constitution: str | None = None
    """File of principles; each question then names one of them instead of the base or detailed preamble."""
    max_new_tokens: int = 64
    """Length limit of a rationale, in tokens."""
    compute_dtype: str = "float32"
    """The labeler's compute dtype; bfloat16 is faster if the processor supports it."""
    folder: str = "runs/ai_labels"
    """Folder for the runs."""
    publish: bool = False
    """Write docs/results/tables/ai_labels.md and .jsonl, docs/results/real_models.md and its rows of claims.md."""


def pairs_of(dataset, path):
    """Write a file of pairs: from each ranking two random pairs with different scores and no common response; other
    rows are copied."""
    pairs = []
    for row in mixtures.load_rows(dataset, "preferences", "test"):
        if "responses" not in row.data:
            return dataset
        responses, two = row.data["responses"], []
        order = random.Random(row.where.rpartition(":")[2]).sample(responses, len(responses))
        for a, b in zip(order[::2], order[1::2]):
            if a["score"] != b["score"] and a["text"].strip() != b["text"].strip():
                chosen, rejected = sorted((a, b), key=lambda x: -x["score"])
                two.append({"chosen": chosen["text"], "rejected": rejected["text"]})
        pairs += [{"prompt": row.data.get("prompt") or row.data["instruction"], **pair} for pair in two[:2]]
    files.write_jsonl(path, pairs)
    return str(path)


def agreement(folder, one_order) -> dict[int, float]:
    """{row: how much its label agrees with the human one: 1, 1/2 or 0}; with one_order the mean of the two orders'."""
    found = {}
    for row in files.read_jsonl(Path(folder) / "rows.jsonl"):
        said = row["ai"]["orders"] if one_order else [row["preference"]]
        found[row["row"]] = measures.accuracy([(p - 0.5) * (row["human"] - 0.5) for p in said])
    return found


def judge(folder) -> list[dict]:
    """Judge the claims on the pairs that both settings labelled; each pair is a cluster."""
    of = {name: agreement(Path(folder, path), one_order) for name, (path, one_order) in SETTINGS.items()}
    lines = []
    for claim in experiments.ELSEWHERE["ai_labels"]:
        after, before = of[claim.after], of[claim.before]
        both = [[side[row] for row in sorted(after.keys() & before.keys())] for side in (after, before)]
        arms = torch.tensor(both, dtype=torch.float64)[:, None]  # (arms, seeds, pairs): one seed
        weights = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
        lines.append(experiments.line_of(claim, verdicts.difference(weights, arms, arms[0]), 1))
    return lines


def main(args: Args):
    table = []
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    dataset = pairs_of(args.dataset, Path(args.folder, "pairs.jsonl"))
    preambles = ("principle",) if args.constitution else args.preambles
    chains = [n for thoughts in args.thoughts for n in (args.chains if thoughts else (0,))]
    for n_chains, preamble, examples in itertools.product(chains, preambles, args.examples):
        out = Path(args.folder, f"{preamble}_{examples}" + f"_thoughts_{n_chains}" * bool(n_chains))
        flags = ["label", "--model", args.model, "--dataset", dataset, "--max-rows", args.rows]
        flags += ["--examples", examples, "--compute-dtype", args.compute_dtype]
        flags += ["--constitution", args.constitution] if args.constitution else ["--preamble", preamble]
        if n_chains:
            flags += ["--chain-of-thought", "--chains", n_chains, "--max-new-tokens", args.max_new_tokens]
        figures = peers.tool("common.programs.ai_feedback", out, flags)
        line = {"prompt": f"{preamble}{f' + {n_chains} thoughts' * bool(n_chains)}, {examples} examples"}
        line |= {"alignment": measures.interval(figures, "alignment", ".1%"), "n": figures["alignment/n"]}
        line |= {"one order": f"{figures['alignment/one_order']:.1%}", "failed": figures["failed"]}
        line |= {"order decides": f"{figures['position/decides']:.0%}"}
        line |= {"first": f"{figures['position/first']:.2f}", "mass": f"{figures['mass']:.2f}"}
        table.append(line)
        print(line, flush=True)
    progress.print_table(table)
    if args.publish:
        lines = judge(args.folder)
        commit = files.read_json(Path(args.folder, "base_0", "args.json"))["git"][:7]
        experiments.publish("ai_labels", [*experiments.comparisons_of(lines), "", f"Measured at {commit}."])
        experiments.publish_claims("ai_labels", lines)


if __name__ == "__main__":
    main(tyro.cli(Args))
