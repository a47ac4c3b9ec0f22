"""common/batches.py: responses that share a prompt have the same scores and log probabilities as separate
rows; the share of a rank."""

from types import SimpleNamespace

import pytest
import torch
from helpers import TOKENIZER, Words
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Phi3Config

from common import batches, dist, losses, models
from common.batches import Comparison, Row, collate_comparisons, my_comparison_batches
from common.data.comparisons import seq_logprobs
from common.errors import InputError
from common.loading import pretrained

V, PAD, END = 61, 0, 2
SMALL = {"vocab_size": V, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": END}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    sizes = {**sizes, "max_position_embeddings": 64}
    if request.param == "gpt2":
        config = GPT2Config(**SMALL, **sizes)
    else:
        config = LlamaConfig(**SMALL, **sizes, intermediate_size=48, num_key_value_heads=2, pad_token_id=PAD)
    path = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def scorer(folder):
    return pretrained.load_scorer(folder, Words(V, PAD, END), 2)


EMPTY = torch.zeros(1, dtype=torch.int32)
ONE = Comparison([], ["", ""], EMPTY, [EMPTY, EMPTY], torch.tensor([0, 1]), "f", Row("f:1", {}))
CPU_MODEL = SimpleNamespace(config=SimpleNamespace(pad_token_id=PAD), device="cpu")


def comparison(seed, prompt, *lengths, samples=()):
    generator = torch.Generator().manual_seed(seed)

    def ids(n, last=None):
        x = torch.randint(3, V, (n,), generator=generator, dtype=torch.int32)
        x[-1] = x[-1] if last is None else last
        return x

    return ONE._replace(
        prompt_ids=ids(prompt),
        response_ids=[ids(n, END) for n in lengths],
        texts=["t"] * len(lengths),
        ranks=torch.arange(len(lengths)),
        samples=tuple(ids(n) for n in samples),  # a sample that was cut has no end token
    )


BATCHES = {
    "K = 2": [comparison(1, 5, 4, 7)],
    "K = 6": [comparison(2, 6, 3, 8, 1, 5, 2, 4)],
    "several trees a row": [
        comparison(3, 9, 8, 10, 9), comparison(4, 3, 2, 4), comparison(5, 2, 1, 3), comparison(6, 8, 2)],
    "samples": [
        comparison(7, 4, 3, 5, samples=(6, 2)), comparison(8, 3, 2, 2), comparison(9, 2, 1, 1, samples=(2,))],
    "samples alone": [comparison(10, 4, samples=(3, 5, 1))],
}  # fmt: skip


def outputs(scorer, batch):
    return scorer.head_outputs(batch.input_ids, batch.response_ends, batch.position_ids, batch.attention_mask)


def all_ids(comparisons):
    """(prompt, response) of every response, comparison by comparison."""
    return [(c.prompt_ids, ids) for c in comparisons for ids in (*c.response_ids, *c.samples)]


@torch.no_grad()
def plain_outputs(scorer, comparisons):
    """Outputs for each response separately: a plain forward of the body on prompt + response, without masks."""
    rows = [torch.cat(ids).long()[None] for ids in all_ids(comparisons)]
    hidden = [scorer.base_model(input_ids=row, use_cache=False).last_hidden_state for row in rows]
    return torch.stack([h[0, -1] @ scorer.score.weight.T for h in hidden])


@pytest.mark.parametrize("name", BATCHES)
@torch.no_grad()
def test_responses_that_share_a_prompt_score_as_rows_of_their_own(name, scorer, monkeypatch):
    monkeypatch.setattr(batches, "ROW", 1)  # rows as long as the longest tree
    comparisons = BATCHES[name]
    expected = plain_outputs(scorer, comparisons)
    shared = collate_comparisons(comparisons, PAD)
    separate = collate_comparisons(comparisons, PAD, share_prompt=False)
    assert shared.sizes == separate.sizes == [len(c.response_ids) + len(c.samples) for c in comparisons]
    torch.testing.assert_close(outputs(scorer, shared), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs(scorer, separate), expected, rtol=0, atol=1e-5)
    assert separate.attention_mask is None and len(separate.input_ids) == sum(shared.sizes)
    if name == "several trees a row":
        assert len(shared.input_ids) == 2  # the longest tree, and the three others in one row
    # The check can fail: without the mask responses see each other, without positions they stand elsewhere
    for damaged in (shared._replace(attention_mask=None), shared._replace(position_ids=None)):
        if len(expected) > 2:
            assert (outputs(scorer, damaged) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("share_prompt", [True, False])
@torch.no_grad()
def test_expected_rewards_are_read_at_each_prompts_last_token(share_prompt, scorer):
    for some in BATCHES.values():
        batch = collate_comparisons(some, PAD, share_prompt)
        got = outputs(scorer, batch._replace(response_ends=batch.prompt_ends))
        rows = [c.prompt_ids.long()[None] for c in some]
        alone = [scorer.base_model(input_ids=row).last_hidden_state[0, -1] for row in rows]
        torch.testing.assert_close(got, torch.stack(alone) @ scorer.score.weight.T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("share_prompt", [True, False])
def test_an_empty_batch_reads_nothing_and_connects_every_weight(share_prompt, scorer):
    batch = collate_comparisons([], PAD, share_prompt)
    assert batch.sizes == [] and batch.comparisons == [] and batch.input_ids.tolist() == [[PAD, PAD]]
    assert batch.response_ends.shape == batch.prompt_ends.shape == (2, 0)
    scorer.zero_grad()
    got = outputs(scorer, batch)
    assert got.shape == (0, 2)
    losses.bradley_terry_loss(got[:, 0], got[:, 0], n_rows=3)[0].backward()
    for name, parameter in scorer.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


# -- batches and log probabilities over ranks -----------------------------------------------------
def as_rank(monkeypatch, rank, of):
    monkeypatch.setattr(dist, "rank", lambda: rank)
    monkeypatch.setattr(dist, "world_size", lambda: of)


@pytest.mark.parametrize("n, world, size", [(7, 1, 3), (7, 2, 3), (7, 3, 2), (2, 3, 4), (8, 2, 4), (1, 4, 1)])
def test_batches_of_all_ranks_are_a_partition_of_equal_number(n, world, size, monkeypatch):
    comparisons = [comparison(i, 2 + i, 1 + i % 3, 2) for i in range(n)]
    seen, counts = [], set()
    for rank in range(world):
        as_rank(monkeypatch, rank, world)
        mine = list(my_comparison_batches(comparisons, CPU_MODEL, size, True))
        counts.add(len(mine))
        assert all(len(batch.comparisons) <= size for batch in mine)
        lengths = [c.n_tokens for batch in mine for c in batch.comparisons]
        assert lengths == sorted(lengths, reverse=True)  # like lengths together
        seen += [int(c.prompt_ids.numel()) for batch in mine for c in batch.comparisons]
    assert len(counts) == 1 and counts == {-(-(-(-n // world)) // size)}  # ceil of ceil
    assert sorted(seen) == [2 + i for i in range(n)]


@pytest.fixture(scope="module")
def policy(folder):
    return pretrained.load_policy(folder, Words(V, PAD, END))


def plain_logprobs(policy, comparisons):
    """log pi(y | x) by log-softmax over a plain forward of each row."""
    out = []
    for c in comparisons:
        values = []
        for ids in c.response_ids:
            row = torch.cat([c.prompt_ids, ids]).long()[None]
            with torch.no_grad():
                logprobs = policy(input_ids=row).logits[0].double().log_softmax(-1)
            places = range(len(c.prompt_ids), row.shape[1])
            values.append(sum(logprobs[t - 1, row[0, t]].item() for t in places))
        out.append(values)
    return out


# -- log probabilities of responses that share a prompt --------------------------------------------
@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("name", BATCHES)
@torch.no_grad()
def test_response_logprobs_are_the_sums_of_plain_log_softmax(name, share_prompt, policy, monkeypatch):
    monkeypatch.setattr(batches, "ROW", 1)  # rows as long as the longest tree
    comparisons = BATCHES[name]
    batch = collate_comparisons(comparisons, END, share_prompt)  # padding may be the end token
    got = models.response_logprobs(policy, batch)
    # samples count after the labelled responses
    whole = [c._replace(response_ids=[*c.response_ids, *c.samples], samples=()) for c in comparisons]
    assert got.tolist() == pytest.approx(sum(plain_logprobs(policy, whole), []), abs=1e-4)
    for size in (1, 3, 50):
        of_each = seq_logprobs(policy, whole, size)
        assert [len(x) for x in of_each] == batch.sizes
        torch.testing.assert_close(got, torch.cat(of_each), rtol=0, atol=1e-4)
    if name == "several trees a row" and share_prompt:
        assert len(batch.input_ids) == 2 and [len(c.response_ids) for c in comparisons] == [3, 2, 2, 1]


def test_gradients_of_response_logprobs_are_those_of_plain_log_softmax(policy, monkeypatch):
    monkeypatch.setattr(batches, "ROW", 1)
    comparisons, grads = [comparison(3, 9, 8, 10), comparison(4, 3, 2, 4), comparison(5, 2, 1, 3)], []
    weight = torch.linspace(-1, 2, 6)
    for share in (True, False):
        policy.zero_grad()
        batch = collate_comparisons(comparisons, PAD, share)
        (models.response_logprobs(policy, batch) * weight).sum().backward()
        grads.append([p.grad.clone() for p in policy.parameters()])
    policy.zero_grad()
    for (prompt, response), w in zip(all_ids(comparisons), weight):
        row = torch.cat([prompt, response]).long()
        logprobs = policy(input_ids=row[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        (w * logprobs.gather(-1, response.long()[:, None]).sum()).backward()
    for *found, parameter in zip(*grads, policy.parameters()):
        expected = parameter.grad
        for got in found:
            size = 1e-5 * max(1.0, expected.abs().max().item())
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=size)
    policy.zero_grad()


@torch.no_grad()
def test_comparisons_with_only_samples_are_scored(scorer):
    c = comparison(1, 5, 4, 7)._replace(response_ids=[], samples=[torch.tensor([7, 8, 9]), torch.tensor([10])])
    batch = collate_comparisons([c], PAD)
    assert batch.sizes == [2] and c.n_tokens == 5 + 3 + 1
    torch.testing.assert_close(outputs(scorer, batch), plain_outputs(scorer, [c]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["longrope", "learned"])
def test_padding_has_no_position_that_no_document_has(kind):
    """A row with a prompt and its responses may be longer than the model's positions, and so may padding be in the
    shorter row beside it. A longrope model would then switch all rows to its factors for long ones, and a model with
    learned positions would have none."""
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=48, initializer_range=0.3, **off)
    if kind == "longrope":
        rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = Phi3Config(vocab_size=V, pad_token_id=PAD, original_max_position_embeddings=48, rope_parameters=rope,
                            initializer_range=0.3, **sizes)  # fmt: skip
    torch.manual_seed(0)
    model = models.with_methods(AutoModelForCausalLM.from_config(config), [models.token_logprobs])
    model.compute_dtype, model.config.pad_token_id = torch.float32, PAD
    pairs = [comparison(1, 8, 40, 40), comparison(2, 4, 30, 20)]  # documents of at most 48 tokens
    assert collate_comparisons(pairs, PAD).position_ids.max() == 47  # two rows of 88
    with torch.no_grad():
        logprobs_of = lambda some: models.response_logprobs(model, collate_comparisons(some, PAD))
        together, apart = logprobs_of(pairs), logprobs_of(pairs[1:])
    torch.testing.assert_close(together[2:], apart)


def test_a_shorter_policy_than_max_length_is_refused_before_training(tmp_path):
    from common.scoring import reward_evaluation

    args = SimpleNamespace(model="tiny", max_length=10**6, chat_template=None, length_prompts=0)
    with pytest.raises(InputError, match="--max-length 1000000: tiny has only"):
        reward_evaluation.check_sft_model("tiny", TOKENIZER, args)
