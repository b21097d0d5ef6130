"""The page at ``/``, on which people see speculation happening, and what it asks for beside OpenAI's routes."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from .service import Service

router = APIRouter()


@router.get("/", include_in_schema=False)
async def page() -> HTMLResponse:
    html, policy = _page()
    return HTMLResponse(html, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"})


@router.get("/v1/specdec")
async def offered(request: Request) -> dict[str, Any]:
    """Among what requests may choose here. The first drafter and rule are the default ones; K and lengths are known of
    the lanes that run, of which the default one always does."""
    service: Service = request.app.state.service
    await service.lanes.get()
    lanes = [
        {"drafter": lane.drafter, "rule": lane.rule, "num_drafts": lane.most_drafts, "max_length": lane.max_length}
        for lane in service.lanes.running
    ]
    return {
        "model": service.name,
        "drafters": service.lanes.drafters,
        "rules": service.lanes.rules,
        "lanes": lanes,
        "chat": bool(service.tokenizer.chat_template),
    }


@functools.cache
def _page() -> tuple[str, str]:
    """The page, and a policy that lets a browser run its script and use its style, talk to this server, and nothing
    else: no other host, and no HTML out of text."""
    html = resources.files(__package__).joinpath("page.html").read_text("utf-8")
    script, style = (_hash(re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)) for tag in ("script", "style"))
    rules = (
        "default-src 'none'",
        f"script-src {script}",
        f"style-src {style}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return html, "; ".join(rules)


def _hash(element: re.Match[str] | None) -> str:
    assert element is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(element[1].encode()).digest()).decode()}'"
