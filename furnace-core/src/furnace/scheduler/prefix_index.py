"""Finding who holds the beginning of a prompt."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["PrefixIndex"]


class _Node:
    """A point of the tree, reached from its parent over ``edge``.

    Attributes:
        depth: tokens from the root to here.
        owners: those whose tokens end here.
    """

    __slots__ = ("children", "depth", "edge", "owners", "parent")

    def __init__(self, parent: _Node | None, edge: list[int], depth: int) -> None:
        self.parent = parent
        self.edge = edge
        self.depth = depth
        self.children: dict[int, _Node] = {}
        self.owners: set[int] = set()


class PrefixIndex:
    """A radix tree over token ids for each cache salt, with an owner at the end of each row of tokens.

    Whatever has another salt is never found. The context of a state belongs to the key as well, once there are others
    than None.
    """

    def __init__(self) -> None:
        self._roots: dict[str, _Node] = {}
        self._ends: dict[int, tuple[str, _Node]] = {}

    def __contains__(self, owner: int) -> bool:
        return owner in self._ends

    def __len__(self) -> int:
        """How many owners there are."""
        return len(self._ends)

    def insert(self, owner: int, salt: str, tokens: list[int]) -> None:
        """Enter an owner with its tokens; one that is there already gets new ones."""
        self.remove(owner)
        node = self._roots.setdefault(salt, _Node(None, [], 0))
        while node.depth < len(tokens):
            child = node.children.get(tokens[node.depth])
            if child is None:
                leaf = _Node(node, tokens[node.depth :], len(tokens))
                node.children[tokens[node.depth]] = leaf
                node = leaf
                break
            common = _common(child.edge, tokens, node.depth)
            node = child if common == len(child.edge) else _split(node, child, common)
        node.owners.add(owner)
        self._ends[owner] = (salt, node)

    def remove(self, owner: int) -> None:
        """Take an owner out; nothing if it is not here."""
        salt, node = self._ends.pop(owner, ("", None))
        if node is None:
            return
        node.owners.discard(owner)
        while node.parent is not None and not node.owners and not node.children:
            parent = node.parent
            del parent.children[node.edge[0]]
            node = parent
        if node.parent is None:
            if not node.children and not node.owners:
                del self._roots[salt]
        elif not node.owners and len(node.children) == 1:
            _join(node.parent, node)

    def matches(self, salt: str, tokens: list[int]) -> Iterator[tuple[int, int]]:
        """The owners that begin as ``tokens`` do, each with the number of tokens that are the same.

        Those with the most come first; those with none don't come. The tree must not change meanwhile.
        """
        node = self._roots.get(salt)
        if node is None:
            return
        depth = 0
        while depth == node.depth and depth < len(tokens):
            child = node.children.get(tokens[depth])
            if child is None:
                break
            depth += _common(child.edge, tokens, depth)
            node = child
        visited: _Node | None = None
        while depth > 0:
            for owner in _owners_below(node, visited):
                yield owner, depth
            if node.parent is None:
                return
            visited, node = node, node.parent
            depth = node.depth


def _owners_below(node: _Node, except_for: _Node | None) -> Iterator[int]:
    stack = [node]
    while stack:
        each = stack.pop()
        yield from each.owners
        stack.extend(child for child in each.children.values() if child is not except_for)


def _common(edge: list[int], tokens: list[int], start: int) -> int:
    """How many tokens of an edge are those from ``start`` on; the first one is."""
    length = min(len(edge), len(tokens) - start)
    if edge[:length] == tokens[start : start + length]:
        return length
    # Halving compares slices in C, where a loop would compare token by token.
    low, high = 1, length
    while high - low > 1:
        middle = (low + high) // 2
        if edge[low:middle] == tokens[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low


def _split(node: _Node, child: _Node, common: int) -> _Node:
    """Put a point into the edge to a child, behind its first ``common`` tokens."""
    middle = _Node(node, child.edge[:common], node.depth + common)
    node.children[middle.edge[0]] = middle
    child.parent, child.edge = middle, child.edge[common:]
    middle.children[child.edge[0]] = child
    return middle


def _join(parent: _Node, node: _Node) -> None:
    """Take out a point that only leads to one other."""
    (child,) = node.children.values()
    child.edge = [*node.edge, *child.edge]
    child.parent = parent
    parent.children[child.edge[0]] = child
