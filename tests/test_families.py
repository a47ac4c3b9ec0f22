"""Eight families that differ in kind, as tiny random models, against transformers' own forwards and generate.
All others: tests/benchmarks/families.py."""

import pytest
import tiny_families
import torch
from tiny_families import logprobs_of, plain

from common import loading, models, tiny
from common.sampler import sample

KINDS = {  # -> whether packed documents stay apart, and responses can share a prompt
    "Qwen3": (True, True),  # full attention
    "Mistral (window)": (True, True),
    "Gemma 3 (multimodal)": (True, True),  # a window in some layers; the text part of a checkpoint with more
    "gpt-oss": (False, True),  # sinks, no SDPA; its masks do not read positions
    "Granite 3": (True, True),  # scaled logits
    "LFM2": (False, False),  # convolutions
    "Qwen3.5": (False, False),  # recurrences
    "OLMoE": (True, True),  # experts, no class with a scalar head
}


@pytest.fixture(scope="module", params=KINDS)
def family(request, tmp_path_factory):
    """(name, folder, the model as the scripts load it, as transformers does)."""
    folder = str(tmp_path_factory.mktemp("family"))
    tiny_families.save(request.param, folder)
    return request.param, folder, loading.load_policy(folder, tiny.tokenizer()), plain(folder)


def rows_of(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, tiny_families.VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def test_greedy_answers_to_ragged_prompts_are_those_of_generate(family):
    _, _, ours, theirs = family
    prompts, stop_ids = rows_of([3, 26, 15, 9, 20]), [7, 29]  # two of three slots are filled again
    out = sample(ours, prompts, max_new_tokens=16, stop_ids=stop_ids, pad_id=0, temperature=0, slots=3)
    for i, prompt in enumerate(prompts):
        options = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": stop_ids, "pad_token_id": 0}
        ids = torch.tensor([prompt])
        want = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :]
        assert out.response_tokens[i][out.sample_mask[i]].tolist() == want.tolist()


@torch.no_grad()
def test_log_probabilities_are_those_of_plain_forwards_beyond_the_window(family):
    name, _, ours, theirs = family
    rows = rows_of([30, 12, 21])
    want = torch.cat([logprobs_of(theirs, row[:1], row[1:]) for row in rows])
    ids = torch.tensor([row + [0] * (30 - len(row)) for row in rows])
    mask = torch.arange(1, 30) < torch.tensor([len(row) for row in rows])[:, None]
    torch.testing.assert_close(ours.token_logprobs(ids, mask)[mask], want, atol=1e-5, rtol=1e-5)
    assert models.packs(ours) == KINDS[name][0]
    if KINDS[name][0]:
        positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
        inside = positions[:, 1:] > 0
        packed = ours.token_logprobs(torch.tensor([sum(rows, [])]), inside, positions)
        torch.testing.assert_close(packed[inside], want, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_responses_that_share_a_prompt_have_the_log_probabilities_of_rows_of_their_own(family):
    name, _, ours, theirs = family
    assert models.shares_prompts(ours, 32) == KINDS[name][1]
    if KINDS[name][1]:
        prompt, first, second = rows_of([20, 12, 9])
        branch = torch.tensor([0] * 20 + [1] * 12 + [2] * 9)
        mask = ((branch == 0) | (branch == branch[:, None])).tril()[None, None]
        positions = torch.tensor([[*range(32), *range(20, 29)]])
        before = torch.tensor([[0] * 21, [19, *range(20, 31), 19, *range(32, 40)]])
        ids, targets = torch.tensor([prompt + first + second]), torch.tensor(first + second)
        shared = ours.logprobs_at(ids, before, targets, positions, mask)
        alone = torch.cat([logprobs_of(theirs, prompt, response) for response in (first, second)])
        torch.testing.assert_close(shared, alone, atol=1e-5, rtol=1e-5)
