"""Turn rows of demonstrations into documents: token ids with a response mask (batches.Document)."""

import torch

from common import dist
from common.batches import Document, Row
from common.data import chat, mapping, message_columns, mixtures, splits


def sft_documents(rows: list[Row], tokenizer, max_length: int, name: str) -> list[Document]:
    """Turn rows into documents of at most max_length tokens.

    A longer response is cut, and then has no end-of-sequence token. A row is dropped if it has no response or
    if its prompt leaves no room for one. Both are counted and printed. Raises InputError if no document is
    left.

    name: the data set, for messages."""

    def document(row, given):
        nonlocal cut
        (messages, all_turns), (ids, mask) = given
        chat.check_known(tokenizer, ids)
        if not any(mask[1:max_length]):
            raise ValueError(f"the prompt fills all {max_length} tokens (--max-length)")
        cut += len(ids) > max_length
        ids, mask = torch.tensor(ids[:max_length], dtype=torch.int32), torch.tensor(mask[:max_length])
        return Document(ids, mask, messages, row, all_turns=all_turns)

    cut = 0
    dialogue_of = lambda row: message_columns.sft_messages(row.data)
    dialogues = mapping.read(rows, dialogue_of, name, "demonstrations", tokenizer)
    # Tokenising is shared between the ranks
    tokens = mapping.map_over_ranks(dialogues, lambda x: chat.encode(tokenizer, x[0], x[1]))
    documents = mapping.map_rows(rows, document, name, tokens)
    if cut and dist.is_main():
        print(f"{name}: cut {cut:,} of {len(documents):,} documents to {max_length} tokens (--max-length)")
    return documents


def load_sft(spec: str, tokenizer, max_length: int, split="train", held_out=()) -> list[Document]:
    """Load a data set of demonstrations as documents, without those that have a prompt of `held_out`."""
    documents = sft_documents(mixtures.load_rows(spec, "sft", split), tokenizer, max_length, spec)
    return splits.without_prompts_of(documents, held_out, spec)
