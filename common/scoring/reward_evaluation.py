"""Evaluate reward.py and advantage_model.py on held-out comparisons, and get the log probabilities and the
responses that they need from a language model, the policy whose responses they score."""

import collections
import copy
import itertools
import math
from functools import partial
from statistics import fmean

import torch

from common import dist, models, responses
from common.batches import labelled_pairs, of_each_comparison, split
from common.errors import InputError
from common.data import comparisons, mixtures, tiny
from common.loading import checks, pretrained
from common.scoring import measures


def scored_rows(held_out, values, pairwise=False) -> list[dict]:
    """Turn comparisons into rows of samples.jsonl.

    values: in order of the comparisons, the `score` of each response; for a pairwise scorer the log odds of
    each labelled pair, which become the row's `differences`."""
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
    """The evaluation of reward.py and advantage_model.py: how well scores predict the labels of held-out
    comparisons, overall and by data set and category. Each call sets:

    samples: the comparisons as rows of samples.jsonl, with the new scores.
    losses: negative log-likelihood of each comparison's labels, scaled so that its mean is that of all pairs
      (pairs of one prompt are not independent)."""

    def __init__(self, held_out, args):
        self.held_out = held_out
        self.fingerprint = comparisons.fingerprint(held_out)
        self.args = args
        self.samples = []
        self.losses = []

    def __call__(self, model) -> dict[str, float]:
        scores = itertools.chain.from_iterable(scores_of_each(model, self.held_out, self.args))
        self.samples = scored_rows(self.held_out, scores)
        metrics = measures.pair_metrics(self.samples)
        pairs = measures.pairs_of(self.samples)
        differences = torch.tensor([float(d) for d, *_ in pairs])
        label = torch.tensor([measures.label_of(self.samples[number]) for _, number, *_ in pairs])
        nll = torch.nn.functional.binary_cross_entropy_with_logits(differences, label, reduction="none")
        sizes = list(collections.Counter(number for _, number, *_ in pairs).values())
        self.losses = [x.sum().item() * len(sizes) / len(pairs) for x in nll.split(sizes)]
        for (_, name), rows in measures.parts_of(self.samples if metrics["pairs"] else []).items():
            differences = [d for d, *_ in measures.pairs_of(rows)]
            metrics[f"accuracy/{name}"] = measures.accuracy(differences)
            metrics[f"pairs/{name}"] = float(len(differences))
        return {f"eval/{key}": x for key, x in metrics.items()}


def scores_of_each(model, some_comparisons, args) -> list[list[float]]:
    """Return the scores of each comparison's responses, labelled and sampled, on every rank."""

    def forward(model, batch):
        return [scores.tolist() for scores in models.scores_of(model, batch).cpu().split(batch.sizes)]

    return of_each_comparison(forward, model, some_comparisons, args.micro_batch_size, args.share_prompt)


# -- log probabilities and samples of a language model ---------------------------------------------
def check_sft_model(name, tokenizer, args) -> str | None:
    """Return the name of the causal LM that a reward or advantage model is compared with: `name`, by default
    runs/sft if --model is tiny and else --model itself; None if --model is not a causal LM.

    Raises InputError if it has other tokens, or needs to be sampled and cannot be."""
    if not name and not pretrained.is_causal_lm(args.model):
        return None
    name = name or ("runs/sft" if args.model == "tiny" else args.model)
    pretrained.check_causal_lm(name, tokenizer, args.chat_template)
    pretrained.check_room(args.max_length, name)
    if args.length_prompts or getattr(args, "expected_reward_samples", 0):
        pretrained.check_sampled(name, "Only --length-prompts and --expected-reward-samples need samples")
    return name


def policy_samples(model, prompts, tokenizer, n, args, seed) -> list[tuple]:
    """Sample n responses of a policy to each comparison's prompt and return their ids on every rank. All
    ranks must call it together.

    Unfinished responses are dropped, because a score is read at the end-of-sequence token. Prompts that leave
    no room, in the policy or in --model, get no responses."""
    room = min(models.n_positions(model.config), pretrained.n_positions(args.model)) - args.max_new_tokens
    samples = [()] * len(prompts)
    fits = {i: c for i, c in enumerate(prompts) if len(c.prompt_ids) <= room}
    prompts_of = [responses.Prompt(c.prompt_ids.tolist(), c.prompt, c.row) for c in fits.values()]
    pairs = responses.answers(model, tokenizer, prompts_of, args, seed, n=n)
    for i, of_prompt in zip(fits, split(pairs, n)):
        ended = [[*r.ids[:-1], tokenizer.eos_token_id] for _, r in of_prompt if r.finished]
        samples[i] = tuple(torch.tensor(ids, dtype=torch.int32) for ids in ended)
    n_ended = sum(map(len, samples))
    if n_ended < n * len(prompts) and dist.is_main():
        print(f"{n_ended} of {n * len(prompts)} samples had room, ended within --max-new-tokens and are used")
    return samples


def baselines_and_samples(name, held_out, tokenizer, args, device, seed, train=()):
    """Compute the baseline of the policy `name`, and sample it: (metrics, comparisons); empty without a name.

    metrics: the accuracy of its log probability as a score, which a reward model must beat.
    comparisons: the first --length-prompts prompts, held-out ones first, with up to 8 finished responses of
      the policy instead of the labelled ones."""
    if not (name and held_out):
        return {}, []
    policy = pretrained.load_frozen(name, tokenizer, args, device)
    logprobs = comparisons.seq_logprobs(policy, held_out, args.micro_batch_size)
    likelier = [x[i] - x[j] for x, c in zip(logprobs, held_out) for i, j in labelled_pairs(c)]
    metrics = {"baseline/sft_logprob_accuracy": measures.accuracy(likelier)}
    prompts = list({c.key: c for c in [*held_out, *train]}.values())[: args.length_prompts]
    samples = policy_samples(policy, prompts, tokenizer, 8, args, seed)
    return metrics, [c._replace(response_ids=[], samples=ids) for c, ids in zip(prompts, samples) if ids]


def length_bias(model, sft_model, train, held_out, tokenizer, args) -> dict[str, float]:
    """Compute the accuracy of the SFT model's log probability on held-out pairs, and the correlation of score
    and length over its responses (length_metrics)."""
    device = model.device
    metrics, sampled = baselines_and_samples(sft_model, held_out, tokenizer, args, device, args.seed, train)
    return {**metrics, **length_metrics(sampled, scores_of_each(model, sampled, args))}


def length_metrics(sampled, scores) -> dict[str, float]:
    """Compute the correlation of length and score over a prompt's samples: its mean over prompts with a 95 %
    interval, and the number of prompts. Only prompts with three or more samples, of which both length and
    score vary, count; {} without such prompts."""
    of_prompts = [(list(map(len, c.samples)), x) for c, x in zip(sampled, scores) if len(x) > 2]
    correlations = [measures.correlation(lengths, x) for lengths, x in of_prompts]
    defined = [x for x in correlations if not math.isnan(x)]
    metrics = measures.change("length/correlation", [0.0] * len(defined), defined) if defined else {}
    return {**metrics, "length/prompts": len(defined)} if defined else {}


def expected_reward_metrics(model, policy_name, held_out, tokenizer, args):
    """Compute the metrics of length_bias for an advantage model, and check its expected reward e(x): by
    arXiv:2309.10202, eq. 7, e(x) is the mean r over the policy's responses.

    expected/bias, expected/rmse: mean and root mean square over prompts of e - mean r, in standard deviations
      of r within a prompt. The variance that is due to the few samples is subtracted from the second.
    expected/correlation: of e and the mean r over prompts, which the noise of the few samples lowers."""
    seed = dist.seed_of(args.seed, "held_out_samples")
    metrics, sampled = baselines_and_samples(policy_name, held_out, tokenizer, args, model.device, seed)

    def by_comparison(model, batch):
        rewards, expected = models.rewards_and_expected(model, batch)
        return list(zip(rewards.cpu().split(batch.sizes), expected.cpu()))

    outputs = of_each_comparison(by_comparison, model, sampled, args.micro_batch_size, args.share_prompt)
    several = [(rewards, expected) for rewards, expected in outputs if len(rewards) > 1]
    if not several:
        return metrics
    means = torch.stack([rewards.mean() for rewards, _ in several])
    errors = torch.stack([expected for _, expected in several]) - means
    deviation = torch.stack([rewards.var() for rewards, _ in several]).mean().sqrt()
    noise = torch.stack([rewards.var() / len(rewards) for rewards, _ in several])  # variance of the mean r
    rmse = (errors.square().mean() - noise.mean()).clamp(min=0).sqrt()
    metrics["expected/bias"] = (errors.mean() / deviation).item()
    metrics["expected/rmse"] = (rmse / deviation).item()
    metrics["expected/correlation"] = measures.correlation([e.item() for _, e in several], means.tolist())
    metrics.update(length_metrics(sampled, [rewards.tolist() for rewards, _ in outputs]))
    if mixtures.is_tiny(args.eval_dataset or args.dataset):
        gold = []
        for c in sampled:
            texts = tokenizer.batch_decode(c.samples, skip_special_tokens=True)
            gold.append(fmean(tiny.gold_score(c.prompt[-1]["content"], text) for text in texts))
        metrics["gold/expected_correlation"] = measures.correlation([e.item() for _, e in outputs], gold)
    return metrics


def with_policy_answers(train, name, tokenizer, args, device):
    """Add the ratios and samples that the losses of the Advantage Model (arXiv:2309.10202) need to its
    training comparisons, using the policy `name`. Returns (comparisons, metrics).

    ratios: for eq. 8, pi / pi'_k of each response, for the K policies that wrote the data.
    samples: for eq. 7, responses of the policy, whose mean reward e(x) learns.
    Raises InputError if these are needed and there is no policy."""
    n = args.expected_reward_samples
    k = args.n_others
    if (k or n) and name is None:
        raise InputError(f"{args.model} is not a causal LM. Name one with --policy, for ratios and e(x).")
    for other in args.behavior_policies:
        pretrained.check_causal_lm(other, tokenizer, args.chat_template)
        pretrained.check_room(args.max_length, other)
    policy = pretrained.load_frozen(name, tokenizer, args, device) if k or n else None
    ratios = [torch.zeros(len(c.response_ids), 0) for c in train]
    metrics = {}
    if k:
        score = partial(comparisons.seq_logprobs, comparisons=train, micro_batch_size=args.micro_batch_size)
        by_other = [pretrained.ask_policy(x, tokenizer, args, device, score) for x in args.behavior_policies]
        of_all = lambda i: torch.stack([of_each[i] for of_each in by_other], 1)
        behavior = [of_all(i) for i in range(len(train))] if by_other else behavior_columns(train, args)
        ratios = [(of_pi[:, None] - of_others).exp() for of_pi, of_others in zip(score(policy), behavior)]
        metrics = {"ratio/clipped": (torch.cat(ratios) > args.ratio_clip).double().mean().item()}
    samples = [()] * len(train)
    if n:
        seed = dist.seed_of(args.seed, "samples")
        fitted = copy.copy(args)  # run.begin fits --slots to what is in memory then
        checks.fit_slots(fitted, [policy])
        samples = policy_samples(policy, train, tokenizer, n, fitted, seed)
    answered = []
    for c, of_labelled, ids in zip(train, ratios, samples):
        # 1 is a placeholder: the loss ignores the advantages of samples
        of_all = torch.cat([of_labelled.clamp(max=args.ratio_clip), torch.ones(len(ids), k)])
        answered.append(c._replace(ratios=of_all, samples=ids))
    return answered, metrics


def behavior_columns(train, args) -> list[torch.Tensor]:
    """Read log pi'_k(y | x) of each response from the data: a tensor (responses, K) per comparison.

    The columns are chosen_behavior_logprobs and rejected_behavior_logprobs or, for a ranking,
    behavior_logprobs of each response; each is a list of at least K numbers. Raises InputError for anything
    else."""
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
            raise InputError(f"{c.row.where}: --n-others needs {wanted}, {mend}") from None
    return logprobs
