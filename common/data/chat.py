"""Turn chat messages into token ids, in the same way everywhere.

The chat template renders the whole dialogue, and the result is tokenised as one text. The ids before an
answer are exactly the ids that generation starts from.
"""

import bisect
import functools
import itertools
import json
import re
from datetime import datetime

import jinja2

from common.errors import InputError

SPECIAL = "the text contains a special token, which would end or open a turn in the middle of it"


class Rewritten(ValueError):
    """The chat template changes an answer, or does not put it directly after its prompt."""


def prompt_ids(tokenizer, messages: list[dict]) -> list[int]:
    """Return the ids that a response follows: the rendered messages and the opening of an answer."""
    text = render(tokenizer, messages, add_generation_prompt=True)
    starts = [start for start, _ in _answers(tokenizer, messages, text).values()]
    return _tokenize(tokenizer, text, starts)[0]


def encode(tokenizer, messages: list[dict], all_turns: bool = False) -> tuple[list[int], list[bool]]:
    """Tokenise a dialogue that ends with the assistant's turn; return (ids, response mask).

    The ids end with the end-of-sequence token of the last answer, which is added if the template does not
    write one. The mask is True for the tokens to learn: the last answer, or all answers with all_turns, each
    from the first token that generation would produce to its end-of-sequence token. Answers of weight 0 are
    not learnt. If the template rewrites earlier answers, only the last one is learnt.

    Raises ValueError, with the reason, if the dialogue cannot be encoded in this way."""
    if any(special_tokens(tokenizer).search(str(text)) for turn in messages for text in turn.values()):
        raise ValueError(SPECIAL)
    text = render(tokenizer, messages)
    answers = _answers(tokenizer, messages, text)
    if len(messages) - 1 not in answers:
        raise Rewritten("the chat template changes the answer or does not put it directly after its prompt")
    if len(answers) < sum(message["role"] == "assistant" for message in messages[1:]):
        all_turns = False  # the template rewrites earlier answers: learn only the last one
    ids, ends = _tokenize(tokenizer, text, [start for start, _ in answers.values()])
    mask = [False] * len(ids)
    for i in list(answers)[0 if all_turns else -1 :]:
        start, end = answers[i]
        last = min(bisect.bisect_left(ends, end), len(ends) - 1)  # the first token to end there
        # Several tokens may end at the same place: the bytes of one character
        tokens = slice(bisect.bisect_right(ends, start), bisect.bisect_right(ends, ends[last]))
        mask[tokens] = [messages[i].get("weight") != 0] * len(mask[tokens])
    ids, mask = ids[: tokens.stop], mask[: tokens.stop]
    if ids[-1] != tokenizer.eos_token_id:  # the template does not end turns, but the model has to learn it
        ids, mask = [*ids, tokenizer.eos_token_id], [*mask, messages[-1].get("weight") != 0]
    if not any(mask):
        raise ValueError("no answer is left to learn: all have weight 0")
    return ids, mask


def encode_responses(tokenizer, prompt: list[dict], texts: list[str]) -> tuple[list[int], list[list[int]]]:
    """Tokenise a prompt and each of its responses as `encode` does; return (prompt ids, response ids)."""
    dialogues = [encode(tokenizer, [*prompt, {"role": "assistant", "content": text}]) for text in texts]
    start = min(mask.index(True) for _, mask in dialogues)
    return dialogues[0][0][:start], [ids[start:] for ids, _ in dialogues]


@functools.lru_cache(maxsize=4)
def special_tokens(tokenizer):
    """Compile a pattern that matches any special token of the tokenizer."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(map(re.escape, {*added, *tokenizer.all_special_tokens})))


def without_special_tokens(tokenizer, text: str) -> str:
    """Remove special tokens from a text, also those that only appear once others have been removed."""
    while (shorter := special_tokens(tokenizer).sub("", text)) != text:
        text = shorter
    return text


def check_known(tokenizer, ids):
    """Raise ValueError if most of these ids are the token for unknown words."""
    unknown = tokenizer.unk_token_id  # GPT-2's is its end-of-sequence token
    if unknown not in (None, tokenizer.eos_token_id) and 2 * ids.count(unknown) > len(ids):
        raise ValueError("the tokenizer does not know most of its words: check --model")


def _answers(tokenizer, messages, text) -> dict[int, tuple[int, int]]:
    """Find the assistant's answers in `text`, the rendered dialogue.

    Returns {index of the message: (start, end)}, in characters. An answer starts after the opening that
    generation starts from and ends after its end-of-sequence token. Answers that the template rewrites
    once more turns follow are missing, as in templates that drop earlier thoughts, and so are answers that it
    shortens."""
    answers = {}
    for i in range(1, len(messages)):
        if messages[i]["role"] != "assistant":
            continue
        done = render(tokenizer, messages[: i + 1])
        opening = before = render(tokenizer, messages[:i], add_generation_prompt=True)
        if not done.startswith(opening):  # DeepSeek R1 and Gemma 4 open a thought only for generation
            before = render(tokenizer, messages[:i])
        answer, end, _ = done[len(before) :].partition(tokenizer.eos_token)
        content = messages[i]["content"]
        content = content if content in answer else content.strip()
        if content not in answer and "".join(content.split()) not in "".join(answer.split()):
            continue  # white space may differ, but nothing else
        start = 0 if before == opening else answer.rfind(content)
        # A thought, or another key, that is rendered before the content would be left out of the answer
        lost = start and messages[i].keys() - {"role", "content", "weight"}
        if start >= 0 and not lost and text.startswith(before + answer + end):
            answers[i] = len(before) + start, len(before + answer + end)
    return answers


class Clock(datetime):
    """The clock of chat templates that write the date (strftime_now), stopped at the start of the run.

    The texts of a run stay the same when it is resumed or continues past midnight."""

    began = datetime.now()

    @classmethod
    def now(cls, tz=None):
        return cls.began


def render(tokenizer, messages, add_generation_prompt=False):
    """Render messages with the chat template. Raises ValueError if the template refuses them."""
    turns = json.dumps(messages, default=str)
    return _rendered(tokenizer, str(tokenizer.chat_template), turns, add_generation_prompt)


@functools.lru_cache(maxsize=256)  # responses to one prompt share the rendering of its turns
def _rendered(tokenizer, _, turns, opened):
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = Clock  # strftime_now looks it up here
    try:
        return tokenizer.apply_chat_template(json.loads(turns), tokenize=False, add_generation_prompt=opened)
    except (jinja2.TemplateError, TypeError) as error:  # it refuses a role, or a thought in parts
        raise ValueError(f"the chat template refuses the dialogue: {error}") from None


def _tokenize(tokenizer, text, starts):
    """Tokenise a rendered dialogue; return (ids, where each token ends in the text).

    The text is tokenised in one piece, but cut at the start of an answer wherever the tokens before it would
    otherwise differ from those that generation starts from. That is the case if a token spans the start (some
    tokenizers leave white space out of its offset), and after two white spaces, which some merge only at the
    end of a text.

    starts: where answers start, in characters."""
    if not tokenizer.is_fast:
        raise InputError("--model: its tokenizer has no tokenizer.json. Save it as a fast tokenizer first")

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
    inside = [x for x, i in after.items() if i < len(spans) and (spans[i - 1][1] if i else 0) < x]
    ids, spans = tokens(sorted({*cuts, *inside})) if inside else (ids, spans)
    return ids, [last for _, last in spans]
