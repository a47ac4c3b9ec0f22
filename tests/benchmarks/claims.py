"""For docs/claims.sh: its prompts, its student, and the tables of its runs.

python tests/benchmarks/claims.py prompts FILE
python tests/benchmarks/claims.py half FOLDER
python tests/benchmarks/claims.py table FOLDER GROUP SEEDS"""

import statistics
import sys
from pathlib import Path

import peers  # noqa: F401, it lets common be found

from common import loading, metrics, tiny


def prompts(file):
    """500 prompts, so that with as many an iteration each of them returns."""
    metrics.write_jsonl(file, tiny.rows("prompts", "train")[:500])


def half(folder):
    """A model of random weights with half of the tiny one's hidden size."""
    config = tiny.model().config
    config.hidden_size //= 2
    config.intermediate_size //= 2
    config.num_attention_heads //= 2
    config.num_key_value_heads = config.num_attention_heads
    type(tiny.model())(config).save_pretrained(folder)
    loading.load_tokenizer("tiny").save_pretrained(folder)


def right(row):
    """A comparison's share of pairs in the order of their labels."""
    return {
        "right": metrics.accuracy(
            [better["score"] - worse["score"] for *_, better, worse in metrics.pairs_of([row])]
        )
    }


def table(folder, group, seeds):
    """By seed and together: of policies the true reward over SFT's and over the first arm's, on the same prompts; of
    scorers the accuracy over the first arm's."""
    rows, column = {}, "gold"
    for seed in range(int(seeds)):
        for row in metrics.read_jsonl(f"{folder}/{group}_{seed}/evaluate/samples.jsonl"):
            if "scorer" in row:
                row, column = {"policy": row["scorer"], **right(row)}, "right"
            for part in (f"seed {seed}", "together"):
                rows.setdefault((part, row["policy"]), []).append(row)
    names = [name for part, name in rows if part == "together"]
    first = [name for name in names if name != "sft"][0]
    lines = []
    for name in names:
        of_all = rows["together", name]
        line = {"arm": name, "mean": f"{statistics.fmean(row[column] for row in of_all):.3f}"}
        if "kl" in of_all[0]:
            line["KL"] = f"{statistics.fmean(row['kl'] for row in of_all):.2f}"
        for before in dict.fromkeys(("sft", first) if "sft" in names else (first,)):
            for part in sorted({part for part, _ in rows}):
                gain = metrics.gains(rows[part, before], rows[part, name], {"gain": column})
                line[f"over {before}, {part}"] = metrics.interval(gain, "gain", "+.3f")
        lines.append(line)
    print(f"\n{group}")
    metrics.print_table(lines)
    for file in sorted(Path(folder).glob(f"{group}_*/*/summary.json")):
        versions = metrics.read_json(file).get("versions", {})
        found = [f"{row['sweep/temperature']:g}" for row in versions.values() if "sweep/temperature" in row]
        if found:
            print(f"{file.parent}: temperatures {', '.join(found)}")


if __name__ == "__main__":
    {"prompts": prompts, "half": half, "table": table}[sys.argv[1]](*sys.argv[2:])
