"""The ZMQ context that everything in this process shares, with room for a large fleet."""

from typing import TypeAlias

import zmq

__all__ = ["shared_context"]

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

# A followed worker takes four sockets: SUB, the two ends of its monitor, DEALER. ZMQ's own limit is 1023.
_MOST_SOCKETS = 32_768


def shared_context() -> Context:
    """The process's context, shared so that `inproc://` works between its parts.

    Its limit of sockets counts from the first socket on: whoever opens that one must have got the context here.
    """
    context: Context = zmq.Context.instance()
    if context.get(zmq.MAX_SOCKETS) < _MOST_SOCKETS:
        context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
    return context
