"""The example on MovieLens' files: it learns what users like, alone and with two workers."""

import random
from pathlib import Path

import pytest

from tests.cli import forked
from tests.support.length import choose
from tests.worker.data.files.made import text

EXAMPLE = Path(__file__).parents[2] / "examples" / "movielens.py"
GENRES = ["Action", "Comedy", "Drama", "War"]


@pytest.fixture
def folder(tmp_path):
    """Users like one genre each: 4.5 stars for it, 2 for others, with some noise."""
    random_ = random.Random(5)
    of_movie = {1000 + movie: random_.sample(GENRES, random_.randint(1, 2)) for movie in range(120)}
    movies = [f'{movie},"Title, The ({movie})",{"|".join(genres)}' for movie, genres in of_movie.items()]
    text(tmp_path / "movies.csv", ["movieId,title,genres", *movies])
    ratings = []
    for number in range(9000):
        user, movie = random_.randrange(150), random_.choice(list(of_movie))
        stars = (4.5 if GENRES[user % 4] in of_movie[movie] else 2.0) + random_.choice([-0.5, 0, 0.5])
        ratings.append(f"{user},{movie},{stars},{1_200_000_000 + number}")
    text(tmp_path / "ratings.csv", ["userId,movieId,rating,timestamp", *ratings])
    return tmp_path


@pytest.mark.early
def test_two_workers_learn_what_users_like(folder):
    job = ("--no-progress", "--seed", "1", "--workers", "2", "--mode", "async")
    few = ("--epochs", choose("4", "2"), "--batch", "32", "--expect-error", "0.8")
    done = forked.run(folder, *job, str(EXAMPLE), str(folder), *few)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(expected at most 0.8000)" in done.stdout


def test_ratings_that_are_no_numbers_are_named(folder):
    with (folder / "ratings.csv").open("a") as file:
        file.write("1,1000,five,1200000000\n")
    done = forked.run(folder, "--no-progress", "--workers", "1", str(EXAMPLE), str(folder))
    assert done.returncode != 0
    assert "column 'rating'" in done.stdout
