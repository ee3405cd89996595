"""Owns the numbers of what the judge tells apart: what one shard has of one model, until that is released."""

from __future__ import annotations

from simulation.truth import ShardTruth


class Places:
    """A model that takes the name of one that was released is another one."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        #: What has happened at each place.
        self.truth: list[ShardTruth] = []
        #: By name and number of releases before: the place on shard 0. Those of the other shards follow it.
        self._first: dict[tuple[str, int], int] = {}
        #: The first place of the job.
        self._begin = 0
        #: By name: the last epoch of each that was released.
        self._released: dict[str, set[int]] = {}

    def number(self, shard: int, model: str, epoch: int) -> int:
        """The place of what ``shard`` has of the model that has this name in ``epoch``."""
        key = model, self.generation(model, epoch)
        if key not in self._first:
            self._first[key] = len(self.truth)
            self.truth += [ShardTruth(len(self.truth) + each) for each in range(self.shards)]
        return self._first[key] + shard

    def begin_job(self) -> None:
        """Another job begins: its models are others, whatever their names."""
        self._begin = len(self.truth)
        self._first.clear()
        self._released.clear()

    def generation(self, model: str, epoch: int) -> int:
        """How many models of this name were released before ``epoch``."""
        released = self._released.get(model)
        return sum(each < epoch for each in released) if released else 0

    def release(self, model: str, epoch: int) -> None:
        """The model that has this name until ``epoch`` is released."""
        self._released.setdefault(model, set()).add(epoch)

    def is_released(self, number: int) -> bool:
        """Whether the model at this place is."""
        first = number - number % self.shards
        (name, generation) = next(key for key, each in self._first.items() if each == first)
        return generation < len(self._released.get(name, ()))

    def of_shard(self, shard: int) -> list[ShardTruth]:
        """All places of one shard in this job."""
        return self.truth[self._begin + shard :: self.shards]
