import numpy as np
import pytest

from comlrl_stages.reporting import statistics
from comlrl_stages.reporting.statistics import Estimate
from comlrl_stages.seeding import stream

NAN = float("nan")


def test_mean_leaves_missing_scores_out():
    assert statistics.mean(np.array([1.0, NAN, 3.0])) == 2.0
    assert np.isnan(statistics.mean(np.array([NAN, NAN])))


def test_iqm_is_the_mean_of_the_middle_half():
    assert statistics.iqm(np.arange(8.0)) == 3.5
    assert statistics.iqm(np.array([0.0, 1.0, 2.0, 300.0])) == 1.5
    assert statistics.iqm(np.array([5.0, 7.0])) == 6.0  # too few to cut anything


def test_iqm_cuts_by_the_number_of_known_scores():
    rows = np.array([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [9.0, NAN, 0.0, NAN, 1.0, NAN, 2.0, NAN]])
    assert statistics.iqm(rows).tolist() == [3.5, 1.5]


def test_optimality_gap_gives_no_credit_above_gamma():
    assert statistics.optimality_gap(np.array([0.5, 1.5])) == pytest.approx(0.25)
    assert statistics.optimality_gap(np.array([0.5, NAN]), gamma=2.0) == pytest.approx(1.5)


def test_probability_of_improvement_counts_pairs_and_half_of_the_ties():
    x, y = np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 4.0])
    assert statistics.probability_of_improvement(x, y) == pytest.approx(1 / 3)
    assert statistics.probability_of_improvement(x, x) == 0.5
    assert statistics.probability_of_improvement(np.array([1.0, NAN]), np.array([0.0])) == 1.0


@pytest.mark.parametrize(
    ("samples", "correct", "k", "expected"), [(5, 0, 1, 0.0), (5, 2, 1, 0.4), (5, 2, 4, 1.0), (10, 3, 2, 8 / 15)]
)
def test_pass_at_k_is_unbiased(samples, correct, k, expected):
    assert statistics.pass_at_k(samples, correct, k) == pytest.approx(expected)


def test_pass_at_k_refuses_more_draws_than_samples():
    with pytest.raises(ValueError, match="k=6"):
        statistics.pass_at_k(5, 2, 6)


def test_rank_correlation_shares_the_ranks_of_ties():
    assert statistics.rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 15.0])) == pytest.approx(0.5)
    assert statistics.rank_correlation(np.array([1.0, 1.0, 2.0]), np.array([3.0, 3.0, 9.0])) == pytest.approx(1.0)
    assert np.isnan(statistics.rank_correlation(np.array([1.0, 1.0]), np.array([3.0, 4.0])))


def test_the_same_stream_gives_the_same_interval_and_another_name_another_one():
    scores = stream(0, "scores").normal(size=(4, 6))
    first, again, other = (statistics.seed_item_bootstrap(scores, stream(0, name)) for name in ("a", "a", "b"))
    assert first == again
    assert first != other


def test_equal_scores_have_an_interval_without_width():
    found = statistics.seed_item_bootstrap(np.full((3, 4), 0.5), stream(0, "x"), replicates=50)
    assert found == Estimate(0.5, 0.5, 0.5)


def test_a_single_score_has_no_interval():
    found = statistics.seed_item_bootstrap(np.array([[0.5]]), stream(0, "x"), replicates=50)
    assert found.value == 0.5
    assert np.isnan(found.low) and np.isnan(found.high) and found.covers(0)


def test_one_known_score_among_missing_ones_has_no_interval():
    scores = np.array([[0.5, NAN], [NAN, NAN]])
    for found in (
        statistics.seed_item_bootstrap(scores, stream(0, "x"), replicates=50),
        statistics.item_bootstrap(scores, stream(0, "x"), replicates=50),
        statistics.improvement_bootstrap(scores, np.zeros((1, 2)), stream(0, "x"), replicates=50),
    ):
        assert not np.isnan(found.value) and np.isnan(found.low) and not found.excludes_zero


def test_a_difference_is_established_if_its_interval_excludes_zero():
    assert Estimate(0.2, 0.1, 0.3).excludes_zero and Estimate(-0.2, -0.3, -0.1).excludes_zero
    assert not Estimate(0.2, -0.1, 0.3).excludes_zero and not Estimate(0.2, NAN, NAN).excludes_zero
    assert not Estimate(1e-17, 1e-17, 1e-17).excludes_zero  # 0 but for rounding


def test_samples_stand_in_the_order_of_their_items_names():
    items, scores = statistics.samples_by_item(["b", "a", "b"], [1.0, 2.0, 3.0])
    assert items == ["a", "b"]
    np.testing.assert_array_equal(scores, [[2.0, NAN], [1.0, 3.0]])


def test_the_order_of_items_changes_no_digit_of_a_teams_interval():
    draw = stream(0, "order")
    items, scores = list("abcd") * 5, draw.normal(size=20)
    there = statistics.samples_by_item(items, scores)[1]
    back = statistics.samples_by_item(items[::-1], scores[::-1])[1][:, ::-1]
    first, second = (statistics.team_bootstrap(one, 3, "eval", "sampled", replicates=100) for one in (there, back))
    assert first == second and first != statistics.team_bootstrap(there, 4, "eval", "sampled", replicates=100)


def test_every_token_weighs_alike():
    assert statistics.per_token([1.0, 0.2], [1, 3]) == pytest.approx(0.4)
    assert np.isnan(statistics.per_token([], []))


def test_whole_items_are_drawn():
    """Of two items at 1 and 11, a draw is either of them twice (a quarter of the draws each) or both."""
    found = statistics.item_bootstrap(np.array([[1.0, 1.0], [11.0, 11.0]]), stream(0, "x"), replicates=1000)
    assert found == Estimate(6.0, 1.0, 11.0)


def test_samples_are_drawn_within_an_item():
    """The mean of four draws from a spread of 1 has the standard error 1 / 2."""
    scores = np.array([[0.0, 2.0, 0.0, 2.0]])
    found = statistics.item_bootstrap(scores, stream(0, "x"), replicates=20_000, confidence=0.6)
    assert (found.low, found.high) == (0.5, 1.5)
    wide = statistics.item_bootstrap(np.tile(scores, 25), stream(0, "x"), replicates=20_000, confidence=0.6827)
    assert (wide.high - wide.low) / 2 == pytest.approx(0.1, rel=0.1)


def test_a_failed_sample_is_never_drawn():
    scores = np.array([[NAN, 1.0, NAN, 3.0], [NAN, NAN, NAN, NAN], [2.0, NAN, NAN, NAN]])
    found = statistics.item_bootstrap(scores, stream(0, "x"), replicates=2000)
    assert found.value == 2.0
    assert 1.0 <= found.low <= found.high <= 3.0


def test_pairing_removes_what_method_and_base_share():
    draw = stream(0, "paired")
    base = draw.normal(0, 5, size=(1, 10)) + draw.normal(0, 0.1, size=(5, 10))
    method = base + 1 + draw.normal(0, 0.1, size=(5, 10))
    paired = statistics.paired_difference(method, base, stream(0, "x"), replicates=1000)
    assert paired.low > 0.9 and paired.high < 1.1
    alone = statistics.seed_item_bootstrap(method, stream(0, "x"), replicates=1000)
    assert alone.high - alone.low > 10 * (paired.high - paired.low)


def test_a_cell_missing_in_one_team_is_left_out_of_the_difference():
    method, base = np.array([[1.0, NAN], [1.0, 5.0]]), np.array([[0.0, 0.0], [NAN, 4.0]])
    assert statistics.paired_difference(method, base, stream(0, "x"), replicates=50).value == 1.0


def test_probability_of_improvement_over_seeds_is_the_mean_over_items():
    method, base = np.array([[1.0, 0.0], [3.0, 0.0]]), np.array([[2.0, 1.0], [2.0, 1.0]])
    found = statistics.improvement_bootstrap(method, base, stream(0, "x"), replicates=500)
    assert found.value == 0.25
    assert 0.0 <= found.low <= 0.25 <= found.high <= 1.0


def test_teams_of_different_seed_counts_can_be_compared():
    found = statistics.improvement_bootstrap(np.ones((3, 4)), np.zeros((2, 4)), stream(0, "x"), replicates=50)
    assert found == Estimate(1.0, 1.0, 1.0)


def test_intervals_over_seeds_and_items_cover_the_truth():
    """Both seeds and items have effects of their own; drawing items anew for each seed would cover far too seldom."""
    draw, hits, trials = stream(0, "coverage"), 0, 200
    for trial in range(trials):
        items, seeds = draw.normal(0, 1, size=(1, 15)), draw.normal(0, 0.3, size=(10, 1))
        scores = 0.7 + items + seeds + draw.normal(0, 0.3, size=(10, 15))
        hits += statistics.seed_item_bootstrap(scores, stream(trial, "coverage"), replicates=400).covers(0.7)
    assert 0.88 <= hits / trials <= 0.99


def test_intervals_of_one_team_cover_the_truth():
    draw, hits, trials = stream(0, "one team"), 0, 200
    for trial in range(trials):
        scores = 0.5 + draw.normal(0, 0.2, size=(20, 1)) + draw.normal(0, 0.2, size=(20, 4))
        hits += statistics.item_bootstrap(scores, stream(trial, "one team"), replicates=400).covers(0.5)
    assert 0.88 <= hits / trials <= 0.99


def test_many_cells_are_resampled_in_bounded_memory():
    found = statistics.seed_item_bootstrap(np.tile([0.0, 1.0], (10, 500)), stream(0, "x"), replicates=5000)
    assert found.value == 0.5 and found.high - found.low == pytest.approx(2 * 1.96 * 0.5 / np.sqrt(1000), rel=0.1)


@pytest.mark.parametrize("scores", [np.zeros((0, 4)), np.zeros(4)])
def test_an_array_of_the_wrong_shape_is_refused(scores):
    with pytest.raises(ValueError, match="axes"):
        statistics.seed_item_bootstrap(scores, stream(0, "x"))
