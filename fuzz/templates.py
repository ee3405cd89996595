"""Messages as a real worker would send them, for each method: what mutations start from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from google.protobuf.message import Message

from fuzz.identity import Identity, spec
from ps_protocol import PROTOCOL_VERSION
from ps_protocol.v1 import coordinator_pb2 as control
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.options import options_to_pb

_IDS = np.arange(5, dtype=np.int64).tobytes()
_ROWS = np.ones((5, 4), np.float32).tobytes()


def calls(identity: Identity) -> Mapping[str, Sequence[Message]]:
    """By method: the messages of one call that is in order."""
    me = {"rank": identity.rank, "incarnation": identity.incarnation}
    seat = {"role": control.ROLE_WORKER, "index": identity.rank, "incarnation": identity.incarnation}
    model = {"model": identity.model, "epoch": identity.epoch}
    header = pb.LoadHeader(worker=pb.WorkerId(**me), with_region=True, **model)
    region = pb.Chunk(payload=bytes(identity.region_bytes))
    return {
        "Join": [
            control.JoinRequest(
                role=control.ROLE_EVALUATOR, protocol_version=PROTOCOL_VERSION, token="again", host="h", pid=1
            )
        ],
        "Heartbeat": [control.HeartbeatRequest(stats=control.MemberStats(steps=3, metrics={"loss": 0.5}), **seat)],
        "Leave": [control.LeaveRequest(reason="done", **seat)],
        "DeclareModel": [control.DeclareModelRequest(spec=spec(identity.model), **me)],
        "GetShardMap": [control.GetShardMapRequest(model=identity.model)],
        "Barrier": [control.BarrierRequest(phase=0, **me)],
        "LeaseData": [
            control.LeaseDataRequest(dataset="data", length=1000, epoch=0, lease_items=10, sequence=1, **me),
            control.LeaseDataRequest(
                dataset="data",
                length=1000,
                lease_items=10,
                sequence=2,
                held=control.HeldItems(spans=[control.ItemSpan(begin=0, end=10)]),
                **me,
            ),
        ],
        "Pull": [pb.PullRequest(**model)],
        "Save": [pb.SaveRequest(slices=[0], **model)],
        "GetModel": [pb.GetModelRequest(model=identity.model)],
        "GetRows": [pb.GetRowsRequest(ids=_IDS, **model)],
        "SaveBuckets": [pb.SaveBucketsRequest(buckets=[0, 3], **model)],
        "Feed": [pb.FeedRequest(**model)],
        "Load": [pb.LoadRequest(header=header), pb.LoadRequest(chunk=region)],
        "LoadRows": [
            pb.LoadRowsRequest(header=pb.LoadRowsHeader(rows=5, **model)),
            pb.LoadRowsRequest(chunk=pb.Chunk(payload=_IDS + _ROWS)),
        ],
    }


def opening(identity: Identity) -> pb.StepRequest:
    """The first message of a stream."""
    worker = pb.WorkerId(rank=identity.rank, incarnation=identity.incarnation)
    return pb.StepRequest(
        open=pb.Open(model=identity.model, epoch=identity.epoch, worker=worker, protocol_version=PROTOCOL_VERSION)
    )


def exchange(identity: Identity, sequence: int, phase: int, clock: int) -> list[pb.StepRequest]:
    """What may follow on a stream that stands before the push of this sequence, phase and clock."""
    rows = [pb.TableRows(table=0, rows=5)]
    region, where = bytes(identity.region_bytes), {"sequence": sequence, "phase": phase, "clock": clock}
    worker = pb.WorkerId(rank=identity.rank + 1, incarnation=identity.incarnation)
    other = pb.PushContribution(worker=worker, **where)
    return [
        pb.StepRequest(push=pb.PushHeader(payload=region, **where)),
        pb.StepRequest(push=pb.PushHeader(payload=region + _IDS + _ROWS, tables=rows, **where)),
        pb.StepRequest(push=pb.PushHeader(payload=region, groups=[options_to_pb({"lr": 0.01})], **where)),
        pb.StepRequest(push=pb.PushHeader(skipped=True, **where)),
        pb.StepRequest(push=pb.PushHeader(payload=region, weight=2.0, contributions=[other], **where)),
        pb.StepRequest(lookup=pb.Lookup(number=sequence, tables=rows, now=True, payload=_IDS)),
        pb.StepRequest(stage=pb.Stage(begin=0, end=64, payload=bytes(64))),
        pb.StepRequest(fetch=pb.Fetch()),
        pb.StepRequest(release=pb.Release()),
    ]
