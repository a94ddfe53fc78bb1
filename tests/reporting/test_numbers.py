import pytest

from comlrl_stages.reporting import numbers
from comlrl_stages.reporting.statistics import Estimate

NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.8271, "0.83"),
        (0.01234, "0.012"),
        (12.345, "12.3"),
        (1234.5, "1,234"),
        (0.0, "0.00"),
        (-0.5, "−0.50"),
        (NAN, "–"),
    ],
)
def test_numbers_have_about_three_digits(value, text):
    assert numbers.number(value) == text


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Estimate(0.8271, 0.801, 0.862), "0.83 [0.80, 0.86]"),
        (Estimate(0.8271, 0.8269, 0.8274), "0.8271 [0.8269, 0.8274]"),
        (Estimate(0.5, NAN, NAN), "0.50"),
        (Estimate(NAN, NAN, NAN), "–"),
        (Estimate(1.0, 1.0, 1.0), "1.00 [1.00, 1.00]"),
    ],
)
def test_the_width_of_an_interval_decides_its_digits(found, text):
    assert numbers.estimate(found) == text


def test_an_interval_that_excludes_zero_is_not_written_as_if_it_touched_it():
    assert numbers.estimate(Estimate(0.033, 0.0046, 0.064), signed=True) == "+0.033 [+0.005, +0.064]"


def test_differences_carry_their_sign():
    assert numbers.estimate(Estimate(-0.2, -0.3, 0.1), signed=True) == "−0.20 [−0.30, +0.10]"


def test_a_column_has_equally_many_decimals():
    assert numbers.alike([0.087, 0.11, NAN], signed=True) == ["+0.09", "+0.11", "–"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.21, "3.2 s"), (42, "42 s"), (192, "3 min 12 s"), (7380, "2 h 03 min")]
)
def test_durations_have_two_units(seconds, text):
    assert numbers.duration(seconds) == text
