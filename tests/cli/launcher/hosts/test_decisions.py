"""Hosts as they are written, where processes go, which variables are sent, and what a failed connection means: pure."""

from __future__ import annotations

import pytest

from ps_protocol.errors import ConfigError, Unavailable
from ps_protocol.model.spec import Consistency
from ps_server.cli.launcher.events import ProcessName, ProcessRole
from ps_server.cli.launcher.hosts.fleet import PROGRAM, connect_command, contents
from ps_server.cli.launcher.hosts.job import check_listening, passed
from ps_server.cli.launcher.hosts.link import failure
from ps_server.cli.launcher.hosts.messages import Ready
from ps_server.cli.launcher.hosts.placing import (
    HostEntry,
    addresses,
    all_slots,
    hosts_of,
    hosts_of_file,
    shares_hosts,
    spread,
    threads,
)
from ps_server.cli.launcher.programs import Programs, Script


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("host0", [HostEntry("host0")]),
        ("host0,host1:4", [HostEntry("host0"), HostEntry("host1", 4)]),
        ("me@host0:0, 10.0.0.5", [HostEntry("me@host0", 0), HostEntry("10.0.0.5")]),
        ("a,b:2,a:3", [HostEntry("a", 4), HostEntry("b", 2)]),
    ],
)
def test_hosts_of_the_command_line(text, entries):
    assert list(hosts_of(text)) == entries


@pytest.mark.parametrize("text", ["", "a,,b", "a:x", "a:-1", "a:5000", "-oProxyCommand=x", "a b", "a;b", "a:1:2", "ä"])
def test_what_is_no_host_is_refused(text):
    if text == "ä":  # a name in another script is one
        assert hosts_of(text)
        return
    with pytest.raises(ConfigError, match="--hosts"):
        hosts_of(text)


def test_a_host_file():
    text = "# all\n\nhost0 slots=4 address=10.0.0.5  # first\nhost1:2\nhost0 slots=1\nhost2 address=fe80::1\n"
    assert list(hosts_of_file(text, "f")) == [
        HostEntry("host0", 5, "10.0.0.5"),
        HostEntry("host1", 2),
        HostEntry("host2", 1, "fe80::1"),
    ]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a\nb slots=x", "line 2: 'x' is not a number of slots"),
        ("a max_slots=2", "line 1: 'max_slots=2' is not known"),
        ("a address=b:c:d", "is not an address"),
        ("a address=1\na address=2", "two addresses"),
        ("# nothing", "no host is named"),
    ],
)
def test_a_line_of_a_host_file_that_is_wrong_is_named(text, what):
    with pytest.raises(ConfigError, match=what):
        hosts_of_file(text, "f")


def place(role, index=0):
    return ProcessName(role, index)


def test_the_coordinator_is_first_shards_are_dealt_and_workers_fill_slots():
    hosts = hosts_of("a:2,b:3")
    placed = spread(hosts, 3, 4, 1)
    by_name = {str(process): host.name for process, host in placed.items()}
    assert by_name == {
        "coordinator": "a",
        "shard 0": "a",
        "shard 1": "b",
        "shard 2": "a",
        "worker 0": "a",
        "worker 1": "a",
        "worker 2": "b",
        "worker 3": "b",
        "evaluator 0": "a",
    }
    assert all_slots(hosts) == 5
    assert [threads(host, placed, 8) for host in hosts] == [4, 4]
    with pytest.raises(ConfigError, match="more workers than slots"):
        spread(hosts, 1, 6)


@pytest.mark.parametrize(
    ("hosts", "workers", "shared"),
    [("a:2,b:3", 4, True), ("a,b:2", 3, True), ("a,b", 2, False), ("a:4", 4, False), ("a:0,b:4", 4, True)],
)
def test_it_is_noticed_where_a_host_of_several_has_several_workers(hosts, workers, shared):
    assert shares_hosts(spread(hosts_of(hosts), 2, workers)) is shared


@pytest.mark.parametrize(
    ("asked", "inherited", "shared", "told"),
    [
        (None, {}, False, None),
        (None, {}, True, "sync"),
        (None, {"PS_PER_HOST": "0"}, True, "0"),
        (None, {"PS_PER_HOST": "1"}, False, "1"),
        (False, {"PS_PER_HOST": "1"}, True, "0"),
        (True, {}, False, "1"),
    ],
)
def test_what_the_command_line_says_of_pushing_together_is_over_the_variable_and_that_over_the_hosts(
    asked, inherited, shared, told
):
    programs = Programs(Script(("python", "train.py")), Consistency(), 1, 2, 1, per_host=asked, shares_hosts=shared)
    assert "PS_PER_HOST" not in programs.environment(place(ProcessRole.SHARD), "x:1", {})
    assert programs.environment(place(ProcessRole.WORKER), "x:1", inherited).get("PS_PER_HOST") == told


def ready(server, client="10.0.0.9"):
    return Ready(2, client, server)


@pytest.mark.parametrize(
    ("found", "known"),
    [
        ({"a": ready("10.0.0.1"), "b": ready("10.0.0.2")}, ["10.0.0.1", "10.0.0.2"]),
        # ps-run is on a itself, and came to it over loopback.
        ({"a": ready("127.0.0.1", "127.0.0.1"), "b": ready("10.0.0.2")}, ["10.0.0.9", "10.0.0.2"]),
        ({"a": ready("127.0.0.1", "127.0.0.1"), "b": ready("127.0.0.2", "127.0.0.1")}, ["127.0.0.1", "127.0.0.2"]),
        ({"a": ready("::1", "::1"), "b": ready("fd00::2", "fd00::1")}, ["fd00::1", "fd00::2"]),
    ],
)
def test_addresses_come_from_the_connections(found, known):
    assert list(addresses(hosts_of("a,b"), found).values()) == known


def test_an_address_of_the_host_file_wins_and_one_that_nobody_knows_is_asked_for():
    hosts = (HostEntry("a", 1, "127.0.0.1"), HostEntry("b"))
    assert addresses(hosts, {"a": ready("10.0.0.1"), "b": ready("10.0.0.2")}) == {"a": "127.0.0.1", "b": "10.0.0.2"}
    with pytest.raises(ConfigError, match=r"b is not known.*address=10.0.0.5"):
        addresses(hosts_of("a,b"), {"a": ready("10.0.0.1", ""), "b": ready("", "")})
    with pytest.raises(ConfigError, match="b is not known"):
        addresses(hosts_of("a,b"), {"a": ready("10.0.0.1", ""), "b": ready("127.0.0.1", "127.0.0.1")})


def test_variables_that_are_sent():
    environ = {"PS_TRANSPORT": "grpc", "PS_RUN_SHARDS": "2", "HOME": "/root", "OMP_NUM_THREADS": "3", "A": "1"}
    assert passed(environ, ()) == {"PS_TRANSPORT": "grpc", "OMP_NUM_THREADS": "3"}
    assert passed(environ, ("A", "B=2=3", "PS_TRANSPORT=shm", "C=")) == {
        "PS_TRANSPORT": "shm",
        "OMP_NUM_THREADS": "3",
        "A": "1",
        "B": "2=3",
        "C": "",
    }
    for text in ("D", "=1", ""):
        with pytest.raises(ConfigError, match="no such variable"):
            passed(environ, (text,))


def test_files_of_certificates_are_sent_by_their_contents(tmp_path):
    (tmp_path / "key").write_bytes(b"secret")
    plain, files = contents({"PS_TLS_KEY": str(tmp_path / "key"), "PS_JOB": "job"})
    assert (plain, files) == ({"PS_JOB": "job"}, {"PS_TLS_KEY": b"secret"})


@pytest.mark.parametrize(
    ("code", "said", "kind", "words"),
    [
        (255, "x\r\nHost key verification failed.\r\n", ConfigError, "known_hosts"),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", ConfigError, "ssh-keygen -R"),
        (255, "u@h: Permission denied (publickey).", ConfigError, "ssh-copy-id"),
        (255, "ssh: Could not resolve hostname h: Name or service not known", ConfigError, "correct the name"),
        (255, "ssh: connect to host h port 22: Connection refused", Unavailable, "Connection refused"),
        (255, "", Unavailable, "exit code 255"),
        (None, "", Unavailable, "no answer"),
        (127, "bash: /py: No such file or directory", ConfigError, "no interpreter /py"),
        (1, "/py: Error while finding module: No module named 'ps_server'", ConfigError, "not installed for /py"),
        (3, "odd \x1b[2J", ConfigError, r"ended with code 3.*odd \\x1b"),
    ],
)
def test_a_failed_connection_names_the_host_and_a_remedy(code, said, kind, words):
    error = failure("h", "/py", code, said)
    assert type(error) is kind
    assert error.message.startswith("h: ")
    assert error.remedy
    with pytest.raises(kind, match=words):
        raise error


def test_the_command_of_ssh_has_the_users_options_first_and_asks_nothing():
    command = connect_command("ssh -p 2222 -o BatchMode=no", "me@h", "/a b/python")
    assert command[:5] == ["ssh", "-p", "2222", "-o", "BatchMode=no"]
    assert command.index("BatchMode=yes") > 5
    assert command[-5:] == ["me@h", "'/a b/python'", "-P", "-m", PROGRAM]
    assert connect_command("/opt/reach --fast", "h", "py") == ["/opt/reach", "--fast", "h", "py", "-P", "-m", PROGRAM]


@pytest.mark.parametrize(
    ("address", "environment", "tls", "allowed"),
    [
        ("127.0.0.2", {}, False, True),
        ("10.0.0.1", {}, False, False),
        ("10.0.0.1", {}, True, True),
        ("10.0.0.1", {"PS_INSECURE": "1"}, False, True),
        ("10.0.0.1", {"PS_TLS_CERT": "c", "PS_TLS_CA": "a", "PS_TLS_KEY": "k"}, False, False),
        ("10.0.0.1", {"PS_TLS_CERT": "c", "PS_TOKEN_FILE": "t"}, False, True),
    ],
)
def test_beyond_loopback_a_job_needs_tls_and_tokens(address, environment, tls, allowed):
    if allowed:
        check_listening({"h": address}, environment, tls=tls)
        return
    with pytest.raises(ConfigError, match=r"on h would listen on 10.0.0.1.*--tls"):
        check_listening({"h": address}, environment, tls=tls)
