#!/usr/bin/env python3
"""Writes golden.json: which page goes where, by SGLang's own code.

    SGLANG_SRC=DIR golden.py 18 19 20 21 22 23

DIR holds one folder a release (18 for 0.5.18), each with the sglang/ package of that
release's wheel. Needs numpy, pyzmq, msgspec, aiohttp and requests; no GPU, no torch, no
NIXL. The manager is SGLang's real class made without its constructor; a recorder stands for
the NIXL agent and keeps prepared lists, indices and descriptors.

pairs: one row a case, [prefill, decode, outcomes]; of a side's regions it has the item lengths
(two that alternate), layer ids or null, and kinds (one for all, or a list). An outcome is
[releases, parts], or [releases, null] if they refuse; a part is [first prefill region, decode
regions of it and of those that follow]. Strides are each side's item lengths, bytes are the
prefill's.
aux: [prefill item lengths, decode buffers, outcomes]; an outcome lists [buffer, bytes].
cp: [total, offset, pages, size, rank, pages kept, position]; shard: [pages, offset, size,
rank, local pages, positions]; the same in all releases that have the filter.
"""
import itertools
import json
import os
import pathlib
import subprocess
import sys
import types

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "internal/wire/testdata"))

SRC_SLOTS, DST_SLOTS = 6, 5
SRC_PAGES, DST_PAGES = [2, 0, 5], [1, 4, 0]
LAYERS = 6


def base(side, i):
    return (side << 40) + (i << 20)


def pair_cases():
    for attention, pp in itertools.product(("mha", "mla", "hybrid"), (1, 2, 3)):
        for stage, whole in itertools.product(range(pp), (True, False)):
            if pp == 1 and not whole:
                continue
            for ids, extra in itertools.product(("none", "both", "prefill", "decode", "reversed"), (0, 1)):
                yield pair_case(attention, pp, stage, whole, ids, extra)
            for kinds, extra in itertools.product(("DRAM", "mixed"), (0, 1)):
                yield pair_case(attention, pp, stage, whole, "both", extra, kinds=kinds)
                yield pair_case(attention, pp, stage, whole, "none", extra, kinds=kinds)
            for wider in (0, 32, -32):
                yield pair_case(attention, pp, stage, whole, "none", 0, wider=wider)
                yield pair_case(attention, pp, stage, whole, "both", 1, wider=wider)
            yield pair_case(attention, pp, stage, whole, "none", 0, draft=1)
            yield pair_case(attention, pp, stage, whole, "both", 0, draft=1)
        if pp == 1:
            yield pair_case(attention, pp, 0, True, "none", 1, draft=1)
        yield pair_case(attention, pp, 0, True, "missing", 0)
        yield pair_case(attention, pp, 0, False, "none", -1)
    for pp, count, ids in itertools.product((1, 2), (7, 8, 10), ("none", "both")):
        yield pair_case("mla", pp, pp - 1, True, ids, 0, ratios=[0, 4, 128, 4, 128, 0], count=count)


def pair_case(attention, pp, stage, whole, ids, extra, kinds="VRAM", wider=0, draft=0, ratios=None, count=None):
    groups = 2 if attention == "mha" else 1
    each = LAYERS // pp
    first = stage * each

    def side(lo, hi, drafts):
        main = [layer for _ in range(groups) for layer in range(lo, hi)]
        return main + [LAYERS + d for _ in range(groups) for d in range(drafts)]

    src = side(first, first + each, draft)
    dst = side(0 if whole else first, LAYERS if whole else first + each, draft + max(extra, 0))
    if extra < 0:
        dst = dst[:extra]
    if ratios:                                  # count regions at the decode, a stage's share of one pool a layer here
        c4, c128 = ratios.count(4), ratios.count(128)
        one = (2 * c4 + c128) // pp
        src, dst = list(range(one)), list(range(count))
    if ids == "reversed":
        dst = dst[::-1]
    if ids == "missing":
        dst = [layer + 1 for layer in dst]
    src_ids = ids in ("both", "reversed", "missing", "prefill")
    dst_ids = ids in ("both", "reversed", "missing", "decode")
    kind = {"VRAM": lambda j: "VRAM", "DRAM": lambda j: "DRAM", "mixed": lambda j: "VRAM" if j % 3 else "DRAM"}[kinds]
    lens = [64, 128] if src_ids and dst_ids and not ratios else [64, 64]
    prefill = dict(attention=attention, pp=pp, pp_rank=stage, start=first, draft=draft * groups, ratios=ratios,
                   n=len(src), lens=lens, layers=src if src_ids else None, kinds="VRAM")
    kinds = [kind(j) for j in range(len(dst))]
    decode = dict(n=len(dst), lens=[max(lens) + wider] * 2, layers=dst if dst_ids else None,
                  kinds=kinds if len(set(kinds)) > 1 else kinds[0])
    return prefill, decode


def spread(side):
    """One (item length, layer id or -1, kind) a region."""
    n, kinds = side["n"], side["kinds"]
    return [(side["lens"][i % 2], side["layers"][i] if side["layers"] else -1, kinds if isinstance(kinds, str) else kinds[i])
            for i in range(n)]


def aux_cases():
    for n, m in itertools.product(range(1, 5), repeat=2):
        yield [64, 512, 8, 64][:n], m


def cp_cases():
    for total, size in itertools.product((0, 1, 5, 7, 12), (1, 2, 3, 4)):
        for rank, (lo, hi) in itertools.product(range(size), ((0, total), (0, total // 2), (total // 2, total), (total // 3, total))):
            yield total, lo, hi - lo, size, rank


def shard_cases():
    for pages, size in itertools.product(([], [0], [5, 3, 8, 9, 2, 16], list(range(12))), (2, 3, 8)):
        for rank, offset in itertools.product(range(size), (0, 4)):
            yield pages, offset, size, rank


class Recorder:
    """Stands for the agent: a handle is the list of descriptors that it was made from."""

    def get_xfer_descs(self, descs, kind):
        return [(int(d[0]), int(d[1]), int(d[2]), kind) for d in descs]

    def prep_xfer_dlist(self, _peer, descs, kind):
        out = []
        for d in descs:
            d = [x if isinstance(x, str) else int(x) for x in d]
            if len(d) == 5:                     # address, length, device, stride, count
                out += [(d[0] + k * d[3], d[1], d[2], kind) for k in range(d[4])]
            else:
                out.append((d[0], d[1], d[2], kind))
        return out

    def make_prepped_xfer(self, _op, src, src_indices, dst, dst_indices, notif=b""):
        self.posted.append(([src[i] for i in src_indices], [dst[j] for j in dst_indices]))
        return object()

    def initialize_xfer(self, _op, src, dst, _peer, notif=b""):
        self.posted.append((src, dst))
        return object()

    def transfer(self, _handle):
        return "PROC"


class Release:
    def __init__(self, number):
        self.number = int(number)
        from standins import Loader
        import logging
        sys.meta_path.insert(0, Loader(pathlib.Path(os.environ["SGLANG_SRC"]) / number))
        logging.Logger.warning_once = logging.Logger.warning
        logging.Logger.info_once = logging.Logger.info
        import numpy
        import sglang.srt.disaggregation.nixl.conn as conn
        import sglang.srt.disaggregation.utils as utils
        self.np, self.conn, self.utils = numpy, conn, utils

    def manager(self, **kw):
        regions = spread(kw) if kw else []
        m = object.__new__(self.conn.NixlKVManager)
        m.agent = Recorder()
        m.agent.posted = []
        a = m.kv_args = types.SimpleNamespace()
        a.kv_item_lens = [r[0] for r in regions]
        a.kv_data_ptrs = [base(1, i) for i in range(len(regions))]
        a.kv_data_lens = [r[0] * SRC_SLOTS for r in regions]
        a.kv_layer_ids = [r[1] for r in regions if r[1] >= 0]
        a.kv_data_mem_kinds = [r[2] for r in regions]
        a.gpu_id, a.page_size, a.num_draft_entries = 1, 1, kw.get("draft", 0)
        a.prefill_start_layer, a.prefill_end_layer = kw.get("start", 0), None
        a.mla_compression_ratios = kw.get("ratios")
        m.src_mem_kind = "VRAM"
        m.is_mla_backend = kw.get("attention") == "mla"
        m.is_hybrid_mla_backend = kw.get("attention") == "hybrid"
        m.attn_tp_size, m.pp_size, m.dcp_size, m.dcp_rank = 1, kw.get("pp", 1), 1, 0
        m.prep_handles, m.prep_handles_segment_src = {}, {}
        m._num_slots_src = SRC_SLOTS
        m.decode_kv_args_table = {}
        return m

    def pairs(self, prefill, decode):
        m = self.manager(**prefill)
        regions = spread(decode)
        info = types.SimpleNamespace(
            agent_name="peer", requires_dcp_relayout=False, decode_tp_size=1, decode_tp_rank=0, gpu_id=3,
            dst_kv_ptrs=[base(2, j) for j in range(len(regions))], dst_kv_item_lens=[r[0] for r in regions],
            dst_kv_layer_ids=[r[1] for r in regions if r[1] >= 0], dst_kv_mem_kinds=[r[2] for r in regions],
            dst_num_slots=DST_SLOTS, dst_homogeneous_mem_kind=None, kv_xfer_segments=None)
        m.decode_kv_args_table["peer"] = info
        src, dst = (self.np.array(p, dtype=self.np.int32) for p in (SRC_PAGES, DST_PAGES))
        try:
            m._prepare_payload_xfer(info)
        except Exception:                       # it ends the release's bootstrap thread
            return None
        notif = ("room_kv_0_1_0",) if self.number < 23 else ()
        if info.kv_xfer_segments is None:
            m.send_kvcache("peer", src, info.dst_kv_ptrs, dst, info.gpu_id, *notif,
                           dst_mem_kind=info.dst_homogeneous_mem_kind)
        else:
            m.send_kvcache_mixed("peer", src, dst, *notif)
        return [self.part(s, d, spread(prefill), regions) for s, d in m.agent.posted]

    def part(self, src, dst, prefill, decode):
        """Reads the pairs back from the addresses, and checks every page of every pair."""
        first, at, n = None, [], len(SRC_PAGES)
        assert len(src) == len(dst) and len(src) % n == 0
        for k in range(0, len(src), n):
            s, d = src[k:k + n], dst[k:k + n]
            i, j = (s[1][0] - base(1, 0)) >> 20, (d[2][0] - base(2, 0)) >> 20       # page 0 on either side
            first = i if first is None else first
            assert i == first + len(at)
            at.append(j)
            size, (stride, _, kind) = prefill[i][0], decode[j]
            for page in range(n):
                assert s[page] == (base(1, i) + size * SRC_PAGES[page], size, 1, "VRAM")
                assert d[page] == (base(2, j) + stride * DST_PAGES[page], size, 3 if kind == "VRAM" else 0, kind)
        return [first, at]

    def aux(self, lens, n):
        m = self.manager()
        m.kv_args.aux_data_ptrs, m.kv_args.aux_item_lens = [base(1, i) for i in range(len(lens))], lens
        notif = ("room_aux",) if self.number < 23 else ()
        try:
            m.send_aux("peer", 3, [base(2, j) for j in range(n)], 5, *notif)
        except Exception:
            return None
        (src, dst), = m.agent.posted
        out = []
        for s, d in zip(src, dst):
            i, n = (s[0] - base(1, 0)) >> 20, s[1]
            assert s == (base(1, i) + 3 * n, n, 0, "DRAM") and d == (base(2, i) + 5 * n, n, 0, "DRAM")
            out.append([i, n])
        return out

    def cp(self, total, offset, n, size, rank):
        pages = self.np.arange(100 + offset, 100 + offset + n, dtype=self.np.int32)
        kept, at = self.utils.filter_kv_indices_for_cp_rank(
            types.SimpleNamespace(attn_cp_size=size, attn_cp_rank=rank), pages, slice(offset, offset + n), total_pages=total)
        assert at.stop - at.start == len(kept)
        assert all(int(k) == 100 + at.start + x for x, k in enumerate(kept))
        return [len(kept), at.start]

    def shard(self, pages, offset, size, rank):
        kept, at = self.utils.filter_kv_indices_for_shard_rank(
            kv_indices=self.np.array(pages, dtype=self.np.int32), index_slice=slice(offset, offset + len(pages)),
            shard_rank=rank, shard_size=size)
        return [kept.tolist(), at.tolist()]

    def results(self):
        return dict(pairs=[self.pairs(*c) for c in pair_cases()], aux=[self.aux(*c) for c in aux_cases()],
                    cp=[self.cp(*c) for c in cp_cases()],
                    shard=[self.shard(*c) for c in shard_cases()] if self.number >= 23 else None)


def outcomes(by_release, k):
    """Joins the releases that agree."""
    out = []
    for number, results in by_release.items():
        for o in out:
            if o[1] == results[k]:
                o[0].append(number)
                break
        else:
            out.append([[number], results[k]])
    return out


def main(releases):
    every = {}
    for r in releases:
        run = subprocess.run([sys.executable, __file__, "--one", r], check=True, stdout=subprocess.PIPE)
        every[int(r)] = json.loads(run.stdout)
    pairs, aux, cp = ({r: v[key] for r, v in every.items()} for key in ("pairs", "aux", "cp"))
    shard = {r: v["shard"] for r, v in every.items() if v["shard"] is not None}
    assert all(v == next(iter(t.values())) for t in (cp, shard) for v in t.values())
    rows = dict(
        pairs=unique([p, d, outcomes(pairs, k)] for k, (p, d) in enumerate(pair_cases())),
        aux=[[*c, outcomes(aux, k)] for k, c in enumerate(aux_cases())],
        cp=unique([*c, *next(iter(cp.values()))[k]] for k, c in enumerate(cp_cases())),
        shard=[[*c, *next(iter(shard.values()))[k]] for k, c in enumerate(shard_cases())])
    with open(HERE / "golden.json", "w") as f:
        f.write("{" + ",\n".join(f'"{key}": [\n' + ",\n".join(json.dumps(r, separators=(",", ":")) for r in v) + "\n]"
                                 for key, v in rows.items()) + "}\n")


def unique(rows):
    seen = {}
    for r in rows:
        seen.setdefault(json.dumps(r), r)
    return list(seen.values())


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        json.dump(Release(sys.argv[2]).results(), out)
        out.close()
    else:
        main(sys.argv[1:])
