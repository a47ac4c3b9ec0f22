"""Training and held-out sets that share no prompt, and a printed example of what is trained on."""

import itertools

import torch

from common import dist
from common.batches import Comparison, Document
from common.data import mapping, mixtures


def hold_out(documents: list[Document], share: float = 0.05, most: int = 500):
    """(training, held-out) documents, comparisons or prompts: by the hash of the first question whose answer
    each teaches, for dialogues that have a later one in common have the first one in common too."""
    firsts = [next(iter(d.questions.items())) for d in documents]
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
    """`documents`, comparisons or prompts without those that teach an answer to a question of `held_out`,
    whose metrics they would flatter."""

    def other(document):
        if not held_out_questions.isdisjoint(document.questions):
            flags = "(--eval-dataset, --hold-out-rehearsed)"
            raise ValueError(f"the prompt is in the held-out set {flags}, or that of an earlier answer is")
        return document

    held_out_questions = {question for d in held_out for question in d.questions}
    return mapping.map_rows(documents, other, name)


def train_and_held_out(dataset, eval_dataset, load, tokenizer):
    """(training, held-out) documents; without eval_dataset tiny's own split or a share of the prompts is held
    out. No prompt is on both sides. load: of (spec, split). tokenizer: to show an example with."""
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


n_shown = 0  # training examples that --preview asks for


def show(items, tokenizer):
    """Print the first document, comparison or prompt as it is trained on: special tokens and all, what is
    learnt between >>> and <<<. With --preview as many as it says, whole, and the program ends."""
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
