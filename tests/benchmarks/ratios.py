"""Held-out metrics of runs of advantage_model.py --n-others K on the tiny world, with the true ratios of eq. 8 and
with ratios of 1, as they count outside training: python tests/benchmarks/ratios.py RUN ..., or RUN=SFT if the policy
is not runs/sft."""

import sys

import peers  # noqa: F401, it lets common be found
import torch
from calibration import category_spread

import advantage_model
from common import batches, dist, models
from common.losses import advantage_score
from common.data import comparisons, files
from common.loading import pretrained
from common.scoring import measures, reward_evaluation

device = torch.device("cpu")
for given in sys.argv[1:]:
    name, _, policy = given.partition("=")
    tokenizer = pretrained.load_tokenizer(name, quiet=True)
    model = dist.shard(pretrained.load_scorer(name, tokenizer, 2), device)
    n_policies = model.config.advantage_model["n_policies"]
    of_run = files.read_json(f"{name}/args.json")["args"]
    args = advantage_model.Args(n_others=of_run["n_others"], ratio_clip=of_run["ratio_clip"])
    held_out = comparisons.load("tiny", "test", tokenizer, args.max_length)
    held_out, clipped = reward_evaluation.with_policy_answers(held_out, policy or "runs/sft", tokenizer, args, device)

    def scores(model, batch):
        rewards, expected = models.rewards_and_expected(model, batch)
        expected = expected.repeat_interleave(torch.tensor(batch.sizes))
        ratios = torch.cat([c.ratios for c in batch.comparisons])
        both = [advantage_score(rewards, expected, x, n_policies) for x in (ratios, ratios * 0 + 1)]
        return list(torch.stack(both, 1).split(batch.sizes))

    values = torch.cat(batches.of_each_comparison(scores, model, held_out, 32, True))
    for ratios, of_all in zip(("true", "1"), values.T.tolist()):
        rows = reward_evaluation.scored_rows(held_out, of_all)
        figures = {**measures.pair_metrics(rows), **measures.known_metrics(rows), **clipped}
        figures["spread"] = category_spread(rows)
        shown = "accuracy ece ece_low ece_high nll gold/correlation ratio/clipped spread".split()
        print(name, "ratios", ratios, {key: round(figures[key], 4) for key in shown if key in figures})
