"""An extension of Griffe for the API reference: our plain docstrings as Markdown lists and code.

In the source a line "name: what it is" describes an argument and `>>>` an example; Markdown would run both together.
A field that `sader.config.option` declares is shown with its default, and its help text is its docstring.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"^([a-z_][\w]*(?:, [a-z_]\w*)*|\*\w+): (.+)$")


class PlainDocstrings(griffe.Extension):
    """Rewrites every docstring once it is collected."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        value = attr.value
        if not isinstance(value, griffe.ExprCall) or str(value.function) != "option":
            return
        text = ast.literal_eval(str(value.arguments[0]))
        named = {one.name: one.value for one in value.arguments if isinstance(one, griffe.ExprKeyword)}
        attr.value = named.get("default", "None")
        more = "" if attr.docstring is None else f"\n\n{attr.docstring.value}"
        attr.docstring = griffe.Docstring(text + more, lineno=attr.lineno, parent=attr)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Return the docstring with arguments as a list and examples as fenced code."""
    out: list[str] = []
    state, before = "text", ""
    for line in text.splitlines():
        found = ARGUMENT.match(line)
        now = "example" if line.startswith((">>>", "...")) else "list" if found else "text"
        if now == "text" and state == "list" and line and (line.startswith(" ") or not before.endswith(".")):
            now = "list"  # an argument's second line
        if now != state:
            out += ["```"] if state == "example" else [""]
            out += ["```python"] if now == "example" else []
        if now == "example":
            line = re.sub(r"\s*# doctest:.*", "", line[4:])
        elif found:
            line = f"- **{found[1]}**: {found[2]}"
        elif now == "list":
            line = "  " + line.strip()
        out.append(line)
        state, before = now, line
    return "\n".join([*out, "```"] if state == "example" else out)
