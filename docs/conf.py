"""Sphinx: the pages of this folder as a site. `make docs` builds it; nothing on it comes from the network."""

import html
import json
import re
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

project = "dualform"
author = "dualform contributors"
project_copyright = "dualform contributors"
version = release = version_of("dualform")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}  # see notebook_as_markdown
exclude_patterns = ["_build"]
master_doc = "index"

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
myst_links_external_new_tab = False
suppress_warnings = ["myst.header"]  # pages that scripts print may begin with a small heading

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False

html_theme = "furo"
html_title = f"dualform {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
highlight_language = "none"  # blocks without a language are output or commands
pygments_style = "default"
pygments_dark_style = "github-dark"


LISTED = re.findall(
    r"^(.+) <(results/.+)>$", Path(__file__).with_name("benchmarks.md").read_text("utf-8"), re.MULTILINE
)
TITLES = {name: title for title, name in LISTED}
"""Titles of the pages that benchmarks print, by their name."""


def escape_bars(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """|α| in a docstring is an absolute value, and not a substitution of reStructuredText."""
    lines[:] = ["".join(_escaped(part) for part in re.split(r"(``.*?``)", line)) for line in lines]


def _escaped(part: str) -> str:
    return part if part.startswith("``") else re.sub(r"(?<!\\)\|", r"\\|", part)


def mathml(node: nodes.Node, block: bool) -> str:
    """A formula as MathML, which browsers draw by themselves: no script and no font has to be loaded."""
    formula = re.sub(r"\\[bB]igg?[lr]?(?![a-zA-Z])", "", node.astext())  # brackets stretch by themselves
    try:
        return tex2mathml(formula, as_block=block)
    except MathError as error:
        logging.getLogger(__name__).warning("cannot draw the formula %r: %s", formula, error, location=node)
        return f"<code>{html.escape(formula)}</code>"


def inline_mathml(translator: Any, node: nodes.math) -> None:
    """Write a formula inside a line."""
    translator.body.append(mathml(node, block=False))
    raise nodes.SkipNode


def block_mathml(translator: Any, node: nodes.math_block) -> None:
    """Write a formula on lines of its own."""
    translator.body.append(f'<div class="formula">{mathml(node, block=True)}</div>')
    raise nodes.SkipNode


def add_title(app: Any, name: str, source: list[str]) -> None:
    """Give a page that a script prints the title under which benchmarks.md lists it, if it has none."""
    if name in TITLES and not source[0].startswith("# "):
        source[0] = f"# {TITLES[name]}\n\n{source[0]}"


def notebook_as_markdown(app: Any, name: str, source: list[str]) -> None:
    """Turn a notebook of the gallery into a page: its texts, its code, and what each cell showed."""
    if Path(app.env.doc2path(name)).suffix == ".ipynb":
        source[0] = "\n\n".join(part for cell in json.loads(source[0])["cells"] for part in _cell_parts(cell))


def _cell_parts(cell: dict[str, Any]) -> list[str]:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [text]
    return [f"```python\n{text}\n```", *map(_shown, cell["outputs"])]


def _shown(output: dict[str, Any]) -> str:
    """What a cell showed: HTML or a picture as in the notebook, else its text."""
    shown = {kind: "".join(value) for kind, value in output.get("data", {}).items()}
    if "text/html" in shown:
        return f"````{{raw}} html\n<div class='shown'>{shown['text/html']}</div>\n````"
    if "image/png" in shown:
        picture = shown["image/png"].replace("\n", "")
        return f"````{{raw}} html\n<div class='shown'><img src='data:image/png;base64,{picture}'></div>\n````"
    return f"````\n{shown.get('text/plain') or ''.join(output.get('text', ''))}\n````"


def list_external_links(app: Any, error: Exception | None) -> None:
    """Write the addresses of all external links to a file. They are not fetched."""
    if error is None:
        doctrees = map(app.env.get_doctree, app.env.found_docs)
        links = {link.get("refuri", "") for doctree in doctrees for link in doctree.findall(nodes.reference)}
        external = sorted(link for link in links if link.startswith("http"))
        Path(app.outdir, "external-links.txt").write_text("\n".join(external) + "\n", encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Connect the functions above."""
    app.connect("source-read", add_title)
    app.connect("source-read", notebook_as_markdown)
    app.connect("build-finished", list_external_links)
    app.connect("autodoc-process-docstring", escape_bars)
    app.add_html_math_renderer("mathml", (inline_mathml, None), (block_mathml, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
