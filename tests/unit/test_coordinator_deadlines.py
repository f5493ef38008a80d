"""How long calls may take: learnt from those that were answered."""

from specdec.coordinator.deadlines import FACTOR, Deadlines


def test_a_size_that_has_not_been_timed_gets_all_there_is():
    deadlines = Deadlines(2.0, 60.0)
    deadlines.on_answer(8, 0.02)
    assert deadlines.of(16) == deadlines.of(7) == 60.0
    assert deadlines.of(15) == deadlines.of(8) == 2.0


def test_the_slowest_call_lately_counts_within_the_bounds():
    deadlines = Deadlines(2.0, 60.0)
    for elapsed_s, expected in ((0.01, 2.0), (0.5, 15.0), (0.02, 0.98 * 15.0), (9.0, 60.0)):
        deadlines.on_answer(4, elapsed_s)
        assert abs(deadlines.of(4) - expected) < 1e-9
    for _ in range(400):
        deadlines.on_answer(4, 0.1)
    assert abs(deadlines.of(4) - FACTOR * 0.1) < 1e-9


def test_a_setting_below_the_least_is_kept():
    deadlines = Deadlines(10.0, 0.05)
    assert deadlines.of(1) == 0.05
    deadlines.on_answer(1, 0.01)
    assert deadlines.of(1) == 0.05
