"""What a server offers: configuration and names from the command line, models from the store. The one place where the
gateway gets its catalogue."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dovetail.config import Config, ModelConfig, StoreConfig, load_config
from dovetail.errors import ConfigError, DovetailError, InvalidRequest, ModelNotFound
from dovetail.gateway.draft_models import draft_problem
from dovetail.gateway.models import ConfiguredModels, FixedCatalogue, NamedAdapter
from dovetail.store import Catalogue, describe
from dovetail.store.checking import Finding, check_pieces, quarantine
from dovetail.store.collect import collect
from dovetail.store.format.manifest import is_stored, read_manifest
from dovetail.store.hf.adapter_parts import declared_base, describe_adapter
from dovetail.store.hf.adapters import CONFIG as ADAPTER_CONFIG
from dovetail.store.host_pool.pool import HostPool
from dovetail.store.loading.pooled import pooled_keys
from dovetail.store.pull_process import PullBounds, pull_in_process
from dovetail.store.sources.bucket_model import is_model_address
from dovetail.store.sources.fetch import default_name, full_source, is_remote
from dovetail.store.sources.object_store import is_object_address
from dovetail.store.watched import WatchedCatalogue
from dovetail.types import AdapterRef, ModelCard

log = logging.getLogger("dovetail.gateway")

# By source, under a name, in a layout if it has to be converted for it; None = has to be pulled.
Find = Callable[[str, str | None, str], ModelCard | None]


def make_offer(config: Config, wanted: Sequence[str] = (), *, serves_early: bool = False) -> ConfiguredModels:
    """What was named, else what the config names, else the whole catalogue. What is not here is pulled, with a bar;
    with `serves_early` what can be served while it downloads is left to the server."""
    catalogue = Catalogue(config.store.path)

    def find(source: str, name: str | None, layout: str) -> ModelCard | None:
        is_absent = is_object_address(source) and catalogue.present(source, name, layout) is None
        if serves_early and is_absent and is_model_address(source):
            return None
        return find_card(catalogue, source, name, layout)

    offer = _offer(config, wanted, catalogue, find)
    if config.store.max_size is not None and offer.configs:
        collect(catalogue.paths, config.store.max_size, keep=[Path(card.path).name for card in offer.catalogue.cards()])
    return offer


@contextmanager
def naming(file: Path | None) -> Iterator[None]:
    """What is wrong with the configuration is wrong with this file."""
    try:
        yield
    except ConfigError as error:
        raise (error if file is None else ConfigError(f"{file}: {error}")) from error


def find_card(catalogue: Catalogue, source: str, name: str | None = None, layout: str = "auto") -> ModelCard:
    """A model by its name in the catalogue, in place in its folder, or pulled from where it is."""
    from dovetail.cli.models import progress_bar

    card = find_local(catalogue, source, name, layout)
    if card is not None:
        return card
    with progress_bar(enabled=sys.stderr.isatty()) as progress:
        return catalogue.pull(source, name=name, layout=layout, progress=progress)


def find_local(catalogue: Catalogue, source: str, name: str | None = None, layout: str = "auto") -> ModelCard | None:
    """None if it has to be fetched or converted first."""
    source = full_source(source)
    path = Path(source).expanduser()
    if path.is_dir():
        return describe(path, name or path.resolve().name)
    if ":" in source or path.is_file():
        return catalogue.present(source, name, layout)
    try:
        card = catalogue.get(source)
    except InvalidRequest as error:
        raise ModelNotFound(
            f"{source}: neither a model that is here nor a folder, file or source; "
            "`dovetail list` shows what is here, `dovetail pull hf:org/name` fetches more"
        ) from error
    return card if name is None else msgspec.structs.replace(card, name=name)


def _offer(config: Config, wanted: Sequence[str], catalogue: Catalogue, find: Find) -> ConfiguredModels:
    configs = dict(config.models)
    if not wanted and not configs:
        return ConfiguredModels(WatchedCatalogue(catalogue), {})
    cards, preload, missing = [], [], []
    for name in _with_drafts(wanted or tuple(config.models), configs):
        entry = configs.get(name)
        card = find(name, None, "auto") if entry is None else find(entry.source, name, entry.layout)
        if card is None:
            missing.append(_arriving(name, name in wanted, configs))
            continue
        if entry is None:
            # Asked for by name, so it stays until it is stopped.
            configs[card.name] = ModelConfig(source=card.source or name, keep_alive=-1)
        if name in wanted or (entry is not None and entry.preload):
            preload.append(card.name)
        cards.append(card)
    _check_drafts(cards, configs)
    adapters = [adapter for card in cards for adapter in _adapters_of(catalogue, card, configs.get(card.name))]
    return ConfiguredModels(FixedCatalogue(cards), configs, tuple(preload), tuple(missing), tuple(adapters))


def _arriving(name: str, is_wanted: bool, configs: dict[str, ModelConfig]) -> str:
    """What a model that has to be pulled is called; one that the command line names is loaded when it is there."""
    if name in configs:
        if is_wanted:
            configs[name] = configs[name].model_copy(update={"preload": True})
        return name
    called = default_name(name.rstrip("/").rpartition("/")[2])
    configs[called] = ModelConfig(source=name, keep_alive=-1, preload=True)
    return called


def _with_drafts(names: Sequence[str], configs: Mapping[str, ModelConfig]) -> Iterator[str]:
    """A model's draft is served with it."""
    met: set[str] = set()
    waiting = list(reversed(names))
    while waiting:
        name = waiting.pop()
        if name not in met:
            met.add(name)
            yield name
            draft = configs[name].speculative.draft if name in configs else None
            waiting += [draft] if draft is not None and draft not in names else []


def _check_drafts(cards: Sequence[ModelCard], configs: Mapping[str, ModelConfig]) -> None:
    """As far as they are here already; what has to be pulled is looked at when it is."""
    by_name = {card.name: card for card in cards}
    for name, card in by_name.items():
        config = configs.get(name)
        draft = by_name.get(config.speculative.draft or "") if config is not None else None
        try:
            problem = draft_problem(card, draft) if draft is not None else ""
        except DovetailError as error:
            problem = str(error)
        if problem:
            raise ConfigError(f"models.{name}.speculative.draft: {problem}")


def _adapters_of(catalogue: Catalogue, card: ModelCard, config: ModelConfig | None) -> Iterator[NamedAdapter]:
    for name, source in config.adapters.items() if config is not None else ():
        try:
            ref = find_adapter(catalogue, source, name, card)
        except (DovetailError, OSError) as error:
            raise ConfigError(f"models.{card.name}.adapters.{name}: {error}") from error
        yield NamedAdapter(card.name, ref, source, int(time.time()), in_file=True)


def find_adapter(catalogue: Catalogue, source: str, name: str, card: ModelCard) -> AdapterRef:
    return describe_adapter(_adapter_folder(catalogue, source), name, card.spec)


def _adapter_folder(catalogue: Catalogue, source: str) -> Path:
    try:
        path = Path(source).expanduser()
        return path if path.is_dir() else catalogue.existing(source)
    except (ModelNotFound, InvalidRequest, ValueError, RuntimeError) as error:  # the last two: no path at all
        raise ModelNotFound(
            f"{source}: neither a folder with {ADAPTER_CONFIG} nor an adapter that was pulled; "
            "`dovetail pull SOURCE` fetches one, `dovetail list` shows what is here"
        ) from error


class LocalStore:
    """The store as a running server uses it."""

    def __init__(self, config: StoreConfig, pool: HostPool | None = None, *, serves_early: bool = True) -> None:
        """`serves_early`: models are served while they download, which takes nodes that share the pool."""
        self._serves_early = serves_early
        self._catalogue = Catalogue(config.path)
        self._bounds = PullBounds(config.pull_memory, config.pull_timeout)
        self._pool = pool
        self._digests: dict[ModelCard, frozenset[str]] = {}  # of its partitions; a model pulled again is another card

    def find(self, source: str, name: str, layout: str) -> ModelCard | None:
        return find_local(self._catalogue, source, name, layout)

    def find_adapter(self, source: str, name: str, card: ModelCard) -> AdapterRef:
        return find_adapter(self._catalogue, source, name, card)

    def adapter_base(self, source: str) -> str:
        return declared_base(_adapter_folder(self._catalogue, source))

    def pull(
        self,
        source: str,
        name: str,
        layout: str,
        progress: Callable[[str, int, int], None],
        on_servable: Callable[[ModelCard], None],
    ) -> ModelCard:
        pool = self._pool.file if self._pool is not None and self._serves_early else -1
        return pull_in_process(
            self._catalogue.root,
            source,
            name,
            layout,
            progress,
            bounds=self._bounds,
            pool=pool,
            on_servable=on_servable,
        )

    def check_pieces(self, card: ModelCard) -> Iterator[Finding]:
        """Only of what is in the store: a folder elsewhere has no checksums."""
        folder = Path(card.path)
        return check_pieces(folder) if folder.parent == self._catalogue.paths.models else iter(())

    def put_aside(self, card: ModelCard, finding: Finding) -> bool:
        aside = quarantine(self._catalogue.paths, Path(card.path), finding)
        log.error("%s: what is damaged lies in %s now", card.name, aside)
        if self._pool is not None and finding.digest:
            self._evict(finding.digest)
        return bool(card.source) and (is_remote(card.source) or Path(card.source).exists())

    def _evict(self, digest: str) -> None:
        """It may have been read from the disk when that was damaged already. The worker needs a moment to let go."""
        assert self._pool is not None
        for _ in range(50):
            if digest not in self._pool.keys() or self._pool.evict(digest):  # noqa: SIM118
                return
            time.sleep(0.1)
        log.warning("the pool still holds %s", digest)

    def in_host_memory(self, cards: Sequence[ModelCard]) -> set[str]:
        pooled = set(self._pool.stats().ready_keys) if self._pool is not None else set()
        return {card.name for card in cards if self._partitions(card) <= pooled} if pooled else set()

    def _partitions(self, card: ModelCard) -> frozenset[str]:
        if card not in self._digests:
            folder = Path(card.path)
            # What is not in the store's form never comes into the pool: no key there is empty.
            self._digests[card] = pooled_keys(read_manifest(folder)) if is_stored(folder) else frozenset({""})
        return self._digests[card]


class ConfigFile:
    """`dovetail.yaml` under the options of the command line, as often as it is wanted."""

    def __init__(self, path: Path, override: Callable[[Config], Config], wanted: Sequence[str]) -> None:
        self._path = path
        self._override = override
        self._wanted = wanted

    def read(self) -> Config:
        config = load_config(self._path)
        with naming(self._path):
            return self._override(config)

    def offer(self, config: Config) -> ConfiguredModels:
        """Pulls nothing: that would keep everything else in the file waiting."""
        catalogue = Catalogue(config.store.path)

        def find(source: str, name: str | None, layout: str) -> ModelCard | None:
            try:
                card = find_local(catalogue, source, name, layout)
            except DovetailError as error:
                raise ConfigError(f"models.{name}.source: {error}" if name is not None else str(error)) from error
            if card is None and name is None:  # it was pulled before the server started
                raise ConfigError(f"{source}, given on the command line, is no longer in the store; pull it again")
            return card

        with naming(self._path):
            return _offer(config, self._wanted, catalogue, find)
