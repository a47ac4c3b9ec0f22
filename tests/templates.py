"""Chat templates of public models, reduced to the parts that decide the ids of a dialogue, and tokenizers to
go with them: one on bytes, one of SentencePiece's kind."""

import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
QWEN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # what a word is
GPT2 = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_tokenizer(template=CHATML, special=SPECIAL, adds_bos=False, words=None, **names):
    """Merges: a line break and "h", two line breaks, a space and "h"; within `words` if given."""
    merges = [("Ċ", "h"), ("Ċ", "Ċ"), ("Ġ", "h")]
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(letters)}, merges))
    split = [pre_tokenizers.Split(Regex(words), "isolated")] if words else []
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, in_bytes])
    backend.decoder = decoders.ByteLevel()
    return with_special(backend, template, special, adds_bos, names)


def piece_tokenizer(template, special=("<s>", "</s>"), adds_bos=True, rstrip=False, **names):
    """As Llama 2's: a text, and what follows a special token, gets a space in front."""
    merges = [("▁", "h"), ("▁", "▁")]
    letters = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *map(chr, range(33, 127)), "▁", "▁h", "▁▁"]
    vocabulary = {token: i for i, token in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
    return with_special(backend, template, special, adds_bos, {"eos_token": "</s>", **names}, rstrip)


def with_special(backend, template, special, adds_bos, names, rstrip=False):
    tokens = [AddedToken(x, special="think" not in x, rstrip=rstrip, normalized=False) for x in special]
    backend.add_tokens(tokens)
    if adds_bos:
        bos = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "</s>"} | names
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = template
    return tokenizer


TEXT, TRIMMED, BOS, EOS = "{{ m.content }}", "{{ m.content | trim }}", "{{ bos_token }}", "{{ eos_token }}"
HEADER, INST = "<|start_header_id|>{}<|end_header_id|>\n\n", "[INST] {{ m.content }} [/INST]"
THINK = (  # thought and answer of an assistant's content
    "{% set parts = m.content.split('</think>') %}{% set answer = parts[-1].lstrip('\n') %}"
    "{% set thought = parts[0].removeprefix('<think>').strip() if parts | length > 1 else '' %}"
)
IM, THOUGHT, ANSWER = "<|im_start|>{}\n", "<think>\n{{ thought }}\n</think>\n\n", "{{ answer }}<|im_end|>\n"
LAST = "{% if loop.last %}" + THOUGHT + "{% endif %}"
OFF = "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
CHATML_USER = IM.format("user") + TEXT + "<|im_end|>\n"
FAMILIES = {  # a user's turn, an assistant's turn, what generation adds; what is before, and else after them
    "ChatML, Qwen2.5": (CHATML_USER, IM.format("assistant") + TEXT + "<|im_end|>\n", IM.format("assistant")),
    "Llama 3": (
        *(HEADER.format(role) + TRIMMED + "<|eot_id|>" for role in ("user", "assistant")),
        HEADER.format("assistant"), BOS),
    "Gemma 3": (
        *(f"<start_of_turn>{role}\n{TRIMMED}<end_of_turn>\n" for role in ("user", "model")),
        "<start_of_turn>model\n", BOS),
    "Phi-4": (
        *(f"<|im_start|>{role}<|im_sep|>{TEXT}<|im_end|>" for role in ("user", "assistant")),
        "<|im_start|>assistant<|im_sep|>"),
    "DeepSeek V3": (f"<|User|>{TEXT}", f"<|Assistant|>{TEXT}<|eos|>", "<|Assistant|>", BOS),
    "Mistral Small": (f"[INST]{TEXT}[/INST]", TEXT + "</s>", "", BOS),
    "Cohere": (
        *(f"<|START|><|{role}|>{TEXT}<|END|>" for role in ("USER", "BOT")), "<|START|><|BOT|>", BOS),
    "Phi-3, 3.5": (
        *(f"<|{role}|>\n{TEXT}<|end|>\n" for role in ("user", "assistant")), "<|assistant|>\n", "", EOS),
    "Phi-4-mini": (
        *(f"<|{role}|>{TEXT}<|end|>" for role in ("user", "assistant")), "<|assistant|>", "", EOS),
    "GLM-4.6": (
        "<|user|>{{ '\n' + m.content }}",
        THINK + "<|assistant|>{{ '\n<think>' + thought + '</think>\n' + answer }}",
        "<|assistant|>", "[gMASK]<sop>"),
    "Falcon-instruct": (
        "{{ '\n' if not loop.first }}User: " + TEXT,
        "{{ '\nAssistant: ' + m.content }}", "{{ '\nAssistant:' }}"),
    "Mistral v0.1": (INST, TEXT + "</s> ", "", BOS),
    "Zephyr": (*(f"<|{role}|>\n{TEXT}</s>\n" for role in ("user", "assistant")), "<|assistant|>\n"),
    "Vicuna": (f"USER: {TEXT} ", f"ASSISTANT: {TEXT}</s>", "ASSISTANT:", BOS + "A chat. "),
    "Solar": (f"### User:\n{TEXT}\n\n", f"### Assistant:\n{TEXT}", "### Assistant:\n"),
    "DeepSeek R1 distills": (
        f"<|User|>{TEXT}", THINK + "<|Assistant|>{{ answer }}<|eos|>", "<|Assistant|><think>\n", BOS),
    "Gemma 4": (
        *(f"<|turn>{role}\n{TRIMMED}<turn|>\n" for role in ("user", "model")),
        "<|turn>model\n<|channel>thought\n<channel|>", BOS),
    "Nemotron 3": (
        CHATML_USER, THINK + IM.format("assistant") + "<think>{{ thought }}</think>" + ANSWER,
        IM.format("assistant") + "<think>\n"),
    "Qwen3": (CHATML_USER, THINK + IM.format("assistant") + LAST + ANSWER, IM.format("assistant") + OFF),
    "Qwen3.5": (
        CHATML_USER, THINK + IM.format("assistant") + LAST + ANSWER, IM.format("assistant") + "<think>\n"),
    "gpt-oss": (
        f"<|start|>user<|message|>{TEXT}<|end|>",
        "<|start|>assistant<|channel|>final<|message|>" + TEXT
        + "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}",
        "<|start|>assistant"),
}  # fmt: skip
PIECES = ("Phi-3, 3.5", "Mistral v0.1", "Zephyr", "Vicuna", "Solar")  # of SentencePiece's kind


def template(user, assistant, asked, before="", after=""):
    turn = f"{{% if m.role == 'user' %}}{user}{{% else %}}{assistant}{{% endif %}}"
    after = f"{{% if add_generation_prompt %}}{asked}{{% else %}}{after}{{% endif %}}"
    return f"{before}{{% for m in messages %}}{turn}{{% endfor %}}{after}"


def family(name, first="") -> PreTrainedTokenizerFast:
    """A tokenizer with the template of this name behind the text `first`."""
    text = first + template(*FAMILIES[name])
    if name in PIECES and name != "Phi-3, 3.5":  # whose roles are text
        return piece_tokenizer(text)
    found = sorted(set(re.findall(r"<[|a-z_A-Z][^<>{}]*>|\[/?\w+\]", text)) - {"<s>", "</s>"})
    if name in PIECES:
        return piece_tokenizer(text, ("<s>", "</s>", *found), rstrip=True)
    return byte_tokenizer(text, ("<s>", "</s>", *found), words=QWEN, eos_token="</s>")
