"""The documents of PPO's two auxiliary losses: pretraining text (InstructGPT's ptx) and rehearsal."""

import torch

from common import dist
from common.batches import Document
from common.data import chat, demonstrations, mapping, message_columns, mixtures, splits


def text_documents(args, tokenizer):
    """Rows of `text` -> documents in which every token but the first is learnt, the end token included."""

    def document(row):
        text = row.data.get("text")
        if not isinstance(text, str) or not text.strip():
            raise ValueError("no text")
        message_columns.check_prompt([{"role": "user", "content": text}])
        if chat.special_tokens(tokenizer).search(text):
            raise ValueError(chat.SPECIAL)
        ids = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id][: args.max_length])
        # What is held out is told by the turns before an answer: here the text
        messages = [{"role": "text", "content": text}, {}]
        return Document(ids, torch.ones(len(ids), dtype=torch.bool), messages, row)

    name = args.ptx_dataset
    rows = mixtures.load_rows(args.ptx_dataset, "text")
    documents = mapping.read(rows, document, name, "text")
    return mapping.map_rows(rows, lambda row, given: given[0]._replace(row=row), name, zip(documents))


def stream(documents, size, step, seed, name):
    """The documents of optimiser step `step` of an endless stream, in an order drawn anew for each pass."""
    n = len(documents)
    places = range(step * size, (step + 1) * size)
    return [documents[dist.shuffled(n, seed, name, place // n)[place % n]] for place in places]


def load_extra(args, tokenizer, held_out) -> tuple[dict[str, list[Document]], list[Document]]:
    """({"ptx": documents of --ptx-dataset, "rehearsal": of --rehearsal-data}, or less; held-out text)."""
    extra = {}
    held_out_text = []
    if args.ptx_dataset:
        texts = splits.without_prompts_of(text_documents(args, tokenizer), held_out, args.ptx_dataset)
        extra["ptx"], held_out_text = splits.hold_out(texts, share=0.1, most=200)
    if args.rehearsal_data:
        load = demonstrations.load_sft
        extra["rehearsal"] = load(args.rehearsal_data, tokenizer, args.max_length, held_out=held_out)
    return extra, held_out_text


def next_extra(extra, step, args) -> dict[str, list[Document]]:
    """Of each kind the documents of optimiser step `step`, if its loss counts."""
    sizes = {"ptx": args.ptx_batch_size, "rehearsal": args.rehearsal_batch_size}
    coefs = {"ptx": args.ptx_coef, "rehearsal": args.rehearsal_coef}
    names = [name for name in extra if coefs[name] > 0]
    return {name: stream(extra[name], sizes[name], step, args.seed, name) for name in names}
