"""Archives and versioned files: unpack an archive, restore a file from its backup."""

from __future__ import annotations

import gzip
import io
import random
import tarfile

from reterm_jax.tasks.families.base import NONE, Action, Blueprint, Family, Names, phrase
from reterm_jax.tasks.families.names import COLORS, NOUNS, PLACES, SUFFIXES


def _tar(name: str, text: str) -> bytes:
    """A tar archive of one file, the same bytes every time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        info = tarfile.TarInfo(name)
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def _draw_unpack(rng: random.Random) -> dict[str, str]:
    file, inner = rng.sample(NOUNS, 2)
    return {"file": file, "inner": inner, "dir": rng.choice(PLACES), "text": rng.choice(COLORS)}


def _build_unpack(names: Names, obstacle: str) -> Blueprint:
    place, inner, archive = names["dir"], f"{names['inner']}.txt", f"{names['file']}.tgz"
    plain = _tar(inner, f"{names['text']}\n")
    unpack = f"tar -xzf {archive} -C {place}"
    fix, clue, setup = Action("unpack the archive", unpack), "", ()
    if obstacle == "missing_dir":
        fix = Action("make the directory first", f"mkdir -p {place} && {unpack}")
        clue = f"{place}: Cannot open: No such file"
    elif obstacle == "not_gzip":
        fix = Action("it is not gzip", f"tar -xf {archive} -C {place}")
        clue = "not in gzip format"
    elif obstacle == "readonly_dir":
        fix = Action("allow writing first", f"chmod u+w {place} && {unpack}")
        clue = f"{inner}: Cannot open: Permission denied"
        setup = (f"chmod a-w {place}",)
    return Blueprint(
        instruction=phrase(names, f"unpack {archive} into the {place} directory.", f"extract {archive} into {place}."),
        files={archive: plain if obstacle == "not_gzip" else gzip.compress(plain, mtime=0)},
        directories=() if obstacle == "missing_dir" else (place,),
        setup=setup,
        check=(f'[ "$(cat {place}/{inner})" = {names["text"]} ]',),
        attempt=(Action("unpack the archive", unpack),),
        fix=(fix,),
        clue=clue,
        slips=(
            Action("unpack the archive", f"tar -xzf {archive}"),
            Action("copy the archive", f"cp {archive} {place}/"),
            Action("list the archive", f"tar -tf {archive}"),
        ),
        confirm=Action("check the result", f"ls {place}"),
    )


def _draw_restore(rng: random.Random) -> dict[str, str]:
    file, other = rng.sample(NOUNS, 2)
    good, older = rng.sample(COLORS, 2)
    return {
        "file": file,
        "other": other,
        "suffix": rng.choice(SUFFIXES),
        "last": str(rng.randint(2, 3)),
        "good": good,
        "older": older,
    }


def _build_restore(names: Names, obstacle: str) -> Blueprint:
    file, good, last = f"{names['file']}.txt", f"{names['good']}\n", int(names["last"])
    backup = f"{file}.bak"
    files = {file: "broken\n", f"{names['other']}.txt": "nothing\n", backup: good}
    fix, clue, look, evidence, setup = Action("copy the backup", f"cp {backup} {file}"), "", None, "", ()
    if obstacle == "suffix":
        evidence = f"{file}.{names['suffix']}"
        fix = Action("try any ending", f"cp {file}.* {file}")
    elif obstacle == "versions":
        evidence = f"{file}.v{last}"
        fix = Action("use the last version", f"cat {file}.v* | tail -1 > {file}")
    elif obstacle == "readonly":
        fix = Action("force the copy", f"cp -f {backup} {file}")
        clue = f"'{file}': Permission denied"
        setup = (f"chmod a-w {file}",)
    if evidence:
        del files[backup]
        files[evidence] = good
        clue = f"cannot stat '{backup}'"
        look = Action("look for the backup", "ls")
    if obstacle == "versions":
        files |= {f"{file}.v{number}": f"{names['older']}\n" for number in range(1, last)}
    return Blueprint(
        instruction=phrase(names, f"restore {file} from its backup.", f"bring back {file} from the latest backup."),
        files=files,
        setup=setup,
        check=(f'[ "$(cat {file})" = {names["good"]} ]',),
        attempt=(Action("copy the backup", f"cp {backup} {file}"),),
        fix=(fix,),
        clue=clue,
        look=look,
        evidence=evidence,
        slips=(
            Action("copy the backup", f"cp {names['file']}.bak {file}"),
            Action("copy the backup", f"cp {names['other']}.txt {file}"),
            Action("read the file", f"cat {file}"),
        ),
        confirm=Action("check the result", f"cat {file}"),
    )


UNPACK = Family("unpack", "archives", (NONE, "missing_dir", "not_gzip", "readonly_dir"), _draw_unpack, _build_unpack)
RESTORE = Family("restore", "versioned files", (NONE, "suffix", "versions", "readonly"), _draw_restore, _build_restore)
