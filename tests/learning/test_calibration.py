"""Accuracy, ties, Brier score and calibration error of margins."""

import numpy as np
import pytest

from comlrl_stages.learning import calibration


def test_accuracy_counts_ties_as_wrong_and_shows_them_apart():
    margins = [0.3, -0.1, 0.0, 2.0]
    assert calibration.accuracy(margins) == 0.5
    assert calibration.tie_share(margins) == 0.25


def test_a_constant_model_has_accuracy_zero_and_ties_one():
    assert calibration.accuracy(np.zeros(9)) == 0.0
    assert calibration.tie_share(np.zeros(9)) == 1.0
    assert calibration.expected_calibration_error(np.zeros(9)) == 0.0


def test_brier_worked_out_by_hand():
    assert calibration.brier([0.75, 0.0]) == pytest.approx(0.1764632, abs=1e-7)


def test_calibration_error_worked_out_by_hand():
    margins = [1.0, 1.0, 1.0, -1.0]  # confidence 0.7310586 each, three of four right
    assert calibration.expected_calibration_error(margins) == pytest.approx(0.0189414, abs=1e-7)
    (only,) = calibration.reliability(margins)
    assert (only.pairs, only.accuracy) == (4, 0.75)


def test_margins_of_a_calibrated_model_have_a_small_error():
    rng = np.random.default_rng(0)
    margins = np.abs(rng.normal(size=40_000)) * 2
    won = rng.random(40_000) < 1 / (1 + np.exp(-margins))
    assert calibration.expected_calibration_error(np.where(won, margins, -margins)) < 0.01
    assert calibration.expected_calibration_error(5 * np.where(won, margins, -margins)) > 0.1


def test_certain_margins_fall_in_the_last_bin():
    (only,) = calibration.reliability([800.0, 800.0])
    assert (only.confidence, only.accuracy) == (1.0, 1.0)
