"""Copy an algorithm into another project: the part of its script above the program, with the kit (seven files
of common/), runs its whole loop on a plain transformers model and a custom reward, and learns."""

import ast
import builtins
import dis
import inspect
import json
import re
import shutil

import processes
import pytest

ROOT = processes.ROOT
KIT = "losses sampler models batches dist responses errors".split()

PLAIN = """
import types
import torch
from tokenizers import Tokenizer, models as kinds, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from algorithm import *
from common import batches, dist, models, responses
from common.loading import checks

torch.manual_seed(0)
device = dist.setup()
words = ["<pad>", "<end>", *map(str, range(30))]
backend = Tokenizer(kinds.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")


def load(kind=LlamaForCausalLM, n_outputs=1):
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1, num_labels=n_outputs,
    )
    methods = [models.token_logprobs if kind is LlamaForCausalLM else models.head_outputs]
    return dist.shard(models.with_methods(kind(config), methods), device)


def document(prompt, response):
    ids = torch.tensor(prompt + response)
    return batches.Document(ids, torch.arange(len(ids)) >= len(prompt), [], None)


def comparison(prompt, better, worse, **more):
    prompt, *both = (torch.tensor(ids) for ids in (prompt, better, worse))
    return batches.Comparison([], ["", ""], prompt, both, torch.tensor([0, 1]), "", None, **more)


def score(sampled):  # the share of even tokens
    return [sum(token % 2 == 0 for token in response.ids) / len(response.ids) for _, response in sampled]


prompts = [responses.Prompt(ids, [{"role": "user", "content": str(ids)}], batches.Row("", {}))
           for ids in ([5, 6, 7], [8, 9], [10, 11, 12, 13], [14])]
draw = lambda low, n: torch.randint(low, 16, (n,)).tolist()
even = lambda n: [2 * x for x in draw(1, n)]  # 2, 4, ..., 30
odd = lambda n: [2 * x + 1 for x in draw(1, n)]
values = []  # that have to rise
"""

LOOPS = {
    "sft": """
args, model = Args(max_length=64, batch_size=4), load()
optimizer = dist.adamw(model, 3e-3, args)
blocks = make_blocks([document(draw(2, 3), even(5) + [1]) for _ in range(64)], args.max_length)
for step in range(30):
    nll, _ = update(model, optimizer, blocks[step % 4 :: 4], args)
    values.append(-nll)
""",
    "reward": """
args, model = Args(), load(LlamaForSequenceClassification)
optimizer = dist.adamw(model, 1e-4, args)
for step in range(30):
    batch = [comparison(draw(2, 3), even(4) + [1], odd(5) + [1]) for _ in range(16)]
    loss, accuracy, _ = update(model, optimizer, batch, args)
    values.append(accuracy)
""",
    "advantage_model": """
args, model = Args(n_others=1, n_policies=3), load(LlamaForSequenceClassification, 2)
optimizer = dist.adamw(model, 1e-4, args)
ratios = torch.full((2, 1), 0.5)  # of two responses to one other policy
for step in range(30):
    batch = [comparison(draw(2, 3), even(4) + [1], odd(5) + [1], ratios=ratios) for _ in range(16)]
    loss, _, accuracy, _ = update(model, optimizer, batch, args)
    values.append(accuracy)
""",
    "rejection_sampling": """
args, model = Args(n_samples=16, max_new_tokens=8, max_length=32, batch_size=2, lr=1e-3, epochs=3), load()
optimizer = dist.adamw(model, args.lr, args)
for iteration in range(1, 9):
    sampled = responses.answers(model, tokenizer, prompts, args, seed=iteration, n=args.n_samples)  # 1. sample
    sampled = [(prompt, response._replace(finished=True)) for prompt, response in sampled]  # none ends by itself yet
    scores = score(sampled)  # 2. score
    places, _ = select(sampled, scores)  # 3. select
    plan = plan_steps([responses.documents([sampled[i] for i in places])], iteration, args)  # 4. fine-tune
    for step, row in fine_tune(model, optimizer, plan, range(1, len(plan) + 1), args):
        pass
    values.append(sum(scores) / len(scores))
""",
    "ppo": """
args = Args(max_length=64, max_new_tokens=10, n_samples=16, minibatch_size=32, epochs=2, kl_coef=0.01,
            value_warmup_steps=0, missing_eos_penalty=0.0)
policy, reference, value = load(), load(), load(LlamaForSequenceClassification)
reference.load_state_dict(policy.state_dict())
checks.fit_rows(args, [policy, value])
optimizers = dist.adamw(policy, 1e-3, args), dist.adamw(value, 1e-3, args)
agent = Agent(policy, value, reference.requires_grad_(False), tokenizer, *optimizers)
state = fresh_state()
for iteration in range(1, 9):
    scores = lambda sampled: torch.tensor(score(sampled))
    rollout, row = run_iteration(agent, prompts, scores, state, iteration, args)
    values.append(row["reward/score"])
""",
    "dpo_iterative": """
args = Args(max_new_tokens=8, max_length=32, n_samples=16, batch_size=4, epochs=4, lr=1e-3, beta=0.1)
policy, reference = load(), load()
reference.load_state_dict(policy.state_dict())
for iteration in range(1, 9):
    sampled = responses.answers(policy, tokenizer, prompts, args, seed=iteration, n=args.n_samples)  # 1. sample
    sampled = [(prompt, response._replace(finished=True)) for prompt, response in sampled]  # none ends by itself yet
    scores = score(sampled)  # 2. score
    chosen, _ = best_against_worst(sampled, scores, iteration, args)  # 3. pair
    chosen = with_reference(chosen, pair_logprobs(reference, chosen, args))  # 4. learn
    plan, optimizer = plan_steps(chosen, iteration, args), dist.adamw(policy, args.lr, args)
    for step, row in learn(policy, optimizer, plan, range(1, len(plan) + 1), args):
        pass
    values.append(sum(scores) / len(scores))
""",
}


def algorithm_of(script):
    """The source of a script without its program: without the second block of imports, and up to the line."""
    above, line, _ = script.partition("# -- the program around the algorithm --")
    above, n = re.subn(r"# Needed only by the program around the algorithm:.*?\n\n(?=\n)", "", above, flags=re.S)
    assert line and n == 1
    return above


@pytest.mark.parametrize("name", LOOPS)
def test_a_copied_algorithm_learns_on_a_plain_model(name, tmp_path):
    """The kit's folder may have another name and place, as in half of the cases."""
    kit = "common" if name in ("sft", "advantage_model", "dpo_iterative") else "mine.kit"
    folder = tmp_path / kit.replace(".", "/")
    folder.mkdir(parents=True)
    for file in KIT:
        shutil.copy(ROOT / "common" / f"{file}.py", folder)
    (folder / "loading").mkdir()
    shutil.copy(ROOT / "common" / "loading" / "checks.py", folder / "loading")
    report = "\nimport json\nprint(json.dumps(values))\n"
    files = {"algorithm": algorithm_of((ROOT / f"{name}.py").read_text()), "loop": PLAIN + LOOPS[name] + report}
    for file, text in files.items():
        (tmp_path / f"{file}.py").write_text(re.sub(r"^from common\b", f"from {kit}", text, flags=re.M))
    ended = processes.script(tmp_path / "loop.py", cwd=tmp_path, alone=True)
    assert ended.code == 0, ended.err[-2000:]
    values = json.loads(ended.out.splitlines()[-1])
    print(name, [round(value, 3) for value in values])
    assert (values[-2] + values[-1]) / 2 > (values[0] + values[1]) / 2 + 0.1


@pytest.mark.parametrize("script, variant", [*((name, "") for name in LOOPS), ("sft", "hir"), ("ppo", "grpo"),
                                             ("dpo_iterative", "cpl")])  # fmt: skip
def test_what_is_copied_uses_no_name_of_the_program(script, variant, tmp_path):
    source = (ROOT / f"{script}.py").read_text()
    if variant:
        source = inspect.getsource(processes.patched(script, variant, tmp_path))
    tree = ast.parse(algorithm_of(source))
    bound = {alias.asname or alias.name for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
             for alias in node.names}  # fmt: skip
    bound |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound |= {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets}

    def read_in(code):
        own = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_NAME"}  # a class's fields
        names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")} - own
        return names.union(*(read_in(inner) for inner in code.co_consts if inspect.iscode(inner)))

    assert not read_in(compile(tree, script, "exec")) - bound - set(dir(builtins)) - {"__name__", "__annotations__"}
