"""Noise: pure functions of their key, independent between keys, and of the stated laws. All seeded."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import scipy.stats
import torch

from specdec.kernels import noise as kernels
from specdec.sampling import drawing, noise
from specdec.sampling.noise import Purpose, exponentials, philox_key, uniform
from specdec.sampling.verification import race
from tests.laws import MIN_P_VALUE

PURPOSES = list(Purpose)
SEEDS = (0, 1, 2**32, 2**63 - 1, 2**64 - 1)
POSITIONS = (0, 1, 255, 256, 2**31, 2**40)
LARGEST = 24 * math.log(2)


def exponential_rows(keys, purpose, vocab_size) -> np.ndarray:
    return drawing.exponential_rows(keys, purpose, vocab_size).numpy()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_key_always_gives_the_same_bits(seed, position):
    for purpose in PURPOSES:
        first = exponentials(seed, position, purpose, 33)
        uniform(seed + 1 if seed < 2**64 - 1 else 0, position, purpose)  # draws of others in between
        assert np.array_equal(first, exponentials(seed, position, purpose, 33))
        assert uniform(seed, position, purpose) == uniform(seed, position, purpose)


def test_every_seed_position_and_purpose_has_noise_of_its_own():
    keys = list(itertools.product(SEEDS, POSITIONS, PURPOSES))
    rows = {exponentials(*key, 16).tobytes() for key in keys}
    draws = {uniform(*key) for key in keys}
    assert len(rows) == len(draws) == len(keys)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 64, 101, 1000])
def test_a_smaller_vocabulary_sees_the_beginning_of_the_same_noise(vocab_size):
    """A draft whose embedding is padded otherwise must still see the target's noise."""
    whole = exponentials(7, 11, Purpose.TARGET, 1001)
    part = exponentials(7, 11, Purpose.TARGET, vocab_size)
    assert part.shape == (vocab_size,)
    assert np.array_equal(part, whole[:vocab_size])


def test_rows_are_the_noise_of_their_keys():
    keys = [(3, 5), (2**64 - 1, 0), (3, 6)]
    rows = exponential_rows(keys, Purpose.DRAFT, 10)
    assert rows.dtype == np.float32
    for row, (seed, position) in zip(rows, keys, strict=True):
        np.testing.assert_allclose(row, exponentials(seed, position, Purpose.DRAFT, 10), rtol=3e-7)


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 1023, 1024, 1025, 5000])
def test_compiled_noise_is_what_the_definition_says(vocab_size):
    keys = list(itertools.product(SEEDS, POSITIONS))
    for purpose in PURPOSES:
        rows = exponential_rows(keys, purpose, vocab_size)
        expected = np.stack([exponentials(*key, purpose, vocab_size) for key in keys])
        np.testing.assert_allclose(rows, expected, rtol=3e-7)


@pytest.mark.parametrize("bits", [0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 2**9, 2**32 - 2, 2**32 - 1])
def test_compiled_noise_is_right_for_extreme_bits(bits):
    u = min((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)
    rounded = float(np.float32(np.float32(bits) + np.float32(0.5)) * np.float32(2.0**-32))
    expected = -math.log1p(-min(rounded, 1 - 2.0**-24))
    assert float(kernels._exponential(np.uint32(bits))) == pytest.approx(expected, rel=3e-7)
    assert expected == pytest.approx(-math.log1p(-u), rel=1e-6) or bits > 2**24


@pytest.mark.parametrize("vocab_size", [1, 5, 1024, 3000])
def test_compiled_draw_is_the_race_with_that_noise(vocab_size):
    keys = [(seed, position) for seed in range(20) for position in (0, 9)]
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(len(keys), vocab_size, generator=generator).pow(4)
    weights[:, 1::3] = 0.0
    noise_rows = drawing.exponential_rows(keys, Purpose.TARGET, vocab_size)
    assert torch.equal(drawing.draw(weights, keys, Purpose.TARGET), race(weights, noise_rows))


def test_draw_among_some_tokens_sees_the_noise_of_their_ids():
    keys = [(4, 1), (4, 2), (5, 1)]
    ids = torch.tensor([[7, 3000, 12], [0, 1, 2], [999, 8, 16]])
    weights = torch.tensor([[0.2, 0.5, 0.3], [0.0, 0.0, 1.0], [1.0, 2.0, 3.0]])
    whole = torch.zeros(3, 4000).scatter(1, ids, weights)
    drawn = drawing.draw_among(ids, weights, keys, Purpose.DRAFT, vocab_size=4000)
    assert torch.equal(drawn, drawing.draw(whole, keys, Purpose.DRAFT))


def test_no_keys_give_no_rows():
    assert exponential_rows([], Purpose.DRAFT, 10).shape == (0, 10)


@pytest.fixture(scope="module")
def many() -> np.ndarray:
    """A million exponentials: 2,000 keys of neighbouring seeds and positions."""
    return exponential_rows(
        [(seed, position) for seed in range(40) for position in range(50)], Purpose.TARGET, 500
    )


def test_exponentials_are_positive_and_finite(many):
    assert many.dtype == np.float32
    assert np.isfinite(many).all()
    assert many.min() > 0.0
    assert many.max() <= LARGEST * (1 + 1e-6)


class EndlessWords:
    """A generator that always gives the same 64 bits."""

    def __init__(self, word: int) -> None:
        self._word = word

    def random_raw(self, size=None):
        return self._word if size is None else np.full(size, self._word, dtype=np.uint64)


@pytest.mark.parametrize(
    ("word", "expected"), [(0, 2.0**-33), (2**64 - 1, LARGEST), (2**63 | 2**31, math.log(2))]
)
def test_extreme_bits_give_positive_and_finite_noise(monkeypatch, word, expected):
    """They come once in billions of draws; a 0 would win every race, and 0 * inf is no number."""
    monkeypatch.setattr(noise, "_philox", lambda *key: EndlessWords(word))
    row = exponentials(0, 0, Purpose.TARGET, 5)
    assert row.tolist() == pytest.approx([expected] * 5, rel=1e-6)
    assert 0.0 <= uniform(0, 0, Purpose.ACCEPT) < 1.0


def test_exponentials_have_the_standard_exponential_law(many):
    flat = many.ravel().astype(np.float64)
    assert flat.mean() == pytest.approx(1.0, abs=5 / math.sqrt(flat.size))
    assert flat.var() == pytest.approx(1.0, abs=5 * math.sqrt(8 / flat.size))
    p_value = scipy.stats.kstest(flat, "expon").pvalue
    print(f"Kolmogorov-Smirnov of {flat.size} exponentials: p = {p_value:.3g}")
    assert p_value > MIN_P_VALUE


def test_the_smallest_of_a_row_is_exponential_too(many):
    """Races are won near 0: the noise must be right there, and not only in the bulk."""
    smallest = many.min(axis=1).astype(np.float64) * many.shape[1]
    p_value = scipy.stats.kstest(smallest, "expon").pvalue
    print(f"Kolmogorov-Smirnov of {smallest.size} minima: p = {p_value:.3g}")
    assert p_value > MIN_P_VALUE


@pytest.mark.parametrize("purpose", PURPOSES)
def test_uniforms_are_uniform_on_the_half_open_unit_interval(purpose):
    draws = np.array([uniform(seed, position, purpose) for seed in range(100) for position in range(50)])
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    p_value = scipy.stats.kstest(draws, "uniform").pvalue
    print(f"Kolmogorov-Smirnov of {draws.size} uniforms, {purpose.name}: p = {p_value:.3g}")
    assert p_value > MIN_P_VALUE


def assert_uncorrelated(left: np.ndarray, right: np.ndarray) -> None:
    """Five standard errors, for the values and for their ranks' extremes (which decide races)."""
    for transform in (lambda values: values, np.log):
        correlation = np.corrcoef(transform(left).ravel(), transform(right).ravel())[0, 1]
        assert abs(correlation) < 5 / math.sqrt(left.size)


KEYS = [(seed, position) for seed in range(40) for position in range(10)]


@pytest.mark.parametrize(("left", "right"), list(itertools.combinations(PURPOSES, 2)))
def test_purposes_are_uncorrelated(left, right):
    assert_uncorrelated(exponential_rows(KEYS, left, 250), exponential_rows(KEYS, right, 250))


@pytest.mark.parametrize(("seed_step", "position_step"), [(0, 1), (1, 0), (1, 1), (2**63, 0), (0, 256)])
def test_neighbouring_seeds_and_positions_are_uncorrelated(seed_step, position_step):
    shifted = [(seed + seed_step, position + position_step) for seed, position in KEYS]
    here = exponential_rows(KEYS, Purpose.TARGET, 250)
    assert_uncorrelated(here, exponential_rows(shifted, Purpose.TARGET, 250))


def test_neighbouring_token_ids_are_uncorrelated(many):
    assert_uncorrelated(many[:, :-1], many[:, 1:])


def test_the_accepting_draw_is_uncorrelated_with_the_draws_of_tokens():
    """The same position decides acceptance and the recovered token; a link would bias the law."""
    accepting = np.array([uniform(seed, position, Purpose.ACCEPT) for seed, position in KEYS])
    for purpose in (Purpose.DRAFT, Purpose.TARGET):
        rows = exponential_rows(KEYS, purpose, 50)
        for token in range(rows.shape[1]):
            correlation = np.corrcoef(accepting, rows[:, token])[0, 1]
            assert abs(correlation) < 5 / math.sqrt(len(KEYS))


def test_a_uniform_is_the_generators_first_word_whatever_was_drawn_before() -> None:
    rng = random.Random(0)
    for _ in range(200):
        seed, position, purpose = rng.randrange(2**64), rng.randrange(2**40), rng.choice(list(Purpose))
        key = np.array(philox_key(seed, position, purpose), dtype=np.uint64)
        word = int(np.random.Philox(key=key).random_raw())
        assert uniform(seed, position, purpose) == (word >> 11) * 2.0**-53
