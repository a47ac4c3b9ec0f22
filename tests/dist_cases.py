"""Cases that test_dist.py runs on 2 ranks, in one launch. Every function marked @case runs on all ranks;
results.json gets its return value on rank 0, or the traceback.

    torchrun --nproc-per-node 2 tests/dist_cases.py FOLDER        FOLDER: made by test_dist.prepare()
    torchrun --nproc-per-node 4 tests/dist_cases.py FOLDER 2 CASE ...     only these, with --shard-size 2

The functions above the cases also work on 1 rank: test_dist.py calls them in its own process and compares.
"""

import contextlib
import copy
import functools
import gc
import hashlib
import json
import math
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tiny_families
import torch
import torch.distributed as td
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import advantage_model
import dpo_iterative
import ppo
import rejection_sampling
import reward
import sft
from common import dist, models, responses
from common.batches import Row, make_blocks, of_each_comparison, response_mask
from common.errors import NotFinite
from common.sampler import sample
from common.data import comparisons, demonstrations, files, mapping, mixtures, prompt_sets, tiny
from common.loading import lora, pretrained
from common.loading.tensor_parallel import split as split_layers
from common.scoring import reward_evaluation, scorers
from common.run import checkpoints, versions
from common.run.run import Run
from common.programs import evaluate, pairwise

CPU, TOKENIZER = torch.device("cpu"), tiny.tokenizer()
TRIED = [mapping.value_or_error(int, x) for x in "0123x5678"]  # one of which is a ValueError
ARGS = sft.Args(max_length=64, micro_batch_size=2, max_grad_norm=1.0)
RUN = {"max_length": 64, "batch_size": 4, "micro_batch_size": 2, "sample_prompts": 5, "max_new_tokens": 8}
RUN |= {"max_steps": 8, "save_every": 3, "eval_every": 4}


def run_options(folder):
    """Arguments of a short run of sft.py on the rows that lie in `folder`."""
    return {**RUN, "dataset": str(folder / "train.jsonl"), "eval_dataset": str(folder / "test.jsonl")}


# Of reward.py and advantage_model.py, on the pairs in `folder`
SCORER_RUN = {"model": "tiny", "max_length": 64, "batch_size": 7, "micro_batch_size": 2, "max_steps": 6}
SCORER_RUN |= {"lr": 1e-4}
SCORER_RUN |= {"save_every": 3, "eval_every": 4, "length_prompts": 3, "max_new_tokens": 6}


def scorer_options(folder, script=reward):
    return {
        **SCORER_RUN,
        "sft_model" if script is reward else "policy": "tiny",
        "dataset": str(folder / "pairs.jsonl"),
        "eval_dataset": str(folder / "held_out.jsonl"),
    }


# Of rejection_sampling.py, on the prompts in `folder`: chunks of 4, 4, 4 and 1 prompts, of which rank 1 gets 2,
# 2, 2 and none
RS_RUN = {"scorer": "common.data.tiny:gold_scorer", "prompts_per_iteration": 13, "n_samples": 3, "epochs": 1}
RS_RUN |= {"chunk_prompts": 4, "eval_prompts": 3, "sweep_prompts": 1, "temperatures": (1.0,), "iterations": 2}
RS_RUN |= {"max_new_tokens": 16, "max_length": 64, "batch_size": 2, "micro_batch_size": 1, "save_every": 1}


def rs_options(folder, **options):
    return {
        **RS_RUN,
        "model": str(folder / "tied"),
        "dataset": str(folder / "prompts.jsonl"),
        "eval_dataset": str(folder / "asked.jsonl"),
        **options,
    }


# Of dpo_iterative.py, on the same prompts: 3 chunks of 4 prompts and one of 1 at each of 2 temperatures
DPO_RUN = {"scorer": "common.data.tiny:gold_scorer", "prompts_per_iteration": 13, "n_samples": 4, "epochs": 1}
DPO_RUN |= {"chunk_prompts": 4, "eval_prompts": 3, "iterations": 2, "offline_pairs": 5, "max_new_tokens": 16}
DPO_RUN |= {"max_length": 64, "batch_size": 5, "micro_batch_size": 1, "save_every": 2, "lr": 1e-3}


def dpo_main(folder, output_dir, **options):
    files = {"model": "tied", "dataset": "prompts.jsonl", "eval_dataset": "asked.jsonl"}
    files |= {"offline_data": "pairs.jsonl", "output_dir": output_dir}
    given = DPO_RUN | {name: str(folder / file) for name, file in files.items()}
    dpo_iterative.main(dpo_iterative.Args(**given | options))


# Of ppo.py: minibatches of 3 responses, of which rank 1 gets 1, and an empty second micro-batch
PPO_RUN = {"iterations": 2, "prompts_per_iteration": 6, "n_samples": 2, "minibatch_size": 3, "max_length": 64}
PPO_RUN |= {"max_new_tokens": 16, "micro_batch_size": 1, "value_warmup_steps": 2, "eval_every": 1}
PPO_RUN |= {"save_every": 1, "freeze_layers": 1, "ptx_coef": 0.1, "ptx_batch_size": 3, "slots": 8}
PPO_RUN |= {"rehearsal_batch_size": 3, "lr": 1e-4, "epochs": 1}


def ppo_main(folder, output_dir, **options):
    files = {
        "model": "tied",
        "scorer": "rs scorer",
        "dataset": "prompts.jsonl",
        "eval_dataset": "asked.jsonl",
    }
    files |= {"ptx_dataset": "text.jsonl", "rehearsal_data": "train.jsonl", "output_dir": output_dir}
    given = PPO_RUN | {name: str(folder / file) for name, file in files.items()}
    ppo.main(ppo.Args(**given | options))


def evaluate_main(folder, output_dir):
    """Greedy answers to 5 prompts of two turns, of which rank 1 gets 2, read by a model."""
    files = {"scorer": "rs scorer", "dataset": "turns.jsonl", "output_dir": output_dir}
    options = {name: str(folder / file) for name, file in files.items()} | {"reference": "tied"}
    options |= {"policies": (str(folder / "untied"), str(folder / "tied")), "temperatures": (0.0,)}
    options |= {"safety_scorer": "common.data.tiny:safety_scorer", "max_new_tokens": 8}
    evaluate.main(evaluate.Args(**options))


NESTED = ["Falcon Mamba", "Zamba 2"]  # of modules that are not split, one lies in another, or shares its weights


def step_of_family(name):
    """The sum of log probabilities of a row, and its gradient's norm."""
    model = pretrained._ready(tiny_families.build(name), TOKENIZER, (models.token_logprobs,), False)
    model, ids = dist.shard(model, CPU), torch.arange(5, 25)[None]
    loss = -model.token_logprobs(ids, ids[:, 1:] > 0).sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return [loss.item(), (norm.full_tensor() if dist.is_sharded(model) else norm).item()]


class Stopped(Exception):
    """Replaces kill -9 within this process."""


@contextlib.contextmanager
def stopped(owner, name, calls, after=False):
    """End the program inside at this call, on every rank."""
    plain, seen = getattr(owner, name), []

    def call(*args, **options):
        seen.append(1)
        if len(seen) == calls and not after:
            raise Stopped
        out = plain(*args, **options)
        if len(seen) == calls:
            raise Stopped
        return out

    setattr(owner, name, call)
    try:
        with contextlib.suppress(Stopped):
            yield
            raise AssertionError(f"{name} was called {len(seen)} times")
    finally:
        setattr(owner, name, plain)


def rs_main(folder, output_dir, **options):
    options = rs_options(folder, output_dir=str(folder / output_dir), **options)
    rejection_sampling.main(rejection_sampling.Args(**options))


def rs_with_a_model(folder, output_dir, **options):
    """One iteration, scored by a model."""
    rs_main(
        folder, output_dir, scorer=str(folder / "rs scorer"), iterations=1, epochs=2, packing=False, **options
    )


EVEN = [8] * 5  # blocks of each step
# With micro-batches of 2, 5 blocks are 3 and 2: 2 micro-batches each, and rank 1's second one is empty; of 1
# block rank 1 has none
UNEVEN = [5, 1, 7, 3, 9]


# -- on any number of ranks --------------------------------------------------------------
@functools.cache
def blocks():
    rows = [Row(f"tiny:{i}", row) for i, row in enumerate(tiny.rows("sft", "train")[:200])]
    return make_blocks(demonstrations.sft_documents(rows, TOKENIZER, ARGS.max_length, "tiny"), ARGS.max_length)


def policy(name="tiny", seed=0, compute_dtype=None):
    model = dist.shard(pretrained.load_policy(str(name), TOKENIZER, seed=seed), CPU, compute_dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)


def train(model, optimizer, sizes, start=0):
    """[loss, gradient norm] of one step for each number of blocks."""
    out, some = [], blocks()
    for size in sizes:
        batch, start = [some[(start + i) % len(some)] for i in range(size)], start + size
        out.append(list(sft.update(model, optimizer, batch, ARGS)))
    return out


def descend():
    """A model after five steps of plain gradient descent, whose result shows the size of gradients too.
    (Adam's does not, and where a gradient is nearly 0 it makes a large step of its rounding.)"""
    model, _ = policy()
    train(model, torch.optim.SGD(model.parameters(), lr=0.3), UNEVEN)
    return model


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def state(model, optimizer=None):
    """Every weight, and every moment and step of Adam, whole, by name; the same on every rank."""
    out = {name: whole(weight).clone() for name, weight in model.state_dict().items()}
    for name, parameter in model.named_parameters() if optimizer else ():
        out |= {f"{name}/{key}": whole(value).clone() for key, value in optimizer.state[parameter].items()}
    return out


def same(a, b):
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def write_checkpoint(folder):
    """Two steps, a checkpoint of them, its state as a plain file, and two steps more."""
    model, optimizer = policy()
    train(model, optimizer, [8, 8])
    checkpoints.save_checkpoint(folder / "checkpoint", 2, {"policy": (model, optimizer)}, {"step": 2, "x": [1.5]})
    now = state(model, optimizer)
    after = train(model, optimizer, [8, 8], start=16)
    if dist.is_main():
        torch.save({"state": now, "after": after}, folder / "plain.pt")
    dist.barrier()


def read_checkpoint(folder):
    """(whether the state is equal, metrics of the next steps, those of the writer, the other saved keys)"""
    model, optimizer = policy(seed=7)  # other weights, no moments
    saved = checkpoints.load_checkpoint(folder / "checkpoint", {"policy": (model, optimizer)})
    plain = torch.load(folder / "plain.pt")
    equal = same(state(model, optimizer), plain["state"])
    return equal, train(model, optimizer, [8, 8], start=16), plain["after"], saved


# Comparisons of each step. With micro-batches of 2, 5 are 3 and 2: rank 1's second one is empty; of 1, it has none
STEPS = [5, 1, 8, 3]


def pairs(folder, n_samples=0):
    """Comparisons with the ratios to one other policy, made up: mostly pairs, every fourth one a ranking."""
    some = comparisons.load(str(folder / "pairs.jsonl"), "train", TOKENIZER, 64)[:15]
    some[::4] = comparisons.load(str(folder / "rankings.jsonl"), "train", TOKENIZER, 64)[: len(some[::4])]
    for i, c in enumerate(some):
        n = len(c.response_ids)
        ratios = torch.cat([torch.arange(1, n + 1)[:, None] / (n + 1), torch.ones(n_samples, 1)])
        samples = tuple(some[i - 1 - j].response_ids[0] for j in range(n_samples))
        some[i] = c._replace(ratios=ratios, samples=samples)
    return some


def scorer(n_outputs, name="tiny"):
    model = dist.shard(pretrained.load_scorer(str(name), TOKENIZER, n_outputs), CPU)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)


def steps_of(comparisons, update):
    """The results of `update` for each step's share of the comparisons."""
    out, start = [], 0
    for size in STEPS:
        some = [comparisons[(start + i) % len(comparisons)] for i in range(size)]
        out, start = [*out, list(update(some, len(out)))], start + size
    return out


def reward_steps(folder, model=None, margin="none", **options):
    """[loss, accuracy, gradient norm] of each step."""
    args = reward.Args(max_length=64, micro_batch_size=2, **options)
    model, optimizer = model or scorer(1)
    loaded = comparisons.with_margins(pairs(folder), margin)
    return steps_of(loaded, lambda batch, step: reward.update(model, optimizer, batch, args))


def advantage_steps(folder, n_samples=0):
    """[loss, squared error of e, accuracy, gradient norm] of each step."""
    args = advantage_model.Args(micro_batch_size=2, n_others=1)
    model, optimizer = scorer(2)
    loaded = pairs(folder, n_samples)
    return steps_of(loaded, lambda batch, step: advantage_model.update(model, optimizer, batch, args))


KINDS = {  # names of cases and of what is compared
    "reward": lambda folder: reward_steps(folder),
    "reward_margin": lambda folder: reward_steps(folder, margin="small"),
    "reward_rows": lambda folder: reward_steps(folder, share_prompt=False),
    "advantage": lambda folder: advantage_steps(folder),
    "advantage_samples": lambda folder: advantage_steps(folder, n_samples=2),
}


def answers(folder):
    """Outputs of models for 7 held-out comparisons."""
    loaded, args, llm = pairs(folder)[:7], reward.Args(micro_batch_size=2), policy()[0]
    oracle = f"common.programs.pairwise:oracle={folder / 'tied'}"
    oracle = scorers.load_scorer(oracle, TOKENIZER, CPU, pairwise=True)
    response = lambda text: responses.Response([], text, True)
    duels = [(responses.Prompt([], c.prompt, c.row), *map(response, c.texts[:2])) for c in loaded]

    def outputs(model, batch):
        rewards, expected = models.rewards_and_expected(model, batch)
        return [[*x.tolist(), e] for x, e in zip(rewards.split(batch.sizes), expected.tolist())]

    return {
        "scores": reward_evaluation.scores_of_each(scorer(1)[0], loaded, args),
        "one_score": reward_evaluation.scores_of_each(scorer(1)[0], loaded[:1], args),
        "outputs": of_each_comparison(outputs, scorer(2)[0], loaded, 2, True),
        "logprobs": [x.tolist() for x in comparisons.seq_logprobs(llm, loaded, 2)],
        "one_logprob": [x.tolist() for x in comparisons.seq_logprobs(llm, loaded[:1], 2)],
        "pairwise": scorers.log_odds(oracle, duels, 2),
        "one_pairwise": scorers.log_odds(oracle, duels[:1], 2),
    }


def dpo_pairs(folder):
    """Pairs, of which every third one has a soft label, with log probabilities under a reference, made up."""
    some = comparisons.load(str(folder / "pairs.jsonl"), "train", TOKENIZER, 64)[:15]
    soft = lambda i: 0.25 * (i % 4) if i % 3 == 0 else None
    ref = lambda c: -torch.tensor([3.9 * len(ids) for ids in c.response_ids])
    return [c._replace(preference=soft(i), ref_logprobs=ref(c)) for i, c in enumerate(some)]


def dpo_steps(folder, **options):
    """([[all metrics] of each step], the model after steps of plain gradient descent; see descend())."""
    args = dpo_iterative.Args(micro_batch_size=2, beta=0.5, label_smoothing=0.1, **options)
    model = policy()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = lambda some, step: dpo_iterative.update(model, optimizer, some, args).values()
    return steps_of(dpo_pairs(folder), update), model


DPO_KINDS = {"shared prompts": {}, "a row a response": {"share_prompt": False}}


def dpo_reference(folder):
    """Log probabilities of 7 pairs and of 1, and the results of Versions.ask and with_reference for 7."""
    pairs, args = dpo_pairs(folder)[:7], dpo_iterative.Args(micro_batch_size=2)
    model = policy(folder / "tied")[0]
    out = {f"of {n}": dpo_iterative.pair_logprobs(model, pairs[:n], args) for n in (7, 1)}
    run = SimpleNamespace(folder=folder, args=args, device=CPU)
    made = versions.Versions(run, TOKENIZER, "tiny")
    asked = made.ask(str(folder / "tied"), dpo_iterative.pair_logprobs, pairs, args)
    learnt = dpo_iterative.with_reference(pairs, asked)
    out["learnt"] = [pair.ref_logprobs for pair in learnt]
    return {key: [x.tolist() for x in found] for key, found in out.items()}


# Responses of each step, and rows of the two other losses: 5 are 3 and 2, of 1 rank 1 has none
PPO_STEPS = [range(5), [2], [6, 0, 3], range(7)]


def ppo_steps(folder):
    """(values per token, results of update for each step, the models after them)."""
    args = ppo.Args(micro_batch_size=2, max_grad_norm=0.5, ptx_coef=0.3, rehearsal_coef=0.02, lam=0.9)
    prompts = prompt_sets.load_prompts(str(folder / "prompts.jsonl"), "train", TOKENIZER, 64)[:7]
    answers = [[17 + (3 * i + j) % 30 for j in range(1 + i % 5)] + [TOKENIZER.eos_token_id] for i in range(7)]
    prompts[3], prompts[6] = prompts[2], prompts[5]  # two prompts have two responses, which share them
    pairs = [(p, responses.Response(ids, "", True)) for p, ids in zip(prompts, answers)]
    documents = responses.documents(pairs)
    rollout = ppo.Rollout(pairs, documents, response_mask(documents), torch.ones(7, dtype=torch.bool))
    learners = policy()[0], scorer(1)[0]
    options = {"plan": [ppo.blocks_of(documents, range(7), args)], "micro_batch_size": 2}
    [rollout.old_logprobs] = models.per_token(models.logprobs, learners[0], **options)
    [rollout.ref_logprobs] = models.per_token(
        functools.partial(models.logprobs, temperature=1.3), learners[0], **options
    )
    [rollout.old_values] = models.per_token(models.state_values, learners[1], **options)
    rollout.response_rewards = torch.arange(7.0) - 3
    ppo.estimate_advantages(rollout, args)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in learners]
    agent, steps = ppo.Agent(*learners, None, TOKENIZER, *optimizers), []
    for number, rows in enumerate(PPO_STEPS):
        extra = {"ptx": documents[:3], "rehearsal": documents[number : number + 1]}
        steps.append(ppo.update(agent, rollout, list(rows), extra, True, args))
    names = ("old_logprobs", "ref_logprobs", "old_values", "advantages", "returns")
    return {name: getattr(rollout, name).tolist() for name in names}, steps, learners


def echo(model, prompts, n=1, **options):
    """Replaces sampling: every answer repeats its prompt."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts for _ in range(n)])
    mask = torch.tensor([[i < len(p) for i in range(longest)] for p in prompts for _ in range(n)])
    finished, logprobs = torch.ones(len(tokens)).bool(), torch.zeros(mask.shape)
    return SimpleNamespace(
        response_tokens=tokens, sample_mask=mask, finished=finished, sample_logprobs=logprobs
    )


def descend_scorer(folder):
    """A reward model after steps of plain gradient descent; see descend()."""
    model, _ = scorer(1)
    reward_steps(folder, model=(model, torch.optim.SGD(model.parameters(), lr=0.05)))
    return model


def held(model=None):
    """Bytes of all live tensors of this process, or of a model's parameters: storages, each once."""
    gc.collect()
    tensors = model.parameters() if model else [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    storages = {}
    for tensor in tensors:
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if tensor.layout == torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


# -- on 2 ranks --------------------------------------------------------------------------
CASES = []


def case(function):
    CASES.append(function)
    return function


@case
def families_with_nested_layers(folder):
    return {name: step_of_family(name) for name in NESTED}


@case
def sums(folder):
    """Of all ranks; rank 1 has no second micro-batch, and nothing to extrapolate from."""
    rank, out = dist.rank(), dist.Sums()
    out.add({"nll_sum": torch.tensor(rank + 1.0), "ratio_max": (-3.0, -1.0)[rank]})
    if rank == 0:
        out.add({"nll_sum": 10.0, "ratio_max": -2.0})
        out.add({"": torch.tensor(0.5)}, "extra")
    sums, worked = {"gather": dist.gather([rank] * (2 * rank))}, []
    work = lambda x: worked.append(x) or math.sqrt(7 - x)  # not of 8
    sums["shares"] = dist.gather([repr(list(mapping.map_over_ranks(TRIED, work, size=2)))])
    sums["worked"] = dist.gather([worked])
    return {**sums, "world": dist.world_size(), "Sums": dist.gather([out.over_ranks()])}


@case
def even(folder):
    return {"steps": train(*policy(), EVEN)}


@case
def uneven(folder):
    return {"steps": train(*policy(), UNEVEN)}


@case
def saved(folder):
    model = descend()
    checkpoints.save_model(model, TOKENIZER, folder / "saved by two")
    equal = same(AutoModelForCausalLM.from_pretrained(folder / "saved by two").state_dict(), state(model))
    adapted = pretrained.load_policy("tiny", TOKENIZER, lora_rank=2)
    for parameter in adapted.model.layers.parameters():
        parameter.data.normal_(0, 0.1)
    for each in (model, dist.shard(adapted, CPU)):
        checkpoints.save_model(each, TOKENIZER, folder / "in bfloat16", torch.bfloat16)
        Run.round_weights(SimpleNamespace(dtype=torch.bfloat16), each)
        rounded = AutoModelForCausalLM.from_pretrained(folder / "in bfloat16").float().state_dict()
        weights = state(each)
        adapters = {name: weights.pop(name) for name in list(weights) if "lora" in name}
        equal = equal and same(rounded, weights) and not any(adapters[x].any() for x in adapters if "lora_b" in x)
    return equal and adapters != {}


@case
def frozen_base(folder):
    """The largest differences, of all tokens: the base of a sharded policy to the model it began as, and to the policy."""
    policy = pretrained.load_policy("tiny", TOKENIZER, lora_rank=2)
    for parameter in policy.model.layers.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.1)
    policy = dist.shard(policy, CPU)
    ids = torch.arange(24).view(2, 12)
    every = torch.ones(2, 11, dtype=torch.bool)
    with torch.no_grad():
        of_base = lora.FrozenBase(policy).token_logprobs(ids, every)
        of_start = dist.shard(pretrained.load_policy("tiny", TOKENIZER), CPU).token_logprobs(ids, every)
        of_policy = policy.token_logprobs(ids, every)
    return [(of_base - x).abs().max().item() for x in (of_start, of_policy)]


@case
def frozen_in_bf16(folder):
    """[what each W kept in bfloat16 and each in float32 gave, ...]: steps, adapters, dtypes, an exported weight."""
    out = []
    start = pretrained.load_policy("tiny", TOKENIZER)
    checkpoints.save_model(dist.shard(start, CPU), TOKENIZER, folder / "rounded", torch.bfloat16)
    for exact in (False, True):
        with mock.patch.object(dist, "compute_dtype", None if exact else "bfloat16"):
            model = pretrained.load_policy(str(folder / "rounded"), TOKENIZER, lora_rank=2)
        with mock.patch.object(dist, "compute_dtype", "bfloat16"):
            model = dist.shard(model, CPU)
            dtypes = sorted({str(weight.dtype) for weight in model.parameters()})
            optimizer = dist.adamw(model, 1e-3, ARGS)
            steps = train(model, optimizer, [8, 5])
            adapters = {name: x.tolist() for name, x in state(model).items() if "lora" in name}
            checkpoints.save_model(model, TOKENIZER, folder / f"exact {exact}")
            layer = {name: whole(x) for name, x in model.model.layers[0].mlp.up_proj.named_parameters()}
            sums = layer["weight"].float() + 16 * layer["lora_b"] @ layer["lora_a"]  # alpha 32 over rank 2
            file = load_file(folder / f"exact {exact}" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
            exported = (file - sums).abs().max().item()
            out.append({"steps": steps, "adapters": adapters, "dtypes": dtypes, "exported": exported})
    return out


def of_a_layer(weight):
    """A model of one linear layer."""
    model = torch.nn.Linear(*weight.shape[::-1], bias=False)
    model.weight.data, model.device = weight, CPU
    return model


def of_the_hub(folder):
    """A model as most of the hub's: its weights are bfloat16's. It computes in bfloat16, and trains in fp32."""
    model = pretrained.load_policy(str(folder / "untied"), TOKENIZER)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return dist.shard(model, CPU, torch.bfloat16)


@case
def dithered(folder):
    """SHA-256 of each weight that moved, by name, and whether outputs stayed the same."""
    model = of_the_hub(folder)
    start = state(model)
    ids = torch.arange(1, 41).view(2, 20)
    with torch.no_grad():
        before = model.token_logprobs(ids, ids[:, 1:] > 0).tolist()
        dist.dither(model)
        after = model.token_logprobs(ids, ids[:, 1:] > 0).tolist()
    digest = lambda weight: hashlib.sha256(weight.numpy().tobytes()).hexdigest()
    moved = {name: digest(weight) for name, weight in state(model).items() if not torch.equal(weight, start[name])}
    return {"moved": moved, "equal": before == after}


def sharding(folder):
    model = pretrained.load_policy(str(folder), TOKENIZER)
    on_meta = [p.is_meta for p in model.parameters()]
    out = {"on_meta": [all(on_meta), any(on_meta)]}
    dist.shard(model, CPU)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(1, 41).view(2, 20)
    with torch.no_grad():  # the first forward
        logits, want = model(input_ids=ids).logits, plain(input_ids=ids).logits
    model.reshard()
    out |= {"logits": torch.equal(logits, want), "weights": same(state(model), plain.state_dict())}
    file, full = load_file(folder / "model.safetensors"), state(model)
    out["file"] = bool(file) and all(torch.equal(full[name], weight) for name, weight in file.items())
    buffers = dict(plain.named_buffers())
    out["buffers"] = bool(buffers) and same(dict(model.named_buffers()), buffers)
    out["share"] = sum(p.to_local().numel() for p in model.parameters()) / plain.num_parameters()
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), [4])
    trained = state(model)
    heads = [m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings())]
    equal = torch.equal(trained["lm_head.weight"], trained["model.embed_tokens.weight"])
    out["tied"] = [heads[0] is heads[1], equal]
    out["all_changed"] = all(not torch.equal(trained[name], full[name]) for name in full)
    return dist.gather([out])


@case
def sharded_in_groups(folder):
    """How weights are placed, and whether those of all groups are the same bits after five steps."""
    model = descend()
    placed = {str(p.placements) for p in model.parameters()}
    group = dist.rank() // (dist.shard_size or dist.world_size())
    mine = {name: p.to_local() for name, p in model.named_parameters()}
    first = dist.gather([mine])[dist.rank() - group * (dist.shard_size or 0)]
    return [sorted(placed), all(dist.gather([same(mine, first)]))]


@case
def tied(folder):
    return sharding(folder / "tied")


@case
def untied(folder):
    return sharding(folder / "untied")


@case
def consolidated(folder):
    rank = dist.rank()
    prompts = [[5 + i + j for j in range(3 + 4 * i)] for i in range(5)] if rank == 0 else [[9, 8]]
    options = {"pad_id": TOKENIZER.pad_token_id, "temperature": 0, "max_new_tokens": 24 if rank == 0 else 3}
    options |= {"stop_ids": [TOKENIZER.eos_token_id] if rank == 0 else []}
    plain = AutoModelForCausalLM.from_pretrained(folder / "tied")
    want = sample(plain, prompts, **options).response_tokens.tolist()
    model, optimizer = policy(folder / "tied")
    out = {"parameters": [held(model)], "tensors": [held()]}
    out |= {"steps": len(want[0]), "full": 4 * model.num_parameters()}
    for _ in range(2):
        with dist.consolidated(model):
            out["parameters"].append(held(model))
            out["tensors"].append(held())
            got = sample(model, prompts, **options).response_tokens.tolist()
            out["training_inside"] = model.training
        out["parameters"].append(held(model))
        out["tensors"].append(held())
        out["tokens"] = got == want and out.get("tokens", True)
    out["training_after"] = model.training
    with dist.consolidated(model):
        if rank == 0:  # the other rank has nothing to answer
            sample(model, prompts, **options)
    with contextlib.suppress(ValueError), dist.consolidated(model):
        raise ValueError("something goes wrong inside")
    out["after_error"] = [held(model), model.training]
    out["sharded"] = all(isinstance(p, DTensor) for p in model.parameters())
    with torch.no_grad():
        model.token_logprobs(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool))
    out["after_no_grad"] = [held(model), all(isinstance(p, DTensor) for p in model.parameters())]
    other, other_optimizer = policy(folder / "tied")  # never consolidated
    same_figures = train(model, optimizer, [8, 5]) == train(other, other_optimizer, [8, 5])
    out["same_update"] = same_figures and same(state(model, optimizer), state(other, other_optimizer))
    return dist.gather([out])


# Models of which two ranks have one copy: biases and adapters, GQA, heads of a size of their own
SHARED = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen2": {}, "qwen3": {"head_dim": 8}}
SHAPE = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 65}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@case
def tensor_parallel(folder):
    """Of every rank and kind of model."""
    out, ids, reshard = {}, torch.arange(60).view(4, 15), FSDPModule.reshard
    prompts = [responses.Prompt(prompt, [], None) for prompt in ids.tolist()]
    options = {"tokenizer": TOKENIZER, "prompts": prompts, "n": 2, "max_new_tokens": 12}
    answers = lambda model, **more: [r.ids for _, r in responses.sample_responses(model, **options, **more)]  # noqa: E731
    for kind, more in SHARED.items():
        torch.manual_seed(1)
        plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **more))
        plain = lora.attach(plain, 2, 0) if kind == "llama" else plain
        for parameter in plain.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        model, peaks = dist.shard(copy.deepcopy(plain), CPU), []
        before = held()
        noted = lambda layer: (peaks.append(held() - before), reshard(layer))
        by_two = mock.patch.multiple(dist, ranks_per_copy=2, split_layers=split_layers)
        with by_two, mock.patch.object(FSDPModule, "reshard", noted):
            with dist.consolidated(model):
                gap = (model(ids).logits - plain(ids).logits).abs().max().item()
                inside = held(model)
                own = sample(model, ids, max_new_tokens=4, stop_ids=[], pad_id=0, seed=dist.rank())
                first, second = dist.gather([own.sample_logprobs.tolist()])
                del own
            greedy = [answers(of, temperature=0) for of in (model, plain)]
            drawn = [answers(model, seed=dist.rank()), answers(plain, seed=0)]  # rank 0's seed counts
        out[kind] = {"gap": gap, "greedy": greedy[0] == greedy[1], "drawn": drawn[0] == drawn[1]}
        out[kind] |= {"inside": inside, "peak": max(peaks), "after": held() - before}
        out[kind] |= {"layer": held(plain.model.layers[0]), "whole": held(plain), "agreed": first == second}
    return dist.gather([out])


@case
def checkpoint_of_two(folder):
    (folder / "two").mkdir(exist_ok=True)
    write_checkpoint(folder / "two")
    equal, after, want, saved = read_checkpoint(folder / "two")
    return {"equal": equal, "after": after, "want": want, "saved": saved}


@case
def checkpoint_of_one(folder):
    equal, after, want, saved = read_checkpoint(folder / "one")
    return {"equal": equal, "after": after, "want": want, "saved": saved}


def nan_on_rank_1(module, loss, call, run):
    """The error on every rank of a run whose loss is NaN on rank 1 at this call."""
    plain, calls = getattr(module, loss), []

    def poisoned(*args, **options):
        calls.append(1)
        value, parts = plain(*args, **options)
        factor = float("nan") if len(calls) == call and dist.rank() == 1 else 1.0
        return value * factor, {key: x * factor for key, x in parts.items()}

    message = ""
    with mock.patch.object(module, loss, poisoned):
        try:
            run()
        except NotFinite as error:
            message = str(error)
    return dist.gather([message])


@case
def nan_on_one_rank(folder):
    args = sft.Args(**run_options(folder), output_dir=str(folder / "nan"))
    return nan_on_rank_1(sft, "sft_loss", 2, lambda: sft.main(args))


@case
def bf16(folder):
    model, optimizer = policy(folder / "tied", compute_dtype=torch.bfloat16)
    seen = []
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda module, inputs: seen.append(str(inputs[0].dtype))
    )
    steps = train(model, optimizer, [8, 5, 8])
    hook.remove()
    with dist.consolidated(model):
        inside = {str(p.dtype) for p in model.parameters()}
    kept = {str(value.dtype) for value in state(model, optimizer).values()}
    fp32 = train(*policy(folder / "tied"), [8, 5, 8])
    return {"steps": steps, "fp32": fp32, "seen": seen, "kept": sorted(kept), "inside": sorted(inside)}


@case
def undisturbed(folder):
    sft.main(sft.Args(**run_options(folder), output_dir=str(folder / "undisturbed")))
    return {}


@case
def scorer_steps(folder):
    return {name: steps(folder) for name, steps in KINDS.items()}


@case
def of_models(folder):
    return dist.gather([answers(folder)])


@case
def rows_of_pairs(folder):
    names = {"dataset": str(folder / "pairs.jsonl"), "output_dir": str(folder / "rows of pairs")}
    pairwise.main(pairwise.Args(**names))
    return {}


@case
def samples(folder):
    """Of every rank: answers that repeat the prompt, of 5 comparisons and of 1, and real ones."""
    some, model = pairs(folder)[:5], policy()[0]
    drawn = lambda prompts, length: reward_evaluation.policy_samples(
        model, prompts, TOKENIZER, 3, SimpleNamespace(model="tiny", max_new_tokens=length, slots=64), 4
    )
    with mock.patch.object(responses, "sample", echo):
        out = {
            "echo": drawn(some, 5),
            "one": drawn(some[:1], 5),
        }
    out["real"] = drawn(some, 60)
    out["sharded"] = all(isinstance(p, DTensor) for p in model.parameters())
    as_lists = lambda found: [[ids.tolist() for ids in of_one] for of_one in found]
    return dist.gather([{k: v if isinstance(v, bool) else as_lists(v) for k, v in out.items()}])


@case
def saved_scorer(folder):
    model = descend_scorer(folder)
    checkpoints.save_model(model, TOKENIZER, folder / "scorer of two")
    plain = AutoModelForSequenceClassification.from_pretrained(folder / "scorer of two")
    some, args = pairs(folder)[:2], reward.Args(micro_batch_size=2)
    got = reward_evaluation.scores_of_each(model, some, args)
    again, _ = scorer(1, folder / "scorer of two")
    loaded = reward_evaluation.scores_of_each(again, some, args)
    share = sum(p.to_local().numel() for p in again.parameters()) / plain.num_parameters()
    out = {"same": same(plain.state_dict(), state(model)), "scores": got, "loaded": loaded, "share": share}
    return dist.gather([{**out, "head": str(model.score.weight.dtype)}])


def script_run(script, folder, **options):
    script.main(
        script.Args(**scorer_options(folder, script), output_dir=str(folder / script.__name__), **options)
    )
    return {}


@case
def reward_run(folder):
    return script_run(reward, folder)


@case
def advantage_run(folder):
    return script_run(advantage_model, folder, n_others=1)


@case
def nan_in_a_scorer(folder):
    args = reward.Args(**scorer_options(folder), output_dir=str(folder / "reward nan"))
    return nan_on_rank_1(reward, "bradley_terry_loss", 4, lambda: reward.main(args))


@case
def rs_run(folder):
    rs_main(folder, "rs of two")
    return {}


def stopped_and_resumed(main, folder, name, first, *others):
    """A run stopped at this call of the sampler, then after calls of others, and resumed to its end. How many
    rows there were at the first stop."""
    with stopped(responses, "sample_responses", first):
        main(folder, name)
    sampled = len(files.read_jsonl(folder / name / "pool.jsonl"))
    for owner, function, call in others:
        with stopped(owner, function, call, after=True):
            main(folder, name, resume=True)
    main(folder, name, resume=True)
    return {"sampled": sampled}


@case
def rs_stopped(folder):
    """In the middle of an iteration's chunks (the study of version 0 are 2 calls), and after the first checkpoint."""
    return stopped_and_resumed(rs_main, folder, "rs stopped", 5, (checkpoints, "save_checkpoint", 1))


@case
def rs_of_one_pool(folder):
    """Continue with responses that one rank sampled, which are not scored yet."""
    rs_with_a_model(folder, "rs sampled by one, learnt by two", resume=True)
    return {}


@case
def dpo_updates(folder):
    out = {}
    for name, options in DPO_KINDS.items():
        out[name], model = dpo_steps(folder, **options)
        weights = state(model)
        if dist.is_main():
            torch.save(weights, folder / f"dpo {name}.pt")
    return dist.gather([out])


@case
def dpo_references(folder):
    return dist.gather([dpo_reference(folder)])


@case
def dpo_run(folder):
    dpo_main(folder, "dpo of two")
    return {}


@case
def dpo_stopped(folder):
    """In the middle of an iteration's chunks, after the first checkpoint, and in the second iteration."""
    stops = (checkpoints, "save_checkpoint", 1), (dpo_iterative, "write_pairs", 2)
    return stopped_and_resumed(dpo_main, folder, "dpo stopped", 7, *stops)


@case
def ppo_updates(folder):
    known, steps, both = ppo_steps(folder)
    states = [state(model) for model in both]
    if dist.is_main():
        torch.save(states, folder / "ppo steps.pt")
    return dist.gather([{"known": known, "steps": steps}])


@case
def ppo_run(folder):
    ppo_main(folder, "ppo")
    with stopped(checkpoints, "save_checkpoint", 1, after=True):
        ppo_main(folder, "ppo stopped")
    ppo_main(folder, "ppo stopped", resume=True)
    return {}


@case
def apple_silicon(folder):
    """torch's accelerator is mps there, while the model is on the CPU."""
    with mock.patch("torch._C._get_accelerator", lambda: torch.device("mps")):
        return len(train(*policy(), [4]))


@case
def evaluated(folder):
    evaluate_main(folder, "evaluated by two")
    return {}


@case
def one_rank_takes_longer_than_a_collective_may(folder):
    """Rank 0 to load a model and to write one, rank 1 to read data."""
    load, save = pretrained.load_policy, TOKENIZER.save_pretrained
    slow = lambda *args, **options: (time.sleep(2.5 * dist.is_main()), load(*args, **options))[1]
    slow_tokenizer = SimpleNamespace(save_pretrained=lambda path: (time.sleep(2.5), save(path)))
    td.distributed_c10d._set_pg_timeout(timedelta(seconds=2), td.group.WORLD)
    try:
        time.sleep(2.5 * dist.rank())
        mixtures.load_rows("tiny:kind=text", "text")
        with mock.patch.object(pretrained, "load_policy", slow):
            model, optimizer = policy()
        checkpoints.save_model(model, slow_tokenizer, folder / "written slowly")
        return len(train(model, optimizer, [4]))
    finally:
        td.distributed_c10d._set_pg_timeout(dist.TIMEOUT, td.group.WORLD)


def main(folder, shard_size=None, *names):
    dist.TIMEOUT = timedelta(seconds=60)
    dist.setup()
    dist.shard_size = shard_size and int(shard_size)
    results = {}
    for function in CASES if not names else [function for function in CASES if function.__name__ in names]:
        try:
            results[function.__name__] = function(folder)
        except Exception:
            results[function.__name__] = {"error": traceback.format_exc()}
        if dist.is_main():
            (folder / "results.json").write_text(json.dumps(results))
    dist.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
