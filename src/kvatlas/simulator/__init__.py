"""Engines without GPUs: what a vLLM server shows to its clients, with a clock in place of the model.

Lives here: the scheduler, the time model, made-up replies, the HTTP face of a vLLM server, and fleets of such engines
as processes. The prefix cache and the event bytes are the real ones, from the rooms below. Must not live here: routing,
and anything the gateway needs to talk to a real engine. Nothing above can tell that an engine is simulated.
"""

from kvatlas.simulator.address import EngineAddress
from kvatlas.simulator.cache_picture import ContentNames, draw_cache
from kvatlas.simulator.cache_trace import EXAMPLE_SCRIPT, TraceRequest, TraceScript, read_script, trace_cache
from kvatlas.simulator.config import (
    ConnectorConfig,
    EngineConfig,
    EventsConfig,
    GroupConfig,
    LatencyConfig,
    SpeculativeConfig,
    config_for_engine,
)
from kvatlas.simulator.core import EngineCore, Step
from kvatlas.simulator.engine import EventPublisher, SimulatedEngine
from kvatlas.simulator.fault_kinds import (
    ClockJump,
    Crash,
    Cut,
    Delay,
    Drop,
    Duplicate,
    Fault,
    Hang,
    HwmLoss,
    LostTail,
    Reorder,
    ReplayFault,
    Reset,
    Restart,
    Silence,
    SlowStart,
)
from kvatlas.simulator.fault_plan import FaultPlan, PlacedFault
from kvatlas.simulator.fault_specs import FAULT_NAMES, fault_from_json, fault_spec, parse_fault, parse_faults
from kvatlas.simulator.faulty_stream import FaultyStream
from kvatlas.simulator.fleet import SimulatedFleet
from kvatlas.simulator.latency import LatencyModel
from kvatlas.simulator.limits import SchedulerLimits, SchedulingPolicy
from kvatlas.simulator.metrics import EngineMetrics, SleepState
from kvatlas.simulator.metrics_page import MetricsPage
from kvatlas.simulator.ranks import EngineRanks, PauseMode
from kvatlas.simulator.replies import Reply, ReplySampler
from kvatlas.simulator.request import Blocked, EngineRequest, TokenSource
from kvatlas.simulator.sampling import FinishReason, SamplingParams
from kvatlas.simulator.scheduler import Scheduler
from kvatlas.simulator.scheduler_state import PauseState
from kvatlas.simulator.served_engine import ServedEngine
from kvatlas.simulator.server import VLLM_VERSION, EngineApi
from kvatlas.simulator.step import CacheStats, RequestOutput, ScheduledRequest, StepPlan, StepResult
from kvatlas.simulator.streams import OutputStream
from kvatlas.simulator.vocabulary import ReplyVocabulary

__all__ = [
    "EXAMPLE_SCRIPT",
    "FAULT_NAMES",
    "VLLM_VERSION",
    "Blocked",
    "CacheStats",
    "ClockJump",
    "ConnectorConfig",
    "ContentNames",
    "Crash",
    "Cut",
    "Delay",
    "Drop",
    "Duplicate",
    "EngineAddress",
    "EngineApi",
    "EngineConfig",
    "EngineCore",
    "EngineMetrics",
    "EngineRanks",
    "EngineRequest",
    "EventPublisher",
    "EventsConfig",
    "Fault",
    "FaultPlan",
    "FaultyStream",
    "FinishReason",
    "GroupConfig",
    "Hang",
    "HwmLoss",
    "LatencyConfig",
    "LatencyModel",
    "LostTail",
    "MetricsPage",
    "OutputStream",
    "PauseMode",
    "PauseState",
    "PlacedFault",
    "Reorder",
    "ReplayFault",
    "Reply",
    "ReplySampler",
    "ReplyVocabulary",
    "RequestOutput",
    "Reset",
    "Restart",
    "SamplingParams",
    "ScheduledRequest",
    "Scheduler",
    "SchedulerLimits",
    "SchedulingPolicy",
    "ServedEngine",
    "Silence",
    "SimulatedEngine",
    "SimulatedFleet",
    "SleepState",
    "SlowStart",
    "SpeculativeConfig",
    "Step",
    "StepPlan",
    "StepResult",
    "TokenSource",
    "TraceRequest",
    "TraceScript",
    "config_for_engine",
    "draw_cache",
    "fault_from_json",
    "fault_spec",
    "parse_fault",
    "parse_faults",
    "read_script",
    "trace_cache",
]
