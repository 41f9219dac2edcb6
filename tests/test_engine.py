"""The public API on the fixture checkpoints: `LLM` as users call it, through the folder reader they use.

Programs take seconds to compile and are shared by all instances of equal config, pool and buckets. So nearly every
test here has the same ones.
"""

import dataclasses
import functools
import itertools
import json
import re
import sys

import jax
import numpy as np
import pytest
from fixtures import rnd_config, rnd_tensors, write_cyc, write_folder, write_rnd, write_tokenizer
from oracles import greedy_reference
from test_fp8 import write_fp8

from jaxspec import LLM, SamplingParams
from jaxspec.checkpoint import convert
from jaxspec.engine import Metrics
from jaxspec.engine import llm as llm_module
from jaxspec.engine.requests import as_params, as_prompts
from jaxspec.models.block_scaled import BlockScaled

# One program for prompts, and one for rounds.
OPTIONS = {
    "max_model_len": 64,
    "max_num_seqs": 8,
    "engine_config": {"row_buckets": (), "chunk_buckets": ((8, 16),)},
}
EOS = [2, 5]
VOCAB = 128


def greedy(max_tokens=13, **options):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


# Greedy rows, one of them by a temperature too small to matter, among sampled ones of every kind.
BATCH = [
    ([3], greedy(16)),
    ([10, 11, 12, 13, 14], SamplingParams(temperature=0.7, seed=1, max_tokens=12)),
    ([40, 7, 9, 22, 1, 2, 3, 60, 61], greedy(9)),
    ([127, 0, 64], SamplingParams(top_k=20, seed=2, max_tokens=16)),
    ([5] * 16, SamplingParams(temperature=1e-6, top_p=0.5, seed=9, max_tokens=7)),
    ([31, 4, 15, 92, 65], SamplingParams(seed=7, max_tokens=16)),
    ([8, 80], SamplingParams(temperature=1.5, top_p=0.8, min_p=0.02, seed=3, max_tokens=5)),
    ([100, 90, 80, 70], greedy(1)),
]
PROMPTS = [prompt for prompt, _ in BATCH]
PARAMS = [params for _, params in BATCH]
GREEDY_ROWS = [0, 2, 4, 7]


def counting(prompt, num_new):
    """CYC's greedy text."""
    return [(prompt[-1] + i) % 64 for i in range(1, num_new + 1)]


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def timeless(metrics):
    """What a request's neighbours, and those before it, have no part in."""
    counts = ("num_steps", "pages_held", "peak_pages_held", "prefix_cache_queries", "prefix_cache_hits")
    seconds = ("seconds_compile", "seconds_decode", "seconds_idle")
    return dataclasses.replace(metrics, **dict.fromkeys(counts, 0), **dict.fromkeys(seconds, 0.0))


def reasons(outputs):
    return [output.outputs[0].finish_reason for output in outputs]


@pytest.fixture(scope="module")
def folders(checkpoints, tmp_path_factory):
    """The shared checkpoints, and some that only this file needs."""
    root = tmp_path_factory.mktemp("engine")
    made = {name: folder for name, (folder, _, _) in checkpoints.items()}
    made["eos"] = write_cyc(root / "eos", "hit")
    (made["eos"] / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    write_tokenizer(made["eos"], 64)
    made["copies"] = write_cyc(root / "copies", "hit", mtp_copies=True)
    made["tied"] = write_cyc(root / "tied", "hit", tied=True)
    made["plain"] = write_rnd(root / "plain", num_nextn_predict_layers=0)
    for name, weight, row in (("flat", "lm_head.weight", slice(None)), ("nan", "model.embed_tokens.weight", 77)):
        tensors = rnd_tensors(rnd_config())
        tensors[weight][row] = 0 if name == "flat" else np.nan
        made[name] = root / name
        write_folder(made[name], rnd_config(), tensors)
    return made


@pytest.fixture(scope="module")
def engine(folders):
    """`engine(checkpoint, K)`: an LLM, the same one for the same arguments."""

    @functools.cache
    def make(name, num_drafts=3, verification="coupled", **options):
        speculative_config = {
            "method": "mtp",
            "num_speculative_tokens": num_drafts,
            "verification": verification,
        }
        options = OPTIONS | options
        return LLM(folders[name], speculative_config=speculative_config, **options)

    return make


@pytest.fixture
def compiled():
    """Whatever JAX traces, lowers or compiles from here on."""
    events = []

    def listen(event, duration, **_):
        if event.startswith("/jax/core/compile/"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


# --- Tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_drafts", "rule"),
    [("rnd", 0, "coupled"), ("rnd", 3, "coupled"), ("rnd", 3, "rejection"), ("rnd-2", 3, "coupled")],
)
def test_greedy_rows_equal_transformers_whatever_their_neighbours(engine, folders, name, num_drafts, rule):
    """Field case c4 too: sampled rows beside them."""
    outputs = engine(name, num_drafts, rule).generate(PROMPTS, PARAMS)
    assert [len(row) for row in tokens(outputs)] == [params.max_tokens for params in PARAMS]
    assert set(reasons(outputs)) == {"length"}
    for row in GREEDY_ROWS:
        expected = greedy_reference(folders[name], PROMPTS[row], PARAMS[row].max_tokens)
        assert tokens(outputs)[row] == expected


def test_greedy_tokens_equal_those_that_transformers_speculates(engine, folders):
    expected = greedy_reference(folders["rnd"], PROMPTS[0], 16, use_mtp=True)
    assert tokens(engine("rnd").generate(PROMPTS, PARAMS))[0] == expected


def test_seeded_output_is_the_same_for_every_draft_length(engine):
    plain, one, three = (tokens(engine("rnd", k).generate(PROMPTS, PARAMS)) for k in (0, 1, 3))
    assert plain == one == three


def test_seeded_output_is_the_same_alone_in_a_batch_and_after_others(engine):
    """Field case c7."""
    llm = engine("rnd")
    long = dataclasses.replace(PARAMS[5], max_tokens=201)
    alone = tokens(engine("rnd", max_model_len=256).generate(PROMPTS[5], long))[0]
    for _ in range(3):
        llm.generate(PROMPTS, SamplingParams(max_tokens=16))
    assert tokens(llm.generate(PROMPTS, PARAMS))[5] == alone[:16]
    other_seed = [dataclasses.replace(params, seed=8) for params in PARAMS]
    assert tokens(llm.generate(PROMPTS, other_seed))[5] != alone[:16]


def test_the_rejection_rule_is_reproducible_by_seed(engine):
    llm = engine("rnd", 3, "rejection")
    first = tokens(llm.generate(PROMPTS, PARAMS))
    assert tokens(llm.generate(PROMPTS, PARAMS)) == first
    unseeded = [dataclasses.replace(params, seed=None) for params in PARAMS]
    assert tokens(llm.generate(PROMPTS, unseeded))[5] != first[5]


def test_unseeded_runs_differ_and_show_no_cycle(engine):
    """Field case i7: equal logits, temperature 1. Drafts are drawn from the same logits, so all are accepted."""
    llm = engine("flat", max_model_len=256)
    runs = [llm.generate([7, 8, 9], SamplingParams(max_tokens=201))[0] for _ in range(2)]
    one, other = tokens(runs)
    # By chance, 12 of 201 places are equal once in 10^7 runs, and 80 distinct tokens are five deviations away.
    assert sum(a == b for a, b in zip(one, other, strict=True)) < 12
    for run in runs:
        drawn = run.outputs[0].token_ids
        assert len(set(drawn)) > 80
        assert not any(drawn[period:] == drawn[:-period] for period in range(1, 101))
        assert run.metrics.acceptance_rate_per_position == [1.0, 1.0, 1.0]


def test_an_engine_with_a_seed_is_reproducible(folders):
    def calls():
        llm = LLM(folders["rnd"], speculative_config={}, seed=11, **OPTIONS)
        return [tokens(llm.generate(PROMPTS, SamplingParams(max_tokens=16))) for _ in range(2)]

    one, other = calls(), calls()
    assert one == other
    assert one[0] != one[1]
    assert len({tuple(row) for row in one[0]}) == 8


def test_other_dtypes(engine):
    llm = engine("soft-hit", dtype="bfloat16")
    assert llm.params.embed.dtype == "bfloat16"
    assert tokens(llm.generate([20], greedy())) == [counting([20], 13)]


# --- Where outputs end --------------------------------------------------------------------------------------------


def test_a_stop_token_before_the_length_and_after_it(engine):
    """Field case d1: six tokens are verified at once, and the stop token is looked for before the length."""
    llm = engine("soft-hit", 5, max_model_len=32, max_num_seqs=1)
    prompt = [i % 64 for i in range(-10, 10)]
    stopped, cut = (llm.generate(prompt, greedy(5, stop_token_ids=[stop]))[0].outputs[0] for stop in (12, 15))
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == ([10, 11, 12], "stop", 12)
    assert (cut.token_ids, cut.finish_reason, cut.stop_reason) == ([10, 11, 12, 13, 14], "length", None)


def test_every_output_ends_at_its_own_end_token(engine):
    """Field cases f10 and g13: two of them, from generation_config.json; outputs of 2, 5, 9 and 3 tokens."""
    outputs = engine("eos").generate([[0], [61], [57], [2]], greedy(16))
    assert tokens(outputs) == [[1, 2], counting([61], 5), counting([57], 9), [3, 4, 5]]
    assert reasons(outputs) == ["stop"] * 4
    assert [output.outputs[0].stop_reason for output in outputs] == [None] * 4
    assert [output.metrics.num_generated_tokens for output in outputs] == [2, 5, 9, 3]


def test_end_tokens_can_be_ignored_but_stop_tokens_cannot(engine):
    """Field cases g13 and d4: the last id of the vocabulary stays possible."""
    ignoring = functools.partial(greedy, 13, ignore_eos=True)
    params = [ignoring(), ignoring(stop_token_ids=[3]), ignoring(stop_token_ids=[5]), greedy(13)]
    prompts = [list(range(50, 64)), [60], [60], [60]]
    outputs = engine("eos").generate(prompts, params)
    assert tokens(outputs) == [counting([63], 13), counting([60], 7), counting([60], 9), counting([60], 6)]
    assert 63 in tokens(outputs)[1]
    assert [output.outputs[0].stop_reason for output in outputs] == [None, 3, 5, None]
    assert reasons(outputs) == ["length", "stop", "stop", "stop"]


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_exactly_as_many_tokens_as_asked(engine, max_tokens):
    """Field case d6."""
    output = engine("soft-hit").generate([30], greedy(max_tokens))[0]
    assert output.outputs[0].token_ids == counting([30], max_tokens)
    assert output.metrics.num_generated_tokens == max_tokens
    assert output.outputs[0].finish_reason == "length"


def test_near_the_length_limit(engine):
    """Field case e1: no max_tokens. Prompts that leave no room are refused, the others fill what there is."""
    llm = engine("soft-hit", max_model_len=32)
    prompts = [[i % 64 for i in range(n)] for n in range(29, 34)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=None))
    assert tokens(outputs) == [counting(prompts[0], 3), counting(prompts[1], 2), counting(prompts[2], 1), [], []]
    assert reasons(outputs) == ["length"] * 3 + ["error"] * 2
    for output, got in zip(outputs[3:], (32, 33), strict=True):
        assert f"got {got} tokens, expected fewer than max_model_len 32" in output.error
    assert tokens(llm.generate(prompts[:3], greedy(2)))[0] == counting(prompts[0], 2)


def test_no_draft_beyond_the_length_limit(engine):
    """Field case e2, in the smallest pool there may be. Two of the three tokens are not the prefill's."""
    llm = engine("soft-hit", 5, max_model_len=32, max_num_seqs=1)
    output = llm.generate(list(range(29)), SamplingParams(temperature=0.0, max_tokens=None))[0]
    assert output.outputs[0].token_ids == [29, 30, 31]
    assert (output.metrics.num_drafts, output.metrics.num_draft_tokens) == (1, 1)


# --- Drafts -------------------------------------------------------------------------------------------------------


def test_drafts_are_right_from_the_first_verification_on(engine):
    """Field case e5: a prompt of one token."""
    metrics = engine("soft-hit").generate([9], greedy(5))[0].metrics
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (1, 3, 3)


@pytest.mark.parametrize("name", ["soft-hit", "copies", "tied"])
def test_drafts_are_right_however_the_module_gets_its_embedding(engine, name):
    """Field case g4."""
    output = engine(name).generate([9], greedy())[0]
    assert output.outputs[0].token_ids == counting([9], 13)
    assert output.metrics.acceptance_rate_per_position == [1.0, 1.0, 1.0]


def test_wrong_drafts_are_never_accepted(engine):
    """Field case c11."""
    output = engine("soft-miss").generate([9], greedy())[0]
    assert output.outputs[0].token_ids == counting([9], 13)
    assert output.metrics.num_drafts > 10
    assert output.metrics.num_accepted_tokens == 0
    assert output.metrics.mean_acceptance_length == 1.0
    assert output.metrics.acceptance_rate_per_position == [0.0, 0.0, 0.0]


def test_padding_rows_change_nothing(engine):
    """Field case b4: three rows in a bucket of four, each of which accepts other drafts than its neighbours."""
    llm, prompts = engine("soft-mix"), [[3], [4], [10]]
    together = llm.generate(prompts, greedy())
    alone = [llm.generate(prompt, greedy())[0] for prompt in prompts]
    assert tokens(together) == tokens(alone) == [counting(prompt, 13) for prompt in prompts]
    assert [timeless(output.metrics) for output in together] == [timeless(output.metrics) for output in alone]
    assert len({output.metrics.num_drafts for output in together}) > 1


# --- Batches and programs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"max_num_seqs": 4}, {"num_pages": 9}], ids=["few rows", "few pages"])
def test_more_prompts_than_fit_take_turns(engine, options):
    llm = engine("soft-mix", **{"num_pages": 41} | options)
    prompts = [[(5 * n) % 64, (11 * n) % 64] for n in range(11)]
    prompts[2] = list(range(16))
    outputs = llm.generate(prompts, greedy(16))
    assert tokens(outputs) == [counting(prompt, 16) for prompt in prompts]
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [output.request_id for output in outputs] == [str(n) for n in range(11)]


def test_a_second_pass_compiles_nothing(engine, compiled):
    """Field case i6: 20 requests of 1 to 60 tokens with all kinds of parameters. The first pass does compile."""
    llm = engine("soft-hit", page_size=8)
    kinds = [greedy(4), *(dataclasses.replace(params, max_tokens=4) for params in PARAMS), greedy(4, ignore_eos=True)]
    kinds += [SamplingParams(max_tokens=4), greedy(3, stop_token_ids=[1, 2, 3])]
    lengths = [round(1 + 59 * i / 19) for i in range(20)]
    requests = [([n % 64] * n, kinds[i % len(kinds)]) for i, n in enumerate(lengths)]
    for prompt, params in requests:
        llm.generate(prompt, params)
    assert compiled.count("/jax/core/compile/backend_compile_duration") >= 1
    compiled.clear()
    for prompt, params in requests:
        llm.generate(prompt, params)
    assert compiled == []


def test_a_failure_on_the_device_leaves_the_engine_usable(engine, monkeypatch):
    llm = engine("soft-mix")
    expected = tokens(llm.generate([9], greedy()))
    llm.reset_metrics()

    def fails(*_, **__):
        jax.tree.map(lambda x: x.delete(), llm._engine._device.serving.state.cache)  # as donation leaves it
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine._device, "_step", fails)
        with pytest.raises(RuntimeError, match="device lost"):
            llm.generate([9], greedy())
    assert not llm.has_unfinished_requests()
    assert llm.get_metrics().num_generated_tokens == 0
    assert tokens(llm.generate([9], greedy())) == expected


def test_requests_come_and_go_step_by_step(engine):
    """Outputs grow until they are finished; an aborted one is not heard of again."""
    llm = engine("soft-mix")
    llm.add_request("a", [9], greedy(13))
    llm.add_request("b", [20], greedy(13))
    grown, ended = [], {}
    for step in itertools.count():
        if step == 2:
            llm.abort_request("b")
            llm.add_request("c", [30], greedy(5))
        for output in llm.step():
            if output.request_id == "a":
                grown.append(output.outputs[0].token_ids)
            if output.finished:
                ended[output.request_id] = output
            else:
                assert output.outputs[0].finish_reason is None
        if not llm.has_unfinished_requests():
            break
    assert {name: output.outputs[0].token_ids for name, output in ended.items()} == {
        "a": counting([9], 13),
        "c": counting([30], 5),
    }
    assert ended["a"].outputs[0].finish_reason == "length"
    assert len(grown) > 2
    assert all(counting([9], len(ids)) == ids for ids in grown)
    assert llm.step() == []


def test_batches_run_beside_requests_that_came_before(engine):
    llm = engine("soft-mix")
    llm.add_request("a", [9], greedy(16))
    llm.step()
    assert tokens(llm.generate([[40], [50]], greedy(13))) == [counting([40], 13), counting([50], 13)]
    outputs = {}
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step()}
    assert {name: output.outputs[0].token_ids for name, output in outputs.items()} == {"a": counting([9], 16)}


def test_request_ids_and_requests_are_checked(engine, unchecked_annotations):
    llm = engine("soft-mix")
    llm.add_request("a", [9], greedy(2))
    for arguments, message in [
        (("a", [9]), "request id 'a': got it twice"),
        ((7, [9]), "request_id: got 7, expected a str"),
        (("b", [64]), "token id outside the vocabulary: got 64"),
        (("b", [[1], [2]]), "prompt: got 2, expected one"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            llm.add_request(*arguments)
    with pytest.raises(ValueError, match="request id 'c': got none such, expected one that waits or runs"):
        llm.abort_request("c")
    [output] = [output for _ in range(9) for output in llm.step() if output.finished]
    assert (output.request_id, output.outputs[0].token_ids) == ("a", [10, 11])


def test_progress_is_shown_on_demand_only(engine, capsys):
    llm = engine("soft-hit")
    llm.generate([9], greedy())
    assert capsys.readouterr().err == ""
    llm.generate([9], greedy(), use_tqdm=True)
    shown = capsys.readouterr()
    assert "1/1" in shown.err
    assert "tokens per verification" in shown.err
    assert shown.out == ""


# --- Outputs and metrics ------------------------------------------------------------------------------------------


def test_text(engine):
    """A stop token, the model's or the user's, is part of the tokens and not of the text."""
    params = [greedy(3), greedy(16), greedy(16, stop_token_ids=[63]), greedy(2)]
    outputs = engine("eos").generate(["7 8 9", "60 61", "60 61", [9, 10]], params)
    assert [output.prompt for output in outputs] == ["7 8 9", "60 61", "60 61", "9 10"]
    assert [output.prompt_token_ids for output in outputs] == [[7, 8, 9], [60, 61], [60, 61], [9, 10]]
    assert tokens(outputs)[1:3] == [counting([61], 5), [62, 63]]
    assert [output.outputs[0].text for output in outputs] == ["10 11 12", "62 63 0 1", "62", "11 12"]


def test_ids_without_a_tokenizer_give_ids(engine):
    (output,) = engine("soft-hit").generate([[9]])
    assert (output.prompt, output.prompt_token_ids, output.outputs[0].text) == (None, [9], "")
    assert output.finished
    assert len(output.outputs[0].token_ids) == 16


def test_metrics_of_requests_and_in_total(engine):
    llm = engine("soft-hit")
    llm.reset_metrics()
    outputs = llm.generate([[1], [2, 3], [4], [5]], [greedy(13), greedy(13), greedy(9), greedy(1)])
    assert [output.metrics.num_drafts for output in outputs] == [3, 3, 2, 0]
    assert timeless(outputs[0].metrics) == Metrics(3, 9, 9, [3, 3, 3], 13)
    assert outputs[3].metrics.mean_acceptance_length == 1.0
    total = llm.get_metrics()
    assert timeless(total) == Metrics(8, 24, 24, [8, 8, 8], 36)
    assert (total.mean_acceptance_length, total.acceptance_rate_per_position) == (4.0, [1.0, 1.0, 1.0])
    assert total.tokens_per_second == 36 / total.seconds_decode
    llm.generate([[1], [2, 3], [4], [5]], greedy(5))
    assert llm.get_metrics().num_generated_tokens == 36 + 20


def test_metrics_of_some_accepted_drafts(engine):
    llm = engine("soft-mix")
    llm.reset_metrics()
    outputs = llm.generate([[3], [4], [10]], greedy())
    total = llm.get_metrics()
    parts = sum((output.metrics for output in outputs), Metrics())
    assert timeless(total) == timeless(parts)
    rates = total.acceptance_rate_per_position
    assert 1 > rates[0] >= rates[1] >= rates[2] > 0
    assert rates[0] > rates[2]
    assert total.num_accepted_tokens == sum(total.num_accepted_tokens_per_pos) < total.num_draft_tokens
    assert total.mean_acceptance_length == 1 + total.num_accepted_tokens / total.num_drafts


def test_metrics_as_plain_values(engine):
    metrics = engine("soft-hit").generate([9], greedy())[0].metrics.to_dict()
    assert (
        json.loads(json.dumps(metrics))
        == metrics
        == {
            "num_drafts": 3,
            "num_draft_tokens": 9,
            "num_accepted_tokens": 9,
            "mean_acceptance_length": 4.0,
            "acceptance_rate_per_position": [1.0, 1.0, 1.0],
            "num_generated_tokens": 13,
            "num_preemptions": 0,
            "num_stalls": 0,
            "num_steps": 0,
            "prefix_cache_queries": 1,
            "prefix_cache_hits": 0,
            "pages_held": 0,
            "peak_pages_held": 0,
            "tokens_per_second": 0.0,
            "seconds_compile": 0.0,
            "seconds_decode": 0.0,
            "seconds_idle": 0.0,
        }
    )


# --- Bad input ----------------------------------------------------------------------------------------------------

REFUSED = {
    "empty": ([], greedy(), "the prompt is empty: got 0 tokens, expected at least 1"),
    "at the limit": ([1] * 64, greedy(), "got 64 tokens, expected fewer than max_model_len 64"),
    "over the limit": ([1] * 65, greedy(), "got 65 tokens, expected fewer than max_model_len 64"),
    "negative id": ([1, -1], greedy(), "token id outside the vocabulary: got -1, expected 0..127"),
    "id too large": ([1, 128], greedy(), "token id outside the vocabulary: got 128, expected 0..127"),
    "id beyond 64 bits": ([2**70], greedy(), f"token id outside the vocabulary: got {2**70}, expected 0..127"),
    "stop id too large": (
        [1],
        greedy(stop_token_ids=[128]),
        "stop token id outside the vocabulary: got 128, expected",
    ),
    "text": ("hello", greedy(), "the checkpoint has no tokenizer.json: got a text, expected a list of token ids"),
}


@pytest.mark.parametrize(("prompt", "params", "message"), REFUSED.values(), ids=REFUSED)
def test_a_request_that_cannot_run(engine, compiled, monkeypatch, prompt, params, message):
    """Alone it raises before anything is compiled or computed; in a batch it fails alone."""
    llm = engine("rnd")
    expected = tokens(llm.generate(PROMPTS, PARAMS))
    llm.reset_metrics()
    compiled.clear()
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, "step", lambda: pytest.fail("it ran"))
        with pytest.raises(ValueError, match=re.escape(message)):
            llm.generate([prompt], params)
    outputs = llm.generate([*PROMPTS[:3], prompt, *PROMPTS[3:]], [*PARAMS[:3], params, *PARAMS[3:]])
    assert compiled == []
    failed = outputs.pop(3)
    assert message in failed.error
    assert (failed.request_id, tokens([failed]), reasons([failed])) == ("3", [[]], ["error"])
    assert tokens(outputs) == expected
    assert [output.error for output in outputs] == [None] * 8
    assert llm.get_metrics().num_generated_tokens == sum(params.max_tokens for params in PARAMS)


def test_text_that_cannot_be_encoded_fails_alone(engine):
    outputs = engine("eos").generate(["7 8", "seven", "\ud800", "", "8", "9"], greedy(3))
    assert tokens(outputs) == [[9, 10, 11], [], [], [], [9, 10, 11], [10, 11, 12]]
    assert "the tokenizer refuses the prompt: got 'seven', expected text" in outputs[1].error
    assert "the tokenizer refuses the prompt: got '\\ud800'" in outputs[2].error
    assert "the prompt is empty" in outputs[3].error


def test_logits_that_are_not_finite_fail_alone(engine):
    prompts = [*PROMPTS[:6], [8, 77], PROMPTS[7]]
    expected = tokens(engine("rnd").generate(PROMPTS, PARAMS))
    outputs = engine("nan").generate(prompts, PARAMS)
    assert not any(77 in row for row in expected)
    assert outputs[6].error == "the model gave logits that are not finite"
    assert (tokens(outputs)[6], reasons(outputs)[6]) == ([], "error")
    assert tokens(outputs)[:6] + tokens(outputs)[7:] == expected[:6] + expected[7:]


def test_no_prompts_give_no_outputs(engine):
    assert engine("rnd").generate([]) == []


@pytest.mark.parametrize("prompts", [5, None, [1, "a"], [1.5], [[1], [2.5]], {"prompt": "a"}, [[[1]]], [True]])
def test_what_is_no_prompt(prompts):
    with pytest.raises(ValueError, match="prompts: expected a text, a list of token ids, or a list of these, got"):
        as_prompts(prompts)


@pytest.mark.parametrize("prompts", [[1, 2], (1, 2), np.array([1, 2]), range(1, 3), [[1, 2]], [np.array([1, 2])]])
def test_ways_to_pass_ids(prompts):
    assert [list(prompt) for prompt in as_prompts(prompts)] == [[1, 2]]


def test_sampling_params_must_be_one_or_one_each(engine):
    with pytest.raises(ValueError, match="sampling_params: expected one or 2, one for each prompt, got 3"):
        engine("rnd").generate([[1], [2]], [greedy()] * 3)
    for wrong in (0.7, [0.7], {"temperature": 0.7}):
        with pytest.raises(ValueError, match="sampling_params: expected SamplingParams, got"):
            as_params(wrong, 1)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"temperature": float("nan")}, "expected temperature to be a number, got nan"),
        ({"temperature": -0.1}, "expected temperature to be a finite float32 >= 0, got -0.1"),
        ({"max_tokens": 0}, "expected max_tokens to be an integer in 1..2147483647, got 0"),
    ],
)
def test_sampling_params_out_of_range(option, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(**option)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "logprobs", "min_tokens", "stop", "n"])
def test_options_that_are_not_offered_are_refused(name):
    """Field cases c5, c9, d2 and a part of d4: better refused than ignored."""
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": {"method": "eagle"}}, "expected speculative method 'mtp', got 'eagle'"),
        (
            {"speculative_config": {"num_spec_tokens": 3}},
            "speculative_config: got unknown keys ['num_spec_tokens'], expected some of "
            "['acceptance_rate_threshold', 'acceptance_rate_window_size', 'draft_len_schedule', 'method', "
            "'num_speculative_tokens', 'verification']",
        ),
        (
            {"speculative_config": {"num_speculative_tokens": -1}},
            "expected num_speculative_tokens in 0..64, got -1",
        ),
        ({"speculative_config": {"num_speculative_tokens": 65}}, "expected num_speculative_tokens in 0..64, got 65"),
        ({"speculative_config": {"num_speculative_tokens": "3"}}, "expected an integer num_speculative_tokens"),
        ({"speculative_config": {"verification": "typical"}}, "expected verification one of"),
        ({"max_model_len": 4097}, "max_model_len: got 4097, expected 2..4096 (the model's own limit)"),
        ({"max_model_len": 1}, "max_model_len: got 1, expected 2..4096"),
        ({"max_num_seqs": 0}, "max_num_seqs: got 0, expected an integer of at least 1"),
        ({"page_size": 0}, "page_size: got 0, expected an integer of at least 1"),
        (
            {"max_model_len": 64, "num_pages": 5, "speculative_config": {}},
            "num_pages: got 5, expected at least 6: one request of max_model_len 64 with 3 drafts, and the scratch",
        ),
        ({"num_pages": 0}, "num_pages: got 0, expected an integer of at least 1"),
        (
            {"max_model_len": 64, "engine_config": {"kv_cache_memory_bytes": 1000}, "speculative_config": {}},
            "kv_cache_memory_bytes: got 1000, expected at least 73728: one request of max_model_len 64 with 3 drafts",
        ),
        (
            {"num_pages": 9, "engine_config": {"kv_cache_memory_bytes": 10**6}},
            "num_pages and kv_cache_memory_bytes: got both",
        ),
        ({"engine_config": {"overlap": -1}}, "overlap: got -1, expected an integer of at least 0"),
        ({"engine_config": {"chunk_buckets": ((0, 16),)}}, "chunk_buckets: got 0, expected an integer of at least 1"),
        (
            {"engine_config": {"overlaps": 1}},
            "engine_config: got unknown keys ['overlaps'], expected some of ['attention_backend', 'chunk_buckets', ",
        ),
        (
            {"speculative_config": {"draft_len_schedule": {4: 5}}},
            "expected draft_len_schedule within num_speculative_tokens 3, got 5",
        ),
    ],
)
def test_options_of_the_engine_are_checked_before_weights_are_read(folders, monkeypatch, options, message):
    monkeypatch.setattr(llm_module, "load", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM(folders["rnd"], **options)


def test_a_model_without_modules_decodes_without_drafts(engine, folders):
    message = "'mtp' needs a model with multi-token-prediction modules; got num_nextn_predict_layers = 0"
    with pytest.raises(ValueError, match=message):
        engine("plain", 3)
    outputs = engine("plain", 0).generate(PROMPTS, PARAMS)
    assert tokens(outputs)[0] == greedy_reference(folders["plain"], PROMPTS[0], 16)
    assert timeless(outputs[0].metrics) == Metrics(num_generated_tokens=16)


def test_folders_that_are_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json: expected the folder of a Hugging Face checkpoint"):
        LLM(tmp_path)
    with pytest.raises(ValueError, match="no such folder: expected a local one"):
        LLM(tmp_path / "absent")


def test_shards_that_are_cut_short_or_missing(tmp_path, compiled):
    shard = write_rnd(tmp_path / "rnd", shards=3) / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(
        ValueError, match=f"{shard.name}: cut short: got {len(whole) - 1} bytes, expected {len(whole)}"
    ):
        LLM(tmp_path / "rnd")
    shard.unlink()
    with pytest.raises(ValueError, match=rf"{shard.name}: missing, but model\.safetensors\.index\.json places"):
        LLM(tmp_path / "rnd")
    assert compiled == []


def test_a_tokenizer_that_does_not_match(tmp_path, monkeypatch):
    folder = write_rnd(tmp_path / "rnd")
    write_tokenizer(folder, VOCAB + 1)
    monkeypatch.setattr(llm_module, "load", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match="does not match the vocabulary: got ids up to 128, expected less than"):
        LLM(folder)


# --- Formats of checkpoints -----------------------------------------------------------------------------------------


def test_weights_kept_in_fp8_and_stores_give_the_same_tokens(tmp_path):
    """Dequantised on load, kept in FP8, and restored from either kind of store: one model."""
    source, options = write_fp8(tmp_path / "fp8"), OPTIONS | {"speculative_config": {"num_speculative_tokens": 3}}
    llms = [LLM(source, **options), LLM(source, weight_format="fp8", **options)]
    for weight_format in ("dequantized", "fp8"):
        store = tmp_path / f"{weight_format}.store"
        convert(source, store, dtype="float32", weight_format=weight_format)
        llms.append(LLM(store, **options))
    kept = [isinstance(llm.params.moe.mlp.experts.gate, BlockScaled) for llm in llms]
    assert kept == [False, True, False, True]
    outputs = [tokens(llm.generate(PROMPTS[:4], PARAMS[:4])) for llm in llms]
    assert outputs == [outputs[0]] * 4


def test_names_of_the_hub_say_what_they_take(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r'owner/model: no such folder, and it takes an extra.*"jaxspec\[hub\]"'):
        LLM("owner/model")
