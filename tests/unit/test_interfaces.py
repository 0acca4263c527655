"""gloo is told which interface leads to the other machines where the host name does not say it, and nothing else is touched."""

from __future__ import annotations

import pytest

from hf_parallel.errors import ConfigError
from hf_parallel.settings.interfaces import (
    Network,
    address_towards,
    chosen_interface,
    is_on_several_machines,
    this_network,
)


ONE = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.5", "fe80::1"], "docker0": ["172.17.0.1"]}
TWO = ONE | {"ib0": ["192.168.7.5"]}


def network(
    own: str | None, addresses: dict[str, list[str]] = ONE, to_first: str | None = None, outwards: str | None = None
) -> Network:
    return Network(addresses, "nodea", own, to_first, outwards)


@pytest.mark.parametrize("own", ["127.0.1.1", "127.0.0.1", "::1", "172.17.0.1", "10.9.9.9", None])
def test_the_interface_towards_the_first_machine_is_taken_where_the_host_name_is_of_no_use(own: str | None) -> None:
    assert chosen_interface({}, network(own, TWO, to_first="192.168.7.5")) == "ib0"
    assert chosen_interface({}, network(own, TWO, to_first="10.0.0.5")) == "eth0"


@pytest.mark.parametrize("own", ["10.0.0.5", "192.168.7.5"])
def test_a_host_name_of_a_real_interface_is_left_to_gloo(own: str) -> None:
    assert chosen_interface({}, network(own, TWO, to_first="10.0.0.5")) is None


def test_what_the_user_has_set_wins() -> None:
    lost = network(None, TWO, to_first="10.0.0.5")
    assert chosen_interface({"GLOO_SOCKET_IFNAME": "ib0"}, lost) is None
    for name in ("ib0", "=ib0"):
        assert chosen_interface({"NCCL_SOCKET_IFNAME": name}, lost) == "ib0"
        assert chosen_interface({"NCCL_SOCKET_IFNAME": name}, network("10.0.0.5", TWO)) == "ib0"
    for name in ("^docker", "ib", "ib0,eth0"):  # lists and beginnings of names, which gloo does not know
        assert chosen_interface({"NCCL_SOCKET_IFNAME": name}, lost) == "eth0"


def test_the_first_machine_whose_own_name_is_loopback_takes_its_only_interface_or_the_one_to_the_world() -> None:
    assert chosen_interface({}, network("127.0.1.1", to_first="127.0.1.1")) == "eth0"
    assert chosen_interface({}, network("127.0.1.1", TWO, to_first="127.0.1.1", outwards="10.0.0.5")) == "eth0"
    with pytest.raises(
        ConfigError, match=r"nodea resolves to 127\.0\.1\.1, .* any of eth0, ib0\. Set GLOO_SOCKET_IFNAME on nodea"
    ):
        chosen_interface({}, network("127.0.1.1", TWO, to_first="127.0.1.1"))
    with pytest.raises(ConfigError, match=r"nodea does not resolve"):
        chosen_interface({}, network(None, TWO))
    assert chosen_interface({}, network(None, {"lo": ["127.0.0.1"]})) is None


def test_only_runs_on_several_machines_are_looked_at() -> None:
    assert is_on_several_machines({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"})
    for environ in (
        {},
        {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"},
        {"WORLD_SIZE": "4"},
        {"LOCAL_WORLD_SIZE": "a", "WORLD_SIZE": "4"},
    ):
        assert not is_on_several_machines(environ)


def test_this_machine_is_read() -> None:
    found = this_network("127.0.0.1")
    assert found.to_first == "127.0.0.1"
    assert "127.0.0.1" in [address for addresses in found.addresses.values() for address in addresses]
    assert address_towards("no.such.host.invalid") is None
