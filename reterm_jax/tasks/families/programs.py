"""Scripting and environment: run a script, run a tool that has to be found and set up."""

from __future__ import annotations

import random

from reterm_jax.tasks.families.base import NONE, Action, Blueprint, Family, Names, phrase
from reterm_jax.tasks.families.names import COLORS, NOUNS, PLACES, SCRIPTS, TOOLS


def _draw_script(rng: random.Random) -> dict[str, str]:
    out, source = rng.sample(NOUNS, 2)
    first, second = sorted(rng.sample(COLORS, 2))
    return {
        "script": rng.choice(SCRIPTS),
        "out": out,
        "source": source,
        "lock": rng.choice(PLACES),
        "typo": rng.choice(("srot", "sotr", "sorrt", "osrt")),
        "first": first,
        "second": second,
    }


def _build_script(names: Names, obstacle: str) -> Blueprint:
    script, out, source, lock = f"{names['script']}.sh", f"{names['out']}.txt", f"{names['source']}.txt", names["lock"]
    typo = names["typo"]
    run = Action("run the script", f"./{script}")
    fix, clue = (run,), ""
    files = {source: f"{names['second']}\n{names['first']}\n"}
    setup = (f"chmod a+x {script}",)
    guard, sort = "", "sort"
    if obstacle == "not_executable":
        setup = (f"chmod a-x {script}",)
        fix = (Action("run it with sh", f"sh {script}"),)
        clue = f"{script}: Permission denied"
    elif obstacle == "lock":
        files[f"{lock}.lock"] = ""
        guard = f'if [ -e {lock}.lock ]; then\n  echo "locked by {lock}.lock, remove it"\n  exit 1\nfi\n'
        fix = (Action("remove the lock", f"rm -f *.lock && ./{script}"),)
        clue = f"locked by {lock}.lock"
    elif obstacle == "typo":
        sort = typo
        fix = (Action("correct the script", f"sed -i s/{typo}/sort/ {script}"), run)
        clue = f"{typo}: not found"
    files[script] = f'#!/bin/sh\ncd "$(dirname "$0")"\n{guard}{sort} {source} > {out}\n'
    return Blueprint(
        instruction=phrase(names, f"run {script} to make {out}.", f"make {out} with {script}."),
        files=files,
        setup=setup,
        check=(f"printf '%s\\n' {names['first']} {names['second']} | cmp -s - {out}",),
        attempt=(run,),
        fix=fix,
        clue=clue,
        slips=(
            Action("run the script", script),
            Action("run the script", f"./{names['script']}"),
            Action("make the file", f"touch {out}"),
        ),
        confirm=Action("check the result", f"cat {out}"),
    )


def _draw_tool(rng: random.Random) -> dict[str, str]:
    tool, other = rng.sample(TOOLS, 2)
    return {
        "tool": tool,
        "other": other,
        "file": rng.choice(NOUNS),
        "dir": rng.choice(PLACES),
        "color": rng.choice(COLORS),
        "text": rng.choice(COLORS),
    }


def _build_tool(names: Names, obstacle: str) -> Blueprint:
    tool, other, place, color = names["tool"], names["other"], names["dir"], names["color"]
    file = f"{names['file']}.txt"
    home, guard, fix, clue = "bin", "", f"{tool} {file}", ""
    thought, line = "run the tool", f'echo "{tool} $(cat "$1")" > "$1.out"'
    files = {file: f"{names['text']}\n"}
    result = f"{tool} {names['text']}"
    if obstacle == "off_path":
        home, thought, fix = place, "look one level down", f"*/{tool} {file}"
        clue = f"{tool}: command not found"
    elif obstacle == "variable":
        guard = f'if [ -z "$color" ]; then\n  echo "color is not set, try {color}"\n  exit 1\nfi\n'
        line, result = f'echo "{tool} $color $(cat "$1")" > "$1.out"', f"{tool} {color} {names['text']}"
        thought, fix, clue = "set the color", f"color={color} {tool} {file}", f"try {color}"
    elif obstacle == "module":
        files[f"{place}/{tool}.lib"] = f"{color}\n"
        guard = f'if [ ! -f "$lib" ]; then\n  echo "no module, lib must name {tool}.lib"\n  exit 1\nfi\n'
        line = f'echo "{tool} $(cat "$lib") $(cat "$1")" > "$1.out"'
        result = f"{tool} {color} {names['text']}"
        thought, fix, clue = "find the module", f"lib=$(echo */{tool}.lib) {tool} {file}", f"name {tool}.lib"
    files[f"{home}/{tool}"] = f"#!/bin/sh\n{guard}{line}\n"
    return Blueprint(
        instruction=phrase(names, f"use the {tool} tool on {file}.", f"run {tool} on {file}."),
        files=files,
        # The tools' directory is on PATH, with or without the tool in it.
        directories=("bin",),
        setup=(f"chmod a+x {home}/{tool}",),
        check=(f"[ \"$(cat {file}.out)\" = '{result}' ]",),
        attempt=(Action("run the tool", f"{tool} {file}"),),
        fix=(Action(thought, fix),),
        clue=clue,
        slips=(
            Action("run the tool", f"./{tool} {file}"),
            Action("run the tool", f"{other} {file}"),
            Action("read the file", f"cat {file}"),
        ),
        confirm=Action("check the result", f"cat {file}.out"),
    )


SCRIPT = Family("script", "scripting", (NONE, "not_executable", "lock", "typo"), _draw_script, _build_script)
TOOL = Family("tool", "environment", (NONE, "off_path", "variable", "module"), _draw_tool, _build_tool)
