"""Selective rehearsal: which responses of the first policy a PPO run should keep practising, so that it does
not forget (arXiv:2309.10202, section 3.2).

    embed     prompts -> vectors: mean-pooled last hidden states of the policy, or an encoder by name
    cluster   KMeans into c groups, one for each kind of skill
    select    in each group the k prompts whose response has the highest score, or is the shortest, or the one
              that the policy was surest of (the lowest mean entropy)

ppo.py does this before training with --rehearsal-clusters. As a program it writes the rows to a file for
--rehearsal-data:

    python -m common.rehearsal --model runs/sft --scorer runs/reward --dataset tiny --output rehearsal.jsonl
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from common import dist, generate, metrics, models, scorers
from common.batches import a_part, collate
from common.cli import check_flags
from common.errors import InputError
from common.run import launch


@torch.no_grad()
def embed(model, prompts: list[list[int]], batch_size=64) -> torch.Tensor:
    """(prompts, H): the mean of the last hidden states over each prompt's tokens, of length 1. Call it inside
    dist.consolidated(model): every rank computes all of them, and communicates nothing."""
    device, out = next(model.parameters()).device, [None] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    for start in range(0, len(order), batch_size):
        some = order[start : start + batch_size]
        rows = [torch.tensor(prompts[i], device=device) for i in some]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # no token sees the padding after it
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.float()
        for i, row, ours in zip(some, rows, hidden):
            out[i] = torch.nn.functional.normalize(ours[: len(row)].mean(0), dim=0).cpu()
    return torch.stack(out)


@torch.no_grad()
def embed_texts(name, texts: list[str], device, batch_size=64) -> torch.Tensor:
    """(texts, H): the same by a sentence encoder, princeton-nlp/sup-simcse-roberta-base for one: the vector
    of the first token, which SimCSE trains."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, out = AutoTokenizer.from_pretrained(name), []
    encoder = AutoModel.from_pretrained(name).eval().to(device)
    for start in range(0, len(texts), batch_size):
        some = texts[start : start + batch_size]
        inputs = tokenizer(some, padding=True, truncation=True, return_tensors="pt").to(device)
        out.append(torch.nn.functional.normalize(encoder(**inputs).last_hidden_state[:, 0], dim=1).cpu())
    return torch.cat(out)


def select(embeddings, merit, usable, n_clusters, per_cluster, seed=0) -> list[tuple[int, int]]:
    """[(cluster, index)]: KMeans on the embeddings, and in each cluster the `per_cluster` usable rows with
    the highest merit, best first. embeddings: (n, H). merit: n numbers. usable: n booleans."""
    from sklearn.cluster import KMeans

    if n_clusters > len(embeddings):
        raise InputError(f"{n_clusters} clusters of {len(embeddings)} prompts: ask for fewer")
    labels = KMeans(n_clusters, n_init=4, random_state=seed).fit_predict(embeddings.double().numpy())
    chosen = []
    for cluster in range(n_clusters):
        mine = [i for i, label in enumerate(labels.tolist()) if label == cluster and usable[i]]
        chosen += [(cluster, i) for i in sorted(mine, key=lambda i: -merit[i])[:per_cluster]]
    return chosen


@torch.no_grad()
def mean_entropies(model, documents, pad_id, batch_size, device) -> list[float]:
    """The entropy of the next token, nats, mean over each document's response tokens; on every rank, and
    every rank must call it."""
    found, numbered = [], list(enumerate(documents))
    for some in dist.my_batches(numbered, batch_size, lambda item: len(item[1].ids)):
        batch = collate([[document] for _, document in some], pad_id, device)
        inputs = (batch.input_ids, batch.action_mask, batch.position_ids)
        _, entropies = model.token_logprobs(*inputs, entropy=True)
        means = entropies.sum(1) / batch.action_mask.sum(1)
        found += zip((i for i, _ in some), means.tolist())
    return [x for _, x in sorted(dist.gather(found))]


def rehearsal_rows(
    policy, tokenizer, scorer, prompts, n_clusters, per_cluster, *,
    max_new_tokens, by="score", slots=64, score_batch_size=64, encoder=None, seed=0,
):  # fmt: skip
    """Rows {"prompt", "completion", "cluster", "score"} in sft.py's format, the same on every rank: one
    response of `policy` to each prompt, clustered and selected. Responses that did not end or have no words
    are none. by: what is selected, the highest "score", the least "length" or the least "entropy". Every rank
    must call it."""
    device = next(policy.parameters()).device
    ids, options = [prompt.ids for prompt in prompts], (1, max_new_tokens, 1.0, dist.seed_of(seed, "sr"))
    with dist.consolidated(policy):
        found = generate.sample_responses(policy, tokenizer, ids, *options, slots=slots)
        embeddings = embed(policy, ids) if encoder is None else None
    if encoder is not None:
        texts = [prompt.turns[-1]["content"] for prompt in prompts]
        embeddings = embed_texts(encoder, texts, next(policy.parameters()).device)
    responses = [response for (response,) in found]
    scores = scorers.score(scorer, list(zip(prompts, responses)), score_batch_size, device)
    usable = [r.finished and r.clean and bool(r.text.strip()) for r in responses]
    merit = scores
    if by == "length":
        merit = [-len(response.ids) for response in responses]
    elif by == "entropy":
        documents = [generate.document(*pair) for pair in zip(prompts, responses)]
        rest = (tokenizer.pad_token_id, score_batch_size, device)
        merit = [-x for x in mean_entropies(policy, documents, *rest)]
    chosen = select(embeddings, merit, usable, n_clusters, per_cluster, seed)
    chosen = dist.gather([chosen])[0]  # rank 0's, should another rank's KMeans differ in the last bit
    if not chosen:
        raise InputError(f"rehearsal: no response ended within {max_new_tokens} tokens")
    return [
        {"prompt": prompts[i].turns, "completion": responses[i].text, "cluster": cluster, "score": scores[i]}
        for cluster, i in chosen
    ]


def show(rows, n=12):
    """Print the first rows as a table."""
    table = []
    for row in rows[:n]:
        texts = {"prompt": row["prompt"][-1]["content"][:40], "response": row["completion"][:40]}
        table.append({"cluster": row["cluster"], **texts, "score": row["score"]})
    metrics.print_table(table)


@dataclass
class Args:
    model: str = "runs/sft"
    """The first policy."""
    scorer: str = "runs/reward"
    """A run of reward.py or advantage_model.py, a hub reward model, or module:function."""
    dataset: str = "tiny"
    """Prompts."""
    output: str = "rehearsal.jsonl"
    """The file to write."""
    clusters: int = 8
    """c."""
    per_cluster: int = 16
    """k."""
    by: Literal["score", "length", "entropy"] = "score"
    """The best, the shortest, or the surest responses of a cluster."""
    encoder: str | None = None
    """A sentence encoder's name; None: the policy's own hidden states."""
    max_prompts: int = 2000
    """So many of them are answered."""
    max_new_tokens: int = 32
    """Longest response."""
    slots: int = 64
    """Responses that decode together; memory for keys and values grows with it."""
    max_length: int = 128
    """Tokens of a prompt with its response."""
    chat_template: str | None = None
    """A jinja file, for a tokenizer without a chat template or in place of its own."""
    seed: int = 0
    """Of the samples and KMeans."""


def main(args: Args):
    device = dist.setup()
    check_flags(args)
    if Path(args.output).exists() or not Path(args.output).absolute().parent.is_dir():
        raise InputError(f"--output {args.output} is there already, or its folder is not")
    tokenizer = models.load_tokenizer(args.model, args.chat_template)
    room = args.max_length - args.max_new_tokens
    prompts = generate.load_prompts(args.dataset, "train", tokenizer, room)
    prompts = a_part(prompts, args.max_prompts)
    if args.clusters > len(prompts):
        raise InputError(f"--clusters {args.clusters}: there are only {len(prompts)} prompts")
    scorer = scorers.load_scorer(args.scorer, tokenizer, device)
    policy = dist.shard(models.load_policy(args.model, tokenizer, seed=args.seed), device)
    options = {"max_new_tokens": args.max_new_tokens, "encoder": args.encoder, "seed": args.seed}
    options |= {"by": args.by, "slots": args.slots}
    sizes = (args.clusters, args.per_cluster)
    rows = rehearsal_rows(policy, tokenizer, scorer, prompts, *sizes, **options)
    show(rows)
    if dist.is_main():
        metrics.write_jsonl(args.output, rows)
        print(f"wrote {len(rows)} rows to {args.output}")


if __name__ == "__main__":
    launch(main, {"rows": ("rows for ppo.py --rehearsal-data", Args())})
