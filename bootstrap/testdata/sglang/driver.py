"""Plays SGLang's prefill and decode at a bootstrap server, and SGLang's bootstrap server.

Usage: python driver.py SRC   (one release; commands as JSON lines in, answers as JSON lines out)
"""
import dataclasses
import json
import os
import sys
import threading
import time
import types

import release
from decode import Decode

OUT = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
conn = release.load(sys.argv[1])
decode = Decode(conn)
codes = []                                      # of every registration sent

real_put = conn.requests.put


def put(*args, **kw):
    reply = real_put(*args, **kw)
    codes.append(reply.status_code)
    return reply


conn.requests.put = put
# A refused registration is repeated after seconds; the tests need not wait for that.
conn.time = types.SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=lambda s: None)


def prefill(c):
    """A manager with what register_to_bootstrap reads."""
    release.reset_parallel(**c.get("parallel", {}))
    p = release.PARALLEL
    manager = type("Manager", (conn.CommonKVManager,), {})
    manager.__abstractmethods__ = frozenset()
    m = manager.__new__(manager)
    m.dist_init_addr, m.bootstrap_host, m.bootstrap_port = None, c["host"], c["port"]
    m.attn_tp_size, m.attn_tp_rank = p.attn_tp_size, p.attn_tp_rank
    m.attn_cp_size, m.attn_cp_rank = p.attn_cp_size, p.attn_cp_rank
    m.attn_dp_size, m.attn_dp_rank = p.attn_dp_size, p.attn_dp_rank
    m.pp_size, m.pp_rank = p.pp_size, c.get("pp_rank", 0)
    m.system_dp_size, m.system_dp_rank = c.get("system_dp_size", 1), c.get("system_dp_rank", 0)
    m.local_ip, m.rank_port = c["rank_ip"], c["rank_port"]
    m.kv_args = types.SimpleNamespace(page_size=c.get("page_size", 1), rust_http_port=None)
    m.kv_cache_dtype_str = c.get("dtype", "auto")
    m.kv_layout, m.dsv41_spec_layout = c.get("kv_layout"), c.get("spec_layout")
    release.DISAGG.disaggregation_decode_allocation_policy = c.get("policy", "early")
    return m


def do_register(c):
    codes.clear()
    prefill(c).register_to_bootstrap()
    return {"codes": list(codes)}


def do_topology(c):
    manager = decode.manager(**c.get("decode", {}))
    if not manager.try_ensure_parallel_info(c["addr"]):
        return {"ok": False}
    return {"ok": True, "info": dataclasses.asdict(manager.prefill_info_table[c["addr"]])}


def do_receive(c):
    manager = decode.manager(**c.get("decode", {}))
    if not manager.try_ensure_parallel_info(c["addr"]):
        return {"failure": "no topology"}
    receiver, failure = decode.receive(manager, c["addr"], c.get("room", 1), c.get("dp_rank", 0))
    if failure:
        return {"failure": failure}
    return {"ranks": receiver.bootstrap_infos}


def do_register_dp_rank(c):
    sender = type("Sender", (conn.CommonKVSender,), {})
    sender.__abstractmethods__ = frozenset()
    s = sender.__new__(sender)
    s.bootstrap_server_url, s.bootstrap_room = c["addr"], c["room"]
    s.kv_mgr = types.SimpleNamespace(attn_dp_rank=c["dp_rank"])
    s._register_prefill_dp_rank()
    return {}


def do_query_dp_ranks(c):
    return {"found": conn.CommonKVReceiver.query_prefill_dp_ranks(c["addr"], c["rooms"])}


def do_heartbeat(c):
    """Whether the decode's own heartbeat thread takes the server for alive."""
    manager = decode.manager()
    beat = threading.Event()
    manager.prefill_info_table = {c["addr"]: None}
    manager.heartbeat_interval, manager.max_failures, manager.heartbeat_failures = 0.01, 1, {}
    manager._on_heartbeat_success = lambda addr: beat.set()
    manager._handle_node_failure = lambda addr: None
    manager._start_heartbeat_checker_thread()   # a daemon; it ends with the process
    alive = beat.wait(5)
    manager.prefill_info_table.clear()
    return {"alive": alive}


def do_serve(c):
    server = conn.CommonKVBootstrapServer(c["host"], 0)
    while not getattr(server, "_runner", None) or not server._runner.addresses:
        time.sleep(0.01)
    return {"port": server._runner.addresses[0][1]}


OUT.write(json.dumps({"ready": True}) + "\n")
for line in sys.stdin:
    command = json.loads(line)
    try:
        answer = globals()["do_" + command["cmd"]](command)
    except Exception as e:                      # the test prints it
        answer = {"error": f"{type(e).__name__}: {e}"}
    OUT.write(json.dumps(answer) + "\n")
os._exit(0)
