"""Helpers that several test files share: small runs of the scorers, checks of the files that they write, the
same scores by plain transformers, prompts, and rows of the pool."""

import collections
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import torch
from processes import ROOT, flags
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, DeepseekV32Config,
    DeepseekV32ForCausalLM, LlamaConfig, LlamaForCausalLM,
)  # fmt: skip

from common import dist, responses
from common.batches import Document, Row
from common.data import chat, comparisons, tiny
from common.data.files import read_jsonl
from common.loading import pretrained
from common.scoring import functions, scorers, version_evaluation
from common.run import checkpoints

CPU, TOKENIZER = torch.device("cpu"), tiny.tokenizer()
PAIRS, HELD_OUT, STEPS = 160, 40, 10
FILES = "args.json checkpoint metrics.jsonl metrics.png model samples.jsonl scores.png summary.json"
PLACE = ("step", "iteration", "time_s")  # keys of a row of metrics that are not metrics


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


TALK, SYSTEM = [user("ant"), bot("bear"), user("cat")], {"role": "system", "content": "so"}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_small(folder):
    """A folder with pairs, and flags for a run on them that takes a second."""
    for name, count in (("train", PAIRS), ("test", HELD_OUT)):
        write_rows(folder / f"{name}.jsonl", tiny.rows("preferences", name)[:count])
    options = {"model": "tiny", "dataset": folder / "train.jsonl", "eval_dataset": folder / "test.jsonl"}
    options |= {"max_length": 64, "batch_size": 8, "micro_batch_size": 4, "length_prompts": 3}
    options |= {"max_new_tokens": 8, "max_steps": STEPS, "save_every": 3, "eval_every": 4}
    return SimpleNamespace(
        folder=folder, options={k: str(v) if isinstance(v, Path) else v for k, v in options.items()}
    )


def run(script, small, folder, *more, moment=None, cwd=None, plots=False, **options):
    """`python SCRIPT.py` with the flags of `small`, in its folder unless another is given."""
    sft_flag = {"reward": "sft_model", "advantage_model": "policy"}.get(script)
    if sft_flag and options.get("model", "tiny") == "tiny":  # whose SFT model is runs/sft otherwise
        options = {sft_flag: "tiny", **options}
    options = {**small.options, "output_dir": folder, **options}
    given = flags(**{key: value for key, value in options.items() if value is not None})
    return processes.script(script, *given, *more, moment=moment, cwd=cwd or small.folder, plots=plots)


def succeeds(ended):
    assert ended.code == 0 and ended.errors == [] and "Traceback" not in ended.err, ended.err[-2000:]
    return ended


def assert_error(ended, *words):
    """One clear line, an exit code that is not 0, no traceback."""
    assert ended.code == 2 and "Traceback" not in ended.err, ended.err[-2000:]
    assert len(ended.errors) == 1 and ended.errors[0].startswith("error: "), ended.err[-2000:]
    assert all(word in ended.errors[0] for word in words), ended.errors[0]


def as_killed(run, moment, folder):
    """Turn the folder into the state that kill -9 at this moment would leave, from the copy made then."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(f"{run} at {moment}", folder)


def contents(folder):
    """The contents that an old run must not lose."""
    return {str(x.relative_to(folder)): x.read_bytes() for x in folder.rglob("*") if x.is_file()}


def read_json(path):
    return json.loads(Path(path).read_text())


def rows_of(folder, key="optim/lr"):
    return [row for row in read_jsonl(Path(folder) / "metrics.jsonl") if key in row]


def column(folder, key):
    return [row[key] for row in rows_of(folder, key)]


def without(row, *names):
    return {key: value for key, value in row.items() if key not in names}


class Gradients(torch.optim.SGD):
    """An optimiser that changes nothing and notes the gradients that it gets."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.0)
        self.model = model

    def step(self):
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}


def assert_same_step(got, want, tolerance=1e-4):
    """Compare the (metrics, gradients) of two optimiser steps."""
    assert got[0] == pytest.approx(want[0], abs=tolerance, rel=tolerance)
    for name in want[1]:
        torch.testing.assert_close(got[1][name], want[1][name], atol=tolerance, rtol=10 * tolerance)


def norm_of(gradients):
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


def steps_of(script, n_results, small, folder, monkeypatch, **options):
    """[(comparisons, learning rate)] of a run of reward.py or advantage_model.py on 10 pairs with all ratings, in
    which nothing learns. n_results: how many numbers its `update` returns."""
    steps, given = [], {**small.options, "max_steps": None, "eval_every": 0, "save_every": 0, "length_prompts": 0}

    def update(model, optimizer, batch, args):
        steps.append((batch, optimizer.param_groups[0]["lr"]))
        return [0.5] * n_results

    monkeypatch.setattr(script, "update", update)
    monkeypatch.setattr(script.plots, "scorer", lambda folder: None)
    given["dataset"] = str(write_rows(folder / "ten.jsonl", read_jsonl(small.folder / "train.jsonl")[6:16]))
    script.main(script.Args(**{**given, "output_dir": str(folder / "run"), "overwrite": True, **options}))
    return steps


def assert_epochs(steps_with):
    """Check the optimiser steps of runs by hand. steps_with: steps_of, but for options. Returns two epochs' steps."""
    rates = {"lr": 0.01, "lr_schedule": "linear", "warmup_ratio": 0.3}  # of 6 steps: two rise
    steps = steps_with(batch_size=4, epochs=2.0, **rates)
    assert [len(batch) for batch, _ in steps] == [4, 4, 2, 4, 4, 2]
    assert [lr for _, lr in steps] == pytest.approx([0.01 * x for x in (1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4)])
    order = lambda steps: [c.row.where for batch, _ in steps for c in batch]
    orders = [order(steps[:3]), order(steps[3:]), order(steps_with(batch_size=4, epochs=1.0, seed=1))]
    assert len(set(map(tuple, orders))) == 3 and len(set(orders[0])) == 10
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert [len(batch) for batch, _ in steps_with(batch_size=3, epochs=0.5)] == [3, 3]  # of 3, 3, 3, 1
    return steps


def sequence_logprob(model, comparison, k):
    """log pi(y | x) of its response k by transformers' own forward."""
    x, start = ids(comparison, k), len(comparison.prompt_ids)
    nll = torch.nn.functional.cross_entropy(model(input_ids=x).logits[0, :-1], x[0, 1:], reduction="none")
    return -nll[start - 1 :].sum().item()


def comparisons_of(folder, rows, max_length=64):
    return comparisons.load(str(write_rows(folder / "rows.jsonl", rows)), "train", TOKENIZER, max_length)


def weights(folder):
    return load_file(Path(folder) / "model" / "model.safetensors")


def same_weights(folder, other):
    got, want = weights(folder), weights(other)
    return set(got) == set(want) and all(torch.equal(got[name], want[name]) for name in want)


def assert_same_run(folder, undisturbed):
    """The same weights, metrics and samples bit for bit, and no partial file."""
    assert same_weights(folder, undisturbed)
    stable = lambda row: {key: value for key, value in row.items() if not key.startswith(("time", "perf/"))}
    got, want = (list(map(stable, read_jsonl(f / "metrics.jsonl"))) for f in (folder, undisturbed))
    assert got == want
    for name in ("summary.json", "samples.jsonl"):
        assert (folder / name).read_text() == (undisturbed / name).read_text()
    times = [row["time_s"] for row in read_jsonl(folder / "metrics.jsonl")]
    assert times == sorted(times) and not list(folder.rglob("*.tmp"))


def assert_same_result(folder, undisturbed):
    """The same, for a run of 10 steps with checkpoints after 3, 6 and 9."""
    assert_same_run(folder, undisturbed)
    assert len(rows_of(folder)) == STEPS
    assert [path.name for path in folder.glob("checkpoint/step_*")] == ["step_9"]


def assert_files(folder, names):
    """Exactly these and the lock, pictures that are PNGs, and the summary as the last one but for pictures."""
    assert {path.name for path in folder.iterdir()} == {"lock", *names.split()}
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in folder.glob("*.png"))
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".png"]
    assert max(path.stat().st_mtime_ns for path in files) == (folder / "summary.json").stat().st_mtime_ns


def assert_whole_run(folder, command, args, stage, steps, ends):
    """The files of a finished run, its arguments, the keys of its metrics, and the metrics of its samples.

    steps: keys of every optimiser step's row. ends: keys of the first and the last row, before and after."""
    assert_files(folder, FILES)
    assert sorted(path.name for path in (folder / "checkpoint").iterdir()) == ["latest", "step_9"]
    written = read_json(folder / "args.json")
    assert written["args"] == json.loads(json.dumps(vars(args))) and written["stage"] == stage
    assert written["command"] == command and written["world_size"] == 1
    assert {"device", "compute_dtype", "attention", "versions", "git", "python"} <= written.keys()
    assert written["versions"]["torch"] == torch.__version__
    rows = read_jsonl(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, *range(1, STEPS + 1), STEPS]
    steps |= {*PLACE, "train/accuracy", "optim/grad_norm", "optim/lr", "data/comparisons"}
    assert all(steps | {"perf/comparisons_per_s"} <= set(row) for row in rows[1:-1])
    ends |= {f"eval/{name}" for name in "pairs accuracy nll brier ece ece_low ece_high ece_floor".split()}
    assert all(ends <= set(row) for row in (rows[0], rows[-1]))
    assert [row["step"] for row in rows if "eval/nll" in row] == [0, 4, 8, 10]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    values = read_json(folder / "summary.json")
    assert values["before"] == without(rows[0], *PLACE) and values["after"] == without(rows[-1], *PLACE)
    assert values["steps"] == STEPS
    assert [(row["rows"], row["pairs"]) for row in values["data"]] == [(PAIRS, PAIRS), (HELD_OUT, HELD_OUT)]
    assert_figures_are_those_of_the_samples(folder)


def assert_figures_are_those_of_the_samples(folder):
    """Accuracy, loss and Brier score of the last evaluation, worked out again from samples.jsonl."""
    samples, after = read_jsonl(folder / "samples.jsonl"), rows_of(folder, "eval/nll")[-1]
    rows = tiny.rows("preferences", "test")[:HELD_OUT]
    assert [s["prompt"] for s in samples] == [[user(r["prompt"])] for r in rows]
    for sample, row in zip(samples, rows):
        assert [r["text"] for r in sample["responses"]] == [row["chosen"], row["rejected"]]
        assert [r["rank"] for r in sample["responses"]] == [0, 1] and sample["category"] == row["category"]
    apart = [s["responses"][0]["score"] - s["responses"][1]["score"] for s in samples]
    right = [(d > 0) + 0.5 * (d == 0) for d in apart]
    assert after["eval/accuracy"] == sum(right) / len(right) and after["eval/pairs"] == len(right)
    p = [1 / (1 + math.exp(-d)) for d in apart]
    assert math.isclose(after["eval/nll"], -sum(map(math.log, p)) / len(p), abs_tol=1e-6)
    assert math.isclose(after["eval/brier"], sum((1 - x) ** 2 for x in p) / len(p), abs_tol=1e-6)


# -- the same by plain transformers ------------------------------------------------------
class Plain:
    """A saved model in plain transformers, in float32: its outputs at the last token of a prompt, with or
    without a response."""

    def __init__(self, folder):
        self.model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def text(self, prompt, response=None):
        messages, asks = [*prompt, *([] if response is None else [bot(response)])], response is None
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)

    def outputs(self, prompt, response=None):
        text = self.text(prompt, response)
        return self.model(**self.tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits[0]


def ids(comparison, k):
    return torch.cat([comparison.prompt_ids, comparison.response_ids[k]]).long()[None]


def documents(comparison, k):
    """One response as a document of SFT."""
    of_one = ids(comparison, k)[0]
    return Document(of_one, torch.arange(len(of_one)) >= len(comparison.prompt_ids), [], None)


# -- prompts and rows of the pool ----------------------------------------------------------
def prompt(text, number=1):
    """A prompt of the tiny world as rollout.load_prompts gives it."""
    turns = [user(text)]
    return responses.Prompt(chat.prompt_ids(TOKENIZER, turns), turns, Row(f"prompts:{number}", {}))


def row(prompt, response, score=0.0, iteration=1, chunk=0, finished=True, scorer="a@1"):
    """A row of the pool (common/run/pool.py)."""
    ids = TOKENIZER(response, add_special_tokens=False)["input_ids"] + [TOKENIZER.eos_token_id] * finished
    out = {"prompt": prompt.turns, "response": response, "response_ids": ids, "finished": finished}
    about = {"iteration": iteration, "model": "m", "temperature": 1.0, "chunk": chunk}
    return {**out, **about, "score": score, "scorer": scorer}


A, B, C = (prompt(text, i) for i, text in enumerate(("copy ant", "first bear cat", "rest dog eel"), 1))


def scorer_that_notes(asked, version="b@2"):
    """A scorer that counts words, and appends its arguments to `asked`."""

    def score(prompts, responses, rows):
        asked.extend(zip(prompts, responses))
        return [float(len(text.split())) for text in responses]

    return scorers.Scorer("b", version, functions.Term(score))


def docs_functions(folder):
    """The folder, with the files of docs/use/scorers.md."""
    blocks = (ROOT / "docs" / "use" / "scorers.md").read_text().split("```python\n")[1:]
    for name, block in zip(("myreward.py", "shorter.py", "gsm8k.py"), blocks, strict=True):
        (folder / name).write_text(block.partition("```")[0])
    return folder


# -- small models --------------------------------------------------------------------------
class Words:
    """The parts of a tokenizer that load_policy and load_scorer use: its ids, padding and end token."""

    added_tokens_decoder = {}

    def __init__(self, length, pad=4, end=5):
        self.length, self.pad_token_id, self.eos_token_id = length, pad, end

    def get_vocab(self):
        return {str(i): i for i in range(self.length)}


def smaller_model(folder, tokenizer=TOKENIZER, seed=0):
    """A causal LM that costs even less than tiny."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.1, tie_word_embeddings=True, **shape)
    for part in (LlamaForCausalLM(config), tokenizer):
        part.save_pretrained(folder)
    return folder


def indexed_model(folder):
    """A model with a cache of its own kind, which the sampler refuses."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8, "num_key_value_heads": 2}
    sizes |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "first_k_dense_replace": 1}
    sizes |= {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "vocab_size": len(TOKENIZER)}
    for part in (DeepseekV32ForCausalLM(DeepseekV32Config(**sizes)), TOKENIZER):
        part.save_pretrained(folder)
    return folder


def train_small(model, rows, folder):
    """sft.py's 60 steps after which a smaller_model ends its responses."""
    options = {"model": model, "dataset": rows, "output_dir": folder, "max_length": 64, "lr": 1e-2}
    options |= {"batch_size": 8, "micro_batch_size": 8, "max_steps": 60, "epochs": 9}
    options |= {"sample_prompts": 0, "save_every": 0, "eval_every": 0}
    succeeds(processes.script("sft", *flags(**options), plots=False))


def make_scorer(folder, seed=0):
    checkpoints.save_model(dist.shard(pretrained.load_scorer("tiny", TOKENIZER, 1, seed=seed), CPU), TOKENIZER, folder)


# -- runs of versions: rejection sampling's and iterative DPO's ------------------------------
def make_sampled(folder, policy, functions, options):
    """A folder with prompts, of which two are held out too, SFT rows, a file of scorers, and a run `policy`, whose
    model ends its responses; flags for a run on them that takes a second."""
    asked = tiny.rows("prompts", "test")[:10]
    train = [*tiny.rows("prompts", "train")[:40], *asked[:2]]
    columns = lambda r: {"prompt": r["prompt"], "category": r["category"], "split": "train"}
    write_rows(folder / "train.jsonl", map(columns, train))
    write_rows(folder / "test.jsonl", [{**r, "split": "test"} for r in asked])
    write_rows(folder / "sft.jsonl", tiny.rows("sft", "train")[:400])
    smaller_model(folder / "base")
    (folder / "mine.py").write_text(functions)
    train_small(folder / "base", folder / "sft.jsonl", folder / policy)
    files = {"model": policy, "dataset": "train.jsonl", "eval_dataset": "test.jsonl"}
    files = {name: str(folder / file) for name, file in files.items()}
    return SimpleNamespace(folder=folder, options={**options, **files})


def in_bfloat16(source, folder):
    """A copy of a causal LM."""
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def assert_whole_versions(whole, stage, files, start):
    """The files of a run of two iterations from the model `start`; n_samples is 4. Every iteration changes every
    weight."""
    folder = whole.folder
    assert_files(folder, files)
    assert {path.name for path in (folder / "versions").iterdir()} == {"0.json", "1", "1.json", "2", "2.json"}
    written = read_json(folder / "args.json")
    assert written["stage"] == stage and written["args"]["n_samples"] == 4
    assert f"wrote {folder}/model" in whole.ended.out and "version 2:" in whole.ended.out
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "optim/lr" in row]
    planned = re.findall(r"iteration (\d+): (\d+) optimiser steps on", whole.ended.out)
    steps = collections.Counter(row["iteration"] for row in rows)
    assert {int(iteration): int(n) for iteration, n in planned} == steps and len(steps) == 2
    folders = [start, *(folder / name for name in ("versions/1", "versions/2", "model"))]
    base, one, two, final = (load_file(folder / "model.safetensors") for folder in folders)
    assert set(base) == set(one) == set(two) == set(final) and len(base) > 8
    for name in base:
        assert torch.equal(two[name], final[name])
        assert not torch.equal(base[name], one[name]) and not torch.equal(one[name], two[name])
    model, tokenizer = (x.from_pretrained(folders[-1]) for x in (AutoModelForCausalLM, AutoTokenizer))
    assert type(model) is LlamaForCausalLM and tokenizer.get_vocab() == TOKENIZER.get_vocab()


def assert_only_the_last_version_is_rounded(script, options, tmp_path, monkeypatch):
    """In a run of two iterations from a bfloat16 model: the weights that are evaluated and those that are written."""
    source, rounded, folder = pretrained.find_model(options["model"]), [], tmp_path / "run"
    files = {"model": str(in_bfloat16(source, tmp_path / "source")), "output_dir": str(folder)}
    files["save_dtype"] = "bfloat16"
    monkeypatch.setattr(script, "PLOTS", [])

    def noted(study):
        def call(self, policy, *more, **named):
            rounded.append(all(torch.equal(p, p.bfloat16().float()) for p in policy.parameters()))
            return study(self, policy, *more, **named)

        return call

    for kind in (version_evaluation.RejectionSamplingEvaluation, version_evaluation.DPOEvaluation):
        monkeypatch.setattr(kind, "__call__", noted(kind.__call__))
    script.main(script.Args(**{**options, **files}))
    # The source; what version 2 starts from; the last version before and after rounding
    assert rounded == [True, False, False, True]
    files = [folder / name / "model.safetensors" for name in ("versions/1", "versions/2", "model")]
    one, two, final = map(load_file, files)
    assert {weight.dtype for weight in [*one.values(), *two.values()]} == {torch.float32}
    assert all(torch.equal(final[name], two[name].bfloat16()) for name in two) and set(final) == set(two)


VERSIONS_CLOCK = {"time_s", "time/sample_s", "time/score_s", "perf/tokens_per_s", "perf/pairs_per_s"}


def question(r):
    return r["prompt"][-1]["content"]


def named(x):
    """The id of a case of bad input."""
    return "-".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else ""


def assert_same_versions(folder, undisturbed, *files):
    """The same weights bit for bit in all versions and the model, the same files but for the folders' names,
    the same metrics but for times."""
    paths = sorted(undisturbed.glob("*/**/model.safetensors"))
    assert len(paths) > 1
    for path in paths:
        got, want = (load_file(f / path.relative_to(undisturbed)) for f in (folder, undisturbed))
        assert set(got) == set(want) and all(torch.equal(got[name], want[name]) for name in want)
    evaluations = [f"versions/{path.name}" for path in (undisturbed / "versions").glob("*.json")]
    for name in (*files, *evaluations):
        got, want = ((f / name).read_text() for f in (folder, undisturbed))
        for path in (folder, undisturbed):  # what was copied of a run may name either
            got, want = got.replace(str(path), ""), want.replace(str(path), "")
        assert got == want, name
    got, want = (
        [{k: v for k, v in r.items() if k not in VERSIONS_CLOCK} for r in read_jsonl(f / "metrics.jsonl")]
        for f in (folder, undisturbed)
    )
    assert got == want and len(paths) == len(evaluations)
