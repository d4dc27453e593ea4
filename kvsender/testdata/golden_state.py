#!/usr/bin/env python3
"""Writes golden_state.json: which bytes of state go where, by SGLang's own code.

    SGLANG_SRC=DIR golden_state.py 18 19 20 21 22 23

DIR and what else it needs are as for golden.py. A row is [prefill, decode, prefill's slots,
decode's slots, outcomes] of one component; an outcome is [releases, pieces], or [releases,
null] if they refuse or name memory that nobody registered. A piece is [prefill tensor, byte,
decode tensor, byte, bytes]; pieces are in the prefill's order, and neighbours on both sides
are one. "23p" is 0.5.23 with its prepared transfers, as on a GPU, "23" without.

A side has type, tensors, tp, rank and, where they matter, pp, pp_rank, start, end, mla,
ratios, draft, heads, page, layout. A tensor is [item length, slots, layer id or -1, dim, outer
rows, convolution groups], without what is as usual (8, -1, 0, 1, null) at the end; item length
0: it is not there.
"""
import itertools
import json
import os
import subprocess
import sys

from golden import HERE, Recorder, Release as Base, base, outcomes, unique

GPU = (1, 3)


def tensor(item, slots=8, layer=-1, dim=0, outer=1, groups=None):
    return [item, slots, layer, dim, outer, groups]


def side(kind, tensors, tp=1, rank=0, **kw):
    return dict(type=kind, tensors=tensors, tp=tp, rank=rank, **kw)


def meetings(p, d):
    """Pairs of ranks that meet."""
    for a, b in itertools.product(range(p), range(d)):
        if (a * d // p == b) if p >= d else (b * p // d == a):
            yield a, b


SIZES = [(1, 1), (2, 2), (2, 1), (1, 2), (4, 2), (2, 4), (4, 1), (1, 4)]


def mamba_tensors(tp, ids=False, shapes=(0, 1, 2, 3)):
    """GDN's convolution of query, key and value, a state, Kimi's rows before the axis, and a lone group that does not add up."""
    whole = [(64, 1, [16, 16, 32], 6), (16, 1, None, 32), (48, 3, [8, 8, 32], 2), (32, 2, [8, 8], 4)]
    return [tensor(d // tp * outer * unit, 8, 3 + k % 2 if ids else -1, d // tp, outer, groups)
            for k, (d, outer, groups, unit) in enumerate(whole) if k in shapes]


def mamba_cases():
    for p, d in SIZES:
        for a, b in meetings(p, d):
            yield side("mamba", mamba_tensors(p), p, a), side("mamba", mamba_tensors(d), d, b), [3], [5]
    for p, d in ((2, 1), (1, 2)):
        for a, b in meetings(p, d):
            src, dst = mamba_tensors(p, True), mamba_tensors(d, True)
            yield side("mamba", src, p, a), side("mamba", [dst[i] for i in (1, 3, 0, 2)], d, b), [0], [7]
            yield side("mamba", src[:2], p, a), side("mamba", dst, d, b), [0], [7]
            yield side("mamba", [t[:3] + [0, 1, None] for t in dst], p, a), side("mamba", dst, d, b), [1], [2]       # only the decode's are sharded
            yield side("mamba", [t[:3] + [0, 1, None] for t in dst], p, a), side("mamba", [t[:3] + [0, 1, None] for t in dst], d, b), [1], [2]
            yield side("mamba", src[:1] + [tensor(96, dim=0)], p, a), side("mamba", dst[:1] + [tensor(96, dim=0)], d, b), [1], [2]
            for k, absent in itertools.product((0, 1), (0, 2)):
                gone = [list(src), list(dst)]
                gone[k][absent] = [0] + gone[k][absent][1:]
                yield side("mamba", gone[0], p, a), side("mamba", gone[1], d, b), [1], [2]
    yield side("mamba", mamba_tensors(2, shapes=(1,)), 2, 1), side("mamba", mamba_tensors(1, shapes=(1,)), 1, 0), [1, 2], [2, 3]
    yield side("mamba", mamba_tensors(1)), side("mamba", mamba_tensors(1)), [1], [2, 3]
    yield side("mamba", mamba_tensors(1)), side("mamba", mamba_tensors(1)[:3]), [1], [2]
    yield side("mamba", mamba_tensors(1)), side("mamba", mamba_tensors(1) + [tensor(64)]), [1], [2]
    yield side("mamba", mamba_tensors(1)), side("mamba", [tensor(t[0] + 32) for t in mamba_tensors(1)]), [1], [2]
    for whole, ids, mine in itertools.product((True, False), ("both", "none", "prefill", "decode"), (True, False)):
        stage = [tensor(64, layer=k % 2 + 3 if ids in ("both", "prefill") else -1) for k in range(4)]
        every = [tensor(64, layer=k % (4 if whole else 2) + (1 if whole else 3) if ids in ("both", "decode") else -1) for k in range(8 if whole else 4)]
        yield side("mamba", stage if mine else [], pp=2, pp_rank=1, start=3, end=6), side("mamba", every), [4], [1]


def slot_cases():
    """Whole slots."""
    src, dst = [4, 5, 6, 1, 0], [2, 3, 7, 0, 1]
    plain = {"swa": 4, "block_scale": 4, "block_scale_swa": 2, "minimax_index_k": 3, "minimax_dense_kv": 4, "qsa_pending": 3,
             "qsa_compressed": 3, "request_row": 2, "dsa": 3, "swa_ring": 2, "c128_state": 2}
    for (kind, n), mla, (p, d) in itertools.product(plain.items(), (False, True), ((1, 1), (2, 2), (2, 1), (1, 2))):
        if kind == "swa" and p != d and not mla:
            continue
        for a, b in meetings(p, d):
            tensors = [tensor(64 + 32 * (k % 2) * (kind in ("dsa", "qsa_pending", "qsa_compressed", "minimax_index_k"))) for k in range(n)]
            yield side(kind, tensors, p, a, mla=mla), side(kind, tensors, d, b), src, dst
        if p == d == 1:
            sides = side(kind, tensors, mla=mla), side(kind, tensors)
            yield *sides, src, dst[1:]
            yield *sides, [], []
            yield *sides, [], dst
            yield *sides, src, []
            for more in (-1, 1, 2, n):
                yield side(kind, tensors, mla=mla), side(kind, (tensors * 2)[:n + more]), src, dst
            yield side(kind, tensors, mla=mla), side(kind, [tensor(t[0] + 32) for t in tensors]), src, dst
            yield side(kind, tensors, mla=mla), side(kind, [tensor(t[0] - 32) for t in tensors]), src, dst
            for k, at in itertools.product((0, 1), (0, n - 1)):
                gone = [list(tensors), list(tensors)]
                gone[k][at] = tensor(0)
                yield side(kind, gone[0], mla=mla), side(kind, gone[1]), src, dst
            ids = [t[:2] + [3 + k // 2] + t[3:] for k, t in enumerate(tensors)]
            for s, e in ((ids, ids[::-1]), (ids, tensors), (tensors, ids), (ids[:1], ids), (ids, ids[:1])):
                yield side(kind, s, mla=mla), side(kind, e), src, dst
        if p == d == 1:
            for pp_rank, whole in itertools.product((0, 1), (True, False)):
                stage = [tensor(64) for _ in range(n)]
                each = n // (2 if kind in ("swa", "block_scale", "block_scale_swa") and not mla else 1)
                yield (side(kind, stage, mla=mla, pp=2, pp_rank=pp_rank, start=each * pp_rank, end=each * (pp_rank + 1)),
                       side(kind, stage * 2 if whole else stage), src, dst)
    # K and V of different length, an odd number of tensors
    yield side("swa", [tensor(64)] * 2 + [tensor(32)] * 2), side("swa", [tensor(64)] * 2 + [tensor(32)] * 2), src, dst
    yield side("swa", [tensor(64)]), side("swa", [tensor(64)]), src, dst
    yield side("swa", [tensor(64)] * 3), side("swa", [tensor(64)] * 3), src, dst
    # a draft of the prefill's in its last stage, and in another
    for pp_rank in (0, 1):
        yield (side("dsa", [tensor(64)] * 3, mla=True, pp=2, pp_rank=pp_rank, start=2 * pp_rank, end=2 * pp_rank + 2, draft=1),
               side("dsa", [tensor(64)] * 5), src, dst)


def head_cases():
    for (p, d), total in itertools.product(((2, 1), (1, 2), (4, 2), (2, 4), (4, 1), (1, 4), (8, 2), (2, 8)), (1, 2, 4, 8)):
        for a, b in meetings(p, d):
            if p * d >= 8 and (a + b) % 3:
                continue
            s, e = max(1, total // p), max(1, total // d)
            src, dst = ([tensor(h * 3 * k) for k in (16, 8)] for h in (s, e))
            yield side("swa", src, p, a, heads=total, page=3, layout="nhd"), side("swa", dst, d, b), [4, 5], [1, 7]
    src, dst = [tensor(64)] * 4, [tensor(128)] * 4
    for layout in ("hnd", "vectorized_5d", None):
        yield side("swa", src, 2, 1, heads=4, page=4, layout=layout), side("swa", dst), [1], [2]
    yield side("swa", src, 2, 1, pp=2, pp_rank=0, heads=4, page=4, layout="nhd"), side("swa", dst), [1], [2]
    yield side("swa", src, 2, 1, heads=4, page=4, layout="nhd"), side("swa", [tensor(96)] * 4), [1], [2]
    yield side("swa", src, 2, 1, heads=4, page=5, layout="nhd"), side("swa", dst), [1], [2]
    yield side("swa", src, 2, 1, heads=4, page=4, layout="nhd"), side("swa", dst), [1, 3], [2]
    yield side("swa", src, 2, 1, heads=4, page=4, layout="nhd"), side("swa", dst[:3]), [1], [2]
    yield side("swa", src[:1], 2, 1, heads=4, page=4, layout="nhd"), side("swa", dst[:1]), [1], [2]
    for more in (2, 4, 8):
        yield side("swa", src, 2, 1, heads=4, page=4, layout="nhd"), side("swa", dst + [tensor(128)] * more), [1], [2]


RATIOS = [0, 4, 128, 4, 0, 128, 4, 128]


def compressed_cases():
    def tensors(kind, lo, hi, swa):
        n4, n128, n = RATIOS[lo:hi].count(4), RATIOS[lo:hi].count(128), min(hi, swa) - min(lo, swa)
        return {"swa": [tensor(96)] * n + [tensor(160)] * n4 + [tensor(64)] * n4, "swa_ring": [tensor(80)] * n, "c128_state": [tensor(48)] * n128}[kind]

    for kind, (lo, hi), swa, whole in itertools.product(("swa", "swa_ring", "c128_state"), ((0, 8), (0, 3), (3, 8), (2, 4), (0, 4), (4, 8)), (8, 7), (True, False)):
        kw = dict(mla=True, pp=1 if hi - lo == 8 else 2, pp_rank=1 if hi == 8 and lo else 0, start=lo, end=hi, ratios=RATIOS)
        yield side(kind, tensors(kind, lo, hi, swa), **kw), side(kind, tensors(kind, 0 if whole else lo, 8 if whole else hi, swa)), [4, 5, 1], [2, 3, 7]
    kw = dict(mla=True, pp=1, start=0, end=8, ratios=RATIOS)
    yield side("swa_ring", [tensor(80)] * 8, **kw), side("swa_ring", [tensor(80)] * 16), [1], [2]
    yield side("swa", [tensor(80)] * 4, **kw), side("swa", [tensor(80)] * 5), [1], [2]
    yield side("dsa", [tensor(80)] * 2, **kw), side("dsa", [tensor(80)] * 9), [1], [2]
    for kind in ("swa", "swa_ring", "c128_state"):
        yield side(kind, tensors(kind, 0, 3, 8), **dict(kw, pp=2, end=None)), side(kind, tensors(kind, 0, 8, 8)), [1], [2]


def tail_cases():
    rings = [([3, 8, 2, 0, 3, 10], [5, 9, 1, 0, 4, 10]), ([3, 0, 5, 0, 0, 10], [5, 8, 2, 0, 3, 10]), ([0, 0, 0, 0, 0, 10], [1, 0, 0, 0, 0, 10]),
             ([3, 8, 2, 0, 3, 10], [5, 9, 1, 0, 3, 10]), ([3, 8, 3, 0, 3, 10], [5, 9, 1, 0, 4, 10]), ([3, 8, 2, 0, 3], [5, 9, 1, 0, 4, 10]),
             ([3, 8, 2, 0, 3, 9], [5, 9, 1, 0, 4, 10]), ([], []), ([3, 8, 2, 0, 3, 10], []), ([], [3, 8, 2, 0, 3, 10]), ([3, -1, 2, 0, 3, 10], [5, 9, 1, 0, 4, 10])]
    for src, dst in rings:
        yield side("dsa_tail", [tensor(160), tensor(80)], mla=True), side("dsa_tail", [tensor(160), tensor(80)]), src, dst
    other = [([3, 8, 2, 0, 3, 10], [5, 2, 5, 0, 0, 7]), ([3, 2, 6, 0, 0, 10], [5, 4, 3, 0, 3, 7])]
    for (src, dst), (p, d) in itertools.product(other, ((1, 1), (2, 1), (1, 2))):
        for a, b in meetings(p, d):
            yield side("dsa_tail", [tensor(160), tensor(80)], p, a, mla=True), side("dsa_tail", [tensor(112), tensor(56)], d, b), src, dst
    yield side("dsa_tail", [tensor(160), tensor(80)]), side("dsa_tail", [tensor(112), tensor(63)]), *other[0]
    yield side("dsa_tail", [tensor(160), tensor(0)]), side("dsa_tail", [tensor(112), tensor(0)]), *other[0]
    yield side("dsa_tail", [tensor(160), tensor(80)]), side("dsa_tail", [tensor(112), tensor(0)]), *other[0]
    for pp_rank, whole in itertools.product((0, 1), (True, False)):
        yield (side("dsa_tail", [tensor(160), tensor(80)] * 2, mla=True, pp=2, pp_rank=pp_rank, start=2 * pp_rank, end=2 * pp_rank + 2),
               side("dsa_tail", [tensor(160), tensor(80)] * (4 if whole else 2)), *rings[0])
    yield side("dsa_tail", [tensor(160)] * 4, mla=True, pp=2, pp_rank=1, start=2, end=4), side("dsa_tail", [tensor(160)] * 6), *rings[0]
    yield side("dsa_tail", [tensor(160)] * 3, mla=True), side("dsa_tail", [tensor(160)] * 6), *rings[0]


def cases():
    yield from mamba_cases()
    yield from slot_cases()
    yield from head_cases()
    yield from compressed_cases()
    yield from tail_cases()


def lists(s, which):
    """Pointers, item lengths, lengths, layer ids, dims, outer rows and groups of a side's tensors."""
    t = s["tensors"]
    gone = [x[0] == 0 for x in t]
    ids = [x[2] for x in t] if t and t[0][2] >= 0 else []
    dims = [x[3] for x in t] if any(x[3] for x in t) else []
    return ([0 if g else base(which, i) for i, g in enumerate(gone)], [0 if g else x[0] for x, g in zip(t, gone)],
            [0 if g else x[0] * x[1] for x, g in zip(t, gone)], ids, dims, [x[4] for x in t] if dims else [], [x[5] for x in t] if dims else [])


class Release(Base):
    def state(self, src, dst, from_slots, to_slots, prepared):
        try:
            return self.pieces(src, dst, from_slots, to_slots, prepared)
        except Exception:                       # the room fails
            return None

    def pieces(self, src, dst, from_slots, to_slots, prepared):
        kind = self.conn.StateType(src["type"])
        m = self.manager()
        a = m.kv_args
        ptrs, lens, data, ids, dims, outer, groups = lists(src, 1)
        a.state_types, a.state_data_ptrs, a.state_item_lens, a.state_data_lens = [kind], [ptrs], [lens], [data]
        a.state_layer_ids, a.state_dim_per_tensor, a.state_slice_outer_counts, a.state_conv_shard_groups = [ids], [dims], [outer], [groups]
        a.engine_rank, a.page_size, a.kv_head_num, a.total_kv_head_num = src["rank"], src.get("page", 1), 0, src.get("heads", 0)
        a.prefill_start_layer, a.prefill_end_layer = src.get("start", 0), src.get("end")
        a.mla_compression_ratios, a.num_draft_entries, a.swa_kv_cache_layout = src.get("ratios"), src.get("draft", 0), src.get("layout")
        m.attn_tp_size = m.state_tp_size = src["tp"]
        m.pp_size, m.is_mla_backend, m.attn_cp_size = src.get("pp", 1), src.get("mla", False), 1
        m._prepared_state_plans, m._state_layout_rejections, m._use_strided_descs = {}, {}, True
        ptrs, lens, data, ids, dims, _, _ = lists(dst, 2)
        if prepared:
            on_gpu = m.pp_size == 1 and kind in self.conn._PREPARED_STATE_TYPES
            m._prepared_state_components = frozenset([0] if on_gpu else [])
            m._prepare_state_xfer(self.peer(dst, ptrs, lens, data, ids))
        notif = ("room_state_0",) if self.number < 23 else ()
        list(m.maybe_send_extra("peer", [from_slots], [ptrs], [to_slots], GPU[1], *notif, dst["tp"], decode_tp_rank=dst["rank"],
                                dst_state_item_lens=[lens], dst_state_dim_per_tensor=[dims], dst_state_layer_ids=[ids]))
        pieces = []
        for s, d in m.agent.posted:
            assert len(s) == len(d)
            for x, y in zip(s, d):
                assert x[1] == y[1] > 0 and x[2:] == (GPU[0], "VRAM") and y[2:] == (GPU[1], "VRAM")
                pieces.append(self.place(x, src, 1) + self.place(y, dst, 2) + [x[1]])
        return merge(pieces)

    def peer(self, dst, ptrs, lens, data, ids):
        import types
        return types.SimpleNamespace(agent_name="peer", dst_dcp_size=1, requires_dcp_relayout=False, dst_state_data_lens=[data], gpu_id=GPU[1],
                                     decode_tp_size=dst["tp"], dst_state_data_ptrs=[ptrs], dst_state_item_lens=[lens], dst_state_layer_ids=[ids])

    def place(self, desc, s, which):
        i, at = divmod(desc[0] - base(which, 0), 1 << 20)
        item, slots = s["tensors"][i][:2]
        if i < 0 or item == 0 or at + desc[1] > item * slots:
            raise ValueError("memory that nobody registered")
        return [i, at]

    def results(self):
        return [[self.state(*c, False) for c in cases()], [self.state(*c, True) for c in cases()] if self.number >= 23 else None]


def merge(pieces):
    out = []
    for p in sorted(pieces):
        if out and out[-1][0] == p[0] and out[-1][2] == p[2] and out[-1][1] + out[-1][4] == p[1] and out[-1][3] + out[-1][4] == p[3]:
            out[-1][4] += p[4]
        else:
            out.append(p)
    return out


def brief(s):
    usual = tensor(0)
    def cut(t):
        while len(t) > 1 and t[-1] == usual[len(t) - 1]:
            t = t[:-1]
        return t
    return {k: [cut(t) for t in v] if k == "tensors" else v for k, v in s.items() if v is not None and v is not False}


def main(releases):
    every = {}
    for r in releases:
        run = subprocess.run([sys.executable, __file__, "--one", r], check=True, stdout=subprocess.PIPE)
        every[r], prepared = json.loads(run.stdout)
        if prepared:
            every[r + "p"] = prepared
    rows = unique([brief(p), brief(d), *slots, outcomes(every, k)] for k, (p, d, *slots) in enumerate(cases()))
    with open(HERE / "golden_state.json", "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(r, separators=(",", ":")) for r in rows) + "\n]\n")


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        json.dump(Release(sys.argv[2]).results(), out)
        out.close()
    else:
        main(sys.argv[1:])
