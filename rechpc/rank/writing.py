"""How the bytes of a checkpoint get into a file: in one pass over memory, past the page cache.

Copying into the page cache takes a core about as long as SHA-256, so the two together are slower than a disk. A direct
write takes no core: the checksums of what comes next are made meanwhile. Must not know what the bytes mean.
"""

import concurrent.futures
import errno
import fcntl
import hashlib
import itertools
import logging
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from rechpc.manifest import File

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
"""What to hand over at a time: it stays in a core's cache for all that is done to it."""

_BUFFER_BYTES = 16 << 20  # of one write; whole pages, as direct writes want


def write(path: Path, chunks: Iterable[memoryview]) -> File:
    """Write chunks of bytes one after the other to a new file, durably. Raises OSError and what `chunks` raises."""
    slow, fast, size_bytes = hashlib.sha256(), xxhash.xxh3_128(), 0

    def hashed() -> Iterator[memoryview]:
        for chunk in chunks:
            slow.update(chunk)
            fast.update(chunk)
            yield chunk

    with open(path, "xb", buffering=0) as file, concurrent.futures.ThreadPoolExecutor(1) as beside:
        try:
            _set_direct(file.fileno(), True)
        except OSError as error:
            logger.info("path=%s written through the page cache, direct writes: %s", path, error.strerror)
        written = beside.submit(_write_at, file.fileno(), memoryview(b""), 0)
        for buffer in _joined(hashed()):
            written.result()  # then its buffer is free for what comes after this one
            written = beside.submit(_write_at, file.fileno(), buffer, size_bytes)
            size_bytes += len(buffer)
        written.result()
        os.fsync(file.fileno())
    return File(path.name, size_bytes, slow.hexdigest(), fast.hexdigest())


def _joined(chunks: Iterator[memoryview]) -> Iterator[memoryview]:
    """The same bytes in one page-aligned buffer and the other by turns, all but the last of them full."""
    buffers = itertools.cycle([memoryview(mmap.mmap(-1, _BUFFER_BYTES)) for _ in range(2)])
    buffer, filled = next(buffers), 0
    for chunk in chunks:
        while chunk:
            count = min(len(chunk), _BUFFER_BYTES - filled)
            buffer[filled : filled + count] = chunk[:count]
            chunk, filled = chunk[count:], filled + count
            if filled == _BUFFER_BYTES:
                yield buffer
                buffer, filled = next(buffers), 0
    yield buffer[:filled]


def _write_at(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        try:
            count = os.pwrite(descriptor, data, position)
        except OSError as error:
            # A file's last bytes are no whole page, and some file systems want larger ones.
            if error.errno != errno.EINVAL or not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise
            _set_direct(descriptor, False)
            continue
        data, position = data[count:], position + count


def _set_direct(descriptor: int, direct: bool) -> None:
    """Raises OSError where the file system has no direct writes."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))
