"""A network of its own for the ranks of a pipeline: a host each, behind slow links.

Linux network namespaces: one a rank, with a virtual interface, all on one bridge in a
further namespace. What a rank sends to another passes a link of a given rate, one for
each pair and direction, however a system sends it. Needs root, `ip` and `tc`
(iproute2). Nothing outside the namespaces is touched, and all is gone at the end.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from rrfp_jax.errors import ConfigError

INTERFACE = "eth0"
_PORT = 29_500  # nobody else is on these hosts
_BURST = "3000"  # bytes, two packets: more would let a payload pass at once


class Hosts:
    """The hosts of a network.

    Attributes:
      names: of the namespaces.
      addresses: of each, on the network.
      meeting: an address at the first, HOST:PORT, that all processes can meet at.
    """

    def __init__(self, prefix: str, count: int) -> None:
        self.names = [f"{prefix}-{i}" for i in range(count)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(count)]
        self.meeting = f"{self.addresses[0]}:{_PORT}"

    def command(self, host: int, command: list[str]) -> list[str]:
        """Returns a command that runs another one on a host."""
        return ["ip", "netns", "exec", self.names[host], *command]


def is_possible() -> bool:
    """Whether networks can be made here."""
    try:
        check()
        with made(1, 1e6):
            return True
    except (ConfigError, subprocess.CalledProcessError):
        return False


def check() -> None:
    """Checks that networks can be made here.

    Raises:
      ConfigError: they cannot.
    """
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        why = f"{' and '.join(missing)} missing" if missing else "not root"
        raise ConfigError(
            f"slow links need root, ip and tc; here: {why}.\n"
            "  Install iproute2 and run as root, or set --links=none."
        )


@contextlib.contextmanager
def made(count: int, bytes_per_s: float) -> Iterator[Hosts]:
    """Makes a network, and removes it at the end.

    Args:
      count: of its hosts.
      bytes_per_s: that each can send to each other one.

    Raises:
      subprocess.CalledProcessError: the kernel refuses.
    """
    prefix, rate = f"rrfp{os.getpid()}", f"{bytes_per_s * 8:.0f}bit"
    hub, hosts = f"{prefix}-hub", Hosts(prefix, count)
    try:
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge0", "up")
        for i, name in enumerate(hosts.names):
            port = f"port{i}"
            _ip("netns", "add", name)
            peer = ("peer", "name", INTERFACE, "netns", name)
            _ip("-n", hub, "link", "add", port, "type", "veth", *peer)
            _ip("-n", hub, "link", "set", port, "master", "bridge0", "up")
            address = f"{hosts.addresses[i]}/24"
            _ip("-n", name, "address", "add", address, "dev", INTERFACE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _shape(name, [a for a in hosts.addresses if a != hosts.addresses[i]], rate)
        yield hosts
    finally:
        for name in (*hosts.names, hub):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _shape(host: str, others: Sequence[str], rate: str) -> None:
    """Gives a host a link of its own to each other one: a token bucket by address."""
    device = ("dev", INTERFACE)
    # Whole payloads as one packet would pass at once, and only what follows would wait.
    _ip("-n", host, "link", "set", *device, "gso_max_segs", "1", "gso_max_size", "1500")
    _run("tc", "-n", host, "qdisc", "add", *device, "root", "handle", "1:", "htb")
    for number, address in enumerate(others, start=1):
        classid = ("parent", "1:", "classid", f"1:{number:x}")
        bucket = ("htb", "rate", rate, "burst", _BURST, "cburst", _BURST)
        _run("tc", "-n", host, "class", "add", *device, *classid, *bucket)
        flow = ("u32", "match", "ip", "dst", address, "flowid", f"1:{number:x}")
        of = ("parent", "1:", "protocol", "ip", "prio", "1")
        _run("tc", "-n", host, "filter", "add", *device, *of, *flow)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
