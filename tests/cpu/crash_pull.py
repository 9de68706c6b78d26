"""Pulls that die at each of the moments in which the store changes, one process per moment. Run by test_store_convert.

Arguments: store root, first source, second source. The first is in the store under the name m; each child replaces it
by the second and dies (os._exit, nothing is cleaned up) at its k-th rename, before or after it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from dovetail.store import Catalogue
from dovetail.store.collect import collect
from dovetail.store.format.manifest import read_manifest
from dovetail.store.verify import verify

real_rename = Path.rename


def pull(root: str, source: str) -> Any:
    return Catalogue(root).pull(source, name="m", dtype="f32", journal_bytes=1 << 16)


def crash_at(number: int, after: bool, root: str, source: str) -> int:
    """The child's exit status: 9 = it died there, 0 = there were fewer renames."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count = 0

    def rename(self: Path, target: Any) -> Path:
        nonlocal count
        count += 1
        if count == number and not after:
            os._exit(9)
        moved = real_rename(self, target)
        if count == number:
            os._exit(9)
        return moved

    Path.rename = rename  # type: ignore[method-assign]
    pull(root, source)
    os._exit(0)


def main() -> None:
    root, first, second = sys.argv[1:4]
    states = []
    for number in range(1, 40):
        for after in (False, True):
            shutil.rmtree(root, ignore_errors=True)
            old = pull(root, first)
            status = crash_at(number, after, root, second)
            seen = Catalogue(root).get("m")
            sound = not verify([Path(seen.path)]).damage
            collect(Catalogue(root).paths)
            left = sorted(path.name for path in (Path(root) / "tmp").iterdir())
            blobs = len(list(Path(root).glob("blobs/*/*")))
            again = pull(root, second)
            states.append(
                {
                    "status": status,
                    "state": "old" if seen.spec == old.spec else "new" if seen.spec == again.spec else "neither",
                    "sound": sound,
                    "left": left,
                    "blobs": blobs,
                    "final": read_manifest(Path(again.path)).partitions[0].digest,
                }
            )
        if status == 0:
            break
    print(json.dumps(states))


main()
