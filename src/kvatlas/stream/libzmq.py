"""Where libzmq's calls are in this process, for the native reader of sockets.

pyzmq brings its own libzmq or is linked to the system's; either way it has loaded it, and these are documented calls of
its stable interface. So a batch costs no Python object but its payload, where pyzmq makes three frames of it and asks
after each whether another follows.
"""

import ctypes
import importlib
from array import array
from functools import cache

import zmq

__all__ = ["libzmq_calls"]

# In the order of `kva_zmq` in zmq_frames.h.
_NAMES = ("zmq_msg_init", "zmq_msg_recv", "zmq_msg_more", "zmq_msg_data", "zmq_msg_size", "zmq_msg_close", "zmq_errno")


@cache
def libzmq_calls() -> "array[int] | None":
    """Addresses of the calls that read a socket; None where they cannot be had, as under PyPy."""
    if zmq.zmq_version_info()[0] != 4:
        return None  # what a message is made of may change with the first number
    try:
        backend = importlib.import_module("zmq.backend.cython._zmq")
        if zmq.backend.Socket is not backend.Socket:
            return None  # another backend runs, with a libzmq of its own
        library = ctypes.CDLL(backend.__file__)  # loaded already: its calls and those of what it is linked to
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _NAMES]
    except (ImportError, OSError, AttributeError):
        return None
    return None if None in found else array("Q", (address or 0 for address in found))
