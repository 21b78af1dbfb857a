"""Zero the device code of a shared library that is not for the given architectures.

    strip_fatbin.py LIBRARY OUT ARCH [ARCH ...]     for example: lib.so lib90.so 90

Entries of the section .nv_fatbin keep their headers and sizes, so that offsets stay valid. An entry that is kept is
left as it is. The output packs well, since zeros compress to nothing. Prints the bytes per kind and architecture.
"""

import struct
import sys
from collections import Counter
from pathlib import Path

MAGIC = 0xBA55ED50


def find_section(data, name):
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, offset + i * size) for i in range(count)]
    names = headers[names_index][4]
    for header in headers:
        end = data.index(b"\0", names + header[0])
        if data[names + header[0] : end] == name:
            return header[4], header[5]
    raise SystemExit(f"no section {name}")


def main():
    source, target, *architectures = sys.argv[1:]
    kept_architectures = {int(text) for text in architectures}
    data = bytearray(Path(source).read_bytes())
    start, size = find_section(data, b".nv_fatbin")
    position, end = start, start + size
    totals, kept = Counter(), Counter()
    containers = 0
    while position < end:
        if struct.unpack_from("<I", data, position)[0] != MAGIC:
            position += 4  # padding between containers
            continue
        containers += 1
        header_size, body_size = struct.unpack_from("<HQ", data, position + 6)
        entry = position + header_size
        stop = entry + body_size
        while entry < stop:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, entry)
            (architecture,) = struct.unpack_from("<I", data, entry + 28)
            key = ("ptx" if kind == 1 else "elf" if kind == 2 else kind, architecture)
            totals[key] += payload
            if kind == 2 and architecture in kept_architectures:
                kept[key] += payload
            else:
                begin = entry + entry_header
                data[begin : begin + payload] = bytes(payload)
            entry += entry_header + payload
        assert entry == stop, (hex(entry), hex(stop))
        position = stop
    for key, total in sorted(totals.items(), key=str):
        print(f"{key[0]} {key[1]}: {total / 2**20:.1f} MiB, kept {kept[key] / 2**20:.1f}")
    print(f"{containers} containers, section {size / 2**20:.1f} MiB")
    Path(target).write_bytes(data)


if __name__ == "__main__":
    main()
