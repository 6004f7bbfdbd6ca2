"""NumPy array types, named by what an array holds: `Int64Array` is an array of `np.int64`, of any shape."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Int8Array: TypeAlias = npt.NDArray[np.int8]
Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
UInt8Array: TypeAlias = npt.NDArray[np.uint8]
"""Also for bytes: text that is put together column by column."""
UInt32Array: TypeAlias = npt.NDArray[np.uint32]
Float32Array: TypeAlias = npt.NDArray[np.float32]
Float64Array: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
ObjectArray: TypeAlias = npt.NDArray[np.object_]
RecordArray: TypeAlias = npt.NDArray[np.void]
"""Items of a fixed number of bytes, read and written whole."""

IndexArray: TypeAlias = npt.NDArray[np.intp]
"""Positions in another array, as `np.flatnonzero` and `np.argsort` return them."""
SignedIntArray: TypeAlias = npt.NDArray[np.signedinteger]
"""Positions or counts in any signed integer type."""
AnyIntArray: TypeAlias = npt.NDArray[np.integer]
AnyArray: TypeAlias = npt.NDArray[Any]
