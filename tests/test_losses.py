"""common/losses.py against values worked by hand; every loss also against the wrong variants it could be."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common import losses

NAN, LOG2 = float("nan"), math.log(2)
ROOT = Path(__file__).parents[1]

# -- masked_sum, masked_mean: two rows, one with two kept values and one with one
X = torch.tensor([[1.0, 3.0, NAN], [8.0, NAN, NAN]])
MASK = torch.tensor([[True, True, False], [True, False, False]])


@pytest.mark.parametrize(
    "reduce, dim, expected",
    [
        (losses.masked_sum, None, 12.0),  # 1 + 3 + 8
        (losses.masked_sum, 1, [4.0, 8.0]),
        (losses.masked_sum, 0, [9.0, 3.0, 0.0]),  # the sum of nothing is 0
        (losses.masked_sum, (0, 1), 12.0),
        (losses.masked_mean, None, 4.0),  # 12 / 3
        (losses.masked_mean, 1, [2.0, 8.0]),  # 4 / 2, 8 / 1
        (losses.masked_mean, (0, 1), 4.0),
    ],
)
def test_masked_reductions_ignore_nan_in_padding(reduce, dim, expected):
    torch.testing.assert_close(reduce(X, MASK, dim), torch.tensor(expected), rtol=0, atol=0)
    assert (X * MASK).sum().isnan()  # the variant with a product in place of a where


def test_masked_mean_is_over_values_not_a_mean_of_row_means_nor_over_padding():
    of_row_means = losses.masked_mean(X, MASK, 1).mean()
    over_padding = losses.masked_sum(X, MASK) / MASK.numel()
    assert (of_row_means, over_padding) == (5.0, 2.0)  # (2 + 8) / 2 and 12 / 6
    assert losses.masked_mean(X, MASK) == 4.0


def test_masked_mean_gradient_is_one_over_n_where_kept_and_zero_at_masked_nan():
    x = X.clone().requires_grad_()
    losses.masked_mean(x, MASK).backward()
    torch.testing.assert_close(x.grad, torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]) / 3)


@pytest.mark.parametrize("reduce", [losses.masked_sum, losses.masked_mean])
@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("shape", [(1, 3), (3,), (2, 1), (3, 2)])  # the first three would broadcast
def test_masked_reductions_refuse_unequal_shapes(reduce, dim, shape):
    with pytest.raises(ValueError, match="shapes differ"):
        reduce(torch.ones(2, 3), torch.ones(shape, dtype=torch.bool), dim)


@pytest.mark.parametrize("dim", [None, 1])
def test_masked_mean_of_nothing_is_an_error(dim):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mask[0] = dim is not None  # along dim 1 a single empty row is enough
    with pytest.raises(ValueError, match="keeps nothing"):
        losses.masked_mean(torch.ones(2, 3), mask, dim)


# -- sft_loss ----------------------------------------------------------------------------
# Two rows of four tokens, hence three actions. P(token) is a power of 1/2, so that its surprise in units of
# log 2 can be read off: row 0 is prompt, answer 2, end token 3; row 1 is answer 1, then padding.
SURPRISE = torch.tensor([[7.0, 2.0, 3.0], [1.0, 5.0, 5.0]])
ACTIONS = torch.tensor([[False, True, True], [True, False, False]])


def logprobs():
    return (-SURPRISE * LOG2).requires_grad_()


def test_sft_loss_is_the_mean_surprise_of_response_tokens():
    """(2 + 3 + 1) log 2 / 3 tokens = 2 log 2."""
    loss, parts = losses.sft_loss(logprobs(), ACTIONS)
    assert loss.item() == pytest.approx(2 * LOG2)
    assert parts["nll_sum"].item() == pytest.approx(6 * LOG2) and parts["n_tokens"].item() == 3
    assert loss.requires_grad and not parts["nll_sum"].requires_grad


def drop_end_token(mask):
    return mask & torch.tensor([[True, True, False], [True, True, True]])


@pytest.mark.parametrize(
    "wrong, value",
    [
        (lambda x: losses.sft_loss(x, drop_end_token(ACTIONS))[0], 1.5),  # (2 + 1) / 2
        (lambda x: losses.sft_loss(x, torch.ones_like(ACTIONS))[0], 23 / 6),  # prompt and padding learnt too
        (lambda x: losses.sft_loss(x, ACTIONS.roll(-1, 1))[0], 14 / 3),  # one to the left: (7 + 2 + 5) / 3
        (lambda x: -losses.masked_mean(x, ACTIONS, 1).mean(), 1.75),  # mean of means: (5 / 2 + 1) / 2
        (lambda x: losses.masked_mean(x, ACTIONS), -2.0),  # the sign
        (lambda x: -losses.masked_sum(x, ACTIONS) / 2, 3.0),  # per row, not per token
    ],
    ids=["no end token", "no mask", "shifted", "mean of means", "sign", "per row"],
)
def test_sft_loss_differs_from_its_wrong_variants(wrong, value):
    assert wrong(logprobs()).item() == pytest.approx(value * LOG2)
    assert abs(value - 2.0) > 0.2


def test_micro_batches_with_the_steps_token_count_add_up_to_the_big_batch():
    """Rows of 2 and 1 response tokens: (5 log 2) / 3 + (1 log 2) / 3 = 2 log 2; the mean of the two own means
    is (2.5 + 1) / 2 = 1.75 log 2, and its gradients differ as well."""
    whole, split, means = logprobs(), logprobs(), logprobs()
    losses.sft_loss(whole, ACTIONS)[0].backward()
    parts = [losses.sft_loss(split[i : i + 1], ACTIONS[i : i + 1], n_tokens=3) for i in range(2)]
    own = [losses.sft_loss(means[i : i + 1], ACTIONS[i : i + 1])[0] for i in range(2)]
    sum(loss for loss, _ in parts).backward()
    (sum(own) / 2).backward()

    assert sum(loss.item() for loss, _ in parts) == pytest.approx(2 * LOG2)
    assert sum(p["nll_sum"].item() for _, p in parts) == pytest.approx(6 * LOG2)
    assert sum(p["n_tokens"].item() for _, p in parts) == 3
    torch.testing.assert_close(split.grad, whole.grad)
    assert sum(own).item() / 2 == pytest.approx(1.75 * LOG2)
    assert not torch.allclose(means.grad, whole.grad)


def test_sft_loss_pushes_up_kept_tokens_alone_even_beside_nan():
    values = logprobs().detach()
    values[~ACTIONS] = NAN
    values.requires_grad_()
    loss, _ = losses.sft_loss(values, ACTIONS)
    loss.backward()
    assert loss.item() == pytest.approx(2 * LOG2)
    torch.testing.assert_close(values.grad, -ACTIONS.float() / 3)  # dL/dlogprob = -1 / n_tokens


def test_sft_loss_of_an_empty_mask_is_an_error_unless_other_micro_batches_have_tokens():
    values, nothing = logprobs(), torch.zeros_like(ACTIONS)
    with pytest.raises(ValueError, match="no token"):
        losses.sft_loss(values, nothing)
    loss, parts = losses.sft_loss(values, nothing, n_tokens=3)
    loss.backward()
    assert loss == 0 and parts["n_tokens"] == 0 and parts["nll_sum"] == 0
    assert values.grad is not None and not values.grad.any()  # a rank without tokens still takes part


def test_sft_loss_refuses_a_mask_of_all_tokens_in_place_of_actions():
    with pytest.raises(ValueError, match=r"logprobs \(2, 3\), action_mask \(2, 4\)"):
        losses.sft_loss(logprobs(), torch.ones(2, 4, dtype=torch.bool))


# -- the files that may be copied --------------------------------------------------------
@pytest.mark.parametrize(
    "name, use",
    [
        (
            "losses",
            "import torch; x = torch.tensor([[-1., -3.]]); assert losses.sft_loss(x, x < 0)[0] == 2;"
            "assert 'transformers' not in sys.modules",
        ),
        ("sampler", "assert callable(sampler.sample)"),
    ],
)
def test_file_works_when_copied_alone(name, use, tmp_path):
    shutil.copy(ROOT / "common" / f"{name}.py", tmp_path)
    program = f"import sys; sys.path.insert(0, '.'); import {name}; {use}; assert 'common' not in sys.modules"
    # -I: neither the working directory nor PYTHONPATH can lend it the rest of the project
    done = subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
