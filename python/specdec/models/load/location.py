"""What a path names: a folder, a GGUF file, or a model on the Hugging Face hub, which may be out of reach. Errors say
which files are missing, and nobody waits for a hub that does not answer."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import get_session
from safetensors import SafetensorError

from ...checks import one_line

CONFIG, WEIGHTS, ADAPTER = "config.json", "*.safetensors", "adapter_config.json"
# The vocabulary, as one library or another writes it. A tokenizer of bytes has no such file, only its configuration.
VOCABULARY = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken", "tekken.json",
)  # fmt: skip
TOKENIZER = (*VOCABULARY, "tokenizer_config.json")
PATIENCE = 2.0  # seconds in which the hub has to answer

_answered = set[str]()  # hubs that did; they are not asked again


@dataclass(frozen=True)
class Location:
    """Where a model, its tokenizer or its adapter is.

    Attributes:
        name: the caller's name for ``path``, for errors.
    """

    name: str
    path: str | os.PathLike

    def __str__(self) -> str:
        """As errors show it."""
        return repr(str(self.path))

    @property
    def folder(self) -> Path:
        return Path(self.path).expanduser()

    @property
    def is_gguf(self) -> bool:
        """Whether it names a GGUF file, which has all that a folder has."""
        return Path(self.path).suffix.lower() == ".gguf" and not self.folder.is_dir()

    @property
    def is_hub_name(self) -> bool:
        """Whether it is taken for the name of a model on the Hugging Face hub: "model" or "owner/model", and there is
        no such folder."""
        path = self.path
        looks_so = isinstance(path, str) and path.count("/") <= 1 and not path.startswith((".", "~", "/"))
        return looks_so and not self.is_gguf and not self.folder.exists()

    @property
    def conversion(self) -> str:
        """The command that makes a folder of a GGUF file."""
        return f"specdec convert {shlex.quote(str(self.path))} {shlex.quote(str(Path(self.path).with_suffix('')))}"

    def require(self, *needed: str | tuple[str, ...]) -> None:
        """Raises OSError saying what is missing in a folder. transformers would take a missing folder for the name of
        a model on the hub.

        Args:
            needed: patterns of files that it has to have; of several in a tuple, one of them.
        """
        if self.is_gguf or self.is_hub_name:
            return
        if not self.folder.is_dir():
            raise OSError(f"{self.name}: there is no folder {self}")
        choices = [(n,) if isinstance(n, str) else n for n in needed]
        missing = [c for c in choices if not any(any(self.folder.glob(pattern)) for pattern in c)]
        if missing:
            named = [c[0] + {WEIGHTS: " (weights)", VOCABULARY[0]: " (tokenizer)"}.get(c[0], "") for c in missing]
            raise OSError(f"{self.name}: the folder {self} has no {', no '.join(named)}{_instead(self.folder)}")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """If it is a hub name and the hub does not answer one request, the block reads the hub's cache alone.
        Otherwise every file would be asked for again and again, for most of a minute.

        Raises:
            OSError: the hub does not answer, and there is no such model in its cache, nor a folder of this name.
        """
        if not self.is_hub_name or (trouble := _trouble()) is None:
            yield
            return
        if not any(isinstance(try_to_load_from_cache(str(self.path), file), str) for file in (CONFIG, ADAPTER)):
            raise OSError(
                f"{self.name}: there is no folder {self}, and no model of this name is in the cache of the Hugging "
                f"Face hub, which cannot be reached: {trouble}"
            )
        before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Errors of what is loaded in the block name the argument and the path."""
        try:
            yield
        except (OSError, SafetensorError, ImportError) as error:
            raise OSError(f"{self.name}: cannot load a model from {self}: {error}") from error
        except Exception as error:  # transformers raises whatever a broken entry of a file leads to
            told = one_line(error, 600) or type(error).__name__
            raise ValueError(f"{self.name}: {self} does not hold a causal language model: {told}") from error


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
