"""AI feedback: make training data with a language model, the labeler, instead of human annotators.

The first word of the command is the task:

    sample       different responses to each prompt, from one or more policies: rows for `label`
    label        soft labels for pairs of responses, for reward.py (distilled RLAIF)
    revise       responses, criticised by a principle and revised R times, for sft.py (Constitutional AI)
    select       complex and diverse rows, chosen by their tags; uses no labeler
    hindsight    responses under an instruction that they fulfil, for sft.py; uses no labeler

("RLAIF: Scaling Reinforcement Learning from Human Feedback with AI Feedback", arXiv:2309.00267;
"Constitutional AI: Harmlessness from AI Feedback", arXiv:2212.08073.)

    p(first is better) = P("1") / (P("1") + P("2"))        mean over both orders, to cancel position bias
    rating             = sum_s s P(s) / sum_s P(s),  s = 1..10       used by the scorer `rater` (direct RLAIF)

P is the probability that the labeler gives to a text directly after the opening of its answer. With
--chain-of-thought it writes a rationale first, and the answer is read after the rationale. All prompts for
the labeler are in ai_feedback.toml.

    python -m common.programs.ai_feedback label --model org/name --dataset pairs.jsonl \\
        --output-dir runs/labels
    python reward.py --model org/other --dataset runs/labels/rows.jsonl
    python ppo.py --model org/other --dataset prompts.jsonl \\
        --scorer common.programs.ai_feedback:rater=org/name
    torchrun --nproc-per-node 8 -m common.programs.ai_feedback revise --model org/name \\
        --constitution principles.txt

Each rank holds a full copy of the labeler and works on its share of the rows. A labeler can also be
`module:function`: the function takes no arguments and returns an object with the methods `probabilities` and
`generate` of LanguageModel.
"""

import collections
import contextlib
import copy
import itertools
import json
import math
import os
import random
import re
import statistics
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from common import dist, models
from common.batches import split, turns_key
from common.errors import InputError
from common.responses import my_responses
from common.data import chat, comparisons, files, formats, mapping, message_columns, mixtures, progress
from common.loading import checks, pretrained
from common.scoring import functions, measures, next_token
from common.run.cli import check_flags
from common.run.run import Run, launch, start_run

# -- the prompts -----------------------------------------------------------------------------------
TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def load_principles(args) -> list[str]:
    """Read the principles, one per line, from --constitution or, without that flag, from TEXTS.

    Raises InputError if the file cannot be read or has no principle."""
    text = files.read_text("--constitution", args.constitution) if args.constitution else TEXTS["principles"]
    principles = [line.strip() for line in text.splitlines() if line.strip()]
    if not principles:
        raise InputError(f"--constitution {args.constitution}: no principle found. Write one per line.")
    return principles


def draw(principles, seed, *place) -> str:
    """Draw one principle at random; the choice depends only on the seed and on `place`, not on the rank."""
    return random.Random(f"principle {(seed, *place)}").choice(principles)


def fill(template, values) -> str:
    """Replace every {name} in the template by its value. Braces inside a value are left as they are."""
    return re.sub(r"\{(\w+)\}", lambda m: values.get(m[1], m[0]), template)


# A labeler gives no answer to a question that it cannot be asked
UNASKED = ", or the prompt is too long for the model, or its chat template refuses it"


class Question(NamedTuple):
    template: str  # the user's turn, with a placeholder {name} for each value
    values: dict[str, str]
    opening: str = ""  # text that the answer is made to begin with
    before: list = []  # messages before the user's turn


# -- the labeler -----------------------------------------------------------------------------------
class LanguageModel:
    """A causal LM as labeler, with a full copy on this rank. A question that is too long for the model, or
    that its chat template refuses, gets no answer."""

    def __init__(self, name, device, args):
        self.name = name
        self.device = device
        self.batch_size = args.batch_size
        self.tokenizer = pretrained.load_tokenizer(name, args.chat_template)
        self.model = pretrained.load_unsharded(name, device)
        self.room = models.n_positions(self.model.config)

    def encode(self, question, reserve) -> list[int]:
        """Return the token ids of the question followed by the opening of the answer. The list is empty if
        there is no room for `reserve` more tokens, or if the chat template refuses the messages."""
        # Texts of users must not inject special tokens, such as the end of a turn
        plain = lambda text: chat.without_special_tokens(self.tokenizer, text)
        ids = []
        values = {name: plain(text) for name, text in question.values.items()}
        turns = [{**turn, "content": plain(turn["content"])} for turn in question.before]
        turns.append({"role": "user", "content": fill(question.template, values)})
        with contextlib.suppress(ValueError):  # the chat template refuses it
            ids = chat.prompt_ids(self.tokenizer, turns) + self._ids(plain(question.opening))
        return ids if len(ids) + reserve <= self.room else []

    def _ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def probabilities(self, questions, options) -> torch.Tensor:
        """Compute the probability that the answer to a question continues with an option.

        Returns a float64 tensor, (questions, options); a question without an answer has zeros. If an option
        is the beginning of another one ("1" and "10"), its probability is that of ending there."""
        p = torch.zeros(len(questions), len(options), dtype=torch.float64)
        rows = [(i, *self._with_options(question, options)) for i, question in enumerate(questions)]
        rows = sorted((row for row in rows if row[1]), key=lambda row: -len(row[1]))
        # The instructions and examples that all questions begin with run through the model only once
        shared = os.path.commonprefix([ids[:-depth] for _, ids, depth, _ in rows])
        if checks.recurrent(self.model):  # it has no key-value cache to continue from
            shared = []
        for batch in split(rows, self.batch_size):
            tensors = [torch.tensor(ids[len(shared) :]) for _, ids, _, _ in batch]
            depths = [depth for _, _, depth, _ in batch]
            where = [(r, len(tensors[r]) - n + k) for r, n in enumerate(depths) for k in range(n)]
            where = torch.tensor(where).T.to(self.device)
            input_ids = torch.nn.utils.rnn.pad_sequence(tensors, True).to(self.device)
            # On the CPU, so that Python waits for the device once, not once per option
            logprobs = next_token.logprobs(self.model, input_ids, where, shared).cpu().double()
            for (i, _, _, paths), row_logprobs in zip(batch, logprobs.split(depths)):
                total = lambda path: sum(row_logprobs[k, x].item() for k, x in enumerate(path))
                reached = [math.exp(total(path)) for path in paths]
                for k, path in enumerate(paths):
                    longer = [j for j, x in enumerate(paths) if x != path and x[: len(path)] == path]
                    p[i, k] = reached[k] - sum(reached[j] for j in longer)
        return p.clamp(min=0)

    def _with_options(self, question, options):
        """Return (ids, depth, paths) of a question whose answer is one of the options.

        ids: the question followed by the longest option without its last token; empty if it does not fit.
        depth: number of positions at the end of ids whose next token depends on the option.
        paths: for each option, its token ids at these positions.
        Raises InputError if the tokenizer does not give every option known tokens of its own."""
        # Tokenize each option together with the opening and a space: the space may merge with the option
        plain = chat.without_special_tokens(self.tokenizer, question.opening)
        ends = [self._ids(f"{plain} {x}") for x in options]
        same = len(os.path.commonprefix(ends))
        paths = [tuple(end[same:]) for end in ends]
        longest = max(paths, key=len)
        apart = len(set(paths)) == len(paths) and self.tokenizer.unk_token_id not in sum(paths, ())
        if not apart or not all(path and path[:-1] == longest[: len(path) - 1] for path in paths):
            raise InputError(f"{self.name}: the tokenizer has no distinct tokens for {', '.join(options)}")
        ids = self.encode(question._replace(opening=f"{question.opening} {options[0]}"), reserve=4)
        return ids and [*ids[: len(ids) - len(paths[0])], *longest[:-1]], len(longest), paths

    def generate(self, questions, max_new_tokens, temperature, seed) -> list[tuple[str, bool]]:
        """Sample one answer to each question. Returns a list of (text, whether it ended, without a special
        token inside), with the text after the opening; ("", False) for a question that cannot be asked.

        Raises InputError if max_new_tokens leaves no room for a question."""
        if max_new_tokens >= self.room:
            raise InputError(f"--max-new-tokens {max_new_tokens}: {self.name} has only {self.room} positions")
        prompts = [self.encode(question, max_new_tokens) for question in questions]
        responses = my_responses(
            self.model, self.tokenizer, [ids for ids in prompts if ids], max_new_tokens=max_new_tokens,
            temperature=temperature, slots=self.batch_size, seed=seed,
        )  # fmt: skip
        answers = ((response.text.strip(), response.finished and response.clean) for response in responses)
        return [next(answers) if ids else ("", False) for ids in prompts]


def load_labeler(spec, device, args, flag="--model"):
    """Load a labeler: a LanguageModel, or the object that the user's `module:function` returns.

    Raises InputError, which names `flag`, if the function fails or its object lacks a method."""
    if not re.fullmatch(functions.NAMED, spec):
        if args.task in ("sample", "revise") or args.chain_of_thought:
            pretrained.check_sampled(spec)
        return LanguageModel(spec, device, args)
    try:
        labeler = functions.named_function(flag, spec)()
    except Exception as error:  # whatever a user's function raises
        why = f"{type(error).__name__}: {error}"
        raise InputError(f"{flag} {spec}: {why}; expected a function without arguments") from error
    if not (hasattr(labeler, "probabilities") and hasattr(labeler, "generate")):
        raise InputError(f"{flag} {spec}: the result lacks `probabilities` or `generate`")
    return labeler


def all_of(answers, questions):
    """Return a labeler's answers. Raises InputError unless there is one for each question."""
    if len(answers) != len(questions):
        raise InputError(f"--model: the labeler answered {len(answers)} of {len(questions)} questions")
    return answers


# -- the tasks: each takes the rows of this rank and yields a result per row, or {"failed": reason} ----
def sample(rows, policies, principles, args):
    """Sample --responses answers to each row from each of `policies`, {name: labeler}.

    Yields {"responses": [{"text", "model"}], "ai": {"dropped": count}} per row: each policy's first response,
    then each one's second, and so on, so that `label`, which compares the first two, compares two policies.
    Responses that are unfinished, empty or duplicates are dropped. A row fails if fewer than two are left."""
    for group in split(rows, args.batch_size):  # groups, and so seeds, do not depend on the number of ranks
        questions = [asked(row) for row in group for _ in range(args.responses)]
        answers = {}
        for place, (name, policy) in enumerate(policies.items()):
            seed = dist.seed_of(args.seed, "sample", place, *(row.number for row in group))
            texts = policy.generate(questions, args.max_new_tokens, args.temperature, seed)
            answers[name] = all_of(texts, questions)
        for span in split(range(len(questions)), args.responses):
            model_of_text = {}
            for i, name in itertools.product(span, policies):
                text, ended = answers[name][i]
                if text and ended:
                    model_of_text.setdefault(text, name)
            responses = [{"text": text, "model": name} for text, name in model_of_text.items()]
            dropped = args.responses * len(policies) - len(responses)
            why = {"failed": f"fewer than two different responses{UNASKED}"} if len(responses) < 2 else {}
            yield {"responses": responses, "ai": {"dropped": dropped}, **why}


def preamble_and_examples(args):
    """Return the text before the pair in a prompt of `label`: instructions and solved examples."""
    paragraphs = [TEXTS["by_principle" if args.constitution else args.preamble]]
    for example in TEXTS["examples"][: args.examples]:
        thoughts = f"{TEXTS['thoughts']} {example['thoughts']}\n" if args.chain_of_thought else ""
        answer = f"{thoughts}{TEXTS['ending']} {example['better']}"
        paragraphs.append(f"{fill(TEXTS['pair'], example)}\n\n{TEXTS['question']}\n{answer}")
    return "".join(f"{part}\n\n" for part in paragraphs)


def label(rows, labeler, principles, args):
    """Ask the labeler which of two responses is better, in both orders. Yields per pair:

    chosen, rejected: the two texts, in the order of the row.
    preference: probability that `chosen` is better, mean over both orders. With several chains of thought,
        the mean over those that gave an answer (self-consistency).
    human: the same probability by the row's own label; None without a label.
    ai: {"orders": the probability for each order, "mass": the smaller P("1") + P("2") of both orders}.

    A pair fails if no chain gave an answer in one of the orders."""
    template = f"{preamble_and_examples(args)}{TEXTS['pair']}\n\n{TEXTS['question']}"
    questions = []
    rationales = []
    chains = []
    for row in rows:
        principle = draw(principles, args.seed, row.number)
        values = {"prompt": message_columns.transcript(row.prompt), "principle": principle}
        for first, second in (row.texts, row.texts[::-1]):
            pair = {**values, "first": first, "second": second}
            questions.append(Question(template, pair, TEXTS["ending"]))
    for chain in range(args.chains):
        if args.chain_of_thought:  # two passes: the rationale, then the answer after it
            seed = dist.seed_of(args.seed, "chain", chain, *(row.number for row in rows))
            temperature = args.temperature if args.chains > 1 else 0.0
            questions = [question._replace(opening=TEXTS["thoughts"]) for question in questions]
            answers = labeler.generate(questions, args.max_new_tokens, temperature, seed)
            rationales = [text for text, _ in all_of(answers, questions)]
            openings = [f"{TEXTS['thoughts']} {text}\n{TEXTS['ending']}" for text in rationales]
            questions = [q._replace(opening=opening) for q, opening in zip(questions, openings)]
        answers = torch.as_tensor(all_of(labeler.probabilities(questions, ("1", "2")), questions))
        for i, text in enumerate(rationales):
            answers[i] *= bool(text)  # an empty rationale counts as no answer
        chains.append(answers)
    p = torch.stack(chains)  # (chains, questions, 2)
    mass = p.sum(-1)
    answered = mass >= args.min_mass
    # Normalise before averaging: a chain counts the same however much probability it gives other answers
    preferences = torch.where(answered, p[..., 0] / mass, 0).sum(0) / answered.sum(0)
    of_orders = zip(rows, preferences.view(-1, 2).tolist(), mass.mean(0).view(-1, 2).tolist())
    for i, (row, (first, second), masses) in enumerate(of_orders):
        if math.isnan(first + second):  # 0 / 0: no chain gave an answer in one of the orders
            yield {"human": row.human, "failed": f"the labeler chose neither 1 nor 2{UNASKED}"}
            continue
        ai = {"orders": [first, 1 - second], "mass": min(masses)}
        if args.chain_of_thought:
            ai["rationales"] = rationales[2 * i : 2 * i + 2]
        result = {"chosen": row.texts[0], "rejected": row.texts[1], "preference": sum(ai["orders"]) / 2}
        yield {**result, "human": row.human, "ai": ai}


def rater(model):
    """Make a scorer that rates responses (direct RLAIF): `--scorer common.programs.ai_feedback:rater=MODEL`.

    Returns a function whose scores are (expected rating - 5.5) / 4.5, so from -1 to 1. A response gets 0
    if the labeler gives the numbers from 1 to 10 too little probability."""
    args = Args()
    labeler = load_labeler(model, dist.setup(), args, "--scorer common.programs.ai_feedback:rater")

    def fn(prompts, responses, rows):
        transcripts = [message_columns.transcript(row["messages"]) for row in rows]
        values = [{"prompt": x, "response": response} for x, response in zip(transcripts, responses)]
        questions = [Question(TEXTS["rate"], value, TEXTS["rating"]) for value in values]
        p = labeler.probabilities(questions, tuple(map(str, range(1, 11))))  # (responses, 10)
        mass = p.sum(1)
        ratings = (p / mass.clamp(min=1e-300)[:, None]) @ torch.arange(1.0, 11.0, dtype=p.dtype)
        return torch.where(mass >= args.min_mass, (ratings - 5.5) / 4.5, 0.0).tolist()

    return fn


def oracle(model):
    """Make a scorer that compares two responses: `--scorer common.programs.ai_feedback:oracle=MODEL`.

    Returns a function that gives the `preference` of `label` as log odds; 0 means no answer."""
    labeler = load_labeler(model, dist.setup(), Args(), "--scorer common.programs.ai_feedback:oracle")

    def fn(duels):
        items = [Item(0, "", {}, prompt, [a, b]) for prompt, a, b in duels]
        p = [result.get("preference", 0.5) for result in label(items, labeler, ("",), Args())]
        return torch.tensor(p, dtype=torch.float64).logit(eps=1e-12).tolist()

    fn.pairwise = True
    return fn


def asked(row) -> Question:
    """Return the question that asks for an answer to the row's last turn, given the turns before it."""
    return Question("{prompt}", {"prompt": row.prompt[-1]["content"]}, before=copy.deepcopy(row.prompt[:-1]))


def revise(rows, labeler, principles, args):
    """Answer each prompt, or take the row's `response`, then R times criticise and revise the response. Each
    step draws a principle at random.

    Yields {"completion", "ai": {"first", "steps": [{"principle", "critique", "revision", "used"}]}} per row.
    A revision is used only if it is finished and neither it nor its critique is empty. A row fails if its
    response is empty, or if the first answer was unfinished and no revision replaced it."""
    calls = itertools.count()

    def write(questions) -> list[tuple[str, bool]]:
        seed = dist.seed_of(args.seed, "revise", next(calls), *(row.number for row in rows))
        return all_of(labeler.generate(questions, args.max_new_tokens, args.temperature, seed), questions)

    talks = [{"prompt": message_columns.transcript(row.prompt)} for row in rows]
    answers = iter(write([asked(row) for row in rows if not row.texts]))
    firsts = [(row.texts[0], True) if row.texts else next(answers) for row in rows]
    for talk, (text, _) in zip(talks, firsts):
        talk["response"] = text
    results = [{"first": talk["response"], "steps": []} for talk in talks]
    for r in range(args.revisions):
        # All rows take a step together, in two passes of the labeler: the critiques, then the revisions
        drawn = [draw(principles, args.seed, row.number, r) for row in rows]
        steps = [{**talk, "principle": principle} for talk, principle in zip(talks, drawn)]
        critiques = write([Question(TEXTS["critique"], step) for step in steps])
        steps = [{**step, "critique": text} for step, (text, _) in zip(steps, critiques)]
        revisions = write([Question(TEXTS["revise"], step) for step in steps])
        for talk, result, step, (text, ended) in zip(talks, results, steps, revisions):
            used = bool(text) and ended and bool(step["critique"])
            comment = {"principle": step["principle"], "critique": step["critique"]}
            result["steps"].append({**comment, "revision": text, "used": used})
            talk["response"] = text if used else talk["response"]
    for talk, result, (_, ended) in zip(talks, results, firsts):
        text = talk["response"] if ended or any(step["used"] for step in result["steps"]) else ""
        yield {"completion": text, "ai": result} if text else {"failed": f"no finished response{UNASKED}"}


# -- tasks without a labeler, which need all rows at once ----------------------------------------------
def select(rows, labeler, principles, args):
    """Choose complex and diverse rows by their tags; yields {} for a row that is chosen.

    Complexity-first diverse sampling (#InsTag, arXiv:2308.07074, algorithm 1; cited by Qwen,
    arXiv:2309.16609, section 3.2.1): a pass visits the remaining rows, those with the most tags first, and
    takes each row that has a tag which is new in this pass. Passes are repeated until --max-rows rows are
    taken; without --max-rows there is one pass. Rows with the same number of tags are in random order."""
    # One visit to each row gives all passes: a tag is seen first in pass 0, then in 1, and so on, so the
    # number of passes that have seen it is also the first pass that has not
    counts = collections.Counter()
    pass_of = {}
    tags_of = [tags_of_row(row.begin) for row in rows]
    order = dist.shuffled(len(rows), args.seed, "select")
    for i in sorted(order, key=lambda i: -len(tags_of[i])):
        if tags_of[i]:
            pass_of[i] = min(counts[tag] for tag in tags_of[i])  # earlier passes have seen all its tags
            counts.update(tag for tag in tags_of[i] if counts[tag] == pass_of[i])
    n = args.max_rows or list(pass_of.values()).count(0)
    taken = set(sorted(pass_of, key=pass_of.get)[:n])  # the sort is stable: most tags first in each pass
    for i in range(len(rows)):
        why = "its tags are taken, or --max-rows is reached" if tags_of[i] else "no tags and no category"
        yield {} if i in taken else {"failed": why}


def tags_of_row(row) -> set[str]:
    """Return the distinct `tags` of a row, or else its `category`; empty if it has neither."""
    tags = row.get("tags")
    if isinstance(tags, list) and tags and all(isinstance(tag, str) for tag in tags):
        return set(tags)
    return set() if row.get("category") is None else {str(row["category"])}


def hindsight(rows, labeler, principles, args):
    """Relabel responses in hindsight (HIR, arXiv:2302.05206): give each one the instruction that it fulfils.

    Yields {"prompt", "completion", "score"} per row. The instruction, in the prompt's system message, is
    TEXTS["good"] for a score of at least --threshold, else TEXTS["bad"]. A row without a response gets
    TEXTS["good"]: a trained model is prompted like this in use, and to sample for the next round, where the
    instruction that a response fulfils then replaces the one that it was sampled with."""
    scores = collections.defaultdict(list)
    for row in rows:
        scores[turns_key(row.prompt)] += [row.human for _ in row.texts]
    for row in rows:
        of_prompt = scores[turns_key(row.prompt)]  # scores of different prompts may differ by a constant
        threshold = statistics.median(of_prompt) if of_prompt and args.threshold is None else args.threshold
        instruction = TEXTS["bad" if row.texts and row.human < threshold else "good"]
        system = [turn["content"] for turn in row.prompt[:1] if turn["role"] == "system"]
        turn = {"role": "system", "content": "\n\n".join([instruction, *system])}
        result = {"prompt": [turn, *row.prompt[len(system) :]]}
        yield {**result, "completion": row.texts[0], "score": row.human} if row.texts else result


def without_instruction(prompt) -> list[dict]:
    """Remove the instruction of an earlier round of hindsight, if there is one, from a prompt's messages."""
    instruction, _, system = prompt[0]["content"].partition("\n\n")
    if prompt[0]["role"] != "system" or instruction not in (TEXTS["good"], TEXTS["bad"]):
        return prompt
    return [{**prompt[0], "content": system}, *prompt[1:]] if system else prompt[1:]


# -- rows ------------------------------------------------------------------------------------------
class Item(NamedTuple):
    number: int  # the row's position in the data set
    key: str  # for mixtures.random_subset
    begin: dict  # the first columns of the output row
    prompt: list[dict]
    texts: list[str]  # the row's responses; label: two; revise, hindsight: at most one; others: empty
    human: float | None = None  # label: P(texts[0] is better) by the row's label; hindsight: its score


ANSWERS = {"revise": ("response",), "hindsight": ("response", "completion")}  # columns with a response


def read_items(args) -> list[Item]:
    """Read the rows of --dataset that the task can use, at most --max-rows of them. Other rows are dropped,
    and counted in a message. Raises InputError if no row is left."""
    counter = itertools.count()

    def item(row):
        values = row.data
        number = next(counter)
        human = None
        texts = []
        if args.task == "label":
            prompt, texts, human = comparisons.pair_of(values, row.where)
        else:
            prompt = message_columns.prompt_turns(values)
            prompt = without_instruction(prompt) if args.task == "hindsight" else prompt
            names = ANSWERS.get(args.task, ())
            for name in [name for name in names if name in values][:1]:
                texts = [turn["content"] for turn in message_columns.turns(values[name], "assistant")]
            if len(texts) > 1:
                raise ValueError("the response has several messages")
            if texts and args.task == "hindsight":
                human = formats.number(values.get("score"))
        for text in texts:
            message_columns.check_messages([*prompt, {"role": "assistant", "content": text}])
        for name in ("score", "responses") if args.task == "hindsight" and not texts else ():
            if values.get(name) is not None:
                raise ValueError(f"a column {name}, but none named response or completion")
        if len({text.strip() for text in texts}) < len(texts):
            raise ValueError("the responses are the same")
        given = {name: values[name] for name in ("category", "is_safety") if name in values}
        start = {"prompt": prompt, **given}
        if args.task == "select":
            values.read.update(values)  # all but row and failed are copied, so none is reported as unread
            start = {name: value for name, value in values.items() if name != "failed"}
        start = json.loads(json.dumps(start, default=str))  # dates, for example, become text
        # hindsight compares the responses to a prompt: --max-rows cuts those of one prompt at most
        key = turns_key(prompt) if args.task == "hindsight" else f"{number}/{row.where}"
        return Item(number, key, {**start, "row": number}, prompt, texts, human)

    rows = mixtures.load_rows(args.dataset, "preferences" if args.task == "label" else "prompts")
    if args.task == "label":
        rows = comparisons.joined(rows)
    items = mapping.read(rows, item, args.dataset, f"rows of {args.task}")
    items = mapping.map_rows(rows, lambda _, given: given[0], args.dataset, zip(items))
    return items if args.task == "select" else mixtures.random_subset(items, args.max_rows)


TASKS = {task.__name__: task for task in (sample, label, revise, select, hindsight)}
WITHOUT_LABELER = ("select", "hindsight")  # no metrics_of for them: their data may have columns of its names


# -- measures --------------------------------------------------------------------------------------
def metrics_of(rows, failed) -> dict[str, float]:
    """Compute the metrics of summary.json from the good and the failed rows; see docs/use/runs.md."""
    metrics = {"rows": len(rows), "failed": len(failed)}
    judged = [row for row in rows if row.get("human") not in (None, 0.5)]
    agreement = [(row["preference"] - 0.5) * (row["human"] - 0.5) for row in judged]
    if judged:
        one_order = [(p - 0.5) * (row["human"] - 0.5) for row in judged for p in row["ai"]["orders"]]
        share = measures.accuracy(agreement)
        n = len(judged)
        metrics.update(measures.with_interval("alignment", share, *measures.wilson(share, n), n))
        metrics.update({"alignment/n": n, "alignment/one_order": measures.accuracy(one_order)})
    answers = [row["ai"] for row in [*rows, *failed] if "ai" in row]
    orders = [answer["orders"] for answer in answers if "orders" in answer]
    if orders:  # of each pair: P(texts[0] is better) when it is shown first, and when it is shown second
        metrics["position/decides"] = sum((a > 0.5) != (b > 0.5) for a, b in orders) / len(orders)
        metrics["position/first"] = sum(a + 1 - b for a, b in orders) / (2 * len(orders))
    return {**metrics, **measures.means(answers, {"mass": "mass", "dropped": "dropped"})}


@dataclass
class Args:
    task: Literal["sample", "label", "revise", "select", "hindsight"] = "label"
    """Task to run; also the first word of the command."""
    model: str = ""
    """Labeler, or policy of sample: a causal LM (run directory, folder, hub name), or module:function."""
    other_models: tuple[str, ...] = ()
    """Further policies that sample responses (sample)."""
    responses: int = 2
    """Number of responses of each policy to a prompt (sample)."""
    threshold: float | None = None
    """Lowest score of a good response (hindsight). Default: the median score of the prompt's responses."""
    dataset: str = "tiny"
    """Rows to work on. sample, select: prompts; label: pairs or rankings, as for reward.py; hindsight:
    `prompt`, `response` or `completion`, `score`; revise: prompts, optionally with a first `response`."""
    output_dir: str = "runs/ai_feedback"
    """Run directory; its rows.jsonl is the new data set."""
    chat_template: str | None = None
    """Jinja file with the chat template, for a tokenizer without one or instead of its own."""
    preamble: Literal["base", "detailed"] = "base"
    """Instructions to the labeler before the pair: short, or with a definition of a good response."""
    examples: int = 0
    """Solved examples before the pair; common/programs/ai_feedback.toml has 8."""
    chain_of_thought: bool = False
    """Written comparison by the labeler before its answer."""
    chains: int = 1
    """Number of sampled rationales whose preferences are averaged (self-consistency)."""
    constitution: str | None = None
    """File with one principle per line; each pair and each revision draws one at random. Default: no
    principle for label, those of common/programs/ai_feedback.toml for revise."""
    revisions: int = 2
    """Number of revisions R (revise)."""
    max_rows: int | None = None
    """Number of rows to use; for select, to choose. Default: all rows; for select, those of one pass."""
    max_new_tokens: int = 128
    """Maximum number of tokens of a rationale, answer, critique or revision."""
    temperature: float = 0.7
    """Sampling temperature; a single chain of thought is greedy."""
    min_mass: float = 0.05
    """Lowest total probability of the options that counts as an answer; other rows fail and are counted."""
    batch_size: int = 16
    """Number of questions per forward pass on each rank."""
    chunk_rows: int = 64
    """Number of rows between two writes to disk, which is the most that a crash can lose."""
    seed: int = 0
    """Seed of the principles, the samples, and the order of rows with the same number of tags."""
    resume: bool = False
    """Resume the run in output_dir, or start it if there is no run yet."""
    overwrite: bool = False
    """Replace an existing run in output_dir."""


def check(args):
    check_flags(
        args,
        ("model", args.model or args.task in WITHOUT_LABELER, "the name of a labeler"),
        ("other_models", args.task == "sample" or not args.other_models, "no names except with sample"),
        ("other_models", len({args.model, *args.other_models}) > len(args.other_models), "different models"),
        ("chains", args.chains == 1 or args.chain_of_thought, "1 without --chain-of-thought"),
        ("examples", args.examples <= len(TEXTS["examples"]), f"0 to {len(TEXTS['examples'])}"),
        ("preamble", args.preamble == "base" or not args.constitution, "base with --constitution"),
        ("min_mass", 0 < args.min_mass <= 1, "more than 0, at most 1"),
    )


def main(args: Args):
    run = Run(args, f"ai_feedback {args.task}", check)
    if run.finished:
        return

    # data
    principles = load_principles(args)
    items = read_items(args)

    # model
    names = [] if args.task in WITHOUT_LABELER else [args.model, *args.other_models]
    labelers = {name: load_labeler(name, run.device, args) for name in names}
    # An old run in output_dir is replaced only now that data and models are loaded. A resumed run needs the
    # same --dataset, because rows are identified by their numbers in it
    start_run(args, run.stage, run.status)

    # rows of an earlier, unfinished run
    path = run.folder / "partial.jsonl"
    rows = dist.gather(files.read_jsonl(path) if dist.is_main() else [])
    size = {"sample": args.batch_size, **dict.fromkeys(WITHOUT_LABELER, len(items))}.get(args.task, 1)
    with files.reading(path):
        answered = {int(row["row"]) for row in rows}
        prompt_of = {item.number: item.prompt for item in items}
        is_same = [row["prompt"] == prompt_of.get(row["row"], row["prompt"]) for row in rows if labelers]
    if not all(is_same):
        why = "Resume with the data that it was started with, or use --overwrite."
        raise InputError(f"--resume: the rows of --dataset are not those of {path}. {why}")
    chunks = split(items, max(size, args.chunk_rows))
    todo = [chunk for chunk in chunks if not answered.issuperset(item.number for item in chunk)]
    # A chunk that a crash cut short is redone, and --max-rows may be smaller now
    kept = prompt_of.keys() - {item.number for chunk in todo for item in chunk}
    rows = [row for row in rows if row["row"] in kept]
    if dist.is_main():
        files.write_jsonl(path, rows)

    # loop
    labeler = labelers if args.task == "sample" else labelers.get(args.model)
    with progress.progress(len(items), len(rows), args.task) as bar:
        for chunk in todo:
            shares = split(chunk, size)[dist.rank() :: dist.world_size()]  # a group stays on one rank
            my_items = [item for share in shares for item in share]
            results = list(zip(my_items, TASKS[args.task](my_items, labeler, principles, args)))
            dist.barrier()  # a labeler may be slow on some ranks, longer than the timeout of a collective
            new = dist.gather([{**item.begin, **result} for item, result in results])
            rows += new
            if dist.is_main():
                files.append_jsonl(path, new)
            bar.update(len(chunk))

    # save
    good = sorted((row for row in rows if "failed" not in row), key=lambda row: row["row"])
    bad = [row for row in rows if "failed" in row]
    if dist.is_main():
        files.write_jsonl(run.folder / "failed.jsonl", bad)
    if not good:
        raise InputError(f"no result ({run.folder}/failed.jsonl): {bad[0]['failed']}. Use --overwrite.")
    if dist.is_main():
        files.write_jsonl(run.folder / "rows.jsonl", good)
        metrics = metrics_of(good, bad) if labelers else {"rows": len(good), "failed": len(bad)}
        for key, value in metrics.items():
            print(f"{key}: {value:{'' if isinstance(value, int) else '.4g'}}")
        if bad:
            print(f"the first row of {run.folder / 'failed.jsonl'} failed because of: {bad[0]['failed']}")
        files.write_json(run.folder / "summary.json", metrics)  # after the data: it marks the run as finished
        path.unlink()
        print(f"wrote {run.folder / 'rows.jsonl'}")


RECIPES = {
    "label": ("soft labels for pairs of responses, for reward.py", Args()),
    "revise": ("responses that are criticised and revised, for sft.py", Args(task="revise")),
    "sample": ("different responses to each prompt, for label", Args(task="sample")),
    "select": ("complex rows with diverse tags", Args(task="select")),
    "hindsight": ("responses under an instruction that they fulfil, for sft.py", Args(task="hindsight")),
}

if __name__ == "__main__":
    launch(main, RECIPES)
