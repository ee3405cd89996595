"""Who may change a shard: a call of a worker that is no member, or of no coordinator of its, changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.errors import Fenced, InvalidRequest, PsError, Unavailable
from ps_protocol.rpc.channel import SHARD_KEY
from ps_protocol.security.roles import METHODS as ACCESS
from ps_protocol.security.roles import Fencing
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.log.entries import MemoryLog
from ps_server.shard.service import SERVICE
from tests.support.shards import TOKEN, TestShard, error_of, refused_as, running_shard, start

METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["Shard"].methods}
FENCING = {method: ACCESS[f"/{SERVICE}/{method}"].fencing for method in METHODS}
NOBODY, FORMER, STRANGER = pb.WorkerId(), pb.WorkerId(rank=0, incarnation=4), pb.WorkerId(rank=7, incarnation=5)
INCARNATION = 100


def messages(method: str, worker: pb.WorkerId) -> list[Any]:
    """What a worker would send to change something."""
    opening = pb.StepRequest(
        open=pb.Open(model="model", worker=worker, protocol_version=PROTOCOL_VERSION, phase=0, clock=0)
    )
    push = pb.StepRequest(push=pb.PushHeader(sequence=1, clock=1, payload=bytes(128)))
    return {
        "Step": [opening, push],
        "Load": [
            pb.LoadRequest(header=pb.LoadHeader(model="model", worker=worker, with_region=True)),
            pb.LoadRequest(chunk=pb.Chunk(payload=bytes(128))),
        ],
        "LoadRows": [pb.LoadRowsRequest(header=pb.LoadRowsHeader(model="model", worker=worker))],
        "Follow": [pb.FollowRequest(start=pb.FollowStart(protocol_version=PROTOCOL_VERSION, primary=INCARNATION))],
        "Pause": [pb.PauseRequest(quiesce="cut", seconds=60)],
        "Capture": [pb.CaptureRequest(quiesce="cut", folder="/nowhere")],
        "CatchUp": [pb.CatchUpRequest(quiesce="cut", seconds=60)],
        "MakeRoom": [pb.MakeRoomRequest()],
        "StageReshard": [pb.StageReshardRequest(quiesce="cut")],
        "Resume": [pb.ResumeRequest(quiesce="cut")],
        "Restore": [pb.RestoreRequest(folder="/nowhere")],
        "Pull": [pb.PullRequest(model="model")],
        "Save": [pb.SaveRequest(model="model")],
        "GetModel": [pb.GetModelRequest(model="model")],
        "GetRows": [pb.GetRowsRequest(model="model")],
        "SaveBuckets": [pb.SaveBucketsRequest(model="model")],
        "Feed": [pb.FeedRequest(model="model")],
        "TakePiece": [pb.TakePieceRequest(quiesce="cut", name="policy", number=1, models=[pb.ModelCut(model="model")])],
        "FinishPiece": [pb.FinishPieceRequest(name="policy", number=1)],
        "KeepPieces": [pb.KeepPiecesRequest(name="policy", newest=1)],
        "GetPiece": [pb.GetPieceRequest(name="policy", number=1)],
        "GetRoundNorm": [pb.RoundNormRequest(model="model")],
    }[method]


def call(shard: TestShard, method: str, requests: list[Any], metadata: Any = ()) -> PsError | None:
    """The typed error that a call ends with."""
    kind, path = METHODS[method], f"/ps_protocol.v1.Shard/{method}"
    data = [request if isinstance(request, bytes) else request.SerializeToString() for request in requests]
    named = "stream" if kind.client_streaming else "unary", "stream" if kind.server_streaming else "unary"
    made = getattr(shard.channel, "_".join(named))(path)
    try:
        answer = made(iter(data) if kind.client_streaming else data[0], timeout=60, metadata=metadata)
        for _ in answer if kind.server_streaming else ():
            pass
    except grpc.RpcError as failure:
        return error_of(failure)
    return None


@pytest.fixture(scope="module")
def shard() -> Iterator[TestShard]:
    with running_shard({0: 5}) as made:
        start(made)
        yield made


def state(shard: TestShard) -> tuple[Any, ...]:
    """What a call could have changed."""
    model = shard.model()
    published, give_back = shard.take(model)
    found = bytes(published.region.bytes), model.tracker.version, model.tracker.clocks(), model.gate.paused
    give_back()
    return *found, shard.registry.context.log.number


def test_every_method_is_for_readers_or_behind_a_fence() -> None:
    assert {name for name, fencing in FENCING.items() if fencing is Fencing.NONE} == {
        "Pull",
        "Save",
        "GetModel",
        "GetRows",
        "SaveBuckets",
        "Feed",
        "GetRoundNorm",
        "GetPiece",
    }


@pytest.mark.parametrize("method", METHODS)
def test_a_call_of_nobody_changes_nothing(shard: TestShard, method: str) -> None:
    before = state(shard)
    for worker in (NOBODY, FORMER, STRANGER):
        error = call(shard, method, messages(method, worker))
        assert state(shard) == before
        match FENCING[method]:
            case Fencing.NONE:
                assert not isinstance(error, Fenced)
            case Fencing.STANDBY:
                assert error is not None  # tests/shard/standby says who may follow
            case _:
                assert isinstance(error, Fenced), error
                assert error.shard == "0" or method == "Step"
                assert error.remedy


@pytest.mark.parametrize("method", [name for name, fencing in FENCING.items() if fencing is Fencing.COORDINATOR])
def test_only_the_coordinator_this_shard_joined_may_hold_it_still(shard: TestShard, method: str) -> None:
    before = state(shard)
    wrong = {"token": "guessed"}, {"token": ""}, {"incarnation": INCARNATION - 1}, {"incarnation": INCARNATION + 1}
    for fields in wrong:
        key = pb.ShardKey(**({"incarnation": INCARNATION, "token": TOKEN} | fields))
        error = call(shard, method, messages(method, NOBODY), [(SHARD_KEY, key.SerializeToString())])
        assert isinstance(error, Fenced), error
    error = call(shard, method, messages(method, NOBODY), [(SHARD_KEY, b"\xff")])
    assert isinstance(error, InvalidRequest)
    assert state(shard) == before
    key = pb.ShardKey(incarnation=INCARNATION, token=TOKEN)
    error = call(shard, method, messages(method, NOBODY), [(SHARD_KEY, key.SerializeToString())])
    assert not isinstance(error, Fenced)


def test_a_shard_that_has_not_joined_yet_is_nobodys() -> None:
    with running_shard({0: 5}, joined=False) as made:
        key = pb.ShardKey(incarnation=INCARNATION, token=TOKEN).SerializeToString()
        assert isinstance(call(made, "Resume", messages("Resume", NOBODY), [(SHARD_KEY, key)]), Unavailable)


class AskedLog(MemoryLog):
    """Says when room was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    async def reserve(self, nbytes: int) -> None:
        self.asked.set()


def test_a_worker_that_is_fenced_while_its_values_wait_writes_nothing() -> None:
    """The last look is taken when nothing is waited for any more."""
    log = AskedLog()
    with running_shard({0: 5}, log=log) as shard:
        start(shard)
        waits_and_is_fenced(shard, log)


def waits_and_is_fenced(shard: TestShard, log: AskedLog) -> None:
    model, before = shard.model(), state(shard)

    async def hold() -> None:
        model.gate.pause()

    async def open_again() -> None:
        model.resume()

    shard.loop.run(hold())
    log.asked.clear()
    worker = pb.WorkerId(rank=0, incarnation=5)
    data = [message.SerializeToString() for message in messages("Load", worker)]
    loading = shard.channel.stream_unary("/ps_protocol.v1.Shard/Load").future(iter(data), timeout=60)
    assert log.asked.wait(60)
    shard.set_view({0: 6})
    shard.loop.run(open_again())
    with refused_as(Fenced):
        loading.result()
    assert state(shard)[0] == before[0]


@pytest.mark.parametrize("method", [name for name, m in METHODS.items() if not m.client_streaming])
def test_bytes_that_are_no_request_get_one_typed_error(shard: TestShard, method: str) -> None:
    key = pb.ShardKey(incarnation=INCARNATION, token=TOKEN)
    error = call(shard, method, [b"\xff\xff"], [(SHARD_KEY, key.SerializeToString())])
    assert isinstance(error, InvalidRequest), error
    assert error.remedy
