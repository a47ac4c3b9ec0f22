"""Prompts, and a policy's responses to them: what rejection sampling, PPO and iterative DPO begin with."""

import collections
import math
from functools import partial
from typing import NamedTuple

import torch

from common import data, dist, formats, loading, metrics, sampler, tensor_parallel
from common.batches import Document, Row, held_out_keys, split, turns_key
from common.errors import InputError
from common.sampler import sample


# -- prompts ---------------------------------------------------------------------------------------
class Prompt(NamedTuple):
    ids: list[int]  # the rendered turns and the opening of an answer
    turns: list[dict]  # messages; the last one is the user's
    row: Row

    @property
    def key(self) -> str:
        return turns_key(self.turns)

    @property
    def questions(self) -> dict[tuple, int]:
        return held_out_keys([self.turns])

    @property
    def question(self) -> str:
        return self.turns[-1]["content"]

    @property
    def category(self) -> str | None:
        return data.printable(self.row.data.get("category"))


def load_prompts(spec, split, tokenizer, max_tokens: int, grade=None) -> list[Prompt]:
    """The different prompts of a data set, each once, of at most max_tokens tokens; all others are counted
    and named. Columns: those of prompt_turns. InputError if none is left.

    grade: of several rows of a prompt the one of which this function gives most; None: the first."""

    def turns_of(row):
        row.data.get("category")  # Prompt.category will read it
        if row.data.get("is_safety") not in (None, False, True):
            raise formats.unreadable("is_safety", row.data["is_safety"], "neither true nor false")
        return prompt_turns(row.data)

    def prompt_of(row, turns, ids):
        if any(data.special_tokens(tokenizer).search(m["content"]) for m in turns):
            raise ValueError(data.SPECIAL)
        prompt = Prompt(ids, turns, row)
        data.check_known(tokenizer, prompt.ids)
        if len(prompt.ids) > max_tokens:
            raise ValueError(f"the prompt is longer than {max_tokens} tokens")
        if prompt.key in keys:
            raise ValueError("the prompt is there already")
        keys.add(prompt.key)
        return prompt

    keys, rows = set(), data.load_rows(spec, "prompts", split)
    if grade:
        rows = sorted(rows, key=lambda row: -grade(row.data))
    asked = data.read(rows, turns_of, spec, "prompts", tokenizer)
    ids = data.by_shares(asked, partial(data.prompt_ids, tokenizer))
    return data.made_of(rows, prompt_of, spec, ids)


def train_and_held_out(args, tokenizer) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts of a script that leave room for a response of --max-new-tokens within --max-length."""
    load = partial(load_prompts, tokenizer=tokenizer, max_tokens=args.max_length - args.max_new_tokens)
    shown_by = None if getattr(args, "offline_data", None) else tokenizer  # then its pairs are shown
    return data.train_and_held_out(args.dataset, args.eval_dataset, load, shown_by)


def fresh_prompts(prompts, n, iteration, seed, start=None) -> list[Prompt]:
    """The n prompts of an iteration (1, 2, ...): the next ones of an order that is drawn anew for each pass
    over the prompts. None comes again before all have come, or twice in an iteration. start: how many the
    iterations before had, where these were not all of n."""
    n, order, tail = min(n, len(prompts)), [], []
    start = (iteration - 1) * n if start is None else start
    for again in range(math.ceil((start + n) / len(prompts))):
        new = dist.shuffled(len(prompts), seed, "prompts", again)
        order += sorted(new, key=lambda i: i in tail)  # those of an iteration that straddles two passes last
        tail = set(order[len(order) - (len(order) - start) % n :])
    return [prompts[i] for i in order[start : start + n]]


def deal_prompts(prompts, args, rows=()) -> dict[int, list[Prompt]]:
    """{iteration: its --prompts-per-iteration fresh prompts, or an equal share}, none in two of them. rows:
    of the pool of a resumed run, whose prompts stay those of their iterations. Where they have no score yet,
    a crash may have cut the sampling: fresh ones join them."""
    by_key, pool = {prompt.key: prompt for prompt in prompts}, collections.defaultdict(dict)
    for row in sorted(rows, key=lambda row: row["chunk"]):
        pool[row["iteration"]][turns_key(row["prompt"])] = row["scorer"]
    used, dealt = set().union(*pool.values()), {}
    order = dist.shuffled(len(prompts), args.seed, "prompts", 0)
    fresh = [prompts[i] for i in reversed(order) if prompts[i].key not in used]  # the next one last
    for i in range(1, args.iterations + 1):
        dealt[i] = [by_key[key] for key in pool[i] if key in by_key]
        if any(pool[i].values()):
            continue
        left = (len(dealt[i]) + len(fresh)) // (args.iterations + 1 - i)
        n = args.prompts_per_iteration or max(1, min(len(prompts) // args.iterations, left))
        while len(dealt[i]) < n:
            if not fresh:
                mend = "lower --iterations or --prompts-per-iteration"
                why = f"{len(prompts)} prompts are too few for iterations of {n} new ones, from iteration {i} on"
                raise InputError(f"{args.dataset}: {why}: {mend}")
            dealt[i].append(fresh.pop())
    return dealt


def prompt_turns(row: dict) -> list[dict]:
    """The messages that a response follows, the column `system` first: those of data.prompt_of, or of
    `chosen` as a whole dialogue, without an assistant's turn at the end. ValueError: why there are none."""
    row = formats.cells(row)
    if data.is_dialogue(dict.get(row, "chosen")):  # looked at, not read
        messages = data.answered(row, row["chosen"])
    else:
        messages = data.prompt_of(row)
    if messages is None:
        raise data.WrongColumns(row, "prompt")
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("no message of the user at the end")
    return data.check_prompt(messages, row)


# -- responses -------------------------------------------------------------------------------------
class Response(NamedTuple):
    ids: list[int]  # as sampled, with the end token if it ended
    text: str
    finished: bool  # False: cut at max_new_tokens; True: an end token of the policy is its last one
    clean: bool = True  # False: a special token stands before its end, which the text does not show
    logprobs: tuple[float, ...] = ()  # of each id, nats, in the distribution it was drawn from; () if unknown
    written: str = ""  # the text with special tokens, if it holds any before its end: for reward functions


def my_responses(model, tokenizer, prompts: list[list[int]], *, n=1, **options) -> list[Response]:
    """n responses to each prompt, those to a prompt in a row, on this rank alone. options: sampler.sample's.
    InputError for a model that cannot be sampled."""
    if not prompts:
        return []
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    stop = sorted({tokenizer.eos_token_id, *(own if isinstance(own, list) else ())})
    try:
        out = sample(model, prompts, n=n, stop_ids=stop, pad_id=tokenizer.pad_token_id, **options)
    except ValueError as error:  # a cache of its own, for one
        raise InputError(f"{error}: this model cannot be sampled") from None
    responses, added = [], tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
    lengths, finished = out.sample_mask.sum(1).tolist(), out.finished.tolist()
    drawn = zip(out.response_tokens.tolist(), out.sample_logprobs.tolist(), lengths, finished)
    for tokens, logprobs, length, ended in drawn:
        ids = tokens[:length]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        clean = special.isdisjoint(ids[:-1])
        body = [i for i in ids[: length - ended] if i != tokenizer.pad_token_id]
        written = "" if special.isdisjoint(body) else tokenizer.decode(body)
        responses.append(Response(ids, text, ended, clean, tuple(logprobs[:length]), written))
    return responses


def sample_pairs(model, tokenizer, prompts, *, n=1, seed=0, **options) -> list[tuple[Prompt, Response]]:
    """[(prompt, response)], the n of a prompt in a row, the same on every rank. Every rank must call it. The
    weights are gathered once and freed afterwards (dist.consolidated): prompts are divided among the copies,
    which decode in their own time and draw differently. seed: of this call. options: sampler.sample's."""
    copy, n_copies = dist.rank() // dist.ranks_per_copy, dist.world_size() // dist.ranks_per_copy
    mine = range(len(prompts))[copy::n_copies]
    options["seed"] = (seed * 1000 + copy) % 2**63  # what a generator takes; the seed of a user may be large
    with dist.consolidated(model), metrics.progress(len(mine) * n, 0, "sample", lines=False) as progress:
        my_prompts = [prompts[i].ids for i in mine]
        responses = my_responses(model, tokenizer, my_prompts, n=n, progress=progress, **options)
    by_prompt = dict(dist.gather(list(zip(mine, split(responses, n)))))  # ranks that share a copy: the same
    return [(prompts[i], response) for i in range(len(prompts)) for response in by_prompt[i]]


def answers(policy, tokenizer, prompts, args, seed, **options) -> list[tuple[Prompt, Response]]:
    """sample_pairs with --max-new-tokens and --slots of a command."""
    limits = {"max_new_tokens": args.max_new_tokens, "slots": args.slots}
    return sample_pairs(policy, tokenizer, prompts, seed=seed, **limits, **options)


def check_sampled(name, mend=""):
    """InputError if the attention of the model of this name is one that the sampler does not know, or if its
    ranks cannot share a copy: better now than hours from now. mend: how to do without samples."""
    config = loading._read_config(name).get_text_config()
    tensor_parallel.check(config, dist.ranks_per_copy)
    try:
        sampler.check_attention(config)
    except ValueError as error:
        raise InputError(f"{name}: {error}: this model cannot be sampled{mend and f'; {mend}'}") from None


def documents(pairs) -> list[Document]:
    """The documents of some (prompt, response), numbered; every token of a response is an action."""
    made = []
    for number, (prompt, response) in enumerate(pairs):
        ids = torch.tensor(prompt.ids + response.ids, dtype=torch.int32)
        mask = torch.arange(len(ids)) >= len(prompt.ids)
        made.append(Document(ids, mask, prompt.turns, prompt.row, number))
    return made


def check_policy(name, tokenizer, args, sampled=True):
    """InputError unless a policy has the tokenizer's tokens (None: any), room for --max-length and, if
    sampled, can be."""
    loading.check_causal_lm(name, tokenizer, args.chat_template)
    loading.check_room(args.max_length, name)
    if sampled:
        check_sampled(name)
