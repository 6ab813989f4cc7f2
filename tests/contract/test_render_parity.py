"""Token ids equal those of vLLM's own request classes, chat templates and tokenizer, for a corpus of requests.

The expected ids are in tests/vectors/render_parity.json (its `provenance` says what made them, make_render_parity.py how); the
tokenizer is made anew here, so this also pins that the tiny model is the same on every machine.
"""

import json
from pathlib import Path

import pytest

from kvatlas.clock import ManualClock
from kvatlas.errors import RenderError
from kvatlas.rendering import LocalRenderer, parse_request, write_tiny_model
from kvatlas.rendering.chat_template import ChatTemplate
from kvatlas.rendering.model_files import find_model_files

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "render_parity.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory):
    """A model folder per named variant of the vectors."""
    folders = {}
    for name, model in VECTORS["models"].items():
        folder = write_tiny_model(tmp_path_factory.mktemp(name))
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8")) | model["config"]
        path.write_text(json.dumps(config), encoding="utf-8")
        for file_name, text in model["files"].items():
            (folder / file_name).write_text(text, encoding="utf-8")
        folders[name] = folder
    return folders


@pytest.fixture(scope="module")
def renderers(model_folders):
    """A loaded renderer per model folder."""
    return {name: LocalRenderer.load(folder) for name, folder in model_folders.items()}


@pytest.mark.parametrize(
    "case", VECTORS["cases"], ids=lambda case: f"{case['model']}-{case['path'][4:]}-{case['name']}"
)
def test_token_ids_equal_the_engines(case, renderers):
    """A request gives the engine's token ids, or is refused where the engine refuses it."""
    body = VECTORS["bodies"][f"{case['path']} {case['name']}"]
    request = parse_request(case["path"], json.dumps(body).encode())
    if case.get("refused"):
        with pytest.raises(RenderError):
            renderers[case["model"]].render_now(request)
        return
    prompts = renderers[case["model"]].render_now(request)
    assert [list(prompt.token_ids) for prompt in prompts] == case["token_ids"]


@pytest.mark.parametrize(("model", "expected"), sorted(VECTORS["content_formats"].items()))
def test_content_format_is_detected_as_the_engine_does(model, expected, model_folders):
    """Templates that loop over content get parts, all others text."""
    source = find_model_files(model_folders[model]).templates["default"]
    assert ChatTemplate(source, {}, ManualClock()).content_format == expected
