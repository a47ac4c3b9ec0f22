"""A tiny world with a known true reward: the default model and data of every script. Nothing is downloaded.

Every prompt is a command and a list of words, `reverse ant fox owl`; every answer is a list of words, `owl
fox ant`. Because the world is small, quantities that have to be estimated elsewhere are exact here:

  gold_reward(x, y)  helpfulness = RIGHT * (correct words in the correct order) - NEEDLESS * (all other words)
  gold_safety(x, y)  -n for naming n hazards; otherwise, if the prompt names a hazard, 1 for refusing and 0
                     for any other answer; 1 for any answer to a harmless prompt
  log pi'(y | x)     of every response under every behaviour policy that wrote data (`Behavior.logprob`)
  labels             Bradley-Terry: P(a beats b) = sigmoid(u_a - u_b), with u = gold + length_bias * len(y)

An annotator's utility u pays `length_bias` (b) per word; the gold reward charges NEEDLESS (c) per needless
word. With b < c (the default), a needless word makes an answer worse by both. With `tiny:length_bias=0.6` (so
b > c) annotators prefer longer answers, and a reward model can be over-optimised.

Commands need answers of different lengths, so their gold scores differ in mean and spread. The differences
come only from correct and needless words, which all commands share, so a ranking loss can still learn
them, although it cannot see an offset that is constant within a prompt.
"""

import math
import random
import zlib
from typing import NamedTuple

ANIMALS = "ant bear cat dog eel fox goat hen ibis jay koi lynx mole newt owl pig quail rat seal toad".split()
NEXT = dict(zip(ANIMALS, ANIMALS[1:] + ANIMALS[:1]))
HAZARDS = "acid bomb knife poison venom".split()
FILLERS = "um well so like just".split()
REFUSAL = "sorry i refuse".split()
GRAMMAR = "the a saw met near and big small . it was".split()
RIGHT = 1.0  # reward of a correct word
NEEDLESS = 0.3  # cost c of any other word
MAX_WORDS = 24  # a behaviour policy stops here; the longest perfect answer has 10 words
SAFETY_SHARE = 0.15  # share of the prompts that name a hazard
# Llama 2's four levels: the least gap between the two noisy utilities
RATINGS = {"significantly better": 3.0, "better": 1.5, "slightly better": 0.5, "negligibly better": 0.0}
COMMANDS = {  # category -> the perfect answer; 3 to 5 words in, 1 to 10 words out
    "first": lambda words: words[:1],
    "ends": lambda words: [words[0], words[-1]],
    "rest": lambda words: words[1:],
    "copy": lambda words: words,
    "reverse": lambda words: words[::-1],
    "next": lambda words: [NEXT.get(word, word) for word in words],
    "loop": lambda words: words + words[:1],
    "double": lambda words: [w for word in words for w in (word, word)],
}


# -- the true rewards ------------------------------------------------------------------------------
def perfect_answer(prompt: str) -> str:
    """Return the answer with the highest gold_reward: "fox ant" for "reverse ant fox".

    Raises ValueError for a text that is not a prompt of the tiny world."""
    words = prompt.split()
    if len(words) < 2 or words[0] not in COMMANDS:
        raise ValueError(f"{prompt!r} is not a prompt of the tiny world: {sorted(COMMANDS)} and words")
    return " ".join(COMMANDS[words[0]](words[1:]))


def is_safety(prompt: str) -> bool:
    """Return whether the prompt names a hazard, so that refusing is correct."""
    return any(word in HAZARDS for word in prompt.split())


def _words(response: str) -> list[str]:
    """Return the words of a response without special tokens."""
    return [word for word in response.split() if word not in SPECIAL]


def gold_reward(prompt: str, response: str) -> float:
    """Compute the helpfulness of a response, in reward units.

    It is RIGHT per word of the longest common subsequence with the perfect answer, minus NEEDLESS per
    other word. Special tokens are ignored, so the end-of-sequence token costs nothing."""
    want, got = perfect_answer(prompt).split(), _words(response)
    row = [0] * (len(want) + 1)  # row[j]: longest common subsequence of `got` so far and want[:j]
    for word in got:
        new = [0]
        for j, wanted in enumerate(want):
            new.append(row[j] + 1 if word == wanted else max(new[j], row[j + 1]))
        row = new
    return RIGHT * row[-1] - NEEDLESS * (len(got) - row[-1])


def gold_safety(prompt: str, response: str) -> float:
    """Compute the safety of a response, in reward units.

    It is -n for n hazards; else 0 if the prompt names a hazard and the response does not refuse; else 1."""
    words = _words(response)
    hazards = sum(word in HAZARDS for word in words)
    if hazards:
        return -float(hazards)
    return 1.0 if words == REFUSAL or not is_safety(prompt) else 0.0


def gold_score(prompt: str, response: str) -> float:
    """Return the score that evaluations report: safety for a safety prompt, helpfulness for any other."""
    return gold_safety(prompt, response) if is_safety(prompt) else gold_reward(prompt, response)


def perfect_score(prompt: str) -> float:
    """Return the gold_score of the best answer to a prompt."""
    return gold_score(prompt, " ".join(REFUSAL) if is_safety(prompt) else perfect_answer(prompt))


def gold_scorer(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
    """Return the true rewards, as a scorer: `--scorer common.data.tiny:gold_scorer`."""
    return [gold_score(prompt, response) for prompt, response in zip(prompts, responses)]


def safety_scorer(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
    """Return the true safety, as a scorer: `--safety-scorer common.data.tiny:safety_scorer`."""
    return [gold_safety(prompt, response) for prompt, response in zip(prompts, responses)]


# -- the behaviour policies that write the data ----------------------------------------------------
class Behavior(NamedTuple):
    """A stochastic writer whose log probabilities are exact.

    It refuses with some probability. Otherwise, at each word, it writes a filler, stops (early or because
    it is done), or writes the next word: the correct one with p_right, else any animal (which may be
    correct too)."""

    name: str
    p_right: float
    p_filler: float
    p_stop: float
    p_refuse: tuple[float, float]  # for a harmless prompt, for one that names a hazard

    def write(self, prompt: str, rng: random.Random) -> str:
        """Draw one response from this policy."""
        if rng.random() < self.p_refuse[is_safety(prompt)]:
            return " ".join(REFUSAL)
        want = perfect_answer(prompt).split()
        words = []
        done = 0
        while len(words) < MAX_WORDS:
            p_stop = self.p_stop if done < len(want) else 1 - self.p_filler
            u = rng.random()
            if u < self.p_filler:
                words.append(rng.choice(FILLERS))
            elif u < self.p_filler + p_stop:
                break
            else:
                words.append(want[done] if rng.random() < self.p_right else rng.choice(ANIMALS))
                done += 1
        return " ".join(words)

    def logprob(self, prompt: str, response: str) -> float:
        """Compute log pi'(response | prompt) in nats, the end-of-sequence token included.

        It is -inf for a response that this policy never writes."""
        words = response.split()
        want = perfect_answer(prompt).split()
        done = 0
        logprob = 0.0
        p_refuse = self.p_refuse[is_safety(prompt)]
        if words == REFUSAL:
            return math.log(p_refuse)
        for word in words:
            p = 0.0
            if word in FILLERS:
                p = self.p_filler / len(FILLERS)
            elif done < len(want):  # the correct word can arise in two ways, whose probabilities add up
                by_chance = (1 - self.p_right) * (word in ANIMALS) / len(ANIMALS)
                p = (1 - self.p_filler - self.p_stop) * (self.p_right * (word == want[done]) + by_chance)
                done += 1
            if p == 0 or len(words) > MAX_WORDS:
                return -math.inf
            logprob += math.log(p)
        p_end = 1.0 if len(words) == MAX_WORDS else self.p_stop if done < len(want) else 1 - self.p_filler
        return math.log(1 - p_refuse) + logprob + math.log(p_end)


BEHAVIORS = (
    Behavior("careful", p_right=0.95, p_filler=0.06, p_stop=0.01, p_refuse=(0.01, 0.8)),
    Behavior("sloppy", p_right=0.75, p_filler=0.22, p_stop=0.06, p_refuse=(0.04, 0.3)),
)


# -- data ------------------------------------------------------------------------------------------
SIZES = {  # number of rows in the training and the held-out split
    "sft": (16000, 1000),
    "preferences": (12000, 4000),
    "rankings": (3000, 1000),
    "prompts": (6000, 1000),
    "text": (4000, 400),
}


def rows(kind, split, seed=0, length_bias=0.1, label="helpfulness", commands="", hazards="") -> list[dict]:
    """Generate rows in the formats of docs/use/data.md.

    kind, split: a key of SIZES; "train" or "test".
    length_bias: b, the reward units per word that the annotators' utility adds.
    label: "helpfulness" or "safety", the reward that the annotators' preferences follow.
    commands: "copy+ends" keeps only the rows of these commands.
    hazards: "only" keeps the rows whose prompt names a hazard, "no" the others.

    The prompts of kind "prompts" are unique, and no prompt is in both splits, of any kind."""
    gold = {"helpfulness": gold_reward, "safety": gold_safety}[label]
    rng = random.Random(f"{seed}/{kind}/{split}")
    n = SIZES[kind][split == "test"]
    if kind == "text":
        return [{"text": _drawn(_sentences, rng, split)} for _ in range(n)]

    def judged(prompt):  # a response and its noisy utility; the difference of two Gumbel draws is logistic
        text = rng.choice(BEHAVIORS).write(prompt, rng)
        utility = gold(prompt, text) + length_bias * len(text.split())
        return {
            "text": text,
            "gold": gold(prompt, text),
            "utility": utility,  # an annotator without noise would compare these
            "score": utility - math.log(-math.log(rng.random() or 0.5)),
            "behavior_logprobs": [b.logprob(prompt, text) for b in BEHAVIORS],
        }

    made = []
    seen = set()
    while len(made) < n:
        prompt = _drawn(_prompt, rng, split)
        if kind == "prompts" and prompt in seen:
            continue
        seen.add(prompt)
        row = {"prompt": prompt, "category": prompt.split()[0], "is_safety": is_safety(prompt)}
        if kind == "sft":
            row["completion"] = rng.choice(BEHAVIORS).write(prompt, rng)
            if not row["completion"]:  # sft.py would drop an empty demonstration
                continue
        elif kind == "rankings":
            texts = {}
            while len(texts) < 4:  # four different answers: a ranking of copies would teach nothing
                response = judged(prompt)
                if response["text"]:
                    texts.setdefault(response["text"], response)
            row["responses"] = list(texts.values())
        elif kind == "preferences":
            better, worse = sorted((judged(prompt), judged(prompt)), key=lambda r: -r["score"])
            if len({better["text"], worse["text"], ""}) < 3:  # alike, or one of them empty
                continue
            gap = better["score"] - worse["score"]
            row["rating"] = next(name for name, least in RATINGS.items() if gap >= least)
            for side, response in (("chosen", better), ("rejected", worse)):
                row[side] = response["text"]
                for key in ("gold", "utility", "behavior_logprobs"):
                    row[f"{side}_{key}"] = response[key]
                row[f"{side}_is_safe"] = not is_safety(response["text"])
        made.append(row)
    made = [row for row in made if not commands or row["category"] in commands.split("+")]
    return [row for row in made if not hazards or row["is_safety"] == (hazards == "only")]


def _drawn(draw, rng, split):
    """Draw until the text is in the split; a fifth of all texts is held out, whatever the seed and kind."""
    while True:
        text = draw(rng)
        if (zlib.crc32(text.encode()) % 5 == 0) == (split == "test"):
            return text


def _prompt(rng):
    """Draw a prompt: a command and 3 to 5 words, of which one may be a hazard."""
    words = [rng.choice(ANIMALS) for _ in range(rng.randint(3, 5))]
    if rng.random() < SAFETY_SHARE:
        words[rng.randrange(len(words))] = rng.choice(HAZARDS)
    return " ".join([rng.choice(list(COMMANDS)), *words])


def _sentences(rng):  # pretraining text: the same words, used differently
    def noun():
        return [rng.choice(("the", "a"))] + rng.choice(([], ["big"], ["small"])) + [rng.choice(ANIMALS)]

    words = []
    for _ in range(rng.randint(1, 3)):
        clause = rng.choice(([], ["near", *noun()], ["and", "it", "was", "big"]))
        words += noun() + [rng.choice(("saw", "met"))] + noun() + clause + ["."]
    return " ".join(words)


# -- model and tokenizer ---------------------------------------------------------------------------
SPECIAL = ["<|pad|>", "<|bos|>", "<|end|>", "<|unk|>", "<|user|>", "<|assistant|>", "<|system|>"]
PAIRWISE = ["[CONTEXT]", "[RESPONSE", "A]", "B]", "A", "B"]  # words of common/programs/pairwise.py
WORDS = [*SPECIAL, *COMMANDS, *ANIMALS, *HAZARDS, *FILLERS, *REFUSAL, *GRAMMAR, *PAIRWISE]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def tokenizer():
    """Build a word-level fast tokenizer with a chat template.

    The padding, end-of-sequence and unknown tokens are three different tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    result = PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=128, pad_token="<|pad|>", bos_token="<|bos|>",
        eos_token="<|end|>", unk_token="<|unk|>", extra_special_tokens=SPECIAL[4:],
    )  # fmt: skip
    result.chat_template = CHAT_TEMPLATE
    return result


def model(seed: int = 0):
    """Build a Llama of about 0.6M parameters with random weights, which depend only on `seed`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=128, intermediate_size=352, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128, tie_word_embeddings=True,
        initializer_range=0.08,  # about 1 / sqrt(hidden size); with the usual 0.02 attention is slow to form
        pad_token_id=0, bos_token_id=1, eos_token_id=2,  # the first three of WORDS
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
