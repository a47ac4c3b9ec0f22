"""common/dist.py and the scripts on 2 ranks (gloo, fp32), compared with 1 rank, which is this process. One
launch runs all cases (dist_cases.py); tests that end or restart a job have their own torchrun."""

import collections
import itertools
import json
import math
import platform
import re
import shutil
from types import SimpleNamespace

import dist_cases
import processes
import pytest
import tiny_families
import torch
from processes import ROOT, flags
from safetensors.torch import load_file
from helpers import assert_same_versions, same_weights, write_rows
from transformers import (
    AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForCausalLM,
)  # fmt: skip

import advantage_model
import reward
import sft
from common import dist
from common.errors import NotFinite
from common.data import mapping, tiny
from common.data.files import read_jsonl
from common.loading import tensor_parallel
from common.run import checkpoints, machine, pool

WEIGHTS = "model/model.safetensors"


def prepare(folder):
    """Write the inputs of the cases: two models, and a checkpoint written by 1 rank."""
    for name, seed in (("tied", 3), ("untied", 4)):
        torch.manual_seed(seed)
        shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(
            vocab_size=len(dist_cases.TOKENIZER),
            tie_word_embeddings=name == "tied",
            initializer_range=0.1,
            **shape,
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
        dist_cases.TOKENIZER.save_pretrained(folder / name)
    for name, kind, split, count in (
        ("train", "sft", "train", 126),
        ("test", "sft", "test", 24),
        ("pairs", "preferences", "train", 45),
        ("held_out", "preferences", "test", 13),
        ("rankings", "rankings", "train", 5),
        ("prompts", "prompts", "train", 27),
        ("asked", "prompts", "test", 5),
        ("text", "text", "train", 30),
    ):
        write_rows(folder / f"{name}.jsonl", tiny.rows(kind, split)[:count])
    questions = [row["prompt"] for row in tiny.rows("prompts", "test")[:6]]
    write_rows(folder / "turns.jsonl", [{"turns": list(two)} for two in itertools.pairwise(questions)])
    (folder / "one").mkdir()
    dist_cases.write_checkpoint(folder / "one")
    checkpoints.save_model(dist_cases.scorer(1)[0], dist_cases.TOKENIZER, folder / "rs scorer")
    with dist_cases.stopped(pool.Pool, "score", 1):
        dist_cases.rs_with_a_model(folder, "rs sampled by one, learnt by one")
    shutil.copytree(folder / "rs sampled by one, learnt by one", folder / "rs sampled by one, learnt by two")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    prepare(folder)
    return folder


def launched(prepared, folder, ranks, *argv):
    """The results of the cases on this number of ranks, and their folder."""
    shutil.copytree(prepared, folder)
    ended = processes.script(ROOT / "tests" / "dist_cases.py", folder, *argv, ranks=ranks)
    results = json.loads((folder / "results.json").read_text()) if (folder / "results.json").exists() else {}

    def of(name):
        assert name in results, f"the launch ended before {name}: {ended.err[-3000:]}"
        error = isinstance(results[name], dict) and results[name].get("error")
        assert not error, error
        return results[name]

    of.folder, of.ended = folder, ended
    return of


@pytest.fixture(scope="module")
def two(prepared, tmp_path_factory):
    return launched(prepared, tmp_path_factory.mktemp("two") / "run", 2)


def close(a, b, tolerance=1e-5):
    return list(a) == [pytest.approx(x, rel=tolerance, abs=tolerance) for x in b]


def assert_moved_alike(start, *models):
    """Of two models, or two folders: every weight moved from `start`, and alike but for rounding. Returns the first
    one's weights."""
    one, both = (x if isinstance(x, dict) else load_file(x / "model.safetensors") for x in models)
    assert set(one) == set(both)
    for name in one:
        torch.testing.assert_close(one[name], both[name], atol=1e-5, rtol=1e-5)
        moved, apart = (start[name] - one[name]).abs().max(), (one[name] - both[name]).abs().max()
        assert apart <= 0.01 * moved and moved > 0, name
    return one


def test_the_launch_of_all_cases_ends_with_exit_code_0(two):
    assert two.ended.code == 0, two.ended.err[-3000:]


def test_sums_and_lists_are_joined_over_ranks_in_their_order(two):
    case = two("sums")
    assert case["gather"] == [1, 1] and case["world"] == 2
    assert dist.gather([5]) == [5] and dist.world_size() == 1
    # Two rows at a time for each rank; on both what one rank gets, in its order, errors in their places
    assert case["worked"] == [[0, 1, 5, 8], [2, 3, 6, 7]]
    alone = list(mapping.map_over_ranks(dist_cases.TRIED, lambda x: math.sqrt(7 - x)))
    assert case["shares"] == [repr(alone)] * 2 and alone[:1] == [(0, math.sqrt(7))]
    assert [str(pair[i])[:9] for pair, i in ((alone[4], 0), (alone[8], 1))] == ["invalid l", "math doma"]
    # 1 + 10 of rank 0 and 2 of rank 1; the largest of -3, -2 and -1, not their sum
    assert case["Sums"] == [{"nll_sum": 13.0, "ratio_max": -1.0, "extra": 0.5}] * 2


def test_sums_of_one_rank_are_in_fp64_and_carry_no_graph():
    sums = dist.Sums()
    for x in (2.0**24, 1.0, 1.0):  # in fp32 the sum stays 2 ** 24
        sums.add({"sum": torch.tensor(x, requires_grad=True), "max": x, "largest_max": -x}, "policy/")
    assert not sums.values["policy/sum"][0].requires_grad
    totals = {"policy/sum": 2.0**24 + 2, "policy/max": 2.0**24 + 2, "policy/largest_max": -1.0}
    assert sums.over_ranks() == totals  # a name ends in _max, or is a sum


def test_a_count_beside_a_sum_in_bfloat16_is_not_rounded():
    sums = dist.Sums()
    sums.add({"n": torch.tensor(301), "sum": torch.tensor(0.5, dtype=torch.bfloat16)})
    assert sums.over_ranks() == {"n": 301, "sum": 0.5}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_freed_memory_is_reused_by_the_next_large_tensor():
    code = """
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with a GPU nothing is kept
import torch
from common import dist
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
if sys.argv[1] == "setup":
    dist.setup()
for _ in range(3):
    torch.ones(2**24)  # 64 MB
before = resident()
for _ in range(9):
    torch.ones(2**24)
print(before, resident())
"""
    kept, gone = (processes.python("-c", code, word).out.split() for word in ("setup", "no set-up"))
    assert float(kept[0]) > float(gone[0]) + 50  # megabytes that were freed and are still there
    assert float(kept[1]) < float(kept[0]) + 100  # and are used again


@pytest.mark.parametrize(
    "driver, says, visible, warned",
    [
        (False, None, None, False),  # no GPU
        (True, None, None, True),  # a torch without CUDA
        (False, "CUDA initialization: The NVIDIA driver on your system is too old. Please update", None, True),
        (True, None, "", False),  # hidden on purpose
    ],
)
def test_an_unusable_gpu_is_reported_in_one_line(driver, says, visible, warned, tmp_path, monkeypatch, capsys):
    if driver:
        (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(dist.torch.cuda, "is_available", lambda: says and machine.warnings.warn(says))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine._warn_of_unused_gpu(tmp_path / "nvidiactl")
    said = capsys.readouterr().out
    assert said.count("\n") == warned and ("runs on the CPU" in said) == warned
    assert not says or "driver on your system is too old. All" in said


def test_a_program_prints_its_machine_first(monkeypatch, capsys):
    monkeypatch.setattr(machine, "_warn_of_unused_gpu", lambda: None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.setattr(dist, "compute_dtype", "bfloat16")
    monkeypatch.setattr(dist, "attention", "eager")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    dist.setup()
    machine.show()
    versions = f"torch {torch.__version__}, transformers {dist.transformers.__version__}"
    rest = "attention eager, world_size 1"
    assert capsys.readouterr().out == f"device cpu, compute_dtype bfloat16, {rest}; {versions}\n"


# -- seeds and the learning rate ---------------------------------------------------------
@pytest.mark.parametrize(
    "kind, ranks, device", [(None, 2, "cpu"), ("xpu", 2, "xpu:1"), ("mps", 1, "mps:1"), ("mps", 2, "cpu")]
)
def test_the_device_is_torchs_accelerator(kind, ranks, device, monkeypatch, capsys):
    """But of Apple's, which ranks cannot share, the CPU, and a line says so. cuDNN's attention is off: it would build
    a plan for each of decoding's many shapes."""
    seen, backend, cudnn = [], {"cpu": "gloo", "xpu:1": "cpu:gloo,xpu:xccl"}, []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", cudnn.append)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: kind and torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "set_device_index", seen.append)
    monkeypatch.setattr(dist.td, "init_process_group", lambda backend, **options: seen.append(backend))
    monkeypatch.setattr(dist.td, "new_group", lambda **options: None)
    monkeypatch.setattr(dist, "_keep_freed_memory", lambda: seen.append("cpu"))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert str(dist.setup()) == device
    assert seen == ["cpu" if device == "cpu" else 1, *([backend[device]] if ranks == 2 else ())]
    assert ("the CPU" in capsys.readouterr().out) == (kind == "mps" and ranks == 2)
    assert cudnn == ([] if device == "cpu" else [False])


def test_ranks_that_share_a_copy_wait_for_each_other_as_long_as_all_ranks_do(monkeypatch):
    monkeypatch.setattr(tensor_parallel.td, "new_subgroups", lambda n, timeout: [(n, timeout)])
    assert tensor_parallel.group_of.__wrapped__(4) == (4, dist.TIMEOUT)


def test_seeds_of_different_parts_differ_and_stay_the_same():
    parts = ((0, "a", 1), (0, "a", 2), (1, "a", 0), (0, "b", 1), (0, "a"), ("ab",), ("a", "b"))
    seeds = [dist.seed_of(*some) for some in parts]
    assert len(set(seeds)) == 7 and seeds[0] == 3841822438


def test_a_shuffle_depends_only_on_its_key():
    keys = [(0, "order", 0), (0, "order", 1), (1, "order", 0), (0, "minibatches", 0)]
    orders = [dist.shuffled(40, *key) for key in keys]
    assert all(sorted(order) == list(range(40)) for order in orders) and len(set(map(tuple, orders))) == 4
    torch.rand(3)  # torch's own generator does not matter
    assert dist.shuffled(40, *keys[0]) == orders[0] and dist.shuffled(0) == []


HALF_SQRT_3 = math.sqrt(3) / 2
COSINE = [(1 + HALF_SQRT_3) / 2, 0.75, 0.5, 0.25, (1 - HALF_SQRT_3) / 2]  # at 30, 60, ... 150 degrees
TO_A_TENTH = [0.55 + 0.45 * HALF_SQRT_3, 0.775, 0.55, 0.325, 0.55 - 0.45 * HALF_SQRT_3]


@pytest.mark.parametrize(
    "name, after_the_peak",
    [
        ("cosine", COSINE),
        ("cosine_with_min_lr", TO_A_TENTH),
        ("linear", [5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("constant_with_warmup", [1, 1, 1, 1, 1]),
    ],
)
def test_learning_rates_of_8_steps_by_hand(name, after_the_peak):
    """Two of them rise, with either flag. None is 0, unlike the first one in transformers."""
    for flags_ in ({"warmup_ratio": 0.25}, {"warmup_ratio": 0.0, "min_warmup_steps": 2}):
        args = SimpleNamespace(lr_schedule=name, **flags_)
        rates = [dist.schedule(step, 8, args) for step in range(1, 9)]
        assert rates == pytest.approx([1 / 3, 2 / 3, 1, *after_the_peak]) and min(rates) > 0
    assert dist.schedule(1, 1, SimpleNamespace(lr_schedule=name, warmup_ratio=0.0)) == 1.0
    assert dist.schedule(1, 1, SimpleNamespace(lr_schedule=name, warmup_ratio=1.0)) == 0.5


def test_warm_up_lasts_a_share_of_the_steps_rounded_up_or_a_larger_number_of_them():
    """0.3 times 8 is 2.4: three steps rise, and a line falls in five."""
    for least, rising in ((0, 3), (2, 3), (4, 4)):
        args = SimpleNamespace(lr_schedule="linear", warmup_ratio=0.3, min_warmup_steps=least)
        rates = [dist.schedule(step, 8, args) for step in range(1, 9)]
        falling = {3: [1, 4 / 5, 3 / 5, 2 / 5, 1 / 5], 4: [1, 3 / 4, 2 / 4, 1 / 4]}[rising]
        assert rates == pytest.approx([i / (rising + 1) for i in range(1, rising + 1)] + falling)


# -- an optimiser step -------------------------------------------------------------------
@pytest.mark.parametrize("flag, eps", [({}, 1e-8), ({"adam_eps": 1.0}, 1.0)], ids=["default", "flag"])
def test_two_steps_of_adamw_by_hand(flag, eps):
    """Gradients of eps and 2 eps, so that eps counts. In units of eps, the moments divided by 1 - beta^2 are
    (0.9 (0.1) + 0.1 (2)) / 0.19 = 29 / 19 and (0.95 (0.05) + 0.05 (4)) / 0.0975 = 33 / 13."""
    layer = torch.nn.Linear(2, 1)
    layer.weight.data, layer.bias.data = torch.tensor([[1.0, -2.0]]), torch.tensor([3.0])
    optimizer = dist.adamw(layer, 0.5, SimpleNamespace(weight_decay=0.2, **flag))
    after = [[1.0, -2.0, 3.0]]
    for gradient, step in ((eps, 1 / (1 + 1)), (2 * eps, 29 / 19 / (math.sqrt(33 / 13) + 1))):
        for p in layer.parameters():
            p.grad = torch.full_like(p, gradient)
        optimizer.step()
        after.append([x * (1 - 0.5 * 0.2) - 0.5 * step for x in after[-1]])
        assert [*layer.weight[0].tolist(), layer.bias.item()] == pytest.approx(after[-1], rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 4])
def test_backward_makes_up_for_the_mean_that_fsdp_takes_of_the_ranks(ranks, monkeypatch):
    """d (3 w^2) / dw at w = 2 is 12; it is added to the existing gradient."""
    monkeypatch.setattr(dist, "world_size", lambda: ranks)
    w = torch.tensor(2.0, requires_grad=True)
    for n in (1, 2):
        dist.backward(3 * w**2)
        assert w.grad == 12 * ranks * n


def two_models(*gradients):
    """Two models with two weights, 1 and 1, and such gradients; optimisers that step by just these."""
    both = [torch.nn.Linear(2, 1, bias=False) for _ in gradients]
    for model, gradient in zip(both, gradients):
        torch.nn.init.ones_(model.weight)
        model.weight.grad = torch.tensor([gradient])
    return both, [torch.optim.SGD(model.parameters(), lr=1.0) for model in both]


@pytest.mark.parametrize(
    "max_norm, moved",
    [(1.0, [[0.4, 0.2], [0.7, 1.4]]), (0.0, [[-2, -3], [0.7, 1.4]]), (9.0, [[-2, -3], [0.7, 1.4]])],
)
def test_a_step_clips_each_model_separately_and_clears_gradients(max_norm, moved):
    """Norms 5 and 0.5 of (3, 4) and (0.3, -0.4): with 1 the first is scaled by 1/5, the second stays."""
    both, optimizers = two_models([3.0, 4.0], [0.3, -0.4])
    assert dist.optimizer_step(both, optimizers, 1.0, max_norm) == pytest.approx([5.0, 0.5])
    for model, weights in zip(both, moved):
        assert model.weight[0].tolist() == pytest.approx(weights) and model.weight.grad is None
    by_both = [1 - x / math.sqrt(25.25) for x in (3.0, 4.0)]
    assert max_norm != 1 or both[0].weight[0].tolist() != pytest.approx(by_both)


@pytest.mark.parametrize(
    "gradients, loss, line",
    [
        ([[3.0, 4.0], [0.3, math.nan]], 1.0, "loss 1, gradient norm 5, nan: "),
        ([[3.0, math.inf], [0.3, 0.4]], 1.0, "loss 1, gradient norm inf, 0.5: "),
        ([[3.0, 4.0], [0.3, 0.4]], math.nan, "loss nan, gradient norm 5, 0.5: "),
    ],
)
def test_no_model_changes_if_the_loss_or_a_gradient_is_not_finite(gradients, loss, line):
    both, optimizers = two_models(*gradients)
    with pytest.raises(NotFinite, match=f"^{line}the step was not taken; lower --lr"):
        dist.optimizer_step(both, optimizers, loss, 1.0)
    assert all(model.weight.tolist() == [[1, 1]] and model.weight.grad is None for model in both)


# -- training ----------------------------------------------------------------------------
@pytest.mark.parametrize("name, sizes", [("even", dist_cases.EVEN), ("uneven", dist_cases.UNEVEN)])
def test_loss_and_gradient_norm_of_five_steps_equal_one_rank(two, name, sizes):
    steps = dist_cases.train(*dist_cases.policy(), sizes)
    assert len(steps) == 5 and close(two(name)["steps"], steps)


def test_the_uneven_steps_leave_ranks_with_fewer_blocks_or_none():
    mine = [[len(range(size)[rank::2]) for rank in (0, 1)] for size in dist_cases.UNEVEN]
    assert [1, 0] in mine and [3, 2] in mine  # with micro-batches of 2: none at all, and an empty second one


def test_a_run_of_the_script_logs_what_one_rank_logs(two, tmp_path):
    two("undisturbed")
    sft.main(sft.Args(**dist_cases.run_options(two.folder), output_dir=str(tmp_path)))
    one, both = (read_jsonl(folder / "metrics.jsonl") for folder in (tmp_path, two.folder / "undisturbed"))
    assert [list(row) for row in one] == [list(row) for row in both]
    column = lambda rows, key: [row[key] for row in rows if key in row]
    for key in ("step", "iteration", "optim/lr", "data/documents", "data/response_tokens", "data/tokens"):
        assert column(one, key) == column(both, key)
    for key in ("loss/nll", "optim/grad_norm", "eval/nll"):  # later steps drift apart by rounding
        assert close(column(one[:5], key), column(both[:5], key))
    samples = [read_jsonl(f / "samples.jsonl") for f in (tmp_path, two.folder / "undisturbed")]
    one, both = (sorted(str(row["prompt"]) for row in rows) for rows in samples)
    assert len(one) == 5 and one == both
    assert json.loads((two.folder / "undisturbed" / "args.json").read_text())["world_size"] == 2


def test_bf16_compute_keeps_fp32_weights_and_moments_and_is_close_to_fp32(two):
    case = two("bf16")
    assert case["kept"] == ["torch.float32"] and case["inside"] == ["torch.bfloat16"]
    assert set(case["seen"]) == {"torch.bfloat16"}  # what the unembedding got
    assert case["steps"] != case["fp32"] and close(case["steps"], case["fp32"], 0.03)


def test_bf16_compute_on_one_rank_is_the_same_to_its_precision(two):
    model, optimizer = dist_cases.policy(two.folder / "tied", compute_dtype=torch.bfloat16)
    assert close(dist_cases.train(model, optimizer, [8, 5, 8]), two("bf16")["steps"], 0.03)
    assert {value.dtype for value in dist_cases.state(model, optimizer).values()} == {torch.float32}
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with dist.consolidated(model):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert {p.dtype for p in model.parameters()} == {torch.float32}


# -- weights between bfloat16's numbers --------------------------------------------------
def test_an_update_below_bfloat16s_spacing_acts_in_proportion():
    """Above 1 the spacing is 2^-7. An update of 2^-10, an eighth of it, moves one weight in eight to the next value."""
    model = dist_cases.of_a_layer(torch.ones(400, 500))
    update = 2**-10
    assert ((model.weight + update).bfloat16() == 1).all()  # without the offsets no weight moves
    dist.dither(model)
    assert model.weight.min() > 1 - 2**-9 and model.weight.max() < 1 + 2**-8  # halves of the spacings on both sides
    moved = (model.weight + update).bfloat16().float()
    assert set(moved.unique().tolist()) == {1.0, 1 + 2**-7}
    assert (moved - 1).mean().item() == pytest.approx(update, rel=0.03)


def test_dithered_weights_round_to_what_they_were():
    torch.manual_seed(0)
    start = torch.cat([torch.randn(199, 300), torch.tensor([0.0, -0.0, 1.0, -2.0, 2.0**-40, -3e38] * 50)[None]])
    start = start.bfloat16().float()
    model = dist_cases.of_a_layer(start.clone())
    dist.dither(model)
    assert torch.equal(model.weight.bfloat16().float(), start)
    assert (model.weight != start).float().mean() > 0.99 and (model.weight[start == 0] == 0).all()
    once = model.weight.clone()
    dist.dither(model)
    assert (model.weight != once).float().mean() < 1e-3  # they are not on the grid any more


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adamw_dithers_what_it_trains_if_the_model_computes_in_bfloat16(dtype, prepared):
    model = dist_cases.of_the_hub(prepared)
    model.compute_dtype = getattr(torch, dtype)
    model.model.layers[0].mlp.down_proj.requires_grad_(False)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    dist.adamw(model, 1e-5, dist_cases.ARGS)
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    layers = {name for name in before if "norm" not in name and "embed" not in name}
    assert changed == (layers - {"model.layers.0.mlp.down_proj.weight"} if dtype == "bfloat16" else set())


def test_offsets_are_the_same_on_two_ranks_and_outputs_do_not_change(two):
    """FSDP rounds embeddings and vectors as well, so there they have offsets, too."""
    one, both = dist_cases.dithered(two.folder), two("dithered")
    assert one["equal"] and both["equal"]
    assert len(one["moved"]) == 15 and one["moved"].items() <= both["moved"].items()  # 7 in each layer, and the head
    more = both["moved"].keys() - one["moved"].keys()
    assert "model.embed_tokens.weight" in more and sum("norm" in name for name in more) == len(more) - 1 == 5


# -- reward models and advantage models --------------------------------------------------
@pytest.mark.parametrize("name", dist_cases.KINDS)
def test_loss_accuracy_and_gradient_norm_of_a_scorers_steps_equal_one_rank(two, name):
    one, both = dist_cases.KINDS[name](two.folder), two("scorer_steps")[name]
    assert len(one) == len(both) == 4 and all(close(a, b) for a, b in zip(one, both))
    assert all(step[-1] > 0 for step in one) and len({step[0] for step in one}) == 4


def test_the_steps_of_a_scorer_leave_ranks_with_fewer_comparisons_or_none():
    mine = [[len(range(size)[rank::2]) for rank in (0, 1)] for size in dist_cases.STEPS]
    assert [3, 2] in mine and [1, 0] in mine  # with micro-batches of 2: an empty second one, and none at all


def test_the_weights_under_a_sharded_policys_adapters_are_its_reference(two):
    to_start, to_policy = two("frozen_base")
    assert to_start == 0 and to_policy > 1e-3


def test_frozen_weights_in_bfloat16_change_no_bit_on_two_ranks(two):
    in_half, exact = two("frozen_in_bf16")
    assert in_half["dtypes"] == ["torch.bfloat16", "torch.float32"] and exact["dtypes"] == ["torch.float32"]
    assert in_half["steps"] == exact["steps"] and in_half["adapters"] == exact["adapters"]
    assert in_half["exported"] < 1e-6 and exact["exported"] < 1e-6  # a sum in bfloat16 is off by 1e-3


def test_scores_and_log_probabilities_equal_one_rank_on_every_rank_and_in_order(two):
    ranks, one = two("of_models"), dist_cases.answers(two.folder)
    assert ranks[0] == ranks[1] and set(one) == set(ranks[0])
    flat = lambda values: [x for value in values for x in (value if isinstance(value, list) else [value])]
    for name, want in one.items():
        assert close(flat(want), flat(ranks[0][name])), name
    assert len(one["scores"]) == len(one["logprobs"]) == len(one["pairwise"]) == 7
    assert len(set(flat(one["scores"]))) > 10 and len(set(flat(one["logprobs"]))) > 10  # they tell the order


def test_two_ranks_write_the_rows_of_pairs_that_one_writes(two, tmp_path):
    assert two("rows_of_pairs") == {}
    args = dist_cases.pairwise.Args(dataset=str(two.folder / "pairs.jsonl"), output_dir=str(tmp_path / "one"))
    dist_cases.pairwise.main(args)
    for name in ("train.jsonl", "held_out.jsonl"):
        one, both = (path / name for path in (tmp_path / "one", two.folder / "rows of pairs"))
        assert one.read_text() == both.read_text() != ""


def test_samples_of_a_policy_are_the_same_on_every_rank_and_in_the_order_of_the_prompts(two):
    ranks = two("samples")
    assert ranks[0] == ranks[1] and ranks[0]["sharded"]
    prompts = [c.prompt_ids.tolist() for c in dist_cases.pairs(two.folder)[:5]]
    assert len({tuple(prompt) for prompt in prompts}) == 5
    end = dist_cases.TOKENIZER.eos_token_id
    answers = [[*prompt[:-1], end] for prompt in prompts]  # whatever ended them
    assert ranks[0]["echo"] == [[answer] * 3 for answer in answers] and ranks[0]["one"] == [[answers[0]] * 3]
    assert len(ranks[0]["real"]) == 5  # those that ended
    answers = [ids for of_one in ranks[0]["real"] for ids in of_one]
    assert len(answers) > 2 and all(ids.index(end) == len(ids) - 1 for ids in answers)


def test_a_scorer_saved_by_two_ranks_is_the_one_in_memory_and_that_of_one_rank(two, tmp_path):
    ranks, some = two("saved_scorer"), dist_cases.pairs(two.folder)[:2]
    plain = AutoModelForSequenceClassification.from_pretrained(two.folder / "scorer of two")
    assert type(plain).__name__ == "LlamaForSequenceClassification" and plain.config.num_labels == 1
    want = []
    for c in some:
        rows = [torch.cat([c.prompt_ids, ids]).long()[None] for ids in c.response_ids]
        want.append([plain(input_ids=row).logits.item() for row in rows])
    for rank in ranks:
        assert rank["same"] and rank["head"] == "torch.float32"
        assert all(close(a, b) and close(a, c) for a, b, c in zip(rank["scores"], want, rank["loaded"]))
        assert rank["share"] == pytest.approx(0.5, abs=0.01)
    start = dist_cases.state(dist_cases.scorer(1)[0])
    checkpoints.save_model(dist_cases.descend_scorer(two.folder), dist_cases.TOKENIZER, tmp_path / "model")
    one = assert_moved_alike(start, tmp_path / "model", two.folder / "scorer of two")
    assert set(one) == set(start) and "score.weight" in one


@pytest.mark.parametrize("name, loss", [("reward", "loss/reward"), ("advantage", "loss/advantage")])
def test_a_run_of_a_scorers_script_logs_what_one_rank_logs(two, tmp_path, monkeypatch, name, loss):
    two(f"{name}_run")
    script, options = (reward, {}) if name == "reward" else (advantage_model, {"n_others": 1})
    script.main(
        script.Args(
            **dist_cases.scorer_options(two.folder, script), output_dir=str(tmp_path / "one"), **options
        )
    )
    folders = tmp_path / "one", two.folder / script.__name__
    assert {p.name for p in folders[0].iterdir()} == {p.name for p in folders[1].iterdir()}
    one, both = (read_jsonl(folder / "metrics.jsonl") for folder in folders)
    # from samples, which differ
    drawn = "length/correlation length/correlation_n length/prompts expected/bias expected/rmse expected/correlation"
    drawn = {*drawn.split(), "gold/expected_correlation"}
    assert [set(row) - drawn for row in one] == [set(row) - drawn for row in both] and len(one) == 8
    keys = "optim/grad_norm train/accuracy optim/lr data/comparisons eval/nll eval/accuracy"
    for key in (loss, *keys.split()):
        values = [[row[key] for row in rows if key in row] for rows in (one, both)]
        assert values[0] and close(*values, 1e-4), key
    baselines = ["baseline/length_accuracy", "baseline/sft_logprob_accuracy"]
    for key in [*baselines, "ratio/clipped"] if options else baselines:
        assert one[-1][key] == pytest.approx(both[-1][key])
    weights = [load_file(folder / WEIGHTS) for folder in folders]
    far = [name for name in weights[0] if (weights[0][name] - weights[1][name]).abs().mean() > 1e-5]
    assert set(weights[0]) == set(weights[1]) and not far  # Adam makes large steps of a few rounding errors
    scores = [
        [r["score"] for row in read_jsonl(folder / "samples.jsonl") for r in row["responses"]]
        for folder in folders
    ]
    assert len(scores[0]) == 26 and close(*scores, 1e-3)
    assert json.loads((folders[1] / "args.json").read_text())["world_size"] == 2
    plain = AutoModelForSequenceClassification.from_pretrained(folders[1] / "model")
    assert plain.config.num_labels == (1 if name == "reward" else 2)


def test_nan_on_one_rank_stops_every_rank_of_a_scorers_script(two):
    assert all("nan" in message for message in two("nan_in_a_scorer"))
    assert [row["step"] for row in read_jsonl(two.folder / "reward nan" / "metrics.jsonl")] == [0, 1]
    assert not (two.folder / "reward nan" / "model").exists()


# -- rejection sampling ------------------------------------------------------------------
def test_every_prompt_of_an_iteration_is_answered_k_times_by_two_ranks(two):
    two("rs_run")
    pool = read_jsonl(two.folder / "rs of two" / "pool.jsonl")
    counts = collections.Counter((r["iteration"], r["chunk"], r["prompt"][-1]["content"]) for r in pool)
    assert set(counts.values()) == {3} and len(counts) == 26 == len({prompt for _, _, prompt in counts})
    sizes = collections.Counter((iteration, chunk) for iteration, chunk, _ in counts)
    assert [sizes[i, chunk] for i in (1, 2) for chunk in range(4)] == [4, 4, 4, 1] * 2
    assert all(r["score"] == tiny.gold_score(r["prompt"][-1]["content"], r["response"]) for r in pool)
    tell = lambda r: dist_cases.TOKENIZER.decode(r["response_ids"], skip_special_tokens=True) == r["response"]
    assert all(map(tell, pool))
    samples = read_jsonl(two.folder / "rs of two" / "samples.jsonl")
    held_out = [row["prompt"] for row in read_jsonl(two.folder / "asked.jsonl")]
    told = [s["prompt"][-1]["content"] for s in samples]
    assert told == told[:3] * 3 and told[:3] == [x for x in held_out if x in told]  # the same, of 3 versions
    assert json.loads((two.folder / "rs of two" / "args.json").read_text())["world_size"] == 2


def test_two_ranks_stopped_in_sampling_and_in_fine_tuning_resume_to_the_same_bits(two):
    two("rs_run")
    assert two("rs_stopped") == {"sampled": 2 * 4 * 3}
    folders = two.folder / "rs stopped", two.folder / "rs of two"
    assert_same_versions(*folders, "pool.jsonl", "samples.jsonl", "curves.jsonl", "summary.json")


def test_the_same_pool_is_scored_and_learnt_alike_by_one_and_two_ranks(two):
    two("rs_of_one_pool")
    folders = [two.folder / f"rs sampled by one, learnt by {name}" for name in ("one", "two")]
    dist_cases.rs_with_a_model(two.folder, folders[0].name, resume=True)
    pools = [read_jsonl(f / "pool.jsonl") for f in folders]
    text = [[(r["prompt"], r["response_ids"]) for r in pool] for pool in pools]
    scores = [[r["score"] for r in pool] for pool in pools]
    assert text[0] == text[1] and len(text[0]) == 39 and close(*scores) and len(set(scores[0])) > 20
    rows = [[r for r in read_jsonl(f / "metrics.jsonl") if "loss/nll" in r] for f in folders]
    for key in ("loss/nll", "optim/grad_norm", "data/tokens", "optim/lr"):
        assert close(*([r[key] for r in of_one] for of_one in rows)), key
    assert len(rows[0]) > 3 and len({r["loss/nll"] for r in rows[0]}) == len(rows[0])
    one, both = (load_file(f / WEIGHTS) for f in folders)
    assert max((one[name] - both[name]).abs().mean() for name in one) < 1e-5


# -- iterative DPO -----------------------------------------------------------------------
@pytest.mark.parametrize("name", dist_cases.DPO_KINDS)
def test_a_step_of_dpo_has_the_metrics_and_weights_of_one_rank(two, name):
    ranks, (steps, model) = two("dpo_updates"), dist_cases.dpo_steps(two.folder, **dist_cases.DPO_KINDS[name])
    assert ranks[0] == ranks[1] and len(steps) == len(ranks[0][name]) == 4
    assert all(close(one, both) for one, both in zip(steps, ranks[0][name]))
    assert all(step[-1] > 0 for step in steps) and len({step[0] for step in steps}) == 4
    start = dist_cases.state(dist_cases.policy()[0])
    assert_moved_alike(start, dist_cases.state(model), torch.load(two.folder / f"dpo {name}.pt"))


def test_log_probabilities_under_the_reference_are_those_of_one_rank_in_the_order_of_the_pairs(two):
    ranks, one = two("dpo_references"), dist_cases.dpo_reference(two.folder)
    assert ranks[0] == ranks[1] and set(one) == set(ranks[0])
    for key, want in one.items():
        assert all(close(a, b) for a, b in zip(want, ranks[0][key], strict=True)), key
    assert [len(one[key]) for key in one] == [7, 1, 7]
    for found in (one, ranks[0]):
        assert all(close(a, b) for a, b in zip(found["learnt"], found["of 7"], strict=True))
    assert len({x for pair in one["of 7"] for x in pair}) == 14  # they tell the order


def test_a_run_of_dpo_on_two_ranks_answers_every_prompt_and_begins_at_log_2(two):
    two("dpo_run")
    folder = two.folder / "dpo of two"
    rows = read_jsonl(folder / "pool.jsonl")
    counts = collections.Counter((r["iteration"], r["temperature"], r["prompt"][-1]["content"]) for r in rows)
    assert set(counts.values()) == {2} and len(counts) == 2 * 2 * 13 and len({q for _, _, q in counts}) == 26
    assert all(r["score"] == tiny.gold_score(r["prompt"][-1]["content"], r["response"]) for r in rows)
    trained = [r for r in read_jsonl(folder / "metrics.jsonl") if "loss/dpo" in r]
    pairs = collections.Counter(r["iteration"] for r in read_jsonl(folder / "pairs.jsonl"))
    steps = collections.Counter()
    for r in trained:
        steps[r["iteration"]] += r["data/pairs"]
    assert steps == pairs and set(pairs) == {1, 2}  # one pass
    assert trained[0]["data/pairs"] == 5  # of which rank 1 has fewer
    assert trained[0]["loss/dpo"] == pytest.approx(math.log(2), abs=1e-6)
    start, end = (load_file(f / "model.safetensors") for f in (two.folder / "tied", folder / "model"))
    assert set(start) == set(end) and not [key for key in start if torch.equal(start[key], end[key])]


def test_a_run_of_dpo_stopped_three_times_on_two_ranks_resumes_to_the_same_bits(two):
    two("dpo_run")
    assert two("dpo_stopped") == {"sampled": (4 + 4 + 4 + 1 + 4) * 2}
    folders = two.folder / "dpo stopped", two.folder / "dpo of two"
    assert_same_versions(*folders, "pool.jsonl", "pairs.jsonl", "samples.jsonl", "summary.json")


# -- sharding ----------------------------------------------------------------------------
@pytest.mark.parametrize("name", dist_cases.NESTED)
def test_nested_layers_and_shared_weights_are_sharded_with_the_results_of_one_rank(two, name):
    assert two("families_with_nested_layers")[name] == pytest.approx(dist_cases.step_of_family(name), rel=1e-4)


@pytest.mark.parametrize("name, n", [("Mamba", 2), ("Zamba 2", 4), ("Llama 3", 2)])
def test_a_nested_decoder_layer_is_counted_once(name, n):
    assert len(dist.decoder_layers(tiny_families.build(name))) == n


def test_hybrid_sharding_in_two_groups_equals_one_rank(prepared, tmp_path):
    """A rank has half of the weights, not a quarter. Gradients are averaged over all ranks, not over its group."""
    cases = "sharded_in_groups uneven bf16 frozen_base consolidated saved saved_scorer ppo_updates"
    four = launched(prepared, tmp_path / "four", 4, 2, *cases.split(), "checkpoint_of_two", "checkpoint_of_one")
    test_the_launch_of_all_cases_ends_with_exit_code_0(four)
    assert four("sharded_in_groups") == [["(Replicate(), Shard(dim=0))"], True]
    test_loss_and_gradient_norm_of_five_steps_equal_one_rank(four, "uneven", dist_cases.UNEVEN)
    test_bf16_compute_keeps_fp32_weights_and_moments_and_is_close_to_fp32(four)
    test_the_weights_under_a_sharded_policys_adapters_are_its_reference(four)
    test_consolidated_sampling_gives_the_tokens_of_the_unsharded_model(four)
    test_consolidated_holds_one_full_copy_inside_and_frees_it_after(four)
    test_training_after_consolidated_is_bitwise_training_without_it(four)
    test_the_model_saved_by_two_ranks_is_the_one_in_memory_and_that_of_one_rank(four, tmp_path / "policy")
    test_a_scorer_saved_by_two_ranks_is_the_one_in_memory_and_that_of_one_rank(four, tmp_path / "scorer")
    test_a_step_of_ppo_has_the_losses_and_gradient_norms_of_one_rank(four)
    test_a_checkpoint_of_two_ranks_loads_on_one(four)
    test_a_checkpoint_of_one_rank_loads_on_two(four)
    test_a_checkpoint_resumes_bitwise_on_the_same_number_of_ranks(four)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_a_folder_model_is_read_by_rank_0_and_is_whole_on_every_rank(two, name):
    ranks = two(name)
    assert [rank["on_meta"] for rank in ranks] == [[False, False], [True, True]]
    for rank in ranks:
        assert rank["file"] and rank["weights"] and rank["buffers"] and rank["logits"]
        assert rank["share"] == pytest.approx(0.5, abs=0.01) and rank["all_changed"]


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_embeddings_are_tied_after_sharding_and_training_as_they_were_before(two, name):
    assert [rank["tied"] for rank in two(name)] == [[name == "tied"] * 2] * 2


def test_sharding_on_the_cpu_works_on_a_machine_with_another_accelerator(two):
    assert two("apple_silicon") == 1


def test_a_slow_download_or_tokenisation_outlasts_the_timeout_of_a_collective(two):
    assert two("one_rank_takes_longer_than_a_collective_may") == 1


def test_buffers_are_sent_from_rank_0_on_the_cpu_and_memory_peaks_are_reset(monkeypatch):
    """A tensor that is gathered keeps its device, which is rank 0's own GPU."""
    moved = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: moved.append(tensor) or tensor.clone())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "rank", lambda: 0)

    def stop(values):
        raise InterruptedError(values)

    monkeypatch.setattr(dist, "gather", stop)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    model = tiny.model()
    with pytest.raises(InterruptedError) as stopped:
        dist.shard(model, torch.device("cpu"))
    [buffers, _] = stopped.value.args[0]
    assert buffers.keys() == dict(model.named_buffers()).keys() and len(moved) == len(buffers) > 0

    read = dict(max_memory_allocated=3e9, max_memory_reserved=5e9, reset_peak_memory_stats=None)
    for name, value in read.items():
        monkeypatch.setattr(torch.accelerator, name, lambda device, value=value: value)
    gpu = torch.device("cuda", 0)
    assert machine.peak_memory(gpu, "update") == {"memory/update_gb": 3.0, "memory/reserved_gb": 5.0}
    assert machine.peak_memory(torch.device("cpu"), "update") == {}


def test_other_ranks_wait_for_a_slow_function_beyond_a_collectives_timeout(tmp_path):
    (tmp_path / "slow.py").write_text("""
import time
from datetime import timedelta
from types import SimpleNamespace
from common import dist
from common.batches import Row
from common.responses import Prompt, Response
from common.scoring import scorers
dist.TIMEOUT = timedelta(seconds=3)
dist.setup()
def slow(prompts, responses, rows):
    time.sleep(6 if dist.rank() else 0)
    return [float(len(text)) for text in responses]
prompt = Prompt([1], [{"role": "user", "content": "a"}], Row("f:1", {}))
pairs = [(prompt, Response([2], "a" * n, True)) for n in range(4)]
scorer = scorers.Scorer("slow", "1", SimpleNamespace(function=slow, name="slow"))
print(scorers.score(scorer, pairs, 2))
dist.shutdown()
""")
    ended = processes.script(tmp_path / "slow.py", ranks=2)
    assert ended.code == 0 and ended.out.count("[0.0, 1.0, 2.0, 3.0]") == 2, ended.out + ended.err


def test_a_rank_that_ends_during_a_long_wait_ends_the_others_at_once(tmp_path):
    """On another node no torchrun would end them, and the wait may take a day."""
    (tmp_path / "alone.py").write_text("""
import os, time
from common import dist
dist.setup()
if dist.rank():
    os._exit(1)
began = time.time()
try:
    dist.barrier()
except RuntimeError as error:
    from common.run import run
    print("seen" if run.PEER_LOST.search(str(error)) else error, time.time() - began < 20)
""")
    assert processes.script(tmp_path / "alone.py", ranks=2).out == "seen True\n"


def test_a_single_rank_with_a_process_group_shards_and_casts(tmp_path):
    """tests/benchmarks/gpu.py uses this to try nccl and FSDP2 on one GPU. Only an unsharded model uses autocast."""
    (tmp_path / "code.py").write_text("""
import torch, torch.distributed as td
from common import dist, models
from common.data import tiny
whole = dist.shard(tiny.model(), dist.setup(), torch.bfloat16)
td.init_process_group("gloo", store=td.HashStore(), rank=0, world_size=1)
sharded = dist.shard(tiny.model(), dist.setup(), torch.bfloat16)
for model in (whole, sharded):
    with models.computing(model, torch.zeros(1)):
        print(type(model).__name__, torch.is_autocast_enabled("cpu"))
""")
    lines = processes.script(tmp_path / "code.py").out.splitlines()
    assert lines == ["LlamaForCausalLM True", "FSDPLlamaForCausalLM False"]


def test_the_benchmark_of_gpus_measures_two_ranks_of_a_cpu_under_torchrun():
    flags = "--only sharded --slots 2 --prompt-tokens 4 --new-tokens 2 --block 16 --blocks 1 --repeats 1"
    program = ROOT / "tests" / "benchmarks" / "gpu.py"
    ended = processes.script(program, "--shapes", "tiny", *flags.split(), forks=True)
    assert ended.code == 0 and "\nsharded, 2 rank(s) on cpu\n" in ended.out, ended.err
    for part, share in (("sampler", "of the bound"), ("training", "of the rate")):
        assert re.search(rf"\n{part}\nmodel .*tokens/s .*{share}.*\ntiny .*\d%", ended.out)


# -- consolidated ------------------------------------------------------------------------
def test_consolidated_sampling_gives_the_tokens_of_the_unsharded_model(two):
    ranks = two("consolidated")
    assert all(rank["tokens"] for rank in ranks)
    assert ranks[0]["steps"] > ranks[1]["steps"]  # ranks decoded different numbers of steps


def test_consolidated_holds_one_full_copy_inside_and_frees_it_after(two):
    for rank in two("consolidated"):
        before, inside, after, inside_again, after_again = rank["parameters"]
        assert before == after == after_again == pytest.approx(rank["full"] / 2, rel=0.02)
        assert inside == inside_again == pytest.approx(rank["full"], rel=0.02)
        before, inside, after, inside_again, after_again = rank["tensors"]
        assert min(inside, inside_again) >= before + 0.98 * rank["full"]
        assert after == after_again == before


def test_consolidated_uses_evaluation_mode_and_restores_training_mode_after_an_error(two):
    for rank in two("consolidated"):
        assert not rank["training_inside"] and rank["training_after"] and rank["sharded"]
        assert rank["after_error"] == [rank["parameters"][0], True]


def test_a_forward_without_gradient_leaves_no_gathered_weights(two):
    assert all(rank["after_no_grad"] == [rank["parameters"][0], True] for rank in two("consolidated"))


def test_training_after_consolidated_is_bitwise_training_without_it(two):
    assert all(rank["same_update"] for rank in two("consolidated"))


@pytest.mark.parametrize("kind", dist_cases.SHARED)
def test_two_ranks_sharing_a_copy_sample_like_one_rank_in_less_memory(two, kind):
    """Each has half of six layers, and embedding, norms and unembedding; to gather takes a layer, or two."""
    for case in (of_rank[kind] for of_rank in two("tensor_parallel")):
        assert case["gap"] < 1e-5 and case["greedy"] and case["drawn"] and case["agreed"]
        assert abs(case["after"]) < 0.05 * case["layer"]
        assert case["inside"] == pytest.approx(case["whole"] - 3 * case["layer"], rel=0.05)
        assert case["inside"] < case["peak"] <= case["inside"] + 2.05 * case["layer"] < case["whole"]


# -- files -------------------------------------------------------------------------------
def test_the_model_saved_by_two_ranks_is_the_one_in_memory_and_that_of_one_rank(two, tmp_path):
    assert two("saved")
    start = dist_cases.state(dist_cases.policy()[0])
    checkpoints.save_model(dist_cases.descend(), dist_cases.TOKENIZER, tmp_path / "model")
    folders = tmp_path / "model", two.folder / "saved by two"
    one = assert_moved_alike(start, *folders)
    assert "lm_head.weight" not in one  # tied weights are written once
    configs = [json.loads((f / "config.json").read_text()) for f in folders]
    assert configs[0] == configs[1] and configs[0]["architectures"] == ["LlamaForCausalLM"]
    assert type(AutoModelForCausalLM.from_pretrained(folders[1])) is LlamaForCausalLM
    assert AutoTokenizer.from_pretrained(folders[1]).get_vocab() == dist_cases.TOKENIZER.get_vocab()


def test_a_checkpoint_of_two_ranks_loads_on_one(two):
    two("checkpoint_of_two")
    equal, after, want, saved = dist_cases.read_checkpoint(two.folder / "two")
    assert equal and close(after, want) and saved == {"step": 2, "x": [1.5]}


def test_a_checkpoint_of_one_rank_loads_on_two(two):
    case = two("checkpoint_of_one")
    assert case["equal"] and close(case["after"], case["want"]) and case["saved"] == {"step": 2, "x": [1.5]}


def test_a_checkpoint_resumes_bitwise_on_the_same_number_of_ranks(two):
    case = two("checkpoint_of_two")
    assert case["equal"] and case["after"] == case["want"]
    equal, after, want, _ = dist_cases.read_checkpoint(two.folder / "one")
    assert equal and after == want


def test_only_the_last_checkpoint_is_kept_and_latest_names_it(tmp_path):
    model, optimizer = dist_cases.policy()
    for step in (1, 2, 10):
        checkpoints.save_checkpoint(tmp_path, step, {"policy": (model, optimizer)}, {"step": step})
        assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", f"step_{step}"]
    assert checkpoints.load_checkpoint(tmp_path, {"policy": (model, optimizer)}) == {"step": 10}


def test_a_checkpoints_state_can_be_read_without_its_weights(tmp_path):
    root = tmp_path / "checkpoint"
    assert checkpoints.checkpoint_state(root) == {}  # no folder
    modules = {"policy": dist_cases.policy()}
    checkpoints.save_checkpoint(root, 3, modules, {"iteration": 1, "x": [1.5]})
    checkpoints.save_checkpoint(root, 7, modules, {"iteration": 2, "x": [2.5]})
    (root / "step_9").mkdir()  # latest does not name it
    (root / "step_9" / "state.json").write_text('{"iteration": 3}')
    before = torch.get_rng_state()
    for path in [*(root / "step_7" / "tensors").iterdir(), *(root / "step_7").glob("*.pt")]:
        path.unlink()
    assert checkpoints.checkpoint_state(root) == checkpoints.checkpoint_state(str(root)) == {"iteration": 2, "x": [2.5]}
    assert torch.equal(torch.get_rng_state(), before)
    (root / "latest").unlink()
    assert checkpoints.checkpoint_state(root) == {}


# -- PPO ---------------------------------------------------------------------------------
def test_a_step_of_ppo_has_the_losses_and_gradient_norms_of_one_rank(two):
    ranks, (known, steps, both) = two("ppo_updates"), dist_cases.ppo_steps(two.folder)
    assert ranks[0] == ranks[1] and len(steps) == len(ranks[0]["steps"]) == 4
    for key, rows in known.items():  # in the order of the rows, whitened over all of them
        assert all(close(a, b) for a, b in zip(rows, ranks[0]["known"][key], strict=True)), key
    for one, two_ranks in zip(steps, ranks[0]["steps"]):
        assert one == pytest.approx(two_ranks, rel=1e-5, abs=1e-5)
        assert one["policy/grad_norm"] > 0 and one["value/grad_norm"] > 0
    assert steps[1]["policy/ratio_max"] > 1.001  # the policy has moved
    for model, saved in zip(both, torch.load(two.folder / "ppo steps.pt")):
        for name, x in dist_cases.state(model).items():
            torch.testing.assert_close(x, saved[name], atol=1e-5, rtol=1e-5)


def test_a_run_of_ppo_begins_every_iteration_at_ratio_1_and_resumes_to_the_same_bits(two):
    two("ppo_run")
    folders = [two.folder / name for name in ("ppo", "ppo stopped")]
    rows, again = ([row for row in read_jsonl(f / "metrics.jsonl")] for f in folders)
    trained = [row for row in rows if "kl/per_response" in row]
    assert len(trained) == 2 and not any(key.startswith("policy/ratio") for key in trained[0])  # warm-up
    assert trained[1]["policy/first_ratio_max"] == 1.0 and trained[1]["policy/first_approx_kl"] == 0.0
    assert trained[1]["loss/ptx"] > 0 and trained[1]["loss/rehearsal"] > 0 and rows[0]["eval/kl"] == 0
    clock = lambda key: key.startswith(("time", "perf/"))
    assert [{k: v for k, v in row.items() if not clock(k)} for row in rows] == [
        {k: v for k, v in row.items() if not clock(k)} for row in again
    ]
    a, b = (load_file(f / WEIGHTS) for f in folders)
    assert all(torch.equal(a[name], b[name]) for name in a)
    start = load_file(two.folder / "tied" / "model.safetensors")
    assert {name for name in a if torch.equal(a[name], start[name])} == {
        name for name in a if name.startswith("model.layers.0.")
    }


# -- comparisons -------------------------------------------------------------------------
def test_greedy_metrics_of_two_ranks_equal_those_of_one(two):
    two("evaluated")
    dist_cases.evaluate_main(two.folder, "evaluated by one")
    folders = [two.folder / f"evaluated by {name}" for name in ("one", "two")]
    one, both = (read_jsonl(folder / "samples.jsonl") for folder in folders)
    text = lambda rows: [(r["policy"], r["prompt"], r["response"], r["safety"]) for r in rows]
    assert text(one) == text(both) and len(one) == 20 and len({r["response"] for r in one}) > 2
    assert [r["turn"] for r in one] == 2 * ([1] * 5 + [2] * 5)
    assert close([r["score"] for r in one], [r["score"] for r in both], 1e-4)
    assert len({r["score"] for r in one}) > 5
    one, both = (json.loads((f / "summary.json").read_text())["temperatures"]["0"] for f in folders)
    assert list(one) == list(both) == ["untied", "tied"]
    for name, figures in one.items():
        assert list(figures) == list(both[name])
        assert close(figures.values(), both[name].values(), 1e-4)


# -- the ends of a job -------------------------------------------------------------------
def test_killed_ranks_restarted_by_torchrun_resume_to_the_same_bits(two, tmp_path):
    two("undisturbed")
    command = [ROOT / "tests" / "processes.py", "sft", "row 5", "--resume"]
    command += flags(**dist_cases.run_options(two.folder))
    ended = processes.torchrun(*command, *flags(output_dir=tmp_path), options=["--max-restarts", 1])
    assert ended.err.count("killed at row 5") == 2 and ended.code == 0, ended.err[-3000:]
    folders = tmp_path, two.folder / "undisturbed"
    assert same_weights(*folders)
    keys = ("step", "loss/nll", "optim/grad_norm", "eval/nll")
    got, want = ([[r.get(key) for key in keys] for r in read_jsonl(f / "metrics.jsonl")] for f in folders)
    assert got == want and [row[0] for row in got] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8]  # before, 8 steps, after


def test_nan_on_one_rank_stops_every_rank_at_that_step(two):
    messages = two("nan_on_one_rank")
    assert len(messages) == 2 and all("loss nan" in message for message in messages)
    assert [row["step"] for row in read_jsonl(two.folder / "nan" / "metrics.jsonl")] == [0, 1]


@pytest.mark.parametrize("error", ["missing file", "nan on rank 1"])
def test_a_user_error_ends_the_job_with_one_line_and_a_code(two, tmp_path, error):
    options, words = {"dataset": "nothing.jsonl", "micro_batch_size": 4}, ["nothing.jsonl", "no such file"]
    program = [ROOT / "sft.py", "tiny"]
    if error != "missing file":
        options, words = dist_cases.run_options(two.folder), ["step 2", "nan"]
        program = [ROOT / "tests" / "processes.py", "sft", "nan 2 1"]
    given = flags(**options, output_dir=tmp_path / "run")
    ended = processes.torchrun(*program, *given, forks=error != "missing file")  # one by the real torchrun
    # torchrun's own traceback is there
    assert ended.code != 0 and 'sft.py", line' not in ended.err, ended.err[-3000:]
    assert len(ended.errors) == 1 and ended.errors[0].startswith("error: "), ended.err[-3000:]
    assert all(word in ended.errors[0] for word in words), ended.errors
    assert not (tmp_path / "run" / "model").exists() and not (tmp_path / "run" / "summary.json").exists()
