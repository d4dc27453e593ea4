// The native half of the batched calls: each function does in one crossing what would
// otherwise be a crossing per descriptor, request or notification. Nothing here is linked
// against NIXL; every function it calls comes in a table of addresses.
#ifndef NIXLKV_SHIM_H
#define NIXLKV_SHIM_H

#include <stddef.h>
#include <stdint.h>

// Same order as the symbols up to symHotEnd in symbols.go.
typedef struct {
	int (*list_add)(void *, uintptr_t, size_t, uint64_t);
	int (*list_clear)(void *);
	int (*create_by_list)(void *, int, void *, void *, const char *, void **, void *);
	int (*create_by_index)(void *, int, void *, const int *, size_t, void *, const int *, size_t,
			       void **, void *);
	int (*post)(void *, void *, void *);
	int (*status)(void *, void *);
	int (*opt_create)(void **);
	int (*opt_destroy)(void *);
	int (*opt_notif)(void *, const void *, size_t);
	int (*opt_has_notif)(void *, _Bool);
	int (*opt_skip_merge)(void *, _Bool);
	int (*get_notifs)(void *, void *, void *);
	int (*notif_map_size)(void *, size_t *);
	int (*notif_map_agent)(void *, size_t, const char **);
	int (*notif_map_count)(void *, const char *, size_t *);
	int (*notif_map_get)(void *, const char *, size_t, const void **, size_t *);
	int (*notif_map_clear)(void *);
	int (*release)(void *, void *);
	int (*destroy_request)(void *);
	int (*gen_notif)(void *, const char *, const void *, size_t, void *);
} nixlkv_calls;

// Layouts of engine.Desc and engine.Run.
typedef struct { uint64_t addr, len, dev; } nixlkv_desc;
typedef struct { uint64_t addr, len, dev, stride, count; } nixlkv_run;

// nixlkv_new_calls makes a table from n addresses in its order; 0 if n is not its size or
// there is no memory. It is never freed: the library is never unloaded. The functions below
// take it as a number, because what they get from Go is checked for pointers at each call.
uintptr_t nixlkv_new_calls(const uintptr_t *addrs, size_t n);

enum { NIXLKV_HAS_NOTIF = 1, NIXLKV_NO_MERGE = 2, NIXLKV_POST = 4 };

int nixlkv_append(uintptr_t calls, uintptr_t list, const nixlkv_desc *d, size_t n, uint64_t dev_mask);
int nixlkv_append_runs(uintptr_t calls, uintptr_t list, const nixlkv_run *r, size_t n, uint64_t dev_mask);
int nixlkv_clear(uintptr_t calls, uintptr_t list);

int nixlkv_create_by_list(uintptr_t calls, uintptr_t agent, int op, uintptr_t local, uintptr_t remote,
			  uintptr_t peer, const uint8_t *notif, size_t notif_len, int flags,
			  uintptr_t *req, int *posted);
int nixlkv_create_by_index(uintptr_t calls, uintptr_t agent, int op, uintptr_t local,
			   const int32_t *local_idx, uintptr_t remote, const int32_t *remote_idx, size_t n,
			   const uint8_t *notif, size_t notif_len, int flags, uintptr_t *req, int *posted);
int nixlkv_post(uintptr_t calls, uintptr_t agent, uintptr_t req, const uint8_t *notif, size_t notif_len,
		int flags);
void nixlkv_poll(uintptr_t calls, uintptr_t agent, const uintptr_t *reqs, size_t n, int32_t *out);
int nixlkv_release(uintptr_t calls, uintptr_t agent, uintptr_t req);

int nixlkv_notify(uintptr_t calls, uintptr_t agent, uintptr_t peer, const uint8_t *msg, size_t len);
int nixlkv_drain(uintptr_t calls, uintptr_t agent, uintptr_t map, int fetch, uint8_t *buf, size_t cap,
		 size_t *need, size_t *count);

#endif
