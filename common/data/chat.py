"""Chat messages -> token ids, in one way everywhere.

The chat template renders the whole dialogue, which is tokenised as one text. Up to an answer, its ids are
exactly those that generation starts from.
"""

import bisect
import functools
import itertools
import json
import re
from datetime import datetime

import jinja2

from common.errors import InputError

SPECIAL = "the text holds a special token, which would end or open a turn in its middle"


class Rewritten(ValueError):
    """A chat template writes an answer in another way than it is."""


def prompt_ids(tokenizer, messages: list[dict]) -> list[int]:
    """The ids that a response to `messages` follows: the rendered turns and the opening of an answer."""
    text = render(tokenizer, messages, add_generation_prompt=True)
    starts = [start for start, _ in _answers(tokenizer, messages, text).values()]
    return _tokenize(tokenizer, text, starts)[0]


def encode(tokenizer, messages: list[dict], all_turns: bool = False) -> tuple[list[int], list[bool]]:
    """(ids, response mask) of a dialogue that ends with the assistant's turn, rendered up to the last
    answer's end token, which is added where the template writes none. Targets are the last answer, or every
    one, from where generation begins it to its end token. ValueError says why a dialogue has no such form."""
    if any(special_tokens(tokenizer).search(str(text)) for turn in messages for text in turn.values()):
        raise ValueError(SPECIAL)
    text = render(tokenizer, messages)
    answers = _answers(tokenizer, messages, text)
    if len(messages) - 1 not in answers:
        raise Rewritten("the chat template does not write the answer as it is right after its prompt")
    if len(answers) < sum(message["role"] == "assistant" for message in messages[1:]):
        all_turns = False  # the template rewrites earlier ones
    ids, ends = _tokenize(tokenizer, text, [start for start, _ in answers.values()])
    mask = [False] * len(ids)
    for i in list(answers)[0 if all_turns else -1 :]:
        start, end = answers[i]
        last = min(bisect.bisect_left(ends, end), len(ends) - 1)  # or one of several bytes of a character
        tokens = slice(bisect.bisect_right(ends, start), bisect.bisect_right(ends, ends[last]))
        mask[tokens] = [messages[i].get("weight") != 0] * len(mask[tokens])
    ids, mask = ids[: tokens.stop], mask[: tokens.stop]
    if ids[-1] != tokenizer.eos_token_id:  # the template ends no turns, but the model must learn to
        ids, mask = [*ids, tokenizer.eos_token_id], [*mask, messages[-1].get("weight") != 0]
    if not any(mask):
        raise ValueError("no answer is left to learn: their weight is 0")
    return ids, mask


def encode_responses(tokenizer, prompt: list[dict], texts: list[str]) -> tuple[list[int], list[list[int]]]:
    """(prompt ids, ids of each response), as `encode` gives them for each of the dialogues."""
    dialogues = [encode(tokenizer, [*prompt, {"role": "assistant", "content": text}]) for text in texts]
    start = min(mask.index(True) for _, mask in dialogues)
    return dialogues[0][0][:start], [ids[start:] for ids, _ in dialogues]


@functools.lru_cache(maxsize=4)
def special_tokens(tokenizer):
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(map(re.escape, {*added, *tokenizer.all_special_tokens})))


def check_known(tokenizer, ids):
    """ValueError if most of these tokens stand for words that the tokenizer does not know."""
    unknown = tokenizer.unk_token_id  # GPT-2's is another name of its end token
    if unknown not in (None, tokenizer.eos_token_id) and 2 * ids.count(unknown) > len(ids):
        raise ValueError("the tokenizer knows few of its words: is it the right --model?")


def _answers(tokenizer, messages, text) -> dict[int, tuple[int, int]]:
    """{place among the messages: (start, end) in `text`, the rendered dialogue} of the assistant's answers,
    from the end of the opening that generation starts from to that of the end token. Without those that the
    template writes in another way once more turns follow, as templates do that drop thoughts."""
    answers = {}
    for i in range(1, len(messages)):
        if messages[i]["role"] != "assistant":
            continue
        done = render(tokenizer, messages[: i + 1])
        opening = before = render(tokenizer, messages[:i], add_generation_prompt=True)
        if not done.startswith(opening):  # only generation opens a thought, in DeepSeek R1's and Gemma 4's
            before = render(tokenizer, messages[:i])
        answer, end, _ = done[len(before) :].partition(tokenizer.eos_token)
        content = messages[i]["content"]
        content = content if content in answer else content.strip()
        start = 0 if before == opening else answer.rfind(content)
        lost = start and messages[i].keys() - {"role", "content", "weight"}  # a thought before it, for one
        if start >= 0 and not lost and text.startswith(before + answer + end):
            answers[i] = len(before) + start, len(before + answer + end)
    return answers


class Clock(datetime):
    """The clock of chat templates that write the date (strftime_now). It stands where the run began: texts of
    a resumed run, or of one that lasts over midnight, are then the same ones."""

    began = datetime.now()

    @classmethod
    def now(cls, tz=None):
        return cls.began


def render(tokenizer, messages, add_generation_prompt=False):
    turns = json.dumps(messages, default=str)
    return _rendered(tokenizer, str(tokenizer.chat_template), turns, add_generation_prompt)


@functools.lru_cache(maxsize=256)  # the responses to a prompt share the renderings of its turns
def _rendered(tokenizer, _, turns, opened):
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = Clock  # what strftime_now asks
    try:
        return tokenizer.apply_chat_template(json.loads(turns), tokenize=False, add_generation_prompt=opened)
    except (jinja2.TemplateError, TypeError) as error:  # of one that refuses roles, or a thought in parts
        raise ValueError(f"the chat template refuses it: {error}") from None


def _tokenize(tokenizer, text, starts):
    """(ids of `text`, where in it each token ends), of the text as one; but cut at those of `starts`, where
    answers begin, at which the tokens before would be others than those that generation starts from: inside a
    token, and after two white spaces, which some tokenizers join at the end of a text alone."""
    if not tokenizer.is_fast:
        raise InputError("--model: a tokenizer without tokenizer.json does not say where its tokens end")

    def tokens(cuts):
        ids, spans = [], []
        for begin, end in itertools.pairwise([0, *cuts, len(text)]):
            piece = tokenizer(text[begin:end], add_special_tokens=False, return_offsets_mapping=True)
            ids += piece["input_ids"]
            spans += [(begin + first, begin + last) for first, last in piece["offset_mapping"]]
        return ids, spans

    cuts = [start for start in starts if text[start - 2 : start].isspace()]
    ids, spans = tokens(cuts)
    after = {start: bisect.bisect_right(spans, start, key=lambda span: span[1]) for start in starts}
    inside = [start for start, i in after.items() if i < len(spans) and spans[i][0] < start]
    ids, spans = tokens(sorted({*cuts, *inside})) if inside else (ids, spans)
    return ids, [last for _, last in spans]
