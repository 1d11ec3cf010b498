"""Instructions on vectors as VEX and EVEX say them: prefix, map and opcode.

Source: as of ``assembler``.
"""

NONE, X66, XF3, XF2 = range(4)  # prefixes, as VEX and EVEX say them
M0F, M0F38, M0F3A = 1, 2, 3  # maps of opcodes

# name → prefix, map, opcode; three vectors, the last one perhaps from memory
VECTOR = {
    "vaddps": (NONE, M0F, 0x58),
    "vmaxps": (NONE, M0F, 0x5F),
    "vminps": (NONE, M0F, 0x5D),
    "vmulps": (NONE, M0F, 0x59),
    "vsubps": (NONE, M0F, 0x5C),
    "vdivps": (NONE, M0F, 0x5E),
    "vandps": (NONE, M0F, 0x54),
    "vxorps": (NONE, M0F, 0x57),
    "vorps": (NONE, M0F, 0x56),
    "vpaddd": (X66, M0F, 0xFE),
    "vpmulld": (X66, M0F38, 0x40),
    "vpaddw": (X66, M0F, 0xFD),
    "vpackssdw": (X66, M0F, 0x6B),
    "vpacksswb": (X66, M0F, 0x63),
    "vpmaddwd": (X66, M0F, 0xF5),
    "vpmaddubsw": (X66, M0F38, 0x04),
    "vpmaxsw": (X66, M0F, 0xEE),
    "vpmaxub": (X66, M0F, 0xDE),
    "vpmaxsb": (X66, M0F38, 0x3C),
    "vfmadd231ps": (X66, M0F38, 0xB8),
    "vfmadd213ps": (X66, M0F38, 0xA8),
    "vfmsub132ps": (X66, M0F38, 0x9A),
    "vdpbf16ps": (XF3, M0F38, 0x52),
    "vscalefps": (X66, M0F38, 0x2C),  # the first times 2 to the second, rounded down
    "vcvtne2ps2bf16": (XF2, M0F38, 0x72),  # the second operand's numbers are the upper ones
    "vpdpbusd": (X66, M0F38, 0x50),
    "vpxord": (X66, M0F, 0xEF),
    "vpermd": (X66, M0F38, 0x36),
    "vpshufb": (X66, M0F38, 0x00),
    "vpunpcklbw": (X66, M0F, 0x60),
    "vpunpcklwd": (X66, M0F, 0x61),
    "vpunpckldq": (X66, M0F, 0x62),
    "vpunpckhbw": (X66, M0F, 0x68),
    "vpunpckhwd": (X66, M0F, 0x69),
    "vpunpckhdq": (X66, M0F, 0x6A),
    "vpermt2ps": (X66, M0F38, 0x7F),  # of the first and the third by the second's places
}
ONLY_AVX512 = ("vdpbf16ps", "vcvtne2ps2bf16", "vpxord", "vpermt2ps", "vscalefps")
FIRST_AVX512 = ("vpdpbusd",)  # AVX2 had it later: ``objdump`` says which encoding it sees
# name → what VCMPPS is told; unless ordered, also of a NaN: equal, neither is one, one is, not less
COMPARISONS = {"vcmpeqps": 0, "vcmpordps": 7, "vcmpunordps": 3, "vcmpnltps": 5}
# name → prefix, map, opcode; a vector from a vector or from memory
CONVERSIONS = {
    "vcvtdq2ps": (NONE, M0F, 0x5B),
    "vcvtps2dq": (X66, M0F, 0x5B),
    "vsqrtps": (NONE, M0F, 0x51),
}
