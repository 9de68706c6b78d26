"""Which model may draft for which, and what is said where it may not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gateway_builders import make_card, word_piece_tokenizer

from dovetail.cli.offer import _offer, naming
from dovetail.config import Config, ModelConfig, parse_config
from dovetail.errors import ConfigError, InvalidRequest
from dovetail.gateway.draft_models import DraftModels, draft_problem
from dovetail.gateway.models import FixedCatalogue, Models
from dovetail.modelspec import EncoderSpec
from dovetail.store import Catalogue
from dovetail.types import ModelCard


def make_cards(folder: Path) -> dict[str, ModelCard]:
    """Three that may draft for each other, one with another vocabulary, and an encoder."""
    cards = {}
    for name in ("big", "small", "third", "foreign", "encoder"):
        (folder / name).mkdir()
        cards[name] = make_card(folder / name, name)
    word_piece_tokenizer().save(cards["foreign"].tokenizer_file)
    spec = msgspec.structs.replace(cards["encoder"].spec, encoder=EncoderSpec())
    cards["encoder"] = msgspec.structs.replace(cards["encoder"], spec=spec)
    return cards


def make_models(cards: dict[str, ModelCard], **drafts: str) -> Models:
    return Models(FixedCatalogue(list(cards.values())), {name: config_of(draft) for name, draft in drafts.items()})


def config_of(draft: str | None, mode: str = "auto") -> ModelConfig:
    return ModelConfig.model_validate({"source": "x", "speculative": {"mode": mode, "draft": draft}})


def test_a_draft_has_the_same_tokens_whatever_file_they_are_in(tmp_path: Path) -> None:
    cards = make_cards(tmp_path)
    assert draft_problem(cards["big"], cards["small"]) == ""
    same = [msgspec.structs.replace(cards[name], tokenizer_digest="d", tokenizer_file="-") for name in ("big", "small")]
    assert draft_problem(*same) == "", "one file need not be read twice"
    for name, problem in (("foreign", "vocabulary"), ("encoder", "encoder"), ("big", "same model")):
        assert problem in draft_problem(cards["big"], cards[name])
    assert "encoder" in draft_problem(cards["encoder"], cards["big"])


@pytest.mark.parametrize(("draft", "problem"), [("foreign", "another vocabulary"), ("encoder", "is an encoder")])
def test_a_server_does_not_start_with_a_draft_that_cannot_be(tmp_path: Path, draft: str, problem: str) -> None:
    cards = make_cards(tmp_path)
    raw = {"big": {"source": "x", "speculative": {"draft": draft}}, draft: {"source": "y"}}
    config = parse_config({"models": raw, "store": {"path": tmp_path}}, "dovetail.yaml")
    with (
        pytest.raises(ConfigError, match=rf"^dovetail\.yaml: models\.big\.speculative\.draft: .*{problem}"),
        naming(Path("dovetail.yaml")),
    ):
        _offer(config, (), Catalogue(tmp_path), lambda source, name, layout: cards[name or source])


def test_a_draft_is_served_with_the_model_that_was_named(tmp_path: Path) -> None:
    cards = make_cards(tmp_path)
    drafts = {"big": "small", "small": "third", "third": None, "encoder": None}
    models: dict[str, Any] = {name: {"source": name, "speculative": {"draft": draft}} for name, draft in drafts.items()}
    config = Config.model_validate({"models": models, "store": {"path": tmp_path}})
    offer = _offer(config, ("big",), Catalogue(tmp_path), lambda source, name, layout: cards[name or source])
    assert offer.names == ("big", "small", "third")
    assert offer.preload == ("big",)


def test_a_model_is_told_of_its_draft_and_answers_without_one_that_has_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cards = make_cards(tmp_path)
    models = make_models(cards, big="small", small="foreign", third="nobody")
    drafts = DraftModels(models)
    with caplog.at_level(logging.WARNING):
        assert drafts.of(models.get("big")) == cards["small"]
        assert drafts.of(models.get("foreign")) is None
        assert not caplog.messages
        for name in ("small", "small", "third"):
            assert drafts.of(models.get(name)) is None
        assert len(caplog.messages) == 2, "each is told once"
        models.remove("small")
        assert drafts.of(models.get("big")) is None
    models.configure("third", config_of("big", mode="off"))
    assert drafts.of(models.get("third")) is None


@pytest.mark.parametrize(
    ("name", "draft", "problem"),
    [
        ("big", "nobody", "not found"),
        ("big", "big", "itself"),
        ("big", "foreign", "another vocabulary"),
        ("third", "big", "circle: third -> big -> small -> third"),
    ],
)
def test_a_running_server_takes_no_draft_that_cannot_be(tmp_path: Path, name: str, draft: str, problem: str) -> None:
    cards = make_cards(tmp_path)
    drafts = DraftModels(make_models(cards, big="small", small="third"))
    drafts.check("third", cards["third"], None)
    drafts.check("big", cards["big"], "third")
    with pytest.raises(InvalidRequest, match=problem) as raised:
        drafts.check(name, cards[name], draft)
    assert raised.value.param == "speculative"
