"""Commands that need no server: output, JSON shapes, exit codes."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from kvatlas.cli import main as main_module
from kvatlas.cli.demo import print_summaries
from kvatlas.cli.main import cli
from kvatlas.errors import ConfigError, HashingError
from kvatlas.replay import RunSummary
from support.golden import golden_files


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


class TestHash:
    def test_json_is_what_the_engine_publishes(self) -> None:
        """The golden chain of vLLM's sha256_cbor with seed 0, as digests and as published integers."""
        report = json.loads(
            run(
                "hash", "--algo", "sha256_cbor", "--seed", "0", "--tokens", ",".join(map(str, range(34))), "--json"
            ).stdout
        )
        assert [row["hash64"] for row in report["blocks"]] == [12687895063098490012, 1814341696565857452]
        assert report["blocks"][0]["digest"] == "d830de3d42c00f25a2949b5d12d98642664a44872c1614c5b0147556276afc9c"
        assert report["tail_tokens"] == 2

    def test_digests_are_never_cut(self) -> None:
        """The table for people shows whole digests, however narrow the terminal."""
        output = run("hash", "--algo", "sha256_cbor", "--seed", "0", "--tokens", ",".join(map(str, range(16)))).stdout
        assert "d830de3d42c00f25a2949b5d12d98642664a44872c1614c5b0147556276afc9c" in output

    def test_file_and_extras(self, tmp_path: Path) -> None:
        """Ids from a JSON file; a salt changes the first digest."""
        path = tmp_path / "ids.json"
        path.write_text(json.dumps(list(range(16))))
        plain = run("hash", "--algo", "sha256_cbor", "--tokens-file", str(path), "--json")
        salted = run("hash", "--algo", "sha256_cbor", "--tokens-file", str(path), "--salt", "s", "--json")
        assert json.loads(plain.stdout)["blocks"][0] != json.loads(salted.stdout)["blocks"][0]

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ((), ConfigError),
            (("--tokens", "1", "--tokens-file", "x"), ConfigError),
            (("--tokens", "1,x"), ConfigError),
            (("--tokens", "-1", "--block-size", "1"), HashingError),
        ],
    )
    def test_bad_tokens_are_our_own_errors(self, arguments: tuple[str, ...], error: type[Exception]) -> None:
        """Both, neither, not numbers, negative: each a deliberate error that main() prints in one line."""
        assert isinstance(run("hash", *arguments).exception, error)

    def test_a_bad_id_is_named_even_in_a_tail(self) -> None:
        """Ids that fill no block are checked too; the message has the id and the range."""
        error = run("hash", "--tokens", "-1,5").exception
        assert isinstance(error, HashingError)
        assert error.message == "token id -1 is negative: expected 0..2^63-1"


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (("events", "tail", "127.0.0.1:5557"), "expected tcp://HOST:PORT; try tcp://127.0.0.1:5557"),
            (("events", "tail", "tcp://*:5557"), "expected tcp://HOST:PORT"),
            (("events", "tail", "tcp://h:1", "--replay", "h"), "--replay 'h'"),
            (("index", "query", "--admin", "127.0.0.1:9090", "--tokens", "1"), "http:// is missing"),
            (("workers", "--admin", "localhost:9090"), "try --admin http://localhost:9090"),
            (("sim", "--connector", "disk"), "give --connector-dir"),
        ],
    )
    def test_addresses_and_options_that_cannot_work(self, arguments: tuple[str, ...], says: str) -> None:
        """Refused up front, with the form that was expected."""
        error = run(*arguments).exception
        assert isinstance(error, ConfigError)
        assert says in error.message

    def test_hash_algorithm_of_engines_is_a_choice(self) -> None:
        """A misspelt algorithm is refused before any engine starts, with those there are."""
        done = run("sim", "--hash-algo", "md5")
        assert done.exit_code == 2
        assert "sha256_cbor" in done.output

    def test_bench_outside_a_checkout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The default recordings are part of the sources: their absence is told as such."""
        monkeypatch.chdir(tmp_path)
        error = run("bench", "prefix-cache").exception
        assert isinstance(error, ConfigError)
        assert "checkout" in error.message

    def test_bench_against_an_engine_that_is_not_installed(self, tmp_path: Path) -> None:
        """The message says what installs it."""
        (tmp_path / "one.jsonl").write_text("")
        error = run(
            *("bench", "prefix-cache", "--recordings", str(tmp_path)),
            *("--against", "vllm", "--interpreter", str(tmp_path / "python")),
        ).exception
        assert isinstance(error, ConfigError)
        assert "make test-real" in error.message


class TestMain:
    @pytest.mark.parametrize(
        ("raised", "status", "said"),
        [
            (click.Abort(), 130, ""),
            (click.UsageError("no such thing"), 2, "Error: no such thing\n"),
            (ConfigError("give a port"), 2, "kvatlas: give a port\n"),
        ],
    )
    def test_exit_codes(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        raised: Exception,
        status: int,
        said: str,
    ) -> None:
        """Ctrl-C is quiet and 130; what the user got wrong is one line and 2."""

        def fail(**_: object) -> None:
            raise raised

        monkeypatch.setattr(main_module, "cli", fail)
        with pytest.raises(SystemExit) as caught:
            main_module.main()
        assert caught.value.code == status
        assert capsys.readouterr().err == said


class TestDemoText:
    def test_misses_and_errors_stand_under_the_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The columns are explained, misses counted by kind, and what failed requests said is shown."""
        summary = RunSummary(0.5, 1.0, 2.0, 1.1, 7, 2, 7, 4, 2, 1, ("connection refused (127.0.0.1:1)",))
        print_summaries("load", {"cost": summary})
        output = " ".join(capsys.readouterr().out.split())
        assert "cost 2/1" in output
        assert "evicted" in output
        assert "cost: a request failed: connection refused (127.0.0.1:1)" in output


class TestHashOfOtherDialects:
    @pytest.mark.parametrize(
        ("arguments", "published", "digest"),
        [
            (
                ("--dialect", "sglang", "--block-size", "4", "--tokens", "1,2,3,4,5,6,7,8"),
                -3488128144981237669,
                "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72",
            ),
            (
                (
                    "--dialect",
                    "sglang",
                    "--block-size",
                    "4",
                    "--tokens",
                    "1,2,3,4",
                    "--lora-id",
                    "0123456789abcdef" * 2,
                ),
                4547751747808663626,
                "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72",
            ),
            (
                ("--dialect", "llmd", "--model", "m", "--seed", "42", "--tokens", ",".join(map(str, range(1, 17)))),
                0x923B8E59683F3F17,
                None,
            ),
            (
                ("--dialect", "llmd", "--algo", "xxh64", "--model", "m", "--tokens", ",".join(map(str, range(1, 17)))),
                0xD51460F1EA958847,
                None,
            ),
            (
                ("--dialect", "dynamo", "--lora", "my-lora", "--tokens", ",".join(map(str, range(16)))),
                7774427462321301335,
                None,
            ),
        ],
    )
    def test_json(self, arguments: tuple[str, ...], published: int, digest: str | None) -> None:
        """The stable fields, with the golden first block of each dialect; no digest where there are 64 bits only."""
        report = json.loads(run("hash", *arguments, "--json").stdout)
        assert list(report) == ["dialect", "algo", "seed", "block_size", "none_hash", "blocks", "tail_tokens"]
        row = report["blocks"][0]
        assert (row["hash64"], row["digest"]) == (published, digest)
        assert ("local_hash" in row) == (report["dialect"] == "dynamo")

    def test_images(self) -> None:
        """--mm places an image; what cannot be read is told."""
        arguments = (
            "hash",
            "--dialect",
            "llmd",
            "--model",
            "m",
            "--tokens",
            ",".join(map(str, range(1, 33))),
            "--json",
        )
        report = json.loads(run(*arguments, "--mm", "img@16+4").stdout)
        assert report["blocks"][1]["hash64"] == 0xE77DCB5E8829E8FA
        error = run(*arguments, "--mm", "img").exception
        assert isinstance(error, ConfigError)
        assert "ID@OFFSET+LENGTH" in error.message

    @pytest.mark.parametrize(
        ("dialect", "option", "known"),
        [
            ("vllm", "--model", "--seed, --lora, --salt, --mm"),
            ("sglang", "--seed", "--salt, --extra-key, --lora-id, --event-format, --chain, --bigram"),
            ("llmd", "--namespace", "--algo, --seed, --lora, --salt, --mm, --model"),
            ("dynamo", "--salt", "--lora, --mm, --namespace, --image-token, --eagle"),
        ],
    )
    def test_options_of_another_dialect_are_refused(self, dialect: str, option: str, known: str) -> None:
        """The message names the option, the dialect, and what the dialect has."""
        error = run("hash", "--dialect", dialect, "--tokens", "1", option, "x").exception
        assert isinstance(error, ConfigError)
        assert f"{option} does not belong to --dialect {dialect}" in error.message
        assert known in error.message

    def test_text(self) -> None:
        """People see Dynamo's two hashes, and which tokens fill no block."""
        output = run("hash", "--dialect", "dynamo", "--tokens", ",".join(map(str, range(33)))).stdout
        assert "published 13769157705258532664  local 15292316782987903195" in output
        assert "1 tokens at the end" in output


class TestEventsReplay:
    def test_json_shape_and_exit_code(self) -> None:
        """The stable fields, and exit code 0 when every prediction held."""
        (path,) = golden_files("streams", ("vllm-bytes-serial",))
        done = run("events", "replay", str(path), "--json")
        report = json.loads(done.stdout)
        assert done.exit_code == 0
        assert {"compared", "equal", "differences", "events", "gaps"} <= set(report)
        assert report["compared"] == report["equal"] > 0

    def test_text_prints_counts(self) -> None:
        """People get the numbers compared and equal."""
        (path,) = golden_files("streams", ("vllm-bytes-serial",))
        assert "(100.0 %)" in run("events", "replay", str(path)).stdout

    def test_missing_file(self) -> None:
        """A file that is not there is a deliberate error."""
        assert isinstance(run("events", "replay", "none.jsonl").exception, ConfigError)


def test_help_lists_every_command() -> None:
    """`kvatlas --help` names all commands without importing them."""
    output = run("--help").stdout
    assert all(name in output for name in ("bench", "demo", "events", "hash", "index", "serve", "sim", "workers"))


def test_unknown_command_is_refused() -> None:
    """A typing mistake is told, with exit code 2."""
    done = run("srve")
    assert done.exit_code == 2
    assert "No such command" in done.output
