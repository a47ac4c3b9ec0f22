"""common/pairwise.py: what the model reads, which token it learns, and both orders at inference."""

import math
import types

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as backends
from transformers import PreTrainedTokenizerFast

from common import comparisons, data, dist, losses, models, pairwise, tiny
from common.batches import Row, labelled_pairs
from common.errors import InputError

PROMPT = [{"role": "user", "content": "copy ant"}]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


@pytest.fixture(scope="module")
def policy(tokenizer):
    model = models.load_policy("tiny", tokenizer)
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


def test_instruction_is_the_papers_text():
    assert pairwise.instruction(PROMPT, "x y", "z") == "[CONTEXT] copy ant [RESPONSE A] x y [RESPONSE B] z"
    talk = [*PROMPT, {"role": "assistant", "content": "ant"}, {"role": "user", "content": "again"}]
    text = "[CONTEXT] user: copy ant\nassistant: ant\nuser: again [RESPONSE A] x [RESPONSE B] y"
    assert pairwise.instruction(talk, "x", "y") == text


@pytest.mark.parametrize("letter", ["A", "B"])
def test_document_has_loss_on_the_letter_alone(letter, tokenizer):
    d = pairwise.document(tokenizer, PROMPT, "ant", "cat cat", letter)
    words = "<|bos|> <|user|> [CONTEXT] copy ant [RESPONSE A] ant [RESPONSE B] cat cat <|end|> <|assistant|>"
    assert tokenizer.convert_ids_to_tokens(d.ids.tolist()) == [*words.split(), letter]  # and no end token
    assert d.response_mask.tolist() == [False] * (len(d.ids) - 1) + [True]


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
    with pytest.raises(InputError, match="no pair can be used: .*tokens"):
        pairwise.usable([good], tokenizer, length - 1, "name")


# -- batches ---------------------------------------------------------------------------------------
def contents(batches, tokenizer):
    """The documents of some batches as (words, letter), in no order."""
    found = []
    for batch in batches:
        for ids, positions in zip(batch.input_ids, batch.position_ids):
            starts = [i for i, x in enumerate(positions.tolist()) if x == 0] + [len(ids)]
            for start, end in zip(starts, starts[1:]):
                words = tokenizer.convert_ids_to_tokens(ids[start:end].tolist())
                while words[-1] == "<|pad|>":
                    words.pop()
                found.append((" ".join(words[:-1]), words[-1]))
    return sorted(found)


def test_every_labelled_pair_is_there_once_with_the_letter_of_the_better_one(labelled, tokenizer):
    found = contents(pairwise.batches(labelled, tokenizer, torch.Generator(), 8, "cpu"), tokenizer)
    expected = {}
    for c in labelled:
        for i, j in labelled_pairs(c):
            for a, b, letter in ((i, j, "A"), (j, i, "B")):
                document = pairwise.document(tokenizer, c.prompt, c.texts[a], c.texts[b])
                words = tokenizer.convert_ids_to_tokens(document.ids.tolist()[:-1])
                expected[" ".join(words)] = letter
    assert len(found) == 19 + 2  # the ranking has two pairs, its tie none
    assert all(expected[text] == letter for text, letter in found)


def test_order_is_drawn_at_random_from_the_generator(labelled, tokenizer):
    def letters(seed):
        generator = torch.Generator().manual_seed(seed)
        batches = pairwise.batches(labelled * 20, tokenizer, generator, 64, "cpu")
        return [letter for _, letter in contents(batches, tokenizer)]

    first = letters(0)
    assert first == letters(0) != letters(1)
    share = first.count("A") / len(first)  # of 420
    assert abs(share - 0.5) < 4 * math.sqrt(0.25 / len(first))


@pytest.mark.parametrize("size", [1, 5, 100])
def test_loss_of_packed_documents_is_that_of_separate_ones(size, labelled, tokenizer, policy):
    n = 21
    total = 0.0
    for batch in pairwise.batches(labelled, tokenizer, torch.Generator().manual_seed(0), size, "cpu"):
        with torch.no_grad():
            logprobs = policy.token_logprobs(batch.input_ids, batch.action_mask, batch.position_ids)
        assert batch.action_mask.sum() <= size
        total += losses.sft_loss(logprobs, batch.action_mask, n_tokens=n)[0].item()
    packed = pairwise.batches(labelled, tokenizer, torch.Generator().manual_seed(0), size, "cpu")
    expected = 0.0
    for text, letter in contents(packed, tokenizer):
        ids = torch.tensor([tokenizer.convert_tokens_to_ids(text.split())])
        with torch.no_grad():
            logits = policy(input_ids=ids).logits[0, -1].double()
        expected -= logits.log_softmax(-1)[tokenizer.convert_tokens_to_ids(letter)].item() / n
    assert total == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("world, size", [(2, 4), (4, 3), (3, 100)])
def test_ranks_share_the_documents_in_equally_many_batches(world, size, labelled, tokenizer, monkeypatch):
    def batches():
        return list(pairwise.batches(labelled, tokenizer, torch.Generator().manual_seed(0), size, "cpu"))

    whole, parts, counts = batches(), [], set()
    for rank in range(world):
        monkeypatch.setattr(dist, "rank", lambda: rank)
        monkeypatch.setattr(dist, "world_size", lambda: world)
        mine = batches()
        counts.add(len(mine))
        parts += contents((b for b in mine if b.action_mask.any()), tokenizer)
    assert len(counts) == 1 and sorted(parts) == contents(whole, tokenizer)


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
    got = pairwise.preferences(policy, tokenizer, PAIRS, size, "cpu")
    for value, (_, a, b) in zip(got, PAIRS, strict=True):
        first, second = plain(policy, tokenizer, a, b), 1 - plain(policy, tokenizer, b, a)
        p = (first + second) / 2
        assert value == pytest.approx(math.log(p / (1 - p)), abs=1e-4)
        one_order, log_odds = (
            math.log(first / (1 - first)),
            (math.log(first / (1 - first) * second / (1 - second))) / 2,
        )
        assert abs(value - one_order) > 1e-2 and abs(log_odds - value) > 1e-6


def test_exchanging_the_responses_negates_the_log_odds(policy, tokenizer):
    forth = pairwise.preferences(policy, tokenizer, PAIRS, 3, "cpu")
    back = pairwise.preferences(policy, tokenizer, [(p, b, a) for p, a, b in PAIRS], 3, "cpu")
    assert max(map(abs, forth)) > 0.01
    assert back == pytest.approx([-x for x in forth], abs=1e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_preferences_by_hand_with_a_model_that_favours_a_place(size, tokenizer):
    """p(A) : p(B) is 8 : 1 when cat cat stands first and 1 : 2 when ant does, so that P(cat cat beats ant) =
    (8/9 + 2/3) / 2 = 7/9, odds of 3.5."""
    a, b = (tokenizer.convert_tokens_to_ids(x) for x in "AB")

    def next_token_logprobs(input_ids, where):
        out = torch.full((where.shape[1], len(tokenizer)), -5.0)
        for i, (row, column) in enumerate(where.T.tolist()):
            words = tokenizer.convert_ids_to_tokens(input_ids[row, : column + 1].tolist())
            assert words[-1] == "<|assistant|>"  # read where the letter comes next
            cat_first = words[words.index("A]") + 1] == "cat"
            out[i, a], out[i, b] = math.log(0.4 if cat_first else 0.025), math.log(0.05)
        return out

    fake = types.SimpleNamespace(next_token_logprobs=next_token_logprobs)
    got = pairwise.preferences(
        fake, tokenizer, [(PROMPT, "cat cat", "ant"), (PROMPT, "ant", "cat cat")], size, "cpu"
    )
    assert got == pytest.approx([math.log(3.5), -math.log(3.5)], abs=1e-5)


def test_preferences_stay_finite_when_the_model_is_certain(tokenizer):
    letters = [tokenizer.convert_tokens_to_ids(x) for x in "AB"]

    def next_token_logprobs(input_ids, where):
        out = torch.full((where.shape[1], len(tokenizer)), -1e4)
        for i, (row, column) in enumerate(where.T.tolist()):
            words = tokenizer.convert_ids_to_tokens(input_ids[row, : column + 1].tolist())
            out[i, letters[words[words.index("A]") + 1] != "cat"]] = 0.0
        return out

    fake = types.SimpleNamespace(next_token_logprobs=next_token_logprobs)
    (value,) = pairwise.preferences(fake, tokenizer, [(PROMPT, "cat", "ant")], 4, "cpu")
    assert math.isfinite(value) and value > 20
    assert pairwise.preferences(fake, tokenizer, [], 4, "cpu") == []


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
    question = [{"role": "user", "content": pairwise.instruction(PROMPT, "x", "y")}]
    for letter in "AB":
        ids = pairwise.document(words, PROMPT, "x", "y", letter).ids.tolist()
        assert ids == [*data.prompt_ids(words, question), words.convert_tokens_to_ids(letter)]

    def next_token_logprobs(input_ids, where):
        out = torch.full((where.shape[1], len(words)), -20.0)
        for i, (row, column) in enumerate(where.T.tolist()):
            first = "A] x" in words.decode(input_ids[row, : column + 1])
            out[i, words.convert_tokens_to_ids("A" if first else "B")] = 0.0
        return out

    fake = types.SimpleNamespace(next_token_logprobs=next_token_logprobs)
    (value,) = pairwise.preferences(fake, words, [(PROMPT, "x", "y")], 4, "cpu")
    assert value > 10


def test_texts_longer_than_the_positions_of_the_model_are_an_error():
    config = types.SimpleNamespace(get_text_config=lambda: types.SimpleNamespace(max_position_embeddings=9))
    fake = types.SimpleNamespace(config=config)
    with pytest.raises(ValueError, match="the model has 9 positions"):
        pairwise.preferences(
            fake, tiny.tokenizer(), [([{"role": "user", "content": "copy ant"}], "ant", "cat")], 4, "cpu"
        )
