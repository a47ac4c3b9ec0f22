"""The pool of rejection sampling and iterative DPO: all sampled responses with their scores, in a file that
survives a crash, and the metrics of the pool.

The pool is a list of rows, the same on every rank, and the file `output_dir`/pool.jsonl. A row is:

    prompt                           list of messages
    response, response_ids           text, and token ids
    finished                         true if it ended, and has no special token before its end
    iteration, model, temperature    source of the response
    chunk                            number of the chunk of prompts that it was sampled in
    score, scorer                    score, and version of the scorer; null until it is scored
    written                          text with special tokens, only if there are any before the end
    parts                            in the last row, if a function returns parts of its scores: their means
"""

import collections
import itertools
from pathlib import Path

from common import dist, responses
from common.batches import Row, split, turns_key
from common.errors import InputError
from common.data import chat, files, formats, mapping
from common.scoring import measures, scorers


TYPES = {  # column -> type of its values
    "prompt": list, "response": str, "response_ids": list, "finished": bool, "iteration": int, "model": str,
    "temperature": int | float, "chunk": int, "score": int | float | None, "scorer": str | None,
}  # fmt: skip


def load_pool(path, prompts, tokenizer, max_length) -> list[dict]:
    """Load rows of an earlier run's pool (--pool) that answer one of these prompts, and with it have at most
    max_length tokens. Other rows are dropped, and reported with their number and the reason.

    If the ids are not those of the text with this tokenizer, the text is encoded again. Raises InputError if
    there is no such file or no row is left."""
    if not Path(path).is_file():
        raise InputError(f"--pool {path}: no such file")
    lengths = {prompt.key: len(prompt.ids) for prompt in prompts}

    def fitting(row):
        values = row.data
        with files.reading("the row", "A pool is the pool.jsonl of a run"):
            check_row(values)
        key = turns_key(values["prompt"])
        if key not in lengths:
            raise ValueError("the prompt is not in --dataset")
        ids = values["response_ids"]
        if tokenizer.decode(ids, skip_special_tokens=True) != values["response"]:
            ids = chat.encode_responses(tokenizer, values["prompt"], [values["response"]])[1][0]
            values["response_ids"] = ids if values["finished"] else ids[:-1]
        elif values["finished"]:  # the model that wrote it may have another end-of-sequence token
            values["response_ids"] = [*ids[:-1], tokenizer.eos_token_id]
        if lengths[key] + len(values["response_ids"]) > max_length:
            raise ValueError(f"longer than {max_length} tokens (--max-length)")
        return values

    rows = [Row(f"{path}:{place}", values) for place, values in formats.read_file(Path(path))]
    return mapping.map_rows(rows, fitting, f"--pool {path}")


def rows_of(run) -> list[dict]:
    """Read the pool of a resumed run, without a last line that a crash cut short. Rank 0 reads for all."""
    reads = run.resumed and dist.is_main()
    return dist.gather(files.read_jsonl(run.folder / "pool.jsonl", check=check_row) if reads else [])


def check_row(row):
    """Raise ValueError if a value of a row has another type, or the prompt is not a list of messages."""
    wrong = [name for name, kind in TYPES.items() if not isinstance(row[name], kind)]
    if wrong or not all(type(token) is int and token >= 0 for token in row["response_ids"]):
        raise ValueError(f"values of the wrong type in {', '.join(wrong) or 'response_ids'}")
    for message in row["prompt"]:
        if not isinstance(message, dict) or {type(message.get(x)) for x in ("role", "content")} != {str}:
            raise ValueError("the prompt is not a list of messages")


class Pool:
    """All responses that a run has sampled, with their scores: `rows`, and the file pool.jsonl."""

    def __init__(self, run, rows):
        """rows: first rows, from an earlier run (--pool) or from this run before it was interrupted."""
        self.args = run.args
        self.path = f"{run.folder}/pool.jsonl"
        self.rows = list(rows)
        self.write()

    def write(self):
        """Replace the file; a crash leaves the old file or the new one. All ranks must call it together."""
        if dist.is_main():
            files.write_jsonl(self.path, self.rows)
        dist.barrier()

    def sample(self, samplers, prompts, iteration, versions):
        """Sample responses to each prompt from each sampler, (model name, temperature, number of responses),
        and append them to the pool chunk by chunk. Chunks that are in the pool are not sampled again."""
        args = self.args
        # Scores come after all of an iteration is sampled. Keep it then, even if the flags have changed
        if any(row["iteration"] == iteration and row["scorer"] for row in self.rows):
            return
        for (name, temperature, n), chunks in zip(samplers, self.missing(samplers, prompts, iteration)):
            if not chunks:
                continue
            policy = None  # only one is in memory
            policy = versions.load(name)
            with dist.consolidated(policy):  # gathers the weights once for all chunks
                for number, chunk in chunks:
                    seed = dist.seed_of(args.seed, "sample", iteration, number)
                    options = {"n": n, "temperature": temperature, "top_p": args.top_p}
                    sampled = responses.answers(policy, versions.tokenizer, chunk, args, seed, **options)
                    rows = []
                    for prompt, response in sampled:
                        row = {"prompt": prompt.turns, "response": response.text}
                        row.update(response_ids=response.ids, finished=response.finished and response.clean)
                        row.update(iteration=iteration, model=name, temperature=temperature, chunk=number)
                        if response.written:
                            row["written"] = response.written
                        rows.append({**row, "score": None, "scorer": None})
                    self.rows += rows
                    if dist.is_main():
                        files.append_jsonl(self.path, rows)

    def missing(self, samplers, prompts, iteration) -> list[list[tuple[int, list]]]:
        """Find the chunks of --chunk-prompts prompts that are still to be sampled: for each sampler a list of
        (chunk number, prompts). Rows of a chunk that a crash cut short are removed from the pool, because a
        chunk is always sampled as a whole."""
        keys_of_chunk = collections.defaultdict(list)
        counter = itertools.count()
        for row in self.rows:
            if row["iteration"] == iteration:
                keys_of_chunk[row["chunk"]].append((turns_key(row["prompt"]), row["temperature"]))
        whole = set()
        missing = []
        for _, temperature, n in samplers:
            missing.append([])
            for chunk, number in zip(split(prompts, self.args.chunk_prompts), counter):
                if keys_of_chunk[number] == [(prompt.key, temperature) for prompt in chunk for _ in range(n)]:
                    whole.add(number)
                else:
                    missing[-1].append((number, chunk))
        kept = [row for row in self.rows if row["iteration"] != iteration or row["chunk"] in whole]
        if len(kept) < len(self.rows):
            self.rows = kept
            self.write()
        return missing

    def uses_before(self, iteration) -> collections.Counter:
        """Count the earlier iterations that used a prompt: {key of the prompt: number}."""
        used = {(row["iteration"], turns_key(row["prompt"])) for row in self.rows}
        return collections.Counter(key for i, key in used if i < iteration)

    def score(self, scorer, prompts):
        """Score the rows of these prompts that have no score, or one of another scorer, which could not be
        compared, and replace the file. Sets `parts`, the means of the parts of the new scores."""
        self.parts = {}
        keys = {prompt.key for prompt in prompts}
        unscored = (row for row in self.rows if row["scorer"] != scorer.version)
        old = [row for row in unscored if turns_key(row["prompt"]) in keys]
        if not old:  # a resumed run may have scored all rows before it was interrupted
            self.parts = self.rows[-1].get("parts", {}) if self.rows else {}
            return
        sampled = responses_of(old, prompts)
        scores, self.parts = scorers.score_and_parts(scorer, sampled, self.args.score_batch_size)
        for row, score in zip(old, scores):
            row["score"] = score
            row["scorer"] = scorer.version
        if self.parts or "parts" in self.rows[-1]:
            self.rows[-1]["parts"] = self.parts
        self.write()


def candidates(rows, prompts, iteration=None) -> list[dict]:
    """Return the rows that answer one of the prompts, in the order of the prompts.

    iteration: if given, only rows of this iteration."""
    places = {prompt.key: place for place, prompt in enumerate(prompts)}
    rows = [row for row in rows if iteration in (None, row["iteration"])]
    placed = [(places.get(turns_key(row["prompt"])), row) for row in rows]
    placed = [(place, row) for place, row in placed if place is not None]
    return [row for _, row in sorted(placed, key=lambda placed: placed[0])]


def responses_of(rows, prompts) -> list[tuple[responses.Prompt, responses.Response]]:
    """Turn rows into (prompt, response) tuples; every row must answer one of the prompts."""
    by_key = {prompt.key: prompt for prompt in prompts}
    sampled = []
    for row in rows:
        response = responses.Response(row["response_ids"], row["response"], row["finished"])
        response = response._replace(written=row.get("written", ""))
        sampled.append((by_key[turns_key(row["prompt"])], response))
    return sampled


def write_pairs(folder, pairs, iteration):
    """Add the new pairs of an iteration to pairs.jsonl, in a format that reward.py and --offline-data read.
    Pairs of earlier iterations are kept; those of this iteration are replaced."""
    if not dist.is_main():
        return
    rows = files.read_jsonl(folder / "pairs.jsonl")
    with files.reading(folder / "pairs.jsonl"):
        rows = [row for row in rows if row["iteration"] < iteration]
    for pair in pairs:
        row = {"prompt": pair.prompt, "chosen": pair.texts[0], "rejected": pair.texts[1]}
        row.update(iteration=iteration, source=pair.source, category=pair.category)
        if pair.label_scores:
            row["chosen_score"], row["rejected_score"] = pair.label_scores
        if pair.preference is not None:
            row["preference"] = pair.preference
        rows.append(row)
    files.write_jsonl(folder / "pairs.jsonl", rows)


# -- metrics of an iteration -----------------------------------------------------------------------
def pool_metrics(rows) -> dict[str, float]:
    """Compute means over the responses of an iteration, and over its prompts the mean best and mean worst
    score."""
    by_prompt = {}
    for row in rows:
        by_prompt.setdefault(turns_key(row["prompt"]), []).append(row["score"])
    values = {
        "pool/score": [row["score"] for row in rows],
        "pool/best": [max(scores) for scores in by_prompt.values()],
        "pool/worst": [min(scores) for scores in by_prompt.values()],
        "pool/finished": [row["finished"] for row in rows],
        "pool/length": [len(row["response_ids"]) for row in rows],
        "pool/characters": [len(row["response"]) for row in rows],
    }
    return {key: sum(x) / len(x) for key, x in values.items() if x}


def selection_metrics(rows, selected, iteration) -> dict[str, float]:
    """Compute the metrics of rejection sampling: of all rows of the pool, of this iteration's responses, and
    of the rows that are selected for training."""
    new = [row for row in rows if row["iteration"] == iteration and row["score"] is not None]
    metrics = {"pool/rows": len(rows), "pool/new": len(new), "pool/selected": len(selected)}
    if selected:
        metrics["pool/earlier"] = sum(row["iteration"] < iteration for row in selected) / len(selected)
    return {**metrics, **pool_metrics(new), **measures.means(selected, {"pool/selected_score": "score"})}


def pairing_metrics(rows, pairs, dropped, iteration) -> dict[str, float]:
    """Compute the metrics of iterative DPO: of an iteration's responses, and of the pairs made from them.

    dropped: {reason: number of prompts without a pair}."""
    rows = [row for row in rows if row["iteration"] == iteration]
    metrics = {"pool/responses": len(rows), "pairs/kept": len(pairs), **pool_metrics(rows)}
    metrics.update({f"pairs/{reason}": n for reason, n in dropped.items()})
    for i, side in enumerate(("chosen", "rejected") if pairs else ()):
        metrics[f"pairs/{side}_score"] = sum(pair.label_scores[i] for pair in pairs) / len(pairs)
        metrics[f"pairs/{side}_length"] = sum(len(pair.response_ids[i]) for pair in pairs) / len(pairs)
    return metrics
