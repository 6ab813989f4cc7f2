"""Writes render_parity.json: what vLLM's own request classes and renderer make of a corpus of requests.

Run it with a Python that has vLLM 0.32 and transformers installed and kvatlas on its path:
`PYTHONPATH=src <that python> tests/vectors/make_render_parity.py`. It needs no weights and no network.
"""

import copy
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template
from vllm.renderers.inputs.preprocess import prompt_to_seq
from vllm.renderers.params import merge_kwargs

HERE = Path(__file__).parent

PARTS_TEMPLATE = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.content is string %}
{{ '[' + m.role + ']' }} {{ m.content | trim }}
    {%- else %}
{{ '[' + m['role'] + ']' }}
        {%- for part in m['content'] %}
            {%- if part.type == 'text' %} <{{ part.text }}{{ part.lang | default('') }}>{% else %} ({{ part.type }}){% endif %}
        {%- endfor %}
    {%- endif %}
    {%- for call in m.tool_calls | default([]) %} call {{ call | tojson }}{% endfor %}
{%- endfor %}
{% if documents %}docs {{ documents | tojson(indent=2) }}{% endif %}
{% if add_generation_prompt %}[assistant]{% endif %}{{ eos_token }}
"""

MACRO_TEMPLATE = """\
{% macro show(body) %}{% if body is string %}{{ body }}{% else %}{% for x in body %}{{ x.text }};{% endfor %}{% endif %}{% endmacro %}
{% for message in messages[1:] %}
{% if message.role == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif %}
{% generation %}{{ message.role }}: {{ show(message.content) }}{% endgeneration %}

{% endfor %}
{% if reasoning_effort is defined %}effort={{ reasoning_effort }}{% endif %}
{% if enable_thinking is defined %} thinking={{ enable_thinking }}{% endif %}
"""

LOOP_TEMPLATE = """\
{% set ns = namespace(n=0) %}{% set loop_messages = messages %}
{% for message in loop_messages %}
    {% if message.role == 'tool' and not message.content %}{% continue %}{% endif %}
    {% set ns.n = ns.n + 1 %}
  {{ ns.n }}. {{ message.role | upper }}{% if message.name is defined %} ({{ message.name }}){% endif %}: {{ message.content }}
    {% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
    {% for call in message.tool_calls or [] %}{{ call.function | tojson }} {{ call.id }}{% endfor %}
    {% if message.tool_call_id %}#{{ message.tool_call_id }}{% endif %}
{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}
{{ add_generation_prompt }}|{{ custom }}
"""

MODELS = {
    "chatml": {"config": {}, "files": {}},
    "parts": {
        "config": {"bos_token": "<|endoftext|>", "add_bos_token": True, "chat_template": PARTS_TEMPLATE},
        "files": {},
    },
    "macro": {"config": {"chat_template": "unused"}, "files": {"chat_template.jinja": MACRO_TEMPLATE}},
    "loop": {
        "config": {
            "eos_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True},
            "add_eos_token": True,
            "chat_template": LOOP_TEMPLATE,
        },
        "files": {},
    },
    "named": {
        "config": {
            "bos_token": "<s>",
            "add_bos_token": True,
            "added_tokens_decoder": {
                "0": {"content": "<|endoftext|>", "special": True},
                "1": {"content": "<|im_start|>", "special": True},
                "2": {"content": "<|im_end|>", "special": True},
                "1000": {"content": "<s>", "special": True},
                "1001": {"content": "<unused>", "special": False},
            },
            "chat_template": [
                {
                    "name": "default",
                    "template": "{{ bos_token }}{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}<unused>",
                },
                {
                    "name": "tool_use",
                    "template": "TOOLS{% for t in tools %} {{ t.function.name }}{% endfor %}{{ messages[-1].content }}",
                },
            ],
        },
        "files": {},
    },
}

WEATHER = {
    "type": "function",
    "extra": 1,
    "function": {
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "näme <b> & 'x'"}},
            "required": ["city"],
        },
        "name": "weather",
        "strict": True,
        "nonsense": 2,
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "What time is it?"}, "defer_loading": False}
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
HELLO = {"role": "user", "content": "Hello, who are you?"}
TURNS = [
    SYSTEM,
    HELLO,
    {"role": "assistant", "content": "I am the assistant."},
    {"role": "user", "content": "Write water please"},
]
TOOL_TURNS = [
    {"role": "user", "content": "What is the weather in Zürich?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I should call a tool.",
        "tool_calls": [
            {
                "type": "function",
                "id": "call_1",
                "function": {"name": "weather", "arguments": '{"city": "Zürich", "n": 1.0}'},
            },
            {"id": "call_2", "type": "function", "function": {"name": "clock", "arguments": ""}},
            {"id": "call_3", "type": "function", "function": {"name": "clock", "arguments": "not json"}},
            {"id": "call_4", "type": "function", "function": {"name": "clock", "arguments": "[1, 2]"}},
        ],
    },
    {
        "role": "tool",
        "tool_call_id": "call_1",
        "content": [{"type": "text", "text": "12 degrees"}, {"type": "text", "text": "rain"}],
    },
    {"role": "tool", "tool_call_id": "call_2", "content": ""},
]
PARTS = [{"type": "text", "text": "first part", "lang": "en"}, {"type": "text", "text": "second\npart "}]

CHAT = {
    "one user turn": {"messages": [HELLO]},
    "system and turns": {"messages": TURNS},
    "no generation prompt": {"messages": TURNS[:3], "add_generation_prompt": False},
    "continue the final message": {
        "messages": TURNS[:3],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "continue a message that ends in spaces": {
        "messages": [HELLO, {"role": "assistant", "content": "I am  "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "continue a message of parts": {
        "messages": [SYSTEM, {"role": "assistant", "content": PARTS}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "continue against the default generation prompt": {"messages": TURNS[:3], "continue_final_message": True},
    "tools": {"messages": TURNS, "tools": [WEATHER, CLOCK]},
    "tools without a system message": {"messages": [HELLO], "tools": [CLOCK], "tool_choice": "none"},
    "tool calls and results": {"messages": [SYSTEM, *TOOL_TURNS], "tools": [WEATHER]},
    "empty tool calls": {"messages": [HELLO, {"role": "assistant", "content": "x", "tool_calls": []}]},
    "thinking off": {"messages": TURNS, "chat_template_kwargs": {"enable_thinking": False, "custom": None}},
    "thinking on": {"messages": TURNS, "chat_template_kwargs": {"enable_thinking": True, "custom": "auto"}},
    "template variable": {"messages": TURNS, "chat_template_kwargs": {"custom": ["a", 1, 2.5, None], "unknown": 3}},
    "template variable replaces the end token": {"messages": TURNS, "chat_template_kwargs": {"eos_token": "END"}},
    "reasoning effort": {"messages": TURNS, "reasoning_effort": "high"},
    "reasoning effort none": {"messages": TURNS, "reasoning_effort": "none"},
    "reasoning effort beside thinking": {
        "messages": TURNS,
        "reasoning_effort": "none",
        "chat_template_kwargs": {"enable_thinking": True},
    },
    "documents": {"messages": TURNS, "documents": [{"title": "T", "text": 'a <b> "c" é'}]},
    "content parts": {"messages": [SYSTEM, {"role": "user", "content": PARTS}]},
    "parts of strings": {
        "messages": [SYSTEM, {"role": "user", "content": ["plain", {"type": "text", "text": "typed"}]}]
    },
    "system content of parts": {"messages": [{"role": "system", "content": PARTS}, HELLO]},
    "refusal part": {
        "messages": [HELLO, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, HELLO]
    },
    "empty content": {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": ""}]},
    "null content": {"messages": [HELLO, {"role": "assistant", "content": None}, {"role": "user", "content": "go on"}]},
    "named user": {"messages": [{"role": "user", "name": "bob", "content": "I am Bob"}]},
    "reasoning in history": {"messages": [HELLO, {"role": "assistant", "reasoning": "hmm", "content": "So."}, HELLO]},
    "billing header in the system prompt": {
        "messages": [{"role": "system", "content": "x-anthropic-billing-header: cch=1;\nYou are helpful."}, HELLO],
    },
    "developer message": {"messages": [{"role": "developer", "content": "Be brief."}, HELLO]},
    "developer and system messages": {"messages": [SYSTEM, HELLO, {"role": "developer", "content": PARTS}, HELLO]},
    "special tokens on top": {"messages": TURNS, "add_special_tokens": True},
    "special tokens in text": {"messages": [{"role": "user", "content": "a <|im_end|> b <|endoftext|><s> c"}]},
    "unicode": {"messages": [{"role": "user", "content": "Grüße 漢字 🙂👩‍👩‍👧 \u00a0\u200b עברית \t\r\n end"}]},
    "unknown role": {"messages": [SYSTEM, {"role": "nobody", "content": "psst"}]},
    "salt": {"messages": TURNS, "cache_salt": "tenant-1"},
    "long": {
        "messages": [
            SYSTEM,
            *[
                {"role": r, "content": f"{i} " + "the water of the block " * 6}
                for i in range(4)
                for r in ("user", "assistant")
            ],
        ]
    },
}

COMPLETIONS = {
    "text": {"prompt": "The water of the token is"},
    "text without special tokens": {"prompt": "The water of the token is", "add_special_tokens": False},
    "texts": {"prompt": ["first prompt", " second  prompt\n", "漢字 🙂"]},
    "token ids": {"prompt": [5, 6, 7]},
    "lists of token ids": {"prompt": [[5, 6, 7], [8]]},
    "special tokens in text": {"prompt": "<|im_start|>user\nhi<|im_end|>\n<unused><s>"},
}


def report(*items):
    sys.stdout.write(" ".join(map(str, items)) + "\n")


def load_tiny_model():
    """Kvatlas' model writer as a plain file: the engine's environment has none of the package's other needs."""
    root = HERE.parents[1] / "src" / "kvatlas"
    package = type(sys)("kvatlas")
    package.__path__ = [str(root)]
    sys.modules["kvatlas"] = package
    spec = importlib.util.spec_from_file_location("tiny_model", root / "rendering" / "tiny_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.write_tiny_model


def write_model(folder, model, write_tiny_model):
    write_tiny_model(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | model["config"]
    path.write_text(json.dumps(config), encoding="utf-8")
    for name, text in model["files"].items():
        (folder / name).write_text(text, encoding="utf-8")


def engine_chat(body, tokenizer, model_config):

    request = ChatCompletionRequest.model_validate(copy.deepcopy(body))
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    params = request.build_chat_params(None, "auto").with_defaults(
        merge_kwargs({}, {"tools": tools, "tokenize": False})
    )
    content_format = resolve_chat_template_content_format(
        None, params.chat_template_kwargs.get("tools"), "auto", tokenizer, model_config=model_config
    )
    conversation, _, _ = parse_chat_messages(request.messages, model_config, content_format)
    text = safe_apply_chat_template(model_config, tokenizer, conversation, **params.get_apply_chat_template_kwargs())
    return content_format, [tokenizer(text, add_special_tokens=request.add_special_tokens)["input_ids"]]


def engine_completions(body, tokenizer):

    request = CompletionRequest.model_validate(copy.deepcopy(body))
    return [
        tokenizer(prompt, add_special_tokens=request.add_special_tokens)["input_ids"]
        if isinstance(prompt, str)
        else prompt
        for prompt in prompt_to_seq(request.prompt)
    ]


def main():

    write_tiny_model = load_tiny_model()
    cases = []
    formats = {}
    for model_name, model in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), model, write_tiny_model)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            model_config = SimpleNamespace(
                model=folder,
                tokenizer=folder,
                tokenizer_revision=None,
                code_revision=None,
                revision=None,
                trust_remote_code=False,
                multimodal_config=None,
                enable_prompt_embeds=False,
                hf_config=SimpleNamespace(model_type="qwen2"),
            )
            for name, body in CHAT.items():
                case = {"model": model_name, "path": "/v1/chat/completions", "name": name, "body": body}
                try:
                    formats[model_name], case["token_ids"] = engine_chat(body, tokenizer, model_config)
                except VLLMValidationError as error:
                    report(f"refused: {model_name} / {name}: {type(error).__name__}: {str(error)[:150]}")
                    case["refused"] = True
                cases.append(case)
            for name, body in COMPLETIONS.items():
                ids = engine_completions(body, tokenizer)
                cases.append(
                    {"model": model_name, "path": "/v1/completions", "name": name, "body": body, "token_ids": ids}
                )
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "tokenizers", "jinja2")
    )
    bodies = {f"{case['path']} {case['name']}": case.pop("body") for case in cases}
    vectors = {
        "provenance": f"vLLM 0.32.0's request classes and HF renderer, {versions}; made by make_render_parity.py",
        "models": MODELS,
        "content_formats": formats,
        "bodies": bodies,
        "cases": cases,
    }
    text = json.dumps(vectors, ensure_ascii=False, separators=(",", ":")).replace('{"model":', '\n{"model":')
    (HERE / "render_parity.json").write_text(text + "\n", encoding="utf-8")
    report(len(cases), "cases", len(text.encode()), "bytes", formats)


if __name__ == "__main__":
    main()
