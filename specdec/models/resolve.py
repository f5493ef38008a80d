"""From the name of a model, as users write it, to something transformers loads."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from specdec.errors import ModelUnavailable
from specdec.models import cache
from specdec.models.embedded import embedded_names, embedded_path, is_embedded, pull

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

logger = logging.getLogger(__name__)


def resolve_model(name: str) -> str:
    """Return the folder or Hugging Face id to hand to ``from_pretrained``.

    An embedded name gives its cache folder, pulled first if missing (half a minute); an existing folder its
    absolute path; what looks like a Hugging Face id (``org/name``) itself, for transformers to download.
    An embedded name wins over a folder of the same name; write ``./smollm2`` for the folder.

    Raises:
        ModelUnavailable: none of these, a folder that holds no model, or a pull that failed.
    """
    if is_embedded(name):
        return str(_embedded_folder(name))
    path = Path(name).expanduser()
    if name and path.exists():  # Path("") would be the current folder
        return str(_checked_folder(path))
    if _HUB_ID.fullmatch(name):
        return name
    raise ModelUnavailable(
        f"no model {name!r}: it is not an existing folder, nor a Hugging Face id (org/name), nor embedded "
        f"({embedded_names()})"
    )


def _embedded_folder(name: str) -> Path:
    # The one model asked for is enough here, even if the other half of its pair is missing.
    path = embedded_path(name)
    if cache.is_ready(path):
        return path
    logger.info("pulling embedded model %s to %s", name, path)
    return pull(name)[name]


def _checked_folder(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelUnavailable(
            f"{str(path)!r} holds no model: a folder with config.json, weights and tokenizer is expected"
        )
    return path.absolute()
