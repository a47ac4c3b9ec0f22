"""Measure how well a labeler agrees with human labels for each of its prompts: preamble, examples and chain of
thought, as in the table of "RLAIF" (arXiv:2309.00267). Every setting is a separate run; finished runs are kept.

    python tests/benchmarks/ai_labels.py --model HuggingFaceTB/SmolLM2-135M-Instruct --dataset hh_test.jsonl.gz --rows 200
"""

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import peers
import tyro

from common.data import files, mixtures, progress
from common.scoring import measures


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
    chains: int = 1
    """Rationales per pair, whose answers are averaged (self-consistency)."""
    constitution: str | None = None
    """File of principles; each question then names one of them instead of the base or detailed preamble."""
    max_new_tokens: int = 64
    """Length limit of a rationale, in tokens."""
    compute_dtype: str = "float32"
    """The labeler's compute dtype; bfloat16 is faster if the processor supports it."""
    folder: str = "runs/ai_labels"
    """Folder for the runs."""


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


def main(args: Args):
    table = []
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    dataset = pairs_of(args.dataset, Path(args.folder, "pairs.jsonl"))
    preambles = ("principle",) if args.constitution else ("base", "detailed")
    for thoughts, preamble, examples in itertools.product(args.thoughts, preambles, (0, 2)):
        out = Path(args.folder, f"{preamble}_{examples}" + f"_thoughts_{args.chains}" * thoughts)
        flags = ["label", "--model", args.model, "--dataset", dataset, "--max-rows", args.rows]
        flags += ["--examples", examples, "--compute-dtype", args.compute_dtype]
        flags += ["--constitution", args.constitution] if args.constitution else ["--preamble", preamble]
        if thoughts:
            flags += ["--chain-of-thought", "--chains", args.chains, "--max-new-tokens", args.max_new_tokens]
        figures = peers.tool("common.programs.ai_feedback", out, flags)
        line = {"prompt": f"{preamble}{' + thoughts' * thoughts}, {examples} examples"}
        line |= {"alignment": measures.interval(figures, "alignment", ".1%"), "n": figures["alignment/n"]}
        line |= {"one order": f"{figures['alignment/one_order']:.1%}", "failed": figures["failed"]}
        line |= {"order decides": f"{figures['position/decides']:.0%}"}
        line |= {"first": f"{figures['position/first']:.2f}", "mass": f"{figures['mass']:.2f}"}
        table.append(line)
        print(line, flush=True)
    progress.print_table(table)


if __name__ == "__main__":
    main(tyro.cli(Args))
