"""The `jaxspec` command, in this process and once as the installed script.

Runs share one compiled program per K: three or four prompts that can run, and up to 16 new tokens.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from fixtures import write_rnd, write_tokenizer

from jaxspec import cli
from jaxspec.checkpoint import load
from jaxspec.engine import Engine

PROMPTS = ["1 2 3", "100", "7 7 7 7 7", "64 32 16"]
METRICS = {
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "mean_acceptance_length",
    "acceptance_rate_per_position",
    "num_generated_tokens",
    "tokens_per_second",
    "num_preemptions",
    "num_stalls",
    "num_steps",
    "seconds_compile",
    "seconds_decode",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "pages_held",
    "peak_pages_held",
    "seconds_idle",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """RND of at most 64 tokens, where token i is the word i."""
    folder = write_rnd(tmp_path_factory.mktemp("cli") / "rnd", max_position_embeddings=64)
    write_tokenizer(folder, 128)
    return folder


@pytest.fixture
def run(model, capsys):
    """`run(*arguments)`: exit status, stdout and stderr of `jaxspec generate` on the model, 12 tokens a prompt."""

    def generate(*arguments):
        status = cli.main(["generate", "--model", str(model), "--max-tokens", "12", *map(str, arguments)])
        return status, *capsys.readouterr()

    return generate


def each(prompts):
    return [argument for prompt in prompts for argument in ("--prompt", prompt)]


def words(ids):
    return " ".join(map(str, ids))


def test_json_is_one_object_and_nothing_else(run):
    status, out, err = run(*each(PROMPTS), "--json")
    assert (status, err) == (0, "")
    assert out.count("\n") == 1
    found = json.loads(out)
    assert found.keys() == {"outputs", "metrics"}
    assert [output["prompt"] for output in found["outputs"]] == PROMPTS
    for output in found["outputs"]:
        assert output.keys() == {"prompt", "text", "token_ids", "finish_reason"}
        assert len(output["token_ids"]) == 12
        assert output["text"] == words(output["token_ids"])
        assert output["finish_reason"] == "length"
    metrics = found["metrics"]
    assert metrics.keys() == METRICS
    assert metrics["num_generated_tokens"] == 48
    assert metrics["num_drafts"] > 0
    assert metrics["mean_acceptance_length"] == 1 + metrics["num_accepted_tokens"] / metrics["num_drafts"]
    assert len(metrics["acceptance_rate_per_position"]) == 3
    assert metrics["tokens_per_second"] == pytest.approx(48 / metrics["seconds_decode"])
    assert metrics["seconds_compile"] > 0


def test_the_same_tokens_with_and_without_drafts(run):
    texts = {}
    for sampling in ((), ("--temperature", 0.8, "--seed", 5), ("--temperature", 0.8, "--seed", 6)):
        runs = [run(*each(PROMPTS), "--json", "--num-speculative-tokens", k, *sampling) for k in (0, 3)]
        plain, drafted = (json.loads(out) for _, out, _ in runs)
        assert plain["outputs"] == drafted["outputs"]
        assert (plain["metrics"]["num_drafts"], plain["metrics"]["acceptance_rate_per_position"]) == (0, [])
        assert drafted["metrics"]["num_drafts"] > 0
        texts[sampling] = [output["text"] for output in plain["outputs"]]
    greedy, one, other = texts.values()
    assert greedy != one != other


def test_text_for_people(run):
    outputs = json.loads(run(*each(PROMPTS), "--json")[1])["outputs"]
    status, out, err = run(*each(PROMPTS))
    assert (status, err) == (0, "")
    *texts, summary = out.split("\n\n")
    assert texts == [output["prompt"] + output["text"] for output in outputs]
    assert summary.startswith("48 tokens at ")
    assert "tokens per verification, drafts accepted by position: " in summary


def test_output_file(run, tmp_path):
    file = tmp_path / "out.jsonl"
    status, out, _ = run(*each(PROMPTS), "--json", "--output", file)
    assert status == 0
    assert [json.loads(line) for line in file.read_text().splitlines()] == json.loads(out)["outputs"]


def test_prompts_from_lines_of_text(run, tmp_path):
    """Blank lines are skipped; a form feed, as sources hold, ends no line."""
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeff1 2 3\r\n\n  \n100\n7 7 7\f7 7\n".encode())
    _, out, _ = run("--prompts-file", file, "--json", "--prompt", "64 32 16")
    outputs = json.loads(out)["outputs"]
    assert [output["prompt"] for output in outputs] == ["64 32 16", "1 2 3", "100", "7 7 7\f7 7"]
    expected = json.loads(run(*each(PROMPTS), "--json")[1])["outputs"]
    assert [output["token_ids"] for output in outputs[1:]] == [output["token_ids"] for output in expected[:3]]


def test_prompts_from_json_lines(run, tmp_path):
    """Texts, token ids and objects. A JSON string may hold U+2028, which ends no line either."""
    file = tmp_path / "prompts.jsonl"
    lines = [
        '"1 2 3"',
        '{"prompt": "7 7\u20287 7 7"}',
        "",
        '{"prompt": null, "prompt_token_ids": [100]}',
        "[64, 32, 16]",
    ]
    file.write_text("\n".join(lines), encoding="utf-8")
    _, out, _ = run("--prompts-file", file, "--json")
    outputs = json.loads(out)["outputs"]
    assert [output["prompt"] for output in outputs] == ["1 2 3", "7 7\u20287 7 7", "100", "64 32 16"]
    expected = json.loads(run(*each(PROMPTS), "--json")[1])["outputs"]
    assert outputs[2:] == [expected[1], expected[3]]
    assert outputs[1]["token_ids"] == expected[2]["token_ids"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', "line 3: not JSON: "),
        ("7", "line 3: got 7, expected a text, a list of token ids, or an object"),
        ('{"text": "a"}', 'line 3: got {"text": "a"}, expected a text'),
        ("[1, 2.5]", "line 3: got [1, 2.5], expected a text"),
        ("[true]", "line 3: got [true], expected a text"),
    ],
)
def test_a_bad_json_line_is_named(run, tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"1 2 3"\n\n{line}\n')
    status, out, err = run("--prompts-file", file)
    assert (status, out) == (2, "")
    assert err.startswith(f"jaxspec: error: {file}, {message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt: give --prompt or --prompts-file"),
        (["--prompt", ""], "the prompt is empty: got 0 tokens, expected at least 1"),
        (["--prompt", "9 " * 64], "got 64 tokens, expected fewer than max_model_len 64"),
        (["--prompt", "nine"], "the tokenizer refuses the prompt: got 'nine', expected text"),
        (["--prompt", "9", "--max-tokens", "0"], "expected max_tokens to be an integer in 1..2147483647, got 0"),
        (["--prompt", "9", "--temperature", "nan"], "expected temperature to be a number, got nan"),
        (["--prompt", "9", "--temperature", "-1"], "expected temperature to be a finite float32 >= 0, got -1.0"),
        (["--prompt", "9", "--seed", "-1"], "expected seed to be an integer in 0..9223372036854775807, got -1"),
        (["--prompt", "9", "--num-speculative-tokens", "65"], "expected num_speculative_tokens in 0..64, got 65"),
        (["--prompt", "9", "--model", "/absent"], "/absent: no such folder: expected a local one"),
        (["--prompt", "9", "--output", "/absent/out.jsonl"], "--output: got /absent/out.jsonl, expected a file in"),
        (["--prompts-file", "/absent.txt"], "No such file or directory: '/absent.txt'"),
    ],
)
def test_what_cannot_run_is_one_line_on_stderr(run, monkeypatch, arguments, message):
    monkeypatch.setattr(Engine, "step", lambda _: pytest.fail("it ran"))
    status, out, err = run("--json", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("jaxspec: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--verification", "typical"], ["--prompts", "9"], ["--max-tokens", "few"]])
def test_unknown_options_are_refused(run, capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        run("--prompt", "9", *arguments)
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_one_of_several_prompts_fails(run):
    expected = json.loads(run(*each(PROMPTS), "--json")[1])["outputs"]
    prompts = [*PROMPTS[:2], "nine", *PROMPTS[2:]]
    status, out, err = run(*each(prompts), "--json")
    assert (status, err) == (1, "")
    outputs = json.loads(out)["outputs"]
    failed = outputs.pop(2)
    assert outputs == expected
    assert (failed["prompt"], failed["token_ids"], failed["finish_reason"]) == ("nine", [], "error")
    assert "got 'nine', expected text" in failed["error"]
    status, out, _ = run(*each(prompts))
    assert status == 1
    assert "[request 2 failed: the tokenizer refuses the prompt" in out


def test_progress_on_a_terminal_only(run, monkeypatch):
    """That nothing is shown elsewhere is part of every test above."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, out, err = run(*each(PROMPTS), "--json")
    assert "4/4" in err
    assert json.loads(out)["metrics"]["num_generated_tokens"] == 48


def test_options_reach_the_engine(monkeypatch, capsys):
    seen = []

    class Stub:
        def __init__(self, model, speculative_config):
            seen.append((model, speculative_config))

        def generate(self, prompts, params):
            seen.append((prompts, params))
            raise ValueError("stop here")

    monkeypatch.setattr(cli, "LLM", Stub)
    assert cli.main(["generate", "--prompt", "a", "--prompt", "b"]) == 2
    speculation = "--num-speculative-tokens 2 --verification rejection"
    arguments = f"generate --prompt a --model m --max-tokens 7 --temperature 0.5 --seed 9 {speculation}"
    assert cli.main(arguments.split()) == 2
    assert capsys.readouterr().err == "jaxspec: error: stop here\n" * 2
    params = cli.SamplingParams
    assert seen == [
        (None, {"num_speculative_tokens": 3, "verification": "coupled"}),
        (["a", "b"], params(temperature=0.0, max_tokens=128)),
        ("m", {"num_speculative_tokens": 2, "verification": "rejection"}),
        (["a"], params(temperature=0.5, max_tokens=7, seed=9)),
    ]


def test_the_installed_script(model, run):
    script = Path(sys.executable).with_name("jaxspec")
    arguments = ["generate", "--model", model, "--max-tokens", "12", "--json", *each(PROMPTS)]
    done = subprocess.run([script, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found.keys() == {"outputs", "metrics"}
    assert found["outputs"] == json.loads(run(*each(PROMPTS), "--json")[1])["outputs"]


def test_convert(model, tmp_path, capsys):
    arguments = ["convert", str(model), str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"{tmp_path / 'out'}: [\d,]+ bytes in \d+\.\d s\n", out)
    assert err == ""
    nbytes = int(out.split()[1].replace(",", ""))
    _, params = load(tmp_path / "out")
    assert nbytes == sum(x.nbytes for x in jax.tree.leaves(params))
    assert params.embed.dtype == jnp.bfloat16
    assert cli.main(arguments) == 2
    assert "out: exists already" in capsys.readouterr().err


def test_progress_of_a_conversion(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(["convert", str(model), str(tmp_path / "out")]) == 0
    assert re.search(r"Converting: 100%.* 1\.17M/1\.17M", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/absent", "out"], "/absent: no such folder: expected a local one"),
        (["MODEL", "MODEL"], "exists already: remove it, or convert to another folder"),
        (["MODEL", "out", "--weight-format", "fp8"], "got no matrix stored in F8_E4M3, expected some"),
    ],
)
def test_what_cannot_be_converted_is_one_line_on_stderr(model, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["convert", *(str(model) if word == "MODEL" else word for word in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxspec: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
