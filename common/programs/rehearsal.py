"""Selective rehearsal (arXiv:2309.10202, section 3.2): choose responses of the first policy that a PPO run
keeps training on, so that the policy does not forget its skills.

    embed     prompts -> vectors: mean-pooled last hidden states of the policy (the paper uses SimCSE)
    cluster   k-means into c groups, each meant to be one kind of skill
    select    the k prompts of each group with the best responses: by score, by entropy (lower is better, the
              policy was surer of its tokens), by length (shorter is better), or at random, as a control

Writes rows with `prompt` and `completion`, the format of sft.py, for ppo.py:

    python -m common.programs.rehearsal --model runs/sft --scorer runs/reward \\
        --dataset tiny --output rehearsal.jsonl
    python ppo.py tiny --rehearsal-data rehearsal.jsonl
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from common import dist, models
from common.batches import response_mask, split
from common.errors import InputError
from common.responses import answers, documents
from common.data import files, mixtures, prompt_sets, splits
from common.loading import pretrained
from common.scoring import scorers
from common.run import machine
from common.run.cli import check_flags
from common.run.run import launch


@torch.no_grad()
def embed(model, prompts: list[list[int]], batch_size=64) -> torch.Tensor:
    """Embed prompts (token ids) as the mean of the last hidden states over their tokens, normalised to length
    1: (prompts, H). Call it inside dist.consolidated(model), where each rank has all weights: every rank
    computes all embeddings, without communication."""
    vectors = []
    for batch in split(prompts, batch_size):
        rows = [torch.tensor(ids) for ids in batch]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # a causal model does not see it
        hidden = model.base_model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state.float()
        means = [states[: len(row)].mean(0) for row, states in zip(rows, hidden)]
        vectors.append(torch.stack(means).cpu())  # one wait for the device, not one per prompt
    return torch.nn.functional.normalize(torch.cat(vectors), dim=1)


def kmeans(x, n_clusters, seed=0, n_starts=4) -> list[int]:
    """Cluster the rows of x, (n, H), by k-means, and return the cluster of each row.

    Runs `lloyd` n_starts times and keeps the run with the smallest sum of squared distances. Each run starts
    from k-means++ (Arthur and Vassilvitskii, 2007): each new centre is a row, drawn with probability
    proportional to its squared distance to the nearest centre so far. Equal rows share a cluster, so there
    are fewer than n_clusters clusters if x has fewer distinct rows."""
    generator = torch.Generator().manual_seed(seed)
    runs = []
    for _ in range(n_starts):
        centres = x[torch.randint(len(x), (1,), generator=generator)]
        while len(centres) < n_clusters and (nearest := squared_distances(x, centres).amin(1)).any():
            centres = torch.cat([centres, x[torch.multinomial(nearest, 1, generator=generator)]])
        runs.append(lloyd(x, centres))
    return min(runs, key=lambda run: run[1])[0].tolist()


def lloyd(x, centres) -> tuple[torch.Tensor, float]:
    """Alternate between assigning rows to their nearest centre and moving centres to the mean of their rows,
    until the assignment is stable. A centre without rows stays where it is.

    Returns (the nearest centre of each row, the sum of squared distances)."""
    labels = None
    for _ in range(300):
        distances, nearest = squared_distances(x, centres).min(1)
        if labels is not None and torch.equal(nearest, labels):
            break
        labels = nearest
        centres = centres.clone()
        for i in labels.unique():
            centres[i] = x[labels == i].mean(0)
    return labels, distances.sum().item()


def squared_distances(x, centres) -> torch.Tensor:
    """Compute squared distances, (n, centres), without a matrix product: its rounding errors would give equal
    rows a distance above 0."""
    return torch.cdist(x, centres, compute_mode="donot_use_mm_for_euclid_dist") ** 2


def select(embeddings, scores, usable, n_clusters, per_cluster, seed=0) -> list[tuple[int, int]]:
    """Cluster the embeddings and choose the best rows of each cluster: [(cluster, index)], best first.

    embeddings: (n, H). scores: n numbers, higher is better. usable: n booleans; other rows are never chosen.
    Each cluster gives at most `per_cluster` rows."""
    labels = kmeans(embeddings.double(), n_clusters, seed)
    chosen = []
    for cluster in range(n_clusters):
        members = [i for i, label in enumerate(labels) if label == cluster and usable[i]]
        chosen += [(cluster, i) for i in sorted(members, key=lambda i: -scores[i])[:per_cluster]]
    return chosen


def values_of(criterion, policy, scorer, pairs, size, seed=0) -> list[float]:
    """Compute the criterion for each (prompt, response). All ranks must call it together.

    score: the scorer's. entropy: of the distributions that the tokens were sampled from, mean over the
    response's tokens, in nats. length: number of tokens, including the end-of-sequence token.
    random: place in a random order of `seed`.
    size: number of responses per forward pass on each rank."""
    if criterion == "score":
        return scorers.score(scorer, pairs, size)
    if criterion == "random":
        return dist.shuffled(len(pairs), seed, "rehearsal")
    if criterion == "length":
        return [len(response.ids) for _, response in pairs]
    of_pairs = documents(pairs)
    plan = [[[document] for document in of_pairs]]
    _, entropies = models.per_token(partial(models.logprobs, entropy=True), policy, plan, size)  # (pairs, R)
    return (entropies.sum(1) / response_mask(of_pairs).sum(1)).tolist()


def rehearsal_rows(policy, tokenizer, scorer, prompts, args) -> list[dict]:
    """Sample one response of `policy` to each prompt, and select from those that are finished and not empty.

    Returns rows {"prompt", "completion", "cluster", criterion: value}, the same on every rank. scorer: None
    if the criterion is not score. All ranks must call it together. Raises InputError if no response is
    usable."""
    with dist.consolidated(policy):
        embeddings = embed(policy, [prompt.ids for prompt in prompts])
        pairs = answers(policy, tokenizer, prompts, args, dist.seed_of(args.seed, "sr"))
    responses = [response for _, response in pairs]
    values = values_of(args.criterion, policy, scorer, pairs, args.score_batch_size, args.seed)
    usable = [response.usable for response in responses]
    if not any(usable):
        ended = f"ended within {args.max_new_tokens} tokens (--max-new-tokens)"
        raise InputError(f"no response {ended} without being empty or having a special token")
    # Low entropy and short responses are best
    scores = values if args.criterion == "score" else [-value for value in values]
    chosen = select(embeddings, scores, usable, args.clusters, args.per_cluster, args.seed)
    chosen = dist.gather([chosen])[0]  # rank 0's choice: k-means may round differently on other ranks
    if dist.is_main():
        print(f"{sum(usable)} of {len(usable)} responses are usable, {args.per_cluster} per cluster at most")
    row = lambda i: {"prompt": prompts[i].turns, "completion": responses[i].text}
    return [{**row(i), "cluster": cluster, args.criterion: values[i]} for cluster, i in chosen]


@dataclass
class Args:
    model: str = "runs/sft"
    """First policy of the PPO run, which writes the responses."""
    criterion: Literal["score", "entropy", "length", "random"] = "score"
    """Criterion of the best: highest score, lowest mean entropy, shortest, or random, as a control."""
    scorer: str = "runs/reward"
    """Scorer for the criterion score: a run of reward.py or advantage_model.py, a hub model, or
    FILE.py:function."""
    dataset: str = "tiny"
    """Prompts: tiny, a hub name, a local file or a mixture."""
    output: str = "rehearsal.jsonl"
    """New file for the rows."""
    clusters: int = 8
    """Number of clusters c."""
    per_cluster: int = 16
    """Maximum number of rows k from each cluster."""
    max_prompts: int = 2000
    """Maximum number of prompts to answer, a random subset."""
    max_new_tokens: int = 32
    """Maximum number of tokens of a response."""
    score_batch_size: int = 64
    """Number of responses per forward pass on each rank, for scores or entropies."""
    slots: int = 256
    """Number of responses that a rank decodes at once; memory for keys and values grows with it."""
    max_length: int = 128
    """Maximum number of tokens of prompt and response."""
    chat_template: str | None = None
    """Jinja file with the chat template, for a tokenizer without one or instead of its own."""
    seed: int = 0
    """Seed of the samples and of k-means."""


def main(args: Args):
    device = dist.setup()
    machine.show()
    check_flags(args, ("max_length", args.max_length > args.max_new_tokens, "more than --max-new-tokens"))
    output = Path(args.output)
    if output.exists() or not output.absolute().parent.is_dir():
        raise InputError(f"--output {output}: {'already exists' if output.exists() else 'no such folder'}")
    tokenizer = pretrained.load_tokenizer(args.model, args.chat_template)
    pretrained.check_policy(args.model, tokenizer, args)
    room = args.max_length - args.max_new_tokens
    load = partial(prompt_sets.load_prompts, tokenizer=tokenizer, max_tokens=room)
    prompts, _ = splits.train_and_held_out(args.dataset, None, load, None)  # leaves out ppo.py's held-out set
    # The held-out prompts were chosen by a hash of the key: hash another text to be independent of them
    prompts = mixtures.random_subset(prompts, args.max_prompts, lambda prompt: f"rehearsal {prompt.key}")
    splits.show(prompts, tokenizer)
    scorer = None
    if args.criterion == "score":
        scorer = scorers.load_scorer(args.scorer, tokenizer, device, args.max_length)
    policy = pretrained.load_frozen(args.model, tokenizer, args, device)
    rows = rehearsal_rows(policy, tokenizer, scorer, prompts, args)
    if dist.is_main():
        files.write_jsonl(output, rows)  # atomic: never a partial file
        print(f"wrote {len(rows)} rows to {args.output}")


if __name__ == "__main__":
    launch(main, {"rows": ("rows for ppo.py --rehearsal-data", Args())})
