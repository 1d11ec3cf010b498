"""LSTM, GRU and RNN on a CPU with AVX-512 or AVX2: one product of all inputs, then machine code.

The code takes some samples of one direction through all steps: states stay in the first caches,
weights are streamed once a step for all these samples, and the gates of a vector of units are
finished in registers. Samples and directions are the items that threads take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tessella.device.packing import onednn_layout, packed
from tessella.device.x86 import code
from tessella.device.x86.assembler import Assembler, At, InstructionSet
from tessella.device.x86.code import MAX_BYTES
from tessella.kernels.catalog import Call
from tessella.kernels.epilogue.x86 import TEMPORARIES, Constants, activate
from tessella.kernels.recurrent.layer import WEIGHTS, backward, operands, refusal, weights
from tessella.kernels.shared.onednn import has_onednn
from tessella.operations.problem import Problem

Tensor = torch.Tensor

BYTES = 4  # of a number
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
CHAINS = 8  # sums that must be on their way for two products a cycle
UNROLLED = 8  # products of a sum in a round of the loop
AHEAD = 4096  # bytes that weights are fetched ahead: 7 to 17 % less time at 1 sample, 256 units
ALONE_FLOPS = 1 << 20  # so little is not worth waking a thread

# what a row of the table of items says, in this order: bytes, and the last two addresses
INPUT, INPUT_STEP, OUTPUT, OUTPUT_STEP, STATE, WEIGHT, BIAS = range(7)
ITEM = 7


def fits(problem: Problem) -> str | None:
    if problem.get("lengths") is not None:
        return "no lengths"
    if problem.op == "lstm" and problem.get("weight_hr") is not None:
        return "no projection"
    if problem.op == "gru" and not problem.attrs["reset_after"]:
        return "the reset gate comes after the product"
    if why := refusal(problem, "float32"):
        return why
    units = problem["weight_hh"].shape[2]
    lanes = code.require_instructions().lanes
    if units % lanes:
        return f"units are a multiple of {lanes}, not {units}"
    steps, samples, _ = problem["input"].shape
    rows = math.prod(problem["weight_hh"].shape[:2])
    if max(steps * samples, units) * rows * BYTES > MAX_BYTES:
        return "distances have 32 bits"
    return None


def bind(problem: Problem, constants: Mapping[int, Tensor]) -> Call:
    problem.require_constants(constants)
    steps, samples, inputs = problem["input"].shape
    given = weights(problem, constants)
    ways, units, gates = len(given), problem["weight_hh"].shape[2], GATES[problem.op]
    whole = given[0].whole
    isa = code.require_instructions()
    packed_hh = packed(whole, ("recurrent.x86", isa), lambda w: _packed(w, gates, isa.lanes))
    bias, new_bias = _biases(problem, [w.bias_ih for w in given], [w.bias_hh for w in given])
    product = _product(constants[1].reshape(-1, inputs), bias, whole, steps * samples)
    blocks = _blocks(samples, gates, ways, isa)
    parts = []
    for size in sorted({size for _, size in blocks}):
        begins = [begin for begin, its in blocks if its == size]
        items = code.Table([*_items(problem, packed_hh, new_bias, begins)], packed_hh, new_bias)
        constant = Constants(isa, "rbp")
        part = _Layer(
            isa=isa,
            constants=constant,
            op=problem.op,
            relu=problem.attrs.get("nonlinearity") == "relu",
            units=units,
            ways=ways,
            steps=steps,
            samples=samples,
            together=size,
        )
        parts.append((code.MachineCode(part.written().code(), constant), items))
    few = (problem.flops or 0) <= ALONE_FLOPS
    names = [name for name in operands(problem) if name not in WEIGHTS]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        states = dict(zip(names, tensors, strict=True))
        by_input = product(states["input"].reshape(steps * samples, inputs))
        output = by_input.new_empty(steps, samples, ways * units)
        h = by_input.new_empty(2, ways, samples, units)
        h[0] = states.get("h_0", 0.0)
        c = by_input.new_empty(ways, samples, units)
        if problem.op == "lstm":
            c[:] = states.get("c_0", 0.0)
        addresses = [t.data_ptr() for t in (by_input, output, h, c)]
        for machine_code, items in parts:
            threads = 1 if few else min(torch.get_num_threads(), items.count)
            machine_code.run(items, *addresses, threads=threads)
        last = h[steps % 2]
        return (output, last, c) if problem.op == "lstm" else (output, last)

    return run


def _packed(weight: Tensor, gates: int, lanes: int) -> Tensor:
    """[D, G·H, H] → [D, H / lanes, H, G, lanes]: in the order in which they are read."""
    ways, _, units = weight.shape
    cut = weight.view(ways, gates, units // lanes, lanes, units)
    return cut.permute(0, 2, 4, 1, 3).contiguous()


def _biases(
    problem: Problem, by_input: list[Tensor | None], by_state: list[Tensor | None]
) -> tuple[Tensor | None, Tensor]:
    """The biases that are added to the product of all inputs [D·G·H] and to GRU's new state [D,
    H].
    """
    whole = problem["weight_hh"].shape
    ways, units = whole[0], whole[2]
    new = torch.zeros(ways, units, dtype=torch.float32)
    if by_input[0] is None or by_state[0] is None:
        return None, new
    both = [b.clone() for b in by_input if b is not None]
    for way, bias in enumerate(by_state):
        assert bias is not None
        if problem.op == "gru":
            both[way][: 2 * units] += bias[: 2 * units]
            new[way] = bias[2 * units :]
        else:
            both[way] += bias
    return torch.cat(both), new


def _product(weight: Tensor, bias: Tensor | None, key: Tensor, rows: int) -> Call:
    """``x · weightᵀ + bias`` of x [rows, I]; oneDNN's is twice as fast as MKL's on an EPYC."""
    if not has_onednn() or rows == 1:
        return lambda x: F.linear(x, weight, bias)
    ready = packed(
        key,
        ("recurrent.x86 inputs",),
        lambda _: torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows),
        layout=onednn_layout,
    )
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: linear(x, ready, bias, "none", [], "")


def _registers(isa: InstructionSet, gates: int) -> tuple[int, int]:
    """Where those end that sum, and the one that a number of h is spread over.

    Between them lie the weights of each gate, and later what activations use.
    """
    return isa.vectors - 1 - max(gates, TEMPORARIES), isa.vectors - 1


def _blocks(samples: int, gates: int, ways: int, isa: InstructionSet) -> list[tuple[int, int]]:
    """Samples that go together, as (first, how many), of two sizes at most.

    As few as have sums for them, or one for each thread.
    """
    most = min(8, _registers(isa, gates)[0] // gates)
    wanted = -(-torch.get_num_threads() // ways)
    count = max(-(-samples // most), min(samples, wanted))
    sizes = [samples // count + (i < samples % count) for i in range(count)]
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _items(
    problem: Problem, packed_hh: Tensor, new_bias: Tensor, begins: list[int]
) -> list[list[int]]:
    """For each block of samples of each direction what ``_Layer`` reads of it."""
    steps, samples, _ = problem["input"].shape
    ways, rows, units = problem["weight_hh"].shape
    gx_step, out_step = samples * ways * rows * BYTES, samples * ways * units * BYTES
    items = []
    for way, back in enumerate(backward(problem)):
        first, sign = (steps - 1, -1) if back else (0, 1)
        for begin in begins:
            row = [0] * ITEM
            row[INPUT] = first * gx_step + (begin * ways + way) * rows * BYTES
            row[INPUT_STEP] = sign * gx_step
            row[OUTPUT] = first * out_step + (begin * ways + way) * units * BYTES
            row[OUTPUT_STEP] = sign * out_step
            row[STATE] = (way * samples + begin) * units * BYTES
            row[WEIGHT] = packed_hh[way].data_ptr()
            row[BIAS] = new_bias[way].data_ptr()
            items.append(row)
    return items


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """Some samples of one direction, through all steps.

    Attributes:
        ways: directions, whose outputs lie side by side.
        together: samples of one item, of ``samples`` in all.
        constants: the numbers that activations take.
    """

    isa: InstructionSet
    constants: Constants
    op: str
    relu: bool
    units: int
    ways: int
    steps: int
    samples: int
    together: int

    @property
    def gates(self) -> int:
        return GATES[self.op]

    @property
    def chains(self) -> int:
        """Sums for one gate of one sample, so that none waits for its last product."""
        sums, chains = self.together * self.gates, 1
        most = _registers(self.isa, self.gates)[0]
        while chains * sums < CHAINS and 2 * chains * sums <= most:
            chains *= 2
        return chains

    def written(self) -> Assembler:
        """The code.

        rdi: the call, with the inputs' product, the output, h twice, c; rcx: the item; r8, r9: the
        product's and the output's row of the step; r10, r11: h before and after it; r12: c; r13:
        the weights; rbp: the constants; r14: the bias; r15: steps that are left; rbx: the bytes of
        the units before these; rsi, rdx: the h that is read, and its end.
        """
        a = Assembler(self.isa)
        with a.function(), code.each_item(a, "rcx", ITEM):
            self.constants.begin(a)
            for register, number, place in (
                ("r8", 0, INPUT), ("r9", 1, OUTPUT), ("r10", 2, STATE), ("r12", 3, STATE),
            ):  # fmt: skip
                a.load(register, code.given(number))
                a.add_stored(register, At(base="rcx", distance=place * code.NUMBER))
            a.move("r11", "r10")
            a.add("r11", self.ways * self.samples * self.units * BYTES)
            a.load("r14", At(base="rcx", distance=BIAS * code.NUMBER))
            a.set("r15", self.steps)
            with a.counted("step", "r15"):
                a.load("r13", At(base="rcx", distance=WEIGHT * code.NUMBER))
                a.set("rbx", 0)
                with a.stepped("units", "rbx", self.isa.vector_bytes, self.units * BYTES):
                    self._products(a)
                    for sample in range(self.together):
                        finish = {"lstm": self._lstm, "gru": self._gru, "rnn": self._rnn}[self.op]
                        h = finish(a, sample)
                        a.store_vector(self._output(sample), h)
                        a.store_vector(self._state("r11", sample), h)
                a.move("rax", "r10")
                a.move("r10", "r11")
                a.move("r11", "rax")
                a.add_stored("r8", At(base="rcx", distance=INPUT_STEP * code.NUMBER))
                a.add_stored("r9", At(base="rcx", distance=OUTPUT_STEP * code.NUMBER))
        return a

    # where numbers lie, for a vector of units

    def _input(self, sample: int, gate: int) -> At:
        row = (sample * self.ways * self.gates + gate) * self.units * BYTES
        return At(base="r8", distance=row, index="rbx")

    def _output(self, sample: int) -> At:
        return At(base="r9", distance=sample * self.ways * self.units * BYTES, index="rbx")

    def _state(self, base: str, sample: int) -> At:
        return At(base=base, distance=sample * self.units * BYTES, index="rbx")

    def _sum(self, sample: int, gate: int, chain: int = 0) -> int:
        """The register of a sum."""
        return (chain * self.together + sample) * self.gates + gate

    def _products(self, a: Assembler) -> None:
        """The sums of each gate and sample: the input's part, and h times the weights."""
        new = self.gates - 1 if self.op == "gru" else None
        for sample in range(self.together):
            for gate in range(self.gates):
                begin = At(base="r14", index="rbx") if gate == new else self._input(sample, gate)
                a.load_vector(self._sum(sample, gate), begin)
                for chain in range(1, self.chains):
                    register = self._sum(sample, gate, chain)
                    a.vector("vxorps", register, register, register)
        a.move("rsi", "r10")
        a.move("rdx", "r10")
        a.add("rdx", self.units * BYTES)
        a.label("products")
        for k in range(UNROLLED):
            self._product(a, k)
        a.add("rsi", UNROLLED * BYTES)
        a.add("r13", UNROLLED * self.gates * self.isa.vector_bytes)
        a.compare("rsi", "rdx")
        a.jump_if("jne", "products")
        for chain in range(1, self.chains):
            for sample in range(self.together):
                for gate in range(self.gates):
                    to = self._sum(sample, gate)
                    a.vector("vaddps", to, to, self._sum(sample, gate, chain))

    def _product(self, a: Assembler, k: int) -> None:
        """Add the products of one number of each sample's state h with that number's weights."""
        size = self.isa.vector_bytes
        at = [At(base="r13", distance=(k * self.gates + g) * size) for g in range(self.gates)]
        weights_at, spread = _registers(self.isa, self.gates)
        for place in at:
            a.prefetch(At(base="r13", distance=place.distance + AHEAD))
        if self.together > 1:  # from memory once
            for gate in range(self.gates):
                a.load_vector(weights_at + gate, at[gate])
        for sample in range(self.together):
            a.broadcast(spread, At(base="rsi", distance=(sample * self.units + k) * BYTES))
            for gate in range(self.gates):
                weight = at[gate] if self.together == 1 else weights_at + gate
                to = self._sum(sample, gate, k % self.chains)
                a.vector("vfmadd231ps", to, spread, weight)

    # cells: from the sums to the new h, whose register they return

    def _activate(self, a: Assembler, name: str, x: int) -> None:
        activate(a, name, self.constants, x, _registers(self.isa, self.gates)[0])

    def _lstm(self, a: Assembler, sample: int) -> int:
        i, f, g, o = (self._sum(sample, gate) for gate in range(4))
        for gate in (i, f, o):
            self._activate(a, "sigmoid", gate)
        self._activate(a, "tanh", g)
        a.vector("vmulps", i, i, g)
        a.load_vector(g, self._state("r12", sample))
        a.vector("vfmadd231ps", i, f, g)
        a.store_vector(self._state("r12", sample), i)
        self._activate(a, "tanh", i)
        a.vector("vmulps", i, i, o)
        return i

    def _gru(self, a: Assembler, sample: int) -> int:
        r, z, n = (self._sum(sample, gate) for gate in range(3))
        self._activate(a, "sigmoid", r)
        self._activate(a, "sigmoid", z)
        a.vector("vfmadd213ps", n, r, self._input(sample, 2))
        self._activate(a, "tanh", n)
        a.load_vector(r, self._state("r10", sample))
        a.vector("vsubps", r, r, n)
        a.vector("vfmadd231ps", n, z, r)
        return n

    def _rnn(self, a: Assembler, sample: int) -> int:
        h = self._sum(sample, 0)
        self._activate(a, "relu" if self.relu else "tanh", h)
        return h
