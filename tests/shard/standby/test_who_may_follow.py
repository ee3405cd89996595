"""Who may follow a shard: the standby of the cluster's view alone, and it acknowledges only what it was sent."""

from __future__ import annotations

import queue
from functools import partial

import grpc
import pytest

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.cluster.view import Member, Role
from ps_protocol.errors import Fenced, InvalidRequest, PsError, Unavailable
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.shard.config import Acknowledge
from tests.shard.standby.support import INCARNATION, STANDBY, Primary, follower, primary
from tests.support.shards import StubStream, error_of, flat, gradients, start, wait_until


class Stranger:
    """A client that speaks Follow by hand."""

    def __init__(self, shard: Primary, **fields: object) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method = shard.channel.stream_stream("/ps_protocol.v1.Shard/Follow")
        self.replies = method(iter(self._requests.get, None), timeout=60)
        if not self.replies.add_callback(partial(self._requests.put, None)):
            self._requests.put(None)
        known = {"protocol_version": PROTOCOL_VERSION, "primary": INCARNATION, "incarnation": STANDBY}
        self.send(pb.FollowRequest(start=pb.FollowStart(**(known | fields))).SerializeToString())

    def send(self, data: bytes) -> None:
        self._requests.put(data)

    def error(self) -> PsError:
        with pytest.raises(grpc.RpcError) as refused:
            for _ in self.replies:
                pass
        return error_of(refused.value)


@pytest.mark.parametrize("incarnation", [0, STANDBY + 1, 1 << 63])
def test_a_stranger_gets_no_log_and_takes_no_place(tmp_path, incarnation):
    with primary(tmp_path / "a", Acknowledge.AFTER) as shard, follower(tmp_path / "b") as following:
        model, _ = start(shard)
        following.begin(shard)
        shard.covered()
        error = Stranger(shard, incarnation=incarnation, directory="a stranger's").error()
        assert isinstance(error, Fenced)
        assert error.remedy
        # The standby follows on: pushes wait for it.
        stream = StubStream(shard)
        stream.exchange(flat(model.layout, *gradients(model, 1)))
        assert shard.feed.followed
        assert shard.words[-1].directory != "a stranger's"
        following.reach(shard)
        stream.end()


def test_a_shard_whose_view_has_no_standby_is_followed_by_nobody(tmp_path):
    with primary(tmp_path / "a") as shard:
        shard.others = (Member(Role.STANDBY, 1, STANDBY),)
        shard.set_view({0: 1})
        assert isinstance(Stranger(shard).error(), Fenced)
        shard.others = (Member(Role.STANDBY, 0, STANDBY),)
        shard.set_view({0: 1})
        assert isinstance(Stranger(shard, primary=1).error(), Unavailable)


@pytest.mark.parametrize("acknowledged", [(1,), ((1 << 64) - 2,), ((1 << 64) - 1,), (0, 1 << 40)])
def test_what_was_not_sent_cannot_be_acknowledged(tmp_path, acknowledged):
    with primary(tmp_path / "a", Acknowledge.AFTER) as shard:
        stranger = Stranger(shard)
        assert pb.FollowReply.FromString(next(stranger.replies)).following.number == 0
        for number in acknowledged:
            stranger.send(pb.FollowRequest(acknowledged=number).SerializeToString())
        error = stranger.error()
        assert isinstance(error, InvalidRequest)
        assert error.actual == str(acknowledged[-1])
        wait_until(lambda: not shard.feed.followed)
        assert shard.replication.acknowledged == 0


def test_an_acknowledgement_is_not_taken_back(tmp_path):
    with primary(tmp_path / "a") as shard:
        start(shard)
        stranger = Stranger(shard)
        next(stranger.replies)
        next(stranger.replies)
        stranger.send(pb.FollowRequest(acknowledged=1).SerializeToString())
        wait_until(lambda: shard.replication.acknowledged == 1)
        stranger.send(pb.FollowRequest(acknowledged=0).SerializeToString())
        assert isinstance(stranger.error(), InvalidRequest)


@pytest.mark.parametrize("data", [b"\xff", pb.FollowRequest(start=pb.FollowStart()).SerializeToString(), b""])
def test_anything_but_an_acknowledgement_ends_the_stream_with_one_typed_error(tmp_path, data):
    with primary(tmp_path / "a") as shard:
        stranger = Stranger(shard)
        next(stranger.replies)
        stranger.send(data)
        assert isinstance(stranger.error(), InvalidRequest)
        other = Stranger(shard)
        assert next(other.replies)
        other.replies.cancel()
