"""A second implementation of docs/wire_format.md in NumPy, written from that page alone.

It imports none of the package. Section numbers are those of the page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

WIDTHS = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
F32 = np.float32


@dataclass(frozen=True, kw_only=True)
class Format:
    """The format of a row. In full precision the name of a dtype takes its place: see Sent.

    group: elements that share a scale.
    minmax: True for min-max, False for absmax.
    gaussian: True for Gaussian levels.
    rounding: of the sender.
    """

    bits: int
    group: int
    minmax: bool = False
    gaussian: bool = False
    rounding: str = "nearest"


Sent = Format | str  # a format, or the name of a dtype


def sections(fmt: Format, n: int) -> tuple[list[int], int, int, int]:
    """Section 1: return the starts of planes, scales and offsets, and the bytes of a row."""
    position = 0
    planes = []
    for width in WIDTHS[fmt.bits]:
        planes.append(position)
        position = pad16(position + -(-n // 8) * width)
    groups = -(-n // fmt.group)
    scales, offsets = position, pad16(position + (2 if fmt.gaussian else 4) * groups)
    return planes, scales, offsets, pad16(offsets + 4 * groups) if fmt.minmax else offsets


def pad16(n: int) -> int:
    return 16 * -(-n // 16)


def codes_of(row: bytes, fmt: Format, n: int) -> np.ndarray:
    """Section 1: return the code of every element."""
    codes = np.zeros(n, dtype=np.int64)
    shift = 0
    for width, start in zip(WIDTHS[fmt.bits], sections(fmt, n)[0], strict=True):
        plane = np.frombuffer(row[start : start + -(-n // 8) * width], np.uint8)
        bits = np.unpackbits(plane, bitorder="little")[: n * width].reshape(n, width)
        codes |= (bits.astype(np.int64) << np.arange(width)).sum(1) << shift
        shift += width
    return codes


def decode(row: bytes, fmt: Format, n: int, table: np.ndarray | None = None) -> np.ndarray:
    """Section 2: return the values, (n,) fp32."""
    _, scales, offsets, _ = sections(fmt, n)
    group = np.arange(n) // fmt.group
    count = -(-n // fmt.group)
    if fmt.gaussian:
        halves = np.frombuffer(row, "<u2", count, scales)
        scale = (halves.astype(np.uint32) << 16).view(F32)[group]
        return signed_levels(fmt.bits)[codes_of(row, fmt, n)] * scale
    scale = np.frombuffer(row, "<f4", count, scales)[group] if n else np.zeros(0, F32)
    codes = codes_of(row, fmt, n)
    if not fmt.minmax:
        return (codes - 2 ** (fmt.bits - 1)).astype(F32) * scale
    offset = np.frombuffer(row, "<f4", count, offsets)[group] if n else np.zeros(0, F32)
    values = codes.astype(F32) if table is None else table[codes]
    return values * scale + offset


def encode(
    x: np.ndarray,
    fmt: Format,
    *,
    stream: tuple[int, int] = (0, 0),
    first: int = 0,
    table: np.ndarray | None = None,
) -> bytes:
    """Section 3: return a row.

    stream: key and step of section 4.
    first: vector of the row.
    table: learned levels.
    """
    n, rounding = len(x), fmt.rounding
    planes, scales, offsets, nbytes = sections(fmt, n)
    row = bytearray(nbytes)
    if fmt.gaussian:
        codes, halves = gaussian_groups(x.astype(F32).reshape(-1, 128), fmt.bits)
        _pack(codes.reshape(-1), planes, fmt, row)
        row[scales : scales + 2 * len(halves)] = halves.astype("<u2").tobytes()
        return bytes(row)
    drawn = np.zeros(n, np.int64)
    if rounding == "stochastic":
        drawn = random16(*stream, first, n)
    shift = F32(shift_of(*stream)) if rounding == "random_shift" else F32(0)
    codes = np.zeros(n, np.int64)
    for g, start in enumerate(range(0, n, fmt.group)):
        part = slice(start, start + fmt.group)
        with np.errstate(all="ignore"):
            codes[part], scale, offset = _group(
                x[part].astype(F32), fmt, drawn[part], rounding, shift, table
            )
        row[scales + 4 * g : scales + 4 * g + 4] = F32(scale).tobytes()
        if fmt.minmax:
            row[offsets + 4 * g : offsets + 4 * g + 4] = F32(offset).tobytes()
    _pack(codes, planes, fmt, row)
    return bytes(row)


def _group(
    x: np.ndarray,
    fmt: Format,
    drawn: np.ndarray,
    rounding: str,
    shift: F32,
    table: np.ndarray | None,
) -> tuple[np.ndarray, F32, F32]:
    """Return codes, scale and offset of a group. drawn: 16 random bits of every element."""
    top = 2**fmt.bits - 1 if fmt.minmax else 2 ** (fmt.bits - 1) - 1
    zero = 0 if fmt.minmax else 2 ** (fmt.bits - 1)
    nothing, largest = np.full(len(x), zero), np.abs(x).max()
    low = x.min() if fmt.minmax else F32(0)
    span = x.max() - low if fmt.minmax else largest
    if span < 2.0**-99:
        return nothing, F32(0), F32(0) if largest < 2.0**-99 else _normal(low)
    scale = span / F32(top)
    offset = _normal(low)
    if rounding == "random_shift":
        offset = _normal(offset + _normal(shift * scale))
    if not (np.isfinite(x).all() and scale <= 2.0**126 and np.isfinite(offset)):
        return nothing, F32("nan"), F32(0)
    fraction = 0 if rounding != "stochastic" else 15 if fmt.bits == 8 else 16
    scaled = (x - offset if fmt.minmax else x) * (F32(2.0**fraction) / scale)
    if table is not None:
        codes = (scaled[:, None] > (table[1:] + table[:-1]) / F32(2)).sum(1)
    else:  # x - offset may overflow with a shift
        codes = np.rint(np.minimum(scaled, F32(2.0**31))).astype(np.int64)
        codes = codes + (drawn >> (16 - fraction)) >> fraction
    return codes.clip(0 if fmt.minmax else -top, top) + zero, scale, offset


def _normal(value: F32) -> F32:
    """Return a number with denormals and -0 replaced by +0."""
    return F32(0) if abs(value) < 2.0**-126 else value


LEVELS = {
    2: [0.452780035, 1.510417608],
    3: [0.245094179, 0.756005281, 1.343909279, 2.151945705],
    4: [
        *(0.128395030, 0.388048299, 0.656759119, 0.942340456),
        *(1.256231197, 1.618046386, 2.069017227, 2.732589571),
    ],
    5: [
        *(0.065889660, 0.198051830, 0.331378306, 0.466699523),
        *(0.604933624, 0.747135704, 0.894565117, 1.048783320),
        *(1.211804381, 1.386340340, 1.576228079, 1.787233218),
        *(2.028728399, 2.317739404, 2.691119577, 3.260732493),
    ],
}  # fmt: skip


def signed_levels(bits: int) -> np.ndarray:
    """Return the level of every code."""
    levels = np.array(LEVELS[bits], F32)
    return np.concatenate([-levels, levels])


def gaussian_groups(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Section 3, Gaussian levels: return codes (groups, 128) and bf16 bits of scales (groups,)."""
    half, levels = 2 ** (bits - 1), np.array(LEVELS[bits], F32)
    with np.errstate(all="ignore"):
        m = np.abs(x).max(1, keepdims=True)
        usable = (m >= 2.0**-99) & (m < 2.0**127)
        power = np.exp2(np.floor(np.log2(np.where(usable, m, 1).astype(np.float64))))
        y = (x * (1 / power)).astype(F32)
        s = sum_of_128(y * y)
        measure = y * y * (F32(1) / (s / F32(128)))
        h = (levels[1:] + levels[:-1]) / F32(2)
        k = (measure[:, :, None] > h * h).sum(2)
        scale = s * (F32(1) / sum_of_128(np.abs(y) * levels[k])) * power.astype(F32)
    wide = scale.astype(F32).view(np.uint32).astype(np.uint64)
    bf16 = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16
    bf16 = np.where(usable, bf16, np.where(m < 2.0**-99, 0, 0x7FC0))
    return np.where(usable, k + half * ~np.signbit(x), half), bf16[:, 0]


def sum_of_128(v: np.ndarray) -> np.ndarray:
    """Return the sums of groups, (groups, 1), added by distance 8, 16, 1, 2, 4, 32, 64."""
    v, left = v.copy(), np.arange(128)
    for distance in (8, 16, 1, 2, 4, 32, 64):
        left = left[left & distance == 0]
        v[:, left] += v[:, left + distance]
    return v[:, :1]


def _pack(codes: np.ndarray, planes: list[int], fmt: Format, row: bytearray) -> None:
    shift = 0
    for width, start in zip(WIDTHS[fmt.bits], planes, strict=True):
        bits = codes.astype(np.int64)[:, None] >> (shift + np.arange(width)) & 1
        plane = np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()
        row[start : start + len(plane)] = plane
        shift += width


# ---- section 4 ----

M32, M64 = 2**32 - 1, 2**64 - 1


def key_of(*, seed: int, role: int, parameter: int, stream: int, hop: int) -> int:
    key = 0
    for field in (seed, role, parameter, stream, hop):
        z = ((key ^ field) + 0x9E3779B97F4A7C15) & M64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
        key = z ^ z >> 31
    return key


def philox(key: int, step: int, vector: int | np.ndarray) -> list[np.ndarray]:
    """Return four random words of every vector."""
    v, low = np.asarray(vector, np.uint64), np.uint64(M32)
    high = np.uint64(32)
    c = [v & low, v >> high, np.uint64(step & M32), np.uint64(step >> 32)]
    k = [key & M32, key >> 32]
    for _ in range(7):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [b >> high ^ c[1] ^ np.uint64(k[0]), b & low,
             a >> high ^ c[3] ^ np.uint64(k[1]), a & low]  # fmt: skip
        k = [k[0] + 0x9E3779B9 & M32, k[1] + 0xBB67AE85 & M32]
    return c


def random16(key: int, step: int, first: int, n: int) -> np.ndarray:
    """Return 16 random bits of each of n elements, from the vector ``first`` on."""
    vectors = np.arange(-(-n // 8), dtype=np.uint64) + np.uint64(first)
    words = np.stack(np.broadcast_arrays(*philox(key, step, vectors)), -1).astype(np.uint32)
    return words.view(np.uint16).reshape(-1)[:n].astype(np.int64)


def shift_of(key: int, step: int) -> float:
    return (int(philox(key, step, 0)[0]) >> 8) / 2**24 - 0.5


# ---- section 5 ----


def unrotate(x: np.ndarray, h: int, scale: float) -> np.ndarray:
    """Undo a rotation."""
    x, distance = x.reshape(-1, h).copy(), 1
    while distance < h:
        for i in range(h):
            if not i & distance:
                a, b = x[:, i].copy(), x[:, i + distance].copy()
                x[:, i], x[:, i + distance] = a + b, a - b
        distance *= 2
    return x.reshape(-1) * F32(scale / h)


def signs_of(key: int, step: int, h: int, sender: int | None = None) -> np.ndarray:
    """Return +1 or -1 of the elements of a block.

    key: of hop 99, stream 0.
    sender: index on the last hop, if every sender has its own signs.
    """
    words = philox(key, step, 0 if sender is None else sender + 1)
    bits = sum(int(word) << 32 * i for i, word in enumerate(words))
    return np.array([1 if bits >> i & 1 else -1 for i in range(h)], F32)


def rotate(x: np.ndarray, h: int) -> np.ndarray:
    """Rotate a run, filled up to whole blocks."""
    filled = np.concatenate([x.astype(F32), np.zeros(-len(x) % h, F32)])
    return unrotate(filled, h, h)


# Full precision: bytes of an element; functions that write and read values.
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def written(x: np.ndarray, dtype: str) -> bytes:
    if dtype == "bf16":
        wide = x.astype(F32).view(np.uint32).astype(np.uint64)
        return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype("<u2").tobytes()
    return x.astype("<f4" if dtype == "fp32" else "<f2").tobytes()


def read(row: bytes, fmt: Sent, n: int, table: np.ndarray | None = None) -> np.ndarray:
    """Return the values at the front of a slot, (n,) fp32."""
    if isinstance(fmt, Format):
        return decode(row, fmt, n, table)
    if fmt == "bf16":
        return (np.frombuffer(row, "<u2", n).astype(np.uint32) << 16).view(F32)
    return np.frombuffer(row, "<f4" if fmt == "fp32" else "<f2", n).astype(F32)


def row_of(
    x: np.ndarray, fmt: Sent, stream: tuple[int, int], first: int, table: np.ndarray | None = None
) -> bytes:
    if not isinstance(fmt, Format):
        return written(x, fmt)
    return encode(x, fmt, stream=stream, first=first, table=table)


def row_bytes(fmt: Sent, n: int) -> int:
    return sections(fmt, n)[3] if isinstance(fmt, Format) else pad16(BYTES[fmt] * n)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements [start, stop) of a tensor, summed on one rank.

    formats: by hop.
    h: elements of a rotation block, 0: no rotation.
    small: True if it follows others without padding.
    room: elements of its slot, if larger.
    row: index among the full shards of a reduction over one hop.
    """

    tensor: int
    start: int
    stop: int
    reducer: int
    formats: tuple[Sent, ...]
    h: int = 0
    small: bool = False
    room: int = 0
    row: int | None = None

    @property
    def on_wire(self) -> int:
        """Return the elements of a row: whole blocks."""
        n = self.stop - self.start
        return n + -n % self.h if self.h else n

    def first(self, begins: int = 0) -> int:
        """Section 4: return the first vector of a tensor that begins there in its parameter."""
        if self.row is not None:
            return self.row * -(-(self.stop - self.start) // 8)
        return 16 * (begins + self.start)


def is_small(formats: tuple[Sent, ...], n: int) -> bool:
    return not isinstance(formats[-1], Format) and n <= 16_384


def shards(
    tensor: int, numel: int, ranks: int, formats: tuple[Sent, ...], h: int, plain: bool = False
) -> list[Piece]:
    """Return the pieces of a tensor under ZeRO-3.

    plain: True for one hop without ``gradients.intra`` and without a rotation in the call.
    """
    c, small, found = -(-numel // ranks), is_small(formats, numel), []
    for r in range(ranks):
        start, stop = min(r * c, numel), min(r * c + c, numel)
        row, room = r if plain and stop - start == c else None, c if plain or small else 0
        found.append(Piece(tensor=tensor, start=start, stop=stop, reducer=r, formats=formats, h=h,
                           small=small, room=room, row=row))  # fmt: skip
    return found


def slice_count(total: int) -> int:
    return max(1, min(16, round((total * 5e-7) ** 0.5)))


def slices(pieces: list[Piece], count: int | None) -> list[list[Piece]]:
    """Return the parts of every slice of a reduction. A single hop has one slice."""
    if len(pieces[0].formats) == 1:
        return [pieces]
    count = count or slice_count(sum(p.stop - p.start for p in pieces))
    found: list[list[Piece]] = [[] for _ in range(count)]
    for p in pieces:
        if p.small:
            found[0].append(p)
            continue
        n = p.stop - p.start
        groups = [f.group for f in p.formats if isinstance(f, Format)]
        unit = np.lcm.reduce([8, p.h or 1, *groups])
        cuts = [n * i // count // unit * unit for i in range(count)] + [n]
        for part, first, last in zip(found, cuts[:-1], cuts[1:], strict=True):
            if first < last:
                part.append(replace(p, start=p.start + int(first), stop=p.start + int(last)))
    return [part for part in found if part]


def slots(pieces: list[Piece], hop: int) -> tuple[list[tuple[int, int]], int]:
    """Return begin and end of the slot of every piece, and the bytes of the message."""
    found, end, before = [], 0, None
    for p in pieces:
        n = max(p.room, p.on_wire)
        begin = end if p.small and before == p.formats[hop] else pad16(end)
        before = p.formats[hop]
        end = begin + (BYTES[p.formats[hop]] * n if p.small else row_bytes(p.formats[hop], n))
        found.append((begin, end))
    return found, pad16(end)


def holds(message: bytes, rows: dict[Piece, bytes], hop: int) -> bool:
    """Return True if a message has these rows in its slots. Bytes between slots do not count."""
    places, nbytes = slots(list(rows), hop)
    found = [
        message[begin : begin + len(r)] for r, (begin, _) in zip(rows.values(), places, strict=True)
    ]
    return len(message) == nbytes and found == list(rows.values())


def add_up(
    pieces: list[Piece],
    messages: dict[int, bytes],
    hop: int,
    own: tuple[int, dict[Piece, np.ndarray]] | None = None,
    signs: Callable[[Piece, int], np.ndarray] | None = None,
) -> dict[Piece, np.ndarray]:
    """Return the sums of a hop, in the order of the sources.

    own: index and exact values of the own source, which replace its message.
    signs: of every source, which is then rotated back before it is added.
    """
    places, _ = slots(pieces, hop)
    mine, exact = own or (-1, {})
    sums = {}
    for p, (begin, end) in zip(pieces, places, strict=True):
        total = None
        for source in sorted({*messages, *([mine] if own else [])}):
            if source == mine:
                row = exact[p]
            else:
                row = read(messages[source][begin:end], p.formats[hop], p.on_wire)
            if signs is not None and p.h:
                row = unrotate(row, p.h, p.h) * np.resize(signs(p, source), len(row))
            total = row if total is None else total + row
        sums[p] = total
    return sums


def finished(p: Piece, total: np.ndarray, scale: float, own_signs: bool = False) -> np.ndarray:
    """Return the last sum of a piece, scaled and, if its sources are rotated, rotated back."""
    rotated = p.h and not own_signs
    total = unrotate(total, p.h, scale) if rotated else total * F32(scale / (p.h or 1))
    return total[: p.stop - p.start]


DELIVERED = 1 << 62  # vectors of a delivery


def delivered(fmt: Sent) -> Sent:
    if not isinstance(fmt, Format):
        return fmt
    rounding = "stochastic" if fmt.gaussian else fmt.rounding
    return replace(fmt, bits=8, gaussian=False, rounding=rounding)


def owner_pieces(
    runs: list[tuple[int, int, tuple[Sent, ...], int]], ranks: int, node_size: int
) -> list[Piece]:
    """Return the pieces of runs (owner, elements, formats, h)."""
    ways = [[(r,) for r in range(ranks)], [tuple(range(ranks))] * ranks]
    if len(runs[0][2]) == 2:
        nodes = [tuple(range(n, n + node_size)) for n in range(0, ranks, node_size)]
        ways.insert(1, [nodes[r // node_size] for r in range(ranks)])
    found = [_cut(runs, teams) for teams in ways]
    owners = [owner for owner, *_ in runs]
    return min(found, key=lambda pieces: _busiest(pieces, owners, ranks, node_size))


def split_small(pieces: list[Piece], members: list[list[tuple[int, int]]]) -> list[Piece]:
    """Return pieces of runs as pieces of their members (tensor, elements), in order."""
    found = []
    for p in pieces:
        begin = 0
        for tensor, n in members[p.tensor]:
            start, stop = max(p.start - begin, 0), min(p.stop - begin, n)
            if start < stop:
                small = is_small(p.formats, n)
                found.append(replace(p, tensor=tensor, start=start, stop=stop, small=small))
            begin += n
    return found


def _cut(runs: list, teams: list[tuple[int, ...]]) -> list[Piece]:
    pieces = []
    for team in sorted(set(teams)):
        members = [i for i, (owner, *_) in enumerate(runs) if teams[owner] == team]
        part, position = -(-sum(runs[i][1] for i in members) // len(team)), 0
        for i in members:
            _, n, formats, h = runs[i]
            borders = {position, position + n}
            borders |= set(range(part, position + n, part)) if part else set()
            inside = sorted(b for b in borders if position <= b <= position + n)
            for a, b in zip(inside, inside[1:], strict=False):
                pieces.append(Piece(tensor=i, start=a - position, stop=b - position,
                                    reducer=team[a // part], formats=formats, h=h))  # fmt: skip
            position += n
    return sorted(pieces, key=lambda p: (p.tensor, p.start))


def _busiest(pieces: list[Piece], owners: list[int], ranks: int, node_size: int) -> tuple[int, int]:
    into_rank, into_node = [0] * ranks, [0] * (ranks // node_size)
    for p in pieces:
        n, owner, two = p.stop - p.start, owners[p.tensor], len(p.formats) == 2
        across = row_bytes(p.formats[-1], n) * ((ranks // node_size if two else ranks) - 1)
        into_rank[p.reducer] += across
        if two:
            into_node[p.reducer // node_size] += across
            for r in range(p.reducer % node_size, ranks, node_size):
                into_rank[r] += row_bytes(p.formats[0], n) * (node_size - 1)
        if p.reducer != owner:
            nbytes = row_bytes(delivered(p.formats[-1]), n)
            into_rank[owner] += nbytes
            if two and p.reducer // node_size != owner // node_size:
                into_node[owner // node_size] += nbytes
    return max(into_node), max(into_rank)


# ---- section 7 ----


def sealed(message: bytes, place: int) -> bytes:
    """Return a message with its checksum, from the rank with that index in the process group."""
    if not message:
        return b""
    filled = message + bytes(pad16(len(message)) - len(message))
    words = [int.from_bytes(filled[i : i + 8], "little") for i in range(0, len(filled), 8)]
    a = sum(words) + 0x1E3779B97F4A7C15 + len(message)
    b = sum((2 * i + 1) * u for i, u in enumerate(words)) + 0x3F58476D * (place + 1)
    return filled + b"".join((s % 2**64).to_bytes(8, "little") for s in (a, b))
