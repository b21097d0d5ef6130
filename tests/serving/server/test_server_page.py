"""docs/server.md says what the server does."""

from __future__ import annotations

import re

from specdec.serving.server.predict import PredictBody
from specdec.serving.server.request_bodies import ChatRequest, CompletionRequest
from support import ROOT

PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)))


def test_every_field_is_in_its_table():
    fields = {*CompletionRequest.model_fields, *ChatRequest.model_fields, *PredictBody.model_fields}
    assert len(fields) > 50 and fields <= NAMED, fields - NAMED


def test_every_route_is_in_its_table(service):
    from specdec.serving.server.app import create_app

    paths = {path for path in create_app(service).openapi()["paths"]}
    assert len(paths) >= 8
    for path in paths:
        assert path.replace("{name}", "NAME") in PAGE, path


def test_every_metric_is_in_its_table(service):
    families = {family.name for family in service.metrics._registry.collect() if not family.name.startswith("process")}
    named = {re.sub(r"(_total)?(\{.*\})?$", "", name) for name in NAMED if re.match("(vllm|specdec):.", name)}
    assert families == named
