"""psctl with certificates and tokens: makes them, uses them, and says what is missing."""

from functools import partial

import pytest
from click.testing import CliRunner

from ps_protocol.client import connection
from ps_protocol.cluster.view import Role
from ps_protocol.rpc.reach import why_unreachable
from ps_protocol.security import expiry
from ps_server.certs import CertificateFolder
from ps_server.cli.psctl import main
from tests.support.certificates import made_folder
from tests.support.shards import wait_until
from tests.worker.jobs import running_job

NOTHING = dict.fromkeys(("PS_COORDINATOR", "PS_TLS_CA", "PS_TLS_CERT", "PS_TLS_KEY", "PS_TOKEN_FILE", "PS_TOKEN"))


def psctl(*arguments: str, **environment: str | None):
    return CliRunner().invoke(main.main, arguments, env={**NOTHING, **environment})


def environment(folder: CertificateFolder, name: str) -> dict[str, str]:
    certificate, key = folder.pair(name)
    return {
        "PS_TLS_CA": str(folder.authority_file),
        "PS_TLS_CERT": str(certificate),
        "PS_TLS_KEY": str(key),
        "PS_TOKEN_FILE": str(folder.path / f"{name}.token"),
    }


def test_certs_are_made_renewed_and_tokens_replaced(tmp_path):
    folder = tmp_path / "lab"
    made = psctl("certs", "init", str(folder), "--shards", "2", "--host", "example.org", "--host", "192.0.2.1")
    assert made.exit_code == 0, made.output
    assert {str(path) for path in folder.iterdir()} == set(made.output.split())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    again = psctl("certs", "init", str(folder))
    assert again.exit_code == 2
    assert "--renew" in again.output
    renewed = psctl("certs", "init", str(folder), "--renew", "--shards", "2")
    assert renewed.exit_code == 0, renewed.output
    kept = {name for name, data in before.items() if (folder / name).read_bytes() == data}
    assert {"ca.pem", "ca.key", "tokens", "admin.token"} <= kept
    assert "shard-1.pem" not in kept
    old = (folder / "tokens").read_text()
    assert psctl("certs", "init", str(folder), "--new-tokens").exit_code == 0
    assert old in (folder / "tokens").read_text()
    assert psctl("certs", "init", str(folder), "--new-tokens", "--drop-old").exit_code == 0
    assert old not in (folder / "tokens").read_text()
    assert psctl("certs", "init", str(folder), "--drop-old").exit_code == 2


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    folder = made_folder(tmp_path_factory.mktemp("lab"), 1)
    with running_job(shards=1, workers=0, lab=folder) as job:
        yield job, folder


def test_status_is_for_every_role_and_the_mode_for_admins(secured):
    job, folder = secured
    at = ("--coordinator", job.address)
    for role in ("admin", "worker", "reader", "viewer"):
        seen = psctl("status", *at, **environment(folder, role))
        assert seen.exit_code == 0, seen.output
        changed = psctl("mode", "ssp", *at, **environment(folder, role))
        if role == "admin":
            assert changed.exit_code == 0, changed.output
        else:
            assert changed.exit_code == 1
            assert "SetConsistency needs the role admin" in changed.output


def test_what_is_missing_is_said_in_one_line(secured, monkeypatch, tmp_path):
    # A busy machine answers late.
    monkeypatch.setattr(connection, "why_unreachable", partial(why_unreachable, timeout_seconds=60.0))
    job, folder = secured
    at = ("--coordinator", job.address)
    bare = psctl("status", *at)
    assert (bare.exit_code, bare.output.count("\n")) == (1, 1)
    assert "speaks TLS, and this process does not" in bare.output
    waits = psctl("wait", "--for", "finished", *at)
    assert waits.exit_code == 1
    assert "speaks TLS, and this process does not" in waits.output
    monkeypatch.setattr("ps_protocol.times.HINT_SECONDS", 0.5)
    follows = psctl("weights", "follow", "policy", "--dir", str(tmp_path), *at)
    assert (follows.exit_code, follows.output.count("\n")) == (1, 1)
    assert "speaks TLS, and this process does not" in follows.output
    given = environment(folder, "viewer")
    without_certificate = psctl("status", *at, **{**given, "PS_TLS_CERT": None, "PS_TLS_KEY": None})
    assert without_certificate.exit_code == 1
    assert "does not accept the certificate of this process" in without_certificate.output
    (folder.path / "viewer.token").chmod(0o644)
    open_file = psctl("status", *at, **given)
    (folder.path / "viewer.token").chmod(0o600)
    assert open_file.exit_code == 2
    assert f"chmod 600 {folder.path}/viewer.token" in open_file.output


def test_flags_go_before_the_environment(secured):
    job, folder = secured
    flags = ("--tls-ca", str(folder.authority_file), "--tls-cert", str(folder.pair("admin")[0]))
    flags += ("--tls-key", str(folder.pair("admin")[1]), "--token-file", str(folder.path / "admin.token"))
    done = psctl(*flags, "status", "--coordinator", job.address, PS_TLS_CA="/nowhere")
    assert done.exit_code == 0, done.output


def test_certificates_that_expire_soon_are_a_note_of_the_check_and_no_failure(secured, monkeypatch, caplog):
    job, folder = secured
    monkeypatch.setattr(expiry, "LAST_PART", 2.0)
    wait_until(lambda: job.member(Role.SHARD, 0).stats.certificate_ends > 0)
    at = {"PS_COORDINATOR": job.address, **environment(folder, "viewer")}
    plain = psctl("status", **at)
    assert "the certificate of shard 0 expires in " in " ".join(plain.output.split())
    checked = psctl("status", "--check", **at)
    assert checked.exit_code == 0, checked.output
    told = " ".join([*caplog.messages, checked.output])
    assert "the certificate of shard 0 expires in " in told
    assert f"a certificate expires soon: the certificate in {folder.path}/viewer.pem" in told
