"""What a folder needs to be loaded from, or a name on the Hugging Face hub, which may be out of reach: errors say which
files are missing, and nobody waits for a hub that does not answer."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import get_session

CONFIG, WEIGHTS = "config.json", "*.safetensors"
# The vocabulary, as one library or another writes it. A tokenizer of bytes has no such file, only its configuration.
VOCABULARY = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "*.tiktoken",
    "tekken.json",
)
TOKENIZER = (*VOCABULARY, "tokenizer_config.json")
PATIENCE = 2.0  # seconds in which the hub has to answer

_answered = set[str]()  # hubs that did; they are not asked again


def require_folder(name: str, path: str | os.PathLike, *needed: str | tuple[str, ...]) -> None:
    """Raises OSError saying what is missing. transformers would take a missing folder for the name of a model on the
    hub. A GGUF file is none: ``is_gguf`` is asked before this.

    Args:
        name: the caller's name for ``path``, for errors.
        needed: patterns of files that a folder has to have; of several in a tuple, one of them.
    """
    if is_hub_name(path):
        return
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise OSError(f"{name}: there is no folder {str(path)!r}")
    choices = [(n,) if isinstance(n, str) else n for n in needed]
    missing = [c for c in choices if not any(any(folder.glob(pattern)) for pattern in c)]
    if missing:
        named = [c[0] + {WEIGHTS: " (weights)", VOCABULARY[0]: " (tokenizer)"}.get(c[0], "") for c in missing]
        raise OSError(f"{name}: the folder {str(path)!r} has no {', no '.join(named)}{_instead(folder)}")


def is_gguf(path: str | os.PathLike) -> bool:
    """Whether ``path`` is the name of a GGUF file, which has all that a folder has."""
    return Path(path).suffix.lower() == ".gguf"


def is_hub_name(path: str | os.PathLike) -> bool:
    """Whether ``path`` is taken for the name of a model on the Hugging Face hub: "model" or "owner/model", and there is
    no such folder."""
    looks_so = isinstance(path, str) and path.count("/") <= 1 and not path.startswith((".", "~", "/"))
    return looks_so and not Path(path).expanduser().exists()


@contextmanager
def hub_or_cache(name: str, path: str | os.PathLike) -> Iterator[None]:
    """If ``path`` is a hub name and the hub does not answer one request, the block reads the hub's cache alone.
    Otherwise every file would be asked for again and again, for most of a minute.

    Raises:
        OSError: names ``name``: the hub does not answer, and there is no such model in its cache, nor a folder of this
            name.
    """
    if not is_hub_name(path) or (trouble := _trouble()) is None:
        yield
        return
    if not any(isinstance(try_to_load_from_cache(str(path), file), str) for file in (CONFIG, "adapter_config.json")):
        raise OSError(
            f"{name}: there is no folder {str(path)!r}, and no model of this name is in the cache of the Hugging Face "
            f"hub, which cannot be reached: {trouble}"
        )
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _trouble() -> str | None:
    """Why the hub cannot be asked; None: it answers."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if constants.ENDPOINT not in _answered:
        try:  # a proxy, certificates and so on are those of the session that downloads
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
        except Exception as error:  # of requests, httpx or httpx2, by the version of huggingface_hub
            return f"{constants.ENDPOINT} does not answer ({error})"
        _answered.add(constants.ENDPOINT)
    return None


def _instead(folder: Path) -> str:
    """What the folder has instead of what can be loaded, for an error."""
    if packed := sorted(folder.glob("*.gguf")):
        return f"; what there is, {packed[0].name}, can be given itself: {shlex.quote(str(packed[0]))}"
    pickled = sorted(folder.glob("pytorch_model*.bin"))
    return f"; {pickled[0].name} is a pickle, which can run any code and is not read" if pickled else ""


def conversion(path: str | os.PathLike) -> str:
    """The command that makes a folder of a GGUF file."""
    return f"specdec convert {shlex.quote(str(path))} {shlex.quote(str(Path(path).with_suffix('')))}"
