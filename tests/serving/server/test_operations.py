"""What a server tells about itself."""

from __future__ import annotations

import pytest

import specdec_kernels


def test_models(within, service):
    async def ask(client):
        return [await client.get(path) for path in ("/v1/models", "/v1/models/embedded", "/v1/models/other/name")]

    models, model, other = within(ask)
    assert models.json() == {"object": "list", "data": [model.json()]}
    told = model.json()
    assert (told["id"], told["object"], told["created"]) == ("embedded", "model", service.created)
    assert told["max_model_len"] == 256
    assert other.status_code == 404 and other.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("given", [{}, {"model": None}, {"model": ""}, {"model": "embedded"}])
@pytest.mark.parametrize(
    ("path", "body"),
    [("completions", {"prompt": "x = ", "max_tokens": 3}), ("responses", {"input": "x = ", "max_output_tokens": 3})],
)
def test_a_request_without_a_model_is_one_to_the_only_one(within, service, monkeypatch, path, body, given):
    monkeypatch.setattr(service.tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")

    async def ask(client):
        return [await client.post(f"/v1/{path}", json={**body, **named}) for named in (given, {"model": "embeded"})]

    taken, other = within(ask)
    assert taken.status_code == 200 and taken.json()["model"] == "embedded"
    told = other.json()["error"]
    assert (other.status_code, told["param"], told["code"]) == (404, "model", "model_not_found")
    assert "'embedded'" in told["message"]


def test_health_and_ready(within, service):
    async def ask(client):
        return [(await client.get(path)).status_code for path in ("/health", "/ready")]

    async def first_then_draining(client):
        told = [await ask(client)]
        await service.lanes.get()
        told.append(await ask(client))
        service.draining.set()
        return [*told, await ask(client)]

    assert within(first_then_draining) == [[200, 503], [200, 200], [200, 503]]


def test_a_dead_engine(within, service, monkeypatch):
    async def ask(client):
        lane = await service.lanes.get()

        def die():
            raise SystemExit("secret reason")

        monkeypatch.setattr(lane.engine._scheduler, "step", die)
        failed = await client.post("/predict", json={"prompt": "x"})
        return failed, *[await client.get(path) for path in ("/health", "/ready")]

    for answer in (told := within(ask)):
        assert "secret" not in answer.text
    assert [answer.status_code for answer in told] == [500, 503, 503]
    assert told[1].json()["error"] == {
        "message": "stopped engines: model/coupled",
        "type": "server_error",
        "param": None,
        "code": "engine_stopped",
    }


def test_version(within):
    assert within(lambda client: client.get("/version")).json() == {"version": specdec_kernels.__version__}


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
def test_only_what_a_route_answers(within, path):
    assert within(lambda client: client.delete(path)).status_code == 405
