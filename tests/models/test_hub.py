"""Names on the Hugging Face hub: it is asked once, and where it does not answer, its cache is all that there is."""

from __future__ import annotations

import pytest
from huggingface_hub import constants
from specdec.models.load import location
from specdec.models.load.loading import load_model, load_tokenizer, read_config
from specdec.models.load.location import Location
from support.models import tiny_model


class Session:
    """The hub's client, which answers or not."""

    def __init__(self, answers: bool):
        self.answers, self.asked = answers, 0

    def head(self, url: str, timeout: float) -> None:
        self.asked += 1
        assert url == constants.ENDPOINT and timeout <= 2
        if not self.answers:
            raise RuntimeError("no route to it")  # of the client's own kind, whatever that is


@pytest.fixture
def hub(monkeypatch, tmp_path):
    def set_up(answers: bool) -> Session:
        session = Session(answers)
        monkeypatch.setattr(location, "get_session", lambda: session)
        monkeypatch.setattr(location, "_answered", set())
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        return session

    return set_up


@pytest.mark.parametrize(
    "load", (load_model, lambda path: load_tokenizer("path", path), lambda p: read_config("path", p))
)
def test_a_hub_that_cannot_be_reached_fails_once(hub, load):
    session = hub(answers=False)
    with pytest.raises(
        OSError, match=r"^path: there is no folder 'a/model', .*cannot be reached: http.*no route to it"
    ):
        load("a/model")
    assert session.asked == 1 and not constants.HF_HUB_OFFLINE


def test_what_is_in_the_cache_is_read_without_the_hub(hub, monkeypatch, tmp_path):
    hub(answers=False)
    commit = "0" * 40
    at = tmp_path / "cache" / "models--a--model"
    tiny_model("llama").save_pretrained(at / "snapshots" / commit)
    (at / "refs").mkdir()
    (at / "refs" / "main").write_text(commit)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert load_model("a/model").config.model_type == "llama" and not constants.HF_HUB_OFFLINE


def test_a_hub_that_answers_is_not_asked_again(hub):
    session = hub(answers=True)
    for _ in range(3):
        with Location("path", "a/model").reading():
            assert not constants.HF_HUB_OFFLINE
    assert session.asked == 1


def test_offline_by_the_users_word(hub, monkeypatch):
    session = hub(answers=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="path: .*cannot be reached: HF_HUB_OFFLINE is set"):
        load_model("a/model")
    assert session.asked == 0


def test_what_is_a_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    paths = ("a/model", "gpt2", "here", "./there", "a/b/c", "/a", tmp_path / "x", "a/model.gguf")
    assert [Location("path", path).is_hub_name for path in paths] == [True, True] + 6 * [False]
