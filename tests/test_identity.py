"""common/run/identity.py: the changes that a resumed run refuses, and the message. The table in
docs/use/runs.md lists the same changes as the code."""

import importlib
import itertools
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
from helpers import TOKENIZER

from common.errors import InputError
from common.loading import pretrained
from common.run import checkpoints, identity

FUNCTION = "def f(prompts, responses, rows):\n    return [0.0] * len(prompts)\n"


def test_the_docs_table_matches_the_code():
    """For every flag of every program: exactly the changes that the page lists are refused."""
    page = (processes.ROOT / "docs" / "use" / "runs.md").read_text().partition("## Resuming")[2].partition("\n## ")[0]
    programs = {name: importlib.import_module(name) for name in processes.SCRIPTS}
    for name in ("ai_feedback", "evaluate", "rehearsal"):
        programs[name] = importlib.import_module(f"common.programs.{name}")
    wanted = set()
    for names, verdict in re.findall(r"^\| (.+?) \| (refused.*?) \|", page, re.M):
        only = re.search(r"`(?:common\.programs\.)?(\w+)(\.py)?`", verdict)
        kinds, _, flags = names.replace("`", "").rpartition(" of ")  # "content or function of --a, --b"
        for kind, name in itertools.product(kinds.split(" or "), flags.split(", ")):
            flag = name[2:].replace("-", "_") if name.startswith("--") else name
            name = f"{kind} of {name}" if kind else flag
            wanted |= {f"{script}: {name}" for script in ([only[1]] if only else programs)}
    flags = {flag for program in programs.values() for flag in program.Args.__annotations__}
    behind = {f"{kind} of --{x.replace('_', '-')}" for kind in ("content", "function", "file") for x in flags}
    every = {f"{script}: {x}" for script in programs for x in {"script", "held-out set", "ranks"} | flags | behind}
    refused = {x for x in every if any(re.fullmatch(pattern, x) for pattern in identity.REFUSED)}
    assert refused == wanted and len(every) > 1000


def test_a_model_of_the_hub_is_its_commit_however_many_of_its_files_are_here(tmp_path, monkeypatch):
    """A run looks before the weights have been downloaded, a resumed one afterwards."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="neither a folder nor in this machine's cache"):
        pretrained.identity("org/name")
    cached = tmp_path / "models--org--name"
    for commit in ("abc", "def"):
        (cached / "snapshots" / commit).mkdir(parents=True)
        (cached / "refs").mkdir(exist_ok=True)
        (cached / "refs" / "main").write_text(commit)
        (cached / "snapshots" / commit / "config.json").write_text("{}")
        assert pretrained.identity("org/name") == [commit]
        (cached / "snapshots" / commit / "model.safetensors").write_text("weights")
        assert pretrained.identity("org/name") == [commit]
        assert pretrained.identity(str(cached / "snapshots" / commit)) == [commit]  # to resume with an earlier one


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A folder with everything that the flags of a run name."""
    monkeypatch.chdir(tmp_path)
    for name, seed in (("sft", 0), ("ref", 1), ("rm", 2)):
        checkpoints.save_model(pretrained.load_policy("tiny", TOKENIZER, seed=seed), TOKENIZER, tmp_path / name)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ant"}\n')
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "f.py").write_text(FUNCTION)
    return tmp_path


def begun(stage="ppo", held_out=("a",), world_size=1, **options):
    """args.json of a run."""
    args = {"model": "sft", "reference": None, "scorer": "rm", "safety_scorer": None, "chat_template": None}
    args |= {"dataset": "rows.jsonl", "lora_rank": 0, "lr": 0.1, "seed": 0, "output_dir": "run", **options}
    known = identity.of_run(SimpleNamespace(**args), held_out)
    record = {"stage": stage, "args": args, "world_size": world_size, "began_with": known}
    return json.loads(json.dumps(record))


def copied(name):
    copy = shutil.copytree if Path(name).is_dir() else shutil.copy
    copy(name, f"copy_{name}")


def other_weights(name):
    """Other weights, with the same size and modification time."""
    path = Path(name, "model.safetensors")
    content, times = bytearray(path.read_bytes()), path.stat()
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    pretrained._sha256.cache_clear()  # a resumed run is another process


def write(name, text):
    Path(name).write_text(text)


CASES = {  # what happens between: (options of the run, change, options of the resuming command, what is said)
    "nothing": ({}, None, {}, []),
    "another learning rate": ({}, None, {"lr": 0.2}, ["lr: 0.1 -> 0.2"]),
    "more ranks": ({}, None, {"world_size": 2}, ["ranks: 1 -> 2"]),
    "a reference named": ({}, None, {"reference": "ref"}, "content of --reference (reference: None -> 'ref')"),
    "--model named as the reference": ({}, None, {"reference": "sft"}, ["reference: None -> 'sft'"]),
    "another reference": ({"reference": "ref"}, None, {"reference": "rm"}, "content of --reference (reference"),
    "other weights of a model": ({}, lambda: other_weights("sft"), {}, "content of --model (under the same name)"),
    "other weights and another rate": ({}, lambda: other_weights("sft"), {"lr": 0.2},
                                       "content of --model (under the same name)"),
    "another tokenizer": ({}, lambda: write("sft/tokenizer_config.json", "{}"), {}, "content of --model"),
    "a moved model": ({}, lambda: copied("sft"), {"model": "copy_sft"}, ["model: 'sft' -> 'copy_sft'"]),
    "a page beside a model": ({}, lambda: write("sft/README.md", "a page"), {}, []),
    "another seed of random weights": ({"model": "tiny"}, None, {"seed": 1}, "content of --model (seed: 0 -> 1)"),
    "another seed": ({}, None, {"seed": 1}, ["seed: 0 -> 1"]),
    "other weights of a scorer": ({}, lambda: other_weights("rm"), {}, "content of --scorer"),
    "another scorer of rejection sampling": ({"stage": "rejection_sampling"}, lambda: other_weights("rm"), {},
                                             ["content of --scorer"]),
    "a function for a model": ({}, None, {"scorer": "f.py:f"}, "content of --scorer (scorer"),
    "another function": ({"scorer": "f.py:f"}, lambda: write("f.py", FUNCTION + FUNCTION.replace("f(", "g(")),
                         {"scorer": "f.py:g"}, "function of --scorer"),
    "another text": ({"scorer": "f.py:f=a"}, None, {"scorer": "f.py:f=b"}, "function of --scorer"),
    "a mended function": ({"scorer": "f.py:f"}, lambda: write("f.py", FUNCTION + "# a comment"), {},
                          ["file of --scorer"]),
    "a moved function": ({"scorer": "f.py:f"}, lambda: (Path("x").mkdir(), shutil.copy("f.py", "x")),
                         {"scorer": "x/f.py:f"}, ["scorer: 'f.py:f' -> 'x/f.py:f'"]),
    "a judge's model": ({"scorer": "f.py:f=ref"}, lambda: other_weights("ref"), {}, "function of --scorer"),
    "a gate": ({}, None, {"safety_scorer": "rm"}, "content of --safety-scorer (safety_scorer"),
    "another template": ({"chat_template": "chat.jinja"}, lambda: write("chat.jinja", ""), {}, "content of --chat-t"),
    "a template": ({}, None, {"chat_template": "chat.jinja"}, "content of --chat-template (chat_template"),
    "rows behind the others": ({}, lambda: write("rows.jsonl", "{}\n"), {}, ["content of --dataset"]),
    "rows of feedback": ({"stage": "ai_feedback label"}, lambda: write("rows.jsonl", "{}\n"), {}, "content of --d"),
    "moved rows": ({}, lambda: copied("rows.jsonl"), {"dataset": "copy_rows.jsonl"},
                   ["dataset: 'rows.jsonl' -> 'copy_rows.jsonl'"]),
    "other held-out messages": ({}, None, {"held_out": ["b"]}, "held-out set (under the same name)"),
    "another script": ({}, None, {"stage": "sft"}, "script: 'ppo' -> 'sft'"),
    "adapters": ({}, None, {"lora_rank": 4}, "lora_rank: 0 -> 4"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_changed_inputs_are_printed_or_refused(world, case):
    options, change, resuming, said = CASES[case]
    before = begun(**options)
    change and change()
    now = begun(**{**options, **resuming})
    if isinstance(said, list):
        assert identity.changes(before, now, "run") == said
    else:
        with pytest.raises(InputError, match=re.escape(f"--resume: run was started with another {said}")):
            identity.changes(before, now, "run")


def test_a_run_of_an_earlier_version_is_compared_by_its_arguments(world):
    before = {key: x for key, x in begun().items() if key != "began_with"}
    assert identity.changes(before, begun(lr=0.2), "run") == ["lr: 0.1 -> 0.2"]
    assert identity.changes({}, begun(), "run") == []
