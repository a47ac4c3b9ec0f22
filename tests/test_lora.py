"""common/loading/lora.py: adapters by hand, the frozen base, the export, ranks, resuming, and refused
models."""

import math
from types import SimpleNamespace

import dist_cases
import pytest
import tiny_families
import torch
from processes import flags, script
from helpers import column, write_rows
from safetensors.torch import load_file
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

import sft
from common import dist, sampler
from common.errors import InputError
from common.data import tiny
from common.loading import checks, lora, pretrained
from common.run import checkpoints
from common.run.run import Run

TOKENIZER = tiny.tokenizer()
IDS = torch.arange(30).view(2, 15) % 40
EVERY = torch.ones(2, 14, dtype=torch.bool)


def logprobs(model):
    with torch.no_grad():
        return model.token_logprobs(IDS, EVERY)


def learnt():
    """A model whose adapters have learnt something."""
    model = pretrained.load_policy("tiny", TOKENIZER, lora_rank=4)
    for name, p in model.named_parameters():
        if name.endswith("lora_b"):
            p.data.normal_(0, 0.1)
    return model


def test_an_adapter_adds_alpha_over_r_times_b_a_x_by_hand():
    model = pretrained.load_policy("tiny", TOKENIZER, lora_rank=4)
    layer, x = model.model.layers[0].mlp.down_proj, torch.randn(3, model.config.intermediate_size)
    assert torch.equal(layer(x), linear(x, layer.weight)) and 0 < layer.lora_a.abs().max() < 1
    layer.lora_b.data.normal_()
    a, b = layer.lora_a, layer.lora_b
    assert (a.shape, b.shape) == ((4, x.shape[1]), (len(layer.weight), 4))
    by_hand = x @ layer.weight.T + 32 / 4 * (x @ a.T @ b.T)
    torch.testing.assert_close(layer(x), by_hand)


def test_fresh_adapters_change_neither_log_probabilities_nor_greedy_tokens():
    plain, fresh = (pretrained.load_policy("tiny", TOKENIZER, lora_rank=rank) for rank in (0, 4))
    assert torch.equal(logprobs(plain), logprobs(fresh))
    options = {"max_new_tokens": 8, "stop_ids": [], "pad_id": 0, "temperature": 0.0}
    first, second = (sampler.sample(model, IDS.tolist(), **options) for model in (plain, fresh))
    assert torch.equal(first.response_tokens, second.response_tokens)


def test_a_frozen_base_equals_a_separate_copy_and_leaves_the_policy_unchanged():
    model = learnt()
    base = lora.FrozenBase(model)
    with_adapters = logprobs(model)
    assert torch.equal(logprobs(base), logprobs(pretrained.load_policy("tiny", TOKENIZER)))
    assert torch.equal(logprobs(model), with_adapters)
    assert (with_adapters - logprobs(base)).abs().max() > 1e-3
    assert base.config is model.config and base.device == model.device
    with pytest.raises(IndexError):  # the adapters are on again after an error, too
        base.token_logprobs(IDS + 10**6, EVERY)
    assert torch.equal(logprobs(model), with_adapters)


def test_only_the_seed_decides_what_adapters_start_from():
    start = lambda model: torch.cat([p.flatten() for name, p in model.named_parameters() if name.endswith("lora_a")])
    attached = lambda seed: start(lora.attach(pretrained.load_policy("tiny", TOKENIZER), 4, seed))
    assert torch.equal(attached(0), attached(0)) and not torch.equal(attached(0), attached(1))
    assert torch.equal(start(pretrained.load_policy("tiny", TOKENIZER, seed=1, lora_rank=4)), attached(1))


def test_only_adapters_learn_at_ten_times_the_rate():
    model = pretrained.load_policy("tiny", TOKENIZER, lora_rank=4)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(names) == 2 * 7 * model.config.num_hidden_layers and all("lora_" in name for name in names)
    optimizer = dist.adamw(model, 1e-3, type("Args", (), {"weight_decay": 0.0}))
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert dist.set_lr(optimizer, 5e-4) == 5e-4 and optimizer.param_groups[0]["lr"] == 5e-3


def test_the_exported_model_holds_the_adapters_in_its_weights(tmp_path):
    model = learnt()
    checkpoints.save_model(model, TOKENIZER, tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    own = plain(IDS).logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    torch.testing.assert_close(logprobs(model), own.detach(), rtol=1e-4, atol=1e-4)
    assert not any("lora" in name for name in plain.state_dict())


def test_a_model_without_linear_layers_is_refused():
    model = torch.nn.Module()
    model._no_split_modules, model.config = None, type("Config", (), {"model_type": "odd"})
    with pytest.raises(InputError, match="odd has no linear layers"):
        lora.attach(model, 4, 0)


def test_weights_without_an_adapter_are_named_with_their_share(tmp_path, capsys):
    """For example experts, which are one tensor. Shares by hand: 2 layers, 4 experts of 3 x 32 x 16, attention
    of 32 x 32 (two) and 16 x 32 (two), embedding and unembedding of a row a token."""
    tiny_families.save("Qwen3 MoE", tmp_path)
    capsys.readouterr()
    model = pretrained.load_policy(str(tmp_path), TOKENIZER, lora_rank=4)
    experts, attention, table = 2 * 4 * 3 * 32 * 16, 2 * 3 * 32 * 32, 32 * len(TOKENIZER)
    total = sum(p.numel() for name, p in model.named_parameters() if "lora" not in name)
    said = capsys.readouterr().out
    assert f"with adapters {attention / total:.0%}" in said and " 0%" not in said
    assert f"mlp.experts.gate_up_proj {experts * 2 / 3 / total:.0%}, " in said
    assert f"lm_head.weight {table / total:.0%}" in said and experts + attention + 2 * table < total < 58000


def with_token(how):
    """The tiny world's tokenizer with one more token, <|new|>."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({how: "<|new|>"} if how.endswith("token") else {how: ["<|new|>"]})
    return tokenizer


def test_an_untrained_end_token_is_refused_for_adapters(tmp_path, capsys):
    for how in ("pad_token", "extra_special_tokens"):
        pretrained.load_policy("tiny", with_token(how), lora_rank=4)
        named = "1 new token(s) cannot be learnt ('<|new|>')" in capsys.readouterr().out
        assert named == (how == "extra_special_tokens")  # padding is never to be learnt
    tokenizer = with_token("eos_token")
    with pytest.raises(InputError, match=r"^--lora-rank: tiny has never learnt its end token '<\|new\|>'.* --chat-template"):
        pretrained.load_policy("tiny", tokenizer, lora_rank=4)
    model = pretrained.load_policy("tiny", tokenizer)  # all weights learn it
    table = model.get_input_embeddings().weight.data  # as in a base model: two that it never met are the same
    table[-1] = table[7] + 1e-4
    checkpoints.save_model(model, tokenizer, tmp_path / "base")
    with pytest.raises(InputError, match="has never learnt"):
        pretrained.load_policy(str(tmp_path / "base"), tokenizer, lora_rank=4)
    table[-1] = 1.2 * table[7] + 0.05 * torch.randn(table.shape[1])  # it was learnt
    checkpoints.save_model(model, tokenizer, tmp_path / "learnt")
    pretrained.load_policy(str(tmp_path / "learnt"), tokenizer, lora_rank=4)


# -- frozen weights in the compute dtype ---------------------------------------------------
@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """The tiny world's model, its weights rounded to bfloat16."""
    folder = tmp_path_factory.mktemp("rounded")
    checkpoints.save_model(pretrained.load_policy("tiny", TOKENIZER), TOKENIZER, folder / "model", torch.bfloat16)
    return folder / "model"


def in_bfloat16(monkeypatch, name, wide=False):
    """A model as on an accelerator, with trained adapters. wide: keep its W in float32."""
    monkeypatch.setattr(dist, "compute_dtype", None if wide else "bfloat16")
    model = pretrained.load_policy(str(name), TOKENIZER, lora_rank=4)
    monkeypatch.setattr(dist, "compute_dtype", "bfloat16")
    for i, p in enumerate(p for name, p in model.named_parameters() if name.endswith("lora_b")):
        p.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(i))
    return dist.shard(model, torch.device("cpu"))


def test_frozen_linear_weights_have_the_compute_dtype_and_trained_ones_float32(
    monkeypatch, tmp_path, rounded, capsys
):
    """So has the unembedding, unless it is tied to the embedding, which autocast does not round."""
    tiny_families.build("Mistral").bfloat16().save_pretrained(tmp_path)  # not tied
    TOKENIZER.save_pretrained(tmp_path)
    for name, head in ((rounded, torch.float32), (tmp_path, torch.bfloat16)):
        model = in_bfloat16(monkeypatch, name)
        dtypes = {name: p.dtype for name, p in model.named_parameters()}
        assert dtypes.pop("lm_head.weight", head) == head and model.get_output_embeddings().weight.dtype == head
        for key, dtype in dtypes.items():
            frozen = key.endswith("_proj.weight")
            assert dtype == (torch.bfloat16 if frozen else torch.float32), key
            assert model.get_parameter(key).requires_grad == ("lora" in key)
        assert sum(dtype == torch.bfloat16 for dtype in dtypes.values()) == 7 * model.config.num_hidden_layers
    assert "stay in float32" not in capsys.readouterr().out
    dtypes = {p.dtype for p in in_bfloat16(monkeypatch, "tiny").parameters()}  # which bfloat16 would round
    assert dtypes == {torch.float32} and "frozen weights stay in float32" in capsys.readouterr().out
    monkeypatch.setattr(dist, "compute_dtype", None)  # a CPU computes in float32
    assert {p.dtype for p in pretrained.load_policy(str(rounded), TOKENIZER, lora_rank=4).parameters()} == dtypes


def test_frozen_weights_in_bfloat16_change_no_bit_of_outputs_or_training(monkeypatch, rounded):
    """test_dist.py has the same on two ranks."""
    results = []
    for wide in (False, True):
        model = in_bfloat16(monkeypatch, rounded, wide)
        first = logprobs(model), logprobs(lora.FrozenBase(model))
        optimizer = dist.adamw(model, 1e-3, dist_cases.ARGS)
        steps = [sft.update(model, optimizer, dist_cases.blocks()[i : i + 4], dist_cases.ARGS) for i in (0, 4)]
        with dist.consolidated(model):
            drawn = sampler.sample(model, IDS.tolist(), max_new_tokens=6, stop_ids=[], pad_id=0, seed=0)
        adapters = [p for name, p in model.named_parameters() if "lora" in name]
        results.append((*first, torch.tensor(steps), drawn.response_tokens, drawn.sample_logprobs, *adapters))
    assert all(map(torch.equal, *results)) and len(results[0]) == 5 + 2 * 7 * model.config.num_hidden_layers
    assert not torch.equal(results[0][0], results[0][1])


def test_small_steps_add_up_in_float32_adapters_but_not_in_bfloat16(monkeypatch, rounded):
    """16 steps of 1e-4 from 1, AdamW's on a constant gradient: bfloat16 has no number between 0.9961 and 1."""
    moved = {}
    for variant in (torch.float32, torch.bfloat16):
        model = in_bfloat16(monkeypatch, rounded)
        adapter = model.model.layers[0].mlp.down_proj.lora_b
        adapter.data = torch.ones_like(adapter, dtype=variant)
        optimizer = dist.adamw(model, 1e-5, SimpleNamespace(weight_decay=0.0))  # times 10
        for _ in range(16):
            adapter.grad = torch.ones_like(adapter)
            optimizer.step()
        moved[variant] = 1 - adapter.float().mean().item()
    assert moved[torch.float32] == pytest.approx(16e-4, rel=1e-3) and moved[torch.bfloat16] == 0


def test_the_export_adds_adapters_in_float32_and_does_not_change_the_model(monkeypatch, tmp_path, rounded):
    model = in_bfloat16(monkeypatch, rounded)
    base = lora.FrozenBase(model)
    before = logprobs(model), logprobs(base)
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.bfloat16:
            before = before[1], before[1]  # for then B is added to W, and the base is no more
        layer, name = model.model.layers[1].mlp.up_proj, "model.layers.1.mlp.up_proj.weight"
        whole = layer.weight.float() + 8 * layer.lora_b @ layer.lora_a  # alpha 32 over rank 4
        checkpoints.save_model(model, TOKENIZER, tmp_path / "model", dtype)
        assert layer.lora_b.any() and layer.weight.dtype == torch.bfloat16
        Run.round_weights(SimpleNamespace(dtype=dtype), model)  # as evaluate_export does
        written = load_file(tmp_path / "model" / "model.safetensors")[name]
        assert torch.equal(written, whole.to(dtype)) and written.dtype == dtype
        assert not torch.equal(written.float(), layer.weight.float()) or dtype == torch.bfloat16
        if dtype == torch.float32:
            assert torch.equal(logprobs(model), before[0]) and torch.equal(logprobs(base), before[1])
        else:
            assert torch.equal(layer.weight, whole.to(dtype)) and not layer.lora_b.any()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    plain.compute_dtype = torch.bfloat16
    merged = pretrained.models.with_methods(plain, [pretrained.models.token_logprobs])
    torch.testing.assert_close(logprobs(model), logprobs(merged), rtol=0, atol=0.05)


@torch.no_grad()
def test_a_half_precision_model_packs_and_shares_prompts_unless_positions_are_dropped(monkeypatch, rounded):
    model = in_bfloat16(monkeypatch, rounded)
    assert checks.packs(model) and checks.shares_prompts(model, 64)
    forward = model.base_model.forward
    model.base_model.forward = lambda *args, position_ids=None, **options: forward(*args, **options)
    assert not checks.packs(model) and not checks.shares_prompts(model, 64)


def test_a_model_that_holds_merged_adapters_keeps_its_float32_weights(monkeypatch, tmp_path, rounded):
    """Otherwise an iteration of DPO's changes below half a unit of bfloat16 would be rounded away."""
    model = in_bfloat16(monkeypatch, rounded)
    checkpoints.save_model(model, TOKENIZER, tmp_path / "1")
    assert {p.dtype for p in in_bfloat16(monkeypatch, tmp_path / "1").parameters()} == {torch.float32}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(kind) -> flags of small files with rows of this kind: to tokenise the whole tiny world takes seconds."""
    folder = tmp_path_factory.mktemp("rows")

    def of(kind):
        for split, count in (("train", 400), ("test", 40)):
            write_rows(folder / f"{kind}_{split}.jsonl", tiny.rows(kind, split)[:count])
        return {"dataset": folder / f"{kind}_train.jsonl", "eval_dataset": folder / f"{kind}_test.jsonl"}

    return of


def test_a_run_with_weights_in_bfloat16_resumes_to_the_same_bits(tmp_path, rounded, files):
    options = {"compute_dtype": "bfloat16", "lora_rank": 4, "save_every": 2, "max_steps": 4, "sample_prompts": 0}
    options |= {"model": rounded, **files("sft"), "max_length": 64, "eval_every": 1, "lr": 1e-4}
    run = lambda name, *argv, **more: script(  # noqa: E731
        "sft", "tiny", *argv, *flags(**options, output_dir=tmp_path / name), plots=False, **more
    )
    assert run("one").code == 0
    assert run("cut", moment="row 3").code == -9 and run("cut", "--resume").code == 0
    one, cut = ((tmp_path / name / "model/model.safetensors").read_bytes() for name in ("one", "cut"))
    assert one == cut


def test_ranks_and_resumed_runs_agree_and_the_start_is_ppos_reference(tmp_path, files):
    def run(name, folder, *argv, **options):
        short = {"output_dir": tmp_path / folder, "lora_rank": 4, "save_every": 2, "eval_every": 1}
        if name == "sft":
            short.update(max_steps=4, sample_prompts=0, lr=1e-4, **files("sft"))
        else:
            short.update(model=tmp_path / "one", scorer="common.data.tiny:gold_scorer", iterations=2)
            short.update(prompts_per_iteration=16, minibatch_size=32, eval_prompts=8, value_warmup_steps=1)
            short.update(files("prompts"))
        return script(name, *argv, *flags(**short), plots=False, **options)

    weights = lambda folder: (tmp_path / folder / "model/model.safetensors").read_bytes()  # noqa: E731
    assert run("sft", "one").code == 0 and run("sft", "two", ranks=2).code == 0
    assert run("sft", "cut", moment="row 3").code == -9 and run("sft", "cut", "--resume").code == 0
    assert weights("cut") == weights("one")
    one, two = (column(tmp_path / name, "loss/nll") for name in ("one", "two"))
    assert two == pytest.approx(one, abs=1e-4) and one[-1] < one[0]
    given = flags(reference=tmp_path / "one" / "model")  # a body of its own
    assert run("ppo", "ppo", "tiny").code == 0 and run("ppo", "given", "tiny", *given).code == 0
    kls = [column(tmp_path / name, "eval/kl")[-1] for name in ("ppo", "given")]
    assert weights("ppo") == weights("given") and kls[0] > 0 and math.isclose(*kls, abs_tol=1e-6)
