"""How well a labeler agrees with people, prompt by prompt: preamble, examples and chain of thought, the table
of "RLAIF" (arXiv:2309.00267). Every setting is a run of its own; finished ones are not run again.

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
    """The labeler."""
    dataset: str
    """Pairs with human labels, or rankings, of each of which two pairs are drawn."""
    rows: int = 200
    """So many of them."""
    thoughts: tuple[bool, ...] = (False, True)
    """Without and with chain of thought, whose rationales cost most of the time."""
    chains: int = 1
    """Rationales to a pair, whose answers are averaged (self-consistency)."""
    constitution: str | None = None
    """A file of principles, of which one is asked for in place of base and detailed."""
    max_new_tokens: int = 64
    """Longest rationale."""
    compute_dtype: str = "float32"
    """The labeler's; bfloat16 is faster where the processor knows it."""
    folder: str = "runs/ai_labels"
    """Where the runs go."""


def pairs_of(dataset, path):
    """A file of pairs: of each ranking two that have no response in common, drawn at random, whose scores
    differ; other rows as they are."""
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
