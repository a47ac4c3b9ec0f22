"""Evaluate a model on held-out documents and prompts: losses, and answers as rows of samples.jsonl."""

import itertools
from functools import partial
from statistics import fmean

import torch

from common import dist, models, responses
from common.batches import make_blocks, my_micro_batches, n_response_tokens, response_mask, response_sizes
from common.losses import kl_estimate
from common.data import chat, mixtures, tiny
from common.loading import pretrained
from common.scoring import measures

SAMPLE_METRICS = {  # metric -> the column of samples.jsonl that it is the mean of
    "eval/score": "score", "eval/kl": "kl", "gold/score": "gold", "gold/perfect": "perfect",
    "sample/length": "tokens", "sample/finished": "finished",
}  # fmt: skip


def describe_samples(sampled, dataset: str, **columns) -> list[dict]:
    """Turn a list of (prompt, response) into rows of samples.jsonl, with the true reward in the tiny world.

    columns: {name: one value per response, or None}. With a column `score`, rows have the prompt's category
    too."""
    rows = []
    true_reward = mixtures.is_tiny(dataset)
    for i, (prompt, response) in enumerate(sampled):
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


def gold_by_hazard(samples) -> dict[str, float]:
    """Average the true reward of rows of samples.jsonl apart: {"gold/hazard": prompts that name one,
    "gold/no_hazard": the others}; {} outside the tiny world."""
    metrics = {}
    for key, names_one in (("gold/no_hazard", False), ("gold/hazard", True)):
        rows = [row for row in samples if tiny.is_safety(row["prompt"][-1]["content"]) == names_one]
        metrics.update(measures.means(rows, {key: "gold"}))
    return metrics


def logprobs_of(model, pairs, size, temperature=1.0):
    """Compute log pi of each response token of (prompt, response) pairs, in nats: (pairs, R), then 0.

    temperature: that of sampling, above 0. size: number of responses per forward pass on each rank."""
    plan = [[[document] for document in responses.documents(pairs)]]
    [logprobs] = models.per_token(partial(models.logprobs, temperature=temperature), model, plan, size)
    return logprobs


def kl_of(logprobs, reference, pairs, size) -> list[float]:
    """Compute log pi(y) - log pi_ref(y) of each (prompt, response), in nats.

    logprobs: result of logprobs_of for pi. Its temperature does not apply to pi_ref."""
    return (logprobs - logprobs_of(reference, pairs, size).double()).sum(1).tolist()


def sampler_metrics(pairs, logprobs) -> dict[str, float]:
    """Compare the sampler's log q of each response token with log pi of the forward that training uses.

    Their KL, an estimate by k3, and their largest ratio, either way, are 0 and 1 up to rounding if the
    sampler draws from pi. logprobs: (pairs, R), log pi at the sampling temperature. Returns {} if q is
    unknown."""
    drawn = torch.tensor([x for _, response in pairs for x in response.logprobs])
    if not len(drawn):
        return {}
    of_tokens = logprobs[response_mask(responses.documents(pairs))]
    kl = kl_estimate(drawn, of_tokens, "k3").mean().item()
    ratio_max = (drawn - of_tokens).abs().max().exp().item()
    return {"policy/sampler_kl": kl, "policy/sampler_ratio_max": ratio_max}


@torch.no_grad()
def nll_of_each(model, blocks, micro_batch_size) -> list[float]:
    """Compute the negative log likelihood of each document, scaled to nats per response token.

    A document's sum is divided by the average number of response tokens, so the mean over documents equals
    the mean over all response tokens.
    blocks: from make_blocks. Every rank must call this and gets the same list, in blocks' order.
    """
    documents = [document for block in blocks for document in block]
    sums = []
    place = {id(document): i for i, document in enumerate(documents)}
    for batch in my_micro_batches(blocks, model, micro_batch_size):
        of_tokens = models.logprobs(model, batch)[tuple(batch.token_indices)].float().cpu().double()
        of_documents = [-x.sum().item() for x in of_tokens.split(response_sizes(batch.documents))]
        sums += zip([place[id(document)] for document in batch.documents], of_documents)
    scale = len(documents) / n_response_tokens(blocks)
    return [nll * scale for _, nll in sorted(dist.gather(sums))]


def fingerprint(documents) -> list:
    """Fingerprint held-out documents: their messages, and how many tokens have a loss, which depends on
    --max-length."""
    return [[document.messages, int(document.response_mask.sum())] for document in documents]


class HeldOutDocuments:
    """The evaluation of sft.py: the held-out loss, and answers to held-out prompts. A call sets `losses`, one
    per document, and `samples`, rows of samples.jsonl."""

    def __init__(self, documents, tokenizer, args):
        self.documents = documents
        self.tokenizer = tokenizer
        self.args = args
        self.samples = []
        self.blocks = make_blocks(documents, args.max_length, args.packing)
        self.losses = []
        self.fingerprint = fingerprint(documents)
        if args.sample_prompts:
            pretrained.check_sampled(args.model, "--sample-prompts 0 trains without samples")

    def __call__(self, model) -> dict[str, float]:
        if self.args.sample_prompts:
            self.samples = self.answers(model)
        return {**self.loss(model), **measures.means(self.samples, SAMPLE_METRICS)}

    def loss(self, model) -> dict[str, float]:
        if not self.blocks:
            return {}
        self.losses = nll_of_each(model, self.blocks, self.args.micro_batch_size)
        return {"eval/nll": fmean(self.losses)}

    def answers(self, model) -> list[dict]:
        """Sample one response to each of the first --sample-prompts prompts of at most --max-length tokens
        that leave room for it, and return rows of samples.jsonl."""
        args = self.args
        room = min(args.max_length, models.n_positions(model.config) - args.max_new_tokens)
        turns_and_rows = {d.key: (d.messages[:-1], d.row) for d in self.documents}.values()
        prompts = (responses.Prompt(chat.prompt_ids(self.tokenizer, x), x, row) for x, row in turns_and_rows)
        fitting = (prompt for prompt in prompts if len(prompt.ids) <= room)
        first = list(itertools.islice(fitting, args.sample_prompts))  # lazy: further prompts are not encoded
        pairs = responses.answers(model, self.tokenizer, first, args, args.seed, temperature=args.temperature)
        return describe_samples(pairs, args.eval_dataset or args.dataset)


class HeldOutPrompts:
    """The evaluation of ppo.py: the score, KL to the reference and entropy of one response, at temperature 1,
    to each held-out prompt, and the loss on held-out text, which shows the alignment tax.

    samples: rows of samples.jsonl, set by each call. first: those of the policy that the run started from;
    once they are set, wins against them are counted."""

    def __init__(self, prompts, scorer, reference, tokenizer, args, text=()):
        self.prompts = mixtures.random_subset(prompts, args.eval_prompts)
        self.samples = []
        self.first = []
        self.scorer = scorer
        self.reference = reference
        self.tokenizer = tokenizer
        self.args = args
        self.blocks_of_text = make_blocks(text, args.max_length, args.packing)
        self.fingerprint = [prompt.key for prompt in self.prompts] + fingerprint(text)

    def __call__(self, policy) -> dict[str, float]:
        metrics = self.answer(policy) if self.prompts else {}
        if self.blocks_of_text:
            losses = nll_of_each(policy, self.blocks_of_text, self.args.micro_batch_size)
            metrics["eval/ptx_nll"] = fmean(losses)
        return metrics

    def answer(self, policy):
        args = self.args
        seed = dist.seed_of(args.seed, "eval")  # the same in all evaluations of a run: less noise in gains
        pairs = responses.answers(policy, self.tokenizer, self.prompts, args, seed)
        scores = self.scorer.score(pairs)
        documents = responses.documents(pairs)
        plan = [make_blocks(documents, args.max_length, args.packing)]
        per_token = partial(models.per_token, plan=plan, micro_batch_size=args.micro_batch_size)
        logprobs, entropies = per_token(partial(models.logprobs, entropy=True), policy)
        [ref_logprobs] = per_token(models.logprobs, self.reference)
        columns = {"score": scores.tolist(), "kl": (logprobs - ref_logprobs).sum(1).tolist()}
        self.samples = describe_samples(pairs, args.eval_dataset or args.dataset, **columns)
        mean_entropy = entropies.sum() / response_mask(documents).sum()
        wins = measures.against(self.first, self.samples, None, "sft/") if self.first else {}
        means = {**measures.means(self.samples, SAMPLE_METRICS), **gold_by_hazard(self.samples)}
        return {**means, "eval/entropy": mean_entropy.item(), **wins}
