"""Settings from files and from --worker texts: what is accepted and how the rest is refused."""

from pathlib import Path

import pytest

from kvatlas.config import ServeConfig, WorkerConfig, load_serve_config, parse_worker
from kvatlas.errors import ConfigError


class TestParseWorker:
    def test_full_form(self) -> None:
        """Every part of the documented form arrives in its field."""
        text = "http://10.0.0.5:8000,events=tcp://10.0.0.5:5557,replay=tcp://10.0.0.5:5558,topic=kv,rank=1,block_size=32,model=a,model=b"
        assert parse_worker(text) == WorkerConfig(
            url="http://10.0.0.5:8000",
            events="tcp://10.0.0.5:5557",
            replay="tcp://10.0.0.5:5558",
            topic="kv",
            rank=1,
            block_size=32,
            models=("a", "b"),
        )

    def test_events_may_be_none(self) -> None:
        """`events=none` is accepted: it turns discovery off for one worker."""
        assert parse_worker("http://h:1,events=none").events == "none"

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("localhost:8000", "expected http://HOST"),
            ("https://host:1", "expected http://HOST"),
            ("http://h:1,events", "not NAME=VALUE"),
            ("http://h:1,evnts=tcp://h:2", "evnts"),
            ("http://h:1,rank=x", "rank"),
            ("http://h:1,rank=-1", "rank"),
            ("http://h:1,events=tcp://h", "expected tcp://HOST:PORT"),
            ("http://h:1,events=tcp://*:5557", "where the engine binds"),
            ("http://h:1,replay=tcp://h:2", "no events endpoint"),
            ("http://h:1,events=none,replay=tcp://h:2", "no events endpoint"),
            ("http://h:1,topic=a,topic=b", "twice"),
            ("http://h:99999", "expected http://HOST"),
            ("http://h:0", "expected http://HOST"),
            ("http://h:1,events=tcp://h:70000", "expected tcp://HOST:PORT"),
            ("http://h:1,url=http://b:2", "comes first"),
            ("http://h:1/v1", "give the base URL without /v1, i.e. http://h:1$"),
            ("http://h:1/pool/v1/,events=tcp://h:2", "i.e. http://h:1/pool$"),
            ("http://h:1,copy_mode=maybe", "copy_mode"),
        ],
    )
    def test_refusals_name_the_part(self, text: str, says: str) -> None:
        """A text that cannot work is refused with the part that is wrong."""
        with pytest.raises(ConfigError, match=says):
            parse_worker(text)


class TestLoad:
    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("c.toml", 'policy = "random"\n[[workers]]\nurl = "http://h:1"\n'),
            ("c.yaml", "policy: random\nworkers:\n  - url: http://h:1\n"),
            ("c.json", '{"policy": "random", "workers": [{"url": "http://h:1"}]}'),
        ],
    )
    def test_three_formats_say_the_same(self, tmp_path: Path, name: str, content: str) -> None:
        """TOML, YAML and JSON give equal settings; the rest are defaults."""
        path = tmp_path / name
        path.write_text(content)
        assert load_serve_config(path) == ServeConfig(policy="random", workers=(WorkerConfig(url="http://h:1"),))

    @pytest.mark.parametrize(
        ("name", "content", "says"),
        [
            ("c.toml", "polcy = 1\n", "polcy"),
            ("c.toml", "port = 70000\n", "port"),
            ("c.toml", "not toml", "c.toml"),
            ("c.json", "[1]", "c.json"),
            ("c.ini", "", "expected an ending"),
            ("c.yaml", "workers:\n  - url: h\n", "expected http://HOST"),
        ],
    )
    def test_refusals_name_file_and_setting(self, tmp_path: Path, name: str, content: str, says: str) -> None:
        """Unknown settings, bad values and broken files are told apart."""
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(ConfigError, match=says):
            load_serve_config(path)

    def test_missing_file(self, tmp_path: Path) -> None:
        """A file that is not there is a clear error, not a traceback."""
        with pytest.raises(ConfigError, match="cannot read the configuration"):
            load_serve_config(tmp_path / "none.toml")
