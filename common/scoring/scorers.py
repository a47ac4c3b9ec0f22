"""What scores a response: a reward model or an advantage model (a run directory, a folder, a hub name), or a
function of the user (functions.py). docs/use/scorers.md tells how to write one.
"""

import collections
import contextlib
import hashlib
import importlib
import itertools
import json
import re
import statistics
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from common import dist, models, responses
from common.batches import Comparison, of_each_comparison, random_subset, split
from common.errors import InputError
from common.data import chat, progress
from common.loading import pretrained
from common.scoring import functions


class Scorer(NamedTuple):
    name: str
    version: str  # a fingerprint of the model's files, or of the function's file
    function: functions.Term | None = None  # or
    model: object = None  # with its
    tokenizer: object = None
    same_tokens: bool = True  # as the policy's: ids are scored as they were sampled, else the text is
    gate: tuple[float, float] = (1.0, 0.0)  # scale and bias that make a safety model's r the logit of P(safe)
    pairwise: bool = False  # its function compares two responses


def load_scorer(spec, tokenizer, device, max_length=0, pairwise=False, safety=False) -> Scorer:
    """spec: see the module. tokenizer: the policy's. pairwise: whether one that compares will do. safety: its
    score is to be the logit of P(safe), which it is of a model only after a fit (fit_safety_gate).
    max_length: tokens of a prompt with its response; InputError for a model that has fewer positions (one
    that reads text can tell only when it encodes it). Every rank must call it."""
    term = functions.term_of(spec)
    version = version_of(spec)
    if term:
        try:
            term = term if term.text is None else term._replace(function=term.function(term.text))
        except InputError:
            raise
        except Exception as error:  # whatever a user's function raises
            why = f"{type(error).__name__}: {error}"
            raise InputError(f"--scorer {spec}: {why}; wanted a function of one text") from error
        if functions.compares(term) and not pairwise:
            mend = "it may be --scorer of dpo_iterative.py and common.programs.evaluate"
            raise InputError(f"{spec} compares two responses, and scores none: {mend}")
        return Scorer(spec, version, term, pairwise=functions.compares(term))
    encoder = pretrained.load_tokenizer(spec, quiet=True)
    model = pretrained.load_scorer(spec, encoder)
    model = dist.shard(model.requires_grad_(False), device)
    scorer = Scorer(spec, version, None, model, encoder, same_tokens=same_tokens(encoder, tokenizer))
    if scorer.same_tokens:
        pretrained.check_room(max_length, spec, model.config)
    elif dist.is_main():
        print(f"{spec} has other tokens or another chat template: it scores the text")
    gate = getattr(model.config, "safety_gate", None) if safety else None
    if safety and not gate and dist.is_main():
        print(f"{spec} has no fitted P(safe): its score is taken for the logit, whose zero means nothing")
    return scorer._replace(gate=(gate["scale"], gate["bias"])) if gate else scorer


def version_of(spec) -> str:
    """A fingerprint of what is behind a name, behind a function's name. Rank 0 reads for all."""
    version = ""
    if dist.is_main():
        behind = identity(spec)
        function = ":".join(behind.get("function", ())[:2])
        version = f"{function}@{hashlib.sha256(json.dumps(behind).encode()).hexdigest()[:8]}"
    dist.barrier()  # files may be large
    return dist.gather([version])[0]


def identity(name, seed=0) -> dict:
    """Tell what a name stands for: {"content": of a model's files}, or {"function": [file or module, name,
    text, or of a text that names a model its content], "file": the content of the file that holds it}."""
    term = functions.term_of(name)
    if not term:
        return {"content": pretrained.identity(name, seed)}
    place, _, function = re.match(functions.NAMED, term.name)[0].rpartition(":")
    file = place if place.endswith(".py") else vars(importlib.import_module(place)).get("__file__")
    text = term.text
    with contextlib.suppress(InputError, OSError, ValueError):  # it may name a model
        text = text and pretrained.identity(text)
    # Of what is not written in Python there is no file
    return {"function": [Path(place).name, function, text], "file": file and pretrained.sha256(file)}


def same_tokens(a, b) -> bool:
    """True if two tokenizers write every dialogue with the same ids."""
    first, second = ((t.get_vocab(), t.chat_template, t.eos_token_id) for t in (a, b))
    return first == second


def score(scorer, pairs: list[tuple[responses.Prompt, responses.Response]], batch_size) -> list[float]:
    """The score of each (prompt, response), on every rank; every rank must call it. A response that did not
    end is scored as if it had ended where it was cut. One that compares gives the mean probability that a
    response beats the prompt's other responses among the pairs."""
    return score_and_parts(scorer, pairs, batch_size)[0]


@torch.no_grad()
def score_and_parts(scorer, pairs, batch_size) -> tuple[list[float], dict[str, float]]:
    """`score`, and {reward/PART: its mean} of a function that gives the parts of a score."""
    if scorer.pairwise:
        return _round_robin(scorer, pairs, batch_size), {}
    if scorer.function:
        my_indices = range(len(pairs))[dist.rank() :: dist.world_size()]
        batches = split([pairs[i] for i in my_indices], batch_size)
        answers = [by_part for batch in batches for by_part in functions._call(scorer.function, batch)]
        dist.barrier()  # a function may ask an API, which may take longer than a collective may last
        answers = [by_part for _, by_part in sorted(dist.gather(list(zip(my_indices, answers))))]
    else:
        end = pretrained.end_of_scored(scorer.model, scorer.tokenizer)
        texts = [_encode(scorer, prompt, response, end) for prompt, response in pairs]
        forward = lambda model, batch: models.scores_of(model, batch).tolist()
        scores = of_each_comparison(forward, scorer.model, texts, batch_size, share_prompt=False)
        answers = [{"": x} for x in scores]
    scale, bias = scorer.gate
    scores = [scale * sum(by_part.values()) + bias for by_part in answers]
    for (prompt, response, *_), x in zip(pairs, scores):
        if not abs(x) < 3e38:  # NaN, or infinite in float32
            where = f"{response.text[:80]!r}, to {prompt.question[:80]!r}"
            raise InputError(f"{scorer.name} gives {x} for {where}")
    names = dict.fromkeys(part for by_part in answers for part in by_part if part)
    mean_of = lambda name: statistics.fmean(by_part[name] for by_part in answers if name in by_part)
    return scores, {f"reward/{name}": mean_of(name) for name in names}


def log_odds(scorer, duels, batch_size) -> list[float]:
    """log P(a beats b) / P(b beats a) of each (prompt, a, b), by one that compares. All ranks call it."""
    return score_and_parts(scorer._replace(pairwise=False), duels, batch_size)[0]


def oracle_scores(oracle, pairs, opponents, size) -> list[float]:
    """The oracle's score of each (prompt, response); of one that compares the probability that it beats the
    opponents' response to the same prompt, 1/2 where there are none."""
    opponent_pairs = zip([prompt for prompt, _ in pairs], opponents or ()) if oracle.pairwise else ()
    return score(oracle, [*pairs, *opponent_pairs], size)[: len(pairs)]


def _round_robin(scorer, pairs, batch_size):
    groups = collections.defaultdict(list)
    for i, (prompt, _) in enumerate(pairs):
        groups[prompt.key].append(i)
    games = [(i, j) for group in groups.values() for i, j in itertools.combinations(group, 2)]
    duels = [(pairs[i][0], pairs[i][1], pairs[j][1]) for i, j in games]
    odds = torch.tensor(log_odds(scorer, duels, batch_size), dtype=torch.float64)
    won = [[] for _ in pairs]  # P(it wins) of each game that a response plays
    for (i, j), p in zip(games, odds.sigmoid().tolist()):
        won[i].append(p)
        won[j].append(1 - p)
    return [statistics.fmean(probabilities or [0.5]) for probabilities in won]


def _encode(scorer, prompt, response, end) -> Comparison:
    """A prompt with one response, in the scorer's tokens. end: loading.end_of_scored."""
    room = models.n_positions(scorer.model.config)
    eos = scorer.tokenizer.eos_token_id
    if scorer.same_tokens:
        prompt_ids = prompt.ids
        ended = response.finished or response.ids[-1:] == [eos]  # a row of a pool says no more of it
        ids = response.ids[:-1] if ended else response.ids
        if len(prompt_ids) + len(response.ids) <= room:  # where the end does not fit, the text gives way
            ids = ids[: room - len(prompt_ids) - len(end)]
        ids = [*ids, *end]
    else:
        prompt_ids, ids = _in_its_tokens(scorer, prompt, response.text)
        end = end if eos in end else []  # else the text has all of the template
        if len(prompt_ids) + len(ids) + len(end) > room:
            progress.note(f"{scorer.name} has {room} positions: of longer responses it scores the beginning")
            ids = ids[: max(1, room - len(prompt_ids) - len(end))]
        ids = [*ids, *end]
    n = len(prompt_ids) + len(ids)
    if n > room:
        where = prompt.row.where
        raise InputError(f"{where}: prompt and response have {n} tokens, {scorer.name} has {room} positions")
    ids = ids or [eos]  # to an empty response a template may add nothing
    prompt_ids = torch.tensor(prompt_ids)
    ids = torch.tensor(ids)
    return Comparison(prompt.turns, [response.text], prompt_ids, [ids], torch.zeros(1), "", prompt.row)


def _in_its_tokens(scorer, prompt, text) -> tuple[list[int], list[int]]:
    """Encode a prompt and a response's text for a scorer with another tokenizer or template. An answer that
    its template rewrites, as some do with thoughts, is taken as the template writes it."""
    tokenizer = scorer.tokenizer
    plain = chat.special_tokens(scorer.tokenizer).sub
    messages = [{**m, "content": plain("", m["content"])} for m in prompt.turns]
    text = plain("", text)
    try:
        with contextlib.suppress(chat.Rewritten):
            prompt_ids, [ids] = chat.encode_responses(tokenizer, messages, [text])
            return prompt_ids, ids[:-1]
        why = "its chat template rewrites some answers, which it scores as they stand there"
        progress.note(f"{scorer.name}: {why}")
        dialogue = chat.render(tokenizer, [*messages, {"role": "assistant", "content": text}])
    except ValueError as error:  # its template refuses a role, for one
        raise InputError(f"{prompt.row.where}: {scorer.name}: {error}") from None
    before, end, after = dialogue.rpartition(tokenizer.eos_token)
    ids = tokenizer(before if end else after, add_special_tokens=False)["input_ids"]
    return ids[:1], ids[1:]  # of both together: nothing depends on where one ends


def check_prompts(scorer, prompts):
    """InputError for a prompt that a scorer with other tokens cannot read: before sampling, not after it."""
    if scorer and scorer.model and not scorer.same_tokens:
        end = pretrained.end_of_scored(scorer.model, scorer.tokenizer)
        for prompt in prompts:
            _encode(scorer, prompt, responses.Response([], "The answer is 1.", True), end)


def load_value_model(gated, tokenizer, prompts, args, device):
    """The value model: the reward model, body and head; of an advantage model row r of its head, with bias
    -mean e(x) over some prompts; for a function, or other tokens, the first policy's body and a head of 0."""
    scorer = gated.scorer
    checkpointing = args.gradient_checkpointing
    if scorer.function or not scorer.same_tokens:
        model = pretrained.load_scorer(args.model, tokenizer, 1, checkpointing, args.seed)
        torch.nn.init.zeros_(model.score.weight)
    else:
        model = pretrained.load_scorer(args.scorer, tokenizer, scorer.model.config.num_labels, checkpointing)
    if model.config.num_labels == 2:
        head = torch.nn.Linear(model.score.in_features, 1, device=model.score.weight.device)
        with torch.no_grad():
            head.weight.copy_(model.score.weight[:1])
            head.bias.fill_(-mean_expected_reward(scorer, random_subset(prompts, 256), args, device))
        model.score = head
        model.config.num_labels = 1
    return dist.shard(model, device)


@torch.no_grad()
def mean_expected_reward(scorer, prompts, args, device):
    """Mean of an advantage model's e(x), over all ranks."""
    total = 0.0
    for batch in dist.my_batches([torch.tensor(p.ids) for p in prompts], args.score_batch_size):
        ids = pad_sequence(batch or [torch.zeros(1, dtype=torch.long)], batch_first=True).to(device)
        where = torch.tensor([[i, len(x) - 1] for i, x in enumerate(batch)], dtype=torch.long).view(-1, 2).T
        total += scorer.model.head_outputs(ids, where.to(device))[:, 1].sum().item()
    return sum(dist.gather([total])) / len(prompts)
