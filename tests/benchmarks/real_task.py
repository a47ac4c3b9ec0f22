"""For docs/real_model.sh: tasks that a model of 135M parameters can learn and a function can check.

python tests/benchmarks/real_task.py data TASKS SEED FOLDER
python tests/benchmarks/real_task.py label POLICY PROMPTS FLIPPED SEED FILE
python tests/benchmarks/real_task.py table FOLDER SEEDS

and the check, as --scorer tests/benchmarks/real_task.py:correct"""

import random
import statistics
import sys
from pathlib import Path

import peers  # noqa: F401, it lets common be found

from common import loading, metrics
from common.batches import split
from common.generate import load_prompts, sample_pairs

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


# -- the tasks: a prompt and its one right answer --------------------------------------------------
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


TASKS = {task.__name__: task for task in (add, subtract, sort, upper, extract)}


def rows(tasks: str, n: int, seed) -> list[dict]:
    """n rows of different prompts of these tasks ("add+sort"), in turn; a category is a task."""
    rng, names, of_prompt = random.Random(f"{tasks}/{seed}"), tasks.split("+"), {}
    while len(of_prompt) < n:
        name = names[len(of_prompt) % len(names)]
        prompt, answer = TASKS[name](rng)
        of_prompt[prompt] = {"prompt": prompt, "completion": answer, "category": name}
    return list(of_prompt.values())


def correct(prompts, responses, rows):
    """The truth: 1 for the right answer and nothing else, otherwise 0."""
    return [float(text.strip() == row["completion"]) for text, row in zip(responses, rows)]


# -- commands --------------------------------------------------------------------------------------
def data(tasks, seed, folder):
    made, begin = rows(tasks, sum(SIZES.values()), seed), 0
    for name, n in SIZES.items():
        metrics.write_jsonl(f"{folder}/{name}.jsonl", made[begin : begin + n])
        begin += n
    Path(folder, "chat.jinja").write_text(TEMPLATE)


def labelled(answers, flipped, rng) -> list[dict]:
    """Of the answers to each prompt, [(question, text, whether it is right)], a right and a wrong one, where
    there are both: the last ones. A label is wrong with the probability `flipped`."""
    of_prompt, pairs = {}, []
    for question, text, right in answers:
        of_prompt.setdefault(question, {})[right] = text
    for question, by_truth in of_prompt.items():
        if len(by_truth) == 2:
            chosen = rng.random() >= flipped
            pairs.append({"prompt": question, "chosen": by_truth[chosen], "rejected": by_truth[not chosen]})
    return pairs


def label(policy, prompts, flipped, seed, file):
    """Pairs of a policy's answers, four to each prompt; how many of them are right."""
    tokenizer = loading.load_tokenizer(policy)
    prompts = load_prompts(prompts, "train", tokenizer, max_tokens=56)
    model = loading.load_policy(policy, tokenizer).eval()
    sampled = sample_pairs(model, tokenizer, prompts, n=4, seed=int(seed), max_new_tokens=13, slots=64)
    texts = [answer.text.strip() for _, answer in sampled]
    right = correct([], texts, [prompt.row.data for prompt, _ in sampled])
    answers = [(prompt.question, text, r > 0) for (prompt, _), text, r in zip(sampled, texts, right) if text]
    pairs = labelled(answers, float(flipped), random.Random(f"{seed}/{Path(file).stem}"))
    task_of = {prompt.question: prompt.category for prompt in prompts}
    for pair in pairs:
        pair["category"] = task_of[pair["prompt"]]
    metrics.write_jsonl(file, pairs)
    lines = []
    for task in dict.fromkeys(task_of.values()):
        rights = [of_4 for prompt, of_4 in zip(prompts, split(right, 4)) if prompt.category == task]
        right_ones, best = (statistics.fmean(map(f, rights)) for f in (statistics.fmean, max))
        lines.append({"task": task, "right": f"{right_ones:.1%}", "best of 4": f"{best:.1%}"})
    metrics.print_table(lines)
    print(f"{len(pairs)} pairs")


def table(folder, seeds):
    """Differences to SFT on the same held-out prompts: of the truth, and of the reward model's score (proxy).
    The first prompts of the first seed, with all answers."""
    rows, lines = {}, []
    for seed in seeds.split():
        tests = {row["prompt"]: row for row in metrics.read_jsonl(f"{folder}/{seed}/test.jsonl")}
        for row in metrics.read_jsonl(f"{folder}/{seed}/answers/samples.jsonl"):
            [row["right"]] = correct([], [row["response"]], [tests[row["prompt"][-1]["content"]]])
            for group in ("all", f"seed {seed}", row["category"]):
                rows.setdefault((row["policy"], group), []).append(row)
    for (policy, group), of_policy in rows.items():
        line = {"policy": policy, "of": group, "n": str(len(of_policy))}
        line["right"] = f"{statistics.fmean(row['right'] for row in of_policy):.1%}"
        line["KL"] = f"{statistics.fmean(row['kl'] for row in of_policy):.2f}"
        for column, key in (("right, over SFT", "right"), ("proxy, over SFT", "score")):
            gain = metrics.gains(rows["sft", group], of_policy, {"gain": key})
            line[column] = metrics.interval(gain, "gain", "+.3f")
        lines.append(line)
    metrics.print_table(sorted(lines, key=lambda line: (line["of"] != "all", line["of"])))
    policies = [policy for policy, group in rows if group == "all"]
    for same in list(zip(*(rows[policy, "all"] for policy in policies)))[:12]:
        print(same[0]["prompt"][-1]["content"], {row["policy"]: row["response"] for row in same})


if __name__ == "__main__":
    {"data": data, "label": label, "table": table}[sys.argv[1]](*sys.argv[2:])
