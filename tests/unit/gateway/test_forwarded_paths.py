"""Which paths reach an engine through the public port."""

import pytest

from kvatlas.gateway.forwarded_paths import FORWARDED_PATHS, is_forwarded


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/org%2Fname",
        "/v1/audio/transcriptions",
        "/v1/models/",
        "/tokenize/",
        *sorted(FORWARDED_PATHS),
    ],
)
def test_what_clients_use_is_forwarded(path: str):
    """The OpenAI paths and the plain ones engines offer beside them, with a slash at the end or without."""
    assert is_forwarded(path)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/",
        "/metrics",
        "/sleep",
        "/wake_up",
        "/reset_prefix_cache",
        "/collective_rpc",
        "/server_info",
        "/docs",
        "/openapi.json",
        "/v1/load_lora_adapter",
        "/v1/load_lora_adapter/",
        "/v1/unload_lora_adapter",
        "/tokenize/x",
        "/inference/v1/other",
        "/V1/models",
    ],
)
def test_what_operators_use_is_not(path: str):
    """Admin routes, LoRA loading, and whatever is not known to be for clients."""
    assert not is_forwarded(path)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load%5Flora_adapter",
        "/v1/%6coad_lora_adapter",
        "/v1/../sleep",
        "/v1/%2e%2e/sleep",
        "/v1/..%2fsleep",
        "/v1/./load_lora_adapter",
        "/v1//load_lora_adapter",
        "/v1/x\\..\\..\\sleep",
        "//sleep",
        "/tokenize/../sleep",
        "/v1/load_lora_adapter//",
    ],
)
def test_no_spelling_gets_around_it(path: str):
    """Percent-encoding, dot segments, doubled slashes and backslashes, which somebody behind us might resolve."""
    assert not is_forwarded(path)
