"""AI feedback: a language model in the annotator's place. It makes data sets for the scripts:

    label     which of two responses is better, as a soft label for reward.py (distilled RLAIF)
    rate      how good a response is, from 1 to 10 (direct RLAIF)
    revise    answer, criticise by a principle, revise, R times: rows for sft.py (Constitutional AI)

("RLAIF: Scaling Reinforcement Learning from Human Feedback with AI Feedback", arXiv:2309.00267;
"Constitutional AI: Harmlessness from AI Feedback", arXiv:2212.08073.)

    p(first is better) = P("1") / (P("1") + P("2"))         the mean of both orders, for places have a bias
    rating             = sum_s s P(s) / sum_s P(s),  s = 1..10,   score = (rating - 5.5) / 4.5

P is the labeler's probability of the text after the opening of its answer. With --chain-of-thought it first
writes a rationale, and the answer is read after it.

    python -m common.ai_feedback label --model org/name --dataset pairs.jsonl --output-dir runs/labels
    python reward.py --model org/other --dataset runs/labels/rows.jsonl
    python ppo.py --model org/other --dataset prompts.jsonl --scorer common.ai_feedback:rater=org/name
    torchrun --nproc-per-node 8 -m common.ai_feedback revise --model org/name --constitution principles.txt

Every rank holds the whole labeler, and a share of the rows. A labeler may also be `module:function`, which
gives an object with the two methods of LanguageModel.
"""

import itertools
import math
import os
import random
import re
import tomllib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from common import comparisons, data, dist, generate, loading, metrics, models, scorers, tiny
from common.batches import Row, split
from common.cli import check_flags
from common.errors import InputError
from common.metrics import write_json
from common.run import find_run, launch, start_run

# -- the prompts: --template FILE (TOML) replaces any of them -----------------------------------------
TEMPLATES = {
    "base": "Here are a conversation and two responses to its last message. Say which response is better.",
    "detailed": (
        "A good response does what the person needs, says only what is true, and admits what it does not "
        "know. It never helps anyone to hurt people, to steal or to deceive, and neither insults nor looks "
        "down on anybody; where it must refuse, it does so kindly. Of two responses that are equally good in "
        "this, the shorter one is better.\n\nHere are a conversation and two responses to its last message. "
        "Weigh them by these points and say which response is better."
    ),
    "by_principle": (
        "Here are a conversation and two responses to its last message. Say which response is better by this "
        "principle: {principle}"
    ),
    "pair": "Conversation:\n{prompt}\n\nResponse 1:\n{first}\n\nResponse 2:\n{second}",
    "question": "Which response is better, 1 or 2?",
    "thoughts": "Comparison of the responses:",
    "ending": "Better response:",
    "rate": (
        "Here are a conversation and a response to its last message. Rate the response from 1 (useless or "
        "harmful) to 10 (perfect).\n\nConversation:\n{prompt}\n\nResponse:\n{response}\n\nWhat is the "
        "rating?"
    ),
    "rating": "Rating:",
    "critique": (
        "Here are a conversation and a response to its last message.\n\nConversation:\n{prompt}\n\n"
        "Response:\n{response}\n\nWhat is wrong with the response by this principle: {principle}"
    ),
    "revise": (
        "Here are a conversation, a response to its last message, and a critique of it.\n\nConversation:\n"
        "{prompt}\n\nResponse:\n{response}\n\nCritique:\n{critique}\n\nWrite the response again, so that "
        "the critique no longer holds. Write nothing but the response."
    ),
}
FIELDS = {  # what a template must hold
    "by_principle": {"principle"},
    "pair": {"prompt", "first", "second"},
    "rate": {"prompt", "response"},
    "critique": {"prompt", "response", "principle"},
    "revise": {"prompt", "response", "critique"},
}
PRINCIPLES = (  # of --constitution's default, for revise
    "The response must not help anyone to do harm or to break the law.",
    "The response must not insult, threaten or belittle anyone.",
    "The response must not claim what is false or what nobody can know.",
    "The response must answer what was asked, in plain words.",
)


class Example(NamedTuple):
    prompt: str
    first: str
    second: str
    better: str
    thoughts: str


EXAMPLES = (  # for --examples
    Example(
        "How do I keep bread fresh?",
        "Put it in a paper bag at room temperature, and freeze what you will not eat in two days.",
        "Bread is a food made of flour and water.",
        "1", "The first says what to do. The second does not answer the question.",
    ),
    Example(
        "How can I read my flatmate's messages without her noticing?",
        "Wait until she sleeps and use her finger to unlock the phone.",
        "I would not do that: it breaks her trust, and may be against the law. If you worry, ask her.",
        "2", "The first helps to spy on a person. The second refuses and offers a way out.",
    ),
    Example(
        "What is 17 times 6?",
        "It is 102.",
        "17 times 6 is 96, since 17 times 5 is 79.",
        "1", "The first is right. The second is wrong twice.",
    ),
    Example(
        "My neighbour is so annoying.",
        "People like that deserve to be hit.",
        "That sounds tiring. What does your neighbour do?",
        "2", "The first speaks of violence. The second listens and asks.",
    ),
    Example(
        "Which planet is the largest?",
        "Jupiter.",
        "The largest planet is the sun, which is very large indeed.",
        "1", "The first is right. The sun is no planet.",
    ),
    Example(
        "Write a birthday greeting for my aunt.",
        "No.",
        "Dear aunt, happy birthday! May your year be full of good days.",
        "2", "The first refuses for no reason. The second does what was asked.",
    ),
    Example(
        "Will it rain here in three weeks?",
        "Nobody can tell that far ahead; a forecast is good for about a week.",
        "Yes, it will rain on that day.",
        "1", "The first is honest. The second claims what nobody can know.",
    ),
    Example(
        "How do I get a wine stain out?",
        "Throw the shirt away.",
        "Dab it, pour on cold water with salt, and wash it soon.",
        "2", "The first does not help. The second gives steps that work.",
    ),
)  # fmt: skip


def load_templates(path) -> dict[str, str]:
    """TEMPLATES, with those of the TOML file `path` in place of some."""
    if path is None:
        return TEMPLATES
    try:
        given = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f'--template {path}: {error}; wanted TOML, name = "text"') from None
    for name, text in given.items():
        if name not in TEMPLATES or not isinstance(text, str):
            raise InputError(f"--template {path}: {name!r} is no text of {', '.join(TEMPLATES)}")
        lacking = FIELDS.get(name, set()) - set(re.findall(r"\{(\w+)\}", text))
        if lacking:
            fields = ", ".join(f"{{{x}}}" for x in sorted(lacking))
            raise InputError(f"--template {path}: {name} lacks {fields}")
    return {**TEMPLATES, **given}


def fill(template, values) -> str:
    """Every {name} replaced by its value, once: a value may hold braces itself."""
    return re.sub(r"\{(\w+)\}", lambda m: values.get(m[1], m[0]), template)


class Question(NamedTuple):
    template: str  # the user's turn, with {name} for
    values: dict[str, str]  # texts, the only part that may be shortened
    opening: str = ""  # what the answer begins with


# -- the labeler -----------------------------------------------------------------------------------
class LanguageModel:
    """A causal LM on this rank's device, whole. Texts that do not fit are cut in their middle, and counted in
    `shortened`."""

    def __init__(self, name, device, chat_template=None, max_length=None, batch_size=16, dtype=None):
        from transformers import AutoModelForCausalLM

        loading.check_causal_lm(name)
        self.name, self.shortened = name, 0
        self.tokenizer = loading.load_tokenizer(name, chat_template)
        dtype = getattr(torch, dtype or ("bfloat16" if device.type == "cuda" else "float32"))
        if name == "tiny":
            self.model = tiny.model()
            for weight in self.model.parameters():
                weight.data = weight.data.to(dtype)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(loading.find_model(name), dtype=dtype)
        self.model.to(device).eval().requires_grad_(False)  # rotary frequencies stay in fp32
        room = getattr(self.model.config.get_text_config(), "max_position_embeddings", math.inf)
        self.room, self.batch_size, self.device = min(max_length or room, room), batch_size, device

    def encode(self, question, reserve) -> list[int]:
        """Token ids of the question and the opening of the answer; with its texts cut in the middle where
        `reserve` more tokens would not fit."""
        plain, decode = data.special_tokens(self.tokenizer).sub, self.tokenizer.decode
        values = {name: plain("", text) for name, text in question.values.items()}
        whole = {name: self._ids(text) for name, text in values.items()}
        sides = {name: len(ids) for name, ids in whole.items()}  # tokens kept at either end
        while True:
            turns = [{"role": "user", "content": fill(question.template, values)}]
            ids = data.prompt_ids(self.tokenizer, turns) + self._ids(plain("", question.opening))
            excess = len(ids) + reserve - self.room
            if excess <= 0:
                self.shortened += any(2 * n < len(whole[name]) for name, n in sides.items())
                return ids
            longest = max(sides, key=lambda name: min(2 * sides[name], len(whole[name])), default=None)
            side = min(sides[longest], len(whole[longest]) // 2) if longest else 0
            if side <= 2:
                break
            n = max(side // 2, side - excess // 2 - 1)  # by half at most: then another may be the longest
            sides[longest] = n
            values[longest] = f"{decode(whole[longest][:n])} [...] {decode(whole[longest][-n:])}"
        raise InputError(f"{self.name} has room for {self.room} tokens, too few for the template itself")

    def _ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def probabilities(self, questions, options) -> torch.Tensor:
        """P(the answer goes on with an option) of each question and option: (n, options). One option's tokens
        may begin another's ("1" and "10"): then the shorter one's probability is that of ending there."""
        rows, paths_of, logprobs = [], [], [{} for _ in questions]
        for i, question in enumerate(questions):
            base, paths = self._options(question, options)
            paths_of.append(paths)
            befores = {path[:-1] for path in paths}  # a row that goes on with one tells of its beginnings too
            befores -= {before[:k] for before in befores for k in range(len(before))}
            rows += [(i, base, before) for before in sorted(befores)]
        rows.sort(key=lambda row: -len(row[1]) - len(row[2]))
        shared = os.path.commonprefix([base[:-1] for _, base, _ in rows])  # preamble and examples: run once
        if getattr(self.model, "_is_stateful", False):  # recurrent: no keys and values to go on from
            shared = []
        for batch in split(rows, self.batch_size):
            batch = [(i, base[len(shared) :], before) for i, base, before in batch]
            tensors = [torch.tensor([*base, *before], device=self.device) for _, base, before in batch]
            input_ids = torch.nn.utils.rnn.pad_sequence(tensors, True)
            where = [(r, len(b) - 1 + k) for r, (_, b, p) in enumerate(batch) for k in range(len(p) + 1)]
            where = torch.tensor(where, device=self.device).T
            of_place = models.next_token_logprobs(self.model, input_ids, where, shared).double()
            of_row = of_place.split([len(before) + 1 for _, _, before in batch])
            for (i, _, before), row_logprobs in zip(batch, of_row):
                for path in paths_of[i]:
                    if path[:-1] == before[: len(path) - 1]:
                        logprobs[i][path] = sum(row_logprobs[k, token].item() for k, token in enumerate(path))
        p = torch.zeros(len(questions), len(options), dtype=torch.float64)
        for i, paths in enumerate(paths_of):
            for k, path in enumerate(paths):
                longer = [x for x in paths if len(x) > len(path) and x[: len(path)] == path]
                p[i, k] = math.exp(logprobs[i][path]) - sum(math.exp(logprobs[i][x]) for x in longer)
        return p.clamp(min=0)

    def _options(self, question, options):
        """(ids of the question up to where options differ, the ids of each option from there on). An option
        is written after the opening and a space, whose token may change with it."""
        plain = data.special_tokens(self.tokenizer).sub("", question.opening)
        ends = [self._ids(f"{plain} {x}") for x in options]
        same = len(os.path.commonprefix(ends))
        paths = [tuple(end[same:]) for end in ends]
        if not all(paths) or len(set(paths)) < len(paths) or self.tokenizer.unk_token_id in sum(paths, ()):
            raise InputError(f"{self.name}: its tokenizer cannot write {', '.join(options)} apart")
        whole = self.encode(question._replace(opening=f"{question.opening} {options[0]}"), reserve=4)
        return whole[: len(whole) - len(paths[0])], paths

    def generate(self, questions, max_new_tokens, temperature, seed) -> list[tuple[str, bool]]:
        """(text, whether it ended) of one answer to each question, without its opening."""
        prompts = [self.encode(question, max_new_tokens) for question in questions]
        responses = generate.my_responses(
            self.model, self.tokenizer, prompts, max_new_tokens=max_new_tokens, temperature=temperature,
            slots=self.batch_size, seed=seed,
        )  # fmt: skip
        return [(response.text.strip(), response.finished) for response in responses]


def load_labeler(spec, device, flag="--model", **options):
    """A LanguageModel, or what `module:function` gives."""
    if not re.fullmatch(scorers.NAMED, spec):
        return LanguageModel(spec, device, **options)
    make = scorers.named_function(flag, spec)
    try:
        labeler = make()
    except TypeError as error:
        raise InputError(f"{flag} {spec}: {error}; wanted a function without arguments") from None
    if not (hasattr(labeler, "probabilities") and hasattr(labeler, "generate")):
        raise InputError(f"{flag} {spec}: it gives no object with `probabilities` and `generate`")
    return labeler


# -- the three tasks: (rows of this rank) -> a result a row, or {"failed": why} -------------------------
def preamble_and_examples(args, templates):
    examples = []
    for example in EXAMPLES[: args.examples]:
        pair = fill(templates["pair"], example._asdict())
        steps = f"{templates['thoughts']} {example.thoughts}\n" if args.chain_of_thought else ""
        answer = f"{steps}{templates['ending']} {example.better}"
        examples.append(f"{pair}\n\n{templates['question']}\n{answer}\n\n")
    kind = "by_principle" if args.constitution else args.preamble
    return templates[kind] + "\n\n" + "".join(examples)


def label(rows, labeler, templates, principles, args):
    """The probability that the first text of each pair is the better one: {"preference", "orders": in either
    order, "mass": P("1") + P("2"), the smaller of both orders}."""
    head = preamble_and_examples(args, templates)
    template = f"{head}{templates['pair']}\n\n{templates['question']}"
    questions = []
    for row in rows:
        a, b = row.texts
        values = {"prompt": data.transcript(row.prompt), "principle": draw(principles, args.seed, row.number)}
        for first, second in ((a, b), (b, a)):
            pair = {**values, "first": first, "second": second}
            questions.append(Question(template, pair, templates["ending"]))
    without, rationales = set(), None
    chains = args.chains if args.chain_of_thought else 1
    p = torch.zeros(len(questions), 2, dtype=torch.float64)
    for chain in range(chains):
        openings = [templates["ending"]] * len(questions)
        if args.chain_of_thought:  # two passes: the rationale, then the answer after it
            seed = dist.seed_of(args.seed, "chain", chain, *(row.number for row in rows))
            temperature = args.temperature if args.chains > 1 else 0.0
            first_pass = [question._replace(opening=templates["thoughts"]) for question in questions]
            answers = labeler.generate(first_pass, args.max_new_tokens, temperature, seed)
            rationales = [text for text, _ in answers]
            without.update(i // 2 for i, text in enumerate(rationales) if not text)
            openings = [f"{templates['thoughts']} {text}\n{templates['ending']}" for text in rationales]
        asking = [question._replace(opening=opening) for question, opening in zip(questions, openings)]
        p += labeler.probabilities(asking, ("1", "2")) / chains
    results = []
    for i in range(len(rows)):
        masses = p[2 * i : 2 * i + 2].sum(1).tolist()
        if i in without or min(masses) < args.min_mass:
            results.append({"failed": "no rationale" if i in without else "neither 1 nor 2"})
            continue
        orders = [p[2 * i, 0].item() / masses[0], 1 - p[2 * i + 1, 0].item() / masses[1]]
        result = {"preference": sum(orders) / 2, "orders": orders, "mass": min(masses)}
        if rationales:
            result["rationales"] = rationales[2 * i : 2 * i + 2]
        results.append(result)
    return results


def rate(rows, labeler, templates, principles, args):
    """{"rating": 1 to 10, "score": -1 to 1, "mass"} of each response."""
    texts = [(data.transcript(row.prompt), row.texts[0]) for row in rows]
    results = []
    for rating, mass in ratings(labeler, templates, texts):
        result = {"rating": rating, "score": (rating - 5.5) / 4.5, "mass": mass}
        results.append(result if mass >= args.min_mass else {"failed": "no number from 1 to 10"})
    return results


def ratings(labeler, templates, texts) -> list[tuple[float, float]]:
    """[(expected rating, probability that the answer is a rating)] of (prompt, response) texts."""
    questions = [
        Question(templates["rate"], {"prompt": prompt, "response": response}, templates["rating"])
        for prompt, response in texts
    ]
    p = labeler.probabilities(questions, tuple(map(str, range(1, 11))))
    mass = p.sum(1).clamp(min=1e-300)
    rating = (p / mass[:, None]) @ torch.arange(1.0, 11.0, dtype=p.dtype)
    return list(zip(rating.tolist(), mass.tolist()))


def revise(rows, labeler, templates, principles, args):
    """Answer (or take the row's `response`), then R times criticise by a principle drawn at random and
    revise: {"completion", "first", "steps": [{"principle", "critique", "revision", "used"}]}. A critique or
    revision without words, or a revision that did not end, leaves the response as it was."""
    calls = itertools.count()

    def write(template, values) -> list[tuple[str, bool]]:
        seed = dist.seed_of(args.seed, "revise", next(calls), *(row.number for row in rows))
        questions = [Question(template, value) for value in values]
        return labeler.generate(questions, args.max_new_tokens, args.temperature, seed)

    prompts = [data.transcript(row.prompt) for row in rows]
    missing = [i for i, row in enumerate(rows) if not row.texts]
    responses = [row.texts[0] if row.texts else "" for row in rows]
    for i, (text, _) in zip(missing, write("{prompt}", [{"prompt": prompts[i]} for i in missing])):
        responses[i] = text
    results = [{"first": text, "steps": []} for text in responses]
    for r in range(args.revisions):
        values = [{"prompt": prompt, "response": text} for prompt, text in zip(prompts, responses)]
        drawn = [draw(principles, args.seed, row.number, r) for row in rows]
        questions = [{**value, "principle": principle} for value, principle in zip(values, drawn)]
        critiques = [text for text, _ in write(templates["critique"], questions)]
        questions = [{**value, "critique": critique} for value, critique in zip(values, critiques)]
        for i, (text, ended) in enumerate(write(templates["revise"], questions)):
            used = bool(text) and ended and bool(critiques[i])
            step = {"principle": drawn[i], "critique": critiques[i], "revision": text, "used": used}
            results[i]["steps"].append(step)
            responses[i] = text if used else responses[i]
    return [
        {**result, "completion": text} if text else {"failed": "no response"}
        for result, text in zip(results, responses)
    ]


def draw(principles, seed, *place) -> str:
    return random.Random(f"principle {(seed, *place)}").choice(principles) if principles else ""


def rater(model):
    """Direct RLAIF: `--scorer common.ai_feedback:rater=MODEL`. The function that rates responses, from -1 to
    1, with the module's own templates; 0 where the labeler's answer is no rating."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    labeler = load_labeler(model, device, "--scorer common.ai_feedback:rater")

    def fn(prompts, responses, rows):
        texts = [(data.transcript(row["messages"]), response) for row, response in zip(rows, responses)]
        rated = ratings(labeler, TEMPLATES, texts)
        return [(rating - 5.5) / 4.5 if mass >= Args.min_mass else 0.0 for rating, mass in rated]

    return fn


# -- rows ------------------------------------------------------------------------------------------
class Item(NamedTuple):
    number: int  # the row's place in the data set
    row: Row
    prompt: list[dict]
    texts: list[str]  # label: two; rate: one; revise: one or none
    human: float | None = None  # P(texts[0] is the better one) by the row's label, if it has one


def read_item(number, row, task) -> Item:
    """ValueError says why a row is left out."""
    values = row.data
    if task == "label":
        prompt, texts, human = comparisons.pair_of(values, row.where)
    else:
        text = values.get("response") or (values.get("completion") if task == "rate" else None)
        if task == "rate" and not isinstance(text, str):
            raise ValueError("no response")
        texts, human = [text] if isinstance(text, str) else [], None
        prompt = generate.prompt_turns(values)
    for text in texts:
        data.check_messages([*prompt, {"role": "assistant", "content": text}])
    if len({text.strip() for text in texts}) < len(texts):
        raise ValueError("the responses are the same")
    return Item(number, row, prompt, texts, human)


def read_items(args) -> list[Item]:
    kind = "preferences" if args.task == "label" else "prompts"
    rows, items, dropped = data.load_rows(args.dataset, kind, args.split), [], {}
    for number, row in enumerate(rows):
        try:
            items.append(read_item(number, row, args.task))
        except ValueError as error:
            dropped.setdefault(str(error), []).append(row.where)
    data.report(args.dataset, len(rows), dropped)
    if not items:
        raise data.none_left(args.dataset, len(rows), dropped)
    if args.max_rows is not None and args.max_rows < len(items):  # a sample of all, whatever their order
        by_hash = sorted(items, key=lambda x: zlib.crc32(f"{x.number}/{x.row.where}".encode()))
        items = sorted(by_hash[: args.max_rows], key=lambda x: x.number)
    return items


def output_row(item, result, args) -> dict:
    """A row of rows.jsonl: what the scripts read, and under `ai` what was asked and answered."""
    row = {"prompt": item.prompt}
    if "category" in item.row.data:
        row["category"] = item.row.data["category"]
    if "is_safety" in item.row.data:
        row["is_safety"] = bool(item.row.data["is_safety"])
    row["row"] = item.number
    if "failed" in result:
        return {**row, "human": item.human, **result}
    if args.task == "label":
        sides = dict(zip(("chosen", "rejected"), item.texts))
        return {**row, **sides, "preference": result.pop("preference"), "human": item.human, "ai": result}
    if args.task == "rate":
        return {**row, "response": item.texts[0], "score": result.pop("score"), "ai": result}
    return {**row, "completion": result.pop("completion"), "ai": result}


# -- measures --------------------------------------------------------------------------------------
def measures(rows, failed, shortened) -> dict[str, float]:
    """Of labels: the alignment with human labels (share of pairs whose likelier side is the human's, ties
    counting 1/2) with its 95 % interval, the same of single orders, the accuracy, in which pairs without an
    answer count 1/2 too, and how often the order decides. Of ratings: their mean. And how many rows
    failed."""
    figures = {"rows": len(rows), "failed": len(failed), "shortened": shortened}
    judged = [row for row in rows if row.get("human") not in (None, 0.5)]
    unanswered = [row for row in failed if row.get("human") not in (None, 0.5)]
    sign = [1 if row["human"] > 0.5 else -1 for row in judged]
    agreement = [s * (row["preference"] - 0.5) for s, row in zip(sign, judged)]
    if judged:
        one_order = [s * (p - 0.5) for s, row in zip(sign, judged) for p in row["ai"]["orders"]]
        share, n = metrics.accuracy(agreement), len(judged)
        low, high = metrics.wilson(share, n)
        figures.update(metrics.with_interval("alignment", share, low, high, n))
        figures.update({"alignment/n": n, "alignment/one_order": metrics.accuracy(one_order)})
    if judged or unanswered:
        figures["accuracy"] = metrics.accuracy(agreement + [0.0] * len(unanswered))
    orders = [row["ai"]["orders"] for row in rows if "orders" in row["ai"]]
    if orders:  # each P(texts[0]), shown first and shown second
        figures["position/decides"] = sum((a > 0.5) != (b > 0.5) for a, b in orders) / len(orders)
        figures["position/first"] = sum(a + 1 - b for a, b in orders) / (2 * len(orders))
    for key in ("rating", "mass"):
        values = [row["ai"][key] for row in rows if key in row["ai"]]
        if values:
            figures[key] = sum(values) / len(values)
    return figures


@dataclass
class Args:
    task: Literal["label", "rate", "revise"] = "label"
    """The first word of the command."""
    model: str = ""
    """The labeler: a causal LM (run directory, folder, hub name), or module:function."""
    dataset: str = "tiny"
    """label: pairs or rankings, as reward.py takes them; rate: rows of `prompt` and `response` or
    `completion`; revise: prompts, perhaps with a `response` to begin with."""
    split: Literal["train", "test"] = "train"
    """Of tiny, or of a hub data set."""
    output_dir: str = "runs/ai_feedback"
    """The run directory; its rows.jsonl is the data set."""
    chat_template: str | None = None
    """A jinja file, for a tokenizer without a chat template or in place of its own."""
    template: str | None = None
    """A TOML file whose texts replace those of TEMPLATES."""
    preamble: Literal["base", "detailed"] = "base"
    """What the labeler is told before the pair."""
    examples: int = 0
    """Solved examples before the pair, 0 to 8."""
    chain_of_thought: bool = False
    """Let the labeler compare in words before it answers."""
    chains: int = 1
    """Self-consistency: so many sampled rationales, their probabilities averaged."""
    constitution: str | None = None
    """A file with a principle on each line, one of which is drawn for each pair, or each revision. None: no
    principle for pairs, PRINCIPLES for revise."""
    revisions: int = 2
    """R, of revise."""
    max_rows: int | None = None
    """So many of the rows."""
    max_new_tokens: int = 128
    """Longest rationale, answer, critique or revision."""
    temperature: float = 0.7
    """Of what is sampled; a single chain of thought is greedy."""
    min_mass: float = 0.05
    """Less probability on the options than this is no answer: the row is left out, and counted."""
    max_length: int | None = None
    """Tokens of a question with its answer. None: the labeler's positions."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the labeler's weights and arithmetic. None: bfloat16 on a GPU, float32 on a CPU."""
    batch_size: int = 16
    """Questions of a forward on one rank."""
    chunk_rows: int = 64
    """Rows between two writes: what a crash can cost."""
    seed: int = 0
    """Of principles and samples."""
    resume: bool = False
    """Go on with the run in output_dir, or begin if there is none."""
    overwrite: bool = False
    """Replace a run that is in the way."""


def check(args):
    check_flags(
        args,
        ("model", args.model, "the labeler's name"),
        ("examples", 0 <= args.examples <= len(EXAMPLES), f"0 to {len(EXAMPLES)}"),
        ("chains", args.chains == 1 or args.chain_of_thought, "1 without --chain-of-thought"),
        ("revisions", args.revisions >= 1, "1 or more"),
        ("preamble", args.preamble == "base" or not args.constitution, "base with --constitution"),
        ("min_mass", 0 < args.min_mass <= 1, "more than 0, at most 1"),
    )


def read_principles(args):
    if args.constitution is None:
        return PRINCIPLES if args.task == "revise" else ()
    path = Path(args.constitution)
    lines = [line.strip() for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    lines = tuple(line for line in lines if line)
    if not lines:
        raise InputError(f"--constitution {path}: no file with a principle on each line")
    return lines


def main(args: Args):
    # setup
    device = dist.setup()
    check(args)
    state = find_run(args)
    if state == "finished":
        return

    # data
    templates, principles = load_templates(args.template), read_principles(args)
    items = read_items(args)
    data.check_same(args.dataset, dist.seed_of(*(item.texts for item in items)))

    # model
    if (args.task == "revise" or args.chain_of_thought) and not re.fullmatch(scorers.NAMED, args.model):
        generate.check_sampled(args.model)
    labeler = load_labeler(
        args.model, device, chat_template=args.chat_template, max_length=args.max_length,
        batch_size=args.batch_size, dtype=args.dtype,
    )  # fmt: skip
    start_run(args, "ai_feedback", state)  # only now is an old run in output_dir replaced

    # what is there already
    path = Path(args.output_dir, "rows.jsonl")
    rows = dist.gather(metrics.read_jsonl(path) if state == "resume" and dist.is_main() else [])
    chunks = split(items, args.chunk_rows)
    answered = {row["row"] for row in rows}
    todo = [chunk for chunk in chunks if any(item.number not in answered for item in chunk)]
    again = {item.number for chunk in todo for item in chunk}  # a chunk that a crash cut is asked whole
    rows = [row for row in rows if row["row"] not in again]
    if dist.is_main():
        metrics.write_jsonl(path, rows)

    # loop
    work = {"label": label, "rate": rate, "revise": revise}[args.task]
    bar = metrics.progress(len(items), len(rows), args.task)
    for chunk in todo:
        mine = chunk[dist.rank() :: dist.world_size()]
        results = work(mine, labeler, templates, principles, args)
        new = dist.gather([output_row(item, result, args) for item, result in zip(mine, results)])
        rows += new
        if dist.is_main():
            metrics.append_jsonl(path, new)
        bar.update(len(chunk))
    bar.close()

    # save
    shortened = int(dist.all_sum(getattr(labeler, "shortened", 0))[0])
    if dist.is_main():
        good = sorted((row for row in rows if "failed" not in row), key=lambda row: row["row"])
        bad = [row for row in rows if "failed" in row]
        metrics.write_jsonl(Path(args.output_dir, "failed.jsonl"), bad)
        metrics.write_jsonl(path, good)
        figures = measures(good, bad, shortened)
        for key, value in figures.items():
            print(f"{key}: {value:.4g}")
        write_json(f"{args.output_dir}/summary.json", figures)  # last
        print(f"wrote {path}")


RECIPES = {
    "label": ("soft labels of pairs, for reward.py", Args()),
    "rate": ("ratings of responses from 1 to 10", Args(task="rate")),
    "revise": ("answers, criticised and revised, for sft.py", Args(task="revise")),
}

if __name__ == "__main__":
    launch(main, RECIPES)
