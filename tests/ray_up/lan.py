"""Machines on a network of their own, made of Linux namespaces: what `ray up` needs, on one machine.

Each has processes, loopback, ports, hostname and written files of its own, an address on the network, and an
SSH server. None reaches anything but the others. All of it ends with this process. It takes root and an sshd.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.e2e.harness import descendants, is_running, wait_for

ROOT = Path(__file__).parents[2]
OPERATOR = "operator"
NODES = {"head": "192.0.2.10", "draft-host": "192.0.2.11", "target-host": "192.0.2.12"}
"""Addresses kept for documentation: none of them is anybody's."""
ADDRESSES = {OPERATOR: "192.0.2.1", **NODES}
HOME = "/home/ubuntu"
COMMAND_TIMEOUT_S = 300.0


def why_not() -> str | None:
    """What this machine lacks, if anything."""
    if os.geteuid() != 0:
        return "needs root, to make machines of namespaces"
    tools = ("unshare", "nsenter", "setpriv", "ip", "ssh", "ssh-keygen", "rsync", "/usr/sbin/sshd")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)} (Debian: openssh-server rsync iproute2 util-linux)"
    if os.stat("/").st_dev != os.stat(sys.prefix).st_dev or os.stat("/").st_dev != os.stat(ROOT).st_dev:
        return "the installation and the repository must be on the root file system"
    probe = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "sh", "-c"]
    commands = "mount --make-rprivate / && mount -t tmpfs tmpfs /mnt && ip link add lan type bridge"
    done = subprocess.run([*probe, commands], capture_output=True, text=True, check=False)
    return f"no namespaces: {done.stderr.strip()[-200:]}" if done.returncode else None


class Lan:
    """The operator's machine and the three of the cluster; use as a context manager.

    Args:
        folder: every machine's /shared.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bridge: subprocess.Popen[str] | None = None
        self._hosts: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Lan:
        for name in ("key", "host_key"):
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)])
        try:
            script = "ip link set lo up; ip link add lan type bridge; ip link set lan up; exec sleep infinity"
            self._bridge = started(["unshare", "--net", "sh", "-c", script])
            wait_for(lambda: "lan" in self._on_bridge("ip", "-o", "link"), 10, "the bridge")
            for name in ADDRESSES:
                self._start(name)
            for name in NODES:
                wait_for(lambda name=name: self._answers(name), 30, f"ssh to {name}")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self, name: str) -> None:
        namespaces = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--kill-child"]
        script = str(Path(__file__).with_name("host.sh"))
        host = started([*namespaces, "sh", script, name, sys.prefix, str(self.folder)])
        self._hosts[name] = host
        wait_for(lambda: descendants(host.pid) or host.poll() is not None, 10, f"the machine {name}")
        init = self._init(name)
        port = f"port{list(ADDRESSES).index(name)}"
        peer = ("peer", "name", "eth0", "netns", str(init))
        self._on_bridge("ip", "link", "add", port, "type", "veth", *peer)
        self._on_bridge("ip", "link", "set", port, "master", "lan", "up")
        network = ["nsenter", f"--net=/proc/{init}/ns/net", "ip"]
        run([*network, "addr", "add", f"{ADDRESSES[name]}/24", "dev", "eth0"])
        run([*network, "link", "set", "eth0", "up"])

    def _on_bridge(self, *command: str) -> str:
        assert self._bridge is not None
        return run(["nsenter", f"--net=/proc/{self._bridge.pid}/ns/net", *command])

    def _init(self, name: str) -> int:
        """The first process of a machine, as numbered here."""
        host = self._hosts[name]
        assert host.poll() is None, f"the machine {name} ended: see {self.folder}/{name}.sshd.log"
        return descendants(host.pid)[0]

    def _answers(self, name: str) -> bool:
        return self._ssh_process(NODES[name], "true").wait(30) == 0

    def command(self, *command: str) -> list[str]:
        """What to run here so that ``command`` runs at the operator's, in the repository."""
        variables = {
            "HOME": HOME,
            "USER": "ubuntu",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "PATH": f"{sys.prefix}/bin:/usr/sbin:/usr/bin:/bin",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        settings = [f"{name}={value}" for name, value in variables.items()]
        environment = ["env", "-i", f"--chdir={ROOT}", *settings]
        enter = ["nsenter", f"--target={self._init(OPERATOR)}", "--all", "--root"]
        return [*enter, *environment, *command]

    def operator(self, *command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run a command at the operator's; returns what it printed."""
        return run(self.command(*command), timeout_s)

    def forward(self, name: str, *ports: int) -> dict[int, Path]:
        """Sockets here that lead to ports on the loopback of a node, by an SSH tunnel from the operator's."""
        sockets = {port: self.folder / f"{port}.sock" for port in ports}
        tunnels = [f"-L/shared/{path.name}:127.0.0.1:{port}" for port, path in sockets.items()]
        self._ssh_process(NODES[name], "-N", *tunnels, "-oExitOnForwardFailure=yes")
        wait_for(lambda: all(path.exists() for path in sockets.values()), 30, "the tunnel")
        return sockets

    def _ssh_process(self, address: str, *arguments: str) -> subprocess.Popen[bytes]:
        options = ["-oStrictHostKeyChecking=no", "-oUserKnownHostsFile=/dev/null", "-oLogLevel=ERROR"]
        command = self.command("ssh", *options, f"ubuntu@{address}", *arguments)
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def processes(self, name: str) -> dict[int, str]:
        """Command lines of what runs on a machine beside its SSH server, by our process ids."""
        found = {}
        for pid in descendants(self._init(name)):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue
            if line and is_running(pid) and "sshd" not in line:
                found[pid] = line
        return found

    def _stop(self) -> None:
        for process in [*self._hosts.values(), self._bridge]:
            if process is not None:
                process.kill()
                process.wait(10)


def started(command: list[str]) -> subprocess.Popen[str]:
    """A process that ends when this one does."""
    return subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.DEVNULL, text=True)


def run(command: list[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Run a command to its end; one that fails shows its last lines."""
    started_s = time.monotonic()
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    tail = "\n".join(done.stdout.splitlines()[-40:])
    seconds = time.monotonic() - started_s
    assert done.returncode == 0, f"{command} gave {done.returncode} after {seconds:.0f} s:\n{tail}"
    return done.stdout
