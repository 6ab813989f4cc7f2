"""Every error kvatlas raises on purpose.

The tree (catch the highest name that means the same to you)::

    KvAtlasError
    ├── ConfigError              what the operator configured cannot work
    ├── HashingError             token ids, extra keys or algorithm cannot be hashed
    ├── EventDecodeError         bytes on the event stream are not what an engine sends
    ├── SequenceGapError         batches are missing and replay could not return them
    ├── StreamPeerError          who answers at an event stream's endpoint is no publisher
    ├── PublisherClosed          something was to be published after close
    ├── IndexStateError          the index was asked for something its state does not allow
    ├── PrefixCacheError         the engine-side prefix cache was driven against its rules
    ├── RenderError              a request cannot be turned into token ids
    ├── NoWorkerAvailable        no worker may take this request now
    ├── UpstreamError            an engine failed us
    │   ├── UpstreamConnectError     no connection
    │   ├── UpstreamTimeoutError     a connection, but no answer in time
    │   └── BadUpstreamResponseError an answer that is not HTTP, or ended early
    └── BadRequest               the client's request cannot be served
        ├── ModelNotFound            no worker serves that model
        ├── PathNotForwarded         that path is not for clients
        ├── DecisionNotFound         no record of that request's routing
        └── BodyTooLarge             the body is over the configured limit

Each class carries a stable `code` (what programs match on) and an `http_status` (what the gateway answers with);
`error_type` is the OpenAI `type` that goes with a status. A message says what was given, what was expected and what to
do.
"""

from typing import ClassVar

__all__ = [
    "BadRequest",
    "BadUpstreamResponseError",
    "BodyTooLarge",
    "ConfigError",
    "DecisionNotFound",
    "EventDecodeError",
    "HashingError",
    "IndexStateError",
    "KvAtlasError",
    "ModelNotFound",
    "NoWorkerAvailable",
    "PathNotForwarded",
    "PrefixCacheError",
    "PublisherClosed",
    "RenderError",
    "SequenceGapError",
    "StreamPeerError",
    "UpstreamConnectError",
    "UpstreamError",
    "UpstreamTimeoutError",
    "error_type",
]


class KvAtlasError(Exception):
    """Root of every deliberate kvatlas error."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500

    @property
    def message(self) -> str:
        """The text that goes to a person."""
        return str(self.args[0]) if self.args else self.code


class ConfigError(KvAtlasError):
    """The configuration cannot work: fix it and start again."""

    code = "config_error"
    http_status = 400


class HashingError(KvAtlasError):
    """Token ids, extra keys or the algorithm's name cannot be hashed."""

    code = "hashing_error"
    http_status = 400


class EventDecodeError(KvAtlasError):
    """Bytes on the event stream are not what an engine sends. Drop them, count them, go on."""

    code = "event_decode_error"
    http_status = 502


class SequenceGapError(KvAtlasError):
    """Batches are missing and replay did not return them: what was learnt before is unconfirmed."""

    code = "sequence_gap"
    http_status = 502


class StreamPeerError(KvAtlasError):
    """Who answers at an event stream's endpoint is no publisher that can be followed: check host and port."""

    code = "stream_peer_error"
    http_status = 502


class PublisherClosed(KvAtlasError):  # noqa: N818 - reads as the state it reports
    """The publisher was closed: make a new one, its sequence numbers start again at 0."""

    code = "publisher_closed"


class IndexStateError(KvAtlasError):
    """The index was asked for something its state does not allow (unknown worker, worker twice)."""

    code = "index_state_error"
    http_status = 409


class PrefixCacheError(KvAtlasError):
    """The engine-side prefix cache was driven against its rules (double free, block count)."""

    code = "prefix_cache_error"


class RenderError(KvAtlasError):
    """A request cannot be turned into token ids. The gateway then routes without the index and says so."""

    code = "render_error"
    http_status = 400


class NoWorkerAvailable(KvAtlasError):  # noqa: N818 - the design's name; it reads as the state it reports
    """No worker may take this request now. Try again later."""

    code = "no_worker_available"
    http_status = 503


class UpstreamError(KvAtlasError):
    """An engine failed us."""

    code = "upstream_error"
    http_status = 502


class UpstreamConnectError(UpstreamError):
    """No connection to the engine could be made."""

    code = "upstream_connect_error"
    http_status = 502


class UpstreamTimeoutError(UpstreamError):
    """The engine accepted the request and did not answer in time."""

    code = "upstream_timeout"
    http_status = 504


class BadUpstreamResponseError(UpstreamError):
    """The engine's answer is not HTTP, or ended before it was complete."""

    code = "bad_upstream_response"
    http_status = 502


class BadRequest(KvAtlasError):  # noqa: N818 - named after the HTTP status it becomes
    """The client's request cannot be served as it stands."""

    code = "bad_request"
    http_status = 400


class ModelNotFound(BadRequest):
    """No worker serves the requested model."""

    code = "model_not_found"
    http_status = 404


class DecisionNotFound(BadRequest):
    """No record of that request's routing: never routed here, or replaced by newer records."""

    code = "decision_not_found"
    http_status = 404


class PathNotForwarded(BadRequest):
    """Requests of that path are not passed on to engines. `forward_all_paths` opens everything."""

    code = "path_not_forwarded"
    http_status = 404


class BodyTooLarge(BadRequest):
    """The request body is over the configured limit."""

    code = "body_too_large"
    http_status = 413


def error_type(http_status: int) -> str:
    """The `type` of an error answer: whose fault it is, in OpenAI's words. One rule for gateway and admin port."""
    return "invalid_request_error" if http_status < 500 else "server_error"
