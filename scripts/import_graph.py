"""Prints the package's folders as rooms: what each holds, on which floors, and how many imports join its entries.

An entry is a module or a folder. An arrow leads from an entry to each entry that it imports from, wherever in a file
the import stands. An entry stands one floor above the highest entry that it imports from: a room without a circle has
as many floors as its longest chain of imports.
"""

import argparse
import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1] / "vanilla_transformer"


@dataclass(frozen=True)
class Room:
    """A folder of the package.

    Args:
        path: The folder, relative to the package; empty for the package itself.
        arrows: For each entry the entries of the same room that it imports from.
    """

    path: str
    arrows: dict[str, set[str]] = field(default_factory=dict)

    def floors(self) -> list[list[str]]:
        """Entries by floor, the lowest first.

        Raises:
            ValueError: Imports go round in a circle.
        """
        remaining, floors = dict(self.arrows), []
        placed: set[str] = set()
        while remaining:
            floor = sorted(entry for entry, imported in remaining.items() if imported <= placed)
            if not floor:
                raise ValueError(f"{self.path or ROOT.name}: imports go round among {', '.join(sorted(remaining))}")
            floors.append(floor)
            placed |= set(floor)
            for entry in floor:
                del remaining[entry]
        return floors


def imports_of(path: Path, root: Path = ROOT) -> set[tuple[str, ...]]:
    """What a file imports of the package: the parts of each absolute name below it, and the name imported."""
    package = path.relative_to(root).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
            found |= {name[1:] for name in names if name[0] == root.name}
        elif isinstance(node, ast.ImportFrom):
            module = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                base = (*package[: len(package) + 1 - node.level], *module)
            elif module[0] == root.name:
                base = module[1:]
            else:
                continue
            found |= {(*base, alias.name) for alias in node.names}
    return found


def rooms(root: Path = ROOT) -> Iterable[Room]:
    """All rooms of a package, outer ones first."""
    modules = {path: imports_of(path, root) for path in sorted(root.rglob("*.py")) if path.name != "__init__.py"}
    folders = sorted({parent for path in modules for parent in path.parents if parent.is_relative_to(root)})
    for folder in folders:
        depth = len(folder.relative_to(root).parts)
        inside = [path for path in modules if path.is_relative_to(folder)]
        arrows = {_entry(path.relative_to(root).parts, depth): set() for path in inside}
        for path in inside:
            entry = _entry(path.relative_to(root).parts, depth)
            for name in modules[path]:
                if name[:depth] == folder.relative_to(root).parts and len(name) > depth and name[depth] in arrows:
                    arrows[entry].add(name[depth])
            arrows[entry].discard(entry)
        yield Room(folder.relative_to(root).as_posix().removeprefix("."), arrows)


def _entry(parts: tuple[str, ...], depth: int) -> str:
    """The entry of a room at some depth that a module belongs to."""
    return parts[depth].removesuffix(".py")


def main() -> int:
    """Print all rooms, or one; the status is 1 if a room has a circle of imports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "room", nargs="?", help="print the entries of this one, floor by floor (such as training/step)"
    )
    wanted = parser.parse_args().room
    status = 0
    print(f"{'room':<28}{'entries':>9}{'floors':>9}{'arrows':>9}")
    for room in rooms():
        if wanted is not None and room.path != wanted:
            continue
        try:
            floors = room.floors()
        except ValueError as error:
            print(error, file=sys.stderr)
            status = 1
            continue
        arrows = sum(map(len, room.arrows.values()))
        print(f"{room.path or ROOT.name:<28}{len(room.arrows):>9}{len(floors):>9}{arrows:>9}")
        if wanted is not None:
            for number in range(len(floors) - 1, -1, -1):
                print(f"  floor {number}: {', '.join(floors[number])}")
    return status


if __name__ == "__main__":
    sys.exit(main())
