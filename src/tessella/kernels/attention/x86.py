"""Attention on a CPU with AVX-512 or AVX2: a thread takes one head after another, whose keys and
values it packs once; of some queries at a time the scores never leave the first cache.

Keys are packed in panels of channels by keys, values in panels of keys by channels, so that both
products read them in order: where heads lie side by side in a row of 9 kB, as behind one product
for queries, keys and values, their rows would fall on four sets of the first cache. The result of
all heads of a row lies together, as the layer behind reads it.

Source: the softmax of a few rows at a time, as Dao et al., "FlashAttention" (2022), without their
running maximum: a CPU's cache holds the scores of whole rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tessella.core.errors import KernelError
from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX2, AVX512, Assembler, At, InstructionSet
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.x86 import Constants, exponential
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

ROWS, VECTORS = {AVX512: 12, AVX2: 6}, 2  # queries and vectors of a tile: its sums
WORD = 4
UNROLLED = 4  # keys that are multiplied with their values in a round of the loop
MOST_PART_BYTES = 2**21  # for a thread
MOST_CHANNELS = 256
MOST_THREADS = 64
CACHE_LINE = 64
# e to it is nothing beside 1, and what values are multiplied with it no subnormal number: slow
LOWEST = -60.0
HIDDEN = -3e38  # of a mask, for minus infinity, of which a difference would be no number

AHEAD = 8  # rows: what is read of other layers' results is asked for so long before


def fits(problem: Problem) -> str | None:
    query, key, value = (problem[name] for name in ("query", "key", "value"))
    a = problem.attrs
    mask = problem.get("attn_mask")
    if a["is_causal"] or a["enable_gqa"]:
        return "all queries see the same keys, and each head has its own"
    if mask is not None and (
        mask.dtype not in ("bool", "float32")
        or mask.shape not in {(n, 1, 1, key.shape[2]) for n in (1, key.shape[0])}
    ):
        return "a mask of keys, for each image or all"
    if problem.constants:
        return "takes no constants"
    if {t.dtype for t in (query, key, value, problem.output)} != {"float32"}:
        return "float32 throughout"
    if problem.output.format != "strided":
        return "its result's heads lie side by side in each row"
    if any(len(t.shape) != 4 for t in (query, key, value)):
        return "[images, heads, rows, channels]"
    if not query.shape[:2] == key.shape[:2] == value.shape[:2]:
        return "nothing is broadcast"
    if 0 in query.shape or 0 in value.shape:
        return "nothing to make"
    width = VECTORS * code.require_instructions().lanes
    for channels in (query.shape[3], value.shape[3]):
        if channels % width or channels > MOST_CHANNELS:
            return f"a multiple of {width} channels a head, up to {MOST_CHANNELS}"
    if _Head.of(problem).part_bytes > MOST_PART_BYTES:
        return f"keys and values of a head in {MOST_PART_BYTES} bytes"
    return None


def workspace_bytes(problem: Problem) -> int:
    return _threads(problem) * _Head.of(problem).part_bytes + CACHE_LINE


def _threads(problem: Problem) -> int:
    """How many threads have a part of the workspace."""
    return min(MOST_THREADS, math.prod(problem["query"].shape[:2]))


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    problem.require_constants(constants)
    head, most = _Head.of(problem), _threads(problem)
    made = _machine_code(head)
    needed, metas = workspace_bytes(problem), problem.inputs
    images, heads, queries, _ = problem["query"].shape
    shape = (images, queries, heads, problem["value"].shape[3])
    known: dict[tuple[tuple[int, ...], ...], code.Table] = {}  # by the strides

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        workspace: torch.Tensor,
    ) -> torch.Tensor:
        if workspace.nbytes < needed:
            raise KernelError(
                "the workspace is too small",
                seen=f"{workspace.nbytes} bytes",
                fix=f"{needed} bytes",
            )
        # a permuted view is seldom, and copied: what a search tried lay in rows
        query, key, value = (
            t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)
        )
        rows = (query, key, value)
        require_rows(rows, mask, metas)
        strides = tuple(t.stride() for t in rows)
        table = known.get(strides)
        if table is None:
            known.clear()  # they are the same at each call of a plan
            numbers = items(rows, mask)
            require_inside(numbers, rows, mask)
            table = known[strides] = code.Table(numbers)
        result = torch.empty(shape, dtype=torch.float32, device="cpu")
        added = result if mask is None else rows_of_mask(mask, head.panels)
        made.run(
            table, *(t.data_ptr() for t in rows), *(s[2] * WORD for s in strides),
            result.data_ptr(), workspace.data_ptr() + -workspace.data_ptr() % CACHE_LINE, 0,
            added.data_ptr(), threads=min(most, torch.get_num_threads()),
        )  # fmt: skip
        return result.transpose(1, 2)

    return attend


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys, values


def require_rows(rows: Rows, mask: torch.Tensor | None, metas: Sequence[TensorMeta | None]) -> None:
    """Refuse tensors that are not what the code was written for."""
    given = (*rows, mask)
    for tensor, meta in zip(given, (*metas, None)[: len(given)], strict=True):
        if tensor is None or meta is None:
            is_right = tensor is None and meta is None
        else:
            is_right = tensor.dtype == getattr(torch, meta.dtype) and tensor.shape == meta.shape
            # of a mask a copy is read
            is_right &= tensor.device.type == "cpu" and (tensor is mask or tensor.stride(-1) == 1)
        if not is_right:
            seen = "no mask" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise KernelError(
                "attention in machine code needs rows whose channels lie together",
                seen=seen if tensor is None else f"{seen} strides {tensor.stride()}",
                fix=f"give {meta}",
            )


def items(rows: Rows, mask: torch.Tensor | None) -> npt.NDArray[np.int64]:
    """A row for each head: distances in bytes of its queries, keys, values and results, and of
    the row of the mask.
    """
    query, _, value = rows
    images, heads, queries, _ = query.shape
    image, head = np.arange(images)[:, None], np.arange(heads)[None]
    table = np.zeros((images, heads, len(ITEM)), np.int64)
    for number, tensor in enumerate(rows):
        table[..., number] = (image * tensor.stride(0) + head * tensor.stride(1)) * WORD
    table[..., 3] = (image * queries * heads + head) * value.shape[3] * WORD
    if mask is not None and len(mask) > 1:
        table[..., 4] = image * mask_bytes(mask)
    return table.reshape(-1, len(ITEM))


def mask_bytes(mask: torch.Tensor) -> int:
    """Of a row of ``rows_of_mask``."""
    isa = code.require_instructions()
    panels = math.ceil(mask.shape[3] / (VECTORS * isa.lanes))
    return (panels * VECTORS + 1) * isa.vector_bytes


def rows_of_mask(mask: torch.Tensor, panels: int) -> torch.Tensor:
    """What is added to the scores of each image's keys, in whole panels, and behind it a vector of
    ones, or of zeros where no key is seen: then the result is 0, as torch's.
    """
    # the last panel is filled up with its last key, which must not count where it is hidden
    lanes = code.require_instructions().lanes
    shape = (len(mask), (panels * VECTORS + 1) * lanes)
    rows = torch.full(shape, HIDDEN, dtype=torch.float32, device="cpu")
    of_keys, seen = rows[:, : mask.shape[3]], mask[:, 0, 0]
    if mask.dtype == torch.bool:
        of_keys.zero_().masked_fill_(~seen, HIDDEN)
    else:
        torch.clamp(seen, min=HIDDEN, out=of_keys)
        seen = seen != -torch.inf
    rows[:, -lanes:] = seen.any(1, keepdim=True)
    return rows


def require_inside(table: npt.NDArray[np.int64], rows: Rows, mask: torch.Tensor | None) -> None:
    """Refuse a table that leads out of a tensor, whoever wrote it."""
    query, _, value = rows
    *begins, results, masks = torch.from_numpy(table).T
    for name, begin, tensor in zip(("queries", "keys", "values"), begins, rows, strict=True):
        span = ((tensor.shape[2] - 1) * tensor.stride(2) + tensor.shape[3]) * WORD
        behind = tensor.untyped_storage().nbytes() - tensor.storage_offset() * WORD
        code.require_inside(name, begin, torch.full_like(begin, span), int(behind))
    images, heads, queries, _ = query.shape
    pixel = value.shape[3] * WORD
    span, written = ((queries - 1) * heads + 1) * pixel, images * queries * heads * pixel
    code.require_inside("result", results, torch.full_like(results, span), written)
    if mask is not None:
        row = mask_bytes(mask)
        code.require_inside("mask", masks, torch.full_like(masks, row), len(mask) * row)


ITEM = range(0, 5 * code.NUMBER, code.NUMBER)
OF_QUERIES, OF_KEYS, OF_VALUES, OF_RESULT, OF_MASK = ITEM
(QUERIES, KEYS_AT, VALUES, QUERY_STEP, KEY_STEP, VALUE_STEP, RESULT, PART, TAKEN, MASK) = map(
    code.given, range(10)
)


@functools.lru_cache(64)
def _machine_code(head: _Head) -> code.MachineCode:
    constants = Constants(head.isa)
    return code.MachineCode(head.written(constants).code(), constants)


@dataclass(frozen=True, kw_only=True)
class _Head:
    """Machine code for a head of ``queries`` rows and ``keys``.

    Attributes:
        channels: of queries and keys; ``width``: of values.
        pitch: bytes from a row of the result to the next.
        scale: of the scores.
        is_masked: something is added to them.
    """

    isa: InstructionSet
    queries: int
    keys: int
    channels: int
    width: int
    pitch: int
    scale: float
    is_masked: bool

    @classmethod
    def of(cls, problem: Problem) -> _Head:
        _, heads, queries, channels = problem["query"].shape
        keys, width = problem["value"].shape[2:]
        scale = problem.attrs["scale"]
        return cls(
            isa=code.require_instructions(),
            queries=queries,
            keys=keys,
            channels=channels,
            width=width,
            pitch=heads * width * WORD,
            scale=channels**-0.5 if scale is None else float(scale),
            is_masked=problem.get("attn_mask") is not None,
        )

    @property
    def vector(self) -> int:
        """Bytes of a register."""
        return self.isa.vector_bytes

    @property
    def rows(self) -> int:
        """Queries of a tile: its sums are the first vectors, and two for a panel's row follow."""
        return ROWS[self.isa]

    @property
    def panel(self) -> int:
        """Numbers of a row of a panel, ``panel_bytes`` long."""
        return VECTORS * self.isa.lanes

    @property
    def panel_bytes(self) -> int:
        return VECTORS * self.vector

    @property
    def panels(self) -> int:
        """Of keys; the last one is filled up with the last key again, whose scores become 0."""
        return math.ceil(self.keys / self.panel)

    @property
    def rounds(self) -> int:
        """Of the loop over the keys and their values, those behind the last of which are 0."""
        return math.ceil(self.keys / UNROLLED)

    # what lies in a thread's part, one behind the other
    @property
    def _values(self) -> int:
        return self.panels * self.channels * self.panel_bytes

    @property
    def _value_panel(self) -> int:
        return self.rounds * UNROLLED * self.panel_bytes

    @property
    def _queries(self) -> int:
        return self._values + self.width // self.panel * self._value_panel

    @property
    def _scores(self) -> int:
        return self._queries + self.rows * self.channels * WORD

    @property
    def _row(self) -> int:
        """Bytes of a row of scores."""
        return self.panels * self.panel_bytes

    @property
    def _factors(self) -> int:
        return self._scores + self.rows * self._row

    @property
    def part_bytes(self) -> int:
        return -(-(self._factors + self.rows * self.vector) // CACHE_LINE) * CACHE_LINE

    def written(self, constants: Constants) -> Assembler:
        """The code.

        rdi: the call; r15: the item; r13: the thread's part; rax: the constants; r12, r14: the
        queries and the step between them; rbp: where their results go.
        """
        a = Assembler(self.isa)
        with a.function():
            code.take_part(a, "r13", PART, TAKEN, self.part_bytes)
            with code.each_item(a, "r15", len(ITEM)):
                self._head(a, constants)
        return a

    def _head(self, a: Assembler, constants: Constants) -> None:
        constants.begin(a)
        self._pack_keys(a)
        self._pack_values(a)
        self._row_of(a, "r12", QUERIES, OF_QUERIES)
        a.load("r14", QUERY_STEP)
        self._row_of(a, "rbp", RESULT, OF_RESULT)
        whole, rest = divmod(self.queries, self.rows)
        if whole:
            a.set("rbx", whole)
            with a.counted("rows", "rbx"):
                self._some_rows(a, "some", self.rows, constants)
        if rest:
            self._some_rows(a, "rest", rest, constants)

    def _row_of(self, a: Assembler, register: str, base: At, distance: int) -> None:
        a.load(register, base)
        a.add_stored(register, At(base="r15", distance=distance))

    def _pack_keys(self, a: Assembler) -> None:
        self._row_of(a, "r8", KEYS_AT, OF_KEYS)
        a.load("r9", KEY_STEP)
        self._look_ahead(a)
        a.move("rcx", "r13")
        whole, rest = divmod(self.keys, self.panel)
        if whole:
            a.set("r10", whole)
            with a.counted("key panels", "r10"):
                self._keys(a, "keys", self.panel)
                a.add("rcx", self.channels * self.panel_bytes - self.panel_bytes)
        if rest:
            self._keys(a, "last keys", rest)
            a.subtract("r8", "r9")
            self._keys(a, "no keys", self.panel - rest, moves=False)

    def _keys(self, a: Assembler, name: str, count: int, *, moves: bool = True) -> None:
        a.set("r11", count)
        with a.counted(name, "r11"):
            if moves:
                self._ask_for(a, self.channels)
            for channel in range(self.channels):
                a.load_short("rdx", At(base="r8", distance=channel * WORD))
                a.store_short(At(base="rcx", distance=channel * self.panel_bytes), "rdx")
            a.add("rcx", WORD)
            if moves:
                a.add("r8", "r9")

    def _look_ahead(self, a: Assembler) -> None:
        """rsi: what is some rows behind r8."""
        a.move("rsi", "r8")
        for _ in range(AHEAD):
            a.add("rsi", "r9")

    def _ask_for(self, a: Assembler, numbers: int) -> None:
        """Fetch the row at rsi, and go to the next."""
        for distance in range(0, numbers * WORD, CACHE_LINE):
            a.prefetch(At(base="rsi", distance=distance))
        a.add("rsi", "r9")

    def _pack_values(self, a: Assembler) -> None:
        self._row_of(a, "r8", VALUES, OF_VALUES)
        a.load("r9", VALUE_STEP)
        self._look_ahead(a)
        a.move("rcx", "r13")
        a.add("rcx", self._values)
        places = [
            v // VECTORS * self._value_panel + v % VECTORS * self.vector
            for v in range(self.width // self.isa.lanes)
        ]
        a.set("r11", self.keys)
        with a.counted("values", "r11"):
            self._ask_for(a, self.width)
            for v, place in enumerate(places):
                a.load_vector(v % 12, At(base="r8", distance=v * self.vector))
                a.store_vector(At(base="rcx", distance=place), v % 12)
            a.add("rcx", self.panel_bytes)
            a.add("r8", "r9")
        a.vector("vxorps", 0, 0, 0)
        for _ in range(self.rounds * UNROLLED - self.keys):
            for place in places:
                a.store_vector(At(base="rcx", distance=place), 0)
            a.add("rcx", self.panel_bytes)

    def _some_rows(self, a: Assembler, name: str, rows: int, constants: Constants) -> None:
        self._take_queries(a, rows, constants)
        self._score(a, name, rows)
        self._exponentiate(a, name, rows, constants)
        self._add_values(a, name, rows)
        a.add("rbp", rows * self.pitch)

    def _take_queries(self, a: Assembler, rows: int, constants: Constants) -> None:
        """The next queries, times the scale."""
        a.load_vector(self.isa.vectors - 1, constants.at(self.scale))
        for row in range(rows):
            for v in range(self.channels // self.isa.lanes):
                a.vector(
                    "vmulps", v % 12, self.isa.vectors - 1, At(base="r12", distance=v * self.vector)
                )
                place = self._queries + row * self.channels * WORD + v * self.vector
                a.store_vector(At(base="r13", distance=place), v % 12)
            a.add("r12", "r14")
        a.move("r8", "r12")
        for _ in range(self.rows):  # the next ones, while these are multiplied
            for distance in range(0, self.channels * WORD, CACHE_LINE):
                a.prefetch(At(base="r8", distance=distance))
            a.add("r8", "r14")

    def _score(self, a: Assembler, name: str, rows: int) -> None:
        """rcx: a panel of keys; r8: the scores of its keys; rdx: the distance of a channel; r9:
        what of the mask is added to them.
        """
        unrolled = math.gcd(self.channels, 16)
        a.move("rcx", "r13")
        a.move("r8", "r13")
        if self.is_masked:
            self._row_of(a, "r9", MASK, OF_MASK)
        a.set("r10", self.panels)
        with a.counted(f"{name} panels", "r10"):
            self._zero(a, rows)
            a.set("rdx", 0)
            end = self.channels * WORD
            with a.stepped(f"{name} channels", "rdx", unrolled * WORD, end):
                for u in range(unrolled):
                    self._multiply(a, rows, "rcx", u * self.panel_bytes, "r13", "rdx", [
                        self._queries + row * self.channels * WORD + u * WORD
                        for row in range(rows)
                    ])  # fmt: skip
                a.add("rcx", unrolled * self.panel_bytes)
            for row in range(rows):
                for v in range(VECTORS):
                    i = row * VECTORS + v
                    if self.is_masked:
                        a.vector("vaddps", i, i, At(base="r9", distance=v * self.vector))
                    a.store_vector(self._score_at("r8", row, v), i)
            a.add("r8", self.panel_bytes)
            if self.is_masked:
                a.add("r9", self.panel_bytes)

    def _score_at(self, base: str, row: int, v: int) -> At:
        return At(base=base, distance=self._scores + row * self._row + v * self.vector)

    def _factor(self, row: int) -> At:
        return At(base="r13", distance=self._factors + row * self.vector)

    def _zero(self, a: Assembler, rows: int) -> None:
        for i in range(rows * VECTORS):
            a.vector("vxorps", i, i, i)

    def _multiply(
        self, a: Assembler, rows: int, panel: str, at: int, base: str, index: str, places: list[int]
    ) -> None:
        """Add to the sums the products of a number of each row and a row of a panel."""
        for v in range(VECTORS):
            a.load_vector(self.rows * VECTORS + v, At(base=panel, distance=at + v * self.vector))
        for row in range(rows):
            spread = (self.rows + 1) * VECTORS + row % 2
            a.broadcast(spread, At(base=base, index=index, distance=places[row]))
            for v in range(VECTORS):
                a.vector("vfmadd231ps", row * VECTORS + v, self.rows * VECTORS + v, spread)

    def _exponentiate(self, a: Assembler, name: str, rows: int, constants: Constants) -> None:
        """The scores of each row become e to what they are below its largest, those of no key 0;
        its factor 1 / their sum.
        """
        self._fold(a, f"{name} largest", "vmaxps", rows)
        for row in range(rows):
            a.store_vector(self._factor(row), row)
        a.load_vector(self.isa.vectors - 1, constants.at(LOWEST))
        a.move("r8", "r13")
        whole, rest = divmod(self.keys, self.panel)
        if whole:
            a.set("r10", whole)
            with a.counted(f"{name} powers", "r10"):
                self._powers(a, rows, constants, self.panel)
                a.add("r8", self.panel_bytes)
        if rest:
            self._powers(a, rows, constants, rest)
        self._fold(a, f"{name} sums", "vaddps", rows)
        a.load_vector(self.isa.vectors - 1, constants.at(1.0))
        for row in range(rows):
            a.vector("vdivps", row, self.isa.vectors - 1, row)
            if self.is_masked:  # r9: behind the panels
                a.vector("vmulps", row, row, At(base="r9"))
            a.store_vector(self._factor(row), row)

    def _fold(self, a: Assembler, label: str, name: str, rows: int) -> None:
        """The scores of each row combined, in all lanes of its vector, the first ones."""
        places = [(row, v) for row in range(rows) for v in range(VECTORS)]
        for i, place in enumerate(places):
            a.load_vector(i, self._score_at("r13", *place))
        if self.panels > 1:
            a.move("r8", "r13")
            a.set("r10", self.panels - 1)
            with a.counted(label, "r10"):
                a.add("r8", self.panel_bytes)
                for i, place in enumerate(places):
                    a.vector(name, i, i, self._score_at("r8", *place))
        for row in range(rows):
            a.vector(name, row, row * VECTORS, row * VECTORS + 1)
        self._across(a, name, rows)

    def _across(self, a: Assembler, name: str, rows: int) -> None:
        """The lanes of each row's vector combined, in all of them."""
        for row in range(rows):
            a.store_vector(self._factor(row), row)
        for row in range(rows):
            at = self._factor(row)
            a.broadcast(row, at)
            for lane in range(1, self.isa.lanes):
                other = self.rows * VECTORS + lane % 4
                a.broadcast(other, At(base=at.base, distance=at.distance + lane * WORD))
                a.vector(name, row, row, other)

    def _powers(self, a: Assembler, rows: int, constants: Constants, keys: int) -> None:
        """Those of a panel, of which the first ``keys`` are any."""
        places = [(row, v) for row in range(rows) for v in range(VECTORS)]
        together = self.rows // 2  # each score has four vectors
        for begin in range(0, len(places), together):
            some = places[begin : begin + together]
            a.interleave([
                functools.partial(self._power, constants, keys, row, v, 4 * i)
                for i, (row, v) in enumerate(some)
            ])  # fmt: skip

    def _power(
        self, constants: Constants, keys: int, row: int, v: int, first: int, a: Assembler
    ) -> None:
        """One vector of them; vectors ``first`` to ``first + 3`` are overwritten."""
        place, score, power = self._score_at("r8", row, v), first, first + 1
        a.load_vector(score, place)
        a.vector("vsubps", score, score, self._factor(row))
        a.vector("vmaxps", score, self.isa.vectors - 1, score)  # a NaN stays
        exponential(a, constants, score, power, first + 2, first + 3)
        a.vector("vsubps", score, score, score)  # 0, or a NaN, which the power is not
        a.vector("vaddps", power, power, score)
        lanes = min(self.isa.lanes, max(0, keys - v * self.isa.lanes))
        if lanes < self.isa.lanes:
            a.vector("vandps", power, power, constants.first(lanes))
        a.store_vector(place, power)

    def _add_values(self, a: Assembler, name: str, rows: int) -> None:
        """rcx: a row of a panel of values; rdx: the distance of its key's score."""
        a.move("rcx", "r13")
        a.add("rcx", self._values)
        for panel in range(self.width // self.panel):
            self._zero(a, rows)
            a.set("rdx", 0)
            end = self.rounds * UNROLLED * WORD
            with a.stepped(f"{name} values {panel}", "rdx", UNROLLED * WORD, end):
                for u in range(UNROLLED):
                    self._multiply(a, rows, "rcx", u * self.panel_bytes, "r13", "rdx", [
                        self._scores + row * self._row + u * WORD for row in range(rows)
                    ])  # fmt: skip
                a.add("rcx", UNROLLED * self.panel_bytes)
            for row in range(rows):
                for v in range(VECTORS):
                    i = row * VECTORS + v
                    a.vector("vmulps", i, i, self._factor(row))
                    place = row * self.pitch + (panel * VECTORS + v) * self.vector
                    a.store_vector(At(base="rbp", distance=place), i)
