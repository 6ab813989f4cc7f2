"""How a chat template wants message content: as one string, or as the list of parts the API was given.

A template that loops over a message's content gets the list ("openai"); any other gets text ("string"). The engine
decides this by reading the template's syntax tree, and the token ids depend on it, so the same reading is done here.

Source: vLLM 0.32, renderers/hf.py `_detect_content_format`.
"""

from collections.abc import Iterator
from typing import Literal, TypeAlias, TypeGuard

from jinja2 import nodes

__all__ = ["ContentFormat", "detect_content_format"]

ContentFormat: TypeAlias = Literal["string", "openai"]


def detect_content_format(tree: nodes.Template) -> ContentFormat:
    """Tell whether a parsed template iterates over the content of messages.

    Args:
        tree: the template's syntax tree.

    Returns:
        "openai" when some loop runs over a message's content, else "string".
    """
    message_names = set(_loop_targets(tree, _aliases(tree, "messages")))
    return "openai" if _loops_over_content(tree, message_names) else "string"


def _reaches(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is variable `name` (or its `key`), possibly filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or _is_slice(node):
        node = node.node
    if key is None:
        return _is_variable(node, name)
    if isinstance(node, nodes.Getitem):
        return _is_variable(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _is_variable(node.node, name) and node.attr == key


def _is_slice(node: nodes.Node | None) -> TypeGuard[nodes.Getitem]:
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)


def _is_variable(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    """`name` and every variable that is assigned from it, directly or through another alias."""
    known = {name}
    pending = [name]
    while pending:
        source = pending.pop()
        for assign in tree.find_all(nodes.Assign):
            target = assign.target
            if isinstance(target, nodes.Name) and target.name not in known and _reaches(assign.node, source):
                known.add(target.name)
                pending.append(target.name)
    return known


def _loop_targets(tree: nodes.Template, sources: set[str]) -> Iterator[str]:
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name) and any(_reaches(loop.iter, source) for source in sources):
            yield loop.target.name


def _loops_over_content(tree: nodes.Template, message_names: set[str]) -> bool:
    def is_content(node: nodes.Node) -> bool:
        return any(_reaches(node, name, "content") for name in message_names)

    inside_macros: set[int] = set()
    for macro in tree.find_all(nodes.Macro):
        loops = list(macro.find_all(nodes.For))
        inside_macros.update(id(loop) for loop in loops)
        parameters = _content_parameters(tree, macro, message_names)
        if any(isinstance(loop.iter, nodes.Name) and loop.iter.name in parameters for loop in loops):
            return True
    for loop in tree.find_all(nodes.For):
        if is_content(loop.iter):
            return True
        # A bare `content` outside a macro is, by custom, a message's content.
        if id(loop) not in inside_macros and isinstance(loop.iter, nodes.Name) and loop.iter.name == "content":
            return True
    return False


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, message_names: set[str]) -> set[str]:
    """Parameters of a macro that some call fills with a message's content."""
    parameters = [argument.name for argument in macro.args]
    filled: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        named = [(keyword.key, keyword.value) for keyword in call.kwargs if isinstance(keyword, nodes.Keyword)]
        for parameter, value in [*zip(parameters, call.args, strict=False), *named]:
            if parameter in parameters and any(_reaches(value, name, "content") for name in message_names):
                filled.add(parameter)
    return filled
