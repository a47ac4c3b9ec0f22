"""AI feedback: a language model in the annotator's place. It makes data sets for the scripts:

    sample    different responses of one or more policies to a prompt: rows for label
    label     which of two responses is better, as a soft label for reward.py (distilled RLAIF)
    revise    answer, criticise by a principle, revise, R times: rows for sft.py (Constitutional AI)
    select, hindsight    without a labeler: balanced sampling; responses under an instruction they fulfil

("RLAIF: Scaling Reinforcement Learning from Human Feedback with AI Feedback", arXiv:2309.00267;
"Constitutional AI: Harmlessness from AI Feedback", arXiv:2212.08073.)

    p(first is better) = P("1") / (P("1") + P("2"))         the mean of both orders, for places have a bias
    rating             = sum_s s P(s) / sum_s P(s),  s = 1..10       of `rater`, a scorer (direct RLAIF)

P is the labeler's probability of the text after the opening of its answer. With --chain-of-thought it first
writes a rationale, and the answer is read after it. What it is asked stands in ai_feedback.toml.

    python -m common.programs.ai_feedback label --model org/name --dataset pairs.jsonl \\
        --output-dir runs/labels
    python reward.py --model org/other --dataset runs/labels/rows.jsonl
    python ppo.py --model org/other --dataset prompts.jsonl \\
        --scorer common.programs.ai_feedback:rater=org/name
    torchrun --nproc-per-node 8 -m common.programs.ai_feedback revise --model org/name \\
        --constitution principles.txt

Every rank holds the whole labeler, and a share of the rows. A labeler may also be `module:function`, which
gives an object with the two methods of LanguageModel.
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
from common.batches import random_subset, split, turns_key
from common.errors import InputError
from common.responses import my_responses
from common.data import chat, comparisons, files, formats, mapping, message_columns, mixtures, progress
from common.loading import checks, pretrained
from common.scoring import functions, measures
from common.run.cli import check_flags
from common.run.run import Run, launch, start_run

# -- the prompts -----------------------------------------------------------------------------------
TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def load_principles(args) -> list[str]:
    """The lines of --constitution, or of TEXTS."""
    text = Path(args.constitution).read_text("utf-8") if args.constitution else TEXTS["principles"]
    principles = [line.strip() for line in text.splitlines() if line.strip()]
    if not principles:
        raise InputError(f"--constitution {args.constitution}: no principle, wanted one on each line")
    return principles


def draw(principles, seed, *place) -> str:
    return random.Random(f"principle {(seed, *place)}").choice(principles)


def fill(template, values) -> str:
    """Every {name} replaced by its value, once: a value may hold braces itself."""
    return re.sub(r"\{(\w+)\}", lambda m: values.get(m[1], m[0]), template)


class Question(NamedTuple):
    template: str  # the user's turn, with {name} for
    values: dict[str, str]  # texts
    opening: str = ""  # what the answer begins with
    before: list = []  # messages before the user's turn


# -- the labeler -----------------------------------------------------------------------------------
class LanguageModel:
    """A causal LM, whole on this rank. A question too long, or refused by its template, has no answer."""

    def __init__(self, name, device, args):
        from transformers import AutoModelForCausalLM

        pretrained.check_causal_lm(name)
        self.name = name
        self.device = device
        self.batch_size = args.batch_size
        self.tokenizer = pretrained.load_tokenizer(name, args.chat_template)
        dtype = dist.compute_dtype_of(device)
        self.model = pretrained.from_hub(AutoModelForCausalLM, name, dtype=dtype)
        self.model.to(device).eval().requires_grad_(False)  # rotary frequencies stay in fp32
        pretrained.check_forward(self.model)
        pretrained.set_attention(self.model)
        self.room = models.n_positions(self.model.config)

    def encode(self, question, reserve) -> list[int]:
        """Token ids of the question and the answer's opening; none unless `reserve` more tokens would fit."""
        plain = chat.special_tokens(self.tokenizer).sub
        ids = []
        values = {name: plain("", text) for name, text in question.values.items()}
        turns = [{**turn, "content": plain("", turn["content"])} for turn in question.before]
        turns.append({"role": "user", "content": fill(question.template, values)})
        with contextlib.suppress(ValueError):  # the chat template refuses it
            ids = chat.prompt_ids(self.tokenizer, turns) + self._ids(plain("", question.opening))
        return ids if len(ids) + reserve <= self.room else []

    def _ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def probabilities(self, questions, options) -> torch.Tensor:
        """P(the answer goes on with an option) of each question and option: (n, options). One option's tokens
        may begin another's ("1" and "10"): then the shorter one's probability is that of ending there."""
        p = torch.zeros(len(questions), len(options), dtype=torch.float64)
        rows = [(i, *self._with_options(question, options)) for i, question in enumerate(questions)]
        rows = sorted((row for row in rows if row[1]), key=lambda row: -len(row[1]))
        shared = os.path.commonprefix([ids[:-depth] for _, ids, depth, _ in rows])  # examples: run once
        if checks.recurrent(self.model):  # no keys and values to go on from
            shared = []
        for batch in split(rows, self.batch_size):
            tensors = [torch.tensor(ids[len(shared) :], device=self.device) for _, ids, _, _ in batch]
            depths = [depth for _, _, depth, _ in batch]
            where = [(r, len(tensors[r]) - n + k) for r, n in enumerate(depths) for k in range(n)]
            where = torch.tensor(where, device=self.device).T
            input_ids = torch.nn.utils.rnn.pad_sequence(tensors, True)
            logprobs = models.next_token_logprobs(self.model, input_ids, where, shared).double().split(depths)
            for (i, _, _, paths), row_logprobs in zip(batch, logprobs):
                total = lambda path: sum(row_logprobs[k, x].item() for k, x in enumerate(path))
                reached = [math.exp(total(path)) for path in paths]
                for k, path in enumerate(paths):
                    longer = [j for j, x in enumerate(paths) if x != path and x[: len(path)] == path]
                    p[i, k] = reached[k] - sum(reached[j] for j in longer)
        return p.clamp(min=0)

    def _with_options(self, question, options):
        """(ids of the question, and of the longest option but its last token; how many places at their end
        differ by option; the ids of each option there). An option is written after the opening and a space,
        whose token may change with it."""
        plain = chat.special_tokens(self.tokenizer).sub("", question.opening)
        ends = [self._ids(f"{plain} {x}") for x in options]
        same = len(os.path.commonprefix(ends))
        paths = [tuple(end[same:]) for end in ends]
        longest = max(paths, key=len)
        apart = len(set(paths)) == len(paths) and self.tokenizer.unk_token_id not in sum(paths, ())
        if not apart or not all(path and path[:-1] == longest[: len(path) - 1] for path in paths):
            raise InputError(f"{self.name}: its tokenizer cannot write {', '.join(options)} apart")
        ids = self.encode(question._replace(opening=f"{question.opening} {options[0]}"), reserve=4)
        return ids and [*ids[: len(ids) - len(paths[0])], *longest[:-1]], len(longest), paths

    def generate(self, questions, max_new_tokens, temperature, seed) -> list[tuple[str, bool]]:
        """(text, whether it ended) of one answer to each question, without its opening."""
        if max_new_tokens >= self.room:
            raise InputError(f"--max-new-tokens {max_new_tokens}: {self.name} has {self.room} positions")
        prompts = [self.encode(question, max_new_tokens) for question in questions]
        responses = my_responses(
            self.model, self.tokenizer, [ids for ids in prompts if ids], max_new_tokens=max_new_tokens,
            temperature=temperature, slots=self.batch_size, seed=seed,
        )  # fmt: skip
        answers = ((response.text.strip(), response.finished) for response in responses)
        return [next(answers) if ids else ("", False) for ids in prompts]


def load_labeler(spec, device, args, flag="--model"):
    """A LanguageModel, or what `module:function` gives."""
    if not re.fullmatch(functions.NAMED, spec):
        if args.task in ("sample", "revise") or args.chain_of_thought:
            pretrained.check_sampled(spec)
        return LanguageModel(spec, device, args)
    try:
        labeler = functions.named_function(flag, spec)()
    except Exception as error:  # whatever a user's function raises
        why = f"{type(error).__name__}: {error}"
        raise InputError(f"{flag} {spec}: {why}; wanted a function without arguments") from error
    if not (hasattr(labeler, "probabilities") and hasattr(labeler, "generate")):
        raise InputError(f"{flag} {spec}: it gives no object with `probabilities` and `generate`")
    return labeler


# -- the tasks: (rows of this rank) -> a result a row, or {"failed": why} -------------------------------
def sample(rows, policies, principles, args):
    """Of each row {"responses": [{"text", "model"}], "ai": {"dropped"}}: --responses answers of each of
    `policies`, {name: labeler}, but those that did not end, have no words, or are there already."""
    for group in split(rows, args.batch_size):  # the same groups, and so the same seeds, on any ranks
        questions = []
        texts = [{} for _ in group]
        for row in group:
            questions += [asked(row) for _ in range(args.responses)]
        for place, (name, policy) in enumerate(policies.items()):
            seed = dist.seed_of(args.seed, "sample", place, *(row.number for row in group))
            answers = policy.generate(questions, args.max_new_tokens, args.temperature, seed)
            for i, (text, ended) in enumerate(answers):
                if text and ended:
                    texts[i // args.responses].setdefault(text, name)
        for model_of_text in texts:
            responses = [{"text": text, "model": name} for text, name in model_of_text.items()]
            dropped = args.responses * len(policies) - len(responses)
            result = {"responses": responses, "ai": {"dropped": dropped}}
            yield result if len(responses) > 1 else {**result, "failed": "no two different responses"}


def preamble_and_examples(args):
    paragraphs = [TEXTS["by_principle" if args.constitution else args.preamble]]
    for example in TEXTS["examples"][: args.examples]:
        thoughts = f"{TEXTS['thoughts']} {example['thoughts']}\n" if args.chain_of_thought else ""
        answer = f"{thoughts}{TEXTS['ending']} {example['better']}"
        paragraphs.append(f"{fill(TEXTS['pair'], example)}\n\n{TEXTS['question']}\n{answer}")
    return "".join(f"{part}\n\n" for part in paragraphs)


def label(rows, labeler, principles, args):
    """Of each pair {"chosen", "rejected": its texts, "preference": the probability that the first one is the
    better one, "human", "ai": {"orders": the same in either order, "mass": P("1") + P("2"), the smaller}}. Of
    several chains it is the mean of the preferences of those that answer (self-consistency)."""
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
            rationales = [text for text, _ in answers]
            openings = [f"{TEXTS['thoughts']} {text}\n{TEXTS['ending']}" for text in rationales]
            questions = [q._replace(opening=opening) for q, opening in zip(questions, openings)]
        answers = labeler.probabilities(questions, ("1", "2"))
        for i, text in enumerate(rationales):
            answers[i] *= bool(text)  # without a rationale there is no answer
        chains.append(answers)
    p = torch.stack(chains)  # (chains, questions, 2)
    mass = p.sum(-1)
    answered = mass >= args.min_mass
    # Each chain's distribution counts alike, whatever probability it leaves to other answers
    preferences = torch.where(answered, p[..., 0] / mass, 0).sum(0) / answered.sum(0)
    of_orders = zip(rows, preferences.view(-1, 2).tolist(), mass.mean(0).view(-1, 2).tolist())
    for i, (row, (first, second), masses) in enumerate(of_orders):
        if math.isnan(first + second):  # in one of the orders no chain answered
            yield {"human": row.human, "failed": "neither 1 nor 2"}
            continue
        ai = {"orders": [first, 1 - second], "mass": min(masses)}
        if args.chain_of_thought:
            ai["rationales"] = rationales[2 * i : 2 * i + 2]
        result = {"chosen": row.texts[0], "rejected": row.texts[1], "preference": sum(ai["orders"]) / 2}
        yield {**result, "human": row.human, "ai": ai}


def rater(model):
    """Direct RLAIF: `--scorer common.programs.ai_feedback:rater=MODEL`. Return the function that gives
    (rating - 5.5) / 4.5, -1 to 1; 0 where the labeler's answer is no number from 1 to 10."""
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
    """RLAIF's preference between two responses: `--scorer common.programs.ai_feedback:oracle=MODEL`. Return
    the function that gives the `preference` of `label`, as log odds; 0 where the labeler's answer is none."""
    labeler = load_labeler(model, dist.setup(), Args(), "--scorer common.programs.ai_feedback:oracle")

    def fn(duels):
        items = [Item(0, "", {}, prompt, [a, b]) for prompt, a, b in duels]
        p = [result.get("preference", 0.5) for result in label(items, labeler, ("",), Args())]
        return torch.tensor(p, dtype=torch.float64).logit(eps=1e-12).tolist()

    fn.pairwise = True
    return fn


def asked(row) -> Question:
    """A row's last turn, to be answered behind those before it."""
    return Question("{prompt}", {"prompt": row.prompt[-1]["content"]}, before=copy.deepcopy(row.prompt[:-1]))


def revise(rows, labeler, principles, args):
    """Answer (or take the row's `response`), then R times criticise by a principle drawn at random and
    revise: {"completion", "ai": {"first", "steps": [{"principle", "critique", "revision", "used"}]}}. What
    has no words or did not end changes nothing; a first answer that did not, and stays, is none."""
    calls = itertools.count()

    def write(questions) -> list[tuple[str, bool]]:
        seed = dist.seed_of(args.seed, "revise", next(calls), *(row.number for row in rows))
        return labeler.generate(questions, args.max_new_tokens, args.temperature, seed)

    talks = [{"prompt": message_columns.transcript(row.prompt)} for row in rows]
    answers = iter(write([asked(row) for row in rows if not row.texts]))
    firsts = [(row.texts[0], True) if row.texts else next(answers) for row in rows]
    for talk, (text, _) in zip(talks, firsts):
        talk["response"] = text
    results = [{"first": talk["response"], "steps": []} for talk in talks]
    for r in range(args.revisions):
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
        whole = ended or any(step["used"] for step in result["steps"])
        text = talk["response"] if whole else ""
        yield {"completion": text, "ai": result} if text else {"failed": "no response"}


# -- tasks without a labeler: of all rows at once ------------------------------------------------------
def select(rows, labeler, principles, args):
    """Complexity-first diverse sampling (#InsTag, arXiv:2308.07074, algorithm 1, which Qwen,
    arXiv:2309.16609, section 3.2.1, cites): {} of a row that is chosen. A pass goes over the rows that are
    left, from those with the most tags down, and takes each that has a tag which the pass has not met yet;
    passes go on until --max-rows are taken; None: one pass. Of equally many tags the seed draws the order."""
    counts = collections.Counter()  # of each tag: the passes that have met it, which are the first ones
    pass_of = {}
    tags_of = [tags_of_row(row.begin) for row in rows]
    order = dist.shuffled(len(rows), args.seed, "select")
    for i in sorted(order, key=lambda i: -len(tags_of[i])):
        if tags_of[i]:
            pass_of[i] = min(counts[tag] for tag in tags_of[i])  # those before it have met all its tags
            counts.update(tag for tag in tags_of[i] if counts[tag] == pass_of[i])
    n = args.max_rows or list(pass_of.values()).count(0)
    taken = set(sorted(pass_of, key=pass_of.get)[:n])  # inside a pass they stay in their order
    for i in range(len(rows)):
        why = "other rows with its tags come first" if tags_of[i] else "neither a list of tags nor a category"
        yield {} if i in taken else {"failed": why}


def tags_of_row(row) -> set[str]:
    """The different `tags` of a row, or its `category`; none if it has neither."""
    tags = row.get("tags")
    category = row.get("category")
    tags = tags or ([] if category is None else [str(category)])
    is_list = isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)
    return set(tags) if is_list else set()


def hindsight(rows, labeler, principles, args):
    """Relabelling (arXiv:2302.05206): of each response the prompt under the instruction that it fulfils,
    TEXTS["good"] from --threshold on. A prompt without a response gets that too: so one asks at use, and
    samples for the next round, in which another instruction takes the place of the one asked with."""
    scores = collections.defaultdict(list)
    for row in rows:
        scores[turns_key(row.prompt)] += [row.human for _ in row.texts]
    for row in rows:
        of_prompt = scores[turns_key(row.prompt)]  # of different prompts they need not have the same zero
        threshold = statistics.median(of_prompt) if of_prompt and args.threshold is None else args.threshold
        instruction = TEXTS["bad" if row.texts and row.human < threshold else "good"]
        system = [turn["content"] for turn in row.prompt[:1] if turn["role"] == "system"]
        turn = {"role": "system", "content": "\n\n".join([instruction, *system])}
        result = {"prompt": [turn, *row.prompt[len(system) :]]}
        yield {**result, "completion": row.texts[0], "score": row.human} if row.texts else result


def without_instruction(prompt) -> list[dict]:
    """The messages of a prompt without the instruction that an earlier round of hindsight asked it with."""
    instruction, _, system = prompt[0]["content"].partition("\n\n")
    if prompt[0]["role"] != "system" or instruction not in (TEXTS["good"], TEXTS["bad"]):
        return prompt
    return [{**prompt[0], "content": system}, *prompt[1:]] if system else prompt[1:]


# -- rows ------------------------------------------------------------------------------------------
class Item(NamedTuple):
    number: int  # the row's place in the data set
    key: str  # of batches.random_subset
    begin: dict  # what a row that is written begins with
    prompt: list[dict]
    texts: list[str]  # label: two; revise, hindsight: one or none
    human: float | None = None  # P(texts[0] is the better one) by the row's label; hindsight: the score


ANSWERS = {"revise": ("response",), "hindsight": ("response", "completion")}  # the columns of a response


def read_items(args) -> list[Item]:
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
                raise ValueError("the response is several messages")
            if texts and args.task == "hindsight":
                human = formats.number(values.get("score"))
        for text in texts:
            message_columns.check_messages([*prompt, {"role": "assistant", "content": text}])
        if len({text.strip() for text in texts}) < len(texts):
            raise ValueError("the responses are the same")
        given = {name: values[name] for name in ("category", "is_safety") if name in values}
        start = {"prompt": prompt, **given}
        if args.task == "select":
            values.read.update(values)  # they stay as they are
            start = json.loads(json.dumps(values, default=str))  # a file may hold dates
            start.pop("failed", None)
        return Item(number, f"{number}/{row.where}", {**start, "row": number}, prompt, texts, human)

    rows = mixtures.load_rows(args.dataset, "preferences" if args.task == "label" else "prompts")
    if args.task == "label":
        rows = comparisons.joined(rows)
    items = mapping.read(rows, item, args.dataset, f"rows of {args.task}")
    items = mapping.map_rows(rows, lambda _, given: given[0], args.dataset, zip(items))
    return items if args.task == "select" else random_subset(items, args.max_rows)


TASKS = {task.__name__: task for task in (sample, label, revise, select, hindsight)}
WITHOUT_LABELER = ("select", "hindsight")  # their rows may have columns of the names that metrics_of reads


# -- measures --------------------------------------------------------------------------------------
def metrics_of(rows, failed) -> dict[str, float]:
    """The metrics of summary.json, as docs/use/runs.md defines them."""
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
    if orders:  # each P(texts[0]), shown first and shown second
        metrics["position/decides"] = sum((a > 0.5) != (b > 0.5) for a, b in orders) / len(orders)
        metrics["position/first"] = sum(a + 1 - b for a, b in orders) / (2 * len(orders))
    return {**metrics, **measures.means(answers, {"mass": "mass", "dropped": "dropped"})}


@dataclass
class Args:
    task: Literal["sample", "label", "revise", "select", "hindsight"] = "label"
    """The first word of the command."""
    model: str = ""
    """The labeler, or sample's policy: a causal LM (run directory, folder, hub name), or module:function."""
    other_models: tuple[str, ...] = ()
    """More policies of sample."""
    responses: int = 2
    """Of each policy to a prompt of sample."""
    threshold: float | None = None
    """The least score of a good response of hindsight. None: the median of its prompt's responses."""
    dataset: str = "tiny"
    """sample, select: prompts; label: pairs or rankings, as reward.py takes them; hindsight: `prompt`,
    `response` or `completion`, `score`; revise: prompts, perhaps with a `response` to begin with."""
    output_dir: str = "runs/ai_feedback"
    """The run directory; its rows.jsonl is the data set."""
    chat_template: str | None = None
    """A jinja file, for a tokenizer without a chat template or in place of its own."""
    preamble: Literal["base", "detailed"] = "base"
    """What the labeler is told before the pair."""
    examples: int = 0
    """Solved examples before the pair; common/programs/ai_feedback.toml has 8."""
    chain_of_thought: bool = False
    """Let the labeler compare in words before it answers."""
    chains: int = 1
    """Self-consistency: number of sampled rationales, whose preferences are averaged."""
    constitution: str | None = None
    """A file with a principle on each line, one of which is drawn for each pair, or each revision. None: no
    principle for pairs, common/programs/ai_feedback.toml's for revise."""
    revisions: int = 2
    """R, of revise."""
    max_rows: int | None = None
    """So many of the rows, for select those that it chooses. None: all; of select one pass."""
    max_new_tokens: int = 128
    """Longest rationale, answer, critique or revision."""
    temperature: float = 0.7
    """Of what is sampled; a single chain of thought is greedy."""
    min_mass: float = 0.05
    """Less probability on the options than this is no answer: the row is left out, and counted."""
    batch_size: int = 16
    """Questions of a forward on one rank."""
    chunk_rows: int = 64
    """Rows between two writes: what a crash can cost."""
    seed: int = 0
    """Of principles, samples, and the order of rows with equally many tags."""
    resume: bool = False
    """Go on with the run in output_dir, or begin if there is none."""
    overwrite: bool = False
    """Replace a run that is in the way."""


def check(args):
    check_flags(
        args,
        ("model", args.model or args.task in WITHOUT_LABELER, "the labeler's name"),
        ("other_models", args.task == "sample" or not args.other_models, "none but with sample"),
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
    # only now is an old run in output_dir replaced; its rows are told by their numbers in --dataset
    start_run(args, run.stage, run.status, args.dataset)

    # what is there already
    path = run.folder / "rows.jsonl"
    rows = dist.gather(files.read_jsonl(path) if dist.is_main() else [])
    size = {"sample": args.batch_size, **dict.fromkeys(WITHOUT_LABELER, len(items))}.get(args.task, 1)
    with files.reading(path):
        answered = {int(row["row"]) for row in rows}
    chunks = split(items, max(size, args.chunk_rows))
    todo = [chunk for chunk in chunks if not answered.issuperset(item.number for item in chunk)]
    again = {item.number for chunk in todo for item in chunk}  # a chunk that a crash cut is asked whole
    rows = [row for row in rows if row["row"] not in again]
    if dist.is_main():
        files.write_jsonl(path, rows)

    # loop
    labeler = labelers if args.task == "sample" else labelers.get(args.model)
    with progress.progress(len(items), len(rows), args.task) as bar:
        for chunk in todo:
            shares = split(chunk, size)[dist.rank() :: dist.world_size()]  # what stays together on a rank
            my_items = [item for share in shares for item in share]
            results = zip(my_items, TASKS[args.task](my_items, labeler, principles, args))
            new = dist.gather([{**item.begin, **result} for item, result in results])
            rows += new
            if dist.is_main():
                files.append_jsonl(path, new)
            bar.update(len(chunk))

    # save
    if dist.is_main():
        good = sorted((row for row in rows if "failed" not in row), key=lambda row: row["row"])
        bad = [row for row in rows if "failed" in row]
        files.write_jsonl(run.folder / "failed.jsonl", bad)
        files.write_jsonl(path, good)
        counts = {"rows": len(good), "failed": len(bad)}
        metrics = counts if args.task in WITHOUT_LABELER else metrics_of(good, bad)
        for key, value in metrics.items():
            print(f"{key}: {value:.4g}")
        files.write_json(run.folder / "summary.json", metrics)  # last
        print(f"wrote {path}")


RECIPES = {
    "label": ("soft labels of pairs, for reward.py", Args()),
    "revise": ("answers, criticised and revised, for sft.py", Args(task="revise")),
    "sample": ("different responses to a prompt, for label", Args(task="sample")),
    "select": ("complex rows of diverse tags", Args(task="select")),
    "hindsight": ("responses under an instruction that they fulfil, for sft.py", Args(task="hindsight")),
}

if __name__ == "__main__":
    launch(main, RECIPES)
