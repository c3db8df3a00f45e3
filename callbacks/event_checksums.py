"""The checksum of TensorBoard's records, many times as fast as TensorBoard's own.

TensorBoard computes it byte by byte in Python, on the threads of its writers. With a hundred runs in one process, that
takes longer than all other logging.
"""

from functools import cache

import numpy as np
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow
from tensorboard.summary.writer import record_writer

LONGEST = 1024
"""The length in bytes of the longest record that the tables cover; TensorBoard handles longer ones, which are rare."""

_theirs = pywrap_tensorflow.masked_crc32c


def masked_crc32c(data: bytes) -> int:
    """As TensorBoard's function of that name."""
    length = len(data)
    if length > LONGEST:
        return int(_theirs(data))
    if length == 8:
        return _of_header(data)
    return _masked(data)


@cache
def _of_header(data: bytes) -> int:
    """Of the length of a record. There are few lengths."""
    return _masked(data)


def _masked(data: bytes) -> int:
    tables, of_zeros, places = _tables()
    length = len(data)
    # the register is linear in the bytes: each adds what its place, counted from the end, makes of it
    parts = tables[places[LONGEST - length :], np.frombuffer(data, np.uint8)]
    crc = int(np.bitwise_xor.reduce(parts, initial=0)) ^ int(of_zeros[length]) ^ 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a byte followed by n bytes becomes, what the empty register becomes after n zero bytes, and n … 1, 0."""
    byte = np.array(pywrap_tensorflow.CRC_TABLE, dtype=np.uint32)
    tables = np.empty((LONGEST, 256), dtype=np.uint32)
    of_zeros = np.empty(LONGEST + 1, dtype=np.uint32)
    tables[0], of_zeros[0] = byte, 0xFFFFFFFF
    for n in range(1, LONGEST):
        tables[n] = byte[tables[n - 1] & 0xFF] ^ (tables[n - 1] >> 8)
    for n in range(1, LONGEST + 1):
        of_zeros[n] = byte[of_zeros[n - 1] & 0xFF] ^ (of_zeros[n - 1] >> 8)
    return tables, of_zeros, np.arange(LONGEST - 1, -1, -1)


def use_fast_checksums() -> None:
    """From now on TensorBoard's writers in this process use it."""
    record_writer.masked_crc32c = masked_crc32c
