#!/usr/bin/env python3
"""Writes golden/<release>.json: messages and notification tags made by SGLang's own code.

    SGLANG_SRC=DIR golden.py 18 19 20 21 22 23

DIR holds one folder a release (18 for 0.5.18), each with the sglang/ package of that
release's wheel. Needs numpy, pyzmq, msgspec, aiohttp and requests; no GPU, no torch, no
NIXL. The managers and receivers are SGLang's real classes made without their
constructors (those open sockets and NIXL agents); the agent and the sockets are replaced
by recorders. What SGLang's own parser reads from a message is stored beside it.
"""
import base64
import json
import logging
import os
import pathlib
import subprocess
import sys
import threading
import types
from collections import defaultdict
from contextlib import nullcontext

from standins import AGENT, PARALLEL, POLICY, Agent, Loader, Queue, Recorder, Stop

HERE = pathlib.Path(__file__).resolve().parent
ROOM = 9223372036854775807


def enc(frames):
    return [base64.b64encode(f).decode() for f in frames]


def plain(v):
    """The value as JSON: arrays become lists, bytes base64."""
    if isinstance(v, bytes):
        return base64.b64encode(v).decode()
    if hasattr(v, "tolist"):
        return v.tolist()
    if isinstance(v, (list, tuple)):
        return [plain(x) for x in v]
    return v


GEOMETRIES = {
    # Plain multi-head attention: K and V of two layers, all in VRAM.
    "mha": dict(ip="10.1.2.3", port=31234, kv=[(0x7f0000000000 + i * 0x100000, 4096, 131072) for i in range(4)],
                aux=[(0x550000001000, 64), (0x550000002000, 512)]),
    # Compressed attention on IPv6 with mixed memory kinds, addresses that use bit 63,
    # regions of unequal length, layer ids, two state components, DCP.
    "mla-state": dict(ip="fd00::17", port=1, gpu=3, tp=4, rank=5, dcp=(2, 1),
                      kv=[(0xffff81ab54e01000, 576, 576 * 90), (0xffff81ab64e01000, 1152, 1152 * 64)],
                      kinds=["DRAM", "VRAM"], layer_ids=[0, 4000000000],
                      aux=[(0xffffffffffff0000, 8)],
                      state=[dict(ptrs=[2 ** 63, 4096], item=[128, 64], data=[128 * 9, 64 * 9], dims=[32, 16], ids=[1, 3]),
                             dict(ptrs=[0], item=[0], data=[0], dims=[], ids=[])]),
    # A rank with state but without KV regions, and a component without tensors.
    "no-kv": dict(ip="127.0.0.1", port=65535, kv=[], aux=[(4096, 64)],
                  state=[dict(ptrs=[], item=[], data=[], dims=[], ids=[])]),
    # Nothing but the aux buffers.
    "aux-only": dict(ip="127.0.0.1", port=5555, kv=[], aux=[(4096, 64)]),
}


class Release:
    def __init__(self, number):
        self.number = number
        root = pathlib.Path(os.environ["SGLANG_SRC"]) / number
        sys.meta_path.insert(0, Loader(root))
        logging.Logger.warning_once = logging.Logger.warning
        logging.Logger.info_once = logging.Logger.info
        import numpy
        import sglang.srt.disaggregation.nixl.conn as conn
        import sglang.srt.disaggregation.common.conn as common
        import sglang.srt.disaggregation.common.staging_handler as staging
        self.np, self.conn, self.common, self.staging = numpy, conn, common, staging
        self.poll = conn.KVPoll

    def kv_args(self, g):
        a = types.SimpleNamespace()
        a.kv_data_ptrs = [p for p, _, _ in g["kv"]]
        a.kv_item_lens = [n for _, n, _ in g["kv"]]
        a.kv_data_lens = [n for _, _, n in g["kv"]]
        a.kv_layer_ids = g.get("layer_ids", [])
        a.kv_data_mem_kinds = self.conn._normalize_kv_mem_kinds(g.get("kinds"), len(g["kv"]))
        a.aux_data_ptrs = [p for p, _ in g["aux"]]
        a.aux_item_lens = [n for _, n in g["aux"]]
        state = g.get("state", [])
        for field, key in (("ptrs", "ptrs"), ("item_lens", "item"), ("data_lens", "data")):
            name = "state_data_ptrs" if field == "ptrs" else "state_" + field
            setattr(a, name, [s[key] for s in state])
        a.state_dim_per_tensor = [s["dims"] for s in state]
        a.state_layer_ids = [s["ids"] for s in state]
        a.state_types = []
        a.gpu_id, a.engine_rank, a.pp_rank, a.page_size = g.get("gpu", 0), g.get("rank", 0), 0, 1
        return a

    def manager(self, g=GEOMETRIES["mha"], agent=None):
        m = object.__new__(self.conn.NixlKVManager)
        m.kv_args = self.kv_args(g)
        m.agent = agent or Agent()
        m.local_ip, m.rank_port = g["ip"], g["port"]
        m.attn_tp_size = g.get("tp", 1)
        m.dcp_size, m.dcp_rank = g.get("dcp", (1, 0))
        m.enable_staging = False
        m.enable_deferred_decode_kv_release = False
        m.defer_decode_allocation, m.deferred_bootstrap = False, None
        m.request_status, m.failure_records = {}, {}
        m.failure_lock = threading.Lock()
        m.transfer_infos, m.decode_kv_args_table, m.req_to_decode_prefix_len = {}, {}, {}
        m.transfer_statuses = defaultdict(getattr(self.conn, "TransferStatus", dict))
        m.required_prefill_response_num_table = {}
        m.addr_to_rooms_tracker = defaultdict(set)
        m.prefill_response_tracker = defaultdict(set)
        m._deferred_abort_generation, m._deferred_abort_ack_tracker = 6, {}
        m._staging_handler = None
        return m

    def receiver(self, m, room=ROOM, dummy=False, required=1):
        r = object.__new__(self.conn.NixlKVReceiver)
        sock = Recorder()
        r.kv_mgr, r.bootstrap_room, r.bootstrap_addr = m, room, "10.9.9.9:8998"
        r.bootstrap_infos = [dict(rank_ip="10.9.9.9", rank_port=1, is_dummy=dummy, pp_rank=0)]
        r.required_dst_info_num, r.init_time, r.abort_notified = required, None, False
        r.conclude_state, r._abort_generation = None, None
        r._connect_to_bootstrap_server = lambda info: (sock, nullcontext())
        return r, sock

    # One message each.

    def registrations(self):
        for name, g in GEOMETRIES.items():
            r, sock = self.receiver(self.manager(g))
            assert r._register_kv_args()
            frames, = sock.take()
            info = self.conn.KVArgsRegisterInfo.from_zmq(frames[1:])
            keep = [f for f in info.__dataclass_fields__ if f.startswith("dst_") or f in (
                "endpoint", "agent_name", "agent_metadata", "gpu_id", "decode_tp_size", "decode_tp_rank",
                "staging_base_ptr", "staging_total_size")]
            keep = [f for f in keep if f != "dst_homogeneous_mem_kind"]
            yield name, frames, {k: plain(getattr(info, k)) for k in keep}

    def rooms(self):
        np = self.np
        i32 = lambda *v: np.array(v, dtype=np.int32)
        cases = {
            "plain": dict(kv=i32(7, 0, 2147483647), aux=3, state=None, prefix=None),
            "no state": dict(kv=i32(1), aux=0, state=[], prefix=0),
            "state": dict(kv=i32(*range(20, 0, -1)), aux=15, prefix=256, required=4,
                          state=[i32(9), None, [4, 5, 6, 0, 2, 8], []]),
            "empty state": dict(kv=i32(5), aux=1, state=[[]], prefix=0),
            "full prefix hit": dict(kv=i32(), aux=2, state=[[11]], prefix=64),
            "dummy": dict(kv=i32(1, 2), aux=2, state=[[11]], prefix=64, dummy=True),
        }
        for name, c in cases.items():
            r, sock = self.receiver(self.manager(), room=12345, dummy=c.get("dummy", False), required=c.get("required", 1))
            r.send_metadata(c["kv"], c["aux"], c["state"], c["prefix"])
            frames, = sock.take()
            yield name, frames, self.room_parsed(frames)
            for cut in (8, 9, 10):
                yield f"{name}, {cut} frames", frames[:cut], self.room_parsed(frames[:cut])

    def room_parsed(self, frames):
        info = self.conn.TransferInfo.from_zmq(frames[1:])
        dummy = info.is_dummy() if callable(info.is_dummy) else info.is_dummy
        return dict(room=info.room, endpoint=info.endpoint, dst_port=info.dst_port, agent_name=info.agent_name,
                    dst_kv_indices=plain(info.dst_kv_indices), dst_aux_index=info.dst_aux_index,
                    required_dst_info_num=info.required_dst_info_num,
                    dst_state_indices=plain(info.dst_state_indices),
                    decode_prefix_len=info.decode_prefix_len, is_dummy=dummy)

    def aborts(self):
        for name, deferred in (("abort", False), ("abort of a room that may be written", True)):
            m = self.manager(GEOMETRIES["mla-state"])
            m.enable_deferred_decode_kv_release = deferred
            r, sock = self.receiver(m)
            r.init_time = 0.0
            r._send_abort_notification()
            frames, = sock.take()
            yield name, frames, dict(room=ROOM, endpoint=m.local_ip, dst_port=m.rank_port,
                                     generation=r._abort_generation)

    def prefill_rank(self, m, tp, pp, cp):
        m.attn_tp_rank, m.pp_size, m.pp_rank, m.attn_cp_size, m.attn_cp_rank = tp, pp[0], pp[1], cp[0], cp[1]

    def acks(self):
        if not hasattr(self.common.CommonKVManager, "_send_abort_ack"):
            return
        m = self.manager()
        self.prefill_rank(m, 3, (2, 1), (4, 2))
        sock = Recorder()
        m._send_multipart_locked = lambda ep, parts, is_ipv6=False: sock.send_multipart(parts)
        m._connect = lambda ep, is_ipv6=False: sock
        m._socket_send_locks = defaultdict(nullcontext)
        if hasattr(self.common, "AckTarget"):
            m._send_abort_ack(ROOM, self.common.AckTarget("fd00::17", 1, 7))
            generation = 7
        else:
            m._send_abort_ack("fd00::17", 1, ROOM)
            generation = None
        frames, = sock.take()
        yield "ack", frames, dict(room=ROOM, prefill_rank=3 * 8 + 1 * 4 + 2, generation=generation)

    def statuses(self):
        if not getattr(self.conn.NixlKVManager, "kv_status_msg_tag", None):
            return
        cases = {"success": (self.poll.Success, None), "failed": (self.poll.Failed, "page 7 außer Reichweite, 失敗"),
                 "waiting": (self.poll.WaitingForInput, None)}
        for name, (status, reason) in cases.items():
            m = self.manager()
            self.prefill_rank(m, 1, (3, 2), (2, 1))
            sock = Recorder()
            m._send_multipart_locked = lambda ep, parts, is_ipv6=False: sock.send_multipart(parts)
            m.send_kv_status_message(targets=[("10.1.2.3", 31234)], bootstrap_room=ROOM, status=status,
                                     failure_reason=reason)
            frames, = sock.take()
            room, st, rank, why = m.parse_kv_status_message(frames)
            yield name, frames, dict(room=room, status=st, prefill_rank=rank, reason=why or "")

    def bootstraps(self):
        if int(self.number) < 22:
            return
        m = self.manager(GEOMETRIES["mla-state"])
        r, sock = self.receiver(m)
        m.prefill_info_table = {r.bootstrap_addr: self.common.PrefillServerInfo(
            1, 1, 1, 1, 1, "auto", True, decode_allocation_policy="prefill_complete")}
        r._setup_bootstrap_infos = lambda: None
        POLICY.disaggregation_decode_allocation_policy = "prefill_complete"
        r.init(0)
        POLICY.disaggregation_decode_allocation_policy = "early"
        frames, = sock.take()
        yield "bootstrap", frames, dict(room=ROOM, endpoint=m.local_ip, dst_port=m.rank_port)

    def stagings(self):
        info = types.SimpleNamespace(is_dummy=False, dst_kv_indices=range(70), endpoint="10.1.2.3", dst_port=31234)
        if self.number < "20":
            info.is_dummy = lambda: False
        sock = Recorder()
        import zmq
        real = zmq.Context
        zmq.Context = lambda *a, **k: types.SimpleNamespace(socket=lambda *_: sock)
        self.staging.__dict__.setdefault("staging_grid_tokens", None)
        import sglang.srt.disaggregation.common.staging_buffer as sb
        sb.staging_grid_tokens = lambda n, page: n
        try:
            self.staging.prefetch_staging_reqs(ROOM, {ROOM: {AGENT: info}}, {"page_size": 1}, 64, set(), {})
        finally:
            zmq.Context = real
        for i, frames in enumerate(sock.take()):
            yield f"STAGING_REQ {i}", frames, dict(to="decode")
        send = getattr(self.staging.DecodeStagingHandler, "_send_watermark", None)
        if send is not None:
            r, sock = self.receiver(self.manager())
            send(r, AGENT, (2, 4096))
            frames, = sock.take()
            yield "WATERMARK", frames, dict(to="prefill")
        if hasattr(self.common.CommonKVManager, "send_chunk_ready"):
            m = self.manager()
            self.prefill_rank(m, 0, (1, 0), (1, 0))
            sock = Recorder()
            m._send_multipart_locked = lambda ep, parts, is_ipv6=False: sock.send_multipart(parts)
            m.send_chunk_ready(room=ROOM, chunk_idx=1, page_start=64, num_pages=6, writer_id=AGENT,
                               targets=[("10.1.2.3", 31234)])
            frames, = sock.take()
            yield "CHUNK_READY", frames, dict(to="decode")

    # Notification tags: the prefill's transfer worker posts through the recording agent,
    # then a decode reads the same tags.

    def worker_tags(self, chunks, dst=None, src=GEOMETRIES["mha"], state_types=(), room=ROOM, dst_kv=range(8)):
        c, np = self.conn, self.np
        m = self.manager(src)
        m.kv_args.state_types = list(state_types)
        m.kv_args.pp_rank, m.kv_args.engine_rank = 1, 2
        m.transfer_source_rank = m.kv_args.pp_rank * PARALLEL.tp_size + m.kv_args.engine_rank
        m.is_mla_backend, m.is_hybrid_mla_backend, m.src_mem_kind = True, False, "VRAM"
        m.state_tp_size, m.pp_size, m._num_slots_src = 1, 1, 32
        m._staging_outstanding, m.exceptions = defaultdict(int), {}
        m._staging_ctx, m.prep_handles = None, {"": object(), AGENT: object()}
        m.decode_kv_args_table[AGENT] = dst or self.peer()
        m.request_status[room] = self.poll.WaitingForInput
        m.transfer_infos[room] = {AGENT: types.SimpleNamespace(
            room=room, endpoint="10.1.2.3", dst_port=31234, agent_name=AGENT, staging=None,
            dst_kv_indices=np.array(dst_kv, dtype=np.int32), dst_aux_index=3, dst_state_indices=[[1]] * len(state_types),
            decode_prefix_len=0, is_dummy=(lambda: False) if self.number < "20" else False)}
        items, at, n = [], 0, 0
        for i, pages in enumerate(chunks):
            last = i == len(chunks) - 1
            items.append(c.TransferKVChunk(
                room=room, prefill_kv_indices=np.arange(pages, dtype=np.int32), index_slice=slice(at, at + pages),
                is_last_chunk=last, chunk_id=n, prefill_aux_index=0 if last else None, num_kv_tokens=8,
                state_indices=[[1]] * len(state_types) if last else None))
            at, n = at + pages, n + (pages > 0)
        try:
            m.transfer_worker(Queue(items))
        except Stop:
            pass
        assert not m.exceptions, m.exceptions
        return m.agent.notifs

    def peer(self, g=GEOMETRIES["mha"], **more):
        r, sock = self.receiver(self.manager(g))
        r._register_kv_args()
        frames, = sock.take()
        info = self.conn.KVArgsRegisterInfo.from_zmq(frames[1:])
        info.dst_homogeneous_mem_kind = "VRAM"
        for k, v in more.items():
            setattr(info, k, v)
        return info

    def staged_tag(self):
        m = self.manager()
        m.transfer_source_rank = 6
        got = []
        m.send_kvcache_staged = lambda *a, **k: got.append(a[-1]) or object()
        strategy = types.SimpleNamespace(check_ready=lambda *a, **k: (True, 1, 0, 0, 0), staging_buffer=None)
        chunk = types.SimpleNamespace(room=ROOM, chunk_id=1, is_last_chunk=True, index_slice=slice(64, 70),
                                      prefill_kv_indices=range(6))
        req = types.SimpleNamespace(room=ROOM, agent_name="decode_0_of_2", staging=None)
        m._do_staging_transfer(strategy, chunk, range(6), req, self.peer(staging_total_size=1), None)
        return got

    def tags(self):
        if not hasattr(self.conn.NixlKVManager, "update_transfer_status"):
            return
        st = self.conn.StateType
        state = dict(GEOMETRIES["mha"], state=[dict(ptrs=[4096], item=[64], data=[640], dims=[], ids=[])] * 2)
        seg = self.conn._KVXferPreparedSegment
        mixed = self.peer(kv_xfer_segments=[seg(0, 2, object(), object(), 32), seg(2, 4, object(), object(), 32)])
        yield "two chunks", self.worker_tags([5, 3])
        yield "empty chunk between, no pages in the last", self.worker_tags([5, 0, 3, 0], room=1)
        yield "full prefix hit", self.worker_tags([0], dst_kv=[])
        yield "mixed memory kinds", self.worker_tags([8], dst=mixed)
        yield "state", self.worker_tags([8], src=state, dst=self.peer(state), state_types=[st.MAMBA, st.DSA])
        yield "staged", self.staged_tag()

    def understood(self, tag):
        """What a decode tracks for one tag."""
        m = self.manager(agent=Agent([tag]))
        seen = {}
        m._track_kv_arrival = lambda room, chunk, last, src: seen.update(room=room, chunk=chunk, last=last, source=src)
        m._track_kv_part_arrival = lambda room, chunk, last, src, i, n: seen.update(
            room=room, chunk=chunk, last=last, source=src, part=i, parts=n)
        m._handle_staging_chunk_arrived = lambda room, idx, start, n, agent: seen.update(
            chunk_idx=idx, page_start=start, pages=n, agent=agent)
        m.update_transfer_status()
        for room, s in m.transfer_statuses.items():
            seen["room"] = room
            if s.received_aux:
                seen["aux"] = True
                for source, expected in s.expected_kvs_per_pp.items():
                    seen.update(source=source, expected=expected)
            for source in s.received_state_per_pp:
                seen.update(state=True, source=source)
        return seen

    def dump(self):
        out = dict(release="0.5." + self.number, messages=[], tags=[])
        for kind in ("registration", "room", "abort", "ack", "status", "bootstrap", "staging"):
            for name, frames, parsed in getattr(self, {"status": "statuses"}.get(kind, kind + "s"))():
                out["messages"].append(dict(kind=kind, name=name, frames=enc(frames), parsed=parsed))
        for name, tags in self.tags():
            out["tags"].append(dict(name=name, tags=[dict(tag=t, parsed=self.understood(t)) for t in tags]))
        return out


def main(numbers):
    if len(numbers) != 1:   # a process a release: their modules share names
        for n in numbers:
            subprocess.run([sys.executable, __file__, n], check=True)
        return
    out = Release(numbers[0]).dump()
    line = lambda v: json.dumps(v, ensure_ascii=False)
    text = ["{" + f'"release": {line(out["release"])},']
    for key in ("messages", "tags"):    # a line each, so that a change shows where it is
        text += [f'"{key}": [', ",\n".join(map(line, out[key])), "]," if key == "messages" else "]}"]
    target = HERE / "golden" / f'{out["release"]}.json'
    target.parent.mkdir(exist_ok=True)
    target.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
