"""Reports on hangs: while one rank keeps the others waiting, each writes its stacks to OUT/hang/rank-R.txt.

A rank does so once it has made no progress for most of --ddp_timeout: before gloo raises an error in the ranks that
wait, and before NCCL's watchdog aborts them. If the rank makes progress after all, its file is removed.
"""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import MutableMapping
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from math import inf
from pathlib import Path

import torch.distributed as dist

from longctx.ranks import FAILED, is_first_on_node
from longctx.ranks.peers import LEAVE_SECONDS, Peers, current_peers
from longctx.untrusted.files import written_whole

HANG_FOLDER = "hang"
_WAITING_IN = ("/torch/distributed/", "/deepspeed/comm/")
_SHOWN_FRAMES = 5
_SHOWN_PLACES = 10
_FRAME = re.compile(r'  File "(.+)", line (\d+), in (.+)\n?(?:    (.*))?')


class HangWatch:
    """A thread that writes where this rank stands while it has not gone on for most of the time-out.

    If the process of the rank before this one ends, the thread has the main thread leave calls that wait for others. It
    ends this process where that does not help.
    """

    def __init__(self) -> None:
        self._patience = self._due = inf
        self._seen = self._written = ""
        self._lock, self._stopped = threading.Lock(), threading.Event()

    def start(self, peers: Peers, folder: Path, timeout: float) -> None:
        """Start the thread anew, and remove what an earlier attempt has written.

        Args:
            folder: for the files of all ranks.
            timeout: seconds that ranks wait for each other.
        """
        self.stop()
        self._stopped = threading.Event()
        self._peers, self._path = peers, folder / f"rank-{peers.rank}.txt"
        self._timeout, self._patience = timeout, patience(timeout)
        peers.has_ended(peers.before)  # connects, for which the thread must not use the store
        if is_first_on_node():
            shutil.rmtree(folder, ignore_errors=True)
        self.go_on()
        threading.Thread(target=self._watch, args=(self._stopped,), name="longctx-hang", daemon=True).start()

    def go_on(self) -> None:
        """Say that this rank goes on: it begins a part of the run, or waits where that may take long."""
        with self._lock:
            self._due = time.monotonic() + self._patience
            if self._written:
                self._seen = self._written = ""
                with suppress(OSError):
                    self._path.unlink()
                    self._path.parent.rmdir()  # when the last rank goes on

    def stop(self) -> None:
        """End the thread, and keep what this rank has written."""
        with self._lock:
            self._stopped.set()

    def _watch(self, stopped: threading.Event) -> None:
        look_seconds = min(5.0, (self._timeout - self._patience) / 4)
        shown = -inf
        while not stopped.wait(min(max(self._due - time.monotonic(), 0.1), look_seconds)):
            if self._peers.has_ended(self._peers.before):
                self._peers.cut_connections(self._peers.before)  # gloo does not notice that a machine is gone
                if not stopped.wait(LEAVE_SECONDS):
                    os._exit(FAILED)
                return
            with self._lock, suppress(OSError):
                due = self._due
                late = time.monotonic() - due
                if late >= 0 and not stopped.is_set():
                    self._write()
            if late > look_seconds and shown != due and self._peers.rank == 0 and "nccl" in dist.get_backend_config():
                shown = due  # NCCL raises no error that could be printed; the other ranks have written, too
                waited, timeout = self._patience + late, self._timeout
                head = f"no progress for {waited:.0f} s; NCCL ends the run after {timeout:.0f} s (--ddp_timeout)"
                first, *lines = describe_hang(self._peers, self._path.parent)
                print(f"longctx: {head}; {first}", *lines, sep="\n", file=sys.stderr, flush=True)

    def _write(self) -> None:
        """Write the stacks, at first and whenever the main thread has been at another place for two looks."""
        main = threading.main_thread().ident
        assert main is not None, "it runs"
        before, self._seen = self._seen, "".join(traceback.format_stack(sys._current_frames()[main]))
        if self._seen == self._written or (self._written and self._seen != before):
            return
        with written_whole(self._path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
            print(self._seen, self._peers.names([self._peers.rank]), sep="\n", file=file, flush=True)
            faulthandler.dump_traceback(file)
        self._written = self._seen


WATCH = HangWatch()
"""That of this process, which begins with `limit_waiting`."""


def limit_waiting(seconds: float, output_dir: Path) -> None:
    """Give every existing process group this time-out, and watch for a hang; all ranks of a group call it.

    torch gives new groups its default of 10 or 30 minutes.

    Args:
        output_dir: of the run; it gets the folder `hang`.
    """
    if (peers := current_peers()) is not None:
        set_timeout = (
            getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        )  # public in torch 2.15
        for group in list(dist.distributed_c10d._world.pg_map):
            set_timeout(timedelta(seconds=seconds), group)
        WATCH.start(peers, output_dir / HANG_FOLDER, seconds)


def record_collectives(output_dir: Path, env: MutableMapping[str, str]) -> None:
    """Have NCCL's groups write their last collectives to the run's folder `hang` before they end a run that hangs.

    torch's flight recorder reads these variables when a group is made. What the user has set stays.
    """
    env.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    env.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    env.setdefault("TORCH_FR_DUMP_TEMP_FILE", str((output_dir / HANG_FOLDER / "collectives-").absolute()))


def patience(timeout: float) -> float:
    """Return the seconds after which a rank that does not go on writes where it stands.

    NCCL counts from the call of a collective, but the main thread runs ahead by the work it has queued. A tenth of the
    time-out, at least a minute and at most half of it, is left for that and for the files of the other ranks.
    """
    return timeout - min(timeout / 2, max(60.0, timeout / 10))


def describe_hang(peers: Peers, folder: Path) -> list[str]:
    """Return lines on which ranks are in no collective and where ranks stand; those at the same place share a line.

    Args:
        folder: the run's folder `hang`.
    """
    places: defaultdict[str, list[int]] = defaultdict(list)
    for rank in range(peers.world_size):
        text = ""
        with suppress(OSError):
            text = (folder / f"rank-{rank}.txt").read_text(encoding="utf-8")
        places[_place(text)].append(rank)
    found = sorted(places.items(), key=lambda place: (place[0].startswith("in a collective"), len(place[1])))
    absent = sorted(rank for place, ranks in found if not place.startswith("in a collective") for rank in ranks)
    who = peers.names(absent) or "none, so that collectives do not match"
    lines = [f"  rank{'s' * (len(ranks) > 1)} {_numbers(ranks)} {place}" for place, ranks in found[:_SHOWN_PLACES]]
    lines += [f"  and {len(found) - _SHOWN_PLACES} more places"] * (len(found) > _SHOWN_PLACES)
    return [f"in no collective: {who}", *lines, f"  The stacks of all threads are in {folder}."]


def _place(text: str) -> str:
    """Return where the main thread is, by the innermost frames outside of torch."""
    frames = _FRAME.findall(text.partition("\n\n")[0])[::-1]
    if not frames:
        return "without a stack, so stopped or in C code"
    waits = any(part in frames[0][0] for part in _WAITING_IN) or ".wait()" in frames[0][3]
    outside = [frame for frame in frames if "/torch/" not in frame[0]][:_SHOWN_FRAMES]
    shown = [f"{file.rpartition('/site-packages/')[2]}:{line} in {function}" for file, line, function, _ in outside]
    return f"in {'a' if waits else 'no'} collective: {' < '.join(shown).replace(f'{os.getcwd()}/', '')}"


def _numbers(ranks: list[int]) -> str:
    """Return ranks as text, such as `0–3, 5`."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda place: place[1] - place[0])]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
