"""Prompts from rows (common/data/prompt_sets.py), and a policy's responses to them (common/responses.py)."""

import collections
import copy
import dataclasses
import importlib
from pathlib import Path

import pytest
import torch
from helpers import CPU, SYSTEM, TALK, TOKENIZER, bot, prompt, user, write_rows
from processes import ROOT
from transformers import AddedToken, AutoModelForCausalLM, MistralConfig, Qwen2Config

from common import dist, responses
from common.batches import Row, split
from common.errors import Diverged, InputError
from common.sampler import Samples
from common.data import chat, files, prompt_sets, tiny
from common.loading import pretrained
from common.scoring import functions
from common.run import checkpoints, pool

EOS = TOKENIZER.eos_token_id


@pytest.fixture
def load(tmp_path):
    """load(rows, max_tokens) -> prompts, from a file p.jsonl that holds the rows."""
    return lambda rows, max_tokens=64: prompt_sets.load_prompts(
        str(write_rows(tmp_path / "p.jsonl", rows)), "train", TOKENIZER, max_tokens
    )


# -- prompts: (row, its turns) -------------------------------------------------------------------
HH = "\n\nHuman: ant\n\nAssistant: bear\n\nHuman: cat\n\nAssistant:"
FORMATS = {
    "prompt": ({"prompt": "cat"}, [user("cat")]),
    "prompt and completion": ({"prompt": "cat", "completion": "dog"}, [user("cat")]),
    "prompt messages": ({"prompt": TALK}, TALK),
    "prompt messages with an answer": ({"prompt": [*TALK, bot("dog")]}, TALK),
    "prompt as HH dialogue": ({"prompt": HH}, TALK),
    "prompt as HH dialogue with an answer": ({"prompt": HH + " dog"}, TALK),
    "prompt beside a preference": ({"prompt": "cat", "chosen": "dog", "rejected": "eel"}, [user("cat")]),
    "instruction": ({"instruction": "cat", "output": "dog"}, [user("cat")]),
    "instruction and input": ({"instruction": "copy", "input": "cat"}, [user("copy\n\ncat")]),
    "instruction and empty input": ({"instruction": "cat", "input": ""}, [user("cat")]),
    "prompt that is null": ({"prompt": None, "instruction": "cat"}, [user("cat")]),
    "messages": ({"messages": TALK}, TALK),
    "messages with an answer": ({"messages": [*TALK, bot("dog")], "prompt": "ant"}, TALK),
    "RLHFlow's context messages": ({"context": "cat", "context_messages": [user("cat")]}, [user("cat")]),
    "messages with a system turn": ({"messages": [SYSTEM, user("cat")]}, [SYSTEM, user("cat")]),
    "conversations": (
        {"conversations": [{"from": "human", "value": "cat"}, {"from": "gpt", "value": "dog"}]},
        [user("cat")],
    ),
    "prompt and a system column": ({"prompt": TALK, "system": "so"}, [SYSTEM, *TALK]),
    "messages and two system turns": ({"messages": [SYSTEM, *TALK], "system": "no"}, [SYSTEM, *TALK]),
    "content in parts": (
        {"messages": [{**user(""), "content": [{"type": "text", "text": "cat"}]}, bot("dog")]},
        [user("cat")],
    ),
    "chosen as HH dialogue": ({"chosen": HH + " dog", "rejected": HH + " eel"}, TALK),
    "chosen as messages": ({"chosen": [*TALK, bot("dog")], "rejected": [*TALK, bot("eel")]}, TALK),
    "MT-Bench's turns": ({"question_id": 81, "category": "math", "turns": ["cat", "dog"]}, [user("cat")]),
    "turns beside a prompt": ({"prompt": "ant", "turns": ["cat", "dog"]}, [user("ant")]),
    "turns of another meaning": ({"prompt": "ant", "turns": 2}, [user("ant")]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_prompts_of_every_row_format(name, load):
    row, turns = FORMATS[name]
    (prompt,) = load([row])
    assert (prompt.turns, prompt.row.where) == (turns, "p.jsonl:1") and prompt.row.data.items() >= row.items()


def test_prompts_of_unknown_words_are_refused(load):
    with pytest.raises(InputError, match="does not know most of its words: check --model"):
        load([{"prompt": "please tell me what the capital of france is"}])


def test_ids_are_the_rendered_turns_and_the_opening_of_an_answer(load):
    (prompt,) = load([{"messages": [*TALK, bot("dog")]}])
    words = "<|bos|> <|user|> ant <|end|> <|assistant|> bear <|end|> <|user|> cat <|end|> <|assistant|>"
    assert TOKENIZER.convert_ids_to_tokens(prompt.ids) == words.split()


def test_a_prompt_is_used_once_whatever_its_format_and_answer(load, capsys):
    rows = [{"prompt": "cat"}, {"instruction": "cat"}, {"messages": [user(" cat\n"), bot("dog")]}]
    prompts = load([*rows, {"prompt": "dog"}, {"messages": [SYSTEM, user("cat")]}])
    assert [p.row.where for p in prompts] == ["p.jsonl:1", "p.jsonl:4", "p.jsonl:5"]
    assert len({p.key for p in prompts}) == 3
    assert "dropped 2 of 5 rows" in (out := capsys.readouterr().out)
    assert "2: an earlier row has the same prompt (p.jsonl:2, p.jsonl:3)" in out


UNUSABLE = {
    "the prompt is longer than 8 tokens": {"prompt": "copy ant cat dog owl"},  # bos, user, 5, end, assistant
    "the text contains a special token": {"prompt": "copy <|end|> ant"},
    "no prompt": {"prompt": " "},
    "columns ['text'] match no format of prompt rows": {"text": "ant"},
    "columns ['chosen', 'rejected'] match no format of prompt rows": {"chosen": "dog", "rejected": "eel"},
    "the prompt is int, not text or messages": {"prompt": 5},
    "a message is not {role, content}": {"prompt": [{"a": 1}]},
    "a lone surrogate": {"prompt": "\ud800"},
    "an earlier answer is empty": {"prompt": HH.replace(" bear", "")},
    "a message has tool_calls": {"messages": [{**bot("ant"), "tool_calls": [{}]}, user("cat")]},
    "content of a message is null": {"messages": [{"role": "user", "content": None}]},
}
MALFORMED = [{"messages": {"a": "cat"}}, {"messages": "cat"}, {"prompt": {"a": 1}}, {"chosen": {"a": 1}}]
MALFORMED += [{"instruction": ["cat"]}, {"instruction": "copy", "input": 5}]  # which is not left out


@pytest.mark.parametrize("reason, row", [*UNUSABLE.items(), *(("", row) for row in MALFORMED)])
def test_an_unusable_row_is_counted_and_named(reason, row, load, capsys):
    (prompt,) = load([{"prompt": "copy ant cat dog"}, row], max_tokens=8)  # it has 8 tokens
    out = capsys.readouterr().out
    assert prompt.row.where == "p.jsonl:1" and "dropped 1 of 2 rows" in out
    assert reason in out and "(p.jsonl:2)" in out


def test_prompts_without_a_usable_row_are_an_error_with_reasons_and_places(load):
    with pytest.raises(InputError) as error:
        load([UNUSABLE["no prompt"], {"text": "a"}, {"prompt": "<|user|>"}, UNUSABLE["no prompt"]])
    says = str(error.value)
    assert "no usable row among its 4" in says and "no prompt (p.jsonl:1)" in says
    assert 'expected {"prompt": ' in says and "(p.jsonl:2)" in says
    assert "special token" in says and "(p.jsonl:3)" in says


@pytest.mark.parametrize("messages", [[*TALK, bot("dog"), bot("eel")], [SYSTEM], [user("ant"), SYSTEM]])
def test_the_last_turn_of_every_prompt_is_the_users(messages, load):
    """Such a row may be dropped or cut; a scorer gets the last turn as the prompt."""
    assert all(p.turns[-1]["role"] == "user" for p in load([{"prompt": "owl"}, {"messages": messages}]))


def test_further_turns_are_reported_as_unread_unless_the_caller_reads_them(tmp_path, capsys):
    rows = [{"category": "math", "turns": ["cat", "dog"]}, {"category": "math", "turns": ["ant"]}]
    paths = [write_rows(tmp_path / "p.jsonl", rows), tmp_path / "p.csv"]
    paths[1].write_text('category,turns\nmath,"[""cat"", ""dog""]"\nmath,"[""ant""]"\n')
    unread = "not read as prompts, only given to scoring functions (with the number of rows): turns (2)"
    for path in paths:
        for reads, words in ((), f"{path.name}: {unread}"), (["turns"], ""):
            prompts = prompt_sets.load_prompts(str(path), "train", TOKENIZER, 64, reads=reads)
            assert [p.question for p in prompts] == ["cat", "ant"] and prompts[0].row.data["turns"] == ["cat", "dog"]
            assert capsys.readouterr().out.strip() == words


def test_category_is_text_or_none(load):
    prompts = load([{"prompt": "ant", "category": 3}, {"prompt": "cat"}, {"prompt": "dog", "category": "a"}])
    assert [p.category for p in prompts] == ["3", None, "a"]


def test_the_tiny_worlds_prompts_are_all_usable_and_never_in_both_splits():
    train, test = (prompt_sets.load_prompts("tiny", split, TOKENIZER, 64) for split in ("train", "test"))
    assert (len(train), len(test)) == (6000, 1000)
    assert not {p.key for p in train} & {p.key for p in test}
    assert {p.category for p in train} == set(tiny.COMMANDS)


# -- an iteration's prompts -----------------------------------------------------------------------
MANY = [prompt(f"copy {word}", i) for i, word in enumerate(tiny.WORDS[-12:])]


@pytest.mark.parametrize("seeds", [(0, 0, 0, 0, 0), (0, 1, 2, 3, 4)])
def test_prompts_that_were_used_least_come_first(seeds):
    """5 of 12 per iteration, whatever the seed: none repeats before all were used, or within an iteration."""
    uses, taken = collections.Counter(), []
    for seed in seeds:
        taken.append([prompt.key for prompt in prompt_sets.least_used(MANY, 5, uses, seed)])
        uses.update(taken[-1])
        assert len(set(taken[-1])) == 5 and max(uses.values()) - min(uses[prompt.key] for prompt in MANY) <= 1
    assert set(uses) == {prompt.key for prompt in MANY} and sum(uses.values()) == 25
    few = prompt_sets.least_used(MANY[:3], 5, uses, 0)
    assert sorted(prompt.key for prompt in few) == sorted(prompt.key for prompt in MANY[:3])


def test_the_first_pass_over_the_prompts_is_the_same_with_and_without_counts():
    uses = collections.Counter()
    for iteration in (1, 2):
        chosen = prompt_sets.least_used(MANY, 5, uses, 7)
        assert chosen == prompt_sets.fresh_prompts(MANY, 5, iteration, 7)
        uses.update(prompt.key for prompt in chosen)


def test_prompts_that_were_added_come_first():
    uses = collections.Counter(prompt.key for prompt in MANY[:9])
    assert {prompt.key for prompt in prompt_sets.least_used(MANY, 3, uses, 1)} == {p.key for p in MANY[9:12]}


# -- responses -----------------------------------------------------------------------------------
QUESTIONS = ["copy ant cat dog", "reverse owl pig fox toad bear", "first ant"]


@pytest.fixture(scope="module")
def policy():
    return tiny.model().eval()


@pytest.fixture
def prompts(load):
    return load([{"prompt": q} for q in QUESTIONS])


def sampled(policy, prompts, n, **options):
    """The responses to each prompt."""
    pairs = responses.sample_responses(policy, TOKENIZER, prompts, n=n, **options)
    assert [prompt for prompt, _ in pairs] == [prompt for prompt in prompts for _ in range(n)]
    return split([response for _, response in pairs], n)


def test_responses_end_with_the_end_token_if_they_finished_and_are_decoded(policy, prompts):
    found = sampled(policy, prompts, 8, max_new_tokens=24)
    assert [len(responses) for responses in found] == [8, 8, 8]
    everything = [r for responses in found for r in responses]
    assert {r.finished for r in everything} == {True, False}
    special = {*TOKENIZER.all_special_ids}
    for r in everything:
        assert r.finished == (r.ids[-1] == EOS) and EOS not in r.ids[:-1]
        assert len(r.ids) <= 24 if r.finished else len(r.ids) == 24
        words = TOKENIZER.convert_ids_to_tokens([i for i in r.ids if i not in special])
        assert r.text == " ".join(words)
    assert any(len(r.ids) < 24 for r in everything)  # cut where they ended, without the padding of the batch


@pytest.mark.parametrize("end", [True, False], ids=["ended", "cut"])
def test_reward_functions_see_the_special_tokens_that_were_written(end, policy, monkeypatch):
    """All except the end: a thought between special tokens is not part of the answer after it."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<think>", "</think>"]})
    words = f"<think> two <|pad|> </think> ant{' <|end|>' if end else ' </think>'}"
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(words.split())])
    drawn = Samples(torch.zeros(1), ids, ids >= 0, torch.zeros(ids.shape), torch.tensor([end]))
    monkeypatch.setattr(responses, "sample", lambda *_, **__: drawn)
    (response,) = responses.my_responses(policy, tokenizer, [[1]])
    prompt, seen = responses.Prompt([1], [user("q")], Row("f:1", {})), []
    score = lambda prompts, responses, rows: seen.extend(responses) or [0.0] * len(responses)
    functions._call(functions.Term(score), [(prompt, response)])
    compare = lambda duels: seen.extend(duels[0][1:]) or [0.0]
    compare.pairwise = True
    functions._call(functions.Term(compare), [(prompt, response, response._replace(written="", text="b"))])
    row = {"prompt": prompt.turns, "response": response.text, "response_ids": response.ids, "finished": end}
    [(_, again)] = pool.responses_of([{**row, "written": response.written}], [prompt])
    functions._call(functions.Term(score), [(prompt, again)])  # a pool's, as rejection sampling and DPO score it
    written = words.removesuffix(" <|end|>").replace("two", tokenizer.unk_token)
    assert seen == [written, written, "b", written] and "think" not in response.text
    assert tiny.gold_score("copy ant", "<|user|> ant") == tiny.gold_score("copy ant", "ant")


def test_responses_come_in_the_order_of_the_prompts(policy, prompts):
    """At a temperature near 0: those of plain greedy forwards."""
    found = sampled(policy, prompts, 2, max_new_tokens=6, temperature=1e-6)
    for (ids, *_), responses in zip(prompts, found):
        with torch.no_grad():
            row = list(ids)
            for _ in range(6):  # greedy, by plain forwards
                row.append(policy(input_ids=torch.tensor([row])).logits[0, -1].argmax().item())
                if row[-1] == EOS:
                    break
        assert [r.ids for r in responses] == [row[len(ids) :]] * 2
    assert len({tuple(responses[0].ids) for responses in found}) == 3  # in another order they would differ


def test_responses_keep_the_log_probability_of_each_id_as_it_was_drawn(policy, prompts):
    for prompt, responses in zip(prompts, sampled(policy, prompts, 2, max_new_tokens=6, temperature=0.5)):
        for response in responses:
            with torch.no_grad():
                logits = policy(input_ids=torch.tensor([prompt.ids + response.ids])).logits[0]
            logprobs = (logits[len(prompt.ids) - 1 : -1] / 0.5).log_softmax(-1)  # the logits before each id
            want = [row[i].item() for row, i in zip(logprobs, response.ids)]
            assert response.logprobs == pytest.approx(want, abs=1e-4)


def test_responses_depend_on_the_seed(policy, prompts):
    one, again, other = (sampled(policy, prompts, 4, max_new_tokens=12, seed=s) for s in (3, 3, 4))
    assert one == again and one != other
    assert len({tuple(r.ids) for r in one[0]}) == 4  # the n responses are drawn apart


def test_nan_logits_mean_that_training_diverged(prompts):
    policy = tiny.model().eval()
    with torch.no_grad():
        policy.lm_head.weight.fill_(float("nan"))
    with pytest.raises(Diverged, match="NaN logits: .* lower --lr"):
        responses.sample_responses(policy, TOKENIZER, prompts[:1], max_new_tokens=8)


def test_ranks_that_share_a_copy_have_the_same_prompts_and_draws(policy, prompts, monkeypatch):
    shares = []  # of ranks 0 and 1, and of 2 and 3
    monkeypatch.setattr(dist, "ranks_per_copy", 2)
    monkeypatch.setattr(dist, "world_size", lambda: 4)
    monkeypatch.setattr(dist, "gather", lambda mine: shares.append(dict(mine)) or [(i, []) for i in range(3)])
    for rank in range(4):
        monkeypatch.setattr(dist, "rank", lambda: rank)
        responses.sample_responses(policy, TOKENIZER, [prompts[0]] * 3, max_new_tokens=8)
    assert shares[0] == shares[1] and shares[2] == shares[3] and shares[0][0] != shares[2][1]
    assert [*shares[0], *shares[2]] == [0, 2, 1]


def test_a_model_that_ranks_cannot_share_is_an_input_error(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "ranks_per_copy", 2)
    heads = Qwen2Config(num_attention_heads=12, num_key_value_heads=3), "qwen2's num_key_value_heads, 3"
    for config, says in (heads, (MistralConfig(), "mistral cannot be split")):
        config.save_pretrained(tmp_path)
        with pytest.raises(InputError, match=says):
            pretrained.check_sampled(tmp_path)


def test_too_many_new_tokens_for_the_policys_positions_is_an_input_error(policy, prompts):
    with pytest.raises(InputError, match="128 positions: nothing can be sampled"):
        responses.sample_responses(policy, TOKENIZER, prompts, max_new_tokens=124)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_a_response_with_a_special_token_before_its_end_is_not_clean(named, first, monkeypatch):
    """Its text lacks that token: a scorer would judge one thing, and the policy learn another. Llama 3's headers
    are special and have no name."""
    ant, user, end = (TOKENIZER.convert_tokens_to_ids(t) for t in ("ant", "<|user|>", "<|end|>"))
    if not named:
        monkeypatch.setattr(type(TOKENIZER), "all_special_ids", [end])
    tokens = torch.tensor([[user, ant, end] if first else [ant, user, end], [ant, ant, end]])
    everything = torch.ones(2, 3, dtype=torch.bool)
    fake = Samples(torch.tensor([0, 0]), tokens, everything, torch.zeros(2, 3), torch.tensor([True, True]))
    monkeypatch.setattr(responses, "sample", lambda *args, **options: fake)
    strange, clean = responses.my_responses(None, TOKENIZER, [[1]], n=2, max_new_tokens=3)
    assert (strange.text, strange.finished, strange.clean, clean.clean) == ("ant", True, False, True)


def test_a_drawn_padding_token_is_shown_to_reward_functions(monkeypatch):
    """Left out, it would join two words that the policy wrote apart, and the function would reward that."""
    ids = TOKENIZER.convert_tokens_to_ids("ant <|pad|> owl <|end|>".split())
    every = torch.ones(1, 4, dtype=torch.bool)
    fake = Samples(torch.tensor([0]), torch.tensor([ids]), every, torch.zeros(1, 4), torch.tensor([True]))
    monkeypatch.setattr(responses, "sample", lambda *args, **options: fake)
    [response] = responses.my_responses(None, TOKENIZER, [[1]], max_new_tokens=4)
    assert (response.written, response.clean, response.usable) == ("ant <|pad|> owl", False, False)


@pytest.mark.parametrize("ends_turns", [True, False], ids=["of the template", "of the generation config"])
def test_an_end_token_that_is_not_marked_special_is_not_in_the_text(ends_turns, tmp_path, monkeypatch):
    """A function that compares whole answers would find none of them right."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([AddedToken("<|stop|>", special=False)])
    if ends_turns:
        tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "<|stop|>")
    for part in (tokenizer, tiny.model().config):
        part.save_pretrained(tmp_path)
    read = pretrained.load_tokenizer(str(tmp_path), quiet=True)
    stop = read.convert_tokens_to_ids("<|stop|>")
    assert (read.eos_token_id == stop) is ends_turns
    ids = torch.tensor([[read.convert_tokens_to_ids("ant"), stop], [stop, read.pad_token_id]])
    mask = torch.tensor([[True, True], [True, False]])
    fake = Samples(torch.tensor([0, 0]), ids, mask, torch.zeros(2, 2), torch.tensor([True, True]))
    monkeypatch.setattr(responses, "sample", lambda *args, **options: fake)
    full, empty = responses.my_responses(None, read, [[1]], n=2, max_new_tokens=2)
    assert (full.text, full.usable) == ("ant", True) and (empty.text, empty.usable) == ("", False)


# -- models with several end tokens --------------------------------------------------------------
@pytest.mark.parametrize("listed", [True, False])
def test_sampling_stops_at_each_end_token_and_an_export_keeps_them(listed, tmp_path, monkeypatch):
    """For a model whose generation_config lists two, as Llama 3's and Qwen's do, or has a single one that is
    not the template's, as in Qwen's base models."""
    asked, plain, other = [], responses.sample, TOKENIZER.convert_tokens_to_ids("<|unk|>")
    model = tiny.model()
    model.generation_config.eos_token_id = [other, EOS] if listed else other
    model.save_pretrained(tmp_path / "two")
    TOKENIZER.save_pretrained(tmp_path / "two")
    model = dist.shard(pretrained.load_policy(str(tmp_path / "two"), TOKENIZER), CPU)
    assert model.generation_config.eos_token_id == [EOS, other]

    def sample(*args, stop_ids, n, **options):
        asked.append((n, stop_ids))
        return plain(*args, stop_ids=stop_ids, n=n, **options)

    monkeypatch.setattr(responses, "sample", sample)
    found = responses.my_responses(model, TOKENIZER, [[1, 4, 9]], n=200, max_new_tokens=30, seed=0)
    ends = {response.ids[-1] for response in found if response.finished}
    assert asked == [(200, {EOS, other})] and ends == {EOS, other}
    assert any(response.clean for response in found if response.ids[-1] == other)
    checkpoints.save_model(model, TOKENIZER, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.generation_config.eos_token_id == [EOS, other]
    one = pretrained.load_policy("tiny", TOKENIZER)
    responses.my_responses(one, TOKENIZER, [[1, 4, 9]], max_new_tokens=3, seed=0)
    assert one.generation_config.eos_token_id == EOS and asked[1] == (1, {EOS})
    # A labeler keeps its own generation_config
    labeler = pretrained.load_unsharded(str(tmp_path / "two"), CPU)
    responses.my_responses(labeler, TOKENIZER, [[1, 4, 9]], max_new_tokens=3, seed=0)
    labeler.generation_config.eos_token_id = TOKENIZER.convert_tokens_to_ids("ant")  # a default may be any word
    responses.my_responses(labeler, TOKENIZER, [[1, 4, 9]], max_new_tokens=3, seed=0)
    assert asked[2:] == [(1, {EOS, other}), (1, {EOS})]


def test_the_projects_template_reads_an_answer_with_a_leading_space_as_it_was_learnt():
    """After "Assistant:" a byte-level model says " yes"; a row with that text must not get a second space."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = Path(ROOT, "docs", "templates", "chat.jinja").read_text()
    texts = [chat.render(tokenizer, [user("a"), {"role": "assistant", "content": x}]) for x in ("yes", " yes")]
    assert texts[0] == texts[1] and "Assistant: yes" in texts[0]


def test_the_projects_template_begins_with_the_first_token_that_a_tokenizer_has():
    """A base model was pretrained with it; an end token that is also the first one (GPT-2) stays at the end."""
    for bos, begins in (("<|bos|>", "<|bos|>"), ("<|end|>", ""), (None, "")):
        tokenizer = copy.deepcopy(tiny.tokenizer())
        tokenizer.bos_token, tokenizer.eos_token = bos, "<|end|>"
        tokenizer.chat_template = Path(ROOT, "docs", "templates", "chat.jinja").read_text()
        assert chat.render(tokenizer, [user("a")]) == f"{begins}Human: a\n\n"


def test_rows_of_the_embeddings_that_are_no_tokens_are_not_sampled():
    """Qwen2.5's policy of 7B has 128 rows more than the reward model of 0.5B, for which they are out of range."""
    model = pretrained.load_policy("tiny", TOKENIZER)
    model.resize_token_embeddings(len(TOKENIZER) + 8, mean_resizing=False)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[len(TOKENIZER) :] = head[EOS]  # each as likely as the end
    drawn = responses.my_responses(model, TOKENIZER, [[1, 4, 9]], n=200, max_new_tokens=30, seed=0)
    assert any(EOS in response.ids for response in drawn)
    assert all(i < len(TOKENIZER) for response in drawn for i in response.ids)


@pytest.mark.parametrize("name", ["sft", "reward", "advantage_model", "common.programs.rehearsal"])
def test_slots_reach_the_sampler(tmp_path, monkeypatch, name):
    def sample(model, prompts, *, slots, **options):
        raise InputError(f"{slots} slots")

    monkeypatch.setattr(responses, "sample", sample)
    module, folder = importlib.import_module(name), tmp_path / "run"
    options = {"model": "tiny", "scorer": "common.data.tiny:gold_scorer", "sft_model": "tiny", "policy": "tiny"}
    pairs = [{**row, "completion": row["chosen"]} for row in tiny.rows("preferences", "train")[:200]]
    files.write_jsonl(tmp_path / "rows.jsonl", pairs)
    options |= {"output_dir": str(folder), "output": str(folder), "slots": 3}
    options["dataset"] = str(tmp_path / "rows.jsonl")
    known = {field.name for field in dataclasses.fields(module.Args)}
    with pytest.raises(InputError, match="^3 slots"):
        module.main(module.Args(**{key: value for key, value in options.items() if key in known}))
