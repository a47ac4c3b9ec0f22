"""--attention and float masks: results equal those of single texts and of boolean masks, or the flag is
refused in one line.

`pretend_flash` takes flash attention's path through transformers' own code. Only the kernels, which need a
GPU, are replaced by torch ones for the CPU."""

import inspect
import math
import sys

import pytest
import tiny_families
import torch
import torch.nn.attention.varlen
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
from common.scoring import next_token
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


# -- --attention varlen --------------------------------------------------------------------------
def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """torch's varlen_attn by its documentation, in plain operations. Its shapes, types and bounds are asserted."""
    assert q.ndim == k.ndim == v.ndim == 3 and q.dtype == k.dtype == v.dtype
    assert enable_gqa or q.shape[1] == k.shape[1]
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q[0] == 0 and cu_seq_q[-1] == len(q) == len(k)
    assert type(max_q) is type(max_k) is int and max_q == max_k == cu_seq_q.diff().max()
    before, after = (n if n >= 0 else len(q) for n in window_size)
    pieces = [x.tensor_split(cu_seq_q.tolist()[1:-1]) for x in (q, k, v)]
    out = []
    for q, k, v in zip(*pieces):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = (distance <= before) & (-distance <= after)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v))
    return torch.cat(out)


@pytest.fixture
def pretend_varlen(monkeypatch):
    """A machine with CUDA, and the calls of the kernel."""
    calls = []
    kernel = lambda *given, **options: calls.append(options) or varlen_attn(*given, **options)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", kernel)
    monkeypatch.setattr(dist, "attention", "varlen")
    monkeypatch.setattr(dist, "here", torch.device("cuda"))
    return calls


def both(family, tmp_path, monkeypatch, scorer=False):
    """(with --attention varlen, without): the same weights."""
    tiny_families.save(family, tmp_path)
    given = str(tmp_path), Words(V)
    load = lambda: pretrained.load_scorer(*given, 1) if scorer else pretrained.load_policy(*given)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "attention", "default")
        usual = load()
    return load(), usual


def test_the_stand_in_has_the_arguments_of_torchs_kernel():
    ours, theirs = (inspect.signature(x).parameters for x in (varlen_attn, torch.nn.attention.varlen.varlen_attn))
    positional = [list(x)[:7] for x in (ours, theirs)]
    assert len(positional[0]) == len(positional[1]) == 7  # _varlen gives these by their places
    assert [name[-1] for name in positional[1]] == ["y", "y", "e", "q", "k", "q", "k"]
    for name in list(ours)[7:]:
        assert ours[name].default == theirs[name].default


def test_torchs_own_kernel_takes_these_arguments_and_has_a_backward():
    """On the meta device, which has its shapes without its numbers: the real function, none of it replaced."""
    shapes = (2, 4, 7, 8), (2, 2, 7, 8), (2, 2, 7, 8)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for shape in shapes)
    bounds = torch.tensor([0, 3, 7, 14], dtype=torch.int32, device="meta")
    for window in (None, 4):
        options = {"scaling": 0.3, "sliding_window": window, "dropout": 0.0, "softcap": None, "position_ids": None}
        out, none = models._varlen(None, q, k, v, None, bounds, 7, **options)
        assert out.shape == (2, 7, 4, 8) and out.dtype == torch.bfloat16 and none is None
        assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [x.shape for x in (q, k, v)]
    with pytest.raises(ValueError, match="no dropout"):
        models._varlen(None, q, k, v, None, bounds, 7, dropout=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["Llama 3", "GPT-2", "Qwen3", "Mistral (window)", "Gemma 3"])
def test_varlen_equals_sdpa_with_its_mask_and_so_do_its_gradients(family, dtype, pretend_varlen, tmp_path, monkeypatch):
    """Grouped queries, all windows. Documents are longer than a window. No layer gets a T x T mask."""
    model, usual = both(family, tmp_path, monkeypatch)
    batch = batches.collate([documents_of([9, 24, 6]), documents_of([30, 8])], 0)
    got = []
    for one in (model, usual):
        one.compute_dtype = dtype
        logprobs = models.logprobs(one, batch)
        loss = logprobs.square().mean()
        got.append((logprobs.detach(), torch.autograd.grad(loss, list(one.parameters()), allow_unused=True)))
    config = model.config.get_text_config()
    assert len(pretend_varlen) == config.num_hidden_layers
    windows = {call["window_size"] for call in pretend_varlen}
    assert windows <= {(-1, 0), ((getattr(config, "sliding_window", None) or 0) - 1, 0)}
    close = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.15, "rtol": 0.1}
    torch.testing.assert_close(got[0][0], got[1][0], **close)
    for one, other in zip(got[0][1], got[1][1]):
        if one is not None:
            size = other.norm() + 1e-6
            assert (one - other).norm() <= (1e-4 if dtype == torch.float32 else 0.1) * size
    apart = batches.collate([[document] for document in batch.documents], 0)
    with torch.no_grad():
        alone = models.logprobs(model, apart)[apart.action_mask]
    torch.testing.assert_close(got[0][0][batch.action_mask], alone, **close)


@pytest.mark.parametrize("family", ["Llama 3", "Mistral (window)"])
@torch.no_grad()
def test_varlen_passes_the_checks_shares_prompts_and_samples_with_sdpa(
    family, pretend_varlen, tmp_path, monkeypatch, capsys
):
    for scorer in (True, False):
        model, usual = both(family, tmp_path, monkeypatch, scorer)
        for check in (checks.packs, lambda model: checks.shares_prompts(model, 64)):
            assert check(model) and pretend_varlen  # called for rows without a mask
            pretend_varlen.clear()
    assert capsys.readouterr().out == ""
    prompts = [document.ids.tolist() for document in documents_of([5, 17, 9])]
    options = {"max_new_tokens": 12, "stop_ids": [], "pad_id": 0, "temperature": 0, "slots": 2}
    first, second = (sampler.sample(x, prompts, **options).response_tokens for x in (model, usual))
    assert torch.equal(first, second) and not pretend_varlen
    plain = [sampler.RaggedCache(x, 2, 17, 12).is_plain for x in (model, usual)]
    assert plain[0] == plain[1] == (family == "Llama 3")
    ids, where = documents_of([9])[0].ids[None].long(), torch.tensor([[0], [8]])
    for before in ((), [7, 3, 9]):  # with a cache that holds three tokens
        got, want = (next_token.logprobs(x, ids, where, before) for x in (model, usual))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wrong", ["one document", "not causal", "one document per row"])
@torch.no_grad()
def test_a_kernel_that_ignores_the_bounds_or_order_is_refused_by_the_check(
    wrong, pretend_varlen, tmp_path, monkeypatch, capsys
):
    model, _ = both("Llama 3", tmp_path, monkeypatch)

    def kernel(q, k, v, bounds, *rest, **options):
        if wrong == "not causal":
            return varlen_attn(q, k, v, bounds, *rest, **{**options, "window_size": (-1, -1)})
        n_rows = 1 if wrong == "one document" or len(q) % 2 else 2
        ends = torch.arange(n_rows + 1, dtype=torch.int32) * (len(q) // n_rows)
        return varlen_attn(q, k, v, ends, ends, len(q) // n_rows, len(q) // n_rows, **options)

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", kernel)
    assert not checks.packs(model)
    assert "documents in a row would see each other" in capsys.readouterr().out


@pytest.mark.parametrize("family, says", [("BLOOM", "bloom does not learn with it on cuda"), ("Llama 3", "on cpu")])
def test_varlen_is_refused_without_cuda_and_for_masks_that_flash_attention_is_not_told(
    family, says, pretend_varlen, tmp_path, monkeypatch
):
    if says == "on cpu":
        monkeypatch.setattr(dist, "here", torch.device("cpu"))
    tiny_families.save(family, tmp_path)
    with pytest.raises(InputError, match=f"^--attention varlen: .*{says}$"):
        pretrained.load_policy(str(tmp_path), Words(V))


@pytest.mark.parametrize(
    "family, says",
    [
        *((name, "varlen_attn has no dropout, no attention sinks and no soft cap") for name in ("Gemma 2", "gpt-oss")),
        ("StableLM", "attn_mask"),  # its attention gets no bounds from transformers, so SDPA gets the placeholder
    ],
)
def test_varlen_raises_where_its_kernel_would_leave_something_out(
    family, says, pretend_varlen, tmp_path, monkeypatch, capsys
):
    model, _ = both(family, tmp_path, monkeypatch)
    with pytest.raises((ValueError, RuntimeError), match=says) as raised:
        checks.packs(model)

    def train(args):
        raise raised.value

    monkeypatch.setattr(dist, "here", torch.device("cpu"))
    monkeypatch.setattr(dist, "shutdown", lambda code: None)
    monkeypatch.setattr(sys, "argv", ["sft.py", "--attention", "varlen"])
    run.launch(train, sft.RECIPES)
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: --attention varlen: ")


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
    models.with_methods(model, [models.token_logprobs]).compute_dtype = dtype
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
