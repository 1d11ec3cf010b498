"""The messages of the Open Inference Protocol over gRPC, made when this module is imported.

Names, numbers and types of fields are those of the protocol's public specification and of Triton's
extensions of it (model configuration, statistics, repository, system shared memory), as far as we
answer them; what a client sends beside these is passed over, as protobuf has it. They live in a
pool of their own, so that a client library in the same process can have its own.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "inference.GRPCInferenceService"

# A message a row: its fields as NAME:NUMBER:TYPE; "*" is repeated, "map<…>" has strings as keys.
_PARAMETERS = "parameters:{}:map<InferParameter>"
_TENSOR = "name:1:string datatype:2:string shape:3:int64* " + _PARAMETERS.format(4)
_NAMED = "name:1:string version:2:string"
_CHANGED = "repository_name:1:string model_name:2:string parameters:3:map<ModelRepositoryParameter>"
_SPENT = " ".join(
    f"{name}:{{{i}}}:StatisticDuration"
    for i, name in enumerate(("compute_input", "compute_infer", "compute_output"))
)
_MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live:1:bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready:1:bool",
    "ModelReadyRequest": _NAMED,
    "ModelReadyResponse": "ready:1:bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": _NAMED + " extensions:3:string*",
    "ModelMetadataRequest": _NAMED,
    "TensorMetadata": "name:1:string datatype:2:string shape:3:int64*",
    "ModelMetadataResponse": "name:1:string versions:2:string* platform:3:string"
    " inputs:4:TensorMetadata* outputs:5:TensorMetadata*",
    "InferParameter": "bool_param:1:bool int64_param:2:int64 string_param:3:string"
    " double_param:4:double uint64_param:5:uint64",
    "InferTensorContents": "bool_contents:1:bool* int_contents:2:int32* int64_contents:3:int64*"
    " uint_contents:4:uint32* uint64_contents:5:uint64* fp32_contents:6:float*"
    " fp64_contents:7:double* bytes_contents:8:bytes*",
    "InferInputTensor": _TENSOR + " contents:5:InferTensorContents",
    "InferRequestedOutputTensor": "name:1:string " + _PARAMETERS.format(2),
    "ModelInferRequest": "model_name:1:string model_version:2:string id:3:string "
    + _PARAMETERS.format(4)
    + " inputs:5:InferInputTensor* outputs:6:InferRequestedOutputTensor*"
    " raw_input_contents:7:bytes*",
    "InferOutputTensor": _TENSOR + " contents:5:InferTensorContents",
    "ModelInferResponse": "model_name:1:string model_version:2:string id:3:string "
    + _PARAMETERS.format(4)
    + " outputs:5:InferOutputTensor* raw_output_contents:6:bytes*",
    "ModelStreamInferResponse": "error_message:1:string infer_response:2:ModelInferResponse",
    "ModelConfigRequest": _NAMED,
    "Latest": "num_versions:1:uint32",
    "ModelVersionPolicy": "latest:1:Latest",
    "ModelInput": "name:1:string data_type:2:DataType dims:4:int64*",
    "ModelOutput": "name:1:string data_type:2:DataType dims:3:int64*",
    "ModelInstanceGroup": "name:1:string kind:4:Kind count:2:int32",
    "ModelDynamicBatching": "max_queue_delay_microseconds:2:uint64 priority_levels:4:uint64"
    " default_priority_level:5:uint64",
    "ModelParameter": "string_value:1:string",
    "ModelConfig": "name:1:string platform:2:string backend:17:string"
    " version_policy:3:ModelVersionPolicy max_batch_size:4:int32 input:5:ModelInput*"
    " output:6:ModelOutput* dynamic_batching:11:ModelDynamicBatching"
    " instance_group:7:ModelInstanceGroup* parameters:14:map<ModelParameter>",
    "ModelConfigResponse": "config:1:ModelConfig",
    "ModelStatisticsRequest": _NAMED,
    "StatisticDuration": "count:1:uint64 ns:2:uint64",
    "InferStatistics": "success:1:StatisticDuration fail:2:StatisticDuration"
    f" queue:3:StatisticDuration {_SPENT.format(4, 5, 6)} cache_hit:7:StatisticDuration"
    " cache_miss:8:StatisticDuration",
    "InferBatchStatistics": "batch_size:1:uint64 " + _SPENT.format(2, 3, 4),
    "ModelStatistics": _NAMED + " last_inference:3:uint64 inference_count:4:uint64"
    " execution_count:5:uint64 inference_stats:6:InferStatistics"
    " batch_stats:7:InferBatchStatistics*",
    "ModelStatisticsResponse": "model_stats:1:ModelStatistics*",
    "RepositoryIndexRequest": "repository_name:1:string ready:2:bool",
    "ModelIndex": "name:1:string version:2:string state:3:string reason:4:string",
    "RepositoryIndexResponse": "models:1:ModelIndex*",
    "ModelRepositoryParameter": "bool_param:1:bool int64_param:2:int64 string_param:3:string"
    " bytes_param:4:bytes",
    "RepositoryModelLoadRequest": _CHANGED,
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": _CHANGED,
    "RepositoryModelUnloadResponse": "",
    "SystemSharedMemoryStatusRequest": "name:1:string",
    "RegionStatus": "name:1:string key:2:string offset:3:uint64 byte_size:4:uint64",
    "SystemSharedMemoryStatusResponse": "regions:1:map<RegionStatus>",
    "SystemSharedMemoryRegisterRequest": "name:1:string key:2:string offset:3:uint64"
    " byte_size:4:uint64",
    "SystemSharedMemoryRegisterResponse": "",
    "SystemSharedMemoryUnregisterRequest": "name:1:string",
    "SystemSharedMemoryUnregisterResponse": "",
}
_ENUMS = {
    "DataType": (
        "TYPE_INVALID", "TYPE_BOOL", "TYPE_UINT8", "TYPE_UINT16", "TYPE_UINT32", "TYPE_UINT64",
        "TYPE_INT8", "TYPE_INT16", "TYPE_INT32", "TYPE_INT64", "TYPE_FP16", "TYPE_FP32",
        "TYPE_FP64", "TYPE_STRING", "TYPE_BF16",
    ),
    "Kind": ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"),
}  # fmt: skip

_FIELD = descriptor_pb2.FieldDescriptorProto


def _described() -> Any:
    """The file that a compiler of protobuf would make of the tables."""
    file = descriptor_pb2.FileDescriptorProto(
        name="open_inference.proto", package="inference", syntax="proto3"
    )
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, row in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in row.split():
            _add_field(message, *text.split(":"))
        if name in ("InferParameter", "ModelRepositoryParameter"):
            message.oneof_decl.add(name="parameter_choice")
            for field in message.field:
                field.oneof_index = 0
    return file


def _add_field(message: Any, name: str, number: str, kind: str) -> None:
    field = message.field.add(name=name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
    if kind.startswith("map<"):
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", "1", "string")
        _add_field(entry, "value", "2", kind[4:-1])
        field.type_name = f".inference.{message.name}.{entry.name}"
        field.label, field.type = _FIELD.LABEL_REPEATED, _FIELD.TYPE_MESSAGE
        return
    if kind.endswith("*"):
        field.label, kind = _FIELD.LABEL_REPEATED, kind[:-1]
    if kind in _MESSAGES or kind in _ENUMS:
        field.type = _FIELD.TYPE_MESSAGE if kind in _MESSAGES else _FIELD.TYPE_ENUM
        field.type_name = f".inference.{kind}"
    else:
        field.type = getattr(_FIELD, f"TYPE_{kind.upper()}")


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_described())

MESSAGES: dict[str, Any] = {
    name: message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"inference.{name}"))
    for name in _MESSAGES
}
ModelInferRequest = MESSAGES["ModelInferRequest"]
ModelInferResponse = MESSAGES["ModelInferResponse"]
