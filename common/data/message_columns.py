"""Read chat messages, {role, content}, from the columns of a row. See docs/use/data.md for the formats.

Every reader raises a ValueError with the reason if its row is wrong; mapping.py counts and prints them.
"""

import contextlib
import re

from common.data import formats
from common.data.formats import WrongColumns

DIALOGUES = ("messages", "conversations", "context_messages", "trajectory")  # columns that hold messages

ALIASES = {
    "system": "system developer", "user": "user human prompter",
    "assistant": "assistant gpt chatgpt bing bard claude model bot ai",
}  # fmt: skip
ROLES = {alias: role for role, aliases in ALIASES.items() for alias in aliases.split()}
FLAGS = ("weight", "train", "training", "loss")  # keys of a message; false or 0: it is not learnt
CALLS = ("tool_calls", "function_call")
MALFORMED = "a message is not {role, content} with a text for each"


def sft_messages(row: dict) -> tuple[list[dict], bool]:
    """Read a demonstration: (messages that end with the assistant's turn, all_turns).

    all_turns is True if every assistant turn is to be learnt, False if only the last one is. A turn that
    the row excludes from training has `weight` 0. docs/use/data.md lists the columns. Raises ValueError, with
    the reason, if the row is no demonstration."""
    row = formats.cells(row)
    # KTO's rows have a label; a completion that the label calls bad is not learnt
    if "label" in row and "chosen" not in row and "responses" not in row:
        if row["label"] not in (False, True):
            raise formats.unreadable("label", row["label"], "neither true nor false")
        if not row["label"]:
            raise ValueError("its label is false, so the completion is not learnt")
    dialogue = dialogue_of(row)
    if dialogue and dialogue[-1]["role"] == "assistant":
        return check_messages(dialogue, row), True
    if "responses" in row and prompt_of(row) is not None:
        texts, scores = ranking(row["responses"])
        messages = answered(row, texts[scores.index(max(scores))] if texts else None)
    elif "chosen" in row:
        messages = answered(row, row.get(likelier(row)))
    elif "completion" in row and prompt_of(row):
        answer = turns(row["completion"], "assistant")
        if sum(turn["role"] == "assistant" for turn in answer) > 1:
            raise ValueError("the completion has several answers: write the dialogue as messages")
        messages = answered(row, answer)
    elif "output" in row and "instruction" in row:
        messages = answered(row, row["output"], instruction(row))
    elif row.keys() & {*DIALOGUES, "completion", "output", "responses", "chosen"} and prompt_of(row):
        raise ValueError("no response")
    else:
        raise WrongColumns(row, "SFT")
    return check_messages(messages, row), False


def likelier(row) -> str:
    """Return the side of a pair, chosen or rejected, that its soft label prefers; chosen without a label."""
    return "rejected" if formats.number(formats.cells(row).get("preference", 1)) < 0.5 else "chosen"


def dialogue_of(row) -> list[dict]:
    """Return the messages of the first column of DIALOGUES that the row has, or []."""
    return next((turns(row[name]) for name in DIALOGUES if row.get(name)), [])


def prompt_of(row, text=None) -> list[dict] | None:
    """Return the messages before an answer, or None if the row has no prompt.

    They come from a column with a dialogue, or from a question with the column `history` before it.

    text: a question to use instead of the row's own dialogue or question."""
    dialogue = dialogue_of(row) if text is None else []
    while dialogue and dialogue[-1]["role"] == "assistant":
        dialogue.pop()
    if dialogue:
        return dialogue
    text = question(row) if text is None else text
    if text is None:
        return None
    history = row.get("history", [])
    earlier = []
    if history in ("", text):  # SHP's history is the prompt itself
        history = []
    for turn in history if isinstance(history, list) else [history]:
        if not isinstance(turn, list) or len(turn) != 2:
            raise formats.unreadable("history", history, "not a list of [question, answer]")
        earlier += turns(turn[0], "user") + turns(turn[1], "assistant")
    return earlier + turns(text, "user")


def question(row):
    """Return the column `prompt`, else the row's `instruction`, else None."""
    if "prompt" in row:
        return row["prompt"]
    return instruction(row) if "instruction" in row else None


def instruction(row):
    """Return the column `instruction`, followed by the text of `input`, or either if the other is empty."""
    text = row["instruction"]
    extra = row.get("input")
    if not isinstance(extra, str | None):
        raise ValueError(f"input is {type(extra).__name__}, not text")
    return "\n\n".join(filter(None, [text, extra])) if isinstance(text, str) else text


def answered(row, answer, text=None) -> list[dict]:
    """Return the messages of the row's prompt, followed by this answer.

    The answer may be a whole dialogue. If the row has a prompt too, the dialogue must contain it; only a
    system turn may be missing, and is added. Raises ValueError otherwise.

    text: as in prompt_of."""
    prompt = prompt_of(row, text)
    if prompt is not None and not is_dialogue(answer):
        return prompt + turns(answer, "assistant")
    dialogue = turns(answer)
    there = [(turn["role"], turn["content"].strip()) for turn in dialogue]
    missing = [turn for turn in prompt or [] if (turn["role"], turn["content"].strip()) not in there]
    if any(turn["role"] != "system" for turn in missing) or missing and there[0][0] == "system":
        raise ValueError("the dialogue does not contain the prompt of its row")
    return missing + dialogue


def is_dialogue(value):
    """Return whether a value is a whole dialogue: messages that do not begin with an answer, or HH text."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return ROLES.get(str(value[0].get("role") or value[0].get("from")).lower()) != "assistant"
    return isinstance(value, str) and value.startswith("\n\nHuman:")


def ranking(responses) -> tuple[list[str], list[float]]:
    """Return (texts, scores) of a list of {text, score}. Raises ValueError for any other value."""
    with contextlib.suppress(TypeError, KeyError, ValueError):
        texts, scores = [r["text"] for r in responses], [formats.number(r["score"]) for r in responses]
        if all(isinstance(text, str) for text in texts):
            return texts, scores
    raise ValueError("responses is not a list of {text, score}")


def turns(value, role=None):
    """Convert the value of a column to messages.

    The value is a message or a list of messages; or the text of one turn of `role`; or, for a prompt or
    without a role, an HH-RLHF dialogue, "\\n\\nHuman: ... \\n\\nAssistant: ..."."""
    if isinstance(value, list | dict):
        return [message(turn) for turn in (value if isinstance(value, list) else [value])]
    column = "prompt" if role == "user" else "response"
    if role and value is None:
        raise ValueError(f"no {column}")
    if role and not isinstance(value, str):
        raise ValueError(f"the {column} is {type(value).__name__}, not text or messages")
    if role and not (role == "user" and is_dialogue(value)):
        return [{"role": role, "content": value}]
    pieces = re.split(r"\n\n(Human|Assistant): ?", value) if isinstance(value, str) else [""]
    if pieces[0].strip() or len(pieces) < 3:
        raise ValueError("neither a list of messages nor a dialogue of \\n\\nHuman: and \\n\\nAssistant:")
    if role and not pieces[-1].strip():  # a final "\n\nAssistant:" only opens the answer
        pieces = pieces[:-2]
    names = {"Human": "user", "Assistant": "assistant"}
    return [{"role": names[who], "content": text} for who, text in zip(pieces[1::2], pieces[2::2])]


def message(value) -> dict:
    """Convert a message, which may be one of ShareGPT's, to {role, content}.

    `weight` 0 is added if the message says that it is not to be learnt. Keys that the chat template uses
    are kept. Raises ValueError if anything else that matters would be lost, such as a tool call."""
    value = formats.cells(value)
    name = isinstance(value, dict) and (value["role"] if "role" in value else value.get("from"))
    if not isinstance(name, str):
        raise ValueError(MALFORMED)
    if name.strip().lower() not in ROLES:
        raise ValueError(f"a message has role {repr(name)[:40]}, not system, user or assistant")
    for key in CALLS:
        if value.get(key):
            raise ValueError(f"a message has {key}, which are not supported")
    made = {"role": ROLES[name.strip().lower()], "content": text_of(value)}
    for key in FLAGS:
        if key in value and value[key] not in (0, 1):
            raise ValueError(f"{key} of a message is {repr(value[key])[:40]}, not 0 or 1")
        if key in value and not value[key]:
            made["weight"] = 0
    read_keys = {"role", "from", "content", "value", *FLAGS, *CALLS}
    more = {key: value[key] for key in value if key in value and key not in read_keys and value.passes(key)}
    return {**made, **{key: x for key, x in more.items() if x not in ("", [], {})}}  # "": no thought


def content_of(answer: dict) -> str:
    """Return the content of an answer to compare or score; ValueError if it has more, such as a thought."""
    if more := answer.keys() - {"role", "content"}:
        raise ValueError(f"an answer has {', '.join(sorted(more))}: only demonstrations may have it")
    return answer["content"]


def text_of(message: dict) -> str:
    """Return the content of a message; the text of its parts is joined.

    Raises ValueError if a part is not text, so that nothing is lost."""
    content = message["content"] if "content" in message else message.get("value")
    if isinstance(content, list) and content:
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"a message has a part of type {repr(kind)[:40]}, not text")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError("the content of a message is null" if content is None else MALFORMED)
    return content


def check_messages(messages, row=None) -> list[dict]:
    """Check messages that end with the assistant's turn, and return them as `message` converts them.

    If they have no system turn, the text of the row's column `system` becomes their first turn. Raises
    ValueError, with the reason, if the messages cannot be used."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("no messages")
    messages = [message(turn) for turn in messages]
    *earlier, last = [(m["role"], m["content"].strip()) for m in messages]
    if last[0] != "assistant" or not last[1]:
        raise ValueError("no response")
    if ("assistant", "") in earlier:
        raise ValueError("an earlier answer is empty")
    if not any(text for _, text in earlier):
        raise ValueError("no prompt")
    if row and all(m["role"] != "system" for m in messages) and row.get("system"):
        if not isinstance(row["system"], str):
            raise ValueError(f"system is {type(row['system']).__name__}, not text")
        messages = [{"role": "system", "content": row["system"]}, *messages]
    if re.search("[\ud800-\udfff]", "".join(str(x) for m in messages for x in m.values())):
        raise ValueError("the text contains a lone surrogate, which no tokenizer can encode")
    return messages


def check_prompt(messages: list, row=None) -> list[dict]:
    """Check the messages of a prompt, as check_messages does for a whole dialogue."""
    return check_messages([*messages, {"role": "assistant", "content": "an answer"}], row)[:-1]


def transcript(messages: list[dict]) -> str:
    """Render messages as one text: the text of a single message, or lines of `role: text`."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{m['role']}: {m['content']}" for m in messages)


def prompt_turns(row: dict) -> list[dict]:
    """Return the messages that a response follows, the column `system` first.

    They are those of prompt_of, or of `chosen` if it is a whole dialogue, without assistant turns at the
    end. Raises ValueError, with the reason, if there is no prompt."""
    row = formats.cells(row)
    if is_dialogue(dict.get(row, "chosen")):  # does not count as reading it
        messages = answered(row, row["chosen"])
    else:
        messages = prompt_of(row)
    if messages is None:
        raise formats.WrongColumns(row, "prompt")
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("the last message is not the user's")
    return check_prompt(messages, row)
