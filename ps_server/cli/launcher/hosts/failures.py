"""What a connection to a host that failed means, as one typed error with a remedy. Pure."""

from __future__ import annotations

from ps_protocol.errors import ConfigError, PsError, Unavailable
from ps_protocol.text import printable

SSH_FAILED = 255
"""The exit code of ssh for a failure of its own."""

_TAIL_CHARACTERS = 600

_SSH_REMEDIES = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "find out why its key changed; ssh-keygen -R removes the old one"),
    ("Host key verification failed", "check the host's key, and add it to known_hosts by one ssh to it by hand"),
    ("Permission denied", "let this user log in with a key that asks for no password (ssh-copy-id, ssh-agent)"),
    ("Could not resolve hostname", "correct the name, or give it an entry in ~/.ssh/config"),
)
"""What ssh says where a setting has to change; everything else may pass."""


def failure(host: str, python: str, code: int | None, said: str) -> PsError:
    """Why there is no program of ps-run on ``host``: ``code`` is the exit code of ssh, ``said`` what it wrote.

    ``code`` None: it was ended, because nothing came.
    """
    words = " / ".join(printable(line) for line in said.strip()[-_TAIL_CHARACTERS:].splitlines())
    if code is None:
        return Unavailable(
            f"{host}: no answer over ssh", actual=words, remedy="see whether ssh reaches it, or give --ssh its options"
        )
    if code == SSH_FAILED:
        for sign, remedy in _SSH_REMEDIES:
            if sign in said:
                return ConfigError(f"{host}: ssh failed", actual=words, remedy=remedy)
        return Unavailable(
            f"{host}: ssh failed",
            actual=words or f"exit code {code}",
            remedy="see whether its sshd runs and is reached; --ssh 'ssh -p 2222' gives options",
        )
    if code in (126, 127):
        return ConfigError(
            f"{host}: no interpreter {python}", actual=words, remedy="name the one of that host with --python"
        )
    if "ModuleNotFoundError" in said or "No module named" in said:
        return ConfigError(
            f"{host}: torch-ps is not installed for {python}, or is another version",
            actual=words,
            remedy="install the same torch-ps[server] there, or name its interpreter with --python",
        )
    return ConfigError(
        f"{host}: ps-run's program ended with code {code}",
        actual=words,
        remedy=f"try it by hand: ssh {host} {python} -m ps_server.cli.launcher.hosts.host_program < /dev/null",
    )


def other_version(host: str, theirs: str, ours: str) -> PsError:
    """``host`` has another torch-ps."""
    return ConfigError(
        f"{host} has another version of torch-ps",
        expected=ours,
        actual=printable(theirs),
        remedy="install the same version on every host",
    )
