"""What pyproject.toml cannot say: a wheel takes the site of the documents along, where it is built.

``make wheel`` builds it first; the studio's "?" opens it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithSite(build_py):
    def run(self) -> None:
        super().run()
        site = Path(__file__).parent / "build" / "docs"
        if site.exists() and not self.editable_mode:
            shutil.copytree(site, Path(self.build_lib, "tessella/studio/site"), dirs_exist_ok=True)


setup(cmdclass={"build_py": WithSite})
