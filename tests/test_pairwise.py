"""common/pairwise.py and common/train_pairwise.py: what the model reads, which token it learns, both orders at
inference, and a run."""

import math
import types

import pytest
import torch
from scorers import (
    HELD_OUT, Gradients, assert_error, assert_same_result, column, make_small, named, read_json, run,
    succeeds,
)  # fmt: skip
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as backends
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, PreTrainedTokenizerFast

from common import comparisons, data, dist, loading, pairwise, tiny, train_pairwise
from common.batches import Row, labelled_pairs
from common.errors import InputError
from common.metrics import read_jsonl
from common.run import parse

PROMPT = [{"role": "user", "content": "copy ant"}]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


@pytest.fixture(scope="module")
def policy(tokenizer):
    model = loading.load_policy("tiny", tokenizer)
    with torch.no_grad():  # far from uniform, and so from 1/2 whatever the order
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim == 2 else 1)
    return model


def comparison(tokenizer, number=1, **row):
    return comparisons._comparison(Row(f"f:{number}", row), tokenizer, 64, 0.0)


@pytest.fixture(scope="module")
def labelled(tokenizer):
    words = tiny.ANIMALS
    pairs = [
        comparison(tokenizer, i, prompt=f"copy {a}", chosen=f"{a} {b}" if i % 2 else a, rejected=b)
        for i, (a, b) in enumerate(zip(words, words[1:]))
    ]
    ranked = [{"text": "ant", "score": 3}, {"text": "bear", "score": 1}, {"text": "cat cat", "score": 1}]
    return [*pairs, comparison(tokenizer, prompt="first ant", responses=ranked)]


@pytest.mark.parametrize("letter", ["A", "B"])
def test_document_has_loss_on_the_letter_alone(letter, tokenizer):
    d = pairwise.document(tokenizer, PROMPT, "ant", "cat cat", letter)
    words = "<|bos|> <|user|> [CONTEXT] copy ant [RESPONSE A] ant [RESPONSE B] cat cat <|end|> <|assistant|>"
    assert tokenizer.convert_ids_to_tokens(d.ids.tolist()) == [*words.split(), letter]  # and no end token
    assert d.response_mask.tolist() == [False] * (len(d.ids) - 1) + [True]
    talk = [*PROMPT, {"role": "assistant", "content": "ant"}, {"role": "user", "content": "again"}]
    text = "[CONTEXT] user: copy ant\nassistant: ant\nuser: again [RESPONSE A] x [RESPONSE B] y"
    assert pairwise.document(tokenizer, talk, "x", "y").messages[0]["content"] == text


def test_a_letter_that_is_no_single_token_is_an_error(tokenizer):
    for letter in ("zebra", "ant cat"):  # unknown; two tokens
        with pytest.raises(ValueError, match="is not one token"):
            pairwise.document(tokenizer, PROMPT, "ant", "cat", letter)


# -- usable ----------------------------------------------------------------------------------------
def test_usable_drops_ties_and_long_pairs_and_says_so(tokenizer, capsys):
    good = comparison(tokenizer, prompt="copy ant", chosen="ant", rejected="cat")
    tie = comparison(tokenizer, 2, prompt="copy ant", chosen="ant", rejected="cat", preference=0.5)
    long = comparison(tokenizer, 3, prompt="copy ant", chosen="ant " * 9, rejected="cat")
    ranking = [{"text": "ant", "score": 2}, {"text": "cat", "score": 1}, {"text": "dog " * 9, "score": 0}]
    one_long = comparison(tokenizer, 4, prompt="copy ant", responses=ranking)
    length = len(pairwise.document(tokenizer, PROMPT, "ant", "cat").ids)
    assert pairwise.usable([good, tie, long, one_long], tokenizer, length, "name") == [good]
    printed = capsys.readouterr().out
    assert "name, as pairs: dropped 3 of 4 rows" in printed and "1: a tie (f:2)" in printed
    assert f"2: longer than {length} tokens (--max-length) (f:3, f:4)" in printed
    with pytest.raises(InputError, match="none of its .* can be used: .*tokens"):
        pairwise.usable([good], tokenizer, length - 1, "name")


# -- documents and batches ---------------------------------------------------------------------------
def words_of(documents, tokenizer):
    """(words, letter) of each document."""
    rows = [tokenizer.convert_ids_to_tokens(d.ids.tolist()) for d in documents]
    return [(" ".join(row[:-1]), row[-1]) for row in rows]


def test_every_labelled_pair_is_there_once_with_the_letter_of_the_better_one(labelled, tokenizer):
    written = words_of(pairwise.documents(labelled, tokenizer, seed=0), tokenizer)
    expected = {}
    for c in labelled:
        for i, j in labelled_pairs(c):
            for a, b, letter in ((i, j, "A"), (j, i, "B")):
                [(text, _)] = words_of(
                    [pairwise.document(tokenizer, c.prompt, c.texts[a], c.texts[b])], tokenizer
                )
                expected[text] = letter
    assert len(written) == 19 + 2  # the ranking has two pairs, its tie none
    assert all(expected[text] == letter for text, letter in written)


def test_order_is_drawn_at_random_from_the_seed(labelled, tokenizer):
    first, again, other = (
        [letter for _, letter in words_of(pairwise.documents(labelled * 20, tokenizer, seed), tokenizer)]
        for seed in (0, 0, 1)
    )
    assert first == again != other
    share = first.count("A") / len(first)  # of 420
    assert abs(share - 0.5) < 4 * math.sqrt(0.25 / len(first))


@pytest.mark.parametrize("size", [1, 5, 100])
def test_an_update_of_packed_documents_has_the_loss_and_gradient_of_separate_ones(size, labelled, tokenizer):
    documents = pairwise.documents(labelled, tokenizer, seed=0)
    policy, plain = (loading.load_policy("tiny", tokenizer) for _ in range(2))
    optimizer = Gradients(policy)
    args = train_pairwise.Args(micro_batch_size=size, max_grad_norm=0.0)
    loss, accuracy, _ = train_pairwise.update(policy, optimizer, documents, args)
    nll, right = [], []
    for d in documents:
        logprobs = plain(input_ids=d.ids[None, :-1].long()).logits[0, -1].log_softmax(-1)
        nll.append(-logprobs[d.ids[-1]])
        right.append(nll[-1].item() < math.log(2))
    (sum(nll) / len(nll)).backward()
    assert loss == pytest.approx(sum(nll).item() / len(nll), abs=1e-4)
    assert accuracy == sum(right) / len(right)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(optimizer.gradients[name], parameter.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("world, size", [(2, 4), (4, 3), (3, 100)])
def test_ranks_share_the_documents_in_equally_many_batches(
    world, size, labelled, tokenizer, policy, monkeypatch
):
    documents = pairwise.documents(labelled, tokenizer, seed=0)
    of_ranks, counts = [], set()
    for rank in range(world):
        monkeypatch.setattr(dist, "rank", lambda: rank)
        monkeypatch.setattr(dist, "world_size", lambda: world)
        batches = list(pairwise.my_packed_batches(documents, policy, size))
        counts.add(len(batches))
        of_ranks += [document for batch in batches for document in batch.documents]
        assert all(batch.action_mask.sum() == len(batch.documents) <= size for batch in batches)
    assert len(counts) == 1 and sorted(words_of(of_ranks, tokenizer)) == sorted(
        words_of(documents, tokenizer)
    )


# -- preferences -----------------------------------------------------------------------------------
def plain(policy, tokenizer, a, b):
    """p(A) / (p(A) + p(B)) by transformers' own forward."""
    d = pairwise.document(tokenizer, PROMPT, a, b)
    with torch.no_grad():
        p = policy(input_ids=d.ids[None, :-1].long()).logits[0, -1].double().softmax(-1)
    x, y = (p[tokenizer.convert_tokens_to_ids(letter)].item() for letter in "AB")
    return x / (x + y)


PAIRS = [(PROMPT, "ant", "cat"), (PROMPT, "ant bear cat dog", "owl"), (PROMPT, "fox", "um um so")]


@pytest.mark.parametrize("size", [1, 4, 100])
def test_preferences_are_the_log_odds_of_both_orders_averaged(size, policy, tokenizer):
    got = pairwise.preferences(policy, tokenizer, PAIRS, size)
    for value, (_, a, b) in zip(got, PAIRS, strict=True):
        first, second = plain(policy, tokenizer, a, b), 1 - plain(policy, tokenizer, b, a)
        p = (first + second) / 2
        assert value == pytest.approx(math.log(p / (1 - p)), abs=1e-4)
        one_order, log_odds = (
            math.log(first / (1 - first)),
            (math.log(first / (1 - first) * second / (1 - second))) / 2,
        )
        assert abs(value - one_order) > 1e-2 and abs(log_odds - value) > 1e-6


def fake(tokenizer, logprobs_of):
    """A model whose log p(A) and log p(B) after a text are logprobs_of(text)."""
    letters = [tokenizer.convert_tokens_to_ids(x) for x in "AB"]

    def next_token_logprobs(input_ids, where):
        out = torch.full((where.shape[1], len(tokenizer)), -1e4)
        for i, (row, end) in enumerate(where.T.tolist()):
            out[i, letters] = torch.tensor(logprobs_of(tokenizer.decode(input_ids[row, : end + 1])))
        return out

    return types.SimpleNamespace(next_token_logprobs=next_token_logprobs, device="cpu", config=GPT2Config())


@pytest.mark.parametrize("size", [1, 2])
def test_preferences_by_hand_with_a_model_that_favours_a_place(size, tokenizer):
    """p(A) : p(B) is 8 : 1 when cat cat stands first and 1 : 2 when ant does, so that P(cat cat beats ant) =
    (8/9 + 2/3) / 2 = 7/9, odds of 3.5."""

    def logprobs_of(text):
        assert text.endswith("<|assistant|>")  # read where the letter comes next
        return math.log(0.4 if "A] cat" in text else 0.025), math.log(0.05)

    pairs = [(PROMPT, "cat cat", "ant"), (PROMPT, "ant", "cat cat")]
    got = pairwise.preferences(fake(tokenizer, logprobs_of), tokenizer, pairs, size)
    assert got == pytest.approx([math.log(3.5), -math.log(3.5)], abs=1e-5)


def test_preferences_stay_finite_when_the_model_is_certain(tokenizer):
    certain = fake(tokenizer, lambda text: (0.0, -1e4) if "A] cat" in text else (-1e4, 0.0))
    (value,) = pairwise.preferences(certain, tokenizer, [(PROMPT, "cat", "ant")], 4)
    assert math.isfinite(value) and value > 20
    assert pairwise.preferences(certain, tokenizer, [], 4) == []


# -- chat templates that write more around an answer than its text ------------------------------------
CHATML = "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
TEMPLATES = {  # template, opening of an answer, end of the prompt
    "chatml": (CHATML, "<start>assistant\n"),
    "thoughts, as Qwen3": (
        CHATML.replace("{{ m.c", "{{ '<think>\n\n</think>\n\n' if m.role != 'user' }}{{ m.c"),
        "<start>assistant\n",
    ),
    "a second end token, as Phi": (CHATML + "{% if not add_generation_prompt %}<end>{% endif %}", "<start>"),
    "a space, as Llama 2": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }} <end>{% endif %}{% endfor %}",
        "",
    ),
}


def bytes_tokenizer(template, opening):
    """Single bytes, and a space with A or B."""
    tokens = ["<pad>", "<start>", "<end>", "<unk>", "ĠA", "ĠB", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(backends.BPE(vocab=vocabulary, merges=[("Ġ", "A"), ("Ġ", "B")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "bos_token": "<start>", "eos_token": "<end>", "unk_token": "<unk>"}
    result = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    result.chat_template = template + "{% if add_generation_prompt %}" + opening + "{% endif %}"
    return result


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_letter_follows_the_opening_of_an_answer_whatever_the_template_writes_around_it(name):
    """And a model that puts all its weight on the letters' tokens of the documents prefers the first."""
    words = bytes_tokenizer(*TEMPLATES[name])
    text = "[CONTEXT] copy ant [RESPONSE A] x [RESPONSE B] y"
    question = [{"role": "user", "content": text}]
    for letter in "AB":
        ids = pairwise.document(words, PROMPT, "x", "y", letter).ids.tolist()
        assert ids == [*data.prompt_ids(words, question), words.convert_tokens_to_ids(letter)]

    model = fake(words, lambda text: (0.0, -20.0) if "A] x" in text else (-20.0, 0.0))
    (value,) = pairwise.preferences(model, words, [(PROMPT, "x", "y")], 4)
    assert value > 10


def test_texts_longer_than_the_positions_of_the_model_are_an_error():
    fake = types.SimpleNamespace(config=GPT2Config(n_positions=9))
    with pytest.raises(ValueError, match="the model has 9 positions"):
        pairwise.preferences(fake, tiny.tokenizer(), [(PROMPT, "ant", "cat")], 4)


# -- a run -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def small(tmp_path_factory):
    small = make_small(tmp_path_factory.mktemp("small"))
    options = {k: v for k, v in small.options.items() if k not in ("length_prompts", "max_new_tokens")}
    return types.SimpleNamespace(folder=small.folder, options={**options, "max_length": 96})


def test_a_run_is_a_causal_lm_with_differences_in_its_samples(small, tmp_path):
    succeeds(run("common.train_pairwise", small, tmp_path, lr=3e-3, plots=True))
    assert read_json(tmp_path / "args.json")["stage"] == "train_pairwise"
    model, words = (x.from_pretrained(tmp_path / "model") for x in (AutoModelForCausalLM, AutoTokenizer))
    start, saved = tiny.model(0).state_dict(), model.state_dict()
    assert set(start) == set(saved) and not [name for name in start if torch.equal(start[name], saved[name])]
    assert model.config.preference_model and loading.is_preference_model(str(tmp_path))
    samples = read_jsonl(tmp_path / "samples.jsonl")
    apart = [d for sample in samples for d in sample["differences"]]
    assert len(apart) == HELD_OUT and "score" not in samples[0]["responses"][0]
    accuracy = sum((d > 0) + (d == 0) / 2 for d in apart) / HELD_OUT
    assert column(tmp_path, "eval/accuracy")[-1] == accuracy and len(column(tmp_path, "eval/nll")) == 4
    assert len(column(tmp_path, "baseline/length_accuracy")) == 1
    letters = [words.convert_tokens_to_ids(x) for x in "AB"]
    for sample in samples[:5]:
        texts, prompt, p = [r["text"] for r in sample["responses"]], sample["prompt"][0]["content"], []
        for a, b in (texts, texts[::-1]):
            text = f"[CONTEXT] {prompt} [RESPONSE A] {a} [RESPONSE B] {b}"
            x = torch.tensor([data.prompt_ids(words, [{"role": "user", "content": text}])])
            p.append(torch.softmax(model(input_ids=x).logits[0, -1, letters], -1)[0].item())
        mean = (p[0] + 1 - p[1]) / 2
        assert sample["differences"] == [pytest.approx(math.log(mean / (1 - mean)), abs=1e-4)]
    assert (tmp_path / "scores.png").exists() and (tmp_path / "summary.json").exists()


def test_a_run_that_was_killed_resumes_to_the_same_bits(small, tmp_path):
    succeeds(run("common.train_pairwise", small, tmp_path / "whole"))
    assert run("common.train_pairwise", small, tmp_path / "killed", moment="row 5").code == -9
    succeeds(run("common.train_pairwise", small, tmp_path / "killed", "--resume"))
    assert_same_result(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"model": "reward model"}, ["reward model", "causal"]),
        ({"max_length": 12}, ["12 tokens", "--max-length"]),
        ({"max_length": 256}, ["--max-length 256", "128 positions"]),
        ({"margin": "small"}, ["--margin"]),
        ({"batch_size": 0}, ["--batch-size 0"]),
    ],
    ids=named,
)
def test_bad_input_is_one_line_that_says_what_and_where(small, tokenizer, tmp_path, options, words):
    for part in (loading.load_scorer("tiny", tokenizer, 1), tokenizer) if "model" in options else ():
        part.save_pretrained(tmp_path / "reward model")
    assert_error(run("common.train_pairwise", small, tmp_path / "run", cwd=tmp_path, **options), *words)
    assert not (tmp_path / "run").exists()


def test_recipes_have_the_papers_numbers():
    args = parse(train_pairwise.RECIPES, ["rlhf_workflow"])
    assert (args.lr, args.batch_size, args.max_length, args.epochs) == (5e-6, 128, 3072, 1.0)
    assert list(train_pairwise.RECIPES) == ["tiny", "base", "rlhf_workflow"]
