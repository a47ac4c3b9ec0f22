"""common/sampler.py against transformers' generate and plain forwards, which share no code with it."""

import collections
import contextlib
import gc
import io
import re
import runpy
import shutil
import sys
import weakref
from functools import partial
from types import SimpleNamespace

import processes
import pytest
import tiny_families
import torch
from transformers import (
    AutoModelForCausalLM, DeepseekV32Config, LlamaConfig, LlamaForCausalLM, MistralConfig, RwkvConfig,
)  # fmt: skip
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from common import sampler
from common.sampler import Samples, choose, join, sample
from common.data import tiny
from common.loading import pretrained

V = tiny_families.VOCABULARY
SIZES = {
    "vocab_size": V, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
W = {"sliding_window": 8}  # shorter than most of MIXED


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


FAMILIES = {  # by what their layers keep, windows of 8 tokens
    "grouped heads": "Llama 3", "biases": "Qwen2", "learned positions": "GPT-2", "windows": "Mistral (window)",
    "windows by layer, scores and logits capped": "Gemma 2", "sinks, eager attention": "gpt-oss",
    "a window of its own": "GPT-Neo", "ALiBi": "BLOOM", "convolutions": "LFM2", "recurrence": "Qwen3.5",
    "attention beside recurrence, logits scaled": "Falcon-H1", "experts": "OLMoE", "logits scaled": "Granite 3",
    "a text part": "Gemma 3",
}  # fmt: skip


WIDER = ("grouped heads", "learned positions", "windows", "ALiBi", "convolutions", "recurrence")


@pytest.mark.parametrize(
    "family, multiple", [*((name, 1) for name in FAMILIES), *((name, 16) for name in WIDER)]
)
def test_greedy_equals_generate_and_logprobs_plain_forwards(family, multiple, monkeypatch):
    """Token for token, beyond the window; slots are refilled, rows moved, the columns used up twice. multiple: of
    columns, by which steps are as wide as on a GPU, and have a power of two of rows or all 5."""
    monkeypatch.setattr(sampler, "_width_multiple", lambda device: multiple)
    monkeypatch.setattr(sampler, "SPARE_COLUMNS", 3)
    monkeypatch.setattr(sampler, "LARGE_MATRIX", 1)
    model, stop_ids = tiny_families.build(FAMILIES[family]), list(range(5, V, 12))
    options = {"n": 2, "max_new_tokens": 24, "stop_ids": stop_ids, "pad_id": 0, "slots": 5}
    greedy, drawn = sample(model, MIXED, temperature=0, **options), sample(model, MIXED, seed=0, **options)
    lengths = set()
    for i, prompt in enumerate(MIXED):
        options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": stop_ids, "pad_token_id": 0}
        ids = torch.tensor([prompt])
        want = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :]
        for row in (2 * i, 2 * i + 1):
            assert greedy.response_tokens[row][greedy.sample_mask[row]].tolist() == want.tolist()
            assert greedy.finished[row].item() == (want[-1].item() in stop_ids)
            tokens = drawn.response_tokens[row][drawn.sample_mask[row]]
            ids = torch.cat([torch.tensor(prompt), tokens])[None]
            logprobs = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            got = drawn.sample_logprobs[row][drawn.sample_mask[row]]
            torch.testing.assert_close(got, logprobs.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=1e-5)
            lengths.add(len(tokens))
    assert len(lengths) > 3  # slots really were refilled at different times
    assert (greedy.sample_logprobs == 0).all()  # a point mass: log 1


@pytest.mark.parametrize("multiple", [64, 16])
def test_a_rollout_with_a_gpus_widths_and_rows_has_few_shapes_and_the_same_responses(multiple, monkeypatch):
    """Padding rows draw nothing: every draw is that of the plain path. Weights are float64, so that products of
    other shapes round alike."""
    llama = build(LlamaConfig(**SIZES)).double()
    options = {"n": 4, "max_new_tokens": 80, "stop_ids": range(3, V, 9), "pad_id": 0, "slots": 24, "seed": 0}
    run, shapes = sampler._next_logits, set()

    def next_logits(model, ids, mask, cache):
        if ids.shape[1] == 1 and isinstance(cache, sampler.RaggedCache):
            shapes.add(tuple(mask.shape))
        return run(model, ids, mask, cache)

    monkeypatch.setattr(sampler, "_next_logits", next_logits)
    plain = sample(llama, MIXED, **options)
    n_plain = len(shapes)
    shapes.clear()
    monkeypatch.setattr(sampler, "_width_multiple", lambda device: multiple)
    for spare in (32, 1):
        monkeypatch.setattr(sampler, "SPARE_COLUMNS", spare)
        got = sample(llama, MIXED, **options)
        assert torch.equal(got.response_tokens, plain.response_tokens)
        torch.testing.assert_close(got.sample_logprobs, plain.sample_logprobs, atol=5e-7, rtol=0)
    assert len(shapes) < 30 < n_plain
    assert all(rows in (1, 2, 4, 8, 16, 24) and width % multiple == 0 for rows, width in shapes)


class StandIn:
    """For a CUDA graph, on a CPU: `replay` repeats a step with what Python had when it was captured."""

    def numbers(self):
        names = ("live", "longest", "read", "place")
        return [{name: getattr(layer, name) for name in names} for layer in self.graphs.cache.layers]

    def set(self, numbers):
        for layer, of_layer in zip(self.graphs.cache.layers, numbers):
            vars(layer).update(of_layer)

    def replay(self):
        now = self.numbers()
        self.set(self.captured)
        logits = sampler._next_logits(self.graphs.model, self.ids, self.mask, self.graphs.cache)
        self.graphs.logits[: len(self.ids)] = logits
        self.set(now)


def pretend_cuda(monkeypatch, graph):
    """Returns a list with the current stream."""
    streams, make = ["default"], sampler._Graphs.__init__

    @contextlib.contextmanager
    def stream(other):
        before, streams[0] = streams[0], other
        try:
            yield
        finally:
            streams[0] = before

    def usable(graphs, model, cache):
        make(graphs, model, SimpleNamespace(is_plain=cache.is_plain, device=SimpleNamespace(type="cuda")))
        graphs.cache, cache.in_place = cache, graphs.usable

    monkeypatch.setattr(sampler._Graphs, "__init__", usable)
    monkeypatch.setattr(sampler, "_stream", lambda device: "side")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandIn)
    monkeypatch.setattr(torch.cuda, "graph", partial(graph, streams))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[0])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return streams


@pytest.mark.parametrize("family", ["grouped heads", "windows", "convolutions"])
def test_captured_steps_give_the_same_responses(family, monkeypatch):
    """Only a model whose layers all have full attention is captured."""
    model, shapes, ends = tiny_families.build(FAMILIES[family]).double(), collections.Counter(), []
    options = {"n": 4, "max_new_tokens": 80, "stop_ids": range(3, V, 9), "pad_id": 0, "slots": 24, "seed": 0}
    plain, begin, capture = sample(model, MIXED, **options), sampler.RaggedCache.begin, sampler._Graphs.capture

    def begun(cache, lengths):
        mask = begin(cache, lengths)
        ends.append(cache.end)
        assert not cache.in_place or mask.shape[1] < max(cache.longest_prompt, max(lengths)) + 2 * 16 + 1
        return mask

    def captured(graphs, ids, mask, logits):
        shapes[mask.shape] += 1
        capture(graphs, ids, mask, logits)
        stand_in, own_ids, own_mask = graphs.graphs[mask.shape]
        assert own_ids is ids and own_mask is mask
        vars(stand_in).update(graphs=graphs, ids=ids, mask=mask)
        stand_in.captured = stand_in.numbers()
        graphs.logits.zero_()  # a graph is recorded without being run

    pretend_cuda(monkeypatch, lambda streams, graph, **_: contextlib.nullcontext())
    monkeypatch.setattr(sampler.RaggedCache, "begin", begun)
    monkeypatch.setattr(sampler, "_width_multiple", lambda device: 16)
    monkeypatch.setattr(sampler, "GRAPH_AFTER", 1)
    monkeypatch.setattr(sampler._Graphs, "capture", captured)
    for spare in (32, 1):
        monkeypatch.setattr(sampler, "SPARE_COLUMNS", spare)
        got = sample(model, MIXED, **options)
        assert torch.equal(got.response_tokens, plain.response_tokens)
        torch.testing.assert_close(got.sample_logprobs, plain.sample_logprobs, atol=5e-7, rtol=0)
    moves = sum(later <= earlier for earlier, later in zip(ends, ends[1:]))
    assert (len(shapes) > 5 and moves > 2) == (family == "grouped heads") and set(shapes.values()) <= {1, 2}


def test_a_model_with_hooks_or_one_that_waits_for_the_gpu_is_not_captured(llama, monkeypatch):
    @contextlib.contextmanager
    def fails(streams, graph, stream, **_):
        streams[0] = stream
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    streams, cache = pretend_cuda(monkeypatch, fails), SimpleNamespace(is_plain=True, slots=2, device="cuda:0")
    assert sampler._Graphs(llama, cache).usable and cache.in_place
    hook = llama.model.layers[1].register_forward_pre_hook(lambda module, inputs: None)
    assert not sampler._Graphs(llama, cache).usable and not cache.in_place
    hook.remove()
    graphs, ids = sampler._Graphs(llama, cache), torch.ones(2, 1, dtype=torch.long)
    monkeypatch.setattr(sampler, "GRAPH_AFTER", 0)
    monkeypatch.setattr(sampler, "_next_logits", lambda *inputs: torch.ones(2, V))
    assert graphs.step(ids, ids > 0).sum() == 2 * V and not graphs.usable and not graphs.graphs
    assert streams == ["default"] and not sampler._Graphs(llama, cache).usable
    del llama.capture_fails


def test_what_padding_rows_write_into_free_slots_is_never_read(llama, monkeypatch):
    """Slots that were freed hold huge numbers when the next response takes them over."""
    options = {"n": 4, "max_new_tokens": 20, "stop_ids": range(3, V, 6), "pad_id": 0, "slots": 7, "seed": 0}
    plain, n_live, spoilt = sample(llama, MIXED, **options), [], []
    begin, update = sampler.RaggedCache.begin, sampler._Layer.update

    def begin_step(cache, lengths):
        n_live.append(len(lengths))
        return begin(cache, lengths)

    def spoil(layer, keys, values, **options):
        for new in (keys, values):
            new[n_live[-1] :] = 1e4
        spoilt.append(len(keys) - n_live[-1])
        return update(layer, keys, values, **options)

    monkeypatch.setattr(sampler, "_width_multiple", lambda device: 16)
    monkeypatch.setattr(sampler._Layer, "update", spoil)
    monkeypatch.setattr(sampler.RaggedCache, "begin", begin_step)
    got = sample(llama, MIXED, **options)
    assert max(spoilt) > 1 and torch.equal(got.response_tokens, plain.response_tokens)


def test_few_rows_are_multiplied_in_another_order_to_the_same_numbers(llama, monkeypatch):
    options = {"max_new_tokens": 12, "stop_ids": [7], "pad_id": 0, "slots": 5, "seed": 0}
    layers = {"wide": llama.lm_head, "narrow": llama.model.layers[0].mlp.down_proj}
    want, products, draw = sample(llama, MIXED, **options), [], sampler.choose
    monkeypatch.setattr(sampler, "LARGE_MATRIX", 1)

    def choose(logits, *rest):  # inside, large matrices compute in their own way
        for linear in layers.values():
            for shape in ((1, 1), (1, 2), (2, 2), (2, 3), (40, 6)):
                x = torch.randn(*shape, linear.in_features)
                products.append((linear(x), torch.nn.functional.linear(x, linear.weight)))
                assert linear(x).is_contiguous()
        return draw(logits, *rest)

    monkeypatch.setattr(sampler, "choose", choose)
    sample(llama, MIXED, **options)
    assert products
    for ours, plain in products:
        torch.testing.assert_close(ours, plain)
    monkeypatch.setattr(sampler, "choose", draw)
    got = sample(llama, MIXED, **options)
    assert torch.equal(got.response_tokens, want.response_tokens)
    torch.testing.assert_close(got.sample_logprobs, want.sample_logprobs)
    restored = lambda: not any("forward" in vars(module) for module in llama.modules())
    assert restored()
    head = llama.lm_head
    own = head.forward = lambda hidden: torch.nn.functional.linear(hidden, head.weight)  # accelerate's hooks
    sample(llama, MIXED, **options)
    assert vars(head).pop("forward") is own
    with pytest.raises(ValueError, match="seed"):  # after an error it is as it was, too
        monkeypatch.setattr(sampler, "choose", lambda *_: (_ for _ in ()).throw(ValueError("seed")))
        sample(llama, MIXED, **options)
    assert restored()


@pytest.mark.parametrize("n", [1, 3])
def test_prefill_batches_hold_limited_tokens_and_change_no_answer(llama, monkeypatch, n):
    """The keys and values of only one batch of prompts are held at a time."""
    options = {"n": n, "max_new_tokens": 12, "stop_ids": [7], "pad_id": 0, "temperature": 0, "slots": 10}
    want, groups, run = sample(llama, MIXED, **options), [], sampler._prefill
    alive = []  # weak references to each group's cache

    def prefill(model, prompts, which):
        gc.collect()
        assert not [at for at in alive if at() is not None]
        found = run(model, prompts, which)
        groups.append(list(found))
        alive.extend(weakref.ref(cache) for cache, *_ in found.values())
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


@pytest.mark.parametrize(
    "config, why",
    [
        (RwkvConfig(vocab_size=V, hidden_size=64, num_hidden_layers=2), "rwkv keeps"),
        (DeepseekV32Config(), "deepseek_v32 keeps"),
    ],
)
def test_an_unknown_cache_is_refused_from_the_config(config, why):
    with pytest.raises(ValueError, match=why):
        sampler.check_attention(config)


def test_a_window_one_token_too_narrow_is_caught_by_the_trial_batch(monkeypatch):
    """It lies beyond the window, and a window of 300 is too long for it."""
    begin = sampler._Layer.begin

    def narrow(layer, *rest):
        begin(layer, *rest)
        *_, stop, end, _ = rest
        layer.read = slice(max(layer.read.start, end - layer.window + 1), stop)

    monkeypatch.setattr(sampler._Layer, "begin", narrow)
    with pytest.raises(ValueError, match="other logits with a ragged cache"):
        sample(build(MistralConfig(**SIZES, **W)), [[3, 4]], max_new_tokens=2, stop_ids=[], pad_id=0)


class NoMask(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        mask = None if attention_mask is None else torch.ones_like(attention_mask)
        return super().forward(input_ids, attention_mask=mask, **kwargs)


class NoPositions(LlamaForCausalLM):
    def forward(self, input_ids, attention_mask=None, cache=None, use_cache=None):
        options = {sampler.cache_argument(self.config): cache, "use_cache": use_cache}
        return super().forward(input_ids, attention_mask, **options)


@pytest.mark.parametrize("kind", [NoMask, NoPositions])
def test_a_model_that_ignores_mask_or_positions_is_caught_by_the_trial_batch(kind):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="other logits with a ragged cache"):
        sample(kind(LlamaConfig(**SIZES)), [[3, 4]], max_new_tokens=2, stop_ids=[], pad_id=0)


class NamesCache(LlamaForCausalLM):
    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, use_cache=None):
        options = {sampler.cache_argument(self.config): cache, "use_cache": use_cache}
        return super().forward(input_ids, attention_mask, position_ids, **options)


class NamesPastKeyValues(NamesCache):
    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache)


class HandsOn(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        return super().forward(input_ids, attention_mask, **kwargs)


@pytest.mark.parametrize("kind", [NamesCache, NamesPastKeyValues, HandsOn])
def test_a_model_gets_the_arguments_that_its_class_names_or_passes_on(kind, llama):
    """transformers 5.24 renamed past_key_values to cache."""
    model = kind(LlamaConfig(**SIZES)).eval()
    model.load_state_dict(llama.state_dict())
    options = {"max_new_tokens": 8, "stop_ids": [7], "pad_id": 0, "temperature": 0, "slots": 5}
    want = sample(llama, MIXED, **options).response_tokens
    assert torch.equal(sample(model, MIXED, **options).response_tokens, want)


def test_a_transformers_that_is_too_old_is_named_when_the_file_is_imported(monkeypatch):
    oldest = re.search(r"^transformers>=(\S+),", (processes.ROOT / "requirements.txt").read_text(), re.M)[1]
    for version in ("4.57.6", "5.9.0"):
        monkeypatch.setattr("importlib.metadata.version", lambda _: version)
        with pytest.raises(ImportError, match=f"transformers>={oldest} is required .* found transformers=={version}"):
            runpy.run_path(sampler.__file__)
    monkeypatch.setattr("importlib.metadata.version", lambda _: oldest)
    runpy.run_path(sampler.__file__)


@pytest.mark.parametrize(
    "settings", [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 0.8, 0), (1.0, 1.0, 5), (0.8, 0.6, 9)]
)
def test_logprobs_are_those_of_the_distribution_sampled_from(llama, settings):
    """The distribution is made by transformers' own warpers from a forward of the whole row without a
    cache. Rows of one length: the longest of all are moved."""
    temperature, top_p, top_k = settings
    choice = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    prompts, stop_ids = prompts_of([9] * 6), range(3, V, 9)
    out = sample(
        llama, prompts, n=2, max_new_tokens=10, stop_ids=stop_ids, pad_id=0, slots=12, seed=3, **choice
    )
    for i, prompt in enumerate(out.prompt_index.tolist()):
        tokens = out.response_tokens[i][out.sample_mask[i]]
        ids = torch.cat([torch.tensor(prompts[prompt]), tokens])[None]
        logits = llama(ids, use_cache=False).logits[0, len(prompts[prompt]) - 1 : -1]
        warpers = [TemperatureLogitsWarper(temperature)]
        warpers += [TopKLogitsWarper(top_k)] if top_k else []
        warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        for warper in warpers:
            logits = warper(None, logits)
        want = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert want.isfinite().all()  # nothing outside the nucleus was drawn
        torch.testing.assert_close(out.sample_logprobs[i][out.sample_mask[i]], want, atol=1e-4, rtol=1e-4)
        assert (out.sample_logprobs[i][~out.sample_mask[i]] == 0).all()


@pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"top_k": 20}, {"top_p": 0.9}], ids=str)
def test_only_ids_below_vocab_size_are_drawn(llama, settings):
    """Log probabilities are those among these ids."""
    prompts, options = prompts_of([5, 9]), {"max_new_tokens": 12, "stop_ids": [], "pad_id": 0, "seed": 1}
    everything = sample(llama, prompts, n=8, **options, **settings)
    assert everything.response_tokens.max() >= 5
    out = sample(llama, prompts, n=8, vocab_size=5, **options, **settings)
    assert out.response_tokens.max() < 5
    if not settings:
        input_ids, _, action_mask = sampler.join(prompts, out)
        all_logprobs = llama(input_ids, use_cache=False).logits[:, :-1, :5].log_softmax(-1)
        want = all_logprobs.gather(-1, input_ids[:, 1:, None].clamp(max=4))[..., 0]
        torch.testing.assert_close(
            out.sample_logprobs[out.sample_mask], want[action_mask], atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("top_p, vocabulary", [(1.0, 7), (0.7, 7), (0.5, 3000)])
def test_token_frequencies_match_their_probabilities(top_p, vocabulary):
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


@pytest.mark.parametrize("top_p, kept", [(0.5, [0.5, 0, 0]), (0.51, [0.5, 0.25, 0]), (0.75, [0.5, 0.25, 0])])
def test_a_nucleus_ends_with_the_token_that_reaches_top_p_exactly(top_p, kept):
    probs, ids = sampler._most_likely(torch.tensor([[0.25, 0.5, 0.25]]), top_p, 0)
    assert probs.tolist() == [kept] and ids[0, 0] == 1


@pytest.mark.parametrize("beyond", [-1e-6, 1e-6])
@pytest.mark.parametrize("error", [-1e-5, 0, 1e-5])
@pytest.mark.parametrize("size", [5, 1024, 2000])
def test_a_nucleus_that_ends_near_top_p_equals_float64s(size, error, beyond):
    """error: of the sum of probabilities; an fp32 softmax of 150,000 tokens was off by 5e-6. 1024 are ranked
    first."""
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probs = logits.softmax(-1)
    top_p = probs.sort(descending=True).values[:size].sum().item() + beyond
    kept, _ = sampler._most_likely((probs * (1 + error)).float()[None], top_p, 0)
    assert int((kept > 0).sum()) == size + (beyond > 0)


@pytest.mark.parametrize(
    "vocabulary, top_p, top_k, reads", [(1024, 0.9, 0, 0), (3000, 1.0, 0, 0), (3000, 0.9, 40, 0), (3000, 0.9, 0, 1)]
)
def test_a_draw_reads_the_device_back_only_to_see_whether_1024_tokens_hold_the_nucleus(
    vocabulary, top_p, top_k, reads, monkeypatch
):
    """As docs/use/gpus.md counts the waits of a decoding step. The draw equals one from the whole ranking."""
    logits = 4 * torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(0))
    draw = lambda: choose(logits, 1.0, top_p, top_k, torch.Generator().manual_seed(1))
    read, plain = [], torch.Tensor.__bool__
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__bool__", lambda x: read.append(x) or plain(x))
        for name in ("item", "tolist", "__int__", "__float__", "nonzero"):
            patch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a wait that the docs do not count"))
        tokens, logprobs = draw()
    assert len(read) == reads
    if top_p < 1:
        ranked, ids = logits.softmax(-1).sort(descending=True)
        ranked, ids = (x[:, : top_k or vocabulary] for x in (ranked, ids))
        inside = ranked.cumsum(-1) - ranked < top_p * ranked.sum(-1, keepdim=True)
        place, want = sampler._draw(torch.where(inside, ranked, 0), torch.Generator().manual_seed(1))
        assert torch.equal(tokens, ids.gather(1, place)[:, 0])
        torch.testing.assert_close(logprobs, want)


def test_a_prompt_is_run_once_and_no_finished_row_is_run_again(llama):
    """Every token but a response's last one enters the model once; a prompt enters it once for its n
    responses."""
    seen = collections.Counter()

    def count(module, args, kwargs):
        ids = kwargs["input_ids"]
        step = any(isinstance(value, sampler.RaggedCache) for value in kwargs.values())
        seen["steps" if step else "prompts"] += len(ids)

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
    for tokens, mask, finished in zip(*(x.tolist() for x in (out[1], out[2], out.finished))):
        kept = [t for t, m in zip(tokens, mask) if m]
        assert mask == sorted(mask, reverse=True)  # no holes
        assert all(t % 9 != 3 for t in kept[:-1])  # a stop id is the last token or absent
        assert finished == (kept[-1] % 9 == 3) and (finished or len(kept) == 16)
        assert all(t == 0 for t, m in zip(tokens, mask) if not m)
    assert out.finished.any() and not out.finished.all()


def test_a_seed_decides_and_generation_config_does_not():
    model = build(LlamaConfig(**SIZES))
    options = {"max_new_tokens": 8, "pad_id": 0}
    draw = lambda seed: sample(model, MIXED, seed=seed, stop_ids=None, **options).response_tokens
    first = draw(1)
    assert torch.equal(first, draw(1)) and not torch.equal(first, draw(2))
    model.generation_config.update(do_sample=True, top_k=1, temperature=0.01, repetition_penalty=9.0)
    assert torch.equal(first, draw(1))
    torch.manual_seed(5)
    unseeded = draw(None)
    torch.manual_seed(5)
    assert torch.equal(unseeded, draw(None))
    stopped = sample(model, MIXED, seed=1, stop_ids=first[0, 0].item(), **options)
    assert stopped.finished[0] and stopped.sample_mask[0].sum() == 1
    end = first[0, 0]
    for one in (end, end.numpy()[()], end.numpy(), {end.item()}, end[None], end[None].numpy()):
        assert torch.equal(sample(model, MIXED, seed=1, stop_ids=one, **options)[1], stopped[1])


def test_training_mode_and_gradient_checkpointing_survive():
    model = pretrained.load_policy("tiny", tiny.tokenizer(), gradient_checkpointing=True)
    greedy = {"max_new_tokens": 8, "stop_ids": [], "pad_id": 0, "temperature": 0}
    frozen = model.get_output_embeddings().eval()  # a part that its owner keeps in evaluation mode
    out = sample(model, MIXED, **greedy)
    assert model.training and model.base_model.gradient_checkpointing and not frozen.training
    want = sample(pretrained.load_policy("tiny", tiny.tokenizer()), MIXED, **greedy)
    assert torch.equal(out.response_tokens, want.response_tokens)
    model(input_ids=torch.tensor([MIXED[0]])).logits.sum().backward()  # no inference tensors are left behind


def test_bf16_weights_sample():
    model = build(LlamaConfig(**SIZES)).to(torch.bfloat16)
    out = sample(model, MIXED, n=2, max_new_tokens=8, stop_ids=[7], pad_id=0, seed=0)
    assert out.sample_logprobs.dtype == torch.float32 and out.sample_logprobs.isfinite().all()


def test_bf16_weights_whose_logits_are_fp32_sample():
    """For example Nemotron-H's. The trial batch's tolerance must follow the weights' rounding."""
    model = build(LlamaConfig(**SIZES)).to(torch.bfloat16)
    model.lm_head.register_forward_hook(lambda head, inputs, logits: logits.float())
    sample(model, [[3, 4]], max_new_tokens=2, stop_ids=[], pad_id=0)


@pytest.mark.parametrize(
    "change, why",
    [
        *(
            ({"prompts": given}, "must be token ids")
            for given in ([], [[3], []], "ant", [{"role": "user"}], [[1.5]], [[[3]]])
        ),
        *(({name: 0}, f"out of range: .'{name}'") for name in ("n", "max_new_tokens", "top_p", "slots")),
        *(({"temperature": value}, "temperature") for value in (-1.0, float("nan"))),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"vocab_size": -1}, "vocab_size"),
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
        with pytest.raises(FloatingPointError, match="NaN"):
            sample(model, [[3]], max_new_tokens=2, stop_ids=[], pad_id=0, temperature=temperature)


# -- prompts in other forms, and what is made of them ---------------------------------------------
@pytest.mark.parametrize("tensors", ["pt", "np", None])
@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_may_be_the_output_of_a_chat_template(llama, side, tensors):
    tokenizer = tiny.tokenizer()
    tokenizer.padding_side, options = side, {"return_tensors": tensors, "add_generation_prompt": True}
    one, two = [[{"role": "user", "content": text}] for text in ("copy ant fox", "double ant fox owl")]
    want = [[1, 4, 10, 15, 20, 2, 5], [1, 4, 14, 15, 20, 29, 2, 5]]
    single = tokenizer.apply_chat_template(one, **options)
    batch = tokenizer.apply_chat_template([one, two], padding=True, **options)
    bare = torch.tensor(want[1]), torch.tensor(want[1:]), [torch.tensor(row) for row in want], tuple(want[1])
    forms = [(single, want[:1]), (batch, want), (dict(batch), want), (want, want)]
    for given, rows in [*forms, *zip(bare, (want[1:], want[1:], want, want[1:]))]:
        assert sampler.token_ids(given) == rows
    options = {"max_new_tokens": 5, "stop_ids": [], "pad_id": 0, "temperature": 0}
    assert torch.equal(sample(llama, batch, **options)[1], sample(llama, want, **options)[1])


def test_join_gives_the_inputs_of_the_losses():
    """Response tokens may equal pad_id; the mask at t says whether token t+1 is a response token."""
    responses = torch.tensor([[7, 0, 9], [8, 0, 0], [0, 6, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()
    rollout = Samples(torch.tensor([0, 0, 1]), responses, mask, responses.float(), mask[:, 0])
    input_ids, attention_mask, action_mask = join([[3, 4], [5]], rollout, pad_id=0)
    assert input_ids.tolist() == [[3, 4, 7, 0, 9], [3, 4, 8, 0, 0], [5, 0, 6, 0, 0]]
    assert attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]
    assert action_mask.int().tolist() == [[0, 1, 1, 1], [0, 1, 0, 0], [1, 1, 0, 0]]
    laid = torch.zeros(action_mask.shape).masked_scatter(action_mask, rollout.sample_logprobs[mask])
    assert laid.tolist() == [[0, 7, 0, 9], [0, 8, 0, 0], [0, 6, 0, 0]]


# -- the docs' code, and the file alone ------------------------------------------------------------
def code_below(heading, page):
    text = (processes.ROOT / "docs" / "use" / f"{page}.md").read_text()
    return text.partition(f"\n## {heading}\n")[2].partition("```python\n")[2].partition("```")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """runs/sft, runs/ppo and runs/reward, of random weights."""
    folder = tmp_path_factory.mktemp("runs")
    scorer = pretrained.load_scorer("tiny", tiny.tokenizer(), 1)
    for name, model in {"sft": tiny.model(), "ppo": tiny.model(1), "reward": scorer}.items():
        for part in (model, tiny.tokenizer()):
            part.save_pretrained(folder / "runs" / name / "model")
    return folder


def score(scorer, ids) -> float:
    return scorer.head_outputs(ids, torch.tensor([[0], [ids.shape[1] - 1]])).item()


def test_the_snippet_that_loads_a_trained_model_runs_unchanged(folder, monkeypatch):
    monkeypatch.chdir(folder)
    exec(code_below("Load it with transformers", "after_training"), names := {})
    ids = names["answered"]["input_ids"]
    scorer = pretrained.load_scorer("runs/reward/model", tiny.tokenizer(), 1)
    assert names["score"] == pytest.approx(score(scorer, ids), abs=1e-4)


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--model runs/sft/model --prompt copy --n 3", r"([^<\n]*\n){3}"),
        ("--model runs/sft --prompt copy --top-p 2", r"error: sample: out of range: \['top_p'\]\n"),
    ],
)
def test_the_sampler_file_by_itself_chats_with_a_saved_model(flags, says, folder):
    shutil.copy(processes.ROOT / "common" / "sampler.py", folder)
    ended = processes.script(folder / "sampler.py", *flags.split(), cwd=folder, alone=True)
    assert re.fullmatch(says, ended.out or ended.err.splitlines(True)[-1]), ended.err
    assert bool(ended.code) == says.startswith("error")


def test_a_chat_has_turns_and_the_scripts_scores(folder, monkeypatch, capsys):
    """Answers equal those of generate for dialogues that this test renders."""
    monkeypatch.chdir(folder)
    policy, scorer = tiny.model().eval(), pretrained.load_scorer("runs/reward/model", tiny.tokenizer(), 1)
    tokenizer, want, text = tiny.tokenizer(), [], "<|bos|> <|system|> um <|end|>"
    for said in ("copy ant", "reverse fox owl"):
        text += f" <|user|> {said} <|end|> <|assistant|>"
        ids = tokenizer(text, return_tensors="pt").input_ids
        answer = policy.generate(ids, do_sample=False, max_new_tokens=9)[0, ids.shape[1] :].tolist()
        text += f" {tokenizer.decode(answer, skip_special_tokens=True)} <|end|>"
        whole = tokenizer(text, return_tensors="pt").input_ids
        want += [tokenizer.decode(answer, skip_special_tokens=True), f"score {score(scorer, whole):.3f}"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("copy ant\n\nreverse fox owl\n"))
    options = {"scorer": "runs/reward", "system": "um", "temperature": 0, "max_new_tokens": 9}
    sampler.main(sampler.Args("runs/sft", **options))
    assert capsys.readouterr().out.splitlines() == want
    with pytest.raises(ValueError, match="128 positions"):
        sampler.main(sampler.Args("runs/sft", prompt="ant " * 130))
