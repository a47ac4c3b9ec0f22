"""For docs/results/real_model.sh: tasks that a model of 135M parameters can learn and a function can check.

python tests/benchmarks/real_task.py data TASKS SEED FOLDER
python tests/benchmarks/real_task.py label POLICY PROMPTS FLIPPED SEED FILE
python tests/benchmarks/real_task.py compare POLICY FOLDER SEED COUNTS
python tests/benchmarks/real_task.py likely FOLDER NAMES...
python tests/benchmarks/real_task.py table FOLDER SEEDS

and the check, as --scorer tests/benchmarks/real_task.py:correct"""

import itertools
import math
import random
import re
import statistics
import sys
from pathlib import Path

import torch
from experiments import markdown, publish

from common.batches import split
from common.responses import sample_responses
from common.data import files, progress
from common.data.prompt_sets import load_prompts
from common.loading import pretrained
from common.scoring import measures

# rows of data's files; no prompt is in two of them
SIZES = {"sft": 160, "pairs": 600, "renewed": 200, "prompts": 400, "test": 250}
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # the model's own without the system turn, which is half of a short prompt
WORDS = """apple bread chair dance eagle flute grape house island jacket kettle lemon mouse night ocean paper
queen river stone table uncle valley wagon yellow zebra basket candle doctor engine forest garden hammer""".split()
NAMES = """Anna Ben Clara David Emma Frank Grace Henry Irene Jack Kate Leo Maria Nick Olga Paul Rose
Sam""".split()
THINGS = "apples books coins dogs eggs flowers goats hats keys lamps maps nuts pens rings shoes toys".split()


# -- the tasks: a prompt and its one correct answer --------------------------------------------------
def add(rng):
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    return f"What is {a} + {b}?", str(a + b)


def subtract(rng):
    low, high = sorted((rng.randint(10, 99), rng.randint(10, 99)))
    return f"What is {high} - {low}?", str(high - low)


def sort(rng):
    words = rng.sample(WORDS, 4)
    return f"Sort by the alphabet: {' '.join(words)}", " ".join(sorted(words))


def upper(rng):
    words = rng.sample(WORDS, 3)
    return f"Write in capital letters: {' '.join(words)}", " ".join(words).upper()


def extract(rng):
    names, counts, things = rng.sample(NAMES, 3), rng.sample(range(2, 10), 3), rng.sample(THINGS, 3)
    facts = ", ".join(f"{who} has {n} {what}" for who, n, what in zip(names, counts, things))
    i = rng.randrange(3)
    return f"{facts}. How many {things[i]} does {names[i]} have?", str(counts[i])


def backwards(rng):
    words = rng.sample(WORDS, 5)
    return f"Write in reverse order: {' '.join(words)}", " ".join(words[::-1])


TASKS = {task.__name__: task for task in (add, subtract, sort, backwards, upper, extract)}


def rows(tasks: str, n: int, seed) -> list[dict]:
    """n rows of different prompts of these tasks ("add+sort"), in turn; a category is a task."""
    rng, names, of_prompt = random.Random(f"{tasks}/{seed}"), tasks.split("+"), {}
    while len(of_prompt) < n:
        name = names[len(of_prompt) % len(names)]
        prompt, answer = TASKS[name](rng)
        of_prompt[prompt] = {"prompt": prompt, "completion": answer, "category": name}
    return list(of_prompt.values())


def correct(prompts, responses, rows):
    """Return the true reward: 1 for exactly the correct answer, otherwise 0."""
    return [float(text.strip() == row["completion"]) for text, row in zip(responses, rows)]


# -- commands --------------------------------------------------------------------------------------
def data(tasks, seed, folder):
    made, begin = rows(tasks, sum(SIZES.values()), seed), 0
    for name, n in SIZES.items():
        files.write_jsonl(f"{folder}/{name}.jsonl", made[begin : begin + n])
        begin += n
    Path(folder, "chat.jinja").write_text(TEMPLATE)


def labelled(answers, flipped, rng) -> list[dict]:
    """Pair a correct with a wrong answer to each prompt that has both, the last of each, from [(question, text,
    whether it is correct)]. A label is wrong with probability `flipped`."""
    of_prompt, pairs = {}, []
    for question, text, right in answers:
        of_prompt.setdefault(question, {})[right] = text
    for question, by_truth in of_prompt.items():
        if len(by_truth) == 2:
            chosen = rng.random() >= flipped
            pairs.append({"prompt": question, "chosen": by_truth[chosen], "rejected": by_truth[not chosen]})
    return pairs


def answered(policy, prompts, n, seed) -> tuple[list, list[str], list[float]]:
    """Sample a policy's answers, n to each prompt of a file: the prompts, the texts and whether they are right."""
    tokenizer = pretrained.load_tokenizer(policy)
    prompts = load_prompts(prompts, "train", tokenizer, max_tokens=56)
    model = pretrained.load_policy(policy, tokenizer).eval()
    sampled = sample_responses(model, tokenizer, prompts, n=n, seed=int(seed), max_new_tokens=13, slots=64)
    texts = [answer.text.strip() for _, answer in sampled]
    return prompts, texts, correct([], texts, [prompt.row.data for prompt, _ in sampled])


def label(policy, prompts, flipped, seed, file):
    """Pairs of a policy's answers, four to each prompt; how many of them are right."""
    prompts, texts, right = answered(policy, prompts, 4, seed)
    of_answers = (prompt for prompt in prompts for _ in range(4))
    answers = [(prompt.question, text, r > 0) for prompt, text, r in zip(of_answers, texts, right) if text]
    pairs = labelled(answers, float(flipped), random.Random(f"{seed}/{Path(file).stem}"))
    task_of = {prompt.question: prompt.category for prompt in prompts}
    for pair in pairs:
        pair["category"] = task_of[pair["prompt"]]
    files.write_jsonl(file, pairs)
    lines = []
    for task in dict.fromkeys(task_of.values()):
        rights = [of_4 for prompt, of_4 in zip(prompts, split(right, 4)) if prompt.category == task]
        right_ones, best = (statistics.fmean(map(f, rights)) for f in (statistics.fmean, max))
        lines.append({"task": task, "right": f"{right_ones:.1%}", "best of 4": f"{best:.1%}"})
    progress.print_table(lines)
    print(f"{len(pairs)} pairs")


def ranked_answers(answers, most=math.inf) -> list[dict]:
    """Rank the right answer to a prompt above its different wrong ones, from [(question, text, whether it is right,
    category)]. Prompts without both kinds have none. Ends when there are `most` pairs of a right and a wrong answer."""
    of_prompt, rankings, pairs = {}, [], 0
    for question, text, right, category in answers:
        of_prompt.setdefault((question, category), {})[text] = float(right)
    for (question, category), scores in of_prompt.items():
        best = [{"text": text, "score": 1.0} for text, right in scores.items() if right]  # one, or none
        wrong = [{"text": text, "score": 0.0} for text, right in scores.items() if not right]
        if best and wrong and pairs < most:
            wrong = wrong[: min(len(wrong), most - pairs)]
            rankings.append({"prompt": question, "responses": best + wrong, "category": category})
            pairs += len(wrong)
    return rankings


def compare(policy, folder, seed, counts):
    """Write FOLDER/labels_N.jsonl for each N of counts ("100 400"), N pairs of a right and a wrong answer of a policy
    to the prompts for labels, each larger file with the rows of the smaller ones; and labels_test.jsonl."""
    for_labels = f"{folder}/pairs.jsonl,{folder}/renewed.jsonl", 8, counts.split()
    for asked, n, names in (for_labels, (f"{folder}/test.jsonl", 4, ["test"])):
        prompts, texts, right = answered(policy, asked, n, seed)
        of_answers = (prompt for prompt in prompts for _ in range(n))
        answers = [(p.question, text, r, p.category) for p, text, r in zip(of_answers, texts, right) if text]
        for name in names:
            rankings = ranked_answers(answers, math.inf if name == "test" else int(name))
            pairs = sum(len(row["responses"]) - 1 for row in rankings)
            print(f"labels_{name}: {pairs} pairs of {len(rankings)} prompts, {statistics.fmean(right):.1%} right")
            files.write_jsonl(f"{folder}/labels_{name}.jsonl", rankings)


def likely(folder, *names):
    """Write FOLDER/likely.jsonl: the policies' probabilities of the correct answers to held-out prompts, and of the
    end after them."""
    found, tokenizer = [], pretrained.load_tokenizer(f"{folder}/sft")
    for name in names:
        model = pretrained.load_policy(f"{folder}/{name}", tokenizer).eval()
        for row in files.read_jsonl(f"{folder}/test.jsonl"):
            messages = [{"role": "user", "content": row["prompt"]}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            answer = tokenizer(row["completion"], add_special_tokens=False).input_ids
            input_ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
            is_answer = torch.arange(1, input_ids.shape[1])[None] >= len(prompt)
            with torch.no_grad():
                logprobs = model.token_logprobs(input_ids, is_answer)[is_answer]
            *words, end = logprobs.exp().tolist()
            found.append({"policy": name, "category": row["category"], "words": math.prod(words), "end": end})
    files.write_jsonl(f"{folder}/likely.jsonl", found)


# -- tables: lines of markdown, from what all seeds wrote -------------------------------------------
def right(path, truth) -> list[dict]:
    """Read the rows of answers in this file, and mark whether each is correct, and its task. truth: file of prompts."""
    of_prompt = {row["prompt"]: row for row in files.read_jsonl(truth)}
    rows = files.read_jsonl(path)
    for row in rows:
        asked = of_prompt[row["prompt"][-1]["content"]]
        row["category"], [row["right"]] = asked["category"], correct([], [row["response"]], [asked])
    return rows


def gains(folders) -> list[str]:
    """Differences to SFT on the same held-out prompts, in correct answers and in the reward model's score (proxy)."""
    rows, parts = {}, dict.fromkeys(["all", *folders])
    for folder in folders:
        for row in right(folder / "answers" / "samples.jsonl", folder / "test.jsonl"):
            for part in ("all", folder, row["category"]):
                rows.setdefault((row["policy"], part), []).append(row)
                parts[part] = len(rows["sft", part])
    named = {part: f"seed {part.name}" if isinstance(part, Path) else part for part in parts}
    titles = [
        "",
        "right",
        *(f"{named[part]} ({n})" for part, n in parts.items()),
        "proxy, all",
        "KL",
        "ended",
    ]
    lines = []
    for policy in [policy for policy, part in rows if part == "all"]:
        mean = lambda key: statistics.fmean(row[key] for row in rows[policy, "all"])
        gained = [""] * (len(parts) + 1)
        if policy != "sft":
            of = lambda part, key: measures.gains(rows["sft", part], rows[policy, part], {"gain": key})
            figures = [*(of(part, "right") for part in parts), of("all", "score")]
            gained = [measures.interval(of_part, "gain") for of_part in figures]
        means = [f"{mean('kl'):.1f}", f"{mean('finished'):.0%}"]
        lines.append([f"`{policy}`", f"{mean('right'):.0%}", *gained, *means])
    return markdown(titles, lines)


def ranked(folders) -> list[str]:
    """Measure how often a scorer prefers the correct one of two answers of SFT to a held-out prompt."""
    rows = {}
    for folder in folders:
        for row in files.read_jsonl(folder / "scorers" / "samples.jsonl"):
            for part in ("all", row["category"]):
                rows.setdefault((row["scorer"], part), []).append(row)
    names, parts = ([*dict.fromkeys(of)] for of in zip(*rows))
    lines = []
    for name in names:
        figures = [measures.pair_metrics(rows[name, part]) for part in parts]
        cells = [f"{measures.interval(of, 'accuracy', '.0%')} of {of['pairs']:.0f}" for of in figures]
        lines.append([f"`{name}`", *cells])
    return markdown(["", *parts], lines)


def rounds(folders) -> list[str]:
    """Iterative DPO's answers, round by round: the reward model's scores, and the share of correct ones."""
    by_task = {}
    for folder in folders:
        for row in right(folder / "iterative" / "pool.jsonl", folder / "prompts.jsonl"):
            of_prompt = by_task.setdefault(row["category"], {}).setdefault(row["iteration"], {})
            of_prompt.setdefault((folder, row["prompt"][-1]["content"]), []).append(row)
    lines = []
    for task, by_round in by_task.items():
        for number, of_prompt in by_round.items():
            rows = [row for answers in of_prompt.values() for row in answers]
            differences, best = [], []
            for answers in of_prompt.values():
                best.append(max(answers, key=lambda row: row["score"])["right"])
                pairs = itertools.product(answers, answers)
                differences += [a["score"] - b["score"] for a, b in pairs if a["right"] > b["right"]]
            cells = [f"round {number - 1}" if number > 1 else "SFT", task]
            cells += [f"{statistics.fmean(row['score'] for row in rows):.2f}"]
            cells += [f"{statistics.fmean(row['right'] for row in rows):.0%}"]
            lines.append([*cells, f"{measures.accuracy(differences):.0%}", f"{statistics.fmean(best):.0%}"])
    titles = ["answers of", "task", "score", "right", "right before wrong", "the best-scored of 8 right"]
    return markdown(titles, lines)


def samples(folders) -> list[str]:
    """The first prompts of the first seed to which some answers are correct and others not; correct ones are bold."""
    by_policy, folder = {}, folders[0]
    for row in right(folder / "answers" / "samples.jsonl", folder / "test.jsonl"):
        by_policy.setdefault(row["policy"], []).append(row)
    lines = []
    for same in zip(*by_policy.values()):
        if len({row["right"] for row in same}) > 1 and len(lines) < 8:
            texts = [" ".join(row["response"].split()).replace("|", "\\|") for row in same]
            cells = [f"**{text}**" if row["right"] else text for row, text in zip(same, texts)]
            lines.append([same[0]["prompt"][-1]["content"], *cells])
    return markdown(["prompt", *(f"`{name}`" for name in by_policy)], lines)


def likelihood(folders) -> list[str]:
    """Mean probabilities of the right words, and of the end after them."""
    found = {}
    for folder in folders:
        for row in files.read_jsonl(folder / "likely.jsonl"):
            of_task = found.setdefault((folder.name, row["policy"]), {})
            of_task.setdefault(row["category"], []).append((row["words"], row["end"]))
    lines = []
    for (seed, policy), of_task in found.items():
        means = [statistics.fmean(column) for rows in of_task.values() for column in zip(*rows)]
        lines.append([seed, f"`{policy}`", *(f"{mean:.2f}" for mean in means)])
    titles = [f"{task}: {what}" for task in of_task for what in ("right words", "end after them")]
    return markdown(["seed", "", *titles], lines)


def times(folders) -> list[str]:
    """Seconds of each step, by seed."""
    of_step = {}
    for line in (folders[0].parent / "times.txt").read_text().splitlines():
        seed, step, seconds = re.match(r"seed (\d+), (\w+): (\d+) s", line).groups()
        of_step.setdefault(step, {})[seed] = int(seconds)
    seeds = [folder.name for folder in folders]
    of_step["all"] = {seed: sum(of.get(seed, 0) for of in of_step.values()) for seed in seeds}
    lines = [[f"`{step}`", *(str(of.get(seed, "")) for seed in seeds)] for step, of in of_step.items()]
    return markdown(["", *(f"seed {seed}" for seed in seeds)], lines)


TABLES = {  # what makes them, and the last file of each seed that it reads
    gains: "answers/samples.jsonl",
    ranked: "scorers/samples.jsonl",
    rounds: "iterative/pool.jsonl",
    samples: "answers/samples.jsonl",
    likelihood: "likely.jsonl",
    times: "test.jsonl",
}


def table(folder, seeds):
    """Print the tables whose steps have run; docs/results/real_model.md gets those of seeds that it has a place for."""
    folders = [Path(folder, seed) for seed in seeds.split()]
    for make, file in TABLES.items():
        if all((folder / file).exists() for folder in folders):
            lines = make(folders)
            print("\n".join([*lines, ""]))
            publish("_".join(("real_model", make.__name__, *seeds.split())), lines)


if __name__ == "__main__":
    {"data": data, "label": label, "compare": compare, "likely": likely, "table": table}[sys.argv[1]](*sys.argv[2:])
