"""What `doctor --peers` says of what the machines found: each problem has its cause and its fix, and the machines' names."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_parallel.cli.main import app
from hf_parallel.dry_run.doctor import Check
from hf_parallel.dry_run.peer_links import Answerer, Line, Table, measure, probe, throughput, why
from hf_parallel.dry_run.peers import (
    Place,
    alike_checks,
    examine_peers,
    facts_of,
    link_checks,
    meeting_checks,
    own_address,
    place_of,
)
from hf_parallel.errors import ConfigError
from hf_parallel.settings.interfaces import Network


FILE = {"num_machines": 2, "main_process_ip": "nodea", "main_process_port": 29500, "machine_rank": 0}
NETWORK = Network(
    {"lo": ["127.0.0.1", "127.0.1.1"], "eth0": ["fe80::1", "10.0.0.5"]}, "nodea", "127.0.1.1", None, None
)


def machine(host: str, **changed: Any) -> dict[str, Any]:
    facts = facts_of(FILE, NETWORK, "eth0") | {"host": host, "address": "10.0.0.5", "port": 1}
    return facts | changed


def said(checks: Iterable[Check]) -> list[str]:
    """What is wrong; every finding has a fix."""
    found = list(checks)
    assert all(bool(check.fix) == (check.status != "ok") for check in found), found
    return [f"{check.status} {check.topic}: {check.text} FIX {check.fix}" for check in found if check.status != "ok"]


def test_the_file_says_where_machines_meet_and_options_replace_it() -> None:
    assert place_of(FILE, {"machine_rank": 1, "num_machines": None}) == Place(1, 2, "nodea", 29500)
    assert place_of({}, {"num_machines": 2, "machine_rank": 0, "main_process_ip": "a"}) == Place(0, 2, "a", 29500)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_machines": 1}, r"num_machines=1: there are no other machines"),
        ({"num_machines": "two"}, r"num_machines='two'.*Set num_machines"),
        ({"machine_rank": 2}, r"machine_rank=2 with num_machines=2: .* from 0 to 1\. .*--machine-rank"),
        ({"main_process_port": 0}, r"main_process_port=0: .*Set it to 29500"),
        ({"main_process_ip": None}, r"num_machines=2 without main_process_ip.*Set main_process_ip"),
    ],
)
def test_a_file_that_does_not_say_where_machines_meet_is_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        place_of(FILE | changed, {})


def test_the_address_is_the_one_that_gloo_takes() -> None:
    assert own_address(NETWORK, "eth0") == "10.0.0.5"
    assert own_address(NETWORK, None) == "127.0.1.1"
    assert (
        own_address(replace(NETWORK, own="10.9.9.9"), None) == "127.0.0.1"
    )  # of another machine: gloo takes loopback


def test_machines_that_did_not_come_are_named_with_what_to_start_there() -> None:
    place = place_of(FILE, {})
    assert said(meeting_checks([machine("nodea"), machine("nodeb")], place, 60)) == []
    [text] = said(meeting_checks([machine("nodea"), None], place, 60))
    assert re.search(
        r"^error machines: machine 1 of 2 did not come within 60 s.*nodea.*--machine-rank 1.*port 29500", text
    ), text


def test_other_versions_and_settings_are_errors_that_name_them() -> None:
    first = machine("nodea")
    assert said(alike_checks([first, machine("nodeb"), None])) == []
    other = machine("nodeb", versions=first["versions"] | {"torch": "1.0"})
    [text] = said(alike_checks([first, other]))
    assert re.search(r"^error torch: differs: .* on nodea, 1\.0 on nodeb FIX Install the same torch", text), text
    facts = facts_of(FILE | {"machine_rank": 1, "use_cpu": True, "mixed_precision": "bf16"}, NETWORK, "eth0")
    [text] = said(alike_checks([first, machine("nodeb", settings=facts["settings"])]))
    assert re.search(r"^error settings: .* differ in mixed_precision, use_cpu FIX Copy one file", text), text


def found(error: str = "", trip: float = 1e-4, clock: float = 0.0, speed: float = 1e9) -> list[Any]:
    probed = {"error": error, "round_trip_s": trip, "clock_s": clock}
    return [
        {"probes": {}, "streams": {}},
        {"probes": {"0": probed}, "streams": {} if error else {"0": [speed, speed]}},
    ]


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (found("nothing answers. Open all TCP ports."), r"error nodea - nodeb: nodeb cannot reach 10\.0\.0\.5 \(eth0\): nothing answers FIX Open"),
        (found(trip=0.02), r"warning nodea - nodeb: 20\.00 ms there and back, 8\.00 Gbit/s to nodea.*FIX Let few messages"),
        (found(speed=1e7), r"warning nodea - nodeb: .*0\.08 Gbit/s.*less than 1 Gbit/s FIX .*main_process_ip.*gradient_compression"),
        (found(clock=3.0), r"warning nodea - nodeb clocks: nodea is 3\.0 s ahead of nodeb FIX Let both follow a time server"),
        (found(clock=-3.0), r"nodea is 3\.0 s behind nodeb"),
    ],
)  # fmt: skip
def test_a_bad_link_is_named_with_cause_and_fix(measured: list[Any], says: str) -> None:
    assert said(link_checks([machine("nodea"), machine("nodeb")], found())) == []
    [text] = said(link_checks([machine("nodea"), machine("nodeb")], measured))
    assert re.search(says, text), text
    assert said(link_checks([machine("nodea"), None], [found()[0], None])) == []


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (socket.gaierror(-2, "unknown"), r"does not resolve here\. Add it"),
        (ConnectionRefusedError(), r"refused\. Start the same command there"),
        (TimeoutError(), r"nothing answers\. Open all TCP ports"),
        (OSError(113, "No route to host"), r"No route to host\. Look at the route"),
    ],
)
def test_a_failed_connection_has_its_cause(error: OSError, says: str) -> None:
    assert re.search(says, why(error))


def test_a_link_is_measured_and_both_machines_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both machines in this process, on loopback, at ports that the system chooses."""
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr("hf_parallel.dry_run.peer_links.STREAM_S", 0.02)
    here, there = socket.socketpair()
    tables = [Table(0, 2, {1: Line(here)}), Table(1, 2, {0: Line(there)})]
    answerers = [Answerer("127.0.0.1") for _ in range(2)]
    places = [(each.address, each.port) for each in answerers]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda rank: measure(tables[rank], rank, places), range(2)))
    assert both[0] == both[1]
    [nothing, measured] = both[0]
    assert nothing == {"probes": {}, "streams": {}}
    assert measured is not None
    assert measured["probes"]["0"]["error"] == ""
    assert measured["probes"]["0"]["round_trip_s"] > 0
    assert abs(measured["probes"]["0"]["clock_s"]) < 1
    assert min(measured["streams"]["0"]) > 0
    for each in (*tables, *answerers):
        each.close()
    assert "refused" in probe(*places[0]).error
    with pytest.raises(ConnectionRefusedError):
        throughput(*places[0])


def test_the_command_names_what_its_file_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("hf_parallel.cli.doctor.examine", lambda: [])
    path = tmp_path / "mine.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_machines: 2\n")
    result = CliRunner().invoke(app, ["doctor", "--peers", str(path)])
    assert result.exit_code == 1
    assert re.search(
        r"error +machines +num_machines=2 without main_process_ip.*\n +fix: Set main_process_ip", result.output
    )
    alone = CliRunner().invoke(app, ["doctor", "--machine-rank", "1"])
    assert alone.exit_code == 1
    assert "fix: Add --peers FILE." in alone.output


def test_a_machine_that_is_not_there_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_parallel.dry_run.peers.this_network", lambda first: NETWORK)
    monkeypatch.setattr("hf_parallel.dry_run.peers.own_address", lambda network, interface: "127.0.0.1")
    with pytest.raises(
        ConfigError, match=r"machine 0 was not reached at no\.such\.invalid:29500 for 0\.3 s: the name does not"
    ):
        examine_peers(Place(1, 2, "no.such.invalid", 29500), FILE, 0.3)
