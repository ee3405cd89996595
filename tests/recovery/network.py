"""Three hosts as network namespaces with a link between each two, made and cut by plain ``ip`` commands."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess

from tests.recovery.inside import NAMESPACE

HOSTS = ("coordinator", "shard", "worker")


def why_no_network() -> str:
    """Why there can be none here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces can be made by root only"
    if shutil.which("ip") is None:
        return "there is no command ip here"
    name = f"ps{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], stderr=subprocess.PIPE, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


class Network:
    """Each host has one address, and a way of its own to each other host. Nothing of the machine's network is touched.

    Every link leads through a switch of its own; who is taken from it hears nothing any more, and is told nothing.
    """

    def __init__(self) -> None:
        self._names = {host: f"ps{os.getpid()}-{host}" for host in (*HOSTS, "switches")}
        for name in self._names.values():
            _ip("netns", "add", name)
        for host in HOSTS:
            self._in(host, "link set lo up")
            self._in(host, f"addr add {self.address(host)}/32 dev lo")
        for first, second in itertools.combinations(HOSTS, 2):
            switch = _switch(first, second)
            self._in("switches", f"link add {switch} type bridge")
            self._in("switches", f"link set {switch} up")
            self._plug(first, second)
            self._plug(second, first)

    def _plug(self, host: str, other: str) -> None:
        port, device = f"{host[0]}{other[0]}", f"to-{other}"
        name = self._names[host]
        self._in("switches", f"link add {port} type veth peer name {device} netns {name}")
        self._in("switches", f"link set {port} master {_switch(host, other)} up")
        self._in(host, f"link set {device} up")
        self._in(host, f"route add {self.address(other)}/32 dev {device} src {self.address(host)}")

    def address(self, host: str) -> str:
        return f"10.0.0.{HOSTS.index(host) + 1}"

    def inside(self, host: str) -> dict[str, str]:
        """The environment of a process of this host."""
        return {NAMESPACE: f"/run/netns/{self._names[host]}"}

    def cut(self, host: str, other: str) -> None:
        self._in("switches", f"link set {host[0]}{other[0]} nomaster")

    def heal(self, host: str, other: str) -> None:
        self._in("switches", f"link set {host[0]}{other[0]} master {_switch(host, other)}")

    def close(self) -> None:
        for name in self._names.values():
            _ip("netns", "del", name)

    def _in(self, host: str, command: str) -> None:
        _ip("-n", self._names[host], *command.split())


def _switch(*hosts: str) -> str:
    return "-".join(sorted(host[0] for host in hosts))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
