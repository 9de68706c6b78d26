"""The checkpoint format: partition files of raw bytes, found by their content, and the manifest that says what they
hold (L1). Reads and checks; writing is `store.convert`. The specification is docs/reference/checkpoint-format.md.

    <root>/blobs/<aa>/<digest>       a partition: one file per device, read-only, tensors in order of use
    <root>/models/<name>/            a model or an adapter
        manifest.json                what it is, its partitions, where each tensor lies
        tokenizer.json
        chat_template.jinja          where the model has one

Two models with the same weights name the same blobs. A manifest is not trusted: every number in it is checked against
the others before the first tensor is handed out.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import math
import mmap
import os
import re
import weakref
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from dovetail.errors import DamagedCheckpoint, UnsupportedModel
from dovetail.layouts import LAYOUTS, MATRIX_LAYOUTS, NUMPY, packed_bytes
from dovetail.modelspec import ModelSpec
from dovetail.node.ports import HostTensor
from dovetail.store.files import open_regular, read_bytes, read_text
from dovetail.store.format.assemble import joined, joined_shape
from dovetail.store.format.tokenizer_files import TokenFields, tokens_problem
from dovetail.store.keys import checked_spec
from dovetail.types import ModelCard

MANIFEST, TOKENIZER, TEMPLATE = "manifest.json", "tokenizer.json", "chat_template.jinja"
ARRIVING = "arriving.json"  # the manifest of a model whose weights are still on their way
USED, PINNED, DAMAGED = "used", "pinned", "damaged"
# Marks in a model's folder: when it was last opened, that it must stay, and what `store verify` found wrong with it.
FORMAT, VERSION = "dovetail-checkpoint", 2
CHUNK_BYTES = 16 * 2**20  # what a checksum covers, and what one read takes
PAGE_BYTES = 4096  # layers begin and files end on these, for direct I/O
ALIGNMENT = 64  # of every tensor
MAX_PARTITIONS = 1024

_DIGEST = re.compile(r"^[0-9a-f]{64}$")
_NO_CHECKSUM = "0" * 64
_MAX_MANIFEST_BYTES = 256 * 2**20

Axis = Literal["", "rows", "columns", "pieces"]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Partition(msgspec.Struct, frozen=True):
    """One blob. `digest` is its name: see `partition_digest`."""

    digest: str
    size: Count  # bytes, a multiple of PAGE_BYTES
    chunk_bytes: Count  # every chunk but the last has this many
    chunks: tuple[str, ...]  # SHA-256 of each chunk, in hex


class TensorEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a tensor, or one rank's share of it, lies."""

    name: str  # canonical, see `modelspec`
    partition: Count
    offset: Count  # from the start of the partition, a multiple of ALIGNMENT
    size: Count
    dtype: str  # what it unpacks to
    shape: tuple[Count, ...]  # of this share
    layout: str = "plain"  # see `dovetail.layouts`
    # How the whole was cut over the partitions; "" = each has all of it. "pieces": rows of the one partition that there
    # is, in layouts of their own, in order.
    axis: Axis = ""
    sections: tuple[Count, ...] = ()  # with "rows": row counts, in this share, of parts that were cut one by one


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter: base weight W becomes W + scaling · B·A."""

    rank: Count
    alpha: float
    scaling: float  # alpha / rank, or / √rank where its author chose that
    target_modules: tuple[str, ...]
    base_model: str  # as the adapter's author wrote it


class Manifest(msgspec.Struct, frozen=True):
    format: str
    version: int
    checksum: str  # SHA-256 of the file with this field's digits as zeros
    kind: Literal["model", "adapter"]
    source: str
    created: Count  # Unix seconds
    dtype: str  # of the plain matrices; norms are float32
    layout: str  # of the others
    partitions: tuple[Partition, ...]
    tensors: tuple[TensorEntry, ...]
    files: dict[str, str]  # SHA-256 of each file beside the manifest
    spec: ModelSpec | None = None  # of a model
    tokens: TokenFields = TokenFields()  # its chat_template is kept in a file of its own
    adapter: Adapter | None = None  # of an adapter

    @property
    def size_bytes(self) -> int:
        return sum(partition.size for partition in self.partitions)


class StoredTensors:
    """The tensors of a manifest, as views of the mapped blobs or of memory that a pool has filled with them.

    A blob carries a shared lock for as long as a view of it lives, mapped or in a pool, so that `store.collect` can
    tell what is in use; the operating system lets go of the lock with the process, however that ends.
    """

    def __init__(
        self, folder: Path, buffers: Sequence[memoryview] | None = None, manifest: Manifest | None = None
    ) -> None:
        """`manifest` saves reading and checking it once more."""
        self.path = folder
        self.manifest = manifest or read_manifest(folder)
        self._maps: list[mmap.mmap] = []
        files = files_of(folder, self.manifest)
        if buffers is None:
            self._maps = [_map_blob(path, part) for path, part in files]
            buffers = [memoryview(mapped) for mapped in self._maps]
        self._buffers = _checked_buffers(folder, buffers, self.manifest)
        if not self._maps:
            for buffer, (path, part) in zip(buffers, files, strict=True):
                mark_in_use(buffer, path, part)
        self._entries: dict[str, list[TensorEntry]] = defaultdict(list)
        for entry in self.manifest.tensors:
            self._entries[entry.name].append(entry)

    def names(self) -> list[str]:
        return list(self._entries)

    def share(self, name: str, partition: int) -> HostTensor:
        """What one partition holds of a tensor, in the layout that it is stored in; no copy."""
        return self._view(next(entry for entry in self._entries[name] if entry.partition == partition))

    def _view(self, entry: TensorEntry) -> HostTensor:
        view = self._buffers[entry.partition][entry.offset : entry.offset + entry.size]
        return HostTensor(entry.dtype, entry.shape, view, entry.layout)

    def pieces(self, name: str) -> Sequence[HostTensor]:
        """The whole tensor; a copy only where ranks hold columns of it, or packed parts."""
        entries = self._entries[name]
        if entries[0].axis == "pieces":
            return [self._view(entry) for entry in entries]
        if entries[0].axis == "":
            return [self.share(name, entries[0].partition)]
        return joined(entries, [self.share(name, entry.partition) for entry in entries])

    def close(self) -> None:
        self._buffers = []
        for mapped in self._maps:
            with suppress(BufferError):  # somebody still holds a view: the mapping goes with the last one
                mapped.close()


class StoredModel(StoredTensors):
    """A node.ports.Checkpoint; with `buffers` (one per partition, in order) no file but the manifest is read."""

    def __init__(
        self, folder: Path, buffers: Sequence[memoryview] | None = None, manifest: Manifest | None = None
    ) -> None:
        super().__init__(folder, buffers, manifest)
        if self.manifest.spec is None:
            raise UnsupportedModel(f"{folder / MANIFEST}: an adapter, not a model that can be served by itself")
        self.spec: ModelSpec = self.manifest.spec
        with suppress(OSError):  # a store that is not ours to write keeps no record of use
            (folder / USED).touch()

    @property
    def dtype(self) -> str:
        return self.manifest.dtype if self.manifest.layout in ("plain", "amx-bf16") else self.manifest.layout

    def coded(self, name: str) -> tuple[tuple[int, str], ...]:
        """Rows and layout of what `pieces` gives."""
        return tuple((math.prod(piece.shape[:-1]), piece.layout) for piece in self.pieces(name))

    @property
    def in_place(self) -> bool:
        """A model cut for several devices is put together in memory of its own."""
        return len(self.manifest.partitions) == 1

    def tokenizer(self) -> tuple[TokenFields, str]:
        return read_tokens(self.path, self.manifest), read_text(self.path / TOKENIZER)

    def release(self) -> None:
        release_pages(self._maps)


def is_stored(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def partition_files(folder: Path, manifest: Manifest | None = None) -> list[tuple[Path, Partition]]:
    """The blobs of a model in order of device, present and of the right length: what a loader reads."""
    found = files_of(folder, manifest or read_manifest(folder))
    for path, partition in found:
        os.close(open_blob(path, partition))
    return found


def blob_path(root: Path, digest: str) -> Path:
    assert _DIGEST.match(digest), digest
    return root / "blobs" / digest[:2] / digest


def store_root(folder: Path) -> Path:
    """Of a model's folder: blobs lie two levels up and across."""
    return folder.parent.parent


def partition_digest(size: int, chunk_bytes: int, chunks: Sequence[str]) -> str:
    """SHA-256 of the two numbers (64 bits, little-endian) and the chunks' digests: what chunks are known in parallel,
    or from before an interruption, need not be read again."""
    joined_chunks = b"".join(bytes.fromhex(chunk) for chunk in chunks)
    return hashlib.sha256(size.to_bytes(8, "little") + chunk_bytes.to_bytes(8, "little") + joined_chunks).hexdigest()


def is_arriving(folder: Path) -> bool:
    """Its weights come from a bucket: they may be in the host pool, and are not all on disk."""
    return (folder / ARRIVING).is_file() and not is_stored(folder)


def read_manifest(folder: Path, file: str = MANIFEST) -> Manifest:
    path = folder / file
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise DamagedCheckpoint(f"{path}: {path.stat().st_size} bytes are absurd for a manifest")
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path}: missing") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {error.strerror}") from error
    text = read_bytes(path)
    return parse_manifest(text, str(path))


def parse_manifest(text: bytes, origin: str) -> Manifest:
    try:
        head = msgspec.json.decode(text, type=_Head)
        if head.format != FORMAT:
            raise DamagedCheckpoint(f"{origin}: format {head.format!r} is not {FORMAT}")
        if head.version != VERSION:
            raise UnsupportedModel(f"{origin}: version {head.version}, this release reads {VERSION}; pull it again")
        if checksum_of(text, head.checksum) != head.checksum:
            raise DamagedCheckpoint(f"{origin}: the checksum does not match: the manifest was altered or is damaged")
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{origin}: {error}") from error
    check_manifest(manifest, origin)
    return manifest


def encode_manifest(manifest: Manifest) -> bytes:
    """With its checksum filled in."""
    text = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(manifest, checksum=_NO_CHECKSUM)), indent=1)
    return text.replace(_NO_CHECKSUM.encode(), hashlib.sha256(text).hexdigest().encode(), 1)


def checksum_of(text: bytes, claimed: str) -> str:
    return hashlib.sha256(text.replace(claimed.encode(), _NO_CHECKSUM.encode(), 1)).hexdigest()


def read_tokens(folder: Path, manifest: Manifest) -> TokenFields:
    if TEMPLATE not in manifest.files:
        return msgspec.structs.replace(manifest.tokens, chat_template=None)
    text = read_text(folder / TEMPLATE)
    if hashlib.sha256(text.encode()).hexdigest() != manifest.files[TEMPLATE]:  # it is small, and runs
        raise DamagedCheckpoint(f"{folder / TEMPLATE}: its checksum does not match: it was altered or is damaged")
    return msgspec.structs.replace(manifest.tokens, chat_template=text)


def read_card(folder: Path, name: str) -> ModelCard:
    manifest = read_manifest(folder)
    if manifest.spec is None:
        raise UnsupportedModel(f"{folder / MANIFEST}: an adapter, not a model that can be served by itself")
    for path, partition in files_of(folder, manifest):
        os.close(open_blob(path, partition))
    return _card(folder, name, manifest, manifest.spec)


def read_arriving_card(folder: Path, name: str) -> ModelCard:
    """The card that the model will have when it is complete."""
    manifest = read_manifest(folder, ARRIVING)
    assert manifest.spec is not None, "adapters do not arrive in this way"
    return _card(folder, name, manifest, manifest.spec)


def _card(folder: Path, name: str, manifest: Manifest, spec: ModelSpec) -> ModelCard:
    return ModelCard(
        name=name,
        path=str(folder),
        spec=spec,
        tokenizer_file=str(folder / TOKENIZER),
        source=manifest.source,
        dtype=manifest.dtype,
        layout=manifest.layout,
        partitions=len(manifest.partitions),
        size_bytes=manifest.size_bytes,
        created=manifest.created,
        tokenizer_digest=manifest.files.get(TOKENIZER, ""),
        digest=manifest.checksum,
        **msgspec.structs.asdict(read_tokens(folder, manifest)),
    )


def check_manifest(manifest: Manifest, origin: str) -> None:
    """Raises DamagedCheckpoint where a number cannot be right, whatever the files hold."""
    for position, partition in enumerate(manifest.partitions):
        _check_partition(partition, f"{origin}: partition {position}")
    if not 0 < len(manifest.partitions) <= MAX_PARTITIONS:
        raise DamagedCheckpoint(f"{origin}: {len(manifest.partitions)} partitions")
    by_partition: dict[int, list[TensorEntry]] = defaultdict(list)
    for entry in manifest.tensors:
        _check_entry(entry, manifest.partitions, f"{origin}: {entry.name}")
        by_partition[entry.partition].append(entry)
    for entries in by_partition.values():
        _check_overlaps(entries, origin)
    for name, digest in manifest.files.items():
        if name not in (TOKENIZER, TEMPLATE) or not _DIGEST.match(digest):
            raise DamagedCheckpoint(f"{origin}: files: {name!r} is not a file of this format")
    if (manifest.spec is None) == (manifest.kind == "model") or (manifest.adapter is None) == (
        manifest.kind == "adapter"
    ):
        raise DamagedCheckpoint(f"{origin}: kind {manifest.kind}, but without the record of one")
    if manifest.dtype not in NUMPY or manifest.layout not in LAYOUTS:
        raise UnsupportedModel(f"{origin}: {manifest.dtype} in layout {manifest.layout} is not known to this release")
    problem = tokens_problem(manifest.tokens)
    if problem is not None:
        raise DamagedCheckpoint(f"{origin}: tokens: {problem}")
    if manifest.spec is not None:
        _check_against_spec(manifest, manifest.spec, origin)


def release_pages(maps: Sequence[mmap.mmap]) -> None:
    """Takes a mapped file's pages out of this process; they stay in the page cache and come back when touched."""
    for mapped in maps:
        with suppress(OSError, ValueError):  # a mapping that is closed, a kernel that declines
            mapped.madvise(mmap.MADV_DONTNEED)


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0
    checksum: str = ""


def _check_partition(partition: Partition, origin: str) -> None:
    size, chunk_bytes = partition.size, partition.chunk_bytes
    if size == 0 or size % PAGE_BYTES or chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
        raise DamagedCheckpoint(f"{origin}: {size} bytes in chunks of {chunk_bytes} are not multiples of {PAGE_BYTES}")
    if len(partition.chunks) != -(-size // chunk_bytes):
        raise DamagedCheckpoint(f"{origin}: {len(partition.chunks)} checksums for {size} bytes")
    if not all(_DIGEST.match(digest) for digest in (partition.digest, *partition.chunks)):
        raise DamagedCheckpoint(f"{origin}: a checksum that is not 64 hexadecimal digits")
    if partition_digest(size, chunk_bytes, partition.chunks) != partition.digest:
        raise DamagedCheckpoint(f"{origin}: the digest does not follow from the checksums of the chunks")


def _check_entry(entry: TensorEntry, partitions: Sequence[Partition], origin: str) -> None:
    if entry.partition >= len(partitions):
        raise DamagedCheckpoint(f"{origin}: partition {entry.partition} of {len(partitions)}")
    if entry.dtype not in NUMPY or entry.layout not in MATRIX_LAYOUTS:
        raise UnsupportedModel(f"{origin}: {entry.dtype} in layout {entry.layout} is not known to this release")
    if not 0 < len(entry.shape) <= 8 or 0 in entry.shape or (entry.layout != "plain" and len(entry.shape) < 2):
        raise DamagedCheckpoint(f"{origin}: shape {list(entry.shape)} in layout {entry.layout}")
    wanted = packed_bytes(entry.layout, entry.dtype, entry.shape)
    if entry.size != wanted:
        raise DamagedCheckpoint(f"{origin}: {entry.size} bytes, {wanted} follow from shape, type and layout")
    if entry.offset % ALIGNMENT:
        raise DamagedCheckpoint(f"{origin}: offset {entry.offset} is not a multiple of {ALIGNMENT}")
    if entry.offset + entry.size > partitions[entry.partition].size:
        end, size = entry.offset + entry.size, partitions[entry.partition].size
        raise DamagedCheckpoint(f"{origin}: ends at byte {end}, outside its partition of {size}")
    if entry.sections and (entry.axis != "rows" or sum(entry.sections) != math.prod(entry.shape[:-1] or entry.shape)):
        raise DamagedCheckpoint(f"{origin}: sections {list(entry.sections)} do not add up to its rows")


def _check_overlaps(entries: list[TensorEntry], origin: str) -> None:
    ordered = sorted(entries, key=lambda entry: (entry.offset, entry.size))
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.size > after.offset:
            raise DamagedCheckpoint(f"{origin}: {before.name} and {after.name} overlap in partition {after.partition}")
    names = [entry.name for entry in entries if entry.axis != "pieces"]
    if len(set(names)) != len(names):
        raise DamagedCheckpoint(f"{origin}: a tensor is twice in partition {entries[0].partition}")


def _check_against_spec(manifest: Manifest, spec: ModelSpec, origin: str) -> None:
    """Every canonical tensor is there, whole, and of the shape that the spec asks for."""
    checked_spec(spec, origin)
    shares: dict[str, list[TensorEntry]] = defaultdict(list)
    for entry in manifest.tensors:
        shares[entry.name].append(entry)
    wanted = dict(spec.tensors())
    for name, shape in wanted.items():
        if name not in shares:
            raise DamagedCheckpoint(f"{origin}: tensor {name} is missing")
        if shares[name][0].axis == "pieces":
            _check_pieces(shares[name], shape, f"{origin}: {name}")
            continue
        if [entry.partition for entry in shares[name]] != list(range(len(manifest.partitions))):
            raise DamagedCheckpoint(f"{origin}: {name} is not in every partition once, in order")
        found = joined_shape(shares[name])
        if found != shape:
            given = "shares that do not fit together" if found is None else f"shape {list(found)}"
            raise DamagedCheckpoint(f"{origin}: {name} has {given}, the spec asks for {list(shape)}")
    extra = next((name for name in shares if name not in wanted), None)
    if extra is not None:
        raise DamagedCheckpoint(f"{origin}: tensor {extra!r} is none of this model's")


def _check_pieces(pieces: list[TensorEntry], shape: tuple[int, ...], origin: str) -> None:
    if any(piece.axis != "pieces" or piece.partition or piece.shape[1:] != shape[-1:] for piece in pieces):
        raise DamagedCheckpoint(f"{origin}: pieces that do not fit together")
    rows, wanted = sum(piece.shape[0] for piece in pieces), math.prod(shape[:-1])
    if rows != wanted:
        raise DamagedCheckpoint(f"{origin}: pieces of {rows} rows, the spec asks for {wanted}")


def files_of(folder: Path, manifest: Manifest) -> list[tuple[Path, Partition]]:
    """Where the blobs of a model lie, or will, in order of device."""
    root = store_root(folder)
    return [(blob_path(root, partition.digest), partition) for partition in manifest.partitions]


def _checked_buffers(folder: Path, buffers: Sequence[memoryview], manifest: Manifest) -> list[memoryview]:
    if len(buffers) != len(manifest.partitions):
        raise DamagedCheckpoint(f"{folder}: {len(buffers)} buffers for {len(manifest.partitions)} partitions")
    for buffer, partition in zip(buffers, manifest.partitions, strict=True):
        if buffer.nbytes < partition.size:
            raise DamagedCheckpoint(f"{folder}: {buffer.nbytes} bytes in memory, the partition has {partition.size}")
    return [buffer.cast("B").toreadonly() for buffer in buffers]


def open_blob(path: Path, partition: Partition) -> int:
    """A descriptor. Links are not followed: a blob lies in the store itself."""
    try:
        if path.parent.is_symlink():
            raise DamagedCheckpoint(f"{path.parent}: a symbolic link; blobs lie in the store itself")
        descriptor = open_regular(path, os.O_NOFOLLOW)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path}: missing") from None
    except OSError as error:
        reason = "a symbolic link; blobs lie in the store itself" if path.is_symlink() else error.strerror
        raise DamagedCheckpoint(f"{path}: {reason}") from error
    found = os.fstat(descriptor)
    if found.st_size != partition.size:
        os.close(descriptor)
        kind = "truncated" if found.st_size < partition.size else "longer than it should be"
        raise DamagedCheckpoint(f"{path}: {kind}: {found.st_size} bytes, the manifest says {partition.size}")
    return descriptor


def mark_in_use(buffer: memoryview, path: Path, partition: Partition) -> None:
    """Until whoever gave the memory takes it back. Without a file there is nothing to protect, and memory that nothing
    can be tied to (a plain `bytes`) is not a pool's."""
    with suppress(DamagedCheckpoint):
        descriptor = open_blob(path, partition)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            weakref.finalize(buffer.obj, os.close, descriptor).atexit = False
        except (OSError, TypeError):
            os.close(descriptor)


def _map_blob(path: Path, partition: Partition) -> mmap.mmap:
    descriptor = open_blob(path, partition)
    try:
        with suppress(OSError):  # a file system without locks: then nothing counts as in use there
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return mmap.mmap(descriptor, partition.size, access=mmap.ACCESS_READ)  # keeps a duplicate, and so the lock
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {error.strerror}") from error
    finally:
        os.close(descriptor)
