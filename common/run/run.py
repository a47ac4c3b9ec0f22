"""Start and end a script, and manage its run directory. This is the same in all scripts.

A run directory (`output_dir`) holds args.json, metrics.jsonl, samples.jsonl, *.png, checkpoint/, model/ and
summary.json. Only the plots are written after the summary: a run is finished if and only if it has one.
"""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from common import dist
from common.errors import Diverged, InputError, NotFinite
from common.data import chat, files, mixtures, progress, splits
from common.data.files import write_json
from common.loading import checks, lora
from common.scoring import measures
from common.run import checkpoints, identity, logs, machine, plots
from common.run.cli import check_flags, parse

RESUMABLE = ("checkpoint/latest", "pool.jsonl", "partial.jsonl")  # a run that has one of these can be resumed
OUTPUTS = (  # files and folders of an old run that a new run removes, in addition to *.png
    "summary.json model model.tmp checkpoint versions metrics.jsonl samples.jsonl pool.jsonl curves.jsonl "
    "rehearsal.jsonl best pairs.jsonl rows.jsonl failed.jsonl partial.jsonl"
)
SAVE_AFTER_S = 600  # seconds after the last checkpoint at which one is due regardless of --save-every
DTYPES = re.compile("same dtype|scalar type")  # torch's message for a matrix product of two dtypes
# torch's messages when another rank is gone
PEER_LOST = re.compile(
    "gloo.*(closed|reset|timed? ?out)|ncclRemoteError|wait timeout|likely closed|by peer", re.I
)


def launch(main, recipes):
    """Run a script's main. Errors that the user can fix end in one clear line and exit status 2, bugs in a
    traceback and status 1."""
    code = 0
    # A character that the console lacks must not end a run; a notebook's output has no reconfigure
    getattr(sys.stdout, "reconfigure", dict)(errors="replace")
    try:
        main(parse(recipes))
    except (InputError, OSError, torch.OutOfMemoryError) as error:  # OSError: full disk, no such hub model
        message = " ".join(str(error).split())
        where = ""
        if isinstance(error, NotFinite) and Run.current:
            state = Run.current.state  # a round of ppo.py is several optimiser steps
            step = 1 + state.get("optimizer_steps", state.get("first_step", 0) + state["step"])
            message = f"step {step}: {message}"
        if isinstance(error, Diverged) and Run.current and hasattr(Run.current.args, "save_every"):
            message = f"{message}; {Run.current.last_checkpoint}"
        if dist.rank() > 0:
            # If all ranks fail with the same error, rank 0 prints it, and torchrun ends the others meanwhile
            time.sleep(5)
            where = f" [rank {dist.rank()}]"
        _say(f"error{where}: {message}")
        code = 2
    except KeyboardInterrupt:
        _say(f"interrupted: {_what_is_saved()}")
        code = 130
    except SystemExit as stop:  # tyro's --help
        code = stop.code
    except BaseException as error:
        code = 1
        if dist.world_size() > 1 and PEER_LOST.search(str(error)):
            _say(f"error [rank {dist.rank()}]: another rank has ended or is stuck; {_what_is_saved()}")
        elif DTYPES.search(str(error)) and machine.describe()["compute_dtype"] == "bfloat16":
            why = f"a layer of the model mixes bfloat16 with another dtype ({error})"
            _say(f"error: {why}. Use --compute-dtype float32.")
        elif dist.attention != "default" and re.search("attention|attn", str(error), re.I):  # as no backward
            _say(f"error: --attention {dist.attention}: {error}")
        else:
            _say(f"[rank {dist.rank()}]")
            traceback.print_exc()
    dist.shutdown(code)


def _what_is_saved():
    """Return a sentence on how to continue the interrupted run. Files of an old run, which this one would
    have replaced, do not count."""
    begun = Run.current and _args_of(Run.current.folder).get("began") == chat.Clock.began.isoformat()
    if begun and any((Run.current.folder / name).exists() for name in RESUMABLE):
        return f"--resume continues from what is saved in {Run.current.folder}"
    return "nothing is saved yet; the same command starts from the beginning"


def _say(text):
    """Print to stderr. Progress bars are closed first, because they would be drawn again after the text."""
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()
    print(text, file=sys.stderr, flush=True)


class Run:
    """A script's run directory, from the first check to summary.json, with everything that all scripts share.
    It is not a trainer: the loop, the models and the losses belong to the script.

    finished: whether there is nothing left to do. device: the device of this rank.
    state: content of a checkpoint besides weights and optimisers, as JSON. state["step"] is the number of
      finished rounds of `steps`."""

    current = None  # the run of this process; `launch` uses it for error messages

    def __init__(self, args, stage: str, check=None, plots=()):
        """check: function that raises InputError for invalid args, called after cli.LIMITS have been checked.
        plots: functions that draw in the run's folder."""
        self.device = dist.setup()
        self.args = args
        self.stage = stage
        machine.show()
        self.plots = plots
        check_flags(args)
        mixtures.sources_of(args)
        if check:
            check(args)
        self.status = None if splits.n_shown else find_run(args, stage)  # --preview touches no run directory
        self.finished = self.status == "finished"
        self.resumed = self.status == "resume"
        begun = _args_of(Path(args.output_dir)).get("began") if self.resumed else None
        [chat.Clock.began, *_] = dist.gather([datetime.fromisoformat(begun) if begun else datetime.now()])
        self.folder = Path(args.output_dir)
        self.checkpoint = f"{args.output_dir}/checkpoint"
        self.last_checkpoint = f"the last good checkpoint, if --save-every made one, is in {self.checkpoint}"
        self.state = {"step": 0}
        self.laps = {}
        self.peaks = {}
        self.saved = time.monotonic()
        self.saving_s = 0.0
        Run.current = self

    def begin(self, *, plan: str, held_out, modules: dict | None = None, state: dict | None = None) -> dict:
        """Start the run: replace an old one or, with --resume, load the last checkpoint into `modules` and
        `state`. Returns the state. start_run says when to call this.

        plan: number of steps, rows or prompts that the run will see; it is printed. held_out: see start_run.
        modules: {name: (model, optimizer)}. state: initial values of a new run."""
        if dist.is_main():
            print(f"plan: {plan}")
        if modules:  # else the policies come later, see versions.py
            checks.fit_slots(self.args, [model for model, _ in modules.values()])
        start_run(self.args, self.stage, self.status, held_out)
        self.modules = modules or {}
        self.dtype = getattr(torch, self.args.save_dtype)  # of model/
        self.state.update(state or {})
        if self.resumed and modules:
            self.state.update(checkpoints.load_checkpoint(self.checkpoint, modules))
        self.metrics = logs.Metrics(self.folder, self.state.get("logged_rows"))
        return self.state

    def log_before(self, evaluate, model, keep_samples=False):
        """Log the metrics evaluate(model) before training. A resumed run has them in its checkpoint.

        keep_samples: write evaluate.samples to samples.jsonl; `finish` appends those after training."""
        if "before" not in self.state:
            self.state["before"] = evaluate(model)
            self.state["losses"] = getattr(evaluate, "losses", [])  # one per held-out item
            self.log(self.state["before"], step=0)
            if keep_samples:
                self.state["samples"] = [{"when": "before", **sample} for sample in evaluate.samples]
            if keep_samples and dist.is_main():
                files.write_jsonl(self.folder / "samples.jsonl", self.state["samples"])

    def steps(self, total: int):
        """Yield the numbers of the rounds up to `total`, from the checkpoint on, with a progress bar. After
        the body of each round, save a checkpoint if one is due."""
        self.total = total
        with progress.progress(total, self.state["step"], self.stage) as self.bar:
            while self.state["step"] < total:
                self.begin_round()
                yield self.state["step"] + 1
                self.state["step"] += 1
                self.bar.update()
                if self.args.save_every and self.must_save():
                    began = time.monotonic()
                    state = {**self.state, "logged_rows": self.metrics.n_rows}
                    number = self.state.get("first_step", 0) + self.state["step"]
                    checkpoints.save_checkpoint(self.checkpoint, number, self.modules, state)
                    self.saved = time.monotonic()
                    self.saving_s = self.saved - began

    def must_save(self) -> bool:
        """Return whether a checkpoint is due: by --save-every, or because the last one is more than ten
        minutes old. Checkpoints by time take at most a twentieth of the run; rank 0's clock decides."""
        is_late = time.monotonic() - self.saved > max(SAVE_AFTER_S, 20 * self.saving_s)
        return self.state["step"] % self.args.save_every == 0 or dist.gather([is_late])[0]

    def begin_round(self):
        """Start the clock of a round."""
        self.began = time.time()
        self.laps, self.peaks = {}, {}

    # inside a round of `steps`
    def seconds(self) -> float:
        """Return the seconds since the round started."""
        return time.time() - self.began

    def lap(self, name: str):
        """Record the seconds since the last lap, or since the start of the round, as time/NAME_s of the next
        logged row; on an accelerator also the peak memory of tensors since then, as memory/NAME_gb."""
        self.laps[f"time/{name}_s"] = self.seconds() - sum(self.laps.values())
        self.peaks.update(machine.peak_memory(self.device, name))

    def due(self, every: int) -> bool:
        """Return whether the current round is a multiple of `every`. The last round never counts, because the
        script evaluates after it anyway."""
        step = self.state["step"] + 1
        return every > 0 and step % every == 0 and step < self.total

    def log(self, row: dict, step: int, iteration: int = 0, shown=()):
        """Write a row of metrics.jsonl. shown: keys of up to three metrics for the progress bar."""
        self.peaks.update(machine.peak_memory(self.device, "rest" if self.laps else "step"))
        self.metrics.log(step, iteration, **row, **self.laps, **self.peaks)
        self.laps, self.peaks = {}, {}
        if shown:
            texts = {key.split("/")[-1]: f"{row[key]:.3g}" for key in shown if key in row}
            self.bar.set_postfix(texts, refresh=False)

    def skip(self, why: str, in_a_row: int | None = None) -> dict[str, int]:
        """Skip a round that gives nothing to learn from: print why, and return its metric.

        in_a_row: number of rounds skipped in a row, this one included; by default, counted in the state.
        Raises InputError after five in a row, or once all iterations of a shorter run are skipped."""
        if in_a_row is None:
            in_a_row = self.state["skipped"] = self.state.get("skipped", 0) + 1
        if in_a_row >= min(5, self.args.iterations):
            raise InputError(f"{why}. {in_a_row} iteration(s) in a row gave nothing to learn from")
        if dist.is_main():
            print(f"{why}: skipped")
        return {"iterations/skipped": in_a_row}

    # after the last round
    def evaluate_export(self, model, evaluate, metrics_of=lambda result: result):
        """Give the model the weights that model/ will have (round_weights), and return evaluate(model), so
        that the metrics are those of the exported model. metrics_of: evaluate's result -> {name: number}.

        Frees AdamW's moments first, since no checkpoint follows: the script may load another model now."""
        for _, optimizer in self.modules.values():
            optimizer.state.clear()
        # If --save-dtype rounds, evaluate before that too, and print what rounding does to held-out metrics
        full = {} if self.dtype == torch.float32 else metrics_of(evaluate(model))
        self.round_weights(model)
        result = evaluate(model)
        rounded = metrics_of(result) if full else {}
        pairs = [f"{key} {full[key]:.6g} -> {rounded[key]:.6g}" for key in full if key.startswith("eval/")]
        if pairs and dist.is_main():
            print(f"rounding the weights for --save-dtype {self.args.save_dtype}: {', '.join(pairs)}")
        before = self.state.get("losses")
        losses = getattr(evaluate, "losses", None)
        if before and losses:
            result.update(measures.change("eval/nll_change", before, losses))
        return result

    @torch.no_grad()
    def round_weights(self, model):
        """Round the weights to the dtype of model/, in place. LoRA adapters are merged first, because the sum
        is rounded, not its parts. If frozen weights are kept in bfloat16 and model/ in float32, adapters stay
        apart: bfloat16 cannot hold the sum."""
        weights = model.state_dict()
        if self.dtype == torch.float32 and torch.bfloat16 in {weight.dtype for weight in weights.values()}:
            return
        lora.merge_adapters(weights)
        for name, empty in checkpoints.skeleton(model, self.dtype).state_dict().items():
            weights[name].copy_(weights[name].to(empty.dtype))

    def finish(self, model, tokenizer, after, samples, *, summary, shown):
        """Write the results (write_results) of a script that trains one model.

        after, samples: metrics, and rows of samples.jsonl, after training. summary: further content of
        summary.json. shown: metrics to print, before and after training.
        Raises InputError if the held-out loss is not finite; the model is then not exported."""
        if not math.isfinite(after.get("eval/nll", 0.0)):
            raise InputError(f"eval/nll {after['eval/nll']} after training: not exported. Lower --lr.")
        before = self.state.get("before", {})
        after = logs.finite(after)
        kept = self.state.get("samples")
        if kept:
            samples = [*kept, *({"when": "after", **sample} for sample in samples)]
        self.metrics.log(*self.metrics.last, **after)
        summary = {**summary, "before": before, "after": after}
        self.write_results(model, tokenizer, samples, summary, before, after, shown)

    def write_results(self, model, tokenizer, samples, summary, before, after, shown=()):
        """Write the files of a finished run and print its results. summary.json follows model/, so that a
        run with a summary is complete; plots come after it."""
        checkpoints.save_model(model, tokenizer, self.folder / "model", self.dtype)
        if dist.is_main():
            files.write_jsonl(self.folder / "samples.jsonl", samples)
            write_json(self.folder / "summary.json", summary)
            for plot in self.plots:
                plots.draw(partial(plot, self.folder))
            logs.print_results(before, after, shown, samples)
            hint = "; --save-dtype float32 keeps the trained weights" if self.dtype != torch.float32 else ""
            print(f"wrote {self.folder}/model ({str(self.dtype).removeprefix('torch.')}){hint}")


def find_run(args, stage="") -> str | None:
    """Decide what to do with `args.output_dir`: "finished" (nothing is left to do), "resume", or None (start
    a new run). Changes nothing. stage: of this command, which a finished run must have too; "": any.

    Raises InputError if a run is there and neither --overwrite nor --resume is given, or if the files to be
    replaced are not those of a run, or are inputs of this one."""
    if not args.output_dir:
        raise InputError("--output-dir is empty. Name a folder.")
    folder = Path(args.output_dir)
    if dist.gather([(folder / "lock").exists()])[0]:
        _lock(folder)
    before = _args_of(folder)
    outputs = [folder] if folder.is_file() else [*_outputs(folder), *folder.glob("config.json")]
    if outputs and not before:
        raise InputError(f"{outputs[0]} is in the way, and {folder} is not a run. Use another --output-dir.")
    there = [(folder / name).exists() for name in ("summary.json", "model", *RESUMABLE)]
    finished, has_model, *begun = dist.gather([there])[0]  # rank 0 decides for all
    if finished and args.resume:
        program = before.get("stage", "another program")
        if stage and program != stage:
            raise InputError(f"{folder} was finished by {program}, not by {stage}. Use another --output-dir.")
        if dist.is_main():
            # The run itself may have set a flag that is None, or on or off
            given = {name: x for name, x in vars(args).items() if not isinstance(x, bool | None)}
            changed = identity.differences(before.get("args", {}), json.loads(json.dumps(given))).values()
            print("; changed and not used: ".join([f"{folder} is already finished, by {program}", *changed]))
        return "finished"
    if (finished or has_model or any(begun)) and not (args.resume or args.overwrite):
        what = "an unfinished run (--resume continues it)" if any(begun) else "a model but no summary.json"
        what = "a finished run" if finished else what
        raise InputError(f"{folder} holds {what}. Use --overwrite to replace it, or another --output-dir.")
    if args.resume and any(begun):
        checkpoints.checkpoint_state(folder / "checkpoint")  # raises for one of another version
        return "resume"
    for path in _removed(args):
        if path.is_symlink():
            raise InputError(f"{path} is a link to other files. Remove it, or use another --output-dir.")
    # Replacing the old run must not remove a model or data that this command reads
    removed = [path.resolve() for path in _removed(args)]
    inputs = {name: value for name, value in vars(args).items() if removed and name != "output_dir"}
    for name, text in [(name, text) for name, value in inputs.items() for text in _paths_in(value)]:
        path = Path(text).resolve()
        if path == folder.resolve() or any(map(path.is_relative_to, removed)):
            flag = f"--{name.replace('_', '-')} {text}"
            raise InputError(f"this run would remove {flag} before it is read. Use another --output-dir.")


def _args_of(folder) -> dict:
    """Read args.json of a folder; {} without one. Raises InputError if it was not written by a run."""
    def check(begun):
        begun["stage"].split()
        dict(**begun["args"], **begun.get("began_with", {}))
        datetime.fromisoformat(begun.get("began", "2000-01-01"))

    return files.read_json(folder / "args.json", f"{folder} may be no run. Use another --output-dir.", check)


def _paths_in(value) -> list[str]:
    """List all texts in a flag's value, or values, that may be paths. In name=path, a:0.5,b?x=y or
    module:function=path that is any text between two of these signs, since a path may contain signs too."""
    paths = []
    for text in value if isinstance(value, list | tuple) else [value]:
        signs = re.finditer("[?:,=]|$", text) if isinstance(text, str) else ()
        cuts = [-1, *(sign.start() for sign in signs)]
        paths += [text[i + 1 : j].strip() for i, j in itertools.combinations(cuts, 2)]
    return [path for path in paths if path]


def start_run(args, stage: str, state: str | None, held_out=None):
    """Prepare `args.output_dir` for the `state` that find_run returned, None or "resume", and write
    args.json. With None an old run is removed, so call it only after everything that a user can mistype has
    been read.

    held_out: fingerprint of the held-out set. Resuming with a different set raises InputError, because
      metrics before and after training would not be comparable."""
    folder = Path(args.output_dir)
    dist.barrier()  # ranks may take unequal time to tokenise data and download models
    if dist.is_main():
        folder.mkdir(parents=True, exist_ok=True)
    _lock(folder)
    if find_run(args) != state:
        raise InputError(f"another command changed {folder} after this one started. Start this one again.")
    packages = "transformers datasets tokenizers numpy".split()
    versions = {name: importlib.metadata.version(name) for name in packages}
    begun = {
        "stage": stage, "args": dataclasses.asdict(args), **machine.describe(),
        "began": chat.Clock.began.isoformat(), "git": _git_head(), "python": sys.version.split()[0],
        "versions": {**versions, "torch": torch.__version__}, "command": sys.argv,  # torch's with its build
        "began_with": identity.of_run(args, held_out) if dist.is_main() else {},
    }  # fmt: skip
    dist.barrier()  # rank 0 has hashed the files of models, which takes time
    # Rank 0 decides for all; gather also waits until every rank has looked, before anything changes
    before, current = dist.gather([_args_of(folder), json.loads(json.dumps(begun))])[:2]
    changed = identity.changes(before, current, folder) if state else []
    if dist.is_main():
        if not state:
            # Remove these first: after a crash, the remains must look neither finished nor resumable
            for name in ("summary.json", *RESUMABLE):
                (folder / name).unlink(missing_ok=True)
            for old in _removed(args):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        for what in changed:
            print(f"resuming with another {what}")
        write_json(folder / "args.json", begun)
    dist.barrier()


def _outputs(folder) -> list[Path]:
    """List the outputs of a run that are in its folder."""
    paths = [*(folder / name for name in OUTPUTS.split()), *folder.glob("*.png")]
    return [path for path in paths if os.path.lexists(path)]


def _removed(args) -> list[Path]:
    """List the outputs of an old run that a new run removes. --resume after a crash without a checkpoint is a
    new run too; a model that is there then stays until the new one replaces it."""
    outputs = _outputs(Path(args.output_dir))
    return [path for path in outputs if path.name != "model" or args.overwrite or not args.resume]


def _git_head() -> str | None:
    """Return the commit of this repository; None without git or outside a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--verify", "HEAD"]
    with contextlib.suppress(OSError):  # git is not installed
        head = subprocess.run(command, capture_output=True, text=True)
        return head.stdout.strip() if head.returncode == 0 else None


_locks = {}  # path -> open lock file of this process's run


def _lock(folder):
    """Lock a run's folder against other processes, until this process ends or starts another run. Raises
    InputError on every rank if another process holds the lock.

    The system releases a lock when its process ends in any way. On systems without locks (Windows, some
    network file systems) there is no protection."""
    path = folder.resolve() / "lock"
    is_locked = False
    if dist.is_main():
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            file = _locks.get(path) or open(path, "a")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_locked = True
            else:
                _locks.clear()  # closes, and so unlocks, the file of the previous run
                _locks[path] = file
    if dist.gather([is_locked])[0]:
        raise InputError(f"{folder} is in use by another process. Wait for it, or use another --output-dir.")
