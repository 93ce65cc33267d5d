#!/usr/bin/env bash
# Build the image that the ranks run in, as an ordinary user; needs Apptainer 1.3 or newer.
#
#   containers/build.sh rocm|rocm-gfx90a|cpu [OUTPUT.sif]
#
# rocm: MI300 and MI350. rocm-gfx90a: MI200. cpu: tests, and nodes without GPUs. Variables change the choice:
#   BOOTSTRAP, BASE   another base, for example BOOTSTRAP=localimage BASE=/path/to/a/tree
#   WHEELS            a directory of wheels to install from instead of an index, where a node has no network
#   TORCHREC          the TorchRec of another base's torch; rechpc/compat.py has the table
#   PIP_OPTIONS       options of pip, for example another --index-url
set -euo pipefail

fail() {
  echo "build.sh: $*" >&2
  exit 2
}

case ${1:-} in
  rocm) arch=gfx942,gfx950 bootstrap=docker base=rocm/primus:v26.8 torchrec=1.9.2 need_gib=120 ;;
  # Its torch is the pinned one; FBGEMM comes from PyTorch's index of ROCm wheels, which PIP_OPTIONS must name.
  rocm-gfx90a)
    arch=gfx90a bootstrap=docker base=rocm/pytorch:rocm10.0_ubuntu24.04_py3.13_pytorch_release_2.13.0
    torchrec=1.8.0 need_gib=80
    ;;
  cpu) arch=cpu bootstrap=docker base=python:3.11-slim-bookworm torchrec=1.8.0 need_gib=4 ;;
  *) fail "usage: containers/build.sh rocm|rocm-gfx90a|cpu [OUTPUT.sif]" ;;
esac
output=$(realpath -m "${2:-rechpc-$1.sif}")
bootstrap=${BOOTSTRAP:-$bootstrap} base=${BASE:-$base} torchrec=${TORCHREC:-$torchrec}
pip_options=${PIP_OPTIONS:---no-input}
cd "$(dirname "$0")/.."

command -v apptainer >/dev/null || fail "no apptainer on the PATH; load the site's module, or see docs/container.md"
export APPTAINER_CACHEDIR=${APPTAINER_CACHEDIR:-$HOME/.apptainer/cache}
export APPTAINER_TMPDIR=${APPTAINER_TMPDIR:-${TMPDIR:-/tmp}}
output_dir=$(dirname "$output")
for name in APPTAINER_CACHEDIR APPTAINER_TMPDIR output_dir; do
  mkdir -p "${!name}"
  free_gib=$(($(df --output=avail -k "${!name}" | tail -1) >> 20))
  # The image itself is half as large as what it is made from.
  wanted_gib=$need_gib
  [[ $name != output_dir ]] || wanted_gib=$((need_gib / 2))
  ((free_gib >= wanted_gib)) ||
    fail "$name=${!name}: $free_gib GiB free, expected $wanted_gib; point it at a larger file system"
done

binds=()
if [[ -n ${WHEELS:-} ]]; then
  # %post cannot create a mount point, and every base has this one.
  binds=(--bind "$(realpath "$WHEELS"):/mnt:ro")
  pip_options="--no-index --find-links=/mnt"
fi

# zstd, for unpacking gzip costs every start of every rank. squashfs-tools 4.4 and Linux 4.14 know it.
apptainer build --force "${binds[@]}" \
  --mksquashfs-args "-comp zstd -Xcompression-level 3" \
  --build-arg BOOTSTRAP="$bootstrap" --build-arg BASE="$base" --build-arg TORCHREC="$torchrec" \
  --build-arg ARCH="$arch" --build-arg PIP_OPTIONS="$pip_options" \
  "$output.partial" containers/rechpc.def
mv "$output.partial" "$output"
# Beside the image, for a run records it, and reading 56 GB again takes minutes.
(cd "$output_dir" && sha256sum "$(basename "$output")" >"$output.sha256")
# The same for what it is made of, which a login node asks.
apptainer exec --cleanenv "$output" cat /opt/rechpc/image.json >"$output.json"

echo "$output: $(($(stat -c %s "$output") >> 20)) MiB"
echo "sha256 $(cut -d' ' -f1 "$output.sha256")"
