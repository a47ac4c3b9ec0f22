"""Parse the command line of a script: a recipe, and flags that change it; check the limits of numbers."""

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

LIMITS = {  # limit -> (its test, names of the arguments that have it); all other numbers: 0 or more
    "0 or more": (lambda x: x >= 0, ""),
    "1 or more": (
        lambda x: x >= 1,
        "batch_size micro_batch_size ptx_batch_size rehearsal_batch_size score_batch_size max_steps slots "
        "max_new_tokens max_pairs_per_prompt max_prompts max_rows prompts_per_iteration chunk_prompts "
        "chunk_rows offline_pairs chains clusters per_cluster responses revisions",
    ),
    "2 or more": (lambda x: x >= 2, "max_length"),
    "more than 0, and finite": (lambda x: 0 < x < float("inf"), "epochs"),
    "more than 0": (lambda x: x > 0, "bound ratio_clip lr_decay clip_ratio clip_value max_kl beta"),
    "0 to 1": (lambda x: 0 <= x <= 1, "warmup_ratio gamma lam safety_threshold"),
    "0 to 2^63 - 1": (lambda x: 0 <= x < 2**63, "seed"),
    "any": (lambda x: True, "threshold"),
}
# Each set holds the names of one flag, here and in other libraries. If a user gives one that the script does
# not have, the error names the one that it has
SYNONYMS = """model model_name_or_path; reference ref ref_model reference_model; lr learning_rate;
    scorer reward_fn reward_funcs reward_model reward_model_path; dataset dataset_name train_dataset;
    epochs num_train_epochs num_ppo_epochs; batch_size minibatch_size; n_samples n num_generations;
    micro_batch_size per_device_train_batch_size; max_new_tokens max_completion_length response_length;
    kl_coef beta kl; clip_ratio cliprange epsilon; eval_every eval_steps; save_every save_steps""".split(";")
FOREIGN_FLAGS = {  # flag of other libraries without a synonym here -> hint
    "gradient_accumulation_steps": "--batch-size (ppo.py: --minibatch-size) is the total per optimiser step",
    "max_steps": "use --iterations, the number of rounds of several optimiser steps",
    "warmup_steps": "use --warmup-ratio, a share of all steps",
    **dict.fromkeys(["true", "false"], "a flag that is on or off takes no value: --packing or --no-packing"),
}


@dataclasses.dataclass
class EveryCommand:
    columns: str | None = None
    """Columns of your data, renamed to those that are read: question=prompt,answer_a=chosen."""
    preview: int = 0
    """Number of examples to print, as they are trained on; the command then stops before loading a model."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of forward and backward. Default: bfloat16 on an accelerator that has it, else float32."""
    attention: str = "default"
    """Transformers' name of an implementation of attention. default: sdpa, or eager (docs/use/gpus.md)."""
    deterministic: bool = False
    """Deterministic kernels if torch has them: results repeat bit for bit, slower (docs/use/gpus.md)."""
    shard_size: int | None = None
    """Number of consecutive ranks that shard a model together, such as those of a node; default: all. AI
    labelers are not sharded."""
    generate_tensor_parallel: int = 1
    """Number of ranks on a node that share one copy of a model while it generates (docs/use/gpus.md); not of
    AI labelers, of which each rank has a whole one."""


def check_flags(args, *more):
    """Raise InputError for the first argument that is out of its limits.

    more: further checks of a script, (name of the argument, whether it is valid, valid values as text)."""
    limits = []
    for name, value in vars(args).items():
        if isinstance(value, (int, float)):
            special = [wanted for wanted, (_, names) in LIMITS.items() if name in names.split()]
            wanted = special[0] if special else "0 or more"
            limits.append((name, LIMITS[wanted][0](value), wanted))
    for name, right, wanted in [*limits, *more]:
        if not right:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected {wanted}")


def parse(recipes, argv=None):
    """Parse the command line `ppo.py [recipe] [--flag value ...]` and return the script's Args. The flags of
    EveryCommand are not part of Args; they are put into effect here.

    recipes: {name: (description, Args(...))}. Without a recipe, the command uses the first one, or `base`, if
      there is one, for a model or data that are not the tiny world's (not_tiny). The choice is printed."""
    argv = list(sys.argv[1:] if argv is None else argv)
    helps = [word for word in argv if word in ("-h", "--help")]  # printed once the recipe is chosen
    argv = [word for word in argv if word not in helps]
    named = bool(argv) and not argv[0].startswith("-")
    first = next(iter(recipes))
    name, why = (argv.pop(0), "as named") if named else (first, "model and data of the tiny world")
    if name not in recipes:
        raise InputError(f"unknown recipe {name!r}. Recipes: {', '.join(recipes)}. Flags start with --.")
    args, every = _parse_flags(recipes, name, argv)
    strange = not_tiny(args, recipes[first][1])
    if strange and "base" in recipes and not named:
        name = "base"
        why = f"{strange} is not from the tiny world; to use another recipe, name it first"
        args, every = _parse_flags(recipes, name, argv)
    if helps:
        _parse_flags(recipes, name, [*argv, "--help"])  # ends the process
    if not named or name != "tiny":  # a user who names tiny means it
        check_own_data(strange, args, argv)
    if "base" in recipes and dist.is_main():
        always = "model lr value_lr max_length max_new_tokens batch_size minibatch_size epochs"
        _, of_first = recipes[first]
        _, of_recipe = recipes[name]
        changed = [key for key, value in vars(of_recipe).items() if value != getattr(of_first, key)]
        values = [f"{key} {x}" for key, x in vars(args).items() if key in [*always.split(), *changed]]
        print(f"recipe {name} ({why}): {', '.join(values)}")
    if every.preview and not hasattr(args, "eval_dataset"):  # only those that train hold data out
        raise InputError("--preview shows training examples. Use it with a script that trains on the data.")
    splits.n_shown = every.preview
    dist.compute_dtype = every.compute_dtype
    dist.attention = every.attention
    n = every.generate_tensor_parallel
    of_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if n < 1 or of_node % n:
        wanted = f"expected a divisor of the {of_node} process(es) that torchrun starts on a node"
        raise InputError(f"--generate-tensor-parallel {n}: {wanted}")
    if 0 < torch.cuda.device_count() <= int(os.environ.get("LOCAL_RANK", 0)):
        raise InputError(f"--nproc-per-node {of_node}: this node has {torch.cuda.device_count()} GPU(s)")
    dist.ranks_per_copy = n
    dist.split_layers = tensor_parallel.split
    dist.shard_size = every.shard_size
    n_ranks = int(os.environ.get("WORLD_SIZE", 1))
    if every.shard_size is not None and (every.shard_size < 2 or n_ranks % every.shard_size):
        wanted = f"expected a divisor of the {n_ranks} process(es) that torchrun starts, 2 or more"
        raise InputError(f"--shard-size {every.shard_size}: {wanted}")
    if every.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True, warn_only=True)
        for kind in ("flash", "mem_efficient", "cudnn"):  # they only warn if not deterministic
            getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    for key, spec in vars(args).items() if every.columns else ():
        if spec and key.endswith(("dataset", "_data")) and not mixtures.is_tiny(spec):
            mixtures.flags[spec] = f"--{key.replace('_', '-')}"
            setattr(args, key, mixtures.with_columns(spec, every.columns))
    return args


def check_own_data(strange, args, argv):
    """Raise InputError if a command names the user's own model or data (`strange`), but would take prompts or
    rows from the tiny world because --dataset is missing, or would be scored by the tiny world's reward model
    because --scorer is. Such a run would look like any other."""
    names = [word.split("=")[0] for word in argv]
    reads_prompts = getattr(args, "iterations", 1) or getattr(args, "eval_prompts", 1)  # offline DPO may not
    if strange and reads_prompts and mixtures.is_tiny(args.dataset) and "--dataset" not in names:
        mend = "Name your data with --dataset, or use --dataset tiny if you mean that."
        mend += " --eval-prompts 0 needs no prompts." * (getattr(args, "iterations", 1) == 0)
        raise InputError(f"{strange} together with the tiny world's data, the default of --dataset. {mend}")
    scorer = getattr(args, "scorer", None)  # as it is by default, unless it is unused
    unused = getattr(args, "scorers", ()) or getattr(args, "criterion", "score") != "score"  # of rehearsal
    unused = unused or {"--scorer", "--preview"} & {*names}
    of_model = strange and reads_prompts and strange.split()[0] in ("--model", "--policy", "--policies")
    if of_model and scorer and not unused and not mixtures.is_tiny(args.dataset) and _is_tiny_model(scorer):
        raise InputError(f"{strange}: name a --scorer; the default, {scorer}, is from the tiny world")


def not_tiny(args, defaults):
    """Return the first flag, with its value, that names data or a model outside the tiny world, or None. The
    tiny world's hyperparameters would ruin a pretrained model."""
    for name, value in vars(args).items():
        of_model = name in ("model", "policy", "policies", "scorers")
        of_data = name.endswith(("dataset", "_data"))
        words = [word.split("=")[-1] for word in value] if name in ("policies", "scorers") else [value]
        for word in words:
            # A default that does not exist is reported elsewhere
            missing = value == getattr(defaults, name) and not Path(str(word)).exists()
            if missing or not word:
                continue
            strange = of_data and not mixtures.is_tiny(word)
            # With a colon it is a function that scores, unless that is the name of a folder
            if strange or of_model and (":" not in word or os.path.exists(word)) and not _is_tiny_model(word):
                return f"--{name.replace('_', '-')} {word}"


def _is_tiny_model(name):
    """Return whether a model is tiny, or was trained from it (by the size of its vocabulary). True for
    `dataset`, which evaluate takes as a policy, too."""
    paths = [Path(name, "config.json"), Path(name, "model", "config.json")]
    sizes = [files.read_json(path, "Repair it, or name another model.").get("vocab_size") for path in paths]
    return name in ("tiny", "dataset") or len(tiny.WORDS) in sizes


def _parse_flags(recipes, name, argv):
    """Apply the flags of argv to a recipe and return (Args, EveryCommand).

    Raises InputError for an unknown flag, with the name of a similar one, or for an invalid value."""
    import tyro

    defaults = recipes[name][1]
    listing = "\n".join(f"  {key}: {text}" for key, (text, _) in recipes.items())
    all_flags = dataclasses.make_dataclass("_", [("script", type(defaults)), ("every_command", EveryCommand)])
    script = Path(sys.argv[0]).name
    base_help = ""
    if "base" in recipes and name != "base":
        base_help = f" For your own model or data the recipe is base: {script} base --help."
    description = f"First word: a recipe. The defaults below are those of {name}.{base_help}\n{listing}"
    options = {"prog": f"{script} {name}", "description": description}
    options.update(default=all_flags(defaults, EveryCommand()), config=[tyro.conf.OmitArgPrefixes])
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            given, unknown = tyro.cli(all_flags, args=argv, return_unknown_args=True, **options)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        # tyro prints its errors in a frame: keep the text
        raise InputError(" ".join(re.sub("[\u2500-\u257f|]|-{3,}", " ", box.getvalue()).split())) from None
    # The hint: that of FOREIGN_FLAGS, else a synonym that the script has, else the most similar flag
    if unknown:
        name = unknown[0].split("=")[0].removeprefix("--").replace("-", "_")
        same = [word for line in SYNONYMS if name in line.split() for word in line.split()]
        name = next((word for word in [name, *same] if hasattr(defaults, word)), name)
        near = difflib.get_close_matches(name, [*vars(given.script), *vars(given.every_command)], 1, 0.7)
        hint = f"did you mean --{near[0].replace('_', '-')}?" if near else "see --help"
        raise InputError(f"unknown argument {unknown[0]!r}: {FOREIGN_FLAGS.get(name.lower(), hint)}")
    return given.script, given.every_command
