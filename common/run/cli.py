"""The command line of a script: a recipe, flags that change it, and the limits of its numbers."""

import contextlib
import dataclasses
import difflib
import io
import os
import re
import sys
from pathlib import Path
from typing import Literal

import torch

from common import dist
from common.errors import InputError
from common.data import files, mixtures, splits, tiny
from common.loading import tensor_parallel

LIMITS = {  # what a number may be -> the test, and the names of arguments; all others: 0 or more
    "0 or more": (lambda x: x >= 0, ""),
    "1 or more": (
        lambda x: x >= 1,
        "batch_size micro_batch_size ptx_batch_size rehearsal_batch_size score_batch_size max_steps slots "
        "max_new_tokens max_pairs_per_prompt max_prompts max_rows prompts_per_iteration chunk_prompts "
        "chunk_rows offline_pairs chains clusters per_cluster responses revisions",
    ),
    "2 or more": (lambda x: x >= 2, "max_length"),
    "more than 0": (lambda x: x > 0, "epochs bound ratio_clip lr_decay clip_ratio clip_value max_kl beta"),
    "0 to 1": (lambda x: 0 <= x <= 1, "warmup_ratio gamma lam safety_threshold"),
    "0 to 2^63 - 1": (lambda x: 0 <= x < 2**63, "seed"),
    "any": (lambda x: True, "threshold"),
}
# Names of one flag here and elsewhere; a script has one of a set, which an error names
SYNONYMS = """model model_name_or_path; reference ref ref_model reference_model; lr learning_rate;
    scorer reward_fn reward_funcs reward_model reward_model_path; dataset dataset_name train_dataset;
    epochs num_train_epochs num_ppo_epochs; batch_size minibatch_size; n_samples n num_generations;
    micro_batch_size per_device_train_batch_size; max_new_tokens max_completion_length response_length;
    kl_coef beta kl; clip_ratio cliprange epsilon; eval_every eval_steps; save_every save_steps""".split(";")
FOREIGN_FLAGS = {  # a flag that is none here and has no synonym -> what does it
    "gradient_accumulation_steps": "--batch-size (ppo.py: --minibatch-size) is all rows of an optimiser step",
    "max_steps": "--iterations are rounds, of several optimiser steps each",
    "warmup_steps": "--warmup-ratio is a share of all steps",
    **dict.fromkeys(["true", "false"], "a flag that is on or off has no value: --packing or --no-packing"),
}


@dataclasses.dataclass
class EveryCommand:
    columns: str | None = None
    """Columns of your data under the names that are read: question=prompt,answer_a=chosen."""
    preview: int = 0
    """Print so many examples as they are trained on, and stop before a model is loaded."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Of forward and backward. None: bfloat16 where an accelerator has it, else float32."""
    attention: str = "default"
    """Implementation of attention, by transformers' name; default: sdpa, or eager (docs/use/gpus.md)."""
    deterministic: bool = False
    """Kernels whose results repeat bit for bit, where torch has such; slower (docs/use/gpus.md)."""
    generate_tensor_parallel: int = 1
    """Ranks of a node that hold one copy of a model together while it generates (docs/use/gpus.md)."""


def check_flags(args, *more):
    """InputError that names the first number of the arguments that is out of its limits.

    more: (name, whether it is right, what is wanted): limits of one script, or of several arguments."""
    limits = []
    for name, value in vars(args).items():
        if isinstance(value, (int, float)):
            special = [wanted for wanted, (_, names) in LIMITS.items() if name in names.split()]
            wanted = special[0] if special else "0 or more"
            limits.append((name, LIMITS[wanted][0](value), wanted))
    for name, right, wanted in [*limits, *more]:
        if not right:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)}: wanted {wanted}")


def parse(recipes, argv=None):
    """The script's Args from the command line: `ppo.py [recipe] [--flag value ...]`. A command that names no
    recipe takes the first of `recipes`, {name: (description, Args(...))}; where there is a recipe `base`,
    not_tiny decides between them, and what was taken is printed. What EveryCommand asks for is done."""
    argv = list(sys.argv[1:] if argv is None else argv)
    helps = [word for word in argv if word in ("-h", "--help")]  # printed last: of the recipe that is taken
    argv = [word for word in argv if word not in helps]
    named = bool(argv) and not argv[0].startswith("-")
    first = next(iter(recipes))
    name, why = (argv.pop(0), "as named") if named else (first, "the tiny world alone")
    if name not in recipes:
        raise InputError(f"unknown recipe {name!r}: there are {', '.join(recipes)}; flags start with --")
    args, every = _parse_flags(recipes, name, argv)
    strange = not_tiny(args, recipes[first][1])
    if strange and "base" in recipes and not named:
        name = "base"
        why = f"{strange} is not of the tiny world; for another one, name it first"
        args, every = _parse_flags(recipes, name, argv)
    if helps:
        _parse_flags(recipes, name, [*argv, "--help"])  # ends the process
    if not named or name != first:  # who names tiny means it
        check_own_data(strange, args, argv)
    if "base" in recipes and dist.is_main():
        always = "model lr value_lr max_length max_new_tokens batch_size minibatch_size epochs"
        _, of_first = recipes[first]
        _, of_recipe = recipes[name]
        changed = [key for key, value in vars(of_recipe).items() if value != getattr(of_first, key)]
        values = [f"{key} {x}" for key, x in vars(args).items() if key in [*always.split(), *changed]]
        print(f"recipe {name} ({why}): {', '.join(values)}")
    splits.n_shown = every.preview
    dist.compute_dtype = every.compute_dtype
    dist.attention = every.attention
    n = every.generate_tensor_parallel
    of_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if n < 1 or of_node % n:
        wanted = f"wanted a divisor of the {of_node} process(es) that torchrun starts on a node"
        raise InputError(f"--generate-tensor-parallel {n}: {wanted}")
    dist.ranks_per_copy = n
    dist.split_layers = tensor_parallel.split
    if every.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS reads when it starts
        torch.use_deterministic_algorithms(True, warn_only=True)
        for kind in ("flash", "mem_efficient", "cudnn"):  # attention that would only warn
            getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    for key, spec in vars(args).items() if every.columns else ():
        if spec and key.endswith(("dataset", "_data")) and not mixtures.is_tiny(spec):
            mixtures.flags[spec] = f"--{key.replace('_', '-')}"
            setattr(args, key, mixtures.with_columns(spec, every.columns))
    return args


def check_own_data(strange, args, argv):
    """InputError if a command names a model or data of the user's own (`strange`), but would take its prompts
    or rows from the tiny world because it does not name --dataset: such a run looks like any other."""
    names = [word.split("=")[0] for word in argv]
    reads_prompts = getattr(args, "iterations", 1) or getattr(args, "eval_prompts", 1)  # DPO may read none
    if strange and reads_prompts and mixtures.is_tiny(args.dataset) and "--dataset" not in names:
        mend = "give --dataset your data (--dataset tiny, if you do want that)"
        raise InputError(f"{strange} together with the tiny world's data, the default of --dataset: {mend}")


def not_tiny(args, defaults):
    """The first flag, with its value, whose data set, or model to train or to sample from, is not the tiny
    world's, whose numbers ruin a pretrained model; None if there is none."""
    for name, value in vars(args).items():
        of_model = name in ("model", "policy", "policies")
        of_data = name.endswith(("dataset", "_data"))
        words = [word.split("=")[-1] for word in value] if name == "policies" else [value]
        for word in words:
            # A default that is not there has an error of its own
            missing = value == getattr(defaults, name) and not Path(str(word)).exists()
            if missing or not word:
                continue
            strange = of_data and not mixtures.is_tiny(word)
            if strange or of_model and not _is_tiny_model(word):
                return f"--{name.replace('_', '-')} {word}"


def _is_tiny_model(name):
    """Whether it is the tiny model or was trained from it, which its vocabulary tells; `dataset` is none."""
    folders = [Path(name), Path(name, "model")]
    sizes = [files.read_json(folder / "config.json").get("vocab_size") for folder in folders]
    return name in ("tiny", "dataset") or len(tiny.WORDS) in sizes


def _parse_flags(recipes, name, argv):
    """(the recipe's Args, EveryCommand) with the flags of argv."""
    import tyro

    defaults = recipes[name][1]
    listing = "\n".join(f"  {key}: {text}" for key, (text, _) in recipes.items())
    all_flags = dataclasses.make_dataclass("_", [("script", type(defaults)), ("every_command", EveryCommand)])
    script = Path(sys.argv[0]).name
    base_help = ""
    if "base" in recipes and name != "base":
        base_help = f" With a model or data of your own it is base: {script} base --help."
    description = f"Recipes, first word. The defaults below are those of {name}.{base_help}\n{listing}"
    options = {"prog": f"{script} {name}", "description": description}
    options.update(default=all_flags(defaults, EveryCommand()), config=[tyro.conf.OmitArgPrefixes])
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            given, unknown = tyro.cli(all_flags, args=argv, return_unknown_args=True, **options)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise InputError(" ".join(re.sub("[\u2500-\u257f|]|-{3,}", " ", box.getvalue()).split())) from None
    if unknown:
        name = unknown[0].split("=")[0].removeprefix("--").replace("-", "_")
        same = [word for line in SYNONYMS if name in line.split() for word in line.split()]
        name = next((word for word in [name, *same] if hasattr(defaults, word)), name)
        near = difflib.get_close_matches(name, [*vars(given.script), *vars(given.every_command)], 1, 0.7)
        hint = f"did you mean --{near[0].replace('_', '-')}?" if near else "see --help"
        raise InputError(f"unknown argument {unknown[0]!r}: {FOREIGN_FLAGS.get(name.lower(), hint)}")
    return given.script, given.every_command
