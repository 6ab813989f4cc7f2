"""The routing policies, one to a module. They rank candidates and know nothing of indexes, streams or sockets."""

from kvatlas.routing.policies.cost import CostPolicy
from kvatlas.routing.policies.least_loaded import LeastLoadedPolicy
from kvatlas.routing.policies.longest_prefix import LongestPrefixPolicy
from kvatlas.routing.policies.random_choice import RandomPolicy
from kvatlas.routing.policies.round_robin import RoundRobinPolicy

__all__ = ["CostPolicy", "LeastLoadedPolicy", "LongestPrefixPolicy", "RandomPolicy", "RoundRobinPolicy"]
