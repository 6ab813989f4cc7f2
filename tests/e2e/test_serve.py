"""`kvatlas serve` over simulated engines, as separate processes: the whole path of a request, and what bad input gets."""

import asyncio
import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.clock import SystemClock
from kvatlas.replay import ConversationSettings, hold_conversations, make_conversations
from kvatlas.simulator import EngineConfig, LatencyConfig, SimulatedFleet
from support.serve import Gateway, get_json, post_json, running_gateway

pytestmark = pytest.mark.e2e

MODEL = "kvatlas-sim"
PROMPT = list(range(100, 180))


@pytest.fixture(name="fleet", scope="module")
def _fleet() -> Iterator[SimulatedFleet]:
    """Two engines that compute quickly."""
    config = EngineConfig(num_blocks=512, max_model_len=4096, latency=LatencyConfig(time_scale=0.2))
    with SimulatedFleet(2, config) as fleet:
        yield fleet


def worker_options(fleet: SimulatedFleet) -> list[str]:
    return [
        part
        for engine in fleet.engines
        for part in ("--worker", f"{engine.base_url},events={engine.events_endpoint},replay={engine.replay_endpoint}")
    ]


def is_ready(worker: dict) -> bool:
    return worker["healthy"] and worker["trust"]["level"] == "synced"


@pytest.fixture(name="gateway", scope="module")
def _gateway(fleet: SimulatedFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with a local tokenizer over both engines."""
    folder = tmp_path_factory.mktemp("serve")
    config = folder / "kvatlas.toml"
    config.write_text("max_body_bytes = 100000\nhealth_interval_s = 0.2\n")
    with running_gateway(
        folder / "log", "--config", str(config), "--tokenizer", fleet.tokenizer, *worker_options(fleet)
    ) as gateway:
        gateway.await_workers(is_ready)
        yield gateway


def complete(gateway: Gateway, prompt: object, request_id: str, **fields: object) -> tuple[int, dict, dict]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, **fields}
    return post_json(gateway.base_url + "/v1/completions", body, {"x-request-id": request_id})


def settle(gateway: Gateway) -> None:
    """Wait until no request is in flight and every event of the engines' last steps has been applied."""

    def quiet(worker: dict) -> bool:
        age_s = worker["stream"]["last_batch_age_s"]
        return worker["load"]["in_flight"] == 0 and (age_s is None or age_s > 0.2)

    gateway.await_workers(quiet)


class TestPath:
    def test_second_request_follows_the_first(self, gateway: Gateway) -> None:
        """The same prompt goes where it is cached, and the promise in the header is what the engine reports."""
        status, first, _ = complete(gateway, PROMPT, "path-1")
        assert status == 200
        assert first["x-kvatlas-predicted-tokens"] == "0"
        settle(gateway)
        _, second, answer = complete(gateway, PROMPT, "path-2")
        assert second["x-kvatlas-worker"] == first["x-kvatlas-worker"]
        assert second["x-request-id"] == "path-2"
        assert second["x-kvatlas-predicted-tokens"] == "64"
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 64

    def test_decision_can_be_explained(self, gateway: Gateway) -> None:
        """The record of a request names its candidates, the choice, the reason and what the engine said; no prompt."""
        prompt = [7, *PROMPT]
        complete(gateway, prompt, "explain-1")
        settle(gateway)
        record = get_json(gateway.admin_url + "/api/decisions/explain-1")
        assert record["policy"] == "cost"
        assert record["prompt_tokens"] == 81
        assert record["chosen"] in {candidate["worker_id"] for candidate in record["candidates"]}
        assert len(record["candidates"]) == 2
        assert record["actual_tokens"] == record["predicted_tokens"] == 0
        assert record["reason"]
        assert str(PROMPT[0]) + ", " not in json.dumps(record)

    def test_chat_streams_are_predicted(self, gateway: Gateway) -> None:
        """Multi-turn chat through the local template and tokenizer: every prediction equals the engine's count."""
        load = make_conversations(
            ConversationSettings(conversations=4, turns=3, system_prompts=4, ramp_s=0.4, think_s=0.5), 3
        )
        results = asyncio.run(hold_conversations(gateway.base_url, MODEL, load, SystemClock()))
        assert [result.error for result in results] == [None] * 12
        assert [
            (r.predicted_tokens, r.cached_tokens) for r in results if r.turn and r.predicted_tokens != r.cached_tokens
        ] == []
        assert all(result.cached_tokens for result in results if result.turn)

    def test_text_and_lists_of_prompts_are_rendered(self, gateway: Gateway) -> None:
        """A text prompt is predicted as its tokens are; a list of prompts is served and predicted for its last one."""
        text = "the quick brown fox " * 20
        complete(gateway, text, "text-1")
        settle(gateway)
        _, headers, answer = complete(gateway, text, "text-2")
        assert (
            int(headers["x-kvatlas-predicted-tokens"]) == answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        )
        settle(gateway)
        status, headers, answer = complete(gateway, [[1, 2, 3], PROMPT], "list-1")
        assert status == 200
        assert len(answer["choices"]) == 2

    def test_salted_prompts_do_not_match_plain_ones(self, gateway: Gateway) -> None:
        """Another tenant's salt finds nothing of what a plain request left, in index and engine alike."""
        prompt = [9, *PROMPT]
        complete(gateway, prompt, "salt-1")
        settle(gateway)
        _, headers, answer = complete(gateway, prompt, "salt-2", cache_salt="tenant")
        assert headers["x-kvatlas-predicted-tokens"] == "0"
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        settle(gateway)
        _, headers, answer = complete(gateway, prompt, "salt-3", cache_salt="tenant")
        assert headers["x-kvatlas-predicted-tokens"] == "80"
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 80

    def test_other_paths_pass_through(self, gateway: Gateway) -> None:
        """What the gateway does not understand is answered by an engine."""
        models = get_json(gateway.base_url + "/v1/models")
        assert [card["id"] for card in models["data"]] == [MODEL]
        status, _, tokens = post_json(gateway.base_url + "/tokenize", {"model": MODEL, "prompt": "hello"})
        assert status == 200
        assert tokens["count"] == len(tokens["tokens"]) > 0


class TestPromises:
    @pytest.mark.parametrize(
        ("fields", "promise"),
        [
            ({"n": 2}, None),
            ({"kv_transfer_params": {"do_remote_prefill": True}}, None),
            ({"truncate_prompt_tokens": 40}, None),
            ({"prompt_logprobs": 1}, "0"),
        ],
    )
    def test_only_what_can_be_kept_is_promised(self, gateway: Gateway, fields: dict, promise: str | None) -> None:
        """On a warm prompt: requests that skip the cache get 0, those nobody can foretell get no promise at all."""
        prompt = [13, *PROMPT]
        complete(gateway, prompt, "promise-warm")
        settle(gateway)
        _, headers, _ = complete(gateway, prompt, "promise-1", **fields)
        assert headers.get("x-kvatlas-predicted-tokens") == promise

    def test_several_prompts_are_not_promised(self, gateway: Gateway) -> None:
        """Prompts of one request hit each other's blocks."""
        _, headers, _ = complete(gateway, [[15, *PROMPT], [15, *PROMPT, 1]], "promise-2")
        assert "x-kvatlas-predicted-tokens" not in headers
        assert get_json(gateway.admin_url + "/api/decisions/promise-2")["predicted_tokens"] is None

    def test_report_mode_is_taken_out(self, gateway: Gateway) -> None:
        """A client's kv_cache_report_mode would make copy counts drift: no block is announced twice for it."""
        prompt = [17, *PROMPT]
        complete(gateway, prompt, "report-1")
        settle(gateway)
        before = sum(view["index"]["stored_blocks"] for view in gateway.workers().values())
        status, _, answer = complete(gateway, prompt, "report-2", vllm_xargs={"kv_cache_report_mode": "full"})
        settle(gateway)
        after = sum(view["index"]["stored_blocks"] for view in gateway.workers().values())
        assert status == 200
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 80
        assert after == before

    def test_what_cannot_be_tokenised_measures_no_speed(self, gateway: Gateway) -> None:
        """A large body of unknown length is load for a moment, and no proof of a fast engine."""
        before = [view["load"]["prefill_tokens_per_s"] for view in gateway.workers().values()]
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 80_000}}
        body = {"model": MODEL, "messages": [{"role": "user", "content": [image]}], "stream": True, "max_tokens": 2}
        request = urllib.request.Request(
            gateway.base_url + "/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(request, timeout=30) as response:
            response.read()
        after = [view["load"]["prefill_tokens_per_s"] for view in gateway.workers().values()]
        assert max(after) <= 1.5 * max(before)

    def test_large_token_id_bodies_are_served(self, fleet: SimulatedFleet, tmp_path: Path) -> None:
        """A body that is read in a thread is planned like any other; here the engine refuses it by its length."""
        with running_gateway(tmp_path / "log", *worker_options(fleet)) as gateway:
            gateway.await_workers(is_ready)
            status, headers, answer = complete(gateway, [100] * 100_000, "large-1")
            assert status == 400
            assert "4096" in answer["error"]["message"]
            assert headers["x-kvatlas-worker"]


class TestAdmin:
    def test_metrics_tell_predictions_and_trust(self, gateway: Gateway) -> None:
        """The scrape holds the proof (predictions by result) and the standing of each stream."""
        complete(gateway, [3, *PROMPT], "metrics-1")
        settle(gateway)
        with urllib.request.urlopen(gateway.admin_url + "/metrics", timeout=10) as response:
            text = response.read().decode()
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        equal = sum(
            float(v) for k, v in samples.items() if k.startswith("kvatlas_predictions_total") and 'result="equal"' in k
        )
        assert equal >= 1
        assert (
            sum(float(v) for k, v in samples.items() if k.startswith("kvatlas_worker_trust") and 'trust="synced"' in k)
            == 2
        )
        assert samples["kvatlas_in_flight"] == "0.0"

    def test_index_query_command(self, gateway: Gateway) -> None:
        """`kvatlas index query` prints who holds a prompt, with tiers and trust."""
        prompt = [11, *PROMPT]
        _, headers, _ = complete(gateway, prompt, "query-1")
        settle(gateway)
        tokens = ",".join(map(str, [*prompt, 1]))
        done = kvatlas("index", "query", "--admin", gateway.admin_url, "--tokens", tokens, "--json")
        workers = json.loads(done.stdout)["workers"]
        assert workers[headers["x-kvatlas-worker"]] == {"hit_tokens": 80, "trust": "synced", "tiers": {"GPU": 80}}

    @pytest.mark.parametrize(
        ("path", "status", "code"),
        [("/api/decisions/never", 404, "decision_not_found"), ("/api/nothing", 404, "http_404")],
    )
    def test_errors_have_one_shape(self, gateway: Gateway, path: str, status: int, code: str) -> None:
        """Admin errors look like the gateway's."""
        with pytest.raises(urllib.error.HTTPError) as caught:
            get_json(gateway.admin_url + path)
        assert caught.value.code == status
        body = json.loads(caught.value.read())
        assert body["error"]["code"] == code
        assert set(body["error"]) == {"message", "type", "code"}

    def test_bad_query_says_what_was_expected(self, gateway: Gateway) -> None:
        """A query of the wrong shape is a 400 that shows the right one."""
        status, _, body = post_json(gateway.admin_url + "/api/index/query", {"tokens": "x"})
        assert status == 400
        assert "token_ids" in body["error"]["message"]


class TestBadRequests:
    def test_unknown_model_is_404(self, gateway: Gateway) -> None:
        """As the engine would say, plus the models there are."""
        status, _, body = post_json(gateway.base_url + "/v1/completions", {"model": "nope", "prompt": "x"})
        assert status == 404
        assert body["error"]["code"] == "model_not_found"
        assert "The model `nope` does not exist." in body["error"]["message"]
        assert MODEL in body["error"]["message"]

    @pytest.mark.parametrize("body", [b"{not json", b"[]", b'{"model": 3}', b""])
    def test_broken_json_is_400(self, gateway: Gateway, body: bytes) -> None:
        """A body that is not a request is refused with the reason."""
        status, _, answer = post_json(gateway.base_url + "/v1/chat/completions", body)
        assert status == 400
        assert answer["error"]["code"] == "bad_request"

    def test_oversize_body_is_413(self, gateway: Gateway) -> None:
        """The configured limit is named."""
        status, _, answer = post_json(gateway.base_url + "/v1/completions", {"model": MODEL, "prompt": "x" * 120_000})
        assert status == 413
        assert answer["error"]["code"] == "body_too_large"
        assert "100000" in answer["error"]["message"]

    def test_engine_errors_pass_as_they_are(self, gateway: Gateway) -> None:
        """A prompt over the model's length is the engine's to refuse, in its own words."""
        status, headers, answer = complete(gateway, list(range(4500)), "long-1")
        assert status == 400
        assert "4096" in answer["error"]["message"]
        assert headers["x-kvatlas-worker"]

    def test_gateway_lives_on(self, gateway: Gateway) -> None:
        """After all of the above the next request is served."""
        assert complete(gateway, PROMPT, "after")[0] == 200


class TestFaults:
    def test_events_port_that_nobody_answers(self, fleet: SimulatedFleet, tmp_path: Path) -> None:
        """Requests are served by load; the worker's trust says which endpoint is silent, and nothing is promised."""
        engine = fleet.engines[0]
        worker = f"{engine.base_url},events=tcp://127.0.0.1:9,replay=tcp://127.0.0.1:9"
        with running_gateway(tmp_path / "log", "--tokenizer", fleet.tokenizer, "--worker", worker) as gateway:
            gateway.await_workers(lambda view: "tcp://127.0.0.1:9" in view["trust"]["reason"])
            status, headers, _ = complete(gateway, PROMPT, "silent-1")
            assert status == 200
            assert "x-kvatlas-predicted-tokens" not in headers
            assert gateway.workers()[f"127.0.0.1:{engine.port}"]["trust"]["level"] == "none"

    def test_engine_that_is_not_there(self, fleet: SimulatedFleet, tmp_path: Path) -> None:
        """One dead URL among good ones: all requests go to the good one; alone it gives 503 with the reason."""
        good = fleet.engines[0].base_url
        with running_gateway(tmp_path / "log", "--worker", "http://127.0.0.1:9", "--worker", good) as gateway:
            answers = [complete(gateway, PROMPT, f"half-{n}") for n in range(4)]
            assert [status for status, _, _ in answers] == [200] * 4
        with running_gateway(tmp_path / "log", "--worker", "http://127.0.0.1:9") as gateway:
            status, _, body = complete(gateway, PROMPT, "none-1")
            assert status == 503
            assert body["error"]["code"] == "no_worker_available"
            assert "127.0.0.1:9" in body["error"]["message"]

    def test_without_a_tokenizer_the_engine_is_asked(self, fleet: SimulatedFleet, tmp_path: Path) -> None:
        """Text prompts are predicted through the engine's own /tokenize."""
        with running_gateway(tmp_path / "log", *worker_options(fleet)) as gateway:
            gateway.await_workers(is_ready)
            text = "asked of the engine " * 20
            complete(gateway, text, "remote-1")
            settle(gateway)
            _, headers, answer = complete(gateway, text, "remote-2")
            assert (
                int(headers["x-kvatlas-predicted-tokens"])
                == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                > 0
            )

    @pytest.mark.parametrize("policy", ["round_robin", "random", "least_loaded", "longest_prefix"])
    def test_every_policy_serves(self, fleet: SimulatedFleet, tmp_path: Path, policy: str) -> None:
        """Each policy by name runs from end to end and writes its decisions."""
        with running_gateway(tmp_path / "log", "--policy", policy, "--seed", "1", *worker_options(fleet)) as gateway:
            gateway.await_workers(is_ready)
            assert {complete(gateway, [n, *PROMPT], f"p-{n}")[0] for n in range(4)} == {200}
            assert get_json(gateway.admin_url + "/api/decisions/p-3")["policy"] == policy


def kvatlas(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "kvatlas", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


class TestCommandErrors:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ((), "no engine to route to"),
            (("--worker", "localhost"), "expected http://HOST"),
            (("--worker", "http://h:1", "--tokenizer", "no/such/folder/here"), "no/such/folder/here"),
            (("--config", "none.toml"), "cannot read the configuration"),
            (("--worker", "http://h:1", "--port", "70000"), "port"),
            (("--worker", "http://h:1", "--worker", "http://h:1", "--port", "0", "--admin-port", "0"), "given twice"),
        ],
    )
    def test_serve_refuses_with_one_clear_line(self, arguments: tuple[str, ...], says: str) -> None:
        """What cannot work ends with exit code 2 and the reason, never a traceback."""
        done = kvatlas("serve", *arguments)
        assert done.returncode == 2
        assert says in done.stderr
        assert "Traceback" not in done.stderr

    def test_index_query_without_a_gateway(self) -> None:
        """An admin port that nobody listens on is told with what to check."""
        done = kvatlas("index", "query", "--admin", "http://127.0.0.1:9", "--tokens", "1,2")
        assert done.returncode == 2
        assert "cannot reach the admin app" in done.stderr


def test_events_tail_prints_the_stream_in_order(fleet: SimulatedFleet) -> None:
    """Replay from 0, then live: the first batches of an engine are printed one event a line."""
    engine = fleet.engines[0]
    post_json(engine.base_url + "/v1/completions", {"model": MODEL, "prompt": [5, *PROMPT], "max_tokens": 1})
    done = kvatlas(
        "events", "tail", engine.events_endpoint, "--replay", engine.replay_endpoint, "--count", "1", "--json"
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    stored = [record["event"] for record in records if "event" in record]
    assert records[0]["status"]
    assert next(record["seq"] for record in records if "seq" in record) == 0
    assert stored[0]["type"] == "BlockStored"
