"""One zygote for all tests of recovery, and clusters that are gone when their test is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.recovery.cluster import Cluster
from tests.recovery.zygote import shared


@pytest.fixture
def launch(tmp_path) -> Iterator[Callable[..., Cluster]]:
    """``launch(shards, …)``: a running cluster; arguments as ``Cluster``'s."""
    with ExitStack() as exits:

        def launch(shards: int = 1, *, start: bool = True, **options: object) -> Cluster:
            folder = tmp_path / f"cluster-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            cluster = Cluster(shared(), folder, shards, **options)
            exits.callback(cluster.close)
            if start:
                cluster.start()
            return cluster

        yield launch
