"""The Open Inference Protocol's infer request, with Triton's binary tensors.

A body is JSON, or JSON and then the raw bytes of the tensors that name a ``binary_data_size``; the
header ``Inference-Header-Content-Length`` is the length of the JSON. Sizes, shapes and names from a
client are checked against the body and the model's signature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tessella.core.dtype import BY_WIRE, DType, dtype
from tessella.core.errors import InputError, ServeError
from tessella.core.preprocess import Preprocess
from tessella.core.spec import TensorSpec
from tessella.core.task import CLASSIFICATION, TaskRecord
from tessella.server.images import as_encoded_images
from tessella.server.limits import DEFAULT_LIMITS, Limits
from tessella.server.shared_memory import Copy, Place, Regions, is_brief
from tessella.server.strict_json import flag, object_of, objects_of, parse_object
from tessella.server.tensors import (
    as_it_comes,
    from_binary,
    from_json,
    parse_shape,
    strings_from_binary,
)
from tessella.server.waiting import DEFAULT_PRIORITY, PRIORITIES
from tessella.tasks import of
from tessella.tasks.task import Answers


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The inputs and outputs of a model, against which requests are checked.

    Attributes:
        image_input: the input that also takes encoded images, if the plan has a record.
        heads: checked JSON of requests with binary tensors alone, by its text (or, if they have
            none, by their bytes) and the limit that held: clients send the same again and again.
    """

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    labels: tuple[str, ...] = ()
    preprocess: Preprocess | None = None
    task: TaskRecord = CLASSIFICATION
    image_input: str | None = None
    heads: dict[tuple[bytes | int, int], _Head] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def answers(self) -> Answers:
        """What the model's task says to people."""
        return of(self.task).answers


def signature(
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    labels: tuple[str, ...],
    preprocess: Preprocess | None,
    task: TaskRecord = CLASSIFICATION,
) -> Signature:
    """The signature of an engine; the image input is the first of the record's shape.

    It takes normalized float32 images, or pixels as uint8.

    Raises:
        UsageError: no task of this name is there to put its answers into words.
    """
    of(task)
    image_input = None
    if preprocess is not None and preprocess.volume is None:
        kinds = {("float32", preprocess.input_shape), ("uint8", preprocess.pixel_shape)}
        fits = [s.name for s in inputs if (s.dtype, s.at(1)[1:]) in kinds]
        image_input = fits[0] if fits else None
    return Signature(
        inputs={s.name: s for s in inputs},
        outputs={s.name: s for s in outputs},
        labels=labels,
        preprocess=preprocess,
        task=task,
        image_input=image_input,
    )


@dataclass(frozen=True, kw_only=True)
class RequestedOutput:
    """An output as the client wants it; ``classification`` is the number of best classes, ``place``
    where in shared memory it goes.
    """

    name: str
    binary: bool
    classification: int | None = None
    place: Place | None = None


@dataclass(kw_only=True, slots=True)  # frozen it takes 2 µs more to make
class InferRequest:
    """A checked request: arrays and encoded images by input name, and what to answer.

    Attributes:
        labels: whether the answer names the model's labels.
        timeout_us: when an answer is of no use any more; None is never.
        priority: one of ``PRIORITIES``; the lowest runs first.
        texts: the JSON of its answer, by the model's version and the shapes of the outputs: filled
            by ``responses`` where nothing else decides it, for all requests of a head. None where
            an output goes to shared memory, among others.
    """

    id: str | None
    outputs: tuple[RequestedOutput, ...]
    labels: bool = False
    timeout_us: int | None = None
    priority: int = DEFAULT_PRIORITY
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    images: dict[str, list[bytes]] = field(default_factory=dict)
    texts: dict[tuple[str | tuple[int, ...], ...], bytes] | None = field(
        default=None, compare=False
    )

    @property
    def place_bytes(self) -> int:
        """How much room the outputs have in shared memory."""
        return sum(o.place.byte_size for o in self.outputs if o.place is not None)


@dataclass(frozen=True, kw_only=True)
class Unread:
    """A request whose tensors in shared memory are to be copied before they are looked at.

    Attributes:
        finish: makes the request, once the copies are made; raises what ``parse_infer`` does.
    """

    copies: tuple[Copy, ...]
    finish: Callable[[], InferRequest]


# --- requests -----------------------------------------------------------------------------------


NO_REGIONS = Regions(None, DEFAULT_LIMITS)


def parse_infer(
    body: bytes | bytearray | memoryview,
    header_length: bytes | None,
    model: Signature,
    limits: Limits,
    regions: Regions = NO_REGIONS,
) -> InferRequest | Unread:
    """The request in a body; or what is still to be copied for it from shared memory, if much is.

    Args:
        regions: the shared memory in which tensors may lie.
        header_length: value of ``Inference-Header-Content-Length``; None means that all is JSON, 0
            that all is the one input's raw tensor.

    Raises:
        InputError: whatever does not fit, with what was seen and what to send.
    """
    json_bytes = _json_bytes(header_length, len(body))
    if json_bytes == 0 and header_length is not None:
        head = model.heads.get((len(body), limits.body_bytes))
        if head is None:
            return _parse_raw(memoryview(body), model, limits)
        return head.request_with(memoryview(body))
    if json_bytes > limits.json_bytes:
        raise InputError(
            f"the JSON text is larger than {limits.json_bytes:,} bytes",
            seen=f"{json_bytes:,} bytes",
            fix="send the tensors as binary data (Inference-Header-Content-Length)",
        )
    text = bytes(memoryview(body)[:json_bytes])
    head = model.heads.get((text, limits.body_bytes))
    if head is not None and len(body) == json_bytes + head.nbytes:
        if not head.places:
            return head.request_with(memoryview(body)[json_bytes:])
        named = tuple(map(regions.read, head.places))
        return _when_made(named, lambda: head.request_of([copy.content for copy in named]))
    document = parse_object(text, "the request")
    parameters = object_of(document, "parameters", "the request")
    if parameters.get("sequence_id"):
        raise ServeError("sequences are not supported", status=501, fix="send no sequence_id")
    request_id = document.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise InputError("the request's id is not a string", seen=repr(request_id)[:60])
    outputs = _parse_outputs(document, parameters, model, regions)
    entries = _entries(document, model)
    sources = _sources(entries, memoryview(body)[json_bytes:], regions)

    def finish() -> InferRequest:
        arrays, images = _parse_inputs(entries, sources, model, limits)
        request = InferRequest(
            id=request_id,
            outputs=outputs,
            labels=flag(parameters, "labels", False),
            timeout_us=parse_timeout(parameters.get("timeout")),
            priority=parse_priority(parameters.get("priority")),
            arrays=arrays,
            images=images,
        )
        if request_id is None and len(text) <= MOST_HEAD_BYTES:
            _remember(text, request, document, model, limits, regions)
        return request

    return _when_made(tuple(source for source in sources if isinstance(source, Copy)), finish)


def _when_made(
    copies: tuple[Copy, ...], finish: Callable[[], InferRequest]
) -> InferRequest | Unread:
    """The request once these copies are made: now, if that is brief."""
    if not is_brief(copies):
        return Unread(copies=copies, finish=finish)
    for copy in copies:
        copy.make()
    return finish()


MOST_HEADS, MOST_HEAD_BYTES = 256, 2048  # of one model: half a megabyte at most


@dataclass(frozen=True, kw_only=True)
class _Head:
    """What the JSON of a request says when all its tensors are binary, or all in shared memory.

    Attributes:
        parts: name, element type, shape, first byte after the JSON, and bytes of each tensor.
        kinds: of their arrays, by ``as_it_comes``.
        places: of the tensors in shared memory.
    """

    request: InferRequest
    parts: tuple[tuple[str, DType, tuple[int, ...], int, int], ...]
    kinds: tuple[np.dtype | None, ...]
    nbytes: int
    places: tuple[Place, ...] = ()

    def fits(self, tensors: Sequence[memoryview]) -> bool:
        """Whether these are the tensors behind the JSON, by their sizes."""
        return not self.places and [len(t) for t in tensors] == [n for *_, n in self.parts]

    def request_with(self, tensors: memoryview) -> InferRequest:
        """The request with its tensors, which follow the JSON."""
        if len(self.parts) == 1:
            return self.request_of((tensors,))
        return self.request_of([tensors[start : start + n] for *_, start, n in self.parts])

    def request_of(self, tensors: Sequence[memoryview]) -> InferRequest:
        """The request with its tensors; written out, as ``replace`` takes thrice as long."""
        known, arrays = self.request, {}
        for part, kind, content in zip(self.parts, self.kinds, tensors, strict=True):
            name, element, shape, _, nbytes = part
            if kind is not None and len(content) == nbytes:  # as it was when this was learned
                arrays[name] = np.ndarray(shape, kind, content)
            else:
                arrays[name] = from_binary(content, element, shape, name=name)
        return InferRequest(
            id=None,
            outputs=known.outputs,
            labels=known.labels,
            timeout_us=known.timeout_us,
            priority=known.priority,
            arrays=arrays,
            texts=known.texts,
        )


def _remember(
    text: bytes,
    request: InferRequest,
    document: dict[str, Any],
    model: Signature,
    limits: Limits,
    regions: Regions,
) -> None:
    parts, places, start = [], list[Place](), 0
    for entry in document["inputs"]:
        parameters = entry.get("parameters", {})
        if entry["name"] not in request.arrays:
            return
        if place := regions.place(parameters, ""):
            places.append(place)
            nbytes = 0
        elif (nbytes := parameters.get("binary_data_size")) is None:
            return
        kind = BY_WIRE[entry["datatype"]], tuple(entry["shape"])
        parts.append((entry["name"], *kind, start, nbytes))
        start += nbytes
    if not places or len(places) == len(parts):
        _keep(text, request, tuple(parts), model, limits, tuple(places))


def _keep(
    key: bytes | int,
    request: InferRequest,
    parts: tuple[tuple[str, DType, tuple[int, ...], int, int], ...],
    model: Signature,
    limits: Limits,
    places: tuple[Place, ...] = (),
) -> None:
    if len(model.heads) >= MOST_HEADS:
        model.heads.clear()
    plain = all(o.binary and o.place is None and o.classification is None for o in request.outputs)
    empty = replace(request, arrays={}, texts={} if plain else None)
    nbytes = sum(nbytes for *_, nbytes in parts)
    model.heads[key, limits.body_bytes] = _Head(
        request=empty,
        parts=parts,
        kinds=tuple(None if places else as_it_comes(element) for _, element, *_ in parts),
        nbytes=nbytes,
        places=places,
    )


def parse_timeout(value: Any) -> int | None:
    """Microseconds within which an answer is of use; 0, as some clients send it, is no limit."""
    if value is not None and (type(value) is not int or not 0 <= value < 1 << 48):
        raise InputError(
            "timeout is not a number of microseconds", seen=repr(value)[:40], fix="send 20000"
        )
    return value or None


def parse_priority(value: Any) -> int:
    """One of ``PRIORITIES``; 0, as some clients send it, is the default."""
    if value is None or value == 0:
        return DEFAULT_PRIORITY
    if type(value) is not int or value not in PRIORITIES:
        raise InputError(
            "there is no such priority",
            seen=repr(value)[:40],
            fix=f"send one of {PRIORITIES}; {PRIORITIES[0]} goes first",
        )
    return value


def _json_bytes(header_length: bytes | None, body_bytes: int) -> int:
    if header_length is None:
        return body_bytes
    if not header_length.isdigit() or len(header_length) > 12 or int(header_length) > body_bytes:
        raise InputError(
            "Inference-Header-Content-Length does not fit the body",
            seen=f"{header_length[:40].decode('latin-1')!r}, the body has {body_bytes:,} bytes",
            fix="send the number of bytes of the JSON at the start of the body",
        )
    return int(header_length)


def _parse_outputs(
    document: dict[str, Any], parameters: dict[str, Any], model: Signature, regions: Regions
) -> tuple[RequestedOutput, ...]:
    binary = flag(parameters, "binary_data_output", False)
    asked = objects_of(document, "outputs")
    if not asked:
        return tuple(RequestedOutput(name=n, binary=binary) for n in model.outputs)
    outputs = []
    for entry in asked:
        name = entry["name"]
        if name not in model.outputs:
            raise InputError(
                f"the model has no output {name[:80]!r}", fix=f"ask for {', '.join(model.outputs)}"
            )
        own = object_of(entry, "parameters", f"output {name!r}")
        count = own.get("classification")
        if count is not None and (type(count) is not int or count < 0):
            raise InputError(
                f"classification of output {name!r} is not a number of classes",
                seen=repr(count)[:40],
            )
        outputs.append(
            RequestedOutput(
                name=name,
                binary=flag(own, "binary_data", binary) or "shared_memory_region" in own,
                classification=count or None,  # 0 is how some clients say "no"
                place=regions.place(own, f"output {name!r}"),
            )
        )
    return tuple(outputs)


def _entries(document: dict[str, Any], model: Signature) -> list[dict[str, Any]]:
    """The inputs of a request: just those of the model."""
    entries = objects_of(document, "inputs")
    if {e["name"] for e in entries} != set(model.inputs):
        raise InputError(
            "the request does not give the model's inputs",
            seen=repr([e["name"] for e in entries])[:120],
            fix=f"send {'; '.join(str(s) for s in model.inputs.values())}",
        )
    return entries


def _sources(
    entries: list[dict[str, Any]], binary: memoryview, regions: Regions
) -> list[memoryview | Copy | None]:
    """Where the bytes of each input are: in the body, in shared memory, or, as None, in its JSON.

    Args:
        binary: what follows the JSON.
    """
    sources: list[memoryview | Copy | None] = []
    position = 0
    for entry in entries:
        name = entry["name"]
        parameters = object_of(entry, "parameters", f"input {name!r}")
        if place := regions.place(parameters, f"input {name!r}"):
            _refuse_two_sources(entry, parameters)
            sources.append(regions.read(place))
        elif "binary_data_size" in parameters:
            part = _binary_part(entry, parameters["binary_data_size"], binary[position:])
            sources.append(part)
            position += len(part)
        else:
            sources.append(None)
    if position != len(binary):
        raise InputError(
            "the body holds bytes that belong to no input",
            seen=f"{len(binary) - position:,} bytes after the last tensor",
            fix="name every tensor's bytes in its binary_data_size",
        )
    return sources


def _parse_inputs(
    entries: list[dict[str, Any]],
    sources: list[memoryview | Copy | None],
    model: Signature,
    limits: Limits,
) -> tuple[dict[str, np.ndarray], dict[str, list[bytes]]]:
    arrays: dict[str, np.ndarray] = {}
    images: dict[str, list[bytes]] = {}
    for entry, source in zip(entries, sources, strict=True):
        content = source.content if isinstance(source, Copy) else source
        value = _parse_tensor(entry, content, model, limits)
        if isinstance(value, list):
            images[entry["name"]] = value
        else:
            arrays[entry["name"]] = value
    _check_batch(arrays, images)
    return arrays, images


def _refuse_two_sources(entry: dict[str, Any], parameters: dict[str, Any]) -> None:
    if "data" in entry or "binary_data_size" in parameters:
        raise InputError(
            f"input {entry['name']!r} is in shared memory and in the body",
            fix="send it once",
        )


def _binary_part(entry: dict[str, Any], nbytes: Any, rest: memoryview) -> memoryview:
    if type(nbytes) is not int or not 0 <= nbytes <= len(rest) or "data" in entry:
        raise InputError(
            f"binary_data_size of input {entry['name']!r} does not fit the body",
            seen=f"{nbytes!r:.40}, {len(rest):,} bytes are left"
            + (", and there is data in the JSON too" if "data" in entry else ""),
            fix="append the tensors after the JSON in the order of the inputs and name each size",
        )
    return rest[:nbytes]


def _parse_tensor(
    entry: dict[str, Any], content: memoryview | None, model: Signature, limits: Limits
) -> np.ndarray | list[bytes]:
    name = entry["name"]
    spec = model.inputs[name]
    shape = parse_shape(entry.get("shape"), name=name)
    datatype = entry.get("datatype")
    if datatype == "BYTES":
        return _parse_images(entry, content, shape, model, limits)
    element = BY_WIRE.get(datatype) if isinstance(datatype, str) else None
    if element is None:
        raise InputError(
            f"input {name!r} has an unknown datatype",
            seen=repr(datatype)[:40],
            fix=f"send {dtype(spec.dtype).wire}",
        )
    spec.check(shape=shape, dtype=element.name)
    check_tensor_bytes(spec, shape[0], limits)
    if content is not None:
        return from_binary(content, element, shape, name=name)
    return from_json(entry.get("data"), element, shape, name=name)


def check_tensor_bytes(spec: TensorSpec, batch: int, limits: Limits) -> None:
    """Raise ``InputError`` if a batch would take more memory than a body may."""
    if spec.nbytes(batch) > limits.body_bytes:
        raise InputError(
            f"input {spec.name!r} is too large",
            seen=f"batch {batch:,}: {spec.nbytes(batch):,} bytes",
            fix=f"send at most {limits.body_bytes // spec.nbytes(1):,} samples in one request",
        )


def _parse_images(
    entry: dict[str, Any],
    content: memoryview | None,
    shape: tuple[int, ...],
    model: Signature,
    limits: Limits,
) -> list[bytes]:
    """The files of a BYTES tensor of shape [n] or [n, 1]."""
    name = entry["name"]
    spec = model.inputs[name]
    if name != model.image_input:
        raise InputError(
            f"input {name!r} takes no encoded images",
            seen="BYTES",
            fix=f"send {spec} as {dtype(spec.dtype).wire}",
        )
    if len(shape) > 2 or shape[1:] not in ((), (1,)):
        raise InputError(
            f"encoded images of input {name!r} have the wrong shape",
            seen=list(shape),
            fix="send shape [n], one file an element",
        )
    # Small files can unfold into large tensors: the tensor's size is what counts.
    check_tensor_bytes(spec, shape[0], limits)
    if content is not None:
        return strings_from_binary(content, shape[0], name=name)
    return as_encoded_images(entry.get("data"), shape, name=name)


def _check_batch(arrays: dict[str, np.ndarray], images: dict[str, list[bytes]]) -> None:
    batches = {n: len(a) for n, a in arrays.items()} | {n: len(f) for n, f in images.items()}
    if len(set(batches.values())) > 1:
        raise InputError("the inputs have different batch sizes", seen=batches)


def _parse_raw(content: memoryview, model: Signature, limits: Limits) -> InferRequest:
    """A body that is nothing but the one input's bytes; all outputs are answered in binary."""
    if len(model.inputs) != 1:
        raise InputError(
            "a raw body needs a model with one input",
            seen=list(model.inputs),
            fix="name the inputs in JSON (Inference-Header-Content-Length above 0)",
        )
    spec = next(iter(model.inputs.values()))
    batch = max(1, len(content) // spec.nbytes(1))
    check_tensor_bytes(spec, batch, limits)
    shape = spec.at(batch)
    spec.check(shape=shape, dtype=spec.dtype)
    array = from_binary(content, dtype(spec.dtype), shape, name=spec.name)
    outputs = tuple(RequestedOutput(name=n, binary=True) for n in model.outputs)
    request = InferRequest(id=None, outputs=outputs, arrays={spec.name: array})
    nbytes = len(content)
    _keep(nbytes, request, ((spec.name, dtype(spec.dtype), shape, 0, nbytes),), model, limits)
    return request
