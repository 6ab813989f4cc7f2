"""The recipe itself: what every other test against a real engine takes for granted about vLLM 0.32."""

import random
import time

import msgspec
import pytest
import zmq

from support.real_vllm import BLOCK_SIZE_TOKENS, MODEL_NAME, TOPIC, VOCAB_SIZE, RealVllm

END_MARKER = b"\xff" * 8
RECEIVE_TIMEOUT_MS = 10_000


def random_prompt(seed: int, length_tokens: int) -> list[int]:
    """Token ids no other test sends; the three special tokens of the tiny vocabulary are left out."""
    rng = random.Random(f"{__name__} {seed}")
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length_tokens)]


def complete(engine: RealVllm, prompt: list[int], max_tokens: int = 1) -> dict:
    """One completion; the decoded answer."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    status, answer = engine.call("POST", "/v1/completions", body)
    assert status == 200, answer
    return answer


def cached_tokens(answer: dict) -> int:
    """What the engine says it did not have to compute."""
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def ask_replay(engine: RealVllm, start_seq: int) -> list[list[bytes]]:
    """Every reply to one replay request, the end marker last."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.setsockopt(zmq.RCVTIMEO, RECEIVE_TIMEOUT_MS)
        dealer.connect(engine.replay_endpoint)
        dealer.send_multipart([b"", start_seq.to_bytes(8, "big")])
        replies = [dealer.recv_multipart()]
        while replies[-1][2] != END_MARKER:
            replies.append(dealer.recv_multipart())
        return replies


def test_both_engines_answer_as_vllm_0_32(two_engines: tuple[RealVllm, RealVllm]):
    """Each engine serves the tiny model under its own port, and is the version the specification describes."""
    assert len({engine.port for engine in two_engines}) == 2
    for engine in two_engines:
        _, models = engine.call("GET", "/v1/models")
        _, version = engine.call("GET", "/version")
        answer = complete(engine, random_prompt(0, 40), max_tokens=3)
        assert [model["id"] for model in models["data"]] == [MODEL_NAME]
        assert version == {"version": "0.32.0"}
        assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("length_tokens", [31, 32, 33, 64, 65, 200])
def test_a_resent_prompt_is_cached_up_to_its_last_token(two_engines: tuple[RealVllm, RealVllm], length_tokens: int):
    """The second time, every full block before the last prompt token is reused: floor((n - 1) / block) * block."""
    engine = two_engines[0]
    prompt = random_prompt(length_tokens, length_tokens)
    first, again = complete(engine, prompt), complete(engine, prompt)
    assert cached_tokens(first) == 0
    assert cached_tokens(again) == (length_tokens - 1) // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS


def test_engines_do_not_share_a_cache(two_engines: tuple[RealVllm, RealVllm]):
    """A prompt one engine holds is unknown to the other: this is what makes routing matter."""
    prompt = random_prompt(1, 100)
    complete(two_engines[0], prompt)
    assert cached_tokens(complete(two_engines[1], prompt)) == 0


def test_reset_prefix_cache_forgets(two_engines: tuple[RealVllm, RealVllm]):
    """/reset_prefix_cache is there (development mode) and empties the cache."""
    engine = two_engines[1]
    prompt = random_prompt(2, 100)
    complete(engine, prompt)
    status, _ = engine.call("POST", "/reset_prefix_cache")
    assert status == 200
    assert cached_tokens(complete(engine, prompt)) == 0


def test_a_stored_block_is_published(two_engines: tuple[RealVllm, RealVllm]):
    """A raw SUB socket gets [topic, seq, msgpack batch] naming the tokens of every full block of a new prompt."""
    engine = two_engines[0]
    full_blocks = 3
    prompt = random_prompt(3, full_blocks * BLOCK_SIZE_TOKENS + 5)
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.setsockopt(zmq.RCVTIMEO, RECEIVE_TIMEOUT_MS)
        subscriber.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        subscriber.connect(engine.events_endpoint)
        wait_for_any_batch(engine, subscriber)
        complete(engine, prompt)
        published, sequence = stored_tokens_after(subscriber, prompt[0])
    assert published == prompt[: full_blocks * BLOCK_SIZE_TOKENS]
    assert len(sequence) == 8


def test_replay_returns_every_batch_from_the_first(two_engines: tuple[RealVllm, RealVllm]):
    """A DEALER that asks from 0 gets contiguous batches from 0 on and then the end marker."""
    engine = two_engines[0]
    complete(engine, random_prompt(4, 70))
    *batches, end = ask_replay(engine, 0)
    assert [int.from_bytes(seq, "big") for _, _, seq, _ in batches] == list(range(len(batches)))
    assert len(batches) > 0
    assert end == [b"", b"", END_MARKER, b""]
    assert all(topic == TOPIC.encode() for _, topic, _, _ in batches)


def test_replay_from_the_future_is_only_the_end_marker(two_engines: tuple[RealVllm, RealVllm]):
    """Asking from a sequence number not yet reached is answered, with nothing in it."""
    assert ask_replay(two_engines[1], 1_000_000) == [[b"", b"", END_MARKER, b""]]


def test_a_stopped_engine_is_gone_and_comes_back_empty(two_engines: tuple[RealVllm, RealVllm]):
    """`stop` leaves nobody on the port, `start` gives a new life there: cold cache, event sequence from 0 again."""
    engine = two_engines[1]
    prompt, port = random_prompt(5, 100), engine.port
    complete(engine, prompt)
    engine.stop()
    with pytest.raises(OSError, match="refused"):
        engine.call("GET", "/health")
    engine.start()
    engine.wait_ready()
    assert engine.port == port
    assert cached_tokens(complete(engine, prompt)) == 0
    assert int.from_bytes(ask_replay(engine, 0)[0][2], "big") == 0


def wait_for_any_batch(engine: RealVllm, subscriber: zmq.Socket) -> None:
    """A SUB socket misses what is sent before its subscription arrives: send throw-away prompts until one is heard."""
    deadline_s = time.monotonic() + 30.0
    attempt = 100
    while time.monotonic() < deadline_s:
        complete(engine, random_prompt(attempt, BLOCK_SIZE_TOKENS + 1))
        if subscriber.poll(500):
            return
        attempt += 1
    pytest.fail("no event batch arrived within 30 s")


def stored_tokens_after(subscriber: zmq.Socket, first_token: int) -> tuple[list[int], bytes]:
    """Token ids of the stores from the one that begins with `first_token` on, until no more batches come."""
    tokens: list[int] = []
    last_sequence = b""
    while not tokens or subscriber.poll(1000):
        topic, last_sequence, payload = subscriber.recv_multipart()
        assert topic == TOPIC.encode()
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "BlockStored" and (tokens or event["token_ids"][0] == first_token):
                tokens.extend(event["token_ids"])
    return tokens, last_sequence
