"""Ages of the records of a log, against the times at which they were written. Costs some milliseconds."""

from __future__ import annotations

import random

from ps_server.shard.durability.storage import RecordAges
from ps_server.shard.times import SAMPLE_SECONDS
from tests.support.seeds import drawn_seed


def test_an_age_is_short_of_the_truth_by_one_sample_at_most_and_never_more_than_it():
    seed = drawn_seed()
    chance, ages = random.Random(seed), RecordAges()
    written, now = [0.0], 0.0
    for _ in range(200):
        for _ in range(chance.randrange(4)):
            written.append(now + chance.random() * SAMPLE_SECONDS)
        written.sort()
        now += SAMPLE_SECONDS
        ages.sample(len(written) - 1, now)
    for number in range(1, len(written)):
        truth = now - written[number]
        assert truth - SAMPLE_SECONDS - 1e-9 <= ages.age_seconds(number, now) <= truth + 1e-9


def test_a_record_after_the_last_sample_has_no_age_yet():
    ages = RecordAges()
    ages.sample(5, 10.0)
    assert (ages.age_seconds(6, 11.0), ages.age_seconds(5, 11.0)) == (0.0, 1.0)


def test_what_is_forgotten_takes_no_memory_and_later_ages_stay():
    ages = RecordAges()
    for number in range(100):
        ages.sample(number, float(number))
    ages.forget(90)
    assert len(ages._numbers) == 10
    assert ages.age_seconds(95, 100.0) == 5.0


def test_days_of_samples_take_little_memory_and_an_age_stays_true_to_a_part_of_itself():
    ages, samples = RecordAges(), 200_000
    for number in range(samples):
        ages.sample(number, number * SAMPLE_SECONDS)
    now = samples * SAMPLE_SECONDS
    assert len(ages._numbers) <= 1024
    for number in (1, 1000, samples // 3, samples // 2, samples - 1000):
        truth = (samples - number) * SAMPLE_SECONDS
        assert 0.95 * truth - SAMPLE_SECONDS <= ages.age_seconds(number, now) <= truth


def test_a_log_that_begins_anew_has_ages_of_its_own():
    ages = RecordAges()
    ages.sample(1000, 1.0)
    ages.sample(3, 5.0)
    assert ages.age_seconds(2, 6.0) == 1.0
