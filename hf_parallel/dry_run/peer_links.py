"""Machines of a run measure the links between them, before it: who reaches whom, how fast, and whether clocks agree.

Machine 0 listens at the run's own address and port, the others come to it and say who they are (`Table`). Each then listens at
the address of the interface that gloo will use, on a port that the system chooses, as gloo and NCCL do (`Answerer`), and is asked
by the machines after it (`probe`) and measured by its neighbour (`throughput`). Every wait is bounded.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from hf_parallel.errors import ConfigError


MAGIC: Final = "hf_parallel doctor 1"
MAX_LINE: Final = 1 << 20
CONNECT_S: Final = 5.0
PINGS: Final = 20
PROBE_S: Final = 5.0  # of one machine by another
STREAM_S: Final = 1.0  # one way, between neighbours
ROUND_S: Final = 60.0  # until all machines are done with one part
CHUNK: Final = bytes(1 << 20)


@dataclass(frozen=True)
class Probe:
    """One machine's measurement of another.

    Args:
        error: Why it cannot be reached; empty if it can.
        round_trip_s: Fastest answer.
        clock_s: Seconds by which its clock is ahead.
    """

    error: str = ""
    round_trip_s: float = 0.0
    clock_s: float = 0.0


class Line:
    """Messages of one line of JSON each over a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._file = connection.makefile("rb")

    def send(self, message: object) -> None:
        """Send one."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float) -> Any:
        """The next one.

        Raises:
            OSError: None came in time.
        """
        self.connection.settimeout(timeout_s)
        text = self._file.readline(MAX_LINE)
        if not text.endswith(b"\n"):
            raise ConnectionError("the other machine has ended its doctor")
        try:
            return json.loads(text)
        except ValueError:
            raise ConnectionError("something else than the doctor of hf_parallel answers") from None

    def close(self) -> None:
        """End it."""
        self._file.close()
        self.connection.close()


class Table:
    """The meeting of the machines: each says something, and all get what all have said.

    Args:
        rank: Number of this machine.
        size: Number of machines.
        lines: To every other machine by its number, on machine 0; to machine 0 elsewhere.
    """

    def __init__(self, rank: int, size: int, lines: Mapping[int, Line]) -> None:
        self._rank, self._size, self._lines = rank, size, dict(lines)

    def exchange(self, mine: object, timeout_s: float = ROUND_S) -> list[Any]:
        """Give `mine` to every machine, and return what each gave, None for one that is lost; every machine must call it.

        Raises:
            OSError: Machine 0 is lost.
        """
        if self._rank:
            self._lines[0].send(mine)
            return list(self._lines[0].receive(timeout_s))
        said: list[Any] = [mine, *[None] * (self._size - 1)]
        deadline = time.monotonic() + timeout_s
        for rank, line in list(self._lines.items()):
            try:
                said[rank] = line.receive(max(0.1, deadline - time.monotonic()))
            except OSError:
                del self._lines[rank]
        for line in self._lines.values():
            with suppress(OSError):
                line.send(said)
        return said

    def close(self) -> None:
        """End all connections."""
        for line in self._lines.values():
            line.close()


def gather(address: str, port: int, size: int, wait_s: float) -> Table:
    """Let the other machines come to machine 0, which this is; those that came in time take part.

    Raises:
        ConfigError: The address or the port cannot be used.
    """
    try:
        family = socket.getaddrinfo(address, port)[0][0]
    except OSError:
        family = socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"main_process_port={port}: it cannot be listened on ({error.strerror}). End what uses it (ss -ltnp), or set "
                "main_process_port to a free port on all machines."
            ) from None
        server.listen(size)
        lines: dict[int, Line] = {}
        deadline = time.monotonic() + wait_s
        while len(lines) < size - 1 and time.monotonic() < deadline:
            server.settimeout(max(0.1, deadline - time.monotonic()))
            with suppress(OSError):
                _welcome(Line(server.accept()[0]), lines, size)
        return Table(0, size, lines)


def _welcome(line: Line, lines: dict[int, Line], size: int) -> None:
    """Take in one that has come, if it is what it should be."""
    try:
        said = line.receive(CONNECT_S)
        magic, rank, its_size = said
    except (OSError, TypeError, ValueError):
        line.close()
        return
    wrong = ""
    if magic != MAGIC or its_size != size:
        wrong = f"machine 0 waits for {size} machines, and this one for {its_size}: num_machines differs"
    elif not isinstance(rank, int) or not 0 < rank < size or rank in lines:
        wrong = f"machine_rank={rank} is taken or not below {size}"
    line.send(wrong)
    if wrong:
        line.close()
    else:
        lines[rank] = line


def join(address: str, port: int, rank: int, size: int, wait_s: float) -> Table:
    """Come to machine 0 from another one; tries until it is there.

    Raises:
        ConfigError: It was not reached in time, or refuses this machine; with the cause.
    """
    deadline, error = time.monotonic() + wait_s, OSError("no time to try")
    while time.monotonic() < deadline:
        try:
            line = Line(socket.create_connection((address, port), timeout=CONNECT_S))
            line.send([MAGIC, rank, size])
            wrong = line.receive(max(CONNECT_S, deadline - time.monotonic()))
        except OSError as failed:
            error = failed
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
            continue
        if wrong:
            line.close()
            raise ConfigError(f"{wrong}. Give every machine the same file and a machine_rank of its own.")
        return Table(rank, size, {0: line})
    raise ConfigError(f"machine 0 was not reached at {address}:{port} for {wait_s:g} s: {why(error)}")


def why(error: OSError) -> str:
    """Cause and remedy of a failed connection."""
    if isinstance(error, socket.gaierror):
        return "the name does not resolve here. Add it to DNS or /etc/hosts, or write the address itself."
    if isinstance(error, ConnectionRefusedError):
        return (
            "the connection was refused. Start the same command there at the same time; if it runs, a firewall refuses the port, "
            "or the name leads to another machine."
        )
    if isinstance(error, TimeoutError):
        return (
            "nothing answers. Open all TCP ports between the machines (firewall, security group), and look whether the address "
            "is that of the network that joins them."
        )
    return f"{error.strerror or error}. Look at the route and the cable, and at the address."


class Answerer:
    """Answers the other machines from threads: their questions for the time, and their streams.

    Args:
        address: Address at which it listens.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.socket(family, socket.SOCK_STREAM)
        self._server.bind((address, 0))
        self._server.listen(64)
        self.address, self.port = self._server.getsockname()[:2]
        threading.Thread(target=self._accept, name="hf_parallel-doctor", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._server.accept()[0]
            except OSError:  # closed
                return
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # else the thread that waits in `accept` takes one more
        self._server.close()


def _answer(connection: socket.socket) -> None:
    with connection, suppress(OSError):
        connection.settimeout(ROUND_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while kind := connection.recv(1):
            if kind == b"t":
                connection.sendall(struct.pack("!d", time.time()))
            elif kind == b"s":
                _stream(connection)
                return
            elif kind == b"r":
                received, seconds = _drain(connection)
                connection.sendall(struct.pack("!dd", received, seconds))
                return


def _stream(connection: socket.socket) -> None:
    deadline = time.monotonic() + STREAM_S
    while time.monotonic() < deadline:
        connection.sendall(CHUNK)
    connection.shutdown(socket.SHUT_WR)


def _drain(connection: socket.socket) -> tuple[int, float]:
    """Bytes that come until the sender stops, and the seconds from the first to the last."""
    received, began = 0, time.monotonic()
    buffer = bytearray(1 << 20)
    while count := connection.recv_into(buffer):
        began = began if received else time.monotonic()
        received += count
    return received, time.monotonic() - began


def probe(address: str, port: int) -> Probe:
    """Reach a machine, and ask it for the time again and again."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            best, clock, deadline = float("inf"), 0.0, time.monotonic() + PROBE_S
            for _ in range(PINGS):
                asked, began = time.time(), time.monotonic()
                connection.sendall(b"t")
                answer = _exactly(connection, 8)
                trip = time.monotonic() - began
                if trip < best:
                    best, clock = trip, struct.unpack("!d", answer)[0] - (asked + trip / 2)
                if time.monotonic() > deadline:
                    break
    except OSError as error:
        return Probe(why(error))
    return Probe("", best, clock)


def throughput(address: str, port: int) -> tuple[float, float]:
    """Bytes a second of one TCP connection to a machine, and from it.

    Raises:
        OSError: It cannot be reached any more.
    """
    with socket.create_connection((address, port), timeout=ROUND_S) as connection:
        connection.sendall(b"r")
        _stream(connection)
        received, seconds = struct.unpack("!dd", _exactly(connection, 16))
        there = received / max(seconds, 1e-6)
    with socket.create_connection((address, port), timeout=ROUND_S) as connection:
        connection.sendall(b"s")
        back, seconds = _drain(connection)
    return there, back / max(seconds, 1e-6)


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise ConnectionError("the other machine has closed the connection")
        found += part
    return found


def measure(
    table: Table, rank: int, places: Sequence[tuple[str, int] | None], say: Callable[[str], None] = lambda text: None
) -> list[dict[str, Any] | None]:
    """Measure all links; every machine calls it. What each found, with None of a machine that is lost.

    Args:
        table: Meeting of the machines.
        rank: Number of this machine.
        places: Address and port of each machine's `Answerer`; None of one that did not come.
        say: Told what is done, as it takes seconds.
    """
    say("reaching the other machines")
    earlier = [other for other in range(rank) if places[other] is not None]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda other: probe(*(places[other] or ("", 0))), earlier))
    probes = {str(other): asdict(each) for other, each in zip(earlier, found, strict=True)}
    table.exchange("reached")
    streams: dict[str, tuple[float, float]] = {}
    for turn in range(2):  # neighbours in turns, so that no machine measures two links at once
        say("measuring the speed between neighbours")
        if rank and rank % 2 == turn and not probes.get(str(rank - 1), {"error": "lost"})["error"]:
            with suppress(OSError):
                streams[str(rank - 1)] = throughput(*(places[rank - 1] or ("", 0)))
        table.exchange("measured")
    return table.exchange({"probes": probes, "streams": streams})
