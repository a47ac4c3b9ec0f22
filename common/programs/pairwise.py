"""The pairwise preference model of RLHF Workflow (arXiv:2405.07863, section 2.2): a causal LM that reads a
prompt and two responses, and whose next token, A or B, names the better one.

    [CONTEXT] {prompt} [RESPONSE A] {a} [RESPONSE B] {b}   ->   A or B

It learns as any language model does: this program writes labelled pairs as rows for sft.py, of which only the
letter and what the chat template writes after it carry loss. `oracle` is what such a model says.

    python -m common.programs.pairwise --model runs/sft
    python sft.py tiny --model runs/sft --dataset runs/pairs/train.jsonl --lr 1e-3 --sample-prompts 0 \
        --eval-dataset runs/pairs/held_out.jsonl --output-dir runs/preference
    python dpo_iterative.py --scorer common.programs.pairwise:oracle=runs/preference

An oracle that sees both responses at once can prefer in a circle, which no scalar score can. Differs from the
paper: both orders are averaged when the model is asked; a soft label counts as its likelier side.
"""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from common import dist, models
from common.batches import labelled_pairs
from common.errors import InputError
from common.data import chat, comparisons, files, message_columns, splits
from common.loading import pretrained
from common.run.cli import check_flags
from common.run.run import launch
from common.programs import ai_feedback


def question(prompt: list[dict], a: str, b: str) -> str:
    return f"[CONTEXT] {message_columns.transcript(prompt)} [RESPONSE A] {a} [RESPONSE B] {b}"


def rows_of(some_comparisons, seed) -> list[dict]:
    """Every labelled pair once as a row for sft.py, A and B in an order drawn at random; a tie is no pair."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for c in some_comparisons:
        for better, worse in labelled_pairs(c):
            a, b, letter = c.texts[better], c.texts[worse], "A"
            if torch.rand((), generator=generator) >= 0.5:
                a, b, letter = b, a, "B"
            rows.append({"prompt": question(c.prompt, a, b), "completion": letter})
    return rows


# -- what the model says ---------------------------------------------------------------------------
def encode(tokenizer, text, letter) -> list[int]:
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": letter}]
    return chat.encode(tokenizer, turns)[0]


def letters_of(tokenizer) -> tuple[list[int], int]:
    """(the tokens of A and B where sft.py has a model learn them, how many tokens an answer has from there
    on), whatever the chat template writes before the letter: a space, or empty thoughts."""
    a, b = (encode(tokenizer, "a question", letter) for letter in "AB")
    if a == b:
        raise ValueError("its tokenizer cannot write A and B apart")
    place = len(os.path.commonprefix([a, b]))
    return [a[place], b[place]], len(a) - place


def oracle(name):
    """`--scorer common.programs.pairwise:oracle=NAME`. Return the function that gives log P(a beats b) /
    P(b beats a) of (prompt messages, a, b)s by this model, whole on every rank. P is p(A) / (p(A) +
    p(B)), the mean of both orders, since one order alone favours a place."""
    judge = ai_feedback.LanguageModel(name, dist.setup(), ai_feedback.Args())
    letters, n_after = letters_of(judge.tokenizer)
    without_special = partial(chat.special_tokens(judge.tokenizer).sub, "")

    def log_odds(duels):
        p_first = []  # of each order: p(A) / (p(A) + p(B)), (duels,)
        for order in (duels, [(prompt, b, a) for prompt, a, b in duels]):
            texts = [without_special(question(prompt, a, b)) for prompt, a, b in order]
            prompts = [torch.tensor(encode(judge.tokenizer, text, "A")[:-n_after]) for text in texts]
            if max(map(len, prompts)) > judge.room:
                raise ValueError(f"a prompt with two responses is longer than {judge.room} tokens")
            ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(judge.device)
            where = torch.tensor([(i, len(prompt) - 1) for i, prompt in enumerate(prompts)]).T
            logprobs = models.next_token_logprobs(judge.model, ids, where.to(judge.device))[:, letters]
            p_first.append(logprobs.double().softmax(1)[:, 0])
        return ((p_first[0] + 1 - p_first[1]) / 2).logit(eps=1e-12).tolist()

    log_odds.pairwise = True
    return log_odds


@dataclass
class Args:
    model: str = "tiny"
    """The model that sft.py will train, for its tokenizer and chat template."""
    dataset: str = "tiny"
    """Pairs and rankings, as reward.py takes them: tiny, a hub name, a file or a mixture."""
    eval_dataset: str | None = None
    """Held-out ones. None: tiny's held-out split, or 5 % of the prompts, at most 500."""
    output_dir: str = "runs/pairs"
    """The folder for train.jsonl and held_out.jsonl, which may not be there already."""
    chat_template: str | None = None
    """A jinja file, for a tokenizer without a chat template or in place of its own."""
    max_length: int = 3072
    """Tokens of a prompt with one response; sft.py leaves out what is too long with both."""
    min_score_gap: float = 0.0
    """Pairs whose scores differ by less are dropped."""
    seed: int = 0
    """Of the places of A and B."""


def main(args: Args):
    dist.setup()
    check_flags(args)
    folder = Path(args.output_dir)
    if folder.exists():
        raise InputError(f"--output-dir {folder} is there already")
    tokenizer = pretrained.load_tokenizer(args.model, args.chat_template)
    limits = {"max_length": args.max_length, "min_score_gap": args.min_score_gap}
    load = partial(comparisons.load, tokenizer=tokenizer, **limits)
    pairs_of_split = splits.train_and_held_out(args.dataset, args.eval_dataset, load, tokenizer)
    for name, split in zip(("train", "held_out"), pairs_of_split if dist.is_main() else ()):
        rows = rows_of(split, args.seed)
        folder.mkdir(parents=True, exist_ok=True)
        files.write_jsonl(folder / f"{name}.jsonl", rows)  # whole or not at all
        print(f"wrote {len(rows):,} rows to {folder / name}.jsonl")


if __name__ == "__main__":
    launch(main, {"rows": ("labelled pairs as rows for sft.py", Args())})
