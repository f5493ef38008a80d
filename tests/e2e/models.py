"""Variants of the embedded target."""

from __future__ import annotations

from pathlib import Path

from specdec.models import pull, resolve_model


def target_with_template(folder: Path, template: str) -> str:
    """Lay the embedded target into an empty folder, with another chat template; gives the folder's name."""
    pull("smollm2")
    for file in Path(resolve_model("smollm2")).iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)
