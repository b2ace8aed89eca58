"""The list of all that was ever published in proto/: ``landed.txt``. Lines are added to it, and none goes.

python proto/landed.py          add what is new; fails, and changes nothing, if something landed is gone or is different

Needs the generated code (proto/generate.sh runs this at its end). The rules behind it: proto/README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, ServiceDescriptorProto

LANDED = Path(__file__).with_name("landed.txt")


def listing() -> list[str]:
    """All messages, fields, enum values and RPCs of the generated code, a line each, in a fixed order."""
    from dragoman.oip import inference_pb2
    from dragoman.v1 import generation_pb2

    return [line for module in (generation_pb2, inference_pb2) for line in sorted(_file(module.DESCRIPTOR))]


def broken(landed: list[str], present: list[str]) -> list[str]:
    """What landed and is not there any more."""
    return sorted(set(landed) - set(present))


def read() -> list[str]:
    """What has landed."""
    return LANDED.read_text("utf-8").splitlines() if LANDED.exists() else []


def _file(file: FileDescriptor) -> Iterator[str]:
    for message in file.message_types_by_name.values():
        yield from _message(message)
    for enum in file.enum_types_by_name.values():
        yield from _enum(enum)
    for service in file.services_by_name.values():
        definition = ServiceDescriptorProto()
        service.CopyToProto(definition)
        for method in definition.method:
            asked = ("stream " if method.client_streaming else "") + method.input_type.lstrip(".")
            given = ("stream " if method.server_streaming else "") + method.output_type.lstrip(".")
            yield f"{service.full_name}.{method.name}: rpc ({asked}) returns ({given})"


def _message(message: Descriptor) -> Iterator[str]:
    yield f"{message.full_name}: message"
    proto = DescriptorProto()
    message.CopyToProto(proto)
    for field in proto.field:
        kind = field.type_name.lstrip(".") or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            kind = f"repeated {kind}"
        elif field.proto3_optional:
            kind = f"optional {kind}"
        elif field.HasField("oneof_index"):
            kind = f"{kind} of {proto.oneof_decl[field.oneof_index].name}"
        yield f"{message.full_name}.{field.name}: {kind} = {field.number}"
    for nested in message.nested_types:
        yield from _message(nested)
    for enum in message.enum_types:
        yield from _enum(enum)


def _enum(enum: EnumDescriptor) -> Iterator[str]:
    for value in enum.values:
        yield f"{enum.full_name}.{value.name}: value = {value.number}"


def main() -> int:
    """Add what is new."""
    present = listing()
    if lost := broken(read(), present):
        print("proto/landed.txt has what is not there any more, or is different:", *lost, sep="\n  ", file=sys.stderr)
        print("put it back; proto/README.md tells what may change", file=sys.stderr)
        return 1
    LANDED.write_text("".join(f"{line}\n" for line in present), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
