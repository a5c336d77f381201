"""Settings of the documentation site: `sphinx-build protocol .site` builds it."""

from __future__ import annotations

import re
from importlib.metadata import version as distribution_version
from typing import Any

project = "simplebus"
version = release = distribution_version("simplebus-broker")
html_title = "simplebus"
copyright = "the authors of simplebus"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["dotnet/Version1/Example"]
myst_heading_anchors = 4
# Output with `…` for omitted parts is not valid in the language of its block.
# Several classes have an attribute `type`, so a reference to it by name alone is ambiguous.
suppress_warnings = ["misc.highlighting_failure", "ref.python"]

html_theme = "furo"
default_role = "code"  # Docstrings write `code`, as Markdown does.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def mark_examples(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Mark example code in docstrings as such; of a module only the first line is shown."""
    if what == "module":
        del lines[1:]
    text = "\n".join(lines)
    lines[:] = re.sub(r"^( *)Example:$", r"\1Example::\n", text, flags=re.MULTILINE).split("\n")


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", mark_examples, priority=100)
