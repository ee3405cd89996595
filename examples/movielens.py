"""Predict the ratings of MovieLens from its files: users and movies have rows, and so has each genre of a movie.

ps-run --shards 1 --workers 2 --mode async examples/movielens.py ml-25m

The folder has ratings.csv and movies.csv, as ml-latest-small and ml-25m of https://grouplens.org/datasets/movielens/.
One rating of ten is held out, chosen by its time. Ends with the error on these beside that of the mean rating.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import ps_worker
from ps_worker import files, rows


class Genres:
    """The genres of each movie, as ids."""

    def __init__(self, path: Path) -> None:
        columns = {"movie": files.ids("movieId"), "genres": files.hashed("genres", split="|", fill=0)}
        self._of: dict[int, Tensor] = {}
        # A title may have a comma, and is in quotes then.
        for batch in files.read(path, columns, batch_size=4096, shuffle=False):
            genres = torch.tensor_split(batch["genres"].values, batch["genres"].offsets[1:])
            self._of.update(zip(batch["movie"].tolist(), genres, strict=True))
        self._none = torch.zeros(0, dtype=torch.int64)

    def of(self, movies: Tensor) -> files.Ragged:
        """The genres of each of ``movies``, [n]; none of a movie that is not in the file."""
        found = [self._of.get(movie, self._none) for movie in movies.tolist()]
        lengths = torch.tensor([len(each) for each in found])
        return files.Ragged(torch.cat(found), lengths.cumsum(0) - lengths)


class Ratings(nn.Module):
    """A bias and a vector of user and movie, the movie's with the mean of its genres' (Koren et al., 2009)."""

    def __init__(self, cluster: ps_worker.Cluster, dim: int, lr: float, genres: Genres) -> None:
        super().__init__()
        of = {"optimizer": rows.Adagrad(lr=lr), "init": rows.Normal(std=0.05)}
        self.users = cluster.embedding(dim + 1, name="users", **of)
        self.movies = cluster.embedding(dim + 1, name="movies", **of)
        self.genres = cluster.embedding_bag(dim + 1, name="genres", mode="mean", **of)
        self.mean = nn.Parameter(torch.tensor(3.5))
        self._genres = genres

    def forward(self, users: Tensor, movies: Tensor) -> Tensor:
        """The rating that each of ``users`` gives to the movie beside it, [n]."""
        user = self.users(users)
        movie = self.movies(movies) + self.genres(*self._genres.of(movies))
        return self.mean + user[:, 0] + movie[:, 0] + (user[:, 1:] * movie[:, 1:]).sum(1)


def train(cluster: ps_worker.Cluster, args: argparse.Namespace) -> int:
    """What every worker runs; rank 0 measures at the end. Returns the exit code."""
    torch.manual_seed(0)
    model = Ratings(cluster, args.dim, args.row_lr, Genres(args.folder / "movies.csv")).to(cluster.device)
    optimizer = cluster.optimizer(torch.optim.SGD, model, lr=args.lr)
    columns = {
        "user": files.ids("userId"),
        "movie": files.ids("movieId"),
        "rating": files.floats("rating"),
        "time": files.ids("timestamp"),
    }
    ratings = cluster.files(args.folder / "ratings.csv", columns, batch_size=args.batch, name="ratings")
    for _ in range(args.epochs):
        for batch in ratings:
            kept = batch["time"] % 10 != 0
            loss = (model(batch["user"][kept], batch["movie"][kept]) - batch["rating"][kept]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            cluster.report(loss=loss)
    cluster.barrier()
    return measure(model, files.read(ratings.files, columns, batch_size=4096), args) if cluster.rank == 0 else 0


@torch.no_grad()
def measure(model: Ratings, ratings: files.FileBatches, args: argparse.Namespace) -> int:
    """Print the errors on the ratings that were held out. Returns the exit code."""
    model.eval()
    found, given = [], []
    for batch in ratings:
        held = batch["time"] % 10 == 0
        found.append(model(batch["user"][held], batch["movie"][held]))
        given.append(batch["rating"][held])
    wanted = torch.cat(given)
    error = (torch.cat(found) - wanted).square().mean().sqrt().item()
    print(f"error of the mean rating {wanted.std(correction=0).item():.4f}")
    print(f"root mean squared error {error:.4f} (expected at most {args.expect_error:.4f})")
    return int(not error <= args.expect_error)


def main() -> int:
    """Read the flags and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with ratings.csv and movies.csv")
    parser.add_argument("--epochs", type=int, default=4, help="default 4")
    parser.add_argument("--batch", type=int, default=256, help="ratings per worker and step; default 256")
    parser.add_argument("--dim", type=int, default=16, help="numbers of a vector; default 16")
    parser.add_argument("--lr", type=float, default=0.05, help="of the mean, by SGD; default 0.05")
    parser.add_argument("--row-lr", type=float, default=0.1, help="of the rows, by Adagrad; default 0.1")
    parser.add_argument("--expect-error", type=float, default=1.0, help="exit with 1 above this error; default 1.0")
    args = parser.parse_args()
    with ps_worker.connect() as cluster:
        return train(cluster, args)


if __name__ == "__main__":
    sys.exit(main())
