"""Loads the bootstrap code of one SGLang release from its unpacked wheel.

SGLang's rendezvous lives in sglang/srt/disaggregation/common/conn.py. That module, and the
few of its imports that matter here, are executed as they are; everything else it imports
(torch, server arguments, process groups, staging) is answered by inert stand-ins, so no
GPU and no model is needed.
"""
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from unittest.mock import MagicMock

AS_RELEASED = {
    "sglang.srt.environ",
    "sglang.srt.utils.network",
    "sglang.srt.disaggregation.base",
    "sglang.srt.disaggregation.base.conn",
    "sglang.srt.disaggregation.common",
    "sglang.srt.disaggregation.common.bootstrap",
    "sglang.srt.disaggregation.common.conn",
    "sglang.srt.disaggregation.common.utils",
    "sglang.srt.disaggregation.utils",
    "sglang.srt.disaggregation.pp_consensus_store",
}

# What get_parallel() answers. Callers change it to play another rank.
PARALLEL = types.SimpleNamespace()


def reset_parallel(**values):
    PARALLEL.__dict__.clear()
    PARALLEL.__dict__.update(
        attn_tp_size=1, attn_tp_rank=0, attn_cp_size=1, attn_cp_rank=0,
        attn_dcp_size=1, attn_dcp_rank=0, attn_dp_size=1, attn_dp_rank=0,
        tp_size=1, dp_size=1, num_dp_ranks=1, pp_size=1, nnodes=1, pp_group=None,
        enable_dp_attention=False, load_balance_method="follow_bootstrap_room",
        enable_dsa_cache_layer_split=False, enable_kv_cache_sharding=False,
        enable_cp_tp_group_sharing=False, dist_init_addr=None)
    PARALLEL.__dict__.update(values)


# What get_disagg() and get_serving() answer.
DISAGG = types.SimpleNamespace(
    disaggregation_bootstrap_port=0, disaggregation_decode_allocation_policy="early")
SERVING = types.SimpleNamespace(host="127.0.0.1", port=30000)


class _StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


def _furnish(module):
    name = module.__name__
    if name == "sglang.srt.runtime_context":
        module.get_parallel = lambda: PARALLEL
        module.get_disagg = lambda: DISAGG
        module.get_serving = lambda: SERVING
        module.linear_attn_tp_size = lambda: PARALLEL.attn_tp_size
    elif name == "sglang.srt.utils":
        module.is_npu = module.is_hip = module.is_cuda = lambda: False
    elif name == "torch.distributed":
        module.is_available = module.is_initialized = lambda: False


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, src):
        self.src = src

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ("sglang", "torch", "triton"):
            return None
        if name in AS_RELEASED:
            at = os.path.join(self.src, *name.split("."))
            package = os.path.isdir(at)
            file = os.path.join(at, "__init__.py") if package else at + ".py"
            if os.path.exists(file):
                return importlib.util.spec_from_file_location(
                    name, file, submodule_search_locations=[at] if package else None)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        _furnish(module)


def load(src):
    """Gives common/conn.py of the release unpacked at src (the folder that holds sglang/).

    One release a process: the modules stay loaded.
    """
    logging.Logger.warning_once = logging.Logger.warning
    logging.Logger.info_once = logging.Logger.info
    logging.basicConfig(level=os.environ.get("LOGLEVEL", "CRITICAL"), stream=sys.stderr)
    reset_parallel()
    sys.meta_path.insert(0, _Finder(src))
    import sglang.srt.disaggregation.common.conn as conn
    return conn


def releases(root):
    """The releases under root, oldest first: [("0.5.18", folder), ...].

    Folders are named by the release or by its last number (18).
    """
    found = []
    for entry in sorted(os.listdir(root)):
        folder = os.path.join(root, entry)
        if not os.path.isdir(os.path.join(folder, "sglang")):
            continue
        found.append((entry if "." in entry else f"0.5.{entry}", folder))
    return sorted(found, key=lambda r: tuple(int(n) for n in r[0].split(".")))
