"""The admin app: metrics, workers, decisions and the index, on a port of its own.

Here: read-only views for operators and scrapers. Not here: anything the data path waits for.
"""

from kvatlas.admin.api import AdminState, make_admin_app
from kvatlas.admin.metric_list import METRICS
from kvatlas.admin.metrics import MetricsCollector
from kvatlas.admin.views import WorkerView

__all__ = ["METRICS", "AdminState", "MetricsCollector", "WorkerView", "make_admin_app"]
