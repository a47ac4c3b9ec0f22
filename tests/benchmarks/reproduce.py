"""Run the commands of the docs, page by page, so that every number next to them can be reproduced.

    python tests/benchmarks/reproduce.py                              PAGES below, 34 hours of a core
    python tests/benchmarks/reproduce.py README.md docs/learn/kl.md         these
    python tests/benchmarks/reproduce.py --list docs/learn/kl.md            the commands that would run
    python tests/benchmarks/reproduce.py --log                        into docs/results/tables/reproduce.txt: what has run

A command's output and its time are in a file of runs/reproduce; a command that has succeeded is not run again.
Left out, with a line: installation, torchrun, GPUs, this program, and commands with a name to fill in (ORG/MODEL,
GROUP, rows.jsonl).
"""

import re
import subprocess
import sys
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "docs" / "results" / "tables"
PAGES = """README.md docs/learn/rejection_sampling.md docs/results/rejection_sampling.md docs/learn/reward.md
docs/results/reward.md docs/learn/advantage_model.md docs/results/advantage_model.md docs/learn/ppo.md
docs/results/ppo.md docs/results/forgetting.md docs/learn/dpo_iterative.md docs/results/dpo_iterative.md
docs/results/ladder.md docs/use/evaluate.md docs/results/frontier.md docs/learn/kl.md docs/results/ai_feedback.md
docs/learn/cpl.md docs/results/cpl.md docs/learn/hir.md docs/results/hir.md docs/results/claims.md
docs/results/renewed_reward.md docs/results/benchmarks.md"""
LEFT_OUT = re.compile(
    r"\b(ORG|DIR|RUN|GROUP|STUDENT|TEACHER_RUN|FOLDER|PAIRS|ME)\b|^(pip|git|python3|torchrun|vllm|llama|hf|cp)\b|SmolLM2"
    r"|(?<![/\w])(rows|pairs|prompts|held_out|clean|my\w+|hh_\w+|rankings)\.\w+|common.sampler|gpu.py|reproduce.py"
)
SETS = re.compile(r"(export )?\w+=\S+$")  # holds for the commands after it
ALONE = re.compile(r"`(python (?:tests/benchmarks/|[^`]*--output-dir )[^`]*)`")  # within a sentence


def commands(page) -> list[str]:
    """Of a page's blocks of bash and python, in their order (a loop is one), then of its sentences."""
    found, python = [], ""
    for language, block in re.findall(r"```(bash|python)\n(.*?)```", page, re.DOTALL):
        if language == "python":  # what the blocks before it imported and named holds
            python += block
            found.append(f"python - <<'END'\n{python}END")
            continue
        command = ""
        for line in block.splitlines():
            command += line.split("    #")[0].rstrip() + "\n"
            whole = not command.endswith("\\\n")
            if whole and subprocess.run(["bash", "-n", "-c", command], capture_output=True).returncode == 0:
                found.append(command.strip())
                command = ""
    found += [" ".join(command.split()) for command in ALONE.findall(page)]
    return [command for command in found if command and not command.startswith("#")]


def of_page(name):
    """Return the commands of a page, each with the settings before it and the file of its output; None: left out."""
    before = ""
    for command in commands((ROOT / name).read_text()):
        title = re.sub(r"\W+", "_", command)[:60]
        file = ROOT / "runs" / "reproduce" / f"{title}_{zlib.crc32((before + command).encode()):08x}.txt"
        if SETS.fullmatch(command):
            before += command + "\n"
        else:
            yield before, command, None if LEFT_OUT.search(command) else file


def run(name, only_list):
    for before, command, file in of_page(name):
        if file is None:
            print(f"left out: {command.splitlines()[0]}")
        elif only_list:
            print(command)
        elif not file.exists():
            begun = time.time()
            script = f"set -euo pipefail\n{before}{command}"
            ended = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
            took = f"{time.time() - begun:.0f} s"
            print(f"{name}, {took}, exit code {ended.returncode}: {command.splitlines()[0]}", flush=True)
            if ended.returncode:
                print(ended.stderr[-2000:])
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(f"{command}\n\n{ended.stdout}\n{took}\t{commit()}\n")


def commit():
    git = ["git", "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def in_short(name, command):
    text = " ".join(command.replace("\\\n", " ").split())
    return f"{name}: {text if len(text) < 90 else f'{text[:45]} ... {text[-40:].lstrip()}'}"


def of_table(command) -> str | None:
    """Return time and commits of a group of experiments.py from the last line of its table, if that has both."""
    group = re.search(r"experiments.py (\w+) --seeds", command)
    table = TABLES / f"{group[1]}.md" if group else None
    last = table.read_text().splitlines()[-1] if table and table.exists() else ""
    said = re.search(r"at ([0-9a-f]{7}[0-9a-f, ]*); \d+ runs, (\d+) minutes", last)
    return f"{60 * int(said[2])} s\t{said[1]}" if said else None


def log():
    """docs/results/tables/reproduce.txt: time and commit of the commands that have ended well, here, or elsewhere if
    the log or a table has them."""
    path, known, lines = TABLES / "reproduce.txt", {}, {}
    if path.exists():
        known = dict(line.split("\t", 1) for line in path.read_text().splitlines())
    for name in PAGES.split():
        for _, command, file in of_page(name):
            begin = in_short(name, command)
            if measured := of_table(command):
                known[begin] = measured
            if file and file.exists():
                known[begin] = file.read_text().splitlines()[-1]
            if file:
                lines[f"{begin}\t{known.get(begin, 'not run')}\n"] = None
    path.write_text("".join(lines))


if __name__ == "__main__":
    given = [name for name in sys.argv[1:] if not name.startswith("-")]
    if unknown := {name for name in sys.argv[1:] if name.startswith("-")} - {"--list", "--log"}:
        sys.exit(f"{__doc__}\nunknown: {', '.join(unknown)}")  # instead of 34 hours of runs
    if "--log" in sys.argv:
        log()
    else:
        for name in given or PAGES.split():
            run(name, "--list" in sys.argv)
