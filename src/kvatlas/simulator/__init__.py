"""Engines without GPUs: what a vLLM server shows to its clients, with a clock in place of the model.

Lives here: the scheduler, the time model, made-up replies, the HTTP face of a vLLM server, and fleets of such engines
as processes. The prefix cache and the event bytes are the real ones, from the rooms below. Must not live here: routing,
and anything the gateway needs to talk to a real engine. Nothing above can tell that an engine is simulated.
"""

from kvatlas.simulator.address import EngineAddress
from kvatlas.simulator.config import EngineConfig, EventsConfig, LatencyConfig, config_for_engine
from kvatlas.simulator.core import EngineCore, Step
from kvatlas.simulator.engine import EventPublisher, SimulatedEngine
from kvatlas.simulator.fleet import SimulatedFleet
from kvatlas.simulator.latency import LatencyModel
from kvatlas.simulator.metrics import EngineMetrics
from kvatlas.simulator.replies import Reply, ReplySampler
from kvatlas.simulator.request import EngineRequest, TokenSource
from kvatlas.simulator.sampling import FinishReason, SamplingParams
from kvatlas.simulator.scheduler import Scheduler, SchedulerLimits
from kvatlas.simulator.served_engine import ServedEngine
from kvatlas.simulator.server import VLLM_VERSION, EngineApi
from kvatlas.simulator.step import RequestOutput, ScheduledRequest, StepPlan, StepResult
from kvatlas.simulator.streams import OutputStream
from kvatlas.simulator.vocabulary import ReplyVocabulary

__all__ = [
    "VLLM_VERSION",
    "EngineAddress",
    "EngineApi",
    "EngineConfig",
    "EngineCore",
    "EngineMetrics",
    "EngineRequest",
    "EventPublisher",
    "EventsConfig",
    "FinishReason",
    "LatencyConfig",
    "LatencyModel",
    "OutputStream",
    "Reply",
    "ReplySampler",
    "ReplyVocabulary",
    "RequestOutput",
    "SamplingParams",
    "ScheduledRequest",
    "Scheduler",
    "SchedulerLimits",
    "ServedEngine",
    "SimulatedEngine",
    "SimulatedFleet",
    "Step",
    "StepPlan",
    "StepResult",
    "TokenSource",
    "config_for_engine",
]
