"""A simulated engine as its clients see it: a process of its own, HTTP and ZMQ on loopback."""

import asyncio
import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from kvatlas.clock import SystemClock
from kvatlas.errors import ConfigError
from kvatlas.events import AllBlocksCleared, BlockStored, decode_batch
from kvatlas.hashing import VllmHasher, hash64
from kvatlas.rendering import LocalRenderer
from kvatlas.simulator import EngineConfig, EventsConfig, LatencyConfig, SimulatedFleet
from kvatlas.stream import SubscriberConfig, ZmqEventSubscriber

pytestmark = pytest.mark.e2e

BLOCK = 16
CONFIG = EngineConfig(
    model="tiny",
    block_size=BLOCK,
    num_blocks=1025,
    max_model_len=8192,
    hash_algo="sha256_cbor",
    hash_seed="0",
    latency=LatencyConfig(prefill_tokens_per_s=1e6, decode_step_s=0.004, step_overhead_s=0.0),
)
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class Client:
    """Plain HTTP to one engine."""

    def __init__(self, address):
        self.address = address

    def open(self, method, path, body=None, headers=()):
        """A connection and its response, the body not read yet."""
        connection = http.client.HTTPConnection(self.address.host, self.address.port, timeout=20)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, body=data, headers=dict(headers))
        return connection, connection.getresponse()

    def call(self, method, path, body=None):
        """Status and body, decoded when it is JSON."""
        connection, response = self.open(method, path, body)
        with contextlib.closing(connection):
            data = response.read()
            is_json = response.headers.get_content_type() == "application/json"
            return response.status, json.loads(data) if is_json else data.decode()

    def post(self, path, body):
        """The decoded body of a request that must succeed."""
        status, value = self.call("POST", path, body)
        assert status == 200, value
        return value

    def complete(self, prompt, max_tokens=1, **body):
        """A completion with its token ids, run to `max_tokens`."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True, **body}
        return self.post(COMPLETIONS, body)

    def chunks(self, path, body):
        """The decoded chunks of a stream; its end marker is checked."""
        connection, response = self.open("POST", path, {"stream": True, **body})
        with contextlib.closing(connection):
            assert response.headers.get_content_type() == "text/event-stream"
            events = response.read().decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def metric(self, name, labels='engine="0",model_name="tiny"'):
        """One sample of /metrics."""
        for line in self.call("GET", "/metrics")[1].splitlines():
            if line.startswith(f"vllm:{name}{{{labels}}} "):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no vllm:{name}{{{labels}}}")


def cached(response):
    """Cached tokens a response reports."""
    return response["usage"]["prompt_tokens_details"]["cached_tokens"]


def replayed_seqs(endpoint):
    """Sequence numbers of all batches a publisher still has, waiting for the first."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        socket.connect(endpoint)
        seqs = []
        while not seqs:
            time.sleep(0.05)
            socket.send_multipart([b"", (0).to_bytes(8, "big")])
            while (frames := socket.recv_multipart())[2] != b"\xff" * 8:
                seqs.append(int.from_bytes(frames[2], "big"))
        return seqs


def until(condition, within_s=10.0):
    """Wait for something another process does."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def is_alive(pid):
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def fleet():
    """One engine for all tests of this file; each uses prompts of its own."""
    with SimulatedFleet(1, CONFIG) as fleet:
        yield fleet


@pytest.fixture
def client(fleet):
    """A client of the engine."""
    return Client(fleet.engines[0])


class TestGeneration:
    """Completions and chats."""

    def test_completion(self, client):
        """The whole body of a completion, and the same reply when it is asked again."""
        prompt = list(range(1000, 1040))
        response = client.complete(prompt, 5, model="tiny")
        choice = response["choices"][0]
        assert response["object"] == "text_completion"
        assert response["model"] == "tiny"
        assert response["id"].startswith("cmpl-")
        assert choice["prompt_token_ids"] == prompt
        assert len(choice["token_ids"]) == 5
        assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
        assert response["usage"] == {
            "prompt_tokens": 40,
            "total_tokens": 45,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": None, "multimodal_tokens": None},
            "completion_tokens_details": None,
        }
        assert client.complete(prompt, 5)["choices"][0] == choice

    @pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 100])
    def test_cached_tokens_of_a_resend(self, client, length):
        """A prompt sent twice finds all whole blocks but never its last token."""
        prompt = [length * 10_000 + index for index in range(length)]
        assert cached(client.complete(prompt)) == 0
        assert cached(client.complete(prompt)) == (length - 1) // BLOCK * BLOCK

    def test_reply_is_cached_for_the_next_turn(self, client):
        """Prompt and reply, sent back with more behind, are found but for the reply's last token."""
        prompt = list(range(2000, 2050))
        reply = client.complete(prompt, 31)["choices"][0]["token_ids"]
        next_turn = client.complete([*prompt, *reply, *range(2050, 2100)])
        assert cached(next_turn) == (50 + 31 - 1) // BLOCK * BLOCK

    def test_salt_separates(self, client):
        """Requests with different salts share nothing; with the same salt they do."""
        prompt = list(range(3000, 3064))
        salts = ["a", "b", "a", None]
        assert [cached(client.complete(prompt, cache_salt=salt)) for salt in salts] == [0, 0, 48, 0]

    def test_stream_is_the_whole_in_pieces(self, client):
        """Texts and ids of the chunks make up the unstreamed reply; usage comes last and only when asked for."""
        body = {"prompt": list(range(4000, 4020)), "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
        whole = client.post(COMPLETIONS, body)
        chunks = client.chunks(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        *pieces, usage = chunks
        choices = [piece["choices"][0] for piece in pieces]
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
        assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
        assert choices[0]["prompt_token_ids"] == body["prompt"]
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 6
        assert cached(usage) == 16
        assert all(chunk["choices"] for chunk in client.chunks(COMPLETIONS, body))

    def test_prompts_and_choices(self, client):
        """Two prompts with two choices each: four replies in order, all different."""
        response = client.complete(["the first", "and the second"], 8, n=2)
        assert [choice["index"] for choice in response["choices"]] == [0, 1, 2, 3]
        assert len({choice["text"] for choice in response["choices"]}) == 4
        assert response["usage"]["completion_tokens"] == 32

    def test_stop_string(self, client):
        """A stop string ends the reply before it, is named, and counts as a stop, not as an abort."""
        stops = 'engine="0",finished_reason="stop",model_name="tiny"'
        before = client.metric("request_success_total", stops)
        prompt = list(range(5000, 5010))
        text = client.complete(prompt, 20)["choices"][0]["text"]
        stop = text.split()[10]
        choice = client.complete(prompt, 20, stop=[stop])["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert choice["text"] == text[: text.index(stop)]
        assert client.metric("request_success_total", stops) == before + 1

    def test_chat_is_its_tokenize(self, client, fleet):
        """A chat's prompt is what /tokenize and a local renderer say; as a completion it is found in the cache."""
        messages = [{"role": "user", "content": "please explain the cache of this engine " * 5}]
        tokens = client.post("/tokenize", {"messages": messages})
        renderer = LocalRenderer.load(fleet.tokenizer)
        chat = client.post(CHAT, {"messages": messages, "max_tokens": 4, "return_token_ids": True})
        assert chat["object"] == "chat.completion"
        assert chat["prompt_token_ids"] == tokens["tokens"]
        assert tokens["count"] == chat["usage"]["prompt_tokens"] == len(tokens["tokens"])
        assert (
            renderer.detokenize(tokens["tokens"]) == client.post("/detokenize", {"tokens": tokens["tokens"]})["prompt"]
        )
        assert cached(client.complete(tokens["tokens"])) == (tokens["count"] - 1) // BLOCK * BLOCK

    def test_chat_stream(self, client):
        """The role first, then the text, then the reason, then usage."""
        body = {"messages": [{"role": "user", "content": "count the blocks"}], "max_tokens": 5, "ignore_eos": True}
        whole = client.post(CHAT, body)["choices"][0]["message"]
        opening, *pieces, usage = client.chunks(CHAT, {**body, "stream_options": {"include_usage": True}})
        assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == whole["content"]
        assert pieces[-1]["choices"][0]["finish_reason"] == "length"
        assert usage["usage"]["completion_tokens"] == 5

    def test_chat_conversation_finds_its_own_replies(self, client):
        """A reply that comes back as text is the same tokens: the next turn finds the whole of the last one."""
        messages = [{"role": "user", "content": "tell me of the words that you know " * 4}]
        turn1 = client.post(CHAT, {"messages": messages, "max_tokens": 40, "ignore_eos": True})
        messages += [turn1["choices"][0]["message"], {"role": "user", "content": "more of the same"}]
        turn2 = client.post(CHAT, {"messages": messages, "max_tokens": 1})
        assert cached(turn2) == (turn1["usage"]["total_tokens"] - 1) // BLOCK * BLOCK


class TestRefusals:
    """Errors in the engine's shape and words."""

    @pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
    def test_unknown_model(self, client, path):
        """404 that names the model."""
        error = {"message": "The model `x` does not exist.", "type": "NotFoundError", "param": "model", "code": 404}
        assert client.call("POST", path, {"model": "x", "prompt": "a"}) == (404, {"error": error})

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (b"{not json", "not JSON"),
            ({"max_tokens": 4}, "prompt"),
            ({"prompt": "a", "max_tokens": "many"}, "max_tokens"),
            ({"prompt": list(range(8192))}, "maximum context length is 8192 tokens"),
            ({"prompt": list(range(8000)), "max_tokens": 193}, "maximum context length is 8192 tokens"),
            ({"prompt": "a", "max_tokens": 0}, "at least 1"),
            ({"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
            ({"prompt": "a", "echo": True}, "echo"),
            ({"prompt": "a", "n": 100_000}, "replies"),
            ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
            ({"prompt": "a", "cache_salt": "a/b"}, "cache_salt"),
            ({"prompt": "a", "cache_salt": "x" * 129}, "cache_salt"),
        ],
    )
    def test_bad_requests(self, client, body, message):
        """400 that says what is wrong; of a cache_salt, scenario 70."""
        status, value = client.call("POST", COMPLETIONS, body)
        assert status == 400
        assert set(value["error"]) == {"message", "type", "param", "code"}
        assert value["error"]["code"] == 400
        assert value["error"]["type"] in {"BadRequestError", "Bad Request"}
        assert message in value["error"]["message"]

    @pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", COMPLETIONS, 405)])
    def test_no_such_route(self, client, method, path, status):
        """Even these have the engine's shape."""
        got, value = client.call(method, path)
        assert (got, value["error"]["code"]) == (status, status)


class TestOperations:
    """What routers and scrapers ask."""

    def test_identity(self, client, fleet):
        """Models, version, health, load, event sources."""
        card = client.call("GET", "/v1/models")[1]["data"][0]
        assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == ("tiny", "model", "vllm", 8192)
        assert client.call("GET", "/version") == (200, {"version": "0.32.0"})
        assert client.call("GET", "/health") == client.call("POST", "/ping") == (200, "")
        assert client.call("GET", "/load") == (200, {"server_load": 0})
        source = client.call("GET", "/kv_event_sources")[1]["0"]
        assert source["endpoint"] == fleet.engines[0].events_endpoint
        assert source["replay_endpoint"] == fleet.engines[0].replay_endpoint
        assert (source["topic"], source["buffer_steps"]) == ("kv-events", 10_000)

    def test_counters_of_a_resend(self, client):
        """Scenario 65: 4096 tokens sent again: hits +4080, queries +4096, in series a scraper finds."""
        prompt = list(range(100_000, 104_096))
        client.complete(prompt)
        names = (
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "prompt_tokens_total",
            "generation_tokens_total",
        )
        before = [client.metric(name) for name in names]
        client.complete(prompt, 3)
        assert [client.metric(name) - old for name, old in zip(names, before, strict=True)] == [4096, 4080, 4096, 3]
        page = client.call("GET", "/metrics")[1]
        assert 'block_size="16"' in page
        assert 'num_gpu_blocks="1025"' in page
        assert "vllm:time_to_first_token_seconds_bucket" in page

    def test_hang_up_frees_blocks(self, client):
        """A client that leaves in mid-stream: its request leaves the engine, its blocks are free, the abort is counted."""
        aborts = 'engine="0",finished_reason="abort",model_name="tiny"'
        before = client.metric("request_success_total", aborts)
        body = {"prompt": list(range(6000, 6100)), "max_tokens": 8000, "ignore_eos": True, "stream": True}
        connection, response = client.open("POST", COMPLETIONS, body)
        response.readline()
        assert client.metric("num_requests_running") == 1
        assert client.metric("kv_cache_usage_perc") > 0
        assert client.call("GET", "/load") == (200, {"server_load": 1})
        response.close()
        connection.close()
        until(lambda: client.metric("num_requests_running") == 0)
        assert client.metric("kv_cache_usage_perc") == 0
        assert client.metric("request_success_total", aborts) == before + 1
        until(lambda: client.call("GET", "/load") == (200, {"server_load": 0}))

    def test_hang_up_of_a_whole_reply(self, client):
        """The same for a client that waits for JSON."""
        body = {"prompt": list(range(6200, 6300)), "max_tokens": 8000, "ignore_eos": True}
        with socket.create_connection((client.address.host, client.address.port)) as raw:
            data = json.dumps(body).encode()
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            until(lambda: client.metric("num_requests_running") == 1)
        until(lambda: client.metric("num_requests_running") == 0)
        assert client.metric("kv_cache_usage_perc") == 0

    def test_reset(self, client):
        """Scenario 69: refused under load; then everything is cold."""
        prompt = list(range(7000, 7100))
        client.complete(prompt)
        body = {"prompt": prompt, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        connection, response = client.open("POST", COMPLETIONS, body)
        response.readline()
        assert client.post("/reset_prefix_cache", b"") == {"success": False}
        response.close()
        connection.close()
        until(lambda: client.metric("num_requests_running") == 0)
        assert client.post("/reset_prefix_cache", b"") == {"success": True}
        assert cached(client.complete(prompt)) == 0


class TestEvents:
    """The KV event stream."""

    @pytest.fixture
    def subscription(self, fleet):
        """A plain SUB socket that is certain to be connected: it replays the past first."""
        context = zmq.Context()
        live = context.socket(zmq.SUB)
        live.subscribe(b"kv")
        live.setsockopt(zmq.RCVTIMEO, 5000)
        live.connect(fleet.engines[0].events_endpoint)
        monitor = live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        assert monitor.poll(5000), "no connection"
        live.disable_monitor()
        monitor.close(linger=0)
        yield live
        context.destroy(linger=0)

    def test_raw_frames(self, client, subscription):
        """Three frames; blocks named as vLLM would name them; a reply's blocks continue the prompt's."""
        prompt = list(range(8000, 8040))
        time.sleep(0.5)  # the publisher learns of the subscription a moment after the handshake
        reply = client.complete(prompt, 10)["choices"][0]["token_ids"]
        batches = [subscription.recv_multipart() for _ in range(2)]
        assert [topic for topic, _, _ in batches] == [b"kv-events"] * 2
        seqs = [int.from_bytes(seq, "big") for _, seq, _ in batches]
        assert seqs[1] == seqs[0] + 1
        decoded = [decode_batch(payload).batch for _, _, payload in batches]
        digests = [hash64(digest) for digest in VllmHasher("sha256_cbor", "0").hash_tokens([*prompt, *reply], BLOCK)]
        first, second = (batch.events[-1] for batch in decoded)
        assert first.block_hashes == digests[:2]
        assert first.parent_block_hash is None
        assert list(first.token_ids) == prompt[:32]
        assert second.block_hashes == digests[2:3]
        assert second.parent_block_hash == digests[1]
        assert list(second.token_ids) == [*prompt, *reply][32:48]
        assert (first.block_size, first.medium, first.group_idx) == (BLOCK, "GPU", 0)
        assert first.kv_cache_spec_kind == "full_attention"
        assert decoded[0].data_parallel_rank == 0
        assert abs(decoded[0].ts - time.time()) < 60

    def test_reset_is_announced_with_the_next_step(self, client, subscription):
        """Scenario 55: the clear comes in the batch of the next request, before its stores."""
        client.complete(list(range(8100, 8116)))
        subscription.recv_multipart()
        client.post("/reset_prefix_cache", b"")
        assert not subscription.poll(100)
        client.complete(list(range(8200, 8216)))
        events = decode_batch(subscription.recv_multipart()[2]).batch.events
        assert [type(event) for event in events] == [AllBlocksCleared, BlockStored]

    @pytest.mark.asyncio
    async def test_subscriber_room_follows(self, client, fleet):
        """The subscriber gets every batch of the engine's life from number 0, past ones by replay."""
        address = fleet.engines[0]
        sink = _Sink()
        subscriber = ZmqEventSubscriber(
            SubscriberConfig(endpoint=address.events_endpoint, replay_endpoint=address.replay_endpoint, topic="kv"),
            sink,
            SystemClock(),
        )
        task = asyncio.create_task(subscriber.run())
        try:
            await asyncio.wait_for(sink.live.wait(), 10)
            sink.more.clear()
            await asyncio.to_thread(client.complete, list(range(8300, 8332)))
            await asyncio.wait_for(sink.more.wait(), 10)
        finally:
            subscriber.close()
            await task
        assert sink.seqs == list(range(len(sink.seqs)))
        assert sink.gaps == []


class _Sink:
    """Remembers what the subscriber told."""

    def __init__(self):
        self.seqs = []
        self.gaps = []
        self.live = asyncio.Event()
        self.more = asyncio.Event()

    def on_life(self, reason):
        """See `EventSink`."""
        self.seqs.clear()

    def on_batch(self, seq, payload):
        """See `EventSink`."""
        assert not decode_batch(payload).malformed
        self.seqs.append(seq)
        self.more.set()

    def on_gap(self, first_seq, last_seq):
        """See `EventSink`."""
        self.gaps.append((first_seq, last_seq))

    def on_status(self, status, reason):
        """See `EventSink`."""
        if status == "live":
            self.live.set()


class TestFleet:
    """Processes: their start, their ends."""

    def test_life_of_a_fleet(self):
        """Engines serve apart from each other; one that is killed comes back cold on its ports; nothing is left behind."""
        fleet = SimulatedFleet(2, CONFIG)
        with fleet:
            clients = [Client(address) for address in fleet.engines]
            prompt = list(range(9000, 9064))
            replies = [client.complete(prompt, 4)["choices"][0]["token_ids"] for client in clients]
            assert replies[0] == replies[1]
            assert len({address.port for address in fleet.engines}) == 2
            old = fleet.engines[1]
            fleet.kill(1)
            with pytest.raises(ConnectionError):
                clients[1].complete(prompt)
            assert cached(clients[0].complete(prompt)) == 48
            new = fleet.restart(1)
            assert (new.port, new.events_endpoint, new.replay_endpoint) == (
                old.port,
                old.events_endpoint,
                old.replay_endpoint,
            )
            assert cached(clients[1].complete(prompt, 1)) == 0
            assert replayed_seqs(new.replay_endpoint) == [0]  # scenario 62: a new life counts from 0
            pids = [address.pid for address in fleet.engines] + [old.pid]
        assert not any(is_alive(pid) for pid in pids)
        assert fleet.engines == ()

    def test_taken_port(self, fleet):
        """An engine that cannot listen says why, and the fleet does not start."""
        config = EngineConfig(port=fleet.engines[0].port, events=EventsConfig(enabled=False))
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{config.port}"):
            SimulatedFleet(1, config).start()

    def test_missing_tokenizer(self, tmp_path):
        """So does one without a tokenizer."""
        with pytest.raises(ConfigError, match="did not start"):
            SimulatedFleet(1, EngineConfig(tokenizer=str(tmp_path))).start()

    @pytest.mark.parametrize("config", ['{"block_size": 0}', '{"unknown": 1}', "{"])
    def test_bad_configuration(self, config):
        """The command ends with status 2 and one line that says why."""
        done = subprocess.run(
            [sys.executable, "-m", "kvatlas.simulator", "--config", config], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1

    def test_engines_do_not_outlive_their_parent(self):
        """A parent that dies without a word takes its engines with it."""
        script = (
            "import os\n"
            "from kvatlas.simulator import SimulatedFleet\n"
            "fleet = SimulatedFleet(1)\n"
            "fleet.start()\n"
            "print(fleet.engines[0].pid, fleet.tokenizer, flush=True)\n"
            "os._exit(1)\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        pid, tokenizer = done.stdout.split()
        shutil.rmtree(tokenizer)  # the parent had no time to
        until(lambda: not is_alive(int(pid)))
        assert done.returncode == 1
