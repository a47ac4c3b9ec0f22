"""Split data into training and held-out sets that share no prompt; print an example of the training data."""

import itertools
import unicodedata
import zlib

import torch

from common import dist
from common.batches import Comparison, Document, turns_key
from common.data import mapping, mixtures


def questions(item) -> dict[tuple, int]:
    """Return the questions that a document, comparison or prompt teaches to answer (held_out_keys)."""
    if not isinstance(item, Document):
        return held_out_keys([item.prompt if isinstance(item, Comparison) else item.turns])
    roles = [message["role"] for message in item.messages[:-1]]
    # An answer before any user turn (a greeting) has no question
    answers = [i for i, role in enumerate(roles) if role == "assistant" and "user" in roles[:i]]
    return held_out_keys(item.messages[:i] for i in [*(answers if item.all_turns else ()), -1])


def held_out_keys(prompts) -> dict[tuple, int]:
    """Return {question: hash} for the prompts whose answers a row teaches.

    These are the only keys by which rows of any kind are held out from training. A question is a prompt
    without its system turns, which say how to answer and may differ between rows with the same question; only
    a prompt of system turns alone keeps them. Questions that differ only in case, white space or Unicode form
    count as equal, because files spell the same question differently, and holding out one row too many does
    no harm. The hash, used to choose a random subset, is that of the prompt as written.

    prompts: iterable of lists of turns (messages)."""
    keys = {}
    for turns in prompts:
        question = [m for m in turns if m["role"] not in ("system", "developer")]
        turns = question if any(m["content"].strip() for m in question) else turns
        texts = (unicodedata.normalize("NFKC", m["content"]).casefold().split() for m in turns)
        keys[tuple(map(" ".join, texts))] = zlib.crc32(turns_key(turns).encode())
    return keys


def hold_out(documents: list[Document], share: float = 0.05, most: int = 500):
    """Split documents, comparisons or prompts into (training, held-out).

    Items are grouped by the first question to which they teach an answer, and groups are held out by a hash
    of that question. The first question is enough: dialogues that share a later one share the first one too.

    share: the part of the questions that is held out.
    most: the largest number of questions that are held out."""
    firsts = [next(iter(questions(d).items())) for d in documents]
    hashes = {}
    for question, number in firsts:
        hashes[question] = min(number, hashes.get(question, number))
    ranked = sorted(hashes, key=hashes.get)
    held_out = set(ranked[: max(1, min(most, round(share * len(ranked))))]) if len(ranked) > 1 else set()
    sides = [], []
    for document, (question, _) in zip(documents, firsts):
        sides[question in held_out].append(document)
    return sides


def without_prompts_of(documents: list[Document], held_out: list[Document], name: str) -> list[Document]:
    """Drop the documents, comparisons or prompts that teach an answer to a question of `held_out`.

    Training on them would make metrics on the held-out set too good. Dropped items are counted and
    printed. Raises InputError if no item is left."""

    def other(document):
        if not held_out_questions.isdisjoint(questions(document)):
            flags = "(--eval-dataset, --hold-out-rehearsed)"
            raise ValueError(f"the prompt is in the held-out set {flags}, or an earlier answer's prompt is")
        return document

    held_out_questions = {question for d in held_out for question in questions(d)}
    return mapping.map_rows(documents, other, name)


def train_and_held_out(dataset, eval_dataset, load, tokenizer):
    """Load the training and the held-out documents of a data set; no prompt is in both.

    Without eval_dataset, `tiny` uses its own held-out rows, and of other data a share of the prompts is held
    out.

    load: function of (spec, split) that returns documents, comparisons or prompts.
    tokenizer: used to print an example; None: nothing is printed."""
    train = load(dataset, split="train")
    if eval_dataset or mixtures.is_tiny(dataset):
        held_out = load(eval_dataset or dataset, split="test")
    else:
        train, held_out = hold_out(train)
    train = without_prompts_of(train, held_out, dataset)
    if dist.is_main() and tokenizer:
        print(f"{dataset}: {len(train):,} to train on, {len(held_out):,} held out")
    if tokenizer:
        show(train, tokenizer)
    return train, held_out


n_shown = 0  # the number of examples that --preview prints


def show(items, tokenizer):
    """Print the first document, comparison or prompt as the model sees it in training.

    Special tokens are shown, the part to learn is between >>> and <<<, and a long text is shortened. With
    --preview N, N items are printed whole and the program ends."""
    for item in items[: n_shown or 1] if dist.is_main() else ():
        if isinstance(item, Comparison):
            chosen, rejected = item.response_ids[0], item.response_ids[-1]
            texts = {"prompt": item.prompt_ids, "chosen": chosen, "rejected": rejected}
        else:
            texts = {type(item).__name__.lower(): item.ids}
        for name, ids in texts.items():
            mask = getattr(item, "response_mask", torch.zeros(len(ids))).tolist()
            text = ""
            for learnt, places in itertools.groupby(range(len(ids)), key=mask.__getitem__):
                piece = tokenizer.decode([int(ids[i]) for i in places])
                text += f">>>{piece}<<<" if learnt else piece
            if not n_shown and len(text) > 300:
                text = f"{text[:140]} [...] {text[-140:]}"
            print(f"  {name} ({item.row.where}, {len(ids)} tokens): {text}")
    if n_shown:
        raise SystemExit(0)
