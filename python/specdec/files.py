"""Opens what a job or a benchmark writes, or reads back, itself and nothing that a symbolic link points to: in a folder
that others write to as well, a link instead of a result or of a temporary file would have any file overwritten."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path


def open_itself(path: Path, flags: int) -> int:
    """As ``os.open``, which it returns the file descriptor of. Raises OSError, also where ``path`` is a symbolic link:
    ``strerror`` then says so."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise _link(path) from error
        raise


def open_new(path: Path) -> int:
    """Opens a temporary file for writing, instead of one that a killed process left. Raises OSError as
    :func:`open_itself` does."""
    if path.is_symlink():
        raise _link(path)
    path.unlink(missing_ok=True)  # its contents may have another name, a hard link
    return open_itself(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def write_whole(path: Path, content: str | bytes | Iterable[bytes]) -> None:
    """Writes the whole file or nothing, text as UTF-8; it is on the disk when this returns. Raises OSError.

    Args:
        content: of the file, or its parts, which need not be in memory all at once.
    """
    content = content.encode("utf-8") if isinstance(content, str) else content
    part = path.with_name(f".{path.name}.part")
    opened = open_new(part)
    try:
        with open(opened, "wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _link(path: Path) -> OSError:
    return OSError(errno.ELOOP, "a symbolic link, which is not followed", str(path))
