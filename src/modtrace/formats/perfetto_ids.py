"""Ids of clocks and packet sequences in the Perfetto traces that modtrace writes, and the message of a span's args."""

from collections.abc import Mapping

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from .limits import MAX_LINK
from .slice_args import CALL_FIELDS

REALTIME_CLOCK = 1
"""Perfetto's BUILTIN_CLOCK_REALTIME, Unix time: the clock of our traces."""

INCREMENTAL_CLOCK = 64
"""A clock whose readings count from the packet before; each packet sequence has its own."""

PROFILER_SEQUENCE = 1 << 24
"""The packet sequence of the profiler's events in a merged trace; a recording's have small ids."""

PROFILER_FLOW = MAX_LINK + (1 << 61)
"""From here on ids of flows are the profiler's in a merged trace; below are a recording's links and collectives."""


def add_call_message(schema: FileDescriptorProto, package: str, extension: int, enums: Mapping[str, str]) -> None:
    """Add the message that holds the args of a span, and the extension of TrackEvent that it is.

    Args:
        schema: is named too.
        package: its name, which differs from trace to trace.
        extension: the field number of the args in a TrackEvent.
        enums: the enums of fields; others are numbers.
    """
    schema.name, schema.package = f"{package}.proto", package
    kinds = FieldDescriptorProto
    call = schema.message_type.add(name="Call")
    for name, number in CALL_FIELDS.items():
        field = call.field.add(name=name, number=number, label=kinds.LABEL_OPTIONAL)
        field.type = kinds.TYPE_BOOL if name == "complete" else kinds.TYPE_INT64
        if name in enums:
            field.type, field.type_name = kinds.TYPE_ENUM, f".{package}.{enums[name]}"
    # Named `debug`, so that queries find `debug.fqn` where a debug annotation would have been.
    schema.extension.add(
        name="debug",
        number=extension,
        label=kinds.LABEL_OPTIONAL,
        type=kinds.TYPE_MESSAGE,
        type_name=f".{package}.Call",
        extendee=".perfetto.protos.TrackEvent",
    )
