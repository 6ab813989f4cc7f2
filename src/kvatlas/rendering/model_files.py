"""Where a model's text files are: a folder, or the Hugging Face cache.

Loading may read disks and, if allowed, the network: do it when starting, never per request.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvatlas.errors import ConfigError

__all__ = ["ModelFiles", "find_model_files"]

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "config.json",
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a renderer needs of a model.

    `templates` are chat templates by name ("default", "tool_use", ...); `processor_template` is the one a multimodal
    model's processor brings (`chat_template.json`), which engines prefer when a request has no tools.
    """

    directory: Path
    tokenizer_config: Mapping[str, Any]
    special_tokens: Mapping[str, str]
    templates: Mapping[str, str]
    processor_template: str | None
    model_type: str | None


def find_model_files(model: str | Path, *, allow_download: bool = True) -> ModelFiles:
    """Find and read a model's tokenizer settings and chat templates.

    Args:
        model: a folder, or a name on the Hugging Face hub; the local cache is tried before the network.
        allow_download: whether the hub may be asked when the cache does not have the model.

    Raises:
        ConfigError: no such model, or files that cannot be read. The message says what was looked for.
    """
    directory = _find_directory(str(model), allow_download=allow_download)
    config = _read_json(directory / "tokenizer_config.json")
    model_type = _read_json(directory / "config.json").get("model_type")
    processor_template = _read_json(directory / "chat_template.json").get("chat_template")
    return ModelFiles(
        directory=directory,
        tokenizer_config=config,
        special_tokens=_special_tokens(config, _read_json(directory / "special_tokens_map.json")),
        templates=_templates(directory, config),
        processor_template=processor_template if isinstance(processor_template, str) else None,
        model_type=model_type if isinstance(model_type, str) else None,
    )


def _find_directory(model: str, *, allow_download: bool) -> Path:
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(
                f"{folder} has no tokenizer.json: give a folder with a fast tokenizer's files, "
                "or let the engine render (rendering through its /tokenize)"
            )
        return folder
    if not _HUB_NAME.fullmatch(model) or folder.is_absolute():
        raise ConfigError(f"{model!r} is neither a folder nor a model name like 'org/name': check the path")
    return _find_on_hub(model, allow_download=allow_download)


def _find_on_hub(model: str, *, allow_download: bool) -> Path:
    """The model's folder in the Hugging Face cache, filled from the hub when it is not there and that is allowed."""
    # Imported here: it takes a third of a second, which a model in a folder need not pay.
    from huggingface_hub import hf_hub_download, snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(hf_hub_download(model, "tokenizer.json", local_files_only=True)).parent
    except (LocalEntryNotFoundError, HFValidationError):
        pass
    if not allow_download:
        raise ConfigError(
            f"no folder {model!r} and no tokenizer.json of {model!r} in the Hugging Face cache: "
            "download the model there, give a folder, or allow downloading"
        )
    try:
        downloaded = Path(snapshot_download(model, allow_patterns=list(_TEXT_FILES)))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ConfigError(
            f"no folder {model!r}, no tokenizer.json of {model!r} in the Hugging Face cache, and the hub did not "
            f"deliver it ({type(error).__name__}): check the name and the network, or give a folder"
        ) from None
    if not (downloaded / "tokenizer.json").is_file():
        raise ConfigError(f"the model {model!r} has no tokenizer.json on the hub: let the engine render instead")
    return downloaded


def _read_json(path: Path) -> dict[str, Any]:
    """An optional JSON object; {} when there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}; expected a JSON object") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}; expected a JSON object")
    return value


def _special_tokens(config: Mapping[str, Any], legacy_map: Mapping[str, Any]) -> dict[str, str]:
    """The named tokens a template may use, as text."""
    named: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = config[name] if name in config else legacy_map.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            named[name] = value
    return named


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; files win over the tokenizer's settings."""
    from_files: dict[str, str] = {}
    default = directory / "chat_template.jinja"
    if default.is_file():
        from_files["default"] = default.read_text(encoding="utf-8")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        from_files[path.stem] = path.read_text(encoding="utf-8")
    if from_files:
        return from_files
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value if isinstance(entry, dict)}
    return {}
