//go:build cgo

#include "shim.h"

#include <stdlib.h>
#include <string.h>

uintptr_t nixlkv_new_calls(const uintptr_t *addrs, size_t n)
{
	nixlkv_calls *c;
	if (n * sizeof *addrs != sizeof *c || !(c = malloc(sizeof *c)))
		return 0;
	memcpy(c, addrs, sizeof *c);
	return (uintptr_t)c;
}

int nixlkv_append(uintptr_t calls, uintptr_t list, const nixlkv_desc *d, size_t n, uint64_t dev_mask)
{
	const nixlkv_calls *c = (const nixlkv_calls *)calls;
	for (size_t i = 0; i < n; i++) {
		int st = c->list_add((void *)list, d[i].addr, d[i].len, d[i].dev & dev_mask);
		if (st < 0)
			return st;
	}
	return 0;
}

int nixlkv_append_runs(uintptr_t calls, uintptr_t list, const nixlkv_run *r, size_t n, uint64_t dev_mask)
{
	const nixlkv_calls *c = (const nixlkv_calls *)calls;
	for (size_t i = 0; i < n; i++) {
		uint64_t addr = r[i].addr;
		for (uint64_t k = 0; k < r[i].count; k++, addr += r[i].stride) {
			int st = c->list_add((void *)list, addr, r[i].len, r[i].dev & dev_mask);
			if (st < 0)
				return st;
		}
	}
	return 0;
}

int nixlkv_clear(uintptr_t calls, uintptr_t list)
{
	const nixlkv_calls *c = (const nixlkv_calls *)calls;
	return c->list_clear((void *)list);
}

// NIXL copies what is in an options handle during the call that takes it
// (nixlAgent::createXferReq, makeXferReq, postXferReq), so one lives as long as its call.
static int options(const nixlkv_calls *c, const void *notif, size_t len, int flags, void **opts)
{
	*opts = NULL;
	if (!(flags & (NIXLKV_HAS_NOTIF | NIXLKV_NO_MERGE)))
		return 0;
	int st = c->opt_create(opts);
	if (st < 0)
		return st;
	if (flags & NIXLKV_HAS_NOTIF) {
		st = c->opt_notif(*opts, notif, len);
		if (st >= 0)
			st = c->opt_has_notif(*opts, 1);
	}
	if ((flags & NIXLKV_NO_MERGE) && st >= 0 && c->opt_skip_merge)
		st = c->opt_skip_merge(*opts, 1);
	if (st < 0) {
		c->opt_destroy(*opts);
		*opts = NULL;
	}
	return st;
}

static int created(const nixlkv_calls *c, uintptr_t agent, int st, void *req, void *opts, int flags,
		   uintptr_t *out, int *posted)
{
	*posted = 0;
	if (st >= 0) {
		*out = (uintptr_t)req;
		// Without options the notification given at creation is kept.
		if (flags & NIXLKV_POST)
			*posted = c->post((void *)agent, req, NULL);
	}
	if (opts)
		c->opt_destroy(opts);
	return st;
}

int nixlkv_create_by_list(uintptr_t calls, uintptr_t agent, int op, uintptr_t local, uintptr_t remote,
			  uintptr_t peer, const uint8_t *notif, size_t notif_len, int flags,
			  uintptr_t *req, int *posted)
{
	const nixlkv_calls *c = (const nixlkv_calls *)calls;
	void *opts, *r = NULL;
	int st = options(c, notif, notif_len, flags, &opts);
	if (st < 0)
		return st;
	st = c->create_by_list((void *)agent, op, (void *)local, (void *)remote, (const char *)peer, &r, opts);
	return created(c, agent, st, r, opts, flags, req, posted);
}

int nixlkv_create_by_index(uintptr_t calls, uintptr_t agent, int op, uintptr_t local,
			   const int32_t *local_idx, uintptr_t remote, const int32_t *remote_idx, size_t n,
			   const uint8_t *notif, size_t notif_len, int flags, uintptr_t *req, int *posted)
{
	const nixlkv_calls *c = (const nixlkv_calls *)calls;
	void *opts, *r = NULL;
	int st = options(c, notif, notif_len, flags, &opts);
	if (st < 0)
		return st;
	st = c->create_by_index((void *)agent, op, (void *)local, local_idx, n, (void *)remote, remote_idx, n,
				&r, opts);
	return created(c, agent, st, r, opts, flags, req, posted);
}

int nixlkv_post(uintptr_t calls, uintptr_t agent, uintptr_t req, const uint8_t *notif, size_t notif_len,
		int flags)
{
	const nixlkv_calls *c = (const nixlkv_calls *)calls;
	void *opts;
	int st = options(c, notif, notif_len, flags, &opts);
	if (st < 0)
		return st;
	st = c->post((void *)agent, (void *)req, opts);
	if (opts)
		c->opt_destroy(opts);
	return st;
}

void nixlkv_poll(uintptr_t calls, uintptr_t agent, const uintptr_t *reqs, size_t n, int32_t *out)
{
	const nixlkv_calls *c = (const nixlkv_calls *)calls;
	for (size_t i = 0; i < n; i++)
		out[i] = c->status((void *)agent, (void *)reqs[i]);
}

int nixlkv_release(uintptr_t calls, uintptr_t agent, uintptr_t req)
{
	const nixlkv_calls *c = (const nixlkv_calls *)calls;
	int st = c->release((void *)agent, (void *)req);
	return st < 0 ? st : c->destroy_request((void *)req);
}

int nixlkv_notify(uintptr_t calls, uintptr_t agent, uintptr_t peer, const uint8_t *msg, size_t len)
{
	const nixlkv_calls *c = (const nixlkv_calls *)calls;
	return c->gen_notif((void *)agent, (const char *)peer, msg, len, NULL);
}

// walk adds up the size of all records and, where buf is not NULL, writes them.
static int walk(const nixlkv_calls *c, void *map, uint8_t *buf, size_t *need, size_t *count)
{
	size_t agents = 0, at = 0, k = 0;
	int st = c->notif_map_size(map, &agents);
	for (size_t i = 0; st >= 0 && i < agents; i++) {
		const char *from = NULL;
		size_t notifs = 0;
		st = c->notif_map_agent(map, i, &from);
		if (st >= 0)
			st = c->notif_map_count(map, from, &notifs);
		size_t from_len = st >= 0 ? strlen(from) : 0;
		for (size_t j = 0; st >= 0 && j < notifs; j++) {
			const void *msg = NULL;
			size_t len = 0;
			st = c->notif_map_get(map, from, j, &msg, &len);
			if (st < 0)
				break;
			if (buf) {
				uint32_t head[2] = { (uint32_t)from_len, (uint32_t)len };
				memcpy(buf + at, head, sizeof head);
				memcpy(buf + at + sizeof head, from, from_len);
				memcpy(buf + at + sizeof head + from_len, msg, len);
			}
			at += 8 + from_len + len;
			k++;
		}
	}
	*need = at;
	*count = k;
	return st;
}

int nixlkv_drain(uintptr_t calls, uintptr_t agent, uintptr_t map, int fetch, uint8_t *buf, size_t cap,
		 size_t *need, size_t *count)
{
	const nixlkv_calls *c = (const nixlkv_calls *)calls;
	int st = 0;
	*need = *count = 0;
	if (fetch)
		st = c->get_notifs((void *)agent, (void *)map, NULL);
	if (st >= 0)
		st = walk(c, (void *)map, NULL, need, count);
	if (st < 0 || *count == 0 || *need > cap)
		return st;
	st = walk(c, (void *)map, buf, need, count);
	if (st < 0)
		return st;
	return c->notif_map_clear((void *)map);
}
