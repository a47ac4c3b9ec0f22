"""--attention and float masks: results equal those of single texts and of boolean masks, or the flag is
refused in one line.

`pretend_flash` takes flash attention's path through transformers' own code. Only the kernels, which need a
GPU, are replaced by torch ones for the CPU."""

import math
import sys

import pytest
import tiny_families
import torch
import transformers
from test_models import SMALL, V, causal, small
from helpers import Words
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils, modeling_flash_attention_utils
from transformers.integrations.flash_attention import flash_attention_forward

import sft
from common import batches, dist, models, sampler
from common.errors import InputError
from common.data import tiny
from common.loading import checks, pretrained
from common.run import run


def attend(q, k, v, scale):
    """Causal attention of one text: q (Tq, H, D), the last of the tokens of k (T, H', D)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    scores += torch.full(scores.shape[1:], -math.inf).triu(1 + k.shape[0] - q.shape[0])
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def varlen(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, causal=True, softmax_scale=None, **_):
    pieces = [x.tensor_split(cu.tolist()[1:-1]) for x, cu in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))]
    return torch.cat([attend(*text, softmax_scale) for text in zip(*pieces)])


def dense(q, k, v, causal=True, softmax_scale=None, **_):
    return torch.stack([attend(*row, softmax_scale) for row in zip(q, k, v)])


@pytest.fixture
def pretend_flash(monkeypatch):
    pads = modeling_flash_attention_utils._pad_input, modeling_flash_attention_utils._unpad_input
    kernels = dense, varlen, None, *pads
    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", lambda *_, **__: kernels)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    AttentionInterface.register("pretend_flash", flash_attention_forward)
    AttentionMaskInterface.register("pretend_flash", masking_utils.flash_attention_mask)
    monkeypatch.setattr(dist, "attention", "pretend_flash")
    yield
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("pretend_flash")


def documents_of(lengths):
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, V, (n,), generator=generator) for n in lengths]
    return [batches.Document(x, torch.arange(len(x)) > 2, [], None) for x in ids]


def pair_of(prompt, *responses):
    ids = [document.ids for document in documents_of([prompt, *responses])]
    return batches.Comparison([], ["a", "b"], ids[0], ids[1:], torch.tensor([0, 1]), "", None)


def load(kind, tmp_path, scorer=False):
    name = causal(tmp_path, kind)
    return pretrained.load_scorer(name, Words(V), 1) if scorer else pretrained.load_policy(name, Words(V))


# -- --attention ---------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("name", ["sdpa", "eager"])
@torch.no_grad()
def test_packing_sharing_and_sampling_equal_separate_rows_for_each_attention(name, kind, tmp_path, monkeypatch, capsys):
    usual = load(kind, tmp_path)
    monkeypatch.setattr(dist, "attention", name)
    for scorer in (False, True):
        model = load(kind, tmp_path, scorer)
        assert model.config._attn_implementation == model.base_model.config._attn_implementation == name
        assert checks.packs(model) and checks.shares_prompts(model, 64)
    model = load(kind, tmp_path)
    batch = batches.collate([documents_of([9, 14]), documents_of([20])], 0)
    torch.testing.assert_close(models.logprobs(model, batch), models.logprobs(usual, batch), atol=1e-6, rtol=1e-6)
    prompts = [document.ids.tolist() for document in documents_of([5, 17, 9])]
    options = {"max_new_tokens": 8, "stop_ids": [], "pad_id": 0, "temperature": 0, "slots": 2}
    first, second = (sampler.sample(x, prompts, **options).response_tokens for x in (model, usual))
    assert torch.equal(first, second) and capsys.readouterr().out == ""


@torch.no_grad()
def test_flash_attention_packs_by_bounds_decodes_ragged_rows_and_shares_no_prompt(
    pretend_flash, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(dist, "attention", "default")
    usual = load("llama", tmp_path)
    monkeypatch.setattr(dist, "attention", "pretend_flash")
    model = load("llama", tmp_path)
    assert checks.packs(model) and not checks.shares_prompts(model, 64)
    said = "llama: responses cannot share their prompt: each has its own copy of it\n"
    assert capsys.readouterr().out == said
    for blocks in ([documents_of([9, 14]), documents_of([7, 12, 3])], [documents_of([9]), documents_of([20])]):
        batch = batches.collate(blocks, 0)
        got, want = models.logprobs(model, batch), models.logprobs(usual, batch)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    batch = batches.collate_comparisons([pair_of(9, 5, 11)], 0, share_prompt=False)
    got, want = models.response_logprobs(model, batch), models.response_logprobs(usual, batch)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    prompts = [document.ids.tolist() for document in documents_of([5, 17, 9])]
    options = {"max_new_tokens": 8, "stop_ids": [], "pad_id": 0, "temperature": 0, "slots": 2}
    first, second = (sampler.sample(x, prompts, **options).response_tokens for x in (model, usual))
    assert torch.equal(first, second)


@torch.no_grad()
def test_without_bounds_flash_attention_lets_documents_of_a_batch_see_each_other(
    pretend_flash, tmp_path, monkeypatch, capsys
):
    """A probe of a single row would not detect this."""
    model = load("llama", tmp_path)
    plain = model.base_model.forward
    dropped = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    without = lambda **given: plain(**{name: x for name, x in given.items() if name not in dropped})
    monkeypatch.setattr(model.base_model, "forward", without)
    assert not checks.packs(model)
    assert "documents in a row would see each other" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, says",
    [
        ("nonsense", 'attn_implementation="nonsense"` is not supported'),
        ("flash_attention_2", "FlashAttention2 .* doesn't seem to be installed"),
        ("kernels-community/flash-attn2", "kernels"),
        ("flex_attention", "llama does not learn with it on cpu"),  # torch 2.13 has its forward there alone
    ],
)
def test_a_name_that_is_unknown_or_not_installed_is_refused_in_one_line(name, says, monkeypatch):
    monkeypatch.setattr(dist, "attention", name)
    for load_it in (pretrained.load_policy, lambda *given: pretrained.load_scorer(*given, 1)):
        with pytest.raises(InputError, match=f"^--attention {name}: .*{says}"):
            load_it("tiny", tiny.tokenizer())


def test_a_family_without_that_attention_and_later_failures_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dist, "attention", "eager")
    tiny_families.save("Falcon", tmp_path)  # its attention is chosen by class, as the model is made
    with pytest.raises(InputError, match="^--attention eager: falcon does not learn with it on cpu$"):
        pretrained.load_policy(str(tmp_path), tiny.tokenizer())

    def train(args):
        raise NotImplementedError("FlexAttention does not support backward on CPU.")

    capsys.readouterr()
    monkeypatch.setattr(dist, "shutdown", lambda code: None)
    monkeypatch.setattr(sys, "argv", ["sft.py", "--attention", "flex_attention"])
    run.launch(train, sft.RECIPES)
    said = capsys.readouterr().err
    assert said == "error: --attention flex_attention: FlexAttention does not support backward on CPU.\n"
    monkeypatch.setattr(sys, "argv", ["sft.py"])
    run.launch(train, sft.RECIPES)
    assert "Traceback" in capsys.readouterr().err


# -- masks ---------------------------------------------------------------------------------------
def test_the_additive_mask_by_hand():
    mask = torch.tensor([[True, False, False], [True, True, False], [False, False, True]])[None, None]
    added = models._additive(mask, torch.float32)
    x = -math.inf
    assert added.tolist() == [[[[0, x, x], [0, 0, x], [x, x, 0]]]]
    assert added.stride() == (24, 24, 8, 1) and added.dtype == torch.float32  # rows begin at multiples of 8
    with torch.autocast("cpu", torch.bfloat16):
        assert models._additive(mask, torch.float32).dtype == torch.bfloat16  # SDPA refuses another one than q has
    assert models._additive(mask[..., :1].expand(1, 1, 3, 16), torch.bfloat16).stride() == (48, 48, 16, 1)


def transformers_own(monkeypatch):
    """Masks of True and False, as without this repository."""
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", masking_utils.sdpa_mask)
    monkeypatch.setattr(models, "_additive", lambda mask, dtype: mask)


def trained(model, forward):
    """(loss, gradients, the storages of masks that were kept for backward: {address: bytes})"""
    kept = {}

    def pack(x):
        if x.ndim == 4 and x.shape[-1] == x.shape[-2] > 16:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = forward(model).square().mean()
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True), kept


PACKED = batches.collate([documents_of([9, 14, 6]), documents_of([20, 8])], 0)  # 29 columns
SHARED = batches.collate_comparisons([pair_of(9, 5, 13), pair_of(11, 12, 7)], 0)  # of 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "windows"])
@pytest.mark.parametrize(
    "batch, forward, size",
    [(PACKED, models.logprobs, 2 * 29 * 32), (SHARED, models.response_logprobs, None)],
    ids=["packed", "shared"],
)
def test_one_mask_is_kept_for_all_layers_and_changes_no_gradient(batch, forward, size, kind, dtype, monkeypatch):
    if kind == "windows":
        torch.manual_seed(0)
        config = transformers.MistralConfig(**SMALL, sliding_window=6)
        model = transformers.AutoModelForCausalLM.from_config(config).train()
    else:
        model = small(kind)
    models.with_methods(model, (models.token_logprobs, models.logprobs_at)).compute_dtype = dtype
    call = lambda model: forward(model, batch)
    loss, grads, kept = trained(model, call)
    with monkeypatch.context() as patch:
        transformers_own(patch)
        want_loss, want_grads, want_kept = trained(model, call)
    assert len(kept) == 1 and len(want_kept) == 2  # layers
    rows, width = batch.input_ids.shape
    assert list(kept.values()) == [rows * width * math.ceil(width / 8) * 8 * dtype.itemsize]
    assert size is None or list(kept.values()) == [size * dtype.itemsize]
    close = {"atol": 1e-6, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 0.01, "rtol": 0.02}
    torch.testing.assert_close(loss, want_loss, **close)
    for got, want in zip(grads, want_grads):
        torch.testing.assert_close(got, want, **close)
