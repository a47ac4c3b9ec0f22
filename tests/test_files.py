"""common/data/files.py, and the reaction of a run to each of its files when it is damaged by hand or by a
crash."""

import errno
import json
import shutil
import time
from types import SimpleNamespace

import processes
import pytest
import torch
import torch.distributed.checkpoint
from test_run import Args, leave

from common import responses
from common.errors import InputError
from common.data import files, mixtures, tiny
from common.scoring import version_evaluation
from common.run import checkpoints, logs, pool, versions
from common.run.cli import check_flags
from common.run.run import Run, find_run

DAMAGES = {
    "empty": lambda text: b"",
    "cut": lambda text: text[: len(text) // 2],
    "null": lambda text: b"null\n",
    "list": lambda text: b"[]\n",
    "object": lambda text: b"{}\n",
    "number": lambda text: b"42\n",
    "binary": lambda text: b"\x00\xff\xfe\x80" * 20,
    "types": lambda text: json.dumps({key: {"?": 1} for key in json.loads(text.split(b"\n")[0])}).encode() + b"\n",
}
SAMPLE = {"prompt": [{"role": "user", "content": "a"}], "response": "b", "tokens": 2, "finished": True}
POOL = {**SAMPLE, "response_ids": [1, 2], "iteration": 1, "model": "m", "temperature": 1.0, "chunk": 0}
POOL |= {"score": None, "scorer": None}
ROW = {"step": 1, "iteration": 1, "time_s": 0.5}
STUDY = {"step": 1, "samples": [SAMPLE], "scorer": "s", "curves": [], "temperature": 1.0, "pairs": {}}
RESUMABLE = {"stage": "sft", "args": {}, "began": "2026-01-01", "began_with": {}}
WANTED = {  # file -> (what is in it, what reads it)
    "args.json": (RESUMABLE, lambda folder: find_run(Args(output_dir=str(folder), resume=True))),
    "checkpoint/step_1/state.json": (
        {"step": 1, "layout": checkpoints.LAYOUT, "logged_rows": 1},
        lambda folder: checkpoints.checkpoint_state(folder / "checkpoint"),
    ),
    "checkpoint/latest": ({}, lambda folder: checkpoints.checkpoint_state(folder / "checkpoint")),
    "metrics.jsonl": (ROW, lambda folder: logs.Metrics(folder, keep_rows=1)),
    "pool.jsonl": (POOL, lambda folder: pool.rows_of(SimpleNamespace(folder=folder, resumed=True))),
    "pairs.jsonl": ({"iteration": 1}, lambda folder: pool.write_pairs(folder, [], 2)),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", WANTED)
def test_a_damaged_file_of_a_run_is_one_line_that_names_it(tmp_path, name, damage):
    content, read = WANTED[name]
    leave(tmp_path, "args.json", "checkpoint/latest")
    path, text = tmp_path / name, json.dumps(content).encode() + b"\n"
    text = b"step_1" if name.endswith("latest") else text
    path.write_bytes(text)
    read(tmp_path)  # as it was written
    if name.endswith("latest") and damage == "types":
        return
    path.write_bytes(DAMAGES[damage](text))
    if name.endswith("jsonl") and damage in ("empty", "cut"):  # a crash, or nothing was written yet
        read(tmp_path)
        return
    with pytest.raises(InputError) as error:
        read(tmp_path)
    message = str(error.value)
    assert str(path) in message and "\n" not in message and len(message) < 400, message


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", [version_evaluation.RejectionSamplingEvaluation, version_evaluation.DPOEvaluation])
def test_a_damaged_evaluation_of_a_version_is_one_line_that_says_to_remove_it(tmp_path, damage, kind):
    made = object.__new__(versions.Versions)
    made.evaluate = object.__new__(kind)
    made.evaluate.scorer = SimpleNamespace(pairwise=False)
    path, text = tmp_path / "1.json", json.dumps(STUDY).encode()
    path.write_bytes(text)
    assert made.read_evaluation(path) == STUDY
    path.write_bytes(DAMAGES[damage](text))
    with pytest.raises(InputError, match="1.json: "):
        made.read_evaluation(path)


def test_a_removed_evaluation_of_the_first_version_is_evaluated_again(tmp_path):
    """The versions that are there tell which one was the first."""
    folder = tmp_path / "versions"
    for version in (1, 2):
        (folder / str(version)).mkdir(parents=True)
        files.write_json(folder / f"{version}.json", STUDY)
    run = SimpleNamespace(args=None, folder=tmp_path, checkpoint=str(tmp_path / "checkpoint"))
    made = versions.Versions(run, None, "runs/sft")
    made.evaluate = object.__new__(version_evaluation.RejectionSamplingEvaluation)
    made.begin()
    assert made.first == 0 and made.path(0) == "runs/sft" and made.path(1) == str(folder / "1")
    evaluated = []
    made.evaluate_version = evaluated.append
    run.begin_round = lambda: None
    assert list(made.iterations(3)) == [3] and evaluated == [0, 1, 2]


def test_the_model_of_an_older_version_may_be_removed(tmp_path):
    """To make room: iteration 1 is not run again, which would train on the pool of all iterations."""
    (tmp_path / "versions" / "2").mkdir(parents=True)
    for version in (0, 1):
        files.write_json(tmp_path / "versions" / f"{version}.json", STUDY)
    run = SimpleNamespace(args=None, folder=tmp_path, checkpoint=str(tmp_path / "checkpoint"))
    made = versions.Versions(run, None, "runs/sft")
    made.evaluate = object.__new__(version_evaluation.RejectionSamplingEvaluation)
    made.begin()
    made.evaluate_version = lambda version: None
    run.begin_round = lambda: None
    assert list(made.iterations(3)) == [3]


def test_an_evaluation_removed_from_the_middle_keeps_its_step_and_its_row(tmp_path):
    """A run with three versions, in which the evaluation of version 1 was damaged and removed."""
    folder = tmp_path / "versions"
    for version in (0, 1, 2):
        (folder / str(version)).mkdir(parents=True)
        if version != 1:
            files.write_json(folder / f"{version}.json", {**STUDY, "step": 10 * version})
    rows = [{**ROW, "step": 10 * version, "iteration": version} for version in (0, 1, 2)]
    files.write_jsonl(tmp_path / "metrics.jsonl", rows)
    logged = []
    run = SimpleNamespace(args=None, folder=tmp_path, checkpoint=str(tmp_path / "checkpoint"))
    run.log = lambda *row: logged.append(row)
    made = versions.Versions(run, None, "runs/sft")
    made.evaluate, made.last = object.__new__(version_evaluation.RejectionSamplingEvaluation), 3
    made.begin()
    made.evaluate = lambda policy, version, evaluations: STUDY
    made.load, made.metrics_of = lambda name: None, lambda version: {}
    made.evaluate_version(1)
    assert [(i, evaluation["step"]) for i, evaluation in made.evaluations.items()] == [(0, 0), (1, 10), (2, 20)]
    assert files.read_json(folder / "1.json")["step"] == 10 and logged == []
    assert files.read_jsonl(tmp_path / "metrics.jsonl") == rows


# -- exports and checkpoints -----------------------------------------------------------------------
def test_a_file_that_cannot_reach_the_disk_is_an_error_and_a_folder_is_not(tmp_path, monkeypatch):
    """Network file systems say only in fsync that the disk is full, and some have none for folders."""
    (tmp_path / "file").write_text("a")

    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    files.flush(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        files.flush(tmp_path / "file")
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save_model(tiny.model(), tiny.tokenizer(), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_checkpoint_overwrites_what_a_crash_left_of_another(tmp_path):
    """It is a folder of one name, so that two checkpoints need room for two; files of ranks that are no more stay until
    the next checkpoint."""
    left = tmp_path / "step.tmp"
    (left / "tensors").mkdir(parents=True)
    (left / "state.json").write_text('{"step": 3')
    (left / "tensors" / "__7_0.distcp").write_text("half")
    model = torch.nn.Linear(2, 2)
    modules = {"policy": (model, torch.optim.AdamW(model.parameters()))}
    checkpoints.save_checkpoint(tmp_path, 38, modules, {"step": 38})
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step_38"}
    assert checkpoints.load_checkpoint(tmp_path, modules)["step"] == 38
    checkpoints.save_checkpoint(tmp_path, 39, modules, {"step": 39})
    assert not [*tmp_path.rglob("__7_0.distcp")]


def test_a_disk_that_fills_during_the_weights_is_an_oserror_and_leaves_nothing(tmp_path):
    """safetensors has an error of its own for it. The limit lets config.json pass."""
    (tmp_path / "full.py").write_text(f"""
import resource
from common.data import tiny
from common.run import checkpoints
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    checkpoints.save_model(tiny.model(), tiny.tokenizer(), {str(tmp_path / "model")!r})
except OSError as error:
    print(error)
""")
    ended = processes.script(tmp_path / "full.py")
    assert "model.tmp cannot be written" in ended.out and "Make room" in ended.out, ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["full.py"]


def test_exported_weights_can_be_read_by_whoever_can_read_the_config(tmp_path):
    checkpoints.save_model(tiny.model(), tiny.tokenizer(), tmp_path / "model")
    modes = {path.suffix: path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert modes[".safetensors"] == modes[".json"]


@pytest.mark.parametrize("cause", [KeyboardInterrupt(), MemoryError("m"), PermissionError("p"), EOFError("e")])
def test_an_interrupt_while_a_checkpoint_loads_is_not_called_damage(cause, tmp_path, monkeypatch):
    """torch wraps every error of its reader. Who is told of damage removes a good checkpoint."""
    dcp = torch.distributed.checkpoint
    model = tiny.model()
    modules = {"policy": (model, torch.optim.AdamW(model.parameters()))}
    checkpoints.save_checkpoint(tmp_path, 1, modules, {"step": 1})

    def fail(self, plan, planner):
        raise cause

    monkeypatch.setattr(dcp.FileSystemReader, "read_data", fail)
    with pytest.raises((InputError, type(cause))) as error:
        checkpoints.load_checkpoint(tmp_path, modules)
    assert (error.type is InputError) is isinstance(cause, EOFError)


def test_a_bad_line_in_the_middle_is_an_error_so_that_no_later_row_is_lost(tmp_path):
    path = tmp_path / "a.jsonl"
    for bad in (b'{"x": 1', b"\xff", b"5", b"nonsense"):
        text = b'{"x": 0}\n' + bad + b'\n{"x": 2}\n'
        path.write_bytes(text)
        with pytest.raises(InputError, match=r"a\.jsonl:2: "):
            files.read_jsonl(path)
        assert path.read_bytes() == text
    path.write_bytes(b'{"x": 0}\n\n{"x": 1}\n{"x": "\xc3')
    assert files.read_jsonl(path) == [{"x": 0}, {"x": 1}]  # a write that a crash cut


def test_an_incomplete_checkpoint_names_the_complete_ones(tmp_path):
    checkpoints.save_checkpoint(tmp_path, 3, {}, {"step": 3})
    (tmp_path / "latest").write_text("step_7")
    with pytest.raises(InputError, match="latest names 'step_7', which is not a checkpoint. Checkpoints: step_3"):
        checkpoints.checkpoint_state(tmp_path)
    (tmp_path / "latest").write_text("step_3")
    shutil.rmtree(tmp_path / "step_3")
    with pytest.raises(InputError, match="Checkpoints: none"):
        checkpoints.load_checkpoint(tmp_path, {})


def test_a_checkpoint_is_on_disk_before_the_older_one_is_removed(tmp_path, monkeypatch):
    synced = []
    plain = files.os.fsync
    name = lambda number: files.os.readlink(f"/proc/self/fd/{number}").removeprefix(str(tmp_path))
    monkeypatch.setattr(files.os, "fsync", lambda number: synced.append(name(number)) or plain(number))
    checkpoints.save_checkpoint(tmp_path, 1, {}, {"step": 1})
    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: synced.append(f"gone {path.name}") or rmtree(path, **_))
    del synced[:]
    checkpoints.save_checkpoint(tmp_path, 2, {}, {"step": 2})
    before = synced[: synced.index("gone step_1")]
    assert any("state.json" in x for x in before) and any("latest" in x for x in before) and "" in before


def test_a_full_disk_names_the_file(tmp_path):
    with pytest.raises(OSError, match="No space left.*/dev/full"):
        files.append_jsonl("/dev/full", [{"x": 1}])


def test_checkpoints_are_also_due_by_time_but_never_without_save_every(tmp_path, monkeypatch):
    args = Args(output_dir=str(tmp_path))
    args.save_every, saved = 1000, []
    monkeypatch.setattr(checkpoints, "save_checkpoint", lambda root, number, *_: saved.append(number))
    for after_s, save_every, want in ((600, 1000, []), (0, 1000, [1, 2, 3]), (600, 2, [2]), (0, 0, [])):
        monkeypatch.setattr("common.run.run.SAVE_AFTER_S", after_s)
        run, args.save_every = Run(args, "sft"), save_every
        run.status, run.metrics, run.modules = None, logs.Metrics(tmp_path), {}
        del saved[:]
        for _ in run.steps(3):
            time.sleep(0.01)
        assert saved == want
    args.save_every, run.saving_s = 1000, 100.0  # a slow disk: a twentieth of the time at most
    monkeypatch.setattr("common.run.run.SAVE_AFTER_S", 0)
    assert not run.must_save()


@pytest.mark.parametrize("flag", ["dataset", "offline_data", "eval_dataset", "ptx_dataset", "rehearsal_data"])
def test_a_missing_data_set_is_reported_with_its_flag(flag):
    for spec in ("gone.jsonl", "tiny:seed=x", "a:0.5,gone.csv:0.5", "tiny,x?=", "tiny,tiny:sed=1:0.5"):
        args = SimpleNamespace(**{"dataset": "tiny", flag: spec})
        with pytest.raises(InputError, match=f"^--{flag.replace('_', '-')} "):
            mixtures.sources_of(args)


@pytest.mark.parametrize("seed", [0, 7, 1763000000000000000, 2**63 - 1])
def test_a_seed_may_be_a_time_in_nanoseconds_and_small_seeds_are_unchanged(seed, monkeypatch):
    check_flags(SimpleNamespace(seed=seed))
    seen = []
    monkeypatch.setattr(responses, "my_responses", lambda *_, seed, **__: seen.append(seed) or [])
    responses.sample_responses(torch.nn.Linear(1, 1), None, [], seed=seed)
    torch.Generator().manual_seed(seen[0])
    assert seed > 1000 or seen == [seed * 1000]


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_an_impossible_seed_is_named(seed):
    with pytest.raises(InputError, match=f"^--seed {seed}: expected 0 to 2"):
        check_flags(SimpleNamespace(seed=seed))
