"""A process warns of its certificates, and its authority, from the last tenth of their time on."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ps_protocol.security.expiry import ExpiryWatch
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import OFF, Security
from ps_protocol.security.settings import SecuritySettings
from ps_server.certs import Authority
from tests.support.certificates import write_pair

DAY = 86400.0


def held(folder: Path, authority: Authority, days: float, *others: Authority) -> Security:
    certificate, key = write_pair(folder, "worker", authority.issue("worker/w", (), days))
    (folder / "ca.pem").write_bytes(b"".join(each.own.certificate for each in (authority, *others)))
    settings = SecuritySettings(tls_cert=certificate, tls_key=key, tls_ca=folder / "ca.pem")
    return Security(settings, AccessRole.WORKER)


def test_a_certificate_is_warned_of_once_from_its_last_tenth_on_and_once_when_it_has_expired(tmp_path, caplog):
    security = held(tmp_path, Authority.make(days=1000.0), 100.0)
    end = security.held_certificates[0][1].not_after.timestamp()
    now = [end - 11 * DAY]
    watch = ExpiryWatch(security, lambda: now[0])
    with caplog.at_level(logging.WARNING):
        assert watch.ends() == 0.0
        assert caplog.messages == []
        now[0] = end - 9 * DAY
        assert [watch.ends() for _ in range(3)] == [end] * 3
        (soon,) = caplog.messages
        assert soon.startswith(f"a certificate expires soon: the certificate in {tmp_path}/worker.pem, on 20")
        now[0] = end + 1
        assert [watch.ends() for _ in range(3)] == [end] * 3
        assert [text.partition(":")[0] for text in caplog.messages[1:]] == ["a certificate has expired"]
        write_pair(tmp_path, "worker", Authority.make(days=1000.0).issue("worker/w", (), 400.0))
        assert watch.ends() == 0.0


def test_the_authority_counts_too_and_of_several_the_one_that_ends_last(tmp_path):
    short, long = Authority.make("lab", days=10.0), Authority.make("lab", days=1000.0)
    alone = held(tmp_path, short, 100.0)
    end = alone.held_certificates[1][1].not_after.timestamp()
    late = end - DAY / 2
    assert ExpiryWatch(alone, lambda: late).ends() == end
    assert ExpiryWatch(held(tmp_path, short, 100.0, long), lambda: late).ends() == 0.0
    # Another authority does not sign what this process shows.
    assert ExpiryWatch(held(tmp_path, short, 100.0, Authority.make("other")), lambda: late).ends() == end


def test_without_tls_nothing_expires():
    assert ExpiryWatch(OFF, lambda: 1e12).ends() == 0.0


@pytest.mark.parametrize("days", [1.0, 365.0])
def test_a_new_certificate_is_not_warned_of(tmp_path, days):
    assert ExpiryWatch(held(tmp_path, Authority.make(), days)).ends() == 0.0
