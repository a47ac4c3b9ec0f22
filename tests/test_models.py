"""common/models.py against transformers' own forward: log probabilities, packing, loading."""

import collections
import copy
import dataclasses
import importlib
import inspect
import json
import math
import types
from pathlib import Path
from unittest import mock

import pytest
import tiny_families
import torch
import transformers
from safetensors.torch import load_file, save_file
from helpers import TOKENIZER, Words
from test_data import CHATML, byte_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import (
    AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig,
    BertForSequenceClassification, DbrxConfig, GPT2Config, Llama4TextConfig, LlamaConfig,
    LlamaForSequenceClassification, OPTConfig, Phi3Config, PhiConfig, PhimoeConfig, Qwen3MoeConfig,
)  # fmt: skip

import advantage_model
import dpo_iterative
import ppo
import rejection_sampling
import reward
from common import batches, dist, models, sampler
from common.batches import Document, Row
from common.errors import InputError
from common.data import tiny
from common.loading import checks, lora, pretrained
from common.scoring import next_token
from common.run import checkpoints, run

V = 61  # vocabulary, a prime: no other dimension has it
# initializer_range: so large that the distributions are far from uniform and a leak would be seen
SMALL = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SMALL |= {"initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
SMALL_OPT = {"vocab_size": V, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL_OPT |= {"word_embed_proj_dim": 32, "max_position_embeddings": 64, "init_std": 0.3}
SMALL_BERT = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SMALL_BERT |= {"num_attention_heads": 4}
TINY = {"vocab_size": V, "hidden_size": 32, "initializer_range": 0.3}


def small(kind, **options):
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(**GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    else:
        config = LlamaConfig(**SMALL, tie_word_embeddings=kind == "tied llama", **options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    assert model.lm_head.weight.shape[0] == V
    return model


@pytest.fixture(scope="module", params=["llama", "tied llama", "gpt2"])
def model(request):
    return small(request.param)


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, V, (4, 12), generator=generator)
    action_mask = torch.rand(4, 11, generator=generator) < 0.6
    action_mask[2] = False  # one row without any action
    return input_ids, action_mask


def reference(model, input_ids, temperature=1.0):
    """(B, T-1, V): the log probabilities of every token, from the model's own forward."""
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
    return (logits.double() / temperature).log_softmax(-1)


# -- token_logprobs ----------------------------------------------------------------------------
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rows_in_memory", [1, 3, 1000])
@torch.no_grad()
def test_logprobs_and_entropy_equal_those_of_the_full_logits(
    model, rows, temperature, rows_in_memory, monkeypatch
):
    monkeypatch.setattr(models, "LOGITS_IN_MEMORY", rows_in_memory * V + V // 2)
    input_ids, mask = rows
    full = reference(model, input_ids, temperature)
    expected = full.gather(-1, input_ids[:, 1:, None])[..., 0].where(mask, 0.0).float()
    entropy = torch.distributions.Categorical(logits=full).entropy().where(mask, 0.0).float()
    got, got_entropy = models.token_logprobs(model, *rows, temperature=temperature, entropy=True)
    assert got.dtype == torch.float32 and got.shape == mask.shape
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(got_entropy, entropy, rtol=0, atol=1e-5)
    assert torch.equal(models.token_logprobs(model, *rows, temperature=temperature), got)
    # wrong variants: the token at t in place of t + 1, the temperature forgotten
    shifted = full.gather(-1, input_ids[:, :-1, None])[..., 0].where(mask, 0.0).float()
    assert (got - shifted).abs().max() > 0.5
    if temperature != 1:
        assert (got - models.token_logprobs(model, *rows)).abs().max() > 0.1


@pytest.mark.parametrize("device, sizes", [("cpu", [16, 16, 16, 2]), ("meta", [50])])
def test_chunks_are_larger_on_an_accelerator(device, sizes, monkeypatch):
    """The meta device plays the accelerator, where the unembedding's gradient is summed over chunks in bf16."""
    weight, seen = types.SimpleNamespace(device=torch.device(device), shape=(2**20, 4)), []
    model = types.SimpleNamespace(get_output_embeddings=lambda: types.SimpleNamespace(weight=weight))
    count = lambda head, hidden, *rest: seen.append(len(hidden)) or (hidden, hidden)
    monkeypatch.setattr(models, "_chunk", count)
    models._unembed(model, torch.zeros(50, 4), torch.zeros(50))
    assert seen == sizes


@pytest.mark.parametrize("temperature, entropy", [(1.0, False), (0.6, True)])
def test_gradients_equal_those_through_the_full_logits(model, rows, temperature, entropy, monkeypatch):
    monkeypatch.setattr(models, "LOGITS_IN_MEMORY", 3 * V)
    input_ids, mask = rows
    weight = torch.linspace(-1, 2, mask.numel()).view(mask.shape) * mask  # another weight for every token

    full = reference(model, input_ids, temperature)
    expected = full.gather(-1, input_ids[:, 1:, None])[..., 0]
    got = models.token_logprobs(model, *rows, temperature=temperature, entropy=entropy)
    if entropy:  # of both together
        got = got[0] + 3 * got[1]
        expected = expected - 3 * (full.exp() * full).sum(-1)
    got_grads = torch.autograd.grad((got * weight).sum(), list(model.parameters()))
    grads = torch.autograd.grad((expected * weight).sum(), list(model.parameters()))
    for a, b in zip(got_grads, grads):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1.0, b.abs().max().item()))
    assert min(g.abs().max() for g in grads) > 0


class Largest(TorchDispatchMode):
    """The most elements of any tensor with V columns that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and x.ndim and x.shape[-1] == V:
                self.elements = max(self.elements, x.numel())
        return result


def test_only_kept_positions_are_unembedded_and_in_chunks(rows, monkeypatch):
    model, (input_ids, mask) = small("llama"), rows
    input_ids, mask = input_ids.repeat(16, 1), mask.repeat(16, 1)  # 64 rows
    monkeypatch.setattr(models, "LOGITS_IN_MEMORY", 40 * V)
    seen = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[:-1].numel()))
    with Largest() as largest:
        logprobs = models.token_logprobs(model, input_ids, mask)
        assert sum(seen) == int(mask.sum()) < mask.numel() and max(seen) == 40
        logprobs.sum().backward()  # which computes the chunks again
    assert sum(seen) == 2 * int(mask.sum()) and max(seen) == 40
    # (32, V) is the weight transposed; the full logits would have 64 x 12 rows and the kept ones hundreds
    assert largest.elements == 40 * V
    with Largest() as whole:  # the measure sees what it must never see
        model(input_ids=input_ids)
    assert whole.elements == input_ids.numel() * V


def test_a_batch_without_actions_still_connects_every_parameter(model, rows):
    model.zero_grad()
    for logprobs in models.token_logprobs(model, rows[0], torch.zeros_like(rows[1]), entropy=True):
        assert logprobs.shape == rows[1].shape and not logprobs.any()
    models.token_logprobs(model, rows[0], torch.zeros_like(rows[1])).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


# -- packing -----------------------------------------------------------------------------------
def document(seed, length):
    ids = torch.randint(3, V, (length,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    return Document(ids, torch.arange(length) >= 2, [], Row("f:1", {}))


def drop_positions(forward):
    return lambda *args, position_ids=None, **options: forward(*args, **options)


def see_everything(forward):  # with a mask of its own transformers does not look for documents
    def wrapped(input_ids, **options):
        return forward(input_ids=input_ids, **{**options, "attention_mask": torch.ones_like(input_ids)})

    return wrapped


@pytest.mark.parametrize("leak", [None, drop_positions, see_everything])
@pytest.mark.parametrize("kind", ["policy", "scorer"])
def test_packs_detects_documents_that_see_each_other(leak, kind, capsys):
    words = tiny.tokenizer()
    model = pretrained.load_policy("tiny", words) if kind == "policy" else pretrained.load_scorer("tiny", words, 1)
    if leak:
        model.model.forward = leak(model.model.forward)
    assert checks.packs(model) is (leak is None)
    said = "llama: documents in a row would see each other: each has a row of its own\n"
    assert capsys.readouterr().out == (said if leak else "")


def saved(path, config, seed=0):
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def test_packs_tolerates_the_rounding_of_experts(tmp_path):
    """An expert multiplies the tokens of both documents in one product, so its number of rows differs."""
    wide = {**SMALL, "hidden_size": 128, "head_dim": 32, "num_hidden_layers": 4}
    config = Qwen3MoeConfig(**wide, moe_intermediate_size=96, num_experts=16, num_experts_per_tok=4)
    policy = pretrained.load_policy(saved(tmp_path, config, seed=4), Words(V))
    assert checks.packs(policy)
    policy.model.forward = see_everything(policy.model.forward)
    assert not checks.packs(policy)


# -- load_tokenizer, and what transformers knows -------------------------------------------------
def test_an_unknown_token_that_no_text_needs_is_the_padding_before_a_new_one(tmp_path):
    special = ("<unk>", "<s>", "<|im_start|>", "<|im_end|>")  # and bytes for all else, as Llama 2 has it
    llama = byte_tokenizer(special=special, unk_token="<unk>", pad_token=None)
    loaded = with_config(llama, tmp_path)
    assert loaded.pad_token == "<unk>" and len(loaded) == len(llama)


def with_config(tokenizer, path, **options):
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    return pretrained.load_tokenizer(str(path), **options)


@pytest.mark.parametrize("word", ["reserved", "padding", "<|reserved_0|>"])
def test_a_word_of_the_text_never_becomes_the_padding(word, tmp_path):
    tokenizer = byte_tokenizer(pad_token=None)
    tokenizer.add_tokens([word])  # a common one
    loaded = with_config(tokenizer, tmp_path)
    assert loaded.pad_token == "<|pad|>" and word in loaded.decode(loaded(word)["input_ids"], skip_special_tokens=True)


def test_a_template_is_read_as_utf_8_wherever_it_is_read(tmp_path, monkeypatch):
    template = CHATML.replace("assistant", "réponse")
    (tmp_path / "mine.jinja").write_bytes(template.encode())
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, encoding="ascii": read(path, encoding))
    loaded = with_config(byte_tokenizer(None), tmp_path, chat_template=str(tmp_path / "mine.jinja"))
    assert loaded.chat_template == template


@pytest.mark.parametrize(
    "script, given",
    [
        (ppo, {"reference": "other"}),
        (dpo_iterative, {"reference": "other"}),
        (dpo_iterative, {"enhancer": "other"}),
        (advantage_model, {"behavior_policies": ("other",), "n_others": 1}),
        (reward, {"sft_model": "other"}),
        (rejection_sampling, {"policy": "other"}),
    ],
)
def test_the_chat_template_is_that_of_every_policy_of_a_run(script, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tiny, "SIZES", dict.fromkeys(tiny.SIZES, (300, 100)))  # which some read before the models
    (tmp_path / "mine.jinja").write_text(CHATML)
    for name in ("model", "other"):
        with_config(byte_tokenizer(None), tmp_path / name, chat_template="mine.jinja")
    args = dataclasses.replace(script.RECIPES["tiny"][1], **given)
    check = pretrained.check_causal_lm

    def check_and_stop(name, *options):
        check(name, *options)
        if name == "other":
            raise InputError("far enough")

    monkeypatch.setattr(pretrained, "check_causal_lm", check_and_stop)
    with pytest.raises(InputError, match="^far enough$"):
        script.main(dataclasses.replace(args, model="model", chat_template="mine.jinja"))


def test_a_model_that_needs_code_of_its_own_is_refused_in_one_line(tmp_path):
    own_code = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoTokenizer": ["mine.T", None]}}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps(own_code))
    for load in (pretrained.load_tokenizer, pretrained.is_causal_lm):
        with pytest.raises(InputError, match="needs code of its own.*not run here$"):
            load(str(tmp_path))


def test_a_row_of_a_longrope_model_stays_within_its_original_length(tmp_path):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
    config = Phi3Config(**SMALL, original_max_position_embeddings=32, rope_parameters=rope)
    name = saved(tmp_path, config)
    pretrained.check_room(32, name)
    with pytest.raises(InputError, match="33: .* has only 32 positions$"):
        pretrained.check_room(33, name)
    model = AutoModelForCausalLM.from_pretrained(name)  # transformers: a long row changes a short one
    ids = torch.arange(40)[None] % V
    short = ids[:, :20]
    both = torch.cat([ids, torch.nn.functional.pad(short, (0, 20))])
    apart = model(input_ids=short).logits[0] - model(input_ids=both).logits[1, :20]
    assert apart.abs().max() > 0.1


def test_a_row_of_llama_4_is_shorter_than_its_floor_scale(tmp_path):
    """Beyond it transformers scales queries by their column: a packed document, or a row of the sampler, by another
    number than the same tokens alone."""
    config = Llama4TextConfig(
        **SMALL, head_dim=8, floor_scale=16, attn_scale=0.5, no_rope_layers=[0, 1], num_local_experts=2,
        intermediate_size_mlp=16, attention_chunk_size=64,
    )  # fmt: skip
    assert sampler.n_positions(config) == 15
    policy = pretrained.load_policy(saved(tmp_path, config), Words(V))
    ids, packed = torch.arange(3, 23)[None], torch.cat([torch.arange(10)] * 2)[None]
    actions = torch.ones(1, 19, dtype=torch.bool)
    alone = policy.token_logprobs(ids[:, 10:], actions[:, 10:])
    apart = (policy.token_logprobs(ids, actions, packed)[:, 10:] - alone).abs()[0]
    assert apart[:5].max() < 1e-4 and apart[5:].max() > 1e-3  # a row of 20 tokens: from the 16th on


# -- load_policy -------------------------------------------------------------------------------
@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_off_in_training(checkpointing, rows, tmp_path):
    name = saved(tmp_path, GPT2Config(**GPT2, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1))
    policy = pretrained.load_policy(name, Words(V), gradient_checkpointing=checkpointing)
    plain = AutoModelForCausalLM.from_pretrained(name).train()
    once, twice = (policy.token_logprobs(*rows) for _ in range(2))
    assert policy.training and torch.equal(once, twice)
    once.sum().backward()
    assert all(p.grad is not None for p in policy.parameters())
    with torch.no_grad():  # as transformers loads it, two forwards differ
        assert (plain(rows[0]).logits - plain(rows[0]).logits).abs().max() > 1e-3
        expected = reference(plain.eval(), rows[0]).gather(-1, rows[0][:, 1:, None])[..., 0]
    torch.testing.assert_close(once, expected.where(rows[1], 0.0).float(), rtol=0, atol=1e-5)


def test_mpt_calls_its_number_of_positions_otherwise():
    assert sampler.n_positions(transformers.MptConfig(max_seq_len=64)) == 64
    assert sampler.n_positions(OPTConfig(max_position_embeddings=32)) == 32


DROPPING = {
    "layers": OPTConfig(**SMALL_OPT, layerdrop=0.5, dropout=0.0),
    "attention, in a config of its own": DbrxConfig(
        vocab_size=V, d_model=32, n_heads=4, n_layers=1, max_seq_len=64, initializer_range=0.3,
        attn_config={"kv_n_heads": 2, "attn_pdrop": 0.5, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": 32},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DROPPING)
def test_every_kind_of_dropout_in_a_config_is_off(kind, rows, tmp_path):
    policy = pretrained.load_policy(saved(tmp_path, DROPPING[kind]), Words(V))
    drawn = [policy.token_logprobs(*rows) for _ in range(8)]  # in training
    assert policy.training and all(torch.equal(drawn[0], other) for other in drawn)


def test_a_model_that_draws_its_experts_in_training_is_refused(tmp_path):
    with pytest.raises(InputError, match="phimoe: two forwards differ: it draws experts"):  # 16 experts
        pretrained.load_policy(saved(tmp_path, PhimoeConfig(**SMALL)), Words(V))


def test_policy_is_fp32_with_the_tokenizers_padding_and_end(tmp_path):
    name = saved(tmp_path, LlamaConfig(**SMALL, dtype="bfloat16"))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    policy = pretrained.load_policy(name, Words(V))
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    for settings in (policy.config, policy.generation_config):
        assert (settings.pad_token_id, settings.eos_token_id) == (4, 5)


@pytest.mark.parametrize("kind", ["policy", "scorer"])
@pytest.mark.parametrize("pad", [2, -1, 7])  # the end token, Llama 1's, which means the last row, and any other
def test_the_embedding_of_a_configs_padding_learns_as_any_other(kind, pad, tmp_path):
    """By finite differences: no gradient is left out, whichever token the config once named as padding."""
    name, row = saved(tmp_path, LlamaConfig(**{**SMALL, "pad_token_id": 2})), pad % V
    config = Path(name, "config.json")  # not every transformers saves a negative one
    config.write_text(json.dumps({**json.loads(config.read_text()), "pad_token_id": pad}))
    model = pretrained.load_policy(name, Words(V)) if kind == "policy" else pretrained.load_scorer(name, Words(V), 1)
    ids = torch.arange(12)[None] % V
    ids[0, 4] = row
    if kind == "policy":
        figure = lambda: model.token_logprobs(ids, ids[:, 1:] >= 0).sum()
    else:
        figure = lambda: model.head_outputs(ids, torch.tensor([[0], [11]])).sum()
    table = model.get_input_embeddings().weight
    table.data[row] = table.data[3].flip(0)  # a new model has 0 there
    (gradient,) = torch.autograd.grad(figure(), table)
    direction, sides = gradient[ids[0, 3]] / gradient[ids[0, 3]].norm(), []
    with torch.no_grad():
        for step in (2e-3, -4e-3):
            table[row] += step * direction
            sides.append(figure().item())
    slope = (sides[0] - sides[1]) / 4e-3
    assert abs(slope) > 0.01
    assert (gradient[row] @ direction).item() == pytest.approx(slope, rel=0.05, abs=0.02)


@pytest.mark.parametrize("more", [0, 2])
def test_a_head_of_its_own_is_kept_where_the_config_calls_it_tied(more, tmp_path):
    """As in a merge of adapters with modules_to_save, or Mistral 3, whose configs say nothing."""
    name = saved(tmp_path, LlamaConfig(**SMALL, tie_word_embeddings=False))
    path = Path(name, "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    ids = torch.arange(V)[None]
    want = AutoModelForCausalLM.from_pretrained(name)(input_ids=ids).logits
    policy = pretrained.load_policy(name, Words(V + more))  # more tokens resize the tables, which ties them
    checkpoints.save_model(policy, TOKENIZER, tmp_path / "export")
    for model in (policy, AutoModelForCausalLM.from_pretrained(tmp_path / "export")):
        torch.testing.assert_close(model(input_ids=ids).logits[..., :V], want)
    assert not policy.config.tie_word_embeddings


def test_the_embeddings_reach_the_largest_id_of_a_tokenizer_whose_ids_have_gaps(tmp_path):
    words = Words(V)
    words.get_vocab = lambda: {"a": 0, "<|pad|>": V + 2}
    policy = pretrained.load_policy(saved(tmp_path, LlamaConfig(**SMALL)), words)
    assert len(policy.get_input_embeddings().weight) == len(policy.get_output_embeddings().weight) == V + 3


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_formats_that_transformers_can_undo_are_dequantised(tmp_path, method):
    config = LlamaConfig(**SMALL).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    assert pretrained._read_config(str(tmp_path)).quantization_config["dequantize"]


def test_quantised_weights_are_not_trained():
    policy = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    policy.is_quantized = True
    with pytest.raises(InputError, match="quantised. Give a checkpoint in bfloat16 or float32"):
        pretrained._ready(policy, TOKENIZER, {}, False)


def test_a_quantised_multimodal_checkpoint_is_refused_because_its_text_part_would_lose_its_scales(tmp_path):
    config = transformers.Mistral3Config(text_config={"model_type": "mistral", **SMALL}).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(InputError, match=r"quantised \(fp8\).*Give a checkpoint in bfloat16 or float32$"):
        pretrained._read_config(str(tmp_path))


@pytest.mark.parametrize("given, kept", [
    ({"do_sample": False, "temperature": 1.0, "top_p": 1.0}, {"do_sample": False}),  # greedy, and it stays so
    ({"temperature": 0.6, "top_p": 0.9}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}),
    ({"min_p": 0.1}, {"do_sample": True, "min_p": 0.1}),
    ({"temperature": 0.0}, {"temperature": None}),
    ({"length_penalty": 2.0}, {"length_penalty": None}),
    ({"output_scores": True}, {"output_scores": None}),
])  # fmt: skip
def test_a_generation_config_never_stops_the_export_at_the_end_of_a_run(given, kept, tmp_path):
    name = saved(tmp_path, LlamaConfig(**SMALL))
    Path(name, "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **given}))
    policy = pretrained.load_policy(name, Words(V))
    checkpoints.save_model(policy, TOKENIZER, tmp_path / "export")
    exported = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    assert {key: exported.get(key, None if x is None else False) for key, x in kept.items()} == kept
    assert exported["eos_token_id"] == policy.generation_config.eos_token_id


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("length, rows_after", [(V + 2, V + 2), (V, V), (V - 5, V)])
def test_added_tokens_get_the_mean_embedding_and_a_larger_table_stays(tied, length, rows_after, tmp_path):
    name = saved(tmp_path, LlamaConfig(**SMALL, tie_word_embeddings=tied))
    before = AutoModelForCausalLM.from_pretrained(name)
    policy = pretrained.load_policy(name, Words(length))
    assert policy.config.vocab_size == rows_after
    assert (policy.lm_head.weight is policy.model.embed_tokens.weight) == tied
    body = pretrained.load_scorer(name, Words(length), 1).base_model
    for table, old in (
        (policy.model.embed_tokens, before.model.embed_tokens),
        (policy.lm_head, before.lm_head),
        (body.embed_tokens, before.model.embed_tokens),
    ):
        assert table.weight.shape[0] == rows_after and torch.equal(table.weight[:V], old.weight)
        for row in table.weight[V:]:
            torch.testing.assert_close(row, old.weight.mean(0))


def test_an_added_token_gets_the_mean_of_the_heads_biases_too(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(PhiConfig(**SMALL))
    model.lm_head.bias.data.fill_(-5.0)  # 0 would make it e^5 times as likely
    model.save_pretrained(tmp_path)
    policy = pretrained.load_policy(str(tmp_path), Words(V + 2))
    assert policy.lm_head.bias.tolist() == [-5.0] * (V + 2)


# -- load_scorer -------------------------------------------------------------------------------


def causal(path, kind):
    """A saved causal LM, by name."""
    config = (
        GPT2Config(**GPT2) if kind == "gpt2" else LlamaConfig(**SMALL, tie_word_embeddings=kind != "llama")
    )
    return saved(path, config)


@pytest.fixture(params=["llama", "tied llama", "gpt2"])
def causal_name(request, tmp_path):
    return causal(tmp_path / "lm", request.param)


@pytest.mark.parametrize("n_outputs, labels", [(1, ["reward"]), (2, ["reward", "expected_reward"])])
def test_scorer_is_the_body_of_the_causal_model_with_a_new_head(n_outputs, labels, causal_name):
    scorer = pretrained.load_scorer(causal_name, Words(V), n_outputs)
    body = AutoModelForCausalLM.from_pretrained(causal_name).base_model.state_dict()
    weights = scorer.base_model.state_dict()
    assert set(weights) == set(body) and all(torch.equal(x, body[name]) for name, x in weights.items())
    assert type(scorer).__name__.endswith("ForSequenceClassification") and scorer.training
    assert scorer.score.weight.shape == (n_outputs, 32) and scorer.score.bias is None
    assert (scorer.config.num_labels, scorer.config.problem_type) == (n_outputs, "regression")
    assert [scorer.config.id2label[i] for i in range(n_outputs)] == labels
    assert (scorer.config.pad_token_id, scorer.config.eos_token_id) == (4, 5)  # as Words has them
    assert {p.dtype for p in scorer.parameters()} == {torch.float32}


@pytest.mark.parametrize("size", [32, 256])
def test_new_head_has_deviation_one_over_root_of_size_plus_one(size, tmp_path):
    options = {**SMALL, "hidden_size": size, "num_hidden_layers": 1}
    name = saved(tmp_path, LlamaConfig(**options))
    drawn = torch.cat(
        [pretrained.load_scorer(name, Words(V), 2, seed=s).score.weight.detach() for s in range(8)]
    )
    n, expected = drawn.numel(), 1 / math.sqrt(size + 1)
    assert abs(drawn.std().item() / expected - 1) < 4 / math.sqrt(2 * n)
    assert abs(drawn.mean().item()) < 4 * expected / math.sqrt(n)
    assert expected * (size + 1) > 5  # far from the wrong variant, 1 / (H + 1)


def test_a_new_head_depends_only_on_the_seed(tmp_path):
    name, heads = causal(tmp_path, "llama"), []
    for noise, seed in ((1, 0), (2, 0), (1, 5)):
        torch.manual_seed(noise)
        heads.append(pretrained.load_scorer(name, Words(V), 1, seed=seed).score.weight)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_tiny_is_tiny_model_of_the_seed_or_has_its_body():
    scorer = pretrained.load_scorer("tiny", tiny.tokenizer(), 1, seed=3)
    for model in (scorer, pretrained.load_policy("tiny", tiny.tokenizer(), seed=3)):
        body = tiny.model(3).base_model.state_dict()
        assert all(torch.equal(x, body[name]) for name, x in model.base_model.state_dict().items())


def classifier(path, n_labels):
    """A transformers classifier with n_labels, saved."""
    torch.manual_seed(n_labels)
    LlamaForSequenceClassification(LlamaConfig(**SMALL, num_labels=n_labels)).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    "has, wants, says",
    [
        (1, 2, r"is a reward model \(1 output\), not an advantage model \(2 outputs\) or a causal"),
        (2, 1, r"is a classifier of 2 labels, not a reward model \(1 output\) or a causal"),
        (2, 2, r"is a classifier of 2 labels, not an advantage model \(2 outputs\)"),
    ],
)
def test_a_head_of_another_size_is_refused(has, wants, says, tmp_path):
    with pytest.raises(InputError, match=says):
        pretrained.load_scorer(classifier(tmp_path, has), Words(V), wants)


def test_another_kind_of_head_is_refused(tmp_path):
    BertForSequenceClassification(BertConfig(**SMALL_BERT, num_labels=1)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no linear head named score"):
        pretrained.load_scorer(str(tmp_path), Words(V), 1)


def test_without_a_number_of_outputs_only_a_scorer_of_ours_loads(tmp_path):
    checkpoints.save_model(pretrained.load_scorer("tiny", SMALL_WORDS, 1), tiny.tokenizer(), tmp_path / "model")
    (tmp_path / "summary.json").write_text("{}")
    assert pretrained.load_scorer(str(tmp_path), SMALL_WORDS).config.num_labels == 1
    lm, two, five = causal(tmp_path / "lm", "llama"), classifier(tmp_path / "2", 2), classifier(tmp_path / "5", 5)
    kinds = {"tiny": "causal language model", lm: "LlamaForCausalLM", two: "classifier of 2 labels"}
    for name, kind in {**kinds, five: "classifier of 5 labels"}.items():
        with pytest.raises(InputError) as error:
            pretrained.load_scorer(name, Words(V))
        wanted = "a run of reward.py or advantage_model.py (for a preference model: common.programs.pairwise:oracle=RUN)"
        assert str(error.value) == f"{name} is a {kind}, not {wanted}"


# -- scores ------------------------------------------------------------------------------------
PAD_ID, END_ID = 0, 2


SMALL_WORDS = Words(V, PAD_ID, END_ID)  # it ends and pads as SMALL does


@pytest.fixture
def answers():
    """(input_ids, response_mask): prompts of 3, 5 and 1 tokens, responses of 4, 2 and 6 tokens."""
    generator = torch.Generator().manual_seed(2)
    input_ids, mask = torch.full((3, 9), PAD_ID), torch.zeros(3, 9, dtype=torch.bool)
    for row, (prompt, response) in enumerate([(3, 4), (5, 2), (1, 6)]):
        input_ids[row, : prompt + response] = torch.randint(3, V, (prompt + response,), generator=generator)
        input_ids[row, prompt + response - 1] = END_ID
        mask[row, prompt : prompt + response] = True
    return input_ids, mask


def score(model, input_ids, mask):
    """The score of each row's response, on rows made as in scorers.py."""
    rows = [(ids[: int(own.nonzero()[0])], ids[own]) for ids, own in zip(input_ids, mask)]
    texts = [batches.Comparison([], [""], prompt, [y], torch.zeros(1), "", None) for prompt, y in rows]
    return models.scores_of(model, batches.collate_comparisons(texts, PAD_ID, share_prompt=False))


def alone(name, input_ids, length):
    """The logits of transformers' own classifier for the first `length` tokens of a row, with no padding."""
    model = AutoModelForSequenceClassification.from_pretrained(name, attn_implementation="eager").eval()
    model.config.pad_token_id = None  # so that it reads the last token of one row
    with torch.no_grad():
        return model(input_ids=input_ids[None, :length]).logits[0]


def kept(scorer, path):
    scorer.save_pretrained(path)
    return str(path)


@torch.no_grad()
def test_score_of_a_reward_model_is_transformers_own(causal_name, answers, tmp_path):
    scorer = pretrained.load_scorer(causal_name, SMALL_WORDS, 1)
    name = kept(scorer, tmp_path / "rm")
    expected = [alone(name, row, n)[0].item() for row, n in zip(answers[0], (7, 7, 7))]
    got = score(scorer, *answers)
    assert got.dtype == torch.float32 and got.tolist() == pytest.approx(expected, abs=1e-5)
    before_end = [alone(name, row, 6)[0].item() for row in answers[0]]
    assert min(abs(a - b) for a, b in zip(got.tolist(), before_end)) > 1e-3  # one token too early
    # as a batch, with its attention mask, transformers reads the same tokens
    model = AutoModelForSequenceClassification.from_pretrained(name).eval()
    lengths = torch.arange(9) < 7
    batch = model(input_ids=answers[0], attention_mask=lengths.expand(3, 9).long()).logits[:, 0]
    torch.testing.assert_close(batch, got, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n_policies, n_others, share", [(1, 0, 1.0), (2, 1, 0.5), (4, 1, 0.75), (5, 3, 0.4)])
@torch.no_grad()
def test_the_score_of_an_advantage_model_is_a_share_of_reward_minus_expectation(
    n_policies, n_others, share, answers, tmp_path
):
    """(1 - K / N) (r - e): r, the first output, at the end token, e, the second one, at the prompt's last."""
    scorer = pretrained.load_scorer(causal(tmp_path / "lm", "llama"), SMALL_WORDS, 2)
    scorer.config.advantage_model = {"n_policies": n_policies, "n_others": n_others}
    name = kept(scorer, tmp_path / "am")
    r = [alone(name, row, 7)[0].item() for row in answers[0]]
    e = [alone(name, row, n)[1].item() for row, n in zip(answers[0], (3, 5, 1))]
    expected = [share * (x - y) for x, y in zip(r, e)]
    assert score(scorer, *answers).tolist() == pytest.approx(expected, abs=1e-5)
    again = pretrained.load_scorer(name, SMALL_WORDS, 2)  # with N and K in its configuration
    assert score(again, *answers).tolist() == pytest.approx(expected, abs=1e-5)
    for row, n, y in zip(answers[0], (3, 5, 1), e):  # the other output, or the token after: other numbers
        assert min(abs(alone(name, row, n)[0].item() - y), abs(alone(name, row, n + 1)[1].item() - y)) > 1e-3


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@torch.no_grad()
def test_head_outputs_are_fp32_if_the_body_computes_in_bf16(kind, rows, tmp_path):
    """Rounded to bf16, scores would tie: 8 bits of mantissa."""
    scorer = pretrained.load_scorer(causal(tmp_path, kind), Words(V), 1)
    where = torch.stack([torch.arange(4), torch.full((4,), 11)])
    exact = scorer.head_outputs(rows[0], where)
    scorer.compute_dtype = torch.bfloat16
    got = scorer.head_outputs(rows[0], where)
    assert got.dtype == exact.dtype == torch.float32
    assert not torch.equal(got, got.bfloat16().float()) and not torch.equal(got, exact)
    torch.testing.assert_close(got, exact, rtol=0, atol=0.1)


@torch.no_grad()
def test_next_token_logprobs_equal_log_softmax_at_each_place(model, rows):
    where = torch.tensor([[0, 2, 2, 3], [0, 4, 11, 6]])
    full = model(input_ids=rows[0]).logits.double().log_softmax(-1)
    got = next_token.logprobs(model, rows[0], where)
    assert got.shape == (4, V) and got.dtype == torch.float32
    torch.testing.assert_close(got, full[where[0], where[1]].float(), rtol=0, atol=1e-5)
    assert (got - full[where[0], (where[1] + 1) % 12].float()).abs().max() > 0.5  # a token too late
    assert next_token.logprobs(model, rows[0], where[:, :0]).shape == (0, V)
    # the head computes in fp32 on a body in bf16
    half = copy.deepcopy(model).bfloat16()
    hidden = half.base_model(input_ids=rows[0]).last_hidden_state[where[0], where[1]]
    weight = half.get_output_embeddings().weight
    want = (hidden.float() @ weight.float().T).log_softmax(-1)
    torch.testing.assert_close(next_token.logprobs(half, rows[0], where), want, rtol=0, atol=1e-5)
    assert ((hidden @ weight.T).float().log_softmax(-1) - want).abs().max() > 1e-3
    # the first tokens of every row given as what stands before: the same, at places counted after them
    before = [7, 3, 9]
    ids = torch.cat([torch.tensor([before]).expand(4, 3), rows[0]], 1)
    want = next_token.logprobs(model, ids, where + torch.tensor([[0], [3]]))
    got = next_token.logprobs(model, rows[0], where, before)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert (got - next_token.logprobs(model, rows[0], where)).abs().max() > 0.01


@torch.no_grad()
def test_the_unembedding_is_cast_to_fp32_in_pieces(rows, monkeypatch):
    """Its fp32 copy would be the largest tensor. The numbers are those of the whole product, of Phi with its bias."""
    where = torch.tensor([[0, 2, 2, 3], [0, 4, 11, 6]])
    torch.manual_seed(0)
    phi = AutoModelForCausalLM.from_config(PhiConfig(**{**SMALL, "num_key_value_heads": 4}))
    phi.lm_head.bias.normal_()
    for half in (small("llama").bfloat16(), phi.bfloat16()):
        head, sizes, plain = half.get_output_embeddings(), [], torch.Tensor.float
        hidden = half.base_model(input_ids=rows[0]).last_hidden_state[where[0], where[1]].float()
        bias = 0 if head.bias is None else head.bias.float()
        want = (hidden @ head.weight.float().T + bias).log_softmax(-1)
        for elements in (4 * 32 * 16, 16 * 32 * 16, models.LOGITS_IN_MEMORY):  # 4, 16 and all 61 rows at once
            sizes.clear()
            with monkeypatch.context() as patch:
                patch.setattr(models, "LOGITS_IN_MEMORY", elements)
                patch.setattr(torch.Tensor, "float", lambda x: sizes.append(x.numel()) or plain(x))
                got = next_token.logprobs(half, rows[0], where)
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
            assert max(sizes) == min(elements // 16, head.weight.numel())
        assert head.bias is None or (got - (hidden @ head.weight.float().T).log_softmax(-1)).abs().max() > 0.1


# -- chunks of the unembedding -----------------------------------------------------------------
def logprobs_at(model, input_ids, token_indices, targets):
    hidden = models._last_hidden(model, input_ids)
    return models._unembed(model, hidden[tuple(token_indices)], targets)[0]


PLACES = torch.tensor([[0, 3, 0, 1, 3, 3, 1], [0, 10, 7, 4, 10, 11, 4]])  # in any order, some twice
TARGETS = torch.tensor([5, 60, 17, 0, 8, 33, 0])


@pytest.mark.parametrize("places_in_memory", [1, 3, 1000])
@torch.no_grad()
def test_logprobs_at_any_places_equal_those_of_the_full_logits(model, rows, places_in_memory, monkeypatch):
    monkeypatch.setattr(models, "LOGITS_IN_MEMORY", places_in_memory * V + V // 2)
    full = model(input_ids=rows[0]).logits.double().log_softmax(-1)
    expected = full[PLACES[0], PLACES[1], TARGETS].float()
    got = logprobs_at(model, rows[0], PLACES, TARGETS)
    assert got.shape == (7,) and got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    # wrong variants: rows and columns exchanged, the place before, another target
    exchanged = full[PLACES[1] % 4, PLACES[0], TARGETS]
    before, other = full[PLACES[0], PLACES[1] - 1, TARGETS], full[PLACES[0], PLACES[1], TARGETS.roll(1)]
    assert min((got - x).abs().max() for x in (exchanged, before, other)) > 0.5


def test_many_chunks_are_recomputed_in_backward_and_a_few_are_kept(rows, monkeypatch):
    """Recomputing changes no bit of a gradient."""
    model, seen, grads = small("llama"), [], {}
    model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    cases = (1, 4, 2, [1] * 7), (2, 4, 1, [2, 2, 2, 1]), (2, 0, 2, [2, 2, 2, 1]), (7, 0, 1, [7])
    for places_in_memory, chunks_kept, runs, forward in cases:
        monkeypatch.setattr(models, "LOGITS_IN_MEMORY", places_in_memory * V)
        monkeypatch.setattr(models, "CHUNKS_KEPT", chunks_kept)
        seen.clear()
        logprobs = logprobs_at(model, rows[0], PLACES, TARGETS)
        assert seen == forward
        grads[runs, places_in_memory] = torch.autograd.grad(logprobs.sum(), list(model.parameters()))
        assert sorted(seen) == sorted(forward * runs)
        with torch.no_grad():
            seen.clear()
            logprobs_at(model, rows[0], PLACES, TARGETS)
        assert seen == forward
    assert all(map(torch.equal, grads[1, 2], grads[2, 2])) and grads[1, 2][0].any()


def test_an_empty_selection_still_connects_every_parameter(model, rows):
    model.zero_grad()
    logprobs = logprobs_at(model, rows[0], PLACES[:, :0], TARGETS[:0])
    assert logprobs.shape == (0,) and logprobs.dtype == torch.float32
    logprobs.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


# -- shares_prompts ----------------------------------------------------------------------------
def no_mask(forward):
    return lambda *args, attention_mask=None, **options: forward(*args, **options)


@pytest.mark.parametrize("load", [pretrained.load_policy, lambda *given: pretrained.load_scorer(*given, 1)])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("leak", [None, no_mask, drop_positions])
def test_shares_prompts_detects_responses_that_see_each_other(
    load, kind, leak, tmp_path, capsys
):
    model = load(causal(tmp_path, kind), Words(V))
    if leak:
        model.base_model.forward = leak(model.base_model.forward)
    model.compute_dtype = torch.bfloat16  # the probe computes in fp32, where FSDP does not cast
    assert checks.shares_prompts(model, 64) is (leak is None) and model.compute_dtype == torch.bfloat16
    said = f"{kind}: responses cannot share their prompt: each has its own copy of it\n"
    assert capsys.readouterr().out == (said if leak else "")


@pytest.mark.parametrize(
    "size, gap, holds", [(-43.0, 2**-18, True), (-43.0, 2**-16, False), (-1.0, 2**-18, False), (-1.0, 1e-6, True)]
)
def test_one_rounding_of_the_outputs_may_exceed_a_thousandth_of_the_effect_of_positions(size, gap, holds, tmp_path):
    """The sum of four log probabilities of random weights was -43, where neighbouring numbers are 2^-18 apart, and
    wrong positions changed it by 0.0011."""
    Rows = collections.namedtuple("Rows", "gap input_ids position_ids", defaults=(torch.ones(1, 4), None))
    outputs_of = lambda rows: torch.tensor([size + (rows.gap if rows.position_ids is None else 0.0011)])
    model = pretrained.load_policy(causal(tmp_path, "llama"), Words(V))
    assert checks._are_as_alone(model, outputs_of, Rows(gap), Rows(0.0), "") is holds


@pytest.mark.parametrize(
    "supported, flags, want",
    [
        (["both", "both"], (True, True), (True, True)),
        (["both", "packs"], (True, True), (True, False)),
        (["neither", "both"], (True, True), (False, False)),
        (["both"], (True, False), (True, False)),
        (["both"], (False, True), (False, False)),  # a row of its own has nobody to share a prompt with
        (["both", "frozen base"], (True, True), (True, True)),  # tested as the policy, in the policy's dtype
    ],
)
def test_rows_of_ppo_are_those_that_all_models_support_and_the_flags_allow(supported, flags, want, monkeypatch):
    monkeypatch.setattr(checks, "packs", lambda model: model.supports != "neither")
    monkeypatch.setattr(checks, "shares_prompts", lambda model, max_length: model.supports == "both")
    args = types.SimpleNamespace(packing=flags[0], share_prompt=flags[1], max_length=64)
    made = []
    for support in supported:
        made.append(lora.FrozenBase.__new__(lora.FrozenBase) if support == "frozen base" else torch.nn.Module())
        vars(made[-1])["supports"] = support
    checks.fit_rows(args, made)
    assert (args.packing, args.share_prompt) == want


# -- families (what they say of responses that share a row: test_families.py) ---------------------
def family(name, path):
    tiny_families.save(name, path)
    return str(path)


@pytest.mark.parametrize("kind", ["Mistral (window)", "Cohere 2", "Gemma 2", "gpt-oss"])
def test_a_missing_window_is_detected_by_rows_longer_than_it(kind, tmp_path, monkeypatch):
    policy = pretrained.load_policy(family(kind, tmp_path), tiny.tokenizer())
    masks = models._masks
    plain = types.SimpleNamespace(_attn_implementation=policy.config._attn_implementation)
    monkeypatch.setattr(models, "_masks", lambda config, *given: masks(plain, *given))
    assert checks.shares_prompts(policy, 8) and not checks.shares_prompts(policy, 12)


def test_gpt_neos_windows_of_columns_are_detected_although_a_prompt_with_two_short_responses_fits(tmp_path):
    policy = pretrained.load_policy(family("GPT-Neo", tmp_path), tiny.tokenizer())
    assert checks.window(policy.config) == 8  # 2 + 1 + 3 tokens fit, several responses of 3 do not
    assert not checks.shares_prompts(policy, 5)


def test_the_trial_row_stays_short_for_a_window_of_positions_far_beyond_max_length(tmp_path, monkeypatch):
    """Phi-3's is 262,144 tokens: a row longer than that would need masks of 64 GiB."""
    policy = pretrained.load_policy(family("Mistral (window)", tmp_path), tiny.tokenizer())
    policy.config.sliding_window = 262144
    collated, collate = [], batches.collate_comparisons
    keep = lambda *args, **options: collated.append(collate(*args, **options)) or collated[-1]
    monkeypatch.setattr(batches, "collate_comparisons", keep)
    assert checks.shares_prompts(policy, 64)
    assert [batch.input_ids.shape[1] for batch in collated] == [32 + 31 + 32, 64]


@pytest.mark.parametrize("kind", ["Granite 3 MoE", "Cohere 2", "Gemma 2", "LFM2", "Llama 3"])
@torch.no_grad()
def test_a_scorer_of_any_family_reads_back_with_its_scores(kind, answers, tmp_path):
    """Also in transformers: with its class or, if it has none, with the body and the head's weights."""
    name = family(kind, tmp_path / "lm")
    scorer = pretrained.load_scorer(name, SMALL_WORDS, 1)
    hidden = AutoModelForCausalLM.from_pretrained(name).base_model(input_ids=answers[0]).last_hidden_state
    expected = (hidden[:, 6] @ scorer.score.weight.T)[:, 0]
    checkpoints.save_model(scorer, tiny.tokenizer(), tmp_path / "rm")
    again = pretrained.load_scorer(str(tmp_path / "rm"), SMALL_WORDS, seed=1)  # no new head
    assert type(again) is type(scorer) and "ForSequenceClassification" in type(again).__name__
    for model in (scorer, again):
        torch.testing.assert_close(score(model, *answers), expected, rtol=0, atol=1e-5)
    body = AutoModel.from_pretrained(tmp_path / "rm")(input_ids=answers[0]).last_hidden_state
    head = load_file(tmp_path / "rm/model.safetensors")["score.weight"]
    torch.testing.assert_close((body[:, 6] @ head.T)[:, 0], expected, rtol=0, atol=1e-5)
    if hasattr(transformers, type(scorer).__name__):
        got = [alone(str(tmp_path / "rm"), row, 7)[0] for row in answers[0]]
        torch.testing.assert_close(torch.stack(got), expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_export_of_a_multimodal_models_text_part_says_so_and_reads_back(rows, tmp_path):
    start, end = family("Gemma 3 (multimodal)", tmp_path / "whole"), str(tmp_path / "end")
    assert pretrained.is_causal_lm(start)
    policy = pretrained.load_policy(start, tiny.tokenizer())
    checkpoints.save_model(policy, tiny.tokenizer(), end)
    config = json.loads(Path(end, "config.json").read_text())
    assert config["text_part_of"] == "Gemma3ForConditionalGeneration"
    assert type(AutoModelForCausalLM.from_pretrained(end)).__name__ == "Gemma3ForCausalLM"
    again = pretrained.load_policy(end, tiny.tokenizer())
    torch.testing.assert_close(again.token_logprobs(*rows), policy.token_logprobs(*rows))


@pytest.mark.parametrize("kind, model_type", [("BERT", "bert"), ("Granite 3 MoE", "granitemoe")])
def test_a_model_with_an_unknown_change_to_its_logits_is_refused(
    kind, model_type, tmp_path, monkeypatch
):
    monkeypatch.setattr(models, "LOGIT_FACTORS", {})
    why = f"^{model_type}: two forwards differ: .* changes logits by more than a factor and a cap$"
    with pytest.raises(InputError, match=why):
        pretrained.load_policy(family(kind, tmp_path), tiny.tokenizer())


def test_missing_weights_are_named(tmp_path):
    name = causal(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    for load in (pretrained.load_policy, lambda *given: pretrained.load_scorer(*given, 1)):
        with pytest.raises(InputError, match="1 of its weights .* model.layers.1.mlp.up_proj.weight"):
            load(name, Words(V))


# -- find_model --------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(*files):
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text("{}")

    return make


def test_find_model_takes_tiny_folders_finished_runs_and_hub_names(folder):
    folder("runs/sft/args.json", "runs/sft/summary.json", "runs/sft/model/config.json", "plain/config.json")
    assert pretrained.find_model("runs/sft") == "runs/sft/model"
    for name in ("plain", "runs/sft/model", "tiny", "org/name", "gpt2"):
        assert pretrained.find_model(name) == name


@pytest.mark.parametrize(
    "files, name, says",
    [
        ([], "runs/sft", "python sft.py"),  # a missing stage names its command
        ([], "runs/my_run", "Check the path"),  # no script of that name
        ([], "/no/where", "/no/where"),
        ([], "a/b/c", "a/b/c"),  # no hub name
        (["runs/sft/args.json", "runs/sft/model/config.json"], "runs/sft", "not finished"),  # no summary
        (["notes/readme.md"], "notes", "config.json"),
    ],
)
def test_find_model_names_the_missing_part(files, name, says, folder):
    folder(*files)
    with pytest.raises(InputError, match=says) as error:
        pretrained.find_model(name)
    assert name.rstrip("/") in str(error.value)


# -- what a device would be waited for ---------------------------------------------------------------
class Waits(TorchDispatchMode):
    """Count how often Python reads a value from the device, or counts the True values of a mask."""

    n = 0

    def __torch_dispatch__(self, op, kinds, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        indices = args[1] if "index" in name and isinstance(args[1], list) else []
        masks = any(x is not None and x.dtype == torch.bool for x in indices)
        self.n += masks or name in ("_local_scalar_dense", "nonzero", "masked_select", "equal")
        return op(*args, **kwargs or {})


def one_update(name, script):
    """{parameter of the script's update: a value for it}, on the tiny model."""
    torch.manual_seed(0)
    args, tokenizer = script.Args(), tiny.tokenizer()
    ids = lambda n: torch.randint(5, 40, (n,), dtype=torch.int32)
    documents = [batches.Document(ids(n), torch.arange(n) > 3, [], None, i) for i, n in enumerate((9, 7, 12))]
    ratios = torch.ones(2, args.n_others) if name == "advantage_model" else None
    labels = {"ranks": torch.tensor([0, 1]), "ratios": ratios, "ref_logprobs": torch.zeros(2)}
    pairs = [
        batches.Comparison([], ["a", "b"], ids(4), [ids(n), ids(3)], source="", row=None, **labels) for n in (5, 6)
    ]
    n_outputs = {"reward": 1, "advantage_model": 2}.get(name)
    load = pretrained.load_scorer if n_outputs else pretrained.load_policy
    model = dist.shard(load("tiny", tokenizer, *[n_outputs] if n_outputs else []), torch.device("cpu"))
    given = {
        "model": model, "optimizer": dist.adamw(model, 1e-3, args), "comparisons": pairs, "pairs": pairs, "extra": {},
        "blocks": [[document] for document in documents], "minibatch": [0, 1, 2], "policy_learns": True, "args": args,
    }  # fmt: skip
    if name == "ppo":
        value = dist.shard(pretrained.load_scorer("tiny", tokenizer, 1), torch.device("cpu"))
        optimizers = [dist.adamw(learner, 1e-3, args) for learner in (model, value)]
        given["agent"] = ppo.Agent(model, value, None, tokenizer, *optimizers)
        mask = batches.response_mask(documents)
        logprobs, rewards, values = (torch.randn(mask.shape) * mask for _ in range(3))
        known = {"old_logprobs": logprobs, "ref_logprobs": logprobs, "old_values": values}
        rollout = ppo.Rollout([], documents, mask, mask[:, 0], response_rewards=rewards[:, 0], **known)
        ppo.estimate_advantages(rollout, args)
        given["rollout"] = rollout
    return {key: given[key] for key in inspect.signature(script.update).parameters}


MOST = {"sft": 1, "reward": 0, "advantage_model": 0, "ppo": 2, "dpo_iterative": 0}  # of packed forwards


@pytest.mark.parametrize("name", MOST)
def test_how_often_a_micro_batch_waits_for_the_device(name, monkeypatch):
    script, waits, counts = importlib.import_module(name), Waits(), []
    given = one_update(name, script)
    args = given["args"]
    for place, function in ((batches, "collate"), (ppo.Rollout, "in_batch")):  # on the host
        monkeypatch.setattr(place, function, _disable_current_modes()(getattr(place, function)))
    for args.packing, args.micro_batch_size in ((False, 9), (False, 1)):  # one micro-batch; 3, of pairs 2
        waits.n = 0
        with waits:
            script.update(**given)
        counts.append(waits.n)
    assert counts[1] - counts[0] == MOST[name] * (2 if name in ("sft", "ppo") else 1)


def test_a_device_that_works_ahead_gives_the_same_samples_with_one_wait_per_step(model, monkeypatch):
    """A CPU that is declared to work ahead: finished rows run one more step."""
    prompts, seen, waits, choose = [[3 + n] * n for n in (2, 9, 5, 7, 1, 12)], [], Waits(), sampler.choose
    options = {"n": 2, "max_new_tokens": 12, "stop_ids": range(3, V, 6), "pad_id": 0, "slots": 5, "seed": 1}
    want = sampler.sample(model, prompts, **options)
    event = types.SimpleNamespace(record=lambda: None, synchronize=lambda: seen.append("wait"))
    monkeypatch.setattr(torch, "Event", lambda device: event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    monkeypatch.setattr(sampler, "WORKS_AHEAD", ("cpu",))
    monkeypatch.setattr(sampler, "choose", lambda *given: seen.append("step") or choose(*given))
    monkeypatch.setattr(sampler, "_prefill", _disable_current_modes()(sampler._prefill))
    with waits:
        got = sampler.sample(model, prompts, **options)
    assert torch.equal(got.response_tokens, want.response_tokens) and torch.equal(got.finished, want.finished)
    torch.testing.assert_close(got.sample_logprobs, want.sample_logprobs)
    assert seen.count("wait") == seen.count("step") > 9 and waits.n == 1  # the one for NaN


KEPT = ["DeepSeek V3", "DeepSeek V4", "Hunyuan MoE", "LFM2 MoE", "OLMo hybrid"]  # each for another reason
HALF = [*((kind, torch.bfloat16) for kind in KEPT), ("RWKV", torch.float16), ("DeepSeek V3", torch.float32)]


@pytest.mark.parametrize("kind, dtype", HALF)
@torch.no_grad()
def test_the_export_and_the_evaluated_model_round_like_transformers(
    kind, dtype, tmp_path, monkeypatch
):
    """A router's biases of 14.22 to 14.27 are all 14.25 in bfloat16, and an expert's number 257 is 256."""
    monkeypatch.setitem(tiny_families.FAMILIES, "DeepSeek V4", "deepseek_v4")  # which cannot be sampled
    policy = pretrained.load_policy(family(kind, tmp_path / "lm"), tiny.tokenizer())
    for name, weight in policy.state_dict().items():
        if "bias" in name or not weight.is_floating_point():
            weight.copy_(257 if weight.dtype == torch.long else 14.22 + 0.01 * torch.rand(weight.shape))
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    policy.save_pretrained(tmp_path / "whole")
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=dtype).state_dict()
    checkpoints.save_model(policy, tiny.tokenizer(), tmp_path / "rounded", dtype)
    run.Run.round_weights(types.SimpleNamespace(dtype=dtype), policy)
    files = load_file(tmp_path / "rounded/model.safetensors")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "rounded").state_dict()
    for name, weight in policy.state_dict().items():
        assert torch.equal(weight, wanted[name].to(weight.dtype)), name
        assert torch.equal(read[name], wanted[name]) and read[name].dtype == wanted[name].dtype, name
        assert files.get(name, wanted[name]).dtype == wanted[name].dtype, name
    changed = {name for name, weight in policy.state_dict().items() if not torch.equal(weight, before[name])}
    assert (changed == set()) == (dtype == torch.float32) and len(changed) < len(before)


# -- families in bfloat16 ----------------------------------------------------------------------------
@pytest.mark.parametrize("load", [pretrained.load_policy, lambda *given: pretrained.load_scorer(*given, 1)])
def test_a_family_that_cannot_compute_in_bfloat16_ends_at_the_first_check(load, tmp_path):
    """DBRX adds bfloat16 to float32. Computed in float32, the check would pass, and the first step fail."""
    model = load(family("DBRX", tmp_path), tiny.tokenizer())
    for check in (checks.packs, lambda model: checks.shares_prompts(model, 64)):
        model.compute_dtype = torch.float32
        assert check(model)
        model.compute_dtype = torch.bfloat16
        with pytest.raises(RuntimeError, match=run.DTYPES):  # which launch knows
            check(model)


# -- room for samples ------------------------------------------------------------------------------
SHAPES = {  # layers, hidden size, heads, key-value heads -> bytes of a token's keys and values in bfloat16
    "Llama 3 8B": ((32, 4096, 32, 8), 131_072),  # 2 x 32 layers x 8 heads x 128 x 2 bytes
    "Llama 2 7B": ((32, 4096, 32, None), 524_288),  # no grouped queries: 32 heads
    "Qwen2.5 7B": ((28, 3584, 28, 4), 57_344),
}


@pytest.mark.parametrize("name", SHAPES)
def test_bytes_of_a_cached_token_by_hand(name):
    (layers, hidden, heads, of_keys), expected = SHAPES[name]
    shape = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    config = AutoConfig.for_model("llama", **shape, num_key_value_heads=of_keys)
    assert checks.cache_bytes(config, torch.bfloat16) == expected == checks.cache_bytes(config, torch.float32) / 2
    assert name != "Llama 3 8B" or round(64 * 2080 * expected / 1e9, 1) == 17.4


@pytest.mark.parametrize("name", ["Llama 3", "Qwen3", "GPT-2", "Gemma 2", "Gemma 4"])
def test_the_sampler_stores_the_computed_bytes_per_token(name):
    """Gemma 2 has windows; Gemma 4 has heads of two sizes, all counted with the larger one."""
    model, made, make = tiny_families.build(name), [], sampler.RaggedCache
    with mock.patch.object(sampler, "RaggedCache", lambda *given: made.append(make(*given)) or made[-1]):
        sampler.sample(model, [[5, 6, 7]] * 3, max_new_tokens=4, stop_ids=[], pad_id=0, slots=2)
    n_bytes = sum(x.nbytes for layer in made[-1].layers for x in layer.tokens.values())
    computed = 2 * (3 + 4 + sampler.SPARE_COLUMNS) * checks.cache_bytes(model.config, torch.float32)
    assert n_bytes == computed or name == "Gemma 4" and n_bytes < computed < 1.4 * n_bytes


def gpu_policy(**more):
    """8 billion weights of Llama 3's shape on a GPU; half of them learn."""
    shape = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    weights = [
        types.SimpleNamespace(numel=lambda: 4 * 10**9, requires_grad=learns, dtype=torch.float32)
        for learns in (True, False)
    ]
    values = {"device": torch.device("cuda"), "compute_dtype": torch.bfloat16, "parameters": lambda: weights}
    return types.SimpleNamespace(config=AutoConfig.for_model("llama", **shape), **{**values, **more})


@pytest.mark.parametrize(
    "free, given, slots, line",
    [
        (140, None, 256, ""),  # 140 - 8 - 32 - 16 = 84 GB for slots of 0.273 GB: 308
        (77, None, 64, ""),  # 21 GB: 77
        (68, None, 32, ""),  # 12 GB: 44
        (30, None, 1, ""),  # none fits: it is tried all the same
        (77, 64, 64, ""),
        (68, 64, 64, "--slots 64: cache of 64 x 2,080 tokens takes 17.4 GB, 12 GB are free. Use --slots 44 or "),
    ],
)
def test_slots_are_chosen_to_fit_and_a_number_that_does_not_fit_is_reported(
    free, given, slots, line, monkeypatch, capsys
):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (free * 10**9, 80 * 10**9))
    args = types.SimpleNamespace(slots=given, max_length=2048, iterations=1)
    checks.fit_slots(args, [gpu_policy()])
    assert args.slots == slots
    said = capsys.readouterr().out
    assert said.startswith(line) and bool(said) == bool(line)


def test_sft_and_scorers_answer_prompts_of_up_to_max_length(monkeypatch):
    """Their slots hold --max-new-tokens more: 12 GB hold 44 slots of 2,080 tokens, and 29 of 3,104."""
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (68 * 10**9, 80 * 10**9))
    args = types.SimpleNamespace(slots=None, max_length=2048, max_new_tokens=1024)
    checks.fit_slots(args, [gpu_policy()])
    assert args.slots == 16


def test_slots_without_an_accelerator_are_16_unless_a_number_is_given(capsys):
    for given, slots in ((None, 16), (3, 3), (10**6, 10**6)):
        args = types.SimpleNamespace(slots=given, max_length=2048, iterations=1)
        checks.fit_slots(args, [gpu_policy(device=torch.device("cpu"))])
        assert args.slots == slots and capsys.readouterr().out == ""


def test_copies_of_a_model_do_not_share_adamws_moments(monkeypatch):
    """Two copies on four ranks each: 65 GB free - 8 in reserve - 32 / 4 of moments - 16 of the copy: 120 slots of 0.273
    GB. If all eight ranks shared the moments, 135 would fit."""
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (65 * 10**9, 80 * 10**9))
    for name, value in {"world_size": lambda: 8, "shard_size": 4, "gather": lambda x: x}.items():
        monkeypatch.setattr(checks.dist, name, value)
    args = types.SimpleNamespace(slots=None, max_length=2048, iterations=1)
    checks.fit_slots(args, [gpu_policy()])
    assert args.slots == 64


def test_frozen_weights_in_the_compute_dtype_are_not_copied_to_sample(monkeypatch):
    """84 GB free - 8 in reserve - 32 of moments - 8 of the copy: 132 slots of 0.273 GB. A copy of all: 102."""
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (84 * 10**9, 80 * 10**9))
    policy, args = gpu_policy(), types.SimpleNamespace(slots=None, max_length=2048, iterations=1)
    policy.parameters()[1].dtype = torch.bfloat16
    checks.fit_slots(args, [policy])
    assert args.slots == 128
