"""A policy's responses to prompts, the same on every rank: what rejection sampling, PPO and iterative DPO
learn from."""

from typing import NamedTuple

import torch
from tqdm import tqdm

from common import dist
from common.batches import Document, Row, held_out_keys, printable, split, turns_key
from common.errors import InputError
from common.sampler import sample


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
        return printable(self.row.data.get("category"))


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
    end_ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    stop = sorted({tokenizer.eos_token_id, *(end_ids if isinstance(end_ids, list) else ())})
    try:
        rollout = sample(model, prompts, n=n, stop_ids=stop, pad_id=tokenizer.pad_token_id, **options)
    except ValueError as error:  # a cache of its own, for one
        raise InputError(f"{error}: this model cannot be sampled") from None
    responses = []
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
    lengths = rollout.sample_mask.sum(1).tolist()
    finished = rollout.finished.tolist()
    drawn = zip(rollout.response_tokens.tolist(), rollout.sample_logprobs.tolist(), lengths, finished)
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
    copy = dist.rank() // dist.ranks_per_copy
    n_copies = dist.world_size() // dist.ranks_per_copy
    my_indices = range(len(prompts))[copy::n_copies]
    options["seed"] = (seed * 1000 + copy) % 2**63  # what a generator takes; the seed of a user may be large
    options["progress"] = tqdm(
        total=len(my_indices) * n, desc="sample", unit="row", leave=False, dynamic_ncols=True,
        disable=None if dist.is_main() else True,  # None: shown where stderr is a terminal
    )  # fmt: skip
    with dist.consolidated(model), options["progress"]:
        my_prompts = [prompts[i].ids for i in my_indices]
        responses = my_responses(model, tokenizer, my_prompts, n=n, **options)
    by_prompt = dict(dist.gather(list(zip(my_indices, split(responses, n)))))  # equal on ranks of one copy
    return [(prompts[i], response) for i in range(len(prompts)) for response in by_prompt[i]]


def answers(policy, tokenizer, prompts, args, seed, **options) -> list[tuple[Prompt, Response]]:
    """sample_pairs with --max-new-tokens and --slots of a command."""
    limits = {"max_new_tokens": args.max_new_tokens, "slots": args.slots}
    return sample_pairs(policy, tokenizer, prompts, seed=seed, **limits, **options)


def documents(pairs) -> list[Document]:
    """The documents of some (prompt, response), numbered; every token of a response is an action."""
    made = []
    for number, (prompt, response) in enumerate(pairs):
        ids = torch.tensor(prompt.ids + response.ids, dtype=torch.int32)
        mask = torch.arange(len(ids)) >= len(prompt.ids)
        made.append(Document(ids, mask, prompt.turns, prompt.row, number))
    return made
