# Where the fetched things lie; sourced by the other scripts. All of it is under one
# folder, the cache: $NIXLKV_CACHE, or nixlkv in the user's cache folder.
# shellcheck shell=bash disable=SC2034 # the variables are for those who source this

if [[ -z ${NIXLKV_CACHE:-} ]]; then
  if [[ ${XDG_CACHE_HOME:-} == /* ]]; then
    NIXLKV_CACHE=$XDG_CACHE_HOME/nixlkv
  else
    NIXLKV_CACHE=${HOME:?is not set, so set NIXLKV_CACHE}/.cache/nixlkv
  fi
fi
[[ $NIXLKV_CACHE == /* ]] || NIXLKV_CACHE=$PWD/$NIXLKV_CACHE
export NIXLKV_CACHE

nixl_version=1.5.1
nixl_home=$NIXLKV_CACHE/nixl-cu12-$nixl_version # the wheel's own layout below it
nixl_lib=$nixl_home/.nixl_cu12.mesonpy.libs/libnixl_capi.so
peer_venv=$NIXLKV_CACHE/peers   # Python and what SGLang's transfer code needs
sglang_src=$NIXLKV_CACHE/sglang # one folder a release: 0.5.18/sglang/srt/...
