"""Whether the machines of a run reach each other, how fast, and whether they are alike: `doctor` for several machines."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hf_parallel.dry_run.doctor import Check, package_version
from hf_parallel.dry_run.peer_links import Answerer, gather, join, measure
from hf_parallel.errors import ConfigError
from hf_parallel.settings.interfaces import GLOO, Network, chosen_interface, this_network
from hf_parallel.settings.values import spelled


COMPARED: Final = ("hf_parallel", "torch", "transformers", "accelerate")
OWN_KEYS: Final = ("machine_rank", "gpu_ids")  # may differ between the files of two machines
SLOW_TRIP_S: Final = 2e-3  # a pipeline of 8 microbatches waits for tens of them in a step
SLOW_BYTES_S: Final = 125e6  # 1 Gbit/s: 7B gradients in bf16 take two minutes
CLOCKS_S: Final = 1.0


@dataclass(frozen=True)
class Place:
    """The run's machines, and which of them this is.

    Args:
        rank: Number of this machine.
        size: Number of machines.
        address: Address of machine 0.
        port: Port on machine 0.
    """

    rank: int
    size: int
    address: str
    port: int


def place_of(accelerate: Mapping[str, Any], given: Mapping[str, Any]) -> Place:
    """Find out from a settings file where the machines meet.

    Args:
        accelerate: The file.
        given: Options that replace what it says; None is not given.

    Raises:
        ConfigError: They do not say it.
    """
    said = {**accelerate, **{key: value for key, value in given.items() if value is not None}}
    size, rank, port = (said.get(key) for key in ("num_machines", "machine_rank", "main_process_port"))
    size, rank, port = (1 if size is None else size), (0 if rank is None else rank), (29500 if port is None else port)
    if not isinstance(size, int) or size < 2:
        raise ConfigError(
            f"num_machines={spelled(size)}: there are no other machines. Set num_machines to the number of machines that take part."
        )
    if not isinstance(rank, int) or not 0 <= rank < size:
        raise ConfigError(
            f"machine_rank={spelled(rank)} with num_machines={size}: machines count from 0 to {size - 1}. Give each its "
            "number with --machine-rank."
        )
    if not isinstance(port, int) or not 0 < port < 1 << 16:
        raise ConfigError(
            f"main_process_port={spelled(port)}: expected a port that is the same everywhere. Set it to 29500."
        )
    address = said.get("main_process_ip")
    if not address:
        raise ConfigError(
            f"num_machines={size} without main_process_ip: nobody knows where machine 0 is. Set main_process_ip to its name or address."
        )
    return Place(rank, size, str(address), port)


def examine_peers(
    place: Place,
    accelerate: Mapping[str, Any],
    wait_s: float,
    say: Callable[[str], None] = lambda text: None,
) -> list[Check]:
    """Meet the other machines and measure; each runs this at the same time, and all find the same.

    Args:
        place: Place of this machine in the run.
        accelerate: The settings file.
        wait_s: Seconds to wait for others.
        say: Told what is done.

    Raises:
        ConfigError: Machine 0 cannot be reached, or its port cannot be used; with the cause.
    """
    network = this_network(place.address)
    interface = os.environ.get(GLOO) or chosen_interface(os.environ, network)
    answerer = Answerer(own_address(network, interface))
    say(f"waiting for the {place.size} machines")
    if place.rank:
        table = join(place.address, place.port, place.rank, place.size, wait_s)
    else:
        table = gather(place.address, place.port, place.size, wait_s)
    facts = facts_of(accelerate, network, interface) | {"address": answerer.address, "port": answerer.port}
    try:
        machines = table.exchange(facts, wait_s + 10.0)
        places = [None if one is None else (one["address"], one["port"]) for one in machines]
        found = measure(table, place.rank, places, say)
    except OSError as error:
        raise ConfigError(
            f"machine 0 at {place.address} was lost ({error}). Read what `hf-parallel doctor` says there, and start "
            "it on all machines again."
        ) from None
    finally:
        table.close()
        answerer.close()
    return [*meeting_checks(machines, place, wait_s), *alike_checks(machines), *link_checks(machines, found)]


def own_address(network: Network, interface: str | None) -> str:
    """The address at which gloo will listen."""
    found = [each for each in network.addresses.get(interface or "", ()) if not each.startswith("fe80")]
    here = [each for addresses in network.addresses.values() for each in addresses]
    return found[0] if found else network.own if network.own in here else "127.0.0.1"


def facts_of(accelerate: Mapping[str, Any], network: Network, interface: str | None) -> dict[str, Any]:
    """Collect the facts that are compared between machines."""
    shared = {str(key): value for key, value in accelerate.items() if key not in OWN_KEYS}
    digests = {
        key: hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]
        for key, value in shared.items()
    }
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    versions |= {name: package_version(name) or "not installed" for name in COMPARED}
    return {"host": network.host, "interface": interface, "versions": versions, "settings": digests}


def meeting_checks(machines: Sequence[Any], place: Place, wait_s: float) -> Iterator[Check]:
    """Check which machines came."""
    lost = [rank for rank, one in enumerate(machines) if one is None]
    here = ", ".join(f"{_name(machines, rank)} ({one['address']})" for rank, one in enumerate(machines) if one)
    if lost:
        missing = ", ".join(f"machine {rank}" for rank in lost)
        fix = (
            f"Start `hf-parallel doctor --peers FILE --machine-rank {lost[0]}` there at the same time, with its own number; if it "
            f"says that machine 0 cannot be reached, open port {place.port} and look at main_process_ip={place.address}."
        )
        yield Check(
            "machines", "error", f"{missing} of {place.size} did not come within {wait_s:g} s; here are {here}", fix
        )
    else:
        yield Check("machines", "ok", f"{place.size} of {place.size}: {here}")


def alike_checks(machines: Sequence[Any]) -> Iterator[Check]:
    """Versions and settings, which must be the same on all machines."""
    here = [one for one in machines if one]
    for name in ("python", *COMPARED):
        found = {one["host"]: one["versions"][name] for one in here}
        if len(set(found.values())) > 1:
            text = "differs: " + ", ".join(f"{version} on {host}" for host, version in found.items())
            yield Check(name, "error", text, f"Install the same {name} on all machines.")
    keys = sorted({key for one in here for key in one["settings"]})
    odd = [key for key in keys if len({one["settings"].get(key) for one in here}) > 1]
    if odd:
        fix = "Copy one file to all machines, and give each its number with --machine_rank."
        yield Check("settings", "error", f"the files of the machines differ in {', '.join(odd)}", fix)


def link_checks(machines: Sequence[Any], found: Sequence[Any]) -> Iterator[Check]:
    """Each link between two machines: whether it works, how long a message takes, how much it carries, and the clocks."""
    for rank, mine in enumerate(found):
        for other, probed in (mine or {"probes": {}})["probes"].items():
            first, second = _name(machines, int(other)), _name(machines, rank)
            if probed["error"]:
                place = (
                    f"{machines[int(other)]['address']} ({machines[int(other)]['interface'] or 'of its host name'})"
                )
                cause, _, fix = probed["error"].partition(". ")
                yield Check(f"{first} - {second}", "error", f"{second} cannot reach {place}: {cause}", fix)
            else:
                yield from _link(first, second, probed, mine["streams"].get(other))


def _link(first: str, second: str, probed: Mapping[str, Any], stream: Sequence[float] | None) -> Iterator[Check]:
    name, trip, clock = f"{first} - {second}", probed["round_trip_s"], probed["clock_s"]
    text = f"{1000 * trip:.2f} ms there and back"
    if stream:
        text += f", {8e-9 * stream[0]:.2f} Gbit/s to {first} and {8e-9 * stream[1]:.2f} from it (one TCP connection)"
    if trip > SLOW_TRIP_S:
        fix = (
            "Let few messages cross it: tp inside a machine, replicas or one cut of the pipeline between them, "
            "gradient accumulation, local_sgd."
        )
        yield Check(name, "warning", f"{text}: each message waits", fix)
    elif stream and min(stream) < SLOW_BYTES_S:
        fix = (
            "If the machines have a faster network, give its address as main_process_ip and its interface in "
            f"{GLOO} and NCCL_SOCKET_IFNAME; else cut the model between them (pp_size), or set gradient_compression."
        )
        yield Check(name, "warning", f"{text}: less than 1 Gbit/s", fix)
    else:
        yield Check(name, "ok", text)
    if abs(clock) > CLOCKS_S:
        fix = "Let both follow a time server (chronyc tracking, timedatectl): logs and the ages of files are compared."
        yield Check(
            f"{name} clocks",
            "warning",
            f"{first} is {abs(clock):.1f} s {'ahead of' if clock > 0 else 'behind'} {second}",
            fix,
        )
    else:
        yield Check(f"{name} clocks", "ok", f"{1000 * abs(clock):.1f} ms apart")


def _name(machines: Sequence[Any], rank: int) -> str:
    """A machine in words; two may have one host name."""
    one = machines[rank]
    hosts = [each["host"] for each in machines if each]
    return f"machine {rank}" if one is None or hosts.count(one["host"]) > 1 else str(one["host"])
