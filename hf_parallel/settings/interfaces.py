"""Find the network interface that leads to the other machines of a run.

gloo takes the one that the host name resolves to. On many machines that is loopback, docker0 or nothing: one machine then says
`connectFullMesh failed`, and the others wait.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hf_parallel.errors import ConfigError


GLOO: Final = "GLOO_SOCKET_IFNAME"
NCCL: Final = "NCCL_SOCKET_IFNAME"
# Bridges to the containers and virtual machines of one host; each host has the same.
INNER: Final = re.compile(r"(docker|cni|podman|virbr|lxcbr|lxdbr|flannel|cali|veth|br-[0-9a-f]{12}$)")
ELSEWHERE: Final = "192.0.2.1"  # reserved for documentation (RFC 5737): nothing is sent, only the route is looked up


@dataclass(frozen=True)
class Network:
    """Facts about this machine's network.

    Args:
        addresses: Addresses of each interface that is up.
        host: This machine's name.
        own: Address that the name resolves to; None if it does not.
        to_first: Own address on the way to the first machine; None if there is no way.
        outwards: Own address on the way to the world; None if there is no way.
    """

    addresses: Mapping[str, Sequence[str]]
    host: str
    own: str | None
    to_first: str | None
    outwards: str | None

    def of(self, address: str | None) -> str | None:
        """The interface with this address, if it leads to other machines."""
        found = next((name for name, addresses in self.addresses.items() if address in addresses), None)
        return None if address is None or found is None or not _leads_out(found, address) else found

    @property
    def outer(self) -> list[str]:
        """The interfaces that may lead to other machines."""
        return [name for name, found in self.addresses.items() if any(_leads_out(name, each) for each in found)]


def this_network(first: str) -> Network:
    """Find out about this machine's network.

    Args:
        first: Name or address of the first machine.
    """
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = {
        name: [one.address.partition("%")[0] for one in found if one.family in families]
        for name, found in psutil.net_if_addrs().items()
        if name in up
    }
    host = socket.gethostname()
    return Network(addresses, host, resolved(host), address_towards(first), address_towards(ELSEWHERE))


def resolved(host: str) -> str | None:
    """The first address of a name, None without one."""
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return None


def address_towards(host: str) -> str | None:
    """Own address of packets to a machine, None if no route leads there; nothing is sent."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def is_on_several_machines(environ: Mapping[str, str]) -> bool:
    """Whether the launcher of this process says that other machines take part."""
    local, world = environ.get("LOCAL_WORLD_SIZE", ""), environ.get("WORLD_SIZE", "")
    return local.isdigit() and world.isdigit() and 0 < int(local) < int(world)


def chosen_interface(environ: Mapping[str, str], network: Network) -> str | None:
    """The interface that gloo should be told to use; None if what it does by itself is right, or the user has chosen.

    Raises:
        ConfigError: Several could be meant.
    """
    if environ.get(GLOO):
        return None
    for_nccl = environ.get(NCCL, "").removeprefix("=")
    if for_nccl in network.addresses:
        return for_nccl
    if network.of(network.own) is not None:
        return None
    outer = network.outer
    found = network.of(network.to_first) or (outer[0] if len(outer) == 1 else network.of(network.outwards))
    if found is None and outer:
        place = f"resolves to {network.own}" if network.own else "does not resolve"
        raise ConfigError(
            f"{GLOO} is not set, and the host name {network.host} {place}, which other machines cannot reach: it could be any of "
            f"{', '.join(outer)}. Set {GLOO} on {network.host} to the one that leads to the other machines, or give the address "
            "of machine 0 there as main_process_ip."
        )
    return found


def _leads_out(name: str, address: str) -> bool:
    place = ipaddress.ip_address(address.partition("%")[0])
    return not (place.is_loopback or place.is_link_local or INNER.match(name))
