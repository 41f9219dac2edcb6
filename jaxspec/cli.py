"""The `jaxspec` command."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.checkpoint import checkpoint_info, convert
from jaxspec.engine import LLM, Metrics, RequestOutput
from jaxspec.sampling.params import SamplingParams


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit status: 0, 1 where the output says what failed, 2 where there is none."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, OSError) as error:
        print(f"jaxspec: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxspec", description="Speculative decoding for MLA models in JAX.")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_generate(commands)
    _add_info(commands)
    _add_convert(commands)
    return parser


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser("generate", help="complete prompts", allow_abbrev=False)
    generate.set_defaults(run=_generate)
    add = generate.add_argument
    add(
        "--model",
        help="folder of a checkpoint, or owner/name of one on the hub (default: the small one that comes along)",
    )
    add("--prompt", action="append", default=[], help="a prompt; may be given several times")
    add("--prompts-file", type=Path, help="a prompt a line; or .jsonl: texts, or objects with prompt(_token_ids)")
    add("--max-tokens", type=int, default=128, help="most tokens to generate per prompt (default 128)")
    add("--num-speculative-tokens", type=int, default=3, metavar="K", help="drafts a round; 0: none (default 3)")
    add("--verification", choices=("coupled", "rejection"), default="coupled", help="acceptance rule")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--seed", type=int, help="makes sampled output reproducible")
    add("--output", type=Path, help="write one JSON object per prompt to this file")
    add("--json", action="store_true", help="print one JSON object, with outputs and metrics, and nothing else")


def _add_info(commands: Any) -> None:
    info = commands.add_parser("info", help="describe a checkpoint, without reading its weights", allow_abbrev=False)
    info.set_defaults(run=_info)
    info.add_argument("path", help="folder of a checkpoint, or owner/name of one in the hub's cache")
    info.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _add_convert(commands: Any) -> None:
    command = commands.add_parser("convert", help="make a store, which loads onto any mesh", allow_abbrev=False)
    command.set_defaults(run=_convert)
    add = command.add_argument
    add("source", help="folder of a Hugging Face checkpoint, or owner/name of one on the hub")
    add("out", type=Path, help="folder to make; an interrupted conversion goes on where it was")
    add("--dtype", choices=("bfloat16", "float16", "float32"), help="cast weights (default: as they are stored)")
    add("--weight-format", choices=("dequantized", "fp8"), default="dequantized", help="what becomes of FP8 weights")


def _convert(arguments: argparse.Namespace) -> int:
    started = time.perf_counter()
    nbytes = convert(arguments.source, arguments.out, dtype=arguments.dtype, weight_format=arguments.weight_format)
    print(f"{arguments.out}: {nbytes:,} bytes in {time.perf_counter() - started:.1f} s")
    return 0


def _info(arguments: argparse.Namespace) -> int:
    info = checkpoint_info(arguments.path)
    print(json.dumps(info.to_dict()) if arguments.json else info)
    return 0 if info.usable else 1


def _generate(arguments: argparse.Namespace) -> int:
    prompts = list(arguments.prompt)
    if arguments.prompts_file is not None:
        prompts += _read_prompts(arguments.prompts_file)
    if not prompts:
        raise ValueError("no prompt: give --prompt or --prompts-file")
    if arguments.output is not None and not arguments.output.parent.is_dir():
        raise ValueError(f"--output: got {arguments.output}, expected a file in a folder that exists")
    params = SamplingParams(temperature=arguments.temperature, seed=arguments.seed, max_tokens=arguments.max_tokens)
    speculative = {
        "num_speculative_tokens": arguments.num_speculative_tokens,
        "verification": arguments.verification,
    }
    llm = LLM(arguments.model, speculative_config=speculative)
    outputs = llm.generate(prompts, params)
    metrics = llm.get_metrics()
    if arguments.output is not None:
        with arguments.output.open("w") as file:
            for output in outputs:
                print(json.dumps(_as_object(output)), file=file)
    if arguments.json:
        print(json.dumps({"outputs": [_as_object(output) for output in outputs], "metrics": metrics.to_dict()}))
    else:
        _show(outputs, metrics)
    return 1 if any(output.error is not None for output in outputs) else 0


def _read_prompts(path: Path) -> list[Any]:
    """Texts or token-id lists, one a line; blank lines are skipped."""
    # Not splitlines: it also ends lines at characters that texts and JSON strings may hold, U+2028 or a form feed.
    text = path.read_text(encoding="utf-8-sig")
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if path.suffix != ".jsonl":
        return [line for _, line in lines]
    return [_read_json_prompt(path, number, line) for number, line in lines]


def _read_json_prompt(path: Path, number: int, line: str) -> Any:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
    if isinstance(value, dict):
        value = value["prompt"] if value.get("prompt") is not None else value.get("prompt_token_ids")
    if isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value)):
        return value
    raise ValueError(
        f"{path}, line {number}: got {line:.80}, expected a text, a list of token ids, or an object with one of them "
        "as prompt or prompt_token_ids"
    )


def _as_object(output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    found = {
        "prompt": output.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }
    return found if output.error is None else found | {"error": output.error}


def _show(outputs: Sequence[RequestOutput], metrics: Metrics) -> None:
    for output in outputs:
        if output.error is not None:
            print(f"[request {output.request_id} failed: {output.error}]\n")
            continue
        prompt = output.prompt if output.prompt is not None else str(output.prompt_token_ids)
        print(f"{prompt}{output.outputs[0].text}\n")
    print(f"{metrics.summary()} (compiled in {metrics.seconds_compile:.1f} s)")
