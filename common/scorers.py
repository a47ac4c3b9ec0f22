"""What scores a response.

A scorer is a reward model or an advantage model (a run directory, a folder, a hub name) or a function,
`FILE.py:function` or `module:function`, called on each rank with its own rows (docs/scorers.md):
fn(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float], or {part: list[float]}.
`module:function=text` is what function(text) returns: common.ai_feedback:rater=MODEL is a judge. Where
responses are only ranked a function may compare two of them, which its attribute `pairwise` = True says:
fn(duels: list[(prompt messages, a, b)]) -> list of the log odds log P(a beats b) / P(b beats a), as of
common.pairwise:oracle=RUN.
"""

import collections
import contextlib
import copy
import functools
import hashlib
import importlib
import itertools
import json
import os
import re
import runpy
import statistics
import sys
import zlib
from collections.abc import Mapping, Set
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from common import data, dist, generate, loading, models, responses
from common.batches import Comparison, of_each_comparison, random_subset, split
from common.errors import InputError
from common.losses import safety_gated_score


# -- functions -------------------------------------------------------------------------------------
NAMED = r"(?:(?:[A-Za-z]:[\\/])?[^:*]+\.py|[\w.]+):\w+"  # FILE.py:function or module:function
WANTED = "wanted module:function or FILE.py:function"


class Term(NamedTuple):
    function: object
    name: str = ""  # as --scorer has it
    text: str | None = None  # what scores is function(text)


def term_of(spec) -> Term | None:
    """Find the function that --scorer names; None of a model's name."""
    name = spec.strip()
    if match := re.fullmatch(rf"({NAMED})(?:=(.+))?", name):
        return Term(named_function("--scorer", match[1]), name, match[2])
    if re.search(rf"{NAMED}|\.py$", spec) and not Path(spec).is_dir():
        only = ", one function only: let it return {part: numbers}, which are summed"
        raise InputError(f"--scorer {spec}: {WANTED}{only if re.search('[*+]', spec) else ''}")
    return None


def compares(term) -> bool:
    return getattr(term.function, "pairwise", False)


def named_function(flag, spec):
    """What `FILE.py:function` or `module:function` names; modules of the working directory are found too."""
    place, _, name = spec.rpartition(":")
    sys.path.append(os.getcwd())
    try:
        is_file = place.endswith(".py")
        function = (_run(Path(place).resolve()) if is_file else vars(importlib.import_module(place)))[name]
    except Exception as error:  # whatever a user's module raises
        raise InputError(f"{flag} {spec}: {type(error).__name__}: {error}; {WANTED}") from error
    if not callable(function):
        raise InputError(f"{flag} {spec} is {type(function).__name__}, {WANTED}")
    return function


@functools.cache
def _run(file) -> dict:
    """{name: what it names} of a file, whose imports find the files beside it."""
    sys.path.append(str(file.parent))
    return runpy.run_path(str(file))


def try_functions(args):
    """Call the functions of --scorer and --safety-scorer with two answers, one of them empty, to the prompt
    of --dataset's first row: a mistake costs seconds. Not what function(text) gives, it may hold a model."""
    if not (getattr(args, "iterations", 1) or getattr(args, "eval_prompts", 1)):
        return  # DPO of given pairs asks none
    specs = [getattr(args, name, None) or "" for name in ("scorer", "safety_scorer")]
    terms = [term for term in map(term_of, specs) if term and term.text is None]
    prompts, answers = [], [responses.Response([], text, True) for text in ("The answer is 1.", "")]
    for row in data.load_rows(args.dataset, "prompts", getattr(args, "split", "train"))[:1] if terms else ():
        with contextlib.suppress(ValueError):  # it has no prompt
            prompts.append(responses.Prompt([], generate.prompt_turns(row.data), row))
    for term, prompt in itertools.product(terms, prompts):
        _call(term, [(prompt, *answers)] if compares(term) else [(prompt, answer) for answer in answers])


def _call(term, batch) -> list[dict[str, float]]:
    """{part: its number} of each (prompt, response) or, of a function that compares, (prompt, a, b); {"": its
    number} where the function gives a list."""
    questions = [prompt.question for prompt, *_ in batch]
    texts = [response.written or response.text for _, response, *_ in batch]
    # Copies, for what a function changes must not reach the next response, the pool or the data
    rows = [copy.deepcopy({**prompt.row.data, "messages": prompt.turns}) for prompt, *_ in batch]
    arguments, did, n = (questions, texts, rows), "raised", len(batch)
    if compares(term):
        texts_b = [b.written or b.text for _, _, b in batch]
        arguments = ([(row["messages"], a, b) for row, a, b in zip(rows, texts, texts_b)],)
    try:
        given = term.function(*arguments)
        did = f"gave {repr(given)[:80]}, wanted {n} numbers or {{part: {n} numbers}}:"
        by_part = given if isinstance(given, dict) else {"": given}
        by_part = {str(part): _numbers(values) for part, values in by_part.items()}
        lengths = [len(column) for column in by_part.values()]
        if set(lengths) != {n}:
            raise ValueError(f"of lengths {lengths}")
    except Exception as error:  # whatever a user's function raises
        where = f"{batch[0][0].row.where}, columns {data.columns(rows[0])}"
        question = f"{n} responses, the first {texts[0][:80]!r} to {questions[0][:80]!r}"
        why = f"{did} {type(error).__name__}: {error}; asked of {question} ({where})"
        raise InputError(f"--scorer {term.name} {why}") from error
    return [dict(zip(by_part, of_one)) for of_one in zip(*by_part.values())]


def _numbers(values) -> list[float]:
    """Turn what a function returns into numbers: a list, an array, a tensor, anything that has an order."""
    if isinstance(values, str | bytes | bytearray | Set | Mapping):
        raise TypeError(f"wanted a list, not a {type(values).__name__}")
    values = [x.item() if hasattr(x, "item") else x for x in values]  # of tensors and arrays
    if any(isinstance(x, str | bytes) for x in values):  # float("1") would be 1
        raise TypeError("wanted numbers, not text")
    return [float(x) for x in values]


# -- scores ----------------------------------------------------------------------------------------
class Scorer(NamedTuple):
    name: str
    version: str  # a fingerprint of the model's files, or of the function's file
    function: Term | None = None  # or
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
    term, version = term_of(spec), version_of(spec)
    if term:
        try:
            term = term if term.text is None else term._replace(function=term.function(term.text))
        except InputError:
            raise
        except Exception as error:  # whatever a user's function raises
            why = f"{type(error).__name__}: {error}"
            raise InputError(f"--scorer {spec}: {why}; wanted a function of one text") from error
        if compares(term) and not pairwise:
            mend = "it may be --scorer of dpo_iterative.py and common.evaluate"
            raise InputError(f"{spec} compares two responses, and scores none: {mend}")
        return Scorer(spec, version, term, pairwise=compares(term))
    encoder = loading.load_tokenizer(spec, quiet=True)
    model = loading.load_scorer(spec, encoder)
    model = dist.shard(model.requires_grad_(False), device)
    scorer = Scorer(spec, version, None, model, encoder, same_tokens=same_tokens(encoder, tokenizer))
    if scorer.same_tokens:
        loading.check_room(max_length, spec, model.config)
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
    term = term_of(name)
    if not term:
        return {"content": loading.identity(name, seed)}
    place, _, function = re.match(NAMED, term.name)[0].rpartition(":")
    file = place if place.endswith(".py") else vars(importlib.import_module(place)).get("__file__")
    text = term.text
    with contextlib.suppress(InputError, OSError, ValueError):  # it may name a model
        text = text and loading.identity(text)
    # Of what is not written in Python there is no file
    return {"function": [Path(place).name, function, text], "file": file and loading.sha256(file)}


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
        answers = [by_part for batch in batches for by_part in _call(scorer.function, batch)]
        answers = [by_part for _, by_part in sorted(dist.gather(list(zip(my_indices, answers))))]
    else:
        end = loading.end_of_scored(scorer.model, scorer.tokenizer)
        texts = [_encode(scorer, *pair, end) for pair in pairs]
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
    means = [statistics.fmean(by_part[name] for by_part in answers if name in by_part) for name in names]
    return scores, {f"reward/{name}": mean for name, mean in zip(names, means)}


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
    return [statistics.fmean(of_one or [0.5]) for of_one in won]


def _encode(scorer, prompt, response, end) -> Comparison:
    """A prompt with one response, in the scorer's tokens. end: loading.end_of_scored."""
    room, eos = models.n_positions(scorer.model.config), scorer.tokenizer.eos_token_id
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
            data.note(f"{scorer.name} has {room} positions: of longer responses it scores the beginning")
            ids = ids[: max(1, room - len(prompt_ids) - len(end))]
        ids = [*ids, *end]
    n = len(prompt_ids) + len(ids)
    if n > room:
        where = prompt.row.where
        raise InputError(f"{where}: prompt and response have {n} tokens, {scorer.name} has {room} positions")
    ids = ids or [eos]  # to an empty response a template may add nothing
    prompt_ids, ids = torch.tensor(prompt_ids), torch.tensor(ids)
    return Comparison(prompt.turns, [response.text], prompt_ids, [ids], torch.zeros(1), "", prompt.row)


def _in_its_tokens(scorer, prompt, text) -> tuple[list[int], list[int]]:
    """Encode a prompt and a response's text for a scorer with another tokenizer or template. An answer that
    its template rewrites, as some do with thoughts, is taken as the template writes it."""
    tokenizer, plain = scorer.tokenizer, data.special_tokens(scorer.tokenizer).sub
    messages = [{**m, "content": plain("", m["content"])} for m in prompt.turns]
    text = plain("", text)
    try:
        with contextlib.suppress(data.Rewritten):
            prompt_ids, [ids] = data.encode_responses(tokenizer, messages, [text])
            return prompt_ids, ids[:-1]
        why = "its chat template rewrites some answers, which it scores as they stand there"
        data.note(f"{scorer.name}: {why}")
        dialogue = data.render(tokenizer, [*messages, {"role": "assistant", "content": text}])
    except ValueError as error:  # its template refuses a role, for one
        raise InputError(f"{prompt.row.where}: {scorer.name}: {error}") from None
    before, end, after = dialogue.rpartition(tokenizer.eos_token)
    ids = tokenizer(before if end else after, add_special_tokens=False)["input_ids"]
    return ids[:1], ids[1:]  # of both together: nothing depends on where one ends


def check_prompts(scorer, prompts):
    """InputError for a prompt that a scorer with other tokens cannot read: before sampling, not after it."""
    if scorer and scorer.model and not scorer.same_tokens:
        end = loading.end_of_scored(scorer.model, scorer.tokenizer)
        for prompt in prompts:
            _encode(scorer, prompt, responses.Response([], "The answer is 1.", True), end)


class Gated:
    """The scorer of ppo.py: one, or with --safety-scorer Llama 2's pair, in which the safety model's score
    counts for prompts tagged `is_safety` and for responses that it finds unsafe."""

    def __init__(self, scorer, safety, args):
        self.scorer, self.safety, self.args = scorer, safety, args

    def score(self, pairs) -> torch.Tensor:
        """The score of each (prompt, response), (B,), on every rank. `metrics` then holds the means of
        --scorer's parts and `reward/gated`, the share of responses that the gate sent to the safety model."""
        size, threshold = self.args.score_batch_size, self.args.safety_threshold
        scores, part_means = score_and_parts(self.scorer, pairs, size)
        self.metrics = {**part_means, "reward/gated": 0.0}
        if not self.safety:
            return torch.tensor(scores)
        safety = torch.tensor(score(self.safety, pairs, size))
        tagged = torch.tensor([bool(prompt.row.data.get("is_safety")) for prompt, _ in pairs])
        gated = tagged | (safety.sigmoid() < threshold)
        self.metrics["reward/gated"] = gated.float().mean().item()
        return safety_gated_score(safety, torch.tensor(scores), tagged, threshold)


def load_gated(args, tokenizer, device) -> Gated:
    """--scorer and --safety-scorer. tokenizer: the policy's; a scorer with another one needs --retokenize."""
    load = functools.partial(load_scorer, tokenizer=tokenizer, device=device, max_length=args.max_length)
    scorer, safety = load(args.scorer), args.safety_scorer and load(args.safety_scorer, safety=True)
    for loaded in filter(None, (scorer, safety)):
        if not loaded.same_tokens and not args.retokenize:
            why = f"{loaded.name} has other tokens or another chat template than {args.model}"
            raise InputError(f"{why}: --retokenize lets it score the text, encoded anew")
    return Gated(scorer, safety, args)


def load_value_model(gated, tokenizer, prompts, args, device):
    """The value model: the reward model, body and head; of an advantage model row r of its head, with bias
    -mean e(x) over some prompts; for a function, or other tokens, the first policy's body and a head of 0."""
    scorer, checkpointing = gated.scorer, args.gradient_checkpointing
    if scorer.function or not scorer.same_tokens:
        model = loading.load_scorer(args.model, tokenizer, 1, checkpointing, args.seed)
        torch.nn.init.zeros_(model.score.weight)
    else:
        model = loading.load_scorer(args.scorer, tokenizer, scorer.model.config.num_labels, checkpointing)
    if model.config.num_labels == 2:
        head = torch.nn.Linear(model.score.in_features, 1, device=model.score.weight.device)
        with torch.no_grad():
            head.weight.copy_(model.score.weight[:1])
            head.bias.fill_(-mean_expected_reward(scorer, random_subset(prompts, 256), args, device))
        model.score, model.config.num_labels = head, 1
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


def fit_logistic_regression(x, won, n_games, penalty) -> torch.Tensor:
    """Logistic regression: the weights w, (..., features), that make `won` of `n_games` games likeliest if
    P(win) = sigma(x w), less w' penalty w / 2. Newton's method, which wants float64. x: (n, features); won:
    (..., n); penalty: (features, features)."""
    weights = won.new_zeros(*won.shape[:-1], x.shape[1])
    for _ in range(1000):
        p = (weights @ x.T).sigmoid()
        curvature = (x.T * (n_games * p * (1 - p))[..., None, :]) @ x + penalty
        slope = (won - n_games * p) @ x - weights @ penalty
        step = torch.linalg.solve(curvature, slope)
        far = (step @ x.T).abs().amax(-1, keepdim=True) + 1e-12  # the most that it moves a logit
        step = step * far.log1p() / far  # a whole one can overshoot, for ever
        weights = weights + step
        if step.abs().max() < 1e-10:
            break
    return weights


def fit_safety_gate(rows, threshold):
    """(gate, figures): P(safe) = sigmoid(scale * r + bias), fitted by logistic regression to the responses
    labelled safe or unsafe of half the held-out prompts, and what P(safe) < threshold finds in the other
    half. Bradley-Terry fixes no offset, so without this a probability of r means nothing."""
    halves = [], []
    for row in rows:
        half = halves[zlib.crc32(repr(row["prompt"]).encode()) % 2]  # a prompt is in one half
        half.extend((r["score"], float(r["is_safe"])) for r in row["responses"] if "is_safe" in r)
    if not all({is_safe for _, is_safe in half} == {0.0, 1.0} for half in halves):
        return None, {}
    (score, safe), (test_score, test_safe) = (torch.tensor(half).double().T for half in halves)
    x = torch.stack([score - score.mean(), torch.ones_like(score)], 1)  # whatever zero the scores have
    penalty = 2e-4 * len(x) * torch.eye(2).to(x)  # 1e-4 |weights|^2 beside the mean loss
    scale, bias = fit_logistic_regression(x, safe, n_games=1, penalty=penalty).tolist()
    bias -= scale * score.mean().item()
    caught, unsafe = torch.sigmoid(scale * test_score + bias) < threshold, test_safe == 0
    n_caught, n_both = caught.sum().item(), (caught & unsafe).sum().item()
    recall = n_both / unsafe.sum().item()
    figures = {"gate/responses": len(caught), "gate/caught": n_caught, "gate/recall": recall}
    if n_caught:
        figures["gate/precision"] = n_both / n_caught
    return {"scale": scale, "bias": bias}, figures
