"""What a written trace says about its recording as a whole, for people; readers of modtrace take it from the table."""

from typing import Any

import orjson

from .._errors import WriteError
from .._version import __version__
from ..timeline import Timeline
from .escape import escaped_json
from .table_bytes import FORMAT_VERSION


def make_header(timeline: Timeline) -> dict[str, Any]:
    """Return the version that wrote the trace, and the stats and metadata of its timeline.

    Raises:
        WriteError: the metadata are not JSON values.
    """
    try:
        metadata = orjson.loads(orjson.dumps(escaped_json(dict(timeline.metadata))))
    except orjson.JSONEncodeError as error:
        raise WriteError(f"the metadata of a timeline must be JSON values: {error}") from error
    written = {"format": FORMAT_VERSION, "version": __version__}
    return {"modtrace": written, "stats": dict(timeline.stats), "metadata": metadata}
