"""The event stream over ZMQ: publish it, follow it, journal it, read recordings of it. ZMQ lives in this room only.

What a batch means is not known here: payloads go to an `EventSink` undecoded, and the order is `kvatlas.events`'
affair.
"""

from kvatlas.stream.endpoints import binds, offset_endpoint
from kvatlas.stream.journal import Journal
from kvatlas.stream.journal_segment import (
    NO_ENGINE_SEQ,
    Extent,
    JournalRecord,
    Segment,
    SegmentHeader,
    read_extent,
    read_records,
)
from kvatlas.stream.outlet import LinkDown, LinkUp, LiveStep, Outlet, PlainOutlet, ReplayAnswer, Sent
from kvatlas.stream.publisher import ZmqEventPublisher
from kvatlas.stream.publisher_sockets import PublisherConfig, PublisherSockets
from kvatlas.stream.recording import (
    Record,
    RecordedFrames,
    RecordedMetrics,
    RecordedRequest,
    RecordedReset,
    RecordingWriter,
    read_recording,
)
from kvatlas.stream.replay_server import ReplayServer, ReplayServerConfig, ReplaySource, ServerCounters
from kvatlas.stream.sink import EventSink, StreamStatus
from kvatlas.stream.spread import Spread
from kvatlas.stream.subscriber import ZmqEventSubscriber
from kvatlas.stream.subscriber_config import StreamCounters, SubscriberConfig
from kvatlas.stream.subscriber_core import SubscriberCore

__all__ = [
    "NO_ENGINE_SEQ",
    "EventSink",
    "Extent",
    "Journal",
    "JournalRecord",
    "LinkDown",
    "LinkUp",
    "LiveStep",
    "Outlet",
    "PlainOutlet",
    "PublisherConfig",
    "PublisherSockets",
    "Record",
    "RecordedFrames",
    "RecordedMetrics",
    "RecordedRequest",
    "RecordedReset",
    "RecordingWriter",
    "ReplayAnswer",
    "ReplayServer",
    "ReplayServerConfig",
    "ReplaySource",
    "Segment",
    "SegmentHeader",
    "Sent",
    "ServerCounters",
    "Spread",
    "StreamCounters",
    "StreamStatus",
    "SubscriberConfig",
    "SubscriberCore",
    "ZmqEventPublisher",
    "ZmqEventSubscriber",
    "binds",
    "offset_endpoint",
    "read_extent",
    "read_recording",
    "read_records",
]
