"""Which models work: a tiny random model of each family of transformers that people train, written with
save_pretrained, through the sampler and four scripts. Prints the table of docs/results/use.md.

    python tests/benchmarks/families.py                       all families, some 20 minutes on two CPU cores
    python tests/benchmarks/families.py --only "Gemma 3" gpt-oss --stages sampler sft

A cell is `works`; `refused`, with the error's line; `WRONG`, if a number differs from that of transformers' own
forward or generate; or `crash`.
"""

import contextlib
import functools
import gc
import io
import json
import math
import re
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import transformers
import tyro

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]
import tiny_families
from tiny_families import VOCABULARY, logprobs_of, plain

import dpo_iterative
import ppo
import reward
import sft
from common.errors import InputError
from common.sampler import sample
from common.data import tiny
from common.data.files import read_json, read_jsonl, write_jsonl
from common.loading import pretrained


# -- stages: each gives None or a note, or raises ------------------------------------------------------------
class Wrong(Exception):
    """A number that differs from transformers' own."""


def encoded(prompt, response):
    """The token ids of a row's prompt and of its response."""
    tokenizer, turns = tiny.tokenizer(), [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    return ids, tokenizer(f"{response} <|end|>")["input_ids"]


def check_close(what, got, want):
    off = (torch.as_tensor(got) - torch.as_tensor(want)).abs().max().item()
    if not off <= 3e-4:  # Zamba 2 with its own cache differs from itself without by 1e-4
        raise Wrong(f"{what} off by {off:.2g}")


def run_sampler(folder):
    """Ragged prompts, refilled slots: log probabilities of a plain forward, greedy tokens of generate."""
    towers = hasattr(transformers.AutoConfig.from_pretrained(folder), "text_config")
    model = pretrained.load_policy(folder, tiny.tokenizer()).eval() if towers else plain(folder)
    generator, stop_ids = torch.Generator().manual_seed(1), [7, 29]
    lengths = (3, 31, 31, 9, 31, 24) * 4  # three slots, filled 16 times in some 200 steps
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    options = {"max_new_tokens": 24, "stop_ids": stop_ids, "pad_id": 0, "slots": 3}
    drawn = sample(model, prompts, n=2, seed=0, **options)
    for i, tokens, mask, logprobs in zip(*drawn[:4]):
        want = logprobs_of(model, prompts[i], tokens[mask].tolist())
        check_close("log probabilities", logprobs[mask], want)
    prompts = prompts[:6]
    greedy = sample(model, prompts, temperature=0, **options)
    for prompt, tokens, mask in zip(prompts, greedy.response_tokens, greedy.sample_mask):
        ids, got = torch.tensor([prompt]), tokens[mask].tolist()
        options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": stop_ids, "pad_token_id": 0}
        want = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
        if got != want:
            raise Wrong(f"greedy tokens {got[:8]}, of generate {want[:8]}")


rows_of = functools.cache(tiny.rows)


def run(script, folder, kind, **options):
    """A script's main on a few rows of the tiny world -> (summary.json, rows of metrics.jsonl)."""
    for split in ("train", "test"):
        write_jsonl(f"{folder}/{kind}_{split}.jsonl", rows_of(kind, split)[:16])
    files = {"dataset": f"{folder}/{kind}_train.jsonl", "eval_dataset": f"{folder}/{kind}_test.jsonl"}
    with mock.patch("matplotlib.figure.Figure.savefig"):  # most of the time of so short a run
        flags = {**files, **options, "output_dir": f"{folder}/{script.__name__}"}
        script.main(script.Args(model=folder, max_length=64, save_every=0, **flags))
    output = Path(folder, script.__name__)
    return read_json(output / "summary.json"), read_jsonl(output / "metrics.jsonl")


def run_sft(folder):
    """The held-out loss, of packed documents, is that of plain forwards, of the exported model too."""
    options = {"max_steps": 2, "batch_size": 4, "micro_batch_size": 2, "sample_prompts": 0}
    summary, _ = run(sft, folder, "sft", **options)
    rows = [encoded(row["prompt"], row["completion"]) for row in rows_of("sft", "test")[:16]]
    for when, model in (("before", plain(folder)), ("after", plain(f"{folder}/sft/model"))):
        want = -torch.cat([logprobs_of(model, *row) for row in rows]).mean()
        check_close(f"held-out loss {when}", summary[when]["eval/nll"], want)


def run_reward(folder):
    """The exported model gives transformers the scores of held-out responses, which shared prompts here."""
    run(reward, folder, "preferences", max_steps=2, batch_size=4, micro_batch_size=4, length_prompts=0)
    exported = f"{folder}/reward/model"
    kind = transformers.AutoConfig.from_pretrained(exported).architectures[0]
    known = hasattr(transformers, kind)  # else it is a class that load_scorer makes
    model = plain(exported) if known else pretrained.load_scorer(exported, tiny.tokenizer(), 1)
    for row in read_jsonl(f"{folder}/reward/samples.jsonl"):
        for response in row["responses"]:
            ids = torch.tensor([sum(encoded(row["prompt"][-1]["content"], response["text"]), [])])
            last = torch.tensor([[0], [ids.shape[1] - 1]])
            score = model(input_ids=ids).logits if known else model.head_outputs(ids, last)
            check_close("scores", score[0, 0], response["score"])
    return None if known else "works, but only load_scorer reads it"


def run_ppo(folder):
    """Run two rollouts; the second one changes the policy. The reward model is run_reward's, if that works."""
    scorer = f"{folder}/reward" if Path(folder, "reward/summary.json").exists() else "common.data.tiny:gold_scorer"
    _, rows = run(
        ppo, folder, "prompts", scorer=scorer, iterations=2, prompts_per_iteration=4, max_new_tokens=16,
        slots=4, epochs=1, minibatch_size=4, micro_batch_size=4, value_warmup_steps=1, missing_eos_penalty=0,
        eval_prompts=2,
    )  # fmt: skip
    rounds = [row for row in rows if "kl/per_response" in row]
    check_close("KL before the first step", rounds[0]["kl/per_response"], 0.0)
    check_close("ratio of the first step", rounds[1]["policy/first_ratio_max"], 1.0)
    plain(f"{folder}/ppo/model")


def run_dpo(folder):
    """Pairs from the sampler beside given ones, whose log probabilities, sharing prompts, are plain ones."""
    given = f"{folder}/pairs.jsonl"
    write_jsonl(given, rows_of("preferences", "train")[:4])
    kept, with_reference = [], dpo_iterative.with_reference
    noted = lambda *inputs: kept.append(with_reference(*inputs)) or kept[-1]
    with mock.patch.object(dpo_iterative, "with_reference", noted):
        _, rows = run(
            dpo_iterative, folder, "prompts", scorer="common.data.tiny:gold_scorer", offline_data=given,
            iterations=1, prompts_per_iteration=4, n_samples=4, max_new_tokens=16, slots=4, batch_size=4,
            micro_batch_size=4, eval_prompts=2,
        )  # fmt: skip
    losses, model = [row["loss/dpo"] for row in rows if "loss/dpo" in row], plain(folder)
    check_close("loss of the first step", losses[0], math.log(2))
    trained = read_jsonl(f"{folder}/dpo_iterative/pairs.jsonl")
    for row in (row for row in trained if "chosen_score" not in row):  # the given ones that are not held out
        texts = [encoded(row["prompt"][-1]["content"], row[side]) for side in ("chosen", "rejected")]
        sums = [logprobs_of(model, *text).sum() for text in texts]
        nearest = min((pair.ref_logprobs for pair in kept[-1]), key=lambda pair: abs(pair[0] - sums[0]))
        check_close("log probabilities of a pair", nearest, sums)
    plain(f"{folder}/dpo_iterative/model")


# -- the table -----------------------------------------------------------------------------------------------
STAGES = {"sampler": run_sampler, "sft": run_sft, "reward": run_reward, "ppo": run_ppo, "dpo": run_dpo}


@dataclass
class Args:
    only: tuple[str, ...] = tuple(tiny_families.FAMILIES)
    """Families."""
    stages: tuple[str, ...] = tuple(STAGES)
    """Of each."""


def cell(stage, folder):
    """Run a stage and return its result in one line."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return STAGES[stage](folder) or "works"
    except Exception as error:
        config = transformers.AutoConfig.from_pretrained(folder)
        kinds = "|".join({folder, config.model_type, config.get_text_config().model_type})
        said = " ".join(re.sub(rf"({kinds})\b", "MODEL", str(error)).split())[:200]
        if isinstance(error, Wrong):
            return f"WRONG: {said}"
        if isinstance(error, InputError) or stage == "sampler" and type(error) is ValueError:
            return f"refused: {said}"
        return f"crash: {type(error).__name__} {said} ({traceback.extract_tb(error.__traceback__)[-1].name})"


def table(answers, stages):
    """Markdown of {family: cells}: up to eight families with equal cells per row, and the errors' lines below."""
    alike, said = {}, {"works": 0}
    for name, cells in answers.items():
        for text in cells:
            said.setdefault(text, len(said))  # 0 is `works`
        words = [re.split("[:,]", text)[0] + (f" ({said[text]})" if said[text] else "") for text in cells]
        alike.setdefault(" | ".join(words), []).append(name)
    lines = [" | ".join(["families", *stages]), " | ".join(["---"] * (1 + len(stages)))]
    for words, names in alike.items():
        lines += [f"{', '.join(names[i : i + 8])} | {words}" for i in range(0, len(names), 8)]
    notes = [f"{number}. {text}" for text, number in said.items() if number]
    return "\n".join([*(f"| {line} |" for line in lines), "", *notes])


def main(args: Args):
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    gc.freeze()  # scripts collect garbage between models, and most objects here are modules
    answers = {}
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            tiny_families.save(name, folder)
            answers[name] = [cell(stage, folder) for stage in args.stages]
        print(json.dumps([name, answers[name]]), file=sys.stderr, flush=True)
    print(table(answers, args.stages))


if __name__ == "__main__":
    main(tyro.cli(Args))
