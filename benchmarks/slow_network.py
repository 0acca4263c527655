"""Nodes that are joined by a slow network, on one Linux machine: namespaces, a bridge, and links shaped by the kernel.

Each node has a network card `eth0` whose counters show what it really sent, headers included. Ranks of one node talk over
its loopback, which nobody counts or slows down. It needs root; bandwidth is shaped, delay and loss are not.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType


CARD = "eth0"
NODE_ADDRESS = "10.77.0.{}"
HEADER_BYTES = 66  # of a frame: Ethernet 14, IPv4 20, TCP with time stamps 32


class SlowNetwork:
    """A context: a switch and `nodes` namespaces, which are gone again when it ends.

    Args:
        nodes: Number of nodes, from 1 to 250.
        megabits: Mbit/s of each card, in each direction.
    """

    def __init__(self, nodes: int, megabits: float) -> None:
        self.nodes, self.megabits = nodes, megabits
        self._tag = f"hfp{os.getpid()}"
        self._made: list[str] = []

    @staticmethod
    def obstacle() -> str | None:
        """Why this machine cannot have one; None if it can."""
        if not sys.platform.startswith("linux"):
            return "network namespaces are a feature of Linux"
        if os.geteuid() != 0:
            return "network namespaces need root"
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            return f"{' and '.join(missing)} of iproute2 not found"
        try:
            with SlowNetwork(1, 100):
                return None
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            return f"network namespaces are not allowed here: {error}"

    def name(self, node: int) -> str:
        """Namespace of a node."""
        return f"{self._tag}n{node}"

    def __enter__(self) -> SlowNetwork:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _build(self) -> None:
        switch = f"{self._tag}sw"
        self._add_namespace(switch)
        _run(f"ip -n {switch} link add br0 type bridge")
        _run(f"ip -n {switch} link set br0 up")
        for node in range(self.nodes):
            self._plug_in(node, switch)

    def _plug_in(self, node: int, switch: str) -> None:
        name, port = self.name(node), f"p{node}"
        self._add_namespace(name)
        _run(f"ip link add {CARD} netns {name} mtu 1500 type veth peer name {port} netns {switch} mtu 1500")
        _run(f"ip -n {switch} link set {port} master br0 up")
        _run(f"ip -n {name} addr add {NODE_ADDRESS.format(node + 1)}/24 dev {CARD}")
        _run(f"ip -n {name} link set lo up")
        _run(f"ip -n {name} link set {CARD} up")
        # A rate-based congestion control paces itself; cubic is what most machines have.
        _run(f"ip netns exec {name} sysctl -qw net.ipv4.tcp_congestion_control=cubic", check=False)
        for where, device in ((name, CARD), (switch, port)):
            # Without it, the counters see segments of up to 64 kB with one header each.
            _run(f"ip -n {where} link set {device} gso_max_segs 1", check=False)
            shape = f"root tbf rate {round(self.megabits * 1000)}kbit burst 64kb latency 100ms"
            _run(f"tc -n {where} qdisc add dev {device} {shape}")

    def _add_namespace(self, name: str) -> None:
        _run(f"ip netns add {name}")
        self._made.append(name)

    def _remove(self) -> None:
        while self._made:
            _run(f"ip netns del {self._made.pop()}", check=False)


def _run(command: str, *, check: bool = True) -> None:
    result = subprocess.run(command.split(), capture_output=True, text=True, timeout=30)
    if check and result.returncode:
        raise RuntimeError(f"{command}: {result.stderr.strip()}")


def sent() -> tuple[int, int]:
    """Bytes and frames that the card of this node has sent; called inside a node."""
    counters = Path(f"/sys/class/net/{CARD}/statistics")
    return int((counters / "tx_bytes").read_text()), int((counters / "tx_packets").read_text())


def run_ranks_on(
    network: SlowNetwork, ranks_per_node: int, command: Sequence[str], logs: Path, seconds: float
) -> None:
    """Run `command` once for each rank of a gloo group, in the node where it belongs, and wait for all.

    Args:
        network: Where.
        ranks_per_node: Ranks on each node.
        command: What; it finds its rank in the environment, as under torchrun.
        logs: Folder for what the ranks print.
        seconds: Time after which they are killed.

    Raises:
        SystemExit: If one failed or time was up; what it printed last is in the message.
    """
    world = network.nodes * ranks_per_node
    shared = {
        **os.environ,
        **{"MASTER_ADDR": NODE_ADDRESS.format(1), "MASTER_PORT": "29400", "WORLD_SIZE": str(world)},
        **{"LOCAL_WORLD_SIZE": str(ranks_per_node), "GLOO_SOCKET_IFNAME": CARD, "OMP_NUM_THREADS": "1"},
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            where = ["ip", "netns", "exec", network.name(rank // ranks_per_node)]
            processes.append(_start([*where, *command], shared, rank, rank % ranks_per_node, logs))
        _await(processes, time.monotonic() + seconds)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    if any(codes):
        failed = next((rank for rank, code in enumerate(codes) if code > 0), codes.index(next(filter(None, codes))))
        said = (logs / f"rank{failed}.log").read_text()[-3000:]
        raise SystemExit(
            f"{said}\nranks exited with {codes} (-9: killed, after {seconds:.0f} s or because another failed)"
        )


def _start(
    command: Sequence[str], shared: Mapping[str, str], rank: int, local: int, logs: Path
) -> subprocess.Popen[bytes]:
    environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(local)}
    with (logs / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _await(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    """Wait until all are done, one failed, or time is up."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes) or any(codes):
            return
        time.sleep(0.1)


def exit_on_signals() -> None:
    """Let a request to end this process unwind it, so that contexts are left."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
