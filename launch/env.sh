# Sourced by the launchers: makes .venv with the package and the given extras, and sees that bubblewrap is there.
# Environment: PYTHON (interpreter to make .venv with; default python3), RETERM_VENV (its place; default .venv).

set -euo pipefail
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${RETERM_VENV:-$repo/.venv}"

fail() {
  echo "error: $*" >&2
  exit 1
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then sudo "$@"; else return 1; fi
}

# make_environment EXTRAS: EXTRAS is a comma-separated list, or empty.
make_environment() {
  local python="${PYTHON:-python3}" extras="$1" wanted
  command -v "$python" >/dev/null 2>&1 || fail "$python not found; install Python 3.11 or later, or set PYTHON=/path/to/python"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old; Python 3.11 or later is needed. Set PYTHON=/path/to/python3.11"
  if ! [ -x "$venv/bin/pip" ]; then
    "$python" -m venv "$venv" || fail "could not make $venv; on Debian and Ubuntu: apt-get install -y python3-venv"
  fi
  # Installed again only when the declaration or the extras changed.
  wanted="$(cat "$repo/setup.py" | cksum) [$extras]"
  if [ "$(cat "$venv/.reterm_installed" 2>/dev/null)" != "$wanted" ]; then
    echo "Installing reterm_jax${extras:+[$extras]} into $venv (a minute or two) ..."
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e "$repo${extras:+[$extras]}" ||
      fail "pip could not install the package; its message is above"
    echo "$wanted" >"$venv/.reterm_installed"
  fi
  export PATH="$venv/bin:$PATH"
}

need_bubblewrap() {
  if ! command -v bwrap >/dev/null 2>&1; then
    echo "Installing bubblewrap ..."
    if command -v apt-get >/dev/null 2>&1; then
      (as_root apt-get update -qq && as_root apt-get install -y -qq bubblewrap) >/dev/null 2>&1 || true
    elif command -v dnf >/dev/null 2>&1; then
      as_root dnf install -y -q bubblewrap >/dev/null 2>&1 || true
    fi
    command -v bwrap >/dev/null 2>&1 ||
      fail "bubblewrap, which isolates the agent's commands, is missing; as root run: apt-get install -y bubblewrap"
  fi
}
