"""A new user's first hour with a pretrained chat model and rows of their own: SFT, PPO with a function, a
reward model and offline DPO, each by a command with no flags except model, data, scorer and output directory. It
measures the gain of each model over the one that it started from, on rows that no run saw.

    python tests/benchmarks/first_hour.py --model DIR --rankings rankings.jsonl.gz

The rows, short for a CPU, are made of rankings (docs/use/data.md). Finished runs are not repeated; their
output is in --folder/NAME.log. --more 'ppo --iterations 6' adds flags to a command that takes too long.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from peers import ROOT, environment

from common.data import files, mixtures, progress
from common.loading import pretrained
from common.scoring import measures

REWARD = "def good(prompts, responses, rows):\n    return [-len(response) / 100 for response in responses]\n"
ANIMALS = "ant cat cow dog elephant fox goat hen horse lion mouse owl pig rat seal wolf".split()
COMMANDS = {
    "sft": "{root}/sft.py --model {model} --dataset sft.jsonl",
    "ppo": "{root}/ppo.py --model {model} --scorer myreward:good --dataset prompts.jsonl",
    "judge": "-m common.programs.evaluate --policies before={model} after=ppo --reference before "
    "--scorer myreward:good --dataset prompts.test.jsonl --max-length 1024 --max-new-tokens 256",
    "reward": "{root}/reward.py --model {model} --dataset pairs.jsonl",
    "dpo": "{root}/dpo_iterative.py --model {model} --scorer reward --dataset prompts.jsonl "
    "--iterations 0 --offline-data pairs.jsonl",
}


def make_rows(rankings):
    """{kind: rows}: the best of short responses, the best and the worst, questions with a short answer."""
    rows = {"sft": [], "pairs": [], "prompts": []}
    for row in mixtures.load_rows(rankings, "preferences"):
        prompt, responses = row.data["instruction"], sorted(row.data["responses"], key=lambda r: -r["score"])
        texts = [r["text"] for r in responses if r["text"].strip() and len(r["text"]) <= 200]
        if len(texts) > 1 and len(prompt) <= 100:
            rows["sft"].append({"prompt": prompt, "completion": texts[0]})
            rows["pairs"].append({"prompt": prompt, "chosen": texts[0], "rejected": texts[-1]})
    example = [("user", "Is a flea larger than a cat?"), ("assistant", "No.")]
    for a, b in random.Random(0).sample(list(itertools.permutations(ANIMALS, 2)), 240):
        turns = [*example, ("user", f"Is a {a} larger than a {b}?")]
        messages = [{"role": role, "content": text} for role, text in turns]
        rows["prompts"].append({"system": "Yes or no?", "messages": messages})
    return rows


def run(name, flags, folder, model):
    """Run a command as a user does, in their folder, unless it is finished."""
    if (folder / name / "summary.json").exists():
        return
    command = f"{COMMANDS[name].format(root=ROOT, model=model)} --output-dir {name} {flags}"
    print(f"python {command}", flush=True)
    start, env = time.time(), environment("")
    with open(folder / f"{name}.log", "a") as log:
        program = [sys.executable, *command.split(), "--resume"]
        subprocess.run(program, cwd=folder, env=env, stdout=log, stderr=log, check=True)
    print(f"{(time.time() - start) / 60:.1f} minutes", flush=True)


@torch.no_grad()
def read(folder, texts, scorer=False):
    """What the forward of transformers says of each (prompt, response): a scorer's score, or the mean log pi
    of the response's tokens, its end token included; and how many tokens these are."""
    tokenizer = pretrained.load_tokenizer(folder, quiet=True)
    model = pretrained.load_scorer(folder, tokenizer, 1) if scorer else pretrained.load_policy(folder, tokenizer)
    for prompt, response in texts:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        start = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
        ids = torch.tensor([tokenizer.apply_chat_template(turns, return_dict=False)])
        ids = ids[:, : ids[0].eq(tokenizer.eos_token_id).nonzero().max() + 1]  # nothing after the end token
        targets = ids.masked_fill(torch.arange(ids.shape[1]) < len(start), -100)
        value = model(ids).logits if scorer else -model(ids, labels=targets).loss
        yield value.item(), ids.shape[1] - len(start)


def measure(name, model, folder, rows):
    """(what, 1 if more of it is better or -1, values before, values after), a value for each held-out row."""
    if name == "judge":
        samples = files.read_jsonl(folder / "judge/samples.jsonl")
        scores = [[row["score"] for row in samples if row["policy"] == x] for x in ("before", "after")]
        return "PPO: reward", 1, scores[0], scores[1]
    sides, kind = (("completion",), "sft") if name == "sft" else (("chosen", "rejected"), "pairs")
    texts = [(row["prompt"], row[side]) for row in rows[kind] for side in sides]
    before, after = (list(read(x, texts, name == "reward")) for x in (model, folder / name / "model"))
    if name == "sft":
        return "SFT: loss", -1, [-x for x, _ in before], [-x for x, _ in after]
    rewards = [[x for x, _ in before], [x for x, _ in after]]
    if name == "dpo":  # beta (log pi - log pi_0), beta the recipe's
        rewards = [[0.0] * len(texts), [0.1 * n * (x - x_0) for (x, n), (x_0, _) in zip(after, before)]]
    losses = [[math.log1p(math.exp(b - a)) for a, b in zip(x[::2], x[1::2])] for x in rewards]
    return f"{name}: loss of pairs", -1, losses[0], losses[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rankings", required=True, help="a file, or several with commas between them")
    parser.add_argument("--folder", default="runs/first_hour")
    parser.add_argument("--rows", type=int, default=100, help="of each kind to train on; 60 are held out")
    parser.add_argument("--more", action="append", default=[], help="'NAME --flag ...', for one command")
    args = parser.parse_args()
    folder, model, test = Path(args.folder).resolve(), str(Path(args.model).resolve()), {}
    folder.mkdir(parents=True, exist_ok=True)
    for kind, rows in make_rows(args.rankings).items():
        test[kind] = rows[args.rows :][:60]
        files.write_jsonl(folder / f"{kind}.jsonl", rows[: args.rows])
        files.write_jsonl(folder / f"{kind}.test.jsonl", test[kind])
    (folder / "myreward.py").write_text(REWARD)
    more, table = dict(text.split(" ", 1) for text in args.more), []
    for name in COMMANDS:
        run(name, more.get(name, ""), folder, model)
        file = folder / f"{name}.json"
        if name == "ppo":  # its policy answers prompts in `judge`
            continue
        if not file.exists():
            file.write_text(json.dumps(measure(name, model, folder, test)))
        what, sign, before, after = json.loads(file.read_text())
        rows = ([{"x": x} for x in values] for values in (before, after))
        mean, low, high = measures.gains(*rows, {"x": "x"}).values()
        verdict = "null" if low <= 0 <= high else "gain" if sign * mean > 0 else "loss"
        line = {"held out": what, "n": len(after), "before": f"{statistics.fmean(before):.4f}"}
        line |= {"after": f"{statistics.fmean(after):.4f}", "after - before": f"{mean:+.4f}"}
        table.append(line | {"95 %": f"[{low:+.4f}, {high:+.4f}]", "verdict": verdict})
    progress.print_table(table)


if __name__ == "__main__":
    main()
