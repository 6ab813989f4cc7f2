"""Fields and headers only the engine looks at."""

import pytest

from kvatlas.errors import BadRequest
from kvatlas.prefix_cache import ReportMode
from kvatlas.simulator.api_bodies import ClientOptions, GenerationBody, decode_body


@pytest.mark.parametrize(
    ("body", "mode"),
    [
        (b"{}", ReportMode.INCREMENTAL),
        (b'{"vllm_xargs": {"kv_cache_report_mode": "full"}}', ReportMode.FULL),
        (b'{"vllm_xargs": {"kv_cache_report_mode": "FULL"}}', ReportMode.INCREMENTAL),
        (b'{"vllm_xargs": {"kv_cache_report_mode": 1, "other": [2]}}', ReportMode.INCREMENTAL),
    ],
)
def test_report_mode(body, mode):
    """Only the exact word asks for full reports; anything else changes nothing, as in the engine."""
    assert decode_body(body, GenerationBody).kv_cache_report_mode is mode


@pytest.mark.parametrize(
    ("body", "headers", "priority", "session"),
    [
        (b"{}", {}, 0, None),
        (b'{"priority": 3, "session_id": "b"}', {"X-Session-ID": "h"}, 3, "b"),
        (b'{"priority": 3}', {"X-Vllm-Priority": "-7", "X-Session-ID": "h"}, -7, "h"),
        (b'{"vllm_xargs": {"session_id": 5}}', {"X-Vllm-Priority": "urgent"}, 0, "5"),
    ],
)
def test_client_options(body, headers, priority, session):
    """The priority header wins over the body; of session ids the body's is first, then the header's, then the extras'."""
    options = ClientOptions.read(decode_body(body, GenerationBody), headers, rank=1)
    assert (options.rank, options.priority, options.session_id) == (1, priority, session)


def test_wrong_shape():
    """A field of the wrong type is named."""
    with pytest.raises(BadRequest, match="vllm_xargs"):
        decode_body(b'{"vllm_xargs": 3}', GenerationBody)
