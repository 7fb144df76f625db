"""Two machines on one: namespaces of their own for network, names, processes and shared memory, and a cable between.

They share the file system, but for /dev/shm and /etc/hosts. What runs in one ends with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    pid: int
    """Of the first process in it."""

    def start(self, command: Sequence[str], *, cwd: Path, env: dict[str, str] | None = None, **options):
        """Popen of a command in this host, in a process group of its own."""
        enter = ["nsenter", "--target", str(self.pid), *_NAMESPACES, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd)]
        env = {**os.environ, **(env or {})}
        return subprocess.Popen([*enter, *command], env=env, start_new_session=True, **options)

    def run(self, command: Sequence[str], *, cwd: Path, env: dict[str, str] | None = None, timeout: float = 300):
        """CompletedProcess of a command in this host, with stdout and stderr together; killed after `timeout` s."""
        process = self.start(
            command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"{' '.join(command)} did not end in {timeout} s:\n{output}") from None
        return subprocess.CompletedProcess(command, process.returncode, output)


def why_no_hosts() -> str | None:
    """Why there can be none here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("setpriv", "unshare", "nsenter", "ip", "mount") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)}: not installed (Debian: util-linux, iproute2)"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "sh", "-c", "ip link add a0 type veth peer name b0"], capture_output=True
    )
    return None if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.decode().strip()}"


@contextmanager
def two_hosts(folder: Path, names: Sequence[str] = ("hosta", "hostb"), own_name: str = "") -> Iterator[list[Host]]:
    """
    Args:
        folder: for the hosts' /etc/hosts.
        own_name: address that each host's own name has in its /etc/hosts, such as Debian's 127.0.1.1.
    """
    addresses = [f"10.71.0.{number}" for number in (1, 2)]
    with ExitStack() as stack:
        hosts = []
        for name, address in zip(names, addresses, strict=True):
            lines = ["127.0.0.1 localhost"]
            for other, at in zip(names, addresses, strict=True):
                lines.append(f"{own_name if own_name and other == name else at} {other}")
            (folder / f"hosts.{name}").write_text("\n".join(lines) + "\n")
            hosts.append(stack.enter_context(_host(name, address, folder / f"hosts.{name}")))
        first, second = hosts
        _in(first, f"ip link add eth0 type veth peer name eth0 netns {second.pid}")
        for host in hosts:
            _in(host, f"ip addr add {host.address}/24 dev eth0 && ip link set eth0 up")
        yield hosts


@contextmanager
def _host(name: str, address: str, etc_hosts: Path) -> Iterator[Host]:
    setup = (
        f"mount -t tmpfs -o size=2g shm /dev/shm && mount --bind {etc_hosts} /etc/hosts && "
        f"ip link set lo up && hostname {name} && echo up && exec sleep infinity"
    )
    unshare = ["setpriv", "--pdeathsig", "KILL", "unshare"]  # not even a killed test leaves a host behind
    command = [*unshare, *_NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-c", setup]
    outside = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert outside.stdout is not None
        assert outside.stdout.readline() == "up\n", "the host has not come up"
        children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text().split()
        yield Host(name, address, int(children[0]))
    finally:
        outside.kill()  # and with it, everything in there
        outside.wait()


def why_no_ssh() -> str | None:
    """Why hosts cannot reach each other by it, or None."""
    missing = [tool for tool in ("ssh", "scp", "ssh-keygen", "sshd") if shutil.which(tool) is None]
    return (
        f"{', '.join(missing)}: not installed (Debian: openssh-client, openssh-server)" if missing else why_no_hosts()
    )


def serve_ssh(hosts: Sequence[Host], folder: Path) -> None:
    """Let every host log in to the others, by a key in `folder` and without a question."""
    key = folder / "ssh.key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    server = [f"HostKey {key}", f"AuthorizedKeysFile {key}.pub", "StrictModes no", "PidFile none"]
    server += ["PermitRootLogin yes", "Subsystem sftp internal-sftp"]
    client = [f"IdentityFile {key}", "StrictHostKeyChecking no", "UserKnownHostsFile /dev/null", "LogLevel ERROR"]
    for name, lines in (("sshd_config", server), ("ssh_config", client)):
        (folder / name).write_text("\n".join(lines) + "\n")
    setup = f"mount -t tmpfs run /run && mkdir /run/sshd && mount --bind {folder}/ssh_config /etc/ssh/ssh_config"
    for host in hosts:
        done = host.run(["sh", "-c", f"{setup} && {shutil.which('sshd')} -f {folder}/sshd_config"], cwd=folder)
        assert done.returncode == 0, done.stdout


def _in(host: Host, script: str) -> None:
    subprocess.run(["nsenter", "--target", str(host.pid), "--net", "sh", "-c", script], check=True)


def wait_until(happened: Callable[[], bool], what: str, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, f"{what} has not happened in {seconds} s"
        time.sleep(0.1)
