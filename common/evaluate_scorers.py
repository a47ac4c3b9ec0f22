"""Compare scorers: how well each one's scores predict the labels of the same pairs, whoever trained it. The
second mode of common/evaluate.py:

    python -m common.evaluate --scorers rm=runs/reward am=runs/advantage_model --output-dir runs/scorers
    python -m common.evaluate --scorers runs/reward hub=org/reward-model --dataset reward_bench.parquet

Writes samples.jsonl (every scorer's scores), summary.json (metrics.pair_figures of all pairs, of each data
set and of each category) and scores.png, and prints all figures of all pairs and the accuracy of each part.
A pairwise preference model's score difference is its log-odds.
"""

import gc
import re

from common import comparisons, data, dist, evaluation, generate, loading, metrics, plots, scorers
from common.batches import labelled_pairs
from common.errors import InputError
from common.run import start_run, write_json


def load_pairs(paths, args):
    """(comparisons with a better response, the tokenizer in whose tokens they are): that of the first scorer
    that is a model. The other ones encode the texts anew."""
    with_tokens = [path for path in paths.values() if not re.match(scorers.NAMED, path)] or ["tiny"]
    tokenizer = loading.load_tokenizer(with_tokens[0], args.chat_template, quiet=True)
    held_out = comparisons.load(args.dataset, args.split, tokenizer, args.max_length)
    held_out = [c for c in held_out if labelled_pairs(c)]
    if not held_out:
        raise InputError(f"--dataset {args.dataset}: no response is labelled as better than another")
    data.check_same(args.dataset, comparisons.fingerprint(held_out))
    return held_out, tokenizer


def score_rows(scorer, held_out, args, device) -> list[dict]:
    """The comparisons as rows of samples.jsonl (evaluation.scored_rows)."""
    pairs, duels = [], []
    for c in held_out:
        prompt = generate.Prompt(c.prompt_ids.tolist(), c.prompt, c.row)
        texts = zip(c.response_ids, c.texts)
        responses = [generate.Response(ids.tolist(), text, True) for ids, text in texts]
        pairs += [(prompt, response) for response in responses]
        duels += [(prompt, responses[i], responses[j]) for i, j in labelled_pairs(c)]
    ask, texts = (scorers.log_odds, duels) if scorer.pairwise else (scorers.score, pairs)
    values = ask(scorer, texts, args.score_batch_size, device)
    return evaluation.scored_rows(held_out, values, scorer.pairwise)


def figures_of(rows) -> dict[str, float]:
    """metrics.pair_figures of all these rows, with the interval of the accuracy: of so many independent pairs
    as tell as much, for a ranking's pairs hang together."""
    figures = metrics.pair_figures(rows)
    figures = {key.removeprefix("eval/"): x for key, x in figures.items() if key.count("/") == 1}
    sizes = [len(metrics.pairs_of([row])) for row in rows]
    n = sum(sizes) ** 2 / sum(size**2 for size in sizes)
    low, high = metrics.wilson(figures["accuracy"], n)
    return {**figures, **metrics.with_interval("accuracy", figures["accuracy"], low, high, round(n))}


def print_tables(figures):
    """Of all pairs every figure, a line a scorer; of their parts the accuracy, a column a scorer. figures:
    scorer -> part -> figures."""
    of_all, of_parts = [], {}
    for name, of_scorer in figures.items():
        every = of_scorer["all"]
        line = {"scorer": name, "pairs": f"{every['pairs']:.0f}"}
        line["accuracy"] = metrics.interval(every, "accuracy", ".1%")
        line["ECE"] = metrics.interval(every, "ece", ".3f")
        for title, key in (("its floor", "ece_floor"), ("NLL", "nll"), ("Brier", "brier")):
            line[title] = f"{every[key]:.3f}"
        of_all.append(line)
        for part, figures_of_part in of_scorer.items():
            row = of_parts.setdefault(part, {"accuracy": part, "pairs": f"{figures_of_part['pairs']:.0f}"})
            row[name] = metrics.interval(figures_of_part, "accuracy", ".1%")
    metrics.print_table(of_all)
    metrics.print_table(list(of_parts.values())[1:])  # all pairs come first


def compare(paths, run):
    """paths: name -> what scorers.load_scorer takes."""
    args, device, rows = run.args, run.device, {}
    held_out, tokenizer = load_pairs(paths, args)
    for name, path in paths.items():
        scorer = scorers.load_scorer(path, tokenizer, device, pairwise=True, max_length=args.max_length)
        rows[name] = score_rows(scorer, held_out, args, device)
        del scorer
        gc.collect()  # one at a time: a model's methods are bound to it, a cycle that holds its weights
    start_run(args, run.stage, run.status)  # only now is an old run in output_dir replaced
    if dist.is_main():
        folder, figures = run.folder, {}
        for name, of_scorer in rows.items():
            figures[name] = {"all": figures_of(of_scorer)}
            for (kind, part), inside in metrics.parts_of(of_scorer).items():
                title = "data set" if kind == "source" else kind
                figures[name][f"{title} {part}"] = figures_of(inside)
        samples = [{"scorer": name, **row} for name, of_scorer in rows.items() for row in of_scorer]
        metrics.write_jsonl(folder / "samples.jsonl", samples)
        print_tables(figures)
        plots.scores(folder, rows)
        write_json(folder / "summary.json", {"dataset": args.dataset, "scorers": figures})  # last
        print(f"wrote {folder}/summary.json")
