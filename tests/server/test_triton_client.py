"""A real client, ``tritonclient[http]``, against a live server."""

from __future__ import annotations

import io
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
from PIL import Image
from tritonclient.utils import InferenceServerException

from tessella.core.dtype import DTYPES
from tessella.server import Server
from tests.support.engines import LABELS, RECORD, Scores, expected_scores

IMAGES = np.random.default_rng(1).normal(size=(3, 3, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    running = triton.InferenceServerClient(server.url.removeprefix("http://"))
    yield running
    running.close()


def image_input(array: np.ndarray, *, binary: bool, datatype: str = "FP32") -> triton.InferInput:
    tensor = triton.InferInput("image", list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def test_health_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("flowers")
    assert client.is_model_ready("flowers", "1")
    assert not client.is_model_ready("flowers", "2")
    assert not client.is_model_ready("weeds")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata("flowers", "1")
    assert metadata["name"] == "flowers"
    assert metadata["versions"] == ["1"]
    assert metadata["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 3, 8, 8]}]
    assert metadata["outputs"] == [{"name": "scores", "datatype": "FP32", "shape": [-1, 4]}]


def test_config(client: triton.InferenceServerClient) -> None:
    config = client.get_model_config("flowers")
    assert config["max_batch_size"] == 8
    assert config["input"] == [{"name": "image", "data_type": "TYPE_FP32", "dims": [3, 8, 8]}]
    assert config["parameters"]["preprocess_hash"] == {"string_value": RECORD.hash}


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
def test_infer_in_all_forms(
    client: triton.InferenceServerClient, binary_in: bool, binary_out: bool | None
) -> None:
    outputs = None  # the client then asks for all outputs in binary
    if binary_out is not None:
        outputs = [triton.InferRequestedOutput("scores", binary_data=binary_out)]
    result = client.infer(
        "flowers", [image_input(IMAGES, binary=binary_in)], outputs=outputs, request_id="seven"
    )
    assert result.get_response()["id"] == "seven"
    assert ("data" in result.get_output("scores")) == (binary_out is False)
    np.testing.assert_allclose(result.as_numpy("scores"), expected_scores(IMAGES), rtol=1e-4)


def test_priority_and_timeout(client: triton.InferenceServerClient) -> None:
    tensor = image_input(IMAGES, binary=True)
    for settings in ({"priority": 1}, {"timeout": 10**7}, {"priority": 3, "timeout": 0}):
        result = client.infer("flowers", [tensor], **settings)
        np.testing.assert_allclose(result.as_numpy("scores"), expected_scores(IMAGES), rtol=1e-4)
    with pytest.raises(InferenceServerException, match="no such priority"):
        client.infer("flowers", [tensor], priority=4)
    with pytest.raises(InferenceServerException, match="no time to answer"):
        client.infer("flowers", [tensor], timeout=1)
    config = client.get_model_config("flowers")["dynamic_batching"]
    assert (config["priority_levels"], config["default_priority_level"]) == (3, 2)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_compression_both_ways(
    client: triton.InferenceServerClient, algorithm: str, binary: bool
) -> None:
    images = np.tile(IMAGES, (100, 1, 1, 1))
    result = client.infer(
        "flowers",
        [image_input(images, binary=binary)],
        outputs=[triton.InferRequestedOutput("scores", binary_data=binary)],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    np.testing.assert_allclose(result.as_numpy("scores"), expected_scores(images), rtol=1e-4)


def test_two_inputs_of_two_types_one_of_them_binary(client: triton.InferenceServerClient) -> None:
    a = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    b = np.arange(12, dtype=np.int32).reshape(2, 2, 3)
    inputs = [triton.InferInput("b", [2, 2, 3], "INT32"), triton.InferInput("a", [2, 2, 3], "FP32")]
    inputs[0].set_data_from_numpy(b, binary_data=False)
    inputs[1].set_data_from_numpy(a, binary_data=True)
    wanted = [
        triton.InferRequestedOutput("same", binary_data=False),
        triton.InferRequestedOutput("total", binary_data=True),
    ]
    result = client.infer("pair", inputs, outputs=wanted)
    assert (result.as_numpy("total") == b + a.astype(np.int32)).all()
    assert (result.as_numpy("same") == a).all()


def test_every_datatype_that_the_client_knows(client: triton.InferenceServerClient) -> None:
    rng = np.random.default_rng(5)
    sent, inputs = {}, []
    for name, element in DTYPES.items():
        numpy_type = ml_dtypes.bfloat16 if name == "bfloat16" else element.numpy
        if name == "float8_e4m3fn":  # the client has no name for it: send its bytes by hand
            array = np.array([[0x38, 0x40, 0xC0]], np.uint8)  # 1, 2, −2
        else:
            array = rng.integers(0, 2, size=(1, 3)).astype(numpy_type)
        sent[name] = array
        tensor = triton.InferInput(f"in_{name}", [1, 3], element.wire)
        tensor._raw_data = array.tobytes()
        tensor._parameters["binary_data_size"] = array.nbytes
        inputs.append(tensor)
    result = client.infer("echo", inputs)
    start = result._output_name_to_buffer_map
    for name, array in sent.items():
        first = start[f"out_{name}"]
        assert result._buffer[first : first + array.nbytes] == array.tobytes(), name
        if name != "float8_e4m3fn":
            assert (result.as_numpy(f"out_{name}") == array).all()


@pytest.mark.parametrize("binary", [True, False])
def test_classification(client: triton.InferenceServerClient, binary: bool) -> None:
    wanted = triton.InferRequestedOutput("scores", binary_data=binary, class_count=2)
    result = client.infer("flowers", [image_input(IMAGES, binary=True)], outputs=[wanted])
    answers = result.as_numpy("scores")
    assert answers.shape == (3, 2)
    reference = expected_scores(IMAGES)
    for row, scores in zip(answers, reference, strict=True):
        order = np.argsort(-scores)[:2]
        for text, index in zip(row, order, strict=True):
            text = text.decode() if isinstance(text, bytes) else text
            score, position, label = text.split(":", 2)
            assert (int(position), label) == (index, LABELS[index])
            assert float(score) == pytest.approx(scores[index], rel=1e-4)


def encoded(pixels: np.ndarray, kind: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_images_as_files(client: triton.InferenceServerClient, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    sizes = [(8, 8), (20, 31), (5, 90)]
    kinds = ["PNG", "JPEG", "WEBP"]
    pictures = [rng.integers(0, 256, size=(*s, 3), dtype=np.uint8) for s in sizes]
    files = [encoded(p, k) for p, k in zip(pictures, kinds, strict=True)]
    tensor = triton.InferInput("image", list(shape), "BYTES")
    tensor.set_data_from_numpy(np.array(files, dtype=np.object_).reshape(shape), binary_data=True)
    result = client.infer("flowers", [tensor])
    prepared = np.stack([RECORD(f) for f in files])
    np.testing.assert_allclose(result.as_numpy("scores"), expected_scores(prepared), rtol=1e-4)
    # The PNG has the network's size: its preparation can be told in one line, independently.
    by_hand = (pictures[0].transpose(2, 0, 1) / 255 - 0.5) / 0.25
    np.testing.assert_allclose(
        result.as_numpy("scores")[:1], expected_scores(by_hand[None]), rtol=1e-4
    )


def test_statistics_count_what_happened(client: triton.InferenceServerClient) -> None:
    before = client.get_inference_statistics("flowers")["model_stats"][0]
    client.infer("flowers", [image_input(IMAGES, binary=True)])
    with pytest.raises(InferenceServerException):
        client.infer("flowers", [image_input(IMAGES[:, :2], binary=True)])
    after = client.get_inference_statistics("flowers", "1")["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == 3
    assert after["execution_count"] - before["execution_count"] == 1
    for key in ("success", "fail", "queue", "compute_infer"):
        was, now = before["inference_stats"][key], after["inference_stats"][key]
        assert now["count"] - was["count"] == 1, key
        assert now["ns"] > was["ns"], key
    assert {s["name"] for s in client.get_inference_statistics()["model_stats"]} == {
        "flowers",
        "pair",
        "echo",
    }


def test_errors_reach_the_client_as_text(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match=r"wrong shape.*Seen.*To do") as caught:
        client.infer("flowers", [image_input(IMAGES[:, :2], binary=True)])
    assert caught.value.status() == "400"
    with pytest.raises(InferenceServerException, match="no such model"):
        client.infer("weeds", [image_input(IMAGES, binary=True)])


def test_index_unload_load(client: triton.InferenceServerClient, scores: Scores) -> None:
    def states() -> dict[str, str]:
        return {m["name"]: m["state"] for m in client.get_model_repository_index()}

    assert states() == {"flowers": "READY", "pair": "READY", "echo": "READY"}
    client.unload_model("flowers")
    assert states()["flowers"] == "UNAVAILABLE"
    assert not client.is_model_ready("flowers")
    assert scores.closed
    with pytest.raises(InferenceServerException, match="not ready"):
        client.infer("flowers", [image_input(IMAGES, binary=True)])
    scores.closed = False
    client.load_model("flowers")
    assert states()["flowers"] == "READY"
    result = client.infer("flowers", [image_input(IMAGES, binary=True)])
    np.testing.assert_allclose(result.as_numpy("scores"), expected_scores(IMAGES), rtol=1e-4)


def test_a_load_takes_neither_configuration_nor_files(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="from its plan alone"):
        client.load_model("flowers", config="{}", files={"file:1/model.plan": b"x"})
    with pytest.raises(InferenceServerException, match="no such model"):
        client.load_model("unheard_of")
