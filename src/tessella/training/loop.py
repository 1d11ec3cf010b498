"""Training makes a run of a recipe: ``train`` and, in each process, ``train_run``.

A step is a function of (recipe, step): its batch, its learning rate and its random numbers. So a
run that was killed goes on from its last checkpoint as if nothing had happened.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

from torch import Tensor

from tessella.artifacts.checkpoint import Position, save_checkpoint
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Recipe, Run, RunInfo, write_run
from tessella.core.errors import OutOfMemory, TessellaError, TrainError, first_line
from tessella.core.events import (
    Emit,
    Event,
    EventLog,
    metric,
    phase,
    progress,
    silent,
    warning,
)
from tessella.core.memory import free_bytes, host_bytes, is_out_of_memory
from tessella.core.task import CLASSIFICATION
from tessella.data.epochs import Epoch, endless
from tessella.data.filling import Fillers
from tessella.data.joining import settings_at
from tessella.data.loading import batches, steps_per_epoch
from tessella.nn import fp8
from tessella.search.compile_ahead import end_compilers
from tessella.tasks import of
from tessella.training.choosing import in_words, way_of
from tessella.training.diagnosis import diagnosis
from tessella.training.evaluate import measure, predict_split
from tessella.training.expected import expected_memory
from tessella.training.feed import Fed, decoding_told, loading_threads
from tessella.training.forecast import expected_epoch_s
from tessella.training.journal import Journal
from tessella.training.machines import LOST, Meeting, Place, place_of
from tessella.training.meter import Meter
from tessella.training.parallel import LOG_FILE, World, alone, is_lost, joined, launch
from tessella.training.precision import arithmetic
from tessella.training.prepare import begin, check, describe_run, validates
from tessella.training.quantizing import Quantizer, quantized, roundings
from tessella.training.schedule import Schedule
from tessella.training.sharing import shared
from tessella.training.sparsity import sparse_weights
from tessella.training.state import prune
from tessella.training.stopping import stop_signals
from tessella.training.trainer import Trainer
from tessella.training.ways import NAMES

MUCH_WAITING = 0.05  # of the time of all steps
LEAST_TOLD = 100  # steps of a training whose time is told before, which costs about one

Over = Callable[[Recipe], Recipe]  # a recipe with some settings in the place of its own


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    quantizer: Quantizer | None = None,
    races: bool = True,
    place: Place | None = None,
    over: Over | None = None,
    emit: Emit = silent,
) -> Run:
    """Train as ``recipe`` says, into the folder ``out``.

    Args:
        out: the run's folder, which must not hold a run yet, unless ``resume``.
        resume: go on from the newest complete checkpoint (from the start where there is none). On a
            CPU the loss curve is identical, bit for bit, to that of an uninterrupted training.
        quantizer: makes the network of a recipe with ``quantize``.
        races: on a GPU the ways of a step are chosen by times, remembered or, where that pays,
            those of a race at the start.
        place: this machine's, in a training on several.
        over: of a machine that resumes and does not have the run: the first one's recipe, with what
            is set here in its place. Then ``recipe`` is not trained.
        emit: called with every phase, metric and warning, which ``events.jsonl`` gets, too.

    Raises:
        UsageError, DataError: see ``prepare.begin``; or ``place`` is missing where the recipe is
            for several machines.
        TrainError: training diverged, or a process of it failed.
        OutOfMemory: with a batch size that fits.
        KeyboardInterrupt: SIGINT or SIGTERM came, behind a checkpoint of the step at hand (of
            several processes, of one in the next few). The second ends it at once.
    """
    if place is None:
        place_of(recipe.nodes, None, None)  # refuses several machines without their places
    elif place.rank:
        return _take_part(recipe, out, place, over, emit)
    run, resumed = begin(recipe, Path(out), resume=resume)
    if resume and not resumed:
        emit(phase("resume", f"from step 0: there is no run in {out} yet"))
    try:
        if place is not None:
            with closing(Meeting(place, emit, run.recipe)) as meeting:
                launch(run.path, recipe.gpus, resumed=resumed, meeting=meeting, emit=emit)
        elif recipe.processes > 1:
            launch(run.path, recipe.gpus, resumed=resumed, emit=emit)
        else:
            train_run(run, alone(), resumed=resumed, quantizer=quantizer, races=races, emit=emit)
    except TessellaError as error:
        _tell_failure(run, error, emit)
        raise
    except OSError as error:
        failure = TrainError(
            "a file of the run or of the dataset cannot be read or written",
            seen=error,
            fix="make room on the disk or mend the file, then resume",
        )
        _tell_failure(run, failure, emit)
        raise failure from error
    except Exception as error:  # a mistake in a user's network, say: logged, and raised as it is
        seen = f"{type(error).__name__}: {error}"
        _tell_failure(run, TrainError("training failed unexpectedly", seen=seen[:500]), emit)
        raise
    return run


def _take_part(recipe: Recipe, out: Path, place: Place, over: Over | None, emit: Emit) -> Run:
    """Train beside the first machine, which keeps the run's folder; nothing is written in ``out``.

    Returns:
        The run that is there: here it has its record alone, unless ``out`` is a common folder.
    """
    check(recipe)
    with closing(Meeting(place, emit)) as meeting, _folder_for_now() as folder:
        try:
            if over is not None:
                recipe = over(meeting.recipe())
                check(recipe)
            info = describe_run(recipe)
        except TessellaError as error:
            raise meeting.fail(error) from None
        write_run(folder, info)
        launch(folder, recipe.gpus, resumed=False, meeting=meeting, emit=emit)
    return Run(out, info=info)


@contextmanager
def _folder_for_now() -> Iterator[Path]:
    """A folder that is removed when its block ends. After an error the logs of processes stay in
    it, since the error may name them."""
    folder = Path(mkdtemp(prefix="tessella-"))
    failed = False
    try:
        yield folder
    except TessellaError:
        failed = True
        raise
    finally:
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif not (failed and path.name == LOG_FILE):
                path.unlink()
        with suppress(OSError):  # it holds what was said
            folder.rmdir()


def train_started(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    over: Over | None = None,
    emit: Emit = silent,
) -> Run:
    """``train`` in one of the processes that torchrun or another program has started.

    Rank 0 writes the run; the others return its record.
    """
    check(recipe)

    def own(first: Recipe) -> RunInfo:
        if over is None:
            return describe_run(recipe)
        check(taken := over(first))
        return describe_run(taken)

    with (
        stop_signals() as asked,
        joined(asked) as world,
        shared(world, own, out, lambda: begin(recipe, out, resume=resume)) as (run, resumed),
    ):
        try:
            train_run(run, world, resumed=resumed, emit=emit)
        except TessellaError as error:
            if world.rank == 0:
                _tell_failure(run, error, emit)
            raise
        except RuntimeError as error:
            if not is_lost(error):
                raise
            raise TrainError(
                LOST,
                seen=first_line(error),
                fix="read what the other processes said last, then resume",
            ) from error
        info = run.info
    return Run(out, info=info)


def _tell_failure(run: Run, error: TessellaError, emit: Emit) -> None:
    failed = Event(kind="error", text=str(error), values=error.to_json())
    with suppress(OSError):  # where the disk is full there is no log, but still the exception
        with closing(EventLog(run.path / "events.jsonl")) as log:
            log(failed)
    emit(failed)


def train_run(
    run: Run,
    world: World,
    *,
    resumed: bool,
    quantizer: Quantizer | None = None,
    races: bool = True,
    began: float | None = None,
    emit: Emit,
) -> None:
    """This process's part in the training of a run; rank 0 emits events and saves checkpoints.

    Args:
        began: when the processes were started, as ``time.time`` has it: what the first step took
            from then on is told.
    """
    dataset = Dataset(run.recipe.dataset)
    saved = run.checkpoints() if resumed else []
    start = saved[-1] if saved else None
    network = quantized(run.info, quantizer, start)
    with arithmetic(run.recipe.precision, deterministic=run.recipe.deterministic):
        steps = steps_per_epoch(len(dataset.train), run.recipe.batch_size)
        total = Schedule(recipe=run.recipe, steps_per_epoch=steps).total
        told = emit if world.rank == 0 else silent
        trainer = Trainer(
            run.info,
            dataset.train.info,
            world,
            start=start,
            network=network,
            way=way_of(run, dataset.train.info, world, total, races=races, emit=told),
        )
        journal = Journal(
            run.path,
            after_step=trainer.state.step if resumed else None,
            emit=emit,
            open=world.rank == 0,
        )
        with closing(journal):
            Training(run, dataset, trainer, world, journal, began).go()


class Training:
    """The training in one process: steps, and the validations and checkpoints between them."""

    def __init__(
        self, run: Run, dataset: Dataset, trainer: Trainer, world: World, journal: Journal,
        began: float | None,
    ) -> None:  # fmt: skip
        self._run, self._recipe, self._dataset = run, run.recipe, dataset
        self._trainer, self._world, self._journal = trainer, world, journal
        self._state = trainer.state
        self._task = of(run.info.task)
        self._numbers = trainer.numbers  # of the task's record: those of the last validation
        self._schedule = Schedule(
            recipe=run.recipe,
            steps_per_epoch=steps_per_epoch(len(dataset.train), run.recipe.batch_size),
        )
        self._exchange_s, self._began = 0.0, began
        self._meter = Meter(
            self._schedule, world, self._state, trainer.feed, journal,
            where=self._where_not_finite, skipped=lambda: trainer.mixed.in_a_row,
            gradient=trainer.gradient_not_finite,
        )  # fmt: skip
        self._workers = loading_threads(run.recipe.workers, world)
        self._fillers = Fillers(max(1, self._workers))
        self._validates = validates(dataset)
        self._measured: dict[str, float] = {}  # at this very step: what a checkpoint may claim

    def go(self) -> None:
        try:
            with closing(self._fillers):
                self._open()
                if not self._finished():
                    self._go_on()
                self._close()
        finally:
            end_compilers()  # of what a validation had captured

    def _go_on(self) -> None:
        """Step until the end; asked to stop, save first."""
        # several processes agree on the step with the losses that they share
        one = self._world.size == 1
        listening = stop_signals() if one else nullcontext(lambda: self._meter.asked)
        with (
            listening as asked,
            closing(self._batches()) as coming,
            closing(self._trainer.feed.stream(coming)) as stream,
        ):
            for fed in stream:
                self._step(fed)
                if self._finished():
                    break
                if asked():
                    self._snapshot()
                    raise KeyboardInterrupt

    def _step(self, fed: Fed) -> None:
        state, schedule = self._state, self._schedule
        done, rate = state.step, schedule.rate(state.step)
        measured = self._trainer.step(
            fed.images, fed.labels, done=done, rate=rate, momentum=schedule.momentum(done)
        )
        state.step += 1
        if self._began is not None:
            measured.tolist()  # waits for the step
            took = (
                f"{time.time() - self._began:.3g} s after {self._world.size} processes were started"
            )
            self._journal(phase("start", f"the first step ended {took}"))
            self._began = None
        self._measured = {}
        self._meter.add(state.step, rate, measured)
        improved = schedule.validates(state.step) and self._validate()
        # The best is saved whatever the interval: a checkpoint claims only what it measured itself.
        if schedule.snapshots(state.step) or improved or self._finished():
            self._snapshot()

    def _where_not_finite(self, step: int) -> str | None:
        """Where numbers of a step's images begin that are not finite, with the weights of now."""
        epoch, start = divmod(step - 1, self._schedule.steps_per_epoch)
        with closing(self._epoch(epoch, start)) as again:
            return self._trainer.where_not_finite(next(again))

    def _batches(self) -> Epoch:
        """This process's slices of the coming batches, epoch after epoch, without end."""
        count = self._schedule.steps_per_epoch
        epoch, start = divmod(self._state.step, count)
        return endless(self._epoch, epoch=epoch, start=start, count=count, early=self._workers > 0)

    def _epoch(self, epoch: int, start: int) -> Epoch:
        return batches(
            self._dataset.train,
            self._run.info.preprocess,
            batch_size=self._recipe.batch_size,
            seed=self._recipe.seed,
            epoch=epoch,
            start=start,
            rank=self._world.rank,
            world=self._world.size,
            augment=settings_at(self._recipe.augment, epoch=epoch, epochs=self._recipe.epochs),
            training=True,
            workers=self._workers,
            for_gpu=self._world.device.type == "cuda",
            decodes=self._trainer.feed.decodes,
            fillers=self._fillers,
        )

    def _validate(self) -> bool:
        """Measure the network, and return whether its score is the highest so far.

        The processes share the work, and all get the same numbers.
        """
        state, info, improved = self._state, self._run.info, False
        self._meter.flush()
        count = max(1, state.loss_count)
        values = {
            "train/loss": state.loss_sum / count,
            f"train/{self._task.loss.STEP_MEASURE}": state.accuracy_sum / count,
        }
        state.loss_sum, state.accuracy_sum, state.loss_count = 0.0, 0.0, 0
        if self._validates:
            self._world.share_buffers(self._trainer.evaluated)
            rows_NR = predict_split(
                self._trainer.predict,
                self._dataset.val,
                info.preprocess,
                len(info.labels),
                batch_size=self._recipe.batch_size,
                rank=self._world.rank,
                world=self._world.size,
                workers=self._workers,
                decodes=self._trainer.feed.decodes,
                fillers=self._fillers,
                emit=self._journal,
            )
            if self._recipe.shard:
                self._answer_as_often(len(self._dataset.val))
            result = measure(self._world.join_rows(rows_NR), self._dataset.val, info.labels)
            values |= {f"val/{name}": value for name, value in result.values.items()}
            improved = self._improves(values[info.task.metric])
            self._numbers = {**info.task.numbers, **result.numbers}
        self._measured = values
        self._journal(metric(state.step, self._schedule.epoch_at(state.step), **values))
        self._warn(values)
        self._meter.start_clock()
        return improved

    def _answer_as_often(self, images: int) -> None:
        """Answer a blank image where this process had no part of the last batch: blocks are
        gathered by all processes together."""
        part = self._recipe.batch_size // self._world.size
        in_last = images % self._recipe.batch_size or self._recipe.batch_size
        if in_last <= self._world.rank * part:
            self._trainer.answer_blank()

    def _warn(self, values: dict[str, float]) -> None:
        """Warn at the end where nothing was learned; earlier a network may just be slow."""
        if not self._finished() or self._task.name != CLASSIFICATION.name:
            return
        splits = self._dataset.info.splits
        note = diagnosis(
            self._recipe,
            values,
            train_counts=splits["train"].class_counts,
            val_counts=splits["val"].class_counts if self._validates else None,
        )
        if note is not None:
            self._journal(warning(note))

    def _improves(self, score: float) -> bool:
        state = self._state
        if state.best_accuracy is None or score > state.best_accuracy:
            state.best_accuracy, state.stale = score, 0
            return True
        state.stale += 1
        return False

    def _finished(self) -> bool:
        return self._state.step >= self._schedule.total or self._out_of_patience()

    def _out_of_patience(self) -> bool:
        patience = self._recipe.patience
        return patience is not None and self._state.stale >= patience

    def _snapshot(self) -> None:
        """Save a checkpoint, then remove the old ones: there is always a complete one."""
        self._meter.flush()
        first = self._world.rank == 0
        if first or self._recipe.shard:
            weights, tensors, values = self._trainer.packed()
        if first:
            self._journal.sync()
            path = self._save(weights, tensors, values)
            prune(self._run, keep_last=self._recipe.keep_last)
            self._journal(phase("snapshot", path.name))
        self._meter.start_clock()

    def _save(self, weights: dict[str, Tensor], tensors: dict[str, Tensor], values: bytes) -> Path:
        info, step = self._run.info, self._state.step
        return save_checkpoint(
            self._run.path / "checkpoints" / f"step-{step:08d}",
            network=info.network,
            preprocess=info.preprocess,
            labels=info.labels,
            weights=weights,
            metrics=self._measured,
            position=Position(step=step, epoch=self._schedule.epoch_at(step)),
            precision=self._recipe.precision,
            dataset_hash=info.dataset_hash,
            task=replace(info.task, numbers=self._numbers),
            state_tensors=tensors,
            state_values=values,
            quantized=roundings(self._trainer.evaluated),
        ).path

    def _open(self) -> None:
        """Emit the start of the training, and warnings that a person should see before it."""
        emit, recipe = self._journal, self._recipe
        way = self._trainer.way
        emit(phase("way", f"steps: {NAMES[way.way]} ({way.why})"))
        about = f"{self._memory()}{self._time()}"
        emit(phase("train", f"{recipe.network}, {self._schedule.total} steps{about}"))
        emit(progress("train", self._state.step, self._schedule.total))
        if self._world.device.type == "cuda" and way.way != "eager":
            emit(phase("compile", "the first step compiles kernels that this machine has not kept"))
        for told in decoding_told(self._trainer.feed.decodes, self._world.device):
            emit(told)
        if self._world.size > 1:
            learned = (p for p in self._trainer.module.parameters() if p.requires_grad)
            nbytes = sum(p.numel() * p.element_size() for p in learned)
            self._exchange_s = self._world.exchange_s(nbytes)
            took = (
                f"{nbytes / 1e6:.3g} MB of gradients a step, alone {1e3 * self._exchange_s:.3g} ms"
            )
            emit(phase("exchange", f"{self._world.size} processes exchange {took}"))
        if kept := self._trainer.kept:
            text = f"{len(kept)} weights start at random: they do not fit those of {recipe.init}"
            emit(Event(kind="warning", text=text, values=kept))
        if recipe.quantize != "none":
            emit(phase("quantize", f"{recipe.quantize}: the network rounds as its plan will"))
        if recipe.sparsity != "none":
            count = len(sparse_weights(self._trainer.module))
            emit(phase("sparsity", f"{recipe.sparsity} in the weights of {count} layers"))
        if recipe.batch_size > (images := len(self._dataset.train)):
            often = recipe.batch_size / images
            emit(
                warning(
                    f"a step of {recipe.batch_size} images shows each of the {images} that there "
                    f"are for training {often:.3g} times: --batch-size {images} shows it once"
                )
            )
        if not self._validates:
            emit(warning("the dataset has no validation split: no accuracy, no best checkpoint"))
        if recipe.precision == "fp16" and self._world.device.type == "cpu":
            emit(warning("fp16 on a CPU is emulated and slow: bf16 or fp32 train faster here"))
        if recipe.precision == "fp8":
            count = sum(isinstance(m, fp8.LAYERS) for m in self._trainer.module.modules())
            emit(phase("fp8", f"{count} layers multiply 8-bit numbers, all others bf16"))

    def _memory(self) -> str:
        """What a step will take, as far as shapes tell."""
        memory = expected_memory(self._run.info, self._trainer.optimizer)
        if memory is None or memory.total is None:
            return ""
        device, more = self._world.device, memory.total - memory.weights - memory.average
        where = "on the GPU"
        if device.type == "cpu":
            where, more = "in the host", more * self._world.local_size
            if more > (most := host_bytes()):  # the system would end this process, or another
                raise OutOfMemory(
                    f"a step of {self._recipe.batch_size} images does not fit in the host's memory",
                    seen=f"about {more / 1e9:.3g} GB, of {most / 1e9:.3g} in all",
                    fix="use a smaller batch size: batch_size='auto' takes what fits",
                )
        if more > (free := free_bytes(device)):
            self._journal(
                warning(
                    f"a step takes about {more / 1e9:.3g} GB more, and {free / 1e9:.3g} are free "
                    f"{where}: batch_size='auto' takes what fits, recompute less"
                )
            )
        return f" of about {memory.total / 1e6:.3g} MB"

    def _time(self) -> str:
        """What an epoch will take, where a training is long enough for somebody to read it."""
        left = self._schedule.total - self._state.step
        if left < LEAST_TOLD:
            return ""
        try:
            epoch_s = expected_epoch_s(self._trainer, self._run.info, self._dataset, self._world)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return ""  # the first step says what fits
        left_s = epoch_s * left / self._schedule.steps_per_epoch
        return f"; an epoch takes about {in_words(epoch_s)}, all that is left {in_words(left_s)}"

    def _close(self) -> None:
        state, total = self._state, self._schedule.total
        on_gpu = self._world.device.type == "cuda"  # a CPU that loads is not idle
        if (share := self._meter.data_wait) > MUCH_WAITING and on_gpu:
            self._journal(
                warning(
                    f"{share:.0%} of the time the steps waited for images: import them with"
                    " store='pixels', which needs no decoding, or give the training more workers"
                    f" ({self._workers} now)"
                )
            )
        if self._exchange_s and self._meter.step_s:
            share = self._exchange_s / self._meter.step_s
            text = f"gradients' exchange alone would take {share:.1%} of a step's"
            self._journal(phase("exchange", f"{text} {1e3 * self._meter.step_s:.3g} ms"))
        skipped = self._trainer.mixed.skipped
        if skipped is not None and (count := int(skipped)):
            scale = self._trainer.mixed.scaler.get_scale()
            text = f"{count} steps were skipped, whose gradients were infinite in fp16"
            self._journal(phase("precision", f"{text}; the loss's scale is {scale:g} now"))
        values: dict[str, float | bool] = {"steps": state.step, "early": state.step < total}
        if state.best_accuracy is not None:
            values[f"best_{self._run.info.task.score}"] = state.best_accuracy
        self._journal(progress("train", state.step, total))
        self._journal(Event(kind="result", name="train", values=values))
