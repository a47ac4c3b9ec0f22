"""Compute the probabilities of the next token, which AI annotators and pairwise models answer with."""

import torch

from common import models
from common.sampler import cache_argument


def logprobs(model, input_ids, token_indices, before=()):
    """Compute the log probabilities of all tokens that could follow selected tokens: (n, V), fp32, nats.

    For models that are not sharded. The head computes in fp32 even if the body does not, because in bf16 the
    logits of two likely tokens are often equal.

    input_ids: (B, T), right-padded. token_indices: (2, n), row and column of each selected token.
    before: token ids that precede every row. They are run once and their cache is shared, which recurrent
      models do not support."""
    with models.computing(model, input_ids):
        options = {"use_cache": False}
        if before:
            first = torch.tensor([before], device=input_ids.device)
            name = cache_argument(model.config, type(model.base_model))
            kept = getattr(model.base_model(input_ids=first, use_cache=True), name)
            kept.batch_repeat_interleave(len(input_ids))
            options = {name: kept, "use_cache": True}
        hidden = model.base_model(input_ids=input_ids, **options).last_hidden_state
    head = model.get_output_embeddings()
    hidden = hidden[token_indices[0], token_indices[1]].float()
    # Cast in pieces, since an fp32 copy of 128,000 rows of 4,096 takes 2 GB. On a CPU each fits the cache:
    # 0.34 s instead of 0.91 s for 16 positions and 151,936 rows of 896
    size = models.LOGITS_IN_MEMORY // (head.weight.shape[1] * (16 if head.weight.device.type == "cpu" else 1))
    logits = torch.cat([hidden @ some_rows.float().T for some_rows in head.weight.split(size)], 1)
    logits = logits if head.bias is None else logits + head.bias
    return models.scaled(logits, model.config.get_text_config()).log_softmax(-1)
