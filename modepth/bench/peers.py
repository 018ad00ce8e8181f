"""Environments for the peers: each needs versions that do not agree with ours, so each gets its own."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

# By contestant: what pip installs after torch. numpy 2 is too new for transformers 4.42.
PEERS = {
    "soup": ["soup-cli==0.77.0", f"transformers=={version('transformers')}"],
    "mixture_of_depth": ["mixture-of-depth==1.2.0", "transformers==4.42.4", "numpy<2"],
}


def peer_python(folder: Path, name: str) -> Path | None:
    """The Python of a peer's environment, None where it was not installed."""
    python = folder / name / "bin" / "python"
    return python if (folder / name / "installed").exists() else None


def install(folder: Path) -> None:
    """Make the environments that are not there yet; a peer that cannot be installed is named and left out."""
    torch = f"torch=={version('torch').split('+')[0]}"
    for name, packages in PEERS.items():
        if peer_python(folder, name) is not None:
            continue
        print(f"installing {packages[0]} in {folder / name}", file=sys.stderr, flush=True)
        try:
            subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
            for wanted in ([torch], [torch, *packages]):  # torch first: a range would fetch another build
                pip = [str(folder / name / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
                subprocess.run([*pip, *wanted], check=True)
            (folder / name / "installed").touch()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{packages[0]} takes no part: it could not be installed ({error})", file=sys.stderr, flush=True)
