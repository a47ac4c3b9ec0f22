"""The shape of the code, read from its syntax trees: layers, what an algorithm needs of common/, length, style; and
each algorithm, copied out with what it needs, takes a step."""

import ast
import importlib
import io
import re
import shutil
import tokenize

import processes
import pytest

ROOT, SCRIPTS = processes.ROOT, processes.SCRIPTS
LAYERS = [  # a file of common/ imports from layers above its own line only
    "errors losses sampler tiny",
    "tensor_parallel files",
    "dist",
    "metrics",
    "batches plots lora",
    "formats models",
    "data",
    "loading",
    "comparisons",
    "generate",
    "scorers evaluation reward_evaluation",
    "cli identity",
    "run",
    "pool versions",
    "rehearsal ai_feedback evaluate",
    "pairwise",
]
LAYER = {name: number for number, line in enumerate(LAYERS) for name in line.split()}
COMMON = sorted(path.stem for path in (ROOT / "common").glob("*.py") if path.stem != "__init__")
NEEDED = {"losses", "batches", "models", "dist", "errors"}  # what an algorithm may use
VAGUE = """found some numbers parts asked both known ours theirs held about rest how ask it told now them these those
others out said of at by one two""".split()


def tree_of(name):
    return ast.parse((ROOT / f"{name}.py").read_text())


def n_code_lines(name):
    """Lines that hold code: docstrings, comments and blank lines are free, so that no feature costs a sentence."""
    source, no_code = (ROOT / f"{name}.py").read_text(), (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE)
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in no_code and token.string.strip():
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def imports(tree):
    """{name in the file: the file of common/ that it comes from}"""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "common":
            for alias in node.names:
                names[alias.asname or alias.name] = (node.module + "." + alias.name).split(".")[1]
    return names


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "benchmarks").glob("*.py")), ids=lambda p: p.stem)
def test_what_a_benchmark_uses_of_common_is_there(path):
    tree = ast.parse(path.read_text())
    modules = {name for name, module in imports(tree).items() if name == module}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in modules:
            assert hasattr(importlib.import_module(f"common.{node.value.id}"), node.attr)


def functions_of(tree):
    """The functions above main. `check` is none of the algorithm's: it reads the command line."""
    names = [getattr(node, "name", None) for node in tree.body]
    above = tree.body[: names.index("main")]
    return [node for node in above if isinstance(node, ast.FunctionDef) and node.name != "check"]


@pytest.mark.parametrize("name", COMMON)
def test_no_arrow_of_common_points_up_and_no_import_of_it_hides_in_a_function(name):
    tree = tree_of(f"common/{name}")
    assert all(LAYER[other] < LAYER[name] for other in imports(tree).values())
    at_the_top = ast.Module([node for node in tree.body if isinstance(node, ast.ImportFrom)], [])
    assert imports(tree) == imports(at_the_top)


@pytest.mark.parametrize("name", SCRIPTS)
def test_functions_above_main_use_losses_batches_models_and_dist_alone(name):
    tree = tree_of(name)
    names = {node.id for function in functions_of(tree) for node in ast.walk(function) if hasattr(node, "id")}
    assert {file for used, file in imports(tree).items() if used in names} <= NEEDED


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_no_splat_no_merge_of_rows_and_no_vague_name(name):
    nodes = list(ast.walk(tree_of(name)))
    calls = [argument for node in nodes if isinstance(node, ast.Call) for argument in node.args]
    assert not [x.value.id for x in calls if isinstance(x, ast.Starred) and isinstance(x.value, ast.Name)]
    assert not [x.lineno for x in nodes if isinstance(x, ast.AugAssign) and isinstance(x.op, ast.BitOr)]
    stored = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    assert not stored & set(VAGUE)


def test_scripts_and_common_keep_their_budgets_of_code_lines():
    assert sum(map(n_code_lines, SCRIPTS)) <= 1650
    # The goal is 5,300: what reads rows, locks, and compares what a run began with has to become shorter
    assert sum(n_code_lines(f"common/{name}") for name in COMMON) <= 5520


STEP = """
import inspect
import torch
from algorithm import *
from common import batches, dist, loading, tiny

torch.manual_seed(0)
device, tokenizer, args = dist.setup(), tiny.tokenizer(), Args()
ids = lambda n: torch.randint(5, 40, (n,), dtype=torch.int32)
documents = [batches.Document(ids(n), torch.arange(n) > 3, [], None, i) for i, n in enumerate((9, 7, 12))]
pair = lambda n: batches.Comparison([], ["a", "b"], ids(4), [ids(n), ids(3)], torch.tensor([0, 1]), "", None,
    ratios=torch.ones(2, args.n_others) if hasattr(args, "n_others") else None, ref_logprobs=torch.zeros(2))
n_outputs = {"reward": 1, "advantage_model": 2}.get(NAME)
model = loading.load_scorer("tiny", tokenizer, n_outputs) if n_outputs else loading.load_policy("tiny", tokenizer)
model = dist.shard(model, device)
value = dist.shard(loading.load_scorer("tiny", tokenizer, 1), device)
mask = batches.response_mask(documents)
noise = lambda: torch.randn(mask.shape) * mask
given = {
    "model": model, "policy": model, "value": value, "optimizer": dist.adamw(model, 1e-3, args),
    "optimizers": [dist.adamw(model, 1e-3, args), dist.adamw(value, 1e-3, args)],
    "blocks": batches.make_blocks(documents, 64), "batch": [pair(5), pair(6)], "pairs": [pair(5), pair(6)],
    "minibatch": [0, 1, 2], "extra": {"ptx": documents}, "policy_learns": True, "largest_gap": 8.0, "args": args,
}
if NAME == "ppo":
    logprobs = noise()
    given["rollout"] = Rollout([], documents, mask, mask[:, 0], response_rewards=noise()[:, 0], old_logprobs=logprobs,
        ref_logprobs=logprobs, old_values=noise())
    estimate_advantages(given["rollout"], args)
before = [p.detach().clone() for p in model.parameters()]
update(**{name: given[name] for name in inspect.signature(update).parameters})
print(sum(not torch.equal(a, b) for a, b in zip(before, model.parameters())), len(before))
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_algorithm_copied_out_with_what_it_needs_takes_a_step(name, tmp_path):
    """Its functions, Args and the files that they use, in an empty folder."""
    tree = tree_of(name)
    kept = [node for node in tree.body if isinstance(node, ast.ClassDef)] + functions_of(tree)
    constants = [node for node in tree.body if isinstance(node, ast.Assign)]
    names = {node.id for function in kept for node in ast.walk(function) if isinstance(node, ast.Name)}
    kept = [
        node for node in constants if node.targets[0].id in names and node.targets[0].id != "RECIPES"
    ] + kept
    used = {node.id for part in kept for node in ast.walk(part) if isinstance(node, ast.Name)}
    head = ["from __future__ import annotations"]
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            file = (getattr(node, "module", None) or "").split(".")
            wanted = [a for a in node.names if file[0] != "common" or {*file[1:], a.name} & NEEDED]
            node.names = [a for a in wanted if file[0] != "common" or (a.asname or a.name) in used]
            head += [ast.unparse(node)] if node.names else []
    (tmp_path / "algorithm.py").write_text("\n".join([*head, *map(ast.unparse, kept)]))
    (tmp_path / "common").mkdir()
    for file in NEEDED | {"tensor_parallel", "files", "sampler", "loading", "lora", "tiny"}:  # and what these need
        shutil.copy(ROOT / "common" / f"{file}.py", tmp_path / "common")
    (tmp_path / "step.py").write_text(f"NAME = {name!r}\n{STEP}")
    ended = processes.script(tmp_path / "step.py", cwd=tmp_path, alone=True)
    assert re.fullmatch(r"(\d+) \1\n", ended.out), ended.err[-2000:]  # every weight has moved
