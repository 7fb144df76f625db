"""SLURM from the distribution's packages, started for a test on hosts of tests/hosts.py and ended with them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.hosts import Host, two_hosts, wait_until, why_no_hosts

_CONFIGURATION = """
ClusterName=longctx
SlurmctldHost={first.name}({first.address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n.spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2
ReturnToService=2
KillWait=20
MpiDefault=none
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


@dataclass(frozen=True)
class Cluster:
    hosts: list[Host]
    folder: Path

    def run(self, command: Sequence[str], *, cwd: Path, env: dict[str, str] | None = None, timeout: float = 300):
        """CompletedProcess of a command on the first node, where the controller is."""
        return self.hosts[0].run(command, cwd=cwd, env=self.environment() | (env or {}), timeout=timeout)

    def start(self, command: Sequence[str], *, cwd: Path, env: dict[str, str] | None = None, **options):
        """Popen of it."""
        return self.hosts[0].start(command, cwd=cwd, env=self.environment() | (env or {}), **options)

    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}


def why_no_slurm() -> str | None:
    """Why there is none here, or None."""
    missing = [tool for tool in ("munged", "slurmctld", "slurmd", "srun", "sbatch") if shutil.which(tool) is None]
    return f"{', '.join(missing)}: not installed (Debian: slurm-wlm, munge)" if missing else why_no_hosts()


@contextmanager
def cluster(folder: Path, cpus: int = 128, gpus: int = 8) -> Iterator[Cluster]:
    """Two nodes that say they have `cpus` CPUs and `gpus` GPUs each, whatever there is.

    Args:
        folder: for configuration, state and logs; its path short enough for a socket.
    """
    with two_hosts(folder) as hosts:
        nodes = [f"NodeName={h.name} NodeAddr={h.address} CPUs={cpus} Gres=gpu:{gpus}" for h in hosts]
        configuration = _CONFIGURATION.format(first=hosts[0], folder=folder, nodes="\n".join(nodes))
        (folder / "slurm.conf").write_text(configuration)
        for number in range(gpus):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{gpus - 1}]\n")
        (folder / "state").mkdir()
        started = Cluster(hosts, folder)
        key = folder / "munge.key"
        subprocess.run(["mungekey", "--create", f"--keyfile={key}"], check=True)
        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("pid", "log", "seed")]
        munged = ["munged", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", *files]
        log = (folder / "started.log").open("w")
        daemons = [(hosts[0], munged), (hosts[0], ["slurmctld", "-c"])] + [(h, ["slurmd", "-N", h.name]) for h in hosts]
        for host, command in daemons:
            done = host.start(command, cwd=folder, env=started.environment(), stdout=log, stderr=log)
            assert done.wait(60) == 0, (folder / "started.log").read_text()
        wait_until(lambda: _idle(started) == len(hosts), f"SLURM's nodes in {folder}")
        yield started


def _idle(cluster: Cluster) -> int:
    return cluster.run(["sinfo", "--noheader", "--Node", "--format=%T"], cwd=cluster.folder).stdout.count("idle")
