"""common/sampler.py against transformers' generate and plain forwards, which know nothing of it."""

import collections
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
)
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from common import sampler, tiny
from common.sampler import choose, sample

V = 97
SIZES = {
    "vocab_size": V, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def build(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def llama():
    return build(LlamaConfig(**SIZES))


def prompts_of(lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, V, (length,), generator=generator).tolist() for length in lengths]


MIXED = prompts_of([3, 31, 7, 7, 40, 12, 1, 25, 18, 2, 33, 9, 5, 29, 14, 22])


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        Qwen2Config(**SIZES),
        GPT2Config(vocab_size=V, n_embd=64, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2,
                   tie_word_embeddings=False, bos_token_id=1, eos_token_id=2),
    ],
    ids=["llama with grouped heads", "qwen2", "gpt2"],
)  # fmt: skip
def test_greedy_equals_generate_token_for_token(config):
    model, stop_ids = build(config), list(range(5, V, 12))
    out = sample(model, MIXED, max_new_tokens=24, stop_ids=stop_ids, pad_id=0, temperature=0, slots=5)
    lengths = set()
    for i, prompt in enumerate(MIXED):
        options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": stop_ids, "pad_token_id": 0}
        ids = torch.tensor([prompt])
        want = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :]
        assert out.response_tokens[i][out.sample_mask[i]].tolist() == want.tolist()
        assert out.finished[i].item() == (want[-1].item() in stop_ids)
        lengths.add(len(want))
    assert len(lengths) > 3  # slots really were refilled at different times
    assert (out.sample_logprobs == 0).all()  # a point mass: log 1


def test_a_large_vocabulary_is_unembedded_in_another_order_to_the_same_logits(llama, monkeypatch):
    options = {"max_new_tokens": 12, "stop_ids": [7], "pad_id": 0, "slots": 5, "seed": 0}
    want, head, products = sample(llama, MIXED, **options), llama.lm_head, []
    monkeypatch.setattr(sampler, "LARGE_VOCABULARY", V)
    draw = sampler.choose

    def choose(logits, *rest):  # inside, the head computes in its own way
        hidden = torch.randn(2, 3, head.in_features)
        for some in (hidden, hidden.repeat(40, 1, 1)):  # 6 rows and 240
            products.append((head(some), torch.nn.functional.linear(some, head.weight)))
        assert "forward" in vars(head) and head(hidden).is_contiguous()
        return draw(logits, *rest)

    monkeypatch.setattr(sampler, "choose", choose)
    sample(llama, MIXED, **options)
    assert products
    for ours, plain in products:
        torch.testing.assert_close(ours, plain)
    monkeypatch.setattr(sampler, "choose", draw)
    found = sample(llama, MIXED, **options)
    assert torch.equal(found.response_tokens, want.response_tokens)
    torch.testing.assert_close(found.sample_logprobs, want.sample_logprobs)
    assert "forward" not in vars(head)
    with pytest.raises(ValueError, match="seed"):  # after an error it is as it was, too
        monkeypatch.setattr(sampler, "choose", lambda *_: (_ for _ in ()).throw(ValueError("seed")))
        sample(llama, MIXED, **options)
    assert "forward" not in vars(head)


def test_a_head_with_a_forward_of_its_own_keeps_it(monkeypatch):
    """accelerate's hooks are of this kind."""
    model, calls = build(LlamaConfig(**SIZES)), []
    monkeypatch.setattr(sampler, "LARGE_VOCABULARY", V)
    plain = model.lm_head.forward
    own = model.lm_head.forward = lambda hidden: calls.append(1) or plain(hidden)
    sample(model, MIXED[:2], max_new_tokens=3, stop_ids=[], pad_id=0, seed=0)
    assert len(calls) >= 3 and vars(model.lm_head)["forward"] is own


@pytest.mark.parametrize("n", [1, 3])
def test_prompts_run_in_groups_of_so_many_tokens_and_change_no_answer(llama, monkeypatch, n):
    """No more prompts' keys and values are held at once than one group's."""
    options = {"n": n, "max_new_tokens": 12, "stop_ids": [7], "pad_id": 0, "temperature": 0, "slots": 10}
    want, groups, run = sample(llama, MIXED, **options), [], sampler._prefill
    alive = []  # weak references to each group's keys

    def prefill(model, prompts, which):
        gc.collect()
        assert not [at for at in alive if at() is not None]
        found = run(model, prompts, which)
        groups.append(list(found))
        alive.extend(weakref.ref(pairs[0][0]) for pairs, _ in found.values())
        return found

    monkeypatch.setattr(sampler, "PREFILL_TOKENS", 80)
    monkeypatch.setattr(sampler, "_prefill", prefill)
    got = sample(llama, MIXED, **options)
    assert torch.equal(got.response_tokens, want.response_tokens)
    for group in groups:
        assert len(group) == 1 or len(group) * max(len(MIXED[i]) for i in group) <= 80
    # A prompt whose rows wait over two refills is run once
    asked = [i for group in groups for i in group]
    assert sorted(asked) == list(range(len(MIXED))) and len(groups) >= 5


def test_slots_do_not_change_greedy_answers(llama):
    few, many = (
        sample(llama, MIXED, max_new_tokens=12, stop_ids=[7], pad_id=0, temperature=0, slots=s)
        for s in (1, 64)
    )
    assert torch.equal(few.response_tokens, many.response_tokens)


@pytest.mark.parametrize(
    "config, name",
    [
        (MistralConfig(**SIZES, sliding_window=16), "mistral has a sliding window of 16"),
        (
            Gemma3TextConfig(**{**SIZES, "num_hidden_layers": 6}, head_dim=16),
            "gemma3_text has .*sliding_attention",
        ),
        (BloomConfig(vocab_size=V, hidden_size=64, n_layer=2, n_head=4), "bloom takes no position_ids"),
        (
            FalconConfig(
                vocab_size=V, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True
            ),
            "falcon has ALiBi",
        ),
        (MambaConfig(vocab_size=V, hidden_size=64, num_hidden_layers=2), "mamba"),
    ],
)
def test_models_without_full_attention_are_refused_by_name(config, name):
    with pytest.raises(ValueError, match=name):
        sample(build(config), [[3, 4]], max_new_tokens=2, stop_ids=[], pad_id=0)


def test_a_sliding_window_that_the_config_turns_off_is_full_attention():
    config = Qwen2Config(**SIZES, sliding_window=4, use_sliding_window=False)
    assert sample(build(config), [[3, 4]], max_new_tokens=8, stop_ids=[], pad_id=0).response_tokens.shape == (
        1,
        8,
    )


def test_a_model_that_ignores_positions_is_caught_by_the_trial_batch():
    class Deaf(LlamaForCausalLM):
        def forward(
            self, input_ids=None, position_ids=None, attention_mask=None, past_key_values=None, **kwargs
        ):
            kwargs["attention_mask"] = None if attention_mask is None else torch.ones_like(attention_mask)
            return super().forward(
                input_ids, position_ids=position_ids, past_key_values=past_key_values, **kwargs
            )

    torch.manual_seed(0)
    with pytest.raises(ValueError, match="other logits with a ragged cache"):
        sample(Deaf(LlamaConfig(**SIZES)), [[3, 4]], max_new_tokens=2, stop_ids=[], pad_id=0)


@pytest.mark.parametrize(
    "settings", [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 0.8, 0), (1.0, 1.0, 5), (0.8, 0.6, 9)]
)
def test_logprobs_are_those_of_the_distribution_sampled_from(llama, settings):
    """The distribution is made by transformers' own warpers from a forward of the whole row without a
    cache."""
    temperature, top_p, top_k = settings
    choice = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    out = sample(llama, MIXED[:6], n=2, max_new_tokens=10, stop_ids=[7], pad_id=0, slots=4, seed=3, **choice)
    for i, prompt in enumerate(out.prompt_index.tolist()):
        tokens = out.response_tokens[i][out.sample_mask[i]]
        ids = torch.cat([torch.tensor(MIXED[prompt]), tokens])[None]
        logits = llama(ids, use_cache=False).logits[0, len(MIXED[prompt]) - 1 : -1]
        warpers = [TemperatureLogitsWarper(temperature)]
        warpers += [TopKLogitsWarper(top_k)] if top_k else []
        warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        for warper in warpers:
            logits = warper(None, logits)
        want = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert want.isfinite().all()  # nothing outside the nucleus was drawn
        torch.testing.assert_close(out.sample_logprobs[i][out.sample_mask[i]], want, atol=1e-4, rtol=1e-4)
        assert (out.sample_logprobs[i][~out.sample_mask[i]] == 0).all()


@pytest.mark.parametrize("top_p, vocabulary", [(1.0, 7), (0.7, 7), (0.5, 3000)])
def test_tokens_are_drawn_as_often_as_their_probability_says(top_p, vocabulary):
    """vocabulary 3000 is nearly flat: its nucleus is larger than the part of it that is ranked first."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(vocabulary, generator=generator) * (2.0 if vocabulary < 100 else 0.1)
    want = logits.softmax(-1)
    ranked, ids = want.sort(descending=True)
    inside = ids[: int((ranked.cumsum(0) < top_p).sum()) + 1]
    nucleus = torch.zeros_like(want).index_put((inside,), want[inside])
    nucleus /= nucleus.sum()
    n = 20000
    tokens, logprobs = choose(logits.expand(n, -1), 1.0, top_p, 0, generator)
    assert nucleus[tokens].min() > 0
    torch.testing.assert_close(logprobs, nucleus[tokens].log(), atol=1e-4, rtol=1e-4)
    for part in range(4):  # four groups of tokens, each within 4 standard errors of its share
        member = torch.arange(vocabulary) % 4 == part
        share, got = nucleus[member].sum().item(), member[tokens].float().mean().item()
        assert abs(got - share) < 4 * (share * (1 - share) / n) ** 0.5 + 1e-9


@pytest.mark.parametrize("beyond", [-1e-6, 1e-6])
@pytest.mark.parametrize("error", [-1e-5, 0, 1e-5])
@pytest.mark.parametrize("size", [5, 1024, 2000])
def test_a_nucleus_whose_border_is_near_top_p_is_that_of_float64(size, error, beyond):
    """error: of the sum of probabilities; an fp32 softmax of 150,000 tokens was off by 5e-6. 1024 are ranked
    first."""
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probs = logits.softmax(-1)
    top_p = probs.sort(descending=True).values[:size].sum().item() + beyond
    kept, _ = sampler._most_likely((probs * (1 + error)).float()[None], top_p, 0)
    assert int((kept > 0).sum()) == size + (beyond > 0)


def test_a_prompt_is_run_once_and_no_finished_row_is_run_again(llama):
    """Every token but a response's last one enters the model once; a prompt enters it once for its n
    responses."""
    seen = collections.Counter()

    def count(module, args, kwargs):
        ids = kwargs["input_ids"]
        seen["prompts" if kwargs.get("position_ids") is None else "steps"] += len(ids)

    sample(llama, [[3]], max_new_tokens=1, stop_ids=[], pad_id=0)  # the trial batch, once for this model
    handle = llama.register_forward_pre_hook(count, with_kwargs=True)
    out = sample(
        llama, MIXED, n=8, max_new_tokens=20, stop_ids=list(range(3, V, 9)), pad_id=0, slots=12, seed=0
    )
    handle.remove()
    assert seen["prompts"] == len(MIXED)
    assert seen["steps"] == int(out.sample_mask.sum()) - len(MIXED) * 8


def test_rows_come_in_prompt_major_order_with_stop_mask_and_padding(llama):
    out = sample(llama, MIXED, n=3, max_new_tokens=16, stop_ids=range(3, V, 9), pad_id=0, slots=7, seed=1)
    assert out.prompt_index.tolist() == [i for i in range(len(MIXED)) for _ in range(3)]
    lengths = out.sample_mask.sum(1)
    assert out.response_tokens.shape == out.sample_mask.shape == (48, int(lengths.max()))
    for tokens, mask, finished in zip(
        out.response_tokens.tolist(), out.sample_mask.tolist(), out.finished.tolist()
    ):
        kept = [t for t, m in zip(tokens, mask) if m]
        assert mask == sorted(mask, reverse=True)  # no holes
        assert all(t % 9 != 3 for t in kept[:-1])  # a stop id is the last token or absent
        assert finished == (kept[-1] % 9 == 3) and (finished or len(kept) == 16)
        assert all(t == 0 for t, m in zip(tokens, mask) if not m)
    assert out.finished.any() and not out.finished.all()


def test_a_seed_decides_and_generation_config_does_not():
    model = build(LlamaConfig(**SIZES))
    draw = lambda seed: (
        sample(model, MIXED, max_new_tokens=8, stop_ids=[], pad_id=0, seed=seed).response_tokens
    )
    first = draw(1)
    assert torch.equal(first, draw(1)) and not torch.equal(first, draw(2))
    model.generation_config.update(
        do_sample=True, top_k=1, temperature=0.01, repetition_penalty=9.0, max_length=2
    )
    assert torch.equal(first, draw(1))
    torch.manual_seed(5)
    unseeded = draw(None)
    torch.manual_seed(5)
    assert torch.equal(unseeded, draw(None))


def test_training_mode_and_gradient_checkpointing_survive():
    model = build(LlamaConfig(**SIZES)).train()
    model.activation_checkpointing_enable()
    greedy = {"max_new_tokens": 8, "stop_ids": [], "pad_id": 0, "temperature": 0}
    out = sample(model, MIXED, **greedy)
    assert model.training and model.is_activation_checkpointing
    assert torch.equal(
        out.response_tokens, sample(build(LlamaConfig(**SIZES)), MIXED, **greedy).response_tokens
    )
    model(input_ids=torch.tensor([MIXED[0]])).logits.sum().backward()  # no inference tensors are left behind


def test_bf16_weights_sample():
    model = build(LlamaConfig(**SIZES)).to(torch.bfloat16)
    out = sample(model, MIXED, n=2, max_new_tokens=8, stop_ids=[7], pad_id=0, seed=0)
    assert out.sample_logprobs.dtype == torch.float32 and out.sample_logprobs.isfinite().all()


@pytest.mark.parametrize(
    "change, why",
    [
        ({"prompts": []}, "no prompts"),
        ({"prompts": [[3], []]}, "prompt 1 has no tokens"),
        ({"n": 0}, "n = 0"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"slots": 0}, "slots"),
        ({"prompts": [[3] * 100], "max_new_tokens": 29}, "129 tokens, llama has 128 positions"),
    ],
)
def test_unusable_arguments_are_named(llama, change, why):
    arguments = {"prompts": [[3, 4]], "max_new_tokens": 2, "stop_ids": [], "pad_id": 0, **change}
    with pytest.raises(ValueError, match=why):
        sample(llama, arguments.pop("prompts"), **arguments)


def test_nan_logits_are_an_error_not_a_token():
    model = build(LlamaConfig(**SIZES))
    sample(model, [[3]], max_new_tokens=1, stop_ids=[], pad_id=0)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    for temperature in (1.0, 0):
        with pytest.raises(ValueError, match="NaN"):
            sample(model, [[3]], max_new_tokens=2, stop_ids=[], pad_id=0, temperature=temperature)


@pytest.mark.parametrize("given", ["folder", "run directory"])
def test_the_file_alone_talks_to_a_saved_model(given, tmp_path):
    tiny.model().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    copied = tmp_path / "sampler.py"
    copied.write_text(Path("common/sampler.py").read_text())
    model = tmp_path / "model" if given == "folder" else tmp_path
    command = [sys.executable, copied, "--model", model, "--prompt", "copy ant fox", "--n", "3"]
    out = subprocess.run([*map(str, command), "--seed", "0"], capture_output=True, text=True, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    lines = out.stdout.splitlines()
    words = set(tiny.tokenizer().get_vocab())
    assert len(lines) == 3 and all(word in words for line in lines for word in line.split())
