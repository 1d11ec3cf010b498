"""Files of volumes: NumPy's, NIfTI and stacks of TIFF. Headers are checked before values are read.

A volume is [D, H, W]: slices, rows and columns. NIfTI counts columns first, so that its axes are
reversed here. In a dataset a volume, and its labels, are an array in NumPy's own form (``.npy``),
of which a crop is read from the mapped file alone.
"""

from __future__ import annotations

import gzip
import importlib
import io
import math
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tessella.core.errors import DataError, UsageError
from tessella.core.pictures import Pixels

Values = npt.NDArray[Any]

SUFFIXES = (".nii.gz", ".nii", ".npy", ".npz", ".tif", ".tiff")
MAX_FILE = 4 << 30
MAX_VOXELS = 1 << 28  # 1,024 slices of 512 × 512
MAX_SIDE = 1 << 14
IGNORED = 255  # the number of a voxel without a class
FULL = 65535
OUTER = 0.5  # percent of the values that lie below, and above, the window of a volume of its own
LOOKED_AT = 1 << 20  # values that say where that window is
NPY_HEADER = 1 << 14  # bytes in which a header of NumPy's ends
HEAD_BYTES = 4096  # in which the header of a stored array ends
NOT_COMPRESSED, DEFLATED = 1, (8, 32946)  # of TIFF
NIFTI_BYTES = 544  # of the longer one of the two headers, and four that say whether more follows
NIFTI_OFFSET = 1 << 20  # where values begin at the latest: what lies before is read into memory
GREY = "one value for each voxel, [D, H, W], is read"


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a file says of its volume before its values are read.

    Attributes:
        shape: slices, rows and columns.
        spacing: of these, in the file's unit, millimetres mostly; 1 where the file says nothing.
    """

    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    spacing: tuple[float, float, float] = (1.0, 1.0, 1.0)


def suffix_of(name: str | Path) -> str | None:
    """Which of ``SUFFIXES`` a file's name ends with, if it does."""
    lower = str(name).lower()
    return next((suffix for suffix in SUFFIXES if lower.endswith(suffix)), None)


def read_header(file: str | Path) -> Header:
    """The header of a file, checked: a plain file, one number for each voxel, not too many.

    Raises:
        DataError: no volume that can be read.
    """
    path = Path(file)
    try:
        suffix = suffix_of(path)
        if suffix is None:
            raise DataError("it is no file of a volume", seen=path.name, fix=", ".join(SUFFIXES))
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DataError("it is no plain file")
        if found.st_size > MAX_FILE:
            raise DataError("the file is too large", seen=f"{found.st_size:,} bytes")
        header = _READERS[suffix](path, found.st_size)
    except (DataError, UsageError):
        raise
    except OSError as error:
        raise DataError("the file cannot be opened", seen=error.strerror or error) from error
    except Exception as error:  # readers of headers raise ValueError, struct.error, zlib.error, …
        raise DataError("its header cannot be read", seen=str(error)[:100]) from error
    _check(header)
    return header


def _check(header: Header) -> None:
    if header.dtype.kind not in "buif":
        raise DataError("its values are no numbers", seen=header.dtype)
    if min(header.shape) < 1 or max(header.shape) > MAX_SIDE:
        raise DataError("a side is empty or too long", seen=header.shape)
    if math.prod(header.shape) > MAX_VOXELS:
        raise DataError("it has too many voxels", seen=f"{header.shape}, at most {MAX_VOXELS:,}")
    if not all(math.isfinite(side) and side > 0 for side in header.spacing):
        raise DataError("its spacing is no distance", seen=header.spacing)


def read_values(file: str | Path) -> tuple[Values, Header]:
    """The values [D, H, W] of a file, and its header.

    Raises:
        DataError: no volume that can be read.
    """
    path, header = Path(file), read_header(file)
    try:
        values = _values(path, suffix_of(path))
    except (UsageError, MemoryError):
        raise
    except Exception as error:  # OSError, EOFError, ValueError, zlib's, zipfile's, nibabel's, …
        raise DataError("its values cannot be read", seen=str(error)[:100]) from error
    if values.shape != header.shape:
        raise DataError("its values are not as many as its header says", seen=values.shape)
    return values, header


def read_labels(file: str | Path, shape: Sequence[int], classes: int) -> tuple[Pixels, Header]:
    """The numbers of classes, uint8 [D, H, W], of a volume of this shape; 255 has no class.

    Raises:
        DataError: another shape, numbers that are not whole, or that name no class.
    """
    header = read_header(file)
    if header.shape != tuple(shape):
        raise DataError(
            "the labels have another shape", seen=f"{header.shape}, the volume {tuple(shape)}"
        )
    values, header = read_values(file)
    known = (values >= 0) & (values < classes) | (values == IGNORED)
    if not known.all():  # of what is no number, too
        seen = f"{values[~known].flat[0]:g}, {classes} classes"
        raise DataError("the labels have the number of no class", seen=seen)
    labels = values.astype(np.uint8)
    if values.dtype.kind == "f" and not (labels == values).all():
        raise DataError("the labels are not whole numbers", seen=values[labels != values].flat[0])
    return labels, header


def scaled(values: Values, window: tuple[float, float] | None) -> Pixels:
    """Values as uint16 of the same shape: the window's ends become 0 and 65,535.

    Args:
        window: None: from the 0.5th to the 99.5th percentile of the volume itself.

    Raises:
        DataError: a value is no number.
    """
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError("it has values that are no numbers")
    low, high = window or _own_window(values)
    made = np.empty(values.shape, np.uint16)
    for place, one in enumerate(values):  # a slice at a time: float64 is four times as large
        share = (one.astype(np.float64) - low) / (high - low)
        made[place] = np.rint(share.clip(0, 1) * FULL)
    return made


def _own_window(values: Values) -> tuple[float, float]:
    flat = values.reshape(-1)
    step = max(1, len(flat) // LOOKED_AT)
    while math.gcd(step, values.shape[-1] * values.shape[-2]) > 1:  # not the same columns each row
        step += 1
    some = flat[::step].astype(np.float64)
    low, high = np.percentile(some, [OUTER, 100 - OUTER]).tolist()
    return (low, high) if high > low else (low, low + 1.0)


# --- in a dataset ---------------------------------------------------------------------------------


def encoded(array: Values) -> bytes:
    """An array in NumPy's form."""
    out = io.BytesIO()
    np.lib.format.write_array(out, np.ascontiguousarray(array), allow_pickle=False)
    return out.getvalue()


def array_in(content: bytes | memoryview, dtype: str) -> Values:
    """A view of the array [D, H, W, …] that ``encoded`` wrote: what is not looked at is not read.

    Raises:
        DataError: it is none of this element type.
    """
    view = memoryview(content)
    head = io.BytesIO(bytes(view[:HEAD_BYTES]))
    try:
        shape, by_columns, found = _npy_header(head)
    except Exception as error:  # NumPy evaluates the header as a literal of Python
        raise DataError(
            "this is no stored volume", seen=str(error)[:80], fix="import the dataset again"
        ) from error
    begin = head.tell()
    fits = len(view) == begin + math.prod(shape) * found.itemsize
    if by_columns or found != np.dtype(dtype) or not fits or len(shape) < 3 or min(shape) < 1:
        seen = f"{found} {shape} in {len(view):,} bytes"
        raise DataError("this is no stored volume", seen=seen, fix="import the dataset again")
    return np.frombuffer(view, found, offset=begin).reshape(shape)


def middle_slice(content: bytes | memoryview) -> Pixels:
    """What is shown of a stored volume: the slice in its middle, [H, W, 1] of 16 bits."""
    volume = array_in(content, "uint16")
    return np.array(volume[len(volume) // 2])


# --- written --------------------------------------------------------------------------------------


WRITTEN = (".npy", ".nii", ".nii.gz")


def write_labels(
    file: str | Path, labels: Pixels, spacing: Sequence[float], like: Path | None = None
) -> None:
    """Write numbers of classes [D, H, W] as .npy or NIfTI, there with the spacing of slices, rows
    and columns; the place in space is that of ``like``, where it is a NIfTI file.

    Raises:
        UsageError: a name that ends otherwise, or nibabel is not there.
    """
    path, suffix = Path(file), suffix_of(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    if suffix == ".npy":
        np.save(path, labels, allow_pickle=False)
    elif suffix in (".nii", ".nii.gz"):
        nibabel = _nibabel()
        affine = np.diag([*reversed(spacing), 1.0])
        if like is not None and suffix_of(like) in (".nii", ".nii.gz"):
            affine = nibabel.load(like).affine
        nibabel.save(nibabel.Nifti1Image(labels.transpose(), affine), path)
    else:
        raise UsageError(
            "labels are written as .npy, .nii or .nii.gz", seen=path.name, fix="give such a name"
        )


# --- the forms ------------------------------------------------------------------------------------


def _npy_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Sides, order and type; NumPy would read as many bytes as the header says that it has."""
    start = file.tell()
    head = io.BytesIO(file.read(NPY_HEADER))
    version = np.lib.format.read_magic(head)
    if version == (1, 0):
        made = np.lib.format.read_array_header_1_0(head)
    elif version == (2, 0):
        made = np.lib.format.read_array_header_2_0(head)
    else:
        raise ValueError(f"version {version} of NumPy's form")
    file.seek(start + head.tell())
    return made


def _three(shape: Sequence[int]) -> tuple[int, int, int]:
    """Three sides; a fourth of one value is none."""
    sides = [int(side) for side in shape]
    if len(sides) == 4 and 1 in (sides[0], sides[-1]):
        sides = sides[1:] if sides[0] == 1 else sides[:-1]
    if len(sides) != 3:
        raise DataError(f"it has {len(sides)} axes", seen=tuple(sides), fix=GREY)
    return sides[0], sides[1], sides[2]


def _of_npy(path: Path, nbytes: int) -> Header:
    with path.open("rb") as file:
        shape, _, dtype = _npy_header(file)
        there = nbytes - file.tell()
    if there != math.prod(shape) * dtype.itemsize:
        raise DataError("it ends before its values do, or behind them", seen=f"{nbytes:,} bytes")
    return Header(shape=_three(shape), dtype=dtype)


def _member(names: Sequence[str]) -> str:
    """The array of a .npz that is the volume: the only one, or the one that is called so."""
    arrays = [name for name in names if name != "spacing.npy"]
    for name in ("data.npy", "volume.npy", "image.npy", "labels.npy", "label.npy", "seg.npy"):
        if name in arrays:
            return name
    if len(arrays) != 1:
        raise DataError("it has several arrays", seen=", ".join(sorted(arrays)[:5]))
    return arrays[0]


def _of_npz(path: Path, _: int) -> Header:
    with zipfile.ZipFile(path) as packed:
        name = _member(packed.namelist())
        with packed.open(name) as file:
            shape, _by_columns, dtype = _npy_header(file)
            begin = file.tell()
        if packed.getinfo(name).file_size != begin + math.prod(shape) * dtype.itemsize:
            raise DataError("it ends before its values do, or behind them", seen=name)
        spacing = (1.0, 1.0, 1.0)
        if "spacing.npy" in packed.namelist():
            with packed.open("spacing.npy") as file:
                said, _by_columns, kind = _npy_header(file)
                if said != (3,) or kind.kind not in "uif":
                    raise DataError("its spacing is not three numbers", seen=f"{kind} {said}")
                z, y, x = np.frombuffer(file.read(3 * kind.itemsize), kind).tolist()
            spacing = float(z), float(y), float(x)
    return Header(shape=_three(shape), dtype=dtype, spacing=spacing)


def _of_nifti(path: Path, _: int) -> Header:
    nibabel = _nibabel()
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    with opened(path, "rb") as file:
        head = file.read(NIFTI_BYTES)
    if len(head) < 348:
        raise DataError("it ends within its header", seen=f"{len(head)} bytes")
    second = 540 in struct.unpack("<i", head[:4]) + struct.unpack(">i", head[:4])
    kind = nibabel.Nifti2Header if second else nibabel.Nifti1Header
    header = kind.from_fileobj(io.BytesIO(head[: kind.sizeof_hdr]))
    if not 0 <= float(header["vox_offset"]) <= NIFTI_OFFSET:
        raise DataError("its values begin too late", seen=float(header["vox_offset"]))
    sides = [abs(float(side)) or 1.0 for side in header.get_zooms()[:3]]
    x, y, z = [*sides, 1.0, 1.0][:3]
    shape = _three(tuple(reversed(header.get_data_shape())))
    return Header(shape=shape, dtype=header.get_data_dtype(), spacing=(z, y, x))


def _of_tiff(path: Path, _: int) -> Header:
    tifffile = importlib.import_module("tifffile")
    # `_multifile`: an OME header may name other files, which need not be the user's to show
    with tifffile.TiffFile(path, _multifile=False) as file:
        series = file.series[0]
        for page in series.pages:
            if page is not None:
                _require_strips(file, page)
        if "S" in series.axes:
            raise DataError("its pages have several channels", seen=series.axes, fix=GREY)
        return Header(shape=_three(series.shape), dtype=np.dtype(series.dtype))


def _require_strips(file: Any, page: Any) -> None:
    """Refuse a page with strips that unpack to more than its pixels: nothing bounds them later."""
    form = page.keyframe  # of the series: its other pages are as this one
    if form.compression == NOT_COMPRESSED:
        return
    if form.compression not in DEFLATED:
        raise DataError(
            "its compression is not read", seen=form.compression, fix="save it without, or deflated"
        )
    limit = form.imagewidth * form.imagelength * form.samplesperpixel * form.dtype.itemsize
    for begin, nbytes in zip(page.dataoffsets, page.databytecounts, strict=True):
        file.filehandle.seek(begin)
        inflater = zlib.decompressobj()
        inflater.decompress(file.filehandle.read(min(nbytes, MAX_FILE)), limit)
        if inflater.unconsumed_tail:
            raise DataError("a strip is larger than its page", seen=f"more than {limit:,} bytes")


_READERS = {
    ".npy": _of_npy, ".npz": _of_npz, ".nii": _of_nifti, ".nii.gz": _of_nifti,
    ".tif": _of_tiff, ".tiff": _of_tiff,
}  # fmt: skip


def _values(path: Path, suffix: str | None) -> Values:
    if suffix == ".npy":
        made = np.load(path, mmap_mode="r", allow_pickle=False)
    elif suffix == ".npz":
        with np.load(path, allow_pickle=False) as packed:
            made = packed[_member([f"{name}.npy" for name in packed.files]).removesuffix(".npy")]
    elif suffix in (".tif", ".tiff"):
        made = importlib.import_module("tifffile").imread(path, _multifile=False)
    else:  # float32 whatever is stored: labels are small whole numbers
        made = _nibabel().load(path).get_fdata(caching="unchanged", dtype=np.float32).transpose()
    return np.asarray(made).reshape(_three(made.shape))


def _nibabel() -> Any:
    try:
        return importlib.import_module("nibabel")
    except ImportError as error:
        raise UsageError(
            "NIfTI files are read by nibabel, which is not there",
            seen=os.path.basename(str(error)),
            fix="pip install 'tessella[volumes]', or save the volumes as .npy",
        ) from error
