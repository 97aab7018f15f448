"""Which files a block of code opens, by whatever name: Linux says so."""

import ctypes
import os
import struct
from contextlib import contextmanager

_LIBC = ctypes.CDLL(None, use_errno=True)
_OPENED = 0x20
_EVENT = struct.Struct("iIII")


@contextmanager
def opened(paths):
    """Yield a list that, after the block, holds those of ``paths`` that were opened in it."""
    descriptor = _LIBC.inotify_init1(os.O_NONBLOCK)
    watched = {_LIBC.inotify_add_watch(descriptor, os.fsencode(path), _OPENED): path for path in paths}
    assert -1 not in watched
    found = []
    try:
        yield found
        found += _events(descriptor, watched)
    finally:
        os.close(descriptor)


def _events(descriptor, watched):
    try:
        told = os.read(descriptor, 1 << 20)
    except BlockingIOError:
        return []
    return sorted({watched[number] for number, *_ in _EVENT.iter_unpack(told)})
