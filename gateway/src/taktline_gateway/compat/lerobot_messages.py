"""The three protobuf messages of LeRobot's asynchronous inference, described here and parsed by protobuf itself."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from taktline_protocol import ErrorCode, TaktlineError

CLIENT_MESSAGE_BYTES = 4 * 1024 * 1024
"""LeRobot's client sends and takes no larger message."""
BEGIN, MIDDLE, END = 1, 2, 3
_BYTES, _INT32 = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES, descriptor_pb2.FieldDescriptorProto.TYPE_INT32


def _messages() -> dict[str, Any]:
    # A name of our own: the process may hold LeRobot's generated file too. On the wire an enum is an int32.
    file = descriptor_pb2.FileDescriptorProto(
        name="taktline/lerobot.proto", package="taktline.lerobot", syntax="proto3"
    )
    layouts = {
        "Observation": (("transfer_state", 1, _INT32), ("data", 2, _BYTES)),
        "Actions": (("data", 1, _BYTES),),
        "PolicySetup": (("data", 1, _BYTES),),
    }
    for name, fields in layouts.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            message.field.add(
                name=field, number=number, type=kind, label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"taktline.lerobot.{name}"))
        for name in layouts
    }


_classes = _messages()


def observation_piece(message: bytes) -> tuple[int, bytes]:
    """(transfer state, data) of one piece of an observation. Raises TaktlineError `invalid_body`."""
    piece = _parsed("Observation", message)
    return piece.transfer_state, piece.data


def setup_data(message: bytes) -> bytes:
    """The data of policy instructions. Raises TaktlineError `invalid_body`."""
    data: bytes = _parsed("PolicySetup", message).data
    return data


def actions_message(data: bytes) -> bytes:
    """The message that carries a chunk. Raises TaktlineError `worker_failed` where its client could not take it."""
    message: bytes = _classes["Actions"](data=data).SerializeToString()
    if len(message) >= CLIENT_MESSAGE_BYTES:
        raise TaktlineError(
            ErrorCode.WORKER_FAILED,
            f"the chunk takes {len(message)} bytes; LeRobot's client takes {CLIENT_MESSAGE_BYTES}",
            "ask for fewer actions_per_chunk",
        )
    return message


def _parsed(name: str, message: bytes) -> Any:
    try:
        return _classes[name].FromString(message)
    except DecodeError as error:
        raise TaktlineError(
            ErrorCode.INVALID_BODY, f"the message is no {name}", "use LeRobot's own client; see docs/compat.md"
        ) from error
