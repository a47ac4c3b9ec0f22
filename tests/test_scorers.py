"""common/scoring/scorers.py: scores by models, by functions, and by scorers that compare two responses."""

import importlib
import json
import math
import os
import re
import shutil
import sys

import pytest
import torch
from helpers import CPU, SYSTEM, TALK, TOKENIZER, Plain, bot, docs_functions, user, write_rows
from test_data import CHATML, NO_END, byte_tokenizer
from transformers import (
    AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig,
    LlamaForSequenceClassification,
)  # fmt: skip

import ppo
from common import dist, responses
from common.batches import Row
from common.errors import InputError
from common.data import chat, prompt_sets, tiny
from common.loading import pretrained
from common.scoring import functions, scorers
from common.run import checkpoints

EOS = TOKENIZER.eos_token_id


@pytest.fixture
def load(tmp_path):
    """load(rows, max_tokens) -> prompts, from a file p.jsonl that holds the rows."""
    return lambda rows, max_tokens=64: prompt_sets.load_prompts(
        str(write_rows(tmp_path / "p.jsonl", rows)), "train", TOKENIZER, max_tokens
    )


# -- scores of models ----------------------------------------------------------------------------
def save(folder, n_outputs, tokenizer=TOKENIZER, seed=0):
    model = dist.shard(pretrained.load_scorer("tiny", tokenizer, n_outputs, seed=seed), CPU)
    if n_outputs == 2:
        model.config.advantage_model = {"n_policies": 4, "n_others": 1}
    checkpoints.save_model(model, tokenizer, folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The names of a tiny reward model (1) and a tiny advantage model (2)."""
    return {n: save(tmp_path_factory.mktemp("scorers") / f"of{n}", n) for n in (1, 2)}


@pytest.fixture
def reward_model(folders):
    return scorers.load_scorer(folders[1], TOKENIZER, CPU)


def response(text, finished=True):
    return responses.Response(TOKENIZER(text)["input_ids"] + [EOS] * finished, text, finished)


@pytest.fixture
def pairs(load):
    """Pairs of different lengths, with neither the longest nor the shortest first."""
    rows = [{"prompt": "copy ant cat"}, {"prompt": TALK}, {"prompt": "first owl pig dog bear", "more": 7}]
    a, b, c = load(rows)
    finished = [(a, "ant cat"), (b, "dog eel fox goat um well"), (a, "owl"), (c, "owl"), (b, "pig so")]
    return [(prompt, response(text)) for prompt, text in finished]


def expected(folder, n_outputs, prompt, text):
    """Scores by plain transformers, one row without padding: r, or (1 - K / N) (r - e) with K = 1, N = 4."""
    plain = Plain(folder)
    r = plain.outputs(prompt.turns, text)[0].item()
    return r if n_outputs == 1 else 0.75 * (r - plain.outputs(prompt.turns)[1].item())


@pytest.mark.parametrize("batch_size", [1, 2, 64])
@pytest.mark.parametrize("n_outputs", [1, 2])
def test_scores_are_those_of_plain_transformers_whatever_the_batch(n_outputs, batch_size, folders, pairs):
    scorer = scorers.load_scorer(folders[n_outputs], TOKENIZER, CPU)
    got = scorers.score(scorer, pairs, batch_size)
    want = [expected(folders[n_outputs], n_outputs, prompt, r.text) for prompt, r in pairs]
    assert got == pytest.approx(want, abs=1e-5)
    assert min(abs(a - b) for i, a in enumerate(want) for b in want[:i]) > 1e-3  # no other order would do


def test_only_a_cut_response_gets_an_end_token_before_scoring(
    reward_model, folders, pairs
):
    prompt = pairs[0][0]
    both = [(prompt, response("ant cat", finished)) for finished in (True, False)]
    ended, cut = scorers.score(reward_model, both, 8)
    assert [ended, cut] == pytest.approx([expected(folders[1], 1, prompt, "ant cat")] * 2, abs=1e-5)

    def alone(ids):  # by plain transformers, of any ids
        return Plain(folders[1]).model(input_ids=torch.tensor([prompt.ids + ids])).logits.item()

    ids = TOKENIZER("ant cat")["input_ids"]
    assert ended == pytest.approx(alone([*ids, EOS]), abs=1e-5)
    assert min(abs(ended - alone(wrong)) for wrong in (ids, [*ids, EOS, EOS])) > 1e-3
    empty = scorers.score(reward_model, [(prompt, responses.Response([], "", False))], 8)
    assert empty == pytest.approx([alone([EOS])], abs=1e-5)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_padding_token_that_is_in_the_text_changes_no_score(batch_size, folders, reward_model, pairs):
    want = scorers.score(reward_model, pairs, batch_size)
    words = TOKENIZER.convert_tokens_to_ids(["ant", "<|assistant|>", "<|end|>"])
    for pad in words:
        reward_model.model.config.pad_token_id = pad
        assert scorers.score(reward_model, pairs, batch_size) == pytest.approx(want, abs=1e-5)
    plain, (prompt, r) = AutoModelForSequenceClassification.from_pretrained(folders[1]), pairs[0]
    plain.config.pad_token_id = EOS  # transformers then reads the token before the end token
    assert abs(plain(input_ids=torch.tensor([prompt.ids + r.ids])).logits.item() - want[0]) > 1e-3


def test_a_sampled_padding_token_counts_like_any_other(reward_model, pairs):
    """In the middle of a batch, and at the end of a cut response."""
    pad, prompt = TOKENIZER.pad_token_id, pairs[0][0]
    ant = TOKENIZER.convert_tokens_to_ids("ant")
    sampled = [[ant, pad, ant, EOS], [ant, ant, pad], [pad], [ant, ant, EOS]]
    more = [(prompt, responses.Response(ids, "", ids[-1] == EOS)) for ids in sampled]
    got = scorers.score(reward_model, [*pairs, *more], 64)[len(pairs) :]
    with torch.no_grad():
        for ids, score in zip(sampled, got):
            ids = prompt.ids + (ids if ids[-1] == EOS else [*ids, EOS])
            hidden = reward_model.model.base_model(input_ids=torch.tensor([ids])).last_hidden_state
            assert score == pytest.approx(reward_model.model.score(hidden[0, -1]).item(), abs=1e-5)
    assert len(set(got)) == 4


def test_a_response_beyond_the_scorers_positions_is_an_error_with_its_place(reward_model, load):
    (prompt,) = load([{"prompt": "copy ant cat"}])
    room = 128 - len(prompt.ids) - 1
    answer = lambda n, **options: response(" ".join(["ant"] * n), **options)
    fits, full, long = (answer(n, finished=False) for n in (room, room + 1, room + 2))
    scores = [scorers.score(reward_model, [(prompt, x)], 1) for x in (fits, full, answer(room))]
    assert scores[0] == scores[1] == scores[2]  # the end token takes the place of the last one
    with pytest.raises(InputError, match="p.jsonl:1: prompt and response have 130 tokens.*has 128 positions"):
        scorers.score(reward_model, [(prompt, long)], 1)


def test_a_score_that_is_not_finite_names_the_response(reward_model, pairs):
    reward_model.model.score.weight.data.fill_(float("nan"))
    with pytest.raises(InputError, match="returned nan for 'ant cat', the response to 'copy ant cat'"):
        scorers.score(reward_model, pairs, 2)


def test_no_pairs_no_scores(reward_model):
    assert scorers.score(reward_model, [], 8) == []


def test_a_run_directory_names_its_model(tmp_path, folders, reward_model, pairs):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    os.symlink(folders[1], tmp_path / "run" / "model")
    of_run = scorers.load_scorer(str(tmp_path / "run"), TOKENIZER, CPU)
    want = scorers.score(reward_model, pairs, 8)
    assert scorers.score(of_run, pairs, 8) == want
    assert not any(p.requires_grad for p in of_run.model.parameters())


def test_a_causal_model_as_scorer_is_refused_with_the_expected_kind(tmp_path):
    checkpoints.save_model(tiny.model(), TOKENIZER, tmp_path / "lm")
    for name in ("tiny", str(tmp_path / "lm")):
        words = f"^{name} is a .*not a run of reward.py or advantage_model.py .*common.programs.pairwise:oracle=RUN"
        with pytest.raises(InputError, match=words):
            scorers.load_scorer(name, TOKENIZER, CPU, pairwise=True)


def test_a_classifier_of_three_labels_is_refused_before_anything_is_scored(tmp_path):
    name = save(tmp_path / "three", 3)
    with pytest.raises(InputError, match="is a classifier of"):
        scorers.load_scorer(name, TOKENIZER, CPU)


def test_the_version_changes_with_the_models_files(tmp_path):
    name = save(tmp_path / "rm", 1)
    versions = [scorers.load_scorer(name, TOKENIZER, CPU).version for _ in range(2)]
    save(tmp_path / "rm", 1, seed=1)  # another head, files of the same sizes
    versions.append(scorers.load_scorer(name, TOKENIZER, CPU).version)
    assert versions[0] == versions[1] != versions[2]


def test_the_version_of_a_model_is_that_of_a_copy_in_another_folder(tmp_path):
    name = save(tmp_path / "rm", 1)
    version = scorers.load_scorer(name, TOKENIZER, CPU).version
    shutil.copytree(name, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("a page")
    assert scorers.load_scorer(str(tmp_path / "copy"), TOKENIZER, CPU).version == version


@pytest.mark.parametrize("kind", ["model", "function"])
def test_a_scorer_is_loaded_and_so_downloaded_before_its_version_is_taken(kind, tmp_path, monkeypatch):
    name = save(tmp_path / "rm", 1)
    spec = name if kind == "model" else f"loads:judge={name}"
    done = []
    (tmp_path / "loads.py").write_text("def judge(text):\n    done.append('loaded')\n    return lambda *_: []\n\ndone = []")
    monkeypatch.syspath_prepend(tmp_path)
    if kind == "function":
        monkeypatch.setattr(importlib.import_module("loads"), "done", done)
    load, version_of = scorers.pretrained.load_scorer, scorers.version_of
    monkeypatch.setattr(scorers.pretrained, "load_scorer", lambda *given: done.append("loaded") or load(*given))
    monkeypatch.setattr(scorers, "version_of", lambda given: done.append("version") or version_of(given))
    scorers.load_scorer(spec, TOKENIZER, CPU)
    assert done == ["loaded", "version"]
    sys.modules.pop("loads", None)


# -- where a score is read ------------------------------------------------------------------------
PHI = CHATML.replace("{% endfor %}", "{% endfor %}{% if not add_generation_prompt %}<|im_end|>{% endif %}")


TEMPLATES = {
    "ChatML": CHATML, "a newline first": "\n" + CHATML, "a newline": CHATML + "{{ '' }}\n",
    "Phi": PHI, "no end": NO_END,
}  # fmt: skip


@pytest.fixture(params=TEMPLATES)
def classifier(request, tmp_path):
    """A classifier whose template writes something after an answer's end token, or writes no end token."""
    return published(TEMPLATES[request.param], tmp_path)


def published(template, tmp_path, before_end=""):
    """(a name, its tokenizer, its prompts and responses): a classifier as others publish it.

    before_end: what the policy, and its template, write between an answer and its end token."""
    tokenizer = byte_tokenizer(template)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=len(tokenizer), **shape))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "rm")
    pairs = []
    for question, answer in (("a b", "ba"), ("c", "cc abba")):
        ids = chat.prompt_ids(tokenizer, [user(question)])
        said, end = tokenizer(answer)["input_ids"], [*tokenizer(before_end)["input_ids"], tokenizer.eos_token_id]
        prompt = responses.Prompt(ids, [user(question)], Row("f:1", {}))
        ways = responses.Response([*said, *end], answer, True), responses.Response(said, answer, False)
        pairs += [(prompt, response) for response in ways]
    return str(tmp_path / "rm"), tokenizer, pairs


def read_by_transformers(name, pairs):
    """apply_chat_template -> model(...), as a classifier's authors recommend."""
    return [Plain(name).outputs(prompt.turns, r.text).item() for prompt, r in pairs]


@pytest.mark.parametrize("same_tokens", [True, False])
def test_a_foreign_classifier_is_read_at_transformers_token(same_tokens, classifier):
    name, tokenizer, pairs = classifier
    scorer = scorers.load_scorer(name, tokenizer, CPU)
    assert scorer.same_tokens
    got = scorers.score(scorer._replace(same_tokens=same_tokens), pairs, 3)
    assert got == pytest.approx(read_by_transformers(name, pairs), abs=1e-5)


@pytest.mark.parametrize("same_tokens", [True, False])
def test_what_a_template_writes_before_its_end_token_is_scored_once(same_tokens, tmp_path):
    """Llama 2's writes a space there. A policy has learnt to write it, and so has a text that the template
    encodes, so only a response that was cut gets it from the scorer."""
    template = CHATML.replace("<|im_end|>", " <|im_end|>")
    name, tokenizer, pairs = published(template, tmp_path, before_end=" ")
    scorer = scorers.load_scorer(name, tokenizer, CPU)._replace(same_tokens=same_tokens)
    want = read_by_transformers(name, pairs)
    assert scorers.score(scorer, pairs, 3) == pytest.approx(want, abs=1e-5)
    twice = [(p, r._replace(ids=[*r.ids[:-1], *tokenizer(" ")["input_ids"], r.ids[-1]])) for p, r in pairs[::2]]
    wrong = scorers.score(scorer._replace(same_tokens=True), twice, 3)
    assert min(abs(a - b) for a, b in zip(want[::2], wrong)) > 1e-3


def test_a_scorer_trained_here_is_read_at_the_end_token_by_transformers_too(classifier, tmp_path):
    name, tokenizer, pairs = classifier
    template = tokenizer.chat_template
    own = pretrained.load_tokenizer(name)
    model = pretrained.load_scorer(name, own, 1)
    with torch.no_grad():
        rows = [torch.tensor([[*p.ids, *own(r.text)["input_ids"], own.eos_token_id]]) for p, r in pairs]
        want = [model.head_outputs(x, torch.tensor([[0], [x.shape[1] - 1]])).item() for x in rows]
    pretrained.read_at_end_token(model, own)
    checkpoints.save_model(dist.shard(model, CPU), own, tmp_path / "trained")
    trained = str(tmp_path / "trained")
    scorer = scorers.load_scorer(trained, tokenizer, CPU)
    assert scorer.same_tokens and scorer.tokenizer.chat_template == template
    assert scorers.score(scorer, pairs, 3) == pytest.approx(want, abs=1e-5)
    if template != NO_END:  # where the template writes no end token, one is appended
        assert read_by_transformers(trained, pairs) == pytest.approx(want, abs=1e-5)
    options = {"tokenize": False, "add_generation_prompt": True}  # as for e(x) of an advantage model
    opened = [
        t.apply_chat_template(pairs[0][0].turns, **options) for t in (Plain(trained).tokenizer, tokenizer)
    ]
    assert opened[0] == opened[1]


@pytest.mark.parametrize("default", [CHATML, CHATML.replace("|>\n", "|>")], ids=["default cut", "others cut"])
def test_each_of_several_templates_of_a_scorer_is_read_at_the_end_token(default, tmp_path):
    """`rag` ends differently from the default; a template that fails on a plain dialogue is not changed."""
    tokenizer, rag = byte_tokenizer(), CHATML.replace("|>\n{% endfor", "|> \n{% endfor")
    templates = {"default": default, "rag": rag, "tool_use": "{{ tools[0].name }}" + CHATML}
    tokenizer.chat_template = templates
    model = pretrained.load_scorer("tiny", tokenizer, 1)
    pretrained.read_at_end_token(model, tokenizer)
    tokenizer.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    read, turns = AutoTokenizer.from_pretrained(tmp_path), [user("a"), bot("b")]
    for name in ("default", "rag"):
        assert read.apply_chat_template(turns, chat_template=name, tokenize=False).endswith("b<|im_end|>")
        opened = {"chat_template": name, "add_generation_prompt": True, "tokenize": False}
        assert read.apply_chat_template(turns[:1], **opened).endswith("assistant\n")
    assert read.chat_template["tool_use"] == templates["tool_use"]
    assert pretrained.load_tokenizer(str(tmp_path)).chat_template == templates


def test_if_the_end_does_not_fit_the_response_is_shortened(classifier):
    name, tokenizer, ((prompt, r), *_) = classifier
    scorer = scorers.load_scorer(name, tokenizer, CPU)
    scorer.model.config.max_position_embeddings = len(prompt.ids) + len(r.ids)
    end = pretrained.end_of_scored(scorer.model, tokenizer)
    encoded = scorers._encode(scorer, prompt, r, end)
    [said] = encoded.response_ids
    assert encoded.n_tokens <= len(prompt.ids) + len(r.ids) and said.tolist()[len(said) - len(end) :] == end


# -- a scorer with other tokens ------------------------------------------------------------------
@pytest.fixture
def other(tmp_path, monkeypatch):
    """(name, tokenizer) of a reward model that has the animals' ids in another order."""
    monkeypatch.setattr(tiny, "WORDS", [*tiny.SPECIAL, *sorted(tiny.WORDS[len(tiny.SPECIAL) :])])
    tokenizer = tiny.tokenizer()
    assert tokenizer("ant")["input_ids"] != TOKENIZER("ant")["input_ids"]
    return save(tmp_path / "other", 1, tokenizer, seed=5), tokenizer


def test_a_scorer_with_other_tokens_scores_the_text(other, pairs, capsys):
    name, tokenizer = other
    scorer = scorers.load_scorer(name, TOKENIZER, CPU)
    assert not scorer.same_tokens
    want = [expected(name, 1, prompt, r.text) for prompt, r in pairs]
    assert scorers.score(scorer, pairs, 2) == pytest.approx(want, abs=1e-5)
    wrong = scorers.score(scorer._replace(same_tokens=True), pairs, 2)  # the policy's ids as they are
    assert min(abs(a - b) for a, b in zip(want, wrong)) > 1e-3


def test_its_encoding_by_hand(other, pairs):
    name, tokenizer = other
    scorer, (prompt, r) = scorers.load_scorer(name, TOKENIZER, CPU), pairs[0]
    words = "<|bos|> <|user|> copy ant cat <|end|> <|assistant|> ant cat <|end|>".split()
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(words)])
    plain = AutoModelForSequenceClassification.from_pretrained(name)
    for given in (r, response(r.text, finished=False)):  # cut or not, with one end token
        got = scorers.score(scorer, [(prompt, given)], 2)
        assert got == pytest.approx([plain(input_ids=ids).logits.item()], abs=1e-5)


def test_special_tokens_of_the_scorer_in_the_text_are_left_out(tmp_path, load):
    """<|x|> is plain text to the policy, so prompts and responses may contain it."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|x|>"]})
    scorer = scorers.load_scorer(save(tmp_path / "x", 1, tokenizer), TOKENIZER, CPU)
    asked, plain = load([{"prompt": "copy ant <|x|> cat"}, {"prompt": "copy ant cat"}])
    pairs = [(asked, response("ant <|x|> cat")), (plain, response("ant cat"))]
    got = scorers.score(scorer, pairs, 1)
    assert not scorer.same_tokens and got[0] == got[1]


def test_a_prompt_that_the_scorers_template_refuses_is_an_input_error_that_says_where(tmp_path, load):
    tokenizer = tiny.tokenizer()
    refuse = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = refuse + tokenizer.chat_template
    scorer = scorers.load_scorer(save(tmp_path / "rm", 1, tokenizer), TOKENIZER, CPU)
    (prompt,) = load([{"messages": [SYSTEM, user("cat")]}])
    with pytest.raises(InputError, match="p.jsonl:1.*no system"):
        scorers.score(scorer, [(prompt, response("cat"))], 1)


THOUGHTS = """{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %} {{
m.content.split('so ')[-1] }}{% else %} {{ m.content }}{% endif %} <|end|>{% endfor %}{% if add_generation_prompt
%}<|assistant|> so {% endif %}"""


def test_an_answer_that_the_scorers_template_rewrites_is_scored_as_rewritten(tmp_path, load, capsys):
    """A template that opens a thought and omits thoughts ended a run after everything had been sampled."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = THOUGHTS
    name = save(tmp_path / "rm", 1, tokenizer)
    scorer, prompts = scorers.load_scorer(name, TOKENIZER, CPU), load([{"prompt": "cat"}, {"messages": TALK}])
    scorers.check_prompts(scorer, prompts)
    whole = scorers.score(scorer, [(prompt, response("pig so dog eel")) for prompt in prompts], 2)
    text = scorers.score(scorer, [(prompt, response("dog eel")) for prompt in prompts], 2)
    assert whole == pytest.approx(text, abs=1e-5) and whole[0] != pytest.approx(whole[1], abs=1e-3)
    assert capsys.readouterr().out.count("its chat template rewrites some responses") == 1


def test_prompts_that_a_scorer_cannot_encode_are_named_before_sampling(tmp_path, load):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template += "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    scorer = scorers.load_scorer(save(tmp_path / "rm", 1, tokenizer), TOKENIZER, CPU)
    prompts = load([{"prompt": "cat"}, {"messages": [SYSTEM, user("cat")]}])
    scorers.check_prompts(scorer, prompts[:1])
    with pytest.raises(InputError, match="p.jsonl:2.*no system"):
        scorers.check_prompts(scorer, prompts)
    with pytest.raises(InputError, match="p.jsonl:1.*128 positions"):
        scorers.check_prompts(scorer, load([{"prompt": "cat " * 125}], 200))


def test_a_response_too_long_in_the_scorers_tokens_is_scored_up_to_the_limit(other, load):
    name, tokenizer = other
    scorer, (prompt,) = scorers.load_scorer(name, TOKENIZER, CPU), load([{"prompt": "cat"}])
    room = 128 - len(prompt.ids) - 1
    scores = [scorers.score(scorer, [(prompt, response("ant " * n))], 1)[0] for n in (room, room + 9, 5)]
    assert scores[0] == scores[1] != scores[2]


def test_same_tokens_compares_vocabulary_template_and_end_token():
    template, end, words = tiny.tokenizer(), tiny.tokenizer(), tiny.tokenizer()
    template.chat_template += " "
    end.eos_token = "<|bos|>"
    words.add_tokens(["zebra"])
    for tokenizer, same in ((tiny.tokenizer(), True), (template, False), (end, False), (words, False)):
        assert scorers.same_tokens(TOKENIZER, tokenizer) is same


# -- functions -----------------------------------------------------------------------------------
@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(code, folder) -> a scorer my_scores:f, from a file in the folder, which is the current one."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(code, folder="here"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "my_scores.py").write_text(f"def f(prompts, responses, rows):\n    {code}\n")
        sys.modules.pop("my_scores", None)
        sys.path[:] = [path for path in sys.path if not path.startswith(str(tmp_path))]
        importlib.invalidate_caches()
        monkeypatch.chdir(tmp_path / folder)
        return scorers.load_scorer("my_scores:f", TOKENIZER, CPU)

    yield write
    sys.modules.pop("my_scores", None)


@pytest.mark.parametrize("name", ["score", "deviation", "gated", "gold", "chosen", "margin"])
def test_a_part_with_the_name_of_a_metric_of_the_scripts_is_refused(write, pairs, name):
    scorer = write(f"return {{'{name}': [0.0] * len(rows), 'length': [1.0] * len(rows)}}")
    with pytest.raises(InputError, match=f"reward/{name} is a metric of our own: give the part another name"):
        scorers.score(scorer, pairs, 2)


def test_a_toml_file_beside_a_function_is_part_of_it(tmp_path):
    """The questions of ai_feedback.py are in one, which users edit."""
    spec = f"{tmp_path / 'judge.py'}:f"
    (tmp_path / "judge.py").write_text("def f(rows):\n    return []\n")
    without = scorers.identity(spec)
    (tmp_path / "judge.toml").write_text("question = 'a'")
    first = scorers.identity(spec)
    (tmp_path / "judge.toml").write_text("question = 'abc'")
    assert len({str(x) for x in (without, first, scorers.identity(spec))}) == 3


def test_sys_exit_in_a_users_code_is_an_error_and_not_the_end_of_a_run(write, pairs):
    scorer = write("raise SystemExit(0)")
    with pytest.raises(InputError, match="raised in line 2, SystemExit: 0"):
        scorers.score(scorer, pairs, 2)
    with pytest.raises(InputError, match="my_scores:f: SystemExit: 3"):
        write("return []\n\nraise SystemExit(3)")


def test_a_function_of_the_current_directory_scores_texts_and_rows(write, pairs):
    with pytest.raises(InputError, match="my_scores"):
        scorers.load_scorer("my_scores:f", TOKENIZER, CPU)  # elsewhere there is none
    scorer = write("calls.append((prompts, responses, rows)); return range(len(rows))\n\ncalls = []")
    assert scorers.score(scorer, pairs, 2) == [0, 1, 0, 1, 0]
    calls = sys.modules["my_scores"].calls
    assert [len(call[0]) for call in calls] == [2, 2, 1]
    asked, said, rows = (sum(part, []) for part in zip(*calls))
    assert asked == ["copy ant cat", "cat", "copy ant cat", "first owl pig dog bear", "cat"]
    assert said == ["ant cat", "dog eel fox goat um well", "owl", "owl", "pig so"]
    assert rows[1] == {"prompt": TALK, "messages": TALK}
    assert rows[3] == {"prompt": asked[3], "more": 7, "messages": [user(asked[3])]}


@pytest.mark.parametrize("pairwise", [False, True])
def test_changes_that_a_function_makes_to_its_arguments_have_no_effect(load, pairwise):
    """A judge that appends the answer to the dialogue and scores its length."""
    (prompt,), lengths = load([{"messages": TALK, "tags": ["a"]}]), []

    def score(prompts, responses, rows):
        for row in rows:
            lengths.append(len(row["messages"]) + len(row["tags"]))
            row["messages"].append(bot("the answer"))
            row["messages"][0]["content"] = "another"
            row["tags"].append("b")
        return [0.0] * len(rows)

    def compare(duels):
        for messages, _, _ in duels:
            lengths.append(len(messages) + 1)
            messages.append(bot("the answer"))
            messages[0]["content"] = "another"
        return [0.0] * len(duels)

    compare.pairwise = True
    function = functions.Term(compare if pairwise else score, name="judge")
    judge = scorers.Scorer("judge", "judge@1", function, pairwise=pairwise)
    before = json.dumps([prompt.turns, prompt.row.data])
    scorers.score(judge, [(prompt, response(text)) for text in ("ant", "bear", "cat")], 8)
    assert lengths == [len(TALK) + 1] * 3 and json.dumps([prompt.turns, prompt.row.data]) == before


@pytest.mark.parametrize(
    "code, says",
    [
        ("return [1.0] * (len(rows) - 1)", r"returned \[1.0\], expected 2 numbers or .*: the lengths are \[1\];"),
        ("return [1.0] * 3", r"returned \[1.0, 1.0, 1.0\], expected 2 numbers .*: the lengths are \[3\]"),
        ("return {'a': [1.0] * len(rows), 'b': [1.0]}", r"returned {'a': .*: the lengths are \[2, 1\]"),
        ("return {}", r"returned {}, expected 2 numbers"),
        ("return [{'a': 1.0}] * len(rows)", r"returned \[{'a': 1.0}, .*expected 2 numbers or {part: 2 numbers}"),
        ("return None", r"returned None, expected 2 numbers"),
        ("return ['high'] * len(rows)", r"returned \['high', 'high'\], expected 2 numbers"),
        ("return ['1'] * len(rows)", r"returned \['1', '1'\], expected 2 numbers.*not text"),
        ("return '1' * len(rows)", r"returned '11', expected 2 numbers.*expected a list, not a str"),
        ("return b'1' * len(rows)", r"returned b'11', expected 2 numbers.*expected a list, not a bytes"),
        ("return {1.0 * i for i in range(len(rows))}", r"returned {0.0, 1.0}, expected .*a list, not a set"),
        ("return dict.fromkeys(range(len(rows)), 1.0).keys()", r"returned dict_keys.*a list, not a dict_keys"),
        ("return {'a': {0: 1.0, 1: 2.0}}", r"returned {'a': .*expected a list, not a dict"),
        ("return {'a': '12'}", r"returned {'a': .*expected a list, not a str"),
        ("return 1j, 2", r"returned \(1j, 2\), expected 2 numbers"),
        ("return True", r"returned True, expected 2 numbers"),
        ("import numpy\n    return numpy.float64(1)", r"returned np.float64\(1.0\), expected 2 numbers"),
        ("return [row['answer'] for row in rows]", r"raised in line 2, KeyError: 'answer'; called with .*p.jsonl:1"),
    ],
)
def test_a_functions_result_is_checked_before_anything_is_loaded(
    code, says, write, pairs, tmp_path
):
    with pytest.raises(InputError, match=f"my_scores:f {says}"):
        scorers.score(write(code), pairs, 2)
    for flags in ({"scorer": "my_scores.py:f"}, {"scorer": "tiny", "safety_scorer": "my_scores.py:f"}):
        files = {"dataset": str(tmp_path / "p.jsonl"), "output_dir": str(tmp_path / "run")}
        with pytest.raises(InputError, match=f"my_scores.py:f {says}"):
            ppo.main(ppo.Args(model="is/not/read", **flags, **files))


@pytest.mark.parametrize(
    "code",
    ["[True, 2]", "(x for x in (1, 2))", "numpy.array([1, 2])", "[numpy.float32(1), numpy.array([2])]",
     "torch.tensor([1.0, 2.0], requires_grad=True)", "torch.tensor([[1.0], [2.0]]).bfloat16()"],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_a_function_may_return_numbers_in_any_ordered_form(code, write, pairs):
    scorer = write(f"import numpy, torch\n    return {code}")
    assert scorers.score(scorer, pairs[:2], 2) == [1, 2]


def test_module_function_text_is_not_tried_because_it_may_load_a_model(load):
    args = ppo.Args(scorer="common.programs.ai_feedback:rater=runs/no_such")
    functions.try_functions(args)
    for spec, why in (
        (args.scorer, "runs/no_such"),
        (f"{args.scorer}{'x' * 300}", "runs/no_such"),
        ("common.data.tiny:gold_scorer=ant", "expected a function of one text"),
    ):
        with pytest.raises(InputError, match=why):
            scorers.load_scorer(spec, TOKENIZER, CPU)


def test_a_folder_whose_name_has_a_colon_is_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m:0").mkdir()
    assert functions.term_of("m:0") is None


def test_files_modules_texts_and_models_are_distinguished(monkeypatch):
    monkeypatch.setattr(functions, "named_function", lambda flag, spec: spec)
    for name in (r"C:\x y\a.py:f", "../c++/b.py:g", "m.n:h"):
        assert functions.term_of(name) == functions.term_of(f" {name} ") == (name, name, None)
        for text in ("org/a+b", "a*0.7+b.py:g", "x=y", "Rate it." * 40):  # longer than a file's name may be
            assert functions.term_of(f"{name}={text}") == (name, f"{name}={text}", text)
    models = ["tiny", "runs/reward", "org/a+b", r"C:\runs\reward", "../a-b.c"]
    assert [functions.term_of(name) for name in models] == [None] * 5


@pytest.mark.parametrize(
    "spec",
    ["a.py:f*0.7+b.py:g", "a.py:f+b.py:g", "a.py:f * 2", "m.n:h*-.3", " m:f + m:g", "m:f*x", "m:f+runs/reward",
     "runs/reward*0.5+m:f", "a.py:f*2+m:g=text"],
)  # fmt: skip
def test_a_sum_of_functions_is_refused_with_the_alternative(spec):
    says = f"--scorer {spec}: expected module:function or FILE.py:function, one function only: it may return "
    with pytest.raises(InputError, match=re.escape(says + "{part: numbers}, which are summed") + "$"):
        scorers.load_scorer(spec, TOKENIZER, CPU)


def test_the_functions_of_the_docs_score_and_are_logged_as_the_page_says(tmp_path, monkeypatch):
    (tmp_path / "c++ x").mkdir()
    monkeypatch.chdir(docs_functions(tmp_path / "c++ x"))
    row = Row("f:1", {"question": "how many?", "answer": "600 * 2 = 1200\n#### 1,200"})
    prompt = responses.Prompt([], [user("how many?")], row)
    texts = ["1200", "It is 2 x 600, because I counted: 1,200.", "1201", "1200 or 12", "", "because " * 90]
    asked = [(prompt, responses.Response([], text, True)) for text in texts]
    means = {"good": 0.7 * 2 / 6, "words": -0.3 * 0.5 / 6, "empty": -0.3 / 6}
    for spec, scores, parts in (
        ("gsm8k.py:correct", [1, 1, 0, 0, 0, 0], {}),
        (f" {tmp_path}/c++ x/myreward.py:good", [0, 1, 0, 0, 0, 1], {}),
        ("myreward.py:both", [0, 0.7, 0, 0, -0.3, 0.55], means),
    ):
        scorer = scorers.load_scorer(spec, TOKENIZER, CPU)
        for size in (4, 64):
            assert scorers.score(scorer, asked, size) == pytest.approx(scores)
            got = scorers.score_and_parts(scorer, asked, size)[1]
            assert got == pytest.approx({f"reward/{name}": x for name, x in parts.items()})


def test_a_function_that_raises_is_named_with_the_exception_and_the_batchs_first_row(write, pairs):
    scorer = write("return [1 / ('so' not in r) for r in responses]")
    with pytest.raises(InputError) as error:
        scorers.score(scorer, [pairs[0], pairs[3], pairs[4], pairs[1]], 2)  # the first of the second two
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    says = str(error.value)
    assert all(
        x in says for x in ("my_scores:f", "ZeroDivisionError: ", "'pig so'", "'cat'", "(p.jsonl:2, columns ")
    )
    assert "p.jsonl:3" not in says and "owl" not in says  # of the first batch


@pytest.mark.parametrize(
    "spec",
    """no_such_module:f common.data.tiny:no_such common.data.tiny.no:f math.py:sqrt common:no common.data.tiny:RIGHT lacks.py:f
    broken.py:f broken.py""".split(),
)
def test_an_unknown_module_or_function_is_an_error_that_names_the_form(spec, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lacks.py").write_text("import numpy\nimport no_such_package\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    why = {"lacks.py:f": ": .*named 'no_such_package';", "broken.py:f": ": SyntaxError: .*line 1.;"}
    why = why.get(spec, "(: .*(no|No such file).*;| is float,|:)")
    with pytest.raises(InputError, match=f"--scorer {re.escape(spec)}{why} expected module:function"):
        scorers.load_scorer(spec, TOKENIZER, CPU)


def test_the_version_changes_with_the_functions_file(write, tmp_path, monkeypatch):
    """Also if another function of the file changes, which this one may call, but not with the file's folder."""
    versions = [write("return [0.0]", "a").version, write("return [0.0]", "b").version]
    versions.append(write("return [1.0]", "c").version)
    assert versions[0] == versions[1] != versions[2]
    assert all(version.startswith("my_scores:f@") for version in versions)
    text = "def f(prompts, responses, rows):\n    return helper(prompts)\n\n\ndef helper(x):\n    return [{}] * len(x)\n"
    for name, x in (("one", 1.0), ("same", 1.0), ("helper", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "s.py").write_text(text.format(x))
    one, same, helper = (scorers.version_of(f"{tmp_path / name}/s.py:f") for name in ("one", "same", "helper"))
    texts = [scorers.version_of(f"{tmp_path / 'one'}/s.py:f={text}") for text in ("a", "b")]
    assert one == same and len({one, helper, *texts}) == 4


# -- what compares two responses -----------------------------------------------------------------
BEATS = {("ant", "cat"): 3 / 4, ("cat", "dog"): 9 / 10, ("dog", "ant"): 3 / 4}  # in a circle
BEATS |= {("bear", "eel"): 1 / 4}
BEATS |= {(b, a): 1 - p for (a, b), p in BEATS.items()}


def oracle_of(function):
    function.pairwise = True
    return scorers.Scorer("oracle", "oracle@1", functions.Term(function, name="oracle"), pairwise=True)


def test_a_response_scores_its_mean_probability_to_beat_the_prompts_other_ones(load):
    """ant beats cat by 3/4 and dog by 1/4: 1/2. cat: (1/4 + 9/10) / 2. dog: (1/10 + 3/4) / 2. A prompt's
    only response has nothing to beat: 1/2."""
    calls = []

    def beats(duels):
        calls.append(duels)
        return [math.log(BEATS[a, b] / (1 - BEATS[a, b])) for _, a, b in duels]

    a, b, c = load([{"prompt": "copy ant"}, {"prompt": "first bear cat"}, {"prompt": "rest dog eel"}])
    texts = [(a, "ant"), (b, "bear"), (a, "cat"), (c, "goat"), (b, "eel"), (a, "dog")]
    got = scorers.score(oracle_of(beats), [(prompt, response(text)) for prompt, text in texts], 3)
    assert got == pytest.approx([0.5, 0.25, 0.575, 0.5, 0.75, 0.425])
    assert [len(call) for call in calls] == [3, 1]
    duels = sum(calls, [])
    assert [turns for turns, _, _ in duels] == [a.turns] * 3 + [b.turns]
    assert len({frozenset(duel[1:]) for duel in duels}) == 4


@pytest.mark.parametrize(
    "odds, says",
    [
        ([math.nan], "returned nan for 'ant', the response to"),
        ([1e39], "returned 1e.39 for 'ant', the response to"),  # infinite in float32
        ([None], "expected 1 numbers"),
        ([1, 1], "the lengths are .2."),
    ],
)
def test_impossible_log_odds_are_an_error_that_names_the_oracle(odds, says, load):
    (prompt,) = load([{"prompt": "copy ant"}])
    oracle = oracle_of(lambda duels: odds)
    with pytest.raises(InputError, match=f"oracle.* {says}"):
        scorers.score(oracle, [(prompt, response("ant")), (prompt, response("cat"))], 8)


def test_numbers_that_are_not_finite_are_refused_in_the_trial(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "p.jsonl", [{"prompt": "copy ant"}])
    for name, value in (("nan", "float('nan')"), ("inf", "float('inf')")):
        (tmp_path / f"{name}.py").write_text(f"def f(prompts, responses, rows):\n    return [1.0, {value}]\n")
        with pytest.raises(InputError, match=f"{name}.py:f returned .*{name}.*not finite numbers"):
            functions.try_functions(ppo.Args(scorer=f"{name}.py:f", dataset="p.jsonl"))


def test_a_pairwise_function_is_tried_and_refused_where_single_scores_are_needed(tmp_path, monkeypatch):
    monkeypatch.chdir(docs_functions(tmp_path))
    write_rows(tmp_path / "p.jsonl", [{"prompt": "copy ant"}])
    spec = "shorter.py:shorter"
    functions.try_functions(ppo.Args(scorer=spec, dataset="p.jsonl"))
    (prompt,) = prompt_sets.load_prompts("p.jsonl", "train", TOKENIZER, 64)
    scorer = scorers.load_scorer(spec, TOKENIZER, CPU, pairwise=True)
    assert scorer.pairwise
    duels = [(prompt, response("ant bear"), response("ant")), (prompt, response("ant"), response("owl"))]
    assert scorers.log_odds(scorer, duels, 8) == [-0.5, 0.0]
    with pytest.raises(InputError, match="compares two responses and cannot score one"):
        scorers.load_scorer(spec, TOKENIZER, CPU)


def test_a_pairwise_preference_model_is_evaluated_in_both_orders(tmp_path, load):
    policy = dist.shard(pretrained.load_policy("tiny", TOKENIZER), CPU)
    with torch.no_grad():  # far from uniform, so that orders and letters differ
        for parameter in policy.parameters():
            parameter.mul_(4 if parameter.ndim == 2 else 1)
    checkpoints.save_model(policy, TOKENIZER, tmp_path)
    name = f"common.programs.pairwise:oracle={tmp_path}"
    scorer = scorers.load_scorer(name, TOKENIZER, CPU, pairwise=True)
    assert scorer.pairwise and scorer.version.startswith("common.programs.pairwise:oracle@")
    a, b = load([{"prompt": "copy ant"}, {"prompt": "first bear cat"}])
    texts = [(a, "ant"), (a, "bear cat"), (b, "bear"), (a, "dog"), (b, "cat")]
    pairs = [(prompt, response(text, text != "dog")) for prompt, text in texts]  # one was cut
    got = scorers.score(scorer, pairs, 2)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    letters = TOKENIZER.convert_tokens_to_ids(["A", "B"])

    def beats(prompt, first, second):
        """Both orders by plain transformers, on the text as written in the paper."""
        found = []
        for x, y in ((first, second), (second, first)):
            text = (
                f"<|bos|> <|user|> [CONTEXT] {prompt} [RESPONSE A] {x} [RESPONSE B] {y} <|end|> <|assistant|>"
            )
            ids = torch.tensor([TOKENIZER.convert_tokens_to_ids(text.split())])
            with torch.no_grad():
                found.append(torch.softmax(plain(input_ids=ids).logits[0, -1, letters], -1)[0].item())
        return (found[0] + 1 - found[1]) / 2

    p, q, r = (beats("copy ant", *two) for two in (("ant", "bear cat"), ("ant", "dog"), ("bear cat", "dog")))
    s = beats("first bear cat", "bear", "cat")
    want = [(p + q) / 2, (1 - p + r) / 2, s, (1 - q + 1 - r) / 2, 1 - s]
    assert got == pytest.approx(want, abs=1e-5)
    assert max(abs(x - 0.5) for x in want) > 0.02  # 1/2 for all would not do


def test_a_scorer_reads_the_end_token_of_the_template_whatever_ended_the_response(tmp_path):
    other, name = TOKENIZER.convert_tokens_to_ids("<|unk|>"), str(tmp_path / "rm")
    checkpoints.save_model(dist.shard(pretrained.load_scorer("tiny", TOKENIZER, 1), CPU), TOKENIZER, name)
    scorer = scorers.load_scorer(name, TOKENIZER, CPU)
    asked = responses.Prompt([1, 4, 9], [user("ant")], None)
    ways = [([20, EOS], True), ([20, other], True), ([20], False), ([20, other], False), ([20, EOS], False)]
    given = [responses.Response(ids, "", ended) for ids, ended in ways]
    encoded = [scorers._encode(scorer, asked, response, [EOS]) for response in given]
    found = [c.response_ids[0].tolist() for c in encoded]
    assert found == [[20, EOS], [20, EOS], [20, EOS], [20, other, EOS], [20, EOS]]


# -- versions ------------------------------------------------------------------------------------
def test_every_rank_uses_rank_0s_version(monkeypatch):
    """Only rank 0 reads the files, which are large."""
    monkeypatch.setattr(dist, "gather", lambda values: ["a@of rank 0", *values])
    monkeypatch.setattr(dist, "is_main", lambda: False)
    assert scorers.version_of("no/such/model") == "a@of rank 0"
