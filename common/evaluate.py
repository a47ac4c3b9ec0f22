"""Compare finished runs: every policy answers the same held-out prompts, an oracle judges the answers.

    gain      mean over prompts of s(y') - s(y), y' the policy's and y the reference's answer; 95 % interval
    win       share of prompts with s(y') - s(y) > tie margin; lose: < -tie margin; tie: the rest
    LC win    P(win) at equal length, a tie half a win: sigma(a) of P(win) = sigma(a + b tanh(d / deviation)),
              d: characters of y' less those of y (the length control of arXiv:2404.04475, without its term
              for the instruction; a and b have a normal prior of variance 1)
    Elo       1000 + 400 log10(p / p of the reference), p the Bradley-Terry strengths that make the games of
              all policies against each other, and a drawn one for each pair, likeliest; 95 % interval:
              bootstrap over prompts
    KL        mean of log pi(y') - log pi_ref(y'), nats, pi at the temperature that y' was sampled at, pi_ref
              at 1; none for a policy with other tokens
    harmless  share of the answers to prompts marked `is_safety` (if none is: to all) whose safety score is
              harmless_from or more

    python -m common.evaluate                                         the runs that the quickstart makes
    python -m common.evaluate --policies sft=runs/sft runs/ppo --scorer runs/reward
    python -m common.evaluate --policies runs/sft runs/ppo --dataset old.jsonl    what ppo.py forgot
    torchrun --nproc-per-node 8 -m common.evaluate --policies ...

Reads language models (runs, folders, hub names) and an oracle: a reward model, an advantage model,
module:function, or a pairwise preference model, which reads every two answers in both orders. Writes
samples.jsonl (every answer), summary.json (figures by the oracle and, on the tiny world, by the true reward,
by which the printed table goes then), elo.png and frontier.png. With --scorers in place of --policies it
compares scorers on labelled pairs (common/evaluate_scorers.py).
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
from common.metrics import write_json
from common.run import find_run, launch, start_run

QUICKSTART = {  # name -> its run directory
    "untrained": "tiny",
    "sft": "runs/sft",
    "rejection_sampling": "runs/rejection_sampling",
    "ppo": "runs/ppo",
    "ppo_am_sr": "runs/ppo_am_sr",
    "dpo_offline": "runs/dpo_offline",
    "dpo_iterative": "runs/dpo_iterative",
}


@dataclass
class Args:
    # what is compared: policies, or in their place scorers
    policies: tuple[str, ...] = ()
    """Run directories, folders or hub names, each perhaps as name=path. None: those of the quickstart's runs
    that are there."""
    scorers: tuple[str, ...] = ()
    """Whatever --scorer takes, each perhaps as name=path: how well they predict the labels of pairs. What
    answers are sampled or judged with counts for policies alone."""
    dataset: str = "tiny"
    """Prompts, or with --scorers pairs and rankings: tiny, a hub name, a local file or a mixture; all rows of
    a file, so give one that nobody learnt from."""
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
    """The oracle: a run of reward.py, its pairwise kind too, or advantage_model.py, a hub reward model, or
    module:function. One that policies were trained on shows what they made of it, not what they gained."""
    safety_scorer: str | None = None
    """Says how harmless an answer is; no pairwise one. None: the true safety on the tiny world, elsewhere no
    harmless rate."""
    harmless_from: float = 0.0
    """The least safety score of a harmless answer; of reward.py's safety models the score is the logit of
    P(safe)."""
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
    finished = {}
    for name, path in QUICKSTART.items():
        if path == "tiny" or Path(path, "summary.json").exists():
            finished[name] = path
        elif not args.policies and dist.is_main():
            print(f"{name} is left out: no finished run in {path}")
    specs = args.policies or [f"{name}={path}" for name, path in finished.items()]
    paths = named(specs, "--policies", args)
    if args.reference not in paths:
        raise InputError(f"--reference {args.reference}: no such policy; there are {', '.join(paths)}")
    for path in paths.values():
        loading.check_causal_lm(path)
        generate.check_sampled(path)
    return paths


def read_prompts(args, tokenizers) -> dict[str, list[generate.Prompt]]:
    """name -> the same prompts in each policy's tokens: a part of those that all of them can read."""
    room, of_policy, loaded = args.max_length - args.max_new_tokens, {}, []
    for name, tokenizer in tokenizers.items():
        same = [prompts for other, prompts in loaded if scorers.same_tokens(other, tokenizer)]
        if not same:
            same = [generate.load_prompts(args.dataset, args.split, tokenizer, room)]
            loaded.append((tokenizer, same[0]))
        of_policy[name] = same[0]
    readable = set.intersection(*({prompt.key for prompt in prompts} for _, prompts in loaded))
    if len(readable) < 2:
        raise InputError(f"{args.dataset}: fewer than 2 prompts that all policies can read (--max-length)")
    data.check_same(args.dataset, dist.seed_of(*sorted(readable)))
    order = [prompt.key for prompt in loaded[0][1] if prompt.key in readable]
    for name, prompts in of_policy.items():
        of_key = {prompt.key: prompt for prompt in prompts}
        of_policy[name] = a_part([of_key[key] for key in order], args.eval_prompts)
    return of_policy


# -- answers ---------------------------------------------------------------------------------------
def sample_answers(policy, tokenizer, prompts, temperature, args):
    """[(prompt, response)], one response to each prompt."""
    return generate.sample_pairs(
        policy, tokenizer, prompts, max_new_tokens=args.max_new_tokens, temperature=temperature,
        slots=args.slots, seed=dist.seed_of(args.seed, "evaluate", temperature),
    )  # fmt: skip


def kl_of(policy, reference, pairs, temperature, args) -> list[float]:
    """log pi(y) - log pi_ref(y) of each answer, nats. At temperature 0 all of pi's mass is on y."""
    documents, size = generate.documents(pairs), args.score_batch_size
    logprobs = (
        models.seq_logprobs(policy, documents, size, temperature) if temperature else [0.0] * len(pairs)
    )
    return [a - b for a, b in zip(logprobs, models.seq_logprobs(reference, documents, size))]


def rows_of(pairs, scores, kl, safety, is_tiny) -> list[dict]:
    """A policy's answers as rows of samples.jsonl. kl, safety: a number an answer, or None."""
    rows = []
    for i, (prompt, response) in enumerate(pairs):
        columns = {"category": prompt.category, "score": scores[i]}
        if kl:
            columns["kl"] = kl[i]
        if safety:
            columns.update(safety=safety[i], is_safety=bool(prompt.row.data.get("is_safety")))
        rows.append(evaluation.describe_sample(prompt.turns, response, is_tiny, **columns))
    return rows


# -- games -----------------------------------------------------------------------------------------
def tournament(scores, tie_margin) -> dict[tuple[int, int], list[float]]:
    """{(i, j): what i won of each prompt's game against j}, i < j. scores: name -> score of each answer."""
    players = itertools.combinations(enumerate(scores.values()), 2)
    return {(i, j): metrics.outcomes(first, second, tie_margin) for (i, first), (j, second) in players}


def judge(oracles, pairs, reference, args, device):
    """(name -> the oracle's score of each answer, the tournament). oracles: for each policy's tokens. A
    pairwise one's score is the probability that an answer beats the reference's."""
    size = args.score_batch_size
    if not oracles[reference].pairwise:
        scores = {name: scorers.score(oracles[name], pairs[name], size, device) for name in pairs}
        return scores, tournament(scores, metrics.margin_of_ties(args.tie_margin, scores[reference]))
    scores, games = {reference: [0.5] * len(pairs[reference])}, {}
    for (i, a), (j, b) in itertools.combinations(enumerate(pairs), 2):
        # It reads texts: a's prompts do for both, whatever b's tokens are
        duels = [(prompt, x, y) for (prompt, x), (_, y) in zip(pairs[a], pairs[b])]
        won = [1 / (1 + math.exp(-x)) for x in scorers.log_odds(oracles[a], duels, size, device)]
        games[i, j] = metrics.outcomes(won, [0.5] * len(won), args.tie_margin)
        if a == reference:
            scores[b] = [1 - x for x in won]
        elif b == reference:
            scores[a] = won
    return scores, games


def length_controlled(won, differences) -> float:
    """P(win) at equal length. won: 0, 1/2 or 1 a prompt; differences: how much longer our answer is. Newton's
    method on the log likelihood less |weights|^2 / 2, which keeps a one-sided comparison finite."""
    won = torch.tensor(won, dtype=torch.float64)
    x = torch.tensor(differences, dtype=torch.float64)
    deviation = x.std(correction=0)
    x = torch.stack([torch.ones_like(x), torch.tanh(x / deviation) if deviation > 0 else 0 * x], 1)  # (n, 2)
    weights = x.new_zeros(2)
    for _ in range(50):
        p = (x @ weights).sigmoid()
        curvature = (x * (p * (1 - p))[:, None]).T @ x + torch.eye(2, dtype=x.dtype)
        weights = weights + torch.linalg.solve(curvature, x.T @ (won - p) - weights)
    return weights[0].sigmoid().item()


def elo(won, anchor: int) -> torch.Tensor:
    """won: (..., m, m), [i, j] what i won of its games against j. Returns (..., m), 1000 for the anchor.
    A drawn game is added to each pair: without it a policy that never wins would have no rating. Newton's
    method for the log strengths theta with  sum_j games_ij sigma(theta_i - theta_j) = games that i won."""
    m = won.shape[-1]
    won = won.double() + 0.5 * (1 - torch.eye(m, dtype=torch.float64))
    played = won + won.transpose(-1, -2)
    theta = won.new_zeros(won.shape[:-1])
    for _ in range(1000):
        p = (theta[..., :, None] - theta[..., None, :]).sigmoid()
        spread = played * p * (1 - p)
        curvature = torch.diag_embed(spread.sum(-1)) - spread + 1 / m  # 1 / m: strengths have no scale
        step = torch.linalg.solve(curvature, (won - played * p).sum(-1)).clamp(-1, 1)
        theta = theta + step
        if step.abs().max() < 1e-10:
            break
    return 1000 + 400 * (theta - theta[..., anchor, None]) / math.log(10)


def ratings(games, m, anchor, args) -> list[tuple[float, float, float]]:
    """(Elo, low, high) of each of m policies. games: a tournament's."""
    n = len(next(iter(games.values())))
    won = torch.zeros(n, m, m, dtype=torch.float64)
    for (i, j), results in games.items():
        won[:, i, j] = torch.tensor(results, dtype=torch.float64)
        won[:, j, i] = 1 - won[:, i, j]
    generator = torch.Generator().manual_seed(args.seed)
    draws = torch.randint(n, (args.n_bootstrap, n), generator=generator)
    times = torch.stack([torch.bincount(draw, minlength=n) for draw in draws]).double()  # a prompt was drawn
    resampled = elo((times @ won.view(n, -1)).view(-1, m, m), anchor)
    interval = resampled.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), 0)
    return list(zip(elo(won.sum(0), anchor).tolist(), *interval.tolist()))


# -- figures ---------------------------------------------------------------------------------------
# figure -> the column of samples.jsonl whose mean it is
COLUMNS = dict(score="score", gold="gold", perfect="perfect", kl="kl", length="tokens", finished="finished")


def figures(rows, games, args) -> dict[str, dict[str, float]]:
    """name -> figures. rows: name -> rows of samples.jsonl; games: {"score": a tournament, "gold": ...}."""
    names, results, reference_rows = list(rows), {}, rows[args.reference]
    for name, policy_rows in rows.items():
        result = metrics.means(policy_rows, COLUMNS)
        result.update(metrics.against(reference_rows, policy_rows, args.tie_margin))
        longer = [len(a["response"]) - len(b["response"]) for a, b in zip(policy_rows, reference_rows)]
        for kind in games:
            scores, reference_scores = ([row[kind] for row in side] for side in (policy_rows, reference_rows))
            won = metrics.outcomes(scores, reference_scores, result[f"{kind}_tie_margin"])
            result[f"{kind}_win_lc"] = length_controlled(won, longer)
        if "safety" in policy_rows[0]:
            marked = [row for row in policy_rows if row["is_safety"]] or policy_rows
            result["harmless"] = sum(row["safety"] >= args.harmless_from for row in marked) / len(marked)
        results[name] = result
    for kind, games_of_kind in games.items() if len(names) > 1 else ():
        elos = ratings(games_of_kind, len(names), names.index(args.reference), args)
        for name, (rating, low, high) in zip(names, elos):
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
    device = dist.setup()
    check(args)
    state = find_run(args)
    if state == "finished":
        return
    if args.scorers:
        evaluate_scorers.compare(named(args.scorers, "--scorers", args), args, device, state)
        return

    # policies, prompts and judges
    policies = read_policies(args)
    tokenizers = {
        name: loading.load_tokenizer(path, args.chat_template, quiet=True) for name, path in policies.items()
    }
    reference_tokenizer, is_tiny = tokenizers[args.reference], data.is_tiny(args.dataset)
    prompts = read_prompts(args, tokenizers)
    oracle = scorers.load_scorer(args.scorer, reference_tokenizer, device, pairwise=True)
    safety_spec = args.safety_scorer or ("common.tiny:safety_scorer" if is_tiny else None)
    safety_scorer = safety_spec and scorers.load_safety_scorer(safety_spec, reference_tokenizer, device)
    if args.tie_margin is None and oracle.pairwise:
        args = dataclasses.replace(args, tie_margin=0.1)  # of probabilities
    start_run(args, "evaluate", state)  # only now is an old run in output_dir replaced

    # answers, policy by policy
    answers, kl = {temperature: {} for temperature in args.temperatures}, {}
    reference = evaluation.load_policy(policies[args.reference], reference_tokenizer, args, device)
    bar = metrics.progress(len(policies) * len(answers), 0, "evaluate")
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
    bar.close()

    # scores and games
    results, samples = {}, []
    for temperature, pairs in answers.items():
        oracles = {name: scorers.for_tokens(oracle, tokenizers[name]) for name in pairs}
        scores, score_games = judge(oracles, pairs, args.reference, args, device)
        rows, games = {}, {"score": score_games}
        for name in pairs:
            safety = None
            if safety_scorer:
                own = scorers.for_tokens(safety_scorer, tokenizers[name])
                safety = scorers.safety_logits(own, pairs[name], args.score_batch_size, device)
            rows[name] = rows_of(pairs[name], scores[name], kl.get((temperature, name)), safety, is_tiny)
            samples += [{"policy": name, "temperature": temperature, **row} for row in rows[name]]
        if is_tiny:
            gold = {name: [row["gold"] for row in policy_rows] for name, policy_rows in rows.items()}
            games["gold"] = tournament(gold, metrics.margin_of_ties(args.tie_margin, gold[args.reference]))
        results[f"{temperature:g}"] = figures(rows, games, args)

    # save
    if dist.is_main():
        folder, n = Path(args.output_dir), len(prompts[args.reference])
        metrics.write_jsonl(folder / "samples.jsonl", samples)
        for temperature, of_policy in results.items():
            reference_result = of_policy[args.reference]
            margins = {
                judge: reference_result.get(f"{kind}_tie_margin") for kind, judge in metrics.JUDGES.items()
            }
            ties = ", ".join(f"{x:.3g} by {judge}" for judge, x in margins.items() if x is not None)
            print(f"{n} prompts, temperature {temperature}, against {args.reference}; ties within {ties}:")
            metrics.print_table(table(of_policy))
        plots.compared(folder, results)
        about = {"reference": args.reference, "prompts": n, "scorer": args.scorer}
        write_json(folder / "summary.json", {**about, "temperatures": results})  # last
        print(f"wrote {folder}/summary.json")


RECIPES = {"tiny": ("the runs that the quickstart makes", Args())}

if __name__ == "__main__":
    launch(main, RECIPES)
