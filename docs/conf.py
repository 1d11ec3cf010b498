"""The site of docs/: ``make docs`` builds it into build/docs. It imports nothing of Tessella."""

from __future__ import annotations

project = "Tessella"
author = "Tessella contributors"
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "Tessella"
html_copy_source = False
