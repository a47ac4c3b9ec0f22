"""Score responses with a reward model or an advantage model (a run directory, a folder, a hub name), or with
the user's own function (functions.py). docs/use/scorers.md shows how to write one.
"""

import collections
import contextlib
import hashlib
import importlib
import itertools
import json
import math
import re
import statistics
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from common import dist, models, responses
from common.batches import Comparison, of_each_comparison, split
from common.errors import InputError
from common.data import chat, mixtures, progress
from common.loading import pretrained
from common.scoring import functions


class Scorer(NamedTuple):
    name: str
    version: str  # fingerprint of the model's files, or of the function's file
    function: functions.Term | None = None  # either a function, or a model and its tokenizer
    model: object = None
    tokenizer: object = None
    same_tokens: bool = True  # True: sampled ids are scored as they are; False: their text is encoded again
    gate: tuple[float, float] = (1.0, 0.0)  # logit of P(safe) = scale * score + bias, for a safety model
    pairwise: bool = False  # the function compares two responses


def load_scorer(spec, tokenizer, device, max_length=0, pairwise=False, safety=False) -> Scorer:
    """Load the scorer that `spec` names; see the top of this file. All ranks must call it together.

    tokenizer: the policy's. max_length: maximum number of tokens of prompt and response.
    pairwise: whether a function that compares two responses is allowed.
    safety: whether scores must be logits of P(safe); for a model, fit_safety_gate fits the scale and bias.
    Raises InputError if the scorer does not load, or if a model with the policy's tokens has fewer positions
    than max_length. With other tokens the length is known only once a text is encoded."""
    term = functions.term_of(spec)
    if term:
        try:
            term = term if term.text is None else term._replace(function=term.function(term.text))
        except InputError:
            raise
        except (Exception, SystemExit) as error:  # whatever a user's function raises
            why = f"{type(error).__name__}: {error}"
            raise InputError(f"--scorer {spec}: {why}; expected a function of one text") from error
        if functions.compares(term) and not pairwise:
            mend = "It can be --scorer of dpo_iterative.py and common.programs.evaluate."
            raise InputError(f"{spec} compares two responses and cannot score one. {mend}")
        return Scorer(spec, version_of(spec), term, pairwise=functions.compares(term))
    encoder = pretrained.load_tokenizer(spec, quiet=True)
    model = pretrained.load_scorer(spec, encoder)
    model = dist.shard(model.requires_grad_(False), device)
    same = same_tokens(encoder, tokenizer)
    scorer = Scorer(spec, version_of(spec), None, model, encoder, same_tokens=same)
    if scorer.same_tokens:
        pretrained.check_room(max_length, spec)
    elif dist.is_main():
        print(f"{spec} has different tokens or a different chat template: the text is encoded again")
    gate = getattr(model.config, "safety_gate", None) if safety else None
    if safety and not gate and dist.is_main():
        print(f"{spec} has no fitted P(safe): its score is used as the logit, with an arbitrary zero")
    return scorer._replace(gate=(gate["scale"], gate["bias"])) if gate else scorer


def version_of(spec) -> str:
    """Return a fingerprint of a scorer: the name of its function, if it is one, and a hash of `identity`.
    Rank 0 reads the files for all ranks."""
    version = ""
    if dist.is_main():
        behind = identity(spec)
        function = ":".join(behind.get("function", ())[:2])
        version = f"{function}@{hashlib.sha256(json.dumps(behind).encode()).hexdigest()[:8]}"
    dist.barrier()  # hashing large files may take longer than gather waits
    return dist.gather([version])[0]


def identity(name, seed=0) -> dict:
    """Identify a scorer by content, so that a renamed folder is the same scorer and an edited file is not.

    Returns {"content": that of the model's files}, or {"function": [file or module, function, text], "file":
    hashes of the file with the function and of the .toml beside it}. If the text names a model, the content
    of the model replaces it."""
    term = functions.term_of(name)
    if not term:
        return {"content": pretrained.identity(name, seed)}
    place, _, function = re.match(functions.NAMED, term.name)[0].rpartition(":")
    file = place if place.endswith(".py") else vars(importlib.import_module(place)).get("__file__")
    text = term.text
    with contextlib.suppress(InputError, OSError, ValueError):  # it may name a model
        text = text and pretrained.identity(text)
    # A module that is not written in Python has no file; ai_feedback's questions are in a .toml beside it
    read = [x for x in (file, Path(file).with_suffix(".toml")) if Path(x).is_file()] if file else []
    return {"function": [Path(place).name, function, text], "file": [pretrained.sha256(x) for x in read]}


def same_tokens(a, b) -> bool:
    """Return whether two tokenizers encode every dialogue as the same ids."""
    first, second = ((t.get_vocab(), t.chat_template, t.eos_token_id) for t in (a, b))
    return first == second


def score(scorer, pairs: list[tuple[responses.Prompt, responses.Response]], batch_size) -> list[float]:
    """Score each (prompt, response); all ranks must call it together, and all get all scores.

    An unfinished response is scored as if it had ended where it was cut. The score of a pairwise scorer is
    the mean probability that the response beats the prompt's other responses among the pairs."""
    return score_and_parts(scorer, pairs, batch_size)[0]


@torch.no_grad()
def score_and_parts(scorer, pairs, batch_size) -> tuple[list[float], dict[str, float]]:
    """Return `score` and, if a function returns the parts of its score, {reward/PART: mean of the part}.

    Raises InputError for a score that is NaN or not finite in float32."""
    if scorer.pairwise:
        return _round_robin(scorer, pairs, batch_size), {}
    if scorer.function:
        my_indices = range(len(pairs))[dist.rank() :: dist.world_size()]
        batches = split([pairs[i] for i in my_indices], batch_size)
        answers = [by_part for batch in batches for by_part in functions._call(scorer.function, batch)]
        dist.barrier()  # a function that calls an API may take longer than a collective's timeout
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
            where = f"{response.text[:80]!r}, the response to {prompt.question[:80]!r}"
            raise InputError(f"{scorer.name} returned {x} for {where}")
    names = dict.fromkeys(part for by_part in answers for part in by_part if part)
    mean_of = lambda name: statistics.fmean(by_part[name] for by_part in answers if name in by_part)
    return scores, {f"reward/{name}": mean_of(name) for name in names}


def log_odds(scorer, duels, batch_size) -> list[float]:
    """Return log P(a beats b) / P(b beats a) of each (prompt, a, b) by a pairwise scorer. All ranks must call
    it together."""
    # Without the flag, score_and_parts calls the function on the duels themselves
    return score_and_parts(scorer._replace(pairwise=False), duels, batch_size)[0]


def oracle_scores(oracle, pairs, opponents, size) -> list[float]:
    """Score each (prompt, response). For a pairwise oracle, the score is the probability that the response
    beats the opponent's response to the same prompt, or 1/2 without opponents."""
    opponent_pairs = zip([prompt for prompt, _ in pairs], opponents or ()) if oracle.pairwise else ()
    return score(oracle, [*pairs, *opponent_pairs], size)[: len(pairs)]


def _round_robin(scorer, pairs, batch_size):
    """Let all responses to a prompt play against each other: the mean probability that each one wins, or 1/2
    for a response without a game."""
    groups = collections.defaultdict(list)
    for i, (prompt, _) in enumerate(pairs):
        groups[prompt.key].append(i)
    games = [(i, j) for group in groups.values() for i, j in itertools.combinations(group, 2)]
    duels = [(pairs[i][0], pairs[i][1], pairs[j][1]) for i, j in games]
    odds = torch.tensor(log_odds(scorer, duels, batch_size), dtype=torch.float64)
    won = [[] for _ in pairs]  # for each response: P(it wins) in each of its games
    for (i, j), p in zip(games, odds.sigmoid().tolist()):
        won[i].append(p)
        won[j].append(1 - p)
    return [statistics.fmean(probabilities or [0.5]) for probabilities in won]


def _encode(scorer, prompt, response, end) -> Comparison:
    """Encode a prompt with one response in the scorer's tokens.

    end: token ids that follow a response (pretrained.end_of_scored). A response is shortened if only its end
      does not fit, or if it has become too long in the scorer's own tokens.
    Raises InputError if the sequence is still too long."""
    room = models.n_positions(scorer.model.config)
    eos = scorer.tokenizer.eos_token_id
    from_eos = end[end.index(eos) :] if eos in end else []  # some templates write a space before it
    if scorer.same_tokens:
        prompt_ids = prompt.ids
        ids = response.ids
        if response.finished or ids[-1:] == [eos]:  # Pool stores finished and clean as one
            ids, end = ids[:-1], from_eos or end  # the policy wrote what the template writes before it
        if len(prompt_ids) + len(response.ids) <= room:  # if only the end does not fit, shorten the text
            ids = ids[: room - len(prompt_ids) - len(end)]
    else:
        prompt_ids, ids = _in_its_tokens(scorer, prompt, response.text)
        end = from_eos  # the encoded text already has what the template writes before it
        if len(prompt_ids) + len(ids) + len(end) > room:
            progress.note(f"{scorer.name} has {room} positions: it scores the beginning of longer responses")
            ids = ids[: max(1, room - len(prompt_ids) - len(end))]
    ids = [*ids, *end]
    n = len(prompt_ids) + len(ids)
    if n > room:
        where = prompt.row.where
        raise InputError(f"{where}: prompt and response have {n} tokens, {scorer.name} has {room} positions")
    prompt_ids = torch.tensor(prompt_ids)
    # The score is read at a token, and a template may add nothing to an empty response
    ids = torch.tensor(ids or [eos])
    return Comparison(prompt.turns, [response.text], prompt_ids, [ids], torch.zeros(1), "", prompt.row)


def _in_its_tokens(scorer, prompt, text) -> tuple[list[int], list[int]]:
    """Encode a prompt and a response's text for a scorer with another tokenizer or chat template. If the
    template rewrites the response, as some templates do with thoughts, the rewritten text is scored."""
    tokenizer = scorer.tokenizer
    plain = lambda text: chat.without_special_tokens(tokenizer, text)
    messages = [{**m, "content": plain(m["content"])} for m in prompt.turns]
    text = plain(text)
    try:
        with contextlib.suppress(chat.Rewritten):
            prompt_ids, [ids] = chat.encode_responses(tokenizer, messages, [text])
            return prompt_ids, ids[:-1]
        why = "its chat template rewrites some responses; the rewritten text is scored"
        progress.note(f"{scorer.name}: {why}")
        dialogue = chat.render(tokenizer, [*messages, {"role": "assistant", "content": text}])
    except ValueError as error:  # for example, the template refuses a role
        raise InputError(f"{prompt.row.where}: {scorer.name}: {error}") from None
    before, end, after = dialogue.rpartition(tokenizer.eos_token)
    ids = tokenizer(before if end else after, add_special_tokens=False)["input_ids"]
    return ids[:1], ids[1:]  # the split is arbitrary: only the whole sequence is scored


def check_prompts(scorer, prompts):
    """Raise InputError, before any sampling, for a prompt that a scorer with other tokens cannot encode."""
    if scorer and scorer.model and not scorer.same_tokens:
        end = pretrained.end_of_scored(scorer.model, scorer.tokenizer)
        for prompt in prompts:
            _encode(scorer, prompt, responses.Response([], "The answer is 1.", True), end)


def load_value_model(gated, policy, tokenizer, prompts, args, device, resumed=False):
    """Load the value model of ppo.py, initialised from the scorer.

    Reward model: its body and head. Advantage model: its body and the row of its head that gives r, with bias
    -mean e(x) over some prompts, both times 1 - K / N as the score is (models.scores_of). Unless
    --reward-norm is none, rewards are shifted to mean 0 and, unless it is mean, scaled to deviation 1. So the
    head is shifted and scaled alike, by the scorer's scores of some responses of the policy: a reward model's
    offset and unit are arbitrary, and value clipping would let V leave them only slowly. (The safety gate is
    left out: V starts as the normalised score of helpfulness.) Function, or model with other tokens: the
    first policy's body and a head of zeros.

    resumed: True leaves out what needs forwards, because a checkpoint replaces the weights."""
    scorer = gated.scorer
    checkpointing = args.gradient_checkpointing
    if scorer.function or not scorer.same_tokens:
        model = pretrained.load_scorer(args.model, tokenizer, 1, checkpointing, args.seed)
        torch.nn.init.zeros_(model.score.weight)
        return dist.shard(model, device)
    model = pretrained.load_scorer(args.scorer, tokenizer, scorer.model.config.num_labels, checkpointing)
    head = torch.nn.Linear(model.score.in_features, 1, device=model.score.weight.device)
    scale, shift = 1.0, 0.0
    if model.config.num_labels == 2 and not resumed:
        loss_settings = model.config.advantage_model
        scale = 1 - loss_settings["n_others"] / loss_settings["n_policies"]
        shift = scale * mean_expected_reward(scorer, mixtures.random_subset(prompts, 256), args, device)
    if args.reward_norm != "none" and not resumed:
        mean, unit = offset_and_unit(scorer, policy, tokenizer, prompts, args)
        scale, shift = scale / unit, (shift + mean) / unit
    with torch.no_grad():
        head.weight.copy_(scale * model.score.weight[:1])
        head.bias.fill_(-shift if model.score.bias is None else scale * model.score.bias[0] - shift)
    model.score = head
    model.config.num_labels = 1
    return dist.shard(model, device)


def offset_and_unit(scorer, policy, tokenizer, prompts, args) -> tuple[float, float]:
    """Return the mean and the deviation of a scorer's scores of at least 64 responses of the policy.

    Instead of the deviation it returns 1 with --reward-norm mean, or if all scores are equal."""
    few = mixtures.random_subset(prompts, 64)
    sampled = responses.sample_responses(
        policy, tokenizer, few, n=math.ceil(64 / len(few)), seed=dist.seed_of(args.seed, "value"),
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_p=args.top_p,
        slots=min(16, args.slots or 16),  # without --slots, the number is chosen once all is loaded
    )  # fmt: skip
    scores = torch.tensor(score(scorer, sampled, args.score_batch_size))
    deviation = scores.std(correction=0).item()
    return scores.mean().item(), deviation if args.reward_norm != "mean" and deviation > 1e-4 else 1.0


@torch.no_grad()
def mean_expected_reward(scorer, prompts, args, device):
    """Compute the mean of an advantage model's e(x) over all prompts, shared among the ranks."""
    total = 0.0
    for batch in dist.my_batches([torch.tensor(p.ids) for p in prompts], args.score_batch_size):
        ids = pad_sequence(batch or [torch.zeros(1, dtype=torch.long)], batch_first=True).to(device)
        where = torch.tensor([[i, len(x) - 1] for i, x in enumerate(batch)], dtype=torch.long).view(-1, 2).T
        total += scorer.model.head_outputs(ids, where.to(device))[:, 1].sum().item()
    return sum(dist.gather([total])) / len(prompts)
