"""Where a shard writes checkpoints and reads them: below the folders it was told of, for every caller."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from ps_protocol.errors import InvalidRequest
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.checkpoint.directory import CheckpointRoots
from tests.support.shards import TestShard, coordinator_stub, error_of, running_shard, start


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "deeper").mkdir(parents=True)
    (tmp_path / "elsewhere" / "checkpoint-00000001").mkdir(parents=True)
    (tmp_path / "root" / "out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root" / "checkpoint-00000002").symlink_to(tmp_path / "elsewhere" / "checkpoint-00000001")
    return tmp_path / "root"


@pytest.fixture
def shard(root: Path) -> Iterator[TestShard]:
    with running_shard(checkpoints=CheckpointRoots.of([root])) as made:
        start(made)
        yield made


WRONG = (
    "../elsewhere/checkpoint-00000001",
    "deeper/../../elsewhere/checkpoint-00000001",
    "out/checkpoint-00000001",
    "checkpoint-00000002",
    "..",
    ".",
    "",
    "/etc",
    "/",
    "a\0b",
    "deeper/..",
)


def test_a_folder_elsewhere_is_refused_to_every_caller(shard: TestShard, root: Path) -> None:
    stub = coordinator_stub(shard.channel, 100)
    for name in WRONG:
        folder = name if name.startswith("/") or not name else f"{root}/{name}"
        for ask in (
            lambda folder=folder: list(stub.Capture(pb.CaptureRequest(quiesce="cut", folder=folder))),
            lambda folder=folder: stub.Restore(pb.RestoreRequest(folder=folder)),
        ):
            stub.Pause(pb.PauseRequest(quiesce="cut", seconds=60))
            with pytest.raises(grpc.RpcError) as refused:
                ask()
            error = error_of(refused.value)
            assert isinstance(error, InvalidRequest), (folder, error)
            assert "--checkpoint-dir" in error.remedy
            stub.Resume(pb.ResumeRequest(quiesce="cut"))
    assert not any((root.parent / "elsewhere" / "checkpoint-00000001").iterdir())


@pytest.mark.parametrize("name", ["checkpoint-00000001", "deeper/checkpoint-00000001"])
def test_a_folder_below_is_written_and_read(shard: TestShard, root: Path, name: str) -> None:
    stub = coordinator_stub(shard.channel, 100)
    (root / name).mkdir()
    stub.Pause(pb.PauseRequest(quiesce="cut", seconds=60))
    request = pb.CaptureRequest(quiesce="cut", models=[pb.ModelCut(model="model")], folder=f"{root}/{name}")
    cut, written = stub.Capture(request)
    assert [model.model for model in cut.models] == ["model"]
    assert len(written.parts) == 1
    assert any((root / name).iterdir())


def test_a_shard_that_was_told_of_no_folder_says_so() -> None:
    with pytest.raises(InvalidRequest, match="started without --checkpoint-dir"):
        CheckpointRoots().confine("/shared/checkpoint-00000001")


def test_a_directory_behind_a_link_is_the_operators_choice(root: Path) -> None:
    """What leads out of a root is refused; a root that is a link itself was given on the command line."""
    roots = CheckpointRoots.of([root / "out"])
    assert roots.confine(f"{root}/out/checkpoint-00000009").parent == (root / "out").resolve()
