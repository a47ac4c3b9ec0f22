"""The command line of a script: a recipe, flags that change it, and the limits of its numbers."""

import contextlib
import dataclasses
import difflib
import io
import math
import re
import sys
from pathlib import Path

from common import data, dist, tiny
from common.errors import InputError
from common.metrics import read_json

LIMITS = {  # what a number may be -> the test, and the names of arguments; all others: 0 or more
    "0 or more": (lambda x: x >= 0, ""),
    "1 or more": (
        lambda x: x >= 1,
        "batch_size micro_batch_size ptx_batch_size rehearsal_batch_size score_batch_size max_steps slots "
        "max_new_tokens max_pairs_per_prompt max_prompts max_rows prompts_per_iteration chunk_prompts "
        "chunk_rows offline_pairs chains clusters per_cluster",
    ),
    "2 or more": (lambda x: x >= 2, "max_length"),
    "more than 0": (lambda x: x > 0, "epochs bound ratio_clip lr_decay clip_ratio clip_value max_kl beta"),
    "0 to 1": (lambda x: 0 <= x <= 1, "warmup_ratio gamma lam safety_threshold"),
    "any": (lambda x: True, "seed harmless_from"),
}
MOVED = {  # how a flag that left the scripts begins -> what does now what it did
    "--judge": "python -m common.ai_feedback label",
    "--compare-with": "python -m common.evaluate --scorers NAME=RUN ... --dataset PAIRS",
    "--kind": "python -m common.train_pairwise",
    "--rehearsal-": "python -m common.rehearsal, then --rehearsal-data FILE",
    "--forget-dataset": "python -m common.evaluate --dataset FORGET --tie-margin X",
    "--tie-margin": "python -m common.evaluate --dataset FORGET --tie-margin X",
    "--template": "a change in common/ai_feedback.toml",
    "--student": "rejection_sampling.py --model MODEL --pool TEACHER/pool.jsonl --n-samples 0 --iterations 1",
}


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


def check_batch_size(args):
    """InputError unless micro-batches of at most --micro-batch-size make up --batch-size over all ranks."""
    share, left_over = divmod(args.batch_size, dist.world_size())
    if not share or left_over or share % min(share, args.micro_batch_size):
        whole = dist.world_size() * args.micro_batch_size
        why = f"cannot be divided among {dist.world_size()} rank(s) with --micro-batch-size"
        mend = f"try --batch-size {math.ceil(args.batch_size / whole) * whole}"
        raise InputError(f"--batch-size {args.batch_size} {why} {args.micro_batch_size}: {mend}")


def parse(recipes, argv=None):
    """The script's Args from the command line: `ppo.py [recipe] [--flag value ...]`. A command that names no
    recipe takes the first of `recipes`, {name: (description, Args(...))}; where there is a recipe `base`,
    not_tiny decides between them, and what was taken is printed."""
    argv = list(sys.argv[1:] if argv is None else argv)
    named = bool(argv) and not argv[0].startswith("-")
    name, why = (argv.pop(0), "as named") if named else (next(iter(recipes)), "the tiny world alone")
    if name not in recipes:
        raise InputError(f"unknown recipe {name!r}: there are {', '.join(recipes)}; flags start with --")
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
        if is_data and not data.is_tiny(value) or is_model and not _is_tiny_model(value):
            return f"--{name.replace('_', '-')} {value}"
    return None


def _is_tiny_model(name) -> bool:
    """True of the model tiny and of what was trained from it: a run's model/, its versions/N."""
    configs = [read_json(path / "config.json") for path in (Path(name), Path(name, "model"))]
    return name == "tiny" or any(config.get("vocab_size") == len(tiny.WORDS) for config in configs)


def _parse_flags(recipes, name, argv):
    """The recipe's Args with the flags of argv; InputError for what is unknown or of a wrong type."""
    import tyro

    defaults = recipes[name][1]
    listing = "\n".join(f"  {key}: {text}" for key, (text, _) in recipes.items())
    about = {"prog": f"{Path(sys.argv[0]).name} {name}", "description": f"Recipes, first word:\n{listing}"}
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            args, unknown = tyro.cli(
                type(defaults), default=defaults, args=argv, return_unknown_args=True, **about
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
        moved = [command for start, command in MOVED.items() if flag.startswith(start)]
        raise InputError(f"unknown argument {unknown[0]!r}: {f'that is {moved[0]}' if moved else hint}")
    return args
