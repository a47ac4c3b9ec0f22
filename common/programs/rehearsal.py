"""Selective rehearsal: which responses of the first policy a PPO run should keep practising, so that it does
not forget (arXiv:2309.10202, section 3.2).

    embed     prompts -> vectors: the policy's own mean-pooled last hidden states (the paper: SimCSE's)
    cluster   k-means into c groups, one for each kind of skill
    select    in each group the k prompts whose response is best: by its score, by how sure the policy was of
              its tokens (entropy), or by how short it is (length)

It writes rows of `prompt` and `completion`, sft.py's format, for ppo.py:

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
from common.batches import random_subset, response_mask, split
from common.errors import InputError
from common.responses import answers, documents
from common.data import files, prompt_sets, splits
from common.loading import pretrained
from common.scoring import scorers
from common.run.cli import check_flags
from common.run.run import launch


@torch.no_grad()
def embed(model, prompts: list[list[int]], batch_size=64) -> torch.Tensor:
    """(prompts, H): the mean of the last hidden states over each prompt's tokens, of length 1. Call it inside
    dist.consolidated(model): every rank computes all of them, and communicates nothing."""
    vectors = []
    for batch in split(prompts, batch_size):
        rows = [torch.tensor(ids, device=model.device) for ids in batch]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # no token sees the padding after it
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.float()
        vectors += [states[: len(row)].mean(0).cpu() for row, states in zip(rows, hidden)]
    return torch.nn.functional.normalize(torch.stack(vectors), dim=1)


def kmeans(x, n_clusters, seed=0, n_starts=4) -> list[int]:
    """The cluster of each row of x, (n, H): of n_starts runs of `lloyd` the one whose rows are nearest to
    their centres. k-means++ draws where each begins (Arthur and Vassilvitskii, 2007): every further centre is
    a row, drawn by its squared distance to the nearest one so far. Equal rows share a cluster, so where fewer
    rows differ there are fewer clusters."""
    generator = torch.Generator().manual_seed(seed)
    runs = []
    for _ in range(n_starts):
        centres = x[torch.randint(len(x), (1,), generator=generator)]
        while len(centres) < n_clusters and (nearest := squared_distances(x, centres).amin(1)).any():
            centres = torch.cat([centres, x[torch.multinomial(nearest, 1, generator=generator)]])
        runs.append(lloyd(x, centres))
    return min(runs, key=lambda run: run[1])[0].tolist()


def lloyd(x, centres) -> tuple[torch.Tensor, float]:
    """(the nearest centre of each row, the sum of squared distances), every centre the mean of its rows, if
    it has any."""
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
    """(n, centres). Not by a matrix product, after which equal rows can lie apart."""
    return torch.cdist(x, centres, compute_mode="donot_use_mm_for_euclid_dist") ** 2


def select(embeddings, scores, usable, n_clusters, per_cluster, seed=0) -> list[tuple[int, int]]:
    """[(cluster, index)]: kmeans of the embeddings, and in each cluster the `per_cluster` usable rows with
    the highest scores, best first. embeddings: (n, H). scores: n numbers. usable: n booleans."""
    labels = kmeans(embeddings.double(), n_clusters, seed)
    chosen = []
    for cluster in range(n_clusters):
        members = [i for i, label in enumerate(labels) if label == cluster and usable[i]]
        chosen += [(cluster, i) for i in sorted(members, key=lambda i: -scores[i])[:per_cluster]]
    return chosen


def values_of(criterion, policy, scorer, pairs, size) -> list[float]:
    """What a criterion says of each (prompt, response): its score; the mean entropy of its tokens, in nats,
    each of the distribution that it was drawn from; or its length in tokens, the end token included.
    size: responses of a forward on one rank. Every rank must call it."""
    if criterion == "score":
        return scorers.score(scorer, pairs, size)
    if criterion == "length":
        return [len(response.ids) for _, response in pairs]
    of_pairs = documents(pairs)
    plan = [[[document] for document in of_pairs]]
    _, entropies = models.per_token(partial(models.logprobs, entropy=True), policy, plan, size)  # (pairs, R)
    return (entropies.sum(1) / response_mask(of_pairs).sum(1)).tolist()


def rehearsal_rows(policy, tokenizer, scorer, prompts, args) -> list[dict]:
    """Rows {"prompt", "completion", "cluster", --criterion: its value}, the same on every rank: one response
    of `policy` to each prompt, if it ended and has words, clustered and selected. scorer: None unless that is
    the criterion. Every rank must call it."""
    with dist.consolidated(policy):
        embeddings = embed(policy, [prompt.ids for prompt in prompts])
        pairs = answers(policy, tokenizer, prompts, args, dist.seed_of(args.seed, "sr"))
    responses = [response for _, response in pairs]
    values = values_of(args.criterion, policy, scorer, pairs, args.score_batch_size)
    usable = [response.finished and response.clean and bool(response.text.strip()) for response in responses]
    if not any(usable):
        raise InputError(f"no response ended within {args.max_new_tokens} tokens (--max-new-tokens)")
    sign = 1 if args.criterion == "score" else -1  # the surest and the shortest are the best
    scores = [sign * value for value in values]
    chosen = select(embeddings, scores, usable, args.clusters, args.per_cluster, args.seed)
    chosen = dist.gather([chosen])[0]  # rank 0's, should another rank's k-means differ in the last bit
    row = lambda i: {"prompt": prompts[i].turns, "completion": responses[i].text}
    return [{**row(i), "cluster": cluster, args.criterion: values[i]} for cluster, i in chosen]


@dataclass
class Args:
    model: str = "runs/sft"
    """The first policy."""
    criterion: Literal["score", "entropy", "length"] = "score"
    """Of a cluster's k: the highest score, the lowest mean entropy of the tokens, or the lowest length."""
    scorer: str = "runs/reward"
    """Of the criterion score: a run of reward.py or advantage_model.py, a hub model, or FILE.py:function."""
    dataset: str = "tiny"
    """Prompts: tiny, a hub name, a local file or a mixture."""
    output: str = "rehearsal.jsonl"
    """The file to write, which may not be there already."""
    clusters: int = 8
    """c."""
    per_cluster: int = 16
    """k."""
    max_prompts: int = 2000
    """So many of them are answered."""
    max_new_tokens: int = 32
    """Longest response."""
    score_batch_size: int = 64
    """Responses of a forward of the scorer, or for the entropies, on one rank."""
    slots: int = 256
    """Responses that decode together; memory for keys and values grows with it."""
    max_length: int = 128
    """Tokens of a prompt with its response."""
    chat_template: str | None = None
    """A jinja file, for a tokenizer without a chat template or in place of its own."""
    seed: int = 0
    """Of the samples and k-means."""


def main(args: Args):
    device = dist.setup()
    dist.print_machine()
    check_flags(args, ("max_length", args.max_length > args.max_new_tokens, "more than --max-new-tokens"))
    output = Path(args.output)
    if output.exists() or not output.absolute().parent.is_dir():
        raise InputError(f"--output {output}: {'is there already' if output.exists() else 'no such folder'}")
    tokenizer = pretrained.load_tokenizer(args.model, args.chat_template)
    pretrained.check_policy(args.model, tokenizer, args)
    room = args.max_length - args.max_new_tokens
    load = partial(prompt_sets.load_prompts, tokenizer=tokenizer, max_tokens=room)
    prompts, _ = splits.train_and_held_out(args.dataset, None, load, None)  # ppo.py's held-out ones stay so
    # Not by the hash of the key itself, by which the held-out prompts were chosen
    prompts = random_subset(prompts, args.max_prompts, lambda prompt: f"rehearsal {prompt.key}")
    splits.show(prompts, tokenizer)
    scorer = None
    if args.criterion == "score":
        scorer = scorers.load_scorer(args.scorer, tokenizer, device, args.max_length)
    policy = pretrained.load_frozen(args.model, tokenizer, args, device)
    rows = rehearsal_rows(policy, tokenizer, scorer, prompts, args)
    if dist.is_main():
        files.write_jsonl(args.output, rows)  # whole or not at all
        print(f"wrote {len(rows)} rows to {args.output}")


if __name__ == "__main__":
    launch(main, {"rows": ("rows for ppo.py --rehearsal-data", Args())})
