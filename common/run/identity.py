"""Record the inputs of a run in args.json, and compare them when the run is resumed.

Inputs are identified by content, so that folders can move: a model by its files (on the hub by its commit), a
function by its name and its file, data by their content, a held-out set by its messages or comparisons. A
--policy or --reference that is missing, or is `sft`, means --model and has its content.
"""

import contextlib
import hashlib
import json
import re
from pathlib import Path

from common.errors import InputError
from common.data import mixtures
from common.loading import pretrained
from common.scoring import scorers

REFUSED = (  # patterns of "script: input". A change of these is refused; a change of any other is printed
    ".*: script",
    ".*: (held-out set|content of --(model|policy|behavior-policies|reference|other-models|chat-template))",
    "ppo: (content|function) of --(safety-)?scorer",
    "ai_feedback: content of --dataset",
    ".*: (lora_rank|freeze_layers)",
    "(rejection_sampling|dpo_iterative|cpl): max_length",  # the pool's responses may be longer
)


def of_run(args, held_out) -> dict:
    """Fingerprint a run's inputs: {name in the table of docs/use/runs.md: fingerprint}. Only rank 0 calls
    it, because it reads whole files.

    held_out: fingerprint of the held-out set (`fingerprint` of an evaluation)."""
    fingerprints = {"held-out set": hashlib.sha256(json.dumps(held_out, default=str).encode()).hexdigest()}
    for name, value in vars(args).items():
        if name in ("policy", "reference") and value in (None, "sft"):
            value = getattr(args, "model", value)  # evaluate has no --model; its --reference is a name
        values = value if isinstance(value, tuple) else [value]
        for text in (x for x in values if isinstance(x, str) and name != "output_dir"):
            with contextlib.suppress(InputError, OSError, ValueError):  # a word that is no file or model
                for kind, x in _behind(name, text, getattr(args, "seed", 0)).items():
                    fingerprints.setdefault(f"{kind} of --{name.replace('_', '-')}", []).append(x)
    return fingerprints


def _behind(name, text, seed) -> dict:
    """Identify the data, file, model or function that one value of a flag names: {kind: identity}."""
    if name.endswith(("dataset", "_data")):  # data on the hub are identified by their name
        sources = [(source, items) for source, items, _ in mixtures.sources(text)]
        return {"content": [[pretrained.sha256(x) if Path(x).is_file() else x, read] for x, read in sources]}
    return {"content": pretrained.sha256(text)} if Path(text).is_file() else scorers.identity(text, seed)


def changes(before: dict, now: dict, folder) -> list[str]:
    """List the settings and inputs that have changed since a run started, as lines to print.

    before, now: contents of args.json at the start, and of the command that resumes.
    Raises InputError for a change in REFUSED."""
    lines = differences(_settings(before), _settings(now))
    every = "; ".join(lines.values()) or "under the same name"
    old, new = before.get("began_with", now["began_with"]), now["began_with"]
    lines.update({x: x for x in sorted(old.keys() | new.keys()) if old.get(x) != new.get(x)})
    script = now["stage"].split()[0]
    for name in (x for pattern in REFUSED for x in lines if re.fullmatch(pattern, f"{script}: {x}")):
        flag = name.partition("content of --")[2].replace("-", "_")
        # The content of a flag changes with the flag, with the seed of tiny's weights or under the same name
        why = lines.get(flag, lines.get("seed", "under the same name")) if flag else every
        what = lines[name] + f" ({why})" * (name == lines[name])
        mend = "Resume with the original one, or start again with --overwrite."
        raise InputError(f"--resume: {folder} was started with another {what}. {mend}")
    return list(lines.values())


def differences(old: dict, new: dict) -> dict[str, str]:
    """Describe the settings, as JSON has them, whose values differ: {name: "name: old -> new value"}."""
    names = [x for x in sorted(old.keys() & new.keys()) if x not in ("resume", "overwrite", "output_dir")]
    return {x: f"{x}: {old[x]!r} -> {new[x]!r}" for x in names if old[x] != new[x]}


def _settings(begun) -> dict:
    """Collect flags, package versions, number of ranks and machine from the contents of args.json."""
    values = {"ranks": begun.get("world_size"), **begun.get("args", {}), **begun.get("versions", {})}
    machine = {name: begun[name] for name in ("device", "compute_dtype", "attention") if name in begun}
    return {"script": begun["stage"], **values, **machine} if begun else {}
