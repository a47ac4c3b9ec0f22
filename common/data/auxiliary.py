"""The documents for PPO's two auxiliary losses: pretraining text (InstructGPT's ptx loss) and rehearsal."""

import torch

from common import dist
from common.batches import Document
from common.data import chat, demonstrations, mapping, message_columns, mixtures, splits


def text_documents(args, tokenizer):
    """Turn rows with a column `text` into documents whose loss covers every token but the first.

    The end-of-sequence token is learnt too, unless --max-length cuts the text before it."""

    def document(row):
        text = row.data.get("text")
        if not isinstance(text, str) or not text.strip():
            raise ValueError("no text in the column text")
        message_columns.check_prompt([{"role": "user", "content": text}])
        if chat.special_tokens(tokenizer).search(text):
            raise ValueError(chat.SPECIAL)
        ids = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id][: args.max_length])
        # Held-out sets are matched by the turns before an answer, so the text serves as the prompt
        messages = [{"role": "text", "content": text}, {}]
        return Document(ids, torch.ones(len(ids), dtype=torch.bool), messages, row)

    name = args.ptx_dataset
    rows = mixtures.load_rows(args.ptx_dataset, "text")
    documents = mapping.read(rows, document, name, "text")
    return mapping.map_rows(rows, lambda row, given: given[0]._replace(row=row), name, zip(documents))


def stream(documents, size, step, seed, name):
    """Return the `size` documents of optimiser step `step` from an endless stream of documents.

    Every pass over them has its own order, which depends only on `seed`, `name` and the number of the
    pass, so a resumed run sees the same documents."""
    n = len(documents)
    places = range(step * size, (step + 1) * size)
    return [documents[dist.shuffled(n, seed, name, place // n)[place % n]] for place in places]


def load_extra(args, tokenizer, held_out) -> tuple[dict[str, list[Document]], list[Document]]:
    """Load the documents of the auxiliary losses, and the held-out text.

    Returns ({"ptx": documents of --ptx-dataset, "rehearsal": documents of --rehearsal-data}, held-out
    text). A loss whose flag is not set has no key. A tenth of the texts, at most 200, is held out, and no
    document has a prompt of `held_out`."""
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
    """Return the documents of optimiser step `step` for each auxiliary loss whose coefficient is above 0."""
    sizes = {"ptx": args.ptx_batch_size, "rehearsal": args.rehearsal_batch_size}
    coefs = {"ptx": args.ptx_coef, "rehearsal": args.rehearsal_coef}
    names = [name for name in extra if coefs[name] > 0]
    return {name: stream(extra[name], sizes[name], step, args.seed, name) for name in names}
