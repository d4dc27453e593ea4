"""Stands in for what SGLang's transfer modules import from the rest of SGLang.

The modules in REAL come from a release, unmodified. Everything else of sglang, torch and
triton is a module in which every name exists; a few names that matter are set here.
"""
import enum
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import types
from unittest.mock import MagicMock

REAL = {"sglang.srt." + m for m in (
    "environ", "utils.network",
    "disaggregation.base", "disaggregation.base.conn",
    "disaggregation.common", "disaggregation.common.conn", "disaggregation.common.utils",
    "disaggregation.common.bootstrap", "disaggregation.common.staging_handler",
    "disaggregation.common.staging_buffer",
    "disaggregation.nixl", "disaggregation.nixl.conn",
    "disaggregation.utils", "disaggregation.pp_consensus_store",
)}

PARALLEL_DEFAULTS = dict(
    attn_tp_size=1, attn_tp_rank=0, attn_cp_size=1, attn_cp_rank=0,
    attn_dcp_size=1, attn_dcp_rank=0, attn_dp_size=1, attn_dp_rank=0,
    tp_size=1, dp_size=1, num_dp_ranks=1, pp_size=1, pp_rank=0, nnodes=1,
    enable_dp_attention=False, load_balance_method="follow_bootstrap_room",
    enable_dsa_cache_layer_split=False, enable_kv_cache_sharding=False,
    enable_cp_tp_group_sharing=False, dist_init_addr=None,
)


class FileGroup:
    """The process group of the pipeline stages of one prefill: stage 0 tells, the others wait."""

    def __init__(self, path):
        self.path = path

    def broadcast_object(self, obj, src=0):
        if obj is not None:
            with open(self.path + ".new", "w") as f:
                json.dump(obj, f)
            os.rename(self.path + ".new", self.path)
            return obj
        while not os.path.exists(self.path):
            time.sleep(0.05)
        with open(self.path) as f:
            return json.load(f)


class AnyModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class NullContext:
    """A trace context that traces nothing."""
    tracing_enable = False

    def __getattr__(self, name):
        return lambda *args, **kw: self


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, source, config, parallel):
        self.source, self.config, self.parallel = source, config, parallel
        self.stood_in = ["sglang", "torch", "triton"]
        if config["role"] != "prefill" or not config.get("serve_bootstrap", True):
            self.stood_in.append("aiohttp")  # the bootstrap server's alone, and slow to load

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in self.stood_in:
            return None
        if name in REAL:
            where = os.path.join(self.source, *name.split("."))
            if os.path.isdir(where):
                return importlib.util.spec_from_file_location(
                    name, os.path.join(where, "__init__.py"), submodule_search_locations=[where])
            if os.path.exists(where + ".py"):
                return importlib.util.spec_from_file_location(name, where + ".py")
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def kv_shard_group(self, mla=False):
        """The ranks that share one KV cache: those of context parallelism, or with MLA those of TP."""
        p = self.parallel
        if p.attn_cp_size > 1:
            return types.SimpleNamespace(rank_in_group=p.attn_cp_rank, world_size=p.attn_cp_size)
        if mla:
            return types.SimpleNamespace(rank_in_group=p.attn_tp_rank, world_size=p.attn_tp_size)
        return types.SimpleNamespace(rank_in_group=0, world_size=1)

    def create_module(self, spec):
        return AnyModule(spec.name)

    def exec_module(self, mod):
        c, parallel, ns = self.config, self.parallel, types.SimpleNamespace
        name = mod.__name__
        if name == "sglang.srt.runtime_context":
            mod.get_parallel = lambda: parallel
            mod.get_serving = lambda: ns(host=c.get("host", "127.0.0.1"), port=c.get("http_port", 30000))
            mod.get_disagg = lambda: ns(
                disaggregation_bootstrap_port=c.get("bootstrap_port", 8998),
                disaggregation_decode_allocation_policy=c.get("allocation_policy", "early"))
            mod.get_schedule = lambda: ns(chunked_prefill_size=c.get("chunked_prefill_size", 8192))
            mod.get_device = lambda: ns(device="cpu")
            mod.get_observability = lambda: ns(enable_trace=False)
            mod.linear_attn_tp_size = lambda: parallel.attn_tp_size
        elif name == "sglang.srt.layers.dp_attention":
            mod.get_attention_dp_rank = lambda: parallel.attn_dp_rank
            mod.get_attention_dp_size = lambda: parallel.attn_dp_size
            mod.linear_attn_tp_size = lambda: parallel.attn_tp_size
        elif name == "sglang.srt.utils.common":
            mod.ceil_align = lambda a, b: -(-a // b) * b
            mod.run_with_deadline = lambda fn, **kw: fn()
        elif name == "sglang.srt.utils":
            mod.is_npu = mod.is_hip = mod.is_cuda = lambda: False
        elif name == "sglang.srt.observability.trace":
            mod.TraceNullContext = mod.TraceReqContext = NullContext
        elif name == "sglang.srt.mem_cache.page_interleave":
            mod.get_kv_shard_group = self.kv_shard_group
        elif name == "sglang.srt.disaggregation.common.dcp_pack":
            # It packs a chunk's tokens with a CUDA kernel. Without a buffer SGLang sends them from
            # where they lie, as it does with a chunk that does not fit one.
            mod.init_dcp_pack_buffers = lambda *args, **kw: []
        elif name == "sglang.srt.distributed":
            mod.get_pp_group = lambda: parallel.pp_group
        elif name == "torch.distributed":
            mod.is_available = mod.is_initialized = lambda: False
        elif name == "sglang.srt.distributed.communication_tags":
            mod.P2PTag = enum.Enum("P2PTag", {"PP_CONSENSUS": 1})


def install(source, config, group_file):
    """Makes SGLang's modules importable; gives the parallel state that they read."""
    parallel = types.SimpleNamespace(**{**PARALLEL_DEFAULTS, **config.get("parallel", {})})
    parallel.pp_group = FileGroup(group_file)
    sys.meta_path.insert(0, Finder(source, config, parallel))
    return parallel


def host_vram(agent, ndarray):
    """Backs VRAM by host memory: it keeps its name on the wire and is DRAM, device 0, for NIXL."""

    def as_dram(kind):
        return "DRAM" if kind == "VRAM" else kind

    def wrap(method, position):
        real = getattr(agent, method)

        def call(self, *args, **kw):
            args = list(args)
            if len(args) > position:
                args[position] = as_dram(args[position])
            if "mem_type" in kw:
                kw["mem_type"] = as_dram(kw["mem_type"])
            descs = args[position - 1]
            if isinstance(descs, ndarray) and descs.ndim == 2 and descs.shape[1] >= 3:
                args[position - 1] = descs.copy()
                args[position - 1][:, 2] = 0
            elif isinstance(descs, list) and descs and isinstance(descs[0], tuple) and len(descs[0]) >= 3:
                args[position - 1] = [d[:2] + (0,) + d[3:] for d in descs]
            return real(self, *args, **kw)

        setattr(agent, method, call)

    wrap("register_memory", 1)
    wrap("get_xfer_descs", 1)
    wrap("prep_xfer_dlist", 2)
