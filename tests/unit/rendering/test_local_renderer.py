"""Rendering in this process: loading, threads, caching and refusals."""

import json
import threading

import pytest

from kvatlas.clock import ManualClock
from kvatlas.errors import ConfigError, RenderError
from kvatlas.hashing import NO_EXTRAS
from kvatlas.rendering import LocalRenderer, parse_request, write_tiny_model
from kvatlas.rendering.chat_template import ChatTemplate
from kvatlas.rendering.model_files import find_model_files
from kvatlas.rendering.text_tokenizer import TextTokenizer
from kvatlas.rendering.token_cache import TokenCache


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model's folder; not to be changed."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def renderer(model):
    """The tiny model's renderer."""
    return LocalRenderer.load(model)


def chat(**fields):
    """A parsed chat request."""
    fields.setdefault("messages", [{"role": "user", "content": "hello"}])
    return parse_request("/v1/chat/completions", json.dumps(fields).encode())


def completion(**fields):
    """A parsed completions request."""
    return parse_request("/v1/completions", json.dumps(fields).encode())


def with_config(tmp_path, **changes):
    """A tiny model whose tokenizer_config.json is changed."""
    folder = write_tiny_model(tmp_path / "model")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_the_tiny_model_is_the_same_every_time(tmp_path, model):
    """Same arguments, same bytes; another seed, other merges; the size is what was asked for."""
    again = write_tiny_model(tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (again / name).read_bytes() == (model / name).read_bytes()
    other = write_tiny_model(tmp_path / "other", vocab_size=600, seed=1)
    assert (other / "tokenizer.json").read_bytes() != (model / "tokenizer.json").read_bytes()
    assert LocalRenderer.load(other).tokenizer.vocab_size == 600


def test_a_tiny_model_needs_room_for_all_bytes(tmp_path):
    """Fewer tokens than bytes cannot spell every text."""
    with pytest.raises(ConfigError, match="259"):
        write_tiny_model(tmp_path, vocab_size=258)


def test_text_comes_back_from_its_token_ids(renderer):
    """Tokenise and detokenise are inverse on any Unicode text, special tokens included."""
    text = "Grüße, 漢字 🙂\n\t <|im_start|>user the water"
    token_ids = renderer.tokenize(text)
    assert renderer.detokenize(token_ids) == text
    assert "<|im_start|>" not in renderer.detokenize(token_ids, skip_special_tokens=True)
    assert renderer.tokenizer.token_text(token_ids[-1]) == "Ġwater"
    assert renderer.tokenizer.token_id("<|im_start|>") == 1
    assert renderer.tokenizer.token_id("no such token") is None
    assert renderer.tokenizer.token_text(10**6) is None


def test_token_ids_in_a_prompt_are_taken_as_they_are(renderer):
    """Only texts are tokenised, in the order given, all with the request's salt."""
    prompts = renderer.render_now(completion(prompt=["the", [5, 6]], cache_salt="s"))
    assert [list(prompt.token_ids) for prompt in prompts] == [renderer.tokenize("the"), [5, 6]]
    assert {prompt.extras.cache_salt for prompt in prompts} == {"s"}
    assert renderer.render_now(completion(prompt="the"))[0].extras is NO_EXTRAS


def test_tools_and_template_variables_change_the_token_ids(renderer):
    """T13: the same messages with and without tools, with thinking on and off."""
    tool = {"type": "function", "function": {"name": "f"}}
    plain = renderer.render_now(chat())[0].token_ids
    with_tools = renderer.render_now(chat(tools=[tool]))[0].token_ids
    no_thinking = renderer.render_now(chat(chat_template_kwargs={"enable_thinking": False}))[0].token_ids
    assert plain != with_tools
    assert plain != no_thinking
    assert no_thinking[: len(plain)] == plain


def test_structured_text_is_text_and_never_json(renderer):
    """T14: one text part renders as the same string would."""
    parts = chat(messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}])
    assert renderer.render_now(parts) == renderer.render_now(chat())
    two = chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
    assert "user\na\nb<|im_end|>" in renderer.apply_chat_template(two.chat)


@pytest.mark.parametrize("field", ["image_url", "input_audio", "video_url", "prompt_embeds"])
def test_media_is_refused_by_name(renderer, field):
    """A wrong guess about images would be worse than none."""
    request = chat(messages=[{"role": "user", "content": [{"type": field, field: {}}]}])
    with pytest.raises(RenderError, match=f"{field}.*not supported yet: routed without the index"):
        renderer.render_now(request)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [7]}],
        [{"role": "user", "content": [{"type": "hologram"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "assistant", "tool_calls": ["f"]}],
        [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}],
    ],
)
def test_messages_no_engine_takes_are_render_errors(renderer, messages):
    """Odd shapes inside messages never raise anything else."""
    with pytest.raises(RenderError):
        renderer.render_now(chat(messages=messages))


def test_a_tool_without_a_name_is_a_render_error(renderer):
    """Tools have a shape too."""
    with pytest.raises(RenderError, match="tool"):
        renderer.render_now(chat(tools=[{"type": "function"}]))


def test_a_lone_surrogate_is_a_render_error(renderer):
    """JSON can spell text that is not Unicode; the tokenizer cannot read it."""
    with pytest.raises(RenderError, match="Unicode"):
        renderer.render_now(parse_request("/v1/completions", b'{"prompt": "\\ud800"}'))


def test_unsupported_requests_are_refused_with_their_reason(renderer):
    """What parsing found out is what the caller is told."""
    with pytest.raises(RenderError, match="suffix"):
        renderer.render_now(completion(prompt="x", suffix="y"))
    with pytest.raises(RenderError, match="only completions and chat"):
        renderer.render_now(parse_request("/v1/embeddings", b'{"input": "x"}'))


@pytest.mark.asyncio
async def test_large_requests_are_rendered_off_the_event_loop(model):
    """Small ones stay on the loop's thread, large ones do not hold it up; results are the same."""
    threads = []

    class Watched(LocalRenderer):
        """Notes which thread renders."""

        def render_now(self, request):
            threads.append(threading.current_thread())
            return super().render_now(request)

    renderer = Watched.load(model, thread_above_bytes=1000)
    plain = LocalRenderer.load(model)
    small, large = completion(prompt="the"), completion(prompt="the water " * 200)
    assert await renderer.render(small) == plain.render_now(small)
    assert threads == [threading.current_thread()]
    assert await renderer.render(large) == plain.render_now(large)
    assert threads[1] is not threading.current_thread()
    renderer.close()
    assert await renderer.render(large) == plain.render_now(large)
    renderer.close()


def test_a_model_without_a_template_renders_completions_only(tmp_path):
    """Base models have none."""
    renderer = LocalRenderer.load(with_config(tmp_path, chat_template=None))
    assert renderer.render_now(completion(prompt="the"))
    with pytest.raises(RenderError, match="no chat template"):
        renderer.render_now(chat())


def test_models_whose_chat_is_built_in_code_are_left_to_the_engine(tmp_path):
    """A template would give other ids than the engine's own code."""
    folder = write_tiny_model(tmp_path)
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    renderer = LocalRenderer.load(folder)
    assert renderer.render_now(completion(prompt="the"))
    with pytest.raises(RenderError, match="gpt_oss"):
        renderer.render_now(chat())


def test_a_processors_template_is_used_when_there_are_no_tools(tmp_path):
    """Multimodal models bring a second template, as engines prefer it."""
    folder = write_tiny_model(tmp_path)
    (folder / "chat_template.json").write_text('{"chat_template": "PROCESSOR"}')
    renderer = LocalRenderer.load(folder)
    assert renderer.apply_chat_template(chat().chat) == "PROCESSOR"
    tool = {"type": "function", "function": {"name": "f"}}
    assert "hello" in renderer.apply_chat_template(chat(tools=[tool]).chat)


def test_named_template_files_are_found(tmp_path):
    """additional_chat_templates/tool_use.jinja serves requests with tools."""
    folder = write_tiny_model(tmp_path)
    (folder / "chat_template.jinja").write_text("DEFAULT")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("TOOLS")
    renderer = LocalRenderer.load(folder)
    assert renderer.apply_chat_template(chat().chat) == "DEFAULT"
    assert renderer.apply_chat_template(chat(tools=[{"function": {"name": "f"}}]).chat) == "TOOLS"


def test_templates_read_the_given_clock(tmp_path):
    """strftime_now follows the injected clock, so a virtual day is a virtual date."""
    folder = with_config(tmp_path, chat_template="{{ strftime_now('%Y') }}")
    clock = ManualClock(wall_s=86_400.0 * 365 * 20)
    assert LocalRenderer.load(folder, clock=clock).apply_chat_template(chat().chat) == "1989"


def test_a_template_cannot_leave_its_sandbox(tmp_path):
    """Reaching for Python's internals is refused, not run."""
    renderer = LocalRenderer.load(with_config(tmp_path, chat_template="{{ messages.__class__.__mro__ }}{{ ''.x.y }}"))
    with pytest.raises(RenderError, match="refused"):
        renderer.render_now(chat())


def test_a_broken_template_is_found_when_loading(tmp_path):
    """Not with the first request."""
    with pytest.raises(ConfigError, match="does not compile"):
        LocalRenderer.load(with_config(tmp_path, chat_template="{% for %}"))


def test_a_missing_model_says_what_was_looked_for(tmp_path, monkeypatch):
    """The folder, the cache, and what to do."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no-org/no-model.*Hugging Face cache.*download"):
        LocalRenderer.load("no-org/no-model", allow_download=False)
    with pytest.raises(ConfigError, match="neither a folder nor a model name"):
        LocalRenderer.load(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        LocalRenderer.load(tmp_path)


def test_broken_files_say_which(tmp_path):
    """A half-written folder is named with its file."""
    folder = write_tiny_model(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        LocalRenderer.load(folder)
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        LocalRenderer.load(folder)


def test_training_settings_in_the_tokenizer_do_not_cut_prompts(tmp_path):
    """Truncation and padding that a file carries are not an engine's."""
    folder = write_tiny_model(tmp_path)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    path.write_text(json.dumps(content))
    assert 2 < len(LocalRenderer.load(folder).tokenize("the water of the token")) < 64


def test_the_token_cache_is_bounded_and_keeps_the_recent():
    """Least recently used goes first; what is larger than the bound is given back but not kept."""
    cache = TokenCache(max_bytes=3 * 310)
    for text in ("a", "b", "c"):
        assert cache.put(text, [1, 70_000]).tolist() == [1, 70_000]
    assert cache.get("a").tolist() == [1, 70_000]
    cache.put("d", [2])
    assert cache.get("b") is None
    assert cache.get("a") is not None
    assert len(cache.put("huge", [1] * 1000)) == 1000
    assert cache.get("huge") is None
    assert cache.used_bytes <= 3 * 310


def test_a_conversation_is_remembered_turn_by_turn(model):
    """The next request of a conversation has only its new turn tokenised, and the same ids as without memory."""
    asked = []

    class Counting(TextTokenizer):
        """Notes what is really tokenised."""

        def encode_many(self, texts, *, add_special_tokens):
            asked.extend(texts)
            return super().encode_many(texts, add_special_tokens=add_special_tokens)

    files = find_model_files(model)
    templates = {"default": ChatTemplate(files.templates["default"], files.special_tokens, ManualClock())}
    renderer = LocalRenderer(Counting(files), templates)
    forgetful = LocalRenderer(TextTokenizer(files), templates, cache_bytes=0)
    turns = [{"role": ("user", "assistant")[number % 2], "content": f"turn {number}"} for number in range(6)]
    for length in range(1, 7):
        asked.clear()
        request = chat(messages=turns[:length])
        assert renderer.render_now(request) == forgetful.render_now(request)
        assert length == 1 or len(asked) == 1
        assert f"turn {length - 1}<|im_end|>" in "".join(asked)


def test_text_is_not_cut_where_the_tokenizer_looks_across(tmp_path):
    """Stripping special tokens, overlapping ones and Metaspace make cutting unsafe: then there is one piece."""
    text = "a<|im_end|>b<|im_start|>c"
    folder = write_tiny_model(tmp_path)
    whole = json.loads((folder / "tokenizer.json").read_text())
    assert LocalRenderer.load(folder).tokenizer.cut(text) == ["a<|im_end|>", "b<|im_start|>", "c"]

    def changed(**changes):
        (folder / "tokenizer.json").write_text(json.dumps(whole | changes))
        return LocalRenderer.load(folder).tokenizer.cut(text)

    stripping = [token | {"rstrip": token["content"] == "<|im_end|>"} for token in whole["added_tokens"]]
    assert changed(added_tokens=stripping) == ["a<|im_end|>b<|im_start|>", "c"]
    longer = {**whole["added_tokens"][0], "id": 1000, "content": "<|im_end|>b"}
    assert changed(added_tokens=[*whole["added_tokens"], longer]) == ["a<|im_end|>b<|im_start|>", "c"]
    metaspace = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": True}
    assert changed(pre_tokenizer=metaspace) == [text]
