"""common/losses.py against values worked by hand; plausible wrong variants of every loss must fail."""

import math
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


def test_sft_loss_raises_only_kept_tokens_even_next_to_nan():
    values = logprobs().detach()
    values[~ACTIONS] = NAN
    values.requires_grad_()
    loss, _ = losses.sft_loss(values, ACTIONS)
    loss.backward()
    assert loss.item() == pytest.approx(2 * LOG2)
    torch.testing.assert_close(values.grad, -ACTIONS.float() / 3)  # dL/dlogprob = -1 / n_tokens


# -- bradley_terry_loss ------------------------------------------------------------------
# Scores are multiples of log 3, whose sigmoids are fractions: 9/10, 3/4, 1/2, 1/4, 1/10 at 2, 1, 0, -1, -2
LOG3, LOG = math.log(3), math.log


def thirds(*multiples):
    """(n,) float64 scores, each times log 3."""
    return (torch.tensor(multiples, dtype=torch.float64) * LOG3).requires_grad_()


def test_bradley_terry_by_hand():
    """Differences log 3, 0, -log 3: probabilities 3/4, 1/2, 1/4; one correct, one tie, one wrong."""
    loss, parts = losses.bradley_terry_loss(thirds(2, 1, -2), thirds(1, 1, -1))
    assert loss.item() == pytest.approx(-(LOG(3 / 4) + LOG(1 / 2) + LOG(1 / 4)) / 3)
    assert parts["loss_sum"].item() == pytest.approx(3 * loss.item())
    assert (parts["n_correct"], parts["n_rows"]) == (1.5, 3)
    assert loss.requires_grad and not any(value.requires_grad for value in parts.values())
    # wrong variants: the two sides exchanged
    assert losses.bradley_terry_loss(thirds(1), thirds(2))[0].item() == pytest.approx(LOG(4))
    assert losses.bradley_terry_loss(thirds(2), thirds(1))[0].item() == pytest.approx(LOG(4 / 3))


def test_bradley_terry_gradient_is_the_probability_of_being_wrong():
    chosen, rejected = thirds(1, 0), thirds(0, 1)
    losses.bradley_terry_loss(chosen, rejected)[0].backward()
    expected = torch.tensor([-1 / 4, -3 / 4], dtype=torch.float64) / 2
    torch.testing.assert_close(chosen.grad, expected)
    torch.testing.assert_close(rejected.grad, -expected)


def test_the_margin_counts_in_the_loss_but_not_in_the_accuracy():
    """Differences log 3, 0, -log 3 minus a margin of log 3: 1/2, 1/4, 1/10. Added instead: 9/10, 3/4, 1/2.
    If the margin counted in the accuracy, the first pair would be a tie."""
    args = (thirds(1, 0, -1), thirds(0, 0, 0))
    loss, parts = losses.bradley_terry_loss(*args, margin=thirds(1, 1, 1).detach())
    assert loss.item() == pytest.approx(LOG(2 * 4 * 10) / 3)
    assert parts["n_correct"] == 1.5
    added = losses.bradley_terry_loss(*args, margin=-thirds(1, 1, 1).detach())[0].item()
    assert added == pytest.approx(LOG(10 / 9 * 4 / 3 * 2) / 3) and abs(added - loss.item()) > 0.5
    in_accuracy = losses.bradley_terry_loss(thirds(0, -1, -2), thirds(0, 0, 0))
    assert in_accuracy[0].item() == pytest.approx(loss.item()) and in_accuracy[1]["n_correct"] == 0.5


def test_each_pair_has_its_own_margin():
    loss, _ = losses.bradley_terry_loss(thirds(1, 1), thirds(0, 0), margin=thirds(0, 2).detach())
    assert loss.item() == pytest.approx((LOG(4 / 3) + LOG(4)) / 2)


@pytest.mark.parametrize(
    "preference, expected, correct",
    [
        (0.0, LOG(4), 0.0),  # the other one is better: -log 1/4
        (0.5, LOG(16 / 3) / 2, 0.5),  # a label of a tie: half of each
        (1.0, LOG(4 / 3), 1.0),
        (0.8, 0.8 * LOG(4 / 3) + 0.2 * LOG(4), 1.0),
        (0.2, 0.2 * LOG(4 / 3) + 0.8 * LOG(4), 0.0),
    ],
)
def test_soft_labels_by_hand(preference, expected, correct):
    """A pair of difference log 3, P = 3/4."""
    label = torch.tensor([preference], dtype=torch.float64)
    loss, parts = losses.bradley_terry_loss(thirds(1), thirds(0), preference=label)
    assert loss.item() == pytest.approx(expected) and parts["n_correct"] == correct
    argmax = losses.bradley_terry_loss(thirds(1), thirds(0), preference=(label > 0.5).double())[0].item()
    assert (abs(argmax - expected) > 0.1) == (0 < preference < 1)


def test_the_gradient_vanishes_at_the_soft_label():
    chosen = thirds(1)
    losses.bradley_terry_loss(chosen, thirds(0), preference=torch.tensor([0.75]).double())[0].backward()
    assert chosen.grad.item() == pytest.approx(0, abs=1e-12)
    hard = thirds(1)
    losses.bradley_terry_loss(hard, thirds(0), preference=torch.tensor([1.0]).double())[0].backward()
    assert hard.grad.item() == pytest.approx(-0.25)


def test_margin_with_a_soft_label_applies_to_both_orders():
    """Difference and margin log 3, p = 1/4: log sigmoid(0) and log sigmoid(-2 log 3). With sigmoid(-Delta),
    Delta = 0, in the second term it would be log 2."""
    label = torch.tensor([0.25], dtype=torch.float64)
    loss, _ = losses.bradley_terry_loss(thirds(1), thirds(0), margin=thirds(1).detach(), preference=label)
    assert loss.item() == pytest.approx(0.25 * LOG(2) + 0.75 * LOG(10))
    assert abs(loss.item() - LOG(2)) > 1


@pytest.mark.parametrize("value", [-0.01, 1.01, NAN])
def test_a_preference_is_a_probability(value):
    with pytest.raises(ValueError, match="from 0 to 1"):
        losses.bradley_terry_loss(torch.zeros(2), torch.zeros(2), preference=torch.tensor([0.5, value]))


@pytest.mark.parametrize("loss", [losses.bradley_terry_loss, losses.advantage_model_loss])
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_losses_of_pairs_stay_finite_far_out(loss, size):
    """log(sigmoid(-100)) in fp32 is -inf, log sigmoid is not."""
    chosen = torch.tensor([-size, size], requires_grad=True)
    value, _ = loss(chosen, -chosen.detach())
    value.backward()
    assert value.isfinite() and chosen.grad.isfinite().all() and value > 0.9 * size
    assert torch.log(torch.sigmoid(torch.tensor(-2e2))).isinf()


# -- ranking_loss ------------------------------------------------------------------------
# Pairs of RANKS: 0-1 (log 3), 0-2 and 0-3 (2 log 3), 1-3 (log 3), 2-3 (0); the tie 1-2 is none
RANKS = torch.tensor([0, 1, 1, 2])
RANKING = -(2 * LOG(3 / 4) + 2 * LOG(9 / 10) + LOG(1 / 2))


def test_ranking_by_hand():
    loss, parts = losses.ranking_loss(thirds(2, 1, 0, 0), RANKS)
    assert loss.item() == pytest.approx(RANKING / 5)
    assert parts["loss_sum"].item() == pytest.approx(RANKING)
    assert (parts["n_correct"], parts["n_rows"]) == (4.5, 5)


@pytest.mark.parametrize(
    "scores, ranks, value",
    [
        ((2, 1, 0, 0), [0, 1, 2, 3], (RANKING + LOG(4 / 3)) / 6),  # the tie as a pair
        ((2, 1, 0, 0), [2, 1, 1, 0], (2 * LOG(4) + 2 * LOG(10) + LOG(2)) / 5),  # 0 the worst rank
    ],
    ids=["tie", "order"],
)
def test_ranking_differs_from_its_wrong_variants(scores, ranks, value):
    wrong = losses.ranking_loss(thirds(*scores), torch.tensor(ranks))[0].item()
    assert wrong == pytest.approx(value) and abs(value - RANKING / 5) > 5e-4


def test_ranking_does_not_depend_on_the_order_of_the_responses():
    order = [3, 1, 0, 2]
    scores = thirds(2, 1, 0, 0)
    loss, _ = losses.ranking_loss(scores[order], RANKS[order])
    assert loss.item() == pytest.approx(RANKING / 5)
    loss.backward()
    plain = thirds(2, 1, 0, 0)
    losses.ranking_loss(plain, RANKS)[0].backward()
    torch.testing.assert_close(scores.grad, plain.grad)


def test_ranking_of_two_is_bradley_terry():
    loss, _ = losses.ranking_loss(thirds(0, 1), torch.tensor([1, 0]))
    assert loss.item() == pytest.approx(LOG(4 / 3))


def test_ranking_margin_is_read_at_better_then_worse():
    """Response 1 is the better one: margin[1, 0], here log 3, and not margin[0, 1]."""
    margin = torch.tensor([[9.0, 9.0], [LOG3, 9.0]], dtype=torch.float64)
    loss, parts = losses.ranking_loss(thirds(0, 1), torch.tensor([1, 0]), margin)
    assert loss.item() == pytest.approx(LOG(2)) and parts["n_correct"] == 1


def test_a_prompt_counts_once_whatever_its_number_of_pairs():
    """Three equal scores (3 pairs of log 2) and a pair of difference log 3: the mean over prompts weighs them
    equally, a mean over the 4 pairs does not."""
    prompts = (thirds(0, 0, 0), torch.tensor([0, 1, 2])), (thirds(1, 0), torch.tensor([0, 1]))
    results = [losses.ranking_loss(*prompt) for prompt in prompts]
    over_prompts = sum(loss.item() for loss, _ in results) / 2
    over_pairs = sum(p["loss_sum"].item() for _, p in results) / sum(p["n_rows"].item() for _, p in results)
    assert over_prompts == pytest.approx((LOG(2) + LOG(4 / 3)) / 2)
    assert over_pairs == pytest.approx((3 * LOG(2) + LOG(4 / 3)) / 4)
    assert abs(over_prompts - over_pairs) > 0.05


@pytest.mark.parametrize("ranks", [[1, 1, 1], [0]])
def test_a_ranking_with_only_ties_is_an_error(ranks):
    with pytest.raises(ValueError, match="no response is better"):
        losses.ranking_loss(torch.zeros(len(ranks)), torch.tensor(ranks))


# -- advantage_score, eq. 8 --------------------------------------------------------------
R, E = [2.0, -1.0], [3.0, 0.5]
RHO = [[0.5, 2.0], [1.0, 0.0]]  # two other policies


def eq8(**options):
    r, e = (torch.tensor(x, requires_grad=True) for x in (R, E))
    return r, e, losses.advantage_score(r, e, **options)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [-1.0, -1.5]),  # K = 0: r - e
        ({"n_policies": 5}, [-1.0, -1.5]),  # K = 0: (5 - 0) / 5 = 1
        # N = 3: 2 - 1/3 * 3 - 1/3 * (0.5 + 2) * 2 and -1 - 1/3 * 0.5 - 1/3 * 1 * (-1)
        ({"ratios": RHO}, [-2 / 3, -5 / 6]),
        # N = 4: 2 - 2/4 * 3 - 1/4 * 2.5 * 2 and -1 - 2/4 * 0.5 + 1/4
        ({"ratios": RHO, "n_policies": 4}, [-0.75, -1.0]),
    ],
)
def test_advantage_score_by_hand(options, expected):
    options = {k: torch.tensor(v) if k == "ratios" else v for k, v in options.items()}
    torch.testing.assert_close(eq8(**options)[2], torch.tensor(expected))


@pytest.mark.parametrize(
    "wrong",
    [
        2 - 3 - 2.5 * 2 / 4,  # e whole, without (N - K) / N
        2 - 2 / 4 * 3 - 2.5 * 2 / 2,  # the mean over K, not the sum over N
        2 - 2 / 4 * 3 + 2.5 * 2 / 4,  # the sign
        2 - 2 / 4 * 3 - 2.5 * 3 / 4,  # the ratios times e
    ],
)
def test_advantage_score_differs_from_its_wrong_variants(wrong):
    assert abs(eq8(ratios=torch.tensor(RHO), n_policies=4)[2][0].item() - wrong) > 0.5


def test_advantage_score_gradients_pass_scores_and_expected_scores_but_no_ratio():
    ratios = torch.tensor(RHO, requires_grad=True)
    r, e, a = eq8(ratios=ratios, n_policies=4)
    a.sum().backward()
    torch.testing.assert_close(r.grad, torch.tensor([1 - 2.5 / 4, 1 - 1 / 4]))
    torch.testing.assert_close(e.grad, torch.tensor([-0.5, -0.5]))
    assert ratios.grad is None


@pytest.mark.parametrize("n_policies", [2, 1, 0])
def test_expected_reward_without_weight_is_refused(n_policies):
    """At N = K its coefficient (N - K) / N would be 0: K = 2 here."""
    with pytest.raises(ValueError, match=f"n_policies {n_policies} must be more than the 2"):
        eq8(ratios=torch.tensor(RHO), n_policies=n_policies)


@pytest.mark.parametrize("n_policies, weight", [(3, 1 / 3), (4, 1 / 2), (20, 0.9), (2.002, 0.002 / 2.002)])
def test_the_expected_rewards_weight_vanishes_as_n_approaches_k(n_policies, weight):
    _, e, a = eq8(ratios=torch.tensor(RHO), n_policies=n_policies)
    a.sum().backward()
    assert e.grad.tolist() == pytest.approx([-weight, -weight], rel=1e-4)


@pytest.mark.parametrize("shape", [(1, 2), (2,), (3, 1)])
def test_advantage_score_refuses_ratios_of_other_rows(shape):
    with pytest.raises(ValueError, match="shapes differ"):
        losses.advantage_score(torch.zeros(2), torch.zeros(2), torch.zeros(shape))


# -- advantage_model_loss, eq. 6 ---------------------------------------------------------
def test_advantage_model_loss_by_hand():
    """a_c = log 3, a_r = 0, bound 2 log 3: the difference is log 3, bound - a_c log 3, bound + a_r 2 log 3;
    then a_c = a_r = -log 3: 0, 3 log 3, log 3."""
    loss, parts = losses.advantage_model_loss(thirds(1, -1), thirds(0, -1), bound=2 * LOG3)
    terms = [4 / 3 * 4 / 3 * 10 / 9, 2 * 28 / 27 * 4 / 3]
    assert loss.item() == pytest.approx(LOG(terms[0] * terms[1]) / 2)
    assert parts["loss_sum"].item() == pytest.approx(LOG(terms[0] * terms[1]))
    assert parts["rank_loss_sum"].item() == pytest.approx(LOG(4 / 3) + LOG(2))
    assert (parts["n_correct"], parts["n_rows"]) == (1.5, 2)
    assert not any(value.requires_grad for value in parts.values())


@pytest.mark.parametrize(
    "wrong",
    [
        4 / 3 * 4 / 3,  # bounded above only
        4 / 3 * 10 / 9,  # bounded below only
        4 / 3 * 28 / 27 * 10 / 9,  # bound + a_c, bound - a_r: bounded on the wrong sides
        4 / 3,  # Bradley-Terry
    ],
)
def test_advantage_model_loss_differs_from_its_wrong_variants(wrong):
    loss, _ = losses.advantage_model_loss(thirds(1), thirds(0), bound=2 * LOG3)
    assert loss.item() == pytest.approx(LOG(4 / 3 * 4 / 3 * 10 / 9))
    assert abs(loss.item() - LOG(wrong)) > 0.06


def test_the_bound_defaults_to_2_5_or_is_one_per_pair():
    default, _ = losses.advantage_model_loss(thirds(0), thirds(0))
    assert default.item() == pytest.approx(LOG(2) + 2 * LOG(1 + math.exp(-2.5)))
    each, _ = losses.advantage_model_loss(thirds(0, 0), thirds(0, 0), bound=thirds(1, 2).detach())
    assert each.item() == pytest.approx(LOG(2) + LOG(4 / 3 * 10 / 9))


def best_probability(loss, agreeing, n):
    """sigmoid(r_1 - r_2) that minimises the loss of n labels of one pair, of which `agreeing` prefer 1."""
    scores = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([0] * agreeing + [1] * (n - agreeing))
    optimizer = torch.optim.LBFGS([scores], max_iter=300, tolerance_grad=1e-10, tolerance_change=0)

    def closure():
        optimizer.zero_grad()
        value = loss(scores[chosen], scores[1 - chosen])[0]
        value.backward()
        return value

    optimizer.step(closure)
    assert scores.grad.abs().max() < 1e-6
    return torch.sigmoid(scores[0] - scores[1]).item(), scores.detach()


@pytest.mark.parametrize("agreeing, n, probability", [(3, 4, 0.683), (9, 10, 0.783), (1, 1, 0.841)])
def test_optimum_of_eq_6_shrinks_the_difference(agreeing, n, probability):
    """By eq. 6 with m = 2.5 the optimum lies at a_1 = -a_2 = d / 2 where p (1 - s(d)) - (1 - p) s(d) is
    p s(d / 2 - m) - (1 - p) s(-d / 2 - m): p = 3/4, 9/10, 1 give sigmoid(d) = 0.683, 0.783, 0.841."""
    found, scores = best_probability(losses.advantage_model_loss, agreeing, n)
    assert found == pytest.approx(probability, abs=5e-4)
    assert scores[0].item() == pytest.approx(-scores[1].item(), abs=1e-4)
    p, d = agreeing / n, (scores[0] - scores[1]).item()
    s = [1 / (1 + math.exp(-x)) for x in (d, d / 2 - 2.5, -d / 2 - 2.5)]
    assert p * (1 - s[0]) - (1 - p) * s[0] == pytest.approx(p * s[1] - (1 - p) * s[2], abs=1e-6)
    if n > 1:  # Bradley-Terry's optimum is the labels' own probability
        assert best_probability(losses.bradley_terry_loss, agreeing, n)[0] == pytest.approx(p, abs=1e-5)


def test_without_other_policies_a_constant_in_reward_and_expectation_cancels():
    r_c, r_r, e, c = (torch.tensor(x, dtype=torch.float64) for x in ([1.0, 2], [0.5, 3], [0.2, 1], [7.0, -4]))

    def loss(r_c, r_r, e, **options):
        sides = [losses.advantage_score(r, e, **options) for r in (r_c, r_r)]
        return losses.advantage_model_loss(*sides)[0].item()

    assert loss(r_c + c, r_r + c, e + c) == pytest.approx(loss(r_c, r_r, e), rel=1e-12)
    assert abs(loss(r_c + c, r_r + c, e) - loss(r_c, r_r, e)) > 0.1  # in r alone it is felt
    ratios = torch.full((2, 1), 0.5, dtype=torch.float64)  # and with K > 0 too: (1 - 0.25) c - 0.5 c stays
    whole, moved = loss(r_c, r_r, e, ratios=ratios), loss(r_c + c, r_r + c, e + c, ratios=ratios)
    assert abs(whole - moved) > 0.1


# -- whiten ------------------------------------------------------------------------------
# Of X under MASK 1, 3 and 8 are kept: mean 4, squares around it 9 + 1 + 16
DEVIATION = math.sqrt(26 / 3)


def test_whiten_subtracts_the_mean_and_divides_by_the_population_deviation():
    got = losses.whiten(X, MASK)
    want = torch.tensor([[-3 / DEVIATION, -1 / DEVIATION, 0], [4 / DEVIATION, 0, 0]])
    torch.testing.assert_close(got, want)
    assert losses.masked_mean(got, MASK).item() == pytest.approx(0, abs=1e-6)
    kept = got[MASK]
    assert kept.var(correction=0).item() == pytest.approx(1) and abs(kept.var().item() - 1) > 0.4  # Bessel's


def test_whiten_passes_no_gradient_through_masked_nan():
    x = torch.where(MASK, X, torch.nan).requires_grad_()
    losses.whiten(x, MASK)[0, 0].backward()
    assert torch.isfinite(x.grad).all() and x.grad[MASK].all() and not x.grad[~MASK].any()


def test_pairs_are_counted_exactly_in_bfloat16():
    """bfloat16 has no 1,001."""
    worse = torch.zeros(1001, dtype=torch.bfloat16)
    for loss in (losses.bradley_terry_loss, losses.advantage_model_loss):
        _, counts = loss(worse + 1, worse)
        assert counts["n_rows"] == counts["n_correct"] == 1001


def test_whiten_keeps_equal_values_finite_and_refuses_an_empty_mask():
    assert losses.whiten(torch.full((3,), 7.0), torch.ones(3, dtype=torch.bool)).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="keeps nothing"):
        losses.whiten(X, torch.zeros_like(MASK))


# -- kl_estimate -------------------------------------------------------------------------
OURS, THEIRS = torch.tensor([1 / 2, 1 / 8]).log(), torch.tensor([1 / 4, 1 / 2]).log()


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("k1", [LOG2, -2 * LOG2]),  # negative where the reference finds the token likelier: not clamped
        ("k2", [LOG2**2 / 2, 2 * LOG2**2]),
        ("k3", [1 / 2 - 1 + LOG2, 4 - 1 - 2 * LOG2]),  # exp(-d) is 1/2 and 4
    ],
)
def test_kl_estimates_by_hand(kind, expected):
    assert losses.kl_estimate(OURS, THEIRS, kind).tolist() == pytest.approx(expected)
    assert losses.kl_estimate(OURS, OURS, kind).tolist() == [0, 0]


def test_the_default_kl_estimate_is_k1():
    assert torch.equal(losses.kl_estimate(OURS, THEIRS), losses.kl_estimate(OURS, THEIRS, "k1"))


def test_the_means_of_k1_and_k3_are_the_true_kl_and_that_of_k2_is_not():
    """p = (1/2, 1/4, 1/4), q = (1/8, 1/8, 3/4): KL = 1/2 log 4 + 1/4 log 2 + 1/4 log 1/3."""
    p, q = torch.tensor([1 / 2, 1 / 4, 1 / 4]), torch.tensor([1 / 8, 1 / 8, 3 / 4])
    mean = lambda kind: (p * losses.kl_estimate(p.log(), q.log(), kind)).sum().item()
    true = LOG2 + LOG2 / 4 - math.log(3) / 4
    assert mean("k1") == pytest.approx(true) == mean("k3") and abs(mean("k2") - true) > 0.05
    backwards = (p * losses.kl_estimate(q.log(), p.log(), "k1")).sum().item()
    assert backwards == pytest.approx(-true)  # the sign matters


def test_k2_and_k3_are_never_negative_and_k1_is_not_clamped():
    d = torch.linspace(-30, 30, 601, dtype=torch.float64)
    zero = torch.zeros_like(d)
    assert (losses.kl_estimate(d, zero, "k3") >= 0).all() and (losses.kl_estimate(d, zero, "k2") >= 0).all()
    assert torch.equal(losses.kl_estimate(d, zero, "k1"), d)
    small = losses.kl_estimate(torch.tensor([1e-4]), torch.tensor([0.0]), "k3").item()
    assert small == pytest.approx(5e-9, rel=0.1)  # d^2 / 2; exp(-d) - 1 + d in fp32 has lost it


def test_kl_estimate_refuses_an_unknown_kind():
    with pytest.raises(ValueError, match="'k4' is not k1, k2 or k3"):
        losses.kl_estimate(OURS, THEIRS, "k4")


# -- safety_gated_score ------------------------------------------------------------------
def gated(safety, tagged, **options):
    safety = torch.tensor(safety)
    helpful = torch.arange(10.0, 10 + len(safety))
    return losses.safety_gated_score(safety, helpful, torch.tensor(tagged), **options).tolist()


def test_the_safety_score_counts_for_tagged_prompts_and_probably_unsafe_responses():
    """log(0.15 / 0.85) = -1.7346: sigmoid(-1.74) = 0.1493 is below 0.15, sigmoid(-1.73) = 0.1506 is not."""
    assert gated([-1.74, -1.73, 3.0, 0.1], [False] * 4) == [pytest.approx(-1.74), 11, 12, 13]
    assert gated([-1.74, -1.73, 3.0, 0.1], [True] * 4) == pytest.approx([-1.74, -1.73, 3.0, 0.1])
    # the variant that compares the logit itself with 0.15 would take 0.1 as unsafe: it does not


def test_a_response_exactly_at_the_threshold_is_safe():
    assert gated([0.0, -1e-3], [False] * 2, threshold=0.5) == [10, pytest.approx(-1e-3)]


# -- gae ---------------------------------------------------------------------------------
# A response of three tokens: rewards 1, 0, 2 and values 1/2, 1, -1. With gamma = 0.9
#     delta_3 = 2 - (-1) = 3,  delta_2 = 0 + 0.9 (-1) - 1 = -1.9,  delta_1 = 1 + 0.9 (1) - 0.5 = 1.4
# and with lam = 0.5 A_3 = 3, A_2 = -1.9 + 0.45 (3) = -0.55, A_1 = 1.4 + 0.45 (-0.55) = 1.1525
REWARDS, VALUES = [1.0, 0.0, 2.0], [0.5, 1.0, -1.0]


def of_gae(gamma, lam, outside=0.0):
    """A prompt before and padding after; the second row's response is the last token of the first's, earlier."""
    o = outside
    rewards = torch.tensor([[o, o, *REWARDS, o], [o, REWARDS[-1], o, o, o, o]])
    values = torch.tensor([[o, o, *VALUES, o], [o, VALUES[-1], o, o, o, o]])
    mask = torch.tensor([[False, False, True, True, True, False], [False, True, *[False] * 4]])
    advantages, returns = losses.gae(rewards, values, mask, gamma, lam)
    assert not advantages[~mask].any() and not returns[~mask].any()
    return [[x[row][mask[row]].tolist() for row in (0, 1)] for x in (advantages, returns)]


@pytest.mark.parametrize("outside", [0.0, NAN, 1e30, -1e30, math.inf])
def test_gae_by_hand_with_any_values_outside_the_response(outside):
    advantages, returns = of_gae(0.9, 0.5, outside)
    assert advantages[0] == pytest.approx([1.1525, -0.55, 3.0]) and advantages[1] == [3.0]
    assert returns[0] == pytest.approx([1.6525, 0.45, 2.0]) and returns[1] == [2.0]  # advantages + values


def test_lam_1_gives_monte_carlo_returns_and_lam_0_one_step_errors():
    """Rewards to come, at gamma = 0.9: 1 + 0.81 (2) = 2.62, 0.9 (2) = 1.8, 2."""
    advantages, returns = of_gae(0.9, 1.0)
    assert returns[0] == pytest.approx([2.62, 1.8, 2.0])
    assert advantages[0] == pytest.approx([2.62 - 0.5, 1.8 - 1.0, 2.0 + 1.0])
    assert of_gae(0.9, 0.0)[0][0] == pytest.approx([1.4, -1.9, 3.0])


@pytest.mark.parametrize(
    "wrong",
    [
        [1.4 + 0.5 * -0.4, -0.4, 3.0],  # lam alone: A_2 = -1.9 + 0.5 (3) = -0.4
        [1.4 + 0.9 * 0.8, 0.8, 3.0],  # gamma alone: A_2 = -1.9 + 0.9 (3) = 0.8
        [1.1525, -0.55, 2.0],  # no value at the last token
        [2.62, 1.8, 2.0],  # no baseline
        [1.4, -1.9, 3.0],  # no sum
    ],
    ids=["lam alone", "gamma alone", "last value", "no baseline", "deltas"],
)
def test_gae_differs_from_its_wrong_variants(wrong):
    assert max(abs(a - b) for a, b in zip(of_gae(0.9, 0.5)[0][0], wrong)) > 0.1


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.97, 0.8), (1.0, 1.0), (0.5, 0.0)])
def test_gae_is_the_sum_of_its_definition(gamma, lam):
    """A_t = sum_k (gamma lam)^k delta_{t+k}, in plain python, for responses that begin and end anywhere."""
    generator = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(2, 6, 12, generator=generator, dtype=torch.float64)
    spans = [(0, 12), (0, 1), (11, 12), (3, 9), (5, 6), (2, 12)]
    mask = torch.tensor([[start <= t < end for t in range(12)] for start, end in spans])
    advantages, returns = losses.gae(rewards, values, mask, gamma, lam)
    for row, (start, end) in enumerate(spans):
        r, v = rewards[row, start:end].tolist(), [*values[row, start:end].tolist(), 0.0]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        want = [sum((gamma * lam) ** k * x for k, x in enumerate(delta[t:])) for t in range(len(r))]
        assert advantages[row, start:end].tolist() == pytest.approx(want)
        assert returns[row, start:end].tolist() == pytest.approx([a + b for a, b in zip(want, v)])


def test_gamma_defaults_to_1_and_lam_to_0_95():
    """Of a last reward of 1: A_2 = 1, A_1 = gamma lam. Of a last value of 1, with lam = 0: A_2 = -1, A_1 = gamma."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert losses.gae(torch.tensor([[0.0, 1.0]]), torch.zeros(1, 2), mask)[0].tolist() == [pytest.approx([0.95, 1])]
    assert losses.gae(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]), mask, lam=0)[0].tolist() == [[1, -1]]


def test_gae_passes_no_gradient_and_does_not_change_its_inputs():
    rewards, values, mask = (
        torch.ones(2, 3),
        torch.ones(2, 3, requires_grad=True),
        torch.tensor([[True] * 3] * 2),
    )
    mask[0, 2] = False
    assert not any(x.requires_grad for x in losses.gae(rewards, values, mask))
    assert (rewards == 1).all() and (values == 1).all()


# -- group_advantages ---------------------------------------------------------------------
GROUPS = torch.tensor([1.0, 2.0, 6.0, 5.0, 5.0, 5.0])  # two prompts, three responses each: means 3 and 5


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [-2, -1, 3]),  # times 1 / (std + 1e-4), with std^2 = (4 + 1 + 9) / 2 = 7
        ({"scale": False}, [-2, -1, 3]),
        ({"leave_one_out": True, "scale": False}, [1 - 8 / 2, 2 - 7 / 2, 6 - 3 / 2]),
        ({"leave_one_out": True}, [-3, -1.5, 4.5]),  # times the same
    ],
    ids=["GRPO", "Dr. GRPO", "RLOO", "RLOO, scaled"],
)
def test_group_advantages_by_hand(options, expected):
    unit = 1 if "scale" in options else math.sqrt(7) + 1e-4
    got = losses.group_advantages(GROUPS, 3, **options)
    assert got.tolist() == pytest.approx([x / unit for x in expected] + [0, 0, 0])


@pytest.mark.parametrize(
    "wrong",
    [
        (GROUPS - 4) / GROUPS.std(),  # of the whole rollout
        torch.tensor([-2, -1, 3, 0, 0, 0]) / math.sqrt(14 / 3),  # the standard deviation of a population
        losses.group_advantages(GROUPS.view(3, 2).T.reshape(-1), 3),  # a prompt's responses not side by side
        losses.group_advantages(GROUPS, 2),
    ],
    ids=["rollout", "population", "order", "n"],
)
def test_group_advantages_differ_from_their_wrong_variants(wrong):
    assert (losses.group_advantages(GROUPS, 3) - wrong).abs().max() > 0.1


@pytest.mark.parametrize("n, reward", [(7, 0.1), (7, 12.3), (8, 101.7)])
def test_a_group_of_equal_rewards_teaches_nothing(n, reward):
    assert losses.group_advantages(torch.full((n,), reward), n).tolist() == [0] * n


def test_losses_of_pairs_refuse_log_probabilities_of_tokens():
    x = torch.zeros(2, 5)
    for loss in (lambda: losses.dpo_loss(x, x, x, x, 0.1), lambda: losses.bradley_terry_loss(x, x)):
        with pytest.raises(ValueError, match="one number per response"):
            loss()


def test_group_advantages_pass_no_gradient_and_need_whole_groups_of_two_or_more():
    assert not losses.group_advantages(GROUPS.clone().requires_grad_(), 2).requires_grad
    for rewards, n in ((GROUPS, 4), (GROUPS, 1), (GROUPS.view(2, 3), 3)):
        with pytest.raises(ValueError, match="group_advantages"):
            losses.group_advantages(rewards, n)


# -- importance_weights -------------------------------------------------------------------
def of_importance(cap, outside=0.0):
    """pi_old = 0.2, 0.4, 0.9 and q = 0.4, 0.4, 0.3, a token outside the mask before and after them."""
    old = torch.tensor([[outside, math.log(0.2), math.log(0.4), math.log(0.9), outside]])
    drawn = torch.tensor([[-outside, math.log(0.4), math.log(0.4), math.log(0.3), outside]])
    mask = torch.tensor([[False, True, True, True, False]])
    return losses.importance_weights(old, drawn, mask, cap)[0].tolist()


@pytest.mark.parametrize("outside", [0.0, 7.0, NAN])
def test_importance_weights_by_hand_with_any_values_outside_the_mask(outside):
    assert of_importance(2.0, outside) == pytest.approx([1, 0.5, 1, 2, 1])  # 0.9 / 0.3 = 3, capped
    assert of_importance(100.0, outside) == pytest.approx([1, 0.5, 1, 3, 1])


@pytest.mark.parametrize(
    "wrong", [[1, 2, 1, 1 / 3, 1], [1, 1, 1, 2, 1], [1, 0.5, 1, 3, 1]], ids=["q / pi", "cap below", "no cap"]
)
def test_importance_weights_differ_from_their_wrong_variants(wrong):
    assert max(abs(a - b) for a, b in zip(of_importance(2.0), wrong)) > 0.1


def test_importance_weights_make_the_mean_over_q_one_over_pi_and_pass_no_gradient():
    """Three tokens: sum_y q(y) w(y) f(y) = sum_y pi(y) f(y) if no weight is capped."""
    pi, q, f = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [1.0, -2.0, 5.0]])
    every = torch.ones(1, 3, dtype=torch.bool)
    weights = losses.importance_weights(pi.log()[None], q.log()[None].requires_grad_(), every, 10.0)
    assert (q * weights[0] * f).sum().item() == pytest.approx((pi * f).sum().item())
    assert (q * f).sum() != pytest.approx((pi * f).sum()) and not weights.requires_grad


# -- ppo_policy_loss ---------------------------------------------------------------------
# Six tokens at a clip of 0.2: ratio, advantage -> the smaller of ratio A and clip(ratio, 0.8, 1.2) A
RATIOS = [1.1, 1.5, 0.5, 0.9, 0.5, 1.5]
ADVANTAGES = [1.0, 2.0, 3.0, -1.0, -2.0, -3.0]
#   1.1 (1) = 1.1   1.2 (2) = 2.4 clipped   0.5 (3) = 1.5   0.9 (-1) = -0.9   0.8 (-2) = -1.6 clipped
#   1.5 (-3) = -4.5: the sum is -2, the loss 2 / 6


def of_ppo(old=-1.0, outside=None, **options):
    """(loss, metrics, gradient) of the six tokens in two rows, with `outside` before and after each."""
    pad = [] if outside is None else [outside] * 2
    shape = lambda x: torch.tensor([[*x[:3], *pad], [*x[3:], *pad]])
    logprobs = shape([math.log(x) + old for x in RATIOS]).requires_grad_()
    mask = torch.tensor([[True] * 3 + [False] * len(pad)] * 2)
    rest = (shape([old] * 6), shape(ADVANTAGES), mask)
    loss, parts = losses.ppo_policy_loss(logprobs, *rest, **{"clip_ratio": 0.2, **options})
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), parts, gradient


@pytest.mark.parametrize("outside", [None, NAN, math.inf, 1e30])
def test_ppo_policy_loss_and_metrics_by_hand_with_any_values_outside_the_mask(outside):
    loss, parts, gradient = of_ppo(outside=outside)
    assert loss == pytest.approx(1 / 3)
    figures = {key: value.item() for key, value in parts.items()}
    assert figures == {
        "loss_sum": pytest.approx(2.0),
        "n_tokens": 6,
        "n_clipped": 2,  # of four ratios outside, the two whose clipped term is the smaller one
        "ratio_sum": pytest.approx(6.0),
        "ratio_max": pytest.approx(1.5),
        # ratio - 1 - log ratio: 6 - 6 - log(1.1 1.5 0.5 0.9 0.5 1.5)
        "approx_kl_sum": pytest.approx(-math.log(1.1 * 1.5 * 0.5 * 0.9 * 0.5 * 1.5), rel=1e-5),
    }
    assert not any(value.requires_grad for value in parts.values())
    # -ratio A / 6 where it is not clipped, 0 where it is
    want = [-1.1 / 6, 0.0, -1.5 / 6, 0.9 / 6, 0.0, 4.5 / 6]
    assert gradient[:, :3].flatten().tolist() == pytest.approx(want)
    assert (gradient[:, 3:] == 0).all()


@pytest.mark.parametrize(
    "wrong",
    [
        (-0.9 - 1.0 - 3.6 + 1.1 + 3.0 + 2.4) / -6,  # the larger one
        (1.1 + 3.0 + 1.5 - 0.9 - 1.0 - 4.5) / -6,  # no clip
        (1.1 + 2.4 + 2.4 - 0.9 - 1.6 - 3.6) / -6,  # the clipped one always
        -1 / 3,  # the sign
        2.0,  # the sum
    ],
)
def test_ppo_policy_loss_differs_from_its_wrong_variants(wrong):
    assert abs(of_ppo()[0] - wrong) > 0.05


def test_the_first_step_has_ratio_1_no_kl_and_the_policy_gradient():
    x = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss, parts = losses.ppo_policy_loss(x, x.detach(), torch.tensor([[1.0, -2.0, 4.0]]), mask)
    loss.backward()
    assert x.grad[0].tolist() == pytest.approx([-1 / 3, 2 / 3, -4 / 3])
    assert parts["ratio_max"] == 1 and parts["approx_kl_sum"] == 0 and parts["n_clipped"] == 0


def test_the_clip_ratio_sets_where_ratios_are_clipped():
    loss, parts, _ = of_ppo(clip_ratio=0.05)  # 1.05, 2.1 and -1.9 in place of 1.1, 2.4 and -1.6; -0.95 too
    assert loss == pytest.approx(-(1.05 + 2.1 + 1.5 - 0.95 - 1.9 - 4.5) / 6) and parts["n_clipped"] == 4


def test_a_token_far_more_probable_than_before_has_a_finite_gradient():
    """Beyond exp(88.7) the ratio would be infinite, and infinity times the clipped side's 0 no number."""
    x = torch.tensor([[0.0, 0.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-100.0, -100.0, -1.0]])
    loss, parts = losses.ppo_policy_loss(x, old, torch.tensor([[1.0, 0.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == pytest.approx(-(1.2 + 0 + 2) / 3) and parts["n_clipped"] == 1
    assert x.grad[0].tolist() == pytest.approx([0, 0, -2 / 3])
    against, _ = losses.ppo_policy_loss(x, old, torch.tensor([[-1.0, 0.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool))
    assert against == math.inf  # it is not clipped: NotFinite ends such a run


# -- ppo_value_loss ----------------------------------------------------------------------
# Three tokens with an old value of 1, at a clip of 0.5:
#   value 1.2, return 2: 0.64, within the clip; value 2, return 2: 0, but (1.5 - 2)^2 = 0.25 is larger;
#   value 2, return 0: 4, larger than 1.5^2. Half the sum is 2.445, the loss 0.815


def of_value(outside=None, old=1.0, **options):
    pad = [] if outside is None else [outside]
    values = torch.tensor([[1.2, 2.0, 2.0, *pad]], requires_grad=True)
    mask = torch.tensor([[True, True, True, *[False] * len(pad)]])
    rest = (torch.tensor([[old] * 3 + pad]), torch.tensor([[2.0, 2.0, 0.0, *pad]]), mask)
    loss, parts = losses.ppo_value_loss(values, *rest, **{"clip_value": 0.5, **options})
    (gradient,) = torch.autograd.grad(loss, values)
    return loss.item(), parts, gradient


@pytest.mark.parametrize("outside", [None, NAN, 1e30])
def test_ppo_value_loss_and_metrics_by_hand_with_any_values_outside_the_mask(outside):
    loss, parts, gradient = of_value(outside)
    assert loss == pytest.approx(0.815)
    figures = {key: value.item() for key, value in parts.items()}
    assert figures == {"loss_sum": pytest.approx(2.445), "n_tokens": 3, "n_clipped": 1}
    assert not any(value.requires_grad for value in parts.values())
    # (V - R) / 3, and 0 where the clipped error is the larger one
    assert gradient[0, :3].tolist() == pytest.approx([-0.8 / 3, 0.0, 2 / 3])


@pytest.mark.parametrize("outside", [1e30, NAN])
def test_ppo_value_loss_has_no_gradient_outside_the_mask(outside):
    assert (of_value(outside)[2][0, 3:] == 0).all()


@pytest.mark.parametrize(
    "wrong",
    [
        (0.64 + 0.0 + 2.25) / 6,  # the smaller of the two
        (0.64 + 0.25 + 4) / 3,  # no half
        (0.64 + 0.0 + 4) / 6,  # no clip, or one around the returns
        (0.64 + 0.25 + 2.25) / 6,  # the clipped one always
    ],
    ids=["min", "no half", "no clip", "clipped"],
)
def test_ppo_value_loss_differs_from_its_wrong_variants(wrong):
    assert abs(of_value()[0] - wrong) > 0.02


def test_values_are_clipped_around_the_old_ones():
    """Around 3: values of 1.2, 2, 2 become 2.5: errors 0.64, 0.25 and 6.25."""
    assert of_value(old=3.0)[0] == pytest.approx((0.64 + 0.25 + 6.25) / 6)


def test_values_are_clipped_at_0_15_by_default():
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    loss, parts = losses.ppo_value_loss(one, zero, one, one.bool())
    assert loss.item() == pytest.approx(0.85**2 / 2) and parts["n_clipped"] == 1


# -- length_penalty ----------------------------------------------------------------------
def test_length_penalty_subtracts_a_coefficient_per_character():
    """2 - 0.01 * 100, 1 - 0.01 * 0, -1 - 0.01 * 50."""
    scores, characters = torch.tensor([2.0, 1.0, -1.0]), torch.tensor([100, 0, 50])
    got = losses.length_penalty(scores, characters, 0.01)
    torch.testing.assert_close(got, torch.tensor([1.0, 1.0, -1.5]))
    assert torch.equal(losses.length_penalty(scores, characters, 0.0), scores)


# -- dpo_loss ----------------------------------------------------------------------------
# Multiples of log 3: log ratios of 2, -1, -2 and 0, -1, 2, so that with beta = 1/2 h is 1, 0, -2
DPO = {"chosen_logprobs": (-4, -3, -7), "rejected_logprobs": (-5, -3, -7)}
DPO |= {"ref_chosen_logprobs": (-6, -2, -5), "ref_rejected_logprobs": (-5, -2, -9)}


def of_thirds(*multiples):
    """The mean of -log sigmoid(k log 3) = log(1 + 3^-k)."""
    return sum(math.log1p(3.0**-k) for k in multiples) / len(multiples)


def dpo(rows=slice(None), beta=0.5, inputs=None, **options):
    inputs = inputs or {name: thirds(*values) for name, values in DPO.items()}
    return losses.dpo_loss(*(x[rows] for x in inputs.values()), beta, **options)


def test_dpo_by_hand():
    """P is 3/4, 1/2 and 1/10; one correct, one tie, one wrong; implicit rewards 1, -1/2, -1 and 0, -1/2, 1."""
    loss, parts = dpo()
    assert loss.item() == pytest.approx(-(LOG(3 / 4) + LOG(1 / 2) + LOG(1 / 10)) / 3)
    assert parts["loss_sum"].item() == pytest.approx(3 * loss.item())
    assert (parts["n_correct"], parts["n_rows"]) == (1.5, 3)
    assert parts["chosen_reward_sum"].item() == pytest.approx(-0.5 * LOG3)
    assert parts["rejected_reward_sum"].item() == pytest.approx(0.5 * LOG3)
    assert loss.requires_grad and not any(value.requires_grad for value in parts.values())


@pytest.mark.parametrize(
    "wrong, multiples",
    [
        # chosen and rejected exchanged
        (lambda c, r, rc, rr: losses.dpo_loss(r, c, rr, rc, 0.5), (-1, 0, 2)),
        # the two sides of a ratio exchanged
        (lambda c, r, rc, rr: losses.dpo_loss(rc, rr, c, r, 0.5), (-1, 0, 2)),
        # the reference left out
        (lambda c, r, rc, rr: losses.dpo_loss(c, r, 0 * rc, 0 * rr, 0.5), (0.5, 0, 0)),
        # means over responses of 2, 1, 1 and 1, 1, 2 tokens
        (lambda c, r, rc, rr: losses.dpo_loss(c / M, r / N, rc / M, rr / N, 0.5), (0.5, 0, -1.5)),
        # beta on one side alone
        (lambda c, r, rc, rr: losses.dpo_loss(c, r / 0.5, rc, rr / 0.5, 0.5), (1, 0.5, -3)),
        # no beta
        (lambda c, r, rc, rr: losses.dpo_loss(c, r, rc, rr, 1.0), (2, 0, -4)),
    ],
    ids=["sides", "ratio", "no reference", "mean", "one beta", "no beta"],
)
def test_dpo_differs_from_its_wrong_variants(wrong, multiples):
    value = wrong(*(thirds(*values) for values in DPO.values()))[0].item()
    assert value == pytest.approx(of_thirds(*multiples))
    assert abs(value - dpo()[0].item()) > 0.05


M, N = torch.tensor([2.0, 1, 1]), torch.tensor([1.0, 1, 2])


def test_beta_is_inside_the_sigmoid():
    """Outside, 1/2 times the loss of 2, 0, -4, which is 0.5 (log 10/9 + log 2 + log 82) / 3."""
    outside = 0.5 * dpo(beta=1.0)[0].item()
    assert outside == pytest.approx(0.5 * (LOG(10 / 9) + LOG(2) + LOG(82)) / 3)
    assert abs(outside - dpo()[0].item()) > 0.2


@pytest.mark.parametrize("beta", [0.01, 0.1, 5.0])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.3}, {"preference": torch.tensor([0.2, 1.0])}])
def test_the_first_loss_of_dpo_is_log_2_and_every_pair_ties(beta, options):
    chosen, rejected = (torch.randn(2, generator=torch.Generator().manual_seed(i)) * 90 for i in (0, 1))
    loss, parts = losses.dpo_loss(chosen, rejected, chosen, rejected, beta, **options)
    assert loss.item() == pytest.approx(LOG2, abs=1e-6) and parts["n_correct"] == 1
    assert parts["chosen_reward_sum"] == 0 == parts["rejected_reward_sum"]


@pytest.mark.parametrize(
    "preference, smoothing, p, correct",
    [
        (None, 0.0, 1.0, 1.0),
        (1.0, 0.0, 1.0, 1.0),
        (0.0, 0.0, 0.0, 0.0),
        (0.5, 0.0, 0.5, 0.5),  # a label of a tie
        (0.8, 0.0, 0.8, 1.0),
        (0.2, 0.0, 0.2, 0.0),  # the other one is better, and h > 0 is wrong
        (None, 0.1, 0.9, 1.0),
        (0.8, 0.25, 0.65, 1.0),  # 0.75 * 0.8 + 0.25 * 0.2
        (0.0, 0.25, 0.25, 0.0),
    ],
)
def test_labels_of_dpo_by_hand(preference, smoothing, p, correct):
    """A pair of h = log 3, P = 3/4; and, for the other order of the same pair, P = 1/4."""
    label = None if preference is None else torch.tensor([preference], dtype=torch.float64)
    loss, parts = dpo(slice(0, 1), preference=label, label_smoothing=smoothing)
    assert loss.item() == pytest.approx(p * LOG(4 / 3) + (1 - p) * LOG(4))
    assert parts["n_correct"] == correct
    other = {"preference": 1 - label} if label is not None else {"preference": torch.zeros(1).double()}
    names = ("rejected_logprobs", "chosen_logprobs", "ref_rejected_logprobs", "ref_chosen_logprobs")
    turned = {name: thirds(*DPO[name]) for name in names}
    same, parts = dpo(slice(0, 1), inputs=turned, label_smoothing=smoothing, **other)
    assert same.item() == pytest.approx(loss.item()) and parts["n_correct"] == correct


def test_dpo_and_its_gradient_are_those_of_plain_python_in_fp64():
    """dL/dh = sigmoid(h) - p for every pair; beta times that for the chosen side, minus it for the other."""
    generator = torch.Generator().manual_seed(0)
    sides = [(-40 * torch.rand(7, generator=generator)).double() for _ in range(4)]
    label, beta, smoothing, n = torch.rand(7, generator=generator).double(), 0.3, 0.2, 11
    chosen, rejected, *references = (x.clone().requires_grad_() for x in sides)
    loss, parts = losses.dpo_loss(chosen, rejected, *references, beta, smoothing, label, n)
    loss.backward()
    assert [x.grad for x in references] == [None, None]
    total, right, wanted = 0.0, 0, []
    for c, r, rc, rr, q in zip(*(x.tolist() for x in sides), label.tolist()):
        h, p = beta * ((c - rc) - (r - rr)), 0.8 * q + 0.2 * (1 - q)
        s = 1 / (1 + math.exp(-h))
        total -= p * math.log(s) + (1 - p) * math.log(1 - s)
        right += (h > 0) == (q > 0.5)
        wanted.append(beta * (s - p) / n)
    assert loss.item() == pytest.approx(total / n) and parts["loss_sum"].item() == pytest.approx(total)
    assert parts["n_correct"] == right and 0 < right < 7
    torch.testing.assert_close(chosen.grad, torch.tensor(wanted, dtype=torch.float64))
    torch.testing.assert_close(rejected.grad, -chosen.grad, rtol=0, atol=0)


def test_a_preference_of_dpo_is_a_probability_and_label_smoothing_below_a_half():
    for value in (-0.01, 1.01, NAN):
        with pytest.raises(ValueError, match="from 0 to 1"):
            losses.dpo_loss(*[torch.zeros(2)] * 4, 0.1, preference=torch.tensor([0.5, value]))
    for value in (-0.01, 0.5, 0.9, NAN):
        with pytest.raises(ValueError, match="label_smoothing"):
            losses.dpo_loss(*[torch.zeros(2)] * 4, 0.1, label_smoothing=value)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo_stays_finite_far_out(smoothing):
    """h is 1e4 and -1e4 in fp32, where sigmoid is 1 and 0: the loss is 1e4 (1 - p) and 1e4 p, the gradient
    1 - p and -p."""
    chosen, zero = torch.tensor([1e5, -1e5], requires_grad=True), torch.zeros(2)
    loss, _ = losses.dpo_loss(chosen, zero, zero, zero, 0.1, label_smoothing=smoothing)
    loss.backward()
    assert loss.item() == pytest.approx(1e4 / 2, rel=1e-6)
    expected = torch.tensor([smoothing, smoothing - 1]) * 0.1 / 2
    torch.testing.assert_close(chosen.grad, expected)
    assert torch.log(torch.sigmoid(torch.tensor(-1e4))).isinf()


# -- cpl_loss ----------------------------------------------------------------------------
# Multiples of log 3 behind prompts of one token and of two: with gamma = 1/2 sums of -2, -1 and -3, -4
CPL = [[NAN, -1, -2], [NAN, -1, NAN]], [[NAN, NAN, -1, -2, -4], [NAN, NAN, -2, -4, NAN]]
CHOSEN, REJECTED = (torch.tensor(side, dtype=torch.float64) * LOG3 for side in CPL)
WHERE = ~CHOSEN.isnan(), ~REJECTED.isnan()


@pytest.mark.parametrize(
    "gamma, lam, scale, multiples",
    [
        (0.5, 0.5, lambda mask: 1, (-1, 2)),  # 2 (-2 + 3/2) and 2 (-1 + 4/2)
        (1.0, 0.5, lambda mask: 0.5 ** torch.arange(mask.shape[1]), (-1.25, 0)),  # t from the row's start
        (1.0, 0.5, lambda mask: 1, (1, 4)),  # no gamma
        (0.5, 1.0, lambda mask: 1 if mask is WHERE[1] else 0.5, (4, 7)),  # lam on the chosen side
        (0.5, 1.0, lambda mask: 1, (2, 6)),  # no lam
        (0.5, 0.5, lambda mask: 1 / mask.sum(1, keepdim=True), (-1, 0)),  # means
    ],
)
def test_cpl_by_hand_and_its_wrong_variants(gamma, lam, scale, multiples):
    sides = [(x * scale(mask)).requires_grad_() for x, mask in zip((CHOSEN, REJECTED), WHERE)]
    loss, parts = losses.cpl_loss(*sides, *WHERE, 2.0, gamma=gamma, lam=lam)
    assert loss.item() == pytest.approx(of_thirds(*multiples))
    assert (multiples == (-1, 2)) == (abs(loss.item() - of_thirds(-1, 2)) < 0.05)
    if multiples == (-1, 2):  # P(wrong) is 3/4 and 1/10; S is ranked as labelled, whatever the margin
        loss.backward()
        wants = [[0, -0.75, -0.375], [0, -0.1, 0]], [[0, 0, 0.375, 0.1875, 0.09375], [0, 0, 0.05, 0.025, 0]]
        for side, want in zip(sides, wants):
            torch.testing.assert_close(side.grad, torch.tensor(want).double())
        assert parts["n_correct"] == 2 and parts["rejected_reward_sum"].item() == pytest.approx(-14 * LOG3)


def test_cpl_without_discount_and_bias_is_dpo_without_a_reference():
    sums = [losses.masked_sum(x, mask, 1) for x, mask in zip((CHOSEN, REJECTED), WHERE)]
    want = losses.dpo_loss(*sums, *[torch.zeros(2)] * 2, 0.3, n_rows=5)
    torch.testing.assert_close(losses.cpl_loss(CHOSEN, REJECTED, *WHERE, 0.3, n_rows=5), want)
    for options in ({"gamma": 0}, {"gamma": 1.1}, {"lam": 0}, {"lam": NAN}):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            losses.cpl_loss(CHOSEN, REJECTED, *WHERE, 0.3, **options)


# -- what they share ---------------------------------------------------------------------
TOKENS = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
ACTED = TOKENS[0] > -0.3  # rows of different lengths
PAIRS, LABELS = 3 * TOKENS[0, :, :4], torch.tensor([1.0, 0.25, 0.5, 0.8], dtype=torch.float64)


def dpo_of(chosen, rejected, ref_chosen, ref_rejected, preference, **count):
    return losses.dpo_loss(chosen, rejected, ref_chosen, ref_rejected, 0.5, 0.1, preference, **count)


def cpl_of(*inputs, **count):
    return losses.cpl_loss(*inputs, 0.5, **count)


# A loss, inputs of four rows, and the count that makes micro-batches add up
LOSSES = [
    (losses.sft_loss, [TOKENS[0], ACTED], "n_tokens"),
    (losses.ppo_policy_loss, [*TOKENS, ACTED], "n_tokens"),
    (losses.ppo_value_loss, [*TOKENS, ACTED], "n_tokens"),
    (losses.bradley_terry_loss, [*PAIRS[:2], PAIRS[2].abs(), LABELS], "n_rows"),
    (losses.advantage_model_loss, [*PAIRS[:2], PAIRS[2].abs()], "n_rows"),
    (dpo_of, [*PAIRS, LABELS], "n_rows"),
    (cpl_of, [*TOKENS[:2], ACTED, ACTED.roll(1, 0)], "n_rows"),
]
of_losses = pytest.mark.parametrize("loss, inputs, count", LOSSES, ids=[x[0].__name__ for x in LOSSES])


def summed(loss, inputs, cuts, **count):
    """The sums of losses and metrics over micro-batches of these rows, and the gradients."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    found = [loss(*(x[rows] for x in leaves), **count) for rows in cuts]
    total = sum(value for value, _ in found)
    total.backward()
    parts = {key: sum(p[key] for _, p in found) for key in found[0][1] if key != "ratio_max"}
    return total.detach(), parts, [x.grad for x in leaves]


@of_losses
def test_micro_batches_with_the_steps_count_add_up_to_the_big_batch(loss, inputs, count):
    cuts = slice(0, 3), slice(3, 4)
    whole, parts, gradients = summed(loss, inputs, [slice(0, 4)])
    n = inputs[-1].sum() if count == "n_tokens" else 4
    torch.testing.assert_close(summed(loss, inputs, cuts, **{count: n}), (whole, parts, gradients))
    means, _, others = summed(loss, inputs, cuts)
    assert abs(means / 2 - whole) > 0.01 and (others[0] / 2 - gradients[0]).abs().max() > 0.01


@of_losses
def test_nothing_to_learn_is_an_error_unless_other_micro_batches_have_some(loss, inputs, count):
    of_tokens = count == "n_tokens"
    no_rows = [x[:0] for x in inputs]
    for nothing in [no_rows, [*inputs[:-1], ACTED & False]] if of_tokens else [no_rows]:
        with pytest.raises(ValueError, match="no token" if of_tokens else "no pair"):
            loss(*nothing)
        value, parts, gradients = summed(loss, nothing, [slice(4)], **{count: 4})
        assert value == 0 and not any(parts.values())
        assert not gradients[0].any()  # a rank without tokens still takes part


@pytest.mark.parametrize("loss", [losses.ppo_policy_loss, losses.ppo_value_loss])
def test_ppo_losses_pass_gradients_only_to_their_first_input(loss):
    first, *others = summed(loss, [*TOKENS, ACTED], [slice(4)])[2]
    assert first.any() and others == [None] * 3


SAME_SHAPE = [
    (losses.masked_sum, [TOKENS[0], ACTED]),
    (losses.masked_mean, [TOKENS[0], ACTED]),
    (losses.whiten, [TOKENS[0], ACTED]),
    (losses.kl_estimate, TOKENS[:2]),
    (losses.gae, [*TOKENS[:2], ACTED]),
    (losses.ranking_loss, [LABELS, RANKS]),
    (losses.advantage_score, PAIRS[:2]),
    (losses.safety_gated_score, [*PAIRS[:2], LABELS > 0.5]),
    (lambda *inputs: losses.length_penalty(*inputs, 0.1), PAIRS[:2]),
    *[(loss, inputs) for loss, inputs, _ in LOSSES if loss is not losses.advantage_model_loss],
    (losses.advantage_model_loss, PAIRS[:2]),  # whose bound may be a number
    (losses.advantage_model_loss, [*PAIRS[:2], LABELS]),
    (lambda scores, margin: losses.ranking_loss(scores, RANKS, margin), [LABELS, LABELS - LABELS[:, None]]),
]


@pytest.mark.parametrize("function, inputs", SAME_SHAPE)
def test_unequal_shapes_are_refused_although_most_of_them_would_broadcast(function, inputs):
    function(*inputs)
    for i, x in enumerate(inputs):
        for wrong in (x[:1], x[..., :1], x[0], x[..., None], torch.cat([x, x], -1)):
            with pytest.raises(ValueError, match="shapes differ"):
                function(*inputs[:i], wrong, *inputs[i + 1 :])
