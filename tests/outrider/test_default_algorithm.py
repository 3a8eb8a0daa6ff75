"""Which drafts are made where nobody says."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outrider.args import DraftArgs, ServeArgs, VerifyArgs
from outrider.args import serve as serve_args
from outrider.default_algorithm import fastest_algorithm
from outrider.errors import StartupError

TABLES = {
    "as_it_is": {"speeds": {"NGRAM": 1.1, "EAGLE3": 1.3, "STANDALONE": 0.9}},
    "quantized": {"speeds": {"NGRAM": 1.2, "EAGLE3": 1.0}},
}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "speeds.json"
    path.write_text(json.dumps(TABLES))
    monkeypatch.setattr(serve_args, "fastest_algorithm", partial(fastest_algorithm, path=path))
    return path


def test_the_fastest_that_was_measured_is_used(table: Path, tmp_path: Path) -> None:
    assert fastest_algorithm(quantized=False, path=table) == "EAGLE3"
    assert fastest_algorithm(quantized=True, path=table) == "NGRAM"
    table.write_text(json.dumps({"as_it_is": TABLES["as_it_is"]}))
    assert fastest_algorithm(quantized=True, path=table) == "NGRAM"
    assert fastest_algorithm(quantized=False, path=tmp_path / "none.json") == "NGRAM"


def test_a_damaged_table_is_named(table: Path) -> None:
    for text in ("{", "3", '{"as_it_is": {"speeds": {}}}', '{"as_it_is": {"speeds": []}}'):
        table.write_text(text)
        with pytest.raises(StartupError, match="is damaged"):
            fastest_algorithm(quantized=False, path=table)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, "EAGLE3"),
        ({"quantization": "int8_dynamic"}, "NGRAM"),
        ({"speculative_algorithm": "NGRAM"}, "NGRAM"),
        ({"speculative_algorithm": "NONE"}, "NONE"),
        ({"model_path": "/models/other"}, "NGRAM"),
        ({"load_format": "dummy"}, "NGRAM"),
    ],
)
def test_it_is_the_embedded_models_default_alone(given: dict[str, Any], used: str) -> None:
    args = ServeArgs(**given)
    assert args.algorithm == used
    for kind in (VerifyArgs, DraftArgs) if args.drafts else (VerifyArgs,):
        assert (args.part(kind).speculative_algorithm or "NGRAM") == used
