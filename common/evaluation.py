"""What scripts measure on held-out rows before, while and after they train."""

import gc
import itertools
import math
from functools import partial
from statistics import fmean

import torch

from common import comparisons, data, dist, generate, loading, metrics, models, scorers, tiny
from common.batches import (
    a_part, labelled_pairs, make_blocks, of_each_comparison, response_mask, split, turns_key,
)  # fmt: skip
from common.errors import InputError
from common.losses import kl_estimate

FIGURES = {  # figure -> the column of samples.jsonl whose mean it is
    "eval/score": "score", "eval/kl": "kl", "gold/score": "gold", "gold/perfect": "perfect",
    "sample/length": "tokens", "sample/finished": "finished",
}  # fmt: skip


def describe_samples(pairs, dataset: str, **columns) -> list[dict]:
    """(prompt, response)s as rows of samples.jsonl, with the true reward if `dataset` is the tiny world.
    columns: name -> a value for each, or None; with a `score` a row has its prompt's category too."""
    rows, true_reward = [], data.is_tiny(dataset)
    for i, (prompt, response) in enumerate(pairs):
        row = {"prompt": prompt.turns, "response": response.text}
        row.update(tokens=len(response.ids), finished=response.finished)
        row.update({name: values[i] for name, values in columns.items() if values})
        if "score" in columns:
            row["category"] = prompt.category
        if true_reward:
            row["gold"] = tiny.gold_score(prompt.question, response.text)
            row["perfect"] = tiny.perfect_score(prompt.question)
        rows.append(row)
    return rows


def true_rewards(pairs, args) -> dict[str, float]:
    """The mean true reward of responses to prompts of the tiny world; of others, nothing."""
    return metrics.means(describe_samples(pairs, args.dataset), {"reward/gold": "gold"})


def kl_of(policy, reference, pairs, size, temperature=1.0) -> list[float]:
    """log pi(y) - log pi_ref(y) of each (prompt, response), nats, pi at the temperature at which it was
    sampled. At temperature 0 all of pi's mass is on y. size: of a forward on one rank."""
    documents = generate.documents(pairs)
    logprobs = [0.0] * len(pairs)
    if temperature:
        logprobs = models.seq_logprobs(policy, documents, size, temperature)
    return [a - b for a, b in zip(logprobs, models.seq_logprobs(reference, documents, size))]


def oracle_scores(oracle, pairs, opponents, size) -> list[float]:
    """The oracle's score of each (prompt, response); of one that compares the probability that it beats the
    opponents' response to the same prompt, 1/2 where there are none."""
    others = zip([prompt for prompt, _ in pairs], opponents or ()) if oracle.pairwise else ()
    return scorers.score(oracle, [*pairs, *others], size)[: len(pairs)]


class HeldOutDocuments:
    """What sft.py evaluates: the held-out loss, and `samples`, answers to held-out documents' prompts."""

    def __init__(self, documents, tokenizer, args):
        self.documents, self.tokenizer, self.args, self.samples = documents, tokenizer, args, []
        self.blocks = make_blocks(documents, args.max_length, args.packing)
        self.fingerprint = [document.ids.tolist() for document in documents]
        if args.sample_prompts:
            generate.check_sampled(args.model, "--sample-prompts 0 trains without samples")

    def __call__(self, model) -> dict[str, float]:
        if self.args.sample_prompts:
            self.samples = self.answers(model)
        return {**self.loss(model), **metrics.means(self.samples, FIGURES)}

    def loss(self, model) -> dict[str, float]:
        blocks, size = self.blocks, self.args.micro_batch_size
        return {"eval/nll": models.mean_nll(model, blocks, size)} if blocks else {}

    def answers(self, model) -> list[dict]:
        """Rows of samples.jsonl: one response to each of the first prompts that leave room for it."""
        args, room = self.args, models.n_positions(model.config) - self.args.max_new_tokens
        turns_and_rows = {d.key: (d.messages[:-1], d.row) for d in self.documents}.values()
        prompts = (generate.Prompt(data.prompt_ids(self.tokenizer, x), x, row) for x, row in turns_and_rows)
        fitting = (prompt for prompt in prompts if len(prompt.ids) <= room)
        first = list(itertools.islice(fitting, args.sample_prompts))  # the rest need not be tokenised
        options = {"seed": args.seed, "temperature": args.temperature}
        pairs = generate.answers(model, self.tokenizer, first, args, **options)
        return describe_samples(pairs, args.eval_dataset or args.dataset)


class HeldOutPrompts:
    """What ppo.py evaluates: one response at temperature 1 to each held-out prompt, scored; its KL to the
    reference, the entropy and, of held-out text, the alignment tax. `samples`: rows of samples.jsonl."""

    def __init__(self, prompts, scorer, reference, tokenizer, args, text=()):
        self.prompts, self.samples = a_part(prompts, args.eval_prompts), []
        self.scorer, self.reference, self.tokenizer, self.args = scorer, reference, tokenizer, args
        self.blocks_of_text = make_blocks(text, args.max_length, args.packing)
        packed = [document.ids.tolist() for block in self.blocks_of_text for document in block]
        self.fingerprint = [prompt.key for prompt in self.prompts] + packed

    def __call__(self, policy) -> dict[str, float]:
        figures = self.answer(policy) if self.prompts else {}
        if self.blocks_of_text:
            figures["eval/ptx_nll"] = models.mean_nll(policy, self.blocks_of_text, self.args.micro_batch_size)
        return figures

    def answer(self, policy):
        args, seed = self.args, dist.seed_of(self.args.seed, "eval")  # one seed whenever a run asks
        pairs = generate.answers(policy, self.tokenizer, self.prompts, args, seed)
        scores, _ = self.scorer.score(pairs)
        documents = generate.documents(pairs)
        plan = [make_blocks(documents, args.max_length, args.packing)]
        per_token = partial(models.per_token, plan=plan, micro_batch_size=args.micro_batch_size)
        logprobs, entropies = per_token(models.logprobs_and_entropies, policy)
        [ref_logprobs] = per_token(models.logprobs, self.reference)
        columns = {"score": scores.tolist(), "kl": kl_estimate(logprobs, ref_logprobs).sum(1).tolist()}
        self.samples = describe_samples(pairs, args.eval_dataset or args.dataset, **columns)
        mean_entropy = entropies.sum() / response_mask(documents).sum()
        return {**metrics.means(self.samples, FIGURES), "eval/entropy": mean_entropy.item()}


def scored_rows(held_out, values, pairwise=False) -> list[dict]:
    """Comparisons as rows of samples.jsonl. values, in their order: the `score` of every response, or, of a
    scorer that compares, the log odds of every labelled pair, a row's `differences`."""
    rows, values = [comparisons.describe(c) for c in held_out], iter(values)
    for row, c in zip(rows, held_out):
        if pairwise:
            row["differences"] = [next(values) for _ in labelled_pairs(c)]
        else:
            for response in row["responses"]:
                response["score"] = next(values)
    return rows


class HeldOutComparisons:
    """What scripts that learn from comparisons evaluate: how well scores predict labels, of all held-out ones
    and of each data set and category. `samples`: these as rows of samples.jsonl, with the last scores."""

    def __init__(self, held_out, args):
        self.held_out, self.args, self.samples = held_out, args, []

    def __call__(self, model) -> dict[str, float]:
        scores = itertools.chain.from_iterable(scores_of_each(model, self.held_out, self.args))
        self.samples = scored_rows(self.held_out, scores)
        figures = metrics.pair_figures(self.samples)
        for (_, name), rows in metrics.parts_of(self.samples if figures["pairs"] else []).items():
            differences = [d for d, *_ in metrics.pairs_of(rows)]
            figures[f"accuracy/{name}"] = metrics.accuracy(differences)
            figures[f"pairs/{name}"] = float(len(differences))
        return {f"eval/{key}": x for key, x in figures.items()}


def scores_of_each(model, some_comparisons, args) -> list[list[float]]:
    """The scores of each comparison's responses and samples, on every rank."""

    def by_comparison(model, batch):
        return [scores.tolist() for scores in models.scores_of(model, batch).cpu().split(batch.sizes)]

    size, share_prompt = args.micro_batch_size, args.share_prompt
    return of_each_comparison(by_comparison, model, some_comparisons, size, share_prompt)


# -- what a language model says of comparisons -----------------------------------------------------
def check_sft_model(name, tokenizer, args) -> str | None:
    """The name of the causal LM that a reward or advantage model is compared with: `name`, or, of None,
    runs/sft for the model tiny and else --model, if it is one. It has the same tokens and can be sampled."""
    if not name and not loading.is_causal_lm(args.model):
        return None
    name = name or ("runs/sft" if args.model == "tiny" else args.model)
    loading.check_causal_lm(name, tokenizer, args.chat_template)
    if args.length_prompts or getattr(args, "expected_reward_samples", 0):
        generate.check_sampled(name, "--length-prompts 0 does without samples")
    return name


def ask_policy(name, tokenizer, args, device, forward, *inputs):
    """What forward(model, *inputs) says for the policy of this name, which is loaded for this and freed."""
    gc.collect()  # a model's methods are bound to it, a cycle that holds its weights: what was there before
    values = forward(loading.load_frozen(name, tokenizer, args, device), *inputs)
    gc.collect()
    return values


def policy_samples(model, prompts, tokenizer, n, max_new_tokens, seed, slots=64) -> list[tuple]:
    """n responses of a policy to each comparison's prompt, as ids, on every rank, without those that did not
    end: a score is read at an end token. Prompts that leave no room get none. Every rank must call it."""
    room, samples = models.n_positions(model.config) - max_new_tokens, [()] * len(prompts)
    fits = {i: c for i, c in enumerate(prompts) if len(c.prompt_ids) <= room}
    asked = [generate.Prompt(c.prompt_ids.tolist(), c.prompt, c.row) for c in fits.values()]
    options = {"n": n, "max_new_tokens": max_new_tokens, "seed": seed, "slots": slots}
    pairs = generate.sample_pairs(model, tokenizer, asked, **options)
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
    policy = loading.load_frozen(name, tokenizer, args, device)
    logprobs = comparisons.seq_logprobs(policy, held_out, args.micro_batch_size)
    likelier = [x[i] - x[j] for x, c in zip(logprobs, held_out) for i, j in labelled_pairs(c)]
    figures = {"baseline/sft_logprob_accuracy": metrics.accuracy(likelier)}
    prompts = list({c.key: c for c in [*held_out, *train]}.values())[: args.length_prompts]
    samples = policy_samples(policy, prompts, tokenizer, 8, args.max_new_tokens, seed, args.slots)
    return figures, [comparisons.with_samples_only(c, ids) for c, ids in zip(prompts, samples) if ids]


def length_bias(model, sft_model, train, held_out, tokenizer, args) -> dict[str, float]:
    """How well the SFT model's log probability scores held-out pairs, and length_figures of its responses."""
    device, seed = model.device, args.seed
    figures, sampled = baselines_and_samples(sft_model, held_out, tokenizer, args, device, seed, train)
    return {**figures, **length_figures(sampled, scores_of_each(model, sampled, args))}


def length_figures(sampled, scores) -> dict[str, float]:
    """The mean correlation of length and score over a prompt's samples and its 95 % interval, of prompts with
    three or more of them where both vary, and how many these are; of none, nothing."""
    of_prompts = [([len(ids) for ids in c.samples], x) for c, x in zip(sampled, scores) if len(x) > 2]
    correlations = [metrics.correlation(lengths, x) for lengths, x in of_prompts]
    rows = [{"r": x} for x in correlations if not math.isnan(x)]
    figures = metrics.gains([{"r": 0.0} for _ in rows], rows, {"length/correlation": "r"})
    return {**figures, "length/prompts": len(rows)} if rows else {}


def expected_reward_figures(model, policy_name, held_out, tokenizer, args):
    """The same of an advantage model, and what its policy's responses say of e(x): is it their mean r, eq. 7?
    `expected/bias` and `expected/rmse` are of e - mean r, over prompts, in standard deviations of r
    within a prompt; the samples' own noise is taken off the second."""
    seed = dist.seed_of(args.seed, "held_out_samples")
    figures, sampled = baselines_and_samples(policy_name, held_out, tokenizer, args, model.device, seed)

    def by_comparison(model, batch):
        rewards, expected = models.rewards_and_expected(model, batch)
        return list(zip(rewards.cpu().split(batch.sizes), expected.cpu()))

    outputs = of_each_comparison(by_comparison, model, sampled, args.micro_batch_size, args.share_prompt)
    several = [(rewards, expected) for rewards, expected in outputs if len(rewards) > 1]
    if not several:
        return figures
    errors = torch.stack([expected - rewards.mean() for rewards, expected in several])
    deviation = torch.stack([rewards.var() for rewards, _ in several]).mean().sqrt()
    noise = torch.stack([rewards.var() / len(rewards) for rewards, _ in several])  # of a mean of so few
    rmse = (errors.square().mean() - noise.mean()).clamp(min=0).sqrt()
    figures["expected/bias"] = (errors.mean() / deviation).item()
    figures["expected/rmse"] = (rmse / deviation).item()
    figures.update(length_figures(sampled, [rewards.tolist() for rewards, _ in outputs]))
    if data.is_tiny(args.eval_dataset or args.dataset):
        gold = []
        for c in sampled:
            texts = tokenizer.batch_decode(c.samples, skip_special_tokens=True)
            gold.append(fmean(tiny.gold_score(c.prompt[-1]["content"], text) for text in texts))
        figures["gold/expected_correlation"] = metrics.correlation([e.item() for _, e in outputs], gold)
    return figures


def with_policy_answers(train, name, tokenizer, args, device):
    """(the training comparisons of advantage_model.py, figures). Eq. 8 needs each response's ratios to the K
    policies that wrote the data, eq. 7 responses of the policy `name`, whose mean reward e learns."""
    n, k = args.expected_reward_samples, args.n_others
    if (k or n) and name is None:
        raise InputError(f"{args.model} is no causal LM: name the --policy that ratios and e are of")
    for other in args.behavior_policies:
        loading.check_causal_lm(other, tokenizer, args.chat_template)
    policy = loading.load_frozen(name, tokenizer, args, device) if k or n else None
    ratios, figures = [torch.zeros(len(c.response_ids), 0) for c in train], {}
    if k:
        ask, size = comparisons.seq_logprobs, args.micro_batch_size
        others = [ask_policy(x, tokenizer, args, device, ask, train, size) for x in args.behavior_policies]
        behavior = [torch.stack(of_one, 1) for of_one in zip(*others)] or behavior_columns(train, args)
        logprobs = ask(policy, train, size)
        ratios = [(of_policy[:, None] - of_others).exp() for of_policy, of_others in zip(logprobs, behavior)]
        figures = {"ratio/clipped": (torch.cat(ratios) > args.ratio_clip).double().mean().item()}
    samples = [()] * len(train)
    if n:
        seed = dist.seed_of(args.seed, "samples")
        samples = policy_samples(policy, train, tokenizer, n, args.max_new_tokens, seed, args.slots)
    answered = []
    for c, of_labelled, ids in zip(train, ratios, samples):
        # Samples enter no advantage: their ratios only fill the place
        of_all = torch.cat([of_labelled.clamp(max=args.ratio_clip), torch.ones(len(ids), k)])
        answered.append(c._replace(ratios=of_all, samples=ids))
    return answered, figures


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
        self.fingerprint = [prompt.key for prompt in self.prompts]

    def __call__(self, policy, version, studies) -> dict:
        args, k = self.args, self.args.n_samples
        sample = partial(generate.answers, policy, self.tokenizer, args=args)
        score = partial(scorers.score, self.scorer, batch_size=args.score_batch_size)
        seed = partial(dist.seed_of, args.seed, "study", version)
        rounds, first = [], 1 if self.prompts else 0
        with dist.consolidated(policy):  # the weights are gathered once
            pairs = sample(self.prompts, seed=seed(0)) if self.prompts else []
            for i, t in enumerate(args.temperatures if self.swept else (), first):
                rounds.append(sample(self.swept, n=k, temperature=t, top_p=args.top_p, seed=seed(i)))
        samples = describe_samples(pairs, args.eval_dataset or args.dataset, score=score(pairs))
        curves, scored = [], [torch.tensor(score(answers)).view(-1, k) for answers in rounds]
        # A response that would not be selected counts, for the choice, as the worst of all
        lowest = min((scores.min().item() for scores in scored), default=0.0)
        for temperature, answers, scores in zip(args.temperatures, rounds, scored):
            largest, median = metrics.best_of_n(scores)
            usable = [r.finished and r.clean and bool(r.text.strip()) for _, r in answers]
            selectable = torch.where(torch.tensor(usable).view(-1, k), scores, lowest)
            curves.append({
                "policy": f"version {version}", "scorer": self.scorer.version,
                "finished": sum(response.finished for _, response in answers) / len(answers),
                "temperature": temperature, "max": largest, "median": median,
                "best": metrics.best_of_n(selectable)[0][-1],
            })  # fmt: skip
        chosen = max(curves, key=lambda curve: curve["best"], default={"temperature": args.temperatures[0]})
        curves = [{**curve, "chosen": curve is chosen} for curve in curves]
        study = {"samples": samples, "curves": curves, "temperature": chosen["temperature"]}
        return {**study, "scorer": self.scorer.version}

    def figures(self, studies, version) -> dict[str, float]:
        """Means of a version's samples, its sweep at the temperature taken, and paired differences to the
        first version and to the one before."""
        study = studies[version]
        figures = metrics.means(study["samples"], FIGURES)
        for curve in [curve for curve in study["curves"] if curve["chosen"]]:
            figures.update({f"sweep/{key}": curve[key][-1] for key in ("max", "median")})
            figures["sweep/temperature"] = curve["temperature"]
        return {**figures, **gains_over(studies, version, {"first": min(studies), "before": version - 1})}


class Answers:
    """What dpo_iterative.py finds out of a version: {"samples": one response at temperature 1 to each
    held-out prompt, "pairs": what `pair_figures`(policy, held_out_pairs, args) says, "scorer": its version}.
    A pairwise oracle's score is the probability that a response beats version 0's."""

    def __init__(self, held_out, held_out_pairs, pair_figures, scorer, tokenizer, args):
        """scorer: None where there are no --eval-prompts."""
        self.prompts = a_part(held_out, args.eval_prompts)
        self.held_out_pairs, self.pair_figures = held_out_pairs, pair_figures
        self.scorer, self.tokenizer, self.args = scorer, tokenizer, args
        self.fingerprint = [*(prompt.key for prompt in self.prompts), *(pair.row for pair in held_out_pairs)]

    def __call__(self, policy, version, studies) -> dict:
        pairs = self.held_out_pairs
        figures = self.pair_figures(policy, pairs, self.args) if pairs else {}
        samples = self.answer(policy, version, studies) if self.prompts else []
        return {"samples": samples, "pairs": figures, "scorer": self.scorer and self.scorer.version}

    def answer(self, policy, version, studies) -> list[dict]:
        args, seed = self.args, dist.seed_of(self.args.seed, "eval")  # one seed whenever a run asks
        size, device = args.score_batch_size, policy.device
        pairs = generate.answers(policy, self.tokenizer, self.prompts, args, seed)
        first = studies[0]["samples"] if version else []
        opponents = [generate.Response([], row["response"], row["finished"]) for row in first]
        scores, kl = oracle_scores(self.scorer, pairs, opponents, size), [0.0] * len(pairs)
        if version:
            kl = ask_policy(args.model, self.tokenizer, args, device, partial(kl_of, policy), pairs, size)
        return describe_samples(pairs, args.eval_dataset or args.dataset, score=scores, kl=kl)

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


def pool_figures(rows) -> dict[str, float]:
    """Of an iteration's responses, means: over them, and over their prompts of the best and the worst."""
    by_prompt = {}
    for row in rows:
        by_prompt.setdefault(turns_key(row["prompt"]), []).append(row["score"])
    values = {
        "pool/score": [row["score"] for row in rows],
        "pool/best": [max(scores) for scores in by_prompt.values()],
        "pool/worst": [min(scores) for scores in by_prompt.values()],
        "pool/finished": [row["finished"] for row in rows],
        "pool/length": [len(row["response_ids"]) for row in rows],
        "pool/characters": [len(row["response"]) for row in rows],
    }
    return {key: sum(x) / len(x) for key, x in values.items() if x}


def selection_figures(rows, selected, iteration) -> dict[str, float]:
    """Of a pool's rows, of this iteration's responses, and of the rows to train on."""
    new = [row for row in rows if row["iteration"] == iteration and row["score"] is not None]
    figures = {"pool/rows": len(rows), "pool/new": len(new), "pool/selected": len(selected)}
    if selected:
        figures["pool/earlier"] = sum(row["iteration"] < iteration for row in selected) / len(selected)
    return {**figures, **pool_figures(new), **metrics.means(selected, {"pool/selected_score": "score"})}


def pairing_figures(rows, pairs, dropped, iteration) -> dict[str, float]:
    """Of an iteration's responses, and of the pairs made of them."""
    rows = [row for row in rows if row["iteration"] == iteration]
    figures = {"pool/responses": len(rows), "pairs/kept": len(pairs), **pool_figures(rows)}
    figures.update({f"pairs/{reason}": n for reason, n in dropped.items()})
    for i, side in enumerate(("chosen", "rejected") if pairs else ()):
        figures[f"pairs/{side}_score"] = sum(pair.grades[i] for pair in pairs) / len(pairs)
        figures[f"pairs/{side}_length"] = sum(len(pair.response_ids[i]) for pair in pairs) / len(pairs)
    return figures
