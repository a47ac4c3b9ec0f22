"""What scripts measure on held-out rows before, while and after they train."""

import gc
import math
from functools import partial

import torch

from common import comparisons, data, dist, generate, loading, metrics, models, pairwise, scorers, tiny
from common.batches import (
    a_part,
    labelled_pairs,
    make_blocks,
    of_each_comparison,
    prompt_key,
    response_mask,
    turns_key,
)
from common.errors import InputError
from common.losses import kl_estimate

FIGURES = {  # figure -> the column of samples.jsonl whose mean it is
    "eval/score": "score", "eval/kl": "kl", "gold/score": "gold", "gold/perfect": "perfect",
    "sample/length": "tokens", "sample/finished": "finished",
}  # fmt: skip


def describe_sample(turns, response, true_reward: bool, **columns) -> dict:
    """A response as a row of samples.jsonl; true_reward: on the tiny world, which knows it."""
    row = {
        "prompt": turns,
        "response": response.text,
        "tokens": len(response.ids),
        "finished": response.finished,
    }
    row.update(columns)
    if true_reward:
        question = turns[-1]["content"]
        row["gold"] = tiny.gold_score(question, response.text)
        row["perfect"] = tiny.perfect_score(question)
    return row


class HeldOutDocuments:
    """What sft.py evaluates: the held-out loss, and `samples`, answers to the prompts of held-out
    documents."""

    def __init__(self, documents, tokenizer, args):
        self.documents, self.tokenizer, self.args, self.samples = documents, tokenizer, args, []
        self.blocks = make_blocks(documents, args.max_length, args.packing)
        self.true_reward = data.is_tiny(args.eval_dataset or args.dataset)
        if args.sample_prompts:
            generate.check_sampled(args.model, "--sample-prompts 0 trains without samples")

    def fingerprint(self) -> list:
        return [document.ids.tolist() for document in self.documents]

    def __call__(self, model) -> dict[str, float]:
        self.samples = self.answers(model)
        return {**self.loss(model), **metrics.means(self.samples, FIGURES)}

    def loss(self, model) -> dict[str, float]:
        if not self.documents:
            return {}
        return {"eval/nll": models.mean_nll(model, self.blocks, self.args.micro_batch_size)}

    def answers(self, model) -> list[dict]:
        """Rows of samples.jsonl: one response to each of the first prompts that leave room for it."""
        args = self.args
        if not args.sample_prompts:
            return []
        room = models.n_positions(model.config) - args.max_new_tokens
        prompts = []
        for messages in {prompt_key(d.messages): d.messages[:-1] for d in self.documents}.values():
            ids = data.prompt_ids(self.tokenizer, messages)
            if len(ids) <= room:
                prompts.append((messages, ids))
            if len(prompts) == args.sample_prompts:  # the rest need not be tokenised
                break
        try:
            responses = generate.sample_responses(
                model,
                self.tokenizer,
                [ids for _, ids in prompts],
                n=1,
                max_new_tokens=args.max_new_tokens,
                temperature=args.temperature,
                seed=args.seed,
                slots=args.slots,
            )
        except InputError as error:  # it takes no positions, for one
            raise InputError(f"{error}; --sample-prompts 0 trains without samples") from None
        return [
            describe_sample(messages, response, self.true_reward)
            for (messages, _), [response] in zip(prompts, responses)
        ]


def answer_once(policy, tokenizer, prompts, args):
    """[(prompt, response)]: a response at temperature 1 to each held-out prompt, with the same seed whenever a
    run asks."""
    return generate.sample_pairs(
        policy,
        tokenizer,
        prompts,
        max_new_tokens=args.max_new_tokens,
        slots=args.slots,
        seed=dist.seed_of(args.seed, "eval"),
    )


class HeldOutPrompts:
    """What ppo.py evaluates: one response at temperature 1 to each held-out prompt, scored; its KL to the
    reference, the entropy and, of held-out text, the alignment tax. `samples`: rows of samples.jsonl."""

    def __init__(self, prompts, scorer, reference, tokenizer, args, text=()):
        self.prompts = a_part(prompts, args.eval_prompts)
        self.scorer, self.reference, self.tokenizer, self.args = scorer, reference, tokenizer, args
        self.blocks_of_text = make_blocks(text, args.max_length, args.packing)
        self.true_reward = data.is_tiny(args.eval_dataset or args.dataset)
        self.samples = []

    def fingerprint(self) -> list:
        text = [document.ids.tolist() for block in self.blocks_of_text for document in block]
        return [prompt.key for prompt in self.prompts] + text

    def __call__(self, policy) -> dict[str, float]:
        figures = self.answer(policy) if self.prompts else {}
        if self.blocks_of_text:
            figures["eval/ptx_nll"] = models.mean_nll(policy, self.blocks_of_text, self.args.micro_batch_size)
        return figures

    def answer(self, policy):
        args = self.args
        pairs = answer_once(policy, self.tokenizer, self.prompts, args)
        scores, _ = self.scorer.score(pairs)
        documents = generate.documents(pairs)
        per_token = partial(
            models.per_token,
            plan=[make_blocks(documents, args.max_length, args.packing)],
            micro_batch_size=args.micro_batch_size,
        )
        logprobs, entropies = per_token(models.logprobs_and_entropies, policy)
        with dist.at_hand(policy.device, args.offload, self.reference):
            [ref_logprobs] = per_token(models.logprobs, self.reference)
        kl = kl_estimate(logprobs, ref_logprobs).sum(1)
        self.samples = [
            describe_sample(
                prompt.turns, response, self.true_reward, category=prompt.category, score=score, kl=nats
            )
            for (prompt, response), score, nats in zip(pairs, scores.tolist(), kl.tolist())
        ]
        mean_entropy = entropies.sum() / response_mask(documents).sum()
        return {**metrics.means(self.samples, FIGURES), "eval/entropy": mean_entropy.item()}


def true_rewards(pairs, args) -> dict[str, float]:
    """The mean true reward of responses to prompts of the tiny world; of others, nothing."""
    if not data.is_tiny(args.dataset):
        return {}
    gold = [tiny.gold_score(prompt.turns[-1]["content"], response.text) for prompt, response in pairs]
    return {"reward/gold": sum(gold) / len(gold)}


class HeldOutComparisons:
    """What reward.py and advantage_model.py evaluate: how well scores of held-out comparisons predict their
    labels. `samples`: the comparisons as rows of samples.jsonl, with the last scores."""

    def __init__(self, held_out, args):
        self.held_out, self.args, self.samples = held_out, args, []

    def __call__(self, model) -> dict[str, float]:
        self.samples = [comparisons.describe(c) for c in self.held_out]
        for row, scores in zip(self.samples, scores_of_each(model, self.held_out, self.args)):
            for response, score in zip(row["responses"], scores):
                response["score"] = score
        return metrics.pair_figures(self.samples)

    def known_figures(self) -> dict[str, float]:
        """Of the last scores: what the tiny world knows, and how differently categories score."""
        return {
            **metrics.known_figures(self.samples),
            "eval/category_spread": metrics.category_spread(self.samples),
        }


def scores_of_each(model, some_comparisons, args) -> list[list[float]]:
    """The scores of each comparison's responses and samples, on every rank."""

    def by_comparison(model, batch):
        return [scores.tolist() for scores in models.scores_of(model, batch).split(batch.sizes)]

    return of_each_comparison(
        by_comparison, model, some_comparisons, args.micro_batch_size, args.share_prompt
    )


class HeldOutPairs:
    """The same of train_pairwise.py, whose model compares two responses: `samples` have the log odds of each
    labelled pair, better one first, as `differences`."""

    def __init__(self, held_out, tokenizer, args):
        self.held_out, self.tokenizer, self.args, self.samples = held_out, tokenizer, args, []

    def __call__(self, model) -> dict[str, float]:
        pairs = [(c, better, worse) for c in self.held_out for better, worse in labelled_pairs(c)]
        texts = [(c.prompt, c.texts[better], c.texts[worse]) for c, better, worse in pairs]
        log_odds = iter(pairwise.preferences(model, self.tokenizer, texts, self.args.micro_batch_size))
        self.samples = [
            {**comparisons.describe(c), "differences": [next(log_odds) for _ in labelled_pairs(c)]}
            for c in self.held_out
        ]
        return metrics.pair_figures(self.samples)


# -- what a language model says of comparisons -----------------------------------------------------
def check_sft_model(name, tokenizer, args) -> str | None:
    """The name of the causal LM that a reward or advantage model is compared with (loading.sft_model: `name`,
    if it is not None), which has the tokens of --model and can be sampled."""
    name = loading.sft_model(args.model, name)
    if name:
        loading.check_causal_lm(name, tokenizer if name != args.model else None, args.chat_template)
        if args.length_prompts or getattr(args, "expected_reward_samples", 0):
            generate.check_sampled(name, "--length-prompts 0 does without samples")
    return name


def load_policy(name, tokenizer, args, device):
    return dist.shard(loading.load_policy(name, tokenizer, seed=args.seed).requires_grad_(False), device)


def length_bias(model, sft_model, held_out, tokenizer, args) -> dict[str, float]:
    """Two baselines that a scorer must beat on the held-out pairs, and the length_figures of 8 responses of
    the SFT model to each of some held-out prompts."""
    policy = sft_model and load_policy(sft_model, tokenizer, args, model.device)
    figures = baselines(policy, held_out, args.micro_batch_size)
    if not (policy and held_out and args.length_prompts):
        return figures
    sampled = with_samples(policy, held_out, tokenizer, args, args.seed)
    return {**figures, **length_figures(sampled, scores_of_each(model, sampled, args))}


def length_figures(sampled, scores) -> dict[str, float]:
    """The mean correlation of length and score over a prompt's samples, of prompts with three or more of them
    where both vary, and how many these are; of none, nothing."""
    correlations = []
    for c, of_prompt in zip(sampled, scores):
        correlation = metrics.correlation([len(ids) for ids in c.samples], of_prompt)
        if len(of_prompt) > 2 and not math.isnan(correlation):
            correlations.append(correlation)
    n = len(correlations)
    return {"length/correlation": sum(correlations) / n, "length/prompts": n} if n else {}


def with_samples(policy, held_out, tokenizer, args, seed):
    """The first --length-prompts held-out prompts, each with the responses that ended of 8 that a policy
    samples in place of the labelled ones."""
    prompts = comparisons.one_of_each_prompt(held_out)[: args.length_prompts]
    samples = policy_samples(policy, prompts, tokenizer, 8, args.max_new_tokens, seed, args.slots)
    return [comparisons.with_samples_only(c, ids) for c, ids in zip(prompts, samples) if ids]


def with_policy_answers(train, name, tokenizer, args, device):
    """(the training comparisons of advantage_model.py with what eq. 8 and 7 need of other policies, figures):
    each response's ratios to the K policies that wrote the data, and responses of the policy `name`, to whose
    mean reward e is regressed."""
    n, k = args.expected_reward_samples, args.n_others
    if (k or n) and name is None:
        raise InputError(f"{args.model} is no causal LM: name the --policy that ratios and e are of")
    for other in args.behavior_policies:
        loading.check_causal_lm(other, tokenizer if other != args.model else None, args.chat_template)
    policy = load_policy(name, tokenizer, args, device) if k or n else None
    ratios = [torch.zeros(len(c.response_ids), 0) for c in train]
    figures = {}
    if k:
        ratios = ratios_to_others(policy, train, tokenizer, args)
        figures = {"ratio/clipped": (torch.cat(ratios) > args.ratio_clip).double().mean().item()}
    samples = [()] * len(train)
    if n:
        seed = dist.seed_of(args.seed, "samples")
        samples = policy_samples(policy, train, tokenizer, n, args.max_new_tokens, seed, args.slots)
    # Samples enter no advantage: their ratios only fill the place
    train = [
        c._replace(
            ratios=torch.cat([of_labelled.clamp(max=args.ratio_clip), torch.ones(len(ids), k)]), samples=ids
        )
        for c, of_labelled, ids in zip(train, ratios, samples)
    ]
    return train, figures


def ratios_to_others(policy, train, tokenizer, args) -> list[torch.Tensor]:
    """pi(y | x) / pi'_k(y | x) of every response, (responses, K) for each comparison."""
    if args.behavior_policies:
        behavior = behavior_logprobs(train, tokenizer, args, policy.device)
    else:
        behavior = behavior_columns(train, args)
    logprobs = comparisons.seq_logprobs(policy, train, args.micro_batch_size)
    return [(of_policy[:, None] - of_k).exp() for of_policy, of_k in zip(logprobs, behavior)]


def behavior_columns(train, args):
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


def behavior_logprobs(train, tokenizer, args, device):
    """The same from --behavior-policies."""
    columns = []
    for name in args.behavior_policies:
        model = dist.shard(loading.load_policy(name, tokenizer), device)
        columns.append(comparisons.seq_logprobs(model, train, args.micro_batch_size))
        del model
        gc.collect()  # one policy at a time: its methods are bound to it, a cycle that holds its weights
    return [torch.stack(of_one, 1) for of_one in zip(*columns)]


def expected_reward_figures(model, policy_name, held_out, tokenizer, args):
    """Of an advantage model: two baselines that it must beat, length_figures and, from the policy's own
    responses to held-out prompts: is e(x) the mean r of them, as eq. 7 says? `expected/bias` and
    `expected/rmse` are of e - mean r, over prompts, in standard deviations of r within a prompt; the samples'
    own noise is taken off the second. On the tiny world also the correlation of e with the policy's mean true
    reward on a prompt."""
    policy = policy_name and load_policy(policy_name, tokenizer, args, model.device)
    figures = baselines(policy, held_out, args.micro_batch_size)
    if not (policy and held_out and args.length_prompts):
        return figures
    seed = dist.seed_of(args.seed, "held_out_samples")
    sampled = with_samples(policy, held_out, tokenizer, args, seed)

    def outputs(model, batch):
        rewards, expected = models.rewards_and_expected(model, batch)
        return list(zip(rewards.cpu().split(batch.sizes), expected.cpu()))

    outputs = of_each_comparison(outputs, model, sampled, args.micro_batch_size, args.share_prompt)
    rewards = [of_prompt for of_prompt, _ in outputs]
    expected = [e for _, e in outputs]
    several = [i for i, of_prompt in enumerate(rewards) if len(of_prompt) > 1]
    if not several:
        return figures
    errors = torch.stack([expected[i] - rewards[i].mean() for i in several])
    within = torch.stack([rewards[i].var() for i in several])
    noise = torch.stack(
        [rewards[i].var() / len(rewards[i]) for i in several]
    )  # of the mean of so few samples
    deviation = within.mean().sqrt()
    rmse = (errors.square().mean() - noise.mean()).clamp(min=0).sqrt()
    figures["expected/bias"] = (errors.mean() / deviation).item()
    figures["expected/rmse"] = (rmse / deviation).item()
    figures.update(length_figures(sampled, [of_prompt.tolist() for of_prompt in rewards]))
    if data.is_tiny(args.eval_dataset or args.dataset):
        gold = [mean_true_reward(c, tokenizer) for c in sampled]
        figures["gold/expected_correlation"] = metrics.correlation([e.item() for e in expected], gold)
    return figures


def mean_true_reward(comparison, tokenizer) -> float:
    """Of a comparison's samples, on the tiny world."""
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in comparison.samples]
    return sum(tiny.gold_score(comparison.prompt[-1]["content"], text) for text in texts) / len(texts)


def baselines(policy, held_out, micro_batch_size) -> dict[str, float]:
    """Accuracy, on the labelled pairs, of two scores that a reward model must beat: length and log
    probability under `policy` (None: length alone). Every rank must call it."""
    pairs = [(i, a, b) for i, c in enumerate(held_out) for a, b in labelled_pairs(c)]
    if not pairs:
        return {}
    scores = {"baseline/length_accuracy": [[len(ids) for ids in c.response_ids] for c in held_out]}
    if policy is not None:
        logprobs = comparisons.seq_logprobs(policy, held_out, micro_batch_size)
        scores["baseline/sft_logprob_accuracy"] = [x.tolist() for x in logprobs]
    return {key: metrics.accuracy(x[i][a] - x[i][b] for i, a, b in pairs) for key, x in scores.items()}


def policy_samples(model, prompts, tokenizer, n, max_new_tokens, seed, slots=64) -> list[tuple]:
    """n sampled responses of a policy to each comparison's prompt, as ids, the same on every rank, without
    those that did not end: a score is read at an end token. Prompts that leave no room get none. Every rank
    must call it."""
    room = models.n_positions(model.config) - max_new_tokens
    fits = [i for i, c in enumerate(prompts) if len(c.prompt_ids) <= room]
    responses = generate.sample_responses(
        model,
        tokenizer,
        [prompts[i].prompt_ids.tolist() for i in fits],
        n=n,
        max_new_tokens=max_new_tokens,
        seed=seed,
        slots=slots,
    )
    samples = [()] * len(prompts)
    for i, of_prompt in zip(fits, responses):
        ended = [[*response.ids[:-1], tokenizer.eos_token_id] for response in of_prompt if response.finished]
        samples[i] = tuple(torch.tensor(ids, dtype=torch.int32) for ids in ended)
    n_ended = sum(map(len, samples))
    if n_ended < n * len(prompts) and dist.is_main():
        print(f"{n_ended} of {n * len(prompts)} samples ended within {max_new_tokens} tokens and count")
    return samples


# -- versions of a policy: rejection sampling and iterative DPO ------------------------------------
def comparable(studies, version) -> dict:
    """{version: its samples} of those that one scorer scored, for --resume may bring another."""
    scorer = studies[version].get("scorer")
    return {v: study["samples"] for v, study in studies.items() if study.get("scorer") == scorer}


def gains_over(studies, version, names: dict) -> dict[str, float]:
    """The paired differences of score and true reward to other versions. names: {name: version}."""
    same, samples, figures = comparable(studies, version), studies[version]["samples"], {}
    for name, other in names.items():
        if other in same and other != version:
            keys = {f"eval/score_over_{name}": "score", f"gold/score_over_{name}": "gold"}
            figures.update(metrics.gains(same[other], samples, keys))
    return figures


class Sweep:
    """What rejection_sampling.py finds out of a version on held-out prompts: {"samples": one response to each
    at temperature 1, "curves": the expected largest and median score among N responses at each temperature,
    and the best of K that can be selected, "temperature": the one where that is highest, "scorer": its
    version}."""

    def __init__(self, held_out, scorer, tokenizer, args):
        self.scorer, self.tokenizer, self.args = scorer, tokenizer, args
        self.prompts = a_part(held_out, args.eval_prompts)
        self.swept = a_part(held_out, args.sweep_prompts) if args.n_samples else []
        self.true_reward = data.is_tiny(args.eval_dataset or args.dataset)

    def fingerprint(self) -> list:
        return [prompt.key for prompt in self.prompts]

    def __call__(self, policy, version, studies) -> dict:
        samples, curves, scored = [], [], []
        with dist.consolidated(policy):  # the weights are gathered once
            if self.prompts:
                pairs = self.answer(policy, self.prompts, version, number=0)
            sweep = {"n": self.args.n_samples, "top_p": self.args.top_p}
            rounds = [
                self.answer(policy, self.swept, version, number, temperature=temperature, **sweep)
                for number, temperature in enumerate(self.args.temperatures, 1 if self.prompts else 0)
                if self.swept
            ]
        if self.prompts:
            samples = [
                describe_sample(
                    prompt.turns, response, self.true_reward, category=prompt.category, score=score
                )
                for (prompt, response), score in zip(pairs, self.scores(pairs, policy.device))
            ]
        for temperature, pairs in zip(self.args.temperatures, rounds):
            scores = torch.tensor(self.scores(pairs, policy.device)).view(-1, self.args.n_samples)
            usable = [r.finished and r.clean and bool(r.text.strip()) for _, r in pairs]
            scored.append((scores, torch.tensor(usable).view(scores.shape)))
            largest, median = metrics.best_of_n(scores)
            curve = {
                "policy": f"version {version}",
                "scorer": self.scorer.version,
                "temperature": temperature,
            }
            curve["finished"] = sum(response.finished for _, response in pairs) / len(pairs)
            curves.append({**curve, "max": largest, "median": median})
        # A response that would not be selected counts, for the choice, as the worst of all
        lowest = min((scores.min().item() for scores, _ in scored), default=0.0)
        for curve, (scores, usable) in zip(curves, scored):
            curve["best"] = metrics.best_of_n(torch.where(usable, scores, lowest))[0][-1]
        chosen = max(curves, key=lambda curve: curve["best"], default=None)
        for curve in curves:
            curve["chosen"] = curve is chosen
        return {
            "samples": samples,
            "curves": curves,
            "temperature": chosen["temperature"] if chosen else self.args.temperatures[0],
            "scorer": self.scorer.version,
        }

    def answer(self, policy, prompts, version, number, **options):
        return generate.sample_pairs(
            policy,
            self.tokenizer,
            prompts,
            max_new_tokens=self.args.max_new_tokens,
            slots=self.args.slots,
            seed=dist.seed_of(self.args.seed, "study", version, number),
            **options,
        )

    def scores(self, pairs, device) -> list[float]:
        return scorers.score(self.scorer, pairs, self.args.score_batch_size, device)

    def figures(self, studies, version) -> dict[str, float]:
        """Means of a version's samples, its sweep at the temperature taken, and paired differences to the
        first version and to the one before."""
        study = studies[version]
        figures = metrics.means(study["samples"], FIGURES)
        for curve in study["curves"]:
            if curve["chosen"]:
                figures["sweep/temperature"] = curve["temperature"]
                figures["sweep/max"] = curve["max"][-1]
                figures["sweep/median"] = curve["median"][-1]
        return {**figures, **gains_over(studies, version, {"first": min(studies), "before": version - 1})}

    def line(self, studies, version) -> str:
        return one_line(
            self.figures(studies, version), ("eval/score", "gold/score", "sweep/temperature", "sweep/max")
        )


class Answers:
    """What dpo_iterative.py finds out of a version: {"samples": one response at temperature 1 to each
    held-out prompt, "pairs": what `pair_figures`(policy, held_out_pairs, args) says, "scorer": its version}.
    A pairwise oracle's score is the probability that a response beats version 0's."""

    def __init__(self, held_out, held_out_pairs, pair_figures, scorer, tokenizer, args):
        """scorer: None where there are no --eval-prompts."""
        self.prompts = a_part(held_out, args.eval_prompts)
        self.held_out_pairs, self.pair_figures = held_out_pairs, pair_figures
        self.scorer, self.tokenizer, self.args = scorer, tokenizer, args
        self.true_reward = data.is_tiny(args.eval_dataset or args.dataset)

    def fingerprint(self) -> list:
        return [*(prompt.key for prompt in self.prompts), comparisons.fingerprint(self.held_out_pairs)]

    def __call__(self, policy, version, studies) -> dict:
        figures = {}
        if self.held_out_pairs:
            figures = self.pair_figures(policy, self.held_out_pairs, self.args)
        samples = self.answer(policy, version, studies) if self.prompts else []
        return {"samples": samples, "pairs": figures, "scorer": self.scorer and self.scorer.version}

    def answer(self, policy, version, studies) -> list[dict]:
        args = self.args
        pairs = answer_once(policy, self.tokenizer, self.prompts, args)
        first = studies[0]["samples"] if version else None
        scores = self.scores(pairs, first, policy.device)
        documents = generate.documents(pairs)
        logprobs = first_logprobs = models.seq_logprobs(policy, documents, args.score_batch_size)
        if version:
            first_policy = load_policy(args.model, self.tokenizer, args, policy.device)
            first_logprobs = models.seq_logprobs(first_policy, documents, args.score_batch_size)
            first_policy = None
            gc.collect()  # a model's methods are bound to it, a cycle that holds its weights
        samples = []
        for i, (prompt, response) in enumerate(pairs):
            sample = describe_sample(prompt.turns, response, self.true_reward, category=prompt.category)
            sample["score"] = scores[i]
            sample["kl"] = logprobs[i] - first_logprobs[i]  # k1, of a whole response
            samples.append(sample)
        return samples

    def scores(self, pairs, first, device) -> list[float]:
        if not self.scorer.pairwise:
            return scorers.score(self.scorer, pairs, self.args.score_batch_size, device)
        if first is None:
            return [0.5] * len(pairs)
        games = []
        for (prompt, response), row in zip(pairs, first):
            opponent = generate.Response([], row["response"], row["finished"])
            games += [(prompt, response), (prompt, opponent)]
        return scorers.score(self.scorer, games, self.args.score_batch_size, device)[::2]

    def figures(self, studies, version) -> dict[str, float]:
        """Means of a version's samples, its figures on the held-out pairs, and its samples against those of
        the first version and of the one before."""
        samples = studies[version]["samples"]
        figures = {**studies[version]["pairs"], **metrics.means(samples, FIGURES)}
        same = comparable(studies, version)
        if version and samples and 0 in same:
            tie_margin = 0.1 if self.scorer.pairwise else None  # of probabilities; None: of their spread
            figures.update(metrics.against(same[0], samples, tie_margin, "sft/"))
        if version > 1:
            figures.update(gains_over(studies, version, {"before": version - 1}))
        return figures

    def line(self, studies, version) -> str:
        keys = ("eval/score", "gold/score", "eval/kl", "sft/score_win", "pairs/accuracy")
        return one_line(self.figures(studies, version), keys)


def one_line(figures, keys) -> str:
    """The figures of a version that a person wants to see, those over the version before with their
    interval."""
    shown = [f"{key} {figures[key]:.3g}" for key in keys if key in figures]
    for key in ("eval/score_over_before", "gold/score_over_before"):
        if key in figures:
            shown.append(f"{key} {metrics.interval(figures, key)}")
    return ", ".join(shown)


def selection_figures(rows, selected, iteration) -> dict[str, float]:
    """Of a pool's rows, of this iteration's responses, and of the rows to train on."""
    new = [row for row in rows if row["iteration"] == iteration and row["score"] is not None]
    figures = {"pool/rows": len(rows), "pool/new": len(new), "pool/selected": len(selected)}
    best = {}
    for row in new:
        key = turns_key(row["prompt"])
        best[key] = max(best.get(key, -math.inf), row["score"])
    if new:
        figures["pool/temperature"] = new[0]["temperature"]
        figures["pool/finished"] = sum(row["finished"] for row in new) / len(new)
        figures["pool/score"] = sum(row["score"] for row in new) / len(new)
        figures["pool/best"] = sum(best.values()) / len(best)
    if selected:
        figures["pool/selected_score"] = sum(row["score"] for row in selected) / len(selected)
        figures["pool/earlier"] = sum(row["iteration"] < iteration for row in selected) / len(selected)
    return figures


def pairing_figures(rows, pairs, dropped, iteration) -> dict[str, float]:
    """Of an iteration's responses, and of the pairs made of them."""
    rows, by_prompt = [row for row in rows if row["iteration"] == iteration], {}
    for row in rows:
        by_prompt.setdefault(turns_key(row["prompt"]), []).append(row["score"])

    def mean(values):
        return sum(values) / len(values)

    figures = {
        "pool/responses": len(rows),
        "pool/score": mean([row["score"] for row in rows]),
        "pool/best": mean([max(scores) for scores in by_prompt.values()]),
        "pool/worst": mean([min(scores) for scores in by_prompt.values()]),
        "pool/finished": mean([row["finished"] for row in rows]),
        "pool/length": mean([len(row["response_ids"]) for row in rows]),
        "pool/characters": mean([len(row["response"]) for row in rows]),
        "pairs/kept": len(pairs),
        **{f"pairs/{reason}": n for reason, n in dropped.items()},
    }
    for i, side in enumerate(("chosen", "rejected")) if pairs else ():
        figures[f"pairs/{side}_score"] = mean([pair.grades[i] for pair in pairs])
        figures[f"pairs/{side}_length"] = mean([len(pair.response_ids[i]) for pair in pairs])
    return figures
