"""The random number of a row."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from furnace.contracts.uniform import uniform

INTEGERS = st.integers(-(1 << 70), 1 << 70)


@given(INTEGERS, INTEGERS, INTEGERS)
def test_it_is_in_the_unit_interval_and_depends_on_its_arguments_alone(seed: int, choice: int, position: int) -> None:
    number = uniform(seed, choice, position)
    assert 0.0 <= number < 1.0
    assert number == uniform(seed, choice, position)


def test_it_is_the_same_in_every_release() -> None:
    # Seeds promise the same text tomorrow; these values may never change.
    assert uniform(0, 0, 0) == 0.156742553465558
    assert uniform(1, 2, 3) == 0.7069603535111167
    assert uniform(-1, 0, 0) == uniform((1 << 64) - 1, 0, 0)


def test_neighbouring_seeds_choices_and_positions_are_independent_and_even() -> None:
    numbers = np.array(
        [[uniform(n, 0, 0), uniform(0, n, 0), uniform(0, 0, n)] for n in range(1, 4001)], dtype=np.float64
    )
    assert len(np.unique(numbers)) == numbers.size
    expected = 4000 / 20
    for column in numbers.T:
        counts, _ = np.histogram(column, bins=20, range=(0.0, 1.0))
        # 45 is beyond the 99.9 % point of chi-square with 19 degrees of freedom.
        assert ((counts - expected) ** 2 / expected).sum() < 45
    assert np.abs(np.corrcoef(numbers.T) - np.eye(3)).max() < 0.06
