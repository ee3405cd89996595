"""A job with TLS, client certificates and tokens: it trains, moves, is followed and read; strangers are refused."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import ps_worker
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.lease import MemberLease
from ps_protocol.client.membership import Membership
from ps_protocol.cluster.job_state import expiring
from ps_protocol.cluster.view import JoinRequest, Member, Role
from ps_protocol.cluster.weights import PublishAsk
from ps_protocol.errors import Fenced, NonFiniteGradient, PermissionDenied, Unauthenticated, Unavailable
from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.security import callers, expiry, tls
from ps_protocol.security.certificates import CertificateFacts, facts_in
from ps_protocol.security.credentials import bearer
from ps_protocol.security.identity import SessionEnded
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import OFF, Security
from ps_protocol.security.settings import SecuritySettings
from ps_server.certs import Authority, CertificateFolder, KeyedCertificate
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.cli.options.storage import Durability, StorageConfig
from ps_server.coordinator.access import CoordinatorAccess
from ps_server.serving import open_streams
from ps_worker import Cluster
from ps_worker.session.session import Session
from ps_worker.step.remote_model import RemoteModel
from tests.support.certificates import made_folder, security_of, write_pair
from tests.support.length import choose, few, paired
from tests.support.shards import wait_until
from tests.worker.jobs import Job, running_job

WORKER = AccessRole.WORKER
MODES = (Consistency(Mode.ASYNC), Consistency(Mode.SSP, 1), Consistency(Mode.SYNC))


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CertificateFolder:
    # Why a connection fails is looked into after so long.
    monkeypatch.setattr("ps_protocol.times.HINT_SECONDS", 0.2)
    return made_folder(tmp_path / "lab")


def train(job: Job, steps: int = 3, transport: str = "grpc") -> torch.nn.Module:
    """One worker that takes ``steps``, and its model."""
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    with job.cluster(transport=transport) as cluster:
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        for _ in range(steps):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
    return model


def test_a_job_with_a_standby_trains_and_is_read(lab, tmp_path):
    with running_job(shards=2, workers=1, lab=lab) as job:
        kept = {name: StorageConfig(Durability.DURABLE, tmp_path / name) for name in ("shard-0", "standby-0")}
        job.stop_shard(0)
        job.start_shard(0, storage=kept["shard-0"], standby=True)
        job.wait_for_shards()
        job.start_shard(0, "standby-0", storage=kept["standby-0"], standby=True)
        job.wait_for_shards()
        wait_until(lambda: 0 in job.view.live(Role.STANDBY))
        trained = train(job)
        wait_until(lambda: job.member(Role.SHARD, 0).stats.standby_lag == 0)
        with job.cluster(Role.EVALUATOR) as reader:
            read = torch.nn.Linear(3, 2)
            next(reader.follow(read))
        assert torch.equal(read.weight, trained.weight)


def test_a_reader_reads_published_weights_and_may_not_publish(lab):
    with running_job(shards=2, workers=1, lab=lab) as job:
        model, read = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        cluster = job.cluster()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        assert cluster.publish("policy", optimizer, step=1, wait=True) == 1
        settings = lab.settings("reader", role=AccessRole.READER)
        with ps_worker.subscribe("policy", coordinator=job.address, security=settings) as versions:
            next(versions).apply_(read)
        assert torch.equal(read.weight, model.weight)
        ask = PublishAsk("policy", "model", 1, "{}", 8, "token")
        with (
            CoordinatorClient(job.address, Security(settings, AccessRole.READER)) as client,
            pytest.raises(PermissionDenied, match="worker"),
        ):
            list(client.publish(Member(Role.WORKER, 0, 1), ask))
        viewer = lab.settings("viewer", role=AccessRole.VIEWER)
        with (
            ps_worker.subscribe("policy", coordinator=job.address, security=viewer) as versions,
            pytest.raises(PermissionDenied, match="reader"),
        ):
            next(versions)


def test_slices_move_and_rest_in_a_checkpoint(lab, tmp_path):
    with running_job(shards=2, workers=1, lab=lab, checkpoints=CheckpointConfig(tmp_path / "kept")) as job:
        trained = train(job)
        assert [each.moved_bytes == each.total_bytes for each in job.client.move(drain=[0])][-1]
        folder, _, _ = job.client.checkpoint()
        assert job.client.restore_checkpoint(folder)[1] == ["model"]
        with job.cluster(Role.EVALUATOR) as reader:
            read = torch.nn.Linear(3, 2)
            next(reader.follow(read))
        assert torch.equal(read.weight, trained.weight)


def refusal(client: CoordinatorClient, role: Role = Role.WORKER, index: int | None = None) -> str:
    with pytest.raises((Unauthenticated, PermissionDenied)) as caught:
        Membership.join(client, JoinRequest(role, index), 90.0)
    return str(caught.value)


def test_strangers_are_refused_with_the_file_the_date_or_the_role(lab, tmp_path):
    with running_job(shards=1, workers=1, lab=lab) as job:
        worker = lab.settings("worker", role=AccessRole.WORKER)

        def client(**changes: object) -> CoordinatorClient:
            security = Security(worker.with_given(**changes), AccessRole.WORKER)
            return job.exits.enter_context(CoordinatorClient(job.address, security))

        # A certificate alone names its role, too.
        tokens = tmp_path / "tokens"
        tokens.touch(0o600)
        tokens.write_text("worker:night:" + "w" * 20 + "\n")
        assert str(tokens) in (said := refusal(client(token_file=tokens)))
        assert "does not know the token" in said
        assert "speaks TLS" in refusal(job.exits.enter_context(CoordinatorClient(job.address, OFF)))
        other = Authority.make("other")
        write_pair(tmp_path, "other", other.own)
        assert f"authority in {tmp_path}/other.pem" in refusal(client(tls_ca=tmp_path / "other.pem"))
        certificate, key = write_pair(tmp_path, "stranger", other.issue("worker/stranger"))
        assert f"actual: {certificate}" in refusal(client(tls_cert=certificate, tls_key=key))
        bare = replace(worker, tls_cert=None, tls_key=None)
        assert "does not accept the certificate of this process" in refusal(
            job.exits.enter_context(CoordinatorClient(job.address, Security(bare, AccessRole.WORKER)))
        )
        for role, index, needed in ((Role.SHARD, 0, "server"), (Role.EVALUATOR, 0, None), (Role.STANDBY, 0, "server")):
            if needed:
                assert f"needs the role {needed}" in refusal(client(), role, index)
        shard = job.exits.enter_context(CoordinatorClient(job.address, security_of(lab, "shard-1")))
        assert "not that of shard 0" in refusal(shard, Role.SHARD, 0)
        for name in ("viewer", "reader"):
            lesser = job.exits.enter_context(CoordinatorClient(job.address, security_of(lab, name)))
            with pytest.raises(PermissionDenied, match="needs the role admin"):
                lesser.set_consistency(Consistency(Mode.ASYNC))
            assert lesser.get_status().view.expected_workers == 1
        train(job)


def test_a_server_whose_certificate_has_expired_is_named_with_the_date(lab, monkeypatch):
    with running_job(shards=0, workers=1, lab=lab) as job:
        authority = Authority(KeyedCertificate(*(path.read_bytes() for path in lab.pair("ca"))))
        # Servers take what they are given when it is replaced; so one that expires while they run is made by hand.
        monkeypatch.setattr(CertificateFacts, "check_time", lambda *_: None)
        write_pair(lab.path, "coordinator", authority.issue("coordinator/job", ["127.0.0.1"], days=-1))
        client = job.exits.enter_context(CoordinatorClient(job.address, security_of(lab, "worker")))
        assert "certificate has expired on 20" in refusal(client)


class Steps:
    """Takes steps in a thread of its own, until ``target`` is set and reached, two hundred a second at most."""

    #: Held where a worker looks whether it makes another step.
    looks = threading.Lock()

    def __init__(self, job: Job, rank: int, transport: str) -> None:
        self.taken = 0
        self.target: int | None = None
        self._join = partial(job.cluster, rank=rank, transport=transport)
        self._thread = ThreadPoolExecutor(1)
        self._done = self._thread.submit(self._run)

    def _run(self) -> None:
        model = torch.nn.Linear(3, 2)
        optimizer = self._join().optimizer(torch.optim.SGD, model, lr=0.01)
        while self._goes_on():
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            self.taken += 1
            time.sleep(0.005)  # others need the processor: nobody asks how fast it trains

    def _goes_on(self) -> bool:
        with self.looks:
            return self.target is None or self.taken < self.target

    def moved(self, steps: int = 3) -> None:
        """Wait until it has taken ``steps`` more. Raises what a step raises."""
        wanted = self.taken + steps
        wait_until(lambda: self.taken >= wanted or self._done.done())
        if self._done.done():
            self._done.result()
        assert self.taken >= wanted

    def end(self) -> None:
        """Raises what a step raises."""
        self._done.result(60)
        self._thread.shutdown()


def begun(job: Job, *transports: str) -> list[Steps]:
    """A worker for each of ``transports`` that has taken some steps."""
    workers = [Steps(job, rank, transport) for rank, transport in enumerate(transports)]
    moved(workers)
    return workers


def moved(workers: list[Steps]) -> None:
    for worker in workers:
        worker.moved()


def end(workers: list[Steps], *, together: bool = False) -> None:
    """``together``: after the same step, so that none waits for another for ever."""
    with Steps.looks:
        # Those that are in a step come to no more than one above the highest.
        target = max(worker.taken for worker in workers) + 3 if together else 0
        for worker in workers:
            worker.target = target
    for worker in workers:
        worker.end()


@pytest.mark.parametrize("load_seconds", few([0.3, 0.0]))
def test_certificates_and_tokens_rotate_under_load_in_every_mode_and_the_old_ones_are_refused(
    lab, monkeypatch, load_seconds
):
    """Streams of the old tokens are ended in the middle of steps; two workers open them again. No step fails.

    Where files take a while to load, the calls of several threads meet while one of them loads.
    """
    late_by_days, endings, load = [0.0], [], tls._load
    monkeypatch.setattr(tls, "_load", lambda settings: time.sleep(load_seconds) or load(settings))
    monkeypatch.setattr(callers, "now", lambda: time.time() + 86400 * late_by_days[0])
    monkeypatch.setattr(open_streams, "LOOK_SECONDS", 0.05)
    original = open_streams.ended

    def ended(why: Unauthenticated) -> Unavailable:
        endings.append(why.message)
        return original(why)

    monkeypatch.setattr(open_streams, "ended", ended)
    lab.renew(2, [], 1.0)
    old = lab.settings("worker", role=AccessRole.WORKER)
    secret = old.token_file.read_text()
    with running_job(shards=2, workers=2, lab=lab, consistency=MODES[0], lease_seconds=60) as job:
        workers = begun(job, "grpc", "bulk")
        before = [job.member(Role.WORKER, rank).member.incarnation for rank in range(2)]
        for turn, mode in enumerate(MODES):
            job.client.set_consistency(mode)
            moved(workers)
            # New files, then the tokens before are dropped, then the certificates before have expired.
            lab.renew(2, [], 10.0 * (turn + 1))
            lab.replace_tokens(keep=True)
            moved(workers)
            endings.clear()
            lab.replace_tokens()
            # Two streams of each worker: one to each shard.
            wait_until(lambda: sum("token of the caller was removed" in each for each in endings) >= 4)
            late_by_days[0] = 10.0 * turn + 2
            moved(workers)
        end(workers, together=True)
        after = [job.member(Role.WORKER, rank) for rank in range(2)]
        assert [each.member.incarnation for each in after] == before
        assert [each.gone for each in after] == ["", ""]
        kept = lab.path / "old"
        kept.touch(0o600)
        kept.write_text(secret)
        with_old = Security(replace(old, token_file=kept), AccessRole.WORKER)
        with CoordinatorClient(job.address, with_old) as client:
            assert f"{kept}" in refusal(client)


@pytest.mark.parametrize("kind", few(["certificates alone", "with tokens"]))
def test_a_job_whose_certificates_expire_goes_on_and_says_so(lab, kind, monkeypatch):
    late_by_days = [0.0]
    monkeypatch.setattr(callers, "now", lambda: time.time() + 86400 * late_by_days[0])
    monkeypatch.setattr(open_streams, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(expiry, "LAST_PART", 1.0)
    lab.renew(1, [], 1.0)
    lab = lab if kind == "with tokens" else WithoutTokens(lab.path)
    with running_job(shards=1, workers=2, lab=lab, lease_seconds=6.0) as job:
        workers = begun(job, "grpc", "bulk")
        before = {each.member for each in job.client.get_status().members}
        late_by_days[0] = 2.0
        beats = [0]
        heard = MemberLease.read_stats
        monkeypatch.setattr(MemberLease, "read_stats", lambda lease: beats.append(1) or heard(lease))
        # More than a lease of heartbeats, of three members.
        wait_until(lambda: len(beats) > 200)
        moved(workers)
        status = job.client.get_status()
        assert {each.member for each in status.members if not each.gone} == before
        assert status.certificate_ends > 0
        assert all(each.stats.certificate_ends > 0 for each in status.members)
        assert "the certificate of " in expiring(status)
        end(workers)


@pytest.mark.long
def test_a_job_whose_certificates_have_really_expired_goes_on(lab):
    """They are valid for 40 s; new connections with them are refused afterwards."""
    lab.renew(1, [], 40 / 86400)
    began = time.time() - time.monotonic()
    with running_job(shards=1, workers=1, lab=lab, lease_seconds=5.0, clock_began=began) as job:
        worker = Steps(job, 0, "bulk")
        worker.moved()
        ends = facts_in(lab.pair("worker")[0].read_bytes()).not_after.timestamp()
        assert time.time() < ends
        # Asks again and again: a server closes connections without a call after a minute.
        wait_until(lambda: job.client.get_status().view.started and time.time() > ends + 15)
        worker.moved()
        assert [each.gone for each in job.client.get_status().members] == ["", ""]
        assert "expired" in expiring(job.client.get_status())
        with pytest.MonkeyPatch.context() as lenient:
            lenient.setattr(CertificateFacts, "check_time", lambda *_: None)
            client = job.exits.enter_context(CoordinatorClient(job.address, security_of(lab, "worker")))
        assert "expired" in refusal(client)
        end([worker])


class Rotation:
    """New files for every process of a job, put in place one kind after the other, each half written at first."""

    KINDS = ("key", "certificate", "authorities", "tokens")

    def __init__(self, lab: CertificateFolder, days: float) -> None:
        """The certificates are of a new authority, which is put beside the one before, and valid for ``days``."""
        self._lab = lab
        with TemporaryDirectory() as name:
            made = CertificateFolder(Path(name))
            made.make(2, [], days)
            self._new = {path.name: path.read_bytes() for path in Path(name).iterdir()}
        self._new["tokens"] += lab.token_file.read_bytes()
        self._new["ca.pem"] += _first_certificate(lab.authority_file.read_bytes())
        self._new.pop("ca.key")

    def replace(self, kind: str) -> None:
        """Put the files of ``kind`` in place."""
        suffixes = {
            "key": (".key",),
            "certificate": (".pem",),
            "authorities": ("ca.pem",),
            "tokens": ("token", "tokens"),
        }
        names = [
            name
            for name in self._new
            if name.endswith(suffixes[kind]) and (name == "ca.pem") == (kind == "authorities")
        ]
        for half in (True, False):
            for name in names:
                path, data = self._lab.path / name, self._new[name]
                if half:
                    path.write_bytes(data[: len(data) // 2])
                else:
                    self._lab._write(name, data)
            time.sleep(0.05)  # processes may read in between


def _first_certificate(pem: bytes) -> bytes:
    end = b"-----END CERTIFICATE-----\n"
    return pem.partition(end)[0] + end


ORDERS = list(permutations(Rotation.KINDS))


def test_files_replaced_in_every_order_while_the_ones_before_expire_fail_no_step(lab, monkeypatch):
    """Half-written files, keys without their certificate, certificates of an authority that is not known yet."""
    late_by_days = [0.0]
    monkeypatch.setattr(callers, "now", lambda: time.time() + 86400 * late_by_days[0])
    monkeypatch.setattr(open_streams, "LOOK_SECONDS", 0.05)
    lab.renew(2, [], 1.0)
    with running_job(shards=2, workers=4, lab=lab, lease_seconds=60) as job:
        workers = begun(job, "grpc", "bulk", "shm", "bulk")
        before = [job.member(Role.WORKER, rank).member.incarnation for rank in range(4)]
        for turn, order in enumerate(choose(ORDERS, ORDERS[::8])):
            rotation = Rotation(lab, 10.0 * (turn + 1))
            # From when the new certificate has begun to come: before, a client has no reason to try again.
            expires = max(turn % len(order), min(order.index("key"), order.index("certificate")))
            for number, kind in enumerate(order):
                rotation.replace(kind)
                if number == expires:
                    late_by_days[0] = 10.0 * turn + 2
            moved(workers)
        end(workers)
        after = [job.member(Role.WORKER, rank) for rank in range(4)]
        assert [each.member.incarnation for each in after] == before
        assert [each.gone for each in after] == [""] * 4


def test_a_worker_waits_for_a_shard_whose_certificate_it_does_not_accept(lab, monkeypatch):
    """The shard's files were replaced by wrong ones while a worker was connecting; the right ones come later."""
    hints = []
    monkeypatch.setattr(open_streams, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(Session, "wait_hint", lambda session, text: hints.append(text))
    lab.renew(1, [], 1.0)
    with running_job(shards=1, workers=1, lab=lab, lease_seconds=60) as job:
        worker = Steps(job, 0, "grpc")
        worker.moved()
        lab.renew(1, [], 10.0)
        right = {path: path.read_bytes() for path in lab.pair("shard-0")}
        write_pair(lab.path, "shard-0", Authority.make("other").issue("shard/job/0", ["127.0.0.1"]))
        # Ends the stream: the worker opens another.
        lab.replace_tokens()
        wait_until(lambda: any("is not accepted here" in hint for hint in hints))
        for path, data in right.items():
            lab._write(path.name, data)
        worker.moved()
        end([worker])


def test_a_member_whose_token_is_withdrawn_loses_its_place(lab):
    with running_job(shards=0, workers=1, lab=WithoutTls(lab.path), lease_seconds=6.0) as job:
        client = job.exits.enter_context(
            CoordinatorClient(job.address, Security(SecuritySettings(token_file=lab.path / "worker.token"), WORKER))
        )
        member = job.exits.enter_context(Membership.join(client, JoinRequest(Role.WORKER, 0), 20.0))
        kept = (lab.path / "worker.token").read_text()
        (lab.path / "tokens").write_text((lab.path / "tokens").read_text().replace(kept, ""))
        wait_until(lambda: member.fenced is not None)
        assert "does not know the token" in str(member.fenced)


def remove_line(tokens: Path, line: str) -> None:
    partial = tokens.with_suffix(".part")
    partial.touch(0o600)
    partial.write_text(tokens.read_text().replace(line, ""))
    partial.replace(tokens)


def test_a_worker_that_shows_its_session_alone_ends_with_its_token(lab, monkeypatch):
    """Its heartbeats leave the token out: no push is applied after its streams have ended, and its lease ends."""
    endings, original = [], open_streams.ended
    monkeypatch.setattr(open_streams, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(open_streams, "ended", lambda why: endings.append(why.message) or original(why))
    with running_job(shards=1, workers=1, lab=WithoutTls(lab.path), lease_seconds=6.0) as job:
        cluster = Cluster(Session.join(job.config(transport="grpc")))
        job.exits.callback(cluster.close)
        model = torch.nn.Linear(3, 2)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.01)

        def step() -> None:
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()

        step()
        monkeypatch.setattr(cluster._session._client.security._own, "_file", None)
        for _ in range(3):
            step()
        # From now on: what went before may take its time.
        impatient = replace(cluster._session._config, reconnect_timeout_seconds=1.0)
        monkeypatch.setattr(cluster._session, "_config", impatient)
        monkeypatch.setattr(optimizer._model.pipeline, "reconnect_timeout_seconds", 1.0)
        remove_line(lab.path / "tokens", (lab.path / "worker.token").read_text())
        wait_until(lambda: any("token of the caller was removed" in each for each in endings))
        made = []

        def refused() -> bool:
            try:
                step()
            except (Unavailable, Fenced):
                return True
            made.append(step)
            return False

        # The coordinator's streams may end a moment before those of the shard.
        wait_until(refused)
        wait_until(lambda: job.gone(0) != "")
        wait_until(lambda: job.member(Role.SHARD, 0).stats.versions["model"] == 4 + len(made))


def test_a_coordinator_that_is_started_again_ends_sessions_with_their_tokens_too(lab, tmp_path):
    security = security_of(WithoutTls(lab.path), "coordinator")
    line = (lab.path / "worker.token").read_text()
    authorization, member = bearer(line.rpartition(":")[2].strip()), Member(Role.WORKER, 0, 5)
    joined = security.authenticate(authorization=authorization)
    session = CoordinatorAccess.of(security, tmp_path).sessions.issue(joined, member)
    # As with each heartbeat that leaves the token out: what is issued then ends with the first one.
    again = CoordinatorAccess.of(security, tmp_path)
    verifier = again.authorization.verifier
    caller = security.authenticate(session=session, verifier=verifier)
    assert (caller.token_digest, caller.session.incarnation) == (joined.token_digest, 5)
    remove_line(lab.path / "tokens", line)
    with pytest.raises(SessionEnded, match="session of worker 0 was made with is not in the token file"):
        security.authenticate(session=session, verifier=verifier)


@pytest.mark.parametrize(("transport", "nonfinite"), paired(["grpc", "bulk", "shm"], ["refuse", "skip"]))
def test_no_nan_of_a_worker_that_calls_it_finite_gets_into_the_parameters(lab, transport, nonfinite, monkeypatch):
    """Where callers prove who they are, their word on their gradients is not taken."""
    monkeypatch.setattr(RemoteModel, "_first_nonfinite", lambda *_: None)
    with running_job(shards=1, workers=1, lab=lab, consistency=MODES[0]) as job:
        cluster = job.cluster(transport=transport)
        model = torch.nn.Linear(3, 2)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, nonfinite=nonfinite)
        for wrong in (float("nan"), float("inf"), -float("inf")):
            before = model.weight.detach().clone()
            model(torch.ones(4, 3)).sum().backward()
            model.weight.grad[1, 2] = wrong
            if nonfinite == "refuse":
                with pytest.raises(NonFiniteGradient, match="from worker 0 holds NaN or infinity") as refused:
                    optimizer.step()
                assert refused.value.variable == "weight"
            else:
                optimizer.step()
            optimizer.zero_grad()
            optimizer.pull()
            assert torch.equal(model.weight, before)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        assert not torch.equal(model.weight, before)
        assert bool(model.weight.isfinite().all())


def test_a_member_speaks_for_itself_alone(lab):
    with running_job(shards=1, workers=2, lab=lab) as job:
        client = job.exits.enter_context(CoordinatorClient(job.address, security_of(lab, "worker")))
        one = job.exits.enter_context(Membership.join(client, JoinRequest(Role.WORKER, 0), 20.0))
        two = job.exits.enter_context(Membership.join(client, JoinRequest(Role.WORKER, 1), 20.0))
        stolen = client.sessions.of(one.member).token
        client.sessions.of(two.member).renew(stolen)
        with pytest.raises(PermissionDenied, match="names another member than its session"):
            client.barrier(two.member, 0, 0.0)
        client.sessions.forget(two.member)
        with pytest.raises(Unauthenticated, match="no session token"):
            client.barrier(two.member, 0, 0.0)
        client.sessions.of(two.member).renew(stolen[:-1] + b"]")
        with pytest.raises(Unauthenticated, match="not one of this job"):
            client.barrier(two.member, 0, 0.0)


class WithoutTls(CertificateFolder):
    """Tokens alone: beyond loopback a server refuses to start so."""

    def settings(self, name, **named):
        return replace(super().settings(name, **named), tls_cert=None, tls_key=None, tls_ca=None, require_client=False)


class WithoutClientCertificates(CertificateFolder):
    """Servers show certificates, everybody else tokens."""

    def settings(self, name, **named):
        settings = replace(super().settings(name, **named), require_client=False)
        return replace(settings, tls_cert=None, tls_key=None) if named.get("role") else settings


class WithoutTokens(CertificateFolder):
    """Certificates alone."""

    def settings(self, name, **named):
        return replace(super().settings(name, **named), token_file=None)


@pytest.mark.parametrize("kind", [WithoutTls, WithoutClientCertificates, WithoutTokens])
def test_each_way_to_prove_a_role_is_enough(lab, kind):
    with running_job(shards=1, workers=1, lab=kind(lab.path)) as job:
        train(job, transport="bulk")
        wait_until(lambda: job.gone(0) == "left")
        with CoordinatorClient(
            job.address, OFF if kind is WithoutTls else Security(SecuritySettings(tls_ca=lab.authority_file), WORKER)
        ) as client:
            refused = refusal(client)
        assert "no token" in refused or "does not accept the certificate of this process" in refused
