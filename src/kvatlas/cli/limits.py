"""What the system allows a process: a gateway takes as many open files as it may."""

import logging
import resource

__all__ = ["allow_many_files"]

_log = logging.getLogger(__name__)


def allow_many_files() -> int:
    """Raise this process's limit of open files to the most it may set itself. Returns the limit now in force.

    A followed worker takes six (SUB and DEALER with a connection each, and the monitor's two ends), each request two;
    many systems start with 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:
        _log.warning("the limit of open files stays at %d: %s; raise it with ulimit -n", soft, error)
        return soft
    return hard
