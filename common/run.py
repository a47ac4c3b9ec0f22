"""What surrounds an algorithm and is the same in all scripts: the command line, the run directory, and how
errors end.

A run directory (`output_dir`) holds args.json, metrics.jsonl, samples.jsonl, *.png, checkpoint/, model/ and,
written last, summary.json: a run that has a summary is finished, one without is not, whatever else it has.
"""

import contextlib
import dataclasses
import difflib
import errno
import hashlib
import importlib.metadata
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path

from tqdm import tqdm

from common import data, dist, models
from common.errors import InputError, NotFinite
from common.metrics import (
    Metrics,
    gains,
    progress,
    read_jsonl,
    regressions,
    say_if_worse,
    write_jsonl,
)

BEGUN = ("checkpoint/latest", "pool.jsonl", "rows.jsonl")  # a run that has one of these can be gone on with

LIMITS = (  # what a number may be, and the arguments of any script that it holds for
    ("1 or more", lambda x: x >= 1, "batch_size micro_batch_size max_steps max_new_tokens slots"),
    ("1 or more", lambda x: x >= 1, "max_pairs_per_prompt prompts_per_iteration offline_pairs"),
    ("1 or more", lambda x: x >= 1, "chains max_rows chunk_rows"),
    ("1 or more", lambda x: x >= 1, "score_batch_size chunk_prompts ptx_batch_size rehearsal_batch_size"),
    ("2 or more", lambda x: x >= 2, "max_length"),
    ("1 or more", lambda x: x >= 1, "rehearsal_per_cluster rehearsal_prompts"),
    ("1 or more", lambda x: x >= 1, "clusters per_cluster max_prompts"),
    ("more than 0", lambda x: x > 0, "epochs bound ratio_clip lr_decay clip_ratio clip_value max_kl beta"),
    ("0 or more", lambda x: x >= 0, "kl_coef value_lr freeze_layers value_warmup_steps rehearsal_clusters"),
    ("0 or more", lambda x: x >= 0, "ptx_coef rehearsal_coef patience tie_margin missing_eos_penalty"),
    ("0 or more", lambda x: x >= 0, "lr min_warmup_steps weight_decay max_grad_norm eval_every save_every"),
    ("0 or more", lambda x: x >= 0, "temperature sample_prompts length_prompts min_score_gap n_others"),
    ("0 or more", lambda x: x >= 0, "expected_reward_samples sweep_prompts eval_prompts length_penalty"),
    ("0 or more", lambda x: x >= 0, "iterations n_samples"),
    ("0 to 1", lambda x: 0 <= x <= 1, "warmup_ratio gamma lam safety_threshold"),
)


def check_flags(args, *more):
    """InputError that names the first argument out of its limits. An argument that is None has none.

    more: (name, whether it is right, what is wanted) of limits that only this script has."""
    found = [
        (name, right(getattr(args, name)), wanted)
        for wanted, right, names in LIMITS
        for name in names.split()
        if getattr(args, name, None) is not None
    ]
    for name, right, wanted in [*found, *more]:
        if not right:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)}: wanted {wanted}")


def check_batch_size(args):
    """InputError unless micro-batches of at most --micro-batch-size make up --batch-size over all ranks."""
    share, rest = divmod(args.batch_size, dist.world_size())
    whole = max(1, dist.world_size() * args.micro_batch_size)
    fit = max(1, math.ceil(args.batch_size / whole)) * whole
    if min(share, args.micro_batch_size) < 1 or rest or share % min(share, args.micro_batch_size):
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
        known = ", ".join(recipes)
        raise InputError(f"unknown recipe {name!r}: {hint}there are {known}; flags start with --")
    args = _parse_flags(recipes, name, argv)
    strange = not_tiny(args, recipes[name][1]) if "base" in recipes and not named else None
    if strange:
        name, why = "base", f"{strange} is not of the tiny world; for another one, name it first"
        args = _parse_flags(recipes, name, argv)
    if "base" in recipes and dist.is_main():
        shown = "lr value_lr max_length max_new_tokens batch_size minibatch_size micro_batch_size epochs"
        numbers = [f"{key} {getattr(args, key):g}" for key in shown.split() if hasattr(args, key)]
        print(f"recipe {name} ({why}): model {args.model}, {', '.join(numbers)}")
    return args


def not_tiny(args, defaults):
    """The first flag, with its value, whose data set, or model to train or to sample from, is not the tiny
    world's, whose numbers ruin a pretrained model; None if there is none."""

    for name, value in vars(args).items():
        missing = value == getattr(defaults, name) and not Path(str(value)).exists()  # its own error says so
        is_model = name in ("model", "policy", "student") and value and not missing
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
    args = _read_json(folder / "args.json").get("args", {})
    starts = [args[key] for key in ("model", "policy", "student") if args.get(key)]
    return bool(starts) and all(_leads_to_tiny(start, (*later, name)) for start in starts)


def _parse_flags(recipes, name, argv):
    """The recipe's Args with the flags of argv; InputError for what is unknown or of a wrong type."""
    import tyro

    defaults = recipes[name][1]
    listing = "\n".join(f"  {key}: {text}" for key, (text, _) in recipes.items())
    about = {"prog": f"{Path(sys.argv[0]).name} {name}", "description": f"Recipes, first word:\n{listing}"}
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            options = {"default": defaults, "args": argv, "return_unknown_args": True, **about}
            args, unknown = tyro.cli(type(defaults), **options)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise InputError(" ".join(re.sub("[\u2500-\u257f|]|-{3,}", " ", box.getvalue()).split())) from None
    if unknown:
        flags = ["--" + f.name.replace("_", "-") for f in dataclasses.fields(defaults)]
        close = difflib.get_close_matches(unknown[0].split("=")[0], flags, 1)
        hint = f"did you mean {close[0]}?" if close else "see --help"
        raise InputError(f"unknown argument {unknown[0]!r}: {hint}")
    return args


def launch(main, recipes):
    """Run a script's main to its end: one clear line for an error the user can mend, a traceback for a bug,
    then `dist.shutdown`."""
    code = 0
    sys.stdout.reconfigure(errors="replace")  # a console that lacks a character must not end a run
    try:
        args = parse(recipes)
        _say_other_versions()
        main(args)
    except (InputError, OSError) as error:  # OSError: a full disk, no permission, no such model on the hub
        if isinstance(error, NotFinite) and Run.current:
            error = Run.current.where(error)
        if dist.rank() > 0:
            time.sleep(5)  # if all ranks fail alike, rank 0 speaks, and torchrun ends the others meanwhile
        where = f" [rank {dist.rank()}]" if dist.rank() > 0 else ""
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        mend = ": make room, then --resume" if full else ""
        _say(f"error{where}: {' '.join(str(error).split())}{mend}")
        code = 2
    except KeyboardInterrupt:
        _say("interrupted: --resume goes on from the last checkpoint")
        code = 130
    except SystemExit as stop:  # tyro's --help and its own usage errors
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        if dist.world_size() > 1 and isinstance(error, RuntimeError) and GONE.search(str(error)):
            said = str(error).split("\n")[0][:120]
            mend = "--resume goes on from the last checkpoint"
            _say(f"error [rank {dist.rank()}]: another rank is gone or stuck, {mend} ({said})")
        else:
            _say(f"[rank {dist.rank()}]")
            traceback.print_exc()
        code = 1
    dist.shutdown(code)


GONE = r"gloo.*(closed|reset|timed? ?out)|ncclRemoteError|wait timeout|"
GONE = re.compile(GONE + r"connection (was likely closed|(closed|reset) by peer)", re.I)


def _say_other_versions():
    """One line if torch or transformers is not of the version that the tests pass with."""
    file = Path(__file__).parents[1] / "requirements.txt"
    pins = re.findall(r"^(torch|transformers)==(\S+)", file.read_text(), re.M) if file.exists() else ()
    here = [(name, importlib.metadata.version(name).split("+")[0], pin) for name, pin in pins]
    others = [f"{name} is {version}, tested with {pin}" for name, version, pin in here if version != pin]
    if others and dist.is_main():
        _say(f"{'; '.join(others)} ({file.name})")


def _say(text):
    """Print to stderr below the progress bars, which would be drawn again after it."""
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()
    print(text, file=sys.stderr, flush=True)


def find_run(args) -> str | None:
    """What `args.output_dir` holds for this command: "finished" (nothing is left to do), "resume", or None:
    begin anew. Changes nothing.

    A finished run in the way, or an unfinished one with a checkpoint, is an InputError unless --overwrite or
    --resume is given."""
    if not args.output_dir:
        raise InputError("--output-dir is empty: name a folder")
    folder = Path(args.output_dir)
    # torchrun starts a failed job again with the same command: then go on with what this very launch began
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    again = again and _read_json(folder / "args.json").get("launch") == _launch_id()
    begun = any((folder / name).exists() for name in BEGUN)
    seen = ((folder / "summary.json").exists(), begun, again)
    finished, begun, again = dist.gather([seen])[0]  # what rank 0 sees decides for all
    resume = args.resume or again
    if args.resume and args.overwrite:
        raise InputError("--resume goes on with a run, --overwrite begins it anew: give one of them")
    if finished and resume:
        if dist.is_main():
            stage = _read_json(folder / "args.json").get("stage")
            print(f"{folder} is finished already, by {stage}")
        return "finished"
    if (finished or begun) and not (resume or args.overwrite):
        state = "a finished run" if finished else "an unfinished run"
        mend = "--resume to go on, --overwrite to replace it, or another --output-dir"
        raise InputError(f"{folder} holds {state}: {mend}")
    ours = _outputs(folder)
    if ours and not (folder / "args.json").exists():
        raise InputError(f"{ours[0]} is in the way, and {folder} is no run's directory: another --output-dir")
    read = "model policy reference student enhancer scorer safety_scorer pool judge sft_model"
    read += " dataset eval_dataset sft_dataset rehearsal_data ptx_dataset forget_dataset offline_data"
    for name in read.split() if ours and not (resume and begun) else ():  # start_run will remove what is ours
        path = getattr(args, name, None)
        word = name in ("reference", "enhancer") and path in ("sft", "last", "previous")
        real = Path(path or "").resolve()
        gone = real == folder.resolve() or any(real.is_relative_to(old.resolve()) for old in ours)
        if path and not word and gone:
            flag, what = f"--{name.replace('_', '-')} {path}", "--overwrite" if args.overwrite else "this run"
            raise InputError(f"{what} would remove {flag} before it is read: another --output-dir")
    if not (resume and begun):
        return None
    dist.checkpoint_state(folder / "checkpoint")  # refuses one that another version wrote
    return "resume"


def start_run(args, stage: str, state: str | None, held_out=None):
    """Make `args.output_dir` ready for what find_run gave as `state`, and write args.json. Call it when
    nothing that the user can have mistyped is left to be read: with state None it removes what an old run
    left.

    held_out: JSON that tells the held-out set from others. Before and after training are compared on it, so a
      run cannot be gone on with on another one: InputError."""
    folder, resume = Path(args.output_dir), state == "resume"
    dist.patient_barrier()  # data were tokenised and models downloaded
    fingerprint = hashlib.sha256(json.dumps(held_out).encode()).hexdigest()
    now = json.loads(json.dumps(dataclasses.asdict(args)))  # as JSON gives them back: tuples become lists
    before, files, changed = {}, {}, []
    if dist.is_main():
        before, files = _read_json(folder / "args.json"), _data_files(args)
        previous = before.get("args", {})
        for name in sorted(set(previous) & set(now) - {"resume", "overwrite", "output_dir"}):
            if previous[name] != now[name]:
                changed.append(f"{name}: {previous[name]!r} -> {now[name]!r}")
        for path in files.keys() & before.get("data", {}).keys():
            if files[path] != before["data"][path]:
                changed.append(f"{path}: its rows are not those that the run began with")
    # What rank 0 sees decides for all, and every rank has looked before it changes anything
    before, changed = dist.gather([(before, changed)])[0]
    if resume and before.get("stage", stage) != stage:
        raise InputError(f"--resume: {folder} holds an unfinished run of {before['stage']}, not of {stage}")
    if resume and before.get("held_out", fingerprint) != fingerprint:
        raise InputError(
            f"--resume: {folder} began with another held-out set, on which before and after are compared "
            f"({'; '.join(changed) or 'its rows'}): give the same, or begin anew with --overwrite"
        )
    if dist.is_main():
        folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            # These two first: what is left then is neither a finished run nor one to resume
            for old in (folder / name for name in ("summary.json", *BEGUN)):
                old.unlink(missing_ok=True)
            for old in _outputs(folder):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        for what in changed if resume else ():
            print(f"resuming with another {what}")
        about = {"stage": stage, "args": now, "world_size": dist.world_size(), "launch": _launch_id()}
        about |= {"data": files, "held_out": fingerprint}
        write_json(folder / "args.json", {**about, **_versions()})
    dist.barrier()


def _data_files(args):
    """{file: SHA-256 of its content} of the local files that the data sets of a command name."""

    found = {}
    for name, spec in vars(args).items():
        for path, _ in data.sources(spec) if spec and name.endswith(("dataset", "_data")) else ():
            if Path(path).is_file():
                with open(path, "rb") as file:
                    found[path] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _outputs(folder):
    names = ("model", "model.tmp", "checkpoint", "versions", "metrics.jsonl", "samples.jsonl", "pool.jsonl")
    names += ("curves.jsonl", "rehearsal.jsonl", "pairs.jsonl", "reference.json")
    names += ("rows.jsonl", "failed.jsonl")
    return [path for path in [*(folder / name for name in names), *folder.glob("*.png")] if path.exists()]


def _launch_id():
    """The same for all attempts of one torchrun, and for no other."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.getppid()}"


def skip(in_a_row: int, iterations: int, why: str) -> dict[str, int]:
    """The figure of an iteration that is left out, for it gives nothing to learn from. InputError after five
    of them in a row, or where the run has no others."""
    if in_a_row >= min(5, iterations):
        raise InputError(f"{why}. {in_a_row} iteration(s) in a row gave nothing to learn from")
    if dist.is_main():
        print(f"{why}: skipped")
    return {"iterations/skipped": in_a_row}


class Run:
    """A script's run directory, from the first look at it to summary.json: what is the same in all scripts
    and no part of an algorithm. It never calls back: the script keeps its loop, its models and its losses.

    device: this rank's. state: what a checkpoint holds beside weights and optimisers, as JSON; `step` counts
    the rounds of `steps` that are done. finished: there is nothing left to do."""

    current = None  # the run that this process is in, for the error message of `launch`

    def __init__(self, args, stage: str, check=check_flags):
        """check: raises an InputError for arguments that cannot be right, before anything is loaded."""
        self.device, self.args, self.stage = dist.setup(), args, stage
        check(args)
        self.found = find_run(args)
        self.finished, self.resumed = self.found == "finished", self.found == "resume"
        self.folder, self.checkpoint = Path(args.output_dir), f"{args.output_dir}/checkpoint"
        self.modules, self.state, self.metrics, self.bar, self.laps = {}, {"step": 0}, None, None, {}

    def begin(self, modules: dict, state: dict, held_out) -> dict:
        """Replace an old run or, with --resume, load the last checkpoint into `modules`, {name: (model,
        optimizer)}, and into `state`, which is returned. Call it when nothing that a user can have mistyped
        is left to be read. held_out: JSON that tells the held-out set, on which before and after are compared,
        from others."""
        start_run(self.args, self.stage, self.found, held_out)
        self.dtype = models.export_dtype(
            self.args.model, self.args.save_dtype
        )  # the source may be gone later
        Run.current, self.modules = self, modules
        self.state.update(state)
        if self.resumed and modules:
            self.state.update(dist.load_checkpoint(self.checkpoint, modules))
        self.metrics = Metrics(self.args.output_dir, self.state.get("logged_rows") if self.resumed else None)
        return self.state

    def log_before(self, evaluate, model, keep_samples=False):
        """The figures that `evaluate`(model) gives before training; a resumed run has them in its checkpoint.
        keep_samples: its `samples` stand in samples.jsonl, with those after training behind them."""
        if "before" not in self.state:
            self.state["before"] = evaluate(model)
            self.log(self.state["before"], step=0)
            if keep_samples and dist.is_main():
                rows = [{"when": "before", **row} for row in evaluate.samples]
                write_jsonl(self.folder / "samples.jsonl", rows)

    def steps(self, total: int):
        """Counts to `total` from where a checkpoint was, behind a progress bar. When a round's body is done,
        and only then, the checkpoint that --save-every asks for is written."""
        self.total, self.bar = total, progress(total, self.state["step"], self.stage)
        while self.state["step"] < total:
            self.begin_round()
            yield self.state["step"] + 1
            self.state["step"] += 1
            self.bar.update()
            if self.args.save_every and self.state["step"] % self.args.save_every == 0:
                state = {**self.state, "logged_rows": self.metrics.n_rows}
                number = self.state.get("first_step", 0) + self.state["step"]
                dist.save_checkpoint(self.checkpoint, number, self.modules, state)
        self.bar.close()

    @property
    def last_checkpoint(self) -> str:
        return f"the last good checkpoint, if --save-every made one, is in {self.checkpoint}"

    def where(self, error: NotFinite) -> InputError:
        """The error with the step at which it came, and what is left."""
        return InputError(f"step {self.state['step'] + 1}: {error}; {self.last_checkpoint}")

    def begin_round(self):
        self.began, self.laps = time.time(), {}

    def due(self, every: int) -> bool:
        """Whether this round of `steps` is one of every so many; the last one is not, for what follows it."""
        step = self.state["step"] + 1
        return every > 0 and step % every == 0 and step < self.total

    def lap(self, name: str):
        """The time since the last lap, or since the round began, becomes time/NAME_s of its row."""
        now = time.time()
        self.laps[f"time/{name}_s"] = now - self.began - sum(self.laps.values())

    def seconds(self) -> float:
        """Since this round of `steps` began."""
        return time.time() - self.began

    def log(self, row: dict, step: int, iteration: int = 0, shown=()):
        """A row of metrics.jsonl; `shown`: the keys of at most three figures beside the progress bar."""
        self.metrics.log(step, iteration, **row, **self.laps)
        if shown:
            self.bar.set_postfix({key.split("/")[-1]: f"{row[key]:.3g}" for key in shown})

    def round_weights(self, model):
        """To the dtype of model/: held-out figures are then of what is exported."""
        dist.round_weights(model, self.dtype)

    def skip(self, why: str) -> dict[str, int]:
        """The figure of an iteration that is left out, for it gives nothing to learn from. InputError after five
        of them in a row, or where the run has no others."""
        self.state["skipped"] = in_a_row = self.state.get("skipped", 0) + 1
        return skip(in_a_row, self.args.iterations, why)

    def finish(
        self, model, tokenizer, after: dict, samples: list[dict], *, step, iteration, summary, shown, plots
    ):
        """Export the model and write what a finished run holds, summary.json last of all.

        after, samples: figures and rows of samples.jsonl after training. summary: what else summary.json
        says. shown: the figures that are printed, before and after. plots: functions of the run's folder."""
        self.require_finite(after, step)
        after = {key: x for key, x in after.items() if not math.isnan(x)}  # of nothing, or without spread
        kept = [row for row in read_jsonl(self.folder / "samples.jsonl") if row.get("when") == "before"]
        if kept:
            after.update(gains(kept, samples))
            summary = {**summary, "categories": regressions(kept, samples)}
            samples = kept + [{"when": "after", **row} for row in samples]
        self.laps = {}
        self.log(after, step, iteration)
        dist.save_model(model, tokenizer, self.folder / "model", self.dtype)
        if dist.is_main():
            before = self.state.get("before", {})
            write_jsonl(self.folder / "samples.jsonl", samples)
            for plot in plots:
                plot(self.folder)
            self.show(before, after, shown, samples)
            write_json(self.folder / "summary.json", {**summary, "before": before, "after": after})  # last
            say_if_worse(before, after)
            models.report_export(self.folder / "model", self.args.model, self.args.seed)

    def require_finite(self, figures: dict, step):
        wrong = [f"{key} {x}" for key, x in figures.items() if key == "eval/nll" and not math.isfinite(x)]
        if wrong:
            raise InputError(f"{', '.join(wrong)} after step {step}: no export; lower --lr")

    def show_samples(self, samples: list[dict]):
        """Three of them, a line each."""
        for sample in [sample for sample in samples if "response" in sample][-3:]:
            gold = f"  gold {sample['gold']:.1f} of {sample['perfect']:.1f}" if "gold" in sample else ""
            print(f"  {sample['prompt'][-1]['content'][:60]!r} -> {sample['response'][:80]!r}{gold}")

    def show(self, before: dict, after: dict, shown, samples: list[dict]):
        """At most 15 lines that a person wants to read; the rest is in summary.json."""
        self.show_samples(samples)
        for key in shown:
            if key in after:
                first = f"{before[key]:.4g} -> " if key in before else ""
                print(f"{key}: {first}{after[key]:.4g}")


def cached(args, key, make):
    """make(), or what it gave for the same `key` before: the answers of other models, asked once and kept as
    JSON in `output_dir`/cache.json. Every rank must call it; rank 0's file counts."""
    path = Path(args.output_dir) / "cache.json"
    found, key = dist.gather([(_read_json(path) if dist.is_main() else {}, json.loads(json.dumps(key)))])[0]
    if found.get("key") != key:
        found = {"key": key, "value": json.loads(json.dumps(make()))}
        if dist.is_main():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(f"{path}.tmp")
            temporary.write_text(json.dumps(found))
            os.replace(temporary, path)
    return found["value"]


def write_json(path, value):
    """Write `value` to `path` so that it is there whole or not at all."""
    temporary = Path(f"{path}.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(temporary, path)


def _read_json(path):
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return {}


def _versions():
    names = ("torch", "transformers", "datasets", "tokenizers", "numpy")
    try:
        where = {"cwd": Path(__file__).parent, "capture_output": True, "text": True}
        git = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], **where).stdout.strip() or None
    except OSError:  # no git on this machine
        git = None
    return {
        "git": git,
        "python": sys.version.split()[0],
        "versions": {name: importlib.metadata.version(name) for name in names},
        "command": sys.argv,
    }
