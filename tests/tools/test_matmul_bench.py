"""bench --matmul and --generate without a GPU: what may be printed, and that the model they run is a model."""

from __future__ import annotations

from io import StringIO

import pytest
import torch
import torch.nn.functional as F
from oracle import layout_of, quantized
from rich.console import Console
from subprocess_python import python
from verbs import output_of, report_of

from nf4_patch.tools.bench import generation as generate
from nf4_patch.tools.bench import matmul as fused_matmul
from nf4_patch.tools.bench import plots
from nf4_patch.tools.bench.peers import BITSANDBYTES, OURS
from nf4_patch.tools.bench.record import Bench, Row, accuracy
from nf4_patch.tools.bench.shapes import LLAMA_8B, Model
from nf4_patch.tools.bench.timing import Machine, Times

MACHINE = Machine("a GPU", "90", "1", "clocks", {})
TINY = Model("tiny", 256, 128, 512)


def row(ours: float, theirs: float) -> Row:
    times = {OURS: Times((10.0, 10.0)), BITSANDBYTES: Times((30.0, 30.0)), fused_matmul.DENSE: Times((20.0, 20.0))}
    return Row("M=8", "us", times, {"fp64": accuracy(ours, theirs)}, sizes={"m": 8}, notes={"fused": "yes"})


def bench_of(*rows: Row) -> Bench:
    return Bench(MACHINE, {"64x128 bf16": list(rows)}, {"64x128 bf16": "how"})


def text_of(report) -> str:
    console = Console(file=StringIO(), width=200)
    for renderable in report.render():
        console.print(renderable)
    return console.file.getvalue()


def test_a_ratio_needs_the_accuracy_of_the_same_run():
    good, bad = row(1e-3, 1e-3), row(1.02e-3, 1e-3)
    assert good.ratio(BITSANDBYTES) == 3.0
    assert good.ratio(fused_matmul.UNSLOTH) is None
    assert bad.ratio(BITSANDBYTES) is None
    report = bench_of(good, bad)
    assert report.exit_code == 1
    assert report.failures == ["64x128 bf16, M=8: error 1.020e-03 against fp64, dequantize + matmul 1.000e-03"]
    text = text_of(report)
    assert text.count("3.00x") == 1 and text.count("2.00x") == 1
    assert text.count("check failed") == 2
    shown = report.as_dict()["sections"]["64x128 bf16"][1]
    assert shown["ratio"][BITSANDBYTES] is None
    assert shown["checks"]["fp64"]["error"] == 1.02e-3 > shown["checks"]["fp64"]["limit"]


def test_a_rate_needs_hits_and_accuracy():
    rates = {generate.STOCK: Times((100.0,)), OURS: Times((150.0,))}
    exact, off = ({"64x64": accuracy(error, 1e-3, "64x64 ")} for error in (1e-3, 2e-3))
    good = generate.row(8, "compiled", rates, 224, exact, 1e-2)
    silent = generate.row(8, "compiled", rates, 0, exact, 0.0)
    worse = generate.row(8, "compiled", rates, 224, off, 1e-2)
    assert good.ratio(generate.STOCK) == 1.5
    assert silent.ratio(generate.STOCK) is None and worse.ratio(generate.STOCK) is None
    report = Bench(MACHINE, {"generation": [good, silent, worse]}, {"generation": "how"})
    assert report.exit_code == 1
    assert report.failures == [
        "generation, batch 8, compiled: no fused matmul ran",
        "generation, batch 8, compiled: 64x64 error 2.000e-03 against fp64, dequantize + matmul 1.000e-03",
    ]
    text = text_of(report)
    assert text.count("1.50x") == 1 and text.count("check failed") == 2


def test_the_picture_needs_accuracy(tmp_path):
    plots.draw_matmul(bench_of(row(1e-3, 1e-3)), tmp_path / "matmul.png")
    assert (tmp_path / "matmul.png").stat().st_size > 10_000
    for nothing in (Bench(MACHINE), bench_of(row(2e-3, 1e-3))):
        with pytest.raises(RuntimeError, match="nothing to draw"):
            plots.draw_matmul(nothing, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_the_options_reach_what_they_name(monkeypatch, tmp_path):
    asked = []

    def measured(report):
        def measure(*arguments, **keywords):
            keywords.pop("tell")
            asked.append((arguments, keywords))
            return report

        return measure

    monkeypatch.setattr(fused_matmul, "measure", measured(bench_of(row(1e-3, 1e-3))))
    monkeypatch.setattr(generate, "measure", measured(Bench(MACHINE)))
    for arguments, wanted in [
        (["--matmul"], ((None,), {"with_unsloth": True})),
        (["--matmul", "--quick", "--no-unsloth"], (((LLAMA_8B,),), {"with_unsloth": False})),
        (["--generate"], ((), {"layers": 32})),
        (["--generate", "--quick"], ((), {"layers": 8})),
    ]:
        assert report_of(tmp_path, "bench", *arguments)["exit_code"] == 0
        assert asked.pop() == wanted
    for arguments, message in [
        (["--matmul", "--generate"], "--matmul and --generate measure different things"),
        (["--generate", "--plot", "x.png"], "leave out --generate"),
    ]:
        assert message in output_of("bench", *arguments, exit_code=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said():
    for measure in (fused_matmul.measure, generate.measure):
        with pytest.raises(RuntimeError, match="no NVIDIA GPU: nothing can be measured here"):
            measure()


@pytest.mark.parametrize("nested", [True, False])
def test_exact_is_the_weight_before_rounding(nested):
    packed, state = quantized((96, 256), torch.float32, "cpu", nested=nested)
    weight = fused_matmul.exact(layout_of(packed, state))
    assert weight.dtype is torch.float64
    assert torch.equal(weight.float(), fused_matmul.reference.dequantize(layout_of(packed, state)))
    assert fused_matmul.error(weight.float(), weight) < 1e-7


def plain_logits(model: generate.Llama, tokens: torch.Tensor) -> torch.Tensor:
    """Logits at every position of ``tokens`` [batch, length], with no cache: heads one by one, a causal mask."""
    groups = model.model.key_value // generate.HEAD
    batch, length = tokens.shape
    x = model.embedding[tokens]

    def heads(y):
        y = y.view(batch, length, -1, generate.HEAD)
        return torch.stack([generate.rotate(y[:, i], torch.tensor([i])) for i in range(length)], 1).transpose(1, 2)

    def norm(y):
        return generate.normalize(y, model.norm)

    for q, k, v, o, gate, up, down in model.layers:
        h = norm(x)
        values = v(h).view(batch, length, groups, generate.HEAD).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads(q(h)), heads(k(h)), values, is_causal=True, enable_gqa=True)
        x = x + o(attended.transpose(1, 2).reshape(batch, length, -1))
        h = norm(x)
        x = x + down(F.silu(gate(h)) * up(h))
    return norm(x) @ model.head.t()


@torch.no_grad()
def test_the_static_cache_gives_the_logits_of_the_whole_sequence():
    torch.manual_seed(0)
    model = generate.Llama(TINY, layers=2, vocabulary=97, device=torch.device("cpu"))
    state = generate.Generation(model, 3, patch=False, compiled=False, cache=16)
    tokens, logits = [state.token.clone()], []
    for _ in range(6):
        state.step()
        tokens.append(state.token.clone())
        logits.append(state.logits)
    want = plain_logits(model, torch.stack(tokens[:-1], 1))
    assert fused_matmul.error(torch.stack(logits, 1), want.double()) < 0.02
    first = logits[0].clone()
    state.restart()
    state.step()
    assert torch.equal(state.logits, first)


def test_reader_reads_every_word():
    done = python("""
    import os
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from nf4_patch.tools.bench import traffic_kernel
    packed = torch.randint(0, 256, (3 * 4 * traffic_kernel.READ_WORDS, 1), dtype=torch.uint8)
    call = traffic_kernel.reader(packed)
    call()
    out = call.__closure__
    found = next(c.cell_contents for c in out if torch.is_tensor(c.cell_contents) and c.cell_contents.numel() == 3)
    assert torch.equal(found, packed.view(-1).view(torch.int32).view(3, -1).amax(1))
    print("read")
    """, fresh=True)  # fmt: skip
    assert done.stdout.split() == ["read"]
