"""Relays of published weights beside real jobs: readers behind them have what was published, for one copy."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from click.testing import CliRunner, Result
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

import ps_worker
from ps_protocol import times
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import Member, Role
from ps_protocol.cluster.weights import FollowAnswer, FollowAsk, PublishAsk
from ps_protocol.errors import (
    InternalError,
    InvalidRequest,
    NotReady,
    PermissionDenied,
    PsError,
    Retryable,
    Unauthenticated,
    UnknownVersion,
    VersionGone,
)
from ps_protocol.launch.ports import free_port
from ps_protocol.model.spec import DType
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.v1 import coordinator_pb2_grpc
from ps_protocol.weights import pieces
from ps_protocol.weights import reader as follower
from ps_protocol.wire.convert.errors import by_code
from ps_server.certs import CertificateFolder
from ps_server.cli.psctl.main import main
from ps_server.coordinator.service import MAX_REQUEST_BYTES
from ps_server.relay.following import RelayReader, RelayStep, after, denies
from ps_server.serving.metrics import MetricsConfig
from tests.support.certificates import made_folder
from tests.support.loops import LoopThread
from tests.support.shards import wait_until
from tests.weights.relays import Relay, relaying
from tests.weights.test_published_weights import bits, net, published, reader
from tests.worker.jobs import Job, running_job


@pytest.fixture
def lab(tmp_path: Path) -> CertificateFolder:
    return made_folder(tmp_path / "lab")


def change(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One step that changes a few values."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.view(-1)[number % parameter.numel()] = 1.0
    optimizer.step()


def sent(job: Job) -> tuple[int, int]:
    """Bytes of deltas and of whole pieces that readers of the job itself have received."""
    readers = [reader for state in job.client.get_weights() for reader in state.readers]
    return sum(reader.delta_bytes for reader in readers), sum(reader.full_bytes for reader in readers)


def test_readers_behind_a_relay_have_each_version_bit_by_bit_and_the_job_sends_it_once() -> None:
    with running_job(shards=2) as job, relaying(job.loop, job.address, "policy") as relay:
        model = net()
        cluster, optimizer = published(job, model)
        size = sum(map(len, bits(model).values()))
        mine = [net(seed) for seed in range(2, 5)]
        with reader(job, coordinator=relay.address) as first, reader(job, coordinator=relay.address) as second:
            converted = reader(job, coordinator=relay.address, dtype=torch.bfloat16)
            with converted as third:
                for number in range(1, 5):
                    if number > 1:
                        change(model, optimizer, number)
                        cluster.publish("policy", optimizer, step=10 * number, metadata={"n": number}, wait=True)
                    for versions, own in zip((first, second), mine, strict=False):
                        version = next(versions)
                        version.apply_(own)
                        assert version.number == number
                        assert bits(own) == bits(model)
                    values = next(third).tensors()
                    for name, value in model.state_dict().items():
                        assert torch.equal(values[name], value.bfloat16() if value.is_floating_point() else value)
                assert (version.step, version.metadata) == (40, {"n": 4})
                assert first.full_bytes == second.full_bytes == size
                assert 0 < first.delta_bytes == second.delta_bytes < size
                # It tells that it has a version when it asks for the next.
                wait_until(lambda: job.client.get_weights()[0].readers[0].have == 4)
                (one,) = job.client.get_weights()[0].readers
                assert (one.full_bytes, one.have) == (size, 4)
        assert relay.versions == [1, 2, 3, 4]


def test_relays_follow_relays_and_serve_all_names_of_a_job() -> None:
    with (
        running_job(shards=2) as job,
        relaying(job.loop, job.address) as near,
        relaying(job.loop, near.address, "policy") as far,
        reader(job, coordinator=far.address) as versions,
    ):
        model = net()
        cluster, optimizer = published(job, model)
        assert next(versions).number == 1
        other = nn.Linear(3, 2)
        cluster.publish("other", cluster.optimizer(torch.optim.SGD, other, lr=0.1, name="other"), step=1, wait=True)
        with reader(job, "other", coordinator=near.address) as others:
            version = next(others)
            mine = nn.Linear(3, 2)
            version.apply_(mine)
            assert bits(mine) == bits(other)
            change(model, optimizer, 2)
            cluster.publish("policy", optimizer, step=2, wait=True)
            version = next(versions)
            mine = net(2)
            version.apply_(mine)
            assert (version.number, bits(mine)) == (2, bits(model))
            # What a relay received is noted once it serves it, which may be after its readers have it.
            wait_until(lambda: all(each.received_of("policy", 2) for each in (near, far)))
            assert [each.full_bytes for relay in (near, far) for each in relay.received_of("policy", 2)] == [0, 0]
            # The near one is one reader of the job, with two behind it: the far one, and its reader.
            near_reader = {state.name: state.readers for state in job.client.get_weights()}
            wait_until(lambda: [each.readers for each in job_readers(job, "policy")] == [2])
            assert [each.readers for each in near_reader["other"]] in ([0], [1])


def job_readers(job: Job, name: str) -> tuple[Any, ...]:
    return next(state.readers for state in job.client.get_weights() if state.name == name)


def test_a_relay_of_another_dtype_receives_it_and_serves_it_alone(tmp_path: Path) -> None:
    with (
        running_job(shards=2) as job,
        relaying(job.loop, job.address, "policy", dtype=DType.BFLOAT16) as near,
        relaying(job.loop, near.address, dtype=DType.BFLOAT16) as relay,
    ):
        model = net()
        cluster, optimizer = published(job, model)
        size = job.client.get_weights()[0].versions[0].size_bytes
        options: dict[str, Any] = {"dtype": torch.bfloat16, "cache": tmp_path}
        with reader(job, **options) as versions:  # of the job: the relay goes on from what it sent
            assert next(versions).number == 1
        wait_until(lambda: relay.versions == [1])
        change(model, optimizer, 2)
        cluster.publish("policy", optimizer, step=2, wait=True)
        wait_until(lambda: relay.versions == [1, 2])
        assert 0 < near.received[0][2].full_bytes < 0.6 * size
        with reader(job, coordinator=relay.address, **options) as versions:
            assert next(versions).number == 1
            version = next(versions)
            assert version.number == 2
            converted = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
            assert all(torch.equal(value, converted[name]) for name, value in version.tensors().items())
            assert (versions.full_bytes, versions.delta_bytes > 0) == (0, True)
        for dtype, asked in ((None, "as trained"), (torch.float32, "float32")):
            with (
                reader(job, coordinator=relay.address, dtype=dtype) as versions,
                pytest.raises(InvalidRequest, match="this relay has 'policy' as bfloat16 alone") as caught,
            ):
                next(versions)
            assert (caught.value.expected, caught.value.actual) == ("dtype bfloat16", asked)
            assert "subscribe(dtype=torch.bfloat16)" in caught.value.remedy


def test_a_relay_keeps_as_many_versions_as_it_may_and_a_reader_further_behind_gets_the_whole_one() -> None:
    with running_job() as job, relaying(job.loop, job.address, "policy", keep=2) as relay:
        model, mine = net(), net(2)
        cluster, optimizer = published(job, model)
        with reader(job, coordinator=relay.address) as near, reader(job, coordinator=relay.address) as far:
            assert (next(near).number, next(far).number) == (1, 1)
            whole = far.full_bytes
            for number in range(2, 6):
                change(model, optimizer, number)
                cluster.publish("policy", optimizer, step=number, wait=True)
                assert next(near).number == number
            with CoordinatorClient(relay.address) as client:
                (state,) = client.get_weights()
            # Version 1 is one that a reader may be receiving.
            assert [each.number for each in state.versions] == [1, 4, 5]
            assert (state.keep, state.newest, len(state.readers)) == (2, 5, 2)
            with pytest.raises(VersionGone, match="version 2 of 'policy' is not at this relay any more") as caught:
                far.fetch(2)
            assert "ask the job itself: this relay keeps the newest 2" in caught.value.remedy
            assert far.fetch(4).number == 4
            version = next(far)
            version.apply_(mine)
            assert (version.number, bits(mine)) == (5, bits(model))
            assert near.full_bytes == whole
            assert far.delta_bytes > 0


def test_a_version_that_the_relay_has_not_received_yet_is_waited_for_and_one_that_never_was_is_an_error() -> None:
    with running_job() as job, relaying(job.loop, job.address, "policy") as relay:
        model = net()
        cluster, optimizer = published(job, model)
        with reader(job, coordinator=relay.address) as versions:
            for number in range(2, 5):
                cluster.publish("policy", optimizer, step=number, wait=True)
                assert versions.fetch(number).number == number
            with pytest.raises(UnknownVersion, match="no version 9"):
                versions.fetch(9)
        with (
            reader(job, have=9, coordinator=relay.address) as versions,
            pytest.raises(UnknownVersion, match="no version 9"),
        ):
            next(versions)
        with reader(job, "other", coordinator=relay.address) as versions:
            with pytest.raises(InvalidRequest, match="this relay does not serve 'other'") as caught:
                next(versions)
            assert caught.value.expected == "policy"


def test_a_relay_that_is_started_again_waits_with_its_readers_until_the_job_is_there() -> None:
    """Its readers have a version that it has not, and nobody to ask about it."""
    with running_job() as job:
        cluster, optimizer = published(job, net(), versions=3)
        port = free_port()
        relayed = relaying(job.loop, job.address, "policy", port=port)
        with relayed as relay, reader(job, coordinator=relay.address) as versions:
            assert next(versions).number == 3
            loop = LoopThread()
            relay.end()
            absent = f"127.0.0.1:{free_port()}"
            with loop, relaying(loop, absent, "policy", port=port) as again, ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(next, versions)
                wait_until(lambda: any("what is here is served" in text for text in again.said))
                assert not waiting.done()
                again.end()
                with relaying(job.loop, job.address, "policy", port=port):
                    cluster.publish("policy", optimizer, step=4, wait=True)
                    assert waiting.result(60).number == 4


def test_what_comes_damaged_is_not_served_and_the_next_version_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_job() as job, relaying(job.loop, job.address, "policy") as relay:
        model, mine = net(), net(2)
        cluster, optimizer = published(job, model)
        with reader(job, coordinator=relay.address) as versions:
            assert next(versions).number == 1
            apply, seen = pieces._Steps.apply, set()

            def flipped(steps: Any, *arguments: Any) -> None:
                if steps not in seen:
                    seen.add(steps)
                    for piece in steps.pieces:
                        piece[-1] ^= 1
                apply(steps, *arguments)

            monkeypatch.setattr(pieces._Steps, "apply", flipped)
            change(model, optimizer, 2)
            cluster.publish("policy", optimizer, step=2, wait=True)
            wait_until(lambda: any("no version of 'policy' can be received" in text for text in relay.said))
            with CoordinatorClient(relay.address) as client:
                assert client.get_weights()[0].newest == 1
            monkeypatch.undo()
            change(model, optimizer, 3)
            cluster.publish("policy", optimizer, step=3, wait=True)
            version = next(versions)
            while version.number < 3:
                version = next(versions)
            version.apply_(mine)
            assert bits(mine) == bits(model)


@pytest.mark.parametrize("count", [1, 5])
def test_a_new_job_at_the_address_begins_again_and_readers_of_the_old_one_are_told(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    with LoopThread() as loop, running_job(job_id="old") as old, running_job(job_id="new") as new:
        published(old, net(), versions=3)
        published(new, net(), versions=count)
        with relaying(loop, f"127.0.0.1:{port}", "policy") as relay:
            options = {"coordinator": relay.address, "cache": tmp_path}
            with relaying(loop, old.address, "policy", port=port), reader(old, **options) as versions:
                assert next(versions).number == 3
            with relaying(loop, new.address, "policy", port=port):
                wait_until(lambda: relay.versions == [3, count])
                if count < 3:
                    old_one = reader(new, have=3, coordinator=relay.address)
                    with old_one as versions, pytest.raises(UnknownVersion, match="no version 3"):
                        next(versions)
                with monkeypatch.context() as patch:
                    # Without an answer in time what is in the cache would count.
                    patch.setattr(times, "BRIEF_CALL_SECONDS", 60.0)
                    with reader(new, **options) as versions:
                        assert next(versions).number == count


def test_a_new_job_is_followed_from_its_first_version_on_also_where_one_of_the_old_job_was_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()

    def gone(*_: object) -> None:
        raise VersionGone("its file is damaged")

    with LoopThread() as loop, running_job(job_id="old") as old, running_job(job_id="new") as new:
        published(old, net(), versions=3)
        published(new, net())
        with relaying(loop, old.address, "policy", port=port) as near:
            wait_until(lambda: near.versions == [3])
            monkeypatch.setattr(RelayReader, "_receive", gone)
            with relaying(loop, near.address, "policy") as relay:
                wait_until(lambda: any("its file is damaged" in text for text in relay.said))
                monkeypatch.undo()
                near.end()
                with relaying(loop, new.address, "policy", port=port):
                    wait_until(lambda: relay.versions == [1])


@pytest.mark.parametrize("kind", by_code.values(), ids=lambda kind: kind.__name__)
def test_what_a_relay_does_depends_on_the_kind_of_the_error_alone(kind: type[PsError]) -> None:
    error = kind("version 3 of 'policy' is of another job")
    first, later = after(error, is_first=True), after(error, is_first=False)
    assert denies(error) is (kind in (UnknownVersion, VersionGone))
    if issubclass(kind, Retryable):
        assert (first, later) == (RelayStep.WAIT, RelayStep.WAIT)
    else:
        assert (first, later) == (
            RelayStep.END,
            RelayStep.BEGIN_AGAIN if kind is UnknownVersion else RelayStep.TRY_AGAIN,
        )


def test_a_relay_whose_job_refuses_what_it_asks_serves_what_it_has() -> None:
    """The relay that it follows was started again, for other names."""
    port = free_port()
    with running_job() as job, LoopThread() as loop:
        cluster, optimizer = published(job, net())
        with (
            relaying(loop, job.address, port=port) as near,
            relaying(loop, near.address, "policy") as far,
            reader(job, coordinator=far.address) as versions,
        ):
            assert next(versions).number == 1
            near.end()
            with relaying(loop, job.address, "other", port=port):
                wait_until(lambda: any("this relay does not serve 'policy'" in text for text in far.said))
                with reader(job, coordinator=far.address) as others:
                    assert next(others).number == 1
            cluster.publish("policy", optimizer, step=2, wait=True)
            with relaying(loop, job.address, "policy", port=port):
                assert next(versions).number == 2
                wait_until(lambda: far.versions == [1, 2])


@pytest.mark.parametrize("refusal", [PermissionDenied, NotReady, InternalError, InvalidRequest])
def test_a_refusal_that_is_meant_for_the_relay_is_not_passed_on_to_its_readers(
    refusal: type[PsError], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_job() as job:
        cluster, optimizer = published(job, net(), versions=2)
        with relaying(job.loop, job.address, "policy") as relay, ThreadPoolExecutor(1) as pool:
            wait_until(lambda: relay.versions == [2])
            ask, asked = CoordinatorClient.follow_weights, list[int]()

            def refused(client: CoordinatorClient, what: FollowAsk, *given: Any, **named: Any) -> FollowAnswer:
                if given[-1] == times.BRIEF_CALL_SECONDS and not what.leaves:
                    asked.append(what.have)
                    raise refusal("not you")
                return ask(client, what, *given, **named)

            with reader(job, have=3, coordinator=relay.address) as versions:
                monkeypatch.setattr(CoordinatorClient, "follow_weights", refused)
                waiting = pool.submit(next, versions)
                wait_until(lambda: len(asked) > 0)
                for number in (3, 4):
                    cluster.publish("policy", optimizer, step=number, wait=True)
                assert waiting.result(60).number == 4


def test_a_name_of_a_job_that_is_refused_from_its_beginning_ends_no_relay_of_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask, refuses = RelayReader._ask, [True]

    def refused(self: RelayReader, *arguments: Any, **named: Any) -> FollowAnswer:
        if self._what.name == "other" and refuses:
            raise PermissionDenied("not you")
        return ask(self, *arguments, **named)

    monkeypatch.setattr(RelayReader, "_ask", refused)
    with running_job() as job, relaying(job.loop, job.address) as relay:
        cluster, _ = published(job, net())
        other = nn.Linear(3, 2)
        cluster.publish("other", cluster.optimizer(torch.optim.SGD, other, lr=0.1, name="other"), step=1, wait=True)
        wait_until(lambda: any("no version of 'other' can be received" in text for text in relay.said))
        refuses.clear()
        wait_until(lambda: {name for name, _, _ in relay.received} == {"policy", "other"})


def test_a_name_that_cannot_be_is_refused_whatever_version_of_it_a_reader_has() -> None:
    with (
        running_job() as job,
        relaying(job.loop, job.address) as relay,
        CoordinatorClient(relay.address) as client,
        pytest.raises(InvalidRequest, match="no name for what is published"),
    ):
        client.follow_weights(FollowAsk("a/b", 3, 0, "reader"), 0.0)


def test_the_cache_of_a_reader_stays_where_a_relay_does_not_serve_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_job() as job, relaying(job.loop, job.address, "other") as relay:
        published(job, net())
        with reader(job, cache=tmp_path) as versions:
            assert next(versions).number == 1
        with monkeypatch.context() as patch:
            # Without an answer in time what is in the cache would count.
            patch.setattr(times, "BRIEF_CALL_SECONDS", 60.0)
            refused = reader(job, cache=tmp_path, coordinator=relay.address)
            with refused as versions, pytest.raises(InvalidRequest, match="this relay does not serve 'policy'"):
                next(versions)
        with reader(job, cache=tmp_path, coordinator=f"127.0.0.1:{free_port()}") as versions:
            assert next(versions).number == 1


def numbers(relay: Relay) -> dict[tuple[str, ...], float]:
    """The metrics that a relay serves: by name without prefix and by labels, sorted, but the name of the job."""
    url = next(text.removeprefix("metrics at ") for text in relay.said if text.startswith("metrics at "))
    with urllib.request.urlopen(url, timeout=60) as page:
        families = text_string_to_metric_families(page.read().decode())
        found = {}
        for sample in (sample for family in families for sample in family.samples):
            assert sample.labels.pop("ps_job") == "job"
            found[sample.name.removeprefix("torch_ps_"), *dict(sorted(sample.labels.items())).values()] = sample.value
        return found


def test_a_relay_serves_what_it_has_receives_and_sends_as_metrics() -> None:
    port = free_port()
    with running_job() as job, LoopThread() as loop:
        model = net()
        cluster, optimizer = published(job, model)
        size = sum(map(len, bits(model).values()))
        with relaying(loop, job.address, "policy", port=port) as near:
            far_options = {"metrics": MetricsConfig(port=0), "patience_seconds": 60.0}
            with (
                relaying(loop, near.address, "policy", **far_options) as far,
                reader(job, coordinator=far.address) as first,
                reader(job, coordinator=far.address) as second,
            ):
                assert (next(first).number, next(second).number) == (1, 1)
                change(model, optimizer, 2)
                cluster.publish("policy", optimizer, step=2, wait=True)
                assert next(first).number == 2
                found = numbers(far)
                assert found["relay_newest_version", "policy"] == 2
                assert found["relay_held_versions", "policy"] == 2
                assert found["relay_held_bytes", "policy"] == 2 * size
                assert found["relay_received_bytes_total", "full", "policy"] == size
                assert 0 < found["relay_received_bytes_total", "delta", "policy"] < size
                assert found["relay_readers", "policy"] == 2
                # The second one has not said yet what it got.
                assert found["relay_behind_versions", "policy"] == 2
                # What is sent counts once it has left, which may be after its reader has it.
                wait_until(lambda: numbers(far)[("relay_sent_bytes_total", "full")] == 2 * size)
                delta = found["relay_received_bytes_total", "delta", "policy"]
                wait_until(lambda: numbers(far)[("relay_sent_bytes_total", "delta")] == delta)
                assert found[("relay_reconnects_total",)] == 0
                near.end()
                wait_until(lambda: numbers(far)[("relay_reconnects_total",)] > 0)
                # For other names: it refuses.
                with relaying(loop, job.address, "other", port=port):
                    failures = "relay_failures_total", "policy", "try_again"
                    wait_until(lambda: numbers(far).get(failures, 0) > 0)


def test_a_relay_says_which_event_each_of_its_notes_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "WAIT_SECONDS", 0.2)  # a question that is broken off is repeated for so long
    port, told = free_port(), list[tuple[str, str]]()
    with LoopThread() as loop, running_job(job_id="old") as old, running_job(job_id="new") as new:
        published(old, net(), versions=2)
        published(new, net())
        with relaying(loop, f"127.0.0.1:{port}", "policy", told=told) as relay:
            with relaying(loop, old.address, "policy", port=port):
                wait_until(lambda: relay.versions == [2])
            wait_until(lambda: any(event == "relay.waits" and "is served" in text for event, text in told))
            with relaying(loop, new.address, "policy", port=port):
                wait_until(lambda: relay.versions == [2, 1])
    assert ("relay", "the job of 'policy' answers again") in told
    assert any(event == "relay.begins" and "is of another job now" in text for event, text in told)
    assert told[0] == ("relay", f"relay serves at {relay.address}")


def test_a_relay_of_everything_ends_with_a_job_that_has_published_nothing() -> None:
    with running_job() as job, relaying(job.loop, job.address) as relay:
        cluster = job.cluster()
        cluster.optimizer(torch.optim.SGD, net(), lr=0.1)
        assert not relay.served.done()
        cluster.close()
        relay.served.result(60)


def test_a_relay_of_everything_follows_one_of_a_few_names() -> None:
    with (
        running_job() as job,
        relaying(job.loop, job.address, "policy") as near,
        relaying(job.loop, near.address) as far,
        reader(job, coordinator=far.address) as versions,
    ):
        published(job, net())
        assert next(versions).number == 1


def test_a_relay_that_is_stopped_while_it_waits_says_nothing_of_connections_that_it_closes_itself() -> None:
    with running_job() as job, relaying(job.loop, job.address, "policy", patience_seconds=60.0) as relay:
        cluster, _ = published(job, net())
        wait_until(lambda: [each.have for each in job_readers(job, "policy")] == [1])
        relay.end()
        assert not any("what is here is served" in text for text in relay.said)
        cluster.close()


@pytest.mark.usefixtures("_patient")
def test_readers_and_the_relay_end_with_the_job() -> None:
    with running_job() as job, relaying(job.loop, job.address, "policy") as relay:
        cluster, _ = published(job, net(), versions=2)
        wait_until(lambda: relay.versions[-1:] == [2])
        with reader(job, coordinator=relay.address) as versions:
            assert next(versions).number == 2
            cluster.close()
            assert list(versions) == []
        relay.served.result(60)


def test_a_relay_of_many_names_ends_soon_also_where_the_job_does_not_answer() -> None:
    absent = f"127.0.0.1:{free_port()}"
    with LoopThread() as loop, relaying(loop, absent, *(f"name-{number}" for number in range(64))) as relay:
        wait_until(lambda: len(relay.said) > 64)
        relay.end()  # in 60 s; each name may take 2 s


def test_psctl_shows_a_relay_and_what_it_serves_and_sends_other_questions_to_the_job() -> None:
    with running_job() as job, relaying(job.loop, job.address, "policy") as relay:
        cluster, optimizer = published(job, net())
        with reader(job, coordinator=relay.address) as versions, reader(job, coordinator=relay.address) as others:
            assert (next(versions).number, next(others).number) == (1, 1)
            cluster.publish("policy", optimizer, step=2, wait=True)
            assert (next(versions).number, next(others).number) == (2, 2)
            wait_until(lambda: "serves 2 readers" in psctl("weights", "list", "--coordinator", job.address).output)
            (listed,) = json.loads(psctl("weights", "list", "--coordinator", job.address, "--json").output)["names"]
            assert [each["readers"] for each in listed["readers"]] == [2]
            there = psctl("weights", "list", "--coordinator", relay.address).output
            assert "policy: version 2 of model 'model', 2 readers" in there
            done = psctl("status", "--coordinator", relay.address)
            assert done.exit_code == 1
            assert "a relay of published weights answers readers alone" in done.output
            with pytest.raises(InvalidRequest, match="answers readers alone"):
                ps_worker.connect(relay.address, connect_timeout_seconds=60.0)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ([], "give names, or --all"),
        (["policy", "--all"], "give names, or --all"),
        ([".odd"], "is no name"),
        (["policy", "--keep", "0"], "0"),
    ],
)
def test_a_relay_is_told_what_to_serve(told: list[str], says: str) -> None:
    done = psctl("weights", "relay", *told, "--coordinator", "127.0.0.1:1")
    assert done.exit_code == 2
    assert says in done.output


def psctl(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, env={"PS_COORDINATOR": None})


def test_a_relay_answers_readers_with_a_token_and_tls_and_is_itself_no_more_than_one(lab: CertificateFolder) -> None:
    with running_job(shards=2, lab=lab) as job:
        model, mine = net(), net(2)
        published(job, model)
        with relaying(job.loop, job.address, "policy", security=lab.settings("relay")) as relay:
            settings = lab.settings("reader", role=AccessRole.READER)
            with reader(job, coordinator=relay.address, security=settings) as versions:
                next(versions).apply_(mine)
                assert bits(mine) == bits(model)
            viewer = lab.settings("viewer", role=AccessRole.VIEWER)
            refused = reader(job, coordinator=relay.address, security=viewer)
            with refused as versions, pytest.raises(PermissionDenied, match="reader"):
                next(versions)
            wrong = replace(settings, token_file=None, token="f" * 64)
            refused = reader(job, coordinator=relay.address, security=wrong)
            with refused as versions, pytest.raises(Unauthenticated, match="does not know the token"):
                next(versions)
        ask = PublishAsk("policy", "model", 1, "{}", 8, "token")
        client = CoordinatorClient(job.address, Security(lab.settings("relay"), AccessRole.READER))
        with client, pytest.raises(PermissionDenied, match="worker"):
            list(client.publish(Member(Role.WORKER, 0, 1), ask))


def test_a_relay_refuses_a_question_that_is_too_large_unread() -> None:
    def ask(host_letters: int) -> None:
        request = pb.FollowWeightsRequest(name="policy", reader="reader", host="h" * host_letters)
        coordinator_pb2_grpc.CoordinatorStub(channel).FollowWeights(request, timeout=60)  # type: ignore[no-untyped-call]

    with (
        running_job() as job,
        relaying(job.loop, job.address) as relay,
        grpc.insecure_channel(relay.address) as channel,
    ):
        ask(MAX_REQUEST_BYTES - 1000)
        with pytest.raises(grpc.RpcError, match="larger than max"):
            ask(MAX_REQUEST_BYTES + 1)


def test_a_relay_that_the_job_refuses_ends_with_its_error(lab: CertificateFolder) -> None:
    with running_job(lab=lab) as job:
        viewer = replace(
            lab.settings("relay"),
            token_file=lab.path / "viewer.token",
            tls_cert=lab.pair("coordinator")[0],
            tls_key=lab.pair("coordinator")[1],
        )
        with (
            pytest.raises(PermissionDenied, match="reader"),
            relaying(job.loop, job.address, "policy", security=viewer) as relay,
        ):
            relay.served.result(60)
