"""The tables of docs/benchmarks.md and of the README, from the JSON files in ``results``.

    python -m benchmarks.tables            # print docs/benchmarks.md
    python -m benchmarks.tables --write    # write it, and the README's rows

No number is typed: a test compares both files with what this module makes of the JSON files.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import older_tables, rounding, serving_tables
from benchmarks.report import markdown
from benchmarks.runs import (
    Key,
    Row,
    Run,
    key_of,
    lost_and_gained,
    ms_of,
    optional,
    origin_of,
    origins_of,
    peers_of,
    runs_of,
)
from tessella.core.count import counted

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- results: python -m benchmarks.tables --write -->", "<!-- end of results -->"

H200, EPYC, XEON = "H200", "EPYC, 2 cores, AVX-512", "Xeon, 2 cores, AMX"
SHARED = "EPYC, 1 busy core, AVX-512"
NARROW = "EPYC, 1 busy core, AVX2"
# One file of plans a machine: its name, the machine's, and what a reader has to know.
PLANS = (
    ("engine-sm_90.json", H200, "An NVIDIA H200. Eager PyTorch is replayed from a CUDA graph,"
     " which is the fastest that it can be; torch.compile runs with `max-autotune`. No open peer"
     " convolves in 8 bits: beside int8 and fp8 stands eager in float16."),
    ("engine-sm_90-h100.json", "H100", "An NVIDIA H100, whose memory is slower (3.4 TB/s for 4.8):"
     " times are longer than an H200's. torch.compile was not run."),
    ("engine-cpu.json", EPYC, "Two cores of an AMD EPYC with AVX-512 and its bfloat16 products. On"
     " a processor with AVX2 alone our own code has vectors half as wide, and these ratios"
     " do not hold."),
    ("engine-cpu-openvino.json", EPYC, "The same machine with OpenVINO beside the plan, in a run of"
     " its own: the threads of several runtimes in one process slow each other down."),
    ("engine-cpu-avx2.json", NARROW, "One thread of an AMD EPYC (Zen 3) that has AVX2 and neither"
     " AVX-512 nor VNNI. Other work shared its two cores, so that times are high and uneven; ratios"
     " are interleaved. In int8 the peers run a file that ONNX Runtime has quantized with the same"
     " images: weights of 7 bits with a scale a channel, as ours are there. These networks have"
     " random weights, so that *error* stands for accuracy; of a trained one it is compared in"
     " `tests/compiler/test_int8_accuracy.py`."),
    ("engine-cpu-recurrent.json", SHARED, "Two recurrent layers over 100 frames of 80 numbers, from"
     " torch and from the ONNX file of the same module; one thread of an EPYC with AVX-512 that"
     " others computed on, so that times are high and uneven; ratios are interleaved."),
    ("engine-cpu-amx.json", XEON, "Two cores of an Intel Xeon with AMX (bfloat16 products of"
     " tiles)."),
)  # fmt: skip
# One file of single kernels a processor.
CPU_KERNELS = (
    ("kernels-cpu.json", EPYC),
    ("kernels-cpu-avx2.json", "EPYC, 1 core, told to use AVX2 alone"),
)
# The README's rows: machine, network, precision, batch. Where we lose belongs there too.
CHOSEN = (
    (H200, "resnet50", "fp16", 128),
    (H200, "googlenet", "fp16", 128),
    (H200, "bert_large", "fp16", 32),
    (EPYC, "resnet50", "fp32", 1),
    (EPYC, "resnet50", "bf16", 8),
    (XEON, "resnet50", "bf16", 8),
)

INTRODUCTION = """\
# Benchmarks

This page is written by `python -m benchmarks.tables --write` from the JSON files in
`benchmarks/results`; a test fails where the two differ. Each file holds the command, the date, the
machine, the versions and every reading.

A *ratio* is the time of the fastest peer over ours: above 1 ours is faster, below 1 the peer is.
Whole networks are measured from call to answer, with random weights and random input, all runtimes
interleaved in one process; times are medians. *Set-up* is the time to build the plan, *load* the
time to load it in a new process. *Error* is the largest difference from the float32 network over
its largest value. What the numbers taught, the failures too, is in [the log](log.md).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if not parser.parse_args().write:
        print(page(), end="")
        return
    PAGE.write_text(page())
    README.write_text(with_results(README.read_text()))


def page() -> str:
    """The text of docs/benchmarks.md."""
    parts = [INTRODUCTION, "## Whole networks\n"]
    for name, machine, about in PLANS:
        parts += [f"### {machine}: `{name}`\n", f"{about}\n", *_plans(runs_of(name))]
    parts += [*older_tables.beside_before(), *older_tables.plans()]
    parts += ["## Single kernels\n", *_own_cpu_kernels(), *_own_gpu_kernels()]
    parts += [*older_tables.kernels(), *_published()]
    parts += [
        *_training(),
        *_blocks(),
        *_steps(),
        *_changes(),
        *_scattered(),
        *_detection(),
        *_evaluating(),
        *rounding.tables(),
        *_boxes_and_masks(),
        *_volumes(),
        *serving_tables.all_of_them(),
        *_coverage(),
        *_catalog(),
    ]
    return "\n".join(parts)


def with_results(readme: str) -> str:
    """The README with the chosen rows between its two marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{results()}\n{END}{after}"


def results() -> str:
    """The README's table."""
    head = ("machine", "network", "precision", "batch", "plan", "peers", "ratio")
    return markdown(head, [_chosen(*selection) for selection in CHOSEN])


def _chosen(machine: str, network: str, precision: str, batch: int) -> tuple[object, ...]:
    name = next(name for name, short, _ in PLANS if short == machine)
    key = (network, precision, batch)
    states = [row for run in runs_of(name) for row in run["rows"] if key_of(row) == key]
    row = max(states, key=lambda row: len(row["times"]))  # the newest with the most peers
    return machine, *key, ms_of(row, "plan"), peers_of(row), f"{row['ratio']:.2f}"


# --- whole networks -------------------------------------------------------------------------------


def _plans(runs: Sequence[Run]) -> Iterator[str]:
    """A table of the newest states, one of earlier states, and where each row comes from."""
    newest: dict[Key, Sequence[object]] = {}
    earlier: list[Sequence[object]] = []
    for number, run in enumerate(runs, 1):
        for row in run["rows"]:
            line = _plan_line(row, number)
            if newest.setdefault(key_of(row), line) is not line:
                earlier.append(line)
    head = (
        "network", "precision", "batch", "plan", "samples/s", "peers", "ratio", "set-up", "load",
        "steps", "error", "run",
    )  # fmt: skip
    yield markdown(head, [newest[key] for key in sorted(newest)]) + "\n"
    if earlier:
        yield "Earlier states, kept because another peer stood beside them:\n"
        yield markdown(head, earlier) + "\n"
    yield from origins_of(runs)


def _plan_line(row: Row, run: int) -> tuple[object, ...]:
    rate = row.get("samples_per_s") or round(row["batch"] / row["times"]["plan"]["median_ms"] * 1e3)
    return (
        *key_of(row), ms_of(row, "plan"), f"{rate:,}", peers_of(row), f"{row['ratio']:.2f}",
        optional(row.get("setup_s"), "{} s"), optional(row.get("load_s"), "{} s"),
        optional(row.get("steps"), "{}"), optional(row.get("output_error"), "{:.1e}"), run,
    )  # fmt: skip


# --- single kernels -------------------------------------------------------------------------------


def _own_cpu_kernels() -> Iterator[str]:
    for name, machine in CPU_KERNELS:
        (run,) = runs_of(name)
        yield f"### {machine}: `{name}`\n"
        yield (
            "The layers of ResNet-50 and GoogLeNet with bias, ReLU and, where they expand, a"
            " residual; MobileNetV3's and ConvNeXt's depthwise convolutions, products of ViT, BERT"
            " and ConvNeXt, DenseNet's norms; caches warm. The fastest kernel of ours beside the"
            " fastest of oneDNN, MKL and torch.\n"
        )
        yield markdown(_FAMILY[:-1], [_family(*found)[:-1] for found in _families(run)]) + "\n"
        yield f"1. {origin_of(run)}\n"


def _own_gpu_kernels() -> Iterator[str]:
    runs = runs_of("kernels-sm_90.json")
    yield f"### {H200}: `kernels-sm_90.json`\n"
    yield (
        "Caches cold, except `gemm M <= 64`, which is timed in a chain of layers. cuDNN searches"
        " too (`cudnn.benchmark`). Each reading holds about 2.3 µs of the clock's own, on both"
        " sides. The ratio is that to the fastest rival of the family; others of the column"
        " *beside* ran in the same run. *Refused* counts shapes that no kernel of ours takes.\n"
    )
    lines = [
        (*_family(name, rows), number)
        for number, run in enumerate(runs, 1)
        for name, rows in _families(run)
        if not name.startswith(_PUBLISHED)
    ]
    yield markdown((*_FAMILY, "run"), lines) + "\n"
    yield from origins_of(runs)


_FAMILY = ("family", "shapes", "ratio (geometric mean)", "worst", "best", "refused", "beside")
_PUBLISHED = "conv FP32"


def _families(run: Run) -> Iterator[tuple[str, list[Row]]]:
    for name in dict.fromkeys(row["family"] for row in run["rows"]):
        yield name, [row for row in run["rows"] if row["family"] == name]


def _family(name: str, rows: Sequence[Row]) -> tuple[object, ...]:
    ratios = [row["ratio"] for row in rows if row.get("ratio")]
    peers = dict.fromkeys(peer for row in rows for peer in row.get("times_us", {}))
    beside = ", ".join(peer for peer in peers if peer != "ours")
    numbers = ["–"] * 3
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        numbers = [f"{value:.2f}" for value in (mean, min(ratios), max(ratios))]
    return name, len(ratios), *numbers, len(rows) - len(ratios), beside


def _published() -> Iterator[str]:
    """Each algorithm by name, beside its published time."""
    yield f"### {H200}: float32 convolution by eight algorithms\n"
    yield (
        "True float32, one image of 128 channels and 128×128 pixels to 128 channels, each algorithm"
        " at its best, beside the published times of cuDNN's algorithms on a Quadro GV100, which is"
        " an older GPU: the two columns compare algorithms, not libraries.\n"
    )
    lines: list[tuple[object, ...]] = []
    for row in (row for run in runs_of("kernels-sm_90.json") for row in run["rows"]):
        if not row["family"].startswith(_PUBLISHED):
            continue
        for found in (a for a in row["algorithms"] if a["time_us"]):
            published = optional(found.get("published_ms"), "{} ms")
            lines.append(
                (row["name"], found["kernel"], f"{found['time_us'] / 1e3:.3f} ms", published)
            )
        peer = f"{row['times_us']['cudnn'] / 1e3:.3f} ms"
        lines.append((row["name"], "cuDNN's fastest, same H200", peer, ""))
    yield markdown(("filter", "algorithm", "time", "published, GV100"), lines) + "\n"


# --- a detector -----------------------------------------------------------------------------------


def _training() -> Iterator[str]:
    """Images a second of steps and of what feeds them, beside plain loops of torch."""
    yield "## Training a ResNet-50: `train-sm_90.json`\n"
    yield (
        "Batches of 256 pictures of 224×224, made from JPEG files of 500×375 with 16 cores. *Step*:"
        " one batch that stays on the GPU; *torch* is a plain loop (channels last, autocast, fused"
        " optimizer), *torch.compile* the same loop with it in its default mode (`max-autotune`"
        " took more than five minutes to compile). *Loading* and *training* read a dataset of"
        " pixels, of PNG files, or of the JPEG files as they are, which the GPU decodes.\n"
    )
    runs = runs_of("train-sm_90.json")
    lines = [
        (row["what"], row["who"], f"{row['images_per_s']:,.0f}", number)
        for number, run in enumerate(runs, 1)
        for row in run["rows"]
    ]
    yield markdown(("what", "who", "images/s", "run"), lines) + "\n"
    yield from origins_of(runs)


def _blocks() -> Iterator[str]:
    """ResNet-50's blocks forward and backward, beside torch's."""
    yield "## ResNet-50's blocks, forward and backward: `blocks-sm_90.json`\n"
    yield (
        "The four stages, each by itself between tensors of 256 pictures of 224×224 (channels last,"
        " autocast), and their sum. All run as CUDA graphs of one process, interleaved: torch call"
        " by call, torch.compile in its default mode, and ours, as a training calls it: *fused N*"
        " takes 1×1 convolutions of at most N channels together with the norm behind them.\n"
    )
    runs = runs_of("blocks-sm_90.json")
    lines = [
        (row["what"], row["who"], f"{row['ms']:.2f} ms", f"{row['share of the best peer']:.3f}",
         number)
        for number, run in enumerate(runs, 1)
        for row in run["rows"]
    ]  # fmt: skip
    head = ("what", "who", "forward and backward", "ratio to the best peer", "run")
    yield markdown(head, lines) + "\n"
    yield from origins_of(runs)


def _steps() -> Iterator[str]:
    """Steps of other networks beside plain loops of torch and torch.compile."""
    yield "## Steps of other networks: `steps-sm_90.json`\n"
    yield (
        "Forward, loss, backward and a fused AdamW on one batch that stays on the GPU, all"
        " interleaved in one process. *torch* and *torch.compile* (its default mode) as above;"
        " *fused* and *compile* are ways that a training takes; *fp8* behind one: in 8 bits. Rows"
        " are pictures of 224×224 (RetinaNet: of 800×800, beside torchvision's own network and"
        " loss), or 512 tokens of BERT-large and 1,024 of GPT-2, with attention by torch's fastest."
        " The peak is 989 TFLOPS; a step's operations are six for each weight and token, and those"
        " of attention.\n"
    )
    runs = runs_of("steps-sm_90.json")
    lines = [
        (row["what"], row["who"], f"{row['ms']:.2f} ms", f"{row['rate']:,.0f}",
         f"{row['share of the best peer']:.3f}",
         f"{row['share of the peak']:.1%}" if "share of the peak" in row else "", number)
        for number, run in enumerate(runs, 1)
        for row in run["rows"]
    ]  # fmt: skip
    head = ("what", "who", "step", "rows/s", "ratio to the best peer", "of the peak", "run")
    yield markdown(head, lines) + "\n"
    yield from origins_of(runs)


def _changes() -> Iterator[str]:
    """Random changes of pictures on the GPU, beside torchvision's."""
    yield "## Random changes on the GPU: `changes-sm_90.json`\n"
    yield (
        "256 pictures of 500×375, uint8 on the GPU, to normalized ones of 224×224. torchvision's"
        " transforms draw once a call: one for each picture is what a training wants.\n"
    )
    for number, run in enumerate(runs_of("changes-sm_90.json"), 1):
        lines = [(row["what"], row["who"], f"{row['ms']:.2f} ms") for row in run["rows"]]
        yield markdown(("what", "who", "a batch"), lines) + "\n"
        yield f"{number}. {origin_of(run)}\n"


def _scattered() -> Iterator[str]:
    """Boxes and masks of digits on textures: what was learned in how many minutes."""
    yield "## Digits scattered on textures: `scattered-sm_90.json`, `scattered-cpu.json`\n"
    yield "Pictures of 96²; the digits that validation has are in no picture for training.\n"
    runs = [*runs_of("scattered-sm_90.json"), *runs_of("scattered-cpu.json")]
    for number, run in enumerate(runs, 1):
        yield markdown(*scattered(run["rows"])) + "\n"
        yield f"{number}. {origin_of(run)}\n"


def scattered(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[Sequence[object]]]:
    """A line a task: what was learned, how long it took, and the scores, those of plans too."""
    names = {"detection": ("map50", "map"), "segmentation": ("miou", "dice")}

    def scores(row: Row) -> str:
        of = {"": row} | {f"{kind} plan ": plan for kind, plan in row.get("plans", {}).items()}
        told = (", ".join(f"{n} {s[n]:.3f}" for n in names[row["task"]]) for s in of.values())
        return "; ".join(kind + one for kind, one in zip(of, told, strict=True))

    lines: list[Sequence[object]] = [
        (r["task"], r["network"], r["pictures"], r["epochs"], r["minutes"], scores(r)) for r in rows
    ]
    return ("task", "network", "pictures", "epochs", "minutes", "scores"), lines


def _detection() -> Iterator[str]:
    """What a training reached, and the latency from pixels to boxes."""
    yield "## A detector from pixels to boxes: `detection-cpu.json`\n"
    for number, run in enumerate(runs_of("detection-cpu.json"), 1):
        (trained,) = (row for row in run["rows"] if row["what"] == "training")
        threads = counted(run["torch_threads"], "thread")
        yield (
            f"CenterNet on digits scattered on {trained['pictures']} textures of"
            f" {trained['size']}²:"
            f" mAP@50 {trained['map50']:.2f}, mAP {trained['map']:.2f} after {trained['epochs']}"
            f" epochs and {trained['minutes']:.1f} minutes on {threads}. One picture, what follows"
            " the network included: 100 boxes, each a peak of the map of centres.\n"
        )
        rows = [row for row in run["rows"] if row["what"] == "latency"]
        yield markdown(*detectors(rows)) + "\n"
        yield f"{number}. {origin_of(run)}\n"


def detectors(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[Sequence[object]]]:
    """A line a precision: the plan and its peers, the fastest first."""
    lines: list[Sequence[object]] = [
        (row["precision"], ms_of(row, "plan"), peers_of(row), f"{row['ratio']:.2f}", row["steps"],
         f"{row['box_error']:.1e}")
        for row in rows
    ]  # fmt: skip
    return ("precision", "plan", "peers", "ratio", "steps", "error"), lines


def _evaluating() -> Iterator[str]:
    """How long COCO's averages of boxes and of masks take, beside a peer."""
    yield "## Measures of boxes and masks: `evaluating-cpu.json`\n"
    yield (
        "Pictures of 480 × 640 with 7.3 things on the mean, of 80 classes, and 100 told things"
        " each; the averages are equal to 1e-9. Seconds of one processor, the median of three"
        " calls; ours of masks measure the boxes, too.\n"
    )
    for number, run in enumerate(runs_of("evaluating-cpu.json"), 1):
        yield markdown(list(run["rows"][0]), [list(row.values()) for row in run["rows"]]) + "\n"
        yield f"{number}. {origin_of(run)}\n"


def _boxes_and_masks() -> Iterator[str]:
    """Networks that answer boxes and scores of pixels, beside eager PyTorch and torch.compile."""
    yield "## Boxes and masks: `masks-sm_90.json`, `masks-cpu.json`\n"
    yield (
        "From float32 pictures on the device to float32 answers there, what follows the network"
        " included; weights that nobody trained, 80 classes of boxes, 20 of pixels. On a GPU both"
        " peers are replayed from a CUDA graph.\n"
    )
    lines, origins = [], []
    runs = (*runs_of("masks-sm_90.json"), *runs_of("masks-cpu.json"))
    for number, run in enumerate(runs, 1):
        lines += [
            (row["network"], f"{row['size']}²", row["precision"], row["batch"], ms_of(row, "plan"),
             peers_of(row), f"{row['ratio']:.2f}", row["steps"],
             f"{row['error'] / row['largest']:.1e}", number)
            for row in run["rows"]
        ]  # fmt: skip
        origins.append(f"{number}. {origin_of(run)}\n")
    head = (
        "network", "pictures", "precision", "batch", "plan", "peers", "ratio", "steps", "error",
        "run",
    )  # fmt: skip
    yield markdown(head, lines) + "\n"
    yield from origins
    yield "With weights that learned digits (`learned-detectors-sm_90.json`), 512 pictures judge:\n"
    for run in runs_of("learned-detectors-sm_90.json"):
        yield markdown(*lost_and_gained(run["rows"])) + "\n"
        yield f"{origin_of(run)}\n"


def _volumes() -> Iterator[str]:
    """Steps and plans of a 3-D U-Net, beside PyTorch and torch.compile."""
    yield "## Volumes: `volumes-sm_90.json`, `volumes-cpu.json`\n"
    yield (
        "A 3-D U-Net of five levels, 32 channels in the first where nothing else is said, on crops"
        " that stay on the device: steps of training, forward, loss, backward and AdamW, and"
        " plans.\n"
    )
    runs = [*runs_of("volumes-sm_90.json"), *runs_of("volumes-cpu.json")]
    lines = [
        (row["part"], row["what"], row["who"], f"{row['ms']:.2f} ms",
         optional(row.get("crops/s"), "{}"), f"{row['share of the best peer']:.3f}", number)
        for number, run in enumerate(runs, 1)
        for row in run["rows"]
    ]  # fmt: skip
    head = ("part", "what", "who", "time", "crops/s", "ratio to the best peer", "run")
    yield markdown(head, lines) + "\n"
    for number, run in enumerate(runs, 1):
        yield f"{number}. {origin_of(run)}\n"


# --- what compiles, and what the catalog keeps ----------------------------------------------------


def _coverage() -> Iterator[str]:
    (run,) = runs_of("coverage-cpu.json")
    rows = run["rows"]
    yield "## Networks that compile: `coverage-cpu.json`\n"
    yield (
        "Each network is captured, compiled for the CPU and compared with eager PyTorch. *Fallback*"
        " counts networks with a step that runs torch's own operator.\n"
    )
    lines = []
    for library in dict.fromkeys(row["source"].partition(",")[0] for row in rows):
        mine = [row for row in rows if row["source"].partition(",")[0] == library]
        agree, fallback = (sum(map(bool, (r[k] for r in mine))) for k in ("agrees", "fallbacks"))
        lines.append((library, len(mine), agree, fallback, f"{max(r['error'] for r in mine):.1e}"))
    head = ("library", "networks", "agree", "fallback", "largest error")
    yield markdown(head, lines) + "\n"
    yield f"1. {origin_of(run)}\n"


def _catalog() -> Iterator[str]:
    yield "## Which kernels are worth trying on an H200\n"
    yield (
        "`behind-sm_90.json` (`python -m benchmarks.behind`): how many times slower than the"
        " fastest each kernel was, over all problems where both were timed. One that was never near"
        " is only tried where its algorithm is asked for by name.\n"
    )
    (behind,) = runs_of("behind-sm_90.json")
    lines = [(r["kernel"], r["problems"], r["at best"], r["median"]) for r in behind["rows"]]
    yield markdown(("kernel", "problems", "at best", "median"), lines) + "\n"
    (beside,) = runs_of("beside-conv2d.cudnn_graph-sm_90.json")
    ratios = [row["ratio"] for row in beside["rows"]]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    yield (
        "`beside-conv2d.cudnn_graph-sm_90.json`: our convolutions beside cuDNN's graphs with the"
        f" same epilogue, {len(ratios)} layers of one build: {mean:.2f} in the geometric mean,"
        f" {min(ratios):.2f} to {max(ratios):.2f}.\n"
    )


if __name__ == "__main__":
    main()
