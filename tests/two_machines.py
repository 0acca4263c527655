"""Two machines on this one: network, UTS, mount and PID namespaces, host names of their own, and a cable between them.

The cable is a process that carries packets between two TUN devices, so that it can delay them or lose them all.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest


ADDRESSES = ("10.77.0.1", "10.77.0.2")
HOSTS = ("nodea", "nodeb")
CARD = "fabric0"
ROOT = Path(__file__).resolve().parents[1]
SET_TUN, TUN_WITHOUT_HEADER, NEW_NET = 0x400454CA, 0x1001, 0x40000000


class Machines:
    """Both machines, until `close`.

    Args:
        folder: For their files.
        resolves_to: What each machine's own name resolves to: "card", "loopback", "docker" or "nothing".
        delay_s: One way of the cable, in seconds.
        own_disk: Whether each has a folder of its own in the place of `work`.
    """

    def __init__(
        self, folder: Path, *, resolves_to: str = "card", delay_s: float = 0.0, own_disk: bool = False
    ) -> None:
        self.work = folder / "work"
        self.work.mkdir()
        self._inits: list[subprocess.Popen[bytes]] = []
        self.running: list[subprocess.Popen[bytes]] = []
        self.disks = [folder / f"disk{index}" if own_disk else self.work for index in range(2)]
        self.cable: subprocess.Popen[bytes] | None = None
        try:
            for index in range(2):
                self._inits.append(self._boot(index, folder / f"hosts{index}", resolves_to))
            self._connect(delay_s)
        except BaseException:
            self.close()
            raise

    def _connect(self, delay_s: float) -> None:
        relay = [sys.executable, __file__, *(str(self.pid(index)) for index in range(2)), str(delay_s)]
        self.cable = subprocess.Popen(relay, stdout=subprocess.PIPE)
        assert self.cable.stdout is not None
        assert self.cable.stdout.readline() == b"up\n"
        for index, address in enumerate(ADDRESSES):
            self.sh(
                index, f"ip addr add {address}/24 dev {CARD} && ip link set {CARD} mtu 9000 up && ip link set lo up"
            )
            self.sh(
                index, "ip link add docker0 type veth peer name container0 && ip addr add 172.17.0.1/16 dev docker0"
            )
            self.sh(index, "ip link set docker0 up && ip link set container0 up")

    def _boot(self, index: int, hosts: Path, resolves_to: str) -> subprocess.Popen[bytes]:
        name, other, disk = HOSTS[index], 1 - index, self.disks[index]
        own = {"card": ADDRESSES[index], "loopback": "127.0.1.1", "docker": "172.17.0.1", "nothing": ""}[resolves_to]
        lines = ["127.0.0.1 localhost", *([f"{own} {name}"] if own else []), f"{ADDRESSES[other]} {HOSTS[other]}"]
        hosts.write_text("\n".join([*lines, ""]))
        disk.mkdir(exist_ok=True)
        own_disk = f"mount --bind {disk} {self.work}" if disk != self.work else "true"
        script = f"hostname {name} && mount --bind {hosts} /etc/hosts && {own_disk} && echo up && exec sleep infinity"
        apart = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        init = subprocess.Popen([*apart, "bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert init.stdout is not None
        assert init.stderr is not None
        if init.stdout.readline() != b"up\n":
            pytest.skip(f"no namespaces here: {init.stderr.read().decode()}")
        return init

    def pid(self, index: int) -> int:
        """Number, out here, of a machine's first process."""
        unshare = self._inits[index].pid
        return int(Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()[0])

    def inside(self, index: int, command: Sequence[str]) -> list[str]:
        """The command that runs a command on a machine."""
        return ["nsenter", "-t", str(self.pid(index)), "-n", "-u", "-m", "-p", *command]

    def sh(self, index: int, command: str) -> str:
        """Run a line of shell on a machine; what it prints."""
        done = subprocess.run(
            self.inside(index, ["bash", "-c", command]), check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout

    def start(self, index: int, command: Sequence[str], **variables: str) -> subprocess.Popen[bytes]:
        """Start a Python program on a machine, in the folder `work`; its output goes to `output`."""
        env = clean(os.environ) | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        env |= {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests"]))} | variables
        inner = self.inside(index, ["bash", "-c", f'cd {self.work} && exec "$@"', "start", sys.executable, *command])
        with open(self.work.parent / f"output{index}", "ab") as output:
            process = subprocess.Popen(inner, env=env, stdout=output, stderr=output)
        self.running.append(process)
        return process

    def output(self, index: int) -> str:
        """What the programs of a machine have printed."""
        path = self.work.parent / f"output{index}"
        return path.read_text(errors="replace") if path.exists() else ""

    def cut(self) -> None:
        """Cut the cable: packets are lost, and nobody is told."""
        assert self.cable is not None
        self.cable.send_signal(signal.SIGSTOP)

    def kill(self, index: int) -> None:
        """Take the power from a machine: its processes are gone, and say nothing to the other one."""
        self.cut()
        os.kill(self.pid(index), signal.SIGKILL)

    def close(self) -> None:
        """End everything that runs on the machines, and them."""
        for process in [*([self.cable] if self.cable else []), *self._inits, *self.running]:
            process.kill()
            process.wait(30)


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what names an interface or a launch."""
    odd = ("GLOO_", "NCCL_", "MASTER_", "SLURM_", "TORCHELASTIC_", "ACCELERATE_", "PYTEST_")
    return {name: value for name, value in environment.items() if not name.startswith(odd)}


def need_namespaces() -> None:
    """Skip where there can be no two machines."""
    if os.geteuid() != 0:
        pytest.skip("two machines need root: network, mount and PID namespaces")
    if not os.access("/dev/net/tun", os.W_OK):
        pytest.skip("two machines need /dev/net/tun: their cable carries packets between TUN devices")


def tun_of(pid: int) -> int:
    """A TUN device in the network namespace of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as here, open(f"/proc/{pid}/ns/net") as there:
        assert libc.setns(there.fileno(), NEW_NET) == 0, os.strerror(ctypes.get_errno())
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, SET_TUN, struct.pack("16sH", CARD.encode(), TUN_WITHOUT_HEADER))
        assert libc.setns(here.fileno(), NEW_NET) == 0
    return device


def carry(devices: Sequence[int], delay_s: float) -> None:
    """Carry packets from each device to the other one, `delay_s` later, in order."""
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        patience = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select(devices, [], [], patience)
        for device in ready:
            other = devices[1 - devices.index(device)]
            for _ in range(64):
                try:
                    packet = os.read(device, 65536)
                except BlockingIOError:
                    break
                under_way.append((time.monotonic() + delay_s, other, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, other, packet = under_way.popleft()
            try:
                os.write(other, packet)
            except OSError:  # its machine is gone, or its queue is full: networks lose packets
                continue


if __name__ == "__main__":
    cards = [tun_of(int(pid)) for pid in sys.argv[1:3]]
    print("up", flush=True)
    carry(cards, float(sys.argv[3]))
