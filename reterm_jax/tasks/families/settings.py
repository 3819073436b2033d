"""Configuration and data processing: set a key in a config file, write one column of a table."""

from __future__ import annotations

import random

from reterm_jax.tasks.families.base import NONE, Action, Blueprint, Family, Names, phrase
from reterm_jax.tasks.families.names import COLORS, KEYS, NOUNS


def _draw_configure(rng: random.Random) -> dict[str, str]:
    key, other = rng.sample(KEYS, 2)
    old, new, third = rng.sample(COLORS, 3)
    return {"file": rng.choice(NOUNS), "key": key, "other": other, "old": old, "new": new, "third": third}


def _build_configure(names: Names, obstacle: str) -> Blueprint:
    key, old, new = names["key"], names["old"], names["new"]
    file = f"{names['file']}.conf"
    path, separator, before = file, "=", f"{key}={old}"
    fix, target, clue, probe = f"s/{key}=.*/{key}={new}/", file, "", None
    thought = "set the key"
    show = Action("check the result", f"cat {file}")
    if obstacle == "commented":
        before = f"#{key}={old}"
        fix, clue, probe, thought = f"s/#*{key}=.*/{key}={new}/", f"#{key}=", (show,), "remove the comment mark"
    elif obstacle == "colon":
        separator, before = ":", f"{key}: {old}"
        fix, clue, probe, thought = f"s/{key}:.*/{key}: {new}/", f"{key}: ", (show,), "it uses a colon"
        fix = f'"{fix}"'
    elif obstacle == "renamed":
        path, target = f"{names['file']}.ini", f"{names['file']}.*"
        clue, thought = f"can't read {file}", "try any ending"
    rest = f"{names['other']}{separator}{' ' if separator == ':' else ''}{names['third']}"
    return Blueprint(
        instruction=phrase(names, f"set {key} to {new} in {file}.", f"configure {key} as {new} in {file}."),
        files={path: f"{before}\n{rest}\n"},
        check=(
            # Any spacing will do, but one setting only, and the other key as it was.
            f"[ \"$(grep '^ *{key} *[=:]' {path} | tr -d ' ')\" = '{key}{separator}{new}' ]",
            f"grep -qx '{rest}' {path}",
        ),
        attempt=(Action("set the key", f"sed -i s/{key}=.*/{key}={new}/ {file}"), show),
        fix=(Action(thought, f"sed -i {fix} {target}"),),
        clue=clue,
        probe=probe,
        slips=(
            Action("set the key", f"sed s/{key}=.*/{key}={new}/ {file}"),
            Action("set the key", f"sed -i s/{names['other']}/{new}/ {names['file']}"),
            Action("read the file", f"cat {file}"),
        ),
        confirm=Action("check the result", f"cat {path}"),
    )


def _draw_column(rng: random.Random) -> dict[str, str]:
    table, out = rng.sample(NOUNS, 2)
    return {
        "table": table,
        "out": out,
        "column": str(rng.randint(1, 3)),
        "separator": rng.choice(";:|"),
        "ext": rng.choice(("data", "tab")),
        **{f"cell{number}": color for number, color in enumerate(rng.sample(COLORS, 6))},
    }


def _build_column(names: Names, obstacle: str) -> Blueprint:
    table, out, column = f"{names['table']}.csv", f"{names['out']}.txt", int(names["column"])
    cells = [names[f"cell{number}"] for number in range(6)]
    rows = [cells[:3], cells[3:]]
    path, source, separator, files, directories = table, table, ",", {}, ()
    clear, thought, clue, probe = (), "cut the column", "", None
    show = Action("check the result", f"cat {out}")
    if obstacle == "separator":
        separator, thought = names["separator"], "use the other separator"
        clue = separator.join(rows[0])
        probe = (Action("look at the table", f"cat {table}"),)
    elif obstacle == "renamed":
        path, source = f"{names['table']}.{names['ext']}", f"{names['table']}.*"
        thought, clue = "try any ending", f"{table}: No such file"
    elif obstacle == "directory":
        directories = (out,)
        clear, clue = (Action("remove the directory first", f"rmdir {out}"),), f"{out}: Is a directory"
    files[path] = "".join(f"{separator.join(row)}\n" for row in rows)
    return Blueprint(
        instruction=phrase(
            names, f"write column {column} of {table} to {out}.", f"save column {column} of {table} as {out}."
        ),
        files=files,
        directories=directories,
        check=(f"printf '%s\\n' {rows[0][column - 1]} {rows[1][column - 1]} | cmp -s - {out}",),
        attempt=(Action("cut the column", f'cut -d "," -f {column} {table} > {out}'), show),
        fix=(
            *clear,
            Action(thought, f'cut -d "{separator}" -f {column} {source} > {out}'),
        ),
        clue=clue,
        probe=probe,
        slips=(
            Action("cut the column", f"cut -f {column} {table} > {out}"),
            Action("cut the column", f'cut -d "," -f {column % 3 + 1} {table} > {out}'),
            Action("cut the column", f'cut -d "," -f {column} {table}'),
        ),
        confirm=show,
    )


CONFIGURE = Family(
    "configure", "configuration", (NONE, "commented", "colon", "renamed"), _draw_configure, _build_configure
)
COLUMN = Family("column", "data processing", (NONE, "separator", "renamed", "directory"), _draw_column, _build_column)
