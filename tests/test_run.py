"""common/run/cli.py, run.py and logs.py: the command line, errors, the run directory, and metrics.jsonl."""

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.metadata
import io
import json
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import processes
import pytest
import torch

import ppo
import sft
from common import dist
from common.errors import InputError
from common.data import files, mixtures, progress, splits, tiny
from common.data.files import write_json
from common.run import checkpoints, cli, logs
from common.run.cli import check_flags, parse
from common.run.run import Run, find_run, launch, start_run
from common.programs import ai_feedback

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Args:
    output_dir: str = "run"
    lr: float = 1e-3
    max_steps: int | None = None
    packing: bool = True
    save_dtype: str = "float32"
    layers: tuple[int, ...] = (1, 2)
    resume: bool = False
    overwrite: bool = False


RECIPES = {"tiny": ("the default", Args()), "large": ("a large one", Args(lr=2.0, packing=False))}


# -- parse -------------------------------------------------------------------------------
@pytest.mark.parametrize("argv", [[], ["tiny"]])
def test_without_arguments_the_first_recipe_is_taken(argv):
    assert parse(RECIPES, argv) == Args()


def test_the_first_word_names_a_recipe_and_flags_change_it():
    assert parse(RECIPES, ["large"]) == Args(lr=2.0, packing=False)
    assert parse(RECIPES, ["large", "--max-steps", "3", "--packing"]) == Args(lr=2.0, max_steps=3)
    assert RECIPES["large"][1] == Args(lr=2.0, packing=False)  # parsing changes no recipe


@pytest.mark.parametrize(
    "argv, words",
    [
        (["xyz"], ["'xyz'", "tiny, large"]),
        (["--max-step", "3"], ["'--max-step'", "did you mean --max-steps"]),
        (["large", "--max-step=3"], ["--max-step", "did you mean --max-steps"]),
        (["--zzz", "3", "--lr-max=1"], ["unknown argument '--zzz': see --help"]),
        (["--gradient-accumulation-steps", "3"], ["': --batch-size (ppo.py: --minibatch-size) is the total"]),
        (["tiny", "large"], ["'large'"]),
        (["--packing", "False"], ["'False': a flag that is on or off takes no value"]),
    ],
)
def test_an_unknown_flag_is_named_with_the_most_similar_one(argv, words):
    with pytest.raises(InputError) as error:
        parse(RECIPES, argv)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    "script, argv, own",
    [
        ("ppo", "--kl 0.5", "--kl-coef"),
        ("dpo_iterative", "--kl_coef 0.5", "--beta"),
        ("ppo", "--ref a", "--reference"),
        ("sft", "--learning-rate 1e-6", "--lr"),
        ("ppo", "--reward-fn a:b", "--scorer"),
        ("reward", "--model-name-or-path a", "--model"),
        ("reward", "--steps 7", "--max-steps"),
        ("ppo", "--temperatures=0.5", "--temperature"),
        ("dpo_iterative", "--temperature 0.5", "--temperatures"),
        ("ppo", "--batch-size 7", "--minibatch-size"),
        ("dpo_iterative", "--num-generations 7", "--n-samples"),
    ],
)
def test_the_error_for_another_librarys_flag_names_ours(script, argv, own):
    with pytest.raises(InputError, match=f"did you mean {own}[?]"):
        parse(importlib.import_module(script).RECIPES, ["tiny", *argv.split()])


@pytest.mark.parametrize("name", [*processes.SCRIPTS, "common.programs.ai_feedback", "common.programs.evaluate"])
def test_no_command_has_two_synonymous_flags(name):
    fields = {field.name for field in dataclasses.fields(importlib.import_module(name).Args)}
    assert all(len(fields & set(line.split())) < 2 for line in cli.SYNONYMS)
    assert not fields & set(vars(cli.EveryCommand()))


def test_a_value_of_the_wrong_type_is_an_error_that_names_the_flag(capsys):
    with pytest.raises(InputError, match="--lr.*'fast'") as error:
        parse(RECIPES, ["--lr", "fast"])
    assert "\n" not in str(error.value) and "--- " not in str(error.value) and capsys.readouterr().err == ""


def test_every_recipe_of_sft_parses_and_help_lists_them(capsys):
    for name, (_, args) in sft.RECIPES.items():
        assert parse(sft.RECIPES, [name, "--dataset", args.dataset]) == args
    with pytest.raises(SystemExit) as stop:
        parse(sft.RECIPES, ["--help"])
    help_text = capsys.readouterr().out
    assert stop.value.code == 0 and all(name in help_text for name in sft.RECIPES)
    assert "--batch-size" in help_text and "Blocks per optimiser step" in help_text
    every = "--columns --preview"
    assert all(flag in help_text for flag in every.split())


# -- what every command takes ------------------------------------------------------------
def test_a_program_that_does_not_train_refuses_preview_before_it_loads_anything():
    with pytest.raises(InputError, match="--preview shows training examples"):
        parse(ai_feedback.RECIPES, ["--preview", "3"])


def test_columns_and_conditions_join_each_data_set_but_tiny(monkeypatch, tmp_path):
    monkeypatch.setattr(mixtures, "with_columns", lambda spec, columns: f"{spec}<{columns}>")
    argv = "tiny --dataset a.csv:0.5,b:0.5 --ptx-dataset tiny:kind=text --rehearsal-data c --columns x=prompt,y>=2"
    args = parse(ppo.RECIPES, argv.split())
    assert args.dataset == "a.csv:0.5,b:0.5<x=prompt,y>=2>" and args.eval_dataset is None
    assert args.ptx_dataset == "tiny:kind=text" and args.rehearsal_data == "c<x=prompt,y>=2>"
    assert ppo.RECIPES["tiny"][1] == ppo.Args()  # parsing changes no recipe


def test_flags_of_every_command_take_effect_before_any_work(monkeypatch):
    seen = []
    monkeypatch.setattr(splits, "n_shown", 0)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on, warn_only: seen.append(on))
    for kind in ("flash", "mem_efficient", "cudnn"):
        monkeypatch.setattr(torch.backends.cuda, f"enable_{kind}_sdp", seen.append)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(dist, "ranks_per_copy", 1)
    monkeypatch.setattr(dist, "compute_dtype", "bfloat16")
    parse(RECIPES, [])
    assert seen == [] and not splits.n_shown and dist.compute_dtype_of(torch.device("cpu")) == torch.float32
    parse(sft.RECIPES, "--preview 3 --deterministic --generate-tensor-parallel 4".split())
    assert seen == [True, False, False, False] and (splits.n_shown, dist.ranks_per_copy) == (3, 4)
    monkeypatch.setattr(dist, "attention", "default")
    parse(RECIPES, "--compute-dtype bfloat16 --attention flex_attention".split())
    assert (dist.compute_dtype_of(torch.device("cpu")), dist.attention) == (torch.bfloat16, "flex_attention")
    for n in (0, 3, 16):
        with pytest.raises(InputError, match=f"{n}: expected a divisor of the 8 process"):
            parse(RECIPES, ["--generate-tensor-parallel", str(n)])
    monkeypatch.setenv("WORLD_SIZE", "32")
    monkeypatch.setattr(dist, "shard_size", 4)
    parse(RECIPES, [])
    assert dist.shard_size is None
    parse(RECIPES, ["--shard-size", "8"])
    assert dist.shard_size == 8
    for n in (0, 1, 3, 64):
        with pytest.raises(InputError, match=f"--shard-size {n}: expected a divisor of the 32 process"):
            parse(RECIPES, ["--shard-size", str(n)])


@pytest.mark.parametrize("gpus, processes, enough", [(0, 8, True), (4, 4, True), (4, 8, False), (1, 2, False)])
def test_more_processes_than_gpus_are_one_line(monkeypatch, gpus, processes, enough):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setenv("LOCAL_RANK", str(processes - 1))
    error = pytest.raises(InputError, match=rf"^--nproc-per-node {processes}: this node has {gpus} GPU\(s\)$")
    with contextlib.nullcontext() if enough else error:
        parse(RECIPES, [])


# -- recipes -----------------------------------------------------------------------------
@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A run of the tiny world, and one of another."""
    monkeypatch.chdir(tmp_path)
    for name, n_words in (("a", len(tiny.WORDS)), ("other", 49152), ("at_12:30", 49152)):
        for model in ("model", "versions/2"):
            Path(name, model).mkdir(parents=True)
            write_json(f"{name}/{model}/config.json", {"vocab_size": n_words})


OWN = [
    ("", "tiny"),
    ("--seed 1 --lr-schedule linear", "tiny"),
    ("--dataset tiny:commands=copy --eval-dataset tiny", "tiny"),
    ("--dataset rows.jsonl", "base"),
    ("--dataset tiny:0.5,rows.jsonl:0.5", "base"),
    ("--dataset tiny --eval-dataset rows.jsonl", "base"),
    ("--model org/name --dataset tiny", "base"),
    ("--model a", "tiny"),
    ("tiny --dataset rows.jsonl --model org/name", "tiny"),
    ("base --dataset tiny", "base"),
]
MODELS = "there/is/none other other/model other/versions/2 a/step_3".split()
MODELS = [(name, "base") for name in MODELS] + [
    (name, "tiny") for name in ("tiny", "a/model", "a/versions/2")
]


@pytest.mark.parametrize(
    "name, argv, recipe",
    [(name, *own) for name in processes.SCRIPTS for own in OWN]
    + [("reward", f"--dataset tiny --model {model}", recipe) for model, recipe in MODELS],
)
def test_own_data_or_models_use_the_recipe_base(name, argv, recipe, runs, capsys):
    recipes = importlib.import_module(name).RECIPES
    if name == "ppo":
        argv = argv.replace("--lr-schedule linear", "--scorer module:function")  # which does not count
    args, want = parse(recipes, argv.split()), vars(recipes[recipe][1])
    moved = {key for key, value in vars(args).items() if value != want[key]}
    assert {f"--{key.replace('_', '-')}" for key in moved} <= set(argv.split())
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"recipe {recipe} (") and "base" in recipes
    first = vars(recipes["tiny"][1])
    always = {"lr", "max_length", "batch_size", "minibatch_size"} & set(want)
    shown = {key: value for key, value in vars(args).items() if key in always or want[key] != first[key]}
    assert all(f" {key} {value}" in line for key, value in shown.items()) and "seed" not in line


@pytest.mark.parametrize(
    "name, argv",
    [
        ("rejection_sampling", "--policy other"),
        ("rejection_sampling", "--sft-dataset rows.jsonl"),
        ("ppo", "--ptx-dataset rows.jsonl"),
        ("dpo_iterative", "--offline-data pairs.jsonl"),
        ("ppo", "--seed 1"),
    ],
)
def test_every_data_or_model_flag_and_non_tiny_default_selects_the_recipe(runs, name, argv):
    Path("runs").mkdir()
    Path("other").rename("runs/sft") if name == "ppo" else None  # --model's default
    recipes = importlib.import_module(name).RECIPES
    assert parse(recipes, [*argv.split(), "--dataset", "tiny"]).lr == recipes["base"][1].lr


@pytest.mark.parametrize(
    "name, argv, says",
    [
        *((name, "--model other", "--model other together with the tiny world's") for name in processes.SCRIPTS),
        *((name, "base --model other", "Name your data with --dataset") for name in processes.SCRIPTS),
        ("dpo_iterative", "--offline-data pairs.jsonl --iterations 1", "--offline-data pairs.jsonl"),
        ("dpo_iterative", "--offline-data pairs.jsonl --iterations 0 --eval-prompts 0", None),
        ("ppo", "tiny --rehearsal-data rows.jsonl", None),
        ("rejection_sampling", "rest --model other", "--model other"),
        ("rejection_sampling", "--policy other", "--policy other"),
        ("sft", "--eval-dataset rows.jsonl", "--eval-dataset rows.jsonl"),
        ("common.programs.rehearsal", "--model other", "--model other"),
        ("common.programs.evaluate", "--policies mine=other --reference mine", "--policies other"),
        ("common.programs.evaluate", "--policies mine=a dataset --reference mine", None),
        ("common.programs.evaluate", "--scorers ORG/RM", "--scorers ORG/RM"),
        ("common.programs.evaluate", "--scorers common.data.tiny:gold_scorer gold_labeler=tiny", None),
        ("common.programs.evaluate", f"--scorers my.py:judge=Rate:{'x' * 300} gold_labeler=tiny", None),
        ("common.programs.ai_feedback", "label --model other", "--model other"),
        ("ppo", "--model a", None),
        ("sft", "--model at_12:30", "--model at_12:30"),  # a folder, no function
    ],
)
def test_own_data_or_models_require_a_data_set_of_their_own(runs, name, argv, says):
    module = importlib.import_module(name)
    recipes = getattr(module, "RECIPES", {"rows": ("", module.Args())})
    if says is None:
        parse(recipes, argv.split())
    else:
        with pytest.raises(InputError, match=re.escape(says)):
            parse(recipes, argv.split())
    parse(recipes, [*argv.split(), "--dataset", "tiny"])  # one who means it can say so


@pytest.mark.parametrize("name", ["ppo", "rejection_sampling", "dpo_iterative", "common.programs.evaluate"])
@pytest.mark.parametrize("there, refused", [(None, False), ("a", True), ("other", False)])
def test_the_tiny_worlds_reward_model_does_not_score_other_models_by_default(runs, name, there, refused):
    """a is a run from tiny, other is not; each may lie in runs/reward, the default of --scorer. A folder that is
    not there is reported when it is loaded."""
    module = importlib.import_module(name)
    recipes = getattr(module, "RECIPES", {"rows": ("", module.Args())})
    Path("mine").mkdir()
    write_json("mine/config.json", {"vocab_size": 500})
    Path("runs").mkdir()
    if there:
        Path(there).rename("runs/reward")
    model = ["--policies", "mine", "--reference", "mine"] if "evaluate" in name else ["--model", "mine"]
    argv = [*model, "--dataset", "rows.jsonl"]
    if refused:
        with pytest.raises(InputError, match="mine: name a --scorer; the default, runs/reward, is from the tiny world"):
            parse(recipes, argv)
    else:
        parse(recipes, argv)
    parse(recipes, [*argv, "--scorer", "runs/reward"])  # one who means it can say so
    for recipe in [recipe for recipe, (_, args) in recipes.items() if args.scorer != "runs/reward"]:
        parse(recipes, [recipe, *argv])


def test_help_shows_the_defaults_of_the_recipe_that_the_command_would_take(runs, capsys):
    recipes = importlib.import_module("ppo").RECIPES
    for argv in (["--model", "other", "--help"], ["base", "-h"], ["--help"]):
        with pytest.raises(SystemExit):
            parse(recipes, argv)
        shown = " ".join(capsys.readouterr().out.split())
        recipe = "tiny" if argv == ["--help"] else "base"
        assert re.search(rf"--max-length INT .{{0,100}}default: {recipes[recipe][1].max_length}\)", shown)
        assert f"those of {recipe}" in shown


LLAMA_3 = {  # they share tokens, and Llama 3's template, which the first one is given
    "meta-llama/Meta-Llama-3-8B",
    "meta-llama/Meta-Llama-3-8B-Instruct",
    "RLHFlow/LLaMA3-SFT",
    "sfairXC/FsfairX-LLaMA3-RM-v0.1",
}


def test_recipes_of_one_paper_chain_and_stay_within_limits():
    scripts = {name: importlib.import_module(name) for name in processes.SCRIPTS}
    of_runs = {f"runs/{name}": script.RECIPES for name, script in scripts.items()}
    downloads = {}  # by recipe
    for script in scripts.values():
        for name, (_, args) in script.RECIPES.items():
            getattr(script, "check", check_flags)(args)
            for model in (args.model, getattr(args, "scorer", "tiny")):
                if model not in of_runs:
                    downloads.setdefault(name, set()).add(model)
                elif name not in ("rest", "zephyr", "dpo", "rlhf_workflow_offline"):  # no scorer is used
                    assert name in of_runs[model]
    assert downloads.pop("tiny") == {"tiny"} and downloads.pop("rlhf_workflow") == LLAMA_3 | {"tiny"}
    assert len(downloads.pop("llama2") - {"tiny"}) == 2  # sft.py begins with the base model
    others = "base large qwen advantage_model zephyr rlhf_workflow_offline dpo rlaif constitutional summarize"
    assert set(downloads) == {*others.split(), "rlhf_workflow_preference"}
    assert all(len(models - {"tiny"}) == 1 for models in downloads.values())  # PPO wants its very template


# -- check_flags -------------------------------------------------------------------------
LIMITS = [  # name, the last value that is right, one that is not, what is wanted
    ("iterations", 0, -1, "0 or more"),
    ("prompts_per_iteration", 1, 0, "1 or more"),
    ("slots", 1, 0, "1 or more"),
    ("max_new_tokens", 1, 0, "1 or more"),
    ("max_length", 2, 1, "2 or more"),
    ("lr_decay", 1e-9, 0.0, "more than 0"),
    ("epochs", 1e-9, 0.0, "more than 0, and finite"),
    ("epochs", 1e9, float("inf"), "more than 0, and finite"),
    ("temperature", 0.0, -0.1, "0 or more"),
    ("warmup_ratio", 1.0, 1.1, "0 to 1"),
    ("warmup_ratio", 0.0, -0.1, "0 to 1"),
    ("lr_decay", 2.0, float("nan"), "more than 0"),
    ("of_no_list", 0, -1, "0 or more"),
]


@pytest.mark.parametrize("name, right, wrong, wanted", LIMITS)
def test_a_number_out_of_range_is_named_with_its_limits(name, right, wrong, wanted):
    check_flags(SimpleNamespace(**{name: right}))
    check_flags(SimpleNamespace(**{name: None}))  # not given, for prompts_per_iteration: all
    with pytest.raises(InputError) as error:
        check_flags(SimpleNamespace(**{name: wrong}))
    assert str(error.value) == f"--{name.replace('_', '-')} {wrong}: expected {wanted}"


def test_a_scripts_limits_are_checked_after_the_common_ones():
    args = SimpleNamespace(top_p=2.0, slots=4)
    check_flags(args, ("top_p", True, "at most 1"))
    check_flags(SimpleNamespace(threshold=-1, name="-1", flag=False))  # no limits
    with pytest.raises(InputError, match="^--top-p 2.0: expected at most 1$"):
        check_flags(args, ("slots", True, "x"), ("top_p", False, "at most 1"))


# -- launch ------------------------------------------------------------------------------
def ends_with(monkeypatch, capsys, main, *argv):
    monkeypatch.setattr(sys, "argv", ["x.py", *argv])
    with pytest.raises(SystemExit) as stop:
        launch(main, RECIPES)
    return stop.value.code, capsys.readouterr()


def raises(error):
    def main(args):
        raise error

    return main


def test_launch_passes_the_arguments_and_ends_with_0(monkeypatch, capsys):
    seen = []
    code, output = ends_with(monkeypatch, capsys, seen.append, "large", "--lr", "7")
    assert code == 0 and seen == [Args(lr=7.0, packing=False)] and output.err == ""


@pytest.mark.parametrize(
    "error",
    [kind("a file:\n  line 3\nis wrong") for kind in (InputError, OSError, torch.OutOfMemoryError)],
    ids=["InputError", "OSError", "OutOfMemoryError"],
)
def test_a_user_error_is_one_line_and_code_2(monkeypatch, capsys, error):
    code, output = ends_with(monkeypatch, capsys, raises(error))
    assert code == 2 and output.err.splitlines() == ["error: a file: line 3 is wrong"]


def test_a_bug_is_a_traceback_and_code_1(monkeypatch, capsys):
    code, output = ends_with(monkeypatch, capsys, raises(KeyError("oops")))
    assert code == 1 and "Traceback" in output.err and "oops" in output.err and "[rank 0]" in output.err


@pytest.mark.parametrize("left, said", [([], "nothing is saved yet"), (["checkpoint/latest"], "--resume")])
def test_ctrl_c_reports_the_last_checkpoint_and_is_code_130(monkeypatch, capsys, tmp_path, left, said):
    def main(args):
        Run(Args(output_dir=str(tmp_path / "run")), "sft").begin(plan="1 step", held_out=None)
        leave(tmp_path / "run", *left)
        raise KeyboardInterrupt

    code, output = ends_with(monkeypatch, capsys, main)
    assert code == 130 and said in output.err and "Traceback" not in output.err
    assert output.err.count("\n") == 1 and ("--resume" in output.err) == bool(left)


def test_an_old_runs_files_are_not_what_an_interrupted_one_saved(monkeypatch, capsys, tmp_path):
    """Ctrl-C while data and models are loaded: what is in the folder then is of the run to be replaced, or resumed."""
    old = Args(output_dir=str(tmp_path / "run"))
    Run(old, "sft").begin(plan="1 step", held_out=None)
    leave(tmp_path / "run", "checkpoint/latest")

    def main(args):
        Run(args, "sft")
        raise KeyboardInterrupt

    folder = ["--output-dir", old.output_dir]
    code, output = ends_with(monkeypatch, capsys, main, *folder, "--overwrite")
    assert code == 130 and "nothing is saved yet" in output.err and "--resume" not in output.err
    code, output = ends_with(monkeypatch, capsys, main, *folder, "--resume")
    assert code == 130 and f"--resume continues from what is saved in {old.output_dir}" in output.err


def test_a_notebooks_output_does_not_end_a_run(monkeypatch, capsys):
    """ipykernel's has no reconfigure."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    code, _ = ends_with(monkeypatch, capsys, lambda args: print("done"))
    assert code == 0


def test_text_that_the_console_cannot_encode_does_not_end_a_run(monkeypatch, capsys):
    console = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", console)
    code, _ = ends_with(monkeypatch, capsys, lambda args: print("\u2713 done"))
    assert code == 0 and console.buffer.getvalue() == b"? done\n"


@pytest.mark.parametrize("argv, code", [(["--help"], 0), (["--lr", "fast"], 2)])
def test_help_ends_with_0_and_usage_errors_with_2(monkeypatch, capsys, argv, code):
    assert ends_with(monkeypatch, capsys, raises(AssertionError("main ran")), *argv)[0] == code


@pytest.mark.parametrize("name", processes.SCRIPTS[1:])  # sft.py needs nothing
def test_a_bare_command_without_a_run_of_sft_is_one_line(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and line.startswith("error: runs/sft: ") and "`python sft.py`" in line
    assert not list(tmp_path.iterdir())


# -- start_run ---------------------------------------------------------------------------
def begin(folder, stage="sft", **options):
    args = Args(output_dir=str(folder), **options)
    state = find_run(args)
    if state != "finished":
        start_run(args, stage, state)
    return state


def leave(folder, *names):
    """Write these files of a run."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"stage": "sft", "args": {}}')
    if "checkpoint/latest" in names:
        checkpoints.save_checkpoint(folder / "checkpoint", 1, {}, {})


OUTPUT = ["model/config.json", "model.tmp/config.json", "checkpoint/step_1/state.json", "metrics.jsonl"]
OUTPUT += ["samples.jsonl", "a.png", "args.json"]
UNFINISHED, FINISHED = [*OUTPUT, "checkpoint/latest"], [*OUTPUT, "checkpoint/latest", "summary.json"]


def test_a_new_run_writes_args_json_with_arguments_versions_git_and_stage(tmp_path):
    assert begin(tmp_path / "a" / "b", stage="reward", lr=0.25) is None
    written = json.loads((tmp_path / "a" / "b" / "args.json").read_text())
    assert written["stage"] == "reward" and written["world_size"] == 1 and written["command"] == sys.argv
    given = {"output_dir": str(tmp_path / "a" / "b"), "lr": 0.25, "max_steps": None, "packing": True}
    given["save_dtype"] = "float32"
    assert written["args"] == {**given, "layers": [1, 2], "resume": False, "overwrite": False}
    assert written["python"] == sys.version.split()[0]
    assert [written[x] for x in ("device", "compute_dtype", "attention")] == ["cpu", "float32", "default"]
    for name in ("torch", "transformers"):
        assert written["versions"][name] == importlib.metadata.version(name)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    assert written["git"] == (head.stdout.strip() if head.returncode == 0 else None)


def test_changed_data_files_are_reported_on_resume(tmp_path, capsys):
    one, two, run = tmp_path / "one.jsonl", tmp_path / "two.jsonl.gz", str(tmp_path / "run")
    one.write_text("1\n")
    two.write_bytes(b"22")
    given = {"output_dir": run, "offline_data": f"{one}:0.7, {two}:.3,org/name[train]", "model": "org/name"}
    start_run(Inputs(**given), "dpo_iterative", None)
    begun = json.loads((tmp_path / "run/args.json").read_text())["began_with"]
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (one, two)]
    assert begun["content of --offline-data"] == [[[name, []] for name in (*hashes, "org/name[train]")]]
    leave(tmp_path / "run", "pool.jsonl")
    start_run(Inputs(**given, resume=True), "dpo_iterative", "resume")
    assert capsys.readouterr().out == ""
    one.write_text("2\n")
    start_run(Inputs(**given, resume=True), "dpo_iterative", "resume")
    assert capsys.readouterr().out == "resuming with another content of --offline-data\n"
    copy = shutil.move(one, tmp_path / "elsewhere.jsonl")
    given["offline_data"] = given["offline_data"].replace(str(one), str(copy))
    start_run(Inputs(**given, resume=True), "dpo_iterative", "resume")
    (line,) = capsys.readouterr().out.splitlines()  # of the name alone
    assert line.startswith("resuming with another offline_data: ")
    given["offline_data"] = given["offline_data"].replace(":0.7", "?score>=2:0.7")
    start_run(Inputs(**given, resume=True), "dpo_iterative", "resume")
    assert "resuming with another content of --offline-data\n" in capsys.readouterr().out


@pytest.mark.parametrize("left, word", [(FINISHED, "finished run"), (UNFINISHED, "unfinished run")])
def test_an_existing_run_is_an_error_that_names_both_flags(tmp_path, left, word):
    leave(tmp_path, *left)
    with pytest.raises(InputError) as error:
        begin(tmp_path)
    assert all(text in str(error.value) for text in (str(tmp_path), word, "--output-dir", "--overwrite"))
    assert all((tmp_path / name).exists() for name in left)


@pytest.mark.parametrize("left", [FINISHED, UNFINISHED])
def test_overwrite_removes_only_a_runs_outputs(tmp_path, left):
    leave(tmp_path, *left, "notes.txt")
    assert begin(tmp_path, overwrite=True) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["args.json", "lock", "notes.txt"]


POOL = ["args.json", "pool.jsonl", "versions/1/config.json", "metrics.jsonl"]  # sampled, never a checkpoint


def test_a_run_that_has_a_pool_only_is_unfinished(tmp_path):
    leave(tmp_path, *POOL)
    with pytest.raises(InputError, match="(?s)unfinished run .--resume.*--overwrite"):
        begin(tmp_path)
    assert begin(tmp_path, resume=True) == "resume"
    assert all((tmp_path / name).exists() for name in POOL)
    assert begin(tmp_path, overwrite=True) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["args.json", "lock"]


@dataclass
class Inputs(Args):
    model: str = "tiny"
    policy: str | None = None
    scorer: str = "common.data.tiny:gold_scorer"
    pool: str | None = None
    reference: Literal["sft", "last"] | str = "sft"
    enhancer: Literal["previous"] | str | None = None
    offline_data: str | None = None
    scorers: tuple[str, ...] = ()
    also: list[str] | None = None


INPUTS = ["model", "policy", "scorer", "pool", "reference", "enhancer", "offline_data"]


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("relative", [False, True])
def test_overwrite_refuses_when_an_input_lies_inside(name, relative, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    leave(folder, *FINISHED, *POOL)
    (tmp_path / "run beside").mkdir()
    path = lambda inside: inside if relative else str(tmp_path / inside)
    for inside in ("run", "run/versions/1", "run/../run/pool.jsonl"):
        args = Inputs(output_dir=str(folder), overwrite=True, **{name: path(inside)})
        with pytest.raises(
            InputError, match=f"this run would remove --{name.replace('_', '-')} .*before it is read"
        ):
            find_run(args)
    assert all((folder / left).exists() for left in (*FINISHED, *POOL))
    for outside in ("run beside", "run/../pool.jsonl", "."):
        args = Inputs(output_dir=str(folder), overwrite=True, **{name: path(outside)})
        assert find_run(args) is None
    args = Inputs(output_dir=str(folder), resume=True, **{name: path("run/versions/1")})
    assert find_run(args) == "finished"  # nothing is removed then


def test_a_finished_run_of_another_command_is_not_taken_for_this_ones_result(tmp_path, capsys):
    leave(tmp_path, *FINISHED)
    old = {"model": "tiny", "reference": "sft", "scorers": [], "output_dir": str(tmp_path)}
    write_json(tmp_path / "args.json", {"stage": "ppo", "args": old})
    args = Inputs(model="other", output_dir=str(tmp_path), resume=True)
    assert find_run(args, "ppo") == "finished"
    assert "already finished, by ppo; changed and not used: model: 'tiny' -> 'other'\n" in capsys.readouterr().out
    with pytest.raises(InputError, match="was finished by ppo, not by sft. Use another --output-dir"):
        find_run(args, "sft")


FORMS = [
    ("scorers", ("ours=a", "theirs=run/model")),
    ("scorers", ("run",)),
    ("also", ["a", "run/pool.jsonl"]),
    ("scorer", "common.programs.pairwise:oracle=run"),
    ("offline_data", "a:0.5, run/pool.jsonl?question=prompt:0.5"),
    ("offline_data", "run/model/a=b,c.jsonl:0.5"),
    ("model", "./link"),
]


@pytest.mark.parametrize("flag, value", FORMS, ids=[str(value) for _, value in FORMS])
def test_an_input_inside_output_dir_is_refused_in_every_form_of_a_flag(flag, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    leave(tmp_path / "run", *FINISHED, "pool.jsonl")
    (tmp_path / "link").symlink_to("run/model")
    with pytest.raises(InputError, match=f"would remove --{flag.replace('_', '-')} .*before it is read"):
        find_run(Inputs(output_dir="run", overwrite=True, **{flag: value}))
    assert all((tmp_path / "run" / name).exists() for name in FINISHED)


def test_an_input_inside_an_unfinished_run_is_refused(tmp_path):
    """A run without a checkpoint starts again without a flag, and its files are removed."""
    leave(tmp_path / "run", "args.json", "rehearsal.jsonl")
    for resume in (False, True):
        args = Inputs(
            output_dir=str(tmp_path / "run"), offline_data=str(tmp_path / "run" / "rehearsal.jsonl")
        )
        args.resume = resume
        with pytest.raises(InputError, match="this run would remove --offline-data .*before it is read"):
            find_run(args)
    beside = Inputs(output_dir=str(tmp_path / "run"), offline_data=str(tmp_path / "run" / "my_pairs.jsonl"))
    assert find_run(beside) is None  # a file that no run writes stays
    leave(tmp_path / "run", "checkpoint/latest")
    assert find_run(args) == "resume"  # nothing is removed then


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("left", [[], OUTPUT[1:], ["args.json", "versions/1/config.json"]])
def test_a_run_without_pool_or_checkpoint_starts_again(tmp_path, left, resume):
    leave(tmp_path, *left)
    assert begin(tmp_path, resume=resume) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["args.json", "lock"]


def test_a_model_without_a_summary_is_replaced_only_with_overwrite(tmp_path):
    """Somebody removed summary.json, or a crash came just before it and there was no checkpoint."""
    leave(tmp_path, *OUTPUT)
    with pytest.raises(InputError, match="holds a model but no summary.json. Use --overwrite"):
        begin(tmp_path)
    assert (tmp_path / "samples.jsonl").exists()
    assert begin(tmp_path, resume=True) is None  # which replaces it at its end
    assert sorted(p.name for p in tmp_path.iterdir()) == ["args.json", "lock", "model"]
    assert begin(tmp_path, overwrite=True) is None and not (tmp_path / "model").exists()


@pytest.mark.parametrize("layout", [{}, {"layout": 0}])
def test_a_checkpoint_of_another_layout_is_refused_before_anything_is_loaded(tmp_path, layout):
    leave(tmp_path, *UNFINISHED)
    state = {"step": 1, **layout}
    (tmp_path / "checkpoint/step_1/state.json").write_text(json.dumps(state))
    for load in (
        lambda: begin(tmp_path, resume=True),
        lambda: checkpoints.load_checkpoint(tmp_path / "checkpoint", {}),
    ):
        with pytest.raises(InputError, match="step_1/state.json is from another version of these scripts.*--overwrite"):
            load()
    assert begin(tmp_path, overwrite=True) is None


@pytest.mark.parametrize(
    "ranks, line", [(1, "Traceback"), (2, "error [rank 0]: another rank has ended or is stuck")]
)
@pytest.mark.parametrize(
    "said",
    [
        "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "wait timeout after 86400000ms, keys: /default_pg/0//barrier/0",
    ],
)
def test_a_lost_connection_is_blamed_on_another_rank_only_if_there_are_others(
    said, ranks, line, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["x.py"])
    monkeypatch.setattr(dist, "world_size", lambda: ranks)
    monkeypatch.setattr(dist, "shutdown", lambda code: None)
    launch(raises(RuntimeError(said)), RECIPES)
    said = capsys.readouterr().err
    assert line in said and (ranks == 1 or "Traceback" not in said and "nothing is saved yet" in said)


@pytest.mark.parametrize("dtype, line", [("bfloat16", "error: a layer"), ("float32", "Traceback")])
def test_a_family_that_cannot_compute_in_bfloat16_is_one_line(dtype, line, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x.py", "--compute-dtype", dtype])
    monkeypatch.setattr(dist, "compute_dtype", None)  # and back afterwards
    monkeypatch.setattr(dist, "shutdown", lambda code: None)
    a, b = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bfloat16)
    launch(lambda args: a @ b, RECIPES)
    said = capsys.readouterr().err
    assert line in said and ("--compute-dtype float32" in said) == (dtype == "bfloat16")


def test_resuming_another_scripts_run_is_an_error_before_anything_is_written(tmp_path):
    leave(tmp_path, "checkpoint/latest")
    (tmp_path / "args.json").write_text('{"stage": "ppo", "args": {}}')
    before = sorted(["lock", *(path.name for path in tmp_path.rglob("*"))])
    args = Args(output_dir=str(tmp_path), resume=True)
    assert find_run(args) == "resume"
    with pytest.raises(InputError, match="was started with another script: 'ppo' -> 'sft'"):
        start_run(args, "sft", "resume")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert '"stage": "ppo"' in (tmp_path / "args.json").read_text()


@pytest.mark.parametrize("name", ["a.png", "pool.jsonl", "config.json"])  # of a model: model/ in it would be ignored
@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}])
def test_foreign_files_are_not_removed(tmp_path, name, options):
    leave(tmp_path, name)
    with pytest.raises(InputError, match=f"{name} is in the way"):
        begin(tmp_path, **options)
    with pytest.raises(InputError, match=f"{name} is in the way"):  # as --output-dir itself
        begin(tmp_path / name, **options)
    assert (tmp_path / name).exists()


OF_OTHERS = ["{}", "[]", '{"lr": 0.1}', '{"stage": 1, "args": {}}', '{"stage": "sft", "args": []}', "", "\0"]


@pytest.mark.parametrize("content", OF_OTHERS)
@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}])
def test_a_folder_with_a_foreign_args_json_loses_nothing(tmp_path, content, options):
    for names in (["args.json"], ["args.json", "model/config.json", "versions/1", "a.png", "summary.json"]):
        leave(tmp_path, *names)
        (tmp_path / "args.json").write_text(content)
        with pytest.raises(InputError, match=r"args.json: .*another --output-dir\.$"):
            begin(tmp_path, **options)
        assert all((tmp_path / name).exists() for name in names)
        assert (tmp_path / "args.json").read_text() == content


@pytest.mark.parametrize("options", [{"overwrite": True}, {"resume": True}])
def test_a_link_instead_of_an_output_is_refused_before_anything_is_removed(tmp_path, options):
    leave(tmp_path / "run", "args.json", "summary.json" if "overwrite" in options else "metrics.jsonl")
    (tmp_path / "elsewhere").mkdir()
    for name in ("versions", "best"):  # the second one's place is not there
        (tmp_path / "run" / name).symlink_to(tmp_path / ("elsewhere" if name == "versions" else "gone"))
        before = sorted(path.name for path in (tmp_path / "run").iterdir())
        with pytest.raises(InputError, match=f"{name} is a link"):
            begin(tmp_path / "run", **options)
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
        (tmp_path / "run" / name).unlink()


# -- after the last round --------------------------------------------------------------------
def test_adamws_moments_are_freed_before_the_last_evaluation_which_may_load_another_model():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).backward()
    optimizer.step()
    run = SimpleNamespace(dtype=torch.float32, modules={"model": (model, optimizer)}, state={}, round_weights=id)
    assert len(optimizer.state) == 2
    assert Run.evaluate_export(run, model, lambda model: {"moments": len(optimizer.state)}) == {"moments": 0}


# -- two processes, one folder -----------------------------------------------------------
HOLD = """
import sys
from test_run import Args, begin
begin(sys.argv[1])
print("it began", flush=True)
sys.stdin.read()
"""


def test_a_second_process_in_a_folder_is_refused_until_the_first_one_has_ended(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(folder)]
    options = {"cwd": ROOT / "tests", "env": processes.ENV, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **options) as first:
        assert first.stdout.readline() == "it began\n"
        before = (folder / "args.json").read_bytes()
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(InputError, match="in use by another process.*another --output-dir"):
                find_run(Args(output_dir=str(folder), **options))  # before anything is loaded
        with pytest.raises(InputError, match="in use by"):  # it looked before the first one began
            start_run(Args(output_dir=str(folder)), "sft", None)
        assert (folder / "args.json").read_bytes() == before
        first.kill()
    assert begin(folder) is None  # a lock ends with its process


def test_a_run_finished_by_another_process_meanwhile_is_not_removed(tmp_path):
    args = Args(output_dir=str(tmp_path))
    state = find_run(args)
    leave(tmp_path, *FINISHED)  # the other one
    with pytest.raises(InputError, match="holds a finished run. Use --overwrite"):
        start_run(args, "sft", state)
    args.resume = True
    with pytest.raises(InputError, match="another command changed .* after this one started"):
        start_run(args, "sft", state)
    assert all((tmp_path / name).exists() for name in FINISHED)


def test_a_run_starts_on_a_file_system_without_locks(tmp_path, monkeypatch):
    import fcntl

    def unknown(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unknown)
    assert begin(tmp_path / "run") is None and (tmp_path / "run" / "args.json").exists()


def test_the_commit_is_found_for_any_characters_in_the_path(tmp_path, monkeypatch):
    folder = tmp_path / "it's $(touch \"x\") here"
    for command in ("init -q", "-c user.name=a -c user.email=b commit -q --allow-empty -m one"):
        folder.mkdir(exist_ok=True)
        subprocess.run(["git", *command.split()], cwd=folder, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("common.run.run.__file__", str(folder / "run.py"))
    begin(tmp_path / "run")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True)
    assert json.loads((tmp_path / "run/args.json").read_text())["git"] == head.stdout.strip()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([folder.name, "run"])
    monkeypatch.setenv("PATH", "")  # without git
    begin(tmp_path / "other")
    assert json.loads((tmp_path / "other/args.json").read_text())["git"] is None


def test_resume_names_each_argument_that_changed_and_only_those(tmp_path, capsys):
    begin(tmp_path, lr=0.5)
    leave(tmp_path, "checkpoint/latest")
    capsys.readouterr()
    assert begin(tmp_path, lr=0.5, resume=True) == "resume"
    assert capsys.readouterr().out == ""  # --resume itself, and tuples that JSON makes lists, are no change
    begin(tmp_path, lr=0.25, max_steps=3, layers=(1, 3), resume=True)
    lines = capsys.readouterr().out.splitlines()
    changes = ("layers: [1, 2] -> [1, 3]", "lr: 0.5 -> 0.25", "max_steps: None -> 3")
    assert lines == [f"resuming with another {change}" for change in changes]


# -- whole files -------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, kind):
    path, rows = tmp_path / f"a.{kind}", [{"x": "é\n a\u2028b\u2029c\u0085d"}, {"y": 2.5}]
    write, read = getattr(files, f"write_{kind}"), getattr(files, f"read_{kind}")
    rows = rows if kind == "jsonl" else rows[0]
    write(path, rows)
    with pytest.raises(TypeError):
        write(path, [{"x": object()}])
    assert read(path) == rows and (kind == "jsonl" or [p.name for p in tmp_path.iterdir()] == ["a.json"])


# -- metrics.jsonl -----------------------------------------------------------------------
def test_log_appends_one_readable_object_per_step(tmp_path):
    log = logs.Metrics(tmp_path)
    for step in (1, 2, 3):
        log.log(step, step // 2, **{"loss/nll": 1 / step})
        rows = files.read_jsonl(tmp_path / "metrics.jsonl")
        assert len(rows) == log.n_rows == step
    assert [list(row) for row in rows] == [["step", "iteration", "time_s", "loss/nll"]] * 3
    values = [(row["step"], row["iteration"], row["loss/nll"]) for row in rows]
    assert values == [(1, 0, 1), (2, 1, 1 / 2), (3, 1, 1 / 3)]


def test_laps_are_in_one_row_only(tmp_path):
    run = Run(Args(output_dir=str(tmp_path / "run")), "sft")
    run.metrics = logs.Metrics(tmp_path)
    run.begin_round()
    run.lap("sample")
    for step in (1, 2):  # of one round: after a skipped iteration, an evaluation follows
        run.log({}, step)
    assert ["time/sample_s" in row for row in files.read_jsonl(tmp_path / "metrics.jsonl")] == [True, False]


def test_resuming_removes_later_rows_even_broken_ones_and_continues_the_clock(tmp_path):
    log = logs.Metrics(tmp_path)
    log.start -= 100  # the run is 100 seconds old
    for step in (1, 2, 3):
        log.log(step, 0)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "iter')  # killed in the middle of a row
    again = logs.Metrics(tmp_path, keep_rows=2)
    again.log(3, 0)
    rows = files.read_jsonl(path)
    assert [row["step"] for row in rows] == [1, 2, 3] and again.n_rows == 3
    assert rows[1]["time_s"] <= rows[2]["time_s"] < 110 and rows[1]["time_s"] >= 100


def test_progress_is_a_bar_in_a_terminal_that_starts_where_a_run_resumes(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.progress(10, 4, "sft") as bar:
        bar.update()
        assert (bar.n, bar.total) == (5, 10)
    assert list(progress.progress(3, 0, "tokenise", "abc", lines=0)) == list("abc")
    output = capsys.readouterr()
    assert output.out == "" and "5/10" in output.err and "\r" in output.err


def test_progress_is_plain_lines_without_a_terminal(capsys, monkeypatch):
    """One line per twentieth of all steps, from the step that a run resumes at; no lines for rows."""
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    with progress.progress(200, 100, "sft") as bar:
        for step in range(101, 201):
            clock[0] += 1
            bar.set_postfix({"nll": f"{step / 100:.3g}"}, refresh=False)
            bar.update()
    lines = capsys.readouterr().err.split("\n")
    assert [line.split()[2] for line in lines if line] == [f"{n}/200" for n in range(110, 201, 10)]
    assert lines[2] == "sft:  65% 130/200 [00:30<01:10,  1.00step/s, nll=1.3]"
    assert not any("\r" in line for line in lines)
    assert list(progress.progress(10, 0, "tokenise", range(10), lines=False)) == [*range(10)]
    assert capsys.readouterr().err == ""


def test_only_rank_0_logs_and_shows_a_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    log = logs.Metrics(tmp_path)
    log.log(1, 0, x=1)
    progress.progress(10, 0, "sft").update()
    assert log.n_rows == 1 and not list(tmp_path.iterdir()) and capsys.readouterr().err == ""


def test_all_ranks_look_for_a_lock_if_rank_0_sees_one(tmp_path, monkeypatch):
    """A shared file system may show a new file to the others later: they must not skip a collective call."""
    asked = []
    gather = dist.gather
    monkeypatch.setattr(dist, "gather", lambda values: [True] if values == [False] else gather(values))
    monkeypatch.setattr("common.run.run._lock", asked.append)
    find_run(Inputs(output_dir=str(tmp_path / "run")))
    assert asked == [tmp_path / "run"]
