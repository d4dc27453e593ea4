"""Writes mapping.json and compat.json: what SGLang's own decode makes of a prefill's topology.

Usage: python generate.py SGLANG_SRC OUT_DIR   (SGLANG_SRC holds one folder a release)

mapping.json, one row a case; columns are named in the file. `releases` is first-last where all
of them agree; `targets` lists tp, cp, pp, dummy of each prefill rank in the order in which the
receiver asks for them; `destinations` 0 means that the release refuses the topology.

compat.json, one object a case: the reply of the bootstrap server, the decode's side, and by
release what the decode says ("" means that it accepts).
"""
import itertools
import json
import os
import subprocess
import sys

import release
from decode import HYBRID, MHA, MLA, Decode

INPUTS = ["tp", "cp", "pp", "layer_split", "sharding",
          "decode_tp", "engine_rank", "decode_cp", "decode_pp", "decode_pp_rank", "dcp", "kind", "all_cp"]


def mapping_cases():
    seen = set()

    def case(tp=1, cp=1, pp=1, layer_split=0, sharding=0, decode_tp=1, engine_rank=0, decode_cp=1,
             decode_pp=1, decode_pp_rank=0, dcp=1, kind=MHA, all_cp=0):
        row = (tp, cp, pp, layer_split, sharding, decode_tp, engine_rank, decode_cp, decode_pp, decode_pp_rank,
               dcp, kind, all_cp)
        if row not in seen:
            seen.add(row)
            yield row

    kinds = (MHA, MLA, HYBRID)
    pairs = [*itertools.product((1, 2, 4, 8), repeat=2),
             (3, 1), (1, 3), (6, 2), (2, 6), (3, 3), (16, 2), (2, 16), (12, 4)]
    for (p, d), kind, shard in itertools.product(pairs, kinds, (0, 1)):
        for rank in (0, d // 2, d - 1, 2 * d + d // 2):        # the last: a later DP group
            yield from case(tp=p, decode_tp=d, engine_rank=rank, kind=kind, sharding=shard)
    pps = [(1, 1, 0), (2, 1, 0), (4, 1, 0), (2, 2, 0), (2, 2, 1), (4, 4, 3)]
    for (p, d), kind, cp, (pp, dpp, ppr), flags in itertools.product(
            [(1, 1), (2, 2), (4, 2), (2, 4), (4, 1)], kinds, (1, 2, 4), pps, itertools.product((0, 1), repeat=3)):
        split, shard, all_cp = flags
        if cp == 1 and (split or all_cp) and pp > 2:
            continue
        yield from case(tp=p, decode_tp=d, engine_rank=d - 1, kind=kind, cp=cp, pp=pp, decode_pp=dpp,
                        decode_pp_rank=ppr, layer_split=split, sharding=shard, all_cp=all_cp)
    for (p, d), kind, cp, shard in itertools.product([(1, 1), (1, 4), (4, 4), (8, 4)], kinds, (1, 2), (0, 1)):
        yield from case(tp=p, decode_tp=d, engine_rank=d - 1, kind=kind, cp=cp, dcp=2, sharding=shard)
    for kind, cp in itertools.product(kinds, (1, 2)):
        yield from case(kind=kind, cp=cp, decode_cp=2)
        for pp, dpp in ((1, 2), (4, 2), (2, 4)):
            yield from case(kind=kind, cp=cp, pp=pp, decode_pp=dpp, decode_pp_rank=1)


def topology(**values):
    reply = dict(attn_tp_size=1, attn_cp_size=1, dp_size=1, pp_size=1, page_size=1, kv_cache_dtype="auto",
                 follow_bootstrap_room=True)
    reply.update(values)
    return reply


LAYOUT = {"num_draft_tokens": 4, "compression_ratios": [1, 2], "kv_layer_ids": [0, 1], "kv_item_lens": [64, 64],
          "state_types": ["swa", "swa"], "state_item_lens": [[8], [8]]}
COMPAT = [
    ({}, {}),
    ({"page_size": 16}, {"page_size": 16}),
    ({"page_size": 16}, {"page_size": 32}),
    ({"page_size": None}, {"page_size": 32}),
    ({"kv_cache_dtype": "fp8_e4m3"}, {"dtype": "fp8_e4m3"}),
    ({"kv_cache_dtype": "fp8_e4m3"}, {"dtype": "auto"}),
    ({"kv_cache_dtype": None}, {"dtype": "fp8_e4m3"}),
    ({"page_size": 16, "kv_cache_dtype": "fp8_e4m3"}, {}),
    ({"kv_layout": "a"}, {"kv_layout": "a"}),
    ({"kv_layout": "a"}, {"kv_layout": "b"}),
    ({"kv_layout": "a"}, {}),
    ({"kv_layout": None}, {"kv_layout": "b"}),
    ({}, {"kv_layout": "b"}),
    ({"dsv41_spec_layout": LAYOUT}, {"spec_layout": LAYOUT}),
    ({"dsv41_spec_layout": LAYOUT}, {}),
    ({}, {"spec_layout": LAYOUT}),
    ({"dsv41_spec_layout": {**LAYOUT, "num_draft_tokens": 5}}, {"spec_layout": LAYOUT}),
    ({"dsv41_spec_layout": LAYOUT, "attn_tp_size": 2}, {"spec_layout": LAYOUT, "tp": 2}),
    ({"dsv41_spec_layout": LAYOUT, "attn_tp_size": 2}, {"spec_layout": LAYOUT, "tp": 4}),
    ({"dsv41_spec_layout": LAYOUT, "attn_tp_size": 2, "attn_cp_size": 2}, {"spec_layout": LAYOUT, "tp": 4}),
    ({"dsv41_spec_layout": LAYOUT, "attn_tp_size": 2, "attn_cp_size": 2},
     {"spec_layout": LAYOUT, "tp": 4, "kind": MLA}),
    ({"dsv41_spec_layout": LAYOUT, "attn_tp_size": 2, "attn_cp_size": 2},
     {"spec_layout": LAYOUT, "tp": 8, "kind": MLA}),
    ({"decode_allocation_policy": "early"}, {}),
    ({"decode_allocation_policy": "prefill_complete"}, {}),
    ({}, {"policy": "prefill_complete"}),
    ({"decode_allocation_policy": "prefill_complete"}, {"policy": "prefill_complete"}),
    ({"decode_allocation_policy": "prefill_complete", "attn_tp_size": 2}, {"policy": "prefill_complete", "tp": 2}),
    ({"decode_allocation_policy": "prefill_complete", "pp_size": 2}, {"policy": "prefill_complete"}),
    ({"attn_tp_size": 2}, {"tp": 4, "state_types": ["minimax_index_k"]}),
    ({"attn_tp_size": 2}, {"tp": 2, "state_types": ["minimax_index_k"]}),
    ({"attn_tp_size": 2}, {"tp": 4, "state_types": ["block_scale"]}),
    ({"attn_tp_size": 2}, {"tp": 4, "state_types": ["swa", "block_scale_swa"]}),
    ({"attn_tp_size": 2}, {"tp": 2, "state_types": ["block_scale"]}),
    ({"attn_tp_size": 2}, {"tp": 4, "kind": MLA, "state_types": ["block_scale"]}),
    ({"attn_tp_size": 2}, {"tp": 4, "kind": HYBRID, "state_types": ["block_scale"]}),
    ({"attn_cp_size": 2}, {"tp": 2, "dcp": 2, "kind": MLA}),
    ({}, {"tp": 2, "dcp": 2}),
    ({}, {"tp": 2, "dcp": 2, "kind": MLA}),
    ({"enable_kv_cache_sharding": True}, {"dcp": 2, "kind": MLA}),
]


class Reply:
    status_code, text = 200, ""

    def __init__(self, body):
        self.body = body

    def json(self):
        return json.loads(self.body)


def answer(decode, reply, config):
    """Gives (receiver, "") or (None, why the decode refuses)."""
    conn = decode.conn
    conn.requests.get = lambda *a, **kw: Reply(json.dumps(reply))
    decode.receiver_class._get_bootstrap_info_from_server = lambda self, dp, cp, tp, pp: {
        "rank_ip": "", "rank_port": 0, "cp": cp, "tp": tp, "pp": pp}
    try:
        manager = decode.manager(**config)
    except ValueError as e:                     # a state type that this release does not have
        return None, f"unknown: {e}"
    try:
        if not manager.try_ensure_parallel_info("prefill:1"):
            return None, "refuses the reply"
        receiver, failure = decode.receive(manager, "prefill:1")
    except (AssertionError, RuntimeError) as e:
        return None, str(e) or type(e).__name__
    return receiver, failure or ""


def one_release(src):
    """Answers every case; runs in a process of its own."""
    decode = Decode(release.load(src))
    rows = []
    for row in mapping_cases():
        c = dict(zip(INPUTS, row))
        reply = topology(attn_tp_size=c["tp"], attn_cp_size=c["cp"], pp_size=c["pp"],
                         enable_dsa_cache_layer_split=bool(c["layer_split"]))
        if c["sharding"]:
            reply["enable_kv_cache_sharding"] = True
        receiver, why = answer(decode, reply, dict(
            tp=c["decode_tp"], rank=c["engine_rank"], cp=c["decode_cp"], pp=c["decode_pp"],
            pp_rank=c["decode_pp_rank"], dcp=c["dcp"], kind=c["kind"], all_cp=bool(c["all_cp"])))
        if why == "refuses the reply":          # it does not know sharding: no case for this release
            rows.append(None)
        elif why:
            rows.append([0, 0, []])
        else:
            targets = [[b["tp"], b["cp"], b["pp"], int(b["is_dummy"])] for b in receiver.bootstrap_infos]
            rows.append([receiver.required_dst_info_num, receiver.required_prefill_response_num,
                         list(itertools.chain(*targets))])
    compat = [answer(decode, topology(**t), dict(d))[1] for t, d in COMPAT]
    json.dump({"rows": rows, "compat": compat}, sys.stdout)


def main(root, out):
    answers = {}
    for name, src in release.releases(root):
        done = subprocess.run([sys.executable, os.path.abspath(__file__), "--one", src], check=True,
                              stdout=subprocess.PIPE, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
        answers[name] = json.loads(done.stdout)
    lines = []
    for i, row in enumerate(mapping_cases()):
        runs = []                               # consecutive releases that agree
        for name, a in answers.items():
            result = a["rows"][i]
            if result is None:
                continue
            if runs and runs[-1][2] == result:
                runs[-1][1] = name
            else:
                runs.append([name, name, result])
        for first, last, result in runs:
            lines.append(json.dumps([f"{first}-{last}", *row, *result], separators=(",", ":")))
    columns = json.dumps(["releases", *INPUTS, "destinations", "responses", "targets"], separators=(",", ":"))
    with open(os.path.join(out, "mapping.json"), "w") as f:
        f.write('{"columns":' + columns + ',"cases":[\n' + ",\n".join(lines) + "\n]}\n")
    with open(os.path.join(out, "compat.json"), "w") as f:
        json.dump([{"reply": topology(**t), "decode": d, "says": {n: a["compat"][i] for n, a in answers.items()}}
                   for i, (t, d) in enumerate(COMPAT)], f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        one_release(sys.argv[2])
    else:
        main(sys.argv[1], sys.argv[2])
