"""Engines side by side on a GPU, each on its stream; images as bytes, to the last bit."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tessella import compiler, runtime
from tessella.artifacts.plan import Plan
from tessella.core.preprocess import Preprocess, gain_and_offset, normalize
from tessella.core.spec import DimRange, TensorSpec
from tessella.device.streams import OwnStream, capturing
from tessella.graph import capture
from tessella.kernels.catalog import kernel
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tessella.search.find import bind, find
from tests.support.gpu_target import TARGET, UNTUNED

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

RECORD = Preprocess(height=28, width=28, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
BATCH = DimRange(min=1, opt=4, max=4)
NEAR = {"rtol": 0.0, "atol": 5e-3}  # of scores about 1: buckets have kernels of their own


@functools.cache
def build(precision: str, input: str) -> Plan:
    """A small classifier: few kernels to compile."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(2352, 64), nn.ReLU(), nn.Linear(64, 10)).eval()
    spec = TensorSpec(name="image", dtype="float32", shape=(BATCH, 3, 28, 28))
    return compiler.compile_graph(
        capture(module, (spec,), outputs=("scores",)),
        target=TARGET,
        batch=BATCH,
        precision=precision,
        input=input,
        about=compiler.About(
            built_from="test",
            rebuild="tessella compile test --target sm_90",
            preprocess=RECORD,
        ),
        measuring=compiler.Measuring(untuned=UNTUNED),
    )


@pytest.mark.parametrize("format", ["channels_last", "contiguous"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 224, 224, 3), (3, 31, 33, 1), (5, 17, 19, 13)])
def test_images_to_tensors_bit_for_bit(shape: tuple[int, ...], dtype: str, format: str) -> None:
    n, h, w, c = shape
    record = Preprocess(
        height=h, width=w, channels=c, mean=tuple(np.linspace(0.2, 0.7, c)), std=(0.229,)
    )
    gain, offset = (list(map(float, t)) for t in gain_and_offset(record))
    problem = Problem(
        op="image_to_tensor",
        inputs=(TensorMeta(shape=shape, dtype="uint8"),),
        outputs=(TensorMeta(shape=(n, c, h, w), dtype=dtype, format=format),),
        attrs={"gain": gain, "offset": offset, "dtype": dtype},
    )
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    right = torch.from_numpy(normalize(pixels, record)).to(getattr(torch, dtype))
    for trial in find(problem, {}, target=TARGET):
        assert trial.refused is None, trial  # ours is compared with the reference: no error at all
        print(shape, dtype, format, trial.kernel, trial.time_us)
        row = kernel(trial.kernel)
        call, buffers = bind(row, problem, {}, torch.device("cuda"), trial.config)
        made = call(torch.from_numpy(pixels).cuda(), **buffers)
        assert torch.equal(made.cpu(), right)


def test_a_plan_of_bytes_answers_like_one_of_floats() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 28, 28, 3), dtype=np.uint8)
    scaled = normalize(pixels, RECORD)
    made = runtime.load(build("fp16", "uint8"))(image=pixels)["scores"]
    right = runtime.load(build("fp16", "float32"))(image=scaled)["scores"]
    assert np.abs(made - right).max() <= 1e-2 * np.abs(right).max()


def test_engines_in_threads_each_on_its_stream() -> None:
    """Also while another engine is loaded, which captures graphs."""
    engines = [runtime.load(build("fp16", "float32")) for _ in range(2)]
    assert engines[0]._turns.own != engines[1]._turns.own
    inputs = [torch.randn(1 + i % 5, 3, 28, 28) for i in range(6)]
    right = [[e(image=x)["scores"] for x in inputs] for e in engines]
    wrong: list[tuple[int, int]] = []

    def work(which: int, index: int) -> None:
        x = inputs[index].cuda() if index % 2 else inputs[index]
        for _ in range(60):
            made = engines[which](image=x)["scores"].cpu()
            if not torch.equal(made, right[which][index]):
                wrong.append((which, index))

    threads = [
        threading.Thread(target=work, args=(e, i)) for e in range(2) for i in range(len(inputs))
    ]
    for thread in threads:
        thread.start()
    for _ in range(3):
        runtime.load(build("fp16", "float32")).close()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_caller_s_stream_waits_and_is_waited_for() -> None:
    """An input that is still being made is waited for; a result may be used at once."""
    engine = runtime.load(build("fp16", "float32"))
    x = torch.randn(4, 3, 28, 28, device="cuda")
    right = engine(image=x)["scores"].clone()
    stream = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            made = engine(image=x * 1.0)["scores"] + 0.0
        stream.synchronize()
        assert torch.equal(made, right)


def test_callers_in_two_streams_take_turns() -> None:
    """The arena is not overwritten before a slow caller has its answer."""
    engine = runtime.load(build("fp16", "float32"))
    inputs = [torch.randn(4, 3, 28, 28, device="cuda") for _ in range(2)]
    right = [engine(image=x)["scores"].clone() for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(20):
        made = []
        for x, stream in zip(inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                made.append(engine(image=x * 1.0)["scores"])
                torch.cuda._sleep(500_000)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(made, right, strict=True))


def test_loaded_in_inference_mode_it_runs_outside() -> None:
    x = torch.randn(4, 3, 28, 28, device="cuda")
    with torch.inference_mode():
        engine = runtime.load(build("fp16", "float32"))
        right = engine(image=x)["scores"]
    made = engine(image=x)["scores"]
    assert torch.equal(made, right)
    assert not made.is_inference()


@pytest.mark.parametrize("input", ["float32", "uint8"])
def test_an_input_is_read_where_it_is(input: str) -> None:
    """And one that lies at an odd address, or is too short for its bucket, is not misread.

    Only torch's kernels hide the address in a structure: before them it is copied. A plan that
    nobody tuned has libraries' in its layers, which may hide anything.
    """
    engine = runtime.load(build("fp16", input))
    bucket = engine.bound(4)
    reader = next(s.step.kernel for s in bucket.steps if "image" in s.step.inputs)
    assert UNTUNED or (bucket._places[0] is None) == reader.endswith(".aten")
    shape = (9, 3, 28, 28) if input == "float32" else (9, 28, 28, 3)
    images = torch.rand(shape, device="cuda") * 255
    images = images.to(torch.uint8) if input == "uint8" else images / 255
    right = engine(image=images.cpu())["scores"].cuda()
    memory = torch.empty(images.numel() + 1, dtype=images.dtype, device="cuda")
    odd = memory[1:].view(shape).copy_(images)
    for taken in (slice(0, 4), slice(4, 8), slice(1, 3), slice(0, 9), slice(3, 6)):
        for given in (images, odd):
            torch.testing.assert_close(engine(image=given[taken])["scores"], right[taken], **NEAR)
    copied = images.clone()
    scores = engine(image=copied[:4])["scores"]
    copied.zero_()  # in the caller's stream: behind the reading
    torch.testing.assert_close(scores, right[:4], **NEAR)


class Sum(nn.Module):
    """One kernel reads both."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(2 * a - b).mean(1)


def test_two_inputs_of_one_kernel_are_read_where_they_are() -> None:
    specs = [TensorSpec(name=n, dtype="float32", shape=(BATCH, 64)) for n in "ab"]
    plan = compiler.compile_graph(
        capture(Sum(), specs, outputs=("scores",)),
        target=TARGET,
        batch=BATCH,
        about=compiler.About(built_from="test", rebuild="tessella compile test"),
        measuring=compiler.Measuring(untuned=UNTUNED),
    )
    engine = runtime.load(plan)
    assert None not in engine.bound(4)._places
    for _ in range(3):
        a, b = torch.randn(2, 4, 64, device="cuda")
        torch.testing.assert_close(engine(a=a, b=b)["scores"], Sum()(a, b))


@pytest.mark.parametrize("streams", [1, 2])
def test_calls_that_wait_in_a_queue_keep_their_inputs(streams: int) -> None:
    """Eight calls, each with an input elsewhere, before the GPU has begun with the first."""
    engine = runtime.load(build("fp16", "float32"))
    inputs = [torch.randn(4, 3, 28, 28, device="cuda") for _ in range(4)]
    right = [engine(image=x)["scores"].clone() for x in inputs]
    queues = [torch.cuda.Stream() for _ in range(streams)]
    torch.cuda.synchronize()
    for _ in range(10):
        made = []
        for call in range(8):
            with torch.cuda.stream(queues[call % streams]):
                if call < streams:
                    torch.cuda._sleep(2_000_000)
                made.append(engine(image=inputs[call % 4])["scores"])
        torch.cuda.synchronize()
        assert all(torch.equal(a, right[i % 4]) for i, a in enumerate(made))


class Divided(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.div(a, b, rounding_mode="trunc").cumsum(1)


def test_a_plan_with_torchs_operators_is_tried_on_the_gpu(tmp_path: Path) -> None:
    """In a child that has the GPU too; and integers have the CPU's quotients by 0 and −1."""
    specs = [TensorSpec(name=n, dtype="int64", shape=(BATCH, 2)) for n in "ab"]
    made = compiler.compile_graph(
        capture(Divided().eval(), specs, outputs=("c",)),
        target=TARGET,
        batch=BATCH,
        about=compiler.About(built_from="test", rebuild="tessella compile test --target sm_90"),
        measuring=compiler.Measuring(budget_s=0.0),
    )
    path = made.save(tmp_path / "divided.plan")
    a, b = torch.tensor([[-(2**63), 7], [-7, 5]]), torch.tensor([[-1, 0], [2, -1]])
    with runtime.load_tried(path, folder=tmp_path / "cache") as engine:
        assert engine(a=a, b=b)["c"].tolist() == [[-(2**63), -(2**63)], [-3, -8]]
    assert len(list((tmp_path / "cache" / "tried").iterdir())) == 1


def test_a_graph_keeps_its_workspace_when_torch_compile_frees_all() -> None:
    """cuBLAS had one for the stream in an earlier graph, which has ended since."""
    device = torch.device("cuda")
    a, b = (
        torch.randn(64, 1 << 17, device=device).half(),
        torch.randn(1 << 17, 64, device=device).half(),
    )
    y = torch.empty(64, 64, device=device, dtype=torch.float16)

    def captured() -> tuple[OwnStream, torch.cuda.CUDAGraph]:
        own = OwnStream(device)
        torch.mm(a, b, out=y)
        with capturing(pool=torch.cuda.graph_pool_handle(), stream=own.stream) as graph:
            torch.mm(a, b, out=y)
        return own, graph

    before = captured()
    handle = before[0].stream.cuda_stream
    del before
    own, graph = captured()
    assert own.stream.cuda_stream == handle
    graph.replay()
    right = y.clone()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(y.float(), right.float(), rtol=2e-2, atol=1.0)
