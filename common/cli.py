"""The command line of a script: a recipe, flags that change it, and the limits of its numbers."""

import contextlib
import dataclasses
import difflib
import io
import math
import re
import sys
from pathlib import Path

from common import data, dist
from common.errors import InputError
from common.metrics import read_json

LIMITS = {  # what a number may be -> the test, and the arguments of any script that it holds for
    "1 or more": (
        lambda x: x >= 1,
        "batch_size micro_batch_size ptx_batch_size rehearsal_batch_size score_batch_size max_steps slots "
        "max_new_tokens max_pairs_per_prompt max_prompts max_rows prompts_per_iteration "
        "chunk_prompts chunk_rows offline_pairs chains clusters per_cluster",
    ),
    "2 or more": (lambda x: x >= 2, "max_length"),
    "more than 0": (lambda x: x > 0, "epochs bound ratio_clip lr_decay clip_ratio clip_value max_kl beta"),
    "0 or more": (
        lambda x: x >= 0,
        "iterations n_samples lr value_lr min_warmup_steps value_warmup_steps weight_decay max_grad_norm "
        "freeze_layers "
        "kl_coef ptx_coef rehearsal_coef missing_eos_penalty length_penalty tie_margin temperature "
        "eval_every save_every patience eval_prompts sample_prompts length_prompts sweep_prompts "
        "min_score_gap n_others expected_reward_samples",
    ),
    "0 to 1": (lambda x: 0 <= x <= 1, "warmup_ratio gamma lam safety_threshold"),
}

MOVED = {  # what does now what a script did -> the flags that it did it by
    "python -m common.ai_feedback label": "--judge",
    "python -m common.evaluate --scorers NAME=RUN ... --dataset PAIRS": "--compare-with",
    "python -m common.train_pairwise": "--kind",
    "python -m common.rehearsal, then --rehearsal-data FILE": "--rehearsal-clusters --rehearsal-per-cluster "
    "--rehearsal-prompts --rehearsal-by --rehearsal-encoder",
    "python -m common.evaluate --dataset FORGET --tie-margin X": "--forget-dataset --tie-margin",
    (
        "rejection_sampling.py --model STUDENT --pool TEACHER/pool.jsonl --n-samples 0 --iterations 1"
    ): "--student",
}


def check_flags(args, *more):
    """InputError that names the first argument out of its limits. An argument that is None has none.

    more: (name, whether it is right, what is wanted) of limits that only this script has; they come last, for
      one may be of several arguments."""
    limits = []
    for wanted, (right, names) in LIMITS.items():
        for name in names.split():
            if getattr(args, name, None) is not None:
                limits.append((name, right(getattr(args, name)), wanted))
    for name, right, wanted in [*limits, *more]:
        if not right:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)}: wanted {wanted}")


def check_batch_size(args):
    """InputError unless micro-batches of at most --micro-batch-size make up --batch-size over all ranks."""
    share, left_over = divmod(args.batch_size, dist.world_size())
    size = min(share, args.micro_batch_size)
    if size < 1 or left_over or share % size:
        whole = max(1, dist.world_size() * args.micro_batch_size)
        fit = max(1, math.ceil(args.batch_size / whole)) * whole
        raise InputError(
            f"--batch-size {args.batch_size} cannot be divided among {dist.world_size()} rank(s) with "
            f"--micro-batch-size {args.micro_batch_size}: try --batch-size {fit}"
        )


def parse(recipes, argv=None):
    """The script's Args from the command line: `ppo.py [recipe] [--flag value ...]`. A command that names no
    recipe takes the first one; where there is a recipe `base`, not_tiny decides between them, and what was
    taken is printed.

    recipes: {name: (description, Args(...))}."""
    argv = list(sys.argv[1:] if argv is None else argv)
    named = bool(argv) and not argv[0].startswith("-")
    name, why = (argv.pop(0), "as named") if named else (next(iter(recipes)), "the tiny world alone")
    if name not in recipes:
        close = difflib.get_close_matches(name, recipes, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise InputError(
            f"unknown recipe {name!r}: {hint}there are {', '.join(recipes)}; flags start with --"
        )
    args = _parse_flags(recipes, name, argv)
    strange = not_tiny(args, recipes[name][1]) if "base" in recipes and not named else None
    if strange:
        name, why = "base", f"{strange} is not of the tiny world; for another one, name it first"
        args = _parse_flags(recipes, name, argv)
    if "base" in recipes and dist.is_main():
        shown = "lr value_lr max_length max_new_tokens batch_size minibatch_size micro_batch_size epochs"
        values = [f"{key} {getattr(args, key):g}" for key in shown.split() if hasattr(args, key)]
        print(f"recipe {name} ({why}): model {args.model}, {', '.join(values)}")
    return args


def not_tiny(args, defaults):
    """The first flag, with its value, whose data set, or model to train or to sample from, is not the tiny
    world's, whose numbers ruin a pretrained model; None if there is none."""

    for name, value in vars(args).items():
        missing = value == getattr(defaults, name) and not Path(str(value)).exists()  # its own error says so
        is_model = name in ("model", "policy") and value and not missing
        is_data = name.endswith(("dataset", "_data")) and value
        if is_data and not data.is_tiny(value) or is_model and not _leads_to_tiny(value):
            return f"--{name.replace('_', '-')} {value}"
    return None


def _leads_to_tiny(name, later=()) -> bool:
    """True of the model tiny, and of a run (its model/, its versions/N) that was trained from it, or from
    such a run, as their args.json tell."""
    if name == "tiny" or name in later:  # a circle: two runs, each of which was made anew from the other
        return name == "tiny"
    folder = Path(name)
    if folder.parent.name == "versions":
        folder = folder.parents[1]
    elif folder.name == "model" and not (folder / "args.json").exists():
        folder = folder.parent
    args = read_json(folder / "args.json").get("args", {})
    starts = [args[key] for key in ("model", "policy", "student") if args.get(key)]
    return bool(starts) and all(_leads_to_tiny(start, (*later, name)) for start in starts)


def _parse_flags(recipes, name, argv):
    """The recipe's Args with the flags of argv; InputError for what is unknown or of a wrong type."""
    import tyro

    defaults = recipes[name][1]
    listing = "\n".join(f"  {key}: {text}" for key, (text, _) in recipes.items())
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            args, unknown = tyro.cli(
                type(defaults),
                default=defaults,
                args=argv,
                return_unknown_args=True,
                prog=f"{Path(sys.argv[0]).name} {name}",
                description=f"Recipes, first word:\n{listing}",
            )
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise InputError(" ".join(re.sub("[\u2500-\u257f|]|-{3,}", " ", box.getvalue()).split())) from None
    if unknown:
        flag = unknown[0].split("=")[0]
        flags = ["--" + field.name.replace("_", "-") for field in dataclasses.fields(defaults)]
        close = difflib.get_close_matches(flag, flags, 1)
        hint = f"did you mean {close[0]}?" if close else "see --help"
        moved = [command for command, names in MOVED.items() if flag in names.split()]
        raise InputError(f"unknown argument {unknown[0]!r}: {f'that is {moved[0]}' if moved else hint}")
    return args
