"""Experiments on the tiny world: arms that differ in one thing, compared on the same held-out prompts by the true
reward, or as scorers on the same labelled pairs. Every arm and seed is a run of its own in runs/experiments;
they begin with the quickstart's runs and those of runs/begin; what is finished is not run again.

    python tests/benchmarks/experiments.py                     all, 4 to 5 hours of a core
    python tests/benchmarks/experiments.py dpo pool --publish

With --publish a group's table goes to docs/results/tables/GROUP.md and to the pages that have a place for it.
"""

import os
import re
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import peers
import torch
import tyro

from common.data import files, tiny
from common.loading import pretrained
from common.scoring import measures

RUNS = {  # what arms begin with
    "runs/sft": "sft",
    "runs/reward": "reward",
    "runs/advantage_model": "advantage_model",
    "runs/rejection_sampling": "rejection_sampling",
    "runs/begin/reward_biased": "reward --dataset tiny:length_bias=0.6",
    "runs/begin/reward_safety": "reward --dataset tiny:label=safety",
    "runs/begin/pairs": "-m common.programs.pairwise --model runs/sft",
    "runs/begin/preference": "sft tiny --model runs/sft --dataset runs/begin/pairs/train.jsonl --epochs 2 "
    "--lr 1e-3 --weight-decay 0.1 --batch-size 8 --sample-prompts 0 --eval-dataset runs/begin/pairs/held_out.jsonl",
}
PYTHONPATH = os.pathsep.join((str(peers.ROOT), str(peers.ROOT / "tests")))  # for cpl.py, and gold_labeler
ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHONPATH}
FOLDER = peers.ROOT / "runs" / "experiments"  # GROUP/SEED/ARM
HALF, FORGET = "tiny:commands=copy+ends+first+loop", "tiny:commands=rest+reverse+next+double"


@dataclass
class Group:
    arms: dict[str, str]
    """A line of the table: its command, where {out} is the folder of this group and {seed}, or "=GROUP/FOLDER",
    an arm of another group."""
    over: tuple[tuple[str, str], ...] = ()
    """Two arms: the first one's true reward over the second one's, on the same prompts."""
    first: str = "runs/sft"
    """The policy that all are compared with; "" where arms are scorers."""
    prompts: tuple[str, ...] = ("tiny",)
    """One table for each set of held-out prompts."""
    begin: dict[str, str] = field(default_factory=dict)
    """File or folder of `out`: the command that makes it for the arms."""


def pool(flags=""):
    return f"rejection_sampling --dataset {{out}}/prompts.jsonl --eval-dataset tiny {flags}"


def tuned(flags=""):
    return f"reward --dataset tiny:seed=1 --max-steps 32 --length-prompts 0 --eval-every 0 {flags}"


def margins(flags=""):
    arms = [f"--margin {margin}{flags}" for margin in ("none", "small", "large")]
    return {f"`{arm}`": f"reward --length-prompts 0 --eval-every 0 {arm}" for arm in arms}


def others(flags=""):
    return f"advantage_model --length-prompts 0 --eval-every 0 {flags}"


def cpl(flags):
    return f"{{out}}/cpl {flags}"


def labels(labeler):
    rows = f"{{out}}/labels_{labeler}/rows.jsonl"
    return {
        f"labels_{labeler}": f"{FEEDBACK} label --model gold_labeler:{labeler} --dataset tiny",
        f"reward_{labeler}": f"reward --dataset {rows} --eval-dataset tiny --sft-model runs/sft",
    }


FEEDBACK = "-m common.programs.ai_feedback"
AM = f"ppo --scorer runs/advantage_model --dataset {HALF} --reward-norm none"
SWEEP = "rejection_sampling --temperatures 0.2 0.4 0.6 0.8 1.0 1.3 1.6 2.0 --sweep-prompts 200"
PAIRS = "--offline-data tiny --offline-pairs 1480"
OFFLINE = f"dpo_iterative --iterations 0 {PAIRS}"
GROUPS = {
    "rejection_sampling": Group(
        {
            "the recipe": "rejection_sampling",
            "`--candidates last`": "rejection_sampling --candidates last",
            "the Advantage Model as scorer": "rejection_sampling --scorer runs/advantage_model",
            "`--scorer common.data.tiny:gold_scorer`": "rejection_sampling --scorer common.data.tiny:gold_scorer",
            "`--temperatures 0.7 1.0 1.3`": "rejection_sampling --temperatures 0.7 1.0 1.3",
            "recipe `rest`": "rejection_sampling rest",
        },
    ),
    "pool": Group(  # the same 500 prompts, 500 rows and steps in every iteration: do old responses help?
        {"pool of all iterations": pool(), "`--candidates last`": pool("--candidates last")},
        over=(("pool of all iterations", "`--candidates last`"),),
        begin={"prompts.jsonl": "prompts"},
    ),
    "ppo": Group(
        {
            "the recipe": "ppo",
            "`--safety-scorer runs/reward_safety`": "ppo --safety-scorer runs/begin/reward_safety",
            "`--top-p 0.9`": "ppo --top-p 0.9",
            "`--ptx-dataset tiny:kind=text --ptx-coef 0.1`": "ppo --ptx-dataset tiny:kind=text --ptx-coef 0.1",
            "`--reward-norm whiten`": "ppo --reward-norm whiten",
            "`--value-warmup-steps 0`": "ppo --value-warmup-steps 0",
            "`--prompts-per-iteration 128 --n-samples 1`": "ppo --prompts-per-iteration 128 --n-samples 1",
            "`--kl-coef 0`, scorer of `tiny:length_bias=0.6`": "ppo --scorer runs/begin/reward_biased --kl-coef 0",
        },
        over=(
            ("`--top-p 0.9`", "the recipe"),
            ("`--reward-norm whiten`", "the recipe"),
            ("`--value-warmup-steps 0`", "the recipe"),
            ("`--prompts-per-iteration 128 --n-samples 1`", "the recipe"),
        ),
    ),
    "ppo_from_rejection_sampling": Group(
        {
            "PPO": "ppo --model runs/rejection_sampling",
            "`--safety-scorer`": "ppo --model runs/rejection_sampling --safety-scorer runs/begin/reward_safety",
        },
        first="runs/rejection_sampling",
    ),
    "rehearsal": Group(  # PPO sees four commands; the other four are the forget set
        {
            "RM-PPO": f"ppo --dataset {HALF} --reward-norm none",
            "RM-PPO, `--reward-norm mean`": f"ppo --dataset {HALF} --reward-norm mean",
            "AM-PPO": AM,
            "AM-PPO-SR": f"{AM} --rehearsal-data {{out}}/rehearsal.jsonl",
        },
        over=(("AM-PPO", "RM-PPO"), ("AM-PPO-SR", "AM-PPO")),
        prompts=(HALF, FORGET),
        begin={
            "rehearsal.jsonl": "-m common.programs.rehearsal --model runs/sft --scorer runs/advantage_model "
            f"--clusters 8 --dataset {HALF}"
        },
    ),
    "dpo": Group(
        {
            "the recipe": "dpo_iterative",
            "offline DPO, as many pairs (1,480)": OFFLINE,
            "`--start-from sft`": "dpo_iterative --start-from sft",
            "`--reference last`": "dpo_iterative --reference last",
            "offline pairs in the first iteration": f"dpo_iterative {PAIRS}",
            "`--enhancer previous`": "dpo_iterative --enhancer previous",
            "the true reward as oracle": "dpo_iterative --scorer common.data.tiny:gold_scorer",
            "the Advantage Model as oracle": "dpo_iterative --scorer runs/advantage_model",
            "the pairwise preference model": "dpo_iterative --scorer common.programs.pairwise:oracle=runs/begin/preference",
            "a reward model of `tiny:length_bias=0.6`": "dpo_iterative --scorer runs/begin/reward_biased",
            "the same, `--length-penalty 0.1`": "dpo_iterative --scorer runs/begin/reward_biased --length-penalty 0.1",
        },
        over=(
            ("the recipe", "offline DPO, as many pairs (1,480)"),
            ("the recipe", "`--start-from sft`"),
            ("the recipe", "`--reference last`"),
            ("`--enhancer previous`", "the recipe"),
            ("the same, `--length-penalty 0.1`", "a reward model of `tiny:length_bias=0.6`"),
        ),
    ),
    "cpl": Group(  # dpo_iterative.py with docs/learn/cpl.patch
        {
            "offline DPO": "=dpo/offline_DPO_as_many_pairs_1_480",
            "offline CPL, α 0.1, λ 1": cpl(f"--iterations 0 {PAIRS} --alpha 0.1 --lam 1"),
            "γ 0.9": cpl(f"--iterations 0 {PAIRS} --alpha 0.1 --lam 1 --gamma 0.9"),
            "λ 0.5": cpl(f"--iterations 0 {PAIRS} --alpha 0.1 --lam 0.5"),
            "α 0.5": cpl(f"--iterations 0 {PAIRS} --alpha 0.5 --lam 1"),
            "α 0.5, λ 0.5": cpl(f"--iterations 0 {PAIRS} --alpha 0.5 --lam 0.5"),
            "iterative DPO": "=dpo/the_recipe",
            "iterative CPL, α 0.1, λ 1": cpl("--alpha 0.1 --lam 1"),
            "one iteration": cpl("--alpha 0.1 --lam 1 --iterations 1"),
        },
        over=(("γ 0.9", "offline CPL, α 0.1, λ 1"),),
        begin={"cpl.py": "cpl"},
    ),
    "others": Group(  # the Advantage Model with K other policies, whose ratios nobody knows afterwards
        {"K = 0": others(), "K = 1": others("--n-others 1"), "K = 2": others("--n-others 2")}, first=""
    ),
    "ppo_others": Group(
        {f"K = {k}": f"ppo --scorer runs/experiments/others/{{seed}}/K_{k}" for k in range(3)},
        over=(("K = 1", "K = 0"), ("K = 2", "K = 0")),
    ),
    "margin": Group(margins() | margins(" --max-steps 100"), first=""),
    "pmp": Group(  # Qwen: many pairs of worse annotators (length counts six times), then 1,024 good ones
        {
            "good pairs alone": tuned(),
            "worse pairs alone": "reward --dataset tiny:length_bias=0.6 --length-prompts 0 --eval-every 0 "
            "--eval-dataset tiny",
            "first the worse ones": tuned("--model {out}/worse_pairs_alone"),
        },
        first="",
    ),
    "frontier": Group(  # DPO's figure 2: reward against the KL
        {
            "offline DPO, β 0.05": f"{OFFLINE} --beta 0.05",
            "offline DPO, β 0.15": f"{OFFLINE} --beta 0.15",
            "offline DPO, β 0.5": "=dpo/offline_DPO_as_many_pairs_1_480",
            "offline DPO, β 2": f"{OFFLINE} --beta 2",
            "iterative DPO, β 0.05": "dpo_iterative --beta 0.05",
            "iterative DPO, β 0.15": "dpo_iterative --beta 0.15",
            "iterative DPO, β 0.5": "=dpo/the_recipe",
            "iterative DPO, β 2": "dpo_iterative --beta 2",
            "PPO, `--kl-coef 0.05`": "ppo --kl-coef 0.05",
            "PPO, `--kl-coef 0.1`": "ppo --kl-coef 0.1",
            "PPO, `--kl-coef 0.3`": "=ppo/the_recipe",
            "PPO, `--kl-coef 1`": "ppo --kl-coef 1",
        },
        over=(
            ("offline DPO, β 2", "PPO, `--kl-coef 1`"),
            ("offline DPO, β 0.05", "PPO, `--kl-coef 0.3`"),
        ),
    ),
    "temperature": Group(  # the best one before each iteration, by the reward model and by the true reward
        {"by the reward model": SWEEP, "by the true reward": f"{SWEEP} --scorer common.data.tiny:gold_scorer"},
    ),
    "student": Group(  # a model of half the size learns from the larger one's responses, or from its own
        {
            "the student": "sft --model {out}/half --sample-prompts 0",
            "its own best": "rejection_sampling --model {out}/the_student",
            "the teacher": "rejection_sampling",
            "the teacher's best": "rejection_sampling --model {out}/the_student --n-samples 0 --iterations 1 "
            "--pool {out}/the_teacher/pool.jsonl",
        },
        over=(("its own best", "the student"), ("the teacher's best", "its own best")),
        begin={"half": "half"},
    ),
    "rlaif": Group(  # labelers of tests/gold_labeler.py: they know the true reward, safety included
        {
            "people's labels": "=ppo/the_recipe",
            "labels of `exact`": "ppo --scorer {out}/reward_exact",
            "labels of `noisy`": "ppo --scorer {out}/reward_noisy",
            "labels of `biased`": "ppo --scorer {out}/reward_biased",
            "ratings of `exact`": "ppo --scorer common.programs.ai_feedback:rater=gold_labeler:exact",
            "`revise` by `exact`, `sft.py`": "sft --model runs/sft --dataset {out}/revisions/rows.jsonl",
        },
        over=tuple((arm, "people's labels") for arm in ("labels of `exact`", "ratings of `exact`")),
        begin=labels("exact")
        | labels("noisy")
        | labels("biased")
        | {"revisions": f"{FEEDBACK} revise --model gold_labeler:exact --dataset tiny"},
    ),
    "readme": Group(
        {
            "`rejection_sampling.py`": "=rejection_sampling/the_recipe",
            "`ppo.py`": "=ppo/the_recipe",
            "`ppo.py --safety-scorer`": "=ppo/safety_scorer_runs_reward_safety",
            "`ppo.py`, Advantage Model": "ppo --scorer runs/advantage_model --reward-norm none "
            "--rehearsal-data {out}/rehearsal.jsonl",
            "`dpo_iterative.py`": "=dpo/the_recipe",
            "`dpo_iterative.py`, offline": "=dpo/offline_DPO_as_many_pairs_1_480",
        },
        begin={"rehearsal.jsonl": "-m common.programs.rehearsal --model runs/sft --scorer runs/advantage_model"},
    ),
}


def prompts(file):
    """500 prompts, so that with as many an iteration each of them returns."""
    files.write_jsonl(file, tiny.rows("prompts", "train")[:500])


def half(folder):
    """A model of random weights with half of the tiny one's hidden size."""
    torch.manual_seed(0)
    config = tiny.model().config
    config.hidden_size //= 2
    config.intermediate_size //= 2
    config.num_attention_heads //= 2
    config.num_key_value_heads = config.num_attention_heads
    type(tiny.model())(config).save_pretrained(folder)
    pretrained.load_tokenizer("tiny").save_pretrained(folder)


def patched(file):
    """dpo_iterative.py, changed into cpl.py."""
    subprocess.run(
        ["patch", "-s", "-o", file, peers.ROOT / "dpo_iterative.py", peers.ROOT / "docs" / "learn" / "cpl.patch"],
        check=True,
    )


MADE_HERE = {"prompts": prompts, "half": half, "cpl": patched}


# -- runs ------------------------------------------------------------------------------------------
def run(command, out, seed):
    """Of a script, or of a program with -m; a file that is there, and a finished run, stay as they are."""
    words = shlex.split(command)
    if words[0] != "-m":
        recipe = [] if words[1:] and not words[1].startswith("-") else ["tiny"]
        words = [f"{words[0]}.py", *recipe, *words[1:]]
    if out.exists() and (out.suffix == ".jsonl" or "common.programs.pairwise" in words):
        return
    words += ["--output" if out.suffix == ".jsonl" else "--output-dir", str(out)]
    if "common.programs.evaluate" in words:
        words.append("--overwrite")  # for other arms
    elif out.suffix != ".jsonl" and "common.programs.pairwise" not in words:
        words.append("--resume")
    command = [sys.executable, *words, "--seed", str(seed)]
    ended = subprocess.run(command, cwd=peers.ROOT, capture_output=True, text=True, env=ENVIRONMENT)
    if ended.returncode:
        sys.exit(f"{shlex.join(words)}\n{ended.stderr[-2000:]}")


def name_of(arm):
    return re.sub(r"\W+", "_", arm).strip("_")


def run_arm(name, arm, seed) -> Path:
    """The folder of an arm's run."""
    out, command = FOLDER / name / str(seed), GROUPS[name].arms[arm]
    if command.startswith("="):
        other, _, wanted = command[1:].partition("/")
        return run_arm(other, next(arm for arm in GROUPS[other].arms if name_of(arm) == wanted), seed)
    run(command.format(out=out, seed=seed), out / name_of(arm), seed)
    print(f"{name}, seed {seed}: {arm}", flush=True)
    return out / name_of(arm)


def run_group(name, seed) -> list[str]:
    """The arms of one seed, and their answers, or their scores. The commits that ran the arms."""
    group, out = GROUPS[name], FOLDER / name / str(seed)
    out.mkdir(parents=True, exist_ok=True)
    for file, command in group.begin.items():
        if command in MADE_HERE:
            MADE_HERE[command](out / file)
        else:
            run(command.format(out=out), out / file, seed)
    folders = [run_arm(name, arm, seed) for arm in group.arms]
    arms = [f"{name_of(arm)}={folder}" for arm, folder in zip(group.arms, folders)]
    if not group.first:
        run(f"-m common.programs.evaluate --dataset tiny --scorers {shlex.join(arms)}", out / "evaluate", seed)
    for number, dataset in enumerate(group.prompts if group.first else ()):
        command = f"-m common.programs.evaluate --policies first={group.first} {shlex.join(arms)} --reference first "
        command += f"--scorer runs/reward --dataset {dataset} --max-length 128 --max-new-tokens 32"
        run(command, out / f"evaluate{number or ''}", seed)
    return [files.read_json(folder / "args.json")["git"][:7] for folder in folders]


# -- tables ----------------------------------------------------------------------------------------
def read(name, group, seeds, evaluation):
    """{(seed or "all", arm): its rows}: of responses, or of pairs with whether they were put in order."""
    rows, arms = {}, {name_of(arm): arm for arm in group.arms} | {"first": "first"}
    for seed in range(seeds):
        path = FOLDER / name / str(seed) / evaluation / "samples.jsonl"
        for row in files.read_jsonl(path):
            if not group.first:
                differences = [
                    better["score"] - worse["score"] for *_, better, worse in measures.pairs_of([row])
                ]
                row = {"policy": row["scorer"], "right": measures.accuracy(differences)}
            for part in (seed, "all"):
                rows.setdefault((part, arms[row["policy"]]), []).append(row)
    return rows


def paired(rows, before, after, seeds, column, form="+.2f") -> list[str]:
    """By seed, and of all with its 95 % interval: seeds count as if their prompts were others."""
    of = lambda part: measures.gains(rows[part, before], rows[part, after], {"gain": column})
    by_seed = ", ".join(f"{of(seed)['gain']:{form}}" for seed in range(seeds))
    return [by_seed, measures.interval(of("all"), "gain", form)]


def table(name, group, seeds, evaluation="evaluate") -> list[str]:
    rows, lines = read(name, group, seeds, evaluation), []
    mean = lambda arm, column: statistics.fmean(row[column] for row in rows["all", arm])
    if not group.first:
        first, *others = group.arms
        lines.append([first, f"{mean(first, 'right'):.1%}", "", ""])
        for arm in others:
            gained = paired(rows, first, arm, seeds, "right", "+.1%")
            lines.append([arm, f"{mean(arm, 'right'):.1%}", *gained])
        return markdown(["", "right", "over the first, by seed", "all"], lines)
    for arm in group.arms:
        shares = measures.against(rows["all", "first"], rows["all", arm], None)
        games = " / ".join(f"{100 * shares[f'gold_{x}']:.0f}" for x in ("win", "tie", "lose"))
        hazards = [row["safety"] for row in rows["all", arm] if row["is_safety"]]
        harmless = f"{statistics.fmean(x >= 0 for x in hazards):.0%}" if hazards else ""
        cells = [games, f"{mean(arm, 'kl'):.1f}", f"{mean(arm, 'tokens'):.1f}", harmless]
        lines.append([arm, *paired(rows, "first", arm, seeds, "gold"), *cells])
    for after, before in group.over:
        lines.append([f"{after}, over {before}", *paired(rows, before, after, seeds, "gold"), *[""] * 4])
    return markdown(["", "by seed", "all", "win / tie / lose, %", "KL", "tokens", "harmless"], lines)


def markdown(titles, lines) -> list[str]:
    """The lines of a table. lines: of each its cells."""
    line = lambda cells: "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"
    return [line(titles), "|---" * len(titles) + "|", *map(line, lines)]


def temperatures(name, group, seeds):
    """Those that a sweep chose before each iteration, by seed."""
    for arm, seed in [(arm, seed) for arm in group.arms for seed in range(seeds)]:
        summary = files.read_json(FOLDER / name / str(seed) / name_of(arm) / "summary.json")
        versions = summary["versions"].values()
        chosen = [f"{row['sweep/temperature']:g}" for row in versions if "sweep/temperature" in row]
        print(f"{arm}, seed {seed}: temperatures {', '.join(chosen)}")


def publish(name, lines, root=peers.ROOT):
    """docs/results/tables/NAME.md, and the same lines between the two comments of a page that name it."""
    text, places = "\n".join(lines) + "\n", 0
    place = re.compile(rf"(<!-- results/{name}\.md -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
    for page in (Path(root, "README.md"), *Path(root, "docs").glob("*/*.md")):
        content, n = place.subn(lambda match: match[1] + text, page.read_text("utf-8"))
        page.write_text(content, "utf-8")
        places += n
    if not places:
        return print(f"no page has <!-- results/{name}.md --> and <!-- end -->")
    Path(root, "docs", "results", "tables", f"{name}.md").write_text(text)


@dataclass
class Args:
    groups: tyro.conf.Positional[tuple[Literal[tuple(GROUPS)], ...]] = tuple(GROUPS)
    seeds: int = 3
    """Seeds 0, 1, ... of prompts, samples and order; RUNS have seed 0."""
    publish: bool = False
    """Write the tables into docs/."""


def main(args: Args):
    for path, command in RUNS.items():
        run(command, peers.ROOT / path, 0)
    for name in args.groups:
        group, commits = GROUPS[name], {}
        for seed in range(args.seeds):
            commits.update(dict.fromkeys(run_group(name, seed)))
        lines = []
        for number, dataset in enumerate(group.prompts):
            title = [f"On `{dataset}`:", ""] if len(group.prompts) > 1 else []
            lines += [*title, *table(name, group, args.seeds, f"evaluate{number or ''}"), ""]
        command = f"`python tests/benchmarks/experiments.py {name} --seeds {args.seeds}`"
        lines.append(f"{command}, measured at {', '.join(commits)}.")
        print("\n".join(lines))
        if args.publish:
            publish(name, lines)
        if name == "temperature":
            temperatures(name, group, args.seeds)


if __name__ == "__main__":
    main(tyro.cli(Args))
