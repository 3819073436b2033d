"""File operations: copy into a directory, delete from a directory."""

from __future__ import annotations

import random

from reterm_jax.tasks.families.base import NONE, Action, Blueprint, Family, Names, phrase
from reterm_jax.tasks.families.names import COLORS, EXTENSIONS, NOUNS, PLACES


def _draw_copy(rng: random.Random) -> dict[str, str]:
    file, other = rng.sample(NOUNS, 2)
    return {
        "file": file,
        "other": other,
        "dir": rng.choice(PLACES),
        "ext": rng.choice(EXTENSIONS),
        "text": rng.choice(COLORS),
    }


def _build_copy(names: Names, obstacle: str) -> Blueprint:
    file, other, place = f"{names['file']}.txt", f"{names['other']}.txt", names["dir"]
    source = f"{names['file']}.{names['ext']}" if obstacle == "renamed" else file
    copy = f"cp {source} {place}/"
    fix, clue, setup = Action("copy the file", copy), "", ()
    if obstacle == "missing_dir":
        fix = Action("make the directory first", f"mkdir -p {place} && {copy}")
        clue = f"'{place}/': Not a directory"
    elif obstacle == "renamed":
        fix = Action("try any ending", f"cp {names['file']}.* {place}/")
        clue = f"cannot stat '{file}'"
    elif obstacle == "readonly_dir":
        fix = Action("allow writing first", f"chmod u+w {place} && {copy}")
        clue = f"'{place}/{file}': Permission denied"
        setup = (f"chmod a-w {place}",)
    wrong_file = Action("remove the wrong file", f"rm -f {place}")
    return Blueprint(
        instruction=phrase(
            names, f"copy {file} into the {place} directory.", f"put a copy of {file} into the {place} directory."
        ),
        files={source: f"{names['text']}\n", other: "nothing\n"},
        directories=() if obstacle == "missing_dir" else (place,),
        setup=setup,
        check=(f"[ -f {source} ]", f"cat {place}/{names['file']}.* | grep -qx {names['text']}"),
        attempt=(Action("copy the file", f"cp {file} {place}/"),),
        fix=(fix,),
        clue=clue,
        slips=(
            Action("copy the file", f"cp {other} {place}/"),
            Action("copy the file", f"cp {place} {file}"),
            Action("copy the file", f"cp {names['file']} {place}/"),
        ),
        # Without the slash, cp makes a file of the directory's name.
        messes=((rf"cp \S+ {place}$", wrong_file),) if obstacle == "missing_dir" else (),
        confirm=Action("check the result", f"ls {place}"),
    )


def _draw_remove(rng: random.Random) -> dict[str, str]:
    target, other = rng.sample(NOUNS, 2)
    place, inner = rng.sample(PLACES, 2)
    return {"target": target, "other": other, "dir": place, "inner": inner}


def _build_remove(names: Names, obstacle: str) -> Blueprint:
    target, other, place, inner = names["target"], names["other"], names["dir"], names["inner"]
    path, kept = f"{place}/{target}", f"{place}/{other}"
    files = {kept: "keep\n", path: "old\n"}
    fix, clue, setup = Action("delete the file", f"rm {path}"), "", ()
    if obstacle == "directory":
        files = {kept: "keep\n", f"{path}/{inner}": "old\n"}
        fix = Action("delete the directory", f"rm -r {path}")
        clue = f"'{path}': Is a directory"
    elif obstacle == "nested":
        files = {kept: "keep\n", f"{place}/{inner}/{target}": "old\n"}
        fix = Action("look one level down", f"rm {place}/*/{target}")
        clue = f"'{path}': No such file"
    elif obstacle == "readonly_dir":
        fix = Action("allow writing first", f"chmod u+w {place} && rm {path}")
        clue = f"'{path}': Permission denied"
        setup = (f"chmod a-w {place}",)
    return Blueprint(
        instruction=phrase(names, f"delete {target} from the {place} directory.", f"remove {target} in {place}."),
        files=files,
        setup=setup,
        check=(f"[ -f {kept} ]", f'[ -z "$(find {place} -name {target})" ]'),
        attempt=(Action("delete the file", f"rm {path}"),),
        fix=(fix,),
        clue=clue,
        slips=(
            Action("delete the file", f"rm {target}"),
            Action("delete the directory", f"rm -r {target}"),
            Action("delete the file", f"rmdir {place}"),
        ),
        confirm=Action("check the result", f"find {place}"),
    )


COPY = Family("copy", "file operations", (NONE, "missing_dir", "renamed", "readonly_dir"), _draw_copy, _build_copy)
REMOVE = Family("remove", "file operations", (NONE, "directory", "nested", "readonly_dir"), _draw_remove, _build_remove)
