"""The pairwise preference model of RLHF Workflow (arXiv:2405.07863, section 2.2): a causal LM that reads a
prompt and two responses, and predicts A or B, the better one, as its next token.

    [CONTEXT] {prompt} [RESPONSE A] {a} [RESPONSE B] {b}   ->   A or B

It is trained like any language model. This program writes labelled pairs as rows for sft.py, where only the
letter, and the tokens that the chat template adds after it, have a loss. `oracle` makes a scorer of a trained
model.

    python -m common.programs.pairwise --model runs/sft
    python sft.py tiny --model runs/sft --dataset runs/pairs/train.jsonl --lr 1e-3 --sample-prompts 0 \\
        --eval-dataset runs/pairs/held_out.jsonl --output-dir runs/preference
    python dpo_iterative.py --scorer common.programs.pairwise:oracle=runs/preference

A model that sees both responses can have circular preferences (a over b, b over c, c over a), which no scalar
score can express. Differs from the paper: the probability is averaged over both orders of the responses; a
soft label is trained as its more probable side.
"""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from common import dist
from common.batches import labelled_pairs
from common.errors import InputError
from common.data import chat, comparisons, files, message_columns, mixtures, progress, splits
from common.loading import pretrained
from common.scoring import next_token
from common.run.cli import check_flags
from common.run.run import launch
from common.programs import ai_feedback


def question(prompt: list[dict], a: str, b: str) -> str:
    """Write a prompt and two responses as the text that the model reads."""
    return f"[CONTEXT] {message_columns.transcript(prompt)} [RESPONSE A] {a} [RESPONSE B] {b}"


def rows_of(some_comparisons, seed) -> list[dict]:
    """Turn each labelled pair into one row for sft.py, with A and B in random order. Ties are left out."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for c in some_comparisons:
        for better, worse in labelled_pairs(c):
            a, b, letter = c.texts[better], c.texts[worse], "A"
            if torch.rand((), generator=generator) >= 0.5:
                a, b, letter = b, a, "B"
            rows.append({"prompt": question(c.prompt, a, b), "completion": letter})
    return rows


# -- the trained model as a scorer -----------------------------------------------------------------
def encode(tokenizer, text, letter) -> list[int]:
    """Return the token ids of a dialogue with one question and one letter as its answer."""
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": letter}]
    return chat.encode(tokenizer, turns)[0]


def letters_of(tokenizer) -> tuple[list[int], int]:
    """Return ([token of A, token of B], number of tokens from the letter to the end of a dialogue).

    Both are read off two encoded dialogues, which differ first at the letter, because the chat template may
    write a space or empty thoughts before it. Raises ValueError if A and B have the same tokens."""
    a, b = (encode(tokenizer, "a question", letter) for letter in "AB")
    if a == b:
        raise ValueError("the tokenizer has no distinct tokens for A and B")
    place = len(os.path.commonprefix([a, b]))
    return [a[place], b[place]], len(a) - place


def oracle(name):
    """Make a pairwise scorer of a trained model: `--scorer common.programs.pairwise:oracle=NAME`.

    Returns a function that gives log P(a beats b) / P(b beats a) for a list of (prompt messages, a, b). P is
    p(A) / (p(A) + p(B)), mean over both orders, to cancel position bias; 1/2 if the two responses do not fit
    into the model. Each rank holds the whole model."""
    judge = ai_feedback.LanguageModel(name, dist.setup(), ai_feedback.Args())
    letters, n_after = letters_of(judge.tokenizer)
    without_special = partial(chat.without_special_tokens, judge.tokenizer)

    def log_odds(duels):
        p_first = []  # for each order: p(A) / (p(A) + p(B)), (duels,)
        for order in (duels, [(prompt, b, a) for prompt, a, b in duels]):
            texts = [without_special(question(prompt, a, b)) for prompt, a, b in order]
            prompts = [torch.tensor(encode(judge.tokenizer, text, "A")[:-n_after]) for text in texts]
            fits = torch.tensor([len(prompt) <= judge.room for prompt in prompts])
            if not fits.all():
                progress.note(f"{name}: a prompt with two responses of over {judge.room} tokens is a tie")
            prompts = [prompt[: judge.room] for prompt in prompts]
            ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(judge.device)
            where = torch.tensor([(i, len(prompt) - 1) for i, prompt in enumerate(prompts)]).T
            logprobs = next_token.logprobs(judge.model, ids, where.to(judge.device))[:, letters]
            p_first.append(torch.where(fits, logprobs.double().softmax(1)[:, 0].cpu(), 0.5))
        return ((p_first[0] + 1 - p_first[1]) / 2).logit(eps=1e-12).tolist()

    log_odds.pairwise = True
    return log_odds


@dataclass
class Args:
    model: str = "tiny"
    """Model that sft.py will train; only its tokenizer and chat template are used."""
    dataset: str = "tiny"
    """Pairs and rankings, as for reward.py: tiny, a hub name, a file or a mixture."""
    eval_dataset: str | None = None
    """Held-out pairs. Default: the held-out split of tiny, or 5 % of the prompts, at most 500."""
    output_dir: str = "runs/pairs"
    """New folder for train.jsonl and held_out.jsonl."""
    chat_template: str | None = None
    """Jinja file with the chat template, for a tokenizer without one or instead of its own."""
    max_length: int = 3072
    """Maximum number of tokens of a prompt with one response. sft.py drops those too long with two."""
    min_score_gap: float = 0.0
    """Smallest difference of scores; pairs with a smaller one are dropped."""
    seed: int = 0
    """Seed of the order of A and B."""


def main(args: Args):
    dist.setup()
    check_flags(args)
    mixtures.sources_of(args)
    folder = Path(args.output_dir)
    if folder.exists():
        raise InputError(f"--output-dir {folder}: the folder already exists. Choose another one.")
    tokenizer = pretrained.load_tokenizer(args.model, args.chat_template)
    limits = {"max_length": args.max_length, "min_score_gap": args.min_score_gap}
    load = partial(comparisons.load, tokenizer=tokenizer, **limits)
    pairs_of_split = splits.train_and_held_out(args.dataset, args.eval_dataset, load, tokenizer)
    rows_of_split = [rows_of(split, args.seed) for split in pairs_of_split]
    if not all(rows_of_split):
        raise InputError(f"--dataset {args.dataset}: no pair with a better side for training or held out")
    for name, rows in zip(("train", "held_out"), rows_of_split if dist.is_main() else ()):
        folder.mkdir(parents=True, exist_ok=True)
        files.write_jsonl(folder / f"{name}.jsonl", rows)  # atomic: never a partial file
        print(f"wrote {len(rows):,} rows to {folder / name}.jsonl")


if __name__ == "__main__":
    launch(main, {"rows": ("labelled pairs as rows for sft.py", Args())})
