"""common/models.py against transformers' own forward: log probabilities, packing, loading."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaForSequenceClassification,
    LlamaConfig,
)

from common import data, models, tiny
from common.run import InputError

V = 61  # vocabulary, a prime: no other dimension has it
# initializer_range: so large that the distributions are far from uniform and a leak would be seen
SMALL = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SMALL |= {"initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(autouse=True, scope="module")
def one_thread():  # for matrices this small the threads only wait for each other: 26 s become 5
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


@pytest.mark.parametrize("temperature, entropy", [(1.0, False), (0.6, True)])
def test_gradients_equal_those_through_the_full_logits(model, rows, temperature, entropy, monkeypatch):
    monkeypatch.setattr(models, "LOGITS_IN_MEMORY", 3 * V)
    input_ids, mask = rows
    weight = torch.linspace(-1, 2, mask.numel()).view(mask.shape) * mask  # another weight for every token

    got = models.token_logprobs(model, *rows, temperature=temperature, entropy=entropy)
    if entropy:
        got, entropies = got
        assert not entropies.requires_grad
    got_grads = torch.autograd.grad((got * weight).sum(), list(model.parameters()))
    expected = reference(model, input_ids, temperature).gather(-1, input_ids[:, 1:, None])[..., 0]
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


def test_only_kept_positions_meet_the_unembedding_and_in_chunks(rows, monkeypatch):
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


@torch.no_grad()
def test_right_padding_changes_nothing(model, rows):
    input_ids, mask = rows[0][:2].clone(), torch.zeros(2, 11, dtype=torch.bool)
    mask[:, 2:7] = True  # rows of 8 tokens, then padding
    alone = models.token_logprobs(model, input_ids[:, :8], mask[:, :7])
    for pad in (0, V - 1):
        input_ids[:, 8:] = pad
        padded = models.token_logprobs(model, input_ids, mask)
        torch.testing.assert_close(padded[:, :7], alone, rtol=0, atol=1e-5)
        assert not padded[:, 7:].any()


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
    return data.Document(ids, torch.arange(length) >= 2, [], data.Row("f:1", {}))


@torch.no_grad()
def test_packed_documents_have_the_logprobs_they_have_alone(model):
    documents = [document(1, 9), document(2, 6), document(3, 11)]
    batch = data.collate([documents, [document(4, 4)]], pad_id=0)
    packed = models.token_logprobs(model, batch.input_ids, batch.action_mask, batch.position_ids)
    start = 0
    for d in documents:
        alone = models.token_logprobs(model, d.ids[None].long(), d.response_mask[None, 1:])
        length = len(d.ids)
        torch.testing.assert_close(packed[:1, start : start + length - 1], alone, rtol=0, atol=1e-5)
        start += length
    without = models.token_logprobs(model, batch.input_ids, batch.action_mask)  # documents see each other
    assert (without - packed)[0, 9:].abs().max() > 0.1


@torch.no_grad()
def test_what_the_first_document_says_changes_nothing_in_the_second(model):
    results = []
    for first in (document(1, 9), document(7, 9)):
        batch = data.collate([[first, document(2, 12)]], pad_id=0)
        results.append(
            models.token_logprobs(model, batch.input_ids, batch.action_mask, batch.position_ids)[0]
        )
    torch.testing.assert_close(results[0][9:], results[1][9:], rtol=0, atol=1e-6)
    assert (results[0] - results[1])[:8].abs().max() > 0.1


def drop_positions(forward):
    return lambda *args, position_ids=None, **options: forward(*args, **options)


def see_everything(forward):  # with a mask of its own transformers does not look for documents
    def wrapped(input_ids, **options):
        return forward(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **options)

    return wrapped


@pytest.mark.parametrize("leak", [None, drop_positions, see_everything])
def test_check_packing_passes_where_documents_are_apart_and_refuses_where_they_leak(leak):
    model = models.load_policy("tiny", tiny.tokenizer())
    model.compute_dtype = torch.float32  # as dist.shard sets it
    if leak is None:
        models.check_packing(model)
        return
    model.model.forward = leak(model.model.forward)
    with pytest.raises(InputError, match="--no-packing"):
        models.check_packing(model)


# -- load_policy -------------------------------------------------------------------------------
def saved(path, config, seed=0):
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


class Words:
    """All that load_policy asks of a tokenizer: its length, padding and end token."""

    def __init__(self, length):
        self.length, self.pad_token_id, self.eos_token_id = length, 4, 5

    def __len__(self):
        return self.length


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_off_in_training(checkpointing, rows, tmp_path):
    name = saved(tmp_path, GPT2Config(**GPT2, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1))
    policy = models.load_policy(name, Words(V), gradient_checkpointing=checkpointing)
    plain = AutoModelForCausalLM.from_pretrained(name).train()
    once, twice = (policy.token_logprobs(*rows) for _ in range(2))
    assert policy.training and torch.equal(once, twice)
    once.sum().backward()
    assert all(p.grad is not None for p in policy.parameters())
    with torch.no_grad():  # as transformers loads it, two forwards differ
        assert (plain(rows[0]).logits - plain(rows[0]).logits).abs().max() > 1e-3
        expected = reference(plain.eval(), rows[0]).gather(-1, rows[0][:, 1:, None])[..., 0]
    torch.testing.assert_close(once, expected.where(rows[1], 0.0).float(), rtol=0, atol=1e-5)


def test_policy_is_fp32_with_the_tokenizers_padding_and_end(tmp_path):
    name = saved(tmp_path, LlamaConfig(**SMALL, dtype="bfloat16"))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    policy = models.load_policy(name, Words(V))
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    for settings in (policy.config, policy.generation_config):
        assert (settings.pad_token_id, settings.eos_token_id) == (4, 5)


FALCON = {k: SMALL[k] for k in SMALL if k != "initializer_range"} | {"mamba_d_ssm": 32, "mamba_n_heads": 4}
FALCON |= {"mamba_d_head": 8, "mamba_d_state": 8, "head_dim": 8}


@pytest.mark.parametrize(
    "config, key",
    [
        (lambda: Gemma2Config(**SMALL, head_dim=8), "final_logit_softcapping"),
        (lambda: CohereConfig(**SMALL, logit_scale=0.0625), "logit_scale"),
        (lambda: GraniteConfig(**SMALL, logits_scaling=8.0), "logits_scaling"),
        (lambda: FalconH1Config(**FALCON, lm_head_multiplier=0.1), "lm_head_multiplier"),
    ],
    ids=["gemma2", "cohere", "granite", "falcon h1"],
)
def test_models_that_change_their_logits_are_refused(config, key, tmp_path):
    with pytest.raises(InputError, match=key):
        models.load_policy(saved(tmp_path, config()), Words(V))


def test_another_kind_of_model_is_refused_by_name(tmp_path):
    LlamaForSequenceClassification(LlamaConfig(**SMALL, num_labels=1)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="LlamaForSequenceClassification, wanted a causal language model"):
        models.load_policy(str(tmp_path), Words(V))


def test_the_same_family_is_accepted_when_its_logits_are_plain(rows, tmp_path):
    config = GraniteConfig(**SMALL, logits_scaling=1.0)
    policy = models.load_policy(saved(tmp_path, config), Words(V))
    with torch.no_grad():
        expected = reference(policy, rows[0]).gather(-1, rows[0][:, 1:, None])[..., 0]
        got = policy.token_logprobs(*rows)
    torch.testing.assert_close(got, expected.where(rows[1], 0.0).float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("length, rows_after", [(V + 2, V + 2), (V, V), (V - 5, V)])
def test_added_tokens_get_the_mean_embedding_and_a_larger_table_stays(tied, length, rows_after, tmp_path):
    name = saved(tmp_path, LlamaConfig(**SMALL, tie_word_embeddings=tied))
    before = AutoModelForCausalLM.from_pretrained(name)
    policy = models.load_policy(name, Words(length))
    assert policy.config.vocab_size == rows_after
    assert (policy.lm_head.weight is policy.model.embed_tokens.weight) == tied
    for table, old in (
        (policy.model.embed_tokens, before.model.embed_tokens),
        (policy.lm_head, before.lm_head),
    ):
        assert table.weight.shape[0] == rows_after and torch.equal(table.weight[:V], old.weight)
        for row in table.weight[V:]:
            torch.testing.assert_close(row, old.weight.mean(0))


def test_tiny_policy_is_a_function_of_its_seed():
    a, b, c = (models.load_policy("tiny", tiny.tokenizer(), seed=seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


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
    assert models.find_model("runs/sft") == "runs/sft/model"
    for name in ("plain", "runs/sft/model", "tiny", "org/name", "gpt2"):
        assert models.find_model(name) == name


@pytest.mark.parametrize(
    "files, name, says",
    [
        ([], "runs/sft", "python sft.py"),  # a missing stage names its command
        ([], "runs/my_run", "check the path"),  # no script of that name
        ([], "./nowhere", "nowhere"),
        ([], "/no/where", "/no/where"),
        ([], "a/b/c", "a/b/c"),  # no hub name
        (["runs/sft/args.json"], "runs/sft", "not finished"),
        (["runs/sft/args.json", "runs/sft/model/config.json"], "runs/sft", "not finished"),  # no summary
        (["notes/readme.md"], "notes", "config.json"),
    ],
)
def test_find_model_says_what_is_missing(files, name, says, folder):
    folder(*files)
    with pytest.raises(InputError, match=says) as error:
        models.find_model(name)
    assert name.rstrip("/") in str(error.value)
