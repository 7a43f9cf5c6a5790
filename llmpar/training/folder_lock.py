"""Locks of a folder of checkpoints: one process writes there, and what another one reads is not deleted.

Locks are the kernel's: they end with the process that holds them, whatever ended that. On a file system
without locks there are none.
"""

import contextlib
import errno
import os
import pathlib
import shutil
import socket
import time
import zlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

# Errors of a machine, which say nothing about what a file holds.
HINDRANCES = (
    errno.EACCES,
    errno.EPERM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EIO,
    errno.ESTALE,
)


class FolderLock:
    """The lock of a folder, which is its file ``lock``, and those of the checkpoints in it."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._file: Any = None

    def take(self, stack: contextlib.ExitStack) -> None:
        """Take the lock until the stack closes, and remove leftovers of saves that were interrupted."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self._file = stack.enter_context(open(self.folder / "lock", "a+"))
            stack.callback(setattr, self, "_file", None)
            # no Unix, or no locks on this file system
            with contextlib.suppress(ImportError, OSError):
                import fcntl

                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    file.seek(0)
                    raise ValueError(
                        f"{file.read() or 'another process'} is writing checkpoints to {self.folder};"
                        " wait for it, or give another folder"
                    ) from None
            for torn in self.folder.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(torn)
            file.truncate(0)
            print(f"process {os.getpid()} on {socket.gethostname()}", end="", file=file, flush=True)
        except OSError as error:
            raise ValueError(
                f"cannot write checkpoints to {self.folder}: {error.strerror}; give a folder that can be"
                " written"
            ) from error

    def is_ours(self) -> bool:
        """Tell whether the folder still has the lock that this process took: a lock goes with a file, not
        with its name."""
        if self._file is None:
            return True
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.folder / "lock"))
        return False

    def check_shared(self) -> None:
        """Refuse a folder that is not the first process's: all write into one."""
        # Who looks for a file before it is there may see it late on a network's file system.
        own = self._sum() if jax.process_index() == 0 else 0
        first = int(multihost_utils.broadcast_one_to_all(np.uint32(own)))
        until = time.monotonic() + 5
        while (seen := self._sum()) != first and time.monotonic() < until:
            time.sleep(0.2)
        if seen != first:
            raise ValueError(
                f"process {jax.process_index()} on {socket.gethostname()} does not see what process 0 writes"
                f" in {self.folder}; give a folder that all hosts share"
            )

    def _sum(self) -> int:
        """Return a checksum of the lock as this process sees it; 0 where it sees none."""
        with contextlib.suppress(OSError):
            return zlib.crc32((self.folder / "lock").read_bytes())
        return 0

    def hold(self, step: int, alone: bool = False) -> int:
        """Open a checkpoint's folder and lock it, with others that read it or ``alone``."""
        import fcntl

        file = os.open(self.folder / str(step), os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_NB | (fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        except OSError:
            os.close(file)
            raise
        return file

    def is_free(self, step: int) -> bool:
        """Tell whether no process is reading a checkpoint; without locks on a file system none is known."""
        with contextlib.suppress(OSError, ImportError):
            try:
                os.close(self.hold(step, alone=True))
            except BlockingIOError:
                return False
        return True


def hindered(path: pathlib.Path, error: BaseException | None) -> str | None:
    """Return what hindered reading a checkpoint, where that is no damage: it was deleted, or this machine
    refused. None: all files can be read, and their content is not what was written."""
    if not path.is_dir():
        return "it was taken away meanwhile, as a training does with older ones; run the same command again"
    while error:
        for number in HINDRANCES:
            if (
                isinstance(error, OSError)
                and error.errno == number
                or os.strerror(number) in str(error)
            ):
                return f"{os.strerror(number)}; mend that, and run the same command again"
        error = error.__cause__ or error.__context__
    try:
        for folder, _, names in os.walk(path, onerror=_raise):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:
                    while file.read(1 << 20):
                        pass
    except OSError as other:
        return f"{other.strerror}: '{other.filename}'; mend that, and run the same command again"
    return None


def _raise(error: Exception) -> None:
    raise error
