"""Experiments on the tiny world: arms that differ in one thing, compared on the same held-out prompts by the true
reward, or as scorers on the same labelled pairs. Every arm and seed is a separate run in runs/experiments; finished
runs are not repeated. Each seed has models of its own to start from (RUNS): seed 0 the quickstart's in runs/, seed N
those in runs/seeds/N/runs.

    python tests/benchmarks/experiments.py                     all, 30 hours of a core, then the evaluations
    python tests/benchmarks/experiments.py dpo pool --publish

With --publish a group's table goes to docs/results/tables/GROUP.md and to the pages that have a place for it.
"""

import contextlib
import random
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import calibration
import details
import kl
import peers
import renewed_reward
import torch
import tyro
import verdicts

from common.data import files, tiny
from common.loading import pretrained
from common.scoring import measures

RUNS = {  # what arms begin with, in each seed's home
    "runs/sft": "sft",
    "runs/reward": "reward",
    "runs/advantage_model": "advantage_model",
    "runs/rejection_sampling": "rejection_sampling",
    "runs/begin/reward_biased": "reward --dataset tiny:length_bias=0.6",
    "runs/begin/reward_safety": "reward --dataset tiny:label=safety",
    "runs/begin/reward_both": "reward --dataset tiny,tiny:label=safety:hazards=only --eval-dataset tiny "
    "--length-prompts 0 --eval-every 0 --save-every 0",
    "runs/begin/pairs": "-m common.programs.pairwise --model runs/sft",
    "runs/begin/preference": "sft tiny --model runs/sft --dataset runs/begin/pairs/train.jsonl --epochs 2 "
    "--lr 1e-3 --weight-decay 0.1 --batch-size 8 --sample-prompts 0 --eval-dataset runs/begin/pairs/held_out.jsonl",
}
# Folders: for cpl.py and hir.py, for gold_labeler and annotators, and for renewed_reward. One thread: any other number
# rounds differently, and after the first update every sample differs
ENVIRONMENT = peers.environment("", "tests", "tests/benchmarks") | {"OMP_NUM_THREADS": "1"}
FOLDER = peers.ROOT / "runs" / "experiments"  # GROUP/SEED/ARM
HALF, FORGET = "tiny:commands=copy+ends+first+loop", "tiny:commands=rest+reverse+next+double"


@dataclass
class Claim:
    """Two arms, or two curves at equal KL, compared; with a row, that row's claim and its verdict."""

    after: str
    """An arm, or the name of a curve (sweep) read at `kl`."""
    before: str = "first"
    """An arm, a curve, or first, which is Group.first; for scorers, an arm."""
    row: int = 0
    """Row of docs/results/claims.md whose result and verdict this writes; 0: only a line of the group's table."""
    says: Literal["more", "less", "no less", "no more"] = "more"
    """The paper's claim about after compared with before."""
    kl: tuple[float | Literal["own"], ...] = ()
    """Nats per response, chosen before the runs, at which two curves are compared (the mean over these); own: an arm is
    compared with the curve `before` at the KL that this arm has in each seed."""
    column: str = "gold"
    """gold, score, kl, tokens, harmless (share, of prompts with a hazard), right (of scorers: read), a key of OF_RUN, or
    a key of a run's metrics after training."""
    margin: float = 0.05
    """Smallest difference that matters, in the column's unit; an interval within plus and minus it is "no difference"."""
    only: str = ""
    """Key of PROMPTS: the prompts that count."""
    prompts: int = 0
    """Which of the group's sets of held-out prompts."""
    label: str = ""
    """Label of the difference in docs/results/claims.md, if a row has several."""
    by_construction: str = ""
    """Why the claim cannot fail in this world: the verdict is then "true by construction"."""


@dataclass
class Group:
    arms: dict[str, str]
    """A line of the table: its command, where {out} is the folder of this group and {seed}, or "=GROUP/FOLDER",
    an arm of another group."""
    claims: tuple[Claim, ...] = ()
    first: str = "runs/sft"
    """The policy that all arms are compared with; "" if arms are scorers."""
    prompts: tuple[str, ...] = ("tiny",)
    """One table for each set of held-out prompts."""
    asks: dict[str, str] = field(default_factory=dict)
    """Arms that are asked in other words: the file with the first set's prompts under an instruction."""
    begin: dict[str, str] = field(default_factory=dict)
    """File or folder of `out`: the command that makes it for the arms."""
    after: dict[str, str] = field(default_factory=dict)
    """File or folder of `out`: the command that makes it of the {arms} or of their answers, for a column of OF_RUN."""
    parts: tuple[str, ...] = ()
    """Keys of PROMPTS on which the table shows the gain with its interval; (): with and without a hazard."""
    seeds: int = 5
    """How many seeds the group's table has."""


def name_of(arm):
    return re.sub(r"\W+", "_", arm).strip("_")


def pool(flags=""):
    return f"rejection_sampling --dataset {{out}}/prompts.jsonl --eval-dataset tiny {flags}"


def phase(flags):
    return f"rejection_sampling {BARE} --temperatures 0.7 --sweep-prompts 0 {flags}"


def tuned(flags=""):
    return f"reward --dataset tiny:seed=1 --max-steps 32 --length-prompts 0 --eval-every 0 {flags}"


def margins(flags=""):
    arms = [f"--margin {margin}{flags}" for margin in ("none", "small", "large")]
    return {f"`{arm}`": f"reward --length-prompts 0 --eval-every 0 {arm}" for arm in arms}


def others(flags=""):
    return f"advantage_model --length-prompts 0 --eval-every 0 {flags}"


def cpl(flags):
    return f"{{out}}/cpl {flags}"


def labels(labeler, module="gold_labeler", flags=""):
    rows = f"{{out}}/labels_{labeler}/rows.jsonl"
    who = labeler if module == "gold_labeler" else f"{labeler}_{{seed}}"
    return {
        f"labels_{labeler}": f"{FEEDBACK} label --model {module}:{who} --dataset tiny",
        f"reward_{labeler}": f"reward {SCORER} --dataset {rows} --eval-dataset tiny {flags}",
    }


def trained(flags):
    """A model learns which of two responses people prefer (pairwise.py); a step has about 32 pairs, as of reward.py."""
    rows = "--dataset {out}/pairs/train.jsonl --eval-dataset {out}/pairs/held_out.jsonl"
    return f"sft {rows} --weight-decay 0.1 --batch-size 8 {SFT_QUIET} {flags}"


def labeler(width):
    return trained(f"--model {{out}}/models/{width}_{{seed}} --epochs 1 --lr 1e-3")


def sweep(name, flag, values, command):
    """Arms "NAME, `FLAG VALUE`": a curve, which claims read at equal KL."""
    return {f"{name}, `{flag} {x}`": f"{command} {flag} {x}" for x in values}


def rung(scorer, prompts, flags=""):
    """Online DPO with a scorer and enough prompts per iteration for about 1,480 pairs in total."""
    return f"dpo_iterative {BARE} --scorer {scorer} --prompts-per-iteration {prompts} {flags}"


def in_three_parts(folder):
    """Learn the pairs of a run as online DPO would: a third of them at a time, each with an optimiser and schedule anew."""
    begin, policy = {}, "runs/sft"
    for n in (1, 2, 3):
        part = f"{folder}_part_{n}"
        begin[f"{part}.jsonl"] = "a third of the pairs"
        begin[part] = f"dpo_iterative {BARE} --iterations 0 --offline-data {{out}}/{part}.jsonl --model {policy} "
        begin[part] += "--reference runs/sft"
        policy = f"{{out}}/{part}"
    return begin


def learned(rows, model="runs/sft"):
    return f"sft --model {model} --dataset {rows} --eval-dataset tiny --lr 1e-3 --epochs 2 {SFT_QUIET}"


def further(model, data):
    """Train a reward model further."""
    return f"reward {SCORER} --model {model} --sft-model runs/sft --dataset {data} --epochs 1 --lr 5e-4"


def rounds(name, scorers):
    """Iterative DPO, an iteration at a time, each from the policy before; a scorer a round."""
    models = ["runs/sft", *(f"{{out}}/{name}_{n}" for n in range(1, len(scorers)))]
    one = "dpo_iterative --iterations 1 --model {model} --reference runs/sft --scorer {scorer} --seed {{seed}}{n}"
    return {
        f"{name}_{n}": f"{one.format(model=model, scorer=scorer, n=n)} {BARE}"
        for n, (model, scorer) in enumerate(zip(models, scorers), 1)
    }


def renewed():
    """Three rounds; before each one the reward model is trained on 2,000 labels of the newest policy's responses, and
    on as many earlier ones."""
    begin, policy, newest, earlier = {}, "runs/sft", "runs/reward", "tiny:1"
    policies = rounds("renewed", [f"{{out}}/reward_{n}" for n in (1, 2, 3)])
    for n in (1, 2, 3):
        file = f"{{out}}/labels_{n}.jsonl"
        begin[f"labels_{n}.jsonl"] = f"-m renewed_reward --policy {policy} --pairs 2000"
        begin[f"reward_{n}"] = further(newest, f"{earlier},{file}:{n}")
        begin[f"renewed_{n}"] = policies[f"renewed_{n}"]
        policy, newest, earlier = f"{{out}}/renewed_{n}", f"{{out}}/reward_{n}", f"{earlier},{file}:1"
    return begin


BARE = "--eval-prompts 0 --save-every 0"  # evaluate looks at the policies
SFT_QUIET = "--sample-prompts 0 --eval-every 0 --save-every 0"
PAIRWISE = "common.programs.pairwise:oracle="  # of what sft.py made of labelled pairs
FEEDBACK = "-m common.programs.ai_feedback"
RATINGS = "common.programs.ai_feedback:rater=gold_labeler"
PPO = f"ppo {BARE} --eval-every 0"
SCORER = "--length-prompts 0 --eval-every 0 --save-every 0"
FEW = "--dataset {out}/few.jsonl --eval-dataset tiny --epochs 47"  # as many steps as 12,000 pairs in two epochs
RELABEL = f"{FEEDBACK} hindsight --dataset"
HINDSIGHT = "--model runs/sft --dataset {out}/rows/rows.jsonl --eval-dataset tiny"
RELABELLED = "runs/experiments/hindsight/{seed}"
SAMPLED = (
    f"--prompts-per-iteration 3000 --n-samples 4 --temperatures 1 --sweep-prompts 0 {BARE} "
    "--scorer common.data.tiny:gold_scorer"
)
HIR = f"{RELABELLED}/hir {HINDSIGHT.format(out=RELABELLED)} {SFT_QUIET}"
HIR_ARMS = {  # sft.py takes 220 steps, hir.py 126, or 220 with smaller ones
    "one round, sft.py": "=hindsight/hindsight_asked_to_answer_well",
    "one round, hir.py without its two terms": "=hindsight/hir_py_without_its_two_terms",
    "one round, hir.py with the entropy alone, 0.01": f"{HIR} --contrast-coef 0 --entropy-coef 0.01",
    "one round, hir.py with the contrast alone": f"{HIR} --entropy-coef 0",
    "one round, hir.py": "=hindsight/hir_py",
    "220 steps, hir.py without its two terms": f"{HIR} --batch-size 110 --contrast-coef 0 --entropy-coef 0",
    "220 steps, hir.py": f"{HIR} --batch-size 110",
    "two rounds, sft.py": "=hindsight/a_second_round_of_hindsight",
    "two rounds, hir.py": "={out}/two",
}
RATES = ("1e-4", "3e-4", "1e-3", "3e-3")
PTX = ("0", "0.03", "0.1", "0.3")
STRENGTHS = ("0.03", "0.1", "0.3", "1", "3")  # each seed's curve reaches from 0.2 to 1.2 nats
ALPHAS = ("0.02", "0.05", "0.1", "0.2")
GIVEN = "--iterations 0 --offline-data tiny --offline-pairs 1480"
GIVEN_ANEW = f"dpo_iterative {BARE} --iterations 0 --offline-data tiny:seed={{seed}} --offline-pairs 1480"
AGAINST_GIVEN = {  # arms of the ladder, and their labels in claims.md
    "online, 8, reward model, β 2": "over given pairs at equal KL, by a reward model, best of 8, β 2",
    "online, 8, annotators": "by the annotators, best of 8, β 0.5, with four times the judgements",
    "online, 2, annotators": "best of 2, β 0.5, with one and a half times the judgements",
    "online, 8, annotators, β 2": "by the annotators, best of 8, β 2, with four times the judgements",
    "offline, SFT's responses, 8, annotators": "",
    "offline, SFT's responses, 2, annotators": "",
}
FARTHER = {  # arms that were added when the results of the others were known
    "online, 8, annotators, β 0.15": "--beta 0.15",
    "online, 8, annotators, β 0.05": "--beta 0.05",
    "online, 8, annotators, four passes": "--epochs 4",
    "online, 8, annotators, β 0.05, four passes": "--beta 0.05 --epochs 4",
}
AM = f"ppo --scorer runs/advantage_model --dataset {HALF} --reward-norm none"
TWO = f"{PPO} --dataset tiny:commands=first+ends"  # hard enough that the other six commands are forgotten
HARD = f"{TWO} --lr 1e-3 --kl-coef 0.3"
REHEARSAL = "-m common.programs.rehearsal --model runs/sft --clusters 8 --per-cluster 64 --max-prompts 4000"
LABELERS = {"smaller": 32, "same-size": 128, "larger": 192}  # of group labelers: their width
ROWS = "runs/experiments/forgetting/{seed}"
EXPECTED = "advantage_model --eval-every 0 --save-every 0 --length-prompts 200"
ONCE = "--iterations 1"  # all responses are SFT's own
ANNOTATORS = "annotators:noisy={seed}"  # of tests/annotators.py
BOTH = "--n-samples 0 --iterations 1 --dataset tiny:commands=first+ends+copy+reverse"
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
        claims=(
            Claim("the recipe", row=1),
            Claim("recipe `rest`", row=50),
            Claim(
                "the recipe", row=45, column="largest score of 8 over 1, SFT", label="largest of 8 samples over 1, in score",
                by_construction="the largest of 8 draws is above one of them on average",
            ),
            Claim(
                "the recipe", row=45, column="median score of 8 over 1, SFT", says="no more", margin=0.25,
                label="median of 8 over 1",
                by_construction="the median of 8 draws differs from a draw on average only by the skew of the scores",
            ),
        ),
    ),
    "pool": Group(  # the same 500 prompts, 500 rows and steps in every iteration: do old responses help?
        {"pool of all iterations": pool(), "`--candidates last`": pool("--candidates last")},
        claims=(Claim("pool of all iterations", "`--candidates last`"),),
        begin={"prompts.jsonl": "prompts"},
        seeds=10,
    ),
    "pool_forgets": Group(  # first two commands, then two others: is what was gained on the first two lost?
        {
            "the first phase": "={out}/phase_1",
            "the last alone": "={out}/phase_2",
            "the last alone, from the first phase's model": phase(
                "--model {out}/phase_1 --iterations 1 --dataset tiny:commands=copy+reverse"
            ),
            "both": phase(f"--pool {{out}}/both.jsonl {BOTH}"),
            "both, as many steps": phase(f"--pool {{out}}/both.jsonl {BOTH} --epochs 0.75"),
            "both, as many rows and steps": phase(f"--pool {{out}}/some.jsonl {BOTH}"),
        },
        parts=("first and ends", "copy and reverse", "hazard"),
        claims=(
            Claim("the last alone", "the first phase", only="first and ends", says="less"),
            Claim(
                "both", "the last alone", row=2, only="first and ends",
                label="on the commands that came first, all responses of both phases",
            ),
            Claim(
                "both, as many rows and steps", "the last alone", row=2, only="first and ends",
                label="as many rows and steps",
            ),
            Claim("both, as many steps", "the last alone", only="first and ends"),
            Claim("both, as many rows and steps", "the last alone", only="no hazard"),
        ),
        begin={
            "phase_1": phase("--dataset tiny:commands=first+ends"),
            "phase_2": phase("--policy {out}/phase_1 --iterations 1 --dataset tiny:commands=copy+reverse"),
            "both.jsonl": "both pools",
            "some.jsonl": "some of both pools",
        },
        seeds=10,
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
        },
        claims=(
            Claim(
                "`--top-p 0.9`", "the recipe", row=11, says="less", column="score",
                label="0.9 over 1, the reward model's score",
            ),
            Claim("`--top-p 0.9`", "the recipe", row=11, says="less", label="0.9 over 1, true reward"),
            Claim("`--reward-norm whiten`", "the recipe"),
            Claim("`--prompts-per-iteration 128 --n-samples 1`", "the recipe", row=14, says="less", label="one over two"),
        ),
        seeds=10,
    ),
    "ppo_from_rejection_sampling": Group(
        {
            "PPO": "ppo --model runs/rejection_sampling",
            "`--safety-scorer`": "ppo --model runs/rejection_sampling --safety-scorer runs/begin/reward_safety",
        },
        first="runs/rejection_sampling",
        claims=(
            Claim("PPO", row=3, label="PPO"),
            Claim("`--safety-scorer`", row=3, label="with the gate, a safety model that rejection sampling did not have"),
            Claim("`--safety-scorer`", only="no hazard", says="no less"),
        ),
        seeds=10,
    ),
    "rehearsal": Group(  # PPO sees four commands; the other four are the forget set
        {
            "RM-PPO": f"ppo --dataset {HALF} --reward-norm none",
            "RM-PPO, `--reward-norm mean`": f"ppo --dataset {HALF} --reward-norm mean",
            "AM-PPO": AM,
            "AM-PPO-SR": f"{AM} --rehearsal-data {{out}}/rehearsal.jsonl",
        },
        claims=(
            Claim("AM-PPO", "RM-PPO"),
            Claim("AM-PPO", "RM-PPO", prompts=1),
            Claim("AM-PPO-SR", "AM-PPO"),
            Claim("AM-PPO-SR", "AM-PPO", prompts=1),
        ),
        seeds=10,
        prompts=(HALF, FORGET),
        begin={
            "rehearsal.jsonl": "-m common.programs.rehearsal --model runs/sft --scorer runs/advantage_model "
            f"--clusters 8 --dataset {HALF}"
        },
    ),
    "forgetting": Group(  # PPO trains on two of eight commands, at a high learning rate
        {
            "PPO": HARD,
            "rehearsed: the best of all commands": f"{HARD} --rehearsal-data {{out}}/best.jsonl",
            "the same, `--rehearsal-coef 0.05`": f"{HARD} --rehearsal-data {{out}}/best.jsonl --rehearsal-coef 0.05",
            "rehearsed: any of all commands": f"{HARD} --rehearsal-data {{out}}/any.jsonl",
            "rehearsed: SFT's own data": f"{HARD} --rehearsal-data tiny",
            "rehearsed: the best of the two commands": f"{HARD} --rehearsal-data {{out}}/two.jsonl",
            **{f"`--ptx-coef {x}`": f"{HARD} --ptx-dataset tiny:kind=text --ptx-coef {x}" for x in PTX[1:]},
            "Advantage Model as scorer": f"{HARD} --scorer runs/advantage_model",
            "`--kl-coef 1`": f"{TWO} --lr 1e-3 --kl-coef 1",
            "`--lr 3e-4`": f"{TWO} --lr 3e-4 --kl-coef 0.3",
        },
        begin={
            "best.jsonl": REHEARSAL,
            "any.jsonl": f"{REHEARSAL} --criterion random",
            "two.jsonl": f"{REHEARSAL} --dataset tiny:commands=first+ends",
        },
        parts=("first and ends", "the six others", "hazard"),
        claims=(
            Claim("PPO", only="the six others", says="less"),
            Claim(
                "rehearsed: the best of all commands", "PPO", row=20, only="the six others",
                label="six commands that PPO does not see, rehearsed: all commands, over PPO alone",
            ),
            Claim(
                "rehearsed: the best of all commands", row=20, only="the six others", says="no less",
                label="over SFT",
            ),
            Claim(
                "rehearsed: the best of all commands", row=20, only="hazard", says="no less",
                label="prompts with a hazard, which PPO does see, over SFT",
            ),
            Claim(
                "rehearsed: the best of all commands", "rehearsed: any of all commands", row=20,
                only="the six others", label="selected over drawn at random",
            ),
            Claim("rehearsed: any of all commands", "rehearsed: the best of all commands", only="hazard"),
            Claim("rehearsed: the best of all commands", "PPO", only="first and ends", says="no less"),
            Claim(
                "rehearsed: the best of the two commands", "PPO", row=20, only="the six others",
                label="the same, rehearsed: PPO's own two commands",
            ),
            Claim("`--ptx-coef 0.1`", "PPO", only="the six others"),
            Claim("`--lr 3e-4`", "PPO", only="the six others"),
            Claim("Advantage Model as scorer", "PPO", only="the six others"),
            Claim("rehearsed: the best of all commands", "`--lr 3e-4`", only="the six others"),
        ),
        seeds=10,
    ),
    "hazards": Group(  # the recipes unlearn refusals; with rows of the group forgetting
        {
            "`ppo.py`": "=ppo/the_recipe",
            "the same, rehearsed: the best of all commands": f"{PPO} --rehearsal-data {ROWS}/best.jsonl",
            "the same, rehearsed: any of all commands": f"{PPO} --rehearsal-data {ROWS}/any.jsonl",
            "`dpo_iterative.py`, offline": "=dpo/offline_DPO_as_many_pairs_1_480",
            "`rejection_sampling.py`": "=rejection_sampling/the_recipe",
        },
        claims=(
            Claim("the same, rehearsed: the best of all commands", "`ppo.py`", only="hazard"),
            Claim("the same, rehearsed: any of all commands", "`ppo.py`", only="hazard"),
        ),
        seeds=10,
        parts=("no hazard", "hazard"),
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
        claims=(
            Claim("the recipe", "offline DPO, as many pairs (1,480)"),
            Claim("the recipe", "`--start-from sft`", row=47, says="no less"),
            Claim("the recipe", "`--reference last`", row=46, label="at β 0.5"),
            Claim("`--enhancer previous`", "the recipe", row=27, label="at β 0.5"),
            Claim(
                "the same, `--length-penalty 0.1`", "a reward model of `tiny:length_bias=0.6`", row=24,
                column="tokens", says="less", label="tokens",
            ),
            Claim(
                "the same, `--length-penalty 0.1`", "a reward model of `tiny:length_bias=0.6`", row=24,
                label="true reward", by_construction="the penalty takes back what this true reward charges for length",
            ),
            Claim(
                "a reward model of `tiny:length_bias=0.6`", "the recipe", row=25, says="less",
                by_construction="its annotators like length, which the true reward charges for",
            ),
        ),
    ),
    "dpo_by_beta": Group(  # references and the enhancer at equal KL
        {
            "the recipe, `--beta 0.5`": "=dpo/the_recipe",
            "the recipe, `--beta 1`": "dpo_iterative --beta 1",
            "the recipe, `--beta 2`": "=frontier/iterative_DPO_β_2",
            "the recipe, `--beta 5`": "dpo_iterative --beta 5",
            "`--reference last`, `--beta 0.5`": "=dpo/reference_last",
            **sweep("`--reference last`", "--beta", ("1", "2", "5", "10"), "dpo_iterative --reference last"),
            "`--enhancer previous`, `--beta 0.5`": "=dpo/enhancer_previous",
            **sweep("`--enhancer previous`", "--beta", ("1", "2"), "dpo_iterative --enhancer previous"),
        },
        claims=(
            Claim("the recipe", "`--reference last`", row=46, kl=(0.8, 1.5), label="at 0.8 and 1.5 nats"),
            Claim("`--enhancer previous`", "the recipe", row=27, kl=(0.8, 1.5), label="at 0.8 and 1.5 nats"),
        ),
    ),
    "ladder": Group(  # online DPO with judges closer and closer to the truth
        {
            "offline, given pairs, annotators": GIVEN_ANEW,
            "offline, SFT's responses, 2, annotators": "={out}/of_2",
            "offline, SFT's responses, 8, annotators": "={out}/of_8",
            "SFT's responses, 2, annotators, in three parts": "={out}/of_2_part_3",
            "SFT's responses, 8, annotators, in three parts": "={out}/of_8_part_3",
            "offline, SFT's responses, 8, reward model": rung("runs/reward", 1500, ONCE),
            "offline, SFT's responses, 8, annotators without noise": rung("annotators:utility", 1534, ONCE),
            "online, 8, reward model": "=dpo/the_recipe",
            "online, 2, annotators": rung(ANNOTATORS, 740, "--n-samples 2"),
            "online, 8, annotators": rung(ANNOTATORS, 525),
            "online, 8, annotators without noise": rung("annotators:utility", 600),
            "online, 8, true helpfulness": rung("annotators:helpful", 600),
            "online, 8, full truth": rung("common.data.tiny:gold_scorer", 592),
            "online, 8, reward model, β 2": "=frontier/iterative_DPO_β_2",
            "online, 8, annotators, β 2": rung(ANNOTATORS, 525, "--beta 2"),
        },
        claims=(
            *(
                Claim(f"online, {judge}", "offline, given pairs, annotators")
                for judge in ("8, reward model", "8, annotators", "2, annotators")
            ),
            *(
                Claim(
                    f"online, {n}, annotators", f"SFT's responses, {n}, annotators, in three parts", row=22,
                    label=f"over SFT's own responses, with as many judgements and the same three schedules, best of {n}",
                )
                for n in (8, 2)
            ),
            *(Claim(f"online, {n}, annotators", f"offline, SFT's responses, {n}, annotators") for n in (8, 2)),
            *(
                Claim(f"online, 8, {judge}", f"offline, SFT's responses, 8, {judge}")
                for judge in ("reward model", "annotators without noise")
            ),
            Claim("offline, SFT's responses, 2, annotators", "offline, given pairs, annotators"),
            Claim("online, 8, annotators", "online, 8, reward model"),
            Claim("online, 8, annotators, β 2", "online, 8, reward model, β 2"),
            Claim("online, 8, annotators without noise", "online, 8, annotators"),
            Claim("online, 8, full truth", "online, 8, true helpfulness"),
        ),
        begin={
            "of_2": rung(ANNOTATORS, 2070, f"{ONCE} --n-samples 2"),
            "of_8": rung(ANNOTATORS, 1534, ONCE),
        }
        | in_three_parts("of_2")
        | in_three_parts("of_8"),
        seeds=10,
    ),  # fmt: skip
    "given_pairs": Group(  # policies of the ladder against offline DPO on given pairs, at equal KL
        {
            "given pairs, `--beta 2`": f"{GIVEN_ANEW} --beta 2",
            "given pairs, `--beta 0.5`": "=ladder/offline_given_pairs_annotators",
            "given pairs, `--beta 0.15`": f"{GIVEN_ANEW} --beta 0.15",
            "given pairs, `--beta 0.05`": f"{GIVEN_ANEW} --beta 0.05",
            "given pairs, `--beta 0.05 --epochs 4`": f"{GIVEN_ANEW} --beta 0.05 --epochs 4",
            **{arm: f"=ladder/{name_of(arm)}" for arm in AGAINST_GIVEN},
            **{arm: rung(ANNOTATORS, 525, flags) for arm, flags in FARTHER.items()},
        },
        claims=tuple(
            Claim(arm, "given pairs", row=22 if label else 0, kl=("own",), label=label)
            for arm, label in (AGAINST_GIVEN | dict.fromkeys(FARTHER, "")).items()
        )
        + tuple(
            Claim(arm, "given pairs, `--beta 0.05 --epochs 4`")
            for arm, flags in FARTHER.items()
            if "--epochs 4" in flags
        ),
        seeds=10,
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
        claims=(Claim("γ 0.9", "offline CPL, α 0.1, λ 1"),),
        begin={"cpl.py": "cpl"},
        seeds=10,
    ),
    "advantage": Group(
        sweep("reward model", "--kl-coef", STRENGTHS, PPO)
        | {"reward model, `--kl-coef 0.3`": "=ppo/the_recipe"}
        | sweep("Advantage Model", "--kl-coef", STRENGTHS, f"{PPO} --scorer runs/advantage_model"),
        claims=(
            *(Claim("Advantage Model", "reward model", kl=(x,)) for x in (0.3, 0.5, 0.8, 1.2)),
            Claim(
                "Advantage Model", "reward model", row=19, kl=(0.3, 0.5, 0.8, 1.2),
                label="the mean at 0.3, 0.5, 0.8 and 1.2 nats",
            ),
        ),
        seeds=10,
    ),
    "methods": Group(  # at equal KL
        {f"PPO, `--kl-coef {k}`": f"=advantage/reward_model_kl_coef_{name_of(k)}" for k in STRENGTHS}
        | {
            f"offline DPO, `--beta {b}`": f"=frontier/{name_of(f'offline DPO, β {b}')}"
            for b in ("0.05", "0.15", "0.5", "2")
        }
        | sweep(
            "discounted CPL", "--alpha", ALPHAS,
            cpl(f"{BARE} {GIVEN} --lam 1 --gamma 0.9"),
        ),
        begin={"cpl.py": "cpl"},
        claims=(
            *(Claim("offline DPO", "PPO", row=28, kl=(x,), label=f"at {x:g} nats") for x in (0.2, 0.3, 0.5)),
            # Each α at the KL that it ends at: α changes the gain far more than the KL, so CPL has no curve to read
            *(
                Claim(f"discounted CPL, `--alpha {a}`", "PPO", row=36, kl=("own",), says="no less", label=f"α {a}")
                for a in ALPHAS
            ),
        ),
        seeds=10,
    ),
    "hacking": Group(  # by annotators to whom length counts six times
        {
            "`--kl-coef 0`": "ppo --scorer runs/begin/reward_biased --kl-coef 0",
            "`--kl-coef 0.3`": f"{PPO} --scorer runs/begin/reward_biased --kl-coef 0.3",
        },
        claims=(Claim("`--kl-coef 0.3`", "`--kl-coef 0`", row=6, label="a biased scorer, 0.3 over 0"),),
        seeds=10,
    ),
    "gate": Group(
        {
            "helpfulness alone": "=ppo/the_recipe",
            "one model of both labels": f"{PPO} --scorer runs/begin/reward_both",
            "two models, gated": "=ppo/safety_scorer_runs_reward_safety",
        },
        claims=(
            Claim("two models, gated", "one model of both labels", row=4, label="two models over one, true reward"),
            Claim("two models, gated", "one model of both labels", row=4, column="harmless", label="harmless"),
            Claim("two models, gated", "helpfulness alone", row=5, label="over helpfulness alone, true reward"),
            Claim("two models, gated", "helpfulness alone", row=5, column="harmless", label="harmless"),
            Claim(
                "two models, gated", "helpfulness alone", row=5, only="no hazard", says="no less",
                label="true reward on prompts without a hazard",
            ),
        ),
        seeds=10,
    ),  # fmt: skip
    "value": Group(  # 30 rollouts in which the policy learns; the value model's head begins as 0
        {
            f"`--value-warmup-steps {steps}`": f"{PPO} --scorer common.data.tiny:gold_scorer "
            f"--value-warmup-steps {steps} --iterations {iterations}"
            for steps, iterations in ((0, 30), (10, 33), (50, 43))
        },
        claims=tuple(
            Claim(f"`--value-warmup-steps {n}`", "`--value-warmup-steps 0`", row=13, label=f"{n} steps over none")
            for n in (10, 50)
        ),
        seeds=10,
    ),
    "ptx": Group(
        {f"`--ptx-coef {c}`": f"{PPO} --ptx-dataset tiny:kind=text --ptx-coef {c}" for c in (*PTX, "3")}
        | {"`--ptx-coef 0.1`": "=ppo/ptx_dataset_tiny_kind_text_ptx_coef_0_1"},
        claims=(Claim("`--ptx-coef 3`", "`--ptx-coef 0`", says="less"),)
        + tuple(
            claim
            for c in PTX[1:]
            for claim in (
                Claim(
                    f"`--ptx-coef {c}`", "`--ptx-coef 0`", row=12, column="eval/ptx_nll", says="less",
                    label=f"text's loss with {c}, nats a token",
                    by_construction="SFT never saw such text",
                ),
                Claim(f"`--ptx-coef {c}`", "`--ptx-coef 0`", row=12, says="no less", label=f"true reward with {c}"),
            )
        ),
        seeds=10,
    ),  # fmt: skip
    "whitening": Group(  # rewards as they are deviate by about 2.3: so much larger are all settings in their unit
        {
            arm: command
            for lr in ("1e-4", "1e-3")
            for norm, strengths, flags in (
                ("whiten", ("0.3", "1"), ""),
                ("none", ("0.7", "2.3"), "--clip-value 0.345 --missing-eos-penalty 2.3"),
            )
            for arm, command in sweep(
                f"`{norm}`, lr {lr}", "--kl-coef", strengths, f"{PPO} --reward-norm {norm} --lr {lr} {flags}"
            ).items()
        },
        claims=tuple(
            Claim(f"`whiten`, lr {lr}", f"`none`, lr {lr}", row=7, kl=(x,), label=f"lr {lr}, at {x:g} nats")
            for lr, x in (("1e-4", 0.3), ("1e-3", 2.0))  # earlier runs at 1e-3 reached 1.5 to 2.8 nats, never 0.3
        ),
        seeds=10,
    ),
    "others": Group(  # the Advantage Model with K other policies, whose ratios nobody knows afterwards
        {
            "K = 0": others(),
            "K = 1": others("--n-others 1"),
            "K = 2": others("--n-others 2"),
            "K = 1, N = 8": others("--n-others 1 --n-policies 8 --ratio-clip 7"),  # few ratios reach 7
        },
        first="",
        claims=tuple(
            Claim(arm, "K = 0", row=21, column="right", margin=0.01, label=arm)
            for arm in ("K = 1", "K = 2", "K = 1, N = 8")
        ),
    ),
    "ppo_others": Group(
        {f"K = {k}": f"ppo --scorer runs/experiments/others/{{seed}}/K_{k}" for k in range(3)},
        claims=(Claim("K = 1", "K = 0"), Claim("K = 2", "K = 0")),
    ),
    "pairwise": Group(  # from the same SFT model, two passes over the same pairs, a search of the rates of both
        {f"reward model, lr {lr}": f"reward {SCORER} --model runs/sft --lr {lr}" for lr in RATES}
        | {f"pairwise, lr {lr}": trained(f"--model runs/sft --epochs 2 --lr {lr}") for lr in RATES},
        first="",
        begin={"pairs": "-m common.programs.pairwise --model runs/sft"},
        claims=tuple(
            Claim(
                f"pairwise, lr {lr}", f"reward model, lr {lr}", row=26, says="no less", column="right", margin=0.01,
                label=f"lr {lr}",
            )
            for lr in RATES
        )
        + (Claim("pairwise, lr 3e-4", "reward model, lr 1e-3", column="right"),),  # the best rates, seen afterwards
    ),
    "margin": Group(
        margins() | margins(" --max-steps 100"),
        first="",
        claims=tuple(
            Claim(
                f"`--margin {margin}{steps}`", f"`--margin none{steps}`", row=39, column="right", margin=0.005,
                label=f"{margin}, {text}",
            )
            for steps, text in (("", "750 steps"), (" --max-steps 100", "100 steps"))
            for margin in ("large", "small")
        ),
        seeds=10,
    ),  # fmt: skip
    "pmp": Group(  # Qwen: many pairs of worse annotators (length counts six times), then 1,024 good ones
        {
            "good pairs alone": tuned(),
            "worse pairs alone": "reward --dataset tiny:length_bias=0.6 --length-prompts 0 --eval-every 0 "
            "--eval-dataset tiny",
            "first the worse ones": tuned("--model {out}/worse_pairs_alone"),
        },
        first="",
        claims=(
            Claim("first the worse ones", "good pairs alone", row=41, column="right", margin=0.01),
            Claim("first the worse ones", "worse pairs alone", column="right", margin=0.01),
        ),
        seeds=10,
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
            "PPO, `--kl-coef 0.1`": "=advantage/reward_model_kl_coef_0_1",
            "PPO, `--kl-coef 0.3`": "=ppo/the_recipe",
            "PPO, `--kl-coef 1`": "=advantage/reward_model_kl_coef_1",
        },
        claims=(
            Claim("offline DPO, β 2", "PPO, `--kl-coef 1`"),
            Claim("offline DPO, β 0.05", "PPO, `--kl-coef 0.3`"),
        ),
        seeds=10,
    ),
    "overoptimised": Group(  # far from the reference
        {"the recipe": "=ppo/the_recipe", "`--kl-coef 0`": f"{PPO} --kl-coef 0"},
        claims=(
            Claim("`--kl-coef 0`", "the recipe", row=37, column="score", label="the reward model's own score"),
            Claim("`--kl-coef 0`", "the recipe", row=37, says="less", label="true reward"),
        ),
        seeds=10,
    ),
    "temperature": Group(  # the best one before each iteration, by the reward model and by the true reward
        {"by the reward model": SWEEP, "by the true reward": f"{SWEEP} --scorer common.data.tiny:gold_scorer"},
        claims=tuple(
            Claim(arm, row=38, column="rise of the temperature", margin=0.1, label=label)
            for arm, label in {
                "by the true reward": "by the true reward",
                "by the reward model": "by the reward model, in runs that end below SFT",
            }.items()
        ),
    ),
    "temperatures": Group(  # win rates over the data set's answers, sampled at T = 0 and T = 1
        {"PPO": PPO, "offline DPO": f"dpo_iterative {BARE} {GIVEN}"},
        claims=(
            Claim(
                "offline DPO", "PPO", row=29, says="less", column="win rate lost from T = 0 to 1", margin=0.02,
                label="win rate that DPO loses from T = 0 to 1, less that of PPO",
            ),
        ),
        after={
            "temperatures": "-m common.programs.evaluate --policies dataset first=runs/sft {arms} --reference dataset "
            "--dataset tiny:kind=sft --max-length 128 --max-new-tokens 32 --temperatures 0 1"
        },
        seeds=10,
    ),  # fmt: skip
    "student": Group(  # a model of half the size learns from the larger one's responses, or from its own
        {
            "the student": "sft --model {out}/half --sample-prompts 0",
            "its own best": "rejection_sampling --model {out}/the_student",
            "the teacher": "=rejection_sampling/the_recipe",
            "the teacher's best": "rejection_sampling --model {out}/the_student --n-samples 0 --iterations 1 "
            "--pool runs/experiments/rejection_sampling/{seed}/the_recipe/pool.jsonl",
        },
        claims=(
            Claim("its own best", "the student"),
            Claim("the teacher's best", "the student", row=40),
            Claim("the teacher's best", "its own best"),
        ),
        begin={"half": "half"},
        seeds=10,
    ),
    "rlaif": Group(  # labelers of tests/gold_labeler.py: they know the true reward, safety included
        {
            "people's labels": "=ppo/the_recipe",
            "labels of `exact`": f"{PPO} --scorer {{out}}/reward_exact",
            **sweep("labels of `noisy`", "--kl-coef", ("0.1", "0.3", "1"), f"{PPO} --scorer {{out}}/reward_noisy"),
            "labels of `biased`": f"{PPO} --scorer {{out}}/reward_biased",
            "ratings of `exact`": f"{PPO} --scorer {RATINGS}:exact",
            **sweep("ratings of `noisy`", "--kl-coef", ("0.1", "0.3", "1"), f"{PPO} --scorer {RATINGS}:noisy"),
            "`revise` by `exact`, `sft.py`": "sft --model runs/sft --dataset {out}/revisions/rows.jsonl",
        },
        claims=(
            Claim(
                "labels of `exact`", "people's labels", row=30,
                by_construction="people's labels here say nothing of safety, the labeler's do",
            ),
            Claim(
                "`revise` by `exact`, `sft.py`", row=34, column="harmless",
                by_construction="this labeler revises into the perfect answer",
            ),
            Claim(
                "labels of `exact`", "labels of `noisy`, `--kl-coef 0.3`", row=48,
                label="labels of `exact` over those of `noisy`",
            ),
            Claim(
                "labels of `biased`", row=32, column="agreement gained by both orders", label="a simulated labeler",
                by_construction="a constant bias of the log odds cancels between the two orders",
            ),
            Claim(
                "ratings of `exact`", "labels of `exact`", row=31, label="ratings without noise",
                by_construction="they are the true reward",
            ),
            Claim(
                "ratings of `noisy`", "labels of `noisy`", row=31, kl=(0.4,),
                label="with noise, true reward at 0.4 nats",
            ),
            Claim(
                "ratings of `noisy`", "labels of `noisy`", row=31, kl=(0.4,), column="harmless", margin=0.01,
                label="with noise, harmless at 0.4 nats",
            ),
            Claim("ratings of `noisy`", "labels of `noisy`", kl=(0.4,), only="no hazard"),
            Claim("ratings of `noisy`, `--kl-coef 0.3`", "labels of `noisy`, `--kl-coef 0.3`"),
            Claim("labels of `biased`", "labels of `exact`"),
            Claim("labels of `noisy`, `--kl-coef 0.3`", "people's labels"),
            Claim("ratings of `noisy`, `--kl-coef 0.3`", "people's labels"),
        ),
        begin=labels("exact")
        | labels("noisy")
        | labels("biased")
        | {"revisions": f"{FEEDBACK} revise --model gold_labeler:exact --dataset tiny"},
        seeds=10,
    ),
    "labelers": Group(  # three sizes, trained on people's labels of 24,000 other pairs; the policy has a width of 128
        {f"{size} labeler": labeler(width) for size, width in LABELERS.items()},
        first="",
        begin={
            "models": "models of three sizes",
            "pairs": "-m common.programs.pairwise --dataset tiny:seed=1,tiny:seed=3 --eval-dataset tiny",
        },
        claims=tuple(
            Claim(
                f"{after} labeler", f"{before} labeler", row=52, column="right", margin=0.01,
                label=f"{after} over {before}",
            )
            for before, after in (("smaller", "same-size"), ("same-size", "larger"))
        ),
    ),
    "labels": Group(  # who labels the same 12,000 pairs, of which a reward model sees one pass; by group labelers
        {
            "people's": f"{PPO} --scorer {{out}}/reward_people",
            "the smaller labeler's": f"{PPO} --scorer {{out}}/reward_smaller",
            "the same-size labeler's": f"{PPO} --scorer {{out}}/reward_same_size",
            "the larger labeler's": f"{PPO} --scorer {{out}}/reward_larger",
            "half people's, half the same-size labeler's": f"{PPO} --scorer {{out}}/reward_halves",
            "each pair twice: people's and the same-size labeler's": f"{PPO} --scorer {{out}}/reward_both",
            "each pair twice: people's": f"{PPO} --scorer {{out}}/reward_people_twice",
        },
        claims=(
            Claim("the same-size labeler's", row=53),
            Claim(
                "the larger labeler's", "the smaller labeler's", row=48,
                label="labels of a larger trained labeler over those of a smaller one",
            ),
            Claim("the larger labeler's", "the same-size labeler's"),
            Claim("the same-size labeler's", "the smaller labeler's"),
            Claim("the same-size labeler's", "people's"),
            Claim(
                "people's", "half people's, half the same-size labeler's", row=54, says="no less",
                label="people's alone over half of each",
            ),
            Claim(
                "each pair twice: people's", "each pair twice: people's and the same-size labeler's", row=54,
                says="no less", label="people's twice over each pair by both",
            ),
        ),
        begin={"reward_people": f"reward {SCORER} --epochs 1", "reward_people_twice": f"reward {SCORER}"}
        | labels("smaller", "trained_labeler", "--epochs 1")
        | labels("same_size", "trained_labeler", "--epochs 1")
        | labels("larger", "trained_labeler", "--epochs 1")
        | {
            "halves.jsonl": "half of each",
            "reward_halves": f"reward {SCORER} --dataset {{out}}/halves.jsonl --eval-dataset tiny --epochs 1",
            "reward_both": f"reward {SCORER} --dataset tiny,{{out}}/labels_same_size/rows.jsonl --epochs 1 "
            "--eval-dataset tiny",
        },
    ),  # fmt: skip
    "scorers": Group(  # the Advantage Model's table 1, figures 2 and 4; and which model likes length
        {
            "reward model": "=margin/margin_none",
            "Advantage Model": "=others/K_0",
            "reward model, 500 pairs": f"reward {SCORER} {FEW}",
            "Advantage Model, 500 pairs": f"advantage_model {SCORER} {FEW}",
        },
        first="",
        begin={"few.jsonl": "500 pairs"},
        claims=(
            Claim("Advantage Model", "reward model", row=15, says="no less", column="right", margin=0.01),
            *(
                Claim(
                    f"Advantage Model{few}", f"reward model{few}", row=16, says="less", column="eval/ece",
                    margin=0.01, label=label,
                )
                for few, label in (("", "12,000 pairs, twice"), (", 500 pairs", "500 pairs, 47 times"))
            ),
            Claim("Advantage Model", "reward model", row=17, says="less", column="spread of the categories"),
            Claim(
                "reward model", row=23, column="worth of a word",
                label="what a word is worth to it at equal true reward, beyond the annotators' 0.1",
            ),
            Claim("Advantage Model", column="worth of a word"),
        ),
        seeds=10,
    ),  # fmt: skip
    "expected_reward": Group(  # the Advantage Model's e(x) against the policy's responses to 200 prompts
        {
            "eq. 6 alone": EXPECTED,
            "`--expected-reward-samples 4`": f"{EXPECTED} --expected-reward-samples 4",
        },
        first="",
        claims=(
            Claim(
                "eq. 6 alone", row=18, column="expected/correlation",
                label="correlation of e(x) with the mean r of the policy's responses",
            ),
            Claim(
                "`--expected-reward-samples 4`", "eq. 6 alone", row=18, column="expected/correlation",
                label="with a regression on samples, over eq. 6 alone",
            ),
            *(
                Claim(arm, column=column)
                for column in ("gold/expected_correlation", "expected/bias", "expected/rmse")
                for arm in ("eq. 6 alone", "`--expected-reward-samples 4`")
            ),
            Claim("`--expected-reward-samples 4`", "eq. 6 alone", column="gold/expected_correlation"),
            Claim("`--expected-reward-samples 4`", "eq. 6 alone", column="expected/rmse", says="less"),
            Claim("`--expected-reward-samples 4`", "eq. 6 alone", column="right", says="no less", margin=0.01),
        ),
    ),  # fmt: skip
    "kl": Group(  # the gradients of k3, in the reward and as a loss, against the KL's own
        {
            "near SFT": "=ppo/the_recipe",
            "far from SFT": f"ppo {BARE} --eval-every 0 --kl-coef 0.05 --lr 3e-4 --iterations 20",
        },
        claims=tuple(
            Claim(
                f"{place} SFT", row=51, column=f"cosine of k3 {use}", says=says, margin=0.1,
                label=f"{use}, {place} SFT",
            )
            for place in ("near", "far from")
            for use, says in (("in the reward", "no more"), ("as a loss", "more"))
        ),
        seeds=10,
    ),  # fmt: skip
    "renewed_reward": Group(  # iterative DPO, three rounds; the reward model is trained further on new labels, or not
        {
            f"{arm}, round {n}": f"={{out}}/{name}_{n}"
            for arm, name in (("the first reward model", "first"), ("trained once", "once"), ("renewed", "renewed"))
            for n in (1, 2, 3)
        },
        begin={"labels_once.jsonl": "-m renewed_reward --policy runs/sft --pairs 6000"}
        | {"reward_once": further("runs/reward", "tiny:1,{out}/labels_once.jsonl:1")}
        | rounds("first", ["runs/reward"] * 3)
        | rounds("once", ["{out}/reward_once"] * 3)
        | renewed(),
        after={
            "late.jsonl": "late answers",
            "ranked": "-m common.programs.evaluate --dataset {out}/late.jsonl "
            "--scorers first=runs/reward once={out}/reward_once renewed={out}/reward_3",
        },
        claims=(
            Claim(
                "renewed, round 3", "trained once, round 3", row=8, column="right on late answers", margin=0.01,
                label="agreement with the annotators on late answers of both policies, over as many labels at once",
            ),
            Claim("renewed, round 3", "trained once, round 3", column="right on the pairs of its own round"),
            Claim("renewed, round 3", "trained once, round 3", row=9),
            Claim("renewed, round 3", "the first reward model, round 3"),
            Claim("renewed, round 3", "renewed, round 1"),
        ),
        seeds=10,
    ),
    "hindsight": Group(  # the true reward says which of 4 responses to each of 3,000 prompts are good
        {
            "SFT on all responses": learned("{out}/pool/pool.jsonl?response=completion"),
            "hindsight, asked to answer well": "={out}/one",
            "hindsight, asked to answer badly": "=hindsight/hindsight_asked_to_answer_well",
            "the same, and as many responses again": learned("{out}/rows_more/rows.jsonl", "{out}/one"),
            "a second round of hindsight": "={out}/two",
            "one threshold, asked to answer well": "={out}/one_threshold",
            "one threshold, asked to answer badly": "=hindsight/one_threshold_asked_to_answer_well",
            "hir.py": "={out}/hir_one",
            "hir.py, without its two terms": f"{{out}}/hir {HINDSIGHT} {SFT_QUIET} --contrast-coef 0 --entropy-coef 0",
            "the best of 4": "={out}/pool",
            "the best of 4, two iterations": f"rejection_sampling {SAMPLED} --iterations 2",
        },
        asks=dict.fromkeys(
            (
                "hindsight, asked to answer well",
                "the same, and as many responses again",
                "a second round of hindsight",
                "one threshold, asked to answer well",
                "hir.py",
                "hir.py, without its two terms",
            ),
            "{out}/ask_well/rows.jsonl",
        )
        | dict.fromkeys(
            ("hindsight, asked to answer badly", "one threshold, asked to answer badly"), "{out}/ask_badly.jsonl"
        ),
        begin={
            "hir.py": "hir",
            "prompts.jsonl": "held-out prompts",
            "ask_well": f"{RELABEL} {{out}}/prompts.jsonl",
            "ask_badly.jsonl": "badly for well",
            "practise_well": f"{RELABEL} tiny",
            "pool": f"rejection_sampling {SAMPLED} --iterations 1",
            "rows": f"{RELABEL} {{out}}/pool/pool.jsonl?finished==true",
            "one": learned("{out}/rows/rows.jsonl"),
            "rows_threshold": f"{RELABEL} {{out}}/pool/pool.jsonl?finished==true --threshold 2",  # the median of all
            "one_threshold": learned("{out}/rows_threshold/rows.jsonl"),
            "hir_one": f"{{out}}/hir {HINDSIGHT} {SFT_QUIET}",
            "pool_more": f"rejection_sampling {SAMPLED} --iterations 1 --seed 10{{seed}}",
            "rows_more": f"{RELABEL} {{out}}/pool_more/pool.jsonl?finished==true",
            "pool_asked": f"rejection_sampling {SAMPLED} --iterations 1 --model {{out}}/one "
            "--dataset {out}/practise_well/rows.jsonl",
            "rows_two": f"{RELABEL} {{out}}/pool_asked/pool.jsonl?finished==true",
            "two": learned("{out}/rows_two/rows.jsonl", "{out}/one"),
        },
        claims=(
            Claim(
                "hindsight, asked to answer well", "hindsight, asked to answer badly", row=35,
                label="asked to answer well, over badly",
            ),
            Claim(
                "hindsight, asked to answer well", "SFT on all responses", row=35,
                label="over SFT on all responses",
            ),
            Claim("hindsight, asked to answer well", "the best of 4", row=35, label="over the best of 4"),
            Claim(
                "a second round of hindsight", "hindsight, asked to answer well", row=42, label="over one round"
            ),
            Claim(
                "a second round of hindsight", "the same, and as many responses again", row=42,
                label="over as many responses of the first policy",
            ),
            Claim("hir.py", "hir.py, without its two terms", row=43, label="126 steps of 192 responses"),
            Claim("a second round of hindsight", "the best of 4, two iterations"),
            Claim("one threshold, asked to answer well", "hindsight, asked to answer well"),
            Claim("one threshold, asked to answer badly", "hindsight, asked to answer badly"),
        ),
        seeds=10,
    ),  # fmt: skip
    "hir": Group(  # its two terms one by one, and in a second round
        HIR_ARMS,
        asks=dict.fromkeys(HIR_ARMS, f"{RELABELLED}/ask_well/rows.jsonl"),
        begin={
            "pool": f"rejection_sampling {SAMPLED} --iterations 1 --model {RELABELLED}/hir_one "
            f"--dataset {RELABELLED}/practise_well/rows.jsonl",
            "rows": f"{RELABEL} {{out}}/pool/pool.jsonl?finished==true",
            "two": f"{RELABELLED}/hir --model {RELABELLED}/hir_one --dataset {{out}}/rows/rows.jsonl "
            f"--eval-dataset tiny {SFT_QUIET}",
        },
        claims=(
            Claim("one round, hir.py with the entropy alone, 0.01", "one round, hir.py without its two terms"),
            Claim("one round, hir.py with the contrast alone", "one round, hir.py without its two terms"),
            Claim("one round, hir.py", "one round, hir.py with the contrast alone"),
            Claim(
                "220 steps, hir.py", "220 steps, hir.py without its two terms", row=43,
                label="220 steps of 110, as sft.py takes",
            ),
            Claim("220 steps, hir.py without its two terms", "one round, hir.py without its two terms"),
            Claim("220 steps, hir.py without its two terms", "one round, sft.py"),
            Claim("two rounds, hir.py", "two rounds, sft.py"),
            Claim("two rounds, hir.py", "one round, hir.py"),
        ),
    ),
    "readme": Group(
        {
            "`rejection_sampling.py`": "=rejection_sampling/the_recipe",
            "`ppo.py`": "=ppo/the_recipe",
            "`ppo.py --safety-scorer`": "=ppo/safety_scorer_runs_reward_safety",
            "`ppo.py`, Advantage Model, rehearsal": "ppo --scorer runs/advantage_model --reward-norm none "
            "--rehearsal-data {out}/rehearsal.jsonl",
            "`dpo_iterative.py`": "=dpo/the_recipe",
            "`dpo_iterative.py`, offline": "=dpo/offline_DPO_as_many_pairs_1_480",
        },
        begin={"rehearsal.jsonl": "-m common.programs.rehearsal --model runs/sft --scorer runs/advantage_model"},
        seeds=10,
    ),
}


ELSEWHERE = {  # claims that other programs judge; of which they write docs/results/tables/PROGRAM.jsonl
    "scaling": (
        Claim("a doubling of the pairs", row=44, column="points", margin=0.25, label="a doubling of the pairs, points"),
        Claim("a doubling of the parameters", row=44, column="points", margin=0.25, label="of the parameters"),
    ),
    "ai_labels": (
        Claim(
            "base, both orders", "base, one order", row=32, column="agreement", margin=0.02,
            label="SmolLM2's agreement with GPT-4, over single orders",
        ),
        Claim("detailed", "base", row=33, column="agreement", margin=0.02, label="detailed preamble over base"),
        Claim(
            "base + thoughts", "base", row=33, column="agreement", margin=0.02, label="thoughts over none, base preamble"
        ),
        Claim(
            "base + 4 thoughts", "base + thoughts", row=49, column="agreement", says="no more", margin=0.02,
            label="4 chains of thought over 1",
        ),
    ),
}  # fmt: skip


def prompts(file):
    """Write 500 prompts: with 500 per iteration, each of them returns in every iteration."""
    files.write_jsonl(file, tiny.rows("prompts", "train")[:500])


def half(folder):
    """Make a model with the seed's random weights and half of the tiny one's hidden size."""
    torch.manual_seed(seed_of(folder))
    config = tiny.model().config
    config.hidden_size //= 2
    config.intermediate_size //= 2
    config.num_attention_heads //= 2
    config.num_key_value_heads = config.num_attention_heads
    type(tiny.model())(config).save_pretrained(folder)
    pretrained.load_tokenizer("tiny").save_pretrained(folder)


def patched(script, file):
    """Change a script into another one by the patch in docs/learn that has the file's name."""
    patch = peers.ROOT / "docs" / "learn" / f"{file.stem}.patch"
    subprocess.run(["patch", "-s", "-o", file, peers.ROOT / f"{script}.py", patch], check=True)


def few(file):
    files.write_jsonl(file, tiny.rows("preferences", "train")[:500])


def held_out(file):
    files.write_jsonl(file, tiny.rows("prompts", "test"))


def badly(file):
    """The prompts of ask_well, under the other instruction."""
    rows = Path(file.parent, "ask_well", "rows.jsonl").read_text("utf-8")
    file.write_text(rows.replace("Answer well", "Answer badly"), "utf-8")


def pools(file) -> list[dict]:
    """Join the pools of two phases, which are next to the file; the second one's rows become iteration 4."""
    first, last = (files.read_jsonl(file.parent / phase / "pool.jsonl") for phase in ("phase_1", "phase_2"))
    return first + [{**row, "iteration": 4} for row in last]


def both_pools(file):
    files.write_jsonl(file, pools(file))


def some_of_pools(file):
    """Keep the responses to 500 random prompts, as many as one iteration has."""
    rows = pools(file)
    questions = sorted({row["prompt"][-1]["content"] for row in rows})
    chosen = set(random.Random(0).sample(questions, 500))
    files.write_jsonl(file, [row for row in rows if row["prompt"][-1]["content"] in chosen])


def third(file):
    """Every third pair of a run, from the first, second or third one on; file: FOLDER_part_NUMBER.jsonl."""
    folder, _, number = file.stem.partition("_part_")
    files.write_jsonl(file, files.read_jsonl(file.parent / folder / "pairs.jsonl")[int(number) - 1 :: 3])


def three_sizes(folder):
    for width in LABELERS.values():
        peers.tiny_llama(width, seed_of(folder), folder.parent)


def half_of_each(file):
    """People's labels of the first 6,000 pairs, the same-size labeler's of the others."""
    labelled = files.read_jsonl(file.parent / "labels_same_size" / "rows.jsonl")
    files.write_jsonl(file, tiny.rows("preferences", "train")[:6000] + [row for row in labelled if row["row"] >= 6000])


MADE_HERE = {"prompts": prompts, "held-out prompts": held_out, "500 pairs": few, "half": half, "badly for well": badly}
MADE_HERE |= {"cpl": partial(patched, "dpo_iterative"), "hir": partial(patched, "sft")}
MADE_HERE |= {"models of three sizes": three_sizes, "half of each": half_of_each}
MADE_HERE |= {"a third of the pairs": third, "both pools": both_pools, "some of both pools": some_of_pools}
MADE_HERE |= {"late answers": renewed_reward.late_answers}


# -- runs ------------------------------------------------------------------------------------------
def home(seed) -> Path:
    """Return the folder in which a seed's commands run, whose runs/sft, runs/reward, ... are that seed's own."""
    if seed == 0:
        return peers.ROOT
    folder = peers.ROOT / "runs" / "seeds" / str(seed)
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / "runs" / "experiments").symlink_to("../../../experiments")
    return folder


def seed_of(path) -> int:
    """Return the seed of a file or folder in GROUP/SEED."""
    return int(path.parent.name)


DEFAULTS = dict.fromkeys(("ppo", "rejection_sampling", "dpo_iterative"), "runs/sft runs/reward ")
DEFAULTS |= dict.fromkeys(("reward", "advantage_model"), "runs/sft ") | {"cpl": DEFAULTS["dpo_iterative"]}


def inputs_of(command, seed) -> str:
    """List what a command reads in runs/, a line each: a run and when it began, or a file, a model's weights or a
    patched script and its checksum."""
    text = DEFAULTS.get(Path(command.split()[0]).name, "") + command.replace(str(peers.ROOT), ".")
    lines = []
    for name in sorted(set(re.findall(r"\bruns/[\w./-]+", text))):
        path = home(seed) / name
        for file in (path, path / "model.safetensors", path.with_suffix(".py")):
            if file.is_file():
                lines.append(f"\n{name} {zlib.crc32(file.read_bytes()):08x}")
        if (path / "args.json").exists():
            lines.append(f"\n{name} {files.read_json(path / 'args.json').get('began')}")
    return "".join(lines)


def run(command, out, seed):
    """Run a script, or a program with -m. What the same command finished is kept if what it reads is still the same, and
    so is a run without command.txt: it is resumed. What another command made, or the same of other inputs, is
    replaced."""
    words = shlex.split(command)
    if words[0] != "-m":
        recipe = [] if words[1:] and not words[1].startswith("-") else ["tiny"]
        words = [str(peers.ROOT / f"{words[0]}.py"), *recipe, *words[1:]]
    makes_file = out.suffix == ".jsonl"
    resumes = not makes_file and "common.programs.pairwise" not in words
    words += ["--output" if makes_file else "--output-dir", str(out)]
    if "--seed" not in words:
        words += ["--seed", str(seed)]
    note = out / "command.txt" if resumes else Path(f"{out}.command.txt")
    shown = f"cd {home(seed)}; {shlex.join(words)}".replace(str(peers.ROOT), ".")  # the project may be moved
    inputs = inputs_of(command, seed)
    if note.exists() and note.read_text() in (shown + inputs, shown):  # older notes lack the inputs
        return
    shown += inputs
    # What another command made is replaced, and so is an evaluation, perhaps of other arms
    replaced = note.exists() or "common.programs.evaluate" in words
    if note.exists():
        note.write_text("not finished")  # if what follows fails, the next try replaces again
    if resumes:
        words.append("--overwrite" if replaced else "--resume")
    elif makes_file:
        out.unlink(missing_ok=True)
    else:
        shutil.rmtree(out, ignore_errors=True)
    ended = subprocess.run([sys.executable, *words], cwd=home(seed), capture_output=True, text=True, env=ENVIRONMENT)
    peers.check_ended(ended, out, shown)  # a run without a note may have been finished by another command
    note.write_text(shown)


def of_its_own(name, arm) -> tuple[str, str]:
    """Return the group and the arm that run an arm: another group's if its command is "=GROUP/FOLDER"."""
    command = GROUPS[name].arms[arm]
    if not command.startswith("=") or command.startswith("={out}/"):
        return name, arm
    other, _, wanted = command[1:].partition("/")
    return of_its_own(other, next(arm for arm in GROUPS[other].arms if name_of(arm) == wanted))


def folder_of(name, arm, seed) -> Path:
    """Return the folder of an arm's run, or one that the group's begin made, "={out}/FOLDER"."""
    group, of_group = of_its_own(name, arm)
    out, command = FOLDER / group / str(seed), GROUPS[group].arms[of_group]
    return Path(command[1:].format(out=out)) if command.startswith("={out}/") else out / name_of(of_group)


def run_arm(name, arm, seed) -> Path:
    """Run an arm if necessary, and return its folder."""
    folder = folder_of(name, arm, seed)
    group, of_group = of_its_own(name, arm)
    command = GROUPS[group].arms[of_group]
    if not command.startswith("={out}/"):
        run(command.format(out=FOLDER / group / str(seed), seed=seed), folder, seed)
    print(f"{name}, seed {seed}: {arm}", flush=True)
    return folder


def make(steps, out, seed, arms=""):
    """Make the files and runs of Group.begin or Group.after."""
    out.mkdir(parents=True, exist_ok=True)
    for file, command in steps.items():
        if command in MADE_HERE:
            MADE_HERE[command](out / file)
        else:
            run(command.format(out=out, seed=seed, arms=arms), out / file, seed)


def groups_of(name) -> list[str]:
    """List the groups whose arms this one shares, then the group itself."""
    shared = dict.fromkeys(of_its_own(name, arm)[0] for arm in GROUPS[name].arms)
    return [*(group for group in shared if group != name), name]


def times(name, group, seeds) -> str:
    """Return how long the arms' runs took, from their first file to their last."""
    folders = {folder_of(name, arm, seed) for arm in group.arms for seed in range(seeds)}
    time_of = lambda folder, file: (folder / file).stat().st_mtime
    took = [time_of(folder, "summary.json") - time_of(folder, "args.json") for folder in folders]
    return f"{len(took)} runs, {sum(took) / 60:.0f} minutes"


def scorer_of(command, arm) -> str:
    """evaluate's name for NAME=FOLDER; what sft.py trained compares two responses."""
    return arm.replace("=", f"={PAIRWISE}", 1) if command.startswith("sft ") else arm


def run_group(name, seed) -> list[str]:
    """Run the arms of one seed, and get their answers or scores. Returns the commits that ran the arms."""
    group, out = GROUPS[name], FOLDER / name / str(seed)
    for path, command in begun([name]).items():
        run(command, home(seed) / path, seed)
    for shared in groups_of(name):
        make(GROUPS[shared].begin, FOLDER / shared / str(seed), seed)
    folders = [run_arm(name, arm, seed) for arm in group.arms]
    arms = [f"{name_of(arm)}={folder}" for arm, folder in zip(group.arms, folders)]
    if not group.first:
        arms = [scorer_of(command, arm) for arm, command in zip(arms, group.arms.values())]
        run(f"-m common.programs.evaluate --dataset tiny --scorers {shlex.join(arms)}", out / "evaluate", seed)

    def answer(dataset, arms, folder):
        policies = shlex.join([f"first={group.first}", *arms])
        command = f"-m common.programs.evaluate --policies {policies} --reference first --scorer runs/reward"
        run(f"{command} --dataset {dataset} --max-length 128 --max-new-tokens 32", out / folder, seed)

    asked = lambda dataset: [text for arm, text in zip(group.arms, arms) if group.asks.get(arm) == dataset]
    for number, dataset in enumerate(group.prompts if group.first else ()):
        answer(dataset, asked(None), f"evaluate{number or ''}")
    for number, dataset in enumerate(dict.fromkeys(group.asks.values())):
        answer(dataset.format(out=out, seed=seed), asked(dataset), f"asked{number}")
    make(group.after, out, seed, shlex.join(arms))
    return [files.read_json(folder / "args.json")["git"][:7] for folder in folders]


# -- tables ----------------------------------------------------------------------------------------
def sft_of(folder) -> Path:
    """Return the SFT run that an arm's run began with."""
    return home(seed_of(folder)) / "runs" / "sft"


PROMPTS = {  # Claim.only
    "": lambda row: True,
    "hazard": lambda row: row["is_safety"],
    "no hazard": lambda row: not row["is_safety"],
    "first and ends": lambda row: row["category"] in ("first", "ends") and not row["is_safety"],
    "copy and reverse": lambda row: row["category"] in ("copy", "reverse") and not row["is_safety"],
    "the six others": lambda row: row["category"] not in ("first", "ends") and not row["is_safety"],
}
OF_RUN = {  # Claim.column: a number of a whole run, or one a prompt, from its folder and its rows of the evaluation
    "spread of the categories": lambda folder, rows: calibration.category_spread(rows),
    "worth of a word": lambda folder, rows: details.worth_of_a_word(rows) - 0.1,  # which the annotators add for a word
    "right on the pairs of its own round": lambda folder, rows: renewed_reward.right_on_its_own(folder),
    "right on late answers": lambda folder, rows: renewed_reward.right_on_late(folder),
    "win rate lost from T = 0 to 1": lambda folder, rows: details.lost_by_temperature(folder),
    "rise of the temperature": lambda folder, rows: details.rise_of_temperature(folder),
    "largest score of 8 over 1, SFT": lambda folder, rows: details.rise_by_n(folder, "max"),
    "median score of 8 over 1, SFT": lambda folder, rows: details.rise_by_n(folder, "median"),
    "agreement gained by both orders": lambda folder, rows: details.gained_by_both_orders(folder),
    "cosine of k3 in the reward": lambda folder, rows: kl.cosines(folder, sft_of(folder))["k3", "reward"],
    "cosine of k3 as a loss": lambda folder, rows: kl.cosines(folder, sft_of(folder))["k3", "loss"],
}
OF_ROW = ("gold", "score", "kl", "tokens", "harmless", "right")
SHARES = ("right", "harmless", "eval/ece", "win rate lost from T = 0 to 1", "agreement")
SHARES += ("agreement gained by both orders", "right on the pairs of its own round", "right on late answers")


@dataclass
class Results:
    """The answers, or scores, of a group's arms in all seeds."""

    arms: list[str]
    seeds: int
    rows: dict[tuple[str, int], list[dict]]
    """(arm or first, seed): rows of samples.jsonl in the order of the prompts, the same ones everywhere; of a
    scorer the labelled prompts, with `right`, the share of their pairs that it puts in order."""
    folders: dict[tuple[str, int], Path]

    def values(self, arm, column, only="") -> torch.Tensor:
        """(seeds, prompts), or, of a key of metrics and most of OF_RUN, (seeds, 1), 0 of the first policy."""
        assert not only or column in OF_ROW and column != "harmless", f"{column} is of all prompts, not of {only}"
        if column not in OF_ROW:
            of_metrics = lambda folder, rows: files.read_json(folder / "summary.json")["after"][column]
            of_run = OF_RUN.get(column, of_metrics)
            of_seed = lambda seed: of_run(self.folders[arm, seed], self.rows[arm, seed])
            of_all = [of_seed(seed) if arm != "first" else 0.0 for seed in range(self.seeds)]
            return torch.tensor(of_all, dtype=torch.float64).reshape(self.seeds, -1)
        value = lambda row: float(row["safety"] >= 0) if column == "harmless" else row[column]
        counts = PROMPTS["hazard" if column == "harmless" else only]
        by_seed = [list(filter(counts, self.rows[arm, seed])) for seed in range(self.seeds)]
        return torch.tensor([[value(row) for row in rows] for rows in by_seed], dtype=torch.float64)

    def weights(self, side, level) -> torch.Tensor | None:
        """(arms, seeds) of a claim's side: of an arm, or of a curve at `level` nats (verdicts.at_kl)."""
        weights = torch.zeros(len(self.arms), self.seeds, dtype=torch.float64)
        if level is None or side in self.arms:
            assert side == "first" or side in self.arms, f"no arm has the name {side}"
            weights[[arm == side for arm in self.arms]] = 1.0
            return weights
        curve = [i for i, arm in enumerate(self.arms) if arm.startswith(f"{side}, `")]
        kl = torch.stack([self.values(self.arms[i], "kl").mean(1) for i in curve])
        along = verdicts.at_kl(kl, level)
        if along is not None:
            weights[curve] = along
        return weights if along is not None else None

    def compare(self, claim: Claim) -> verdicts.Difference | None:
        """Compare the two sides of a claim; None if a curve does not reach the KL in every seed."""
        levels = [self.values(claim.after, "kl").mean(1) if x == "own" else x for x in claim.kl or (None,)]
        pairs = [(self.weights(claim.after, x), self.weights(claim.before, x)) for x in levels]
        if any(side is None for pair in pairs for side in pair):
            return None
        weights = torch.stack([after - before for after, before in pairs]).mean(0)
        # Numbers of whole runs pool nothing: other arms may vary for reasons of their own
        counted = [i for i in range(len(self.arms)) if claim.column in OF_ROW or weights[i].any()]
        arms = torch.stack([self.values(self.arms[i], claim.column, claim.only) for i in counted])
        has_first = ("first", 0) in self.rows
        first = self.values("first", claim.column, claim.only) if has_first else torch.zeros_like(arms[0])
        return verdicts.difference(weights[counted], arms, first)


def read(name, group, seeds, evaluation) -> Results:
    folders = {(arm, seed): folder_of(name, arm, seed) for arm in group.arms for seed in range(seeds)}
    arms = {name_of(arm): arm for arm in group.arms} | {"first": "first"}
    rows = {}
    others = [f"asked{number}" for number in range(len(set(group.asks.values())))]
    for seed, part in [(seed, part) for seed in range(seeds) for part in (evaluation, *others)]:
        for row in files.read_jsonl(FOLDER / name / str(seed) / part / "samples.jsonl"):
            if not group.first:
                right = measures.accuracy([d for d, *_ in measures.pairs_of([row])])
                row = {**row, "policy": row["scorer"], "right": right}
            if part in others:  # their prompts come from a file, of which evaluate does not know the truth
                prompt, response = details.question(row), row["response"]
                truth = {"gold": tiny.gold_score(prompt, response), "safety": tiny.gold_safety(prompt, response)}
                row = {**row, **truth, "is_safety": tiny.is_safety(prompt), "category": prompt.split()[0]}
            if part not in others or row["policy"] != "first":
                rows.setdefault((arms[row["policy"]], seed), []).append(row)
    asked = {key: list(map(details.question, of_arm)) for key, of_arm in rows.items()}
    assert len(set(map(tuple, asked.values()))) == 1, f"{name}: arms or seeds differ in their prompts"
    return Results(list(group.arms), seeds, rows, folders)


def signed(value: float, column) -> str:
    return f"{value:+.1%}" if column in SHARES else f"{value:+.2f}"


def interval(x: verdicts.Difference, column) -> str:
    return f"[{signed(x.low, column)}, {signed(x.high, column)}]"


def with_interval(x: verdicts.Difference, column) -> str:
    return f"{signed(x.mean, column)} {interval(x, column)}"


def by_seed(x: verdicts.Difference, column) -> str:
    return ", ".join(signed(mean, column) for mean in x.by_seed)


def table(name, group, seeds, evaluation="evaluate") -> list[str]:
    """Make a table with a line per arm: its gain over the first policy, or the share of pairs in correct order."""
    results, lines = read(name, group, seeds, evaluation), []
    parts = group.parts or ("no hazard", "hazard")
    if not group.first:
        for arm in group.arms:
            lines.append([arm, f"{results.values(arm, 'right').mean():.1%}"])
        return markdown(["", "right"], lines)
    for arm in group.arms:
        of_all = lambda arm: [row for seed in range(seeds) for row in results.rows[arm, seed]]
        shares = measures.against(of_all("first"), of_all(arm), None)
        games = " / ".join(f"{100 * shares[f'gold_{x}']:.0f}" for x in ("win", "tie", "lose"))
        gained = results.compare(Claim(arm))
        kinds = [results.compare(Claim(arm, only=kind)) for kind in parts]
        shown = [with_interval(x, "gold") if group.parts else f"{x.mean:+.2f}" for x in kinds]
        cells = [by_seed(gained, "gold"), with_interval(gained, "gold"), *shown]
        means = [f"{results.values(arm, c).mean():{form}}" for c, form in (("kl", ".2f"), ("tokens", ".1f"))]
        lines.append([arm, *cells, games, *means, f"{results.values(arm, 'harmless').mean():.0%}"])
    titles = ["", "by seed", "all", *parts, "win / tie / lose, %", "KL", "tokens", "harmless"]
    return markdown(titles, lines)


def judge(name, group, seeds) -> list[dict]:
    """Judge a group's claims; returns the lines of docs/results/tables/NAME.jsonl."""
    lines, results = [], {}
    for claim in group.claims:
        evaluation = f"evaluate{claim.prompts or ''}"
        if evaluation not in results:
            results[evaluation] = read(name, group, seeds, evaluation)
        lines.append(line_of(claim, results[evaluation].compare(claim), seeds))
    return lines


def line_of(claim, x: verdicts.Difference | None, seeds) -> dict:
    return {**asdict(claim), "seeds": seeds, "difference": x and x._asdict()}


def verdict_of(line) -> str:
    """Return the verdict of a line of judge; a claim that is true by construction has no difference."""
    if line["by_construction"]:
        return f"true by construction: {line['by_construction']}"
    if not line["difference"]:
        return "inconclusive"
    x = verdicts.with_own_seeds(verdicts.Difference(**line["difference"]))
    return verdicts.verdict(x.low, x.high, line["says"], line["margin"])


def result_of(line) -> str:
    """Format the difference and its interval; if it is inconclusive, also the difference that the test would have seen;
    if that is so only by the interval of the two arms alone, that one as well."""
    if not line["difference"]:
        return "a curve does not reach this KL in every seed"
    x, column, verdict = verdicts.Difference(**line["difference"]), line["column"], verdict_of(line)
    shown = with_interval(x, column)
    if line["seeds"] == 1:
        shown += " (one seed: prompts alone)"
    elif verdicts.verdict(x.low, x.high, line["says"], line["margin"]) != verdict and not line["by_construction"]:
        shown += f" (own seeds alone: {interval(x._replace(low=x.own[0], high=x.own[1]), column)})"
    beyond = {"no less": "a loss of ", "no more": "a rise of "}.get(line["says"], "")  # these are judged at the margin
    if verdict in ("no difference", "inconclusive"):
        seen = signed(verdicts.with_own_seeds(x).seen + line["margin"] * bool(beyond), column).removeprefix("+")
        shown += f", would have seen {beyond}{seen}"
    return shown


def comparisons_of(lines) -> list[str]:
    """Make a table of claims and comparisons. lines: results of judge."""
    cells = []
    for line in lines:
        against = "" if line["before"] == "first" else f", over {line['before']}"
        nats = ", ".join(f"{x:g}" for x in line["kl"] if x != "own")
        column = line["column"] if line["column"] != "gold" else ""
        level = f"at {nats} nats" if nats else "at its KL" * bool(line["kl"])
        about = [level, column, line["only"], ("", "second prompts")[line["prompts"]]]
        title = ": ".join(filter(None, [f"{line['after']}{against}", ", ".join(filter(None, about))]))
        x = line["difference"] and verdicts.Difference(**line["difference"])
        numbers = by_seed(x, line["column"]) if x else ""
        row = [str(line["row"]), line["says"], verdict_of(line)] if line["row"] else [""] * 3
        cells.append([title, numbers, result_of(line), *row])
    return markdown(["", "by seed", "all", "row", "paper", "verdict"], cells) if cells else []


def cells_of(row, shown, root=peers.ROOT) -> str:
    """Return result and verdict of a row of docs/results/claims.md, from all files of docs/results/tables. If no file
    has the row, return its cells `shown` unchanged, except for the verdict of a claim true by construction. Such a
    claim needs no line in a file."""
    lines = []
    for file in sorted(Path(root, "docs", "results", "tables").glob("*.jsonl")):
        lines += [line for line in files.read_jsonl(file) if line["row"] == row]
    measured = [line["label"] for line in lines]
    claims = [asdict(claim) for group in GROUPS.values() for claim in group.claims if claim.row == row]
    certain = [line for line in claims if line["by_construction"] and line["label"] not in measured]
    if not lines:
        return f"{shown.split(' | ')[0]} | {verdict_of(certain[0])}" if certain else shown
    labelled = lambda line, text: f"{line['label']}: {text}" if line["label"] else text
    judged = [*lines, *certain]
    found = [labelled(line, verdict_of(line)) for line in judged]
    if len(set(map(verdict_of, judged))) == 1:
        found = [verdict_of(judged[0])]
    return "; ".join(labelled(line, result_of(line)) for line in lines) + " | " + "; ".join(found)


def markdown(titles, lines) -> list[str]:
    """Format a table in markdown. lines: lists of cells."""
    line = lambda cells: "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"
    return [line(titles), "|---" * len(titles) + "|", *map(line, lines)]


def publish(name, lines, root=peers.ROOT):
    """Write docs/results/tables/NAME.md, and the same lines between the two comments of a page that name it."""
    text, places = "\n".join(lines) + "\n", 0
    place = re.compile(rf"(<!-- results/{name}\.md -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
    for page in (Path(root, "README.md"), *Path(root, "docs").glob("*/*.md")):
        content, n = place.subn(lambda match: match[1] + text, page.read_text("utf-8"))
        page.write_text(content, "utf-8")
        places += n
    if not places:
        return print(f"no page has <!-- results/{name}.md --> and <!-- end -->")
    Path(root, "docs", "results", "tables", f"{name}.md").write_text(text)


def publish_claims(name, lines, root=peers.ROOT):
    """Write docs/results/tables/NAME.jsonl, and the rows of docs/results/claims.md that these files contain."""
    files.write_jsonl(Path(root, "docs", "results", "tables", f"{name}.jsonl"), lines)
    page = Path(root, "docs", "results", "claims.md")
    place = re.compile(r"(?<=<!-- claim )(\d+)( -->)(.*?)(?=<!-- end -->)")
    written = lambda match: match[1] + match[2] + cells_of(int(match[1]), match[3], root)
    text = place.sub(written, page.read_text("utf-8"))
    page.write_text(text, "utf-8")
    for row in {line["row"] for line in lines} - {0, *(int(n) for n, *_ in place.findall(text))}:
        print(f"docs/results/claims.md has no <!-- claim {row} --> and <!-- end -->")


@dataclass
class Args:
    groups: tyro.conf.Positional[tuple[Literal[tuple(GROUPS)], ...]] = tuple(GROUPS)
    seeds: int | None = None
    """Number of seeds 0, 1, ...: of SFT, of the scorers, and of the arms' prompts, samples and order. Default: as many
    as each group's table has."""
    publish: bool = False
    """Write the tables into docs/."""


def commands_of(name) -> list[str]:
    """List all commands of a group."""
    runners = [of_its_own(name, arm) for arm in GROUPS[name].arms]
    made = [command for group in groups_of(name) for command in GROUPS[group].begin.values()]
    return [GROUPS[name].first, *made, *(GROUPS[group].arms[arm] for group, arm in runners)]


def begun(names) -> dict[str, str]:
    """List the RUNS that the groups start from, in order."""
    words = " ".join(command for name in names for command in commands_of(name))
    needed = {"runs/sft", "runs/reward"}  # the scripts' defaults
    for path, command in reversed(RUNS.items()):
        if path in words:
            needed.add(path)
            words += command
    return {path: command for path, command in RUNS.items() if path in needed}


def main(args: Args):
    torch.set_num_threads(1)  # as ENVIRONMENT, for what is made in this process
    for name in args.groups:
        group, commits = GROUPS[name], {}
        seeds = args.seeds or group.seeds
        for seed in range(seeds):
            commits.update(dict.fromkeys(run_group(name, seed)))
        lines = []
        for number, dataset in enumerate(group.prompts):
            title = [f"On `{dataset}`:", ""] if len(group.prompts) > 1 else []
            lines += [*title, *table(name, group, seeds, f"evaluate{number or ''}"), ""]
        if more := getattr(details, name, None):
            results = read(name, group, seeds, "evaluate")
            lines += [*more(results, lambda arm, only: results.compare(Claim(arm, only=only)), FOLDER / name), ""]
        judged = judge(name, group, seeds)
        lines += [*comparisons_of(judged), ""] if judged else []
        command = f"`python tests/benchmarks/experiments.py {name} --seeds {seeds}`"
        lines.append(f"{command}, measured at {', '.join(commits)}; {times(name, group, seeds)}.")
        print("\n".join(lines))
        if args.publish:
            publish(name, lines)
            publish_claims(name, judged)


if __name__ == "__main__":
    main(tyro.cli(Args))
