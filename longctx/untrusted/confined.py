"""Run code on untrusted input in a forked process, whose time and memory the kernel limits.

Chat templates, tokenizers and configurations can loop forever or ask for all memory, in compiled code that Python
cannot interrupt. A fork shares what this process has loaded, so it starts in milliseconds.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import math
import os
import pickle
import resource
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, Never, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

SECONDS = 30.0
MEMORY_BYTES = 2 << 30
_SECONDS_PER_CHARACTER = 50e-6
"""A slow tokenizer, written in Python, needs half of this."""
_BYTES_PER_CHARACTER = 512
"""A fast tokenizer needs up to 200 bytes per token, and a character can be a token."""

_WAITED_PER_SECOND = 60
"""Seconds to wait per second of CPU time, since the machine may be busy."""

_START_SECONDS = (5.0, 10.0, 20.0, 40.0, 80.0)
"""Seconds that each attempt to start a process may take; an idle machine needs milliseconds."""

_STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class Bounds:
    """Limits of one call."""

    seconds: float
    """CPU time of all threads together."""
    memory_bytes: int
    """Memory beyond what the process starts with; limited on Linux only."""

    @classmethod
    def of_text(cls, characters: int) -> Bounds:
        """Return generous bounds for tokenizing a text of this length."""
        return cls(SECONDS + characters * _SECONDS_PER_CHARACTER, MEMORY_BYTES + characters * _BYTES_PER_CHARACTER)


class OutOfBounds(Exception):
    """The call was ended, or its process ended itself; the message says why, as a clause whose subject is "it"."""


class Confined(Generic[Parameters, Result]):
    """A process that calls one function again and again, within bounds.

    The first call starts it, as does the first one after it has ended, or in a process that was forked from this one.
    """

    def __init__(self, function: Callable[Parameters, Result]) -> None:
        """
        Args:
            function: the process has its own copy of it, and of all that it refers to, as they are at its start.
        """
        self._function, self._pid, self._owner = function, 0, 0

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the process, which belongs to the process that started it."""
        return {"_function": self._function, "_pid": 0, "_owner": 0}

    def start(self) -> None:
        """Start the process, unless it runs already.

        A process that does not start is ended, and another one is forked. CPython, as of 3.11, waits forever in the
        child if a thread of another library, such as torch or Arrow, was just being registered with the interpreter.

        Raises:
            OutOfBounds: No process has started.
        """
        if self._pid and self._owner == os.getpid():
            return
        for seconds in _START_SECONDS:
            self._fork()
            if self._connection.poll(seconds):
                with suppress(EOFError, ConnectionError):  # it has crashed, and a call reports how
                    self._connection.recv()
                return
            self.close()
        raise OutOfBounds(f"its process did not start in {len(_START_SECONDS)} attempts")

    def _fork(self) -> None:
        self._connection, theirs = Pipe()
        self._owner = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about forking with threads, from Python 3.12
            self._pid = os.fork()
        if self._pid == 0:
            self._connection.close()
            _serve(self._function, theirs)
        theirs.close()

    def call(self, bounds: Bounds, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """Return the function's result or raise its exception; what it logged is logged here.

        Raises:
            OutOfBounds: The process is gone; the next call starts another.
        """
        self.start()
        try:
            self._connection.send((bounds, args, kwargs))
            if not self._connection.poll(_WAITED_PER_SECOND * bounds.seconds):
                raise OutOfBounds(f"it gave no answer within {_WAITED_PER_SECOND * bounds.seconds:,.0f} s")
            logged, result, error = self._connection.recv()
        except (EOFError, ConnectionError):
            raise OutOfBounds(self._reason(bounds)) from None
        except BaseException:
            self.close()
            raise
        for record in logged:
            logging.getLogger(record.name).handle(record)
        if isinstance(error, OutOfBounds):
            self.close()
        if error is not None:
            raise error
        return result

    def _reason(self, bounds: Bounds) -> str:
        """Return why the process ended."""
        status = 0
        with suppress(ChildProcessError):  # another caller has waited for it
            _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        self._connection.close()
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGXCPU:
            return f"it ran for more than {bounds.seconds:,.0f} s of CPU time"
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if name in ("SIGABRT", "SIGKILL"):
            return f"{_too_much_memory(bounds)}, or failed ({name})"
        return f"it crashed ({name})"

    def close(self) -> None:
        """End the process, if it runs and is this process's own."""
        if self._pid and self._owner == os.getpid():
            self._connection.close()
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            self._pid = 0

    __del__ = close


def confined(function: Callable[[], Result], bounds: Bounds) -> Result:
    """Call a function once, in a process of its own.

    Raises:
        OutOfBounds: It did not end within the bounds, or ended its process.
    """
    process = Confined(function)
    try:
        return process.call(bounds)
    finally:
        process.close()


def _serve(function: Callable[..., Any], connection: Connection) -> Never:
    """Answer calls until the other end of the pipe is closed."""
    try:
        connection.send(None)  # it has started
        gc.freeze()
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust's panics print a hundred lines
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # terminals and SLURM signal all; this one ends with its owner
        _lower(resource.RLIMIT_CORE, 0)
        logged: list[logging.LogRecord] = []
        logging.Logger.callHandlers = lambda self, record: logged.append(record)  # type: ignore[method-assign]
        held = data_bytes()
        while True:
            bounds, args, kwargs = connection.recv()
            _lower(resource.RLIMIT_CPU, math.ceil(time.process_time() + bounds.seconds))
            if held is not None:
                _lower(resource.RLIMIT_DATA, held + bounds.memory_bytes)
            result, error = _outcome(function, bounds, args, kwargs)
            connection.send((list(map(_portable_record, logged)), result, error))
            logged.clear()
            del result, error
    except MemoryError:
        os.abort()
    finally:
        os._exit(0)


def _outcome(
    function: Callable[..., Any], bounds: Bounds, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Exception | None]:
    try:
        return function(*args, **kwargs), None
    except MemoryError:
        return None, OutOfBounds(_too_much_memory(bounds))
    except Exception as error:
        return None, _portable(error)
    except BaseException as error:  # a Rust panic is no Exception
        return None, OutOfBounds(f"it failed ({type(error).__name__}: {str(error)[:200]})")


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _portable_record(record: logging.LogRecord) -> logging.LogRecord:
    record.msg, record.args, record.exc_info = record.getMessage(), None, None
    return record


def _too_much_memory(bounds: Bounds) -> str:
    return f"it asked for more than {bounds.memory_bytes >> 20:,} MiB of memory"


def data_bytes() -> int | None:
    """Return this process's private writable memory in bytes, which RLIMIT_DATA bounds; None if unknown.

    Unlike RLIMIT_AS, this excludes memory that is only reserved: 64 MiB per thread, and all GPU memory.
    """
    if not _STATM.exists():
        return None
    return int(_STATM.read_text().split()[5]) * resource.getpagesize()


def _lower(limit: int, value: int) -> None:
    """Set the soft limit, as far as the hard one allows."""
    _, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
