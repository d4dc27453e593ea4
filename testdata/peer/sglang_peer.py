#!/usr/bin/env python3
"""One rank of a prefill or decode server that is SGLang's NIXL transfer code, unmodified.

It takes the configuration, the commands and gives the events of examples/kvpeer, and runs on
a machine without a GPU: KV buffers are host memory. Two keys more are in the configuration:
sglang_src, a folder with the sources of a release, and version, for people.

Under the allocation policy prefill_complete a room that is sent counts as computed at once,
unless send says "computed": false; then the command complete, with the room, says so later. The
event rooms names the rooms that a decode has asked for, in "asked".

Usage: sglang_peer.py CONFIG.json
"""
import hashlib
import json
import logging
import os
import sys
import threading
import time
import traceback
import types
import urllib.request

import numpy as np
import nixl._api as nixl_api  # before the stand-ins: it looks for the real torch

import standins

CONFIG = json.load(open(sys.argv[1]))
os.environ.setdefault("SGLANG_HOST_IP", CONFIG.get("host_ip", "127.0.0.1"))
os.environ.update({k: str(v) for k, v in CONFIG.get("env", {}).items()})
logging.basicConfig(level=os.environ.get("LOGLEVEL", "WARNING"), stream=sys.stderr)
# SGLang adds these to the logger when it starts.
logging.Logger.warning_once = logging.Logger.warning
logging.Logger.info_once = logging.Logger.info

OUT = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what libraries print is no event

ROLE = CONFIG["role"]
PORT = CONFIG.get("bootstrap_port", 8998)
PARALLEL = standins.install(
    CONFIG["sglang_src"], CONFIG,
    os.path.join(os.path.dirname(os.path.abspath(sys.argv[1])), f"pp-{ROLE}-{PORT}"))
standins.host_vram(nixl_api.nixl_agent, np.ndarray)

from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll, StateType  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402
import sglang.srt.disaggregation.nixl.conn as nixl_conn  # noqa: E402

STATUS = {0: "Failed", 1: "Bootstrapping", 2: "WaitingForInput", 3: "Transferring", 4: "Success"}
PATIENCE = 6
DEFERRED = CONFIG.get("allocation_policy") == "prefill_complete"


OUT_LOCK = threading.Lock()


def emit(**event):
    with OUT_LOCK:
        OUT.write(json.dumps(event) + "\n")


class Memory:
    """Buffers that are divided into slots of a length each."""

    def __init__(self, item_lens, slots):
        self.item_lens = item_lens
        # Written, not only reserved: a first touch within a transfer would count as the transfer.
        self.arrays = [np.empty(n * s, dtype=np.uint8) for n, s in zip(item_lens, slots)]
        for a in self.arrays:
            a.fill(0)

    def ptrs(self):
        return [int(a.ctypes.data) for a in self.arrays]

    def lens(self):
        return [a.nbytes for a in self.arrays]

    def fill(self, seed):
        for r, (a, n) in enumerate(zip(self.arrays, self.item_lens)):
            for i in range(a.size // n if n else 0):
                g = hashlib.sha256(f"{seed}/{r}/{i}".encode()).digest()
                a[i * n:(i + 1) * n] = np.frombuffer((g * (n // 32 + 1))[:n], dtype=np.uint8)

    def digest(self, slots):
        h = hashlib.sha256()
        for a, n in zip(self.arrays, self.item_lens):
            for i in slots:
                h.update(a[i * n:(i + 1) * n].tobytes())
        return h.hexdigest()

    def stray(self, but):
        """Counts bytes that are not zero outside of some slots."""
        count = 0
        for a, n in zip(self.arrays, self.item_lens):
            if n == 0:
                continue
            outside = np.ones(a.size // n, dtype=bool)
            outside[[i for i in but if 0 <= i < outside.size]] = False
            count += int(np.count_nonzero(a.reshape(-1, n)[outside]))
        return count


KV = CONFIG["kv"]
STATE = KV.get("state", [])
slot_counts = KV["num_slots"]
if isinstance(slot_counts, int):
    slot_counts = [slot_counts] * len(KV["item_lens"])
kv = Memory(KV["item_lens"], slot_counts)
aux_lens = KV.get("aux_item_lens", [64])
aux = Memory(aux_lens, [KV.get("aux_slots", 16)] * len(aux_lens))
state = [Memory(s["item_lens"], [s["num_slots"]] * len(s["item_lens"])) for s in STATE]


def state_type(name):
    """A decode takes what later releases send: types are not on the wire, and it does not read its own."""
    known = {t.value for t in StateType}
    return StateType.SWA if ROLE == "decode" and name not in known else StateType(name)


def kv_args():
    args = KVArgs()
    fields = dict(
        engine_rank=0, page_size=KV.get("page_size", 1), gpu_id=0, ib_device=None, ib_traffic_class=None,
        kv_data_ptrs=kv.ptrs(), kv_data_lens=kv.lens(), kv_item_lens=list(kv.item_lens),
        kv_layer_ids=KV.get("layer_ids", []), kv_data_mem_kinds=KV.get("mem_kinds"),
        kv_cache_dtype_str=KV.get("dtype", "auto"), kv_layout=None,
        kv_head_num=KV.get("kv_head_num", 1), total_kv_head_num=KV.get("total_kv_head_num", 0),
        aux_data_ptrs=aux.ptrs(), aux_data_lens=aux.lens(), aux_item_lens=list(aux.item_lens),
        state_types=[state_type(s["type"]) for s in STATE],
        state_data_ptrs=[c.ptrs() for c in state], state_data_lens=[c.lens() for c in state],
        state_item_lens=[list(c.item_lens) for c in state],
        state_layer_ids=[s.get("layer_ids", []) for s in STATE],
        state_dim_per_tensor=[s.get("dim_per_tensor", []) for s in STATE],
        state_slice_outer_counts=[s.get("slice_outer_counts", []) for s in STATE],
        state_conv_shard_groups=[s.get("conv_shard_groups", []) for s in STATE],
        is_hybrid_mla_backend=False, mla_compression_ratios=None, num_draft_entries=0,
        system_dp_rank=0, pp_rank=0, prefill_start_layer=0, prefill_end_layer=None,
    )
    for name, value in {**fields, **CONFIG.get("kv_args", {})}.items():
        setattr(args, name, value)
    return args


class DeferredSocket:
    """A prefill's control socket under prefill_complete, from the second message on.

    SGLang has that policy with Mooncake alone, whose thread shows each message to the common part
    first (CommonKVManager._make_worker_recv). NIXL's does not yet; this does it for it.
    """

    def __init__(self, manager):
        self.manager, self.socket = manager, manager.server_socket

    def recv_multipart(self):
        while True:
            message = self.socket.recv_multipart()
            if not self.manager._handle_bootstrap_message(message):
                return message


server_args = types.SimpleNamespace(
    host=CONFIG.get("host", "127.0.0.1"), disaggregation_bootstrap_port=PORT, dist_init_addr=None,
    pp_size=PARALLEL.pp_size, tp_size=CONFIG.get("tp_size", PARALLEL.attn_tp_size))


def serve_bootstrap():
    """Starts the bootstrap server and waits until it answers; it says nowhere that it listens."""
    server = nixl_conn.NixlKVBootstrapServer(server_args.host, PORT)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(1000):
        try:
            direct.open(f"http://{server_args.host}:{PORT}/health", timeout=5).close()
            return server
        except OSError:
            time.sleep(0.01)
    sys.exit(f"the bootstrap server at port {PORT} does not answer")


if ROLE == "prefill" and CONFIG.get("serve_bootstrap", True):
    bootstrap_server = serve_bootstrap()
manager = nixl_conn.NixlKVManager(
    kv_args(), DisaggregationMode.PREFILL if ROLE == "prefill" else DisaggregationMode.DECODE,
    server_args, CONFIG.get("is_mla", False))
if ROLE == "prefill" and DEFERRED:
    manager.server_socket = DeferredSocket(manager)
if "fill_seed" in CONFIG:
    kv.fill(CONFIG["fill_seed"] + "/kv")
    aux.fill(CONFIG.get("aux_seed", "p") + "/aux")  # every rank holds the same metadata
    for i, component in enumerate(state):
        component.fill(f"{CONFIG['fill_seed']}/state{i}")

live = {}  # room: its sender or receiver, until its end is known
ENDING = threading.Lock()


def wait(room, want, timeout):
    end = time.time() + timeout
    while time.time() < end:
        status = room.poll()
        if status == KVPoll.Failed or status >= want:
            return status
        time.sleep(0.001)
    return room.poll()


def report(number, room, status, digests):
    """Tells how a room stands. It is cleared before: its number may be used again at once."""
    event = dict(event="done", room=number, status=STATUS[status], **digests)
    with ENDING:
        if live.get(number) is room and (status == KVPoll.Failed or status == KVPoll.Success):
            del live[number]
        if status == KVPoll.Failed:
            try:
                room.failure_exception()
            except Exception as e:
                event.update(error=type(e).__name__, message=str(e),
                             is_from_another_rank=getattr(e, "is_from_another_rank", None))
        elif status == KVPoll.Success:
            room.clear()
    emit(**event)


def new_sender(number):
    addr = f"127.0.0.1:{PORT}"
    try:
        return nixl_conn.NixlKVSender(manager, addr, number, [0], PARALLEL.pp_rank)
    except TypeError:  # later releases take no ranks
        return nixl_conn.NixlKVSender(manager, addr, number)


def open_sender(c):
    room = live[c["room"]] = new_sender(c["room"])
    room.init(sum(len(x) for x in c["chunks"]), c.get("aux_index"))
    if DEFERRED and c.get("computed", True):
        room.mark_prefill_complete()


def send(c):
    number, timeout = c["room"], c.get("timeout", PATIENCE)
    room = live[number]
    status = wait(room, KVPoll.WaitingForInput, timeout)
    if status != KVPoll.Failed and status >= KVPoll.WaitingForInput:
        emit(event="bootstrapped", room=number, decode_prefix_len=room.pop_decode_prefix_len())
        status = send_chunks(room, c)
        if status != KVPoll.Failed:
            status = wait(room, KVPoll.Success, timeout)
    report(number, room, status, {})


def send_chunks(room, c):
    """Sends the chunks, unless the room fails before the last; polls it meanwhile, as SGLang does."""
    for i, pages in enumerate(c["chunks"]):
        last = i == len(c["chunks"]) - 1
        room.send(np.array(pages, dtype=np.int32), c.get("state_indices") if last else None, c.get("num_kv_tokens"))
        status = wait(room, KVPoll.Success, c.get("gap_s", 0))
        if status == KVPoll.Failed:
            break
    return status


def receive(c):
    number, addr, timeout = c["room"], c["bootstrap_addr"], c.get("timeout", PATIENCE)
    end = time.time() + timeout
    while not manager.try_ensure_parallel_info(addr):
        if time.time() > end:
            emit(event="done", room=number, status="NoPrefill")
            return
        time.sleep(0.1)
    room = live[number] = nixl_conn.NixlKVReceiver(manager, addr, number)
    room.init(c.get("prefill_dp_rank", 0))
    status = room.poll()
    if status == KVPoll.Failed:
        report(number, room, status, dict(kv_sha256=kv.digest([])))
        return
    pages, slots = c.get("kv_indices", []), c.get("state_indices")
    room.send_metadata(np.array(pages, dtype=np.int32), c.get("aux_index"), slots, c.get("decode_prefix_len"))
    status = wait(room, KVPoll.Success, timeout)
    digests = dict(kv_sha256=kv.digest(pages))
    if c.get("aux_index") is not None:
        digests["aux_sha256"] = aux.digest([c["aux_index"]])
    if slots:
        digests["state_sha256"] = [m.digest(s or []) for m, s in zip(state, slots)]
    report(number, room, status, digests)


def abort(c):
    """Gives a room up, unless it has ended: SGLang's scheduler has let go of it by then, and the
    failure that abort() records would be found by the next use of the number."""
    with ENDING:
        room = live.get(c["room"])
        if room is not None:
            room.abort()
    emit(event="aborted", room=c["room"])


def complete(c):
    live[c["room"]].mark_prefill_complete()
    emit(event="completed", room=c["room"])


def expect(c):
    slot = c.get("aux_index")
    emit(event="expect", kv_sha256=kv.digest(c.get("kv_indices", [])),
         aux_sha256=None if slot is None else aux.digest([slot]),
         state_sha256=[m.digest(s) for m, s in zip(state, c.get("state_indices", []))])


def stray(c):
    slots = c.get("state_indices", [])
    slots = slots + [[]] * (len(state) - len(slots))
    emit(event="stray", bytes=kv.stray(c.get("kv_indices", [])) + aux.stray(c.get("aux_indices", []))
         + sum(m.stray(s or []) for m, s in zip(state, slots)))


def rooms(c):
    emit(event="rooms", request_status={str(k): STATUS[v] for k, v in dict(manager.request_status).items()},
         failures={str(k): v for k, v in manager.failure_records.items()},
         peers=list(getattr(manager, "decode_kv_args_table", {})), asked=asked())


def asked():
    """The rooms whose end of computation a decode waits for, under prefill_complete."""
    deferred = getattr(manager, "deferred_bootstrap", None)
    return [] if deferred is None else [room for room, state in list(deferred.rooms.items()) if state.endpoint]


# Commands that wait have a thread each; what comes before it is done when the next command is read.
WAITING = {"send": send, "receive": receive}
AT_ONCE = {"send": open_sender, "abort": abort, "complete": complete, "expect": expect, "stray": stray, "rooms": rooms}


def guarded(command, c):
    try:
        command(c)
        return True
    except Exception as e:
        traceback.print_exc()
        emit(event="exception", room=c.get("room"), error=type(e).__name__, message=str(e))


emit(event="ready", role=ROLE, agent=manager.agent.name, rank_port=manager.rank_port, local_ip=manager.local_ip,
     version=CONFIG.get("version"))
for line in sys.stdin:
    c = json.loads(line)
    name = c["cmd"]
    if name == "exit":
        break
    if name not in WAITING and name not in AT_ONCE:
        emit(event="exception", room=c.get("room"), error="KeyError", message=f"unknown command {name}")
    elif (name not in AT_ONCE or guarded(AT_ONCE[name], c)) and name in WAITING:
        threading.Thread(target=guarded, args=(WAITING[name], c), daemon=True).start()
emit(event="bye")
os._exit(0)  # SGLang's threads have no end
