"""Which worker gets a request: candidates in, a ranked decision with its reason out. Sans-IO.

Lives here: the cost model, the policies, the record of decisions.
Must not live here: the index, load counting, health, HTTP; whoever calls has already left out workers that may not be
chosen.
"""

from kvatlas.routing.candidate import Candidate, RoutingRequest
from kvatlas.routing.cost import CostInputs, CostTerms, cost_terms, uncached_tokens
from kvatlas.routing.decision import CandidateScore, Decision, DecisionLog, DecisionRecord
from kvatlas.routing.picker import Picker
from kvatlas.routing.policies import (
    CostPolicy,
    LeastLoadedPolicy,
    LongestPrefixPolicy,
    RandomPolicy,
    RoundRobinPolicy,
)
from kvatlas.routing.ranking import Policy, PolicySettings, Ranking
from kvatlas.routing.registry import DEFAULT_POLICY, POLICY_NAMES, make_policy

__all__ = [
    "DEFAULT_POLICY",
    "POLICY_NAMES",
    "Candidate",
    "CandidateScore",
    "CostInputs",
    "CostPolicy",
    "CostTerms",
    "Decision",
    "DecisionLog",
    "DecisionRecord",
    "LeastLoadedPolicy",
    "LongestPrefixPolicy",
    "Picker",
    "Policy",
    "PolicySettings",
    "RandomPolicy",
    "Ranking",
    "RoundRobinPolicy",
    "RoutingRequest",
    "cost_terms",
    "make_policy",
    "uncached_tokens",
]
