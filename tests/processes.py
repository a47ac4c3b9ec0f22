"""Run the scripts as processes: one python, torchrun with 2 ranks, or many fast ones.

`script(name)` runs the command line of name.py in a child of a server that has imported everything and
computed nothing, so that a command takes tenths of a second instead of the seconds of importing torch. The
child has its own exit code, stdout and stderr, and can be ended by kill -9 (SIGKILL) at a chosen moment:

    row N        the metrics row of step N is written (ppo.py: of the iteration that ends at step N)
    tensors N    the tensors of checkpoint N are written, its other files are not
    pointer N    checkpoint N is complete, but `latest` still names the previous one
    older N      `latest` names checkpoint N, the previous one is not removed yet
    results      training and the last evaluation are done, nothing is exported
    export       in the middle of writing model.tmp; export N: versions/N.tmp
    summary      model/ is complete, summary.json is not written

dpo_iterative.py only:

    pairs N      pairs.jsonl of iteration N is written, no step has trained on it

rejection_sampling.py and dpo_iterative.py:

    pool N       responses were appended to pool.jsonl for the N-th time
    scored N     the responses of iteration N are scored, the pool is not rewritten
    version N    versions/N is written, not evaluated
    studied N    versions/N is evaluated and its metrics are logged, versions/N.json is not written
    model        model.tmp is complete, model/ does not exist

`nan N RANK` does not kill: the N-th loss on that rank is NaN. A word before the moment replaces kill -9:

    interrupt    Ctrl-C
    full         the disk is full from then on: no file grows (only with the server's children)
    rank1        kill -9 of rank 1 only
    copy         the run continues; the files that kill -9 would leave are copied to "OUTPUT_DIR at MOMENT",
                 so that one run serves a whole list of moments

    python tests/processes.py NAME MOMENT [arguments of NAME.py]    the same as a program, for torchrun
"""

import atexit
import gc
import importlib.util
import itertools
import json
import os
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

SCRIPTS = ("sft", "reward", "advantage_model", "rejection_sampling", "ppo", "dpo_iterative")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
ENV = {
    k: v
    for k, v in os.environ.items()
    if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
}
# One thread a process, as torchrun sets it: bitwise claims hold for equal numbers of threads. No network.
ENV |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
SECONDS = 400  # no command of the tests takes nearly as long


def patched(script, name, folder):
    """A copy of script.py with docs/NAME.patch, as a module of that name."""
    shutil.copy(ROOT / f"{script}.py", folder)
    subprocess.run(["git", "apply", ROOT / "docs" / "learn" / f"{name}.patch"], cwd=folder, check=True)
    spec = importlib.util.spec_from_file_location(name, folder / f"{script}.py")
    sys.modules[name] = importlib.util.module_from_spec(spec)  # where tyro looks for its types
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class Ended(NamedTuple):
    code: int  # negative: killed by that signal
    out: str
    err: str

    @property
    def errors(self):
        """The lines of stderr that speak to the user, without progress bars."""
        return [line for line in self.err.replace("\r", "\n").splitlines() if line.startswith("error")]


def python(*argv, cwd=ROOT) -> Ended:
    command, pipe = [sys.executable, *map(str, argv)], subprocess.PIPE
    with subprocess.Popen(command, env=ENV, cwd=cwd, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks when it is asked to, not when it is killed
            out, err = process.communicate()
            return Ended(124, out, f"{err}\nstill running after {SECONDS} seconds")
    return Ended(process.returncode, out, err)


def torchrun(*argv, options=(), forks=True) -> Ended:
    """torchrun with two ranks. forks: torchrun and its ranks are forks of the server, and import nothing."""
    words = ["--standalone", "--nproc-per-node", 2, *options, *argv]
    return script("torchrun", *words) if forks else python("-m", "torch.distributed.run", *words)


def flags(**values) -> list[str]:
    """{"max_steps": 3, "packing": False, "threshold": (0, 1)} -> --max-steps 3 --no-packing --threshold 0 1"""
    out = []
    for name, value in values.items():
        name = name.replace("_", "-")
        out += (
            [f"--{name}" if value else f"--no-{name}"]
            if isinstance(value, bool)
            else [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
        )
    return out


def script(
    name, *argv, moment=None, cwd=ROOT, plots=True, ranks=1, restart=0, kill_after=None, alone=False, forks=False
) -> Ended:
    """`python NAME.py ARGV` (name: a script's, or a path) in a child of the server, or in one child for each of
    `ranks`, as torchrun starts them, the first time or again (`restart`); the exit code is rank 0's. plots: draw
    them, half the time of a short run. kill_after: seconds until a kill -9. alone: without this project.
    forks: the programs that it starts are forks, too. name "torchrun": its own command line, and so are its ranks."""
    if not hasattr(script, "server"):
        command = [sys.executable, __file__, "--serve"]
        script.server = subprocess.Popen(
            command, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(script.server.kill)
    with tempfile.TemporaryDirectory() as folder:
        job = {"name": str(name), "argv": list(map(str, argv)), "moment": moment, "plots": plots}
        job |= {"ranks": ranks, "restart": restart, "kill_after": kill_after, "cwd": str(cwd), "alone": alone}
        job["forks"] = forks
        script.server.stdin.write(json.dumps({**job, "folder": folder}) + "\n")
        script.server.stdin.flush()
        code = int(script.server.stdout.readline())
        return Ended(code, (Path(folder) / "out").read_text(), (Path(folder) / "err").read_text())


def _serve():
    import transformers

    for name in ("datasets", "matplotlib.pyplot", "tyro", *SCRIPTS, "common.programs.pairwise"):
        importlib.import_module(name)
    # imported on first use
    for name in ("AutoModelForCausalLM", "AutoModelForSequenceClassification", "LlamaForCausalLM"):
        getattr(transformers, name)
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    gc.collect()
    gc.freeze()  # a child that collects garbage need not look at, and so copy, what was imported
    for line in sys.stdin:
        job, port, children = json.loads(line), _free_port(), []
        ranks, restart, kill_after = (job.pop(name) for name in ("ranks", "restart", "kill_after"))
        screen, _serve.screen = os.pipe()  # of children that can write no files any more
        for rank in range(ranks):
            children.append(os.fork())
            if children[-1] == 0:
                _child(**job, environment=_environment(rank, ranks, port, restart))
        os.close(_serve.screen)
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(children[0], signal.SIGKILL)  # not waited for yet, so nobody else has this number
        with open(screen, "rb") as shown, open(f"{job['folder']}/err", "ab") as file:
            file.write(shown.read())
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        print(codes[0], flush=True)


def _free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def _environment(rank, ranks, port, restart):
    """What torchrun tells a rank."""
    if ranks == 1:
        return {}
    found = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    found |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return found | {"TORCHELASTIC_RESTART_COUNT": restart, "TORCHELASTIC_RUN_ID": "tests"}


def _child(name, argv, moment, plots, cwd, alone, forks, folder, environment):
    for number, stream in ((1, "out"), (2, "err")):
        path = f"{folder}/{stream}"
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)  # ranks share it
    os.environ.update({key: str(value) for key, value in environment.items()})
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests run behind `&` it is ignored
    signal.alarm(SECONDS)
    os.chdir(cwd)
    if forks:
        subprocess.Popen = Forked
    if name == "torchrun":
        run_torchrun(argv)
    if name.endswith(".py"):
        _run_file(name, argv, alone)
    if not plots:
        from common.run import plots as pictures

        pictures.scorer = lambda *_, **__: None
        importlib.import_module(name).PLOTS = []
    try:
        _run(name, argv, moment)
    except SystemExit as stop:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(stop.code or 0)
    os._exit(99)  # launch always exits


class Forked(subprocess.Popen):
    """`python -u PATH ARGV` or `python -m torch.distributed.run ARGV` as a fork of this process, which has imported
    everything."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *_):
        self.pid, self._child_created = os.fork(), True
        if self.pid > 0:
            return
        try:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # which torchrun handles
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()  # torchrun ends a rank's whole group
            os.environ.update(env)
            _, flag, path, *argv = args
            run_torchrun(argv) if flag == "-m" else _run_file(path, argv, False)
        except SystemExit as stop:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(stop.code or 0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)


def run_torchrun(argv):
    """torchrun with its agent in this process and ranks that are forks of it."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = Forked
    run.main(list(map(str, argv)))
    sys.exit()


def _run_file(path, argv, alone):
    if alone:
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("common", *SCRIPTS):
                del sys.modules[name]
        sys.path[:] = [x for x in sys.path if Path(x).resolve() not in (ROOT, ROOT / "tests")]
    sys.argv, sys.path[:0] = [path, *argv], [str(Path(path).parent)]
    runpy.run_path(path, run_name="__main__")
    sys.exit()


def _run(name, argv, moment):
    from common.run.run import launch

    module = importlib.import_module(name)
    if "base" in module.RECIPES and (not argv or argv[0].startswith("-")):
        argv = ["tiny", *argv]  # also on data and models of the tests' own
    sys.argv = [f"{name}.py", *argv]
    for one in [moment] if isinstance(moment, str) else moment or []:
        _arrange(one, module)
    launch(module.main, module.RECIPES)


# -- the end at a moment of choice -------------------------------------------------------
def _arrange(moment, script):
    import shutil

    import torch.distributed.checkpoint
    import transformers

    from common import dist
    from common.data import files
    from common.run import checkpoints, logs, pool, run

    how, _, rest = moment.partition(" ")
    how, moment = (how, rest) if how in ("interrupt", "full", "rank1", "copy") else ("", moment)
    what, n, rank = [*moment.split(), "", ""][:3]
    training = {"optim/lr", "kl/per_response"}  # keys of a row of training, the latter of ppo.py

    def die():
        if how == "rank1" and dist.rank() != 1:
            return
        if how == "copy":
            folder = sys.argv[sys.argv.index("--output-dir") + 1]
            if not Path(f"{folder} at {moment}").exists():
                shutil.copytree(folder, f"{folder} at {moment}")
            return
        os.write(2, f"{how or 'killed'} at {moment}\n".encode())
        if how == "full":
            _fill_the_disk()
        else:
            os.kill(os.getpid(), signal.SIGINT if how == "interrupt" else signal.SIGKILL)

    def before(owner, name, when):
        plain = getattr(owner, name)

        def patched(*args, **options):
            if when(*args, **options):
                die()
            return plain(*args, **options)

        setattr(owner, name, patched)

    def after(owner, name, when):
        run = getattr(owner, name)

        def patched(*args, **options):
            result = run(*args, **options)
            if when(*args, **options):
                die()
            return result

        setattr(owner, name, patched)

    def latest(folder):
        path = Path(folder) / "latest"
        return path.read_text() if path.exists() else ""

    if what == "start":
        die()
    elif what == "row":
        after(logs.Metrics, "log", lambda self, step, epoch, **v: step == int(n) and training & set(v))
    elif what == "tensors":
        begun = []
        before(checkpoints, "save_checkpoint", lambda root, step, *_, **__: begun.append(step))
        after(torch.distributed.checkpoint, "save", lambda *_, **__: begun[-1] == int(n))
    elif what == "pointer":
        before(os, "replace", lambda a, b: Path(b).name == "latest" and Path(a).read_text() == f"step_{n}")
    elif what == "older":
        before(
            shutil,
            "rmtree",
            lambda path, **_: (
                Path(path).name.startswith("step_")
                and not Path(path).name.endswith(".tmp")
                and latest(Path(path).parent) == f"step_{n}" != Path(path).name
            ),
        )
    elif what == "results":
        after(logs.Metrics, "log", lambda self, step, epoch, **v: step > 0 and not training & set(v))
    elif what == "export":
        before(
            transformers.PreTrainedTokenizerBase,
            "save_pretrained",
            lambda self, path, **_: (f"versions/{n}.tmp" if n else "model.tmp") in str(path),
        )
    elif what == "summary":
        before(run, "write_json", lambda path, value: str(path).endswith("summary.json"))
    elif what == "pool":
        appends = itertools.count(1)
        name = lambda file: os.readlink(f"/proc/self/fd/{file}")
        after(os, "fsync", lambda file: name(file).endswith("/pool.jsonl") and next(appends) == int(n))
    elif what == "scored":
        scored = lambda pool: any(row["iteration"] == int(n) and row["scorer"] for row in pool.rows)
        before(pool.Pool, "write", scored)
    elif what == "pairs":
        made = lambda path, rows: str(path).endswith("pairs.jsonl") and rows[-1]["iteration"] == int(n)
        after(files, "write_jsonl", made)
    elif what == "version":
        after(checkpoints, "save_model", lambda model, tokenizer, path, *_: str(path).endswith(f"versions/{n}"))
    elif what == "studied":
        before(files, "write_json", lambda path, value: str(path).endswith(f"versions/{n}.json"))
    elif what == "model":
        before(Path, "rename", lambda self, target: self.name == "model.tmp")
    elif what == "nan":
        calls = []

        def poison(plain):
            def poisoned(*args, **options):
                calls.append(1)
                loss, parts = plain(*args, **options)
                if len(calls) != int(n) or dist.rank() != int(rank or 0):
                    return loss, parts
                nan = {key: value * float("nan") for key, value in parts.items() if key.endswith("_sum")}
                return loss * float("nan"), {**parts, **nan}

            return poisoned

        for name in ("sft_loss", "bradley_terry_loss", "advantage_model_loss", "ppo_value_loss", "dpo_loss"):
            if hasattr(script, name):
                setattr(script, name, poison(getattr(script, name)))
    else:
        raise ValueError(moment)


def _fill_the_disk():
    """An approximation of a full disk: every write that extends a file fails. Output to the console uses a pipe."""
    for number in (1, 2):
        os.dup2(_serve.screen, number)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # python ignores SIGXFSZ: the write gives an error


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _serve()
    # torchrun starts killed ranks again: what is arranged happens once
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    _run(sys.argv[1], sys.argv[3:], sys.argv[2] if first else None)
