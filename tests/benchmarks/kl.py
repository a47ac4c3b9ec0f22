"""losses.kl_estimate's k1, k2 and k3 of policies against runs/sft on the tiny world.

    python tests/benchmarks/kl.py runs/ppo runs/ppo_weak

Sampled: sums over a response; bias: minus the KL over the whole vocabulary summed along it, which is unbiased.
Enumerated: all responses of at most two tokens, so that all is exact; the gradient of an estimate as a reward
(REINFORCE) and as a loss, compared with the KL's own: cosine, ratio of lengths."""

import functools
import sys

import peers
import torch
from transformers import AutoModelForCausalLM

from common import responses
from common.losses import kl_estimate
from common.data import prompt_sets, tiny
from common.scoring import measures

TOKENIZER, KINDS = tiny.tokenizer(), ("k1", "k2", "k3")
log_probs = lambda model, rows: model(input_ids=torch.tensor(rows)).logits.double().log_softmax(-1)


@torch.no_grad()
def sampled(policy, reference, prompts):
    sums = {kind: [] for kind in ("full", *KINDS)}
    for prompt, response in responses.sample_responses(policy, TOKENIZER, prompts, max_new_tokens=32, seed=1):
        row, where = [prompt.ids + response.ids], torch.tensor(response.ids)[:, None]
        p, q = (log_probs(model, row)[0, len(prompt.ids) - 1 : -1] for model in (policy, reference))
        sums["full"].append((p.exp() * (p - q)).sum().item())
        for kind in KINDS:
            sums[kind].append(kl_estimate(p.gather(1, where), q.gather(1, where), kind).sum().item())
    for kind, values in sums.items():
        rows, x = ([{kind: v} for v in of_one] for of_one in (sums["full"], values)), torch.tensor(values)
        bias = measures.interval(measures.gains(*rows, {kind: kind}), kind, "+.4f")
        print(f"sampled {kind}: mean {x.mean():.3f}, deviation {x.std():.3f}, bias {bias}")


def enumerated(policy, reference, prompts) -> dict[str, dict]:
    """Of each kind: mean and deviation of the estimate, the KL, and of its gradient in the reward and as a loss the
    cosine with the KL's gradient and the ratio of their lengths."""
    tokens, sums = torch.arange(len(TOKENIZER)), {kind: [0.0] * 4 for kind in KINDS}
    for prompt in prompts:
        rows = [prompt.ids + [token] for token in tokens.tolist()]
        (p1, p2), (q1, q2) = (log_probs(model, rows)[:, -2:].unbind(1) for model in (policy, reference))
        probs = (p1[0][:, None] + p2).exp() / len(prompts)  # (V, V), of first and second token
        for kind in KINDS:  # after an end token nothing counts
            second = kl_estimate(p2, q2, kind).masked_fill((tokens == TOKENIZER.eos_token_id)[:, None], 0.0)
            x = kl_estimate(p1[0], q1[0], kind)[:, None] + second
            new = (probs * x, probs * x**2, probs * x.detach(), probs.detach() * x)
            sums[kind] = [total + part.sum() for total, part in zip(sums[kind], new)]
    parameters, kl = list(policy.parameters()), sums["k1"][0]  # the mean of k1 is the KL, by its definition
    flat = lambda x: torch.cat([g.flatten() for g in torch.autograd.grad(x, parameters, retain_graph=True)])
    found, wanted = {}, flat(kl)
    for kind, (mean, square, *uses) in sums.items():
        found[kind] = {"mean": mean.item(), "deviation": (square - mean**2).sqrt().item(), "KL": kl.item()}
        for use, gradient in zip(("reward", "loss"), map(flat, uses)):
            cosine, ratio = torch.cosine_similarity(gradient, wanted, 0), gradient.norm() / wanted.norm()
            found[kind][use] = cosine.item(), ratio.item()
    return found


def models(run, sft=peers.ROOT / "runs" / "sft"):
    """The policy of a run, the policy it is compared with, and 1,000 held-out prompts."""
    names = (f"{run}/model", f"{sft}/model")
    prompts = prompt_sets.load_prompts("tiny", "test", TOKENIZER, max_tokens=96)
    return *map(AutoModelForCausalLM.from_pretrained, names), prompts


@functools.cache
def cosines(run, sft) -> dict[tuple[str, str], float]:
    """{(kind, "reward" or "loss"): cosine of its gradient with the KL's}, for the policy of a run."""
    *pair, prompts = models(run, sft)
    found = enumerated(*pair, prompts[:20])
    return {(kind, use): of_kind[use][0] for kind, of_kind in found.items() for use in ("reward", "loss")}


def main():
    for run in sys.argv[1:]:
        *pair, prompts = models(run)
        sampled(*pair, prompts)
        for kind, of_kind in enumerated(*pair, prompts[:20]).items():
            print(f"enumerated {kind}: " + ", ".join(f"{key} {of_kind[key]:.4f}" for key in ("mean", "deviation", "KL")))
            for use in ("reward", "loss"):
                print("    as a {}: cosine {:+.3f}, length {:.3f}".format(use, *of_kind[use]))


if __name__ == "__main__":
    main()
