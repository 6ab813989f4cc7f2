"""Evidence: recordings of real engines played through our own index, and loads driven through a gateway.

Here: loads, drivers and the sums of what came out. Not here: engines and gateways; whoever runs them hands in a URL.
"""

from kvatlas.replay.conversations import Conversation, ConversationSettings, make_conversations
from kvatlas.replay.drive import TurnResult, hold_conversations
from kvatlas.replay.recorded import Difference, ReplayReport, replay_recording
from kvatlas.replay.report import RunSummary, percentile, summarise

__all__ = [
    "Conversation",
    "ConversationSettings",
    "Difference",
    "ReplayReport",
    "RunSummary",
    "TurnResult",
    "hold_conversations",
    "make_conversations",
    "percentile",
    "replay_recording",
    "summarise",
]
