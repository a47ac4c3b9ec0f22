"""README.md says what is so: its commands are understood, its lines of code and its files are there."""

import importlib
import re
import shlex

import processes
import pytest
import tyro

from common.run import parse

README = (processes.ROOT / "README.md").read_text()
CODE = re.findall(r"^```bash\n(.*?)^```", README, re.M | re.S)


def commands():
    """(module, arguments) of every python or torchrun command of the bash blocks, and of those in the text that have
    flags."""
    lines = [line for block in CODE for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`((?:python|torchrun) [^`]* --[^`]*)`", README)
    for line in lines:
        for command in shlex.split(line, comments=True) and line.split("#")[0].split(" && "):
            words = shlex.split(command)
            places = [i for i, word in enumerate(words) if re.fullmatch(r"(\w+\.py|common\.\w+)", word)]
            rest = [word for word in words[places[0] + 1 :] if word != "..."] if places else []
            general = {"TASK", "--help"} & set(rest) or rest and rest[-1] == "--dataset"  # for any script
            if places and words[0] in ("python", "torchrun", "srun") and not general:
                yield words[places[0]].removesuffix(".py"), rest


COMMANDS = sorted({(module, *arguments) for module, arguments in commands()})


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_is_understood(command):
    module = importlib.import_module(command[0])
    if hasattr(module, "RECIPES"):
        parse(module.RECIPES, command[1:])
    else:
        tyro.cli(module.Args, args=command[1:])


def test_all_scripts_and_tools_are_among_the_commands():
    wanted = {
        *processes.SCRIPTS,
        "common.ai_feedback",
        "common.evaluate",
        "common.sampler",
        "common.rehearsal",
    }
    assert wanted <= {command[0] for command in COMMANDS}


def test_the_lines_beside_the_equations_are_lines_of_losses():
    squeeze = lambda text: re.sub(r"\s+", "", text)
    losses = (processes.ROOT / "common" / "losses.py").read_text()
    table = README.partition("## The math, side by side")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .* \| `(.+)` \|$", table, re.M)
    assert len(rows) == 13
    for name, line in rows:
        body = losses.partition(f"\ndef {name}(")[2].partition("\ndef ")[0]
        assert squeeze(line.replace("\\|", "|")) in squeeze(body), name


def test_files_that_are_named_are_there():
    named = set(re.findall(r"(?:common|tests|docs)/[\w/]+\.\w+", README))
    missing = {name for name in named if not (processes.ROOT / name).is_file()}
    assert not missing and len(named) > 30


def test_no_machines_path_or_registry_is_named():
    for path in processes.ROOT.rglob("*"):
        if (
            path.suffix in (".py", ".md", ".sh", ".txt")
            and ".venv" not in path.parts
            and "runs" not in path.parts
        ):
            text = path.read_text(errors="replace")
            assert not re.search(r"(?<![\w.])/(tmp|work|home|root)/\w", text), path


def test_every_picture_has_a_run_that_makes_it_and_is_shown(monkeypatch):
    monkeypatch.syspath_prepend(processes.ROOT / "tests" / "benchmarks")
    made = {f"{name}.png" for name in importlib.import_module("pictures").PICTURES}
    there = {path.name for path in (processes.ROOT / "docs").iterdir()}
    assert made == there == set(re.findall(r"!\[[^]]+\]\(docs/(\w+\.png)\)", README))
    assert all(path.stat().st_size < 100_000 for path in (processes.ROOT / "docs").iterdir())
