import math

import pytest
import torch
from processes import flags, script
from scorers import column
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from common import dist, loading, lora, sampler, tiny
from common.errors import InputError

TOKENIZER = tiny.tokenizer()
IDS = torch.arange(30).view(2, 15) % 40
EVERY = torch.ones(2, 14, dtype=torch.bool)


def logprobs(model):
    with torch.no_grad():
        return model.token_logprobs(IDS, EVERY)


def learnt():
    """A model whose adapters have learnt something."""
    model = loading.load_policy("tiny", TOKENIZER, lora_rank=4)
    for name, p in model.named_parameters():
        if name.endswith("lora_b"):
            p.data.normal_(0, 0.1)
    return model


def test_an_adapter_adds_alpha_over_r_times_b_a_x_by_hand():
    model = loading.load_policy("tiny", TOKENIZER, lora_rank=4)
    layer, x = model.model.layers[0].mlp.down_proj, torch.randn(3, model.config.intermediate_size)
    assert torch.equal(layer(x), linear(x, layer.weight)) and 0 < layer.lora_a.abs().max() < 1
    layer.lora_b.data.normal_()
    a, b = layer.lora_a, layer.lora_b
    assert (a.shape, b.shape) == ((4, x.shape[1]), (len(layer.weight), 4))
    by_hand = x @ layer.weight.T + 32 / 4 * (x @ a.T @ b.T)
    torch.testing.assert_close(layer(x), by_hand)


def test_fresh_adapters_change_neither_log_probabilities_nor_greedy_tokens():
    plain, fresh = (loading.load_policy("tiny", TOKENIZER, lora_rank=rank) for rank in (0, 4))
    assert torch.equal(logprobs(plain), logprobs(fresh))
    options = {"max_new_tokens": 8, "stop_ids": [], "pad_id": 0, "temperature": 0.0}
    first, second = (sampler.sample(model, IDS.tolist(), **options) for model in (plain, fresh))
    assert torch.equal(first.response_tokens, second.response_tokens)


def test_adapters_alone_learn_at_ten_times_the_rate():
    model = loading.load_policy("tiny", TOKENIZER, lora_rank=4)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(names) == 2 * 7 * model.config.num_hidden_layers and all("lora_" in name for name in names)
    optimizer = dist.adamw(model, 1e-3, type("Args", (), {"weight_decay": 0.0}))
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert dist.set_lr(optimizer, 5e-4) == 5e-4 and optimizer.param_groups[0]["lr"] == 5e-3


def test_without_its_adapters_a_model_is_what_it_began_as():
    model, start = learnt(), loading.load_policy("tiny", TOKENIZER)
    before = lora.Without(model)
    assert torch.equal(logprobs(before), logprobs(start)) and before.config is model.config
    assert not torch.allclose(logprobs(model), logprobs(start), atol=1e-2)  # and they are on again


def test_the_exported_model_holds_the_adapters_in_its_weights(tmp_path):
    model = learnt()
    dist.save_model(model, TOKENIZER, tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    own = plain(IDS).logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    torch.testing.assert_close(logprobs(model), own.detach(), rtol=1e-4, atol=1e-4)
    assert not any("lora" in name for name in plain.state_dict())


def test_a_model_without_linear_layers_is_refused():
    model = torch.nn.Module()
    model._no_split_modules, model.config = None, type("Config", (), {"model_type": "odd"})
    with pytest.raises(InputError, match="odd has no linear layers"):
        lora.attach(model, 4, 0)


def test_ranks_and_resumed_runs_agree_and_the_start_is_ppos_reference(tmp_path):
    def run(name, folder, *argv, **options):
        short = {"output_dir": tmp_path / folder, "lora_rank": 4, "save_every": 2, "eval_every": 1}
        if name == "sft":
            short.update(max_steps=4, sample_prompts=0, lr=1e-4)
        else:
            short.update(model=tmp_path / "one", scorer="common.tiny:gold_scorer", iterations=2)
            short.update(prompts_per_iteration=16, minibatch_size=32, eval_prompts=8, value_warmup_steps=1)
        return script(name, *argv, *flags(**short), **options)

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
