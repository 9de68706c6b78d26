"""One source on its way into the store: fetched, converted, published. Its lock is held by the caller."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from dovetail.errors import CheckpointError, SourceError, UnsupportedModel
from dovetail.layouts import GGUF, LAYOUTS, NUMPY
from dovetail.machine import kept_dtype, preferred_dtype
from dovetail.store.checkpoints import CodedFiles, ModelFiles, open_checkpoint
from dovetail.store.convert import JOURNAL_BYTES, Conversion, Source
from dovetail.store.files import check_room, remove_empty
from dovetail.store.format.arrange import Arrangement, arrange
from dovetail.store.format.manifest import FORMAT, TEMPLATE, TOKENIZER, VERSION, Manifest, Partition
from dovetail.store.hf.adapters import PeftFolder, is_adapter_folder
from dovetail.store.paths import StorePaths, source_key
from dovetail.store.publish import digests_of, publish
from dovetail.store.sources.bucket_model import BucketModel, EarlyServing, ModelDownload, find_model
from dovetail.store.sources.fetch import Fetched, Progress, default_name, fetch, files_identity

Written = list[tuple[Path, Partition]]


AUTO = "auto"
ENCODER_DTYPE = "f32"  # what torch computes encoders in: kept so, their weights are used where they lie
AUTO_LAYOUTS = ("plain", GGUF, "int8", "int4")  # what it can mean, the last two of a store that has them


class Form(NamedTuple):
    """What a pull makes of the weights."""

    dtype: str = AUTO
    layout: str = AUTO
    ranks: int = 1

    @property
    def is_whole_and_plain(self) -> bool:
        return self.layout in (AUTO, "plain") and self.ranks == 1

    def settled(self, source: ModelFiles) -> Form:
        """With `auto` decided: floats stay floats, GGUF's blocks stay as they are, and so does what a store keeps."""
        kept = ENCODER_DTYPE if source.spec.encoder is not None else kept_dtype(source.dtype)
        form = self._replace(dtype=kept) if self.dtype == AUTO else self
        if form.layout != AUTO:
            return form
        if source.dtype in NUMPY:
            return form._replace(layout="plain")
        return form._replace(layout=source.dtype if source.dtype in LAYOUTS else "int8")

    def allows(self, other: Form, is_encoder: bool = False) -> bool:
        """Whether `other`, which is settled, may be what this one comes to. What `auto` makes of a source is known once
        it is opened; whatever it can mean is what somebody may have wanted of it."""
        auto = (ENCODER_DTYPE,) if is_encoder else (preferred_dtype(), kept_dtype("bf16"))
        dtypes = auto if self.dtype == AUTO else (self.dtype,)
        layouts = AUTO_LAYOUTS if self.layout == AUTO else (self.layout,)
        return other.dtype in dtypes and other.layout in layouts and other.ranks == self.ranks


class Pull(NamedTuple):
    paths: StorePaths
    source: str  # as manifests keep it
    name: str | None  # None = after the source
    form: Form
    progress: Progress | None = None
    force: bool = False
    keep_dtype: bool = False  # an adapter keeps its own type
    journal_bytes: int = JOURNAL_BYTES
    early: EarlyServing | None = None  # where it may be served while it comes from a bucket

    @property
    def key(self) -> str:
        return source_key(self.source)

    def run(self, given: str) -> str:
        """Returns the name. A download that is complete stays until its conversion is, an incomplete one until the
        next attempt; one that turns out to be of no use goes at once."""
        download = self.paths.staging / f"fetch-{self.key}"
        if self.force:
            shutil.rmtree(download, ignore_errors=True)
        found = find_model(given)
        if found is not None:
            return self._copy(found, download)
        try:
            with fetch(given, self.progress, download) as fetched:
                name = self.take_over(fetched)
        except CheckpointError:
            shutil.rmtree(download, ignore_errors=True)
            raise
        finally:
            remove_empty(download)
        shutil.rmtree(download, ignore_errors=True)
        return name

    def _copy(self, found: BucketModel, download: Path) -> str:
        """What is in the form of the store already stays as it is."""
        manifest, form = found.manifest, self.form
        kept = Form(manifest.dtype, manifest.layout, len(manifest.partitions))
        asked = (form.dtype in (AUTO, kept.dtype), form.layout in (AUTO, kept.layout), form.ranks in (1, kept.ranks))
        if not all(asked):
            told = f"{kept.dtype}, {kept.layout}, in {kept.ranks} parts"
            raise SourceError(f"{self.source}: kept as {told}, and not converted; leave out --dtype, --layout and --tp")
        name = self.name or default_name(found.name)
        copy = ModelDownload(self.paths, name, self.source, found, download, self.progress, force=self.force)
        copy.run(self.early)
        return name

    def take_over(self, fetched: Fetched, beside: bool = False) -> str:
        """`beside`: a folder of the first form gets its manifest from its own files."""
        name = self.name or fetched.name
        self.paths.folder(name)
        convert = self._convert_adapter if is_adapter_folder(fetched.path) else self._convert_model
        manifest, files, written = convert(fetched.path)
        publish(self.paths, name, manifest, files, written, renew_blobs=self.force, beside=beside)
        shutil.rmtree(self._staging, ignore_errors=True)
        return name

    @property
    def _staging(self) -> Path:
        return self.paths.staging / f"convert-{self.key}"

    def _convert_model(self, path: Path) -> tuple[Manifest, dict[str, bytes], Written]:
        checkpoint = open_checkpoint(path)
        try:
            form = self.form.settled(checkpoint)
            coded = checkpoint.coded if isinstance(checkpoint, CodedFiles) else None
            if form.layout == GGUF and coded is None:
                raise UnsupportedModel(f"{path}: has no GGUF blocks that could be kept as they are (--layout gguf)")
            arrangement = arrange(checkpoint.spec, *form, coded)
            files = _texts(checkpoint)  # what is wrong with them should be known before an hour of work
            written = self._write(checkpoint, arrangement, path, form)
            tokens = msgspec.structs.replace(checkpoint.tokenizer()[0], chat_template=None)
            manifest = self._manifest(arrangement, written, form, files)
            return msgspec.structs.replace(manifest, spec=checkpoint.spec, tokens=tokens), files, written
        finally:
            checkpoint.close()

    def _convert_adapter(self, path: Path) -> tuple[Manifest, dict[str, bytes], Written]:
        if not self.form.is_whole_and_plain:
            raise UnsupportedModel(f"{path}: an adapter is kept plain and whole; leave out --layout and --tp")
        folder = PeftFolder(path)
        try:
            form = Form(folder.dtype if self.keep_dtype else self.form.dtype, "plain")
            arrangement = folder.arrange(form.dtype)
            written = self._write(folder, arrangement, path, form)
            manifest = self._manifest(arrangement, written, form, {})
            return msgspec.structs.replace(manifest, kind="adapter", adapter=folder.adapter), {}, written
        finally:
            folder.close()

    def _write(self, source: Source, arrangement: Arrangement, path: Path, form: Form) -> Written:
        staging = self._staging
        identity = f"{FORMAT} {VERSION} {tuple(form)} {files_identity(path)}"
        conversion = Conversion(staging, identity, self.journal_bytes)
        if self.force or not conversion.resumable_bytes():
            shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(exist_ok=True)
        check_room(self.source, staging, sum(arrangement.sizes) - conversion.resumable_bytes())
        progress = self.progress
        report = None if progress is None else lambda done, total: progress("convert", done, total)
        partitions = conversion.run(source, arrangement, report)
        return [(conversion.path(rank), partition) for rank, partition in enumerate(partitions)]

    def _manifest(self, arrangement: Arrangement, written: Written, form: Form, files: dict[str, bytes]) -> Manifest:
        return Manifest(
            format=FORMAT,
            version=VERSION,
            checksum="",
            kind="model",
            source=self.source,
            created=int(time.time()),
            dtype=form.dtype,
            layout=form.layout,
            partitions=tuple(partition for _, partition in written),
            tensors=tuple(share for tensor in arrangement.tensors for share in tensor.shares),
            files=digests_of(files),
        )


def _texts(checkpoint: ModelFiles) -> dict[str, bytes]:
    tokens, tokenizer = checkpoint.tokenizer()
    files = {TOKENIZER: tokenizer.encode()}
    return files if tokens.chat_template is None else files | {TEMPLATE: tokens.chat_template.encode()}
