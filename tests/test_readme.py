"""Check that README.md and docs/ are true: commands parse, and the links, files, code lines, metrics and
pictures that they name exist."""

import ast
import importlib
import re
import shlex

import processes
import pytest
import tyro

from common.run import cli
from common.run.cli import parse

ROOT = processes.ROOT
PATHS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*/*.md"))]
PAGES = {path: path.read_text("utf-8") for path in PATHS}
PROSE = {path: re.sub(r"^```.*?^```", "", text, flags=re.M | re.S) for path, text in PAGES.items()}
README, TEXT = PAGES[PATHS[0]], "\n".join(PAGES.values())
PROGRAMS = {f"common.programs.{name}" for name in "ai_feedback evaluate pairwise rehearsal".split()}
PROGRAMS.add("common.sampler")
PROGRAMS |= set(processes.SCRIPTS)
LINK = re.compile(r"(!?)\[[^]]+\]\(([^)\s]+)\)")
LINKS = [(path, picture, target) for path in PATHS for picture, target in LINK.findall(PROSE[path])]


def commands():
    """(module, *arguments) of every python or torchrun command of the bash blocks, and of those in the text that
    have flags."""
    blocks = re.findall(r"^```bash\n(.*?)^```", TEXT, re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`((?:python|torchrun)\s[^`]*\s--[^`]*)`", "\n".join(PROSE.values()))
    for line in lines:
        for command in line.split("#")[0].split(" && "):
            words = shlex.split(command.replace("$x", "1"))  # of a loop
            places = [i for i, word in enumerate(words) if re.fullmatch(r"\w+\.py|common(\.\w+)+", word)]
            if places and words[0] in ("python", "torchrun", "srun") and words[-1] != "--help":
                yield words[places[0]].removesuffix(".py"), *words[places[0] + 1 :]


@pytest.mark.parametrize("command", sorted(set(commands())), ids=" ".join)
def test_a_command_is_understood(command, tmp_path, monkeypatch):
    for file in {word for word in command if word.endswith(".csv")}:
        (tmp_path / file).touch()  # --columns looks whether it is there
    monkeypatch.chdir(tmp_path)
    understand(command[0], command[1:])


@pytest.fixture(autouse=True)
def runs_that_the_commands_name_are_of_the_tiny_world(monkeypatch):
    """Earlier commands of the pages make these runs; here they do not exist."""
    monkeypatch.setattr(cli, "_is_tiny_model", lambda name: name.startswith(("tiny", "dataset", "runs/", "$")))


def understand(module, words):
    module = importlib.import_module(module)
    parse(module.RECIPES, words) if hasattr(module, "RECIPES") else tyro.cli(module.Args, args=words)


def test_experiments_commands_parse_and_their_tables_are_those_of_the_pages(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    experiments, ran = importlib.import_module("experiments"), []
    for script, name in (("dpo_iterative", "cpl"), ("sft", "hir")):
        processes.patched(script, name, tmp_path)  # a module that can be imported
    monkeypatch.setattr(experiments.subprocess, "run", lambda words, **_: ran.append(words[1:]) or Ended())
    for commands in (experiments.RUNS, *(group.begin | group.arms for group in experiments.GROUPS.values())):
        for name, command in commands.items():
            if not command.startswith("=") and command not in experiments.MADE_HERE:
                folder = tmp_path / name.replace("/", "_")
                if folder.suffix != ".jsonl" and "-m common.programs.pairwise" not in command:
                    folder.mkdir(exist_ok=True)  # as the run would
                experiments.run(command.replace("{seed}", "0"), folder, 0)
    for words in ran:
        understand(
            words[1] if words[0] == "-m" else words[0].rpartition("/")[2].removesuffix(".py"),
            words[1 + (words[0] == "-m") :],
        )
    assert len(ran) > 60
    for file in (ROOT / "docs" / "results" / "tables").glob("*.md"):
        block = f"<!-- results/{file.name} -->\n{file.read_text()}<!-- end -->"
        assert block in TEXT, f"{file} is on no page, or another table is"


class Ended:
    returncode = 0
    stdout = ""


def test_all_scripts_and_programs_are_among_the_commands():
    assert PROGRAMS <= {command[0] for command in commands()}


def test_flags_in_the_text_are_those_of_a_program():
    fields = {name for program in PROGRAMS for name in importlib.import_module(program).Args.__annotations__}
    flags = re.findall(r"(?<![\w-])--(?:no-)?([a-z][\w-]*)", "\n".join(PROSE.values()))
    # of other programs, or of none
    others = {"help", "max_restarts", "only", "new_tokens", "seeds", "log", "logdir", "plot", "publish", "flag", "alpha"}
    fields |= {*vars(cli.EveryCommand()), *" ".join(cli.SYNONYMS).split(), *cli.FOREIGN_FLAGS}
    assert len(flags) > 60 and {flag.replace("-", "_") for flag in flags} <= fields | others


def test_the_readme_has_one_line_that_installs_and_tests():
    tests = [line for line in README.splitlines() if "-m pytest" in line]
    assert len(tests) == 1 and tests[0].startswith("python3 -m venv")  # it makes all it needs


def test_reproduce_runs_the_commands_of_the_docs(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    reproduce = importlib.import_module("reproduce")
    page = "By `python tests/benchmarks/kl.py A`.\n```bash\nS=1\nfor x in 1 2; do\n    python a.py \\\n"
    page += (
        "        --x $x    # comment\ndone\npython b.py\n```\n```python\nn = 1\n```\n```python\nn += 1\n```\n"
    )
    loop = "for x in 1 2; do\n    python a.py \\\n        --x $x\ndone"
    pythons = ["python - <<'END'\nn = 1\nEND", "python - <<'END'\nn = 1\nn += 1\nEND"]
    blocks = ["S=1", loop, "python b.py", *pythons]
    assert reproduce.commands(page) == [*blocks, "python tests/benchmarks/kl.py A"]
    left_out = [
        bool(reproduce.LEFT_OUT.search(x)) for x in ("pip install x", "python a.py ORG/MODEL", "python b.py")
    ]
    assert left_out == [True, True, False] and {ROOT / name for name in reproduce.PAGES.split()} <= set(PATHS)
    # no two of them write into one folder, or all of them could not be run in one clone; the log has them all
    made = {(name, x): file for name in reproduce.PAGES.split() for _, x, file in reproduce.of_page(name)}
    commands = {command for (_, command), file in made.items() if file}
    folders = [folder for command in commands for folder in re.findall(r"--output(?:-dir)? (\S+)", command)]
    assert len(folders) > 30 and sorted(set(folders)) == sorted(folders)
    log = (ROOT / "docs" / "results" / "tables" / "reproduce.txt").read_text("utf-8").splitlines()
    listed = [reproduce.in_short(*place) for place, file in made.items() if file]
    assert [line.split("\t")[0] for line in log] == listed


def test_links_lead_somewhere_and_every_page_is_reached():
    within = [link for link in LINKS if not link[2].startswith("https://")]
    for page, _, target in within:
        path, _, anchor = target.partition("#")
        path = (page.parent / path).resolve() if path else page
        assert path.exists(), f"{page.name}: {target}"
        headings = re.findall(r"^#+ (.+)$", PROSE.get(path, ""), re.M)
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, f"{page.name}: {target}"
    assert set(PATHS[1:]) <= {ROOT / target for page, _, target in LINKS if page == PATHS[0]}


def test_the_code_next_to_the_formulas_of_math_is_that_of_losses():
    losses = (ROOT / "common" / "losses.py").read_text()
    page = (ROOT / "docs" / "learn" / "math.md").read_text()
    sections = re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", page, re.M | re.S)
    functions = set()
    for title, text in sections:
        names = title.split(" and ")
        functions.update(names)
        bodies = "".join(losses.partition(f"\ndef {name}(")[2].partition("\ndef ")[0] for name in names)
        lines = [line for block in re.findall(r"```python\n(.*?)```", text, re.S) for line in block.splitlines()]
        assert "$$" in text and lines
        assert all(line in bodies for line in lines), title
    assert functions == set(re.findall(r"^def ([a-z]\w+)", losses, re.M)) - {"masked_sum", "masked_mean"}


def test_named_metrics_are_logged():
    """The code contains each name, or its start (eval/ece for eval/ece_low), or its group and its words."""
    code = "\n".join(path.read_text() for path in [*ROOT.glob("*.py"), *(ROOT / "common").glob("**/*.py")])
    quoted = {str(node.value) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)}
    words = set(re.findall(r"[a-z]+", code))
    lists = PAGES[ROOT / "docs" / "use" / "runs.md"].partition("## Metrics")[2]
    lines = re.findall(r"^- (`.*?): ", lists, re.M)
    names = {name for line in lines for name in re.findall(r"`([\w-]+/[a-z_]+)`", line)}
    assert len(names) > 80
    for name in names:
        group, _, rest = name.partition("/")
        composed = {group, f"{group}/"} & quoted and set(rest.split("_")) <= words
        assert {name, name.rpartition("_")[0] or name} & quoted or composed, name


def test_named_files_exist():
    named = set(re.findall(r"(?<![\w/])(?:common|tests|docs)/[\w/]+\.\w+", TEXT))
    missing = {name for name in named if not (ROOT / name).is_file()}
    assert not missing and len(named) > 25


def test_no_machines_path_or_registry_is_named():
    for path in ROOT.rglob("*"):
        ours = not any(part == "runs" or part.startswith(".venv") for part in path.relative_to(ROOT).parts)
        if ours and path.suffix in (".py", ".md", ".sh", ".txt"):
            text = path.read_text(errors="replace")
            assert not re.search(r"(?<![\w.])/(tmp|work|home|root)/\w", text), path


def test_every_picture_has_a_run_that_makes_it_and_is_shown(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    made = {f"{name}.png" for name in importlib.import_module("pictures").PICTURES}
    there = {path.name: path.stat().st_size for path in (ROOT / "docs" / "results").glob("*.png")}
    shown = {target.rpartition("/")[2] for _, picture, target in LINKS if picture}
    assert made == set(there) == shown and max(there.values()) < 100_000
