"""``llmpar lab``: open JupyterLab on the notebooks."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from dataclasses import dataclass

from llmpar.cli.options import installed


@dataclass(frozen=True)
class Lab:
    """Open JupyterLab on the notebooks, with simulated devices unless an accelerator is found.

    Attributes:
        folder: where the notebooks are.
        port: to serve on; loopback only.
        browser: open one.
    """

    folder: str = "notebooks"
    port: int = 8888
    browser: bool = True

    def run(self) -> None:
        """Start JupyterLab and wait until it ends."""
        if not installed("jupyterlab"):
            raise ValueError("JupyterLab is not installed; pip install 'llmpar[lab]'")
        if not pathlib.Path(self.folder).is_dir():
            raise ValueError(
                f"there is no folder '{self.folder}' here; run this from the project's root, or give --folder"
            )
        if not 0 < self.port < 65536:
            raise ValueError(f"--port {self.port} is no port; use 1 to 65535")
        command = [
            sys.executable,
            "-m",
            "jupyter",
            "lab",
            self.folder,
            f"--port={self.port}",
            "--ip=127.0.0.1",
        ]
        # The settings in labconfig let a saved notebook keep its widgets, which reopen without a kernel
        config = [os.environ.get("JUPYTER_CONFIG_PATH", ""), str(pathlib.Path(__file__).parent)]
        env = os.environ | {"JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, config))}
        # Most containers run as root, and the server is open to this machine only.
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        command += ["--allow-root"] * root + ["--no-browser"] * (not self.browser)
        ended = subprocess.run(command, env=env).returncode
        if ended:
            raise ValueError(f"JupyterLab ended with status {ended}; it says why above")
