"""The prepared check for a GPU, at its small shapes on the CPU: it runs to its end, and it tells wrong from right."""

import importlib.util
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"


@pytest.fixture
def gpu_check(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def run(module, folder):
    out = folder / "found.json"
    code = module.main(["--small", "--backend", "xla", "--out", str(out)])
    return code, json.loads(out.read_text())


@pytest.mark.slow
def test_it_runs_to_its_end(gpu_check, tmp_path):
    code, found = run(gpu_check, tmp_path)
    assert code == 0
    assert {"date", "jax", "jaxlib", "device", "driver", "copy GB/s", "product TFLOP/s", "seconds"} <= set(found)
    kinds = [line["what"].split()[0] for line in found["lines"]]
    assert kinds == ["attention"] * 5 + ["append"] * 2 + ["round"] * 2
    assert found["lines"][-1]["tokens if accepted"] == pytest.approx(1 + 0.8 + 0.8**2)


def one_position_early(op):
    """The last query's own position is not seen."""
    return lambda *args, **options: op(*args[:6], args[6] - 1, *args[7:], **options)


def later_layer(op):
    return lambda *args, **options: op(*args[:4], (args[4] + 1) % args[2].shape[0], *args[5:], **options)


def without_tree(op):
    return lambda *args, **options: op(*args, **options | {"tree_mask": None})


def scales_of_one(op):
    def attend(*args, scale_pool, **options):
        return op(*args, scale_pool=scale_pool if scale_pool is None else jnp.ones_like(scale_pool), **options)

    return attend


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "kind"),
    [(one_position_early, "varlen"), (later_layer, "s_q 64"), (without_tree, "tree"), (scales_of_one, "fp8")],
)
def test_it_reports_a_broken_attention(mutant, kind, gpu_check, monkeypatch):
    right, shapes = gpu_check.paged_mla, gpu_check.shapes
    monkeypatch.setattr(gpu_check, "shapes", lambda small: [s for s in shapes(small) if kind in s.name])

    def broken(*args, **options):
        op = right if args[0].dtype == jnp.float32 else mutant(right)  # what it is compared with is in float32
        return op(*args, **options)

    monkeypatch.setattr(gpu_check, "paged_mla", broken)
    (line,) = gpu_check.attention(True, "xla", gpu_check.Peaks(1e12, 1e14))
    assert "expected at most 0.01" in line["wrong"]


@pytest.mark.slow
def test_it_reports_a_broken_append_and_goes_on(gpu_check, monkeypatch):
    right = gpu_check.norm_rope_append

    def broken(*args, backend, **options):
        pools = right(*args, backend="xla", **options)
        return pools if backend == "xla" else (*pools[:1], pools[1] * 1.1, *pools[2:])

    monkeypatch.setattr(gpu_check, "norm_rope_append", broken)
    lines = gpu_check.append(True, "mosaic")
    assert ["wrong" in line for line in lines] == [True, True]


@pytest.mark.slow
def test_a_backend_that_cannot_is_reported(gpu_check):
    lines = gpu_check.append(True, "mosaic")
    assert all("it needs a Hopper GPU" in line["wrong"] for line in lines)
