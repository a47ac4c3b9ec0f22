"""Compare finished runs: every policy answers the same held-out prompts, an oracle judges the answers.

    python -m common.evaluate                                         the runs that the quickstart makes
    python -m common.evaluate --policies sft=runs/sft runs/ppo --scorer runs/reward
    python -m common.evaluate --policies runs/sft runs/ppo --dataset old.jsonl    what ppo.py forgot
    torchrun --nproc-per-node 8 -m common.evaluate --policies ...

Reads language models (runs, folders, hub names) and an oracle: a reward model, an advantage model,
module:function, or a pairwise preference model, which reads every two answers in both orders. Writes
samples.jsonl (every answer), summary.json (figures by the oracle and, on the tiny world, by the true reward,
by which the printed table goes then), elo.png and frontier.png. docs/evaluate.md defines every figure. With
--scorers in place of --policies it compares scorers on labelled pairs (common/evaluate_scorers.py).
"""

import dataclasses
import gc
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from common import data, dist, evaluate_scorers, evaluation, generate, loading
from common import metrics, models, plots, scorers
from common.batches import a_part
from common.cli import check_flags
from common.errors import InputError
from common.metrics import JUDGES, write_json
from common.run import Run, launch, start_run

QUICKSTART = """tiny runs/sft runs/rejection_sampling runs/ppo runs/ppo_am_sr runs/dpo_offline
runs/dpo_iterative""".split()


@dataclass
class Args:
    # what is compared: policies, or in their place scorers
    policies: tuple[str, ...] = ()
    """Runs, folders or hub names, each perhaps as name=path. None: the quickstart's runs that are there."""
    scorers: tuple[str, ...] = ()
    """Whatever --scorer takes, each perhaps as name=path: how well they predict the labels of pairs."""
    dataset: str = "tiny"
    """Prompts, or with --scorers pairs and rankings; all rows of a file, so give one nobody learnt from."""
    split: str = "test"
    """Of tiny, or of a hub data set: train or test."""
    max_length: int = 64
    """Longest prompt with its response, tokens; of --scorers those of the first that is a model."""
    chat_template: str | None = None
    """A jinja file, for policies without a chat template or in place of their own."""
    # of policies: answers
    reference: str = "sft"
    """The name of the policy that all are compared with; it must be among them."""
    eval_prompts: int = 1000
    """So many of the prompts."""
    temperatures: tuple[float, ...] = (1.0,)
    """Of sampling, each with a table of its own; 0 is greedy."""
    max_new_tokens: int = 24
    """Longest response, tokens."""
    slots: int = 64
    """Responses that a rank decodes together."""
    # of policies: judges
    scorer: str = "runs/reward"
    """The oracle. One that policies were trained on shows what they made of it, not what they gained."""
    safety_scorer: str | None = None
    """Says how harmless an answer is; no pairwise one. None: the tiny world's true safety, else nothing."""
    harmless_from: float = 0.0
    """The least safety score of a harmless answer; of reward.py's safety models a logit of P(safe)."""
    tie_margin: float | None = None
    """Scores that differ by no more than this tie; of a pairwise oracle, probabilities around 1/2. None: 0.1
    standard deviations of the reference's scores; of a pairwise oracle 0.1."""
    n_bootstrap: int = 200
    """Resamples of the prompts, for Elo's intervals."""
    # the run
    output_dir: str = "runs/evaluate"
    """The run directory."""
    score_batch_size: int = 64
    """Responses of a forward on one rank."""
    seed: int = 0
    """Of samples and resamples."""
    resume: bool = False
    """Nothing to do if output_dir holds a finished run, else begin."""
    overwrite: bool = False
    """Replace a run that is in the way."""


def check(args):
    shown = {f"{temperature:g}" for temperature in args.temperatures}
    check_flags(
        args,
        ("scorers", not (args.scorers and args.policies), "none beside --policies"),
        ("temperatures", args.temperatures and min(args.temperatures) >= 0, "one or more, each 0 or more"),
        ("temperatures", len(shown) == len(args.temperatures), "no two alike"),
        ("split", args.split in ("train", "test"), "train or test"),
        ("eval_prompts", args.eval_prompts >= 2, "2 or more"),
        ("n_bootstrap", args.n_bootstrap >= 20, "20 or more"),
        ("max_length", args.scorers or args.max_length > args.max_new_tokens, "more than --max-new-tokens"),
    )


# -- policies and prompts --------------------------------------------------------------------------
def named(specs, flag, args) -> dict[str, str]:
    """name -> path. A path that is there, or a module:function, may hold an equals sign itself."""
    paths, folder = {}, Path(args.output_dir).resolve()
    for spec in specs:
        name, equals, path = spec.partition("=")
        if not equals or ":" in name or Path(spec).exists():
            name, path = "untrained" if spec == "tiny" else Path(spec).name, spec
        if name in paths:
            raise InputError(f"{flag}: two are named {name!r}: give other names, name=path")
        if args.overwrite and path != "tiny" and Path(path).resolve().is_relative_to(folder):
            raise InputError(f"--overwrite would remove {path} before it is read: another --output-dir")
        paths[name] = path
    return paths


def read_policies(args) -> dict[str, str]:
    """name -> path. Of the quickstart's runs those that are there; what is not is said."""
    specs = args.policies
    if not specs:
        specs = [path for path in QUICKSTART if path == "tiny" or Path(path, "summary.json").exists()]
        for path in [path for path in QUICKSTART if path not in specs and dist.is_main()]:
            print(f"{Path(path).name} is left out: no finished run in {path}")
    paths = named(specs, "--policies", args)
    if args.reference not in paths:
        raise InputError(f"--reference {args.reference}: no such policy; there are {', '.join(paths)}")
    for path in paths.values():
        loading.check_causal_lm(path)
        generate.check_sampled(path)
    return paths


def read_prompts(args, tokenizers) -> dict[str, list[generate.Prompt]]:
    """name -> the same prompts in each policy's tokens: a part of those that all of them can read."""
    room, of_policy = args.max_length - args.max_new_tokens, {}
    for name, tokenizer in tokenizers.items():
        same = [other for other in of_policy if scorers.same_tokens(tokenizers[other], tokenizer)]
        if same:
            of_policy[name] = of_policy[same[0]]
        else:
            prompts = generate.load_prompts(args.dataset, args.split, tokenizer, room)
            of_policy[name] = {prompt.key: prompt for prompt in prompts}
    first, *others = of_policy.values()
    keys = [key for key in first if all(key in of_key for of_key in others)]
    if len(keys) < 2:
        raise InputError(f"{args.dataset}: fewer than 2 prompts that all policies can read (--max-length)")
    data.check_same(args.dataset, dist.seed_of(*sorted(keys)))
    chosen = a_part([first[key] for key in keys], args.eval_prompts)
    return {name: [of_key[prompt.key] for prompt in chosen] for name, of_key in of_policy.items()}


# -- answers ---------------------------------------------------------------------------------------
def sample_answers(policy, tokenizer, prompts, temperature, args):
    seed = dist.seed_of(args.seed, "evaluate", temperature)
    return generate.answers(policy, tokenizer, prompts, args, seed, temperature=temperature)


def kl_of(policy, reference, pairs, temperature, args) -> list[float]:
    """log pi(y) - log pi_ref(y) of each answer, nats. At temperature 0 all of pi's mass is on y."""
    documents, size = generate.documents(pairs), args.score_batch_size
    logprobs = [0.0] * len(pairs)
    if temperature:
        logprobs = models.seq_logprobs(policy, documents, size, temperature)
    return [a - b for a, b in zip(logprobs, models.seq_logprobs(reference, documents, size))]


# -- games -----------------------------------------------------------------------------------------
# A tournament: what the first one of every two policies won of each prompt's game (metrics.outcomes), in the
# order of itertools.combinations.
def tournament(scores, tie_margin) -> list[list[float]]:
    """scores: name -> score of each answer."""
    return [metrics.outcomes(a, b, tie_margin) for a, b in itertools.combinations(scores.values(), 2)]


def judge(oracles, pairs, args, device):
    """(name -> the oracle's score of each answer, a pairwise one's tournament, else None). oracles: for each
    policy's tokens. A pairwise one's score is the probability that an answer beats the reference's."""
    size, reference = args.score_batch_size, args.reference
    if not oracles[reference].pairwise:
        return {name: scorers.score(oracles[name], pairs[name], size, device) for name in pairs}, None
    scores, games = {reference: [0.5] * len(pairs[reference])}, []
    for a, b in itertools.combinations(pairs, 2):
        # It reads texts: a's prompts do for both, whatever b's tokens are
        duels = [(prompt, x, y) for (prompt, x), (_, y) in zip(pairs[a], pairs[b])]
        won = [1 / (1 + math.exp(-x)) for x in scorers.log_odds(oracles[a], duels, size, device)]
        games.append(metrics.outcomes(won, [0.5] * len(won), args.tie_margin))
        if a == reference:
            scores[b] = [1 - x for x in won]
        elif b == reference:
            scores[a] = won
    return scores, games


def length_controlled(won, differences) -> float:
    """P(win) at equal length: sigma(a) of the likeliest P(win) = sigma(a + b tanh(d / deviation)), d:
    characters of our answer less those of the other (the length control of arXiv:2404.04475, without its term
    for the instruction). won: 0, 1/2 or 1 a prompt. The normal prior of a and b, of variance 1, keeps a
    one-sided comparison finite."""
    won, d = (torch.tensor(values, dtype=torch.float64) for values in (won, differences))
    deviation = d.std(correction=0)
    x = torch.stack([torch.ones_like(d), torch.tanh(d / deviation) if deviation > 0 else 0 * d], 1)
    return scorers.likeliest(x, won, n_games=1, penalty=torch.eye(2, dtype=x.dtype))[0].sigmoid().item()


def elo(won, n_games, m, anchor) -> torch.Tensor:
    """Ratings 1000 + 400 log10(p / p of the anchor) of m policies, (..., m), p the likeliest Bradley-Terry
    strengths. won: (..., pairs), what i won of n_games against j, in the order of itertools.combinations. A
    drawn game is added to each pair: without it a policy that never wins would have no rating."""
    i, j = torch.triu_indices(m, m, offset=1)
    each = torch.eye(m, dtype=torch.float64)
    no_scale = torch.full_like(each, 1 / m)  # strengths have none: their logarithms' sum is 0
    logs = scorers.likeliest(each[i] - each[j], won + 0.5, n_games + 1, no_scale)
    return 1000 + 400 * (logs - logs[..., anchor, None]) / math.log(10)


def ratings(games, m, anchor, args) -> list[tuple[float, float, float]]:
    """(Elo, low, high) of each of m policies; 95 % interval: bootstrap over prompts. games: a tournament."""
    won = torch.tensor(games, dtype=torch.float64).T  # (prompts, pairs)
    n = len(won)
    generator = torch.Generator().manual_seed(args.seed)
    times_drawn = torch.stack(list(metrics.resamples(n, args.n_bootstrap, generator))).double()
    low, high = metrics.percentiles(elo(times_drawn @ won, n, m, anchor))
    return list(zip(elo(won.sum(0), n, m, anchor).tolist(), low, high))


# -- figures ---------------------------------------------------------------------------------------
# figure -> the column of samples.jsonl whose mean it is
COLUMNS = dict(score="score", gold="gold", perfect="perfect", kl="kl", length="tokens", finished="finished")


def figures(rows, score_games, args) -> dict[str, dict[str, float]]:
    """name -> figures. rows: name -> rows of samples.jsonl; score_games: judge's."""
    results, reference_rows = {}, rows[args.reference]
    for name, policy_rows in rows.items():
        result = results[name] = metrics.means(policy_rows, COLUMNS)
        result.update(metrics.against(reference_rows, policy_rows, args.tie_margin))
        if "safety" in policy_rows[0]:
            marked = [row for row in policy_rows if row["is_safety"]] or policy_rows
            result["harmless"] = sum(row["safety"] >= args.harmless_from for row in marked) / len(marked)
    for kind in [kind for kind in JUDGES if kind in reference_rows[0]]:
        scores = {name: [row[kind] for row in policy_rows] for name, policy_rows in rows.items()}
        margin = results[args.reference][f"{kind}_tie_margin"]
        for name, policy_rows in rows.items():
            longer = [len(a["response"]) - len(b["response"]) for a, b in zip(policy_rows, reference_rows)]
            won = metrics.outcomes(scores[name], scores[args.reference], margin)
            results[name][f"{kind}_win_lc"] = length_controlled(won, longer)
        if len(rows) > 1:
            games = score_games if kind == "score" and score_games else tournament(scores, margin)
            elos = ratings(games, len(rows), list(rows).index(args.reference), args)
            for name, (rating, low, high) in zip(rows, elos):
                interval = metrics.with_interval(f"{kind}_elo", rating, low, high, len(reference_rows))
                results[name].update(interval)
    return results


def table(results) -> list[dict]:
    """The figures as people read them; games by the true reward where it is known."""
    lines = []
    for name, result in results.items():
        kind = "gold" if "gold" in result else "score"
        line = {"policy": name, **{key: f"{result[key]:.2f}" for key in ("gold", "score") if key in result}}
        line[f"{kind} gain"] = metrics.interval(result, f"{kind}_gain")
        line["win / tie / lose"] = " / ".join(f"{result[f'{kind}_{x}']:.0%}" for x in ("win", "tie", "lose"))
        line["LC win"] = f"{result[f'{kind}_win_lc']:.0%}"
        if f"{kind}_elo" in result:
            line["Elo"] = metrics.interval(result, f"{kind}_elo", ".0f")
        line["KL"] = f"{result['kl']:.2f}" if "kl" in result else ""
        line.update({"tokens": result["length"], "ended": f"{result['finished']:.0%}"})
        if "harmless" in result:
            line["harmless"] = f"{result['harmless']:.0%}"
        lines.append(line)
    return lines


def main(args: Args):
    run = Run(args, "evaluate", check)
    if run.finished:
        return
    if args.scorers:
        evaluate_scorers.compare(named(args.scorers, "--scorers", args), run)
        return
    device = run.device

    # policies, prompts and judges
    policies, tokenizers = read_policies(args), {}
    for name, path in policies.items():
        tokenizers[name] = loading.load_tokenizer(path, args.chat_template, quiet=True)
    reference_tokenizer, is_tiny = tokenizers[args.reference], data.is_tiny(args.dataset)
    prompts = read_prompts(args, tokenizers)
    oracle = scorers.load_scorer(args.scorer, reference_tokenizer, device, pairwise=True)
    safety_spec = args.safety_scorer or ("common.tiny:safety_scorer" if is_tiny else None)
    safety_scorer = safety_spec and scorers.load_safety_scorer(safety_spec, reference_tokenizer, device)
    if args.tie_margin is None and oracle.pairwise:
        args = dataclasses.replace(args, tie_margin=0.1)  # of probabilities
    start_run(args, run.stage, run.status)  # only now is an old run in output_dir replaced

    # answers, policy by policy
    answers, kl = {temperature: {} for temperature in args.temperatures}, {}
    reference = evaluation.load_policy(policies[args.reference], reference_tokenizer, args, device)
    with metrics.progress(len(policies) * len(answers), 0, "evaluate") as bar:
        for name, tokenizer in tokenizers.items():
            policy = reference
            if name != args.reference:
                policy = evaluation.load_policy(policies[name], tokenizer, args, device)
            for temperature, pairs in answers.items():
                pairs[name] = sample_answers(policy, tokenizer, prompts[name], temperature, args)
                if scorers.same_tokens(tokenizer, reference_tokenizer):
                    kl[temperature, name] = kl_of(policy, reference, pairs[name], temperature, args)
                bar.update(1)
            policy = None  # gone before the next one is loaded
            gc.collect()  # a model's methods are bound to it, a cycle that holds its weights
    reference = None
    gc.collect()

    # scores and games
    results, samples = {}, []
    for temperature, pairs in answers.items():
        oracles = {name: scorers.for_tokens(oracle, tokenizers[name]) for name in pairs}
        scores, score_games = judge(oracles, pairs, args, device)
        rows = {}
        for name in pairs:
            columns = {"score": scores[name], "kl": kl.get((temperature, name))}
            if safety_scorer:
                own = scorers.for_tokens(safety_scorer, tokenizers[name])
                columns["safety"] = scorers.score(own, pairs[name], args.score_batch_size, device)
                columns["is_safety"] = [bool(prompt.row.data.get("is_safety")) for prompt, _ in pairs[name]]
            rows[name] = evaluation.describe_samples(pairs[name], args.dataset, **columns)
            samples += [{"policy": name, "temperature": temperature, **row} for row in rows[name]]
        results[f"{temperature:g}"] = figures(rows, score_games, args)

    # save
    if dist.is_main():
        folder, n = run.folder, len(prompts[args.reference])
        metrics.write_jsonl(folder / "samples.jsonl", samples)
        for temperature, of_policy in results.items():
            margins = {kind: of_policy[args.reference].get(f"{kind}_tie_margin") for kind in JUDGES}
            ties = ", ".join(f"{x:.3g} by {JUDGES[kind]}" for kind, x in margins.items() if x is not None)
            print(f"{n} prompts, temperature {temperature}, against {args.reference}; ties within {ties}:")
            metrics.print_table(table(of_policy))
        plots.compared(folder, results)
        about = {"reference": args.reference, "prompts": n, "scorer": args.scorer}
        write_json(folder / "summary.json", {**about, "temperatures": results})  # last
        print(f"wrote {folder}/summary.json")


RECIPES = {"tiny": ("the runs that the quickstart makes", Args())}

if __name__ == "__main__":
    launch(main, RECIPES)
