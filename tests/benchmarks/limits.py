"""Measure how far each part is from the machine's limit: its useful operations per second and, for decoding, the
bytes per second that it must read, relative to an fp32 matrix product and to a copy measured just before it.

    python tests/benchmarks/limits.py --profile    a Llama of random weights, hidden 512, 8 layers, vocabulary
    8,192, or --model FOLDER; and the operators with most time of their own, in one turn more

Useful operations of a forward: 2 a token for each weight between embedding and unembedding, 2 for each of the
unembedding if a probability is computed; with its backward three times that. A prompt counts once for the
responses of its pair, or of its n. Attention's products, the optimiser, padding and recomputation do not count.
Bytes: these weights once a step, keys and values of each row. Prompts have 32 to 256 tokens, given responses
16 to 128; sampled ones end at each token with probability 1/64, at the latest after 128."""

import functools
import statistics
import tempfile
import time
from functools import partial

import peers
import torch
import tyro
from gpu import timed
from transformers import LlamaForCausalLM

import dpo_iterative
import ppo
import reward
import sft
from common import batches, dist, models, responses
from common.data import tiny
from common.loading import pretrained
from common.scoring import scorers


def parts(folder, rows, cpu):
    """Runs part after part, turn after turn: (its name, useful GFLOP, GB to read)."""
    if not folder:
        folder, special = tempfile.mkdtemp(), {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        LlamaForCausalLM(peers.llama(512, 8, 8, 8192, 512, **special)).save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
    words = pretrained.load_tokenizer(folder)
    policy, reference = (pretrained.load_policy(folder, words) for _ in range(2))
    value, scorer = (pretrained.load_scorer(folder, words, 1) for _ in range(2))
    vocabulary, ends = policy.config.vocab_size, policy.get_output_embeddings().weight.numel()
    policy.generation_config.eos_token_id = [words.eos_token_id, *range(64, vocabulary, 64)]
    body = sum(p.numel() for p in policy.base_model.parameters()) - ends  # the embedding's are as many
    kept = 2 * sum(len(p) for name, p in policy.named_parameters() if "k_proj.weight" in name)  # of a token
    ids = lambda low, high: torch.randint(3, vocabulary, torch.randint(low, high + 1, (1,)).tolist()).int()
    forward = lambda tokens, asked=0: 2e-9 * (body * tokens + ends * asked)  # 10^9 operations
    row, limits = batches.Row("", {}), {"micro_batch_size": 8, "max_length": 512, "lr": 1e-7}
    prompts = [responses.Prompt(ids(32, 256).tolist(), [], row) for _ in range(rows)]
    given = responses.documents([(p, responses.Response(ids(16, 128).tolist(), "", True)) for p in prompts])
    pairs = [(torch.tensor(p.ids).int(), [ids(16, 128), ids(16, 128)]) for p in prompts[::2]]
    pairs = [batches.Comparison([], ["", ""], *two, torch.tensor([0, 1]), "", row) for two in pairs]
    of_pairs = sum(c.n_tokens for c in pairs), sum(len(y) for c in pairs for y in c.response_ids)
    args, of_dpo = ppo.Args(**limits, max_new_tokens=128, minibatch_size=2), dpo_iterative.Args(**limits)
    of_policy, of_value, of_scorer = (dist.adamw(model, 1e-7, args) for model in (policy, value, scorer))
    minibatches = ppo.minibatches_of(rows, 1, args)[0]  # of one epoch
    ways = ("decoding, a row at a time", 1, 1), ("sampling, n = 8", 8, 256), ("PPO: rollout", 1, 256)
    while True:
        sft.update(policy, of_policy, batches.make_blocks(given, 512), sft.Args(**limits))
        yield "SFT", 3 * forward(batches.n_tokens(given), batches.n_response_tokens([given])), 0
        reward.update(scorer, of_scorer, pairs, reward.Args(**limits))
        yield "reward model", 3 * forward(of_pairs[0]), 0
        known = zip(pairs, dpo_iterative.pair_logprobs(reference, pairs, of_dpo))
        dpo_iterative.update(policy, of_policy, [p._replace(ref_logprobs=x) for p, x in known], of_dpo)
        yield "DPO, its reference included", 4 * forward(*of_pairs), 0
        for name, n, args.slots in ways:
            made = responses.answers(policy, words, prompts, args, 0, n=n)
            lengths = [len(response.ids) for _, response in made]
            steps, new = sum(lengths) if args.slots == 1 else max(lengths), sum(lengths) - len(made)
            read = sum((m - 1) * (len(prompt.ids) + m / 2) for m, (prompt, _) in zip(lengths, made))
            operations = forward(sum(len(p.ids) for p in prompts) + new, len(prompts) + new)
            yield name, operations, 4e-9 * ((body + ends) * steps + kept * read)
        documents, finished = responses.documents(made), torch.tensor([r.finished for _, r in made])
        rollout = ppo.Rollout(made, documents, batches.response_mask(documents), finished)
        asked, tokens = scorers.Scorer("", "", (), scorer, words), batches.n_tokens(documents)
        rollout.response_rewards = torch.tensor(scorers.score(asked, made, 64))
        yield "PPO: score", forward(tokens), 0
        plan = [ppo.blocks_of(documents, minibatch, args) for minibatch in minibatches]
        ask = partial(models.per_token, plan=plan, micro_batch_size=8)
        rollout.old_logprobs, rollout.entropies = ask(functools.partial(models.logprobs, entropy=True), policy)
        [rollout.ref_logprobs] = ask(models.logprobs, reference)
        [rollout.old_values] = ask(models.state_values, value)
        ppo.estimate_advantages(rollout, args)
        yield "PPO: estimate", 2 * forward(tokens, sum(lengths)) + forward(tokens), 0
        for minibatch in minibatches:
            agent = ppo.Agent(policy, value, reference, words, of_policy, of_value)
            ppo.update(agent, rollout, minibatch, {}, True, args)
        yield "PPO: update", 3 * (forward(tokens, sum(lengths)) + forward(tokens)), 0


def main(model: str | None = None, rows: int = 8, repeats: int = 3, threads: int = 2, profile: bool = False):
    cpu, found, machine = dist.setup(), {}, []
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    a, source, target = torch.randn(2048, 2048), torch.ones(2**26), torch.zeros(2**26)
    b, running = a.bfloat16(), parts(model, rows, cpu)
    for number in range(9 * (1 + repeats)):  # nine parts; the first turn does not count
        fp32, bf16 = (2 * 2048**3 / timed(lambda x=x: x @ x, cpu, 2) / 1e9 for x in (a, b))
        copy = 2 * source.nbytes / timed(lambda: target.copy_(source), cpu, 2) / 1e9
        start = time.perf_counter()
        name, operations, read = next(running)
        s = time.perf_counter() - start
        if number >= 9:
            numbers = s, operations / s, 100 * operations / s / fp32, 100 * read / s / copy
            found.setdefault(name, []).append(numbers)
            machine.append((fp32, bf16, copy))
    spread = lambda x: f"{statistics.median(x):.3g} ({min(x):.3g}, {max(x):.3g})"
    print("fp32 {}, bf16 {} GFLOP/s, copy {} GB/s\n".format(*map(spread, zip(*machine))))
    print("| part | s | useful GFLOP/s | of the product, % | of the copy, % |\n|---|---|---|---|---|")
    for name, of_turns in found.items():
        print(f"| {name} | " + " | ".join(map(spread, zip(*of_turns))) + " |", flush=True)
    for _ in range(9 * profile):
        start = time.perf_counter()
        with torch.profiler.profile() as profiled:
            name = next(running)[0]
        whole = (time.perf_counter() - start) * 1e4  # microseconds of a hundredth
        top = sorted(profiled.key_averages(), key=lambda x: -x.self_cpu_time_total)[:5]
        print(f"{name}: " + ", ".join(f"{x.key} {x.self_cpu_time_total / whole:.0f} %" for x in top))


if __name__ == "__main__":
    tyro.cli(main)
