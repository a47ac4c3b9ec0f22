"""sft.py in one process: its command line, the files of a run, the loss, resuming, and bad input."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import torch
import torch.nn.functional as F
from processes import ROOT, flags
from safetensors.torch import load_file
from helpers import (
    PLACE, as_killed, assert_error, assert_files, assert_same_result, contents, in_bfloat16, indexed_model,
    named, read_json, rows_of, succeeds, without, write_rows,
)  # fmt: skip
from transformers import AutoModelForCausalLM, AutoTokenizer

import sft
from common import batches, dist
from common.batches import collate, make_blocks
from common.data import demonstrations, mixtures, splits, tiny
from common.data.files import read_jsonl
from common.loading import pretrained
from common.run import checkpoints
from common.run.cli import parse

CPU = torch.device("cpu")
TOKENIZER = tiny.tokenizer()
DOCUMENTS, HELD_OUT = 126, 24


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with train.jsonl and test.jsonl, and flags for a run on them that takes half a second."""
    folder = tmp_path_factory.mktemp("small")
    for name, count in (("train", DOCUMENTS), ("test", HELD_OUT)):
        write_rows(folder / f"{name}.jsonl", tiny.rows("sft", name)[:count])
    options = {"dataset": str(folder / "train.jsonl"), "eval_dataset": str(folder / "test.jsonl")}
    options |= {"max_length": 64, "batch_size": 4, "micro_batch_size": 2, "sample_prompts": 4}
    options |= {"max_new_tokens": 8, "max_steps": 10, "save_every": 3, "eval_every": 4}
    return SimpleNamespace(folder=folder, options=options)


def run(small, folder, *more, moment=None, cwd=ROOT, **options):
    given = flags(**{**small.options, "output_dir": folder, **options})
    return processes.script("sft", *given, *more, moment=moment, cwd=cwd, plots=False)


# -- the default command -----------------------------------------------------------------
# Of one command: to tokenise the whole tiny world would take its time
DEFAULT = {"dataset": "tiny:commands=copy", "max_steps": 8, "sample_prompts": 16, "save_every": 4}
DEFAULT |= {"eval_every": 4}


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    folder = tmp_path_factory.mktemp("default") / "run"
    command = ["sft.py", *flags(**DEFAULT, output_dir=folder)]
    ended = processes.python(*command)
    return SimpleNamespace(folder=folder, ended=succeeds(ended), command=command)


def test_default_command_leaves_the_whole_run_directory(default):
    names = "args.json checkpoint metrics.jsonl metrics.png model samples.jsonl summary.json"
    assert_files(default.folder, names)
    assert sorted(path.name for path in (default.folder / "checkpoint").iterdir()) == ["latest", "step_8"]
    (n_steps,) = re.findall(r"plan: (\d+) optimiser steps", default.ended.out)
    assert int(n_steps) == rows_of(default.folder)[-1]["step"]


def test_default_command_prints_at_most_15_lines_and_20_of_progress(default):
    lines = default.ended.out.splitlines()
    assert len(lines) <= 15 and lines[0].startswith("recipe tiny") and lines[-1].startswith("wrote ")
    assert [line.split(":")[0] for line in lines[-3:-1]] == ["eval/nll", "gold/score"]
    steps = [line for line in default.ended.err.splitlines() if line.startswith("sft: ")]
    assert len(steps) == 8 and re.fullmatch(r"sft: 100% 8/8 .*, nll=.*", steps[-1])


def test_default_command_records_its_arguments_and_stage(default):
    written = json.loads((default.folder / "args.json").read_text())
    args = parse(sft.RECIPES, default.command[1:])
    assert written["args"] == vars(args) and args == sft.Args(**DEFAULT, output_dir=str(default.folder))
    assert written["stage"] == "sft" and written["world_size"] == 1 and written["command"] == default.command


def test_default_command_logs_every_step_with_all_keys(default):
    rows = read_jsonl(default.folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8]  # before, 8 steps, after
    assert all(list(row)[:3] == ["step", "iteration", "time_s"] and row["iteration"] == 0 for row in rows)
    assert [row["time_s"] for row in rows] == sorted(row["time_s"] for row in rows)
    steps = {"loss/nll", "optim/lr", "optim/grad_norm", "data/response_tokens", "data/documents"}
    assert all(steps | {"data/tokens", "perf/tokens_per_s"} <= set(row) for row in rows[1:-1])
    evaluation = {"eval/nll", "sample/length", "sample/finished", "gold/score", "gold/perfect"}
    assert all(evaluation <= set(row) for row in (rows[0], rows[-1]))
    assert [row["step"] for row in rows if "eval/nll" in row] == [0, 4, 8]
    assert all(math.isfinite(value) for row in rows for value in row.values())


def test_default_command_scores_its_samples_as_the_true_reward_does(default):
    samples, rows = (read_jsonl(default.folder / f"{name}.jsonl") for name in ("samples", "metrics"))
    last = rows[-1]
    questions = [sample["prompt"][-1]["content"] for sample in samples]
    assert len(set(questions)) == 16 and {row["prompt"] for row in tiny.rows("sft", "test")} >= set(questions)
    gold = [tiny.gold_score(question, sample["response"]) for question, sample in zip(questions, samples)]
    assert last["gold/score"] == pytest.approx(sum(gold) / 16)
    assert last["gold/perfect"] == pytest.approx(sum(map(tiny.perfect_score, questions)) / 16)
    assert last["sample/length"] == sum(sample["tokens"] for sample in samples) / 16
    assert all(1 <= sample["tokens"] <= 32 for sample in samples)


def test_default_command_lowers_the_held_out_loss_and_summarises_it(default):
    values, rows = (read_json(default.folder / "summary.json"), read_jsonl(default.folder / "metrics.jsonl"))
    assert values["steps"] == 8
    assert values["before"] == without(rows[0], *PLACE) and values["after"] == without(rows[-1], *PLACE)
    assert values["before"]["eval/nll"] == pytest.approx(math.log(len(TOKENIZER)), abs=0.4)  # uniform
    assert values["after"]["eval/nll"] < values["before"]["eval/nll"] - 0.3


def test_sampler_talks_to_the_model_of_a_run(default):
    command = ["-m", "common.sampler", *flags(model=default.folder / "model", max_new_tokens=6, n=2, seed=1)]
    lines = succeeds(processes.python(*command, "--prompt", "copy ant bear cat")).out.splitlines()
    words = {token for token in TOKENIZER.get_vocab() if not token.startswith("<|")}
    assert len(lines) == 2 and all(len(line.split()) <= 6 and set(line.split()) <= words for line in lines)


# -- what is trained and saved -----------------------------------------------------------
@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    """A run in this process; logits and weights of the model in memory at the moment it is saved."""
    folder, seen = tmp_path_factory.mktemp("trained"), {}
    ids, save = torch.arange(1, 40)[None], checkpoints.save_model

    def spy(model, *args):
        with torch.no_grad():
            seen["logits"] = model(input_ids=ids).logits
        seen["weights"] = {name: weight.clone() for name, weight in model.state_dict().items()}
        save(model, *args)

    options = {**small.options, "max_steps": None, "epochs": 3.0, "save_every": 0}
    args = sft.Args(**options, output_dir=str(folder / "run"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "save_model", spy)
        sft.main(args)
    return SimpleNamespace(folder=folder / "run", model=folder / "run" / "model", ids=ids, args=args, **seen)


def held_out(small):
    rows = mixtures.load_rows(small.options["eval_dataset"], "sft")
    return demonstrations.sft_documents(rows, TOKENIZER, 64, "test")


def plain_held_out_nll(folder, small):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        sums, counts = zip(*(plain_nll(model, document) for document in held_out(small)))
    return sum(sums).item() / sum(counts)


def train_documents(small):
    return demonstrations.sft_documents(mixtures.load_rows(small.options["dataset"], "sft"), TOKENIZER, 64, "train")


def test_saved_model_loads_in_plain_transformers_with_the_logits_that_were_in_memory(trained):
    model = AutoModelForCausalLM.from_pretrained(trained.model)
    tokenizer = AutoTokenizer.from_pretrained(trained.model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=trained.ids).logits, trained.logits)
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.architectures == ["LlamaForCausalLM"]
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    for name in ("chat_template", "eos_token", "pad_token"):
        assert getattr(tokenizer, name) == getattr(TOKENIZER, name)
    assert model.generation_config.eos_token_id == TOKENIZER.eos_token_id


def test_every_parameter_changes(trained):
    start = tiny.model(0).state_dict()
    saved = AutoModelForCausalLM.from_pretrained(trained.model).state_dict()
    assert set(start) == set(saved) == set(trained.weights)
    for name, weight in saved.items():
        assert torch.equal(weight, trained.weights[name]) and not torch.equal(weight, start[name]), name


def test_held_out_loss_is_that_of_plain_transformers_on_each_document_alone(trained, small):
    summary = json.loads((trained.folder / "summary.json").read_text())
    assert summary["after"]["eval/nll"] == pytest.approx(plain_held_out_nll(trained.model, small), abs=1e-5)
    assert summary["after"]["eval/nll"] < summary["before"]["eval/nll"] - 0.5


def test_every_epoch_sees_each_document_once_in_its_own_order(trained, small, tmp_path):
    rows, summary = rows_of(trained.folder), json.loads((trained.folder / "summary.json").read_text())
    per_epoch = math.ceil(summary["blocks"] / 4)
    assert summary["blocks"] % 4 != 0  # the last batch is a smaller one
    assert [row["iteration"] for row in rows] == [epoch for epoch in range(3) for _ in range(per_epoch)]
    tokens = sum(int(d.response_mask.sum()) for d in train_documents(small))
    seen = []
    for epoch in range(3):
        of_epoch = [row for row in rows if row["iteration"] == epoch]
        assert sum(row["data/documents"] for row in of_epoch) == summary["documents"] == DOCUMENTS
        assert sum(row["data/response_tokens"] for row in of_epoch) == tokens
        seen.append(tuple(row["data/response_tokens"] for row in of_epoch))
    assert len(set(seen)) == 3
    options = {**vars(trained.args), "output_dir": str(tmp_path), "seed": 1, "max_steps": per_epoch}
    sft.main(sft.Args(**options))
    seen.append(tuple(row["data/response_tokens"] for row in rows_of(tmp_path)))
    assert len(set(seen)) == 4  # seed 1 does not begin with an epoch of seed 0


def test_half_an_epoch_has_half_of_its_steps(small, tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(sft, "PLOTS", [])
    monkeypatch.setattr(sft, "update", lambda model, optimizer, blocks, args: sizes.append(len(blocks)) or (0.5, 1.0))
    options = {**small.options, "packing": False, "batch_size": 16, "max_steps": None, "epochs": 0.5}  # 126 rows
    options |= {"eval_every": 0, "save_every": 0, "sample_prompts": 0, "output_dir": str(tmp_path / "run")}
    sft.main(sft.Args(**options))
    assert sizes == [16] * 4  # of 8


def test_learning_rate_follows_the_schedule_to_the_last_step(trained):
    rates = [row["optim/lr"] for row in rows_of(trained.folder)]
    total = len(rates)
    assert rates == [3e-3 * dist.schedule(step, total, trained.args) for step in range(1, total + 1)]
    assert 0 < rates[0] < max(rates) == 3e-3 and rates[-1] < 0.05 * 3e-3


@pytest.mark.parametrize("name", ["", "model"])
def test_a_run_or_its_model_folder_can_be_the_next_runs_model(trained, small, tmp_path, name):
    assert run(small, tmp_path, model=trained.folder / name, max_steps=1).code == 0
    after = json.loads((trained.folder / "summary.json").read_text())["after"]["eval/nll"]
    assert rows_of(tmp_path, "eval/nll")[0]["eval/nll"] == pytest.approx(after, abs=1e-6)


@pytest.mark.parametrize("save_dtype", ["default", "bfloat16"])
def test_a_bfloat16_model_is_exported_in_float32_unless_save_dtype_rounds_it(
    trained, small, tmp_path, capsys, save_dtype
):
    source, folder = in_bfloat16(trained.model, tmp_path / "source"), tmp_path / "run"
    options = {**small.options, "model": str(source), "output_dir": str(folder), "lr": 1e-4}
    sft.main(sft.Args(**options, **({} if save_dtype == "default" else {"save_dtype": save_dtype})))
    saved = load_file(folder / "model" / "model.safetensors")
    want = torch.float32 if save_dtype == "default" else torch.bfloat16
    assert {weight.dtype for weight in saved.values()} == {want}
    after = json.loads((folder / "summary.json").read_text())["after"]["eval/nll"]
    assert after == pytest.approx(plain_held_out_nll(folder / "model", small), abs=1e-6)
    lines = [line for line in capsys.readouterr().out.splitlines() if "--save-dtype bfloat16" in line]
    if save_dtype == "default":
        assert lines == []
    else:
        full, rounded = re.search(r"eval/nll ([\d.]+) -> ([\d.]+)", lines[0]).groups()
        assert float(rounded) == pytest.approx(after, rel=1e-3)
        assert float(full) != float(rounded)  # of weights that bfloat16 cannot hold


def test_a_run_that_ends_worse_than_it_began_says_so(trained, default, small, tmp_path):
    ended = run(small, tmp_path, model=trained.folder, lr=0.1, max_steps=3)
    summary = json.loads((tmp_path / "summary.json").read_text())
    before, after = (summary[when]["eval/nll"] for when in ("before", "after"))
    line = f"held-out eval/nll became worse: {before:.8g} -> {after:.8g}"
    assert after > before and ended.out.splitlines()[-2].startswith(line)
    assert "worse" not in default.ended.out


def test_without_packing_each_block_is_one_document_and_batches_need_not_divide(
    small, tmp_path
):
    options = {"packing": False, "batch_size": 6, "micro_batch_size": 4, "gradient_checkpointing": True}
    succeeds(run(small, tmp_path, **options))
    assert read_json(tmp_path / "summary.json")["blocks"] == DOCUMENTS
    assert [row["data/documents"] for row in rows_of(tmp_path)] == [6] * 10


def test_without_eval_dataset_a_share_of_the_prompts_is_held_out(small, tmp_path):
    options = {key: value for key, value in small.options.items() if key != "eval_dataset"}
    assert processes.script("sft", *flags(**options, output_dir=tmp_path), plots=False).code == 0
    trained_on = json.loads((tmp_path / "summary.json").read_text())["documents"]
    asked = {sample["prompt"][-1]["content"] for sample in read_jsonl(tmp_path / "samples.jsonl")}
    of_file = demonstrations.load_sft(small.options["dataset"], TOKENIZER, 64)
    held_out = {document.messages[-2]["content"] for document in splits.hold_out(of_file)[1]}
    assert asked and asked <= held_out and 0 < DOCUMENTS - trained_on <= 0.1 * DOCUMENTS


def test_a_data_set_with_one_prompt_trains_without_held_out_metrics(small, tmp_path):
    path = write_rows(tmp_path / "one.jsonl", tiny.rows("sft", "train")[:1])
    options = {key: value for key, value in small.options.items() if key != "eval_dataset"}
    given = flags(**{**options, "dataset": path, "output_dir": tmp_path / "run"})
    ended = processes.script("sft", *given, plots=False)
    assert ended.code == 0, ended.err[-1000:]
    assert len(rows_of(tmp_path / "run")) == 10 and not rows_of(tmp_path / "run", "eval/nll")


# -- the loss of one optimiser step ------------------------------------------------------
def plain_nll(model, document):
    """(summed loss of the response tokens, their number) by transformers and cross_entropy."""
    ids = document.ids.long()[None]
    losses = F.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none")
    kept = document.response_mask[1:]
    return losses[kept].sum(), int(kept.sum())


def one_step(trained, blocks, checkpointing=False, **options):
    """(loss, gradient norm, gradients) of sft.update on blocks, from the trained model."""
    model = pretrained.load_policy(str(trained.model), TOKENIZER, gradient_checkpointing=checkpointing)
    model = dist.shard(model, CPU)
    args = sft.Args(**{**vars(trained.args), "max_grad_norm": 0.0, **options})
    optimizer, gradients = torch.optim.SGD(model.parameters(), lr=0.0), {}
    note = lambda *_: gradients.update({name: p.grad for name, p in model.named_parameters()})
    optimizer.register_step_pre_hook(note)  # the step forgets them
    nll, norm = sft.update(model, optimizer, blocks, args)
    return nll, norm, gradients, model


def assert_same_step(a, b, tolerance=1e-5):
    assert a[0] == pytest.approx(b[0], abs=tolerance) and a[1] == pytest.approx(b[1], abs=tolerance)
    for name in b[2]:
        torch.testing.assert_close(a[2][name], b[2][name], atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def reference(trained, small):
    """The step over some documents by plain transformers, one document per row; and the documents."""
    documents = train_documents(small)[:40]
    model = AutoModelForCausalLM.from_pretrained(trained.model)
    parts = [plain_nll(model, document) for document in documents]
    loss = sum(nll for nll, _ in parts) / sum(n for _, n in parts)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
    return documents, (loss.item(), norm, grads)


@pytest.mark.parametrize("packing", [True, False])
def test_loss_and_gradient_are_those_of_each_document_alone_packed_or_not(trained, reference, packing):
    documents, want = reference
    blocks = make_blocks(documents, 64, packing)
    assert (max(map(len, blocks)) > 3) == packing
    assert_same_step(one_step(trained, blocks, packing=packing), want)


def test_positions_that_continue_across_documents_would_change_the_loss(trained, reference, monkeypatch):
    """The test above can fail: without the restart of positions, packed documents see each other."""
    documents, want = reference
    places = lambda batch: torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
    running = lambda *given: (batch := collate(*given))._replace(position_ids=places(batch))
    monkeypatch.setattr(batches, "collate", running)
    blocks = make_blocks(documents, 64)
    assert abs(one_step(trained, blocks)[0] - want[0]) > 1e-3


@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.parametrize("packing", [True, False])
def test_micro_batch_size_changes_neither_loss_nor_gradient(trained, reference, size, packing):
    documents, _ = reference
    blocks = make_blocks(documents, 64, packing)[:7]  # 7: the last one is uneven
    whole = one_step(trained, blocks, micro_batch_size=7)
    assert_same_step(one_step(trained, blocks, micro_batch_size=size), whole)


def test_gradient_checkpointing_changes_neither_loss_nor_gradient(trained, reference):
    blocks = make_blocks(reference[0], 64)
    on, off = one_step(trained, blocks, checkpointing=True), one_step(trained, blocks)
    recomputes = lambda model: any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert recomputes(on[3]) and not recomputes(off[3])
    assert_same_step(on, off, tolerance=1e-6)


def test_max_grad_norm_scales_the_gradient_and_zero_does_not(trained, reference):
    blocks = make_blocks(reference[0], 64)
    _, norm, free, _ = one_step(trained, blocks)
    _, same, cut, _ = one_step(trained, blocks, max_grad_norm=norm / 4)
    assert same == pytest.approx(norm)  # what is logged is the norm before
    for name in free:
        torch.testing.assert_close(cut[name], free[name] / 4, rtol=1e-4, atol=1e-7)


# -- resuming ----------------------------------------------------------------------------
MOMENTS = {  # and what each is known by
    "row 2": [],  # before the first checkpoint
    "row 5": ["checkpoint/step_3"],
    "tensors 3": ["checkpoint/step.tmp/tensors"],  # while the first checkpoint is written
    "tensors 6": ["checkpoint/step_3", "checkpoint/step.tmp/tensors"],
    "pointer 6": ["checkpoint/step_3", "checkpoint/step_6", "checkpoint/latest.tmp"],
    "older 6": ["checkpoint/step_3", "checkpoint/step_6"],
    "results": ["checkpoint/step_9"],
    "export": ["checkpoint/step_9", "model.tmp"],
    "summary": ["checkpoint/step_9", "model"],
}


@pytest.fixture(scope="module")
def undisturbed(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    succeeds(run(small, folder, moment=[f"copy {moment}" for moment in MOMENTS]))
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_any_moment_resumes_to_the_same_bits(small, undisturbed, tmp_path, moment):
    """Rows up to the checkpoint stay unchanged, including their times."""
    as_killed(undisturbed, moment, tmp_path)
    assert not (tmp_path / "summary.json").exists()
    assert all((tmp_path / name).exists() for name in MOMENTS[moment])
    assert (moment == "summary") == (tmp_path / "model").exists()
    latest, before = tmp_path / "checkpoint" / "latest", rows_of(tmp_path)
    n = int(latest.read_text().removeprefix("step_")) if latest.exists() else 0
    succeeds(run(small, tmp_path, "--resume"))
    assert_same_result(tmp_path, undisturbed)
    after = rows_of(tmp_path)
    assert after[:n] == before[:n] and not [row for row in before[n:] if row in after]


@pytest.mark.parametrize("moment", ["row 5", "tensors 6", "summary"])
def test_a_copied_run_equals_a_run_after_kill_9(small, undisturbed, tmp_path, moment):
    assert run(small, tmp_path / "run", moment=moment).code == -9
    left, copied = contents(tmp_path / "run"), contents(Path(f"{undisturbed} at {moment}"))
    assert list(left) == list(copied)
    named_or_timed = ("args.json", "metrics.jsonl", ".metadata")  # these hold the folder's name, or times
    assert not [x for x in left if left[x] != copied[x] and not x.endswith(named_or_timed)]


def test_a_run_killed_again_and_again_resumes_to_the_same_bits(small, undisturbed, tmp_path):
    for moment in ("row 4", "tensors 6", "row 8", "export"):
        assert run(small, tmp_path, "--resume", moment=moment).code == -9
    assert run(small, tmp_path, "--resume").code == 0
    assert_same_result(tmp_path, undisturbed)


@pytest.mark.parametrize("moment, word", [(None, "finished"), ("row 5", "unfinished")])
def test_an_existing_run_is_an_error_and_overwrite_replaces_it(small, undisturbed, tmp_path, moment, word):
    assert run(small, tmp_path, moment=moment, seed=5).code == (-9 if moment else 0)
    before = contents(tmp_path)
    assert_error(run(small, tmp_path), f"an {word}" if moment else f"a {word}", "--overwrite")
    assert contents(tmp_path) == before
    assert run(small, tmp_path, "--overwrite").code == 0
    assert_same_result(tmp_path, undisturbed)


def test_resume_names_other_arguments_and_finishes(small, tmp_path):
    assert run(small, tmp_path, moment="row 5").code == -9
    ended = run(small, tmp_path, "--resume", batch_size=8, max_steps=12)
    assert ended.code == 0, ended.err[-1000:]
    named = [line for line in ended.out.splitlines() if line.startswith("resuming with another")]
    assert len(named) == 2
    assert "batch_size: 4 -> 8" in named[0] and "max_steps: 10 -> 12" in named[1]
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, 13))


def test_a_run_resumed_with_fewer_steps_than_it_has_reports_those_it_has(small, tmp_path):
    assert run(small, tmp_path, moment="row 5").code == -9
    assert run(small, tmp_path, "--resume", max_steps=1).code == 0
    assert read_json(tmp_path / "summary.json")["steps"] == rows_of(tmp_path)[-1]["step"] > 1


def test_resume_with_metrics_that_the_first_part_did_not_have(small, tmp_path):
    assert run(small, tmp_path, moment="row 5", sample_prompts=0).code == -9
    ended = run(small, tmp_path, "--resume", sample_prompts=4)
    assert ended.code == 0 and "Traceback" not in ended.err, ended.err[-1000:]


# -- a loss that is not a number ---------------------------------------------------------
def test_a_nan_loss_stops_the_run_names_the_step_and_keeps_the_last_checkpoint(small, undisturbed, tmp_path):
    one_micro_batch = {"micro_batch_size": 4}
    ended = run(small, tmp_path, moment="nan 5", **one_micro_batch)
    assert_error(ended, "step 5", "nan", str(tmp_path / "checkpoint"))
    assert not (tmp_path / "model").exists() and not (tmp_path / "summary.json").exists()
    assert (tmp_path / "checkpoint" / "latest").read_text() == "step_3"
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4]
    resumed = run(small, tmp_path, "--resume", **one_micro_batch)  # what was left goes on, without NaN
    losses = lambda folder: [row["loss/nll"] for row in rows_of(folder)]
    assert resumed.code == 0 and losses(tmp_path) == pytest.approx(losses(undisturbed), abs=1e-4)


# -- bad input ---------------------------------------------------------------------------
@pytest.fixture(scope="module")
def bad(small, tmp_path_factory):
    """A folder of unusable models and data, in which the commands run."""
    folder = tmp_path_factory.mktemp("bad")
    write_rows(folder / "unusable.jsonl", [{"prompt": "copy ant", "completion": ""}, {"foo": 1}])
    write_rows(folder / "long.jsonl", [{"prompt": "copy " + "ant " * 90, "completion": "ant"}] * 3)
    (folder / "notes.txt").write_text("notes")
    (folder / "unfinished").mkdir()
    (folder / "unfinished" / "args.json").write_text("{}")
    (folder / "nothing here").mkdir()
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    for save in (tiny.model().save_pretrained, tokenizer.save_pretrained):
        save(folder / "no_template")
    return folder


@pytest.mark.parametrize(
    "options, words",
    [
        ({"dataset": "nothing.jsonl"}, ["nothing.jsonl", "no such file"]),
        ({"eval_dataset": "nothing.jsonl"}, ["nothing.jsonl", "no such file"]),
        ({"dataset": "unusable.jsonl"}, ["unusable.jsonl:1", "unusable.jsonl:2", "no response", "foo"]),
        ({"dataset": "long.jsonl"}, ["long.jsonl:1", "64 tokens", "--max-length"]),
        ({"dataset": "notes.txt"}, ["notes.txt:1", "match no format of SFT rows", "--columns"]),
        ({"dataset": "org/nothing"}, ["org/nothing", "hub"]),
        ({"model": "runs/sft"}, ["runs/sft", "python sft.py"]),
        ({"model": "/no/such/folder"}, ["/no/such/folder", "path"]),
        ({"model": "unfinished"}, ["unfinished", "--resume"]),
        ({"model": "nothing here"}, ["nothing here", "config.json"]),
        ({"model": "org/nothing"}, ["org/nothing"]),
        ({"batch_size": 0}, ["--batch-size 0"]),
        ({"lr_schedule": "nonsense"}, ["--lr-schedule", "nonsense"]),
        ({"save_dtype": "int8"}, ["--save-dtype", "int8"]),
        ({"sav_every": 1}, ["--sav-every", "did you mean --save-every"]),
    ],
    ids=named,
)
def test_bad_input_is_reported_in_one_line(small, bad, tmp_path, options, words):
    ended = run(small, tmp_path / "out", cwd=bad, **options)
    assert_error(ended, *words)
    assert not (tmp_path / "out" / "model").exists() and not (tmp_path / "out" / "summary.json").exists()


def test_an_unknown_recipe_is_one_line_with_all_names(small, bad):
    assert_error(processes.script("sft", "rlhf_workflw", cwd=bad), "tiny, base, large, rlhf_workflow")


def test_unusable_rows_are_counted_and_named(small, bad, tmp_path):
    good = tiny.rows("sft", "train")[:40]
    long = {"prompt": "copy " + "ant " * 90, "completion": "ant"}
    mixed = [long, *good[:20], {"foo": 1}, *good[20:], long, {"prompt": "copy ant", "completion": " "}]
    path = write_rows(tmp_path / "mixed.jsonl", mixed)
    ended = run(small, tmp_path / "run", dataset=path)
    assert ended.code == 0, ended.err[-1000:]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["documents"] == 40
    lines = ended.out.splitlines()
    assert any("dropped 4 of 44 rows" in line for line in lines)
    assert any("2: " in line and "64 tokens" in line and "jsonl:1, mixed.jsonl:43" in line for line in lines)
    assert any("no response" in line and "mixed.jsonl:44" in line for line in lines)
    assert any("foo" in line and "mixed.jsonl:22" in line for line in lines)


def test_a_chat_template_file_makes_a_model_without_one_usable(small, bad, tmp_path):
    (tmp_path / "chat.jinja").write_text(tiny.CHAT_TEMPLATE)
    options = {"model": bad / "no_template", "chat_template": tmp_path / "chat.jinja", "max_steps": 1}
    succeeds(run(small, tmp_path / "run", **options))
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").chat_template == tiny.CHAT_TEMPLATE


def test_bad_input_ends_a_real_process_in_the_same_way(tmp_path):
    ended = processes.python(ROOT / "sft.py", "tiny", "--dataset", "nothing.jsonl", cwd=tmp_path)
    assert_error(ended, "nothing.jsonl", "no such file")
    assert len(ended.err.strip().splitlines()) == 1


def test_the_error_for_a_model_that_cannot_be_sampled_says_how_to_train_it(small, tmp_path):
    model = indexed_model(tmp_path / "indexed")
    assert_error(run(small, tmp_path / "a", model=model), "the sampler does not know", "--sample-prompts 0")
    assert run(small, tmp_path / "b", model=model, sample_prompts=0).code == 0


def test_recipes_have_the_papers_numbers():
    of = {name: (x.lr, x.batch_size, x.max_length, x.epochs) for name, (_, x) in sft.RECIPES.items()}
    assert of["llama2"] == (2e-5, 64, 4096, 2.0) and of["rlhf_workflow"] == (2e-5, 32, 8192, 1.0)
    assert of["rlhf_workflow_preference"] == (5e-6, 128, 3072, 1.0)
    workflow = sft.RECIPES["rlhf_workflow"][1]
    assert (workflow.warmup_ratio, workflow.lr_schedule, workflow.packing) == (0.03, "cosine", True)
    assert list(sft.RECIPES)[0] == "tiny" and sft.RECIPES["tiny"][1] == sft.Args()
    assert of["dpo"] == (5e-7, 64, 512, 1.0) and of["constitutional"] == (3e-4 / 2, 1024, 2048, 1.0)
    assert of["summarize"] == (6.35e-5, 128, 640, 1.0)
    summarize = sft.RECIPES["summarize"][1]
    assert (summarize.lr_schedule, summarize.packing, summarize.dataset) == ("cosine", False, "trl-lib/tldr")


# -- docs/learn/hir.patch ------------------------------------------------------------------------
@pytest.fixture(scope="module")
def hir(tmp_path_factory):
    return processes.patched("sft", "hir", tmp_path_factory.mktemp("hir"))


def test_hirs_loss_by_hand_and_its_wrong_variants(hir):
    """Two responses, of one token and of two, each under its own instruction and under the other one."""
    lengths = [1, 1, 2, 2]
    logprobs = torch.tensor([-1.0, -3.0, -1.0, -1.0, -0.5, -0.5], requires_grad=True)
    entropies = torch.tensor([0.5, 9.0, 0.2, 0.3, 9.0, 9.0], requires_grad=True)
    args = hir.Args(contrast_coef=2.0, entropy_coef=0.1)
    loss, sums = hir.hir_loss(logprobs, entropies, lengths, 2, 3, 2, args)
    contrast = [math.log(1 + math.exp(-3 + 1)), math.log(1 + math.exp(-1 + 2))]  # P = -1, -3; -2, -1
    assert loss.item() == pytest.approx((1 + 2) / 3 - 0.1 * (0.5 + 0.2 + 0.3) / 3 + 2 * sum(contrast) / 2)
    assert [sums[name].item() for name in sums] == pytest.approx([3, sum(contrast), 1])
    by_mean = [contrast[0], math.log(1 + math.exp(-0.5 + 1))]  # P as a mean over tokens
    assert sums["contrast"].item() != pytest.approx(sum(by_mean), abs=0.1)
    loss.backward()
    # less likely under the other instruction, by sigma(P_ik - P_ii); n = 3, B = 2
    pushes = [1 / (1 + math.exp(2)), 1 / (1 + math.exp(-1))]
    own, other = ([-1 / 3 - 2 * x / 2 for x in pushes], [2 * x / 2 for x in pushes])
    wanted = [own[0], other[0], own[1], own[1], other[1], other[1]]
    assert logprobs.grad.tolist() == pytest.approx(wanted)
    assert entropies.grad.tolist() == pytest.approx([-0.1 / 3, 0, -0.1 / 3, -0.1 / 3, 0, 0])
    # of two micro-batches the losses add up, and a rank without responses has loss 0
    halves = [(logprobs[:2], entropies[:2], lengths[:2]), (logprobs[2:], entropies[2:], lengths[2:])]
    parts = [hir.hir_loss(a, b, c, 2, 3, 2, args)[0].item() for a, b, c in halves]
    assert sum(parts) == pytest.approx(loss.item())
    assert hir.hir_loss(logprobs[:0], entropies[:0], [], 2, 3, 2, args)[0].item() == 0


INSTRUCTIONS = ("Answer well", "Answer badly")


def instructed(system, text="copy ant bear", answer="ant bear"):
    turns = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return {"prompt": turns, "completion": answer}


def documents_of(rows):
    numbered = [batches.Row(f"x:{i}", row) for i, row in enumerate(rows)]
    return demonstrations.sft_documents(numbered, TOKENIZER, 64, "x")


def test_hir_contrasts_a_response_with_all_instructions_for_its_prompt(hir):
    rows = [instructed("Answer well\n\nBe kind"), instructed("Answer badly", "last cat dog", "dog")]
    blocks = hir.under_all_instructions(documents_of(rows), TOKENIZER)
    twins = [instructed("Answer badly\n\nBe kind"), instructed("Answer well", "last cat dog", "dog")]
    wanted = zip(documents_of(rows), documents_of(twins))
    for block, pair in zip(blocks, wanted, strict=True):
        for document, other in zip(block, pair, strict=True):
            assert document.ids.tolist() == other.ids.tolist()
            assert document.response_mask.tolist() == other.response_mask.tolist()
    for bad in ([instructed("Answer well")] * 2, [*rows, tiny.rows("sft", "train")[0]]):
        with pytest.raises(hir.InputError, match="wanted rows of ai_feedback hindsight"):
            hir.under_all_instructions(documents_of(bad), TOKENIZER)


@pytest.mark.parametrize("micro_batch_size", [1, 3, 64])
def test_hirs_first_step_has_the_losses_of_plain_transformers(hir, micro_batch_size):
    given = tiny.rows("sft", "train")[:4]
    rows = [instructed(INSTRUCTIONS[i % 2], r["prompt"], r["completion"]) for i, r in enumerate(given)]
    plain, p, entropies = AutoModelForCausalLM.from_config(tiny.model().config), [], []
    plain.load_state_dict(tiny.model().state_dict())
    for row, i in zip(rows, (0, 1, 0, 1)):
        for system in (INSTRUCTIONS[i], INSTRUCTIONS[1 - i]):
            [document] = documents_of([{**row, "prompt": [{**row["prompt"][0], "content": system}, row["prompt"][1]]}])
            with torch.no_grad():
                logprobs = plain(input_ids=document.ids[None].long()).logits[0, :-1].log_softmax(-1)
            mask = document.response_mask[1:]
            p.append(logprobs.gather(1, document.ids[1:, None].long())[mask].sum())
            entropies.append(-(logprobs.exp() * logprobs).sum(1)[mask])
    p, entropy = torch.stack(p).view(4, 2), torch.cat(entropies[::2])
    args = hir.Args(micro_batch_size=micro_batch_size)
    model = dist.shard(pretrained.load_policy("tiny", TOKENIZER), CPU)
    blocks = hir.under_all_instructions(documents_of(rows), TOKENIZER)
    row = hir.update(model, dist.adamw(model, 1e-3, args), blocks, args)
    assert row["loss/nll"] == pytest.approx(-p[:, 0].sum().item() / len(entropy), rel=1e-4)
    assert row["loss/contrast"] == pytest.approx(-p.log_softmax(1)[:, 0].mean().item(), rel=1e-3)
    assert row["policy/entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)


def test_hir_learns_to_distinguish_instructions(hir, small, tmp_path, monkeypatch):
    """Under the good instruction the answer to every prompt is ant, under the bad one bear."""
    prompts = [row["prompt"] for row in tiny.rows("sft", "train")[:48]]
    answers = ("ant", "bear")
    rows = [instructed(INSTRUCTIONS[i % 2], text, answers[i % 2]) for i, text in enumerate(prompts)]
    monkeypatch.setattr(hir, "PLOTS", [])
    options = {**small.options, "dataset": str(write_rows(tmp_path / "rows.jsonl", rows)), "max_steps": 20}
    options |= {"output_dir": f"{tmp_path}/run", "model": "tiny", "batch_size": 24, "micro_batch_size": 24}
    hir.main(hir.Args(**options, lr=3e-3, lr_schedule="constant_with_warmup"))
    logged = rows_of(tmp_path / "run", "loss/contrast")
    assert len(logged) == 20 and logged[0]["data/documents"] == 24
    assert logged[0]["loss/contrast"] > 0.6 and logged[-1]["loss/contrast"] < 0.3  # log 2 is a guess
    assert logged[-1]["loss/nll"] < 1 and read_json(tmp_path / "run" / "args.json")["stage"] == "hir"
