"""The hosts of a run: where a rank should be, by what address the others reach it, and what keeps them apart."""

import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_mnist.errors import UserError
from lit_mnist.surroundings import is_srun_task
from lit_mnist.wire import Member


def place(rank: int, devices: int, environ: Mapping[str, str]) -> str:
    """Where a rank should be, in words.

    Args:
        rank: 0 ... ranks-1.
        devices: Ranks on each host.
        environ: Where SLURM names the hosts.
    """
    node = rank // devices
    hosts = list(_hosts(environ.get("SLURM_STEP_NODELIST", ""))) if is_srun_task(environ) else []
    return f"rank {rank} ({hosts[node]})" if node < len(hosts) else f"rank {rank} (node rank {node})"


def facts(devices: int, backend: str | None) -> dict[str, Any]:
    """What the ranks are compared by when they meet (see `differences`)."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    return {
        "devices": devices,
        "name": address or "nothing",
        "unreachable": backend == "gloo" and not interface and (not address or address.startswith("127.")),
        "interfaces": interfaces(),
    }


def interfaces() -> dict[str, str]:
    """Names of this host's network interfaces, by IPv4 address; empty: those that have none."""
    return {_address_of(interface): interface for _, interface in socket.if_nameindex()}


def differences(members: Sequence[Member]) -> str | None:
    """Why ranks cannot work together, in one line; None: they can."""
    counts = {member.facts["devices"]: member for member in members}
    if len(counts) > 1:
        found = ", ".join(f"{member} {count}" for count, member in counts.items())
        return f"the hosts differ in processes: {found}: give the same --trainer.devices on each"
    hosts = {member.host: member for member in members}
    if len(hosts) > 1:
        for member in hosts.values():
            if member.facts["unreachable"]:
                interfaces = member.facts["interfaces"]  # by address
                outward = [name for address, name in interfaces.items() if address and not address.startswith("127.")]
                # Rank 0 comes to itself by any address.
                interface = interfaces.get(member.address) if member.rank else None
                interface = interface or next(iter(outward), "the interface to the others")
                return (
                    f"{member.host} takes its own name for {member.facts['name']}, which other hosts cannot reach: "
                    f"export GLOO_SOCKET_IFNAME={interface} there, or give it its address in /etc/hosts"
                )
    return None


def require_own_address(host: str) -> None:
    """Refuse an address that is not of this host, where rank 0 is and all others come to.

    Raises:
        UserError: If it is another's, or none.
    """
    here = socket.gethostname()
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"MASTER_ADDR={host} is no address that {here} knows ({error.strerror})") from None
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
                return
            except OSError:
                continue
    raise UserError(
        f"MASTER_ADDR={host} is not an address of {here}, where rank 0 is: is it left over from another job? unset it "
        "under srun, else give this host's"
    )


def _address_of(interface: str) -> str:
    """The IPv4 address of a network interface of this host; empty: it has none."""
    siocgifaddr = 0x8915  # linux/sockios.h
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, siocgifaddr, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
        except OSError:
            return ""


def _hosts(nodelist: str) -> Iterator[str]:
    """The hosts of a SLURM list such as `node[1-3,7],login`."""
    for prefix, ranges, suffix in re.findall(r"([^,\[]+)(?:\[([^\]]*)\]([^,\[]*))?", nodelist):
        for part in ranges.split(",") if ranges else [""]:
            first, _, last = part.partition("-")
            for number in range(int(first), int(last or first) + 1) if first else [None]:
                yield prefix if number is None else f"{prefix}{number:0{len(first)}d}{suffix}"
