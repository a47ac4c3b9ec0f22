"""What scripts measure on held-out rows before, while and after they train."""

import math

import torch

from common import dist, generate, metrics, scorers, tiny
from common.batches import labelled_pairs
from common.comparisons import seq_logprobs


def baselines(policy, comparisons, pad_id, micro_batch_size, device) -> dict[str, float]:
    """Accuracy, on the labelled pairs, of two scores that a reward model must beat: length and log
    probability under `policy` (None: length alone). Every rank must call it."""
    pairs = [(i, a, b) for i, c in enumerate(comparisons) for a, b in labelled_pairs(c)]
    if not pairs:
        return {}
    scores = {"baseline/length_accuracy": [[len(ids) for ids in c.response_ids] for c in comparisons]}
    if policy is not None:
        logprobs = seq_logprobs(policy, comparisons, pad_id, micro_batch_size, device)
        scores["baseline/sft_logprob_accuracy"] = [x.tolist() for x in logprobs]
    return {key: metrics.accuracy(x[i][a] - x[i][b] for i, a, b in pairs) for key, x in scores.items()}


def policy_samples(model, comparisons, tokenizer, n, max_new_tokens, seed, slots=64) -> list[tuple]:
    """n sampled responses of a policy to each comparison's prompt, as ids, the same on every rank, without
    those that did not end: a score is read at an end token. Prompts that leave no room get none. Every rank
    must call it."""
    room = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf) - max_new_tokens
    fits = [(i, c) for i, c in enumerate(comparisons) if len(c.prompt_ids) <= room]
    out, asked = [[] for _ in comparisons], [c.prompt_ids.tolist() for _, c in fits]
    with dist.consolidated(model):  # inside, ranks may decode different numbers of steps, or none
        found = generate.sample_responses(model, tokenizer, asked, n, max_new_tokens, seed=seed, slots=slots)
    for (i, _), responses in zip(fits, found):
        ended = [[*r.ids[:-1], tokenizer.eos_token_id] for r in responses if r.finished]
        out[i] = [torch.tensor(ids, dtype=torch.int32) for ids in ended]
    n_ended = sum(map(len, out))
    if n_ended < n * len(comparisons) and dist.is_main():
        print(f"{n_ended} of {n * len(comparisons)} samples ended within {max_new_tokens} tokens and count")
    return [tuple(ids) for ids in out]


def describe_response(prompt, response, score, is_tiny) -> dict:
    """A response as a row of samples.jsonl; of the tiny world, with its true reward."""
    row = {"prompt": prompt.turns, "response": response.text, "tokens": len(response.ids)}
    row |= {"finished": response.finished, "category": prompt.category, "score": score}
    if is_tiny:
        question = scorers._last(prompt)
        row |= {"gold": tiny.gold_score(question, response.text), "perfect": tiny.perfect_score(question)}
    return row
