"""The heads that come with the package: that they ship, load without remarks, and draft."""

from __future__ import annotations

import copy
import json
import tomllib
import warnings
from types import SimpleNamespace

import pytest
from specdec import load_embedded_head
from specdec.drafters.heads.load import KINDS
from specdec.drafters.heads.self_check import self_check
from specdec.models.supported import cached_model
from support import ROOT
from support.models import tiny_model

EMBEDDED = ROOT / "python" / "specdec" / "embedded"


@pytest.mark.parametrize("kind", KINDS)
def test_loading_needs_no_self_check(pair, kind):
    """It would find nothing to say of these files. Prose is not what they learned from, but they draft there, too."""
    target, _, tokenizer = pair
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafter = load_embedded_head(kind, target)
    assert drafter.report is None and drafter.head.kind == kind
    report = self_check(drafter.head, cached_model(target, "target"), tokenizer)
    assert not report.little and report.acceptance[0] > {"medusa": 0.3, "eagle3": 0.45, "dflash": 0.5}[kind]


def test_files_ship_with_the_package():
    """Every file of the folder is one of the distribution, none names a folder of the machine that it was made on."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["specdec"]
    shipped = {file for pattern in patterns for file in EMBEDDED.parent.glob(pattern)}
    files = {file for file in EMBEDDED.rglob("*") if file.is_file()}
    assert files <= shipped
    for kind in KINDS:
        folder = EMBEDDED / "heads" / kind
        assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
        assert "_name_or_path" not in json.loads((folder / "config.json").read_text())


def test_others_are_refused(pair):
    with pytest.raises(ValueError, match="kind: got 'eagle', allowed: 'medusa', 'eagle3', 'dflash'"):
        load_embedded_head("eagle", pair[0])
    with pytest.raises(
        ValueError, match="target: got a model of type 'llama' with other sizes, allowed: that of load_emb"
    ):
        load_embedded_head("medusa", tiny_model("llama"))
    config = copy.copy(pair[0].config)
    config.num_hidden_layers += 1
    with pytest.raises(ValueError, match="target: got a model of type 'llama' with other sizes"):
        load_embedded_head("medusa", SimpleNamespace(config=config))
