"""Model families of different kinds, as tiny random models, against transformers' own forwards.
test_sampler.py compares their greedy answers, and tests/benchmarks/families.py tries all other families."""

import pytest
import tiny_families
import torch
from tiny_families import logprobs_of, plain

from common import dist, models
from common.batches import Comparison, collate_comparisons
from common.errors import InputError
from common.data import tiny
from common.loading import checks, pretrained
from common.scoring import next_token

KINDS = {  # -> whether packed documents stay apart, and responses can share a prompt
    "Qwen3": (True, True),  # full attention
    "GPT-2": (True, True),  # learned positions
    "Mistral (window)": (True, True),
    "Gemma 3 (multimodal)": (True, True),  # a window in some layers; the text part of a checkpoint with more
    "gpt-oss": (False, True),  # sinks, no SDPA; its masks do not read positions
    "Granite 3": (True, True),  # scaled logits
    "LFM2": (False, False),  # convolutions
    "Qwen3.5": (False, False),  # recurrences
    "OLMoE": (True, True),  # experts, no class with a scalar head
    "Gemma 2": (True, True),  # capped scores and logits, so no SDPA
    "Cohere 2": (True, True),  # logits scaled, a window in some layers
    "GPT-Neo": (True, False),  # a window by columns, not by positions
    "BLOOM": (False, False),  # ALiBi
    "Falcon": (True, True),  # its linear layers are of a class of its own
}


@pytest.fixture(scope="module", params=KINDS)
def family(request, tmp_path_factory):
    """(name, folder, the model as the scripts load it, as transformers does)."""
    folder = str(tmp_path_factory.mktemp("family"))
    tiny_families.save(request.param, folder)
    return request.param, folder, pretrained.load_policy(folder, tiny.tokenizer()), plain(folder)


def rows_of(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, tiny_families.VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def test_offsets_between_bfloat16s_numbers_change_no_output(family):
    """dist.dither moves only weights that autocast rounds: not those of experts, of recurrences or of embeddings."""
    model = pretrained.load_policy(family[1], tiny.tokenizer())
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    model.compute_dtype = torch.bfloat16
    ids = torch.tensor(rows_of([30, 30]))
    start, before = [p.clone() for p in model.parameters()], model.token_logprobs(ids, ids[:, 1:] >= 0)
    dist.dither(model)
    assert torch.equal(model.token_logprobs(ids, ids[:, 1:] >= 0), before)
    moved = [not torch.equal(p, x) for p, x in zip(model.parameters(), start)]
    assert sum(moved) >= 6


@torch.no_grad()
def test_log_probabilities_are_those_of_plain_forwards_beyond_the_window(family):
    name, _, ours, theirs = family
    rows = rows_of([30, 12, 21])
    want = torch.cat([logprobs_of(theirs, row[:1], row[1:]) for row in rows])
    ids = torch.tensor([row + [0] * (30 - len(row)) for row in rows])
    mask = torch.arange(1, 30) < torch.tensor([len(row) for row in rows])[:, None]
    torch.testing.assert_close(ours.token_logprobs(ids, mask)[mask], want, atol=1e-5, rtol=1e-5)
    assert checks.packs(ours) == KINDS[name][0]
    if KINDS[name][0]:
        positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
        inside = positions[:, 1:] > 0
        packed = ours.token_logprobs(torch.tensor([sum(rows, [])]), inside, positions)
        torch.testing.assert_close(packed[inside], want, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_responses_that_share_a_prompt_have_the_log_probabilities_of_rows_of_their_own(family):
    name, _, ours, theirs = family
    shares = KINDS[name][1]
    assert checks.shares_prompts(ours, 64) == shares
    prompt, first, second = rows_of([20, 12, 27])
    ids = [torch.tensor(row, dtype=torch.int32) for row in (prompt, first, second)]
    pair = Comparison([], ["a", "b"], ids[0], ids[1:], torch.tensor([0, 1]), "", None)
    alone = [logprobs_of(theirs, prompt, response) for response in (first, second)]
    got = models.response_logprobs(ours, collate_comparisons([pair], 0, shares))
    torch.testing.assert_close(got, torch.stack([x.sum() for x in alone]), atol=1e-5, rtol=1e-5)
    if not checks.recurrent(ours):  # else there are no keys and values to go on from
        where = torch.tensor([[0], [10]])
        got = next_token.logprobs(ours, torch.tensor([first]), where, prompt)[0, first[-1]]
        torch.testing.assert_close(got, alone[0][-1], atol=1e-5, rtol=1e-5)


def test_a_family_without_gradient_checkpointing_is_one_line(tmp_path):
    tiny_families.save("OpenAI GPT", str(tmp_path))
    with pytest.raises(InputError, match="--gradient-checkpointing: models of the type openai-gpt have none"):
        pretrained.load_policy(str(tmp_path), tiny.tokenizer(), gradient_checkpointing=True)
