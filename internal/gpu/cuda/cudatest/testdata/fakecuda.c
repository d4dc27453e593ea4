/*
 * A driver library for tests, with the functions of the CUDA driver API that this module
 * calls. It has no GPU: device memory is malloc'ed. What it is strict about is what a
 * caller can get wrong: a context must be current on the calling thread, and everything
 * must be given back. Macros choose what it pretends, see Build.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef DEVICES
#define DEVICES 2
#endif
#ifndef INIT_RESULT
#define INIT_RESULT 0
#endif
#ifndef MIG
#define MIG 0 /* devices below this ordinal are MIG instances */
#endif
#ifndef BAD_DEVICE
#define BAD_DEVICE -1 /* cannot be opened */
#endif
#ifndef NAMELESS_DEVICE
#define NAMELESS_DEVICE -1 /* does not tell its name */
#endif

#ifndef UUID_V2_RESULT
#define UUID_V2_RESULT 0
#endif

#define MEMORY_BYTES (1ull << 30)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialised, allocations, retained[DEVICES + 1];
static __thread int stack[16], depth; /* contexts: 1 + device */

static int current(void) { return depth > 0 ? stack[depth - 1] : 0; }

static int usable(void) {
	if (!initialised)
		return 3; /* CUDA_ERROR_NOT_INITIALIZED */
	pthread_mutex_lock(&lock);
	int ok = current() && retained[current() - 1] > 0;
	pthread_mutex_unlock(&lock);
	return ok ? 0 : 201; /* CUDA_ERROR_INVALID_CONTEXT */
}

int cuInit(unsigned flags) {
	if (flags != 0)
		return 1;
	initialised = INIT_RESULT == 0;
	return INIT_RESULT;
}

int cuGetErrorName(int code, const char **name) {
	switch (code) {
	case 1: *name = "CUDA_ERROR_INVALID_VALUE"; return 0;
	case 2: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return 0;
	case 3: *name = "CUDA_ERROR_NOT_INITIALIZED"; return 0;
	case 100: *name = "CUDA_ERROR_NO_DEVICE"; return 0;
	case 101: *name = "CUDA_ERROR_INVALID_DEVICE"; return 0;
	case 201: *name = "CUDA_ERROR_INVALID_CONTEXT"; return 0;
	}
	*name = NULL;
	return 1;
}

#ifndef NO_COUNT
int cuDeviceGetCount(int *n) {
	*n = DEVICES;
	return initialised ? 0 : 3;
}
#endif

int cuDeviceGet(int *dev, int ordinal) {
	if (!initialised)
		return 3;
	if (ordinal < 0 || ordinal >= DEVICES || ordinal == BAD_DEVICE)
		return 101;
	*dev = ordinal;
	return 0;
}

static int text(char *buf, int size, const char *format, int dev) {
	return snprintf(buf, size, format, dev) < size ? 0 : 1;
}

int cuDeviceGetName(char *buf, int size, int dev) {
	return dev == NAMELESS_DEVICE ? 999 : text(buf, size, "Fake GPU %d", dev);
}

int cuDeviceGetPCIBusId(char *buf, int size, int dev) { return text(buf, size, "0000:%02X:00.0", 0xA0 + dev); }

int cuDeviceTotalMem_v2(size_t *bytes, int dev) {
	*bytes = MEMORY_BYTES + dev;
	return 0;
}

#ifndef NO_UUID_V1
int cuDeviceGetUuid(unsigned char *uuid, int dev) {
	memset(uuid, 0x10 + dev, 16);
	return 0;
}
#endif

#ifndef NO_UUID_V2
int cuDeviceGetUuid_v2(unsigned char *uuid, int dev) {
	memset(uuid, (dev < MIG ? 0xE0 : 0x10) + dev, 16);
	return UUID_V2_RESULT;
}
#endif

int cuDevicePrimaryCtxRetain(void **ctx, int dev) {
	if (dev < 0 || dev >= DEVICES)
		return 101;
	pthread_mutex_lock(&lock);
	retained[dev]++;
	pthread_mutex_unlock(&lock);
	*ctx = (void *)(size_t)(1 + dev);
	return 0;
}

int cuDevicePrimaryCtxRelease_v2(int dev) {
	pthread_mutex_lock(&lock);
	int ok = retained[dev] > 0;
	retained[dev] -= ok;
	pthread_mutex_unlock(&lock);
	return ok ? 0 : 201;
}

int cuCtxPushCurrent_v2(void *ctx) {
	if (depth == sizeof stack / sizeof *stack)
		return 2;
	stack[depth++] = (int)(size_t)ctx;
	return 0;
}

int cuCtxPopCurrent_v2(void **ctx) {
	if (depth == 0)
		return 201;
	*ctx = (void *)(size_t)stack[--depth];
	return 0;
}

int cuCtxSetCurrent(void *ctx) {
	if (depth == 0)
		return cuCtxPushCurrent_v2(ctx);
	stack[depth - 1] = (int)(size_t)ctx;
	return 0;
}

int cuCtxSynchronize(void) { return usable(); }

#ifndef NO_ALLOC
int cuMemAlloc_v2(unsigned long long *addr, size_t bytes) {
	int bad = usable();
	if (bad)
		return bad;
	if (bytes == 0)
		return 1;
	if (bytes > MEMORY_BYTES)
		return 2;
	*addr = (unsigned long long)(size_t)malloc(bytes);
	pthread_mutex_lock(&lock);
	allocations++;
	pthread_mutex_unlock(&lock);
	return 0;
}
#endif

int cuMemFree_v2(unsigned long long addr) {
	int bad = usable();
	if (bad)
		return bad;
	free((void *)(size_t)addr);
	pthread_mutex_lock(&lock);
	allocations--;
	pthread_mutex_unlock(&lock);
	return 0;
}

int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes) {
	int bad = usable();
	if (!bad)
		memcpy((void *)(size_t)to, from, bytes);
	return bad;
}

int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t bytes) {
	int bad = usable();
	if (!bad)
		memcpy(to, (void *)(size_t)from, bytes);
	return bad;
}

/* What is held: allocations, primary contexts of a device, contexts on this thread's stack. */
int fakeAllocations(void) {
	pthread_mutex_lock(&lock);
	int n = allocations;
	pthread_mutex_unlock(&lock);
	return n;
}

int fakeRetained(int dev) {
	pthread_mutex_lock(&lock);
	int n = retained[dev];
	pthread_mutex_unlock(&lock);
	return n;
}

int fakeDepth(void) { return depth; }
