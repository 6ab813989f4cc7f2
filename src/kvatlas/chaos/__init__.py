"""The index held against the truth while everything goes wrong, in virtual time.

Lives here: a timeline, simulated engines on it, a subscriber and a router without sockets, traffic, and the oracle that
knows what every engine truly holds. Must not live here: sockets, sleeps, rules of the product; those are imported from
the rooms below, so that what is judged is the product itself.
"""

from kvatlas.chaos.engine import EngineHooks, Job, VirtualEngine
from kvatlas.chaos.recovery import Recovery
from kvatlas.chaos.report import ChaosReport, ChaosRow, run_chaos
from kvatlas.chaos.router import VirtualRouter
from kvatlas.chaos.run import ChaosRun, ChaosSettings, Levels, Outcome
from kvatlas.chaos.scenarios import DEFAULT_SCENARIOS, Scenario, scenario
from kvatlas.chaos.scrape import Scraper
from kvatlas.chaos.subscriber import VirtualSubscriber
from kvatlas.chaos.timeline import Timeline, Timer
from kvatlas.chaos.traffic import Traffic, TrafficConfig, Turn
from kvatlas.chaos.truth import KeyBook, TrueCache
from kvatlas.chaos.watch import Findings, WorkerWatch

__all__ = [
    "DEFAULT_SCENARIOS",
    "ChaosReport",
    "ChaosRow",
    "ChaosRun",
    "ChaosSettings",
    "EngineHooks",
    "Findings",
    "Job",
    "KeyBook",
    "Levels",
    "Outcome",
    "Recovery",
    "Scenario",
    "Scraper",
    "Timeline",
    "Timer",
    "Traffic",
    "TrafficConfig",
    "TrueCache",
    "Turn",
    "VirtualEngine",
    "VirtualRouter",
    "VirtualSubscriber",
    "WorkerWatch",
    "run_chaos",
    "scenario",
]
