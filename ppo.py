"""PPO: move the policy towards what a scorer likes, without going far from where it started.

    rewards_t    = -beta (log pi_theta(y_t) - log pi_0(y_t)) + [t is the response's last token] r(x, y)
    advantages_t = sum_k (gamma lambda)^k delta_{t+k},   delta_t = rewards_t + gamma V_{t+1} - V_t
    L(theta)     = -(1/n) sum_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t),   rho = pi_theta / pi_old
    L(phi)       =  (1/n) sum_t 1/2 max((V_t - R_t)^2, (clip(V_t, V_old -+ c) - R_t)^2)

over the n response tokens of an optimiser step, A whitened over all of a rollout. (Llama 2, arXiv:2307.09288,
section 3.2.3; Qwen, arXiv:2309.16609, section 3.2.2.) Four models: policy, value, reference (the frozen first
policy) and scorer; with Llama 2's safety gate a second scorer. Two more losses keep what the policy knew:

    + c_ptx (mean NLL of text)                         the pretrained gradient (Qwen)
    + gamma_sr sum_t -log pi_theta(y_t | x, y_<t)      selective rehearsal, eq. 9 of "Stabilizing RLHF through
                                                       Advantage Model and Selective Rehearsal", 2309.10202

Reads a policy, a scorer and prompts; writes runs/ppo: model/, metrics.jsonl, samples.jsonl, plots,
summary.json.

    python ppo.py                                        the tiny world, about a minute on two CPU cores
    python ppo.py --model runs/rejection_sampling        on top of rejection sampling, as Llama 2 does
    torchrun --nproc-per-node 8 ppo.py llama2 --model DIR --scorer runs/reward

Differs from the papers: old log probabilities come from the training forward and not from the sampler, so the
ratio is 1 on the first minibatch; a truncated response's value beyond its end is 0.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig

from common import data, dist, evaluation, generate, losses, metrics, models, scorers, tiny
from common import rehearsal as selective
from common.batches import Document, collate, make_blocks, n_response_tokens, pack
from common.errors import InputError
from common.run import check_flags, find_run, launch, skip, start_run, write_json
from common.scorers import check_room, load_safety_scorer, load_scorer


@dataclass
class Args:
    model: str = "runs/sft"
    """The first policy: a run directory, a model folder, a hub name."""
    reference: str | None = None
    """pi_0, from which the KL penalty is counted. None: the first policy."""
    scorer: str = "runs/reward"
    """A run of reward.py or advantage_model.py, a hub reward model, or module:function."""
    safety_scorer: str | None = None
    """Llama 2's second reward model: its score counts for prompts tagged is_safety, and for responses that it
    finds unsafe."""
    safety_threshold: float = 0.15
    """A response is unsafe if the safety scorer's probability is below this (Llama 2)."""
    retokenize: bool = False
    """Allow a scorer with other tokens or another chat template: it scores the text, encoded anew."""
    dataset: str = "tiny"
    """Prompts: tiny, a hub name, a .jsonl, .jsonl.gz or .parquet file, or a mixture a:0.7,b:0.3."""
    eval_dataset: str | None = None
    """Held-out prompts. None: tiny's held-out split, or 5 % of the prompts, at most 500."""
    ptx_dataset: str | None = None
    """Rows of plain `text` for the pretrained gradient; tiny:kind=text on the tiny world."""
    rehearsal_data: str | None = None
    """Rows in sft.py's formats whose negative log likelihood joins the loss (eq. 9)."""
    rehearsal_clusters: int = 0
    """Selective rehearsal in place of --rehearsal-data: before training the first policy's responses are
    clustered into so many groups by their prompts; the best of each become rehearsal.jsonl. 0: none."""
    rehearsal_per_cluster: int = 16
    """k: responses of a group."""
    rehearsal_prompts: int = 2000
    """Prompts that are answered for it."""
    rehearsal_by: Literal["score", "length", "entropy"] = "score"
    """What is selected: the best, the shortest, or the surest (least entropy) responses of a cluster."""
    rehearsal_encoder: str | None = None
    """A sentence encoder's name, princeton-nlp/sup-simcse-roberta-base in the paper; None: the policy's own
    hidden states."""
    forget_dataset: str | None = None
    """Prompts of what the first policy knew: win, tie and lose against it after training."""
    tie_margin: float | None = None
    """Scores that differ by no more than this tie. None: 0.1 standard deviations of the first policy's."""
    output_dir: str = "runs/ppo"
    """The run directory."""
    chat_template: str | None = None
    """A jinja file, for a tokenizer without a chat template or in place of its own."""
    iterations: int = 30
    """Rollouts."""
    prompts_per_iteration: int = 64
    """Prompts of a rollout, fresh ones while there are any."""
    n_samples: int = 2
    """Responses to a prompt."""
    temperature: float = 1.0
    """Of the rollouts; log probabilities are of the logits divided by it."""
    top_p: float = 1.0
    """Mass of the nucleus that rollouts come from; 1 is off. Log probabilities are of all tokens."""
    max_new_tokens: int = 32
    """Longest response."""
    slots: int = 256
    """Responses that decode together on one rank; memory for keys and values grows with it."""
    missing_eos_penalty: float = 1.0
    """Taken off the score of a response that did not end, after normalisation; a rollout in which none ended
    is skipped. 0: responses are scored as they are."""
    reward_norm: Literal["none", "whiten", "mean", "mean_std"] = "mean_std"
    """Of the scores: whitened within a rollout (Llama 2), less the running mean of all so far (Qwen), or that
    divided by the running deviation."""
    kl_coef: float = 0.3
    """beta, of the KL penalty in the reward."""
    gamma: float = 1.0
    """Discount of later rewards."""
    lam: float = 0.95
    """lambda of GAE."""
    whiten_advantages: bool = True
    """Over all response tokens of a rollout."""
    epochs: int = 2
    """Passes over a rollout."""
    minibatch_size: int = 64
    """Responses of an optimiser step, over all ranks."""
    micro_batch_size: int = 64
    """Rows of a forward on one rank, at most: of --max-length tokens, or with --no-packing of a response."""
    clip_ratio: float = 0.2
    """epsilon."""
    clip_value: float = 0.15
    """c, in units of the normalised reward."""
    lr: float = 1e-4
    """Of the policy, constant."""
    value_lr: float = 1e-3
    """Of the value model, constant."""
    adam_eps: float = 1e-8
    """AdamW's epsilon, of both."""
    weight_decay: float = 0.0
    """AdamW's, of both."""
    max_grad_norm: float = 1.0
    """Gradients of each model are scaled down to this global norm; 0: never."""
    value_warmup_steps: int = 10
    """Optimiser steps of the value model before the policy moves, rounded up to whole rollouts."""
    freeze_layers: int = 0
    """The policy's first decoder layers that stay as they are."""
    ptx_coef: float = 0.0
    """Weight of the pretrained gradient: the mean negative log likelihood of text."""
    ptx_batch_size: int = 64
    """Texts of an optimiser step, over all ranks."""
    rehearsal_coef: float = 0.01
    """gamma of eq. 9."""
    rehearsal_batch_size: int = 16
    """Rehearsal rows of an optimiser step, over all ranks."""
    rehearsal_norm: Literal["sum", "mean"] = "sum"
    """A row's negative log likelihood is the sum over its tokens, as eq. 9 has it, or their mean."""
    max_length: int = 128
    """Tokens of a prompt with its response, and of a text; of a row that holds several of them."""
    packing: bool = True
    """Fill rows with several responses; --no-packing: a row a response, padded to the batch's longest."""
    eval_every: int = 10
    """Iterations between evaluations on held-out prompts; 0: only before and after training."""
    eval_prompts: int = 1000
    """Held-out prompts to answer once, at temperature 1."""
    patience: int = 0
    """Stop after so many evaluations without a better held-out reward; 0: never."""
    max_kl: float = 100.0
    """Stop with an error when a rollout's mean KL per response (nats) exceeds this."""
    save_every: int = 10
    """Iterations between checkpoints, of which the last is kept; 0: none."""
    score_batch_size: int = 64
    """Responses of a forward of a scorer on one rank."""
    gradient_checkpointing: bool = False
    """Keep no activations inside a layer, compute them again in backward: less memory, a third more time."""
    offload: bool = False
    """Keep the reference and the scorers in the CPU's memory while they are not used."""
    save_dtype: Literal["float32", "bfloat16"] | None = None
    """Of the weights in model/. None: the dtype of the model that training starts from."""
    seed: int = 0
    """Of the prompts' order, the samples and the minibatches."""
    resume: bool = False
    """Go on from the last checkpoint in output_dir, or begin if there is none."""
    overwrite: bool = False
    """Replace a run that is in the way."""


def check(args):
    """What can be known to be wrong before anything is loaded."""
    size = args.prompts_per_iteration * args.n_samples
    check_flags(
        args,
        ("iterations", args.iterations >= 1, "1 or more"),
        ("temperature", args.temperature > 0, "more than 0: a greedy rollout explores nothing"),
        ("top_p", 0 < args.top_p <= 1, "more than 0, at most 1"),
        ("minibatch_size", 1 <= args.minibatch_size <= size, f"at most the rollout's {size} responses"),
        ("max_length", args.max_length > args.max_new_tokens, "more than --max-new-tokens"),
        ("patience", not args.patience or (args.eval_every and args.eval_prompts), "0 without evaluations"),
        ("ptx_coef", args.ptx_coef == 0 or args.ptx_dataset, "0 without --ptx-dataset"),
        ("rehearsal_clusters", not (args.rehearsal_clusters and args.rehearsal_data), "0 with rows given"),
    )
    if size % args.minibatch_size:
        raise InputError(
            f"--minibatch-size {args.minibatch_size} does not divide the {size} responses of a rollout "
            f"(--prompts-per-iteration times --n-samples): try {math.gcd(size, args.minibatch_size)}"
        )
    steps = args.epochs * size // args.minibatch_size
    if args.value_warmup_steps > (args.iterations - 1) * steps:
        raise InputError(
            f"--value-warmup-steps {args.value_warmup_steps}: the policy would never move, for the last of "
            f"--iterations {args.iterations} begins after {(args.iterations - 1) * steps} optimiser steps: "
            "lower the one, or raise the other"
        )


# -- batches: every rank has all rows of a rollout, and computes its share ---------------------------
def micro_batches(documents, indices, pad_id, args, device):
    """Some documents in rows, of which this rank takes its share (dist.batches), at most --micro-batch-size
    at a time: [(the documents' numbers in its order, Batch)]."""
    rows = [[i] for i in sorted(indices)]
    if args.packing:
        packed = pack([len(documents[i].ids) for (i,) in rows], args.max_length)
        rows = [[rows[place][0] for place in row] for row in packed]
    n_tokens = lambda row: sum(len(documents[i].ids) for i in row)  # noqa: E731
    for mine in dist.batches(rows, args.micro_batch_size, n_tokens):
        batch = collate([[documents[i] for i in row] for row in mine], pad_id, device)
        yield [i for row in mine for i in row], batch


def spread(rows, action_mask):
    """1-D tensors, a number for each response token of each document of a batch -> (B, T-1), 0 elsewhere."""
    zeros = torch.zeros(action_mask.shape, device=action_mask.device)
    return zeros.masked_scatter(action_mask, torch.cat([*rows, torch.zeros(0)]).to(zeros))


@torch.no_grad()
def per_token(forward, plan, documents, pad_id, args, device):
    """What `forward(batch)` gives, several (B, T-1), for every response token, in the micro-batches of
    `plan`: as many lists of 1-D tensors, one a row, on every rank."""
    found, out = [], [None] * len(documents)
    for indices in plan:
        for some, batch in micro_batches(documents, indices, pad_id, args, device):
            sizes = [n_response_tokens([[documents[i]]]) for i in some]
            kept = [x[batch.action_mask].split(sizes) for x in forward(batch)]
            found += [(i, [x.tolist() for x in numbers]) for i, *numbers in zip(some, *kept)]
    for i, numbers in dist.gather(found):
        out[i] = [torch.tensor(x) for x in numbers]
    return zip(*out)


def log_probabilities(model, batch, temperature=1.0, entropy=False):
    """(log pi of the response tokens,), and with `entropy` that of where they were drawn: (B, T-1) each."""
    ids = (batch.input_ids, batch.action_mask, batch.position_ids)
    found = model.token_logprobs(*ids, temperature=temperature, entropy=entropy)
    return found if entropy else (found,)


def state_values(model, batch):
    """V of the state before each response token, (B, T-1)."""
    return models.values(model, batch.input_ids, batch.action_mask, batch.position_ids)


# -- the steps of an iteration -----------------------------------------------------------------------
def sample_responses(policy, tokenizer, prompts, n, temperature, top_p, seed, args):
    """[(prompt, response)], the n of a prompt in a row, on every rank. The weights are gathered once and
    freed afterwards; inside, ranks need not decode in step."""
    options = (n, args.max_new_tokens, temperature, seed, top_p, args.slots)
    with dist.consolidated(policy):
        found = generate.sample_responses(policy, tokenizer, [prompt.ids for prompt in prompts], *options)
    return [(prompt, response) for prompt, some in zip(prompts, found) for response in some]


def score(pairs, scorer, safety_scorer, args, device):
    """(R_c of each response as the scorers give it, before normalisation; share that the gate sent to the
    safety scorer)."""
    with dist.at_hand(device, args.offload, scorer.model):
        scores = torch.tensor(scorers.score(scorer, pairs, args.score_batch_size, device))
    if safety_scorer is None:
        return scores, 0.0
    with dist.at_hand(device, args.offload, safety_scorer.model):
        safety = torch.tensor(scorers.safety_logits(safety_scorer, pairs, args.score_batch_size, device))
    tagged = torch.tensor([bool(prompt.row.data.get("is_safety")) for prompt, _ in pairs])
    gated = tagged | (safety.sigmoid() < args.safety_threshold)
    both = losses.safety_gated_score(safety, scores, tagged, args.safety_threshold)
    return both, gated.float().mean().item()


def normalise(scores, running, kind):
    """Scores -> rewards by --reward-norm. running: [count, mean, sum of squares around it] of all scores so
    far, this rollout's included from now on; updated in place."""
    n, mean = len(scores), scores.double().mean().item()
    squares = ((scores.double() - mean) ** 2).sum().item()
    total, shift = running[0] + n, mean - running[1]  # Chan et al.'s update of mean and squares
    running[2] += squares + shift**2 * running[0] * n / total
    running[0], running[1] = total, running[1] + shift * n / total
    if kind == "whiten":
        return losses.whiten(scores, torch.ones_like(scores, dtype=torch.bool))
    if kind == "none":
        return scores
    deviation = max((running[2] / total) ** 0.5, 1e-4) if kind == "mean_std" else 1.0
    return (scores - running[1]) / deviation


def estimate_advantages(pairs, rewards_at_end, old_logprobs, ref_logprobs, values, args):
    """(advantages, returns, k1) for each response token: lists of 1-D tensors. rewards_at_end: (B,)."""
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x, dtype=torch.bool) for x in values], True)
    old, ref, v = (spread(rows, mask) for rows in (old_logprobs, ref_logprobs, values))  # (B, R)
    k1 = losses.kl_estimate(old, ref)
    rewards = -args.kl_coef * k1
    last = mask.sum(1) - 1  # the end token, or the last one before the cut
    rewards[torch.arange(len(pairs)), last] += rewards_at_end
    advantages, returns = losses.gae(rewards, v, mask, args.gamma, args.lam)
    if args.whiten_advantages:
        advantages = losses.whiten(advantages, mask)  # over the rollouts of all ranks: all are here
    return [[row[m] for row, m in zip(x, mask)] for x in (advantages, returns, k1)]


def update(models_, optimizers, documents, indices, known, extra, moves, pad_id, args, device):
    """One optimiser step of the value model and, if `moves`, of the policy, on the rows `indices`, over all
    ranks. known: old_logprobs, old_values, advantages, returns by row. extra: {"ptx" or "rehearsal": rows}.
    Returns sums over tokens, and the gradient norms; where one is not finite, neither model moves."""
    policy, value = models_
    n = sum(len(known["advantages"][i]) for i in indices)  # response tokens of all ranks
    sums, ratio_max = torch.zeros(8, dtype=torch.float64), 0.0
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    for some, batch in micro_batches(documents, indices, pad_id, args, device):
        mask = batch.action_mask
        old, old_values, advantages, returns = (spread([known[k][i] for i in some], mask) for k in KNOWN)
        new_values = state_values(value, batch)
        loss, v = losses.ppo_value_loss(new_values, old_values, returns, mask, args.clip_value, n_tokens=n)
        (loss * dist.world_size()).backward()  # FSDP averages gradients over ranks, the loss is their sum
        p = {"loss_sum": 0.0, "n_clipped": 0, "ratio_sum": mask.sum(), "approx_kl_sum": 0.0, "ratio_max": 1.0}
        if moves:
            ids = (batch.input_ids, mask, batch.position_ids)
            logprobs = policy.token_logprobs(*ids, temperature=args.temperature)
            loss, p = losses.ppo_policy_loss(logprobs, old, advantages, mask, args.clip_ratio, n_tokens=n)
            (loss * dist.world_size()).backward()
        parts = (v["loss_sum"], v["n_clipped"], p["loss_sum"], p["n_clipped"])
        parts += (p["ratio_sum"], p["approx_kl_sum"])
        sums[:6] += torch.tensor([float(x) for x in parts], dtype=torch.float64)
        ratio_max = max(ratio_max, float(p["ratio_max"]))
    for name, rows in extra.items() if moves else ():
        sums[6 + (name == "rehearsal")] += nll_backward(policy, name, rows, pad_id, args, device)
    sums, norms = dist.all_sum(*sums), []
    for model in models_:
        moved = model is value or moves
        norms.append(dist.clip_grad_norm(model, args.max_grad_norm) if moved else 0.0)
    if all(map(math.isfinite, [*sums, *norms])):
        for model, optimizer in zip(models_, optimizers):
            if model is value or moves:
                optimizer.step()
    return {"n": n, "sums": sums, "ratio_max": max(dist.gather([ratio_max])), "norms": norms}


KNOWN = ("old_logprobs", "old_values", "advantages", "returns")


def nll_backward(policy, name, rows, pad_id, args, device):
    """Add the gradient of the pretrained (mean over tokens) or rehearsal (eq. 9: sum over a row's tokens,
    mean over rows) loss; returns this rank's share of the loss."""
    total = 0.0
    n_tokens = n_response_tokens([rows])
    for some, batch in micro_batches(rows, range(len(rows)), pad_id, args, device):
        logprobs = policy.token_logprobs(batch.input_ids, batch.action_mask, batch.position_ids)
        if name == "ptx":
            loss, weight = losses.sft_loss(logprobs, batch.action_mask, n_tokens=n_tokens)[0], args.ptx_coef
        else:
            sizes = [n_response_tokens([[rows[i]]]) for i in some]
            shares = [torch.ones(n) / (n if args.rehearsal_norm == "mean" else 1) for n in sizes]
            loss = -losses.masked_sum(logprobs * spread(shares, batch.action_mask), batch.action_mask)
            loss = loss / len(rows)
            weight = args.rehearsal_coef
        (weight * loss * dist.world_size()).backward()
        total += loss.item()
    return total


# -- the models --------------------------------------------------------------------------------------
def load_policy(name, tokenizer, args, device, frozen=False):
    model = models.load_policy(name, tokenizer, args.gradient_checkpointing and not frozen, args.seed)
    layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or [])]
    for layer in layers[: args.freeze_layers]:
        layer.requires_grad_(False)
    return dist.shard(model.requires_grad_(False) if frozen else model, device)


def load_value(scorer, tokenizer, prompts, args, device):
    """The value model: the reward model, body and head; of an advantage model the row r of its head, with
    the bias -mean e(x); for a function, or a scorer with other tokens, the first policy's body and a head
    of 0."""
    name, checkpointing = args.scorer, args.gradient_checkpointing
    if scorer.function is not None or not scorer.same_tokens:
        model = models.load_scorer(args.model, tokenizer, 1, checkpointing, args.seed)
        with torch.no_grad():
            model.score.weight.zero_()
    elif scorer.model.config.num_labels == 1:
        model = models.load_scorer(name, tokenizer, 1, checkpointing)
    else:
        model = models.load_scorer(name, tokenizer, 2, checkpointing)
        head = torch.nn.Linear(model.score.in_features, 1, device=model.score.weight.device)
        with torch.no_grad():
            head.weight.copy_(model.score.weight[:1])
            head.bias.fill_(-mean_expected_reward(scorer, prompts, args, device))
        model.score, model.config.num_labels = head, 1
    return dist.shard(model, device)


@torch.no_grad()
def mean_expected_reward(scorer, prompts, args, device):
    """Mean of an advantage model's e(x), read at the prompts' last tokens, over all ranks."""
    total = 0.0
    for some in dist.batches([torch.tensor(p.ids) for p in prompts], args.score_batch_size):
        ids = torch.nn.utils.rnn.pad_sequence(some or [torch.zeros(1, dtype=torch.long)], True).to(device)
        where = torch.tensor([[i, len(x) - 1] for i, x in enumerate(some)], dtype=torch.long).view(-1, 2).T
        total += scorer.model.head_outputs(ids, where.to(device))[:, 1].sum().item()
    return dist.all_sum(total)[0] / len(prompts)


# -- data of the other losses ------------------------------------------------------------------------
def text_documents(args, tokenizer):
    """Rows of `text` -> documents in which every token but the first is learnt, the end token included."""
    documents, dropped, rows = [], {}, data.load_rows(args.ptx_dataset, "text")
    for row in rows:
        text = row.data.get("text")
        try:
            if not isinstance(text, str) or not text.strip():
                raise ValueError("no text")
            data.check_text(text)
            if data.special_tokens(tokenizer).search(text):
                raise ValueError(data.SPECIAL)
        except ValueError as error:
            dropped.setdefault(str(error), []).append(row.where)
            continue
        ids = (tokenizer(text)["input_ids"] + [tokenizer.eos_token_id])[: args.max_length]
        whole = [{"role": "text", "content": text}, {}]  # data.hold_out reads the text where prompts stand
        documents.append(Document(torch.tensor(ids), torch.tensor([True] * len(ids)), whole, row))
    data.report(args.ptx_dataset, len(rows), dropped)
    if not documents:
        raise data.none_left(args.ptx_dataset, len(rows), dropped)
    return documents


def stream(documents, size, step, *key):
    """The documents of optimiser step `step` of an endless stream, in an order drawn anew for each pass."""
    out, orders = [], {}
    for place in range(step * size, (step + 1) * size):
        again, i = divmod(place, len(documents))
        if again not in orders:
            generator = torch.Generator().manual_seed(dist.seed_of(*key, again))
            orders[again] = torch.randperm(len(documents), generator=generator).tolist()
        out.append(documents[orders[again][i]])
    return out


# -- evaluation --------------------------------------------------------------------------------------
def answers(policy, tokenizer, prompts, source, scorers, args, device):
    """([(prompt, response)], rows of samples.jsonl): one response at temperature 1 to each prompt, scored."""
    if not prompts:
        return [], []
    seed = dist.seed_of(args.seed, "eval")
    pairs = sample_responses(policy, tokenizer, prompts, 1, 1.0, 1.0, seed, args)
    scores, _ = score(pairs, *scorers, args, device)
    is_tiny = data.is_tiny(source)
    return pairs, [evaluation.describe_response(*pair, x, is_tiny) for pair, x in zip(pairs, scores.tolist())]


def evaluate(policy, reference, scorers, tokenizer, held_out, text, args, device):
    """(figures, samples): one response at temperature 1 to each held-out prompt, scored; KL to the reference
    and entropy; with --ptx-dataset, the alignment tax."""
    figures, pad_id = {}, tokenizer.pad_token_id
    asked, source = generate.a_part(held_out, args.eval_prompts), args.eval_dataset or args.dataset
    pairs, samples = answers(policy, tokenizer, asked, source, scorers, args, device)
    if samples:
        documents = [generate.document(*pair) for pair in pairs]
        rest = ([range(len(documents))], documents, pad_id, args, device)
        ours, entropies = per_token(lambda batch: log_probabilities(policy, batch, entropy=True), *rest)
        with dist.at_hand(device, args.offload, reference):
            (theirs,) = per_token(lambda batch: log_probabilities(reference, batch), *rest)
        kl = [losses.kl_estimate(a, b).sum().item() for a, b in zip(ours, theirs)]
        for row, value in zip(samples, kl):
            row["kl"] = value
        columns = {"eval/score": "score", "gold/score": "gold", "gold/perfect": "perfect", "eval/kl": "kl"}
        columns |= {"sample/length": "tokens", "sample/finished": "finished"}
        figures |= metrics.means(samples, columns)
        figures["eval/entropy"] = torch.cat(entropies).mean().item()
    if text:
        blocks = make_blocks(text, args.max_length, args.packing)
        figures["eval/ptx_nll"] = models.mean_nll(policy, blocks, pad_id, args.micro_batch_size, device)
    return figures, samples


# Not computed while it stands still
OF_THE_POLICY = {"loss/policy", "loss/ptx", "loss/rehearsal", "ptx/tokens_ratio"}
OF_THE_POLICY |= {"optim/policy_grad_norm", "policy/first_approx_kl", "policy/first_ratio_max"}
OF_THE_POLICY |= {f"policy/{x}" for x in ("ratio_mean", "ratio_max", "clipped", "approx_kl")}


def figures_of(results, known, entropies, extra):
    """Figures of an iteration's optimiser steps, weighted by tokens; of the first minibatch alone, where the
    policy has not moved yet, the largest ratio and the approximate KL. In the value's warm-up there are none
    of the policy's loss. extra: which other losses there were."""
    n = sum(r["n"] for r in results)
    value_loss, value_clipped, policy_loss, clipped, ratio, approx_kl, *nll = (
        sum(r["sums"][i] for r in results) for i in range(8)
    )
    returns, old_values = torch.cat(known["returns"]), torch.cat(known["old_values"])
    explained = 1 - (returns - old_values).var() / returns.var().clamp(min=1e-8)
    row = {"loss/policy": policy_loss / n, "loss/value": value_loss / n, "policy/ratio_mean": ratio / n}
    row |= {"policy/ratio_max": max(r["ratio_max"] for r in results), "policy/clipped": clipped / n}
    row |= {"policy/approx_kl": approx_kl / n, "policy/entropy": torch.cat(entropies).mean().item()}
    row |= {"policy/first_ratio_max": results[0]["ratio_max"]}
    row |= {"policy/first_approx_kl": results[0]["sums"][5] / results[0]["n"]}
    row |= {"value/clipped": value_clipped / n, "value/explained_variance": explained.item()}
    row |= {"optim/policy_grad_norm": sum(r["norms"][0] for r in results) / len(results)}
    row |= {"optim/value_grad_norm": sum(r["norms"][1] for r in results) / len(results)}
    nll = dict(zip(("ptx", "rehearsal"), nll))
    return row | {f"loss/{name}": nll[name] / len(results) for name in extra}


def main(args: Args):
    # 1. setup
    device = dist.setup()
    check(args)
    state = find_run(args)
    if state == "finished":
        return

    # 2. data
    tokenizer = models.load_tokenizer(args.model, args.chat_template)
    pad_id = tokenizer.pad_token_id
    for name in (args.model, args.reference or args.model):  # the model's own vocabulary is its own
        models.check_causal_lm(name, tokenizer if name != args.model else None, args.chat_template)
        models.check_room(args.max_length, name)
    generate.check_sampled(args.model)
    prompts, held_out = generate.train_and_held_out(args, tokenizer)
    text, text_held_out, rehearsal, forget = [], [], [], []
    if args.ptx_dataset:
        text = text_documents(args, tokenizer)
        text, text_held_out = data.hold_out(text, share=0.1, most=200)
    if args.rehearsal_clusters > min(len(prompts), args.rehearsal_prompts):
        n = min(len(prompts), args.rehearsal_prompts)
        raise InputError(f"--rehearsal-clusters {args.rehearsal_clusters}: there are only {n} prompts")
    if args.rehearsal_clusters and args.rehearsal_encoder:
        AutoConfig.from_pretrained(args.rehearsal_encoder)  # is there such a model?
    if args.forget_dataset:
        room = args.max_length - args.max_new_tokens
        forget = generate.load_prompts(args.forget_dataset, "test", tokenizer, room)
        forget = generate.a_part(forget, args.eval_prompts)
        prompts = data.without_prompts_of(prompts, forget, args.dataset)
    if args.rehearsal_data:
        apart = [*held_out, *forget]
        rehearsal = data.load_sft(args.rehearsal_data, tokenizer, args.max_length, held_out=apart)

    # 3. models: policy, reference, one or two scorers, value
    scorers = [load_scorer(args.scorer, tokenizer, device), None]
    if args.safety_scorer:
        scorers[1] = load_safety_scorer(args.safety_scorer, tokenizer, device)
    for scorer in filter(None, scorers):
        if not scorer.same_tokens and not args.retokenize:
            raise InputError(
                f"{scorer.name} has other tokens or another chat template than {args.model}: --retokenize "
                "lets it score the text, encoded anew"
            )
        check_room(scorer, args.max_length)
    checkpoint, by = f"{args.output_dir}/checkpoint", [scorer and scorer.version for scorer in scorers]
    if state == "resume" and dist.checkpoint_state(checkpoint).get("scorers", by) != by:
        raise InputError(
            "--resume with another scorer, or one whose files have changed: its scores cannot follow the old "
            "ones; begin anew"
        )
    policy = load_policy(args.model, tokenizer, args, device)
    reference = load_policy(args.reference or args.model, tokenizer, args, device, frozen=True)
    value = load_value(scorers[0], tokenizer, generate.a_part(prompts, 256), args, device)
    for model in (policy, reference, value) if args.packing else ():
        models.check_packing(model)
    asked = [prompt.key for prompt in (*generate.a_part(held_out, args.eval_prompts), *forget)]
    asked += [document.ids.tolist() for document in text_held_out]
    start_run(args, "ppo", state, held_out=asked)  # only now is an old run in output_dir replaced

    if args.rehearsal_clusters:
        file = Path(args.output_dir, "rehearsal.jsonl")
        if state != "resume" or not all(dist.gather([file.exists()])):
            options = {"max_new_tokens": args.max_new_tokens, "slots": args.slots, "seed": args.seed}
            options |= {"encoder": args.rehearsal_encoder, "score_batch_size": args.score_batch_size}
            options["by"] = args.rehearsal_by
            asked = generate.a_part(prompts, args.rehearsal_prompts)
            asked = (asked, args.rehearsal_clusters, args.rehearsal_per_cluster)
            rows = selective.rehearsal_rows(policy, tokenizer, scorers[0], *asked, **options)
            selective.show(rows)
            if dist.is_main():
                metrics.write_jsonl(file, rows)
            dist.barrier()
        rehearsal = data.load_sft(str(file), tokenizer, args.max_length, held_out=held_out)

    with dist.at_hand(device, args.offload, reference, *(scorer.model for scorer in scorers if scorer)):
        pass  # from here on they wait where --offload has them
    dtype = models.export_dtype(args.model, args.save_dtype)

    # 4. optimisers: one each, for their gradients differ in size
    options = {"betas": (0.9, 0.95), "eps": args.adam_eps, "weight_decay": args.weight_decay, "fused": True}
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizers = [
        torch.optim.AdamW(trained, lr=args.lr, **options),
        torch.optim.AdamW(value.parameters(), lr=args.value_lr, **options),
    ]
    both = {"policy": (policy, optimizers[0]), "value": (value, optimizers[1])}
    saved = None
    good = f"The last good checkpoint, if --save-every made one, is in {checkpoint}"
    if state == "resume":
        saved = dist.load_checkpoint(checkpoint, both)
    # best: the highest held-out reward, and how many evaluations ago
    now = {"iteration": 0, "value_steps": 0, "policy_steps": 0, "running": [0, 0.0, 0.0], "best": [-1e30, 0]}
    now["skipped"], now["scorers"] = 0, by  # skipped: iterations in a row
    now |= saved or {}
    log = metrics.Metrics(args.output_dir, keep_rows=saved["logged_rows"] if saved else 0)

    # 5. loop
    judged = (policy, reference, scorers, tokenizer, held_out, text_held_out, args, device)
    samples = Path(args.output_dir, "samples.jsonl")
    if saved:
        rows_before = [row for row in metrics.read_jsonl(samples) if row["when"] == "before"]
    else:
        now["before"], rows_before = evaluate(*judged)
        now["best"][0] = now["before"].get("eval/score", 0.0)
        rows_before = [{"when": "before", "set": "held-out", **row} for row in rows_before]
        log.log(0, 0, **now["before"])
        _, rows = answers(policy, tokenizer, forget, args.forget_dataset, scorers, args, device)
        rows_before += [{"when": "before", "set": "forget", **row} for row in rows]
        if dist.is_main():
            metrics.write_jsonl(samples, rows_before)
    bar = metrics.progress(args.iterations, now["iteration"], "ppo")
    while now["iteration"] < args.iterations and not (args.patience and now["best"][1] >= args.patience):
        iteration = now["iteration"] = now["iteration"] + 1

        # rollout
        clock, seed = [time.time()], dist.seed_of(args.seed, "rollout", iteration)
        asked = generate.fresh_prompts(prompts, args.prompts_per_iteration, iteration, args.seed)
        options = (args.n_samples, args.temperature, args.top_p, seed, args)
        pairs = sample_responses(policy, tokenizer, asked, *options)
        finished = torch.tensor([response.finished for _, response in pairs])
        now["skipped"] = 0 if finished.any() or not args.missing_eos_penalty else now["skipped"] + 1
        if now["skipped"]:  # all would pay the penalty alike
            why = f"iteration {iteration}: no response ended within {args.max_new_tokens} tokens (raise "
            why += "--max-new-tokens, teach the model to end first, sft.py, or --missing-eos-penalty 0)"
            log.log(now["value_steps"], iteration, **skip(now["skipped"], args.iterations, why))
            bar.update()
            continue
        documents = [generate.document(*pair) for pair in pairs]
        clock.append(time.time())

        # score
        scores, gated = score(pairs, *scorers, args, device)
        ends = normalise(scores, now["running"], args.reward_norm)
        ends = ends - args.missing_eos_penalty * (~finished).float()
        clock.append(time.time())

        # estimate_advantages
        seeds = [dist.seed_of(args.seed, "minibatches", iteration, epoch) for epoch in range(args.epochs)]
        orders = [torch.randperm(len(pairs), generator=torch.Generator().manual_seed(x)) for x in seeds]
        epochs = [[some.tolist() for some in order.split(args.minibatch_size)] for order in orders]

        # In the micro-batches of the first epoch, so that the ratio is exactly 1 there
        rest = (epochs[0], documents, pad_id, args, device)
        T = args.temperature
        old_logprobs, entropies = per_token(lambda b: log_probabilities(policy, b, T, entropy=True), *rest)
        with dist.at_hand(device, args.offload, reference):
            (ref_logprobs,) = per_token(lambda b: log_probabilities(reference, b, T), *rest)
        (old_values,) = per_token(lambda b: (state_values(value, b),), *rest)
        found = (old_logprobs, ref_logprobs, old_values)
        advantages, returns, k1 = estimate_advantages(pairs, ends, *found, args)
        kl = sum(x.sum().item() for x in k1) / len(k1)
        if not kl <= args.max_kl:
            bar.close()
            raise InputError(
                f"iteration {iteration}: the KL to the reference is {kl:.1f} nats per response (--max-kl "
                f"{args.max_kl:g}): raise --kl-coef or lower --lr. {good}"
            )
        known = dict(zip(KNOWN, (old_logprobs, old_values, advantages, returns)))
        clock.append(time.time())

        # update
        moves, results, ptx_tokens = now["value_steps"] >= args.value_warmup_steps, [], 0
        for epoch in epochs:
            for indices in epoch:
                extra = {}
                if text and args.ptx_coef > 0:
                    extra["ptx"] = stream(text, args.ptx_batch_size, now["policy_steps"], args.seed, "ptx")
                    ptx_tokens += n_response_tokens([extra["ptx"]])
                if rehearsal and args.rehearsal_coef > 0:
                    key = (now["policy_steps"], args.seed, "rehearsal")
                    extra["rehearsal"] = stream(rehearsal, args.rehearsal_batch_size, *key)
                step = (documents, indices, known, extra, moves, pad_id, args, device)
                results.append(update((policy, value), optimizers, *step))
                if not all(map(math.isfinite, [*results[-1]["sums"], *results[-1]["norms"]])):
                    bar.close()
                    raise InputError(
                        f"iteration {iteration}: a loss or gradient is not finite. The step was not taken; "
                        f"lower --lr or --value-lr. {good}"
                    )
                now["value_steps"] += 1
                now["policy_steps"] += moves
        clock.append(time.time())

        # log
        row = figures_of(results, known, entropies, extra)
        if "ptx" in extra:
            row["ptx/tokens_ratio"] = ptx_tokens / sum(r["n"] for r in results)
        if not moves:
            row = {key: x for key, x in row.items() if key not in OF_THE_POLICY}
        row |= {"reward/score": scores.mean().item(), "reward/normalised": ends.mean().item()}
        row |= {"reward/deviation": scores.std().item(), "reward/gated": gated, "kl/per_response": kl}
        row |= {"rollout/finished": finished.float().mean().item()}
        row["rollout/length"] = sum(len(response.ids) for _, response in pairs) / len(pairs)
        if data.is_tiny(args.dataset):
            gold = [tiny.gold_score(prompt.turns[-1]["content"], r.text) for prompt, r in pairs]
            row["reward/gold"] = sum(gold) / len(gold)
        names = ("rollout", "score", "estimate", "update")
        row |= {f"time/{name}_s": b - a for name, a, b in zip(names, clock, clock[1:])}
        row["perf/tokens_per_s"] = sum(map(len, advantages)) / (clock[-1] - clock[0])
        if args.eval_every and iteration % args.eval_every == 0 and iteration < args.iterations:
            found, _ = evaluate(*judged)
            row |= found
            reward = found.get("eval/score", 0.0)
            now["best"] = [reward, 0] if reward > now["best"][0] else [now["best"][0], now["best"][1] + 1]
        log.log(now["value_steps"], iteration, **row)
        entropy = row["policy/entropy"]
        bar.set_postfix(score=f"{row['reward/score']:.2f}", kl=f"{kl:.2f}", entropy=f"{entropy:.2f}")
        bar.update()
        if args.save_every and iteration % args.save_every == 0:
            dist.save_checkpoint(checkpoint, iteration, both, {**now, "logged_rows": log.n_rows})
    bar.close()

    # 6. save
    dist.round_weights(policy, dtype)  # held-out figures are of what is exported
    after, rows = evaluate(*judged)
    rows = [{"when": "after", "set": "held-out", **row} for row in rows]
    _, known = answers(policy, tokenizer, forget, args.forget_dataset, scorers, args, device)
    rows += [{"when": "after", "set": "forget", **row} for row in known]
    for name in ("held-out", "forget"):
        both_rows = [[row for row in some if row["set"] == name] for some in (rows_before, rows)]
        after |= metrics.against(*both_rows, args.tie_margin, f"{name}/") if both_rows[0] else {}
    log.log(now["value_steps"], now["iteration"], **after)
    dist.save_model(policy, tokenizer, f"{args.output_dir}/model", dtype)
    if dist.is_main():
        metrics.write_jsonl(samples, rows_before + rows)
        for key, x in after.items():
            first = f"{now['before'][key]:.4g} -> " if key in now["before"] else ""
            print(f"{key}: {first}{x:.4g}")
        both_rows = [[row for row in some if row["set"] == "held-out"] for some in (rows_before, rows)]
        table = metrics.regressions(*both_rows)
        metrics.print_table(table)
        panels = {"reward": ["reward/score", "eval/score", "reward/gold", "gold/score"]}
        panels |= {"KL per response": ["kl/per_response", "eval/kl"], "entropy": ["policy/entropy"]}
        panels |= {"value": ["value/explained_variance", "loss/value"]}
        metrics.plot_metrics(args.output_dir, panels)
        curves = {"scorer": "eval/score", "true reward": "gold/score"}
        metrics.plot_frontier(args.output_dir, "eval/kl", curves)
        metrics.plot_categories(args.output_dir, dict(zip(("before", "after"), both_rows)))
        figures = {"before": now["before"], "after": after, "categories": table}
        write_json(f"{args.output_dir}/summary.json", {"iterations": now["iteration"], **figures})  # last
        metrics.say_if_worse(now["before"], after)
        models.report_export(f"{args.output_dir}/model", args.model, args.seed)


LARGE = dict(  # what no paper says, for 7B: lengths and memory
    missing_eos_penalty=0.0, max_new_tokens=1024, slots=16, micro_batch_size=1, score_batch_size=8,
    eval_prompts=256, gradient_checkpointing=True,
)  # fmt: skip
RECIPES = {
    "tiny": (
        "the tiny world: the default, about a minute on two CPU cores",
        Args(),
    ),
    "base": (
        "a pretrained chat model: the default where the model or the data are not the tiny world's",
        Args(
            epochs=1,  # Llama 2 and Qwen: one step a minibatch
            kl_coef=0.04,  # Qwen (arXiv:2309.16609), section 3.2.2, as the learning rates
            lr=1e-6,
            value_lr=5e-6,
            prompts_per_iteration=32,  # ours, as all below
            minibatch_size=32,
            micro_batch_size=4,
            score_batch_size=8,
            max_new_tokens=256,
            max_length=1024,
            slots=32,
            eval_prompts=200,
        ),
    ),
    "llama2": (
        "Llama 2's PPO; give --safety-scorer for its gate",
        Args(
            model="meta-llama/Llama-2-7b-chat-hf",  # theirs starts from rejection sampling
            dataset="Anthropic/hh-rlhf",  # its prompts; Meta's own are not public
            iterations=200,  # section 3.2.3, as all below: 200 to 400
            prompts_per_iteration=512,  # batch of 512
            n_samples=1,
            reward_norm="whiten",
            kl_coef=0.01,  # 0.005 for 34B and 70B
            epochs=1,  # one gradient step per minibatch
            minibatch_size=64,
            clip_ratio=0.2,
            lr=1e-6,
            value_lr=1e-6,
            adam_eps=1e-5,
            weight_decay=0.1,
            max_grad_norm=1.0,
            clip_value=0.2,  # not said
            value_warmup_steps=0,  # not said
            max_length=4096,  # not said
            **LARGE,
        ),
    ),
    "qwen": (
        "Qwen's PPO; --ptx-dataset FILE --ptx-coef for its pretrained gradient, whose weight is not said",
        Args(
            model="Qwen/Qwen2.5-7B-Instruct",  # an SFT model of theirs
            dataset="Anthropic/hh-rlhf",  # its prompts; theirs are not public
            n_samples=2,  # section 3.2.2, as all below
            top_p=0.9,
            reward_norm="mean",
            kl_coef=0.04,
            lr=1e-6,
            value_lr=5e-6,
            clip_value=0.15,
            value_warmup_steps=50,
            iterations=200,  # not said, as all below
            prompts_per_iteration=256,
            epochs=1,
            minibatch_size=64,
            max_length=2048,
            **LARGE,
        ),
    ),
    "advantage_model": (
        "AM-PPO-SR of Advantage Model + Selective Rehearsal",
        Args(
            model="Qwen/Qwen2.5-7B-Instruct",  # the paper's own SFT model is not public
            scorer="runs/advantage_model",
            dataset="Anthropic/hh-rlhf",  # section 4.1, as all below
            lr=5e-7,
            iterations=100,  # 100 optimiser steps of 256
            prompts_per_iteration=256,
            n_samples=1,
            minibatch_size=256,
            epochs=1,
            value_warmup_steps=0,
            kl_coef=0.04,  # not said
            rehearsal_coef=0.01,
            rehearsal_norm="sum",
            rehearsal_encoder="princeton-nlp/sup-simcse-roberta-base",  # section 3.2
            rehearsal_clusters=50,  # c and k are not said; nor is what follows
            reward_norm="none",  # an advantage needs none
            value_lr=5e-6,
            max_length=2048,
            **LARGE,
        ),
    ),
}

if __name__ == "__main__":
    launch(main, RECIPES)
