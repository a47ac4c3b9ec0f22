"""Sample a policy's responses to prompts, the same on every rank, for rejection sampling, PPO and DPO."""

from typing import NamedTuple

import torch
from tqdm import tqdm

from . import dist
from .batches import Document, Row, printable, split, turns_key
from .errors import Diverged, InputError
from .sampler import sample


class Prompt(NamedTuple):
    """A prompt as token ids, as messages, and with the row of the data set that it comes from."""

    ids: list[int]  # the turns in the chat template, up to where the answer begins
    turns: list[dict]  # messages, of which the last one is from the user; [] if there are only ids
    row: Row

    @property
    def key(self) -> str:
        """Equal for equal prompts, whose responses are compared with each other."""
        return turns_key(self.turns) if self.turns else str(self.ids)

    @property
    def question(self) -> str:
        return self.turns[-1]["content"]

    @property
    def category(self) -> str | None:
        return printable(self.row.data.get("category"))


class Response(NamedTuple):
    """A sampled response as token ids and as text."""

    ids: list[int]  # as sampled, including the end-of-sequence token if there is one
    text: str
    finished: bool  # True: ended by an end-of-sequence token; False: cut at max_new_tokens
    clean: bool = True  # False if there is a special token before the end, which `text` does not show
    logprobs: tuple[float, ...] = ()  # of each id, nats, by the sampler, for PPO; () if unknown
    written: str = ""  # text with special tokens shown, for reward functions; "" without special tokens

    @property
    def usable(self) -> bool:
        """Whether a policy may learn it: it ended, has words, and no special token before the end."""
        return self.finished and self.clean and bool(self.text.strip())


def my_responses(model, tokenizer, prompts: list[list[int]], *, n=1, **options) -> list[Response]:
    """Sample n responses to each prompt on this rank only; those to one prompt are next to each other.

    prompts: token ids. options: keyword arguments of sampler.sample.
    A response ends at the tokenizer's end-of-sequence token, or at one of the generation config's (chat
    models often end turns and texts with different tokens); a single id there counts only if it is an added
    token, because a default of transformers may be any word. Rows of the embeddings beyond the tokenizer's
    last id are never drawn.
    Raises InputError if sampler.sample refuses the model, a prompt or an option, Diverged if its logits are
    NaN."""
    if not prompts:
        return []
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = ends if isinstance(ends, list) else {ends} & tokenizer.added_tokens_decoder.keys()
    size = 1 + max(tokenizer.get_vocab().values())  # not len(tokenizer): ids may have gaps
    options.update(stop_ids={tokenizer.eos_token_id, *ends}, pad_id=tokenizer.pad_token_id, vocab_size=size)
    try:
        samples = sample(model, prompts, n=n, **options)
    except ValueError as error:  # for example a model with a cache of its own kind
        raise InputError(f"{error}: nothing can be sampled") from None
    except FloatingPointError as error:
        raise Diverged(f"{error}: if it was trained just now, lower --lr") from None
    responses = []
    added = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    special = {*tokenizer.all_special_ids, *added}
    drawn = (samples.response_tokens, samples.sample_logprobs, samples.sample_mask.sum(1), samples.finished)
    for tokens, logprobs, length, ended in zip(*(column.tolist() for column in drawn)):
        ids = tokens[:length]
        body = ids[: length - ended]  # without the end token, which some tokenizers do not mark as special
        text = tokenizer.decode(body, skip_special_tokens=True)
        clean = special.isdisjoint(body)
        written = "" if clean else tokenizer.decode(body)
        responses.append(Response(ids, text, ended, clean, tuple(logprobs[:length]), written))
    return responses


def sample_responses(model, tokenizer, prompts, *, n=1, seed=0, **options) -> list[tuple[Prompt, Response]]:
    """Sample n responses to each prompt and return [(prompt, response)], the same list on every rank.

    Every rank must call it. Weights are gathered once and freed afterwards (dist.consolidated). Ranks divide
    the prompts, decode independently of each other, and draw with different seeds. (With tensor parallelism,
    the ranks that share one copy of the model work on the same prompts.)
    seed: of this call. options: further keyword arguments of sampler.sample."""
    copy = dist.rank() // dist.ranks_per_copy
    my_indices = range(len(prompts))[copy :: dist.world_size() // dist.ranks_per_copy]
    options["seed"] = (seed * 1000 + copy) % 2**63  # a user's seed may exceed a generator's limit
    options["progress"] = tqdm(
        total=len(my_indices) * n, desc="sample", unit="row", leave=False, dynamic_ncols=True,
        disable=None if dist.is_main() else True,  # None: show it if stderr is a terminal
    )  # fmt: skip
    with dist.consolidated(model), options["progress"]:
        responses = my_responses(model, tokenizer, [prompts[i].ids for i in my_indices], n=n, **options)
    by_prompt = dict(dist.gather(list(zip(my_indices, split(responses, n)))))  # equal on one copy's ranks
    return [(prompts[i], response) for i in range(len(prompts)) for response in by_prompt[i]]


def answers(policy, tokenizer, prompts, args, seed, **options) -> list[tuple[Prompt, Response]]:
    """Call sample_responses with the flags --max-new-tokens and --slots of a script; slots of None are 16.

    options: n, temperature, top_p and other arguments of sampler.sample, which this function does not take
      from `args`."""
    limits = {"max_new_tokens": args.max_new_tokens, "slots": args.slots or 16}
    return sample_responses(policy, tokenizer, prompts, seed=seed, **limits, **options)


def documents(sampled) -> list[Document]:
    """Make a numbered Document of each (prompt, response), with every response token as an action."""
    made = []
    for number, (prompt, response) in enumerate(sampled):
        ids = torch.tensor(prompt.ids + response.ids, dtype=torch.int32)
        mask = torch.arange(len(ids)) >= len(prompt.ids)
        made.append(Document(ids, mask, prompt.turns, prompt.row, number))
    return made
