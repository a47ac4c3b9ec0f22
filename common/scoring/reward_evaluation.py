"""What reward.py and advantage_model.py measure on held-out comparisons, and what they ask a language model:
the policy whose responses they score."""

import itertools
import math
from functools import partial
from statistics import fmean

import torch

from common import dist, models, responses
from common.batches import labelled_pairs, of_each_comparison, split
from common.errors import InputError
from common.data import comparisons, mixtures, tiny
from common.loading import pretrained
from common.scoring import measures


def scored_rows(held_out, values, pairwise=False) -> list[dict]:
    """Comparisons as rows of samples.jsonl. values, in their order: the `score` of every response, or, of a
    scorer that compares, the log odds of every labelled pair, a row's `differences`."""
    rows = [comparisons.describe(c) for c in held_out]
    values = iter(values)
    for row, c in zip(rows, held_out):
        if pairwise:
            row["differences"] = [next(values) for _ in labelled_pairs(c)]
        else:
            for response in row["responses"]:
                response["score"] = next(values)
    return rows


class HeldOutComparisons:
    """What scripts that learn from comparisons evaluate: how well scores predict labels, of all held-out ones
    and of each data set and category. `samples`: these as rows of samples.jsonl, with the last scores.
    `losses`: negative log likelihoods of their pairs, of a soft label by its likelier side."""

    def __init__(self, held_out, args):
        self.held_out = held_out
        self.args = args
        self.samples = []
        self.losses = []

    def __call__(self, model) -> dict[str, float]:
        scores = itertools.chain.from_iterable(scores_of_each(model, self.held_out, self.args))
        self.samples = scored_rows(self.held_out, scores)
        metrics = measures.pair_metrics(self.samples)
        pairs = measures.pairs_of(self.samples)
        self.losses = torch.nn.functional.softplus(-torch.tensor([float(d) for d, *_ in pairs])).tolist()
        for (_, name), rows in measures.parts_of(self.samples if metrics["pairs"] else []).items():
            differences = [d for d, *_ in measures.pairs_of(rows)]
            metrics[f"accuracy/{name}"] = measures.accuracy(differences)
            metrics[f"pairs/{name}"] = float(len(differences))
        return {f"eval/{key}": x for key, x in metrics.items()}


def scores_of_each(model, some_comparisons, args) -> list[list[float]]:
    """The scores of each comparison's responses and samples, on every rank."""

    def by_comparison(model, batch):
        return [scores.tolist() for scores in models.scores_of(model, batch).cpu().split(batch.sizes)]

    size = args.micro_batch_size
    share_prompt = args.share_prompt
    return of_each_comparison(by_comparison, model, some_comparisons, size, share_prompt)


# -- what a language model says of comparisons -----------------------------------------------------
def check_sft_model(name, tokenizer, args) -> str | None:
    """The name of the causal LM that a reward or advantage model is compared with: `name`, or, of None,
    runs/sft for the model tiny and else --model, if it is one. It has the same tokens and can be sampled."""
    if not name and not pretrained.is_causal_lm(args.model):
        return None
    name = name or ("runs/sft" if args.model == "tiny" else args.model)
    pretrained.check_causal_lm(name, tokenizer, args.chat_template)
    if args.length_prompts or getattr(args, "expected_reward_samples", 0):
        pretrained.check_sampled(name, "--length-prompts 0 does without samples")
    return name


def policy_samples(model, prompts, tokenizer, n, max_new_tokens, seed, slots=64) -> list[tuple]:
    """n responses of a policy to each comparison's prompt, as ids, on every rank, without those that did not
    end: a score is read at an end token. Prompts that leave no room get none. Every rank must call it."""
    room = models.n_positions(model.config) - max_new_tokens
    samples = [()] * len(prompts)
    fits = {i: c for i, c in enumerate(prompts) if len(c.prompt_ids) <= room}
    prompts_of = [responses.Prompt(c.prompt_ids.tolist(), c.prompt, c.row) for c in fits.values()]
    options = {"n": n, "max_new_tokens": max_new_tokens, "seed": seed, "slots": slots}
    pairs = responses.sample_pairs(model, tokenizer, prompts_of, **options)
    for i, of_prompt in zip(fits, split(pairs, n)):
        ended = [[*r.ids[:-1], tokenizer.eos_token_id] for _, r in of_prompt if r.finished]
        samples[i] = tuple(torch.tensor(ids, dtype=torch.int32) for ids in ended)
    n_ended = sum(map(len, samples))
    if n_ended < n * len(prompts) and dist.is_main():
        print(f"{n_ended} of {n * len(prompts)} samples ended within {max_new_tokens} tokens and count")
    return samples


def baselines_and_samples(name, held_out, tokenizer, args, device, seed, train=()):
    """Of the policy of this name, if there is one: (the accuracy of its log probability as a score, which a
    reward model must beat; the first --length-prompts prompts, held-out ones first, each with those of 8
    responses that ended in place of the labelled ones)."""
    if not (name and held_out):
        return {}, []
    policy = pretrained.load_frozen(name, tokenizer, args, device)
    logprobs = comparisons.seq_logprobs(policy, held_out, args.micro_batch_size)
    likelier = [x[i] - x[j] for x, c in zip(logprobs, held_out) for i, j in labelled_pairs(c)]
    metrics = {"baseline/sft_logprob_accuracy": measures.accuracy(likelier)}
    prompts = list({c.key: c for c in [*held_out, *train]}.values())[: args.length_prompts]
    samples = policy_samples(policy, prompts, tokenizer, 8, args.max_new_tokens, seed, args.slots)
    return metrics, [c._replace(response_ids=[], samples=ids) for c, ids in zip(prompts, samples) if ids]


def length_bias(model, sft_model, train, held_out, tokenizer, args) -> dict[str, float]:
    """How well the SFT model's log probability scores held-out pairs, and length_metrics of its responses."""
    device = model.device
    metrics, sampled = baselines_and_samples(sft_model, held_out, tokenizer, args, device, args.seed, train)
    return {**metrics, **length_metrics(sampled, scores_of_each(model, sampled, args))}


def length_metrics(sampled, scores) -> dict[str, float]:
    """The mean correlation of length and score over a prompt's samples and its 95 % interval, of prompts with
    three or more of them where both vary, and how many these are; of none, nothing."""
    of_prompts = [(list(map(len, c.samples)), x) for c, x in zip(sampled, scores) if len(x) > 2]
    correlations = [measures.correlation(lengths, x) for lengths, x in of_prompts]
    rows = [{"r": x} for x in correlations if not math.isnan(x)]
    metrics = measures.gains([{"r": 0.0} for _ in rows], rows, {"length/correlation": "r"})
    return {**metrics, "length/prompts": len(rows)} if rows else {}


def expected_reward_metrics(model, policy_name, held_out, tokenizer, args):
    """The same of an advantage model, and what its policy's responses say of e(x): is it their mean r, eq. 7?
    `expected/bias` and `expected/rmse` are of e - mean r, over prompts, in standard deviations of r
    within a prompt; the samples' own noise is taken off the second."""
    seed = dist.seed_of(args.seed, "held_out_samples")
    metrics, sampled = baselines_and_samples(policy_name, held_out, tokenizer, args, model.device, seed)

    def by_comparison(model, batch):
        rewards, expected = models.rewards_and_expected(model, batch)
        return list(zip(rewards.cpu().split(batch.sizes), expected.cpu()))

    outputs = of_each_comparison(by_comparison, model, sampled, args.micro_batch_size, args.share_prompt)
    several = [(rewards, expected) for rewards, expected in outputs if len(rewards) > 1]
    if not several:
        return metrics
    errors = torch.stack([expected - rewards.mean() for rewards, expected in several])
    deviation = torch.stack([rewards.var() for rewards, _ in several]).mean().sqrt()
    noise = torch.stack([rewards.var() / len(rewards) for rewards, _ in several])  # of a mean of so few
    rmse = (errors.square().mean() - noise.mean()).clamp(min=0).sqrt()
    metrics["expected/bias"] = (errors.mean() / deviation).item()
    metrics["expected/rmse"] = (rmse / deviation).item()
    metrics.update(length_metrics(sampled, [rewards.tolist() for rewards, _ in outputs]))
    if mixtures.is_tiny(args.eval_dataset or args.dataset):
        gold = []
        for c in sampled:
            texts = tokenizer.batch_decode(c.samples, skip_special_tokens=True)
            gold.append(fmean(tiny.gold_score(c.prompt[-1]["content"], text) for text in texts))
        metrics["gold/expected_correlation"] = measures.correlation([e.item() for _, e in outputs], gold)
    return metrics


def with_policy_answers(train, name, tokenizer, args, device):
    """(the training comparisons of advantage_model.py, metrics). Eq. 8 needs each response's ratios to the K
    policies that wrote the data, eq. 7 responses of the policy `name`, whose mean reward e learns."""
    n = args.expected_reward_samples
    k = args.n_others
    if (k or n) and name is None:
        raise InputError(f"{args.model} is no causal LM: name the --policy that ratios and e are of")
    for other in args.behavior_policies:
        pretrained.check_causal_lm(other, tokenizer, args.chat_template)
    policy = pretrained.load_frozen(name, tokenizer, args, device) if k or n else None
    ratios = [torch.zeros(len(c.response_ids), 0) for c in train]
    metrics = {}
    if k:
        seq_logprobs = comparisons.seq_logprobs
        size = args.micro_batch_size
        score = partial(seq_logprobs, comparisons=train, micro_batch_size=size)
        names = args.behavior_policies
        by_policy = [pretrained.ask_policy(name, tokenizer, args, device, score) for name in names]
        of_all = lambda i: torch.stack([of_each[i] for of_each in by_policy], 1)
        behavior = [of_all(i) for i in range(len(train))] if by_policy else behavior_columns(train, args)
        logprobs = seq_logprobs(policy, train, size)
        ratios = [(of_policy[:, None] - of_others).exp() for of_policy, of_others in zip(logprobs, behavior)]
        metrics = {"ratio/clipped": (torch.cat(ratios) > args.ratio_clip).double().mean().item()}
    samples = [()] * len(train)
    if n:
        seed = dist.seed_of(args.seed, "samples")
        samples = policy_samples(policy, train, tokenizer, n, args.max_new_tokens, seed, args.slots)
    answered = []
    for c, of_labelled, ids in zip(train, ratios, samples):
        # Samples enter no advantage: their ratios only fill the place
        of_all = torch.cat([of_labelled.clamp(max=args.ratio_clip), torch.ones(len(ids), k)])
        answered.append(c._replace(ratios=of_all, samples=ids))
    return answered, metrics


def behavior_columns(train, args) -> list[torch.Tensor]:
    """log pi'_k(y | x) of every response, (responses, K) for each comparison, from the columns
    chosen_behavior_logprobs and rejected_behavior_logprobs (of a ranking: behavior_logprobs of each
    response), lists of K numbers or more."""
    logprobs = []
    for c in train:
        try:
            values = [x[: args.n_others] for x in comparisons.column(c, "behavior_logprobs")]
            logprobs.append(torch.tensor(values, dtype=torch.float32).reshape(len(c.texts), args.n_others))
            if not (logprobs[-1] <= 0).all():  # NaN, or a probability without its logarithm
                raise ValueError
        except (TypeError, ValueError, RuntimeError):
            wanted = "chosen_behavior_logprobs and rejected_behavior_logprobs"
            mend = f"lists of {args.n_others} numbers of at most 0, or --behavior-policies"
            raise InputError(f"{c.row.where}: --n-others wants {wanted}, {mend}") from None
    return logprobs
