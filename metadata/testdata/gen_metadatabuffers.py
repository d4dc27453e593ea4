#!/usr/bin/env python3
"""Writes the golden vectors of package metadata from SGLang's own code.

    gen_metadatabuffers.py RELEASE SGLANG_SRC OUT.json
    gen_metadatabuffers.py 0.5.23 /path/to/unpacked/wheel metadatabuffers-0.5.23.json

SGLANG_SRC is the folder that holds sglang/ (an unpacked wheel of that release). Needs
numpy and no torch. Run by hand; the Go tests read the JSON only.

Real: sglang/srt/disaggregation/utils.py (class MetadataBuffers), sglang/srt/environ.py, and
DecodeTransferQueue._commit_transfer_to_req, cut out of sglang/srt/disaggregation/decode.py:
what a decode takes out of a slot. Everything else that they import is a stand-in, torch a
thin layer over numpy.

What a file holds, for every set of options:

  buffers   name, dtype, elements and bytes of a slot, in the order of get_buf_infos
  empty     a slot as the constructor leaves it
  used      a slot after a request that brings everything. Checked here: a later request
            on that slot changes the bytes that are "defined" and no others, and the decode
            makes the same of it as on an untouched slot
  cases     requests; of each:
    record    what the request brings (floats as their bits)
    want      what both sides know about the request, and so what the decode reads
    slot      the slot after set_buf (and set_kv_checksum) on an untouched slot
    defined   how many leading bytes of each buffer set_buf determines whatever was there
              before; found by running it over two different backgrounds
    get       what get_buf gives for "slot"
    checksum  what get_kv_checksum gives for "slot"
    commit    what the decode's _commit_transfer_to_req makes of "slot"
    refused   the name of the exception, for a request that set_buf does not take
  rooms     what the decode says to a slot with no room, and to one with another room

Bytes are hex with trailing zero bytes cut off.
"""
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
import types
from http import HTTPStatus
from unittest.mock import MagicMock

import numpy as np

from torch_numpy import DTYPES, Tensor, torch

RELEASE, SRC, OUT = sys.argv[1:4]
MINOR = int(RELEASE.split(".")[2])


# ---- SGLang's modules --------------------------------------------------------------------

REAL = {"sglang.srt.environ", "sglang.srt.disaggregation.utils",
        "sglang.srt.disaggregation.base", "sglang.srt.disaggregation.base.conn"}


class Auto(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=f"{self.__name__}.{name}"))
        return self.__dict__[name]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ("sglang", "torch", "triton"):
            return None
        if name in REAL:
            p = os.path.join(SRC, *name.split("."))
            pkg = os.path.isdir(p)
            f = os.path.join(p, "__init__.py") if pkg else p + ".py"
            return importlib.util.spec_from_file_location(
                name, f, submodule_search_locations=[p] if pkg else None)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return torch if spec.name == "torch" else Auto(spec.name)

    def exec_module(self, mod):
        if mod.__name__ == "sglang.srt.utils":
            mod.is_npu = mod.is_hip = mod.is_cuda = lambda: False


sys.meta_path.insert(0, Finder())
logging.Logger.warning_once = logging.Logger.warning
logging.Logger.info_once = logging.Logger.info
logging.disable(logging.CRITICAL)

import sglang.srt.disaggregation.utils as du  # noqa: E402


def cut_out(path, cls, func, names):
    """The function cls.func of a source file, without importing the file."""
    tree = ast.parse(open(path).read())
    c = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls)
    f = next(n for n in c.body if isinstance(n, ast.FunctionDef) and n.name == func)
    head = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module(head + [f], []), path, "exec"), names)
    return names[func]


ABORTED = []
COMMIT = cut_out(
    os.path.join(SRC, "sglang/srt/disaggregation/decode.py"),
    "DecodeTransferQueue", "_commit_transfer_to_req",
    dict(torch=torch, HTTPStatus=HTTPStatus, logger=logging.getLogger("decode"),
         _is_fake_transfer=lambda *a: False,
         prepare_abort=lambda req, msg, status_code=None: ABORTED.append(msg)))


# ---- requests ----------------------------------------------------------------------------

def f32(bits):
    return np.array(bits, np.uint32).view(np.float32)


def bits(x):
    return np.array(x, np.float32).view(np.uint32).tolist()


class Req:
    """The attributes of a scheduler request that set_buf reads."""

    def __init__(self, slot, rec):
        self.metadata_buffer_index = slot
        self.bootstrap_room = rec["room"]
        self.output_ids = [rec["output_id"]]
        c = rec["cached"]
        self.cached_tokens, self.cached_tokens_device = c[0], c[1]
        self.cached_tokens_host, self.cached_tokens_storage = c[2], c[3]
        self.get_mm_token_counts = lambda: tuple(c[4:7])
        self.multimodal_inputs = types.SimpleNamespace(
            compute_mm_token_counts=self.get_mm_token_counts) if any(c[4:7]) else None

        lp, top = rec.get("logprob"), rec.get("top")
        self.return_logprob = lp is not None
        if lp is not None:
            val = lambda b: float(f32(b))
            self.logprob = types.SimpleNamespace(
                output_token_logprobs_val=[val(lp[0])], output_token_logprobs_idx=[lp[1]],
                output_top_logprobs_val=[[val(v) for v, _ in top]] if top else [],
                output_top_logprobs_idx=[[i for _, i in top]] if top else [])

        mask = rec.get("mask")
        self.return_sampling_mask = mask is not None
        if mask is not None:
            lps = f32(mask["logprobs"])
            if MINOR >= 21:
                chunk = types.SimpleNamespace(
                    token_ids=np.array(mask["tokens"], np.int32), logprobs=lps)
                self.sampling_mask_rows = types.SimpleNamespace(view=lambda: chunk)
            elif mask.get("absent"):
                self.output_token_sampling_mask = [None]
                self.output_token_sampling_logprobs = [None]
            else:
                self.output_token_sampling_mask = [mask["tokens"]]
                self.output_token_sampling_logprobs = [float(lps[0])]

        draft = rec.get("draft")
        self.hidden_states_tensor = None
        self.output_dsa_topk_indices = None
        if draft is not None:
            t = lambda v, d: Tensor(np.array(v, DTYPES[d].np), DTYPES[d])
            self.output_topk_p = Tensor(f32([b for b, _ in draft["topk"]]), DTYPES["float32"])
            self.output_topk_index = t([i for _, i in draft["topk"]], "int64")
            d = DTYPES[draft["dtype"]]
            self.hidden_states_tensor = Tensor(
                np.frombuffer(bytes.fromhex(draft["hidden"]), d.np), d)
            if draft["dsa"] is not None:
                self.output_dsa_topk_indices = t(draft["dsa"], "int32")


def build(opts):
    """SGLang's MetadataBuffers of eight slots, as its scheduler would build it."""
    m = opts.get("sampling_mask", 0)
    kw = dict(hidden_size=opts["hidden_size"], hidden_states_dtype=DTYPES[opts["hidden_dtype"]],
              output_dsa_topk_indices_dim=opts.get("dsa_topk", 0))
    if MINOR >= 20:
        os.environ["SGLANG_ENABLE_DISAGG_SAMPLING_MASK"] = "1" if m else "0"
        kw["max_sampling_mask_tokens"] = m or 4096
    else:
        os.environ["SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS"] = str(m)
    if MINOR >= 21:
        kw["kv_checksum_enabled"] = opts.get("checksums", False)
    return du.MetadataBuffers(8, **kw)


def tensors(mb):
    """Name and tensor of each buffer, in the order in which they are registered."""
    byptr = {t.data_ptr(): (n, t) for n, t in vars(mb).items() if isinstance(t, Tensor)}
    ptrs, lens, items = mb.get_buf_infos()
    out = [byptr[p] for p in ptrs]
    assert [t.nbytes for _, t in out] == lens and [t.nbytes // 8 for _, t in out] == items
    return out


def row(mb, slot):
    return [t.a[slot].tobytes() for _, t in tensors(mb)]


def put(mb, slot, rec):
    req = Req(slot, rec)
    if rec.get("checksum") is not None:  # PrefillScheduler.send_kv_chunk: before set_buf
        mb.set_kv_checksum(req, *rec["checksum"][:2 if MINOR >= 23 else 1])
    mb.set_buf(req)


def short(b):
    return b.rstrip(b"\0").hex()


def defined(opts, rec):
    mb = build(opts)
    for slot, byte in ((0, 0x55), (1, 0xAA)):
        for _, t in tensors(mb):
            t.a[slot].view(np.uint8)[...] = byte
        put(mb, slot, rec)
    counts = []
    for a, b in zip(row(mb, 0), row(mb, 1)):
        same = [x == y for x, y in zip(a, b)]
        n = sum(same)
        assert all(same[:n]), "set_buf determines more than a prefix"
        counts.append(n)
    return counts


def got(t):
    """A tensor of get_buf; floats as bits, trailing zeros cut off, hidden states as hex."""
    if t is None:
        return None
    if t.dtype.name in ("float16", "bfloat16"):
        return [t.dtype.name, t.a.size, short(t.a.tobytes())]
    v = (t.a.view(np.uint32) if t.dtype.name == "float32" else t.a).tolist()
    while v and v[-1] == 0:
        v.pop()
    return [t.dtype.name, t.a.size, v]


def commit(mb, slot, room, want):
    """What SGLang's decode takes out of a slot, in the form of a record."""
    lists = types.SimpleNamespace
    rows = []
    req = lists(
        rid="r", bootstrap_room=room, output_ids=[], return_logprob=want["logprob"],
        logprob=lists(top_logprobs_num=want["top"], token_ids_logprob=None,
                      output_token_logprobs_val=[], output_token_logprobs_idx=[],
                      output_top_logprobs_val=[], output_top_logprobs_idx=[]),
        return_sampling_mask=want["mask"] != "", sampling_logprobs_mode=want["mask"],
        output_token_sampling_mask=[], output_token_sampling_logprobs=[],
        sampling_mask_rows=lists(append=lambda t, v: rows.append((t, v))),
        pd_rebootstrap_forced_output_id=None, time_stats=MagicMock())
    me = lists(
        metadata_buffers=mb, _commit_hicache_local_restore_to_req=lambda d: None,
        _kv_checksum_comparable=lambda s: True,
        spec_algorithm=lists(is_none=lambda: not want["draft"]),
        scheduler=lists(kv_checksum_computer=getattr(mb, "kv_checksum", None),
                        server_args=None, batch_result_processor=MagicMock()))
    ABORTED.clear()
    COMMIT(me, lists(metadata_buffer_index=slot, req=req, is_rebootstrap=False, kv_receiver=MagicMock()))
    if ABORTED:
        return {"aborted": ABORTED[0]}
    out = dict(room=room, output_id=req.output_ids[0], cached=[
        req.cached_tokens, req.cached_tokens_device, req.cached_tokens_host,
        req.cached_tokens_storage, req.mm_image_tokens, req.mm_audio_tokens, req.mm_video_tokens])
    if want["logprob"]:
        lp = req.logprob
        out["logprob"] = [bits(lp.output_token_logprobs_val[0]), lp.output_token_logprobs_idx[0]]
        out["top"] = [[bits(v), i] for v, i in zip(
            lp.output_top_logprobs_val[0], lp.output_top_logprobs_idx[0], strict=True)]
    if rows:
        out["mask"] = dict(tokens=rows[0][0].tolist(), logprobs=bits(rows[0][1]))
    elif want["mask"]:
        m, v = req.output_token_sampling_mask[0], req.output_token_sampling_logprobs[0]
        out["mask"] = dict(absent=True, tokens=[], logprobs=[]) if m is None else \
            dict(tokens=m, logprobs=[bits(v)])
    if want["draft"]:
        k = want["topk"]  # build_eagle_disagg_draft_input takes the first num_states
        out["draft"] = dict(
            topk=[[b, i] for b, i in zip(req.output_topk_p.a[:k].view(np.uint32).tolist(),
                                         req.output_topk_index.a[:k].tolist())],
            hidden=req.hidden_states_tensor.a.tobytes().hex(),
            dsa=None if req.output_dsa_topk_indices is None else req.output_dsa_topk_indices.tolist())
    return out


# ---- what is asked -----------------------------------------------------------------------

rng = np.random.default_rng(20)
ROOM = iter(range(5_000_000_001, 6_000_000_000, 7919))
NAN, SNAN, NINF = 0x7FC12345, 0x7F812345, 0xFF800000


def lps(n):
    return bits(-rng.exponential(3, n).astype(np.float32))


def base(**kw):
    c = kw.pop("cached", [17, 9, 5, 3, 0, 0, 0])
    return dict(room=kw.pop("room", None) or next(ROOM), output_id=int(rng.integers(1, 150_000)), cached=c, **kw)


def tops(n):
    return [[b, int(i)] for b, i in zip(lps(n), rng.integers(0, 150_000, n))]


def ids(n):
    return rng.integers(0, 150_000, n).tolist()


def drafted(opts, k, dsa=True, size=None, dsa_len=None):
    d = opts.get("dsa_topk", 0)
    n = (size or opts["hidden_size"]) * DTYPES[opts["hidden_dtype"]].np.itemsize
    idx = rng.integers(0, 4000, dsa_len or d)
    idx[len(idx) * 3 // 4:] = -1  # fewer keys than top-k: the rest is -1
    return dict(topk=[[b, int(i)] for b, i in zip(bits(rng.random(k, np.float32)), rng.integers(0, 150_000, k))],
                hidden=rng.bytes(n).hex(), dtype=opts["hidden_dtype"],
                dsa=idx.tolist() if d and dsa else None)


def cases(opts):
    m, d, ck = opts.get("sampling_mask", 0), opts.get("dsa_topk", 0), opts.get("checksums", False)
    spec = opts["hidden_dtype"] != "float32" or opts["hidden_size"] != 16
    yield "first token", base()
    yield "nothing cached, largest room", base(cached=[0] * 7, room=2**63 - 1)
    yield "multimodal", base(cached=[2**31 - 1, 1, 2, 3, 1024, 77, 8000])
    yield "logprob", base(logprob=[lps(1)[0], 7])
    yield "top 5", base(logprob=[lps(1)[0], 7], top=tops(5))
    yield "logprob not a number", base(logprob=[NAN, 9], top=[[NINF, 1], [NAN, 2], [0x80000000, 0]])
    if not m and not d and not ck:
        yield "top 128", base(logprob=[lps(1)[0], 7], top=tops(128))
        yield "top 129", base(logprob=[lps(1)[0], 7], top=tops(129))
        yield "mask without buffers", base(mask=dict(tokens=ids(3), logprobs=lps(1)))
    if m:
        yield "mask", base(mask=dict(tokens=ids(5), logprobs=lps(1)))
        yield "mask of all tokens", base(mask=dict(tokens=ids(m), logprobs=lps(1)))
        yield "mask of no token", base(mask=dict(tokens=[], logprobs=lps(1)))
        yield "mask too long", base(mask=dict(tokens=ids(m + 1), logprobs=lps(1)))
        if MINOR >= 21:
            yield "mask, support", base(mask=dict(tokens=ids(6), logprobs=lps(6)))
            yield "mask of all tokens, support", base(mask=dict(tokens=ids(m), logprobs=lps(m)))
        else:
            yield "mask absent", base(mask=dict(absent=True, tokens=[], logprobs=[]))
    if spec:
        yield "draft", base(draft=drafted(opts, 4))
        yield "draft, one token", base(draft=drafted(opts, 1))
        wide = drafted(opts, 16)
        wide["topk"][3] = [SNAN, -1]
        yield "draft, 16 tokens", base(draft=wide)
        yield "draft, 17 tokens", base(draft=drafted(opts, 17))
        yield "draft, other width", base(draft=drafted(opts, 4, size=opts["hidden_size"] + 1))
        if d:
            yield "draft, no DSA top-k", base(draft=drafted(opts, 4, dsa=False))
            yield "draft, DSA of other width", base(draft=drafted(opts, 4, dsa_len=d - 1))
    if ck:
        yield "checksum", base(checksum=[0x9ABCDEF1, 0x7EDCBA9876543211 if MINOR >= 23 else 0])
        yield "no checksum", base(checksum=[0, 0])
    if m or d or ck:
        yield "everything", rich(opts)


def rich(opts):
    r = base(cached=[101, 102, 103, 104, 105, 106, 107], logprob=[lps(1)[0], 11], top=tops(20))
    m = opts.get("sampling_mask", 0)
    if m:
        r["mask"] = dict(tokens=ids(m - 1), logprobs=lps(m - 1 if MINOR >= 21 else 1))
    r["draft"] = drafted(opts, 16)
    if opts.get("checksums"):
        r["checksum"] = [0x12345678, 0x1111111111111111 if MINOR >= 23 else 0]
    return r


def wanted(rec):
    mask, draft = rec.get("mask"), rec.get("draft")
    mode = ""
    if mask is not None:
        mode = "support" if len(mask["logprobs"]) > 1 else "selected"
    return dict(logprob=rec.get("logprob") is not None, top=len(rec.get("top") or []), mask=mode,
                draft=draft is not None, topk=len(draft["topk"]) if draft else 0)


SETS = [
    ("plain", dict(hidden_size=16, hidden_dtype="float32")),
    ("draft bfloat16", dict(hidden_size=40, hidden_dtype="bfloat16")),
    ("draft float32, DSA", dict(hidden_size=12, hidden_dtype="float32", dsa_topk=24)),
    ("masks", dict(hidden_size=16, hidden_dtype="float32", sampling_mask=20)),
    ("masks, draft float16, DSA", dict(hidden_size=24, hidden_dtype="float16", sampling_mask=20, dsa_topk=32)),
]
if MINOR >= 21:
    SETS += [
        ("checksums", dict(hidden_size=16, hidden_dtype="float32", checksums=True)),
        ("all", dict(hidden_size=40, hidden_dtype="bfloat16", sampling_mask=20, dsa_topk=24, checksums=True)),
    ]
SIZES = [  # as served; only the table of buffers
    ("7168 bfloat16, DSA 2048", dict(hidden_size=7168, hidden_dtype="bfloat16", dsa_topk=2048)),
    ("4096 float16, masks 4096", dict(hidden_size=4096, hidden_dtype="float16", sampling_mask=4096)),
]


def run_case(opts, used, name, rec):
    mb = build(opts)
    c = dict(name=name, record=rec, want=wanted(rec))
    try:
        put(mb, 3, rec)
    except Exception as e:
        c["refused"] = type(e).__name__
        return c
    plain = row(mb, 3)
    c["slot"] = [short(b) for b in plain]
    c["defined"] = defined(opts, rec)
    put(mb, 5, used)
    before = row(mb, 5)
    put(mb, 5, rec)
    assert row(mb, 5) == [a[:n] + b[n:] for a, b, n in zip(plain, before, c["defined"])], name
    c["get"] = [got(t) for t in mb.get_buf(3)]
    if opts.get("checksums"):
        v = mb.get_kv_checksum(3)
        c["checksum"] = list(v) if MINOR >= 23 else [v, 0]
    c["commit"] = commit(mb, 3, rec["room"], c["want"])
    assert c["commit"] == commit(mb, 5, rec["room"], c["want"]), name
    return c


def run_set(name, opts, with_cases):
    mb = build(opts)
    s = dict(name=name, options=opts,
             buffers=[[n, t.dtype.name, t.a.shape[1], t.a[0].nbytes] for n, t in tensors(mb)],
             empty=[short(b) for b in row(mb, 0)], cases=[], rooms=[])
    if not with_cases:
        s["empty"] = []
        return s
    used = rich(opts)
    put(mb, 4, used)
    s["used"] = [short(b) for b in row(mb, 4)]
    s["cases"] = [run_case(opts, used, n, r) for n, r in cases(opts)]
    rec = base(room=77)
    put(mb, 1, rec)
    for slot, room in ((0, 77), (1, 78), (1, 77)):
        res = commit(mb, slot, room, wanted(rec))
        s["rooms"].append(dict(written=slot == 1, holds=77 * (slot == 1), asked=room,
                               aborted=res.get("aborted", "")))
    if MINOR >= 23:  # releases before write the room alone: bootstrap_room[idx] = 0
        put(mb, 2, used)
        mb.clear_slot(2)
        s["cleared"] = [short(b) for b in row(mb, 2)]
    return s


doc = dict(release=RELEASE, sets=[run_set(n, o, True) for n, o in SETS] + [run_set(n, o, False) for n, o in SIZES])
with open(OUT, "w") as f:
    # One case a line: compact, and a changed case is one changed line.
    f.write('{"release":%s,"sets":[' % json.dumps(doc["release"]))
    for i, s in enumerate(doc["sets"]):
        cs = s.pop("cases")
        f.write(",\n" if i else "\n")
        f.write(json.dumps(s, separators=(",", ":"))[:-1] + ',"cases":[')
        f.write(",".join("\n" + json.dumps(c, separators=(",", ":")) for c in cs) + "]}")
    f.write("\n]}\n")
