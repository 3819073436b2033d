"""Text processing and permissions: replace a word in a file, write a word to a file."""

from __future__ import annotations

import gzip
import random

from reterm_jax.tasks.families.base import NONE, Action, Blueprint, Family, Names, phrase
from reterm_jax.tasks.families.names import COLORS, NOUNS, PLACES


def _draw_replace(rng: random.Random) -> dict[str, str]:
    old, new, first = rng.sample(COLORS, 3)
    return {"file": rng.choice(NOUNS), "dir": rng.choice(PLACES), "old": old, "new": new, "first": first}


def _build_replace(names: Names, obstacle: str) -> Blueprint:
    file, place, old, new = f"{names['file']}.txt", names["dir"], names["old"], names["new"]
    edit = f"sed -i s/{old}/{new}/"
    text = f"{names['first']}\n{old}\n"
    path: str = file
    files: dict[str, bytes | str] = {file: text}
    fix, clue, look, evidence = (Action("replace the word", f"{edit} {file}"),), "", None, ""
    if obstacle == "elsewhere":
        path = f"{place}/{file}"
        files = {path: text}
        fix = (Action("look one level down", f"{edit} */{file}"),)
        clue, evidence = f"can't read {file}", path
    elif obstacle == "compressed":
        files = {f"{file}.gz": gzip.compress(text.encode(), mtime=0)}
        unpack = f"gunzip -f {file}.gz"
        fix = (Action("unpack it first", unpack), Action("replace the word", f"{edit} {file}"))
        clue, evidence = f"can't read {file}", f"{file}.gz"
    elif obstacle == "directory":
        path = f"{file}/{place}"
        files = {path: text}
        fix = (Action("edit the files inside", f"{edit} {file}/*"),)
        clue = f"edit {file}: not a regular file"
    if evidence:
        look = Action("look for the file", f'find . -name "{names["file"]}*"')
    return Blueprint(
        instruction=phrase(names, f"replace {old} with {new} in {file}.", f"change {old} to {new} in {file}."),
        files=files,
        check=(f"printf '%s\\n' {names['first']} {new} | cmp -s - {path}",),
        attempt=(Action("replace the word", f"{edit} {file}"),),
        fix=fix,
        clue=clue,
        look=look,
        evidence=evidence,
        slips=(
            Action("replace the word", f"sed s/{old}/{new}/ {file}"),
            Action("replace the word", f"sed -i s/{new}/{old}/ {file}"),
            Action("replace the word", f"sed -i s/{old}/{new}/ {names['file']}"),
        ),
        confirm=Action("check the result", f"cat {path}"),
    )


def _draw_write(rng: random.Random) -> dict[str, str]:
    file, other = rng.sample(NOUNS, 2)
    return {"file": file, "other": other, "dir": rng.choice(PLACES), "text": rng.choice(COLORS)}


def _build_write(names: Names, obstacle: str) -> Blueprint:
    place, text = names["dir"], names["text"]
    path, other = f"{place}/{names['file']}.txt", f"{place}/{names['other']}.txt"
    write = f"echo {text} > {path}"
    files = {other: "nothing\n", path: "nothing\n"}
    fix, clue, setup = Action("write the word", write), "", ()
    if obstacle == "readonly_file":
        setup = (f"chmod a-w {path}",)
    elif obstacle == "readonly_dir":
        files = {other: "nothing\n"}
        setup = (f"chmod a-w {place}",)
    elif obstacle == "missing_dir":
        files = {f"{names['other']}.txt": "nothing\n"}
        fix = Action("make the directory first", f"mkdir -p {place} && {write}")
        clue = f"{path}: No such file"
    if setup:
        # The message is the same for both; this works for either.
        fix = Action("allow writing first", f"chmod -R u+w {place} && {write}")
        clue = f"{path}: Permission denied"
    return Blueprint(
        instruction=phrase(names, f"write {text} to {path}.", f"store the word {text} in {path}."),
        files=files,
        setup=setup,
        check=(f'[ "$(cat {path})" = {text} ]',),
        attempt=(Action("write the word", write),),
        fix=(fix,),
        clue=clue,
        slips=(
            Action("write the word", f"echo {text} > {names['file']}.txt"),
            Action("write the word", f"echo {text} {path}"),
            Action("allow writing first", f"chmod u+w {other}"),
        ),
        confirm=Action("check the result", f"cat {path}"),
    )


REPLACE = Family(
    "replace", "text processing", (NONE, "elsewhere", "compressed", "directory"), _draw_replace, _build_replace
)
WRITE = Family(
    "write", "permissions", (NONE, "readonly_file", "readonly_dir", "missing_dir"), _draw_write, _build_write
)
