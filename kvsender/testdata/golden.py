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
heads: [case, outcomes]; an outcome is [decode region of each prefill region, bytes from the start
of a token at the prefill, at the decode, bytes], the same for every token of every page.
dcp: [case, outcomes]; an outcome is [parts, notifications], a part [first region, regions, runs of
tokens], a run [prefill token, decode token, tokens]; the notifications of 0.5.23 are null.
stages: [ratios, first layer, end layer, draft, decode region of each prefill region], compressed
MLA, the same in all releases that know one pool from two.
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


def head_cases():
    sizes = [(h, p, d) for h in (1, 2, 4, 8) for p in (1, 2, 4, 8) for d in (1, 2, 4, 8)]
    for heads, p, d in sizes + [(6, 3, 1), (6, 1, 3), (6, 3, 6), (6, 2, 6), (12, 6, 2), (12, 2, 6)]:
        for r in range(max(p, d)) if p != d else ():
            yield head_case(heads, p, r * p // max(p, d), d, r * d // max(p, d))
    for pp, draft, page in itertools.product((1, 2), (0, 1, 2), (1, 2, 16)):
        for stage in range(pp):
            yield head_case(4, 1, 0, 2, 1, page, pp, stage, draft)
            yield head_case(4, 2, 1, 1, 0, page, pp, stage, draft)


def head_case(heads, p, p_rank, d, d_rank, page=2, pp=1, stage=0, draft=0, head=4):
    """draft layers are the decode's alone."""
    return dict(heads=heads, p=p, p_rank=p_rank, d=d, d_rank=d_rank, page=page, pp=pp, stage=stage, draft=draft, head=head)


def dcp_cases():
    for page, n in itertools.product((1, 4), (2, 3)):
        for rank, (offset, src, tokens) in itertools.product(range(n), (
                (0, [7, 3, 4, 5], 4 * page), (0, [7, 8, 2], 3 * page - 1), (2, [5, 6], 2 * page), (3, [9], 1), (1, [4], page), (0, [2, 3], 1))):
            for prefix, draft in itertools.product((0, page * n), (0, 1)):
                for scale in (1, n) if draft else (1,):
                    yield dict(page=page, n=n, rank=rank, prefix=prefix, offset=offset, src=src, dst=[8, 9, 1], tokens=tokens,
                               regions=3, draft=draft, scale=scale)
    good = dict(page=4, n=2, rank=1, prefix=0, offset=0, src=[7, 3, 4], dst=[8, 9], tokens=12, regions=2, draft=0, scale=1)
    for change in (dict(prefix=4), dict(dst=[8]), dict(dst=[]), dict(tokens=13), dict(tokens=0), dict(scale=2)):
        yield {**good, **change}


def stage_cases():
    for ratios in ([0, 4, 128, 4, 128, 0], [4, 4, 128], [128, 128], [0, 4]):
        for first, end, draft in itertools.product(range(len(ratios)), range(1, len(ratios) + 1), (0,)):
            if first < end:
                yield ratios, first, end, draft


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
        self.notifs.append(notif.decode())
        return object()

    def initialize_xfer(self, _op, src, dst, _peer, notif=b""):
        self.posted.append((src, dst))
        self.notifs.append(notif.decode())
        return object()

    def send_notif(self, _peer, notif):
        self.notifs.append(notif.decode())

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
        m.agent.posted, m.agent.notifs = [], []
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
        m.prep_handle_slice_src, m.prep_handles_slice_dst = None, {}
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

    def heads(self, c):
        layers, tokens = 4, c["page"]
        each = layers // c["pp"]
        src_heads, dst_heads = max(1, c["heads"] // c["p"]), max(1, c["heads"] // c["d"])
        src_len, dst_len = (h * c["head"] * tokens for h in (src_heads, dst_heads))
        m = self.manager(n=2 * each, lens=[src_len] * 2, layers=None, kinds="VRAM", attention="mha", pp=c["pp"], start=c["stage"] * each)
        m.attn_tp_size, m.kv_args.engine_rank, m.kv_args.page_size = c["p"], c["p_rank"], tokens
        m.kv_args.total_kv_head_num, m.kv_args.kv_head_num = c["heads"], src_heads
        n = 2 * (layers + c["draft"])
        info = types.SimpleNamespace(
            agent_name="peer", requires_dcp_relayout=False, decode_tp_size=c["d"], decode_tp_rank=c["d_rank"], gpu_id=3,
            dst_kv_ptrs=[base(2, j) for j in range(n)], dst_kv_item_lens=[dst_len] * n, dst_kv_item_len=dst_len, dst_kv_layer_ids=[],
            dst_kv_mem_kinds=["VRAM"] * n, dst_num_slots=DST_SLOTS, dst_homogeneous_mem_kind=None, kv_xfer_segments=None)
        m.decode_kv_args_table["peer"] = info
        src, dst = (self.np.array(p, dtype=self.np.int32) for p in (SRC_PAGES, DST_PAGES))
        try:
            m._prepare_payload_xfer(info)
            m.send_kvcache_slice("peer", src, dst, *self.notif())
        except Exception:
            return None
        (src, dst), = m.agent.posted
        rows = len(SRC_PAGES) * tokens
        assert len(src) == len(dst) == 2 * each * rows
        at, offsets = [], set()
        for i in range(2 * each):
            j = (dst[i * rows][0] - base(2, 0)) >> 20
            at.append(j)
            for k in range(rows):
                s, d = src[i * rows + k], dst[i * rows + k]
                page, token = divmod(k, tokens)
                assert s[1] == d[1] and s[2:] == (1, "VRAM") and d[2:] == (3, "VRAM")
                offsets.add((s[0] - base(1, i) - SRC_PAGES[page] * src_len - token * src_len // tokens,
                             d[0] - base(2, j) - DST_PAGES[page] * dst_len - token * dst_len // tokens, s[1]))
        (offset,) = offsets
        return [at, *offset]

    def notif(self):
        return ("7_kv_0_1_0",) if self.number < 23 else ()

    def dcp(self, c):
        token, page, draft = 8, c["page"], c["draft"]
        n = c["regions"]
        m = self.manager(n=n, lens=[token * page] * 2, layers=None, kinds="VRAM", attention="mla", draft=draft)
        m.kv_args.page_size = page
        info = types.SimpleNamespace(
            agent_name="peer", requires_dcp_relayout=True, dst_dcp_size=c["n"], dst_dcp_rank=c["rank"], gpu_id=3,
            dst_kv_ptrs=[base(2, j) for j in range(n)],
            dst_kv_item_lens=[token * page * (c["scale"] if j >= n - max(draft, 1) else 1) for j in range(n)],
            dst_kv_layer_ids=[], dst_kv_mem_kinds=["VRAM"] * n, dst_homogeneous_mem_kind=None)
        m.decode_kv_args_table["peer"] = info
        src, dst = (self.np.array(c[k], dtype=self.np.int32) for k in ("src", "dst"))
        where = dict(src_page_offset=c["offset"], decode_prefix_len=c["prefix"], num_kv_tokens=c["tokens"])
        try:
            m._prepare_payload_xfer(info)
            if self.number < 19:
                m.send_kvcache_dcp("peer", src, info, dst, **where, notif=self.notif()[0])
            else:
                plan = self.conn.build_dcp_token_transfer_plan(
                    src, dst, physical_page_size=page, dcp_size=c["n"], dcp_rank=c["rank"], **where)
                m.send_kvcache_dcp("peer", info, plan, *self.notif(), None)
        except Exception:
            return None
        parts = []
        for src, dst in m.agent.posted:
            runs = {}
            for s, d in zip(src, dst):
                i, j = (s[0] - base(1, 0)) >> 20, (d[0] - base(2, 0)) >> 20
                assert i == j and s[1] == d[1] and s[1] % token == 0 and s[2:] == (1, "VRAM") and d[2:] == (3, "VRAM")
                runs.setdefault(i, []).append([(s[0] - base(1, i)) // token, (d[0] - base(2, j)) // token, s[1] // token])
            assert all(r == runs[min(runs)] for r in runs.values()) and sorted(runs) == list(range(min(runs), max(runs) + 1))
            parts.append([min(runs), len(runs), runs[min(runs)]])
        return [parts, m.agent.notifs if self.number < 23 else None]

    def stage(self, ratios, first, end, draft):
        m = self.manager()
        m.kv_args.prefill_start_layer, m.kv_args.prefill_end_layer = first, end
        c4, c128 = ratios.count(4), ratios.count(128)
        mine = 2 * ratios[first:end].count(4) + ratios[first:end].count(128)
        _, at = m._mla_slice_ptrs_for_pp(list(range(mine)), list(range(2 * c4 + c128)), ratios)
        assert len(at) == mine
        return at

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
                    cp=[self.cp(*c) for c in cp_cases()], heads=[self.heads(c) for c in head_cases()],
                    dcp=[self.dcp(c) for c in dcp_cases()],
                    stages=[self.stage(*c) for c in stage_cases()] if self.number >= 22 else None,
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
    pairs, aux, cp, heads, dcp = ({r: v[key] for r, v in every.items()} for key in ("pairs", "aux", "cp", "heads", "dcp"))
    shard, stages = ({r: v[key] for r, v in every.items() if v[key] is not None} for key in ("shard", "stages"))
    assert all(v == next(iter(t.values())) for t in (cp, shard, stages) for v in t.values())
    rows = dict(
        pairs=unique([p, d, outcomes(pairs, k)] for k, (p, d) in enumerate(pair_cases())),
        heads=unique([c, outcomes(heads, k)] for k, c in enumerate(head_cases())),
        dcp=unique([c, outcomes(dcp, k)] for k, c in enumerate(dcp_cases())),
        stages=[[*c, next(iter(stages.values()))[k]] for k, c in enumerate(stage_cases())],
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
