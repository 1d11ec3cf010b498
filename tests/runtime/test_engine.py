"""The engine: right answers for any batch and caller, in memory of their own; bad plans refused."""

from __future__ import annotations

import resource
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tessella import runtime
from tessella.artifacts.plan import Plan, load_plan
from tessella.core.errors import ArtifactError, CorruptArtifact, InputError, UsageError, WrongDevice
from tessella.core.spec import DimRange, TensorSpec
from tessella.device.x86 import code
from tessella.execution.bucket import BoundBucket
from tessella.graph import capture
from tessella.runtime import engine as engine_module
from tessella.runtime.binders import Binders
from tessella.runtime.engine import Engine
from tessella.runtime.settled import Settled
from tessella.search import find as search
from tessella.search import timing
from tests.support.networks import build, captured, graph_of, network, plan

LENET = network("lenet")[0]


@pytest.fixture(scope="module")
def lenet() -> Plan:
    return plan(captured("lenet"), (1, 2, 8))


@pytest.fixture(scope="module")
def engine(lenet: Plan) -> Engine:
    return runtime.load(lenet)


def eager(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return LENET(x)


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 1, 28, 28, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9, 21])
def test_any_batch_size(engine: Engine, count: int) -> None:
    made = engine(image=images(count))["scores"]
    torch.testing.assert_close(made, eager(images(count)), rtol=1e-4, atol=1e-5)


def test_numpy_in_numpy_out(engine: Engine) -> None:
    x = images(3)
    scores = engine(image=x.numpy())["scores"]
    assert isinstance(scores, np.ndarray)
    assert torch.equal(torch.from_numpy(scores), engine(x)["scores"])
    frozen = x.numpy().copy()
    frozen.flags.writeable = False
    assert np.array_equal(engine(frozen)["scores"], scores)
    strided = np.ascontiguousarray(x.numpy()[:, :, ::-1])[:, :, ::-1]  # negative strides
    assert np.array_equal(engine(strided)["scores"], scores)


@pytest.mark.parametrize("threads", [1, 3])
def test_arrays_that_come_again_find_their_call_ready(
    lenet: Plan, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with runtime.load(lenet) as engine:
        earlier: list[tuple[np.ndarray, torch.Tensor]] = []
        for number in range(3):
            for count in (8, 1, 3, 2):
                x = images(count) * number
                for array in (x.numpy(), x.numpy()[:, :, ::-1][:, :, ::-1], np.asfortranarray(x)):
                    made = engine(image=array)["scores"]
                    asked = engine(nn.Parameter(x, requires_grad=False))["scores"]  # as usual
                    earlier += [(made, asked), (engine(x)["scores"].numpy(), asked)]
        for made, right in earlier:  # none was written over by a later call
            assert np.array_equal(made, right.numpy())
        for bad in (np.zeros((1, 1, 28, 28)), np.zeros((1, 1, 28, 28), ">f4"), np.zeros((1, 28))):
            with pytest.raises((InputError, ValueError, TypeError)):
                engine(bad)
    with pytest.raises(UsageError, match="closed"):
        engine(images(1).numpy())


def test_a_ready_call_takes_arrays_in_place_of_all_inputs_alone() -> None:
    class Two(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return a + b, a - b

    engine = _two_inputs(Two())
    a, b = np.ones((3, 4), np.float32), np.full((3, 4), 2, np.float32)
    for _ in range(3):
        for one, other in ((a, b), (a, torch.from_numpy(b)), (torch.from_numpy(a), b)):
            made = engine(one, other)
            assert np.array_equal(np.asarray(made["sum"]), a + b)
            assert np.array_equal(np.asarray(made["difference"]), a - b)
        with pytest.raises(InputError, match="different batch sizes"):
            engine(a, b[:2])


def test_strides_and_gradients_of_the_caller_do_not_matter(engine: Engine) -> None:
    x = images(4)
    right = engine(x)["scores"]
    turned = x.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(engine(turned)["scores"], right)
    for _ in range(3):  # a sign that is only noted
        assert torch.equal(engine(torch._neg_view(-x))["scores"], right)
    made = engine(x.clone().requires_grad_())["scores"]
    assert torch.equal(made, right)
    assert not made.is_inference()
    (made * torch.ones(10, requires_grad=True)).sum().backward()  # usable in training


def test_answers_stay_when_the_engine_goes_on(engine: Engine) -> None:
    first = engine(images(2))["scores"]
    kept = first.clone()
    for count in (2, 1, 8, 5):
        engine(images(count) * 3)
    assert torch.equal(first, kept)


def test_an_output_that_is_a_view_of_the_input_is_copied() -> None:
    spec = TensorSpec(name="image", dtype="float32", shape=(1, 2, 3))
    flat = runtime.load(build(nn.Flatten(), spec))
    x = torch.randn(2, 2, 3)
    made = flat(x)["scores"]
    x.zero_()
    assert made.abs().sum() > 0


def test_several_inputs_and_outputs() -> None:
    class Two(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return a + b, a - b

    from_graph = _two_inputs(Two())
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    made = from_graph(a, b=b)
    assert list(made) == ["sum", "difference"]
    assert torch.equal(made["sum"], a + b)
    assert torch.equal(made["difference"], a - b)
    with pytest.raises(InputError, match="different batch sizes"):
        from_graph(a, b[:2])


def _two_inputs(module: nn.Module) -> Engine:
    span = DimRange(min=1, opt=2, max=4)
    specs = [TensorSpec(name=n, dtype="float32", shape=(span, 4)) for n in "ab"]
    return runtime.load(plan(capture(module, specs, outputs=("sum", "difference")), (1, 2, 4)))


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({}, "the inputs are not the plan's"),
        ({"picture": images(1)}, "the inputs are not the plan's"),
        ({"image": images(1), "more": images(1)}, "the inputs are not the plan's"),
        ({"image": images(1)[:, :, :27]}, "wrong shape"),
        ({"image": images(1)[0]}, "wrong shape"),
        ({"image": images(1)[:0]}, "wrong shape"),
        ({"image": images(1).double()}, "wrong element type"),
        ({"image": images(1).numpy().astype(">f4")}, "wrong element type"),
        ({"image": images(1).to_sparse()}, "no numbers that lie"),
        ({"image": images(1).to("meta")}, "no numbers that lie"),
        ({"image": [[1.0]]}, "neither a NumPy array nor a torch tensor"),
    ],
)
def test_wrong_inputs(engine: Engine, arguments: dict[str, object], wrong: str) -> None:
    with pytest.raises(InputError, match=wrong):
        engine(**arguments)


def test_values_that_the_network_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index beyond its table is the caller's mistake, and the next call has its answer.

    It is found before any step runs, as on a GPU the step that reads the table would end the
    process's context.
    """

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Embedding(20, 4), nn.Embedding(10, 4)

        def forward(self, ids: torch.Tensor, shifted: torch.Tensor) -> torch.Tensor:
            flat: torch.Tensor = self.small(ids.reshape(-1)).reshape(-1, 3, 4)
            return flat + self.large(ids) + self.large(shifted + 5)

    torch.manual_seed(0)
    network = Sums()
    rows = DimRange(min=1, opt=2, max=2)
    specs = [TensorSpec(name=n, dtype="int64", shape=(rows, 3)) for n in ("ids", "shifted")]
    right = {"ids": torch.tensor([[0, 9, 3]]), "shifted": torch.tensor([[0, 14, -5]])}
    made = runtime.load(
        plan(capture(network, specs, outputs=("vectors",)), (1, 2, 2), samples=right)
    )
    assert made._rows == {"ids": 10}  # what is read of the other, only the step knows
    with monkeypatch.context() as patch:
        patch.setattr(made, "_run_bucket", lambda *_: pytest.fail("it ran"))
        for wrong in (10, -1, 2**62):
            with pytest.raises(InputError, match="a value that the network cannot take"):
                made(**right | {"ids": torch.tensor([[0, wrong, 3]])})
    with pytest.raises(InputError, match="a value that the network cannot take"):
        made(**right | {"shifted": torch.tensor([[0, 15, 3]])})
    assert torch.equal(made(**right)["vectors"], network(**right))


def test_a_ready_call_asks_torch_where_a_step_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that makes a new tensor each time, and refuses some values."""
    # without times each batch runs in its own size: of so short ones a measured time may say that
    # one sample is faster beside another, and such a call is not settled
    monkeypatch.setattr(engine_module, "costs_us", lambda plan: {1: None, 2: None})

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 4)

        def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = self.table(ids + 5)
            return self.head(rows).flip(1), rows

    torch.manual_seed(0)
    network = Shifted().eval()
    spec = TensorSpec(name="ids", dtype="int64", shape=(DimRange(min=1, opt=2, max=2), 3))
    given = {"ids": torch.tensor([[0, 9, 3]])}
    outputs = ("turned", "rows")
    made = runtime.load(plan(capture(network, [spec], outputs=outputs), (1, 2, 2), samples=given))
    earlier = []
    for number in range(5):
        ids = np.full((1 + number % 2, 3), number)
        if number == 3:
            with pytest.raises(InputError, match="a value that the network cannot take"):
                made(np.full((1, 3), 15))
        right = dict(zip(outputs, network(torch.from_numpy(ids)), strict=True))
        earlier.append((made(ids), right))
    assert isinstance(made._settled[((1, 3), np.dtype(np.int64)),], Settled)
    for found, right in earlier:  # none was written over by a later call
        for name in outputs:
            wanted = right[name].detach().numpy()
            np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6)


def test_threads_get_their_own_answers(engine: Engine) -> None:
    inputs = [images(1 + i) for i in range(6)]
    right = [engine(x)["scores"] for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        answers = [engine(inputs[index])["scores"] for _ in range(25)]
        wrong.extend(index for answer in answers if not torch.equal(answer, right[index]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_closed_engine_says_so(lenet: Plan) -> None:
    with runtime.load(lenet) as engine:
        engine(images(1))
    with pytest.raises(UsageError, match="closed"):
        engine(images(1))


# --- loading --------------------------------------------------------------------------------------


def test_saved_and_loaded_answers_bit_for_bit(lenet: Plan, engine: Engine, tmp_path: Path) -> None:
    loaded = runtime.load(lenet.save(tmp_path / "lenet.plan"))
    for count in (1, 3, 8):
        assert torch.equal(loaded(images(count))["scores"], engine(images(count))["scores"])
    assert loaded.inputs == lenet.manifest.inputs
    assert loaded.outputs[0].name == "scores"
    assert loaded.labels == ()
    assert loaded.preprocess is None


def test_a_grey_image_cut_from_nhwc_bytes_is_read_as_any_other(engine: Engine) -> None:
    plain = images(2)
    assert plain.shape[1] == 1
    _, _, height, width = plain.shape
    cut = plain.as_strided(plain.shape, (height * width, 1, width, 1))  # the same bytes
    assert cut.is_contiguous()
    assert cut.stride() != plain.stride()
    assert torch.equal(engine(cut)["scores"], engine(plain)["scores"])
    (read,) = (engine._tensor(spec, cut) for spec in engine.inputs)
    assert read.stride() == plain.stride()
    assert read.data_ptr() == cut.data_ptr()


def test_loading_measures_and_compiles_nothing(
    lenet: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("loading must not do this")

    for place, name in (
        (timing, "measure"),
        (search, "time_interleaved"),
        (search, "find"),
        (torch, "compile"),
    ):
        monkeypatch.setattr(place, name, forbidden)
    runtime.load(lenet.save(tmp_path / "lenet.plan"))(images(3))


def test_another_device_is_refused_with_the_command_that_rebuilds(lenet: Plan) -> None:
    there = replace(lenet.manifest.fingerprint, arch="aarch64-neon")
    with pytest.raises(WrongDevice, match="tessella compile a-test"):
        runtime.load(replace(lenet, manifest=replace(lenet.manifest, fingerprint=there)))
    there = replace(there, target="sm_89", arch="sm_89", name="NVIDIA L4")
    manifest = replace(lenet.manifest, fingerprint=there, rebuild="tessella compile a -o b")
    with pytest.raises(WrongDevice, match=r"built for sm_89 \(NVIDIA L4.*tessella compile a -o b"):
        runtime.load(replace(lenet, manifest=manifest))


def test_a_processor_without_a_steps_instructions_is_refused_with_the_command_that_rebuilds(
    lenet: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its vectors are as wide as those of the one that the plan was built on."""
    first, *others = lenet.program.buckets
    conv = next(i for i, step in enumerate(first.steps) if step.op == "conv2d")
    steps = list(first.steps)
    steps[conv] = replace(steps[conv], kernel="conv2d.amx_int8")
    buckets = (*others, replace(first, steps=tuple(steps)))
    made = replace(lenet, program=replace(lenet.program, buckets=buckets))
    monkeypatch.setattr(code, "may_use", lambda _: False)
    told = r"conv2d.amx_int8: .*rebuild it here: tessella compile a-test.*tessella tune PLAN"
    with pytest.raises(WrongDevice, match=told):
        runtime.load(made)


def test_a_changed_byte_of_the_weights_is_found(lenet: Plan, tmp_path: Path) -> None:
    path = lenet.save(tmp_path / "lenet.plan")
    content = bytearray(path.read_bytes())
    weight = lenet.weights["ip1.weight"].numpy().tobytes()[:64]
    content[content.index(weight)] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptArtifact, match="changed"):
        runtime.load(path)


def test_changed_weights_fail_the_self_test(lenet: Plan, tmp_path: Path) -> None:
    """Honest hashes around wrong weights: only running the plan can tell."""
    name = next(n for n in lenet.weights if n.endswith("ip2.weight"))
    weights = {**lenet.weights, name: lenet.weights[name] * 1.01}
    path = replace(lenet, weights=weights).save(tmp_path / "wrong.plan")
    assert load_plan(path).manifest.members
    with pytest.raises(ArtifactError, match="fails its self-test"):
        runtime.load(path)
    runtime.load(path, self_test=False)


def test_a_plan_of_large_batches_stores_few_samples(tmp_path: Path) -> None:
    """Three, repeated when it is tested: 128 images of a ResNet-50 would be larger than it is."""
    large = plan(captured("lenet"), (8, 8, 8))
    assert {len(t) for t in large.golden.values()} == {3}
    runtime.load(large)
    one = {name: t.clone() for name, t in large.golden.items()}
    (answer,) = (t for name, t in one.items() if name.startswith("output."))
    answer[1, 0] += 1
    with pytest.raises(ArtifactError, match="fails its self-test"):
        runtime.load(replace(large, golden=one).save(tmp_path / "wrong.plan"))


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"kernel": "conv2d.magic"}, "cannot be bound"),
        ({"kernel": "relu.aten"}, "cannot run step"),
        ({"kernel": "conv2d.cudnn"}, "cannot run step"),
        ({"attrs": {}}, "cannot be bound"),
    ],
)
def test_a_program_that_cannot_run_is_refused(
    lenet: Plan, change: dict[str, object], wrong: str
) -> None:
    bucket = lenet.program.buckets[0]
    steps = (replace(bucket.steps[0], **change), *bucket.steps[1:])
    program = replace(lenet.program, buckets=(replace(bucket, steps=steps),))
    with pytest.raises(ArtifactError, match=wrong):
        runtime.load(replace(lenet, program=program))


def test_a_batch_size_gets_ready_when_it_is_first_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What its steps may not do is asked then; who serves asks all sizes at once."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.Tanh(), nn.Linear(16, 3)).eval()
    spec = TensorSpec(name="image", dtype="float32", shape=(1, 1, 28, 28))
    made = plan(graph_of(module, spec, DimRange(min=1, opt=2, max=8)), (1, 2, 8))
    made = replace(made, tuning=())  # so a batch runs in the smallest program that holds it
    bound: list[int] = []
    made_ready = Binders.bound

    def seen(self: Binders, batch: int) -> object:
        bound.append(batch)
        return made_ready(self, batch)

    monkeypatch.setattr(Binders, "bound", seen)

    def is_right(engine: Engine, count: int) -> None:
        with torch.inference_mode():
            right = module(images(count))
        torch.testing.assert_close(engine(images(count))["scores"], right, rtol=1e-4, atol=1e-5)

    with runtime.load(made) as engine:
        assert bound == [1]  # the self-test's
        for count in (8, 8, 3):
            is_right(engine, count)
        assert bound == [1, 8, 4]
        engine.warm_up()
        assert bound == [1, 8, 4, 2]
    with pytest.raises(UsageError, match="closed"):
        engine.bound(1)
    bound.clear()
    runtime.load(made, every_size=True).close()
    assert sorted(bound) == [1, 2, 4, 8]
    *others, last = made.program.buckets
    steps = tuple(replace(step, kernel="linear.magic") for step in last.steps)
    program = replace(made.program, buckets=(*others, replace(last, steps=steps)))
    lying = replace(made, program=program)
    engine = runtime.load(lying)
    for _ in range(2):
        with pytest.raises(ArtifactError, match="cannot be bound"):
            engine(images(8))
    is_right(engine, 1)
    with pytest.raises(ArtifactError, match="cannot be bound"):
        runtime.load(lying, every_size=True)


def test_threads_that_ask_first_for_one_size_get_one_program(
    lenet: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, bound, made = runtime.load(lenet), Binders.bound, []

    def slow(binders: Binders, batch: int) -> BoundBucket:
        made.append(batch)
        time.sleep(0.05)  # the others come meanwhile
        return bound(binders, batch)

    monkeypatch.setattr(Binders, "bound", slow)
    start = threading.Barrier(4)

    def program(_: int) -> object:
        start.wait()
        return engine.bound(8)

    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(program, range(4))
    assert all(one is first for one in others)
    assert made == [8]
    torch.testing.assert_close(engine(images(8))["scores"], eager(images(8)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_a_program_is_bound_as_if_torch_had_its_own_defaults(
    lenet: Plan, kind: torch.dtype
) -> None:
    """Its first call may come from code that makes its tensors of another type or elsewhere."""
    engine, x = runtime.load(lenet), images(8)
    right = eager(x)
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(kind)
        with torch.device("meta"):
            engine.bound(8)
        made = engine(x)["scores"]
    finally:
        torch.set_default_dtype(usual)
    torch.testing.assert_close(made, right, rtol=1e-4, atol=1e-5)


def test_lenet_is_no_slower_than_eager(engine: Engine) -> None:
    x = images(1)
    times: dict[str, list[float]] = {"eager": [], "engine": []}
    for _ in range(150):
        for name, run in (("eager", eager), ("engine", engine)):
            start = time.perf_counter()
            run(x)
            times[name].append(time.perf_counter() - start)
    eager_s, engine_s = (statistics.median(t[20:]) for t in times.values())
    assert engine_s <= eager_s


def test_one_channel_in_the_strides_of_another_format(engine: Engine) -> None:
    """A grey image cut from NHWC pixels is contiguous, with strides that suggest channels_last."""
    x = images(3)
    nhwc = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert nhwc.is_contiguous()
    assert torch.equal(engine(nhwc)["scores"], engine(x)["scores"])
    assert np.array_equal(engine(nhwc.numpy())["scores"], engine(x.numpy())["scores"])


def test_one_channel_in_the_middle_of_a_network() -> None:
    torch.manual_seed(0)
    narrow = nn.Sequential(
        nn.Conv2d(3, 1, 3), nn.ReLU(), nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.Flatten(1)
    )
    made = runtime.load(
        build(narrow, TensorSpec(name="image", dtype="float32", shape=(1, 3, 9, 9)))
    )
    x = torch.randn(2, 3, 9, 9)
    with torch.inference_mode():
        torch.testing.assert_close(made(x)["scores"], narrow(x), rtol=1e-4, atol=1e-5)


# --- memory and threads ---------------------------------------------------------------------------


def test_a_run_takes_no_new_pages_from_the_system() -> None:
    """Results of 17 and 34 MB are made and let go in every run."""
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1),
                        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())  # fmt: skip
    large = runtime.load(
        build(net, TensorSpec(name="image", dtype="float32", shape=(1, 3, 512, 512)))
    )
    x = torch.randn(1, 3, 512, 512)
    counts: list[int] = []

    def work() -> None:
        for _ in range(2):
            large(x)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(4):
            large(x)
        counts.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 4)

    work()
    thread = threading.Thread(target=work)  # a server's: its memory comes from another heap
    thread.start()
    thread.join()
    assert max(counts) < 3000  # of 12,000 pages


def test_batch_sizes_share_their_weights() -> None:
    """A layer's are 16 MB: six copies for six sizes would be 96."""
    added_kb = []
    spec = TensorSpec(name="x", dtype="float32", shape=(1, 2048))
    for batch in (1, 1, 1), (1, 8, 32):
        sizes = DimRange(min=1, opt=batch[1], max=batch[2])
        graph = graph_of(nn.Linear(2048, 2048), spec, sizes)
        made = plan(graph, batch, untuned=True)
        before_kb = anonymous_kb()
        large = runtime.load(made, every_size=True)
        added_kb.append(anonymous_kb() - before_kb)
    assert len(large.buckets) == 6
    # one more form than of one image is for a kernel of larger batches
    assert added_kb[1] - added_kb[0] < 2.5 * 4 * 2048**2 / 1024


def anonymous_kb() -> int:
    """This process's own memory, but for files."""
    told = Path("/proc/self/smaps_rollup").read_text().split("Anonymous:")[1]
    return int(told.split()[0])


def test_engines_side_by_side_in_threads() -> None:
    """Two plans, each in threads of its own, while a third is loaded again and again."""
    plans = [plan(captured("lenet"), (1, 2, 4), precision=p) for p in ("fp32", "bf16")]
    engines = [runtime.load(p) for p in plans]
    inputs = [images(1 + i) for i in range(3)]
    right = [[engine(x)["scores"] for x in inputs] for engine in engines]
    wrong: list[tuple[int, int]] = []

    def work(which: int, index: int) -> None:
        made = [engines[which](inputs[index])["scores"] for _ in range(15)]
        wrong.extend((which, index) for m in made if not torch.equal(m, right[which][index]))

    threads = [threading.Thread(target=work, args=(e, i)) for e in range(2) for i in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        with runtime.load(plans[0]) as spare:
            assert torch.equal(spare(inputs[0])["scores"], right[0][0])
    for thread in threads:
        thread.join()
    assert wrong == []
