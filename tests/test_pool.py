"""common/pool.py: its file, what is sampled again, and scores."""

import json
import math
import os
from types import SimpleNamespace

import pytest
import torch
from scorers import CPU, TOKENIZER, A, B, C, prompt, row, scorer_that_notes, write_rows

from common import dist, metrics, pool, scorers
from common.errors import InputError
from common.metrics import read_jsonl

MANY = [prompt(f"copy {word}", i) for i, word in enumerate("ant bear cat dog eel fox goat".split())]


def make_args(**options):
    return SimpleNamespace(**{"score_batch_size": 64, **options})


# -- chunks ------------------------------------------------------------------------------
def chunks(folder, held, iteration=1, n=7):
    args = make_args(output_dir=str(folder), chunk_prompts=3)
    (found,) = pool.chunks_to_sample(held, MANY[:n], iteration, args, [(None, 2)])
    return found


def test_whole_chunks_are_not_sampled_again_and_a_part_of_one_is_dropped(tmp_path):
    whole = [row(p, str(k), chunk=0) for p in MANY[:3] for k in range(2)]
    part = [row(p, str(k), chunk=1) for p in MANY[3:5] for k in range(2)]
    earlier = [row(MANY[0], "of another iteration", iteration=0, chunk=1)]
    held = [*earlier, *whole, *part]
    assert chunks(tmp_path, held) == [(1, MANY[3:6]), (2, MANY[6:7])]  # the last chunk is a short one
    assert held == [*earlier, *whole] == read_jsonl(tmp_path / "pool.jsonl")
    assert chunks(tmp_path, held, iteration=2) == [(0, MANY[:3]), (1, MANY[3:6]), (2, MANY[6:7])]
    assert held == [*earlier, *whole]


def test_of_a_whole_iteration_nothing_is_sampled_or_written(tmp_path):
    held = [row(p, str(k), chunk=i // 3) for i, p in enumerate(MANY[:7]) for k in range(2)]
    assert chunks(tmp_path, held) == [] and len(held) == 14 and not list(tmp_path.iterdir())


def test_a_plan_of_several_temperatures_has_chunks_of_its_own(tmp_path):
    """Chunks 0 to 2 are of the first temperature, 3 to 5 of the second."""
    args, plan = make_args(output_dir=str(tmp_path), chunk_prompts=3), [(1.0, 2), (0.5, 1)]
    held = [row(p, str(k), chunk=i // 3) for i, p in enumerate(MANY[:7]) for k in range(2)]
    held += [{**row(p, "x", chunk=4), "temperature": 0.5} for p in MANY[3:6]]
    first, second = pool.chunks_to_sample(held, MANY[:7], 1, args, plan)
    assert first == [] and second == [(3, MANY[:3]), (5, MANY[6:7])] and len(held) == 17
    # Under another plan, other temperatures or sizes of chunks, none of the old rows stays beside new ones
    found = pool.chunks_to_sample(held[:], MANY[:7], 1, args, [(0.7, 2), (0.5, 1)])
    assert [number for number, _ in found[0]] == [0, 1, 2] and found[1] == second
    again = held[:]
    args.chunk_prompts = 7
    found = pool.chunks_to_sample(again, MANY[:7], 1, args, plan)
    assert found == [[(0, MANY[:7])], [(1, MANY[:7])]] and again == []


# -- the pool's file ---------------------------------------------------------------------
def test_a_last_line_that_was_cut_is_left_out_and_this_is_said(tmp_path, capsys):
    path, rows = tmp_path / "pool.jsonl", [row(A, "ant"), row(A, "c\u2028\u00e9t"), row(B, "bear")]
    metrics.write_jsonl(path, rows)
    assert pool.read(path) == rows and capsys.readouterr().out == ""
    whole = path.read_bytes()
    for cut in (20, len(json.dumps(rows[2])) - 1):
        path.write_bytes(whole[:-cut])
        assert pool.read(path) == rows[:2]
        assert f"{path}:3: the last line is cut" in capsys.readouterr().out
    path.write_bytes(whole[:-1])  # only the line break is missing
    assert pool.read(path) == rows
    assert pool.read(tmp_path / "nothing.jsonl") == []


@pytest.mark.parametrize("line, words", [('{"prompt": [', "no row"), ("[1]", "lacks"), ("7", "no row")])
def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path, line, words):
    good = json.dumps(row(A, "ant"))
    (tmp_path / "pool.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(InputError, match=f"pool.jsonl:2: .*{words}"):
        pool.read(tmp_path / "pool.jsonl")


@pytest.mark.parametrize("name", ["prompt", "response", "response_ids", "finished", "iteration", "chunk"])
def test_a_row_without_a_column_is_an_error_that_names_it(tmp_path, name):
    bare = {key: value for key, value in row(A, "ant").items() if key != name}
    write_rows(tmp_path / "pool.jsonl", [row(A, "ant"), bare])
    with pytest.raises(InputError, match=f"pool.jsonl:2: .*lacks a column .*{name}"):
        pool.read(tmp_path / "pool.jsonl")


# -- score -------------------------------------------------------------------------------
def test_rows_of_another_scorer_are_scored_again_and_current_ones_are_not(tmp_path, capsys):
    held, asked, path = (
        [row(A, "ant cat", 7.0), row(B, "bear", 8.0, scorer="b@2")],
        [],
        tmp_path / "pool.jsonl",
    )
    held += [row(B, "bear cat dog", None, scorer=None), row(C, "eel", 9.0)]
    pool.write(path, held)
    inode = path.stat().st_ino
    pool.score(held, scorer_that_notes(asked), [A, B], make_args(output_dir=str(tmp_path)), CPU)
    assert asked == [("copy ant", "ant cat"), ("first bear cat", "bear cat dog")]
    assert [r["score"] for r in held] == [2.0, 8.0, 3.0, 9.0]  # C is no prompt of this run
    assert [r["scorer"] for r in held] == ["b@2", "b@2", "b@2", "a@1"]
    assert read_jsonl(path) == held and path.stat().st_ino != inode and not list(tmp_path.glob("*.tmp"))
    assert "1 responses that another scorer scored are scored again" in capsys.readouterr().out


def test_a_pool_that_is_scored_is_neither_scored_nor_written_again(tmp_path):
    held, asked = [row(A, "ant", 1.0, scorer="b@2"), row(C, "eel", 1.0)], []
    pool.score(held, scorer_that_notes(asked), [A, B], make_args(output_dir=str(tmp_path)), CPU)
    assert not asked and not list(tmp_path.iterdir())


def test_a_scorer_that_fails_changes_no_row(tmp_path):
    def score(prompts, responses, rows):
        return [math.nan if text == "bear" else 1.0 for text in responses]

    held = [row(A, "ant", None, scorer=None), row(B, "bear", None, scorer=None)]
    with pytest.raises(InputError, match="b gives nan for 'bear', to 'first bear cat'"):
        pool.score(held, scorers.Scorer("b", "b@1", function=score), [A, B], make_args(), CPU)
    assert [(r["score"], r["scorer"]) for r in held] == [(None, None)] * 2


# -- the last version --------------------------------------------------------------------
@pytest.mark.parametrize(
    "dtype, links", [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)]
)
def test_model_is_the_last_version_linked_or_as_an_export_in_its_dtype(tmp_path, monkeypatch, dtype, links):
    def no_link(*_):
        raise OSError("this disk has no hard links")

    policy = pool.load("tiny", TOKENIZER, make_args(seed=0), CPU)
    dist.save_model(policy, TOKENIZER, tmp_path / "versions" / "2")
    dist.save_model(policy, TOKENIZER, tmp_path / "export", dtype)
    if not links:
        monkeypatch.setattr(os, "link", no_link)
    pool.save_last(make_args(output_dir=str(tmp_path)), 2, dtype)
    names = sorted(path.name for path in (tmp_path / "export").iterdir())
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == names
    for name in names:
        assert (tmp_path / "model" / name).read_bytes() == (tmp_path / "export" / name).read_bytes()
    linked = (tmp_path / "model/model.safetensors").samefile(tmp_path / "versions/2/model.safetensors")
    assert linked == (links and dtype == torch.float32)
