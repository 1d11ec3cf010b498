"""Training in several processes: their communication, and their start by torchrun.

They are on one machine or on several (``machines``). Every process trains the same network on its
slice of each batch; DistributedDataParallel (or where passes are recorded, ``exchange``) averages
the gradients over NCCL, or over gloo where there is no GPU. Rank 0 writes the run. Batch
normalization takes the statistics of its own slice, and rank 0's running ones are kept.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

from tessella.core.errors import TessellaError, TrainError, UsageError
from tessella.core.events import Emit, EventLog, read_events, warning
from tessella.training.machines import Meeting, error_of, started
from tessella.training.sharding import is_cut, unsent
from tessella.training.stopping import never, stop_signals

ERROR_FILE = "error.json"
LOG_FILE = "workers.log"
VISIBLE = "CUDA_VISIBLE_DEVICES"
WHOLE_FIRST = 100  # steps with whole gradients, which change the most then
# The places in gloo and the phrases of NCCL with which torch's plain RuntimeErrors begin.
_LOST_SAID = re.compile(
    r"\bgloo/(transport|context|rendezvous)/|\[enforce fail at [^\]]*\bgloo/"
    r"|\bConnection (closed|reset) by peer\b|\bNCCL (error|communicator|operation)\b",
)
_POLL_S = 0.1
_LAST_WORDS = 20  # lines of the workers' log that an unexplained end is reported with


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the ``size`` that train together.

    ``asked`` tells whether this process, of several, was asked to stop; the others may not know.
    ``local_size`` of them are on this machine. ``bucket_bytes`` of gradients travel together, or
    where it is None as many as is usual for who exchanges them.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    local_size: int = 1
    asked: Callable[[], bool] = never
    bucket_bytes: int | None = None

    def wrap(self, module: nn.Module, *, compress: int = 0) -> nn.Module:
        """The module whose backward pass averages the gradients over all processes.

        Args:
            compress: as in ``Recipe``.
        """
        if self.size == 1:
            return module
        ids = [self.device.index] if self.device.type == "cuda" else None
        most = None if self.bucket_bytes is None else self.bucket_bytes / (1 << 20)
        made = nn.parallel.DistributedDataParallel(
            module, device_ids=ids, gradient_as_bucket_view=True, bucket_cap_mb=most
        )
        if compress:
            how = power_sgd.PowerSGDState(
                None, matrix_approximation_rank=compress, start_powerSGD_iter=WHOLE_FIRST
            )
            made.register_comm_hook(how, power_sgd.powerSGD_hook)
        return made

    def alone_for_now(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Within it a backward pass adds up this process's gradients, which are not averaged."""
        if isinstance(wrapped, nn.parallel.DistributedDataParallel):
            return wrapped.no_sync()
        return unsent(wrapped) if is_cut(wrapped) else nullcontext()

    def mean(self, values: Tensor) -> Tensor:
        """The mean of ``values`` over all processes."""
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    def exchange_s(self, nbytes: int) -> float:
        """Seconds that a sum of so many bytes over all processes takes where nothing else runs."""
        data, seconds = torch.zeros(max(1, nbytes // 4), device=self.device), 0.0
        for _ in range(2):  # the first one sets up what the second uses
            self._finish()
            began = time.perf_counter()
            dist.all_reduce(data)
            self._finish()
            seconds = time.perf_counter() - began
        return seconds

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def share_buffers(self, module: nn.Module) -> None:
        """Give every process rank 0's buffers (running statistics), which checkpoints hold."""
        if self.size > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, 0)

    def join_rows(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The sum of arrays in which each process has its own images' rows, and zeros elsewhere."""
        if self.size == 1:
            return rows
        joined = torch.from_numpy(rows).to(self.device)
        dist.all_reduce(joined)  # x + 0 = x: nothing is rounded
        return joined.cpu().numpy()


def alone() -> World:
    """The world of a single process, on the GPU where there is one."""
    return World(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@contextmanager
def joined(asked: Callable[[], bool] = never) -> Iterator[World]:
    """The world that torchrun's environment variables describe; ``asked`` is its ``World``'s."""
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    size = dist.get_world_size()
    try:
        yield World(device=device, rank=dist.get_rank(), size=size, local_size=beside, asked=asked)
        dist.barrier()
    finally:
        gc.collect()  # graphs that hold exchanges end before what these belong to
        dist.destroy_process_group()


# --- the parent's side ----------------------------------------------------------------------------


def check_devices(processes: int) -> None:
    """Raise ``UsageError`` where there are too few GPUs for one a process.

    Processes share a CPU where GPUs are hidden on purpose, by an empty ``CUDA_VISIBLE_DEVICES``.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if processes <= max(count, 1) or (not count and os.environ.get(VISIBLE) == ""):
        return
    fewer = f"use gpus={count}" if count else "leave gpus out to train on the CPU"
    if started() is not None:  # torchrun, which said how many there are, and not gpus
        fewer = f"start torchrun with --nproc-per-node {max(count, 1)}"
    fix = f"{fewer}, or set {VISIBLE} to more of them"
    if not count:
        fix = (
            f"{fewer}; where there should be a GPU, ask tessella doctor; "
            f"for {processes} processes that share the CPU set {VISIBLE}= (to nothing)"
        )
    raise UsageError(
        "there are too few GPUs for this recipe", seen=f"gpus={processes}, {count} here", fix=fix
    )


def launch(
    out: Path,
    processes: int,
    *,
    resumed: bool,
    meeting: Meeting | None = None,
    emit: Emit,
) -> None:
    """Train the run in ``out`` with torchrun, and pass its events on to ``emit``.

    The environment goes on to the workers as it is. They hold the read end of a pipe whose write
    end is here: when this process ends, however it ends, so do they. A byte in it asks the one that
    reads it to stop, and all stop behind the same step.

    Args:
        processes: on this machine.
        meeting: with the commands of the other machines, which do the same.

    Raises:
        TessellaError: a worker raised it, or ended without an error of its own, on any machine.
        KeyboardInterrupt: SIGINT or SIGTERM came (on any machine), and the workers have saved a
            checkpoint. Behind the second they end at once.
    """
    (out / ERROR_FILE).unlink(missing_ok=True)
    events, environment = out / "events.jsonl", dict(os.environ)
    with closing(EventLog(events)) as told:  # cuts the line that a killed worker did not finish
        offset = events.stat().st_size
        if not torch.cuda.is_available():
            cores = len(os.sched_getaffinity(0))
            environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
            if processes > 1:
                text = f"gpus={processes} with all GPUs hidden: processes share {cores} cores"
                told(warning(text))
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    torchrun += ["--standalone"] if meeting is None else meeting.torchrun
    worker = ["-m", "tessella.training.worker", str(out), "--began", str(time.time())]
    worker += ["--resumed"] if resumed else []
    with (out / LOG_FILE).open("ab") as log:
        process = subprocess.Popen(
            [*torchrun, *worker],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # Ctrl-C is heard here alone: torchrun would kill the workers
        )
    assert process.stdin is not None
    running, sent, ended = True, False, False
    try:
        with stop_signals() as asked:
            while running:
                running = process.poll() is None
                found, offset = read_events(events, offset)
                for event in found:
                    emit(event)
                    ended |= event.kind == "result"
                if meeting is not None and running:
                    meeting.look(found)
                if asked() and not sent and running:
                    sent = True
                    with suppress(BrokenPipeError):  # they are at their end already
                        os.write(process.stdin.fileno(), b"!")
                if running:
                    time.sleep(_POLL_S)
    finally:
        process.communicate()  # closes the pipe, and waits
    if process.returncode != 0:
        failure = failure_of(out, process.returncode)
        raise failure if meeting is None else meeting.fail(failure)
    if meeting is not None:
        stopped = meeting.ends(None if meeting.place.rank else not ended)
    else:
        stopped = sent and not ended
    if stopped:
        raise KeyboardInterrupt


def failure_of(out: Path, code: int) -> TessellaError:
    """The error of the first worker that failed in the run of a folder."""
    path = out / ERROR_FILE
    if path.exists():
        return error_of(json.loads(path.read_bytes()))
    lines = (out / LOG_FILE).read_text(errors="replace").splitlines()
    return TrainError(
        "a training process ended without saying why",
        seen=f"exit code {code}; last lines:\n" + "\n".join(lines[-_LAST_WORDS:]),
        fix="a process that was killed often means that the host's memory is full: use fewer "
        f"workers or a smaller batch, then resume. Its output is in {out / LOG_FILE}",
    )


def is_lost(error: Exception) -> bool:
    """Whether an error says that another process is gone, which has its own reason for that."""
    kinds = (dist.DistBackendError, dist.DistNetworkError)
    said = isinstance(error, RuntimeError) and _LOST_SAID.search(str(error)) is not None
    return said or isinstance(error, kinds)


def end_with_parent(heard: Callable[[], None] = lambda: None) -> None:
    """Exit when standard input closes, a pipe whose other end the parent process holds.

    ``heard`` is called for each byte that comes through it.
    """
    while os.read(0, 1):
        heard()
    os._exit(1)
