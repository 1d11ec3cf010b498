"""gRPC: ``tritonclient[grpc]`` as a real client, and clients that lie."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

from tessella.core.open_inference import MESSAGES, SERVICE
from tessella.server import Doors, Limits, Server, grpc_front
from tests.support.engines import LABELS, Echo, Pair, Scores, expected_scores, repository

IMAGES = np.random.default_rng(1).normal(size=(3, 3, 8, 8)).astype(np.float32)
TOKEN = "a token of a test, long enough"
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    models = repository({"flowers": Scores(), "pair": Pair(), "echo": Echo()})
    with Server(models, doors=Doors(grpc_port=0), token=TOKEN) as running:
        yield running


class Client(triton.InferenceServerClient):
    """With the token in every call."""

    def __getattribute__(self, name: str):
        found = super().__getattribute__(name)
        if name.startswith(("infer", "get_", "is_", "load", "unload")):
            return lambda *a, **k: found(
                *a, **{"headers": {"authorization": f"Bearer {TOKEN}"}} | k
            )
        return found


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    running = Client(server.grpc_address)
    yield running
    running.close()


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc_address) as opened:
        yield opened


def image_input(array: np.ndarray = IMAGES) -> triton.InferInput:
    tensor = triton.InferInput("image", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    return tensor


def test_our_messages_have_the_fields_of_the_specification() -> None:
    """Every field: number, type, repeated or not, as in the client's own compiled messages."""

    def fields(message):
        return {f.name: f for f in message.fields}

    def compare(ours, theirs) -> None:
        known = fields(theirs)
        for name, field in fields(ours).items():
            other = known[name]
            assert (field.number, field.type, field.is_repeated) == (
                other.number,
                other.type,
                other.is_repeated,
            ), (ours.name, name)
            if field.enum_type is not None:
                values = {v.name: v.number for v in other.enum_type.values}
                assert {v.name: v.number for v in field.enum_type.values}.items() <= values.items()
            if field.message_type is not None and ours.full_name not in seen:
                compare(field.message_type, other.message_type)
        seen.add(ours.full_name)

    seen: set[str] = set()
    for name in grpc_front.ROUTES | {"ModelInfer": None}:
        for end in ("Request", "Response"):
            theirs = service_pb2.DESCRIPTOR.message_types_by_name[name + end]
            compare(MESSAGES[name + end].DESCRIPTOR, theirs)
    compare(
        MESSAGES["ModelConfig"].DESCRIPTOR,
        model_config_pb2.DESCRIPTOR.message_types_by_name["ModelConfig"],
    )
    assert len(seen) > 30


def test_health_metadata_config_index(client: Client, channel: grpc.Channel) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("flowers", "1")
    assert not client.is_model_ready("flowers", "2")
    assert not client.is_model_ready("../flowers")
    assert "binary_tensor_data" in client.get_server_metadata().extensions
    metadata = client.get_model_metadata("flowers", as_json=True)
    assert metadata["inputs"] == [
        {"name": "image", "datatype": "FP32", "shape": ["-1", "3", "8", "8"]}
    ]
    config = client.get_model_config("flowers").config
    assert (config.max_batch_size, list(config.input[0].dims)) == (8, [3, 8, 8])
    assert config.dynamic_batching.priority_levels == 3
    states = {m.name: m.state for m in client.get_model_repository_index().models}
    assert states == {"flowers": "READY", "pair": "READY", "echo": "READY"}
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    assert check(b"", timeout=50) == b"\x08\x01"


def test_inference(client: Client) -> None:
    result = client.infer("flowers", [image_input()], request_id="seven", model_version="1")
    assert result.get_response().id == "seven"
    np.testing.assert_allclose(result.as_numpy("scores"), expected_scores(IMAGES), rtol=1e-4)
    wanted = triton.InferRequestedOutput("scores", class_count=2)
    rows = client.infer("flowers", [image_input()], outputs=[wanted]).as_numpy("scores")
    best = np.argsort(-expected_scores(IMAGES), axis=1)
    assert [[t.decode().split(":", 2)[2] for t in row] for row in rows] == [
        [LABELS[i] for i in order[:2]] for order in best
    ]


def test_contents_instead_of_raw_bytes(channel: grpc.Channel) -> None:
    infer = channel.unary_unary(
        f"/{SERVICE}/ModelInfer",
        request_serializer=lambda m: m.SerializeToString(),
        response_deserializer=service_pb2.ModelInferResponse.FromString,
    )
    metadata = (("authorization", f"Bearer {TOKEN}"),)

    def asked(**numbers: list[int]) -> service_pb2.ModelInferRequest:
        request = service_pb2.ModelInferRequest(model_name="pair")
        a = request.inputs.add(name="a", datatype="FP32", shape=[1, 2, 3])
        a.contents.fp32_contents.extend([0.5, 1, 2, 3, 4, 5])
        b = request.inputs.add(name="b", datatype="INT32", shape=[1, 2, 3])
        for field, values in numbers.items():
            getattr(b.contents, field).extend(values)
        return request

    answer = infer(asked(int_contents=[1, 2, 3, 4, 5, -6]), metadata=metadata, timeout=60)
    outputs = dict(zip((o.name for o in answer.outputs), answer.raw_output_contents, strict=True))
    assert np.frombuffer(outputs["total"], np.int32).tolist() == [1, 3, 5, 7, 9, -1]
    both = asked(int_contents=[1] * 6)
    both.raw_input_contents.append(bytes(24))
    for wrong, told in (
        (asked(int_contents=[1, 2]), "wrong number of bytes"),
        (asked(int64_contents=[1] * 6), "another datatype"),
        (asked(), "wrong number of bytes"),
        (both, "given twice"),
    ):
        with pytest.raises(grpc.RpcError, match=told) as caught:
            infer(wrong, metadata=metadata, timeout=60)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_stream_answers_in_order_and_errors_are_answers(client: Client) -> None:
    answers: queue.Queue = queue.Queue()
    client.start_stream(
        lambda result, error: answers.put((result, error)),
        headers={"authorization": f"Bearer {TOKEN}"},
    )
    for scale in (1, 2):
        client.async_stream_infer("flowers", [image_input(scale * IMAGES)])
    client.async_stream_infer("weeds", [image_input()])
    for scale in (1, 2):
        result, error = answers.get(timeout=60)
        assert error is None
        np.testing.assert_allclose(
            result.as_numpy("scores"), scale * expected_scores(IMAGES), rtol=1e-4
        )
    assert "no such model" in str(answers.get(timeout=60)[1])
    client.stop_stream()


def until(condition: Callable[[], bool]) -> None:
    """As soon as the server shows it; the limit of a test is that of waiting."""
    while not condition():
        time.sleep(0.005)


def test_priorities_and_time_that_suffices(client: Client) -> None:
    result = client.infer("flowers", [image_input()], priority=1, client_timeout=50)
    np.testing.assert_allclose(result.as_numpy("scores"), expected_scores(IMAGES), rtol=1e-4)
    with pytest.raises(InferenceServerException, match="no such priority"):
        client.infer("flowers", [image_input()], priority=4)


def test_who_gives_up_is_not_computed_for() -> None:
    """A call that waits behind a running batch when its client leaves. An engine that was never
    timed runs in its own thread, so that the event loop hears of it; ``test_http2`` has calls whose
    deadline the server sees pass.
    """
    engine = Scores()
    engine.gate = threading.Event()
    models = repository({"flowers": engine})
    told: queue.Queue[object] = queue.Queue()

    def begin(client: triton.InferenceServerClient) -> object:
        return client.async_infer(
            "flowers", [image_input()], lambda result, error: told.put(error), client_timeout=50
        )

    with Server(models, doors=Doors(grpc_port=0)) as running:
        statistics = models.get("flowers").statistics
        with triton.InferenceServerClient(running.grpc_address) as client:
            try:
                begin(client)
                until(lambda: engine.batches == [3])
                call = begin(client)
                until(lambda: statistics.waiting == 1)
                call.cancel()
                assert "CANCELLED" in str(told.get(timeout=50))
                until(lambda: statistics.waiting == 0)
            finally:
                engine.gate.set()
            assert told.get(timeout=50) is None
            client.infer("flowers", [image_input()])
    assert engine.batches == [3, 3], "nobody computes for a client that gave up"


def test_tokens(server: Server, client: Client) -> None:
    with triton.InferenceServerClient(server.grpc_address) as stranger:
        assert stranger.is_server_ready(), "probes know no token"
        for wrong in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}):
            for call in (
                lambda headers: stranger.infer("flowers", [image_input()], headers=headers),
                lambda headers: stranger.get_model_metadata("flowers", headers=headers),
                lambda headers: stranger.unload_model("flowers", headers=headers),
            ):
                with pytest.raises(InferenceServerException, match="token") as caught:
                    call(wrong)
                assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
    assert client.is_model_ready("flowers")


def test_statistics_load_and_unload(client: Client) -> None:
    before = client.get_inference_statistics("flowers").model_stats[0]
    client.infer("flowers", [image_input()])
    after = client.get_inference_statistics("flowers").model_stats[0]
    assert after.inference_count - before.inference_count == 3
    assert after.inference_stats.success.count - before.inference_stats.success.count == 1
    client.unload_model("pair")
    assert not client.is_model_ready("pair")
    client.load_model("pair")
    assert client.is_model_ready("pair")
    with pytest.raises(InferenceServerException, match="from its plan alone"):
        client.load_model("pair", config="{}")


def test_what_lies_is_refused_and_harms_nobody(client: Client, channel: grpc.Channel) -> None:
    metadata = (("authorization", f"Bearer {TOKEN}"),)
    call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
    raw = service_pb2.ModelInferRequest(model_name="flowers")
    raw.inputs.add(name="image", datatype="FP32", shape=[1 << 40, 3, 8, 8])
    raw.raw_input_contents.append(bytes(100))
    short = service_pb2.ModelInferRequest(model_name="flowers")
    short.inputs.add(name="image", datatype="FP32", shape=[1, 3, 8, 8])
    extra = service_pb2.ModelInferRequest()
    extra.CopyFrom(short)
    extra.raw_input_contents.extend([bytes(768), b"more"])
    kind = service_pb2.ModelInferRequest()
    kind.CopyFrom(short)
    kind.inputs[0].datatype = "INT8"
    kind.raw_input_contents.append(bytes(192))
    lying = service_pb2.ModelInferRequest()
    lying.CopyFrom(short)
    lying.inputs[0].parameters["binary_data_size"].int64_param = 1 << 40
    lying.raw_input_contents.append(bytes(700))
    for body in (
        b"", b"\xff\xff\xff\xff\xff", b"\n\xff\xff\xff\xff\x0f", raw.SerializeToString(),
        short.SerializeToString(), extra.SerializeToString(), kind.SerializeToString(),
        lying.SerializeToString(),
        service_pb2.ModelInferRequest(model_name="a/../b%2f").SerializeToString(),
    ):  # fmt: skip
        with pytest.raises(grpc.RpcError) as caught:
            call(body, metadata=metadata, timeout=60)
        assert caught.value.code() in (
            grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND,
        )  # fmt: skip
    with pytest.raises(grpc.RpcError) as caught:
        call(bytes(grpc_front.MOST_MESSAGE_BYTES + 1), metadata=metadata, timeout=60)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/CudaSharedMemoryRegister")(b"", timeout=50)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert client.infer("flowers", [image_input()]).as_numpy("scores").shape == (3, 4)


def test_messages_count_among_the_bytes_that_are_held() -> None:
    limits = Limits(held_bytes=3 * IMAGES.nbytes)
    engine = Scores()
    models = repository({"flowers": engine}, limits=limits)
    with Server(models, limits=limits, doors=Doors(grpc_port=0)) as running:
        with triton.InferenceServerClient(running.grpc_address) as client:
            for _ in range(5):  # they fit, one after the other
                client.infer("flowers", [image_input()])
            with pytest.raises(InferenceServerException, match="as many request bytes") as caught:
                client.infer("flowers", [image_input(np.concatenate([IMAGES] * 3))])
            assert "UNAVAILABLE" in caught.value.status()
            client.infer("flowers", [image_input()])
    assert engine.batches == [3] * 6
