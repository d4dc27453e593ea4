"""A decode worker's bootstrap side, of the release that is loaded: its manager and receiver,
run up to the point where control messages would go to the prefill ranks."""
import copy
import os
import types

import release

MHA, MLA, HYBRID = 0, 1, 2
ALL_CP = "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER"


class Decode:
    def __init__(self, conn):
        self.conn = conn
        self.manager_class = type("Manager", (conn.CommonKVManager,), {})
        self.manager_class.__abstractmethods__ = frozenset()
        self.receiver_class = type("Receiver", (conn.CommonKVReceiver,), {
            "_register_kv_args": lambda receiver: True})
        self.receiver_class.__abstractmethods__ = frozenset()
        self.built = {}

    def _build(self, kind, all_cp):
        """One manager by the release's own constructor for what the constructor decides."""
        key = (kind, all_cp)
        if key not in self.built:
            os.environ["SGLANG_HOST_IP"] = "127.0.0.1"
            os.environ[ALL_CP] = "1" if all_cp else "0"
            args = self.conn.KVArgs()
            for name, value in dict(
                    engine_rank=0, kv_item_lens=[], state_item_lens=[], state_types=[], kv_layer_ids=[],
                    kv_cache_dtype_str="auto", page_size=1, pp_rank=0, system_dp_rank=0, kv_layout=None,
                    mla_compression_ratios=None, is_hybrid_mla_backend=kind == HYBRID).items():
                setattr(args, name, value)
            server_args = types.SimpleNamespace(
                host="127.0.0.1", disaggregation_bootstrap_port=0, dist_init_addr=None, pp_size=1)
            release.reset_parallel()
            release.DISAGG.disaggregation_decode_allocation_policy = "early"
            self.built[key] = self.manager_class(
                args, self.conn.DisaggregationMode.DECODE, server_args, kind == MLA)
        return self.built[key]

    def manager(self, *, tp=1, rank=0, cp=1, pp=1, pp_rank=0, dcp=1, kind=MHA, all_cp=False, page_size=1,
                dtype="auto", kv_layout=None, spec_layout=None, policy="early", state_types=()):
        m = copy.copy(self._build(kind, all_cp))
        m.kv_args = copy.copy(m.kv_args)
        m.attn_tp_size, m.kv_args.engine_rank = tp, rank
        m.attn_cp_size, m.attn_cp_rank = cp, 0
        m.pp_size, m.pp_rank, m.kv_args.pp_rank = pp, pp_rank, pp_rank
        m.dcp_size, m.dcp_rank = dcp, 0
        m.kv_args.page_size, m.kv_cache_dtype_str = page_size, dtype
        m.kv_layout, m.dsv41_spec_layout = kv_layout, spec_layout
        m.kv_args.state_types = [self.conn_state(s) for s in state_types]
        release.DISAGG.disaggregation_decode_allocation_policy = policy
        m.prefill_info_table, m.connection_pool, m.failure_records, m.request_status = {}, {}, {}, {}
        return m

    def conn_state(self, name):
        import sglang.srt.disaggregation.base.conn as base
        return base.StateType(name)

    def receive(self, manager, addr, room=1, dp_rank=0):
        """Opens a receiver at addr; gives (rows it will talk to, failure)."""
        receiver = self.receiver_class(manager, addr, room)
        receiver.init(dp_rank)
        if receiver.conclude_state == self.conn.KVPoll.Failed:
            return None, manager.failure_records.get(room, "failed")
        return receiver, None
