"""Reliability of all six scripts: kill -9 at random moments, a full disk, an output directory that cannot be
written, a rank that dies, Ctrl-C, another number of ranks, and invalid data files.

Kills at exact moments, and cases of one script only, are in the test file of that script."""

import functools
import gzip
import importlib
import json
import math
import random
import re
import shutil
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import processes
import pyarrow
import pyarrow.parquet
import pytest
import torch
from processes import SCRIPTS, flags
from helpers import (
    assert_error, indexed_model, read_json, same_weights, smaller_model, succeeds, train_small, weights,
    write_rows,
)  # fmt: skip

from transformers.utils import chat_template_utils

from common.errors import InputError
from common.data import tiny
from common.data.files import read_jsonl
from common.run import logs, plots

TRAINED = {"max_steps": 6, "save_every": 2, "max_length": 64, "batch_size": 4, "micro_batch_size": 2}
TRAINED |= {"max_new_tokens": 6}
SAMPLED = {"max_new_tokens": 6, "max_length": 64, "eval_prompts": 3, "prompts_per_iteration": 6}
SAMPLED |= {"micro_batch_size": 2, "scorer": "common.data.tiny:gold_scorer", "n_samples": 4}
VERSIONS = SAMPLED | {"iterations": 2, "epochs": 2, "batch_size": 4, "chunk_prompts": 4}
RUNS = {  # of each script, a run with several checkpoints
    "sft": {**TRAINED, "sample_prompts": 3},
    "reward": {**TRAINED, "length_prompts": 2},
    "advantage_model": {**TRAINED, "length_prompts": 2},
    "rejection_sampling": {**VERSIONS, "sweep_prompts": 2, "save_every": 1},
    "ppo": {**SAMPLED, "iterations": 3, "epochs": 1, "minibatch_size": 12, "save_every": 1},
    "dpo_iterative": {**VERSIONS, "save_every": 2, "offline_pairs": 6},
}
RUNS["ppo"] |= {"value_warmup_steps": 1}
KINDS = {"sft": "sft", "reward": "preferences", "advantage_model": "preferences"}
KINDS |= {"common.programs.ai_feedback": "preferences"}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with rows of every kind, a model without training and one that ends its responses."""
    folder = tmp_path_factory.mktemp("small")
    for kind, count in (("sft", 400), ("preferences", 40), ("prompts", 30), ("text", 30)):
        write_rows(folder / f"{kind}.jsonl", tiny.rows(kind, "train")[:count])
        write_rows(folder / f"{kind}_test.jsonl", tiny.rows(kind, "test")[:8])
    smaller_model(folder / "base")
    train_small(folder / "base", folder / "sft.jsonl", folder / "policy")
    return folder


def options_of(name, small):
    kind = KINDS.get(name, "prompts")
    data = {"dataset": small / f"{kind}.jsonl", "eval_dataset": small / f"{kind}_test.jsonl"}
    if name == "common.programs.ai_feedback":
        return {"model": "gold_labeler:exact", "dataset": data["dataset"]}
    model = small / ("base" if name in KINDS else "policy")
    more = {"reward": {"sft_model": model}, "advantage_model": {"policy": model}}
    more |= {"dpo_iterative": {"offline_data": small / "preferences.jsonl"}}
    return {"model": model, **data, **RUNS[name], **more.get(name, {})}


def run(name, small, folder, *more, plots=False, cwd=processes.ROOT / "tests", **options):
    how = {key: options.pop(key) for key in ("moment", "ranks", "restart", "kill_after") if key in options}
    given = flags(**{**options_of(name, small), "output_dir": folder, **options})
    return processes.script(name, *given, *more, plots=plots, cwd=cwd, **how)


@pytest.fixture(scope="module")
def undisturbed(small, tmp_path_factory):
    """name -> a finished run of that script, and its seconds."""
    runs = {}

    def of(name):
        if name not in runs:
            folder, start = tmp_path_factory.mktemp(name) / "run", time.time()
            succeeds(run(name, small, folder))
            runs[name] = SimpleNamespace(folder=folder, seconds=time.time() - start)
        return runs[name]

    return of


def assert_same_weights(folder, undisturbed):
    assert same_weights(folder, undisturbed)
    assert (folder / "summary.json").exists() and not list(folder.rglob("*.tmp"))


def last_line(ended):
    """The last line on the terminal."""
    return [line for line in ended.err.replace("\r", "\n").splitlines() if line.strip()][-1]


# -- kill -9 -----------------------------------------------------------------------------
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_killed_at_random_moments_resumes_to_the_same_bits(small, undisturbed, tmp_path, name):
    """It is killed twice, the second time after it was resumed."""
    whole, draw = undisturbed(name), random.Random(name)
    for more in ([], ["--resume"]):
        killed = run(name, small, tmp_path / "run", *more, kill_after=draw.random() * whole.seconds)
        assert killed.code in (-9, 0)  # 0: it was sooner at its end
    succeeds(run(name, small, tmp_path / "run", "--resume"))
    assert_same_weights(tmp_path / "run", whole.folder)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_finished_run_is_neither_repeated_nor_overwritten_without_a_flag(small, undisturbed, name):
    folder = undisturbed(name).folder
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    ended = succeeds(run(name, small, folder, "--resume"))
    assert f"{folder} is already finished" in ended.out and ended.err == ""
    assert_error(run(name, small, folder), "a finished run", "--overwrite", "--output-dir")
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


# -- a model that will not do --------------------------------------------------------------
@pytest.fixture(scope="module")
def indexed(small):
    return indexed_model(small / "indexed")


UNFIT = [(name, what) for name in SCRIPTS for what in ("cannot be sampled", "2048 positions")]
UNFIT += [(name, "not a run of reward.py or advantage_model.py") for name in SCRIPTS[3:]]


@pytest.mark.parametrize("name, what", UNFIT)
def test_an_unsuitable_model_is_an_error_and_the_old_run_stays(
    small, undisturbed, indexed, tmp_path, name, what
):
    shutil.copytree(undisturbed("sft").folder, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    options = {"max_length": 2049}
    if what.endswith("advantage_model.py"):
        options = {"scorer": small / "policy"}
    if what == "cannot be sampled":
        options = {{"reward": "sft_model", "advantage_model": "policy"}.get(name, "model"): indexed}
    assert what in error_of(name, small, tmp_path / "run", overwrite=True, **options)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}


# -- other settings on the way -------------------------------------------------------------
@pytest.mark.parametrize("name", ["sft", "reward", "advantage_model", "ppo"])
def test_a_resumed_run_takes_the_learning_rate_of_its_new_command(
    small, undisturbed, stopped, tmp_path, name
):
    """From its first step on. (In the two other scripts every step sets it.)"""
    shutil.copytree(stopped(name, "Ctrl-C").folder, tmp_path / "run")
    n_before = len(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    ended = succeeds(run(name, small, tmp_path / "run", "--resume", lr=1e-30))
    assert "resuming with another lr" in ended.out
    whole, other = (read_jsonl(x / "metrics.jsonl") for x in (undisturbed(name).folder, tmp_path / "run"))
    if name == "ppo":  # a policy that stands still has the probabilities of the rollout
        assert [row["policy/ratio_max"] for row in other if "policy/ratio_max" in row][-1] == 1.0
        assert [row["policy/ratio_max"] for row in whole if "policy/ratio_max" in row][-1] > 1.0
        return
    key, peak = "optim/lr", {"sft": 3e-3}.get(name, 1e-3)
    rates = [[row[key] for row in rows if key in row] for rows in (whole, other)]
    checkpoint = next(i for i, (a, b) in enumerate(zip(*rates)) if a != b)
    assert checkpoint < min(n_before, len(rates[0]) - 1) and rates[0][:checkpoint] == rates[1][:checkpoint]
    assert rates[1][checkpoint:] == pytest.approx([x / peak * 1e-30 for x in rates[0][checkpoint:]], rel=1e-9)
    ours, kept = weights(tmp_path / "run"), weights(undisturbed(name).folder)
    assert any(not torch.equal(x, kept[key]) for key, x in ours.items())


@pytest.mark.parametrize("flag", ["scorer", "reference"])
def test_ppo_does_not_resume_with_another_scorer_or_reference(small, stopped, tmp_path, flag):
    shutil.copytree(stopped("ppo", "Ctrl-C").folder, tmp_path / "run")
    before = (tmp_path / "run" / "args.json").read_text()
    another = {"scorer": "common.data.tiny:safety_scorer", "reference": small / "base"}[flag]
    message = error_of("ppo", small, tmp_path / "run", resume=True, **{flag: another})
    assert f"of --{flag} (" in message and str(another) in message and "--overwrite" in message
    assert (tmp_path / "run" / "args.json").read_text() == before


def test_a_run_resumes_after_its_reward_function_is_fixed(small, tmp_path):
    """From the last checkpoint, and with a line that says so; also if the fix is in a function that it calls."""
    text = "def good(prompts, responses, rows):\n    return [score(r) for r in responses]\n\n\n"
    broken = text + "def score(r, asked=[]):\n    asked.append(r)\n    return 1.0 if len(asked) < 60 else 1 / 0\n"
    (tmp_path / "reward_of_mine.py").write_text(broken)
    options = {"scorer": f"{tmp_path}/reward_of_mine.py:good"}
    assert_error(run("ppo", small, tmp_path / "run", **options), "ZeroDivisionError")
    assert (tmp_path / "run" / "checkpoint" / "latest").exists() and not (tmp_path / "run" / "model").exists()
    (tmp_path / "reward_of_mine.py").write_text(text + "def score(r):\n    return float(len(r))\n")
    ended = succeeds(run("ppo", small, tmp_path / "run", "--resume", **options))
    assert ended.out.count("resuming with another file of --scorer") == 1
    assert (tmp_path / "run" / "summary.json").exists()


class Day(datetime):
    """Replaces datetime, with a given day."""

    day = 1

    @classmethod
    def now(cls, tz=None):
        return cls(2026, 1, cls.day)


@pytest.mark.parametrize("name", ["sft", "ppo"])
def test_a_template_with_a_date_keeps_the_day_on_which_the_run_started(
    small, tmp_path, monkeypatch, name
):
    """A run that is resumed a day later has the same texts, and so the same weights, as one without a break."""
    template = tmp_path / "dated.jinja"
    template.write_text('{{ "ant " * (strftime_now("%d") | int) }}' + tiny.tokenizer().chat_template)
    monkeypatch.setattr(chat_template_utils, "datetime", Day)
    monkeypatch.setattr("common.run.run.datetime", Day, raising=False)
    monkeypatch.setattr(plots, "curves", lambda *_, **__: None)
    monkeypatch.setattr(plots, "frontier", lambda *_, **__: None)
    script, log = importlib.import_module(name), logs.Metrics.log
    options = {**options_of(name, small), "chat_template": template}
    options = {key: str(x) if isinstance(x, Path) else x for key, x in options.items()}

    def start(folder, day, **more):
        monkeypatch.setattr(Day, "day", day)
        script.main(script.Args(**options, output_dir=str(tmp_path / folder), **more))

    def killed(self, step, iteration, **values):
        log(self, step, iteration, **values)
        if step == 4:
            raise KeyboardInterrupt

    monkeypatch.chdir(processes.ROOT / "tests")
    start("whole", 1)
    start("other_day", 2)
    monkeypatch.setattr(logs.Metrics, "log", killed)
    with pytest.raises(KeyboardInterrupt):
        start("run", 1)
    monkeypatch.setattr(logs.Metrics, "log", log)
    start("run", 2, resume=True)
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    assert not same_weights(tmp_path / "run", tmp_path / "other_day")


OTHERWISE = [(name, "eval_dataset") for name in SCRIPTS]
OTHERWISE += [("ppo", "eval_prompts"), ("dpo_iterative", "eval_prompts")]


@pytest.mark.parametrize("name, flag", OTHERWISE)
def test_no_run_resumes_with_another_held_out_set(small, stopped, tmp_path, name, flag):
    """Other rows, or fewer: metrics before and after would be measured on different data."""
    shutil.copytree(stopped(name, "Ctrl-C").folder, tmp_path / "run")
    before, kind = (tmp_path / "run" / "args.json").read_text(), KINDS.get(name, "prompts")
    others = write_rows(tmp_path / "others.jsonl", tiny.rows(kind, "test")[8:16])
    changed = {"eval_dataset": others, "eval_prompts": 2}[flag]
    message = error_of(name, small, tmp_path / "run", resume=True, **{flag: changed})
    assert "was started with another held-out set" in message and f"{flag}: " in message and str(changed) in message
    assert (tmp_path / "run" / "args.json").read_text() == before


# -- Ctrl-C, a full disk, a rank that dies -----------------------------------------------
WHAT_IS_SAVED = "interrupted: --resume continues from what is saved in "
# In every script the 4th step is in the middle of the run, and a checkpoint follows it
MOMENTS = {"Ctrl-C": "interrupt row 4", "full disk": "full row 4", "dead rank": "rank1 row 4"}


@pytest.fixture(scope="module")
def stopped(small, tmp_path_factory):
    """(name, moment) -> the folder of a run that ended at that moment, and how it ended."""
    runs = {}

    def of(name, what):
        if (name, what) not in runs:
            folder, ranks = tmp_path_factory.mktemp(name) / "run", 1 + (what == "dead rank")
            ended = run(name, small, folder, moment=MOMENTS.get(what, what), ranks=ranks)
            runs[name, what] = SimpleNamespace(folder=folder, ended=ended)
        return runs[name, what]

    return of


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_stopped_by_ctrl_c_resumes_to_the_same_bits(small, undisturbed, stopped, tmp_path, name):
    before = stopped(name, "Ctrl-C")
    assert before.ended.code == 130 and "Traceback" not in before.ended.err, before.ended.err[-2000:]
    assert last_line(before.ended) == f"{WHAT_IS_SAVED}{before.folder}"
    assert (before.folder / "checkpoint" / "latest").exists()
    shutil.copytree(before.folder, tmp_path / "run")
    succeeds(run(name, small, tmp_path / "run", "--resume"))
    assert_same_weights(tmp_path / "run", undisturbed(name).folder)


DISKS = [(name, "full disk") for name in SCRIPTS]  # no room for a checkpoint
OTHER_DISKS = [("sft", f"full {moment}") for moment in ("start", "row 3", "results", "export", "summary")]
OTHER_DISKS += [("rejection_sampling", "full results"), ("dpo_iterative", "full pool 2")]


@pytest.mark.parametrize("name, what", [*DISKS, OTHER_DISKS[2], OTHER_DISKS[-1]])
def test_a_run_stopped_by_a_full_disk_resumes_to_the_same_bits(
    small, undisturbed, stopped, tmp_path, name, what
):
    before = stopped(name, what)
    assert before.ended.code in (1, 2) and not (before.folder / "summary.json").exists()
    shutil.copytree(before.folder, tmp_path / "run") if before.folder.exists() else None
    succeeds(run(name, small, tmp_path / "run", "--resume"))
    assert_same_weights(tmp_path / "run", undisturbed(name).folder)


TENSORS = [(name, f"full tensors {2 if name == 'ppo' else 4}") for name in ("sft", "ppo")]


@pytest.mark.parametrize("name, what", DISKS + OTHER_DISKS + TENSORS)
def test_a_full_disk_is_one_clear_line_at_the_end(stopped, name, what):
    ended = stopped(name, what).ended
    assert_error(ended)
    assert last_line(ended) == ended.errors[0]


RANKS = ("sft", "ppo", "dpo_iterative")  # a loop of each kind: two ranks take their seconds


@pytest.mark.parametrize("name", RANKS)
def test_a_rank_that_dies_is_one_clear_line_and_the_run_resumes_on_two_ranks_or_one(
    small, undisturbed, stopped, tmp_path, name
):
    before = stopped(name, "dead rank")
    assert "rank1 at row 4" in before.ended.err and before.ended.code not in (0, 124)
    assert "Traceback" not in before.ended.err and "--resume" in last_line(before.ended)  # the other one's
    saved = (before.folder / "checkpoint" / "latest").read_text()
    kept = read_json(before.folder / "checkpoint" / saved / "state.json")["logged_rows"]
    for folder in ("two", "one"):
        shutil.copytree(before.folder, tmp_path / folder)
    succeeds(run(name, small, tmp_path / "two", "--resume", ranks=2, restart=1))
    succeeds(run(name, small, tmp_path / "one", "--resume"))
    rows = {folder: read_jsonl(tmp_path / folder / "metrics.jsonl") for folder in ("two", "one")}
    want = read_jsonl(undisturbed(name).folder / "metrics.jsonl")
    for folder, found in rows.items():
        assert found[:kept] == read_jsonl(before.folder / "metrics.jsonl")[:kept]  # their clock, too
        if name == "dpo_iterative":  # ranks sample other responses, which may make more pairs or fewer
            steps = [row["step"] for row in found if "optim/lr" in row]
            assert steps == [*range(1, len(steps) + 1)] and found[-1]["iteration"] == want[-1]["iteration"]
        else:
            assert [row["step"] for row in found] == [row["step"] for row in want]
        assert (tmp_path / folder / "summary.json").exists()
        if name in KINDS:  # nothing is sampled that is learnt from: the same weights but for rounding
            got, whole = weights(tmp_path / folder), weights(undisturbed(name).folder)
            assert all(torch.allclose(got[key], whole[key], atol=1e-5) for key in whole)


NODES = """
import os, signal, sys, time
from pathlib import Path

import processes

folder, *command = sys.argv[1:]
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
rendezvous = {"rdzv_backend": "c10d", "rdzv_endpoint": f"localhost:{processes._free_port()}"}

def node(number):
    settings = {"nnodes": 2, "nproc_per_node": 2, "max_restarts": 1, "rdzv_conf": f"is_host={1 - number}"}
    pid = os.fork()
    if pid == 0:
        processes.run_torchrun([*processes.flags(**settings, **rendezvous), *command])
    return pid

nodes, patience = [node(0), node(1)], time.time() + processes.SECONDS
while not Path(folder, "checkpoint", "latest").exists() and time.time() < patience:
    time.sleep(0.05)
# its ranks too, because they outlive it
ranks = Path(f"/proc/{nodes[1]}/task/{nodes[1]}/children").read_text().split()
for pid in [nodes[1], *map(int, ranks)]:
    os.kill(pid, signal.SIGKILL)
assert os.waitpid(nodes[1], 0)[1] == signal.SIGKILL and len(ranks) == 2
assert not Path(folder, "summary.json").exists()
nodes[1] = node(1)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in nodes])
"""


def test_a_run_whose_node_dies_and_returns_ends_with_the_same_bits(small, tmp_path):
    """Two nodes with two ranks each; the one that dies is not the rendezvous host. A restart of several nodes needs
    the variable, because without it torchrun does not give the new one the address of the ranks' store."""
    options, folder = {**options_of("sft", small), "sample_prompts": 0}, tmp_path / "run"
    options |= {"max_steps": 40, "save_every": 10}  # so that the node dies long before the end
    succeeds(run("sft", small, tmp_path / "whole", ranks=4, **options))
    (tmp_path / "nodes.py").write_text(NODES)
    command = [processes.ROOT / "sft.py", "tiny", *flags(**options, output_dir=folder, resume=True)]
    ended = processes.script(tmp_path / "nodes.py", folder, *command)
    assert "[0, 0]" in ended.out.splitlines(), ended.err[-2000:]
    assert_same_weights(folder, tmp_path / "whole")


# -- an output directory that cannot be written ------------------------------------------
def error_of(name, small, folder, **options):
    """The error with which main ends in this process; it must be one that the user can fix."""
    script = importlib.import_module(name)
    given = {**options_of(name, small), "output_dir": folder, **options}
    args = script.Args(**{k: str(v) if isinstance(v, Path) else v for k, v in given.items()})
    with pytest.raises((InputError, OSError)) as error:
        script.main(args)
    return " ".join(str(error.value).split())


@pytest.mark.parametrize("folder", ["file", "file/run", "/proc/run"])
@pytest.mark.parametrize("name", [*SCRIPTS, "common.programs.ai_feedback"])
def test_an_output_directory_that_cannot_be_made_is_named(small, tmp_path, name, folder):
    (tmp_path / "file").write_text("somebody's")
    assert str(tmp_path / folder) in error_of(name, small, tmp_path / folder)
    assert (tmp_path / "file").read_text() == "somebody's"


# -- data files of nonsense --------------------------------------------------------------
NOISE = random.Random(0).randbytes(3000)
LINES = {  # what a .jsonl file holds that no reader of rows can read, whatever else is in it
    "random bytes": NOISE,
    "zeros": bytes(1000),
    "UTF-16": '{"prompt": "copy ant"}\n'.encode("utf-16"),
    "latin-1": '{"prompt": "copy \xe4nt"}\n'.encode("latin-1"),
    "a cut line": b'{"prompt": "copy ant", "comple',
    "a list": b'["copy ant", "ant"]\n',
    "a number": b"5\n",
    "null": b"null\n",
    "text": b'"copy ant"\n',
    "one large list": b'[{"prompt": "copy ant"}, {"prompt": "copy bear"}]\n',
    "a number of 9000 digits": b'{"prompt": ' + b"9" * 9000 + b"}\n",
    "10000 brackets": b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}\n",
    "10000 brackets that stay open": b"[" * 10_000 + b"\n",
    "10 MB without a line's end": b'{"prompt": "' + b"ant " * 2_500_000,
}


def broken_files(folder, good):
    """Unreadable files, by their defect."""
    files = {f"lines.{number}.jsonl": good + content for number, content in enumerate(LINES.values())}
    files |= {"empty.jsonl": b"", "blank.jsonl": b"\n \n\n", "cut.jsonl.gz": gzip.compress(good)[:-20]}
    packed = bytearray(gzip.compress(good))
    packed[len(packed) // 2] ^= 255
    files |= {"altered.jsonl.gz": bytes(packed), "plain.jsonl.gz": good, "noise.jsonl.gz": NOISE}
    files |= {"packed noise.jsonl.gz": gzip.compress(NOISE), "noise.parquet": NOISE, "empty.parquet": b""}
    files |= {"empty.jsonl.gz": b""}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for name, value in (("binary.parquet", b"ant"), ("numbers.parquet", 5)):  # columns of another type
        columns = {key: [value] for key in ("prompt", "completion", "chosen", "rejected")}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / name)
    (folder / "folder.jsonl").mkdir()
    return [*files, "binary.parquet", "numbers.parquet", "folder.jsonl"]


WRONG = [None, 5, -1.5, True, [], {}, [1], ["ant"], [[]], [{}], [None], {"a": {"b": 1}}, "", " \n", "\ud800"]
WRONG += [float("nan"), float("inf"), 10**400, json.loads("[" * 300 + "]" * 300), "ant <|end|> bear"]
WRONG += [[{"role": "user"}], [{"role": "user", "content": None}], [{"content": "ant"}, {"role": "user"}]]
WRONG += [[{"role": "user", "content": [{"type": "image", "url": "ant"}]}]]
NEEDED = {"sft": ["prompt", "completion"], "preferences": ["chosen", "rejected"], "prompts": ["prompt"]}
NEEDED |= {"text": ["text"]}
FEEDS = [  # script, argument, kind of rows
    ("sft", "dataset", "sft"),
    ("sft", "eval_dataset", "sft"),
    ("reward", "dataset", "preferences"),
    ("advantage_model", "dataset", "preferences"),
    ("rejection_sampling", "dataset", "prompts"),
    ("rejection_sampling", "sft_dataset", "sft"),
    ("ppo", "dataset", "prompts"),
    ("ppo", "ptx_dataset", "text"),
    ("ppo", "rehearsal_data", "sft"),
    ("dpo_iterative", "dataset", "prompts"),
    ("dpo_iterative", "offline_data", "preferences"),
    ("common.programs.ai_feedback", "dataset", "preferences"),
]


@functools.cache
def plain(kind, split="train"):
    """Some rows with only the necessary columns."""
    columns = sorted({*NEEDED[kind], *(["prompt"] if kind != "text" else [])})
    return [{key: row[key] for key in columns} for row in tiny.rows(kind, split)[:400]]


def odd_rows(kind, name):
    """Rows that are JSON objects but unusable for a script. A labeler gets texts without special tokens."""
    good, special = plain(kind)[0], name != "common.programs.ai_feedback"
    wrong = [value for value in WRONG if special or "<|end|>" not in str(value)]
    rows = [{**good, key: value} for key in NEEDED[kind] for value in wrong]
    rows += [{k: v for k, v in good.items() if k != key} for key in NEEDED[kind]]
    return rows + [{}, {"foo": 1}, {"messages": 5}, {"conversations": {}}, {"\ud800": "\ud800"}]


@pytest.fixture(scope="module")
def broken(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    return folder, broken_files(folder, (small / "sft.jsonl").read_bytes())


@pytest.mark.parametrize("name", [*SCRIPTS, "common.programs.ai_feedback"])
def test_an_unreadable_file_is_named_and_the_old_run_stays(small, broken, undisturbed, tmp_path, name):
    """Whatever else is wrong, and even with --overwrite."""
    folder, files = broken
    shutil.copytree(undisturbed("sft").folder, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    for file in files:
        message = error_of(name, small, tmp_path / "run", overwrite=True, dataset=folder / file)
        row = {"lines": f"{file}:401: "}
        row |= {"binary": f"({file}:1)", "numbers": f"({file}:1)"}
        assert row.get(file.split(".")[0], file) in message and len(message) < 500, message
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}


@pytest.mark.parametrize("name, argument, kind", FEEDS)
def test_unusable_rows_are_an_error_that_names_the_first_of_each_kind(
    small, tmp_path, capsys, name, argument, kind
):
    rows = odd_rows(kind, name)
    path = write_rows(tmp_path / "odd.jsonl", rows)
    message = error_of(name, small, tmp_path / "run", **{argument: path})
    assert f"{path}: no usable row among its {len(rows)}" in message and not (tmp_path / "run").exists()
    assert "(odd.jsonl:1)" in message
    printed = capsys.readouterr().out
    assert f"dropped {len(rows)} of {len(rows)} rows" in printed and printed.isascii()


def some_good(kind, split, n):
    return plain(kind, split)[1 : n + 1]


# Of columns that a row need not have. What they make of the row is not said here
OTHERS = [
    {"category": x} for x in (5, [], ["a"], math.nan, 10**400, "", "x" * 9999, "a/b\n\0\x1b[2J", WRONG[18])
]
OPTIONAL = (
    "is_safety gold chosen_gold utility margin rating preference chosen_score score_chosen responses id"
)
OTHERS += [{key: x} for key in OPTIONAL.split() for x in WRONG if x != "\ud800"]
OTHERS += [
    {"chosen_score": 1e308, "rejected_score": -1e308},
    {"chosen_gold": math.nan, "rejected_gold": 1e308},
]


def run_on(name, small, folder, rows, **options):
    """A short run whose training and held-out rows are `rows(kind, split)`."""
    kind, files = KINDS.get(name, "prompts"), {}
    for split, argument in (("train", "dataset"), ("test", "eval_dataset")):
        files[argument] = write_rows(folder / f"{split}.jsonl", rows(kind, split))
    if name == "common.programs.ai_feedback":
        files.pop("eval_dataset")
    short = {"max_steps": 1, "iterations": 1, "value_warmup_steps": 0}
    short = {key: value for key, value in short.items() if key in RUNS.get(name, {})}
    return run(name, small, folder / "run", **files, **short, **options)


@pytest.mark.parametrize("name", [*SCRIPTS, "common.programs.ai_feedback"])
def test_a_run_skips_and_counts_bad_rows_and_learns_from_the_others(small, tmp_path, name):
    def rows(kind, split):
        good = some_good(kind, split, 400)[-20:]
        others = [{**row, **OTHERS[i]} for i, row in enumerate(some_good(kind, split, len(OTHERS)))]
        column = "prompt" if (name, split) == ("sft", "train") else "id"
        large = {**good[0], column: ("x" * 99 + " ") * 100_000}  # 10 MB, of a prompt or of no matter
        return [*good[:9], *odd_rows(kind, name), *others, *good[9:], large]

    ended = succeeds(run_on(name, small, tmp_path, rows))
    assert (tmp_path / "run" / "summary.json").exists()
    for split in ("train", "test")[: 1 if name == "common.programs.ai_feedback" else 2]:
        kind = KINDS.get(name, "prompts")
        n, bad = len(rows(kind, split)), len(odd_rows(kind, name))
        (dropped,) = re.findall(rf"{split}.jsonl: dropped (\d+) of {n} rows", ended.out)
        assert int(dropped) >= bad


@pytest.mark.parametrize(
    "name, category",
    [
        ("sft", "\ud800"),
        *[(name, "\ud800") for name in ("reward", *SCRIPTS[3:], "common.programs.ai_feedback")],
        *[(name, "$\\frac$") for name in ("reward", "ppo")],
    ],
)
def test_categories_may_have_any_name(small, tmp_path, name, category):
    columns = ("category", "subset" if name == "reward" else "category")

    def rows(kind, split):
        return [
            {**row, columns[i // 2 % 2]: ("ant", category)[i % 2]}
            for i, row in enumerate(some_good(kind, split, 24))
        ]

    succeeds(run_on(name, small, tmp_path, rows, plots=True))


@pytest.mark.parametrize("name", ["sft", "reward", "ppo"])
def test_errors_are_short_even_with_long_column_names(small, tmp_path, name):
    path = write_rows(tmp_path / "long.jsonl", [{"a" * 10_000: 1}])
    assert len(error_of(name, small, tmp_path / "run", dataset=path)) < 1000
