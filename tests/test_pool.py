"""common/run/pool.py: the file of the pool, the pool of an earlier run, the chunks to sample again, and
scores."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from helpers import CPU, TOKENIZER, A, B, C, prompt, row, scorer_that_notes, write_rows

import rejection_sampling
from common import responses
from common.errors import InputError
from common.data import files
from common.data.files import read_jsonl
from common.scoring import functions, scorers
from common.run import pool

MANY = [prompt(f"copy {word}", i) for i, word in enumerate("ant bear cat dog eel fox goat".split())]


def pool_of(folder, rows, **options):
    """A run's pool that holds these rows."""
    args = SimpleNamespace(**{"score_batch_size": 64, "chunk_prompts": 3, **options})
    return pool.Pool(SimpleNamespace(args=args, device=CPU, folder=folder, resumed=False), rows)


# -- chunks ------------------------------------------------------------------------------
def test_whole_chunks_are_not_sampled_again_and_a_part_of_one_is_dropped(tmp_path):
    whole = [row(p, str(k), chunk=0) for p in MANY[:3] for k in range(2)]
    part = [row(p, str(k), chunk=1) for p in MANY[3:5] for k in range(2)]
    earlier = [row(MANY[0], "of another iteration", iteration=0, chunk=1)]
    held, samplers = pool_of(tmp_path, [*earlier, *whole, *part]), [("m", 1.0, 2)]
    assert held.missing(samplers, MANY, 1) == [[(1, MANY[3:6]), (2, MANY[6:7])]]  # the last is a short one
    assert held.missing(samplers, MANY, 2) == [[(0, MANY[:3]), (1, MANY[3:6]), (2, MANY[6:7])]]
    assert held.rows == [*earlier, *whole] == read_jsonl(tmp_path / "pool.jsonl")


def test_several_samplers_have_chunks_of_their_own(tmp_path):
    """Chunks 0 to 2 belong to the first one, 3 to 5 to the second."""
    rows = [row(p, str(k), chunk=i // 3) for i, p in enumerate(MANY) for k in range(2)]
    rows += [{**row(p, "x", chunk=4), "temperature": 0.5} for p in MANY[3:6]]
    held, samplers = pool_of(tmp_path, rows), [("m", 1.0, 2), ("n", 0.5, 1)]
    written = (tmp_path / "pool.jsonl").stat().st_mtime_ns
    assert held.missing(samplers, MANY, 1) == [[], [(3, MANY[:3]), (5, MANY[6:7])]] and held.rows == rows
    assert (tmp_path / "pool.jsonl").stat().st_mtime_ns == written
    # Of other temperatures or sizes of chunks none of the old rows stays beside new ones
    others, of_second = pool_of(tmp_path, rows).missing([("m", 0.7, 2), ("n", 0.5, 1)], MANY, 1)
    assert [number for number, _ in others] == [0, 1, 2] and [number for number, _ in of_second] == [3, 5]
    held = pool_of(tmp_path, rows, chunk_prompts=7)
    assert held.missing(samplers, MANY, 1) == [[(0, MANY)], [(1, MANY)]] and held.rows == []


# -- sampling ----------------------------------------------------------------------------
def sampled_pool(folder, monkeypatch, answer, asked):
    """A pool that has sampled the same answer to A twice; the options of this call are appended to `asked`."""
    def sample_responses(model, tokenizer, prompts, *, seed, max_new_tokens, slots, **options):
        asked.append(options)
        return [(p, answer) for p in prompts for _ in range(options["n"])]

    monkeypatch.setattr(responses, "sample_responses", sample_responses)
    held = pool_of(folder, [], seed=0, top_p=0.8, max_new_tokens=8, slots=8)
    versions = SimpleNamespace(load=lambda name: torch.nn.Linear(1, 1), tokenizer=TOKENIZER)
    held.sample([("m", 0.7, 2)], [A], 1, versions)
    return held


@pytest.mark.parametrize("clean", [True, False])
def test_a_response_with_a_special_token_does_not_count_as_finished_in_the_pool(tmp_path, monkeypatch, clean):
    answer = responses.Response([5, TOKENIZER.eos_token_id], "ant", True, clean=clean)
    held = sampled_pool(tmp_path, monkeypatch, answer, [])
    assert [r["finished"] for r in held.rows] == [clean] * 2
    chosen, _ = rejection_sampling.select(pool.responses_of(held.rows, [A]), [1.0, 1.0], threshold=0.0)
    assert chosen == ([0] if clean else [])


def test_the_pool_is_sampled_with_top_p_and_the_samplers_temperature(tmp_path, monkeypatch):
    asked = []
    sampled_pool(tmp_path, monkeypatch, responses.Response([5, TOKENIZER.eos_token_id], "ant", True), asked)
    assert asked == [{"n": 2, "temperature": 0.7, "top_p": 0.8}]


def test_a_prompt_counts_once_in_each_iteration_that_asked_it(tmp_path):
    rows = [row(A, "ant", iteration=1), row(A, "cat", iteration=1), row(A, "ant", iteration=2)]
    held = pool_of(tmp_path, [*rows, row(B, "bear", iteration=3)])
    assert [held.uses_before(i) for i in (1, 2, 3)] == [{}, {A.key: 1}, {A.key: 2}]
    assert held.uses_before(4) == {A.key: 2, B.key: 1}


# -- the pool's file ---------------------------------------------------------------------
def test_a_truncated_last_line_is_skipped(tmp_path):
    path, rows = tmp_path / "pool.jsonl", [row(A, "ant"), row(A, "c\u2028\u00e9t"), row(B, "bear")]
    files.write_jsonl(path, rows)
    assert read_jsonl(path) == rows
    whole = path.read_bytes()
    for cut in (20, len(json.dumps(rows[2])) - 1):
        path.write_bytes(whole[:-cut])
        assert read_jsonl(path) == rows[:2]
    path.write_bytes(whole[:-1])  # only the line break is missing
    assert read_jsonl(path) == rows
    assert read_jsonl(tmp_path / "nothing.jsonl") == []


# -- an earlier run's pool ---------------------------------------------------------------
def test_rows_without_a_prompt_or_too_long_are_dropped_and_named(tmp_path, capsys):
    rows, n = [row(A, "ant"), row(C, "eel"), row(C, "dog"), row(B, "bear " * 8)], len(B.ids) + 9
    path = write_rows(tmp_path / "pool.jsonl", rows)
    assert pool.load_pool(path, [A, B, C], TOKENIZER, n) == rows and capsys.readouterr().out == ""
    assert pool.load_pool(path, [A, B, C], TOKENIZER, n - 1) == rows[:3]
    assert f"1: longer than {n - 1} tokens (--max-length) ({path}:4)" in capsys.readouterr().out
    assert pool.load_pool(path, [A, B], TOKENIZER, n) == [rows[0], rows[3]]
    assert f"2: the prompt is not in --dataset ({path}:2, {path}:3)" in capsys.readouterr().out
    with pytest.raises(InputError, match="--pool .*no usable row among its 4"):
        pool.load_pool(path, [prompt("copy toad")], TOKENIZER, 64)
    path.write_text("")
    with pytest.raises(InputError, match="no usable row among its 0"):
        pool.load_pool(path, [A], TOKENIZER, 64)


@pytest.mark.parametrize("name", row(A, "ant"))
def test_a_row_with_a_missing_column_is_dropped_and_named(tmp_path, capsys, name):
    bare = {key: value for key, value in row(A, "ant").items() if key != name}
    path = write_rows(tmp_path / "pool.jsonl", [row(A, "ant"), bare])
    assert pool.load_pool(path, [A], TOKENIZER, 64) == [row(A, "ant")]
    why = f"1: the row: cannot be read ({name!r} is missing). A pool is the pool.jsonl of a run ({path}:2)"
    assert why in capsys.readouterr().out


WRONG = [("prompt", "a"), ("prompt", [5]), ("prompt", [{"role": 1, "content": "a"}]), ("response", 5)]
WRONG += [("response_ids", "1"), ("response_ids", ["1"]), ("response_ids", [-1]), ("finished", "yes")]
WRONG += [("iteration", "1"), ("chunk", None), ("score", "high"), ("temperature", [])]
WRONG += [("prompt", ""), ("prompt", {}), ("prompt", ["a"]), ("prompt", [{"role": "user"}]), ("response_ids", "")]
WRONG += [("response_ids", [1.0]), ("response_ids", None), ("iteration", 1.5), ("model", 1), ("model", None)]
WRONG += [("score", ""), ("score", []), ("scorer", 0), ("scorer", []), ("finished", None), ("temperature", "1")]


@pytest.mark.parametrize("column, value", WRONG)
def test_a_row_with_values_of_a_wrong_type_is_dropped_and_named(tmp_path, capsys, column, value):
    """In a resumed run it ends the run with one line."""
    path = write_rows(tmp_path / "pool.jsonl", [row(A, "ant"), {**row(A, "ant"), column: value}])
    assert pool.load_pool(path, [A], TOKENIZER, 64) == [row(A, "ant")]
    assert f"({path}:2)" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"^.*pool.jsonl:2: cannot be read .* --overwrite\.$"):
        pool.rows_of(SimpleNamespace(folder=tmp_path, resumed=True))


def test_ids_of_another_tokenizer_are_encoded_anew(tmp_path):
    right = [row(A, "ant cat"), row(A, "ant", finished=False), row(B, "bear")]
    wrong = [{**r, "response_ids": r["response_ids"][::-1] + [9, 9]} for r in right[:2]] + right[2:]
    wrong[2] = {**right[2], "response_ids": [*right[2]["response_ids"][:-1], TOKENIZER.bos_token_id]}
    path = write_rows(tmp_path / "pool.jsonl", wrong)
    # an end token, ours, for what had ended, for the other none
    assert pool.load_pool(path, [A, B], TOKENIZER, 64) == right


# -- score -------------------------------------------------------------------------------
def test_rows_of_another_scorer_are_scored_again_and_current_ones_are_not(tmp_path):
    rows = [row(A, "ant cat", 7.0), row(B, "bear", 8.0, scorer="b@2")]
    rows += [row(B, "bear cat dog", None, scorer=None), row(C, "eel", 9.0)]
    held, asked, path = pool_of(tmp_path, rows), [], tmp_path / "pool.jsonl"
    inode = path.stat().st_ino
    held.score(scorer_that_notes(asked), [A, B])
    assert asked == [("copy ant", "ant cat"), ("first bear cat", "bear cat dog")]
    assert [r["score"] for r in held.rows] == [2.0, 8.0, 3.0, 9.0]  # C is no prompt of this run
    assert [r["scorer"] for r in held.rows] == ["b@2", "b@2", "b@2", "a@1"]
    assert read_jsonl(path) == rows and path.stat().st_ino != inode and not list(tmp_path.glob("*.tmp"))
    inode = path.stat().st_ino
    held.score(scorer_that_notes(asked), [A, B])
    assert len(asked) == 2 and path.stat().st_ino == inode  # neither scored nor written once more
    parts = lambda prompts, texts, rows: {"n": [len(t.split()) for t in texts], "one": [1] * len(rows)}
    held.score(scorers.Scorer("c", "c@1", functions.Term(parts)), [A, B])
    assert held.parts == {"reward/n": 2.0, "reward/one": 1.0} and held.rows[0]["score"] == 3.0
    held.score(scorers.Scorer("c", "c@1", functions.Term(parts)), [A, B])  # as after a crash: all are scored
    assert held.parts == {"reward/n": 2.0, "reward/one": 1.0}
    held.score(scorer_that_notes(asked, "d@1"), [A, B])
    assert held.parts == {}


def test_a_scorer_that_fails_changes_no_row(tmp_path):
    def score(prompts, responses, rows):
        return [math.nan if text == "bear" else 1.0 for text in responses]

    held = pool_of(tmp_path, [row(A, "ant", None, scorer=None), row(B, "bear", None, scorer=None)])
    with pytest.raises(InputError, match="b returned nan for 'bear', the response to 'first bear cat'"):
        held.score(scorers.Scorer("b", "b@1", functions.Term(score)), [A, B])
    assert [(r["score"], r["scorer"]) for r in held.rows] == [(None, None)] * 2
