"""Builds the wheel, whose package nf4_server is made of the folder server: docs/adr/0024-names-in-the-wheel.md."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDER, PACKAGE = "server", "nf4_server"
IMPORT = re.compile(rf"(^\s*(?:from|import)|python -m) {FOLDER}\b", re.MULTILINE)


class BuildPackage(build_py):
    """Renames the package once its files are copied; an editable installation takes the checkout as it is."""

    def run(self) -> None:
        """See setuptools."""
        super().run()
        if not self.editable_mode:
            built = Path(self.build_lib)
            shutil.rmtree(built / PACKAGE)
            (built / FOLDER).rename(built / PACKAGE)
            for path in (built / PACKAGE).rglob("*.py"):
                path.write_text(IMPORT.sub(rf"\1 {PACKAGE}", path.read_text("utf-8")), "utf-8")


setup(cmdclass={"build_py": BuildPackage})
