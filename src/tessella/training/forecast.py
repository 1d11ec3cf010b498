"""Before a training: the memory that it will take, the time of an epoch, and a batch that fits.

Memory is computed from shapes alone, without computing a step. Time is measured: a few steps with
blank images, and a few images loaded.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace

import torch

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.defaults import batch_of_few
from tessella.artifacts.run import Recipe, RunInfo
from tessella.core.memory import free_bytes, room_for
from tessella.data.loading import batches, steps_per_epoch
from tessella.nn import zoo
from tessella.search.limits import Limits
from tessella.training.choosing import (
    MOST_RACE_S,
    RACED_ON,
    chosen_of,
    is_decided,
    recalled,
    remember,
)
from tessella.training.expected import Memory, memory_of
from tessella.training.feed import decodes_on_gpu, loading_threads, timed_event
from tessella.training.memory import largest_that_runs
from tessella.training.parallel import World, alone
from tessella.training.precision import arithmetic
from tessella.training.prepare import describe_run
from tessella.training.profiling import LayerTime
from tessella.training.quantizing import Quantizer, quantized
from tessella.training.race import Raced, race, step_times
from tessella.training.schedule import Schedule
from tessella.training.trainer import Trainer
from tessella.training.ways import Choice, Way, usual_way

WARM = 2  # steps
ANSWERS = 3  # of a network take the time of a step
ANSWERED = 4  # images, on a CPU, where a few take their share of many's time
LOADED = 128  # images
LOADED_S = 0.3  # on a GPU: the first batches wait for memory that the following ones find
HELD_BACK = 1 << 28  # cycles of a GPU: some 0.14 s
COPIED = 1 << 26  # bytes
MOST_BATCH = {"cpu": 64, "cuda": 512}  # of ``auto``: beyond, an image gains little
_RATES = {  # of limits; in fp8 at least a third of the products are of bf16
    "fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"
}  # fmt: skip
ROOM = 0.8  # of the free memory, on a CPU, whose other processes want some, too


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a training will be like.

    Attributes:
        recipe: with all defaults filled in.
        parameters, trained: numbers of all, and of those that are not frozen for good.
        stages: what ``freeze`` and ``layer_decay`` count.
        step_s, load_s: seconds of a step's computing, and of loading its images.
        exchange_bytes, exchange_s: of the gradients that processes exchange in a step, and what a
            ring of them takes at least where nothing else runs: most of it is beside the backward
            pass. None over a network, whose rate nobody knows before.
        epoch_s: of an epoch without its validation: computing and loading together, or where a GPU
            computes while threads load, the longer of both.
        free: bytes that the device has free.
        way, why: how a training's steps will run, and the reason.
        ways: every way of a step with its time, or the reason that it has none.
        layers: what each layer takes of a step that runs call by call.
    """

    recipe: Recipe
    device: str
    images: int
    steps_per_epoch: int
    steps: int
    parameters: int
    trained: int
    stages: int
    memory: Memory
    free: int
    step_s: float
    load_s: float
    exchange_bytes: int
    exchange_s: float | None
    epoch_s: float
    way: Way
    why: str
    ways: tuple[Raced, ...]
    layers: tuple[LayerTime, ...]

    def least_s(self, layer: LayerTime, machine: Limits) -> float:
        """What a layer's passes need at least on a machine."""
        rate = machine.flops_s[_RATES[self.recipe.precision]]
        return layer.least_s(rate, machine.copy_bytes_s)

    @property
    def data_wait(self) -> float:
        """The share of an epoch's time, 0 to 1, in which the device waits for images."""
        each = self.epoch_s / self.steps_per_epoch if self.steps_per_epoch else 0.0
        return max(0.0, each - self.step_s) / each if each else 0.0

    @property
    def total_s(self) -> float:
        return self.epoch_s * self.recipe.epochs


def forecast(
    recipe: Recipe, *, race_s: float | None = None, quantizer: Quantizer | None = None
) -> Forecast:
    """The forecast of a recipe on this machine, by a few steps of one of its processes.

    Args:
        race_s: seconds in which other ways of a step are tried, too, but for those whose time is
            remembered; None: five minutes at most on a GPU, where a training profits from what was
            measured, on a CPU none.
        quantizer: makes the network of a recipe with ``quantize``.

    Raises:
        OutOfMemory: a step does not fit; with a batch size that does.
    """
    info, dataset, world = describe_run(recipe), Dataset(recipe.dataset), alone()
    part = recipe.batch_size // recipe.processes
    network = quantized(info, quantizer)
    with arithmetic(recipe.precision, deterministic=recipe.deterministic):
        free = free_bytes(world.device)
        trainer = Trainer(info, dataset.train.info, world, network=network)
        memory = memory_of(trainer.module, trainer.optimizer, recipe, info)
        usual = usual_way(recipe, world.device)
        with room_for(part, world.device):
            timed = replace(step_times(trainer, part, world), way=usual.way)
        step_s = timed.step_s or 0.0
        layers = trainer.layers(max(1, part // recipe.accumulate))
        load_s = _time_loading(dataset, info, recipe, world) * part
    in_epoch = steps_per_epoch(len(dataset.train), recipe.batch_size)
    overlaps = world.device.type == "cuda"
    each = max(step_s, load_s) if overlaps else step_s + load_s
    sizes = [(p.numel(), p.requires_grad) for p in trainer.module.parameters()]
    stages = len(zoo.stages(trainer.module))
    sent = memory.gradients if recipe.processes > 1 else 0
    del trainer  # whose memory others want now
    total = Schedule(recipe=recipe, steps_per_epoch=in_epoch).total
    ways, choice = _timed_ways(info, dataset, world, timed, total, race_s)
    return Forecast(
        recipe=recipe,
        device=str(world.device),
        images=len(dataset.train),
        steps_per_epoch=in_epoch,
        steps=total,
        parameters=sum(count for count, _ in sizes),
        trained=sum(count for count, learns in sizes if learns),
        stages=stages,
        memory=memory,
        free=free,
        step_s=step_s,
        load_s=load_s,
        exchange_bytes=sent,
        exchange_s=_exchange_s(sent, recipe, world.device),
        epoch_s=each * in_epoch,
        way=choice.way,
        why=choice.why,
        ways=ways,
        layers=layers,
    )


def expected_epoch_s(trainer: Trainer, info: RunInfo, dataset: Dataset, world: World) -> float:
    """Seconds of an epoch without its validation, before a training begins, which stays as it is.

    A step's are those that a race has shown, or those of three answers: its backward pass takes
    twice as long as its forward pass. Steps that are fused take less.
    """
    recipe, on_gpu = info.recipe, world.device.type == "cuda"
    part = recipe.batch_size // world.size
    raced = recalled(info) if world.size == 1 else ()
    step_s = next((r.step_s for r in raced if r.way == trainer.way.way), None)
    if step_s is None:
        count = max(1, min(part // recipe.accumulate, part if on_gpu else ANSWERED))
        took = min(_answer_s(trainer, count, world) for _ in range(WARM))
        step_s = ANSWERS * took * part / count
    load_s = _time_loading(dataset, info, recipe, world) * part
    each = max(step_s, load_s) if on_gpu else step_s + load_s
    return each * steps_per_epoch(len(dataset.train), recipe.batch_size)


def _answer_s(trainer: Trainer, count: int, world: World) -> float:
    """Seconds of an answer; of a GPU's alone, as a recorded step does not wait for the host, who
    starts an answer's kernels one by one.
    """
    images = trainer.blank(count).images
    if world.device.type != "cuda":
        began = time.perf_counter()
        trainer.answer(images)
        return time.perf_counter() - began
    first, last = timed_event(), timed_event()
    torch.cuda._sleep(HELD_BACK)  # type: ignore[no-untyped-call]  # meanwhile they are started
    first.record()
    trainer.answer(images)
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def _exchange_s(nbytes: int, recipe: Recipe, device: torch.device) -> float | None:
    """Seconds in which each of a ring of processes sends the others' shares of a sum, twice."""
    count = recipe.processes
    if count == 1:
        return 0.0
    if recipe.nodes > 1:
        return None
    return 2 * (count - 1) / count * nbytes / _copied_a_second(device)


def _copied_a_second(device: torch.device) -> float:
    """Bytes that go from the device to the next GPU in a second; on a CPU, within its memory."""
    on_gpu, other = device.type == "cuda", device
    if on_gpu:  # where there is one alone, a training of several will not begin
        count = torch.cuda.device_count()
        other = torch.device("cuda", (torch.cuda.current_device() + 1) % count)
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    goal, seconds = torch.empty_like(source, device=other), float("inf")
    for _ in range(3):
        began = time.perf_counter()
        goal.copy_(source)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = min(seconds, time.perf_counter() - began)
    return COPIED / seconds


def _timed_ways(
    info: RunInfo, dataset: Dataset, world: World, timed: Raced, steps: int, race_s: float | None
) -> tuple[tuple[Raced, ...], Choice]:
    """All ways with their times, and which of them a training of so many steps takes."""
    races = world.device.type in RACED_ON
    if race_s is None:
        race_s = MOST_RACE_S if races else 0.0
    usual = usual_way(info.recipe, world.device)
    known = [timed, *(raced for raced in recalled(info) if raced.way != usual.way)]
    ways = race(info, dataset.train.info, world.device, budget_s=race_s, known=known)
    if info.recipe.processes > 1 or not races or is_decided(info):
        return ways, usual
    remember(info, ways)
    return ways, chosen_of(ways, usual, steps, said="measured")


def _time_loading(dataset: Dataset, info: RunInfo, recipe: Recipe, world: World) -> float:
    """Seconds for an image, when many are loaded at once."""
    split, workers = dataset.train, loading_threads(recipe.workers, world)
    size = min(recipe.batch_size // recipe.processes, len(split))
    stream = batches(
        split,
        info.preprocess,
        batch_size=size,
        augment=recipe.augment,
        training=True,
        workers=workers,
        for_gpu=world.device.type == "cuda",
        decodes=decodes_on_gpu(recipe, info.preprocess, world.device),
    )
    next(stream)  # opens the shards, and decodes a small split at once
    least_s = LOADED_S if world.device.type == "cuda" else 0.0
    began, loaded = time.perf_counter(), 0
    for batch in stream:
        loaded += len(batch.indices)
        if loaded >= LOADED and time.perf_counter() - began >= least_s:
            break
    return (time.perf_counter() - began) / loaded if loaded else 0.0


def fitting_batch(recipe: Recipe, *, quantizer: Quantizer | None = None) -> int:
    """The largest batch size whose parts are a power of two and fit in the memory.

    On a GPU steps are tried, on a CPU memory is computed. A small set gets batches of which an
    epoch has some.

    Args:
        recipe: with any batch size.
        quantizer: makes the network of a recipe with ``quantize``.
    """
    world, dataset = alone(), Dataset(recipe.dataset)
    unit = recipe.processes * recipe.accumulate
    largest = min(MOST_BATCH[world.device.type], batch_of_few(len(dataset.train) // unit))
    network = quantized(describe_run(recipe), quantizer)

    def tried(part: int) -> None:
        one = replace(recipe, batch_size=part * unit)
        info = describe_run(one)
        trainer = Trainer(info, dataset.train.info, world, network=copy.deepcopy(network))
        if world.device.type == "cuda":
            for _ in range(WARM):  # the second has the solver's state beside the values kept
                trainer.try_step(part * recipe.accumulate)
            return
        total = memory_of(trainer.module, trainer.optimizer, one, info).total
        if total is not None and total > ROOM * free_bytes(world.device):
            raise MemoryError(f"{total:,} bytes")

    with arithmetic(recipe.precision, deterministic=recipe.deterministic):
        return unit * (largest_that_runs(tried, 2 * largest) or 1)
