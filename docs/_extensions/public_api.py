"""The directive ``public-api``: what a package's ``__all__`` names, from the source alone.

griffe reads the packages without importing them, so the documentation builds where none of them is installed. Every
public object is described in one place, and a reference to it finds that place whether it is written as
``furnace.StepModel``, as ``furnace.contracts.StepModel``, or as ``StepModel`` in an annotation.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import griffe
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

_SECTION = re.compile(r"^(Args|Attributes|Class attributes|Raises|Returns):\n((?: +.*\n|\n)+)", re.MULTILINE)
_ITEM = re.compile(r"^([*\w]+):", re.MULTILINE)
_RECORDS = {"Struct", "Protocol", "Enum", "StrEnum", "EngineFactory"}


@dataclass
class Docstring:
    """A Google docstring, taken apart.

    Attributes:
        text: what stands before the sections, as it is.
        fields: the sections as reStructuredText fields.
        attributes: the text of each entry of an attributes section.
    """

    text: str = ""
    fields: list[str] = field(default_factory=list)
    attributes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, item: griffe.Object) -> Docstring:
        """The docstring of an object; an empty one if it has none."""
        return cls() if item.docstring is None else cls.parse(item.docstring.value)

    @classmethod
    def parse(cls, source: str) -> Docstring:
        """Cut a docstring at its section headers."""
        whole = inspect.cleandoc(source) + "\n"
        parsed = cls(text=_SECTION.sub("", whole))
        for header, block in _SECTION.findall(whole):
            text = inspect.cleandoc(block)
            if header == "Returns":
                parsed.fields.append(_field("returns", text))
            elif header.lower().endswith("attributes"):
                parsed.attributes |= dict(_items(text))
            else:
                kind = "param" if header == "Args" else "raises"
                parsed.fields += [_field(f"{kind} {name}", value) for name, value in _items(text)]
        return parsed


def _items(text: str) -> Iterator[tuple[str, str]]:
    """``name: text`` entries, whose further lines are indented."""
    _, *pieces = _ITEM.split(text)
    for name, value in zip(pieces[::2], pieces[1::2], strict=True):
        yield name, inspect.cleandoc(value)


def _field(name: str, text: str) -> str:
    return f":{name}: " + text.replace("\n", "\n    ")


class PublicApi:
    """The public names of some modules.

    Args:
        folders: where the packages' sources are.
        modules: dotted names, each with the one name that is public if not all of ``__all__`` are: ``package:Name``.

    Attributes:
        homes: for each public name, and each dotted way to write it, the dotted name under which it is described.
        others: names in annotations that are described nowhere: of other libraries, and internal ones.
        packages: the packages that the modules are in.
    """

    def __init__(self, folders: Iterable[str], modules: Iterable[str]) -> None:
        self._loader = griffe.GriffeLoader(search_paths=list(folders), allow_inspection=False)
        self.homes: dict[str, str] = {}
        self.others: set[str] = set()
        self._modules = {module: only for module, _, only in (entry.partition(":") for entry in modules)}
        self.packages = {module.partition(".")[0] for module in self._modules}
        for package in sorted(self.packages):
            self._loader.load(package)
        self._loader.resolve_aliases()
        for module in self._modules:
            for name, item in self.members(module):
                home = self.homes.setdefault(item.canonical_path, f"{module}.{name}")
                self.homes[f"{module}.{name}"] = self.homes[f"{module.partition('.')[0]}.{name}"] = home
                self.homes.setdefault(name, home)
        for module in self._modules:
            for _, item in self.members(module):
                for expression in _expressions(item):
                    self.others |= {name.name for name in expression.iterate() if isinstance(name, griffe.ExprName)}
        self.others -= self.homes.keys()

    def module(self, name: str) -> griffe.Module:
        """A module, as read."""
        found = self._loader.modules_collection[name]
        if not isinstance(found, griffe.Module):
            raise ValueError(f"{name} is no module")
        return found

    def members(self, module: str) -> Iterator[tuple[str, griffe.Object]]:
        """The public names of a module, with what they stand for."""
        found, only = self.module(module), self._modules[module]
        for name in sorted(str(export) for export in found.exports or []):
            member = found[name]
            if only in ("", name):
                yield name, member.final_target if isinstance(member, griffe.Alias) else member


def _expressions(item: griffe.Object) -> Iterator[griffe.Expr]:
    """The annotations and base classes of an object and of what it contains."""
    found: list[object] = []
    if isinstance(item, griffe.Class):
        found += item.bases
        for member in item.members.values():
            if isinstance(member, griffe.Object):
                yield from _expressions(member)
    elif isinstance(item, griffe.Function):
        found += [item.returns, *(parameter.annotation for parameter in item.parameters)]
        for overload in item.overloads or []:
            yield from _expressions(overload)
    elif isinstance(item, griffe.Attribute):
        found += [item.annotation, item.value]
    yield from (expression for expression in found if isinstance(expression, griffe.Expr))


class Writer:
    """Writes reStructuredText for the members of one module."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def member(self, name: str, item: griffe.Object) -> None:
        """An object at the top of the module."""
        if isinstance(item, griffe.Class):
            self._class(name, item)
        elif isinstance(item, griffe.Function):
            self._function("py:function", name, item, skip_first=False, indent=0)
        elif isinstance(item, griffe.Attribute):
            self._attribute("py:data", name, item, Docstring.of(item).text, indent=0)

    def _class(self, name: str, item: griffe.Class) -> None:
        docstring = Docstring.of(item)
        init = item.members.get("__init__")
        signature = _parameters(init, skip_first=True) if isinstance(init, griffe.Function) else ""
        bases = [str(base) for base in item.bases]
        kind = "py:exception" if name.endswith("Error") else "py:class"
        self._entry(kind, name + signature, [], 0)
        if bases:
            self._add("Bases: " + ", ".join(f":py:obj:`{_bare(base)}`" for base in bases), 3)
        self._body(docstring, 3)
        # Of these the annotated names are fields; of others, details unless they are described.
        record = any(_bare(base).rpartition(".")[2] in _RECORDS for base in bases) or "dataclass" in item.labels
        for member_name, member in item.members.items():
            if isinstance(member, griffe.Attribute):
                self._class_attribute(member_name, member, docstring, record)
            elif isinstance(member, griffe.Function):
                self._method(member_name, member)

    def _class_attribute(self, name: str, item: griffe.Attribute, owner: Docstring, record: bool) -> None:
        text = owner.attributes.get(name) or Docstring.of(item).text
        constant = item.value is not None and "class-attribute" in item.labels
        if name.startswith("_") or not (text or record or constant):
            return
        if "property" in item.labels:
            options = [":abstractmethod:"] if "abstractmethod" in item.labels else []
            self._entry("py:property", name, [f":type: {item.annotation}", *options], 3)
            self._body(Docstring.of(item), 6)
        else:
            self._attribute("py:attribute", name, item, text, indent=3)

    def _method(self, name: str, item: griffe.Function) -> None:
        # What has no docstring says what the class that it comes from says.
        if item.docstring is None or (name.startswith("_") and name != "__call__"):
            return
        self._function("py:method", name, item, skip_first="staticmethod" not in item.labels, indent=3)

    def _function(self, kind: str, name: str, item: griffe.Function, *, skip_first: bool, indent: int) -> None:
        labels = {"async": ":async:", "classmethod": ":classmethod:", "abstractmethod": ":abstractmethod:"}
        options = [option for label, option in labels.items() if label in item.labels]
        functions = item.overloads or [item]
        signatures = [
            name + _parameters(each, skip_first=skip_first) + (f" -> {each.returns}" if each.returns else "")
            for each in functions
        ]
        # Further signatures stand below the first, behind the width of the directive.
        self._entry(kind, f"\n{' ' * (len(kind) + 6)}".join(signatures), options, indent)
        self._body(Docstring.of(item), indent + 3)

    def _attribute(self, kind: str, name: str, item: griffe.Attribute, text: str, indent: int) -> None:
        options = [] if item.annotation is None else [f":type: {item.annotation}"]
        # What a constructor assigns is no constant.
        if item.value is not None and item.labels != {"instance-attribute"}:
            options.append(f":value: {' '.join(str(item.value).split())}")
        self._entry(kind, name, options, indent)
        self._add(text, indent + 3)

    def _entry(self, kind: str, signature: str, options: list[str], indent: int) -> None:
        lines = [f".. {kind}:: {signature}", *("   " + option for option in options)]
        self._add("\n".join(lines), indent)

    def _body(self, docstring: Docstring, indent: int) -> None:
        self._add(docstring.text, indent)
        self._add("\n".join(docstring.fields), indent)

    def _add(self, text: str, indent: int) -> None:
        self.lines += [" " * indent + line if line.strip() else "" for line in text.rstrip().splitlines()]
        self.lines.append("")


def _bare(expression: str) -> str:
    return expression.partition("[")[0]


def _parameters(item: griffe.Function, *, skip_first: bool) -> str:
    kinds = griffe.ParameterKind
    shown: list[str] = []
    starred = False
    for index, parameter in enumerate(item.parameters):
        if skip_first and index == 0:
            continue
        if parameter.kind is kinds.keyword_only and not starred:
            starred = True
            shown.append("*")
        stars = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(parameter.kind or kinds.keyword_only, "")
        starred = starred or stars == "*"
        text = stars + parameter.name + (f": {parameter.annotation}" if parameter.annotation is not None else "")
        if parameter.default is not None and not stars:
            text += f" = {parameter.default}" if parameter.annotation is not None else f"={parameter.default}"
        shown.append(text)
    return f"({', '.join(shown)})"


class PublicApiDirective(SphinxDirective):
    """Describes the public names of a module."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The description."""
        (module,) = self.arguments
        api = public_api(self.env)
        self.env.note_dependency(str(api.module(module).filepath))
        writer = Writer()
        writer.lines += [f".. py:currentmodule:: {module}", ""]
        for name, item in api.members(module):
            if api.homes[f"{module}.{name}"] == f"{module}.{name}":
                self.env.note_dependency(str(item.filepath))
                writer.member(name, item)
                writer.lines.append("")
        return self.parse_text_to_nodes("\n".join(writer.lines))


@lru_cache(maxsize=1)
def read_sources(folders: tuple[str, ...], modules: tuple[str, ...]) -> PublicApi:
    """Read the packages once a build."""
    return PublicApi(folders, modules)


def public_api(env: BuildEnvironment) -> PublicApi:
    """What the configuration names."""
    return read_sources(tuple(env.config.public_api_folders), tuple(env.config.public_api_modules))


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement) -> nodes.Node | None:
    """Find the one place that describes a public name; leave names of other libraries as plain text."""
    target = str(node.get("reftarget", ""))
    api = public_api(env)
    if node.get("refdomain") != "py":
        return None
    owner, _, attribute = target.rpartition(".")
    candidates = [api.homes.get(target, "")]
    if owner in api.homes:
        candidates.append(f"{api.homes[owner]}.{attribute}")
    domain = env.get_domain("py")
    for candidate in candidates:
        if candidate and candidate != target:
            found = domain.resolve_xref(env, node["refdoc"], app.builder, "obj", candidate, node, content)
            if found is not None:
                return found
    # `msgspec.Struct` is written with its module, most others without.
    return content if target in api.others or owner in api.others - api.packages else None


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the directive."""
    app.add_config_value("public_api_folders", [], "env")
    app.add_config_value("public_api_modules", [], "env")
    app.add_directive("public-api", PublicApiDirective)
    app.connect("missing-reference", resolve)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
