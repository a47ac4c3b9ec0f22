"""The prompts of rejection sampling, PPO and iterative DPO: load, hold out, and deal to iterations."""

import math
from functools import partial

from common import dist
from common.responses import Prompt
from common.data import chat, formats, mapping, message_columns, mixtures, splits


def load_prompts(spec, split, tokenizer, max_tokens: int, reads=()) -> list[Prompt]:
    """Load the different prompts of a data set, each once, of at most max_tokens tokens.

    Dropped rows are counted and named. message_columns.prompt_turns says which columns are read. Raises
    InputError if no prompt is left.

    reads: further columns that the caller reads, so that they are not reported as unread."""

    def turns_of(row):
        for name in ("category", *reads):  # Prompt.category reads it later
            row.data.get(name)
        if row.data.get("is_safety") not in (None, False, True):
            raise formats.unreadable("is_safety", row.data["is_safety"], "neither true nor false")
        return message_columns.prompt_turns(row.data)

    def prompt_of(row, given):
        turns, ids = given
        if any(chat.special_tokens(tokenizer).search(m["content"]) for m in turns):
            raise ValueError(chat.SPECIAL)
        prompt = Prompt(ids, turns, row)
        chat.check_known(tokenizer, prompt.ids)
        if len(prompt.ids) > max_tokens:
            raise ValueError(f"the prompt is longer than {max_tokens} tokens")
        if prompt.key in keys:
            raise ValueError("an earlier row has the same prompt")
        keys.add(prompt.key)
        return prompt

    keys = set()
    rows = mixtures.load_rows(spec, "prompts", split)
    turns_of_rows = mapping.read(rows, turns_of, spec, "prompts, only given to scoring functions", tokenizer)
    ids = mapping.map_over_ranks(turns_of_rows, partial(chat.prompt_ids, tokenizer))
    return mapping.map_rows(rows, prompt_of, spec, ids)


def train_and_held_out(args, tokenizer) -> tuple[list[Prompt], list[Prompt]]:
    """Load a script's (training, held-out) prompts that leave room for --max-new-tokens in --max-length."""
    room = args.max_length - args.max_new_tokens
    load = partial(load_prompts, tokenizer=tokenizer, max_tokens=room)
    # With --offline-data, a pair is shown as the example instead of a prompt
    shown_by = None if getattr(args, "offline_data", None) else tokenizer
    return splits.train_and_held_out(args.dataset, args.eval_dataset, load, shown_by)


def fresh_prompts(prompts, n, iteration, seed) -> list[Prompt]:
    """Return the n prompts of an iteration (1, 2, ...), or all prompts if there are fewer than n.

    They are the next ones in a shuffled order, which is drawn anew for each pass over the prompts. No prompt
    is repeated before all have been used, or within an iteration."""
    n = min(n, len(prompts))
    order = []
    tail = []
    start = (iteration - 1) * n
    for again in range(math.ceil((start + n) / len(prompts))):
        new = dist.shuffled(len(prompts), seed, "prompts", again)
        order += sorted(new, key=lambda i: i in tail)  # last: those that the iteration has already
        tail = set(order[len(order) - (len(order) - start) % n :])
    return [prompts[i] for i in order[start : start + n]]


def least_used(prompts, n, uses, seed) -> list[Prompt]:
    """Return the n prompts that were used least, in a shuffled order; all prompts if there are fewer than n.

    uses: Counter {key of a prompt: number of iterations that used it}."""
    order = dist.shuffled(len(prompts), seed, "prompts", min(uses[prompt.key] for prompt in prompts))
    return [prompts[i] for i in sorted(order, key=lambda i: uses[prompts[i].key])[:n]]
