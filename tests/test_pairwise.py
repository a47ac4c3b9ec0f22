"""common/programs/pairwise.py: the rows that it writes, the training of sft.py on them, and the preferences
of a model between two responses, in both orders."""

import json
import math
from types import SimpleNamespace

import processes
import pytest
import torch
from processes import flags
from helpers import CPU, HELD_OUT, PAIRS, TALK, TOKENIZER, make_small, read_json, succeeds, user
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as backends
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from common.batches import Row, labelled_pairs
from common.errors import InputError
from common.data import chat, comparisons, demonstrations, tiny
from common.data.files import read_jsonl
from common.scoring import next_token
from common.programs import ai_feedback, evaluate, pairwise

PROMPT = [user("copy ant")]


def comparison(number=1, **row):
    c = comparisons._labelled(Row(f"f:{number}", row), 0.0)
    return comparisons._with_ids(c, *chat.encode_responses(TOKENIZER, c.prompt, c.texts), 64)


@pytest.fixture(scope="module")
def labelled():
    """19 pairs, a tie, and a ranking with two pairs and a tie."""
    words = tiny.ANIMALS
    pairs = [
        comparison(i, prompt=f"copy {a}", chosen=f"{a} {b}" if i % 2 else a, rejected=b)
        for i, (a, b) in enumerate(zip(words, words[1:]))
    ]
    tie = comparison(prompt="copy ant", chosen="ant", rejected="cat", preference=0.5)
    ranked = [{"text": "ant", "score": 3}, {"text": "bear", "score": 1}, {"text": "cat cat", "score": 1}]
    return [*pairs, tie, comparison(prompt="first ant", responses=ranked)]


# -- rows ------------------------------------------------------------------------------------------
def test_a_dialogue_is_written_as_lines_with_roles():
    assert pairwise.question(PROMPT, "ant", "cat") == "[CONTEXT] copy ant [RESPONSE A] ant [RESPONSE B] cat"
    text = "[CONTEXT] user: ant\nassistant: bear\nuser: cat [RESPONSE A] x [RESPONSE B] y"
    assert pairwise.question(TALK, "x", "y") == text


def test_every_labelled_pair_occurs_once_with_the_letter_of_the_better_response(labelled):
    rows, right = pairwise.rows_of(labelled, seed=0), {}
    for c in labelled:
        for i, j in labelled_pairs(c):
            right[pairwise.question(c.prompt, c.texts[i], c.texts[j])] = "A"
            right[pairwise.question(c.prompt, c.texts[j], c.texts[i])] = "B"
    assert len(rows) == len({row["prompt"] for row in rows}) == 19 + 2
    assert all(right[row["prompt"]] == row["completion"] for row in rows)


def test_the_order_is_drawn_at_random_from_the_seed(labelled):
    first, again, other = (
        [row["completion"] for row in pairwise.rows_of(labelled * 20, seed)] for seed in (0, 0, 1)
    )
    assert first == again != other
    share = first.count("A") / len(first)  # of 420
    assert abs(share - 0.5) < 4 * math.sqrt(0.25 / len(first))


# -- what a model learns and says ------------------------------------------------------------------
CHATML = "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
ASSISTANT = "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
TEMPLATES = {  # and what is learnt from the letter on, whatever stands before it
    "chatml": (CHATML + ASSISTANT, "A<end>"),
    "thoughts, as Qwen3": (
        CHATML.replace("{{ m.c", "{{ '<think>\n\n</think>\n\n' if m.role != 'user' }}{{ m.c") + ASSISTANT,
        "A<end>",
    ),
    "a second end token, as Phi": (
        CHATML + "{% if not add_generation_prompt %}<end>{% endif %}" + ASSISTANT,
        "A<end>",
    ),
    "a space, as Llama 2": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }} <end>{% endif %}{% endfor %}",
        " A <end>",
    ),
}


def bytes_tokenizer(template):
    """Single bytes, and a space with A or B."""
    tokens = ["<pad>", "<start>", "<end>", "<unk>", "ĠA", "ĠB", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(backends.BPE(vocab=vocabulary, merges=[("Ġ", "A"), ("Ġ", "B")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "bos_token": "<start>", "eos_token": "<end>", "unk_token": "<unk>"}
    result = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    result.chat_template = template
    return result


@pytest.fixture
def oracle_of(monkeypatch):
    """oracle_of(tokenizer, logprobs_of): of a model whose log p(A) and log p(B) after a text are
    logprobs_of(text)."""

    def make(tokenizer, logprobs_of, room=512):
        letters, _ = pairwise.letters_of(tokenizer)

        def next_token_logprobs(model, input_ids, where):
            out = torch.full((where.shape[1], len(tokenizer)), -1e4)
            for i, (row, end) in enumerate(where.T.tolist()):
                out[i, letters] = torch.tensor(logprobs_of(tokenizer.decode(input_ids[row, : end + 1])))
            return out

        model = SimpleNamespace(tokenizer=tokenizer, room=room, device=CPU, model=None)
        monkeypatch.setattr(ai_feedback, "LanguageModel", lambda *_: model)
        monkeypatch.setattr(next_token, "logprobs", next_token_logprobs)
        return pairwise.oracle("a model")

    return make


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_letter_is_read_where_sft_learns_it_for_any_template(name, oracle_of):
    template, learnt = TEMPLATES[name]
    tokenizer, asked = bytes_tokenizer(template), []
    oracle = oracle_of(tokenizer, lambda text: asked.append(text) or (0.0, -20.0))
    assert oracle([(PROMPT, "x", "y")]) == [0.0]  # A in both orders
    pair = comparison(prompt="copy ant", chosen="x", rejected="y")
    rows = {row["completion"]: row for seed in range(9) for row in pairwise.rows_of([pair], seed)}
    for letter, text in zip("AB", asked, strict=True):
        (document,) = demonstrations.sft_documents([Row("f:1", rows[letter])], tokenizer, 512, "f")
        assert tokenizer.decode(document.ids) == text + learnt.replace("A", letter)
        first = len(tokenizer(text)["input_ids"])
        assert document.response_mask[first:].all() and not document.response_mask[0]


def test_a_tokenizer_without_the_letters_is_refused(oracle_of, monkeypatch):
    monkeypatch.setattr(tiny, "WORDS", [word for word in tiny.WORDS if word not in ("A", "B")])
    with pytest.raises(ValueError, match="no distinct tokens for A and B"):
        pairwise.letters_of(tiny.tokenizer())


def test_log_odds_by_hand_for_a_model_with_position_bias(oracle_of):
    """p(A) : p(B) is 8 : 1 when cat cat comes first and 1 : 2 when ant does, so that P(cat cat beats ant) =
    (8/9 + 2/3) / 2 = 7/9, odds of 3.5; the log odds of the two orders have the mean log 4."""

    def logprobs_of(text):
        assert text.endswith("<|assistant|>")  # read where the letter comes next
        return math.log(0.4 if "A] cat" in text else 0.025), math.log(0.05)

    oracle = oracle_of(TOKENIZER, logprobs_of)
    assert oracle.pairwise
    got = oracle([(PROMPT, "cat cat", "ant"), (PROMPT, "ant", "cat <|user|> cat")])
    assert got == pytest.approx([math.log(3.5), -math.log(3.5)], abs=1e-5)


def test_log_odds_stay_finite_when_the_model_is_certain(oracle_of):
    oracle = oracle_of(TOKENIZER, lambda text: (0.0, -1e4) if "A] cat" in text else (-1e4, 0.0))
    (value,) = oracle([(PROMPT, "cat", "ant")])
    assert math.isfinite(value) and value > 20


def test_two_responses_that_do_not_fit_into_the_model_are_a_tie_and_the_others_are_judged(oracle_of, capsys):
    logprobs_of = lambda text: (math.log(0.4 if "A] cat" in text else 0.1), math.log(0.1 if "A] cat" in text else 0.4))
    duels = [(PROMPT, "cat", "ant"), (PROMPT, "cat " * 40, "ant")]
    assert oracle_of(TOKENIZER, logprobs_of, room=40)(duels) == pytest.approx([math.log(4), 0.0], abs=1e-5)
    assert "over 40 tokens is a tie" in capsys.readouterr().out


# -- a run -----------------------------------------------------------------------------------------
def test_data_without_a_better_side_and_a_missing_held_out_set_are_named_and_write_nothing(tmp_path):
    rows = [{"prompt": f"copy {a}", "chosen": a, "rejected": "cat", "preference": 0.5} for a in tiny.ANIMALS[:9]]
    ties = tmp_path / "ties.jsonl"
    ties.write_text("".join(json.dumps({**row, "chosen": f"{row['chosen']} x"}) + "\n" for row in rows))
    for options, words in (
        ({}, "--dataset .*ties.jsonl: no pair with a better side"),
        ({"eval_dataset": "nosuch.jsonl"}, "--eval-dataset nosuch.jsonl: no such file"),
    ):
        with pytest.raises(InputError, match=words):
            pairwise.main(pairwise.Args(dataset=str(ties), output_dir=str(tmp_path / "run"), **options))
    assert not (tmp_path / "run").exists()


def test_pairs_train_a_model_whose_accuracy_evaluate_measures(tmp_path, monkeypatch):
    small, pairs, model = make_small(tmp_path), tmp_path / "pairs", tmp_path / "model"
    files = {name: small.options[name] for name in ("dataset", "eval_dataset")}
    pairwise.main(pairwise.Args(**files, output_dir=str(pairs)))
    assert [len(read_jsonl(pairs / f"{name}.jsonl")) for name in ("train", "held_out")] == [PAIRS, HELD_OUT]
    with pytest.raises(InputError, match="pairs: the folder already exists"):
        pairwise.main(pairwise.Args(**files, output_dir=str(pairs)))

    options = {
        "dataset": pairs / "train.jsonl",
        "eval_dataset": pairs / "held_out.jsonl",
        "output_dir": model,
    }
    options |= {"sample_prompts": 0, "max_steps": 3, "batch_size": 4, "save_every": 0}
    succeeds(processes.script("sft", *flags(**options), plots=False))

    oracle = f"common.programs.pairwise:oracle={model}"
    options = {"scorers": (oracle,), "dataset": files["eval_dataset"], "output_dir": str(tmp_path / "judged")}
    evaluate.main(evaluate.Args(**options))
    rows = read_jsonl(tmp_path / "judged" / "samples.jsonl")
    differences = [difference for row in rows for difference in row["differences"]]
    figures = read_json(tmp_path / "judged" / "summary.json")["scorers"]["model"]["all"]
    assert figures["pairs"] == len(differences) == HELD_OUT and len(set(differences)) > HELD_OUT / 2
    assert figures["accuracy"] == sum(d > 0 for d in differences) / HELD_OUT
    plain = AutoModelForCausalLM.from_pretrained(model / "model")
    letters = [TOKENIZER.convert_tokens_to_ids(x) for x in "AB"]
    for row in rows[:5]:
        texts, p = [r["text"] for r in row["responses"]], []
        for two in (texts, texts[::-1]):
            text = pairwise.question(row["prompt"], *two)
            ids = torch.tensor([chat.prompt_ids(TOKENIZER, [user(text)])])
            p.append(torch.softmax(plain(input_ids=ids).logits[0, -1, letters], -1)[0].item())
        mean = (p[0] + 1 - p[1]) / 2
        assert row["differences"] == [pytest.approx(math.log(mean / (1 - mean)), abs=1e-4)]
